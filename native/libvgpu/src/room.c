/* SPDX-License-Identifier: Apache-2.0 */
/* See room.h. Locks taken here: none. Called with hooks active: no. */
#include "room.h"

#include <stdbool.h>
#include <string.h>

#include "limits.h"
#include "platform.h"

enum { READ_TRIES = 64 };

static const struct room_page *page;
static struct platform_file mapped; /* the file of `page` */

static const struct room_page *open_page(struct platform_file *file)
{
    const struct room_page *fresh = platform_map(LIMITS_ROOM_PATH, sizeof *fresh, file);
    if (fresh == NULL) return NULL;
    if (fresh->magic == ROOM_MAGIC && fresh->layout == ROOM_LAYOUT && fresh->device_bytes == sizeof *fresh->devices &&
        fresh->device_count <= ROOM_DEVICES)
        return fresh;
    platform_unmap(fresh, sizeof *fresh);
    return NULL;
}

/* A fork in the middle leaves the child a page that is mapped, of the file that `mapped` names or of none that it finds. */
void room_look(void)
{
    struct platform_file named;
    const struct room_page *before = __atomic_load_n(&page, __ATOMIC_RELAXED);
    bool found = platform_find(LIMITS_ROOM_PATH, &named);
    if (found && before != NULL && named.device == mapped.device && named.inode == mapped.inode) return;
    struct platform_file file = {0};
    const struct room_page *fresh = found ? open_page(&file) : NULL;
    __atomic_store_n(&page, fresh, __ATOMIC_RELEASE);
    mapped.device = file.device;
    __atomic_store_n(&mapped.inode, file.inode, __ATOMIC_RELEASE);
    if (before != NULL) platform_unmap(before, sizeof *before);
}

static uint64_t granted(const struct room_device *device, uint64_t now_ns)
{
    for (int i = 0; i < READ_TRIES; i++) {
        uint32_t sequence = __atomic_load_n(&device->sequence, __ATOMIC_ACQUIRE);
        uint64_t lease_until_ns = __atomic_load_n(&device->lease_until_ns, __ATOMIC_ACQUIRE);
        uint64_t bytes = __atomic_load_n(&device->memory_bytes, __ATOMIC_ACQUIRE);
        if ((sequence & 1) == 0 && __atomic_load_n(&device->sequence, __ATOMIC_RELAXED) == sequence)
            return lease_until_ns > now_ns ? bytes : 0;
    }
    return 0;
}

uint64_t room_bytes(const char *uuid, uint64_t now_ns)
{
    const struct room_page *known = __atomic_load_n(&page, __ATOMIC_RELAXED);
    for (uint32_t i = 0; known != NULL && i < ROOM_DEVICES; i++)
        if (strncmp(known->devices[i].uuid, uuid, ROOM_UUID) == 0) return granted(&known->devices[i], now_ns);
    return 0;
}
