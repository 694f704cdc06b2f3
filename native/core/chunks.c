/* chunks.c -- see chunks.h. */
#include "chunks.h"
#include "events.h"
#include "extents.h"
#include "policy.h"

static void memory_moved(struct core *c)
{
    PUT(&c->hdr->freed, c->hdr->freed + 1);      /* unlogged: only ever compared for "has it moved" */
    c->wake |= 1;
}

/* ---- records -------------------------------------------------------------------------------- */

static uint32_t chunk_new(struct core *c, uint32_t ns, const struct key *key)
{
    struct header *h = c->hdr;
    uint32_t i = h->free_chunk;
    if (i == NIL) return NIL;
    struct chunk *k = chunk_at(c, i);
    tx32(c, &h->free_chunk, k->pnext);
    tx32(c, &h->chunks, h->chunks + 1);
    tx16(c, &k->flags, C_SHELL);
    tx32(c, &k->held, 0);
    tx32(c, &k->holds, NIL);
    tx32(c, &k->parts, NIL);
    tx32(c, &k->grans, 0);
    tx16(c, &k->published, 0);
    if (c->bad) return NIL;
    uint8_t padded[SHMC_KEY_MAX] = {0};
    memcpy(padded, key->data, key->len);
    store_words(k->key, padded, sizeof padded);  /* unlogged: unreachable until in the index */
    PUT(&k->klen, key->len);                     /* unlogged: as above */
    PUT(&k->ktype, key->type);                   /* unlogged: as above */
    PUT(&k->ns, (uint16_t)ns);                   /* unlogged: as above */
    PUT(&k->tag, (uint32_t)(key->hash >> 32));   /* unlogged: as above */
    PUT(&k->ns_gen, ns_at(c, ns)->gen);          /* unlogged: as above */
    PUT(&k->admit_tick, c->now);                 /* unlogged: as above */
    PUT(&k->last_tick, c->now);                  /* unlogged: as above */
    index_insert(c, i);
    return i;
}

static void chunk_free(struct core *c, uint32_t i)
{
    struct header *h = c->hdr;
    struct chunk *k = chunk_at(c, i);
    tx16(c, &k->flags, 0);
    tx32(c, &k->gen, k->gen + 1);
    tx32(c, &k->pnext, h->free_chunk);
    tx32(c, &h->free_chunk, i);
    tx32(c, &h->chunks, h->chunks - 1);
}

static void to_drain(struct core *c, uint32_t i)
{
    struct chunk *k = chunk_at(c, i);
    index_remove(c, i);
    tx16(c, &k->flags, C_DRAIN);
    tx32(c, &k->pnext, c->hdr->drain);
    tx32(c, &c->hdr->drain, i);
}

/* ---- holds ---------------------------------------------------------------------------------- */

static void chunk_hold_up(struct core *c, uint32_t i)
{
    struct chunk *k = chunk_at(c, i);
    if (k->held == 0 && (k->flags & C_LINKED)) tx32(c, &c->hdr->evictable_grans, c->hdr->evictable_grans - k->grans);
    tx32(c, &k->held, k->held + 1);
}

static void chunk_hold_down(struct core *c, uint32_t i)
{
    struct chunk *k = chunk_at(c, i);
    SOUND(c, k->held > 0, "held counts every holder");
    tx32(c, &k->held, k->held - 1);
    if (k->held) return;
    if (k->flags & C_LINKED) {
        tx32(c, &c->hdr->evictable_grans, c->hdr->evictable_grans + k->grans);
        policy_unpark(c, i);
        memory_moved(c);
    } else if (k->flags & C_GONE) {
        to_drain(c, i);
        memory_moved(c);
    } else if (k->flags & C_SHELL) {             /* its last reservation was given up */
        SOUND(c, k->parts == NIL, "a shell without writers has no parts");
        index_remove(c, i);
        chunk_free(c, i);
    }
}

static uint32_t *target_of(struct core *c, enum hold_kind kind, uint32_t target)
{
    return hold_on_block(kind) ? &block_at(c, target)->holds : &chunk_at(c, target)->holds;
}

