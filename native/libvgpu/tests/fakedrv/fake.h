/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libcuda.so.1 without hardware: what its parts share.
 *
 * How to use it: environment FAKE_NVML_STATE names the state file of the machine (state.h; the same one that the fake
 * NVML reads). Memory and time are shared by all processes with the same state file (card.h). The library needs nothing
 * else; no context, handle or pointer of it means anything to a real driver.
 *
 * A kernel's name determines how long it runs, on a device of S multiprocessors (one block occupies one of them until
 * the kernel ends; a kernel of more blocks occupies all):
 *     nop, nop_ANYTHING          no time at all; such a launch takes no lock
 *     fixed_NUMBER{ns,us,ms}     this long, whatever the grid
 *     block_NUMBER{ns,us,ms}     this long for every started S blocks: ceil(blocks / S) times
 *     param                      as long as its first parameter, an unsigned 64-bit number of nanoseconds, says
 *     local_NUMBER               10 us; a thread of it has NUMBER bytes of local memory, which the context keeps for all
 *                                threads of the device from the first such launch on
 *     any other name             10 us, whatever the grid
 * Kernels of one stream follow each other; those of several streams overlap while multiprocessors are left; processes
 * take turns of 2 ms (CARD_SLICE_NS). A stream holds 1024 launches, then a launch waits, as on hardware. Copies and
 * sets are done at once by the host and cost no device time. Host functions run when their stream gets there, but
 * nothing later in the stream waits for them.
 *
 * A module is anything: a text image may say "fake-bytes: NUMBER" for the device memory it takes (default: its length
 * rounded up to 4 KiB, ELF and fat binaries by their header). Every function name is found except those that begin with
 * "missing".
 *
 * Counted memory (card.h, share.used), in bytes: linear memory as asked for (in pieces of `block_granularity` above
 * 1 MiB), pitched memory pitch (512) times height,
 * arrays by format without padding, pools by what they reserve (in pieces of `pool_granularity`), VMM handles from
 * create until the last of release and unmap, graph memory by what the device's graph pool reserves, a module's image,
 * `context_bytes` per context, managed memory when created. Imported memory is not counted a second time.
 *
 * Faults: lines `fault = FUNCTION GPU|* RESULT HANG_MS` of the state file apply to every function by its exported name.
 * They take effect in running processes when the card's `serial` is raised (FakeNvml.write does).
 *
 * The environment variable FAKE_CUDA_ALIAS, as "cuMemAlloc=cuMemFree_v2 cuCtxCreate=cuCtxCreate_v2", lets
 * cuGetProcAddress answer for a name with the function of another symbol, whatever version is asked for.
 *
 * With the environment variable FAKE_NVML_NODES, as "/dev/nvidia", the devices are those whose minor number is the end
 * of an existing path, as in a container that has the nodes of some devices only.
 *
 * Checkpoints (cuCheckpointProcess*): checkpoint.c.
 *
 * For tests: fake_cuda_calls(name) counts the calls of one exported symbol in this process, fake_cuda_held(name) those that
 * found it locked or checkpointed, NULL standing for all symbols; fake_cuda_unseen makes the primary context of a device
 * current as a runtime does that uses the driver's private tables.
 *
 * Locks: `fake.lock` guards all tables of the process; it is never held while sleeping. Under it card.h's locks may be
 * taken. Called with hooks active: no; the fake never calls its own exported symbols.
 */
#ifndef FAKEDRV_FAKE_H
#define FAKEDRV_FAKE_H

#include "card.h"
#include "driver_abi.h"
#include "state.h"

enum { FAKE_DEVICES = 64, FAKE_RUNNING = 64, FAKE_QUEUE = 1024, FAKE_STACK = 64 };

/* One exported function: its calls, and the fault found for it at `serial`. */
struct fake_entry {
    const char *name;
    uint64_t calls;
    uint64_t held; /* of them: found the process locked or checkpointed */
    uint32_t serial;
    uint32_t registered;
    bool synchronizes; /* waits for the device: not held in a locked process, and crashes a checkpointed one */
    struct fake_entry *next;
};

/* A thread that has called the driver. */
struct fake_thread {
    uint32_t inside; /* calls that it is in; those that are held do not count */
    bool is_listed;
    struct fake_thread *next;
};

/* Of this process, as CUprocessState numbers them. */
enum fake_process_state {
    FAKE_PROCESS_RUNNING,
    FAKE_PROCESS_LOCKED,
    FAKE_PROCESS_CHECKPOINTED,
    FAKE_PROCESS_FAILED,
    FAKE_PROCESS_CHECKPOINTING,
    FAKE_PROCESS_RESTORING
};

