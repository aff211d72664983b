/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Graphs: nodes and what they cost, instances, launches, memory nodes.
 *
 * A launch occupies the whole device for the longest path through the graph, or for the sum of its kernels' shares of
 * the multiprocessors where that is longer. Memory nodes take from the device's graph pool, which keeps what it has
 * until cuDeviceGraphMemTrim. A captured graph is one chain.
 *
 * Locks taken here: fake.lock. Called with hooks active: no.
 */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

#define GRAPH_MAGIC UINT64_C(0x4850415247454b41)
#define EXEC_MAGIC UINT64_C(0x4345584548504147)

enum { AUTO_FREE_ON_LAUNCH = 1 };

struct fake_node {
    struct fake_graph *graph;
    struct fake_node *next;
    int type;
    bool disabled;
    uint64_t ns;
    unsigned int sms;
    uint64_t bytes;
    unsigned int device;
    CUdeviceptr pointer;
    CUhostNodeParams host;
    CUkernelNodeParams kernel;
    struct fake_graph *child;
    struct fake_node **after; /* what it depends on */
    size_t after_count;
    uint64_t end_ns; /* scratch of duration_of */
};

struct fake_graph {
    uint64_t magic;
    struct fake_node *first;
    struct fake_node *last;
    size_t count;
    unsigned int uses; /* the program's handle, parents, instances */
};

struct fake_exec {
    uint64_t magic;
    struct fake_graph *graph;
    unsigned int flags;
    uint64_t ns;
};

static bool is_graph(const struct fake_graph *graph)
{
    return graph != NULL && graph->magic == GRAPH_MAGIC;
}

struct fake_graph *fake_graph_new(void)
{
    struct fake_graph *graph = calloc(1, sizeof *graph);
    if (graph != NULL) {
        graph->magic = GRAPH_MAGIC;
        graph->uses = 1;
    }
    return graph;
}

/* Caller holds the lock. */
static void forget(struct fake_graph *graph)
{
    if (--graph->uses > 0) {
        return;
    }
    while (graph->first != NULL) {
        struct fake_node *node = graph->first;
        graph->first = node->next;
        if (node->child != NULL) {
            forget(node->child);
        }
        struct fake_block *block = node->type == CU_NODE_MEM_ALLOC ? fake_block_find(node->pointer) : NULL;
        if (block != NULL && block->kind == FAKE_RESERVED) {
            fake_block_drop(block);
        } else if (block != NULL) {
            block->orphan = true; /* still allocated: its free ends the address too */
        }
        free(node->after);
        free(node);
    }
    graph->magic = 0;
    free(graph);
}

/* Caller holds the lock. */
static struct fake_node *add_node(struct fake_graph *graph, int type, const CUgraphNode *after, size_t count)
{
    struct fake_node *node = calloc(1, sizeof *node);
    if (node == NULL) {
        return NULL;
    }
    node->graph = graph;
    node->type = type;
    if (count > 0) {
        node->after = calloc(count, sizeof(struct fake_node *));
        if (node->after == NULL) {
            free(node);
            return NULL;
        }
        memcpy(node->after, after, count * sizeof(struct fake_node *));
        node->after_count = count;
    }
    if (graph->last != NULL) {
        graph->last->next = node;
    } else {
        graph->first = node;
    }
    graph->last = node;
    graph->count++;
    return node;
}

/* A captured node follows the one before it. */
static struct fake_node *chain_node(struct fake_graph *graph, int type)
{
    struct fake_node *before = graph->last;
    return add_node(graph, type, &before, before == NULL ? 0 : 1);
}

