/* SPDX-License-Identifier: Apache-2.0 */
#include "account.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "account_fast.h"
#include "account_lease.h"
#include "fork.h"
#include "limits.h"
#include "platform.h"
#include "process.h"
#include "room.h"
#include "slot.h"
#include "watch.h"

#define MIB UINT64_C(1048576)
#define CHUNK_MAX (64 * MIB)
#define CHUNK_STEP UINT64_C(65536)
#define CHUNKS_OF_LIMIT 16u /* slack of all processes together: at most this part of a limit, once per process */
#define SLOT_PERIOD_NS UINT64_C(1000000000)     /* between two searches for a slot, because they read /proc */
#define RECLAIM_PERIOD_NS UINT64_C(200000000)   /* of all processes together; each looks once a WATCH_PERIOD_NS */
#define QUERY_PERIOD_NS UINT64_C(100000000)     /* between two searches for dead processes because of queries */
#define QUERY_PART 20u                          /* such searches take at most this part of the time */
#define REFUSED_PERIOD_NS UINT64_C(10000000000) /* between two lines about refusals */

#define READ(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)
#define WRITE(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELAXED)

/* Read by every thread without the lock, written with it. */
static uint64_t limit_bytes[REGION_DEVICES_MAX];
static uint64_t bound_bytes[REGION_DEVICES_MAX]; /* the highest bound of a request since the last tick */
static uint64_t bursts;                          /* bit per device: its limit is above the request */
static uint32_t core_limit_pct[REGION_DEVICES_MAX];
static uint32_t priority = 1;
static uint32_t core_policy;
static uint32_t by_ordinal;
static uint32_t refused;
static uint64_t errors;
static uint64_t reclaim_after_ns; /* because of queries */
struct account_view account_view;
static struct region_slot unslotted;
static struct region_slot *own_slot = &unslotted;
static struct region *region; /* into `regions`; the last one mapped */

/* Under the lock of fork.h, which is free in a child. */
static struct region regions[2];
static struct limits limits;
static struct limits_stamp stamp;
static union region_owner self;
static uint32_t slot = REGION_NO_SLOT;
static uint64_t slot_after_ns;
static bool unslotted_said;
static uint64_t turn_after_ns;
static uint64_t refused_after_ns; /* the next line about a refusal */
static uint64_t used_last_tick[REGION_DEVICES_MAX];
static uint32_t sees_everybody = 1;
static bool broken_said;
static void (*cores_changed)(void); /* read without it */
static void (*each_period)(void);   /* the same */

extern char **environ;

static void publish_limits(void)
{
    uint32_t held = 0;
    uint64_t above = 0;
    for (uint32_t i = 0; i < limits.device_count; i++) {
        WRITE(limit_bytes[i], limits.memory_limit_bytes[i]);
        WRITE(account_view.core_pct[i], limits.core_pct[i]);
        WRITE(core_limit_pct[i], limits.core_limit_pct[i]);
        held |= limits.core_pct[i] < 100;
        above |= (uint64_t)(limits.memory_limit_bytes[i] > limits.memory_bytes[i]) << i;
    }
    WRITE(account_view.core_limited, held);
    WRITE(bursts, above);
    WRITE(priority, limits.priority);
    WRITE(core_policy, limits.core_policy);
    WRITE(by_ordinal, limits.source == LIMITS_ENVIRONMENT);
    WRITE(refused, limits.source == LIMITS_REFUSED);
}

