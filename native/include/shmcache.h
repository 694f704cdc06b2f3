/* shmcache.h -- the only public C header: what Python (or another C program) may call.
 *
 * One `shmc` is one attachment of one process on one control segment. Every call that touches
 * shared state is: enter, lock, a bounded loop of small transactions, unlock, wake, leave. No call
 * returns with the lock held. Calls take arrays; a single key is an array of one.
 *
 * Return value: 0 or a positive outcome (enum shmc_status), or a negative error. Results go through
 * out-pointers. A call that fails changes nothing, unless its comment says what.
 *
 * Ownership of holds: the caller makes a `shmc_owner` BEFORE the call that takes a hold. C writes
 * the hold into it under the lock, and `shmc_owner_free` gives back what is still in it. So there
 * is no instant at which a hold exists that nobody would release.
 */
#ifndef SHMCACHE_H
#define SHMCACHE_H
#include <stdint.h>
#include <stddef.h>

/* cdef-begin (from here on, plain enough for cffi) */

enum shmc_status {
    SHMC_OK = 0,
    SHMC_PENDING = 1,      /* reserve/get: another writer has reserved this part */
    SHMC_FOUND = 2,        /* reserve: already published, the owner now holds it */
    SHMC_GROW = 3,         /* allocate: a region that is not yet committed would help */
    SHMC_FULL = 4,         /* allocate: no memory now; wait on `ticket` or give up */
    SHMC_MORE = 5,         /* a bounded step was done, call again to go on */

    SHMC_E_INVAL = -1,     /* an argument is out of its range */
    SHMC_E_CAPACITY = -2,  /* larger than a region: could never fit */
    SHMC_E_STALE = -3,     /* released, reaped or re-used handle */
    SHMC_E_LOCK_TIMEOUT = -4,
    SHMC_E_POISONED = -5,  /* the segment is damaged: terminal */
    SHMC_E_CLOSED = -6,
    SHMC_E_FORKED = -7,    /* handle inherited over fork: attach again */
    SHMC_E_SLOTS = -8,     /* attachment table is full */
    SHMC_E_NAMESPACES = -9,
    SHMC_E_MISMATCH = -10, /* namespace parts or descriptor differ */
    SHMC_E_PUBLISHED = -11,/* put of an object that was published before */
    SHMC_E_FOREIGN = -12,  /* object of another namespace */
    SHMC_E_NOT_SHMCACHE = -13, /* validate: wrong magic */
    SHMC_E_FORMAT = -14,   /* validate: other format, layout, word size or libc */
    SHMC_E_CORRUPT = -15,  /* validate: sizes or offsets do not fit the file */
    SHMC_E_NOT_READY = -16,/* validate: creation was not finished */
    SHMC_E_RAW_CLONE = -17,/* this thread cannot own a robust lock */
    SHMC_E_NOT_FOUND = -18,
    SHMC_E_OS = -19        /* a system call failed: errno tells */
};

enum shmc_limits {
    SHMC_KEY_MAX = 64, SHMC_META_MAX = 48, SHMC_NAME_MAX = 256, SHMC_DESC_MAX = 1024,
    SHMC_LABEL_MAX = 32, SHMC_PARTS_MAX = 4096, SHMC_FORMAT_VERSION = 3
};

enum shmc_state { SHMC_S_NONE = 0, SHMC_S_INIT = 1, SHMC_S_READY = 2, SHMC_S_UNLINKING = 3, SHMC_S_POISONED = 4 };
enum shmc_region_state { SHMC_R_ABSENT = 0, SHMC_R_COMMITTING = 1, SHMC_R_READY = 2 };
enum shmc_slot_state { SHMC_SLOT_FREE = 0, SHMC_SLOT_LIVE = 1, SHMC_SLOT_QUARANTINE = 2, SHMC_SLOT_REAPING = 3 };
enum shmc_pin_state { SHMC_PIN_OFF = 0, SHMC_PIN_RUNNING = 1, SHMC_PIN_DONE = 2, SHMC_PIN_FAILED = 3 };
enum shmc_policy { SHMC_LRU = 0, SHMC_FIFO = 1, SHMC_MRU = 2, SHMC_LFU = 3 };
enum shmc_event_kind { SHMC_EV_ADMIT = 1, SHMC_EV_REMOVE = 2 };
enum shmc_event_cause { SHMC_BY_PUT = 1, SHMC_BY_EVICT = 2, SHMC_BY_REMOVE = 3, SHMC_BY_CLEAR = 4, SHMC_BY_BUMP = 5 };
enum shmc_liveness { SHMC_ALIVE = 0, SHMC_EXECED = 1, SHMC_GONE = 2 };
enum shmc_flags { SHMC_F_PIN = 1, SHMC_F_TOUCH = 2, SHMC_F_NO_EVICT = 4, SHMC_F_NO_GROW = 8 };
enum shmc_stat_ix {
    SHMC_ST_HITS, SHMC_ST_MISSES, SHMC_ST_STORES, SHMC_ST_DUPLICATES, SHMC_ST_EVICTIONS,
    SHMC_ST_EVICTION_FAILURES, SHMC_ST_ABORTS, SHMC_ST_REAPS, SHMC_ST_WAITS, SHMC_ST_STALE_PUTS,
    SHMC_ST_HOLDS_FULL, SHMC_ST_LEASES_ENDED, SHMC_ST_N = 16
};

