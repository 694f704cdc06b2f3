/* holds.h -- one record for every reference and every pin, owned by an attachment.
 *
 * A counter cannot be un-counted after a SIGKILL; a list of records can. Each hold hangs on two
 * lists, its attachment's and its target's, and is named by (index, generation), so a stale or
 * second release is detected and never finds a newer version of a key.
 *
 *   H_REF, H_WRITE, H_BLOCK_PIN, H_WRITE_PIN on a block;  H_KEY_PIN, H_LOOKUP_PIN on a chunk
 *   H_WRITE and H_WRITE_PIN hang on slot.writes, all others on slot.holds (see struct slot)
 *
 * This file is list mechanics; what the first and the last hold mean is in chunks.c.
 */
#ifndef SHMC_HOLDS_H
#define SHMC_HOLDS_H
#include "list.h"

struct ref { uint32_t hold, gen; };

static inline bool hold_on_block(uint32_t kind) { return kind != H_KEY_PIN && kind != H_LOOKUP_PIN; }
static inline bool hold_is_ref(uint32_t kind) { return kind == H_REF || kind == H_WRITE; }
static inline bool hold_on_writes(uint32_t kind) { return kind == H_WRITE || kind == H_WRITE_PIN; }

/* hold_link -- take a record from the pool and put it on both lists; NIL: the pool is empty */
uint32_t hold_link(struct core *c, enum hold_kind kind, uint32_t target, uint32_t *target_head);
/* hold_unlink -- off both lists and back to the pool */
void hold_unlink(struct core *c, uint32_t hold, uint32_t *target_head);
/* hold_mine -- whether `r` is a live hold of the acting attachment */
bool hold_mine(struct core *c, struct ref r);
/* hold_to_ref -- a write hold becomes a reference: its block was published */
void hold_to_ref(struct core *c, uint32_t hold);
/* hold_lease -- let it end at `deadline` (tick) */
void hold_lease(struct core *c, uint32_t hold, uint32_t deadline);

/* shmc_holds_offset -- where the table lies in a segment of this geometry */
uint64_t shmc_holds_offset(const shmc_geometry *g);

#endif
