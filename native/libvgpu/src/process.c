/* SPDX-License-Identifier: Apache-2.0 */
#include "process.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "limits.h"
#include "platform.h"

#define TICKS_MASK ((UINT64_C(1) << 48) - 1)
#define FIRST_TIME_NAMESPACE UINT64_C(0xeffffffa) /* of the machine; others shift the start times that they show */
#define NAMESPACES_KNOWN 64
#define ENDED_BYTES 16384u

/* Fields of /proc/<pid>/stat, counted from 1 as in proc(5). */
enum { FIELD_STATE = 3, FIELD_THREADS = 20, FIELD_START = 22, FIELD_START_CODE = 26, FIELD_START_STACK = 28 };

static uint64_t number_of(const char *text)
{
    uint64_t value = 0;
    for (; *text >= '0' && *text <= '9'; text++)
        value = value * 10 + (uint64_t)(*text - '0');
    return value;
}

static uint16_t image_of(uint64_t start_code, uint64_t start_stack)
{
    if (start_code <= 1 || start_stack == 0) /* what the kernel shows to those who may not see */
        return 0;
    uint64_t mixed = (start_code >> 12) * UINT64_C(0x9e3779b97f4a7c15) ^ start_stack * UINT64_C(0xc2b2ae3d27d4eb4f);
    mixed ^= mixed >> 32;
    uint16_t digest = (uint16_t)(mixed ^ (mixed >> 16));
    return digest ? digest : 1;
}

bool process_parse_stat(const char *text, struct process_stat *stat)
{
    const char *at = strrchr(text, ')');
    if (!at || at[1] != ' ') return false;
    at += 2;
    memset(stat, 0, sizeof *stat);
    stat->state = *at;
    uint64_t start_code = 0;
    uint64_t start_stack = 0;
    for (int field = FIELD_STATE; *at && *at != '\n'; field++) {
        uint64_t value = number_of(at);
        if (field == FIELD_THREADS)
            stat->threads = value;
        else if (field == FIELD_START)
            stat->start_ticks = value;
        else if (field == FIELD_START_CODE)
            start_code = value;
        else if (field == FIELD_START_STACK) {
            stat->image = image_of(start_code, value);
            start_stack = value;
            return stat->start_ticks != 0 || start_stack != 0;
        }
        while (*at && *at != ' ' && *at != '\n')
            at++;
        while (*at == ' ')
            at++;
    }
    return false;
}

static bool read_stat(uint32_t pid, struct process_stat *stat)
{
    char path[40];
    char text[1024];
    (void)snprintf(path, sizeof path, "/proc/%u/stat", pid);
    return platform_read_file(path, text, sizeof text) > 0 && process_parse_stat(text, stat);
}

/* Inode of a namespace link such as "pid:[4026531836]"; 0: cannot be read. */
static uint64_t namespace_of(const char *path)
{
    int saved = errno;
    char target[64];
    ssize_t length = readlink(path, target, sizeof target - 1);
    errno = saved;
    if (length <= 0) return 0;
    target[length] = '\0';
    const char *bracket = strchr(target, '[');
    return bracket ? number_of(bracket + 1) : 0;
}

/* true: the mounted /proc numbers processes as this process does. */
static bool proc_is_ours(uint32_t pid)
{
    int saved = errno;
    char target[24];
    ssize_t length = readlink("/proc/self", target, sizeof target - 1);
    errno = saved;
    if (length <= 0) return false;
    target[length] = '\0';
    return number_of(target) == pid;
}

union region_owner process_self(void)
{
    union region_owner self = {.word = 0};
    self.pid = (uint32_t)getpid();
    self.pid_namespace = (uint32_t)namespace_of("/proc/self/ns/pid");
    struct process_stat stat;
    if (proc_is_ours(self.pid) && read_stat(self.pid, &stat)) {
        uint64_t time_namespace = namespace_of("/proc/self/ns/time");
        if (time_namespace == 0 || time_namespace == FIRST_TIME_NAMESPACE)
            self.start_ticks = stat.start_ticks & TICKS_MASK;
        self.image = stat.image;
    }
    return self;
}

