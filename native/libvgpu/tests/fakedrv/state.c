/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parses the state file of state.h. Strict: the first line that does not fit ends the parse with its number.
 *
 * Locks taken here: none. Called with hooks active: no.
 */
#include "state.h"

#include "nvml_abi.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE_MAX_BYTES = 1024, WORDS_MAX = 16, CONTEXT_BYTES = 64 << 20, POOL_GRANULARITY = 2 << 20 };

struct words {
    char *at[WORDS_MAX];
    unsigned int count;
};

static bool set_text(char out[FAKE_TEXT], const char *value)
{
    size_t length = strlen(value);
    if (length >= FAKE_TEXT) {
        return false;
    }
    memcpy(out, value, length + 1);
    return true;
}

static bool to_u64(const char *value, unsigned long long *out)
{
    char *end = NULL;
    errno = 0;
    *out = strtoull(value, &end, 0);
    return errno == 0 && end != value && *end == '\0' && value[0] != '-';
}

static bool to_u32(const char *value, unsigned int *out)
{
    unsigned long long wide = 0;
    if (!to_u64(value, &wide) || wide > UINT32_MAX) {
        return false;
    }
    *out = (unsigned int)wide;
    return true;
}

static bool to_int(const char *value, int *out)
{
    char *end = NULL;
    errno = 0;
    long wide = strtol(value, &end, 10);
    if (errno != 0 || end == value || *end != '\0' || wide < INT32_MIN || wide > INT32_MAX) {
        return false;
    }
    *out = (int)wide;
    return true;
}

static bool to_flag(const char *value, bool *out)
{
    *out = strcmp(value, "1") == 0;
    return *out || strcmp(value, "0") == 0;
}

static struct words split(char *value)
{
    struct words words = {.count = 0};
    char *rest = NULL;
    for (char *word = strtok_r(value, " \t", &rest); word != NULL; word = strtok_r(NULL, " \t", &rest)) {
        if (words.count == WORDS_MAX) {
            words.count = 0;
            return words;
        }
        words.at[words.count++] = word;
    }
    return words;
}

/* "0-3,8,10-11" into a bit set; a cpu beyond the set refuses. */
static bool to_cpus(char *value, unsigned long long out[FAKE_CPU_WORDS])
{
    char *rest = NULL;
    for (char *part = strtok_r(value, ",", &rest); part != NULL; part = strtok_r(NULL, ",", &rest)) {
        char *dash = strchr(part, '-');
        unsigned int first = 0;
        unsigned int last = 0;
        if (dash != NULL) {
            *dash = '\0';
        }
        if (!to_u32(part, &first) || !to_u32(dash != NULL ? dash + 1 : part, &last) || last < first ||
            last >= FAKE_CPU_WORDS * 64U) {
            return false;
        }
        for (unsigned int cpu = first; cpu <= last; cpu++) {
            out[cpu / 64U] |= 1ULL << (cpu % 64U);
        }
    }
    return true;
}

static bool to_capability(const char *value, struct fake_gpu *gpu)
{
    return sscanf(value, "%d.%d", &gpu->capability_major, &gpu->capability_minor) == 2;
}

static bool add_process(char *value, struct fake_gpu *gpu)
{
    struct words words = split(value);
    if (words.count != 7 || gpu->process_count == FAKE_PROCESSES_MAX) {
        return false;
    }
    struct fake_process *process = &gpu->processes[gpu->process_count++];
    return to_u32(words.at[0], &process->pid) && to_u64(words.at[1], &process->used_bytes) &&
           to_u32(words.at[2], &process->sm_util) && to_u32(words.at[3], &process->mem_util) &&
           to_u32(words.at[4], &process->gpu_instance) && to_u32(words.at[5], &process->compute_instance) &&
           to_u64(words.at[6], &process->time_us);
}

static bool add_link(char *value, struct fake_gpu *gpu)
{
    struct words words = split(value);
    unsigned int number = 0;
    if (words.count != 4 || !to_u32(words.at[0], &number) || number >= FAKE_LINKS_MAX) {
        return false;
    }
    struct fake_link *link = &gpu->links[number];
    link->present = true;
    return to_flag(words.at[1], &link->active) && to_u32(words.at[2], &link->remote_type) &&
           set_text(link->remote_bus_id, words.at[3]);
}

