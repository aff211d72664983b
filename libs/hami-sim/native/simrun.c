// SPDX-License-Identifier: Apache-2.0
/*
 * Runs one simulated container: a process in its own mount, pid, ipc and uts namespace, with a small root.
 *
 *     simrun SPEC STATUS_FD
 *
 * Three processes: the shim (this one, outside, a session of its own: it outlives its starter, waits, and writes
 * the exit file), init (pid 1 inside, reaps orphans, forwards nothing) and the workload (pid 2 inside). The shim takes
 *   SIGTERM  passes it to the workload          SIGUSR2  ends the container at once (SIGKILL to init)
 * and ends the container too when the process named by `owner` has ended. If the shim is killed, the kernel kills init.
 *
 * SPEC holds words, each ended by a NUL byte: "simrun/1", then keys with their arguments in the order of the table in
 * parse(). Mounts are made in the order written. Sources are opened in the host's view, targets are resolved inside the
 * new root, so a symbolic link in either cannot lead astray. Without `root` there are no namespaces at all.
 *
 * On STATUS_FD one line is written and then the end: "ok PID\n" (the workload's pid as the starter sees it) or
 * "error TEXT\n". The state file, written just before, receives "SHIM-PID SHIM-START WORKLOAD-PID NANOSECONDS\n" (start in
 * the ticks of /proc/PID/stat), so that a restarted starter can find the shim again. The exit file receives "CODE NANOSECONDS\n": the code as container runtimes report it (128 + signal),
 * the time as Unix time. An empty exit file means that the shim did not live to see the end.
 *
 * Locks taken here: none. Called with hooks active: no.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <grp.h>

#define MAX_WORDS 8192
#define MAX_STEPS 256
#define OLD_ROOT "/.old"
#define SCRATCH "/.scratch"

/* Numbers of system calls newer than some C libraries; the same on every architecture. */
#define NR_PIDFD_SEND_SIGNAL 424
#define NR_OPEN_TREE 428
#define NR_MOVE_MOUNT 429
#define NR_PIDFD_OPEN 434
#define NR_CLOSE_RANGE 436
#define NR_MOUNT_SETATTR 442

#define SIM_OPEN_TREE_CLONE 1U
#define SIM_AT_RECURSIVE 0x8000U
#define SIM_MOVE_MOUNT_F_EMPTY_PATH 4U
#define SIM_MOUNT_ATTR_RDONLY 1U

struct sim_mount_attr {
    uint64_t attr_set;
    uint64_t attr_clr;
    uint64_t propagation;
    uint64_t userns_fd;
};

enum step_kind { STEP_BIND, STEP_OVERLAY, STEP_TMPFS, STEP_PROC, STEP_LINK, STEP_MKDIR, STEP_MASK };

struct step {
    enum step_kind kind;
    const char *source;
    const char *target;
    const char *flags;
    int tree;
    bool is_directory;
};

static struct {
    const char *root;
    const char *log;
    const char *exit_path;
    const char *state_path;
    const char *hostname;
    const char *cwd;
    const char *join;
    pid_t owner;
    uid_t uid;
    gid_t gid;
    gid_t groups[64];
    size_t group_count;
    bool all_caps;
    bool share_pids;
    bool maps_user;
    struct step steps[MAX_STEPS];
    size_t step_count;
    char *argv[MAX_WORDS];
    size_t argc;
    char *envp[MAX_WORDS];
    size_t envc;
} spec = {.cwd = "/", .log = "/dev/null"};

static int status_fd = -1;
static int hello = -1; /* inside: reports to the shim that the workload is about to run, or why it cannot */

static void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* Says why nothing runs: inside through the shim, outside to the starter. */
static void fail(const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (hello >= 0) {
        (void)!write(hello, text, strlen(text));
    } else if (status_fd >= 0) {
        (void)dprintf(status_fd, "error %s\n", text);
    }
    _exit(126);
}

/* ---- reading the specification ---- */

static char *words[MAX_WORDS + 1];
static size_t word_count;

static const char *next_word(size_t *at)
{
    if (*at >= word_count) {
        fail("specification ends in the middle of a key");
    }
    return words[(*at)++];
}

