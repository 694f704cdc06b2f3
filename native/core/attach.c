/* attach.c -- see attach.h. */
#include "attach.h"

uint32_t slot_claim(struct core *c, int32_t pid, uint64_t start, uint64_t stack, uint32_t rank, const char *label, uint32_t *gen)
{
    for (uint32_t i = 0; i < c->n_slots; i++) {         /* <= max_attachments */
        struct slot *s = &c->slots[i];
        if (s->state != SHMC_SLOT_FREE) continue;
        tx_begin(c, TX_ATTACH);
        tx32(c, &s->gen, s->gen + 1);
        tx32(c, (uint32_t *)&s->pid, (uint32_t)pid);
        tx32(c, &s->rank, rank);
        tx64(c, &s->start_time, start);
        tx64(c, &s->start_stack, stack);
        tx64(c, &s->attached_ns, c->now_ns);
        tx32(c, &s->holds, NIL);
        tx32(c, &s->writes, NIL);
        tx32(c, &s->n_holds, 0);
        tx32(c, &s->n_writes, 0);
        char padded[SHMC_LABEL_MAX] = {0};
        if (label) memcpy(padded, label, strnlen(label, sizeof padded - 1));
        store_words(s->label, padded, sizeof padded);   /* unlogged: only shown to people */
        tx32(c, &s->state, SHMC_SLOT_LIVE);
        tx32(c, &c->hdr->slots, c->hdr->slots + 1);
        *gen = s->gen;
        return tx_commit(c) ? i : NIL;
    }
    return NIL;
}

bool slot_condemn(struct core *c, uint32_t slot, const shmc_slot_info *judged, bool gone)
{
    struct slot *s = slot_at(c, slot);
    if (s->state == SHMC_SLOT_FREE || s->gen != judged->gen || s->pid != judged->pid) return false;
    if (s->start_time != judged->start_time || s->start_stack != judged->start_stack) return false;
    /* its state alone was the proof: but a record read without the lock may be of two owners */
    if (judged->state == SHMC_SLOT_REAPING && s->state != SHMC_SLOT_REAPING) return false;
    uint32_t to = gone ? SHMC_SLOT_REAPING : SHMC_SLOT_QUARANTINE;
    if (s->state == SHMC_SLOT_REAPING || s->state == to) return true;
    tx_begin(c, TX_REAP);
    tx32(c, &s->state, to);
    return tx_commit(c);
}

/* A region that a dead attachment was committing is anybody's again. */
static void regions_back(struct core *c, uint32_t slot, uint32_t gen)
{
    for (uint32_t i = 0; i < c->n_regions && !c->bad; i++) {    /* <= regions; states only, one line each */
        struct region *r = &c->regions[i];
        if (r->state != SHMC_R_COMMITTING || r->owner != slot || r->owner_gen != gen) continue;
        tx_begin(c, TX_REGION);
        tx32(c, &r->state, SHMC_R_ABSENT);
        tx_commit(c);
    }
}

bool slot_empty_step(struct core *c, uint32_t slot, uint32_t gen, shmc_reap_report *report)
{
    struct slot *s = slot_at(c, slot);
    if (s->gen != gen || (s->state != SHMC_SLOT_REAPING && s->state != SHMC_SLOT_QUARANTINE)) return false;
    for (int n = 0; n < 64 && c->words < 256 && c->frees < 16; n++) {   /* <= 64 */
        if (c->bad) return false;
        if (s->holds != NIL) {
            let_go(c, s->holds, TX_REAP);
            report->holds++;
        } else if (s->state == SHMC_SLOT_REAPING && s->writes != NIL) {
            let_go(c, s->writes, TX_REAP);
            report->blocks++;
        } else if (s->state == SHMC_SLOT_QUARANTINE) {
            return false;
        } else {
            regions_back(c, slot, gen);
            tx_begin(c, TX_REAP);
            tx32(c, &s->state, SHMC_SLOT_FREE);
            tx32(c, &s->gen, s->gen + 1);
            tx32(c, &c->hdr->slots, c->hdr->slots - 1);
            if (!tx_commit(c)) return false;
            report->slots++;
            if (slot != c->me) count(c, SHMC_ST_REAPS);
            return false;
        }
    }
    return true;
}
