/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See context.h. Hooks: contexts of all kinds, made and ended.
 *
 * Overhead of a context: what NVML says this process uses before and after, where it lists the process under its own pid;
 * else the change of the device's use, at most CONTEXT_MOST because neighbours change it too. Charged in any case: the
 * memory is gone. A context that nobody was seen to make (graphics interoperation) is known from its first use, unmeasured.
 * Locks taken here: one for the list of contexts, for a few instructions.
 */
#include "context.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "compute.h"
#include "device.h"
#include "hook.h"
#include "memory.h"
#include "pool.h"

#define CONTEXTS 254
#define CONTEXT_MOST (UINT64_C(1) << 30)
#define LISTED_PROCESSES 128

struct context {
    CUcontext handle; /* NULL: free */
    CUdevice cuda;
    int device;
    bool primary;
    uint32_t retains;
    uint64_t overhead;
};

static struct context contexts[CONTEXTS];
static _Atomic(uint32_t) contexts_locked;
static _Atomic(uint32_t) generation = 1;

static _Thread_local struct {
    uint32_t generation;
    struct context_here here;
} remembered;

static int find(CUcontext handle)
{
    for (int i = 0; i < CONTEXTS; i++)
        if (contexts[i].handle == handle) return i;
    return -1;
}

/* The entry of the context, made if there is room; -1: no room. Under the lock. */
static int enter(CUcontext handle, CUdevice cuda, int device)
{
    int at = find(handle);
    if (at >= 0) return at;
    at = find(NULL);
    if (at >= 0) contexts[at] = (struct context){.handle = handle, .cuda = cuda, .device = device};
    return at;
}

static bool look_up(CUcontext handle, struct context_here *here)
{
    spin_lock(&contexts_locked);
    int at = find(handle);
    if (at >= 0)
        *here = (struct context_here){
            .context = handle, .cuda = contexts[at].cuda, .device = contexts[at].device, .tag = (uint8_t)at};
    spin_unlock(&contexts_locked);
    return at >= 0;
}

static void learn(CUcontext handle, CUdevice cuda, struct context_here *here)
{
    int device = device_limits(cuda);
    spin_lock(&contexts_locked);
    int at = enter(handle, cuda, device);
    spin_unlock(&contexts_locked);
    *here = (struct context_here){
        .context = handle, .cuda = cuda, .device = device, .tag = at < 0 ? (uint8_t)CONTEXT_NO_TAG : (uint8_t)at};
}

bool context_here(struct context_here *here)
{
    CUcontext current = NULL;
    if (UNLIKELY(DRIVER(cuCtxGetCurrent)(&current) != CUDA_SUCCESS || !current)) return false;
    uint32_t now = atomic_load_explicit(&generation, memory_order_acquire);
    if (LIKELY(remembered.here.context == current && remembered.generation == now)) {
        *here = remembered.here;
        return true;
    }
    if (!look_up(current, here)) {
        CUdevice cuda;
        if (DRIVER(cuCtxGetDevice)(&cuda) != CUDA_SUCCESS) return false;
        learn(current, cuda, here);
    }
    remembered.here = *here;
    remembered.generation = now;
    return true;
}

bool context_of_stream(CUstream stream, bool per_thread, struct context_here *here)
{
    CUcontext owner = NULL;
    if (stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) return context_here(here);
    CUresult result = per_thread ? DRIVER(cuStreamGetCtx_ptsz)(stream, &owner) : DRIVER(cuStreamGetCtx)(stream, &owner);
    if (result != CUDA_SUCCESS || !owner) return context_here(here);
    return look_up(owner, here) || context_here(here);
}

void context_reset(void)
{
    memset(contexts, 0, sizeof contexts);
    atomic_store(&contexts_locked, 0);
    atomic_fetch_add(&generation, 1);
}

/* --- what a context takes --- */

struct measure {
    nvmlDevice_t nvml; /* NULL: cannot be measured */
    bool listed;
    uint64_t own;
    uint64_t device;
};

