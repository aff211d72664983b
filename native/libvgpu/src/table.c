/* SPDX-License-Identifier: Apache-2.0 */
/* See table.h. */
#include "table.h"

#include <linux/membarrier.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FIRST_CAPACITY 64u
#define SPINS 100
#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

void spin_lock(_Atomic(uint32_t) *locked)
{
    for (int spins = 0; atomic_exchange_explicit(locked, 1, memory_order_acquire); spins++) {
        while (atomic_load_explicit(locked, memory_order_relaxed)) {
            if (spins++ < SPINS) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
            } else {
                sched_yield();
            }
        }
    }
}

void spin_unlock(_Atomic(uint32_t) *locked)
{
    atomic_store_explicit(locked, 0, memory_order_release);
}

/* --- entering a shard --- */

static _Thread_local char mark; /* its address names the thread */

static bool membarrier(int command)
{
    return syscall(SYS_membarrier, command, 0, 0) == 0;
}

/* The table has no owner yet: claim it for this thread, if the kernel can revoke that again. */
static void claim(struct table *table)
{
    uintptr_t nobody = 0;
    uintptr_t self = membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) ? (uintptr_t)&mark : TABLE_SHARED;
    atomic_compare_exchange_strong(&table->owner, &nobody, self);
}

/* The owner stores `inside` and then loads `owner`; here it is the other way round, and the barrier runs on its processor
   between the two. So either it has seen that the table is being taken, or it is seen inside. */
static void take_from(struct table *table, uintptr_t owner)
{
    if (atomic_compare_exchange_strong(&table->owner, &owner, TABLE_TAKING)) {
        membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED);
        while (atomic_load_explicit(&table->owner_inside, memory_order_acquire))
            sched_yield();
        atomic_store_explicit(&table->owner, TABLE_SHARED, memory_order_release);
    }
    while (atomic_load_explicit(&table->owner, memory_order_acquire) == TABLE_TAKING)
        sched_yield();
}

static __attribute__((noinline)) void enter_slowly(struct table *table, struct table_shard *shard)
{
    for (;;) {
        uintptr_t owner = atomic_load_explicit(&table->owner, memory_order_acquire);
        if (owner == TABLE_SHARED) break;
        if (owner == 0)
            claim(table);
        else if (owner != (uintptr_t)&mark)
            take_from(table, owner);
        if (atomic_load_explicit(&table->owner, memory_order_relaxed) != (uintptr_t)&mark) continue;
        atomic_store_explicit(&table->owner_inside, 1, memory_order_relaxed);
        atomic_signal_fence(memory_order_seq_cst);
        if (atomic_load_explicit(&table->owner, memory_order_acquire) == (uintptr_t)&mark) return;
        atomic_store_explicit(&table->owner_inside, 0, memory_order_release);
    }
    spin_lock(&shard->locked);
}

static inline void enter(struct table *table, struct table_shard *shard)
{
    if (atomic_load_explicit(&table->owner, memory_order_relaxed) == (uintptr_t)&mark) {
        atomic_store_explicit(&table->owner_inside, 1, memory_order_relaxed);
        atomic_signal_fence(memory_order_seq_cst);
        if (atomic_load_explicit(&table->owner, memory_order_acquire) == (uintptr_t)&mark) return;
        atomic_store_explicit(&table->owner_inside, 0, memory_order_release);
    }
    enter_slowly(table, shard);
}

/* While the owner is inside, the locks of the shards are free: they are used only after its ownership has been revoked. */
static inline void leave(struct table *table, struct table_shard *shard)
{
    if (!atomic_load_explicit(&shard->locked, memory_order_relaxed))
        atomic_store_explicit(&table->owner_inside, 0, memory_order_release);
    else
        spin_unlock(&shard->locked);
}

/* --- the table --- */

static inline uint64_t mix(uint64_t key)
{
    return key * UINT64_C(0x9e3779b97f4a7c15);
}

static inline struct table_shard *shard_of(struct table *table, uint64_t mixed)
{
    return &table->shards[mixed >> 58];
}

static inline uint32_t home_of(const struct table_shard *shard, uint64_t mixed)
{
    return (uint32_t)(mixed >> 26) & (shard->capacity - 1);
}

static void place(struct table_shard *shard, uint64_t key, struct held held)
{
    uint32_t mask = shard->capacity - 1;
    uint32_t at = home_of(shard, mix(key));
    while (shard->entries[at].key)
        at = (at + 1) & mask;
    shard->count++;
    shard->entries[at] = (struct table_entry){.key = key, .held = held};
}

