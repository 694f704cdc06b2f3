/* linux.c -- mappings, fork detection, liveness, futexes, NUMA. No shared state of ours in here.
 *
 * Liveness is judged by pidfd and start time, never by heartbeats (a paused process resumes inside
 * shared memory) nor by kill(pid, 0) (pids are re-used). Any error or doubt means alive. */
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/mempolicy.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "linux.h"
#include "../include/shmcache.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

uint64_t os_realtime_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- fork ------------------------------------------------------------------------------------ */

/* Globals: the atfork registry of style rule R19. `word` lies in a page that the kernel wipes in a
 * forked child (also one made by raw clone); `generation` is copied and then moved on. */
enum { GUARDED_MAX = 1024 };
static uint64_t *word;
static uint64_t generation = 1;
static int guarded[GUARDED_MAX];          /* fd + 1; 0: free */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void child_begins(void)
{
    /* the only thread there is, so no race: a fork between two steps below would give two children one number */
    generation++;
    __atomic_store_n(word, generation, __ATOMIC_RELEASE);
    for (int i = 0; i < GUARDED_MAX; i++) {
        if (guarded[i]) close(guarded[i] - 1);
        guarded[i] = 0;
    }
}

static void fork_init(void)
{
    uint64_t *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || madvise(p, 4096, MADV_WIPEONFORK)) abort();  /* Linux < 4.14: not supported */
    *p = generation;
    __atomic_store_n(&word, p, __ATOMIC_RELEASE);     /* last: a thread that sees it empty takes itself for a clone */
    pthread_atfork(NULL, NULL, child_begins);
}