/* Part of a transaction. */
static uint32_t take_in_tx(struct core *c, enum hold_kind kind, uint32_t target)
{
    uint32_t *head = target_of(c, kind, target);
    bool first = *head == NIL;
    uint32_t i = hold_link(c, kind, target, head);
    if (i == NIL) return NIL;
    if (!hold_on_block(kind)) { chunk_hold_up(c, target); return i; }
    struct block *b = block_at(c, target);
    if (hold_is_ref(kind)) tx32(c, &b->refs, b->refs + 1);
    if (first && b->chunk != NIL) chunk_hold_up(c, b->chunk);
    return i;
}

bool take(struct core *c, enum hold_kind kind, uint32_t target, uint32_t deadline, struct ref *out)
{
    tx_begin(c, TX_HOLD);
    uint32_t i = take_in_tx(c, kind, target);
    if (i == NIL) { tx_rollback(c); return false; }
    if (deadline) hold_lease(c, i, deadline);
    uint32_t gen = hold_at(c, i)->gen;
    if (!tx_commit(c)) return false;
    *out = (struct ref){i, gen};
    return true;
}

/* The block leaves its chunk's parts; part of a transaction. */
static void part_detach(struct core *c, uint32_t block)
{
    struct block *b = block_at(c, block);
    part_remove(c, block);
    tx32(c, &b->chunk, NIL);
    tx32(c, &c->hdr->parts, c->hdr->parts - 1);
}

void let_go(struct core *c, uint32_t hold, enum tx_op op)
{
    tx_begin(c, op);
    struct hold *k = hold_at(c, hold);
    uint32_t kind = k->kind, target = k->target;
    hold_unlink(c, hold, target_of(c, kind, target));
    if (!hold_on_block(kind)) {
        chunk_hold_down(c, target);
    } else {
        struct block *b = block_at(c, target);
        if (hold_is_ref(kind)) tx32(c, &b->refs, b->refs - 1);
        if (b->holds == NIL) {
            uint32_t chunk = b->chunk;
            if (b->state == B_WRITING) {         /* abort: nobody ever saw these bytes */
                if (chunk != NIL) { part_detach(c, target); c->wake |= 2; }
                extent_give(c, target);
                count(c, SHMC_ST_ABORTS);
            }
            if (chunk != NIL) chunk_hold_down(c, chunk);
        }
    }
    tx_commit(c);
}

/* ---- writing -------------------------------------------------------------------------------- */

uint32_t block_new(struct core *c, uint32_t ns, uint32_t len, uint64_t size, const uint8_t *meta, uint32_t meta_len, struct ref *out)
{
    tx_begin(c, TX_ALLOC);
    uint32_t i = extent_take(c, len);
    uint32_t hold = i == NIL ? NIL : take_in_tx(c, H_WRITE, i);
    if (hold == NIL) { tx_rollback(c); return NIL; }
    struct block *b = block_at(c, i);
    PUT(&b->size, size);                          /* unlogged: unreachable, only its writer has the index */
    uint8_t padded[SHMC_META_MAX] = {0};
    if (meta_len) memcpy(padded, meta, meta_len);
    store_words(b->meta, padded, sizeof padded);  /* unlogged: as above */
    PUT(&b->meta_len, (uint16_t)meta_len);        /* unlogged: as above */
    PUT(&b->ns, (uint16_t)ns);                    /* unlogged: as above */
    PUT(&b->ns_gen, ns_at(c, ns)->gen);           /* unlogged: as above */
    uint32_t gen = hold_at(c, hold)->gen;
    if (!tx_commit(c)) return NIL;
    *out = (struct ref){hold, gen};
    return i;
}

int block_adopt(struct core *c, uint32_t block, uint32_t ns)
{
    struct block *b = block_at(c, block);
    tx_begin(c, TX_ALLOC);
    tx16(c, &b->ns, (uint16_t)ns);
    tx32(c, &b->ns_gen, ns_at(c, ns)->gen);
    return tx_commit(c) ? SHMC_OK : SHMC_E_POISONED;
}

/* Through the journal: under a reservation the block is reachable, and a writer that dies in here leaves the old
 * description, not half of each. Seven words at most. */
