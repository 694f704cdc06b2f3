/* api_keys.c -- what is asked by key: put, get, lookup, pin, touch, remove, reserve, clear.
 *
 * Each loop below is a batch of transactions of one item; `breathe` between two of them gives
 * others the lock. Keys are hashed where they are needed: 5 ns, less than a cache miss. */
#include "api.h"
#include "core/namespaces.h"

bool keys_ok(const shmc_keys *k)
{
    if (!k || !k->n || !k->data) return false;
    if (!k->ends) return k->klen <= SHMC_KEY_MAX && k->ktype <= 255;
    if (!k->types) return false;
    for (uint32_t i = 0, at = 0; i < k->n; at = k->ends[i++])
        if (k->ends[i] < at || k->ends[i] - at > SHMC_KEY_MAX) return false;
    return true;
}

struct key key_at(const struct core *c, uint32_t ns, const shmc_keys *k, uint32_t i)
{
    uint32_t from = k->ends ? (i ? k->ends[i - 1] : 0) : i * k->klen, len = k->ends ? k->ends[i] - from : k->klen;
    struct key out = {.data = k->data + (k->ends ? from : (size_t)i * k->klen), .len = (uint8_t)len, .type = k->ends ? k->types[i] : (uint8_t)k->ktype};
    out.hash = index_hash(c, ns, out.data, out.len, out.type);
    return out;
}

/* unlogged: statistics, plain under the lock */
static void hits(struct core *c, uint32_t ns, uint32_t hit, uint32_t miss)
{
    struct namespace *n = ns_at(c, ns);
    uint64_t *stat = c->hdr->stat;
    PUT(&stat[SHMC_ST_HITS], stat[SHMC_ST_HITS] + hit);         /* unlogged: statistics */
    PUT(&stat[SHMC_ST_MISSES], stat[SHMC_ST_MISSES] + miss);    /* unlogged: statistics */
    PUT(&n->hits, n->hits + hit);                               /* unlogged: statistics */
    PUT(&n->misses, n->misses + miss);                          /* unlogged: statistics */
}

/* What every call by key starts with: arguments, the lock, the namespace. */
static int begin_keys(shmc *h, uint32_t op, uint32_t ns, const shmc_keys *keys, uint32_t part)
{
    if (!keys_ok(keys) || ns >= h->core.n_namespaces) return SHMC_E_INVAL;
    int rc = begin(h, op);
    if (rc) return rc;
    if (!namespace_ok(&h->core, ns) || part >= h->core.namespaces[ns].parts) return finish(h, SHMC_E_INVAL);
    return SHMC_OK;
}

static uint32_t find_complete(struct core *c, uint32_t ns, const struct key *k)
{
    uint32_t i = index_find(c, ns, k);
    return i != NIL && chunk_complete(c, chunk_at(c, i)) ? i : NIL;
}

/* The chunk of a key when that part of it is published; part < 0: when all are. */
static uint32_t find_part(struct core *c, uint32_t ns, const struct key *k, int32_t part)
{
    if (part < 0) return find_complete(c, ns, k);
    uint32_t chunk = index_find(c, ns, k), b = chunk == NIL ? NIL : part_find(c, chunk, (uint32_t)part);
    return b != NIL && block_at(c, b)->state == B_PUBLISHED ? chunk : NIL;
}

/* ---- put ----------------------------------------------------------------------------------------- */

/* The block that an owner's only hold writes, not yet published. */
static int block_to_write(struct core *c, shmc *h, const shmc_owner *o, uint32_t *block, uint32_t *hold)
{
    if (!o || o->h != h || o->n != 1 || !hold_mine(c, o->refs[0])) return SHMC_E_STALE;
    const struct hold *k = hold_at(c, o->refs[0].hold);
    if (!hold_on_block(k->kind)) return SHMC_E_STALE;
    *block = k->target;
    *hold = o->refs[0].hold;
    return block_at(c, k->target)->state == B_WRITING ? SHMC_OK : SHMC_E_PUBLISHED;
}

/* The same, of this namespace; an error says why it cannot be published here. */
static int block_to_put(struct core *c, shmc *h, const shmc_owner *o, uint32_t ns, uint32_t *block, uint32_t *hold)
{
    int rc = block_to_write(c, h, o, block, hold);
    if (rc == SHMC_E_STALE) return rc;
    return block_at(c, *block)->ns == ns ? rc : SHMC_E_FOREIGN;
}

