/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that is charged by request: linear, pitched, managed, arrays, images of modules, imported from graphics.
 *
 * All tables that remember it, and what happens to them when a context or the process image ends.
 */
#ifndef VGPU_MEMORY_H
#define VGPU_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "context.h"
#include "cuda_abi.h"
#include "table.h"

/* Kinds of pointers in memory_pointers. `tag` is the context's, of MEMORY_POOLED the pool's number. */
enum memory_kind { MEMORY_PLAIN, MEMORY_MANAGED, MEMORY_POOLED };

extern struct table memory_pointers; /* device addresses */

/* The container's view of a device: total and free bytes from what the driver says is there. */
void memory_view(int device, uint64_t real_total, uint64_t *total, uint64_t *free);

/* May allocations that the card has no room for be put into managed memory (oversubscription)? */
bool memory_may_spill(int device);

/* An allocation that the card has no room for, put into managed memory where the device may spill. */
CUresult memory_spill(CUdeviceptr *pointer, uint64_t bytes, int device, CUresult result, enum memory_kind *kind);

void memory_forget_context(uint8_t tag);
void memory_reset(void);

/* Bytes of an array: descriptor in its newest form. */
uint64_t memory_array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels);

void memory_array_forget_context(uint8_t tag);
void memory_array_reset(void);
void memory_module_forget_context(uint8_t tag);
void memory_module_reset(void);
void memory_graph_reset(void);

/* Set what is charged for graph memory to what the driver has reserved; true: something was refunded. */
bool memory_graph_settle(int device);

/* A node that allocates has been made, so graphs must be looked at when they are instantiated. */
void memory_graph_seen(void);

#endif
