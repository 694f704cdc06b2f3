/* unit_keys.c -- the index, arrays of keys, namespaces and what put says. */
#include <string.h>
#include "unit.h"

/* ---- the index -------------------------------------------------------------------------------- */

static void many_keys_are_told_apart(void)
{
    enum { RANGE = 3000, TABLE = 1000 };
    static uint8_t there[RANGE];
    uint64_t s = seed;
    uint32_t n = 0;
    memset(there, 0, sizeof there);
    world_of(2048 * GRAN, 2048 * GRAN, TABLE, SHMC_FIFO);
    must(W.geo.n_buckets < TABLE);                       /* chains are certain */
    for (uint32_t step = 0; step < 5000 * effort; step++) {
        uint64_t k = rnd(&s) % RANGE;
        same(has(W.one, k, 0), there[k]);
        if (there[k]) { same(del(W.one, k), 1); there[k] = 0; n--; continue; }
        same(del(W.one, k), 0);
        if (n == TABLE) continue;
        store(W.one, 1, k, 0);
        there[k] = 1;
        n++;
        if (step % 4096 == 0) { same(sound("index"), 0); same(stats().chunks, n); }
    }
    for (uint64_t k = 0; k < RANGE; k++) same(has(W.one, k, -1), there[k]);
    world_close();
}

static void a_chain_of_all_keys_works(void)
{
    /* a damaged or unlucky seed could put all keys into one bucket: order and removal must still hold */
    world_of(256 * GRAN, 256 * GRAN, 1, SHMC_LRU);
    same(W.geo.n_buckets, 1);
    store(W.one, 1, 1, 0);
    struct obj a = get(W.one, 1, 0), x = {0};
    same(del(W.one, 1), 1);                              /* held, removed: it keeps its record */
    x = alloc(W.one, 1, 2, 0);
    same(try_put(&x, W.one, 2, 0), 0);                   /* the table is full and all of it is held */
    drop(&a);
    same(try_put(&x, W.one, 2, 0), 1);
    drop(&x);
    store(W.one, 1, 3, 0);                               /* the table is full: pressure */
    same(has(W.one, 2, 0), 0);
    same(has(W.one, 3, 0), 1);
    world_close();
}

/* ---- arrays of keys --------------------------------------------------------------------------- */

static int put_key(const void *data, uint32_t len, uint32_t type, uint64_t labelled)
{
    shmc_keys k = {.data = data, .n = 1, .klen = len, .ktype = type};
    struct obj x = alloc(W.one, 1, labelled, 0);
    uint8_t stored = 9;
    int rc = shmc_put(W.h, W.one, &k, &x.o, 0, NULL, &stored);
    drop(&x);
    return rc ? rc : stored;
}

static void keys_differ_by_type_length_and_bytes(void)
{
    static const uint8_t ZERO[SHMC_KEY_MAX] = {0};
    shmc_keys k = {.data = ZERO, .n = 1};
    uint8_t out = 9;
    world_of(512 * GRAN, 512 * GRAN, 512, SHMC_LRU);
    for (uint32_t len = 0; len <= SHMC_KEY_MAX; len++)
        for (uint32_t type = 0; type < 3; type++) same(put_key(ZERO, len, type * 120, 0), 1);
    same(stats().chunks, 3 * (SHMC_KEY_MAX + 1));
    same(put_key(ZERO, 7, 120, 0), 0);
    for (k.klen = 0; k.klen <= SHMC_KEY_MAX; k.klen++)
        for (k.ktype = 0; k.ktype < 4; k.ktype++) {
            uint32_t was = k.ktype;
            k.ktype = was * 120 % 255;
            same(shmc_contains(W.h, W.one, &k, -1, &out), SHMC_OK);
            same(out, was < 3);
            k.ktype = was;
        }
    same(sound("keys"), 0);
    shmc_free(W.h);
    world_drop();
}

