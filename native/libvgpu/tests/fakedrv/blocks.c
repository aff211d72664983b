/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Addresses and what they belong to: the table of live blocks and the address space that they are cut from.
 *
 * Addresses are readable and writable by the process, so copies move real bytes; pages exist only once written.
 * Small blocks come by size class from a reservation, one for devices and one for host memory; large ones are mapped
 * singly. While the process is parked, the pages of device memory are elsewhere and its addresses fault.
 *
 * Locks: callers hold fake.lock. Called with hooks active: no.
 */
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { CLASSES = 128, SMALLEST_SHIFT = 9, FIRST_CAPACITY = 1024 };

#define ARENA_BYTES (UINT64_C(64) << 30U)
#define LARGE_BYTES (UINT64_C(64) << 20U)
#define PAGE UINT64_C(4096)

static struct fake_block *table;
static size_t capacity;
static size_t count;

static struct space {
    char *arena;
    uint64_t used;
    /* Addresses of each class that are free again, as a growing array. */
    struct {
        CUdeviceptr *at;
        size_t count;
        size_t room;
    } spare[CLASSES];
} of_devices, of_host;

static void *parked_arena; /* where the pages of the devices' arena are while the process is parked */

static size_t home(CUdeviceptr pointer)
{
    return (size_t)((pointer >> SMALLEST_SHIFT) * UINT64_C(0x9E3779B97F4A7C15) >> 20U) & (capacity - 1);
}

struct fake_block *fake_block_find(CUdeviceptr pointer)
{
    if (capacity == 0 || pointer == 0) {
        return NULL;
    }
    for (size_t i = home(pointer); table[i].in_use; i = (i + 1) & (capacity - 1)) {
        if (table[i].pointer == pointer) {
            return &table[i];
        }
    }
    return NULL;
}

struct fake_block *fake_block_around(CUdeviceptr pointer)
{
    struct fake_block *exact = fake_block_find(pointer);
    for (size_t i = 0; exact == NULL && i < capacity; i++) {
        if (table[i].in_use && pointer - table[i].pointer < table[i].bytes) {
            return &table[i];
        }
    }
    return exact;
}

static struct fake_block *insert(CUdeviceptr pointer)
{
    size_t i = home(pointer);
    while (table[i].in_use) {
        i = (i + 1) & (capacity - 1);
    }
    count++;
    table[i].pointer = pointer;
    table[i].in_use = true;
    return &table[i];
}

static bool grow(void)
{
    struct fake_block *old = table;
    size_t old_capacity = capacity;
    size_t wanted = capacity == 0 ? FIRST_CAPACITY : capacity * 2;
    struct fake_block *fresh = calloc(wanted, sizeof *fresh);
    if (fresh == NULL) {
        return false;
    }
    table = fresh;
    capacity = wanted;
    count = 0;
    for (size_t i = 0; i < old_capacity; i++) {
        if (old[i].in_use) {
            *insert(old[i].pointer) = old[i];
        }
    }
    free(old);
    return true;
}

/* Four classes per power of two. */
static unsigned int class_of(uint64_t bytes, uint64_t *rounded)
{
    uint64_t units = (bytes + (1U << SMALLEST_SHIFT) - 1) >> SMALLEST_SHIFT;
    if (units <= 4) {
        *rounded = units << SMALLEST_SHIFT;
        return (unsigned int)units - 1;
    }
    unsigned int top = 63U - (unsigned int)__builtin_clzll(units - 1);
    uint64_t step = UINT64_C(1) << (top - 2);
    uint64_t steps = (units + step - 1) / step; /* 5..8 */
    *rounded = (steps * step) << SMALLEST_SHIFT;
    return 4 + (top - 2) * 4 + (unsigned int)steps - 5;
}

static CUdeviceptr map_large(uint64_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? 0 : (CUdeviceptr)(uintptr_t)at;
}

static bool is_large(uint64_t bytes)
{
    uint64_t rounded = 0;
    (void)class_of(bytes, &rounded);
    return rounded >= LARGE_BYTES;
}

static struct space *space_of(enum fake_kind kind)
{
    return kind == FAKE_HOST ? &of_host : &of_devices;
}

static CUdeviceptr take(struct space *space, uint64_t bytes)
{
    uint64_t rounded = 0;
    unsigned int class = class_of(bytes, &rounded);
    if (rounded >= LARGE_BYTES) {
        return map_large(bytes);
    }
    if (space->spare[class].count > 0) {
        return space->spare[class].at[--space->spare[class].count];
    }
    if (space->arena == NULL) {
        void *at = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        space->arena = at == MAP_FAILED ? NULL : at;
    }
    if (space->arena == NULL || space->used + rounded > ARENA_BYTES) {
        return 0;
    }
    space->used += rounded;
    return (CUdeviceptr)(uintptr_t)(space->arena + space->used - rounded);
}

