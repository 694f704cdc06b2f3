/* worlds.h -- the states in which the crash cases find a segment.
 *
 * Arena: 3 regions of 128 granules. Keys 1..FULL_KEYS of BIG granules fill it. The survivor builds a
 * world, the victim attaches to it. */
#ifndef TESTS_WORLDS_H
#define TESTS_WORLDS_H
#include "world.h"

enum { FULL_KEYS = 24, BIG = 16, SOME = 4 };
extern struct obj X[32];                 /* the victim's objects, or what the survivor holds */
extern shmc_owner *L;                    /* a lookup */

void w_empty(uint32_t policy);
void w_speck(uint32_t policy);           /* key 1, of one granule, at the start */
void w_few(uint32_t policy);             /* keys 1, 2, 3 side by side; key 10 complete in `two`, key 11 with part 0 only */
void w_hole(uint32_t policy);            /* the same without key 2 */
void w_full(uint32_t policy);            /* frequencies and recency differ */
void w_full_held(uint32_t policy);       /* the survivor holds those that would go first, whatever the policy */
void w_parked(uint32_t policy);          /* a victim search has met them */
void w_chunks_full(uint32_t policy);     /* no chunk record left */
void w_chunks_full_held(uint32_t policy);
void w_draining(uint32_t policy);        /* a removed chunk of many parts, half of them freed */
void w_outdated(uint32_t policy);        /* bumped; more chunks left than one call unlinks */
void w_leased(uint32_t policy);          /* all pinned; some leases are over */
void w_reserved(uint32_t policy);        /* the survivor reserved keys 30 and 31 and the last part of 11 */
void w_two_regions(uint32_t policy);     /* the third is not committed */
void w_dead(uint32_t policy);            /* a process that owned much is gone */
void w_execed(uint32_t policy);          /* an attachment of the living survivor that looks as if its process had exec'ed */
void w_dead_committer(uint32_t policy);  /* gone while it committed region 2 */

/* own_much -- what an attachment may own when it dies */
void own_much(void);

#endif
