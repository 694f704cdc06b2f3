/* policy.c -- LRU, FIFO, MRU, LFU; see policy.h. */
#include "policy.h"

#define STAMP(level, clock) ((uint64_t)(level) << 48 | ((clock) & 0xffffffffffffu))

static uint32_t level_of(const struct chunk *k)
{
    uint32_t level = (uint32_t)(k->stamp >> 48);
    return level < N_LEVELS ? level : 0;
}

static void level_mark(struct core *c, uint32_t level)
{
    uint32_t *w = &c->hdr->level_map[level / 32], bit = 1u << (level % 32);
    bool any = c->hdr->level_head[level] != NIL;
    if (any != !!(*w & bit)) tx32(c, w, *w ^ bit);
}

/* Link `i` just before (colder than) `at`; at == NIL: at the hot end. */
static void link_before(struct core *c, uint32_t level, uint32_t i, uint32_t at)
{
    struct header *h = c->hdr;
    struct chunk *k = chunk_at(c, i);
    uint32_t prev = at == NIL ? h->level_tail[level] : chunk_at(c, at)->pprev;
    tx32(c, &k->pprev, prev);
    tx32(c, &k->pnext, at);
    if (prev == NIL) tx32(c, &h->level_head[level], i); else tx32(c, &chunk_at(c, prev)->pnext, i);
    if (at == NIL) tx32(c, &h->level_tail[level], i); else tx32(c, &chunk_at(c, at)->pprev, i);
    level_mark(c, level);
}

static void level_unlink(struct core *c, uint32_t i)
{
    struct header *h = c->hdr;
    struct chunk *k = chunk_at(c, i);
    uint32_t level = level_of(k), p = k->pprev, n = k->pnext;
    SOUND(c, p == NIL ? h->level_head[level] == i : chunk_at(c, p)->pnext == i, "policy list, back");
    SOUND(c, n == NIL ? h->level_tail[level] == i : chunk_at(c, n)->pprev == i, "policy list, forward");
    if (p == NIL) tx32(c, &h->level_head[level], n); else tx32(c, &chunk_at(c, p)->pnext, n);
    if (n == NIL) tx32(c, &h->level_tail[level], p); else tx32(c, &chunk_at(c, n)->pprev, p);
    level_mark(c, level);
}

static uint64_t tick(struct core *c)
{
    tx64(c, &c->hdr->clock, c->hdr->clock + 1);
    return c->hdr->clock;
}

static void to_hot_end(struct core *c, uint32_t i, uint32_t level)
{
    tx64(c, &chunk_at(c, i)->stamp, STAMP(level, tick(c)));
    link_before(c, level, i, NIL);
}

/* A chunk stored with a parent sits just on the cold side of it, so that a prefix outlives its
 * extensions, also when a prompt arrives in several batches. */
static void admit_beside_parent(struct core *c, uint32_t i, uint32_t parent)
{
    if (parent == NIL || (chunk_at(c, parent)->flags & (C_LINKED | C_PARKED)) != C_LINKED) {
        to_hot_end(c, i, 0);
        return;
    }
    tx64(c, &chunk_at(c, i)->stamp, chunk_at(c, parent)->stamp);
    link_before(c, level_of(chunk_at(c, parent)), i, parent);
}

static void admit_last(struct core *c, uint32_t i, uint32_t parent) { (void)parent; to_hot_end(c, i, 0); }
static void admit_once(struct core *c, uint32_t i, uint32_t parent) { (void)parent; to_hot_end(c, i, 1); }

static void leave(struct core *c, uint32_t i)
{
    struct header *h = c->hdr;
    struct chunk *k = chunk_at(c, i);
    if (!(k->flags & C_PARKED)) { level_unlink(c, i); return; }
    parked_list_unlink(c, &h->parked, i);
    tx32(c, &h->n_parked, h->n_parked - 1);
    tx16(c, &k->flags, (uint16_t)(k->flags & ~C_PARKED));
}

static void touch_move(struct core *c, uint32_t i) { leave(c, i); to_hot_end(c, i, 0); }
static void touch_nothing(struct core *c, uint32_t i) { (void)c; (void)i; }

