/* api_memory.c -- allocation: take, grow, evict, or fail; waiting; committing regions.
 *
 * Order of an allocation: free list; memory that is on its way (drain list); a region not yet
 * committed (SHMC_GROW, the caller commits and comes back); then eviction, planned first: what can
 * never fit, or what the evictable bytes cannot satisfy, evicts nothing. Ordinary requests take
 * victims in policy order. A request much larger than the usual block, or one that 64 victims did
 * not satisfy, needs a run of neighbours that are free or evictable: it is found first, and only
 * then are its chunks evicted. */
#include "api.h"
#include "core/extents.h"
#include "core/namespaces.h"

enum { MANY_VICTIMS = 64, LARGE_FACTOR = 4, SCAN_STEP = 128, MAX_RESCANS = 4, LEASE_STEP = 256, MAX_RETRIES = 8 };

/* Nothing reads or writes a futex word but its waiters and wakers, so these are atomics, not logged. */
void ticket_take(struct core *c, int which, uint32_t *ticket)
{
    __atomic_store_n(&c->hdr->waiters[which], 1, __ATOMIC_RELAXED);
    *ticket = __atomic_load_n(&c->hdr->wake[which], __ATOMIC_RELAXED);
}

/* ---- leases ------------------------------------------------------------------------------------ */

/* Pins whose lease has ended go when memory is short: one walk over the hold table, in slices, and
 * not before the earliest lease could have ended. */
static int end_leases(shmc *h)
{
    struct core *c = &h->core;
    struct header *hdr = c->hdr;
    if (hdr->lease_min == NIL || c->now < hdr->lease_min) return SHMC_OK;
    uint32_t next = NIL;
    tx_begin(c, TX_LEASE);
    tx32(c, &hdr->lease_recent, NIL);
    tx32(c, &hdr->lease_sweeps, hdr->lease_sweeps + 1);
    tx_commit(c);
    uint32_t sweep = hdr->lease_sweeps;
    for (uint32_t i = 0; i < c->n_holds; i++) {
        const struct hold *k = &c->holds[i];
        if (k->kind != H_FREE && k->deadline) {
            if (k->deadline <= c->now) {
                let_go(c, i, TX_LEASE);
                count(c, SHMC_ST_LEASES_ENDED);
            } else if (k->deadline < next) {
                next = k->deadline;
            }
        }
        if (i % LEASE_STEP == LEASE_STEP - 1) c->items = BATCH_ITEMS;
        int rc = breathe(h, TX_LEASE);
        if (rc) return rc;
    }
    /* a sweep that was overtaken, or whose process died, leaves lease_min in the past: the next one looks again */
    if (sweep == hdr->lease_sweeps) {
        tx_begin(c, TX_LEASE);
        tx32(c, &hdr->lease_min, next < hdr->lease_recent ? next : hdr->lease_recent);
        tx_commit(c);
    }
    return SHMC_OK;
}

/* ---- making room --------------------------------------------------------------------------------- */

static bool chunk_can_go(struct core *c, uint32_t chunk)
{
    if (chunk == NIL) return false;
    const struct chunk *k = chunk_at(c, chunk);
    return (k->flags & C_DRAIN) || ((k->flags & C_LINKED) && k->held == 0);
}

static bool usable(struct core *c, const struct block *b)
{
    return b->state == B_FREE || (b->state == B_PUBLISHED && chunk_can_go(c, b->chunk));
}

/* Look for a run of `len` usable granules, SCAN_STEP extents at a time. 1: found, 0: there is none, -1: go on. */
static int scan_for_run(struct core *c, struct room *r, uint32_t len)
{
    for (int n = 0; n < SCAN_STEP; n++) {                        /* <= 128 */
        if (r->at == NIL) {
            if (r->regions_seen == c->n_regions) return 0;
            r->region = (r->region + 1) % c->n_regions;
            r->regions_seen++;
            const struct region *g = region_at(c, r->region);
            if (g->state != SHMC_R_READY) continue;
            r->at = g->first;
            r->run = NIL;
        } else if (n == 0 && (block_at(c, r->at)->state == B_UNUSED || block_at(c, r->at)->gen != r->at_gen)) {
            if (++r->rescans > MAX_RESCANS) return 0;            /* the arena moved under the hand: this region anew */
            r->at = region_at(c, r->region)->first;
            r->run = NIL;
        }
        const struct block *b = block_at(c, r->at);
        if (c->bad) return 0;
        if (!usable(c, b)) r->run = NIL;
        else if (r->run == NIL) { r->run = r->at; r->run_gen = b->gen; r->run_len = b->len; }
        else r->run_len += b->len;
        if (r->run != NIL && r->run_len >= len) return 1;
        r->at = b->phys_next;
        r->at_gen = r->at == NIL ? 0 : block_at(c, r->at)->gen;
    }
    return -1;
}

