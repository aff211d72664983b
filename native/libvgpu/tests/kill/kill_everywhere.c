/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kills a process before each of its stores to shared memory, and many at random moments, and looks at the others. Then
 * the same with a process that is stopped there for a while.
 *
 * Two survivors work all the time, with slack, at the limit and below. Before each kill there is a corpse to be found.
 * After each kill both survivors must get on, the slot and the bytes of victim and corpse must be free for any process,
 * and exactly the rest of the limit can be had. Each scenario is done again with the kill one store later, until the
 * victim comes through.
 *
 *     kill_everywhere DIRECTORY RANDOM_KILLS    one line per scenario: kills, slowest progress of a survivor
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "account.h"
#include "atomic.h"
#include "platform.h"
#include "../unit/check.h"

#define MIB UINT64_C(1048576)
#define LIMIT (1000 * MIB)
#define SURVIVORS 2
#define HELD_BY_SURVIVOR (10 * MIB)
#define PATIENCE_NS UINT64_C(20000000000) /* then the run is a failure; what is slower than a second is reported */
#define VICTIM_CAME_THROUGH 7

/* Before every store: count, and die at the one that is asked for. Only the victim's own thread. */
static _Thread_local uint64_t stores_left;
static _Thread_local bool counting;
static int deadly = SIGKILL;

void atomic_step(bool writes)
{
    if (!counting || !writes) return;
    if (stores_left-- == 0) kill(getpid(), deadly);
}

enum phase { WORK, PAUSE, STOP };

/* Between the processes of this test, not part of what is tested. */
static struct board {
    uint32_t phase;
    uint32_t paused[SURVIVORS];
    uint64_t turns[SURVIVORS];
} *board;

