/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See pool.h. Hooks: stream-ordered allocation and release, pools, and the calls at which pools give memory back.
 *
 * A request during stream capture becomes a node of a graph and is charged as such.
 * Locks taken here: one for the pools' figures, for a few instructions; the driver is never called under it. Pools are found
 * without it: an entry is reused only after its pool was destroyed, and its handle is written last.
 */
#include "pool.h"

#include <stdatomic.h>
#include <string.h>

#include "bell.h"
#include "context.h"
#include "device.h"
#include "gate.h"
#include "hook.h"
#include "launch.h"
#include "memory_graph.h"
#include "piece.h"
#include "pointer.h"

#define POOLS 255u
#define DEVICES 64 /* CUDA ordinals */

struct pool {
    _Atomic(CUmemoryPool) handle; /* NULL: free; written last */
    _Atomic(int) device;          /* index in the limits, -1: host memory or a device without limits */
    _Atomic(bool) destroyed;      /* by the application; lives on while memory of it is held */
    uint32_t flying;              /* requests on their way */
    uint64_t seen;                /* reserved, when it was last learnt from */
    uint64_t live;                /* requested and not freed, requests on their way included */
    uint64_t charged;             /* >= live; >= live in whole pieces while requests are on their way */
};

static struct pool pools[POOLS];
static _Atomic(uint32_t) pools_locked;
/* For each CUDA ordinal the pool of requests that name none: its number, and above it the round in which the driver said so. A
   new round begins with whatever may change that. */
#define NUMBER_BITS 8u
static _Atomic(uint64_t) current_pools[DEVICES];
static _Atomic(uint64_t) current_round = 1;

static _Atomic(bool) slack; /* some pool may release memory that it keeps, or has: charged > live */

static bool reserved_of(CUmemoryPool handle, uint64_t *bytes)
{
    cuuint64_t reserved = 0;
    if (DRIVER(cuMemPoolGetAttribute)(handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) != CUDA_SUCCESS)
        return false;
    *bytes = reserved;
    return true;
}

/* Number of a pool that was entered; POOLS: it was not. */
static uint32_t pool_find(CUmemoryPool handle)
{
    uint32_t number = 0;
    while (number < POOLS && (atomic_load_explicit(&pools[number].handle, memory_order_acquire) != handle ||
                              atomic_load_explicit(&pools[number].destroyed, memory_order_relaxed)))
        number++;
    return number;
}

/* Number of the pool, entered with its device if it is new; POOLS: no room, it stays uncounted. */
static uint32_t pool_enter(CUmemoryPool handle, int device)
{
    uint32_t unused = POOLS, number = POOLS;
    spin_lock(&pools_locked);
    for (uint32_t i = 0; i < POOLS && number == POOLS; i++) {
        if (pools[i].handle == handle && !pools[i].destroyed) number = i;
        if (!pools[i].handle && unused == POOLS) unused = i;
    }
    if (number == POOLS && unused < POOLS) {
        number = unused;
        pools[number].live = pools[number].charged = 0;
        pools[number].flying = 0;
        pools[number].seen = 0;
        pools[number].destroyed = false;
        pools[number].device = device;
        pools[number].handle = handle;
    }
    spin_unlock(&pools_locked);
    return number;
}

/* The end of a request: it is not on its way any more, and `failed` bytes of it are not live. */
struct landing {
    uint32_t requests;
    uint64_t failed;
};

