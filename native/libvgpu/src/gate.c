/* SPDX-License-Identifier: Apache-2.0 */
/* See gate.h. `state` belongs to the thread of watch.h. Locks taken here: none. */
#include "gate.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "account.h"
#include "atomic.h"
#include "bell.h"
#include "fork.h"
#include "platform.h"
#include "watch.h"

#define BLOCK_BYTES (UINT64_C(1) << 16)
#define LINES (BLOCK_BYTES / 64 - 1)

/* One thread that has called the driver; written by it alone while it lives. */
struct line {
    uint32_t thread; /* its number in the kernel; 0: free */
    uint32_t depth;  /* calls that it is in, one within the other */
    uint64_t calls;
    uint64_t reserved[6];
};

struct block {
    uint32_t incarnation; /* of the process whose threads these are */
    uint32_t used;        /* lines that were ever taken, from the first on */
    struct block *next;
    uint64_t reserved1[6];
    struct line lines[LINES];
};
_Static_assert(sizeof(struct line) == 64, "a line is one cache line");
_Static_assert(sizeof(struct block) == BLOCK_BYTES, "block");

uint32_t gate_mode = GATE_UNKNOWN;
const struct gate_page *gate_page;
uint32_t gate_bound;

static struct block *blocks; /* of this process; in a child, of its parent until its first call */
static uint64_t wished_ns;   /* when a waiting thread was last reported */
static uint32_t uncounted;   /* there was no memory to count a thread */

static __thread struct {
    struct line *line;
    uint32_t incarnation; /* of the process that has the line */
    bool passes;          /* the limiter's own thread */
} own;

static struct {
    uint32_t incarnation;
    uint64_t calls; /* of all lines, when they were last written to the region */
    uint64_t touched_ns;
    uint64_t reported_ns;
    struct gate_report report; /* the last one */
} state;

/* --- the file --- */

static const struct gate_page *map_page(const char *path)
{
    const struct gate_page *page = platform_map(path, sizeof *page, NULL);
    if (!page || (page->magic == GATE_MAGIC && page->layout == GATE_LAYOUT)) return page;
    platform_unmap(page, sizeof *page);
    return NULL;
}

/* Threads that come at once all look; the first answer and one mapping are kept. A process that could not open the file
   reports nothing, so that the agent does not park it. */
