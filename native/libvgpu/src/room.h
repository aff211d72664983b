/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page in which the node's agent grants this container memory beyond its requests (ADR 0052).
 *
 * One file per container, beside its doorbell, written by the agent alone, in place; the agent may also replace it by
 * another file. The container sees its directory read-only: it can neither write nor truncate a page that processes have
 * mapped, and the agent never shortens one. Times are CLOCK_MONOTONIC nanoseconds, which all containers of a node share.
 * The agent writes a device so: `sequence` odd, fields, `sequence` even.
 * Decides nothing but which bound the page grants at a moment; the bounds of the limits file are account.c's.
 * Locks taken here: none. All calls of a process are made under the lock of fork.h.
 */
#ifndef VGPU_ROOM_H
#define VGPU_ROOM_H

#include <stddef.h>
#include <stdint.h>

#define ROOM_MAGIC UINT64_C(0x314d52494d414856) /* "VHAMIRM1" as bytes */
#define ROOM_LAYOUT 1u
#define ROOM_DEVICES 64u
#define ROOM_UUID 64u

struct room_device {
    char uuid[ROOM_UUID]; /* text, zero-terminated; empty: unused */
    uint32_t sequence;    /* odd while being written */
    uint32_t reserved0;
    uint64_t lease_until_ns; /* the grant is valid until then */
    uint64_t memory_bytes;   /* that the container may use, its request included */
    uint64_t reserved1[5];
};

struct room_page {
    uint64_t magic;
    uint32_t layout;
    uint32_t device_bytes;
    uint32_t device_count;
    uint32_t reserved[11];
    struct room_device devices[ROOM_DEVICES];
};

_Static_assert(sizeof(struct room_device) == 128, "device");
_Static_assert(offsetof(struct room_device, sequence) == 64, "sequence");
_Static_assert(offsetof(struct room_device, lease_until_ns) == 72, "lease");
_Static_assert(offsetof(struct room_device, memory_bytes) == 80, "memory");
_Static_assert(offsetof(struct room_page, device_count) == 16, "count");
_Static_assert(offsetof(struct room_page, devices) == 64, "page");

/* Map the file that has the page's name now, unless it is the mapped one. */
void room_look(void);

/* Bytes of the device that the mapped page grants at `now_ns`; 0: it grants none, its lease has ended, it is being written,
   or there is no page of this layout. */
uint64_t room_bytes(const char *uuid, uint64_t now_ns);

#endif
