/* format.c -- plan, write and recognise a control segment; bind a private view to it.
 *
 * Nothing in here takes the lock: the caller holds the handshake, or only reads. A header is
 * believed after validate_header found every table inside the file. */
#include <stdio.h>
#include "attach.h"
#include "lock.h"
#include "../os/linux.h"

enum { LIBC_GLIBC = 1, MIN_CHUNKS = 4096 };

#ifndef SHMC_VERSION
#define SHMC_VERSION "0.0.0"
#endif
const char *shmc_version(void) { return SHMC_VERSION; }

#define F(type, field) sizeof(((type *)0)->field), offsetof(type, field)
uint64_t shmc_fingerprint(void)
{
    const uint64_t facts[] = {
        SHMC_FORMAT_VERSION, sizeof(void *), SHMC_WORD, sizeof(pthread_mutex_t), _Alignof(pthread_mutex_t),
        sizeof(struct header), sizeof(struct journal), sizeof(struct undo), sizeof(struct slot), sizeof(struct namespace),
        sizeof(struct region), sizeof(struct chunk), sizeof(struct block), sizeof(struct hold), sizeof(struct event_rec),
        sizeof(shmc_geometry), N_BINS, N_LEVELS, JOURNAL_CAP, EVENT_SLACK,
        F(struct header, state), F(struct header, lock), F(struct header, seq), F(struct header, event_head),
        F(struct header, bin), F(struct header, level_head), F(struct header, level_map), F(struct header, stat), F(struct header, journal),
        F(struct slot, holds), F(struct slot, label), F(struct slot, pinning), F(struct namespace, name), F(struct namespace, desc),
        F(struct region, state), F(struct region, first), F(struct chunk, stamp), F(struct chunk, hnext), F(struct chunk, held),
        F(struct chunk, pprev), F(struct chunk, ns), F(struct chunk, flags), F(struct chunk, ktype), F(struct block, holds),
        F(struct block, state), F(struct block, size), F(struct block, meta), F(struct hold, deadline), F(struct hold, slot_gen), F(struct hold, taken),
        F(struct event_rec, kind), F(struct event_rec, key),
    };
    uint64_t h = 1469598103934665603u;                       /* FNV-1a */
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++)
        for (int b = 0; b < 64; b += 8) h = (h ^ ((facts[i] >> b) & 255)) * 1099511628211u;
    return h;
}
uint32_t shmc_handshake_pid_offset(void) { return (uint32_t)offsetof(struct header, handshake_pid); }

/* ---- plan ----------------------------------------------------------------------------------- */

static uint32_t pow2_floor(uint64_t n) { return n < 2 ? 1 : 1u << (63 - (uint32_t)__builtin_clzll(n)); }
static uint64_t align_up(uint64_t n, uint64_t a) { return (n + a - 1) & ~(a - 1); }
static uint64_t max64(uint64_t a, uint64_t b) { return a > b ? a : b; }

struct tables { uint64_t slots, namespaces, regions, buckets, part_buckets, chunks, blocks, holds, events, end; };

static struct tables place(const shmc_geometry *g)
{
    struct tables t;
    uint64_t at = align_up(sizeof(struct header), 64);
#define PLACE(name, n, type) t.name = at; at = align_up(at + (uint64_t)(n) * sizeof(type), 64)
    PLACE(slots, g->max_attachments, struct slot);
    PLACE(namespaces, g->max_namespaces, struct namespace);
    PLACE(regions, g->n_regions, struct region);
    PLACE(buckets, g->n_buckets, uint32_t);
    PLACE(part_buckets, g->n_part_buckets, uint32_t);
    PLACE(chunks, g->max_chunks, struct chunk);
    PLACE(blocks, g->max_blocks, struct block);
    PLACE(holds, g->max_holds, struct hold);
    PLACE(events, g->n_events, struct event_rec);
    t.end = align_up(at, 4096);
    return t;
}

