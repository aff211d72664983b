/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libnvidia-ml.so.1 without hardware: the real symbols, struct layouts and error codes over the state of state.h.
 *
 * It reproduces the behavior of NVML that callers depend on. The device list is fixed by the first nvmlInit, and only
 * a full shutdown and a new init finds other devices; a handle stays valid and answers GPU_IS_LOST once its device is
 * lost; a wait on an event set that holds a lost device fails instead of timing out; functions that this file does not
 * define are absent from the library, as they are in an older driver.
 *
 * Configuration: environment FAKE_NVML_STATE names the state file. No file: DRIVER_NOT_LOADED. A malformed file:
 * UNKNOWN, and the reason on stderr once per change.
 *
 * Processes that use the fake CUDA driver on the same state appear with their memory and load (card.h), beside those
 * that the state names. A MIG instance is a device of its own; it has the facts of its card but its own memory,
 * processors and UUID, and is found by UUID or through its card.
 *
 * Locks taken here: `lock`, around all static data; never held while sleeping. Called with hooks active: no.
 */
#include "card.h"
#include "nvml_abi.h"
#include "nvml_parts.h"
#include "state.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HANDLES_MAX = 256, SETS_MAX = 256, POLL_MS = 5, EVENT_POLL_MS = 100 };

struct nvmlDevice_st {
    char uuid[FAKE_TEXT];
    unsigned int switches; /* of its card's mode, when a caller was given the handle last */
};

