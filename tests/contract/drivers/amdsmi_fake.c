/* SPDX-License-Identifier: Apache-2.0
 *
 * A libamd_smi.so of the version that the machine's word `release` names: 24 (ROCm 6.2 and 6.3), 25
 * (6.4) or 26 (7.0), with each version's own structures, declared again here and not taken from the
 * code under test. Lost: uncorrectable errors. Failing: memory cannot be asked. The second socket
 * begins with the third GPU; each socket also has a processor that is no GPU.
 */
#include "library_machine.h"

#define INVAL 1
#define NOT_SUPPORTED 2
#define NO_DATA 40
#define OUT_OF_RESOURCES 15
#define GPU 1
#define CPU 2
#define XGMI 2
#define PCIE 1
#define PER_SOCKET 2
#define NONE 0xFFFFFFFFu

typedef struct { uint32_t year, major, minor, release; const char *build; } version_24_t;
typedef struct { uint32_t major, minor, release; const char *build; } version_26_t;
typedef struct {
    char market_name[256];
    uint32_t vendor;
    char vendor_name[64];
    uint32_t subvendor;
    uint64_t device;
    uint32_t revision;
    char serial[32];
    uint32_t oam, units;
    uint64_t graphics;
    uint32_t reserved[15];
} asic_24_t;
typedef struct {
    char market_name[256];
    uint32_t vendor;
    char vendor_name[256];
    uint32_t subvendor;
    uint64_t device;
    uint32_t revision;
    char serial[256];
    uint32_t oam, units;
    uint64_t graphics;
    uint32_t subsystem, reserved[21];
} asic_25_t;
struct engines { uint64_t gfx, enc; uint32_t reserved[12]; };
struct memory { uint64_t gtt, cpu, vram; uint32_t reserved[10]; };
typedef struct {
    char name[32];
    uint32_t pid;
    uint64_t mem;
    struct engines engines;
    struct memory memory;
    char container[32];
    uint32_t reserved[4];
} process_24_t;
typedef struct {
    char name[256];
    uint32_t pid;
    uint64_t mem;
    struct engines engines;
    struct memory memory;
    char container[256];
    uint32_t occupancy, evicted, reserved[10];
} process_25_t;
typedef struct { uint32_t current, average, voltages[3], limit, reserved[11]; } power_24_t;
typedef struct { uint64_t socket; uint32_t current, average; uint64_t voltages[3]; } power_25_t;
typedef struct { uint32_t gfx, umc, mm, reserved[13]; } use_t;
typedef struct { uint64_t kfd; uint32_t node, partition, reserved[12]; } kfd_t;
typedef struct { uint64_t correctable, uncorrectable, deferred, reserved[5]; } counts_t;

static int opened;

static int release(void) { return atoi(machine_word("release")); }

/* Handles are neither indexes nor small. */
static void *handle(int at) { return (void *)(uintptr_t)(UINT64_C(0x7f0000001000) + at * 64); }

static int number(void *of) { return (int)(((uintptr_t)of - UINT64_C(0x7f0000001000)) / 64); }

#define DEVICE(call, of)                          \
    do {                                          \
        REFUSED(call);                            \
        if (!opened || !machine_device(number(of))) return INVAL; \
    } while (0)

int amdsmi_get_lib_version(void *into)
{
    machine_read();
    REFUSED(amdsmi_get_lib_version);
    if (release() >= 26)
        *(version_26_t *)into = (version_26_t){(uint32_t)release(), 1, 0, "fake"};
    else
        *(version_24_t *)into = (version_24_t){(uint32_t)release(), 7, 1, 0, "fake"};
    return 0;
}

int amdsmi_init(uint64_t flags)
{
    machine_read();
    opened = 0;
    REFUSED(amdsmi_init);
    if (flags != 2) return INVAL;
    opened = 1;
    return 0;
}

int amdsmi_get_socket_handles(uint32_t *count, void **into)
{
    REFUSED(amdsmi_get_socket_handles);
    uint32_t sockets = (uint32_t)(machine_devices() + PER_SOCKET - 1) / PER_SOCKET;
    if (machine_is_garbled("garbage")) sockets = 70000;
    for (uint32_t i = 0; into && i < sockets && i < *count; i++) into[i] = handle(1000 + (int)i);
    *count = sockets;
    return 0;
}

int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **into)
{
    REFUSED(amdsmi_get_processor_handles);
    int first = (number(socket) - 1000) * PER_SOCKET, gpus = machine_devices() - first;
    if (gpus > PER_SOCKET) gpus = PER_SOCKET;
    for (int i = 0; into && i < gpus && i < (int)*count; i++) into[i] = handle(first + i);
    if (into && gpus < (int)*count) into[gpus] = handle(2000 + number(socket));
    *count = (uint32_t)gpus + 1;
    return 0;
}

int amdsmi_get_processor_type(void *of, int *type)
{
    *type = number(of) >= 1000 ? CPU : GPU;
    return 0;
}

int amdsmi_get_gpu_device_uuid(void *of, unsigned *size, char *into)
{
    DEVICE(amdsmi_get_gpu_device_uuid, of);
    if (*size < 38) return INVAL;
    *size = (unsigned)snprintf(into, 38, "%s", device_text(number(of), "uuid"));
    return 0;
}

