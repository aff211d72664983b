/* SPDX-License-Identifier: Apache-2.0
 *
 * A libcndev.so of a machine of tests (library_machine.h). Structures as in the vendor's cndev.h
 * for API version 6, declared again here and not taken from the code under test; a call with
 * another version than the machine's `api` (6 where it says none) answers 3. Handles are no
 * indexes. Keys of a device: uuid, name, serial (0x...), ports (indexes of cards that its MLU-Links
 * lead to, -1: the port is down), smlu, mim. The process keeps the partitions of cards and enforces
 * the limits of a card: 100 percent, its memory, unique names, profiles removed only without
 * instances.
 */
#include "library_machine.h"

#define CARDS 16
#define PROFILES 16
#define INSTANCES 32
#define FIRST_HANDLE 70
#define OLDEST 5
#define CHECK_VERSION(thing) \
    if ((thing)->version != api()) return 3
#define CHECK_DEVICE(call)                            \
    REFUSED(call);                                    \
    int at = handle - FIRST_HANDLE;                   \
    if (at < 0 || at >= machine_devices()) return 6;

typedef struct { int version; unsigned number; } count_t;
typedef struct { int version; uint8_t uuid[37]; uint64_t ncs; } card_uuid_t;
typedef struct { int version; unsigned mcu_major, mcu_minor, mcu_build, major, minor, build; } versions_t;
typedef struct { int version; uint64_t sn, board; } serial_t;
typedef struct {
    unsigned subsystem, id;
    uint16_t vendor, subvendor;
    unsigned domain, bus, device, function;
    uint16_t module, slot;
    uint32_t reserved[8];
} pcie_v2_t;
typedef struct {
    int version;
    unsigned subsystem, id;
    uint16_t vendor, subvendor;
    unsigned domain, bus, device, function;
    const char *slot;
    int slot_id;
} pcie_t;
typedef struct { int64_t total, used, reserved, vtotal, vused; uint64_t global, spare[16]; } memory_v2_t;
typedef struct {
    int version;
    int64_t total, used, vtotal, vused, channels, channel[20];
    uint64_t global;
} memory_t;
typedef struct { int version, average, cores[80]; } utilization_t;
typedef struct {
    int version, board, cluster[20], die[8], chip, inlet, outlet, memory, video, cpu, isp;
} temperature_t;
typedef struct { int usage, cap, machine, tdp, most, reserved[16]; } device_power_t;
typedef struct {
    int version, usage, cap, decimal, machine, cap_decimal;
    uint16_t tdp, now, now_decimal;
} power_t;
typedef struct { int version; int32_t node; } numa_t;
typedef struct { int version, health, device, driver; } health_t;
typedef struct { int version; unsigned pid; uint64_t physical, virtual_; } process_t;
typedef struct { int version, relation; } relation_t;
typedef struct { int mac, serdes, presence; uint32_t progress, reserved[7]; } port_v2_t;
typedef struct { int version, active, serdes, cable; } port_t;
typedef struct {
    int version;
    uint64_t mc_sn, ba_sn;
    uint32_t slot, port;
    uint8_t ip[16], uuid[37];
    uint32_t ip_version, ip_valid;
    int32_t kind;
    uint64_t ncs;
    uint8_t mac[6];
    char name[256];
} remote_t;
typedef struct { int version; int mode; } mode_t_;
typedef struct { int version; uint32_t quota; uint64_t memory; } set_t;
typedef struct { int version; int count; int ids[128]; } ids_t;
typedef struct {
    int version, id;
    char name[100];
    uint32_t total, remain, quota[2];
    uint64_t memory[2];
} profile_t;
typedef struct {
    int version, profile, id;
    uint8_t uuid[37];
    int domain, bus, device, function;
    char profile_name[100], name[100], node[100];
    uint32_t quota[2];
    uint64_t memory[2];
    unsigned reserved[128];
} instance_t;

static struct { int used; uint32_t quota; uint64_t memory; } profiles[CARDS][PROFILES];
static struct { int used, profile; char name[100]; } instances[CARDS][INSTANCES];
static int opened;
int cndev_fake_fail_instance;

static int api(void)
{
    const char *word = machine_word("api");
    return *word ? atoi(word) : 6;
}

