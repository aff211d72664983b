/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The little that the limiter needs from the operating system beyond libc symbols of glibc 2.17.
 *
 * Threads are found at run time, because their symbol moved between libraries and versions. No errno is changed for the
 * caller by anything here but where said. Times in nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef VGPU_PLATFORM_H
#define VGPU_PLATFORM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How to find a function of libc or libpthread by name at run time. The module that resolves symbols sets
   it once, before the first CUDA call; without it only functions that are already bound are found. */
void platform_use_resolver(void *(*resolve)(const char *name));
void *platform_resolve(const char *name);

/* A detached thread with a small stack and every signal blocked. false: none could be started. */
bool platform_thread(void *(*body)(void *), void *argument);

uint64_t platform_now_ns(void);

/* The same, up to one tick of the kernel old (1 to 10 ms), for a third of the cost. */
uint64_t platform_recent_ns(void);
void platform_sleep_ns(uint64_t duration_ns);

/* Wait while *word == expected, at most duration_ns. Words in shared memory wake across processes. */
void platform_futex_wait(uint32_t *word, uint32_t expected, uint64_t duration_ns);
void platform_futex_wake(uint32_t *word);

enum platform_level { PLATFORM_ERROR = 0, PLATFORM_NOTICE = 2, PLATFORM_INFO = 3, PLATFORM_DEBUG = 4 };

/* One line to stderr in one write, "hami: " before it. Errors always, the others up to the level set (default 1). */
void platform_set_level(int level);
__attribute__((format(printf, 2, 3))) void platform_say(enum platform_level level, const char *format, ...);

/* System calls at which a thread cannot be cancelled, so that no lock held here stays held. errno as usual. */
int platform_open(const char *path, int flags, unsigned mode);
void platform_close(int file);

/* One file, whatever its name is now. */
struct platform_file {
    uint64_t device;
    uint64_t inode;
};

/* The file that has this name; false: none has, or the last component is a link. */
bool platform_find(const char *path, struct platform_file *file);

/* Map the first `bytes` of a regular file, read-only and shared with its writer; no descriptor stays open. NULL: there is no
   such file, or it is shorter. `file` may be NULL. */
const void *platform_map(const char *path, size_t bytes, struct platform_file *file);
void platform_unmap(const void *mapped, size_t bytes);

/* Whole small file into `buffer`, zero-terminated; bytes read, or -errno. -EFBIG if it does not fit. */
long platform_read_file(const char *path, char *buffer, size_t size);

#endif
