/* SPDX-License-Identifier: Apache-2.0 */
#include "piece.h"

#include <stdatomic.h>
#include <stddef.h>

#include "account.h"
#include "table.h"

#define PIECE_MOST (UINT64_C(32) << 20)
#define BLOCK_MOST (UINT64_C(2) << 20) /* the largest page of a device */
#define LOOKS_MOST 16u

/* `piece` is what the region says, where the tenant may have written anything. */
static uint64_t rounded(uint64_t bytes, uint64_t piece, uint64_t most)
{
    if (piece <= 1 || piece > most || bytes > TABLE_BYTES_MAX) return bytes;
    return (bytes + piece - 1) / piece * piece;
}

uint64_t piece_round(int device, uint64_t bytes)
{
    struct region_device *line = account_region_device(device);
    return rounded(bytes, line ? __atomic_load_n(&line->pool_piece, __ATOMIC_RELAXED) : 0, PIECE_MOST);
}

/* The largest power of two that divides all figures seen. */
void piece_learn(int device, uint64_t reserved)
{
    struct region_device *line = account_region_device(device);
    uint64_t piece = (reserved | PIECE_MOST) & -(reserved | PIECE_MOST);
    uint64_t known = line ? __atomic_load_n(&line->pool_piece, __ATOMIC_RELAXED) : 0;
    if (line && reserved && (!known || piece < known)) __atomic_store_n(&line->pool_piece, piece, __ATOMIC_RELAXED);
}

static uint64_t block_piece(int device)
{
    struct region_device *line = account_region_device(device);
    return line ? __atomic_load_n(&line->block_piece, __ATOMIC_RELAXED) : 0;
}

uint64_t piece_round_block(int device, uint64_t bytes)
{
    return bytes > PIECE_LARGE ? rounded(bytes, block_piece(device), BLOCK_MOST) : bytes;
}

bool piece_wants_block(int device, uint64_t bytes)
{
    static _Atomic(uint32_t) looks;
    return bytes % BLOCK_MOST != 0 && !block_piece(device) && atomic_load(&looks) < LOOKS_MOST &&
           atomic_fetch_add(&looks, 1) < LOOKS_MOST;
}

/* 1: blocks are not rounded. */
void piece_learn_block(int device, uint64_t bytes, uint64_t taken)
{
    struct region_device *line = account_region_device(device);
    uint64_t piece = taken == bytes ? 1 : (taken | BLOCK_MOST) & -(taken | BLOCK_MOST);
    bool is_sound = taken == bytes || (taken > bytes && taken - bytes < piece);
    if (line && is_sound) __atomic_store_n(&line->block_piece, piece, __ATOMIC_RELAXED);
}
