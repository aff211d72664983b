/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that uses the CUDA driver on command: one command a line on stdin, one answer a line on stdout.
 *
 *     drive [link|dlsym|proc]      how it reaches the driver (calls.h)
 *
 * Answers: "ok", "ok VALUES" or "error CODE" (a CUresult, or for nvml an nvmlReturn_t). Sizes in bytes with K, M, G.
 * What was made is known by number, counting up from 0.
 *
 *     init · version · count · total DEVICE · info              info: free total
 *     device N                primary context of device N, current
 *     context N · uncontext   an explicit context on device N, current; destroy it
 *     release N · reset N     of the primary context
 *     alloc SIZE · managed SIZE · pitch WIDTH HEIGHT · async SIZE · pool SIZE · vmm SIZE · array W H D · mip W H LEVELS
 *     free NUMBER             by the way that fits how it was made
 *     fill SIZE MAX           allocations of SIZE until one fails, at most MAX: how many, and the last code
 *     threshold SIZE · trim   of the default pool of the current device
 *     image BYTES · unimage   load a module that takes so much, unload it
 *     launch KERNEL GRID COUNT [plain|ex|cooperative|graph] · sync
 *     work KERNEL GRID MS [KIND] [AHEAD]    launches for MS milliseconds, never more than AHEAD (default 16) unfinished:
 *                             launches, elapsed ns, longest wait in one launch call ns
 *     nvml                    total used free by v1, total used free by v2, of the current device
 *     processes               pid:bytes of each process that NVML shows for it
 *     spawn · reap            fork a child that tries cuInit and cuMemAlloc and waits; its code; kill -9 it
 *     write NUMBER SEED       fill what was made by copies, with bytes that follow from the seed
 *     check NUMBER SEED       how many of its bytes, copied back, are others
 *     share NUMBER            a handle of it for other processes
 *     lock PID MS · checkpoint PID · restore PID · unlock PID · state PID · restorer PID    of another process
 *     held                    calls that found this process locked or checkpointed (fake driver only)
 *     pid · quit
 */
#include "calls.h"
#include "nvml_view.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 8, MADE_MAX = 300000, EVENTS = 64, SIZE_MAX_WORD = 32 };

enum kind { NOTHING, LINEAR, ASYNC, VMM, ARRAY, MIPMAP };

struct made {
    enum kind kind;
    CUdeviceptr pointer;
    CUmemHandle handle;
    size_t bytes;
    CUarray array;
};

static struct made made[MADE_MAX];
static int made_count;
static int device;
static CUcontext explicit_context;
static CUmodule image;
static CUmodule kernels;
static CUmemoryPool own_pool;
static pid_t child;
static int child_tells = -1;

static size_t size_of(const char *text)
{
    char *unit = NULL;
    size_t number = strtoull(text, &unit, 10);
    switch (*unit) {
    case 'K':
        return number << 10U;
    case 'M':
        return number << 20U;
    case 'G':
        return number << 30U;
    default:
        return number;
    }
}

static uint64_t now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec;
}

static void answer(CUresult result)
{
    if (result == CUDA_SUCCESS) {
        (void)printf("ok\n");
    } else {
        (void)printf("error %d\n", result);
    }
}

static void answer_made(CUresult result, struct made fresh)
{
    if (result == CUDA_SUCCESS && made_count < MADE_MAX) {
        made[made_count] = fresh;
        (void)printf("ok %d\n", made_count++);
    } else {
        answer(result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result);
    }
}

static CUresult use_device(int number)
{
    CUcontext context = NULL;
    CUresult result = cu.cuDevicePrimaryCtxRetain(&context, number);
    if (result == CUDA_SUCCESS) {
        result = cu.cuCtxSetCurrent(context);
        device = number;
    }
    return result;
}

