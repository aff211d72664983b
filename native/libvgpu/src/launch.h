/* SPDX-License-Identifier: Apache-2.0 */
/* Limits on launches of this process: a compute limit, or a priority below the highest. */
#ifndef VGPU_LAUNCH_H
#define VGPU_LAUNCH_H

#include <stdatomic.h>
#include <stdbool.h>

#include "hook.h"

extern _Atomic(int) launch_paced; /* by priority; -1: not looked up yet */
bool launch_look_for_page(void);

static inline bool launch_is_limited(void)
{
    int known = atomic_load_explicit(&launch_paced, memory_order_relaxed);
    if (UNLIKELY(known < 0)) known = launch_look_for_page();
    if (UNLIKELY(!account_is_attached())) return known || account_is_core_limited();
    return known || __atomic_load_n(&account_view.core_limited, __ATOMIC_RELAXED);
}

/* The driver has waited for the device: read the samples that have ended. */
void launch_settle(void);

/* A new process image: look up the priority page again, and ring at the first launch. */
void launch_reset(void);

#endif
