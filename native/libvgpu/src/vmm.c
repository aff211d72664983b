/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks: physical memory made by cuMemCreate, and memory imported from a graphics API.
 *
 * Physical memory lives while a handle or a mapping of it does, so both are counted; the usual create, map, release
 * keeps its charge until the unmap. It belongs to the device that the property names, whatever context is current.
 * Imported handles (of other processes) are unknown here and pass: the exporter is charged. A graphics API is not seen, so
 * what is imported from it is charged to the importer.
 * Locks taken here: one for the objects' counts, for a few instructions.
 */
#include "vmm.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#include "device.h"
#include "gate.h"
#include "hook.h"

/* Smallest granularity of device mappings; cuMemUnmap may cover several of them. */
#define GRANULARITY (UINT64_C(64) << 10)
#define PAGE_BYTES (UINT64_C(1) << 16)

struct object {
    uint64_t bytes;
    int device;
    uint32_t handles;
    uint32_t mappings;
    struct object *next; /* while free */
};

static struct table handles;  /* handle -> address of its object */
static struct table mappings; /* device address -> address of the object, and another for the length */
static struct table lengths;
static struct table imports;

static _Atomic(uint32_t) objects_locked;
static struct object *free_objects;

/* Objects are found by address; a table entry has 47 bits for it, as addresses of user space have. */
static struct held held_of(const struct object *object)
{
    return (struct held){.bytes = (uintptr_t)object & TABLE_BYTES_MAX, .device = (uint64_t)object->device & 0x3f};
}

static struct object *object_of(const struct held *held)
{
    return (struct object *)(uintptr_t)held->bytes;
}

static struct object *object_new(uint64_t bytes, int device)
{
    spin_lock(&objects_locked);
    if (!free_objects) {
        struct object *page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (size_t i = 0; page != MAP_FAILED && i < PAGE_BYTES / sizeof *page; i++) {
            page[i].next = free_objects;
            free_objects = &page[i];
        }
    }
    struct object *object = free_objects;
    if (object) {
        free_objects = object->next;
        *object = (struct object){.bytes = bytes, .device = device, .handles = 1};
    }
    spin_unlock(&objects_locked);
    return object;
}

/* One handle or mapping more or less; with the last one the memory is the driver's again. */
static void count(struct object *object, int handle_change, int mapping_change)
{
    spin_lock(&objects_locked);
    object->handles += (uint32_t)handle_change;
    object->mappings += (uint32_t)mapping_change;
    bool gone = object->handles == 0 && object->mappings == 0;
    int device = object->device;
    uint64_t bytes = object->bytes;
    if (gone) {
        object->next = free_objects;
        free_objects = object;
    }
    spin_unlock(&objects_locked);
    if (gone) account_refund(device, bytes);
}

static int device_of(const CUmemAllocationProp *property)
{
    if (property->location.type == CU_MEM_LOCATION_TYPE_DEVICE) return device_limits(property->location.id);
    if (property->location.type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN)
        return device_limits(property->location.id & 0xff);
    return -1;
}

