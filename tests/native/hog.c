/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tenant that wants more than its share: takes device memory until it is refused, and keeps it.
 *
 *     hog WAY MIB
 *
 * WAY is how it reaches the driver:
 *   plain     dlopen and dlsym, as programs do
 *   deepbind  the same with RTLD_DEEPBIND
 *   dlmopen   in a link namespace of its own
 *   tables    past dlsym: the loaded driver's own symbol table, read by hand
 *   static    the driver is in the program (built with HOG_STATIC): nothing can be preloaded
 * Prints `hog.mib=N` (given before the first refusal, at most MIB), `hog.refused=CODE`, `hog.time_s=SECONDS` (Unix) and
 * waits for SIGTERM. Exit code 3: the way does not exist here.
 *
 * Locks taken here: none. Called with hooks active: that is the question.
 */
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define DRIVER "libcuda.so.1"

#ifdef HOG_STATIC
int cuInit(unsigned int flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes);
#endif

static int (*init)(unsigned int);
static int (*retain)(void **, int);
static int (*set_current)(void *);
static int (*allocate)(uint64_t *, size_t);

static void take(void *found, void *pointer)
{
    if (found == NULL) exit(3);
    memcpy(pointer, &found, sizeof found);
}

#ifndef HOG_STATIC
struct wanted {
    const char *name;
    void *found;
};

/* The driver among the loaded objects: its dynamic symbols, without asking any function of the C library. */
static int search(struct dl_phdr_info *info, size_t size, void *data)
{
    struct wanted *wanted = data;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    (void)size;
    if (strstr(info->dlpi_name, "libcuda") == NULL) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
        const ElfW(Dyn) *entry = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        for (; entry->d_tag != DT_NULL; entry++) {
            if (entry->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym) *)entry->d_un.d_ptr;
            if (entry->d_tag == DT_STRTAB) names = (const char *)entry->d_un.d_ptr;
        }
    }
    if (symbols == NULL || names == NULL) return 0;
    for (const ElfW(Sym) *symbol = symbols + 1; (const char *)symbol < names; symbol++) {
        if (symbol->st_value != 0 && strcmp(names + symbol->st_name, wanted->name) == 0) {
            wanted->found = (void *)(info->dlpi_addr + symbol->st_value);
            return 1;
        }
    }
    return 0;
}

static void *by_tables(const char *name)
{
    struct wanted wanted = {name, NULL};
    (void)dl_iterate_phdr(search, &wanted);
    return wanted.found;
}

static void find(const char *way)
{
    void *driver = NULL;
    if (strcmp(way, "deepbind") == 0) {
        driver = dlopen(DRIVER, RTLD_NOW | RTLD_DEEPBIND);
    } else if (strcmp(way, "dlmopen") == 0) {
        driver = dlmopen(LM_ID_NEWLM, DRIVER, RTLD_NOW);
    } else {
        driver = dlopen(DRIVER, RTLD_NOW);
    }
    if (driver == NULL) exit(3);
    int tables = strcmp(way, "tables") == 0;
    take(tables ? by_tables("cuInit") : dlsym(driver, "cuInit"), &init);
    take(tables ? by_tables("cuDevicePrimaryCtxRetain") : dlsym(driver, "cuDevicePrimaryCtxRetain"), &retain);
    take(tables ? by_tables("cuCtxSetCurrent") : dlsym(driver, "cuCtxSetCurrent"), &set_current);
    take(tables ? by_tables("cuMemAlloc_v2") : dlsym(driver, "cuMemAlloc_v2"), &allocate);
}
#else
static void find(const char *way)
{
    if (strcmp(way, "static") != 0) exit(3);
    init = cuInit;
    retain = cuDevicePrimaryCtxRetain;
    set_current = cuCtxSetCurrent;
    allocate = cuMemAlloc_v2;
}
#endif

int main(int argc, char **argv)
{
    void *context = NULL;
    sigset_t ends;
    size_t taken = 0;
    uint64_t pointer = 0;
    struct timespec now;
    int code;
    if (argc != 3) return 2;
    (void)sigemptyset(&ends);
    (void)sigaddset(&ends, SIGTERM);
    (void)sigprocmask(SIG_BLOCK, &ends, NULL);
    size_t wanted = (size_t)strtoul(argv[2], NULL, 10);
    find(argv[1]);
    code = init(0);
    if (code == 0) code = retain(&context, 0);
    if (code == 0) code = set_current(context);
    while (code == 0 && taken < wanted) {
        code = allocate(&pointer, MIB);
        taken += code == 0;
    }
    (void)clock_gettime(CLOCK_REALTIME, &now);
    printf("hog.mib=%zu\nhog.refused=%d\nhog.time_s=%.3f\n", taken, code,
           (double)now.tv_sec + (double)now.tv_nsec / 1e9);
    (void)fflush(stdout);
    int got = 0;
    (void)sigwait(&ends, &got);
    return 0;
}
