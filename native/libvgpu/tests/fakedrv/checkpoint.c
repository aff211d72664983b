/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checkpoints: a process has the device memory of another one moved to the host, and back to the same addresses.
 *
 * The driver of each process that has called cuInit serves requests about it in a thread of its own, one at a time. So a
 * request waits as long as the process is stopped or another request is under way, whatever its timeout; one that the
 * thread has taken is finished also if the asker dies. States and results are those of the driver API; facts beyond it
 * are those published about drivers 570 to 610:
 *     lock          waits for calls and for submitted work, then holds every further call; after its timeout NOT_READY.
 *                   cuCtxSynchronize and cuStreamSynchronize are not held: in a locked process they return at once, in a
 *                   checkpointed one they crash
 *     checkpoint    frees all device memory, contexts included. Managed memory, or memory exported or imported:
 *                   NOT_SUPPORTED, and every later call of the process fails. MIG instances: OUT_OF_MEMORY
 *     restore       the asker must have called cuInit. Without room OUT_OF_MEMORY, for good: the process keeps a part of
 *                   the memory and stays FAILED. Leaves the process locked
 *     wrong state   ILLEGAL_STATE; NOT_INITIALIZED without CUDA, OPERATING_SYSTEM without a process
 * The time of a copy is set by `checkpoint_bytes_per_s` and `restore_bytes_per_s` (state.h).
 *
 * Locks taken here: fake.lock, then a card's. Called with hooks active: no.
 */
#include "fake.h"

#include <errno.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum operation { LOCK = 1, CHECKPOINT, RESTORE, UNLOCK, GET_STATE, GET_THREAD };
enum { RESTORE_STEPS = 8 };

#define NS_PER_S UINT64_C(1000000000)
#define LOOK_NS UINT64_C(10000000) /* between two looks whether the other side lives */

static uint64_t parked_bytes[FAKE_DEVICES];

static void sleep_ns(uint64_t duration)
{
    (void)nanosleep(&(struct timespec){.tv_sec = (time_t)(duration / NS_PER_S), .tv_nsec = (long)(duration % NS_PER_S)},
                    NULL);
}

static void wait_word(uint32_t *word, uint32_t seen)
{
    struct timespec limit = {.tv_nsec = (long)LOOK_NS};
    (void)syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0);
}

static uint32_t read_word(const uint32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static void write_word(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    (void)syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void set_state(enum fake_process_state state)
{
    fake_lock();
    fake.process_state = state;
    __atomic_store_n(&fake.open, state == FAKE_PROCESS_RUNNING, __ATOMIC_SEQ_CST);
    fake_unlock();
}

/* ---- served by the process itself ---- */

/* Every thread sees the closed door at its next call, or is seen inside. */
static void close_door(void)
{
    fake_lock();
    __atomic_store_n(&fake.open, false, __ATOMIC_SEQ_CST);
    fake_unlock();
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) != 0) {
        sleep_ns(LOOK_NS);
    }
}

static bool is_quiet(void)
{
    bool quiet = true;
    fake_lock();
    for (const struct fake_thread *thread = fake.threads; thread != NULL; thread = thread->next) {
        quiet = quiet && read_word(&thread->inside) == 0;
    }
    for (unsigned int device = 0; quiet && device < fake.device_count; device++) {
        quiet = fake_work_is_done(device);
    }
    fake_unlock();
    return quiet;
}

static CUresult lock_process(uint32_t timeout_ms)
{
    if (fake.process_state != FAKE_PROCESS_RUNNING) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    uint64_t end_ns = card_now() + timeout_ms * UINT64_C(1000000);
    close_door();
    while (!is_quiet()) {
        if (timeout_ms > 0 && card_now() >= end_ns) {
            set_state(FAKE_PROCESS_RUNNING);
            return CUDA_ERROR_NOT_READY;
        }
        sleep_ns(LOOK_NS / 10);
    }
    set_state(FAKE_PROCESS_LOCKED);
    return CUDA_SUCCESS;
}

static uint64_t copy_ns(uint64_t bytes, uint64_t bytes_per_s)
{
    return bytes_per_s == 0 ? 0 : (uint64_t)((double)bytes / (double)bytes_per_s * (double)NS_PER_S);
}

