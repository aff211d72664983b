/* SPDX-License-Identifier: Apache-2.0 */
/* Linear, pitched and managed memory, charged by request; and the container's view of its devices. */
#ifndef VGPU_MEMORY_H
#define VGPU_MEMORY_H

#include <stdint.h>

/* The container's view of a device in bytes. `total` never changes while the limits stay: more than free and used together
   where the agent has not granted the rest. */
struct memory_view {
    uint64_t total;
    uint64_t free;
    uint64_t used;
};

/* Given what the driver reports of the device. */
struct memory_view memory_view(int device, uint64_t real_total, uint64_t real_free);

#endif
