/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads of several processes charge and refund at random around the limit; then the sums are compared.
 *
 * Made to be built with the address, undefined-behaviour and thread sanitizers as well.
 *
 *     stress_account DIRECTORY PROCESSES THREADS OPERATIONS
 */
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "account.h"
#include "platform.h"
#include "check.h"

#define MIB UINT64_C(1048576)
#define LIMIT (256 * MIB)
#define DEVICES 2
#define KEPT_AT_MOST 16

static struct board {
    uint64_t held[DEVICES];
    uint64_t granted;
    uint64_t refused;
} *board;
static int operations;
static uint32_t seed;

static void *work(void *argument)
{
    uint32_t random = seed * 77u + (uint32_t)(uintptr_t)argument * 1013u + 1;
    uint64_t kept[DEVICES][KEPT_AT_MOST] = {{0}};
    uint64_t granted = 0;
    uint64_t refused = 0;
    for (int i = 0; i < operations; i++) {
        random = random * 1664525u + 1013904223u;
        int device = (int)(random >> 30 & 1);
        uint64_t *place = &kept[device][random >> 8 & (KEPT_AT_MOST - 1)];
        if (*place) {
            account_refund(device, *place);
            *place = 0;
            continue;
        }
        uint64_t bytes = 1 + (random >> 4) % (random & 15 ? 64 * 1024 : 64 * MIB);
        if (account_charge(device, bytes)) {
            *place = bytes;
            granted++;
        } else {
            refused++;
        }
        if ((random & 0xfff) == 0) CHECK(account_own_used(device) <= LIMIT);
    }
    for (int device = 0; device < DEVICES; device++)
        for (int i = 0; i < KEPT_AT_MOST; i++)
            __atomic_fetch_add(&board->held[device], kept[device][i], __ATOMIC_RELAXED);
    __atomic_fetch_add(&board->granted, granted, __ATOMIC_RELAXED);
    __atomic_fetch_add(&board->refused, refused, __ATOMIC_RELAXED);
    return NULL;
}

static void run_threads(int threads)
{
    pthread_t all[64];
    CHECK(threads <= 64);
    for (int i = 0; i < threads; i++)
        CHECK(pthread_create(&all[i], NULL, work, (void *)(uintptr_t)i) == 0);
    for (int i = 0; i < threads; i++)
        CHECK(pthread_join(all[i], NULL) == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 5);
    char name[4096];
    char limit[32];
    snprintf(name, sizeof name, "%s/region", argv[1]);
    snprintf(limit, sizeof limit, "%llu", (unsigned long long)LIMIT);
    setenv("CUDA_DEVICE_MEMORY_SHARED_CACHE", name, 1);
    setenv("CUDA_DEVICE_MEMORY_LIMIT", limit, 1);
    int processes = atoi(argv[2]);
    int threads = atoi(argv[3]);
    operations = atoi(argv[4]);
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    int ready[2];
    int leave[2];
    CHECK(pipe(ready) == 0 && pipe(leave) == 0);
    for (int i = 1; i < processes; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            char byte = 0;
            seed = (uint32_t)i;
            run_threads(threads);
            CHECK_EQUAL(account_errors(), 0);
            close(leave[1]);
            CHECK(write(ready[1], &byte, 1) == 1);
            CHECK(read(leave[0], &byte, 1) == 0); /* holds what it has until all have been counted */
            _exit(0);
        }
    }
    run_threads(threads);
    char byte;
    for (int i = 1; i < processes; i++)
        CHECK(read(ready[0], &byte, 1) == 1);
    for (int device = 0; device < DEVICES; device++) {
        CHECK_EQUAL(account_used(device), board->held[device]);
        CHECK(board->held[device] <= LIMIT);
        uint64_t rest = LIMIT - board->held[device];
        CHECK(rest == 0 || account_charge(device, rest));
        CHECK(!account_charge(device, 1));
        CHECK_EQUAL(account_used(device), LIMIT);
    }
    CHECK_EQUAL(account_errors(), 0);
    CHECK(board->granted > 0 && board->refused > 0);
    close(leave[1]);
    for (int i = 1; i < processes; i++) {
        int status = 0;
        CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    printf("granted %llu refused %llu\n", (unsigned long long)board->granted, (unsigned long long)board->refused);
    account_detach();
    return 0;
}