struct nvmlEventSet_st {
    bool in_use;
    unsigned long long last_seq;
    unsigned long long types_by_handle[HANDLES_MAX];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fake_state state;
static struct fake_stamp state_stamp;
static nvmlReturn_t state_status = NVML_ERROR_DRIVER_NOT_LOADED;
static unsigned int references;
static struct nvmlDevice_st handles[HANDLES_MAX];
static unsigned int handle_count;
static nvmlDevice_t visible[FAKE_GPUS_MAX];
static unsigned int visible_count;
static struct nvmlEventSet_st sets[SETS_MAX];
static struct card *card;

static void sleep_ms(unsigned int ms)
{
    struct timespec pause = {.tv_sec = ms / 1000U, .tv_nsec = (long)(ms % 1000U) * 1000000L};
    (void)nanosleep(&pause, NULL);
}

static unsigned long long now_ms(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (unsigned long long)now.tv_sec * 1000ULL + (unsigned long long)now.tv_nsec / 1000000ULL;
}

/* Caller holds the lock. */
static void refresh(void)
{
    const char *path = getenv("FAKE_NVML_STATE");
    struct fake_stamp seen;
    char problem[512];
    if (path == NULL || !fake_state_stamp(path, &seen)) {
        memset(&state_stamp, 0, sizeof state_stamp);
        state_status = NVML_ERROR_DRIVER_NOT_LOADED;
        return;
    }
    if (fake_same_stamp(&seen, &state_stamp)) {
        return;
    }
    state_stamp = seen;
    if (fake_state_read(path, &state, problem, sizeof problem)) {
        state_status = NVML_SUCCESS;
    } else {
        (void)fprintf(stderr, "fake nvml: %s\n", problem);
        memset(&state, 0, sizeof state);
        state_status = NVML_ERROR_UNKNOWN;
    }
}

/* Caller holds the lock. */
static const struct fake_fault *find_fault(const char *function, int gpu)
{
    for (unsigned int i = 0; i < state.fault_count; i++) {
        const struct fake_fault *fault = &state.faults[i];
        if (strcmp(fault->function, function) == 0 && (fault->gpu == -1 || fault->gpu == gpu)) {
            return fault;
        }
    }
    return NULL;
}

/* Caller holds the lock, which is given up while sleeping. Returns what the function must answer. */
static nvmlReturn_t apply_fault(const char *function, int gpu)
{
    unsigned long long start = now_ms();
    for (;;) {
        const struct fake_fault *fault = find_fault(function, gpu);
        if (fault == NULL) {
            return NVML_SUCCESS;
        }
        if (now_ms() - start >= fault->hang_ms) {
            return fault->result;
        }
        (void)pthread_mutex_unlock(&lock);
        sleep_ms(POLL_MS);
        (void)pthread_mutex_lock(&lock);
        refresh();
    }
}

/* Caller holds the lock. NULL: this UUID names no instance of that device. */
static const struct fake_mig *mig_of_uuid(const struct fake_gpu *gpu, const char *uuid)
{
    for (unsigned int i = 0; i < gpu->mig_count; i++) {
        if (strcmp(gpu->migs[i].uuid, uuid) == 0) {
            return &gpu->migs[i];
        }
    }
    return NULL;
}

/* Caller holds the lock. The row of the device, or of the device whose instance this is. */
static int gpu_of_uuid(const char *uuid)
{
    for (unsigned int i = 0; i < state.gpu_count; i++) {
        if (strcmp(state.gpus[i].uuid, uuid) == 0 || mig_of_uuid(&state.gpus[i], uuid) != NULL) {
            return (int)i;
        }
    }
    return -1;
}

/* Caller holds the lock. */
static nvmlDevice_t handle_of_uuid(const char *uuid)
{
    for (unsigned int i = 0; i < handle_count; i++) {
        if (strcmp(handles[i].uuid, uuid) == 0) {
            return &handles[i];
        }
    }
    if (handle_count == HANDLES_MAX) {
        return NULL;
    }
    memcpy(handles[handle_count].uuid, uuid, strlen(uuid) + 1);
    return &handles[handle_count++];
}

/* Caller holds the lock. */
static nvmlReturn_t ready(void)
{
    refresh();
    if (references == 0) {
        return NVML_ERROR_UNINITIALIZED;
    }
    return state_status;
}

/* Caller holds the lock. On success `*gpu` is the row of the device in the state. */
static nvmlReturn_t locate(nvmlDevice_t handle, int *gpu)
{
    if (handle < &handles[0] || handle >= &handles[handle_count]) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    *gpu = gpu_of_uuid(handle->uuid);
    if (*gpu < 0 || state.gpus[*gpu].lost) {
        return NVML_ERROR_GPU_IS_LOST;
    }
    return handle->switches == state.gpus[*gpu].mig_switches ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

/* Caller holds the lock. The handle as a caller gets it now. */
static nvmlDevice_t given(nvmlDevice_t handle)
{
    int gpu = handle == NULL ? -1 : gpu_of_uuid(handle->uuid);
    if (gpu >= 0) {
        handle->switches = state.gpus[gpu].mig_switches;
    }
    return handle;
}

/* Prologue of every function without a device. */
static nvmlReturn_t begin(const char *function)
{
    (void)pthread_mutex_lock(&lock);
    nvmlReturn_t status = ready();
    if (status == NVML_SUCCESS) {
        status = apply_fault(function, -1);
    }
    (void)pthread_mutex_unlock(&lock);
    return status;
}

/* Queries of an instance return the card's facts, except for these. */
static void become_instance(struct fake_gpu *gpu, const struct fake_mig *mig)
{
    memcpy(gpu->uuid, mig->uuid, sizeof gpu->uuid);
    gpu->memory_total = mig->memory_total;
    gpu->memory_used = 0;
    gpu->memory_reserved = 0;
    gpu->sm_count = mig->sm_count;
    gpu->is_instance = true;
    gpu->gpu_instance = mig->gpu_instance;
    gpu->compute_instance = mig->compute_instance;
    unsigned int all = gpu->process_count;
    gpu->process_count = 0;
    for (unsigned int i = 0; i < all; i++) {
        const struct fake_process *process = &gpu->processes[i];
        if (process->gpu_instance == mig->gpu_instance && process->compute_instance == mig->compute_instance) {
            gpu->processes[gpu->process_count++] = *process;
        }
    }
}

/* Prologue of every function on one device: copies the device's present state to `out`. */
static nvmlReturn_t begin_device(const char *function, nvmlDevice_t handle, struct fake_gpu *out)
{
    int gpu = -1;
    (void)pthread_mutex_lock(&lock);
    nvmlReturn_t status = ready();
    if (status == NVML_SUCCESS) {
        status = locate(handle, &gpu);
    }
    if (status == NVML_SUCCESS) {
        status = apply_fault(function, gpu);
    }
    if (status == NVML_SUCCESS) {
        status = locate(handle, &gpu); /* it may have been lost while the fault slept */
    }
    if (status == NVML_SUCCESS) {
        *out = state.gpus[gpu];
        const struct fake_mig *mig = mig_of_uuid(&state.gpus[gpu], handle->uuid);
        if (mig != NULL) {
            become_instance(out, mig);
        }
    }
    (void)pthread_mutex_unlock(&lock);
    return status;
}

nvmlReturn_t fake_begin_device(const char *function, nvmlDevice_t handle, struct fake_gpu *out)
{
    return begin_device(function, handle, out);
}

nvmlDevice_t fake_device_of_uuid(const char *uuid)
{
    (void)pthread_mutex_lock(&lock);
    nvmlDevice_t handle = handle_of_uuid(uuid);
    (void)pthread_mutex_unlock(&lock);
    return handle;
}

static nvmlReturn_t copy_text(const char *text, char *out, unsigned int size)
{
    size_t length = strlen(text);
    if (out == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    if (length + 1 > size) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    memcpy(out, text, length + 1);
    return NVML_SUCCESS;
}

/* ---- life of the library ---- */

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned int flags);
NVML_API nvmlReturn_t nvmlInit_v2(void);
NVML_API nvmlReturn_t nvmlShutdown(void);
NVML_API const char *nvmlErrorString(nvmlReturn_t result);

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    (void)pthread_mutex_lock(&lock);
    refresh();
    nvmlReturn_t status = state_status;
    if (status == NVML_SUCCESS) {
        status = state.init_error != 0 ? state.init_error : apply_fault("nvmlInitWithFlags", -1);
    }
    if (status == NVML_SUCCESS && references == 0) {
        visible_count = 0;
        for (unsigned int i = 0; i < state.gpu_count; i++) {
            nvmlDevice_t handle = handle_of_uuid(state.gpus[i].uuid);
            if (handle != NULL) {
                visible[visible_count++] = handle;
            }
        }
    }
    if (status == NVML_SUCCESS) {
        references++;
    }
    (void)pthread_mutex_unlock(&lock);
    return status;
}

NVML_API nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

NVML_API nvmlReturn_t nvmlShutdown(void)
{
    nvmlReturn_t status = NVML_SUCCESS;
    (void)pthread_mutex_lock(&lock);
    if (references == 0) {
        status = NVML_ERROR_UNINITIALIZED;
    } else if (--references == 0) {
        for (unsigned int i = 0; i < SETS_MAX; i++) {
            sets[i].in_use = false;
        }
    }
    (void)pthread_mutex_unlock(&lock);
    return status;
}

NVML_API const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        "success",
        "library not initialised",
        "invalid argument",
        "not supported",
        "no permission",
        "already initialised",
        "not found",
        "buffer too small",
        "external power cable missing",
        "driver not loaded",
        "timed out",
        "interrupt problem",
        "library not found",
        "function not found",
        "infoROM corrupted",
        "GPU is lost",
        "GPU needs a reset",
        "refused by the operating system",
        "driver and library versions differ",
        "in use",
        "out of memory",
        "no data",
        "not supported while vGPU ECC is on",
        "insufficient resources",
        "clock not supported",
        "struct version differs",
        "deprecated",
        "not ready",
        "GPU not found",
        "invalid state",
    };
    return result < sizeof texts / sizeof texts[0] ? texts[result] : "unknown error";
}

