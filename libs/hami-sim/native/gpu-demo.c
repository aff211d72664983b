// SPDX-License-Identifier: Apache-2.0
/*
 * Shows what a container may do with its devices: asks for memory until it is refused, then computes as fast as it may.
 *
 *     gpu-demo [--once] [--seconds N] [--progress]
 *
 * Uses the CUDA driver API alone, found as programs find it (dlopen, dlsym), so it runs on a real driver as well as on
 * a fake one. Prints lines `gpu.I.KEY=VALUE` for each device I and then waits for SIGTERM, holding a little memory, unless
 * --once. Keys: uuid, total_mib, free_mib, allocated_mib (what was given before the first refusal), refused (the driver's
 * code for it; 2: out of memory, as a full device says it), launches, device_pct (the part of the device's time that a
 * loop of kernels of 1 ms received). Then `gpu.intercepted` (1 where a limiter is loaded) and, last, `gpu.devices`, how
 * many there were. With --progress also `gpu.step=N MS` ten times a second while it computes: kernels that have ended so
 * far, and CLOCK_MONOTONIC. A line `gpu.error=CALL CODE` says what failed; the exit code is then 1.
 *
 * Locks taken here: none. Called with hooks active: yes, where a limiter is preloaded.
 */
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define CHUNKS_MAX 8192
#define OUT_OF_MEMORY 2
#define KERNEL_NS 1000000u
#define BATCH 4
#define PROGRESS_NS 100000000u

/* Spins for KERNEL_NS on a real device; a fake one knows the duration from the name. */
static const char image[] = ".version 6.0\n"
                            ".target sm_50\n"
                            ".address_size 64\n"
                            ".visible .entry fixed_1ms()\n"
                            "{\n"
                            "  .reg .u64 %begin, %now, %passed;\n"
                            "  .reg .pred %again;\n"
                            "  mov.u64 %begin, %globaltimer;\n"
                            "wait:\n"
                            "  mov.u64 %now, %globaltimer;\n"
                            "  sub.u64 %passed, %now, %begin;\n"
                            "  setp.lt.u64 %again, %passed, 1000000;\n"
                            "  @%again bra wait;\n"
                            "  ret;\n"
                            "}\n";

struct uuid {
    unsigned char bytes[16];
};

static int (*init)(unsigned int);
static int (*device_count)(int *);
static int (*device_get)(int *, int);
static int (*device_uuid)(struct uuid *, int);
static int (*total_memory)(size_t *, int);
static int (*retain_context)(void **, int);
static int (*set_context)(void *);
static int (*memory_info)(size_t *, size_t *);
static int (*allocate)(uint64_t *, size_t);
static int (*release)(uint64_t);
static int (*load_module)(void **, const void *);
static int (*get_function)(void **, void *, const char *);
static int (*launch)(void *, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
                     unsigned int, void *, void **, void **);
static int (*synchronize)(void);

static const struct {
    const char *name;
    void *pointer;
} calls[] = {
    {"cuInit", &init},
    {"cuDeviceGetCount", &device_count},
    {"cuDeviceGet", &device_get},
    {"cuDeviceGetUuid", &device_uuid},
    {"cuDeviceTotalMem_v2", &total_memory},
    {"cuDevicePrimaryCtxRetain", &retain_context},
    {"cuCtxSetCurrent", &set_context},
    {"cuMemGetInfo_v2", &memory_info},
    {"cuMemAlloc_v2", &allocate},
    {"cuMemFree_v2", &release},
    {"cuModuleLoadData", &load_module},
    {"cuModuleGetFunction", &get_function},
    {"cuLaunchKernel", &launch},
    {"cuCtxSynchronize", &synchronize},
};

static uint64_t chunks[CHUNKS_MAX];
static size_t chunk_count;

static void need(int code, const char *call)
{
    if (code != 0) {
        printf("gpu.error=%s %d\n", call, code);
        exit(1);
    }
}

static void find_driver(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    need(driver == NULL, "dlopen libcuda.so.1");
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        void *found = dlsym(driver, calls[i].name);
        need(found == NULL, calls[i].name);
        memcpy(calls[i].pointer, &found, sizeof found);
    }
}

static bool is_intercepted(void)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    bool found = false;
    char line[4096];
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        found = found || strstr(line, "libvgpu") != NULL;
    }
    if (maps != NULL) {
        (void)fclose(maps);
    }
    return found;
}

