/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dlsym and dlvsym: exactly what they are without this library, but for names of hooks that the driver answers.
 *
 * Any other name jumps to the real function with registers and return address untouched, so that RTLD_NEXT and
 * RTLD_DEFAULT mean what they mean to the true caller. For the name of a hook the real answer is looked up first and
 * replaced only if it is a function of the driver (NVML); a function of another interceptor is returned as it is.
 * Locks taken here: none but the loader's. Called before constructors have run, and inside malloc.
 */
#include <dlfcn.h>
#include <stddef.h>

#include "object.h"
#include "resolve.h"

typedef void *(*dlsym_function)(void *handle, const char *name);
typedef void *(*dlvsym_function)(void *handle, const char *name, const char *version);

/* Called from the assembly below. */
void *resolve_dlsym_target(void *handle, const char *name) __attribute__((used, visibility("hidden")));
void *resolve_dlvsym_target(void *handle, const char *name, const char *version)
    __attribute__((used, visibility("hidden")));

static void *nothing(void)
{
    return NULL;
}

static void *real(_Atomic(void *) *cache, const char *name)
{
    void *function = atomic_load_explicit(cache, memory_order_relaxed);
    if (!function) {
        function = object_libc(name);
        if (function) atomic_store_explicit(cache, function, memory_order_relaxed);
    }
    return function ? function : (void *)nothing;
}

static void *real_dlsym(void)
{
    static _Atomic(void *) cache;
    return real(&cache, "dlsym");
}

static void *real_dlvsym(void)
{
    static _Atomic(void *) cache;
    return real(&cache, "dlvsym");
}

/* With this library as the caller: the barrier keeps the compiler from jumping, which would leave its caller as that. */
static void *after_this_library(const char *name)
{
    void *answer = ((dlsym_function)real_dlsym())(RTLD_NEXT, name);
    __asm__ __volatile__("" : "+r"(answer) : : "memory");
    return answer;
}

static void *replaced(void *answer, int number, const char *name)
{
    if (!answer) return NULL;
    /* Found here only because the hooks are exported: the driver is not loaded. */
    if (answer == resolve_hook(number) && !resolve_is_loaded(number)) return after_this_library(name);
    return resolve_is_native(number, answer) ? resolve_hook(number) : answer;
}

static void *hooked_dlsym(void *handle, const char *name)
{
    int number = resolve_hook_number(name);
    void *answer = handle == RTLD_NEXT ? object_next(__builtin_return_address(0), name) : NULL;
    if (!answer) answer = ((dlsym_function)real_dlsym())(handle, name);
    return replaced(answer, number, name);
}

static void *hooked_dlvsym(void *handle, const char *name, const char *version)
{
    int number = resolve_hook_number(name);
    return replaced(((dlvsym_function)real_dlvsym())(handle, name, version), number, name);
}

void *resolve_dlsym_target(void *handle, const char *name)
{
    (void)handle;
    return resolve_hook_number(name) < 0 ? real_dlsym() : (void *)hooked_dlsym;
}

void *resolve_dlvsym_target(void *handle, const char *name, const char *version)
{
    (void)handle;
    (void)version;
    return resolve_hook_number(name) < 0 ? real_dlvsym() : (void *)hooked_dlvsym;
}

#if defined(__x86_64__)
#define TAIL_JUMP(name)                                                                                                \
    __asm__(".text\n.globl " #name "\n.type " #name ",@function\n.p2align 4\n" #name ":\n"                             \
            ".cfi_startproc\n"                                                                                         \
            "endbr64\n"                                                                                                \
            "push %rdi\n.cfi_adjust_cfa_offset 8\n"                                                                    \
            "push %rsi\n.cfi_adjust_cfa_offset 8\n"                                                                    \
            "push %rdx\n.cfi_adjust_cfa_offset 8\n"                                                                    \
            "call resolve_" #name "_target\n"                                                                          \
            "pop %rdx\n.cfi_adjust_cfa_offset -8\n"                                                                    \
            "pop %rsi\n.cfi_adjust_cfa_offset -8\n"                                                                    \
            "pop %rdi\n.cfi_adjust_cfa_offset -8\n"                                                                    \
            "jmp *%rax\n"                                                                                              \
            ".cfi_endproc\n.size " #name ", .-" #name "\n")
#elif defined(__aarch64__)
#define TAIL_JUMP(name)                                                                                                \
    __asm__(".text\n.globl " #name "\n.type " #name ",%function\n.p2align 4\n" #name ":\n"                             \
            ".cfi_startproc\n"                                                                                         \
            "hint #34\n" /* bti c */                                                                                   \
            "stp x29, x30, [sp, #-48]!\n.cfi_adjust_cfa_offset 48\n.cfi_rel_offset x29, 0\n.cfi_rel_offset x30, 8\n"   \
            "stp x0, x1, [sp, #16]\n"                                                                                  \
            "str x2, [sp, #32]\n"                                                                                      \
            "bl resolve_" #name "_target\n"                                                                            \
            "mov x16, x0\n"                                                                                            \
            "ldr x2, [sp, #32]\n"                                                                                      \
            "ldp x0, x1, [sp, #16]\n"                                                                                  \
            "ldp x29, x30, [sp], #48\n.cfi_adjust_cfa_offset -48\n.cfi_restore x29\n.cfi_restore x30\n"                \
            "br x16\n"                                                                                                 \
            ".cfi_endproc\n.size " #name ", .-" #name "\n")
#else
#error "dlsym must jump to the real one without a frame of its own: write TAIL_JUMP for this processor"
#endif

TAIL_JUMP(dlsym);
TAIL_JUMP(dlvsym);