int cndevInit(int flags)
{
    (void)flags;
    opened = 0;
    machine_read();
    REFUSED(cndevInit);
    opened = 1;
    return machine_devices() ? 0 : 12;
}

int cndevGetDeviceCount(count_t *count)
{
    REFUSED(cndevGetDeviceCount);
    CHECK_VERSION(count);
    if (!opened) return 4;
    count->number = machine_is_garbled("garbage") ? 0x7fffffff : (unsigned)machine_devices();
    return 0;
}

int cndevGetDeviceHandleByIndex(int index, int *handle)
{
    REFUSED(cndevGetDeviceHandleByIndex);
    if (index < 0 || index >= machine_devices()) return 6;
    *handle = index + FIRST_HANDLE;
    return 0;
}

int cndevGetUUID(card_uuid_t *uuid, int handle)
{
    CHECK_DEVICE(cndevGetUUID);
    CHECK_VERSION(uuid);
    snprintf((char *)uuid->uuid, sizeof uuid->uuid, "%s", device_text(at, "uuid"));
    uuid->ncs = UINT64_C(0x1122334455667788);
    return 0;
}

int cndevGetCardHealthState(health_t *health, int handle)
{
    CHECK_DEVICE(cndevGetCardHealthState);
    CHECK_VERSION(health);
    if (device_number(at, "failing")) return 7;
    health->health = !device_number(at, "lost");
    if (api() > OLDEST) {
        health->device = health->health;
        health->driver = *device_text(at, "driver") ? (int)device_number(at, "driver") : 4;
    }
    return 0;
}

int cndevGetComputeMode(mode_t_ *mode, int handle)
{
    CHECK_DEVICE(cndevGetComputeMode);
    CHECK_VERSION(mode);
    mode->mode = (int)device_number(at, "compute_mode");
    return 0;
}

int cndevGetVersionInfo(versions_t *versions, int handle)
{
    CHECK_DEVICE(cndevGetVersionInfo);
    (void)at;
    CHECK_VERSION(versions);
    sscanf(machine_word("version"), "%u.%u.%u", &versions->major, &versions->minor,
           &versions->build);
    return 0;
}

const char *cndevGetCardNameStringByDevId(int handle)
{
    return device_text(handle - FIRST_HANDLE, "name");
}

int cndevGetCardSN(serial_t *serial, int handle)
{
    CHECK_DEVICE(cndevGetCardSN);
    CHECK_VERSION(serial);
    serial->sn = (uint64_t)device_number(at, "serial");
    return 0;
}

int cndevGetPCIeInfoV2(pcie_v2_t *pcie, int handle)
{
    CHECK_DEVICE(cndevGetPCIeInfoV2);
    if (api() == OLDEST) return 10;
    memset(pcie, 0, sizeof *pcie);
    pcie->vendor = 0xcabc;
    pcie->domain = (unsigned)device_number(at, "domain");
    pcie->bus = (unsigned)device_number(at, "bus");
    pcie->device = (unsigned)device_number(at, "device");
    pcie->function = (unsigned)device_number(at, "function");
    return 0;
}

int cndevGetPCIeInfo(pcie_t *pcie, int handle)
{
    CHECK_DEVICE(cndevGetPCIeInfo);
    CHECK_VERSION(pcie);
    pcie->vendor = 0xcabc;
    pcie->domain = (unsigned)device_number(at, "domain");
    pcie->bus = (unsigned)device_number(at, "bus");
    pcie->device = (unsigned)device_number(at, "device");
    pcie->function = (unsigned)device_number(at, "function");
    pcie->slot = "none";
    return 0;
}

int cndevGetMemoryUsageV2(memory_v2_t *memory, int handle)
{
    CHECK_DEVICE(cndevGetMemoryUsageV2);
    if (api() == OLDEST) return 10;
    memset(memory, 0, sizeof *memory);
    memory->total = device_number(at, "memory_mib");
    memory->used = device_number(at, "used_mib");
    return 0;
}

int cndevGetMemoryUsage(memory_t *memory, int handle)
{
    CHECK_DEVICE(cndevGetMemoryUsage);
    CHECK_VERSION(memory);
    memory->total = device_number(at, "memory_mib");
    memory->used = device_number(at, "used_mib");
    return 0;
}