CUresult fake_graph_capture_kernel(struct fake_graph *graph, uint64_t ns, unsigned int sms)
{
    struct fake_node *node = chain_node(graph, CU_NODE_KERNEL);
    if (node == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    node->ns = ns;
    node->sms = sms;
    return CUDA_SUCCESS;
}

CUresult fake_graph_capture_plain(struct fake_graph *graph, int type)
{
    return chain_node(graph, type) == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult fake_graph_capture_host(struct fake_graph *graph, CUhostFn function, void *data)
{
    struct fake_node *node = chain_node(graph, CU_NODE_HOST);
    if (node == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    node->host = (CUhostNodeParams){function, data};
    return CUDA_SUCCESS;
}

/* Caller holds the lock. */
static CUresult set_allocation(struct fake_node *node, unsigned int device, uint64_t bytes, CUdeviceptr *out)
{
    if (node == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    node->bytes = bytes;
    node->device = device;
    node->pointer = fake_block_add(device, bytes, FAKE_RESERVED, NULL);
    *out = node->pointer;
    return node->pointer == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult fake_graph_capture_alloc(struct fake_graph *graph, unsigned int device, uint64_t bytes, CUdeviceptr *out)
{
    return set_allocation(chain_node(graph, CU_NODE_MEM_ALLOC), device, bytes, out);
}

CUresult fake_graph_capture_free(struct fake_graph *graph, CUdeviceptr pointer)
{
    struct fake_node *node = chain_node(graph, CU_NODE_MEM_FREE);
    if (node == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    node->pointer = pointer;
    return CUDA_SUCCESS;
}

/* ---- building ---- */

API(cuGraphCreate, CUgraph *out, unsigned int flags)
{
    ENTER();
    if (out == NULL || flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = fake_graph_new();
    return *out == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

API(cuGraphDestroy, CUgraph graph)
{
    ENTER();
    fake_lock();
    bool good = is_graph(graph);
    if (good) {
        forget(graph);
    }
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Caller holds the lock. The nodes of a clone have the costs of their originals; the structure is kept by position. */
static struct fake_graph *clone_graph(const struct fake_graph *from)
{
    struct fake_graph *to = fake_graph_new();
    for (const struct fake_node *node = from->first; to != NULL && node != NULL; node = node->next) {
        struct fake_node *copy = chain_node(to, node->type);
        if (copy == NULL) {
            return to;
        }
        copy->ns = node->ns;
        copy->sms = node->sms;
        copy->host = node->host;
        copy->kernel = node->kernel;
        copy->child = node->child != NULL ? clone_graph(node->child) : NULL;
    }
    return to;
}

API(cuGraphClone, CUgraph *out, CUgraph graph)
{
    ENTER();
    fake_lock();
    bool good = out != NULL && is_graph(graph);
    if (good) {
        *out = clone_graph(graph);
    }
    fake_unlock();
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Adds a node and hands it out; NULL and the reason when that is not possible. The lock is held on success. */
static struct fake_node *begin_node(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, int type,
                                    CUresult *result)
{
    *result = CUDA_ERROR_INVALID_VALUE;
    if (out == NULL || !is_graph(graph) || (count > 0 && after == NULL)) {
        return NULL;
    }
    fake_lock();
    struct fake_node *node = add_node(graph, type, after, count);
    if (node == NULL) {
        fake_unlock();
        *result = CUDA_ERROR_OUT_OF_MEMORY;
        return NULL;
    }
    *out = node;
    *result = CUDA_SUCCESS;
    return node;
}

static CUresult set_kernel(struct fake_node *node, const CUkernelNodeParams *params, bool has_kernel)
{
    struct fake_function *function = params->function;
    if (function == NULL && has_kernel) {
        function = params->kernel;
    }
    if (!fake_is_function(function)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const struct fake_context *context = fake_current();
    unsigned int device = fake_is_context(context) ? context->device : 0;
    memcpy(&node->kernel, params, has_kernel ? sizeof *params : offsetof(CUkernelNodeParams, kernel));
    node->kernel.function = function;
    node->ns = fake_duration(function, params->grid, params->params, fake.devices[device].sms, &node->sms);
    return CUDA_SUCCESS;
}

static CUresult add_kernel(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                           const CUkernelNodeParams *params, bool has_kernel)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    struct fake_node *node = params == NULL ? NULL : begin_node(out, graph, after, count, CU_NODE_KERNEL, &result);
    if (node != NULL) {
        result = set_kernel(node, params, has_kernel);
        fake_unlock();
    }
    return result;
}

API(cuGraphAddKernelNode, CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
    const CUkernelNodeParams *params)
{
    ENTER();
    return add_kernel(out, graph, after, count, params, false);
}

API(cuGraphAddKernelNode_v2, CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
    const CUkernelNodeParams *params)
{
    ENTER();
    return add_kernel(out, graph, after, count, params, true);
}

static CUresult add_plain(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, int type)
{
    CUresult result = CUDA_SUCCESS;
    if (begin_node(out, graph, after, count, type, &result) != NULL) {
        fake_unlock();
    }
    return result;
}

API(cuGraphAddEmptyNode, CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count)
{
    ENTER();
    return add_plain(out, graph, after, count, CU_NODE_EMPTY);
}

API(cuGraphAddMemcpyNode, CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, const void *params,
    CUcontext context)
{
    ENTER();
    (void)context;
    return params == NULL ? CUDA_ERROR_INVALID_VALUE : add_plain(out, graph, after, count, CU_NODE_MEMCPY);
}

API(cuGraphAddMemsetNode, CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, const void *params,
    CUcontext context)
{
    ENTER();
    (void)context;
    return params == NULL ? CUDA_ERROR_INVALID_VALUE : add_plain(out, graph, after, count, CU_NODE_MEMSET);
}

API(cuGraphAddHostNode, CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
    const CUhostNodeParams *params)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    ENTER();
    struct fake_node *node = params == NULL ? NULL : begin_node(out, graph, after, count, CU_NODE_HOST, &result);
    if (node != NULL) {
        node->host = *params;
        fake_unlock();
    }
    return result;
}

static CUresult add_child(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraph child)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    struct fake_node *node = is_graph(child) ? begin_node(out, graph, after, count, CU_NODE_GRAPH, &result) : NULL;
    if (node != NULL) {
        child->uses++;
        node->child = child;
        fake_unlock();
    }
    return result;
}

API(cuGraphAddChildGraphNode, CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraph child)
{
    ENTER();
    return add_child(out, graph, after, count, child);
}

static CUresult add_alloc(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                          CUmemAllocNodeParams *params)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (params == NULL || params->bytes == 0 || params->properties.location.type != CU_MEM_LOCATION_DEVICE ||
        params->properties.location.id < 0 || (unsigned int)params->properties.location.id >= fake.device_count) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct fake_node *node = begin_node(out, graph, after, count, CU_NODE_MEM_ALLOC, &result);
    if (node != NULL) {
        result = set_allocation(node, (unsigned int)params->properties.location.id, params->bytes, &params->pointer);
        fake_unlock();
    }
    return result;
}

API(cuGraphAddMemAllocNode, CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
    CUmemAllocNodeParams *params)
{
    ENTER();
    return add_alloc(out, graph, after, count, params);
}

static CUresult add_free(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUdeviceptr pointer)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    struct fake_node *node = pointer == 0 ? NULL : begin_node(out, graph, after, count, CU_NODE_MEM_FREE, &result);
    if (node != NULL) {
        node->pointer = pointer;
        fake_unlock();
    }
    return result;
}

API(cuGraphAddMemFreeNode, CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUdeviceptr pointer)
{
    ENTER();
    return add_free(out, graph, after, count, pointer);
}

static CUresult add_any(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                        CUgraphNodeParams *params)
{
    if (params == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    switch (params->type) {
    case CU_NODE_KERNEL:
        return add_kernel(out, graph, after, count, &params->as.kernel, true);
    case CU_NODE_GRAPH:
        return add_child(out, graph, after, count, params->as.graph);
    case CU_NODE_MEM_ALLOC:
        return add_alloc(out, graph, after, count, &params->as.allocation);
    case CU_NODE_MEM_FREE:
        return add_free(out, graph, after, count, params->as.pointer);
    case CU_NODE_MEMCPY:
    case CU_NODE_MEMSET:
    case CU_NODE_EMPTY:
        return add_plain(out, graph, after, count, params->type);
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

API(cuGraphAddNode, CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraphNodeParams *params)
{
    ENTER();
    return add_any(out, graph, after, count, params);
}

API(cuGraphAddNode_v2, CUgraphNode *out, CUgraph graph, const CUgraphNode *after, const void *edges, size_t count,
    CUgraphNodeParams *params)
{
    ENTER();
    (void)edges;
    return add_any(out, graph, after, count, params);
}

API(cuGraphMemAllocNodeGetParams, CUgraphNode node, CUmemAllocNodeParams *out)
{
    ENTER();
    if (node == NULL || out == NULL || node->type != CU_NODE_MEM_ALLOC) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    memset(out, 0, sizeof *out);
    out->properties.type = 1;
    out->properties.location = (CUmemLocation){CU_MEM_LOCATION_DEVICE, (int)node->device};
    out->bytes = node->bytes;
    out->pointer = node->pointer;
    return CUDA_SUCCESS;
}

API(cuGraphMemFreeNodeGetParams, CUgraphNode node, CUdeviceptr *out)
{
    ENTER();
    if (node == NULL || out == NULL || node->type != CU_NODE_MEM_FREE) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = node->pointer;
    return CUDA_SUCCESS;
}

API(cuGraphNodeGetType, CUgraphNode node, int *type)
{
    ENTER();
    if (node == NULL || type == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *type = node->type;
    return CUDA_SUCCESS;
}

API(cuGraphKernelNodeGetParams, CUgraphNode node, CUkernelNodeParams *out)
{
    ENTER();
    if (node == NULL || out == NULL || node->type != CU_NODE_KERNEL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    memcpy(out, &node->kernel, offsetof(CUkernelNodeParams, kernel));
    return CUDA_SUCCESS;
}

API(cuGraphKernelNodeGetParams_v2, CUgraphNode node, CUkernelNodeParams *out)
{
    ENTER();
    if (node == NULL || out == NULL || node->type != CU_NODE_KERNEL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = node->kernel;
    return CUDA_SUCCESS;
}

API(cuGraphGetNodes, CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    ENTER();
    if (!is_graph(graph) || count == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    size_t room = nodes == NULL ? 0 : *count;
    size_t at = 0;
    for (struct fake_node *node = graph->first; node != NULL && at < room; node = node->next) {
        nodes[at++] = node;
    }
    *count = nodes == NULL ? graph->count : at;
    return CUDA_SUCCESS;
}

API(cuGraphChildGraphNodeGetGraph, CUgraphNode node, CUgraph *out)
{
    ENTER();
    if (node == NULL || out == NULL || node->type != CU_NODE_GRAPH) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = node->child;
    return CUDA_SUCCESS;
}

/* ---- instances ---- */

/* Caller holds the lock. Nodes stand after what they depend on, so one pass finds the longest path. */
static uint64_t duration_of(const struct fake_graph *graph, unsigned int sms)
{
    uint64_t longest = 0;
    double area = 0;
    for (struct fake_node *node = graph->first; node != NULL; node = node->next) {
        uint64_t ns = node->disabled ? 0 : node->child != NULL ? duration_of(node->child, sms) : node->ns;
        uint64_t begin = 0;
        for (size_t i = 0; i < node->after_count; i++) {
            begin = node->after[i]->end_ns > begin ? node->after[i]->end_ns : begin;
        }
        node->end_ns = begin + ns;
        longest = node->end_ns > longest ? node->end_ns : longest;
        area += (double)ns * (node->child != NULL ? 1.0 : (double)node->sms / (double)sms);
    }
    return area > (double)longest ? (uint64_t)area : longest;
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph, uint64_t flags)
{
    const struct fake_context *context = fake_current();
    if (out == NULL || !is_graph(graph)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct fake_exec *exec = calloc(1, sizeof *exec);
    if (exec == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    fake_lock();
    graph->uses++;
    exec->magic = EXEC_MAGIC;
    exec->graph = graph;
    exec->flags = (unsigned int)flags;
    exec->ns = duration_of(graph, fake.devices[fake_is_context(context) ? context->device : 0].sms);
    fake_unlock();
    *out = exec;
    return CUDA_SUCCESS;
}

API(cuGraphInstantiate, CUgraphExec *out, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_bytes)
{
    ENTER();
    (void)error_node;
    (void)log;
    (void)log_bytes;
    return instantiate(out, graph, 0);
}

API(cuGraphInstantiate_v2, CUgraphExec *out, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_bytes)
{
    ENTER();
    (void)error_node;
    (void)log;
    (void)log_bytes;
    return instantiate(out, graph, 0);
}

API(cuGraphInstantiateWithFlags, CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
    ENTER();
    return instantiate(out, graph, flags);
}

static CUresult instantiate_with_params(CUgraphExec *out, CUgraph graph, CUgraphInstantiateParams *params)
{
    if (params == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    params->error_node = NULL;
    CUresult result = instantiate(out, graph, params->flags);
    params->result = result == CUDA_SUCCESS ? 0 : 1;
    return result;
}

API(cuGraphInstantiateWithParams, CUgraphExec *out, CUgraph graph, CUgraphInstantiateParams *params)
{
    ENTER();
    return instantiate_with_params(out, graph, params);
}

API(cuGraphInstantiateWithParams_ptsz, CUgraphExec *out, CUgraph graph, CUgraphInstantiateParams *params)
{
    ENTER();
    return instantiate_with_params(out, graph, params);
}

API(cuGraphExecDestroy, CUgraphExec exec)
{
    ENTER();
    if (exec == NULL || exec->magic != EXEC_MAGIC) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    forget(exec->graph);
    fake_unlock();
    exec->magic = 0;
    free(exec);
    return CUDA_SUCCESS;
}

API(cuGraphExecKernelNodeSetParams, CUgraphExec exec, CUgraphNode node, const CUkernelNodeParams *params)
{
    ENTER();
    if (exec == NULL || exec->magic != EXEC_MAGIC || node == NULL || params == NULL || node->type != CU_NODE_KERNEL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    CUresult result = set_kernel(node, params, false);
    const struct fake_context *context = fake_current();
    exec->ns = duration_of(exec->graph, fake.devices[fake_is_context(context) ? context->device : 0].sms);
    fake_unlock();
    return result;
}

static struct fake_pool *graph_pool(unsigned int device)
{
    struct fake_device *at = &fake.devices[device];
    if (at->graph_pool == NULL) {
        at->graph_pool = fake_pool_new(device);
    }
    return at->graph_pool;
}

/* Caller holds the lock. Memory nodes in the order of the graph; what fits no more undoes nothing, as on hardware. */
static CUresult run_memory(const struct fake_graph *graph, bool may_free)
{
    for (const struct fake_node *node = graph->first; node != NULL; node = node->next) {
        CUresult result = node->child != NULL ? run_memory(node->child, may_free) : CUDA_SUCCESS;
        struct fake_block *block = node->pointer != 0 ? fake_block_find(node->pointer) : NULL;
        if (result == CUDA_SUCCESS && node->type == CU_NODE_MEM_ALLOC && block != NULL) {
            if (block->kind == FAKE_GRAPH && may_free) {
                (void)fake_free_block(block);
            }
            if (block->kind == FAKE_GRAPH) {
                return CUDA_ERROR_INVALID_VALUE; /* launched again before it was freed */
            }
            struct fake_pool *pool = graph_pool(node->device);
            if (pool == NULL || !fake_pool_take(pool, node->bytes)) {
                return CUDA_ERROR_OUT_OF_MEMORY;
            }
            block->kind = FAKE_GRAPH;
            block->owner = pool;
        }
        if (result == CUDA_SUCCESS && node->type == CU_NODE_MEM_FREE && block != NULL && block->kind == FAKE_GRAPH) {
            (void)fake_free_block(block);
        }
        if (result != CUDA_SUCCESS) {
            return result;
        }
    }
    return CUDA_SUCCESS;
}

static CUresult run_host(const struct fake_graph *graph, CUstream stream, bool per_thread)
{
    CUresult result = CUDA_SUCCESS;
    for (const struct fake_node *node = graph->first; node != NULL && result == CUDA_SUCCESS; node = node->next) {
        if (node->type == CU_NODE_HOST) {
            result = fake_call_host(stream, per_thread, node->host.function, node->host.data);
        }
    }
    return result;
}

static CUresult launch(CUgraphExec exec, CUstream stream, bool per_thread)
{
    const struct fake_context *context = fake_current();
    CUresult result = CUDA_SUCCESS;
    if (exec == NULL || exec->magic != EXEC_MAGIC) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!fake_is_context(context)) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    struct fake_graph *capture = fake_capture_of(stream, per_thread, &result);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    fake_lock();
    if (capture != NULL) { /* becomes a child node */
        struct fake_node *node = chain_node(capture, CU_NODE_GRAPH);
        if (node != NULL) {
            exec->graph->uses++;
            node->child = exec->graph;
        }
        fake_unlock();
        return node == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    }
    result = run_memory(exec->graph, (exec->flags & AUTO_FREE_ON_LAUNCH) != 0);
    fake_unlock();
    if (result == CUDA_SUCCESS) {
        result = fake_work(stream, per_thread, exec->ns, fake.devices[context->device].sms);
    }
    return result == CUDA_SUCCESS ? run_host(exec->graph, stream, per_thread) : result;
}

API(cuGraphLaunch, CUgraphExec exec, CUstream stream)
{
    ENTER();
    return launch(exec, stream, false);
}

API(cuGraphLaunch_ptsz, CUgraphExec exec, CUstream stream)
{
    ENTER();
    return launch(exec, stream, true);
}

/* The pool grows to what a launch will need. */
static CUresult upload(CUgraphExec exec)
{
    uint64_t need[FAKE_DEVICES] = {0};
    CUresult result = CUDA_SUCCESS;
    if (exec == NULL || exec->magic != EXEC_MAGIC) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    for (const struct fake_node *node = exec->graph->first; node != NULL; node = node->next) {
        const struct fake_block *block = node->pointer != 0 ? fake_block_find(node->pointer) : NULL;
        if (node->type == CU_NODE_MEM_ALLOC && block != NULL && block->kind == FAKE_RESERVED) {
            need[node->device] += node->bytes;
        }
    }
    for (unsigned int device = 0; device < fake.device_count && result == CUDA_SUCCESS; device++) {
        struct fake_pool *pool = need[device] > 0 ? graph_pool(device) : NULL;
        if (pool != NULL && fake_pool_take(pool, need[device])) {
            fake_pool_give(pool, need[device]);
        } else if (need[device] > 0) {
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    fake_unlock();
    return result;
}

API(cuGraphUpload, CUgraphExec exec, CUstream stream)
{
    ENTER();
    (void)stream;
    return upload(exec);
}

API(cuGraphUpload_ptsz, CUgraphExec exec, CUstream stream)
{
    ENTER();
    (void)stream;
    return upload(exec);
}

/* ---- memory that graphs keep ---- */

API(cuDeviceGraphMemTrim, CUdevice device)
{
    ENTER();
    if (device < 0 || (unsigned int)device >= fake.device_count) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    fake_lock();
    if (fake.devices[device].graph_pool != NULL) {
        fake_pool_trim(fake.devices[device].graph_pool, 0);
    }
    fake_unlock();
    return CUDA_SUCCESS;
}

API(cuDeviceGetGraphMemAttribute, CUdevice device, int attribute, void *value)
{
    ENTER();
    if (device < 0 || (unsigned int)device >= fake.device_count) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    if (value == NULL || attribute < 0 || attribute > 3) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    const struct fake_pool *pool = fake.devices[device].graph_pool;
    const uint64_t none[4] = {0};
    const uint64_t some[4] = {
        pool != NULL ? pool->used : 0,
        pool != NULL ? pool->used_high : 0,
        pool != NULL ? pool->reserved : 0,
        pool != NULL ? pool->reserved_high : 0,
    };
    memcpy(value, pool == NULL ? &none[attribute] : &some[attribute], sizeof(uint64_t));
    fake_unlock();
    return CUDA_SUCCESS;
}

API(cuDeviceSetGraphMemAttribute, CUdevice device, int attribute, void *value)
{
    enum { USED_HIGH = 1, RESERVED_HIGH = 3 };
    ENTER();
    if (device < 0 || (unsigned int)device >= fake.device_count) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    if (value == NULL || (attribute != USED_HIGH && attribute != RESERVED_HIGH) || *(const uint64_t *)value != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    struct fake_pool *pool = fake.devices[device].graph_pool;
    if (pool != NULL && attribute == USED_HIGH) {
        pool->used_high = pool->used;
    } else if (pool != NULL) {
        pool->reserved_high = pool->reserved;
    }
    fake_unlock();
    return CUDA_SUCCESS;
}
