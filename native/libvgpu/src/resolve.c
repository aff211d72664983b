/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See resolve.h. Locks taken here: none but the loader's. Called with hooks active: no hook is called from here.
 */
#include "resolve.h"

#include <stddef.h>

#include "object.h"

struct row {
    const char *name;
    void *hook;
    const char *soname;
};

/* In the order of their names, as symbols.def lists them. */
static const struct row rows[SYMBOL_HOOKS] = {
#define CUDA_HOOK(result, name, parameters, arguments, since, class, why)                                              \
    [SYMBOL_##name] = {#name, (void *)exported_##name, SYMBOL_CUDA_SONAME},
#define NVML_HOOK(result, name, parameters, arguments, class, why)                                                     \
    [SYMBOL_##name] = {#name, (void *)exported_##name, SYMBOL_NVML_SONAME},
#include "symbols.def"
};

int resolve_hook_number(const char *name)
{
    if (!name || !((name[0] == 'c' && name[1] == 'u') || (name[0] == 'n' && name[1] == 'v'))) return -1;
    int low = 0, high = SYMBOL_HOOKS - 1;
    while (low <= high) {
        int middle = (low + high) / 2;
        int order = object_compare(name, rows[middle].name);
        if (order == 0) return middle;
        if (order < 0)
            high = middle - 1;
        else
            low = middle + 1;
    }
    return -1;
}

void *resolve_hook(int number)
{
    return rows[number].hook;
}
bool resolve_is_native(int number, const void *function)
{
    return object_holds(rows[number].soname, function);
}

bool resolve_is_loaded(int number)
{
    struct object object;
    return object_find(rows[number].soname, &object);
}

/* The hook that answers for what the driver has found; the function itself if there is none. */
static void *hook_of(const char *name, void *function, cuuint64_t flags)
{
    int number = symbol_of(name, function, flags);
    return number < 0 ? function : rows[number].hook;
}

HOOK_EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags)
{
    CUresult result = DRIVER(cuGetProcAddress)(name, function, version, flags);
    if (result == CUDA_SUCCESS && function && *function) *function = hook_of(name, *function, flags);
    return result;
}

HOOK_EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                         CUdriverProcAddressQueryResult *status)
{
    CUresult result = DRIVER(cuGetProcAddress_v2)(name, function, version, flags, status);
    if (result == CUDA_SUCCESS && function && *function) *function = hook_of(name, *function, flags);
    return result;
}