/* A device as this process numbers them. */
struct fake_device {
    char uuid[FAKE_TEXT];
    int row; /* in the state, -1 once it is gone */
    unsigned int card;
    uint64_t capacity; /* bytes that all processes together can be given */
    uint64_t context_bytes;
    uint64_t pool_granularity;
    uint64_t block_granularity;
    uint64_t migration_bytes_per_s;
    unsigned int sms;
    struct fake_context *primary;
    unsigned int primary_flags;
    struct fake_pool *default_pool;
    struct fake_pool *host_pool;
    struct fake_pool *pool;
    struct fake_pool *graph_pool;
    /* On the axis of service (card.h): kernels that occupy multiprocessors. */
    struct {
        uint64_t until_ns;
        unsigned int sms;
    } running[FAKE_RUNNING];
    unsigned int running_count;
    uint64_t until_ns;
    uint64_t known_ns; /* service known to have been received */
    struct fake_mark *pending;
};

struct fake_context {
    uint64_t magic;
    struct fake_context *next;
    unsigned int device;
    bool is_primary;
    bool destroyed;
    unsigned int references;
    unsigned int flags;
    uint64_t id;
    uint64_t bytes;
    uint64_t local_bytes; /* of local memory, for all threads */
    size_t limits[16];
    struct fake_stream *streams;
    struct fake_module *modules;
    struct fake_array *arrays;
    struct fake_stream *legacy;
    uint64_t blocking_until_ns;
};

struct fake {
    pthread_mutex_t lock;
    bool ready;
    bool open;   /* ready, and calls need not wait for a checkpoint */
    bool dead;   /* a checkpoint has destroyed its contexts */
    bool shares; /* has exported or imported memory of other processes */
    uint32_t process_state;
    struct fake_thread *threads;
    bool forked; /* a child of a process that used the driver: nothing works here, as with the real one */
    uint32_t serial;
    struct card *card;
    unsigned int slot;
    struct fake_state state;
    struct fake_device devices[FAKE_DEVICES];
    unsigned int device_count;
    struct fake_context *contexts;
    uint64_t next_id;
};

extern struct fake fake;

extern __thread struct fake_thread fake_thread __attribute__((tls_model("initial-exec")));

/* Of fake_enter: the call is over before it has begun, and has succeeded. */
#define FAKE_AT_ONCE (-1)

/* Prologue of every exported function: counts the call, refuses before cuInit, waits in a locked process, injects faults. */
CUresult fake_enter_slowly(struct fake_entry *entry);

static inline CUresult fake_enter(struct fake_entry *entry)
{
    entry->calls++;
    __atomic_store_n(&fake_thread.inside, fake_thread.inside + 1, __ATOMIC_RELAXED);
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* checkpoint.c orders the store before the load, where it matters */
    if (__builtin_expect(__atomic_load_n(&fake.open, __ATOMIC_ACQUIRE) && fake_thread.is_listed &&
                             entry->serial == __atomic_load_n(&fake.card->header.serial, __ATOMIC_RELAXED),
                         1)) {
        return CUDA_SUCCESS;
    }
    return fake_enter_slowly(entry);
}

static inline void fake_leave(const char *entered)
{
    (void)entered;
    __atomic_store_n(&fake_thread.inside, fake_thread.inside - 1, __ATOMIC_RELEASE);
}

/* The same for functions that another process's driver answers: they work without cuInit and in a locked process. */
CUresult fake_enter_outside(struct fake_entry *entry);

#define ENTER_AS(...)                                                                                                  \
    static struct fake_entry entry_ = {.name = __func__, __VA_ARGS__};                                                 \
    __attribute__((cleanup(fake_leave), unused)) const char leaves_ = 0;                                               \
    CUresult entered_ = fake_enter(&entry_);                                                                           \
    if (entered_ != CUDA_SUCCESS) return entered_ == FAKE_AT_ONCE ? CUDA_SUCCESS : entered_

#define ENTER() ENTER_AS(.synchronizes = false)
#define ENTER_SYNCHRONIZE() ENTER_AS(.synchronizes = true)

/* Declares and begins an exported function. */
#define API(name, ...)                                                                                                 \
    CUDA_API CUresult name(__VA_ARGS__);                                                                               \
    CUDA_API CUresult name(__VA_ARGS__)

static inline void fake_lock(void)
{
    (void)pthread_mutex_lock(&fake.lock);
}

static inline void fake_unlock(void)
{
    (void)pthread_mutex_unlock(&fake.lock);
}

/* ---- names.c ---- */
CUresult fake_find_symbol(const char *name, void **out, int version, uint64_t flags, int *status);

/* ---- driver.c ---- */
/* Caller holds the lock. Read the state file again if it has changed. */
void fake_learn_changes(void);
struct fake_context *fake_current(void);
bool fake_is_context(const struct fake_context *context);
uint64_t fake_used(unsigned int device);
/* Bytes on the card for this process; the caller may hold the lock. */
bool fake_charge(unsigned int device, uint64_t bytes);
void fake_refund(unsigned int device, uint64_t bytes);

/* Give the context local memory of so many bytes a thread; false: the device is full. */
bool fake_grow_local(struct fake_context *context, uint64_t bytes);

