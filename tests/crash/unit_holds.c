/* unit_holds.c -- holds: who has them, how they end, and what they keep alive. */
#include <string.h>
#include <unistd.h>
#include "unit.h"

static void a_hold_outlives_its_key(void)
{
    world_of(128 * GRAN, 128 * GRAN, 32, SHMC_LRU);
    store(W.one, 4, 1, 0);
    struct obj a = get(W.one, 1, 0), b;
    same(del(W.one, 1), 1);
    same(has(W.one, 1, 0), 0);
    b = put(W.one, 4, 1, 0);
    must(b.p.offset != a.p.offset);
    uint32_t refs, pins;
    same(shmc_ref_count(W.h, &a.p, &refs, &pins), SHMC_OK);
    same(refs, 1);
    drop(&a);
    same(shmc_ref_count(W.h, &a.p, &refs, &pins), SHMC_E_STALE);
    same(stats().used, 4 * GRAN);
    same(has(W.one, 1, 0), 1);
    drop(&b);
    world_close();
}

static void handles_are_spent_once(void)
{
    world_of(128 * GRAN, 128 * GRAN, 32, SHMC_LRU);
    struct obj a = put(W.one, 4, 1, 0), b = get(W.one, 1, 0), copy = obj_new(), c;
    struct ref stale = b.o->refs[0];
    drop(&b);
    c = get(W.one, 1, 0);                                /* very likely the same record, another generation */
    owner_put(copy.o, stale);
    same(shmc_release(W.h, &copy.o, 1), SHMC_OK);
    same(shmc_owner_count(copy.o), 0);
    uint32_t refs, pins;
    same(shmc_ref_count(W.h, &a.p, &refs, &pins), SHMC_OK);
    same(refs, 3);                                       /* the cache's own counts one */
    stale.hold = 0xfffffff0u;
    owner_put(copy.o, stale);
    drop(&copy);
    stale = (struct ref){c.o->refs[0].hold, 0};
    copy = obj_new();
    owner_put(copy.o, stale);
    drop(&copy);
    same(shmc_ref_count(W.h, &a.p, &refs, &pins), SHMC_OK);
    same(refs, 3);                                       /* the cache's own counts one */
    drop(&a); drop(&c);
    world_close();
}

static void nobody_spends_anothers_hold(void)
{
    world_of(128 * GRAN, 128 * GRAN, 32, SHMC_LRU);
    shmc *first = W.h, *other;
    struct obj a = put(W.one, 4, 1, 0);
    same(pin(W.one, 1, 0), 1);
    other = world_join("other");
    same(unpin(W.one, 1), 0);
    struct obj thief = obj_new();
    owner_put(thief.o, a.o->refs[0]);
    same(shmc_release(other, &thief.o, 1), SHMC_OK);     /* not its own: nothing happens */
    same(shmc_release(other, &a.o, 1), SHMC_E_STALE);    /* an owner of another handle */
    drop(&thief);
    W.h = first;
    same(stats().holds, 2);
    same(unpin(W.one, 1), 1);
    drop(&a);
    uint32_t dropped;
    same(shmc_detach(other, 0, &dropped), SHMC_OK);
    same(dropped, 0);
    shmc_free(other);
    world_close();
}

static void unpin_spends_the_oldest_own_pin_of_any_version(void)
{
    world_of(128 * GRAN, 128 * GRAN, 32, SHMC_LRU);
    store(W.one, 1, 1, 0);
    same(pin(W.one, 1, 0), 1);
    same(del(W.one, 1), 1);
    store(W.one, 1, 1, 0);
    same(pin(W.one, 1, 0), 1);
    same(del(W.one, 1), 1);
    store(W.one, 1, 1, 0);
    same(stats().used, 3 * GRAN);
    same(unpin(W.one, 1), 1);
    same(unpin(W.one, 1), 1);
    same(unpin(W.one, 1), 0);
    same(stats().used, GRAN);
    same(has(W.one, 1, 0), 1);                           /* the newest was never touched */
    world_close();
}

