/* SPDX-License-Identifier: Apache-2.0 */
#include "piece.h"

#include <stddef.h>

#include "account.h"
#include "table.h"

#define PIECE_MOST (UINT64_C(32) << 20)

uint64_t piece_round(int device, uint64_t bytes)
{
    struct region_device *line = account_region_device(device);
    uint64_t piece = line ? __atomic_load_n(&line->pool_piece, __ATOMIC_RELAXED) : 0;
    if (piece <= 1 || piece > PIECE_MOST || bytes > TABLE_BYTES_MAX) return bytes;
    return (bytes + piece - 1) / piece * piece;
}

/* The largest power of two that divides all figures seen. */
void piece_learn(int device, uint64_t reserved)
{
    struct region_device *line = account_region_device(device);
    uint64_t piece = (reserved | PIECE_MOST) & -(reserved | PIECE_MOST);
    uint64_t known = line ? __atomic_load_n(&line->pool_piece, __ATOMIC_RELAXED) : 0;
    if (line && reserved && (!known || piece < known)) __atomic_store_n(&line->pool_piece, piece, __ATOMIC_RELAXED);
}