typedef struct shmc shmc;
typedef struct shmc_owner shmc_owner;

/* What a segment is made of. The caller fills the first group (0 = default where said), shmc_plan
 * the second. Immutable for the segment's life. */
typedef struct {
    uint64_t capacity;        /* payload bytes, a multiple of align */
    uint64_t region_bytes;    /* a multiple of align, at least 64 KiB or the capacity */
    uint32_t align;           /* granule: power of two, 64 .. 2 MiB */
    uint32_t policy;
    uint32_t max_chunks;      /* 0: capacity / 64 KiB, at least 4096 */
    uint32_t max_attachments;
    uint32_t lifetime;        /* 0 persistent, 1 ephemeral */
    uint32_t mode;
    uint32_t flags;           /* Python's own: hugepages as asked, checksum */
    uint32_t numa_node_mask;

    uint64_t region_stride;   /* distance of two regions in the arena's address space */
    uint64_t control_bytes;
    uint32_t n_regions, max_blocks, max_holds, max_namespaces, n_events, n_buckets, n_part_buckets, spare;
} shmc_geometry;

typedef struct {
    uint64_t magic, fingerprint, instance, created_ns, pid_ns, time_ns;
    uint32_t format, state, libc, word;
    char version[16];
} shmc_identity;

/* Keys of one call: n keys in one buffer. Uniform (ends == NULL): each klen bytes, all of ktype.
 * Mixed: key i ends at ends[i] and has type types[i]. At most SHMC_KEY_MAX bytes each. */
typedef struct {
    const uint8_t *data;
    const uint32_t *ends;
    const uint8_t *types;
    uint32_t n, klen;
    uint32_t ktype;
} shmc_keys;

/* Where the bytes of one part lie. block == 0xffffffff: absent. */
typedef struct {
    uint64_t offset, size, extent;   /* arena byte offset; bytes asked; bytes reserved */
    uint32_t block, gen;
    uint32_t meta_len, published;
    uint8_t meta[48];
} shmc_part;

typedef struct {
    uint64_t stat[16];
    uint64_t capacity, ready, used, free, largest_free, evictable, pinned;
    uint64_t chunks, complete, parts, blocks, holds, attachments, namespaces;
    uint64_t acquisitions, contended, recoveries, max_hold_ns;
    uint64_t events, clock;
    uint32_t state, exact;           /* exact 0: copied while a transaction kept running */
} shmc_stats;

typedef struct {
    uint32_t state, gen, rank, holds;
    int32_t pid; uint32_t writes;
    uint32_t leaving, pin_state;     /* leaving == gen: its owner has closed, anyone may reap it */
    uint32_t pinned_regions, spare;  /* what its process says of itself */
    uint64_t start_time, start_stack, attached_ns;
    char label[32];
} shmc_slot_info;

typedef struct {
    uint32_t used, parts, generation, chunks, complete, name_len, desc_len, spare;
    uint64_t bytes, hits, misses, stores, evictions;
    char name[256];
    char desc[1024];
} shmc_namespace_info;

typedef struct {
    uint64_t inode, bytes;
    uint32_t state, owner, flags, node;
} shmc_region_info;

typedef struct {
    uint64_t seq, time_ns, bytes;
    uint32_t kind, cause, ns, ns_gen;
    int32_t pid; uint32_t complete, klen, ktype;
    uint8_t key[64];
} shmc_event;

typedef struct {
    uint64_t stamp;
    uint32_t chunk, gen, next, ns;
    uint32_t published, held, klen, ktype, flags, spare;
    uint8_t key[64];
} shmc_key_record;