uint64_t os_generation(void)
{
    uint64_t *page = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
    if (__builtin_expect(!page, 0)) {
        pthread_once(&once, fork_init);
        page = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
    }
    uint64_t w = __atomic_load_n(page, __ATOMIC_ACQUIRE);
    if (__builtin_expect(w != 0, 1)) return w;
    /* a child made by raw clone, which runs no atfork handler: its threads agree on the next generation */
    uint64_t next = generation + 1, none = 0;
    if (__atomic_compare_exchange_n(page, &none, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        generation = next;
        return next;
    }
    return none;
}

static void guard_swap(int from, int to)
{
    for (int i = 0; i < GUARDED_MAX; i++) {
        int want = from;
        if (__atomic_compare_exchange_n(&guarded[i], &want, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return;
    }
}

void shmc_fd_set(shmc_fd *cell, int fd)
{
    cell->generation = os_generation();
    guard_swap(0, fd + 1);
    __atomic_store_n(&cell->fd, fd, __ATOMIC_RELEASE);
}

void shmc_fd_close(shmc_fd *cell)
{
    int fd = __atomic_exchange_n(&cell->fd, -1, __ATOMIC_ACQ_REL);
    if (fd < 0 || cell->generation != os_generation()) return;      /* in a forked child it is closed already */
    guard_swap(fd + 1, 0);
    /* a child forked between open and guard may share the description: its locks end here all the same */
    struct flock all = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
    fcntl(fd, F_OFD_SETLK, &all);
    close(fd);
}

bool os_can_lock(void)
{
    void *head = NULL;
    size_t len = 0;
    if (syscall(SYS_get_robust_list, 0, &head, &len) || !head) return false;
    /* A robust mutex stores the TID that libc believes this thread to have. */
    pthread_mutexattr_t a;
    pthread_mutex_t m;
    uint32_t tid = 0;
    if (pthread_mutexattr_init(&a)) return false;
    pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    if (!pthread_mutex_init(&m, &a)) {
        if (!pthread_mutex_lock(&m)) {
            memcpy(&tid, &m, sizeof tid);
            pthread_mutex_unlock(&m);
        }
        pthread_mutex_destroy(&m);
    }
    pthread_mutexattr_destroy(&a);
    return (tid & 0x3fffffffu) == (uint32_t)syscall(SYS_gettid);
}

/* ---- liveness -------------------------------------------------------------------------------- */

/* stat_fields -- state, start time (field 22) and start of stack (28) from /proc/PID/stat, which
 * stand after the last ')'. False: cannot tell. */
static bool stat_fields(int32_t pid, char *state, uint64_t *start, uint64_t *stack)
{
    char path[64], buf[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, buf, sizeof buf - 1);
    int saved = errno;
    close(fd);
    errno = saved;
    if (n <= 0) return false;
    buf[n] = 0;
    char *p = strrchr(buf, ')');
    if (!p || p[1] != ' ') return false;
    p += 2;
    *state = *p;
    *start = *stack = 0;
    for (int field = 3; *p; field++) {
        if (field == 22) *start = strtoull(p, NULL, 10);
        if (field == 28) { *stack = strtoull(p, NULL, 10); return true; }
        p = strchr(p, ' ');
        if (!p) return false;
        p++;
    }
    return false;
}

int shmc_self(int32_t *pid, uint64_t *start, uint64_t *stack)
{
    char state;
    *pid = (int32_t)getpid();
    return stat_fields(*pid, &state, start, stack) ? SHMC_OK : SHMC_E_OS;
}

int shmc_liveness(int32_t pid, uint64_t start, uint64_t stack)
{
    if (pid <= 0) return SHMC_ALIVE;
    int saved = errno, verdict = SHMC_ALIVE;
    char state = 0;
    uint64_t start_now = 0, stack_now = 0;
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    int why = errno;
    if (fd < 0 && why == ESRCH) { errno = saved; return SHMC_GONE; }
    bool known = stat_fields(pid, &state, &start_now, &stack_now);   /* after pidfd_open: the same process */
    bool absent = fd < 0 && !known && errno == ENOENT && (why == ENOSYS || why == EPERM);    /* pidfd refused: /proc decides */
    if (absent || (known && start_now != start)) {
        verdict = SHMC_GONE;
    } else if (fd >= 0) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (poll(&p, 1, 0) == 1 && (p.revents & POLLIN)) verdict = SHMC_GONE;
    }
    if (verdict == SHMC_ALIVE && known && state != 'Z' && state != 'X' && stack_now && stack && stack_now != stack)
        verdict = SHMC_EXECED;
    if (fd >= 0) close(fd);
    errno = saved;
    return verdict;
}

/* ---- futexes: shared words, so no FUTEX_PRIVATE ------------------------------------------------ */

void os_futex_wait(uint32_t *w, uint32_t seen, uint64_t timeout_ns)
{
    struct timespec t = {.tv_sec = (time_t)(timeout_ns / 1000000000u), .tv_nsec = (long)(timeout_ns % 1000000000u)};
    syscall(SYS_futex, w, FUTEX_WAIT, seen, &t, NULL, 0);
}
void os_futex_wake(uint32_t *w) { syscall(SYS_futex, w, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0); }

/* ---- mappings ---------------------------------------------------------------------------------- */

void *shmc_map(int fd, uint64_t size, int writable)
{
    void *p = mmap(NULL, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

void *shmc_reserve_space(uint64_t size, uint64_t align)
{
    if (align < 4096) align = 4096;
    uint64_t all = size + align;
    if (all < size) { errno = EINVAL; return NULL; }
    uint8_t *p = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    uint8_t *start = (uint8_t *)(((uintptr_t)p + align - 1) & ~(uintptr_t)(align - 1));
    if (start > p) munmap(p, (size_t)(start - p));
    uint64_t tail = (uint64_t)(p + all - (start + size)) & ~(uint64_t)4095;
    uint8_t *end = (uint8_t *)(((uintptr_t)start + size + 4095) & ~(uintptr_t)4095);
    if (tail && end < p + all) munmap(end, (size_t)(p + all - end));
    return start;
}

int shmc_map_at(void *at, int fd, uint64_t size)
{
    if (mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) return -errno;
    madvise(at, size, MADV_DONTDUMP);      /* a core dump must not hold the cache */
    return 0;
}

int shmc_unmap(void *at, uint64_t size) { return munmap(at, size) ? -errno : 0; }
int shmc_populate(void *at, uint64_t size) { return madvise(at, size, MADV_POPULATE_WRITE) ? -errno : 0; }
int shmc_collapse(void *at, uint64_t size) { return madvise(at, size, MADV_COLLAPSE) ? -errno : 0; }
int shmc_inherit(void *at, uint64_t size) { return madvise(at, size, MADV_DOFORK) ? -errno : 0; }

int shmc_numa_prefer(int node)
{
    /* mbind is not reliable for shared mappings; the policy of the thread that allocates decides */
    unsigned long mask[16] = {0};
    if (node < 0) return syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0UL) ? -errno : 0;
    if (node >= 1024) return -EINVAL;
    mask[node / 64] = 1UL << (node % 64);
    return syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask, 1024UL) ? -errno : 0;
}
