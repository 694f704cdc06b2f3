/* namespaces.h -- what must agree for two hashes to mean the same bytes; fixes parts per chunk. */
#ifndef SHMC_NAMESPACES_H
#define SHMC_NAMESPACES_H
#include "journal.h"

/* namespace_open -- find by name, or make it; `parts` 0: what is there, 1 when making. */
int namespace_open(struct core *c, const char *name, uint32_t name_len, uint32_t parts, const char *desc, uint32_t desc_len, bool has_desc, uint32_t *out);
/* namespace_bump -- O(1): chunks of older generations are misses at once and drain later */
uint32_t namespace_bump(struct core *c, uint32_t ns);
static inline bool namespace_ok(const struct core *c, uint32_t ns) { return ns < c->n_namespaces && c->namespaces[ns].used; }

#endif