HOOK_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                                 const CUmemAllocationProp *property, unsigned long long flags)
{
    hook_enter();
    int device = handle && property && bytes <= TABLE_BYTES_MAX ? device_of(property) : -1;
    if (device < 0) return DRIVER(cuMemCreate)(handle, bytes, property, flags);
    if (!hook_charge(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuMemCreate)(handle, bytes, property, flags);
    if (result != CUDA_SUCCESS) {
        account_refund(device, bytes);
        return result;
    }
    struct held gone;
    struct object *object = object_new(bytes, device);
    if (object && table_put(&handles, *handle, held_of(object), &gone) != TABLE_NO_MEMORY) return CUDA_SUCCESS;
    DRIVER(cuMemRelease)(*handle);
    if (object)
        count(object, -1, 0);
    else
        account_refund(device, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* One value may stand for several handles of the same memory: it is forgotten with the last of them, before the driver
   can give it out again. */
HOOK_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    struct held held, gone;
    hook_enter();
    if (!table_get(&handles, handle, &held)) return DRIVER(cuMemRelease)(handle);
    struct object *object = object_of(&held);
    spin_lock(&objects_locked);
    bool last = object->handles <= 1;
    spin_unlock(&objects_locked);
    if (last && !table_take(&handles, handle, &held)) return DRIVER(cuMemRelease)(handle);
    CUresult result = DRIVER(cuMemRelease)(handle);
    if (result == CUDA_SUCCESS)
        count(object, -1, 0);
    else if (last)
        table_put(&handles, handle, held, &gone);
    return result;
}

HOOK_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    struct held held, again;
    hook_enter();
    CUresult result = DRIVER(cuMemRetainAllocationHandle)(handle, address);
    if (result != CUDA_SUCCESS || !handle) return result;
    bool known = table_get(&handles, *handle, &held);
    /* Released by now, but still mapped: the address gives the owner, if it is the beginning of the mapping. */
    if (!known) known = table_get(&mappings, (uintptr_t)address, &held);
    if (!known) return result;
    count(object_of(&held), +1, 0);
    table_put(&handles, *handle, held, &again);
    return result;
}

HOOK_EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                              unsigned long long flags)
{
    struct held held, gone;
    hook_enter();
    CUresult result = DRIVER(cuMemMap)(pointer, bytes, offset, handle, flags);
    if (result != CUDA_SUCCESS || !table_get(&handles, handle, &held)) return result;
    struct held length = {.bytes = bytes & TABLE_BYTES_MAX};
    if (table_put(&lengths, pointer, length, &gone) == TABLE_NO_MEMORY) return result;
    if (table_put(&mappings, pointer, held, &gone) != TABLE_NO_MEMORY) count(object_of(&held), 0, +1);
    return result;
}

HOOK_EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes)
{
    hook_enter();
    CUresult result = DRIVER(cuMemUnmap)(pointer, bytes);
    if (result != CUDA_SUCCESS) return result;
    for (CUdeviceptr at = pointer; at - pointer < bytes;) {
        struct held held, length = {.bytes = GRANULARITY};
        bool known = table_take(&mappings, at, &held);
        table_take(&lengths, at, &length);
        if (known) count(object_of(&held), 0, -1);
        at += length.bytes ? length.bytes : GRANULARITY;
    }
    return result;
}

/* --- imported from graphics --- */

HOOK_EXPORT CUresult cuImportExternalMemory(CUexternalMemory *memory,
                                            const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *descriptor)
{
    CUdevice cuda;
    hook_enter();
    int device = -1;
    if (memory && descriptor && descriptor->size <= TABLE_BYTES_MAX && DRIVER(cuCtxGetDevice)(&cuda) == CUDA_SUCCESS)
        device = device_limits(cuda);
    if (device < 0) {
        gate_bind();
        return DRIVER(cuImportExternalMemory)(memory, descriptor);
    }
    uint64_t bytes = descriptor->size;
    if (!hook_charge(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuImportExternalMemory)(memory, descriptor);
    if (result != CUDA_SUCCESS) {
        account_refund(device, bytes);
        return result;
    }
    gate_bind();
    struct held held = {.bytes = bytes & TABLE_BYTES_MAX, .device = (uint64_t)device & 0x3f};
    hook_remember(&imports, (uintptr_t)*memory, held);
    return result;
}

HOOK_EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory memory)
{
    struct held held;
    hook_enter();
    bool known = table_take(&imports, (uintptr_t)memory, &held);
    CUresult result = DRIVER(cuDestroyExternalMemory)(memory);
    if (!known) return result;
    if (result == CUDA_SUCCESS)
        account_refund((int)held.device, held.bytes);
    else
        hook_remember(&imports, (uintptr_t)memory, held);
    return result;
}

void vmm_reset(void)
{
    table_reset(&handles);
    table_reset(&mappings);
    table_reset(&lengths);
    table_reset(&imports);
    free_objects = NULL; /* the parent's stay where they are, unused */
    atomic_store(&objects_locked, 0);
}
