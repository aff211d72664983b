/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures one driver call in several processes at once, in rounds.
 *
 *     bench alloc|pool|launch|info|init LIVE PROCESSES BATCHES
 *
 * Every process makes LIVE allocations of 4 KiB; when all have, the program says "ready". For each line that it then
 * reads every process runs BATCHES batches of calls, all at once, and the program answers "NS LEAST KEPT REFERENCE": the
 * median over the processes of their median batch, the least batch of all, how many batches counted, and how fast the
 * reference (below) was at best; the line may name the fastest ever. Nanoseconds of
 * processor time per call (for alloc: per pair of cuMemAlloc and cuMemFree, for pool: of cuMemAllocAsync and
 * cuMemFreeAsync); processor time, so that processes that take
 * turns on few cores compare with a lone one. A batch does not count if the kernel took the processor away meanwhile (the
 * next process has used the caches), or if the processor itself was slower than it can be, which a loop of
 * additions before and after each batch shows (a neighbour on the other half of the core); unless no batch was left
 * alone. At the end of its input it ends.
 *
 * Every process has a second thread, which sleeps: the real driver starts some, and libc's locks are dearer in a process
 * with threads, which must not look like a cost of the limiter's own thread.
 *
 * For init a round is cuInit, cuDevicePrimaryCtxRetain and one cuMemAlloc in every process, and NS the wall time until
 * the last has done it; there can be one round only.
 */
#include "calls.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    PROCESSES_MAX = 1024,
    BATCHES_MAX = 4096,
    CALLS_PER_BATCH = 500,
    BLOCK = 4096,
    REFERENCE_ROUNDS = 300,
    REFERENCE_SUMS = 24
};

#define SLOWER 1.15

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
    case 'p':
        result = cu.cuMemAllocAsync(&pointer, BLOCK, NULL);
        return result == CUDA_SUCCESS ? cu.cuMemFreeAsync(pointer, NULL) : result;
    case 'l':
        return cu.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    default:
        return cu.cuMemGetInfo_v2(&free_bytes, &total);
    }
}

struct figures {
    double median_ns;
    double least_ns;
    double reference_ns;
    long kept;
};

/* Between the program and its processes. */
struct board {
    uint32_t round; /* futex: moved on to begin a round */
    uint32_t over;
    double reference_ns; /* least that anybody ever saw; 0: not known */
    struct figures figures[PROCESSES_MAX];
};

static long preemptions(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nivcsw : 0;
}

/* How fast the processor is just now: four independent sums, which keep all its units busy, so that a neighbour on the
 * other half of the core shows, and a locked addition in every round. */
static double reference_ns(void)
{
    uint64_t sums[4] = {1, 2, 3, 4};
    uint64_t word = 0;
    double before = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (uint64_t i = 0; i < REFERENCE_ROUNDS; i++) {
        for (uint64_t j = 0; j < REFERENCE_SUMS; j++) {
            for (size_t k = 0; k < 4; k++) {
                sums[k] += j ^ i;
                __asm__ __volatile__("" : "+r"(sums[k]));
            }
        }
        (void)__atomic_add_fetch(&word, sums[0] + sums[1] + sums[2] + sums[3], __ATOMIC_SEQ_CST);
    }
    return clock_ns(CLOCK_THREAD_CPUTIME_ID) - before;
}

static CUresult measure(char what, long batches, double reference_ever_ns, struct figures *figures)
{
    static double least_reference_ns = 1e18;
    if (reference_ever_ns > 0 && reference_ever_ns < least_reference_ns) {
        least_reference_ns = reference_ever_ns;
    }
    CUresult result = CUDA_SUCCESS;
    long kept = 0;
    long left = 0; /* of those that were disturbed, at the other end of the list */
    for (long batch = 0; batch < batches && result == CUDA_SUCCESS; batch++) {
        long preempted = preemptions();
        double reference = reference_ns();
        double before = clock_ns(CLOCK_THREAD_CPUTIME_ID);
        for (int i = 0; i < CALLS_PER_BATCH && result == CUDA_SUCCESS; i++) {
            result = call(what);
        }
        double ns = (clock_ns(CLOCK_THREAD_CPUTIME_ID) - before) / CALLS_PER_BATCH;
        double after = reference_ns();
        reference = after > reference ? after : reference;
        least_reference_ns = reference < least_reference_ns ? reference : least_reference_ns;
        if (preemptions() == preempted && reference <= least_reference_ns * SLOWER) {
            batch_ns[kept++] = ns;
        } else {
            batch_ns[BATCHES_MAX - ++left] = ns;
        }
    }
    figures->kept = kept;
    figures->reference_ns = least_reference_ns;
    double *counted = kept ? batch_ns : &batch_ns[BATCHES_MAX - left];
    figures->median_ns = median(counted, (size_t)(kept ? kept : left));
    figures->least_ns = counted[0];
    return result;
}

