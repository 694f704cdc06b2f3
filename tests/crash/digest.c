/* digest.c -- one number for all that a process could tell apart in a segment.
 *
 * Two states with the same digest have the same chunks under the same keys with the same parts, in
 * the same order of eviction; the same extents; the same holds on the same lists; the same
 * namespaces, regions, slots, events and counters. Left out: statistics, pids, times, record
 * numbers, the order of free lists, and fields of records that nothing reaches.
 * Works on damaged tables too: every link is range-checked, every walk bounded.
 */
#include <string.h>
#include "world.h"

enum { STEPS = 20000 };

struct mix { struct core *c; uint64_t h; };

static void add(struct mix *m, uint64_t v)
{
    m->h = (m->h ^ v) * 0x9fb21c651e98df25u;
    m->h ^= m->h >> 32;
}

static void bytes(struct mix *m, const void *p, size_t n)
{
    const uint8_t *b = p;
    for (size_t i = 0; i < n; i++) add(m, b[i]);
}

static void chunk_name(struct mix *m, uint32_t i)
{
    if (i == NIL) { add(m, NIL); return; }
    const struct chunk *k = chunk_at(m->c, i);
    bytes(m, k->key, sizeof k->key);
    add(m, (uint64_t)k->klen << 48 | (uint64_t)k->ktype << 32 | k->ns);
    add(m, (uint64_t)k->ns_gen << 32 | k->gen);
}

static void hold(struct mix *m, const struct hold *o)
{
    add(m, (uint64_t)o->kind << 32 | o->gen);
    add(m, (uint64_t)o->slot << 32 | o->slot_gen);
    add(m, o->deadline != 0);
    if (hold_on_block(o->kind)) add(m, block_at(m->c, o->target)->off);
    else chunk_name(m, o->target);
}

static void holds_of_target(struct mix *m, uint32_t head)
{
    for (uint32_t i = head, n = 0; i != NIL && n < STEPS; i = hold_at(m->c, i)->tnext, n++) hold(m, hold_at(m->c, i));
}

static void counters(struct mix *m)
{
    const struct header *h = m->c->hdr;
    const uint64_t v[] = {h->event_head, h->clock, h->blocks, h->chunks, h->holds, h->parts, h->complete, h->linked, h->stale, h->slots,
                          h->namespaces, h->n_parked, h->ready_grans, h->used_grans, h->linked_grans, h->evictable_grans,
                          h->lease_min != NIL, h->lease_recent != NIL, h->fl_map};
    bytes(m, v, sizeof v);
    bytes(m, h->sl_map, sizeof h->sl_map);
    bytes(m, h->level_map, sizeof h->level_map);
    for (uint32_t bin = 0; bin < N_BINS; bin++) {
        uint64_t sum = 0;
        uint32_t n = 0;
        for (uint32_t b = h->bin[bin]; b != NIL && n < STEPS; b = block_at(m->c, b)->link_b, n++) sum += block_at(m->c, b)->off * 0x9e3779b97f4a7c15u;
        if (n) { add(m, bin); add(m, n); add(m, sum); }
    }
}

static void extents(struct mix *m)
{
    for (uint32_t r = 0; r < m->c->n_regions; r++) {
        const struct region *g = &m->c->regions[r];
        add(m, g->state);
        add(m, g->attempts);
        if (g->state == SHMC_R_COMMITTING) add(m, (uint64_t)g->owner << 32 | g->owner_gen);
        if (g->state != SHMC_R_READY) continue;
        add(m, (uint64_t)g->flags << 32 | g->node);
        uint32_t n = 0;
        for (uint32_t b = g->first; b != NIL && n < STEPS; b = block_at(m->c, b)->phys_next, n++) {
            const struct block *k = block_at(m->c, b);
            add(m, (uint64_t)k->off << 32 | k->len);
            add(m, (uint64_t)k->state << 32 | k->gen);
            if (k->state == B_FREE) continue;
            add(m, (uint64_t)k->refs << 32 | k->ns_gen);
            add(m, (uint64_t)k->part << 32 | k->ns);
            add(m, k->size);
            bytes(m, k->meta, sizeof k->meta);
            chunk_name(m, k->chunk);
            holds_of_target(m, k->holds);
        }
    }
}

