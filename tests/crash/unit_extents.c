/* unit_extents.c -- the free list against a naive model: an array that says who has each granule. */
#include <string.h>
#include "unit.h"

enum { REGION = 256, SHORT = 100, REGIONS = 3, GRANS = REGION * 2 + SHORT, OBJECTS = 64 };

static uint8_t MODEL[REGIONS][REGION];       /* 0 free, 1 taken */

static uint32_t region_len(uint32_t r) { return r == REGIONS - 1 ? SHORT : REGION; }

/* What a request really takes: up to the lower bound of its class, of which there are 32 per power of two. */
static uint32_t rounded(uint32_t len)
{
    for (uint32_t step = 1;; step *= 2)
        if (len < 64 * step) { len = (len + step - 1) / step * step; return len > REGION ? REGION : len; }
}

static uint32_t longest_run(void)
{
    uint32_t best = 0;
    for (uint32_t r = 0; r < REGIONS; r++)
        for (uint32_t i = 0, run = 0; i < region_len(r); i++) {
            run = MODEL[r][i] ? 0 : run + 1;
            if (run > best) best = run;
        }
    return best;
}

static void mark(const shmc_part *p, uint8_t was, uint8_t now)
{
    uint64_t r = p->offset / W.geo.region_stride, at = p->offset % W.geo.region_stride / GRAN, n = p->extent / GRAN;
    must(p->offset % GRAN == 0 && p->extent % GRAN == 0 && r < REGIONS);
    must(at + n <= region_len((uint32_t)r));
    for (uint64_t i = at; i < at + n; i++) { same(MODEL[r][i], was); MODEL[r][i] = now; }
}

static void against_the_model(void)
{
    struct obj x[OBJECTS] = {{0}};
    uint64_t s = seed;
    memset(MODEL, 0, sizeof MODEL);
    world_of((uint64_t)GRANS * GRAN, REGION * GRAN, 64, SHMC_LRU);
    for (uint32_t step = 0, used = 0; step < 1500 * effort; step++) {
        struct obj *o = &x[rnd(&s) % OBJECTS];
        if (o->o) {
            mark(&o->p, 1, 0);
            used -= (uint32_t)(o->p.extent / GRAN);
            drop(o);
        } else {
            uint32_t len = rnd(&s) % 4 ? 1 + (uint32_t)(rnd(&s) % 24) : 1 + (uint32_t)(rnd(&s) % REGION), takes = rounded(len);
            bool fits = longest_run() >= takes;
            int rc = try_alloc(o, W.one, len, 0, 0, 0);
            same(rc, fits ? SHMC_OK : SHMC_FULL);
            if (rc) { drop(o); continue; }
            same(o->p.extent, (uint64_t)takes * GRAN);
            same(o->p.size, (uint64_t)len * GRAN);
            mark(&o->p, 0, 1);
            used += takes;
        }
        if (step % 64) continue;
        same(stats().used, (uint64_t)used * GRAN);
        same(sound("extents"), 0);
        uint32_t largest = (uint32_t)(stats().largest_free / GRAN), run = longest_run();
        must(largest <= run && (run == 0 || rounded(largest) == largest));
        must(largest == REGION || rounded(largest + 1) > run);      /* no larger request would succeed */
    }
    for (int i = 0; i < OBJECTS; i++) if (x[i].o) drop(&x[i]);
    same(stats().used, 0);
    same(stats().largest_free, (uint64_t)REGION * GRAN);
    world_close();
}

static void fixed_sizes_are_not_stranded(void)
{
    enum { N = 92, GRANS_700K = 175 };
    static struct obj x[128];
    world_of(64ull << 20, 16ull << 20, 200, SHMC_LRU);
    uint32_t n = 0;
    while (n < 128 && try_alloc(&x[n], W.one, GRANS_700K, 0, 0, 0) == SHMC_OK) n++;
    drop(&x[n]);
    same(n, N);                                         /* 4096 / 176 = 23 in each of 4 regions */
    for (uint32_t i = 0; i < n; i++) {
        uint64_t offset = x[i].p.offset;
        drop(&x[i]);
        same(try_alloc(&x[i], W.one, GRANS_700K, 0, 0, 0), SHMC_OK);
        same(x[i].p.offset, offset);
        must(x[i].p.extent - x[i].p.size <= x[i].p.size / 32 + GRAN);
    }
    for (uint32_t i = 0; i < n; i++) drop(&x[i]);
    world_close();
}

