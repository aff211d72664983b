/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks: everything that starts work on a device goes through compute_before() and compute_after().
 *
 * Where nothing is limited a launch is counted (the agent sees by it who is active) and nothing else happens: a few loads
 * and a store to the process's own line. A graph counts as one piece of work. The default stream of the forms for
 * per-thread streams is given to the compute side under its own name.
 */
#include "bell.h"
#include "compute.h"
#include "context.h"
#include "hook.h"
#include "launch.h"
#include "memory_graph.h"

static inline void count_launch(void)
{
    uint64_t *launches = &account_own_slot()->launches;
    __atomic_store_n(launches, __atomic_load_n(launches, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
    bell_launched();
}

/* False: nothing limits this launch, the driver is called at once. */
static inline bool is_held(struct context_here *here)
{
    if (LIKELY(!launch_is_limited())) {
        count_launch();
        return false;
    }
    return context_here(here) && here->device >= 0;
}

static inline CUstream named(CUstream stream, bool per_thread)
{
    return per_thread && !stream ? CU_STREAM_PER_THREAD : stream;
}

static inline struct compute_work kernel(const void *function, uint64_t blocks, uint64_t threads)
{
    return (struct compute_work){.function = function, .blocks = blocks, .threads_per_block = (uint32_t)threads};
}

/* `call` between compute_before and compute_after. */
#define HELD(here, stream, work, call)                                                                                 \
    do {                                                                                                               \
        struct compute_work held_work = (work);                                                                        \
        struct compute_ticket ticket;                                                                                  \
        compute_before((here).device, (stream), &held_work, &ticket);                                                  \
        CUresult result = (call);                                                                                      \
        compute_after((stream), &held_work, &ticket, result == CUDA_SUCCESS);                                          \
        return result;                                                                                                 \
    } while (0)

#define GRID ((uint64_t)grid_x * grid_y * grid_z)
#define BLOCK ((uint64_t)block_x * block_y * block_z)

#define LAUNCH_KERNEL(name, per_thread)                                                                                \
    HOOK_EXPORT CUresult name(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,      \
                              unsigned int block_x, unsigned int block_y, unsigned int block_z,                        \
                              unsigned int shared_bytes, CUstream stream, void **parameters, void **extra)             \
    {                                                                                                                  \
        struct context_here here;                                                                                      \
        if (LIKELY(!is_held(&here)))                                                                                   \
            return DRIVER(name)(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,     \
                                parameters, extra);                                                                    \
        HELD(here, named(stream, per_thread), kernel(function, GRID, BLOCK),                                           \
             DRIVER(name)(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,           \
                          parameters, extra));                                                                         \
    }

LAUNCH_KERNEL(cuLaunchKernel, false)
LAUNCH_KERNEL(cuLaunchKernel_ptsz, true)

#define LAUNCH_KERNEL_EX(name, per_thread)                                                                             \
    HOOK_EXPORT CUresult name(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)      \
    {                                                                                                                  \
        struct context_here here;                                                                                      \
        if (LIKELY(!is_held(&here) || !config)) return DRIVER(name)(config, function, parameters, extra);              \
        HELD(here, named(config->hStream, per_thread),                                                                 \
             kernel(function, (uint64_t)config->gridDimX * config->gridDimY * config->gridDimZ,                        \
                    (uint64_t)config->blockDimX * config->blockDimY * config->blockDimZ),                              \
             DRIVER(name)(config, function, parameters, extra));                                                       \
    }

LAUNCH_KERNEL_EX(cuLaunchKernelEx, false)
LAUNCH_KERNEL_EX(cuLaunchKernelEx_ptsz, true)

#define LAUNCH_COOPERATIVE(name, per_thread)                                                                           \
    HOOK_EXPORT CUresult name(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,      \
                              unsigned int block_x, unsigned int block_y, unsigned int block_z,                        \
                              unsigned int shared_bytes, CUstream stream, void **parameters)                           \
    {                                                                                                                  \
        struct context_here here;                                                                                      \
        if (LIKELY(!is_held(&here)))                                                                                   \
            return DRIVER(name)(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,     \
                                parameters);                                                                           \
        HELD(here, named(stream, per_thread), kernel(function, GRID, BLOCK),                                           \
             DRIVER(name)(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,           \
                          parameters));                                                                                \
    }

LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, false)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, true)