static void read_limits(void)
{
    char problem[256] = "";
    struct limits from_environment;
    struct limits fresh;
    const char *const *environment = (const char *const *)environ;
    bool readable = limits_from_environment(environment, &from_environment, problem, sizeof problem);
    platform_set_level(from_environment.log_level);
    switch (limits_read(LIMITS_PATH, &fresh, &stamp, problem, sizeof problem)) {
    case LIMITS_ABSENT:
        if (limits.source == LIMITS_FILE) return; /* it is being replaced */
        if (access(LIMITS_SHARED, F_OK) == 0) {
            platform_say(PLATFORM_ERROR, LIMITS_PATH " is missing; nothing can be allocated");
            limits_refuse(&limits);
            return;
        }
        if (!readable) platform_say(PLATFORM_ERROR, "%s", problem);
        limits = from_environment;
        return;
    case LIMITS_READ:
        if (limits.source == LIMITS_FILE && limits_update(&limits, &fresh)) return;
        limits = fresh;
        return;
    case LIMITS_BROKEN:
        if (limits.source == LIMITS_FILE) return; /* of the parent, good when it read them */
        platform_say(PLATFORM_ERROR, "%s; nothing can be allocated", problem);
        limits_refuse(&limits);
        return;
    }
}

/* A region other than the last one into the free half, so that a fork in the middle sees the old one or the new one. */
static struct region *free_region(void)
{
    return READ(region) == &regions[0] ? &regions[1] : &regions[0];
}

static bool map_private(const struct region_want *want)
{
    struct region *fresh = free_region();
    if (!region_open_private(want, fresh)) return false;
    WRITE(region, fresh);
    return true;
}

static bool is_for_limits(const struct region *mapped)
{
    if (mapped->device_count != limits.device_count) return false;
    for (uint32_t i = 0; i < limits.device_count; i++)
        if (strncmp(mapped->devices[i].uuid, limits.uuid[i], REGION_UUID) != 0) return false;
    return true;
}

/* Once in the life of a process and its children, though it is tried again and again. */
static void say_unslotted(const char *problem)
{
    if (!unslotted_said) platform_say(PLATFORM_ERROR, "no device memory for this process: %s", problem);
    unslotted_said = true;
}

static bool map_region(void)
{
    struct region_want want = {.device_count = limits.device_count, .uuids = (const char (*)[REGION_UUID])limits.uuid};
    struct region *mapped = READ(region);
    if (mapped && is_for_limits(mapped)) return true; /* inherited, or kept when this process detached */
    if (limits.source == LIMITS_REFUSED) return map_private(&want);
    char path[4096] = LIMITS_REGION_PATH;
    bool is_default = true;
    if (limits.source == LIMITS_ENVIRONMENT) {
        const char *named = getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE");
        is_default = !named || !*named;
        int length =
            snprintf(path, sizeof path, "%s" REGION_NAME_SUFFIX, is_default ? LIMITS_REGION_PATH_DEFAULT : named);
        if (length >= (int)sizeof path) path[0] = '\0';
    }
    char problem[256];
    struct region *fresh = free_region();
    int error = region_open(path, &want, fresh, problem, sizeof problem);
    if (error && !is_default) {
        /* Better than a share for each process: they meet at the default, all of them for the same reason. */
        platform_say(PLATFORM_NOTICE, "region at the default path: %s", problem);
        error = region_open(LIMITS_REGION_PATH_DEFAULT REGION_NAME_SUFFIX, &want, fresh, problem, sizeof problem);
    }
    if (!error) {
        WRITE(region, fresh);
        return true;
    }
    /* With a region for each process, each would have the whole share: only where the pod has no volume for one. */
    if (limits.source == LIMITS_FILE && error != ENOENT) {
        say_unslotted(problem);
        return false;
    }
    platform_say(PLATFORM_ERROR, "cannot share accounts with other processes, limits hold for this one alone: %s",
                 problem);
    return map_private(&want);
}

/* A process without a slot is granted nothing: memory that is counted nowhere would exceed the share. */
static bool take_slot(void)
{
    slot = slot_claim(READ(region), &self);
    if (slot != REGION_NO_SLOT) return true;
    char problem[80];
    (void)snprintf(problem, sizeof problem, "%u processes of its container use the GPU already",
                   READ(region)->slot_count);
    say_unslotted(problem);
    return false;
}