static void a_region_can_be_one_extent(void)
{
    static const uint32_t LENGTHS[] = {16, 100, 128, 175, 255, 1000, 1024, 1025};
    for (size_t i = 0; i < sizeof LENGTHS / sizeof *LENGTHS; i++) {
        uint64_t bytes = (uint64_t)LENGTHS[i] * GRAN;
        world_of(bytes, bytes, 64, SHMC_LRU);
        struct obj x = alloc(W.one, LENGTHS[i], 0, 0), y = {0};
        same(x.p.extent, bytes);
        same(stats().free, 0);
        same(try_alloc(&y, W.one, 1, 0, 0, 0), SHMC_FULL);
        same(try_alloc(&y, W.one, LENGTHS[i] + 1, 0, 0, 0), SHMC_E_CAPACITY);
        drop(&x);
        same(try_alloc(&y, W.one, LENGTHS[i], 0, 0, 0), SHMC_OK);
        drop(&y);
        world_close();
    }
}

static void requests_near_a_region_take_it_whole(void)
{
    world_of(3 * 1000 * GRAN, 1000 * GRAN, 64, SHMC_LRU);
    struct obj x = alloc(W.one, 993, 0, 0), y = alloc(W.one, 999, 0, 0), z = alloc(W.one, 992, 0, 0);
    same(x.p.extent, 1000 * GRAN);
    same(y.p.extent, 1000 * GRAN);
    same(z.p.extent, 992 * GRAN);
    drop(&x); drop(&y); drop(&z);
    world_close();
}

static void the_last_region_may_be_short(void)
{
    world_of((128 * 2 + 17) * GRAN, 128 * GRAN, 64, SHMC_LRU);
    struct obj a = alloc(W.one, 128, 0, 0), b = alloc(W.one, 128, 0, 0), c = alloc(W.one, 17, 0, 0), d = {0};
    same(c.p.offset, 2 * W.geo.region_stride);
    same(try_alloc(&d, W.one, 1, 0, 0, 0), SHMC_FULL);
    drop(&a); drop(&b); drop(&c); drop(&d);
    same(stats().free, (128 * 2 + 17) * GRAN);
    world_close();
}

