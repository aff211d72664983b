/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Linear, pitched, managed and host memory, copies, pointers between processes, arrays.
 *
 * Locks taken here: fake.lock. Called with hooks active: no.
 */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ARRAY_MAGIC UINT64_C(0x5941525241464b41)
#define IPC_MAGIC UINT64_C(0x43504946414b4531)
#define EXTERNAL_MAGIC UINT64_C(0x4c4e525458454b41)

enum { PITCH = 512 };

#define ENTER_CONTEXT(context)                                                                                         \
    ENTER();                                                                                                           \
    struct fake_context *context = fake_current();                                                                     \
    if (!fake_is_context(context)) return CUDA_ERROR_INVALID_CONTEXT

static void *host_of(CUdeviceptr pointer)
{
    return (void *)(uintptr_t)pointer;
}

/* ---- allocation ---- */

/* The bytes that a block takes from the device. */
static uint64_t taken_by(unsigned int device, uint64_t bytes, enum fake_kind kind)
{
    enum { SHARED = 1 << 20 };
    uint64_t granularity = fake.devices[device].block_granularity;
    return kind == FAKE_LINEAR && bytes > SHARED ? (bytes + granularity - 1) / granularity * granularity : bytes;
}

static bool migrates(unsigned int device, enum fake_kind kind)
{
    return kind == FAKE_MANAGED && fake.devices[device].migration_bytes_per_s > 0;
}

static bool charge(unsigned int device, uint64_t bytes, enum fake_kind kind)
{
    if (!migrates(device, kind)) {
        return fake_charge(device, bytes);
    }
    card_change_managed(fake.card, fake.slot, fake.devices[device].card, (int64_t)bytes);
    return true;
}

static void refund(unsigned int device, uint64_t bytes, enum fake_kind kind)
{
    if (migrates(device, kind)) {
        card_change_managed(fake.card, fake.slot, fake.devices[device].card, -(int64_t)bytes);
    } else {
        fake_refund(device, bytes);
    }
}

