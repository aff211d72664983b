/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See context.h. Hooks: contexts of all kinds, made and ended; imports of other processes' memory.
 *
 * Overhead of a context: the known cost of a context on the device (in the region, from the process that made one first)
 * is charged before the driver is called, then corrected by measuring: the use that NVML lists for this process before and
 * after; else, if nothing is known yet, the change of the device's use, at most CONTEXT_MOST because neighbors change it
 * too. Where neither shows anything (no NVML in the container), an estimate from the size of the device is charged, up to the
 * free capacity. A context that does not fit is destroyed again. The first context of a device that no hook saw being made
 * (graphics interoperation, older runtimes, green contexts) is charged at its first use, unmeasured.
 *
 * Later growth of the driver (stacks, heaps, lazily loaded code) is found by comparing the account with NVML's figure for
 * this process every few seconds: the excess is charged as part of the contexts.
 * Locks taken here: one for the list of contexts and the excess, for a few instructions.
 */
#include "context.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "compute.h"
#include "device.h"
#include "gate.h"
#include "hook.h"
#include "platform.h"

#define CONTEXTS 254
#define CONTEXT_MOST (UINT64_C(1) << 30)
/* Of an estimate: what is the same for all devices, and the stack of each thread that the device runs at once. On an H200 that
   makes 520 MiB. */
#define CONTEXT_BASE (UINT64_C(256) << 20)
#define CONTEXT_STACK 1024u
#define COMPARE_EACH 8u /* periods of the watching thread between two comparisons with NVML, more with many processes */
#define COMPARE_PROCESSES 4u
#define COMPARE_ENDED 2u
#define COMPARE_MOST_NS UINT64_C(100000000)
#define LISTED_PROCESSES 64 /* more are asked for with memory of their own */
#define LISTED_MOST 8192u
#define LISTED_SPARE 32u /* more may come between two looks */

struct context {
    CUcontext handle; /* NULL: free */
    CUdevice cuda;
    int device;
    bool primary;
    uint32_t retains;
    uint64_t overhead;
};

/* NVML's figure beyond the account, per device of the limits. All but `charged` belongs to the watching thread. */
struct excess {
    uint64_t charged;
    uint64_t seen; /* at the last comparison: a load or a growth under way is gone at the next one */
    uint64_t own;  /* account and launches then: without a change of them nothing is compared */
    uint64_t launches;
    uint32_t repeated;
};

static struct context contexts[CONTEXTS];
static struct excess excesses[REGION_DEVICES_MAX];
static _Atomic(bool) has_imports;
static _Atomic(uint32_t) comparing; /* 1: now; COMPARE_ENDED: the process is ending */
static _Atomic(uint32_t) contexts_locked;
_Atomic(uint32_t) context_generation = 1;
/* Under which pid NVML lists this process, 0 until that is certain: inside a pid namespace it may be another one. */
static _Atomic(uint32_t) nvml_pid;
/* So many were listed last: the next list is asked for with room for them, because asking twice costs twice. */
static _Atomic(uint32_t) listed_last;

_Thread_local struct context_memory context_memory;

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

static bool is_primary(CUcontext handle, CUdevice cuda)
{
    unsigned int flags;
    int active = 0;
    CUcontext primary = NULL;
    if (DRIVER(cuDevicePrimaryCtxGetState)(cuda, &flags, &active) != CUDA_SUCCESS || !active ||
        DRIVER(cuDevicePrimaryCtxRetain)(&primary, cuda) != CUDA_SUCCESS)
        return false;
    DRIVER(cuDevicePrimaryCtxRelease_v2)(cuda);
    return primary == handle;
}

static uint64_t likely_cost(CUdevice cuda, int device);

/* A context that no hook saw. More than one of a device are mostly green ones, which are parts of the first. */
static void learn(CUcontext handle, CUdevice cuda, struct context_here *here)
{
    int device = device_limits(cuda);
    bool primary = is_primary(handle, cuda);
    uint64_t cost = device >= 0 && account_limit(device) != UINT64_MAX ? likely_cost(cuda, device) : 0;
    spin_lock(&contexts_locked);
    for (int i = 0; i < CONTEXTS; i++)
        if (contexts[i].handle && contexts[i].cuda == cuda) cost = 0;
    int at = enter(handle, cuda, device);
    if (at >= 0) contexts[at].primary |= primary;
    if (at < 0)
        cost = 0;
    else if (cost)
        contexts[at].overhead = cost;
    spin_unlock(&contexts_locked);
    if (cost) {
        account_charge_anyway(device, cost);
        account_note_context(device, (int64_t)cost);
    }
    *here = (struct context_here){
        .context = handle, .cuda = cuda, .device = device, .tag = at < 0 ? (uint8_t)CONTEXT_NO_TAG : (uint8_t)at};
}

