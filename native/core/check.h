/* check.h -- the full invariant walk: design section 11, and what each file's header states. */
#ifndef SHMC_CHECK_H
#define SHMC_CHECK_H
#include "chunks.h"

/* check_scratch -- bytes of private memory that check_all needs */
uint64_t check_scratch(const struct core *c);
/* check_all -- number of violations; the first ones as lines of text. Reads only, never out of
 * bounds, never loops for ever, whatever the segment holds. */
uint32_t check_all(struct core *c, void *scratch, char *text, uint32_t cap);

#endif
