/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Takes some device memory and sleeps until it is ended: the program of a container that does nothing.
 *
 *     idle MIB
 *
 * Locks taken here: none. Called with hooks active: yes.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *driver;

static void find(const char *name, void *pointer)
{
    void *found = dlsym(driver, name);
    if (found == NULL) exit(3);
    memcpy(pointer, &found, sizeof found);
}

int main(int argc, char **argv)
{
    int (*init)(unsigned int);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*allocate)(uint64_t *, size_t);
    void *context;
    uint64_t memory;

    if (argc != 2) return 2;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL) return 3;
    find("cuInit", &init);
    find("cuDevicePrimaryCtxRetain", &retain);
    find("cuCtxSetCurrent", &set_current);
    find("cuMemAlloc_v2", &allocate);
    if (init(0) != 0 || retain(&context, 0) != 0 || set_current(context) != 0) return 4;
    if (allocate(&memory, (size_t)strtoul(argv[1], NULL, 10) << 20) != 0) return 5;
    for (;;)
        pause();
}