/* ---- memory.c: caller holds the lock ---- */
enum fake_kind {
    FAKE_LINEAR,
    FAKE_MANAGED,
    FAKE_POOLED,
    FAKE_GRAPH,
    FAKE_IMPORTED, /* a buffer of imported external memory, ended by cuMemFree */
    FAKE_FOREIGN,  /* another process's memory, ended by cuIpcCloseMemHandle */
    FAKE_MAPPED,   /* a mapped VMM handle */
    FAKE_RESERVED, /* reserved addresses */
    FAKE_HOST
};

struct fake_block {
    CUdeviceptr pointer;
    uint64_t bytes;
    struct fake_context *context;
    void *owner;  /* pool, handle, external memory, graph */
    void *parked; /* where the pages of a large one are while the process is parked */
    uint16_t device;
    uint8_t kind;
    bool dirty;
    bool orphan; /* of a graph that is gone: its free ends the address too */
    bool in_use; /* of the slot of the table */
};

struct fake_block *fake_block_find(CUdeviceptr pointer);
/* The block that holds this address. Slow. */
struct fake_block *fake_block_around(CUdeviceptr pointer);
CUdeviceptr fake_block_add(unsigned int device, uint64_t bytes, enum fake_kind kind, void *owner);
void fake_block_drop(struct fake_block *block);
void fake_free_context(struct fake_context *context);
void fake_free_pooled(unsigned int device);
void fake_arrays_free(struct fake_context *context);
CUresult fake_free_block(struct fake_block *block);

/* ---- blocks.c: caller holds the lock ---- */
/* Move the contents of all device memory to the host, and back to where they were. false: they could not be. */
bool fake_blocks_park(void);
bool fake_blocks_return(void);
/* There is managed memory. */
bool fake_blocks_managed(void);

/* ---- checkpoint.c: caller holds the lock ---- */
/* Start the thread that serves other processes' requests about this one. */
bool fake_checkpoint_start(void);

/* ---- pool.c: caller holds the lock ---- */
struct fake_pool {
    uint64_t magic;
    unsigned int device;
    bool on_host;
    bool is_managed; /* counted as if on the device, wherever it prefers to be */
    bool is_default;
    bool destroyed;
    uint64_t reserved;
    uint64_t reserved_high;
    uint64_t used;
    uint64_t used_high;
    uint64_t threshold;
    uint64_t max_bytes;
    int toggles[4];
    struct fake_pool *next;
};

struct fake_pool *fake_pool_new(unsigned int device);
bool fake_pool_take(struct fake_pool *pool, uint64_t bytes);
void fake_pool_give(struct fake_pool *pool, uint64_t bytes);
void fake_pool_trim(struct fake_pool *pool, uint64_t keep);
/* At a synchronization, pools release the memory above their threshold. */
void fake_pools_settle(unsigned int device);
/* Pools belong to the device; they and what came from them end with its primary context. */
void fake_pools_end(unsigned int device);

/* ---- work.c ---- */
struct fake_stream *fake_stream_new(struct fake_context *context, unsigned int flags, int priority);
void fake_streams_free(struct fake_context *context);
void fake_work_wait_device(unsigned int device);
/* Caller holds the lock. All that was submitted has ended. */
bool fake_work_is_done(unsigned int device);
struct fake_graph *fake_capture_of(CUstream stream, bool per_thread, CUresult *result);
/* Device time on a stream (handle as the caller gave it). */
CUresult fake_work(CUstream stream, bool per_thread, uint64_t duration_ns, unsigned int sms);
CUresult fake_check_stream(CUstream stream, bool per_thread);
CUresult fake_call_host(CUstream stream, bool per_thread, CUhostFn function, void *data);

/* ---- module.c ---- */
enum fake_law { FAKE_LAW_FIXED, FAKE_LAW_BLOCK, FAKE_LAW_PARAM };

struct fake_function {
    uint64_t magic;
    struct fake_function *next;
    struct fake_module *module;
    enum fake_law law;
    uint64_t ns;
    uint64_t local_bytes; /* of a thread */
    char name[];
};

bool fake_is_function(const struct fake_function *function);
uint64_t fake_duration(const struct fake_function *function, const unsigned int grid[3], void **params,
                       unsigned int sms, unsigned int *occupied);
void fake_modules_free(struct fake_context *context);

/* ---- graph.c: caller holds the lock ---- */
struct fake_graph *fake_graph_new(void);
CUresult fake_graph_capture_kernel(struct fake_graph *graph, uint64_t ns, unsigned int sms);
CUresult fake_graph_capture_plain(struct fake_graph *graph, int type);
CUresult fake_graph_capture_alloc(struct fake_graph *graph, unsigned int device, uint64_t bytes, CUdeviceptr *out);
CUresult fake_graph_capture_free(struct fake_graph *graph, CUdeviceptr pointer);
CUresult fake_graph_capture_host(struct fake_graph *graph, CUhostFn function, void *data);

#endif