/* ---- system ---- */

NVML_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length);
NVML_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length);
NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version);

/* `text` points into the state, which another thread may reload: copied under the lock. */
static nvmlReturn_t system_text(const char *function, const char *text, char *out, unsigned int length)
{
    nvmlReturn_t status = begin(function);
    if (status == NVML_SUCCESS) {
        (void)pthread_mutex_lock(&lock);
        status = copy_text(text, out, length);
        (void)pthread_mutex_unlock(&lock);
    }
    return status;
}

NVML_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    return system_text(__func__, state.driver_version, version, length);
}

NVML_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    return system_text(__func__, state.nvml_version, version, length);
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    nvmlReturn_t status = begin(__func__);
    if (status == NVML_SUCCESS) {
        (void)pthread_mutex_lock(&lock);
        *version = state.cuda_version;
        (void)pthread_mutex_unlock(&lock);
    }
    return status;
}

/* ---- enumeration ---- */

NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count);
NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device);
NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device);
NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device);
NVML_API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index);

NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    nvmlReturn_t status = begin(__func__);
    if (status == NVML_SUCCESS) {
        *count = visible_count;
    }
    return status;
}

/* Hands out `handle`, or the error that its device answers with. */
static nvmlReturn_t give_handle(const char *function, nvmlDevice_t handle, nvmlDevice_t *out)
{
    struct fake_gpu gpu;
    (void)pthread_mutex_lock(&lock);
    (void)given(handle);
    (void)pthread_mutex_unlock(&lock);
    nvmlReturn_t status = begin_device(function, handle, &gpu);
    if (status == NVML_SUCCESS) {
        *out = handle;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    (void)pthread_mutex_lock(&lock);
    nvmlReturn_t status = ready();
    nvmlDevice_t handle = NULL;
    if (status == NVML_SUCCESS && index >= visible_count) {
        status = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (status == NVML_SUCCESS) {
        handle = visible[index];
    }
    (void)pthread_mutex_unlock(&lock);
    return status == NVML_SUCCESS ? give_handle(__func__, handle, device) : status;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    nvmlDevice_t handle = NULL;
    (void)pthread_mutex_lock(&lock);
    nvmlReturn_t status = ready();
    for (unsigned int i = 0; uuid != NULL && i < visible_count; i++) {
        int gpu = gpu_of_uuid(visible[i]->uuid);
        if (strcmp(visible[i]->uuid, uuid) == 0) {
            handle = visible[i];
        } else if (gpu >= 0 && mig_of_uuid(&state.gpus[gpu], uuid) != NULL) {
            handle = handle_of_uuid(uuid);
        }
    }
    (void)pthread_mutex_unlock(&lock);
    if (status == NVML_SUCCESS && handle == NULL) {
        status = uuid == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_FOUND;
    }
    return status == NVML_SUCCESS ? give_handle(__func__, handle, device) : status;
}

struct bus_address {
    unsigned int domain;
    unsigned int bus;
    unsigned int device;
};

static bool parse_bus_id(const char *text, struct bus_address *out)
{
    return text != NULL && sscanf(text, "%x:%x:%x", &out->domain, &out->bus, &out->device) == 3;
}

static bool same_address(const char *a, const char *b)
{
    struct bus_address left;
    struct bus_address right;
    return parse_bus_id(a, &left) && parse_bus_id(b, &right) && left.domain == right.domain && left.bus == right.bus &&
           left.device == right.device;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    nvmlDevice_t handle = NULL;
    struct bus_address address;
    if (!parse_bus_id(bus_id, &address)) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    (void)pthread_mutex_lock(&lock);
    nvmlReturn_t status = ready();
    for (unsigned int i = 0; i < visible_count; i++) {
        int gpu = gpu_of_uuid(visible[i]->uuid);
        if (gpu >= 0 && same_address(state.gpus[gpu].bus_id, bus_id)) {
            handle = visible[i];
        }
    }
    (void)pthread_mutex_unlock(&lock);
    if (status == NVML_SUCCESS && handle == NULL) {
        status = NVML_ERROR_NOT_FOUND;
    }
    return status == NVML_SUCCESS ? give_handle(__func__, handle, device) : status;
}

NVML_API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    for (unsigned int i = 0; status == NVML_SUCCESS && i < visible_count; i++) {
        if (visible[i] == device) {
            *index = i;
            return NVML_SUCCESS;
        }
    }
    return status == NVML_SUCCESS ? NVML_ERROR_NOT_FOUND : status;
}

/* ---- plain facts of one device ---- */

#define TEXT_QUERY(symbol, field)                                                                                      \
    NVML_API nvmlReturn_t symbol(nvmlDevice_t device, char *out, unsigned int length);                                 \
    NVML_API nvmlReturn_t symbol(nvmlDevice_t device, char *out, unsigned int length)                                  \
    {                                                                                                                  \
        struct fake_gpu gpu;                                                                                           \
        nvmlReturn_t status = begin_device(__func__, device, &gpu);                                                    \
        return status == NVML_SUCCESS ? copy_text(gpu.field, out, length) : status;                                    \
    }

#define UINT_QUERY(symbol, field)                                                                                      \
    NVML_API nvmlReturn_t symbol(nvmlDevice_t device, unsigned int *out);                                              \
    NVML_API nvmlReturn_t symbol(nvmlDevice_t device, unsigned int *out)                                               \
    {                                                                                                                  \
        struct fake_gpu gpu;                                                                                           \
        nvmlReturn_t status = begin_device(__func__, device, &gpu);                                                    \
        if (status == NVML_SUCCESS) {                                                                                  \
            *out = gpu.field;                                                                                          \
        }                                                                                                              \
        return status;                                                                                                 \
    }

TEXT_QUERY(nvmlDeviceGetUUID, uuid)
TEXT_QUERY(nvmlDeviceGetName, name)
UINT_QUERY(nvmlDeviceGetMinorNumber, minor)
UINT_QUERY(nvmlDeviceGetBrand, brand)
UINT_QUERY(nvmlDeviceGetArchitecture, architecture)
UINT_QUERY(nvmlDeviceGetPowerUsage, power_mw)
UINT_QUERY(nvmlDeviceGetEnforcedPowerLimit, power_limit_mw)
UINT_QUERY(nvmlDeviceGetRetiredPagesPendingStatus, retired_pending)

NVML_API nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length);
NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci);
NVML_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor);
NVML_API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *celsius);
NVML_API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *mhz);
NVML_API nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *out);

