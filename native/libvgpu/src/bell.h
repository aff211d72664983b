/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The doorbell: one datagram to the agent when this process begins to launch, and one when it is idle.
 *
 * A process is not idle as long as one of its calls waits for the device. Where a lower priority waits for it and such a call
 * has returned since its last launch, it is idle after a multiple of its usual gaps between such a call and the next
 * launch; otherwise BELL_HOLD_MOST_NS after its last launch. It then records its count of launches
 * as `idle_launches` in its slot, so that the agent need not trust the datagram. An idle process is armed: its next launch
 * rings. The agent binds one socket per container, so a container that floods it delays only itself.
 * At most two datagrams per BELL_HOLD_LEAST_NS. A datagram that cannot be sent is dropped: the agent also polls.
 * Locks taken here: none.
 */
#ifndef VGPU_BELL_H
#define VGPU_BELL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef BELL_PATH
#define BELL_PATH "/run/hami-priority/bells/bell-1"
#endif
#define BELL_ACTIVE 'a'
#define BELL_IDLE 'i'

#define BELL_HOLD_LEAST_NS UINT64_C(1000000)
#define BELL_HOLD_MOST_NS UINT64_C(300000000)
/* A longer time without a launch is an end of the work and no gap in it. */
#define BELL_GAP_MOST_NS UINT64_C(10000000)
/* Older gaps do not count. */
#define BELL_GAP_KEPT_NS UINT64_C(10000000000)

enum { BELL_GAPS = 32, BELL_HOLD_RATIO = 4, BELL_PERCENTILE = 95 };

/* The last gaps, in which the device had nothing to do for the process. */
struct bell_gaps {
    uint64_t ended_ns[BELL_GAPS]; /* 0: unused */
    uint64_t length_ns[BELL_GAPS];
    uint32_t count; /* ever */
};

static inline void bell_note_gap(struct bell_gaps *gaps, uint64_t now_ns, uint64_t length_ns)
{
    if (length_ns > BELL_GAP_MOST_NS) return;
    uint32_t at = gaps->count++ % BELL_GAPS;
    gaps->ended_ns[at] = now_ns;
    gaps->length_ns[at] = length_ns;
}

/* Time without work after which the process counts as idle: a multiple of the percentile of the gaps. */
static inline uint64_t bell_hold(const struct bell_gaps *gaps, uint64_t now_ns)
{
    uint64_t sorted[BELL_GAPS];
    uint32_t count = 0;
    for (uint32_t i = 0; i < BELL_GAPS; i++) {
        if (gaps->ended_ns[i] == 0 || now_ns - gaps->ended_ns[i] > BELL_GAP_KEPT_NS) continue;
        uint32_t at = count++;
        for (; at > 0 && sorted[at - 1] > gaps->length_ns[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = gaps->length_ns[i];
    }
    uint64_t hold = count > 0 ? BELL_HOLD_RATIO * sorted[(count - 1) * BELL_PERCENTILE / 100] : 0;
    if (hold < BELL_HOLD_LEAST_NS) hold = BELL_HOLD_LEAST_NS;
    return hold < BELL_HOLD_MOST_NS ? hold : BELL_HOLD_MOST_NS;
}

/* One datagram; dropped where it cannot be sent. */
void bell_send(const void *bytes, size_t length);

extern uint32_t bell_armed;
extern uint32_t bell_waiting; /* threads that wait for the device */
void bell_ring(void);

/* After a launch was counted. */
static inline void bell_launched(void)
{
    if (__builtin_expect(__atomic_load_n(&bell_armed, __ATOMIC_RELAXED) != 0, 0)) bell_ring();
}

/* A call begins to wait for the device, and has waited; in pairs. */
static inline void bell_waits(void)
{
    __atomic_fetch_add(&bell_waiting, 1, __ATOMIC_RELAXED);
}

void bell_settled(void);

/* A new process image. */
void bell_reset(void);

/* Ticker of watch.h. */
uint64_t bell_tick(uint64_t now_ns);

#endif
