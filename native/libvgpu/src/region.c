/* SPDX-License-Identifier: Apache-2.0 */
#include "region.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "atomic.h"
#include "platform.h"

#define PATH_MAX_BYTES 4096
#define MODE_FOR_ALL 0666 /* processes of a container may run as different users */
#define REPLACE_WAIT_NS UINT64_C(100000000)
#define REPLACE_POLL_NS UINT64_C(2000000)

static uint32_t checksum_of(const struct region_header *header)
{
    const unsigned char *byte = (const unsigned char *)header;
    uint32_t sum = 2166136261u;
    for (size_t i = 0; i < offsetof(struct region_header, checksum); i++)
        sum = (sum ^ byte[i]) * 16777619u;
    return sum;
}

static struct region_header header_for(uint32_t device_count)
{
    struct region_header header = {
        .magic = REGION_MAGIC,
        .layout = REGION_LAYOUT,
        .header_bytes = sizeof(struct region_header) + sizeof(struct region_control),
        .device_count = device_count,
        .slot_count = REGION_SLOTS,
    };
    header.devices_offset = header.header_bytes;
    header.slots_offset = header.devices_offset + (uint64_t)device_count * sizeof(struct region_device);
    header.shares_offset = header.slots_offset + (uint64_t)REGION_SLOTS * sizeof(struct region_slot);
    header.file_bytes = header.shares_offset + (uint64_t)device_count * REGION_SLOTS * sizeof(struct region_share);
    header.checksum = checksum_of(&header);
    return header;
}

/* Every field must be what this program would write: then nothing in the file can lead a pointer astray. */
static bool header_is_ours(const struct region_header *header, const struct region_want *want)
{
    struct region_header expected = header_for(want->device_count);
    return memcmp(header, &expected, offsetof(struct region_header, slots_seen)) == 0;
}

static void point_into(struct region *region, const struct region_header *header)
{
    char *base = region->base;
    region->bytes = header->file_bytes;
    region->device_count = header->device_count;
    region->slot_count = header->slot_count;
    region->slots_seen = &((struct region_header *)region->base)->slots_seen;
    region->control = (struct region_control *)(base + sizeof(struct region_header));
    region->devices = (struct region_device *)(base + header->devices_offset);
    region->slots = (struct region_slot *)(base + header->slots_offset);
    region->shares = (struct region_share *)(base + header->shares_offset);
}

/* The zero pages of a new file are a valid state of everything else: no slot taken, nothing used. Version 0 with slot 0
   names an operation whose intent has version 0, which no process completes. */
static void fill(struct region *region, const struct region_header *header, const struct region_want *want)
{
    ATOMIC_STEP(true);
    memcpy(region->base, header, sizeof *header);
    for (uint32_t i = 0; i < want->device_count; i++) {
        ATOMIC_STEP(true);
        (void)snprintf(region->devices[i].uuid, REGION_UUID, "%s", want->uuids[i]);
        union region_total_word none = {.slot = REGION_NO_SLOT};
        ATOMIC_STEP(true);
        region->devices[i].total = none;
    }
}

static int describe(const char *what, int error, char *problem, size_t problem_size)
{
    (void)snprintf(problem, problem_size, "%s: %s", what, error ? strerror(error) : "not a region of this version");
    return error ? error : EINVAL;
}

static long file_status(int file, struct stat *status)
{
    return syscall(SYS_fstat, file, status); /* the libc name of it is younger than the baseline */
}

enum found { FOUND_OURS, FOUND_NOTHING, FOUND_FOREIGN, FOUND_ERROR };

static enum found map_file(int file, const struct region_want *want, struct region *region, int *error)
{
    struct stat status;
    struct region_header header;
    *error = 0;
    if (file_status(file, &status) != 0) {
        *error = errno;
        return FOUND_ERROR;
    }
    if (!S_ISREG(status.st_mode) || syscall(SYS_pread64, file, &header, sizeof header, 0L) != (long)sizeof header ||
        !header_is_ours(&header, want) || (uint64_t)status.st_size != header.file_bytes)
        return FOUND_FOREIGN;
    void *base = mmap(NULL, header.file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (base == MAP_FAILED) {
        *error = errno;
        return FOUND_ERROR;
    }
    region->base = base;
    region->shared = true;
    point_into(region, &header);
    for (uint32_t i = 0; i < want->device_count; i++) {
        char uuid[REGION_UUID];
        memcpy(uuid, region->devices[i].uuid, sizeof uuid);
        uuid[REGION_UUID - 1] = '\0';
        if (strcmp(uuid, want->uuids[i]) != 0) { /* of another allocation */
            region_close(region);
            return FOUND_FOREIGN;
        }
    }
    return FOUND_OURS;
}

/* O_NOFOLLOW: a link in a directory for all is not followed; O_NONBLOCK: a pipe of that name must not block. */
static enum found open_existing(const char *path, const struct region_want *want, struct region *region, int *error)
{
    int file = platform_open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0);
    if (file < 0) {
        *error = errno;
        if (errno == ENOENT) return FOUND_NOTHING;
        /* a link, a directory, a socket or a device without a driver */
        return errno == ELOOP || errno == EISDIR || errno == ENXIO || errno == ENODEV ? FOUND_FOREIGN : FOUND_ERROR;
    }
    enum found found = map_file(file, want, region, error);
    platform_close(file);
    return found;
}

