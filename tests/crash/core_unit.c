/* core_unit.c -- runs the unit tests of the core: all of them, or those whose promise contains an argument.
 *
 * --effort N multiplies random work, --seed S chooses it, --list shows the promises. */
#include <string.h>
#include <unistd.h>
#include "unit.h"

uint32_t effort = 4;
uint64_t seed = 1;

void world_of(uint64_t capacity, uint64_t region_bytes, uint32_t max_chunks, uint32_t policy)
{
    shmc_geometry g = plan(capacity, region_bytes, max_chunks, policy);
    world_make(&g, 0);
    world_join("unit");
    commit_regions(g.n_regions);
    open_namespaces();
}

void world_close(void)
{
    drain_all();
    same(sound("at the end"), 0);
    same(settled((int32_t)getpid(), "at the end"), 0);
    shmc_free(W.h);
    world_drop();
}

shmc_stats stats(void)
{
    shmc_stats s;
    same(shmc_stats_read(W.base, W.size, &s), SHMC_OK);
    must(s.exact);
    return s;
}

static const struct unit *const SUITES[] = {UNIT_EXTENTS, UNIT_KEYS, UNIT_HOLDS, UNIT_POLICY, UNIT_SHARING, UNIT_DAMAGE, UNIT_LATE};

int main(int argc, char **argv)
{
    const char *only = "";
    bool list = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--list")) list = true;
        else if (!strcmp(argv[i], "--effort") && i + 1 < argc) effort = (uint32_t)strtoul(argv[++i], NULL, 0);
        else if (!strcmp(argv[i], "--seed") && i + 1 < argc) seed = strtoull(argv[++i], NULL, 0);
        else only = argv[i];
    }
    uint32_t n = 0;
    for (size_t s = 0; s < sizeof SUITES / sizeof *SUITES; s++)
        for (const struct unit *u = SUITES[s]; u->promise; u++) {
            if (!strstr(u->promise, only)) continue;
            n++;
            if (list) { puts(u->promise); continue; }
            printf("%s\n", u->promise);
            fflush(stdout);
            alarm(60 + 30 * effort);                /* nothing in here may hang */
            u->run();
        }
    if (!list) printf("%u promises kept\n", n);
    return n == 0;
}
