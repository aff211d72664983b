/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver as a whole: initialisation, devices as CUDA_VISIBLE_DEVICES orders them, contexts and their stacks.
 *
 * Locks taken here: fake.lock. Called with hooks active: no.
 */
#include "fake.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CONTEXT_MAGIC UINT64_C(0x435458434f4e5458)

struct fake fake = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct fake_entry *entries;
static struct fake_stamp state_stamp;
static __thread struct fake_context *stack[FAKE_STACK];
static __thread unsigned int depth;

__thread struct fake_thread fake_thread __attribute__((tls_model("initial-exec")));

/* ---- state, faults, counters ---- */

/* Caller holds the lock. false: no state file, or a malformed one. */
static bool refresh(void)
{
    const char *path = getenv("FAKE_NVML_STATE");
    char problem[512];
    struct fake_stamp seen;
    if (path == NULL || !fake_state_stamp(path, &seen)) {
        return false;
    }
    if (fake_same_stamp(&seen, &state_stamp)) {
        return true;
    }
    if (!fake_state_read(path, &fake.state, problem, sizeof problem)) {
        (void)fprintf(stderr, "fake cuda: %s\n", problem);
        return false;
    }
    state_stamp = seen;
    return true;
}

/* Caller holds the lock. */
static const struct fake_fault *find_fault(const char *function)
{
    int row = depth > 0 ? fake.devices[stack[depth - 1]->device].row : -1;
    for (unsigned int i = 0; i < fake.state.fault_count; i++) {
        const struct fake_fault *fault = &fake.state.faults[i];
        if (strcmp(fault->function, function) == 0 && (fault->gpu == -1 || fault->gpu == row)) {
            return fault;
        }
    }
    return NULL;
}

/* Caller holds the lock. */
static void enlist(struct fake_entry *entry)
{
    if (entry->registered == 0) {
        entry->registered = 1;
        entry->next = entries;
        entries = entry;
    }
}

static void describe_devices(void);

void fake_learn_changes(void)
{
    uint32_t serial = __atomic_load_n(&fake.card->header.serial, __ATOMIC_ACQUIRE);
    if (serial != fake.serial) {
        (void)refresh();
        fake.serial = serial;
        describe_devices();
    }
}

static void pause_ms(void)
{
    (void)nanosleep(&(struct timespec){.tv_nsec = 1000000L}, NULL);
}

/* Caller holds the lock, which is released in between. The result of the fault that is set for the function. */
static CUresult suffer(const struct fake_entry *entry)
{
    for (unsigned int slept_ms = 0;; slept_ms++) {
        fake_learn_changes();
        const struct fake_fault *fault = find_fault(entry->name);
        if (fault == NULL) {
            return CUDA_SUCCESS;
        }
        if (slept_ms >= fault->hang_ms) {
            return (CUresult)fault->result;
        }
        fake_unlock();
        pause_ms();
        fake_lock();
    }
}

static void unlist_thread(void *argument)
{
    struct fake_thread *thread = argument;
    fake_lock();
    thread->is_listed = false;
    for (struct fake_thread **at = &fake.threads; *at != NULL; at = &(*at)->next) {
        if (*at == thread) {
            *at = thread->next;
            break;
        }
    }
    fake_unlock();
}

/* Caller holds the lock. */
static void list_thread(void)
{
    static pthread_key_t at_end;
    static bool has_key;
    if (fake_thread.is_listed) {
        return;
    }
    has_key = has_key || pthread_key_create(&at_end, unlist_thread) == 0;
    fake_thread.is_listed = has_key && pthread_setspecific(at_end, &fake_thread) == 0;
    fake_thread.next = fake.threads;
    fake.threads = &fake_thread;
}

/* Caller holds the lock, which is released in between. Wait until the process is neither locked nor checkpointed. */
static CUresult wait_until_open(struct fake_entry *entry)
{
    bool is_counted = false;
    while (fake.ready && !fake.open) {
        if (fake.dead) {
            return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        }
        bool is_locked = fake.process_state == FAKE_PROCESS_LOCKED;
        entry->held +=
            fake.process_state == FAKE_PROCESS_RUNNING || is_counted ? 0 : 1; /* else being locked just now */
        is_counted = is_counted || fake.process_state != FAKE_PROCESS_RUNNING;
        if (entry->synchronizes && is_locked) {
            return FAKE_AT_ONCE;
        }
        if (entry->synchronizes && fake.process_state != FAKE_PROCESS_RUNNING) {
            (void)raise(SIGSEGV); /* as the real driver does */
        }
        __atomic_store_n(&fake_thread.inside, fake_thread.inside - 1, __ATOMIC_RELEASE);
        fake_unlock();
        pause_ms();
        fake_lock();
        __atomic_store_n(&fake_thread.inside, fake_thread.inside + 1, __ATOMIC_SEQ_CST);
    }
    return CUDA_SUCCESS;
}

