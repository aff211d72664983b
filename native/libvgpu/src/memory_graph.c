/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See memory_graph.h. Hooks: nodes that allocate, instantiation, upload and end of graphs.
 *
 * A node only reserves addresses; the driver takes memory when the graph is uploaded or first launched, keeps it for the
 * device's later graphs, and returns it at cuDeviceGraphMemTrim. So: what the nodes of a graph need is added up when it is
 * instantiated, charged before it first goes to the device, and afterwards the charge of the device is set to what the driver
 * says that graphs have reserved there. A graph that went before goes again without a charge, until a trim.
 * Programs that make no such node pay one load per instantiation and launch.
 * Locks taken here: one for the devices' figures, for a few instructions; the driver is never called under it.
 */
#include "memory_graph.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "compute.h"
#include "device.h"
#include "hook.h"
#include "launch.h"
#include "piece.h"

#define DEVICES 64   /* CUDA ordinals */
#define PER_GRAPH 8u /* devices that one graph may allocate on: addresses of graphs are multiples of 8 */
#define DEPTH_MOST 16

/* graph + n -> what its nodes need on its n-th device; `device` is the CUDA ordinal, `tag` the round it was resident in. */
static struct table graphs;

static struct {
    uint64_t charged;
    uint64_t pending; /* of launches under way, contained in charged */
} devices[DEVICES];

static _Atomic(uint32_t) devices_locked;
static _Atomic(bool) seen;
static _Atomic(uint8_t) round_now = 1; /* another one after each trim; 0: never resident */

void memory_graph_seen(void)
{
    atomic_store_explicit(&seen, true, memory_order_relaxed);
}

static bool is_seen(void)
{
    return UNLIKELY(atomic_load_explicit(&seen, memory_order_relaxed));
}

static bool settle_device(CUdevice cuda)
{
    cuuint64_t reserved = 0;
    int device = device_limits(cuda);
    if (device < 0 ||
        DRIVER(cuDeviceGetGraphMemAttribute)(cuda, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved) != CUDA_SUCCESS)
        return false;
    piece_learn(device, reserved);
    spin_lock(&devices_locked);
    uint64_t target = reserved + devices[cuda].pending;
    uint64_t charged = devices[cuda].charged;
    if (target > charged) account_charge_anyway(device, target - charged);
    if (target < charged) account_refund(device, charged - target);
    devices[cuda].charged = target;
    spin_unlock(&devices_locked);
    return target < charged;
}

bool memory_graph_settle(int device)
{
    bool refunded = false;
    if (LIKELY(!is_seen())) return false;
    for (CUdevice cuda = 0; cuda < DEVICES; cuda++)
        if (devices[cuda].charged && device_limits(cuda) == device) refunded |= settle_device(cuda);
    return refunded;
}

/* --- what a graph needs --- */

struct need {
    uint64_t bytes[DEVICES];
};

static void add_node(CUgraphNode node, struct need *need, int depth);

