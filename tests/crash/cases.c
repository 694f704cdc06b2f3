/* cases.c -- see cases.h. The victim attaches, prepares (s_...) and makes one call (op_...); the table
 * at the end says in which world. */
#include <string.h>
#include "cases.h"
#include "worlds.h"

static uint8_t OUT[64];

void cases_reset(void)
{
    memset(X, 0, sizeof X);
    L = NULL;
}

/* ---- memory ----------------------------------------------------------------------------------- */

static uint32_t TICKET;

static int alloc_many(uint32_t grans, uint32_t n, uint32_t flags)
{
    shmc_owner *o[32];
    shmc_part p[32];
    for (uint32_t i = 0; i < n; i++) { X[i] = obj_new(); o[i] = X[i].o; }
    int rc = shmc_alloc(W.h, W.one, (uint64_t)grans * GRAN, (const uint8_t *)"0123456789ab", 12, n, flags, o, p, &TICKET);
    for (uint32_t i = 0; i < n; i++) want(shmc_owner_count(o[i]), rc == SHMC_OK);
    return rc;
}

static void op_alloc_some(void) { want(try_alloc(&X[20], W.one, SOME, 60, 0, 0), SHMC_OK); }
static void op_alloc_big(void) { want(try_alloc(&X[20], W.one, BIG, 60, 0, 0), SHMC_OK); }
static void op_alloc_run(void) { want(try_alloc(&X[20], W.one, 5 * BIG, 60, 0, 0), SHMC_OK); }
static void op_alloc_drained(void) { want(try_alloc(&X[20], W.one, 76, 60, 0, 0), SHMC_OK); }
static void op_alloc_outdated(void) { want(try_alloc(&X[20], W.one, 96, 60, 0, 0), SHMC_OK); }
static void op_alloc_region(void) { want(try_alloc(&X[20], W.one, 128, 60, 0, 0), SHMC_OK); }
static void op_alloc_grow(void) { want(try_alloc(&X[20], W.one, BIG, 60, 0, 0), SHMC_GROW); }
static void op_alloc_stay(void) { want(try_alloc(&X[20], W.one, BIG, 60, 0, SHMC_F_NO_GROW), SHMC_OK); }
static void op_alloc_batch(void) { want(alloc_many(SOME, 12, 0), SHMC_OK); }
static void op_alloc_batch_evicts(void) { want(alloc_many(BIG, 4, 0), SHMC_OK); }
static void op_alloc_batch_fails(void) { want(alloc_many(BIG, 23, 0), SHMC_FULL); }
static void op_alloc_batch_scatters(void) { want(alloc_many(20, 4, SHMC_F_NO_EVICT), SHMC_FULL); }
static void op_alloc_batch_restarts(void) { want(alloc_many(32, 12, 0), SHMC_OK); }
static void op_alloc_no_evict(void) { want(try_alloc(&X[20], W.one, BIG, 60, 0, SHMC_F_NO_EVICT), SHMC_FULL); }

/* 28 granules free in each region: in total enough for four of 20, in pieces for three. */
static void s_fragments(void) { for (int i = 0; i < 3; i++) X[i] = alloc(W.one, 100, 1, 0); }

static void op_claim(void) { uint32_t r = 9; want(shmc_region_claim(W.h, &r), SHMC_OK); want(r, 2); }
static void op_done(void) { want(shmc_region_done(W.h, 2, 1, 5, 1), SHMC_OK); }
static void op_done_failed(void) { want(shmc_region_done(W.h, 2, 0, 0, 0), SHMC_OK); }

/* ---- put -------------------------------------------------------------------------------------- */

static int put_with_parent(struct obj *x, uint64_t k, uint64_t parent)
{
    return shmc_put(W.h, W.one, key(k), &x->o, 0, key(parent), OUT) ? -1 : OUT[0];
}