static long number(const char *text)
{
    char *end = NULL;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0') {
        fail("specification: %s is not a number", text);
    }
    return value;
}

static struct step *add_step(enum step_kind kind)
{
    if (spec.step_count == MAX_STEPS) {
        fail("specification: more than %d mounts", MAX_STEPS);
    }
    struct step *step = &spec.steps[spec.step_count++];
    *step = (struct step){.kind = kind, .source = "", .target = "", .flags = "", .tree = -1};
    return step;
}

static void read_file(const char *path)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        fail("specification %s: %s", path, strerror(errno));
    }
    const size_t size = (size_t)info.st_size;
    char *text = malloc(size + 1);
    size_t have = 0;
    while (text != NULL && have < size) {
        const ssize_t got = read(fd, text + have, size - have);
        if (got <= 0) {
            break;
        }
        have += (size_t)got;
    }
    (void)close(fd);
    if (text == NULL || have != size || size == 0 || text[size - 1] != '\0') {
        fail("specification %s: not readable to its end", path);
    }
    for (size_t at = 0; at < size; at += strlen(text + at) + 1) {
        if (word_count == MAX_WORDS) {
            fail("specification: more than %d words", MAX_WORDS);
        }
        words[word_count++] = text + at;
    }
}

/* Place of the value of a key with one text; NULL: the key is another one. */
static const char **text_of(const char *key)
{
    const struct {
        const char *key;
        const char **text;
    } texts[] = {
        {"root", &spec.root},         {"join", &spec.join}, /* mount namespace to start from, as a path below /proc */
        {"log", &spec.log},           {"exit", &spec.exit_path}, {"state", &spec.state_path},
        {"hostname", &spec.hostname}, {"cwd", &spec.cwd},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (strcmp(texts[i].key, key) == 0) {
            return texts[i].text;
        }
    }
    return NULL;
}

static void parse(const char *path)
{
    read_file(path);
    size_t at = 0;
    if (strcmp(next_word(&at), "simrun/1") != 0) {
        fail("specification %s: does not begin with simrun/1", path);
    }
    while (at < word_count) {
        const char *key = next_word(&at);
        if (strcmp(key, "arg") == 0) {
            spec.argv[spec.argc++] = words[at];
            (void)next_word(&at);
        } else if (strcmp(key, "env") == 0) {
            spec.envp[spec.envc++] = words[at];
            (void)next_word(&at);
        } else if (strcmp(key, "bind") == 0) { /* source target flags: r read-only, R with what is mounted below */
            struct step *step = add_step(STEP_BIND);
            step->source = next_word(&at);
            step->target = next_word(&at);
            step->flags = next_word(&at);
        } else if (strcmp(key, "overlay") == 0) { /* source target: as in an image, writes stay in the container */
            struct step *step = add_step(STEP_OVERLAY);
            step->source = next_word(&at);
            step->target = next_word(&at);
        } else if (strcmp(key, "tmpfs") == 0) { /* target options */
            struct step *step = add_step(STEP_TMPFS);
            step->target = next_word(&at);
            step->flags = next_word(&at);
        } else if (strcmp(key, "proc") == 0) { /* target */
            add_step(STEP_PROC)->target = next_word(&at);
        } else if (strcmp(key, "mask") == 0) { /* target: becomes read-only where it is */
            add_step(STEP_MASK)->target = next_word(&at);
        } else if (strcmp(key, "mkdir") == 0) { /* target mode */
            struct step *step = add_step(STEP_MKDIR);
            step->target = next_word(&at);
            step->flags = next_word(&at);
        } else if (strcmp(key, "link") == 0) { /* text target */
            struct step *step = add_step(STEP_LINK);
            step->source = next_word(&at);
            step->target = next_word(&at);
        } else if (text_of(key) != NULL) {
            *text_of(key) = next_word(&at);
        } else if (strcmp(key, "owner") == 0) {
            spec.owner = (pid_t)number(next_word(&at));
        } else if (strcmp(key, "user") == 0) { /* uid gid */
            spec.uid = (uid_t)number(next_word(&at));
            spec.gid = (gid_t)number(next_word(&at));
        } else if (strcmp(key, "group") == 0) {
            if (spec.group_count == sizeof spec.groups / sizeof spec.groups[0]) {
                fail("specification: too many groups");
            }
            spec.groups[spec.group_count++] = (gid_t)number(next_word(&at));
        } else if (strcmp(key, "all-caps") == 0) {
            spec.all_caps = true;
        } else if (strcmp(key, "map-user") == 0) { /* a user namespace too: the starter is root inside */
            spec.maps_user = true;
        } else if (strcmp(key, "share-pids") == 0) {
            spec.share_pids = true;
        } else {
            fail("specification: unknown key %s", key);
        }
    }
    if (spec.argc == 0) {
        fail("specification: no command");
    }
}

