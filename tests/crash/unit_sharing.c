/* unit_sharing.c -- attachments, the lock, regions, events: what processes share beside chunks. */
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "unit.h"

/* ---- attachments ------------------------------------------------------------------------------ */

static void the_attachment_table_can_be_full(void)
{
    shmc *h[8], *one_more;
    uint32_t dropped;
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    h[0] = W.h;
    for (int i = 1; i < 8; i++) h[i] = world_join("many");
    one_more = shmc_new(W.base, W.size, SECOND);
    same(shmc_attach(one_more, 0, NULL), SHMC_E_SLOTS);
    same(shmc_step(one_more), SHMC_E_CLOSED);            /* not attached: no call works */
    same(shmc_detach(h[3], 0, &dropped), SHMC_OK);
    same(shmc_attach(one_more, 5, "a label that is longer than thirty-two bytes"), SHMC_OK);
    same(shmc_slot_of(one_more), 3);
    same(shmc_attach(one_more, 5, NULL), SHMC_E_CLOSED); /* once only */
    shmc_slot_info s;
    same(shmc_slot(h[0], 3, &s), SHMC_OK);
    same(s.rank, 5);
    same(s.pid, getpid());
    same(strlen(s.label), SHMC_LABEL_MAX - 1);
    same(shmc_slot(h[0], 8, &s), SHMC_E_NOT_FOUND);
    for (int i = 1; i < 8; i++) { same(shmc_detach(h[i], 0, &dropped), SHMC_OK); shmc_free(h[i]); }
    same(shmc_detach(one_more, 0, &dropped), SHMC_OK);
    shmc_free(one_more);
    W.h = h[0];
    same(stats().attachments, 1);
    world_close();
}

static struct slot *slot_of(const shmc *h)
{
    struct core c;
    core_bind(&c, W.base, W.size, &W.geo);
    return &c.slots[shmc_slot_of((shmc *)(uintptr_t)h)];
}

static void a_living_attachment_is_not_reaped(void)
{
    shmc_reap_report r;
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    shmc *first = W.h, *other = world_join("other");
    struct obj x = alloc(W.one, 4, 1, 0);
    same(shmc_reap(first, &r), SHMC_OK);
    same(r.slots + r.holds + r.blocks + r.quarantined, 0);
    drop(&x);
    shmc_free(other);
    W.h = first;
    shmc_free(first);
    world_drop();
}

/* A process that exec'ed loses its holds; what it may still be writing to stays until it has exited. */
static void quarantine_keeps_what_may_still_be_written(void)
{
    shmc_reap_report r;
    world_of(128 * GRAN, 128 * GRAN, 32, SHMC_LRU);
    shmc *first = W.h, *other;
    store(W.one, 4, 1, 0);
    other = world_join("exec");
    struct obj a = get(W.one, 1, 0), b = alloc(W.one, 4, 2, 0), c = {0}, d = alloc(W.one, 4, 4, 0), e = obj_new();
    same(reserve(&c, W.one, 4, 3, 0), SHMC_OK);
    same(shmc_dup(W.h, &d.p, e.o, 1), SHMC_OK);          /* a pin alone must keep unpublished bytes as well */
    drop(&d);
    slot_of(other)->start_stack += 4096;
    W.h = first;
    same(shmc_reap(first, &r), SHMC_OK);
    same(r.quarantined, 1);
    same(r.slots, 0);
    same(r.blocks, 0);
    same(stats().used, 16 * GRAN);
    struct obj o = obj_new();
    uint32_t refs, pins;
    same(shmc_ref_count(first, &a.p, &refs, &pins), SHMC_OK);
    same(refs, 1);                                       /* its reference went, the cache's own is left */
    same(shmc_get(first, W.one, key(3), 0, &o.o, &o.p), SHMC_PENDING);   /* its reservation stands */
    same(shmc_step(other), SHMC_E_STALE);                /* the fence */
    same(shmc_reap(first, &r), SHMC_OK);
    same(r.holds + r.blocks + r.slots, 0);
    same(sound("quarantine"), 0);
    slot_of(other)->start_time--;                        /* another process by now: its exit is proven */
    same(shmc_reap(first, &r), SHMC_OK);
    same(r.slots, 1);
    same(r.blocks, 3);
    same(stats().used, 4 * GRAN);
    drop(&b); drop(&c); drop(&o); drop(&e); drop(&a);
    shmc_free(other);
    world_close();
}

