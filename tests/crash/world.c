/* world.c -- see world.h. */
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "world.h"

struct world W;
bool lenient;

void die(const char *file, int line, const char *what, long long value)
{
    const char *name = strrchr(file, '/');
    if (lenient) _exit(3);
    fprintf(stderr, "%s:%d: %s does not hold (%lld)\n", name ? name + 1 : file, line, what, value);
    fflush(NULL);
    _exit(2);
}

uint64_t rnd(uint64_t *s)
{
    uint64_t z = (*s += 0x9e3779b97f4a7c15u);      /* a counter through a mixer */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* ---- making ---------------------------------------------------------------------------------- */

shmc_geometry plan(uint64_t capacity, uint64_t region_bytes, uint32_t max_chunks, uint32_t policy)
{
    shmc_geometry g = {.capacity = capacity, .region_bytes = region_bytes, .align = GRAN, .policy = policy,
                       .max_chunks = max_chunks, .max_attachments = 8};
    same(shmc_plan(&g), SHMC_OK);
    return g;
}

void world_make(const shmc_geometry *g, int shared)
{
    const uint64_t seed[2] = {0x1234, 0x5678};
    W = (struct world){.geo = *g, .size = g->control_bytes};
    W.base = mmap(NULL, W.size, PROT_READ | PROT_WRITE, (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS, -1, 0);
    must(W.base != MAP_FAILED);
    same(shmc_format(W.base, W.size, g, 42, 1, 2, seed), SHMC_OK);
    shmc_set_state(W.base, SHMC_S_READY);
}

void world_drop(void)
{
    if (W.base) munmap(W.base, W.size);
    W = (struct world){0};
}

shmc *world_join(const char *label)
{
    W.h = shmc_new(W.base, W.size, SECOND);
    must(W.h);
    same(shmc_attach(W.h, 0, label), SHMC_OK);
    return W.h;
}

void commit_regions(uint32_t n)
{
    for (uint32_t i = 0, region; i < n; i++) {
        same(shmc_region_claim(W.h, &region), SHMC_OK);
        same(shmc_region_done(W.h, region, 1, 0, 0), SHMC_OK);
    }
}

void open_namespaces(void)
{
    same(shmc_namespace(W.h, "one", 3, 1, NULL, 0, 0, &W.one), SHMC_OK);
    same(shmc_namespace(W.h, "two", 3, 2, "{}", 2, 1, &W.two), SHMC_OK);
    same(shmc_namespace(W.h, "wide", 4, WIDE_PARTS, NULL, 0, 0, &W.wide), SHMC_OK);
}

void world_open(uint32_t policy)
{
    shmc_geometry g = plan(3 * 128 * GRAN, 128 * GRAN, 32, policy);
    world_make(&g, 1);
    world_join("survivor");
    commit_regions(3);
    open_namespaces();
}

/* ---- using ------------------------------------------------------------------------------------ */

enum { RING = 8, KEYS_MAX = 256 };
static struct { uint64_t k[KEYS_MAX]; shmc_keys keys; } ring[RING];

const shmc_keys *keys_of(const uint64_t *k, uint32_t n)
{
    static unsigned at;
    unsigned i = at++ % RING;
    must(n <= KEYS_MAX);
    memcpy(ring[i].k, k, n * sizeof *k);
    ring[i].keys = (shmc_keys){.data = (const uint8_t *)ring[i].k, .n = n, .klen = KEY_BYTES};
    return &ring[i].keys;
}

const shmc_keys *keys(uint64_t first, uint32_t n)
{
    uint64_t k[KEYS_MAX];
    must(n <= KEYS_MAX);
    for (uint32_t i = 0; i < n; i++) k[i] = first + i;
    return keys_of(k, n);
}
const shmc_keys *key(uint64_t k) { return keys_of(&k, 1); }

struct obj obj_new(void)
{
    struct obj x = {.o = shmc_owner_new(W.h, 1)};
    must(x.o);
    return x;
}

struct label { uint64_t key; uint32_t part; };

int try_alloc(struct obj *x, uint32_t ns, uint32_t grans, uint64_t k, uint32_t part, uint32_t flags)
{
    uint8_t meta[12];
    uint32_t ticket;
    memcpy(meta, &k, 8);
    memcpy(meta + 8, &part, 4);
    if (!x->o) *x = obj_new();
    return shmc_alloc(W.h, ns, (uint64_t)grans * GRAN, meta, sizeof meta, 1, flags, &x->o, &x->p, &ticket);
}

struct obj alloc(uint32_t ns, uint32_t grans, uint64_t k, uint32_t part)
{
    struct obj x = {0};
    same(try_alloc(&x, ns, grans, k, part, 0), SHMC_OK);
    return x;
}

int try_put(struct obj *x, uint32_t ns, uint64_t k, uint32_t part)
{
    uint8_t stored = 9;
    int rc = shmc_put(W.h, ns, key(k), &x->o, part, NULL, &stored);
    return rc ? rc : stored;
}

struct obj put(uint32_t ns, uint32_t grans, uint64_t k, uint32_t part)
{
    struct obj x = alloc(ns, grans, k, part);
    same(try_put(&x, ns, k, part), 1);
    return x;
}

void store(uint32_t ns, uint32_t grans, uint64_t k, uint32_t part)
{
    struct obj x = put(ns, grans, k, part);
    drop(&x);
}

struct obj get(uint32_t ns, uint64_t k, uint32_t part)
{
    struct obj x = obj_new();
    same(shmc_get(W.h, ns, key(k), part, &x.o, &x.p), SHMC_OK);
    same(shmc_owner_count(x.o), 1);
    return x;
}

int reserve_as(struct obj *x, uint32_t ns, uint32_t grans, uint64_t k, uint32_t part, uint64_t labelled)
{
    uint8_t meta[12];
    uint32_t ticket;
    memcpy(meta, &labelled, 8);
    memcpy(meta + 8, &part, 4);
    if (!x->o) *x = obj_new();
    return shmc_reserve(W.h, ns, key(k), part, (uint64_t)grans * GRAN, meta, sizeof meta, 0, x->o, &x->p, &ticket);
}

int reserve(struct obj *x, uint32_t ns, uint32_t grans, uint64_t k, uint32_t part) { return reserve_as(x, ns, grans, k, part, k); }

void drop(struct obj *x)
{
    shmc_owner_free(x->o);
    x->o = NULL;
}

int has(uint32_t ns, uint64_t k, int part)
{
    uint8_t out = 9;
    same(shmc_contains(W.h, ns, key(k), part, &out), SHMC_OK);
    return out;
}

int del(uint32_t ns, uint64_t k)
{
    uint8_t out = 9;
    same(shmc_remove(W.h, ns, key(k), &out), SHMC_OK);
    return out;
}

int pin(uint32_t ns, uint64_t k, uint64_t lease_ns)
{
    uint8_t out = 9;
    same(shmc_pin(W.h, ns, key(k), lease_ns, &out), SHMC_OK);
    return out;
}

int unpin(uint32_t ns, uint64_t k)
{
    uint8_t out = 9;
    same(shmc_unpin(W.h, ns, key(k), &out), SHMC_OK);
    return out;
}

void touch(uint32_t ns, uint64_t k) { same(shmc_touch(W.h, ns, key(k)), SHMC_OK); }

shmc_owner *lookup(uint32_t ns, uint64_t first, uint32_t n, uint32_t flags, uint32_t *hits)
{
    shmc_owner *o = shmc_owner_new(W.h, n);
    must(o);
    same(shmc_lookup(W.h, ns, keys(first, n), flags, 0, o, hits), SHMC_OK);
    return o;
}

void drain_all(void)
{
    int rc, n = 0;
    while ((rc = shmc_step(W.h)) == SHMC_MORE) must(++n < 100000);
    same(rc, SHMC_OK);
}

static uint64_t key_of(const struct chunk *k)
{
    uint64_t out;
    memcpy(&out, k->key, sizeof out);
    return out;
}

uint32_t victims(uint64_t *out, uint32_t n)
{
    struct core c;
    uint32_t got = 0;
    core_bind(&c, W.base, W.size, &W.geo);
    bool hot = c.policy == SHMC_MRU;
    for (uint32_t level = 0; level < N_LEVELS; level++)
        for (uint32_t i = hot ? c.hdr->level_tail[level] : c.hdr->level_head[level]; i != NIL && got < n;
             i = hot ? chunk_at(&c, i)->pprev : chunk_at(&c, i)->pnext)
            if (!chunk_at(&c, i)->held) out[got++] = key_of(chunk_at(&c, i));
    return got;
}

/* ---- judging ---------------------------------------------------------------------------------- */

uint32_t sound(const char *what)
{
    char text[2000];
    int n = shmc_verify(W.h, text, sizeof text);
    if (n) fprintf(stderr, "%s: verify says %d\n%s", what, n, n > 0 ? text : "");
    return n < 0 ? 1 : (uint32_t)n;
}

static bool owner_alive(struct core *c, uint32_t hold, int32_t alive)
{
    for (uint32_t n = 0; hold != NIL && n < 1000; hold = hold_at(c, hold)->tnext, n++) {
        const struct slot *s = slot_at(c, hold_at(c, hold)->slot);
        if (s->state == SHMC_SLOT_FREE || s->pid != alive) return false;
    }
    return true;
}

uint32_t settled(int32_t alive, const char *what)
{
    struct core c;
    uint32_t bad = 0;
    uint64_t used = 0;
    core_bind(&c, W.base, W.size, &W.geo);
#define CLAIM(cond, ...) do { if (!(cond)) { bad++; fprintf(stderr, "%s: ", what); fprintf(stderr, __VA_ARGS__); fputc('\n', stderr); } } while (0)
    CLAIM(c.hdr->drain == NIL && c.hdr->stale == 0, "not drained");
    for (uint32_t i = 0; i < c.n_slots; i++)
        CLAIM(c.slots[i].state == SHMC_SLOT_FREE || c.slots[i].pid == alive, "slot %u of pid %d was not reaped", i, c.slots[i].pid);
    for (uint32_t i = 0; i < c.n_regions; i++) {
        const struct region *r = &c.regions[i];
        CLAIM(r->state != SHMC_R_COMMITTING || slot_at(&c, r->owner)->pid == alive, "region %u is being committed by nobody", i);
        uint32_t n = 0;
        for (uint32_t b = r->state == SHMC_R_READY ? r->first : NIL; b != NIL && n < c.n_blocks; b = block_at(&c, b)->phys_next, n++) {
            const struct block *k = block_at(&c, b);
            if (k->state == B_FREE) continue;
            used += k->len;
            CLAIM(owner_alive(&c, k->holds, alive), "block %u is held by the dead", b);
            if (k->state == B_WRITING) { CLAIM(k->holds != NIL, "block %u is written by nobody", b); continue; }
            const struct chunk *in = chunk_at(&c, k->chunk);
            struct label meta = {0};
            memcpy(&meta.key, k->meta, 8);
            memcpy(&meta.part, k->meta + 8, 4);
            CLAIM((in->flags & C_LINKED) || in->held, "block %u is leaked in a chunk nobody reaches", b);
            CLAIM(meta.key == key_of(in) && meta.part == k->part, "key %" PRIu64 " part %u has the bytes of key %" PRIu64 " part %u", key_of(in), k->part, meta.key, meta.part);
        }
    }
    CLAIM(used == c.hdr->used_grans, "used: %" PRIu64 " granules found, %u stored", used, c.hdr->used_grans);
    CLAIM(!c.bad, "an index out of range");
    return bad;
}