int shmc_adopt(shmc *h, uint32_t ns, shmc_owner *o)
{
    struct core *c = &h->core;
    uint32_t block, hold;
    if (ns >= c->n_namespaces) return SHMC_E_INVAL;
    int rc = begin(h, TX_ALLOC);
    if (rc) return rc;
    if (!namespace_ok(c, ns)) return finish(h, SHMC_E_INVAL);
    rc = block_to_write(c, h, o, &block, &hold);
    if (!rc && block_at(c, block)->chunk != NIL) rc = SHMC_E_FOREIGN;   /* reserved under a key of the other */
    return finish(h, rc ? rc : block_adopt(c, block, ns));
}

int shmc_set_meta(shmc *h, const shmc_owner *o, const uint8_t *meta, uint32_t meta_len)
{
    struct core *c = &h->core;
    uint32_t block, hold;
    if (!meta_len || meta_len > SHMC_META_MAX) return SHMC_E_INVAL;
    int rc = begin(h, TX_PUBLISH);
    if (rc) return rc;
    rc = block_to_write(c, h, o, &block, &hold);
    return finish(h, rc ? rc : block_describe(c, block, meta, meta_len));
}

/* The chunk table is full: free one record, step by step. false: all of it is held. */
static bool room_for_chunk(struct core *c)
{
    if (c->hdr->drain == NIL && evict_one(c) == 0) return false;
    drain_some(c);
    c->items = BATCH_ITEMS;
    return true;
}

struct chunk_ref { uint32_t chunk, gen; };
static struct chunk_ref remember(struct core *c, uint32_t chunk) { return (struct chunk_ref){chunk, chunk == NIL ? 0 : chunk_at(c, chunk)->gen}; }
static uint32_t recall(struct core *c, struct chunk_ref r) { return r.chunk != NIL && chunk_at(c, r.chunk)->gen == r.gen ? r.chunk : NIL; }

/* Publish one object; `stored` says whether. `before` is the chunk it goes beside, and becomes its own.
 * Negative: the call ends with that status, without the lock when `lost`. */
static int put_one(shmc *h, uint32_t ns, const struct key *k, const shmc_owner *obj, uint32_t part, struct chunk_ref *before, uint8_t *stored, bool *lost)
{
    struct core *c = &h->core;
    uint32_t block, hold, chunk = NIL;
    for (uint32_t n = 0; n <= c->n_blocks; n++) {         /* each turn frees parts of a chunk, or parks some */
        int rc = block_to_put(c, h, obj, ns, &block, &hold);   /* again each time: the lock may have been away */
        if (rc) return rc;
        if (block_at(c, block)->ns_gen != ns_at(c, ns)->gen) {
            count(c, SHMC_ST_STALE_PUTS);
            break;
        }
        rc = publish(c, ns, k, block, hold, part, recall(c, *before), &chunk);
        if (rc < 0) return rc;
        *stored = rc == SHMC_OK;
        if (rc != SHMC_FULL) break;
        if (!room_for_chunk(c)) {
            count(c, SHMC_ST_EVICTION_FAILURES);
            break;
        }
        rc = breathe(h, TX_PUBLISH);
        if (rc) { *lost = true; return rc; }
    }
    *before = remember(c, chunk);
    return SHMC_OK;
}

int shmc_put(shmc *h, uint32_t ns, const shmc_keys *keys, shmc_owner **objs, uint32_t part, const shmc_keys *parent, uint8_t *stored)
{
    struct core *c = &h->core;
    if (parent && !keys_ok(parent)) return SHMC_E_INVAL;
    int rc = begin_keys(h, TX_PUBLISH, ns, keys, part);
    if (rc) return rc;
    uint32_t block, hold;
    struct chunk_ref before = {NIL, 0}, none = {NIL, 0};
    for (uint32_t i = 0; i < keys->n; i++) {             /* all are validated before any has an effect */
        rc = block_to_put(c, h, objs[i], ns, &block, &hold);
        if (rc) return finish(h, rc);
        c->items++;
        rc = breathe(h, TX_PUBLISH);
        if (rc) return give_up(h, rc);
    }
    if (parent) {
        struct key k = key_at(c, ns, parent, 0);
        before = remember(c, index_find(c, ns, &k));
    }
    for (uint32_t i = 0; i < keys->n; i++) {
        struct key k = key_at(c, ns, keys, i);
        bool lost = false;
        stored[i] = 0;
        if (!parent) before = none;
        rc = put_one(h, ns, &k, objs[i], part, &before, &stored[i], &lost);
        if (rc) return lost ? give_up(h, rc) : finish(h, rc);   /* released by another thread meanwhile, or given twice */
        c->items++;
        rc = breathe(h, TX_PUBLISH);
        if (rc) return give_up(h, rc);
    }
    return finish(h, SHMC_OK);
}