static void join(void)
{
    slot_after_ns = platform_now_ns() + SLOT_PERIOD_NS;
    if (map_region() && take_slot()) {
        struct region *mapped = READ(region);
        for (uint32_t i = 0; i < limits.device_count; i++) {
            WRITE(account_view.own_shares[i], lease_share(mapped, i, slot));
            used_last_tick[i] = UINT64_MAX;
        }
        WRITE(own_slot, &mapped->slots[slot]);
        return;
    }
    for (uint32_t i = 0; i < limits.device_count; i++)
        WRITE(account_view.own_shares[i], NULL);
    WRITE(own_slot, &unslotted);
    slot = REGION_NO_SLOT;
}

/* Under the lock, as all that follows until the next heading. The page is the same for all processes of the container, so
   they have one bound. Not in a private region: each process would have the bound, and the agent would not see its use.
   Not without the watching thread: nothing would revoke the slack when the bound falls. */
static uint64_t bound_now(uint32_t device)
{
    uint64_t least = limits.memory_bytes[device];
    uint64_t most = limits.memory_limit_bytes[device];
    if (least == most || slot == REGION_NO_SLOT || !READ(region)->shared || !READ(fork_words->watching)) return least;
    uint64_t granted = room_bytes(limits.uuid[device], platform_now_ns());
    return granted < least ? least : granted > most ? most : granted;
}

/* Where a bound fell below the leases, the slack of all processes is revoked, so that each further charge is compared with
   the new one. true: some bound is another one. */
static bool follow_bounds(void)
{
    bool changed = false;
    if (READ(bursts)) room_look();
    for (uint32_t i = 0; i < limits.device_count; i++) {
        uint64_t before = READ(bound_bytes[i]);
        uint64_t bound = bound_now(i);
        WRITE(bound_bytes[i], bound);
        changed |= bound != before;
        if (bound >= before || slot == REGION_NO_SLOT || lease_total(READ(region), i) <= bound) continue;
        uint32_t slots = lease_slots(READ(region));
        for (uint32_t other = 0; other < slots; other++)
            lease_revoke(READ(region), i, other);
    }
    return changed;
}

static bool watch_tick(void)
{
    bool attached = account_tick();
    void (*look)(void) = READ(each_period);
    if (attached && look) look();
    return attached;
}

static void attach_locked(void)
{
    if (account_is_attached()) return;
    self = process_self();
    read_limits();
    uint32_t count = limits.device_count;
    WRITE(account_view.device_count, 0);
    if (count) join();
    publish_limits();
    (void)follow_bounds();
    WRITE(account_view.device_count, count);
    __atomic_store_n(&fork_words->attached, 1, __ATOMIC_RELEASE);
    if (count && !watch_start(watch_tick)) platform_say(PLATFORM_NOTICE, "no thread to follow changes of the limits");
}

void account_attach(void)
{
    if (account_is_attached()) return;
    int saved = errno;
    (void)fork_incarnation();
    fork_lock();
    attach_locked();
    fork_unlock();
    errno = saved;
}

void account_detach(void)
{
    if (!account_is_attached()) return;
    int saved = errno;
    fork_lock();
    if (account_is_attached()) {
        __atomic_store_n(&fork_words->attached, 0, __ATOMIC_RELEASE);
        if (slot != REGION_NO_SLOT) slot_release(READ(region), slot, &self);
        slot = REGION_NO_SLOT;
    }
    fork_unlock();
    errno = saved;
}

/* Slack that goes with a raise: so little that all processes together leave most of the limit to the next request. */
static uint64_t chunk_for(uint64_t limit)
{
    uint64_t chunk = limit == LIMITS_UNLIMITED ? CHUNK_MAX : limit / CHUNKS_OF_LIMIT / (lease_slots(READ(region)) + 1);
    if (chunk > CHUNK_MAX) chunk = CHUNK_MAX;
    return chunk / CHUNK_STEP * CHUNK_STEP;
}

/* The state that a refused request saw, to check it again without the lock. */
struct refusal {
    const struct region *region;
    union region_total_word seen;
    union region_owner self;
    uint64_t bound;
    uint32_t slot;
    bool final;
};

