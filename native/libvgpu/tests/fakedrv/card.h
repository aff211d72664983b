/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cards themselves: what the processes of all containers on one fake machine have in common.
 *
 * One sparse file beside the state file (its name plus ".card") is mapped by every process that uses a fake driver. It
 * holds, per process and device, the bytes that the process has been given (the oracle of every memory test) and the
 * device time that it has been served (the oracle of every compute test). The owner alone writes its own line, so a
 * kill at any instant leaves true counts, and the counts of a process are void from the moment the kernel has ended
 * it: a process lives as long as it holds the record lock on its byte of the file named ".live", which the kernel
 * drops at the end of the process, before its parent can know of it. So does a real driver.
 *
 * Memory: a process takes room from the device in large pieces under `memory_lock` (robust; nothing that it guards
 * spans two words) and spends it alone. When room runs out the device is `tight`: then every allocation goes by the
 * exact sum of what all processes use.
 *
 * Managed memory that migrates is not part of that: it is `managed`, of which `resident` bytes are on the device, in room
 * that is not used otherwise. A launch needs all managed memory of its process there: what is missing moves in, and pages
 * of the processes that have most there move out for it. Both take time, which the launch has to wait for.
 *
 * Time: the clock of a device hands out slices of CARD_SLICE_NS among the processes that have work, in turn; a lone
 * process is served without pause. Every process that reads it advances it, under `clock_lock` (robust). A process
 * places its kernels on its own axis of service ("this kernel ends when I have been served s nanoseconds") and so
 * needs to publish only how far it has work: `until_ns`. The log of stretches turns service back into time.
 * All times are CLOCK_MONOTONIC nanoseconds, all sizes bytes.
 *
 * Also read by hami_sim.hardware.fake_cuda: the offsets asserted below are its contract.
 * Locks taken here: the two named above, never both. Called with hooks active: no.
 */
#ifndef FAKEDRV_CARD_H
#define FAKEDRV_CARD_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CARD_MAGIC UINT64_C(0x3144524143454b41)
#define CARD_SLICE_NS UINT64_C(2000000)

enum {
    CARD_LAYOUT = 4,
    CARD_DEVICES = 64,
    CARD_SLOTS = 2048,
    CARD_STRETCHES = 256,
    CARD_LAUNCHES = 255,
    CARD_UUID = 96
};

struct card_header {
    uint64_t magic;
    uint32_t layout;
    uint32_t serial; /* raised with each change of the state file, so that running processes read it again */
    uint32_t devices_seen;
    uint32_t slots_seen;
    uint64_t reserved[5];
};
_Static_assert(sizeof(struct card_header) == 64, "header layout");

struct card_device {
    char uuid[CARD_UUID];
    uint64_t clock_ns;
    uint64_t slice_end_ns;
    uint64_t served_ns; /* time in which any process was served */
    uint64_t checked_ns;
    uint64_t rarely_ns;
    uint32_t current; /* slot that is being served */
    uint32_t tight;
    uint64_t busy[CARD_SLOTS / 64]; /* slots that may have work */
    pthread_mutex_t memory_lock;
    pthread_mutex_t clock_lock;
    char pad[1024 - CARD_UUID - 48 - CARD_SLOTS / 8 - 2 * sizeof(pthread_mutex_t)];
};
_Static_assert(sizeof(struct card_device) == 1024, "device layout");
_Static_assert(offsetof(struct card_device, served_ns) == 112, "device layout");

struct card_slot {
    uint32_t pid;      /* as its owner sees itself; 0: free. Set last, cleared first. */
    uint32_t pid_seen; /* as the first process outside saw it, 0 until then */
    uint64_t start_ticks;
    uint64_t started_ns;
    /* A request of another process to the owner's driver, see checkpoint.c. */
    uint32_t asked;    /* number of the last request; the owner waits for it to change */
    uint32_t answered; /* number of the last one that was served; the asker waits for it to change */
    uint32_t operation;
    uint32_t argument;
    uint32_t result;
    uint32_t value;
    uint32_t is_parked; /* its memory is on the host: it has nothing of any device */
    uint32_t reserved[3];
};
_Static_assert(sizeof(struct card_slot) == 64, "slot layout");
_Static_assert(offsetof(struct card_slot, asked) == 24, "slot layout");

struct card_share {
    uint64_t used;      /* bytes given to this process; the truth */
    uint64_t taken;     /* bytes it may use without asking; at least `used` except while it is tight */
    uint64_t served_ns; /* device time served to this process */
    uint64_t until_ns;  /* on the same axis: where its work ends */
    uint64_t launches;  /* kernels and graph launches */
    uint64_t stretch_count;
    uint64_t contexts; /* the part of `used` that contexts take by existing */
    uint64_t peak;     /* highest `used` so far */
};
_Static_assert(sizeof(struct card_share) == 64, "share layout");

/* Served [service_ns, service_ns + length_ns) beginning at time_ns, without pause. */
struct card_stretch {
    uint64_t time_ns;
    uint64_t service_ns;
    uint64_t length_ns;
};

struct card_log {
    struct card_stretch stretches[CARD_STRETCHES];
};

