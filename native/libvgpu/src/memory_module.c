/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks: modules and libraries of code, whose images take device memory.
 *
 * What the image can take at most is charged before the driver is asked, where its header tells (module_image.h). Where
 * that is not known, what it declares is charged first: what it takes for sure, or it is refused, and of what it is likely
 * to take as much as there is room for, so that nobody else is given that room meanwhile. Then that is corrected to what it
 * has taken. The driver does not say how much: it is the growth of this process in NVML's list around the load, or, where
 * that does not tell, what the header says at most, or, without that, the fall of the driver's free memory, at most
 * MODULE_MOST or what was charged first, because neighbours change that too; less what this process was charged meanwhile.
 * What does not fit is unloaded again. Code that is loaded lazily is found only by the agent's comparison with NVML.
 */
#include <stddef.h>

#include "compute.h"
#include "context.h"
#include "hook.h"
#include "launch_hooks.h"
#include "memory.h"
#include "module_image.h"

#define MODULE_MOST (UINT64_C(1) << 30)
#define FUNCTIONS 256

static struct table modules; /* modules and libraries: both are addresses in the driver */

struct measure {
    struct context_here here;
    bool active;
    bool listed; /* `used` is this process's, in NVML's list; else of the device */
    bool bounded;
    uint64_t charged; /* before the load, by the header; 0 without one */
    uint64_t used;
    uint64_t own;
};

/* Where an image is. */
struct origin {
    const void *image;
    const char *file;
};

static bool device_use(uint64_t *bytes)
{
    size_t free, total;
    if (DRIVER(cuMemGetInfo_v2)(&free, &total) != CUDA_SUCCESS) return false;
    *bytes = total - free;
    return true;
}

static bool is_lazy(void)
{
    CUmoduleLoadingMode mode;
    return DRIVER(cuModuleGetLoadingMode)(&mode) == CUDA_SUCCESS && mode == CU_MODULE_LAZY_LOADING;
}

/* What is only likely need not fit: the sure part must, and of the rest whatever is left. */
static bool charge_part(struct measure *measure, const struct module_size *size)
{
    int device = measure->here.device;
    uint64_t limit = account_limit(device);
    uint64_t used = account_used(device);
    measure->charged = limit > used ? limit - used : 0;
    if (measure->charged > size->likely) measure->charged = size->likely;
    if (measure->charged > size->least && account_charge(device, measure->charged)) return true;
    measure->charged = size->least;
    return measure->charged == 0 || context_charge(device, measure->charged);
}

/* false: the image does not fit. */
static bool begin(struct measure *measure, const struct origin *origin)
{
    *measure = (struct measure){0};
    hook_enter();
    if (!context_here(&measure->here) || measure->here.device < 0 || account_limit(measure->here.device) == UINT64_MAX)
        return true;
    struct module_size size =
        origin->file ? module_file_size(origin->file, is_lazy()) : module_image_size(origin->image, is_lazy());
    measure->bounded = size.is_bound;
    measure->charged = size.likely;
    if (measure->charged && !context_charge(measure->here.device, measure->charged)) {
        if (size.is_bound || !charge_part(measure, &size)) return false;
    }
    measure->listed = context_own_use(measure->here.cuda, &measure->used);
    measure->active = measure->listed || measure->bounded || device_use(&measure->used);
    if (measure->active) measure->own = account_own_used(measure->here.device);
    return true;
}

/* What the load has taken. */
static uint64_t taken_by(const struct measure *measure)
{
    uint64_t used;
    bool measured = measure->listed ? context_own_use(measure->here.cuda, &used)
                                    : !measure->bounded && measure->active && device_use(&used);
    if (!measured) return measure->charged;
    uint64_t meanwhile = account_own_used(measure->here.device) - measure->own;
    int64_t taken = (int64_t)(used - measure->used) - (int64_t)meanwhile;
    if (taken <= 0) return 0;
    uint64_t most = measure->listed ? UINT64_MAX : measure->charged > MODULE_MOST ? measure->charged : MODULE_MOST;
    return (uint64_t)taken < most ? (uint64_t)taken : most;
}

/* Charge what the load has taken instead of what it was thought to; false: it does not fit and nothing is charged. */
static bool fits(const struct measure *measure, uintptr_t image)
{
    int device = measure->here.device;
    uint64_t bytes = taken_by(measure);
    if (bytes < measure->charged) account_refund(device, measure->charged - bytes);
    if (bytes > measure->charged && !context_charge(device, bytes - measure->charged)) {
        account_refund(device, measure->charged);
        return false;
    }
    if (bytes == 0) return true;
    struct held held = {.bytes = bytes & TABLE_BYTES_MAX, .device = (uint64_t)device & 0x3f, .tag = measure->here.tag};
    if (!hook_remember(&modules, image, held)) {
        account_refund(device, bytes);
        return false;
    }
    account_note_module(device, (int64_t)bytes);
    return true;
}

static void unloaded(const void *image)
{
    struct held held;
    if (!table_take(&modules, (uintptr_t)image, &held)) return;
    account_refund((int)held.device, held.bytes);
    account_note_module((int)held.device, -(int64_t)held.bytes);
}

#define LOAD(name, parameters, arguments, out, unload, ...)                                                            \
    HOOK_EXPORT CUresult name parameters                                                                               \
    {                                                                                                                  \
        struct measure measure;                                                                                        \
        if (!(out)) return DRIVER(name) arguments;                                                                     \
        if (!begin(&measure, &(struct origin){__VA_ARGS__})) return CUDA_ERROR_OUT_OF_MEMORY;                          \
        CUresult result = DRIVER(name) arguments;                                                                      \
        if (result != CUDA_SUCCESS) {                                                                                  \
            if (measure.charged) account_refund(measure.here.device, measure.charged);                                 \
            return result;                                                                                             \
        }                                                                                                              \
        if (fits(&measure, (uintptr_t)*(out))) return result;                                                          \
        DRIVER(unload)(*(out));                                                                                        \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                                               \
    }

LOAD(cuModuleLoad, (CUmodule * module, const char *file), (module, file), module, cuModuleUnload, .file = file)
LOAD(cuModuleLoadData, (CUmodule * module, const void *image), (module, image), module, cuModuleUnload, .image = image)
LOAD(cuModuleLoadDataEx,
     (CUmodule * module, const void *image, unsigned int count, CUjit_option *options, void **values),
     (module, image, count, options, values), module, cuModuleUnload, .image = image)
LOAD(cuModuleLoadFatBinary, (CUmodule * module, const void *image), (module, image), module, cuModuleUnload,
     .image = image)
LOAD(cuLibraryLoadData,
     (CUlibrary * library, const void *code, CUjit_option *jit_options, void **jit_values, unsigned int jit_count,
      CUlibraryOption *options, void **values, unsigned int count),
     (library, code, jit_options, jit_values, jit_count, options, values, count), library, cuLibraryUnload,
     .image = code)
LOAD(cuLibraryLoadFromFile,
     (CUlibrary * library, const char *file, CUjit_option *jit_options, void **jit_values, unsigned int jit_count,
      CUlibraryOption *options, void **values, unsigned int count),
     (library, file, jit_options, jit_values, jit_count, options, values, count), library, cuLibraryUnload,
     .file = file)

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