/* The bound at the end of a raise decides, so a process that was stopped in between gets nothing by an older one. */
static enum lease_answer request_within(uint32_t device, uint64_t bytes, struct refusal *refusal)
{
    for (;;) {
        refusal->bound = bound_now(device);
        if (refusal->bound > READ(bound_bytes[device])) WRITE(bound_bytes[device], refusal->bound);
        enum lease_answer answer = lease_request(refusal->region, device, slot, bytes, refusal->bound,
                                                 chunk_for(refusal->bound), &refusal->seen);
        if (answer != LEASE_GRANTED || bound_now(device) >= refusal->bound) return answer;
        (void)lease_refund(lease_share(refusal->region, device, slot), bytes);
        lease_revoke(refusal->region, device, slot);
    }
}

static bool request(int device, uint64_t bytes, bool anyway, struct refusal *refusal)
{
    account_attach();
    if (!__atomic_load_n(&fork_words->watching, __ATOMIC_RELAXED))
        (void)account_tick(); /* no thread could be started: then each charge follows the limits */
    fork_lock();
    attach_locked(); /* detached since */
    if (slot == REGION_NO_SLOT && limits.device_count && platform_now_ns() >= slot_after_ns) join();
    bool granted = true;
    bool counts = device >= 0 && (uint32_t)device < READ(account_view.device_count) && bytes;
    bool unlimited = anyway || (counts && limits.memory_bytes[device] == LIMITS_UNLIMITED);
    *refusal = (struct refusal){.region = READ(region), .self = self, .slot = slot, .final = true};
    if (counts && slot == REGION_NO_SLOT) {
        granted = unlimited;
    } else if (counts) {
        enum lease_answer answer =
            anyway ? lease_request(refusal->region, (uint32_t)device, slot, bytes, LIMITS_UNLIMITED, 0, &refusal->seen)
                   : request_within((uint32_t)device, bytes, refusal);
        granted = answer == LEASE_GRANTED;
        refusal->final = answer == LEASE_IMPOSSIBLE;
        if (!granted && unlimited) {
            granted = true; /* more than can be counted, and more than any driver will give */
            __atomic_fetch_add(&errors, 1, __ATOMIC_RELAXED);
        }
    }
    fork_unlock();
    return granted;
}

/* The refusal holds also after the dead have been looked for. Without the lock, because that reads /proc. */
static bool is_refused(int device, uint64_t bytes, const struct refusal *refusal)
{
    if (refusal->final) return true;
    return slot_reclaim(refusal->region, &refusal->self, refusal->slot).reclaimed == 0 &&
           lease_still_refused(refusal->region, (uint32_t)device, bytes, refusal->bound, &refusal->seen);
}

/* The agent has granted more since, perhaps in another file. */
static bool has_grown(int device, const struct refusal *refusal)
{
    if (!account_may_burst(device)) return false;
    fork_lock();
    room_look();
    bool grown = bound_now((uint32_t)device) > refusal->bound;
    fork_unlock();
    return grown;
}

static __attribute__((noinline)) bool charge_slowly(int device, uint64_t bytes)
{
    int saved = errno;
    struct refusal refusal;
    bool looked = false;
    bool granted = request(device, bytes, false, &refusal);
    while (!granted) {
        if (is_refused(device, bytes, &refusal)) {
            if (looked || !has_grown(device, &refusal)) break;
            looked = true;
        }
        granted = request(device, bytes, false, &refusal);
    }
    if (!granted) atomic_add8(&READ(own_slot)->refusals, 1);
    errno = saved;
    return granted;
}

bool account_charge(int device, uint64_t bytes)
{
    return device < 0 || account_charge_fast(device, bytes) || charge_slowly(device, bytes);
}

void account_charge_anyway(int device, uint64_t bytes)
{
    int saved = errno;
    struct refusal refusal;
    if (device >= 0 && !account_charge_fast(device, bytes)) (void)request(device, bytes, true, &refusal);
    errno = saved;
}

