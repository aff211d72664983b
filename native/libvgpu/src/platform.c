/* SPDX-License-Identifier: Apache-2.0 */
#include "platform.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S UINT64_C(1000000000)
#define STACK_BYTES ((size_t)1024 * 1024) /* NVML is called on it */

static void *(*resolver)(const char *);
static int said_level = 1;

void platform_use_resolver(void *(*resolve)(const char *))
{
    __atomic_store_n(&resolver, resolve, __ATOMIC_RELEASE);
}

/* Bound only when something else in the process brings them; the oldest version is exported by every glibc. */
#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#define OLDEST_STACK_SIZE "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OLDEST "GLIBC_2.17"
#define OLDEST_STACK_SIZE "GLIBC_2.17"
#endif
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && defined(OLDEST)
#define OLDEST_BINDING(name, version) __asm__(".symver " #name ", " #name "@" version);
OLDEST_BINDING(pthread_create, OLDEST)
OLDEST_BINDING(pthread_attr_setstacksize, OLDEST_STACK_SIZE)
#endif
#pragma weak pthread_create
#pragma weak pthread_attr_setstacksize

void *platform_resolve(const char *name)
{
    void *(*resolve)(const char *) = __atomic_load_n(&resolver, __ATOMIC_ACQUIRE);
    if (resolve) {
        void *found = resolve(name);
        if (found) return found;
    }
    if (strcmp(name, "pthread_create") == 0) return (void *)&pthread_create;
    if (strcmp(name, "pthread_attr_setstacksize") == 0) return (void *)&pthread_attr_setstacksize;
    return NULL;
}

bool platform_thread(void *(*body)(void *), void *argument)
{
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = NULL;
    int (*set_stack_size)(pthread_attr_t *, size_t) = NULL;
    void *found = platform_resolve("pthread_create");
    memcpy((void *)&create, (void *)&found, sizeof create);
    found = platform_resolve("pthread_attr_setstacksize");
    memcpy((void *)&set_stack_size, (void *)&found, sizeof set_stack_size);
    if (!create) return false;
    /* libc leaves out of the full set what it needs itself (setuid in a process with threads). On Linux sigprocmask sets
       the mask of the calling thread; pthread_sigmask is in libpthread before glibc 2.32, which a program may not link. */
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    if (sigprocmask(SIG_SETMASK, &all, &before) != 0) return false; /* NOLINT(concurrency-mt-unsafe): see above */
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (set_stack_size) set_stack_size(&attributes, STACK_BYTES);
    int failed = create(&thread, &attributes, body, argument);
    if (failed) { /* a program with much thread-local memory needs the stack of its choice */
        pthread_attr_destroy(&attributes);
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        failed = create(&thread, &attributes, body, argument);
    }
    pthread_attr_destroy(&attributes);
    sigprocmask(SIG_SETMASK, &before, NULL); /* NOLINT(concurrency-mt-unsafe): see above */
    return failed == 0;
}

uint64_t platform_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t platform_recent_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

static struct timespec timespec_of(uint64_t duration_ns)
{
    return (struct timespec){.tv_sec = (time_t)(duration_ns / NS_PER_S), .tv_nsec = (long)(duration_ns % NS_PER_S)};
}

void platform_sleep_ns(uint64_t duration_ns)
{
    int saved = errno;
    struct timespec left = timespec_of(duration_ns);
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
    errno = saved;
}

void platform_futex_wait(uint32_t *word, uint32_t expected, uint64_t duration_ns)
{
    int saved = errno;
    struct timespec limit = timespec_of(duration_ns);
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &limit, NULL, 0);
    errno = saved;
}

void platform_futex_wake(uint32_t *word)
{
    int saved = errno;
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    errno = saved;
}

void platform_set_level(int level)
{
    __atomic_store_n(&said_level, level, __ATOMIC_RELAXED);
}

void platform_say(enum platform_level level, const char *format, ...)
{
    if (level != PLATFORM_ERROR && (int)level > __atomic_load_n(&said_level, __ATOMIC_RELAXED)) return;
    int saved = errno;
    char line[512] = "hami: ";
    size_t length = strlen(line);
    va_list arguments;
    va_start(arguments, format);
    int wrote = vsnprintf(line + length, sizeof line - length - 1, format, arguments);
    va_end(arguments);
    if (wrote > 0) {
        length += (size_t)wrote;
        if (length > sizeof line - 2) length = sizeof line - 2;
        line[length++] = '\n';
        if (syscall(SYS_write, STDERR_FILENO, line, length) < 0) {
            /* stderr is closed */
        }
    }
    errno = saved;
}

int platform_open(const char *path, int flags, unsigned mode)
{
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

void platform_close(int file)
{
    int saved = errno;
    syscall(SYS_close, file);
    errno = saved;
}

/* The libc names of stat are younger than the baseline. */
bool platform_find(const char *path, struct platform_file *file)
{
    int saved = errno;
    struct stat status;
    bool found = syscall(SYS_newfstatat, AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) == 0;
    if (found) *file = (struct platform_file){.device = status.st_dev, .inode = status.st_ino};
    errno = saved;
    return found && S_ISREG(status.st_mode);
}

const void *platform_map(const char *path, size_t bytes, struct platform_file *file)
{
    int saved = errno;
    struct stat status;
    void *mapped = MAP_FAILED;
    int opened = platform_open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0);
    if (opened >= 0 && syscall(SYS_fstat, opened, &status) == 0 && S_ISREG(status.st_mode) &&
        (uint64_t)status.st_size >= bytes)
        mapped = mmap(NULL, bytes, PROT_READ, MAP_SHARED, opened, 0);
    if (opened >= 0) platform_close(opened);
    errno = saved;
    if (mapped == MAP_FAILED) return NULL;
    if (file) *file = (struct platform_file){.device = status.st_dev, .inode = status.st_ino};
    return mapped;
}

void platform_unmap(const void *mapped, size_t bytes)
{
    int saved = errno;
    munmap((void *)(uintptr_t)mapped, bytes);
    errno = saved;
}

long platform_read_file(const char *path, char *buffer, size_t size)
{
    int saved = errno;
    long result = 0;
    int file = platform_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
    if (file < 0) {
        result = -errno;
        errno = saved;
        return result;
    }
    size_t length = 0;
    for (;;) {
        long got = syscall(SYS_read, file, buffer + length, size - length);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            result = -errno;
            break;
        }
        if (got == 0) {
            result = (long)length;
            buffer[length] = '\0';
            break;
        }
        length += (size_t)got;
        if (length == size) {
            result = -EFBIG;
            break;
        }
    }
    platform_close(file);
    errno = saved;
    return result;
}
