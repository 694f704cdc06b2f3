/* check.c -- see check.h. Every link is range-checked, every walk ends after as many steps as its
 * table has records, every record is visited at most once per role (marks in private scratch). */
#include <stdarg.h>
#include <stdio.h>
#include "check.h"
#include "extents.h"

struct report { char *text; uint32_t cap, used, count; };

__attribute__((format(printf, 2, 3)))
static void say(struct report *r, const char *fmt, ...)
{
    r->count++;
    if (r->used + 2 >= r->cap) return;
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(r->text + r->used, r->cap - r->used - 1, fmt, ap);
    va_end(ap);
    if (n < 0) return;
    uint32_t add = (uint32_t)n, room = r->cap - r->used - 2;
    r->used += add < room ? add : room;
    r->text[r->used++] = '\n';
    r->text[r->used] = 0;
}

enum mark { M_FREE = 1, M_PHYS = 2, M_BIN = 4, M_PART = 8, M_INDEX = 16, M_POLICY = 32, M_SLOT = 64, M_TARGET = 128 };

struct marks { uint8_t *chunk, *block, *hold; };

uint64_t check_scratch(const struct core *c)
{
    return (uint64_t)c->n_chunks + c->n_blocks + c->n_holds;
}

/* First visit in this role? Complains about range and about a second visit. */
static bool visit(struct report *r, uint8_t *marks, uint32_t n, uint32_t i, enum mark m, const char *list)
{
    if (i >= n) { say(r, "%s: index %u out of range", list, i); return false; }
    if (marks[i] & m) { say(r, "%s: record %u is there twice", list, i); return false; }
    marks[i] |= (uint8_t)m;
    return true;
}

static void check_free_lists(struct core *c, struct marks *m, struct report *r)
{
    struct header *h = c->hdr;
    uint32_t n = 0;
    for (uint32_t i = h->free_block; i != NIL && visit(r, m->block, c->n_blocks, i, M_FREE, "free blocks"); i = c->blocks[i].link_a, n++)
        if (c->blocks[i].state != B_UNUSED) say(r, "free blocks: block %u has state %u", i, c->blocks[i].state);
    if (n + h->blocks != c->n_blocks) say(r, "blocks: %u free + %u used != %u", n, h->blocks, c->n_blocks);
    n = 0;
    for (uint32_t i = h->free_chunk; i != NIL && visit(r, m->chunk, c->n_chunks, i, M_FREE, "free chunks"); i = c->chunks[i].pnext, n++)
        if (c->chunks[i].flags) say(r, "free chunks: chunk %u has flags %x", i, c->chunks[i].flags);
    if (n + h->chunks != c->n_chunks) say(r, "chunks: %u free + %u used != %u", n, h->chunks, c->n_chunks);
    n = 0;
    for (uint32_t i = h->free_hold; i != NIL && visit(r, m->hold, c->n_holds, i, M_FREE, "free holds"); i = c->holds[i].tnext, n++)
        if (c->holds[i].kind != H_FREE) say(r, "free holds: hold %u has kind %u", i, c->holds[i].kind);
    if (n + h->holds != c->n_holds) say(r, "holds: %u free + %u used != %u", n, h->holds, c->n_holds);
}