/* Evict the run from its start until the extent there holds `len`. Its descriptor survives every merge,
 * since what lies before it is in use. 1: done, 0: the run was lost, -1: go on. */
static int evict_run(struct core *c, struct room *r, uint32_t len)
{
    uint32_t at = r->run;
    if (block_at(c, at)->gen != r->run_gen) return 0;            /* taken, or merged away, by others */
    for (int n = 0; n < 3; n++) {                                /* free neighbours are merged: <= 2 steps */
        const struct block *b = block_at(c, at);
        if (b->state == B_UNUSED || !usable(c, b)) return 0;
        if (b->state == B_FREE) {
            if (at == r->run && b->len >= len) return 1;
            at = b->phys_next;
            if (at == NIL) return 0;
            continue;
        }
        if (!(chunk_at(c, b->chunk)->flags & C_DRAIN)) chunk_unlink(c, b->chunk, SHMC_BY_EVICT);
        SOUND(c, c->hdr->drain != NIL, "a chunk that drains is on the list");
        drain_some(c);
        r->run_gen = block_at(c, r->run)->gen;                   /* it may be our own drain that freed it */
        return -1;
    }
    return 0;
}

static int room_by_run(struct core *c, struct room *r, uint32_t len)
{
    if (!r->started) {
        r->started = true;
        r->region = (uint32_t)(c->hdr->clock % c->n_regions);    /* a hand that rotates */
        r->at = r->run = NIL;
    }
    if (r->evicting) {
        int rc = evict_run(c, r, len);
        if (rc) return rc == 1 ? 1 : -1;
        if (++r->rescans > MAX_RESCANS) return 0;
        r->evicting = false;
        r->at = r->run = NIL;
        r->regions_seen = 0;
    }
    int rc = scan_for_run(c, r, len);
    if (rc == 1) { r->evicting = true; return -1; }
    return rc;
}

int room_for(shmc *h, struct room *r, uint32_t len, uint32_t n, uint32_t flags)
{
    struct core *c = &h->core;
    struct header *hdr = c->hdr;
    /* memory that is on its way; outdated chunks that two rounds of the hand do not meet are a counter that is wrong */
    if (hdr->drain != NIL || (hdr->stale && r->stale_steps <= 2 * (c->n_chunks / STALE_SCAN + 1))) {
        uint32_t stale = hdr->stale;
        bool more = drain_some(c);
        r->stale_steps = hdr->drain == NIL && hdr->stale == stale ? r->stale_steps + 1 : 0;
        if (more || (extent_fits(c, len) && hdr->free_block != NIL)) {
            if (more) c->items = BATCH_ITEMS;
            int rc = breathe(h, TX_ALLOC);
            return rc ? rc : 1;
        }
    }
    if (hdr->ready_grans < c->capacity_grans && !(flags & SHMC_F_NO_GROW)) return SHMC_GROW;
    if (hdr->free_hold == NIL) return SHMC_FULL;
    uint64_t free_grans = (uint64_t)hdr->ready_grans - hdr->used_grans, want = (uint64_t)len * n;
    bool lease_due = hdr->lease_min != NIL && c->now >= hdr->lease_min;
    if (h->failed_freed == hdr->freed + 1 && len >= h->failed_len && want >= h->failed_want && !lease_due) return SHMC_FULL;
    if (free_grans + hdr->evictable_grans < want || !hdr->evictable_grans) {
        if (!r->swept && lease_due) {
            r->swept = true;
            int rc = end_leases(h);
            return rc ? rc : 1;
        }
        goto full;
    }
    if (flags & SHMC_F_NO_EVICT) return SHMC_FULL;
    if (!r->spatial && (r->victims >= MANY_VICTIMS || (hdr->blocks && len / LARGE_FACTOR > hdr->used_grans / hdr->blocks)) && hdr->free_block != NIL)
        r->spatial = true;
    if (hdr->free_block == NIL) r->spatial = r->evicting = false;    /* a run could not be split off */
    int got = r->spatial ? room_by_run(c, r, len) : evict_one(c);
    if (got == 0 && r->rescans > MAX_RESCANS) return SHMC_FULL;      /* the arena would not stand still: no plan to remember */
    if (got == 0) goto full;
    if (got == 1 && !r->spatial) { r->victims++; c->items++; drain_some(c); }
    if (got == -1) c->items = BATCH_ITEMS;
    int rc = breathe(h, TX_ALLOC);
    return rc ? rc : 1;
full:
    h->failed_len = len;
    h->failed_want = want;
    h->failed_freed = hdr->freed + 1;                            /* + 1: zero means nothing failed yet */
    count(c, SHMC_ST_EVICTION_FAILURES);
    return SHMC_FULL;
}

