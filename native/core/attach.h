/* attach.h -- the attachment table: who is here, and returning what the dead left behind.
 *
 *     FREE -> LIVE -> FREE                          by its own detach
 *             LIVE -> REAPING -> FREE               its process is proven gone
 *             LIVE -> QUARANTINE -> REAPING -> FREE it exec'ed or is dying: holds go, unpublished
 *                                                   blocks stay, its GPU may still be writing
 *
 * Whether a process is gone is judged outside the lock (os/linux.c); in here only the slot's
 * generation is compared. Every locked call first compares its own slot (the fence), so a process
 * wrongly reaped gets an error and harms nobody. Reaping is batches that anyone can continue.
 */
#ifndef SHMC_ATTACH_H
#define SHMC_ATTACH_H
#include "chunks.h"

/* slot_claim -- index of a slot now LIVE, or NIL: the table is full */
uint32_t slot_claim(struct core *c, int32_t pid, uint64_t start, uint64_t stack, uint32_t rank, const char *label, uint32_t *gen);
/* slot_condemn -- LIVE to QUARANTINE or REAPING, QUARANTINE to REAPING; false: it is not the one that was
 * judged any more. All that the judgement rests on is compared, not the generation alone: a claim that is
 * rolled back gives its generation to the next one. */
bool slot_condemn(struct core *c, uint32_t slot, const shmc_slot_info *judged, bool gone);
/* slot_empty_step -- release one batch of a condemned slot; true: more is left */
bool slot_empty_step(struct core *c, uint32_t slot, uint32_t gen, shmc_reap_report *report);
static inline bool slot_mine(struct core *c)
{
    if (c->me >= c->n_slots) return false;      /* given back by another thread, while this one waited for the lock */
    const struct slot *s = &c->slots[c->me];
    return s->state == SHMC_SLOT_LIVE && s->gen == c->me_gen;
}

#endif
