/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Holding launches to the container's share of device time, and to its priority.
 *
 * Decides when a launch may go. Must not know how hooks are found. Called by the launch hooks around the driver's call.
 * Nothing here is done while the stream is captured. Times in nanoseconds of CLOCK_MONOTONIC. Guarantees:
 * docs/limiter-compute.md.
 */
#ifndef VGPU_COMPUTE_H
#define VGPU_COMPUTE_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"

/* The driver's own functions. All of them must be there; a limit without them charges estimates that nothing corrects,
   so compute_use_driver() refuses and logs an error. */
struct compute_driver {
    CUresult (*context_current)(CUcontext *context);                                 /* cuCtxGetCurrent */
    CUresult (*event_create)(CUevent *event, unsigned int flags);                    /* cuEventCreate */
    CUresult (*event_destroy)(CUevent event);                                        /* cuEventDestroy_v2 */
    CUresult (*event_record)(CUevent event, CUstream stream);                        /* cuEventRecord */
    CUresult (*event_query)(CUevent event);                                          /* cuEventQuery */
    CUresult (*event_elapsed)(float *ms, CUevent from, CUevent to);                  /* cuEventElapsedTime */
    CUresult (*stream_is_capturing)(CUstream stream, CUstreamCaptureStatus *status); /* cuStreamIsCapturing */
    CUresult (*stream_create)(CUstream *stream, unsigned int flags); /* cuStreamCreate; may be NULL: no probes */
    /* cuThreadExchangeStreamCaptureMode; may be NULL. Events must be asked about while another stream is captured. */
    CUresult (*exchange_capture_mode)(int *mode);
};

/* Before the first launch; `driver` is copied. */
void compute_use_driver(const struct compute_driver *driver);

/* The launched work, as far as its duration depends on it. */
struct compute_work {
    const void *function; /* CUfunction, CUkernel or CUgraphExec */
    uint64_t blocks;
    uint32_t threads_per_block;
    bool graph;
};

/* A launch in flight; `sampled` launches are bracketed by events. The last two fields are set if `limited`. */
struct compute_ticket {
    int device;
    bool limited;
    bool sampled;
    uint64_t estimate_ns;
    void *sample;
};

/* Wait until the launch may go. Cheap when the device has no compute limit and no priority to respect. `stream` as the
   driver's function without suffix would take it: CU_STREAM_PER_THREAD in the place of NULL for the _ptsz forms.
   `device` as in account.h; nothing is done for -1. */
void compute_before(int device, CUstream stream, const struct compute_work *work, struct compute_ticket *ticket);

/* After the driver's call; `launched` false gives the estimate back. */
void compute_finish(CUstream stream, struct compute_ticket *ticket, bool launched);

static inline void compute_after(CUstream stream, const struct compute_work *work, struct compute_ticket *ticket,
                                 bool launched)
{
    (void)work;
    if (ticket->limited && (ticket->sampled || !launched)) compute_finish(stream, ticket, launched);
}

/* The process forgets a function or graph (module unload, graph destroy). */
void compute_forget(const void *function);

/* A context is about to end (destroy, last release or reset of a primary one): its events go with it. NULL: all. */
void compute_context_end(CUcontext context);

/* Look at what has been measured meanwhile; after a call that waited for the device. Never waits. */
void compute_settle(int device);

/* Limits may have changed: waiting threads compute their wait again. Called by the thread that has read the limits. */
void compute_limits_changed(void);

#endif
