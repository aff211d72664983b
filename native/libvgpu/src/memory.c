/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See memory.h. Hooks: linear, pitched and managed memory; what the container sees of its devices.
 *
 * A pointer is forgotten before the driver frees it and remembered again if the driver refuses, because another thread may
 * be given the same address in between.
 */
#include "memory.h"

#include "context.h"
#include "device.h"
#include "gate.h"
#include "hook.h"
#include "piece.h"
#include "pointer.h"
#include "pool.h"

/* --- allocate --- */

/* After the driver's answer to a request that was charged `bytes` and takes `held`. */
static inline CUresult settle(CUresult result, CUdeviceptr pointer, const struct context_here *here, uint64_t bytes,
                              enum pointer_kind kind)
{
    if (UNLIKELY(result != CUDA_SUCCESS)) {
        account_refund(here->device, bytes);
        return result;
    }
    struct held held = {
        .bytes = bytes & TABLE_BYTES_MAX, .device = (uint64_t)here->device & 0x3f, .kind = kind & 7, .tag = here->tag};
    if (LIKELY(pool_remember(pointer, held))) return CUDA_SUCCESS;
    DRIVER(cuMemFree_v2)(pointer);
    account_refund(here->device, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Nothing to charge: no context, no limits, or more than any device has, which the driver refuses itself. */
static bool is_free_of_charge(struct context_here *here, uint64_t bytes)
{
    return !context_here(here) || here->device < 0 || bytes > TABLE_BYTES_MAX;
}

/* The driver gives a large block whole pieces of the device. Their size is measured with the first blocks that show it. */
static __attribute__((noinline)) CUresult allocate_large(CUdeviceptr *pointer, size_t bytes,
                                                         const struct context_here *here)
{
    uint64_t charged = piece_round_block(here->device, bytes);
    uint64_t before = 0, after = 0;
    enum pointer_kind kind = POINTER_PLAIN;
    if (!hook_charge(here->device, charged)) return CUDA_ERROR_OUT_OF_MEMORY;
    bool measures = piece_wants_block(here->device, bytes) && context_own_use(here->cuda, &before);
    uint64_t own = measures ? account_own_used(here->device) : 0;
    CUresult result = DRIVER(cuMemAlloc_v2)(pointer, bytes);
    if (measures && result == CUDA_SUCCESS && context_own_use(here->cuda, &after) &&
        account_own_used(here->device) == own)
        piece_learn_block(here->device, bytes, after - before);
    if (result != CUDA_SUCCESS) result = pointer_spill(pointer, bytes, here, result, &kind);
    return settle(result, *pointer, here, charged, kind);
}

HOOK_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    struct context_here here;
    enum pointer_kind kind = POINTER_PLAIN;
    hook_enter();
    if (UNLIKELY(!pointer || is_free_of_charge(&here, bytes))) return DRIVER(cuMemAlloc_v2)(pointer, bytes);
    if (UNLIKELY(bytes > PIECE_LARGE)) return allocate_large(pointer, bytes, &here);
    if (UNLIKELY(!hook_charge(here.device, bytes))) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuMemAlloc_v2)(pointer, bytes);
    if (UNLIKELY(result != CUDA_SUCCESS)) result = pointer_spill(pointer, bytes, &here, result, &kind);
    return settle(result, *pointer, &here, bytes, kind);
}

HOOK_EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes)
{
    struct context_here here;
    hook_enter();
    if (!pointer || is_free_of_charge(&here, bytes)) return DRIVER(cuMemAlloc)(pointer, bytes);
    uint64_t charged = piece_round_block(here.device, bytes);
    if (!hook_charge(here.device, charged)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuMemAlloc)(pointer, bytes);
    return settle(result, *pointer, &here, charged, POINTER_PLAIN);
}

HOOK_EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
    struct context_here here;
    hook_enter();
    gate_bind();
    if (!pointer || is_free_of_charge(&here, bytes)) return DRIVER(cuMemAllocManaged)(pointer, bytes, flags);
    if (!hook_charge(here.device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuMemAllocManaged)(pointer, bytes, flags);
    return settle(result, *pointer, &here, bytes, POINTER_MANAGED);
}

/* The driver's pitch is a multiple of this on every device so far; spilled memory is given the same. */
#define PITCH 512u

static bool pitched(uint64_t width, uint64_t height, uint64_t *bytes)
{
    return width <= TABLE_BYTES_MAX && !__builtin_mul_overflow((width + PITCH - 1) / PITCH * PITCH, height, bytes);
}

/* The pitch is known only afterwards: the expected one was charged, now the difference; memory that does not fit is freed. */
static CUresult settle_pitch(CUresult result, CUdeviceptr pointer, const struct context_here *here, uint64_t charged,
                             uint64_t pitch, uint64_t height, enum pointer_kind kind)
{
    uint64_t bytes;
    bool is_known = result == CUDA_SUCCESS && !__builtin_mul_overflow(pitch, height, &bytes);
    bytes = is_known ? piece_round_block(here->device, bytes) : charged;
    if (bytes < charged) {
        account_refund(here->device, charged - bytes);
    } else if (bytes > charged && !hook_charge(here->device, bytes - charged)) {
        DRIVER(cuMemFree_v2)(pointer);
        result = CUDA_ERROR_OUT_OF_MEMORY;
        bytes = charged;
    }
    return settle(result, pointer, here, bytes, kind);
}