static void look_for_page(void)
{
    uint32_t unknown = GATE_UNKNOWN;
    const struct gate_page *none = NULL;
    const struct gate_page *page = map_page(GATE_PATH);
    if (!page) page = map_page(GATE_QUANTUM_PATH);
    if (page && !__atomic_compare_exchange_n(&gate_page, &none, page, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        platform_unmap(page, sizeof *page);
    __atomic_compare_exchange_n(&gate_mode, &unknown, page ? GATE_PRESENT : GATE_NONE, false, __ATOMIC_ACQ_REL,
                                __ATOMIC_ACQUIRE);
}

/* --- lines --- */

static struct block *first_block(void)
{
    struct block *block = __atomic_load_n(&blocks, __ATOMIC_ACQUIRE);
    return block && block->incarnation == fork_incarnation() ? block : NULL;
}

static bool lives(uint32_t thread)
{
    int saved = errno;
    bool gone = syscall(SYS_tgkill, getpid(), thread, 0) != 0 && errno == ESRCH;
    errno = saved;
    return !gone;
}

static bool take(struct block *block, uint32_t number, uint32_t before, uint32_t thread)
{
    struct line *line = &block->lines[number];
    if (!__atomic_compare_exchange_n(&line->thread, &before, thread, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return false;
    __atomic_store_n(&line->depth, 0, __ATOMIC_RELEASE);
    uint32_t used = __atomic_load_n(&block->used, __ATOMIC_ACQUIRE);
    while (used <= number &&
           !__atomic_compare_exchange_n(&block->used, &used, number + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    }
    return true;
}

/* Lines of threads that have ended are free again, but for one that has this thread's number. */
static struct line *find_line(uint32_t thread, bool looks_for_dead)
{
    for (struct block *block = first_block(); block; block = block->next) {
        for (uint32_t i = 0; i < LINES; i++) {
            uint32_t owner = __atomic_load_n(&block->lines[i].thread, __ATOMIC_RELAXED);
            bool is_free = owner == 0 || owner == thread || (looks_for_dead && !lives(owner));
            if (is_free && take(block, i, owner, thread)) return &block->lines[i];
        }
    }
    return NULL;
}

static struct line *new_line(uint32_t thread)
{
    void *memory = mmap(NULL, BLOCK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    struct block *fresh = memory;
    fresh->incarnation = fork_incarnation();
    fresh->lines[0].thread = thread;
    fresh->used = 1;
    struct block *seen = __atomic_load_n(&blocks, __ATOMIC_ACQUIRE);
    do
        fresh->next = seen && seen->incarnation == fresh->incarnation ? seen : NULL; /* else the parent's */
    while (!__atomic_compare_exchange_n(&blocks, &seen, fresh, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    return &fresh->lines[0];
}

static __attribute__((noinline)) struct line *claim_line(void)
{
    int saved = errno;
    uint32_t thread = (uint32_t)syscall(SYS_gettid);
    struct line *line = find_line(thread, false);
    if (!line) line = find_line(thread, true);
    if (!line) line = new_line(thread);
    own.line = line;
    own.incarnation = fork_incarnation();
    errno = saved;
    return line;
}

/* --- entering --- */

bool gate_is_leased(const struct gate_page *page)
{
    uint64_t until_ns = __atomic_load_n(&page->lease_until_ns, __ATOMIC_ACQUIRE);
    return until_ns == 0 || platform_now_ns() < until_ns;
}

static void report_waiting(void)
{
    uint64_t now = platform_now_ns();
    uint64_t last = __atomic_load_n(&wished_ns, __ATOMIC_RELAXED);
    if (last > 0 && now - last < GATE_WAITS_NS) return;
    if (__atomic_compare_exchange_n(&wished_ns, &last, now, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        bell_send(&(char){GATE_WAITS}, 1);
}

static __attribute__((noinline)) void wait_until_open(void)
{
    for (;;) {
        uint32_t seen = __atomic_load_n(&gate_page->state, __ATOMIC_ACQUIRE);
        if (seen == GATE_OPEN || !gate_is_leased(gate_page)) return;
        report_waiting();
        platform_futex_wait((uint32_t *)(uintptr_t)&gate_page->state, seen, GATE_WAITS_NS);
    }
}

bool gate_enter(void)
{
    if (__builtin_expect(__atomic_load_n(&gate_mode, __ATOMIC_ACQUIRE) == GATE_UNKNOWN, 0)) look_for_page();
    if (gate_is_absent() || own.passes) return false;
    struct line *line = own.line;
    if (__builtin_expect(!line || own.incarnation != fork_incarnation(), 0)) line = claim_line();
    if (!line) {
        __atomic_store_n(&uncounted, 1, __ATOMIC_RELEASE);
        wait_until_open();
        return false;
    }
    uint32_t depth = line->depth;
    if (depth > 0) {
        __atomic_store_n(&line->depth, depth + 1, __ATOMIC_RELAXED);
        return true;
    }
    for (;;) {
        ATOMIC_STEP(true);
        __atomic_store_n(&line->depth, 1, __ATOMIC_SEQ_CST);
        ATOMIC_STEP(false);
        if (!gate_is_closed()) break;
        ATOMIC_STEP(true);
        __atomic_store_n(&line->depth, 0, __ATOMIC_RELEASE);
        wait_until_open();
    }
    __atomic_store_n(&line->calls, line->calls + 1, __ATOMIC_RELAXED);
    return true;
}

void gate_leave(void)
{
    struct line *line = own.line;
    uint32_t depth = line->depth - 1;
    __atomic_store_n(&line->depth, depth, __ATOMIC_RELEASE);
    if (depth == 0 && __builtin_expect(gate_is_closed(), 0)) watch_wake();
}

void gate_reset(void)
{
    __atomic_store_n(&gate_bound, 0, __ATOMIC_RELAXED);
}

/* --- reporting --- */

/* A thread that ended in a call is not in it any more. */
static bool is_inside(uint64_t *calls)
{
    bool inside = __atomic_load_n(&uncounted, __ATOMIC_ACQUIRE);
    *calls = 0;
    for (struct block *block = first_block(); block; block = block->next) {
        uint32_t used = __atomic_load_n(&block->used, __ATOMIC_ACQUIRE);
        for (uint32_t i = 0; i < used; i++) {
            const struct line *line = &block->lines[i];
            uint32_t thread = __atomic_load_n(&line->thread, __ATOMIC_ACQUIRE);
            *calls += __atomic_load_n(&line->calls, __ATOMIC_RELAXED);
            ATOMIC_STEP(false);
            if (thread && __atomic_load_n(&line->depth, __ATOMIC_SEQ_CST) > 0) inside |= lives(thread);
        }
    }
    return inside;
}

static void report(char byte, uint64_t turn, uint64_t now_ns)
{
    struct gate_report fresh = {.byte = byte, .turn = turn};
    bool is_same = byte == state.report.byte && turn == state.report.turn;
    if (is_same && now_ns - state.reported_ns < GATE_PERIOD_NS) return;
    state.report = fresh;
    state.reported_ns = now_ns;
    ATOMIC_STEP(true);
    bell_send(&fresh, sizeof fresh);
}

uint64_t gate_tick(uint64_t now_ns)
{
    if (__atomic_load_n(&gate_mode, __ATOMIC_ACQUIRE) != GATE_PRESENT) return WATCH_PERIOD_NS;
    own.passes = true;
    if (state.incarnation != fork_incarnation()) {
        memset(&state, 0, sizeof state); /* of the parent */
        state.incarnation = fork_incarnation();
    }
    uint64_t calls;
    uint64_t turn = __atomic_load_n(&gate_page->turn, __ATOMIC_SEQ_CST); /* before the state: never a later one */
    ATOMIC_STEP(false);
    bool closed = gate_is_closed(); /* before the lines, see gate.h */
    ATOMIC_STEP(false);
    bool inside = is_inside(&calls);
    if ((inside || calls != state.calls) && now_ns - state.touched_ns >= GATE_PERIOD_NS) {
        state.calls = calls;
        state.touched_ns = now_ns;
        account_touch(now_ns);
    }
    if (closed && inside) report(GATE_BUSY, turn, now_ns);
    if (closed && !inside)
        report(__atomic_load_n(&gate_bound, __ATOMIC_ACQUIRE) ? GATE_BOUND : GATE_PARKED, turn, now_ns);
    return GATE_PERIOD_NS;
}
