/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stream-ordered allocation: pools are charged for what they have reserved from the card.
 *
 * Of each pool the larger of two figures is charged: what the application holds of it by its own requests, and what the
 * driver says it has reserved. So a request is charged before the driver sees it, rounded up to the piece by which pools of
 * the device were seen to grow (in the region, so that the next process knows it); memory that the pool keeps for later
 * stays charged, and what it gives back is refunded at the next synchronisation, query, trim or refusal.
 */
#ifndef VGPU_POOL_H
#define VGPU_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "table.h"

/* A pointer of a pool was freed; `done`: the driver has waited for it. */
void pool_freed(const struct held *held, bool done);

/* Ask the driver what the pools of a device have reserved; true: something was refunded. */
bool pool_settle_device(int device);

/* The same if a pool may hold less than is charged for it. One load otherwise. */
void pool_settle_if_slack(int device);

/* The primary context was reset: pointers of its pools that the driver does not hold any more are gone. */
void pool_device_reset(int device);

/* `bytes` rounded up to the piece by which the driver reserves memory on this device, as far as that is known. */
uint64_t pool_round(int device, uint64_t bytes);

/* The driver has reserved so much for a pool or for graphs, which is a multiple of its piece. */
void pool_learn(int device, uint64_t reserved);

void pool_reset(void);

#endif
