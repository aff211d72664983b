/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker: a process that has initialized the driver and makes one checkpoint call at a time.
 *
 * It is forked from a process that has not loaded the driver, because the driver does not work in a child of one that has
 * initialized it. A call may never return (a stopped process blocks it), so the caller ends the worker then; a worker
 * that is left alone ends at the deadline by itself, and with the other end of its socket after the call.
 */
#ifndef RECALL_WORKER_H
#define RECALL_WORKER_H

#include "request.h"

enum { WORKER_ANSWER = 120 };

/* Serve the requests (struct request) that come from the socket, with answers in text; does not return. `driver`: name or
   path of libcuda. */
_Noreturn void worker_run(int socket, const char *driver);

#endif
