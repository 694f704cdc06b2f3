/* unit_damage.c -- damaged segments: refused or poisoned, never a crash, a hang or a wild read.
 *
 * Run under the address sanitizer, which gives "wild" a meaning: each image lies in a heap block of
 * exactly its size. Live calls spare the bytes of the mutex: those are libc's, and it may abort. */
#include <string.h>
#include <unistd.h>
#include "unit.h"

static uint8_t *image;
static uint64_t image_size;

/* A block of exactly this size, aligned as a mapping is. */
static uint8_t *heap(uint64_t size)
{
    void *p;
    must(!posix_memalign(&p, 4096, size));
    return p;
}

/* A world with something of everything, then copied out of its mapping. */
static void make_image(uint32_t policy)
{
    uint32_t n, generation;
    world_of(256 * GRAN, 128 * GRAN, 32, policy);
    for (uint64_t k = 1; k <= 20; k++) store(W.one, 1 + (uint32_t)k % 5, k, 0);
    for (uint32_t part = 0; part < WIDE_PARTS; part++) store(W.wide, 1, 30, part);
    for (uint32_t part = 0; part < 2; part++) store(W.two, 3, 31, part);
    struct obj a = get(W.one, 1, 0), b = alloc(W.one, 4, 0, 0), c = {0};
    same(reserve(&c, W.two, 4, 32, 1), SHMC_OK);
    must(pin(W.one, 2, 0) && pin(W.one, 3, SECOND));
    must(del(W.one, 2));
    shmc_owner *l = lookup(W.one, 4, 4, SHMC_F_PIN | SHMC_F_TOUCH, &n);
    struct obj d = {0};
    try_alloc(&d, W.one, 100, 0, 0, 0);                  /* parks and evicts */
    must(del(W.wide, 30) || 1);
    same(shmc_bump(W.h, W.two, &generation), SHMC_OK);
    image_size = W.size;
    image = heap(image_size);
    memcpy(image, W.base, image_size);
    drop(&a); drop(&b); drop(&c); drop(&d);
    shmc_owner_free(l);
    shmc_free(W.h);
    world_drop();
}

/* What `inspect` reads: each walk ends, whatever the links say, and stays inside the image. */
static void peek_at(const uint8_t *copy, int rc)
{
    static shmc_chunk_info k[48];
    static shmc_block_info b[48];
    static shmc_hold_info d[48];
    shmc_lock_info lock;
    shmc_namespace_info ns;
    shmc_region_info region;
    uint32_t n, at;
    shmc_stats s;
    same(shmc_peek_stats(copy, image_size, &s), rc);
    same(shmc_peek_lock(copy, image_size, &lock), rc);
    same(shmc_peek_namespace(copy, image_size, 300, &ns) == SHMC_E_NOT_FOUND, rc == 0);
    if (shmc_peek_namespace(copy, image_size, 1, &ns) == SHMC_OK) must(ns.name_len <= SHMC_NAME_MAX && ns.desc_len <= SHMC_DESC_MAX);
    same(shmc_peek_region(copy, image_size, 1, &region), rc);
    for (at = 0; (n = 0, shmc_peek_holds(copy, image_size, &at, d, 48, &n)) == SHMC_MORE;) must(n <= 48);
    for (at = 0; (n = 0, shmc_peek_blocks(copy, image_size, &at, b, 48, &n)) == SHMC_MORE;) must(n <= 48);
    for (at = 0;;) {
        int more = shmc_peek_chunks(copy, image_size, &at, k, 48, &n);
        must(more == (rc ? rc : more) && n <= 48);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t m;
            must(k[i].klen <= SHMC_KEY_MAX);
            int got = shmc_peek_parts(copy, image_size, k[i].chunk, k[i].gen, b, 48, &m);
            must(got == SHMC_OK && m <= 48);
        }
        if (more != SHMC_MORE) break;
    }
    for (uint64_t key = 1; key < 34; key++)
        for (uint32_t w = 0; w < 3; w++) {
            same(shmc_peek_key(copy, image_size, w, (const uint8_t *)&key, 8, 0, k, 48, &n), rc);
            must(n <= 48);
        }
}

