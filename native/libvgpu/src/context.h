/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contexts: which device a call is for, and what contexts and loaded code cost.
 *
 * The driver is asked for the current context at each call that needs it; what it means is remembered per thread.
 */
#ifndef VGPU_CONTEXT_H
#define VGPU_CONTEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "symbols.h"

#define CONTEXT_NO_TAG 255u

struct context_here {
    CUcontext context;
    CUdevice cuda;
    int device;  /* index in the limits, -1: none */
    uint8_t tag; /* names the context in tables; CONTEXT_NO_TAG: more contexts than there are tags */
};

/* False: there is no current context. */
static inline bool context_here(struct context_here *here);

/* Of the context that a stream belongs to; the current one for the default streams. */
bool context_of_stream(CUstream stream, bool per_thread, struct context_here *here);

/* Charge what contexts and code take. Fits always where the limit is no memory at all: a program that may allocate nothing
   may still start, look, and compute on what is not its own. Never fits where the limits cannot be read: a context for each
   of many processes would be more than any share. */
bool context_charge(int device, uint64_t bytes);

/* Bytes of the device that NVML reports for this process; false if its entry in the list cannot be identified. */
bool context_own_use(CUdevice cuda, uint64_t *bytes);

/* Charge what the driver has taken for this process beyond its account; about every two seconds by the watching thread. */
void context_compare(void);

void context_reset(void);

/* --- what a thread remembers of the context that it used last --- */

struct context_memory {
    struct context_here here;
    uint32_t generation;
};
extern _Thread_local struct context_memory context_memory;
extern _Atomic(uint32_t) context_generation; /* moves on when a context is made or ended */

bool context_here_slowly(CUcontext current, uint32_t generation, struct context_here *here);

static inline bool context_here(struct context_here *here)
{
    CUcontext current = NULL;
    if (__builtin_expect(DRIVER(cuCtxGetCurrent)(&current) != CUDA_SUCCESS || !current, 0)) return false;
    uint32_t now = atomic_load_explicit(&context_generation, memory_order_acquire);
    if (__builtin_expect(context_memory.here.context != current || context_memory.generation != now, 0))
        return context_here_slowly(current, now, here);
    *here = context_memory.here;
    return true;
}

#endif
