/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random use of the driver by the processes of one container: what controller, workers and observer share.
 *
 * Sizes in bytes, times in nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef PROPERTY_STORM_H
#define PROPERTY_STORM_H

#include "../programs/calls.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { STORM_WORKERS = 16, STORM_DEVICES = 8, STORM_TEXT = 1024 };

enum storm_state { STORM_ABSENT, STORM_RUNNING, STORM_PAUSED };

/* In memory that all processes of one storm share. */
struct storm_shared {
    uint32_t pause; /* workers stand still while it is 1 */
    uint32_t failed;
    char problem[STORM_TEXT];
    uint64_t limit; /* of each device of the container: what it may use now */
    uint64_t total; /* of each device: what it shows; more than `limit` where the rest is not granted */
    struct {
        uint32_t state;
        uint64_t operations;
        uint64_t forks;
        const char *doing; /* a literal of the program, the same in all processes */
        uint64_t bytes;
    } workers[STORM_WORKERS];
};

struct storm_view {
    uint64_t free_bytes;
    uint64_t total;
    uint64_t used; /* as NVML reports it */
};

/* Reports the first failure, once, and stops all workers. */
__attribute__((format(printf, 2, 3))) void storm_fail(struct storm_shared *shared, const char *format, ...);

uint64_t storm_now_ns(void);

/* A worker: random operations from `seed` until it is killed or, as likely, ends in one of the ways processes end. */
void storm_work(struct storm_shared *shared, unsigned int worker, uint64_t seed);

#endif
