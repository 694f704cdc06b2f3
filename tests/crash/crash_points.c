/* crash_points.c -- die at every crash point of every operation, and look at what the next one finds.
 *
 *   record:   a child runs the operation once; at each crash point it notes the digest of the state
 *             before the transaction that is open there, or after it when it is final. That is what
 *             must be found by whoever comes after a death at that point.
 *   k = 1..:  restore the world; a child makes its own attachment, prepares, and kills itself at its
 *             k-th crash point; the survivor takes the lock (which recovers), compares the digest,
 *             verifies, reaps, drains, verifies again, and goes on working.
 *   second:   the same, but the one who recovers dies as well, at every point of the recovery.
 *   pairs:    two victims at once, each dying at a random point; no digest, all invariants.
 *
 * Options: --full, all second deaths; --seed S; --every N, a sample of the points (sanitizers); --pairs N;
 * --shard I/N; --only TEXT; --stop at the first failure; --list. The last line is a summary; status 1 when anything was wrong.
 */
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "cases.h"

enum { MAX_POINTS = 1 << 16, PAIR_ROUNDS = 20, CHILD_S = 30, SHOWN = 20 };

/* Written by children, read by the parent. */
struct result {
    uint64_t before, after, expected[MAX_POINTS], events[MAX_POINTS];
    uint32_t points, gate;
    uint32_t words[TX_N];                  /* most journalled words of one transaction, by op */
};
static struct result *R;

static struct options { bool full, list, stop; uint32_t every, shard, shards, pairs; uint64_t seed; const char *only; } opt = {.every = 1, .shards = 1, .pairs = 40, .seed = 1};
static struct totals { uint64_t runs, points, deaths, second, pairs, failures, failed_runs, corrupt; } total;

/* ---- the hook ---------------------------------------------------------------------------------- */

static enum how { OFF, RECORD, KILL } mode;
static uint64_t at_point, die_at, last_whole, last_events;
static bool was_open, counted;

/* What recovery must find after a death here: the state when the transaction began, or, once its count
 * has gone back to zero, the state now. Not simply "now" whenever the count is zero: the first store
 * of a transaction that forgot its record would then pass for a state of its own. */
static void note(const struct header *h)
{
    bool open = h->seq & 1;
    if (h->journal.count) counted = true;
    else if (!open || !was_open || counted) {
        last_whole = digest(W.base, W.size);
        last_events = h->event_head;
    }
    if (!open) counted = false;
    was_open = open;
    R->expected[at_point] = last_whole;
    R->events[at_point] = last_events;
    R->points = (uint32_t)at_point;
}

void crash_point(void)
{
    if (mode == OFF) return;
    const struct header *h = (const struct header *)W.base;
    uint32_t words = h->journal.count, op = h->journal.op;
    at_point++;
    if (op < TX_N && words > R->words[op]) R->words[op] = words;
    if (mode == RECORD) {
        must(at_point < MAX_POINTS);
        note(h);
    } else if (at_point == die_at) {
        syscall(SYS_kill, getpid(), SIGKILL);
        for (;;) pause();
    }
}

/* ---- the survivor and the images ----------------------------------------------------------------- */

static shmc *survivor, survivor_image;
static uint8_t *image, *dead_image;
static int32_t me;

static void build(const struct crash_case *k, uint32_t policy)
{
    alarm(CHILD_S * 4);
    cases_reset();
    k->world(policy);
    survivor = W.h;
    survivor_image = *survivor;
    image = malloc(W.size);
    dead_image = malloc(W.size);
    must(image && dead_image);
    memcpy(image, W.base, W.size);
}

static void unbuild(void)
{
    free(image);
    free(dead_image);
    world_drop();
}

static void restore(const uint8_t *from)
{
    memcpy(W.base, from, W.size);
    *survivor = survivor_image;
    W.h = survivor;
}

/* ---- victims -------------------------------------------------------------------------------------- */

static _Noreturn void victim(const struct crash_case *k, enum how how, uint64_t point)
{
    alarm(CHILD_S);
    __atomic_fetch_add(&R->gate, 1, __ATOMIC_RELAXED);
    world_join("victim");
    if (k->setup) k->setup();
    while (lenient && __atomic_load_n(&R->gate, __ATOMIC_RELAXED) < 2) usleep(50);
    at_point = 0;
    die_at = point;
    if (how == RECORD) R->before = last_whole = digest(W.base, W.size);
    mode = how;
    k->op();
    mode = OFF;
    if (how == RECORD) R->after = digest(W.base, W.size);
    _exit(0);
}

