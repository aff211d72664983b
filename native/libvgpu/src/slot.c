/* SPDX-License-Identifier: Apache-2.0 */
#include "slot.h"

#include <string.h>

#include "account_lease.h"
#include "atomic.h"
#include "process.h"

/* Owners in other pid namespaces that one look judges; more wait for the next. */
#ifndef FOREIGN_AT_ONCE
#define FOREIGN_AT_ONCE 64u
#endif

#define DOUBLING_LEAST 16u

static union region_owner owner_of(const struct region *region, uint32_t slot)
{
    return (union region_owner){.word = atomic_guess16(&region->slots[slot].owner)};
}

static void grow_slots_seen(const struct region *region, uint32_t at_least)
{
    for (;;) {
        uint32_t seen = atomic_load4(region->slots_seen);
        /* A value that a vandal lowered is corrected, or shares above would be left out of every sum. */
        if (seen >= at_least || atomic_swap4(region->slots_seen, seen, at_least)) return;
    }
}

static void empty(const struct region *region, uint32_t slot, const union region_owner *owner)
{
    for (uint32_t device = 0; device < region->device_count; device++)
        lease_empty(region, device, slot, owner);
}

void slot_release(const struct region *region, uint32_t slot, const union region_owner *owner)
{
    empty(region, slot, owner);
    (void)atomic_swap16(&region->slots[slot].owner, owner->word, 0);
}

/* Counted before it is claimed, so that no claimed slot is left out of a sum, whenever its owner is killed. */
static bool take(const struct region *region, uint32_t slot, const union region_owner *self)
{
    union region_owner nobody = {.word = 0};
    empty(region, slot, &nobody); /* nothing is in a free slot but what a vandal put there */
    grow_slots_seen(region, slot + 1);
    if (!atomic_swap16(&region->slots[slot].owner, 0, self->word)) return false;
    struct region_slot *line = &region->slots[slot];
    atomic_store8(&line->last_launch_ns, 0);
    atomic_store8(&line->launches, 0);
    atomic_store8(&line->refusals, 0);
    atomic_store8(&line->device_time_ns, 0);
    atomic_store8(&line->waited_ns, 0);
    atomic_store8(&line->idle_launches, 0);
    for (uint32_t device = 0; device < region->device_count; device++) {
        struct region_share *share = lease_share(region, device, slot);
        atomic_store8(&share->context_bytes, 0);
        atomic_store8(&share->module_bytes, 0);
    }
    return true;
}

/* Every slot ever seen is added up in each sum: before their number doubles, those of dead processes are reclaimed. */
static bool is_doubling(uint32_t seen)
{
    return seen >= DOUBLING_LEAST && (seen & (seen - 1)) == 0;
}

uint32_t slot_claim(const struct region *region, const union region_owner *self)
{
    /* Slots that this process left before an exec of itself, or a detach that was interrupted: only it may release them. */
    uint32_t seen = lease_slots(region);
    bool is_full = true;
    for (uint32_t i = 0; i < seen; i++) {
        if (owner_of(region, i).word == self->word) slot_release(region, i, self);
        if (owner_of(region, i).word == 0) is_full = false;
    }
    if (is_full && is_doubling(seen)) (void)slot_reclaim(region, self, REGION_NO_SLOT);
    for (int attempt = 0; attempt < 2; attempt++) {
        for (uint32_t i = 0; i < region->slot_count; i++)
            if (owner_of(region, i).word == 0 && take(region, i, self)) return i;
        if (slot_reclaim(region, self, REGION_NO_SLOT).reclaimed == 0) break;
    }
    return REGION_NO_SLOT;
}

static void release_counted(const struct region *region, uint32_t slot, const union region_owner *owner)
{
    slot_release(region, slot, owner);
    atomic_add8(&region->control->reclaimed, 1);
}

struct slot_found slot_reclaim(const struct region *region, const union region_owner *self, uint32_t own)
{
    struct slot_found found = {0};
    union region_owner foreign[FOREIGN_AT_ONCE];
    uint32_t foreign_slot[FOREIGN_AT_ONCE];
    bool alive[FOREIGN_AT_ONCE];
    uint32_t foreign_count = 0;
    uint32_t seen = lease_slots(region);
    for (uint32_t i = 0; i < seen; i++) {
        union region_owner owner = owner_of(region, i);
        if (i == own) continue;
        if (owner.word == 0) {
            empty(region, i, &owner);
            continue;
        }
        enum process_life life = process_life(self, &owner);
        if (life == PROCESS_DEAD) {
            release_counted(region, i, &owner);
            found.reclaimed++;
        } else if (life == PROCESS_UNKNOWN && foreign_count < FOREIGN_AT_ONCE) {
            foreign[foreign_count] = owner;
            foreign_slot[foreign_count++] = i;
        }
    }
    if (foreign_count == 0) return found;
    process_life_foreign(self, foreign, alive, foreign_count);
    for (uint32_t i = 0; i < foreign_count; i++) {
        if (alive[i]) {
            found.unknown++;
            continue;
        }
        release_counted(region, foreign_slot[i], &foreign[i]);
        found.reclaimed++;
    }
    return found;
}

uint32_t slot_count_taken(const struct region *region)
{
    uint32_t taken = 0;
    uint32_t seen = lease_slots(region);
    for (uint32_t i = 0; i < seen; i++)
        taken += owner_of(region, i).word != 0;
    return taken;
}