static const struct fake_gpu *gpu_of(unsigned int device)
{
    int row = fake.devices[device].row;
    return &fake.state.gpus[row < 0 ? 0 : row];
}

static bool uses_instance(void)
{
    bool found = false;
    for (unsigned int device = 0; device < fake.device_count; device++) {
        found = found || strncmp(fake.devices[device].uuid, "MIG-", 4) == 0;
    }
    return found;
}

static CUresult checkpoint_process(void)
{
    if (fake.process_state != FAKE_PROCESS_LOCKED) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    fake_lock();
    bool is_bound = fake.shares || fake_blocks_managed();
    fake.dead = fake.dead || is_bound;
    uint64_t duration = 0;
    for (unsigned int device = 0; device < fake.device_count; device++) {
        uint64_t used = fake.card->shares[fake.slot][fake.devices[device].card].used;
        duration += copy_ns(used, gpu_of(device)->checkpoint_bytes_per_s);
    }
    fake_unlock();
    if (is_bound) {
        set_state(FAKE_PROCESS_FAILED);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (uses_instance()) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    set_state(FAKE_PROCESS_CHECKPOINTING);
    sleep_ns(duration);
    fake_lock();
    bool moved = fake_blocks_park();
    for (unsigned int device = 0; moved && device < fake.device_count; device++) {
        parked_bytes[device] = card_park(fake.card, fake.slot, fake.devices[device].card);
    }
    write_word(&fake.card->slots[fake.slot].is_parked, moved);
    fake_unlock();
    set_state(moved ? FAKE_PROCESS_CHECKPOINTED : FAKE_PROCESS_LOCKED);
    return moved ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/* In steps: where there is too little room, what it has taken stays taken. */
static bool take_room(unsigned int device)
{
    uint64_t bytes = parked_bytes[device];
    for (uint64_t step = RESTORE_STEPS; step > 0; step--) {
        uint64_t part = bytes / step;
        if (part > 0 && !fake_charge(device, part)) {
            return false;
        }
        bytes -= part;
    }
    return true;
}

static CUresult restore_process(void)
{
    if (fake.process_state != FAKE_PROCESS_CHECKPOINTED) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    set_state(FAKE_PROCESS_RESTORING);
    uint64_t duration = 0;
    bool has_room = true;
    fake_lock();
    write_word(&fake.card->slots[fake.slot].is_parked, false);
    for (unsigned int device = 0; has_room && device < fake.device_count; device++) {
        has_room = take_room(device);
        duration += copy_ns(parked_bytes[device], gpu_of(device)->restore_bytes_per_s);
    }
    fake_unlock();
    if (has_room) {
        sleep_ns(duration);
        fake_lock();
        bool good = fake_blocks_return();
        fake_unlock();
        set_state(good ? FAKE_PROCESS_LOCKED : FAKE_PROCESS_FAILED);
        return good ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
    }
    set_state(FAKE_PROCESS_FAILED);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult unlock_process(void)
{
    if (fake.process_state != FAKE_PROCESS_LOCKED) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    set_state(FAKE_PROCESS_RUNNING);
    return CUDA_SUCCESS;
}

static CUresult serve(struct card_slot *slot)
{
    switch ((enum operation)slot->operation) {
    case LOCK:
        return lock_process(slot->argument);
    case CHECKPOINT:
        return checkpoint_process();
    case RESTORE:
        return restore_process();
    case UNLOCK:
        return unlock_process();
    case GET_STATE:
        slot->value = fake.process_state;
        return CUDA_SUCCESS;
    case GET_THREAD:
        slot->value = (uint32_t)syscall(SYS_gettid);
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

static void *serve_requests(void *argument)
{
    struct card_slot *slot = argument;
    for (;;) {
        uint32_t asked = read_word(&slot->asked);
        if (asked == read_word(&slot->answered)) {
            (void)syscall(SYS_futex, &slot->asked, FUTEX_WAIT, asked, NULL, NULL, 0);
            continue;
        }
        fake_lock();
        fake_learn_changes();
        fake_unlock();
        slot->result = (uint32_t)serve(slot);
        write_word(&slot->answered, asked);
    }
    return NULL;
}

bool fake_checkpoint_start(void)
{
    enum { STACK_BYTES = 128 * 1024 };
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all;
    sigset_t before;
    (void)syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0);
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    (void)pthread_attr_init(&attributes);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int failed = pthread_create(&thread, &attributes, serve_requests, &fake.card->slots[fake.slot]);
    (void)pthread_attr_destroy(&attributes);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed == 0;
}

/* ---- asked by others ---- */

/* Wait until the owner of the slot, which started then, has served request `number`; false: it has died. */
static bool await(unsigned int number_of_slot, uint64_t started_ns, uint32_t number)
{
    struct card_slot *slot = &fake.card->slots[number_of_slot];
    for (;;) {
        uint32_t answered = read_word(&slot->answered);
        if (slot->started_ns != started_ns || !card_alive(fake.card, number_of_slot)) {
            return false;
        }
        if (answered == number) {
            return true;
        }
        wait_word(&slot->answered, answered);
    }
}

static CUresult ask(int pid, enum operation operation, uint32_t argument, uint32_t *value)
{
    static pthread_mutex_t own[CARD_SLOTS]; /* record locks exclude other processes only */
    int found = pid > 0 ? card_slot_of(fake.card, (unsigned int)pid) : -1;
    if (found < 0) {
        bool exists = pid > 0 && (kill(pid, 0) == 0 || errno != ESRCH);
        return exists ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_OPERATING_SYSTEM;
    }
    unsigned int at = (unsigned int)found;
    struct card_slot *slot = &fake.card->slots[at];
    uint64_t started_ns = slot->started_ns;
    (void)pthread_mutex_lock(&own[at]);
    card_ask_begin(at);
    uint32_t number = read_word(&slot->asked);
    bool lives = await(at, started_ns, number); /* the request of an asker that has died meanwhile */
    if (lives) {
        slot->operation = operation;
        slot->argument = argument;
        write_word(&slot->asked, ++number);
        lives = await(at, started_ns, number);
    }
    CUresult result = lives ? (CUresult)slot->result : CUDA_ERROR_NOT_INITIALIZED;
    if (value != NULL) {
        *value = slot->value;
    }
    card_ask_end(at);
    (void)pthread_mutex_unlock(&own[at]);
    return result;
}

#define ENTER_OUTSIDE()                                                                                                \
    static struct fake_entry entry_ = {.name = __func__};                                                              \
    CUresult entered_ = fake_enter_outside(&entry_);                                                                   \
    if (entered_ != CUDA_SUCCESS) return entered_

API(cuCheckpointProcessLock, int pid, const CUcheckpointLockArgs *arguments)
{
    ENTER_OUTSIDE();
    return ask(pid, LOCK, arguments == NULL ? 0 : arguments->timeout_ms, NULL);
}

API(cuCheckpointProcessCheckpoint, int pid, const CUcheckpointCheckpointArgs *arguments)
{
    ENTER_OUTSIDE();
    if (arguments != NULL && arguments->custom_storage != NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return ask(pid, CHECKPOINT, 0, NULL);
}

API(cuCheckpointProcessRestore, int pid, const CUcheckpointRestoreArgs *arguments)
{
    ENTER_OUTSIDE();
    if (arguments != NULL && (arguments->pair_count > 0 || arguments->custom_storage != NULL)) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return fake.ready ? ask(pid, RESTORE, 0, NULL) : CUDA_ERROR_NOT_INITIALIZED;
}

API(cuCheckpointProcessUnlock, int pid, const void *arguments)
{
    ENTER_OUTSIDE();
    (void)arguments;
    return ask(pid, UNLOCK, 0, NULL);
}

API(cuCheckpointProcessGetState, int pid, int *state)
{
    uint32_t value = 0;
    ENTER_OUTSIDE();
    if (state == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult result = ask(pid, GET_STATE, 0, &value);
    *state = (int)value;
    return result;
}

API(cuCheckpointProcessGetRestoreThreadId, int pid, int *thread)
{
    uint32_t value = 0;
    ENTER_OUTSIDE();
    if (thread == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult result = ask(pid, GET_THREAD, 0, &value);
    *thread = (int)value;
    return result;
}
