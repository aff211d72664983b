/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Division of a fake card into MIG instances: which sizes it has, where they may be, making and destroying them.
 *
 * The instances of all processes stand in the file PATH.mig beside the state (state.h), which outlives the process that
 * made them, as on a real card. A change is made under a lock file, on a fresh reading, and put in place by rename.
 *
 * Rules of real cards that it obeys: no two instances share a position; compute slices, media engines and the count of
 * a profile are limited; an instance with a process, or a GPU instance with a compute instance, is in use; profiles are
 * asked for by kind and meant by id afterwards; a UUID exists once there is a compute instance. Numbers of GPU
 * instances follow from their place. Without MIG mode only profiles and placements are listed. The mode changes on a
 * card that no process uses or watches and, to be disabled, that has no instance; else a card before Hopper goes on
 * waiting for its reset, a later one refuses. A machine that cannot reset its cards waits for a reboot.
 *
 * Locks taken here: `lock`, around the tables of handles; the lock file, around changes. Called with hooks active: no.
 */
#include "nvml_parts.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { HANDLES_MAX = 512, PATH_BYTES = 4096, LINE_BYTES = 1024, CI_KINDS = 9 };

struct nvmlGpuInstance_st {
    char card[FAKE_TEXT];
    unsigned int id;
};

struct nvmlComputeInstance_st {
    nvmlGpuInstance_t parent;
    unsigned int id;
};