static uint64_t chunk_digest(struct core *c, uint32_t i)
{
    struct mix m = {c, 7};
    const struct chunk *k = chunk_at(c, i);
    chunk_name(&m, i);
    add(&m, (uint64_t)k->flags << 32 | k->published);
    add(&m, (uint64_t)k->grans << 32 | k->held);
    if (k->flags & C_LINKED) add(&m, k->stamp);
    holds_of_target(&m, k->holds);
    for (uint32_t b = k->parts, n = 0; b != NIL && n < STEPS; b = block_at(c, b)->link_b, n++) {
        add(&m, block_at(c, b)->off);
        add(&m, part_find(c, i, block_at(c, b)->part) == b);
    }
    return m.h;
}

static void chunk_list(struct mix *m, uint32_t head)
{
    for (uint32_t i = head, n = 0; i != NIL && n < STEPS; i = chunk_at(m->c, i)->pnext, n++) chunk_name(m, i);
}

static void chunks(struct mix *m)
{
    struct core *c = m->c;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < c->n_chunks; i++)
        if (c->chunks[i].flags) sum += chunk_digest(c, i);         /* whichever record it is */
    add(m, sum);
    for (uint32_t level = 0; level < N_LEVELS; level++)
        if (c->hdr->level_head[level] != NIL) { add(m, level); chunk_list(m, c->hdr->level_head[level]); chunk_name(m, c->hdr->level_tail[level]); }
    add(m, 1);
    chunk_list(m, c->hdr->parked);
    add(m, 2);
    chunk_list(m, c->hdr->drain);
    for (uint32_t b = 0; b < c->n_buckets; b++) {
        add(m, b);
        for (uint32_t i = c->buckets[b], n = 0; i != NIL && n < STEPS; i = chunk_at(c, i)->hnext, n++) chunk_name(m, i);
    }
}

static void attachments(struct mix *m)
{
    for (uint32_t s = 0; s < m->c->n_slots; s++) {
        const struct slot *k = &m->c->slots[s];
        add(m, (uint64_t)k->state << 32 | k->gen);
        if (k->state == SHMC_SLOT_FREE) continue;
        add(m, k->rank);
        add(m, (uint64_t)k->n_holds << 32 | k->n_writes);
        for (uint32_t i = k->holds, n = 0; i != NIL && n < STEPS; i = hold_at(m->c, i)->snext, n++) hold(m, hold_at(m->c, i));
        add(m, 3);
        for (uint32_t i = k->writes, n = 0; i != NIL && n < STEPS; i = hold_at(m->c, i)->snext, n++) hold(m, hold_at(m->c, i));
    }
}

static void names(struct mix *m)
{
    for (uint32_t i = 0; i < m->c->n_namespaces; i++) {
        const struct namespace *n = &m->c->namespaces[i];
        if (n->gen) { add(m, i); add(m, (uint64_t)n->used << 32 | n->gen); }
        if (!n->used) continue;
        add(m, (uint64_t)n->parts << 32 | n->chunks);
        add(m, (uint64_t)n->complete << 32 | n->grans);
        bytes(m, n->name, n->name_len <= SHMC_NAME_MAX ? n->name_len : 0);
        bytes(m, n->desc, n->desc_len <= SHMC_DESC_MAX ? n->desc_len : 0);
    }
}

static void events(struct mix *m)
{
    const struct core *c = m->c;
    uint64_t head = c->hdr->event_head, from = head > 64 ? head - 64 : 0;
    for (uint64_t s = from; s < head; s++) {
        const struct event_rec *e = &c->events[s & (c->n_events - 1)];
        add(m, e->seq);
        add(m, e->bytes);
        add(m, (uint64_t)e->kind << 48 | (uint64_t)e->cause << 32 | e->complete);
        add(m, (uint64_t)e->ns << 32 | e->ns_gen);
        bytes(m, e->key, sizeof e->key);
    }
}

uint64_t digest(void *base, uint64_t size)
{
    struct core c;
    core_bind(&c, base, size, &W.geo);
    struct mix m = {&c, 1};
    counters(&m);
    extents(&m);
    chunks(&m);
    attachments(&m);
    names(&m);
    events(&m);
    return m.h;
}