/* Everything that reads without the lock, and the verifier. */
static void look_at(uint8_t *copy)
{
    static shmc_event e[64];
    shmc_geometry g;
    shmc_identity id;
    shmc_stats s;
    shmc_slot_info slot;
    char text[600];
    uint32_t n = 0;
    uint64_t next, lost;
    int rc = shmc_validate(copy, image_size, &g, &id);
    must(rc <= 0 && rc >= SHMC_E_OS);
    if (rc == 0) {                                       /* policy, mode and Python's own words have no second witness */
        shmc_geometry want = ((struct header *)image)->geo;
        want.policy = g.policy; want.lifetime = g.lifetime; want.mode = g.mode; want.flags = g.flags; want.numa_node_mask = g.numa_node_mask; want.spare = g.spare;
        must(!memcmp(&g, &want, sizeof g));
    }
    same(shmc_stats_read(copy, image_size, &s) == SHMC_OK, rc == 0);
    same(shmc_peek_slot(copy, image_size, 1, &slot) == SHMC_OK, rc == 0);
    same(shmc_events_read(copy, image_size, 0, e, 64, &n, &next, &lost) == SHMC_OK, rc == 0);
    must(n <= 64);
    peek_at(copy, rc);
    int v = shmc_verify_copy(copy, image_size, text, sizeof text);
    must(rc == 0 ? v >= 0 : v < 0);
    must(strlen(text) < sizeof text || v < 0);
}

/* Every outcome is allowed but a crash, a hang, or working on after it was found poisoned. */
static void use(uint8_t *copy, uint64_t *s)
{
    struct world saved = W;
    W = (struct world){.base = copy, .size = image_size, .geo = ((struct header *)image)->geo, .one = 0, .two = 1, .wide = 2};
    shmc *h = shmc_new(copy, image_size, 1000000);
    if (!h) { W = saved; return; }
    W.h = h;
    shmc_part p[4];
    shmc_owner *o[4], *l = shmc_owner_new(h, 4);
    uint8_t out[8];
    uint32_t u, cursor = 0, dropped;
    uint64_t removed = 0;
    static shmc_key_record r[64];
    shmc_reap_report report;
    int rc = shmc_attach(h, 0, "user");
    for (int i = 0; i < 4; i++) o[i] = shmc_owner_new(h, 1);
    bool poisoned = rc == SHMC_E_POISONED;
    for (int step = 0; rc == 0 && step < 24; step++) {
        uint64_t k = 1 + rnd(s) % 34;
        uint32_t ns = (uint32_t)(rnd(s) % 3), i = (uint32_t)(rnd(s) % 4);
        uint64_t what = rnd(s) % 16;
        int got = 0;
        switch (what) {
        case 0: got = shmc_alloc(h, ns, 1 + rnd(s) % (64 * GRAN), out, 8, 1, SHMC_F_NO_GROW, &o[i], &p[i], &u); break;
        case 1: got = shmc_put(h, ns, key(k), &o[i], 0, key(1 + k % 30), out); break;
        case 2: got = shmc_get(h, ns, key(k), 0, &o[i], &p[i]); break;
        case 3: got = shmc_lookup(h, ns, keys(k, 4), SHMC_F_PIN | SHMC_F_TOUCH, 1, l, &u); break;
        case 4: got = shmc_release(h, &o[i], 1); break;
        case 5: got = shmc_pin(h, ns, keys(k, 3), 0, out); break;
        case 6: got = shmc_unpin(h, ns, keys(k, 3), out); break;
        case 7: got = shmc_remove(h, ns, keys(k, 3), out); break;
        case 8: got = shmc_touch(h, ns, keys(k, 3)); break;
        case 9: got = shmc_clear(h, ns, &cursor, &removed); cursor = 0; break;
        case 10: got = shmc_reserve(h, ns, key(k), 0, GRAN, out, 8, 0, o[i], &p[i], &u); break;
        case 11: got = shmc_bump(h, ns, &u); break;
        case 12: got = shmc_scan_keys(h, &cursor, NIL, r, 64, &u); cursor = 0; break;
        case 13: got = shmc_reap(h, &report); break;
        case 14: got = shmc_release(h, &l, 1); break;
        case 15: got = shmc_alloc(h, ns, GRAN * 20, out, 8, 4, SHMC_F_NO_GROW, o, p, &u); break;
        }
        must(got >= SHMC_E_OS && got <= SHMC_MORE);
        if (poisoned && what != 13)                      /* a reap that finds nobody takes no lock */
            must(got == SHMC_E_POISONED || got == SHMC_E_INVAL || got == SHMC_E_CAPACITY || got == SHMC_E_STALE);
        poisoned |= got == SHMC_E_POISONED;
    }
    for (int i = 0; i < 4; i++) shmc_owner_free(o[i]);
    shmc_owner_free(l);
    shmc_detach(h, 0, &dropped);
    shmc_free(h);
    W = saved;
}