/* The block of a reserver that came second. One hold, so the budget of this lock hold does not matter. */
static void give_back(shmc *h, shmc_owner *o)
{
    h->core.items = h->core.words = h->core.frees = 0;
    owner_release_locked(h, o);
}

int shmc_reserve(shmc *h, uint32_t ns, const shmc_keys *keys, uint32_t part, uint64_t size, const uint8_t *meta, uint32_t meta_len, uint32_t flags, shmc_owner *owner, shmc_part *out, uint32_t *ticket)
{
    struct core *c = &h->core;
    out->block = NIL;
    if ((keys && keys->n != 1) || !owner_ready(h, owner, 1)) return SHMC_E_INVAL;
    for (uint32_t tries = 0; tries <= c->n_blocks; tries++) {   /* others publish and are evicted meanwhile; each turn frees something */
        int rc = begin_keys(h, TX_RESERVE, ns, keys, part);
        if (rc) return rc;
        struct key k = key_at(c, ns, keys, 0);
        uint32_t i = index_find(c, ns, &k), b = i == NIL ? NIL : part_find(c, i, part);
        bool mine = shmc_owner_count(owner) == 1;
        if (b != NIL) {
            bool there = block_at(c, b)->state == B_PUBLISHED;
            if (mine) give_back(h, owner);
            out->block = NIL;
            if (!there) { ticket_take(c, 1, ticket); return finish(h, SHMC_PENDING); }
            if (!owner_take(c, owner, H_REF, b, 0)) { ticket_take(c, 0, ticket); return finish(h, SHMC_FULL); }
            hits(c, ns, 1, 0);
            part_info(c, b, out);
            return finish(h, SHMC_FOUND);
        }
        if (mine) {
            rc = reserve_part(c, ns, &k, hold_at(c, owner->refs[0].hold)->target, part);
            if (rc == SHMC_OK) { hits(c, ns, 0, 1); return finish(h, SHMC_OK); }
            if (rc < 0) return finish(h, rc);
            if (!room_for_chunk(c)) {
                give_back(h, owner);
                out->block = NIL;
                ticket_take(c, 0, ticket);
                return finish(h, SHMC_FULL);
            }
            rc = finish(h, SHMC_OK);
            if (rc) return rc;
            continue;
        }
        rc = finish(h, SHMC_OK);
        if (!rc) rc = shmc_alloc(h, ns, size, meta, meta_len, 1, flags, &owner, out, ticket);
        if (rc) return rc;
    }
    out->block = NIL;
    int rc = begin(h, TX_RESERVE);
    if (rc) return rc;
    give_back(h, owner);
    ticket_take(c, 0, ticket);
    return finish(h, SHMC_FULL);
}

/* ---- reading --------------------------------------------------------------------------------------- */

int shmc_get(shmc *h, uint32_t ns, const shmc_keys *keys, uint32_t part, shmc_owner **owners, shmc_part *out)
{
    struct core *c = &h->core;
    bool pending = false;
    for (uint32_t i = 0; keys && i < keys->n; i++) {
        if (!owner_ready(h, owners[i], 1)) return SHMC_E_INVAL;
        out[i].block = NIL;
    }
    int rc = begin_keys(h, TX_HOLD, ns, keys, part);
    if (rc) return rc;
    for (uint32_t i = 0; i < keys->n; i++) {
        struct key k = key_at(c, ns, keys, i);
        uint32_t chunk = index_find(c, ns, &k), b = chunk == NIL ? NIL : part_find(c, chunk, part);
        if (b != NIL && block_at(c, b)->state == B_PUBLISHED && owner_take(c, owners[i], H_REF, b, 0)) {
            part_info(c, b, &out[i]);
            hits(c, ns, 1, 0);
        } else {
            pending |= b != NIL && block_at(c, b)->state == B_WRITING;
            hits(c, ns, 0, 1);
        }
        c->items++;
        rc = breathe(h, TX_HOLD);
        if (rc) return give_up(h, rc);
    }
    return finish(h, pending ? SHMC_PENDING : SHMC_OK);
}

