/* SPDX-License-Identifier: Apache-2.0
 *
 * A libbiren-ml.so of a machine of tests (library_machine.h). Structures as in the vendor's brml.h,
 * API version 1, declared again here and not taken from the code under test. Keys of a device:
 * number (its node id; its index where there is none), svi (instances, 1 where there is none),
 * product, serial, uuid, health, gone, direct (ports to cards of the same NUMA node). Instances of a
 * card have the numbers after the card's own.
 */
#include "library_machine.h"

#define INVALID 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 5
#define TOO_SMALL 6
#define PARTS 4

struct device { int at, part; };
typedef struct device *handle_t;
static struct device devices[256][PARTS + 1];

struct memory { unsigned long long total, free, used; };
struct rates { unsigned gpu, memory; };
struct row { unsigned pid; unsigned long long used, host; };
struct info { char name[96], id[96], serial[96], board[96]; };
struct pci { unsigned domain, bus, device, function, id, subsystem; char address[32]; };
struct link { int type; unsigned count, port[8]; };

#define CHECK(call)            \
    REFUSED(call);             \
    if (!handle) return INVALID; \
    int at = handle->at;       \
    (void)at

static unsigned svi_of(int at)
{
    unsigned svi = (unsigned)device_number(at, "svi");
    return svi ? svi : 1;
}

int brmlInit(void)
{
    machine_read();
    REFUSED(brmlInit);
    for (int at = 0; at < 256; at++)
        for (int part = 0; part <= PARTS; part++) devices[at][part] = (struct device){at, part};
    return 0;
}

int brmlSystemGetDriverVersion(char *version, unsigned length)
{
    REFUSED(brmlSystemGetDriverVersion);
    if (strlen(machine_word("version")) >= length) return TOO_SMALL;
    snprintf(version, length, "%s", machine_word("version"));
    return 0;
}

int brmlDeviceGetCount(unsigned *count)
{
    REFUSED(brmlDeviceGetCount);
    *count = machine_is_garbled("garbage") ? 0x7fffffff : (unsigned)machine_devices();
    return 0;
}

int brmlDeviceGetHandleByIndex(unsigned index, handle_t *handle)
{
    REFUSED(brmlDeviceGetHandleByIndex);
    if (index >= (unsigned)machine_devices()) return NOT_FOUND;
    if (device_number((int)index, "gone")) return NOT_FOUND;
    *handle = &devices[index][0];
    return 0;
}

int brmlDeviceGetSviMode(handle_t handle, unsigned *now, unsigned *pending)
{
    CHECK(brmlDeviceGetSviMode);
    *now = *pending = svi_of(at);
    return 0;
}

int brmlDeviceGetGpuInstanceById(handle_t handle, unsigned id, handle_t *part)
{
    CHECK(brmlDeviceGetGpuInstanceById);
    if (id >= svi_of(at)) return NOT_FOUND;
    *part = &devices[at][id + 1];
    return 0;
}

int brmlDeviceGetNodeId(handle_t handle, unsigned *number)
{
    CHECK(brmlDeviceGetNodeId);
    const char *own = device_text(at, "number");
    *number = (unsigned)device_number(at, *own ? "number" : "index");
    *number += handle->part ? (unsigned)handle->part - 1 : 0;
    return 0;
}

int brmlDeviceGetHealthStatus(handle_t handle, int *health)
{
    CHECK(brmlDeviceGetHealthStatus);
    if (device_number(at, "failing")) return 255;
    *health = (int)device_number(at, "health");
    return 0;
}

int brmlDeviceGetMemoryInfo(handle_t handle, struct memory *memory)
{
    CHECK(brmlDeviceGetMemoryInfo);
    memory->total = ((unsigned long long)device_number(at, "memory_mib") << 20) / svi_of(at);
    memory->used = (unsigned long long)device_number(at, "used_mib") << 20;
    memory->free = memory->total - memory->used;
    return 0;
}

int brmlDeviceGetUtilizationRates(handle_t handle, struct rates *rates)
{
    CHECK(brmlDeviceGetUtilizationRates);
    rates->gpu = (unsigned)device_number(at, "core_pct");
    rates->memory = rates->gpu / 2;
    return 0;
}

int brmlDeviceGetTemperature(handle_t handle, int sensor, unsigned *temperature)
{
    CHECK(brmlDeviceGetTemperature);
    if (sensor) return NOT_SUPPORTED;
    *temperature = (unsigned)device_number(at, "temperature_c");
    return 0;
}

int brmlDeviceGetPowerUsage(handle_t handle, unsigned *milliwatts)
{
    CHECK(brmlDeviceGetPowerUsage);
    *milliwatts = (unsigned)device_number(at, "power_w") * 1000;
    return 0;
}

int brmlDeviceGetComputeRunningProcesses(handle_t handle, unsigned *count, struct row *rows)
{
    unsigned room = *count, found = 0, pid, mib;
    CHECK(brmlDeviceGetComputeRunningProcesses);
    if (svi_of(at) > 1 && !handle->part) return INVALID;
    for (; device_process(at, (int)found, &pid, &mib); found++)
        if (found < room) rows[found] = (struct row){pid, (unsigned long long)mib << 20, 7};
    *count = found;
    return !found ? NOT_FOUND : found > room ? TOO_SMALL : 0;
}

int brmlDeviceGetPciInfo(handle_t handle, struct pci *pci)
{
    CHECK(brmlDeviceGetPciInfo);
    pci->domain = (unsigned)device_number(at, "domain");
    pci->bus = (unsigned)device_number(at, "bus");
    pci->device = (unsigned)device_number(at, "device");
    pci->function = (unsigned)device_number(at, "function");
    snprintf(pci->address, sizeof pci->address, "%08X:%02X:%02X.%01X", pci->domain,
             pci->bus & 0xff, pci->device & 0xff, pci->function & 0xf);
    return 0;
}

int brmlDeviceGetGpuInfo(handle_t handle, struct info *info)
{
    CHECK(brmlDeviceGetGpuInfo);
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "%s", device_text(at, "product"));
    snprintf(info->serial, sizeof info->serial, "%s", device_text(at, "serial"));
    return 0;
}

int brmlDeviceGetUUID(handle_t handle, char *uuid, unsigned length)
{
    CHECK(brmlDeviceGetUUID);
    if (length < 80) return TOO_SMALL;
    snprintf(uuid, length, "  %s ", device_text(at, "uuid"));
    return 0;
}

int brmlDeviceGetNumaNode(handle_t handle, unsigned *node)
{
    CHECK(brmlDeviceGetNumaNode);
    *node = (unsigned)device_number(at, "numa");
    return 0;
}

int brmlDeviceGetTopologyCommonAncestor(handle_t handle, handle_t other, int *level)
{
    CHECK(brmlDeviceGetTopologyCommonAncestor);
    *level = device_number(at, "numa") == device_number(other->at, "numa") ? 40 : 50;
    return 0;
}

int brmlDeviceGetP2PStatus_v2(handle_t handle, handle_t other, struct link *link)
{
    CHECK(brmlDeviceGetP2PStatus_v2);
    memset(link, 0, sizeof *link);
    if (device_number(at, "numa") != device_number(other->at, "numa")) return 0;
    link->count = (unsigned)device_number(at, "direct");
    link->type = link->count ? 2 : 1;
    return 0;
}
