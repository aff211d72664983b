/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate: while the agent keeps it closed, no thread of this container enters the driver (docs/adr/0026-recall.md).
 *
 * One file of the container, written in place by the agent alone: for recall, or else for exclusive quanta of devices with
 * overcommitted managed memory (docs/adr/0030-exclusive-quanta.md). A closure for a quantum has a lease: the gate is open
 * once it has expired. A process looks for the file at its first hook; without it a hook costs one load. With it, a thread marks its own cache line, then reads the state, and takes the mark back where
 * the gate is closed. The limiter's thread reads the state first, then all lines: once it sees the gate closed and no
 * mark, no thread is in the driver and none enters before the gate opens. Calls within a hook pass, as do those of the
 * limiter's own thread. A child starts with lines of its own.
 * Reports are datagrams of the doorbell (bell.h): the byte, and but for waiting threads the turn that it is about, because
 * the gate may be opened and closed again before a report is sent. Locks taken here: none.
 */
#ifndef VGPU_GATE_H
#define VGPU_GATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef GATE_PATH
#define GATE_PATH "/run/hami-priority/bells/residency-1"
#endif
#ifndef GATE_QUANTUM_PATH
#define GATE_QUANTUM_PATH "/run/hami-priority/bells/quantum-1"
#endif
#define GATE_MAGIC UINT64_C(0x314352494d414856) /* "VHAMIRC1" as bytes */
#define GATE_LAYOUT 1u
#define GATE_OPEN 0u

#define GATE_WAITS 'w'  /* a thread waits at the gate */
#define GATE_PARKED 'p' /* closed, and no thread is inside */
#define GATE_BOUND 'u'  /* the same, but the process cannot be moved, see gate_bind */
#define GATE_BUSY 'b'   /* closed, and a thread is inside */

#define GATE_WAITS_NS UINT64_C(50000000)   /* between two reports of waiting threads, */
#define GATE_PERIOD_NS UINT64_C(100000000) /* and of the others; between two looks at an open gate */

struct gate_report {
    char byte;
    uint64_t turn;
} __attribute__((packed));

struct gate_page {
    uint64_t magic;
    uint32_t layout;
    uint32_t state;          /* futex, not private */
    uint64_t turn;           /* number of this closure or opening */
    uint64_t lease_until_ns; /* of CLOCK_MONOTONIC: a closed gate is open from then on; 0: it stays closed */
    uint64_t reserved[4];
};

_Static_assert(sizeof(struct gate_page) == 64, "page");
_Static_assert(offsetof(struct gate_page, state) == 12, "state");
_Static_assert(offsetof(struct gate_page, turn) == 16, "turn");
_Static_assert(offsetof(struct gate_page, lease_until_ns) == 24, "lease");

enum gate_mode { GATE_NONE, GATE_PRESENT, GATE_UNKNOWN };

extern uint32_t gate_mode; /* written once */
extern const struct gate_page *gate_page;
extern uint32_t gate_bound;

static inline bool gate_is_absent(void)
{
    return __atomic_load_n(&gate_mode, __ATOMIC_RELAXED) == GATE_NONE;
}

/* The closure has no lease, or its lease runs. */
bool gate_is_leased(const struct gate_page *page);

/* There is a gate, and it is closed. */
static inline bool gate_is_closed(void)
{
    const struct gate_page *page = __atomic_load_n(&gate_page, __ATOMIC_ACQUIRE);
    return page != NULL && __atomic_load_n(&page->state, __ATOMIC_SEQ_CST) != GATE_OPEN && gate_is_leased(page);
}

/* Wait until the gate is open, and enter; true: the thread counts as inside until gate_leave. */
bool gate_enter(void);
void gate_leave(void);

/* The process holds managed memory, or memory that another process has or gave: the driver cannot move it. For good, as
   it is not known what the driver keeps of memory that was freed. */
static inline void gate_bind(void)
{
    __atomic_store_n(&gate_bound, 1, __ATOMIC_RELEASE);
}

/* A new process image. */
void gate_reset(void);

/* Ticker of watch.h. */
uint64_t gate_tick(uint64_t now_ns);

#endif
