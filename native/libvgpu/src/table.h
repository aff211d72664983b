/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Table from a pointer or handle of the driver to what it holds: constant time from ten entries to millions.
 *
 * 64 shards, each with a lock of its own and open addressing that closes gaps when an entry leaves, so that nothing gets
 * slower with age. Memory comes from mmap, not from the application's malloc. Key 0 is no key.
 * Most programs allocate from one thread: the first thread that uses a table enters without an atomic operation, until
 * another one comes, which revokes that privilege for good (membarrier(2); on kernels without it no thread has it).
 * Locks taken here: one shard at a time, for tens of nanoseconds; nothing is called under it.
 */
#ifndef VGPU_TABLE_H
#define VGPU_TABLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* One entry; the owner of the table gives `kind` and `tag` their meaning. */
struct held {
    uint64_t bytes : 47;
    uint64_t device : 6; /* index in the limits */
    uint64_t kind : 3;
    uint64_t tag : 8;
};

#define TABLE_BYTES_MAX ((UINT64_C(1) << 47) - 1)
#define TABLE_SHARDS 64u

struct table_entry {
    uint64_t key;
    struct held held;
};

struct table_shard {
    _Alignas(64) _Atomic(uint32_t) locked;
    uint32_t count;
    uint32_t capacity; /* 0 or a power of two */
    struct table_entry *entries;
};

struct table {
    struct table_shard shards[TABLE_SHARDS];
    _Alignas(64) _Atomic(uintptr_t) owner; /* 0: none yet; a thread's mark; TABLE_SHARED; TABLE_TAKING */
    _Atomic(uint32_t) owner_inside;
};

#define TABLE_SHARED ((uintptr_t)1)
#define TABLE_TAKING ((uintptr_t)2)

/* TABLE_REPLACED: the driver has given the address out again, so what was there is gone; it is in `replaced`. */
enum table_put { TABLE_NO_MEMORY, TABLE_NEW, TABLE_REPLACED };
enum table_put table_put(struct table *table, uint64_t key, struct held held, struct held *replaced);
bool table_get(struct table *table, uint64_t key, struct held *held);

/* Get and remove: of several callers exactly one gets it. */
bool table_take(struct table *table, uint64_t key, struct held *held);

/* Take all entries for which `wanted` is true, passing each to `taken`; both under the shard's lock. */
void table_take_if(struct table *table, bool (*wanted)(const struct held *held, const void *what), const void *what,
                   void (*taken)(uint64_t key, const struct held *held, void *into), void *into);

/* Empty, locks open: in a forked child, before it has threads. */
void table_reset(struct table *table);

uint64_t table_count(struct table *table);

/* A lock for a few instructions. */
void spin_lock(_Atomic(uint32_t) *locked);
void spin_unlock(_Atomic(uint32_t) *locked);

#endif