static void mixed_and_uniform_arrays_answer_alike(void)
{
    enum { N = 40 };
    static uint8_t data[N * SHMC_KEY_MAX], types[N];
    static uint32_t ends[N];
    uint8_t mixed[N], uniform[N];
    uint64_t s = seed;
    world_of(512 * GRAN, 512 * GRAN, 256, SHMC_LRU);
    for (uint32_t i = 0, at = 0; i < N; i++) {
        uint32_t len = (uint32_t)(rnd(&s) % (SHMC_KEY_MAX + 1));
        types[i] = (uint8_t)(i % 3);
        for (uint32_t j = 0; j < len; j++) data[at + j] = (uint8_t)rnd(&s);
        if (len >= 2) memcpy(data + at, &i, 2);          /* else chance decides; both forms must agree */
        if (i % 2 && put_key(data + at, len, types[i], 0) < 0) must(0);
        ends[i] = at += len;
    }
    shmc_keys m = {.data = data, .ends = ends, .types = types, .n = N};
    same(shmc_contains(W.h, W.one, &m, 0, mixed), SHMC_OK);
    for (uint32_t i = 0; i < N; i++) {
        shmc_keys u = {.data = data + (i ? ends[i - 1] : 0), .n = 1, .klen = ends[i] - (i ? ends[i - 1] : 0), .ktype = types[i]};
        same(shmc_contains(W.h, W.one, &u, 0, &uniform[i]), SHMC_OK);
    }
    must(!memcmp(mixed, uniform, N));
    for (uint32_t i = 1; i < N; i += 2) same(mixed[i], 1);
    same(shmc_remove(W.h, W.one, &m, mixed), SHMC_OK);
    same(stats().chunks, 0);
    shmc_free(W.h);
    world_drop();
}

static void impossible_key_arrays_are_refused(void)
{
    uint8_t data[200] = {0}, types[3] = {0}, out[3];
    uint32_t down[3] = {8, 4, 12}, far[3] = {1, 2, 2 + SHMC_KEY_MAX + 1}, good[3] = {8, 8, 8 + SHMC_KEY_MAX};
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    shmc_keys k = {.data = data, .n = 0, .klen = 8};
    same(shmc_contains(W.h, W.one, &k, 0, out), SHMC_E_INVAL);
    same(shmc_contains(W.h, W.one, NULL, 0, out), SHMC_E_INVAL);
    k = (shmc_keys){.data = NULL, .n = 1, .klen = 8};
    same(shmc_contains(W.h, W.one, &k, 0, out), SHMC_E_INVAL);
    k = (shmc_keys){.data = data, .n = 1, .klen = SHMC_KEY_MAX + 1};
    same(shmc_contains(W.h, W.one, &k, 0, out), SHMC_E_INVAL);
    k = (shmc_keys){.data = data, .n = 1, .klen = 8, .ktype = 256};
    same(shmc_contains(W.h, W.one, &k, 0, out), SHMC_E_INVAL);
    k = (shmc_keys){.data = data, .n = 3, .ends = down, .types = types};
    same(shmc_contains(W.h, W.one, &k, 0, out), SHMC_E_INVAL);
    k.ends = far;
    same(shmc_contains(W.h, W.one, &k, 0, out), SHMC_E_INVAL);
    k.ends = good;
    same(shmc_contains(W.h, W.one, &k, 0, out), SHMC_OK);
    k.types = NULL;
    same(shmc_contains(W.h, W.one, &k, 0, out), SHMC_E_INVAL);
    same(shmc_contains(W.h, W.one, key(1), 1, out), SHMC_E_INVAL);       /* no such part */
    same(shmc_contains(W.h, 200, key(1), 0, out), SHMC_E_INVAL);         /* no such namespace */
    same(shmc_contains(W.h, 1000, key(1), 0, out), SHMC_E_INVAL);
    world_close();
}

/* ---- put -------------------------------------------------------------------------------------- */

