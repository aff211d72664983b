/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fault for the checks of overhead: preloaded before the limiter, it makes each cuLaunchKernel a millisecond longer.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

typedef int (*launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **parameters, void **extra);

__attribute__((visibility("default"))) int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz,
                                                          unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                                          void *stream, void **parameters, void **extra);

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra)
{
    static launch next;
    if (next == NULL) {
        void *found = dlsym(RTLD_NEXT, "cuLaunchKernel");
        memcpy(&next, &found, sizeof found);
    }
    (void)nanosleep(&(struct timespec){.tv_nsec = 1000000L}, NULL);
    return next(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}
