/* peek.c -- records of the tables, copied for people: without the lock, from a mapping that may be
 * read-only, of a segment that may be live, stopped half way, poisoned or a copy.
 *
 * Every index is range-checked, every walk has a bound that does not depend on the segment's health,
 * nothing is written. Shared words are loaded one by one with relaxed atomics (types.h), so that nothing is read twice
 * and no race is undefined. A record, and the walk for one key, is of one instant between two transactions, which the
 * sequence word shows, or after a few tries, as beside a holder that is stopped half way, as it stands; a table is not.
 * Whoever needs the whole table as one uses shmc_verify, or a copy. */
#include "holds.h"
#include "index.h"
#include "lock.h"

enum { SLICE = 65536, CHAIN = 4096, STATS_TRIES = 100, FUTEX_DIED = 0x40000000 };

_Static_assert(SHMC_C_LINKED == (int)C_LINKED && SHMC_C_PARKED == (int)C_PARKED && SHMC_C_GONE == (int)C_GONE && SHMC_C_DRAIN == (int)C_DRAIN && SHMC_C_SHELL == (int)C_SHELL, "public names");
_Static_assert(SHMC_X_FREE == (int)B_FREE && SHMC_X_WRITING == (int)B_WRITING && SHMC_X_PUBLISHED == (int)B_PUBLISHED, "public names");
_Static_assert(SHMC_H_REF == (int)H_REF && SHMC_H_WRITE == (int)H_WRITE && SHMC_H_BLOCK_PIN == (int)H_BLOCK_PIN && SHMC_H_KEY_PIN == (int)H_KEY_PIN && SHMC_H_LOOKUP_PIN == (int)H_LOOKUP_PIN && SHMC_H_WRITE_PIN == (int)H_WRITE_PIN, "public names");

static int look(struct core *c, const void *base, uint64_t size, shmc_geometry *g)
{
    int rc = shmc_validate(base, size, g, NULL);
    if (!rc) core_bind(c, (void *)(uintptr_t)base, size, g);    /* only read through, in this file */
    return rc;
}

/* What recovery would do, to a private header. */
static void undo_in(struct header *h)
{
    for (uint32_t n = h->journal.count < JOURNAL_CAP ? h->journal.count : JOURNAL_CAP; n-- > 0;) {
        const struct undo *u = &h->journal.rec[n];
        uint64_t off = (uint64_t)u->off2 * 2;
        if (off < offsetof(struct header, seq) || off + u->width > offsetof(struct header, journal)) continue;   /* of a table */
        if (u->width == 2 || u->width == 4 || u->width == 8) memcpy((uint8_t *)h + off, &u->old, u->width);      /* little-endian */
    }
    h->journal.count = 0;                        /* unlogged: a private copy */
    h->seq = 0;                                  /* unlogged: as above */
}

int shmc_peek_stats(const void *base, uint64_t size, shmc_stats *out)
{
    const struct header *h = base;
    struct header copy;
    uint8_t again[sizeof(struct header)];
    const size_t from = offsetof(struct header, seq), rest = sizeof copy - from;
    int rc = shmc_stats_read(base, size, out);
    for (int tries = 0; rc == 0 && !out->exact && tries < LOOK_TRIES; tries++) {
        load_words(&copy, h, sizeof copy);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        load_words(again, (const uint8_t *)h + from, rest);
        if (memcmp((uint8_t *)&copy + from, again, rest) != 0) continue;   /* it goes on */
        if (copy.seq & 1) undo_in(&copy);
        rc = shmc_stats_read(&copy, size, out);  /* it looks at the header only */
    }
    return rc;
}

int shmc_peek_lock(const void *base, uint64_t size, shmc_lock_info *out)
{
    const struct header *h = base;
    shmc_geometry g;
    int rc = shmc_validate(base, size, &g, NULL);
    if (rc) return rc;
    *out = (shmc_lock_info){
        .acquisitions = PEEK(&h->acquisitions), .hold_since_ns = PEEK(&h->hold_since),
        .holder_slot = PEEK(&h->holder_slot), .holder_op = PEEK(&h->holder_op), .owner_tid = lock_owner_tid(h),
        .owner_died = (lock_word(h) & FUTEX_DIED) != 0, .awaited = lock_awaited(h), .in_transaction = (uint32_t)(PEEK(&h->seq) & 1),
        .journal = PEEK(&h->journal.count), .stale = PEEK(&h->stale), .parked = PEEK(&h->n_parked),
        .waiting_memory = PEEK(&h->waiters[0]), .waiting_publication = PEEK(&h->waiters[1]), .handshake_pid = PEEK(&h->handshake_pid)};
    return SHMC_OK;
}