static void s_block(void) { X[20] = alloc(W.one, SOME, 60, 0); }
static void s_block_30(void) { X[20] = alloc(W.one, SOME, 30, 0); }
static void s_block_1(void) { X[20] = alloc(W.one, SOME, 1, 0); }
static void s_two_0(void) { X[20] = alloc(W.two, SOME, 60, 0); }
static void s_two_11(void) { X[20] = alloc(W.two, SOME, 11, 1); }
static void s_reserved(void) { same(reserve(&X[20], W.one, SOME, 60, 0), SHMC_OK); }
static void s_reserved_part(void) { same(reserve(&X[20], W.two, SOME, 11, 1), SHMC_OK); }
static void s_reserved_elsewhere(void) { same(reserve_as(&X[20], W.one, SOME, 60, 0, 30), SHMC_OK); }
static void s_blocks(void) { for (int i = 0; i < 12; i++) X[i] = alloc(W.one, SOME, 60 + (uint64_t)i, 0); }
static void s_block_bumped(void) { uint32_t g; s_block(); same(shmc_bump(W.h, W.one, &g), SHMC_OK); drain_all(); }
static void s_small_block(void) { X[20] = alloc(W.one, 1, 60, 0); }

static void op_put(void) { want(try_put(&X[20], W.one, 60, 0), 1); }
static void op_put_stale(void) { want(try_put(&X[20], W.one, 60, 0), 0); }
static void op_put_duplicate(void) { want(try_put(&X[20], W.one, 1, 0), 0); }
static void op_put_30(void) { want(try_put(&X[20], W.one, 30, 0), 1); }
static void op_put_two_0(void) { want(try_put(&X[20], W.two, 60, 0), 1); }
static void op_put_two_11(void) { want(try_put(&X[20], W.two, 11, 1), 1); }
static void op_put_one(void)
{
    uint64_t k = 60;
    want(shmc_put_one(W.h, W.one, (const uint8_t *)&k, 8, 0, &X[20].o, 0, NULL), 1);
}
static void op_put_parent(void) { want(put_with_parent(&X[20], 60, 2), 1); }
static void op_put_many(void)
{
    shmc_owner *o[12];
    for (int i = 0; i < 12; i++) o[i] = X[i].o;
    want(shmc_put(W.h, W.one, keys(60, 12), o, 0, key(1), OUT), SHMC_OK);
    for (int i = 0; i < 12; i++) want(OUT[i], 1);
}

static void op_reserve(void) { want(reserve(&X[20], W.one, SOME, 60, 0), SHMC_OK); }
static void op_reserve_part(void) { want(reserve(&X[20], W.two, SOME, 11, 1), SHMC_OK); }
static void op_reserve_found(void) { want(reserve(&X[20], W.one, SOME, 1, 0), SHMC_FOUND); }
static void op_reserve_pending(void) { want(reserve(&X[20], W.one, SOME, 30, 0), SHMC_PENDING); }
static void op_reserve_evicts(void) { want(reserve(&X[20], W.one, BIG, 60, 0), SHMC_OK); }

/* ---- reading and pinning ---------------------------------------------------------------------- */

static void get_many(uint64_t first, uint32_t n)
{
    shmc_owner *o[32];
    shmc_part p[32];
    for (uint32_t i = 0; i < n; i++) { X[i] = obj_new(); o[i] = X[i].o; }
    want(shmc_get(W.h, W.one, keys(first, n), 0, o, p), SHMC_OK);
    for (uint32_t i = 0; i < n; i++) want(shmc_owner_count(o[i]), 1);
}
static void op_get(void) { get_many(1, 1); }
static void op_get_many(void) { get_many(1, 20); }

static void op_get_one(void)
{
    uint64_t k = 1;
    X[20] = obj_new();
    want(shmc_get_one(W.h, W.one, (const uint8_t *)&k, 8, 0, 0, &X[20].o, &X[20].p), SHMC_OK);
    want(shmc_owner_count(X[20].o), 1);
}
static void op_contains_one(void)
{
    uint64_t k = 1;
    want(shmc_contains_one(W.h, W.one, (const uint8_t *)&k, 8, 0, 0), 1);
}

static void look(uint32_t flags, uint64_t lease_ns)
{
    uint32_t n = 0;
    L = shmc_owner_new(W.h, 6);
    want(shmc_lookup(W.h, W.one, keys(1, 6), flags, lease_ns, L, &n), SHMC_OK);
    want(n > 2, 1);
}
static void op_lookup(void) { look(0, 0); }
static void op_lookup_touch(void) { look(SHMC_F_TOUCH, 0); }
static void op_lookup_pin(void) { look(SHMC_F_PIN, 0); }
static void op_lookup_pin_touch(void) { look(SHMC_F_PIN | SHMC_F_TOUCH, 0); }
static void op_lookup_lease(void) { look(SHMC_F_PIN, 5 * SECOND); }

