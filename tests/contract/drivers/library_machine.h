/* SPDX-License-Identifier: Apache-2.0
 *
 * The machine behind a fake vendor library: a text file `machine` beside the .so, written by
 * tests/support/fake_library.py; machine_read(), which the library's init calls, reads it again.
 *
 *     version 6.2             a word of the machine
 *     answer CALL CODE        the call answers this code:  REFUSED(CALL)  returns it
 *     garbled garbage         answers that cannot be
 *     hang | crash | noise    what machine_read() does: sleep, abort, or print on standard output
 *     device\tindex=0\tuuid=...\tmemory_mib=65536\t...
 *     process INDEX PID MIB
 *
 * Devices are in the order of the file; a device's keys are text or whole numbers.
 */
#ifndef LIBRARY_MACHINE_H
#define LIBRARY_MACHINE_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char machine_lines[256][1024];
static int machine_count;

__attribute__((unused)) static void machine_read(void)
{
    Dl_info info;
    char path[4096];
    dladdr((void *)machine_read, &info);
    snprintf(path, sizeof path, "%s", info.dli_fname);
    char *end = strrchr(path, '/');
    snprintf(end ? end + 1 : path, sizeof path - (size_t)(end ? end + 1 - path : 0), "machine");
    FILE *file = fopen(path, "r");
    machine_count = 0;
    while (file && machine_count < 256 && fgets(machine_lines[machine_count], 1024, file)) {
        char *line = machine_lines[machine_count++];
        line[strcspn(line, "\n")] = 0;
        if (!strcmp(line, "hang")) sleep(600);
        if (!strcmp(line, "crash")) abort();
        if (!strcmp(line, "noise")) {
            printf("[warning] {\"devices\": nonsense\n");
            fflush(stdout);
        }
    }
    if (file) fclose(file);
}

/* The rest of the first line that begins with `word`; empty where there is none. */
__attribute__((unused)) static const char *machine_word(const char *word)
{
    size_t size = strlen(word);
    for (int i = 0; i < machine_count; i++)
        if (!strncmp(machine_lines[i], word, size) && machine_lines[i][size] == ' ')
            return machine_lines[i] + size + 1;
    return "";
}

__attribute__((unused)) static int machine_is_garbled(const char *how)
{
    return !strcmp(machine_word("garbled"), how);
}

__attribute__((unused)) static int machine_answer(const char *call, int *code)
{
    char name[128];
    for (int i = 0; i < machine_count; i++)
        if (sscanf(machine_lines[i], "answer %127s %d", name, code) == 2 && !strcmp(name, call))
            return 1;
    return 0;
}

#define REFUSED(call)                                       \
    do {                                                    \
        int refused_;                                       \
        if (machine_answer(#call, &refused_)) return refused_; \
    } while (0)

/* The line of the device that is number `at` in the file. */
__attribute__((unused)) static const char *machine_device(int at)
{
    for (int i = 0; at >= 0 && i < machine_count; i++)
        if (!strncmp(machine_lines[i], "device\t", 7) && !at--) return machine_lines[i];
    return NULL;
}

__attribute__((unused)) static int machine_devices(void)
{
    int count = 0;
    while (machine_device(count)) count++;
    return count;
}

/* The text of a key; empty where there is none. Copied: it stays until the next call. */
__attribute__((unused)) static const char *device_text(int at, const char *key)
{
    static char found[8][512];
    static int turn;
    char *into = found[turn++ % 8], wanted[128];
    const char *line = machine_device(at);
    into[0] = 0;
    snprintf(wanted, sizeof wanted, "\t%s=", key);
    const char *start = line ? strstr(line, wanted) : NULL;
    if (start) {
        start += strlen(wanted);
        snprintf(into, 512, "%.*s", (int)strcspn(start, "\t"), start);
    }
    return into;
}

/* The number of a key, decimal or 0x...; 0 where there is none. */
__attribute__((unused)) static long long device_number(int at, const char *key)
{
    return (long long)strtoull(device_text(at, key), NULL, 0);
}

/* Process number `n` of a device; 0 where there are no more. */
__attribute__((unused)) static int device_process(int at, int n, unsigned *pid, unsigned *mib)
{
    unsigned index, mine = (unsigned)device_number(at, "index");
    for (int i = 0; i < machine_count; i++)
        if (sscanf(machine_lines[i], "process %u %u %u", &index, pid, mib) == 3 && index == mine &&
            !n--)
            return 1;
    return 0;
}
#endif
