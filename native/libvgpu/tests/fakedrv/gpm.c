/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NVML's samples (GPM, from Hopper on): the load of MIG instances, and the traffic of cards that are not divided.
 *
 * An instance's load is the sum over its processes, at most 100 %; a sample records when it was taken. Traffic stands
 * in the file PATH.traffic beside the state (state.h, written by hami_sim.hardware.fake_nvml), a line
 * `CARD DRAM_PCT TX RX` per card, percent and MiB/s; a card without a line has none. Metrics that a sample does not
 * have are answered as not supported. Managed memory that migrates (card.h) comes on top, half of it in each direction.
 *
 * Locks taken here: none. Called with hooks active: no.
 */
#include "nvml_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { GPM_VERSION = 1, HOPPER = 9, FULL_PCT = 100, PATH_BYTES = 4096, WHOLE_CARD = -1 };
enum { GRAPHICS_UTIL = 1, DRAM_BW_UTIL = 10, PCIE_TX_PER_SEC = 20, PCIE_RX_PER_SEC = 21 };

struct nvmlGpmSample_st {
    char card[FAKE_TEXT];
    int instance;
    double load_pct;
    double dram_pct;
    double pcie_tx;
    double pcie_rx;
    unsigned long long moved_bytes;
    unsigned long long time_ns;
};

NVML_API nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support);
NVML_API nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample);
NVML_API nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample);
NVML_API nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample);
NVML_API nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int instance, nvmlGpmSample_t sample);
NVML_API nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *wanted);

NVML_API nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    struct fake_gpu gpu;
    if (support->version != GPM_VERSION) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    nvmlReturn_t status = fake_begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS) {
        support->isSupportedDevice = gpu.architecture >= HOPPER ? 1 : 0;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
    *sample = calloc(1, sizeof **sample);
    return *sample == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
    free(sample);
    return NVML_SUCCESS;
}

static nvmlReturn_t begin(const char *function, nvmlDevice_t device, bool is_divided, struct fake_gpu *gpu)
{
    nvmlReturn_t status = fake_begin_device(function, device, gpu);
    if (status == NVML_SUCCESS && gpu->is_instance) {
        status = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (status == NVML_SUCCESS && (gpu->architecture < HOPPER || (gpu->mig_current != 0) != is_divided)) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
    struct fake_gpu gpu;
    char path[PATH_BYTES];
    nvmlReturn_t status = begin(__func__, device, false, &gpu);
    if (status != NVML_SUCCESS) {
        return status;
    }
    struct nvmlGpmSample_st one = {.instance = WHOLE_CARD};
    *sample = (struct nvmlGpmSample_st){.instance = WHOLE_CARD, .load_pct = gpu.gpu_util};
    (void)snprintf(path, sizeof path, "%s.traffic", getenv("FAKE_NVML_STATE"));
    FILE *file = fopen(path, "r");
    while (file != NULL && fscanf(file, "%95s %lf %lf %lf", one.card, &one.dram_pct, &one.pcie_tx, &one.pcie_rx) == 4) {
        if (strcmp(one.card, gpu.uuid) == 0) {
            *sample = one;
            sample->load_pct = gpu.gpu_util;
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    memcpy(sample->card, gpu.uuid, sizeof sample->card);
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    sample->time_ns = (unsigned long long)now.tv_sec * 1000000000ULL + (unsigned long long)now.tv_nsec;
    sample->moved_bytes = fake_moved_bytes(gpu.uuid);
    return NVML_SUCCESS;
}

/* MiB/s in one direction. */
static double migrated(const struct nvmlGpmSample_st *before, const struct nvmlGpmSample_st *after)
{
    double bytes = (double)(after->moved_bytes - before->moved_bytes);
    double seconds = (double)(after->time_ns - before->time_ns) / 1e9;
    return seconds > 0 && bytes > 0 ? bytes / 2 / seconds / (1 << 20) : 0;
}

NVML_API nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int instance, nvmlGpmSample_t sample)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin(__func__, device, true, &gpu);
    bool exists = false;
    double load_pct = 0;
    for (unsigned int i = 0; status == NVML_SUCCESS && i < gpu.gi_count; i++) {
        exists = exists || gpu.gis[i].id == instance;
    }
    if (status == NVML_SUCCESS && !exists) {
        status = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (status != NVML_SUCCESS) {
        return status;
    }
    for (unsigned int i = 0; i < gpu.process_count; i++) {
        load_pct += gpu.processes[i].gpu_instance == instance ? gpu.processes[i].sm_util : 0;
    }
    *sample =
        (struct nvmlGpmSample_st){.instance = (int)instance, .load_pct = load_pct < FULL_PCT ? load_pct : FULL_PCT};
    memcpy(sample->card, gpu.uuid, sizeof sample->card);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *wanted)
{
    const struct nvmlGpmSample_st *before = wanted->sample1;
    const struct nvmlGpmSample_st *after = wanted->sample2;
    if (wanted->version != GPM_VERSION) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (before == NULL || after == NULL || before == after || after->card[0] == '\0' ||
        strcmp(before->card, after->card) != 0 || before->instance != after->instance) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (unsigned int i = 0; i < wanted->numMetrics; i++) {
        nvmlGpmMetric_t *metric = &wanted->metrics[i];
        bool is_of_card = after->instance == WHOLE_CARD;
        metric->nvmlReturn = NVML_SUCCESS;
        switch (metric->metricId) {
        case GRAPHICS_UTIL:
            metric->value = after->load_pct;
            break;
        case DRAM_BW_UTIL:
            metric->value = after->dram_pct;
            break;
        case PCIE_TX_PER_SEC:
            metric->value = after->pcie_tx + migrated(before, after);
            break;
        case PCIE_RX_PER_SEC:
            metric->value = after->pcie_rx + migrated(before, after);
            break;
        default:
            metric->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        }
        if (metric->metricId != GRAPHICS_UTIL && !is_of_card) {
            metric->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        }
    }
    return NVML_SUCCESS;
}