static void damage_one(uint8_t *copy, uint64_t at, uint8_t with)
{
    memcpy(copy, image, image_size);
    copy[at] ^= with;
    look_at(copy);
}

static bool in_mutex(uint64_t at)
{
    return at >= offsetof(struct header, lock) && at < offsetof(struct header, lock) + sizeof(pthread_mutex_t);
}

static void every_byte_of_the_header(void)
{
    static const uint8_t WITH[] = {0xff, 0x01, 0x80};
    uint64_t s = seed;
    make_image(SHMC_LRU);
    uint8_t *copy = heap(image_size);
    damage_one(copy, 0, 0);
    must(shmc_verify_copy(copy, image_size, NULL, 0) == 0);
    for (uint64_t at = 0; at < sizeof(struct header); at++)
        for (size_t i = 0; i < sizeof WITH; i++) {
            /* the many like words of bins, levels and journal: each byte once, all ways only with much effort */
            bool alike = at >= offsetof(struct header, bin);
            uint64_t every = effort >= 8 ? 1 : effort >= 2 ? (alike ? sizeof WITH : 1) : alike ? 100 : 8;
            if ((at + i + seed) % every) continue;
            damage_one(copy, at, WITH[i]);
            if (in_mutex(at) || shmc_validate(copy, image_size, NULL, NULL)) continue;
            memcpy(copy, image, image_size);
            copy[at] ^= WITH[i];
            use(copy, &s);
        }
    free(copy);
    free(image);
}

static void short_and_foreign_files(void)
{
    make_image(SHMC_LRU);
    static const uint64_t SIZES[] = {0, 1, 8, 64, 4096, sizeof(struct header) - 1, sizeof(struct header)};
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        uint8_t *copy = heap(SIZES[i] ? SIZES[i] : 1);
            memcpy(copy, image, SIZES[i]);
        must(shmc_validate(copy, SIZES[i], NULL, NULL) < 0);
        must(!shmc_new(copy, SIZES[i], 1));
        free(copy);
    }
    uint8_t *zero = heap(image_size);
    memset(zero, 0, image_size);
    same(shmc_validate(zero, image_size, NULL, NULL), SHMC_E_NOT_READY);  /* a stub that nobody finished */
    memset(zero, 'x', image_size);
    same(shmc_validate(zero, image_size, NULL, NULL), SHMC_E_NOT_SHMCACHE);
    memcpy(zero, image, image_size);
    ((struct header *)zero)->format++;
    same(shmc_validate(zero, image_size, NULL, NULL), SHMC_E_FORMAT);
    memcpy(zero, image, image_size);
    ((struct header *)zero)->fingerprint++;
    same(shmc_validate(zero, image_size, NULL, NULL), SHMC_E_FORMAT);
    memcpy(zero, image, image_size);
    ((struct header *)zero)->geo.max_chunks *= 2;
    same(shmc_validate(zero, image_size, NULL, NULL), SHMC_E_CORRUPT);
    memcpy(zero, image, image_size);
    ((struct header *)zero)->at_blocks += 64;
    same(shmc_validate(zero, image_size, NULL, NULL), SHMC_E_CORRUPT);
    memcpy(zero, image, image_size);
    ((struct header *)zero)->state = SHMC_S_INIT;
    same(shmc_validate(zero, image_size, NULL, NULL), SHMC_E_NOT_READY);
    free(zero);
    free(image);
}

/* A word that links often look like: small indices, NIL, near the ends of tables. */
static uint32_t plausible(uint64_t *s)
{
    switch (rnd(s) % 6) {
    case 0: return NIL;
    case 1: return (uint32_t)(rnd(s) % 40);
    case 2: return (uint32_t)(rnd(s) % 9000);
    case 3: return 0;
    case 4: return (uint32_t)(rnd(s) % 256) << rnd(s) % 24;
    default: return (uint32_t)rnd(s);
    }
}

