/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many processes begin at once, each uses a little, and then all end.
 *
 *     many_account PROCESSES [GRANTED]    one line: milliseconds until all had begun, slots taken then, bytes used
 *
 * GRANTED, all by default, of the processes are granted what they ask for.
 */
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "account.h"
#include "platform.h"
#include "check.h"

#define BYTES_EACH 1000

int main(int argc, char **argv)
{
    CHECK(argc == 2 || argc == 3);
    int count = atoi(argv[1]);
    int wanted = argc == 3 ? atoi(argv[2]) : count;
    int granted = 0;
    int go[2];
    int done[2];
    CHECK(pipe(go) == 0 && pipe(done) == 0);
    pid_t *children = calloc((size_t)count, sizeof *children);
    CHECK(children);
    for (int i = 0; i < count; i++) {
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (children[i] == 0) {
            char byte = 0;
            close(go[1]);
            CHECK(read(go[0], &byte, 1) == 0);
            byte = account_charge(0, BYTES_EACH) && account_own_used(0) == BYTES_EACH;
            CHECK(write(done[1], &byte, 1) == 1);
            for (;;)
                pause();
        }
    }
    uint64_t began_ns = platform_now_ns();
    close(go[1]);
    for (int i = 0; i < count; i++) {
        char byte = 0;
        CHECK(read(done[0], &byte, 1) == 1);
        granted += byte;
    }
    CHECK_EQUAL(granted, wanted);
    uint64_t taken_ns = platform_now_ns() - began_ns;
    printf("%.1f %u %llu\n", (double)taken_ns / 1e6, account_processes(), (unsigned long long)account_used(0));
    fflush(stdout);
    for (int i = 0; i < count; i++)
        kill(children[i], SIGKILL);
    for (int i = 0; i < count; i++)
        CHECK(waitpid(children[i], NULL, 0) == children[i]);
    /* A process that needs all memory finds all others dead; one without a slot retries within a second. */
    for (int i = 0; i < 200 && !account_charge(0, account_limit(0)); i++)
        platform_sleep_ns(10000000);
    CHECK_EQUAL(account_used(0), account_limit(0));
    CHECK_EQUAL(account_processes(), 1);
    account_detach();
    return 0;
}
