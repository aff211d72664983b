/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hook: cuInit, at which a process joins its container; and the fresh start of a forked child.
 *
 * Before cuInit (or a first NVML question) this library has done nothing in the process at all: no constructor, no file,
 * no thread, no handler. Nothing is done at its end either: the driver gives the memory back only when the process is
 * gone, so until then it stays charged, and whoever looks next finds the charge to be nobody's.
 * Locks taken here: none.
 */
#include <sched.h>

#include "compute.h"
#include "context.h"
#include "hook.h"
#include "launch_hooks.h"
#include "memory.h"
#include "pool.h"
#include "resolve.h"
#include "vmm.h"

#define NO_INCARNATION UINT32_MAX

_Atomic(uint32_t) hook_incarnation = NO_INCARNATION;

/* A child has the parent's tables, but not its memory: empty them before its first use of them. Who finds the number
   claimed by another thread waits; a claim inherited over a fork has the parent's number and holds nobody up. */
void hook_new_image(void)
{
    static _Atomic(uint32_t) claimed = NO_INCARNATION;
    uint32_t now = account_incarnation();
    uint32_t before = atomic_load(&claimed);
    if (before != now && atomic_compare_exchange_strong(&claimed, &before, now)) {
        context_reset();
        memory_reset();
        memory_array_reset();
        memory_module_reset();
        memory_graph_reset();
        pool_reset();
        vmm_reset();
        launch_reset();
        atomic_store_explicit(&hook_incarnation, now, memory_order_release);
    }
    while (atomic_load_explicit(&hook_incarnation, memory_order_acquire) != now)
        sched_yield();
}

static void lend_driver(void)
{
    static _Atomic(bool) lent;
    if (atomic_exchange(&lent, true)) return;
    compute_use_driver(&(struct compute_driver){
        .context_current = DRIVER(cuCtxGetCurrent),
        .event_create = DRIVER(cuEventCreate),
        .event_destroy = DRIVER(cuEventDestroy_v2),
        .event_record = DRIVER(cuEventRecord),
        .event_query = DRIVER(cuEventQuery),
        .event_elapsed = DRIVER(cuEventElapsedTime),
        .stream_is_capturing = DRIVER(cuStreamIsCapturing),
        .stream_create = DRIVER(cuStreamCreate),
        .exchange_capture_mode = (CUresult (*)(int *))DRIVER(cuThreadExchangeStreamCaptureMode),
    });
}

HOOK_EXPORT CUresult cuInit(unsigned int flags)
{
    CUresult result = DRIVER(cuInit)(flags);
    if (result != CUDA_SUCCESS) return result;
    lend_driver();
    account_when_cores_change(compute_limits_changed);
    account_attach();
    return result;
}