CUresult fake_enter_slowly(struct fake_entry *entry)
{
    fake_lock();
    enlist(entry);
    list_thread();
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    CUresult result = wait_until_open(entry);
    if (result == CUDA_SUCCESS && !fake.ready) {
        result = CUDA_ERROR_NOT_INITIALIZED;
    }
    if (result == CUDA_SUCCESS) {
        result = suffer(entry);
        if (result == CUDA_SUCCESS && find_fault(entry->name) == NULL) {
            entry->serial = fake.serial;
        }
    }
    fake_unlock();
    return result;
}

static CUresult reach_card(void);

CUresult fake_enter_outside(struct fake_entry *entry)
{
    fake_lock();
    entry->calls++;
    enlist(entry);
    CUresult result = reach_card();
    if (result == CUDA_SUCCESS) {
        result = suffer(entry);
    }
    fake_unlock();
    return result;
}

CUDA_API uint64_t fake_cuda_calls(const char *name);
CUDA_API uint64_t fake_cuda_calls(const char *name)
{
    uint64_t calls = 0;
    fake_lock();
    for (const struct fake_entry *entry = entries; entry != NULL; entry = entry->next) {
        calls += strcmp(entry->name, name) == 0 ? entry->calls : 0;
    }
    fake_unlock();
    return calls;
}

CUDA_API uint64_t fake_cuda_held(const char *name);
CUDA_API uint64_t fake_cuda_held(const char *name)
{
    uint64_t calls = 0;
    fake_lock();
    for (const struct fake_entry *entry = entries; entry != NULL; entry = entry->next) {
        calls += name == NULL || strcmp(entry->name, name) == 0 ? entry->held : 0;
    }
    fake_unlock();
    return calls;
}

/* ---- devices ---- */

/* Caller holds the lock. Fill in a device that this process sees from the state. */
static void describe(struct fake_device *device)
{
    device->row = -1;
    for (unsigned int row = 0; row < fake.state.gpu_count; row++) {
        const struct fake_gpu *gpu = &fake.state.gpus[row];
        uint64_t named = 0; /* processes that the state names */
        for (unsigned int i = 0; i < gpu->process_count; i++) {
            named += gpu->processes[i].used_bytes;
        }
        uint64_t taken = (gpu->memory_used > named ? gpu->memory_used : named) + gpu->memory_reserved;
        if (strcmp(gpu->uuid, device->uuid) == 0) {
            device->row = (int)row;
            device->capacity = taken < gpu->memory_total ? gpu->memory_total - taken : 0;
            device->sms = gpu->sm_count;
        }
        for (unsigned int i = 0; i < gpu->mig_count; i++) {
            if (strcmp(gpu->migs[i].uuid, device->uuid) == 0) {
                device->row = (int)row;
                device->capacity = gpu->migs[i].memory_total;
                device->sms = gpu->migs[i].sm_count;
            }
        }
        if (device->row == (int)row) {
            device->context_bytes = gpu->context_bytes;
            device->pool_granularity = gpu->pool_granularity;
            device->block_granularity = gpu->block_granularity;
            device->migration_bytes_per_s = gpu->migration_bytes_per_s;
        }
    }
    device->sms = device->sms == 0 ? 1 : device->sms;
}

static void describe_devices(void)
{
    for (unsigned int i = 0; i < fake.device_count; i++) {
        describe(&fake.devices[i]);
    }
}

static bool is_visible_already(const char *uuid)
{
    for (unsigned int i = 0; i < fake.device_count; i++) {
        if (strcmp(fake.devices[i].uuid, uuid) == 0) {
            return true;
        }
    }
    return false;
}

/* A device named twice makes the list invalid, as does an unknown one: CUDA stops there. */
static bool add_device(const char *uuid)
{
    int card = card_device_of(fake.card, uuid);
    if (card < 0 || fake.device_count == FAKE_DEVICES || is_visible_already(uuid)) {
        return false;
    }
    struct fake_device *device = &fake.devices[fake.device_count++];
    memset(device, 0, sizeof *device);
    memcpy(device->uuid, uuid, strlen(uuid) + 1);
    device->card = (unsigned int)card;
    describe(device);
    return true;
}