void account_refund(int device, uint64_t bytes)
{
    /* NULL in a child, too: it gives nothing back that its parent was charged for. */
    struct region_share *share = account_own_share(device);
    if (share && lease_refund(share, bytes) != bytes) {
        __atomic_fetch_add(&errors, 1, __ATOMIC_RELAXED);
        atomic_add8(&READ(region)->control->errors, 1);
    }
}

void account_touch(uint64_t now_ns)
{
    struct region *mapped = READ(region);
    if (account_is_attached() && mapped) WRITE(mapped->control->touched_ns, now_ns);
}

static bool is_device(int device)
{
    account_attach();
    return device >= 0 && (uint32_t)device < READ(account_view.device_count);
}

uint32_t account_device_count(void)
{
    account_attach();
    return READ(account_view.device_count);
}

bool account_by_ordinal(void)
{
    account_attach();
    return READ(by_ordinal);
}

int account_device_of_uuid(const char *uuid)
{
    uint32_t count = account_device_count();
    if (limits.source == LIMITS_REFUSED) return 0;
    for (uint32_t i = 0; i < count; i++)
        if (*limits.uuid[i] && strcmp(limits.uuid[i], uuid) == 0) return (int)i;
    return -1;
}

bool account_names_devices(void)
{
    account_attach();
    return limits.source == LIMITS_FILE;
}

int account_device_of_ordinal(int ordinal)
{
    return is_device(ordinal) && READ(by_ordinal) ? ordinal : -1;
}

const char *account_uuid(int device)
{
    return is_device(device) ? limits.uuid[device] : "";
}

uint64_t account_limit(int device)
{
    return is_device(device) ? READ(limit_bytes[device]) : LIMITS_UNLIMITED;
}

bool account_may_burst(int device)
{
    return is_device(device) && (READ(bursts) >> device & 1);
}

uint64_t account_bound(int device)
{
    if (!account_may_burst(device)) return account_limit(device);
    fork_lock();
    uint64_t bound = bound_now((uint32_t)device);
    fork_unlock();
    return bound;
}

void account_say_refused(int device, uint64_t bytes)
{
    if (!account_may_burst(device)) return;
    uint64_t now_ns = platform_now_ns();
    uint64_t used = account_used(device);
    fork_lock();
    uint64_t requested = limits.memory_bytes[device];
    uint64_t bound = bound_now((uint32_t)device);
    uint64_t limit = limits.memory_limit_bytes[device];
    bool fits = bytes <= limit && used <= limit - bytes;
    bool is_due = bound < limit && fits && now_ns >= refused_after_ns;
    if (is_due) refused_after_ns = now_ns + REFUSED_PERIOD_NS;
    fork_unlock();
    if (is_due)
        platform_say(PLATFORM_ERROR,
                     "device %s: %llu bytes refused, %llu MiB in use; "
                     "request %llu MiB, present bound %llu MiB, limit %llu MiB",
                     account_uuid(device), (unsigned long long)bytes, (unsigned long long)(used / MIB),
                     (unsigned long long)(requested / MIB), (unsigned long long)(bound / MIB),
                     (unsigned long long)(limit / MIB));
}

bool account_is_refused(void)
{
    account_attach();
    return READ(refused);
}

uint32_t account_core_pct(int device)
{
    return is_device(device) ? account_core_pct_fast(device) : 100;
}

uint32_t account_core_limit_pct(int device)
{
    return is_device(device) ? READ(core_limit_pct[device]) : 100;
}

bool account_is_core_limited(void)
{
    account_attach();
    return READ(account_view.core_limited);
}

uint32_t account_priority(void)
{
    account_attach();
    return READ(priority);
}

enum limits_core_policy account_core_policy(void)
{
    account_attach();
    return (enum limits_core_policy)READ(core_policy);
}