static bool grow(struct table_shard *shard)
{
    struct table_shard old = {.capacity = shard->capacity, .entries = shard->entries};
    uint32_t capacity = old.capacity ? old.capacity * 2 : FIRST_CAPACITY;
    if (capacity < old.capacity) return false;
    void *memory =
        mmap(NULL, capacity * sizeof(struct table_entry), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    shard->entries = memory;
    shard->capacity = capacity;
    shard->count = 0;
    for (uint32_t i = 0; i < old.capacity; i++)
        if (old.entries[i].key) place(shard, old.entries[i].key, old.entries[i].held);
    if (old.entries) munmap(old.entries, old.capacity * sizeof(struct table_entry));
    return true;
}

/* The entry of the key, or the empty one at which it would be put; NULL: there is no room at all yet. */
static inline struct table_entry *find(const struct table_shard *shard, uint64_t key, uint64_t mixed)
{
    if (UNLIKELY(!shard->capacity)) return NULL;
    uint32_t mask = shard->capacity - 1;
    for (uint32_t at = home_of(shard, mixed);; at = (at + 1) & mask) {
        struct table_entry *entry = &shard->entries[at];
        if (entry->key == key || !entry->key) return entry;
    }
}

/* Remove the entry at `gap` and move back those behind it that would not be found any more. */
static inline void close_gap(struct table_shard *shard, uint32_t gap)
{
    uint32_t mask = shard->capacity - 1;
    for (uint32_t at = (gap + 1) & mask; UNLIKELY(shard->entries[at].key); at = (at + 1) & mask) {
        uint32_t home = home_of(shard, mix(shard->entries[at].key));
        if (((at - home) & mask) >= ((at - gap) & mask)) {
            shard->entries[gap] = shard->entries[at];
            gap = at;
        }
    }
    shard->entries[gap].key = 0;
    shard->count--;
}

enum table_put table_put(struct table *table, uint64_t key, struct held held, struct held *replaced)
{
    if (!key) return TABLE_NO_MEMORY;
    uint64_t mixed = mix(key);
    struct table_shard *shard = shard_of(table, mixed);
    enum table_put outcome = TABLE_NO_MEMORY;
    enter(table, shard);
    struct table_entry *entry = find(shard, key, mixed);
    if (UNLIKELY(entry && entry->key)) {
        *replaced = entry->held;
        entry->held = held;
        outcome = TABLE_REPLACED;
    } else if (LIKELY(shard->count < shard->capacity / 2)) {
        *entry = (struct table_entry){.key = key, .held = held};
        shard->count++;
        outcome = TABLE_NEW;
    } else if (grow(shard)) {
        place(shard, key, held);
        outcome = TABLE_NEW;
    }
    leave(table, shard);
    return outcome;
}

bool table_get(struct table *table, uint64_t key, struct held *held)
{
    uint64_t mixed = mix(key);
    struct table_shard *shard = shard_of(table, mixed);
    enter(table, shard);
    const struct table_entry *entry = find(shard, key, mixed);
    bool found = key && entry && entry->key;
    if (found) *held = entry->held;
    leave(table, shard);
    return found;
}

bool table_take(struct table *table, uint64_t key, struct held *held)
{
    uint64_t mixed = mix(key);
    struct table_shard *shard = shard_of(table, mixed);
    enter(table, shard);
    const struct table_entry *entry = find(shard, key, mixed);
    bool found = key && entry && entry->key;
    if (found) {
        *held = entry->held;
        close_gap(shard, (uint32_t)(entry - shard->entries));
    }
    leave(table, shard);
    return found;
}

void table_take_if(struct table *table, bool (*wanted)(const struct held *held, const void *what), const void *what,
                   void (*taken)(uint64_t key, const struct held *held, void *into), void *into)
{
    for (uint32_t i = 0; i < TABLE_SHARDS; i++) {
        struct table_shard *shard = &table->shards[i];
        enter(table, shard);
        for (uint32_t at = 0; at < shard->capacity;) {
            struct table_entry entry = shard->entries[at];
            if (entry.key && wanted(&entry.held, what)) {
                taken(entry.key, &entry.held, into);
                close_gap(shard, at); /* may have moved another one here: look again */
            } else {
                at++;
            }
        }
        leave(table, shard);
    }
}

void table_reset(struct table *table)
{
    for (uint32_t i = 0; i < TABLE_SHARDS; i++) {
        struct table_shard *shard = &table->shards[i];
        if (shard->entries) munmap(shard->entries, shard->capacity * sizeof(struct table_entry));
        shard->entries = NULL;
        shard->capacity = 0;
        shard->count = 0;
        atomic_store_explicit(&shard->locked, 0, memory_order_relaxed);
    }
    atomic_store_explicit(&table->owner_inside, 0, memory_order_relaxed);
    atomic_store_explicit(&table->owner, 0, memory_order_release);
}

uint64_t table_count(struct table *table)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < TABLE_SHARDS; i++) {
        enter(table, &table->shards[i]);
        count += table->shards[i].count;
        leave(table, &table->shards[i]);
    }
    return count;
}