static void one_reaped_wrongly_is_fenced_off(void)
{
    shmc_reap_report r;
    uint32_t dropped;
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    shmc *first = W.h, *other = world_join("other");
    struct obj x = alloc(W.one, 4, 1, 0);
    slot_of(other)->start_time--;
    same(shmc_reap(first, &r), SHMC_OK);
    same(r.slots, 1);
    W.h = other;
    same(try_put(&x, W.one, 1, 0), SHMC_E_STALE);
    same(shmc_step(other), SHMC_E_STALE);
    drop(&x);
    same(shmc_detach(other, 0, &dropped), SHMC_OK);
    shmc_free(other);
    W.h = first;
    same(stats().used, 0);
    world_close();
}

/* ---- fork ------------------------------------------------------------------------------------- */

static void a_forked_child_uses_nothing_it_inherited(void)
{
    shmc_geometry g = plan(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    world_make(&g, 1);
    world_join("parent");
    commit_regions(1);
    open_namespaces();
    struct obj x = put(W.one, 4, 1, 0);
    pid_t pid = fork();
    if (pid == 0) {
        uint32_t dropped;
        shmc *inherited = W.h;
        same(shmc_step(inherited), SHMC_E_FORKED);
        same(shmc_check(inherited), SHMC_E_FORKED);
        same(shmc_detach(inherited, 0, &dropped), SHMC_OK);
        drop(&x);                                        /* releases nothing */
        shmc_free(inherited);
        world_join("child");
        struct obj y = get(W.one, 1, 0);
        same(stats().holds, 2);
        drop(&y);
        same(shmc_detach(W.h, 0, &dropped), SHMC_OK);
        _exit(0);
    }
    int status;
    must(waitpid(pid, &status, 0) == pid && status == 0);
    same(stats().holds, 1);
    drop(&x);
    world_close();
}

/* ---- the lock --------------------------------------------------------------------------------- */

static int held[2], go_on[2];

/* Takes the lock, changes something, and waits to be let go; then unlocks, or ends its thread inside. */
static void *holder(void *ends_inside)
{
    shmc *h = shmc_new(W.base, W.size, SECOND);
    char c;
    must(h && !shmc_attach(h, 0, "holder"));
    must(!begin(h, TX_READ));
    tx_begin(&h->core, TX_READ);
    tx64(&h->core, &h->core.hdr->clock, ~0ull);
    tx32(&h->core, &h->core.hdr->free_chunk, 7);
    must(write(held[1], "x", 1) == 1 && read(go_on[0], &c, 1) == 1);
    if (ends_inside) return h;                           /* a thread's end is a death too */
    tx_rollback(&h->core);
    must(!finish(h, SHMC_OK));
    return h;
}

static pthread_t hold(bool ends_inside)
{
    pthread_t t;
    char c;
    must(!pipe(held) && !pipe(go_on));
    must(!pthread_create(&t, NULL, holder, ends_inside ? &t : NULL));
    must(read(held[0], &c, 1) == 1);
    return t;
}

static void let_it_go(pthread_t t)
{
    uint32_t dropped;
    void *h;
    must(write(go_on[1], "x", 1) == 1 && !pthread_join(t, &h));
    same(shmc_detach(h, 0, &dropped), SHMC_OK);
    shmc_free(h);
    for (int i = 0; i < 2; i++) { close(held[i]); close(go_on[i]); }
}

static void waiting_for_the_lock_ends(void)
{
    shmc_holder who;
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    struct obj x = alloc(W.one, 4, 1, 0), y = alloc(W.one, 4, 2, 0);
    W.h->lock_timeout_ns = 20000000;
    pthread_t t = hold(false);
    uint64_t t0 = os_now_ns();
    same(shmc_step(W.h), SHMC_E_LOCK_TIMEOUT);
    uint64_t t1 = os_now_ns();
    must(t1 - t0 >= 20000000);
    same(shmc_step(W.h), SHMC_E_LOCK_TIMEOUT);           /* fails fast while the lock has not moved */
    must(os_now_ns() - t1 < 20000000);
    shmc_last_holder(W.h, &who);
    same(who.pid, getpid());
    must(!strcmp(shmc_op_name(who.op), "read") && who.age_ns);
    drop(&x);                                            /* a destructor waits 1 ms, then leaves it to the next call */
    drop(&y);
    same(((struct header *)W.base)->holds, 2);
    shmc_stats s;
    same(shmc_stats_read(W.base, W.size, &s), SHMC_OK);
    same(s.exact, 0);                                    /* a transaction is open */
    let_it_go(t);
    same(shmc_step(W.h), SHMC_OK);
    same(stats().holds, 0);
    same(stats().used, 0);
    world_close();
}

static void closing_beside_a_stuck_lock_leaves_it_to_the_next_reap(void)
{
    shmc_reap_report r;
    uint32_t dropped;
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    shmc *first = W.h, *other = world_join("leaver");
    struct obj x = alloc(W.one, 4, 1, 0);
    other->lock_timeout_ns = 2000000;
    pthread_t t = hold(false);
    same(shmc_detach(other, 0, &dropped), SHMC_E_LOCK_TIMEOUT);
    same(shmc_step(other), SHMC_E_CLOSED);
    let_it_go(t);
    W.h = first;
    same(shmc_reap(first, &r), SHMC_OK);
    same(r.slots, 1);
    same(r.blocks, 1);
    same(stats().used, 0);
    same(shmc_detach(other, 0, &dropped), SHMC_OK);      /* again: nothing is left to give back */
    drop(&x);
    shmc_free(other);
    world_close();
}

static void a_thread_that_ends_inside_is_rolled_back_not_reaped(void)
{
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    uint64_t before = stats().clock;
    shmc *first = W.h;
    pthread_t t = hold(true);
    char c;
    void *h;
    must(write(go_on[1], "x", 1) == 1 && !pthread_join(t, &h));
    (void)c;
    same(((struct header *)W.base)->clock, ~0ull);
    same(sound("after the thread"), 0);
    same(stats().clock, before);
    same(stats().recoveries, 1);
    same(stats().attachments, 2);
    shmc_reap_report r;
    same(shmc_reap(first, &r), SHMC_OK);
    same(r.slots, 0);                                    /* its process lives */
    uint32_t dropped;
    h = (shmc *)h;
    __atomic_fetch_sub(&((shmc *)h)->inflight, 1, __ATOMIC_RELAXED);     /* the call it died in */
    same(shmc_detach(h, 0, &dropped), SHMC_OK);
    shmc_free(h);
    for (int i = 0; i < 2; i++) { close(held[i]); close(go_on[i]); }
    world_close();
}

static void *waiter(void *which)
{
    struct obj x = {0}, y = {0};
    uint32_t ticket = 0;
    char c = 'x';
    shmc *h = shmc_new(W.base, W.size, SECOND);
    must(h && !shmc_attach(h, 0, "waiter"));
    int rc, memory = *(int *)which == 0;
    x.o = shmc_owner_new(h, 1);
    y.o = shmc_owner_new(h, 1);
    if (memory) rc = shmc_alloc(h, W.one, 8 * GRAN, NULL, 0, 1, SHMC_F_NO_EVICT, &x.o, &x.p, &ticket);
    else rc = shmc_reserve(h, W.one, key(5), 0, GRAN, NULL, 0, 0, x.o, &x.p, &ticket);
    same(rc, memory ? SHMC_FULL : SHMC_PENDING);
    must(write(held[1], &c, 1) == 1);
    same(shmc_wait(h, memory ? 0 : 1, ticket, 20 * SECOND), SHMC_OK);
    uint32_t dropped;
    shmc_owner_free(x.o);
    shmc_owner_free(y.o);
    same(shmc_detach(h, 0, &dropped), SHMC_OK);
    shmc_free(h);
    return NULL;
}

/* Without a wake-up each would sleep for its 20 s. */
static void waiters_are_woken(void)
{
    static int which[3] = {0, 1, 1};
    for (int i = 0; i < 3; i++) {
        pthread_t t;
        char c;
        struct obj x = {0};
        world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
        if (i == 0) x = alloc(W.one, 64, 0, 0);
        else same(reserve(&x, W.one, 4, 5, 0), SHMC_OK);
        uint64_t began = os_now_ns();
        must(!pipe(held) && !pthread_create(&t, NULL, waiter, &which[i]) && read(held[0], &c, 1) == 1);
        if (i == 2) same(try_put(&x, W.one, 5, 0), 1);   /* published */
        drop(&x);                                        /* freed, or the reservation given up */
        must(!pthread_join(t, NULL));
        must(os_now_ns() - began < 15 * SECOND);
        close(held[0]);
        close(held[1]);
        world_close();
    }
}

/* ---- regions ---------------------------------------------------------------------------------- */

static void regions_are_committed_once_each(void)
{
    uint32_t r, n;
    shmc_region_info info;
    shmc_geometry g = plan(3 * 64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    world_make(&g, 0);
    shmc *first = world_join("first");
    open_namespaces();
    struct obj x = {0};
    same(try_alloc(&x, W.one, 4, 0, 0, 0), SHMC_GROW);
    same(try_alloc(&x, W.one, 4, 0, 0, SHMC_F_NO_GROW), SHMC_FULL);
    same(shmc_region_claim(first, &r), SHMC_OK);
    same(r, 0);
    shmc *other = world_join("other");
    same(shmc_region_done(other, 0, 1, 0, 0), SHMC_E_STALE);             /* not its own */
    for (uint32_t i = 1; i < 3; i++) { same(shmc_region_claim(other, &r), SHMC_OK); same(r, i); }
    same(shmc_region_claim(other, &r), SHMC_PENDING);
    same(shmc_region_done(first, 0, 1, 3, 1), SHMC_OK);
    same(shmc_region_done(first, 0, 1, 3, 1), SHMC_E_STALE);             /* once */
    same(shmc_region_done(first, 9, 1, 3, 1), SHMC_E_NOT_FOUND);
    same(shmc_region(first, 0, &info), SHMC_OK);
    same(info.state, SHMC_R_READY);
    same(info.flags, 3);
    same(info.bytes, 64 * GRAN);
    W.h = first;
    same(try_alloc(&x, W.one, 4, 0, 0, 0), SHMC_OK);
    same(shmc_region_done(other, 1, 0, 0, 0), SHMC_OK);                  /* failed: anybody's again */
    same(shmc_region_claim(first, &r), SHMC_OK);
    same(r, 1);
    same(shmc_region_done(first, 1, 1, 0, 0), SHMC_OK);
    same(shmc_detach(other, 0, &n), SHMC_OK);                            /* region 2 was being committed by it */
    same(shmc_region_claim(first, &r), SHMC_OK);
    same(r, 2);
    same(shmc_region_done(first, 2, 1, 0, 0), SHMC_OK);
    same(shmc_region_claim(first, &r), SHMC_E_NOT_FOUND);
    same(stats().ready, 3 * 64 * GRAN);
    drop(&x);
    shmc_free(other);
    world_close();
}

/* ---- events ----------------------------------------------------------------------------------- */

static void events_tell_all_in_order_or_of_a_gap(void)
{
    static shmc_event e[2048];
    uint32_t n;
    uint64_t next, lost;
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    uint64_t window = W.geo.n_events - EVENT_SLACK;
    store(W.one, 16, 1, 0);
    store(W.two, 8, 2, 1);                               /* not complete: no admission */
    store(W.two, 8, 2, 0);
    same(del(W.one, 1), 1);
    same(shmc_events_read(W.base, W.size, 0, e, 2048, &n, &next, &lost), SHMC_OK);
    same(n, 3);
    same(next, 3);
    same(lost, 0);
    same(e[0].kind, SHMC_EV_ADMIT); same(e[0].cause, SHMC_BY_PUT); same(e[0].bytes, 16 * GRAN); same(e[0].pid, getpid()); same(e[0].klen, 8);
    same(e[1].kind, SHMC_EV_ADMIT); same(e[1].ns, W.two); same(e[1].complete, 1);
    same(e[2].kind, SHMC_EV_REMOVE); same(e[2].cause, SHMC_BY_REMOVE); same(e[2].complete, 1);
    for (uint32_t i = 0; i < 3; i++) same(e[i].seq, i);
    for (uint64_t k = 0; k < 1500; k++) { store(W.one, 1, 100, 0); same(del(W.one, 100), 1); }   /* around the ring, twice and more */
    same(shmc_events_read(W.base, W.size, 3, e, 2048, &n, &next, &lost), SHMC_OK);
    same(lost + n, 3000);
    same(n, window);
    same(next, 3003);
    for (uint32_t i = 0; i < n; i++) same(e[i].seq, 3 + lost + i);
    same(shmc_events_read(W.base, W.size, next - 10, e, 4, &n, &next, &lost), SHMC_OK);
    same(n, 4);
    same(next, 3003 - 6);
    same(shmc_events_read(W.base, W.size, 1ull << 60, e, 4, &n, &next, &lost), SHMC_OK);   /* a cursor of another generation */
    same(n, 0);
    same(next, 3003);
    world_close();
}

static void every_cause_is_named(void)
{
    static shmc_event e[64];
    uint32_t n, generation, cursor = 0, seen[8] = {0};
    uint64_t next, lost, removed = 0;
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    store(W.one, 32, 1, 0);
    store(W.one, 32, 2, 0);
    store(W.one, 32, 3, 0);                              /* evicts 1 */
    same(del(W.one, 2), 1);
    same(shmc_clear(W.h, W.one, &cursor, &removed), SHMC_OK);
    store(W.one, 32, 4, 0);
    same(shmc_bump(W.h, W.one, &generation), SHMC_OK);
    drain_all();
    same(shmc_events_read(W.base, W.size, 0, e, 64, &n, &next, &lost), SHMC_OK);
    for (uint32_t i = 0; i < n; i++) seen[e[i].cause]++;
    same(seen[SHMC_BY_PUT], 4);
    same(seen[SHMC_BY_EVICT] == 1 && seen[SHMC_BY_REMOVE] == 1 && seen[SHMC_BY_CLEAR] == 1 && seen[SHMC_BY_BUMP] == 1, 1);
    world_close();
}

const struct unit UNIT_SHARING[] = {
    {"the attachment table can be full", the_attachment_table_can_be_full},
    {"a living attachment is not reaped", a_living_attachment_is_not_reaped},
    {"quarantine keeps what may still be written", quarantine_keeps_what_may_still_be_written},
    {"one reaped wrongly is fenced off", one_reaped_wrongly_is_fenced_off},
    {"a forked child uses nothing that it inherited", a_forked_child_uses_nothing_it_inherited},
    {"waiting for the lock ends, destructors defer", waiting_for_the_lock_ends},
    {"closing beside a stuck lock leaves it to the next reap", closing_beside_a_stuck_lock_leaves_it_to_the_next_reap},
    {"a thread that ends inside is rolled back, not reaped", a_thread_that_ends_inside_is_rolled_back_not_reaped},
    {"waiters for memory and for a publication are woken", waiters_are_woken},
    {"regions are committed once each", regions_are_committed_once_each},
    {"events tell all in order, or of a gap", events_tell_all_in_order_or_of_a_gap},
    {"every cause of a removal is named", every_cause_is_named},
    {NULL, NULL},
};
