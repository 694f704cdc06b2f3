/* events.c -- see events.h. Reading is in snapshot.c: it needs no lock. */
#include "events.h"

void event_add(struct core *c, enum shmc_event_kind kind, enum shmc_event_cause cause, const struct chunk *k)
{
    struct header *h = c->hdr;
    if (c->bad) return;
    uint64_t seq = h->event_head;
    struct event_rec *e = &c->events[seq & (c->n_events - 1)];
    struct event_rec r = {
        .seq = seq, .time_ns = c->now_ns, .bytes = (uint64_t)k->grans << c->align_shift,
        .ns_gen = k->ns_gen, .pid = c->me < c->n_slots ? c->slots[c->me].pid : 0, .ns = k->ns,
        .kind = (uint8_t)kind, .cause = (uint8_t)cause, .klen = k->klen, .ktype = k->ktype,
        .complete = k->published == ns_at(c, k->ns)->parts,
    };
    memcpy(r.key, k->key, sizeof r.key);
    __atomic_store_n(&e->seq, ~0ull, __ATOMIC_RELEASE);      /* a reader of the old record notices */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    store_words((uint8_t *)e + 8, (const uint8_t *)&r + 8, sizeof r - 8);   /* unlogged: beyond `published` */
    __atomic_store_n(&e->seq, seq, __ATOMIC_RELEASE);
    tx64(c, &h->event_head, seq + 1);
}
