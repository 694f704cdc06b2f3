/* fake_cudart.c -- stands in for the CUDA runtime: keeps a table of registered ranges, as CUDA does, and
 * writes every call to the file FAKE_CUDART_LOG, one line each:
 *
 *     enter PID ADDRESS SIZE FLAGS        cudaHostRegister has begun
 *     register PID ADDRESS SIZE CODE
 *     unregister PID ADDRESS CODE MAPPED  MAPPED: whether all of the range was still mapped
 *     clear PID CODE                      cudaGetLastError, and what it cleared
 *
 * FAKE_CUDART_FAIL_AT=k and FAKE_CUDART_CODE=c: the k-th registration returns c. FAKE_CUDART_UNREGISTER=c:
 * unregistering returns c. FAKE_CUDART_GATE=path and FAKE_CUDART_GATE_AT=k: from the k-th on, a registration
 * ends once that file exists. FAKE_CUDART_DONTFORK: registered memory is kept from children, as drivers may.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { INVALID = 1, ALREADY = 712, NOT_REGISTERED = 713, MOST = 4096, GATE_SECONDS = 60 };

static struct { uintptr_t at; size_t size; } table[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int calls;
static __thread int last_error;

static int number(const char *name)
{
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
    const char *path = getenv("FAKE_CUDART_LOG");
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (fd < 0) return;
    va_list args;
    va_start(args, format);
    vdprintf(fd, format, args);
    va_end(args);
    close(fd);
}

static int is_mapped(uintptr_t at, size_t size)
{
    static unsigned char vector[1 << 20];
    return size / 4096 <= sizeof vector && mincore((void *)at, size, vector) == 0;
}

static void wait_at_gate(int call)
{
    const char *path = getenv("FAKE_CUDART_GATE");
    if (!path || call < number("FAKE_CUDART_GATE_AT")) return;
    for (int i = 0; i < GATE_SECONDS * 500 && access(path, F_OK); i++) usleep(2000);
}

static int enter(uintptr_t at, size_t size, int call)
{
    if (call == number("FAKE_CUDART_FAIL_AT")) return number("FAKE_CUDART_CODE");
    if (at % 4096 || size == 0 || !is_mapped(at, size)) return INVALID;
    int slot = -1;
    for (int i = 0; i < MOST; i++) {
        if (table[i].size && at < table[i].at + table[i].size && table[i].at < at + size) return ALREADY;
        if (!table[i].size && slot < 0) slot = i;
    }
    table[slot].at = at;
    table[slot].size = size;
    if (getenv("FAKE_CUDART_DONTFORK")) madvise((void *)at, size, MADV_DONTFORK);
    return 0;
}

int cudaHostRegister(void *pointer, size_t size, unsigned flags)
{
    uintptr_t at = (uintptr_t)pointer;
    pthread_mutex_lock(&lock);
    int call = ++calls;
    pthread_mutex_unlock(&lock);
    say("enter %d %lu %zu %u\n", getpid(), (unsigned long)at, size, flags);
    wait_at_gate(call);
    pthread_mutex_lock(&lock);
    int code = enter(at, size, call);
    pthread_mutex_unlock(&lock);
    say("register %d %lu %zu %d\n", getpid(), (unsigned long)at, size, code);
    if (code) last_error = code;
    return code;
}

int cudaHostUnregister(void *pointer)
{
    uintptr_t at = (uintptr_t)pointer;
    int code = number("FAKE_CUDART_UNREGISTER"), mapped = 0;
    pthread_mutex_lock(&lock);
    int found = 0;
    for (int i = 0; i < MOST; i++)
        if (table[i].size && table[i].at == at) {
            found = 1;
            mapped = is_mapped(at, table[i].size);
            if (!code) table[i].size = 0;
        }
    pthread_mutex_unlock(&lock);
    if (!code && !found) code = NOT_REGISTERED;
    say("unregister %d %lu %d %d\n", getpid(), (unsigned long)at, code, mapped);
    if (code) last_error = code;
    return code;
}

int cudaGetLastError(void)
{
    int code = last_error;
    last_error = 0;
    say("clear %d %d\n", getpid(), code);
    return code;
}

/* For tests: what this thread would find, without clearing it. */
int cudaPeekAtLastError(void) { return last_error; }
