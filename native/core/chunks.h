/* chunks.h -- the life of chunks, parts and blocks: publish, hold, release, unlink, drain, evict.
 *
 *     block:  FREE -> WRITING -> PUBLISHED -> (unlinked, still held) -> FREE
 *     chunk:  SHELL (reserved parts only) -> LINKED -> GONE (still held, in its bucket) -> DRAIN -> free
 *
 * The chunk is the unit of eviction: all parts go or none. Unlinking one is a small transaction
 * (index, policy, event, counters) onto the drain list; its parts are freed one transaction each.
 * A dead writer's block is aborted, never published.
 *
 *   chunk.held = its pins + its parts with a hold
 *   evictable bytes = sum over LINKED chunks with held == 0
 */
#ifndef SHMC_CHUNKS_H
#define SHMC_CHUNKS_H
#include "holds.h"
#include "index.h"

enum { DRAIN_PER_CALL = 8, STALE_SCAN = 256 };

/* chunk_complete -- all parts published */
static inline bool chunk_complete(struct core *c, const struct chunk *k) { return k->published == ns_at(c, k->ns)->parts; }

/* Each of the following is one whole transaction, unless it says otherwise. */

/* block_new -- an extent in state WRITING with one write hold; NIL: no space, descriptor or hold */
uint32_t block_new(struct core *c, uint32_t ns, uint32_t len, uint64_t size, const uint8_t *meta, uint32_t meta_len, struct ref *out);
/* block_adopt -- a block that is being written, and under no key, moves to another namespace; a status */
int block_adopt(struct core *c, uint32_t block, uint32_t ns);
/* block_describe -- other bytes beside a block that is being written; a status */
int block_describe(struct core *c, uint32_t block, const uint8_t *meta, uint32_t meta_len);
/* take -- one more hold of `kind` on a block or chunk; false: the pool is empty. deadline 0: no lease */
bool take(struct core *c, enum hold_kind kind, uint32_t target, uint32_t deadline, struct ref *out);
/* let_go -- release a hold, with all that follows when it was the last */
void let_go(struct core *c, uint32_t hold, enum tx_op op);
/* publish -- SHMC_OK; SHMC_PENDING: that part is there already; SHMC_FULL: no chunk record */
int publish(struct core *c, uint32_t ns, const struct key *k, uint32_t block, uint32_t hold, uint32_t part, uint32_t parent, uint32_t *chunk);
/* reserve_part -- put a WRITING block under a key, so that others wait for it; same results */
int reserve_part(struct core *c, uint32_t ns, const struct key *k, uint32_t block, uint32_t part);
void chunk_unlink(struct core *c, uint32_t chunk, enum shmc_event_cause cause);
void chunk_touch(struct core *c, uint32_t chunk);

/* drain_some -- free parts of unlinked chunks and unlink outdated ones: a bounded step; true: more is left */
bool drain_some(struct core *c);
/* evict_one -- unlink the next victim; park the held ones met before it.
 * 1: one went, 0: nothing can go, -1: many were parked, come again */
int evict_one(struct core *c);

#endif