static bool add_mig(char *value, struct fake_gpu *gpu)
{
    struct words words = split(value);
    if (words.count != 5 || gpu->mig_count == FAKE_MIGS_MAX) {
        return false;
    }
    struct fake_mig *mig = &gpu->migs[gpu->mig_count++];
    return set_text(mig->uuid, words.at[0]) && to_u32(words.at[1], &mig->gpu_instance) &&
           to_u32(words.at[2], &mig->compute_instance) && to_u64(words.at[3], &mig->memory_total) &&
           to_u32(words.at[4], &mig->sm_count);
}

/* "0,2,4" into bits. */
static bool to_starts(char *value, unsigned int *out)
{
    char *rest = NULL;
    for (char *part = strtok_r(value, ",", &rest); part != NULL; part = strtok_r(NULL, ",", &rest)) {
        unsigned int start = 0;
        if (!to_u32(part, &start) || start >= 32) {
            return false;
        }
        *out |= 1U << start;
    }
    return *out != 0;
}

static bool add_gi_profile(char *value, struct fake_gpu *gpu)
{
    struct words words = split(value);
    if (words.count != 14 || gpu->gi_profile_count == FAKE_GI_PROFILES_MAX) {
        return false;
    }
    struct fake_gi_profile *profile = &gpu->gi_profiles[gpu->gi_profile_count++];
    unsigned int *const numbers[] = {
        &profile->kind,     &profile->id,    &profile->slices,       &profile->memory_mib,
        &profile->sm_count, &profile->count, &profile->copy_engines, &profile->decoders,
        &profile->encoders, &profile->jpeg,  &profile->ofa,          &profile->size,
    };
    for (unsigned int i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (!to_u32(words.at[i], numbers[i])) {
            return false;
        }
    }
    return profile->size > 0 && profile->size < 32 && to_starts(words.at[12], &profile->starts) &&
           set_text(profile->name, words.at[13]);
}

static bool add_pair(char *value, struct fake_state *state)
{
    struct words words = split(value);
    unsigned int a = 0;
    unsigned int b = 0;
    unsigned int level = 0;
    if (words.count != 3 || !to_u32(words.at[0], &a) || !to_u32(words.at[1], &b) || !to_u32(words.at[2], &level) ||
        a >= FAKE_GPUS_MAX || b >= FAKE_GPUS_MAX || level > NVML_TOPOLOGY_SYSTEM) {
        return false;
    }
    state->levels[a][b] = level;
    return true;
}

static bool add_fault(char *value, struct fake_state *state)
{
    struct words words = split(value);
    if (words.count != 4 || state->fault_count == FAKE_FAULTS_MAX) {
        return false;
    }
    struct fake_fault *fault = &state->faults[state->fault_count++];
    fault->gpu = -1;
    return set_text(fault->function, words.at[0]) &&
           (strcmp(words.at[1], "*") == 0 || (to_int(words.at[1], &fault->gpu) && fault->gpu >= 0)) &&
           to_u32(words.at[2], &fault->result) && to_u32(words.at[3], &fault->hang_ms);
}

static bool add_event(char *value, struct fake_state *state)
{
    struct words words = split(value);
    if (words.count != 6 || state->event_count == FAKE_EVENTS_MAX) {
        return false;
    }
    struct fake_event *event = &state->events[state->event_count];
    if (!to_u64(words.at[0], &event->seq) || event->seq <= fake_state_last_event(state) ||
        !to_u32(words.at[1], &event->gpu) || !to_u64(words.at[2], &event->type) || !to_u64(words.at[3], &event->data) ||
        !to_u32(words.at[4], &event->gpu_instance) || !to_u32(words.at[5], &event->compute_instance)) {
        return false;
    }
    state->event_count++;
    return true;
}

static bool set_ecc(const char *value, unsigned int *out, struct fake_gpu *gpu)
{
    gpu->ecc_supported = true;
    return to_u32(value, out) && *out <= 1;
}

enum field_kind { FIELD_U32, FIELD_U64, FIELD_FLAG, FIELD_INT };