bool context_here_slowly(CUcontext current, uint32_t generation, struct context_here *here)
{
    if (!look_up(current, here)) {
        CUdevice cuda;
        if (DRIVER(cuCtxGetDevice)(&cuda) != CUDA_SUCCESS) return false;
        learn(current, cuda, here);
    }
    context_memory.here = *here;
    context_memory.generation = generation;
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
    memset(excesses, 0, sizeof excesses);
    atomic_store(&has_imports, false);
    atomic_store(&comparing, 0);
    atomic_store(&contexts_locked, 0);
    atomic_store(&nvml_pid, 0);
    atomic_fetch_add(&context_generation, 1);
}

/* --- what a context takes --- */

struct listing {
    unsigned int count;
    nvmlProcessInfo_t *processes; /* `few`, or memory of its own */
    nvmlProcessInfo_t few[LISTED_PROCESSES];
};

struct measure {
    CUdevice cuda;
    int device;
    bool counts;       /* else the device has no limit, and nothing is charged */
    nvmlDevice_t nvml; /* NULL: cannot be measured */
    uint64_t charged;  /* before the driver was asked: what such a context was seen to take */
    uint64_t own;      /* charged to this process, all in all */
    uint64_t used;     /* of the device */
    bool by_device;    /* that is known, and counts where NVML does not list this process */
    struct listing before;
};

static nvmlReturn_t ask(nvmlDevice_t nvml, unsigned int *count, nvmlProcessInfo_t *processes)
{
    unsigned int room = *count;
    nvmlReturn_t result = DRIVER(nvmlDeviceGetComputeRunningProcesses_v3)(nvml, count, processes);
    if (result != NVML_ERROR_FUNCTION_NOT_FOUND) return result;
    *count = room;
    return DRIVER(nvmlDeviceGetComputeRunningProcesses_v2)(nvml, count, processes);
}

static void unlist(struct listing *listing)
{
    if (listing->processes != listing->few) free(listing->processes);
    listing->processes = listing->few;
    listing->count = 0;
}

static bool make_room(struct listing *listing, unsigned int room)
{
    listing->processes = room <= LISTED_PROCESSES ? listing->few : malloc(room * sizeof *listing->processes);
    if (!listing->processes) listing->processes = listing->few;
    return room <= LISTED_PROCESSES || listing->processes != listing->few;
}

/* Query the processes that NVML lists; `unlist` releases them. False: NVML does not report any list. */
static bool list(nvmlDevice_t nvml, struct listing *listing)
{
    unsigned int last = atomic_load(&listed_last);
    unsigned int room = last + LISTED_SPARE <= LISTED_PROCESSES ? LISTED_PROCESSES : last + LISTED_SPARE;
    for (;;) {
        if (!make_room(listing, room)) return false;
        listing->count = room;
        nvmlReturn_t result = ask(nvml, &listing->count, listing->processes);
        if (result == NVML_SUCCESS && listing->count <= room) {
            atomic_store(&listed_last, listing->count < LISTED_MOST ? listing->count : LISTED_MOST);
            return true;
        }
        bool is_short = result == NVML_ERROR_INSUFFICIENT_SIZE && room < LISTED_MOST;
        unsigned int wanted = listing->count > room ? listing->count : room;
        unlist(listing);
        if (!is_short) return false;
        room = wanted < LISTED_MOST / 2 ? wanted * 2 : LISTED_MOST; /* more may come meanwhile */
    }
}

/* How often a pid is listed, and the bytes of all these entries. Twice: processes of two pid namespaces. */
static unsigned int listed(const struct listing *listing, unsigned int pid, uint64_t *bytes)
{
    unsigned int times = 0;
    *bytes = 0;
    for (unsigned int i = 0; i < listing->count; i++) {
        if (listing->processes[i].pid != pid || listing->processes[i].usedGpuMemory > TABLE_BYTES_MAX) continue;
        *bytes += listing->processes[i].usedGpuMemory;
        times++;
    }
    return times;
}