/* ---- building the root, inside ---- */

static void make_parents(const char *path)
{
    char prefix[4096];
    const size_t length = strlen(path);
    if (length >= sizeof prefix) {
        fail("path too long: %s", path);
    }
    for (size_t at = 1; at < length; at++) {
        if (path[at] == '/') {
            memcpy(prefix, path, at);
            prefix[at] = '\0';
            if (mkdir(prefix, 0755) != 0 && errno != EEXIST) {
                fail("cannot make %s for %s: %s", prefix, path, strerror(errno));
            }
        }
    }
}

static void make_target(const char *path, bool is_directory)
{
    make_parents(path);
    if (is_directory) {
        if (mkdir(path, 0755) != 0 && errno != EEXIST) {
            fail("cannot make mount point %s: %s", path, strerror(errno));
        }
        return;
    }
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0644);
    if (fd >= 0) {
        (void)close(fd);
    } else if (access(path, F_OK) != 0) {
        fail("cannot make mount point %s: %s", path, strerror(errno));
    }
}

static void make_readonly(const char *path)
{
    struct sim_mount_attr attributes = {.attr_set = SIM_MOUNT_ATTR_RDONLY};
    if (syscall(NR_MOUNT_SETATTR, AT_FDCWD, path, SIM_AT_RECURSIVE, &attributes, sizeof attributes) == 0) {
        return;
    }
    if (mount(NULL, path, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL) != 0) {
        fail("cannot make %s read-only: %s", path, strerror(errno));
    }
}

/* In the host's view: holds each source by a detached copy of its mount. */
static void open_sources(void)
{
    for (size_t i = 0; i < spec.step_count; i++) {
        struct step *step = &spec.steps[i];
        if (step->kind != STEP_BIND) {
            continue;
        }
        struct stat info;
        if (stat(step->source, &info) != 0) {
            fail("mount source %s: %s", step->source, strerror(errno));
        }
        step->is_directory = S_ISDIR(info.st_mode);
        const unsigned recursive = strchr(step->flags, 'R') != NULL ? SIM_AT_RECURSIVE : 0;
        const long fd = syscall(NR_OPEN_TREE, AT_FDCWD, step->source, SIM_OPEN_TREE_CLONE | recursive | O_CLOEXEC);
        if (fd < 0) {
            fail("mount source %s: open_tree: %s", step->source, strerror(errno));
        }
        step->tree = (int)fd;
    }
}

static void bind_step(const struct step *step)
{
    make_target(step->target, step->is_directory);
    if (syscall(NR_MOVE_MOUNT, step->tree, "", AT_FDCWD, step->target, SIM_MOVE_MOUNT_F_EMPTY_PATH) != 0) {
        fail("cannot mount %s at %s: %s", step->source, step->target, strerror(errno));
    }
    (void)close(step->tree);
    if (strchr(step->flags, 'r') != NULL) {
        make_readonly(step->target);
    }
}