/* Keys of a GPU whose value is one number or flag. */
static const struct field {
    const char *key;
    enum field_kind kind;
    size_t offset;
} gpu_fields[] = {
    {"minor", FIELD_U32, offsetof(struct fake_gpu, minor)},
    {"pci_device_id", FIELD_U32, offsetof(struct fake_gpu, pci_device_id)},
    {"pci_subsystem_id", FIELD_U32, offsetof(struct fake_gpu, pci_subsystem_id)},
    {"brand", FIELD_U32, offsetof(struct fake_gpu, brand)},
    {"architecture", FIELD_U32, offsetof(struct fake_gpu, architecture)},
    {"sm_count", FIELD_U32, offsetof(struct fake_gpu, sm_count)},
    {"numa", FIELD_INT, offsetof(struct fake_gpu, numa)},
    {"memory_total", FIELD_U64, offsetof(struct fake_gpu, memory_total)},
    {"memory_used", FIELD_U64, offsetof(struct fake_gpu, memory_used)},
    {"memory_reserved", FIELD_U64, offsetof(struct fake_gpu, memory_reserved)},
    {"unified_memory", FIELD_FLAG, offsetof(struct fake_gpu, unified_memory)},
    {"gpu_util", FIELD_U32, offsetof(struct fake_gpu, gpu_util)},
    {"memory_util", FIELD_U32, offsetof(struct fake_gpu, memory_util)},
    {"temperature_c", FIELD_U32, offsetof(struct fake_gpu, temperature_c)},
    {"power_mw", FIELD_U32, offsetof(struct fake_gpu, power_mw)},
    {"power_limit_mw", FIELD_U32, offsetof(struct fake_gpu, power_limit_mw)},
    {"clock_sm_mhz", FIELD_U32, offsetof(struct fake_gpu, clock_sm_mhz)},
    {"clock_memory_mhz", FIELD_U32, offsetof(struct fake_gpu, clock_memory_mhz)},
    {"ecc_corrected", FIELD_U64, offsetof(struct fake_gpu, ecc_corrected)},
    {"ecc_uncorrected", FIELD_U64, offsetof(struct fake_gpu, ecc_uncorrected)},
    {"remapped_corrected", FIELD_U32, offsetof(struct fake_gpu, remapped_corrected)},
    {"remapped_uncorrected", FIELD_U32, offsetof(struct fake_gpu, remapped_uncorrected)},
    {"remapped_pending", FIELD_U32, offsetof(struct fake_gpu, remapped_pending)},
    {"remapped_failure", FIELD_U32, offsetof(struct fake_gpu, remapped_failure)},
    {"retired_pending", FIELD_U32, offsetof(struct fake_gpu, retired_pending)},
    {"supported_events", FIELD_U64, offsetof(struct fake_gpu, supported_events)},
    {"lost", FIELD_FLAG, offsetof(struct fake_gpu, lost)},
    {"mig_capable", FIELD_FLAG, offsetof(struct fake_gpu, mig_capable)},
    {"mig_current", FIELD_U32, offsetof(struct fake_gpu, mig_current)},
    {"mig_pending", FIELD_U32, offsetof(struct fake_gpu, mig_pending)},
    {"mig_clients", FIELD_U32, offsetof(struct fake_gpu, mig_clients)},
    {"mig_vm", FIELD_FLAG, offsetof(struct fake_gpu, mig_vm)},
    {"mig_max", FIELD_U32, offsetof(struct fake_gpu, mig_max)},
    {"context_bytes", FIELD_U64, offsetof(struct fake_gpu, context_bytes)},
    {"checkpoint_bytes_per_s", FIELD_U64, offsetof(struct fake_gpu, checkpoint_bytes_per_s)},
    {"restore_bytes_per_s", FIELD_U64, offsetof(struct fake_gpu, restore_bytes_per_s)},
    {"migration_bytes_per_s", FIELD_U64, offsetof(struct fake_gpu, migration_bytes_per_s)},
    {"concurrent_managed", FIELD_FLAG, offsetof(struct fake_gpu, concurrent_managed)},
};

static bool set_field(const struct field *field, const char *value, struct fake_gpu *gpu)
{
    void *at = (char *)gpu + field->offset;
    switch (field->kind) {
    case FIELD_U32:
        return to_u32(value, at);
    case FIELD_U64:
        return to_u64(value, at);
    case FIELD_FLAG:
        return to_flag(value, at);
    case FIELD_INT:
        return to_int(value, at);
    }
    return false;
}

