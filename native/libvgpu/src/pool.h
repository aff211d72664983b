/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stream-ordered allocation: pools are charged for the memory that they have reserved from the card.
 *
 * Of each pool the larger of two figures is charged: what the application holds of it by its own requests, and what the
 * driver reports as reserved. So a request is charged before the driver is called, rounded up to whole pieces (piece.h);
 * memory that the pool keeps for later stays charged, and what it returns is refunded at the next synchronization, query,
 * trim or refusal.
 */
#ifndef VGPU_POOL_H
#define VGPU_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "hook.h"
#include "pointer.h"
#include "table.h"

/* A pointer of a pool was freed; `done`: the driver has waited for it. */
void pool_freed(const struct held *held, bool done);

/* The driver has reused the address of an entry of pointer_table: its memory is freed. */
void pool_replaced(const struct held *held);

/* As hook_remember, for pointer_table. */
static inline bool pool_remember(uint64_t pointer, struct held held)
{
    struct held replaced;
    enum table_put outcome = table_put(&pointer_table, pointer, held, &replaced);
    if (UNLIKELY(outcome == TABLE_REPLACED)) pool_replaced(&replaced);
    return outcome != TABLE_NO_MEMORY;
}

/* Query what the pools of a device have reserved; true: something was refunded. */
bool pool_settle_device(int device);

/* Have the driver release what the pools of a device keep unused; true: something was refunded. Before a request is refused:
   the release threshold is there for speed, and an error costs more. */
bool pool_trim_device(int device);

/* As pool_settle_device if a pool may hold less than is charged for it. One load otherwise. */
void pool_settle_if_slack(int device);

/* If a primary context was reset, forget pointers of its pools that the driver does not hold any more. */
void pool_forget_context(const struct hook_context *ended);

void pool_reset(void);

#endif
