/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory accounting of one process within its container: charge first, refund on failure.
 *
 * Decides whether an allocation fits. Must not know CUDA. Safe from any thread; never blocks, never exits, takes no lock
 * in shared memory. `device` is the index in the limits (the order of /etc/hami/limits), bytes are exact.
 */
#ifndef VGPU_ACCOUNT_H
#define VGPU_ACCOUNT_H

#include <stdbool.h>
#include <stdint.h>

/* Map the region, claim a slot, start the watcher: at the first call that needs it, again in a forked child.
   When no region can be mapped the process is held to its limits on a private one, and said so once. */
void account_attach(void);

/* Give everything back; at exit of the process. */
void account_detach(void);

/* Devices that have limits; 0: nothing is limited in this container. */
uint32_t account_device_count(void);

/* Index of the device with this text UUID ("GPU-...", "MIG-..."), -1 if the container has no limits for it. */
int account_device_of_uuid(const char *uuid);

/* Bytes; UINT64_MAX: unlimited. As last read from the file, which is at most one second old. */
uint64_t account_limit(int device);

/* Percent of device time 1..100; 100: unlimited. */
uint32_t account_core_pct(int device);

/* true: charged; false: it does not fit, nothing changed. `device` -1 or unlimited devices are always charged. */
bool account_charge(int device, uint64_t bytes);
void account_refund(int device, uint64_t bytes);

/* Charge without asking: memory the driver has already taken (context growth). May exceed the limit. */
void account_charge_anyway(int device, uint64_t bytes);

/* Bytes used by all live processes of the container. */
uint64_t account_used(int device);

/* Parts of the own use, for people. */
void account_note_context(int device, int64_t delta);
void account_note_module(int device, int64_t delta);

#endif