/* Bring `charged` to what the driver has reserved. `strict`: growth that does not fit is not charged; false then. */
static bool pool_land(uint32_t number, struct landing landing, bool strict, bool *refunded)
{
    uint64_t reserved = 0;
    struct pool *pool = &pools[number];
    bool fits = true;
    bool known = !pool->destroyed && reserved_of(pool->handle, &reserved);
    spin_lock(&pools_locked);
    if (known && reserved > pool->live && reserved != pool->seen) {
        pool->seen = reserved;
        piece_learn(pool->device, reserved);
    }
    pool->flying -= landing.requests;
    pool->live -= landing.failed;
    uint64_t target = pool->flying ? piece_round(pool->device, pool->live) : pool->live;
    if (known && reserved > target) target = reserved;
    if (target > pool->charged) {
        fits = !strict || account_charge(pool->device, target - pool->charged);
        if (!strict) account_charge_anyway(pool->device, target - pool->charged);
        if (fits) pool->charged = target;
    } else if (target < pool->charged) {
        account_refund(pool->device, pool->charged - target);
        pool->charged = target;
        if (refunded) *refunded = true;
    }
    if (pool->charged > pool->live) atomic_store_explicit(&slack, true, memory_order_relaxed);
    if (pool->destroyed && pool->charged == 0) pool->handle = NULL;
    spin_unlock(&pools_locked);
    return fits;
}

static bool pool_settle(uint32_t number, bool strict, bool *refunded)
{
    return pool_land(number, (struct landing){0}, strict, refunded);
}

bool pool_settle_device(int device)
{
    bool refunded = false;
    for (uint32_t i = 0; i < POOLS; i++)
        if (pools[i].handle && pools[i].device == device) pool_settle(i, false, &refunded);
    return refunded;
}

bool pool_trim_device(int device)
{
    bool refunded = false;
    for (uint32_t i = 0; i < POOLS; i++) {
        if (!pools[i].handle || pools[i].device != device || pools[i].destroyed) continue;
        spin_lock(&pools_locked);
        bool keeps = pools[i].charged > pools[i].live;
        spin_unlock(&pools_locked);
        if (keeps && DRIVER(cuMemPoolTrimTo)(pools[i].handle, 0) == CUDA_SUCCESS) pool_settle(i, false, &refunded);
    }
    return refunded;
}

void pool_settle_if_slack(int device)
{
    if (LIKELY(!atomic_load_explicit(&slack, memory_order_relaxed))) return;
    pool_settle_device(device);
}

/* A pool of another device may still keep its memory: settling sets `slack` again. */
static void settle_slack(void)
{
    if (LIKELY(!atomic_load_explicit(&slack, memory_order_relaxed))) return;
    atomic_store_explicit(&slack, false, memory_order_relaxed);
    for (uint32_t i = 0; i < POOLS; i++)
        if (pools[i].handle && pools[i].device >= 0) pool_settle(i, false, NULL);
}

void pool_freed(const struct held *held, bool done)
{
    uint32_t number = (uint32_t)held->tag;
    spin_lock(&pools_locked);
    struct pool *pool = &pools[number];
    pool->live -= held->bytes < pool->live ? held->bytes : pool->live;
    spin_unlock(&pools_locked);
    atomic_store_explicit(&slack, true, memory_order_relaxed);
    if (done || pool->destroyed) pool_settle(number, false, NULL);
}

void pool_replaced(const struct held *held)
{
    if (held->kind == POINTER_POOLED)
        pool_freed(held, false);
    else
        account_refund((int)held->device, held->bytes);
}

static bool is_of_pool(const struct held *held, const void *what)
{
    return held->kind == POINTER_POOLED && held->tag == *(const uint8_t *)what;
}

static void nothing_more(uint64_t key, const struct held *held, void *into)
{
    (void)key;
    (void)held;
    (void)into;
}

static void begin_round(void)
{
    atomic_fetch_add_explicit(&current_round, 1, memory_order_release);
}

void pool_forget_context(const struct hook_context *ended)
{
    int device = ended->device;
    if (!ended->primary) return;
    begin_round();
    for (uint32_t i = 0; i < POOLS; i++) {
        cuuint64_t used = 1;
        if (!pools[i].handle || pools[i].device != device) continue;
        CUresult result = DRIVER(cuMemPoolGetAttribute)(pools[i].handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used);
        if (result == CUDA_SUCCESS && used) continue;
        uint8_t tag = (uint8_t)i;
        table_take_if(&pointer_table, is_of_pool, &tag, nothing_more, NULL);
        spin_lock(&pools_locked);
        pools[i].live = 0;
        spin_unlock(&pools_locked);
        pool_settle(i, false, NULL);
    }
}