/* 1. extents tile every ready region, no two free neighbours, bins hold exactly the free ones */
static void check_extents(struct core *c, struct marks *m, struct report *r)
{
    struct header *h = c->hdr;
    uint64_t ready = 0, used = 0, in_bins = 0, free_extents = 0;
    for (uint32_t i = 0; i < c->n_regions; i++) {
        const struct region *g = &c->regions[i];
        if (g->state > SHMC_R_READY) say(r, "region %u: state %u", i, g->state);
        if (g->state != SHMC_R_READY) continue;
        uint64_t at = (uint64_t)i * c->stride_grans, end = at + (g->bytes >> c->align_shift);
        uint32_t prev = NIL;
        for (uint32_t b = g->first; b != NIL; b = c->blocks[b].phys_next) {
            if (!visit(r, m->block, c->n_blocks, b, M_PHYS, "extents")) break;
            const struct block *k = &c->blocks[b];
            if (k->off != at || k->len == 0) { say(r, "region %u: extent %u at %u, expected %llu", i, b, k->off, (unsigned long long)at); break; }
            if (k->phys_prev != prev) say(r, "extent %u: back link %u, expected %u", b, k->phys_prev, prev);
            if (k->state != B_FREE && k->state != B_WRITING && k->state != B_PUBLISHED) say(r, "extent %u: state %u", b, k->state);
            if (k->state == B_FREE) {
                free_extents++;
                if (prev != NIL && c->blocks[prev].state == B_FREE) say(r, "extents %u and %u: free neighbours", prev, b);
            } else {
                used += k->len;
            }
            at += k->len;
            prev = b;
        }
        if (at != end) say(r, "region %u: extents end at %llu, expected %llu", i, (unsigned long long)at, (unsigned long long)end);
        ready += g->bytes >> c->align_shift;
    }
    for (uint32_t bin = 0; bin < N_BINS; bin++) {
        uint32_t prev = NIL;
        for (uint32_t b = h->bin[bin]; b != NIL && visit(r, m->block, c->n_blocks, b, M_BIN, "bin"); prev = b, b = c->blocks[b].link_b) {
            const struct block *k = &c->blocks[b];
            if (k->state != B_FREE || extent_bin(c, k->len) != bin) say(r, "bin %u: extent %u of %u granules, state %u", bin, b, k->len, k->state);
            if (k->link_a != prev) say(r, "bin %u: extent %u back link", bin, b);
            if (!(m->block[b] & M_PHYS)) say(r, "bin %u: extent %u is in no region", bin, b);
            in_bins++;
        }
        if (bin == BIN_WHOLE) continue;
        bool bit = h->sl_map[bin / SL_COUNT] >> (bin % SL_COUNT) & 1;
        if (bit != (h->bin[bin] != NIL)) say(r, "bin %u: bitmap says %d", bin, bit);
    }
    for (uint32_t fl = 0; fl < FL_COUNT; fl++)
        if ((h->fl_map >> fl & 1) != (h->sl_map[fl] != 0)) say(r, "bins: first level %u", fl);
    if (in_bins != free_extents) say(r, "bins hold %llu extents, %llu are free", (unsigned long long)in_bins, (unsigned long long)free_extents);
    if (ready != h->ready_grans) say(r, "ready: counted %llu, stored %u", (unsigned long long)ready, h->ready_grans);
    if (used != h->used_grans) say(r, "used: counted %llu, stored %u", (unsigned long long)used, h->used_grans);
}

/* 4. every hold is on exactly one slot's list and one target's list, and both count it */
static void check_holds(struct core *c, struct marks *m, struct report *r)
{
    uint32_t live = 0, n_slots = 0;
    for (uint32_t s = 0; s < c->n_slots; s++) {
        const struct slot *k = &c->slots[s];
        if (k->state == SHMC_SLOT_FREE) continue;
        n_slots++;
        if (k->state > SHMC_SLOT_REAPING) say(r, "slot %u: state %u", s, k->state);
        for (int w = 0; w < 2; w++) {
            uint32_t prev = NIL, n = 0;
            for (uint32_t i = w ? k->writes : k->holds; i != NIL && visit(r, m->hold, c->n_holds, i, M_SLOT, "slot list"); prev = i, i = c->holds[i].snext, n++) {
                const struct hold *o = &c->holds[i];
                if (o->slot != s || o->slot_gen != k->gen) say(r, "hold %u: on slot %u's list, owner %u", i, s, o->slot);
                if (hold_on_writes(o->kind) != (w == 1) || o->kind == H_FREE || o->kind > H_WRITE_PIN) say(r, "hold %u: kind %u on the wrong list", i, o->kind);
                if (o->sprev != prev) say(r, "hold %u: back link", i);
            }
            if (n != (w ? k->n_writes : k->n_holds)) say(r, "slot %u: counted %u holds, stored %u", s, n, w ? k->n_writes : k->n_holds);
            live += n;
        }
    }
    if (live != c->hdr->holds) say(r, "holds: counted %u, stored %u", live, c->hdr->holds);
    if (n_slots != c->hdr->slots) say(r, "slots: counted %u, stored %u", n_slots, c->hdr->slots);
}

static uint32_t target_walk(struct core *c, struct marks *m, struct report *r, uint32_t head, uint32_t target, bool block, uint32_t *refs)
{
    uint32_t n = 0, prev = NIL;
    for (uint32_t i = head; i != NIL && visit(r, m->hold, c->n_holds, i, M_TARGET, "target list"); prev = i, i = c->holds[i].tnext, n++) {
        const struct hold *o = &c->holds[i];
        if (o->target != target || hold_on_block(o->kind) != block) say(r, "hold %u: on the list of %s %u, target %u", i, block ? "block" : "chunk", target, o->target);
        if (o->tprev != prev) say(r, "hold %u: target back link", i);
        if (!(m->hold[i] & M_SLOT)) say(r, "hold %u: on no slot's list", i);
        if (hold_is_ref(o->kind)) ++*refs;
    }
    return n;
}

