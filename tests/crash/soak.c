/* soak.c -- workers do random operations on one segment while the parent kills them at random.
 *
 * Every byte that is published is checked: a block starts with a stamp of its key and part, and each
 * of its pages repeats it, so an extent that two chunks share, or that was given away too early, is
 * seen. Workers also stop, attach anew, fork, and become other programs. At the end all are dead,
 * reaped and drained: invariants, every key's bytes, invariant 7.
 *
 *   --seconds N  --workers N  --seed S  --policy P
 *   --kills N  --operations N   at least so many, also where that takes ten times as long
 * The last line has the figures; status 1 when anything was wrong.
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include "world.h"

enum { MAX_WORKERS = 64, KEYS = 300, MINE = 12, HANG_S = 20, BATCH = 4, PAGE = 4096 };

/* Shared with the workers. */
static struct shared {
    uint64_t operations[MAX_WORKERS], hits, bytes_checked, deaths_noticed, forks, execs;
    uint32_t wrong;
    char what[256];                      /* the first thing that was wrong */
} *S;
static uint8_t *arena;
static uint64_t seed = 1;

static void wrong(const char *what, long long a, long long b)
{
    if (__atomic_fetch_add(&S->wrong, 1, __ATOMIC_RELAXED) == 0) snprintf(S->what, sizeof S->what, "%s (%lld, %lld)", what, a, b);
}

/* ---- payload -------------------------------------------------------------------------------------- */

struct stamp { uint64_t key, ns_part, nonce; };

static void fill(const shmc_part *p, uint32_t ns, uint64_t k, uint32_t part, uint64_t nonce)
{
    struct stamp s = {k, (uint64_t)ns << 32 | part, nonce};
    for (uint64_t at = 0; at < p->extent; at += PAGE) memcpy(arena + p->offset + at, &s, sizeof s);
}

static void check(const shmc_part *p, uint32_t ns, uint64_t k, uint32_t part)
{
    struct stamp first, s;
    memcpy(&first, arena + p->offset, sizeof first);
    if (first.key != k || first.ns_part != ((uint64_t)ns << 32 | part)) wrong("bytes of another key", (long long)first.key, (long long)k);
    for (uint64_t at = 0; at < p->extent; at += PAGE) {
        memcpy(&s, arena + p->offset + at, sizeof s);
        if (memcmp(&s, &first, sizeof s)) { wrong("a page of another block", (long long)k, (long long)at); break; }
    }
    __atomic_fetch_add(&S->bytes_checked, p->extent, __ATOMIC_RELAXED);
}

/* ---- one worker ------------------------------------------------------------------------------------ */

static uint64_t R;                        /* state of this worker's random numbers */
static struct obj mine[MINE];             /* references it keeps for a while */
static struct { uint64_t key; uint32_t ns, part; } about[MINE];

/* What any call may say here. A stopped holder makes others time out. */
static bool fine(int rc, const char *call)
{
    if (rc >= SHMC_OK) return true;
    if (rc != SHMC_E_LOCK_TIMEOUT && rc != SHMC_E_STALE) wrong(call, rc, 0);
    if (rc == SHMC_E_STALE && shmc_step(W.h) == SHMC_E_STALE) { wrong("a living worker was reaped", 0, 0); _exit(1); }
    if (rc == SHMC_E_POISONED) _exit(1);
    return false;
}

static uint32_t parts_of(uint32_t ns) { return ns == W.two ? 2 : 1; }

static void grow(void)
{
    uint32_t region;
    if (shmc_region_claim(W.h, &region) == SHMC_OK) fine(shmc_region_done(W.h, region, rnd(&R) % 8 != 0, 0, 0), "region_done");
}

static int memory_for(struct obj *x, uint32_t ns, uint64_t k, uint32_t part)
{
    uint32_t grans = rnd(&R) % 16 ? 1 + (uint32_t)(rnd(&R) % 24) : 1 + (uint32_t)(rnd(&R) % 256);
    int rc = rnd(&R) % 4 ? try_alloc(x, ns, grans, k, part, 0) : reserve(x, ns, grans, k, part);
    if (rc == SHMC_GROW) grow();
    fine(rc, "alloc");
    if (rc == SHMC_OK) fill(&x->p, ns, k, part, rnd(&R));
    return rc;
}

