/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A bound that falls while a lease is being raised: the raise is reverted, and the request is compared with the new bound.
 *
 * Linked with all parts of the account but room.c: this program is the page. Its directory has the limits file, which
 * names one device with a request of 100 MiB and a limit of 300 MiB.
 */
#include <stdbool.h>
#include <stdint.h>

#include "account.h"
#include "check.h"
#include "room.h"

#define MIB UINT64_C(1048576)

static uint64_t first = 300 * MIB;  /* what the next look of the main thread finds */
static uint64_t second = 300 * MIB; /* what all others find */
static __thread bool is_main;

void room_look(void)
{
}

uint64_t room_bytes(const char *uuid, uint64_t now_ns)
{
    (void)uuid;
    (void)now_ns;
    uint64_t later = __atomic_load_n(&second, __ATOMIC_SEQ_CST);
    return is_main ? __atomic_exchange_n(&first, later, __ATOMIC_SEQ_CST) : later;
}

static void fall(uint64_t from, uint64_t to)
{
    __atomic_store_n(&second, to, __ATOMIC_SEQ_CST);
    __atomic_store_n(&first, from, __ATOMIC_SEQ_CST);
}

int main(void)
{
    is_main = true;
    CHECK(account_limit(0) == 300 * MIB && account_bound(0) == 300 * MIB);
    fall(300 * MIB, 200 * MIB);
    CHECK(!account_charge(0, 250 * MIB));
    CHECK(account_used(0) == 0);
    fall(300 * MIB, 200 * MIB);
    CHECK(account_charge(0, 200 * MIB));
    CHECK(account_used(0) == 200 * MIB && !account_charge(0, 1));
    CHECK(account_errors() == 0);
    puts("reverted");
    return 0;
}
