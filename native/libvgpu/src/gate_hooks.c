/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the library exports for the driver's functions: each passes the gate, then calls the body of the hook.
 *
 * Where there is no gate the body is jumped to with the caller's arguments in place. Hooks of class TOUCHED have no body:
 * their calls go to the driver. Locks taken here: none.
 */
#include "gate.h"
#include "hook.h"

#define GATED(result, name, body, parameters, arguments)                                                               \
    static __attribute__((noinline)) result waiting_##name parameters                                                  \
    {                                                                                                                  \
        bool counted = gate_enter();                                                                                   \
        result answer = body arguments;                                                                                \
        if (counted) gate_leave();                                                                                     \
        return answer;                                                                                                 \
    }                                                                                                                  \
    HOOK_EXPORT result exported_##name parameters                                                                      \
    {                                                                                                                  \
        if (LIKELY(gate_is_absent())) return body arguments;                                                           \
        return waiting_##name arguments;                                                                               \
    }

#define EXPORT_COUNTED(result, name, parameters, arguments) GATED(result, name, name, parameters, arguments)
#define EXPORT_TRACKED(result, name, parameters, arguments) GATED(result, name, name, parameters, arguments)
#define EXPORT_THROTTLED(result, name, parameters, arguments) GATED(result, name, name, parameters, arguments)
#define EXPORT_VIEWED(result, name, parameters, arguments) GATED(result, name, name, parameters, arguments)
#define EXPORT_TOUCHED(result, name, parameters, arguments) GATED(result, name, DRIVER(name), parameters, arguments)
#define EXPORT_RESOLVED(result, name, parameters, arguments)

#define CUDA_HOOK(result, name, parameters, arguments, since, class, why)                                              \
    EXPORT_##class(result, name, parameters, arguments)
#include "symbols.def"
