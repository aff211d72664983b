/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The compute limit of one process on one device, without clock, driver or sleep.
 *
 * Decides what a launch costs, whether it may go, and how measured times correct what was charged. compute.c feeds it from
 * the driver and the clock, the simulation in tests/compute from virtual time. Nanoseconds.
 * A process draws a quantum from the budget and spends it privately. A charge that a completed sample shows to be too low
 * or too high is corrected at the next draw, so that the budget is right in the long run, however long a launch was.
 * The budget counts the time in which at least one kernel of the process runs (overlapping streams are counted once).
 * Locks taken here: none. core_spend() and core_cancel() may be called by any thread; all else under the caller's lock.
 */
#ifndef VGPU_COMPUTE_CORE_H
#define VGPU_COMPUTE_CORE_H

#include "budget.h"
#include "estimate.h"
#include "presence.h"

#define CORE_ROSTER_ROUND_NS (2 * BUDGET_PERIOD_NS)
/* Until a process can know how many others began with it, it draws no more than this at once. */
#define CORE_FIRST_NS (2 * BUDGET_NS_PER_MS)
#define CORE_LONG_NS BUDGET_NS_PER_MS
#define CORE_SHIFT_NS (40 * BUDGET_NS_PER_MS)
#define CORE_PHASE_EVERY_NS (100 * BUDGET_NS_PER_MS)
/* Of a quantum so much is queued ahead of the device, by its price, and the rest in parts of half of that as time goes by:
   work that has become longer unnoticed is then met by less of it. */
#define CORE_AHEAD_NS (40 * BUDGET_NS_PER_MS)
/* No more launches than this are queued ahead either, as long as they are at least so much time: they may all have become
   longer. */
#define CORE_AHEAD_LAUNCHES 64u
#define CORE_AHEAD_MIN_NS (4 * BUDGET_NS_PER_MS)
/* Where no other process is on the device, so that no slice is lost when nothing is queued, and all work is on one stream,
   so that the progress of the device is known, it is far less: parts of this, or of one launch, each after the device was seen to
   begin with the last. The longer waiters sleep beyond their time the larger they must be. */
#define CORE_PART_NS (160 * BUDGET_NS_PER_MS / 1000)
#define CORE_PART_MAX_NS (CORE_AHEAD_MIN_NS / 2)
/* While a container of a higher priority has a share of the device, at most two parts of this, or two launches, are queued. */
#define CORE_RIVAL_PART_NS (250 * BUDGET_NS_PER_MS / 1000)
/* An insufficient charge is owed for so long; see budget_owe(). */
#define CORE_OWED_KEPT_NS (2700 * BUDGET_NS_PER_MS)
#define CORE_HELD_MAX_NS (80 * BUDGET_NS_PER_MS) /* longer no launch waits for what the device has before it */

/* A launch that runs so long, and so many times longer than estimated, puts its estimate in doubt. */
#define CORE_DOUBT_NS (5 * BUDGET_NS_PER_MS)

enum { CORE_DOUBT_RATIO = 8, CORE_OVERLAP_ONE = 1024, CORE_PHASES = 4 };

/* A stretch of launches between two waits, measured as a whole when the process uses several streams: how long the device
   was busy with it, and how much was charged for it. */
struct core_phase {
    bool open;        /* launches belong to it */
    bool based;       /* its first sample, the zero of its times, was issued */
    bool lost;        /* a sample of it could not be read */
    uint32_t running; /* samples under way */
    int64_t first_ns;
    int64_t last_ns;
    int64_t credit_ns; /* at its begin, plus what was drawn since */
    uint64_t charged_ns;
};

struct core_device {
    int64_t credit_ns;        /* drawn and not spent; below 0 for a moment */
    const void *stream;       /* of the first launch lately; the device itself: none yet */
    uint32_t several_streams; /* launches on another stream than `stream` were seen */
    uint32_t overlap;         /* device time per charged time in 1/1024; 1024 where nothing overlaps */
    /* Under the lock. */
    struct budget budget;
    int64_t owed_ns; /* charged too little so far; below 0: too much */
    uint64_t owed_since_ns;
    uint64_t charged_ns;    /* device time charged so far */
    int64_t reserve_ns;     /* drawn and due, but not to be spent yet */
    uint64_t let_go_ns;     /* device time let go so far */
    uint64_t busy_until_ns; /* the device is, with what was let go so far, if it takes as long as it is charged */
    uint64_t part_ns;       /* so much is let go at once, the next when no more than that is left */
    uint64_t wide_ns;       /* what it is where it is not close */
    bool close;             /* it is little, and the device is watched closely */
    uint32_t held;          /* launches let go since the device was last seen to come to one, though it should have */
    uint64_t late_ns;       /* by so much waiters sleep too long lately, on average */
    uint64_t spent_ns;      /* and `launches` when the part was computed */
    uint64_t launches;
    struct presence presence;
    uint64_t beside_ns;  /* elapsed times of samples beside others, by the page, */
    uint64_t alone_ns;   /* and what the same work took alone, by the page */
    uint64_t began_ns;   /* its first draw; 0: none yet */
    uint64_t elapsed_ns; /* of its launches since, neighbours included */
    uint64_t mean_ns;    /* what samples are worth on average, of all work */
    uint64_t phase_since_ns;
    uint32_t overlaps[CORE_PHASES]; /* of the last phases measured */
    uint32_t phases;
    struct core_phase phase;
    struct estimates estimates;
};

/* The terms of a moment, and who else is there. */
struct core_terms {
    struct budget_terms budget;
    uint32_t tenants;  /* on the device, this one included; 0: not known */
    uint32_t present;  /* core_present() */
    uint64_t launches; /* of this process so far */
    bool rival;        /* a container of a higher priority has a share of the device */
    bool lower;        /* one of a lower priority has; it may work now and then although it yields */
};

