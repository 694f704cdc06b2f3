/* layout.h -- every byte that processes share, and nothing else defines any.
 *
 *   | header | slots | namespaces | regions | buckets | part buckets | chunks | blocks | holds | events |
 *
 * All links are 32-bit table indices (NIL = none), all addresses are granule offsets into the
 * arena: no pointer is ever stored. Tables are fixed when the segment is made. Fields are grouped
 * by what protects them:
 *   immutable     written before state = READY, never again
 *   logged        under the lock, only through the journal (tx16/tx32/tx64)
 *   unlogged      under the lock, plain: no invariant reads them
 *   atomic        any time, relaxed atomics
 *
 * Payload is never in here: an overrun of a copy can damage payload only.
 * A change of any struct changes shmc_fingerprint(); bump SHMC_FORMAT_VERSION with it.
 */
#ifndef SHMC_LAYOUT_H
#define SHMC_LAYOUT_H
#include <pthread.h>
#include "../include/shmcache.h"

#define SHMC_MAGIC 0x314548434143484dull
#define SHMC_WORD 0x01020304u
#define NIL 0xffffffffu

enum {
    FL_COUNT = 28, SL_COUNT = 32, BIN_WHOLE = FL_COUNT * SL_COUNT, N_BINS = BIN_WHOLE + 1,
    N_LEVELS = 1024,       /* LFU frequencies are counted up to this; other policies use level 0 */
    JOURNAL_CAP = 192,     /* an operation's worst case is below 96 words, asserted in tx_begin */
    EVENT_SLACK = 8,       /* one transaction writes at most 2 events: keep these unreadable */
    MAX_ATTACHMENTS = 4096, MAX_NAMESPACES = 256
};

/* An undo record: `width` bytes at 2*off2 had the value `old`. off2 reaches 8 GiB. */
struct undo { uint32_t off2, width; uint64_t old; };

struct journal {
    /* atomic in the sense of a signal: stores ordered by compiler fences (core/journal.h) */
    uint32_t count, op;
    struct undo rec[JOURNAL_CAP];
};

struct header {
    /* immutable */
    uint64_t magic;
    uint32_t format, word;
    uint64_t fingerprint, instance;
    uint32_t libc, spare0;
    char version[16];
    shmc_geometry geo;
    uint64_t created_ns, seed[2];
    uint64_t at_slots, at_namespaces, at_regions, at_buckets, at_part_buckets, at_chunks, at_blocks, at_holds, at_events;
    uint32_t full_region_grans, stride_grans;
    /* under the handshake lock, while nobody is attached */
    uint64_t pid_ns, time_ns;
    uint32_t handshake_pid;          /* who holds the handshake, for messages */
    /* atomic */
    uint32_t state;

    _Alignas(64) pthread_mutex_t lock;

    /* unlogged: about the lock itself */
    _Alignas(64) uint64_t acquisitions, recoveries, max_hold_ns, hold_since;
    uint32_t holder_slot, holder_op;
    uint64_t contended;              /* atomic */

    /* atomic: futexes of waiters, [0] for memory, [1] for publication */
    _Alignas(64) uint32_t wake[2], waiters[2];

    /* atomic: odd while a transaction runs */
    _Alignas(64) uint64_t seq;
    uint64_t freed;                  /* unlogged: moves when memory may have become available */
    uint64_t event_published;        /* unlogged, set after commit */
    uint32_t return_hint, spare1;    /* unlogged: where the last parked chunk came back; checked before use */

    /* logged */
    uint64_t event_head;
    uint64_t clock;                  /* ticks at every admission and touch */
    uint32_t free_block, free_chunk, free_hold, drain;
    uint32_t blocks, chunks, holds, parts;             /* live counts */
    uint32_t complete, linked, stale, stale_hand;      /* stale: linked chunks of an older generation */
    uint32_t slots, namespaces, parked, n_parked;
    uint32_t ready_grans, used_grans, linked_grans, evictable_grans;
    uint32_t lease_min, lease_recent, lease_sweeps;    /* no lease ends before lease_min; lease_recent: of those given since the last sweep began */
    uint32_t fl_map, sl_map[FL_COUNT];
    uint32_t bin[N_BINS];
    uint32_t level_head[N_LEVELS], level_tail[N_LEVELS];
    uint32_t level_map[N_LEVELS / 32];

    /* unlogged statistics: the last increment may be lost at a crash */
    uint64_t stat[SHMC_ST_N];

    struct journal journal;
};

/* One attachment. Holds hang on two lists: `writes` those of unpublished blocks, which must
 * outlive a dying process's DMA, `holds` all others. */
