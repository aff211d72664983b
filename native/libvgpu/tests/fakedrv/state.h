/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hardware that the fake drivers pretend to be: a plain-text file, read again whenever it changes.
 *
 * File format (written by hami_sim.hardware.fake_nvml; atomically, by rename): lines `key = value`; `#` starts a
 * comment line; `[gpu N]` opens the block of device N, N counting up from 0; keys before the first block describe the
 * system. List keys repeat. Unknown keys, unknown words and values out of range refuse the whole file, so a typing
 * error cannot pass as healthy hardware.
 *
 * System keys      driver_version nvml_version cuda_version init_error
 *                  pair = A B LEVEL          common ancestor of gpu A as asked with gpu B second (one direction)
 *                  fault = FUNCTION GPU|* RETURN HANG_MS     RETURN 0 delays only; a hang ends when the line goes
 *                  event = SEQ GPU TYPE DATA GI CI           SEQ grows; a set delivers events later than its creation
 * Device keys      uuid name serial minor bus_id pci_device_id pci_subsystem_id brand architecture compute_capability
 *                  sm_count numa cpus memory_total memory_used memory_reserved unified_memory gpu_util memory_util
 *                  temperature_c power_mw power_limit_mw clock_sm_mhz clock_memory_mhz ecc_current ecc_pending
 *                  ecc_corrected ecc_uncorrected remapped_corrected remapped_uncorrected remapped_pending
 *                  remapped_failure retired_pending supported_events lost mig_capable mig_current mig_pending mig_max
 *                  mig_clients mig_vm                        strangers that hold the card; no reset but by a reboot
 *                  process = PID BYTES SM MEM GI CI TIME_US
 *                  context_bytes pool_granularity            what CUDA takes per context and by which pools grow
 *                  block_granularity concurrent_managed      to what linear blocks above 1 MiB are rounded up (1: to
 *                                                            the byte); attribute 89 (0, or 1 by default)
 *                  checkpoint_bytes_per_s restore_bytes_per_s    speed of the copies to the host and back (checkpoint.c);
 *                                                            0, the default: they take no time
 *                  migration_bytes_per_s                     speed at which managed pages move between host and device
 *                                                            (card.h); 0, the default: managed memory is device memory
 *                  mig = UUID GI CI BYTES SMS                an instance; CUDA sees instances when mig_current is 1
 *                  gi_profile = KIND ID SLICES MIB SMS COUNT CE DEC ENC JPEG OFA SIZE STARTS NAME
 *                                                            a size of MIG instance; STARTS as 0,2,4
 *                  nvlink = LINK ACTIVE TYPE BUS_ID          TYPE as in NVML: 0 gpu, 2 switch
 * Units: bytes, percent, milliwatts, MHz, microseconds since the epoch.
 *
 * MIG instances that were made through the library stand in a second file, PATH.mig (written by mig.c), and are read
 * with the first: `gi CARD GI PROFILE_ID START` and, after it, `ci CARD GI CI SLICES UUID`. Lines of cards or profiles
 * that the first file does not have are passed over. `mode CARD CURRENT PENDING SWITCHES` stands there once the mode
 * was switched through the library, and goes before the first file's; handles from before the last switch are stale.
 *
 * Locks taken here: none; callers hold the one lock of nvml.c.
 */
#ifndef FAKEDRV_STATE_H
#define FAKEDRV_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

enum {
    FAKE_GPUS_MAX = 32,
    FAKE_PROCESSES_MAX = 128,
    FAKE_LINKS_MAX = 36,
    FAKE_MIGS_MAX = 16,
    FAKE_GI_PROFILES_MAX = 18,
    FAKE_GIS_MAX = 16,
    FAKE_FAULTS_MAX = 64,
    FAKE_EVENTS_MAX = 256,
    FAKE_CPU_WORDS = 16,
    FAKE_TEXT = 96
};

struct fake_process {
    unsigned int pid;
    unsigned long long used_bytes;
    unsigned int sm_util;
    unsigned int mem_util;
    unsigned int gpu_instance;
    unsigned int compute_instance;
    unsigned long long time_us;
};

struct fake_link {
    bool present;
    bool active;
    unsigned int remote_type;
    char remote_bus_id[FAKE_TEXT];
};

/* A MIG instance: a device of its own to CUDA, known by its UUID. */
struct fake_mig {
    char uuid[FAKE_TEXT];
    unsigned int gpu_instance;
    unsigned int compute_instance;
    unsigned long long memory_total;
    unsigned int sm_count;
    unsigned int slices; /* compute slices; 0: named by the state file, which does not say */
};

