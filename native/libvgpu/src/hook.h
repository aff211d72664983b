/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the hooks share: entering a hook, charging, and what each of them does when a context or the process image ends.
 *
 * Order in every hook that makes memory: charge, ask the driver, refund on failure, remember on success. A request that
 * does not fit is CUDA_ERROR_OUT_OF_MEMORY, so that frameworks free their caches and try again. Without a current context,
 * or on a device without limits, the driver is called and nothing else is done.
 */
#ifndef VGPU_HOOK_H
#define VGPU_HOOK_H

#include <stdbool.h>
#include <stdint.h>

#include "account.h"
#include "account_fast.h"
#include "fork.h"
#include "symbols.h"
#include "table.h"

#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

extern _Atomic(uint32_t) hook_incarnation;
void hook_new_image(void);

/* First in every hook that reads or writes a table: a forked child starts with empty ones. */
static inline void hook_enter(void)
{
    /* Nobody's number is 0, so a child that has none yet is a new image as well. */
    uint32_t incarnation = __atomic_load_n(&fork_words->incarnation, __ATOMIC_RELAXED);
    if (UNLIKELY(incarnation != atomic_load_explicit(&hook_incarnation, memory_order_acquire))) hook_new_image();
}

/* Charge; if it does not fit, see first what pools and graphs have given back to the driver. */
static inline bool hook_charge(int device, uint64_t bytes);
bool hook_charge_again(int device, uint64_t bytes);

static inline void hook_refund(int device, uint64_t bytes)
{
    if (UNLIKELY(!account_refund_fast(device, bytes))) account_refund(device, bytes);
}

static inline bool hook_charge(int device, uint64_t bytes)
{
    return LIKELY(account_charge_fast(device, bytes)) || account_charge(device, bytes) ||
           hook_charge_again(device, bytes);
}

/* Remember what was charged under a key of the driver's; what the driver has reused meanwhile is refunded. False: no
   memory for it; the caller takes back what it made. */
bool hook_remember(struct table *table, uint64_t key, struct held held);

/* Everything that dies with a context: refund it, and tell `note` (may be NULL). `tag` is the context's. */
void hook_forget_context(struct table *table, uint8_t tag, void (*note)(int device, int64_t delta));

#endif
