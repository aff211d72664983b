/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every test program here ends with when something is not as it must be. Units as in the tested headers.
 */
#ifndef VGPU_TESTS_CHECK_H
#define VGPU_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                                    \
            _Exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

#define CHECK_EQUAL(left, right)                                                                                       \
    do {                                                                                                               \
        long long check_left = (long long)(left);                                                                      \
        long long check_right = (long long)(right);                                                                    \
        if (check_left != check_right) {                                                                               \
            fprintf(stderr, "%s:%d: %s is %lld, %s is %lld\n", __FILE__, __LINE__, #left, check_left, #right,          \
                    check_right);                                                                                      \
            _Exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

#endif
