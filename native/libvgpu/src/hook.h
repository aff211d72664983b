/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared by all hooks: entering a hook, charging, and the table of modules that reset, forget and settle together.
 *
 * Order in every hook that makes memory: charge, call the driver, refund on failure, remember on success. A request that
 * does not fit is CUDA_ERROR_OUT_OF_MEMORY, so that frameworks free their caches and retry. Without a current context,
 * or on a device without limits, the hook only calls the driver.
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

/* --- modules --- */

/* A context that has ended. */
struct hook_context {
    uint8_t tag; /* its tag in tables */
    int device;  /* index in the limits */
    bool primary;
};

/* The part of a module in events that concern all of them. A member may be NULL. */
struct hook_module {
    void (*reset)(void); /* in a forked child, before its first use of a table: drop what belongs to the parent */
    void (*forget_context)(const struct hook_context *ended); /* refund the memory that ended with the context */
    bool (*settle)(int device); /* set the charge to what the driver has reserved; true: something was refunded */
    bool (*trim)(int device);   /* have the driver release what it keeps unused; true: something was refunded */
};

/* Marks the one array of modules (init.c). The linker collects it, so that hook.c depends on no module, and a program
   that calls any hook first, before cuInit or in a forked child, has it without a registration. */
#define HOOK_MODULES __attribute__((section("hook_modules"), used))

/* Refund what ended with the context, in all modules. */
void hook_forget_context(const struct hook_context *ended);

/* Settle the device in all modules; true: something was refunded. */
bool hook_settle(int device);

/* The same after the driver has released the memory that it keeps for later. */
bool hook_trim(int device);

/* --- entering --- */

extern _Atomic(uint32_t) hook_incarnation;
void hook_new_image(void);

/* First in every hook that reads or writes a table: a forked child starts with empty ones. */
static inline void hook_enter(void)
{
    /* No process has the number 0, so a child that has none yet is a new image as well. */
    uint32_t incarnation = __atomic_load_n(&fork_words->incarnation, __ATOMIC_RELAXED);
    if (UNLIKELY(incarnation != atomic_load_explicit(&hook_incarnation, memory_order_acquire))) hook_new_image();
}

/* --- charging --- */

bool hook_charge_again(int device, uint64_t bytes);

static inline void hook_refund(int device, uint64_t bytes)
{
    if (UNLIKELY(!account_refund_fast(device, bytes))) account_refund(device, bytes);
}

/* Charge; if it does not fit, settle the device and retry, then trim it and retry. */
static inline bool hook_charge(int device, uint64_t bytes)
{
    return LIKELY(account_charge_fast(device, bytes)) || account_charge(device, bytes) ||
           hook_charge_again(device, bytes);
}

/* Remember a charge under the driver's key. If the driver has reused the key meanwhile, the older charge is refunded.
   False: no memory for the entry; the caller rolls back the allocation. */
bool hook_remember(struct table *table, uint64_t key, struct held held);

/* Take and refund all entries with this tag of a context; `note` (may be NULL) is called with each change. */
void hook_forget_tag(struct table *table, uint8_t tag, void (*note)(int device, int64_t delta));

#endif
