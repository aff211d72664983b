/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queries NVML through dlopen and dlsym, as declared in nvml_view.h.
 */
#include "nvml_view.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NO_LIBRARY = 12, INVALID_ARGUMENT = 2, V2_VERSION = 0x02000028 };

struct memory_v2 {
    unsigned int version;
    unsigned long long total;
    unsigned long long reserved;
    unsigned long long free;
    unsigned long long used;
};

static struct {
    int (*init)(void);
    int (*by_uuid)(const char *uuid, void **handle);
    int (*by_index)(unsigned int index, void **handle);
    int (*memory)(void *handle, unsigned long long total_free_used[3]);
    int (*memory_v2)(void *handle, struct memory_v2 *out);
    int (*processes)(void *handle, unsigned int *count, struct view_process *list);
} nvml;

static bool open_nvml(void)
{
    static const char *const names[] = {"nvmlInit_v2",
                                        "nvmlDeviceGetHandleByUUID",
                                        "nvmlDeviceGetHandleByIndex_v2",
                                        "nvmlDeviceGetMemoryInfo",
                                        "nvmlDeviceGetMemoryInfo_v2",
                                        "nvmlDeviceGetComputeRunningProcesses_v3"};
    static bool is_open;
    void *library = is_open ? NULL : dlopen("libnvidia-ml.so.1", RTLD_NOW);
    for (size_t i = 0; !is_open && i < sizeof names / sizeof names[0]; i++) {
        void *found = library == NULL ? NULL : dlsym(library, names[i]);
        if (found == NULL) {
            return false;
        }
        memcpy((char *)&nvml + i * sizeof found, &found, sizeof found);
    }
    is_open = is_open || nvml.init() == 0;
    return is_open;
}

static int find_handle(int device, void **handle)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char copy[4096];
    char *rest = NULL;
    if (!open_nvml()) {
        return NO_LIBRARY;
    }
    if (visible == NULL || (strncmp(visible, "GPU-", 4) != 0 && strncmp(visible, "MIG-", 4) != 0)) {
        return nvml.by_index((unsigned int)device, handle);
    }
    (void)snprintf(copy, sizeof copy, "%s", visible);
    char *word = strtok_r(copy, ",", &rest);
    for (int i = 0; i < device && word != NULL; i++) {
        word = strtok_r(NULL, ",", &rest);
    }
    return word == NULL ? INVALID_ARGUMENT : nvml.by_uuid(word, handle);
}

int view_memory(int device, struct view_memory *out)
{
    unsigned long long v1[3] = {0};
    struct memory_v2 v2 = {.version = V2_VERSION};
    void *handle = NULL;
    int code = find_handle(device, &handle);
    code = code != 0 ? code : nvml.memory(handle, v1);
    code = code != 0 ? code : nvml.memory_v2(handle, &v2);
    if (code == 0) {
        *out = (struct view_memory){
            .total = v1[0], .free = v1[1], .used = v1[2], .total_2 = v2.total, .used_2 = v2.used, .free_2 = v2.free};
    }
    return code;
}

int view_processes(int device, struct view_process *list, unsigned int *count)
{
    void *handle = NULL;
    int code = find_handle(device, &handle);
    return code != 0 ? code : nvml.processes(handle, count, list);
}