int shmc_contains(shmc *h, uint32_t ns, const shmc_keys *keys, int32_t part, uint8_t *out)
{
    struct core *c = &h->core;
    int rc = begin_keys(h, TX_READ, ns, keys, part < 0 ? 0 : (uint32_t)part);
    if (rc) return rc;
    for (uint32_t i = 0; i < keys->n; i++) {
        struct key k = key_at(c, ns, keys, i);
        out[i] = find_part(c, ns, &k, part) != NIL;
        c->items++;
        rc = breathe(h, TX_READ);
        if (rc) return give_up(h, rc);
    }
    return finish(h, SHMC_OK);
}

/* The chunk that entry i of a lookup stands for, or NIL when its pin or the chunk itself is gone. */
static uint32_t lookup_chunk(struct core *c, const shmc_owner *o, uint32_t i)
{
    struct ref r = o->refs[i];
    if (o->pins) return hold_mine(c, r) && hold_at(c, r.hold)->kind == H_LOOKUP_PIN ? hold_at(c, r.hold)->target : NIL;
    if (r.hold >= c->n_chunks) return NIL;
    const struct chunk *k = chunk_at(c, r.hold);
    return k->gen == r.gen && (k->flags & C_LINKED) && k->ns_gen == ns_at(c, k->ns)->gen ? r.hold : NIL;
}

int shmc_lookup(shmc *h, uint32_t ns, const shmc_keys *keys, uint32_t flags, uint64_t lease_ns, shmc_owner *owner, uint32_t *n)
{
    struct core *c = &h->core;
    *n = 0;
    if (!keys || !owner_ready(h, owner, keys->n)) return SHMC_E_INVAL;
    int rc = begin_keys(h, TX_HOLD, ns, keys, 0);
    if (rc) return rc;
    if (owner->n) return finish(h, SHMC_E_INVAL);        /* given to two threads */
    owner->pins = (flags & SHMC_F_PIN) != 0;
    while (owner->n < keys->n) {
        struct key k = key_at(c, ns, keys, owner->n);
        uint32_t i = find_complete(c, ns, &k);
        if (i == NIL) break;
        /* pinned in the critical section in which it was found: it stays */
        if (owner->pins ? !owner_take(c, owner, H_LOOKUP_PIN, i, lease_tick(c, lease_ns))
                        : !owner_put(owner, (struct ref){i, chunk_at(c, i)->gen})) break;
        c->items++;
        rc = breathe(h, TX_HOLD);
        if (rc) return give_up(h, rc);
    }
    *n = owner->n;
    hits(c, ns, *n, keys->n - *n);
    if (flags & SHMC_F_TOUCH)
        for (uint32_t i = *n; i-- > 0;) {                /* tail first, so that the prefix ends up hottest */
            uint32_t chunk = lookup_chunk(c, owner, i);
            if (chunk != NIL) chunk_touch(c, chunk);
            c->items++;
            rc = breathe(h, TX_TOUCH);
            if (rc) return give_up(h, rc);
        }
    return finish(h, SHMC_OK);
}

int shmc_lookup_get(shmc *h, uint32_t ns, shmc_owner *lookup, uint32_t i, uint32_t part, shmc_owner *owner, shmc_part *out)
{
    struct core *c = &h->core;
    out->block = NIL;
    if (!owner_ready(h, owner, 1)) return SHMC_E_INVAL;
    if (!lookup || lookup->h != h) return SHMC_E_STALE;
    int rc = begin(h, TX_HOLD);
    if (rc) return rc;
    if (!namespace_ok(c, ns) || part >= c->namespaces[ns].parts) return finish(h, SHMC_E_INVAL);
    uint32_t chunk = i < lookup->n ? lookup_chunk(c, lookup, i) : NIL, b = chunk == NIL ? NIL : part_find(c, chunk, part);
    if (b == NIL || block_at(c, b)->state != B_PUBLISHED) return finish(h, SHMC_E_STALE);
    if (!owner_take(c, owner, H_REF, b, 0)) return finish(h, SHMC_FULL);
    part_info(c, b, out);
    return finish(h, SHMC_OK);
}

