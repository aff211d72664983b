/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams, events, launches: what is placed on the axis of service, and waiting for it. Model: card.h, fake.h.
 *
 * Locks taken here: fake.lock, then a device's clock. Called with hooks active: no.
 */
#include "fake.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define STREAM_MAGIC UINT64_C(0x4d41455254534b46)
#define EVENT_MAGIC UINT64_C(0x544e455645454b46)
#define SPIN_NS UINT64_C(60000)

enum { STREAM_NON_BLOCKING = 1, EVENT_DISABLE_TIMING = 2 };

struct fake_stream {
    uint64_t magic;
    struct fake_context *context;
    struct fake_stream *next;
    unsigned int flags;
    int priority;
    bool is_legacy;
    uint64_t id;
    uint64_t until_ns;          /* where the last of its work ends */
    uint64_t queue[FAKE_QUEUE]; /* where the last so many launches end */
    uint64_t queued;
    struct fake_graph *capture;
    int capture_mode;
    bool began_capture;
    uint64_t capture_id;
    unsigned int host_functions; /* not yet run */
};

struct fake_mark {
    uint64_t magic;
    unsigned int flags;
    unsigned int device;
    bool recorded;
    bool done;
    uint64_t target_ns;
    uint64_t time_ns;
    struct fake_graph *captured;
    struct fake_mark *next;
    struct fake_mark **link; /* in the device's list while it is pending */
};

static __thread struct {
    struct fake_context *context;
    uint64_t context_id;
    struct fake_stream *stream;
} own_stream;

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* ---- streams ---- */

/* Caller holds the lock. */
struct fake_stream *fake_stream_new(struct fake_context *context, unsigned int flags, int priority)
{
    struct fake_stream *stream = calloc(1, sizeof *stream);
    if (stream != NULL) {
        stream->magic = STREAM_MAGIC;
        stream->context = context;
        stream->flags = flags;
        stream->priority = priority;
        stream->id = ++fake.next_id;
        stream->is_legacy = context->streams == NULL;
        stream->next = context->streams;
        context->streams = stream;
    }
    return stream;
}

void fake_streams_free(struct fake_context *context)
{
    while (context->streams != NULL) {
        struct fake_stream *stream = context->streams;
        context->streams = stream->next;
        stream->magic = 0;
        free(stream);
    }
}

static struct fake_stream *per_thread_stream(struct fake_context *context)
{
    if (own_stream.context != context || own_stream.context_id != context->id) {
        fake_lock();
        own_stream.context = context;
        own_stream.context_id = context->id;
        own_stream.stream = fake_stream_new(context, 0, 0);
        fake_unlock();
    }
    return own_stream.stream;
}

/* The stream that a handle means here; NULL and the reason when it means none. */
static struct fake_stream *find_stream(CUstream handle, bool per_thread, CUresult *result)
{
    *result = CUDA_SUCCESS;
    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        struct fake_context *context = fake_current();
        if (!fake_is_context(context)) {
            *result = CUDA_ERROR_INVALID_CONTEXT;
            return NULL;
        }
        bool own = handle == CU_STREAM_PER_THREAD || (handle == NULL && per_thread);
        return own ? per_thread_stream(context) : context->legacy;
    }
    if (handle->magic != STREAM_MAGIC) {
        *result = CUDA_ERROR_INVALID_HANDLE;
        return NULL;
    }
    return handle;
}

CUresult fake_check_stream(CUstream stream, bool per_thread)
{
    CUresult result = CUDA_SUCCESS;
    if (!fake_is_context(fake_current())) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    (void)find_stream(stream, per_thread, &result);
    return result;
}

struct fake_graph *fake_capture_of(CUstream handle, bool per_thread, CUresult *result)
{
    const struct fake_stream *stream = find_stream(handle, per_thread, result);
    return stream == NULL ? NULL : stream->capture;
}

/* ---- the axis of service ---- */

/* Caller holds the lock. Earliest point for the next work of this stream: legacy and blocking streams wait for each
   other. */
static uint64_t floor_of(const struct fake_stream *stream)
{
    const struct fake_context *context = stream->context;
    if (stream->is_legacy) {
        return larger(stream->until_ns, context->blocking_until_ns);
    }
    if ((stream->flags & STREAM_NON_BLOCKING) == 0) {
        return larger(stream->until_ns, context->legacy->until_ns);
    }
    return stream->until_ns;
}

