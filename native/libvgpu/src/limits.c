/* SPDX-License-Identifier: Apache-2.0 */
#include "limits.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "platform.h"

#define HEADER "hami-limits/1"
#define MIB UINT64_C(1048576)
#define MEMORY_MIB_MAX (UINT64_C(1) << 27) /* 128 TiB, half of what a share word can hold */
#define CORE_PCT_ALL 100u
#define PRIORITY_MAX 7u
#define PRIORITY_DEFAULT 1u
#define LEVEL_DEFAULT 1

static bool fail(char *problem, size_t size, const char *key, const char *rest)
{
    (void)snprintf(problem, size, "%s: %s", key, rest);
    return false;
}

/* Digits only; false for anything else and for what exceeds `most`. */
static bool parse_number(const char *text, size_t length, uint64_t most, uint64_t *number)
{
    uint64_t value = 0;
    if (length == 0 || length > 20) return false;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        uint64_t digit = (uint64_t)(text[i] - '0');
        if (value > (UINT64_MAX - digit) / 10) return false;
        value = value * 10 + digit;
    }
    *number = value;
    return value <= most;
}

bool limits_parse_bytes(const char *text, uint64_t *bytes)
{
    size_t digits = strspn(text, "0123456789");
    const char *unit = text + digits;
    unsigned shift = 0;
    uint64_t number;
    if (*unit) {
        static const char letters[] = "KMGT";
        const char *letter = strchr(letters, *unit & ~0x20);
        if (letter && *letter) {
            shift = 10u * (unsigned)(letter - letters + 1);
            unit++;
        }
        if (*unit && strcasecmp(unit, "b") != 0 && !(shift && strcasecmp(unit, "ib") == 0)) return false;
    }
    if (!parse_number(text, digits, UINT64_MAX >> shift, &number)) return false;
    *bytes = number << shift;
    return true;
}

/* The fields of the file found so far. */
struct draft {
    struct limits *limits;
    bool has_devices;
    bool has_container;
    bool has_allocation;
    bool has_priority;
    uint64_t device_count;
    uint64_t has_vendor; /* bit per device */
    uint64_t has_uuid;
    uint64_t has_memory;
    uint64_t has_core;
    uint64_t has_memory_limit;
    uint64_t has_core_limit;
    uint64_t has_exclusive;
};

static bool once(uint64_t *set, uint64_t index)
{
    bool first = !(*set >> index & 1);
    *set |= UINT64_C(1) << index;
    return first;
}

/* `value` of the field `device.<index>.<field>`; false: it is wrong, or the field was given before. */
static bool take_field(struct draft *draft, uint64_t index, const char *field, const char *value, size_t length)
{
    uint64_t number;
    struct limits *limits = draft->limits;
    if (strcmp(field, "vendor") == 0) return once(&draft->has_vendor, index);
    if (strcmp(field, "uuid") == 0) {
        if (length == 0 || length >= REGION_UUID) return false;
        memcpy(limits->uuid[index], value, length);
        limits->uuid[index][length] = '\0';
        return once(&draft->has_uuid, index);
    }
    if (strcmp(field, "memory_mib") == 0) {
        if (!parse_number(value, length, MEMORY_MIB_MAX, &number)) return false;
        limits->memory_bytes[index] = number * MIB;
        return once(&draft->has_memory, index);
    }
    if (strcmp(field, "core_pct") == 0) {
        if (!parse_number(value, length, CORE_PCT_ALL, &number)) return false;
        limits->core_pct[index] = number ? (uint32_t)number : CORE_PCT_ALL;
        return once(&draft->has_core, index);
    }
    if (strcmp(field, "memory_limit_mib") == 0) {
        if (!parse_number(value, length, MEMORY_MIB_MAX, &number)) return false;
        limits->memory_limit_bytes[index] = number * MIB;
        return once(&draft->has_memory_limit, index);
    }
    if (strcmp(field, "core_limit_pct") == 0) {
        if (!parse_number(value, length, CORE_PCT_ALL, &number)) return false;
        limits->core_limit_pct[index] = (uint32_t)number;
        return once(&draft->has_core_limit, index);
    }
    if (strcmp(field, "exclusive") == 0)
        return parse_number(value, length, 1, &number) && once(&draft->has_exclusive, index);
    return true;
}