static void s_looked(void) { uint32_t n; L = lookup(W.one, 1, 3, SHMC_F_PIN, &n); same(n, 3); }
static void s_looked_unpinned(void) { uint32_t n; L = lookup(W.one, 1, 3, 0, &n); same(n, 3); }
static void s_looked_removed(void) { s_looked(); same(del(W.one, 2), 1); store(W.one, SOME, 2, 0); }
static void op_lookup_get(void)
{
    X[20] = obj_new();
    want(shmc_lookup_get(W.h, W.one, L, 1, 0, X[20].o, &X[20].p), SHMC_OK);
}

static void s_pinned(void) { same(pin(W.one, 1, 0), 1); }
static void s_pinned_twice(void) { s_pinned(); s_pinned(); }
static void s_pinned_removed(void) { s_pinned(); same(del(W.one, 1), 1); store(W.one, SOME, 1, 0); }
static void s_pinned_many(void) { for (uint64_t k = 1; k <= 12; k++) same(pin(W.one, k, 0), 1); }
static void s_pinned_parked(void)
{
    uint64_t k[1];
    must(victims(k, 1) == 1 && pin(W.one, k[0], 0));
    struct obj x = alloc(W.one, BIG, 99, 0);
    drop(&x);
    memcpy(OUT, k, 8);
}
static void op_pin(void) { want(pin(W.one, 1, 0), 1); }
static void op_pin_lease(void) { want(pin(W.one, 1, 5 * SECOND), 1); }
static void op_pin_many(void) { want(shmc_pin(W.h, W.one, keys(1, 12), 0, OUT), SHMC_OK); want(OUT[11], 1); }
static void op_unpin(void) { want(unpin(W.one, 1), 1); }
static void op_unpin_parked(void) { uint64_t k; memcpy(&k, OUT, 8); want(unpin(W.one, k), 1); }
static void op_unpin_many(void) { want(shmc_unpin(W.h, W.one, keys(1, 12), OUT), SHMC_OK); want(OUT[0], 1); }
static void op_touch(void) { touch(W.one, 3); }
static void op_leading(void) { uint32_t n; want(shmc_leading(W.h, W.one, keys(1, 4), 0, 0, 0, &n), SHMC_OK); want(n, 3); }
static void op_leading_pins(void) { uint32_t n; want(shmc_leading(W.h, W.one, keys(1, 12), -1, SHMC_F_PIN, 0, &n), SHMC_OK); want(n, 12); }
static void op_leading_part(void) { uint32_t n; want(shmc_leading(W.h, W.two, key(11), 0, SHMC_F_PIN, SECOND, &n), SHMC_OK); want(n, 1); }
static void op_adopt(void) { want(shmc_adopt(W.h, W.two, X[20].o), SHMC_OK); }
static void op_set_meta(void)
{
    uint8_t meta[SHMC_META_MAX];
    memset(meta, 0xa5, sizeof meta);
    want(shmc_set_meta(W.h, X[20].o, meta, sizeof meta), SHMC_OK);
}
static const uint64_t K1 = 1;
static void op_pin_one(void) { want(shmc_pin_one(W.h, W.one, (const uint8_t *)&K1, 8, 0, 0, 0), 1); }
static void op_unpin_one(void) { want(shmc_unpin_one(W.h, W.one, (const uint8_t *)&K1, 8, 0), 1); }
static void op_remove_one(void) { want(shmc_remove_one(W.h, W.one, (const uint8_t *)&K1, 8, 0), 1); }
static void op_touch_many(void) { want(shmc_touch(W.h, W.one, keys(1, 12)), SHMC_OK); }
static void op_touch_parked(void)
{
    struct core c;
    uint64_t k;
    core_bind(&c, W.base, W.size, &W.geo);
    memcpy(&k, chunk_at(&c, c.hdr->parked)->key, 8);
    want(shmc_touch(W.h, W.one, key(k)), SHMC_OK);
}

/* ---- removing --------------------------------------------------------------------------------- */

