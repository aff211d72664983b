/* SPDX-License-Identifier: Apache-2.0 */
/* See hook.h. Locks taken here: none. */
#include "hook.h"

#include <sched.h>

#define NO_INCARNATION UINT32_MAX

_Atomic(uint32_t) hook_incarnation = NO_INCARNATION;

/* --- modules --- */

/* Bounds of the section of HOOK_MODULES, by the names that the linker gives them. */
extern const struct hook_module modules_begin[] __asm__("__start_hook_modules") __attribute__((visibility("hidden")));
extern const struct hook_module modules_end[] __asm__("__stop_hook_modules") __attribute__((visibility("hidden")));

/* A child has the parent's tables, but not its memory: empty them before their first use. A thread that loses the claim
   spins until the reset completes; a claim inherited over a fork has the parent's number and blocks no thread. */
void hook_new_image(void)
{
    static _Atomic(uint32_t) claimed = NO_INCARNATION;
    uint32_t now = account_incarnation();
    uint32_t before = atomic_load(&claimed);
    if (before != now && atomic_compare_exchange_strong(&claimed, &before, now)) {
        for (const struct hook_module *module = modules_begin; module < modules_end; module++)
            if (module->reset) module->reset();
        atomic_store_explicit(&hook_incarnation, now, memory_order_release);
    }
    while (atomic_load_explicit(&hook_incarnation, memory_order_acquire) != now)
        sched_yield();
}

void hook_forget_context(const struct hook_context *ended)
{
    for (const struct hook_module *module = modules_begin; module < modules_end; module++)
        if (module->forget_context) module->forget_context(ended);
}

bool hook_settle(int device)
{
    bool refunded = false;
    for (const struct hook_module *module = modules_begin; module < modules_end; module++)
        if (module->settle) refunded |= module->settle(device);
    return refunded;
}

bool hook_trim(int device)
{
    bool refunded = false;
    for (const struct hook_module *module = modules_begin; module < modules_end; module++)
        if (module->trim) refunded |= module->trim(device);
    return refunded;
}

/* --- charging --- */

bool hook_charge_again(int device, uint64_t bytes)
{
    bool fits =
        (hook_settle(device) && account_charge(device, bytes)) || (hook_trim(device) && account_charge(device, bytes));
    if (!fits) account_say_refused(device, bytes);
    return fits;
}

bool hook_remember(struct table *table, uint64_t key, struct held held)
{
    struct held replaced;
    enum table_put outcome = table_put(table, key, held, &replaced);
    if (UNLIKELY(outcome == TABLE_REPLACED)) account_refund((int)replaced.device, replaced.bytes);
    return outcome != TABLE_NO_MEMORY;
}

struct forgetting {
    void (*note)(int device, int64_t delta);
};

static bool has_tag(const struct held *held, const void *tag)
{
    return held->tag == *(const uint8_t *)tag;
}

static void refund(uint64_t key, const struct held *held, void *into)
{
    const struct forgetting *forgetting = into;
    (void)key;
    account_refund((int)held->device, held->bytes);
    if (forgetting->note) forgetting->note((int)held->device, -(int64_t)held->bytes);
}

void hook_forget_tag(struct table *table, uint8_t tag, void (*note)(int device, int64_t delta))
{
    struct forgetting forgetting = {note};
    table_take_if(table, has_tag, &tag, refund, &forgetting);
}
