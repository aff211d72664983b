/* SPDX-License-Identifier: Apache-2.0
 *
 * A libxpuml.so of a machine of tests. Structures and numbers are those of the vendor's xpuml.h (API
 * version 1, as its Go binding ships it), declared again here and not taken from the code under
 * test. Keys of a device besides: name, serial, state. Into how many functions each card is cut
 * stands in the file `cuts` beside the machine's, written here; what the kernel shows of them is
 * made below the folder `sysfs` of the machine. As the real library does, this one lists the process
 * that asks among those of each device.
 */
#include "library_machine.h"

#include <sys/stat.h>

#define OK 0
#define UNINITIALIZED 1
#define BAD_ARGUMENT 2
#define NOT_SUPPORTED 3
#define TOO_SMALL 7
#define IN_USE 19
#define FULL 23
#define UNKNOWN 999
#define MANY 96
#define HANDLES 32
#define MOST_PARTS 4

typedef struct {
    unsigned domain, bus, device, function, ids, subsystem;
    char bus_id[32];
    unsigned long long reserved[9];
} pci_t;
typedef struct { unsigned xpu, memory; unsigned long long reserved[15]; } load_t;
typedef struct {
    unsigned long long page, total, free, used, l3_page, l3_total, l3_free, l3_used, reserved[8];
} memory_t;
typedef struct {
    unsigned pid;
    unsigned long long used, l3;
    unsigned root_pid, reserved_word;
    unsigned long long reserved[12];
} process_t;
_Static_assert(sizeof(pci_t) == 128 && sizeof(load_t) == 128 && sizeof(memory_t) == 128 &&
               sizeof(process_t) == 128, "sixteen words, as the header says");


struct xpu {
    int at, turn, parts; /* of the machine's file; number of a function, -1 for a card */
};

static struct xpu xpus[MANY];
static int xpus_count, cards_count, opened;

static void beside(char *path, size_t size, const char *name)
{
    Dl_info info;
    dladdr((void *)beside, &info);
    snprintf(path, size, "%s", info.dli_fname);
    char *end = strrchr(path, '/') + 1;
    snprintf(end, size - (size_t)(end - path), "%s", name);
}

/* Functions follow the cards, and are XPUs of their own. */
static void read_cuts(void)
{
    char path[4096];
    int index, parts;
    xpus_count = cards_count = machine_devices();
    for (int at = 0; at < cards_count; at++) xpus[at] = (struct xpu){.at = at, .turn = -1};
    beside(path, sizeof path, "cuts");
    FILE *file = fopen(path, "r");
    if (!file) return;
    while (fscanf(file, "%d %d", &index, &parts) == 2)
        for (int at = 0; at < cards_count; at++)
            if (device_number(at, "index") == index) {
                xpus[at].parts = parts;
                for (int turn = 0; turn < parts && xpus_count < MANY; turn++)
                    xpus[xpus_count++] = (struct xpu){.at = at, .turn = turn, .parts = parts};
            }
    fclose(file);
}

/* Write what the kernel shows of a card's functions. */
static void show(int at, int parts)
{
    char home[2048], function[2048], path[2200];
    const char *bus_id = device_text(at, "bus_id"), *sysfs = machine_word("sysfs");
    snprintf(home, sizeof home, "%.1500s/bus/pci/devices/%.32s", sysfs, bus_id);
    for (int turn = 0; turn < MOST_PARTS; turn++) {
        snprintf(function, sizeof function, "%.1500s/bus/pci/devices/%.8s01.%d", sysfs, bus_id, turn);
        snprintf(path, sizeof path, "%s/physfn", function);
        unlink(path);
        rmdir(function);
        if (turn < parts && (mkdir(function, 0755) || symlink(home, path))) abort();
        snprintf(path, sizeof path, "%s/virtfn%d", home, turn);
        unlink(path);
        if (turn < parts && symlink(function, path)) abort();
    }
    snprintf(path, sizeof path, "%s/sriov_numvfs", home);
    FILE *file = fopen(path, "w");
    fprintf(file, "%d\n", parts);
    fclose(file);
}

static void cut(int at, int parts)
{
    char path[4096], fresh[4096];
    beside(path, sizeof path, "cuts");
    beside(fresh, sizeof fresh, "cuts.new");
    FILE *file = fopen(fresh, "w");
    for (int card = 0; card < cards_count; card++)
        fprintf(file, "%lld %d\n", device_number(card, "index"),
                card == at ? parts : xpus[card].parts);
    fclose(file);
    rename(fresh, path);
    show(at, parts);
}

static int processes(const struct xpu *one)
{
    unsigned pid, mib;
    int count = 0;
    while (one->turn < 0 && device_process(one->at, count, &pid, &mib)) count++;
    return count;
}

#define CHECK                                               \
    do {                                                    \
        int code_;                                          \
        if (!opened) return UNINITIALIZED;                  \
        if (machine_answer(__func__, &code_)) return code_; \
    } while (0)
#define FIND(device)          \
    CHECK;                    \
    struct xpu *one = device; \
    if (!one) return BAD_ARGUMENT

int xpumlInit(void)
{
    int code;
    machine_read();
    read_cuts();
    opened = 1;
    if (!machine_answer(__func__, &code)) return OK;
    opened = 0;
    return code;
}