static void store_one(uint32_t ns, uint64_t k, uint32_t part)
{
    struct obj x = {0};
    if (memory_for(&x, ns, k, part) == SHMC_OK && rnd(&R) % 8) {        /* else it is aborted */
        uint8_t stored;
        fine(shmc_put(W.h, ns, key(k), &x.o, part, rnd(&R) % 2 ? key(k ? k - 1 : 0) : NULL, &stored), "put");
    }
    drop(&x);
}

static void store_batch(uint32_t ns, uint64_t k)
{
    shmc_owner *o[BATCH];
    shmc_part p[BATCH];
    uint8_t stored[BATCH], meta[12] = {0};
    uint32_t ticket;
    for (uint32_t i = 0; i < BATCH; i++) o[i] = shmc_owner_new(W.h, 1);
    int rc = shmc_alloc(W.h, ns, GRAN * (1 + rnd(&R) % 12), meta, sizeof meta, BATCH, rnd(&R) % 2 ? SHMC_F_NO_GROW : 0, o, p, &ticket);
    fine(rc, "alloc");
    if (rc == SHMC_OK) {
        for (uint32_t i = 0; i < BATCH; i++) fill(&p[i], ns, k + i, 0, rnd(&R));
        fine(shmc_put(W.h, ns, keys(k, BATCH), o, 0, NULL, stored), "put");
    } else if (rc == SHMC_GROW) {
        grow();
    } else if (rc == SHMC_FULL) {
        shmc_wait(W.h, 0, ticket, 500000);
    }
    for (uint32_t i = BATCH; i-- > 0;) shmc_owner_free(o[i]);
}

static void read_one(uint32_t ns, uint64_t k, uint32_t part)
{
    uint32_t i = (uint32_t)(rnd(&R) % MINE);
    struct obj x = obj_new();
    if (fine(shmc_get(W.h, ns, key(k), part, &x.o, &x.p), "get") && shmc_owner_count(x.o)) {
        check(&x.p, ns, k, part);
        __atomic_fetch_add(&S->hits, 1, __ATOMIC_RELAXED);
        if (mine[i].o) {                                  /* what was kept must have stayed what it was */
            check(&mine[i].p, about[i].ns, about[i].key, about[i].part);
            drop(&mine[i]);
        }
        mine[i] = x;
        about[i].key = k;
        about[i].ns = ns;
        about[i].part = part;
        return;
    }
    drop(&x);
}

static void look_up(uint32_t ns, uint64_t k)
{
    uint32_t n = 0, flags = (uint32_t)(rnd(&R) % 4);
    shmc_owner *l = shmc_owner_new(W.h, 8);
    if (fine(shmc_lookup(W.h, ns, keys(k, 8), flags, rnd(&R) % 2 ? 1000000 : 0, l, &n), "lookup"))
        for (uint32_t i = 0; i < n; i++) {
            struct obj x = obj_new();
            int rc = shmc_lookup_get(W.h, ns, l, i, parts_of(ns) - 1, x.o, &x.p);
            if (rc == SHMC_OK) check(&x.p, ns, k + i, parts_of(ns) - 1);
            else fine(rc, "lookup_get");
            drop(&x);
        }
    shmc_owner_free(l);
}

static void duplicate(void)
{
    uint32_t i = (uint32_t)(rnd(&R) % MINE), refs, pins;
    struct obj x = obj_new();
    if (mine[i].o && fine(shmc_dup(W.h, &mine[i].p, x.o, rnd(&R) % 2), "dup")) fine(shmc_ref_count(W.h, &mine[i].p, &refs, &pins), "ref_count");
    drop(&x);
}