static void s_held(void) { X[20] = get(W.one, 2, 0); }
static void s_held_gone(void) { s_held(); same(del(W.one, 2), 1); }
static void s_gone_two(void) { X[20] = get(W.two, 10, 1); same(del(W.two, 10), 1); }
static void op_remove(void) { want(del(W.one, 2), 1); }
static void op_remove_parts(void) { want(del(W.two, 10), 1); }
static void op_remove_many(void) { want(shmc_remove(W.h, W.one, keys(1, 20), OUT), SHMC_OK); want(OUT[19], 1); }
static void op_remove_parked(void)
{
    struct core c;
    uint64_t k;
    core_bind(&c, W.base, W.size, &W.geo);
    memcpy(&k, chunk_at(&c, c.hdr->parked)->key, 8);
    want(del(W.one, k), 1);
}
static void clear_at(uint32_t ns)
{
    uint32_t cursor = 0;
    uint64_t n = 0;
    want(shmc_clear(W.h, ns, &cursor, &n), SHMC_OK);
    want(n > 0, 1);
}
static void op_clear(void) { clear_at(W.one); }
static void op_clear_two(void) { clear_at(W.two); }
static void op_bump(void) { uint32_t g = 0; want(shmc_bump(W.h, W.two, &g), SHMC_OK); want(g, 2); }
static void op_bump_one(void) { uint32_t g = 0; want(shmc_bump(W.h, W.one, &g), SHMC_OK); }
static void op_bump_empty(void) { uint32_t g = 0; want(shmc_bump(W.h, W.wide, &g), SHMC_OK); }
static void op_step(void) { want(shmc_step(W.h) == SHMC_MORE || lenient, 1); }

/* ---- releasing -------------------------------------------------------------------------------- */

static void s_two_refs(void) { s_held(); X[21] = get(W.one, 2, 0); }
static void s_parked_ref(void)
{
    uint64_t k[1];
    must(victims(k, 1) == 1);
    X[20] = get(W.one, k[0], 0);
    struct obj x = alloc(W.one, BIG, 99, 0);
    drop(&x);
}
static void s_block_pin(void)
{
    s_held();
    X[21] = obj_new();
    same(shmc_dup(W.h, &X[20].p, X[21].o, 1), SHMC_OK);
    drop(&X[20]);
    X[20] = X[21];
}
static void s_write_pin(void)
{
    s_block();
    X[21] = obj_new();
    same(shmc_dup(W.h, &X[20].p, X[21].o, 1), SHMC_OK);
    drop(&X[20]);
    X[20] = X[21];
}
static void s_between(void) { for (int i = 20; i < 23; i++) X[i] = alloc(W.one, 30, 60, 0); drop(&X[20]); X[20] = X[21]; drop(&X[22]); }
static void s_many_refs(void) { for (int i = 0; i < 20; i++) X[i] = get(W.one, 1 + (uint64_t)i, 0); }
static void s_many_writes(void) { for (int i = 0; i < 20; i++) X[i] = alloc(W.one, 1 + (uint32_t)i % 3, 60, 0); }
static void s_deferred(void)
{
    s_held();
    X[21] = alloc(W.one, SOME, 61, 0);
    for (int i = 20; i < 22; i++) { X[i].o->next = W.h->deferred; W.h->deferred = X[i].o; }   /* as when the lock is not to be had */
}

static void op_release(void) { want(shmc_release(W.h, &X[20].o, 1), SHMC_OK); want(shmc_owner_count(X[20].o), 0); }
static void op_release_lookup(void) { want(shmc_release(W.h, &L, 1), SHMC_OK); }
static void op_release_many(void)
{
    shmc_owner *o[20];
    for (int i = 0; i < 20; i++) o[i] = X[i].o;
    want(shmc_release(W.h, o, 20), SHMC_OK);
}
static void op_owner_free(void) { shmc_owner_free(X[20].o); }
static void op_owner_free_lookup(void) { shmc_owner_free(L); }
static void op_dup(void) { X[21] = obj_new(); want(shmc_dup(W.h, &X[20].p, X[21].o, 0), SHMC_OK); }
static void op_dup_pin(void) { X[21] = obj_new(); want(shmc_dup(W.h, &X[20].p, X[21].o, 1), SHMC_OK); }

/* ---- attachments, namespaces, reading --------------------------------------------------------- */