static void add_graph(CUgraph graph, struct need *need, int depth)
{
    size_t count = 0;
    if (depth > DEPTH_MOST || DRIVER(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS || !count) return;
    CUgraphNode *nodes = (CUgraphNode *)calloc(count, sizeof *nodes);
    if (!nodes) return;
    if (DRIVER(cuGraphGetNodes)(graph, nodes, &count) == CUDA_SUCCESS)
        for (size_t i = 0; i < count; i++)
            add_node(nodes[i], need, depth);
    free((void *)nodes);
}

static void add_node(CUgraphNode node, struct need *need, int depth)
{
    CUgraphNodeType type;
    CUgraph child;
    CUDA_MEM_ALLOC_NODE_PARAMS parameters;
    if (DRIVER(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS) return;
    if (type == CU_GRAPH_NODE_TYPE_GRAPH) {
        if (DRIVER(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS) add_graph(child, need, depth + 1);
    } else if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
        memset(&parameters, 0, sizeof parameters);
        if (DRIVER(cuGraphMemAllocNodeGetParams)(node, &parameters) != CUDA_SUCCESS) return;
        const CUmemLocation *location = &parameters.poolProps.location;
        if (location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id >= 0 && location->id < DEVICES)
            need->bytes[location->id] += parameters.bytesize;
    }
}

/* In whole pieces, as the driver takes it. */
static void add_all(CUgraph graph, struct need *need)
{
    add_graph(graph, need, 0);
    for (CUdevice cuda = 0; cuda < DEVICES; cuda++)
        if (need->bytes[cuda]) need->bytes[cuda] = piece_round(device_limits(cuda), need->bytes[cuda]);
}

static bool charge_need(CUdevice cuda, uint64_t bytes)
{
    int device = device_limits(cuda);
    if (device < 0) return true;
    if (!hook_charge(device, bytes)) return false;
    spin_lock(&devices_locked);
    devices[cuda].charged += bytes;
    devices[cuda].pending += bytes;
    spin_unlock(&devices_locked);
    return true;
}

/* The driver has taken what it needs, or nothing: from here its own figure counts. */
static void end_need(CUdevice cuda, uint64_t bytes)
{
    if (device_limits(cuda) < 0) return;
    spin_lock(&devices_locked);
    devices[cuda].pending -= bytes;
    spin_unlock(&devices_locked);
    settle_device(cuda);
}

static void remember(CUgraphExec graph, const struct need *need, bool resident)
{
    uint32_t number = 0;
    for (int cuda = 0; cuda < DEVICES && number < PER_GRAPH; cuda++) {
        struct held gone;
        if (!need->bytes[cuda]) continue;
        struct held held = {.bytes = need->bytes[cuda] & TABLE_BYTES_MAX,
                            .device = (uint64_t)cuda & 0x3f,
                            .tag = resident ? atomic_load(&round_now) : 0};
        table_put(&graphs, (uintptr_t)graph + number++, held, &gone);
    }
}

/* --- launch and upload --- */

static void undo(CUgraphExec graph, uint32_t from)
{
    struct held held;
    while (from-- > 0)
        if (table_get(&graphs, (uintptr_t)graph + from, &held)) end_need((CUdevice)held.device, held.bytes);
}

bool memory_graph_begin(CUgraphExec graph, bool *charged)
{
    struct held held;
    *charged = false;
    if (LIKELY(!is_seen()) || !table_get(&graphs, (uintptr_t)graph, &held)) return true;
    if (held.tag == atomic_load(&round_now)) return true; /* resident */
    uint32_t number = 0;
    for (; number < PER_GRAPH && table_get(&graphs, (uintptr_t)graph + number, &held); number++) {
        if (charge_need((CUdevice)held.device, held.bytes)) continue;
        undo(graph, number);
        return false;
    }
    *charged = true;
    return true;
}

void memory_graph_end(CUgraphExec graph, bool charged, bool launched)
{
    struct held held, gone;
    if (LIKELY(!charged)) return;
    for (uint32_t i = 0; i < PER_GRAPH && table_get(&graphs, (uintptr_t)graph + i, &held); i++) {
        end_need((CUdevice)held.device, held.bytes);
        if (!launched) continue;
        held.tag = atomic_load(&round_now);
        table_put(&graphs, (uintptr_t)graph + i, held, &gone);
    }
}

static CUresult upload(CUgraphExec graph, CUstream stream, CUresult (*call)(CUgraphExec, CUstream))
{
    bool charged;
    hook_enter();
    if (!memory_graph_begin(graph, &charged)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = call(graph, stream);
    memory_graph_end(graph, charged, result == CUDA_SUCCESS);
    return result;
}

HOOK_EXPORT CUresult cuGraphUpload(CUgraphExec graph, CUstream stream)
{
    return upload(graph, stream, DRIVER(cuGraphUpload));
}

HOOK_EXPORT CUresult cuGraphUpload_ptsz(CUgraphExec graph, CUstream stream)
{
    return upload(graph, stream, DRIVER(cuGraphUpload_ptsz));
}

/* --- instantiate --- */

static CUresult instantiated(CUresult result, const CUgraphExec *executable, CUgraph graph)
{
    struct need need = {0};
    if (result != CUDA_SUCCESS || !is_seen()) return result;
    add_all(graph, &need);
    remember(*executable, &need, false);
    return result;
}

#define INSTANTIATE(name, parameters, arguments)                                                                       \
    HOOK_EXPORT CUresult name parameters                                                                               \
    {                                                                                                                  \
        hook_enter();                                                                                                  \
        return instantiated(DRIVER(name) arguments, executable, graph);                                                \
    }

INSTANTIATE(cuGraphInstantiate,
            (CUgraphExec * executable, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_bytes),
            (executable, graph, error_node, log, log_bytes))
INSTANTIATE(cuGraphInstantiate_v2,
            (CUgraphExec * executable, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_bytes),
            (executable, graph, error_node, log, log_bytes))
INSTANTIATE(cuGraphInstantiateWithFlags, (CUgraphExec * executable, CUgraph graph, unsigned long long flags),
            (executable, graph, flags))

/* This form may upload at once, so its need is charged around it. */
static CUresult instantiate_with(CUgraphExec *executable, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters,
                                 CUresult (*call)(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *))
{
    struct need need = {0};
    hook_enter();
    if (!is_seen() || !parameters || !(parameters->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD))
        return instantiated(call(executable, graph, parameters), executable, graph);
    add_all(graph, &need);
    int cuda = 0;
    for (; cuda < DEVICES; cuda++)
        if (need.bytes[cuda] && !charge_need(cuda, need.bytes[cuda])) break;
    CUresult result = cuda < DEVICES ? CUDA_ERROR_OUT_OF_MEMORY : call(executable, graph, parameters);
    while (cuda-- > 0)
        if (need.bytes[cuda]) end_need(cuda, need.bytes[cuda]);
    if (result == CUDA_SUCCESS) remember(*executable, &need, true);
    return result;
}

HOOK_EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *executable, CUgraph graph,
                                                  CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
{
    return instantiate_with(executable, graph, parameters, DRIVER(cuGraphInstantiateWithParams));
}

HOOK_EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *executable, CUgraph graph,
                                                       CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
{
    return instantiate_with(executable, graph, parameters, DRIVER(cuGraphInstantiateWithParams_ptsz));
}

HOOK_EXPORT CUresult cuGraphExecDestroy(CUgraphExec graph)
{
    struct held held;
    hook_enter();
    if (graph && launch_is_limited()) compute_forget(graph);
    for (uint32_t i = 0; is_seen() && i < PER_GRAPH && table_take(&graphs, (uintptr_t)graph + i, &held); i++)
        continue;
    return DRIVER(cuGraphExecDestroy)(graph);
}

HOOK_EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device_number)
{
    hook_enter();
    CUresult result = DRIVER(cuDeviceGraphMemTrim)(device_number);
    if (!is_seen() || device_number < 0 || device_number >= DEVICES) return result;
    uint8_t round = atomic_load(&round_now);
    atomic_store(&round_now, round == UINT8_MAX ? 1 : (uint8_t)(round + 1));
    settle_device(device_number);
    return result;
}

/* --- nodes --- */

HOOK_EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                            size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    memory_graph_seen();
    return DRIVER(cuGraphAddMemAllocNode)(node, graph, dependencies, count, parameters);
}

static void look_at(const CUgraphNodeParams *parameters)
{
    if (parameters && parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) memory_graph_seen();
}

HOOK_EXPORT CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                    CUgraphNodeParams *parameters)
{
    look_at(parameters);
    return DRIVER(cuGraphAddNode)(node, graph, dependencies, count, parameters);
}

HOOK_EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                       const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *parameters)
{
    look_at(parameters);
    return DRIVER(cuGraphAddNode_v2)(node, graph, dependencies, edges, count, parameters);
}

HOOK_EXPORT CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                       const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *parameters)
{
    look_at(parameters);
    return DRIVER(cuGraphAddNode_v3)(node, graph, dependencies, edges, count, parameters);
}

void memory_graph_reset(void)
{
    table_reset(&graphs);
    memset(devices, 0, sizeof devices);
    atomic_store(&devices_locked, 0);
    atomic_store(&seen, false);
}