static void overlay_step(const struct step *step, size_t index)
{
    char upper[64];
    char work[64];
    char options[4096];
    (void)snprintf(upper, sizeof upper, SCRATCH "/%zu/upper/", index);
    (void)snprintf(work, sizeof work, SCRATCH "/%zu/work/", index);
    make_parents(upper);
    make_parents(work);
    make_target(step->target, true);
    const int length =
        snprintf(options, sizeof options, "lowerdir=" OLD_ROOT "%s,upperdir=%s,workdir=%s", step->source, upper, work);
    if (length < 0 || (size_t)length >= sizeof options) {
        fail("path too long: %s", step->source);
    }
    if (mount("overlay", step->target, "overlay", 0, options) == 0) {
        return;
    }
    char source[4096]; /* no overlay here: the directory itself, read-only */
    (void)snprintf(source, sizeof source, OLD_ROOT "%s", step->source);
    if (mount(source, step->target, NULL, MS_BIND, NULL) != 0) {
        fail("cannot mount %s at %s: %s", step->source, step->target, strerror(errno));
    }
    make_readonly(step->target);
}

static void take_step(const struct step *step, size_t index)
{
    switch (step->kind) {
    case STEP_BIND:
        bind_step(step);
        break;
    case STEP_OVERLAY:
        overlay_step(step, index);
        break;
    case STEP_TMPFS:
        make_target(step->target, true);
        if (mount("tmpfs", step->target, "tmpfs", MS_NOSUID, step->flags) != 0) {
            fail("cannot mount tmpfs at %s: %s", step->target, strerror(errno));
        }
        break;
    case STEP_PROC:
        make_target(step->target, true);
        if (mount("proc", step->target, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) != 0) {
            fail("cannot mount proc at %s: %s", step->target, strerror(errno));
        }
        break;
    case STEP_MASK:
        if (access(step->target, F_OK) != 0) {
            break;
        }
        if (mount(step->target, step->target, NULL, MS_BIND, NULL) != 0) {
            fail("cannot mount %s over itself: %s", step->target, strerror(errno));
        }
        make_readonly(step->target);
        break;
    case STEP_LINK:
        make_parents(step->target);
        if (symlink(step->source, step->target) != 0 && errno != EEXIST) {
            fail("cannot link %s to %s: %s", step->target, step->source, strerror(errno));
        }
        break;
    case STEP_MKDIR:
        make_target(step->target, true);
        if (chmod(step->target, (mode_t)strtoul(step->flags, NULL, 8)) != 0) {
            fail("cannot set the mode of %s: %s", step->target, strerror(errno));
        }
        break;
    }
}

static void enter_root(void)
{
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
        fail("cannot make mounts private: %s", strerror(errno));
    }
    open_sources();
    if (mount("tmpfs", spec.root, "tmpfs", MS_NOSUID, "mode=755,size=256m") != 0 || chdir(spec.root) != 0) {
        fail("cannot mount the root at %s: %s", spec.root, strerror(errno));
    }
    if (mkdir("." OLD_ROOT, 0700) != 0 || mkdir("." SCRATCH, 0700) != 0) {
        fail("cannot prepare the root: %s", strerror(errno));
    }
    if (syscall(SYS_pivot_root, ".", "." OLD_ROOT) != 0 || chroot(".") != 0 || chdir("/") != 0) {
        fail("cannot enter the root: %s", strerror(errno));
    }
    if (mount("tmpfs", SCRATCH, "tmpfs", 0, "mode=700,size=256m") != 0) {
        fail("cannot mount the scratch space: %s", strerror(errno));
    }
    for (size_t i = 0; i < spec.step_count; i++) {
        take_step(&spec.steps[i], i);
    }
    if (umount2(SCRATCH, MNT_DETACH) != 0 || rmdir(SCRATCH) != 0 || umount2(OLD_ROOT, MNT_DETACH) != 0 ||
        rmdir(OLD_ROOT) != 0) {
        fail("cannot leave the host's root: %s", strerror(errno));
    }
    if (spec.hostname != NULL && sethostname(spec.hostname, strlen(spec.hostname)) != 0) {
        fail("cannot set the host name %s: %s", spec.hostname, strerror(errno));
    }
}

/* ---- init and workload, inside ---- */