static void look_around(void)
{
    static shmc_key_record r[32];
    static shmc_event e[32];
    shmc_stats s;
    uint32_t cursor = (uint32_t)(rnd(&R) % 400), n;
    uint64_t next, lost;
    fine(shmc_scan_keys(W.h, &cursor, NIL, r, 32, &n), "scan_keys");
    if (shmc_events_read(W.base, W.size, rnd(&R) % 100000, e, 32, &n, &next, &lost) != SHMC_OK) wrong("events_read", 0, 0);
    for (uint32_t i = 1; i < n; i++) if (e[i].seq != e[i - 1].seq + 1) wrong("a gap among events", (long long)e[i].seq, 0);
    if (shmc_stats_read(W.base, W.size, &s) != SHMC_OK) wrong("stats_read", 0, 0);
    if (s.exact && (s.used > s.ready || s.pinned + s.evictable > s.used || s.complete > s.chunks || s.parts > s.blocks)) wrong("torn stats", (long long)s.used, (long long)s.ready);
}

static void attach(void)
{
    for (;;) {
        int rc;
        shmc_reap_report report;
        W.h = shmc_new(W.base, W.size, 2 * SECOND);
        if (!W.h) { wrong("the segment is not valid any more", 0, 0); _exit(1); }
        if ((rc = shmc_attach(W.h, (int32_t)getpid(), "worker")) == SHMC_OK) return;
        if (rc == SHMC_E_SLOTS) {
            fine(shmc_reap(W.h, &report), "reap");
            __atomic_fetch_add(&S->deaths_noticed, report.slots, __ATOMIC_RELAXED);
        } else if (rc != SHMC_E_LOCK_TIMEOUT) {
            wrong("attach", rc, 0);
            _exit(1);
        }
        shmc_free(W.h);
    }
}

static void start_anew(void)
{
    uint32_t dropped;
    fine(shmc_detach(W.h, 0, &dropped), "detach");
    for (uint32_t i = 0; i < MINE; i++) if (mine[i].o) drop(&mine[i]);
    shmc_free(W.h);
    attach();
}

/* A child cannot use its parent's handle; it attaches for itself, works a little, and leaves its holds to the reaper. */
static void fork_and_go_on(void)
{
    pid_t pid = fork();
    if (pid > 0) {
        __atomic_fetch_add(&S->forks, 1, __ATOMIC_RELAXED);
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
    }
    if (pid) return;
    uint8_t out[8];
    if (shmc_contains(W.h, W.one, keys(0, 8), -1, out) != SHMC_E_FORKED) wrong("a handle works in a forked child", 0, 0);
    memset(mine, 0, sizeof mine);                                     /* the parent's */
    attach();
    for (int i = 0; i < 20; i++) {
        store_one(W.one, rnd(&R) % KEYS, 0);
        read_one(W.one, rnd(&R) % KEYS, 0);
        fine(shmc_pin(W.h, W.one, keys(rnd(&R) % KEYS, 4), 0, out), "pin");
    }
    _exit(0);
}

/* Another program in the same process: its holds go, what it was writing stays until it has ended. */
static void become_another_program(void)
{
    __atomic_fetch_add(&S->execs, 1, __ATOMIC_RELAXED);
    execl("/proc/self/exe", "soak", "--idle", "1", (char *)NULL);
    wrong("exec", errno, 0);
}

