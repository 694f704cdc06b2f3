/* extents.h -- the free list of the arena: two-level segregated fit over out-of-line descriptors.
 *
 *     bin of len < 32 granules:  one bin per length
 *     else:                      32 bins per power of two       (first level fl, second level sl)
 *     BIN_WHOLE:                 regions of full size that are entirely free
 *
 * A request is rounded up to its bin's lower bound first (at most 1/32 waste): plain TLSF strands
 * fixed sizes (fill with 700 KiB, free one, ask for 700 KiB again: fails, the search starts one bin
 * higher). Rounding never exceeds a region: the top requests take a whole region.
 * Neighbours never cross a region, so no extent straddles two; coalescing is immediate. The
 * descriptor with the lower offset survives a merge. Slabs and buddies were rejected: KV chunks are
 * 0.1 to 64 MiB, where a slab subsystem or 43 % waste buys nothing.
 *
 *   for all ready regions: extents tile it; no two free neighbours; FREE <=> in the bin of its length
 */
#ifndef SHMC_EXTENTS_H
#define SHMC_EXTENTS_H
#include "list.h"

/* extent_round -- granules a request really takes; 0 when it could never fit */
uint32_t extent_round(const struct core *c, uint64_t bytes);
uint32_t extent_bin(const struct core *c, uint32_t len);
/* extent_fits -- whether extent_take(len) would succeed as far as free space goes */
bool extent_fits(const struct core *c, uint32_t len);
/* extent_take -- a descriptor in state WRITING with holds NIL, or NIL (no space or no descriptor).
 * `len` comes from extent_round. Part of the caller's transaction. */
uint32_t extent_take(struct core *c, uint32_t len);
/* extent_give -- free an allocated extent, merging both neighbours. Part of the caller's transaction. */
void extent_give(struct core *c, uint32_t b);
/* extent_add_region -- put a committed region's bytes on the free list */
bool extent_add_region(struct core *c, uint32_t region);
/* extent_largest -- the largest request that would succeed now, in granules */
uint32_t extent_largest(const struct header *h);

#endif