/* The capabilities that container runtimes leave to an unprivileged container. */
static const int KEPT_CAPS[] = {CAP_CHOWN,   CAP_DAC_OVERRIDE, CAP_FSETID,      CAP_FOWNER,          CAP_MKNOD,
                                CAP_NET_RAW, CAP_SETGID,       CAP_SETUID,      CAP_SETFCAP,         CAP_SETPCAP,
                                CAP_KILL,    CAP_SYS_CHROOT,   CAP_AUDIT_WRITE, CAP_NET_BIND_SERVICE};

static void drop_caps(void)
{
    for (int cap = 0; prctl(PR_CAPBSET_READ, cap, 0, 0, 0) >= 0; cap++) {
        bool is_kept = false;
        for (size_t i = 0; i < sizeof KEPT_CAPS / sizeof KEPT_CAPS[0]; i++) {
            is_kept = is_kept || KEPT_CAPS[i] == cap;
        }
        if (!is_kept && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) != 0) {
            fail("cannot drop capability %d: %s", cap, strerror(errno));
        }
    }
}

static void redirect(void)
{
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (nothing < 0 || dup2(nothing, 0) < 0) {
        fail("cannot open /dev/null: %s", strerror(errno));
    }
}

static void run_workload(void) __attribute__((noreturn));

static void run_workload(void)
{
    sigset_t none;
    (void)sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    (void)setsid();
    redirect();
    if (spec.root != NULL && chdir(spec.cwd) != 0) {
        make_target(spec.cwd, true);
    }
    if (chdir(spec.cwd) != 0) {
        fail("working directory %s: %s", spec.cwd, strerror(errno));
    }
    if (spec.root != NULL) {
        if (!spec.all_caps) {
            drop_caps();
        }
        /* In a user namespace of one's own there is one user, and groups cannot be changed. */
        const bool has_groups = spec.maps_user || setgroups(spec.group_count, spec.groups) == 0;
        if (!has_groups || setgid(spec.gid) != 0 || setuid(spec.uid) != 0) {
            fail("cannot become user %u group %u: %s", spec.uid, spec.gid, strerror(errno));
        }
    }
    if (write(hello, "+", 1) != 1) {
        _exit(126);
    }
    /* The search goes along the PATH of the container, not of the starter. */
    const char *path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    for (size_t i = 0; i < spec.envc; i++) {
        if (strncmp(spec.envp[i], "PATH=", 5) == 0) {
            path = spec.envp[i] + 5;
        }
    }
    if (setenv("PATH", path, 1) != 0) {
        fail("%s", strerror(errno));
    }
    (void)execvpe(spec.argv[0], spec.argv, spec.envp);
    fail("exec: \"%s\": %s", spec.argv[0], errno == ENOENT ? "executable file not found in $PATH" : strerror(errno));
}

static int code_of(int status)
{
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static void write_text(const char *path, const char *text)
{
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text)) {
        fail("cannot write %s: %s", path, strerror(errno));
    }
    (void)close(fd);
}

static uid_t outer_uid; /* the starter's, as the host knows them */
static gid_t outer_gid;

static void become_root_inside(void)
{
    char line[64];
    write_text("/proc/self/setgroups", "deny");
    (void)snprintf(line, sizeof line, "0 %u 1", outer_uid);
    write_text("/proc/self/uid_map", line);
    (void)snprintf(line, sizeof line, "0 %u 1", outer_gid);
    write_text("/proc/self/gid_map", line);
}

static void run_init(void) __attribute__((noreturn));

static void run_init(void)
{
    if (spec.maps_user) {
        become_root_inside();
    }
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (spec.join != NULL) {
        const int space = open(spec.join, O_RDONLY | O_CLOEXEC);
        if (space < 0 || setns(space, CLONE_NEWNS) != 0 || unshare(CLONE_NEWNS) != 0) {
            fail("cannot join %s: %s", spec.join, strerror(errno));
        }
        (void)close(space);
    }
    enter_root();
    const pid_t workload = fork();
    if (workload < 0) {
        fail("fork: %s", strerror(errno));
    }
    if (workload == 0) {
        run_workload();
    }
    (void)close(hello);
    (void)close(0);
    (void)close(1);
    (void)close(2);
    for (;;) {
        int status = 0;
        const pid_t ended = waitpid(-1, &status, 0);
        if (ended == workload) {
            _exit(code_of(status));
        }
        if (ended < 0 && errno != EINTR) {
            _exit(126);
        }
    }
}