/* The one pid that is listed now and was not before; 0: none, or several. */
static unsigned int newcomer(const struct listing *before, const struct listing *after)
{
    unsigned int found = 0;
    uint64_t bytes;
    for (unsigned int i = 0; i < after->count; i++) {
        unsigned int pid = after->processes[i].pid;
        if (listed(before, pid, &bytes) || pid == found) continue;
        if (found) return 0;
        found = pid;
    }
    return found;
}

static uint64_t growth_of(const struct measure *measure, const struct listing *after, unsigned int pid, bool *certain)
{
    uint64_t then, now;
    unsigned int times = listed(after, pid, &now);
    unsigned int times_before = listed(&measure->before, pid, &then);
    *certain = times_before <= 1 && times == 1;
    /* NVML lists a process from its first context on, with all that it has: physical memory may be charged already. */
    if (!times_before) then = measure->own > measure->charged ? measure->own - measure->charged : 0;
    return times && now > then ? now - then : 0;
}

/* By what NVML lists for this process: not disturbed by neighbours, if it is certain which entry is its own. */
static uint64_t own_growth(const struct measure *measure, bool *certain)
{
    struct listing after;
    *certain = false;
    if (!list(measure->nvml, &after)) return 0;
    uint32_t known = atomic_load(&nvml_pid);
    uint32_t pid = known ? known : (uint32_t)getpid();
    uint64_t growth = growth_of(measure, &after, pid, certain);
    if (!growth && !known) {
        pid = newcomer(&measure->before, &after);
        growth = pid ? growth_of(measure, &after, pid, certain) : 0;
    }
    if (growth && *certain) atomic_store(&nvml_pid, pid);
    unlist(&after);
    return growth;
}

bool context_own_use(CUdevice cuda, uint64_t *bytes)
{
    struct listing now;
    uint32_t pid = atomic_load(&nvml_pid);
    nvmlDevice_t nvml = pid ? device_nvml(cuda) : NULL;
    if (!nvml || !list(nvml, &now)) return false;
    bool is_certain = listed(&now, pid, bytes) == 1;
    unlist(&now);
    return is_certain;
}

static uint64_t device_use(nvmlDevice_t nvml)
{
    nvmlMemory_t memory = {0};
    return DRIVER(nvmlDeviceGetMemoryInfo)(nvml, &memory) == NVML_SUCCESS ? memory.used : 0;
}

static uint64_t *cost_of(int device)
{
    struct region_device *line = account_region_device(device);
    return line ? &line->context_cost : NULL;
}

static uint64_t known_cost(int device)
{
    uint64_t *word = cost_of(device);
    uint64_t cost = word ? __atomic_load_n(word, __ATOMIC_RELAXED) : 0;
    return cost < CONTEXT_MOST ? cost : CONTEXT_MOST;
}

static uint64_t estimate(CUdevice cuda)
{
    int multiprocessors = 0, threads = 0;
    DRIVER(cuDeviceGetAttribute)(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, cuda);
    DRIVER(cuDeviceGetAttribute)(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, cuda);
    if (multiprocessors < 0 || threads < 0) return CONTEXT_BASE;
    uint64_t bytes = CONTEXT_BASE + (uint64_t)multiprocessors * (uint64_t)threads * CONTEXT_STACK;
    return bytes < CONTEXT_MOST ? bytes : CONTEXT_MOST;
}

/* Of a context that cannot be measured. An estimate alone refuses nothing: it is charged up to the free capacity. */
static uint64_t likely_cost(CUdevice cuda, int device)
{
    uint64_t known = known_cost(device);
    if (known) return known;
    uint64_t bound = account_bound(device);
    uint64_t used = account_used(device);
    uint64_t bytes = estimate(cuda);
    uint64_t free_bytes = used < bound ? bound - used : 0;
    return bytes < free_bytes ? bytes : free_bytes;
}

bool context_charge(int device, uint64_t bytes)
{
    if (account_limit(device) != 0 || account_is_refused()) return hook_charge(device, bytes);
    account_charge_anyway(device, bytes);
    return true;
}

