/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks: what NVML (and so nvidia-smi) shows inside the container.
 *
 * Memory: the container's limit and use, the same figures as cuMemGetInfo. Lists of processes: the container's own, with the
 * pids that are valid here and what the region says they use; NVML's own lists carry pids of the host. NVML is asked
 * first in every case, so errors and missing support stay what they are. Devices without limits are left alone.
 * Locks taken here: none.
 */
#include <stddef.h>
#include <string.h>

#include "device.h"
#include "hook.h"
#include "memory.h"

#define PROCESSES 2048u
#define NOT_MIG UINT32_MAX

static bool is_limited(int device)
{
    return device >= 0 && account_limit(device) != UINT64_MAX;
}

HOOK_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *memory)
{
    nvmlReturn_t result = DRIVER(nvmlDeviceGetMemoryInfo)(handle, memory);
    int device = result == NVML_SUCCESS && memory ? device_limits_nvml(handle) : -1;
    if (!is_limited(device)) return result;
    struct memory_view view = memory_view(device, memory->total, memory->free);
    *memory = (nvmlMemory_t){.total = view.total, .free = view.free, .used = view.total - view.free};
    return result;
}

/* `reserved`, which the first form counts as used, is what the agent may grant and has not granted. */
HOOK_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, nvmlMemory_v2_t *memory)
{
    nvmlReturn_t result = DRIVER(nvmlDeviceGetMemoryInfo_v2)(handle, memory);
    int device = result == NVML_SUCCESS && memory ? device_limits_nvml(handle) : -1;
    if (!is_limited(device)) return result;
    struct memory_view view = memory_view(device, memory->total, memory->free);
    memory->total = view.total;
    memory->reserved = view.total - view.free - view.used;
    memory->free = view.free;
    memory->used = view.used;
    return result;
}

/* --- processes --- */

struct listing {
    struct account_process processes[PROCESSES];
    uint32_t count;
};

static void list(int device, struct listing *listing)
{
    uint32_t count = account_list(device, listing->processes, PROCESSES);
    listing->count = count < PROCESSES ? count : PROCESSES;
}

static bool is_own(const struct listing *listing, unsigned int pid)
{
    for (uint32_t i = 0; i < listing->count; i++)
        if (listing->processes[i].pid == pid) return true;
    return false;
}

/* The first two forms differ in their entries; `wide` has the fields of MIG instances. */
static void put_process(void *processes, uint32_t at, bool wide, const struct account_process *process)
{
    if (wide)
        ((nvmlProcessInfo_v2_t *)processes)[at] = (nvmlProcessInfo_v2_t){.pid = process->pid,
                                                                         .usedGpuMemory = process->used_bytes,
                                                                         .gpuInstanceId = NOT_MIG,
                                                                         .computeInstanceId = NOT_MIG};
    else
        ((nvmlProcessInfo_v1_t *)processes)[at] =
            (nvmlProcessInfo_v1_t){.pid = process->pid, .usedGpuMemory = process->used_bytes};
}

static nvmlReturn_t put_all(const struct listing *listing, unsigned int *count, void *processes, bool wide)
{
    unsigned int room = *count;
    *count = listing->count;
    if (listing->count && (room < listing->count || !processes)) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (uint32_t i = 0; i < listing->count; i++)
        put_process(processes, i, wide, &listing->processes[i]);
    return NVML_SUCCESS;
}

enum which { COMPUTE, MPS, GRAPHICS };

/* `answer` and `native_count`: NVML's own to a question for the number. An empty list of MPS or graphics stays empty;
   who draws is not known to the region, so graphics lists only who also computes. */
static nvmlReturn_t own_list(nvmlDevice_t handle, nvmlReturn_t answer, unsigned int native_count, unsigned int *count,
                             void *processes, bool wide, enum which which)
{
    struct listing listing;
    if (answer != NVML_SUCCESS && answer != NVML_ERROR_INSUFFICIENT_SIZE) return answer;
    list(device_limits_nvml(handle), &listing);
    if (which != COMPUTE && native_count == 0) listing.count = 0;
    return put_all(&listing, count, processes, wide);
}

#define PROCESS_LIST(name, type, wide, which)                                                                          \
    HOOK_EXPORT nvmlReturn_t name(nvmlDevice_t handle, unsigned int *count, type *processes)                           \
    {                                                                                                                  \
        hook_enter();                                                                                                  \
        if (!count || device_limits_nvml(handle) < 0) return DRIVER(name)(handle, count, processes);                   \
        unsigned int native_count = 0;                                                                                 \
        nvmlReturn_t answer = DRIVER(name)(handle, &native_count, NULL);                                               \
        return own_list(handle, answer, native_count, count, processes, wide, which);                                  \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, false, COMPUTE)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, true, COMPUTE)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, true, COMPUTE)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, false, MPS)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, true, MPS)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t, true, MPS)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, false, GRAPHICS)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t, true, GRAPHICS)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, true, GRAPHICS)

HOOK_EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t handle, nvmlProcessDetailList_t *processes)
{
    struct listing listing;
    hook_enter();
    if (!processes || device_limits_nvml(handle) < 0)
        return DRIVER(nvmlDeviceGetRunningProcessDetailList)(handle, processes);
    nvmlProcessDetailList_t question = *processes;
    question.numProcArrayEntries = 0;
    question.procArray = NULL;
    nvmlReturn_t answer = DRIVER(nvmlDeviceGetRunningProcessDetailList)(handle, &question);
    if (answer != NVML_SUCCESS && answer != NVML_ERROR_INSUFFICIENT_SIZE) return answer;
    list(device_limits_nvml(handle), &listing);
    unsigned int room = processes->numProcArrayEntries;
    processes->numProcArrayEntries = listing.count;
    if (listing.count && (room < listing.count || !processes->procArray)) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (uint32_t i = 0; i < listing.count; i++)
        processes->procArray[i] = (nvmlProcessDetail_v1_t){.pid = listing.processes[i].pid,
                                                           .usedGpuMemory = listing.processes[i].used_bytes,
                                                           .gpuInstanceId = NOT_MIG,
                                                           .computeInstanceId = NOT_MIG};
    return NVML_SUCCESS;
}

/* --- utilisation: NVML's samples of the container's own pids; others are dropped --- */

HOOK_EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t handle, nvmlProcessUtilizationSample_t *samples,
                                                         unsigned int *count, unsigned long long since)
{
    struct listing listing;
    hook_enter();
    nvmlReturn_t result = DRIVER(nvmlDeviceGetProcessUtilization)(handle, samples, count, since);
    int device = device_limits_nvml(handle);
    if (result != NVML_SUCCESS || !count || !samples || device < 0) return result;
    list(device, &listing);
    unsigned int kept = 0;
    for (unsigned int i = 0; i < *count; i++)
        if (is_own(&listing, samples[i].pid)) samples[kept++] = samples[i];
    *count = kept;
    return kept ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

HOOK_EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t handle,
                                                               nvmlProcessesUtilizationInfo_t *list_out)
{
    struct listing listing;
    hook_enter();
    nvmlReturn_t result = DRIVER(nvmlDeviceGetProcessesUtilizationInfo)(handle, list_out);
    int device = device_limits_nvml(handle);
    if (result != NVML_SUCCESS || !list_out || !list_out->procUtilArray || device < 0) return result;
    list(device, &listing);
    unsigned int kept = 0;
    for (unsigned int i = 0; i < list_out->processSamplesCount; i++)
        if (is_own(&listing, list_out->procUtilArray[i].pid))
            list_out->procUtilArray[kept++] = list_out->procUtilArray[i];
    list_out->processSamplesCount = kept;
    return kept ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}
