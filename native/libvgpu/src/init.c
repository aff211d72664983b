/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hook: cuInit, at which a process joins its container; and the table of modules (hook.h).
 *
 * Before cuInit (or a first NVML call) this library does nothing in the process: no constructor, no file, no thread, no
 * handler. At process exit it does nothing either: the driver releases the memory only when the process has ended, so
 * until then it stays charged, and another process reclaims the charge.
 * Locks taken here: none.
 */
#include "bell.h"
#include "compute.h"
#include "context.h"
#include "gate.h"
#include "hook.h"
#include "launch.h"
#include "memory_array.h"
#include "memory_graph.h"
#include "memory_module.h"
#include "pointer.h"
#include "pool.h"
#include "vmm.h"
#include "watch.h"

/* In the order in which they are called. */
static const struct hook_module modules[] HOOK_MODULES = {
    {.reset = context_reset},
    {.reset = pointer_reset, .forget_context = pointer_forget_context},
    {.reset = memory_array_reset, .forget_context = memory_array_forget_context},
    {.reset = memory_module_reset, .forget_context = memory_module_forget_context},
    {.reset = pool_reset,
     .forget_context = pool_forget_context,
     .settle = pool_settle_device,
     .trim = pool_trim_device},
    {.reset = memory_graph_reset, .settle = memory_graph_settle},
    {.reset = vmm_reset},
    {.reset = launch_reset},
    {.reset = gate_reset},
};

static uint64_t tick(uint64_t now_ns)
{
    uint64_t bell_ns = bell_tick(now_ns), gate_ns = gate_tick(now_ns);
    return bell_ns < gate_ns ? bell_ns : gate_ns;
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
    account_each_period(context_compare);
    watch_use_ticker(tick);
    account_attach();
    return result;
}
