/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slots of the region: one per process, claimed and freed by one swap of the owner word, never moved.
 */
#ifndef VGPU_SLOT_H
#define VGPU_SLOT_H

#include <stdbool.h>
#include <stdint.h>

#include "region.h"

/* Claim a slot with empty shares; REGION_NO_SLOT: all are taken by processes that live, as far as can be judged. */
uint32_t slot_claim(const struct region *region, const union region_owner *self);

/* Empty the shares and free the slot. Nothing happens if it is not `owner`'s (any more). */
void slot_release(const struct region *region, uint32_t slot, const union region_owner *owner);

struct slot_found {
    uint32_t reclaimed;
    uint32_t unknown; /* owners that this process cannot judge, counted as alive */
};

/* Release the slots of the dead, `own` excepted. Reads /proc. */
struct slot_found slot_reclaim(const struct region *region, const union region_owner *self, uint32_t own);

/* Slots that have an owner. */
uint32_t slot_count_taken(const struct region *region);

#endif
