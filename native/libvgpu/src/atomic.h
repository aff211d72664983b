/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Atomic operations on the region: 16-byte compare-and-swap inlined, never from libatomic.
 *
 * Orders: loads acquire, stores release, swaps full barrier. In the builds that prove the protocol every access is
 * preceded by a step at which the test may kill or switch the process; elsewhere a step is nothing.
 */
#ifndef VGPU_ATOMIC_H
#define VGPU_ATOMIC_H

#include <stdbool.h>
#include <stdint.h>

#ifdef VGPU_STEPS
void atomic_step(bool writes);
#define ATOMIC_STEP(writes) atomic_step(writes)
#else
#define ATOMIC_STEP(writes) ((void)0)
#endif

typedef unsigned __int128 atomic_wide;

/* The thread sanitizer does not see into assembly, and its own 16-byte swap is a lock within the process. */
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define ATOMIC_RELEASE(address) __tsan_release(address)
#define ATOMIC_ACQUIRE(address) __tsan_acquire(address)
#else
#define ATOMIC_RELEASE(address) ((void)0)
#define ATOMIC_ACQUIRE(address) ((void)0)
#endif

static inline bool atomic_swap16(void *address, atomic_wide expected, atomic_wide desired)
{
    ATOMIC_STEP(true);
#if defined(__x86_64__)
    bool swapped;
    ATOMIC_RELEASE(address);
    uint64_t low = (uint64_t)expected;
    uint64_t high = (uint64_t)(expected >> 64);
    __asm__ __volatile__("lock cmpxchg16b %1"
                         : "=@ccz"(swapped), "+m"(*(atomic_wide *)address), "+a"(low), "+d"(high)
                         : "b"((uint64_t)desired), "c"((uint64_t)(desired >> 64))
                         : "memory");
    ATOMIC_ACQUIRE(address);
    return swapped;
#elif defined(__aarch64__)
    uint64_t low;
    uint64_t high;
    uint32_t failed;
    ATOMIC_RELEASE(address);
    do {
        __asm__ __volatile__("ldaxp %0, %1, %2" : "=&r"(low), "=&r"(high) : "Q"(*(atomic_wide *)address) : "memory");
        atomic_wide seen = ((atomic_wide)high << 64) | low;
        bool same = seen == expected;
        /* The pair was read in one piece only if it can be stored: put back what was there when it differs. */
        atomic_wide next = same ? desired : seen;
        __asm__ __volatile__("stlxp %w0, %2, %3, %1"
                             : "=&r"(failed), "=Q"(*(atomic_wide *)address)
                             : "r"((uint64_t)next), "r"((uint64_t)(next >> 64))
                             : "memory");
        if (!failed && !same) {
            ATOMIC_ACQUIRE(address);
            return false;
        }
    } while (failed);
    __asm__ __volatile__("dmb ish" ::: "memory");
    ATOMIC_ACQUIRE(address);
    return true;
#else
#error "no 16-byte compare-and-swap is known for this processor"
#endif
}

/* Half by half: good enough as the expectation of a swap, which fails if the halves do not belong together. */
static inline atomic_wide atomic_guess16(const void *address)
{
    ATOMIC_STEP(false);
    uint64_t low = __atomic_load_n((const uint64_t *)address, __ATOMIC_ACQUIRE);
    ATOMIC_STEP(false);
    uint64_t high = __atomic_load_n((const uint64_t *)address + 1, __ATOMIC_ACQUIRE);
    return ((atomic_wide)high << 64) | low;
}

/* Both halves as they were at one instant; writes the line. For slow paths. */
static inline atomic_wide atomic_load16(void *address)
{
    for (;;) {
        ATOMIC_STEP(false);
        uint64_t low = __atomic_load_n((uint64_t *)address, __ATOMIC_ACQUIRE);
        uint64_t high = __atomic_load_n((uint64_t *)address + 1, __ATOMIC_ACQUIRE);
        atomic_wide seen = ((atomic_wide)high << 64) | low;
        if (atomic_swap16(address, seen, seen)) return seen;
    }
}

static inline uint64_t atomic_load8(const uint64_t *address)
{
    ATOMIC_STEP(false);
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

static inline void atomic_store8(uint64_t *address, uint64_t value)
{
    ATOMIC_STEP(true);
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

static inline bool atomic_swap8(uint64_t *address, uint64_t expected, uint64_t desired)
{
    ATOMIC_STEP(true);
    return __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}

static inline void atomic_add8(uint64_t *address, uint64_t delta)
{
    ATOMIC_STEP(true);
    __atomic_fetch_add(address, delta, __ATOMIC_RELAXED);
}

static inline uint32_t atomic_load4(const uint32_t *address)
{
    ATOMIC_STEP(false);
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

static inline bool atomic_swap4(uint32_t *address, uint32_t expected, uint32_t desired)
{
    ATOMIC_STEP(true);
    return __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}

#endif