NVML_API nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS && gpu.serial[0] == '\0') {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    return status == NVML_SUCCESS ? copy_text(gpu.serial, serial, length) : status;
}

static void fill_pci(nvmlPciInfo_t *pci, const char *bus_id)
{
    struct bus_address address = {0};
    memset(pci, 0, sizeof *pci);
    (void)parse_bus_id(bus_id, &address);
    pci->domain = address.domain;
    pci->bus = address.bus;
    pci->device = address.device;
    (void)snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", address.domain, address.bus & 0xFFU,
                   address.device & 0xFFU);
    (void)snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", address.domain & 0xFFFFU,
                   address.bus & 0xFFU, address.device & 0xFFU);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS) {
        fill_pci(pci, gpu.bus_id);
        pci->pciDeviceId = gpu.pci_device_id;
        pci->pciSubSystemId = gpu.pci_subsystem_id;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS) {
        *major = gpu.capability_major;
        *minor = gpu.capability_minor;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *celsius)
{
    struct fake_gpu gpu;
    if (sensor != 0) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS) {
        *celsius = gpu.temperature_c;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *mhz)
{
    enum { CLOCK_GRAPHICS = 0, CLOCK_SM = 1, CLOCK_MEMORY = 2 };
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status != NVML_SUCCESS) {
        return status;
    }
    switch (type) {
    case CLOCK_GRAPHICS:
    case CLOCK_SM:
        *mhz = gpu.clock_sm_mhz;
        return NVML_SUCCESS;
    case CLOCK_MEMORY:
        *mhz = gpu.clock_memory_mhz;
        return NVML_SUCCESS;
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

NVML_API nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *out)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status != NVML_SUCCESS) {
        return status;
    }
    if (!gpu.mig_capable) {
        return NVML_ERROR_NOT_SUPPORTED; /* parts without MIG never implemented it */
    }
    memset(out, 0, sizeof *out);
    out->multiprocessorCount = gpu.sm_count;
    out->memorySizeMB = gpu.memory_total >> 20U;
    return NVML_SUCCESS;
}

/* ---- memory, load, processes ---- */

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory);
NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory);
NVML_API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *out);
NVML_API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                      unsigned int *count, unsigned long long last_seen_us);

enum { PROCESSES_MAX = FAKE_PROCESSES_MAX + CARD_SLOTS };

/* Processes of a device: those that the state names, then those that use the fake CUDA driver. */
struct processes {
    unsigned int count;
    struct fake_process at[PROCESSES_MAX];
};

/* The card exists once a process has used the CUDA driver; it is never closed again (card.h). NULL: not yet. */
static struct card *open_card(void)
{
    char path[4096];
    const char *state_path = getenv("FAKE_NVML_STATE");
    (void)pthread_mutex_lock(&lock);
    if (card == NULL && state_path != NULL && snprintf(path, sizeof path, "%s.card", state_path) < (int)sizeof path &&
        access(path, F_OK) == 0) {
        card = card_open(state_path);
    }
    (void)pthread_mutex_unlock(&lock);
    return card;
}

static unsigned long long cuda_bytes(const char *uuid)
{
    struct card *at = open_card();
    int device = at == NULL ? -1 : card_device_known(at, uuid);
    if (device < 0) {
        return 0;
    }
    unsigned long long used = card_used(at, (unsigned int)device, true);
    return used + card_resident(at, (unsigned int)device);
}

unsigned long long fake_moved_bytes(const char *uuid)
{
    struct card *at = open_card();
    int device = at == NULL ? -1 : card_device_known(at, uuid);
    return device < 0 ? 0 : card_moved(at, (unsigned int)device);
}

static unsigned long long now_us(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000ULL + (unsigned long long)now.tv_nsec / 1000ULL;
}

/* Computing the load is slow, and few callers need it. */
/* Processes are listed from their first context on, with all that they have; one may have physical memory before. One
   whose memory is on the host is not. */
static void add_cuda_processes(struct processes *list, const char *uuid, unsigned int gpu_instance,
                               unsigned int compute_instance, bool with_load)
{
    struct card *at = open_card();
    int device = at == NULL ? -1 : card_device_known(at, uuid);
    for (unsigned int slot = 0; device >= 0 && slot < at->header.slots_seen; slot++) {
        const struct card_share *share = &at->shares[slot][device];
        uint64_t used = __atomic_load_n(&share->used, __ATOMIC_ACQUIRE) +
                        __atomic_load_n(&at->pages[slot][device].resident, __ATOMIC_ACQUIRE);
        uint64_t contexts = __atomic_load_n(&share->contexts, __ATOMIC_ACQUIRE);
        bool is_listed = (contexts != 0 || share->launches != 0) &&
                         __atomic_load_n(&at->slots[slot].is_parked, __ATOMIC_ACQUIRE) == 0;
        unsigned int pid = is_listed ? card_pid(at, slot) : 0;
        if (pid == 0) {
            continue;
        }
        list->at[list->count++] = (struct fake_process){
            .pid = pid,
            .used_bytes = used,
            .sm_util = with_load ? card_recent_pct(at, slot, (unsigned int)device, 1000000000ULL) : 0,
            .mem_util = 0,
            .gpu_instance = gpu_instance,
            .compute_instance = compute_instance,
            .time_us = now_us(),
        };
    }
}

