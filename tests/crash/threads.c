/* threads.c -- threads of one process on one segment, for the thread sanitizer: some share a handle, some
 * have their own, one only looks.
 *
 *   threads ROUNDS [look]   `look`: with a thread that reads without the lock. Copies that are validated by a
 *                           number read before and after are races to the sanitizer, on purpose. */
#include <pthread.h>
#include <string.h>
#include <time.h>
#include "world.h"

/* The sanitizer of clang 14 does not know pthread_mutex_clocklock, and would see no lock at all. It is built
 * with -Dpthread_mutex_clocklock=lock_that_is_seen. */
#ifdef pthread_mutex_clocklock
int lock_that_is_seen(pthread_mutex_t *m, clockid_t clock, const struct timespec *until)
{
    struct timespec now, wall;
    clock_gettime(clock, &now);
    clock_gettime(CLOCK_REALTIME, &wall);
    wall.tv_sec += until->tv_sec - now.tv_sec + 1;
    return pthread_mutex_timedlock(m, &wall);
}
#endif

enum { THREADS = 4, KEYS = 24 };
static uint32_t rounds;
static shmc *shared;
static bool stop;

static void call(shmc *h, uint64_t *s, shmc_owner *o, shmc_owner *l)
{
    uint64_t k[4];
    for (int i = 0; i < 4; i++) k[i] = 1 + rnd(s) % KEYS;
    const shmc_keys one = {.data = (const uint8_t *)k, .n = 1, .klen = 8}, four = {.data = (const uint8_t *)k, .n = 4, .klen = 8};
    shmc_part p;
    uint8_t meta[16] = {0}, out[4];
    uint32_t n, cursor = 0;
    uint64_t removed = 0;
    shmc_reap_report report;
    int rc = 0;
    switch (rnd(s) % 12) {
    case 0: case 1: case 2:
        rc = shmc_alloc(h, W.one, (1 + rnd(s) % 8) * GRAN, meta, 16, 1, 0, &o, &p, &n);
        if (rc == SHMC_OK) rc = shmc_put(h, W.one, &one, &o, 0, NULL, out);
        break;
    case 3: case 4: rc = shmc_get(h, W.one, &one, 0, &o, &p); break;
    case 5: rc = shmc_lookup(h, W.one, &four, SHMC_F_PIN | SHMC_F_TOUCH, 0, l, &n); break;
    case 6: rc = shmc_pin(h, W.one, &four, 0, out); if (rc >= 0) rc = shmc_unpin(h, W.one, &four, out); break;
    case 7: rc = shmc_remove(h, W.one, &one, out); break;
    case 8: rc = shmc_touch(h, W.one, &four); break;
    case 9: rc = shmc_contains(h, W.one, &four, -1, out); break;
    case 10: rc = rnd(s) % 16 ? shmc_step(h) : shmc_clear(h, W.one, &cursor, &removed); break;
    case 11: rc = rnd(s) % 16 ? shmc_reap(h, &report) : shmc_bump(h, W.two, &n); break;
    }
    must(rc >= 0 || rc == SHMC_E_PUBLISHED);
    must(shmc_release(h, &o, 1) >= 0 && shmc_release(h, &l, 1) >= 0);
}

static void *work(void *number)
{
    uint64_t s = (uint64_t)(uintptr_t)number * 7919;
    bool own = (uintptr_t)number % 2;
    shmc *h = own ? shmc_new(W.base, W.size, 20 * SECOND) : shared;
    uint32_t dropped;
    if (own) same(shmc_attach(h, 0, "thread"), SHMC_OK);
    shmc_owner *o = shmc_owner_new(h, 1), *l = shmc_owner_new(h, 4);
    for (uint32_t i = 0; i < rounds; i++) call(h, &s, o, l);
    shmc_owner_free(o);
    shmc_owner_free(l);
    if (own) { same(shmc_detach(h, SECOND, &dropped), SHMC_OK); shmc_free(h); }
    return NULL;
}

static void *look(void *unused)
{
    (void)unused;
    static shmc_chunk_info k[32];
    static shmc_event e[32];
    shmc_stats st;
    shmc_lock_info lock;
    uint32_t n, at;
    uint64_t since = 0, lost;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        same(shmc_stats_read(W.base, W.size, &st), SHMC_OK);
        if (st.exact) must(st.used + st.free == st.ready);
        same(shmc_peek_lock(W.base, W.size, &lock), SHMC_OK);
        same(shmc_events_read(W.base, W.size, since, e, 32, &n, &since, &lost), SHMC_OK);
        for (at = 0; shmc_peek_chunks(W.base, W.size, &at, k, 32, &n) == SHMC_MORE;) {}
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t t[THREADS], looker;
    bool looks = argc > 2 && !strcmp(argv[2], "look");
    rounds = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 0) : 1000;
    world_open(SHMC_LRU);
    shared = W.h;
    if (looks) must(!pthread_create(&looker, NULL, look, NULL));
    for (uintptr_t i = 0; i < THREADS; i++) must(!pthread_create(&t[i], NULL, work, (void *)i));
    for (int i = 0; i < THREADS; i++) must(!pthread_join(t[i], NULL));
    __atomic_store_n(&stop, true, __ATOMIC_RELAXED);
    if (looks) must(!pthread_join(looker, NULL));
    W.h = shared;
    drain_all();
    same(sound("after all threads"), 0);
    puts("sound");
    return 0;
}
