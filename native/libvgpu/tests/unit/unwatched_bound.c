/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process in which no thread can be started has its request only: nothing would revoke its slack when the bound falls.
 *
 * Linked with all parts of the account but room.c and watch.c: this program is the page, and has no thread. Its directory
 * has the limits file, which names one device with a request of 100 MiB and a limit of 300 MiB.
 */
#include <stdbool.h>
#include <stdint.h>

#include "account.h"
#include "check.h"
#include "room.h"
#include "watch.h"

#define MIB UINT64_C(1048576)

void room_look(void)
{
}

uint64_t room_bytes(const char *uuid, uint64_t now_ns)
{
    (void)uuid;
    (void)now_ns;
    return 300 * MIB;
}

bool watch_start(bool (*look)(void))
{
    (void)look;
    return false;
}

int main(void)
{
    CHECK(account_limit(0) == 300 * MIB && account_bound(0) == 100 * MIB);
    CHECK(!account_charge(0, 101 * MIB));
    CHECK(account_charge(0, 100 * MIB) && !account_charge(0, 1));
    CHECK(account_used(0) == 100 * MIB);
    puts("requested");
    return 0;
}
