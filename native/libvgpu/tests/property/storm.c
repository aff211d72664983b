/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks the invariants of one container under random use: starts workers, kills them, compares counts.
 *
 *     storm SEED WORKERS         commands on stdin, one answer line each:
 *     run MS LIMIT TOTAL EVERY_MS    let the workers run so long, kill one about every EVERY_MS; then compare:
 *                                "ok OPERATIONS KILLS FORKS SAMPLES RECLAIM_US LIVES" (counted from the beginning, the
 *                                slowest reclaim), or "fail SEED: what"
 *     limit LIMIT TOTAL          wait until the container may use this much of every device, and shows this total (bytes)
 *
 * Invariants per device. At every moment: the memory that the driver has given to the container's living processes is
 * at most the limit, or not more than it was a moment ago when the limit has shrunk below it. When the workers stand
 * still: the usage reported to the container equals what the driver has given, within a second of the last death; an
 * allocation of all that is free succeeds and then not one byte more; no view has more free or used than total.
 *
 * The driver's own count (../fakedrv/card.h) is the oracle. CUDA_VISIBLE_DEVICES names the devices by UUID.
 */
#include "storm.h"

#include "../fakedrv/card.h"
#include "../programs/nvml_view.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RECLAIM_NS UINT64_C(1000000000)
#define PATIENCE_NS UINT64_C(8000000000) /* a loaded machine; the reclaim itself is reported and judged outside */

static struct storm_shared *shared;
static struct card *card;
static uint64_t seed;
static unsigned int worker_count;
static pid_t workers[STORM_WORKERS];
static pid_t observer;
static int to_observer = -1;
static int from_observer = -1;
static int devices[STORM_DEVICES]; /* on the card */
static char uuids[STORM_DEVICES][CARD_UUID];
static unsigned int device_count;
static uint64_t kills;
static uint64_t lives;
static uint64_t samples;
static uint64_t slowest_reclaim_ns;
static uint64_t random_state;

static uint64_t next_random(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return random_state >> 33U;
}

