/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one thread of the limiter: in a process that uses CUDA, and in no other.
 *
 * Looks four times a second whether the limits have changed; one of all processes looks for the dead as often. All
 * signals blocked; ends by itself when the process has detached.
 */
#ifndef VGPU_WATCH_H
#define VGPU_WATCH_H

#include <stdbool.h>

#define WATCH_PERIOD_NS 250000000ull

/* Start the thread if none runs in this process; with the lock of fork.h held. false: there can be none. */
bool watch_start(void);

/* In account.c: one look; false: nothing to watch any more, and `watching` is 0 again. */
bool account_tick(void);

#endif