static pid_t start(const struct crash_case *k, enum how how, uint64_t point)
{
    pid_t pid = fork();
    must(pid >= 0);
    if (pid == 0) victim(k, how, point);
    return pid;
}

/* 1: killed, as planned; 0: came through; -1: something else */
static int end_of(pid_t pid)
{
    int status;
    must(waitpid(pid, &status, 0) == pid);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return 1;
    return WIFEXITED(status) && (WEXITSTATUS(status) == 0 || (lenient && WEXITSTATUS(status) == 3)) ? 0 : -1;
}

/* ---- judging --------------------------------------------------------------------------------------- */

static void complain(const char *what, const char *why)
{
    if (total.failures++ < SHOWN) fprintf(stderr, "%s: %s\n", what, why);
    if (opt.stop) exit(1);
}

/* The next one works: stores a key of its own, finds it, removes it. Memory may be short: all is held. */
static void goes_on(const char *what)
{
    struct obj x = {0};
    int rc = try_alloc(&x, W.one, 2, 777, 0, SHMC_F_NO_GROW);
    if (rc != SHMC_OK && rc != SHMC_FULL) complain(what, "the survivor cannot allocate");
    if (rc == SHMC_OK) {
        rc = try_put(&x, W.one, 777, 0);
        if (rc != 1 && rc != 0) complain(what, "the survivor cannot put");
        if (rc == 1 && !has(W.one, 777, 0)) complain(what, "the survivor does not find its key");
        if (rc == 1 && !del(W.one, 777)) complain(what, "the survivor cannot remove its key");
    }
    if (x.o) drop(&x);
}

static void unsound_is_corrupt(const char *what)
{
    if (!sound(what)) return;
    total.corrupt++;
    complain(what, "unsound after recovery");
}

static void judge_quiet(const char *what)
{
    shmc_reap_report report;
    uint64_t before = total.failures;
    unsound_is_corrupt(what);
    if (shmc_reap(W.h, &report) != SHMC_OK) { complain(what, "the dead one cannot be reaped"); return; }
    int rc, n = 0;
    while ((rc = shmc_step(W.h)) == SHMC_MORE && n < 10000) n++;
    if (rc != SHMC_OK) complain(what, "cannot be drained");
    if (sound(what)) complain(what, "unsound after reaping");
    if (total.failures != before) return;
    if (settled(me, what)) complain(what, "not settled after reaping");
    goes_on(what);
    if (total.deaths % 8 == 0 && sound(what)) complain(what, "unsound after going on");
}

/* What reaping makes of a state depends on the state alone. Outside --full each state that was found
 * right (by digest and verify) is reaped the first time it is met, and then at a sample of the points. */
static bool worth_reaping(uint64_t expected)
{
    static uint64_t last[4], n;
    for (int i = 0; i < 4; i++) if (last[i] == expected) return opt.full || total.deaths % 16 == 0;
    last[n++ % 4] = expected;
    return true;
}

static void judge(const char *what, uint64_t expected)
{
    uint32_t wake;
    uint64_t before = total.failures;
    int rc = lock_acquire(&survivor->core, &survivor->stuck, TX_READ, SECOND);
    if (rc) { complain(what, "the survivor gets no lock"); return; }
    if (digest(W.base, W.size) != expected) complain(what, "neither the state before nor the one after");
    if (lock_release(&survivor->core, &wake)) complain(what, "poisoned");
    if (total.failures != before || worth_reaping(expected)) judge_quiet(what);
    else unsound_is_corrupt(what);
}

