/* SPDX-License-Identifier: Apache-2.0
 *
 * A librocm_smi64.so and libhydmi.so in one, as Hygon installs them. Structures are those of the
 * vendor's rocm_smi.h and dmi_virtual.h, declared again here and not taken from the code under test.
 * Lost: a block has errors that could not be corrected. Failing: memory cannot be asked.
 */
#include "library_machine.h"

#define INVALID_ARGS 1
#define NOT_SUPPORTED 2
#define INSUFFICIENT_SIZE 11
#define NO_DATA 14
#define UNEXPECTED_DATA 15
#define UMC 1
#define XGMI 2
#define PCIE 1

typedef struct { uint64_t correctable, uncorrectable, deferred, reserved[5]; } counts_t;
typedef struct { uint32_t pid, pasid; uint64_t vram, sdma; uint32_t cu; } process_t;
typedef struct {
    char name[256];
    int units;
    size_t memory, used;
    uint64_t container;
    int device;
} dmi_t;

static int opened;

#define CARD(call, at)                            \
    do {                                          \
        REFUSED(call);                            \
        if (!opened || !machine_device((int)(at))) return INVALID_ARGS; \
    } while (0)

int rsmi_init(uint64_t flags)
{
    (void)flags;
    machine_read();
    opened = 0;
    REFUSED(rsmi_init);
    opened = 1;
    return 0;
}

int rsmi_driver_status(unsigned *state)
{
    *state = strcmp(machine_word("module"), "gone") ? 1 : 0;
    return 0;
}

int rsmi_num_monitor_devices(uint32_t *count)
{
    REFUSED(rsmi_num_monitor_devices);
    *count = machine_is_garbled("garbage") ? 0x7f00ff : (uint32_t)machine_devices();
    return 0;
}

int rsmi_dev_vendor_id_get(uint32_t at, uint16_t *id)
{
    CARD(rsmi_dev_vendor_id_get, at);
    *id = (uint16_t)device_number((int)at, "maker");
    return 0;
}

static int put(char *into, size_t size, const char *text)
{
    snprintf(into, size, "%s", text);
    return strlen(text) < size ? 0 : INSUFFICIENT_SIZE;
}

int rsmi_dev_serial_number_get(uint32_t at, char *into, uint32_t size)
{
    CARD(rsmi_dev_serial_number_get, at);
    return put(into, size, device_text((int)at, "serial"));
}

int rsmi_dev_name_get(uint32_t at, char *into, size_t size)
{
    CARD(rsmi_dev_name_get, at);
    return put(into, size, device_text((int)at, "name"));
}

int rsmi_dev_unique_id_get(uint32_t at, uint64_t *id)
{
    CARD(rsmi_dev_unique_id_get, at);
    *id = (uint64_t)device_number((int)at, "unique");
    return 0;
}

int rsmi_dev_pci_id_get(uint32_t at, uint64_t *id)
{
    CARD(rsmi_dev_pci_id_get, at);
    *id = (uint64_t)device_number((int)at, "domain") << 32 |
          (uint64_t)device_number((int)at, "bus") << 8 |
          (uint64_t)device_number((int)at, "device") << 3 |
          (uint64_t)device_number((int)at, "function");
    return 0;
}

int rsmi_dev_memory_total_get(uint32_t at, int type, uint64_t *bytes)
{
    CARD(rsmi_dev_memory_total_get, at);
    if (type) return INVALID_ARGS;
    *bytes = (uint64_t)device_number((int)at, "memory_mib") << 20;
    return 0;
}

int rsmi_dev_memory_usage_get(uint32_t at, int type, uint64_t *bytes)
{
    CARD(rsmi_dev_memory_usage_get, at);
    if (type) return INVALID_ARGS;
    if (device_number((int)at, "failing")) return UNEXPECTED_DATA;
    *bytes = (uint64_t)device_number((int)at, "used_mib") << 20;
    return 0;
}

int rsmi_dev_busy_percent_get(uint32_t at, uint32_t *percent)
{
    CARD(rsmi_dev_busy_percent_get, at);
    *percent = (uint32_t)device_number((int)at, "core_pct");
    return 0;
}

