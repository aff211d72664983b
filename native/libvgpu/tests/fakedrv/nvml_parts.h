/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What nvml.c offers to mig.c and gpm.c: they are one library. Each function takes the lock of nvml.c by itself.
 */
#ifndef FAKEDRV_NVML_PARTS_H
#define FAKEDRV_NVML_PARTS_H

#include "nvml_abi.h"
#include "state.h"

/* Prologue of every function on one device: applies the faults of `function`, copies the present state to `out`. */
nvmlReturn_t fake_begin_device(const char *function, nvmlDevice_t handle, struct fake_gpu *out);

/* The handle of a device or instance; NULL when there are too many. */
nvmlDevice_t fake_device_of_uuid(const char *uuid);

/* How many processes use an instance; NVML_INSTANCE_NONE: any compute instance of that GPU instance. */
unsigned int fake_processes_of(const struct fake_gpu *gpu, unsigned int gpu_instance, unsigned int compute_instance);

/* Bytes of managed memory that have moved between the card and the host so far. */
unsigned long long fake_moved_bytes(const char *uuid);

/* Returns true if an event set of this process watches the card. */
bool fake_is_watched(const char *uuid);

#endif