/* After a takeover that died, whoever comes next must take over too, whatever its namespaces. */
static void judge_takeover(const char *what, uint64_t final)
{
    shmc_identity id;
    same(shmc_validate(W.base, W.size, NULL, &id), SHMC_OK);
    if (memcmp(W.base, image, W.size) && id.pid_ns == 1) complain(what, "begun, and the old namespaces may still come in without a takeover");
    if (shmc_takeover(W.base, W.size, 7, 8) != SHMC_OK) { complain(what, "cannot be taken over again"); return; }
    if (digest(W.base, W.size) != final) complain(what, "a second takeover ends elsewhere");
    world_join("new");
    drain_all();
    if (sound(what)) complain(what, "unsound after takeover");
    else if (settled(me, what)) complain(what, "not settled after takeover");
    goes_on(what);
    shmc_free(W.h);
}

/* ---- one operation ----------------------------------------------------------------------------------- */

static bool sampled(uint64_t rate, uint64_t a, uint64_t b)
{
    uint64_t s = opt.seed ^ a << 32 ^ b << 1;
    return rate <= 1 || rnd(&s) % rate == 0;
}

/* Whoever recovers dies too, at point 1, 2, ... of the recovery; the third one finds the same. */
static void second_deaths(const char *what, uint64_t expected)
{
    char name[160];
    memcpy(dead_image, W.base, W.size);
    for (uint64_t j = 1;; j++) {
        restore(dead_image);
        pid_t pid = fork();
        must(pid >= 0);
        if (pid == 0) {
            struct core c;
            struct stuck s = {0};
            alarm(CHILD_S);
            core_bind(&c, W.base, W.size, &W.geo);
            die_at = j;
            mode = KILL;
            lock_acquire(&c, &s, TX_READ, SECOND);
            _exit(0);                                       /* dies holding it all the same */
        }
        int end = end_of(pid);
        snprintf(name, sizeof name, "%s, recovery killed at %llu", what, (unsigned long long)j);
        if (end < 0) complain(name, "the recoverer failed");
        judge(name, expected);
        total.second++;
        if (end != 1) return;
    }
}

static void run_case(const struct crash_case *k, uint32_t policy, uint64_t number)
{
    static const char *POLICY[] = {"lru", "fifo", "mru", "lfu"};
    char what[120];
    uint64_t failures = total.failures;
    build(k, policy);
    memset(R, 0, offsetof(struct result, words));
    restore(image);
    if (end_of(start(k, RECORD, 0)) != 0) { fprintf(stderr, "%s (%s): cannot be recorded\n", k->name, POLICY[policy]); total.failures++; unbuild(); return; }
    if (k->flags & (ONE | NONE))
        for (uint32_t i = 1; i <= R->points; i++)
            if (R->expected[i] != R->before && R->expected[i] != R->after) { complain(k->name, "is not one transaction"); break; }
    if ((k->flags & NONE) && R->before != R->after) complain(k->name, "changes state");
    if (!(k->flags & NONE) && R->before == R->after && policy != SHMC_FIFO) complain(k->name, "changes nothing");
    snprintf(what, sizeof what, "%s (%s)", k->name, POLICY[policy]);
    if (!(k->flags & TAKEOVER)) judge(what, R->after);
    for (uint64_t i = 1; i <= R->points; i++) {
        if (!sampled(opt.every, number, i)) continue;
        restore(image);
        alarm(CHILD_S * 4);
        int end = end_of(start(k, KILL, i));
        snprintf(what, sizeof what, "%s (%s), killed at %llu of %u", k->name, POLICY[policy], (unsigned long long)i, R->points);
        if (end != 1) { complain(what, end ? "failed" : "came through"); continue; }
        total.deaths++;
        if (((const struct header *)W.base)->event_published > R->events[i]) complain(what, "readers without the lock see an event that will be undone");
        if (k->flags & TAKEOVER) { judge_takeover(what, R->after); continue; }
        if (opt.full || sampled(60, number ^ 77, i)) { second_deaths(what, R->expected[i]); continue; }
        judge(what, R->expected[i]);
    }
    total.points += R->points;
    total.runs++;
    total.failed_runs += total.failures != failures;
    unbuild();
}