int block_describe(struct core *c, uint32_t block, const uint8_t *meta, uint32_t meta_len)
{
    struct block *b = block_at(c, block);
    uint64_t words[SHMC_META_MAX / sizeof(uint64_t)] = {0};
    memcpy(words, meta, meta_len);
    tx_begin(c, TX_PUBLISH);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)         /* 6 */
        tx64(c, (uint64_t *)(void *)(b->meta + i * sizeof *words), words[i]);
    tx16(c, &b->meta_len, (uint16_t)meta_len);
    return tx_commit(c) ? SHMC_OK : SHMC_E_POISONED;
}

/* Make `block` part `part` of `chunk`; it has a hold, so the chunk has one holder more. */
static void part_attach(struct core *c, uint32_t chunk, uint32_t block, uint32_t part)
{
    struct block *b = block_at(c, block);
    tx32(c, &b->chunk, chunk);
    tx16(c, &b->part, (uint16_t)part);
    part_insert(c, block);
    chunk_hold_up(c, chunk);
    tx32(c, &c->hdr->parts, c->hdr->parts + 1);
}

static void part_published(struct core *c, uint32_t i, uint32_t block, uint32_t parent)
{
    struct header *h = c->hdr;
    struct chunk *k = chunk_at(c, i);
    struct block *b = block_at(c, block);
    struct namespace *n = ns_at(c, k->ns);
    tx16(c, &b->state, B_PUBLISHED);
    tx16(c, &k->published, (uint16_t)(k->published + 1));
    tx32(c, &k->grans, k->grans + b->len);
    tx32(c, &n->grans, n->grans + b->len);
    tx32(c, &h->linked_grans, h->linked_grans + b->len);
    if (k->flags & C_SHELL) {
        tx16(c, &k->flags, C_LINKED);
        policy_admit(c, i, parent);
        tx32(c, &h->linked, h->linked + 1);
        tx32(c, &n->chunks, n->chunks + 1);
    }
    if (k->published == n->parts) {
        tx32(c, &n->complete, n->complete + 1);
        tx32(c, &h->complete, h->complete + 1);
        event_add(c, SHMC_EV_ADMIT, SHMC_BY_PUT, k);
        count(c, SHMC_ST_STORES);
        PUT(&n->stores, n->stores + 1);           /* unlogged: statistics */
    }
    c->wake |= 2;
}

int publish(struct core *c, uint32_t ns, const struct key *key, uint32_t block, uint32_t hold, uint32_t part, uint32_t parent, uint32_t *chunk)
{
    uint32_t i = index_find(c, ns, key), there = i == NIL ? NIL : part_find(c, i, part);
    *chunk = i;
    if (there != NIL && block_at(c, there)->state == B_PUBLISHED) { count(c, SHMC_ST_DUPLICATES); return SHMC_PENDING; }
    if (i == NIL && c->hdr->free_chunk == NIL) return SHMC_FULL;
    tx_begin(c, TX_PUBLISH);
    if (i == NIL) i = chunk_new(c, ns, key);
    struct block *b = block_at(c, block);
    if (b->chunk != i || there != block) {
        /* attach first: giving up a reservation must not see the chunk without a holder */
        if (there != NIL) { part_detach(c, there); c->wake |= 2; }
        uint32_t old = b->chunk;
        if (old != NIL) part_detach(c, block);
        part_attach(c, i, block, part);
        if (there != NIL) chunk_hold_down(c, i);
        if (old != NIL) chunk_hold_down(c, old);
    }
    part_published(c, i, block, parent == i ? NIL : parent);
    hold_to_ref(c, hold);
    *chunk = i;
    return tx_commit(c) ? SHMC_OK : SHMC_E_POISONED;
}

int reserve_part(struct core *c, uint32_t ns, const struct key *key, uint32_t block, uint32_t part)
{
    uint32_t i = index_find(c, ns, key);
    if (i != NIL && part_find(c, i, part) != NIL) return SHMC_PENDING;
    if (i == NIL && c->hdr->free_chunk == NIL) return SHMC_FULL;
    tx_begin(c, TX_RESERVE);
    SOUND(c, block_at(c, block)->chunk == NIL, "a block is reserved once");
    if (i == NIL) i = chunk_new(c, ns, key);
    part_attach(c, i, block, part);
    tx32(c, &block_at(c, block)->ns_gen, ns_at(c, ns)->gen);   /* others wait for it now: a bump since its allocation must not make the put vain */
    return tx_commit(c) ? SHMC_OK : SHMC_E_POISONED;
}

/* ---- removing ------------------------------------------------------------------------------- */