void pool_reset(void)
{
    memset(pools, 0, sizeof pools);
    atomic_store(&pools_locked, 0);
    begin_round();
    atomic_store(&slack, false);
}

/* --- allocate --- */

static bool is_capturing(CUstream stream, bool per_thread)
{
    if ((!stream && !per_thread) || stream == CU_STREAM_LEGACY) return false; /* cannot be captured */
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result =
        per_thread ? DRIVER(cuStreamIsCapturing_ptsz)(stream, &status) : DRIVER(cuStreamIsCapturing)(stream, &status);
    return result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/* Charge the bytes that a pool lacks for a request, in whole pieces; false: they do not fit. */
static bool pool_charge(uint32_t number, uint64_t bytes)
{
    struct pool *pool = &pools[number];
    spin_lock(&pools_locked);
    uint64_t live = pool->live + bytes;
    uint64_t whole = piece_round(pool->device, live);
    bool fits = whole <= pool->charged || account_charge(pool->device, whole - pool->charged);
    if (fits) {
        pool->flying++;
        pool->live = live;
        if (pool->charged < whole) pool->charged = whole;
    }
    spin_unlock(&pools_locked);
    return fits;
}

/* As hook_charge_again. */
static __attribute__((noinline)) bool charge_again(uint32_t number, uint64_t bytes)
{
    int device = pools[number].device;
    bool fits =
        (hook_settle(device) && pool_charge(number, bytes)) || (hook_trim(device) && pool_charge(number, bytes));
    if (!fits) account_say_refused(device, bytes);
    return fits;
}

/* Of a pool that was not seen being made, such as the default one of the host; drivers before CUDA 13 do not say, and have no
   such pools. */
static bool pool_is_on_host(CUmemoryPool handle)
{
    int type = CU_MEM_ALLOCATION_TYPE_MANAGED;
    int location = CU_MEM_LOCATION_TYPE_DEVICE;
    return DRIVER(cuMemPoolGetAttribute)(handle, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &type) == CUDA_SUCCESS &&
           type != CU_MEM_ALLOCATION_TYPE_MANAGED &&
           DRIVER(cuMemPoolGetAttribute)(handle, CU_MEMPOOL_ATTR_LOCATION_TYPE, &location) == CUDA_SUCCESS &&
           location != CU_MEM_LOCATION_TYPE_DEVICE && location != CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN;
}

struct request {
    CUdeviceptr *pointer;
    size_t bytes;
    CUmemoryPool pool; /* NULL: the current one of the stream's device */
    CUstream stream;
    bool per_thread;
};

static CUresult ask_driver(const struct request *request)
{
    if (request->pool && request->per_thread)
        return DRIVER(cuMemAllocFromPoolAsync_ptsz)(request->pointer, request->bytes, request->pool, request->stream);
    if (request->pool)
        return DRIVER(cuMemAllocFromPoolAsync)(request->pointer, request->bytes, request->pool, request->stream);
    if (request->per_thread) return DRIVER(cuMemAllocAsync_ptsz)(request->pointer, request->bytes, request->stream);
    return DRIVER(cuMemAllocAsync)(request->pointer, request->bytes, request->stream);
}

/* The pool has grown by more than fits: take the memory back and make the pool return it. */
static void give_up(const struct request *request, CUmemoryPool pool)
{
    if (request->per_thread) {
        DRIVER(cuMemFreeAsync_ptsz)(*request->pointer, request->stream);
        DRIVER(cuStreamSynchronize_ptsz)(request->stream);
    } else {
        DRIVER(cuMemFreeAsync)(*request->pointer, request->stream);
        DRIVER(cuStreamSynchronize)(request->stream);
    }
    DRIVER(cuMemPoolTrimTo)(pool, 0);
}

static uint32_t number_of(CUmemoryPool handle, const struct context_here *here)
{
    uint32_t number = pool_find(handle);
    return LIKELY(number < POOLS) ? number : pool_enter(handle, pool_is_on_host(handle) ? -1 : here->device);
}

static uint32_t current_number(const struct context_here *here)
{
    CUmemoryPool handle;
    uint64_t round = atomic_load_explicit(&current_round, memory_order_acquire);
    if ((unsigned int)here->cuda >= DEVICES) return POOLS;
    uint64_t known = atomic_load_explicit(&current_pools[here->cuda], memory_order_relaxed);
    if (LIKELY(known >> NUMBER_BITS == round)) return (uint32_t)(known & POOLS);
    if (DRIVER(cuDeviceGetMemPool)(&handle, here->cuda) != CUDA_SUCCESS) return POOLS;
    uint32_t number = number_of(handle, here);
    atomic_store_explicit(&current_pools[here->cuda], round << NUMBER_BITS | number, memory_order_relaxed);
    return number;
}

static CUresult allocate(const struct request *request)
{
    struct context_here here;
    enum pointer_kind kind = POINTER_POOLED;
    hook_enter();
    if (!request->pointer || request->bytes > TABLE_BYTES_MAX ||
        !context_of_stream(request->stream, request->per_thread, &here))
        return ask_driver(request);
    if (is_capturing(request->stream, request->per_thread)) {
        memory_graph_seen();
        return ask_driver(request);
    }
    uint32_t number = request->pool ? number_of(request->pool, &here) : current_number(&here);
    if (UNLIKELY(number == POOLS || pools[number].device < 0)) return ask_driver(request);
    int device = pools[number].device;
    if (UNLIKELY(!pool_charge(number, request->bytes)) && !charge_again(number, request->bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = ask_driver(request);
    if (UNLIKELY(result != CUDA_SUCCESS)) {
        pool_land(number, (struct landing){1, request->bytes}, false, NULL);
        if (result != CUDA_ERROR_OUT_OF_MEMORY || !pointer_may_spill(device, here.cuda, request->bytes)) return result;
        /* Managed memory is charged by request, not as part of the pool. */
        if (!hook_charge(device, request->bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
        result = pointer_spill(request->pointer, request->bytes, &here, result, &kind);
        if (result != CUDA_SUCCESS) {
            account_refund(device, request->bytes);
            return result;
        }
    } else if (UNLIKELY(!pool_land(number, (struct landing){1, 0}, true, NULL))) {
        give_up(request, pools[number].handle);
        pool_land(number, (struct landing){0, request->bytes}, false, NULL);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct held held = {.bytes = request->bytes & TABLE_BYTES_MAX,
                        .device = (uint64_t)device & 0x3f,
                        .kind = kind & 7,
                        .tag = kind == POINTER_POOLED ? (uint8_t)number : here.tag};
    pool_remember(*request->pointer, held);
    return CUDA_SUCCESS;
}

HOOK_EXPORT CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
    return allocate(&(struct request){pointer, bytes, NULL, stream, false});
}

HOOK_EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
    return allocate(&(struct request){pointer, bytes, NULL, stream, true});
}

HOOK_EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return allocate(&(struct request){pointer, bytes, pool, stream, false});
}

HOOK_EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool,
                                                  CUstream stream)
{
    return allocate(&(struct request){pointer, bytes, pool, stream, true});
}

/* --- free --- */

static CUresult free_async(CUdeviceptr pointer, CUstream stream, bool per_thread)
{
    struct held held;
    hook_enter();
    bool known = table_take(&pointer_table, pointer, &held);
    CUresult result;
    if (known && held.kind == POINTER_MANAGED) {
        /* Spilled: the driver does not free managed memory in stream order, so wait for the stream. */
        result = per_thread ? DRIVER(cuStreamSynchronize_ptsz)(stream) : DRIVER(cuStreamSynchronize)(stream);
        if (result == CUDA_SUCCESS) result = DRIVER(cuMemFree_v2)(pointer);
    } else {
        result = per_thread ? DRIVER(cuMemFreeAsync_ptsz)(pointer, stream) : DRIVER(cuMemFreeAsync)(pointer, stream);
    }
    if (!known) return result;
    if (result != CUDA_SUCCESS)
        pool_remember(pointer, held);
    else if (held.kind == POINTER_POOLED)
        pool_freed(&held, false);
    else
        account_refund((int)held.device, held.bytes);
    return result;
}

HOOK_EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
    return free_async(pointer, stream, false);
}

HOOK_EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream)
{
    return free_async(pointer, stream, true);
}