int shmc_plan(shmc_geometry *g)
{
    if (g->align < 64 || g->align > 2u << 20 || (g->align & (g->align - 1))) return SHMC_E_INVAL;
    if (!g->capacity || g->capacity % g->align || g->capacity / g->align >= 1ull << 31) return SHMC_E_INVAL;
    if (!g->region_bytes) g->region_bytes = g->capacity < 1ull << 30 ? g->capacity : 1ull << 30;
    if (g->region_bytes % g->align || g->region_bytes > g->capacity) return SHMC_E_INVAL;
    if (g->region_bytes < 65536 && g->region_bytes != g->capacity) return SHMC_E_INVAL;
    if (g->policy > SHMC_LFU || g->lifetime > 1) return SHMC_E_INVAL;
    if (g->max_attachments < 1 || g->max_attachments > MAX_ATTACHMENTS) return SHMC_E_INVAL;
    uint64_t n_regions = (g->capacity + g->region_bytes - 1) / g->region_bytes;
    if (n_regions > 65536) return SHMC_E_INVAL;
    g->n_regions = (uint32_t)n_regions;
    g->region_stride = align_up(g->region_bytes, g->region_bytes >= 2u << 20 ? 2u << 20 : max64(4096, g->align));
    if (n_regions * g->region_stride / g->align >= NIL) return SHMC_E_INVAL;
    uint64_t by_size = g->capacity / 65536;
    if (by_size > 1u << 24) by_size = 1u << 24;              /* beyond 1 TiB: chunks are larger there */
    uint64_t chunks = g->max_chunks ? g->max_chunks : max64(by_size, MIN_CHUNKS);
    if (chunks > 1u << 30) return SHMC_E_INVAL;
    g->max_chunks = (uint32_t)chunks;
    uint64_t blocks = max64(chunks, max64(by_size, MIN_CHUNKS)) * 5 / 4 + 2 * n_regions + 64;
    uint64_t holds = max64(chunks / 2, 2ull * MIN_CHUNKS);
    if (blocks > 1u << 30) return SHMC_E_INVAL;
    g->max_blocks = (uint32_t)blocks;
    g->max_holds = (uint32_t)holds;
    g->max_namespaces = MAX_NAMESPACES;
    g->n_events = pow2_floor(chunks / 8 < 1024 ? 1024 : chunks / 8 > 65536 ? 65536 : chunks / 8);
    g->n_buckets = pow2_floor(chunks);
    g->n_part_buckets = pow2_floor(blocks);
    g->control_bytes = place(g).end;
    return g->control_bytes > 8ull << 30 ? SHMC_E_INVAL : SHMC_OK;      /* journal offsets end there */
}

/* ---- format --------------------------------------------------------------------------------- */

uint64_t shmc_events_offset(const shmc_geometry *g) { return place(g).events; }
uint64_t shmc_holds_offset(const shmc_geometry *g) { return place(g).holds; }

void core_bind(struct core *c, void *base, uint64_t size, const shmc_geometry *g)
{
    struct header *h = base;
    struct tables t = place(g);
    memset(c, 0, sizeof *c);
    c->base = base;
    c->size = size;
    c->hdr = h;
    c->slots = (void *)(c->base + t.slots);
    c->namespaces = (void *)(c->base + t.namespaces);
    c->regions = (void *)(c->base + t.regions);
    c->buckets = (void *)(c->base + t.buckets);
    c->part_buckets = (void *)(c->base + t.part_buckets);
    c->chunks = (void *)(c->base + t.chunks);
    c->blocks = (void *)(c->base + t.blocks);
    c->holds = (void *)(c->base + t.holds);
    c->events = (void *)(c->base + t.events);
    c->n_slots = g->max_attachments;
    c->n_namespaces = g->max_namespaces;
    c->n_regions = g->n_regions;
    c->n_buckets = g->n_buckets;
    c->n_part_buckets = g->n_part_buckets;
    c->n_chunks = g->max_chunks;
    c->n_blocks = g->max_blocks;
    c->n_holds = g->max_holds;
    c->n_events = g->n_events;
    c->align_shift = (uint32_t)__builtin_ctz(g->align);
    c->full_grans = (uint32_t)(g->region_bytes / g->align);
    c->stride_grans = (uint32_t)(g->region_stride / g->align);
    c->policy = g->policy;
    c->capacity_grans = (uint32_t)(g->capacity / g->align);
    c->arena_bytes = g->region_stride * g->n_regions;
    c->me = NIL;
    c->seed[0] = h->seed[0];
    c->seed[1] = h->seed[1];
}

