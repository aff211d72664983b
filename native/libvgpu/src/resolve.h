/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers dlsym, dlvsym and cuGetProcAddress: maps names and functions of the driver and of NVML to the hooks.
 *
 * The only file that refers to every hook; no other module depends on it. Takes no memory from malloc, because a malloc
 * that is being set up may call dlsym.
 */
#ifndef VGPU_RESOLVE_H
#define VGPU_RESOLVE_H

#include <stdbool.h>

#include "symbols.h"

/* Number of the hook of exactly this name, -1 if there is none. */
int resolve_hook_number(const char *name);
void *resolve_hook(int number);

/* The function is the driver's (NVML's for an NVML hook). Only those are replaced. */
bool resolve_is_native(int number, const void *function);

/* The library that the hook stands in for is loaded. */
bool resolve_is_loaded(int number);

#endif
