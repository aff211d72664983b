/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a forked child must not inherit: a page of words that is zero again in every child.
 *
 * The kernel wipes it (MADV_WIPEONFORK), so that raw clone() and _Fork() count as well; where the kernel cannot, a fork
 * handler does. vfork and posix_spawn share the parent's memory and see the parent's words, as they must. Reading is one
 * load; nothing asks for the pid.
 */
#ifndef VGPU_FORK_H
#define VGPU_FORK_H

#include <stdbool.h>
#include <stdint.h>

/* Words of this process only. */
struct fork_page {
    uint32_t incarnation; /* 0: not asked for yet in this process */
    uint32_t attached;    /* account.c: a slot is held */
    uint32_t lock;        /* 0 free, 1 held, 2 held and waited for */
    uint32_t watching;    /* watch.c: a thread runs */
};

extern struct fork_page *fork_words;

/* Put the words on their page; before anything is kept in them. */
void fork_prepare(void);

/* Another number in every child, see account_incarnation. */
uint32_t fork_incarnation_slow(void);

static inline uint32_t fork_incarnation(void)
{
    uint32_t known = __atomic_load_n(&__atomic_load_n(&fork_words, __ATOMIC_ACQUIRE)->incarnation, __ATOMIC_RELAXED);
    return __builtin_expect(known != 0, 1) ? known : fork_incarnation_slow();
}

/* A lock between the threads of this process, free in a child even if the parent held it. Not for shared memory. */
void fork_lock(void);
void fork_unlock(void);

#endif