static bool take_device(struct draft *draft, const char *key, const char *value, size_t length)
{
    size_t digits = strspn(key, "0123456789");
    uint64_t index;
    if (digits == 0 || key[digits] != '.') return true; /* some other key that begins with "device." */
    if (!parse_number(key, digits, REGION_DEVICES_MAX - 1, &index) || (digits > 1 && *key == '0')) return false;
    return take_field(draft, index, key + digits + 1, value, length);
}

static bool take_policy(struct limits *limits, const char *value)
{
    if (strcasecmp(value, "force") == 0)
        limits->core_policy = LIMITS_CORE_FORCE;
    else if (strcasecmp(value, "disable") == 0)
        limits->core_policy = LIMITS_CORE_DISABLE;
    else
        limits->core_policy = LIMITS_CORE_DEFAULT;
    return limits->core_policy != LIMITS_CORE_DEFAULT || strcasecmp(value, "default") == 0;
}

static bool take(struct draft *draft, const char *key, const char *value, size_t length)
{
    uint64_t number;
    if (strncmp(key, "device.", 7) == 0) return take_device(draft, key + 7, value, length);
    if (strcmp(key, "devices") == 0) {
        bool first = !draft->has_devices;
        draft->has_devices = true;
        return first && parse_number(value, length, REGION_DEVICES_MAX, &draft->device_count);
    }
    if (strcmp(key, "priority") == 0) {
        bool first = !draft->has_priority;
        draft->has_priority = true;
        if (!first || !parse_number(value, length, PRIORITY_MAX, &number)) return false;
        draft->limits->priority = (uint32_t)number;
        return true;
    }
    if (strcmp(key, "container") == 0) draft->has_container = true;
    if (strcmp(key, "allocation") == 0) draft->has_allocation = true;
    if (strcmp(key, "core_policy") == 0) return take_policy(draft->limits, value);
    return true;
}

static void set_defaults(struct limits *limits)
{
    memset(limits, 0, sizeof *limits);
    limits->priority = PRIORITY_DEFAULT;
    limits->log_level = LEVEL_DEFAULT;
    for (uint32_t i = 0; i < REGION_DEVICES_MAX; i++) {
        limits->memory_bytes[i] = LIMITS_UNLIMITED;
        limits->core_pct[i] = CORE_PCT_ALL;
    }
}

/* Where no limit above the request is given, which 0 means too: none of memory, and the whole device for compute. */
static void complete_limits(struct limits *limits)
{
    for (uint32_t i = 0; i < REGION_DEVICES_MAX; i++) {
        if (limits->memory_limit_bytes[i] == 0) limits->memory_limit_bytes[i] = limits->memory_bytes[i];
        if (limits->core_limit_pct[i] == 0) limits->core_limit_pct[i] = CORE_PCT_ALL;
    }
}

static bool is_complete(const struct draft *draft, char *problem, size_t problem_size)
{
    if (!draft->has_container) return fail(problem, problem_size, "container", "is missing");
    if (!draft->has_allocation) return fail(problem, problem_size, "allocation", "is missing");
    if (!draft->has_devices) return fail(problem, problem_size, "devices", "is missing");
    uint64_t all = draft->has_vendor & draft->has_uuid & draft->has_memory & draft->has_core & draft->has_exclusive;
    for (uint64_t i = 0; i < draft->device_count; i++) {
        char key[24];
        (void)snprintf(key, sizeof key, "device.%u", (unsigned)i);
        if (!(all >> i & 1))
            return fail(problem, problem_size, key, "lacks vendor, uuid, memory_mib, core_pct or exclusive");
        if (draft->limits->memory_limit_bytes[i] < draft->limits->memory_bytes[i])
            return fail(problem, problem_size, key, "has a memory_limit_mib below memory_mib");
        if (draft->limits->core_limit_pct[i] < draft->limits->core_pct[i])
            return fail(problem, problem_size, key, "has a core_limit_pct below core_pct");
        for (uint64_t other = 0; other < i; other++)
            if (strcmp(draft->limits->uuid[i], draft->limits->uuid[other]) == 0)
                return fail(problem, problem_size, key, "has the uuid of another device");
    }
    return true;
}

