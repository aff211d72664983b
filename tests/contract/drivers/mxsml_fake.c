/* SPDX-License-Identifier: Apache-2.0
 *
 * A libmxsml.so of a machine of tests (library_machine.h). Structures as in the vendor's MxSml.h
 * 2.3.1, declared again here and not taken from the code under test. Keys of a device: uuid, name,
 * sgpu (0, 1, or absent where the GPU cannot be divided). sGPUs are kept in the process and
 * enforced: sixteen of a GPU, steps of 128 MiB, its memory, one class; those of mxsml_fake_vram are
 * the first GPU's.
 */
#include "library_machine.h"

#define GPUS 16
#define SGPUS 16
#define NO_SUCH 3
#define OUT_OF_RANGE 6
#define TOO_SMALL 10
#define CHECK_GPU(call) \
    REFUSED(call);      \
    if (gpu >= (unsigned)machine_devices()) return OUT_OF_RANGE;

typedef struct {
    unsigned device, type;
    char address[32];
    unsigned id, node;
    char uuid[96];
    unsigned brand, mode;
    char name[32];
} device_t;
typedef struct { int code; char words[64]; } reason_t;
typedef struct { long visible, visible_used, total, used, xtt, xtt_used; } vram_t;
typedef struct { unsigned voltage, current, power; } way_t;
typedef struct { char address[32]; unsigned gpu; unsigned long bytes; } use_t;
typedef struct { unsigned pid; char name[64]; unsigned count; use_t uses[64]; } process_t;
typedef struct {
    unsigned parent, number, vram, queue, compute, minor, priority;
    char uuid[96];
} sgpu_t;
typedef struct { long total, used, free; } memory_t;

int mxsml_fake_blind;         /* memory and alias are not reported */
unsigned mxsml_fake_class[GPUS];
unsigned mxsml_fake_vram[GPUS][SGPUS];
static unsigned compute_of[GPUS][SGPUS];
static char alias_of[GPUS][SGPUS][33];
static int opened;

unsigned mxSmlInit(void)
{
    machine_read();
    opened = 0;
    REFUSED(mxSmlInit);
    opened = 1;
    return machine_devices() ? 0 : 2;
}

unsigned mxSmlGetDeviceCount(void)
{
    if (machine_is_garbled("garbage")) return 0x7fffffff;
    return opened ? (unsigned)machine_devices() : 0;
}

unsigned mxSmlGetDeviceInfo(unsigned gpu, device_t *info)
{
    CHECK_GPU(mxSmlGetDeviceInfo);
    memset(info, 0, sizeof *info);
    info->device = gpu;
    snprintf(info->address, sizeof info->address, "%s", device_text((int)gpu, "bus_id"));
    snprintf(info->uuid, sizeof info->uuid, "%s", device_text((int)gpu, "uuid"));
    info->brand = 2;
    snprintf(info->name, sizeof info->name, "%s", device_text((int)gpu, "name"));
    return 0;
}

unsigned mxSmlGetDeviceState(unsigned gpu, int *state)
{
    CHECK_GPU(mxSmlGetDeviceState);
    if (device_number((int)gpu, "failing")) return 4;
    *state = !device_number((int)gpu, "lost");
    return 0;
}

unsigned mxSmlGetDeviceUnavailableReason(unsigned gpu, reason_t *reason)
{
    CHECK_GPU(mxSmlGetDeviceUnavailableReason);
    reason->code = 1;
    snprintf(reason->words, sizeof reason->words, "MetaX Sysfs File Unaccessible");
    return 0;
}

unsigned mxSmlGetDeviceVersion(unsigned gpu, unsigned unit, char *version, unsigned *size)
{
    CHECK_GPU(mxSmlGetDeviceVersion);
    if (unit != 1) return 9;
    if (*size <= strlen(machine_word("version"))) return TOO_SMALL;
    snprintf(version, *size, "%s", machine_word("version"));
    return 0;
}

unsigned mxSmlGetMemoryInfo(unsigned gpu, vram_t *memory)
{
    CHECK_GPU(mxSmlGetMemoryInfo);
    memset(memory, 0x11, sizeof *memory);
    memory->total = (long)device_number((int)gpu, "memory_mib") << 10;
    memory->used = (long)device_number((int)gpu, "used_mib") << 10;
    return 0;
}

unsigned mxSmlGetDeviceIpUsage(unsigned gpu, unsigned ip, int *usage)
{
    CHECK_GPU(mxSmlGetDeviceIpUsage);
    if (ip != 4) return NO_SUCH;
    *usage = (int)device_number((int)gpu, "core_pct");
    return 0;
}

unsigned mxSmlGetTemperatureInfo(unsigned gpu, unsigned sensor, int *temperature)
{
    CHECK_GPU(mxSmlGetTemperatureInfo);
    if (sensor) return NO_SUCH;
    *temperature = (int)device_number((int)gpu, "temperature_c") * 100;
    return 0;
}

unsigned mxSmlGetBoardPowerInfo(unsigned gpu, unsigned *size, way_t *ways)
{
    unsigned milliwatts = (unsigned)device_number((int)gpu, "power_w") * 1000;
    CHECK_GPU(mxSmlGetBoardPowerInfo);
    if (*size < 3) return TOO_SMALL;
    *size = 3;
    for (int i = 0; i < 3; i++) ways[i] = (way_t){12000, 1, i ? 1000 : milliwatts - 2000};
    return 0;
}