/* Two victims at once in a world that suits both; one may wait for the other's lock and recover it. */
static void run_pair(uint64_t number)
{
    uint64_t s = opt.seed ^ number << 8;
    const struct crash_case *a = &CASES[rnd(&s) % N_CASES], *b = &CASES[rnd(&s) % N_CASES];
    while (a->flags & TAKEOVER) a = &CASES[rnd(&s) % N_CASES];
    while (b->world != a->world || (b->flags & TAKEOVER)) b = &CASES[rnd(&s) % N_CASES];
    uint32_t policy = (uint32_t)(rnd(&s) % 4);
    char what[160];
    build(a, policy);
    for (int round = 0; round < PAIR_ROUNDS; round++) {
        uint64_t ka = 1 + rnd(&s) % 120, kb = 1 + rnd(&s) % 120;
        restore(image);
        R->gate = 0;
        lenient = true;
        pid_t pa = start(a, KILL, ka), pb = start(b, KILL, kb);
        int ends[2] = {end_of(pa), end_of(pb)};
        lenient = false;
        snprintf(what, sizeof what, "pair: %s at %llu, %s at %llu", a->name, (unsigned long long)ka, b->name, (unsigned long long)kb);
        if (ends[0] < 0 || ends[1] < 0) complain(what, "a victim failed");
        judge_quiet(what);
        total.pairs++;
    }
    unbuild();
}

/* ---- main ---------------------------------------------------------------------------------------------- */

static void parse(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(a, "--full")) opt.full = true;
        else if (!strcmp(a, "--list")) opt.list = true;
        else if (!strcmp(a, "--stop")) opt.stop = true;
        else if (!strcmp(a, "--seed")) { opt.seed = strtoull(v, NULL, 0); i++; }
        else if (!strcmp(a, "--every")) { opt.every = (uint32_t)strtoul(v, NULL, 0); i++; }
        else if (!strcmp(a, "--pairs")) { opt.pairs = (uint32_t)strtoul(v, NULL, 0); i++; }
        else if (!strcmp(a, "--only")) { opt.only = v; i++; }
        else if (!strcmp(a, "--shard") && sscanf(v, "%u/%u", &opt.shard, &opt.shards) == 2) i++;
        else { fprintf(stderr, "unknown option %s\n", a); exit(2); }
    }
}

/* Victim and survivor take turns: on one core a death costs a third. */
static void stay_on_one_core(void)
{
    cpu_set_t all, mine;
    if (sched_getaffinity(0, sizeof all, &all)) return;
    uint32_t skip = opt.shard % (uint32_t)CPU_COUNT(&all);
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &all) && skip-- == 0) {
            CPU_ZERO(&mine);
            CPU_SET(cpu, &mine);
            sched_setaffinity(0, sizeof mine, &mine);
            return;
        }
}

int main(int argc, char **argv)
{
    parse(argc, argv);
    if (opt.list) {
        for (uint32_t i = 0; i < N_CASES; i++) printf("case %s: %s\n", CASES[i].function, CASES[i].name);
        for (uint32_t i = 0; i < N_EXCLUDED; i++) printf("excluded %s: %s\n", EXCLUDED[i].function, EXCLUDED[i].reason);
        return 0;
    }
    me = (int32_t)getpid();
    stay_on_one_core();
    R = mmap(NULL, sizeof *R, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(R != MAP_FAILED);
    uint64_t number = 0, began = os_now_ns();
    for (uint32_t i = 0; i < N_CASES; i++)
        for (uint32_t policy = SHMC_LRU; policy <= (CASES[i].flags & ALL ? SHMC_LFU : SHMC_LRU); policy++, number++)
            if (number % opt.shards == opt.shard && (!opt.only || strstr(CASES[i].name, opt.only))) run_case(&CASES[i], policy, number);
    for (uint32_t i = 0; i < opt.pairs; i++)
        if (i % opt.shards == opt.shard && (opt.every == 1 || i % 8 == 0)) run_pair(i);
    for (uint32_t op = 0; op < TX_N; op++)
        if (R->words[op]) printf("words %s %u\n", tx_op_name(op), R->words[op]);
    printf("operations %llu, points %llu, deaths %llu, second deaths %llu, pairs %llu, failures %llu in %llu operations, corrupt %llu, %.1f s\n",
           (unsigned long long)total.runs, (unsigned long long)total.points, (unsigned long long)total.deaths, (unsigned long long)total.second,
           (unsigned long long)total.pairs, (unsigned long long)total.failures, (unsigned long long)total.failed_runs, (unsigned long long)total.corrupt, (double)(os_now_ns() - began) / 1e9);
    return total.failures != 0;
}
