/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many processes, one after the other; each uses a little and ends, and no live process is left to find the dead.
 *
 *     churn_account PROCESSES
 */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "account.h"
#include "check.h"

#define BYTES_EACH 1000

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    int count = atoi(argv[1]);
    for (int i = 0; i < count; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) _exit(account_charge(0, BYTES_EACH) ? 0 : 1);
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(status == 0);
    }
    return 0;
}
