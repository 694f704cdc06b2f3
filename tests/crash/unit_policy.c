/* unit_policy.c -- the exact order of victims, and what evictions may and may not do. */
#include <string.h>
#include "unit.h"

enum { CHUNKS = 8, SIZE = 8 };           /* keys 1..8 fill the arena of the tests below */

static void world_full(uint32_t policy)
{
    world_of(CHUNKS * SIZE * GRAN, CHUNKS * SIZE * GRAN, 32, policy);
    for (uint64_t k = 1; k <= CHUNKS; k++) store(W.one, SIZE, k, 0);
}

/* Evict one at a time and note who went. */
static void evicts_in_order(const uint64_t *order, uint32_t n)
{
    uint64_t planned[CHUNKS];
    must(victims(planned, n) >= n);
    struct obj x[CHUNKS] = {{0}};
    for (uint32_t i = 0; i < n; i++) {
        same(planned[i], order[i]);
        same(has(W.one, order[i], 0), 1);
        x[i] = alloc(W.one, SIZE, 99, 0);
        if (has(W.one, order[i], 0)) { fprintf(stderr, "victim %u should have been key %d\n", i, (int)order[i]); must(0); }
        same(sound("eviction"), 0);
    }
    for (uint32_t i = 0; i < n; i++) drop(&x[i]);
}
#define ORDER(...) do { const uint64_t o_[] = {__VA_ARGS__}; evicts_in_order(o_, sizeof o_ / sizeof *o_); } while (0)

static void lru(void)
{
    world_full(SHMC_LRU);
    touch(W.one, 1);
    touch(W.one, 4);
    touch(W.one, 2);
    struct obj x = get(W.one, 3, 0);                     /* a hold is not a touch */
    drop(&x);
    ORDER(3, 5, 6, 7, 8, 1, 4, 2);
    world_close();
}

static void fifo(void)
{
    world_full(SHMC_FIFO);
    touch(W.one, 1);
    touch(W.one, 4);
    ORDER(1, 2, 3, 4, 5, 6, 7, 8);
    world_close();
}

static void mru(void)
{
    world_full(SHMC_MRU);
    touch(W.one, 2);
    touch(W.one, 5);
    ORDER(5, 2, 8, 7, 6, 4, 3, 1);
    world_close();
}

static void lfu(void)
{
    world_of(3 * SIZE * GRAN, 3 * SIZE * GRAN, 32, SHMC_LFU);
    for (uint64_t k = 1; k <= 3; k++) store(W.one, SIZE, k, 0);    /* a, b, c: each counts one */
    touch(W.one, 2);
    touch(W.one, 2);
    touch(W.one, 3);
    ORDER(1, 3, 2);                                      /* a1, b3, c2 */
    world_close();

    world_full(SHMC_LFU);                                /* first in, first out within a frequency */
    for (uint64_t k = 8; k >= 5; k--) touch(W.one, k);
    ORDER(1, 2, 3, 4, 8, 7, 6, 5);
    world_close();

    world_full(SHMC_LFU);                                /* the count saturates */
    for (int i = 0; i < N_LEVELS + 10; i++) touch(W.one, 1);
    for (int i = 0; i < N_LEVELS + 10; i++) touch(W.one, 2);
    touch(W.one, 1);
    same(sound("saturated"), 0);
    ORDER(3, 4, 5, 6, 7, 8, 2, 1);
    world_close();
}

static void held_chunks_are_passed_once_and_return_in_order(uint32_t policy, const uint64_t *all)
{
    struct obj x[4], y;
    world_full(policy);
    for (int i = 0; i < 4; i++) x[i] = get(W.one, all[i], 0);
    y = alloc(W.one, SIZE, 99, 0);
    same(((struct header *)W.base)->n_parked, 4);
    same(has(W.one, all[4], 0), 0);
    drop(&y);
    for (int i = 3; i >= 0; i--) drop(&x[i]);            /* last to first */
    same(((struct header *)W.base)->n_parked, 0);
    store(W.one, SIZE, 9, 0);
    uint64_t order[] = {all[0], all[1], all[2], all[3], all[5]};
    if (policy == SHMC_MRU) { uint64_t hot[] = {9, all[0], all[1], all[2], all[3]}; evicts_in_order(hot, 5); }
    else evicts_in_order(order, 5);
    world_close();
}

static void parking(void)
{
    static const uint64_t up[] = {1, 2, 3, 4, 5, 6, 7, 8}, down[] = {8, 7, 6, 5, 4, 3, 2, 1};
    held_chunks_are_passed_once_and_return_in_order(SHMC_LRU, up);
    held_chunks_are_passed_once_and_return_in_order(SHMC_FIFO, up);
    held_chunks_are_passed_once_and_return_in_order(SHMC_MRU, down);
    held_chunks_are_passed_once_and_return_in_order(SHMC_LFU, up);
}

static void put_chain(uint64_t from, uint32_t n, uint64_t parent)
{
    shmc_owner *o[CHUNKS];
    struct obj x[CHUNKS];
    uint8_t stored[CHUNKS];
    for (uint32_t i = 0; i < n; i++) { x[i] = alloc(W.one, SIZE, from + i, 0); o[i] = x[i].o; }
    same(shmc_put(W.h, W.one, keys(from, n), o, 0, key(parent), stored), SHMC_OK);
    for (uint32_t i = n; i-- > 0;) { same(stored[i], 1); drop(&x[i]); }
}