int cndevGetDeviceUtilizationInfo(utilization_t *load, int handle)
{
    CHECK_DEVICE(cndevGetDeviceUtilizationInfo);
    CHECK_VERSION(load);
    load->average = (int)device_number(at, "core_pct");
    return 0;
}

int cndevGetTemperatureInfo(temperature_t *heat, int handle)
{
    CHECK_DEVICE(cndevGetTemperatureInfo);
    CHECK_VERSION(heat);
    memset(heat, 0x55, sizeof *heat);
    heat->chip = (int)device_number(at, "temperature_c");
    return 0;
}

int cndevGetDevicePowerInfo(device_power_t *power, int handle)
{
    CHECK_DEVICE(cndevGetDevicePowerInfo);
    if (api() == OLDEST) return 10;
    memset(power, 0x55, sizeof *power);
    power->usage = (int)device_number(at, "power_w");
    return 0;
}

int cndevGetPowerInfo(power_t *power, int handle)
{
    CHECK_DEVICE(cndevGetPowerInfo);
    CHECK_VERSION(power);
    power->usage = (int)device_number(at, "power_w");
    return 0;
}

int cndevGetNUMANodeIdByDevId(numa_t *numa, int handle)
{
    CHECK_DEVICE(cndevGetNUMANodeIdByDevId);
    CHECK_VERSION(numa);
    numa->node = (int32_t)device_number(at, "numa");
    return 0;
}

int cndevGetProcessInfo(unsigned *count, process_t *rows, int handle)
{
    unsigned room = *count, found = 0, pid, mib;
    CHECK_DEVICE(cndevGetProcessInfo);
    CHECK_VERSION(rows);
    for (; device_process(at, (int)found, &pid, &mib); found++)
        if (found < room) rows[found] = (process_t){api(), pid, (uint64_t)mib << 10, UINT64_MAX};
    *count = found;
    return found > room ? 9 : 0;
}

int cndevTopologyGetRelationship(relation_t *relation, int handle, int other)
{
    CHECK_DEVICE(cndevTopologyGetRelationship);
    CHECK_VERSION(relation);
    int same = device_number(at, "numa") == device_number(other - FIRST_HANDLE, "numa");
    relation->relation = same ? 5 : 6;
    return 0;
}

static int port_of(int at, int port, int *remote)
{
    const char *text = device_text(at, "ports");
    for (int n = 0, used = 0; sscanf(text, "%d%n", remote, &used) == 1; n++, text += used)
        if (n == port) return 1;
    return 0;
}

int cndevGetMLULinkPortNumber(int handle)
{
    int count = 0, remote;
    while (port_of(handle - FIRST_HANDLE, count, &remote)) count++;
    return count;
}

int cndevGetMLULinkStatusV2(port_v2_t *port, int handle, int number)
{
    int remote;
    CHECK_DEVICE(cndevGetMLULinkStatusV2);
    if (api() == OLDEST) return 10;
    if (!port_of(at, number, &remote)) return 11;
    memset(port, 0, sizeof *port);
    port->mac = remote < 0 ? 0 : 3;
    port->serdes = 1;
    return 0;
}

int cndevGetMLULinkStatus(port_t *port, int handle, int number)
{
    int remote;
    CHECK_DEVICE(cndevGetMLULinkStatus);
    CHECK_VERSION(port);
    if (!port_of(at, number, &remote)) return 11;
    port->active = remote >= 0;
    return 0;
}

int cndevGetMLULinkRemoteInfo(remote_t *found, int handle, int number)
{
    int remote;
    CHECK_DEVICE(cndevGetMLULinkRemoteInfo);
    CHECK_VERSION(found);
    if (!port_of(at, number, &remote)) return 11;
    snprintf((char *)found->uuid, sizeof found->uuid, "%s", device_text(remote, "uuid"));
    return 0;
}

/* ---- dividing cards --------------------------------------------------------------------------- */

int cndevGetSMLUMode(mode_t_ *mode, int handle)
{
    CHECK_DEVICE(cndevGetSMLUMode);
    CHECK_VERSION(mode);
    mode->mode = (int)device_number(at, "smlu");
    return 0;
}

int cndevGetMimMode(mode_t_ *mode, int handle)
{
    CHECK_DEVICE(cndevGetMimMode);
    CHECK_VERSION(mode);
    mode->mode = (int)device_number(at, "mim");
    return 0;
}

