/* SPDX-License-Identifier: Apache-2.0 */
#include "watch.h"

#include <stddef.h>
#include <sys/prctl.h>

#include "fork.h"
#include "platform.h"

static void *watch(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "hami-watch", 0L, 0L, 0L);
    for (bool going = true; going;) {
        platform_sleep_ns(WATCH_PERIOD_NS);
        fork_lock();
        going = account_tick();
        if (!going) __atomic_store_n(&fork_words->watching, 0, __ATOMIC_RELAXED);
        fork_unlock();
    }
    return NULL;
}

bool watch_start(void)
{
    if (__atomic_load_n(&fork_words->watching, __ATOMIC_RELAXED)) return true;
    if (!platform_thread(watch, NULL)) return false;
    __atomic_store_n(&fork_words->watching, 1, __ATOMIC_RELAXED);
    return true;
}
