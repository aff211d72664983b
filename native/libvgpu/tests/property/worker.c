/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One process of a storm: chooses operations at random, remembers what it made, checks every view it is given.
 *
 * A refusal is no failure; an impossible answer is: a code that is neither success nor out of memory, or a view of
 * memory with more free than total, or more total than the limit.
 */
#include "storm.h"

#include <elf.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { THINGS = 48, LIFE_MIN = 400, LIFE_SPREAD = 3000 };

#define MIB (UINT64_C(1) << 20U)
#define GRANULARITY (2 * MIB)

enum kind { NOTHING, LINEAR, ASYNC, POOLED, VMM, ARRAY, MIPMAP, MODULE, GRAPH };

struct thing {
    enum kind kind;
    int device;
    bool in_explicit; /* made in the explicit context, ends with it */
    CUdeviceptr pointer;
    CUmemHandle handle;
    uint64_t bytes;
    CUarray array;
    CUmodule module;
    CUgraph graph;
    CUgraphExec exec;
};

static struct storm_shared *shared;
static unsigned int self;
static uint64_t state;
static int device_count;
static int device;  /* of the current context */
static bool adrift; /* there is none, and no room for one: then its life ends */
static CUcontext primaries[STORM_DEVICES];
static CUcontext explicit_context;
static int explicit_device;
static CUmemoryPool pools[STORM_DEVICES];
static struct thing things[THINGS];

uint64_t storm_now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

void storm_fail(struct storm_shared *where, const char *format, ...)
{
    uint32_t none = 0;
    va_list arguments;
    va_start(arguments, format);
    if (__atomic_compare_exchange_n(&where->failed, &none, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        (void)vsnprintf(where->problem, sizeof where->problem, format, arguments);
        __atomic_store_n(&where->failed, 2, __ATOMIC_SEQ_CST);
    }
    va_end(arguments);
}

static uint64_t next(void)
{
    state += UINT64_C(0x9E3779B97F4A7C15);
    uint64_t mixed = state;
    mixed = (mixed ^ (mixed >> 30U)) * UINT64_C(0xBF58476D1CE4E5B9);
    mixed = (mixed ^ (mixed >> 27U)) * UINT64_C(0x94D049BB133111EB);
    return mixed ^ (mixed >> 31U);
}

static uint64_t below(uint64_t most)
{
    return next() % most;
}

static void expect(const char *what, CUresult result)
{
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY) {
        storm_fail(shared, "worker %u: %s answered %d", self, what, result);
    }
}

static void must(const char *what, CUresult result)
{
    if (result != CUDA_SUCCESS) {
        storm_fail(shared, "worker %u: %s answered %d", self, what, result);
    }
}

/* For finding what breaks the law: environment STORM_SKIP names operations to leave out. */
static bool is_skipped(const char *what)
{
    const char *skip = getenv("STORM_SKIP");
    return skip != NULL && strstr(skip, what) != NULL;
}

static void doing(const char *what, uint64_t bytes)
{
    shared->workers[self].bytes = bytes;
    __atomic_store_n(&shared->workers[self].doing, what, __ATOMIC_RELEASE);
}

/* Mostly small, sometimes a good part of the limit, rarely more than all of it. */
static uint64_t some_bytes(void)
{
    uint64_t limit = __atomic_load_n(&shared->limit, __ATOMIC_RELAXED);
    switch (below(16)) {
    case 0:
        return 1 + below(limit / 2);
    case 1:
        return 1 + below(limit + limit / 8);
    case 2:
    case 3:
        return 1 + below(64 * MIB);
    default:
        return 1 + below(below(2) != 0 ? 4096 : MIB);
    }
}

static bool is_in_explicit(void)
{
    return explicit_context != NULL && explicit_device == device;
}

/* False: there is no room for a context there; the current one stays. */
static bool go_to(int number)
{
    CUcontext context = explicit_context != NULL && explicit_device == number ? explicit_context : primaries[number];
    if (context == NULL) {
        CUresult result = cu.cuDevicePrimaryCtxRetain(&context, number);
        expect("cuDevicePrimaryCtxRetain", result);
        if (result != CUDA_SUCCESS) {
            return false;
        }
        primaries[number] = context;
    }
    must("cuCtxSetCurrent", cu.cuCtxSetCurrent(context));
    device = number;
    return true;
}

/* After the current context has ended. */
static void go_anywhere(int first)
{
    adrift = true;
    for (int i = 0; i < device_count && adrift; i++) {
        adrift = !go_to((first + i) % device_count);
    }
}

static struct thing *free_place(void)
{
    size_t begin = below(THINGS);
    for (size_t i = 0; i < THINGS; i++) {
        struct thing *at = &things[(begin + i) % THINGS];
        if (at->kind == NOTHING) {
            return at;
        }
    }
    return NULL;
}

