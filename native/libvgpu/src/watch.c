/* SPDX-License-Identifier: Apache-2.0 */
#include "watch.h"

#include <stddef.h>
#include <sys/prctl.h>

#include "fork.h"
#include "platform.h"

static void *watch(void *argument)
{
    bool (*look)(void) = (bool (*)(void))argument;
    prctl(PR_SET_NAME, "hami-watch", 0L, 0L, 0L);
    do
        platform_sleep_ns(WATCH_PERIOD_NS);
    while (look());
    return NULL;
}

bool watch_start(bool (*look)(void))
{
    if (__atomic_load_n(&fork_words->watching, __ATOMIC_RELAXED)) return true;
    if (!platform_thread(watch, (void *)look)) return false;
    __atomic_store_n(&fork_words->watching, 1, __ATOMIC_RELAXED);
    return true;
}