int shmc_peek_namespace(const void *base, uint64_t size, uint32_t ns, shmc_namespace_info *out)
{
    struct core c;
    shmc_geometry g;
    int rc = look(&c, base, size, &g);
    if (rc) return rc;
    if (ns >= c.n_namespaces) return SHMC_E_NOT_FOUND;
    const struct namespace *n = &c.namespaces[ns];
    for (int tries = 0; tries < STATS_TRIES; tries++) {
        uint64_t seen = look_begin(c.hdr);
        *out = (shmc_namespace_info){.used = PEEK(&n->used), .parts = PEEK(&n->parts), .generation = PEEK(&n->gen), .chunks = PEEK(&n->chunks), .complete = PEEK(&n->complete),
            .name_len = PEEK(&n->name_len), .desc_len = PEEK(&n->desc_len), .bytes = (uint64_t)PEEK(&n->grans) << c.align_shift,
            .hits = PEEK(&n->hits), .misses = PEEK(&n->misses), .stores = PEEK(&n->stores), .evictions = PEEK(&n->evictions)};
        load_words(out->name, n->name, sizeof out->name);
        load_words(out->desc, n->desc, sizeof out->desc);
        if (look_agrees(c.hdr, seen)) break;
    }
    if (out->name_len > SHMC_NAME_MAX) out->name_len = SHMC_NAME_MAX;
    if (out->desc_len > SHMC_DESC_MAX) out->desc_len = SHMC_DESC_MAX;
    return out->used ? SHMC_OK : SHMC_E_NOT_FOUND;
}

int shmc_peek_region(const void *base, uint64_t size, uint32_t region, shmc_region_info *out)
{
    struct core c;
    struct region r;
    shmc_geometry g;
    int rc = look(&c, base, size, &g);
    if (rc) return rc;
    if (region >= c.n_regions) return SHMC_E_NOT_FOUND;
    load_record(c.hdr, &r, &c.regions[region], sizeof r);
    *out = (shmc_region_info){.inode = r.inode, .bytes = r.bytes, .state = r.state, .owner = r.owner, .flags = r.flags, .node = r.node};
    return SHMC_OK;
}

/* ---- tables ----------------------------------------------------------------------------------- */

static void chunk_out(const struct core *c, uint32_t i, const struct chunk *k, shmc_chunk_info *o)
{
    *o = (shmc_chunk_info){.stamp = k->stamp, .bytes = (uint64_t)k->grans << c->align_shift, .chunk = i, .gen = k->gen, .ns = k->ns, .ns_gen = k->ns_gen,
        .flags = k->flags, .published = k->published, .held = k->held, .pins = k->holds != NIL, .admit_tick = k->admit_tick, .last_tick = k->last_tick,
        .klen = k->klen <= SHMC_KEY_MAX ? k->klen : SHMC_KEY_MAX, .ktype = k->ktype};
    memcpy(o->key, k->key, sizeof o->key);
}

static void block_out(const struct core *c, uint32_t i, const struct block *b, shmc_block_info *o)
{
    *o = (shmc_block_info){.offset = (uint64_t)b->off << c->align_shift, .extent = (uint64_t)b->len << c->align_shift, .size = b->size, .block = i, .gen = b->gen,
        .state = b->state, .chunk = b->state == B_FREE ? NIL : b->chunk, .ns = b->ns, .ns_gen = b->ns_gen, .part = b->part, .refs = b->refs,
        .held = b->state != B_FREE && b->holds != NIL, .meta_len = b->meta_len <= SHMC_META_MAX ? b->meta_len : SHMC_META_MAX};
    memcpy(o->meta, b->meta, sizeof o->meta);
}

/* The records one call looks at: [*cursor, the end of this slice). */
static uint32_t slice_end(uint32_t cursor, uint32_t count)
{
    return cursor >= count ? cursor : count - cursor > SLICE ? cursor + SLICE : count;
}

int shmc_peek_chunks(const void *base, uint64_t size, uint32_t *cursor, shmc_chunk_info *out, uint32_t cap, uint32_t *n)
{
    struct core c;
    struct chunk k;
    shmc_geometry g;
    int rc = look(&c, base, size, &g);
    *n = 0;
    if (rc) return rc;
    for (uint32_t end = slice_end(*cursor, c.n_chunks); *cursor < end && *n < cap; ++*cursor) {
        if (!PEEK(&c.chunks[*cursor].flags)) continue;
        load_record(c.hdr, &k, &c.chunks[*cursor], sizeof k);
        if (k.flags) chunk_out(&c, *cursor, &k, &out[(*n)++]);
    }
    return *cursor < c.n_chunks ? SHMC_MORE : SHMC_OK;
}