/* Slices of a compute instance by the kind that callers name; ids are equal to kinds. */
static const unsigned int slices_by_kind[CI_KINDS] = {1, 2, 3, 4, 7, 8, 6, 1, 7};
enum { CI_KIND_MEDIA = 7, CI_KIND_NVLINK = 8 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct nvmlGpuInstance_st gpu_instances[HANDLES_MAX];
static unsigned int gpu_instance_count;
static struct nvmlComputeInstance_st compute_instances[HANDLES_MAX];
static unsigned int compute_instance_count;

static nvmlGpuInstance_t gpu_instance_of(const char *card, unsigned int id)
{
    nvmlGpuInstance_t found = NULL;
    (void)pthread_mutex_lock(&lock);
    for (unsigned int i = 0; found == NULL && i < gpu_instance_count; i++) {
        if (gpu_instances[i].id == id && strcmp(gpu_instances[i].card, card) == 0) {
            found = &gpu_instances[i];
        }
    }
    if (found == NULL && gpu_instance_count < HANDLES_MAX) {
        found = &gpu_instances[gpu_instance_count++];
        memcpy(found->card, card, strlen(card) + 1);
        found->id = id;
    }
    (void)pthread_mutex_unlock(&lock);
    return found;
}

static nvmlComputeInstance_t compute_instance_of(nvmlGpuInstance_t parent, unsigned int id)
{
    nvmlComputeInstance_t found = NULL;
    (void)pthread_mutex_lock(&lock);
    for (unsigned int i = 0; found == NULL && i < compute_instance_count; i++) {
        if (compute_instances[i].id == id && compute_instances[i].parent == parent) {
            found = &compute_instances[i];
        }
    }
    if (found == NULL && compute_instance_count < HANDLES_MAX) {
        found = &compute_instances[compute_instance_count++];
        found->parent = parent;
        found->id = id;
    }
    (void)pthread_mutex_unlock(&lock);
    return found;
}

/* ---- one card ---- */

static const struct fake_gi_profile *profile_of_kind(const struct fake_gpu *gpu, unsigned int kind)
{
    for (unsigned int i = 0; i < gpu->gi_profile_count; i++) {
        if (gpu->gi_profiles[i].kind == kind) {
            return &gpu->gi_profiles[i];
        }
    }
    return NULL;
}

static const struct fake_gi_profile *profile_of_id(const struct fake_gpu *gpu, unsigned int id)
{
    for (unsigned int i = 0; i < gpu->gi_profile_count; i++) {
        if (gpu->gi_profiles[i].id == id) {
            return &gpu->gi_profiles[i];
        }
    }
    return NULL;
}

static const struct fake_gi_profile *profile_of(const struct fake_gpu *gpu, const struct fake_gi *gi)
{
    return &gpu->gi_profiles[gi->profile];
}

static struct fake_gi *gi_of(struct fake_gpu *gpu, unsigned int id)
{
    for (unsigned int i = 0; i < gpu->gi_count; i++) {
        if (gpu->gis[i].id == id) {
            return &gpu->gis[i];
        }
    }
    return NULL;
}

static struct fake_mig *ci_of(struct fake_gpu *gpu, unsigned int gi, unsigned int ci)
{
    for (unsigned int i = 0; i < gpu->mig_count; i++) {
        if (gpu->migs[i].slices > 0 && gpu->migs[i].gpu_instance == gi && gpu->migs[i].compute_instance == ci) {
            return &gpu->migs[i];
        }
    }
    return NULL;
}

static unsigned int slices_used(const struct fake_gpu *gpu, unsigned int gi)
{
    unsigned int used = 0;
    for (unsigned int i = 0; i < gpu->mig_count; i++) {
        used += gpu->migs[i].gpu_instance == gi ? gpu->migs[i].slices : 0;
    }
    return used;
}

static unsigned int taken(const struct fake_gpu *gpu)
{
    unsigned int positions = 0;
    for (unsigned int i = 0; i < gpu->gi_count; i++) {
        positions |= fake_positions(profile_of(gpu, &gpu->gis[i]), gpu->gis[i].start);
    }
    return positions;
}

/* Amounts that instances share besides positions. */
struct amounts {
    unsigned int at[5];
};

static struct amounts amounts_of(const struct fake_gi_profile *profile)
{
    return (struct amounts){{profile->slices, profile->decoders, profile->encoders, profile->jpeg, profile->ofa}};
}

static bool fits(const struct fake_gpu *gpu, const struct fake_gi_profile *profile)
{
    struct amounts most = {{0}};
    struct amounts sum = amounts_of(profile);
    unsigned int count = 0;
    for (unsigned int i = 0; i < gpu->gi_profile_count; i++) {
        struct amounts one = amounts_of(&gpu->gi_profiles[i]);
        for (unsigned int k = 0; k < 5; k++) {
            most.at[k] = one.at[k] > most.at[k] ? one.at[k] : most.at[k];
        }
    }
    for (unsigned int i = 0; i < gpu->gi_count; i++) {
        struct amounts one = amounts_of(profile_of(gpu, &gpu->gis[i]));
        count += profile_of(gpu, &gpu->gis[i]) == profile ? 1U : 0U;
        for (unsigned int k = 0; k < 5; k++) {
            sum.at[k] += one.at[k];
        }
    }
    bool good = count < profile->count;
    for (unsigned int k = 0; k < 5; k++) {
        good = good && sum.at[k] <= most.at[k];
    }
    return good;
}

/* Numbers count from the largest size down, and within a size by place. */
static unsigned int gi_number(const struct fake_gpu *gpu, const struct fake_gi_profile *profile, unsigned int start)
{
    unsigned int grid = 1;
    for (unsigned int i = 0; i < gpu->gi_profile_count; i++) {
        grid = gpu->gi_profiles[i].size > grid ? gpu->gi_profiles[i].size : grid;
    }
    return grid / profile->size - 1 + start / profile->size;
}

static void name_uuid(char out[FAKE_TEXT], const char *card, unsigned int gi, unsigned int ci)
{
    uint64_t halves[2] = {0xCBF29CE484222325ULL, 0x84222325CBF29CE4ULL};
    char text[FAKE_TEXT * 2];
    (void)snprintf(text, sizeof text, "%s/%u/%u", card, gi, ci);
    for (unsigned int half = 0; half < 2; half++) {
        for (const char *at = text; *at != '\0'; at++) {
            halves[half] = (halves[half] ^ (unsigned char)*at) * 0x100000001B3ULL;
        }
    }
    (void)snprintf(out, FAKE_TEXT, "MIG-%08x-%04x-5%03x-%04x-%012llx", (unsigned int)(halves[0] >> 32U),
                   (unsigned int)(halves[0] >> 16U) & 0xFFFFU, (unsigned int)halves[0] & 0xFFFU,
                   (unsigned int)(halves[1] >> 48U) | 0x8000U, (unsigned long long)(halves[1] & 0xFFFFFFFFFFFFULL));
}

/* Prologue of a call on a card that may be divided; `needs_mode`: only in MIG mode. */
static nvmlReturn_t begin_card(const char *function, nvmlDevice_t device, struct fake_gpu *gpu, bool needs_mode)
{
    nvmlReturn_t status = fake_begin_device(function, device, gpu);
    if (status == NVML_SUCCESS && gpu->is_instance) {
        status = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (status == NVML_SUCCESS && (!gpu->mig_capable || (needs_mode && gpu->mig_current == 0))) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    return status;
}

/* Prologue of a call on a GPU instance: its card and its place there. */
static nvmlReturn_t begin_gi(const char *function, nvmlGpuInstance_t instance, struct fake_gpu *gpu,
                             struct fake_gi **gi)
{
    if (instance < &gpu_instances[0] || instance >= &gpu_instances[HANDLES_MAX]) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    nvmlReturn_t status = begin_card(function, fake_device_of_uuid(instance->card), gpu, true);
    *gi = status == NVML_SUCCESS ? gi_of(gpu, instance->id) : NULL;
    return status == NVML_SUCCESS && *gi == NULL ? NVML_ERROR_NOT_FOUND : status;
}

/* ---- changing ---- */

typedef nvmlReturn_t (*change_fn)(struct fake_gpu *gpu, const void *wish);

static void write_card(FILE *out, const struct fake_gpu *gpu)
{
    if (gpu->mig_has_mode) {
        (void)fprintf(out, "mode %s %u %u %u\n", gpu->uuid, gpu->mig_current, gpu->mig_pending, gpu->mig_switches);
    }
    for (unsigned int i = 0; i < gpu->gi_count; i++) {
        const struct fake_gi *gi = &gpu->gis[i];
        (void)fprintf(out, "gi %s %u %u %u\n", gpu->uuid, gi->id, profile_of(gpu, gi)->id, gi->start);
    }
    for (unsigned int i = 0; i < gpu->mig_count; i++) {
        const struct fake_mig *mig = &gpu->migs[i];
        if (mig->slices > 0) {
            (void)fprintf(out, "ci %s %u %u %u %s\n", gpu->uuid, mig->gpu_instance, mig->compute_instance, mig->slices,
                          mig->uuid);
        }
    }
}

/* Caller holds the lock file. Lines of other cards stay. */
static bool store(const char *path, const struct fake_gpu *gpu)
{
    char fresh_path[PATH_BYTES];
    char line[LINE_BYTES];
    char card[FAKE_TEXT];
    if (snprintf(fresh_path, sizeof fresh_path, "%s.%d", path, (int)getpid()) >= (int)sizeof fresh_path) {
        return false;
    }
    FILE *fresh = fopen(fresh_path, "we");
    if (fresh == NULL) {
        return false;
    }
    FILE *old = fopen(path, "re");
    while (old != NULL && fgets(line, sizeof line, old) != NULL) {
        if (sscanf(line, "%*s %95s", card) == 1 && strcmp(card, gpu->uuid) != 0) {
            (void)fputs(line, fresh);
        }
    }
    if (old != NULL) {
        (void)fclose(old);
    }
    write_card(fresh, gpu);
    return fclose(fresh) == 0 && rename(fresh_path, path) == 0;
}

/* Read the card again, let `apply` change it, write it down. Faults were applied by the caller. */
static nvmlReturn_t change(const char *card, change_fn apply, const void *wish)
{
    char path[PATH_BYTES];
    char lock_path[PATH_BYTES];
    struct fake_gpu gpu;
    const char *state_path = getenv("FAKE_NVML_STATE");
    if (state_path == NULL || snprintf(path, sizeof path, "%s.mig", state_path) >= (int)sizeof path ||
        snprintf(lock_path, sizeof lock_path, "%s.mig.lock", state_path) >= (int)sizeof lock_path) {
        return NVML_ERROR_UNKNOWN;
    }
    int fd = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || flock(fd, LOCK_EX) != 0) {
        (void)(fd >= 0 && close(fd));
        return NVML_ERROR_UNKNOWN;
    }
    nvmlReturn_t status = fake_begin_device("", fake_device_of_uuid(card), &gpu);
    if (status == NVML_SUCCESS) {
        status = apply(&gpu, wish);
    }
    if (status == NVML_SUCCESS && !store(path, &gpu)) {
        status = NVML_ERROR_UNKNOWN;
    }
    (void)close(fd);
    return status;
}

/* ---- the mode ---- */

NVML_API nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activation);