/* Frequencies beyond N_LEVELS - 1 count as that many: order among them is then least recent first. */
static void touch_count(struct core *c, uint32_t i)
{
    uint32_t level = level_of(chunk_at(c, i));
    leave(c, i);
    to_hot_end(c, i, level + 1 < N_LEVELS ? level + 1 : level);
}

static uint32_t coldest(struct core *c)
{
    struct header *h = c->hdr;
    if (c->policy != SHMC_LFU) return h->level_head[0];
    for (uint32_t w = 0; w < N_LEVELS / 32; w++)          /* <= 32 words */
        if (h->level_map[w]) return h->level_head[w * 32 + (uint32_t)__builtin_ctz(h->level_map[w])];
    return NIL;
}
static uint32_t hottest(struct core *c) { return c->hdr->level_tail[0]; }

/* Back to the cold end, ordered by stamp. Those that stand there with a lower stamp came back the
 * same way. A chain bears one stamp and is released last to first, so among equals who comes later is
 * hotter: the prefix goes last. The walk starts where the one before came back, and is cut at 32 steps:
 * then the order is only nearly that of the stamps. */
static void return_cold(struct core *c, uint32_t i)
{
    uint64_t stamp = chunk_at(c, i)->stamp;
    uint32_t level = level_of(chunk_at(c, i)), at = c->hdr->level_head[level], hint = c->hdr->return_hint;
    if (hint < c->n_chunks) {                             /* on this list, and not hotter: a place to start from */
        const struct chunk *k = chunk_at(c, hint);
        if (k->flags == C_LINKED && level_of(k) == level && k->stamp <= stamp && hint != i) at = hint;
    }
    for (int n = 0; n < 32 && at != NIL && chunk_at(c, at)->stamp <= stamp; n++) at = chunk_at(c, at)->pnext;
    link_before(c, level, i, at);
    PUT(&c->hdr->return_hint, i);                         /* unlogged: only a hint */
}

static void return_hot(struct core *c, uint32_t i)
{
    uint64_t stamp = chunk_at(c, i)->stamp;
    uint32_t at = NIL, cold = c->hdr->level_tail[0];
    for (int n = 0; n < 32 && cold != NIL && chunk_at(c, cold)->stamp > stamp; n++) {
        at = cold;
        cold = chunk_at(c, cold)->pprev;
    }
    link_before(c, 0, i, at);
}

static const struct {
    void (*admit)(struct core *, uint32_t, uint32_t);
    void (*touch)(struct core *, uint32_t);
    uint32_t (*candidate)(struct core *);
    void (*come_back)(struct core *, uint32_t);
} POLICY[] = {
    [SHMC_LRU] = {admit_beside_parent, touch_move, coldest, return_cold},
    [SHMC_FIFO] = {admit_last, touch_nothing, coldest, return_cold},
    [SHMC_MRU] = {admit_last, touch_move, hottest, return_hot},
    [SHMC_LFU] = {admit_once, touch_count, coldest, return_cold},
};

void policy_admit(struct core *c, uint32_t i, uint32_t parent) { POLICY[c->policy].admit(c, i, parent); }
void policy_touch(struct core *c, uint32_t i) { POLICY[c->policy].touch(c, i); }
void policy_forget(struct core *c, uint32_t i) { leave(c, i); }
uint32_t policy_candidate(struct core *c) { return POLICY[c->policy].candidate(c); }

void policy_unpark(struct core *c, uint32_t i)
{
    if (!(chunk_at(c, i)->flags & C_PARKED)) return;
    leave(c, i);
    POLICY[c->policy].come_back(c, i);
}

void policy_park(struct core *c, uint32_t i)
{
    struct header *h = c->hdr;
    struct chunk *k = chunk_at(c, i);
    level_unlink(c, i);
    parked_list_push(c, &h->parked, i);
    tx32(c, &h->n_parked, h->n_parked + 1);
    tx16(c, &k->flags, (uint16_t)(k->flags | C_PARKED));
}