static __attribute__((noinline)) void reclaim_for_query(uint64_t after_ns)
{
    int saved = errno;
    uint64_t began_ns = platform_now_ns();
    fork_lock();
    bool mine = account_is_attached() && slot != REGION_NO_SLOT && READ(reclaim_after_ns) == after_ns;
    if (mine) WRITE(reclaim_after_ns, began_ns + QUERY_PERIOD_NS);
    struct region *mapped = READ(region);
    union region_owner me = self;
    uint32_t own = slot;
    fork_unlock();
    if (mine) { /* without the lock: reads /proc */
        (void)slot_reclaim(mapped, &me, own);
        uint64_t ended_ns = platform_now_ns();
        uint64_t pause_ns = (ended_ns - began_ns) * QUERY_PART;
        WRITE(reclaim_after_ns, ended_ns + (pause_ns > QUERY_PERIOD_NS ? pause_ns : QUERY_PERIOD_NS));
    }
    errno = saved;
}

void account_reclaim(void)
{
    uint64_t after_ns = READ(reclaim_after_ns);
    if (platform_recent_ns() >= after_ns) reclaim_for_query(after_ns);
}

uint64_t account_used(int device)
{
    return is_device(device) && READ(account_view.own_shares[device]) ? lease_used(READ(region), (uint32_t)device) : 0;
}

uint64_t account_own_used(int device)
{
    if (!is_device(device) || !READ(account_view.own_shares[device])) return 0;
    return lease_used_by(READ(account_view.own_shares[device]));
}

bool account_is_over(int device)
{
    return account_used(device) > account_bound(device);
}

uint32_t account_processes(void)
{
    return account_device_count() && READ(account_view.own_shares[0]) ? slot_count_taken(READ(region)) : 1;
}

uint32_t account_list(int device, struct account_process *processes, uint32_t capacity)
{
    if (!is_device(device) || !READ(account_view.own_shares[device])) return 0;
    struct region *mapped = READ(region);
    uint32_t seen = atomic_load4(mapped->slots_seen);
    uint32_t count = 0;
    for (uint32_t i = 0; i < seen && i < mapped->slot_count; i++) {
        union region_owner owner;
        owner.word = atomic_load16(&mapped->slots[i].owner);
        uint64_t used = lease_used_by(lease_share(mapped, (uint32_t)device, i));
        if (!owner.pid || !used || owner.pid_namespace != self.pid_namespace) continue;
        if (process_life(&self, &owner) == PROCESS_DEAD) continue;
        if (count < capacity) processes[count] = (struct account_process){.pid = owner.pid, .used_bytes = used};
        count++;
    }
    return count;
}

static void note(int device, int64_t delta, size_t field)
{
    if (!is_device(device) || !READ(account_view.own_shares[device])) return;
    atomic_add8((uint64_t *)(void *)((char *)READ(account_view.own_shares[device]) + field), (uint64_t)delta);
}

void account_note_context(int device, int64_t delta)
{
    note(device, delta, offsetof(struct region_share, context_bytes));
}

void account_note_module(int device, int64_t delta)
{
    note(device, delta, offsetof(struct region_share, module_bytes));
}

struct region_device *account_region_device(int device)
{
    return is_device(device) && READ(region) ? &READ(region)->devices[device] : NULL;
}

struct region_slot *account_own_slot(void)
{
    account_attach();
    return READ(own_slot);
}

uint32_t account_incarnation(void)
{
    return fork_incarnation();
}

uint64_t account_errors(void)
{
    return READ(errors);
}

/* The first good file after a broken one: attach again at the next call, to the region shared by all processes. */
static void attach_again(void)
{
    __atomic_store_n(&fork_words->attached, 0, __ATOMIC_RELEASE);
    if (slot != REGION_NO_SLOT) slot_release(READ(region), slot, &self);
    slot = REGION_NO_SLOT;
    limits.source = LIMITS_NONE;
    WRITE(region, NULL);
}

void account_when_cores_change(void (*changed)(void))
{
    WRITE(cores_changed, changed);
}