static void lookups_hold_what_they_found(void)
{
    uint32_t n;
    shmc_part p;
    world_of(128 * GRAN, 128 * GRAN, 32, SHMC_LRU);
    for (uint64_t k = 1; k <= 6; k++) if (k != 5) store(W.one, 1, k, 0);
    shmc_owner *l = lookup(W.one, 1, 6, SHMC_F_PIN, &n), *u;
    same(n, 4);
    same(shmc_owner_count(l), 4);
    same(del(W.one, 2), 1);
    struct obj x = obj_new();
    same(shmc_lookup_get(W.h, W.one, l, 1, 0, x.o, &x.p), SHMC_OK);       /* through the pin, also after remove */
    same(shmc_lookup_get(W.h, W.one, l, 1, 0, x.o, &p), SHMC_E_INVAL);    /* that owner is in use */
    drop(&x);
    x = obj_new();
    same(shmc_lookup_get(W.h, W.one, l, 4, 0, x.o, &x.p), SHMC_E_STALE);
    same(shmc_release(W.h, &l, 1), SHMC_OK);
    same(shmc_lookup_get(W.h, W.one, l, 0, 0, x.o, &x.p), SHMC_E_STALE);
    same(stats().holds, 0);
    shmc_owner_free(l);
    u = lookup(W.one, 3, 2, 0, &n);
    same(n, 2);
    same(shmc_owner_count(u), 0);
    same(del(W.one, 3), 1);
    store(W.one, 1, 3, 0);                               /* a newer version is not what was found */
    same(shmc_lookup_get(W.h, W.one, u, 0, 0, x.o, &x.p), SHMC_E_STALE);
    same(shmc_lookup_get(W.h, W.one, u, 1, 0, x.o, &x.p), SHMC_OK);
    drop(&x);
    shmc_owner_free(u);
    world_close();
}

static void a_full_pool_of_holds_shortens_and_recovers(void)
{
    uint32_t n, pinned = 0, ticket, dropped;
    world_of(128 * GRAN, 128 * GRAN, 32, SHMC_LRU);
    shmc *first = W.h, *other = world_join("hoarder");
    for (uint64_t k = 1; k <= 8; k++) store(W.one, 1, k, 0);
    while (pin(W.one, 1, 0)) pinned++;
    same(pinned, W.geo.max_holds);
    same(sound("pool"), 0);
    shmc_owner *l = lookup(W.one, 1, 8, SHMC_F_PIN, &n), *o = shmc_owner_new(W.h, 1);
    shmc_part p;
    same(n, 0);
    same(shmc_get(W.h, W.one, key(2), 0, &o, &p), SHMC_OK);
    same(shmc_owner_count(o), 0);
    same(p.block, NIL);
    same(shmc_alloc(W.h, W.one, GRAN, NULL, 0, 1, 0, &o, &p, &ticket), SHMC_FULL);
    must(stats().stat[SHMC_ST_HOLDS_FULL] > 0);
    for (int i = 0; i < 3; i++) same(unpin(W.one, 1), 1);
    shmc_owner_free(l);
    l = lookup(W.one, 2, 7, SHMC_F_PIN, &n);
    same(n, 3);                                          /* as many as there are records */
    shmc_owner_free(l);
    shmc_owner_free(o);
    same(shmc_detach(other, 0, &dropped), SHMC_OK);
    same(dropped, pinned - 3);
    shmc_free(other);
    W.h = first;
    same(stats().holds, 0);
    world_close();
}

static void leases_are_over(void)
{
    struct core c;
    core_bind(&c, W.base, W.size, &W.geo);
    for (uint32_t i = 0; i < c.n_holds; i++)
        if (c.holds[i].kind != H_FREE && c.holds[i].deadline) c.holds[i].deadline = 1;
    c.hdr->lease_min = 1;
}

