/* index.c -- see index.h. */
#include "index.h"

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 m = (unsigned __int128)a * b;
    return (uint64_t)m ^ (uint64_t)(m >> 64);
}

/* Multiply-and-fold over 16 bytes at a time, keyed by the segment's secret seed. */
uint64_t index_hash(const struct core *c, uint32_t ns, const uint8_t *key, uint32_t len, uint32_t type)
{
    uint64_t h = c->seed[0] ^ ((uint64_t)ns << 40 | (uint64_t)type << 32 | len), w[2];
    for (uint32_t i = 0; i < len; i += 16) {               /* <= SHMC_KEY_MAX / 16 */
        w[0] = w[1] = 0;
        memcpy(w, key + i, len - i < 16 ? len - i : 16);
        h = fold(h ^ w[0] ^ 0x9e3779b97f4a7c15u, c->seed[1] ^ w[1] ^ (h << 1 | 1));
    }
    return fold(h ^ c->seed[1], 0xd6e8feb86659fd93u ^ c->seed[0]);
}

static bool same_key(const struct chunk *k, uint32_t ns, const struct key *key)
{
    return k->tag == (uint32_t)(key->hash >> 32) && k->ns == ns && k->klen == key->len &&
           k->ktype == key->type && !memcmp(k->key, key->data, key->len);
}

uint32_t index_next(struct core *c, uint32_t ns, const struct key *key, uint32_t after)
{
    uint32_t n = 0, i = after == NIL ? *index_bucket(c, key->hash) : chunk_at(c, after)->hnext;
    while (i != NIL && bounded(c, &n, c->n_chunks)) {     /* chains are short: load <= 2, seeded */
        struct chunk *k = chunk_at(c, i);
        if (same_key(k, ns, key)) return c->bad ? NIL : i;
        i = k->hnext;
    }
    return NIL;
}

uint32_t index_find(struct core *c, uint32_t ns, const struct key *key)
{
    uint32_t gen = ns_at(c, ns)->gen;
    for (uint32_t i = index_next(c, ns, key, NIL); i != NIL; i = index_next(c, ns, key, i)) {
        const struct chunk *k = chunk_at(c, i);
        if (!(k->flags & C_GONE) && k->ns_gen == gen) return i;
    }
    return NIL;
}

static uint64_t chunk_hash(const struct core *c, const struct chunk *k)
{
    return index_hash(c, k->ns, k->key, k->klen <= SHMC_KEY_MAX ? k->klen : 0, k->ktype);
}

void index_insert(struct core *c, uint32_t chunk)
{
    struct chunk *k = chunk_at(c, chunk);
    uint32_t *head = index_bucket(c, chunk_hash(c, k));
    tx32(c, &k->hnext, *head);
    tx32(c, head, chunk);
}

void index_remove(struct core *c, uint32_t chunk)
{
    struct chunk *k = chunk_at(c, chunk);
    uint32_t n = 0, *link = index_bucket(c, chunk_hash(c, k));
    while (*link != chunk) {
        if (*link == NIL || !bounded(c, &n, c->n_chunks)) { c->bad = true; return; }
        link = &chunk_at(c, *link)->hnext;
    }
    tx32(c, link, k->hnext);
}

uint32_t *part_bucket(struct core *c, uint32_t chunk, uint32_t part)
{
    uint64_t h = fold(c->seed[0] ^ chunk, c->seed[1] ^ part ^ 0x9e3779b97f4a7c15u);
    return &c->part_buckets[(uint32_t)h & (c->n_part_buckets - 1)];
}

uint32_t part_find(struct core *c, uint32_t chunk, uint32_t part)
{
    uint32_t i = chunk_at(c, chunk)->parts, n = 0;
    if (i == NIL) return NIL;
    const struct block *b = block_at(c, i);
    if (b->part == part && b->chunk == chunk) return c->bad ? NIL : i;   /* chunks of one part: no hash */
    i = *part_bucket(c, chunk, part);
    while (i != NIL && bounded(c, &n, c->n_blocks)) {
        b = block_at(c, i);
        if (b->chunk == chunk && b->part == part) return c->bad ? NIL : i;
        i = b->link_a;
    }
    return NIL;
}

void part_insert(struct core *c, uint32_t block)
{
    struct block *b = block_at(c, block);
    uint32_t *head = part_bucket(c, b->chunk, b->part);
    tx32(c, &b->link_a, *head);
    tx32(c, head, block);
    part_list_push(c, &chunk_at(c, b->chunk)->parts, block);
}

void part_remove(struct core *c, uint32_t block)
{
    struct block *b = block_at(c, block);
    uint32_t n = 0, *link = part_bucket(c, b->chunk, b->part);
    while (*link != block) {
        if (*link == NIL || !bounded(c, &n, c->n_blocks)) { c->bad = true; return; }
        link = &block_at(c, *link)->link_a;
    }
    tx32(c, link, b->link_a);
    part_list_unlink(c, &chunk_at(c, b->chunk)->parts, block);
}