/* 2, 3. parts, index, policy lists, counters */
static void check_blocks(struct core *c, struct marks *m, struct report *r)
{
    uint32_t described = 0;
    for (uint32_t i = 0; i < c->n_blocks; i++) {
        const struct block *b = &c->blocks[i];
        if (b->state != B_UNUSED) described++;
        if (b->state == B_UNUSED || b->state == B_FREE) {
            if (b->state == B_FREE && !(m->block[i] & M_PHYS)) say(r, "block %u: free and in no region", i);
            continue;
        }
        uint32_t refs = 0, n = target_walk(c, m, r, b->holds, i, true, &refs);
        if (!(m->block[i] & M_PHYS)) say(r, "block %u: allocated and in no region", i);
        if (refs != b->refs) say(r, "block %u: counted %u refs, stored %u", i, refs, b->refs);
        if (b->state == B_WRITING && n == 0) say(r, "block %u: written by nobody", i);
        if (b->state == B_PUBLISHED && b->chunk == NIL) say(r, "block %u: published in no chunk", i);
        if (b->meta_len > SHMC_META_MAX || b->size > (uint64_t)b->len << c->align_shift) say(r, "block %u: sizes", i);
    }
    if (described != c->hdr->blocks) say(r, "blocks: %u described, stored %u", described, c->hdr->blocks);
}

static void check_chunk(struct core *c, struct marks *m, struct report *r, uint32_t i, uint64_t *parts)
{
    const struct chunk *k = &c->chunks[i];
    uint32_t none = 0, held = target_walk(c, m, r, k->holds, i, false, &none), published = 0, prev = NIL, n = 0;
    uint64_t grans = 0;
    if (k->ns >= c->n_namespaces || k->klen > SHMC_KEY_MAX) { say(r, "chunk %u: namespace %u, key of %u bytes", i, k->ns, k->klen); return; }
    for (uint32_t b = k->parts; b != NIL && visit(r, m->block, c->n_blocks, b, M_PART, "parts"); prev = b, b = c->blocks[b].link_b, n++) {
        const struct block *o = &c->blocks[b];
        if (o->chunk != i || o->ns != k->ns || o->part >= c->namespaces[k->ns].parts) say(r, "chunk %u: part block %u belongs to chunk %u", i, b, o->chunk);
        if (o->part_prev != prev) say(r, "chunk %u: part back link", i);
        if (o->state == B_PUBLISHED) { published++; grans += o->len; }
        else if (o->state != B_WRITING) say(r, "chunk %u: part block %u has state %u", i, b, o->state);
        if (o->holds != NIL) held++;
        if (!(m->block[b] & M_INDEX)) say(r, "chunk %u: part %u is in no bucket", i, o->part);
    }
    *parts += n;
    uint32_t f = k->flags & ~(uint32_t)C_PARKED;
    if (k->flags & C_DRAIN) {
        if (held) say(r, "chunk %u: draining with %u holders", i, held);
        return;
    }
    if (f != C_LINKED && f != C_GONE && f != C_SHELL) say(r, "chunk %u: flags %x", i, k->flags);
    if (published != k->published || grans != k->grans) say(r, "chunk %u: %u parts of %llu granules, stored %u of %u", i, published, (unsigned long long)grans, k->published, k->grans);
    if (held != k->held) say(r, "chunk %u: counted %u holders, stored %u", i, held, k->held);
    if (f == C_SHELL && (published || !held)) say(r, "chunk %u: shell with %u published parts, %u holders", i, published, held);
    if (f == C_GONE && !held) say(r, "chunk %u: removed, not held, not draining", i);
    if (!(m->chunk[i] & M_INDEX)) say(r, "chunk %u: in no bucket", i);
    if (((m->chunk[i] & M_POLICY) != 0) != (f == C_LINKED)) say(r, "chunk %u: flags %x, on a policy list: %d", i, k->flags, (m->chunk[i] & M_POLICY) != 0);
    if (published && !(k->flags & (C_LINKED | C_GONE))) say(r, "chunk %u: published parts outside the index", i);
}

