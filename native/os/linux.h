/* linux.h -- what the core asks of the operating system; knows nothing of the segment. */
#ifndef SHMC_OS_LINUX_H
#define SHMC_OS_LINUX_H
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

/* CLOCK_MONOTONIC, vDSO. The coarse one costs a quarter and has the tick's resolution. */
static inline uint64_t os_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static inline uint64_t os_now_coarse(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
uint64_t os_realtime_ns(void);

/* os_generation -- a number that differs in every forked child; read on every entry (0.4 ns) */
uint64_t os_generation(void);

/* os_can_lock -- false in a thread made by raw clone: no robust list, or a TID that is not its own */
bool os_can_lock(void);

void os_futex_wait(uint32_t *word, uint32_t seen, uint64_t timeout_ns);
void os_futex_wake(uint32_t *word);

#endif
