/* threads.c -- threads of one process on one segment, for the thread sanitizer: some share a handle, some
 * have their own, one only looks.
 *
 *   threads ROUNDS [look]   `look`: with a thread that makes every call that reads without the lock */
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

static int open_one(shmc *h, uint64_t *s)
{
    char name[16];
    uint32_t ns;
    int n = snprintf(name, sizeof name, "another %u", (unsigned)(rnd(s) % 50));
    return shmc_namespace(h, name, (uint32_t)n, 3, "{}", 2, 1, &ns);
}

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
    switch (rnd(s) % 16) {
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
    case 12:
        rc = shmc_reserve(h, W.two, &one, (uint32_t)(rnd(s) % 2), GRAN, meta, 16, 0, o, &p, &n);
        if (rc == SHMC_OK) rc = shmc_set_meta(h, o, meta, 8);
        if (rc == SHMC_OK) rc = shmc_put(h, W.two, &one, &o, (uint32_t)(rnd(s) % 2), NULL, out);
        break;
    case 13:
        rc = shmc_alloc(h, W.one, GRAN, meta, 16, 1, 0, &o, &p, &n);
        if (rc == SHMC_OK) rc = shmc_adopt(h, W.two, o);
        break;
    case 14: rc = rnd(s) % 64 ? shmc_ref_count(h, &(shmc_part){.block = (uint32_t)k[0]}, &n, &n) : open_one(h, s); break;
    case 15: rc = shmc_pin(h, W.one, &four, SECOND, out); if (rc >= 0) rc = shmc_unpin(h, W.one, &four, out); break;
    }
    must(rc >= 0 || rc == SHMC_E_PUBLISHED || (rc == SHMC_E_STALE && k[0]));
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

/* All of the calls that take no lock: what they say of each record must be possible. */
static void *look(void *unused)
{
    (void)unused;
    static shmc_chunk_info k[32], found[4];
    static shmc_block_info b[32], parts[4];
    static shmc_hold_info o[32];
    static shmc_event e[32];
    static shmc_namespace_info ns;
    shmc_stats st;
    shmc_lock_info lock;
    shmc_slot_info slot;
    shmc_region_info region;
    shmc_holder holder;
    uint32_t n, at;
    uint64_t since = 0, lost, mine, pins;
    const uint64_t seven = 7;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        same(shmc_stats_read(W.base, W.size, &st), SHMC_OK);
        if (st.exact) must(st.used + st.free == st.ready);
        same(shmc_peek_stats(W.base, W.size, &st), SHMC_OK);
        same(shmc_peek_lock(W.base, W.size, &lock), SHMC_OK);
        shmc_last_holder(shared, &holder);
        same(shmc_events_read(W.base, W.size, since, e, 32, &n, &since, &lost), SHMC_OK);
        same(shmc_pins_read(W.base, W.size, 0, &mine, &pins), SHMC_OK);
        for (uint32_t i = 0; i < 8; i++) {
            same(shmc_peek_slot(W.base, W.size, i, &slot), SHMC_OK);
            must(slot.state <= SHMC_SLOT_REAPING);
            if (shmc_namespace_at(shared, i, &ns) == SHMC_OK) must(ns.parts > 0 && ns.name_len > 0 && ns.name[0]);
        }
        for (uint32_t i = 0; i < W.geo.n_regions; i++) {
            same(shmc_peek_region(W.base, W.size, i, &region), SHMC_OK);
            same(shmc_region(shared, i, &region), SHMC_OK);
            same(region.state, SHMC_R_READY);
        }
        same(shmc_peek_key(W.base, W.size, W.one, (const uint8_t *)&seven, 8, 0, found, 4, &n), SHMC_OK);
        for (at = 0; shmc_peek_chunks(W.base, W.size, &at, k, 32, &n) == SHMC_MORE;) {
            for (uint32_t i = 0; i < n; i++) same(k[i].klen, 8);
            if (n) must(shmc_peek_parts(W.base, W.size, k[0].chunk, k[0].gen, parts, 4, &n) >= SHMC_E_NOT_FOUND);
        }
        for (at = 0; shmc_peek_blocks(W.base, W.size, &at, b, 32, &n) == SHMC_MORE;) {}
        for (at = 0; shmc_peek_holds(W.base, W.size, &at, o, 32, &n) == SHMC_MORE;) {}
    }
    return NULL;
}

/* Which process this is, asked for the first time by many threads at once: all are told the same. */
static pthread_barrier_t start;
static void *ask_first(void *out)
{
    pthread_barrier_wait(&start);
    *(uint64_t *)out = os_generation();
    return NULL;
}

static void ask_at_once(void)
{
    pthread_t t[THREADS];
    uint64_t told[THREADS];
    must(!pthread_barrier_init(&start, NULL, THREADS));
    for (int i = 0; i < THREADS; i++) must(!pthread_create(&t[i], NULL, ask_first, &told[i]));
    for (int i = 0; i < THREADS; i++) must(!pthread_join(t[i], NULL));
    for (int i = 0; i < THREADS; i++) same(told[i], os_generation());
}

int main(int argc, char **argv)
{
    pthread_t t[THREADS], looker;
    bool looks = argc > 2 && !strcmp(argv[2], "look");
    rounds = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 0) : 1000;
    ask_at_once();
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