static bool own_use(nvmlDevice_t nvml, uint64_t *bytes)
{
    nvmlProcessInfo_t processes[LISTED_PROCESSES];
    unsigned int count = LISTED_PROCESSES;
    nvmlReturn_t result = DRIVER(nvmlDeviceGetComputeRunningProcesses_v3)(nvml, &count, processes);
    if (result == NVML_ERROR_FUNCTION_NOT_FOUND) {
        count = LISTED_PROCESSES;
        result = DRIVER(nvmlDeviceGetComputeRunningProcesses_v2)(nvml, &count, processes);
    }
    if (result != NVML_SUCCESS) return false;
    for (unsigned int i = 0; i < count && i < LISTED_PROCESSES; i++) {
        if (processes[i].pid != (unsigned int)getpid() || processes[i].usedGpuMemory > TABLE_BYTES_MAX) continue;
        *bytes = processes[i].usedGpuMemory;
        return true;
    }
    return false;
}

static uint64_t device_use(nvmlDevice_t nvml)
{
    nvmlMemory_t memory = {0};
    return DRIVER(nvmlDeviceGetMemoryInfo)(nvml, &memory) == NVML_SUCCESS ? memory.used : 0;
}

static struct measure measure_begin(CUdevice cuda, int device)
{
    struct measure measure = {0};
    if (device < 0 || account_limit(device) == UINT64_MAX) return measure;
    measure.nvml = device_nvml(cuda);
    if (!measure.nvml) return measure;
    measure.listed = own_use(measure.nvml, &measure.own);
    measure.device = device_use(measure.nvml);
    return measure;
}

static uint64_t measure_end(const struct measure *measure)
{
    uint64_t own = 0;
    if (!measure->nvml) return 0;
    if (own_use(measure->nvml, &own)) return own > measure->own ? own - measure->own : 0;
    uint64_t device = device_use(measure->nvml);
    uint64_t growth = device > measure->device ? device - measure->device : 0;
    return growth < CONTEXT_MOST ? growth : CONTEXT_MOST;
}

static void context_made(CUcontext handle, CUdevice cuda, int device, bool primary, const struct measure *measure)
{
    uint64_t overhead = measure ? measure_end(measure) : 0;
    spin_lock(&contexts_locked);
    int at = enter(handle, cuda, device);
    if (at >= 0) {
        contexts[at].primary = primary;
        contexts[at].retains += primary;
        contexts[at].overhead += overhead;
    }
    spin_unlock(&contexts_locked);
    atomic_fetch_add_explicit(&generation, 1, memory_order_release);
    if (!overhead || at < 0) return;
    account_charge_anyway(device, overhead);
    account_note_context(device, (int64_t)overhead);
}

static void context_ended(CUcontext handle)
{
    spin_lock(&contexts_locked);
    int at = handle ? find(handle) : -1;
    struct context ended = {0};
    if (at >= 0) ended = contexts[at];
    spin_unlock(&contexts_locked);
    if (at < 0) return;
    memory_forget_context((uint8_t)at);
    if (ended.primary) pool_device_reset(ended.device);
    if (ended.overhead) {
        account_refund(ended.device, ended.overhead);
        account_note_context(ended.device, -(int64_t)ended.overhead);
    }
    spin_lock(&contexts_locked);
    if (contexts[at].handle == handle) contexts[at] = (struct context){0};
    spin_unlock(&contexts_locked);
    atomic_fetch_add_explicit(&generation, 1, memory_order_release);
}

static CUcontext primary_of(CUdevice cuda, bool retained_once)
{
    CUcontext handle = NULL;
    spin_lock(&contexts_locked);
    for (int i = 0; i < CONTEXTS; i++) {
        if (contexts[i].handle && contexts[i].primary && contexts[i].cuda == cuda &&
            (!retained_once || contexts[i].retains <= 1))
            handle = contexts[i].handle;
    }
    spin_unlock(&contexts_locked);
    return handle;
}

/* --- hooks --- */