int cndevCreateSMluProfileInfo(set_t *wanted, int *id, int handle)
{
    CHECK_DEVICE(cndevCreateSMluProfileInfo);
    CHECK_VERSION(wanted);
    for (int n = 0; n < PROFILES; n++) {
        if (profiles[at][n].used) continue;
        profiles[at][n].used = 1;
        profiles[at][n].quota = wanted->quota;
        profiles[at][n].memory = wanted->memory;
        *id = n;
        return 0;
    }
    return 9;
}

int cndevDestroySMluProfileInfo(int id, int handle)
{
    CHECK_DEVICE(cndevDestroySMluProfileInfo);
    for (int n = 0; n < INSTANCES; n++)
        if (instances[at][n].used && instances[at][n].profile == id) return 15;
    if (!profiles[at][id].used) return 14;
    profiles[at][id].used = 0;
    return 0;
}

int cndevGetSMluProfileIdInfo(ids_t *ids, int handle)
{
    CHECK_DEVICE(cndevGetSMluProfileIdInfo);
    CHECK_VERSION(ids);
    ids->count = 0;
    for (int n = 0; n < PROFILES; n++)
        if (profiles[at][n].used) ids->ids[ids->count++] = n;
    return 0;
}

int cndevGetSMluProfileInfo(profile_t *profile, int id, int handle)
{
    CHECK_DEVICE(cndevGetSMluProfileInfo);
    CHECK_VERSION(profile);
    if (!profiles[at][id].used) return 14;
    uint32_t total = 100 / profiles[at][id].quota, live = 0;
    for (int n = 0; n < INSTANCES; n++)
        live += instances[at][n].used && instances[at][n].profile == id;
    profile->id = id;
    snprintf(profile->name, 100, "size %d", id);
    profile->total = total;
    profile->remain = total - live;
    profile->quota[0] = profiles[at][id].quota;
    profile->memory[0] = profiles[at][id].memory;
    return 0;
}

int cndevCreateSMluInstanceByProfileId(int *instance, unsigned id, int handle, char *name)
{
    uint64_t memory = 0;
    uint32_t quota = 0;
    int free = -1;
    CHECK_DEVICE(cndevCreateSMluInstanceByProfileId);
    if (cndev_fake_fail_instance) return 18;
    if (!profiles[at][id].used) return 14;
    for (int n = INSTANCES - 1; n > 0; n--) {
        if (!instances[at][n].used) {
            free = n;
            continue;
        }
        if (!strcmp(instances[at][n].name, name)) return 16;
        memory += profiles[at][instances[at][n].profile].memory;
        quota += profiles[at][instances[at][n].profile].quota;
    }
    memory += profiles[at][id].memory;
    if (free < 0 || quota + profiles[at][id].quota > 100) return 9;
    if (memory > (uint64_t)device_number(at, "memory_mib") << 20) return 9;
    instances[at][free].used = 1;
    instances[at][free].profile = (int)id;
    snprintf(instances[at][free].name, 100, "%s", name);
    *instance = free << 8 | at;
    return 0;
}

int cndevDestroySMluInstanceByHandle(int instance)
{
    REFUSED(cndevDestroySMluInstanceByHandle);
    if (!instances[instance & 255][instance >> 8].used) return 14;
    instances[instance & 255][instance >> 8].used = 0;
    return 0;
}

int cndevGetAllSMluInstanceInfo(int *count, instance_t *info, int handle)
{
    int room = *count, found = 0;
    CHECK_DEVICE(cndevGetAllSMluInstanceInfo);
    CHECK_VERSION(info);
    for (int n = 0; n < INSTANCES; n++) {
        if (!instances[at][n].used) continue;
        if (found == room) return 9;
        instance_t *one = &info[found++];
        one->id = n;
        one->profile = instances[at][n].profile;
        snprintf(one->name, 100, "%s", instances[at][n].name);
        snprintf(one->node, 100, "/dev/cambricon-caps/cap_dev%d_mi%d", at, n);
        one->quota[0] = profiles[at][one->profile].quota;
        one->memory[0] = profiles[at][one->profile].memory;
    }
    *count = found;
    return 0;
}
