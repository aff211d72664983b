/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of device addresses that linear, managed and stream-ordered allocations are remembered in; and spilling.
 */
#ifndef VGPU_POINTER_H
#define VGPU_POINTER_H

#include <stdbool.h>
#include <stdint.h>

#include "context.h"
#include "cuda_abi.h"
#include "hook.h"
#include "table.h"

/* Kinds of entries. `tag` is the context's; for POINTER_POOLED it is the pool's number. */
enum pointer_kind { POINTER_PLAIN, POINTER_MANAGED, POINTER_POOLED };

extern struct table pointer_table;

/* Where an allocation that the card has no capacity for may be put into managed memory: oversubscribed nodes, devices whose
   managed memory may exceed the card, and blocks of at most half of the limit. A larger one is mostly the one block that an
   allocator manages itself (JAX asks for 75 % of the device): every access of the program would then fault, and with an
   error the allocator asks for less. `device`: index in the limits. */
bool pointer_may_spill(int device, CUdevice cuda, uint64_t bytes);

/* True where memory that the card does not have may be shown: the limit is promised beyond it, and managed memory may hold
   the rest. Before cuInit the device cannot be asked, and the promise counts. `device`: index in the limits. */
bool pointer_may_exceed(int device);

/* After `result` of an allocation: if the card is full and it may spill, allocate managed memory instead. */
CUresult pointer_spill(CUdeviceptr *pointer, uint64_t bytes, const struct context_here *here, CUresult result,
                       enum pointer_kind *kind);

void pointer_reset(void);
void pointer_forget_context(const struct hook_context *ended);

#endif
