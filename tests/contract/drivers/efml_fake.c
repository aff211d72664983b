/* SPDX-License-Identifier: Apache-2.0
 *
 * A libefml.so of a machine of tests. Structures and numbers are those of the vendor's efml.h of
 * 2025, declared again here and not taken from the code under test: sizes of memory in bytes, what
 * is in use in MiB, load in percent, power in watts. Keys of a device besides: serial, dev_uuid,
 * name, mode, healthy, ports (numbers of the cards at their other ends, -1: none). With the word
 * `old` the machine has a library of 2019.
 */
#include "library_machine.h"

#include <stdbool.h>

#define OK 0
#define UNINITIALIZED 1
#define BAD_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NO_FUNCTION 9
#define FAIL 254
#define TEXT 128

typedef struct {
    char name[TEXT];
    uint32_t vendor, device, domain, bus, dev, func, logic;
} info_t;
typedef struct { float cap, now; } power_t;
typedef struct { uint64_t total; uint32_t used; } memory_t;
typedef struct { float asic, memory, board; } thermal_t;
typedef struct { uint32_t pid; uint64_t device, system; } process_t;
typedef struct {
    uint32_t connected;
    char uuid[16];
    uint32_t vendor, device, domain, bus, dev, func, port, type;
    uint32_t remote_card;
    char remote_uuid[16];
    uint32_t remote_vendor, remote_device, remote_domain, remote_bus, remote_dev, remote_func;
    uint32_t remote_port, remote_type;
} port_t;

static bool opened;

#define CHECK                                   \
    do {                                        \
        int code_;                              \
        if (!opened) return UNINITIALIZED;      \
        if (machine_answer(__func__, &code_)) return code_; \
    } while (0)
#define FIND(index)                             \
    CHECK;                                      \
    int at = (int)(index);                      \
    if (!machine_device(at)) return BAD_ARGUMENT
#define SINCE_2024 \
    if (*machine_word("old")) return NO_FUNCTION

static int write_text(char *into, const char *text)
{
    memset(into, 0x55, TEXT);
    strcpy(into, text);
    return *text ? OK : NOT_SUPPORTED;
}

int EfmlInit(bool no_driver)
{
    machine_read();
    opened = true;
    int code;
    if (machine_answer(__func__, &code)) {
        opened = false;
        return code;
    }
    return no_driver ? BAD_ARGUMENT : OK;
}

int EfmlGetDriverVer(char *version)
{
    CHECK;
    return write_text(version, machine_word("version"));
}

int EfmlGetDevCount(uint32_t *count)
{
    CHECK;
    *count = machine_is_garbled("garbage") ? 0xFFFFFFFFu : (uint32_t)machine_devices();
    return OK;
}

static void place(int at, uint32_t *domain, uint32_t *bus, uint32_t *dev, uint32_t *func)
{
    *domain = (uint32_t)device_number(at, "domain");
    *bus = (uint32_t)device_number(at, "bus");
    *dev = (uint32_t)device_number(at, "device");
    *func = (uint32_t)device_number(at, "function");
}

int EfmlGetDevInfo(uint32_t index, info_t *info)
{
    FIND(index);
    memset(info, 0, sizeof *info);
    snprintf(info->name, TEXT, "Enflame %.100s", device_text(at, "name"));
    info->vendor = 0x1e36;
    place(at, &info->domain, &info->bus, &info->dev, &info->func);
    info->logic = (uint32_t)device_number(at, "index");
    return OK;
}

int EfmlGetDevSn(uint32_t index, char *serial)
{
    FIND(index);
    if (!machine_is_garbled("serial")) return write_text(serial, device_text(at, "serial"));
    memset(serial, 'A', TEXT); /* as long as the buffer, without an end */
    return OK;
}

int EfmlGetDevUuid(uint32_t index, char *uuid)
{
    FIND(index);
    return write_text(uuid, device_text(at, "dev_uuid"));
}

int EfmlGetDevSKU(uint32_t index, char *sku)
{
    FIND(index);
    return write_text(sku, device_text(at, "name"));
}