/* In a container the driver sees the cards whose device nodes are there: FAKE_NVML_NODES starts their paths. */
static bool has_node(const struct fake_gpu *gpu)
{
    const char *start = getenv("FAKE_NVML_NODES");
    char path[256];
    if (start == NULL) {
        return true;
    }
    (void)snprintf(path, sizeof path, "%s%u", start, gpu->minor);
    return access(path, F_OK) == 0;
}

/* The k-th device that is seen: of a device in MIG mode, its first instance, as CUDA does. */
static const char *uuid_of_number(unsigned int number)
{
    unsigned int row = 0;
    while (row < fake.state.gpu_count && (!has_node(&fake.state.gpus[row]) || number-- > 0)) {
        row++;
    }
    if (row == fake.state.gpu_count || fake.state.gpus[row].lost) {
        return NULL;
    }
    const struct fake_gpu *gpu = &fake.state.gpus[row];
    if (gpu->mig_current != 0) {
        return gpu->mig_count > 0 ? gpu->migs[0].uuid : NULL;
    }
    return gpu->uuid;
}

/* A UUID may be cut short as long as it names one device. */
static const char *uuid_of_prefix(const char *prefix)
{
    const char *found = NULL;
    size_t length = strlen(prefix);
    for (unsigned int row = 0; row < fake.state.gpu_count; row++) {
        const struct fake_gpu *gpu = &fake.state.gpus[row];
        if (gpu->lost || !has_node(gpu)) {
            continue;
        }
        if (gpu->mig_current == 0 && strncasecmp(gpu->uuid, prefix, length) == 0) {
            if (found != NULL) return NULL;
            found = gpu->uuid;
        }
        for (unsigned int i = 0; gpu->mig_current != 0 && i < gpu->mig_count; i++) {
            if (strncasecmp(gpu->migs[i].uuid, prefix, length) == 0) {
                if (found != NULL) return NULL;
                found = gpu->migs[i].uuid;
            }
        }
    }
    return found;
}

static void add_visible(const char *list)
{
    char copy[8192];
    char *rest = NULL;
    (void)snprintf(copy, sizeof copy, "%s", list);
    for (char *word = strtok_r(copy, ",", &rest); word != NULL; word = strtok_r(NULL, ",", &rest)) {
        while (*word == ' ') {
            word++;
        }
        char *end = NULL;
        errno = 0;
        long number = strtol(word, &end, 10);
        bool is_number = end != word && (*end == '\0' || *end == ' ') && errno == 0;
        const char *uuid = is_number ? (number < 0 ? NULL : uuid_of_number((unsigned int)number))
                           : strncasecmp(word, "GPU-", 4) == 0 || strncasecmp(word, "MIG-", 4) == 0
                               ? uuid_of_prefix(word)
                               : NULL;
        if (uuid == NULL) {
            return;
        }
        if (!add_device(uuid)) {
            fake.device_count = 0;
            return;
        }
    }
}

static void list_devices(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    fake.device_count = 0;
    if (visible != NULL) {
        add_visible(visible);
        return;
    }
    for (unsigned int row = 0; row < fake.state.gpu_count; row++) {
        const char *uuid = uuid_of_number(row);
        if (uuid != NULL) {
            (void)add_device(uuid);
        }
    }
}

static void after_fork_in_child(void)
{
    fake.forked = fake.forked || fake.ready;
    fake.ready = fake.open = false;
    (void)pthread_mutex_init(&fake.lock, NULL);
}

