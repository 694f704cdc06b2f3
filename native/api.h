/* api.h -- one attachment's private handle, and how a call enters and leaves the lock.
 *
 * Threads share a handle. Everything in `core` is used under the lock only; the rest is atomic or
 * set once. A forked child never uses a handle it inherited (generation), so none of it needs an
 * atfork handler. */
#ifndef SHMC_API_H
#define SHMC_API_H
#include "core/attach.h"
#include "core/lock.h"
#include "os/linux.h"

enum { BATCH_ITEMS = 64, BATCH_WORDS = 256, BATCH_FREES = 16, YIELD_NS = 50000 };
enum handle_state { HANDLE_NEW, HANDLE_OPEN, HANDLE_CLOSED };

struct shmc_owner {
    shmc *h;
    shmc_owner *next;                  /* in the handle's queue of deferred releases */
    uint32_t n, cap;
    bool pins;                         /* refs are holds; false: remembered chunks of an unpinned lookup */
    struct ref refs[];
};

struct shmc {
    struct core core;
    struct stuck stuck;
    uint64_t lock_timeout_ns, generation;
    uint32_t slot, slot_gen, region_hint;
    uint32_t state, inflight, users;   /* atomic; users: owners + the handle's own user */
    shmc_owner *deferred;              /* atomic stack: releases that could not get the lock */
    shmc_owner *dead;                  /* under the lock: to be freed after it */
    uint32_t failed_len;               /* under the lock: a plan that failed, not repeated until `freed` moves */
    uint64_t failed_freed, failed_want;
};

/* begin -- enter, lock, fence. On success the caller must `finish`. */
int begin(shmc *h, uint32_t op);
int begin_within(shmc *h, uint32_t op, uint64_t timeout_ns, bool attached);
/* finish -- drain a little, unlock, wake, leave; turns a sound rc into SHMC_E_POISONED on damage */
int finish(shmc *h, int rc);
/* breathe -- between two transactions of a batch: give others the lock when the budget is used.
 * When it fails the lock is gone, and the call ends with give_up instead of finish. */
int breathe(shmc *h, uint32_t op);
int give_up(shmc *h, int rc);

/* owner_release_locked -- let go of what is in it, last to first; MORE: stopped at the budget */
int owner_release_locked(shmc *h, shmc_owner *o);
/* owner_put -- false when it is full: the same owner was given twice, or to two threads */
static inline bool owner_put(shmc_owner *o, struct ref r)
{
    if (o->n >= o->cap) return false;
    o->refs[o->n] = r;
    __atomic_store_n(&o->n, o->n + 1, __ATOMIC_RELEASE);
    return true;
}
/* owner_take -- one more hold, straight into its owner; false: the pool is empty, or the owner is full */
bool owner_take(struct core *c, shmc_owner *o, enum hold_kind kind, uint32_t target, uint32_t deadline);
static inline bool owner_ready(const shmc *h, const shmc_owner *o, uint32_t n) { return o && o->h == h && o->n == 0 && o->cap >= n; }

struct key key_at(const struct core *c, uint32_t ns, const shmc_keys *k, uint32_t i);
bool keys_ok(const shmc_keys *k);
void part_info(struct core *c, uint32_t block, shmc_part *out);
static inline uint32_t lease_tick(const struct core *c, uint64_t lease_ns)
{
    uint64_t ticks = (lease_ns >> 26) + (c->now_ns >> 26) + 2;      /* never early */
    return !lease_ns ? 0 : ticks < NIL ? (uint32_t)ticks : NIL - 1;
}

/* room_for -- a bounded step towards `n` extents of `len`. 1: try again; else GROW, FULL or an error */
struct room { uint32_t victims, rescans, region, regions_seen, at, at_gen, run, run_gen, run_len, stale_steps; bool spatial, evicting, started, swept; };
int room_for(shmc *h, struct room *r, uint32_t len, uint32_t n, uint32_t flags);
void ticket_take(struct core *c, int which, uint32_t *ticket);

#endif