static CUresult allocate(unsigned int device, uint64_t bytes, enum fake_kind kind, CUdeviceptr *out)
{
    if (out == NULL || bytes == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    uint64_t taken = bytes > SIZE_MAX / 2 ? bytes : taken_by(device, bytes, kind);
    if (!charge(device, taken, kind)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    fake_lock();
    *out = fake_block_add(device, bytes, kind, NULL);
    fake_unlock();
    if (*out == 0) {
        refund(device, taken, kind);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

API(cuMemAlloc_v2, CUdeviceptr *out, size_t bytes)
{
    ENTER_CONTEXT(context);
    return allocate(context->device, bytes, FAKE_LINEAR, out);
}

API(cuMemAlloc, unsigned int *out, unsigned int bytes)
{
    ENTER();
    (void)bytes;
    return out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY; /* no address here fits 32 bits */
}

API(cuMemAllocManaged, CUdeviceptr *out, size_t bytes, unsigned int flags)
{
    ENTER_CONTEXT(context);
    if (flags == 0 || flags > 4) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return allocate(context->device, bytes, FAKE_MANAGED, out);
}

API(cuMemAllocPitch_v2, CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    ENTER_CONTEXT(context);
    if (pitch == NULL || width == 0 || height == 0 || (element != 4 && element != 8 && element != 16) ||
        width > SIZE_MAX - PITCH) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    size_t row = (width + PITCH - 1) / PITCH * PITCH;
    size_t bytes = 0;
    if (__builtin_mul_overflow(row, height, &bytes)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = allocate(context->device, bytes, FAKE_LINEAR, out);
    if (result == CUDA_SUCCESS) {
        *pitch = row;
    }
    return result;
}

CUresult fake_free_block(struct fake_block *block)
{
    unsigned int device = block->device;
    uint64_t bytes = block->bytes;
    enum fake_kind kind;
    switch ((enum fake_kind)block->kind) {
    case FAKE_LINEAR:
    case FAKE_MANAGED:
        kind = (enum fake_kind)block->kind;
        bytes = taken_by(device, bytes, kind);
        fake_block_drop(block);
        refund(device, bytes, kind);
        return CUDA_SUCCESS;
    case FAKE_GRAPH:
        if (!block->orphan) { /* the graph keeps the address */
            block->kind = FAKE_RESERVED;
            fake_pool_give(block->owner, bytes);
            return CUDA_SUCCESS;
        }
        __attribute__((fallthrough));
    case FAKE_POOLED: {
        struct fake_pool *pool = block->owner;
        fake_block_drop(block);
        fake_pool_give(pool, bytes);
        return CUDA_SUCCESS;
    }
    case FAKE_IMPORTED:
        fake_block_drop(block);
        return CUDA_SUCCESS;
    case FAKE_FOREIGN:
    case FAKE_MAPPED:
    case FAKE_RESERVED:
    case FAKE_HOST:
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

API(cuMemFree_v2, CUdeviceptr pointer)
{
    ENTER_CONTEXT(context);
    if (pointer == 0) {
        return CUDA_SUCCESS;
    }
    fake_lock();
    struct fake_block *block = fake_block_find(pointer);
    bool must_wait = block != NULL && fake.devices[block->device].until_ns > fake.devices[block->device].known_ns;
    unsigned int device = block != NULL ? block->device : context->device;
    if (must_wait) { /* freeing waits for the device, as the real call does */
        fake_unlock();
        fake_work_wait_device(device);
        fake_lock();
        block = fake_block_find(pointer);
    }
    CUresult result = block == NULL ? CUDA_ERROR_INVALID_VALUE : fake_free_block(block);
    fake_unlock();
    return result;
}

/* A name whose code the linker has folded into another function. No program asks for it. */
CUDA_API CUresult cuFolded(CUdeviceptr pointer) __attribute__((alias("cuMemFree_v2")));

API(cuMemFree, unsigned int pointer)
{
    ENTER();
    return pointer == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemGetInfo_v2, size_t *free_bytes, size_t *total)
{
    ENTER_CONTEXT(context);
    uint64_t capacity = fake.devices[context->device].capacity;
    uint64_t used = fake_used(context->device);
    if (free_bytes == NULL || total == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *free_bytes = used < capacity ? capacity - used : 0;
    *total = capacity;
    return CUDA_SUCCESS;
}

API(cuMemGetAddressRange_v2, CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer)
{
    ENTER_CONTEXT(context);
    (void)context;
    fake_lock();
    const struct fake_block *block = fake_block_around(pointer);
    if (block != NULL && base != NULL) {
        *base = block->pointer;
    }
    if (block != NULL && bytes != NULL) {
        *bytes = block->bytes;
    }
    fake_unlock();
    return block == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

/* ---- host memory: never counted on a device ---- */

static CUresult allocate_host(void **out, size_t bytes)
{
    if (out == NULL || bytes == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    *out = host_of(fake_block_add(0, bytes, FAKE_HOST, NULL));
    fake_unlock();
    return *out == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

API(cuMemAllocHost_v2, void **out, size_t bytes)
{
    ENTER_CONTEXT(context);
    (void)context;
    return allocate_host(out, bytes);
}

API(cuMemHostAlloc, void **out, size_t bytes, unsigned int flags)
{
    ENTER_CONTEXT(context);
    (void)context;
    return flags > 7 ? CUDA_ERROR_INVALID_VALUE : allocate_host(out, bytes);
}

API(cuMemFreeHost, void *pointer)
{
    ENTER_CONTEXT(context);
    (void)context;
    if (pointer == NULL) {
        return CUDA_SUCCESS;
    }
    fake_lock();
    struct fake_block *block = fake_block_find((CUdeviceptr)(uintptr_t)pointer);
    bool good = block != NULL && block->kind == FAKE_HOST;
    if (good) {
        fake_block_drop(block);
    }
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemHostGetDevicePointer_v2, CUdeviceptr *out, void *pointer, unsigned int flags)
{
    ENTER_CONTEXT(context);
    (void)context;
    if (out == NULL || flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = (CUdeviceptr)(uintptr_t)pointer;
    return CUDA_SUCCESS;
}

API(cuMemHostGetFlags, unsigned int *flags, void *pointer)
{
    ENTER_CONTEXT(context);
    (void)context;
    fake_lock();
    const struct fake_block *block = fake_block_find((CUdeviceptr)(uintptr_t)pointer);
    bool good = flags != NULL && block != NULL && block->kind == FAKE_HOST;
    if (good) {
        *flags = 0;
    }
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemHostRegister_v2, void *pointer, size_t bytes, unsigned int flags)
{
    ENTER_CONTEXT(context);
    (void)context;
    (void)flags;
    return pointer == NULL || bytes == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API(cuMemHostUnregister, void *pointer)
{
    ENTER_CONTEXT(context);
    (void)context;
    return pointer == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* ---- copies and fills: done by the host at once, after what the stream has to do first ---- */

/* Remembers that pages of a block exist. */
static void mark_dirty(CUdeviceptr pointer)
{
    fake_lock();
    struct fake_block *block = fake_block_around(pointer);
    if (block != NULL) {
        block->dirty = true;
    }
    fake_unlock();
}

static CUresult copy(void *to, const void *from, size_t bytes, CUstream stream, bool per_thread)
{
    if (bytes == 0) {
        return CUDA_SUCCESS;
    }
    if (to == NULL || from == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult result = CUDA_SUCCESS;
    struct fake_graph *graph = fake_capture_of(stream, per_thread, &result);
    if (graph != NULL || result != CUDA_SUCCESS) {
        return graph != NULL ? fake_graph_capture_plain(graph, CU_NODE_MEMCPY) : result;
    }
    mark_dirty((CUdeviceptr)(uintptr_t)to);
    memmove(to, from, bytes);
    return CUDA_SUCCESS;
}

#define COPY(name, to_type, to, from_type, from)                                                                       \
    API(name, to_type to_, from_type from_, size_t bytes)                                                              \
    {                                                                                                                  \
        ENTER_CONTEXT(context);                                                                                        \
        (void)context;                                                                                                 \
        return copy(to, from, bytes, NULL, false);                                                                     \
    }
#define COPY_ASYNC(name, to_type, to, from_type, from, per_thread)                                                     \
    API(name, to_type to_, from_type from_, size_t bytes, CUstream stream)                                             \
    {                                                                                                                  \
        ENTER_CONTEXT(context);                                                                                        \
        (void)context;                                                                                                 \
        return copy(to, from, bytes, stream, per_thread);                                                              \
    }
#define TO_DEVICE CUdeviceptr, host_of(to_)
#define FROM_DEVICE CUdeviceptr, host_of(from_)
#define TO_HOST void *, to_
#define FROM_HOST const void *, from_
#define COPY_X(name, ...) COPY(name, __VA_ARGS__)
#define COPY_ASYNC_X(name, ...) COPY_ASYNC(name, __VA_ARGS__)

COPY_X(cuMemcpy, TO_DEVICE, FROM_DEVICE)
COPY_X(cuMemcpy_ptds, TO_DEVICE, FROM_DEVICE)
COPY_X(cuMemcpyHtoD_v2, TO_DEVICE, FROM_HOST)
COPY_X(cuMemcpyHtoD_v2_ptds, TO_DEVICE, FROM_HOST)
COPY_X(cuMemcpyDtoH_v2, TO_HOST, FROM_DEVICE)
COPY_X(cuMemcpyDtoH_v2_ptds, TO_HOST, FROM_DEVICE)
COPY_X(cuMemcpyDtoD_v2, TO_DEVICE, FROM_DEVICE)
COPY_X(cuMemcpyDtoD_v2_ptds, TO_DEVICE, FROM_DEVICE)
COPY_ASYNC_X(cuMemcpyAsync, TO_DEVICE, FROM_DEVICE, false)
COPY_ASYNC_X(cuMemcpyAsync_ptsz, TO_DEVICE, FROM_DEVICE, true)
COPY_ASYNC_X(cuMemcpyHtoDAsync_v2, TO_DEVICE, FROM_HOST, false)
COPY_ASYNC_X(cuMemcpyHtoDAsync_v2_ptsz, TO_DEVICE, FROM_HOST, true)
COPY_ASYNC_X(cuMemcpyDtoHAsync_v2, TO_HOST, FROM_DEVICE, false)
COPY_ASYNC_X(cuMemcpyDtoHAsync_v2_ptsz, TO_HOST, FROM_DEVICE, true)
COPY_ASYNC_X(cuMemcpyDtoDAsync_v2, TO_DEVICE, FROM_DEVICE, false)
COPY_ASYNC_X(cuMemcpyDtoDAsync_v2_ptsz, TO_DEVICE, FROM_DEVICE, true)

static CUresult fill(CUdeviceptr to, uint32_t value, size_t width, size_t elements, CUstream stream, bool per_thread)
{
    CUresult result = CUDA_SUCCESS;
    if (to == 0 || to % width != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct fake_graph *graph = fake_capture_of(stream, per_thread, &result);
    if (graph != NULL || result != CUDA_SUCCESS) {
        return graph != NULL ? fake_graph_capture_plain(graph, CU_NODE_MEMSET) : result;
    }
    mark_dirty(to);
    if (width == 1) {
        memset(host_of(to), (int)value, elements);
        return CUDA_SUCCESS;
    }
    for (size_t i = 0; i < elements; i++) {
        memcpy((char *)host_of(to) + i * width, &value, width);
    }
    return CUDA_SUCCESS;
}

#define FILL(name, type, width)                                                                                        \
    API(name, CUdeviceptr to, type value, size_t elements)                                                             \
    {                                                                                                                  \
        ENTER_CONTEXT(context);                                                                                        \
        (void)context;                                                                                                 \
        return fill(to, value, width, elements, NULL, false);                                                          \
    }
#define FILL_ASYNC(name, type, width, per_thread)                                                                      \
    API(name, CUdeviceptr to, type value, size_t elements, CUstream stream)                                            \
    {                                                                                                                  \
        ENTER_CONTEXT(context);                                                                                        \
        (void)context;                                                                                                 \
        return fill(to, value, width, elements, stream, per_thread);                                                   \
    }

FILL(cuMemsetD8_v2, unsigned char, 1)
FILL(cuMemsetD8_v2_ptds, unsigned char, 1)
FILL(cuMemsetD16_v2, unsigned short, 2)
FILL(cuMemsetD16_v2_ptds, unsigned short, 2)
FILL(cuMemsetD32_v2, unsigned int, 4)
FILL(cuMemsetD32_v2_ptds, unsigned int, 4)
FILL_ASYNC(cuMemsetD8Async, unsigned char, 1, false)
FILL_ASYNC(cuMemsetD8Async_ptsz, unsigned char, 1, true)
FILL_ASYNC(cuMemsetD16Async, unsigned short, 2, false)
FILL_ASYNC(cuMemsetD16Async_ptsz, unsigned short, 2, true)
FILL_ASYNC(cuMemsetD32Async, unsigned int, 4, false)
FILL_ASYNC(cuMemsetD32Async_ptsz, unsigned int, 4, true)

/* Managed memory here lives wherever it is touched, so moving and advising change nothing. */
static CUresult managed(CUdeviceptr pointer)
{
    fake_lock();
    const struct fake_block *block = fake_block_around(pointer);
    bool good = block != NULL && block->kind == FAKE_MANAGED;
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

#define PREFETCH(name)                                                                                                 \
    API(name, CUdeviceptr pointer, size_t bytes, CUdevice device, CUstream stream)                                     \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        (void)stream;                                                                                                  \
        return bytes == 0 || device < -1 ? CUDA_ERROR_INVALID_VALUE : managed(pointer);                                \
    }
#define PREFETCH_V2(name)                                                                                              \
    API(name, CUdeviceptr pointer, size_t bytes, CUmemLocation location, unsigned int flags, CUstream stream)          \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        (void)stream;                                                                                                  \
        return bytes == 0 || flags != 0 || location.type == 0 ? CUDA_ERROR_INVALID_VALUE : managed(pointer);           \
    }
PREFETCH(cuMemPrefetchAsync)
PREFETCH(cuMemPrefetchAsync_ptsz)
PREFETCH_V2(cuMemPrefetchAsync_v2)
PREFETCH_V2(cuMemPrefetchAsync_v2_ptsz)

API(cuMemAdvise, CUdeviceptr pointer, size_t bytes, int advice, CUdevice device)
{
    ENTER();
    (void)device;
    return bytes == 0 || advice < 1 ? CUDA_ERROR_INVALID_VALUE : managed(pointer);
}

API(cuMemAdvise_v2, CUdeviceptr pointer, size_t bytes, int advice, CUmemLocation location)
{
    ENTER();
    return bytes == 0 || advice < 1 || location.type == 0 ? CUDA_ERROR_INVALID_VALUE : managed(pointer);
}

/* ---- what a pointer is ---- */

enum {
    POINTER_CONTEXT = 1,
    POINTER_MEMORY_TYPE = 2,
    POINTER_DEVICE_POINTER = 3,
    POINTER_HOST_POINTER = 4,
    POINTER_IS_MANAGED = 8,
    POINTER_ORDINAL = 9,
    POINTER_START = 11,
    POINTER_SIZE = 12,
    POINTER_MAPPED = 13,
    POINTER_POOL = 17
};

/* Caller holds the lock. */
static CUresult pointer_attribute(void *data, int attribute, CUdeviceptr pointer)
{
    const struct fake_block *block = fake_block_around(pointer);
    if (data == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (block == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    switch (attribute) {
    case POINTER_CONTEXT:
        *(CUcontext *)data = block->context;
        return CUDA_SUCCESS;
    case POINTER_MEMORY_TYPE:
        *(unsigned int *)data = block->kind == FAKE_HOST ? 1 : 2;
        return CUDA_SUCCESS;
    case POINTER_DEVICE_POINTER:
        *(CUdeviceptr *)data = pointer;
        return CUDA_SUCCESS;
    case POINTER_HOST_POINTER:
        *(void **)data = host_of(pointer);
        return block->kind == FAKE_HOST || block->kind == FAKE_MANAGED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case POINTER_IS_MANAGED:
        *(unsigned int *)data = block->kind == FAKE_MANAGED ? 1 : 0;
        return CUDA_SUCCESS;
    case POINTER_ORDINAL:
        *(int *)data = block->device;
        return CUDA_SUCCESS;
    case POINTER_START:
        *(CUdeviceptr *)data = block->pointer;
        return CUDA_SUCCESS;
    case POINTER_SIZE:
        *(size_t *)data = block->bytes;
        return CUDA_SUCCESS;
    case POINTER_MAPPED:
        *(unsigned int *)data = 1;
        return CUDA_SUCCESS;
    case POINTER_POOL:
        *(CUmemoryPool *)data = block->kind == FAKE_POOLED ? block->owner : NULL;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

API(cuPointerGetAttribute, void *data, int attribute, CUdeviceptr pointer)
{
    ENTER();
    fake_lock();
    CUresult result = pointer_attribute(data, attribute, pointer);
    fake_unlock();
    return result;
}

/* Attributes that do not apply leave their field alone here; the call succeeds all the same. */
API(cuPointerGetAttributes, unsigned int count, int *attributes, void **data, CUdeviceptr pointer)
{
    ENTER();
    if (attributes == NULL || data == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    for (unsigned int i = 0; i < count; i++) {
        (void)pointer_attribute(data[i], attributes[i], pointer);
    }
    fake_unlock();
    return CUDA_SUCCESS;
}

/* ---- pointers and memory of other processes: the maker pays ---- */

struct ipc_content {
    uint64_t magic;
    uint64_t bytes;
    char uuid[40];
    uint32_t pid;
    uint32_t reserved;
};
_Static_assert(sizeof(struct ipc_content) == sizeof(CUipcHandle), "CUipcMemHandle layout");

API(cuIpcGetMemHandle, CUipcHandle *handle, CUdeviceptr pointer)
{
    ENTER_CONTEXT(context);
    (void)context;
    fake_lock();
    const struct fake_block *block = fake_block_find(pointer);
    bool good = handle != NULL && block != NULL && block->kind == FAKE_LINEAR;
    if (good) {
        struct ipc_content content = {.magic = IPC_MAGIC, .bytes = block->bytes, .pid = (uint32_t)getpid()};
        memcpy(content.uuid, fake.devices[block->device].uuid,
               strnlen(fake.devices[block->device].uuid, sizeof content.uuid));
        memcpy(handle, &content, sizeof content);
        fake.shares = true;
    }
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult open_ipc(CUdeviceptr *out, CUipcHandle handle, unsigned int flags)
{
    struct ipc_content content;
    struct fake_context *context = fake_current();
    memcpy(&content, &handle, sizeof content);
    if (!fake_is_context(context)) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (out == NULL || flags != 1 || content.magic != IPC_MAGIC) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (content.pid == (uint32_t)getpid()) {
        return CUDA_ERROR_INVALID_CONTEXT; /* one's own handles cannot be opened */
    }
    if (strncmp(content.uuid, fake.devices[context->device].uuid, sizeof content.uuid) != 0) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    fake_lock();
    *out = fake_block_add(context->device, content.bytes, FAKE_FOREIGN, NULL);
    fake.shares = true;
    fake_unlock();
    return *out == 0 ? CUDA_ERROR_MAP_FAILED : CUDA_SUCCESS;
}

API(cuIpcOpenMemHandle, CUdeviceptr *out, CUipcHandle handle, unsigned int flags)
{
    ENTER();
    return open_ipc(out, handle, flags);
}

API(cuIpcOpenMemHandle_v2, CUdeviceptr *out, CUipcHandle handle, unsigned int flags)
{
    ENTER();
    return open_ipc(out, handle, flags);
}

API(cuIpcCloseMemHandle, CUdeviceptr pointer)
{
    ENTER_CONTEXT(context);
    (void)context;
    fake_lock();
    struct fake_block *block = fake_block_find(pointer);
    bool good = block != NULL && block->kind == FAKE_FOREIGN;
    if (good) {
        fake_block_drop(block);
    }
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

struct fake_external {
    uint64_t magic;
    uint64_t bytes;
    unsigned int device;
};

API(cuImportExternalMemory, CUexternalMemory *out, const CUexternalMemoryHandleDesc *desc)
{
    enum { OPAQUE_FD = 1 };
    ENTER_CONTEXT(context);
    if (out == NULL || desc == NULL || desc->size == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (desc->type != OPAQUE_FD) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct fake_external *external = calloc(1, sizeof *external);
    if (external == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *external = (struct fake_external){.magic = EXTERNAL_MAGIC, .bytes = desc->size, .device = context->device};
    (void)close(desc->handle.fd); /* the driver owns the descriptor from now on */
    *out = external;
    return CUDA_SUCCESS;
}

API(cuExternalMemoryGetMappedBuffer, CUdeviceptr *out, CUexternalMemory external,
    const CUexternalMemoryBufferDesc *desc)
{
    ENTER_CONTEXT(context);
    (void)context;
    if (out == NULL || desc == NULL || external == NULL || external->magic != EXTERNAL_MAGIC || desc->flags != 0 ||
        desc->size == 0 || desc->offset > external->bytes || desc->size > external->bytes - desc->offset) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    *out = fake_block_add(external->device, desc->size, FAKE_IMPORTED, external);
    fake_unlock();
    return *out == 0 ? CUDA_ERROR_MAP_FAILED : CUDA_SUCCESS;
}

API(cuDestroyExternalMemory, CUexternalMemory external)
{
    ENTER_CONTEXT(context);
    (void)context;
    if (external == NULL || external->magic != EXTERNAL_MAGIC) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    external->magic = 0;
    free(external);
    return CUDA_SUCCESS;
}

/* ---- arrays ---- */

struct fake_array {
    uint64_t magic;
    uint64_t bytes;
    unsigned int device;
    unsigned int levels;
    bool is_level;
    bool is_mipmapped;
    CUarray3dDescriptor descriptor;
    struct fake_context *context;
    struct fake_array *next;
};

/* Bits of one element of one channel; 0: the format is not known. */
static unsigned int bits_of(int format)
{
    switch (format) {
    case 0x01: /* 8 bits */
    case 0x08:
    case 0xc0: /* normalised, the channel count is in the name and in the descriptor */
    case 0xc1:
    case 0xc2:
    case 0xc6:
    case 0xc7:
    case 0xc8:
        return 8;
    case 0x02: /* 16 bits */
    case 0x09:
    case 0x10:
    case 0xc3:
    case 0xc4:
    case 0xc5:
    case 0xc9:
    case 0xca:
    case 0xcb:
        return 16;
    case 0x03: /* 32 bits */
    case 0x0a:
    case 0x20:
        return 32;
    default:
        return 0;
    }
}

static uint64_t at_least_one(uint64_t value)
{
    return value == 0 ? 1 : value;
}

static bool array_bytes(const CUarray3dDescriptor *d, unsigned int levels, uint64_t *out)
{
    unsigned int bits = bits_of(d->format);
    uint64_t width = d->width;
    uint64_t height = at_least_one(d->height);
    uint64_t depth = at_least_one(d->depth);
    bool is_layered = (d->flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
    uint64_t sum = 0;
    if (bits == 0 || width == 0 || (d->channels != 1 && d->channels != 2 && d->channels != 4)) {
        return false;
    }
    for (unsigned int level = 0; level < levels; level++) {
        uint64_t bytes = width * (bits / 8U) * d->channels;
        if (__builtin_mul_overflow(bytes, height, &bytes) || __builtin_mul_overflow(bytes, depth, &bytes) ||
            __builtin_add_overflow(sum, bytes, &sum)) {
            return false;
        }
        width = at_least_one(width / 2);
        height = at_least_one(height / 2);
        depth = is_layered ? depth : at_least_one(depth / 2);
    }
    *out = sum;
    return true;
}

static CUresult create_array(CUarray *out, const CUarray3dDescriptor *descriptor, unsigned int levels,
                             bool is_mipmapped)
{
    struct fake_context *context = fake_current();
    uint64_t bytes = 0;
    if (out == NULL || descriptor == NULL || levels == 0 || levels > 32 || !array_bytes(descriptor, levels, &bytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if ((descriptor->flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED)) != 0) {
        bytes = 0; /* memory is mapped later, by other calls */
    }
    struct fake_array *array = calloc(1, sizeof *array);
    if (array == NULL || !fake_charge(context->device, bytes)) {
        free(array);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *array = (struct fake_array){
        .magic = ARRAY_MAGIC,
        .bytes = bytes,
        .device = context->device,
        .levels = levels,
        .is_mipmapped = is_mipmapped,
        .descriptor = *descriptor,
        .context = context,
    };
    fake_lock();
    array->next = context->arrays;
    context->arrays = array;
    fake_unlock();
    *out = array;
    return CUDA_SUCCESS;
}

API(cuArrayCreate_v2, CUarray *out, const CUarrayDescriptor *d)
{
    ENTER_CONTEXT(context);
    (void)context;
    if (d == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUarray3dDescriptor wide = {.width = d->width, .height = d->height, .format = d->format, .channels = d->channels};
    return create_array(out, &wide, 1, false);
}

API(cuArray3DCreate_v2, CUarray *out, const CUarray3dDescriptor *d)
{
    ENTER_CONTEXT(context);
    (void)context;
    return create_array(out, d, 1, false);
}

API(cuMipmappedArrayCreate, CUmipmappedArray *out, const CUarray3dDescriptor *d, unsigned int levels)
{
    ENTER_CONTEXT(context);
    (void)context;
    return create_array(out, d, levels, true);
}

void fake_arrays_free(struct fake_context *context)
{
    while (context->arrays != NULL) {
        struct fake_array *array = context->arrays;
        context->arrays = array->next;
        fake_refund(array->device, array->bytes);
        array->magic = 0;
        free(array);
    }
}

static CUresult destroy_array(struct fake_array *array, bool is_mipmapped)
{
    if (array == NULL || array->magic != ARRAY_MAGIC || array->is_mipmapped != is_mipmapped || array->is_level) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    fake_lock();
    for (struct fake_array **at = &array->context->arrays; *at != NULL; at = &(*at)->next) {
        if (*at == array) {
            *at = array->next;
            break;
        }
    }
    fake_unlock();
    fake_refund(array->device, array->bytes);
    array->magic = 0;
    free(array);
    return CUDA_SUCCESS;
}

API(cuArrayDestroy, CUarray array)
{
    ENTER();
    return destroy_array(array, false);
}

API(cuMipmappedArrayDestroy, CUmipmappedArray array)
{
    ENTER();
    return destroy_array(array, true);
}

/* A level is a view; it lives until the context ends. */
API(cuMipmappedArrayGetLevel, CUarray *out, CUmipmappedArray array, unsigned int level)
{
    ENTER_CONTEXT(context);
    if (out == NULL || array == NULL || array->magic != ARRAY_MAGIC || !array->is_mipmapped || level >= array->levels) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct fake_array *view = calloc(1, sizeof *view);
    if (view == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *view = *array;
    view->bytes = 0;
    view->is_level = true;
    view->is_mipmapped = false;
    fake_lock();
    view->next = context->arrays;
    view->context = context;
    context->arrays = view;
    fake_unlock();
    *out = view;
    return CUDA_SUCCESS;
}

API(cuArrayGetDescriptor_v2, CUarrayDescriptor *out, CUarray array)
{
    ENTER();
    if (out == NULL || array == NULL || array->magic != ARRAY_MAGIC) {
        return out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    }
    const CUarray3dDescriptor *d = &array->descriptor;
    *out = (CUarrayDescriptor){.width = d->width, .height = d->height, .format = d->format, .channels = d->channels};
    return CUDA_SUCCESS;
}

API(cuArray3DGetDescriptor_v2, CUarray3dDescriptor *out, CUarray array)
{
    ENTER();
    if (out == NULL || array == NULL || array->magic != ARRAY_MAGIC) {
        return out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    }
    *out = array->descriptor;
    return CUDA_SUCCESS;
}

static CUresult array_requirements(CUarrayMemoryRequirements *out, const struct fake_array *array)
{
    uint64_t bytes = 0;
    if (out == NULL || array == NULL || array->magic != ARRAY_MAGIC) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!array_bytes(&array->descriptor, array->levels, &bytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = (CUarrayMemoryRequirements){.size = bytes, .alignment = PITCH};
    return CUDA_SUCCESS;
}

API(cuArrayGetMemoryRequirements, CUarrayMemoryRequirements *out, CUarray array, CUdevice device)
{
    ENTER();
    (void)device;
    return array_requirements(out, array);
}

API(cuMipmappedArrayGetMemoryRequirements, CUarrayMemoryRequirements *out, CUmipmappedArray array, CUdevice device)
{
    ENTER();
    (void)device;
    return array_requirements(out, array);
}