static void freed_neighbours_merge_in_every_order(void)
{
    static const int ORDER[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    world_of(96 * GRAN, 96 * GRAN, 64, SHMC_LRU);
    for (int i = 0; i < 6; i++) {
        struct obj x[3];
        for (int j = 0; j < 3; j++) x[j] = alloc(W.one, 32, 0, 0);
        for (int j = 0; j < 3; j++) drop(&x[ORDER[i][j]]);
        same(stats().blocks, 1);
        same(stats().largest_free, 96 * GRAN);
    }
    world_close();
}

static void a_double_free_is_refused(void)
{
    world_of(96 * GRAN, 96 * GRAN, 64, SHMC_LRU);
    struct obj x = alloc(W.one, 32, 0, 0), y, thief = obj_new();
    struct ref r = x.o->refs[0];
    drop(&x);
    y = alloc(W.one, 32, 0, 0);                          /* the same extent, another owner */
    same(y.p.offset, x.p.offset);
    owner_put(thief.o, r);
    same(shmc_release(W.h, &thief.o, 1), SHMC_OK);       /* a stale handle releases nothing */
    same(stats().used, 32 * GRAN);
    same(shmc_dup(W.h, &x.p, thief.o, 0), SHMC_E_STALE);
    drop(&thief);
    drop(&y);
    same(stats().used, 0);

    /* and below the API: freeing a free extent is damage, not a crash */
    struct core *c = &W.h->core;
    same(begin(W.h, TX_RELEASE), SHMC_OK);
    tx_begin(c, TX_RELEASE);
    extent_give(c, x.p.block);
    must(!tx_commit(c));
    same(finish(W.h, SHMC_OK), SHMC_E_POISONED);
    same(shmc_step(W.h), SHMC_E_POISONED);
    shmc_free(W.h);
    world_drop();
}

static void a_full_descriptor_table_is_pressure(void)
{
    enum { MANY = 6000 };
    static struct obj x[MANY];
    memset(x, 0, sizeof x);
    world_of(8192 * GRAN, 8192 * GRAN, 64, SHMC_LRU);
    uint32_t n = 0;
    while (n < MANY && try_alloc(&x[n], W.one, 1, 0, 0, 0) == SHMC_OK) n++;
    drop(&x[n]);
    same(n, W.geo.max_blocks - 1);
    same(sound("full"), 0);
    struct obj y = {0};
    drop(&x[7]);
    drop(&x[9]);
    same(try_alloc(&y, W.one, 1, 0, 0, 0), SHMC_OK);     /* an exact hole needs no descriptor */
    drop(&y);
    for (uint32_t i = 0; i < n; i++) if (x[i].o) drop(&x[i]);
    same(stats().blocks, 1);
    world_close();
}

static void batches_are_all_or_nothing(void)
{
    shmc_owner *o[8];
    shmc_part p[8];
    uint32_t ticket;
    world_of(3 * 128 * GRAN, 128 * GRAN, 64, SHMC_LRU);
    for (int i = 0; i < 8; i++) { o[i] = shmc_owner_new(W.h, 1); must(o[i]); }
    struct obj x = alloc(W.one, 100, 0, 0), y = alloc(W.one, 100, 0, 0), z = alloc(W.one, 100, 0, 0);
    same(shmc_alloc(W.h, W.one, 20 * GRAN, NULL, 0, 4, 0, o, p, &ticket), SHMC_FULL);    /* 84 free, in 3 pieces of 28 */
    same(stats().used, 300 * GRAN);
    for (int i = 0; i < 8; i++) same(shmc_owner_count(o[i]), 0);
    same(shmc_alloc(W.h, W.one, 14 * GRAN, NULL, 0, 6, 0, o, p, &ticket), SHMC_OK);      /* it may scatter */
    same(stats().free, 0);
    same(shmc_alloc(W.h, W.one, 14 * GRAN, NULL, 0, 2, 0, o, p, &ticket), SHMC_E_INVAL);  /* owners in use */
    same(shmc_alloc(W.h, W.one, 100 * GRAN, NULL, 0, 2, 0, o + 6, p, &ticket), SHMC_FULL);
    same(shmc_alloc(W.h, W.one, 200 * GRAN, NULL, 0, 1, 0, o + 6, p, &ticket), SHMC_E_CAPACITY);
    same(shmc_alloc(W.h, W.one, 0, NULL, 0, 1, 0, o + 6, p, &ticket), SHMC_E_INVAL);
    same(shmc_alloc(W.h, W.one, ~0ull, NULL, 0, 1, 0, o + 6, p, &ticket), SHMC_E_CAPACITY);
    same(shmc_release(W.h, o, 8), SHMC_OK);
    for (int i = 0; i < 8; i++) shmc_owner_free(o[i]);
    drop(&x); drop(&y); drop(&z);
    world_close();
}

/* No payload is touched, so a large arena costs its tables only. */
static void offsets_and_sizes_go_beyond_4_gib(void)
{
    const uint64_t gib = 1ull << 30;
    struct obj x[12];
    world_of(12 * gib, 2 * gib, 64, SHMC_LRU);
    same(stats().capacity, 12 * gib);
    for (uint32_t i = 0; i < 12; i++) {
        x[i] = alloc(W.one, (uint32_t)(gib / GRAN), i, 0);
        for (uint32_t j = 0; j < i; j++) must(x[i].p.offset + gib <= x[j].p.offset || x[j].p.offset + gib <= x[i].p.offset);
        must(x[i].p.offset + gib <= 12 * gib && x[i].p.size == gib);
        must(try_put(&x[i], W.one, i + 1, 0) == 1);
    }
    same(stats().used, 12 * gib);
    for (uint32_t i = 0; i < 12; i++) {
        struct obj again = get(W.one, i + 1, 0);
        same(again.p.offset, x[i].p.offset);
        drop(&again);
        drop(&x[i]);
        must(del(W.one, i + 1));
    }
    same(stats().free, 12 * gib);
    world_close();
}

const struct unit UNIT_EXTENTS[] = {
    {"extents behave as a naive model of granules", against_the_model},
    {"fixed sizes are not stranded: fill with 700 KiB, free one, 700 KiB again fits", fixed_sizes_are_not_stranded},
    {"a region can be one extent, whatever its length", a_region_can_be_one_extent},
    {"requests near a region's length take it whole", requests_near_a_region_take_it_whole},
    {"the last region may be short", the_last_region_may_be_short},
    {"freed neighbours merge in every order", freed_neighbours_merge_in_every_order},
    {"a double free is refused", a_double_free_is_refused},
    {"a full descriptor table is pressure, not an error", a_full_descriptor_table_is_pressure},
    {"batches are all or nothing", batches_are_all_or_nothing},
    {"offsets and sizes go beyond 4 GiB", offsets_and_sizes_go_beyond_4_gib},
    {NULL, NULL},
};