static bool set_gpu_key(const char *key, char *value, struct fake_gpu *gpu)
{
#define KEY(text) (strcmp(key, (text)) == 0)
    for (size_t i = 0; i < sizeof gpu_fields / sizeof gpu_fields[0]; i++) {
        if (KEY(gpu_fields[i].key)) return set_field(&gpu_fields[i], value, gpu);
    }
    if (KEY("uuid")) return set_text(gpu->uuid, value);
    if (KEY("name")) return set_text(gpu->name, value);
    if (KEY("serial")) return set_text(gpu->serial, value);
    if (KEY("bus_id")) return set_text(gpu->bus_id, value);
    if (KEY("compute_capability")) return to_capability(value, gpu);
    if (KEY("cpus")) return to_cpus(value, gpu->cpus);
    if (KEY("ecc_current")) return set_ecc(value, &gpu->ecc_current, gpu);
    if (KEY("ecc_pending")) return set_ecc(value, &gpu->ecc_pending, gpu);
    if (KEY("pool_granularity")) return to_u64(value, &gpu->pool_granularity) && gpu->pool_granularity > 0;
    if (KEY("block_granularity")) return to_u64(value, &gpu->block_granularity) && gpu->block_granularity > 0;
    if (KEY("mig")) return add_mig(value, gpu);
    if (KEY("gi_profile")) return add_gi_profile(value, gpu);
    if (KEY("process")) return add_process(value, gpu);
    if (KEY("nvlink")) return add_link(value, gpu);
    return false;
}

static bool set_system_key(const char *key, char *value, struct fake_state *state)
{
    if (KEY("driver_version")) return set_text(state->driver_version, value);
    if (KEY("nvml_version")) return set_text(state->nvml_version, value);
    if (KEY("cuda_version")) return to_int(value, &state->cuda_version);
    if (KEY("init_error")) return to_u32(value, &state->init_error);
    if (KEY("pair")) return add_pair(value, state);
    if (KEY("fault")) return add_fault(value, state);
    if (KEY("event")) return add_event(value, state);
    return false;
#undef KEY
}

static char *trim(char *text)
{
    while (*text == ' ' || *text == '\t') {
        text++;
    }
    size_t length = strlen(text);
    while (length > 0 && strchr(" \t\r\n", text[length - 1]) != NULL) {
        text[--length] = '\0';
    }
    return text;
}

static bool read_line(char *line, struct fake_state *state)
{
    char *text = trim(line);
    if (*text == '\0' || *text == '#') {
        return true;
    }
    if (*text == '[') {
        unsigned int number = 0;
        int used = 0;
        if (sscanf(text, "[gpu %u]%n", &number, &used) != 1 || text[used] != '\0' || used == 0 ||
            number != state->gpu_count || number >= FAKE_GPUS_MAX) {
            return false;
        }
        state->gpus[state->gpu_count].numa = -1;
        state->gpus[state->gpu_count].context_bytes = CONTEXT_BYTES;
        state->gpus[state->gpu_count].pool_granularity = POOL_GRANULARITY;
        state->gpus[state->gpu_count].block_granularity = 1;
        state->gpus[state->gpu_count].concurrent_managed = true;
        state->gpu_count++;
        return true;
    }
    char *equals = strchr(text, '=');
    if (equals == NULL) {
        return false;
    }
    *equals = '\0';
    const char *key = trim(text);
    char *value = trim(equals + 1);
    if (state->gpu_count == 0) {
        return set_system_key(key, value, state);
    }
    return set_gpu_key(key, value, &state->gpus[state->gpu_count - 1]);
}

/* ---- instances made through the library ---- */

static struct fake_gpu *gpu_named(struct fake_state *state, const char *uuid)
{
    for (unsigned int i = 0; i < state->gpu_count; i++) {
        if (strcmp(state->gpus[i].uuid, uuid) == 0) {
            return &state->gpus[i];
        }
    }
    return NULL;
}

static bool add_gi(struct words words, struct fake_state *state)
{
    unsigned int id = 0;
    unsigned int profile_id = 0;
    unsigned int start = 0;
    if (words.count != 5 || !to_u32(words.at[2], &id) || !to_u32(words.at[3], &profile_id) ||
        !to_u32(words.at[4], &start)) {
        return false;
    }
    struct fake_gpu *gpu = gpu_named(state, words.at[1]);
    for (unsigned int i = 0; gpu != NULL && i < gpu->gi_profile_count; i++) {
        if (gpu->gi_profiles[i].id == profile_id && gpu->gi_count < FAKE_GIS_MAX) {
            gpu->gis[gpu->gi_count++] = (struct fake_gi){.id = id, .profile = i, .start = start};
        }
    }
    return true;
}

