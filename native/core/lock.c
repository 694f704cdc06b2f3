/* lock.c -- acquire with a deadline, recover, release. */
#include <errno.h>
#include <time.h>
#include "lock.h"
#include "../os/linux.h"

enum { PROBE_NS = 100 * 1000 * 1000, GLANCE_NS = 1000 * 1000, SAMPLE_MASK = 63, FUTEX_TID = 0x3fffffff };
#define FOREVER_NS (1ull << 60)

int lock_format(struct header *h)
{
    pthread_mutexattr_t a;
    int rc = pthread_mutexattr_init(&a);
    if (rc) return rc;
    memset(&h->lock, 0, sizeof h->lock);    /* unlogged: nobody is attached */
    rc = pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    if (!rc) rc = pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    if (!rc) rc = pthread_mutex_init(&h->lock, &a);
    pthread_mutexattr_destroy(&a);
    return rc;
}

int32_t lock_owner_tid(const struct header *h)
{
    return (int32_t)(lock_word(h) & FUTEX_TID);
}

bool lock_awaited(const struct header *h)
{
    return lock_word(h) >> 31;
}

/* The previous owner died inside. Dying in here again is fine: nothing below depends on the past. */
static int recover(struct core *c)
{
    struct header *h = c->hdr;
    tx_rollback(c);
    PUT(&h->recoveries, h->recoveries + 1);   /* unlogged: statistics */
    crash_point();
    int rc = pthread_mutex_consistent(&h->lock);
    crash_point();
    /* whoever waited for what the dead one was doing looks again */
    c->wake |= 3;
    return rc;
}

static void hold_begins(struct core *c, uint32_t op)
{
    struct header *h = c->hdr;
    uint64_t n = h->acquisitions + 1;
    /* Reading a clock costs as much as the lock, so 1 hold in 64 is timed. */
    PUT(&h->acquisitions, n);                                    /* unlogged: diagnosis */
    PUT(&h->holder_slot, c->me);                                 /* unlogged: diagnosis */
    PUT(&h->holder_op, op);                                      /* unlogged: diagnosis */
    PUT(&h->hold_since, (n & SAMPLE_MASK) ? 0 : os_now_ns());    /* unlogged: diagnosis */
    c->words = c->frees = c->items = 0;
}

/* `stuck` belongs to a handle, which threads may share: each word is of its own, and only a hint. */
#define STORE(p, v) __atomic_store_n(p, v, __ATOMIC_RELAXED)

int lock_acquire(struct core *c, struct stuck *s, uint32_t op, uint64_t timeout_ns)
{
    struct header *h = c->hdr;
    int rc = pthread_mutex_trylock(&h->lock);
    if (rc == EBUSY) {
        __atomic_fetch_add(&h->contended, 1, __ATOMIC_RELAXED);
        uint64_t now = os_now_ns(), held = PEEK(&h->acquisitions);
        uint64_t probe = PEEK(&s->next_probe_ns);
        bool again = probe && PEEK(&s->acquisitions) == held;
        if (again && now < probe) return SHMC_E_LOCK_TIMEOUT;
        uint64_t wait = again && timeout_ns > GLANCE_NS ? GLANCE_NS : timeout_ns < FOREVER_NS ? timeout_ns : FOREVER_NS;
        uint64_t end = now + wait;
        struct timespec t = {.tv_sec = (time_t)(end / 1000000000u), .tv_nsec = (long)(end % 1000000000u)};
        rc = pthread_mutex_clocklock(&h->lock, CLOCK_MONOTONIC, &t);
        if (rc == ETIMEDOUT) {
            uint64_t seen = PEEK(&h->acquisitions);
            if (!again && timeout_ns <= GLANCE_NS) return SHMC_E_LOCK_TIMEOUT;   /* a destructor's glance proves nothing */
            if (!again) STORE(&s->since_ns, now);
            STORE(&s->next_probe_ns, seen == held ? os_now_ns() + PROBE_NS : 0);
            STORE(&s->acquisitions, seen);
            return SHMC_E_LOCK_TIMEOUT;
        }
    }
    if (rc == 0 || rc == EOWNERDEAD) {          /* from here on `c` is this thread's */
        c->bad = false;
        c->wake = 0;
    }
    if (rc == EOWNERDEAD && (rc = recover(c)) != 0) {       /* somebody writes over the lock: nobody shall wait for us */
        pthread_mutex_unlock(&h->lock);
        rc = ENOTRECOVERABLE;
    }
    if (rc == ENOTRECOVERABLE) { __atomic_store_n(&h->state, SHMC_S_POISONED, __ATOMIC_RELEASE); return SHMC_E_POISONED; }
    if (rc) return SHMC_E_OS;
    if (PEEK(&s->next_probe_ns)) STORE(&s->next_probe_ns, 0);
    hold_begins(c, op);
    if (__builtin_expect(PEEK(&h->state) == SHMC_S_POISONED || c->bad, 0)) {
        uint32_t none;
        lock_release(c, &none);
        return SHMC_E_POISONED;
    }
    return 0;
}

int lock_release(struct core *c, uint32_t *wake)
{
    struct header *h = c->hdr;
    if (__builtin_expect(c->bad, 0)) {
        if (h->journal.count) tx_rollback(c);
        __atomic_store_n(&h->state, SHMC_S_POISONED, __ATOMIC_RELEASE);
    }
    if (h->hold_since) {
        uint64_t held = os_now_ns() - h->hold_since;
        if (held > h->max_hold_ns) PUT(&h->max_hold_ns, held);   /* unlogged: statistics */
        PUT(&h->hold_since, 0u);                                  /* unlogged: diagnosis */
    }
    bool bad = c->bad;
    *wake = 0;
    for (uint32_t w = 0; w < 2; w++) {
        if (!(c->wake >> w & 1) || !__atomic_load_n(&h->waiters[w], __ATOMIC_RELAXED)) continue;
        __atomic_store_n(&h->waiters[w], 0, __ATOMIC_RELAXED);
        __atomic_fetch_add(&h->wake[w], 1, __ATOMIC_RELAXED);
        *wake |= 1u << w;
    }
    pthread_mutex_unlock(&h->lock);
    crash_point();
    return bad ? SHMC_E_POISONED : 0;
}
