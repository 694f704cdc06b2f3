/* index.h -- two hash tables of fixed size, chained by 32-bit indices.
 *
 *   buckets:       (namespace, key)  -> chunk       by struct chunk.hnext
 *   part buckets:  (chunk, part)     -> block       by struct block.link_a
 *
 * The hash is seeded per segment, so that nobody can choose keys that share a chain; a 32-bit tag is
 * compared before the whole key. Insert is two journalled words, removal one: open addressing would
 * need unbounded shifts or tombstones. Capacity is fixed, so there is no rehash.
 */
#ifndef SHMC_INDEX_H
#define SHMC_INDEX_H
#include "list.h"

struct key { const uint8_t *data; uint64_t hash; uint8_t len, type; };

uint64_t index_hash(const struct core *c, uint32_t ns, const uint8_t *key, uint32_t len, uint32_t type);

static inline uint32_t *index_bucket(struct core *c, uint64_t hash) { return &c->buckets[(uint32_t)hash & (c->n_buckets - 1)]; }

/* index_find -- the visible chunk of this key: current generation, not removed; else NIL */
uint32_t index_find(struct core *c, uint32_t ns, const struct key *k);
/* index_next -- walk all versions of a key, also removed and outdated ones; start with NIL */
uint32_t index_next(struct core *c, uint32_t ns, const struct key *k, uint32_t after);
void index_insert(struct core *c, uint32_t chunk);
void index_remove(struct core *c, uint32_t chunk);

uint32_t *part_bucket(struct core *c, uint32_t chunk, uint32_t part);
uint32_t part_find(struct core *c, uint32_t chunk, uint32_t part);
void part_insert(struct core *c, uint32_t block);
void part_remove(struct core *c, uint32_t block);

#endif