static bool add_ci(struct words words, struct fake_state *state)
{
    struct fake_mig mig = {.slices = 0};
    if (words.count != 6 || !to_u32(words.at[2], &mig.gpu_instance) || !to_u32(words.at[3], &mig.compute_instance) ||
        !to_u32(words.at[4], &mig.slices) || !set_text(mig.uuid, words.at[5])) {
        return false;
    }
    struct fake_gpu *gpu = gpu_named(state, words.at[1]);
    for (unsigned int i = 0; gpu != NULL && i < gpu->gi_count; i++) {
        const struct fake_gi_profile *profile = &gpu->gi_profiles[gpu->gis[i].profile];
        if (gpu->gis[i].id == mig.gpu_instance && gpu->mig_count < FAKE_MIGS_MAX && profile->slices > 0) {
            mig.memory_total = (unsigned long long)profile->memory_mib << 20U;
            mig.sm_count = profile->sm_count * mig.slices / profile->slices;
            gpu->migs[gpu->mig_count++] = mig;
        }
    }
    return true;
}

static bool set_mode(struct words words, struct fake_state *state)
{
    struct fake_gpu ignored;
    struct fake_gpu *gpu = words.count == 5 ? gpu_named(state, words.at[1]) : NULL;
    struct fake_gpu *to = gpu == NULL ? &ignored : gpu;
    to->mig_has_mode = true;
    return words.count == 5 && to_u32(words.at[2], &to->mig_current) && to_u32(words.at[3], &to->mig_pending) &&
           to_u32(words.at[4], &to->mig_switches);
}

/* No such file: none were made. */
static bool read_instances(const char *path, struct fake_state *state, char *problem, size_t problem_size)
{
    char own_path[4096];
    char line[LINE_MAX_BYTES];
    bool good = snprintf(own_path, sizeof own_path, "%s.mig", path) < (int)sizeof own_path;
    FILE *file = good ? fopen(own_path, "re") : NULL;
    while (good && file != NULL && fgets(line, sizeof line, file) != NULL) {
        struct words words = split(trim(line));
        good = words.count > 0 && (strcmp(words.at[0], "gi") == 0     ? add_gi(words, state)
                                   : strcmp(words.at[0], "ci") == 0   ? add_ci(words, state)
                                   : strcmp(words.at[0], "mode") == 0 ? set_mode(words, state)
                                                                      : false);
    }
    if (!good) {
        (void)snprintf(problem, problem_size, "%s.mig: not understood", path);
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return good;
}

unsigned int fake_positions(const struct fake_gi_profile *profile, unsigned int start)
{
    return ((1U << profile->size) - 1U) << start;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
           a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

bool fake_state_stamp(const char *path, struct fake_stamp *out)
{
    char own_path[4096];
    memset(out, 0, sizeof *out);
    if (stat(path, &out->state) != 0 || snprintf(own_path, sizeof own_path, "%s.mig", path) >= (int)sizeof own_path) {
        return false;
    }
    if (stat(own_path, &out->instances) != 0) {
        memset(&out->instances, 0, sizeof out->instances);
    }
    return true;
}

bool fake_same_stamp(const struct fake_stamp *a, const struct fake_stamp *b)
{
    return same_file(&a->state, &b->state) && same_file(&a->instances, &b->instances);
}

bool fake_state_read(const char *path, struct fake_state *state, char *problem, size_t problem_size)
{
    char line[LINE_MAX_BYTES];
    char copy[LINE_MAX_BYTES];
    unsigned int number = 0;
    bool good = true;
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        (void)snprintf(problem, problem_size, "%s: %s", path, strerror(errno));
        return false;
    }
    memset(state, 0, sizeof *state);
    for (unsigned int a = 0; a < FAKE_GPUS_MAX; a++) {
        for (unsigned int b = 0; b < FAKE_GPUS_MAX; b++) {
            state->levels[a][b] = a == b ? NVML_TOPOLOGY_INTERNAL : NVML_TOPOLOGY_SYSTEM;
        }
    }
    while (good && fgets(line, sizeof line, file) != NULL) {
        number++;
        memcpy(copy, line, sizeof copy);
        good = strchr(line, '\n') != NULL && read_line(line, state);
    }
    if (!good) {
        (void)snprintf(problem, problem_size, "%s:%u: not understood: %s", path, number, trim(copy));
    }
    (void)fclose(file);
    return good && read_instances(path, state, problem, problem_size);
}

unsigned long long fake_state_last_event(const struct fake_state *state)
{
    return state->event_count == 0 ? 0 : state->events[state->event_count - 1].seq;
}