static uint64_t seen(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static _Noreturn void survive(int number)
{
    uint32_t random = 12345u + (uint32_t)number;
    CHECK(account_charge(0, HELD_BY_SURVIVOR));
    for (;;) {
        enum phase phase = (enum phase)__atomic_load_n(&board->phase, __ATOMIC_ACQUIRE);
        if (phase == STOP) _exit(0);
        __atomic_store_n(&board->paused[number], phase == PAUSE, __ATOMIC_RELEASE);
        if (phase == PAUSE) {
            platform_sleep_ns(20000);
            continue;
        }
        random = random * 1664525u + 1013904223u;
        uint64_t bytes = 1 + (random >> 8) % ((random & 31) ? 4 * MIB : 900 * MIB);
        if (account_charge(0, bytes)) {
            if (random & 64) platform_sleep_ns(1000);
            account_refund(0, bytes);
        }
        __atomic_fetch_add(&board->turns[number], 1, __ATOMIC_RELEASE);
    }
}

static void leave_corpse(void)
{
    pid_t corpse = fork();
    CHECK(corpse >= 0);
    if (corpse == 0) {
        account_charge(0, 50 * MIB);
        kill(getpid(), SIGKILL);
    }
    int status;
    CHECK(waitpid(corpse, &status, 0) == corpse);
}

/* --- what victims do ----------------------------------------------------------------------------------------------- */

static void start(void)
{
    account_attach();
}

static void charge_and_refund(void)
{
    account_attach();
    counting = true;
    if (account_charge(0, 3 * MIB)) account_refund(0, 3 * MIB);
}

/* More than is left after slack: recounts, revokes, looks for the dead; then refunds tightly. */
static void take_everything(void)
{
    account_attach();
    counting = true;
    uint64_t bytes = LIMIT - SURVIVORS * HELD_BY_SURVIVOR - 5 * MIB;
    if (account_charge(0, bytes)) account_refund(0, bytes);
}

static void be_refused(void)
{
    account_attach();
    counting = true;
    CHECK(!account_charge(0, LIMIT - SURVIVORS * HELD_BY_SURVIVOR + 1));
}

static void look_for_the_dead(void)
{
    account_attach();
    counting = true;
    account_charge(0, LIMIT);
    account_charge(0, LIMIT - SURVIVORS * HELD_BY_SURVIVOR);
}

static void more_than_the_limit(void)
{
    account_attach();
    counting = true;
    account_charge_anyway(0, LIMIT / 2);
    account_charge_anyway(0, LIMIT / 2);
    account_note_context(0, 5);
    account_refund(0, LIMIT);
}

static void end(void)
{
    account_attach();
    (void)account_charge(0, MIB);
    counting = true;
    account_detach();
}

static void fork_a_child(void)
{
    account_attach();
    (void)account_charge(0, MIB);
    uint64_t left = stores_left;
    pid_t child = fork();
    if (child == 0) {
        counting = true;
        stores_left = left;
        (void)account_charge(0, 2 * MIB);
        _exit(VICTIM_CAME_THROUGH);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
    kill(getpid(), SIGKILL);
}

static void at_random(void)
{
    uint32_t random = (uint32_t)getpid() * 2654435761u;
    for (int i = 0; i < 100000; i++) {
        random = random * 1664525u + 1013904223u;
        uint64_t bytes = (random >> 8) % (200 * MIB) + 1;
        if (random & 1 ? account_charge(0, bytes) : false) account_refund(0, bytes);
        if ((random & 0xff00) == 0) account_detach();
    }
}

struct scenario {
    const char *name;
    void (*victim)(void);
    bool counts_from_start;
};

static const struct scenario scenarios[] = {
    {"start", start, true},
    {"charge and refund", charge_and_refund, false},
    {"take everything", take_everything, false},
    {"be refused", be_refused, false},
    {"look for the dead", look_for_the_dead, false},
    {"more than the limit", more_than_the_limit, false},
    {"end", end, false},
    {"fork a child", fork_a_child, false},
};

/* --- judgement ----------------------------------------------------------------------------------------------------- */

static uint64_t slowest_ns;

static void survivors_get_on(void)
{
    uint64_t before[SURVIVORS];
    uint64_t since = platform_now_ns();
    for (int i = 0; i < SURVIVORS; i++)
        before[i] = seen(&board->turns[i]);
    for (int i = 0; i < SURVIVORS; i++)
        while (seen(&board->turns[i]) < before[i] + 2) {
            CHECK(platform_now_ns() - since < PATIENCE_NS);
            platform_sleep_ns(50000);
        }
    uint64_t taken = platform_now_ns() - since;
    if (taken > slowest_ns) slowest_ns = taken;
}

static void set_phase(enum phase phase)
{
    __atomic_store_n(&board->phase, (uint32_t)phase, __ATOMIC_RELEASE);
    for (int i = 0; i < SURVIVORS; i++)
        while (phase != STOP && __atomic_load_n(&board->paused[i], __ATOMIC_ACQUIRE) != (phase == PAUSE))
            platform_sleep_ns(20000);
}

/* In a process of its own, so that this one stays without a slot. Exit 0: all is as it must be. */
static void judge(void)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        uint64_t rest = LIMIT - SURVIVORS * HELD_BY_SURVIVOR;
        CHECK(account_charge(0, rest));
        CHECK(!account_charge(0, 1));
        CHECK_EQUAL(account_used(0), LIMIT);
        CHECK_EQUAL(account_processes(), SURVIVORS + 1);
        CHECK_EQUAL(account_errors(), 0);
        account_refund(0, rest);
        CHECK_EQUAL(account_used(0), SURVIVORS * HELD_BY_SURVIVOR);
        account_detach();
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Stopped instead of killed: alive, so its memory must stay, but no process may wait for it; then it resumes. */
static bool stop_one(const struct scenario *scenario, uint64_t stores)
{
    leave_corpse();
    pid_t victim = fork();
    CHECK(victim >= 0);
    if (victim == 0) {
        deadly = SIGSTOP;
        stores_left = stores;
        counting = scenario->counts_from_start;
        scenario->victim();
        account_detach();
        _exit(VICTIM_CAME_THROUGH);
    }
    int status = 0;
    CHECK(waitpid(victim, &status, WUNTRACED) == victim);
    bool stopped = WIFSTOPPED(status);
    survivors_get_on();
    if (stopped) {
        CHECK(kill(victim, SIGCONT) == 0);
        CHECK(waitpid(victim, &status, 0) == victim);
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == VICTIM_CAME_THROUGH);
    set_phase(PAUSE);
    judge();
    set_phase(WORK);
    return !stopped;
}

static bool kill_one(const struct scenario *scenario, uint64_t stores)
{
    leave_corpse();
    pid_t victim = fork();
    CHECK(victim >= 0);
    if (victim == 0) {
        stores_left = stores;
        counting = scenario->counts_from_start;
        scenario->victim();
        _exit(VICTIM_CAME_THROUGH);
    }
    int status = 0;
    CHECK(waitpid(victim, &status, 0) == victim);
    bool came_through = WIFEXITED(status) && WEXITSTATUS(status) == VICTIM_CAME_THROUGH;
    CHECK(came_through || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
    survivors_get_on();
    set_phase(PAUSE);
    judge();
    set_phase(WORK);
    return came_through;
}

static void kill_at_random(int kills)
{
    uint32_t random = 99;
    for (int done = 0; done < kills; done++) {
        pid_t victim = fork();
        CHECK(victim >= 0);
        if (victim == 0) {
            at_random();
            _exit(0);
        }
        random = random * 1664525u + 1013904223u;
        platform_sleep_ns((random >> 8) % 1500000);
        kill(victim, SIGKILL);
        CHECK(waitpid(victim, NULL, 0) == victim);
        if (done % 20 == 19) {
            survivors_get_on();
            set_phase(PAUSE);
            judge();
            set_phase(WORK);
        }
    }
    printf("random: %d kills\n", kills);
}

/* No other process runs: the victim creates the file. After each kill the next process starts with a whole region. */
static void kill_creators(const char *file)
{
    uint64_t kills = 0;
    for (bool came_through = false; !came_through; kills++) {
        CHECK(unlink(file) == 0 || errno == ENOENT);
        pid_t victim = fork();
        CHECK(victim >= 0);
        if (victim == 0) {
            stores_left = kills;
            counting = true;
            account_attach();
            _exit(VICTIM_CAME_THROUGH);
        }
        int status = 0;
        CHECK(waitpid(victim, &status, 0) == victim);
        came_through = WIFEXITED(status) && WEXITSTATUS(status) == VICTIM_CAME_THROUGH;
        pid_t next = fork();
        CHECK(next >= 0);
        if (next == 0) {
            CHECK(account_charge(0, LIMIT));
            CHECK(!account_charge(0, 1));
            CHECK_EQUAL(account_processes(), 1);
            _exit(access(file, F_OK));
        }
        CHECK(waitpid(next, &status, 0) == next);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    printf("create: %llu kills\n", (unsigned long long)kills - 1);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    char name[4096];
    char file[4128];
    char limit[32];
    snprintf(name, sizeof name, "%s/region", argv[1]);
    snprintf(file, sizeof file, "%s" REGION_NAME_SUFFIX, name);
    snprintf(limit, sizeof limit, "%llu", (unsigned long long)LIMIT);
    setenv("CUDA_DEVICE_MEMORY_SHARED_CACHE", name, 1);
    setenv("CUDA_DEVICE_MEMORY_LIMIT", limit, 1);
    kill_creators(file);
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(board != MAP_FAILED);
    unlink(file);
    pid_t survivors[SURVIVORS];
    for (int i = 0; i < SURVIVORS; i++) {
        survivors[i] = fork();
        CHECK(survivors[i] >= 0);
        if (survivors[i] == 0) survive(i);
    }
    survivors_get_on();
    slowest_ns = 0;
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        uint64_t kills = 0;
        uint64_t stops = 0;
        while (!kill_one(&scenarios[i], kills))
            kills++;
        while (scenarios[i].victim != fork_a_child && !stop_one(&scenarios[i], stops))
            stops++;
        printf("%s: %llu kills, %llu stops, slowest progress %.1f ms\n", scenarios[i].name, (unsigned long long)kills,
               (unsigned long long)stops, (double)slowest_ns / 1e6);
        fflush(stdout);
    }
    kill_at_random(atoi(argv[2]));
    set_phase(STOP);
    for (int i = 0; i < SURVIVORS; i++) {
        int status = 0;
        CHECK(waitpid(survivors[i], &status, 0) == survivors[i]);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    printf("slowest progress %.1f ms\n", (double)slowest_ns / 1e6);
    return 0;
}
