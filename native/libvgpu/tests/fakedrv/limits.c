/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver's memory limits per cgroup, as NVML sets and reads them since driver 615; older ones lack the functions.
 *
 * The limits of all processes stand in the file PATH.limits beside the state (state.h), a line `CARD SOFT HARD GROUP`
 * each, in bytes. A change is made under a lock file and put in place by rename.
 *
 * Behavior that callers depend on: a group is named by the full path of its directory, which must exist; cards in MIG
 * mode and their instances have no limits; soft 0 and the largest hard limit clear an entry; a hard limit below the use
 * of the group's processes is accepted, and the old one stays in effect, as the kernel does. Allocations of the fake
 * CUDA driver are not refused by it.
 *
 * Locks taken here: the lock file, around changes. Called with hooks active: no.
 */
#include "nvml_parts.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { PATH_BYTES = 4096, LINE_BYTES = 4608, FIRST_DRIVER = 615, NVML_ERROR_FUNCTION_NOT_FOUND = 13 };
#define UNLIMITED 0xFFFFFFFFFFFFFFFFULL

typedef struct {
    const char *nameSpace;
    unsigned long long softLimit;
    unsigned long long hardLimit;
} nvmlSetMemoryLimits_v1_t;

typedef struct {
    const char *nameSpace;
    unsigned long long softLimit;
    unsigned long long hardLimit;
    unsigned long long currentUsed;
} nvmlGetMemoryLimits_v1_t;

_Static_assert(sizeof(nvmlSetMemoryLimits_v1_t) == 24, "layout of driver 615");
_Static_assert(sizeof(nvmlGetMemoryLimits_v1_t) == 32, "layout of driver 615");

NVML_API nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits);
NVML_API nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits);

struct entry {
    char card[FAKE_TEXT];
    unsigned long long soft;
    unsigned long long hard;
    char group[PATH_BYTES];
};

static bool is_supported(const char *path)
{
    char problem[512];
    struct fake_state *state = calloc(1, sizeof *state);
    bool good = state != NULL && fake_state_read(path, state, problem, sizeof problem) &&
                strtol(state->driver_version, NULL, 10) >= FIRST_DRIVER;
    free(state);
    return good;
}

static nvmlReturn_t begin(const char *function, nvmlDevice_t device, const char *group, struct fake_gpu *gpu)
{
    nvmlReturn_t status = fake_begin_device(function, device, gpu);
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat found;
    if (status != NVML_SUCCESS) {
        return status;
    }
    if (path == NULL || !is_supported(path)) {
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    }
    if (gpu->is_instance || gpu->mig_current != 0) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    if (group == NULL || strlen(group) >= PATH_BYTES || strchr(group, '\n') != NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    return stat(group, &found) == 0 && S_ISDIR(found.st_mode) ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

/* Bytes that the group's processes use on the card. */
static unsigned long long used_by(const struct fake_gpu *gpu, const char *group)
{
    char path[PATH_BYTES + 16];
    unsigned long long used = 0;
    unsigned int pid;
    (void)snprintf(path, sizeof path, "%s/cgroup.procs", group);
    FILE *file = fopen(path, "r");
    while (file != NULL && fscanf(file, "%u", &pid) == 1) {
        for (unsigned int i = 0; i < gpu->process_count; i++) {
            used += gpu->processes[i].pid == pid ? gpu->processes[i].used_bytes : 0;
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return used;
}

static bool next_entry(FILE *file, struct entry *out)
{
    char line[LINE_BYTES];
    if (file == NULL || fgets(line, sizeof line, file) == NULL) {
        return false;
    }
    return sscanf(line, "%95s %llu %llu %4095[^\n]", out->card, &out->soft, &out->hard, out->group) == 4;
}

/* The file beside the state, with `suffix`. */
static void beside(char out[PATH_BYTES], const char *suffix)
{
    (void)snprintf(out, PATH_BYTES, "%s.limits%s", getenv("FAKE_NVML_STATE"), suffix);
}

static struct entry entry_of(const char *card, const char *group)
{
    struct entry found = {.hard = UNLIMITED};
    struct entry one;
    char path[PATH_BYTES];
    beside(path, "");
    FILE *file = fopen(path, "r");
    while (next_entry(file, &one)) {
        if (strcmp(one.card, card) == 0 && strcmp(one.group, group) == 0) {
            found = one;
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return found;
}

/* Caller holds the lock file. */
static bool replace_entry(const struct entry *fresh)
{
    char path[PATH_BYTES];
    char scratch[PATH_BYTES];
    struct entry one;
    beside(path, "");
    beside(scratch, ".new");
    FILE *from = fopen(path, "r");
    FILE *to = fopen(scratch, "w");
    while (to != NULL && next_entry(from, &one)) {
        if (strcmp(one.card, fresh->card) != 0 || strcmp(one.group, fresh->group) != 0) {
            (void)fprintf(to, "%s %llu %llu %s\n", one.card, one.soft, one.hard, one.group);
        }
    }
    if (to != NULL && (fresh->soft != 0 || fresh->hard != UNLIMITED)) {
        (void)fprintf(to, "%s %llu %llu %s\n", fresh->card, fresh->soft, fresh->hard, fresh->group);
    }
    if (from != NULL) {
        (void)fclose(from);
    }
    return to != NULL && fclose(to) == 0 && rename(scratch, path) == 0;
}

NVML_API nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits)
{
    struct fake_gpu gpu;
    char path[PATH_BYTES];
    nvmlReturn_t status = begin(__func__, device, limits == NULL ? NULL : limits->nameSpace, &gpu);
    if (status != NVML_SUCCESS) {
        return status;
    }
    if (limits->softLimit > limits->hardLimit) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    if (used_by(&gpu, limits->nameSpace) > limits->hardLimit) {
        return NVML_SUCCESS;
    }
    struct entry fresh = {.soft = limits->softLimit, .hard = limits->hardLimit};
    (void)snprintf(fresh.card, sizeof fresh.card, "%s", gpu.uuid);
    (void)snprintf(fresh.group, sizeof fresh.group, "%s", limits->nameSpace);
    beside(path, ".lock");
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    bool good = file >= 0 && flock(file, LOCK_EX) == 0 && replace_entry(&fresh);
    if (file >= 0) {
        (void)close(file);
    }
    return good ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin(__func__, device, limits == NULL ? NULL : limits->nameSpace, &gpu);
    if (status != NVML_SUCCESS) {
        return status;
    }
    struct entry found = entry_of(gpu.uuid, limits->nameSpace);
    limits->softLimit = found.soft;
    limits->hardLimit = found.hard;
    limits->currentUsed = used_by(&gpu, limits->nameSpace);
    return NVML_SUCCESS;
}
