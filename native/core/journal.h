/* journal.h -- undo journal: what makes every operation all or nothing under SIGKILL.
 *
 *     tx_begin; tx32(&field, value) ...; tx_commit
 *
 * tx32 appends (offset, old value), then counts it, then stores. Death leaves the effect of a
 * prefix of the victim's stores in program order (coherent memory, and the kernel's exit-time
 * handling of the robust futex comes before the next owner's acquire), so compiler fences are all
 * the ordering needed; no flushes, no checksums. Invariant at every instant:
 *
 *     each logged field that differs from its value at tx_begin has a record with index < count
 *
 * Rollback writes old values newest first; they are absolute, so dying in it and running it again
 * gives the same result. Commit is one store: count = 0. Redo and shadow copies were rejected: they
 * need read-your-writes in every algorithm above, while this is plain pointer code.
 *
 * Not journalled: fields of a record that nothing can reach yet (but never one that doubles as a
 * free-list link), statistics, payload. Such a store says so beside it (tests/lint).
 * Cost: about 2 ns a word.
 */
#ifndef SHMC_JOURNAL_H
#define SHMC_JOURNAL_H
#include "types.h"

#ifdef SHMC_CRASHPOINTS
void crash_point(void);      /* the program of native/tests decides whether this is the end */
#else
static inline void crash_point(void) {}
#endif

#define FENCE() __atomic_signal_fence(__ATOMIC_SEQ_CST)
#define PUT(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)

/* count -- statistics, which may lose their last increment at a crash */
static inline void count(struct core *c, enum shmc_stat_ix i)
{
    PUT(&c->hdr->stat[i], c->hdr->stat[i] + 1);   /* unlogged: statistics */
}

/* ops: index into the table of worst cases, and the name a timeout reports */
enum tx_op {
    TX_NONE, TX_ATTACH, TX_NAMESPACE, TX_REGION, TX_ALLOC, TX_HOLD, TX_RELEASE, TX_PUBLISH, TX_RESERVE,
    TX_UNLINK, TX_DRAIN, TX_TOUCH, TX_PARK, TX_BUMP, TX_REAP, TX_LEASE, TX_READ, TX_VERIFY, TX_N
};

static inline void undo_push(struct core *c, const void *p, uint32_t width, uint64_t old)
{
    struct journal *j = &c->hdr->journal;
    uint32_t n = j->count;
    if (__builtin_expect(n >= JOURNAL_CAP, 0)) { c->bad = true; return; }
    PUT(&j->rec[n].off2, (uint32_t)((uint64_t)((const uint8_t *)p - c->base) >> 1));
    PUT(&j->rec[n].width, width);
    PUT(&j->rec[n].old, old);
    FENCE(); crash_point();
    PUT(&j->count, n + 1);
    FENCE(); crash_point();
    c->words++;
}

#ifdef SHMC_NO_JOURNAL        /* only for tools/bench and the test that shows why there is a journal */
#define undo_push(c, p, w, o) ((void)(p), (void)(o))
#endif

#define TX_SETTER(name, type)                                                        \
    static inline void name(struct core *c, type *p, type v)                         \
    {                                                                                \
        if (__builtin_expect(c->bad, 0) || *p == v) return;                          \
        undo_push(c, p, (uint32_t)sizeof *p, (uint64_t)*p);                          \
        if (__builtin_expect(c->bad, 0)) return;                                     \
        PUT(p, v);                                                                   \
        FENCE(); crash_point();                                                      \
    }
TX_SETTER(tx16, uint16_t)
TX_SETTER(tx32, uint32_t)
TX_SETTER(tx64, uint64_t)

void tx_begin(struct core *c, enum tx_op op);
/* tx_commit -- make it final; false when the transaction met damage and was rolled back */
bool tx_commit(struct core *c);
void tx_rollback(struct core *c);
const char *tx_op_name(uint32_t op);

#endif
