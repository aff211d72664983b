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

#define CONTEXT_NO_TAG 255u

struct context_here {
    CUcontext context;
    CUdevice cuda;
    int device;  /* index in the limits, -1: none */
    uint8_t tag; /* names the context in tables; CONTEXT_NO_TAG: more contexts than can be told apart */
};

/* False: there is no current context. */
bool context_here(struct context_here *here);

/* Of the context that a stream belongs to; the current one for the default streams. */
bool context_of_stream(CUstream stream, bool per_thread, struct context_here *here);

void context_reset(void);

#endif