static enum process_life life_by_stat(const union region_owner *self, const union region_owner *owner,
                                      const struct process_stat *stat)
{
    /* A leader that ended before its threads is a zombie with more than one thread. */
    if (stat->state == 'X' || stat->state == 'x' || (stat->state == 'Z' && stat->threads <= 1)) return PROCESS_DEAD;
    if (self->start_ticks && owner->start_ticks && (stat->start_ticks & TICKS_MASK) != owner->start_ticks)
        return PROCESS_DEAD;
    if (owner->image && stat->image && stat->image != owner->image)
        return PROCESS_DEAD; /* same process, but it has executed another program since */
    return PROCESS_ALIVE;
}

enum process_life process_life(const union region_owner *self, const union region_owner *owner)
{
    if (owner->low == self->low) return owner->high == self->high ? PROCESS_ALIVE : PROCESS_DEAD;
    if (self->pid_namespace == 0 || owner->pid_namespace != self->pid_namespace) return PROCESS_UNKNOWN;
    if (owner->pid == 0 || owner->pid > INT32_MAX) return PROCESS_DEAD; /* only a vandal writes this */
    int saved = errno;
    bool gone = kill((pid_t)owner->pid, 0) != 0 && errno == ESRCH;
    errno = saved;
    if (gone) return PROCESS_DEAD;
    struct process_stat stat;
    if (!self->start_ticks && !proc_is_ours(self->pid)) return PROCESS_ALIVE;
    if (!read_stat(owner->pid, &stat)) return PROCESS_ALIVE; /* hidden, or ending: the next look shows which */
    return life_by_stat(self, owner, &stat);
}

/* Namespaces in which this process has seen a process through its own /proc: these are inside of its own. An owner of any
   other namespace may be outside, where no process can be seen. The kernel gives the number of a namespace that has
   ended to the next one, which may be outside; so each has the start time of the youngest process seen in it, and
   an owner that started later is not known to be inside. */
struct inner_namespace {
    uint32_t number;
    uint64_t youngest_ticks;
};
static struct inner_namespace inner_namespaces[NAMESPACES_KNOWN];
static uint32_t inner_namespace_count;

static struct inner_namespace *inner_of(uint32_t pid_namespace)
{
    uint32_t count = __atomic_load_n(&inner_namespace_count, __ATOMIC_ACQUIRE);
    for (uint32_t i = 0; i < count; i++)
        if (__atomic_load_n(&inner_namespaces[i].number, __ATOMIC_RELAXED) == pid_namespace)
            return &inner_namespaces[i];
    return NULL;
}

static bool is_inner(const union region_owner *owner)
{
    const struct inner_namespace *known = inner_of(owner->pid_namespace);
    return known && owner->start_ticks &&
           owner->start_ticks <= __atomic_load_n(&known->youngest_ticks, __ATOMIC_RELAXED);
}

static void know_inner(uint32_t pid_namespace, uint64_t start_ticks)
{
    if (pid_namespace == 0) return;
    struct inner_namespace *known = inner_of(pid_namespace);
    if (!known) {
        /* Two threads may write one place: then one of the two is learned at the next look. */
        uint32_t count = __atomic_load_n(&inner_namespace_count, __ATOMIC_ACQUIRE);
        if (count >= NAMESPACES_KNOWN) return;
        known = &inner_namespaces[count];
        __atomic_store_n(&known->youngest_ticks, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&known->number, pid_namespace, __ATOMIC_RELAXED);
        __atomic_store_n(&inner_namespace_count, count + 1, __ATOMIC_RELEASE);
    }
    if (start_ticks > __atomic_load_n(&known->youngest_ticks, __ATOMIC_RELAXED))
        __atomic_store_n(&known->youngest_ticks, start_ticks, __ATOMIC_RELAXED);
}

/* Last number on the NSpid line: the pid in the innermost namespace; 0: no such line. `depth` counts the numbers. */
static uint32_t innermost_pid(const char *status, int *depth)
{
    const char *at = strstr(status, "\nNSpid:");
    *depth = 0;
    uint32_t last = 0;
    if (!at) return 0;
    at += 7;
    while (*at == '\t' || *at == ' ') {
        at++;
        if (*at < '0' || *at > '9') continue;
        last = 0;
        for (; *at >= '0' && *at <= '9'; at++)
            last = last * 10 + (uint32_t)(*at - '0');
        ++*depth;
    }
    return last;
}

