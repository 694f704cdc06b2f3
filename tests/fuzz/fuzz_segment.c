/* fuzz_segment.c -- any bytes in a control segment: a typed error, violations, or POISONED; never a
 * crash, a hang or a read outside of the file.
 *
 * An input is a list of changes to one of the images in $SHMC_FUZZ_IMAGES (copies of real segments), then
 * a list of calls; or, with the first byte RAW, a whole file:
 *
 *   | image | what | n | n x (table, width, place, place, value x 4) | calls x (call, key, argument) |
 *
 * So a mutation of the input is a mutation of one field, and not of one of a million bytes. Each image
 * is a private mapping of the file between two pages that may not be touched: a read beyond either end is
 * seen, and the kernel makes it as new again by dropping the pages that were written.
 *
 * Linked with libFuzzer (-fsanitize=fuzzer), or with -DALONE by any compiler: then `program SECONDS
 * SEED` makes inputs at random, and `program FILE...` runs those. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../../native/api.h"

enum { RAW = 0xff, MAX_IMAGES = 16, MAX_CHANGES = 15, MAX_CALLS = 24, TABLES = 12 };
enum { LIVE = 1, TAKEOVER = 2 };
#define must(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #cond); abort(); } } while (0)

/* `data` stays as it is in the file; `copy` is looked at, `again` is used and taken over. */
static struct image { uint8_t *data, *copy, *again; uint64_t size; } images[MAX_IMAGES];
static uint32_t n_images;

