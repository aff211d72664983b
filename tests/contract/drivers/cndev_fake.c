/* SPDX-License-Identifier: Apache-2.0
 *
 * A libcndev.so of one process: two cards, the second not in sMLU mode. Structures as in the
 * vendor's cndev.h for API version 6; a call with another version answers 3. Enforces what a card
 * has: 100 percent, its memory, unique names, profiles removed only without instances.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define CARDS 2
#define PROFILES 16
#define INSTANCES 32
#define MEMORY_MIB 23308
#define CHECK_VERSION(thing) \
    if ((thing)->version != 6) return 3

typedef struct { int version; unsigned number; } count_t;
typedef struct { int version; uint8_t uuid[37]; uint64_t ncs; } uuid_t;
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
int cndev_fake_driver = 1;

int cndevInit(int flags)
{
    (void)flags;
    opened = cndev_fake_driver;
    return cndev_fake_driver ? 0 : 1;
}

int cndevGetDeviceCount(count_t *count)
{
    CHECK_VERSION(count);
    if (!opened) return 4;
    count->number = CARDS;
    return 0;
}

int cndevGetDeviceHandleByIndex(int index, int *device)
{
    if (index < 0 || index >= CARDS) return 6;
    *device = index + 70; /* a handle is no index */
    return 0;
}

int cndevGetUUID(uuid_t *uuid, int device)
{
    CHECK_VERSION(uuid);
    memcpy(uuid->uuid, "77019915-8307-0000-0000-000000000000", 37);
    uuid->uuid[35] = (uint8_t)(0x30 + device - 70);
    uuid->ncs = UINT64_C(0x1122334455667788);
    return 0;
}

int cndevGetSMLUMode(mode_t_ *mode, int device)
{
    CHECK_VERSION(mode);
    mode->mode = device == 70;
    return 0;
}

int cndevGetMemoryUsageV2(int64_t *memory, int device)
{
    (void)device;
    memory[0] = MEMORY_MIB;
    return 0;
}

int cndevCreateSMluProfileInfo(set_t *wanted, int *id, int device)
{
    CHECK_VERSION(wanted);
    for (int n = 0; n < PROFILES; n++) {
        if (profiles[device - 70][n].used) continue;
        profiles[device - 70][n].used = 1;
        profiles[device - 70][n].quota = wanted->quota;
        profiles[device - 70][n].memory = wanted->memory;
        *id = n;
        return 0;
    }
    return 9;
}

int cndevDestroySMluProfileInfo(int id, int device)
{
    for (int n = 0; n < INSTANCES; n++)
        if (instances[device - 70][n].used && instances[device - 70][n].profile == id) return 15;
    if (!profiles[device - 70][id].used) return 14;
    profiles[device - 70][id].used = 0;
    return 0;
}

int cndevGetSMluProfileIdInfo(ids_t *ids, int device)
{
    CHECK_VERSION(ids);
    ids->count = 0;
    for (int n = 0; n < PROFILES; n++)
        if (profiles[device - 70][n].used) ids->ids[ids->count++] = n;
    return 0;
}

int cndevGetSMluProfileInfo(profile_t *profile, int id, int device)
{
    CHECK_VERSION(profile);
    if (!profiles[device - 70][id].used) return 14;
    uint32_t total = 100 / profiles[device - 70][id].quota, live = 0;
    for (int n = 0; n < INSTANCES; n++)
        live += instances[device - 70][n].used && instances[device - 70][n].profile == id;
    profile->id = id;
    snprintf(profile->name, 100, "size %d", id);
    profile->total = total;
    profile->remain = total - live;
    profile->quota[0] = profiles[device - 70][id].quota;
    profile->memory[0] = profiles[device - 70][id].memory;
    return 0;
}

int cndevCreateSMluInstanceByProfileId(int *handle, unsigned id, int device, char *name)
{
    uint64_t memory = 0;
    uint32_t quota = 0;
    int free = -1;
    if (cndev_fake_fail_instance) return 18;
    if (!profiles[device - 70][id].used) return 14;
    for (int n = INSTANCES - 1; n > 0; n--) {
        if (!instances[device - 70][n].used) {
            free = n;
            continue;
        }
        if (!strcmp(instances[device - 70][n].name, name)) return 16;
        memory += profiles[device - 70][instances[device - 70][n].profile].memory;
        quota += profiles[device - 70][instances[device - 70][n].profile].quota;
    }
    if (free < 0 || quota + profiles[device - 70][id].quota > 100) return 9;
    if (memory + profiles[device - 70][id].memory > (uint64_t)MEMORY_MIB << 20) return 9;
    instances[device - 70][free].used = 1;
    instances[device - 70][free].profile = (int)id;
    snprintf(instances[device - 70][free].name, 100, "%s", name);
    *handle = free << 8 | (device - 70);
    return 0;
}

int cndevDestroySMluInstanceByHandle(int handle)
{
    if (!instances[handle & 255][handle >> 8].used) return 14;
    instances[handle & 255][handle >> 8].used = 0;
    return 0;
}

int cndevGetAllSMluInstanceInfo(int *count, instance_t *info, int device)
{
    int room = *count, found = 0;
    CHECK_VERSION(info);
    for (int n = 0; n < INSTANCES; n++) {
        if (!instances[device - 70][n].used) continue;
        if (found == room) return 9;
        instance_t *one = &info[found++];
        one->id = n;
        one->profile = instances[device - 70][n].profile;
        snprintf(one->name, 100, "%s", instances[device - 70][n].name);
        snprintf(one->node, 100, "/dev/cambricon-caps/cap_dev%d_mi%d", device - 70, n);
        one->quota[0] = profiles[device - 70][one->profile].quota;
        one->memory[0] = profiles[device - 70][one->profile].memory;
    }
    *count = found;
    return 0;
}
