/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The limiter's only thread, started in each process that uses CUDA.
 *
 * Four times a second it calls the function that follows changes of the limits and reclaims slots of dead processes, and
 * in between the ticker as often as that asks for. All signals are blocked in it. It ends when the function returns false.
 */
#ifndef VGPU_WATCH_H
#define VGPU_WATCH_H

#include <stdbool.h>
#include <stdint.h>

#define WATCH_PERIOD_NS 250000000ull

/* Start the thread if none runs in this process; with the lock of fork.h held. `look` is called once a period; it clears
   `watching` of fork.h before it returns false. false: the thread could not be started. */
bool watch_start(bool (*look)(void));

/* Call `tick` with the time of CLOCK_MONOTONIC; it returns the nanoseconds until it wants to be called again, and is called
   at least once a period. For this process and its children. */
void watch_use_ticker(uint64_t (*tick)(uint64_t now_ns));

/* Let the thread call the ticker now. A futex wake: from any thread, also in a hook. */
void watch_wake(void);

#endif
