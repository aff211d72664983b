/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bodies for the limiter's own list of names, so that whatever it names exists here: they count calls and answer
 * NOT_SUPPORTED. Names that another file defines keep their definition there.
 *
 * Locks taken here: none. Called with hooks active: no.
 */
#include "fake.h"

#define BODY(name)                                                                                                     \
    CUDA_API __attribute__((weak)) CUresult name(void);                                                                \
    CUDA_API __attribute__((weak)) CUresult name(void)                                                                 \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return CUDA_ERROR_NOT_SUPPORTED;                                                                               \
    }

#define CUDA_HOOK(result, name, parameters, arguments, since, class, why) BODY(name)
#define CUDA_CALL(result, name, parameters, arguments, reason) BODY(name)
#define CUDA_PASS(name, reason) BODY(name)
#include "../../src/symbols.def"
