/* worlds.c -- see worlds.h. */
#include <sys/wait.h>
#include <unistd.h>
#include "worlds.h"

struct obj X[32];
shmc_owner *L;

void w_empty(uint32_t policy) { world_open(policy); }

/* A speck at the start: 12 of 32 granules fit once it is gone, but not around what was placed beside it. */
void w_speck(uint32_t policy)
{
    world_open(policy);
    store(W.one, 1, 1, 0);
}

void w_few(uint32_t policy)
{
    world_open(policy);
    for (uint64_t k = 1; k <= 3; k++) store(W.one, SOME, k, 0);
    store(W.two, SOME, 10, 0);
    store(W.two, SOME, 10, 1);
    store(W.two, SOME, 11, 0);
}

void w_hole(uint32_t policy)
{
    w_few(policy);
    same(del(W.one, 2), 1);
    drain_all();
}

void w_full(uint32_t policy)
{
    world_open(policy);
    for (uint64_t k = 1; k <= FULL_KEYS; k++) store(W.one, BIG, k, 0);
    for (uint64_t k = 5; k <= FULL_KEYS; k++) touch(W.one, k);
    touch(W.one, 7);
    touch(W.one, 2);
}

void w_full_held(uint32_t policy)
{
    w_full(policy);
    uint64_t k[3];
    must(victims(k, 3) == 3);
    for (int i = 0; i < 3; i++) X[i] = get(W.one, k[i], 0);
}

void w_parked(uint32_t policy)
{
    w_full_held(policy);
    struct obj x = alloc(W.one, BIG, 99, 0);       /* meets the held ones, parks them, evicts another */
    drop(&x);
    must(((struct header *)W.base)->n_parked == 3);
}

void w_chunks_full(uint32_t policy)
{
    world_open(policy);
    for (uint64_t k = 1; k <= 32; k++) store(W.one, 1, k, 0);
}

void w_chunks_full_held(uint32_t policy)
{
    world_open(policy);
    for (uint64_t k = 1; k <= 31; k++) store(W.one, 1, k, 0);
    store(W.two, 1, 50, 0);
    for (uint64_t k = 1; k <= 4; k++) must(pin(W.one, k, 0));
}

void w_draining(uint32_t policy)
{
    world_open(policy);
    for (int i = 0; i < 2; i++) X[i] = alloc(W.one, 128, 0, 0);
    for (uint32_t part = 0; part < WIDE_PARTS; part++) store(W.wide, 1 + part % 3, 70, part);
    store(W.one, SOME, 1, 0);
    same(del(W.wide, 70), 1);
    must(((struct header *)W.base)->drain != NIL);
}

void w_outdated(uint32_t policy)
{
    uint32_t generation;
    world_open(policy);
    for (int i = 1; i < 3; i++) X[i] = alloc(W.one, 128, 0, 0);
    for (uint64_t k = 1; k <= 20; k++) store(W.one, 6, k, 0);
    X[0] = get(W.one, 19, 0);
    same(shmc_bump(W.h, W.one, &generation), SHMC_OK);
    must(((struct header *)W.base)->stale > 8);
}

static void leases_are_over(void)
{
    struct core c;
    core_bind(&c, W.base, W.size, &W.geo);
    for (uint32_t i = 0; i < c.n_holds; i++)
        if (c.holds[i].kind != H_FREE && c.holds[i].deadline) c.holds[i].deadline = 1;
    c.hdr->lease_min = 1;
}

void w_leased(uint32_t policy)
{
    w_full(policy);
    for (uint64_t k = 1; k <= FULL_KEYS; k++) must(pin(W.one, k, k <= 4 ? 5 * SECOND : 0));
    leases_are_over();
}

void w_reserved(uint32_t policy)
{
    w_few(policy);
    same(reserve(&X[0], W.one, SOME, 30, 0), SHMC_OK);
    same(reserve(&X[1], W.two, SOME, 11, 1), SHMC_OK);
    same(reserve(&X[2], W.two, SOME, 31, 0), SHMC_OK);
}

void w_two_regions(uint32_t policy)
{
    shmc_geometry g = plan(3 * 128 * GRAN, 128 * GRAN, 32, policy);
    world_make(&g, 1);
    world_join("survivor");
    commit_regions(2);
    open_namespaces();
    for (uint64_t k = 1; k <= 16; k++) store(W.one, BIG, k, 0);
}

void own_much(void)
{
    uint32_t n;
    for (int i = 0; i < 3; i++) X[i] = get(W.one, 1 + (uint64_t)i, 0);
    X[3] = get(W.two, 10, 0);
    X[4] = alloc(W.one, SOME, 40, 0);
    X[5] = alloc(W.one, 2 * SOME, 41, 0);
    same(reserve(&X[6], W.one, SOME, 42, 0), SHMC_OK);
    same(reserve(&X[7], W.two, SOME, 11, 1), SHMC_OK);
    must(pin(W.one, 1, 0) && pin(W.two, 10, 5 * SECOND));
    L = lookup(W.one, 1, 3, SHMC_F_PIN, &n);
    X[8] = obj_new();
    same(shmc_dup(W.h, &X[0].p, X[8].o, 1), SHMC_OK);
    X[9] = obj_new();
    same(shmc_dup(W.h, &X[4].p, X[9].o, 1), SHMC_OK);
    must(del(W.one, 3));                           /* held: lives on, out of the index */
}

void w_dead(uint32_t policy)
{
    w_few(policy);
    pid_t pid = fork();
    must(pid >= 0);
    if (pid == 0) {
        world_join("dead");
        own_much();
        _exit(0);
    }
    int status;
    must(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status));
}

void w_execed(uint32_t policy)
{
    w_few(policy);
    shmc *h = W.h;
    shmc *other = world_join("exec");
    own_much();
    struct core c;
    core_bind(&c, W.base, W.size, &W.geo);
    c.slots[shmc_slot_of(other)].start_stack += 4096;
    W.h = h;
}

void w_dead_committer(uint32_t policy)
{
    w_two_regions(policy);
    pid_t pid = fork();
    must(pid >= 0);
    if (pid == 0) {
        uint32_t region;
        world_join("committer");
        same(shmc_region_claim(W.h, &region), SHMC_OK);
        _exit(0);
    }
    int status;
    must(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status));
}