static CUresult initialise(struct figures *figures)
{
    double before = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    CUresult result = prepare(1);
    *figures = (struct figures){.kept = 1};
    figures->median_ns = figures->least_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - before;
    return result;
}

static void tell(int done, CUresult result, const char *what)
{
    char byte = result == CUDA_SUCCESS ? '+' : '-';
    if (result != CUDA_SUCCESS) {
        (void)fprintf(stderr, "%s: error %d\n", what, result);
    }
    (void)!write(done, &byte, 1);
}

static void *sleep_for_ever(void *unused)
{
    (void)unused;
    for (;;) {
        (void)pause();
    }
    return NULL;
}

static void run_child(struct board *board, struct figures *figures, int done, const char *what, long live, long batches)
{
    bool is_init = strcmp(what, "init") == 0;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    pthread_t thread;
    (void)pthread_create(&thread, NULL, sleep_for_ever, NULL);
    CUresult result = is_init ? CUDA_SUCCESS : prepare(live);
    for (uint32_t round = 0;; round++) {
        tell(done, result, what);
        while (__atomic_load_n(&board->round, __ATOMIC_ACQUIRE) == round) {
            (void)syscall(SYS_futex, &board->round, FUTEX_WAIT, round, NULL, NULL, 0);
        }
        if (board->over || result != CUDA_SUCCESS) {
            _exit(result != CUDA_SUCCESS);
        }
        result = is_init ? initialise(figures) : measure(what[0], batches, board->reference_ns, figures);
    }
}

/* All processes have done what they had to. */
static bool all_done(int done, long processes)
{
    bool good = true;
    for (long i = 0; i < processes && good; i++) {
        char byte = 0;
        good = read(done, &byte, 1) == 1 && byte == '+';
    }
    return good;
}

static void begin_round(struct board *board)
{
    (void)__atomic_add_fetch(&board->round, 1, __ATOMIC_RELEASE);
    (void)syscall(SYS_futex, &board->round, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void answer(const struct board *board, long processes, double *wall_ns)
{
    static double medians[PROCESSES_MAX];
    double least_ns = board->figures[0].least_ns;
    double reference_ns = board->figures[0].reference_ns;
    long kept = 0;
    for (long i = 0; i < processes; i++) {
        const struct figures *own = &board->figures[i];
        medians[i] = own->median_ns;
        least_ns = own->least_ns < least_ns ? own->least_ns : least_ns;
        reference_ns = own->reference_ns < reference_ns ? own->reference_ns : reference_ns;
        kept += own->kept;
    }
    double middle_ns = wall_ns ? *wall_ns : median(medians, (size_t)processes);
    (void)printf("%.3f %.3f %ld %.0f\n", middle_ns, least_ns, kept, reference_ns);
}

int main(int count, char **arguments)
{
    int done[2];
    if (count != 5 || !calls_resolve("link")) {
        return 2;
    }
    const char *what = arguments[1];
    long live = strtol(arguments[2], NULL, 10);
    long processes = strtol(arguments[3], NULL, 10);
    long batches = strtol(arguments[4], NULL, 10);
    struct board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED || processes < 1 || processes > PROCESSES_MAX || batches < 1 || batches > BATCHES_MAX ||
        pipe(done) != 0) {
        return 2;
    }
    for (long i = 0; i < processes; i++) {
        if (fork() == 0) {
            run_child(board, &board->figures[i], done[1], what, live, batches);
        }
    }
    (void)close(done[1]);
    bool good = all_done(done[0], processes);
    bool is_init = strcmp(what, "init") == 0;
    char line[32];
    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    (void)puts(good ? "ready" : "failed");
    while (good && fgets(line, sizeof line, stdin)) {
        board->reference_ns = strtod(line, NULL);
        double before = clock_ns(CLOCK_MONOTONIC);
        begin_round(board);
        good = all_done(done[0], processes);
        double wall_ns = clock_ns(CLOCK_MONOTONIC) - before;
        if (good) {
            answer(board, processes, is_init ? &wall_ns : NULL);
        }
    }
    board->over = 1;
    begin_round(board);
    while (wait(NULL) > 0) {
    }
    return good ? 0 : 1;
}