/* Everything below writes memory that nobody else maps yet, so nothing in it is logged. */
int shmc_format(void *base, uint64_t size, const shmc_geometry *g, uint64_t instance, uint64_t pid_ns, uint64_t time_ns, const uint64_t *seed)
{
    struct header *h = base;
    if (size != g->control_bytes) return SHMC_E_INVAL;
    __atomic_store_n(&h->state, SHMC_S_INIT, __ATOMIC_RELEASE);
    struct tables t = place(g);
    h->magic = SHMC_MAGIC;                               /* unlogged: format; first, so that a stub of a dead creator is known as ours */
    h->format = SHMC_FORMAT_VERSION;                     /* unlogged: format */
    h->word = SHMC_WORD;                                 /* unlogged: format */
    h->fingerprint = shmc_fingerprint();                 /* unlogged: format */
    h->instance = instance;                              /* unlogged: format */
    h->libc = LIBC_GLIBC;                                /* unlogged: format */
    snprintf(h->version, sizeof h->version, "%s", SHMC_VERSION);
    h->geo = *g;                                         /* unlogged: format */
    h->created_ns = os_realtime_ns();                    /* unlogged: format */
    h->seed[0] = seed[0];                                /* unlogged: format */
    h->seed[1] = seed[1] | 1;                            /* unlogged: format */
    h->at_slots = t.slots; h->at_namespaces = t.namespaces; h->at_regions = t.regions;          /* unlogged: format */
    h->at_buckets = t.buckets; h->at_part_buckets = t.part_buckets; h->at_chunks = t.chunks;    /* unlogged: format */
    h->at_blocks = t.blocks; h->at_holds = t.holds; h->at_events = t.events;                    /* unlogged: format */
    h->full_region_grans = (uint32_t)(g->region_bytes / g->align);                              /* unlogged: format */
    h->stride_grans = (uint32_t)(g->region_stride / g->align);                                  /* unlogged: format */
    h->pid_ns = pid_ns;                                  /* unlogged: format */
    h->time_ns = time_ns;                                /* unlogged: format */
    if (lock_format(h)) return SHMC_E_OS;

    struct core c;
    core_bind(&c, base, size, g);
    memset((uint8_t *)h + offsetof(struct header, acquisitions), 0, sizeof *h - offsetof(struct header, acquisitions));
    memset(c.base + t.slots, 0, size - t.slots);
    h->lease_min = h->lease_recent = h->parked = h->drain = NIL;           /* unlogged: format */
    memset(h->bin, 0xff, sizeof h->bin);
    memset(h->level_head, 0xff, sizeof h->level_head);
    memset(h->level_tail, 0xff, sizeof h->level_tail);
    memset(c.buckets, 0xff, (size_t)c.n_buckets * 4);
    memset(c.part_buckets, 0xff, (size_t)c.n_part_buckets * 4);
    for (uint32_t i = 0; i < c.n_chunks; i++) { c.chunks[i].pnext = i + 1 < c.n_chunks ? i + 1 : NIL; c.chunks[i].gen = 1; }   /* unlogged: format */
    for (uint32_t i = 0; i < c.n_blocks; i++) { c.blocks[i].link_a = i + 1 < c.n_blocks ? i + 1 : NIL; c.blocks[i].gen = 1; }  /* unlogged: format */
    for (uint32_t i = 0; i < c.n_holds; i++) { c.holds[i].tnext = i + 1 < c.n_holds ? i + 1 : NIL; c.holds[i].gen = 1; }       /* unlogged: format */
    for (uint32_t i = 0; i < c.n_slots; i++) c.slots[i].holds = c.slots[i].writes = NIL;                                       /* unlogged: format */
    for (uint32_t i = 0; i < c.n_regions; i++) {
        uint64_t left = g->capacity - (uint64_t)i * g->region_bytes;
        c.regions[i].bytes = left < g->region_bytes ? left : g->region_bytes;   /* unlogged: format */
        c.regions[i].first = NIL;                                               /* unlogged: format */
    }
    return SHMC_OK;
}

void shmc_format_region(void *base, uint32_t region, uint64_t inode)
{
    struct core c;
    const shmc_geometry g = ((struct header *)base)->geo;
    core_bind(&c, base, 0, &g);
    if (region < c.n_regions) c.regions[region].inode = inode;   /* unlogged: format */
}

void shmc_set_state(void *base, uint32_t state)
{
    __atomic_store_n(&((struct header *)base)->state, state, __ATOMIC_RELEASE);
}

/* ---- recognise ------------------------------------------------------------------------------ */