bool limits_parse(const char *text, size_t length, struct limits *limits, char *problem, size_t problem_size)
{
    struct draft draft = {.limits = limits};
    set_defaults(limits);
    if (memchr(text, '\0', length)) return fail(problem, problem_size, "file", "contains a zero byte");
    const char *end = text + length;
    unsigned number = 0;
    for (const char *line = text; line < end;) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        if (!stop) stop = end;
        number++;
        char copy[512];
        size_t size = (size_t)(stop - line);
        char where[32];
        (void)snprintf(where, sizeof where, "line %u", number);
        if (size >= sizeof copy) return fail(problem, problem_size, where, "is too long");
        memcpy(copy, line, size);
        copy[size] = '\0';
        line = stop + 1;
        if (number == 1) {
            if (strcmp(copy, HEADER) != 0) return fail(problem, problem_size, where, "is not " HEADER);
            continue;
        }
        char *equals = strchr(copy, '=');
        if (!equals) return fail(problem, problem_size, where, "is not key=value");
        *equals = '\0';
        if (!take(&draft, copy, equals + 1, size - (size_t)(equals + 1 - copy)))
            return fail(problem, problem_size, copy, "is out of range, no whole number, too long or given twice");
    }
    if (number == 0) return fail(problem, problem_size, "file", "is empty");
    complete_limits(limits);
    if (!is_complete(&draft, problem, problem_size)) return false;
    limits->source = LIMITS_FILE;
    limits->device_count = (uint32_t)draft.device_count;
    return true;
}

/* Value of NAME or of NAME_<n> (n in *ordinal, else -1); NULL: another variable. */
static const char *value_of(const char *entry, const char *name, int *ordinal)
{
    size_t length = strlen(name);
    uint64_t number;
    *ordinal = -1;
    if (strncmp(entry, name, length) != 0) return NULL;
    entry += length;
    if (*entry == '=') return entry + 1;
    if (*entry != '_') return NULL;
    size_t digits = strspn(++entry, "0123456789");
    if (entry[digits] != '=' || (digits > 1 && *entry == '0') ||
        !parse_number(entry, digits, REGION_DEVICES_MAX - 1, &number))
        return NULL;
    *ordinal = (int)number;
    return entry + digits + 1;
}

/* One limit that may be given for all devices and for each. */
struct setting {
    uint64_t general;
    uint64_t own[REGION_DEVICES_MAX];
    uint64_t given; /* bit per device */
    bool is_set;
};

#define SETTING_UNREADABLE (UINT64_MAX - 1)

static void collect(struct setting *setting, const char *const *environment, const char *name, uint64_t most,
                    uint32_t *device_count, bool *readable, char *problem, size_t problem_size)
{
    memset(setting, 0, sizeof *setting);
    for (; *environment; environment++) {
        int ordinal;
        const char *text = value_of(*environment, name, &ordinal);
        uint64_t value;
        if (!text || !*text) continue;
        if (!limits_parse_bytes(text, &value) || value > most) {
            value = SETTING_UNREADABLE;
            if (*readable)
                (void)snprintf(problem, problem_size, "%.40s: not understood, so its devices may use nothing",
                               *environment);
            *readable = false;
        }
        if (value == 0) continue; /* as if it were not set */
        setting->is_set = true;
        if (ordinal < 0) {
            setting->general = value;
            continue;
        }
        setting->own[ordinal] = value;
        setting->given |= UINT64_C(1) << ordinal;
        if ((uint32_t)ordinal >= *device_count) *device_count = (uint32_t)ordinal + 1;
    }
}

static uint64_t setting_of(const struct setting *setting, uint32_t device)
{
    return setting->given >> device & 1 ? setting->own[device] : setting->general;
}

static const char *plain_value(const char *const *environment, const char *name)
{
    for (; *environment; environment++) {
        int ordinal;
        const char *value = value_of(*environment, name, &ordinal);
        if (value && ordinal < 0) return value;
    }
    return NULL;
}