/* All blocks at once, so that a full disk is met here and not by a write to mapped memory, which would kill. */
static bool reserve(int file, uint64_t bytes)
{
    struct rlimit most; /* beyond it the kernel ends the process */
    if (getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur != RLIM_INFINITY && most.rlim_cur < bytes) {
        errno = EFBIG;
        return false;
    }
    if (syscall(SYS_fallocate, file, 0L, 0L, (long)bytes) == 0) return true;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return false;
    static const char zeros[65536];
    for (uint64_t at = 0; at < bytes;) {
        size_t step = bytes - at < sizeof zeros ? (size_t)(bytes - at) : sizeof zeros;
        long wrote = syscall(SYS_pwrite64, file, zeros, step, (long)at);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) return false;
        at += (uint64_t)wrote;
    }
    return true;
}

static void directory_of(const char *path, char *directory, size_t size)
{
    const char *slash = strrchr(path, '/');
    if (slash)
        (void)snprintf(directory, size, "%.*s", (int)(slash - path + (slash == path)), path);
    else
        (void)snprintf(directory, size, ".");
}

/* A complete region in `file`, which no other process can see yet. 0 or errno. */
static int write_complete(int file, const struct region_want *want)
{
    struct region_header header = header_for(want->device_count);
    struct region fresh;
    if (fchmod(file, MODE_FOR_ALL) != 0 || !reserve(file, header.file_bytes)) return errno ? errno : EIO;
    fresh.base = mmap(NULL, header.file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (fresh.base == MAP_FAILED) return errno;
    point_into(&fresh, &header);
    fill(&fresh, &header, want);
    munmap(fresh.base, header.file_bytes);
    return 0;
}

/* Without a name until it is complete, so that a kill leaves nothing. ENOTSUP: not on this file system. */
static int create_nameless(const char *path, const struct region_want *want)
{
    char directory[PATH_MAX_BYTES];
    char link_of_file[40];
    directory_of(path, directory, sizeof directory);
    int file = platform_open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, MODE_FOR_ALL);
    if (file < 0) return errno == EROFS || errno == EACCES || errno == ENOENT || errno == ENOSPC ? errno : ENOTSUP;
    int error = write_complete(file, want);
    (void)snprintf(link_of_file, sizeof link_of_file, "/proc/self/fd/%d", file);
    ATOMIC_STEP(true);
    if (!error && linkat(AT_FDCWD, link_of_file, AT_FDCWD, path, AT_SYMLINK_FOLLOW) != 0)
        error = errno == EEXIST ? EEXIST : ENOTSUP; /* without /proc there is no way to the nameless */
    ATOMIC_STEP(true);
    platform_close(file);
    return error;
}

static int create_named(const char *path, const struct region_want *want)
{
    char temporary[PATH_MAX_BYTES];
    (void)snprintf(temporary, sizeof temporary, "%s.%d.%llx", path, (int)getpid(),
                   (unsigned long long)platform_now_ns());
    int file = platform_open(temporary, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, MODE_FOR_ALL);
    if (file < 0) return errno;
    ATOMIC_STEP(true);
    int error = write_complete(file, want);
    ATOMIC_STEP(true);
    if (!error && link(temporary, path) != 0) error = errno;
    ATOMIC_STEP(true);
    unlink(temporary);
    platform_close(file);
    return error;
}

/* 0; EEXIST: another process was first; other errno. */
static int create(const char *path, const struct region_want *want)
{
    int error = create_nameless(path, want);
    return error == ENOTSUP ? create_named(path, want) : error;
}

/* Put a file that is no region of ours aside and a new one in its place. One process at a time, ordered by a lock on
   the directory that the kernel drops with its holder; who does not get it soon goes on without. */
static enum found replace_foreign(const char *path, const struct region_want *want, struct region *region, int *error)
{
    char directory[PATH_MAX_BYTES];
    char aside[PATH_MAX_BYTES];
    directory_of(path, directory, sizeof directory);
    (void)snprintf(aside, sizeof aside, "%s.broken", path);
    int lock = platform_open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (lock < 0) {
        *error = errno;
        return FOUND_ERROR;
    }
    uint64_t until = platform_now_ns() + REPLACE_WAIT_NS;
    while (flock(lock, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK || platform_now_ns() > until) {
            *error = errno;
            platform_close(lock);
            return FOUND_ERROR;
        }
        platform_sleep_ns(REPLACE_POLL_NS);
    }
    enum found found = open_existing(path, want, region, error);
    if (found == FOUND_FOREIGN) {
        if (rename(path, aside) != 0 && errno != ENOENT)
            *error = errno;
        else
            *error = create(path, want);
        found = *error && *error != EEXIST ? FOUND_ERROR : open_existing(path, want, region, error);
    }
    platform_close(lock);
    return found;
}

int region_open(const char *path, const struct region_want *want, struct region *region, char *problem,
                size_t problem_size)
{
    int error = 0;
    memset(region, 0, sizeof *region);
    if (strlen(path) >= PATH_MAX_BYTES - 64) return describe(path, ENAMETOOLONG, problem, problem_size);
    enum found found = open_existing(path, want, region, &error);
    if (found == FOUND_NOTHING) {
        error = create(path, want);
        if (error && error != EEXIST) return describe(path, error, problem, problem_size);
        found = open_existing(path, want, region, &error);
    }
    if (found == FOUND_FOREIGN) found = replace_foreign(path, want, region, &error);
    return found == FOUND_OURS ? 0 : describe(path, error, problem, problem_size);
}

bool region_open_private(const struct region_want *want, struct region *region)
{
    struct region_header header = header_for(want->device_count);
    memset(region, 0, sizeof *region);
    void *base = mmap(NULL, header.file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return false;
    region->base = base;
    point_into(region, &header);
    fill(region, &header, want);
    return true;
}

void region_close(struct region *region)
{
    if (region->base) munmap(region->base, region->bytes);
    memset(region, 0, sizeof *region);
}
