/* extents.c -- see extents.h. */
#include "extents.h"

static uint32_t bin_of(uint32_t len)
{
    if (len < SL_COUNT) return len;
    uint32_t m = 31u - (uint32_t)__builtin_clz(len);
    return (m - 4) * SL_COUNT + ((len >> (m - 5)) & (SL_COUNT - 1));
}

static uint32_t bin_floor(uint32_t bin)
{
    uint32_t fl = bin / SL_COUNT, sl = bin % SL_COUNT;
    return fl == 0 ? sl : (SL_COUNT + sl) << (fl - 1);
}

uint32_t extent_round(const struct core *c, uint64_t bytes)
{
    uint64_t gran = 1ull << c->align_shift, len = (bytes >> c->align_shift) + ((bytes & (gran - 1)) != 0);
    if (len == 0 || len > c->full_grans) return 0;
    uint32_t n = (uint32_t)len;
    if (n >= 2 * SL_COUNT) {
        uint32_t step = 1u << (31u - (uint32_t)__builtin_clz(n) - 5);
        n = (n + step - 1) & ~(step - 1);
    }
    return n > c->full_grans ? c->full_grans : n;
}

/* A region that is free from end to end: whatever its length rounds to, it serves the largest request. */
uint32_t extent_bin(const struct core *c, uint32_t len) { return len == c->full_grans ? BIN_WHOLE : bin_of(len); }

static void bin_insert(struct core *c, uint32_t b)
{
    struct header *h = c->hdr;
    uint32_t bin = extent_bin(c, block_at(c, b)->len);
    bin_list_push(c, &h->bin[bin], b);
    if (bin == BIN_WHOLE) return;
    uint32_t fl = bin / SL_COUNT, bit = 1u << (bin % SL_COUNT);
    if (!(h->sl_map[fl] & bit)) tx32(c, &h->sl_map[fl], h->sl_map[fl] | bit);
    if (!(h->fl_map & (1u << fl))) tx32(c, &h->fl_map, h->fl_map | (1u << fl));
}

static void bin_remove(struct core *c, uint32_t b)
{
    struct header *h = c->hdr;
    uint32_t bin = extent_bin(c, block_at(c, b)->len);
    if (bin > BIN_WHOLE) { c->bad = true; return; }
    bin_list_unlink(c, &h->bin[bin], b);
    if (bin == BIN_WHOLE || h->bin[bin] != NIL) return;
    uint32_t fl = bin / SL_COUNT, left = h->sl_map[fl] & ~(1u << (bin % SL_COUNT));
    tx32(c, &h->sl_map[fl], left);
    if (!left) tx32(c, &h->fl_map, h->fl_map & ~(1u << fl));
}

/* The lowest non-empty bin all of whose extents hold `len`: two find-first-set, no walk. */
static uint32_t find(const struct core *c, uint32_t len)
{
    const struct header *h = c->hdr;
    if (len < c->full_grans) {
        uint32_t bin = bin_of(len), fl = bin / SL_COUNT;
        uint32_t sl = h->sl_map[fl] & (~0u << (bin % SL_COUNT));
        if (!sl && fl + 1 < FL_COUNT) {
            uint32_t up = h->fl_map & (~0u << (fl + 1));
            if (up) {
                fl = (uint32_t)__builtin_ctz(up);
                sl = fl < FL_COUNT ? h->sl_map[fl] : 0;
            }
        }
        if (sl) return fl * SL_COUNT + (uint32_t)__builtin_ctz(sl);
    }
    return h->bin[BIN_WHOLE] != NIL ? BIN_WHOLE : NIL;
}

bool extent_fits(const struct core *c, uint32_t len) { return find(c, len) != NIL; }

uint32_t extent_largest(const struct header *h)
{
    if (PEEK(&h->bin[BIN_WHOLE]) != NIL) return h->full_region_grans;       /* also read without the lock */
    uint32_t fl_map = PEEK(&h->fl_map) & ((1u << FL_COUNT) - 1);
    if (!fl_map) return 0;
    uint32_t fl = 31u - (uint32_t)__builtin_clz(fl_map), sl = PEEK(&h->sl_map[fl]);
    return sl ? bin_floor(fl * SL_COUNT + 31u - (uint32_t)__builtin_clz(sl)) : 0;
}

static uint32_t descriptor_pop(struct core *c)
{
    struct header *h = c->hdr;
    uint32_t b = h->free_block;
    if (b == NIL) return NIL;
    tx32(c, &h->free_block, block_at(c, b)->link_a);
    tx32(c, &h->blocks, h->blocks + 1);
    return b;
}