static struct processes *list_processes(const struct fake_gpu *gpu, bool with_load)
{
    struct processes *list = malloc(sizeof *list);
    if (list == NULL) {
        return NULL;
    }
    list->count = gpu->process_count;
    memcpy(list->at, gpu->processes, gpu->process_count * sizeof list->at[0]);
    if (gpu->is_instance) {
        add_cuda_processes(list, gpu->uuid, gpu->gpu_instance, gpu->compute_instance, with_load);
        return list;
    }
    add_cuda_processes(list, gpu->uuid, NVML_INSTANCE_NONE, NVML_INSTANCE_NONE, with_load);
    for (unsigned int i = 0; i < gpu->mig_count; i++) {
        const struct fake_mig *mig = &gpu->migs[i];
        add_cuda_processes(list, mig->uuid, mig->gpu_instance, mig->compute_instance, with_load);
    }
    return list;
}

unsigned int fake_processes_of(const struct fake_gpu *gpu, unsigned int gpu_instance, unsigned int compute_instance)
{
    struct processes *list = list_processes(gpu, false);
    unsigned int found = 0;
    for (unsigned int i = 0; list != NULL && i < list->count; i++) {
        const struct fake_process *process = &list->at[i];
        found += process->gpu_instance == gpu_instance &&
                         (compute_instance == NVML_INSTANCE_NONE || process->compute_instance == compute_instance)
                     ? 1U
                     : 0U;
    }
    free(list);
    return found;
}

/* Process memory counts as used even when the state's own figure is smaller. */
static unsigned long long used_bytes(const struct fake_gpu *gpu)
{
    unsigned long long sum = 0;
    for (unsigned int i = 0; i < gpu->process_count; i++) {
        sum += gpu->processes[i].used_bytes;
    }
    unsigned long long used = (gpu->memory_used > sum ? gpu->memory_used : sum) + cuda_bytes(gpu->uuid);
    for (unsigned int i = 0; !gpu->is_instance && i < gpu->mig_count; i++) {
        used += cuda_bytes(gpu->migs[i].uuid);
    }
    return used < gpu->memory_total ? used : gpu->memory_total;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS && gpu.unified_memory) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    if (status == NVML_SUCCESS) {
        /* Version 1 has no field for the reserve and reports it as used. */
        unsigned long long used = used_bytes(&gpu) + gpu.memory_reserved;
        memory->total = gpu.memory_total;
        memory->used = used < gpu.memory_total ? used : gpu.memory_total;
        memory->free = memory->total - memory->used;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    struct fake_gpu gpu;
    if (memory->version != NVML_MEMORY_V2_VERSION) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS && gpu.unified_memory) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    if (status == NVML_SUCCESS) {
        unsigned long long taken = used_bytes(&gpu) + gpu.memory_reserved;
        memory->total = gpu.memory_total;
        memory->reserved = gpu.memory_reserved;
        memory->used = used_bytes(&gpu);
        memory->free = taken < gpu.memory_total ? gpu.memory_total - taken : 0;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *out)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS && gpu.mig_current != 0) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    if (status == NVML_SUCCESS) {
        struct processes *list = list_processes(&gpu, true);
        unsigned int sum = gpu.gpu_util;
        for (unsigned int i = gpu.process_count; list != NULL && i < list->count; i++) {
            sum += list->at[i].sm_util;
        }
        free(list);
        out->gpu = sum < 100 ? sum : 100;
        out->memory = gpu.memory_util;
    }
    return status;
}

/* The three kinds of process lists have one form; only the compute list has entries here. */
static nvmlReturn_t processes(const char *function, nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos,
                              bool of_kind)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(function, device, &gpu);
    if (status != NVML_SUCCESS) {
        return status;
    }
    struct processes *list = list_processes(&gpu, false);
    if (list == NULL || count == NULL) {
        free(list);
        return count == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_MEMORY;
    }
    unsigned int found = of_kind ? list->count : 0;
    unsigned int room = infos == NULL ? 0 : *count;
    *count = found;
    if (room < found) {
        free(list);
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    for (unsigned int i = 0; i < found; i++) {
        infos[i] = (nvmlProcessInfo_t){
            .pid = list->at[i].pid,
            .usedGpuMemory = list->at[i].used_bytes,
            .gpuInstanceId = list->at[i].gpu_instance,
            .computeInstanceId = list->at[i].compute_instance,
        };
    }
    free(list);
    return NVML_SUCCESS;
}

static nvmlReturn_t processes_v1(const char *function, nvmlDevice_t device, unsigned int *count,
                                 nvmlProcessInfo_v1_t *infos, bool of_kind)
{
    unsigned int room = count == NULL || infos == NULL ? 0 : *count;
    nvmlProcessInfo_t *wide = room == 0 ? NULL : calloc(room, sizeof *wide);
    nvmlReturn_t status = processes(function, device, count, wide, of_kind);
    for (unsigned int i = 0; status == NVML_SUCCESS && i < *count; i++) {
        infos[i] = (nvmlProcessInfo_v1_t){.pid = wide[i].pid, .usedGpuMemory = wide[i].usedGpuMemory};
    }
    free(wide);
    return status;
}

