/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures one driver call in several processes at once.
 *
 *     bench alloc|launch|info|init LIVE PROCESSES BATCHES
 *
 * Every process makes LIVE allocations of 4 KiB, waits until all have, then runs BATCHES batches of 1,000 calls. The
 * answer is one line, "NS SECONDS": nanoseconds of processor time per call (for alloc: per pair of cuMemAlloc and
 * cuMemFree), the median over all processes of their median batch; processor time, so that processes that take turns on
 * few cores compare with a lone one. Then the seconds from the start signal until the last had finished. For init the
 * calls are cuInit, cuDevicePrimaryCtxRetain and one cuMemAlloc, once per process.
 */
#include "calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PROCESSES_MAX = 1024, BATCHES_MAX = 4096, CALLS = 1000, BLOCK = 4096 };

static CUfunction kernel;
static double batch_ns[BATCHES_MAX];

static double clock_ns(clockid_t clock)
{
    struct timespec now;
    (void)clock_gettime(clock, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static int smaller_first(const void *a, const void *b)
{
    double left = *(const double *)a;
    double right = *(const double *)b;
    return (left > right) - (left < right);
}

static double median(double *values, size_t count)
{
    qsort(values, count, sizeof *values, smaller_first);
    return values[count / 2];
}

static CUresult prepare(long live)
{
    CUcontext context = NULL;
    CUmodule module = NULL;
    CUdeviceptr pointer = 0;
    CUresult result = cu.cuInit(0);
    if (result == CUDA_SUCCESS) result = cu.cuDevicePrimaryCtxRetain(&context, 0);
    if (result == CUDA_SUCCESS) result = cu.cuCtxSetCurrent(context);
    if (result == CUDA_SUCCESS) result = cu.cuModuleLoadData(&module, "fake-bytes: 0");
    if (result == CUDA_SUCCESS) result = cu.cuModuleGetFunction(&kernel, module, "nop");
    for (long i = 0; i < live && result == CUDA_SUCCESS; i++) {
        result = cu.cuMemAlloc_v2(&pointer, BLOCK);
    }
    return result;
}

static CUresult call(char what)
{
    CUdeviceptr pointer = 0;
    size_t free_bytes = 0;
    size_t total = 0;
    CUresult result = CUDA_SUCCESS;
    switch (what) {
    case 'a':
        result = cu.cuMemAlloc_v2(&pointer, BLOCK);
        return result == CUDA_SUCCESS ? cu.cuMemFree_v2(pointer) : result;
    case 'l':
        return cu.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    default:
        return cu.cuMemGetInfo_v2(&free_bytes, &total);
    }
}

static CUresult measure(char what, long batches, double *ns)
{
    CUresult result = CUDA_SUCCESS;
    for (long batch = 0; batch < batches && result == CUDA_SUCCESS; batch++) {
        double before = clock_ns(CLOCK_THREAD_CPUTIME_ID);
        for (int i = 0; i < CALLS && result == CUDA_SUCCESS; i++) {
            result = call(what);
        }
        batch_ns[batch] = (clock_ns(CLOCK_THREAD_CPUTIME_ID) - before) / CALLS;
    }
    *ns = median(batch_ns, (size_t)batches);
    return result;
}

static CUresult initialise(double *ns)
{
    double before = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    CUresult result = prepare(1);
    *ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - before;
    return result;
}

struct signals {
    int ready[2];
    int go[2];
};

static void run_child(const struct signals *signals, const char *what, long live, long batches, double *ns)
{
    char byte = 0;
    CUresult result = strcmp(what, "init") == 0 ? CUDA_SUCCESS : prepare(live);
    if (result != CUDA_SUCCESS) {
        (void)fprintf(stderr, "prepare: error %d\n", result);
        _exit(1);
    }
    (void)close(signals->go[1]);
    (void)!write(signals->ready[1], &byte, 1);
    (void)!read(signals->go[0], &byte, 1); /* end of file is the start signal */
    result = strcmp(what, "init") == 0 ? initialise(ns) : measure(what[0], batches, ns);
    if (result != CUDA_SUCCESS) {
        (void)fprintf(stderr, "%s: error %d\n", what, result);
    }
    _exit(result == CUDA_SUCCESS ? 0 : 1);
}

int main(int count, char **arguments)
{
    struct signals signals;
    if (count != 5 || !calls_resolve("link")) {
        return 2;
    }
    long live = strtol(arguments[2], NULL, 10);
    long processes = strtol(arguments[3], NULL, 10);
    long batches = strtol(arguments[4], NULL, 10);
    size_t bytes = PROCESSES_MAX * sizeof(double);
    double *ns = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (ns == MAP_FAILED || processes < 1 || processes > PROCESSES_MAX || batches < 1 || batches > BATCHES_MAX ||
        pipe(signals.ready) != 0 || pipe(signals.go) != 0) {
        return 2;
    }
    for (long i = 0; i < processes; i++) {
        if (fork() == 0) {
            run_child(&signals, arguments[1], live, batches, &ns[i]);
        }
    }
    (void)close(signals.ready[1]);
    bool good = true;
    for (long i = 0; i < processes && good; i++) {
        char byte = 0;
        good = read(signals.ready[0], &byte, 1) == 1;
    }
    double before = clock_ns(CLOCK_MONOTONIC);
    (void)close(signals.go[1]);
    int status = 0;
    while (wait(&status) > 0) {
        good = good && status == 0;
    }
    double seconds = (clock_ns(CLOCK_MONOTONIC) - before) / 1e9;
    if (good) {
        (void)printf("%.3f %.6f\n", median(ns, (size_t)processes), seconds);
    }
    return good ? 0 : 1;
}