/* ---- pins by key ----------------------------------------------------------------------------------- */

int shmc_pin(shmc *h, uint32_t ns, const shmc_keys *keys, uint64_t lease_ns, uint8_t *out)
{
    struct core *c = &h->core;
    int rc = begin_keys(h, TX_HOLD, ns, keys, 0);
    if (rc) return rc;
    for (uint32_t i = 0; i < keys->n; i++) {
        struct key k = key_at(c, ns, keys, i);
        struct ref r;
        uint32_t chunk = find_complete(c, ns, &k);
        out[i] = chunk != NIL && take(c, H_KEY_PIN, chunk, lease_tick(c, lease_ns), &r);
        c->items++;
        rc = breathe(h, TX_HOLD);
        if (rc) return give_up(h, rc);
    }
    return finish(h, SHMC_OK);
}

static int leading(shmc *h, uint32_t ns, const shmc_keys *keys, int32_t part, uint32_t flags, uint64_t lease_ns, bool count, uint32_t *n)
{
    struct core *c = &h->core;
    enum tx_op op = flags & SHMC_F_PIN ? TX_HOLD : TX_READ;
    *n = 0;
    int rc = begin_keys(h, op, ns, keys, part < 0 ? 0 : (uint32_t)part);
    if (rc) return rc;
    while (*n < keys->n) {
        struct key k = key_at(c, ns, keys, *n);
        struct ref r;
        uint32_t chunk = find_part(c, ns, &k, part);
        if (chunk == NIL || (op == TX_HOLD && !take(c, H_KEY_PIN, chunk, lease_tick(c, lease_ns), &r))) break;
        ++*n;
        c->items++;
        rc = breathe(h, op);
        if (rc) return give_up(h, rc);
    }
    if (count) hits(c, ns, *n, keys->n - *n);
    return finish(h, SHMC_OK);
}

int shmc_leading(shmc *h, uint32_t ns, const shmc_keys *keys, int32_t part, uint32_t flags, uint64_t lease_ns, uint32_t *n)
{
    return leading(h, ns, keys, part, flags, lease_ns, true, n);
}

/* The oldest pin by key that this attachment has on any version of the key. New versions stand
 * before old ones in a bucket, new pins before old ones on a chunk, so the last one met is the oldest.
 * Bound: the pins on this key's versions. */
static uint32_t oldest_own_pin(struct core *c, uint32_t ns, const struct key *k)
{
    uint32_t best = NIL, n = 0;
    for (uint32_t i = index_next(c, ns, k, NIL); i != NIL; i = index_next(c, ns, k, i))
        for (uint32_t p = chunk_at(c, i)->holds; p != NIL && bounded(c, &n, c->n_holds); p = hold_at(c, p)->tnext) {
            const struct hold *o = hold_at(c, p);
            if (o->kind == H_KEY_PIN && o->slot == c->me && o->slot_gen == c->me_gen) best = p;
        }
    c->items += n / 16;
    return best;
}

int shmc_unpin(shmc *h, uint32_t ns, const shmc_keys *keys, uint8_t *out)
{
    struct core *c = &h->core;
    int rc = begin_keys(h, TX_RELEASE, ns, keys, 0);
    if (rc) return rc;
    for (uint32_t i = keys->n; i-- > 0;) {               /* last to first, as every release */
        struct key k = key_at(c, ns, keys, i);
        uint32_t pin = oldest_own_pin(c, ns, &k);
        out[i] = pin != NIL;
        if (pin != NIL) let_go(c, pin, TX_RELEASE);
        c->items++;
        rc = breathe(h, TX_RELEASE);
        if (rc) return give_up(h, rc);
    }
    return finish(h, SHMC_OK);
}

int shmc_touch(shmc *h, uint32_t ns, const shmc_keys *keys)
{
    struct core *c = &h->core;
    int rc = begin_keys(h, TX_TOUCH, ns, keys, 0);
    if (rc) return rc;
    for (uint32_t i = keys->n; i-- > 0;) {
        struct key k = key_at(c, ns, keys, i);
        uint32_t chunk = index_find(c, ns, &k);
        if (chunk != NIL) chunk_touch(c, chunk);
        c->items++;
        rc = breathe(h, TX_TOUCH);
        if (rc) return give_up(h, rc);
    }
    return finish(h, SHMC_OK);
}