/* ---- allocate ------------------------------------------------------------------------------------ */

void part_info(struct core *c, uint32_t block, shmc_part *out)
{
    const struct block *b = block_at(c, block);
    uint32_t len = b->meta_len <= SHMC_META_MAX ? b->meta_len : 0;
    out->offset = (uint64_t)b->off << c->align_shift;
    out->size = b->size;
    out->extent = (uint64_t)b->len << c->align_shift;
    out->block = block;
    out->gen = b->gen;
    out->meta_len = len;
    out->published = b->state == B_PUBLISHED;
    memcpy(out->meta, b->meta, sizeof out->meta);
    /* an extent outside the arena would be a wild pointer in the caller */
    SOUND(c, out->offset + out->extent <= c->arena_bytes && out->size <= out->extent, "extent inside the arena");
}

int shmc_alloc(shmc *h, uint32_t ns, uint64_t size, const uint8_t *meta, uint32_t meta_len, uint32_t n, uint32_t flags, shmc_owner **owners, shmc_part *out, uint32_t *ticket)
{
    struct core *c = &h->core;
    if (!size || !n || meta_len > SHMC_META_MAX || ns >= c->n_namespaces) return SHMC_E_INVAL;
    for (uint32_t i = 0; i < n; i++)
        if (!owner_ready(h, owners[i], 1)) return SHMC_E_INVAL;
    uint32_t len = extent_round(c, size), done = 0;
    if (!len || (uint64_t)len * n > c->capacity_grans) return SHMC_E_CAPACITY;
    int rc = begin(h, TX_ALLOC);
    if (rc) return rc;
    if (!namespace_ok(c, ns)) return finish(h, SHMC_E_INVAL);
    uint64_t spins = 0, freed;
    uint32_t tries = 0;
    struct room room;
batch:                                                           /* <= 1 + 8 times */
    /* What was evicted after a part of the batch had its place may lie on both sides of it, too small on either
     * (16 of 1 MiB in an arena of 16 MiB, whose first 16 KiB were a chunk): then all start again in that room. */
    freed = c->hdr->freed;
    done = 0;
    room = (struct room){0};
    bool planned = n == 1;
    while (done < n) {
        struct ref r;
        uint64_t reach = (uint64_t)c->hdr->ready_grans - c->hdr->used_grans + (flags & SHMC_F_NO_EVICT ? 0 : c->hdr->evictable_grans);
        uint32_t b = NIL;
        /* all or nothing: nothing is taken before the whole batch is within reach */
        if (planned || reach >= (uint64_t)len * n) b = block_new(c, ns, len, size, meta, meta_len, &r);
        if (b != NIL) {
            planned = true;
            room.evicting = false;                               /* each extent is a search of its own */
            room.at = room.run = NIL;
            room.victims = room.rescans = room.regions_seen = 0;
            if (!owner_put(owners[done], r)) {                   /* the same owner was given twice, or to two threads */
                let_go(c, r.hold, TX_RELEASE);
                rc = SHMC_E_INVAL;
                break;
            }
            part_info(c, b, &out[done++]);
            c->items++;
            rc = breathe(h, TX_ALLOC);
            if (rc) return give_up(h, rc);
            continue;
        }
        if (c->bad) return finish(h, SHMC_E_POISONED);
        if (++spins > 4ull * c->n_blocks + 1024) { rc = SHMC_FULL; break; }   /* others take what we free */
        rc = room_for(h, &room, len, n - done, flags);
        if (rc < 0) return give_up(h, rc);
        if (rc != 1) break;
    }
    if (done == n) return finish(h, SHMC_OK);
    bool again = rc == SHMC_FULL && done && c->hdr->freed != freed && ++tries <= MAX_RETRIES;
    for (uint32_t i = done; i-- > 0;)
        while (owner_release_locked(h, owners[i]) == SHMC_MORE) {
            c->items = BATCH_ITEMS;
            int lost = breathe(h, TX_ALLOC);
            if (lost) return give_up(h, lost);
        }
    if (again) goto batch;
    if (ticket && rc > 0) ticket_take(c, 0, ticket);
    return finish(h, rc);
}