/* Legacy forms: the shape of the block was set on the function before and is not known here. */
HOOK_EXPORT CUresult cuLaunch(CUfunction function)
{
    struct context_here here;
    if (!is_held(&here)) return DRIVER(cuLaunch)(function);
    HELD(here, NULL, kernel(function, 1, 1), DRIVER(cuLaunch)(function));
}

static uint64_t grid_of(int grid_x, int grid_y)
{
    return (uint64_t)(grid_x > 0 ? grid_x : 0) * (uint64_t)(grid_y > 0 ? grid_y : 0);
}

HOOK_EXPORT CUresult cuLaunchGrid(CUfunction function, int grid_x, int grid_y)
{
    struct context_here here;
    if (!is_held(&here)) return DRIVER(cuLaunchGrid)(function, grid_x, grid_y);
    HELD(here, NULL, kernel(function, grid_of(grid_x, grid_y), 1), DRIVER(cuLaunchGrid)(function, grid_x, grid_y));
}

HOOK_EXPORT CUresult cuLaunchGridAsync(CUfunction function, int grid_x, int grid_y, CUstream stream)
{
    struct context_here here;
    if (!is_held(&here)) return DRIVER(cuLaunchGridAsync)(function, grid_x, grid_y, stream);
    HELD(here, stream, kernel(function, grid_of(grid_x, grid_y), 1),
         DRIVER(cuLaunchGridAsync)(function, grid_x, grid_y, stream));
}

/* --- graphs --- */

static CUresult launch_graph(CUgraphExec graph, CUstream stream, bool per_thread,
                             CUresult (*call)(CUgraphExec, CUstream))
{
    struct context_here here;
    if (LIKELY(!is_held(&here))) return call(graph, stream);
    HELD(here, named(stream, per_thread),
         ((struct compute_work){.function = graph, .blocks = 1, .threads_per_block = 1, .graph = true}),
         call(graph, stream));
}

static CUresult launch_graph_charged(CUgraphExec graph, CUstream stream, bool per_thread,
                                     CUresult (*call)(CUgraphExec, CUstream))
{
    bool charged;
    hook_enter();
    if (!memory_graph_begin(graph, &charged)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = launch_graph(graph, stream, per_thread, call);
    memory_graph_end(graph, charged, result == CUDA_SUCCESS);
    return result;
}

HOOK_EXPORT CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream)
{
    return launch_graph_charged(graph, stream, false, DRIVER(cuGraphLaunch));
}

HOOK_EXPORT CUresult cuGraphLaunch_ptsz(CUgraphExec graph, CUstream stream)
{
    return launch_graph_charged(graph, stream, true, DRIVER(cuGraphLaunch_ptsz));
}

/* --- several devices at once --- */

#define LAUNCHES_MOST 64u

/* Each part waits for its own device's budget; then all start together. A part belongs to its stream's context. */
HOOK_EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launches, unsigned int count,
                                                          unsigned int flags)
{
    struct context_here here;
    struct compute_work work[LAUNCHES_MOST];
    struct compute_ticket tickets[LAUNCHES_MOST];
    if (!launches || count > LAUNCHES_MOST || !launch_is_limited()) {
        count_launch();
        return DRIVER(cuLaunchCooperativeKernelMultiDevice)(launches, count, flags);
    }
    for (unsigned int i = 0; i < count; i++) {
        const CUDA_LAUNCH_PARAMS *launch = &launches[i];
        work[i] = kernel(launch->function, (uint64_t)launch->gridDimX * launch->gridDimY * launch->gridDimZ,
                         (uint64_t)launch->blockDimX * launch->blockDimY * launch->blockDimZ);
        int device = context_of_stream(launch->hStream, false, &here) ? here.device : -1;
        compute_before(device, launch->hStream, &work[i], &tickets[i]);
    }
    CUresult result = DRIVER(cuLaunchCooperativeKernelMultiDevice)(launches, count, flags);
    for (unsigned int i = 0; i < count; i++)
        compute_after(launches[i].hStream, &work[i], &tickets[i], result == CUDA_SUCCESS);
    return result;
}