int shmc_validate(const void *base, uint64_t size, shmc_geometry *g_out, shmc_identity *id)
{
    const struct header *h = base;
    if (size < sizeof *h) return size == 0 ? SHMC_E_NOT_READY : size < sizeof h->magic || h->magic != SHMC_MAGIC ? SHMC_E_NOT_SHMCACHE : SHMC_E_CORRUPT;
    uint32_t state = __atomic_load_n(&h->state, __ATOMIC_ACQUIRE);
    if (h->magic != SHMC_MAGIC) return h->magic == 0 && state <= SHMC_S_INIT ? SHMC_E_NOT_READY : SHMC_E_NOT_SHMCACHE;
    shmc_geometry g, plan;
    load_words(&g, &h->geo, sizeof g);                   /* once: what is checked is what is used */
    plan = g;
    if (id) {
        *id = (shmc_identity){.magic = h->magic, .fingerprint = h->fingerprint, .instance = h->instance, .created_ns = h->created_ns,
            .pid_ns = PEEK(&h->pid_ns), .time_ns = PEEK(&h->time_ns), .format = h->format, .state = state, .libc = h->libc, .word = h->word};
        memcpy(id->version, h->version, sizeof id->version);
        id->version[sizeof id->version - 1] = 0;
    }
    if (h->word != SHMC_WORD || h->format != SHMC_FORMAT_VERSION || h->fingerprint != shmc_fingerprint() || h->libc != LIBC_GLIBC)
        return SHMC_E_FORMAT;
    if (state <= SHMC_S_INIT) return SHMC_E_NOT_READY;
    if (state > SHMC_S_POISONED) return SHMC_E_CORRUPT;
    /* the same inputs must give the same plan, so every count, offset and size is checked at once */
    if (shmc_plan(&plan) || memcmp(&plan, &g, sizeof g) != 0) return SHMC_E_CORRUPT;
    struct tables t = place(&g);
    if (g.control_bytes != size || h->at_slots != t.slots || h->at_namespaces != t.namespaces || h->at_regions != t.regions ||
        h->at_buckets != t.buckets || h->at_part_buckets != t.part_buckets || h->at_chunks != t.chunks || h->at_blocks != t.blocks ||
        h->at_holds != t.holds || h->at_events != t.events || h->full_region_grans != g.region_bytes / g.align ||
        h->stride_grans != g.region_stride / g.align)
        return SHMC_E_CORRUPT;
    if (g_out) *g_out = g;
    return SHMC_OK;
}

int shmc_takeover(void *base, uint64_t size, uint64_t pid_ns, uint64_t time_ns)
{
    struct core c;
    shmc_geometry g;
    int rc = shmc_validate(base, size, &g, NULL);
    if (rc) return rc;
    core_bind(&c, base, size, &g);
    if (PEEK(&c.hdr->state) == SHMC_S_POISONED) return SHMC_E_POISONED;
    /* Nobody's from here on: who comes after a death in here must take over again, since no lock tells of it. */
    PUT(&c.hdr->pid_ns, ~0ull);                          /* unlogged: nobody is attached */
    FENCE();
    tx_rollback(&c);
    if (lock_format(c.hdr)) return SHMC_E_OS;
    /* nobody is attached, so every slot's process is gone, whatever its number means here */
    shmc_reap_report report = {0};
    for (uint32_t i = 0; i < c.n_slots && !c.bad; i++) {
        shmc_slot_info s;
        if (shmc_peek_slot(base, size, i, &s) || s.state == SHMC_SLOT_FREE || !slot_condemn(&c, i, &s, true)) continue;
        do c.words = c.frees = 0; while (slot_empty_step(&c, i, s.gen, &report));
    }
    if (c.bad) { shmc_set_state(base, SHMC_S_POISONED); return SHMC_E_POISONED; }
    PUT(&c.hdr->time_ns, time_ns);                       /* unlogged: nobody is attached */
    FENCE();
    PUT(&c.hdr->pid_ns, pid_ns);                         /* unlogged: as above */
    return SHMC_OK;
}

int shmc_peek_slot(const void *base, uint64_t size, uint32_t slot, shmc_slot_info *out)
{
    shmc_geometry g;
    int rc = shmc_validate(base, size, &g, NULL);
    if (rc) return rc;
    if (slot >= g.max_attachments) return SHMC_E_NOT_FOUND;
    struct slot s;
    load_record(base, &s, (const uint8_t *)base + place(&g).slots + (uint64_t)slot * sizeof s, sizeof s);
    *out = (shmc_slot_info){.state = s.state, .gen = s.gen, .rank = s.rank, .holds = s.n_holds, .pid = s.pid, .writes = s.n_writes, .leaving = s.leaving,
        .start_time = s.start_time, .start_stack = s.start_stack, .attached_ns = s.attached_ns};
    if (s.pinning >> 32 == s.gen) {
        out->pin_state = (uint32_t)(s.pinning >> 29 & 7);
        out->pinned_regions = (uint32_t)(s.pinning & 0x1fffffff);
    }
    memcpy(out->label, s.label, sizeof out->label);
    out->label[sizeof out->label - 1] = 0;
    return SHMC_OK;
}