int amdsmi_get_gpu_device_bdf(void *of, uint64_t *into)
{
    DEVICE(amdsmi_get_gpu_device_bdf, of);
    *into = (uint64_t)device_number(number(of), "domain") << 16 |
            (uint64_t)device_number(number(of), "bus") << 8 |
            (uint64_t)device_number(number(of), "device") << 3 |
            (uint64_t)device_number(number(of), "function");
    return 0;
}

int amdsmi_get_gpu_memory_total(void *of, int type, uint64_t *bytes)
{
    DEVICE(amdsmi_get_gpu_memory_total, of);
    if (type) return INVAL;
    *bytes = (uint64_t)device_number(number(of), "memory_mib") << 20;
    return 0;
}

int amdsmi_get_gpu_memory_usage(void *of, int type, uint64_t *bytes)
{
    DEVICE(amdsmi_get_gpu_memory_usage, of);
    if (type) return INVAL;
    if (device_number(number(of), "failing")) return NO_DATA;
    *bytes = (uint64_t)device_number(number(of), "used_mib") << 20;
    return 0;
}

int amdsmi_get_gpu_activity(void *of, use_t *into)
{
    DEVICE(amdsmi_get_gpu_activity, of);
    memset(into, 0, sizeof *into);
    into->gfx = (uint32_t)device_number(number(of), "core_pct");
    into->umc = 3;
    into->mm = NONE;
    return 0;
}

int amdsmi_get_gpu_kfd_info(void *of, kfd_t *into)
{
    DEVICE(amdsmi_get_gpu_kfd_info, of);
    *into = (kfd_t){.kfd = 1000, .node = 2};
    into->partition = (uint32_t)device_number(number(of), "partition");
    return 0;
}

int amdsmi_get_temp_metric(void *of, int type, int metric, int64_t *into)
{
    DEVICE(amdsmi_get_temp_metric, of);
    if (type != 1 || metric) return NOT_SUPPORTED;
    *into = device_number(number(of), "temperature_c");
    return 0;
}

int amdsmi_get_power_info(void *of, void *into)
{
    DEVICE(amdsmi_get_power_info, of);
    uint32_t power = (uint32_t)device_number(number(of), "power_w");
    if (release() >= 25)
        *(power_25_t *)into = (power_25_t){power, NONE, power, {0}};
    else
        *(power_24_t *)into = (power_24_t){.current = 0xFFFF, .average = power};
    return 0;
}

int amdsmi_get_gpu_total_ecc_count(void *of, counts_t *into)
{
    DEVICE(amdsmi_get_gpu_total_ecc_count, of);
    *into = (counts_t){.correctable = 7};
    into->uncorrectable = device_number(number(of), "lost") ? 4 : 0;
    return 0;
}

int amdsmi_get_gpu_process_list(void *of, uint32_t *count, void *into)
{
    DEVICE(amdsmi_get_gpu_process_list, of);
    unsigned pid, mib;
    uint32_t room = *count, n = 0;
    for (; device_process(number(of), (int)n, &pid, &mib); n++) {
        if (!into || n >= room) continue;
        process_24_t *old = (process_24_t *)into + n;
        process_25_t *new = (process_25_t *)into + n;
        struct memory memory = {.gtt = 1, .cpu = 2, .vram = (uint64_t)mib << 20};
        if (release() >= 25)
            *new = (process_25_t){.name = "trainer", .pid = pid, .memory = memory};
        else
            *old = (process_24_t){.name = "trainer", .pid = pid, .memory = memory};
    }
    *count = n;
    return into && n > room ? OUT_OF_RESOURCES : 0;
}

int amdsmi_get_gpu_asic_info(void *of, void *into)
{
    DEVICE(amdsmi_get_gpu_asic_info, of);
    asic_24_t *old = into;
    asic_25_t *new = into;
    const char *name = device_text(number(of), "name"), *serial = device_text(number(of), "serial");
    uint32_t units = (uint32_t)device_number(number(of), "units");
    if (release() >= 25) {
        *new = (asic_25_t){.vendor = 0x1002, .oam = NONE, .units = units, .graphics = 942};
        snprintf(new->market_name, sizeof new->market_name, "%s", name);
        snprintf(new->serial, sizeof new->serial, "%s", serial);
    } else {
        *old = (asic_24_t){.vendor = 0x1002, .oam = NONE, .units = units, .graphics = 942};
        snprintf(old->market_name, sizeof old->market_name, "%s", name);
        snprintf(old->serial, sizeof old->serial, "%s", serial);
    }
    return 0;
}

int amdsmi_get_gpu_compute_partition(void *of, char *into, uint32_t size)
{
    DEVICE(amdsmi_get_gpu_compute_partition, of);
    snprintf(into, size, "%s", device_text(number(of), "mode"));
    return 0;
}

int amdsmi_get_gpu_driver_info(void *of, char *into)
{
    DEVICE(amdsmi_get_gpu_driver_info, of);
    strcpy(into, machine_word("version"));
    return 0;
}

int amdsmi_topo_get_numa_node_number(void *of, uint32_t *into)
{
    DEVICE(amdsmi_topo_get_numa_node_number, of);
    *into = (uint32_t)device_number(number(of), "numa");
    return 0;
}

int amdsmi_topo_get_link_type(void *a, void *b, uint64_t *hops, int *type)
{
    DEVICE(amdsmi_topo_get_link_type, a);
    DEVICE(amdsmi_topo_get_link_type, b);
    int near = device_number(number(a), "numa") == device_number(number(b), "numa");
    *type = near ? XGMI : PCIE;
    *hops = near ? 1 : 3;
    return 0;
}
