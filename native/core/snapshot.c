/* snapshot.c -- looking without the lock, at a live or an abandoned segment.
 *
 * Header counters are copied between two equal, even readings of the sequence word; events carry
 * their own number. Tables are not read this way: under load no copy of one ever succeeded. */
#include "events.h"
#include "extents.h"
#include "holds.h"

static void fill(const struct header *h, const shmc_geometry *g, shmc_stats *s)
{
    uint32_t shift = (uint32_t)__builtin_ctz(g->align);
    load_words(s->stat, h->stat, sizeof s->stat);
    s->capacity = g->capacity;
    s->ready = (uint64_t)PEEK(&h->ready_grans) << shift;
    s->used = (uint64_t)PEEK(&h->used_grans) << shift;
    s->free = s->ready - s->used;
    s->largest_free = (uint64_t)extent_largest(h) << shift;
    s->evictable = (uint64_t)PEEK(&h->evictable_grans) << shift;
    s->pinned = (uint64_t)(PEEK(&h->linked_grans) - PEEK(&h->evictable_grans)) << shift;
    s->chunks = PEEK(&h->linked);
    s->complete = PEEK(&h->complete);
    s->parts = PEEK(&h->parts);
    s->blocks = PEEK(&h->blocks);
    s->holds = PEEK(&h->holds);
    s->attachments = PEEK(&h->slots);
    s->namespaces = PEEK(&h->namespaces);
    s->acquisitions = PEEK(&h->acquisitions);
    s->contended = PEEK(&h->contended);
    s->recoveries = PEEK(&h->recoveries);
    s->max_hold_ns = PEEK(&h->max_hold_ns);
    s->events = PEEK(&h->event_published);
    s->clock = PEEK(&h->clock);
    s->state = PEEK(&h->state);
}

int shmc_stats_read(const void *base, uint64_t size, shmc_stats *out)
{
    const struct header *h = base;
    shmc_geometry g;
    int rc = shmc_validate(base, size, &g, NULL);
    if (rc) return rc;
    for (int tries = 0; tries < 1000; tries++) {
        uint64_t seen = look_begin(h);
        fill(h, &g, out);
        out->exact = look_agrees(h, seen);
        if (out->exact) break;
    }
    return SHMC_OK;
}

int shmc_pins_read(const void *base, uint64_t size, uint32_t slot, uint64_t *own, uint64_t *all)
{
    shmc_geometry g;
    int rc = shmc_validate(base, size, &g, NULL);
    if (rc) return rc;
    const struct hold *holds = (const void *)((const uint8_t *)base + shmc_holds_offset(&g));
    *own = *all = 0;
    for (uint32_t i = 0; i < g.max_holds; i++) {
        uint16_t kind = PEEK(&holds[i].kind);
        if (kind == H_FREE || hold_is_ref(kind)) continue;
        ++*all;
        *own += PEEK(&holds[i].slot) == slot;
    }
    return SHMC_OK;
}

int shmc_events_read(const void *base, uint64_t size, uint64_t since, shmc_event *out, uint32_t cap, uint32_t *n, uint64_t *next, uint64_t *lost)
{
    const struct header *h = base;
    shmc_geometry g;
    int rc = shmc_validate(base, size, &g, NULL);
    if (rc) return rc;
    const struct event_rec *ring = (const void *)((const uint8_t *)base + shmc_events_offset(&g));
    uint64_t window = g.n_events - EVENT_SLACK;
    uint64_t end = __atomic_load_n(&h->event_published, __ATOMIC_ACQUIRE), at = since > end ? end : since;
    *n = 0;
    *lost = 0;
    if (end - at > window) { *lost = end - window - at; at = end - window; }
    while (at < end && *n < cap) {
        const struct event_rec *e = &ring[at & (g.n_events - 1)];
        struct event_rec r;
        uint64_t seq = __atomic_load_n(&e->seq, __ATOMIC_ACQUIRE);
        load_words(&r, e, sizeof r);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (seq != at || PEEK(&e->seq) != at) {   /* overtaken: all so far is older than a gap */
            uint64_t now = __atomic_load_n(&h->event_published, __ATOMIC_ACQUIRE);
            uint64_t to = now > window && now - window > at ? now - window : at + 1;
            if (*n) break;                       /* hand out what came before the gap first */
            *lost += to - at;
            at = to;
            if (now > end) end = now;
            continue;
        }
        shmc_event *o = &out[(*n)++];
        *o = (shmc_event){.seq = r.seq, .time_ns = r.time_ns, .bytes = r.bytes, .kind = r.kind, .cause = r.cause,
            .ns = r.ns, .ns_gen = r.ns_gen, .pid = r.pid, .complete = r.complete, .klen = r.klen, .ktype = r.ktype};
        memcpy(o->key, r.key, sizeof o->key);
        at++;
    }
    *next = at;
    return SHMC_OK;
}