void account_each_period(void (*look)(void))
{
    WRITE(each_period, look);
}

static bool have_same_cores(const struct limits *a, const struct limits *b)
{
    return a->core_policy == b->core_policy && memcmp(a->core_pct, b->core_pct, sizeof a->core_pct) == 0 &&
           memcmp(a->core_limit_pct, b->core_limit_pct, sizeof a->core_limit_pct) == 0;
}

/* true: a compute limit or the policy is another one. */
static bool follow_limits(void)
{
    static struct limits fresh;
    char problem[256] = "";
    if ((limits.source != LIMITS_FILE && limits.source != LIMITS_REFUSED) || !limits_changed(LIMITS_PATH, &stamp))
        return false;
    bool good = limits_read(LIMITS_PATH, &fresh, &stamp, problem, sizeof problem) == LIMITS_READ;
    if (good && limits.source == LIMITS_REFUSED) {
        attach_again();
        return false;
    }
    bool other_cores = good && !have_same_cores(&limits, &fresh);
    if (!good || !limits_update(&limits, &fresh)) {
        if (!broken_said)
            platform_say(PLATFORM_ERROR, "new limits not taken, the last good ones hold: %s",
                         *problem ? problem : "they are about other devices");
        broken_said = true;
        return false;
    }
    broken_said = false;
    publish_limits();
    return other_cores;
}

static void mark_over(const struct region *mapped, uint64_t now_ns)
{
    for (uint32_t i = 0; i < mapped->device_count; i++) {
        uint64_t *since = &mapped->devices[i].over_since_ns;
        uint64_t seen = atomic_load8(since);
        bool over = lease_used(mapped, i) > READ(bound_bytes[i]);
        if (over != (seen != 0)) (void)atomic_swap8(since, seen, over ? now_ns : 0);
    }
}

/* Once in a period one process reclaims the slots of dead ones; if it is killed, the next period begins all the same. A
   process that cannot judge all owners does not keep the others from it. */
static bool is_my_turn(uint64_t now_ns)
{
    if (now_ns < turn_after_ns) return false;
    turn_after_ns = now_ns + RECLAIM_PERIOD_NS;
    if (!READ(sees_everybody)) return true;
    uint64_t *after = &READ(region)->control->reclaim_after_ns;
    uint64_t seen = atomic_load8(after);
    if (seen > now_ns && seen - now_ns <= RECLAIM_PERIOD_NS) {
        turn_after_ns = seen;
        return false;
    }
    return atomic_swap8(after, seen, now_ns + RECLAIM_PERIOD_NS);
}

static void trim_own(void)
{
    for (uint32_t i = 0; i < limits.device_count; i++) {
        uint64_t used = lease_used_by(READ(account_view.own_shares[i]));
        if (used == used_last_tick[i]) lease_trim(READ(region), i, slot, chunk_for(READ(bound_bytes[i])));
        used_last_tick[i] = used;
    }
}

bool account_tick(void)
{
    uint64_t now_ns = platform_now_ns();
    fork_lock();
    bool attached = account_is_attached();
    bool other_cores = attached && follow_limits();
    attached = attached && account_is_attached();
    bool changed = attached && follow_bounds();
    bool slotted = attached && slot != REGION_NO_SLOT;
    bool turn = slotted && is_my_turn(now_ns);
    if (slotted) trim_own();
    struct region *mapped = READ(region);
    union region_owner me = self;
    uint32_t mine = slot;
    if (!attached) __atomic_store_n(&fork_words->watching, 0, __ATOMIC_RELAXED);
    fork_unlock();
    void (*tell)(void) = READ(cores_changed);
    if (other_cores && tell) tell();
    /* Without the lock: reads /proc and every slot. Regions are never unmapped. */
    if (turn) WRITE(sees_everybody, slot_reclaim(mapped, &me, mine).unknown == 0);
    if (turn || (slotted && changed)) mark_over(mapped, now_ns);
    return attached;
}