/* False: not even what a context is known to cost fits, or nothing at all. */
static bool measure_begin(struct measure *measure, CUdevice cuda, int device)
{
    measure->cuda = cuda;
    measure->device = device;
    measure->nvml = NULL;
    measure->charged = 0;
    measure->counts = device >= 0 && account_limit(device) != UINT64_MAX;
    if (!measure->counts) return true;
    uint64_t cost = known_cost(device);
    /* A process that is not granted a byte gets no context, even if its size cannot be measured here. */
    if (!context_charge(device, cost ? cost : 1)) return false;
    if (!cost) account_refund(device, 1);
    measure->charged = cost;
    measure->nvml = device_nvml(cuda);
    if (!measure->nvml) return true;
    measure->own = account_own_used(device);
    bool is_listed = list(measure->nvml, &measure->before);
    measure->by_device = !is_listed || !cost; /* else what is known already is truer than what neighbours change, too */
    measure->used = measure->by_device ? device_use(measure->nvml) : 0;
    return true;
}

/* Of several figures the smallest is the truest, as neighbours grow meanwhile; but not one that is out of all
   proportion, as neighbours shrink too. */
static void learn_cost(int device, uint64_t bytes)
{
    uint64_t *word = cost_of(device);
    uint64_t known = word ? __atomic_load_n(word, __ATOMIC_RELAXED) : 0;
    bool better = !known || (bytes < known && bytes >= known / 2);
    if (word && bytes && better) __atomic_store_n(word, bytes, __ATOMIC_RELAXED);
}

/* There is no new context. */
static void measure_drop(struct measure *measure)
{
    if (measure->nvml) unlist(&measure->before);
    account_refund(measure->device, measure->charged);
}

/* Bytes that the new context takes. */
static uint64_t measure_end(struct measure *measure)
{
    bool certain;
    if (!measure->counts) return 0;
    if (!measure->nvml) return measure->charged ? measure->charged : likely_cost(measure->cuda, measure->device);
    uint64_t growth = own_growth(measure, &certain);
    unlist(&measure->before);
    if (!growth && measure->by_device) {
        uint64_t now = device_use(measure->nvml);
        growth = now > measure->used ? now - measure->used : 0;
        certain = false;
    }
    uint64_t meanwhile = account_own_used(measure->device);
    meanwhile = meanwhile > measure->own ? meanwhile - measure->own : 0;
    growth = growth > meanwhile ? growth - meanwhile : 0;
    if (growth > CONTEXT_MOST) growth = CONTEXT_MOST;
    learn_cost(measure->device, growth);
    if (growth && (certain || !measure->charged)) return growth;
    return measure->charged ? measure->charged : likely_cost(measure->cuda, measure->device);
}

/* Charge what the context takes instead of what it was thought to; false: it does not fit and nothing is charged. */
static bool measure_settle(const struct measure *measure, uint64_t bytes)
{
    if (bytes < measure->charged) account_refund(measure->device, measure->charged - bytes);
    if (bytes <= measure->charged || context_charge(measure->device, bytes - measure->charged)) return true;
    account_refund(measure->device, measure->charged);
    return false;
}

/* `overhead` is charged. */
static void context_made(CUcontext handle, CUdevice cuda, int device, bool primary, uint64_t overhead)
{
    spin_lock(&contexts_locked);
    int at = enter(handle, cuda, device);
    bool counted = at >= 0 && contexts[at].overhead == 0; /* else another thread made the same primary context */
    if (at >= 0) {
        contexts[at].primary = primary;
        contexts[at].retains += primary;
        if (counted) contexts[at].overhead = overhead;
    }
    spin_unlock(&contexts_locked);
    atomic_fetch_add_explicit(&context_generation, 1, memory_order_release);
    if (!overhead) return;
    if (counted)
        account_note_context(device, (int64_t)overhead);
    else
        account_refund(device, overhead);
}

/* --- what the driver takes later --- */

static uint64_t excess_of(int device)
{
    spin_lock(&contexts_locked);
    uint64_t bytes = excesses[device].charged;
    spin_unlock(&contexts_locked);
    return bytes;
}

static void excess_set(int device, uint64_t bytes)
{
    if (device < 0) return;
    spin_lock(&contexts_locked);
    uint64_t before = excesses[device].charged;
    excesses[device].charged = bytes;
    spin_unlock(&contexts_locked);
    if (bytes == before) return;
    if (bytes > before) account_charge_anyway(device, bytes - before);
    if (bytes < before) account_refund(device, before - bytes);
    account_note_context(device, (int64_t)(bytes - before));
}

