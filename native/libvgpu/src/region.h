/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layout of the region: the file through which the processes of one container share what they use.
 *
 * Fixed-width fields at asserted offsets, little-endian hosts only, every field naturally aligned.
 * The file is writable by the tenant, so an offset, a count or a pid in it is trusted only within the header's checked
 * sizes; limits are never read from it. Times are CLOCK_MONOTONIC nanoseconds, sizes bytes.
 * Protocol and invariants: docs/adr/0008-limiter.md.
 *
 *     header | control | device[device_count] | slot[slot_count] | share[device_count][slot_count]
 *
 * All shares of one device are neighbours: share of slot s on device d is number d * slot_count + s.
 */
#ifndef VGPU_REGION_H
#define VGPU_REGION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define REGION_MAGIC UINT64_C(0x31494d4148204756) /* "VG HAMI1" as bytes */
#define REGION_LAYOUT 1u
#define REGION_DIRECTORY "/run/hami"
#define REGION_FILE_NAME "region-1"
#define REGION_NAME_SUFFIX "-1" /* to the name of CUDA_DEVICE_MEMORY_SHARED_CACHE, where there is no limits file */
#define REGION_SLOTS 2048u
#define REGION_DEVICES_MAX 64u
#define REGION_LINE 64u
#define REGION_UUID 64u

/* Written once by the creator before the file gets its name; never changed afterwards but for `slots_seen`. */
struct region_header {
    uint64_t magic;
    uint32_t layout;
    uint32_t header_bytes; /* this header and the control line */
    uint64_t file_bytes;
    uint32_t device_count;
    uint32_t slot_count;
    uint64_t devices_offset;
    uint64_t slots_offset;
    uint64_t shares_offset;
    uint32_t checksum; /* FNV-1a (32 bits) of the 56 bytes before it */
    uint32_t
        slots_seen; /* one more than the highest slot ever claimed; only grows; a reader takes at most slot_count */
};

/* Behind the header: what the processes share but for devices. */
struct region_control {
    uint64_t reclaim_after_ns; /* the process that advances this looks for dead ones */
    uint64_t reclaimed;        /* slots reclaimed from dead processes, for metrics */
    uint64_t errors;           /* refunds of more than was used, for metrics */
    uint64_t touched_ns;       /* when calls of the driver were last seen, by a process behind a gate (gate.h) */
    uint64_t reserved[4];
};

/* {slack, leased, version, tight}: see the protocol. Used is `leased - slack`. The lease changes by 16-byte
   compare-and-swap only; charges and refunds within it swap the low half, which alone decides if they fit. A reader
   of both halves reads `low` again: if it is the same, they belong together. */
union region_share_word {
    struct {
        uint64_t slack : 48;
        uint64_t tight : 1; /* memory is short: slack is 0, and what is refunded leaves the lease as well */
        uint64_t version_low : 15;
        uint64_t leased : 48;
        uint64_t version_high : 16;
    };
    struct {
        uint64_t low;
        uint64_t high;
    };
    unsigned __int128 word;
};

/* Use of one device by one process: one cache line. */
struct region_share {
    union region_share_word share;
    /* Intent of a raise: what W.version it makes; 0 while the other three are being written. */
    uint64_t intent_version;
    uint64_t intent_lease; /* added to `leased` */
    uint64_t intent_use;   /* the part of it that is used at once; the rest is slack */
    uint64_t intent_tag;   /* version that the share word then has */
    /* For people and metrics, by the owner only: parts of `used`. */
    uint64_t context_bytes;
    uint64_t module_bytes;
};

