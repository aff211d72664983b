/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which limit a device of the driver or of NVML has: its index in account.h.
 *
 * By the UUID that the driver gives for it, so that CUDA_VISIBLE_DEVICES may select and order as it likes; MIG devices have
 * UUIDs of their own. Where limits are known by position only, the position is that among all devices of the container.
 */
#ifndef VGPU_DEVICE_H
#define VGPU_DEVICE_H

#include <stdbool.h>

#include "cuda_abi.h"
#include "nvml_abi.h"

/* -1: the container has no limits for it, or it is no device. Asked once, then remembered. */
int device_limits(CUdevice device);
int device_limits_nvml(nvmlDevice_t device);

/* The container sees it, but the agent gave it no share of it, and it is no MIG instance. Logged once. */
bool device_is_foreign(CUdevice device);

/* NVML's handle for a CUDA device, NULL if NVML does not know it or is not there. Loads NVML. */
nvmlDevice_t device_nvml(CUdevice device);

#endif