static _Noreturn void worker(uint32_t number, uint64_t s)
{
    R = s;
    attach();
    for (uint64_t n = 0;; n++) {
        uint32_t ns = rnd(&R) % 3 ? W.one : W.two, part = (uint32_t)(rnd(&R) % parts_of(ns)), i = (uint32_t)(rnd(&R) % MINE), g;
        uint64_t k = rnd(&R) % 3 ? rnd(&R) % (KEYS / 6) : rnd(&R) % KEYS;
        uint8_t out[8];
        shmc_reap_report report;
        switch (rnd(&R) % 32) {
        case 0: case 1: case 2: case 3: case 4: case 5: case 6: case 7: store_one(ns, k, part); break;
        case 8: store_batch(W.one, k); break;
        case 9: case 10: case 11: case 12: case 13: read_one(ns, k, part); break;
        case 14: case 15: case 16: look_up(ns, k); break;
        case 17: case 18: if (mine[i].o) { check(&mine[i].p, about[i].ns, about[i].key, about[i].part); drop(&mine[i]); } break;
        case 19: case 20: fine(shmc_pin(W.h, ns, keys(k, 4), rnd(&R) % 2 ? 1000000 : 0, out), "pin"); break;
        case 21: case 22: case 23: fine(shmc_unpin(W.h, ns, keys(k, 4), out), "unpin"); break;
        case 24: fine(shmc_remove(W.h, ns, key(k), out), "remove"); break;
        case 25: fine(shmc_touch(W.h, ns, keys(k, 6)), "touch"); break;
        case 26: fine(shmc_contains(W.h, ns, keys(k, 8), -1, out), "contains"); break;
        case 27: duplicate(); break;
        case 28: look_around(); break;
        case 29: if (rnd(&R) % 16 == 0) fine(shmc_bump(W.h, ns, &g), "bump"); else fine(shmc_step(W.h), "step"); break;
        case 30: if (rnd(&R) % 16 == 0) { uint32_t cursor = 0; uint64_t removed = 0; fine(shmc_clear(W.h, ns, &cursor, &removed), "clear"); } break;
        case 31:
            if (rnd(&R) % 64 == 0) start_anew();
            else if (rnd(&R) % 256 == 0) fork_and_go_on();
            else if (rnd(&R) % 1024 == 0) become_another_program();
            else if (rnd(&R) % 4 == 0 && fine(shmc_reap(W.h, &report), "reap")) __atomic_fetch_add(&S->deaths_noticed, report.slots, __ATOMIC_RELAXED);
            break;
        }
        __atomic_store_n(&S->operations[number], n, __ATOMIC_RELAXED);
    }
}

/* ---- the parent --------------------------------------------------------------------------------------- */

static pid_t pids[MAX_WORKERS];
static uint64_t done_by_dead;

static void spawn(uint32_t i, uint64_t s)
{
    done_by_dead += S->operations[i];
    S->operations[i] = 0;
    pids[i] = fork();
    must(pids[i] >= 0);
    if (pids[i] == 0) { alarm(0); worker(i, s); }
}

static void end(uint32_t i)
{
    int status;
    kill(pids[i], SIGKILL);
    must(waitpid(pids[i], &status, 0) == pids[i]);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) wrong("a worker ended by itself", status, 0);
}

static void inspect(const char *when)
{
    uint32_t bad = sound(when);
    if (bad) wrong("verify", bad, 0);
}

/* After everything: what is there is what its key says, and nothing else is. */
static void last_look(shmc *h)
{
    shmc_reap_report report;
    struct header *hdr = (struct header *)W.base;
    W.h = h;
    inspect("all dead");
    int rc = shmc_reap(h, &report);
    if (rc) { wrong("reap", rc, 0); return; }
    S->deaths_noticed += report.slots;
    drain_all();
    inspect("all reaped");
    if (S->wrong) return;
    uint64_t parts = 0;
    for (uint32_t ns = 0; ns < 2; ns++)
        for (uint64_t k = 0; k < KEYS + 8; k++)
            for (uint32_t part = 0; part < parts_of(ns ? W.two : W.one); part++) {
                uint32_t in = ns ? W.two : W.one;
                struct obj x = obj_new();
                must(shmc_get(h, in, key(k), part, &x.o, &x.p) >= 0);
                if (shmc_owner_count(x.o)) { check(&x.p, in, k, part); parts += x.p.extent / GRAN; }
                drop(&x);
            }
    if (hdr->slots != 1 || hdr->holds != 0) wrong("the dead still hold something", hdr->slots, hdr->holds);
    if (parts != hdr->used_grans) wrong("allocated bytes are not those of published parts", (long long)parts, hdr->used_grans);
    inspect("at the end");
}