int EfmlGetDevLogicId(uint32_t index, uint32_t *logic)
{
    FIND(index);
    *logic = (uint32_t)device_number(at, "index");
    return OK;
}

int EfmlGetNumaNode(uint32_t index, int *numa)
{
    SINCE_2024;
    FIND(index);
    *numa = (int)device_number(at, "numa");
    return OK;
}

int EfmlGetGcuVirtStatus(uint32_t index, unsigned *mode)
{
    SINCE_2024;
    FIND(index);
    *mode = (unsigned)device_number(at, "mode");
    return OK;
}

int EfmlGetDevHealth(uint32_t index, bool *health)
{
    FIND(index);
    if (device_number(at, "failing")) return FAIL;
    *health = !device_number(at, "lost");
    return OK;
}

int EfmlGetDevMem(uint32_t index, memory_t *memory)
{
    FIND(index);
    memory->total = (uint64_t)device_number(at, "memory_mib") << 20;
    memory->used = (uint32_t)device_number(at, "used_mib");
    if (machine_is_garbled("memory")) memory->total = UINT64_MAX;
    return OK;
}

int EfmlGetDevDtuUsage(uint32_t index, float *load)
{
    FIND(index);
    *load = machine_is_garbled("memory") ? 0.0f / 0.0f : (float)device_number(at, "core_pct");
    return OK;
}

int EfmlGetDevTempV2(uint32_t index, thermal_t *thermal)
{
    SINCE_2024;
    FIND(index);
    thermal->asic = (float)device_number(at, "temperature_c");
    thermal->memory = thermal->board = thermal->asic + 7;
    return OK;
}

int EfmlGetDevTemp(uint32_t index, thermal_t *thermal)
{
    FIND(index);
    thermal->asic = (float)device_number(at, "temperature_c");
    thermal->memory = thermal->board = thermal->asic + 9;
    return OK;
}

int EfmlGetDevPwr(uint32_t index, power_t *power)
{
    FIND(index);
    power->cap = 300.0f;
    power->now = (float)device_number(at, "power_w");
    return OK;
}

int EfmlGetProcessInfo(uint32_t index, uint32_t *count, process_t *found)
{
    unsigned pid, mib;
    FIND(index);
    for (*count = 0; device_process(at, (int)*count, &pid, &mib); ++*count)
        found[*count] = (process_t){.pid = pid, .device = mib, .system = 1};
    if (machine_is_garbled("processes")) *count = 0x40000000u;
    return OK;
}

/* The other end of port `number`, -1 where it is not connected, -2 where there is no such port. */
static int far_end(int at, uint32_t number)
{
    const char *ports = device_text(at, "ports");
    for (; *ports && number; number--) ports += strcspn(ports, ",") + (strchr(ports, ',') != NULL);
    return *ports ? atoi(ports) : -2;
}

static int count_ports(int at, uint32_t *count)
{
    for (*count = 0; far_end(at, *count) != -2; ++*count) continue;
    return *count ? OK : NOT_SUPPORTED;
}

static int tell_port(int at, uint32_t number, port_t *port)
{
    int far = far_end(at, number);
    memset(port, 0, sizeof *port);
    memset(port->uuid, 'u', sizeof port->uuid);
    memset(port->remote_uuid, 'r', sizeof port->remote_uuid);
    if (far == -2) return BAD_ARGUMENT;
    port->connected = far >= 0;
    place(far, &port->remote_domain, &port->remote_bus, &port->remote_dev, &port->remote_func);
    return OK;
}

int EfmlGetGcuLarePortNum(uint32_t index, uint32_t *count)
{
    SINCE_2024;
    FIND(index);
    return count_ports(at, count);
}

int EfmlGetGcuLarePortInfo(uint32_t index, uint32_t number, port_t *port)
{
    SINCE_2024;
    FIND(index);
    return tell_port(at, number, port);
}

int EfmlGetEslPortNum(uint32_t index, uint32_t *count)
{
    FIND(index);
    return count_ports(at, count);
}

int EfmlGetEslPortInfo(uint32_t index, uint32_t number, port_t *port)
{
    FIND(index);
    return tell_port(at, number, port);
}
