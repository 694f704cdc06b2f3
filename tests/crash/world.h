/* world.h -- a small segment in anonymous memory, and short words for using it in tests.
 *
 * No arena is mapped: the core never touches payload. Every object stored here carries its key and
 * part in its metadata, so that a block under a wrong key is seen without any payload.
 * Calls that must succeed go through `must`, which ends the program with the place.
 */
#ifndef TESTS_WORLD_H
#define TESTS_WORLD_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include "../../native/api.h"
#include "../../native/core/check.h"
#include "../../native/core/events.h"
#include "../../native/core/extents.h"
#include "../../native/core/namespaces.h"
#include "../../native/core/policy.h"

enum { GRAN = 4096, WIDE_PARTS = 40, KEY_BYTES = 8 };
#define SECOND 1000000000ull

struct world {
    uint8_t *base;
    uint64_t size;
    shmc_geometry geo;
    shmc *h;                   /* acts in all calls below */
    uint32_t one, two, wide;   /* namespaces of 1, 2 and WIDE_PARTS parts */
};
extern struct world W;

/* An object: an owner of one hold, and where its bytes are. */
struct obj { shmc_owner *o; shmc_part p; };

_Noreturn void die(const char *file, int line, const char *what, long long value);
/* In pairs of victims the other one may have changed what a preparation finds: it then ends quietly. */
extern bool lenient;
#define must(cond) do { if (!(cond)) die(__FILE__, __LINE__, #cond, 0); } while (0)
#define same(a, b) do { long long got_ = (long long)(a); if (got_ != (long long)(b)) die(__FILE__, __LINE__, #a " == " #b, got_); } while (0)

shmc_geometry plan(uint64_t capacity, uint64_t region_bytes, uint32_t max_chunks, uint32_t policy);
/* world_make -- a fresh mapping, formatted and READY; nothing attached, no region committed */
void world_make(const shmc_geometry *g, int shared);
void world_drop(void);
/* world_join -- one more attachment of this process becomes W.h */
shmc *world_join(const char *label);
void world_open(uint32_t policy);      /* the usual one: 3 regions of 128 granules, 32 chunks, all committed, W.h attached, namespaces made */
void commit_regions(uint32_t n);
void open_namespaces(void);

/* keys: 8 bytes each. The arrays live until the next 8 calls of the same function. */
const shmc_keys *key(uint64_t k);
const shmc_keys *keys(uint64_t first, uint32_t n);
const shmc_keys *keys_of(const uint64_t *k, uint32_t n);

struct obj obj_new(void);
/* try_alloc -- what shmc_alloc says; the object's metadata names (k, part) */
int try_alloc(struct obj *x, uint32_t ns, uint32_t grans, uint64_t k, uint32_t part, uint32_t flags);
struct obj alloc(uint32_t ns, uint32_t grans, uint64_t k, uint32_t part);
int try_put(struct obj *x, uint32_t ns, uint64_t k, uint32_t part);    /* 1 stored, 0 not, or an error */
struct obj put(uint32_t ns, uint32_t grans, uint64_t k, uint32_t part);  /* allocated and published */
void store(uint32_t ns, uint32_t grans, uint64_t k, uint32_t part);      /* and released */
struct obj get(uint32_t ns, uint64_t k, uint32_t part);
int reserve_as(struct obj *x, uint32_t ns, uint32_t grans, uint64_t k, uint32_t part, uint64_t labelled);
int reserve(struct obj *x, uint32_t ns, uint32_t grans, uint64_t k, uint32_t part);
void drop(struct obj *x);
int has(uint32_t ns, uint64_t k, int part);
int del(uint32_t ns, uint64_t k);
int pin(uint32_t ns, uint64_t k, uint64_t lease_ns);
int unpin(uint32_t ns, uint64_t k);
void touch(uint32_t ns, uint64_t k);
shmc_owner *lookup(uint32_t ns, uint64_t first, uint32_t n, uint32_t flags, uint32_t *hits);
void drain_all(void);
/* victims -- the next `n` victims in order, without evicting (policy lists, held ones skipped) */
uint32_t victims(uint64_t *out, uint32_t n);

/* sound -- number of violations; prints them under `what` */
uint32_t sound(const char *what);
/* settled -- invariant 7 and more, once reaped and drained: every allocated extent is a part under its
 * own key, or held by a process of pid `alive`. 0, or the number of complaints, printed. */
uint32_t settled(int32_t alive, const char *what);
/* digest -- of all logical state: no statistics, pids, times, nor the order of free lists */
uint64_t digest(void *base, uint64_t size);
uint64_t rnd(uint64_t *state);

#endif