static void put_says_what_it_did(void)
{
    uint32_t generation;
    world_of(128 * GRAN, 128 * GRAN, 32, SHMC_LRU);
    struct obj a = put(W.one, 4, 1, 0), b = alloc(W.one, 4, 1, 0), c = alloc(W.two, 4, 1, 1), d = {0};
    same(try_put(&a, W.one, 1, 0), SHMC_E_PUBLISHED);
    same(try_put(&b, W.one, 1, 0), 0);                   /* first bytes stay, the caller keeps its object */
    same(shmc_owner_count(b.o), 1);
    same(try_put(&c, W.one, 1, 0), SHMC_E_FOREIGN);
    same(try_put(&c, W.two, 1, 1), 1);
    same(has(W.two, 1, 1), 1);
    same(has(W.two, 1, 0), 0);
    same(has(W.two, 1, -1), 0);                          /* not complete: no hit */
    store(W.two, 4, 1, 0);
    same(has(W.two, 1, -1), 1);
    same(stats().complete, 2);
    same(shmc_bump(W.h, W.one, &generation), SHMC_OK);
    same(generation, 2);
    same(try_put(&b, W.one, 9, 0), 0);                   /* allocated before the bump */
    same(stats().stat[SHMC_ST_STALE_PUTS], 1);
    same(has(W.one, 1, 0), 0);
    same(shmc_release(W.h, &b.o, 1), SHMC_OK);
    same(try_put(&b, W.one, 9, 0), SHMC_E_STALE);
    d = put(W.one, 4, 1, 0);                             /* a new version under the old key; the old one is held */
    must(d.p.offset != a.p.offset);
    drop(&a); drop(&b); drop(&c); drop(&d);
    same(stats().used, (4 + 8) * GRAN);
    world_close();
}

static void a_reservation_is_seen_and_displaced(void)
{
    world_of(128 * GRAN, 128 * GRAN, 32, SHMC_LRU);
    struct obj a = {0}, b = {0}, c = {0};
    same(reserve(&a, W.one, 4, 1, 0), SHMC_OK);
    same(reserve(&b, W.one, 4, 1, 0), SHMC_PENDING);
    same(shmc_owner_count(b.o), 0);
    same(has(W.one, 1, 0), 0);
    shmc_owner *o = b.o;
    shmc_part p;
    same(shmc_get(W.h, W.one, key(1), 0, &o, &p), SHMC_PENDING);
    c = put(W.one, 4, 1, 0);                             /* a put by anybody publishes first */
    same(try_put(&a, W.one, 1, 0), 0);
    same(reserve(&b, W.one, 4, 1, 0), SHMC_FOUND);
    same(b.p.offset, c.p.offset);
    drop(&a); drop(&b); drop(&c);
    same(reserve(&a, W.one, 4, 2, 0), SHMC_OK);
    drop(&a);                                            /* aborted: nobody ever saw it */
    same(reserve(&a, W.one, 4, 2, 0), SHMC_OK);
    same(try_put(&a, W.one, 2, 0), 1);
    same(has(W.one, 2, 0), 1);
    drop(&a);
    same(stats().used, 8 * GRAN);
    world_close();
}

/* ---- namespaces ------------------------------------------------------------------------------- */

static void namespaces_agree_or_refuse(void)
{
    char long_name[SHMC_NAME_MAX + 1], name[16];
    uint32_t ns = 9, n;
    memset(long_name, 'n', sizeof long_name);
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
#define OPEN(name, parts, desc, has) shmc_namespace(W.h, name, (uint32_t)strlen(name), parts, desc, (uint32_t)strlen(desc), has, &ns)
    same(OPEN("two", 2, "{}", 1), SHMC_OK);
    same(ns, W.two);
    same(OPEN("two", 0, "", 0), SHMC_OK);
    same(OPEN("two", 3, "", 0), SHMC_E_MISMATCH);
    same(OPEN("two", 2, "{ }", 1), SHMC_E_MISMATCH);
    same(OPEN("two", 2, "", 1), SHMC_E_MISMATCH);
    same(OPEN("tw", 0, "", 0), SHMC_OK);                  /* a prefix is another name */
    must(ns != W.two);
    same(OPEN("", 1, "", 0), SHMC_E_INVAL);
    same(OPEN("many", SHMC_PARTS_MAX + 1, "", 0), SHMC_E_INVAL);
    same(OPEN("many", SHMC_PARTS_MAX, "", 0), SHMC_OK);
    same(shmc_namespace(W.h, long_name, SHMC_NAME_MAX + 1, 1, NULL, 0, 0, &ns), SHMC_E_INVAL);
    same(shmc_namespace(W.h, long_name, SHMC_NAME_MAX, 1, NULL, 0, 0, &ns), SHMC_OK);
    for (n = (uint32_t)stats().namespaces; n < W.geo.max_namespaces; n++) {
        snprintf(name, sizeof name, "n%u", n);
        same(OPEN(name, 1, "", 0), SHMC_OK);
    }
    same(OPEN("one more", 1, "", 0), SHMC_E_NAMESPACES);
    same(OPEN("n200", 1, "", 0), SHMC_OK);
    store(ns, 1, 5, 0);
    same(has(W.one, 5, 0), 0);                           /* the same key of another namespace */
    same(has(ns, 5, 0), 1);
    same(sound("namespaces"), 0);
    world_close();
}