static void check_index(struct core *c, struct marks *m, struct report *r)
{
    for (uint32_t b = 0; b < c->n_buckets; b++)
        for (uint32_t i = c->buckets[b]; i != NIL && visit(r, m->chunk, c->n_chunks, i, M_INDEX, "bucket"); i = c->chunks[i].hnext) {
            const struct chunk *k = &c->chunks[i];
            uint32_t len = k->klen <= SHMC_KEY_MAX ? k->klen : 0;
            uint64_t hash = index_hash(c, k->ns, k->key, len, k->ktype);
            if (((uint32_t)hash & (c->n_buckets - 1)) != b || (uint32_t)(hash >> 32) != k->tag) say(r, "bucket %u: chunk %u does not belong", b, i);
            if (!(k->flags & (C_LINKED | C_GONE | C_SHELL))) say(r, "bucket %u: chunk %u has flags %x", b, i, k->flags);
        }
}

static void check_part_index(struct core *c, struct marks *m, struct report *r)
{
    for (uint32_t bucket = 0; bucket < c->n_part_buckets; bucket++)
        for (uint32_t b = c->part_buckets[bucket]; b != NIL && visit(r, m->block, c->n_blocks, b, M_INDEX, "part bucket"); b = c->blocks[b].link_a) {
            const struct block *k = &c->blocks[b];
            if (k->chunk >= c->n_chunks || (k->state != B_PUBLISHED && k->state != B_WRITING) || part_bucket(c, k->chunk, k->part) != &c->part_buckets[bucket])
                say(r, "part bucket %u: block %u does not belong", bucket, b);
        }
}

static void check_policy(struct core *c, struct marks *m, struct report *r)
{
    struct header *h = c->hdr;
    uint32_t listed = 0, parked = 0;
    for (uint32_t level = 0; level < N_LEVELS; level++) {
        uint32_t prev = NIL;
        for (uint32_t i = h->level_head[level]; i != NIL && visit(r, m->chunk, c->n_chunks, i, M_POLICY, "policy list"); prev = i, i = c->chunks[i].pnext, listed++) {
            const struct chunk *k = &c->chunks[i];
            if (k->pprev != prev || k->flags != C_LINKED) say(r, "policy list %u: chunk %u, flags %x", level, i, k->flags);
            if ((uint32_t)(k->stamp >> 48) != level) say(r, "policy list %u: chunk %u has level %u", level, i, (uint32_t)(k->stamp >> 48));
        }
        if (h->level_tail[level] != prev) say(r, "policy list %u: tail %u, expected %u", level, h->level_tail[level], prev);
        if ((h->level_map[level / 32] >> (level % 32) & 1) != (h->level_head[level] != NIL)) say(r, "policy list %u: bitmap", level);
    }
    uint32_t prev = NIL;
    for (uint32_t i = h->parked; i != NIL && visit(r, m->chunk, c->n_chunks, i, M_POLICY, "parked list"); prev = i, i = c->chunks[i].pnext, parked++) {
        const struct chunk *k = &c->chunks[i];
        if (k->pprev != prev || k->flags != (C_LINKED | C_PARKED) || !k->held) say(r, "parked list: chunk %u, flags %x, %u holders", i, k->flags, k->held);
    }
    if (parked != h->n_parked) say(r, "parked: counted %u, stored %u", parked, h->n_parked);
    if (listed + parked != h->linked) say(r, "policy: %u listed + %u parked != %u linked", listed, parked, h->linked);
}