static CUresult make_vmm(struct made *out, size_t bytes)
{
    CUmemAllocationProp properties = {.type = 1, .location = {CU_MEM_LOCATION_DEVICE, device}};
    CUresult result = cu.cuMemCreate(&out->handle, bytes, &properties, 0);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    out->kind = VMM;
    out->bytes = bytes;
    result = cu.cuMemAddressReserve(&out->pointer, bytes, 0, 0, 0);
    if (result == CUDA_SUCCESS) {
        result = cu.cuMemMap(out->pointer, bytes, 0, out->handle, 0);
    }
    /* As allocators do: the mapping keeps the memory from here on. */
    CUresult released = cu.cuMemRelease(out->handle);
    return result == CUDA_SUCCESS ? released : result;
}

static CUresult from_own_pool(struct made *out, size_t bytes)
{
    if (own_pool == NULL) {
        CUmemPoolProps properties = {.type = 1, .location = {CU_MEM_LOCATION_DEVICE, device}};
        CUresult result = cu.cuMemPoolCreate(&own_pool, &properties);
        if (result != CUDA_SUCCESS) {
            return result;
        }
    }
    return cu.cuMemAllocFromPoolAsync(&out->pointer, bytes, own_pool, NULL);
}

static CUresult unmake(struct made *thing)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    switch (thing->kind) {
    case LINEAR:
        result = cu.cuMemFree_v2(thing->pointer);
        break;
    case ASYNC:
        result = cu.cuMemFreeAsync(thing->pointer, NULL);
        break;
    case VMM:
        result = cu.cuMemUnmap(thing->pointer, thing->bytes);
        if (result == CUDA_SUCCESS) {
            result = cu.cuMemAddressFree(thing->pointer, thing->bytes);
        }
        break;
    case ARRAY:
        result = cu.cuArrayDestroy(thing->array);
        break;
    case MIPMAP:
        result = cu.cuMipmappedArrayDestroy(thing->array);
        break;
    case NOTHING:
        break;
    }
    thing->kind = NOTHING;
    return result;
}

static CUresult function_of(const char *name, CUfunction *out)
{
    CUresult result = kernels != NULL ? CUDA_SUCCESS : cu.cuModuleLoadData(&kernels, "fake-bytes: 0");
    return result != CUDA_SUCCESS ? result : cu.cuModuleGetFunction(out, kernels, name);
}

struct launching {
    CUfunction function;
    unsigned int grid;
    char kind; /* first letter of its word */
    CUgraphExec exec;
    CUgraph graph;
    CUstream stream;
};

static CUresult launch_once(const struct launching *what)
{
    CUlaunchConfig config = {.grid = {what->grid, 1, 1}, .block = {128, 1, 1}, .stream = what->stream};
    switch (what->kind) {
    case 'e':
        return cu.cuLaunchKernelEx(&config, what->function, NULL, NULL);
    case 'c':
        return cu.cuLaunchCooperativeKernel(what->function, what->grid, 1, 1, 128, 1, 1, 0, what->stream, NULL);
    case 'g':
        return cu.cuGraphLaunch(what->exec, what->stream);
    default:
        return cu.cuLaunchKernel(what->function, what->grid, 1, 1, 128, 1, 1, 0, what->stream, NULL, NULL);
    }
}

static CUresult prepare(struct launching *what, const char *kernel, const char *grid, const char *kind)
{
    CUresult result = function_of(kernel, &what->function);
    what->grid = (unsigned int)strtoul(grid, NULL, 10);
    what->kind = kind == NULL ? 'p' : kind[0];
    if (result == CUDA_SUCCESS) {
        result = cu.cuStreamCreate(&what->stream, 1);
    }
    if (result != CUDA_SUCCESS || what->kind != 'g') {
        return result;
    }
    result = cu.cuStreamBeginCapture_v2(what->stream, 0);
    if (result == CUDA_SUCCESS) {
        result = cu.cuLaunchKernel(what->function, what->grid, 1, 1, 128, 1, 1, 0, what->stream, NULL, NULL);
    }
    if (result == CUDA_SUCCESS) {
        result = cu.cuStreamEndCapture(what->stream, &what->graph);
    }
    return result == CUDA_SUCCESS ? cu.cuGraphInstantiateWithFlags(&what->exec, what->graph, 0) : result;
}