#define CREATE(name, parameters, device_parameter, arguments)                                                          \
    HOOK_EXPORT CUresult name parameters                                                                               \
    {                                                                                                                  \
        hook_enter();                                                                                                  \
        int device = device_limits(device_parameter);                                                                  \
        if (device < 0 || !context) return DRIVER(name) arguments;                                                     \
        struct measure measure = measure_begin(device_parameter, device);                                              \
        CUresult result = DRIVER(name) arguments;                                                                      \
        if (result == CUDA_SUCCESS) context_made(*context, device_parameter, device, false, &measure);                 \
        return result;                                                                                                 \
    }

CREATE(cuCtxCreate, (CUcontext * context, unsigned int flags, CUdevice device_number), device_number,
       (context, flags, device_number))
CREATE(cuCtxCreate_v2, (CUcontext * context, unsigned int flags, CUdevice device_number), device_number,
       (context, flags, device_number))
CREATE(cuCtxCreate_v3,
       (CUcontext * context, CUexecAffinityParam *affinities, int count, unsigned int flags, CUdevice device_number),
       device_number, (context, affinities, count, flags, device_number))
CREATE(cuCtxCreate_v4, (CUcontext * context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device_number),
       device_number, (context, parameters, flags, device_number))

static CUresult destroy(CUcontext context, CUresult (*call)(CUcontext))
{
    hook_enter();
    if (context) compute_context_end(context);
    CUresult result = call(context);
    if (result == CUDA_SUCCESS) context_ended(context);
    return result;
}

HOOK_EXPORT CUresult cuCtxDestroy(CUcontext context)
{
    return destroy(context, DRIVER(cuCtxDestroy));
}

HOOK_EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    return destroy(context, DRIVER(cuCtxDestroy_v2));
}

HOOK_EXPORT CUresult cuCtxDetach(CUcontext context)
{
    return destroy(context, DRIVER(cuCtxDetach));
}

HOOK_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device_number)
{
    hook_enter();
    int device = device_limits(device_number);
    if (device < 0 || !context) return DRIVER(cuDevicePrimaryCtxRetain)(context, device_number);
    unsigned int flags;
    int active = 1;
    struct measure measure = {0};
    bool first = DRIVER(cuDevicePrimaryCtxGetState)(device_number, &flags, &active) == CUDA_SUCCESS && !active;
    if (first) measure = measure_begin(device_number, device);
    CUresult result = DRIVER(cuDevicePrimaryCtxRetain)(context, device_number);
    if (result == CUDA_SUCCESS) context_made(*context, device_number, device, true, first ? &measure : NULL);
    return result;
}

static CUresult release(CUdevice device_number, CUresult (*call)(CUdevice))
{
    hook_enter();
    CUcontext last = primary_of(device_number, true);
    if (last) compute_context_end(last);
    CUresult result = call(device_number);
    if (result != CUDA_SUCCESS) return result;
    CUcontext handle = primary_of(device_number, false);
    unsigned int flags;
    int active = 1;
    if (handle && DRIVER(cuDevicePrimaryCtxGetState)(device_number, &flags, &active) == CUDA_SUCCESS && !active) {
        context_ended(handle);
    } else if (handle) {
        spin_lock(&contexts_locked);
        int at = find(handle);
        if (at >= 0 && contexts[at].retains) contexts[at].retains--;
        spin_unlock(&contexts_locked);
    }
    return result;
}

HOOK_EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device_number)
{
    return release(device_number, DRIVER(cuDevicePrimaryCtxRelease));
}

HOOK_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device_number)
{
    return release(device_number, DRIVER(cuDevicePrimaryCtxRelease_v2));
}

static CUresult reset(CUdevice device_number, CUresult (*call)(CUdevice))
{
    hook_enter();
    CUcontext handle = primary_of(device_number, false);
    if (handle) compute_context_end(handle);
    CUresult result = call(device_number);
    if (result == CUDA_SUCCESS) context_ended(handle);
    return result;
}

HOOK_EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device_number)
{
    return reset(device_number, DRIVER(cuDevicePrimaryCtxReset));
}

HOOK_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device_number)
{
    return reset(device_number, DRIVER(cuDevicePrimaryCtxReset_v2));
}