enum { ARCHITECTURE_HOPPER = 9 };

struct mode_wish {
    unsigned int mode;
    bool is_watched;
    nvmlReturn_t *activation;
};

static nvmlReturn_t set_mode(struct fake_gpu *gpu, const void *wish)
{
    const struct mode_wish *wanted = wish;
    *wanted->activation = NVML_SUCCESS;
    gpu->mig_has_mode = true;
    if (gpu->mig_current == wanted->mode) {
        gpu->mig_pending = wanted->mode;
        return NVML_SUCCESS;
    }
    if (wanted->mode == 0 && gpu->gi_count + gpu->mig_count > 0) {
        return NVML_ERROR_IN_USE;
    }
    bool is_used = gpu->process_count + gpu->mig_clients > 0 || wanted->is_watched;
    if (is_used && gpu->architecture >= ARCHITECTURE_HOPPER) {
        return NVML_ERROR_IN_USE;
    }
    gpu->mig_pending = wanted->mode;
    if (gpu->mig_vm) {
        *wanted->activation = NVML_ERROR_NOT_SUPPORTED;
    } else if (is_used) {
        *wanted->activation = NVML_ERROR_IN_USE;
    } else {
        gpu->mig_current = wanted->mode;
        gpu->mig_switches++;
    }
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activation)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_card(__func__, device, &gpu, false);
    if (status == NVML_SUCCESS && (mode > 1 || activation == NULL)) {
        status = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (status != NVML_SUCCESS) {
        return status;
    }
    struct mode_wish wish = {.mode = mode, .is_watched = fake_is_watched(gpu.uuid), .activation = activation};
    return change(gpu.uuid, set_mode, &wish);
}

