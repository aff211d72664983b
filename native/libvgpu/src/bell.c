/* SPDX-License-Identifier: Apache-2.0 */
/* See bell.h. `state` belongs to the thread of watch.h. Locks taken here: none. Called with hooks active: yes. */
#include "bell.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "account.h"
#include "account_fast.h"
#include "platform.h"
#include "priority.h"
#include "watch.h"

enum { TICKS_PER_HOLD = 2 };

#define TICK_LEAST_NS UINT64_C(1000000)
#define TICK_MOST_NS UINT64_C(25000000)

static struct {
    struct region_slot *slot; /* whose launches these are */
    uint64_t launches;
    uint64_t changed_ns; /* when that was last seen to change */
    uint64_t idle_ns;    /* since when the device has nothing to do for this process; 0: not known */
    uint64_t devices_ns; /* when `devices` were looked up */
    uint32_t device_count;
    const struct priority_device *devices[REGION_DEVICES_MAX]; /* of this container */
    struct bell_gaps gaps;
} state;

uint32_t bell_armed = 1;
uint32_t bell_waiting;
static uint64_t settled_launches;
static uint64_t settled_ns;
static uint32_t has_lower; /* a container of a lower priority has a share of one of the devices */

/* A new socket each time: programs close descriptors that they do not know, and reuse their numbers. */
void bell_send(const void *bytes, size_t length)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = BELL_PATH};
    int saved = errno;
    long handle = syscall(SYS_socket, AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (handle >= 0) {
        (void)syscall(SYS_sendto, handle, bytes, length, MSG_DONTWAIT | MSG_NOSIGNAL, &address, sizeof address);
        syscall(SYS_close, handle);
    }
    errno = saved;
}

static void ring(char byte)
{
    bell_send(&byte, 1);
}

__attribute__((noinline, cold)) void bell_ring(void)
{
    if (__atomic_exchange_n(&bell_armed, 0, __ATOMIC_ACQ_REL) == 0) return;
    ring(BELL_ACTIVE);
    if (__atomic_load_n(&has_lower, __ATOMIC_RELAXED)) watch_wake();
}

void bell_reset(void)
{
    __atomic_store_n(&bell_armed, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&bell_waiting, 0, __ATOMIC_RELAXED);
}

void bell_settled(void)
{
    __atomic_fetch_sub(&bell_waiting, 1, __ATOMIC_RELEASE);
    if (!__atomic_load_n(&has_lower, __ATOMIC_RELAXED)) return;
    uint64_t launches = __atomic_load_n(&account_own_slot()->launches, __ATOMIC_RELAXED);
    __atomic_store_n(&settled_ns, platform_now_ns(), __ATOMIC_RELAXED);
    __atomic_store_n(&settled_launches, launches, __ATOMIC_RELEASE);
}

static bool look_for_lower(uint64_t now_ns)
{
    if (state.devices_ns == 0 || now_ns - state.devices_ns >= WATCH_PERIOD_NS) {
        const struct priority_page *page = priority_page();
        uint32_t count = account_device_count();
        state.devices_ns = now_ns;
        state.device_count = count < REGION_DEVICES_MAX ? count : REGION_DEVICES_MAX;
        for (uint32_t i = 0; i < state.device_count; i++)
            state.devices[i] = priority_device(page, account_uuid((int)i));
    }
    uint32_t level = account_priority();
    bool found = false;
    for (uint32_t i = 0; i < state.device_count; i++)
        if (state.devices[i] != NULL)
            found |= __atomic_load_n(&state.devices[i]->lowest_present, __ATOMIC_RELAXED) > level;
    __atomic_store_n(&has_lower, found, __ATOMIC_RELAXED);
    return found;
}

/* A launch that is counted meanwhile either finds `bell_armed` and rings, or is found here, or by the agent's poll. */
static void declare_idle(uint64_t launches)
{
    __atomic_store_n(&state.slot->idle_launches, launches, __ATOMIC_RELAXED);
    __atomic_store_n(&bell_armed, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&state.slot->launches, __ATOMIC_SEQ_CST) == launches)
        ring(BELL_IDLE);
    else
        bell_ring();
}

uint64_t bell_tick(uint64_t now_ns)
{
    if (!account_is_attached()) return WATCH_PERIOD_NS;
    struct region_slot *slot = account_own_slot();
    uint64_t launches = __atomic_load_n(&slot->launches, __ATOMIC_RELAXED);
    if (slot != state.slot) {
        memset(&state, 0, sizeof state);
        state.slot = slot;
        state.changed_ns = now_ns;
    }
    bool fine = look_for_lower(now_ns);
    if (launches != state.launches) {
        if (state.idle_ns > 0) bell_note_gap(&state.gaps, now_ns, now_ns - state.idle_ns);
        state.launches = launches;
        state.changed_ns = now_ns;
    }
    bool settled = fine && __atomic_load_n(&settled_launches, __ATOMIC_ACQUIRE) == launches;
    state.idle_ns = settled ? __atomic_load_n(&settled_ns, __ATOMIC_RELAXED) : 0;
    if (__atomic_load_n(&bell_armed, __ATOMIC_RELAXED)) {
        if (launches == __atomic_load_n(&slot->idle_launches, __ATOMIC_RELAXED)) return WATCH_PERIOD_NS;
        bell_ring(); /* a launch was counted while the process declared itself idle */
    }
    uint64_t usual = bell_hold(&state.gaps, now_ns);
    uint64_t over_ns = settled ? state.idle_ns + usual : state.changed_ns + BELL_HOLD_MOST_NS;
    bool waiting = __atomic_load_n(&bell_waiting, __ATOMIC_ACQUIRE) > 0;
    if (waiting)
        state.changed_ns = now_ns;
    else if (now_ns >= over_ns) {
        declare_idle(launches);
        return WATCH_PERIOD_NS;
    }
    if (!fine) return WATCH_PERIOD_NS;
    uint64_t tick = usual / TICKS_PER_HOLD;
    tick = tick < TICK_LEAST_NS ? TICK_LEAST_NS : tick < TICK_MOST_NS ? tick : TICK_MOST_NS;
    return settled && !waiting && over_ns - now_ns < tick ? over_ns - now_ns : tick;
}
