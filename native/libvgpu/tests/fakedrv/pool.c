/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory pools and stream-ordered allocation.
 *
 * A pool reserves memory from the device in pieces of `pool_granularity` and keeps what is freed until a
 * synchronisation finds it above the release threshold. An allocation is ready and a free is done when the call
 * returns: the host's order stands for the stream's, so memory is reused as early as a stream could.
 *
 * Locks taken here: fake.lock. Called with hooks active: no.
 */
#include "fake.h"

#include <stdlib.h>

#define POOL_MAGIC UINT64_C(0x4c4f4f50454b4146)

#define ENTER_DEVICE(out, device)                                                                                      \
    ENTER();                                                                                                           \
    if ((out) == NULL) return CUDA_ERROR_INVALID_VALUE;                                                                \
    if ((device) < 0 || (unsigned int)(device) >= fake.device_count) return CUDA_ERROR_INVALID_DEVICE

enum { PINNED = 1, MANAGED = 2, ATTRIBUTE_TYPE = 9, ATTRIBUTE_LOCATION = 12, CUDA_13 = 13000 };

static struct fake_pool *pools;

static bool is_pool(const struct fake_pool *pool)
{
    return pool != NULL && pool->magic == POOL_MAGIC && !pool->destroyed;
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

struct fake_pool *fake_pool_new(unsigned int device)
{
    struct fake_pool *pool = calloc(1, sizeof *pool);
    if (pool != NULL) {
        *pool = (struct fake_pool){.magic = POOL_MAGIC, .device = device, .toggles = {0, 1, 1, 1}, .next = pools};
        pools = pool;
    }
    return pool;
}

/* Caller holds the lock. */
static struct fake_pool *default_pool(unsigned int device)
{
    struct fake_device *at = &fake.devices[device];
    if (at->default_pool == NULL) {
        at->default_pool = fake_pool_new(device);
        if (at->default_pool != NULL) {
            at->default_pool->is_default = true;
        }
    }
    return at->default_pool;
}

/* The default one of the host; kept with the first device. */
static struct fake_pool *host_pool(void)
{
    struct fake_device *at = &fake.devices[0];
    if (at->host_pool == NULL) {
        at->host_pool = fake_pool_new(0);
        if (at->host_pool != NULL) {
            at->host_pool->is_default = true;
            at->host_pool->on_host = true;
        }
    }
    return at->host_pool;
}

static struct fake_pool *current_pool(unsigned int device)
{
    struct fake_pool *set = fake.devices[device].pool;
    return is_pool(set) ? set : default_pool(device);
}

static uint64_t piece(const struct fake_pool *pool, uint64_t bytes)
{
    uint64_t granularity = fake.devices[pool->device].pool_granularity;
    return (bytes + granularity - 1) / granularity * granularity;
}

static void reserve(struct fake_pool *pool, uint64_t bytes)
{
    pool->reserved += bytes;
    pool->reserved_high = larger(pool->reserved_high, pool->reserved);
}

bool fake_pool_take(struct fake_pool *pool, uint64_t bytes)
{
    uint64_t wanted = pool->used + bytes;
    uint64_t missing = wanted > pool->reserved ? piece(pool, wanted - pool->reserved) : 0;
    if (pool->max_bytes != 0 && pool->reserved + missing > piece(pool, pool->max_bytes)) {
        return false;
    }
    if (missing > 0 && !pool->on_host) {
        if (!fake_charge(pool->device, missing)) {
            fake_pools_settle(pool->device); /* memory that other pools merely keep is there to be used */
            if (!fake_charge(pool->device, missing)) {
                return false;
            }
        }
    }
    reserve(pool, missing);
    pool->used = wanted;
    pool->used_high = larger(pool->used_high, wanted);
    return true;
}

void fake_pool_trim(struct fake_pool *pool, uint64_t keep)
{
    uint64_t least = larger(pool->used, keep);
    uint64_t floor = least < pool->reserved ? piece(pool, least) : pool->reserved; /* a threshold may be UINT64_MAX */
    if (floor < pool->reserved) {
        if (!pool->on_host) {
            fake_refund(pool->device, pool->reserved - floor);
        }
        pool->reserved = floor;
    }
}

void fake_pool_give(struct fake_pool *pool, uint64_t bytes)
{
    pool->used -= bytes;
    if (pool->destroyed && pool->used == 0) {
        fake_pool_trim(pool, 0);
    }
}

void fake_pools_settle(unsigned int device)
{
    for (struct fake_pool *pool = pools; pool != NULL; pool = pool->next) {
        if (pool->device == device && pool != fake.devices[device].graph_pool) {
            fake_pool_trim(pool, pool->threshold);
        }
    }
}

void fake_pools_end(unsigned int device)
{
    fake_free_pooled(device);
    for (struct fake_pool *pool = pools; pool != NULL; pool = pool->next) {
        if (pool->device == device && pool != fake.devices[device].graph_pool) {
            fake_pool_trim(pool, 0);
            pool->destroyed = pool->destroyed || !pool->is_default;
        }
    }
    fake.devices[device].pool = NULL;
}

/* ---- allocation in stream order ---- */

static CUresult allocate(CUdeviceptr *out, uint64_t bytes, struct fake_pool *asked, CUstream stream, bool per_thread)
{
    struct fake_context *context = fake_current();
    CUresult result = fake_check_stream(stream, per_thread);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (out == NULL || bytes == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct fake_graph *graph = fake_capture_of(stream, per_thread, &result);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    fake_lock();
    struct fake_pool *pool = asked != NULL ? asked : current_pool(context->device);
    if (!is_pool(pool)) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else if (graph != NULL) {
        result = fake_graph_capture_alloc(graph, pool->device, bytes, out);
    } else if (!fake_pool_take(pool, bytes)) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        *out = fake_block_add(pool->device, bytes, FAKE_POOLED, pool);
        if (*out == 0) {
            fake_pool_give(pool, bytes);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    fake_unlock();
    return result;
}

#define ALLOC_ASYNC(name, per_thread)                                                                                  \
    API(name, CUdeviceptr *out, size_t bytes, CUstream stream)                                                         \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return allocate(out, bytes, NULL, stream, per_thread);                                                         \
    }
#define ALLOC_FROM_POOL(name, per_thread)                                                                              \
    API(name, CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)                                      \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return pool == NULL ? CUDA_ERROR_INVALID_VALUE : allocate(out, bytes, pool, stream, per_thread);               \
    }
ALLOC_ASYNC(cuMemAllocAsync, false)
ALLOC_ASYNC(cuMemAllocAsync_ptsz, true)
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync, false)
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync_ptsz, true)