/* ---- removing -------------------------------------------------------------------------------------- */

int shmc_remove(shmc *h, uint32_t ns, const shmc_keys *keys, uint8_t *out)
{
    struct core *c = &h->core;
    int rc = begin_keys(h, TX_UNLINK, ns, keys, 0);
    if (rc) return rc;
    for (uint32_t i = 0; i < keys->n; i++) {
        struct key k = key_at(c, ns, keys, i);
        uint32_t chunk = index_find(c, ns, &k);
        out[i] = chunk != NIL && (chunk_at(c, chunk)->flags & C_LINKED);
        if (out[i]) {
            chunk_unlink(c, chunk, SHMC_BY_REMOVE);
            drain_some(c);
        }
        c->items++;
        rc = breathe(h, TX_UNLINK);
        if (rc) return give_up(h, rc);
    }
    return finish(h, SHMC_OK);
}

int shmc_clear(shmc *h, uint32_t ns, uint32_t *cursor, uint64_t *removed)
{
    struct core *c = &h->core;
    if (ns >= c->n_namespaces) return SHMC_E_INVAL;
    int rc = begin(h, TX_UNLINK);
    if (rc) return rc;
    for (uint32_t looked = 0; *cursor < c->n_chunks && looked < 65536; ++*cursor, ++looked) {
        const struct chunk *k = &c->chunks[*cursor];
        if ((k->flags & C_LINKED) && k->ns == ns && k->held == 0 && k->ns_gen == c->namespaces[ns].gen) {
            chunk_unlink(c, *cursor, SHMC_BY_CLEAR);
            ++*removed;
            drain_some(c);
            c->items++;
        }
        if (looked % 8 == 7) c->items++;
        rc = breathe(h, TX_UNLINK);
        if (rc) return give_up(h, rc);
    }
    for (uint64_t n = 0; n < 64 + *removed * (SHMC_PARTS_MAX / DRAIN_PER_CALL) && drain_some(c); n++) {   /* what was removed is free on return */
        c->items = BATCH_ITEMS;
        rc = breathe(h, TX_DRAIN);
        if (rc) return give_up(h, rc);
    }
    return finish(h, *cursor < c->n_chunks ? SHMC_MORE : SHMC_OK);
}

/* ---- one key ----------------------------------------------------------------------------------------- */

/* Filling a shmc_keys from Python costs as much as the lock. */
#define ONE(key, klen, ktype) &(const shmc_keys){.data = (key), .n = 1, .klen = (klen), .ktype = (ktype)}

int shmc_put_one(shmc *h, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype, shmc_owner **obj, uint32_t part, const shmc_keys *parent)
{
    uint8_t stored = 0;
    int rc = shmc_put(h, ns, ONE(key, klen, ktype), obj, part, parent, &stored);
    return rc < 0 ? rc : stored;
}

int shmc_get_one(shmc *h, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype, uint32_t part, shmc_owner **owner, shmc_part *out)
{
    return shmc_get(h, ns, ONE(key, klen, ktype), part, owner, out);
}

int shmc_contains_one(shmc *h, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype, int32_t part)
{
    uint8_t found = 0;
    int rc = shmc_contains(h, ns, ONE(key, klen, ktype), part, &found);
    return rc < 0 ? rc : found;
}

int shmc_pin_one(shmc *h, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype, int32_t part, uint64_t lease_ns)
{
    uint32_t n = 0;
    int rc = leading(h, ns, ONE(key, klen, ktype), part, SHMC_F_PIN, lease_ns, false, &n);
    return rc < 0 ? rc : (int)n;
}

int shmc_unpin_one(shmc *h, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype)
{
    uint8_t done = 0;
    int rc = shmc_unpin(h, ns, ONE(key, klen, ktype), &done);
    return rc < 0 ? rc : done;
}

int shmc_remove_one(shmc *h, uint32_t ns, const uint8_t *key, uint32_t klen, uint32_t ktype)
{
    uint8_t done = 0;
    int rc = shmc_remove(h, ns, ONE(key, klen, ktype), &done);
    return rc < 0 ? rc : done;
}
