/* SPDX-License-Identifier: Apache-2.0 */
/* Linear, pitched and managed memory, charged by request; and the container's view of its devices. */
#ifndef VGPU_MEMORY_H
#define VGPU_MEMORY_H

#include <stdint.h>

/* The container's view of a device: total and free bytes, given the total of the driver. */
void memory_view(int device, uint64_t real_total, uint64_t *total, uint64_t *free);

#endif
