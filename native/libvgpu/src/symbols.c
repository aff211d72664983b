/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See symbols.h. The libraries are recognised by their SONAME, in any directory.
 *
 * A function of the driver may have two addresses, the one of its symbol table and the one that cuGetProcAddress returns;
 * both are kept, because neither CUDA nor ELF guarantees that they are equal.
 * Locks taken here: one per library, until it has been found. Called with hooks active: only DRIVER() functions are called.
 */
#include "symbols.h"

#include <dlfcn.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>

#include "object.h"
#include "platform.h"

/* As in <nvml.h>; not part of what the hooks need. */
#define NVML_ERROR_LIBRARY_NOT_FOUND ((nvmlReturn_t)12)

/* Functions that stand in for the driver's until it is found, and for those that it lacks. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define STAND_IN(result, name, parameters, arguments, find, absent, lacking)                                           \
    static result lacking_##name parameters                                                                            \
    {                                                                                                                  \
        return lacking;                                                                                                \
    }                                                                                                                  \
    static result unresolved_##name parameters                                                                         \
    {                                                                                                                  \
        return (find) ? DRIVER(name) arguments : absent;                                                               \
    }
#define CUDA_STAND_IN(result, name, parameters, arguments)                                                             \
    STAND_IN(result, name, parameters, arguments, symbol_find_driver(), CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,          \
             CUDA_ERROR_NOT_SUPPORTED)
#define NVML_STAND_IN(result, name, parameters, arguments)                                                             \
    STAND_IN(result, name, parameters, arguments, symbol_find_nvml(true), NVML_ERROR_LIBRARY_NOT_FOUND,                \
             NVML_ERROR_FUNCTION_NOT_FOUND)
#define CUDA_HOOK(result, name, parameters, arguments, since, class, why)                                              \
    CUDA_STAND_IN(result, name, parameters, arguments)
#define CUDA_CALL(result, name, parameters, arguments, reason) CUDA_STAND_IN(result, name, parameters, arguments)
#define NVML_HOOK(result, name, parameters, arguments, class, why) NVML_STAND_IN(result, name, parameters, arguments)
#define NVML_CALL(result, name, parameters, arguments, reason) NVML_STAND_IN(result, name, parameters, arguments)
#include "symbols.def"
#pragma GCC diagnostic pop

struct row {
    const char *name;
    void *lacking;
    int since; /* 0: of NVML, or only called */
    bool nvml;
};

