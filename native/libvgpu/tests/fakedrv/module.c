/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Modules, libraries and functions: what an image takes and how long a function runs. Rules: fake.h.
 *
 * A CUkernel is a CUfunction here, and a library a module; callers cannot distinguish them.
 *
 * Locks taken here: fake.lock. Called with hooks active: no.
 */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MODULE_MAGIC UINT64_C(0x454c55444f4d4b46)
#define FUNCTION_MAGIC UINT64_C(0x4e4f4954434e5546)
#define DEFAULT_NS UINT64_C(10000)
#define PAGE UINT64_C(4096)

struct fake_module {
    uint64_t magic;
    struct fake_context *context; /* NULL: a library loaded without one */
    struct fake_module *next;
    uint64_t bytes;
    struct fake_function *functions;
};

static struct fake_module *libraries;

/* ---- functions ---- */

bool fake_is_function(const struct fake_function *function)
{
    return function != NULL && function->magic == FUNCTION_MAGIC;
}

static bool parse_duration(const char *text, uint64_t *ns)
{
    char *unit = NULL;
    double number = strtod(text, &unit);
    double scale = strcmp(unit, "ns") == 0 ? 1 : strcmp(unit, "us") == 0 ? 1e3 : strcmp(unit, "ms") == 0 ? 1e6 : 0;
    *ns = (uint64_t)(number * scale);
    return unit != text && scale > 0 && number >= 0;
}

static void find_law(struct fake_function *function)
{
    const char *name = function->name;
    function->law = FAKE_LAW_FIXED;
    function->ns = DEFAULT_NS;
    if (strcmp(name, "nop") == 0 || strncmp(name, "nop_", 4) == 0) {
        function->ns = 0;
    } else if (strncmp(name, "local_", 6) == 0) {
        function->local_bytes = strtoull(name + 6, NULL, 10);
    } else if (strcmp(name, "param") == 0) {
        function->law = FAKE_LAW_PARAM;
    } else if (strncmp(name, "fixed_", 6) == 0 && parse_duration(name + 6, &function->ns)) {
        function->law = FAKE_LAW_FIXED;
    } else if (strncmp(name, "block_", 6) == 0 && parse_duration(name + 6, &function->ns)) {
        function->law = FAKE_LAW_BLOCK;
    }
}

uint64_t fake_duration(const struct fake_function *function, const unsigned int grid[3], void **params,
                       unsigned int sms, unsigned int *occupied)
{
    uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    *occupied = blocks < sms ? (unsigned int)blocks : sms;
    switch (function->law) {
    case FAKE_LAW_BLOCK:
        return (blocks + sms - 1) / sms * function->ns;
    case FAKE_LAW_PARAM: {
        uint64_t ns = 0;
        if (params != NULL && params[0] != NULL) {
            memcpy(&ns, params[0], sizeof ns);
        }
        return ns;
    }
    case FAKE_LAW_FIXED:
    default:
        return function->ns;
    }
}

