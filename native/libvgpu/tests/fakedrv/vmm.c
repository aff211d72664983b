/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Virtual memory management: physical handles, reserved addresses, mappings between them, multicast objects.
 *
 * A handle's memory is released with the last of its references: one of cuMemCreate, one of each
 * cuMemRetainAllocationHandle, one of each mapping. A handle imported from a descriptor refers to memory that its maker
 * pays for. Reserved addresses cost nothing.
 *
 * Locks taken here: fake.lock. Called with hooks active: no.
 */
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HANDLE_MAGIC UINT64_C(0x454c444e41484b46)
#define SHARE_MAGIC UINT64_C(0x454d4d5648534641)

enum { GRANULARITY = 2 << 20 };

struct handle {
    uint64_t magic;
    uint64_t bytes;
    unsigned int device;
    bool on_host;
    bool imported;
    bool multicast;
    unsigned int references; /* of the program */
    unsigned int mappings;
    CUmemAllocationProp properties;
};

struct mapping {
    CUdeviceptr pointer;
    uint64_t bytes;
    struct handle *handle;
    struct mapping *next;
};

static struct mapping *mappings;

static struct handle *handle_of(CUmemHandle value)
{
    struct handle *handle = (struct handle *)(uintptr_t)value;
    return handle != NULL && handle->magic == HANDLE_MAGIC && handle->references > 0 ? handle : NULL;
}

static CUmemHandle value_of(struct handle *handle)
{
    return (CUmemHandle)(uintptr_t)handle;
}

/* Caller holds the lock. */
static void drop_if_last(struct handle *handle)
{
    if (handle->references == 0 && handle->mappings == 0) {
        if (!handle->on_host && !handle->imported && !handle->multicast) {
            fake_refund(handle->device, handle->bytes);
        }
        handle->magic = 0;
        free(handle);
    }
}

/* Caller holds the lock. */
static struct mapping *mapping_at(CUdeviceptr pointer)
{
    for (struct mapping *at = mappings; at != NULL; at = at->next) {
        if (pointer - at->pointer < at->bytes) {
            return at;
        }
    }
    return NULL;
}

API(cuMemGetAllocationGranularity, size_t *out, const CUmemAllocationProp *properties, int option)
{
    ENTER();
    if (out == NULL || properties == NULL || option < 0 || option > 1) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = GRANULARITY;
    return CUDA_SUCCESS;
}

