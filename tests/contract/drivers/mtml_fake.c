/* SPDX-License-Identifier: Apache-2.0
 *
 * A libmtml.so of a machine of tests. Structures and numbers are those of the vendor's mtml.h 2.2,
 * declared again here and not taken from the code under test. One handle is a device, its memory
 * and its GPU. Besides the usual keys a device has `name`, `mtml_uuid`, `power_mw`, `role` (the
 * bits of its property), `errors` of memory, `retiring`, and where it is linked `bridge` (level to
 * every other one) and `links` (of the vendor's own).
 */
#include "library_machine.h"

#define DRIVER_FAILURE 2
#define INVALID 3
#define NOT_SUPPORTED 4
#define TOO_SMALL 6
#define MIB (1ull << 20)

struct pci {
    char sbdf[32];
    unsigned segment, bus, device, id, subsystem, width;
    float most_speed, speed;
    unsigned most_lanes, lanes, most_generation, generation;
    int reserved[6];
};
struct property { unsigned bits, reserved; };

static int library, host;

static int at(const void *handle) { return (int)(intptr_t)handle - 1; }

static int written(char *into, unsigned size, const char *text)
{
    if (strlen(text) >= size) return TOO_SMALL;
    snprintf(into, size, "%s", text);
    return 0;
}

int mtmlLibraryInit(void **opened)
{
    machine_read();
    REFUSED(mtmlLibraryInit);
    *opened = &library;
    return 0;
}

int mtmlLibraryInitSystem(const void *opened, void **system)
{
    REFUSED(mtmlLibraryInitSystem);
    *system = &host;
    return opened == &library ? 0 : INVALID;
}

int mtmlSystemGetDriverVersion(const void *system, char *version, unsigned size)
{
    REFUSED(mtmlSystemGetDriverVersion);
    return system == &host ? written(version, size, machine_word("version")) : INVALID;
}

int mtmlLibraryCountDevice(const void *opened, unsigned *count)
{
    REFUSED(mtmlLibraryCountDevice);
    *count = machine_is_garbled("garbage") ? 0x7fffffffu : (unsigned)machine_devices();
    return opened == &library ? 0 : INVALID;
}

int mtmlLibraryInitDeviceByIndex(const void *opened, unsigned index, void **device)
{
    REFUSED(mtmlLibraryInitDeviceByIndex);
    if (opened != &library || !machine_device((int)index)) return INVALID;
    *device = (void *)(intptr_t)(index + 1);
    return 0;
}

int mtmlDeviceGetProperty(const void *device, struct property *property)
{
    REFUSED(mtmlDeviceGetProperty);
    property->bits = (unsigned)device_number(at(device), "role");
    property->reserved = 0;
    return 0;
}

int mtmlDeviceGetUUID(const void *device, char *uuid, unsigned size)
{
    REFUSED(mtmlDeviceGetUUID);
    return written(uuid, size, device_text(at(device), "mtml_uuid"));
}

int mtmlDeviceGetName(const void *device, char *name, unsigned size)
{
    REFUSED(mtmlDeviceGetName);
    return written(name, size, device_text(at(device), "name"));
}

int mtmlDeviceGetGpuPath(const void *device, char *path, unsigned size)
{
    char text[64];
    REFUSED(mtmlDeviceGetGpuPath);
    snprintf(text, sizeof text, "/dev/mtgpu.%d", (int)device_number(at(device), "index"));
    return written(path, size, text);
}

int mtmlDeviceGetPciInfo(const void *device, struct pci *pci)
{
    REFUSED(mtmlDeviceGetPciInfo);
    memset(pci, 0, sizeof *pci);
    snprintf(pci->sbdf, sizeof pci->sbdf, "0000%.27s", device_text(at(device), "bus_id"));
    pci->segment = (unsigned)device_number(at(device), "domain");
    pci->bus = (unsigned)device_number(at(device), "bus");
    pci->device = (unsigned)device_number(at(device), "device");
    pci->id = 0x03001ed5;
    pci->most_speed = pci->speed = 16;
    return 0;
}

int mtmlDeviceGetPowerUsage(const void *device, unsigned *power)
{
    REFUSED(mtmlDeviceGetPowerUsage);
    *power = (unsigned)device_number(at(device), "power_mw");
    return 0;
}

int mtmlDeviceInitMemory(void *device, void **memory)
{
    REFUSED(mtmlDeviceInitMemory);
    *memory = device;
    return 0;
}

int mtmlMemoryGetTotal(const void *memory, unsigned long long *total)
{
    REFUSED(mtmlMemoryGetTotal);
    if (device_number(at(memory), "failing")) return DRIVER_FAILURE;
    *total = (unsigned long long)device_number(at(memory), "memory_mib") * MIB;
    if (machine_is_garbled("truncated")) *total = 7;
    return 0;
}

int mtmlMemoryGetUsed(const void *memory, unsigned long long *used)
{
    REFUSED(mtmlMemoryGetUsed);
    *used = (unsigned long long)device_number(at(memory), "used_mib") * MIB;
    return 0;
}

int mtmlMemoryGetEccErrorCounter(const void *memory, int error, int counter, int location,
                                 unsigned long long *count)
{
    REFUSED(mtmlMemoryGetEccErrorCounter);
    if (error != 1 || counter != 0 || location != 1) return INVALID;
    *count = (unsigned long long)device_number(at(memory), "errors");
    return 0;
}

int mtmlMemoryGetRetiredPagesPendingStatus(const void *memory, unsigned *pending)
{
    REFUSED(mtmlMemoryGetRetiredPagesPendingStatus);
    *pending = (unsigned)device_number(at(memory), "retiring");
    return 0;
}

int mtmlDeviceInitGpu(void *device, void **gpu)
{
    REFUSED(mtmlDeviceInitGpu);
    *gpu = device;
    return 0;
}

int mtmlGpuGetUtilization(const void *gpu, unsigned *utilization)
{
    REFUSED(mtmlGpuGetUtilization);
    *utilization = (unsigned)device_number(at(gpu), "core_pct");
    return 0;
}

int mtmlGpuGetTemperature(const void *gpu, unsigned *temperature)
{
    REFUSED(mtmlGpuGetTemperature);
    *temperature = (unsigned)device_number(at(gpu), "temperature_c");
    return 0;
}

int mtmlDeviceGetTopologyLevel(const void *a, const void *b, unsigned *level)
{
    REFUSED(mtmlDeviceGetTopologyLevel);
    if (!device_text(at(a), "bridge")[0] || a == b) return NOT_SUPPORTED;
    *level = (unsigned)device_number(at(a), "bridge");
    return 0;
}

int mtmlDeviceCountMtLinkLayouts(const void *a, const void *b, unsigned *links)
{
    REFUSED(mtmlDeviceCountMtLinkLayouts);
    if (!device_text(at(a), "links")[0] || a == b) return NOT_SUPPORTED;
    *links = (unsigned)device_number(at(a), "links");
    return 0;
}