struct slot {
    uint32_t state, gen;                    /* logged */
    int32_t pid; uint32_t rank;             /* logged: set when claimed */
    uint64_t start_time, start_stack, attached_ns;
    uint32_t holds, writes, n_holds, n_writes;  /* logged */
    char label[SHMC_LABEL_MAX];             /* unlogged: unreachable until state = LIVE */
    uint32_t leaving, spare0;               /* atomic: its generation, once the owner has closed and could not get the lock */
    uint64_t pinning;                       /* atomic: gen << 32 | shmc_pin_state << 29 | regions; its owner's word, void in another generation */
    uint64_t spare[2];
};

struct namespace {
    uint32_t used, parts, gen, chunks, complete, grans;   /* logged */
    uint32_t name_len, desc_len;            /* unlogged: unreachable until used */
    uint64_t hits, misses, stores, evictions;  /* unlogged statistics */
    char name[SHMC_NAME_MAX];
    char desc[SHMC_DESC_MAX];
};

struct region {
    uint64_t inode, bytes;                  /* immutable */
    uint32_t state, owner, owner_gen, first;  /* logged; first: block at the region's start */
    uint32_t flags, node, attempts, spare;  /* logged: what was obtained */
};

enum chunk_flag {
    C_LINKED = 1,     /* in the index and on a policy or the parked list; visible if its generation is current */
    C_PARKED = 2,     /* on the parked list: met by a victim search while held */
    C_GONE = 4,       /* unlinked; still in its bucket while held, so that unpin(key) finds it */
    C_DRAIN = 8,      /* on the drain list: its parts are being freed */
    C_SHELL = 16      /* only reserved parts so far: in the index, on no policy list */
};

/* The KV of one run of tokens in one namespace. 128 bytes.
 *   held = pins + parts with at least one hold;  evictable <=> LINKED and held == 0 */
struct chunk {
    uint8_t key[SHMC_KEY_MAX];              /* unlogged: written before it is linked */
    uint64_t stamp;                         /* logged: level << 48 | clock at the last touch */
    uint32_t hnext, tag, gen, ns_gen;       /* logged */
    uint32_t grans, held, holds, parts;     /* logged: bytes of parts, holders, pin list, part list */
    uint32_t pprev, pnext;                  /* logged: policy, parked, drain and free lists */
    uint32_t admit_tick, last_tick;
    uint16_t ns, published, flags;          /* logged */
    uint8_t klen, ktype;
};

enum block_state { B_UNUSED = 0, B_FREE = 1, B_WRITING = 2, B_PUBLISHED = 3 };

/* One extent of the arena, free or allocated. 112 bytes. */
struct block {
    uint32_t off, len;                      /* logged: granules from the arena's start */
    uint32_t phys_prev, phys_next;          /* logged: neighbours in the same region */
    uint32_t link_a, link_b;                /* logged: bin prev/next when free; part hash next, part list next when allocated */
    uint32_t part_prev, gen;
    uint32_t holds, refs;                   /* logged: hold list; how many of them are references */
    uint32_t chunk, ns_gen;
    uint16_t ns, part, state, meta_len;
    uint64_t size;                          /* bytes asked for */
    uint8_t meta[SHMC_META_MAX];            /* opaque to C: dtype, format, shape, checksum */
};

/* H_WRITE and H_WRITE_PIN: on a block that was not published when they were taken */
enum hold_kind { H_FREE = 0, H_REF = 1, H_WRITE = 2, H_BLOCK_PIN = 3, H_KEY_PIN = 4, H_LOOKUP_PIN = 5, H_WRITE_PIN = 6 };

/* One reference on a block or one pin on a chunk, owned by one attachment. 40 bytes. */
struct hold {
    uint32_t target, gen;
    uint32_t sprev, snext, tprev, tnext;    /* the slot's list, the target's list (tnext: free list) */
    uint32_t deadline;                      /* tick at which a lease ends, 0: none */
    uint16_t slot, kind;
    uint32_t slot_gen;
    uint32_t taken;                         /* unlogged: tick when it was taken, for people */
};

struct event_rec {
    uint64_t seq, time_ns, bytes;
    uint32_t ns_gen; int32_t pid;
    uint16_t ns; uint8_t kind, cause, complete, klen, ktype, spare;
    uint8_t key[SHMC_KEY_MAX];
    uint64_t spare2[2];
};

_Static_assert(sizeof(struct chunk) == 128, "chunk record");
_Static_assert(sizeof(struct block) == 112, "block record");
_Static_assert(offsetof(struct block, meta) % 8 == 0 && SHMC_META_MAX % 8 == 0, "journalled as words");
_Static_assert(sizeof(struct hold) == 40, "hold record");
_Static_assert(sizeof(struct slot) == 120, "slot record");
_Static_assert(sizeof(struct event_rec) == 120, "event record");
_Static_assert(sizeof(struct region) == 48, "region record");
_Static_assert(sizeof(pthread_mutex_t) <= 64, "the lock has a cache line of its own");
_Static_assert(SHMC_META_MAX == 48 && SHMC_ST_N == 16, "sizes repeated in the public structs");

#endif
