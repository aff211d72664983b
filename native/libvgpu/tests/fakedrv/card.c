/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared memory of the cards: claims, byte counts, clocks. Model, invariants and locks: card.h.
 */
#include "card.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

#define PIECE_BYTES (UINT64_C(64) << 20U)
#define CHECK_EVERY_NS UINT64_C(10000000)

static int live_fd = -1;
static int claimed = -1;
static pid_t claimed_by;

uint64_t card_now(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static uint64_t load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static void store(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static void lock(pthread_mutex_t *mutex)
{
    if (pthread_mutex_lock(mutex) == EOWNERDEAD) {
        (void)pthread_mutex_consistent(mutex); /* no invariant spans two words, so nothing needs repair */
    }
}

static bool init_locks(struct card *card)
{
    pthread_mutexattr_t attributes;
    bool good = pthread_mutexattr_init(&attributes) == 0 &&
                pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) == 0 &&
                pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) == 0;
    for (unsigned int i = 0; good && i < CARD_DEVICES; i++) {
        good = pthread_mutex_init(&card->devices[i].memory_lock, &attributes) == 0 &&
               pthread_mutex_init(&card->devices[i].clock_lock, &attributes) == 0;
    }
    return good;
}

/* A new card is made under another name and linked into place whole; one of several makers wins. */
static bool create(const char *path)
{
    char fresh[PATH_BYTES + 32];
    bool good = false;
    (void)snprintf(fresh, sizeof fresh, "%s.%d", path, (int)getpid());
    int fd = open(fresh, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) {
        return false;
    }
    (void)fchmod(fd, 0666);
    if (ftruncate(fd, (off_t)sizeof(struct card)) == 0) {
        struct card *card = mmap(NULL, sizeof *card, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (card != MAP_FAILED) {
            card->header.magic = CARD_MAGIC;
            card->header.layout = CARD_LAYOUT;
            card->header.serial = 1;
            good = init_locks(card) && (link(fresh, path) == 0 || errno == EEXIST);
            (void)munmap(card, sizeof *card);
        }
    }
    (void)unlink(fresh);
    (void)close(fd);
    return good;
}

struct card *card_open(const char *state_path)
{
    char path[PATH_BYTES];
    if (snprintf(path, sizeof path, "%s.card", state_path) >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return NULL;
    }
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT && create(path)) {
        fd = open(path, O_RDWR | O_CLOEXEC);
    }
    if (fd < 0) {
        return NULL;
    }
    struct stat seen;
    struct card *card = MAP_FAILED;
    if (fstat(fd, &seen) == 0 && seen.st_size == (off_t)sizeof(struct card)) {
        card = mmap(NULL, sizeof *card, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    }
    (void)close(fd);
    if (card == MAP_FAILED || card->header.magic != CARD_MAGIC || card->header.layout != CARD_LAYOUT) {
        errno = EPROTO;
        return NULL;
    }
    if (live_fd < 0) {
        (void)snprintf(path, sizeof path, "%s.live", state_path);
        live_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (live_fd < 0) {
            return NULL;
        }
        (void)fchmod(live_fd, 0666);
    }
    return card;
}

/* Field 22 of /proc/self/stat: when this process started, in ticks since boot. */
static uint64_t start_ticks(void)
{
    char text[1024];
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) {
        (void)close(fd);
    }
    if (length <= 0) {
        return 0;
    }
    text[length] = '\0';
    char *at = strrchr(text, ')');
    for (unsigned int field = 2; at != NULL && field < 22; field++) {
        at = strchr(at + 1, ' ');
    }
    return at == NULL ? 0 : strtoull(at, NULL, 10);
}