/* Charge what two comparisons in a row have shown. The account is read on both sides of NVML's figure, which takes a
   millisecond: a change in between makes the comparison void. */
static void compare(CUdevice cuda, int device)
{
    struct excess *excess = &excesses[device];
    uint64_t launches = __atomic_load_n(&account_own_slot()->launches, __ATOMIC_RELAXED);
    uint64_t own = account_own_used(device);
    uint64_t used;
    bool is_idle = own == excess->own && launches == excess->launches && excess->repeated > 1;
    if (is_idle || !context_own_use(cuda, &used) || account_own_used(device) != own) return;
    excess->repeated = own == excess->own && launches == excess->launches ? excess->repeated + 1 : 0;
    excess->launches = launches;
    uint64_t charged = excess_of(device);
    own -= own < charged ? own : charged;
    uint64_t seen = used > own ? used - own : 0;
    uint64_t bytes = seen < excess->seen ? seen : excess->seen;
    excess->seen = seen;
    excess_set(device, bytes);
    excess->own = own + bytes;
}

/* NVML's destructors run after this: no comparison begins any more, and one under way has ended, if it ends at all. */
static void compare_end(void)
{
    uint64_t end_ns = platform_now_ns() + COMPARE_MOST_NS;
    uint32_t free_now = 0;
    while (!atomic_compare_exchange_strong(&comparing, &free_now, COMPARE_ENDED) && free_now != COMPARE_ENDED &&
           platform_now_ns() < end_ns) {
        free_now = 0;
        platform_sleep_ns(COMPARE_MOST_NS / 1000);
    }
}

void context_compare(void)
{
    static uint32_t periods;
    static bool ends;
    uint32_t free_now = 0;
    CUdevice cuda_of[REGION_DEVICES_MAX];
    bool has_context[REGION_DEVICES_MAX] = {false};
    if (++periods < COMPARE_EACH + account_processes() / COMPARE_PROCESSES) return;
    periods = 0;
    hook_enter();
    if (!atomic_load(&nvml_pid) || atomic_load(&has_imports) || gate_is_closed()) return;
    if (!ends) ends = atexit(compare_end) == 0;
    if (!ends || !atomic_compare_exchange_strong(&comparing, &free_now, 1)) return;
    spin_lock(&contexts_locked);
    for (int i = 0; i < CONTEXTS; i++) {
        if (!contexts[i].handle || contexts[i].device < 0) continue;
        cuda_of[contexts[i].device] = contexts[i].cuda;
        has_context[contexts[i].device] = true;
    }
    spin_unlock(&contexts_locked);
    for (int device = 0; device < (int)REGION_DEVICES_MAX; device++) {
        if (!has_context[device])
            excess_set(device, 0); /* its last context has ended during a comparison */
        else if (account_limit(device) != UINT64_MAX)
            compare(cuda_of[device], device);
    }
    free_now = 1;
    atomic_compare_exchange_strong(&comparing, &free_now, 0);
}

/* --- memory of other processes --- */

/* Charged to the exporter. NVML's figure for the importer may contain it (not documented), so account and figure are not
   compared any more. */
#define IMPORT(name, parameters, arguments)                                                                            \
    HOOK_EXPORT CUresult name parameters                                                                               \
    {                                                                                                                  \
        hook_enter();                                                                                                  \
        CUresult result = DRIVER(name) arguments;                                                                      \
        if (result == CUDA_SUCCESS) {                                                                                  \
            atomic_store(&has_imports, true);                                                                          \
            gate_bind();                                                                                               \
        }                                                                                                              \
        return result;                                                                                                 \
    }

IMPORT(cuIpcOpenMemHandle, (CUdeviceptr * pointer, CUipcMemHandle handle, unsigned int flags), (pointer, handle, flags))
IMPORT(cuIpcOpenMemHandle_v2, (CUdeviceptr * pointer, CUipcMemHandle handle, unsigned int flags),
       (pointer, handle, flags))
IMPORT(cuMemImportFromShareableHandle,
       (CUmemGenericAllocationHandle * handle, void *exported, CUmemAllocationHandleType type),
       (handle, exported, type))
IMPORT(cuMemPoolImportFromShareableHandle,
       (CUmemoryPool * pool, void *exported, CUmemAllocationHandleType type, unsigned long long flags),
       (pool, exported, type, flags))

