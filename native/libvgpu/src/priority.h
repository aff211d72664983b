/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page in which the node's agent publishes, per device, which priorities are active, to all containers.
 *
 * One file for the node, written by the agent alone, in place, and mounted into every container that may not write it.
 * Level 0 is the highest, 7 the lowest. A process of a lower level waits while a higher level is active and the lease
 * runs; an agent or tenant that dies stops blocking when the lease ends. Times are CLOCK_MONOTONIC nanoseconds, which
 * all containers of a node share. The levels present change with containers only and need no lease.
 * The agent writes a device so: `sequence` odd, fields, `sequence` even, FUTEX_WAKE on `sequence` (not private).
 * Processes announce themselves in the region: `launches` of their slot changes with every launch, `last_launch_ns` with
 * every quantum of device time they draw, `idle_launches` equals `launches` while they are idle (bell.h).
 * Locks taken here: none.
 */
#ifndef VGPU_PRIORITY_H
#define VGPU_PRIORITY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PRIORITY_MAGIC UINT64_C(0x315052494d414856) /* "VHAMIRP1" as bytes */
#define PRIORITY_LAYOUT 1u
#ifndef PRIORITY_PATH
#define PRIORITY_PATH "/run/hami-priority/page-1"
#endif
#define PRIORITY_DEVICES 64u
#define PRIORITY_UUID 64u
#define PRIORITY_LOWEST 7u
#define PRIORITY_NO_LEVEL 255u

struct priority_device {
    char uuid[PRIORITY_UUID]; /* text, zero-terminated; empty: unused */
    uint32_t sequence;        /* odd while being written */
    uint32_t highest_active;  /* 0..7, PRIORITY_NO_LEVEL */
    uint64_t lease_until_ns;  /* the device's other fields are true until then */
    uint32_t active_tenants;  /* containers of the highest active level that have worked lately; 0: not known */
    uint32_t highest_present; /* level of the highest container with a share; PRIORITY_NO_LEVEL: there is none */
    uint32_t lowest_present;  /* of the lowest; 0: there is none */
    uint32_t reserved[9];
};

struct priority_page {
    uint64_t magic;
    uint32_t layout;
    uint32_t device_bytes;
    uint32_t device_count;
    uint32_t min_share_ppm; /* part of a device's time that a blocked container gets; 0: none */
    uint32_t reserved[10];
    struct priority_device devices[PRIORITY_DEVICES];
};

_Static_assert(sizeof(struct priority_device) == 128, "device");
_Static_assert(offsetof(struct priority_device, sequence) == 64, "sequence");
_Static_assert(offsetof(struct priority_device, lease_until_ns) == 72, "lease");
_Static_assert(offsetof(struct priority_device, highest_present) == 84, "present");
_Static_assert(offsetof(struct priority_page, min_share_ppm) == 20, "share");
_Static_assert(offsetof(struct priority_page, devices) == 64, "page");

/* The part that one process reads. */
struct priority_view {
    uint32_t highest_active;
    uint32_t active_tenants;
    uint64_t lease_until_ns;
    uint32_t sequence;
};

/* Map the page, read-only. NULL: there is none, or it is not of this layout. */
const struct priority_page *priority_open(const char *path);
void priority_close(const struct priority_page *page);

/* The node's page, mapped at the first call that finds it and kept. NULL: there is none. */
const struct priority_page *priority_page(void);

/* The same without a look for the file: NULL until priority_page() has found it. */
const struct priority_page *priority_known_page(void);

/* NULL: not in the page. */
const struct priority_device *priority_device(const struct priority_page *page, const char *uuid);

/* Read the present values. False: the lease has expired, nothing is known. */
bool priority_read(const struct priority_device *device, uint64_t now_ns, struct priority_view *view);

/* Cheap and without a clock: whether a launch at `level` must look closer. */
static inline bool priority_may_block(const struct priority_device *device, uint32_t level)
{
    return device != NULL && __atomic_load_n(&device->highest_active, __ATOMIC_RELAXED) < level;
}

#endif
