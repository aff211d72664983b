/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lease protocol of docs/adr/0008-limiter.md on one device of a mapped region.
 *
 * Decides what is granted. Knows no limit but the one it is given, no process but slots, no time. Every function may be
 * called by any number of processes at once and be killed at any instant; only a raise wants its slot's other threads
 * kept out, because a slot has one intent.
 */
#ifndef VGPU_ACCOUNT_LEASE_H
#define VGPU_ACCOUNT_LEASE_H

#include <stdbool.h>
#include <stdint.h>

#include "atomic.h"
#include "region.h"

#define LEASE_BYTES_MAX ((UINT64_C(1) << 48) - 1)

static inline struct region_share *lease_share(const struct region *region, uint32_t device, uint32_t slot)
{
    return &region->shares[(uint64_t)device * region->slot_count + slot];
}

/* Charge within the lease. false: the lease is too small. Concurrent changes of the lease do not matter as long as
   the slack suffices. */
static inline bool lease_charge(struct region_share *share, uint64_t bytes)
{
    for (;;) {
        union region_share_word seen = {.low = atomic_load8(&share->share.low)};
        if (bytes > seen.slack) return false;
        if (atomic_swap8(&share->share.low, seen.low, seen.low - bytes)) return true;
    }
}

uint64_t lease_refund_slowly(struct region_share *share, uint64_t bytes);

/* Return `bytes` to the slack. false: the share is tight, or so much is not used; nothing has happened. */
static inline bool lease_refund_within(struct region_share *share, uint64_t bytes)
{
    for (;;) {
        union region_share_word seen = {.low = atomic_load8(&share->share.low)};
        seen.high = atomic_load8(&share->share.high);
        /* Every change of the lease changes the low half too, but for refunds of a tight one. */
        if (seen.tight || seen.leased < seen.slack || bytes > seen.leased - seen.slack) return false;
        if (atomic_swap8(&share->share.low, seen.low, seen.low + bytes)) return true;
    }
}

/* Refund `bytes`, at most the bytes in use; returns the bytes refunded. */
static inline uint64_t lease_refund(struct region_share *share, uint64_t bytes)
{
    return lease_refund_within(share, bytes) ? bytes : lease_refund_slowly(share, bytes);
}

/* How many slots anybody ever had; what a vandal wrote there reaches no further than the file. */
static inline uint32_t lease_slots(const struct region *region)
{
    uint32_t seen = atomic_load4(region->slots_seen);
    return seen <= region->slot_count ? seen : region->slot_count;
}

/* At least the leases of all slots together. */
static inline uint64_t lease_total(const struct region *region, uint32_t device)
{
    return atomic_load8(&region->devices[device].total.low);
}

enum lease_answer {
    LEASE_GRANTED,
    LEASE_REFUSED,    /* with everything counted that anybody, dead or alive, has; see lease_still_refused */
    LEASE_IMPOSSIBLE, /* more than the limit, or than can be counted, whatever the others use */
};

/* Charge `bytes`, with up to `chunk` more of lease if there is room, raising the lease of `slot`. `limit` UINT64_MAX
   grants always. Revokes the slack of all processes before it refuses; `seen` is then the total word that it saw. */
enum lease_answer lease_request(const struct region *region, uint32_t device, uint32_t slot, uint64_t bytes,
                                uint64_t limit, uint64_t chunk, union region_total_word *seen);

/* After LEASE_REFUSED, and after the caller has then looked for the dead and found none: true means that at one instant
   since the request began the use of the living and `bytes` together exceeded the limit. false: ask again. */
bool lease_still_refused(const struct region *region, uint32_t device, uint64_t bytes, uint64_t limit,
                         const union region_total_word *seen);

/* Take away all slack of one slot, so that every further charge of it must raise. */
void lease_revoke(const struct region *region, uint32_t device, uint32_t slot);

/* Release the slack of the own slot above `keep`. */
void lease_trim(const struct region *region, uint32_t device, uint32_t slot, uint64_t keep);

/* Finish what the last raise of the device has begun. */
void lease_complete(const struct region *region, uint32_t device);

/* Empty the share of a slot whose owner word is `owner` (a dead one, or 0: none). */
void lease_empty(const struct region *region, uint32_t device, uint32_t slot, const union region_owner *owner);

/* Bytes used by one slot, by all slots. */
uint64_t lease_used_by(const struct region_share *share);
uint64_t lease_used(const struct region *region, uint32_t device);

#endif