static void wipe(struct card *card, unsigned int slot)
{
    __atomic_store_n(&card->slots[slot].pid, 0, __ATOMIC_SEQ_CST);
    for (unsigned int device = 0; device < card->header.devices_seen; device++) {
        struct card_share *share = &card->shares[slot][device];
        lock(&card->devices[device].clock_lock);
        card->devices[device].busy[slot / 64] &= ~(UINT64_C(1) << (slot % 64U));
        share->served_ns = share->until_ns = share->stretch_count = 0;
        (void)pthread_mutex_unlock(&card->devices[device].clock_lock);
        lock(&card->devices[device].memory_lock); /* the process that found the old owner dead has zeroed it by now */
        store(&share->used, 0);
        store(&share->taken, 0);
        (void)pthread_mutex_unlock(&card->devices[device].memory_lock);
        share->launches = share->contexts = share->peak = 0;
        card->pages[slot][device].managed = card->pages[slot][device].resident = 0;
    }
    struct card_slot *at = &card->slots[slot];
    at->asked = at->answered = at->operation = at->argument = at->result = at->value = at->is_parked = 0;
}

int card_claim(struct card *card)
{
    for (unsigned int slot = 0; slot < CARD_SLOTS; slot++) {
        struct flock hold = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)slot, .l_len = 1};
        if (fcntl(live_fd, F_SETLK, &hold) != 0) {
            continue;
        }
        wipe(card, slot);
        card->slots[slot].pid_seen = 0;
        card->slots[slot].start_ticks = start_ticks();
        card->slots[slot].started_ns = card_now();
        claimed = (int)slot;
        claimed_by = getpid();
        uint32_t seen = __atomic_load_n(&card->header.slots_seen, __ATOMIC_SEQ_CST);
        while (seen <= slot && !__atomic_compare_exchange_n(&card->header.slots_seen, &seen, slot + 1, false,
                                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        }
        __atomic_store_n(&card->slots[slot].pid, (uint32_t)claimed_by, __ATOMIC_SEQ_CST);
        return claimed;
    }
    return -1;
}

int card_device_of(struct card *card, const char *uuid)
{
    int found = -1;
    lock(&card->devices[0].memory_lock);
    uint32_t seen = card->header.devices_seen;
    for (uint32_t i = 0; i < seen && found < 0; i++) {
        found = strcmp(card->devices[i].uuid, uuid) == 0 ? (int)i : -1;
    }
    if (found < 0 && seen < CARD_DEVICES && strlen(uuid) < CARD_UUID) {
        memcpy(card->devices[seen].uuid, uuid, strlen(uuid) + 1);
        __atomic_store_n(&card->header.devices_seen, seen + 1, __ATOMIC_SEQ_CST);
        found = (int)seen;
    }
    (void)pthread_mutex_unlock(&card->devices[0].memory_lock);
    return found;
}

int card_device_known(const struct card *card, const char *uuid)
{
    for (uint32_t i = 0; i < card->header.devices_seen; i++) {
        if (strcmp(card->devices[i].uuid, uuid) == 0) {
            return (int)i;
        }
    }
    return -1;
}

/* The kernel does not report a process's own locks to it, not even from another library's point of view. */
static bool is_own(const struct card *card, unsigned int slot)
{
    if ((int)slot == claimed && claimed_by == getpid()) {
        return true;
    }
    return card->slots[slot].pid == (uint32_t)getpid() && card->slots[slot].start_ticks == start_ticks();
}

unsigned int card_pid(struct card *card, unsigned int slot)
{
    struct flock hold = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)slot, .l_len = 1};
    unsigned int told = __atomic_load_n(&card->slots[slot].pid, __ATOMIC_SEQ_CST);
    if (told == 0 || fcntl(live_fd, F_GETLK, &hold) != 0) {
        return told;
    }
    if (hold.l_type == F_UNLCK) {
        return is_own(card, slot) ? told : 0;
    }
    if (hold.l_pid <= 0) {
        return told;
    }
    if (card->slots[slot].pid_seen == 0) {
        card->slots[slot].pid_seen = (uint32_t)hold.l_pid;
    }
    return (unsigned int)hold.l_pid;
}