/* Caller holds the lock. */
static CUresult reach_card(void)
{
    if (fake.forked) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if (!refresh()) {
        return CUDA_ERROR_NO_DEVICE;
    }
    if (fake.card == NULL) {
        fake.card = card_open(getenv("FAKE_NVML_STATE"));
    }
    return fake.card == NULL ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

/* Caller holds the lock. */
static CUresult start(void)
{
    static bool handles_forks;
    CUresult reached = reach_card();
    if (reached != CUDA_SUCCESS) {
        return reached;
    }
    list_devices();
    if (fake.device_count == 0) {
        return CUDA_ERROR_NO_DEVICE;
    }
    int slot = card_claim(fake.card);
    if (slot < 0) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    fake.slot = (unsigned int)slot;
    fake.serial = __atomic_load_n(&fake.card->header.serial, __ATOMIC_ACQUIRE);
    if (!handles_forks) {
        handles_forks = true;
        (void)pthread_atfork(fake_lock, fake_unlock, after_fork_in_child);
    }
    if (!fake_checkpoint_start()) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    fake.ready = fake.open = true;
    return CUDA_SUCCESS;
}

API(cuInit, unsigned int flags)
{
    static struct fake_entry entry = {.name = "cuInit"};
    if (flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    entry.calls++;
    enlist(&entry);
    CUresult result = fake.ready ? CUDA_SUCCESS : start();
    if (result == CUDA_SUCCESS) {
        const struct fake_fault *fault = find_fault("cuInit");
        result = fault != NULL ? (CUresult)fault->result : CUDA_SUCCESS;
        fake.ready = result == CUDA_SUCCESS || fake.ready;
    }
    fake_unlock();
    return result;
}

API(cuDriverGetVersion, int *version)
{
    if (version == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    bool good = fake.ready || refresh();
    *version = fake.state.cuda_version;
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

API(cuDeviceGetCount, int *count)
{
    ENTER();
    if (count == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *count = (int)fake.device_count;
    return CUDA_SUCCESS;
}

static bool is_device(CUdevice device)
{
    return device >= 0 && (unsigned int)device < fake.device_count;
}

#define ENTER_DEVICE(out, device)                                                                                      \
    ENTER();                                                                                                           \
    if ((out) == NULL) return CUDA_ERROR_INVALID_VALUE;                                                                \
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE

API(cuDeviceGet, CUdevice *device, int ordinal)
{
    ENTER_DEVICE(device, ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

static const struct fake_gpu *gpu_of(CUdevice device)
{
    int row = fake.devices[device].row;
    return &fake.state.gpus[row < 0 ? 0 : row];
}

API(cuDeviceGetName, char *name, int length, CUdevice device)
{
    ENTER_DEVICE(name, device);
    if (length <= 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    (void)snprintf(name, (size_t)length, "%s", gpu_of(device)->name);
    fake_unlock();
    return CUDA_SUCCESS;
}

static void pack_uuid(const char *text, CUuuid *uuid)
{
    unsigned int count = 0;
    memset(uuid, 0, sizeof *uuid);
    for (const char *at = text + 4; at[0] != '\0' && at[1] != '\0' && count < sizeof uuid->bytes; at++) {
        unsigned int byte = 0;
        if (*at != '-' && sscanf(at, "%2x", &byte) == 1) {
            uuid->bytes[count++] = (char)byte;
            at++;
        }
    }
}

API(cuDeviceGetUuid, CUuuid *uuid, CUdevice device)
{
    ENTER_DEVICE(uuid, device);
    pack_uuid(gpu_of(device)->uuid, uuid);
    return CUDA_SUCCESS;
}

/* Distinguishes MIG instances; the first form does not. */
API(cuDeviceGetUuid_v2, CUuuid *uuid, CUdevice device)
{
    ENTER_DEVICE(uuid, device);
    pack_uuid(fake.devices[device].uuid, uuid);
    return CUDA_SUCCESS;
}

API(cuDeviceTotalMem_v2, size_t *bytes, CUdevice device)
{
    ENTER_DEVICE(bytes, device);
    *bytes = fake.devices[device].capacity;
    return CUDA_SUCCESS;
}

API(cuDeviceTotalMem, unsigned int *bytes, CUdevice device)
{
    ENTER_DEVICE(bytes, device);
    uint64_t capacity = fake.devices[device].capacity;
    *bytes = capacity > UINT32_MAX ? UINT32_MAX : (unsigned int)capacity;
    return CUDA_SUCCESS;
}

API(cuDeviceComputeCapability, int *major, int *minor, CUdevice device)
{
    ENTER_DEVICE(major, device);
    *major = gpu_of(device)->capability_major;
    *minor = gpu_of(device)->capability_minor;
    return CUDA_SUCCESS;
}

static bool bus_parts(const struct fake_gpu *gpu, unsigned int parts[3])
{
    return sscanf(gpu->bus_id, "%x:%x:%x", &parts[0], &parts[1], &parts[2]) == 3;
}

API(cuDeviceGetPCIBusId, char *bus_id, int length, CUdevice device)
{
    unsigned int parts[3] = {0};
    ENTER_DEVICE(bus_id, device);
    (void)bus_parts(gpu_of(device), parts);
    int wanted = snprintf(bus_id, length > 0 ? (size_t)length : 0, "%04x:%02x:%02x.0", parts[0], parts[1], parts[2]);
    return wanted < length ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuDeviceGetByPCIBusId, CUdevice *device, const char *bus_id)
{
    unsigned int asked[3] = {0};
    ENTER();
    if (device == NULL || bus_id == NULL || sscanf(bus_id, "%x:%x:%x", &asked[0], &asked[1], &asked[2]) != 3) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (unsigned int i = 0; i < fake.device_count; i++) {
        unsigned int parts[3] = {0};
        if (bus_parts(gpu_of((CUdevice)i), parts) && memcmp(parts, asked, sizeof parts) == 0) {
            *device = (CUdevice)i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

/* Attributes that are the same for every device. */
static const struct {
    int number;
    int value;
} same_attributes[] = {
    {1, 1024},                               /* threads per block */
    {2, 1024},                               /* block dimension x */
    {3, 1024},   {4, 64},    {5, INT32_MAX}, /* grid dimension x */
    {6, 65535},  {7, 65535}, {8, 49152},     /* shared memory per block */
    {10, 32},                                /* warp size */
    {12, 65536},                             /* registers per block */
    {15, 1},                                 /* overlaps copies and kernels */
    {19, 1},                                 /* can map host memory */
    {31, 1},                                 /* concurrent kernels */
    {39, 2048},                              /* threads per multiprocessor */
    {41, 1},                                 /* unified addressing */
    {83, 1},                                 /* managed memory */
    {95, 1},                                 /* cooperative launch */
    {102, 1},                                /* virtual memory management */
    {103, 1},                                /* file descriptors as handles */
    {115, 1},                                /* memory pools */
    {119, 1},                                /* handle types of pools */
};

static int same_attribute(int number)
{
    for (size_t i = 0; i < sizeof same_attributes / sizeof same_attributes[0]; i++) {
        if (same_attributes[i].number == number) {
            return same_attributes[i].value;
        }
    }
    return 0;
}

static int attribute(CUdevice device, int number)
{
    const struct fake_gpu *gpu = gpu_of(device);
    unsigned int parts[3] = {0};
    (void)bus_parts(gpu, parts);
    switch (number) {
    case 13: /* clock rate, kHz */
        return (int)gpu->clock_sm_mhz * 1000;
    case 16: /* multiprocessors */
        return (int)fake.devices[device].sms;
    case 18: /* integrated */
        return gpu->unified_memory ? 1 : 0;
    case 32: /* ECC */
        return gpu->ecc_current != 0 ? 1 : 0;
    case 33:
        return (int)parts[1];
    case 34:
        return (int)parts[2];
    case 50:
        return (int)parts[0];
    case 75:
        return gpu->capability_major;
    case 76:
        return gpu->capability_minor;
    case 89: /* concurrent managed access */
        return gpu->concurrent_managed ? 1 : 0;
    case 132: /* multicast */
        return gpu->capability_major >= 9 ? 1 : 0;
    default:
        return same_attribute(number);
    }
}

API(cuDeviceGetAttribute, int *value, int number, CUdevice device)
{
    ENTER_DEVICE(value, device);
    if (number <= 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *value = attribute(device, number);
    return CUDA_SUCCESS;
}

API(cuDeviceCanAccessPeer, int *can, CUdevice device, CUdevice peer)
{
    ENTER_DEVICE(can, device);
    if (!is_device(peer)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    *can = device != peer ? 1 : 0;
    return CUDA_SUCCESS;
}

/* ---- memory of the device ---- */

bool fake_charge(unsigned int device, uint64_t bytes)
{
    struct fake_device *at = &fake.devices[device];
    return card_charge(fake.card, fake.slot, at->card, bytes, at->capacity);
}

void fake_refund(unsigned int device, uint64_t bytes)
{
    card_refund(fake.card, fake.slot, fake.devices[device].card, bytes);
}

uint64_t fake_used(unsigned int device)
{
    unsigned int card = fake.devices[device].card;
    return card_used(fake.card, card, false) + card_resident(fake.card, card);
}

/* ---- contexts ---- */

struct fake_context *fake_current(void)
{
    return depth == 0 ? NULL : stack[depth - 1];
}

bool fake_is_context(const struct fake_context *context)
{
    return context != NULL && context->magic == CONTEXT_MAGIC && !context->destroyed;
}

static void note_context(unsigned int device, int64_t delta)
{
    uint64_t *word = &fake.card->shares[fake.slot][fake.devices[device].card].contexts;
    __atomic_store_n(word, *word + (uint64_t)delta, __ATOMIC_RELEASE);
}

/* Caller holds the lock. Gives the context its place on the card. */
static CUresult open_context(struct fake_context *context)
{
    uint64_t bytes = fake.devices[context->device].context_bytes;
    if (!fake_charge(context->device, bytes)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    context->bytes = bytes;
    note_context(context->device, (int64_t)bytes);
    context->destroyed = false;
    context->id = ++fake.next_id;
    context->blocking_until_ns = 0;
    context->legacy = fake_stream_new(context, 0, 0);
    context->next = fake.contexts;
    fake.contexts = context;
    return CUDA_SUCCESS;
}

bool fake_grow_local(struct fake_context *context, uint64_t bytes)
{
    enum { THREADS = 2048 };
    uint64_t wanted = bytes * THREADS * fake.devices[context->device].sms;
    fake_lock();
    bool good = wanted <= context->local_bytes || fake_charge(context->device, wanted - context->local_bytes);
    if (good && wanted > context->local_bytes) {
        context->local_bytes = wanted;
    }
    fake_unlock();
    return good;
}

static struct fake_context *new_context(unsigned int device)
{
    struct fake_context *context = calloc(1, sizeof *context);
    if (context != NULL) {
        context->magic = CONTEXT_MAGIC;
        context->device = device;
        context->destroyed = true;
        context->limits[0] = 1024;
        context->limits[1] = 1U << 20U;
        context->limits[2] = 8U << 20U;
    }
    return context;
}

/* Caller holds the lock. The structure stays: handles to a destroyed context must still be recognised as such. */
static void close_context(struct fake_context *context)
{
    if (context->destroyed) {
        return;
    }
    fake_streams_free(context);
    fake_modules_free(context);
    fake_arrays_free(context);
    fake_free_context(context);
    if (context->is_primary) {
        fake_pools_end(context->device);
    }
    note_context(context->device, -(int64_t)context->bytes);
    fake_refund(context->device, context->bytes + context->local_bytes);
    context->local_bytes = 0;
    for (struct fake_context **at = &fake.contexts; *at != NULL; at = &(*at)->next) {
        if (*at == context) {
            *at = context->next;
            break;
        }
    }
    context->legacy = NULL;
    context->destroyed = true;
    context->references = 0;
}

static CUresult push(struct fake_context *context)
{
    if (depth == FAKE_STACK) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult create_context(CUcontext *out, unsigned int flags, CUdevice device)
{
    if (out == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!is_device(device)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    struct fake_context *context = new_context((unsigned int)device);
    if (context == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    context->flags = flags;
    fake_lock();
    CUresult result = open_context(context);
    context->references = 1;
    fake_unlock();
    if (result != CUDA_SUCCESS) {
        free(context);
        return result;
    }
    *out = context;
    return push(context);
}

API(cuCtxCreate, CUcontext *out, unsigned int flags, CUdevice device)
{
    ENTER();
    return create_context(out, flags, device);
}

API(cuCtxCreate_v2, CUcontext *out, unsigned int flags, CUdevice device)
{
    ENTER();
    return create_context(out, flags, device);
}

API(cuCtxCreate_v3, CUcontext *out, void *affinities, int count, unsigned int flags, CUdevice device)
{
    ENTER();
    (void)affinities;
    return count < 0 ? CUDA_ERROR_INVALID_VALUE : create_context(out, flags, device);
}

API(cuCtxCreate_v4, CUcontext *out, void *params, unsigned int flags, CUdevice device)
{
    ENTER();
    (void)params;
    return create_context(out, flags, device);
}

static CUresult destroy_context(CUcontext context)
{
    if (!fake_is_context(context)) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (context->is_primary) {
        return CUDA_ERROR_INVALID_CONTEXT; /* primary contexts are released, not destroyed */
    }
    fake_lock();
    close_context(context);
    fake_unlock();
    if (fake_current() == context) {
        depth--;
    }
    return CUDA_SUCCESS;
}

API(cuCtxDestroy, CUcontext context)
{
    ENTER();
    return destroy_context(context);
}

API(cuCtxDestroy_v2, CUcontext context)
{
    ENTER();
    return destroy_context(context);
}

static CUresult push_current(CUcontext context)
{
    return context != NULL && context->magic == CONTEXT_MAGIC ? push(context) : CUDA_ERROR_INVALID_CONTEXT;
}

API(cuCtxPushCurrent, CUcontext context)
{
    ENTER();
    return push_current(context);
}

API(cuCtxPushCurrent_v2, CUcontext context)
{
    ENTER();
    return push_current(context);
}

static CUresult pop_current(CUcontext *out)
{
    if (depth == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    depth--;
    if (out != NULL) {
        *out = stack[depth];
    }
    return CUDA_SUCCESS;
}

API(cuCtxPopCurrent, CUcontext *out)
{
    ENTER();
    return pop_current(out);
}

API(cuCtxPopCurrent_v2, CUcontext *out)
{
    ENTER();
    return pop_current(out);
}

API(cuCtxSetCurrent, CUcontext context)
{
    ENTER();
    if (context != NULL && context->magic != CONTEXT_MAGIC) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    depth -= depth > 0 ? 1U : 0U;
    return context == NULL ? CUDA_SUCCESS : push(context);
}

API(cuCtxGetCurrent, CUcontext *out)
{
    ENTER();
    if (out == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = fake_current();
    return CUDA_SUCCESS;
}

#define ENTER_CONTEXT(context)                                                                                         \
    ENTER();                                                                                                           \
    struct fake_context *context = fake_current();                                                                     \
    if (!fake_is_context(context)) return CUDA_ERROR_INVALID_CONTEXT

API(cuCtxGetDevice, CUdevice *device)
{
    ENTER_CONTEXT(context);
    if (device == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *device = (CUdevice)context->device;
    return CUDA_SUCCESS;
}

API(cuCtxGetDevice_v2, CUdevice *device, CUcontext asked)
{
    ENTER();
    struct fake_context *context = asked != NULL ? asked : fake_current();
    if (device == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!fake_is_context(context)) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *device = (CUdevice)context->device;
    return CUDA_SUCCESS;
}

API(cuCtxGetFlags, unsigned int *flags)
{
    ENTER_CONTEXT(context);
    if (flags == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *flags = context->flags;
    return CUDA_SUCCESS;
}

API(cuCtxGetApiVersion, CUcontext context, unsigned int *version)
{
    ENTER();
    if (version == NULL || (context != NULL && !fake_is_context(context))) {
        return version == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_CONTEXT;
    }
    *version = 3020;
    return CUDA_SUCCESS;
}

API(cuCtxGetId, CUcontext asked, unsigned long long *id)
{
    ENTER();
    struct fake_context *context = asked != NULL ? asked : fake_current();
    if (id == NULL || !fake_is_context(context)) {
        return id == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_CONTEXT;
    }
    *id = context->id;
    return CUDA_SUCCESS;
}

API(cuCtxGetLimit, size_t *value, int limit)
{
    ENTER_CONTEXT(context);
    if (value == NULL || limit < 0 || limit >= 16) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *value = context->limits[limit];
    return CUDA_SUCCESS;
}

API(cuCtxSetLimit, int limit, size_t value)
{
    ENTER_CONTEXT(context);
    if (limit < 0 || limit >= 16) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    context->limits[limit] = value;
    return CUDA_SUCCESS;
}

API(cuCtxGetStreamPriorityRange, int *least, int *greatest)
{
    ENTER_CONTEXT(context);
    (void)context;
    if (least != NULL) {
        *least = 0;
    }
    if (greatest != NULL) {
        *greatest = -5;
    }
    return CUDA_SUCCESS;
}

API(cuCtxEnablePeerAccess, CUcontext peer, unsigned int flags)
{
    ENTER_CONTEXT(context);
    if (flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return fake_is_context(peer) && peer->device != context->device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API(cuCtxDisablePeerAccess, CUcontext peer)
{
    ENTER();
    return fake_is_context(peer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult retain_primary(CUcontext *out, CUdevice device)
{
    CUresult result = CUDA_SUCCESS;
    fake_lock();
    struct fake_device *at = &fake.devices[device];
    if (at->primary == NULL) {
        at->primary = new_context((unsigned int)device);
    }
    struct fake_context *context = at->primary;
    if (context == NULL) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else if (context->destroyed) {
        context->is_primary = true;
        context->flags = at->primary_flags;
        result = open_context(context);
    }
    if (result == CUDA_SUCCESS) {
        context->references++;
        *out = context;
    }
    fake_unlock();
    return result;
}

API(cuDevicePrimaryCtxRetain, CUcontext *out, CUdevice device)
{
    ENTER_DEVICE(out, device);
    return retain_primary(out, device);
}

CUDA_API CUresult fake_cuda_unseen(CUdevice device);
CUDA_API CUresult fake_cuda_unseen(CUdevice device)
{
    struct fake_context *context = NULL;
    CUresult result = is_device(device) ? retain_primary(&context, device) : CUDA_ERROR_INVALID_DEVICE;
    return result == CUDA_SUCCESS ? push(context) : result;
}

static CUresult release_primary(CUdevice device)
{
    CUresult result = CUDA_SUCCESS;
    if (!is_device(device)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    fake_lock();
    struct fake_context *context = fake.devices[device].primary;
    if (context == NULL || context->destroyed || context->references == 0) {
        result = CUDA_ERROR_INVALID_CONTEXT;
    } else if (--context->references == 0) {
        close_context(context);
    }
    fake_unlock();
    return result;
}

API(cuDevicePrimaryCtxRelease, CUdevice device)
{
    ENTER();
    return release_primary(device);
}

API(cuDevicePrimaryCtxRelease_v2, CUdevice device)
{
    ENTER();
    return release_primary(device);
}

static CUresult reset_primary(CUdevice device)
{
    if (!is_device(device)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    fake_lock();
    if (fake.devices[device].primary != NULL) {
        close_context(fake.devices[device].primary);
    }
    fake_unlock();
    return CUDA_SUCCESS;
}

API(cuDevicePrimaryCtxReset, CUdevice device)
{
    ENTER();
    return reset_primary(device);
}

API(cuDevicePrimaryCtxReset_v2, CUdevice device)
{
    ENTER();
    return reset_primary(device);
}

API(cuDevicePrimaryCtxGetState, CUdevice device, unsigned int *flags, int *active)
{
    ENTER_DEVICE(active, device);
    fake_lock();
    const struct fake_device *at = &fake.devices[device];
    *active = at->primary != NULL && !at->primary->destroyed ? 1 : 0;
    if (flags != NULL) {
        *flags = at->primary_flags;
    }
    fake_unlock();
    return CUDA_SUCCESS;
}

static CUresult set_primary_flags(CUdevice device, unsigned int flags)
{
    if (!is_device(device)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    fake.devices[device].primary_flags = flags;
    return CUDA_SUCCESS;
}

API(cuDevicePrimaryCtxSetFlags, CUdevice device, unsigned int flags)
{
    ENTER();
    return set_primary_flags(device, flags);
}

API(cuDevicePrimaryCtxSetFlags_v2, CUdevice device, unsigned int flags)
{
    ENTER();
    return set_primary_flags(device, flags);
}

/* ---- symbols: may be asked before cuInit ---- */

static CUresult find_symbol(const char *name, void **out, int version, uint64_t flags, int *status)
{
    fake_lock();
    bool good = fake.ready || refresh();
    fake_unlock();
    return good ? fake_find_symbol(name, out, version, flags, status) : CUDA_ERROR_NOT_INITIALIZED;
}

#define GET_PROC_ADDRESS(symbol)                                                                                       \
    API(symbol, const char *name, void **out, int version, uint64_t flags)                                             \
    {                                                                                                                  \
        return find_symbol(name, out, version, flags, NULL);                                                           \
    }

#define GET_PROC_ADDRESS_V2(symbol)                                                                                    \
    API(symbol, const char *name, void **out, int version, uint64_t flags, int *status)                                \
    {                                                                                                                  \
        return find_symbol(name, out, version, flags, status);                                                         \
    }

GET_PROC_ADDRESS(cuGetProcAddress)
GET_PROC_ADDRESS_V2(cuGetProcAddress_v2)

API(cuGetExportTable, const void **table, const CUuuid *id)
{
    (void)id;
    if (table != NULL) {
        *table = NULL;
    }
    return CUDA_ERROR_NOT_FOUND; /* the private tables of the real driver are no interface */
}

/* ---- errors ---- */

struct error_text {
    CUresult result;
    const char *name;
    const char *text;
};

static const struct error_text *error_text(CUresult result)
{
#define ERROR(code, text)                                                                                              \
    {                                                                                                                  \
        code, #code, text                                                                                              \
    }
    static const struct error_text texts[] = {
        ERROR(CUDA_SUCCESS, "no error"),
        ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
        ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
        ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
        ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
        ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
        ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
        ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
        ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
        ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
        ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
        ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
        ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
        ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
        ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
        ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
        ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
        ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
        ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
    };
#undef ERROR
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (texts[i].result == result) {
            return &texts[i];
        }
    }
    return NULL;
}

API(cuGetErrorName, CUresult result, const char **out)
{
    const struct error_text *found = error_text(result);
    if (out == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = found != NULL ? found->name : NULL;
    return found != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuGetErrorString, CUresult result, const char **out)
{
    const struct error_text *found = error_text(result);
    if (out == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = found != NULL ? found->text : NULL;
    return found != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
