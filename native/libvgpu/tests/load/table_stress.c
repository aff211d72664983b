/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads on one table of pointers: the first owns it for a while, then others come and take it away.
 *
 *     table_stress THREADS ROUNDS
 *
 * Every thread puts, gets and takes keys of its own, and all of them fight for one shared set of keys, of which each must
 * be taken by exactly one. Ends with 0 if nothing was lost, doubled or mixed up.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../src/table.h"

enum { SHARED_KEYS = 4096, OWN_KEYS = 64, THREADS_MOST = 16 };

static struct table table;
static _Atomic(int) taken[SHARED_KEYS];
static _Atomic(int) errors;
static long rounds;

static uint64_t shared_key(unsigned int number)
{
    return (UINT64_C(1) << 40) + number * UINT64_C(512);
}

static void own_keys(uint64_t base)
{
    struct held held, gone;
    for (unsigned int i = 0; i < OWN_KEYS; i++) {
        struct held put = {.bytes = base + i, .device = i & 0x3f, .kind = 1, .tag = 7};
        if (table_put(&table, base + i * 512, put, &gone) != TABLE_NEW) errors++;
    }
    for (unsigned int i = 0; i < OWN_KEYS; i++) {
        if (!table_get(&table, base + i * 512, &held) || held.bytes != base + i) errors++;
        if (!table_take(&table, base + i * 512, &held) || held.bytes != base + i || held.device != (i & 0x3f)) errors++;
        if (table_take(&table, base + i * 512, &held)) errors++;
    }
}

static void *work(void *argument)
{
    uint64_t number = (uint64_t)(uintptr_t)argument;
    for (long round = 0; round < rounds; round++)
        own_keys(((number + 1) << 30) + (uint64_t)(round % 7) * (1 << 20));
    for (unsigned int i = 0; i < SHARED_KEYS; i++) {
        struct held held;
        unsigned int at = (unsigned int)((i * 7 + number * 911) % SHARED_KEYS);
        if (table_take(&table, shared_key(at), &held)) taken[at]++;
    }
    return NULL;
}

int main(int count, char **words)
{
    if (count != 3) return 2;
    uint64_t threads = strtoull(words[1], NULL, 10);
    rounds = strtol(words[2], NULL, 10);
    if (threads > THREADS_MOST) return 2;
    struct held gone;
    for (unsigned int i = 0; i < SHARED_KEYS; i++)
        if (table_put(&table, shared_key(i), (struct held){.bytes = i}, &gone) != TABLE_NEW) errors++;
    own_keys(UINT64_C(1) << 44); /* as the owner */
    pthread_t all[THREADS_MOST];
    for (uint64_t i = 0; i < threads; i++)
        pthread_create(&all[i], NULL, work, (void *)(uintptr_t)i);
    own_keys(UINT64_C(1) << 45); /* while it is being taken away */
    for (uint64_t i = 0; i < threads; i++)
        pthread_join(all[i], NULL);
    for (unsigned int i = 0; i < SHARED_KEYS; i++)
        if (taken[i] != 1) errors++;
    if (table_count(&table) != 0) errors++;
    printf("%d errors\n", errors);
    return errors != 0;
}