#define EXPORT(name, parameters, arguments)                                                                            \
    HOOK_EXPORT CUresult name parameters                                                                               \
    {                                                                                                                  \
        hook_enter();                                                                                                  \
        CUresult result = DRIVER(name) arguments;                                                                      \
        if (result == CUDA_SUCCESS) gate_bind();                                                                       \
        return result;                                                                                                 \
    }

EXPORT(cuIpcGetMemHandle, (CUipcMemHandle * handle, CUdeviceptr pointer), (handle, pointer))
EXPORT(cuMemExportToShareableHandle,
       (void *exported, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags),
       (exported, handle, type, flags))
EXPORT(cuMemGetHandleForAddressRange,
       (void *exported, CUdeviceptr pointer, size_t bytes, CUmemRangeHandleType type, unsigned long long flags),
       (exported, pointer, bytes, type, flags))
EXPORT(cuMemPoolExportPointer, (CUmemPoolPtrExportData * exported, CUdeviceptr pointer), (exported, pointer))
EXPORT(cuMemPoolExportToShareableHandle,
       (void *exported, CUmemoryPool pool, CUmemAllocationHandleType type, unsigned long long flags),
       (exported, pool, type, flags))

/* --- contexts made and ended --- */

static void context_ended(CUcontext handle)
{
    spin_lock(&contexts_locked);
    int at = handle ? find(handle) : -1;
    struct context ended = {0};
    if (at >= 0) ended = contexts[at];
    spin_unlock(&contexts_locked);
    if (at < 0) return;
    hook_forget_context(&(struct hook_context){.tag = (uint8_t)at, .device = ended.device, .primary = ended.primary});
    if (ended.overhead) {
        account_refund(ended.device, ended.overhead);
        account_note_context(ended.device, -(int64_t)ended.overhead);
    }
    spin_lock(&contexts_locked);
    if (contexts[at].handle == handle) contexts[at] = (struct context){0};
    bool is_last = true;
    for (int i = 0; i < CONTEXTS; i++)
        if (contexts[i].handle && contexts[i].device == ended.device) is_last = false;
    spin_unlock(&contexts_locked);
    if (is_last) excess_set(ended.device, 0); /* stacks, heaps and code end with the context */
    atomic_fetch_add_explicit(&context_generation, 1, memory_order_release);
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

static CUresult created(struct measure *measure, CUresult result, const CUcontext *context)
{
    if (result != CUDA_SUCCESS) {
        measure_drop(measure);
        return result;
    }
    uint64_t bytes = measure_end(measure);
    if (!measure_settle(measure, bytes)) {
        DRIVER(cuCtxDestroy_v2)(*context);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    context_made(*context, measure->cuda, measure->device, false, bytes);
    return CUDA_SUCCESS;
}

#define CREATE(name, parameters, device_parameter, arguments)                                                          \
    HOOK_EXPORT CUresult name parameters                                                                               \
    {                                                                                                                  \
        hook_enter();                                                                                                  \
        int device = device_limits(device_parameter);                                                                  \
        if (device < 0 && device_is_foreign(device_parameter)) return CUDA_ERROR_OUT_OF_MEMORY;                        \
        if (device < 0 || !context) return DRIVER(name) arguments;                                                     \
        struct measure measure;                                                                                        \
        if (!measure_begin(&measure, device_parameter, device)) return CUDA_ERROR_OUT_OF_MEMORY;                       \
        return created(&measure, DRIVER(name) arguments, context);                                                     \
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
    if (device < 0 && device_is_foreign(device_number)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (device < 0 || !context) return DRIVER(cuDevicePrimaryCtxRetain)(context, device_number);
    unsigned int flags;
    int active = 1;
    uint64_t bytes = 0;
    struct measure measure;
    bool first = DRIVER(cuDevicePrimaryCtxGetState)(device_number, &flags, &active) == CUDA_SUCCESS && !active;
    if (first && !measure_begin(&measure, device_number, device)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuDevicePrimaryCtxRetain)(context, device_number);
    if (result != CUDA_SUCCESS) {
        if (first) measure_drop(&measure);
        return result;
    }
    if (first) {
        bytes = measure_end(&measure);
        if (!measure_settle(&measure, bytes)) {
            DRIVER(cuDevicePrimaryCtxRelease_v2)(device_number);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    context_made(*context, device_number, device, true, bytes);
    return CUDA_SUCCESS;
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