/* What shmc_peek_* give: copies of single records, each from one instant, the table not. */
enum shmc_chunk_state { SHMC_C_LINKED = 1, SHMC_C_PARKED = 2, SHMC_C_GONE = 4, SHMC_C_DRAIN = 8, SHMC_C_SHELL = 16 };
enum shmc_extent_state { SHMC_X_FREE = 1, SHMC_X_WRITING = 2, SHMC_X_PUBLISHED = 3 };
enum shmc_hold_kind { SHMC_H_REF = 1, SHMC_H_WRITE = 2, SHMC_H_BLOCK_PIN = 3, SHMC_H_KEY_PIN = 4, SHMC_H_LOOKUP_PIN = 5, SHMC_H_WRITE_PIN = 6 };

typedef struct {
    uint64_t acquisitions, hold_since_ns;        /* hold_since_ns 0: this hold is not timed (1 in 64 is) */
    uint32_t holder_slot, holder_op, owner_died, awaited;
    int32_t owner_tid; uint32_t in_transaction;  /* owner_tid 0: free */
    uint32_t journal, stale, parked, waiting_memory, waiting_publication, handshake_pid;
} shmc_lock_info;

typedef struct {
    uint64_t stamp, bytes;
    uint32_t chunk, gen, ns, ns_gen;
    uint32_t flags, published, held, pins;       /* pins: 1 when the chunk itself is pinned, not only its parts */
    uint32_t admit_tick, last_tick, klen, ktype; /* ticks of 2^26 ns, CLOCK_MONOTONIC */
    uint8_t key[64];
} shmc_chunk_info;

typedef struct {
    uint64_t offset, extent, size;
    uint32_t block, gen, state, chunk;           /* chunk 0xffffffff: of none (any more) */
    uint32_t ns, ns_gen, part, refs;
    uint32_t held, meta_len;
    uint8_t meta[48];
} shmc_block_info;

typedef struct { uint32_t hold, gen, kind, slot, slot_gen, block, chunk, deadline, taken, spare; } shmc_hold_info;

typedef struct { uint32_t slots, holds, blocks, quarantined; } shmc_reap_report;
typedef struct { int32_t pid; uint32_t op; uint64_t age_ns; } shmc_holder;

/* ---- build identity ------------------------------------------------------------------------ */
const char *shmc_version(void);
uint64_t shmc_fingerprint(void);
uint32_t shmc_handshake_pid_offset(void);  /* where in the file a creator notes its pid */

/* ---- making and recognising a control segment (no lock: the caller holds the handshake) ----- */
int shmc_plan(shmc_geometry *g);
int shmc_format(void *base, uint64_t size, const shmc_geometry *g, uint64_t instance, uint64_t pid_ns, uint64_t time_ns, const uint64_t *seed);
void shmc_format_region(void *base, uint32_t region, uint64_t inode);
void shmc_set_state(void *base, uint32_t state);
int shmc_validate(const void *base, uint64_t size, shmc_geometry *g, shmc_identity *id);
/* shmc_takeover -- with proof that nobody is attached: roll back, renew the lock, note new namespaces. */
int shmc_takeover(void *base, uint64_t size, uint64_t pid_ns, uint64_t time_ns);
int shmc_peek_slot(const void *base, uint64_t size, uint32_t slot, shmc_slot_info *out);

/* ---- attachment ---------------------------------------------------------------------------- */
shmc *shmc_new(void *base, uint64_t size, uint64_t lock_timeout_ns);  /* NULL: not a valid segment */
void shmc_free(shmc *h);
/* shmc_drop -- the destructor of a handle: detaches, without waiting long, what nobody has detached, and frees */
void shmc_drop(shmc *h);
int shmc_can_lock(void);                       /* 0, or SHMC_E_RAW_CLONE */
int shmc_attach(shmc *h, int32_t rank, const char *label);
int shmc_detach(shmc *h, uint64_t wait_ns, uint32_t *dropped);
int shmc_check(shmc *h);                       /* 0, SHMC_E_CLOSED, SHMC_E_FORKED: no lock */
int shmc_slot_of(shmc *h);
/* shmc_note_pinning -- for people: how many regions this process has registered with a device. No lock. */
int shmc_note_pinning(shmc *h, uint32_t state, uint32_t regions);
void shmc_last_holder(shmc *h, shmc_holder *out);
const char *shmc_op_name(uint32_t op);
int shmc_slot(shmc *h, uint32_t slot, shmc_slot_info *out);
int shmc_reap(shmc *h, shmc_reap_report *report);
int shmc_step(shmc *h);                        /* deferred releases and draining: MORE while there is work */

