/* events.h -- ring of what was admitted and removed, in commit order.
 *
 *     event_published <= event_head;   readable: [published - (n_events - EVENT_SLACK), published)
 *
 * `head` moves inside the transaction, `published` after it: no event is phantom or lost across a
 * roll-back. What a rolled-back transaction wrote lies at or beyond `published`, where the slack
 * keeps it clear of the readable window. Readers keep a private cursor and learn of a gap.
 */
#ifndef SHMC_EVENTS_H
#define SHMC_EVENTS_H
#include "journal.h"

/* shmc_events_offset -- where the ring lies in a segment of this geometry */
uint64_t shmc_events_offset(const shmc_geometry *g);

void event_add(struct core *c, enum shmc_event_kind kind, enum shmc_event_cause cause, const struct chunk *k);

#endif