static void bump_makes_old_chunks_misses_and_drains_them(void)
{
    uint32_t generation, cursor = 0, n;
    static shmc_key_record r[32];
    world_of(128 * GRAN, 128 * GRAN, 32, SHMC_LRU);
    for (uint64_t k = 1; k <= 30; k++) store(W.one, 1, k, 0);
    struct obj x = get(W.one, 30, 0);
    same(pin(W.one, 29, 0), 1);
    same(shmc_bump(W.h, W.one, &generation), SHMC_OK);
    for (uint64_t k = 1; k <= 30; k++) same(has(W.one, k, 0), 0);
    same(shmc_scan_keys(W.h, &cursor, W.one, r, 32, &n), SHMC_OK);
    same(n, 0);
    store(W.one, 1, 29, 0);
    drain_all();
    same(stats().used, 3 * GRAN);                        /* the held, the pinned, the new */
    same(unpin(W.one, 29), 1);                           /* the pin's owner finds it under the key */
    same(unpin(W.one, 29), 0);
    drop(&x);
    drain_all();
    same(stats().used, GRAN);
    world_close();
}

static void clear_leaves_what_is_held(void)
{
    uint32_t cursor = 0, n = 0;
    uint64_t removed = 0;
    world_of(512 * GRAN, 512 * GRAN, 300, SHMC_LRU);
    for (uint64_t k = 1; k <= 200; k++) store(W.one, 1, k, 0);
    store(W.two, 1, 1, 0);
    struct obj x = get(W.one, 100, 0);
    same(pin(W.one, 101, 0), 1);
    while (shmc_clear(W.h, W.one, &cursor, &removed) == SHMC_MORE) must(++n < 100);
    same(removed, 198);
    same(stats().used, 3 * GRAN);                        /* free on return */
    same(has(W.one, 100, 0) && has(W.one, 101, 0) && has(W.two, 1, 0), 1);
    same(unpin(W.one, 101), 1);
    drop(&x);
    world_close();
}

const struct unit UNIT_KEYS[] = {
    {"many keys in few buckets are told apart", many_keys_are_told_apart},
    {"one bucket and one chunk record are enough to go on", a_chain_of_all_keys_works},
    {"keys differ by type, length and bytes", keys_differ_by_type_length_and_bytes},
    {"mixed and uniform arrays of keys answer alike", mixed_and_uniform_arrays_answer_alike},
    {"impossible arrays of keys are refused", impossible_key_arrays_are_refused},
    {"put says what it did, and keeps the first bytes", put_says_what_it_did},
    {"a reservation is seen, displaced by a put, and gone when given up", a_reservation_is_seen_and_displaced},
    {"namespaces agree on parts and descriptor or refuse, and their table can be full", namespaces_agree_or_refuse},
    {"bump makes old chunks misses at once and drains them", bump_makes_old_chunks_misses_and_drains_them},
    {"clear removes what nobody holds and frees it before it returns", clear_leaves_what_is_held},
    {NULL, NULL},
};
