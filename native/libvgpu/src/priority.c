/* SPDX-License-Identifier: Apache-2.0 */
/* The agent's page of activity; see priority.h. Locks taken here: none. Called with hooks active: no. */
#include "priority.h"

#include <string.h>

#include "platform.h"

enum { READ_TRIES = 64 };

static const struct priority_page *kept;

const struct priority_page *priority_open(const char *path)
{
    const struct priority_page *page = platform_map(path, sizeof *page, NULL);
    if (page == NULL) return NULL;
    if (page->magic == PRIORITY_MAGIC && page->layout == PRIORITY_LAYOUT &&
        page->device_bytes == sizeof(struct priority_device) && page->device_count <= PRIORITY_DEVICES)
        return page;
    priority_close(page);
    return NULL;
}

void priority_close(const struct priority_page *page)
{
    if (page != NULL) platform_unmap(page, sizeof *page);
}

const struct priority_page *priority_known_page(void)
{
    return __atomic_load_n(&kept, __ATOMIC_ACQUIRE);
}

const struct priority_page *priority_page(void)
{
    const struct priority_page *page = priority_known_page();
    if (page != NULL) return page;
    const struct priority_page *fresh = priority_open(PRIORITY_PATH);
    if (fresh == NULL || __atomic_compare_exchange_n(&kept, &page, fresh, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return fresh;
    priority_close(fresh);
    return page;
}

const struct priority_device *priority_device(const struct priority_page *page, const char *uuid)
{
    if (page == NULL || uuid[0] == '\0') return NULL;
    for (uint32_t i = 0; i < PRIORITY_DEVICES; i++)
        if (strncmp(page->devices[i].uuid, uuid, PRIORITY_UUID) == 0) return &page->devices[i];
    return NULL;
}

bool priority_read(const struct priority_device *device, uint64_t now_ns, struct priority_view *view)
{
    for (int i = 0; i < READ_TRIES; i++) {
        uint32_t sequence = __atomic_load_n(&device->sequence, __ATOMIC_ACQUIRE);
        view->highest_active = __atomic_load_n(&device->highest_active, __ATOMIC_ACQUIRE);
        view->active_tenants = __atomic_load_n(&device->active_tenants, __ATOMIC_ACQUIRE);
        view->lease_until_ns = __atomic_load_n(&device->lease_until_ns, __ATOMIC_ACQUIRE);
        view->sequence = sequence;
        if ((sequence & 1) == 0 && __atomic_load_n(&device->sequence, __ATOMIC_RELAXED) == sequence)
            return view->lease_until_ns > now_ns;
    }
    /* A writer that died half way leaves the sequence odd: nothing is known any more. */
    return false;
}