int xpumlSystemGetDriverVersion(char *version, unsigned length)
{
    CHECK;
    snprintf(version, length, "%s commit: 34377fd7", machine_word("version"));
    return OK;
}

int xpumlDeviceGetCount(unsigned *count)
{
    CHECK;
    *count = machine_is_garbled("garbage") ? 0x7FFFFFFFu : (unsigned)xpus_count;
    return OK;
}

int xpumlDeviceGetHandleByIndex(unsigned number, struct xpu **device)
{
    CHECK;
    if (number >= (unsigned)xpus_count) return BAD_ARGUMENT;
    *device = &xpus[number];
    return OK;
}

int xpumlDeviceGetName(struct xpu *device, char *name, unsigned length)
{
    FIND(device);
    snprintf(name, length, "%s", device_text(one->at, "name"));
    return OK;
}

int xpumlDeviceGetSerial(struct xpu *device, char *serial, unsigned length)
{
    FIND(device);
    snprintf(serial, length, "%s", device_text(one->at, "serial"));
    return OK;
}

int xpumlDeviceGetMinorNumber(struct xpu *device, unsigned *minor)
{
    FIND(device);
    *minor = (unsigned)device_number(one->at, "index");
    if (one->turn >= 0) *minor = MOST_PARTS * (*minor + 1) + (unsigned)(cards_count + one->turn);
    return OK;
}

int xpumlDeviceGetPciInfo(struct xpu *device, pci_t *pci)
{
    FIND(device);
    memset(pci, 0, sizeof *pci);
    pci->domain = (unsigned)device_number(one->at, "domain");
    pci->bus = (unsigned)device_number(one->at, "bus");
    pci->device = one->turn < 0 ? (unsigned)device_number(one->at, "device") : 1;
    pci->function = (unsigned)(one->turn < 0 ? device_number(one->at, "function") : one->turn);
    if (machine_is_garbled("truncated")) pci->bus = 0x10003;
    if (machine_is_garbled("twice")) pci->bus = 3;
    return OK;
}

int xpumlDeviceGetMemoryInfo(struct xpu *device, memory_t *memory)
{
    FIND(device);
    if (device_number(one->at, "failing")) return UNKNOWN;
    memset(memory, 0, sizeof *memory);
    memory->page = 131072;
    memory->total = (unsigned long long)device_number(one->at, "memory_mib") << 20;
    memory->total /= one->parts ? (unsigned)one->parts : 1;
    if (one->turn < 0) memory->used = (unsigned long long)device_number(one->at, "used_mib") << 20;
    memory->free = memory->total - memory->used;
    memory->l3_total = 96ull << 20;
    return OK;
}

int xpumlDeviceGetUtilizationRates(struct xpu *device, load_t *load)
{
    FIND(device);
    memset(load, 0, sizeof *load);
    load->xpu = one->turn < 0 ? (unsigned)device_number(one->at, "core_pct") : 0;
    load->memory = load->xpu / 2;
    return OK;
}

int xpumlDeviceGetTemperature(struct xpu *device, unsigned sensor, unsigned *temperature)
{
    FIND(device);
    *temperature = (unsigned)device_number(one->at, "temperature_c");
    return sensor ? NOT_SUPPORTED : OK;
}

int xpumlDeviceGetPowerUsage(struct xpu *device, unsigned *milliwatts)
{
    FIND(device);
    *milliwatts = 1000 * (unsigned)device_number(one->at, "power_w");
    return OK;
}

int xpumlDeviceGetState(struct xpu *device, unsigned *state)
{
    FIND(device);
    *state = (unsigned)device_number(one->at, "state");
    return OK;
}

int xpumlDeviceGetComputeRunningProcesses(struct xpu *device, unsigned *count, process_t *found)
{
    unsigned room = *count, pid, mib;
    FIND(device);
    *count = (unsigned)processes(one) + 1;
    if (machine_is_garbled("processes")) *count = 0x7FFFFFFFu;
    if (*count > room) return TOO_SMALL;
    found[0] = (process_t){.pid = (unsigned)getpid()};
    for (int n = 0; n + 1 < (int)*count; n++) {
        device_process(one->at, n, &pid, &mib);
        /* The number in the container's namespace, and the host's. */
        found[n + 1] = (process_t){.pid = 7, .root_pid = pid, .used = (unsigned long long)mib << 20};
    }
    return OK;
}

int xpumlDeviceGetHostVxpuMode(struct xpu *device, unsigned *mode)
{
    FIND(device);
    *mode = one->parts ? 2 : 1;
    return one->turn < 0 ? OK : NOT_SUPPORTED;
}

int xpumlDeviceSetSriovVfNum(struct xpu *device, int parts)
{
    FIND(device);
    if (one->turn >= 0) return NOT_SUPPORTED;
    if (parts != 0 && parts != 2 && parts != MOST_PARTS) return BAD_ARGUMENT;
    if (!strcmp(machine_word("trip"), "fail")) return UNKNOWN;
    if (processes(one) || device_number(one->at, "using") || (one->parts && parts)) return IN_USE;
    if (xpus_count - one->parts + parts > HANDLES) return FULL;
    cut(one->at, parts);
    return strcmp(machine_word("trip"), "late") ? OK : UNKNOWN;
}