/* ---- the shim, outside ---- */

static int exit_fd = -1;
static pid_t inner; /* init, or the workload where there are no namespaces */
static int workload_pidfd = -1;

static void end_container(void)
{
    if (spec.root != NULL) {
        (void)kill(inner, SIGKILL);
    } else {
        (void)kill(-inner, SIGKILL);
        (void)kill(inner, SIGKILL);
    }
}

/* Without a pid namespace only this process reaps the orphans of the workload. */
static void end_orphans(void)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    for (int round = 0; round < 100; round++) {
        FILE *list = fopen(path, "re");
        int child = 0;
        bool any = false;
        while (list != NULL && fscanf(list, "%d", &child) == 1) {
            any = true;
            (void)kill((pid_t)child, SIGKILL);
        }
        if (list != NULL) {
            (void)fclose(list);
        }
        if (!any) {
            return;
        }
        while (waitpid(-1, NULL, 0) > 0) {
        }
    }
}

static long long now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (long long)now.tv_sec * 1000000000LL + (long long)now.tv_nsec;
}

static void write_exit(int code)
{
    if (exit_fd >= 0) {
        (void)dprintf(exit_fd, "%d %lld\n", code, now_ns());
    }
}

/* Field 22 of /proc/self/stat; the second field may hold spaces and brackets. */
static unsigned long long own_start(void)
{
    char text[1024];
    const int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    const ssize_t got = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0) {
        (void)close(fd);
    }
    text[got > 0 ? got : 0] = '\0';
    char *at = strrchr(text, ')');
    for (int field = 2; at != NULL && field < 22; field++) {
        at = strchr(at + 1, ' ');
    }
    return at != NULL ? strtoull(at + 1, NULL, 10) : 0;
}

static void write_state(pid_t workload)
{
    char fresh[4096];
    if (spec.state_path == NULL || snprintf(fresh, sizeof fresh, "%s.new", spec.state_path) >= (int)sizeof fresh) {
        return;
    }
    const int fd = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd >= 0) {
        (void)dprintf(fd, "%d %llu %d %lld\n", (int)getpid(), own_start(), (int)workload, now_ns());
        (void)close(fd);
        (void)rename(fresh, spec.state_path);
    }
}

static void collect(void)
{
    int status = 0;
    pid_t ended = 0;
    while ((ended = waitpid(-1, &status, WNOHANG)) > 0) {
        if (ended == inner) {
            if (spec.root == NULL) {
                (void)kill(-inner, SIGKILL);
                end_orphans();
            }
            write_exit(code_of(status));
            _exit(0);
        }
    }
}

/* Reads what init or the workload says, with the workload's pid in our own numbering. */
static ssize_t receive_hello(int fd, char *text, size_t size, pid_t *sender)
{
    char control[CMSG_SPACE(sizeof(struct ucred))];
    struct iovec piece = {.iov_base = text, .iov_len = size};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t got = 0;
    do {
        got = recvmsg(fd, &message, 0);
    } while (got < 0 && errno == EINTR);
    for (struct cmsghdr *head = CMSG_FIRSTHDR(&message); head != NULL; head = CMSG_NXTHDR(&message, head)) {
        if (head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_CREDENTIALS) {
            struct ucred from;
            memcpy(&from, CMSG_DATA(head), sizeof from);
            *sender = from.pid;
        }
    }
    return got;
}

static void report_start(int fd)
{
    char text[1024];
    pid_t sender = 0;
    ssize_t got = receive_hello(fd, text, sizeof text - 1, &sender);
    if (got == 1 && text[0] == '+') {
        const long pidfd = syscall(NR_PIDFD_OPEN, sender, 0);
        workload_pidfd = (int)pidfd;
        pid_t ignored = 0;
        got = receive_hello(fd, text, sizeof text - 1, &ignored); /* ends when exec closes the other side */
        if (got <= 0) {
            write_state(sender);
            (void)dprintf(status_fd, "ok %d\n", (int)sender);
            (void)close(status_fd);
            return;
        }
    }
    text[got > 0 ? got : 0] = '\0';
    (void)dprintf(status_fd, "error %s\n", got > 0 ? text : "the container ended before its command ran");
    (void)close(status_fd);
    end_container();
}