static void finish(const struct launching *what)
{
    if (what->exec != NULL) {
        (void)cu.cuGraphExecDestroy(what->exec);
        (void)cu.cuGraphDestroy(what->graph);
    }
    if (what->stream != NULL) {
        (void)cu.cuStreamDestroy_v2(what->stream);
    }
}

static void launch(char **words)
{
    struct launching what = {0};
    CUresult result = prepare(&what, words[1], words[2], words[4]);
    for (long i = 0, count = strtol(words[3], NULL, 10); i < count && result == CUDA_SUCCESS; i++) {
        result = launch_once(&what);
    }
    if (result == CUDA_SUCCESS) {
        result = cu.cuStreamSynchronize(what.stream);
    }
    finish(&what);
    answer(result);
}

static void work(char **words)
{
    struct launching what = {0};
    CUevent events[EVENTS] = {NULL};
    unsigned long ahead = words[4] != NULL && words[5] != NULL ? strtoul(words[5], NULL, 10) : 16;
    uint64_t launches = 0;
    uint64_t longest = 0;
    CUresult result = prepare(&what, words[1], words[2], words[4]);
    ahead = ahead < 1 ? 1 : ahead > EVENTS ? EVENTS : ahead;
    for (unsigned long i = 0; i < ahead && result == CUDA_SUCCESS; i++) {
        result = cu.cuEventCreate(&events[i], 0);
    }
    uint64_t begin = now_ns();
    uint64_t end = begin + strtoull(words[3], NULL, 10) * 1000000ULL;
    while (result == CUDA_SUCCESS && now_ns() < end) {
        CUevent event = events[launches % ahead];
        result = launches >= ahead ? cu.cuEventSynchronize(event) : CUDA_SUCCESS;
        uint64_t before = now_ns();
        if (result == CUDA_SUCCESS) {
            result = launch_once(&what);
        }
        uint64_t took = now_ns() - before;
        longest = took > longest ? took : longest;
        if (result == CUDA_SUCCESS) {
            result = cu.cuEventRecord(event, what.stream);
        }
        launches++;
    }
    if (result == CUDA_SUCCESS) {
        result = cu.cuStreamSynchronize(what.stream);
    }
    uint64_t elapsed = now_ns() - begin;
    finish(&what);
    if (result == CUDA_SUCCESS) {
        (void)printf("ok %llu %llu %llu\n", (unsigned long long)launches, (unsigned long long)elapsed,
                     (unsigned long long)longest);
    } else {
        answer(result);
    }
}

/* ---- NVML ---- */

static void show_nvml(void)
{
    struct view_memory view;
    int code = view_memory(device, &view);
    if (code == 0) {
        (void)printf("ok %llu %llu %llu %llu %llu %llu\n", view.total, view.used, view.free, view.total_2, view.used_2,
                     view.free_2);
    } else {
        answer(code);
    }
}

static void show_processes(void)
{
    static struct view_process list[4096];
    unsigned int count = sizeof list / sizeof list[0];
    int code = view_processes(device, list, &count);
    if (code != 0) {
        answer(code);
        return;
    }
    (void)printf("ok");
    for (unsigned int i = 0; i < count; i++) {
        (void)printf(" %u:%llu", list[i].pid, list[i].bytes);
    }
    (void)printf("\n");
}

/* ---- contents ---- */

enum { PIECE = 64 * 1024 };

static unsigned char byte_of(size_t at, unsigned long seed)
{
    uint64_t mixed = (at + seed + 1) * UINT64_C(0x9E3779B97F4A7C15);
    return (unsigned char)(mixed >> 56U);
}

static void fill_contents(const struct made *thing, unsigned long seed)
{
    static unsigned char piece[PIECE];
    CUresult result = CUDA_SUCCESS;
    for (size_t at = 0; at < thing->bytes && result == CUDA_SUCCESS; at += PIECE) {
        size_t length = thing->bytes - at < PIECE ? thing->bytes - at : PIECE;
        for (size_t i = 0; i < length; i++) {
            piece[i] = byte_of(at + i, seed);
        }
        result = cu.cuMemcpyHtoD_v2(thing->pointer + at, piece, length);
    }
    answer(result);
}