/* Caller holds the lock. */
static void ends_at(struct fake_stream *stream, uint64_t until_ns)
{
    stream->until_ns = until_ns;
    if ((stream->flags & STREAM_NON_BLOCKING) == 0 && !stream->is_legacy) {
        stream->context->blocking_until_ns = larger(stream->context->blocking_until_ns, until_ns);
    }
}

static const struct card_share *share_of(unsigned int device)
{
    return &fake.card->shares[fake.slot][fake.devices[device].card];
}

/* Caller holds the lock and the clock. Events whose point has been reached learn their time. */
static void settle_events(unsigned int device, uint64_t served_ns)
{
    struct fake_device *at = &fake.devices[device];
    for (struct fake_mark **link = &at->pending; *link != NULL;) {
        struct fake_mark *event = *link;
        if (event->target_ns > served_ns) {
            link = &event->next;
            continue;
        }
        event->time_ns = card_time_of(fake.card, fake.slot, at->card, event->target_ns);
        event->done = true;
        event->link = NULL;
        *link = event->next;
        if (event->next != NULL) {
            event->next->link = link;
        }
    }
}

/* Caller holds the lock. Takes the clock; returns how far this process has been served. Pairs with leave_clock. */
static uint64_t enter_clock(unsigned int device, uint64_t *now)
{
    struct fake_device *at = &fake.devices[device];
    *now = card_clock_enter(fake.card, fake.slot, at->card);
    at->known_ns = share_of(device)->served_ns;
    if (at->pending != NULL) {
        settle_events(device, at->known_ns);
    }
    return at->known_ns;
}

static void leave_clock(unsigned int device)
{
    card_clock_leave(fake.card, fake.devices[device].card);
}

/* Caller holds the lock. */
static void note_launch(unsigned int device, uint64_t now)
{
    struct card_launches *launches = &fake.card->launches[fake.slot][fake.devices[device].card];
    launches->at_ns[launches->count % CARD_LAUNCHES] = now;
    __atomic_store_n(&launches->count, launches->count + 1, __ATOMIC_RELEASE);
}

/* Caller holds the lock. First point not before `from` at which `sms` multiprocessors are free; marks them taken. */
static uint64_t place(struct fake_device *at, uint64_t from, uint64_t duration_ns, unsigned int sms)
{
    unsigned int kept = 0;
    for (unsigned int i = 0; i < at->running_count; i++) {
        if (at->running[i].until_ns > at->known_ns) {
            at->running[kept++] = at->running[i];
        }
    }
    at->running_count = kept;
    for (;;) {
        unsigned int taken = 0;
        uint64_t next = UINT64_MAX;
        for (unsigned int i = 0; i < at->running_count; i++) {
            if (at->running[i].until_ns > from) {
                taken += at->running[i].sms;
                next = at->running[i].until_ns < next ? at->running[i].until_ns : next;
            }
        }
        bool has_room = at->running_count < FAKE_RUNNING || next == UINT64_MAX;
        if (taken + sms <= at->sms && has_room) {
            break;
        }
        if (next == UINT64_MAX) {
            break;
        }
        from = next;
    }
    if (at->running_count == FAKE_RUNNING) {
        at->running_count = 0; /* all of them end before this one begins */
    }
    at->running[at->running_count].until_ns = from + duration_ns;
    at->running[at->running_count++].sms = sms;
    return from;
}

/* Sleeps until this process has been served so far. Caller holds no lock. */
static void wait_for(unsigned int device, uint64_t target_ns)
{
    for (;;) {
        uint64_t now = 0;
        fake_lock();
        uint64_t served = enter_clock(device, &now);
        bool is_alone = served >= target_ns || card_busy_count(fake.card, fake.devices[device].card) < 2;
        leave_clock(device);
        fake_unlock();
        if (served >= target_ns) {
            return;
        }
        uint64_t missing = target_ns - served;
        if (missing > SPIN_NS + SPIN_NS / 4) {
            uint64_t pause = missing - SPIN_NS;
            struct timespec length = {.tv_sec = (time_t)(pause / UINT64_C(1000000000)),
                                      .tv_nsec = (long)(pause % UINT64_C(1000000000))};
            (void)nanosleep(&length, NULL);
        } else if (is_alone) {
            (void)sched_yield();
        } else {
            (void)nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        }
    }
}

void fake_work_wait_device(unsigned int device)
{
    wait_for(device, fake.devices[device].until_ns);
}

bool fake_work_is_done(unsigned int device)
{
    uint64_t now = 0;
    uint64_t served = enter_clock(device, &now);
    leave_clock(device);
    return served >= fake.devices[device].until_ns;
}