static void a_lease_ends_when_memory_is_short(void)
{
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    for (uint64_t k = 1; k <= 4; k++) store(W.one, 16, k, 0);
    same(pin(W.one, 1, 0), 1);
    for (uint64_t k = 2; k <= 4; k++) same(pin(W.one, k, 3600 * SECOND), 1);
    struct obj x = {0};
    same(try_alloc(&x, W.one, 16, 9, 0, 0), SHMC_FULL);
    leases_are_over();
    same(stats().holds, 4);                              /* only when memory is wanted */
    same(try_alloc(&x, W.one, 16, 9, 0, 0), SHMC_OK);
    same(stats().stat[SHMC_ST_LEASES_ENDED], 3);
    same(has(W.one, 1, 0), 1);
    same(unpin(W.one, 3), 0);                            /* it has ended: nothing to spend */
    same(unpin(W.one, 1), 1);
    drop(&x);
    world_close();
}

static void a_duplicate_holds_on_its_own(void)
{
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    struct obj a = alloc(W.one, 4, 1, 0), b = obj_new(), c = obj_new();
    same(shmc_dup(W.h, &a.p, b.o, 0), SHMC_OK);
    same(shmc_dup(W.h, &a.p, c.o, 1), SHMC_OK);
    drop(&a);
    same(stats().used, 4 * GRAN);
    b.p = a.p;
    a = b;
    same(try_put(&a, W.one, 1, 0), 1);                   /* whoever holds it may publish it */
    uint32_t refs, pins;
    same(shmc_ref_count(W.h, &a.p, &refs, &pins), SHMC_OK);
    same(refs, 2);
    same(pins, 1);
    same(sound("dup"), 0);
    drop(&a);
    same(del(W.one, 1), 1);
    same(stats().used, 4 * GRAN);
    drop(&c);
    same(stats().used, 0);
    world_close();
}

static void an_aborted_write_is_never_seen(void)
{
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    struct obj a = alloc(W.one, 4, 1, 0), b = {0};
    drop(&a);
    same(reserve(&b, W.two, 4, 1, 1), SHMC_OK);
    store(W.two, 4, 1, 0);
    drop(&b);
    same(has(W.two, 1, 1), 0);
    same(has(W.two, 1, 0), 1);
    same(stats().used, 4 * GRAN);
    same(stats().stat[SHMC_ST_ABORTS], 2);
    world_close();
}

static void detach_drops_all_and_later_frees_are_harmless(void)
{
    uint32_t n, dropped;
    world_of(128 * GRAN, 128 * GRAN, 32, SHMC_LRU);
    shmc *first = W.h;
    for (uint64_t k = 1; k <= 3; k++) store(W.one, 4, k, 0);
    shmc *other = world_join("other");
    struct obj a = get(W.one, 1, 0), b = alloc(W.one, 4, 9, 0), r = {0};
    shmc_owner *l = lookup(W.one, 1, 3, SHMC_F_PIN, &n);
    same(reserve(&r, W.one, 4, 8, 0), SHMC_OK);
    same(shmc_detach(other, 0, &dropped), SHMC_OK);
    same(dropped, 1 + 1 + 3 + 1);
    same(shmc_detach(other, 0, &dropped), SHMC_OK);      /* idempotent */
    same(dropped, 0);
    same(shmc_step(other), SHMC_E_CLOSED);
    same(shmc_check(other), SHMC_E_CLOSED);
    drop(&a); drop(&b); drop(&r);                        /* destructors after close */
    shmc_owner_free(l);
    shmc_free(other);
    W.h = first;
    same(stats().holds, 0);
    same(stats().used, 12 * GRAN);
    world_close();
}

const struct unit UNIT_HOLDS[] = {
    {"a hold outlives its key, and finds no newer version", a_hold_outlives_its_key},
    {"handles are spent once", handles_are_spent_once},
    {"nobody spends another's hold", nobody_spends_anothers_hold},
    {"unpin spends the oldest own pin on any version", unpin_spends_the_oldest_own_pin_of_any_version},
    {"lookups hold what they found, and nothing newer", lookups_hold_what_they_found},
    {"a full pool of holds shortens lookups and recovers", a_full_pool_of_holds_shortens_and_recovers},
    {"a lease ends when memory is short, and not before", a_lease_ends_when_memory_is_short},
    {"a duplicate holds on its own", a_duplicate_holds_on_its_own},
    {"an aborted write is never seen", an_aborted_write_is_never_seen},
    {"detach drops all, and later destructors are harmless", detach_drops_all_and_later_frees_are_harmless},
    {NULL, NULL},
};
