/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of device addresses that linear, managed and stream-ordered allocations are remembered in; and spilling.
 */
#ifndef VGPU_POINTER_H
#define VGPU_POINTER_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "hook.h"
#include "table.h"

/* Kinds of entries. `tag` is the context's; for POINTER_POOLED it is the pool's number. */
enum pointer_kind { POINTER_PLAIN, POINTER_MANAGED, POINTER_POOLED };

extern struct table pointer_table;

/* May allocations that the card has no capacity for be put into managed memory (oversubscription)? */
bool pointer_may_spill(int device);

/* After `result` of an allocation: if the card is full and the device may spill, allocate managed memory instead. */
CUresult pointer_spill(CUdeviceptr *pointer, uint64_t bytes, int device, CUresult result, enum pointer_kind *kind);

void pointer_reset(void);
void pointer_forget_context(const struct hook_context *ended);

#endif
