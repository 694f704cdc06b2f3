/* api.c -- handles, owners of holds, attachments, namespaces, looking inside. */
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include "api.h"
#include "core/check.h"
#include "core/namespaces.h"

/* ---- entering and leaving --------------------------------------------------------------------- */

static void leave(shmc *h) { __atomic_fetch_sub(&h->inflight, 1, __ATOMIC_RELEASE); }

static int enter(shmc *h, bool attached)
{
    if (__builtin_expect(h->generation != os_generation(), 0)) return SHMC_E_FORKED;
    __atomic_fetch_add(&h->inflight, 1, __ATOMIC_SEQ_CST);
    uint32_t want = attached ? HANDLE_OPEN : HANDLE_NEW;
    if (__builtin_expect(__atomic_load_n(&h->state, __ATOMIC_SEQ_CST) != want, 0)) {
        leave(h);
        return SHMC_E_CLOSED;
    }
    return SHMC_OK;
}

static int unlock_and_wake(shmc *h)
{
    struct header *hdr = h->core.hdr;
    uint32_t wake = 0;
    int rc = lock_release(&h->core, &wake);
    if (wake & 1) os_futex_wake(&hdr->wake[0]);
    if (wake & 2) os_futex_wake(&hdr->wake[1]);
    return rc;
}

