/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See memory.h. Hooks: linear, pitched and managed memory; what the container sees of its devices.
 *
 * A pointer is forgotten before the driver frees it and remembered again if the driver refuses, because another thread may
 * be given the same address in between.
 */
#include "memory.h"

#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "hook.h"
#include "pool.h"

struct table memory_pointers;

/* --- shared by all hooks that make memory --- */

bool hook_charge_again(int device, uint64_t bytes)
{
    bool refunded = pool_settle_device(device);
    refunded |= memory_graph_settle(device);
    return refunded && account_charge(device, bytes);
}

bool hook_remember(struct table *table, uint64_t key, struct held held)
{
    struct held gone;
    enum table_put outcome = table_put(table, key, held, &gone);
    if (LIKELY(outcome == TABLE_NEW)) return true;
    if (outcome == TABLE_REPLACED && table == &memory_pointers && gone.kind == MEMORY_POOLED)
        pool_freed(&gone, false);
    else if (outcome == TABLE_REPLACED)
        account_refund((int)gone.device, gone.bytes);
    return outcome != TABLE_NO_MEMORY;
}

static bool is_of_context(const struct held *held, const void *what)
{
    return held->kind != MEMORY_POOLED && held->tag == *(const uint8_t *)what;
}

struct forgetting {
    void (*note)(int device, int64_t delta);
};

static void refund(uint64_t key, const struct held *held, void *into)
{
    const struct forgetting *forgetting = into;
    (void)key;
    account_refund((int)held->device, held->bytes);
    if (forgetting->note) forgetting->note((int)held->device, -(int64_t)held->bytes);
}

void hook_forget_context(struct table *table, uint8_t tag, void (*note)(int device, int64_t delta))
{
    struct forgetting forgetting = {note};
    table_take_if(table, is_of_context, &tag, refund, &forgetting);
}

void memory_forget_context(uint8_t tag)
{
    hook_forget_context(&memory_pointers, tag, NULL);
    memory_array_forget_context(tag);
    memory_module_forget_context(tag);
}

void memory_reset(void)
{
    table_reset(&memory_pointers);
}

/* --- allocate --- */

/* Where the node sells more memory than the card has. A tenant who sets this gains nothing but slow memory: the limit
   stays what it is. Asked only when the card is full. */
bool memory_may_spill(int device)
{
    const char *said = getenv("CUDA_OVERSUBSCRIBE");
    return device >= 0 && said && (strcmp(said, "true") == 0 || strcmp(said, "1") == 0);
}

CUresult memory_spill(CUdeviceptr *pointer, uint64_t bytes, int device, CUresult result, enum memory_kind *kind)
{
    if (result != CUDA_ERROR_OUT_OF_MEMORY || !memory_may_spill(device)) return result;
    result = DRIVER(cuMemAllocManaged)(pointer, bytes, CU_MEM_ATTACH_GLOBAL);
    if (result == CUDA_SUCCESS) *kind = MEMORY_MANAGED;
    return result;
}

/* After the driver's answer to a request that was charged `bytes` and takes `held`. */
static inline CUresult settle(CUresult result, CUdeviceptr pointer, const struct context_here *here, uint64_t bytes,
                              enum memory_kind kind)
{
    if (UNLIKELY(result != CUDA_SUCCESS)) {
        account_refund(here->device, bytes);
        return result;
    }
    struct held held = {
        .bytes = bytes & TABLE_BYTES_MAX, .device = (uint64_t)here->device & 0x3f, .kind = kind & 7, .tag = here->tag};
    if (LIKELY(hook_remember(&memory_pointers, pointer, held))) return CUDA_SUCCESS;
    DRIVER(cuMemFree_v2)(pointer);
    account_refund(here->device, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Nothing to charge: no context, no limits, or more than any device has, which the driver refuses itself. */
static bool is_free_of_charge(struct context_here *here, uint64_t bytes)
{
    return !context_here(here) || here->device < 0 || bytes > TABLE_BYTES_MAX;
}

HOOK_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    struct context_here here;
    enum memory_kind kind = MEMORY_PLAIN;
    hook_enter();
    if (UNLIKELY(!pointer || is_free_of_charge(&here, bytes))) return DRIVER(cuMemAlloc_v2)(pointer, bytes);
    if (UNLIKELY(!hook_charge(here.device, bytes))) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuMemAlloc_v2)(pointer, bytes);
    if (UNLIKELY(result != CUDA_SUCCESS)) result = memory_spill(pointer, bytes, here.device, result, &kind);
    return settle(result, *pointer, &here, bytes, kind);
}

