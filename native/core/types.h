/* types.h -- the process-private view of one segment, and the only way to reach a record.
 *
 * Offsets and counts are copied here at attach and never read from the segment again, so that
 * damage there cannot move a table. An index that comes from the segment goes through an accessor;
 * out of range it yields a private sink record and sets `bad`. From then on the journal stores
 * nothing, and the call that ends finds `bad`, rolls back and marks the segment POISONED. So no
 * function below the API needs an error path for damage, and none can read out of bounds.
 */
#ifndef SHMC_TYPES_H
#define SHMC_TYPES_H
#include <stdbool.h>
#include <string.h>
#include "layout.h"

struct core {
    uint8_t *base;
    uint64_t size;
    struct header *hdr;
    struct slot *slots;
    struct namespace *namespaces;
    struct region *regions;
    uint32_t *buckets, *part_buckets;
    struct chunk *chunks;
    struct block *blocks;
    struct hold *holds;
    struct event_rec *events;
    uint32_t n_slots, n_namespaces, n_regions, n_buckets, n_part_buckets, n_chunks, n_blocks, n_holds, n_events;
    uint32_t full_grans, stride_grans, align_shift, policy, capacity_grans;
    uint64_t arena_bytes;
    uint64_t seed[2];

    /* of the current lock hold */
    uint32_t me, me_gen;             /* slot that acts, for events and holds */
    uint32_t now;                    /* tick of this call, 1/16 s */
    uint64_t now_ns;
    uint32_t words, frees, items;    /* budget used: see batch_full */
    uint32_t wake;                   /* bit 0 memory, bit 1 publication: wake after unlock */
    uint32_t tx_op;
    bool bad;

    struct chunk sink_chunk;
    struct block sink_block;
    struct hold sink_hold;
    struct slot sink_slot;
    struct namespace sink_ns;
    struct region sink_region;
};

/* core_bind -- point `c` at the tables of a segment; `g` is the private copy that was validated */
void core_bind(struct core *c, void *base, uint64_t size, const shmc_geometry *g);

#define ACCESSOR(name, type, table, count, sink)                                     \
    static inline struct type *name(struct core *c, uint32_t i)                      \
    {                                                                                \
        if (__builtin_expect(i < c->count, 1)) return &c->table[i];                  \
        c->bad = true;                                                               \
        memset(&c->sink, 0xff, sizeof c->sink);                                      \
        return &c->sink;                                                             \
    }
ACCESSOR(chunk_at, chunk, chunks, n_chunks, sink_chunk)
ACCESSOR(block_at, block, blocks, n_blocks, sink_block)
ACCESSOR(hold_at, hold, holds, n_holds, sink_hold)
ACCESSOR(slot_at, slot, slots, n_slots, sink_slot)
ACCESSOR(ns_at, namespace, namespaces, n_namespaces, sink_ns)
ACCESSOR(region_at, region, regions, n_regions, sink_region)

static inline uint32_t chunk_ix(const struct core *c, const struct chunk *k) { return (uint32_t)(k - c->chunks); }
static inline uint32_t block_ix(const struct core *c, const struct block *b) { return (uint32_t)(b - c->blocks); }
static inline uint32_t hold_ix(const struct core *c, const struct hold *h) { return (uint32_t)(h - c->holds); }

/* A loop over links states its bound here: a cycle in damaged memory ends, and poisons. */
static inline bool bounded(struct core *c, uint32_t *n, uint32_t bound)
{
    if (++*n <= bound && !c->bad) return true;
    c->bad = true;
    return false;
}

/* Records that somebody reads without the lock, or writes while somebody may: whole words, each by a relaxed atomic,
 * so that neither side is undefined and no compiler reads one twice. Which words belong together is the reader's to
 * find out. Both ends are aligned to 4, `n` is a multiple of 4; words of 8 where all of it allows. */
typedef uint32_t __attribute__((may_alias)) shared32;
typedef uint64_t __attribute__((may_alias)) shared64;
#define PEEK(p) __atomic_load_n((p), __ATOMIC_RELAXED)

static inline void load_words(void *to, const void *from, size_t n)
{
    uint8_t *t = to;
    if (!(((uintptr_t)from | n) & 7)) {
        for (size_t i = 0; i < n / 8; i++) { uint64_t w = PEEK((const shared64 *)from + i); memcpy(t + 8 * i, &w, 8); }
        return;
    }
    for (size_t i = 0; i < n / 4; i++) { uint32_t w = PEEK((const shared32 *)from + i); memcpy(t + 4 * i, &w, 4); }
}

static inline void store_words(void *to, const void *from, size_t n)
{
    const uint8_t *f = from;
    if (!(((uintptr_t)to | n) & 7)) {
        for (size_t i = 0; i < n / 8; i++) { uint64_t w; memcpy(&w, f + 8 * i, 8); __atomic_store_n((shared64 *)to + i, w, __ATOMIC_RELAXED); }
        return;
    }
    for (size_t i = 0; i < n / 4; i++) { uint32_t w; memcpy(&w, f + 4 * i, 4); __atomic_store_n((shared32 *)to + i, w, __ATOMIC_RELAXED); }
}

/* A reader's transaction: `look_begin`, loads, then `look_agrees` says whether all of them are of one instant between
 * two transactions. The writer's side is in journal.c: an odd number, a release fence, its stores, a release store. */
static inline uint64_t look_begin(const struct header *h) { return __atomic_load_n(&h->seq, __ATOMIC_ACQUIRE); }
static inline bool look_agrees(const struct header *h, uint64_t seen)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return !(seen & 1) && PEEK(&h->seq) == seen;
}

/* load_record -- of one instant, after a few tries; beside a holder that is stopped half way, as it stands. */
enum { LOOK_TRIES = 8 };
static inline void load_record(const struct header *h, void *to, const void *from, size_t n)
{
    for (int i = 0; i < LOOK_TRIES; i++) {
        uint64_t seen = look_begin(h);
        load_words(to, from, n);
        if (look_agrees(h, seen)) return;
    }
}

/* An always-on check that a caller's path is sound; failing means damage, never an abort. */
#define SOUND(c, cond, why) do { if (__builtin_expect(!((cond) && (why)), 0)) (c)->bad = true; } while (0)

#endif
