/* unit.h -- tests of the C parts in one process, on a private mapping. Each names what it promises. */
#ifndef TESTS_UNIT_H
#define TESTS_UNIT_H
#include "world.h"

struct unit { const char *promise; void (*run)(void); };
extern const struct unit UNIT_EXTENTS[], UNIT_KEYS[], UNIT_HOLDS[], UNIT_POLICY[], UNIT_SHARING[], UNIT_DAMAGE[], UNIT_LATE[];

/* How much random work the tests do: 1 under valgrind and the sanitizers, more otherwise. */
extern uint32_t effort;
extern uint64_t seed;

/* world_close -- must be sound, and with all holds given back, settled */
void world_close(void);
/* world_of -- a private world of its own geometry, attached, all regions committed, namespaces made */
void world_of(uint64_t capacity, uint64_t region_bytes, uint32_t max_chunks, uint32_t policy);
shmc_stats stats(void);

#endif