static uint8_t *fenced(int fd, uint64_t size)
{
    uint8_t *room = mmap(NULL, size + 2 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(room != MAP_FAILED && size % 4096 == 0);
    must(mmap(room + 4096, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0) == room + 4096);
    return room + 4096;
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void load_images(void)
{
    const char *folder = getenv("SHMC_FUZZ_IMAGES");
    DIR *d = folder ? opendir(folder) : NULL;
    char path[4096], *names[MAX_IMAGES];
    must(d && "SHMC_FUZZ_IMAGES names a folder of control segments");
    for (struct dirent *e; (e = readdir(d)) && n_images < MAX_IMAGES;)
        if (e->d_name[0] != '.') names[n_images++] = strdup(e->d_name);
    closedir(d);
    qsort(names, n_images, sizeof *names, by_name);
    for (uint32_t i = 0; i < n_images; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        int fd = open(path, O_RDONLY);
        struct stat st;
        must(fd >= 0 && !fstat(fd, &st));
        uint64_t size = (uint64_t)st.st_size;
        images[i] = (struct image){fenced(fd, size), fenced(fd, size), fenced(fd, size), size};
        close(fd);
        must(shmc_validate(images[i].data, size, NULL, NULL) == SHMC_OK);
        free(names[i]);
    }
    must(n_images);
}

/* ---- the targets -------------------------------------------------------------------------------- */

/* What a read or an attempt may answer. */
static void typed(int rc) { must(rc >= SHMC_E_OS && rc <= SHMC_MORE); }

static void peek_at(const uint8_t *copy, uint64_t size, int rc)
{
    static shmc_chunk_info k[64];
    static shmc_block_info b[64];
    static shmc_hold_info d[64];
    static shmc_namespace_info ns;
    static shmc_event e[64];
    shmc_lock_info lock;
    shmc_region_info region;
    shmc_slot_info slot;
    shmc_stats s;
    uint32_t n, at;
    uint64_t next, lost, own, all, since = 0;
    must((shmc_stats_read(copy, size, &s) == SHMC_OK) == (rc == SHMC_OK));
    must(shmc_peek_stats(copy, size, &s) == rc);
    must(shmc_peek_lock(copy, size, &lock) == rc);
    must(shmc_pins_read(copy, size, 0, &own, &all) == rc && (rc || own <= all));
    for (uint32_t i = 0; i < 4; i++) {
        typed(shmc_peek_slot(copy, size, i, &slot));
        typed(shmc_peek_region(copy, size, i, &region));
        if (shmc_peek_namespace(copy, size, i, &ns) == SHMC_OK) must(ns.name_len <= SHMC_NAME_MAX && ns.desc_len <= SHMC_DESC_MAX);
    }
    for (uint32_t i = 0; i < 40; i++) {                  /* followed as a reader does, for a while */
        if (shmc_events_read(copy, size, since, e, 64, &n, &next, &lost) != SHMC_OK) break;
        must(n <= 64);
        for (uint32_t j = 0; j < n; j++) must(e[j].seq >= since || lost || s.events < since);
        if (!n) break;
        since = next;
    }
    for (at = 0; (n = 0, shmc_peek_holds(copy, size, &at, d, 64, &n)) == SHMC_MORE;) must(n <= 64);
    for (at = 0; (n = 0, shmc_peek_blocks(copy, size, &at, b, 64, &n)) == SHMC_MORE;) must(n <= 64);
    for (at = 0;;) {
        int more = shmc_peek_chunks(copy, size, &at, k, 64, &n);
        must(n <= 64);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t m;
            must(k[i].klen <= SHMC_KEY_MAX);
            must(shmc_peek_parts(copy, size, k[i].chunk, k[i].gen, b, 64, &m) == SHMC_OK && m <= 64);
            typed(shmc_peek_key(copy, size, k[i].ns, k[i].key, k[i].klen, k[i].ktype, k, 0, &m));
        }
        if (more != SHMC_MORE) break;
    }
}

static int look_at(uint8_t *copy, uint64_t size)
{
    char text[400];
    shmc_geometry g;
    shmc_identity id;
    int rc = shmc_validate(copy, size, &g, &id);
    must(rc <= 0 && rc >= SHMC_E_OS);
    peek_at(copy, size, rc);
    int v = shmc_verify_copy(copy, size, text, sizeof text);
    must(rc == 0 ? v >= 0 : v < 0);
    must(v < 0 || strlen(text) < sizeof text);
    return v;
}

/* An attachment and some calls. Once POISONED, every later call must say so. */
static void use(uint8_t *copy, uint64_t size, const uint8_t *calls, size_t n)
{
    shmc *h = shmc_new(copy, size, 1000000);
    if (!h) return;
    shmc_owner *o[4], *l = shmc_owner_new(h, 4);
    shmc_part p[4];
    shmc_reap_report report;
    static shmc_key_record records[64];
    uint8_t out[8], meta[8] = {0};
    uint32_t u = 0, cursor = 0, dropped;
    uint64_t removed = 0;
    int rc = shmc_attach(h, 0, "fuzz");
    typed(rc);
    for (int i = 0; i < 4; i++) o[i] = shmc_owner_new(h, 1);
    bool poisoned = false;
    for (size_t c = 0; rc == 0 && c < MAX_CALLS && 3 * c + 3 <= n; c++) {
        const uint8_t *call = calls + 3 * c;
        uint8_t name[8] = {'k', call[1]};                /* the images have keys k0, k1 ... */
        uint8_t four[8] = {'k', call[1], 'k', (uint8_t)(call[1] + 1), 'k', '0', 'k', '1'};
        const shmc_keys one = {.data = name, .n = 1, .klen = 2, .ktype = 1}, many = {.data = four, .n = 4, .klen = 2, .ktype = 1};
        uint32_t ns = call[2] % 3, i = call[2] / 4 % 4;
        int got = 0;
        bool locks = true;                               /* the others may find nothing to do, or an owner that is empty */
        switch (call[0] % 20) {
        case 0: got = shmc_alloc(h, ns, 1 + call[1] * 4096u, meta, 8, 1, SHMC_F_NO_GROW, &o[i], &p[i], &u); break;
        case 1: got = shmc_alloc(h, ns, 1 + call[1] * 1024u, meta, 8, 4, SHMC_F_NO_GROW | (call[2] & 64 ? SHMC_F_NO_EVICT : 0), o, p, &u); break;
        case 2: got = shmc_put(h, ns, &one, &o[i], call[2] & 1, call[2] & 128 ? &one : NULL, out); break;
        case 3: got = shmc_get(h, ns, &one, call[2] & 1, &o[i], &p[i]); break;
        case 4: got = shmc_lookup(h, ns, &many, SHMC_F_PIN | SHMC_F_TOUCH, call[2], l, &u); break;
        case 5: got = shmc_release(h, &o[i], 1); locks = false; break;
        case 6: got = shmc_release(h, &l, 1); locks = false; break;
        case 7: got = shmc_pin(h, ns, &many, call[2] & 64, out); break;
        case 8: got = shmc_unpin(h, ns, &many, out); break;
        case 9: got = shmc_remove(h, ns, &many, out); break;
        case 10: got = shmc_touch(h, ns, &many); break;
        case 11: got = shmc_clear(h, ns, &cursor, &removed); cursor = 0; break;
        case 12: got = shmc_reserve(h, ns, &one, call[2] & 1, 4096, meta, 8, SHMC_F_NO_GROW, o[i], &p[i], &u); break;
        case 13: got = shmc_bump(h, ns, &u); break;
        case 14: got = shmc_scan_keys(h, &cursor, 0xffffffffu, records, 64, &u); cursor = 0; break;
        case 15: got = shmc_reap(h, &report); locks = false; break;
        case 16: got = shmc_step(h); locks = false; break;
        case 17: got = shmc_namespace(h, "more", 4, 1 + call[1] % 3u, NULL, 0, 0, &u); break;
        case 18: got = shmc_lookup_get(h, ns, l, call[1] % 4, 0, o[i], &p[i]); locks = false; break;
        case 19: got = shmc_leading(h, ns, &many, -1, 0, 0, &u); break;
        }
        typed(got);
        if (poisoned && locks) must(got < 0);
        poisoned |= got == SHMC_E_POISONED;
    }
    for (int i = 0; i < 4; i++) shmc_owner_free(o[i]);
    shmc_owner_free(l);
    typed(shmc_detach(h, 0, &dropped));
    shmc_free(h);
}

/* ---- one input ---------------------------------------------------------------------------------- */

/* Where records of use are, so that changes meet them: start and span of each table, the whole file last. */
static void change(const struct image *m, uint8_t *copy, const uint8_t *c)
{
    const struct header *h = (const struct header *)m->data;
    const uint64_t at[TABLES] = {0, offsetof(struct header, acquisitions), offsetof(struct header, journal), h->at_slots, h->at_namespaces, h->at_regions,
                                 h->at_buckets, h->at_part_buckets, h->at_chunks, h->at_blocks, h->at_holds, h->at_events};
    const uint64_t span[TABLES] = {offsetof(struct header, lock), 512, 256, 3 * sizeof(struct slot), 3 * sizeof(struct namespace), 4 * sizeof(struct region),
                                   1024, 4096, 32 * sizeof(struct chunk), 48 * sizeof(struct block), 32 * sizeof(struct hold), 4096};
    uint64_t place = (uint64_t)(c[2] | c[3] << 8), width = (uint64_t)1 << c[1] % 4, where;
    if (c[0] % (TABLES + 1) == TABLES) where = place * 4 * (1 + c[1] / 4u) % m->size;
    else where = at[c[0] % (TABLES + 1)] + place % span[c[0] % (TABLES + 1)];
    where -= where % width;
    uint64_t value = 0;
    memcpy(&value, c + 4, 4);
    if (width == 8 && c[1] & 4) value = value << 32 | value;
    if (where + width > m->size) return;
    if (c[1] & 8) for (uint64_t i = 0; i < width; i++) copy[where + i] = (uint8_t)(copy[where + i] + c[4 + i % 4]);   /* moved, not replaced */
    else memcpy(copy + where, &value, width);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!n_images) load_images();
    if (size < 3) return 0;
    if (data[0] == RAW) {
        void *file;                                      /* of exactly its size: the address sanitizer watches its edges */
        must(!posix_memalign(&file, 4096, size - 1));
        memcpy(file, data + 1, size - 1);
        look_at(file, size - 1);
        must(!shmc_new(file, size - 1, 1));              /* too short for any plan */
        free(file);
        return 0;
    }
    const struct image *m = &images[data[0] % n_images];
    const uint8_t *end = data + size, *at = data + 3;
    must(!madvise(m->copy, m->size, MADV_DONTNEED) && !madvise(m->again, m->size, MADV_DONTNEED));
    for (uint32_t n = data[2] % (MAX_CHANGES + 1); n > 0 && end - at >= 8; n--, at += 8) {
        change(m, m->copy, at);
        change(m, m->again, at);
    }
    look_at(m->copy, m->size);
    if (!(data[1] & (LIVE | TAKEOVER))) return 0;
    /* live, the mutex is spared: it is libc's, which may abort */
    memcpy(m->again + offsetof(struct header, lock), m->data + offsetof(struct header, lock), sizeof(pthread_mutex_t));
    if (data[1] & TAKEOVER) typed(shmc_takeover(m->again, m->size, 7, 8));
    if (data[1] & LIVE) use(m->again, m->size, at, (size_t)(end - at));
    look_at(m->again, m->size);
    return 0;
}