void chunk_unlink(struct core *c, uint32_t i, enum shmc_event_cause cause)
{
    struct header *h = c->hdr;
    struct chunk *k = chunk_at(c, i);
    struct namespace *n = ns_at(c, k->ns);
    bool complete = chunk_complete(c, k);
    tx_begin(c, TX_UNLINK);
    SOUND(c, k->flags & C_LINKED, "only linked chunks are unlinked");
    policy_forget(c, i);
    event_add(c, SHMC_EV_REMOVE, cause, k);
    if (k->ns_gen == n->gen) {
        tx32(c, &n->chunks, n->chunks - 1);
        tx32(c, &n->grans, n->grans - k->grans);
        if (complete) tx32(c, &n->complete, n->complete - 1);
    } else {
        tx32(c, &h->stale, h->stale - 1);
    }
    if (complete) tx32(c, &h->complete, h->complete - 1);
    tx32(c, &h->linked, h->linked - 1);
    tx32(c, &h->linked_grans, h->linked_grans - k->grans);
    if (k->held) {
        tx16(c, &k->flags, C_GONE);
    } else {
        tx32(c, &h->evictable_grans, h->evictable_grans - k->grans);
        to_drain(c, i);
    }
    if (cause == SHMC_BY_EVICT) {
        count(c, SHMC_ST_EVICTIONS);
        PUT(&n->evictions, n->evictions + 1);     /* unlogged: statistics */
    }
    tx_commit(c);
    memory_moved(c);
}

void chunk_touch(struct core *c, uint32_t i)
{
    struct chunk *k = chunk_at(c, i);
    PUT(&k->last_tick, c->now);                   /* unlogged: an age shown to people */
    if (!(k->flags & C_LINKED)) return;
    tx_begin(c, TX_TOUCH);
    policy_touch(c, i);
    tx_commit(c);
}

/* One part of the chunk at the head of the drain list, or the chunk itself when none is left. */
static void drain_one(struct core *c)
{
    uint32_t i = c->hdr->drain;
    struct chunk *k = chunk_at(c, i);
    tx_begin(c, TX_DRAIN);
    SOUND(c, k->flags & C_DRAIN, "drain list");
    if (k->parts != NIL) {
        uint32_t b = k->parts;
        part_detach(c, b);
        extent_give(c, b);
    } else {
        tx32(c, &c->hdr->drain, k->pnext);
        chunk_free(c, i);
    }
    tx_commit(c);
}

/* Chunks of an older generation are found by a hand over the table: no list to keep for them. */
static void unlink_stale(struct core *c)
{
    struct header *h = c->hdr;
    uint32_t hand = h->stale_hand;
    for (int n = 0, gone = 0; n < STALE_SCAN && gone < DRAIN_PER_CALL && h->stale && !c->bad; n++) {   /* <= 256 looks, 8 removals */
        if (hand >= c->n_chunks) hand = 0;
        const struct chunk *k = chunk_at(c, hand);
        if ((k->flags & C_LINKED) && k->ns_gen != ns_at(c, k->ns)->gen) {
            chunk_unlink(c, hand, SHMC_BY_BUMP);
            gone++;
        }
        hand++;
    }
    PUT(&h->stale_hand, hand);                    /* unlogged: any value is as good */
}

bool drain_some(struct core *c)
{
    struct header *h = c->hdr;
    if (__builtin_expect(h->stale, 0) && h->drain == NIL) unlink_stale(c);
    uint32_t stop = c->frees + DRAIN_PER_CALL;
    for (int n = 0; n < 2 * DRAIN_PER_CALL && h->drain != NIL && c->frees < stop && !c->bad; n++)   /* <= 16, 8 frees */
        drain_one(c);
    return (h->drain != NIL || h->stale) && !c->bad;
}

int evict_one(struct core *c)
{
    for (int n = 0; n < 32; n++) {                /* <= 32 parked in one step */
        uint32_t i = policy_candidate(c);
        if (i == NIL || c->bad) return 0;
        if (chunk_at(c, i)->held == 0) {
            chunk_unlink(c, i, SHMC_BY_EVICT);
            return 1;
        }
        tx_begin(c, TX_PARK);
        policy_park(c, i);
        tx_commit(c);
        c->items++;
    }
    return -1;
}