static int lock_and_fence(shmc *h, uint32_t op, uint64_t timeout_ns, bool attached)
{
    struct core *c = &h->core;
    int rc = lock_acquire(c, &h->stuck, op, timeout_ns);
    if (rc) return rc;
    uint64_t now = os_now_coarse();      /* vDSO, 5 ns: no system call */
    c->now_ns = now;
    c->now = (uint32_t)(now >> 26);
    c->me = attached ? PEEK(&h->slot) : NIL;
    c->me_gen = h->slot_gen;
    if (attached && __builtin_expect(!slot_mine(c), 0)) {
        unlock_and_wake(h);
        return SHMC_E_STALE;
    }
    PUT(&c->hdr->holder_slot, c->me);   /* unlogged: diagnosis */
    return SHMC_OK;
}
static void push_deferred(shmc *h, shmc_owner *o)
{
    o->next = __atomic_load_n(&h->deferred, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(&h->deferred, &o->next, o, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
}

static void owner_destroy(shmc_owner *o)
{
    shmc *h = o->h;
    free(o);
    shmc_free(h);
}

/* Up to the budget of one hold; the rest stays queued. What is empty is freed after the lock. */
static void release_deferred(shmc *h)
{
    shmc_owner *o = __atomic_exchange_n(&h->deferred, NULL, __ATOMIC_ACQUIRE);
    while (o && owner_release_locked(h, o) == SHMC_OK) {     /* <= 64 holds; empty owners are none */
        shmc_owner *next = o->next;
        o->next = h->dead;
        h->dead = o;
        o = next;
    }
    if (!o) return;
    shmc_owner *none = NULL;
    if (__atomic_compare_exchange_n(&h->deferred, &none, o, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) return;
    while (o) {                          /* others queued meanwhile: rare, and once each */
        shmc_owner *next = o->next;
        push_deferred(h, o);
        o = next;
    }
}

static shmc_owner *take_dead(shmc *h)
{
    shmc_owner *dead = h->dead;
    h->dead = NULL;
    return dead;
}

static void bury(shmc_owner *o)
{
    while (o) {
        shmc_owner *next = o->next;
        owner_destroy(o);
        o = next;
    }
}

int begin_within(shmc *h, uint32_t op, uint64_t timeout_ns, bool attached)
{
    int rc = enter(h, attached);
    if (rc) return rc;
    rc = lock_and_fence(h, op, timeout_ns, attached);
    if (rc) { leave(h); return rc; }
    if (__builtin_expect(__atomic_load_n(&h->deferred, __ATOMIC_RELAXED) != NULL, 0) && attached) release_deferred(h);
    return SHMC_OK;
}

int begin(shmc *h, uint32_t op) { return begin_within(h, op, h->lock_timeout_ns, true); }

int finish(shmc *h, int rc)
{
    struct core *c = &h->core;
    if (__builtin_expect(c->hdr->drain != NIL || c->hdr->stale, 0) && !c->bad) drain_some(c);
    shmc_owner *dead = take_dead(h);
    int damage = unlock_and_wake(h);
    bury(dead);
    leave(h);
    return damage ? damage : rc;
}

int breathe(shmc *h, uint32_t op)
{
    struct core *c = &h->core;
    if (__builtin_expect(c->bad, 0)) { unlock_and_wake(h); return SHMC_E_POISONED; }
    if (c->items < BATCH_ITEMS && c->words < BATCH_WORDS && c->frees < BATCH_FREES) return SHMC_OK;
    bool awaited = lock_awaited(c->hdr);
    uint64_t seen = PEEK(&c->hdr->acquisitions);
    int rc = unlock_and_wake(h);
    if (!rc && awaited) {                /* whom we just woke needs some microseconds to get here: let it win */
        uint64_t end = os_now_ns() + YIELD_NS;
        while (__atomic_load_n(&c->hdr->acquisitions, __ATOMIC_RELAXED) == seen && os_now_ns() < end) sched_yield();
    }
    if (!rc) rc = lock_and_fence(h, op, h->lock_timeout_ns, true);
    return rc;
}

int give_up(shmc *h, int rc) { leave(h); return rc; }

/* ---- handles ----------------------------------------------------------------------------------- */

shmc *shmc_new(void *base, uint64_t size, uint64_t lock_timeout_ns)
{
    shmc_geometry g;
    if (shmc_validate(base, size, &g, NULL)) return NULL;
    shmc *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    core_bind(&h->core, base, size, &g);
    h->core.me = NIL;
    h->lock_timeout_ns = lock_timeout_ns;
    h->generation = os_generation();
    h->users = 1;
    h->slot = NIL;
    return h;
}

/* One user less. A handle with a call in flight is never freed: a leak beats a use after free. */
void shmc_free(shmc *h)
{
    if (!h || __atomic_sub_fetch(&h->users, 1, __ATOMIC_ACQ_REL)) return;
    if (h->generation == os_generation() && __atomic_load_n(&h->inflight, __ATOMIC_ACQUIRE)) return;
    free(h);
}

int shmc_can_lock(void) { return os_can_lock() ? SHMC_OK : SHMC_E_RAW_CLONE; }

int shmc_check(shmc *h)
{
    int rc = enter(h, true);
    if (!rc) leave(h);
    return rc;
}

int shmc_slot_of(shmc *h)
{
    uint32_t slot = PEEK(&h->slot);
    return slot == NIL ? -1 : (int)slot;
}

/* The generation goes with it: nobody takes it for a later owner's, and it is never put over one of those
 * (by a process that was wrongly reaped). So neither claiming nor reaping has to clear it. */
int shmc_note_pinning(shmc *h, uint32_t state, uint32_t regions)
{
    int rc = enter(h, true);
    if (rc) return rc;
    uint32_t slot = PEEK(&h->slot), gen = h->slot_gen;
    if (slot >= h->core.n_slots) { leave(h); return SHMC_E_STALE; }      /* given back by another thread meanwhile */
    uint64_t *word = &h->core.slots[slot].pinning, seen = PEEK(word);
    uint64_t note = (uint64_t)gen << 32 | (uint64_t)(state & 7) << 29 | (regions & 0x1fffffff);
    while ((int32_t)(gen - (uint32_t)(seen >> 32)) >= 0 && !__atomic_compare_exchange_n(word, &seen, note, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    leave(h);
    return SHMC_OK;
}

int shmc_attach(shmc *h, int32_t rank, const char *label)
{
    int32_t pid;
    uint64_t start, stack;
    if (!os_can_lock()) return SHMC_E_RAW_CLONE;
    int rc = shmc_self(&pid, &start, &stack);
    if (rc) return rc;
    rc = begin_within(h, TX_ATTACH, h->lock_timeout_ns, false);
    if (rc) return rc;
    uint32_t gen = 0, slot = slot_claim(&h->core, pid, start, stack, (uint32_t)rank, label, &gen);
    rc = finish(h, slot == NIL ? SHMC_E_SLOTS : SHMC_OK);
    if (rc) return rc;
    h->slot_gen = gen;
    __atomic_store_n(&h->slot, slot, __ATOMIC_RELAXED);
    uint32_t fresh = HANDLE_NEW;
    return __atomic_compare_exchange_n(&h->state, &fresh, HANDLE_OPEN, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ? SHMC_OK : SHMC_E_CLOSED;
}

/* Whoever reaps next may finish it: the process lives, but its owner has left. Only ever forward: others may
 * have finished it by now, and the slot's next owner may have left a note of its own. One turn a leaver. */
static void note_leaving(struct slot *s, uint32_t gen)
{
    uint32_t seen = __atomic_load_n(&s->leaving, __ATOMIC_RELAXED);
    while ((int32_t)(gen - seen) > 0 && !__atomic_compare_exchange_n(&s->leaving, &seen, gen, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
}

int shmc_detach(shmc *h, uint64_t wait_ns, uint32_t *dropped)
{
    *dropped = 0;
    if (h->generation != os_generation()) return SHMC_OK;      /* the parent's attachment is not ours to end */
    /* closed at once, given back when the lock is to be had: after a timeout it may be called again */
    if (__atomic_exchange_n(&h->state, HANDLE_CLOSED, __ATOMIC_SEQ_CST) == HANDLE_NEW || h->slot == NIL) return SHMC_OK;
    struct timespec nap = {.tv_nsec = 200000};
    for (uint64_t end = os_now_ns() + wait_ns; __atomic_load_n(&h->inflight, __ATOMIC_SEQ_CST) && os_now_ns() < end;) nanosleep(&nap, NULL);
    shmc_reap_report report = {0};
    shmc_slot_info self;
    int rc = shmc_slot(h, h->slot, &self);
    if (rc) return rc;
    self.gen = h->slot_gen;
    bool more = true;
    while (more) {                                             /* batches: <= 64 holds each */
        rc = lock_and_fence(h, TX_REAP, h->lock_timeout_ns, false);
        if (rc) {
            note_leaving(&h->core.slots[h->slot], h->slot_gen);
            return rc;
        }
        h->core.me = h->slot;
        more = slot_condemn(&h->core, h->slot, &self, true) && slot_empty_step(&h->core, h->slot, h->slot_gen, &report);
        if (h->core.hdr->drain != NIL) drain_some(&h->core);
        rc = unlock_and_wake(h);
        if (rc) return rc;
    }
    __atomic_store_n(&h->slot, NIL, __ATOMIC_RELAXED);         /* a call that waited for the lock too long may still come */
    *dropped = report.holds + report.blocks;
    /* deferred owners hold nothing any more */
    bury(__atomic_exchange_n(&h->deferred, NULL, __ATOMIC_ACQUIRE));
    return SHMC_OK;
}

void shmc_drop(shmc *h)
{
    uint32_t dropped;
    if (h && h->generation == os_generation() && __atomic_load_n(&h->state, __ATOMIC_ACQUIRE) == HANDLE_OPEN) {
        h->lock_timeout_ns = 1000000;        /* else it leaves a note, and the next reap does it */
        shmc_detach(h, 0, &dropped);
    }
    shmc_free(h);
}

void shmc_last_holder(shmc *h, shmc_holder *out)
{
    const struct header *hdr = h->core.hdr;
    uint32_t slot = PEEK(&hdr->holder_slot);
    int32_t tid = lock_owner_tid(hdr);
    *out = (shmc_holder){.pid = tid, .op = PEEK(&hdr->holder_op)};
    if (slot < h->core.n_slots && tid) out->pid = PEEK(&h->core.slots[slot].pid);
    uint64_t since = __atomic_load_n(&h->stuck.since_ns, __ATOMIC_RELAXED);      /* threads may share the handle */
    if (since) out->age_ns = os_now_ns() - since;
}

const char *shmc_op_name(uint32_t op) { return tx_op_name(op); }

int shmc_slot(shmc *h, uint32_t slot, shmc_slot_info *out) { return shmc_peek_slot(h->core.base, h->core.size, slot, out); }

/* Liveness is judged here, outside the lock; inside, only the generation is compared. Quarantined
 * slots come first: their blocks are what waiters may be short of. */
static int reap_slot(shmc *h, uint32_t slot, bool quarantined, shmc_reap_report *report)
{
    shmc_slot_info s;
    int rc = shmc_slot(h, slot, &s);
    if (rc || s.state == SHMC_SLOT_FREE || slot == PEEK(&h->slot) || (s.state == SHMC_SLOT_QUARANTINE) != quarantined) return rc;
    bool already = s.state == SHMC_SLOT_REAPING || s.leaving == s.gen;
    int live = already ? SHMC_GONE : shmc_liveness(s.pid, s.start_time, s.start_stack);
    if (live == SHMC_ALIVE || (live == SHMC_EXECED && quarantined)) return SHMC_OK;
    if (live == SHMC_EXECED) report->quarantined++;
    bool more = true;
    while (more) {                                             /* batches: <= 64 holds each */
        rc = begin_within(h, TX_REAP, h->lock_timeout_ns, PEEK(&h->slot) != NIL);   /* also before attaching: the table may be full */
        if (rc) return rc;
        more = slot_condemn(&h->core, slot, &s, live == SHMC_GONE) && slot_empty_step(&h->core, slot, s.gen, report);
        h->core.wake |= 3;
        rc = finish(h, SHMC_OK);
        if (rc) return rc;
    }
    return SHMC_OK;
}

int shmc_reap(shmc *h, shmc_reap_report *report)
{
    *report = (shmc_reap_report){0};
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < h->core.n_slots; i++) {
            int rc = reap_slot(h, i, pass == 0, report);
            if (rc) return rc;
        }
    return SHMC_OK;
}

int shmc_step(shmc *h)
{
    int rc = begin(h, TX_DRAIN);
    if (rc) return rc;
    bool more = drain_some(&h->core) || __atomic_load_n(&h->deferred, __ATOMIC_RELAXED);
    return finish(h, more ? SHMC_MORE : SHMC_OK);
}

/* ---- owners ------------------------------------------------------------------------------------ */

shmc_owner *shmc_owner_new(shmc *h, uint32_t capacity)
{
    shmc_owner *o = malloc(sizeof *o + (size_t)capacity * sizeof *o->refs);
    if (!o) return NULL;
    *o = (shmc_owner){.h = h, .cap = capacity, .pins = true};
    __atomic_fetch_add(&h->users, 1, __ATOMIC_RELAXED);
    return o;
}

uint32_t shmc_owner_count(const shmc_owner *o) { return o->pins ? __atomic_load_n(&o->n, __ATOMIC_ACQUIRE) : 0; }

int owner_release_locked(shmc *h, shmc_owner *o)
{
    struct core *c = &h->core;
    if (!o->pins) { o->n = 0; o->pins = true; return SHMC_OK; }
    while (o->n) {
        if (c->bad) return SHMC_MORE;
        if (c->items >= BATCH_ITEMS || c->words >= BATCH_WORDS || c->frees >= BATCH_FREES) return SHMC_MORE;
        struct ref r = o->refs[o->n - 1];
        if (hold_mine(c, r)) let_go(c, r.hold, TX_RELEASE);    /* else its lease ended, or it was reaped */
        __atomic_store_n(&o->n, o->n - 1, __ATOMIC_RELEASE);
        c->items++;
    }
    return SHMC_OK;
}

/* A destructor: runs in any thread, also after close or in a forked child, and never waits long. */
void shmc_owner_free(shmc_owner *o)
{
    if (!o) return;
    shmc *h = o->h;
    if (o->n && o->pins) {
        int rc = begin_within(h, TX_RELEASE, 1000000, true);
        if (rc == SHMC_OK) {
            rc = owner_release_locked(h, o);
            finish(h, SHMC_OK);
        }
        if (rc == SHMC_E_LOCK_TIMEOUT || rc == SHMC_MORE) {
            __atomic_fetch_add(&h->users, 1, __ATOMIC_RELAXED);      /* others may destroy the owner once it is queued */
            push_deferred(h, o);
            /* the handle may have closed between: then nobody else will empty the queue */
            if (__atomic_load_n(&h->state, __ATOMIC_SEQ_CST) == HANDLE_CLOSED) bury(__atomic_exchange_n(&h->deferred, NULL, __ATOMIC_ACQUIRE));
            shmc_free(h);
            return;
        }
    }
    owner_destroy(o);
}

int shmc_release(shmc *h, shmc_owner **owners, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (!owners[i] || owners[i]->h != h) return SHMC_E_STALE;
    int rc = begin(h, TX_RELEASE);
    if (rc) return rc;
    for (uint32_t i = n; i-- > 0;) {
        while (owner_release_locked(h, owners[i]) == SHMC_MORE) {
            h->core.items = BATCH_ITEMS;
            rc = breathe(h, TX_RELEASE);
            if (rc) return give_up(h, rc);
        }
    }
    return finish(h, SHMC_OK);
}

bool owner_take(struct core *c, shmc_owner *o, enum hold_kind kind, uint32_t target, uint32_t deadline)
{
    struct ref r;
    return o->n < o->cap && take(c, kind, target, deadline, &r) && owner_put(o, r);
}

static bool part_alive(struct core *c, const shmc_part *part)
{
    if (part->block >= c->n_blocks) return false;
    const struct block *b = block_at(c, part->block);
    return b->gen == part->gen && b->holds != NIL && (b->state == B_WRITING || b->state == B_PUBLISHED);
}

int shmc_dup(shmc *h, const shmc_part *part, shmc_owner *to, int as_pin)
{
    if (!owner_ready(h, to, 1)) return SHMC_E_INVAL;
    int rc = begin(h, TX_HOLD);
    if (rc) return rc;
    struct core *c = &h->core;
    if (!part_alive(c, part)) return finish(h, SHMC_E_STALE);
    const struct block *b = block_at(c, part->block);
    bool writing = b->state == B_WRITING;
    if (writing && hold_at(c, b->holds)->slot != c->me) return finish(h, SHMC_E_STALE);
    enum hold_kind kind = writing ? (as_pin ? H_WRITE_PIN : H_WRITE) : as_pin ? H_BLOCK_PIN : H_REF;
    return finish(h, owner_take(c, to, kind, part->block, 0) ? SHMC_OK : SHMC_FULL);
}

int shmc_ref_count(shmc *h, const shmc_part *part, uint32_t *refs, uint32_t *pins)
{
    int rc = begin(h, TX_READ);
    if (rc) return rc;
    struct core *c = &h->core;
    *refs = *pins = 0;
    if (part->block >= c->n_blocks) return finish(h, SHMC_E_STALE);
    const struct block *b = block_at(c, part->block);
    if (b->gen != part->gen || (b->state != B_WRITING && b->state != B_PUBLISHED)) return finish(h, SHMC_E_STALE);
    bool cached = b->state == B_PUBLISHED && b->chunk != NIL && (chunk_at(c, b->chunk)->flags & C_LINKED);
    *refs = b->refs + cached;                            /* the cache's own counts one */
    uint32_t n = 0;
    for (uint32_t i = b->holds; i != NIL && n < 4096; i = hold_at(c, i)->tnext, n++)                /* <= 4096 */
        if (!hold_is_ref(hold_at(c, i)->kind)) ++*pins;
    if (b->chunk != NIL)
        for (uint32_t i = chunk_at(c, b->chunk)->holds; i != NIL && n < 8192; i = hold_at(c, i)->tnext, n++) ++*pins;   /* <= 4096 */
    return finish(h, SHMC_OK);
}

/* ---- namespaces -------------------------------------------------------------------------------- */

int shmc_namespace(shmc *h, const char *name, uint32_t name_len, uint32_t parts, const char *desc, uint32_t desc_len, int has_desc, uint32_t *ns)
{
    if (!name_len || name_len > SHMC_NAME_MAX || parts > SHMC_PARTS_MAX || desc_len > SHMC_DESC_MAX) return SHMC_E_INVAL;
    int rc = begin(h, TX_NAMESPACE);
    if (rc) return rc;
    return finish(h, namespace_open(&h->core, name, name_len, parts, desc, desc_len, has_desc != 0, ns));
}

/* No lock, so it works beside a stopped holder, as events do. */
int shmc_namespace_at(shmc *h, uint32_t ns, shmc_namespace_info *out)
{
    int rc = shmc_check(h);
    return rc ? rc : shmc_peek_namespace(h->core.base, h->core.size, ns, out);
}

int shmc_bump(shmc *h, uint32_t ns, uint32_t *generation)
{
    if (ns >= h->core.n_namespaces) return SHMC_E_INVAL;
    int rc = begin(h, TX_BUMP);
    if (rc) return rc;
    if (!namespace_ok(&h->core, ns)) return finish(h, SHMC_E_INVAL);
    *generation = namespace_bump(&h->core, ns);
    return finish(h, SHMC_OK);
}

/* ---- looking inside ---------------------------------------------------------------------------- */

int shmc_verify(shmc *h, char *text, uint32_t cap)
{
    void *scratch = malloc(check_scratch(&h->core));
    if (!scratch) return SHMC_E_OS;
    memset(scratch, 1, check_scratch(&h->core));       /* resident before the lock */
    int rc = begin(h, TX_VERIFY);
    if (!rc) {
        struct core copy = h->core;                    /* what the walk meets must not poison by itself */
        rc = (int)check_all(&copy, scratch, text, cap);
        PUT(&h->core.hdr->hold_since, 0u);             /* unlogged: this hold is long by design, do not sample it */
        rc = finish(h, rc);
    }
    free(scratch);
    return rc;
}

int shmc_verify_copy(void *copy, uint64_t size, char *text, uint32_t cap)
{
    struct core c;
    shmc_geometry g;
    int rc = shmc_validate(copy, size, &g, NULL);
    if (rc) return rc;
    core_bind(&c, copy, size, &g);
    if (c.hdr->journal.count) tx_rollback(&c);         /* its owner died inside: this is what recovery does */
    void *scratch = malloc(check_scratch(&c));
    if (!scratch) return SHMC_E_OS;
    rc = (int)check_all(&c, scratch, text, cap);
    free(scratch);
    return rc;
}

int shmc_scan_keys(shmc *h, uint32_t *cursor, uint32_t ns, shmc_key_record *out, uint32_t cap, uint32_t *n)
{
    struct core *c = &h->core;
    *n = 0;
    int rc = begin(h, TX_READ);
    if (rc) return rc;
    uint32_t looked = 0;
    while (*cursor < c->n_chunks && *n < cap) {
        const struct chunk *k = &c->chunks[*cursor];
        if ((k->flags & C_LINKED) && (ns == NIL || k->ns == ns) && k->ns < c->n_namespaces && k->ns_gen == c->namespaces[k->ns].gen) {
            shmc_key_record *o = &out[(*n)++];
            *o = (shmc_key_record){.stamp = k->stamp, .chunk = *cursor, .gen = k->gen, .next = k->pnext, .ns = k->ns, .published = k->published,
                .held = k->held, .klen = k->klen, .ktype = k->ktype, .flags = k->flags};
            memcpy(o->key, k->key, sizeof o->key);
            c->items++;
        }
        ++*cursor;
        if (++looked % 16 == 0) c->items++;
        rc = breathe(h, TX_READ);
        if (rc) return give_up(h, rc);
    }
    return finish(h, *cursor < c->n_chunks ? SHMC_MORE : SHMC_OK);
}

/* ---- for tests and the benchmark ---------------------------------------------------------------- */

int shmc_debug_hold_lock(shmc *h, uint64_t ns, int in_transaction)
{
    int rc = begin(h, TX_READ);
    if (rc) return rc;
    struct core *c = &h->core;
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    if (in_transaction) {
        tx_begin(c, TX_READ);
        tx64(c, &c->hdr->clock, ~0ull);
        tx32(c, &c->hdr->free_chunk, 7);
        tx32(c, &c->hdr->used_grans, 1);
    }
    nanosleep(&t, NULL);
    if (in_transaction) tx_rollback(c);
    return finish(h, SHMC_OK);
}
