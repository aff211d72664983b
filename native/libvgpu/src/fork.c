/* SPDX-License-Identifier: Apache-2.0 */
#include "fork.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif
#ifndef FORK_ADVICE
#define FORK_ADVICE MADV_WIPEONFORK /* tests give one that no kernel knows */
#endif

/* Used until there is a page: nothing is kept in it that a child could be misled by. */
static struct fork_page first_words;
struct fork_page *fork_words = &first_words;
static uint32_t preparing;
static uint32_t last_incarnation;

static void wipe(void)
{
    memset(fork_words, 0, sizeof *fork_words);
}

void fork_prepare(void)
{
    if (__atomic_load_n(&fork_words, __ATOMIC_ACQUIRE) != &first_words) return;
    uint32_t nobody = 0;
    if (!__atomic_compare_exchange_n(&preparing, &nobody, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        /* Another thread prepares it, for some microseconds. Wait for it a limited time: it may be a thread that a fork left. */
        for (int i = 0; i < 1000 && __atomic_load_n(&fork_words, __ATOMIC_ACQUIRE) == &first_words; i++)
            syscall(SYS_sched_yield);
        if (__atomic_load_n(&fork_words, __ATOMIC_ACQUIRE) != &first_words) return;
    }
    size_t bytes = 65536; /* a page of any size in use */
    void *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool wiped = page != MAP_FAILED && madvise(page, bytes, FORK_ADVICE) == 0;
    if (page == MAP_FAILED || !wiped) pthread_atfork(NULL, NULL, wipe);
    if (page == MAP_FAILED) return;
    struct fork_page *expected = &first_words;
    if (!__atomic_compare_exchange_n(&fork_words, &expected, (struct fork_page *)page, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
        munmap(page, bytes);
}

uint32_t fork_incarnation_slow(void)
{
    fork_prepare();
    /* All threads of a new child come to the same number. */
    uint32_t next = __atomic_load_n(&last_incarnation, __ATOMIC_ACQUIRE) + 1;
    uint32_t none = 0;
    struct fork_page *words = __atomic_load_n(&fork_words, __ATOMIC_ACQUIRE);
    if (!__atomic_compare_exchange_n(&words->incarnation, &none, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return none;
    __atomic_store_n(&last_incarnation, next, __ATOMIC_RELEASE);
    return next;
}

static void futex(uint32_t *word, int operation, uint32_t value)
{
    int saved = errno;
    syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
    errno = saved;
}

void fork_lock(void)
{
    uint32_t *word = &__atomic_load_n(&fork_words, __ATOMIC_ACQUIRE)->lock;
    uint32_t seen = 0;
    if (__atomic_compare_exchange_n(word, &seen, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return;
    while (__atomic_exchange_n(word, 2, __ATOMIC_ACQUIRE) != 0)
        futex(word, FUTEX_WAIT, 2);
}

void fork_unlock(void)
{
    uint32_t *word = &__atomic_load_n(&fork_words, __ATOMIC_ACQUIRE)->lock;
    if (__atomic_exchange_n(word, 0, __ATOMIC_RELEASE) == 2) futex(word, FUTEX_WAKE, 1);
}