/* ---- making ---- */

static CUresult make_vmm(struct thing *out)
{
    CUmemAllocationProp properties = {.type = 1, .location = {CU_MEM_LOCATION_DEVICE, device}};
    out->bytes = (1 + below(16)) * GRANULARITY;
    CUresult result = cu.cuMemCreate(&out->handle, out->bytes, &properties, 0);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    must("cuMemAddressReserve", cu.cuMemAddressReserve(&out->pointer, out->bytes, 0, 0, 0));
    must("cuMemMap", cu.cuMemMap(out->pointer, out->bytes, 0, out->handle, 0));
    if (below(2) != 0) { /* the mapping alone keeps it */
        must("cuMemRelease", cu.cuMemRelease(out->handle));
        out->handle = 0;
    }
    return CUDA_SUCCESS;
}

/* An image of code as compilers make it: an ELF file of this length, of which only the header is ever read. */
static void make_image(Elf64_Ehdr *image, uint64_t bytes)
{
    *image = (Elf64_Ehdr){.e_ident = {ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, ELFCLASS64, ELFDATA2LSB, EV_CURRENT},
                          .e_version = EV_CURRENT,
                          .e_ehsize = sizeof *image,
                          .e_shoff = bytes};
}

static CUresult make_pooled(struct thing *out)
{
    if (pools[device] == NULL) {
        CUmemPoolProps properties = {.type = 1, .location = {CU_MEM_LOCATION_DEVICE, device}};
        uint64_t threshold = below(3) * 8 * MIB;
        must("cuMemPoolCreate", cu.cuMemPoolCreate(&pools[device], &properties));
        must("cuMemPoolSetAttribute",
             cu.cuMemPoolSetAttribute(pools[device], CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    }
    return cu.cuMemAllocFromPoolAsync(&out->pointer, out->bytes, pools[device], NULL);
}

static CUresult make_graph(struct thing *out)
{
    CUmemAllocNodeParams params = {.properties = {.type = 1, .location = {CU_MEM_LOCATION_DEVICE, device}},
                                   .bytes = 1 + below(32 * MIB)};
    CUgraphNode allocation = NULL;
    CUgraphNode release = NULL;
    must("cuGraphCreate", cu.cuGraphCreate(&out->graph, 0));
    must("cuGraphAddMemAllocNode", cu.cuGraphAddMemAllocNode(&allocation, out->graph, NULL, 0, &params));
    must("cuGraphAddMemFreeNode", cu.cuGraphAddMemFreeNode(&release, out->graph, &allocation, 1, params.pointer));
    CUresult result = cu.cuGraphInstantiateWithFlags(&out->exec, out->graph, 0);
    expect("cuGraphInstantiateWithFlags", result);
    if (result == CUDA_SUCCESS) {
        result = cu.cuGraphLaunch(out->exec, NULL);
    }
    if (result != CUDA_SUCCESS) {
        if (out->exec != NULL) {
            must("cuGraphExecDestroy", cu.cuGraphExecDestroy(out->exec));
        }
        must("cuGraphDestroy", cu.cuGraphDestroy(out->graph));
    }
    return result;
}

static CUresult make_array(struct thing *out)
{
    CUarray3dDescriptor shape = {.width = 1 + below(2048), .height = 1 + below(2048), .format = 0x20, .channels = 1};
    if (out->kind == MIPMAP) {
        return cu.cuMipmappedArrayCreate(&out->array, &shape, 1 + (unsigned int)below(4));
    }
    shape.depth = below(3);
    return cu.cuArray3DCreate_v2(&out->array, &shape);
}

static void make(void)
{
    struct thing *place = free_place();
    size_t pitch = 0;
    Elf64_Ehdr image;
    if (place == NULL) {
        return;
    }
    struct thing fresh = {.kind = LINEAR, .device = device, .in_explicit = is_in_explicit(), .bytes = some_bytes()};
    CUresult result = CUDA_SUCCESS;
    static const char *const names[20] = {"managed", "managed", "pitch",  "pitch",  "async",  "async", "async",
                                          "pool",    "vmm",     "array",  "mipmap", "module", "graph", "linear",
                                          "linear",  "linear",  "linear", "linear", "linear", "linear"};
    uint64_t choice = below(20);
    if (is_skipped(names[choice])) {
        return;
    }
    doing(names[choice], fresh.bytes);
    switch (choice) {
    case 0:
    case 1:
        result = cu.cuMemAllocManaged(&fresh.pointer, fresh.bytes, 1);
        break;
    case 2:
    case 3:
        result = cu.cuMemAllocPitch_v2(&fresh.pointer, &pitch, 1 + below(70000), 1 + below(1000), 4);
        break;
    case 4:
    case 5:
    case 6:
        fresh.kind = ASYNC;
        result = cu.cuMemAllocAsync(&fresh.pointer, fresh.bytes, NULL);
        break;
    case 7:
        fresh.kind = POOLED;
        result = make_pooled(&fresh);
        break;
    case 8:
        fresh.kind = VMM;
        result = make_vmm(&fresh);
        break;
    case 9:
        fresh.kind = ARRAY;
        result = make_array(&fresh);
        break;
    case 10:
        fresh.kind = MIPMAP;
        result = make_array(&fresh);
        break;
    case 11:
        fresh.kind = MODULE;
        make_image(&image, below(MIB / 2));
        result = cu.cuModuleLoadData(&fresh.module, &image);
        break;
    case 12:
        fresh.kind = GRAPH;
        result = make_graph(&fresh);
        break;
    default:
        result = cu.cuMemAlloc_v2(&fresh.pointer, fresh.bytes);
        break;
    }
    expect(names[choice], result);
    if (result == CUDA_SUCCESS) {
        *place = fresh;
    }
}

/* ---- unmaking ---- */

static void unmake(struct thing *thing)
{
    if (thing->device != device && !go_to(thing->device)) {
        return; /* no room for a context from which to free it */
    }
    switch (thing->kind) {
    case LINEAR:
        must("cuMemFree", cu.cuMemFree_v2(thing->pointer));
        break;
    case ASYNC:
    case POOLED:
        must("cuMemFreeAsync",
             below(4) == 0 ? cu.cuMemFree_v2(thing->pointer) : cu.cuMemFreeAsync(thing->pointer, NULL));
        break;
    case VMM:
        must("cuMemUnmap", cu.cuMemUnmap(thing->pointer, thing->bytes));
        must("cuMemAddressFree", cu.cuMemAddressFree(thing->pointer, thing->bytes));
        if (thing->handle != 0) {
            must("cuMemRelease", cu.cuMemRelease(thing->handle));
        }
        break;
    case ARRAY:
        must("cuArrayDestroy", cu.cuArrayDestroy(thing->array));
        break;
    case MIPMAP:
        must("cuMipmappedArrayDestroy", cu.cuMipmappedArrayDestroy(thing->array));
        break;
    case MODULE:
        must("cuModuleUnload", cu.cuModuleUnload(thing->module));
        break;
    case GRAPH:
        must("cuGraphExecDestroy", cu.cuGraphExecDestroy(thing->exec));
        must("cuGraphDestroy", cu.cuGraphDestroy(thing->graph));
        must("cuDeviceGraphMemTrim", cu.cuDeviceGraphMemTrim(thing->device));
        break;
    case NOTHING:
        break;
    }
    thing->kind = NOTHING;
}

static void unmake_one(void)
{
    doing("free", 0);
    struct thing *thing = &things[below(THINGS)];
    if (thing->kind != NOTHING) {
        unmake(thing);
    }
}

/* Returns true for objects that end with their context. */
static bool dies_with_context(const struct thing *thing)
{
    return thing->kind == LINEAR || thing->kind == ARRAY || thing->kind == MIPMAP || thing->kind == MODULE;
}

static void forget_context(int number, bool is_explicit)
{
    for (size_t i = 0; i < THINGS; i++) {
        if (things[i].device == number && things[i].in_explicit == is_explicit && dies_with_context(&things[i])) {
            things[i].kind = NOTHING;
        }
        bool is_pooled = things[i].kind == ASYNC || things[i].kind == POOLED;
        if (things[i].device == number && !is_explicit && is_pooled) {
            things[i].kind = NOTHING; /* pools end with the primary context */
        }
    }
    if (!is_explicit) {
        pools[number] = NULL;
    }
}

static void toggle_context(void)
{
    doing("context", 0);
    if (explicit_context == NULL) {
        int number = (int)below((uint64_t)device_count);
        CUresult result = cu.cuCtxCreate_v2(&explicit_context, 0, number);
        expect("cuCtxCreate", result);
        if (result == CUDA_SUCCESS) {
            explicit_device = number;
            device = number;
        } else {
            explicit_context = NULL;
        }
        return;
    }
    must("cuCtxDestroy", cu.cuCtxDestroy_v2(explicit_context));
    forget_context(explicit_device, true);
    explicit_context = NULL;
    go_anywhere(device);
}

/* As a program does that ends in order: pools first, then what they belong to. */
static void end_device(int number)
{
    int before = device;
    if (!go_to(number)) {
        return;
    }
    for (size_t i = 0; i < THINGS; i++) {
        if (things[i].device == number && (things[i].kind == ASYNC || things[i].kind == POOLED)) {
            unmake(&things[i]);
        }
    }
    must("cuCtxSynchronize", cu.cuCtxSynchronize());
    if (pools[number] != NULL) {
        must("cuMemPoolDestroy", cu.cuMemPoolDestroy(pools[number]));
        pools[number] = NULL;
    }
    must("cuDeviceGraphMemTrim", cu.cuDeviceGraphMemTrim(number));
    (void)go_to(before); /* has a context, or this one stays */
}

static void reset_device(void)
{
    doing("reset", 0);
    int number = (int)below((uint64_t)device_count);
    if (primaries[number] == NULL) {
        return;
    }
    end_device(number);
    must("cuDevicePrimaryCtxReset", cu.cuDevicePrimaryCtxReset_v2(number));
    forget_context(number, false);
    primaries[number] = NULL;
    if (device == number && !is_in_explicit()) {
        go_anywhere(number);
    }
}

/* ---- looking, forking, ending ---- */

static void look(void)
{
    doing("look", 0);
    size_t free_bytes = 0;
    size_t total = 0;
    uint64_t most = __atomic_load_n(&shared->total, __ATOMIC_SEQ_CST);
    CUresult result = cu.cuMemGetInfo_v2(&free_bytes, &total);
    if (result != CUDA_SUCCESS || free_bytes > total || total > most * 4) {
        storm_fail(shared, "worker %u: cuMemGetInfo: code %d, free %zu of %zu, expected %llu", self, result, free_bytes,
                   total, (unsigned long long)most);
    }
}

/* The child of a process that has used the driver can do nothing with it, and its end must not touch the parent. */
static void fork_one(void)
{
    doing("fork", 0);
    pid_t child = fork();
    if (child == 0) {
        CUdeviceptr pointer = 0;
        CUresult result = cu.cuMemAlloc_v2(&pointer, 4096);
        if (result == CUDA_SUCCESS) {
            storm_fail(shared, "worker %u: a child allocated without initialising", self);
        }
        if (below(2) != 0) {
            exit(0);
        }
        _exit(0);
    }
    if (child > 0) {
        (void)waitpid(child, NULL, 0);
        shared->workers[self].forks++;
    }
}

static void stand_still(void)
{
    must("cuCtxSynchronize", cu.cuCtxSynchronize());
    __atomic_store_n(&shared->workers[self].state, STORM_PAUSED, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&shared->pause, __ATOMIC_SEQ_CST) != 0) {
        (void)nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
    }
    __atomic_store_n(&shared->workers[self].state, STORM_RUNNING, __ATOMIC_SEQ_CST);
}

static void step(void)
{
    uint64_t choice = below(1000);
    if (choice < 400) {
        make();
    } else if (choice < 850) {
        unmake_one();
    } else if (choice < 940) {
        look();
    } else if (choice < 970) {
        (void)go_to((int)below((uint64_t)device_count));
    } else if (choice < 985) {
        must("cuCtxSynchronize", cu.cuCtxSynchronize());
    } else if (choice < 992) {
        if (!is_skipped("context")) toggle_context();
    } else if (choice < 995) {
        if (!is_skipped("reset")) reset_device();
    } else if (choice < 997) {
        if (!is_skipped("fork")) fork_one();
    } else {
        must("cuDeviceGraphMemTrim", cu.cuDeviceGraphMemTrim(device));
    }
}

void storm_work(struct storm_shared *where, unsigned int worker, uint64_t seed)
{
    shared = where;
    self = worker;
    state = seed;
    must("cuInit", cu.cuInit(0));
    must("cuDeviceGetCount", cu.cuDeviceGetCount(&device_count));
    go_anywhere(0);
    __atomic_store_n(&shared->workers[self].state, STORM_RUNNING, __ATOMIC_SEQ_CST);
    uint64_t life = LIFE_MIN + below(LIFE_SPREAD);
    for (uint64_t i = 0; i < life && !adrift; i++) {
        if (__atomic_load_n(&shared->pause, __ATOMIC_RELAXED) != 0) {
            stand_still();
        }
        if (__atomic_load_n(&shared->failed, __ATOMIC_RELAXED) != 0) {
            break;
        }
        step();
        shared->workers[self].operations++;
    }
    if (below(3) == 0 && !adrift && !is_skipped("exit")) {
        for (size_t i = 0; i < THINGS; i++) {
            unmake(&things[i]);
        }
        for (int number = 0; number < device_count; number++) {
            if (primaries[number] != NULL) {
                end_device(number);
                must("cuDevicePrimaryCtxReset", cu.cuDevicePrimaryCtxReset_v2(number));
            }
        }
        exit(0);
    }
    if (below(2) == 0) {
        _exit(0);
    }
    (void)kill(getpid(), SIGKILL);
}
