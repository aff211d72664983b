/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The budget of device time: one shared word per device, drawn in quanta (virtual scheduling).
 *
 * Decides from when on a drawn quantum may be spent. Pure but for the atomic word: no clock, no sleep, no driver.
 * The word is region_device.paid_until_ns: nanoseconds of CLOCK_MONOTONIC whose low 7 bits hold the percentage at which
 * the debt ahead was drawn, so that one swap rescales a debt when the limit changes. Device time is in nanoseconds; at
 * `pct` percent, n ns of device time move the word by n * 100 / pct.
 * The word lies in memory that the tenant can write: every value of it is taken, none makes a wait longer than
 * BUDGET_DEBT_MAX_NS, and the private copy in `struct budget` holds this process to its share whatever is written.
 * Locks taken here: none; `struct budget` belongs to one caller at a time. Decision: docs/adr/0008-limiter.md.
 */
#ifndef VGPU_BUDGET_H
#define VGPU_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

#define BUDGET_NS_PER_MS UINT64_C(1000000)
/* A container that was idle may run this much time ahead of its share, counted in time at its percentage. */
#define BUDGET_BURST_NS (50 * BUDGET_NS_PER_MS)
/* One round of draws by all processes of the container. */
#define BUDGET_PERIOD_NS (100 * BUDGET_NS_PER_MS)
#define BUDGET_QUANTUM_MIN_NS UINT64_C(200000)
#define BUDGET_DEBT_MAX_NS (600000 * BUDGET_NS_PER_MS)

/* The terms at the moment of a draw. */
struct budget_terms {
    uint32_t pct;       /* 1..100 */
    uint32_t siblings;  /* processes of the container that share the budget, this one included */
    uint64_t burst_ns;  /* see BUDGET_BURST_NS */
    uint64_t period_ns; /* see BUDGET_PERIOD_NS */
    uint64_t lead_ns;   /* so much earlier than paid up a quantum may be spent; keeps the device fed at 100 % */
    bool enforced;      /* false: account, but let everything go at once */
};

/* One process and one device. */
struct budget {
    uint64_t *word; /* in the region */
    uint64_t own_until_ns;
    uint32_t own_pct;
};

/* A quantum that was drawn and may be spent from `start_ns` on. */
struct budget_draw {
    uint64_t start_ns;
    uint64_t own_start_ns;
    uint64_t device_ns;
    uint32_t pct;
};

/* Device time of one quantum under these terms. */
uint64_t budget_quantum(const struct budget_terms *terms);

/* Charge `device_ns` to the word; the place in the queue is taken at once, so a later draw starts later. */
void budget_draw(struct budget *budget, uint64_t now_ns, const struct budget_terms *terms, uint64_t device_ns,
                 struct budget_draw *draw);

/* When the quantum may be spent: a time not after now if at once. Rescales the wait when the limit has changed. */
uint64_t budget_due(struct budget_draw *draw, uint64_t now_ns, const struct budget_terms *terms);

/* Charge what was used without having been drawn, since `since_ns` at the earliest. No more than the device can have worked
   since then is owed by all processes together. Returns what was charged. */
uint64_t budget_owe(struct budget *budget, uint64_t now_ns, const struct budget_terms *terms, uint64_t device_ns,
                    uint64_t since_ns);

/* Give device time back that was drawn and is not needed. */
void budget_refund(struct budget *budget, uint64_t now_ns, const struct budget_terms *terms, uint64_t device_ns);

#endif