/* ---- owners of holds ------------------------------------------------------------------------ */
shmc_owner *shmc_owner_new(shmc *h, uint32_t capacity);
void shmc_owner_free(shmc_owner *o);
uint32_t shmc_owner_count(const shmc_owner *o);
int shmc_release(shmc *h, shmc_owner **owners, uint32_t n);   /* last to first; empty ones are skipped */
/* shmc_adopt -- move an unpublished, unreserved block to another namespace, as if allocated there now */
int shmc_adopt(shmc *h, uint32_t ns, shmc_owner *o);
/* shmc_set_meta -- other bytes beside an unpublished block, by its writer; those of the allocation are gone */
int shmc_set_meta(shmc *h, const shmc_owner *o, const uint8_t *meta, uint32_t meta_len);
int shmc_dup(shmc *h, const shmc_part *part, shmc_owner *to, int as_pin);
int shmc_ref_count(shmc *h, const shmc_part *part, uint32_t *refs, uint32_t *pins);

/* ---- namespaces ----------------------------------------------------------------------------- */
int shmc_namespace(shmc *h, const char *name, uint32_t name_len, uint32_t parts, const char *desc, uint32_t desc_len, int has_desc, uint32_t *ns);
int shmc_namespace_at(shmc *h, uint32_t ns, shmc_namespace_info *out);
int shmc_bump(shmc *h, uint32_t ns, uint32_t *generation);
int shmc_clear(shmc *h, uint32_t ns, uint32_t *cursor, uint64_t *removed);  /* MORE until the table is done */

/* ---- memory --------------------------------------------------------------------------------- */
int shmc_alloc(shmc *h, uint32_t ns, uint64_t size, const uint8_t *meta, uint32_t meta_len, uint32_t n, uint32_t flags, shmc_owner **owners, shmc_part *out, uint32_t *ticket);
int shmc_wait(shmc *h, int which, uint32_t ticket, uint64_t timeout_ns);  /* which 0 memory, 1 publication */
int shmc_region(shmc *h, uint32_t region, shmc_region_info *out);
int shmc_region_claim(shmc *h, uint32_t *region);        /* OK: yours to commit; PENDING: others are at it; NOT_FOUND: none left */
int shmc_region_done(shmc *h, uint32_t region, int ok, uint32_t flags, uint32_t node);

/* ---- keys ----------------------------------------------------------------------------------- */
int shmc_put(shmc *h, uint32_t ns, const shmc_keys *keys, shmc_owner **objs, uint32_t part, const shmc_keys *parent, uint8_t *stored);
int shmc_get(shmc *h, uint32_t ns, const shmc_keys *keys, uint32_t part, shmc_owner **owners, shmc_part *out);
int shmc_contains(shmc *h, uint32_t ns, const shmc_keys *keys, int32_t part, uint8_t *out);
/* The same for one key, which needs no struct then. All but get answer 0 or 1. */
int shmc_pin_one(shmc *h, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype, int32_t part, uint64_t lease_ns);
int shmc_unpin_one(shmc *h, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype);
int shmc_remove_one(shmc *h, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype);
int shmc_put_one(shmc *h, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype, shmc_owner **obj, uint32_t part, const shmc_keys *parent);
int shmc_get_one(shmc *h, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype, uint32_t part, shmc_owner **owner, shmc_part *out);
int shmc_contains_one(shmc *h, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype, int32_t part);
int shmc_lookup(shmc *h, uint32_t ns, const shmc_keys *keys, uint32_t flags, uint64_t lease_ns, shmc_owner *owner, uint32_t *n);
/* shmc_leading -- how many leading keys have that part (part -1: are complete). With SHMC_F_PIN each is pinned
 * as by shmc_pin, in the critical section in which it is found; `n` counts those also when the call fails. */
int shmc_leading(shmc *h, uint32_t ns, const shmc_keys *keys, int32_t part, uint32_t flags, uint64_t lease_ns, uint32_t *n);
int shmc_lookup_get(shmc *h, uint32_t ns, shmc_owner *lookup, uint32_t i, uint32_t part, shmc_owner *owner, shmc_part *out);
int shmc_pin(shmc *h, uint32_t ns, const shmc_keys *keys, uint64_t lease_ns, uint8_t *out);
int shmc_unpin(shmc *h, uint32_t ns, const shmc_keys *keys, uint8_t *out);
int shmc_touch(shmc *h, uint32_t ns, const shmc_keys *keys);
int shmc_remove(shmc *h, uint32_t ns, const shmc_keys *keys, uint8_t *out);
int shmc_reserve(shmc *h, uint32_t ns, const shmc_keys *key, uint32_t part, uint64_t size, const uint8_t *meta, uint32_t meta_len, uint32_t flags, shmc_owner *owner, shmc_part *out, uint32_t *ticket);