/* ---- profiles and places ---- */

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int kind,
                                                          nvmlGpuInstanceProfileInfo_t *info);
NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int kind,
                                                           nvmlGpuInstanceProfileInfo_v2_t *info);
NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int id,
                                                               nvmlGpuInstanceProfileInfo_v2_t *info);
NVML_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int id,
                                                                    nvmlPlacement_t *placements, unsigned int *count);
NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int id,
                                                                unsigned int *count);

static nvmlGpuInstanceProfileInfo_t info_of(const struct fake_gi_profile *profile)
{
    return (nvmlGpuInstanceProfileInfo_t){
        .id = profile->id,
        .isP2pSupported = 0,
        .sliceCount = profile->slices,
        .instanceCount = profile->count,
        .multiprocessorCount = profile->sm_count,
        .copyEngineCount = profile->copy_engines,
        .decoderCount = profile->decoders,
        .encoderCount = profile->encoders,
        .jpegCount = profile->jpeg,
        .ofaCount = profile->ofa,
        .memorySizeMB = profile->memory_mib,
    };
}

static nvmlReturn_t tell_profile(const struct fake_gi_profile *profile, nvmlGpuInstanceProfileInfo_v2_t *out)
{
    if (profile == NULL) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    nvmlGpuInstanceProfileInfo_t info = info_of(profile);
    out->id = info.id;
    out->isP2pSupported = info.isP2pSupported;
    out->sliceCount = info.sliceCount;
    out->instanceCount = info.instanceCount;
    out->multiprocessorCount = info.multiprocessorCount;
    out->copyEngineCount = info.copyEngineCount;
    out->decoderCount = info.decoderCount;
    out->encoderCount = info.encoderCount;
    out->jpegCount = info.jpegCount;
    out->ofaCount = info.ofaCount;
    out->memorySizeMB = info.memorySizeMB;
    (void)snprintf(out->name, sizeof out->name, "MIG %.90s", profile->name);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int kind,
                                                          nvmlGpuInstanceProfileInfo_t *info)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_card(__func__, device, &gpu, false);
    const struct fake_gi_profile *profile = status == NVML_SUCCESS ? profile_of_kind(&gpu, kind) : NULL;
    if (status == NVML_SUCCESS && profile == NULL) {
        status = kind < FAKE_GI_PROFILES_MAX ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT;
    }
    if (status == NVML_SUCCESS) {
        *info = info_of(profile);
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int kind,
                                                           nvmlGpuInstanceProfileInfo_v2_t *info)
{
    struct fake_gpu gpu;
    if (info->version != NVML_GPU_INSTANCE_PROFILE_INFO_V2_VERSION) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    nvmlReturn_t status = begin_card(__func__, device, &gpu, false);
    if (status == NVML_SUCCESS && kind >= FAKE_GI_PROFILES_MAX) {
        status = NVML_ERROR_INVALID_ARGUMENT;
    }
    return status == NVML_SUCCESS ? tell_profile(profile_of_kind(&gpu, kind), info) : status;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int id,
                                                               nvmlGpuInstanceProfileInfo_v2_t *info)
{
    struct fake_gpu gpu;
    if (info->version != NVML_GPU_INSTANCE_PROFILE_INFO_V2_VERSION) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    nvmlReturn_t status = begin_card(__func__, device, &gpu, false);
    return status == NVML_SUCCESS ? tell_profile(profile_of_id(&gpu, id), info) : status;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int id,
                                                                    nvmlPlacement_t *placements, unsigned int *count)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_card(__func__, device, &gpu, false);
    const struct fake_gi_profile *profile = status == NVML_SUCCESS ? profile_of_id(&gpu, id) : NULL;
    if (status == NVML_SUCCESS && profile == NULL) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    unsigned int room = placements == NULL ? 32 : *count;
    unsigned int found = 0;
    for (unsigned int start = 0; status == NVML_SUCCESS && start < 32; start++) {
        if ((profile->starts >> start & 1U) != 0) {
            if (placements != NULL && found < room) {
                placements[found] = (nvmlPlacement_t){.start = start, .size = profile->size};
            }
            found++;
        }
    }
    if (status == NVML_SUCCESS) {
        *count = found;
        status = found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int id,
                                                                unsigned int *count)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_card(__func__, device, &gpu, true);
    const struct fake_gi_profile *profile = status == NVML_SUCCESS ? profile_of_id(&gpu, id) : NULL;
    if (status == NVML_SUCCESS && profile == NULL) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    if (status != NVML_SUCCESS) {
        return status;
    }
    *count = 0;
    for (unsigned int start = 0; start < 32; start++) { /* one after the other, as they would be made */
        bool is_free = (profile->starts >> start & 1U) != 0 && (taken(&gpu) & fake_positions(profile, start)) == 0;
        if (is_free && fits(&gpu, profile) && gpu.gi_count < FAKE_GIS_MAX) {
            gpu.gis[gpu.gi_count++] =
                (struct fake_gi){.id = 99, .profile = (unsigned int)(profile - gpu.gi_profiles), .start = start};
            (*count)++;
        }
    }
    return NVML_SUCCESS;
}