/* A launch that wants to go. */
struct core_admission {
    struct budget_draw draw;
    uint64_t shift_ns;
    int64_t cost_ns;
    bool unknown;
    bool waits;
    bool reserved; /* nothing was drawn, the reserve has enough */
    bool marks;    /* the first launch of a part: it must be sampled, to show how far the device is */
    bool blind;    /* nothing was drawn yet, the duration should be known soon */
    uint64_t part_due_ns;
};

/* A launch between two events. */
struct core_sample {
    struct estimate *estimate;
    uint32_t generation;
    uint32_t epoch;
    uint32_t weight; /* launches that it stands for */
    bool first;      /* charged by estimate_unknown() */
    bool in_phase;
    uint64_t charged_ns;
    uint64_t launched_ns;
    uint64_t running_since_ns;
    uint64_t let_go_ns; /* up to and with it */
    uint64_t cost_ns;   /* of it */
    const void *stream;
};

/* How many processes share the budget. Each enters itself once per round into the shared word `roster` = {round, the last
   round's count, this one's}; the dead are forgotten with their round. `own_round` is the caller's memory. */
uint32_t core_siblings(uint64_t *roster, uint32_t *own_round, uint64_t now_ns);

void core_init(struct core_device *device, uint64_t *word);

/* Take the cost from what was drawn, if it is there. */
static inline bool core_spend(struct core_device *device, uint64_t cost_ns)
{
    int64_t before = __atomic_fetch_sub(&device->credit_ns, (int64_t)cost_ns, __ATOMIC_RELAXED);
    if (before >= (int64_t)cost_ns) return true;
    __atomic_fetch_add(&device->credit_ns, (int64_t)cost_ns, __ATOMIC_RELAXED);
    return false;
}

/* Every launch says on which stream it goes. */
static inline void core_note_stream(struct core_device *device, const void *stream)
{
    const void *known = __atomic_load_n(&device->stream, __ATOMIC_RELAXED);
    if (known == stream) return;
    if (known == device)
        __atomic_store_n(&device->stream, stream, __ATOMIC_RELAXED);
    else if (__atomic_load_n(&device->several_streams, __ATOMIC_RELAXED) == 0)
        __atomic_store_n(&device->several_streams, 1, __ATOMIC_RELAXED);
}

/* A launch did not happen. */
static inline void core_cancel(struct core_device *device, uint64_t cost_ns)
{
    __atomic_fetch_add(&device->credit_ns, (int64_t)cost_ns, __ATOMIC_RELAXED);
}

/* A process that waits while the device works for it probes for others (presence.h). Only if all work is on one stream,
   and if it is not known to be alone or has not probed enough yet while it was. */
bool core_may_probe(const struct core_device *device, const struct core_terms *terms);

/* True: the answers have just turned out to be implausible; presence is not used from here on. */
bool core_verdict(struct core_device *device, uint64_t now_ns, const struct core_terms *terms, bool answered);

/* A probe that was not answered at once was answered after this time. */
void core_away(struct core_device *device, uint64_t now_ns, const struct core_terms *terms, uint64_t away_ns);

/* How much of the time in which the process has work the device is its own, in 1/1024; 0: not known. */
uint32_t core_present(const struct core_device *device, uint64_t now_ns);

/* Charge a launch. Returns 0 if it goes, else the time to wait until before core_ask() is called. */
uint64_t core_begin(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                    struct estimate *estimate, struct core_admission *admission);

/* The same launch again, after a wait or when limits may have changed. */
uint64_t core_ask(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                  struct core_admission *admission);

/* An unknown launch that waited has become known meanwhile: release its draw; core_begin() starts again. */
void core_withdraw(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                   struct core_admission *admission, struct estimate *estimate);

/* Cost of a launch that is expected to take so much device time. */
static inline uint64_t core_cost(const struct core_device *device, uint64_t estimate_ns)
{
    uint64_t cost = estimate_ns * __atomic_load_n(&device->overlap, __ATOMIC_RELAXED) / CORE_OVERLAP_ONE;
    return cost > 0 ? cost : 1;
}

/* After an admission that waited. True: that launch must be sampled, its start is the zero of the phase's times. */
bool core_begin_phase(struct core_device *device, uint64_t now_ns, const void *stream,
                      const struct core_admission *admission);

/* A sampled launch was issued. */
void core_sampled(struct core_device *device, struct core_sample *sample, struct estimate *estimate,
                  uint64_t charged_ns, bool first, const void *stream, uint64_t now_ns);

/* A launch of the phase should have been sampled and could not be. */
void core_missed(struct core_device *device);

/* It is the oldest that has not ended at this time; after core_runs(), if it runs. So the device has all that was launched
   after it before it, or, if it does not run yet, all from it on. */
void core_pends(struct core_device *device, const struct core_sample *sample, uint64_t now_ns);

/* A waiter has slept so much longer than it meant to. */
void core_woke(struct core_device *device, uint64_t late_ns);

/* It runs, and is seen to run at this time. */
void core_runs(struct core_device *device, struct core_sample *sample, uint64_t now_ns, const struct core_terms *terms);

/* It ended, start and end on a clock common to all samples of one phase. Or its times are not to be had. */
void core_ended(struct core_device *device, struct core_sample *sample, uint64_t now_ns, int64_t start_ns,
                int64_t end_ns, const struct core_terms *terms);
void core_lost(struct core_device *device, struct core_sample *sample, const struct core_terms *terms);

#endif
