/* SPDX-License-Identifier: Apache-2.0 */
/* See device.h. Locks taken here: none. Called with hooks active: only DRIVER() functions are called. */
#include "device.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "account.h"
#include "platform.h"
#include "symbols.h"

#define DEVICES 64
#define UUID_TEXT NVML_DEVICE_UUID_V2_BUFFER_SIZE

/* Index + 2; 0: not asked yet. */
static _Atomic(int) limits_of_cuda[DEVICES];

static void uuid_text(const char *prefix, const CUuuid *uuid, char text[UUID_TEXT])
{
    size_t length = (size_t)snprintf(text, UUID_TEXT, "%s-", prefix);
    for (size_t i = 0; i < sizeof uuid->bytes; i++) {
        const char *dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
        length += (size_t)snprintf(text + length, UUID_TEXT - length, "%s%02x", dash, (unsigned char)uuid->bytes[i]);
    }
}

/* The UUIDs under which the device may be listed: of its MIG instance first, then of the card. */
static bool each_uuid(CUdevice device, bool (*take)(const char *text, void *into), void *into)
{
    CUuuid uuid;
    char text[UUID_TEXT];
    if (DRIVER(cuDeviceGetUuid_v2)(&uuid, device) == CUDA_SUCCESS) {
        uuid_text("MIG", &uuid, text);
        if (take(text, into)) return true;
        uuid_text("GPU", &uuid, text);
        if (take(text, into)) return true;
    }
    if (DRIVER(cuDeviceGetUuid)(&uuid, device) == CUDA_SUCCESS) {
        uuid_text("GPU", &uuid, text);
        if (take(text, into)) return true;
    }
    return false;
}

static bool take_limits(const char *text, void *into)
{
    int index = account_device_of_uuid(text);
    if (index >= 0) *(int *)into = index;
    return index >= 0;
}

static bool take_handle(const char *text, void *into)
{
    return DRIVER(nvmlDeviceGetHandleByUUID)(text, (nvmlDevice_t *)into) == NVML_SUCCESS;
}

nvmlDevice_t device_nvml(CUdevice device)
{
    static _Atomic(bool) ready;
    if (!symbol_find_nvml(true)) return NULL;
    if (!atomic_load(&ready)) {
        if (DRIVER(nvmlInit_v2)() != NVML_SUCCESS) return NULL;
        atomic_store(&ready, true); /* never shut down: NVML counts */
    }
    nvmlDevice_t handle = NULL;
    return each_uuid(device, take_handle, (void *)&handle) ? handle : NULL;
}

/* Place among the container's devices of one that CUDA_VISIBLE_DEVICES may have moved. */
static int position_of(CUdevice device)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible || !*visible) return device;
    unsigned int index;
    nvmlDevice_t handle = device_nvml(device);
    if (handle && DRIVER(nvmlDeviceGetIndex)(handle, &index) == NVML_SUCCESS) return (int)index;
    /* Without NVML: a list of numbers says it, a list of UUIDs leaves only the driver's order. */
    for (int i = 0; i < device && visible; i++) {
        visible = strchr(visible, ',');
        if (visible) visible++;
    }
    if (!visible) return device;
    char *end;
    long number = strtol(visible, &end, 10);
    return end != visible && (*end == ',' || *end == '\0') && number >= 0 && number < DEVICES ? (int)number : device;
}

/* -2: the driver does not say yet which device that is. */
static int ask(CUdevice device)
{
    int index = -1;
    CUuuid uuid;
    if (DRIVER(cuDeviceGetUuid)(&uuid, device) != CUDA_SUCCESS) return -2;
    if (account_by_ordinal()) return account_device_of_ordinal(position_of(device));
    each_uuid(device, take_limits, &index);
    return index;
}

int device_limits(CUdevice device)
{
    if (device < 0 || device >= DEVICES) return -1;
    int known = atomic_load_explicit(&limits_of_cuda[device], memory_order_relaxed);
    if (!known) {
        known = ask(device) + 2;
        if (!known) return -1;
        atomic_store_explicit(&limits_of_cuda[device], known, memory_order_relaxed);
    }
    return known - 2;
}

static bool say(const char *text, void *into)
{
    (void)into;
    platform_say(PLATFORM_ERROR, "device %s is not among the limits of this container: no context is made on it", text);
    return true;
}

/* An instance has a UUID of its own that the file cannot name: it is made for the container after the file was written. */
static bool is_instance(CUdevice device)
{
    CUuuid uuid;
    char text[UUID_TEXT];
    nvmlDevice_t handle;
    if (!device_nvml(device) || DRIVER(cuDeviceGetUuid_v2)(&uuid, device) != CUDA_SUCCESS) return false;
    uuid_text("MIG", &uuid, text);
    return DRIVER(nvmlDeviceGetHandleByUUID)(text, &handle) == NVML_SUCCESS;
}

bool device_is_foreign(CUdevice device)
{
    static _Atomic(bool) said;
    if (device_limits(device) >= 0 || !account_names_devices()) return false;
    if (device < 0 || device >= DEVICES || !atomic_load(&limits_of_cuda[device]))
        return false; /* the driver says why */
    if (is_instance(device)) return false;
    if (!atomic_exchange(&said, true)) each_uuid(device, say, NULL);
    return true;
}

int device_limits_nvml(nvmlDevice_t device)
{
    static struct {
        _Atomic(nvmlDevice_t) handle;
        _Atomic(int) known;
    } memory[DEVICES];
    if (!device) return -1;
    int i = 0;
    for (; i < DEVICES; i++) {
        nvmlDevice_t handle = atomic_load_explicit(&memory[i].handle, memory_order_acquire);
        if (!handle) break;
        if (handle == device) {
            int known = atomic_load_explicit(&memory[i].known, memory_order_acquire);
            if (known) return known - 2;
        }
    }
    char text[UUID_TEXT];
    unsigned int position;
    int index = -1;
    if (account_by_ordinal()) {
        if (DRIVER(nvmlDeviceGetIndex)(device, &position) == NVML_SUCCESS)
            index = account_device_of_ordinal((int)position);
    } else if (DRIVER(nvmlDeviceGetUUID)(device, text, sizeof text) == NVML_SUCCESS) {
        index = account_device_of_uuid(text);
    } else {
        return -1; /* an invalid handle: the driver reports it itself */
    }
    nvmlDevice_t none = NULL;
    if (i < DEVICES && atomic_compare_exchange_strong(&memory[i].handle, &none, device))
        atomic_store_explicit(&memory[i].known, index + 2, memory_order_release);
    return index;
}