static void nap(long ns)
{
    (void)nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

static bool has_failed(void)
{
    return __atomic_load_n(&shared->failed, __ATOMIC_SEQ_CST) != 0;
}

/* ---- the observer: a process of the container that only looks ---- */

struct question {
    char what; /* 'v': the view of each device; 'x': is exactly that free, on one device */
    int device;
};

struct reply {
    CUresult result;
    struct storm_view views[STORM_DEVICES];
};

/* The limit may change between two reads: then they cannot be compared. */
static bool is_steady(uint64_t total)
{
    size_t free_bytes = 0;
    size_t again = 0;
    return cu.cuMemGetInfo_v2(&free_bytes, &again) == CUDA_SUCCESS && again == total;
}

/* Returns the bytes in use. */
static uint64_t check_nvml(int device, uint64_t total)
{
    struct view_memory view;
    int code = view_memory(device, &view);
    if (!is_steady(total)) {
        return view.used_2;
    }
    if (code != 0 || view.free > view.total || view.used > view.total || view.free_2 > view.total_2 ||
        view.used_2 > view.total_2 || view.total != total || view.total_2 != total) {
        storm_fail(shared, "nvml on device %d: code %d, v1 %llu used %llu free of %llu, v2 %llu used %llu free of %llu",
                   device, code, view.used, view.free, view.total, view.used_2, view.free_2, view.total_2);
    }
    return view.used_2;
}

static CUresult look_at(int device, struct storm_view *view)
{
    CUcontext context = NULL;
    size_t free_bytes = 0;
    size_t total = 0;
    size_t total_mem = 0;
    CUresult result = cu.cuDevicePrimaryCtxRetain(&context, device);
    if (result == CUDA_SUCCESS) result = cu.cuCtxSetCurrent(context);
    if (result == CUDA_SUCCESS) result = cu.cuMemGetInfo_v2(&free_bytes, &total);
    if (result == CUDA_SUCCESS) result = cu.cuDeviceTotalMem_v2(&total_mem, device);
    if (result == CUDA_SUCCESS && (free_bytes > total || (total_mem != total && is_steady(total)))) {
        storm_fail(shared, "device %d: cuDeviceTotalMem %zu, cuMemGetInfo %zu of %zu", device, total_mem, free_bytes,
                   total);
    }
    *view = (struct storm_view){.free_bytes = free_bytes, .total = total};
    if (result == CUDA_SUCCESS) {
        view->used = check_nvml(device, total);
    }
    (void)cu.cuDevicePrimaryCtxRelease_v2(device); /* the first retain of all stays */
    return result;
}

static CUresult take_all(int device, struct storm_view *view)
{
    CUdeviceptr all = 0;
    CUdeviceptr more = 0;
    CUresult result = look_at(device, view);
    if (result != CUDA_SUCCESS || view->free_bytes == 0) {
        return result;
    }
    result = cu.cuMemAlloc_v2(&all, view->free_bytes);
    if (result != CUDA_SUCCESS) {
        storm_fail(shared, "device %d: %llu bytes are free but refused: %d", device,
                   (unsigned long long)view->free_bytes, result);
        return result;
    }
    result = cu.cuMemAlloc_v2(&more, 1);
    if (result != CUDA_ERROR_OUT_OF_MEMORY) {
        storm_fail(shared, "device %d: a byte more than the limit answered %d", device, result);
    }
    return cu.cuMemFree_v2(all);
}

/* The first process of the container shows the limiter what contexts take and by what pieces pools grow. */
static CUresult see_pieces(CUcontext context)
{
    CUdeviceptr pointer = 0;
    CUresult result = cu.cuCtxSetCurrent(context);
    if (result == CUDA_SUCCESS) result = cu.cuMemAllocAsync(&pointer, 1, NULL);
    if (result == CUDA_SUCCESS) result = cu.cuMemFreeAsync(pointer, NULL);
    if (result == CUDA_SUCCESS) result = cu.cuCtxSynchronize();
    return result;
}

static void observe(int in, int out)
{
    struct question question;
    struct reply reply;
    CUcontext context = NULL;
    int count = 0;
    CUresult result = cu.cuInit(0);
    if (result == CUDA_SUCCESS) result = cu.cuDeviceGetCount(&count);
    for (int device = 0; device < count && result == CUDA_SUCCESS; device++) {
        result = cu.cuDevicePrimaryCtxRetain(&context, device);
        if (result == CUDA_SUCCESS) result = see_pieces(context);
    }
    if (result != CUDA_SUCCESS || count != (int)device_count) {
        storm_fail(shared, "observer: code %d, %d devices instead of %u", result, count, device_count);
    }
    memset(&reply, 0, sizeof reply);
    bool ready = write(out, &reply, sizeof reply) == (ssize_t)sizeof reply;
    while (ready && read(in, &question, sizeof question) == (ssize_t)sizeof question) {
        memset(&reply, 0, sizeof reply);
        if (question.what == 'x') {
            reply.result = take_all(question.device, &reply.views[question.device]);
        }
        for (int device = 0; question.what == 'v' && device < count && reply.result == CUDA_SUCCESS; device++) {
            reply.result = look_at(device, &reply.views[device]);
        }
        if (write(out, &reply, sizeof reply) != (ssize_t)sizeof reply) {
            break;
        }
    }
    _exit(0);
}

static bool ask(char what, int device, struct reply *reply)
{
    struct question question = {.what = what, .device = device};
    bool good = write(to_observer, &question, sizeof question) == (ssize_t)sizeof question &&
                read(from_observer, reply, sizeof *reply) == (ssize_t)sizeof *reply;
    if (!good || reply->result != CUDA_SUCCESS) {
        storm_fail(shared, "observer: %s", good ? "the driver answered an error" : "is gone");
        return false;
    }
    return true;
}

/* ---- processes ---- */

static void start_worker(unsigned int number)
{
    uint64_t own = seed * 1000003U + lives++;
    __atomic_store_n(&shared->workers[number].state, STORM_ABSENT, __ATOMIC_SEQ_CST);
    pid_t pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)close(to_observer);
        (void)close(from_observer);
        storm_work(shared, number, own);
        _exit(0);
    }
    workers[number] = pid;
}