static void check_counters(struct core *c, struct marks *m, struct report *r)
{
    struct header *h = c->hdr;
    uint64_t used = 0, linked = 0, grans = 0, evictable = 0, complete = 0, stale = 0, parts = 0, draining = 0;
    struct { uint64_t chunks, complete, grans; } in[MAX_NAMESPACES] = {{0, 0, 0}};
    for (uint32_t i = 0; i < c->n_chunks; i++) {
        const struct chunk *k = &c->chunks[i];
        if (!k->flags) continue;
        used++;
        check_chunk(c, m, r, i, &parts);
        if (k->flags & C_DRAIN) draining++;
        if (!(k->flags & C_LINKED) || k->ns >= c->n_namespaces) continue;
        linked++;
        grans += k->grans;
        if (!k->held) evictable += k->grans;
        if (k->published == c->namespaces[k->ns].parts) complete++;
        if (k->ns_gen != c->namespaces[k->ns].gen) { stale++; continue; }
        if (k->ns >= MAX_NAMESPACES) continue;
        in[k->ns].chunks++;
        in[k->ns].grans += k->grans;
        if (k->published == c->namespaces[k->ns].parts) in[k->ns].complete++;
    }
    uint64_t on_list = 0;
    for (uint32_t i = h->drain; i != NIL && i < c->n_chunks && on_list <= draining; i = c->chunks[i].pnext, on_list++)
        if (c->chunks[i].flags != C_DRAIN) say(r, "drain list: chunk %u has flags %x", i, c->chunks[i].flags);
    if (on_list != draining) say(r, "drain list: %llu chunks, %llu are draining", (unsigned long long)on_list, (unsigned long long)draining);
#define SAME(what, counted, stored) if ((counted) != (stored)) say(r, what ": counted %llu, stored %llu", (unsigned long long)(counted), (unsigned long long)(stored))
    SAME("chunk records", used, (uint64_t)h->chunks);
    SAME("linked chunks", linked, (uint64_t)h->linked);
    SAME("linked granules", grans, (uint64_t)h->linked_grans);
    SAME("evictable granules", evictable, (uint64_t)h->evictable_grans);
    SAME("complete chunks", complete, (uint64_t)h->complete);
    SAME("outdated chunks", stale, (uint64_t)h->stale);
    SAME("parts", parts, (uint64_t)h->parts);
    uint64_t n_ns = 0;
    for (uint32_t i = 0; i < c->n_namespaces && i < MAX_NAMESPACES; i++) {
        const struct namespace *n = &c->namespaces[i];
        if (!n->used) continue;
        n_ns++;
        SAME("chunks of a namespace", in[i].chunks, (uint64_t)n->chunks);
        SAME("complete chunks of a namespace", in[i].complete, (uint64_t)n->complete);
        SAME("granules of a namespace", in[i].grans, (uint64_t)n->grans);
    }
    SAME("namespaces", n_ns, (uint64_t)h->namespaces);
}

/* 6. the readable window is gapless, and every admission minus every removal is what is there */
static void check_events(struct core *c, struct report *r)
{
    struct header *h = c->hdr;
    if (h->event_published != h->event_head) say(r, "events: %llu published, head %llu", (unsigned long long)h->event_published, (unsigned long long)h->event_head);
    uint64_t window = c->n_events - EVENT_SLACK, from = h->event_head > window ? h->event_head - window : 0;
    int64_t balance = 0;
    for (uint64_t s = from; s < h->event_head; s++) {
        const struct event_rec *e = &c->events[s & (c->n_events - 1)];
        if (e->seq != s) { say(r, "events: record %llu has number %llu", (unsigned long long)s, (unsigned long long)e->seq); return; }
        balance += e->kind == SHMC_EV_ADMIT ? 1 : e->complete ? -1 : 0;
    }
    if (from == 0 && balance != (int64_t)h->complete) say(r, "events: admitted - removed = %lld, complete chunks %u", (long long)balance, h->complete);
}

uint32_t check_all(struct core *c, void *scratch, char *text, uint32_t cap)
{
    struct report r = {text, cap, 0, 0};
    struct marks m;
    uint8_t *at = scratch;
    if (cap) text[0] = 0;
    memset(scratch, 0, check_scratch(c));
    m.chunk = at;
    m.block = m.chunk + c->n_chunks;
    m.hold = m.block + c->n_blocks;
    /* 5. outside the lock the journal is empty */
    if (c->hdr->journal.count) say(&r, "journal: %u records outside a transaction", c->hdr->journal.count);
    check_free_lists(c, &m, &r);
    check_extents(c, &m, &r);
    check_holds(c, &m, &r);
    check_blocks(c, &m, &r);
    check_index(c, &m, &r);
    check_part_index(c, &m, &r);
    check_policy(c, &m, &r);
    check_counters(c, &m, &r);
    check_events(c, &r);
    for (uint32_t i = 0; i < c->n_holds; i++)
        if (c->holds[i].kind != H_FREE && (m.hold[i] & (M_SLOT | M_TARGET)) != (M_SLOT | M_TARGET)) say(&r, "hold %u: slot list %d, target list %d", i, !!(m.hold[i] & M_SLOT), !!(m.hold[i] & M_TARGET));
    if (c->bad) say(&r, "an index out of range was met");
    return r.count;
}