static shmc *NEW;
static void s_new(void) { NEW = shmc_new(W.base, W.size, SECOND); must(NEW); }
static void op_attach(void) { want(shmc_attach(NEW, 3, "another"), SHMC_OK); }
static void s_committing(void) { uint32_t r; same(shmc_region_claim(W.h, &r), SHMC_OK); }
static void op_detach(void) { uint32_t n; want(shmc_detach(W.h, 0, &n), SHMC_OK); }
static void op_reap(void) { shmc_reap_report r; want(shmc_reap(W.h, &r), SHMC_OK); want(r.slots + r.quarantined >= 1, 1); }
static void s_quarantined(void)
{
    shmc_reap_report r;
    struct core c;
    same(shmc_reap(W.h, &r), SHMC_OK);
    same(r.quarantined, 1);
    core_bind(&c, W.base, W.size, &W.geo);
    for (uint32_t i = 0; i < c.n_slots; i++)
        if (c.slots[i].state == SHMC_SLOT_QUARANTINE) c.slots[i].start_time--;      /* now its exit is proven */
}
static void op_namespace(void) { uint32_t ns; want(shmc_namespace(W.h, "fresh", 5, 3, "{\"a\":1}", 7, 1, &ns), SHMC_OK); }
static void op_namespace_there(void) { uint32_t ns; want(shmc_namespace(W.h, "two", 3, 2, NULL, 0, 0, &ns), SHMC_OK); }
static void op_takeover(void) { want(shmc_takeover(W.base, W.size, 7, 8), SHMC_OK); }

static void op_verify(void) { char text[64]; want(shmc_verify(W.h, text, sizeof text), 0); }
static void op_contains(void) { want(shmc_contains(W.h, W.one, keys(1, 3), -1, OUT), SHMC_OK); }
static void op_scan(void)
{
    static shmc_key_record r[32];
    uint32_t cursor = 0, n;
    want(shmc_scan_keys(W.h, &cursor, NIL, r, 32, &n), SHMC_OK);
}
static void op_ref_count(void) { uint32_t refs, pins; want(shmc_ref_count(W.h, &X[20].p, &refs, &pins), SHMC_OK); }
static void op_hold_lock(void) { want(shmc_debug_hold_lock(W.h, 0, 1), SHMC_OK); }

/* ---- the table -------------------------------------------------------------------------------- */