/* --- pools --- */

/* The device that is charged; false: the one of the first request from the pool. */
static bool pool_location(const CUmemPoolProps *properties, int *device)
{
    struct context_here here;
    *device = -1;
    if (properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        *device = device_limits(properties->location.id);
    else if (properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN)
        *device = device_limits(properties->location.id & 0xff);
    else if (properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED && context_here(&here))
        *device = here.device; /* managed memory may be on any device, wherever it prefers to be */
    else
        return properties->allocType != CU_MEM_ALLOCATION_TYPE_MANAGED;
    return true;
}

HOOK_EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    hook_enter();
    if (properties && properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED) gate_bind();
    CUresult result = DRIVER(cuMemPoolCreate)(pool, properties);
    int device;
    if (result == CUDA_SUCCESS && pool && properties && pool_location(properties, &device)) pool_enter(*pool, device);
    return result;
}

HOOK_EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    hook_enter();
    uint32_t number = POOLS;
    spin_lock(&pools_locked);
    for (uint32_t i = 0; i < POOLS; i++)
        if (pool && pools[i].handle == pool && !pools[i].destroyed) number = i;
    if (number < POOLS) pools[number].destroyed = true;
    spin_unlock(&pools_locked);
    CUresult result = DRIVER(cuMemPoolDestroy)(pool);
    begin_round(); /* the device goes back to its default pool */
    if (number == POOLS) return result;
    if (result != CUDA_SUCCESS)
        pools[number].destroyed = false;
    else
        pool_settle(number, false, NULL);
    return result;
}

