/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A second preloaded library, as profilers are: counts getpid() and cuInit() and goes on to the next definition.
 *
 * Asks for the same name twice, because a lookup must not depend on what was looked up before.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static int calls;

EXPORT int next_calls(void);
EXPORT int cuInit(unsigned int flags);

EXPORT int next_calls(void)
{
    return calls;
}

static void *next(const char *name)
{
    void *first = dlsym(RTLD_NEXT, name);
    void *second = dlsym(RTLD_NEXT, name);
    return first == second ? first : NULL;
}

EXPORT pid_t getpid(void)
{
    pid_t (*real)(void) = (pid_t (*)(void))next("getpid");
    calls++;
    return real ? real() : -1;
}

EXPORT int cuInit(unsigned int flags)
{
    int (*real)(unsigned int) = (int (*)(unsigned int))next("cuInit");
    calls += 1000;
    return real ? real(flags) : -1;
}
