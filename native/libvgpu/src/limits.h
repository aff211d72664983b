/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The limits of this container: from /etc/hami/limits (format `hami-limits/1`, docs/wire.md), which the tenant cannot
 * write, or from the environment where there is no such file.
 *
 * Strict: what cannot be read is never taken for "no limit". Bytes, percent.
 */
#ifndef VGPU_LIMITS_H
#define VGPU_LIMITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "region.h"

#ifndef VGPU_ROOT
#define VGPU_ROOT "" /* another root directory, in tests only: nothing at run time can move these paths */
#endif
#define LIMITS_PATH VGPU_ROOT "/etc/hami/limits"
#define LIMITS_SHARED VGPU_ROOT "/run/hami-priority"     /* the agent mounts it together with this library */
#define LIMITS_ENDED_PATH LIMITS_SHARED "/bells/ended-1" /* of this container alone, see process.h */
#define LIMITS_ROOM_PATH LIMITS_SHARED "/bells/room-1"   /* of this container alone, see room.h */
#define LIMITS_REGION_PATH VGPU_ROOT REGION_DIRECTORY "/" REGION_FILE_NAME
#define LIMITS_REGION_PATH_DEFAULT VGPU_ROOT "/tmp/cudevshr.cache" /* without the suffix */
#define LIMITS_UNLIMITED UINT64_MAX
#ifndef LIMITS_ORDINALS
#define LIMITS_ORDINALS 16u /* devices of a region whose limits come from the environment, more if more are named */
#endif
#define LIMITS_FILE_MAX 65536u

enum limits_source {
    LIMITS_NONE,        /* nothing is limited */
    LIMITS_FILE,        /* the file; devices have UUIDs */
    LIMITS_ENVIRONMENT, /* devices are CUDA ordinals */
    LIMITS_REFUSED,     /* there is a file but it cannot be understood: every device has limit 0 */
};

enum limits_core_policy { LIMITS_CORE_DEFAULT = 0, LIMITS_CORE_FORCE = 1, LIMITS_CORE_DISABLE = 2 };

struct limits {
    enum limits_source source;
    uint32_t device_count;
    uint32_t priority;
    uint32_t core_policy; /* enum limits_core_policy */
    int log_level;
    uint64_t memory_bytes[REGION_DEVICES_MAX];       /* the request */
    uint64_t memory_limit_bytes[REGION_DEVICES_MAX]; /* most that the agent may grant; the request where it may not */
    uint32_t core_pct[REGION_DEVICES_MAX];
    uint32_t core_limit_pct[REGION_DEVICES_MAX]; /* while no other container computes, by the default policy */
    char uuid[REGION_DEVICES_MAX][REGION_UUID];
};

/* false: `problem` names the line or key that is wrong; `limits` is then without meaning. */
bool limits_parse(const char *text, size_t length, struct limits *limits, char *problem, size_t problem_size);

/* "15360m", "15360MB", "15GiB", "1073741824": digits, then at most one of K M G T with or without B or iB. */
bool limits_parse_bytes(const char *text, uint64_t *bytes);

/* From `environment` (entries NAME=value, NULL at the end). Values that cannot be read leave their devices with limit 0;
   `problem` then names the first of them and the function is false. */
bool limits_from_environment(const char *const *environment, struct limits *limits, char *problem, size_t problem_size);

/* The version of the file that was read. */
struct limits_stamp {
    uint64_t device;
    uint64_t inode;
    uint64_t bytes;
    int64_t changed_s;
    int64_t changed_ns;
};

enum limits_read {
    LIMITS_READ,
    LIMITS_ABSENT, /* no file: the container is not managed */
    LIMITS_BROKEN,
};

enum limits_read limits_read(const char *path, struct limits *limits, struct limits_stamp *stamp, char *problem,
                             size_t problem_size);

/* The file is another one, or has changed, since it was read with this stamp. */
bool limits_changed(const char *path, const struct limits_stamp *stamp);

/* Take memory and compute limits and priority of `fresh` into `limits`. false: it is about other devices. */
bool limits_update(struct limits *limits, const struct limits *fresh);

/* All devices with limit 0. */
void limits_refuse(struct limits *limits);

#endif