bool card_alive(struct card *card, unsigned int slot)
{
    return card_pid(card, slot) != 0;
}

int card_slot_of(struct card *card, unsigned int pid)
{
    for (unsigned int slot = 0; slot < card->header.slots_seen; slot++) {
        if (card_pid(card, slot) == pid) {
            return (int)slot;
        }
    }
    return -1;
}

/* The kernel drops record locks of the dead, so the bytes behind those of the slots serve as locks between askers. */
static void hold_asking(unsigned int slot, short kind)
{
    struct flock hold = {.l_type = kind, .l_whence = SEEK_SET, .l_start = (off_t)CARD_SLOTS + (off_t)slot, .l_len = 1};
    while (fcntl(live_fd, F_SETLKW, &hold) != 0 && (errno == EINTR || errno == EDEADLK)) {
    }
}

void card_ask_begin(unsigned int slot)
{
    hold_asking(slot, F_WRLCK);
}

void card_ask_end(unsigned int slot)
{
    hold_asking(slot, F_UNLCK);
}

/* ---- memory ---- */

/* Caller holds the memory lock, so that the slot finds no new owner meanwhile. Frees what the dead held. */
static void bury(struct card *card, unsigned int device)
{
    for (unsigned int slot = 0; slot < card->header.slots_seen; slot++) {
        struct card_share *share = &card->shares[slot][device];
        if ((load(&share->used) | load(&share->taken)) != 0 && !card_alive(card, slot)) {
            store(&share->used, 0);
            store(&share->taken, 0);
        }
        if (load(&card->pages[slot][device].managed) != 0 && !card_alive(card, slot)) {
            store(&card->pages[slot][device].resident, 0);
            store(&card->pages[slot][device].managed, 0);
        }
    }
}

static uint64_t sum_used(const struct card *card, unsigned int device)
{
    uint64_t sum = 0;
    for (unsigned int slot = 0; slot < card->header.slots_seen; slot++) {
        sum += load(&card->shares[slot][device].used);
    }
    return sum;
}

static uint64_t sum_taken(const struct card *card, unsigned int device)
{
    uint64_t sum = 0;
    for (unsigned int slot = 0; slot < card->header.slots_seen; slot++) {
        uint64_t used = load(&card->shares[slot][device].used);
        uint64_t taken = load(&card->shares[slot][device].taken);
        sum += taken > used ? taken : used;
    }
    return sum;
}

static void note_peak(struct card_share *share, uint64_t used)
{
    if (used > __atomic_load_n(&share->peak, __ATOMIC_RELAXED)) {
        __atomic_store_n(&share->peak, used, __ATOMIC_RELAXED);
    }
}

/* Caller holds the memory lock. */
static bool charge_slowly(struct card *card, unsigned int slot, unsigned int device, uint64_t bytes, uint64_t capacity)
{
    struct card_share *share = &card->shares[slot][device];
    uint64_t own = load(&share->used);
    uint64_t mine = load(&share->taken) > own ? load(&share->taken) : own;
    uint64_t others = sum_taken(card, device) - mine;
    uint64_t wanted = own + bytes;
    if (wanted + PIECE_BYTES <= capacity && others <= capacity - wanted - PIECE_BYTES) {
        __atomic_store_n(&card->devices[device].tight, 0, __ATOMIC_SEQ_CST);
        store(&share->taken, wanted + PIECE_BYTES);
    } else {
        __atomic_store_n(&card->devices[device].tight, 1, __ATOMIC_SEQ_CST);
        if (wanted > capacity || sum_used(card, device) - own > capacity - wanted) {
            return false;
        }
    }
    note_peak(share, __atomic_add_fetch(&share->used, bytes, __ATOMIC_ACQ_REL));
    return true;
}

