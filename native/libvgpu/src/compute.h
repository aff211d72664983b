/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Holding launches to the container's share of device time, and to its priority.
 *
 * Decides when a launch may go. Must not know how hooks are found. Called by the launch hooks around the driver's call.
 * Nothing here is done while the stream is captured. Times in nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef VGPU_COMPUTE_H
#define VGPU_COMPUTE_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"

/* What is launched, as far as its duration depends on it. */
struct compute_work {
    const void *function; /* CUfunction, CUkernel or CUgraphExec */
    uint64_t blocks;
    uint32_t threads_per_block;
    bool graph;
};

/* A launch in flight; `sampled` launches are bracketed by events. */
struct compute_ticket {
    int device;
    bool limited;
    bool sampled;
    uint64_t estimate_ns;
    void *sample;
};

/* One load. false: no device of this process has a compute limit and there is no priority to respect, so the launch
   hooks call neither function below. Follows changes of limits and priority within a second of their being read. */
bool compute_is_wanted(void);

/* Wait until the launch may go. Cheap when the device has no compute limit and no priority to respect. */
void compute_before(int device, CUstream stream, const struct compute_work *work, struct compute_ticket *ticket);

/* After the driver's call; `launched` false gives the estimate back. */
void compute_after(CUstream stream, const struct compute_work *work, struct compute_ticket *ticket, bool launched);

/* The process forgets a function or graph (module unload, graph destroy). */
void compute_forget(const void *function);

#endif
