/* lock.h -- the one lock of a segment.
 *
 * A robust, process-shared mutex. Between lock_acquire and lock_release: no system call, no
 * allocation, no arena page touched, no unbounded loop. Waiting ends at a deadline; a stopped
 * holder is not dead and its lock is never stolen.
 *
 * EOWNERDEAD means that a thread died inside; recovery rolls back and does nothing else. It never
 * reaps: the process may live on (thread exit), or its descriptors and DMA may outlast this moment.
 */
#ifndef SHMC_LOCK_H
#define SHMC_LOCK_H
#include "journal.h"

/* What one handle remembers of a lock that timed out: fail fast until it moves. Racy by design
 * between the threads of a handle: a lost update costs one more wait. */
struct stuck { uint64_t acquisitions, next_probe_ns, since_ns; };

int lock_format(struct header *h);      /* 0 or an errno */
int lock_acquire(struct core *c, struct stuck *s, uint32_t op, uint64_t timeout_ns);
/* lock_release -- 0, or SHMC_E_POISONED when the hold met damage. `wake` gets the bits of those futexes
 * whose waiters the caller must wake now, outside; a caller that dies before costs them one slice. */
int lock_release(struct core *c, uint32_t *wake);
/* lock_word -- the futex word (kernel ABI of robust futexes), which glibc keeps first */
static inline uint32_t lock_word(const struct header *h) { return PEEK((const shared32 *)(const void *)&h->lock); }
/* lock_owner_tid -- the thread id in it, 0: free */
int32_t lock_owner_tid(const struct header *h);
/* lock_awaited -- whether a thread sleeps on it (FUTEX_WAITERS) */
bool lock_awaited(const struct header *h);

#endif