int main(int argc, char **argv)
{
    uint64_t seconds = 10, workers = 6, policy = SHMC_LRU, least_kills = 0, least_operations = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        uint64_t v = strtoull(argv[i + 1], NULL, 0);
        if (!strcmp(argv[i], "--seconds")) seconds = v;
        else if (!strcmp(argv[i], "--workers")) workers = v;
        else if (!strcmp(argv[i], "--seed")) seed = v;
        else if (!strcmp(argv[i], "--policy")) policy = v;
        else if (!strcmp(argv[i], "--kills")) least_kills = v;
        else if (!strcmp(argv[i], "--operations")) least_operations = v;
        else if (!strcmp(argv[i], "--idle")) { alarm(8 * HANG_S); for (;;) pause(); }
        else { fprintf(stderr, "unknown option %s\n", argv[i]); return 2; }
    }
    must(workers >= 1 && workers <= MAX_WORKERS && policy <= SHMC_LFU);
    shmc_geometry g = plan(1100 * GRAN, 256 * GRAN, 128, (uint32_t)policy);
    g.max_attachments = 2 * (uint32_t)workers + 6;
    same(shmc_plan(&g), SHMC_OK);
    world_make(&g, 1);
    arena = mmap(NULL, g.region_stride * g.n_regions, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    S = mmap(NULL, sizeof *S, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(arena != MAP_FAILED && S != MAP_FAILED);
    shmc *h = world_join("parent");
    h->lock_timeout_ns = 10 * SECOND;
    commit_regions(1);
    open_namespaces();
    must(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    uint64_t s = seed, kills = 0, stops = 0, began = os_now_ns(), end_at = began + seconds * SECOND, alive_at = began, seen = 0;
    for (uint32_t i = 0; i < workers; i++) spawn(i, rnd(&s));
    for (;;) {
        bool enough = kills >= least_kills && seen >= least_operations;
        if (S->wrong || os_now_ns() >= (enough ? end_at : began + 10 * seconds * SECOND)) break;
        alarm(4 * HANG_S);
        usleep((useconds_t)(rnd(&s) % 3000));
        uint32_t i = (uint32_t)(rnd(&s) % workers);
        if (rnd(&s) % 64 == 0) {                             /* stopped is not dead */
            kill(pids[i], SIGSTOP);
            usleep((useconds_t)(rnd(&s) % 20000));
            kill(pids[i], SIGCONT);
            stops++;
        } else {
            end(i);
            kills++;
            spawn(i, rnd(&s));
        }
        if (kills % 256 == 0) inspect("live");
        uint64_t now = done_by_dead;
        for (uint32_t w = 0; w < workers; w++) now += __atomic_load_n(&S->operations[w], __ATOMIC_RELAXED);
        if (now != seen) { seen = now; alive_at = os_now_ns(); }
        if (os_now_ns() - alive_at > HANG_S * SECOND) { wrong("no operation ends any more", (long long)now, 0); break; }
    }
    alarm(4 * HANG_S);
    for (uint32_t i = 0; i < workers; i++) end(i);
    while (waitpid(-1, NULL, 0) > 0) {}                  /* children of workers that were killed: they end by themselves */
    for (uint32_t w = 0; w < workers; w++) done_by_dead += S->operations[w];
    last_look(h);
    const struct header *hdr = (const struct header *)W.base;
    if (S->wrong) printf("first violation: %s\n", S->what);
    printf("seconds %.1f, policy %llu, seed %llu: kills %llu, deaths inside the lock %llu, stops %llu, forks %llu, execs %llu, operations %llu, lock holds %llu, hits %llu, "
           "bytes checked %llu, evictions %llu, reaped %llu, violations %u\n",
           (double)(os_now_ns() - began) / 1e9, (unsigned long long)policy, (unsigned long long)seed, (unsigned long long)kills, (unsigned long long)hdr->recoveries,
           (unsigned long long)stops, (unsigned long long)S->forks, (unsigned long long)S->execs, (unsigned long long)done_by_dead, (unsigned long long)hdr->acquisitions, (unsigned long long)S->hits,
           (unsigned long long)S->bytes_checked, (unsigned long long)hdr->stat[SHMC_ST_EVICTIONS], (unsigned long long)S->deaths_noticed, S->wrong);
    return S->wrong != 0;
}
