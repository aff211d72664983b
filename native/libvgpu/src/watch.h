/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The limiter's only thread, started in each process that uses CUDA.
 *
 * Four times a second it calls the function that follows changes of the limits and reclaims slots of dead processes. All
 * signals are blocked in it. It ends when that function returns false.
 */
#ifndef VGPU_WATCH_H
#define VGPU_WATCH_H

#include <stdbool.h>

#define WATCH_PERIOD_NS 250000000ull

/* Start the thread if none runs in this process; with the lock of fork.h held. `look` is called once a period; it clears
   `watching` of fork.h before it returns false. false: the thread could not be started. */
bool watch_start(bool (*look)(void));

#endif
