/* SPDX-License-Identifier: Apache-2.0 */
#include "worker.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CUDA_SUCCESS = 0, CUDA_ERROR_SHARED_OBJECT_INIT_FAILED = 303, CUDA_ERROR_NOT_SUPPORTED = 801, MS_PER_S = 1000 };

/* CUcheckpointLockArgs of <cuda.h>; the arguments of the other calls are left out. */
struct lock_arguments {
    unsigned int timeout_ms;
    unsigned int reserved0;
    uint64_t reserved1[7];
};
_Static_assert(sizeof(struct lock_arguments) == 64, "CUcheckpointLockArgs");

typedef int (*checkpoint_call)(int pid, void *arguments);

/* CUprocessState. */
static const char *const states[] = {"running", "locked", "checkpointed", "failed", "checkpointing", "restoring"};

static const char *const symbols[] = {
    [OPERATION_LOCK] = "cuCheckpointProcessLock",       [OPERATION_CHECKPOINT] = "cuCheckpointProcessCheckpoint",
    [OPERATION_RESTORE] = "cuCheckpointProcessRestore", [OPERATION_UNLOCK] = "cuCheckpointProcessUnlock",
    [OPERATION_STATE] = "cuCheckpointProcessGetState",
};

static void *library;
static int unusable; /* why every call fails; CUDA_SUCCESS: it does not */

/* A function of the driver; ISO C has no conversion from the object pointer that dlsym returns. */
static void find(const char *name, void *function)
{
    void *found = library ? dlsym(library, name) : NULL;
    memcpy(function, (void *)&found, sizeof found);
}

static void load(const char *driver)
{
    int (*initialize)(unsigned int flags);
    if (!library) library = dlopen(driver, RTLD_NOW);
    find("cuInit", (void *)&initialize);
    unusable = initialize ? initialize(0) : CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
}

static const char *name_of(int result)
{
    int (*get_name)(int result, const char **name);
    const char *name = NULL;
    find("cuGetErrorName", (void *)&get_name);
    if (get_name && get_name(result, &name) == CUDA_SUCCESS && name) return name;
    return result == CUDA_ERROR_SHARED_OBJECT_INIT_FAILED ? "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED" : "CUDA_ERROR";
}

static int call(const struct request *request, const char *driver, int *state)
{
    checkpoint_call function;
    struct lock_arguments lock = {.timeout_ms = request->timeout_ms};
    void *arguments = request->operation == OPERATION_LOCK    ? (void *)&lock
                      : request->operation == OPERATION_STATE ? (void *)state
                                                              : NULL;
    if (unusable != CUDA_SUCCESS) load(driver); /* it may have come since */
    if (unusable != CUDA_SUCCESS) return unusable;
    find(symbols[request->operation], (void *)&function);
    return function ? function(request->pid, arguments) : CUDA_ERROR_NOT_SUPPORTED;
}

static void answer(const struct request *request, int result, int state, char *text)
{
    bool is_known = state >= 0 && (size_t)state < sizeof states / sizeof *states;
    if (result != CUDA_SUCCESS)
        (void)snprintf(text, WORKER_ANSWER, "error %d %.80s", result, name_of(result));
    else if (request->operation == OPERATION_STATE)
        (void)snprintf(text, WORKER_ANSWER, "ok %s", is_known ? states[state] : "failed");
    else
        (void)snprintf(text, WORKER_ANSWER, "ok");
}

void worker_run(int socket, const char *driver)
{
    struct request request;
    load(driver);
    while (recv(socket, &request, sizeof request, 0) == (ssize_t)sizeof request) {
        char text[WORKER_ANSWER];
        int state = 0;
        alarm(request.deadline_ms / MS_PER_S + 2); /* ends an abandoned worker */
        int result = call(&request, driver, &state);
        alarm(0);
        answer(&request, result, state, text);
        if (send(socket, text, strlen(text) + 1, MSG_NOSIGNAL) < 0) break;
    }
    _exit(0);
}
