/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long work keeps the device: estimates per function and shape from sampled elapsed times.
 *
 * Decides what a launch is charged and which launches are sampled. Pure: no clock, no driver. Nanoseconds of device time.
 * An elapsed time between two events holds the neighbours' time slices too, so of the last samples only those near the
 * shortest count; where the agent reports no other process on the device, all count. The other way round a function whose
 * duration varies must not hide behind its shortest run: an estimate never falls below the mean elapsed time divided by
 * the number of contenders.
 * Locks taken here: none. Looking up and reading are free of locks; every change is made by one caller at a time.
 */
#ifndef VGPU_ESTIMATE_H
#define VGPU_ESTIMATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    ESTIMATE_SAMPLES = 32,
    ESTIMATE_BUCKETS = 1024,
    ESTIMATE_ENTRIES_MAX = 32768,
    ESTIMATE_SAMPLED_EVERY_MAX = 1024,
    ESTIMATE_FAILURES_MAX = 3,
    /* Elapsed times this part of a time slice above the shortest are taken for interrupted by a neighbour. */
    ESTIMATE_TRIM_PART = 4
};

/* Charged for the first launch of an unknown function; each further one before the first result costs 8 times more. */
#define ESTIMATE_UNKNOWN_NS UINT64_C(50000)
/* Sampled so often that about this much device time lies between two samples of one function. */
#define ESTIMATE_SPACING_NS UINT64_C(1000000)
#define ESTIMATE_CROWD_ONE 1024u
#define ESTIMATE_MAX_NS UINT64_C(3600000000000)

struct estimate {
    /* Read by every launch. */
    const void *function; /* NULL: free */
    uint64_t shape;
    struct estimate *next;
    uint64_t charge_ns;
    uint32_t samples; /* 0: unknown; saturates */
    int32_t until_sample;
    uint32_t every;
    uint32_t steps; /* launches that the next sample stands for, and the last one */
    uint32_t weight;
    uint32_t generation; /* changes when the entry is given to another function */
    /* Under the owner's lock. */
    uint32_t unknown_launches;
    uint32_t failures; /* samples that could not be read while it is unknown */
    uint64_t unknown_charged_ns;
    uint64_t mean_ns;  /* of elapsed times, neighbours included */
    uint64_t near_ns;  /* mean of those near the shortest */
    uint64_t worth_ns; /* mean of what samples were found to be worth */
    /* Of the samples that a neighbour's slices may have prolonged, the newer ones counting more: */
    uint64_t watched_ns; /* how long they would have been without, */
    uint64_t stolen_ns;  /* how much longer they were, */
    uint32_t hits;       /* and how many were so at all. */
    uint32_t watched;
    uint64_t longest_ns; /* ever, since it is this function */
    uint64_t alone_ns;   /* mean of elapsed times while the container was alone, by the page; 0: never */
    uint64_t shared_ns; /* the most that a sample can have been worth if all contenders worked, since the last change */
    uint64_t low_ns;
    uint32_t taken;          /* samples since the last change */
    uint32_t calm;           /* consecutive samples near the shortest */
    uint32_t epoch;          /* changes when the work has changed */
    int64_t strange_owed_ns; /* if the present strange ones turn out to be a change */
    uint32_t strange;        /* consecutive samples that no neighbour explains, the longest count several times */
    uint32_t patience;       /* so many of them are a change of the work */
    uint64_t elapsed_ns[ESTIMATE_SAMPLES];
};

/* All estimates of one process on one device. */
struct estimates {
    struct estimate *buckets[ESTIMATE_BUCKETS];
    struct estimate crowd; /* stands for all functions beyond ESTIMATE_ENTRIES_MAX */
    uint32_t entries;
    uint32_t random;
};

/* The part of `blocks` and `threads` that an estimate is kept for: steps of a quarter of a power of two. */
uint64_t estimate_shape(uint64_t blocks, uint32_t threads_per_block, bool graph);

/* NULL if unknown; free of locks. */
struct estimate *estimate_find(const struct estimates *all, const void *function, uint64_t shape);

/* Find or add; never NULL. */
struct estimate *estimate_add(struct estimates *all, const void *function, uint64_t shape);

void estimate_forget(struct estimates *all, const void *function);

/* Charge of the next launch of unknown work; counts it. */
uint64_t estimate_unknown(struct estimate *estimate);

/* Any number; not for secrets. */
uint32_t estimate_random(struct estimates *all);

/* A launch has taken so long already, far longer than estimated: treat what follows as unknown until it is measured,
   unless such long ones were seen before. */
void estimate_doubt(struct estimate *estimate, uint64_t running_ns);

/* It was not made after all. */
void estimate_unknown_cancel(struct estimate *estimate, uint64_t charged_ns);

/* The estimate's next sample is due: plan the one after it. */
void estimate_plan_next(struct estimates *all, struct estimate *estimate);

/* true: this launch is to be sampled. Counts it. Free of locks, inexact when threads race, which does no harm. */
static inline bool estimate_is_sampled(struct estimates *all, struct estimate *estimate)
{
    int32_t left = __atomic_load_n(&estimate->until_sample, __ATOMIC_RELAXED) - 1;
    __atomic_store_n(&estimate->until_sample, left, __ATOMIC_RELAXED);
    if (left > 0) return false;
    estimate_plan_next(all, estimate);
    return true;
}

/* This launch is sampled though none was due: it stands for those since the last one, and the next is planned again. */
static inline void estimate_sample_now(struct estimates *all, struct estimate *estimate)
{
    int32_t left = __atomic_load_n(&estimate->until_sample, __ATOMIC_RELAXED);
    uint32_t steps = __atomic_load_n(&estimate->steps, __ATOMIC_RELAXED);
    uint32_t done = left > 0 && (uint32_t)left < steps ? steps - (uint32_t)left : 1;
    __atomic_store_n(&estimate->steps, done, __ATOMIC_RELAXED);
    estimate_plan_next(all, estimate);
}

/* Take a sample. `contenders`: processes that may share the device by time slices, this one included; 1: none, all
   elapsed time was ours. `present`: the part of elapsed time that was ours at present (presence.h), 0: not known. `crowd`: how
   many processes had work on the device at a time so far, if all have done as this one has, in 1/1024. `slice_ns`: a time
   slice of the driver. Returns the device time that the sampled launch is worth. */
uint64_t estimate_sample(struct estimate *estimate, uint64_t elapsed_ns, uint32_t contenders, uint32_t present,
                         uint32_t crowd, uint64_t slice_ns);

/* A sample could not be read: events fail on the streams of some contexts. After ESTIMATE_FAILURES_MAX of them unknown work
   is charged `mean_ns`, of other work, until a sample can be read. True: it has become known by that. */
bool estimate_failed(struct estimate *estimate, uint64_t mean_ns);

/* After the first sample: by how much the launches before it were charged too little, `overlap` as in compute_core.h. */
int64_t estimate_unknown_owed(struct estimate *estimate, uint32_t overlap);

#endif