static void start_observer(void)
{
    int down[2];
    int up[2];
    if (pipe(down) != 0 || pipe(up) != 0) {
        storm_fail(shared, "pipe: %s", strerror(errno));
        return;
    }
    observer = fork();
    if (observer == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)close(down[1]);
        (void)close(up[0]);
        observe(down[0], up[1]);
    }
    (void)close(down[0]);
    (void)close(up[1]);
    to_observer = down[1];
    from_observer = up[0];
    struct reply ready;
    if (read(from_observer, &ready, sizeof ready) != (ssize_t)sizeof ready) {
        storm_fail(shared, "observer: ended at once");
    }
}

/* ---- the driver's own count ---- */

static bool is_ours(uint32_t pid)
{
    if (pid == (uint32_t)observer) {
        return true;
    }
    for (unsigned int i = 0; i < worker_count; i++) {
        if (pid != 0 && pid == (uint32_t)workers[i]) {
            return true;
        }
    }
    return false;
}

/* Sum over the living of one device at one moment: two equal reads in a row, without a death in between. */
static bool given(unsigned int device, uint64_t *sum)
{
    unsigned int ours[STORM_WORKERS + 1];
    uint64_t seen[STORM_WORKERS + 1];
    unsigned int count = 0;
    for (unsigned int slot = 0; slot < card->header.slots_seen && count <= STORM_WORKERS; slot++) {
        if (is_ours(__atomic_load_n(&card->slots[slot].pid, __ATOMIC_ACQUIRE))) {
            ours[count++] = slot;
        }
    }
    for (unsigned int tries = 0; tries < 50; tries++) {
        bool same = true;
        *sum = 0;
        for (unsigned int i = 0; i < count; i++) {
            seen[i] = __atomic_load_n(&card->shares[ours[i]][device].used, __ATOMIC_ACQUIRE);
            *sum += seen[i];
        }
        for (unsigned int i = 0; i < count; i++) {
            same = same && seen[i] == __atomic_load_n(&card->shares[ours[i]][device].used, __ATOMIC_ACQUIRE);
        }
        if (!same) {
            continue;
        }
        for (unsigned int i = 0; i < count; i++) {
            same = same && (seen[i] == 0 || card_alive(card, ours[i]));
        }
        return same;
    }
    return false;
}

static void sample(uint64_t before[STORM_DEVICES])
{
    uint64_t limit = __atomic_load_n(&shared->limit, __ATOMIC_SEQ_CST);
    for (unsigned int i = 0; i < device_count; i++) {
        uint64_t now = 0;
        if (!given((unsigned int)devices[i], &now)) {
            continue;
        }
        samples++;
        if (now > limit && now > before[i]) {
            storm_fail(shared, "device %u: the driver has given %llu, the limit is %llu, it was %llu before", i,
                       (unsigned long long)now, (unsigned long long)limit, (unsigned long long)before[i]);
        }
        before[i] = now;
    }
}

/* ---- phases ---- */

static void bury_workers(bool and_restart)
{
    for (unsigned int i = 0; i < worker_count; i++) {
        int status = 0;
        if (workers[i] > 0 && waitpid(workers[i], &status, WNOHANG) == workers[i]) {
            if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL) {
                storm_fail(shared, "worker %u died of signal %d", i, WTERMSIG(status));
            }
            workers[i] = 0;
            __atomic_store_n(&shared->workers[i].state, STORM_ABSENT, __ATOMIC_SEQ_CST);
        }
        if (workers[i] <= 0 && and_restart) {
            start_worker(i);
        }
    }
}

static void kill_one(void)
{
    unsigned int number = (unsigned int)(next_random() % worker_count);
    if (workers[number] > 0) {
        (void)kill(workers[number], SIGKILL);
        (void)waitpid(workers[number], NULL, 0);
        workers[number] = 0;
        kills++;
        start_worker(number);
    }
}

static void storm(uint64_t ms, uint64_t every_ms)
{
    uint64_t before[STORM_DEVICES];
    uint64_t begin = storm_now_ns();
    uint64_t end = begin + ms * 1000000U;
    uint64_t next_kill = begin + (1 + next_random() % (2 * every_ms)) * 1000000U;
    memset(before, 0xff, sizeof before); /* nothing is known of before: the first look sets it */
    while (storm_now_ns() < end && !has_failed()) {
        sample(before);
        bury_workers(true);
        if (storm_now_ns() >= next_kill) {
            kill_one();
            next_kill = storm_now_ns() + (1 + next_random() % (2 * every_ms)) * 1000000U;
        }
        nap(200000);
    }
}