static void check_contents(const struct made *thing, unsigned long seed)
{
    static unsigned char piece[PIECE];
    CUresult result = CUDA_SUCCESS;
    size_t wrong = 0;
    for (size_t at = 0; at < thing->bytes && result == CUDA_SUCCESS; at += PIECE) {
        size_t length = thing->bytes - at < PIECE ? thing->bytes - at : PIECE;
        result = cu.cuMemcpyDtoH_v2(piece, thing->pointer + at, length);
        for (size_t i = 0; i < length && result == CUDA_SUCCESS; i++) {
            wrong += piece[i] != byte_of(at + i, seed);
        }
    }
    if (result == CUDA_SUCCESS) {
        (void)printf("ok %zu\n", wrong);
    } else {
        answer(result);
    }
}

/* ---- checkpoints of other processes: functions that older drivers lack, found when they are asked for ---- */

static bool checkpoint(char **words)
{
    static const struct {
        const char *word;
        const char *symbol;
        enum { NONE, TIMEOUT, VALUE } argument;
    } calls[] = {
        {"lock", "cuCheckpointProcessLock", TIMEOUT},    {"checkpoint", "cuCheckpointProcessCheckpoint", NONE},
        {"restore", "cuCheckpointProcessRestore", NONE}, {"unlock", "cuCheckpointProcessUnlock", NONE},
        {"state", "cuCheckpointProcessGetState", VALUE}, {"restorer", "cuCheckpointProcessGetRestoreThreadId", VALUE},
    };
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        if (strcmp(words[0], calls[i].word) != 0) {
            continue;
        }
        CUresult (*call)(int pid, void *argument) = NULL;
        void *found = dlsym(RTLD_DEFAULT, calls[i].symbol);
        memcpy(&call, &found, sizeof found);
        CUcheckpointLockArgs timeout = {.timeout_ms = words[2] == NULL ? 0 : (unsigned int)strtoul(words[2], NULL, 10)};
        int value = 0;
        void *argument = calls[i].argument == TIMEOUT ? (void *)&timeout : (void *)&value;
        CUresult result = call == NULL
                              ? CUDA_ERROR_NOT_SUPPORTED
                              : call((int)strtol(words[1], NULL, 10), calls[i].argument == NONE ? NULL : argument);
        if (result == CUDA_SUCCESS && calls[i].argument == VALUE) {
            (void)printf("ok %d\n", value);
        } else {
            answer(result);
        }
        return true;
    }
    return false;
}

static void show_held(void)
{
    uint64_t (*held)(const char *name) = NULL;
    void *found = dlsym(RTLD_DEFAULT, "fake_cuda_held");
    memcpy(&held, &found, sizeof found);
    (void)printf("ok %llu\n", held == NULL ? 0ULL : (unsigned long long)held(NULL));
}

/* ---- children ---- */

static void spawn(void)
{
    int ends[2];
    CUresult code = CUDA_ERROR_OPERATING_SYSTEM;
    if (pipe(ends) != 0) {
        answer(code);
        return;
    }
    (void)fflush(stdout);
    child = fork();
    if (child == 0) {
        CUdeviceptr pointer = 0;
        code = cu.cuInit(0);
        if (code == CUDA_SUCCESS) {
            code = use_device(0);
        }
        if (code == CUDA_SUCCESS) {
            code = cu.cuMemAlloc_v2(&pointer, 1U << 20U);
        }
        (void)!write(ends[1], &code, sizeof code);
        (void)pause();
        _exit(0);
    }
    (void)close(ends[1]);
    child_tells = ends[0];
    if (read(child_tells, &code, sizeof code) != (ssize_t)sizeof code) {
        code = CUDA_ERROR_UNKNOWN;
    }
    if (code == CUDA_SUCCESS) {
        (void)printf("ok %d\n", (int)child);
    } else {
        answer(code);
    }
}

static void reap(void)
{
    if (child > 0) {
        (void)kill(child, SIGKILL);
        (void)waitpid(child, NULL, 0);
        (void)close(child_tells);
        child = 0;
    }
    (void)printf("ok\n");
}

