/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who a process is, and whether another one still lives.
 *
 * Identity: pid, pid namespace, start time, program image. A process that cannot be judged counts as alive. Reads /proc; no other
 * file. Knows nothing of the region but the owner word.
 */
#ifndef VGPU_PROCESS_H
#define VGPU_PROCESS_H

#include <stdbool.h>
#include <stddef.h>

#include "region.h"

/* This process; never all zero. */
union region_owner process_self(void);

enum process_life { PROCESS_ALIVE, PROCESS_DEAD, PROCESS_UNKNOWN };

/* State of `owner`, seen from `self`. Does not look into other pid namespaces: those are PROCESS_UNKNOWN. */
enum process_life process_life(const union region_owner *self, const union region_owner *owner);

/* Judge the owners of other pid namespaces: alive[i] becomes false for those that are certainly gone, true for all
   others. Inner namespaces are judged by going once through /proc, which costs a read per process of the container.
   For the others, those of a container before its restart and of other containers with the same share, the agent lists
   the owners that have ended: "<pid> <pid namespace> <start ticks>" a line. */
void process_life_foreign(const union region_owner *self, const union region_owner *owners, bool *alive, size_t count);

/* Fields of /proc/<pid>/stat; from the last ')' on, because a program may be called "a (Z". */
struct process_stat {
    char state;
    uint64_t threads;
    uint64_t start_ticks;
    uint16_t image; /* 0: hidden from this process */
};

bool process_parse_stat(const char *text, struct process_stat *stat);

#endif