const struct crash_case CASES[] = {
    {"alloc, splitting", "shmc_alloc", w_empty, NULL, op_alloc_some, ONE},
    {"alloc, exact hole", "shmc_alloc", w_hole, NULL, op_alloc_some, ONE},
    {"alloc, a whole region", "shmc_alloc", w_empty, NULL, op_alloc_region, ONE},
    {"alloc, batch", "shmc_alloc", w_empty, NULL, op_alloc_batch, 0},
    {"alloc, evicting", "shmc_alloc", w_full, NULL, op_alloc_big, ALL},
    {"alloc, evicting past held chunks", "shmc_alloc", w_full_held, NULL, op_alloc_big, ALL},
    {"alloc, evicting a batch", "shmc_alloc", w_full_held, NULL, op_alloc_batch_evicts, ALL},
    {"alloc, evicting a run", "shmc_alloc", w_full_held, NULL, op_alloc_run, ALL},
    {"alloc, batch that cannot fit", "shmc_alloc", w_full_held, NULL, op_alloc_batch_fails, NONE},
    {"alloc, batch that fragments stop", "shmc_alloc", w_empty, s_fragments, op_alloc_batch_scatters, 0},
    {"alloc, batch that starts again", "shmc_alloc", w_speck, NULL, op_alloc_batch_restarts, 0},
    {"alloc, without eviction", "shmc_alloc", w_full, NULL, op_alloc_no_evict, NONE},
    {"alloc, wants a region", "shmc_alloc", w_two_regions, NULL, op_alloc_grow, NONE},
    {"alloc, evicts rather than grows", "shmc_alloc", w_two_regions, NULL, op_alloc_stay, 0},
    {"alloc, drains first", "shmc_alloc", w_draining, NULL, op_alloc_drained, 0},
    {"alloc, unlinks outdated", "shmc_alloc", w_outdated, NULL, op_alloc_outdated, 0},
    {"alloc, ends leases", "shmc_alloc", w_leased, NULL, op_alloc_big, ALL},
    {"region claim", "shmc_region_claim", w_two_regions, NULL, op_claim, ONE},
    {"region done", "shmc_region_done", w_two_regions, s_committing, op_done, ONE},
    {"region failed", "shmc_region_done", w_two_regions, s_committing, op_done_failed, ONE},

    {"put", "shmc_put", w_few, s_block, op_put, ONE | ALL},
    {"put, one", "shmc_put_one", w_few, s_block, op_put_one, ONE},
    {"put, first of two parts", "shmc_put", w_few, s_two_0, op_put_two_0, ONE},
    {"put, last of two parts", "shmc_put", w_few, s_two_11, op_put_two_11, ONE},
    {"put, beside its parent", "shmc_put", w_few, s_block, op_put_parent, ONE | ALL},
    {"put, duplicate", "shmc_put", w_few, s_block_1, op_put_duplicate, NONE},
    {"put, outdated", "shmc_put", w_few, s_block_bumped, op_put_stale, NONE},
    {"put, own reservation", "shmc_put", w_few, s_reserved, op_put, ONE},
    {"put, own reservation of the last part", "shmc_put", w_few, s_reserved_part, op_put_two_11, ONE},
    {"put, own reservation of another key", "shmc_put", w_few, s_reserved_elsewhere, op_put_30, ONE},
    {"put, displacing a reservation", "shmc_put", w_reserved, s_block_30, op_put_30, ONE},
    {"put, displacing a reserved part", "shmc_put", w_reserved, s_two_11, op_put_two_11, ONE},
    {"put, chunk table full", "shmc_put", w_chunks_full, s_small_block, op_put, ALL},
    {"put, chunk table full, some held", "shmc_put", w_chunks_full_held, s_small_block, op_put, ALL},
    {"put, many in a chain", "shmc_put", w_few, s_blocks, op_put_many, ALL},
    {"reserve", "shmc_reserve", w_few, NULL, op_reserve, 0},
    {"reserve, a part", "shmc_reserve", w_few, NULL, op_reserve_part, 0},
    {"reserve, found", "shmc_reserve", w_few, NULL, op_reserve_found, ONE},
    {"reserve, pending", "shmc_reserve", w_reserved, NULL, op_reserve_pending, NONE},
    {"reserve, evicting", "shmc_reserve", w_full_held, NULL, op_reserve_evicts, ALL},
    {"reserve, chunk table full", "shmc_reserve", w_chunks_full, NULL, op_reserve, ALL},

    {"get", "shmc_get", w_few, NULL, op_get, ONE},
    {"get, one", "shmc_get_one", w_few, NULL, op_get_one, ONE},
    {"get, many", "shmc_get", w_full, NULL, op_get_many, 0},
    {"lookup", "shmc_lookup", w_full, NULL, op_lookup, NONE},
    {"lookup, touching", "shmc_lookup", w_full, NULL, op_lookup_touch, ALL},
    {"lookup, pinning", "shmc_lookup", w_full, NULL, op_lookup_pin, 0},
    {"lookup, pinning and touching", "shmc_lookup", w_parked, NULL, op_lookup_pin_touch, ALL},
    {"lookup, with a lease", "shmc_lookup", w_full, NULL, op_lookup_lease, 0},
    {"lookup_get", "shmc_lookup_get", w_few, s_looked, op_lookup_get, ONE},
    {"lookup_get, unpinned", "shmc_lookup_get", w_few, s_looked_unpinned, op_lookup_get, ONE},
    {"lookup_get, removed meanwhile", "shmc_lookup_get", w_few, s_looked_removed, op_lookup_get, ONE},
    {"pin", "shmc_pin", w_few, NULL, op_pin, ONE},
    {"pin, again", "shmc_pin", w_few, s_pinned, op_pin, ONE},
    {"pin, with a lease", "shmc_pin", w_few, NULL, op_pin_lease, ONE},
    {"pin, many", "shmc_pin", w_full, NULL, op_pin_many, 0},
    {"unpin", "shmc_unpin", w_few, s_pinned, op_unpin, ONE},
    {"unpin, one of two", "shmc_unpin", w_few, s_pinned_twice, op_unpin, ONE},
    {"unpin, removed version", "shmc_unpin", w_few, s_pinned_removed, op_unpin, 0},
    {"unpin, parked", "shmc_unpin", w_full, s_pinned_parked, op_unpin_parked, ONE | ALL},
    {"unpin, many", "shmc_unpin", w_full, s_pinned_many, op_unpin_many, 0},
    {"leading run", "shmc_leading", w_few, NULL, op_leading, NONE},
    {"leading run, pinned", "shmc_leading", w_full, NULL, op_leading_pins, 0},
    {"leading run, a part pinned", "shmc_leading", w_few, NULL, op_leading_part, ONE},
    {"adopt", "shmc_adopt", w_few, s_block, op_adopt, ONE},
    {"set meta", "shmc_set_meta", w_few, s_block, op_set_meta, ONE},
    {"set meta, of a reservation", "shmc_set_meta", w_few, s_reserved, op_set_meta, ONE},
    {"pin, one", "shmc_pin_one", w_few, NULL, op_pin_one, ONE},
    {"unpin, one", "shmc_unpin_one", w_few, s_pinned, op_unpin_one, ONE},
    {"remove, one", "shmc_remove_one", w_few, NULL, op_remove_one, 0},
    {"touch", "shmc_touch", w_few, NULL, op_touch, ONE | ALL},
    {"touch, many", "shmc_touch", w_full, NULL, op_touch_many, ALL},
    {"touch, parked", "shmc_touch", w_parked, NULL, op_touch_parked, ONE | ALL},

    {"remove", "shmc_remove", w_few, NULL, op_remove, ALL},
    {"remove, held", "shmc_remove", w_few, s_held, op_remove, ONE | ALL},
    {"remove, two parts", "shmc_remove", w_few, NULL, op_remove_parts, 0},
    {"remove, parked", "shmc_remove", w_parked, NULL, op_remove_parked, ONE | ALL},
    {"remove, many", "shmc_remove", w_full, NULL, op_remove_many, 0},
    {"clear", "shmc_clear", w_full_held, NULL, op_clear, ALL},
    {"clear, parts", "shmc_clear", w_few, NULL, op_clear_two, 0},
    {"bump", "shmc_bump", w_few, NULL, op_bump, 0},
    {"bump, some held", "shmc_bump", w_few, s_held, op_bump_one, ALL},
    {"bump, empty", "shmc_bump", w_few, NULL, op_bump_empty, ONE},
    {"step, drains", "shmc_step", w_draining, NULL, op_step, 0},
    {"step, unlinks outdated", "shmc_step", w_outdated, NULL, op_step, ALL},

    {"release, one of two refs", "shmc_release", w_few, s_two_refs, op_release, ONE},
    {"release, last ref", "shmc_release", w_few, s_held, op_release, ONE},
    {"release, last ref of a parked chunk", "shmc_release", w_full, s_parked_ref, op_release, ONE | ALL},
    {"release, last ref of a removed chunk", "shmc_release", w_few, s_held_gone, op_release, 0},
    {"release, last ref of a removed chunk of parts", "shmc_release", w_few, s_gone_two, op_release, 0},
    {"release, block pin", "shmc_release", w_few, s_block_pin, op_release, ONE},
    {"release, unpublished", "shmc_release", w_few, s_block, op_release, ONE},
    {"release, block pin of the unpublished", "shmc_release", w_few, s_write_pin, op_release, ONE},
    {"release, unpublished between free extents", "shmc_release", w_empty, s_between, op_release, ONE},
    {"release, reservation", "shmc_release", w_few, s_reserved, op_release, ONE},
    {"release, reserved part", "shmc_release", w_few, s_reserved_part, op_release, ONE},
    {"release, lookup", "shmc_release", w_few, s_looked, op_release_lookup, 0},
    {"release, lookup of removed", "shmc_release", w_few, s_looked_removed, op_release_lookup, 0},
    {"release, many refs", "shmc_release", w_full, s_many_refs, op_release_many, 0},
    {"release, many unpublished", "shmc_release", w_few, s_many_writes, op_release_many, 0},
    {"owner free", "shmc_owner_free", w_few, s_held, op_owner_free, ONE},
    {"owner free, unpublished", "shmc_owner_free", w_few, s_block, op_owner_free, ONE},
    {"owner free, lookup", "shmc_owner_free", w_few, s_looked_removed, op_owner_free_lookup, 0},
    {"owner free, deferred to the next call", "shmc_contains", w_few, s_deferred, op_contains, 0},
    {"dup, ref", "shmc_dup", w_few, s_held, op_dup, ONE},
    {"dup, pin", "shmc_dup", w_few, s_held, op_dup_pin, ONE},
    {"dup, unpublished", "shmc_dup", w_few, s_block, op_dup, ONE},
    {"dup, pin of the unpublished", "shmc_dup", w_few, s_block, op_dup_pin, ONE},

    {"attach", "shmc_attach", w_few, s_new, op_attach, ONE},
    {"attach, draining on the way", "shmc_attach", w_draining, s_new, op_attach, 0},
    {"detach", "shmc_detach", w_few, NULL, op_detach, 0},
    {"detach, owning much", "shmc_detach", w_few, own_much, op_detach, ALL},
    {"detach, committing", "shmc_detach", w_two_regions, s_committing, op_detach, 0},
    {"reap", "shmc_reap", w_dead, NULL, op_reap, ALL},
    {"reap, a committer", "shmc_reap", w_dead_committer, NULL, op_reap, 0},
    {"reap, into quarantine", "shmc_reap", w_execed, NULL, op_reap, 0},
    {"reap, out of quarantine", "shmc_reap", w_execed, s_quarantined, op_reap, 0},
    {"takeover", "shmc_takeover", w_few, own_much, op_takeover, TAKEOVER},
    {"takeover, from the dead", "shmc_takeover", w_dead, NULL, op_takeover, TAKEOVER},
    {"namespace, new", "shmc_namespace", w_few, NULL, op_namespace, ONE},
    {"namespace, known", "shmc_namespace", w_few, NULL, op_namespace_there, NONE},

    {"verify", "shmc_verify", w_few, NULL, op_verify, NONE},
    {"verify, draining", "shmc_verify", w_draining, NULL, op_verify, 0},
    {"contains", "shmc_contains", w_few, NULL, op_contains, NONE},
    {"contains, one", "shmc_contains_one", w_few, NULL, op_contains_one, NONE},
    {"contains, draining", "shmc_contains", w_draining, NULL, op_contains, 0},
    {"scan keys", "shmc_scan_keys", w_full, NULL, op_scan, NONE},
    {"ref count", "shmc_ref_count", w_few, s_held, op_ref_count, NONE},
    {"rolled back by itself", "shmc_debug_hold_lock", w_few, NULL, op_hold_lock, NONE},
};
const uint32_t N_CASES = sizeof CASES / sizeof *CASES;

