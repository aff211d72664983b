/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finding functions: the driver's, NVML's and libc's, without asking dlsym, which this library answers itself.
 *
 * Reads the loader's list of objects and their symbol tables. Takes no memory from malloc, because it may be asked by a
 * malloc that is being set up.
 */
#ifndef VGPU_RESOLVE_H
#define VGPU_RESOLVE_H

#include <stdbool.h>
#include <stdint.h>

#include "symbols.h"

/* Fill the driver's pointers if that has not happened. False: there is no driver here. */
bool resolve_driver(void);

/* The same for NVML; `load`: also when nobody has loaded it yet. */
bool resolve_nvml(bool load);

/* A function of libc, libdl or libpthread by its default version, NULL if none of them has it. */
void *resolve_libc(const char *name);

/* The hook that answers for this function of the driver or NVML; the pointer itself if none does. */
void *resolve_hook_of(void *function);

/* Number of the hook of exactly this name, -1 if there is none. */
int resolve_hook_number(const char *name);
void *resolve_hook(int number);

/* Is it a function of the driver (of NVML for an NVML hook)? Only those are ever replaced. */
bool resolve_is_native(int number, const void *function);
bool resolve_is_loaded(int number);

/* What RTLD_NEXT means for code at `caller`: the first definition in an object after the caller's. */
void *resolve_next(const void *caller, const char *name);

#endif