#define PROCESS_LIST(name, of_kind)                                                                                    \
    NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *infos);                 \
    NVML_API nvmlReturn_t name##_v2(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos);               \
    NVML_API nvmlReturn_t name##_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos);               \
    NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *infos)                  \
    {                                                                                                                  \
        return processes_v1(__func__, device, count, infos, of_kind);                                                  \
    }                                                                                                                  \
    NVML_API nvmlReturn_t name##_v2(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)                \
    {                                                                                                                  \
        return processes(__func__, device, count, infos, of_kind);                                                     \
    }                                                                                                                  \
    NVML_API nvmlReturn_t name##_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)                \
    {                                                                                                                  \
        return processes(__func__, device, count, infos, of_kind);                                                     \
    }
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, true)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, false)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, false)

NVML_API nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *out);
NVML_API nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *out)
{
    if (out == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    if (out->version != NVML_PROCESS_DETAIL_VERSION) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    unsigned int room = out->procArray == NULL ? 0 : out->numProcArrayEntries;
    nvmlProcessInfo_t *infos = room == 0 ? NULL : calloc(room, sizeof *infos);
    nvmlReturn_t status = processes(__func__, device, &out->numProcArrayEntries, infos, out->mode == 0);
    for (unsigned int i = 0; status == NVML_SUCCESS && i < out->numProcArrayEntries; i++) {
        out->procArray[i] = (nvmlProcessDetail_v1_t){
            .pid = infos[i].pid,
            .usedGpuMemory = infos[i].usedGpuMemory,
            .gpuInstanceId = infos[i].gpuInstanceId,
            .computeInstanceId = infos[i].computeInstanceId,
        };
    }
    free(infos);
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                      unsigned int *count, unsigned long long last_seen_us)
{
    struct fake_gpu gpu;
    unsigned int found = 0;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status != NVML_SUCCESS) {
        return status;
    }
    if (gpu.mig_current != 0) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    struct processes *list = list_processes(&gpu, true);
    if (list == NULL) {
        return NVML_ERROR_MEMORY;
    }
    for (unsigned int i = 0; i < list->count; i++) {
        found += list->at[i].time_us > last_seen_us ? 1U : 0U;
    }
    unsigned int room = samples == NULL ? 0 : *count;
    *count = found;
    if (found == 0 || room < found) {
        free(list);
        return found == 0 ? NVML_ERROR_NOT_FOUND : NVML_ERROR_INSUFFICIENT_SIZE;
    }
    for (unsigned int i = 0, at = 0; i < list->count; i++) {
        const struct fake_process *process = &list->at[i];
        if (process->time_us > last_seen_us) {
            samples[at] = (nvmlProcessUtilizationSample_t){
                .pid = process->pid,
                .timeStamp = process->time_us,
                .smUtil = process->sm_util,
                .memUtil = process->mem_util,
            };
            at++;
        }
    }
    free(list);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *out);
NVML_API nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *out)
{
    if (out == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    if (out->version != NVML_PROCESSES_UTILIZATION_VERSION) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    struct processes *list = status == NVML_SUCCESS ? list_processes(&gpu, true) : NULL;
    unsigned int room = out->procUtilArray == NULL ? 0 : out->processSamplesCount;
    unsigned int found = 0;
    for (unsigned int i = 0; list != NULL && i < list->count; i++) {
        const struct fake_process *process = &list->at[i];
        if (process->time_us > out->lastSeenTimeStamp && found++ < room) {
            out->procUtilArray[found - 1] = (nvmlProcessUtilizationInfo_v1_t){
                .timeStamp = process->time_us,
                .pid = process->pid,
                .smUtil = process->sm_util,
                .memUtil = process->mem_util,
            };
        }
    }
    free(list);
    if (status == NVML_SUCCESS) {
        out->processSamplesCount = found;
        status = found == 0 ? NVML_ERROR_NOT_FOUND : found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
    }
    return status;
}

/* ---- MIG ---- */

NVML_API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending);
NVML_API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count);
NVML_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *out);
NVML_API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig);

NVML_API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS && !gpu.mig_capable) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    if (status == NVML_SUCCESS) {
        *current = gpu.mig_current;
        *pending = gpu.mig_pending;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS) {
        *count = gpu.mig_capable ? gpu.mig_max : 0;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *out)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status != NVML_SUCCESS) {
        return status;
    }
    if (!gpu.mig_capable || gpu.mig_current == 0) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    if (index >= gpu.mig_count) {
        return index < gpu.mig_max ? NVML_ERROR_NOT_FOUND : NVML_ERROR_INVALID_ARGUMENT;
    }
    (void)pthread_mutex_lock(&lock);
    *out = given(handle_of_uuid(gpu.migs[index].uuid));
    (void)pthread_mutex_unlock(&lock);
    return *out == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *out);
NVML_API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *out)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS && !gpu.is_instance) {
        status = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (status == NVML_SUCCESS) {
        (void)pthread_mutex_lock(&lock);
        int row = gpu_of_uuid(gpu.uuid);
        *out = row < 0 ? NULL : given(handle_of_uuid(state.gpus[row].uuid));
        (void)pthread_mutex_unlock(&lock);
        status = *out == NULL ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS) {
        *is_mig = gpu.is_instance ? 1 : 0;
    }
    return status;
}

#define INSTANCE_QUERY(symbol, field)                                                                                  \
    NVML_API nvmlReturn_t symbol(nvmlDevice_t device, unsigned int *out);                                              \
    NVML_API nvmlReturn_t symbol(nvmlDevice_t device, unsigned int *out)                                               \
    {                                                                                                                  \
        struct fake_gpu gpu;                                                                                           \
        nvmlReturn_t status = begin_device(__func__, device, &gpu);                                                    \
        if (status == NVML_SUCCESS && !gpu.is_instance) {                                                              \
            status = NVML_ERROR_NOT_SUPPORTED;                                                                         \
        }                                                                                                              \
        if (status == NVML_SUCCESS) {                                                                                  \
            *out = gpu.field;                                                                                          \
        }                                                                                                              \
        return status;                                                                                                 \
    }
