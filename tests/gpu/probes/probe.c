/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loops of the checks that Python is too slow for. Loaded by ctypes into a tenant's process; the functions of the
 * driver come from the caller (dlsym there), so nothing is linked and no CUDA header is needed.
 *
 * Each function returns the first CUresult that is not success. Times are CLOCK_MONOTONIC nanoseconds.
 */
#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum { AHEAD_MAX = 1024, BLOCK = 128, GAPS_MAX = 16384, INVALID_VALUE = 1, NOT_READY = 600, VERDICT_NS = 50000, LATE_NS = 400000 };

typedef void *handle;

struct probe_driver {
    int (*launch)(handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, handle stream, void **parameters, void **extra);
    int (*graph_launch)(handle graph, handle stream);
    int (*event_create)(handle *event, unsigned flags);
    int (*event_destroy)(handle event);
    int (*event_record)(handle event, handle stream);
    int (*event_synchronize)(handle event);
    int (*event_query)(handle event);
    int (*stream_synchronize)(handle stream);
    int (*event_elapsed)(float *ms, handle begin, handle end);
};

/* The launch: `function` with one parameter, or `graph` if it is not NULL; `stream_b` takes every second launch. */
struct probe_work {
    handle function;
    handle graph;
    handle stream;
    handle stream_b;
    uint64_t parameter;
    uint32_t grid;
    uint32_t ahead; /* launches that may be unfinished */
};

int probe_steps(const struct probe_driver *cu, const struct probe_work *work, uint64_t until_ns, uint64_t *done_ns,
                size_t room, size_t *count);
int probe_cost(const struct probe_driver *cu, const struct probe_work *work, uint64_t launches, uint64_t *ns);
int probe_gaps(const struct probe_driver *cu, const struct probe_work *work, size_t launches, float *ms);
int probe_presence(const struct probe_driver *cu, const struct probe_work *work, handle side, uint64_t until_ns,
                   uint64_t spacing_ns, uint64_t *posted, uint64_t *answered);

static uint64_t now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static int launch(const struct probe_driver *cu, const struct probe_work *work, handle stream)
{
    uint64_t parameter = work->parameter;
    void *parameters[] = {&parameter};
    if (work->graph != NULL) return cu->graph_launch(work->graph, stream);
    return cu->launch(work->function, work->grid, 1, 1, BLOCK, 1, 1, 0, stream, parameters, NULL);
}

/* Launch until `until_ns`; when each launch was seen to be complete, in order. At most `room` launches. */
int probe_steps(const struct probe_driver *cu, const struct probe_work *work, uint64_t until_ns, uint64_t *done_ns,
                size_t room, size_t *count)
{
    handle events[AHEAD_MAX] = {NULL};
    size_t ahead = work->ahead < 1 ? 1 : work->ahead > AHEAD_MAX ? AHEAD_MAX : work->ahead;
    size_t launched = 0;
    size_t done = 0;
    int result = 0;
    for (size_t i = 0; i < ahead && result == 0; i++)
        result = cu->event_create(&events[i], 0);
    while (result == 0) {
        int more = launched < room && now_ns() < until_ns;
        if (!more && done == launched) break;
        if (!more || launched - done == ahead) {
            result = cu->event_synchronize(events[done % ahead]);
            done_ns[done++] = now_ns();
            continue;
        }
        handle stream = work->stream_b != NULL && launched % 2 == 1 ? work->stream_b : work->stream;
        result = launch(cu, work, stream);
        if (result == 0) result = cu->event_record(events[launched % ahead], stream);
        launched++;
    }
    for (size_t i = 0; i < ahead && events[i] != NULL; i++)
        (void)cu->event_destroy(events[i]);
    *count = done;
    return result;
}

/* Time of the calling thread for so many launches, without the wait at the end. */
int probe_cost(const struct probe_driver *cu, const struct probe_work *work, uint64_t launches, uint64_t *ns)
{
    int result = cu->stream_synchronize(work->stream);
    uint64_t begin = now_ns();
    for (uint64_t i = 0; i < launches && result == 0; i++)
        result = launch(cu, work, work->stream);
    *ns = now_ns() - begin;
    return result != 0 ? result : cu->stream_synchronize(work->stream);
}

/* Device time between the ends of consecutive launches, milliseconds; at most GAPS_MAX launches. */
int probe_gaps(const struct probe_driver *cu, const struct probe_work *work, size_t launches, float *ms)
{
    static handle events[GAPS_MAX + 1];
    int result = launches <= GAPS_MAX ? 0 : INVALID_VALUE;
    size_t made = 0;
    for (; made <= launches && result == 0; made++)
        result = cu->event_create(&events[made], 0);
    if (result == 0) result = cu->event_record(events[0], work->stream);
    for (size_t i = 1; i <= launches && result == 0; i++) {
        result = launch(cu, work, work->stream);
        if (result == 0) result = cu->event_record(events[i], work->stream);
    }
    if (result == 0) result = cu->stream_synchronize(work->stream);
    for (size_t i = 1; i <= launches && result == 0; i++)
        result = cu->event_elapsed(&ms[i - 1], events[i - 1], events[i]);
    for (size_t i = 0; i < made; i++)
        (void)cu->event_destroy(events[i]);
    return result;
}

/*
 * Keep the device busy and now and then record an event on the otherwise idle stream `side`: how many were posted, and
 * how many were complete 50 us later. Answers that were looked at too late are not counted.
 */
int probe_presence(const struct probe_driver *cu, const struct probe_work *work, handle side, uint64_t until_ns,
                   uint64_t spacing_ns, uint64_t *posted, uint64_t *answered)
{
    enum { KEPT = 8 };
    handle events[KEPT] = {NULL};
    handle asked = NULL;
    size_t launched = 0;
    uint64_t next_ns = now_ns() + spacing_ns;
    uint64_t chance = next_ns;
    int result = cu->event_create(&asked, 0);
    *posted = *answered = 0;
    for (size_t i = 0; i < KEPT && result == 0; i++)
        result = cu->event_create(&events[i], 0);
    while (result == 0 && now_ns() < until_ns) {
        if (launched >= KEPT && cu->event_query(events[launched % KEPT]) == 0) {
            result = launch(cu, work, work->stream);
            if (result == 0) result = cu->event_record(events[launched++ % KEPT], work->stream);
        } else if (launched < KEPT) {
            result = launch(cu, work, work->stream);
            if (result == 0) result = cu->event_record(events[launched++ % KEPT], work->stream);
        }
        uint64_t at = now_ns();
        if (result != 0 || at < next_ns) continue;
        result = cu->event_record(asked, side);
        uint64_t begin = now_ns();
        while (now_ns() < begin + VERDICT_NS)
            ;
        int answer = cu->event_query(asked);
        if (now_ns() - at < LATE_NS && (answer == 0 || answer == NOT_READY)) {
            *posted += 1;
            *answered += answer == 0;
        }
        (void)cu->event_synchronize(asked);
        /* Irregular, so that the probes keep no step with the slices. */
        chance = chance * UINT64_C(6364136223846793005) + 1442695040888963407U;
        next_ns = now_ns() + spacing_ns / 2 + (chance >> 33U) % (3 * spacing_ns);
    }
    if (result == 0) result = cu->stream_synchronize(work->stream);
    for (size_t i = 0; i < KEPT && events[i] != NULL; i++)
        (void)cu->event_destroy(events[i]);
    return result;
}