API(cuMemCreate, CUmemHandle *out, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags)
{
    ENTER();
    if (out == NULL || properties == NULL || flags != 0 || bytes == 0 || bytes % GRANULARITY != 0 ||
        properties->type != 1) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    bool on_host = properties->location.type != CU_MEM_LOCATION_DEVICE;
    if (!on_host && (properties->location.id < 0 || (unsigned int)properties->location.id >= fake.device_count)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    unsigned int device = on_host ? 0 : (unsigned int)properties->location.id;
    struct handle *handle = calloc(1, sizeof *handle);
    if (handle == NULL || (!on_host && !fake_charge(device, bytes))) {
        free(handle);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (struct handle){.magic = HANDLE_MAGIC,
                              .bytes = bytes,
                              .device = device,
                              .on_host = on_host,
                              .references = 1,
                              .properties = *properties};
    *out = value_of(handle);
    return CUDA_SUCCESS;
}

API(cuMemRelease, CUmemHandle value)
{
    ENTER();
    fake_lock();
    struct handle *handle = handle_of(value);
    if (handle != NULL) {
        handle->references--;
        drop_if_last(handle);
    }
    fake_unlock();
    return handle == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API(cuMemRetainAllocationHandle, CUmemHandle *out, void *address)
{
    ENTER();
    fake_lock();
    struct mapping *mapping = out == NULL ? NULL : mapping_at((CUdeviceptr)(uintptr_t)address);
    if (mapping != NULL) {
        mapping->handle->references++;
        *out = value_of(mapping->handle);
    }
    fake_unlock();
    return mapping == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API(cuMemGetAllocationPropertiesFromHandle, CUmemAllocationProp *out, CUmemHandle value)
{
    ENTER();
    fake_lock();
    struct handle *handle = out == NULL ? NULL : handle_of(value);
    if (handle != NULL) {
        *out = handle->properties;
    }
    fake_unlock();
    return handle == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API(cuMemAddressReserve, CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags)
{
    ENTER();
    (void)wanted; /* only a preference */
    if (out == NULL || bytes == 0 || bytes % 4096 != 0 || flags != 0 || (alignment & (alignment - 1)) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    size_t align = alignment < GRANULARITY ? GRANULARITY : alignment;
    char *at = mmap(NULL, bytes + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    char *aligned = (char *)(((uintptr_t)at + align - 1) / align * align);
    if (aligned > at) {
        (void)munmap(at, (size_t)(aligned - at));
    }
    (void)munmap(aligned + bytes, (size_t)(at + align - aligned));
    *out = (CUdeviceptr)(uintptr_t)aligned;
    return CUDA_SUCCESS;
}

API(cuMemAddressFree, CUdeviceptr pointer, size_t bytes)
{
    ENTER();
    fake_lock();
    bool is_mapped = mapping_at(pointer) != NULL;
    fake_unlock();
    if (pointer == 0 || bytes == 0 || is_mapped) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return munmap((void *)(uintptr_t)pointer, bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemMap, CUdeviceptr pointer, size_t bytes, size_t offset, CUmemHandle value, unsigned long long flags)
{
    ENTER();
    struct mapping *mapping = calloc(1, sizeof *mapping);
    if (mapping == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    fake_lock();
    struct handle *handle = handle_of(value);
    bool good = handle != NULL && pointer != 0 && pointer % GRANULARITY == 0 && bytes != 0 && flags == 0 &&
                offset == 0 && bytes == handle->bytes && mapping_at(pointer) == NULL;
    if (good) {
        *mapping = (struct mapping){.pointer = pointer, .bytes = bytes, .handle = handle, .next = mappings};
        mappings = mapping;
        handle->mappings++;
    }
    fake_unlock();
    if (!good) {
        free(mapping);
    }
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Whole mappings only, one or several that lie side by side. */
API(cuMemUnmap, CUdeviceptr pointer, size_t bytes)
{
    ENTER();
    bool any = false;
    fake_lock();
    for (struct mapping **at = &mappings; *at != NULL;) {
        struct mapping *mapping = *at;
        if (mapping->pointer >= pointer && mapping->pointer + mapping->bytes <= pointer + bytes) {
            *at = mapping->next;
            mapping->handle->mappings--;
            drop_if_last(mapping->handle);
            (void)madvise((void *)(uintptr_t)mapping->pointer, mapping->bytes, MADV_DONTNEED);
            free(mapping);
            any = true;
        } else {
            at = &mapping->next;
        }
    }
    fake_unlock();
    return any ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemSetAccess, CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    ENTER();
    fake_lock();
    bool good = mapping_at(pointer) != NULL && bytes > 0 && access != NULL && count > 0;
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemGetAccess, unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer)
{
    enum { READ_WRITE = 3 };
    ENTER();
    fake_lock();
    const struct mapping *mapping = mapping_at(pointer);
    bool good = flags != NULL && location != NULL && mapping != NULL;
    if (good) {
        *flags = location->id == (int)mapping->handle->device ? READ_WRITE : 0;
    }
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- between processes ---- */

struct share {
    uint64_t magic;
    uint64_t bytes;
    CUmemAllocationProp properties;
    char uuid[CARD_UUID];
};

API(cuMemExportToShareableHandle, void *out, CUmemHandle value, int type, unsigned long long flags)
{
    enum { FILE_DESCRIPTOR = 1 };
    ENTER();
    fake_lock();
    const struct handle *handle = handle_of(value);
    bool good = out != NULL && handle != NULL && flags == 0 && (handle->properties.handle_types & type) != 0;
    struct share share = {.magic = SHARE_MAGIC};
    if (good) {
        share.bytes = handle->bytes;
        share.properties = handle->properties;
        memcpy(share.uuid, fake.devices[handle->device].uuid, sizeof share.uuid);
        fake.shares = true;
    }
    fake_unlock();
    if (!good) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (type != FILE_DESCRIPTOR) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    int fd = memfd_create("fake-cuda-memory", MFD_CLOEXEC);
    if (fd < 0 || write(fd, &share, sizeof share) != (ssize_t)sizeof share) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    memcpy(out, &fd, sizeof fd);
    return CUDA_SUCCESS;
}

API(cuMemImportFromShareableHandle, CUmemHandle *out, void *os_handle, int type)
{
    enum { FILE_DESCRIPTOR = 1 };
    struct share share;
    ENTER();
    if (out == NULL || type != FILE_DESCRIPTOR) {
        return type == FILE_DESCRIPTOR ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED;
    }
    int fd = (int)(intptr_t)os_handle;
    if (pread(fd, &share, sizeof share, 0) != (ssize_t)sizeof share || share.magic != SHARE_MAGIC) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    unsigned int device = 0;
    while (device < fake.device_count && strcmp(fake.devices[device].uuid, share.uuid) != 0) {
        device++;
    }
    if (device == fake.device_count) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    struct handle *handle = calloc(1, sizeof *handle);
    if (handle == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (struct handle){.magic = HANDLE_MAGIC,
                              .bytes = share.bytes,
                              .device = device,
                              .imported = true,
                              .references = 1,
                              .properties = share.properties};
    *out = value_of(handle);
    fake.shares = true;
    return CUDA_SUCCESS;
}

/* ---- multicast: an address that writes to several devices; its memory is that of the handles bound to it ---- */

API(cuMulticastGetGranularity, size_t *out, const CUmulticastProp *properties, int option)
{
    ENTER();
    if (out == NULL || properties == NULL || option < 0 || option > 1) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = GRANULARITY;
    return CUDA_SUCCESS;
}

API(cuMulticastCreate, CUmemHandle *out, const CUmulticastProp *properties)
{
    ENTER();
    if (out == NULL || properties == NULL || properties->size == 0 || properties->size % GRANULARITY != 0 ||
        properties->devices == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct handle *handle = calloc(1, sizeof *handle);
    if (handle == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (struct handle){.magic = HANDLE_MAGIC, .bytes = properties->size, .multicast = true, .references = 1};
    *out = value_of(handle);
    return CUDA_SUCCESS;
}

static bool is_multicast(CUmemHandle value)
{
    const struct handle *handle = handle_of(value);
    return handle != NULL && handle->multicast;
}

API(cuMulticastAddDevice, CUmemHandle value, CUdevice device)
{
    ENTER();
    if (device < 0 || (unsigned int)device >= fake.device_count) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    return is_multicast(value) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMulticastBindMem, CUmemHandle value, size_t offset, CUmemHandle memory, size_t memory_offset, size_t bytes,
    unsigned long long flags)
{
    ENTER();
    (void)offset;
    (void)memory_offset;
    return is_multicast(value) && handle_of(memory) != NULL && bytes > 0 && flags == 0 ? CUDA_SUCCESS
                                                                                       : CUDA_ERROR_INVALID_VALUE;
}

API(cuMulticastUnbind, CUmemHandle value, CUdevice device, size_t offset, size_t bytes)
{
    ENTER();
    (void)device;
    (void)offset;
    (void)bytes;
    return is_multicast(value) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