INSTANCE_QUERY(nvmlDeviceGetGpuInstanceId, gpu_instance)
INSTANCE_QUERY(nvmlDeviceGetComputeInstanceId, compute_instance)

/* ---- topology ---- */

NVML_API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, unsigned int *level);
NVML_API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, unsigned int index, unsigned int *out);
NVML_API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *active);
NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci);
NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, unsigned int *type);
NVML_API nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node);
NVML_API nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size, unsigned long *nodes,
                                                  unsigned int scope);
NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int size, unsigned long *cpus);
NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int size, unsigned long *cpus,
                                                          unsigned int scope);

NVML_API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, unsigned int *level)
{
    struct fake_gpu left;
    struct fake_gpu right;
    nvmlReturn_t status = begin_device(__func__, a, &left);
    if (status == NVML_SUCCESS) {
        status = begin_device(__func__, b, &right);
    }
    if (status == NVML_SUCCESS) {
        int row = -1;
        int column = -1;
        (void)pthread_mutex_lock(&lock);
        status = locate(a, &row);
        if (status == NVML_SUCCESS) {
            status = locate(b, &column);
        }
        if (status == NVML_SUCCESS) {
            *level = state.levels[row][column];
        }
        (void)pthread_mutex_unlock(&lock);
    }
    return status;
}

static bool linked(const struct fake_gpu *a, const struct fake_gpu *b)
{
    bool a_switched = false;
    bool b_switched = false;
    for (unsigned int i = 0; i < FAKE_LINKS_MAX; i++) {
        const struct fake_link *link = &a->links[i];
        if (link->active && link->remote_type == NVML_NVLINK_DEVICE_TYPE_GPU &&
            same_address(link->remote_bus_id, b->bus_id)) {
            return true;
        }
        a_switched = a_switched || (link->active && link->remote_type == NVML_NVLINK_DEVICE_TYPE_SWITCH);
        b_switched = b_switched || (b->links[i].active && b->links[i].remote_type == NVML_NVLINK_DEVICE_TYPE_SWITCH);
    }
    return a_switched && b_switched;
}

NVML_API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, unsigned int index, unsigned int *out)
{
    struct fake_gpu left;
    struct fake_gpu right;
    unsigned int level = NVML_TOPOLOGY_SYSTEM;
    if (index >= NVML_P2P_CAPS_INDEX_UNKNOWN) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    nvmlReturn_t status = begin_device(__func__, a, &left);
    if (status == NVML_SUCCESS) {
        status = begin_device(__func__, b, &right);
    }
    if (status == NVML_SUCCESS) {
        status = nvmlDeviceGetTopologyCommonAncestor(a, b, &level);
    }
    if (status != NVML_SUCCESS) {
        return status;
    }
    if (linked(&left, &right)) {
        *out = NVML_P2P_STATUS_OK;
    } else if (index == NVML_P2P_CAPS_INDEX_NVLINK) {
        *out = NVML_P2P_STATUS_NOT_SUPPORTED;
    } else {
        *out = level < NVML_TOPOLOGY_SYSTEM ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED;
    }
    return NVML_SUCCESS;
}

/* Common part of the link queries: the number must exist on this part. */
static nvmlReturn_t begin_link(const char *function, nvmlDevice_t device, unsigned int number, struct fake_link *out)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(function, device, &gpu);
    if (status != NVML_SUCCESS) {
        return status;
    }
    if (number >= NVML_NVLINK_MAX_LINKS) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    if (!gpu.links[number].present) {
        bool any = false;
        for (unsigned int i = 0; i < FAKE_LINKS_MAX; i++) {
            any = any || gpu.links[i].present;
        }
        return any ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
    }
    *out = gpu.links[number];
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *active)
{
    struct fake_link found;
    nvmlReturn_t status = begin_link(__func__, device, link, &found);
    if (status == NVML_SUCCESS) {
        *active = found.active ? 1 : 0;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
    struct fake_link found;
    nvmlReturn_t status = begin_link(__func__, device, link, &found);
    if (status == NVML_SUCCESS) {
        fill_pci(pci, found.remote_bus_id);
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, unsigned int *type)
{
    struct fake_link found;
    nvmlReturn_t status = begin_link(__func__, device, link, &found);
    if (status == NVML_SUCCESS) {
        *type = found.remote_type;
    }
    return status;
}

/* The GPU's own memory node exists on coherent platforms only; here it never does. */
NVML_API nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node)
{
    struct fake_gpu gpu;
    (void)node;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    return status == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : status;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size, unsigned long *nodes,
                                                  unsigned int scope)
{
    struct fake_gpu gpu;
    (void)scope;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status != NVML_SUCCESS) {
        return status;
    }
    if (gpu.numa < 0) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    if (size == 0 || (unsigned int)gpu.numa >= size * 64U) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    memset(nodes, 0, size * sizeof *nodes);
    nodes[gpu.numa / 64] |= 1UL << (unsigned int)(gpu.numa % 64);
    return NVML_SUCCESS;
}

static nvmlReturn_t copy_cpus(const struct fake_gpu *gpu, unsigned int size, unsigned long *cpus)
{
    if (size == 0) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (unsigned int i = 0; i < size; i++) {
        cpus[i] = i < FAKE_CPU_WORDS ? (unsigned long)gpu->cpus[i] : 0;
    }
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int size, unsigned long *cpus)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    return status == NVML_SUCCESS ? copy_cpus(&gpu, size, cpus) : status;
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int size, unsigned long *cpus,
                                                          unsigned int scope)
{
    struct fake_gpu gpu;
    (void)scope;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    return status == NVML_SUCCESS ? copy_cpus(&gpu, size, cpus) : status;
}

/* ---- memory errors ---- */

NVML_API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending);
NVML_API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned int error_type,
                                                  unsigned int counter_type, unsigned long long *count);
