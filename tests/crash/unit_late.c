/* unit_late.c -- who comes late, or saw only half: a call that outlives its close, a record read while it
 * changed hands, an owner that two threads were given. */
#include <unistd.h>
#include "unit.h"

/* close() waits for calls in flight, but not for ever: one may still wait for the lock, or be between two batches,
 * when the slot is given back. It must learn that it is too late, and the segment must not suffer. */
static void a_call_that_outlives_its_close_poisons_nothing(void)
{
    uint32_t dropped;
    uint8_t out[1];
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    store(W.one, 4, 1, 0);
    shmc *first = W.h, *other = world_join("late");
    same(shmc_detach(other, 0, &dropped), SHMC_OK);
    __atomic_store_n(&other->state, HANDLE_OPEN, __ATOMIC_SEQ_CST);      /* it came in before */
    same(shmc_contains(other, W.one, key(1), -1, out), SHMC_E_STALE);
    same(shmc_step(other), SHMC_E_STALE);
    __atomic_store_n(&other->state, HANDLE_CLOSED, __ATOMIC_SEQ_CST);
    W.h = first;
    same(stats().state, SHMC_S_READY);
    same(has(W.one, 1, -1), 1);
    shmc_free(other);
    world_close();
}

/* Slots are read without the lock. Its first words may be those of an owner that was being reaped, the rest that of
 * the next one, who lives: the state that was read proves nothing then. */
static void half_a_record_condemns_nobody(void)
{
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    struct core *c = &W.h->core;
    shmc_slot_info judged;
    uint32_t slot = (uint32_t)shmc_slot_of(W.h);
    same(shmc_slot(W.h, slot, &judged), SHMC_OK);
    judged.state = SHMC_SLOT_REAPING;
    same(begin(W.h, TX_REAP), SHMC_OK);
    same(slot_condemn(c, slot, &judged, true), false);
    same(finish(W.h, SHMC_OK), SHMC_OK);
    same(c->slots[slot].state, SHMC_SLOT_LIVE);
    store(W.one, 4, 1, 0);
    world_close();
}

static void an_owner_given_twice_keeps_nothing_from_others(void)
{
    uint32_t ticket = 7;
    shmc_part p[3];
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    struct obj a = obj_new(), b = obj_new();
    shmc_owner *o[3] = {a.o, b.o, a.o};
    same(shmc_alloc(W.h, W.one, GRAN, NULL, 0, 3, 0, o, p, &ticket), SHMC_E_INVAL);
    same(shmc_owner_count(a.o) + shmc_owner_count(b.o), 0);
    same(stats().used, 0);
    same(stats().holds, 0);
    same(ticket, 7);
    drop(&a);
    drop(&b);
    world_close();
}

/* Memory is found in one hold of the lock, the reservation made in the next: a bump may come between. */
static void a_reservation_is_of_the_generation_it_was_made_in(void)
{
    uint32_t gen;
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    struct obj x = alloc(W.one, 4, 1, 0);
    same(shmc_bump(W.h, W.one, &gen), SHMC_OK);
    const struct key k = key_at(&W.h->core, W.one, key(1), 0);
    same(begin(W.h, TX_RESERVE), SHMC_OK);
    same(reserve_part(&W.h->core, W.one, &k, x.p.block, 0), SHMC_OK);
    same(finish(W.h, SHMC_OK), SHMC_OK);
    same(try_put(&x, W.one, 1, 0), 1);
    same(has(W.one, 1, -1), 1);
    drop(&x);
    world_close();
}

/* Python looks first as well; but an object may be released by another thread after that. */
static void a_batch_is_looked_at_before_any_of_it_is_put(void)
{
    uint8_t stored[3];
    world_of(64 * GRAN, 64 * GRAN, 32, SHMC_LRU);
    struct obj a = alloc(W.one, 4, 1, 0), b = alloc(W.one, 4, 2, 0), c = alloc(W.one, 4, 3, 0);
    shmc_owner *o[3] = {a.o, b.o, c.o};
    same(shmc_release(W.h, &b.o, 1), SHMC_OK);
    same(shmc_put(W.h, W.one, keys(1, 3), o, 0, NULL, stored), SHMC_E_STALE);
    for (uint64_t k = 1; k <= 3; k++) same(has(W.one, k, -1), 0);
    same(stats().chunks, 0);
    drop(&a);
    drop(&b);
    drop(&c);
    world_close();
}

const struct unit UNIT_LATE[] = {
    {"a call that outlives its close poisons nothing", a_call_that_outlives_its_close_poisons_nothing},
    {"half a record of the attachment table condemns nobody", half_a_record_condemns_nobody},
    {"an owner given twice keeps nothing from others", an_owner_given_twice_keeps_nothing_from_others},
    {"a reservation is of the generation it was made in", a_reservation_is_of_the_generation_it_was_made_in},
    {"a batch is looked at before any of it is put", a_batch_is_looked_at_before_any_of_it_is_put},
    {NULL, NULL},
};