const struct exclusion EXCLUDED[] = {
    {"shmc_version", "constant"},
    {"shmc_fingerprint", "constant"},
    {"shmc_handshake_pid_offset", "constant"},
    {"shmc_op_name", "constant"},
    {"shmc_plan", "arithmetic on its argument"},
    {"shmc_format", "nobody maps the file yet; state READY is stored after it, and a stub that is not READY is made anew"},
    {"shmc_format_region", "part of formatting, before READY"},
    {"shmc_set_state", "one store"},
    {"shmc_validate", "reads the header"},
    {"shmc_peek_slot", "reads without the lock"},
    {"shmc_slot", "reads without the lock"},
    {"shmc_region", "reads without the lock"},
    {"shmc_namespace_at", "reads without the lock"},
    {"shmc_stats_read", "reads without the lock"},
    {"shmc_events_read", "reads without the lock"},
    {"shmc_pins_read", "reads without the lock"},
    {"shmc_peek_stats", "reads without the lock"},
    {"shmc_peek_lock", "reads without the lock"},
    {"shmc_peek_namespace", "reads without the lock"},
    {"shmc_peek_region", "reads without the lock"},
    {"shmc_peek_chunks", "reads without the lock"},
    {"shmc_peek_blocks", "reads without the lock"},
    {"shmc_peek_holds", "reads without the lock"},
    {"shmc_peek_key", "reads without the lock"},
    {"shmc_peek_parts", "reads without the lock"},
    {"shmc_verify_copy", "works on a private copy"},
    {"shmc_last_holder", "reads without the lock"},
    {"shmc_wait", "a statistic and a futex: no lock, no logged store"},
    {"shmc_new", "private memory of the process"},
    {"shmc_free", "private memory of the process"},
    {"shmc_owner_new", "private memory of the process"},
    {"shmc_owner_count", "private memory of the process"},
    {"shmc_check", "private memory of the process"},
    {"shmc_slot_of", "private memory of the process"},
    {"shmc_note_pinning", "one atomic word of its own slot: no lock, no logged store"},
    {"shmc_can_lock", "asks the kernel about this thread"},
    {"shmc_drop", "shmc_detach, and private memory"},
    {"shmc_fd_set", "operating system"},
    {"shmc_fd_close", "operating system"},
    {"shmc_liveness", "operating system"},
    {"shmc_self", "operating system"},
    {"shmc_map", "operating system"},
    {"shmc_reserve_space", "operating system"},
    {"shmc_map_at", "operating system"},
    {"shmc_unmap", "operating system"},
    {"shmc_populate", "operating system"},
    {"shmc_collapse", "operating system"},
    {"shmc_inherit", "operating system"},
    {"shmc_numa_prefer", "operating system"},
};
const uint32_t N_EXCLUDED = sizeof EXCLUDED / sizeof *EXCLUDED;
