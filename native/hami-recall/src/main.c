/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hami-recall: makes the driver's checkpoint calls for the agent (docs/adr/0026-recall.md).
 *
 *     hami-recall [LIBCUDA]     descriptor 3: a SOCK_SEQPACKET socket, one request (request.h) or answer a packet
 *
 * Requests for one process are executed in their order, those for different processes at the same time, each in a worker
 * (worker.h). A worker that passes its deadline is killed and replaced. The program ends when the socket is closed;
 * calls under way are finished by their workers. It knows no containers, keeps no state of processes, and decides nothing.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "request.h"
#include "worker.h"

enum { AGENT = 3, WORKERS = 8, DYING = 64, WAITING = 256, FOREVER = -1 };

#define MS_PER_S UINT64_C(1000)
#define NS_PER_MS 1000000

struct worker {
    pid_t pid; /* 0: none */
    int socket;
    bool busy;
    struct request request;
    uint64_t deadline_ms; /* of CLOCK_MONOTONIC */
};

static struct worker workers[WORKERS];
static pid_t dying[DYING]; /* killed, not yet ended: a process in the driver ends when the driver lets it */
static bool keeps_spare = true;
static struct request waiting[WAITING]; /* in the order of their arrival */
static size_t waiting_count;
static const char *driver = "libcuda.so.1";

static uint64_t now_ms(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * MS_PER_S + (uint64_t)now.tv_nsec / NS_PER_MS;
}

static void answer(const struct request *request, const char *text)
{
    char packet[REQUEST_ID + WORKER_ANSWER];
    (void)snprintf(packet, sizeof packet, "%s %s", request->id, text);
    (void)send(AGENT, packet, strlen(packet), MSG_NOSIGNAL);
}

/* The child keeps no end of another socket, so that each worker sees the end of this process. */
static void start(struct worker *worker)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return;
    pid_t pid = fork();
    if (pid == 0) {
        (void)close(AGENT);
        (void)close(ends[0]);
        for (size_t i = 0; i < WORKERS; i++)
            if (workers[i].pid) (void)close(workers[i].socket);
        worker_run(ends[1], driver);
    }
    (void)close(ends[1]);
    if (pid < 0) {
        (void)close(ends[0]);
        return;
    }
    *worker = (struct worker){.pid = pid, .socket = ends[0]};
}

static void reap(void)
{
    for (size_t i = 0; i < DYING; i++)
        if (dying[i] && waitpid(dying[i], NULL, WNOHANG) != 0) dying[i] = 0;
}

static void drop(struct worker *worker)
{
    size_t at = 0;
    (void)kill(worker->pid, SIGKILL); /* not reaped yet: the number is its own */
    (void)close(worker->socket);
    while (at < DYING && dying[at])
        at++;
    if (at < DYING) dying[at] = worker->pid;
    *worker = (struct worker){0};
}

static struct worker *idle_worker(void)
{
    struct worker *none = NULL;
    for (size_t i = 0; i < WORKERS; i++) {
        if (workers[i].pid && !workers[i].busy) return &workers[i];
        if (!workers[i].pid) none = &workers[i];
    }
    if (none) start(none);
    return none && none->pid ? none : NULL;
}

static bool is_under_way(int pid)
{
    bool found = false;
    for (size_t i = 0; i < WORKERS; i++)
        found |= workers[i].busy && workers[i].request.pid == pid;
    return found;
}

static bool is_first_of_its_process(size_t at)
{
    for (size_t i = 0; i < at; i++)
        if (waiting[i].pid == waiting[at].pid) return false;
    return !is_under_way(waiting[at].pid);
}

static void dispatch(void)
{
    for (size_t at = 0; at < waiting_count;) {
        struct worker *worker = is_first_of_its_process(at) ? idle_worker() : NULL;
        if (!worker) {
            at++;
            continue;
        }
        worker->request = waiting[at];
        if (send(worker->socket, &worker->request, sizeof worker->request, MSG_NOSIGNAL) < 0) {
            drop(worker); /* it has died since; the next one is tried */
            continue;
        }
        worker->busy = true;
        worker->deadline_ms = now_ms() + worker->request.deadline_ms;
        memmove(&waiting[at], &waiting[at + 1], (--waiting_count - at) * sizeof *waiting);
    }
    if (keeps_spare) (void)idle_worker(); /* the next request need not wait until the driver is initialized */
}

/* false: the agent has closed the socket. */
static bool receive(void)
{
    char text[REQUEST_TEXT];
    struct request request;
    ssize_t length = recv(AGENT, text, sizeof text - 1, MSG_TRUNC);
    if (length < 0) return errno == EINTR || errno == EAGAIN;
    if (length == 0) return false;
    bool is_whole = length < (ssize_t)sizeof text;
    text[is_whole ? (size_t)length : sizeof text - 1] = '\0';
    keeps_spare = true;
    if (request_parse(text, &request) && is_whole)
        waiting[waiting_count++] = request;
    else
        answer(&request, "error 1 CUDA_ERROR_INVALID_VALUE");
    return true;
}

static void finish(struct worker *worker)
{
    char text[WORKER_ANSWER];
    ssize_t length = recv(worker->socket, text, sizeof text, MSG_DONTWAIT);
    if (length < 0 && (errno == EAGAIN || errno == EINTR)) return;
    bool has_died = length <= 0;
    if (worker->busy)
        answer(&worker->request, has_died ? "error 999 CUDA_ERROR_UNKNOWN" : text);
    else if (has_died)
        keeps_spare = false; /* the driver ends it: not again before there is a request */
    worker->busy = false;
    if (has_died) drop(worker);
}

static void give_up(uint64_t now)
{
    for (size_t i = 0; i < WORKERS; i++) {
        if (!workers[i].busy || now < workers[i].deadline_ms) continue;
        answer(&workers[i].request, "error deadline");
        drop(&workers[i]);
    }
}

/* Until the next deadline. */
static int patience(uint64_t now)
{
    uint64_t next = UINT64_MAX;
    for (size_t i = 0; i < WORKERS; i++)
        if (workers[i].busy && workers[i].deadline_ms < next) next = workers[i].deadline_ms;
    if (next == UINT64_MAX) return FOREVER;
    return next <= now ? 0 : next - now < INT32_MAX ? (int)(next - now) : INT32_MAX;
}

int main(int count, char **arguments)
{
    int type = 0;
    socklen_t size = sizeof type;
    if (getsockopt(AGENT, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_SEQPACKET) {
        (void)fprintf(stderr, "hami-recall: descriptor 3 is not a SOCK_SEQPACKET socket; the node agent starts this\n");
        return 2;
    }
    if (count > 1) driver = arguments[1];
    (void)signal(SIGCHLD, SIG_DFL); /* ended children stay until they are reaped */
    for (;;) {
        struct pollfd polled[WORKERS + 1] = {{.fd = waiting_count < WAITING ? AGENT : -1, .events = POLLIN}};
        reap();
        dispatch();
        for (size_t i = 0; i < WORKERS; i++)
            polled[i + 1] = (struct pollfd){.fd = workers[i].pid ? workers[i].socket : -1, .events = POLLIN};
        if (poll(polled, WORKERS + 1, patience(now_ms())) < 0 && errno != EINTR) return 1;
        for (size_t i = 0; i < WORKERS; i++)
            if (polled[i + 1].revents) finish(&workers[i]);
        if (polled[0].revents && !receive()) return 0;
        give_up(now_ms());
    }
}
