/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that call the driver at random, each with a buffer of its own whose contents it knows.
 *
 *     threads COUNT MS SEED    prints "ready", then after so many milliseconds the calls that succeeded, those that
 *                              failed, the bytes that were wrong, and the hooked calls that found the process locked
 *
 * A thread ends after some calls and another one takes its place, so that threads come and go.
 */
#include "calls.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { THREADS_MOST = 64, BUFFER = 8192, CALLS_PER_THREAD = 200 };

static struct {
    uint64_t good;
    uint64_t failed;
    uint64_t wrong;
} totals;

static CUcontext context;
static CUfunction kernel;
static uint64_t end_ns;

static uint64_t now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec;
}

static unsigned int draw(unsigned int *seed, unsigned int below)
{
    *seed = *seed * 1664525U + 1013904223U;
    return (*seed >> 10U) % below;
}

static void count(uint64_t *word, uint64_t number)
{
    (void)__atomic_add_fetch(word, number, __ATOMIC_RELAXED);
}

static CUresult compare(CUdeviceptr buffer, unsigned char value)
{
    unsigned char seen[BUFFER];
    uint64_t wrong = 0;
    CUresult result = cu.cuMemcpyDtoH_v2(seen, buffer, sizeof seen);
    for (size_t i = 0; i < sizeof seen && result == CUDA_SUCCESS; i++) {
        wrong += seen[i] != value;
    }
    count(&totals.wrong, wrong);
    return result;
}

static CUresult call(unsigned int choice, CUdeviceptr buffer, CUstream stream, CUevent event, unsigned char *value)
{
    unsigned char fresh[BUFFER];
    CUdeviceptr other = 0;
    CUresult result = CUDA_SUCCESS;
    switch (choice) {
    case 0:
        return cu.cuCtxSynchronize();
    case 1:
        return cu.cuStreamSynchronize(stream);
    case 2:
        return cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
    case 3:
        result = cu.cuEventRecord(event, stream);
        return result == CUDA_SUCCESS ? cu.cuEventSynchronize(event) : result;
    case 4:
        result = cu.cuMemAlloc_v2(&other, 1U << 20U);
        return result == CUDA_SUCCESS ? cu.cuMemFree_v2(other) : result;
    case 5:
        (*value)++;
        memset(fresh, *value, sizeof fresh);
        return cu.cuMemcpyHtoD_v2(buffer, fresh, sizeof fresh);
    default:
        return compare(buffer, *value);
    }
}

static void *run(void *argument)
{
    unsigned int seed = *(unsigned int *)argument;
    unsigned char value = (unsigned char)seed;
    unsigned char first[BUFFER];
    CUdeviceptr buffer = 0;
    CUstream stream = NULL;
    CUevent event = NULL;
    memset(first, value, sizeof first);
    bool good = cu.cuCtxSetCurrent(context) == CUDA_SUCCESS && cu.cuMemAlloc_v2(&buffer, BUFFER) == CUDA_SUCCESS &&
                cu.cuMemcpyHtoD_v2(buffer, first, sizeof first) == CUDA_SUCCESS &&
                cu.cuStreamCreate(&stream, 1) == CUDA_SUCCESS && cu.cuEventCreate(&event, 0) == CUDA_SUCCESS;
    for (unsigned int i = 0; good && i < CALLS_PER_THREAD && now_ns() < end_ns; i++) {
        good = call(draw(&seed, 8), buffer, stream, event, &value) == CUDA_SUCCESS;
        count(&totals.good, good ? 1 : 0);
        if (draw(&seed, 4) == 0) {
            (void)nanosleep(&(struct timespec){.tv_nsec = (long)draw(&seed, 1000000)}, NULL);
        }
    }
    if (good) {
        good = compare(buffer, value) == CUDA_SUCCESS && cu.cuStreamDestroy_v2(stream) == CUDA_SUCCESS &&
               cu.cuMemFree_v2(buffer) == CUDA_SUCCESS;
    }
    count(&totals.failed, good ? 0 : 1);
    return NULL;
}

static uint64_t held(void)
{
    uint64_t (*ask)(const char *name) = NULL;
    void *found = dlsym(RTLD_DEFAULT, "fake_cuda_held");
    memcpy(&ask, &found, sizeof found);
    return ask == NULL ? 0 : ask(NULL) - ask("cuCtxSetCurrent");
}

int main(int argc, char **argv)
{
    static pthread_t threads[THREADS_MOST];
    static unsigned int seeds[THREADS_MOST];
    CUmodule module = NULL;
    size_t number = argc > 3 ? strtoul(argv[1], NULL, 10) : 0;
    unsigned int seed = argc > 3 ? (unsigned int)strtoul(argv[3], NULL, 10) : 0;
    if (number == 0 || number > THREADS_MOST || !calls_resolve("link")) {
        return 2;
    }
    bool good = cu.cuInit(0) == CUDA_SUCCESS && cu.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS &&
                cu.cuCtxSetCurrent(context) == CUDA_SUCCESS &&
                cu.cuModuleLoadData(&module, "fake-bytes: 0") == CUDA_SUCCESS &&
                cu.cuModuleGetFunction(&kernel, module, "fixed_200us") == CUDA_SUCCESS;
    (void)printf("%s\n", good ? "ready" : "failed");
    (void)fflush(stdout);
    end_ns = now_ns() + strtoull(argv[2], NULL, 10) * 1000000ULL;
    while (good && now_ns() < end_ns) {
        size_t started = 0;
        for (; started < number; started++) {
            seeds[started] = draw(&seed, 1U << 20U);
            if (pthread_create(&threads[started], NULL, run, &seeds[started]) != 0) {
                return 2;
            }
        }
        while (started > 0) {
            (void)pthread_join(threads[--started], NULL);
        }
    }
    (void)printf("%llu %llu %llu %llu\n", (unsigned long long)totals.good, (unsigned long long)totals.failed,
                 (unsigned long long)totals.wrong, (unsigned long long)held());
    return good ? 0 : 1;
}