/* A size of GPU instance. `kind` is the number by which callers ask for it, `id` that of this card. */
struct fake_gi_profile {
    unsigned int kind;
    unsigned int id;
    unsigned int slices;
    unsigned int memory_mib;
    unsigned int sm_count;
    unsigned int count;
    unsigned int copy_engines;
    unsigned int decoders;
    unsigned int encoders;
    unsigned int jpeg;
    unsigned int ofa;
    unsigned int size;
    unsigned int starts; /* bit i: position i */
    char name[FAKE_TEXT];
};

/* A GPU instance that was made through the library. */
struct fake_gi {
    unsigned int id;
    unsigned int profile; /* index in gi_profiles */
    unsigned int start;
};

struct fake_gpu {
    char uuid[FAKE_TEXT];
    char name[FAKE_TEXT];
    char serial[FAKE_TEXT];
    char bus_id[FAKE_TEXT];
    unsigned int minor;
    unsigned int pci_device_id;
    unsigned int pci_subsystem_id;
    unsigned int brand;
    unsigned int architecture;
    int capability_major;
    int capability_minor;
    unsigned int sm_count;
    int numa;
    unsigned long long cpus[FAKE_CPU_WORDS];
    unsigned long long memory_total;
    unsigned long long memory_used;
    unsigned long long memory_reserved;
    bool unified_memory;
    unsigned int gpu_util;
    unsigned int memory_util;
    unsigned int temperature_c;
    unsigned int power_mw;
    unsigned int power_limit_mw;
    unsigned int clock_sm_mhz;
    unsigned int clock_memory_mhz;
    bool ecc_supported;
    unsigned int ecc_current;
    unsigned int ecc_pending;
    unsigned long long ecc_corrected;
    unsigned long long ecc_uncorrected;
    unsigned int remapped_corrected;
    unsigned int remapped_uncorrected;
    unsigned int remapped_pending;
    unsigned int remapped_failure;
    unsigned int retired_pending;
    unsigned long long supported_events;
    bool lost;
    bool mig_capable;
    unsigned int mig_current;
    unsigned int mig_pending;
    unsigned int mig_switches; /* 0: the mode never changed through the library */
    bool mig_has_mode;         /* it was asked to */
    unsigned int mig_clients;
    bool mig_vm;
    unsigned int mig_max;
    struct fake_mig migs[FAKE_MIGS_MAX];
    unsigned int mig_count;
    struct fake_gi_profile gi_profiles[FAKE_GI_PROFILES_MAX];
    unsigned int gi_profile_count;
    struct fake_gi gis[FAKE_GIS_MAX];
    unsigned int gi_count;
    bool is_instance; /* never in the file: this is the view of one MIG instance */
    unsigned int gpu_instance;
    unsigned int compute_instance;
    unsigned long long context_bytes;
    unsigned long long pool_granularity;
    unsigned long long block_granularity;
    unsigned long long checkpoint_bytes_per_s;
    unsigned long long restore_bytes_per_s;
    unsigned long long migration_bytes_per_s;
    bool concurrent_managed;
    struct fake_process processes[FAKE_PROCESSES_MAX];
    unsigned int process_count;
    struct fake_link links[FAKE_LINKS_MAX];
};

struct fake_fault {
    char function[FAKE_TEXT];
    int gpu; /* -1: every device, and calls without one */
    unsigned int result;
    unsigned int hang_ms;
};

struct fake_event {
    unsigned long long seq;
    unsigned int gpu;
    unsigned long long type;
    unsigned long long data;
    unsigned int gpu_instance;
    unsigned int compute_instance;
};

struct fake_state {
    char driver_version[FAKE_TEXT];
    char nvml_version[FAKE_TEXT];
    int cuda_version;
    unsigned int init_error;
    struct fake_gpu gpus[FAKE_GPUS_MAX];
    unsigned int gpu_count;
    unsigned int levels[FAKE_GPUS_MAX][FAKE_GPUS_MAX];
    struct fake_fault faults[FAKE_FAULTS_MAX];
    unsigned int fault_count;
    struct fake_event events[FAKE_EVENTS_MAX];
    unsigned int event_count;
};

/* Stamp by which a change of a state's files is detected. */
struct fake_stamp {
    struct stat state;
    struct stat instances; /* zero: no instances were made */
};

/* false: there is no state file. */
bool fake_state_stamp(const char *path, struct fake_stamp *out);
bool fake_same_stamp(const struct fake_stamp *a, const struct fake_stamp *b);

/* Parse `path` into `state`. On failure `state` is undefined and `problem` says which line and why. */
bool fake_state_read(const char *path, struct fake_state *state, char *problem, size_t problem_size);

/* The positions that an instance of the profile takes from `start`, as bits. */
unsigned int fake_positions(const struct fake_gi_profile *profile, unsigned int start);

/* Sequence number of the newest event, 0 when there is none. */
unsigned long long fake_state_last_event(const struct fake_state *state);

#endif