HOOK_EXPORT CUresult cuDeviceSetMemPool(CUdevice device_number, CUmemoryPool pool)
{
    CUresult result = DRIVER(cuDeviceSetMemPool)(device_number, pool);
    begin_round();
    return result;
}

HOOK_EXPORT CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
    CUresult result = DRIVER(cuMemSetMemPool)(location, type, pool);
    begin_round();
    return result;
}

HOOK_EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    hook_enter();
    CUresult result = DRIVER(cuMemPoolTrimTo)(pool, keep);
    atomic_store_explicit(&slack, true, memory_order_relaxed);
    settle_slack();
    return result;
}

/* --- where pools release memory --- */

static void settle_after_wait(void)
{
    launch_settle();
    settle_slack();
}

HOOK_EXPORT CUresult cuCtxSynchronize(void)
{
    bell_waits();
    CUresult result = DRIVER(cuCtxSynchronize)();
    settle_after_wait();
    return result;
}

HOOK_EXPORT CUresult cuCtxSynchronize_v2(CUcontext context)
{
    bell_waits();
    CUresult result = DRIVER(cuCtxSynchronize_v2)(context);
    settle_after_wait();
    return result;
}

HOOK_EXPORT CUresult cuEventSynchronize(CUevent event)
{
    bell_waits();
    CUresult result = DRIVER(cuEventSynchronize)(event);
    settle_after_wait();
    return result;
}

HOOK_EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    bell_waits();
    CUresult result = DRIVER(cuStreamSynchronize)(stream);
    settle_after_wait();
    return result;
}

HOOK_EXPORT CUresult cuStreamSynchronize_ptsz(CUstream stream)
{
    bell_waits();
    CUresult result = DRIVER(cuStreamSynchronize_ptsz)(stream);
    settle_after_wait();
    return result;
}
