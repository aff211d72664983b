/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layout of the region: the file through which the processes of one container share what they use.
 *
 * Decides nothing. Fixed-width fields at asserted offsets, little-endian hosts only, every field naturally aligned.
 * The file is writable by the tenant, so nobody may trust an offset, a count or a pid in it further than the header's
 * checked sizes reach; limits are never read from it. Times are CLOCK_MONOTONIC nanoseconds, sizes bytes.
 * Protocol and invariants: docs/adr/0008-limiter.md.
 */
#ifndef VGPU_REGION_H
#define VGPU_REGION_H

#include <stddef.h>
#include <stdint.h>

#define REGION_MAGIC UINT64_C(0x31494d4148204756) /* "VG HAMI1" as bytes */
#define REGION_LAYOUT 1u
#define REGION_FILE_NAME "region-1"
#define REGION_SLOTS 2048u
#define REGION_DEVICES_MAX 64u
#define REGION_LINE 64u
#define REGION_UUID 64u

/* Written once by the creator before the file gets its name; never changed afterwards but for `slots_seen`. */
struct region_header {
    uint64_t magic;
    uint32_t layout;
    uint32_t header_bytes;
    uint64_t file_bytes;
    uint32_t device_count;
    uint32_t slot_count;
    uint64_t devices_offset;
    uint64_t slots_offset;
    uint64_t shares_offset;
    uint32_t checksum; /* of the bytes before it */
    uint32_t slots_seen; /* one more than the highest slot ever claimed; only grows */
};

/* {used, leased, version}: see the protocol. Changed only by 16-byte compare-and-swap. */
union region_share_word {
    struct {
        uint64_t used : 48;
        uint64_t version_low : 16;
        uint64_t leased : 48;
        uint64_t version_high : 16;
    };
    unsigned __int128 word;
};

/* What one process uses on one device: one cache line. */
struct region_share {
    union region_share_word share;
    /* Intent of a raise; `intent_version` is 0 while the other two are being written. */
    uint64_t intent_version;
    uint64_t intent_bytes;
    uint32_t intent_tag;
    uint32_t reserved;
    /* For people and metrics, by the owner only: parts of `used`. */
    uint64_t context_bytes;
    uint64_t module_bytes;
};

/* {pid, pid namespace, start time}: all zero = free. Changed only by 16-byte compare-and-swap. */
union region_owner {
    struct {
        uint32_t pid;
        uint32_t pid_namespace; /* low 32 bits of the inode */
        uint64_t start_ticks;
    };
    unsigned __int128 word;
};

struct region_slot {
    union region_owner owner;
    uint64_t last_launch_ns;
    uint64_t launches;
    uint64_t refusals;
    uint64_t device_time_ns; /* measured or estimated, all devices */
    uint64_t waited_ns;
    uint64_t reserved;
};

union region_total_word {
    struct {
        uint64_t total;
        uint64_t version : 48;
        uint64_t slot : 16;
    };
    unsigned __int128 word;
};

/* One device of the container: memory line, compute line, description lines. */
struct region_device {
    union region_total_word total;
    uint64_t over_since_ns; /* 0, or since when use exceeds the limit after it shrank */
    uint64_t reserved0[5];
    /* compute: own cache line, see budget.h */
    uint64_t paid_until_ns;
    uint32_t budget_futex;
    uint32_t reserved1;
    uint64_t drawn_ns;
    uint64_t reserved2[5];
    char uuid[REGION_UUID];
};

_Static_assert(sizeof(struct region_header) == 64, "header");
_Static_assert(sizeof(struct region_share) == REGION_LINE, "share is one line");
_Static_assert(offsetof(struct region_share, intent_version) == 16, "intent");
_Static_assert(sizeof(struct region_slot) == REGION_LINE, "slot is one line");
_Static_assert(sizeof(struct region_device) == 3 * REGION_LINE, "device");
_Static_assert(offsetof(struct region_device, paid_until_ns) == REGION_LINE, "compute line");
_Static_assert(offsetof(struct region_device, uuid) == 2 * REGION_LINE, "uuid line");

#endif
