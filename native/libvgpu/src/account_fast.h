/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Charge and refund within the lease, inlined into the hooks through which every allocation goes; whether there is a
 * compute limit, into those through which every launch goes.
 *
 * Decides nothing but "yes, at once": whatever else there is to say, account.c says. The view is written by account.c
 * under the lock of fork.h and read without it.
 */
#ifndef VGPU_ACCOUNT_FAST_H
#define VGPU_ACCOUNT_FAST_H

#include <stdbool.h>
#include <stdint.h>

#include "account_lease.h"
#include "fork.h"
#include "region.h"

struct account_view {
    uint32_t device_count;
    uint32_t core_limited;
    struct region_share *own_shares[REGION_DEVICES_MAX];
    uint32_t core_pct[REGION_DEVICES_MAX];
};
extern struct account_view account_view;

static inline bool account_is_attached(void)
{
    return __atomic_load_n(&__atomic_load_n(&fork_words, __ATOMIC_ACQUIRE)->attached, __ATOMIC_ACQUIRE) != 0;
}

/* This process's share of the device; NULL: none, or not attached yet. */
static inline struct region_share *account_own_share(int device)
{
    if (!account_is_attached() || (uint32_t)device >= __atomic_load_n(&account_view.device_count, __ATOMIC_RELAXED))
        return NULL;
    return __atomic_load_n(&account_view.own_shares[device], __ATOMIC_RELAXED);
}

/* See account_core_pct; of this process as it is attached. */
static inline uint32_t account_core_pct_fast(int device)
{
    if ((uint32_t)device >= __atomic_load_n(&account_view.device_count, __ATOMIC_RELAXED)) return 100;
    return __atomic_load_n(&account_view.core_pct[device], __ATOMIC_RELAXED);
}

/* true: charged. false: nothing has happened, account_charge knows what is to be done. */
static inline bool account_charge_fast(int device, uint64_t bytes)
{
    struct region_share *share = account_own_share(device);
    return __builtin_expect(share != NULL, 1) && lease_charge(share, bytes);
}

/* true: refunded. false: nothing has happened, account_refund knows what is to be done. */
static inline bool account_refund_fast(int device, uint64_t bytes)
{
    struct region_share *share = account_own_share(device);
    return __builtin_expect(share != NULL, 1) && lease_refund_within(share, bytes);
}

#endif
