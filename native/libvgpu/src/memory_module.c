/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks: modules and libraries of code, whose images take device memory.
 *
 * The driver does not say how much: it is the fall of its free memory around the load, less what this process was charged
 * meanwhile, at most MODULE_MOST because neighbours change it too. Charged in any case, refunded at the unload. Code that is
 * loaded lazily is found only by the agent's comparison with NVML.
 */
#include <stddef.h>

#include "compute.h"
#include "context.h"
#include "hook.h"
#include "launch_hooks.h"
#include "memory.h"

#define MODULE_MOST (UINT64_C(1) << 30)
#define FUNCTIONS 256

static struct table modules; /* modules and libraries: both are addresses in the driver */

struct measure {
    struct context_here here;
    bool active;
    size_t free;
    uint64_t own;
};

static struct measure begin(void)
{
    struct measure measure = {0};
    size_t total;
    hook_enter();
    measure.active = context_here(&measure.here) && measure.here.device >= 0 &&
                     account_limit(measure.here.device) != UINT64_MAX &&
                     DRIVER(cuMemGetInfo_v2)(&measure.free, &total) == CUDA_SUCCESS;
    if (measure.active) measure.own = account_own_used(measure.here.device);
    return measure;
}

static CUresult end(const struct measure *measure, CUresult result, const void *image)
{
    size_t free, total;
    if (result != CUDA_SUCCESS || !measure->active || DRIVER(cuMemGetInfo_v2)(&free, &total) != CUDA_SUCCESS)
        return result;
    int device = measure->here.device;
    int64_t taken = (int64_t)(measure->free - free) - (int64_t)(account_own_used(device) - measure->own);
    if (taken <= 0) return result;
    uint64_t bytes = (uint64_t)taken < MODULE_MOST ? (uint64_t)taken : MODULE_MOST;
    struct held held = {.bytes = bytes & TABLE_BYTES_MAX, .device = (uint64_t)device & 0x3f, .tag = measure->here.tag};
    account_charge_anyway(device, bytes);
    account_note_module(device, (int64_t)bytes);
    if (!hook_remember(&modules, (uintptr_t)image, held)) {
        account_refund(device, bytes);
        account_note_module(device, -(int64_t)bytes);
    }
    return result;
}

static void unloaded(const void *image)
{
    struct held held;
    if (!table_take(&modules, (uintptr_t)image, &held)) return;
    account_refund((int)held.device, held.bytes);
    account_note_module((int)held.device, -(int64_t)held.bytes);
}

#define LOAD(name, parameters, arguments, out)                                                                         \
    HOOK_EXPORT CUresult name parameters                                                                               \
    {                                                                                                                  \
        if (!(out)) return DRIVER(name) arguments;                                                                     \
        struct measure measure = begin();                                                                              \
        CUresult result = DRIVER(name) arguments;                                                                      \
        return end(&measure, result, result == CUDA_SUCCESS ? *(out) : NULL);                                          \
    }

LOAD(cuModuleLoad, (CUmodule * module, const char *file), (module, file), module)
LOAD(cuModuleLoadData, (CUmodule * module, const void *image), (module, image), module)
LOAD(cuModuleLoadDataEx,
     (CUmodule * module, const void *image, unsigned int count, CUjit_option *options, void **values),
     (module, image, count, options, values), module)
LOAD(cuModuleLoadFatBinary, (CUmodule * module, const void *image), (module, image), module)
LOAD(cuLibraryLoadData,
     (CUlibrary * library, const void *code, CUjit_option *jit_options, void **jit_values, unsigned int jit_count,
      CUlibraryOption *options, void **values, unsigned int count),
     (library, code, jit_options, jit_values, jit_count, options, values, count), library)
LOAD(cuLibraryLoadFromFile,
     (CUlibrary * library, const char *file, CUjit_option *jit_options, void **jit_values, unsigned int jit_count,
      CUlibraryOption *options, void **values, unsigned int count),
     (library, file, jit_options, jit_values, jit_count, options, values, count), library)

/* Addresses of functions are given out again: what is known of their durations goes with the module. */
static void forget_functions(CUmodule module)
{
    CUfunction functions[FUNCTIONS];
    unsigned int count = 0;
    if (DRIVER(cuModuleGetFunctionCount)(&count, module) != CUDA_SUCCESS) return;
    if (count > FUNCTIONS) count = FUNCTIONS;
    if (DRIVER(cuModuleEnumerateFunctions)(functions, count, module) != CUDA_SUCCESS) return;
    for (unsigned int i = 0; i < count; i++)
        compute_forget(functions[i]);
}

static void forget_kernels(CUlibrary library)
{
    CUkernel kernels[FUNCTIONS];
    unsigned int count = 0;
    if (DRIVER(cuLibraryGetKernelCount)(&count, library) != CUDA_SUCCESS) return;
    if (count > FUNCTIONS) count = FUNCTIONS;
    if (DRIVER(cuLibraryEnumerateKernels)(kernels, count, library) != CUDA_SUCCESS) return;
    for (unsigned int i = 0; i < count; i++)
        compute_forget(kernels[i]);
}

HOOK_EXPORT CUresult cuModuleUnload(CUmodule module)
{
    hook_enter();
    if (module && launch_is_limited()) forget_functions(module);
    CUresult result = DRIVER(cuModuleUnload)(module);
    if (result == CUDA_SUCCESS) unloaded(module);
    return result;
}

HOOK_EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    hook_enter();
    if (library && launch_is_limited()) forget_kernels(library);
    CUresult result = DRIVER(cuLibraryUnload)(library);
    if (result == CUDA_SUCCESS) unloaded(library);
    return result;
}

void memory_module_forget_context(uint8_t tag)
{
    hook_forget_context(&modules, tag, account_note_module);
}

void memory_module_reset(void)
{
    table_reset(&modules);
}