int shmc_wait(shmc *h, int which, uint32_t ticket, uint64_t timeout_ns)
{
    int rc = shmc_check(h);
    if (rc) return rc;
    if (which < 0 || which > 1) return SHMC_E_INVAL;
    struct header *hdr = h->core.hdr;
    __atomic_fetch_add(&hdr->stat[SHMC_ST_WAITS], 1, __ATOMIC_RELAXED);
    os_futex_wait(&hdr->wake[which], ticket, timeout_ns);
    return SHMC_OK;
}

/* ---- regions ------------------------------------------------------------------------------------- */

int shmc_region(shmc *h, uint32_t region, shmc_region_info *out)
{
    if (region >= h->core.n_regions) return SHMC_E_NOT_FOUND;
    struct region r;
    load_record(h->core.hdr, &r, &h->core.regions[region], sizeof r);
    *out = (shmc_region_info){.inode = r.inode, .bytes = r.bytes, .state = r.state, .owner = r.owner, .flags = r.flags, .node = r.node};
    return SHMC_OK;
}

int shmc_region_claim(shmc *h, uint32_t *region)
{
    int rc = begin(h, TX_REGION);
    if (rc) return rc;
    struct core *c = &h->core;
    bool pending = false, front = true;
    for (uint32_t i = h->region_hint; i < c->n_regions; i++) {   /* READY is for ever: the hint only grows */
        if (i % 16 == 15) c->items++;
        rc = breathe(h, TX_REGION);
        if (rc) return give_up(h, rc);
        struct region *r = &c->regions[i];
        if (r->state == SHMC_R_READY) { if (front) h->region_hint = i + 1; continue; }
        front = false;
        if (r->state == SHMC_R_COMMITTING) { pending = true; continue; }
        tx_begin(c, TX_REGION);
        tx32(c, &r->state, SHMC_R_COMMITTING);
        tx32(c, &r->owner, c->me);
        tx32(c, &r->owner_gen, c->me_gen);
        tx32(c, &r->attempts, r->attempts + 1);
        tx_commit(c);
        *region = i;
        return finish(h, SHMC_OK);
    }
    return finish(h, pending ? SHMC_PENDING : SHMC_E_NOT_FOUND);
}

int shmc_region_done(shmc *h, uint32_t region, int ok, uint32_t flags, uint32_t node)
{
    if (region >= h->core.n_regions) return SHMC_E_NOT_FOUND;
    int rc = begin(h, TX_REGION);
    if (rc) return rc;
    struct core *c = &h->core;
    struct region *r = region_at(c, region);
    if (r->state != SHMC_R_COMMITTING || r->owner != c->me || r->owner_gen != c->me_gen) return finish(h, SHMC_E_STALE);
    tx_begin(c, TX_REGION);
    if (ok && extent_add_region(c, region)) {
        tx32(c, &r->flags, flags);
        tx32(c, &r->node, node);
        tx32(c, &r->state, SHMC_R_READY);
        rc = SHMC_OK;
    } else {
        tx32(c, &r->state, SHMC_R_ABSENT);
        rc = ok ? SHMC_FULL : SHMC_OK;
    }
    tx_commit(c);
    return finish(h, rc);
}