/* ---- commands ---- */

static void fill(size_t bytes, long most)
{
    long count = 0;
    CUresult result = CUDA_SUCCESS;
    while (count < most && result == CUDA_SUCCESS && made_count < MADE_MAX) {
        struct made fresh = {.kind = LINEAR};
        result = cu.cuMemAlloc_v2(&fresh.pointer, bytes);
        if (result == CUDA_SUCCESS) {
            made[made_count++] = fresh;
            count++;
        }
    }
    (void)printf("ok %ld %d\n", count, result);
}

static void allocate(char **words)
{
    size_t bytes = size_of(words[1]);
    struct made fresh = {.kind = LINEAR, .bytes = bytes};
    size_t pitch = 0;
    CUarray3dDescriptor shape = {.format = 0x20, .channels = 1};
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (strcmp(words[0], "alloc") == 0) {
        result = cu.cuMemAlloc_v2(&fresh.pointer, bytes);
    } else if (strcmp(words[0], "managed") == 0) {
        result = cu.cuMemAllocManaged(&fresh.pointer, bytes, 1);
    } else if (strcmp(words[0], "pitch") == 0 && words[2] != NULL) {
        result = cu.cuMemAllocPitch_v2(&fresh.pointer, &pitch, bytes, size_of(words[2]), 4);
    } else if (strcmp(words[0], "async") == 0) {
        fresh.kind = ASYNC;
        result = cu.cuMemAllocAsync(&fresh.pointer, bytes, NULL);
    } else if (strcmp(words[0], "pool") == 0) {
        fresh.kind = ASYNC;
        result = from_own_pool(&fresh, bytes);
    } else if (strcmp(words[0], "vmm") == 0) {
        result = make_vmm(&fresh, bytes);
    } else if (words[2] != NULL && words[3] != NULL) {
        bool is_mipmap = strcmp(words[0], "mip") == 0;
        shape.width = bytes;
        shape.height = size_of(words[2]);
        shape.depth = is_mipmap ? 0 : size_of(words[3]);
        fresh.kind = is_mipmap ? MIPMAP : ARRAY;
        result = is_mipmap ? cu.cuMipmappedArrayCreate(&fresh.array, &shape, (unsigned int)size_of(words[3]))
                           : cu.cuArray3DCreate_v2(&fresh.array, &shape);
    }
    answer_made(result, fresh);
}

static void set_threshold(uint64_t bytes)
{
    CUmemoryPool pool = NULL;
    CUresult result = cu.cuDeviceGetDefaultMemPool(&pool, device);
    answer(result != CUDA_SUCCESS ? result : cu.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes));
}

static void trim(void)
{
    CUmemoryPool pool = NULL;
    CUresult result = cu.cuDeviceGetDefaultMemPool(&pool, device);
    answer(result != CUDA_SUCCESS ? result : cu.cuMemPoolTrimTo(pool, 0));
}

static void load_image(size_t bytes)
{
    char text[64];
    (void)snprintf(text, sizeof text, "fake-bytes: %zu", bytes);
    answer(cu.cuModuleLoadData(&image, text));
}

static void show_size(CUresult result, size_t value)
{
    if (result == CUDA_SUCCESS) {
        (void)printf("ok %zu\n", value);
    } else {
        answer(result);
    }
}

