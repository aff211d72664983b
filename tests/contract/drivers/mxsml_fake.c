/* SPDX-License-Identifier: Apache-2.0
 *
 * A libmxsml.so of one process: three GPUs, of which the second is not in sGPU mode and the third
 * cannot be. Structures as in the vendor's MxSml.h 2.3.1. Tests set what is there by the variables.
 */
#include <stdio.h>
#include <string.h>

#define GPUS 3
#define SGPUS 16

typedef struct {
    unsigned device, type;
    char address[32];
    unsigned gpu, node;
    char uuid[96];
    unsigned brand, mode;
    char name[32];
} device_t;
typedef struct {
    unsigned parent, number, vram, queue, compute, minor, priority;
    char uuid[96];
} sgpu_t;
typedef struct { long total, used, free; } memory_t;

int mxsml_fake_init;          /* what mxSmlInit answers */
int mxsml_fake_info;          /* what mxSmlGetSgpuInfo answers for sGPUs that are there */
int mxsml_fake_blind;         /* memory and alias are not told */
unsigned mxsml_fake_class = 1;
unsigned mxsml_fake_vram[SGPUS];
static int opened;

unsigned mxSmlInit(void)
{
    opened = !mxsml_fake_init;
    return (unsigned)mxsml_fake_init;
}

unsigned mxSmlGetDeviceCount(void) { return opened ? GPUS : 0; }

unsigned mxSmlGetDeviceInfo(unsigned device, device_t *info)
{
    if (device >= GPUS) return 6;
    memset(info, 0, sizeof *info);
    info->device = device;
    snprintf(info->address, sizeof info->address, "0000:%02x:00.0", 0x1f + device);
    snprintf(info->uuid, sizeof info->uuid, "GPU-0000000%u-0000-0000-0000-000000000000", device);
    info->brand = 2;
    snprintf(info->name, sizeof info->name, "MXC500");
    return 0;
}

unsigned mxSmlGetSgpuToggle(unsigned device, unsigned *toggle)
{
    if (device >= GPUS) return 6;
    *toggle = device == 0;
    return device == 2 ? 3 : 0;
}

unsigned mxSmlGetDeviceSchedClass(unsigned device, unsigned *class)
{
    (void)device;
    *class = mxsml_fake_class;
    return 0;
}

unsigned mxSmlGetSgpuInfo(unsigned device, unsigned number, sgpu_t *info)
{
    if (device >= GPUS) return 6;
    if (number >= SGPUS || !mxsml_fake_vram[number]) return 3;
    if (mxsml_fake_info) return (unsigned)mxsml_fake_info;
    memset(info, 0x55, sizeof *info);
    info->parent = device;
    info->number = number;
    info->vram = mxsml_fake_vram[number];
    info->compute = 20 + number;
    info->minor = 7;
    return 0;
}

unsigned mxSmlGetSgpuAlias(unsigned device, unsigned number, char *alias, unsigned *size)
{
    (void)device;
    if (mxsml_fake_blind) return 3;
    if (*size < 32) return 10;
    /* As long as an alias may be, without an end. */
    memset(alias, 'a' + (int)number, 32);
    return 0;
}

unsigned mxSmlGetSgpuMemory(unsigned device, unsigned number, memory_t *memory)
{
    (void)device;
    if (mxsml_fake_blind) return 3;
    memory->total = (long)mxsml_fake_vram[number] << 20;
    memory->used = (long)number << 20;
    memory->free = memory->total - memory->used;
    return 0;
}
