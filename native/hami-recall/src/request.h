/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests of the agent as text: `<id> lock <pid> <timeout ms>` and `<id> checkpoint|restore|unlock|state <pid> [<ms>]`.
 *
 * The optional last number replaces the operation's own deadline. Pure: no input, no output, no clock.
 */
#ifndef RECALL_REQUEST_H
#define RECALL_REQUEST_H

#include <stdbool.h>
#include <stdint.h>

enum { REQUEST_ID = 40, REQUEST_TEXT = 160 };

enum operation { OPERATION_LOCK, OPERATION_CHECKPOINT, OPERATION_RESTORE, OPERATION_UNLOCK, OPERATION_STATE };

struct request {
    char id[REQUEST_ID]; /* of the agent's choice, without spaces */
    enum operation operation;
    int pid;
    uint32_t timeout_ms;  /* of a lock: how long the driver waits for the process's work; never 0 */
    uint32_t deadline_ms; /* after which the call is given up */
};

/* false: not a request. `id` is set as far as the text has one, else it is "?". */
bool request_parse(const char *text, struct request *request);

#endif