/* ---- GPU instances ---- */

NVML_API nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *out);
NVML_API nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int id,
                                                               const nvmlPlacement_t *placement,
                                                               nvmlGpuInstance_t *out);
NVML_API nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *out,
                                                unsigned int *count);
NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *out);
NVML_API nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info);
NVML_API nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance);

struct gi_wish {
    unsigned int profile_id;
    const nvmlPlacement_t *placement; /* NULL: anywhere */
    unsigned int *number;
};

static nvmlReturn_t add_instance(struct fake_gpu *gpu, const void *wish)
{
    const struct gi_wish *wanted = wish;
    const struct fake_gi_profile *profile = profile_of_id(gpu, wanted->profile_id);
    if (profile == NULL) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    const nvmlPlacement_t *at = wanted->placement;
    if (at != NULL && (at->start >= 32 || (profile->starts >> at->start & 1U) == 0 || at->size != profile->size)) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (unsigned int start = 0; start < 32 && gpu->gi_count < FAKE_GIS_MAX; start++) {
        bool is_wanted = at == NULL ? (profile->starts >> start & 1U) != 0 : start == at->start;
        if (is_wanted && (taken(gpu) & fake_positions(profile, start)) == 0 && fits(gpu, profile)) {
            *wanted->number = gi_number(gpu, profile, start);
            gpu->gis[gpu->gi_count++] = (struct fake_gi){
                .id = *wanted->number, .profile = (unsigned int)(profile - gpu->gi_profiles), .start = start};
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_INSUFFICIENT_RESOURCES;
}

static nvmlReturn_t create_gi(const char *function, nvmlDevice_t device, unsigned int id,
                              const nvmlPlacement_t *placement, nvmlGpuInstance_t *out)
{
    struct fake_gpu gpu;
    unsigned int number = 0;
    nvmlReturn_t status = begin_card(function, device, &gpu, true);
    if (status == NVML_SUCCESS) {
        struct gi_wish wish = {.profile_id = id, .placement = placement, .number = &number};
        status = change(gpu.uuid, add_instance, &wish);
    }
    if (status == NVML_SUCCESS) {
        *out = gpu_instance_of(gpu.uuid, number);
        status = *out == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *out)
{
    return create_gi(__func__, device, id, NULL, out);
}

NVML_API nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int id,
                                                               const nvmlPlacement_t *placement, nvmlGpuInstance_t *out)
{
    return placement == NULL ? NVML_ERROR_INVALID_ARGUMENT : create_gi(__func__, device, id, placement, out);
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *out,
                                                unsigned int *count)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_card(__func__, device, &gpu, true);
    if (status == NVML_SUCCESS && profile_of_id(&gpu, id) == NULL) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    unsigned int found = 0;
    for (unsigned int i = 0; status == NVML_SUCCESS && i < gpu.gi_count; i++) {
        if (profile_of(&gpu, &gpu.gis[i])->id == id) {
            out[found++] = gpu_instance_of(gpu.uuid, gpu.gis[i].id); /* the caller has room for all */
        }
    }
    if (status == NVML_SUCCESS) {
        *count = found;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *out)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_card(__func__, device, &gpu, true);
    if (status == NVML_SUCCESS && gi_of(&gpu, id) == NULL) {
        status = NVML_ERROR_NOT_FOUND;
    }
    if (status == NVML_SUCCESS) {
        *out = gpu_instance_of(gpu.uuid, id);
        status = *out == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    struct fake_gpu gpu;
    struct fake_gi *gi = NULL;
    nvmlReturn_t status = begin_gi(__func__, instance, &gpu, &gi);
    if (status == NVML_SUCCESS) {
        *info = (nvmlGpuInstanceInfo_t){
            .device = fake_device_of_uuid(gpu.uuid),
            .id = gi->id,
            .profileId = profile_of(&gpu, gi)->id,
            .placement = {.start = gi->start, .size = profile_of(&gpu, gi)->size},
        };
    }
    return status;
}

static nvmlReturn_t remove_instance(struct fake_gpu *gpu, const void *wish)
{
    const unsigned int *id = wish;
    struct fake_gi *gi = gi_of(gpu, *id);
    if (gi == NULL) {
        return NVML_ERROR_NOT_FOUND;
    }
    if (slices_used(gpu, *id) > 0 || fake_processes_of(gpu, *id, NVML_INSTANCE_NONE) > 0) {
        return NVML_ERROR_IN_USE;
    }
    *gi = gpu->gis[--gpu->gi_count];
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance)
{
    struct fake_gpu gpu;
    struct fake_gi *gi = NULL;
    nvmlReturn_t status = begin_gi(__func__, instance, &gpu, &gi);
    return status == NVML_SUCCESS ? change(gpu.uuid, remove_instance, &instance->id) : status;
}

/* ---- compute instances ---- */

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned int kind,
                                                                   unsigned int engines,
                                                                   nvmlComputeInstanceProfileInfo_t *info);
NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t instance, unsigned int kind,
                                                                    unsigned int engines,
                                                                    nvmlComputeInstanceProfileInfo_v2_t *info);
NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t instance, unsigned int id,
                                                                         unsigned int *count);
NVML_API nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance, unsigned int id,
                                                           nvmlComputeInstance_t *out);
NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned int id,
                                                         nvmlComputeInstance_t *out, unsigned int *count);
NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned int id,
                                                            nvmlComputeInstance_t *out);
NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info);
NVML_API nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t instance);

/* The one slice of an instance with media engines has a kind of its own. */
static unsigned int kind_of(const struct fake_gi_profile *profile, unsigned int slices)
{
    bool has_media = profile->slices == 1 && strstr(profile->name, "+me") != NULL;
    for (unsigned int kind = 0; !has_media && kind < CI_KIND_MEDIA; kind++) {
        if (slices_by_kind[kind] == slices) {
            return kind;
        }
    }
    return CI_KIND_MEDIA;
}

/* Slices of a compute instance of this kind in an instance of `profile`; 0: there is none. */
static unsigned int slices_in(const struct fake_gi_profile *profile, unsigned int kind)
{
    if (kind >= CI_KIND_NVLINK || slices_by_kind[kind] > profile->slices ||
        kind_of(profile, slices_by_kind[kind]) != kind) {
        return 0;
    }
    return slices_by_kind[kind];
}

static nvmlReturn_t tell_ci_profile(const char *function, nvmlGpuInstance_t instance, unsigned int kind,
                                    unsigned int engines, nvmlComputeInstanceProfileInfo_t *info, char name[96])
{
    struct fake_gpu gpu;
    struct fake_gi *gi = NULL;
    nvmlReturn_t status = begin_gi(function, instance, &gpu, &gi);
    if (status == NVML_SUCCESS && (kind >= CI_KINDS || engines != 0)) {
        status = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (status != NVML_SUCCESS) {
        return status;
    }
    const struct fake_gi_profile *profile = profile_of(&gpu, gi);
    unsigned int slices = slices_in(profile, kind);
    if (slices == 0) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    *info = (nvmlComputeInstanceProfileInfo_t){
        .id = kind,
        .sliceCount = slices,
        .instanceCount = profile->slices / slices,
        .multiprocessorCount = profile->sm_count * slices / profile->slices,
        .sharedCopyEngineCount = profile->copy_engines,
        .sharedDecoderCount = profile->decoders,
        .sharedEncoderCount = profile->encoders,
        .sharedJpegCount = profile->jpeg,
        .sharedOfaCount = profile->ofa,
    };
    if (slices == profile->slices) {
        (void)snprintf(name, 96, "MIG %.90s", profile->name);
    } else {
        (void)snprintf(name, 96, "MIG %uc.%.70s", slices, profile->name);
    }
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned int kind,
                                                                   unsigned int engines,
                                                                   nvmlComputeInstanceProfileInfo_t *info)
{
    char name[96];
    return tell_ci_profile(__func__, instance, kind, engines, info, name);
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t instance, unsigned int kind,
                                                                    unsigned int engines,
                                                                    nvmlComputeInstanceProfileInfo_v2_t *info)
{
    if (info->version != NVML_COMPUTE_INSTANCE_PROFILE_INFO_V2_VERSION) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    return tell_ci_profile(__func__, instance, kind, engines, &info->info, info->name);
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t instance, unsigned int id,
                                                                         unsigned int *count)
{
    struct fake_gpu gpu;
    struct fake_gi *gi = NULL;
    nvmlReturn_t status = begin_gi(__func__, instance, &gpu, &gi);
    unsigned int slices = status == NVML_SUCCESS ? slices_in(profile_of(&gpu, gi), id) : 0;
    if (status == NVML_SUCCESS && slices == 0) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    if (status == NVML_SUCCESS) {
        *count = (profile_of(&gpu, gi)->slices - slices_used(&gpu, gi->id)) / slices;
    }
    return status;
}

struct ci_wish {
    unsigned int gi;
    unsigned int kind;
    unsigned int *number;
};

static nvmlReturn_t add_compute(struct fake_gpu *gpu, const void *wish)
{
    const struct ci_wish *wanted = wish;
    const struct fake_gi *gi = gi_of(gpu, wanted->gi);
    if (gi == NULL) {
        return NVML_ERROR_NOT_FOUND;
    }
    const struct fake_gi_profile *profile = profile_of(gpu, gi);
    unsigned int slices = slices_in(profile, wanted->kind);
    if (slices == 0) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    if (slices_used(gpu, gi->id) + slices > profile->slices || gpu->mig_count == FAKE_MIGS_MAX) {
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    }
    unsigned int number = 0;
    while (ci_of(gpu, gi->id, number) != NULL) {
        number++;
    }
    struct fake_mig *mig = &gpu->migs[gpu->mig_count++];
    *mig = (struct fake_mig){.gpu_instance = gi->id, .compute_instance = number, .slices = slices};
    name_uuid(mig->uuid, gpu->uuid, gi->id, number);
    *wanted->number = number;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance, unsigned int id,
                                                           nvmlComputeInstance_t *out)
{
    struct fake_gpu gpu;
    struct fake_gi *gi = NULL;
    unsigned int number = 0;
    nvmlReturn_t status = begin_gi(__func__, instance, &gpu, &gi);
    if (status == NVML_SUCCESS) {
        struct ci_wish wish = {.gi = instance->id, .kind = id, .number = &number};
        status = change(gpu.uuid, add_compute, &wish);
    }
    if (status == NVML_SUCCESS) {
        *out = compute_instance_of(instance, number);
        status = *out == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned int id,
                                                         nvmlComputeInstance_t *out, unsigned int *count)
{
    struct fake_gpu gpu;
    struct fake_gi *gi = NULL;
    nvmlReturn_t status = begin_gi(__func__, instance, &gpu, &gi);
    unsigned int slices = status == NVML_SUCCESS ? slices_in(profile_of(&gpu, gi), id) : 0;
    if (status == NVML_SUCCESS && slices == 0) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    unsigned int found = 0;
    for (unsigned int i = 0; status == NVML_SUCCESS && i < gpu.mig_count; i++) {
        const struct fake_mig *mig = &gpu.migs[i];
        if (mig->gpu_instance == gi->id && mig->slices == slices) {
            out[found++] = compute_instance_of(instance, mig->compute_instance); /* the caller has room for all */
        }
    }
    if (status == NVML_SUCCESS) {
        *count = found;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned int id,
                                                            nvmlComputeInstance_t *out)
{
    struct fake_gpu gpu;
    struct fake_gi *gi = NULL;
    nvmlReturn_t status = begin_gi(__func__, instance, &gpu, &gi);
    if (status == NVML_SUCCESS && ci_of(&gpu, gi->id, id) == NULL) {
        status = NVML_ERROR_NOT_FOUND;
    }
    if (status == NVML_SUCCESS) {
        *out = compute_instance_of(instance, id);
        status = *out == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
    }
    return status;
}

/* Prologue of a call on a compute instance. */
static nvmlReturn_t begin_ci(const char *function, nvmlComputeInstance_t instance, struct fake_gpu *gpu,
                             struct fake_gi **gi, struct fake_mig **mig)
{
    if (instance < &compute_instances[0] || instance >= &compute_instances[HANDLES_MAX] || instance->parent == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    nvmlReturn_t status = begin_gi(function, instance->parent, gpu, gi);
    *mig = status == NVML_SUCCESS ? ci_of(gpu, (*gi)->id, instance->id) : NULL;
    return status == NVML_SUCCESS && *mig == NULL ? NVML_ERROR_NOT_FOUND : status;
}

NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    struct fake_gpu gpu;
    struct fake_gi *gi = NULL;
    struct fake_mig *mig = NULL;
    nvmlReturn_t status = begin_ci(__func__, instance, &gpu, &gi, &mig);
    if (status == NVML_SUCCESS) {
        unsigned int before = 0;
        for (const struct fake_mig *other = gpu.migs; other < mig; other++) {
            before += other->gpu_instance == gi->id ? other->slices : 0;
        }
        *info = (nvmlComputeInstanceInfo_t){
            .device = fake_device_of_uuid(gpu.uuid),
            .gpuInstance = instance->parent,
            .id = mig->compute_instance,
            .profileId = kind_of(profile_of(&gpu, gi), mig->slices),
            .placement = {.start = before, .size = mig->slices},
        };
    }
    return status;
}

struct ci_name {
    unsigned int gi;
    unsigned int ci;
};

static nvmlReturn_t remove_compute(struct fake_gpu *gpu, const void *wish)
{
    const struct ci_name *name = wish;
    struct fake_mig *mig = ci_of(gpu, name->gi, name->ci);
    if (mig == NULL) {
        return NVML_ERROR_NOT_FOUND;
    }
    if (fake_processes_of(gpu, name->gi, name->ci) > 0) {
        return NVML_ERROR_IN_USE;
    }
    *mig = gpu->migs[--gpu->mig_count];
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t instance)
{
    struct fake_gpu gpu;
    struct fake_gi *gi = NULL;
    struct fake_mig *mig = NULL;
    nvmlReturn_t status = begin_ci(__func__, instance, &gpu, &gi, &mig);
    if (status == NVML_SUCCESS) {
        struct ci_name name = {.gi = gi->id, .ci = mig->compute_instance};
        status = change(gpu.uuid, remove_compute, &name);
    }
    return status;
}
