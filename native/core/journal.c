/* journal.c -- begin, commit and roll back; see journal.h for the argument. */
#include "journal.h"

/* Worst-case words of one transaction, by op. A commit that used more is a bug in the core; the
 * check is always on, the journal itself has room for twice as many. */
static const struct { const char *name; uint32_t words; } OPS[TX_N] = {
    [TX_NONE] = {"none", 0}, [TX_ATTACH] = {"attach", 24}, [TX_NAMESPACE] = {"namespace", 16},
    [TX_REGION] = {"region", 24}, [TX_ALLOC] = {"allocate", 64}, [TX_HOLD] = {"hold", 32},
    [TX_RELEASE] = {"release", 96}, [TX_PUBLISH] = {"put", 96}, [TX_RESERVE] = {"reserve", 64},
    [TX_UNLINK] = {"unlink", 64}, [TX_DRAIN] = {"drain", 64}, [TX_TOUCH] = {"touch", 24},
    [TX_PARK] = {"park", 24}, [TX_BUMP] = {"bump", 16}, [TX_REAP] = {"reap", 96},
    [TX_LEASE] = {"lease", 96}, [TX_READ] = {"read", 16}, [TX_VERIFY] = {"verify", 0},
};

const char *tx_op_name(uint32_t op) { return op < TX_N ? OPS[op].name : "?"; }

void tx_begin(struct core *c, enum tx_op op)
{
    struct header *h = c->hdr;
    SOUND(c, h->journal.count == 0, "transaction inside a transaction");
    c->tx_op = op;
    PUT(&h->journal.op, (uint32_t)op);
    PUT(&h->seq, h->seq | 1);
    FENCE();
    __atomic_thread_fence(__ATOMIC_RELEASE);   /* readers without the lock see odd before any change */
    crash_point();
}

static void seq_even(struct header *h)
{
    __atomic_store_n(&h->seq, (h->seq | 1) + 1, __ATOMIC_RELEASE);
}

/* Events become readable only after the transaction that wrote them is final. */
static void publish_events(struct header *h)
{
    __atomic_store_n(&h->event_published, h->event_head, __ATOMIC_RELEASE);
}

bool tx_commit(struct core *c)
{
    struct header *h = c->hdr;
    SOUND(c, h->journal.count <= OPS[c->tx_op].words, "more words than the operation's worst case");
    if (__builtin_expect(c->bad, 0)) { tx_rollback(c); return false; }
    FENCE(); crash_point();
    PUT(&h->journal.count, 0u);
    FENCE(); crash_point();
    publish_events(h);
    seq_even(h);
    crash_point();
    return true;
}

void tx_rollback(struct core *c)
{
    struct header *h = c->hdr;
    uint32_t n = h->journal.count;
    if (n > JOURNAL_CAP) { c->bad = true; n = JOURNAL_CAP; }
    while (n-- > 0) {                                    /* <= JOURNAL_CAP */
        const struct undo *r = &h->journal.rec[n];
        const uint64_t off = (uint64_t)PEEK(&r->off2) * 2, old = PEEK(&r->old);
        const uint32_t width = PEEK(&r->width);              /* once: what is checked is what is used */
        if (off < offsetof(struct header, seq) || off + width > c->size || (width && off % width)) { c->bad = true; continue; }
        void *p = c->base + off;
        switch (width) {
        case 2: PUT((uint16_t *)p, (uint16_t)old); break;
        case 4: PUT((uint32_t *)p, (uint32_t)old); break;
        case 8: PUT((uint64_t *)p, old); break;
        default: c->bad = true;
        }
        FENCE(); crash_point();
    }
    FENCE();
    PUT(&h->journal.count, 0u);
    FENCE(); crash_point();
    publish_events(h);
    seq_even(h);
    crash_point();
}