/* Some words at random places, more of them where something is: the header, first records of each table. */
static void damage_tables(uint8_t *copy, uint64_t *s)
{
    const struct header *h = (const struct header *)image;
    const uint64_t tables[] = {offsetof(struct header, seq), h->at_slots, h->at_regions, h->at_buckets, h->at_part_buckets, h->at_chunks, h->at_blocks, h->at_holds, h->at_events};
    const uint64_t spans[] = {3200, 500, 96, 128, 16384, 32 * 128, 120 * 112, 60 * 36, 8000};
    memcpy(copy, image, image_size);
    for (uint64_t n = 1 + rnd(s) % 6; n > 0; n--) {
        uint64_t t = rnd(s) % 9, at = (tables[t] + rnd(s) % spans[t]) & ~3ull;
        uint32_t word = plausible(s);
        if (rnd(s) % 8 == 0) at = (sizeof(struct header) + rnd(s) % (image_size - sizeof(struct header) - 4)) & ~3ull;
        if (in_mutex(at)) continue;
        if (rnd(s) % 2) memcpy(copy + at, &word, 4);
        else if (rnd(s) % 2) memcpy(copy + at + 2 * (rnd(s) % 2), &word, 2);
        else copy[at + rnd(s) % 4] ^= (uint8_t)(1u << rnd(s) % 8);
    }
}

static void random_damage(void)
{
    uint64_t s = seed * 7919;
    for (uint32_t policy = SHMC_LRU; policy <= SHMC_LFU; policy++) {
        make_image(policy);
        uint8_t *copy = heap(image_size), *again = heap(image_size);
            for (uint32_t i = 0; i < 60 * effort; i++) {
            alarm(120);
            damage_tables(copy, &s);
            memcpy(again, copy, image_size);
            look_at(copy);
            use(again, &s);
        }
        free(copy);
        free(again);
        free(image);
    }
}

static void a_journal_of_the_dead_is_undone_in_a_copy(void)
{
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    store(W.one, 4, 1, 0);
    struct core *c = &W.h->core;
    shmc_stats s, before = stats();
    same(begin(W.h, TX_ALLOC), SHMC_OK);
    tx_begin(c, TX_ALLOC);
    must(extent_take(c, 8) != NIL);
    same(shmc_stats_read(W.base, W.size, &s), SHMC_OK);
    must(!s.exact && s.used != before.used);
    same(shmc_peek_stats(W.base, W.size, &s), SHMC_OK);
    must(s.exact && s.used == before.used && s.blocks == before.blocks && s.largest_free == before.largest_free);
    uint8_t *copy = heap(W.size);
    memcpy(copy, W.base, W.size);
    char text[500];
    same(shmc_verify_copy(copy, W.size, text, sizeof text), 0);
    memcpy(copy, W.base, W.size);
    ((struct header *)copy)->journal.rec[0].off2 = 0xfffffff0u;
    must(shmc_verify_copy(copy, W.size, text, sizeof text) > 0);
    memcpy(copy, W.base, W.size);
    ((struct header *)copy)->journal.count = 1000000;
    must(shmc_verify_copy(copy, W.size, text, sizeof text) > 0);
    memcpy(copy, W.base, W.size);
    ((struct header *)copy)->journal.rec[1].width = 3;
    must(shmc_verify_copy(copy, W.size, text, sizeof text) > 0);
    free(copy);
    tx_rollback(c);
    same(finish(W.h, SHMC_OK), SHMC_OK);
    world_close();
}