struct card_pages {
    uint64_t managed;  /* bytes of managed memory that migrates */
    uint64_t resident; /* of them: on the device */
    uint64_t moved;    /* bytes moved for this process so far, in both directions */
    uint64_t reserved;
};
_Static_assert(sizeof(struct card_pages) == 32, "pages layout");

/* When the process placed its last kernels; the newest at (count - 1) % CARD_LAUNCHES. */
struct card_launches {
    uint64_t count;
    uint64_t at_ns[CARD_LAUNCHES];
};
_Static_assert(sizeof(struct card_launches) == 2048, "launches layout");

struct card {
    struct card_header header;
    struct card_device devices[CARD_DEVICES];
    struct card_slot slots[CARD_SLOTS];
    struct card_share shares[CARD_SLOTS][CARD_DEVICES];
    struct card_log logs[CARD_SLOTS][CARD_DEVICES];
    struct card_launches launches[CARD_SLOTS][CARD_DEVICES];
    struct card_pages pages[CARD_SLOTS][CARD_DEVICES];
};
_Static_assert(offsetof(struct card, devices) == 64, "card layout");
_Static_assert(offsetof(struct card, slots) == 64 + 64 * 1024, "card layout");
_Static_assert(offsetof(struct card, shares) == 64 + 64 * 1024 + 2048 * 64, "card layout");
_Static_assert(offsetof(struct card, logs) == 64 + 64 * 1024 + 2048 * 64 + 2048 * 64 * 64, "card layout");
_Static_assert(offsetof(struct card, launches) == offsetof(struct card, logs) + 2048ul * 64 * 256 * 24, "card layout");

/* Map the card of the state file at `state_path`, creating it if need be. NULL and errno when that is impossible. */
struct card *card_open(const char *state_path);

/* A slot of this card for this process, -1 when all are held. Descriptors stay open: closing them would end the hold. */
int card_claim(struct card *card);

/* Index of the device with this UUID, entered when new; -1 when there are too many. */
int card_device_of(struct card *card, const char *uuid);

/* Returns true if the owner of `slot` lives. */
bool card_alive(struct card *card, unsigned int slot);

/* The pid by which this process knows the owner of `slot`; 0: it has no live owner. */
unsigned int card_pid(struct card *card, unsigned int slot);

/* The slot whose live owner this process knows by this pid, -1: none. */
int card_slot_of(struct card *card, unsigned int pid);

/* One process at a time asks the owner of a slot; one that dies makes way. May wait. */
void card_ask_begin(unsigned int slot);
void card_ask_end(unsigned int slot);

uint64_t card_now(void);

/* Room for `bytes` more among `capacity`; false: the device is full. */
bool card_charge(struct card *card, unsigned int slot, unsigned int device, uint64_t bytes, uint64_t capacity);
void card_refund(struct card *card, unsigned int slot, unsigned int device, uint64_t bytes);

/* Take from this process all that it has of the device; how many bytes that was. */
uint64_t card_park(struct card *card, unsigned int slot, unsigned int device);

/* Bytes used by all live processes. `exactly` asks the kernel about each process, else at most every 10 ms. */
uint64_t card_used(struct card *card, unsigned int device, bool exactly);

/* This process has so many more or fewer bytes of managed memory that migrates; new ones are on the host. */
void card_change_managed(struct card *card, unsigned int slot, unsigned int device, int64_t bytes);

/* Bring all managed memory of this process to a device of `capacity` bytes; how many bytes moved. Bytes that the
   device cannot hold at once move in and out. */
uint64_t card_page_in(struct card *card, unsigned int slot, unsigned int device, uint64_t capacity);

/* Managed bytes on the device, and bytes that were ever moved, of all slots. */
uint64_t card_resident(const struct card *card, unsigned int device);
uint64_t card_moved(const struct card *card, unsigned int device);

/* Take the clock of a device and bring it up to now; returns now. Pairs with card_clock_leave. */
uint64_t card_clock_enter(struct card *card, unsigned int slot, unsigned int device);
void card_clock_leave(struct card *card, unsigned int device);

/* Caller holds the clock. This process has work until `until_ns` on its axis. */
void card_work(struct card *card, unsigned int slot, unsigned int device, uint64_t until_ns);

/* Caller holds the clock. When this process had been served `service_ns`; the oldest known time if that is forgotten. */
uint64_t card_time_of(const struct card *card, unsigned int slot, unsigned int device, uint64_t service_ns);

/* Percent of the last `window_ns` in which the owner of `slot` was served, as far as the log reaches. Takes the clock. */
unsigned int card_recent_pct(struct card *card, unsigned int slot, unsigned int device, uint64_t window_ns);

/* Index of the device with this UUID, -1 when no process has used it yet. */
int card_device_known(const struct card *card, const char *uuid);

/* Caller holds the clock. True if this process has work and another one has the device. */
bool card_is_away(const struct card *card, unsigned int slot, unsigned int device);

/* Caller holds the clock. How many processes have work now. */
unsigned int card_busy_count(const struct card *card, unsigned int device);

#endif
