/* holds.c -- see holds.h. */
#include "holds.h"

uint32_t hold_link(struct core *c, enum hold_kind kind, uint32_t target, uint32_t *target_head)
{
    struct header *h = c->hdr;
    struct slot *s = slot_at(c, c->me);
    uint32_t i = h->free_hold;
    if (i == NIL) {
        count(c, SHMC_ST_HOLDS_FULL);
        return NIL;
    }
    struct hold *k = hold_at(c, i);
    tx32(c, &h->free_hold, k->tnext);
    tx32(c, &h->holds, h->holds + 1);
    tx16(c, &k->kind, (uint16_t)kind);
    tx32(c, &k->target, target);
    tx32(c, &k->deadline, 0);
    PUT(&k->taken, c->now);             /* unlogged: read by people only, and of a free hold by nobody */
    if (k->slot != c->me) tx16(c, &k->slot, (uint16_t)c->me);
    if (k->slot_gen != c->me_gen) tx32(c, &k->slot_gen, c->me_gen);
    target_list_push(c, target_head, i);
    if (hold_on_writes(kind)) {
        slot_list_push(c, &s->writes, i);
        tx32(c, &s->n_writes, s->n_writes + 1);
    } else {
        slot_list_push(c, &s->holds, i);
        tx32(c, &s->n_holds, s->n_holds + 1);
    }
    return c->bad ? NIL : i;
}

static void off_slot(struct core *c, uint32_t i)
{
    struct hold *k = hold_at(c, i);
    struct slot *s = slot_at(c, k->slot);
    if (hold_on_writes(k->kind)) {
        slot_list_unlink(c, &s->writes, i);
        tx32(c, &s->n_writes, s->n_writes - 1);
    } else {
        slot_list_unlink(c, &s->holds, i);
        tx32(c, &s->n_holds, s->n_holds - 1);
    }
}

void hold_unlink(struct core *c, uint32_t i, uint32_t *target_head)
{
    struct header *h = c->hdr;
    struct hold *k = hold_at(c, i);
    off_slot(c, i);
    target_list_unlink(c, target_head, i);
    tx16(c, &k->kind, H_FREE);
    tx32(c, &k->gen, k->gen + 1 ? k->gen + 1 : 1);
    tx32(c, &k->tnext, h->free_hold);
    tx32(c, &h->free_hold, i);
    tx32(c, &h->holds, h->holds - 1);
    c->wake |= 1;                        /* who found the pool empty looks again */
}

bool hold_mine(struct core *c, struct ref r)
{
    if (r.hold >= c->n_holds || r.gen == 0) return false;
    const struct hold *k = hold_at(c, r.hold);
    return k->kind != H_FREE && k->gen == r.gen && k->slot == c->me && k->slot_gen == c->me_gen;
}

void hold_to_ref(struct core *c, uint32_t i)
{
    struct hold *k = hold_at(c, i);
    struct slot *s = slot_at(c, k->slot);
    if (k->kind != H_WRITE) return;
    off_slot(c, i);
    tx16(c, &k->kind, H_REF);
    slot_list_push(c, &s->holds, i);
    tx32(c, &s->n_holds, s->n_holds + 1);
}

void hold_lease(struct core *c, uint32_t i, uint32_t deadline)
{
    struct header *h = c->hdr;
    tx32(c, &hold_at(c, i)->deadline, deadline);
    if (deadline < h->lease_min) tx32(c, &h->lease_min, deadline);
    if (deadline < h->lease_recent) tx32(c, &h->lease_recent, deadline);
}
