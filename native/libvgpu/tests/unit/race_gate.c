/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads enter and leave while the gate closes and opens, with pauses at every step between two accesses of gate.c.
 *
 * Once a process is reported as parked, no thread may be inside until the gate is opened. Also built with sanitizers.
 *
 *     race_gate DIRECTORY THREADS ROUNDS
 */
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "account.h"
#include "bell.h"
#include "check.h"
#include "gate.h"
#include "platform.h"
#include "watch.h"

enum { THREADS_MOST = 16, ENTERED_LOOKS = 4, CALLS_PER_THREAD = 100 };

static struct gate_page *page;
static uint64_t parked_turn; /* of the last report */
static uint64_t entered;
static uint32_t is_parked;
static uint32_t is_over;

static uint32_t draw(uint32_t below)
{
    static __thread uint32_t seed;
    if (seed == 0) seed = (uint32_t)(uintptr_t)&seed | 1u;
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % below;
}

static void pause_sometimes(uint32_t one_of)
{
    if (draw(one_of) == 0) nanosleep(&(struct timespec){.tv_nsec = draw(100000)}, NULL);
}

void atomic_step(bool writes)
{
    (void)writes;
    if (draw(16) == 0) sched_yield();
    pause_sometimes(64);
}

/* --- the rest of the library --- */

void bell_send(const void *bytes, size_t length)
{
    struct gate_report report;
    if (length != sizeof report) return;
    memcpy(&report, bytes, sizeof report);
    if (report.byte == GATE_PARKED) __atomic_store_n(&parked_turn, report.turn, __ATOMIC_SEQ_CST);
}

void watch_wake(void)
{
}

void account_touch(uint64_t now_ns)
{
    (void)now_ns;
}

/* --- threads --- */

static void *call(void *unused)
{
    for (int i = 0; i < CALLS_PER_THREAD && !__atomic_load_n(&is_over, __ATOMIC_RELAXED); i++) {
        CHECK(gate_enter());
        bool is_nested = draw(4) == 0;
        if (is_nested) CHECK(gate_enter());
        for (int look = 0; look < ENTERED_LOOKS; look++) {
            CHECK(!__atomic_load_n(&is_parked, __ATOMIC_SEQ_CST));
            atomic_step(false);
        }
        if (is_nested) gate_leave();
        CHECK(!__atomic_load_n(&is_parked, __ATOMIC_SEQ_CST));
        gate_leave();
        __atomic_fetch_add(&entered, 1, __ATOMIC_RELAXED);
        pause_sometimes(2); /* so that often no thread is inside */
    }
    return unused;
}

/* Threads come and go. */
static void *call_in_threads(void *unused)
{
    while (!__atomic_load_n(&is_over, __ATOMIC_RELAXED)) {
        pthread_t thread;
        CHECK_EQUAL(pthread_create(&thread, NULL, call, NULL), 0);
        CHECK_EQUAL(pthread_join(thread, NULL), 0);
    }
    return unused;
}

static void *report(void *unused)
{
    uint64_t now_ns = 1;
    for (; !__atomic_load_n(&is_over, __ATOMIC_RELAXED); now_ns += GATE_PERIOD_NS) {
        CHECK(gate_tick(now_ns) <= GATE_PERIOD_NS);
        CHECK(!gate_enter()); /* the limiter's own thread passes, and does not count */
        atomic_step(false);
    }
    return unused;
}

static void set_state(uint32_t state)
{
    __atomic_store_n(&page->turn, page->turn + 1, __ATOMIC_SEQ_CST);
    pause_sometimes(2);
    __atomic_store_n(&page->state, state, __ATOMIC_SEQ_CST);
    platform_futex_wake(&page->state);
}

static void make_page(void)
{
    int file = open(GATE_PATH, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(file >= 0 && ftruncate(file, sizeof *page) == 0);
    page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(page != MAP_FAILED);
    page->magic = GATE_MAGIC;
    page->layout = GATE_LAYOUT;
    close(file);
}

int main(int count, char **words)
{
    pthread_t threads[THREADS_MOST + 1];
    CHECK(count == 4 && chdir(words[1]) == 0);
    long number = strtol(words[2], NULL, 10);
    CHECK(number > 0 && number <= THREADS_MOST);
    make_page();
    CHECK(gate_enter());
    gate_leave();
    for (long i = 0; i < number; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, call_in_threads, NULL), 0);
    CHECK_EQUAL(pthread_create(&threads[number], NULL, report, NULL), 0);
    for (long round = strtol(words[3], NULL, 10); round > 0; round--) {
        set_state(1);
        while (__atomic_load_n(&parked_turn, __ATOMIC_SEQ_CST) != page->turn)
            sched_yield();
        __atomic_store_n(&is_parked, 1, __ATOMIC_SEQ_CST);
        pause_sometimes(2);
        __atomic_store_n(&is_parked, 0, __ATOMIC_SEQ_CST);
        set_state(GATE_OPEN);
        pause_sometimes(2);
    }
    __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
    for (long i = 0; i <= number; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    printf("%llu\n", (unsigned long long)entered);
    return 0;
}
