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
#include <stdio.h>
#include <string.h>

#include "object.h"
#include "platform.h"

#define NAME_MOST 64u
#define LISTED_RANK (1 << 20) /* more than any version makes */

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

/* Forms that the driver does not know yet are left out: it would hand out an older one for them. */
static void ask_driver(void)
{
    int version = 0;
    if (DRIVER(cuDriverGetVersion)(&version) != CUDA_SUCCESS) return;
    for (int i = 0; i < SYMBOL_HOOKS; i++) {
        if (!rows[i].since || rows[i].since > version) continue;
        char base[NAME_MOST];
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

static bool is_form_of(int number, const char *base, cuuint64_t *flags)
{
    char own[NAME_MOST];
    *flags = base_name(rows[number].name, own, sizeof own);
    return strcmp(own, base) == 0;
}

/* The driver exports this function under the name, in some form: it is the name's own. */
static bool is_own_function(const char *base, const void *function)
{
    static const char *const forms[] = {"", "_v2", "_v3", "_v4", "_ptsz", "_ptds", "_v2_ptsz", "_v2_ptds", "_v3_ptsz"};
    struct object object;
    char name[NAME_MOST + sizeof "_v2_ptsz"];
    if (!object_find(SYMBOL_CUDA_SONAME, &object)) return true;
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        (void)snprintf(name, sizeof name, "%s%s", base, forms[i]);
        if (object_function(&object, name) == function) return true;
    }
    return false;
}

/* The addresses of the symbol table count first: an older driver hands out an older form for versions that it does not know.
   A name may also lead to the function of another one: since CUDA 12 cuGraphInstantiate is cuGraphInstantiateWithFlags. */
int symbol_of(const char *name, const void *function, cuuint64_t flags)
{
    char base[NAME_MOST];
    int found = -1, foreign = -1;
    int best = -1;
    (void)base_name(name, base, sizeof base);
    for (int i = 0; i < SYMBOL_HOOKS; i++) {
        cuuint64_t own_flags;
        bool listed = function == atomic_load_explicit(&symbol_pointers[i], memory_order_relaxed);
        if (!listed && function != atomic_load_explicit(&handed_out[i], memory_order_relaxed)) continue;
        if (!is_form_of(i, base, &own_flags)) {
            if (listed) foreign = i;
            continue;
        }
        bool is_per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
        bool same_stream = is_per_thread == (own_flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
        int rank = (listed ? LISTED_RANK : 0) + 2 * rows[i].since + same_stream;
        if (rank > best) {
            best = rank;
            found = i;
        }
    }
    if (found < 0 && foreign >= 0 && !is_own_function(base, function)) return foreign;
    return found;
}