static bool all_still(void)
{
    for (unsigned int i = 0; i < worker_count; i++) {
        if (workers[i] > 0 && __atomic_load_n(&shared->workers[i].state, __ATOMIC_SEQ_CST) != STORM_PAUSED) {
            return false;
        }
    }
    return true;
}

static bool agrees(const struct reply *reply, unsigned int device, uint64_t *told, uint64_t *truth)
{
    const struct storm_view *view = &reply->views[device];
    *told = view->used;
    if (!given((unsigned int)devices[device], truth)) {
        return false;
    }
    bool is_whole = *truth >= shared->limit ? view->free_bytes == 0 : view->free_bytes == shared->limit - *truth;
    return is_whole && (*truth >= view->total || *told == *truth);
}

/* Prints to stderr NVML's usage of each process of the container, and what the driver has given it. */
static void explain(int device)
{
    struct view_process list[256];
    unsigned int count = sizeof list / sizeof list[0];
    int code = view_processes(device, list, &count);
    (void)fprintf(stderr, "device %d, nvml code %d, reported:", device, code);
    for (unsigned int i = 0; code == 0 && i < count; i++) {
        (void)fprintf(stderr, " %u:%llu", list[i].pid, list[i].bytes);
    }
    (void)fprintf(stderr, "; given:");
    for (unsigned int slot = 0; slot < card->header.slots_seen; slot++) {
        if (is_ours(card->slots[slot].pid)) {
            (void)fprintf(stderr, " %u:%llu", card->slots[slot].pid,
                          (unsigned long long)card->shares[slot][devices[device]].used);
        }
    }
    (void)fprintf(stderr, "\n");
}

/* All workers stand still: counts must agree, after at most the time that finding the dead takes. */
static void compare(void)
{
    struct reply reply;
    uint64_t begin = storm_now_ns();
    __atomic_store_n(&shared->pause, 1, __ATOMIC_SEQ_CST);
    while (!all_still() && !has_failed()) {
        bury_workers(false);
        nap(200000);
        if (storm_now_ns() - begin > 4 * PATIENCE_NS) {
            storm_fail(shared, "workers do not stand still: one hangs");
        }
    }
    begin = storm_now_ns();
    for (unsigned int device = 0; device < device_count && !has_failed();) {
        uint64_t told = 0;
        uint64_t truth = 0;
        if (!ask('v', 0, &reply)) {
            break;
        }
        if (agrees(&reply, device, &told, &truth)) {
            device++;
        } else if (storm_now_ns() - begin > PATIENCE_NS) {
            explain((int)device);
            storm_fail(shared, "device %u: the container sees %llu, the driver has given %llu (limit %llu)", device,
                       (unsigned long long)told, (unsigned long long)truth, (unsigned long long)shared->limit);
        } else {
            nap(500000);
        }
    }
    uint64_t took = storm_now_ns() - begin;
    slowest_reclaim_ns = took > slowest_reclaim_ns ? took : slowest_reclaim_ns;
    if (!has_failed()) {
        (void)ask('x', (int)(next_random() % device_count), &reply);
    }
    __atomic_store_n(&shared->pause, 0, __ATOMIC_SEQ_CST);
}

static void wait_for_limit(uint64_t limit, uint64_t total)
{
    struct reply reply;
    uint64_t begin = storm_now_ns();
    uint64_t highest = limit > shared->limit ? limit : shared->limit;
    __atomic_store_n(&shared->limit, highest, __ATOMIC_SEQ_CST); /* until the change has arrived */
    __atomic_store_n(&shared->total, total > shared->total ? total : shared->total, __ATOMIC_SEQ_CST);
    for (unsigned int device = 0; device < device_count && !has_failed();) {
        bury_workers(true);
        if (!ask('v', 0, &reply)) {
            return;
        }
        const struct storm_view *view = &reply.views[device];
        bool has_arrived = view->free_bytes > 0 ? view->free_bytes + view->used == limit : view->used >= limit;
        if (view->total == total && has_arrived) {
            device++;
        } else if (storm_now_ns() - begin > PATIENCE_NS) {
            storm_fail(shared, "device %u: %llu free and %llu in use of %llu, the limit is %llu", device,
                       (unsigned long long)view->free_bytes, (unsigned long long)view->used,
                       (unsigned long long)view->total, (unsigned long long)limit);
        } else {
            nap(5000000);
        }
    }
    if (limit < highest) { /* every other process reads the file within a second of its change too */
        nap(750000000);
        nap(750000000);
    }
    __atomic_store_n(&shared->limit, limit, __ATOMIC_SEQ_CST);
    __atomic_store_n(&shared->total, total, __ATOMIC_SEQ_CST);
}

