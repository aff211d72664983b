/* SPDX-License-Identifier: Apache-2.0 */
/*
 * symbols.def as C: numbers, pointer types, the driver's pointers, and the prototypes of the exported hooks.
 *
 * The body of a hook is written under the driver's name, but for the linker it is `hook_NAME`: under the name itself the
 * library exports the function of gate_hooks.c that passes the gate and calls the body. Here that one is `exported_NAME`.
 * Hooks that hand out functions, and those of NVML, are exported as they are.
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

enum symbol_class { COUNTED, TRACKED, THROTTLED, VIEWED, TOUCHED, RESOLVED };

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

#define BEHIND_GATE(name) __asm__("hook_" #name)
#define BODY_COUNTED(name) BEHIND_GATE(name)
#define BODY_TRACKED(name) BEHIND_GATE(name)
#define BODY_THROTTLED(name) BEHIND_GATE(name)
#define BODY_VIEWED(name) BEHIND_GATE(name)
#define BODY_TOUCHED(name) BEHIND_GATE(name) /* never defined: the gate calls the driver */
#define BODY_RESOLVED(name)
#define CUDA_HOOK(result, name, parameters, arguments, since, class, why)                                              \
    HOOK_EXPORT result name parameters BODY_##class(name);                                                             \
    HOOK_EXPORT result exported_##name parameters __asm__(#name);
#define NVML_HOOK(result, name, parameters, arguments, class, why)                                                     \
    HOOK_EXPORT result name parameters;                                                                                \
    HOOK_EXPORT result exported_##name parameters __asm__(#name);
#include "symbols.def"

extern _Atomic(void *) symbol_pointers[SYMBOL_COUNT];

#define DRIVER(name) ((type_##name)atomic_load_explicit(&symbol_pointers[SYMBOL_##name], memory_order_relaxed))

/* Fill the driver's pointers if that has not happened, loading the driver if necessary. False: there is none here. */
bool symbol_find_driver(void);

/* The same for NVML; `load`: load it if the process has not. */
bool symbol_find_nvml(bool load);

/* Number of the hook that answers when cuGetProcAddress has found `function` for `name`, -1 if none does. Name and address must
   both be the hook's, because functions of several names may be one ("not supported" stubs, folded code); the address alone
   counts where the driver exports another function under the name. Of several forms of a name with one address, the newest: the
   driver answers old versions with it. */
int symbol_of(const char *name, const void *function, cuuint64_t flags);

#endif