static const struct row rows[SYMBOL_COUNT] = {
#define CUDA_HOOK(result, name, parameters, arguments, since, class, why)                                              \
    [SYMBOL_##name] = {#name, (void *)lacking_##name, since, false},
#define CUDA_CALL(result, name, parameters, arguments, reason)                                                         \
    [SYMBOL_##name] = {#name, (void *)lacking_##name, 0, false},
#define NVML_HOOK(result, name, parameters, arguments, class, why)                                                     \
    [SYMBOL_##name] = {#name, (void *)lacking_##name, 0, true},
#define NVML_CALL(result, name, parameters, arguments, reason)                                                         \
    [SYMBOL_##name] = {#name, (void *)lacking_##name, 0, true},
#include "symbols.def"
};

_Atomic(void *) symbol_pointers[SYMBOL_COUNT] = {
#define CUDA_HOOK(result, name, parameters, arguments, since, class, why) [SYMBOL_##name] = (void *)unresolved_##name,
#define CUDA_CALL(result, name, parameters, arguments, reason) [SYMBOL_##name] = (void *)unresolved_##name,
#define NVML_HOOK(result, name, parameters, arguments, class, why) [SYMBOL_##name] = (void *)unresolved_##name,
#define NVML_CALL(result, name, parameters, arguments, reason) [SYMBOL_##name] = (void *)unresolved_##name,
#include "symbols.def"
};

static _Atomic(void *) handed_out[SYMBOL_HOOKS]; /* by cuGetProcAddress, where that differs */

enum state { ABSENT, BUSY, READY };
static _Atomic(int) cuda_state;
static _Atomic(int) nvml_state;

static void *open_object(const char *path, int flags)
{
    void *(*open)(const char *, int) = (void *(*)(const char *, int))object_libc("dlopen");
    return open ? open(path, flags) : NULL;
}

/* The object, loaded if that is wanted, and kept loaded from now on. */
static bool hold_object(bool nvml, bool load, struct object *object)
{
    const char *soname = nvml ? SYMBOL_NVML_SONAME : SYMBOL_CUDA_SONAME;
    bool found = object_find(soname, object);
    if (!found && !load) return false;
    void *handle = open_object(found && object->path && *object->path ? object->path : soname,
                               RTLD_LAZY | (found ? RTLD_NOLOAD : 0));
    if (!handle && !found) return false;
    return found || object_find(soname, object);
}

static void fill(const struct object *object, bool nvml)
{
    for (int i = 0; i < SYMBOL_COUNT; i++) {
        if (rows[i].nvml != nvml) continue;
        void *function = object_function(object, rows[i].name);
        atomic_store_explicit(&symbol_pointers[i], function ? function : rows[i].lacking, memory_order_relaxed);
    }
}

/* "cuGraphLaunch_ptsz" asks for cuGraphLaunch of the per-thread stream, "cuMemAlloc_v2" for cuMemAlloc. */
static cuuint64_t base_name(const char *name, char *base, size_t size)
{
    size_t length = strlen(name);
    cuuint64_t flags = CU_GET_PROC_ADDRESS_LEGACY_STREAM;
    if (length > 5 && (strcmp(name + length - 5, "_ptsz") == 0 || strcmp(name + length - 5, "_ptds") == 0)) {
        length -= 5;
        flags = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    }
    if (length > 3 && name[length - 3] == '_' && name[length - 2] == 'v') length -= 3;
    if (length >= size) length = size - 1;
    memcpy(base, name, length);
    base[length] = '\0';
    return flags;
}

static void ask_driver(void)
{
    for (int i = 0; i < SYMBOL_HOOKS; i++) {
        if (!rows[i].since) continue;
        char base[64];
        cuuint64_t flags = base_name(rows[i].name, base, sizeof base);
        void *function = NULL;
        CUdriverProcAddressQueryResult status;
        CUresult result = DRIVER(cuGetProcAddress_v2)(base, &function, rows[i].since, flags, &status);
        if (result == CUDA_ERROR_NOT_SUPPORTED) /* a driver of CUDA 11 */
            result = DRIVER(cuGetProcAddress)(base, &function, rows[i].since, flags);
        if (result == CUDA_SUCCESS && function) atomic_store_explicit(&handed_out[i], function, memory_order_relaxed);
    }
}

/* For the limiter's own thread: as the program would find it, so that tools which watch threads see this one too. */
static void *as_program(const char *name)
{
    void *(*lookup)(void *, const char *) = (void *(*)(void *, const char *))object_libc("dlsym");
    void *function = lookup ? lookup(RTLD_DEFAULT, name) : NULL;
    return function ? function : object_libc(name);
}

static bool resolve(_Atomic(int) *state, bool nvml, bool load)
{
    int seen = atomic_load_explicit(state, memory_order_acquire);
    while (seen != READY) {
        if (seen == BUSY) {
            sched_yield();
            seen = atomic_load_explicit(state, memory_order_acquire);
            continue;
        }
        if (!atomic_compare_exchange_weak(state, &seen, BUSY)) continue;
        struct object object;
        bool found = hold_object(nvml, load, &object);
        if (found) fill(&object, nvml);
        if (found && !nvml) ask_driver();
        if (found) platform_use_resolver(as_program);
        atomic_store_explicit(state, found ? READY : ABSENT, memory_order_release);
        return found;
    }
    return true;
}

bool symbol_find_driver(void)
{
    return resolve(&cuda_state, false, true);
}

bool symbol_find_nvml(bool load)
{
    return resolve(&nvml_state, true, load);
}
int symbol_of(const void *function)
{
    for (int i = 0; i < SYMBOL_HOOKS; i++) {
        if (function == atomic_load_explicit(&symbol_pointers[i], memory_order_relaxed) ||
            function == atomic_load_explicit(&handed_out[i], memory_order_relaxed))
            return i;
    }
    return -1;
}