static void report(void)
{
    uint64_t operations = 0;
    uint64_t forks = 0;
    for (unsigned int i = 0; i < worker_count; i++) {
        operations += shared->workers[i].operations;
        forks += shared->workers[i].forks;
    }
    if (has_failed()) {
        nap(2000000);
        (void)printf("fail %llu: %s; the workers last did", (unsigned long long)seed, shared->problem);
        for (unsigned int i = 0; i < worker_count; i++) {
            const char *doing = shared->workers[i].doing;
            (void)printf(" %s %llu", doing == NULL ? "nothing" : doing, (unsigned long long)shared->workers[i].bytes);
        }
        (void)printf("\n");
    } else {
        (void)printf("ok %llu %llu %llu %llu %llu %llu\n", (unsigned long long)operations, (unsigned long long)kills,
                     (unsigned long long)forks, (unsigned long long)samples,
                     (unsigned long long)(slowest_reclaim_ns / 1000U), (unsigned long long)lives);
    }
}

static bool find_devices(void)
{
    char copy[4096];
    char *rest = NULL;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    const char *state_path = getenv("FAKE_NVML_STATE");
    card = state_path == NULL ? NULL : card_open(state_path);
    if (card == NULL || visible == NULL) {
        return false;
    }
    (void)snprintf(copy, sizeof copy, "%s", visible);
    for (char *word = strtok_r(copy, ",", &rest); word != NULL && device_count < STORM_DEVICES;
         word = strtok_r(NULL, ",", &rest)) {
        (void)snprintf(uuids[device_count], sizeof uuids[0], "%s", word);
        devices[device_count] = card_device_of(card, word);
        device_count++;
    }
    return device_count > 0;
}

static void end_all(void)
{
    for (unsigned int i = 0; i < worker_count; i++) {
        if (workers[i] > 0) {
            (void)kill(workers[i], SIGKILL);
            (void)waitpid(workers[i], NULL, 0);
        }
    }
    if (observer > 0) {
        (void)kill(observer, SIGKILL);
        (void)waitpid(observer, NULL, 0);
    }
}

int main(int count, char **arguments)
{
    char line[256];
    if (count != 3 || !calls_resolve("link") || !find_devices()) {
        return 2;
    }
    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    (void)signal(SIGPIPE, SIG_IGN);
    seed = strtoull(arguments[1], NULL, 10);
    random_state = seed * 77 + 1;
    worker_count = (unsigned int)strtoul(arguments[2], NULL, 10);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED || worker_count < 1 || worker_count > STORM_WORKERS) {
        return 2;
    }
    while (fgets(line, sizeof line, stdin) != NULL) {
        unsigned long long ms = 0;
        unsigned long long limit = 0;
        unsigned long long total = 0;
        unsigned long long every_ms = 1;
        if (sscanf(line, "run %llu %llu %llu %llu", &ms, &limit, &total, &every_ms) == 4) {
            __atomic_store_n(&shared->limit, limit, __ATOMIC_SEQ_CST);
            __atomic_store_n(&shared->total, total, __ATOMIC_SEQ_CST);
            if (observer == 0) {
                start_observer();
            }
            storm(ms, every_ms);
            compare();
        } else if (sscanf(line, "limit %llu %llu", &limit, &total) == 2) {
            wait_for_limit(limit, total);
        }
        report();
        if (has_failed()) {
            break;
        }
    }
    end_all();
    return has_failed() ? 1 : 0;
}