HOOK_EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                                        unsigned int element)
{
    struct context_here here;
    uint64_t bytes;
    enum pointer_kind kind = POINTER_PLAIN;
    hook_enter();
    if (!pointer || !pitch || !pitched(width, height, &bytes) || is_free_of_charge(&here, bytes))
        return DRIVER(cuMemAllocPitch_v2)(pointer, pitch, width, height, element);
    bytes = piece_round_block(here.device, bytes);
    if (!hook_charge(here.device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuMemAllocPitch_v2)(pointer, pitch, width, height, element);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        result = pointer_spill(pointer, bytes, &here, result, &kind);
        if (result == CUDA_SUCCESS) *pitch = (width + PITCH - 1) / PITCH * PITCH;
    }
    return settle_pitch(result, *pointer, &here, bytes, *pitch, height, kind);
}

HOOK_EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width,
                                     unsigned int height, unsigned int element)
{
    struct context_here here;
    uint64_t bytes;
    hook_enter();
    if (!pointer || !pitch || !pitched(width, height, &bytes) || is_free_of_charge(&here, bytes))
        return DRIVER(cuMemAllocPitch)(pointer, pitch, width, height, element);
    if (!hook_charge(here.device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuMemAllocPitch)(pointer, pitch, width, height, element);
    return settle_pitch(result, *pointer, &here, bytes, *pitch, height, POINTER_PLAIN);
}

/* --- free --- */

HOOK_EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    struct held held;
    hook_enter();
    if (UNLIKELY(!table_take(&pointer_table, pointer, &held))) return DRIVER(cuMemFree_v2)(pointer);
    CUresult result = DRIVER(cuMemFree_v2)(pointer);
    if (UNLIKELY(result != CUDA_SUCCESS)) {
        pool_remember(pointer, held);
    } else if (UNLIKELY(held.kind == POINTER_POOLED)) {
        pool_freed(&held, true);
    } else {
        hook_refund((int)held.device, held.bytes);
    }
    return result;
}

HOOK_EXPORT CUresult cuMemFree(CUdeviceptr_v1 pointer)
{
    struct held held;
    hook_enter();
    if (!table_take(&pointer_table, pointer, &held)) return DRIVER(cuMemFree)(pointer);
    CUresult result = DRIVER(cuMemFree)(pointer);
    if (result != CUDA_SUCCESS)
        pool_remember(pointer, held);
    else
        account_refund((int)held.device, held.bytes);
    return result;
}

/* --- what is seen --- */

/* Memory beyond the request is not booked: what the card has left bounds it, too. */
struct memory_view memory_view(int device, uint64_t real_total, uint64_t real_free)
{
    account_reclaim();
    uint64_t limit = account_limit(device);
    bool may_burst = account_may_burst(device);
    uint64_t bound = may_burst ? account_bound(device) : limit;
    uint64_t used = account_used(device);
    uint64_t total = limit <= real_total || pointer_may_exceed(device) ? limit : real_total;
    if (bound > total) bound = total;
    uint64_t free = used < bound ? bound - used : 0;
    if (may_burst && free > real_free) free = real_free;
    return (struct memory_view){.total = total, .free = free, .used = used < total ? used : total};
}

static bool is_viewed(int device)
{
    return device >= 0 && account_limit(device) != UINT64_MAX;
}

HOOK_EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
    size_t real_free = 0, real_total = 0;
    struct context_here here;
    hook_enter();
    if (UNLIKELY(!free || !total || !context_here(&here) || !is_viewed(here.device)))
        return DRIVER(cuMemGetInfo_v2)(free, total);
    CUresult result = DRIVER(cuMemGetInfo_v2)(&real_free, &real_total);
    if (result != CUDA_SUCCESS) return result;
    pool_settle_if_slack(here.device);
    struct memory_view view = memory_view(here.device, real_total, real_free);
    *total = view.total;
    *free = view.free;
    return CUDA_SUCCESS;
}

static unsigned int in_32_bits(uint64_t bytes)
{
    return bytes < UINT32_MAX ? (unsigned int)bytes : UINT32_MAX;
}

HOOK_EXPORT CUresult cuMemGetInfo(unsigned int *free, unsigned int *total)
{
    unsigned int real_free = 0, real_total = 0;
    size_t wide_free = 0, wide_total = 0;
    struct context_here here;
    hook_enter();
    if (!free || !total || !context_here(&here) || !is_viewed(here.device)) return DRIVER(cuMemGetInfo)(free, total);
    CUresult result = DRIVER(cuMemGetInfo)(&real_free, &real_total);
    if (result != CUDA_SUCCESS) return result;
    result = cuMemGetInfo_v2(&wide_free, &wide_total);
    *free = in_32_bits(wide_free);
    *total = in_32_bits(wide_total);
    return result;
}

HOOK_EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device_number)
{
    CUresult result = DRIVER(cuDeviceTotalMem_v2)(bytes, device_number);
    if (result != CUDA_SUCCESS || !bytes) return result;
    int device = device_limits(device_number);
    if (is_viewed(device) && account_limit(device) < *bytes) *bytes = account_limit(device);
    return result;
}

HOOK_EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device_number)
{
    CUresult result = DRIVER(cuDeviceTotalMem)(bytes, device_number);
    if (result != CUDA_SUCCESS || !bytes) return result;
    int device = device_limits(device_number);
    if (is_viewed(device) && account_limit(device) < *bytes) *bytes = in_32_bits(account_limit(device));
    return result;
}
