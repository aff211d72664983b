/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that never uses the driver, and reports what it finds in its process.
 *
 *     guest state          umask, handlers of signals, threads, open files, mappings of a region
 *     guest lookalike FILE what dlsym finds in a library with names like the driver's
 *     guest absent         what dlsym answers for names of a driver that is not loaded
 *     guest exec FILE …    becomes another program
 *     guest spawn FILE …   vfork and exec, its exit code
 *     guest versions       dlvsym of libc
 */
#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static int entries(const char *folder)
{
    DIR *directory = opendir(folder);
    int count = 0;
    while (directory && readdir(directory))
        count++;
    if (directory) closedir(directory);
    return count;
}

static int state(void)
{
    int handlers = 0;
    for (int number = 1; number < 65; number++) {
        struct sigaction action;
        if (sigaction(number, NULL, &action) == 0 && action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN)
            handlers++;
    }
    mode_t mask = umask(0);
    printf("umask %o handlers %d threads %d files %d\n", (unsigned int)mask, handlers, entries("/proc/self/task") - 2,
           entries("/proc/self/fd") - 3);
    return 0;
}

static int lookalike(const char *file)
{
    void *library = dlopen(file, RTLD_NOW);
    if (!library) return 1;
    int (*curl)(void) = (int (*)(void))dlsym(library, "curl_easy_init");
    int (*cuckoo)(void) = (int (*)(void))dlsym(library, "cuckoo_insert");
    int (*alloc)(void) = (int (*)(void))dlsym(library, "cuMemAlloc_v2");
    printf("%d %d %d\n", curl(), cuckoo(), alloc());
    return 0;
}

static int absent(void)
{
    dlerror();
    void *function = dlsym(RTLD_DEFAULT, "cuInit");
    const char *problem = dlerror();
    printf("%s %s\n", function ? "found" : "absent", problem ? "reported" : "silent");
    return 0;
}

static int spawn(char **words)
{
    int status = -1;
    pid_t child = vfork();
    if (child == 0) {
        execv(words[0], words);
        _exit(127);
    }
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static int versions(void)
{
    void *old = dlvsym(RTLD_DEFAULT, "memcpy", "GLIBC_2.14");
    void *none = dlvsym(RTLD_DEFAULT, "memcpy", "GLIBC_9.99");
    printf("%s %s\n", old ? "found" : "absent", none ? "found" : "absent");
    return 0;
}

int main(int count, char **words)
{
    if (count > 1 && strcmp(words[1], "state") == 0) return state();
    if (count > 2 && strcmp(words[1], "lookalike") == 0) return lookalike(words[2]);
    if (count > 1 && strcmp(words[1], "absent") == 0) return absent();
    if (count > 2 && strcmp(words[1], "exec") == 0) return execv(words[2], words + 2);
    if (count > 2 && strcmp(words[1], "spawn") == 0) return spawn(words + 2);
    if (count > 1 && strcmp(words[1], "versions") == 0) return versions();
    return 2;
}
