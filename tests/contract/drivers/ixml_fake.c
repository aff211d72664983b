/* SPDX-License-Identifier: Apache-2.0
 *
 * A libixml.so of a machine of tests. Structures and numbers are those of the vendor's api.h
 * (go-ixml), declared again here and not taken from the code under test. Besides the usual keys a
 * device has `name`, `uuid`, `power`, `health` (bits), and where it is linked `bridge` (level to
 * every other one) and `links` (of the vendor's own).
 */
#include "library_machine.h"

#define INVALID 2
#define NOT_SUPPORTED 3
#define TOO_SMALL 7
#define LOST 15
#define UNKNOWN 999
#define MIB (1ull << 20)

typedef struct { void *handle; } device_t;
struct pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char address[32];
};
struct memory { unsigned long long total, free, used; };
struct rates { unsigned gpu, memory; };
struct row { unsigned pid; unsigned long long used; };

static int at(device_t device) { return (int)(intptr_t)device.handle - 1; }

static int written(char *into, unsigned size, const char *text)
{
    if (strlen(text) >= size) return TOO_SMALL;
    snprintf(into, size, "%s", text);
    return 0;
}

int nvmlInit_v2(void)
{
    machine_read();
    REFUSED(nvmlInit_v2);
    return 0;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    REFUSED(nvmlSystemGetDriverVersion);
    return written(version, size, machine_word("version"));
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    REFUSED(nvmlDeviceGetCount_v2);
    *count = machine_is_garbled("garbage") ? 0x7fffffffu : (unsigned)machine_devices();
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device)
{
    REFUSED(nvmlDeviceGetHandleByIndex_v2);
    if (!machine_device((int)index)) return INVALID;
    device->handle = (void *)(intptr_t)(index + 1);
    return 0;
}

int nvmlDeviceGetUUID(device_t device, char *uuid, unsigned size)
{
    REFUSED(nvmlDeviceGetUUID);
    return written(uuid, size, device_text(at(device), "uuid"));
}

int nvmlDeviceGetName(device_t device, char *name, unsigned size)
{
    REFUSED(nvmlDeviceGetName);
    return written(name, size, device_text(at(device), "name"));
}

int nvmlDeviceGetMinorNumber(device_t device, unsigned *minor)
{
    REFUSED(nvmlDeviceGetMinorNumber);
    *minor = (unsigned)device_number(at(device), "index");
    return 0;
}

int nvmlDeviceGetPciInfo_v3(device_t device, struct pci *pci)
{
    REFUSED(nvmlDeviceGetPciInfo_v3);
    memset(pci, 0, sizeof *pci);
    pci->domain = (unsigned)device_number(at(device), "domain");
    pci->bus = (unsigned)device_number(at(device), "bus");
    pci->device = (unsigned)device_number(at(device), "device");
    pci->id = 0x00011e3e;
    snprintf(pci->legacy, sizeof pci->legacy, "%s", device_text(at(device), "bus_id"));
    snprintf(pci->address, sizeof pci->address, "0000%s", pci->legacy);
    return 0;
}

int nvmlDeviceGetMemoryInfo(device_t device, struct memory *memory)
{
    REFUSED(nvmlDeviceGetMemoryInfo);
    if (device_number(at(device), "failing")) return UNKNOWN;
    memory->total = (unsigned long long)device_number(at(device), "memory_mib") * MIB;
    memory->used = (unsigned long long)device_number(at(device), "used_mib") * MIB;
    memory->free = memory->total - memory->used;
    if (machine_is_garbled("truncated")) memory->total = 7;
    return 0;
}

int ixmlDeviceGetHealth(device_t device, unsigned long long *health)
{
    REFUSED(ixmlDeviceGetHealth);
    if (device_number(at(device), "lost")) return LOST;
    *health = (unsigned long long)device_number(at(device), "health");
    return 0;
}

int nvmlDeviceGetUtilizationRates(device_t device, struct rates *rates)
{
    REFUSED(nvmlDeviceGetUtilizationRates);
    rates->gpu = (unsigned)device_number(at(device), "core_pct");
    rates->memory = 7;
    return 0;
}

int nvmlDeviceGetTemperature(device_t device, int sensor, unsigned *temperature)
{
    REFUSED(nvmlDeviceGetTemperature);
    if (sensor) return INVALID;
    *temperature = (unsigned)device_number(at(device), "temperature_c");
    return 0;
}

int nvmlDeviceGetPowerUsage(device_t device, unsigned *power)
{
    REFUSED(nvmlDeviceGetPowerUsage);
    *power = (unsigned)device_number(at(device), "power");
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses(device_t device, unsigned *count, struct row *rows)
{
    unsigned room = *count, found = 0, pid, mib;
    REFUSED(nvmlDeviceGetComputeRunningProcesses);
    while (device_process(at(device), (int)found, &pid, &mib)) {
        if (found < room) rows[found] = (struct row){pid, mib * MIB};
        found++;
    }
    for (long long more = device_number(at(device), "more_processes"); more > 0; more--, found++)
        if (found < room) rows[found] = (struct row){100000 + (unsigned)more, ~0ull};
    *count = found;
    return found > room ? TOO_SMALL : 0;
}

int nvmlDeviceGetTopologyCommonAncestor(device_t a, device_t b, unsigned *level)
{
    REFUSED(nvmlDeviceGetTopologyCommonAncestor);
    if (!device_text(at(a), "bridge")[0] || at(a) == at(b)) return NOT_SUPPORTED;
    *level = (unsigned)device_number(at(a), "bridge");
    return 0;
}

int ixmlDeviceGetIxLinkInfo(device_t a, device_t b, unsigned *links, unsigned *port,
                            unsigned *remote)
{
    REFUSED(ixmlDeviceGetIxLinkInfo);
    if (at(a) == at(b)) return INVALID;
    *links = (unsigned)device_number(at(a), "links");
    for (unsigned i = 0; i < *links && i < 6; i++) port[i] = remote[i] = i;
    return 0;
}