bool limits_from_environment(const char *const *environment, struct limits *limits, char *problem, size_t problem_size)
{
    struct setting memory;
    struct setting core;
    bool readable = true;
    set_defaults(limits);
    uint32_t devices = LIMITS_ORDINALS;
    collect(&memory, environment, "CUDA_DEVICE_MEMORY_LIMIT", UINT64_MAX - 2, &devices, &readable, problem,
            problem_size);
    collect(&core, environment, "CUDA_DEVICE_SM_LIMIT", UINT64_MAX - 2, &devices, &readable, problem, problem_size);
    for (uint32_t i = 0; i < devices; i++) {
        uint64_t bytes = setting_of(&memory, i);
        uint64_t percent = setting_of(&core, i);
        if (bytes) limits->memory_bytes[i] = bytes;
        if (percent && percent < CORE_PCT_ALL) limits->core_pct[i] = (uint32_t)percent;
        if (bytes == SETTING_UNREADABLE || percent == SETTING_UNREADABLE) limits->memory_bytes[i] = 0;
    }
    complete_limits(limits);
    uint64_t number;
    const char *value = plain_value(environment, "CUDA_TASK_PRIORITY");
    if (value && parse_number(value, strlen(value), PRIORITY_MAX, &number)) limits->priority = (uint32_t)number;
    value = plain_value(environment, "GPU_CORE_UTILIZATION_POLICY");
    if (value) (void)take_policy(limits, value); /* any other word is the default */
    value = plain_value(environment, "LIBCUDA_LOG_LEVEL");
    if (value && parse_number(value, strlen(value), INT32_MAX, &number)) limits->log_level = (int)number;
    if (memory.is_set || core.is_set) {
        limits->source = LIMITS_ENVIRONMENT;
        limits->device_count = devices;
    }
    return readable;
}

static void stamp_of(const struct stat *status, struct limits_stamp *stamp)
{
    stamp->device = status->st_dev;
    stamp->inode = status->st_ino;
    stamp->bytes = (uint64_t)status->st_size;
    stamp->changed_s = status->st_ctim.tv_sec;
    stamp->changed_ns = status->st_ctim.tv_nsec;
}

/* The libc names of stat are younger than the baseline. Follows links: the last component is one in a mounted volume. */
static bool stamp_path(const char *path, struct limits_stamp *stamp)
{
    int saved = errno;
    struct stat status;
    bool known = syscall(SYS_newfstatat, AT_FDCWD, path, &status, 0) == 0;
    if (known) stamp_of(&status, stamp);
    errno = saved;
    return known;
}

enum limits_read limits_read(const char *path, struct limits *limits, struct limits_stamp *stamp, char *problem,
                             size_t problem_size)
{
    static char text[LIMITS_FILE_MAX];
    struct stat status;
    memset(stamp, 0, sizeof *stamp);
    int saved = errno;
    bool named = syscall(SYS_newfstatat, AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) == 0;
    bool absent = !named && (errno == ENOENT || errno == ENOTDIR);
    errno = saved;
    if (absent) return LIMITS_ABSENT;
    /* Before the text: a change in between is then seen as one. */
    (void)stamp_path(path, stamp);
    long length = platform_read_file(path, text, sizeof text);
    if (length < 0) {
        (void)snprintf(problem, problem_size, "%s: %s", path, strerror((int)-length));
        return LIMITS_BROKEN;
    }
    char detail[160];
    if (limits_parse(text, (size_t)length, limits, detail, sizeof detail)) return LIMITS_READ;
    (void)snprintf(problem, problem_size, "%s: %s", path, detail);
    return LIMITS_BROKEN;
}

bool limits_changed(const char *path, const struct limits_stamp *stamp)
{
    struct limits_stamp now;
    memset(&now, 0, sizeof now);
    return stamp_path(path, &now) && memcmp(&now, stamp, sizeof now) != 0;
}

bool limits_update(struct limits *limits, const struct limits *fresh)
{
    if (fresh->device_count != limits->device_count) return false;
    for (uint32_t i = 0; i < limits->device_count; i++)
        if (strcmp(limits->uuid[i], fresh->uuid[i]) != 0) return false;
    memcpy(limits->memory_bytes, fresh->memory_bytes, sizeof limits->memory_bytes);
    memcpy(limits->memory_limit_bytes, fresh->memory_limit_bytes, sizeof limits->memory_limit_bytes);
    memcpy(limits->core_pct, fresh->core_pct, sizeof limits->core_pct);
    memcpy(limits->core_limit_pct, fresh->core_limit_pct, sizeof limits->core_limit_pct);
    limits->priority = fresh->priority;
    limits->core_policy = fresh->core_policy;
    return true;
}

void limits_refuse(struct limits *limits)
{
    set_defaults(limits);
    limits->source = LIMITS_REFUSED;
    limits->device_count = 1;
    limits->memory_bytes[0] = 0;
    complete_limits(limits);
}
