/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory accounting of one process within its container: charge first, refund on failure.
 *
 * Decides whether an allocation fits. Must not know CUDA. Safe from any thread; never blocks, never exits, takes no lock
 * in shared memory. `device` is the index in the limits: the order of /etc/hami/limits, or the CUDA ordinal where the
 * limits come from the environment. Bytes are exact. Protocol: docs/adr/0008-limiter.md; use: docs/limiter-memory.md.
 */
#ifndef VGPU_ACCOUNT_H
#define VGPU_ACCOUNT_H

#include <stdbool.h>
#include <stdint.h>

#include "limits.h"
#include "region.h"

/* Map the region, claim a slot, start the watcher: at the first call that needs it, again in a forked child. Every
   function below does this by itself where it has to; a call at cuInit makes the time of it known.
   When the region cannot be mapped: with a limits file whose region exists, the process gets no slot and its allocations
   are refused, logged once, because each process on a private region would have the whole share. Where the pod has
   no volume for a region, or the limits come from the environment, the process gets a private region, also logged. */
void account_attach(void);

/* Release the slot and its charges. A later call attaches again. Only while the driver holds nothing for this process, so
   not at its exit: the driver releases memory after all exit handlers, and the slot is reclaimed after that. */
void account_detach(void);

/* Devices that have limits; 0: nothing is limited in this container. */
uint32_t account_device_count(void);

/* true: the limits came from the environment, devices are numbered by CUDA ordinal and have no UUID. */
bool account_by_ordinal(void);

/* Index of the device with this text UUID ("GPU-...", "MIG-..."), -1 if the container has no limits for it. */
int account_device_of_uuid(const char *uuid);

/* true: the limits came from the agent's file, which names every device of the container. */
bool account_names_devices(void);

/* Index of the device with this CUDA ordinal where account_by_ordinal(), else -1. */
int account_device_of_ordinal(int ordinal);

/* Text UUID; "" where the device is known by ordinal only or out of range. */
const char *account_uuid(int device);

/* Bytes that the container may use at most; UINT64_MAX: unlimited. As last read from the file, which is at most one second
   old. More than the request where the agent may grant more. */
uint64_t account_limit(int device);

/* Bytes that the container may use at this moment: the limit, or where that is above the request, what the agent grants at
   present, at least the request (room.h). */
uint64_t account_bound(int device);

/* true: the agent may grant more of the device than the request. */
bool account_may_burst(int device);

/* `bytes` are refused for good: if the present bound is the reason, log one line, seldom. */
void account_say_refused(int device, uint64_t bytes);

/* true: the limits cannot be read, so nothing is granted until they can. */
bool account_is_refused(void);

/* Percent of device time 1..100; 100: unlimited. */
uint32_t account_core_pct(int device);

/* The same while no other container computes on the device, where the policy makes a difference. */
uint32_t account_core_limit_pct(int device);

/* Called whenever a compute limit or the policy has changed, by the thread that has read them, without a lock. One for
   the process and its children; NULL: none. */
void account_when_cores_change(void (*changed)(void));

/* Called by the watching thread once in each of its periods (watch.h), without a lock. NULL: none. */
void account_each_period(void (*look)(void));

/* Some device of the container has a compute limit. A load or two: asked at every launch. */
bool account_is_core_limited(void);

/* 0 (highest) .. 7; 1 when nothing says otherwise. */
uint32_t account_priority(void);

enum limits_core_policy account_core_policy(void);

/* true: charged; false: it does not fit, nothing changed. `device` -1 or unlimited devices are always charged. */
bool account_charge(int device, uint64_t bytes);
void account_refund(int device, uint64_t bytes);

/* Charge without asking: memory the driver has already taken (context growth). May exceed the bound. */
void account_charge_anyway(int device, uint64_t bytes);

/* Release what dead processes of the container still hold, for a query that follows: at most every 100 ms, and for at most a
   twentieth of this process's time where there are many processes to look for. Nanoseconds in between. */
void account_reclaim(void);

/* Bytes used by all processes of the container, those included that have died since they were last looked for. */
uint64_t account_used(int device);

/* Bytes used by this process. */
uint64_t account_own_used(int device);

/* Use exceeds the present bound, because it shrank or because of account_charge_anyway. */
bool account_is_over(int device);

/* Processes that hold a slot, the dead not yet found included. */
uint32_t account_processes(void);

/* Live processes of the container that hold memory on `device`, at most `capacity` of them; how many there are. Pids as
   the caller's pid namespace knows them; processes of other pid namespaces are left out. */
struct account_process {
    uint32_t pid;
    uint64_t used_bytes;
};
uint32_t account_list(int device, struct account_process *processes, uint32_t capacity);

/* The container was seen to use the driver at this time. */
void account_touch(uint64_t now_ns);

/* Parts of the own use, for people. */
void account_note_context(int device, int64_t delta);
void account_note_module(int device, int64_t delta);

/* Lines of the region, for the compute budget and its figures. NULL: no such device. The own slot line is never NULL
   (without a slot in the region it is private memory). Valid until the next account_attach or account_detach. */
struct region_device *account_region_device(int device);
struct region_slot *account_own_slot(void);

/* Number of this process image among its ancestors: another one after each fork. One load and no more. Tables of
   pointers, handles and budgets that were filled under another number belong to the parent and must start empty. */
uint32_t account_incarnation(void);

/* Follow changes of the limits, trim slack and reclaim slots of dead processes; called by the thread of watch.h, or by
   charges where that could not be started. false: detached, and `watching` of fork.h is 0 again. */
bool account_tick(void);

/* Refunds of more than was used, in this process. 0 unless a caller is wrong. */
uint64_t account_errors(void);

#endif