static void descriptor_push(struct core *c, uint32_t b)
{
    struct header *h = c->hdr;
    struct block *k = block_at(c, b);
    tx16(c, &k->state, B_UNUSED);
    tx32(c, &k->gen, k->gen + 1);
    tx32(c, &k->link_a, h->free_block);
    tx32(c, &h->free_block, b);
    tx32(c, &h->blocks, h->blocks - 1);
}

uint32_t extent_take(struct core *c, uint32_t len)
{
    struct header *h = c->hdr;
    uint32_t bin = find(c, len);
    if (bin == NIL) return NIL;
    uint32_t b = h->bin[bin];
    struct block *k = block_at(c, b);
    if (k->state != B_FREE || k->len < len) { c->bad = true; return NIL; }
    uint32_t rest = NIL;
    if (k->len > len && (rest = descriptor_pop(c)) == NIL) return NIL;   /* the table is full: pressure */
    bin_remove(c, b);
    if (rest != NIL) {
        struct block *r = block_at(c, rest);
        tx32(c, &r->off, k->off + len);
        tx32(c, &r->len, k->len - len);
        tx32(c, &r->phys_prev, b);
        tx32(c, &r->phys_next, k->phys_next);
        tx16(c, &r->state, B_FREE);
        if (k->phys_next != NIL) tx32(c, &block_at(c, k->phys_next)->phys_prev, rest);
        tx32(c, &k->phys_next, rest);
        tx32(c, &k->len, len);
        bin_insert(c, rest);
    }
    tx16(c, &k->state, B_WRITING);
    tx32(c, &k->link_a, NIL);
    tx32(c, &k->link_b, NIL);
    tx32(c, &k->holds, NIL);
    tx32(c, &k->refs, 0);
    tx32(c, &k->chunk, NIL);
    tx32(c, &h->used_grans, h->used_grans + len);
    return b;
}

/* Join `b` with its upper neighbour, which is free and in no bin. */
static void absorb_next(struct core *c, uint32_t b)
{
    struct block *k = block_at(c, b);
    uint32_t n = k->phys_next;
    struct block *m = block_at(c, n);
    SOUND(c, m->off == k->off + k->len && m->phys_prev == b, "neighbours touch");
    tx32(c, &k->len, k->len + m->len);
    tx32(c, &k->phys_next, m->phys_next);
    if (m->phys_next != NIL) tx32(c, &block_at(c, m->phys_next)->phys_prev, b);
    descriptor_push(c, n);
}

void extent_give(struct core *c, uint32_t b)
{
    struct header *h = c->hdr;
    struct block *k = block_at(c, b);
    SOUND(c, k->state == B_WRITING || k->state == B_PUBLISHED, "free of an allocated extent");
    SOUND(c, k->holds == NIL && k->chunk == NIL, "free of an extent nobody uses");
    tx32(c, &h->used_grans, h->used_grans - k->len);
    tx32(c, &k->gen, k->gen + 1);
    tx16(c, &k->state, B_FREE);
    if (k->phys_next != NIL && block_at(c, k->phys_next)->state == B_FREE) {
        bin_remove(c, k->phys_next);
        absorb_next(c, b);
    }
    if (k->phys_prev != NIL && block_at(c, k->phys_prev)->state == B_FREE) {
        b = k->phys_prev;
        bin_remove(c, b);
        absorb_next(c, b);
    }
    bin_insert(c, b);
    PUT(&h->freed, h->freed + 1);      /* unlogged: only ever compared for "has it moved" */
    c->frees++;
    c->wake |= 1;
}

bool extent_add_region(struct core *c, uint32_t region)
{
    struct header *h = c->hdr;
    struct region *r = region_at(c, region);
    uint32_t b = descriptor_pop(c);
    if (b == NIL) return false;
    struct block *k = block_at(c, b);
    uint32_t len = (uint32_t)(r->bytes >> c->align_shift);
    tx32(c, &k->off, region * c->stride_grans);
    tx32(c, &k->len, len);
    tx32(c, &k->phys_prev, NIL);
    tx32(c, &k->phys_next, NIL);
    tx16(c, &k->state, B_FREE);
    bin_insert(c, b);
    tx32(c, &r->first, b);
    tx32(c, &h->ready_grans, h->ready_grans + len);
    PUT(&h->freed, h->freed + 1);      /* unlogged: as above */
    c->wake |= 1;
    return true;
}
