/* SPDX-License-Identifier: Apache-2.0 */
#include "watch.h"

#include <stddef.h>
#include <sys/prctl.h>

#include "fork.h"
#include "platform.h"

static uint64_t (*ticker)(uint64_t now_ns);
static uint32_t wakes;

static void *watch(void *argument)
{
    bool (*look)(void) = (bool (*)(void))argument;
    prctl(PR_SET_NAME, "hami-watch", 0L, 0L, 0L);
    uint64_t now = platform_now_ns();
    uint64_t look_ns = now + WATCH_PERIOD_NS;
    for (;;) {
        uint32_t seen = __atomic_load_n(&wakes, __ATOMIC_ACQUIRE);
        uint64_t (*tick)(uint64_t) = __atomic_load_n(&ticker, __ATOMIC_ACQUIRE);
        uint64_t rest = look_ns > now ? look_ns - now : 0;
        uint64_t wanted = tick ? tick(now) : rest;
        if (rest > 0) platform_futex_wait(&wakes, seen, wanted < rest ? wanted : rest);
        now = platform_now_ns();
        if (now < look_ns) continue;
        if (!look()) return NULL;
        now = platform_now_ns();
        look_ns = now + WATCH_PERIOD_NS;
    }
}

bool watch_start(bool (*look)(void))
{
    if (__atomic_load_n(&fork_words->watching, __ATOMIC_RELAXED)) return true;
    if (!platform_thread(watch, (void *)look)) return false;
    __atomic_store_n(&fork_words->watching, 1, __ATOMIC_RELAXED);
    return true;
}

void watch_use_ticker(uint64_t (*tick)(uint64_t now_ns))
{
    __atomic_store_n(&ticker, tick, __ATOMIC_RELEASE);
}

void watch_wake(void)
{
    __atomic_fetch_add(&wakes, 1, __ATOMIC_RELEASE);
    platform_futex_wake(&wakes);
}