static CUresult get_function(CUfunction *out, struct fake_module *module, const char *name)
{
    if (out == NULL || name == NULL || module == NULL || module->magic != MODULE_MAGIC) {
        return module == NULL || out == NULL || name == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    }
    if (strncmp(name, "missing", 7) == 0) {
        return CUDA_ERROR_NOT_FOUND;
    }
    fake_lock();
    struct fake_function *function = module->functions;
    while (function != NULL && strcmp(function->name, name) != 0) {
        function = function->next;
    }
    if (function == NULL) {
        size_t length = strlen(name) + 1;
        function = calloc(1, sizeof *function + length);
        if (function != NULL) {
            function->magic = FUNCTION_MAGIC;
            function->module = module;
            memcpy(function->name, name, length);
            find_law(function);
            function->next = module->functions;
            module->functions = function;
        }
    }
    fake_unlock();
    *out = function;
    return function == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

API(cuModuleGetFunction, CUfunction *out, CUmodule module, const char *name)
{
    ENTER();
    return get_function(out, module, name);
}

API(cuLibraryGetKernel, CUfunction *out, CUmodule library, const char *name)
{
    ENTER();
    return get_function(out, library, name);
}

API(cuKernelGetFunction, CUfunction *out, CUfunction kernel)
{
    ENTER();
    if (out == NULL || !fake_is_function(kernel)) {
        return out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    }
    *out = kernel;
    return CUDA_SUCCESS;
}

API(cuFuncGetName, const char **out, CUfunction function)
{
    ENTER();
    if (out == NULL || !fake_is_function(function)) {
        return out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    }
    *out = function->name;
    return CUDA_SUCCESS;
}

API(cuFuncGetModule, CUmodule *out, CUfunction function)
{
    ENTER();
    if (out == NULL || !fake_is_function(function)) {
        return out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    }
    *out = function->module;
    return CUDA_SUCCESS;
}

API(cuFuncGetAttribute, int *out, int attribute, CUfunction function)
{
    ENTER();
    if (out == NULL || !fake_is_function(function)) {
        return out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    }
    *out = attribute == 0 ? 1024 : 0; /* 0: threads per block */
    return CUDA_SUCCESS;
}

API(cuFuncSetAttribute, CUfunction function, int attribute, int value)
{
    ENTER();
    (void)attribute;
    (void)value;
    return fake_is_function(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API(cuFuncSetBlockShape, CUfunction function, int x, int y, int z)
{
    ENTER();
    return !fake_is_function(function)  ? CUDA_ERROR_INVALID_HANDLE
           : x <= 0 || y <= 0 || z <= 0 ? CUDA_ERROR_INVALID_VALUE
                                        : CUDA_SUCCESS;
}

/* ---- images ---- */

/* Length of an image in memory, from its own header. */
static uint64_t image_bytes(const void *image)
{
    const unsigned char *bytes = image;
    if (memcmp(bytes, "\177ELF", 4) == 0) {
        uint64_t offset = 0;
        uint16_t size = 0;
        uint16_t count = 0;
        memcpy(&offset, bytes + 40, sizeof offset);
        memcpy(&size, bytes + 58, sizeof size);
        memcpy(&count, bytes + 60, sizeof count);
        return offset + (uint64_t)size * count;
    }
    if (memcmp(bytes, "\xb1\x43\x62\x46", 4) == 0) { /* the wrapper that nvcc puts around a fat binary */
        const void *inner = NULL;
        memcpy(&inner, bytes + 8, sizeof inner);
        return image_bytes(inner);
    }
    if (memcmp(bytes, "\x50\xed\x55\xba", 4) == 0) {
        uint16_t header = 0;
        uint64_t content = 0;
        memcpy(&header, bytes + 6, sizeof header);
        memcpy(&content, bytes + 8, sizeof content);
        uint64_t unpacked = 0;                              /* of the first image, the one that is taken */
        if (content >= 64 && content < UINT64_C(1) << 32) { /* else there is nothing */
            memcpy(&unpacked, bytes + header + 56, sizeof unpacked);
        }
        return unpacked > 0 ? unpacked : header + content;
    }
    const char *said = strstr(image, "fake-bytes:");
    if (said != NULL) {
        return strtoull(said + strlen("fake-bytes:"), NULL, 0);
    }
    uint64_t total = (strlen(image) + PAGE - 1) / PAGE * PAGE;
    for (const char *at = image; (at = strstr(at, ".global .align 8 .b8 ")) != NULL; at++) {
        const char *size = strchr(at, '[');
        total += size != NULL ? strtoull(size + 1, NULL, 10) : 0;
    }
    return total;
}

static CUresult load(CUmodule *out, const void *image, bool is_library)
{
    struct fake_context *context = fake_current();
    bool has_context = fake_is_context(context);
    if (!has_context && !is_library) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (out == NULL || image == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct fake_module *module = calloc(1, sizeof *module);
    uint64_t bytes = has_context ? image_bytes(image) : 0; /* a library without a context is not on any device yet */
    if (module == NULL || !(bytes == 0 || fake_charge(context->device, bytes))) {
        free(module);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    module->magic = MODULE_MAGIC;
    module->bytes = bytes;
    module->context = has_context ? context : NULL;
    fake_lock();
    struct fake_module **list = has_context ? &context->modules : &libraries;
    module->next = *list;
    *list = module;
    fake_unlock();
    *out = module;
    return CUDA_SUCCESS;
}

static CUresult load_file(CUmodule *out, const char *path, bool is_library)
{
    enum { FILE_MAX = 64 << 20 };
    FILE *file = path == NULL ? NULL : fopen(path, "re");
    if (file == NULL) {
        return path == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_FILE_NOT_FOUND;
    }
    char *image = calloc(1, FILE_MAX);
    size_t length = image == NULL ? 0 : fread(image, 1, FILE_MAX - 1, file);
    (void)fclose(file);
    CUresult result = image == NULL ? CUDA_ERROR_OUT_OF_MEMORY
                      : length == 0 ? CUDA_ERROR_INVALID_IMAGE
                                    : load(out, image, is_library);
    free(image);
    return result;
}

API(cuModuleGetLoadingMode, int *mode)
{
    ENTER();
    if (mode == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *mode = 1; /* eager: what an image takes is taken when it is loaded */
    return CUDA_SUCCESS;
}

API(cuModuleLoad, CUmodule *out, const char *path)
{
    ENTER();
    return load_file(out, path, false);
}

API(cuModuleLoadData, CUmodule *out, const void *image)
{
    ENTER();
    return load(out, image, false);
}

API(cuModuleLoadDataEx, CUmodule *out, const void *image, unsigned int count, int *options, void **values)
{
    ENTER();
    (void)count;
    (void)options;
    (void)values;
    return load(out, image, false);
}

API(cuModuleLoadFatBinary, CUmodule *out, const void *image)
{
    ENTER();
    return load(out, image, false);
}

API(cuLibraryLoadData, CUmodule *out, const void *image, int *jit, void **jit_values, unsigned int jit_count,
    int *options, void **values, unsigned int count)
{
    ENTER();
    (void)jit;
    (void)jit_values;
    (void)jit_count;
    (void)options;
    (void)values;
    (void)count;
    return load(out, image, true);
}

API(cuLibraryLoadFromFile, CUmodule *out, const char *path, int *jit, void **jit_values, unsigned int jit_count,
    int *options, void **values, unsigned int count)
{
    ENTER();
    (void)jit;
    (void)jit_values;
    (void)jit_count;
    (void)options;
    (void)values;
    (void)count;
    return load_file(out, path, true);
}

/* Caller holds the lock, and has taken the module off its list. */
static void free_module(struct fake_module *module)
{
    while (module->functions != NULL) {
        struct fake_function *function = module->functions;
        module->functions = function->next;
        function->magic = 0;
        free(function);
    }
    if (module->context != NULL && module->bytes > 0) {
        fake_refund(module->context->device, module->bytes);
    }
    module->magic = 0;
    free(module);
}

static CUresult unload(CUmodule module)
{
    if (module == NULL || module->magic != MODULE_MAGIC) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    fake_lock();
    struct fake_module **at = module->context != NULL ? &module->context->modules : &libraries;
    while (*at != NULL && *at != module) {
        at = &(*at)->next;
    }
    if (*at != NULL) {
        *at = module->next;
        free_module(module);
    }
    fake_unlock();
    return CUDA_SUCCESS;
}

API(cuModuleUnload, CUmodule module)
{
    ENTER();
    return unload(module);
}

API(cuLibraryUnload, CUmodule library)
{
    ENTER();
    return unload(library);
}

API(cuLibraryGetModule, CUmodule *out, CUmodule library)
{
    ENTER();
    if (out == NULL || library == NULL || library->magic != MODULE_MAGIC) {
        return out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    }
    *out = library;
    return CUDA_SUCCESS;
}

void fake_modules_free(struct fake_context *context)
{
    while (context->modules != NULL) {
        struct fake_module *module = context->modules;
        context->modules = module->next;
        free_module(module);
    }
}