/* One pass over /proc, to find owners that live in inner pid namespaces. */
struct inner_search {
    const union region_owner *self;
    const union region_owner *owners;
    size_t count;
    bool *seen;   /* of each owner: a live process is it */
    char *status; /* STATUS_BYTES */
    bool blind;   /* some process could not be read: absence proves nothing */
};

#define STATUS_BYTES 8192u

/* Mark the owners that this process of /proc is. */
static void see_process(struct inner_search *search, uint32_t pid)
{
    char path[40];
    (void)snprintf(path, sizeof path, "/proc/%u/status", pid);
    long length = platform_read_file(path, search->status, STATUS_BYTES);
    int depth = 0;
    if (length <= 0) {
        if (length != -ENOENT && length != -ESRCH) search->blind = true; /* else it has ended meanwhile */
        return;
    }
    uint32_t inner = innermost_pid(search->status, &depth);
    if (depth == 0 && !strstr(search->status, "\nNSpid:")) search->blind = true; /* the kernel does not report it */
    if (depth < 2) return;
    (void)snprintf(path, sizeof path, "/proc/%u/ns/pid", pid);
    uint32_t pid_namespace = (uint32_t)namespace_of(path);
    struct process_stat stat;
    if (!read_stat(pid, &stat)) return;
    for (size_t i = 0; i < search->count; i++)
        if (search->owners[i].pid_namespace == pid_namespace)
            know_inner(pid_namespace, stat.start_ticks & TICKS_MASK); /* one of an owner: others are of no interest */
    for (size_t i = 0; i < search->count; i++) {
        const union region_owner *owner = &search->owners[i];
        if (owner->pid == inner && (!pid_namespace || owner->pid_namespace == pid_namespace) &&
            life_by_stat(search->self, owner, &stat) == PROCESS_ALIVE)
            search->seen[i] = true;
    }
}

static void see_processes(struct inner_search *search, DIR *directory)
{
    for (const struct dirent *entry = readdir(directory); entry; entry = readdir(directory))
        if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9') see_process(search, (uint32_t)number_of(entry->d_name));
}

static void judge_inner(const union region_owner *self, const union region_owner *owners, bool *alive, size_t count)
{
    if (!proc_is_ours(self->pid)) return;
    int saved = errno;
    DIR *directory = opendir("/proc");
    errno = saved;
    if (!directory) return;
    /* Where /proc hides the processes of other users, the absence of a process proves nothing. */
    struct process_stat first;
    struct inner_search search = {.self = self, .owners = owners, .count = count, .blind = !read_stat(1, &first)};
    search.seen = calloc(count ? count : 1, sizeof *search.seen);
    search.status = malloc(STATUS_BYTES);
    bool searched = search.seen && search.status;
    if (searched) see_processes(&search, directory);
    for (size_t i = 0; searched && !search.blind && i < count; i++)
        if (owners[i].pid_namespace != self->pid_namespace && !search.seen[i] && is_inner(&owners[i])) alive[i] = false;
    free(search.status);
    free(search.seen);
    closedir(directory);
}

static uint64_t next_number(const char **at)
{
    while (**at == ' ')
        ++*at;
    uint64_t value = number_of(*at);
    while (**at >= '0' && **at <= '9')
        ++*at;
    return value;
}

static void judge_ended(const union region_owner *owners, bool *alive, size_t count)
{
    char *text = malloc(ENDED_BYTES);
    if (!text) return;
    bool is_read = platform_read_file(LIMITS_ENDED_PATH, text, ENDED_BYTES) > 0;
    for (const char *at = text; is_read && *at; at++) {
        uint64_t pid = next_number(&at);
        uint64_t pid_namespace = next_number(&at);
        uint64_t start_ticks = next_number(&at);
        for (size_t i = 0; start_ticks && i < count; i++)
            if (owners[i].pid == pid && owners[i].pid_namespace == pid_namespace &&
                owners[i].start_ticks == start_ticks)
                alive[i] = false;
        while (*at && *at != '\n')
            at++;
        if (!*at) break;
    }
    free(text);
}

void process_life_foreign(const union region_owner *self, const union region_owner *owners, bool *alive, size_t count)
{
    for (size_t i = 0; i < count; i++)
        alive[i] = true;
    judge_inner(self, owners, alive, count);
    judge_ended(owners, alive, count);
}