NVML_API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                                unsigned int *pending, unsigned int *failed);

NVML_API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS && !gpu.ecc_supported) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    if (status == NVML_SUCCESS) {
        *current = gpu.ecc_current;
        *pending = gpu.ecc_pending;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned int error_type,
                                                  unsigned int counter_type, unsigned long long *count)
{
    struct fake_gpu gpu;
    if (error_type > 1 || counter_type > 1) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS && gpu.ecc_current == 0) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    if (status == NVML_SUCCESS) {
        *count = error_type == 0 ? gpu.ecc_corrected : gpu.ecc_uncorrected;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                                unsigned int *pending, unsigned int *failed)
{
    enum { ARCHITECTURE_AMPERE = 7 };
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS && gpu.architecture < ARCHITECTURE_AMPERE) {
        status = NVML_ERROR_NOT_SUPPORTED;
    }
    if (status == NVML_SUCCESS) {
        *corrected = gpu.remapped_corrected;
        *uncorrected = gpu.remapped_uncorrected;
        *pending = gpu.remapped_pending;
        *failed = gpu.remapped_failure;
    }
    return status;
}

/* ---- events ---- */

NVML_API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types);
NVML_API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set);
NVML_API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set);
NVML_API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms);
NVML_API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set);

NVML_API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status == NVML_SUCCESS) {
        *types = gpu.supported_events;
    }
    return status;
}

NVML_API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    nvmlReturn_t status = begin(__func__);
    if (status != NVML_SUCCESS) {
        return status;
    }
    status = NVML_ERROR_MEMORY;
    (void)pthread_mutex_lock(&lock);
    for (unsigned int i = 0; i < SETS_MAX; i++) {
        if (!sets[i].in_use) {
            memset(&sets[i], 0, sizeof sets[i]);
            sets[i].in_use = true;
            sets[i].last_seq = fake_state_last_event(&state);
            *set = &sets[i];
            status = NVML_SUCCESS;
            break;
        }
    }
    (void)pthread_mutex_unlock(&lock);
    return status;
}

static bool is_set(nvmlEventSet_t set)
{
    return set >= &sets[0] && set < &sets[SETS_MAX] && set->in_use;
}

bool fake_is_watched(const char *uuid)
{
    bool found = false;
    (void)pthread_mutex_lock(&lock);
    const struct nvmlDevice_st *handle = handle_of_uuid(uuid);
    for (unsigned int i = 0; handle != NULL && i < SETS_MAX; i++) {
        found = found || (sets[i].in_use && sets[i].types_by_handle[handle - handles] != 0);
    }
    (void)pthread_mutex_unlock(&lock);
    return found;
}

NVML_API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    struct fake_gpu gpu;
    nvmlReturn_t status = begin_device(__func__, device, &gpu);
    if (status != NVML_SUCCESS) {
        return status;
    }
    (void)pthread_mutex_lock(&lock);
    if (!is_set(set)) {
        status = NVML_ERROR_INVALID_ARGUMENT;
    } else if (gpu.supported_events == 0 || (types & ~gpu.supported_events) != 0) {
        status = NVML_ERROR_NOT_SUPPORTED;
    } else {
        set->types_by_handle[device - handles] |= types;
    }
    (void)pthread_mutex_unlock(&lock);
    return status;
}

/* Caller holds the lock. SUCCESS: `data` is filled; TIMEOUT: nothing yet. */
static nvmlReturn_t next_event(struct nvmlEventSet_st *set, nvmlEventData_t *data)
{
    for (unsigned int i = 0; i < state.event_count; i++) {
        const struct fake_event *event = &state.events[i];
        if (event->seq <= set->last_seq) {
            continue;
        }
        set->last_seq = event->seq;
        if (event->gpu >= state.gpu_count) {
            continue;
        }
        nvmlDevice_t handle = handle_of_uuid(state.gpus[event->gpu].uuid);
        if (handle != NULL && (set->types_by_handle[handle - handles] & event->type) != 0) {
            *data = (nvmlEventData_t){
                .device = handle,
                .eventType = event->type,
                .eventData = event->data,
                .gpuInstanceId = event->gpu_instance,
                .computeInstanceId = event->compute_instance,
            };
            return NVML_SUCCESS;
        }
    }
    for (unsigned int i = 0; i < handle_count; i++) {
        int gpu = -1;
        if (set->types_by_handle[i] != 0 && locate(&handles[i], &gpu) != NVML_SUCCESS) {
            return NVML_ERROR_GPU_IS_LOST;
        }
    }
    return NVML_ERROR_TIMEOUT;
}

NVML_API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    unsigned long long start = now_ms();
    for (;;) {
        (void)pthread_mutex_lock(&lock);
        nvmlReturn_t status = ready();
        if (status == NVML_SUCCESS) {
            status = apply_fault(__func__, -1);
        }
        if (status == NVML_SUCCESS) {
            status = is_set(set) ? next_event(set, data) : NVML_ERROR_INVALID_ARGUMENT;
        }
        (void)pthread_mutex_unlock(&lock);
        unsigned long long waited = now_ms() - start;
        if (status != NVML_ERROR_TIMEOUT || waited >= timeout_ms) {
            return status;
        }
        // Seldom, as the driver would sleep: `bench agent` must not measure this loop.
        unsigned long long left = timeout_ms - waited;
        sleep_ms(left < EVENT_POLL_MS ? (unsigned int)left : EVENT_POLL_MS);
    }
}

NVML_API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    nvmlReturn_t status = NVML_SUCCESS;
    (void)pthread_mutex_lock(&lock);
    if (is_set(set)) {
        set->in_use = false;
    } else {
        status = NVML_ERROR_INVALID_ARGUMENT;
    }
    (void)pthread_mutex_unlock(&lock);
    return status;
}