#ifdef ALONE
static uint64_t rnd(uint64_t *s)
{
    uint64_t z = (*s += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static size_t invent(uint8_t *in, uint64_t *s)
{
    static const uint32_t USUAL[] = {0, 1, 2, 3, 0xffffffffu, 0x7fffffffu, 0xffff, 256, 4096};
    size_t n = 3;
    in[0] = (uint8_t)(rnd(s) % n_images);
    in[1] = (uint8_t)(rnd(s) % 4);
    in[2] = (uint8_t)(rnd(s) % 6);
    for (uint32_t i = 0; i < in[2]; i++, n += 8) {
        uint32_t value = rnd(s) % 2 ? USUAL[rnd(s) % (sizeof USUAL / sizeof *USUAL)] : (uint32_t)(rnd(s) >> rnd(s) % 32);
        uint64_t head = rnd(s);
        memcpy(in + n, &head, 4);
        memcpy(in + n + 4, &value, 4);
    }
    for (uint64_t c = rnd(s) % MAX_CALLS; c > 0; c--, n += 3) {
        in[n] = (uint8_t)rnd(s);
        in[n + 1] = (uint8_t)('0' + rnd(s) % 12);
        in[n + 2] = (uint8_t)rnd(s);
    }
    return n;
}

int main(int argc, char **argv)
{
    static uint8_t in[1 << 16];
    load_images();
    if (argc == 3 && atoi(argv[1]) > 0) {
        uint64_t s = strtoull(argv[2], NULL, 0), runs = 0, end = os_now_ns() + (uint64_t)atoi(argv[1]) * 1000000000u;
        for (; os_now_ns() < end; runs++) {
            uint64_t before = s;
            size_t n = invent(in, &s);
            alarm(20);                                   /* nothing in here may hang */
            if (getenv("SHMC_FUZZ_SAY")) fprintf(stderr, "state %llu\n", (unsigned long long)before);
            LLVMFuzzerTestOneInput(in, n);
        }
        printf("%llu runs\n", (unsigned long long)runs);
        return 0;
    }
    for (int i = 1; i < argc; i++) {
        FILE *f = fopen(argv[i], "rb");
        must(f);
        alarm(20);
        LLVMFuzzerTestOneInput(in, fread(in, 1, sizeof in, f));
        fclose(f);
    }
    printf("%d runs\n", argc - 1);
    return 0;
}
#endif