int rsmi_dev_temp_metric_get(uint32_t at, uint32_t sensor, int metric, int64_t *heat)
{
    CARD(rsmi_dev_temp_metric_get, at);
    if (sensor != 1 || metric) return NOT_SUPPORTED;
    *heat = device_number((int)at, "temperature_c") * 1000;
    return 0;
}

int rsmi_dev_power_ave_get(uint32_t at, uint32_t sensor, uint64_t *power)
{
    CARD(rsmi_dev_power_ave_get, at);
    if (sensor) return INVALID_ARGS;
    *power = (uint64_t)device_number((int)at, "power_w") * 1000000;
    return 0;
}

int rsmi_dev_ecc_count_get(uint32_t at, uint64_t block, counts_t *counts)
{
    CARD(rsmi_dev_ecc_count_get, at);
    if (block != UMC) return NOT_SUPPORTED;
    memset(counts, 0, sizeof *counts);
    counts->correctable = 7;
    counts->uncorrectable = device_number((int)at, "lost") ? 3 : 0;
    return 0;
}

int rsmi_topo_get_numa_node_number(uint32_t at, uint32_t *node)
{
    CARD(rsmi_topo_get_numa_node_number, at);
    *node = (uint32_t)device_number((int)at, "numa");
    return 0;
}

int rsmi_topo_get_link_type(uint32_t a, uint32_t b, uint64_t *hops, int *type)
{
    CARD(rsmi_topo_get_link_type, a);
    CARD(rsmi_topo_get_link_type, b);
    int near = device_number((int)a, "numa") == device_number((int)b, "numa");
    *type = near && a / 2 == b / 2 ? XGMI : PCIE;
    *hops = *type == XGMI ? 1 : near ? 2 : 3;
    return 0;
}

/* Every process of every card, one after the other; the same pid is listed once. */
static uint32_t processes(process_t *into, uint32_t room)
{
    uint32_t count = 0;
    unsigned pid, mib, seen[64];
    for (int at = 0; machine_device(at); at++)
        for (int n = 0; device_process(at, n, &pid, &mib); n++) {
            uint32_t known = 0;
            while (known < count && known < 64 && seen[known] != pid) known++;
            if (known < count) continue;
            if (count < 64) seen[count] = pid;
            if (into && count < room) into[count] = (process_t){pid, 0x8000, 0, 0, 0};
            count++;
        }
    return count;
}

int rsmi_compute_process_info_get(process_t *into, uint32_t *count)
{
    REFUSED(rsmi_compute_process_info_get);
    uint32_t room = into ? *count : 0, all = processes(into, room);
    *count = into && all > room ? room : all;
    return into && all > room ? INSUFFICIENT_SIZE : 0;
}

static int uses(uint32_t at, uint32_t pid, unsigned *mib)
{
    unsigned found;
    for (int n = 0; device_process((int)at, n, &found, mib); n++)
        if (found == pid) return 1;
    return 0;
}

int rsmi_compute_process_gpus_get(uint32_t pid, uint32_t *cards, uint32_t *count)
{
    REFUSED(rsmi_compute_process_gpus_get);
    uint32_t room = *count;
    unsigned mib;
    *count = 0;
    for (uint32_t at = 0; machine_device((int)at); at++)
        if (uses(at, pid, &mib) && *count < room) cards[(*count)++] = at;
    return 0;
}

int rsmi_compute_process_info_by_device_get(uint32_t pid, uint32_t at, process_t *into)
{
    CARD(rsmi_compute_process_info_by_device_get, at);
    unsigned mib;
    if (!uses(at, pid, &mib)) return NO_DATA;
    *into = (process_t){pid, 0x8000, (uint64_t)mib << 20, 0, 0};
    return 0;
}

int dmiGetDeviceInfo(int at, dmi_t *info)
{
    machine_read();
    REFUSED(dmiGetDeviceInfo);
    if (!machine_device(at)) return 10;
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "%s", device_text(at, "name"));
    info->units = (int)device_number(at, "units");
    info->memory = (size_t)device_number(at, "memory_mib") << 20;
    info->device = at;
    return 0;
}