static void watch(int signals, int owner)
{
    struct pollfd fds[2] = {{.fd = signals, .events = POLLIN}, {.fd = owner, .events = POLLIN}};
    for (;;) {
        collect();
        if (poll(fds, owner >= 0 ? 2 : 1, -1) < 0 && errno != EINTR) {
            _exit(126);
        }
        if (owner >= 0 && (fds[1].revents & POLLIN) != 0) {
            fds[1].fd = -1;
            end_container();
        }
        struct signalfd_siginfo info;
        while (read(signals, &info, sizeof info) == (ssize_t)sizeof info) {
            if (info.ssi_signo == SIGTERM && workload_pidfd >= 0) {
                (void)syscall(NR_PIDFD_SEND_SIGNAL, workload_pidfd, SIGTERM, NULL, 0);
            } else if (info.ssi_signo == SIGUSR2) {
                end_container();
            }
        }
    }
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        (void)fprintf(stderr, "usage: simrun SPEC STATUS_FD\n");
        return 2;
    }
    status_fd = (int)number(argv[2]);
    (void)fcntl(status_fd, F_SETFD, FD_CLOEXEC);
    /* Files that the starter forgot to close must not stay open in containers. */
    (void)syscall(NR_CLOSE_RANGE, (unsigned)status_fd + 1, ~0U, 0);
    parse(argv[1]);
    (void)setsid();
    (void)umask(022);

    sigset_t handled;
    (void)sigemptyset(&handled);
    (void)sigaddset(&handled, SIGTERM);
    (void)sigaddset(&handled, SIGUSR2);
    (void)sigaddset(&handled, SIGCHLD);
    (void)sigprocmask(SIG_BLOCK, &handled, NULL);
    const int signals = signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK);
    const int log = open(spec.log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (signals < 0 || log < 0 || dup2(log, 1) < 0 || dup2(log, 2) < 0) {
        fail("log %s: %s", spec.log, strerror(errno));
    }
    if (spec.exit_path != NULL) {
        exit_fd = open(spec.exit_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        if (exit_fd < 0) {
            fail("exit file %s: %s", spec.exit_path, strerror(errno));
        }
    }
    int owner = -1;
    if (spec.owner > 0) {
        owner = (int)syscall(NR_PIDFD_OPEN, spec.owner, 0);
        if (owner < 0) {
            fail("owner %d: %s", (int)spec.owner, strerror(errno));
        }
    }

    int pair[2];
    const int on = 1;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0 ||
        setsockopt(pair[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0) {
        fail("socketpair: %s", strerror(errno));
    }
    unsigned long spaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC;
    spaces |= spec.share_pids ? 0 : CLONE_NEWPID;
    spaces |= spec.maps_user ? CLONE_NEWUSER : 0;
    outer_uid = geteuid();
    outer_gid = getegid();
    if (spec.root == NULL) {
        (void)prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    }
    inner =
        (pid_t)syscall(SYS_clone, (spec.root != NULL ? spaces : 0) | (unsigned long)SIGCHLD, NULL, NULL, NULL, NULL);
    if (inner < 0) {
        fail("clone: %s", strerror(errno));
    }
    if (inner == 0) {
        /* Init does not exec: what only the shim needs must not live on in it. */
        (void)close(pair[0]);
        (void)close(status_fd);
        (void)close(signals);
        (void)close(log);
        if (exit_fd >= 0) {
            (void)close(exit_fd);
        }
        if (owner >= 0) {
            (void)close(owner);
        }
        hello = pair[1];
        if (spec.root != NULL) {
            run_init();
        }
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        run_workload();
    }
    (void)close(pair[1]);
    (void)close(0);
    (void)close(1);
    (void)close(2);
    report_start(pair[0]);
    (void)close(pair[0]);
    watch(signals, owner);
    return 0;
}