/* One more, or one less, of anything that is counted or linked twice: the verifier must say so. */
static void verify_sees_what_is_off_by_one(void)
{
    make_image(SHMC_LRU);
    uint8_t *copy = heap(image_size);
    struct core c;
    core_bind(&c, copy, image_size, &((struct header *)image)->geo);
    struct header *h = c.hdr;
    struct chunk *linked = NULL, *gone = NULL, *shell = NULL;
    struct block *published = NULL, *writing = NULL, *free_one = NULL;
    struct hold *live = NULL;
    memcpy(copy, image, image_size);
    for (uint32_t i = 0; i < c.n_chunks; i++) {
        struct chunk *k = &c.chunks[i];
        if ((k->flags & C_LINKED) && k->held && k->ns_gen == c.namespaces[k->ns].gen) linked = k;
        if (k->flags & C_GONE) gone = k;
        if (k->flags & C_SHELL) shell = k;
    }
    for (uint32_t i = 0; i < c.n_blocks; i++) {
        struct block *b = &c.blocks[i];
        if (b->state == B_PUBLISHED && b->holds != NIL) published = b;
        if (b->state == B_WRITING) writing = b;
        if (b->state == B_FREE) free_one = b;
    }
    for (uint32_t i = 0; i < c.n_holds; i++) if (c.holds[i].kind == H_REF) live = &c.holds[i];
    must(linked && gone && shell && published && writing && free_one && live);
    uint32_t *const words[] = {
        &h->blocks, &h->chunks, &h->holds, &h->parts, &h->complete, &h->linked, &h->stale, &h->slots, &h->namespaces, &h->n_parked,
        &h->ready_grans, &h->used_grans, &h->linked_grans, &h->evictable_grans, &h->fl_map, &h->sl_map[0], &h->level_map[0],
        &h->free_block, &h->free_chunk, &h->free_hold, &h->level_head[0], &h->level_tail[0], &h->parked, &h->journal.count,
        &linked->held, &linked->grans, &linked->holds, &linked->parts, &linked->hnext, &linked->tag, &linked->pprev, &linked->pnext, &linked->ns_gen,
        &gone->held, &shell->held, &published->len, &published->off, &published->refs, &published->holds, &published->chunk,
        &published->phys_prev, &published->phys_next, &published->link_a, &published->part_prev,
        &writing->len, &writing->off, &writing->refs, &writing->holds, &free_one->len, &free_one->off, &free_one->phys_prev, &free_one->link_a,
        &live->target, &live->sprev, &live->snext, &live->tprev, &live->tnext, &live->slot_gen,
        &c.slots[0].n_holds, &c.slots[0].n_writes, &c.slots[0].holds, &c.slots[0].writes, &c.slots[0].gen,
        &c.namespaces[0].chunks, &c.namespaces[0].complete, &c.namespaces[0].grans, &c.regions[0].first, &c.regions[0].state,
    };
    uint16_t *const halves[] = {&linked->published, &linked->flags, &linked->ns, &gone->flags, &shell->flags, &published->state, &published->part,
                                &published->ns, &writing->state, &free_one->state, &live->kind, &live->slot};
    for (int by = -1; by <= 1; by += 2) {
        for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
            memcpy(copy, image, image_size);
            *words[i] += (uint32_t)by;
            if (shmc_verify_copy(copy, image_size, NULL, 0) == 0) die(__FILE__, __LINE__, "word seen", (long long)i * by);
        }
        for (size_t i = 0; i < sizeof halves / sizeof *halves; i++) {
            memcpy(copy, image, image_size);
            *halves[i] = (uint16_t)(*halves[i] + by);
            if (shmc_verify_copy(copy, image_size, NULL, 0) == 0) die(__FILE__, __LINE__, "half seen", (long long)i * by);
        }
    }
    free(copy);
    free(image);
}

/* The hand that looks for outdated chunks never meets what a damaged counter promises. */
static void a_wrong_count_of_outdated_chunks_stops_nobody(void)
{
    struct obj x = {0};
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    struct header *h = W.h->core.hdr;
    for (uint64_t k = 1; k <= 16; k++) store(W.one, 4, k, 0);
    h->stale = 3;
    uint64_t before = h->acquisitions;
    same(try_alloc(&x, W.one, 4, 17, 0, 0), SHMC_OK);
    must(h->acquisitions - before < 20);                 /* it was one for each of thousands of vain looks */
    must(sound("wrong on purpose") > 0);
    h->stale = 0;
    drop(&x);
    world_close();
}

/* A search for a run came back to it thousands of times, since draining never freed it. */
static void a_chunk_that_seems_to_drain_but_is_on_no_list_poisons(void)
{
    struct obj x = {0};
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    for (uint64_t k = 1; k <= 16; k++) store(W.one, 4, k, 0);
    struct core *c = &W.h->core;
    for (uint32_t i = 0; i < c->n_chunks; i++)
        if (c->chunks[i].flags) c->chunks[i].flags = C_DRAIN;
    uint64_t before = c->hdr->acquisitions;
    same(try_alloc(&x, W.one, 20, 17, 0, 0), SHMC_E_POISONED);
    must(c->hdr->acquisitions - before < 20);
    shmc_owner_free(x.o);
    shmc_free(W.h);
    world_drop();
}

const struct unit UNIT_DAMAGE[] = {
    {"every byte of the header may be flipped: refused, poisoned or harmless", every_byte_of_the_header},
    {"short, foreign and unfinished files are told apart", short_and_foreign_files},
    {"random damage of the tables: violations or poisoned, never a crash or a hang", random_damage},
    {"a journal of the dead is undone in a copy, a damaged one is reported", a_journal_of_the_dead_is_undone_in_a_copy},
    {"verify sees every counter and link that is off by one", verify_sees_what_is_off_by_one},
    {"a wrong count of outdated chunks stops nobody", a_wrong_count_of_outdated_chunks_stops_nobody},
    {"a chunk that seems to drain but is on no list poisons", a_chunk_that_seems_to_drain_but_is_on_no_list_poisons},
    {NULL, NULL},
};
