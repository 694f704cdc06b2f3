/* policy.h -- who goes first. A policy is a row of functions, chosen when the segment is made.
 *
 *     level_head[0] cold ... hot level_tail[0]        LRU, FIFO, MRU use level 0
 *     level 1, level 2, ...                           LFU: one list per frequency, FIFO within
 *     parked                                          held chunks that a victim search met
 *
 * Every chunk carries a stamp, level << 48 | clock of its last move. A hold does not move a chunk.
 * A victim search parks each held chunk it meets, so a hold is passed once; on its last release a
 * parked chunk goes back to the end it came from, ordered by stamp.
 *
 *   policy lists + parked = linked chunks, each on exactly one
 */
#ifndef SHMC_POLICY_H
#define SHMC_POLICY_H
#include "list.h"

/* policy_admit -- a chunk's first part was published. `parent`: chunk, or NIL. Part of a transaction. */
void policy_admit(struct core *c, uint32_t chunk, uint32_t parent);
void policy_touch(struct core *c, uint32_t chunk);
/* policy_forget -- take a linked chunk off its list, policy or parked */
void policy_forget(struct core *c, uint32_t chunk);
/* policy_unpark -- its last hold went; no-op unless parked */
void policy_unpark(struct core *c, uint32_t chunk);
/* policy_candidate -- the chunk that would go next, held or not; NIL: the lists are empty */
uint32_t policy_candidate(struct core *c);
void policy_park(struct core *c, uint32_t chunk);

#endif