/* {pid, pid namespace, start time, image}: all zero = free. Changed only by 16-byte compare-and-swap. */
union region_owner {
    struct {
        uint32_t pid;
        uint32_t pid_namespace;    /* low 32 bits of the inode */
        uint64_t start_ticks : 48; /* of /proc/<pid>/stat; 0: not known */
        uint64_t image : 16;       /* digest of the program image, so that exec starts over; 0: not known */
    };
    struct {
        uint64_t low;
        uint64_t high;
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
    uint64_t idle_launches; /* `launches` when the process declared itself idle, see bell.h */
};

#define REGION_NO_SLOT 0xffffu

/* {total, version, slot}: sum of leases at least, and whose raise was the last. By 16-byte compare-and-swap. */
union region_total_word {
    struct {
        uint64_t total;
        uint64_t version : 48;
        uint64_t slot : 16;
    };
    struct {
        uint64_t low;
        uint64_t high;
    };
    unsigned __int128 word;
};

/* One device of the container: memory line, compute line, description line. */
struct region_device {
    union region_total_word total;
    uint64_t over_since_ns; /* 0, or since when use exceeds the limit after it shrank */
    /* Bytes that the driver was seen to take, so that the next process can charge them first; 0: not seen yet. */
    uint64_t context_cost;
    uint64_t pool_piece;
    uint64_t block_piece;
    uint64_t reserved0[2];
    /* compute: own cache line, see budget.h */
    uint64_t paid_until_ns;
    uint32_t budget_futex;
    uint32_t reserved1;
    uint64_t drawn_ns;
    uint64_t roster;        /* processes that launch in this round and the last one, see core_siblings */
    uint64_t starved_ns;    /* time for which processes waited for higher priorities beyond the first second */
    uint64_t pass_after_ns; /* when a blocked process may next pass a part, see compute.c */
    uint64_t reserved2[2];
    char uuid[REGION_UUID]; /* text, zero-terminated; empty: known by its CUDA ordinal only */
};

_Static_assert(sizeof(struct region_header) == 64, "header");
_Static_assert(offsetof(struct region_header, checksum) == 56, "checksum");
_Static_assert(sizeof(struct region_control) == REGION_LINE, "control is one line");
_Static_assert(offsetof(struct region_control, touched_ns) == 24, "touched");
_Static_assert(sizeof(struct region_share) == REGION_LINE, "share is one line");
_Static_assert(offsetof(struct region_share, intent_version) == 16, "intent");
_Static_assert(offsetof(struct region_share, context_bytes) == 48, "parts");
_Static_assert(sizeof(struct region_slot) == REGION_LINE, "slot is one line");
_Static_assert(offsetof(struct region_slot, last_launch_ns) == 16, "owner");
_Static_assert(sizeof(struct region_device) == (size_t)3 * REGION_LINE, "device");
_Static_assert(offsetof(struct region_device, paid_until_ns) == REGION_LINE, "compute line");
_Static_assert(offsetof(struct region_device, roster) == REGION_LINE + 24, "roster");
_Static_assert(offsetof(struct region_device, starved_ns) == REGION_LINE + 32, "starved");
_Static_assert(offsetof(struct region_slot, idle_launches) == 56, "idle");
_Static_assert(offsetof(struct region_device, uuid) == (size_t)2 * REGION_LINE, "uuid line");

/* A region mapped into this process. Values of the header when it was checked; the header is not read again. */
struct region {
    void *base;
    uint64_t bytes;
    uint32_t device_count;
    uint32_t slot_count;
    bool shared; /* false: made for this process and its children, because the file could not be had */
    struct region_control *control;
    struct region_device *devices;
    struct region_slot *slots;
    struct region_share *shares;
    uint32_t *slots_seen;
};

struct region_want {
    uint32_t device_count;
    const char (*uuids)[REGION_UUID]; /* device_count of them */
};

/* Map the file, creating it if it has not its name yet. A file that is not exactly a region of this layout for these
   devices is put aside under the name with ".broken" and created again. 0; else an errno, ENOENT where there is no directory
   for it, and `problem` says why. */
int region_open(const char *path, const struct region_want *want, struct region *region, char *problem,
                size_t problem_size);

/* A region of anonymous memory, shared with children only. False: not even memory can be had. */
bool region_open_private(const struct region_want *want, struct region *region);

void region_close(struct region *region);

#endif