static void give(struct space *space, CUdeviceptr pointer, uint64_t bytes, bool dirty)
{
    uint64_t rounded = 0;
    unsigned int class = class_of(bytes, &rounded);
    if (rounded >= LARGE_BYTES) {
        (void)munmap((void *)(uintptr_t)pointer, bytes);
        return;
    }
    uint64_t first = (pointer + PAGE - 1) & ~(PAGE - 1);
    uint64_t last = (pointer + rounded) & ~(PAGE - 1);
    if (dirty && last > first) {
        (void)madvise((void *)(uintptr_t)first, last - first, MADV_DONTNEED);
    }
    if (space->spare[class].count == space->spare[class].room) {
        size_t room = space->spare[class].room == 0 ? 64 : space->spare[class].room * 2;
        CUdeviceptr *fresh = realloc(space->spare[class].at, room * sizeof *fresh);
        if (fresh == NULL) {
            return; /* the address is never used again; it costs nothing */
        }
        space->spare[class].at = fresh;
        space->spare[class].room = room;
    }
    space->spare[class].at[space->spare[class].count++] = pointer;
}

CUdeviceptr fake_block_add(unsigned int device, uint64_t bytes, enum fake_kind kind, void *owner)
{
    if ((count + 1) * 2 > capacity && !grow()) {
        return 0;
    }
    CUdeviceptr pointer = take(space_of(kind), bytes);
    if (pointer == 0) {
        return 0;
    }
    struct fake_block *block = insert(pointer);
    block->bytes = bytes;
    block->context = fake_current();
    block->owner = owner;
    block->parked = NULL;
    block->device = (uint16_t)device;
    block->kind = (uint8_t)kind;
    block->orphan = false;
    block->dirty = kind == FAKE_HOST || kind == FAKE_MANAGED; /* the host may write there unseen */
    return pointer;
}

void fake_block_drop(struct fake_block *block)
{
    give(space_of(block->kind), block->pointer, block->bytes, block->dirty);
    size_t hole = (size_t)(block - table);
    count--;
    for (size_t i = (hole + 1) & (capacity - 1); table[i].in_use; i = (i + 1) & (capacity - 1)) {
        size_t from = home(table[i].pointer);
        bool may_move = hole <= i ? from <= hole || from > i : from <= hole && from > i;
        if (may_move) {
            table[hole] = table[i];
            hole = i;
        }
    }
    table[hole].in_use = false;
}

void fake_free_context(struct fake_context *context)
{
    for (size_t i = 0; i < capacity;) {
        bool dies = table[i].in_use && table[i].context == context && table[i].kind <= FAKE_MANAGED;
        if (dies) {
            (void)fake_free_block(&table[i]); /* another block may have moved here */
        } else {
            i++;
        }
    }
}

void fake_free_pooled(unsigned int device)
{
    for (size_t i = 0; i < capacity;) {
        bool dies = table[i].in_use && table[i].device == device && table[i].kind == FAKE_POOLED;
        if (dies) {
            (void)fake_free_block(&table[i]);
        } else {
            i++;
        }
    }
}

/* ---- parking ---- */

/* Moves the pages to the address that it returns; the old one stays reserved, and faults. NULL: they could not be. */
static void *move_away(void *from, uint64_t bytes)
{
    void *moved = mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
    if (moved == MAP_FAILED) {
        return NULL;
    }
    (void)mprotect(from, bytes, PROT_NONE);
    return moved;
}

static bool move_back(void *moved, void *to, uint64_t bytes)
{
    return moved == NULL || mremap(moved, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
}

static bool is_mapped_singly(const struct fake_block *block)
{
    return block->in_use && block->kind != FAKE_HOST && is_large(block->bytes);
}

bool fake_blocks_return(void)
{
    bool good = move_back(parked_arena, of_devices.arena, ARENA_BYTES);
    parked_arena = NULL;
    for (size_t i = 0; i < capacity; i++) {
        if (is_mapped_singly(&table[i])) {
            good = move_back(table[i].parked, (void *)(uintptr_t)table[i].pointer, table[i].bytes) && good;
            table[i].parked = NULL;
        }
    }
    return good;
}

bool fake_blocks_park(void)
{
    bool good = true;
    if (of_devices.arena != NULL) {
        parked_arena = move_away(of_devices.arena, ARENA_BYTES);
        good = parked_arena != NULL;
    }
    for (size_t i = 0; good && i < capacity; i++) {
        if (is_mapped_singly(&table[i])) {
            table[i].parked = move_away((void *)(uintptr_t)table[i].pointer, table[i].bytes);
            good = table[i].parked != NULL;
        }
    }
    if (!good) {
        (void)fake_blocks_return();
    }
    return good;
}

bool fake_blocks_managed(void)
{
    for (size_t i = 0; i < capacity; i++) {
        if (table[i].in_use && table[i].kind == FAKE_MANAGED) {
            return true;
        }
    }
    return false;
}