static void run_plain(const char *command)
{
    int number = 0;
    size_t free_bytes = 0;
    size_t total = 0;
    if (strcmp(command, "init") == 0) {
        answer(cu.cuInit(0));
    } else if (strcmp(command, "version") == 0) {
        CUresult result = cu.cuDriverGetVersion(&number);
        show_size(result, (size_t)number);
    } else if (strcmp(command, "count") == 0) {
        CUresult result = cu.cuDeviceGetCount(&number);
        show_size(result, (size_t)number);
    } else if (strcmp(command, "info") == 0) {
        CUresult result = cu.cuMemGetInfo_v2(&free_bytes, &total);
        if (result == CUDA_SUCCESS) {
            (void)printf("ok %zu %zu\n", free_bytes, total);
        } else {
            answer(result);
        }
    } else if (strcmp(command, "uncontext") == 0) {
        answer(cu.cuCtxDestroy_v2(explicit_context));
    } else if (strcmp(command, "trim") == 0) {
        trim();
    } else if (strcmp(command, "unimage") == 0) {
        answer(cu.cuModuleUnload(image));
    } else if (strcmp(command, "sync") == 0) {
        answer(cu.cuCtxSynchronize());
    } else if (strcmp(command, "nvml") == 0) {
        show_nvml();
    } else if (strcmp(command, "processes") == 0) {
        show_processes();
    } else if (strcmp(command, "spawn") == 0) {
        spawn();
    } else if (strcmp(command, "reap") == 0) {
        reap();
    } else if (strcmp(command, "held") == 0) {
        show_held();
    } else if (strcmp(command, "pid") == 0) {
        (void)printf("ok %d\n", (int)getpid());
    } else {
        (void)printf("what\n");
    }
}

static void run_numbered(char **words)
{
    int number = (int)strtol(words[1], NULL, 10);
    bool is_made = number >= 0 && number < made_count;
    size_t total = 0;
    if (checkpoint(words)) {
        return;
    }
    if (strcmp(words[0], "total") == 0) {
        CUresult result = cu.cuDeviceTotalMem_v2(&total, number);
        show_size(result, total);
    } else if (strcmp(words[0], "device") == 0) {
        answer(use_device(number));
    } else if (strcmp(words[0], "context") == 0) {
        CUresult result = cu.cuCtxCreate_v2(&explicit_context, 0, number);
        device = result == CUDA_SUCCESS ? number : device;
        answer(result);
    } else if (strcmp(words[0], "release") == 0) {
        answer(cu.cuDevicePrimaryCtxRelease_v2(number));
    } else if (strcmp(words[0], "reset") == 0) {
        answer(cu.cuDevicePrimaryCtxReset_v2(number));
    } else if (strcmp(words[0], "free") == 0) {
        answer(is_made ? unmake(&made[number]) : CUDA_ERROR_INVALID_VALUE);
    } else if (is_made && strcmp(words[0], "write") == 0 && words[2] != NULL) {
        fill_contents(&made[number], strtoul(words[2], NULL, 10));
    } else if (is_made && strcmp(words[0], "check") == 0 && words[2] != NULL) {
        check_contents(&made[number], strtoul(words[2], NULL, 10));
    } else if (is_made && strcmp(words[0], "share") == 0) {
        CUipcHandle handle;
        answer(cu.cuIpcGetMemHandle(&handle, made[number].pointer));
    } else if (strcmp(words[0], "threshold") == 0) {
        set_threshold(size_of(words[1]));
    } else if (strcmp(words[0], "image") == 0) {
        load_image(size_of(words[1]));
    } else if (strcmp(words[0], "fill") == 0 && words[2] != NULL) {
        fill(size_of(words[1]), strtol(words[2], NULL, 10));
    } else if (strcmp(words[0], "launch") == 0 && words[2] != NULL && words[3] != NULL) {
        launch(words);
    } else if (strcmp(words[0], "work") == 0 && words[2] != NULL && words[3] != NULL) {
        work(words);
    } else {
        allocate(words);
    }
}

int main(int count, char **arguments)
{
    char line[256];
    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    if (!calls_resolve(count > 1 ? arguments[1] : "link")) {
        return 2;
    }
    while (fgets(line, sizeof line, stdin) != NULL) {
        char *words[WORDS + 1] = {NULL};
        char *rest = NULL;
        int found = 0;
        for (char *word = strtok_r(line, " \n", &rest); word != NULL && found < WORDS;
             word = strtok_r(NULL, " \n", &rest)) {
            words[found++] = word;
        }
        if (found == 0) {
            continue;
        }
        if (strcmp(words[0], "quit") == 0) {
            break;
        }
        if (found == 1) {
            run_plain(words[0]);
        } else {
            run_numbered(words);
        }
    }
    reap();
    return 0;
}