static CUresult enqueue(struct fake_stream *stream, uint64_t duration_ns, unsigned int sms)
{
    unsigned int device = stream->context->device;
    struct fake_device *at = &fake.devices[device];
    uint64_t now = 0;
    if (duration_ns == 0) {
        if (floor_of(stream) > at->known_ns) {
            fake_lock();
            ends_at(stream, floor_of(stream));
            fake_unlock();
        }
        return CUDA_SUCCESS;
    }
    uint64_t oldest = stream->queue[stream->queued % FAKE_QUEUE];
    if (oldest > at->known_ns) {
        wait_for(device, oldest);
    }
    fake_lock();
    uint64_t from = larger(enter_clock(device, &now), floor_of(stream));
    uint64_t until = place(at, from, duration_ns, sms > at->sms ? at->sms : sms) + duration_ns;
    card_work(fake.card, fake.slot, at->card, until);
    leave_clock(device);
    note_launch(device, now);
    at->until_ns = larger(at->until_ns, until);
    stream->queue[stream->queued++ % FAKE_QUEUE] = until;
    ends_at(stream, until);
    fake_unlock();
    return CUDA_SUCCESS;
}

/* Time in which the managed memory of this process moves to the device. */
static uint64_t page_in(unsigned int device)
{
    const struct fake_device *at = &fake.devices[device];
    if (at->migration_bytes_per_s == 0) {
        return 0;
    }
    double moved = (double)card_page_in(fake.card, fake.slot, at->card, at->capacity);
    return (uint64_t)(moved * 1e9 / (double)at->migration_bytes_per_s);
}

CUresult fake_work(CUstream handle, bool per_thread, uint64_t duration_ns, unsigned int sms)
{
    CUresult result = CUDA_SUCCESS;
    struct fake_stream *stream = find_stream(handle, per_thread, &result);
    if (stream == NULL) {
        return result;
    }
    struct card_share *share = &fake.card->shares[fake.slot][fake.devices[stream->context->device].card];
    __atomic_store_n(&share->launches, __atomic_load_n(&share->launches, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
    return enqueue(stream, duration_ns + page_in(stream->context->device), sms);
}

/* ---- launches ---- */

static CUresult launch(struct fake_function *function, const unsigned int grid[3], const unsigned int block[3],
                       CUstream handle, bool per_thread, void **params)
{
    struct fake_context *context = fake_current();
    CUresult result = CUDA_SUCCESS;
    unsigned int occupied = 0;
    if (!fake_is_context(context)) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (!fake_is_function(function)) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || block[0] == 0 || block[1] == 0 || block[2] == 0 ||
        (uint64_t)block[0] * block[1] * block[2] > 1024) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct fake_graph *graph = fake_capture_of(handle, per_thread, &result);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (function->local_bytes > 0 && !fake_grow_local(context, function->local_bytes)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    uint64_t duration = fake_duration(function, grid, params, fake.devices[context->device].sms, &occupied);
    if (graph != NULL) {
        fake_lock();
        result = fake_graph_capture_kernel(graph, duration, occupied);
        fake_unlock();
        return result;
    }
    return fake_work(handle, per_thread, duration, occupied);
}

#define LAUNCH(name, per_thread)                                                                                       \
    API(name, CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,                 \
        unsigned int by, unsigned int bz, unsigned int shared_bytes, CUstream stream, void **params, void **extra)     \
    {                                                                                                                  \
        const unsigned int grid[3] = {gx, gy, gz};                                                                     \
        const unsigned int block[3] = {bx, by, bz};                                                                    \
        ENTER();                                                                                                       \
        (void)shared_bytes;                                                                                            \
        (void)extra;                                                                                                   \
        return launch(function, grid, block, stream, per_thread, params);                                              \
    }
LAUNCH(cuLaunchKernel, false)
LAUNCH(cuLaunchKernel_ptsz, true)

#define LAUNCH_EX(name, per_thread)                                                                                    \
    API(name, const CUlaunchConfig *config, CUfunction function, void **params, void **extra)                          \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        (void)extra;                                                                                                   \
        return config == NULL ? CUDA_ERROR_INVALID_VALUE                                                               \
                              : launch(function, config->grid, config->block, config->stream, per_thread, params);     \
    }
LAUNCH_EX(cuLaunchKernelEx, false)
LAUNCH_EX(cuLaunchKernelEx_ptsz, true)

static CUresult launch_cooperative(struct fake_function *function, const unsigned int grid[3],
                                   const unsigned int block[3], CUstream handle, bool per_thread, void **params)
{
    enum { TOO_LARGE = 720, BLOCKS_PER_SM = 32 };
    const struct fake_context *context = fake_current();
    if (fake_is_context(context) &&
        (uint64_t)grid[0] * grid[1] * grid[2] > (uint64_t)fake.devices[context->device].sms * BLOCKS_PER_SM) {
        return TOO_LARGE;
    }
    return launch(function, grid, block, handle, per_thread, params);
}

#define LAUNCH_COOPERATIVE(name, per_thread)                                                                           \
    API(name, CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,                 \
        unsigned int by, unsigned int bz, unsigned int shared_bytes, CUstream stream, void **params)                   \
    {                                                                                                                  \
        const unsigned int grid[3] = {gx, gy, gz};                                                                     \
        const unsigned int block[3] = {bx, by, bz};                                                                    \
        ENTER();                                                                                                       \
        (void)shared_bytes;                                                                                            \
        return launch_cooperative(function, grid, block, stream, per_thread, params);                                  \
    }
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, false)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, true)