bool card_charge(struct card *card, unsigned int slot, unsigned int device, uint64_t bytes, uint64_t capacity)
{
    struct card_share *share = &card->shares[slot][device];
    uint64_t used = load(&share->used);
    while (__atomic_load_n(&card->devices[device].tight, __ATOMIC_RELAXED) == 0 && bytes <= capacity &&
           used + bytes <= load(&share->taken)) {
        if (__atomic_compare_exchange_n(&share->used, &used, used + bytes, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            note_peak(share, used + bytes);
            return true;
        }
    }
    if (bytes > capacity) {
        return false;
    }
    lock(&card->devices[device].memory_lock);
    bool good = charge_slowly(card, slot, device, bytes, capacity);
    if (!good) {
        bury(card, device);
        good = charge_slowly(card, slot, device, bytes, capacity);
    }
    (void)pthread_mutex_unlock(&card->devices[device].memory_lock);
    return good;
}

void card_refund(struct card *card, unsigned int slot, unsigned int device, uint64_t bytes)
{
    (void)__atomic_sub_fetch(&card->shares[slot][device].used, bytes, __ATOMIC_ACQ_REL);
}

uint64_t card_park(struct card *card, unsigned int slot, unsigned int device)
{
    struct card_share *share = &card->shares[slot][device];
    lock(&card->devices[device].memory_lock);
    uint64_t used = load(&share->used);
    store(&share->used, 0);
    store(&share->taken, 0);
    (void)pthread_mutex_unlock(&card->devices[device].memory_lock);
    return used;
}

uint64_t card_used(struct card *card, unsigned int device, bool exactly)
{
    uint64_t now = exactly ? 0 : card_now();
    if (exactly || now - load(&card->devices[device].rarely_ns) > CHECK_EVERY_NS) {
        lock(&card->devices[device].memory_lock);
        bury(card, device);
        (void)pthread_mutex_unlock(&card->devices[device].memory_lock);
        if (!exactly) {
            store(&card->devices[device].rarely_ns, now);
        }
    }
    return sum_used(card, device);
}

/* ---- managed memory that migrates ---- */

void card_change_managed(struct card *card, unsigned int slot, unsigned int device, int64_t bytes)
{
    struct card_pages *pages = &card->pages[slot][device];
    lock(&card->devices[device].memory_lock);
    uint64_t managed = load(&pages->managed) + (uint64_t)bytes;
    store(&pages->managed, managed);
    if (load(&pages->resident) > managed) {
        store(&pages->resident, managed);
    }
    (void)pthread_mutex_unlock(&card->devices[device].memory_lock);
}

uint64_t card_resident(const struct card *card, unsigned int device)
{
    uint64_t sum = 0;
    for (unsigned int slot = 0; slot < card->header.slots_seen; slot++) {
        sum += load(&card->pages[slot][device].resident);
    }
    return sum;
}

uint64_t card_moved(const struct card *card, unsigned int device)
{
    uint64_t sum = 0;
    for (unsigned int slot = 0; slot < card->header.slots_seen; slot++) {
        sum += load(&card->pages[slot][device].moved);
    }
    return sum;
}

/* Caller holds the memory lock. */
static void evict(struct card *card, unsigned int slot, unsigned int device, uint64_t bytes)
{
    while (bytes > 0) {
        struct card_pages *most = NULL;
        for (unsigned int other = 0; other < card->header.slots_seen; other++) {
            struct card_pages *pages = &card->pages[other][device];
            if (other != slot && load(&pages->resident) > (most == NULL ? 0 : load(&most->resident))) {
                most = pages;
            }
        }
        if (most == NULL) {
            return;
        }
        uint64_t taken = load(&most->resident) < bytes ? load(&most->resident) : bytes;
        store(&most->resident, load(&most->resident) - taken);
        bytes -= taken;
    }
}

uint64_t card_page_in(struct card *card, unsigned int slot, unsigned int device, uint64_t capacity)
{
    struct card_pages *pages = &card->pages[slot][device];
    if (load(&pages->managed) == 0) {
        return 0;
    }
    lock(&card->devices[device].memory_lock);
    bury(card, device);
    uint64_t used = sum_used(card, device);
    uint64_t room = used < capacity ? capacity - used : 0;
    uint64_t managed = load(&pages->managed);
    uint64_t before = load(&pages->resident);
    uint64_t after = managed < room ? managed : room;
    uint64_t others = card_resident(card, device) - before;
    uint64_t evicted = others > room - after ? others - (room - after) : 0;
    evict(card, slot, device, evicted);
    store(&pages->resident, after);
    uint64_t moved = evicted + (after > before ? after - before : before - after) + 2 * (managed - after);
    store(&pages->moved, load(&pages->moved) + moved);
    (void)pthread_mutex_unlock(&card->devices[device].memory_lock);
    return moved;
}

/* ---- time ---- */

static bool has_work(const struct card *card, unsigned int slot, unsigned int device)
{
    const struct card_share *share = &card->shares[slot][device];
    return share->served_ns < share->until_ns;
}

/* The next slot after `from`, going round, that has work; CARD_SLOTS when none has. Clears marks of idle ones. */
static unsigned int next_busy(struct card *card, unsigned int device, unsigned int from)
{
    struct card_device *at = &card->devices[device];
    for (unsigned int step = 1; step <= CARD_SLOTS;) {
        unsigned int slot = (from + step) % CARD_SLOTS;
        uint64_t word = at->busy[slot / 64] >> (slot % 64U);
        if (word == 0) {
            step += 64U - slot % 64U;
            continue;
        }
        step += (unsigned int)__builtin_ctzll(word);
        slot = (from + step) % CARD_SLOTS;
        if (step <= CARD_SLOTS && has_work(card, slot, device)) {
            return slot;
        }
        at->busy[slot / 64] &= ~(UINT64_C(1) << (slot % 64U));
        step++;
    }
    return CARD_SLOTS;
}

static bool others_busy(struct card *card, unsigned int device, unsigned int slot)
{
    unsigned int next = next_busy(card, device, slot);
    return next != CARD_SLOTS && next != slot;
}

static void serve(struct card *card, unsigned int device, unsigned int slot, uint64_t length_ns)
{
    struct card_share *share = &card->shares[slot][device];
    struct card_device *at = &card->devices[device];
    struct card_stretch *stretches = card->logs[slot][device].stretches;
    struct card_stretch *last = &stretches[(share->stretch_count + CARD_STRETCHES - 1) % CARD_STRETCHES];
    if (share->stretch_count > 0 && last->time_ns + last->length_ns == at->clock_ns) {
        last->length_ns += length_ns;
    } else {
        stretches[share->stretch_count % CARD_STRETCHES] =
            (struct card_stretch){.time_ns = at->clock_ns, .service_ns = share->served_ns, .length_ns = length_ns};
        share->stretch_count++;
    }
    store(&share->served_ns, share->served_ns + length_ns);
    store(&at->served_ns, at->served_ns + length_ns);
    at->clock_ns += length_ns;
}

/* Drop the pending work of dead processes, as a driver drops the channels of a dead process. */
static void drop_dead_work(struct card *card, unsigned int device)
{
    for (unsigned int word = 0; word < CARD_SLOTS / 64; word++) {
        for (uint64_t bits = card->devices[device].busy[word]; bits != 0; bits &= bits - 1) {
            unsigned int slot = word * 64U + (unsigned int)__builtin_ctzll(bits);
            if (!card_alive(card, slot)) {
                card->shares[slot][device].until_ns = card->shares[slot][device].served_ns;
            }
        }
    }
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void advance(struct card *card, unsigned int device, uint64_t now)
{
    struct card_device *at = &card->devices[device];
    while (at->clock_ns < now) {
        unsigned int slot = at->current;
        bool is_done = !has_work(card, slot, device);
        if (is_done || at->clock_ns >= at->slice_end_ns) {
            slot = next_busy(card, device, slot);
            if (slot == CARD_SLOTS) {
                at->clock_ns = now;
                return;
            }
            at->current = slot;
            at->slice_end_ns = at->clock_ns + CARD_SLICE_NS;
        }
        const struct card_share *share = &card->shares[slot][device];
        uint64_t length = smaller(share->until_ns - share->served_ns, now - at->clock_ns);
        if (others_busy(card, device, slot)) {
            length = smaller(length, at->slice_end_ns - at->clock_ns);
        } else if (at->slice_end_ns < at->clock_ns + length) {
            at->slice_end_ns = at->clock_ns + length; /* alone: the next process does not wait for an unshared slice */
        }
        serve(card, device, slot, length);
    }
}

uint64_t card_clock_enter(struct card *card, unsigned int slot, unsigned int device)
{
    struct card_device *at = &card->devices[device];
    lock(&at->clock_lock);
    uint64_t now = card_now();
    if (now - at->checked_ns > CHECK_EVERY_NS && others_busy(card, device, slot)) {
        at->checked_ns = now;
        drop_dead_work(card, device);
    }
    advance(card, device, now);
    return now;
}

void card_clock_leave(struct card *card, unsigned int device)
{
    (void)pthread_mutex_unlock(&card->devices[device].clock_lock);
}

void card_work(struct card *card, unsigned int slot, unsigned int device, uint64_t until_ns)
{
    struct card_share *share = &card->shares[slot][device];
    if (until_ns > share->until_ns) {
        store(&share->until_ns, until_ns);
        card->devices[device].busy[slot / 64] |= UINT64_C(1) << (slot % 64U);
    }
}

uint64_t card_time_of(const struct card *card, unsigned int slot, unsigned int device, uint64_t service_ns)
{
    const struct card_share *share = &card->shares[slot][device];
    uint64_t oldest = share->stretch_count > CARD_STRETCHES ? share->stretch_count - CARD_STRETCHES : 0;
    for (uint64_t i = share->stretch_count; i > oldest; i--) {
        const struct card_stretch *stretch = &card->logs[slot][device].stretches[(i - 1) % CARD_STRETCHES];
        if (service_ns > stretch->service_ns) {
            return stretch->time_ns + smaller(service_ns - stretch->service_ns, stretch->length_ns);
        }
        if (i - 1 == oldest) {
            return stretch->time_ns;
        }
    }
    return card_now();
}

unsigned int card_recent_pct(struct card *card, unsigned int slot, unsigned int device, uint64_t window_ns)
{
    uint64_t now = card_clock_enter(card, slot, device);
    const struct card_share *share = &card->shares[slot][device];
    uint64_t begin = now > window_ns ? now - window_ns : 0;
    uint64_t oldest = share->stretch_count > CARD_STRETCHES ? share->stretch_count - CARD_STRETCHES : 0;
    uint64_t served = 0;
    for (uint64_t i = share->stretch_count; i > oldest; i--) {
        const struct card_stretch *stretch = &card->logs[slot][device].stretches[(i - 1) % CARD_STRETCHES];
        uint64_t end = stretch->time_ns + stretch->length_ns;
        if (end <= begin) {
            break;
        }
        served += end - (stretch->time_ns > begin ? stretch->time_ns : begin);
        if (i - 1 == oldest && oldest > 0) {
            begin = stretch->time_ns; /* the log does not reach further */
        }
    }
    card_clock_leave(card, device);
    return now > begin ? (unsigned int)(served * 100 / (now - begin)) : 0;
}

bool card_is_away(const struct card *card, unsigned int slot, unsigned int device)
{
    unsigned int current = card->devices[device].current;
    return current != slot && has_work(card, slot, device) && has_work(card, current, device);
}

unsigned int card_busy_count(const struct card *card, unsigned int device)
{
    unsigned int count = 0;
    for (unsigned int word = 0; word < CARD_SLOTS / 64; word++) {
        count += (unsigned int)__builtin_popcountll(card->devices[device].busy[word]);
    }
    return count;
}
