/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks: modules and libraries of code, whose images take device memory.
 *
 * The most that the image can take is charged before the driver is called, if its header gives it (module_image.h). Else
 * the sizes that it declares are charged first: the bytes that it certainly takes, or it is refused, and of those that it
 * likely takes as many as fit, so that no other process can charge them meanwhile.
 *
 * Then the charge is corrected to the bytes that the image has taken, less those that this process was charged meanwhile.
 * The driver does not report them. The first of these that is known counts:
 *   - the most that the header gives, if that is less than SMALL_IMAGE: programs load hundreds of those;
 *   - the growth of this process in NVML's list around the load;
 *   - the most that the header gives;
 *   - the fall of the driver's free memory, at most MODULE_MOST or the first charge, because neighbors change it too.
 * An image that does not fit is unloaded again. Code that is loaded lazily is found only by the agent's comparison with NVML.
 */
#include "memory_module.h"

#include <stddef.h>

#include "compute.h"
#include "context.h"
#include "hook.h"
#include "launch.h"
#include "module_image.h"

#define MODULE_MOST (UINT64_C(1) << 30)
#define FUNCTIONS 256
#define SMALL_IMAGE                                                                                                    \
    (UINT64_C(4) << 20) /* by its bound: not worth two lists of NVML, which take a millisecond and more */

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

/* The likely part need not fit: the certain part must, and of the rest as many bytes as fit are charged. */
static bool charge_part(struct measure *measure, const struct module_size *size)
{
    int device = measure->here.device;
    uint64_t bound = account_bound(device);
    uint64_t used = account_used(device);
    measure->charged = bound > used ? bound - used : 0;
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
    bool is_small = size.is_bound && size.likely < SMALL_IMAGE;
    measure->listed = !is_small && context_own_use(measure->here.cuda, &measure->used);
    measure->active = measure->listed || measure->bounded || device_use(&measure->used);
    if (measure->active) measure->own = account_own_used(measure->here.device);
    return true;
}

/* Bytes that the load has taken. */
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

void memory_module_forget_context(const struct hook_context *ended)
{
    hook_forget_tag(&modules, ended->tag, account_note_module);
}

void memory_module_reset(void)
{
    table_reset(&modules);
}