API(cuLaunchCooperativeKernelMultiDevice, CUlaunchParams *list, unsigned int count, unsigned int flags)
{
    CUresult result = CUDA_SUCCESS;
    ENTER();
    (void)flags;
    if (list == NULL || count == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++) {
        result =
            launch_cooperative(list[i].function, list[i].grid, list[i].block, list[i].stream, false, list[i].params);
    }
    return result;
}

/* The calls of CUDA before 4.0: block shapes set apart are not kept, durations do not depend on them. */
static CUresult launch_old(CUfunction function, int width, int height, CUstream stream)
{
    const unsigned int grid[3] = {(unsigned int)width, (unsigned int)height, 1};
    const unsigned int block[3] = {1, 1, 1};
    return width <= 0 || height <= 0 ? CUDA_ERROR_INVALID_VALUE : launch(function, grid, block, stream, false, NULL);
}

API(cuLaunch, CUfunction function)
{
    ENTER();
    return launch_old(function, 1, 1, NULL);
}

API(cuLaunchGrid, CUfunction function, int width, int height)
{
    ENTER();
    return launch_old(function, width, height, NULL);
}

API(cuLaunchGridAsync, CUfunction function, int width, int height, CUstream stream)
{
    ENTER();
    return launch_old(function, width, height, stream);
}

/* ---- host functions ---- */

struct call {
    CUhostFn function;
    CUstreamCallback callback;
    void *data;
    struct fake_stream *stream;
    uint64_t target_ns;
};

static void *run_call(void *argument)
{
    struct call *call = argument;
    wait_for(call->stream->context->device, call->target_ns);
    if (call->function != NULL) {
        call->function(call->data);
    } else {
        call->callback(call->stream, CUDA_SUCCESS, call->data);
    }
    (void)__atomic_sub_fetch(&call->stream->host_functions, 1, __ATOMIC_RELEASE);
    free(call);
    return NULL;
}

