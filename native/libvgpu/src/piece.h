/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pieces by which the driver reserves memory of a device: for pools and graphs, and for large blocks.
 *
 * Learned from what it has reserved, and kept in the region, so that the next process of the container knows it.
 */
#ifndef VGPU_PIECE_H
#define VGPU_PIECE_H

#include <stdbool.h>
#include <stdint.h>

/* `bytes` rounded up to whole pieces, as far as the piece is known. */
uint64_t piece_round(int device, uint64_t bytes);

/* The driver has reserved `reserved` bytes for a pool or for graphs: a multiple of its piece. */
void piece_learn(int device, uint64_t reserved);

/* --- blocks of cuMemAlloc: smaller ones share pieces --- */

#define PIECE_LARGE (UINT64_C(1) << 20)

/* The bytes that a block takes: whole pieces if it is larger than PIECE_LARGE, as far as the piece is known. */
uint64_t piece_round_block(int device, uint64_t bytes);

/* The piece is not known, and a block of so many bytes shows it. True a few times in a process: the look is dear. */
bool piece_wants_block(int device, uint64_t bytes);

/* A block of `bytes` has taken `taken`, if nothing else was allocated meanwhile. */
void piece_learn_block(int device, uint64_t bytes, uint64_t taken);

#endif
