/* core_bench.c -- what the C core costs by itself, on a private mapping without an arena.
 *
 * Prints one JSON line. Built twice by run.py, with the journal and with SHMC_NO_JOURNAL, so that the
 * journal's cost is measured in one run. Medians over rounds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include "../../native/include/shmcache.h"

enum { CHUNKS = 20000, ROUNDS = 31, PER_ROUND = 20000 };

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void need(int ok, const char *what)
{
    if (ok) return;
    fprintf(stderr, "core_bench: %s failed\n", what);
    exit(1);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, int n) { qsort(v, (size_t)n, sizeof *v, by_value); return v[n / 2]; }

static shmc *h;
static uint32_t ns, pick = 1;
static uint8_t keys[CHUNKS][32], flag;
static shmc_owner *owner;
static shmc_part part;

static shmc_keys key(uint32_t i) { return (shmc_keys){.data = keys[i], .n = 1, .klen = 32, .ktype = 1}; }
static uint32_t any(void) { pick = pick * 1664525u + 1013904223u; return (pick >> 8) % CHUNKS; }

static void contains(void) { shmc_keys k = key(any()); shmc_contains(h, ns, &k, -1, &flag); }
static void get_release(void)
{
    shmc_keys k = key(any());
    shmc_get(h, ns, &k, 0, &owner, &part);
    shmc_release(h, &owner, 1);
}
static void touch(void) { shmc_keys k = key(any()); shmc_touch(h, ns, &k); }
static void alloc_free(void)
{
    shmc_alloc(h, ns, 4096, (const uint8_t *)"", 0, 1, 0, &owner, &part, NULL);
    shmc_release(h, &owner, 1);
}
static void put_remove(void)
{
    uint8_t fresh[32] = {0xff, 1, 2, 3};
    shmc_keys k = {.data = fresh, .n = 1, .klen = 32, .ktype = 1};
    shmc_alloc(h, ns, 4096, (const uint8_t *)"", 0, 1, 0, &owner, &part, NULL);
    shmc_put(h, ns, &k, &owner, 0, NULL, &flag);
    shmc_release(h, &owner, 1);
    shmc_remove(h, ns, &k, &flag);
}

static double ns_per_call(void (*op)(void))
{
    double v[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        uint64_t t = now();
        for (int i = 0; i < PER_ROUND; i++) op();
        v[r] = (double)(now() - t) / PER_ROUND;
    }
    return median(v, ROUNDS);
}

static double ns_per_key_in_lookup(void)
{
    double v[ROUNDS];
    shmc_owner *found = shmc_owner_new(h, 1000);
    for (int r = 0; r < ROUNDS; r++) {
        shmc_keys k = {.data = keys[(r * 577) % (CHUNKS - 1000)], .n = 1000, .klen = 32, .ktype = 1};
        uint32_t n;
        uint64_t t = now();
        shmc_lookup(h, ns, &k, SHMC_F_PIN | SHMC_F_TOUCH, 0, found, &n);
        v[r] = (double)(now() - t) / 1000;
        need(n == 1000, "lookup");
        shmc_release(h, &found, 1);
    }
    shmc_owner_free(found);
    return median(v, ROUNDS);
}

int main(void)
{
    shmc_geometry g = {.capacity = 1ull << 30, .region_bytes = 1ull << 30, .align = 4096, .max_attachments = 8, .max_chunks = 2 * CHUNKS};
    need(shmc_plan(&g) == 0, "plan");
    void *base = mmap(NULL, g.control_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    need(base != MAP_FAILED, "mmap");
    uint64_t seed[2] = {1, 2};
    need(shmc_format(base, g.control_bytes, &g, 1, 1, 1, seed) == 0, "format");
    shmc_set_state(base, SHMC_S_READY);
    h = shmc_new(base, g.control_bytes, 1000000000);
    need(h && shmc_attach(h, 0, "bench") == 0, "attach");
    uint32_t region;
    need(shmc_region_claim(h, &region) == 0 && shmc_region_done(h, region, 1, 0, 0) == 0, "region");
    need(shmc_namespace(h, "bench", 5, 1, NULL, 0, 0, &ns) == 0, "namespace");
    owner = shmc_owner_new(h, 1);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        uint64_t x = i * 0x9e3779b97f4a7c15u;
        memcpy(keys[i], &i, 4);
        memcpy(keys[i] + 8, &x, 8);
        shmc_keys k = key(i);
        need(shmc_alloc(h, ns, 4096, (const uint8_t *)"", 0, 1, 0, &owner, &part, NULL) == 0, "alloc");
        need(shmc_put(h, ns, &k, &owner, 0, NULL, &flag) == 0 && flag, "put");
        shmc_release(h, &owner, 1);
    }
    printf("{\"hit_ns\": %.1f, \"get_release_ns\": %.1f, \"touch_ns\": %.1f, \"alloc_free_ns\": %.1f, \"alloc_put_remove_ns\": %.1f, "
           "\"lookup_pin_touch_ns_per_key\": %.1f, \"control_bytes_per_chunk\": %.1f, \"control_share\": %.5f}\n",
           ns_per_call(contains), ns_per_call(get_release), ns_per_call(touch), ns_per_call(alloc_free), ns_per_call(put_remove),
           ns_per_key_in_lookup(), (double)g.control_bytes / g.max_chunks, (double)g.control_bytes / (double)g.capacity);
    return 0;
}