int shmc_peek_blocks(const void *base, uint64_t size, uint32_t *cursor, shmc_block_info *out, uint32_t cap, uint32_t *n)
{
    struct core c;
    struct block b;
    shmc_geometry g;
    int rc = look(&c, base, size, &g);
    *n = 0;
    if (rc) return rc;
    for (uint32_t end = slice_end(*cursor, c.n_blocks); *cursor < end && *n < cap; ++*cursor) {
        if (PEEK(&c.blocks[*cursor].state) == B_UNUSED) continue;
        load_record(c.hdr, &b, &c.blocks[*cursor], sizeof b);
        if (b.state != B_UNUSED) block_out(&c, *cursor, &b, &out[(*n)++]);
    }
    return *cursor < c.n_blocks ? SHMC_MORE : SHMC_OK;
}

int shmc_peek_holds(const void *base, uint64_t size, uint32_t *cursor, shmc_hold_info *out, uint32_t cap, uint32_t *n)
{
    struct core c;
    struct hold k;
    shmc_geometry g;
    int rc = look(&c, base, size, &g);
    *n = 0;
    if (rc) return rc;
    for (uint32_t end = slice_end(*cursor, c.n_holds); *cursor < end && *n < cap; ++*cursor) {
        if (PEEK(&c.holds[*cursor].kind) == H_FREE) continue;
        load_record(c.hdr, &k, &c.holds[*cursor], sizeof k);
        if (k.kind == H_FREE) continue;
        bool on_block = hold_on_block(k.kind);
        out[(*n)++] = (shmc_hold_info){.hold = *cursor, .gen = k.gen, .kind = k.kind, .slot = k.slot, .slot_gen = k.slot_gen, .deadline = k.deadline, .taken = k.taken,
            .block = on_block ? k.target : NIL, .chunk = !on_block ? k.target : k.target < c.n_blocks ? PEEK(&c.blocks[k.target].chunk) : NIL};
    }
    return *cursor < c.n_holds ? SHMC_MORE : SHMC_OK;
}

/* ---- one key ------------------------------------------------------------------------------------ */

int shmc_peek_key(const void *base, uint64_t size, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype, shmc_chunk_info *out, uint32_t cap, uint32_t *n)
{
    struct core c;
    struct chunk k;
    shmc_geometry g;
    int rc = look(&c, base, size, &g);
    *n = 0;
    if (rc) return rc;
    if (ns >= c.n_namespaces || klen > SHMC_KEY_MAX) return SHMC_E_INVAL;
    const uint32_t *bucket = index_bucket(&c, index_hash(&c, ns, key, klen, ktype));
    for (int tries = 0; tries < LOOK_TRIES; tries++) {    /* a chunk that moves to another chain meanwhile would hide those after it */
        uint64_t seen = look_begin(c.hdr);
        uint32_t i = PEEK(bucket);
        *n = 0;
        for (uint32_t steps = 0; i < c.n_chunks && steps < CHAIN && *n < cap; steps++, i = k.hnext) {   /* load <= 2, seeded */
            load_record(c.hdr, &k, &c.chunks[i], sizeof k);
            if (k.flags && k.ns == ns && k.klen == klen && k.ktype == ktype && !memcmp(k.key, key, klen)) chunk_out(&c, i, &k, &out[(*n)++]);
        }
        if (look_agrees(c.hdr, seen)) break;
    }
    return SHMC_OK;
}

int shmc_peek_parts(const void *base, uint64_t size, uint32_t chunk, uint32_t gen, shmc_block_info *out, uint32_t cap, uint32_t *n)
{
    struct core c;
    struct block b;
    shmc_geometry g;
    int rc = look(&c, base, size, &g);
    *n = 0;
    if (rc) return rc;
    if (chunk >= c.n_chunks) return SHMC_E_INVAL;
    const struct chunk *k = &c.chunks[chunk];
    for (int tries = 0; tries < LOOK_TRIES; tries++) {
        uint64_t seen = look_begin(c.hdr);
        uint32_t i = PEEK(&k->parts);
        *n = 0;
        for (uint32_t steps = 0; i < c.n_blocks && steps < SHMC_PARTS_MAX && *n < cap; steps++, i = b.link_b) {
            load_record(c.hdr, &b, &c.blocks[i], sizeof b);
            if (b.chunk != chunk || b.state == B_UNUSED || b.state == B_FREE) break;      /* it moved on: the rest is another list */
            block_out(&c, i, &b, &out[(*n)++]);
        }
        if (look_agrees(c.hdr, seen)) break;
    }
    return PEEK(&k->gen) == gen ? SHMC_OK : SHMC_E_NOT_FOUND;
}