unsigned mxSmlGetNumberOfProcess(unsigned *count)
{
    unsigned pid, mib;
    REFUSED(mxSmlGetNumberOfProcess);
    *count = 0;
    for (int gpu = 0; gpu < machine_devices(); gpu++)
        for (int n = 0; device_process(gpu, n, &pid, &mib); n++) ++*count;
    return 0;
}

unsigned mxSmlGetSingleGpuProcess(unsigned gpu, unsigned *count, process_t *rows)
{
    unsigned room = *count, pid, mib;
    CHECK_GPU(mxSmlGetSingleGpuProcess);
    *count = 0;
    for (int n = 0; *count < room && device_process((int)gpu, n, &pid, &mib); n++) {
        process_t *row = &rows[(*count)++];
        memset(row, 0x11, sizeof *row);
        row->pid = pid;
        row->count = 1;
        row->uses[0].gpu = gpu;
        row->uses[0].bytes = (unsigned long)mib << 20;
    }
    return 0;
}

unsigned mxSmlGetDeviceTopology(unsigned gpu, unsigned other, unsigned *level)
{
    CHECK_GPU(mxSmlGetDeviceTopology);
    if (other >= (unsigned)machine_devices()) return OUT_OF_RANGE;
    *level = device_number((int)gpu, "numa") == device_number((int)other, "numa") ? 5 : 6;
    return 0;
}

/* ---- sGPUs -------------------------------------------------------------------------------------- */

static int is_divided(unsigned gpu) { return device_number((int)gpu, "sgpu") == 1; }

unsigned mxSmlGetSgpuToggle(unsigned gpu, unsigned *toggle)
{
    CHECK_GPU(mxSmlGetSgpuToggle);
    *toggle = (unsigned)is_divided(gpu);
    return *device_text((int)gpu, "sgpu") ? 0 : NO_SUCH;
}

unsigned mxSmlGetDeviceSchedClass(unsigned gpu, unsigned *class)
{
    CHECK_GPU(mxSmlGetDeviceSchedClass);
    *class = mxsml_fake_class[gpu];
    return 0;
}

unsigned mxSmlSetDeviceSchedClass(unsigned gpu, unsigned class)
{
    CHECK_GPU(mxSmlSetDeviceSchedClass);
    for (int i = 0; i < SGPUS; i++)
        if (mxsml_fake_vram[gpu][i] && mxsml_fake_class[gpu] != class) return 5;
    mxsml_fake_class[gpu] = class;
    return 0;
}

unsigned mxSmlCreateSgpu(unsigned gpu, unsigned vram, unsigned compute, unsigned *number)
{
    unsigned long sum = vram;
    CHECK_GPU(mxSmlCreateSgpu);
    if (!is_divided(gpu)) return NO_SUCH;
    if (!vram || vram % 128 || compute > 100) return 5;
    for (int i = 0; i < SGPUS; i++) sum += mxsml_fake_vram[gpu][i];
    if (sum > (unsigned long)device_number((int)gpu, "memory_mib")) return 5;
    for (unsigned i = 0; i < SGPUS; i++) {
        if (mxsml_fake_vram[gpu][i]) continue;
        mxsml_fake_vram[gpu][i] = vram;
        compute_of[gpu][i] = compute;
        alias_of[gpu][i][0] = 0;
        *number = i;
        return 0;
    }
    return 5;
}

unsigned mxSmlRemoveSgpu(unsigned gpu, unsigned number)
{
    CHECK_GPU(mxSmlRemoveSgpu);
    if (number >= SGPUS || !mxsml_fake_vram[gpu][number]) return NO_SUCH;
    mxsml_fake_vram[gpu][number] = 0;
    return 0;
}

unsigned mxSmlSetSgpuAlias(unsigned gpu, unsigned number, char *alias)
{
    CHECK_GPU(mxSmlSetSgpuAlias);
    if (number >= SGPUS || !mxsml_fake_vram[gpu][number]) return NO_SUCH;
    snprintf(alias_of[gpu][number], sizeof alias_of[gpu][number], "%s", alias);
    return 0;
}

unsigned mxSmlGetSgpuInfo(unsigned gpu, unsigned number, sgpu_t *info)
{
    if (gpu >= (unsigned)machine_devices()) return OUT_OF_RANGE;
    if (number >= SGPUS || !mxsml_fake_vram[gpu][number]) return NO_SUCH;
    REFUSED(mxSmlGetSgpuInfo);
    memset(info, 0x55, sizeof *info);
    info->parent = gpu;
    info->number = number;
    info->vram = mxsml_fake_vram[gpu][number];
    info->compute = compute_of[gpu][number] ? compute_of[gpu][number] : 20 + number;
    info->minor = 7;
    return 0;
}

unsigned mxSmlGetSgpuAlias(unsigned gpu, unsigned number, char *alias, unsigned *size)
{
    if (mxsml_fake_blind) return NO_SUCH;
    if (*size < 32) return TOO_SMALL;
    /* The longest possible alias, without a terminator, where none is set. */
    if (alias_of[gpu][number][0]) memcpy(alias, alias_of[gpu][number], 32);
    else memset(alias, 'a' + (int)number, 32);
    return 0;
}

unsigned mxSmlGetSgpuMemory(unsigned gpu, unsigned number, memory_t *memory)
{
    if (mxsml_fake_blind) return NO_SUCH;
    memory->total = (long)mxsml_fake_vram[gpu][number] << 20;
    memory->used = (long)number << 20;
    memory->free = memory->total - memory->used;
    return 0;
}