static void a_prefix_outlives_its_extensions(void)
{
    world_of(CHUNKS * SIZE * GRAN, CHUNKS * SIZE * GRAN, 32, SHMC_LRU);
    put_chain(1, 3, 77);                                 /* an absent parent: the first goes to the hot end */
    put_chain(4, 3, 3);                                  /* the same prompt's second batch */
    store(W.one, SIZE, 7, 0);
    put_chain(8, 1, 1);                                  /* another extension of the first */
    ORDER(6, 5, 4, 3, 2, 8, 1, 7);
    world_close();
}

static void a_parked_parent_counts_as_absent(void)
{
    world_full(SHMC_LRU);
    struct obj x = get(W.one, 1, 0), y = alloc(W.one, SIZE, 99, 0);      /* parks 1, evicts 2 */
    drop(&y);
    put_chain(9, 1, 1);
    same(sound("parent"), 0);
    drop(&x);
    ORDER(1, 3, 4, 5, 6, 7, 8, 9);
    world_close();
}

/* Pinned by a lookup that does not touch, met by a victim search, released last to first: the prefix
 * must still be the last of its chain to go, though all of the chain bear one stamp. */
static void a_released_chain_returns_prefix_last(void)
{
    uint32_t n;
    world_of(CHUNKS * SIZE * GRAN, CHUNKS * SIZE * GRAN, 32, SHMC_LRU);
    put_chain(1, 4, 77);
    for (uint64_t k = 5; k <= 8; k++) store(W.one, SIZE, k, 0);
    shmc_owner *l = lookup(W.one, 1, 4, SHMC_F_PIN, &n);
    same(n, 4);
    struct obj y = alloc(W.one, SIZE, 99, 0);
    same(((struct header *)W.base)->n_parked, 4);
    drop(&y);
    shmc_owner_free(l);
    store(W.one, SIZE, 9, 0);
    ORDER(4, 3, 2, 1, 6, 7, 8, 9);
    world_close();
}

static void what_cannot_be_had_evicts_nothing(void)
{
    struct obj x = {0};
    world_full(SHMC_LRU);
    same(try_alloc(&x, W.one, CHUNKS * SIZE + 1, 0, 0, 0), SHMC_E_CAPACITY);
    struct obj a = get(W.one, 4, 0), b = get(W.one, 5, 0);
    same(try_alloc(&x, W.one, CHUNKS * SIZE, 0, 0, 0), SHMC_FULL);
    same(try_alloc(&x, W.one, 7 * SIZE, 0, 0, 0), SHMC_FULL);            /* 6 are evictable */
    same(try_alloc(&x, W.one, 4 * SIZE + 4, 0, 0, 0), SHMC_FULL);        /* no run of so many: 3 before, 3 behind */
    same(try_alloc(&x, W.one, SIZE, 0, 0, SHMC_F_NO_EVICT), SHMC_FULL);
    same(stats().stat[SHMC_ST_EVICTIONS], 0);
    same(stats().chunks, CHUNKS);
    same(try_alloc(&x, W.one, 3 * SIZE, 0, 0, 0), SHMC_OK);
    drop(&x); drop(&a); drop(&b);
    world_close();
}

static void a_large_request_evicts_one_run_only(void)
{
    world_of(64 * 4 * GRAN, 64 * 4 * GRAN, 100, SHMC_LRU);
    for (uint64_t k = 1; k <= 64; k++) store(W.one, 4, k, 0);
    for (uint64_t k = 1; k <= 64; k += 2) touch(W.one, k);              /* in policy order every other one would go */
    struct obj held = get(W.one, 20, 0), x = alloc(W.one, 40, 99, 0);
    same(stats().stat[SHMC_ST_EVICTIONS], 10);
    same(has(W.one, 20, 0), 1);
    drop(&held); drop(&x);
    world_close();
}

static void chunks_go_with_all_their_parts(void)
{
    world_of(CHUNKS * SIZE * GRAN, CHUNKS * SIZE * GRAN, 32, SHMC_LRU);
    for (uint64_t k = 1; k <= 4; k++) for (uint32_t part = 0; part < 2; part++) store(W.two, SIZE, k, part);
    struct obj held = get(W.two, 1, 1), x = alloc(W.one, SIZE, 99, 0), y = alloc(W.one, SIZE, 99, 0);
    same(stats().stat[SHMC_ST_EVICTIONS], 1);
    for (uint32_t part = 0; part < 2; part++) {
        same(has(W.two, 1, (int)part), 1);               /* one part held: all stay */
        same(has(W.two, 2, (int)part), 0);
    }
    drop(&held); drop(&x); drop(&y);
    world_close();
}

const struct unit UNIT_POLICY[] = {
    {"LRU evicts the least recently touched", lru},
    {"FIFO evicts the first in, touched or not", fifo},
    {"MRU evicts the most recently touched", mru},
    {"LFU evicts the least often touched, first in first out among equals", lfu},
    {"held chunks are passed once and return in order, under every policy", parking},
    {"a prefix outlives its extensions", a_prefix_outlives_its_extensions},
    {"a parked parent counts as absent", a_parked_parent_counts_as_absent},
    {"a chain released last to first returns with its prefix last to go", a_released_chain_returns_prefix_last},
    {"what cannot be had evicts nothing", what_cannot_be_had_evicts_nothing},
    {"a large request evicts one run of neighbours only", a_large_request_evicts_one_run_only},
    {"chunks go with all their parts", chunks_go_with_all_their_parts},
    {NULL, NULL},
};