/* ---- looking inside ------------------------------------------------------------------------- */
int shmc_stats_read(const void *base, uint64_t size, shmc_stats *out);   /* no lock */
/* shmc_scan_keys -- linked chunks of a namespace (or all: ns 0xffffffff) from table position *cursor on */
int shmc_scan_keys(shmc *h, uint32_t *cursor, uint32_t ns, shmc_key_record *out, uint32_t cap, uint32_t *n);
/* shmc_pins_read -- pins on blocks and chunks: of one slot, and of all; approximate beside writers */
int shmc_pins_read(const void *base, uint64_t size, uint32_t slot, uint64_t *own, uint64_t *all);
int shmc_events_read(const void *base, uint64_t size, uint64_t since, shmc_event *out, uint32_t cap, uint32_t *n, uint64_t *next, uint64_t *lost);
/* Below: no lock, no handle, a mapping that may be read-only. Tables are copied in slices, from record *cursor on;
 * MORE while there is more. At most `cap` records, at most 65,536 looked at in a call. */
/* shmc_peek_stats -- as shmc_stats_read; of a holder that is stopped or dead inside a transaction, the state before it */
int shmc_peek_stats(const void *base, uint64_t size, shmc_stats *out);
int shmc_peek_lock(const void *base, uint64_t size, shmc_lock_info *out);
int shmc_peek_namespace(const void *base, uint64_t size, uint32_t ns, shmc_namespace_info *out);
int shmc_peek_region(const void *base, uint64_t size, uint32_t region, shmc_region_info *out);
int shmc_peek_chunks(const void *base, uint64_t size, uint32_t *cursor, shmc_chunk_info *out, uint32_t cap, uint32_t *n);
int shmc_peek_blocks(const void *base, uint64_t size, uint32_t *cursor, shmc_block_info *out, uint32_t cap, uint32_t *n);
int shmc_peek_holds(const void *base, uint64_t size, uint32_t *cursor, shmc_hold_info *out, uint32_t cap, uint32_t *n);
/* shmc_peek_key -- all versions of a key in a namespace, also outdated and removed ones that are still held */
int shmc_peek_key(const void *base, uint64_t size, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype, shmc_chunk_info *out, uint32_t cap, uint32_t *n);
/* shmc_peek_parts -- the blocks of a chunk, published or being written; NOT_FOUND: it is not that generation any more */
int shmc_peek_parts(const void *base, uint64_t size, uint32_t chunk, uint32_t gen, shmc_block_info *out, uint32_t cap, uint32_t *n);
int shmc_verify(shmc *h, char *text, uint32_t cap);          /* count of violations, first ones as lines */
int shmc_verify_copy(void *copy, uint64_t size, char *text, uint32_t cap); /* a private copy: no lock, may be changed */

/* ---- the operating system (os/linux.c): calls with no shared state -------------------------- */
/* A descriptor that holds locks: closed in every forked child, and by its destructor, once, in the process
 * that set it. */
typedef struct { int fd; int spare; uint64_t generation; } shmc_fd;
void shmc_fd_set(shmc_fd *cell, int fd);
void shmc_fd_close(shmc_fd *cell);
int shmc_liveness(int32_t pid, uint64_t start_time, uint64_t start_stack);
int shmc_self(int32_t *pid, uint64_t *start_time, uint64_t *start_stack);
void *shmc_map(int fd, uint64_t size, int writable);              /* NULL: errno */
void *shmc_reserve_space(uint64_t size, uint64_t align);          /* address space only */
int shmc_map_at(void *at, int fd, uint64_t size);
int shmc_unmap(void *at, uint64_t size);
int shmc_populate(void *at, uint64_t size);                       /* 0 or -errno */
int shmc_collapse(void *at, uint64_t size);                       /* huge pages: 0 or -errno */
int shmc_inherit(void *at, uint64_t size);                        /* forked children get it too: 0 or -errno */
int shmc_numa_prefer(int node);                                   /* this thread; -1 gives up the preference */

/* ---- for tests ------------------------------------------------------------------------------ */
int shmc_debug_hold_lock(shmc *h, uint64_t ns, int in_transaction);   /* sleeps inside the lock */
/* cdef-end */
#endif
