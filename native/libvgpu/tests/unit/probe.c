/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process that accounts and executes commands, one per line of standard input; one line of answer to each.
 *
 * Its limits are in ./etc/hami/limits and its region in ./run/hami, relative to where it was started (built with
 * VGPU_ROOT "."). Unknown words answer "?". Numbers are decimal, bytes.
 */
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "account.h"
#include "limits.h"
#include "platform.h"
#include "process.h"
#include "check.h"

static char **arguments;

static void say(long long number)
{
    printf("%lld\n", number);
    fflush(stdout);
}

static void say_text(const char *text)
{
    printf("%s\n", text);
    fflush(stdout);
}

static void obey(char *line);

/* The rest of the line, in a child: its commands are separated by ';'. */
static void in_child(char *line, bool raw)
{
    fflush(stdout);
    pid_t child = raw ? (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL) : fork();
    if (child == 0) {
        char *place = NULL;
        for (char *part = strtok_r(line, ";", &place); part; part = strtok_r(NULL, ";", &place))
            obey(part + (*part == ' '));
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    say(status);
}

static void *end_main(void *unused)
{
    (void)unused;
    char line[1024];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = '\0';
        obey(line);
    }
    _exit(0);
}

static void parse_file(const char *path)
{
    static struct limits limits;
    struct limits_stamp stamp;
    char problem[256] = "";
    switch (limits_read(path, &limits, &stamp, problem, sizeof problem)) {
    case LIMITS_ABSENT:
        say_text("absent");
        return;
    case LIMITS_BROKEN:
        printf("broken %s\n", problem);
        break;
    case LIMITS_READ:
        printf("priority=%u policy=%u", limits.priority, limits.core_policy);
        for (uint32_t i = 0; i < limits.device_count; i++)
            printf(" %s:%llu:%u", limits.uuid[i], (unsigned long long)limits.memory_bytes[i], limits.core_pct[i]);
        printf("\n");
        break;
    }
    fflush(stdout);
}

/* Each of these executes one group of commands; false: the word is none of them. */
static bool obey_limits(const char *word, const char *text, int device)
{
    if (!strcmp(word, "attach"))
        account_attach(), say(0);
    else if (!strcmp(word, "detach"))
        account_detach(), say(0);
    else if (!strcmp(word, "count"))
        say(account_device_count());
    else if (!strcmp(word, "by_ordinal"))
        say(account_by_ordinal());
    else if (!strcmp(word, "find"))
        say(account_device_of_uuid(text));
    else if (!strcmp(word, "ordinal"))
        say(account_device_of_ordinal(device));
    else if (!strcmp(word, "uuid"))
        say_text(account_uuid(device));
    else if (!strcmp(word, "limit"))
        say((long long)account_limit(device));
    else if (!strcmp(word, "bound"))
        say((long long)account_bound(device));
    else if (!strcmp(word, "alone"))
        say(account_core_limit_pct(device));
    else if (!strcmp(word, "core"))
        say(account_core_pct(device));
    else if (!strcmp(word, "priority"))
        say(account_priority());
    else if (!strcmp(word, "policy"))
        say(account_core_policy());
    else
        return false;
    return true;
}

static bool obey_account(const char *word, int device, unsigned long long bytes)
{
    if (!strcmp(word, "charge"))
        say(account_charge(device, bytes));
    else if (!strcmp(word, "anyway"))
        account_charge_anyway(device, bytes), say(1);
    else if (!strcmp(word, "refund"))
        account_refund(device, bytes), say(1);
    else if (!strcmp(word, "used"))
        say((long long)account_used(device));
    else if (!strcmp(word, "own"))
        say((long long)account_own_used(device));
    else if (!strcmp(word, "over"))
        say(account_is_over(device));
    else if (!strcmp(word, "since"))
        say((long long)account_region_device(device)->over_since_ns);
    else if (!strcmp(word, "context"))
        account_note_context(device, (int64_t)bytes), say(0);
    else if (!strcmp(word, "processes"))
        say(account_processes());
    else if (!strcmp(word, "errors"))
        say((long long)account_errors());
    else
        return false;
    return true;
}

static bool obey_process(const char *word, char *text)
{
    if (!strcmp(word, "incarnation"))
        say(account_incarnation());
    else if (!strcmp(word, "pid"))
        say(getpid());
    else if (!strcmp(word, "child"))
        in_child(text, false);
    else if (!strcmp(word, "clone"))
        in_child(text, true);
    else if (!strcmp(word, "exec"))
        execv("/proc/self/exe", arguments);
    else if (!strcmp(word, "exec_other"))
        execl("/bin/cat", "cat", (char *)NULL);
    else if (!strcmp(word, "read"))
        parse_file(text);
    else if (!strcmp(word, "main_ends")) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, end_main, NULL) == 0);
        say(0);
        pthread_exit(NULL);
    } else
        return false;
    return true;
}

static bool obey_parser(const char *word, const char *text)
{
    if (!strcmp(word, "bytes")) {
        uint64_t value = 0;
        say(limits_parse_bytes(text, &value) ? (long long)value : -1);
    } else if (!strcmp(word, "stat")) {
        struct process_stat stat;
        if (process_parse_stat(text, &stat))
            printf("%c %llu %llu\n", stat.state, (unsigned long long)stat.threads,
                   (unsigned long long)stat.start_ticks);
        else
            printf("no\n");
        fflush(stdout);
    } else
        return false;
    return true;
}

static void obey(char *line)
{
    char word[32] = "";
    char text[512] = "";
    int device = 0;
    unsigned long long bytes = 0;
    sscanf(line, "%31s %d %llu", word, &device, &bytes);
    sscanf(line, "%*s %511[^\n]", text);
    if (!obey_limits(word, text, device) && !obey_account(word, device, bytes) && !obey_process(word, text) &&
        !obey_parser(word, text))
        say_text("?");
}

int main(int argc, char **argv)
{
    (void)argc;
    arguments = argv;
    setvbuf(stdin, NULL, _IONBF, 0); /* what follows "exec" is for the next program */
    end_main(NULL);
    return 0;
}
