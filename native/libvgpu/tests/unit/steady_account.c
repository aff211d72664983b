/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Charges, refunds and asks under a filter that kills at the first system call other than read, write and exit.
 *
 *     steady_account    environment: a memory limit and a region
 */
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "account.h"
#include "check.h"

static int said[2];

static void *work(void *unused)
{
    (void)unused;
    uint64_t sum = 0;
    char byte = 'n';
    CHECK(account_charge(0, 4096));
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0);
    for (int i = 0; i < 1000000; i++) {
        CHECK(account_charge(0, 1 + (uint64_t)i % 5000));
        account_refund(0, 1 + (uint64_t)i % 5000);
        sum += account_used(0) + account_limit(0) + account_core_pct(0) + account_incarnation();
    }
    if (sum) syscall(SYS_write, said[1], &byte, (size_t)1);
    syscall(SYS_exit, 0); /* of this thread */
    return NULL;
}

/* The filter is the thread's own; one that it kills takes the process with it or never writes. */
int main(void)
{
    pthread_t thread;
    char byte = 0;
    CHECK(pipe(said) == 0);
    CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
    struct pollfd wait = {.fd = said[0], .events = POLLIN};
    CHECK(poll(&wait, 1, 30000) == 1);
    CHECK(read(said[0], &byte, 1) == 1 && byte == 'n');
    puts("no system call");
    return 0;
}
