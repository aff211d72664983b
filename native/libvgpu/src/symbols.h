/* SPDX-License-Identifier: Apache-2.0 */
/*
 * symbols.def as C: numbers, pointer types, the driver's pointers, and the prototypes of the exported hooks.
 *
 * DRIVER(name) is the driver's own function, typed, although a hook is exported under the same name here. Until the driver
 * has been found it points to a function that finds it; if the driver lacks it, to one that returns "not supported".
 */
#ifndef VGPU_SYMBOLS_H
#define VGPU_SYMBOLS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "nvml_abi.h"

#define SYMBOL_CUDA_SONAME "libcuda.so.1"
#define SYMBOL_NVML_SONAME "libnvidia-ml.so.1"

#define HOOK_EXPORT __attribute__((visibility("default")))

enum symbol_class { COUNTED, TRACKED, THROTTLED, VIEWED, RESOLVED };

/* Hooks come first, in the order of their names. */
enum symbol_id {
#define CUDA_HOOK(result, name, parameters, arguments, since, class, why) SYMBOL_##name,
#define NVML_HOOK(result, name, parameters, arguments, class, why) SYMBOL_##name,
#include "symbols.def"
    SYMBOL_HOOKS,
    SYMBOL_BEFORE_CALLS = SYMBOL_HOOKS - 1,
#define CUDA_CALL(result, name, parameters, arguments, reason) SYMBOL_##name,
#define NVML_CALL(result, name, parameters, arguments, reason) SYMBOL_##name,
#include "symbols.def"
    SYMBOL_COUNT
};

#define CUDA_HOOK(result, name, parameters, arguments, since, class, why) typedef result(*type_##name) parameters;
#define CUDA_CALL(result, name, parameters, arguments, reason) typedef result(*type_##name) parameters;
#define NVML_HOOK(result, name, parameters, arguments, class, why) typedef result(*type_##name) parameters;
#define NVML_CALL(result, name, parameters, arguments, reason) typedef result(*type_##name) parameters;
#include "symbols.def"

#define CUDA_HOOK(result, name, parameters, arguments, since, class, why) HOOK_EXPORT result name parameters;
#define NVML_HOOK(result, name, parameters, arguments, class, why) HOOK_EXPORT result name parameters;
#include "symbols.def"

extern _Atomic(void *) symbol_pointers[SYMBOL_COUNT];

#define DRIVER(name) ((type_##name)atomic_load_explicit(&symbol_pointers[SYMBOL_##name], memory_order_relaxed))

/* Fill the driver's pointers if that has not happened, loading the driver if necessary. False: there is none here. */
bool symbol_find_driver(void);

/* The same for NVML; `load`: load it if the process has not. */
bool symbol_find_nvml(bool load);

/* Number of the hook whose original this function of the driver or NVML is, -1 if it is not hooked. */
int symbol_of(const void *function);

#endif
