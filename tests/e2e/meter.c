/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Takes some device memory and prints ten times a second what the driver says there is.
 *
 *     meter MIB
 *
 * Prints `total=MIB` until it is asked to end. Locks taken here: none. Called with hooks active: yes.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void *driver;

static void find(const char *name, void *pointer)
{
    void *found = dlsym(driver, name);
    if (found == NULL) exit(3);
    memcpy(pointer, &found, sizeof found);
}

int main(int argc, char **argv)
{
    const struct timespec pause = {.tv_nsec = 100 * 1000 * 1000};
    int (*init)(unsigned int);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*allocate)(uint64_t *, size_t);
    int (*info)(size_t *, size_t *);
    void *context;
    uint64_t memory;
    size_t available, total;

    if (argc != 2) return 2;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL) return 3;
    find("cuInit", &init);
    find("cuDevicePrimaryCtxRetain", &retain);
    find("cuCtxSetCurrent", &set_current);
    find("cuMemAlloc_v2", &allocate);
    find("cuMemGetInfo_v2", &info);
    if (init(0) != 0 || retain(&context, 0) != 0 || set_current(context) != 0) return 4;
    if (allocate(&memory, (size_t)strtoul(argv[1], NULL, 10) << 20) != 0) return 5;
    while (info(&available, &total) == 0) {
        printf("total=%zu\n", total >> 20);
        fflush(stdout);
        nanosleep(&pause, NULL);
    }
    return 6;
}