static CUresult call_later(CUstream handle, bool per_thread, CUhostFn function, CUstreamCallback callback, void *data)
{
    CUresult result = CUDA_SUCCESS;
    pthread_t thread;
    struct fake_stream *stream = find_stream(handle, per_thread, &result);
    if (stream == NULL) {
        return result;
    }
    if (function == NULL && callback == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (stream->capture != NULL) {
        if (function == NULL) {
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        fake_lock();
        result = fake_graph_capture_host(stream->capture, function, data);
        fake_unlock();
        return result;
    }
    struct call *call = malloc(sizeof *call);
    if (call == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    fake_lock();
    *call = (struct call){function, callback, data, stream, floor_of(stream)};
    fake_unlock();
    (void)__atomic_add_fetch(&stream->host_functions, 1, __ATOMIC_ACQUIRE);
    if (pthread_create(&thread, NULL, run_call, call) != 0) {
        (void)__atomic_sub_fetch(&stream->host_functions, 1, __ATOMIC_RELEASE);
        free(call);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    (void)pthread_detach(thread);
    return CUDA_SUCCESS;
}

CUresult fake_call_host(CUstream stream, bool per_thread, CUhostFn function, void *data)
{
    return call_later(stream, per_thread, function, NULL, data);
}

#define HOST_FUNCTION(name, per_thread)                                                                                \
    API(name, CUstream stream, CUhostFn function, void *data)                                                          \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return call_later(stream, per_thread, function, NULL, data);                                                   \
    }
#define CALLBACK(name, per_thread)                                                                                     \
    API(name, CUstream stream, CUstreamCallback callback, void *data, unsigned int flags)                              \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return flags != 0 ? CUDA_ERROR_INVALID_VALUE : call_later(stream, per_thread, NULL, callback, data);           \
    }
HOST_FUNCTION(cuLaunchHostFunc, false)
HOST_FUNCTION(cuLaunchHostFunc_ptsz, true)
CALLBACK(cuStreamAddCallback, false)
CALLBACK(cuStreamAddCallback_ptsz, true)

/* ---- streams as objects ---- */

static CUresult create_stream(CUstream *out, unsigned int flags, int priority)
{
    struct fake_context *context = fake_current();
    if (!fake_is_context(context)) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (out == NULL || flags > STREAM_NON_BLOCKING) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_lock();
    *out = fake_stream_new(context, flags, priority);
    fake_unlock();
    return *out == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

API(cuStreamCreate, CUstream *out, unsigned int flags)
{
    ENTER();
    return create_stream(out, flags, 0);
}

API(cuStreamCreateWithPriority, CUstream *out, unsigned int flags, int priority)
{
    ENTER();
    return create_stream(out, flags, priority);
}

static CUresult destroy_stream(CUstream stream)
{
    if (stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD ||
        stream->magic != STREAM_MAGIC || stream->is_legacy) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    while (__atomic_load_n(&stream->host_functions, __ATOMIC_ACQUIRE) > 0) {
        (void)nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    fake_lock();
    for (struct fake_stream **at = &stream->context->streams; *at != NULL; at = &(*at)->next) {
        if (*at == stream) {
            *at = stream->next;
            break;
        }
    }
    fake_unlock();
    stream->magic = 0;
    free(stream);
    return CUDA_SUCCESS;
}

API(cuStreamDestroy, CUstream stream)
{
    ENTER();
    return destroy_stream(stream);
}

API(cuStreamDestroy_v2, CUstream stream)
{
    ENTER();
    return destroy_stream(stream);
}

static CUresult synchronize(CUstream handle, bool per_thread)
{
    CUresult result = CUDA_SUCCESS;
    struct fake_stream *stream = find_stream(handle, per_thread, &result);
    if (stream == NULL) {
        return result;
    }
    if (stream->capture != NULL) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    unsigned int device = stream->context->device;
    fake_lock();
    uint64_t target = floor_of(stream);
    fake_unlock();
    if (target > fake.devices[device].known_ns) {
        wait_for(device, target);
    }
    while (__atomic_load_n(&stream->host_functions, __ATOMIC_ACQUIRE) > 0) {
        (void)nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    fake_lock();
    fake_pools_settle(device);
    fake_unlock();
    return CUDA_SUCCESS;
}

static CUresult query(CUstream handle, bool per_thread)
{
    CUresult result = CUDA_SUCCESS;
    uint64_t now = 0;
    struct fake_stream *stream = find_stream(handle, per_thread, &result);
    if (stream == NULL) {
        return result;
    }
    if (stream->capture != NULL) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    fake_lock();
    unsigned int device = stream->context->device;
    uint64_t target = floor_of(stream);
    bool is_done = target <= fake.devices[device].known_ns;
    if (!is_done) {
        is_done = enter_clock(device, &now) >= target;
        leave_clock(device);
    }
    fake_unlock();
    return is_done && __atomic_load_n(&stream->host_functions, __ATOMIC_ACQUIRE) == 0 ? CUDA_SUCCESS
                                                                                      : CUDA_ERROR_NOT_READY;
}

#define STREAM_CALL(name, enter, body, per_thread)                                                                     \
    API(name, CUstream stream)                                                                                         \
    {                                                                                                                  \
        enter();                                                                                                       \
        return body(stream, per_thread);                                                                               \
    }
STREAM_CALL(cuStreamSynchronize, ENTER_SYNCHRONIZE, synchronize, false)
STREAM_CALL(cuStreamSynchronize_ptsz, ENTER_SYNCHRONIZE, synchronize, true)
STREAM_CALL(cuStreamQuery, ENTER, query, false)
STREAM_CALL(cuStreamQuery_ptsz, ENTER, query, true)

API(cuCtxSynchronize, void)
{
    ENTER_SYNCHRONIZE();
    struct fake_context *context = fake_current();
    if (!fake_is_context(context)) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    uint64_t target = 0;
    bool is_capturing = false;
    unsigned int waiting = 0;
    fake_lock();
    for (const struct fake_stream *stream = context->streams; stream != NULL; stream = stream->next) {
        target = larger(target, stream->until_ns);
        is_capturing = is_capturing || (stream->capture != NULL && stream->capture_mode == 0);
        waiting += __atomic_load_n(&stream->host_functions, __ATOMIC_ACQUIRE);
    }
    fake_unlock();
    if (is_capturing) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (target > fake.devices[context->device].known_ns) {
        wait_for(context->device, target);
    }
    while (waiting > 0) {
        (void)nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        waiting = 0;
        fake_lock();
        for (const struct fake_stream *stream = context->streams; stream != NULL; stream = stream->next) {
            waiting += __atomic_load_n(&stream->host_functions, __ATOMIC_ACQUIRE);
        }
        fake_unlock();
    }
    fake_lock();
    fake_pools_settle(context->device);
    fake_unlock();
    return CUDA_SUCCESS;
}

#define STREAM_GETTER(name, type, expression, per_thread)                                                              \
    API(name, CUstream handle, type *out)                                                                              \
    {                                                                                                                  \
        CUresult result = CUDA_SUCCESS;                                                                                \
        ENTER();                                                                                                       \
        const struct fake_stream *stream = find_stream(handle, per_thread, &result);                                   \
        if (stream != NULL && out == NULL) {                                                                           \
            return CUDA_ERROR_INVALID_VALUE;                                                                           \
        }                                                                                                              \
        if (stream != NULL) {                                                                                          \
            *out = (expression);                                                                                       \
        }                                                                                                              \
        return result;                                                                                                 \
    }
STREAM_GETTER(cuStreamGetCtx, CUcontext, stream->context, false)
STREAM_GETTER(cuStreamGetCtx_ptsz, CUcontext, stream->context, true)
STREAM_GETTER(cuStreamGetFlags, unsigned int, stream->flags, false)
STREAM_GETTER(cuStreamGetFlags_ptsz, unsigned int, stream->flags, true)
STREAM_GETTER(cuStreamGetPriority, int, stream->priority, false)
STREAM_GETTER(cuStreamGetPriority_ptsz, int, stream->priority, true)
STREAM_GETTER(cuStreamGetId, unsigned long long, stream->id, false)
STREAM_GETTER(cuStreamGetId_ptsz, unsigned long long, stream->id, true)
STREAM_GETTER(cuStreamGetDevice, CUdevice, (CUdevice)stream->context->device, false)
STREAM_GETTER(cuStreamGetDevice_ptsz, CUdevice, (CUdevice)stream->context->device, true)
STREAM_GETTER(cuStreamIsCapturing, int, stream->capture != NULL ? 1 : 0, false)
STREAM_GETTER(cuStreamIsCapturing_ptsz, int, stream->capture != NULL ? 1 : 0, true)

/* ---- capture ---- */

static CUresult begin_capture(CUstream handle, bool per_thread, int mode, struct fake_graph *into)
{
    CUresult result = CUDA_SUCCESS;
    struct fake_stream *stream = find_stream(handle, per_thread, &result);
    if (stream == NULL) {
        return result;
    }
    if (stream->is_legacy || stream->capture != NULL || mode < 0 || mode > 2) {
        return stream->is_legacy ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_ERROR_ILLEGAL_STATE;
    }
    fake_lock();
    stream->capture = into != NULL ? into : fake_graph_new();
    stream->capture_mode = mode;
    stream->began_capture = true;
    stream->capture_id = ++fake.next_id;
    fake_unlock();
    return stream->capture == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult end_capture(CUstream handle, bool per_thread, CUgraph *out)
{
    CUresult result = CUDA_SUCCESS;
    struct fake_stream *stream = find_stream(handle, per_thread, &result);
    if (stream == NULL) {
        return result;
    }
    if (stream->capture == NULL || !stream->began_capture || out == NULL) {
        return out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_ILLEGAL_STATE;
    }
    fake_lock();
    struct fake_graph *graph = stream->capture;
    for (struct fake_context *context = fake.contexts; context != NULL; context = context->next) {
        for (struct fake_stream *at = context->streams; at != NULL; at = at->next) {
            if (at->capture == graph) {
                at->capture = NULL;
                at->began_capture = false;
            }
        }
    }
    fake_unlock();
    *out = graph;
    return CUDA_SUCCESS;
}

static CUresult capture_info(CUstream handle, bool per_thread, int *status, uint64_t *id, CUgraph *graph, size_t *count)
{
    CUresult result = CUDA_SUCCESS;
    const struct fake_stream *stream = find_stream(handle, per_thread, &result);
    if (stream == NULL) {
        return result;
    }
    if (status == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *status = stream->capture != NULL ? 1 : 0;
    if (id != NULL) {
        *id = stream->capture_id;
    }
    if (graph != NULL) {
        *graph = stream->capture;
    }
    if (count != NULL) {
        *count = 0;
    }
    return CUDA_SUCCESS;
}

#define CAPTURE_CALLS(suffix, per_thread)                                                                              \
    API(cuStreamBeginCapture##suffix, CUstream stream)                                                                 \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return begin_capture(stream, per_thread, 0, NULL);                                                             \
    }                                                                                                                  \
    API(cuStreamBeginCapture_v2##suffix, CUstream stream, int mode)                                                    \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return begin_capture(stream, per_thread, mode, NULL);                                                          \
    }                                                                                                                  \
    API(cuStreamBeginCaptureToGraph##suffix, CUstream stream, CUgraph graph, const CUgraphNode *dependencies,          \
        const void *edges, size_t count, int mode)                                                                     \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        (void)dependencies;                                                                                            \
        (void)edges;                                                                                                   \
        (void)count;                                                                                                   \
        return graph == NULL ? CUDA_ERROR_INVALID_VALUE : begin_capture(stream, per_thread, mode, graph);              \
    }                                                                                                                  \
    API(cuStreamEndCapture##suffix, CUstream stream, CUgraph *out)                                                     \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return end_capture(stream, per_thread, out);                                                                   \
    }                                                                                                                  \
    API(cuStreamGetCaptureInfo##suffix, CUstream stream, int *status, uint64_t *id)                                    \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return capture_info(stream, per_thread, status, id, NULL, NULL);                                               \
    }                                                                                                                  \
    API(cuStreamGetCaptureInfo_v2##suffix, CUstream stream, int *status, uint64_t *id, CUgraph *graph,                 \
        const CUgraphNode **dependencies, size_t *count)                                                               \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        (void)dependencies;                                                                                            \
        return capture_info(stream, per_thread, status, id, graph, count);                                             \
    }                                                                                                                  \
    API(cuStreamGetCaptureInfo_v3##suffix, CUstream stream, int *status, uint64_t *id, CUgraph *graph,                 \
        const CUgraphNode **dependencies, const void **edges, size_t *count)                                           \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        (void)dependencies;                                                                                            \
        (void)edges;                                                                                                   \
        return capture_info(stream, per_thread, status, id, graph, count);                                             \
    }
CAPTURE_CALLS(, false)
CAPTURE_CALLS(_ptsz, true)

API(cuThreadExchangeStreamCaptureMode, int *mode)
{
    static __thread int current;
    ENTER();
    if (mode == NULL || *mode < 0 || *mode > 2) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    int before = current;
    current = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* ---- events ---- */

static bool is_event(const struct fake_mark *event)
{
    return event != NULL && event->magic == EVENT_MAGIC;
}

/* Caller holds the lock. */
static void unlink_event(struct fake_mark *event)
{
    if (event->link != NULL) {
        *event->link = event->next;
        if (event->next != NULL) {
            event->next->link = event->link;
        }
        event->link = NULL;
    }
}

API(cuEventCreate, CUevent *out, unsigned int flags)
{
    ENTER();
    const struct fake_context *context = fake_current();
    if (!fake_is_context(context)) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (out == NULL || flags > 7) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct fake_mark *event = calloc(1, sizeof *event);
    if (event == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    event->magic = EVENT_MAGIC;
    event->flags = flags;
    event->device = context->device;
    *out = event;
    return CUDA_SUCCESS;
}

static CUresult destroy_event(CUevent event)
{
    if (!is_event(event)) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    fake_lock();
    unlink_event(event);
    fake_unlock();
    event->magic = 0;
    free(event);
    return CUDA_SUCCESS;
}

API(cuEventDestroy, CUevent event)
{
    ENTER();
    return destroy_event(event);
}

API(cuEventDestroy_v2, CUevent event)
{
    ENTER();
    return destroy_event(event);
}

static CUresult record(CUevent event, CUstream handle, bool per_thread)
{
    CUresult result = CUDA_SUCCESS;
    uint64_t now = 0;
    struct fake_stream *stream = find_stream(handle, per_thread, &result);
    if (!is_event(event) || stream == NULL) {
        return is_event(event) ? result : CUDA_ERROR_INVALID_HANDLE;
    }
    fake_lock();
    if (stream->capture != NULL) {
        event->captured = stream->capture;
        result = fake_graph_capture_plain(stream->capture, CU_NODE_EVENT_RECORD);
        fake_unlock();
        return result;
    }
    unsigned int device = stream->context->device;
    struct fake_device *at = &fake.devices[device];
    unlink_event(event);
    event->captured = NULL;
    event->device = device;
    event->recorded = true;
    event->done = false;
    event->target_ns = floor_of(stream);
    if (event->target_ns <= at->known_ns && at->until_ns <= at->known_ns) {
        event->time_ns = card_now();
        event->done = true;
    } else {
        uint64_t served = enter_clock(device, &now);
        bool is_away = card_is_away(fake.card, fake.slot, at->card);
        leave_clock(device);
        if (is_away) {
            event->target_ns =
                larger(event->target_ns, served + 1); /* no stream of a context goes on without the device */
        }
        event->done = served >= event->target_ns;
        event->time_ns = now;
    }
    if (!event->done) {
        event->next = at->pending;
        event->link = &at->pending;
        if (event->next != NULL) {
            event->next->link = &event->next;
        }
        at->pending = event;
    }
    fake_unlock();
    return CUDA_SUCCESS;
}

#define RECORD(suffix, per_thread)                                                                                     \
    API(cuEventRecord##suffix, CUevent event, CUstream stream)                                                         \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return record(event, stream, per_thread);                                                                      \
    }                                                                                                                  \
    API(cuEventRecordWithFlags##suffix, CUevent event, CUstream stream, unsigned int flags)                            \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return flags > 1 ? CUDA_ERROR_INVALID_VALUE : record(event, stream, per_thread);                               \
    }
RECORD(, false)
RECORD(_ptsz, true)

/* Caller holds the lock. */
static bool is_done(struct fake_mark *event)
{
    uint64_t now = 0;
    if (event->recorded && !event->done) {
        (void)enter_clock(event->device, &now);
        leave_clock(event->device);
    }
    return !event->recorded || event->done;
}

API(cuEventQuery, CUevent event)
{
    ENTER();
    if (!is_event(event)) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    fake_lock();
    bool done = is_done(event);
    fake_unlock();
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API(cuEventSynchronize, CUevent event)
{
    ENTER();
    if (!is_event(event)) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    fake_lock();
    bool done = is_done(event);
    uint64_t target = event->target_ns;
    unsigned int device = event->device;
    fake_unlock();
    if (!done) {
        wait_for(device, target);
    }
    return CUDA_SUCCESS;
}

static CUresult elapsed(float *ms, CUevent start, CUevent end)
{
    if (!is_event(start) || !is_event(end)) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (ms == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!start->recorded || !end->recorded || ((start->flags | end->flags) & EVENT_DISABLE_TIMING) != 0 ||
        start->device != end->device) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    fake_lock();
    bool ready = is_done(start);
    ready = is_done(end) && ready;
    double span = (double)end->time_ns - (double)start->time_ns;
    fake_unlock();
    if (ready) {
        *ms = (float)(span / 1e6);
    }
    return ready ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API(cuEventElapsedTime, float *ms, CUevent start, CUevent end)
{
    ENTER();
    return elapsed(ms, start, end);
}

API(cuEventElapsedTime_v2, float *ms, CUevent start, CUevent end)
{
    ENTER();
    return elapsed(ms, start, end);
}

static CUresult wait_event(CUstream handle, bool per_thread, CUevent event)
{
    CUresult result = CUDA_SUCCESS;
    struct fake_stream *stream = find_stream(handle, per_thread, &result);
    if (!is_event(event) || stream == NULL) {
        return is_event(event) ? result : CUDA_ERROR_INVALID_HANDLE;
    }
    if (event->captured != NULL) {
        fake_lock();
        if (stream->capture == NULL && !stream->is_legacy) {
            stream->capture = event->captured; /* the stream joins the capture */
        }
        fake_unlock();
        return stream->capture == event->captured ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (event->device != stream->context->device) {
        fake_lock();
        bool done = is_done(event);
        fake_unlock();
        if (!done) {
            wait_for(event->device, event->target_ns); /* axes of two devices do not compare: the host waits */
        }
        return CUDA_SUCCESS;
    }
    fake_lock();
    if (event->recorded && !event->done) {
        ends_at(stream, larger(stream->until_ns, event->target_ns));
    }
    fake_unlock();
    return CUDA_SUCCESS;
}

#define WAIT_EVENT(suffix, per_thread)                                                                                 \
    API(cuStreamWaitEvent##suffix, CUstream stream, CUevent event, unsigned int flags)                                 \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return flags > 1 ? CUDA_ERROR_INVALID_VALUE : wait_event(stream, per_thread, event);                           \
    }
WAIT_EVENT(, false)
WAIT_EVENT(_ptsz, true)
