/* cases.h -- the operations whose every crash point is tried, and the worlds they start from. */
#ifndef TESTS_CASES_H
#define TESTS_CASES_H
#include "world.h"

enum case_flag {
    ONE = 1,         /* one transaction at most: the state before or the state after, nothing between */
    NONE = 2,        /* changes no logical state at all */
    ALL = 4,         /* tried under every policy; else under LRU */
    TAKEOVER = 8     /* recovery is another takeover, not a lock */
};

struct crash_case {
    const char *name, *function;
    void (*world)(uint32_t policy);   /* by the survivor, once */
    void (*setup)(void);              /* by the victim, before it is armed; NULL: nothing */
    void (*op)(void);                 /* the victim's one call of `function` */
    uint32_t flags;
};
extern const struct crash_case CASES[];
extern const uint32_t N_CASES;

/* Public functions that are not in CASES, each with the reason. */
struct exclusion { const char *function, *reason; };
extern const struct exclusion EXCLUDED[];
extern const uint32_t N_EXCLUDED;

void cases_reset(void);        /* before a new world: forget the objects of the last one */

/* want -- a result of the operation itself; in pairs it is not known */
#define want(a, b) do { long long is_ = (long long)(a); if (!lenient && is_ != (long long)(b)) die(__FILE__, __LINE__, #a " == " #b, is_); } while (0)

#endif