/* Take memory in pieces of `size` until one is refused; the code of the refusal, 0 when the list is full. */
static int take(size_t size, size_t *taken)
{
    while (chunk_count < CHUNKS_MAX) {
        int code = allocate(&chunks[chunk_count], size);
        if (code != 0) {
            return code;
        }
        chunk_count++;
        *taken += size;
    }
    return 0;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Launch kernels of 1 ms for a while, never many ahead; how many. `passed_ns`: from the first launch to the last end. */
static uint64_t compute(double seconds, bool tells, uint64_t *passed_ns)
{
    void *module = NULL;
    void *function = NULL;
    uint64_t launches = 0;
    need(load_module(&module, image), "cuModuleLoadData");
    need(get_function(&function, module, "fixed_1ms"), "cuModuleGetFunction");
    uint64_t begun = now_ns();
    uint64_t told = begun;
    uint64_t length = (uint64_t)(seconds * 1e9);
    while (now_ns() - begun < length) {
        for (int i = 0; i < BATCH; i++, launches++) {
            need(launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        }
        need(synchronize(), "cuCtxSynchronize");
        uint64_t now = now_ns();
        if (tells && now - told >= PROGRESS_NS) {
            printf("gpu.step=%llu %llu\n", (unsigned long long)launches, (unsigned long long)(now / 1000000u));
            told = now;
        }
    }
    *passed_ns = now_ns() - begun;
    return launches;
}

static void show(int number, double seconds, bool tells)
{
    int device = 0;
    void *context = NULL;
    struct uuid uuid = {{0}};
    size_t total = 0;
    size_t free_bytes = 0;
    size_t ignored = 0;
    size_t taken = 0;
    uint64_t passed_ns = 0;
    need(device_get(&device, number), "cuDeviceGet");
    need(device_uuid(&uuid, device), "cuDeviceGetUuid");
    need(total_memory(&total, device), "cuDeviceTotalMem");
    need(retain_context(&context, device), "cuDevicePrimaryCtxRetain");
    need(set_context(context), "cuCtxSetCurrent");
    need(memory_info(&free_bytes, &ignored), "cuMemGetInfo");
    size_t first = chunk_count;
    int refused = take(64 * MIB, &taken);
    if (refused == OUT_OF_MEMORY) {
        refused = take(MIB, &taken);
    }
    while (chunk_count > first + 1) { /* the first piece is kept, so that something is in use */
        need(release(chunks[--chunk_count]), "cuMemFree");
    }
    uint64_t launches = seconds > 0 ? compute(seconds, tells, &passed_ns) : 0;
    double pct = passed_ns > 0 ? 100.0 * (double)launches * KERNEL_NS / (double)passed_ns : 0.0;
    printf("gpu.%d.uuid=GPU-", number);
    for (size_t i = 0; i < sizeof uuid.bytes; i++) {
        printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid.bytes[i]);
    }
    printf("\ngpu.%d.total_mib=%zu\ngpu.%d.free_mib=%zu\n", number, total / MIB, number, free_bytes / MIB);
    printf("gpu.%d.allocated_mib=%zu\ngpu.%d.refused=%d\n", number, taken / MIB, number, refused);
    printf("gpu.%d.launches=%llu\ngpu.%d.device_pct=%.1f\n", number, (unsigned long long)launches, number, pct);
}

int main(int argc, char **argv)
{
    bool once = false;
    bool tells = false;
    double seconds = 1.0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--once") == 0) {
            once = true;
        } else if (strcmp(argv[i], "--progress") == 0) {
            tells = true;
        } else if (strcmp(argv[i], "--seconds") == 0 && i + 1 < argc) {
            seconds = strtod(argv[++i], NULL);
        } else {
            (void)fprintf(stderr, "usage: gpu-demo [--once] [--seconds N] [--progress]\n");
            return 2;
        }
    }
    sigset_t ends;
    (void)sigemptyset(&ends);
    (void)sigaddset(&ends, SIGTERM);
    (void)sigprocmask(SIG_BLOCK, &ends, NULL);
    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    int count = 0;
    find_driver();
    need(init(0), "cuInit");
    need(device_count(&count), "cuDeviceGetCount");
    for (int number = 0; number < count; number++) {
        show(number, seconds, tells);
    }
    printf("gpu.intercepted=%d\ngpu.devices=%d\n", is_intercepted(), count);
    while (!once && sigwaitinfo(&ends, NULL) < 0 && errno == EINTR) {
    }
    return 0;
}
