/* SPDX-License-Identifier: Apache-2.0 */
#include "launch.h"

#include <stddef.h>

#include "bell.h"
#include "compute.h"
#include "context.h"
#include "priority.h"

_Atomic(int) launch_paced = -1;

bool launch_look_for_page(void)
{
    bool found = account_priority() > 0 && priority_page() != NULL;
    atomic_store_explicit(&launch_paced, found, memory_order_relaxed);
    return found;
}

void launch_reset(void)
{
    atomic_store_explicit(&launch_paced, -1, memory_order_relaxed);
    bell_reset();
}

void launch_settle(void)
{
    bell_settled();
    struct context_here here;
    if (launch_is_limited() && context_here(&here) && here.device >= 0) compute_settle(here.device);
}