HOOK_EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes)
{
    struct context_here here;
    hook_enter();
    if (!pointer || is_free_of_charge(&here, bytes)) return DRIVER(cuMemAlloc)(pointer, bytes);
    if (!hook_charge(here.device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuMemAlloc)(pointer, bytes);
    return settle(result, *pointer, &here, bytes, MEMORY_PLAIN);
}

HOOK_EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
    struct context_here here;
    hook_enter();
    if (!pointer || is_free_of_charge(&here, bytes)) return DRIVER(cuMemAllocManaged)(pointer, bytes, flags);
    if (!hook_charge(here.device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuMemAllocManaged)(pointer, bytes, flags);
    return settle(result, *pointer, &here, bytes, MEMORY_MANAGED);
}

/* The driver's pitch is a multiple of this on every device so far; spilled memory is given the same. */
#define PITCH 512u

static bool pitched(uint64_t width, uint64_t height, uint64_t *bytes)
{
    return width <= TABLE_BYTES_MAX && !__builtin_mul_overflow((width + PITCH - 1) / PITCH * PITCH, height, bytes);
}

/* The pitch is known only afterwards: what it will be was charged, now the difference; what does not fit is given back. */
static CUresult settle_pitch(CUresult result, CUdeviceptr pointer, const struct context_here *here, uint64_t charged,
                             uint64_t pitch, uint64_t height, enum memory_kind kind)
{
    uint64_t bytes;
    if (result != CUDA_SUCCESS || __builtin_mul_overflow(pitch, height, &bytes)) {
        bytes = charged;
    } else if (bytes < charged) {
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
    enum memory_kind kind = MEMORY_PLAIN;
    hook_enter();
    if (!pointer || !pitch || !pitched(width, height, &bytes) || is_free_of_charge(&here, bytes))
        return DRIVER(cuMemAllocPitch_v2)(pointer, pitch, width, height, element);
    if (!hook_charge(here.device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuMemAllocPitch_v2)(pointer, pitch, width, height, element);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        result = memory_spill(pointer, bytes, here.device, result, &kind);
        if (result == CUDA_SUCCESS) *pitch = bytes / height;
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
    return settle_pitch(result, *pointer, &here, bytes, *pitch, height, MEMORY_PLAIN);
}

/* --- free --- */

HOOK_EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    struct held held;
    hook_enter();
    if (UNLIKELY(!table_take(&memory_pointers, pointer, &held))) return DRIVER(cuMemFree_v2)(pointer);
    CUresult result = DRIVER(cuMemFree_v2)(pointer);
    if (UNLIKELY(result != CUDA_SUCCESS)) {
        hook_remember(&memory_pointers, pointer, held);
    } else if (UNLIKELY(held.kind == MEMORY_POOLED)) {
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
    if (!table_take(&memory_pointers, pointer, &held)) return DRIVER(cuMemFree)(pointer);
    CUresult result = DRIVER(cuMemFree)(pointer);
    if (result != CUDA_SUCCESS)
        hook_remember(&memory_pointers, pointer, held);
    else
        account_refund((int)held.device, held.bytes);
    return result;
}

/* --- what is seen --- */

void memory_view(int device, uint64_t real_total, uint64_t *total, uint64_t *free)
{
    uint64_t limit = account_limit(device);
    uint64_t used = account_used(device);
    *total = limit < real_total ? limit : real_total;
    *free = used < *total ? *total - used : 0;
}

static bool is_viewed(int device)
{
    return device >= 0 && account_limit(device) != UINT64_MAX;
}

HOOK_EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
    size_t real_free = 0, real_total = 0;
    uint64_t own_free, own_total;
    struct context_here here;
    hook_enter();
    if (UNLIKELY(!free || !total || !context_here(&here) || !is_viewed(here.device)))
        return DRIVER(cuMemGetInfo_v2)(free, total);
    CUresult result = DRIVER(cuMemGetInfo_v2)(&real_free, &real_total);
    if (result != CUDA_SUCCESS) return result;
    pool_settle_if_slack(here.device);
    memory_view(here.device, real_total, &own_total, &own_free);
    *total = own_total;
    *free = own_free;
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