static CUresult free_async(CUdeviceptr pointer, CUstream stream, bool per_thread)
{
    CUresult result = fake_check_stream(stream, per_thread);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (pointer == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct fake_graph *graph = fake_capture_of(stream, per_thread, &result);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    fake_lock();
    if (graph != NULL) {
        result = fake_graph_capture_free(graph, pointer);
    } else {
        struct fake_block *block = fake_block_find(pointer);
        bool is_stream_ordered = block != NULL && (block->kind == FAKE_POOLED || block->kind == FAKE_GRAPH);
        /* Memory of cuMemAlloc may be freed in stream order too. */
        bool is_plain = block != NULL && (block->kind == FAKE_LINEAR || block->kind == FAKE_MANAGED);
        result = is_stream_ordered || is_plain ? fake_free_block(block) : CUDA_ERROR_INVALID_VALUE;
    }
    fake_unlock();
    return result;
}

#define FREE_ASYNC(name, per_thread)                                                                                   \
    API(name, CUdeviceptr pointer, CUstream stream)                                                                    \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return free_async(pointer, stream, per_thread);                                                                \
    }
FREE_ASYNC(cuMemFreeAsync, false)
FREE_ASYNC(cuMemFreeAsync_ptsz, true)

/* ---- pools ---- */

