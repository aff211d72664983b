/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The piece by which the driver reserves memory of a device for pools and graphs.
 *
 * Learned from what it has reserved, and kept in the region, so that the next process of the container knows it.
 */
#ifndef VGPU_PIECE_H
#define VGPU_PIECE_H

#include <stdint.h>

/* `bytes` rounded up to whole pieces, as far as the piece is known. */
uint64_t piece_round(int device, uint64_t bytes);

/* The driver has reserved `reserved` bytes for a pool or for graphs: a multiple of its piece. */
void piece_learn(int device, uint64_t reserved);

#endif
