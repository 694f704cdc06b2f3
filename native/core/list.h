/* list.h -- doubly linked lists by index; every store goes through the journal.
 *
 * A list is a head word (and, where given, a tail word) and two link words in each record. The
 * record type differs, so a list is named by a macro over its accessor; bodies stay in one place. */
#ifndef SHMC_LIST_H
#define SHMC_LIST_H
#include "journal.h"

#define LIST_OPS(name, type, at, prev, next)                                                        \
    static inline void name##_push(struct core *c, uint32_t *head, uint32_t i)                      \
    {                                                                                               \
        struct type *r = at(c, i);                                                                  \
        tx32(c, &r->prev, NIL);                                                                     \
        tx32(c, &r->next, *head);                                                                   \
        if (*head != NIL) tx32(c, &at(c, *head)->prev, i);                                          \
        tx32(c, head, i);                                                                           \
    }                                                                                               \
    static inline void name##_unlink(struct core *c, uint32_t *head, uint32_t i)                    \
    {                                                                                               \
        struct type *r = at(c, i);                                                                  \
        uint32_t p = r->prev, n = r->next;                                                          \
        if (p != NIL) { SOUND(c, at(c, p)->next == i, "back link"); tx32(c, &at(c, p)->next, n); }  \
        else { SOUND(c, *head == i, "list head"); tx32(c, head, n); }                               \
        if (n != NIL) { SOUND(c, at(c, n)->prev == i, "forward link"); tx32(c, &at(c, n)->prev, p); } \
    }

LIST_OPS(slot_list, hold, hold_at, sprev, snext)
LIST_OPS(target_list, hold, hold_at, tprev, tnext)
LIST_OPS(bin_list, block, block_at, link_a, link_b)
LIST_OPS(part_list, block, block_at, part_prev, link_b)
LIST_OPS(parked_list, chunk, chunk_at, pprev, pnext)

#endif