API(cuMemPoolCreate, CUmemoryPool *out, const CUmemPoolProps *properties)
{
    ENTER();
    if (out == NULL || properties == NULL || (properties->type != PINNED && properties->type != MANAGED)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    bool is_managed = properties->type == MANAGED;
    bool on_device = properties->location.type == CU_MEM_LOCATION_DEVICE;
    bool on_host = !on_device && !is_managed;
    const struct fake_context *context = fake_current();
    int device = on_device ? properties->location.id : is_managed && context != NULL ? (int)context->device : 0;
    if (device < 0 || (unsigned int)device >= fake.device_count) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    fake_lock();
    struct fake_pool *pool = fake_pool_new((unsigned int)device);
    if (pool != NULL) {
        pool->on_host = on_host;
        pool->is_managed = is_managed;
        pool->max_bytes = properties->max_size;
    }
    fake_unlock();
    *out = pool;
    return pool == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* Allocations from the pool stay valid; the pool is freed with the last of them. */
API(cuMemPoolDestroy, CUmemoryPool pool)
{
    ENTER();
    fake_lock();
    bool good = is_pool(pool) && !pool->is_default;
    if (good) {
        fake_pool_trim(pool, 0);
        pool->destroyed = true;
        if (fake.devices[pool->device].pool == pool) {
            fake.devices[pool->device].pool = NULL;
        }
    }
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemPoolTrimTo, CUmemoryPool pool, size_t keep)
{
    ENTER();
    fake_lock();
    bool good = is_pool(pool);
    if (good) {
        fake_pool_trim(pool, keep);
    }
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemPoolGetAttribute, CUmemoryPool pool, int attribute, void *value)
{
    CUresult result = CUDA_SUCCESS;
    ENTER();
    fake_lock();
    if (!is_pool(pool) || value == NULL) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        *(uint64_t *)value = pool->threshold;
    } else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) {
        *(uint64_t *)value = pool->reserved;
    } else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) {
        *(uint64_t *)value = pool->reserved_high;
    } else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT) {
        *(uint64_t *)value = pool->used;
    } else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) {
        *(uint64_t *)value = pool->used_high;
    } else if (attribute == ATTRIBUTE_TYPE && fake.state.cuda_version >= CUDA_13) {
        *(int *)value = pool->is_managed ? MANAGED : PINNED;
    } else if (attribute == ATTRIBUTE_LOCATION && fake.state.cuda_version >= CUDA_13) {
        *(int *)value = pool->on_host ? CU_MEM_LOCATION_HOST : CU_MEM_LOCATION_DEVICE;
    } else if (attribute >= 1 && attribute <= 3) {
        *(int *)value = pool->toggles[attribute];
    } else {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    fake_unlock();
    return result;
}

API(cuMemPoolSetAttribute, CUmemoryPool pool, int attribute, void *value)
{
    CUresult result = CUDA_SUCCESS;
    ENTER();
    fake_lock();
    if (!is_pool(pool) || value == NULL) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        pool->threshold = *(const uint64_t *)value;
    } else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH && *(const uint64_t *)value == 0) {
        pool->reserved_high = pool->reserved;
    } else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH && *(const uint64_t *)value == 0) {
        pool->used_high = pool->used;
    } else if (attribute >= 1 && attribute <= 3) {
        pool->toggles[attribute] = *(const int *)value;
    } else {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    fake_unlock();
    return result;
}

API(cuMemPoolSetAccess, CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    ENTER();
    return is_pool(pool) && (map != NULL || count == 0) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemPoolGetAccess, int *flags, CUmemoryPool pool, CUmemLocation *location)
{
    enum { READ_WRITE = 3 };
    ENTER();
    if (flags == NULL || location == NULL || !is_pool(pool)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *flags = location->type == CU_MEM_LOCATION_DEVICE && location->id == (int)pool->device ? READ_WRITE : 0;
    return CUDA_SUCCESS;
}

API(cuDeviceGetDefaultMemPool, CUmemoryPool *out, CUdevice device)
{
    ENTER_DEVICE(out, device);
    fake_lock();
    *out = default_pool((unsigned int)device);
    fake_unlock();
    return *out == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

API(cuDeviceGetMemPool, CUmemoryPool *out, CUdevice device)
{
    ENTER_DEVICE(out, device);
    fake_lock();
    *out = current_pool((unsigned int)device);
    fake_unlock();
    return *out == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

API(cuDeviceSetMemPool, CUdevice device, CUmemoryPool pool)
{
    ENTER_DEVICE(pool, device);
    fake_lock();
    bool good = is_pool(pool) && !pool->on_host && pool->device == (unsigned int)device;
    if (good) {
        fake.devices[device].pool = pool;
    }
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* CUDA 13: pools by location. */
API(cuMemGetDefaultMemPool, CUmemoryPool *out, CUmemLocation *location, int type)
{
    ENTER();
    bool on_host = location != NULL && location->type == CU_MEM_LOCATION_HOST;
    if (out == NULL || location == NULL || type != PINNED || !(on_host || location->type == CU_MEM_LOCATION_DEVICE) ||
        location->id < 0 || (unsigned int)location->id >= fake.device_count) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    *out = on_host ? host_pool() : default_pool((unsigned int)location->id);
    fake_unlock();
    return *out == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

API(cuMemGetMemPool, CUmemoryPool *out, CUmemLocation *location, int type)
{
    ENTER();
    if (out == NULL || location == NULL || type != 1 || location->type != CU_MEM_LOCATION_DEVICE || location->id < 0 ||
        (unsigned int)location->id >= fake.device_count) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    *out = current_pool((unsigned int)location->id);
    fake_unlock();
    return *out == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
