/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fills the table of driver calls that `calls.h` declares.
 */
#include "calls.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

struct calls cu;

#define PROTOTYPE(symbol, name, version, parameters) CUresult symbol parameters;
CALLS(PROTOTYPE)
#undef PROTOTYPE

typedef CUresult (*proc_address)(const char *name, void **out, int version, uint64_t flags);

static void *look(void *driver, proc_address ask, const char *symbol, const char *name, int version)
{
    void *found = NULL;
    if (ask == NULL) {
        found = dlsym(driver, symbol);
    } else if (ask(name, &found, version, 0) != CUDA_SUCCESS) {
        found = NULL;
    }
    if (found == NULL) {
        (void)fprintf(stderr, "%s: not found\n", symbol);
    }
    return found;
}

bool calls_resolve(const char *way)
{
    if (strcmp(way, "link") == 0) {
#define LINKED(symbol, name, version, parameters) cu.symbol = symbol;
        CALLS(LINKED)
#undef LINKED
        return true;
    }
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    proc_address ask = NULL;
    bool good = driver != NULL;
    if (good && strcmp(way, "proc") == 0) {
        void *found = dlsym(driver, "cuGetProcAddress");
        memcpy(&ask, &found, sizeof found);
        good = found != NULL;
    }
#define FOUND(symbol, name, version, parameters)                                                                       \
    if (good) {                                                                                                        \
        void *found = look(driver, ask, #symbol, #name, version);                                                      \
        memcpy(&cu.symbol, &found, sizeof found);                                                                      \
        good = found != NULL;                                                                                          \
    }
    CALLS(FOUND)
#undef FOUND
    return good;
}
