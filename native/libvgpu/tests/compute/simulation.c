/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The compute limit against a simulated device, in virtual time: exact, repeatable and fast.
 *
 * Links the decisions themselves (budget.c, estimate.c, compute_core.c); what compute.c does with clock, driver and sleep is
 * done here by an event loop. The device has `sms` multiprocessors; a kernel holds min(blocks, sms) of them for its whole
 * duration, kernels of one stream follow each other, streams of one process overlap while multiprocessors are left,
 * and processes take turns of `slice_us` while more than one has work, so that elapsed time holds the neighbours' slices.
 *
 * Words on the command line, each `key=value`, in order; `tenant`, `process`, `thread` and `work` open what follows:
 *     sms seconds slice_us seed, late_us (waiters sleep so much too long on average), probes (0: events on a stream of our own are as late as the work),
 *     answered (permille of probes that are answered at once, at random)
 *     tenant  pct, pct2 and at_ms (limit from then on), limited (0: no limiter), page (tenants reported by the agent, 0: none), page2 and page2_ms (from then on),
 *             force (limited though alone), paced (held back for the sake of a higher priority), rival (which is on the device)
 *     process start_ms, end_ms (killed)
 *     thread  launch_ns (host time of a launch), sync (launches between two waits for the device), pause_us after it
 *     work    us (duration), us2 and chance2 (permille of launches that take us2), jitter (permille), blocks, stream, us3 and
 *             from_ms (duration from then on), count (launches in a row), graph, wave (duration counts per wave of blocks)
 * Prints one JSON document: per process and tenant the part of the device's time, per tenant the time series of 100 ms.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compute_core.h"

enum {
    TENANTS = 8,
    PROCESSES = 64,
    THREADS = 8,
    WORKS = 16,
    STREAMS = 16,
    QUEUE = 1024,
    SAMPLES = 256,
    LOOKED_AT = 8,
    PROCESSES_IN_ALL = 64,
    STEP_MS = 100,
    STEPS = 1200,
    ANSWERED_TRULY = 1001
};

#define MS UINT64_C(1000000)
#define NEVER UINT64_MAX
#define START (1000 * MS)
#define PACED_NS (20 * MS)
#define LATE_NS (100 * MS) /* beyond what was computed first */

struct sample {
    struct core_sample core;
    uint64_t start;
    uint64_t end; /* NEVER while it runs */
    uint64_t launched;
};

struct kernel {
    uint64_t left;
    uint32_t blocks;
    struct sample *sample;
    bool running;
};

struct work {
    double us, us2, us3;
    uint64_t from_ms;
    uint32_t chance2, jitter, blocks, stream, count;
    bool graph, wave;
};

struct thread {
    uint64_t wake; /* NEVER: waits for the turn, the queue or the device */
    uint64_t launch_ns, pause_us, sync, since_sync;
    struct work works[WORKS];
    uint32_t work_count, next, done;
    enum { READY, WANTS_TURN, WAITS, QUEUE_FULL, SYNCS } state;
    struct core_admission admission;
    uint64_t due, step, began, meant;
};

struct process {
    uint32_t tenant;
    uint64_t start_ms, end_ms;
    bool dead;
    struct thread threads[THREADS];
    uint32_t thread_count;
    int turn; /* thread that draws, -1 */
    struct core_device core;
    uint32_t roster_round;
    struct kernel queues[STREAMS][QUEUE];
    uint32_t head[STREAMS], length[STREAMS];
    struct sample samples[SAMPLES];
    struct sample *running[SAMPLES];
    uint32_t running_count;
    bool probe_pending, probe_answered, probe_waits;
    uint64_t probe_ns, probe_away_ns; /* when it was posted; how long it waited for its answer, 0: not at all */
    uint64_t served, launches, waited, longest_wait, late;
};

struct tenant {
    uint32_t pct, pct2, page, page2;
    uint64_t at_ms, page2_ms;
    bool limited, paced, rival, force;
    uint64_t word, roster;
    uint64_t series[STEPS];
};

static struct tenant tenants[TENANTS];
static uint32_t tenant_count;
static struct process *processes[PROCESSES_IN_ALL];
static uint32_t process_count;
static uint32_t sms = 132;
static uint64_t slice_ns = 2 * MS, seconds = 10, now = START, late_ns;
static uint64_t random_state = 88172645463325252u;
static int current = -1;
static uint64_t slice_end;
static bool probes = true;
static uint32_t answered = ANSWERED_TRULY;

static uint64_t random_number(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* Mostly about the mean, now and then ten times that. */
static uint64_t lateness(void)
{
    uint64_t most = late_ns == 0 ? 0 : random_number() % 100 == 0 ? 20 * late_ns : 2 * late_ns;
    return most == 0 ? 0 : random_number() % most;
}

static uint64_t duration_of(const struct work *work)
{
    double us = work->us3 > 0 && now >= START + work->from_ms * MS ? work->us3 : work->us;
    if (work->chance2 > 0 && random_number() % 1000 < work->chance2) us = work->us2;
    if (work->wave) us *= (double)((work->blocks + sms - 1) / sms);
    if (work->jitter > 0) us *= 1.0 + ((double)(random_number() % 2001) - 1000.0) / 1000.0 * work->jitter / 1000.0;
    uint64_t ns = (uint64_t)(us * 1000);
    return ns > 0 ? ns : 1;
}

static struct core_terms terms_of(struct process *process)
{
    struct tenant *tenant = &tenants[process->tenant];
    uint32_t pct = tenant->at_ms > 0 && now >= START + tenant->at_ms * MS ? tenant->pct2 : tenant->pct;
    uint32_t page = tenant->page2_ms > 0 && now >= START + tenant->page2_ms * MS ? tenant->page2 : tenant->page;
    struct core_terms terms = {
        .tenants = page, .launches = process->launches, .present = core_present(&process->core, now)};
    if (page == 1 && !tenant->force) pct = 100;
    terms.budget.pct = pct;
    terms.budget.siblings = core_siblings(&tenant->roster, &process->roster_round, now);
    terms.rival = tenant->rival;
    terms.budget.enforced = pct < 100 || tenant->paced;
    terms.budget.period_ns = tenant->paced ? PACED_NS : BUDGET_PERIOD_NS;
    terms.budget.burst_ns = tenant->paced ? PACED_NS : BUDGET_BURST_NS;
    terms.budget.lead_ns = pct >= 100 ? PACED_NS : 0;
    return terms;
}

static bool has_work(const struct process *process)
{
    for (uint32_t i = 0; i < STREAMS; i++)
        if (process->length[i] > 0) return true;
    return false;
}

/* Start what fits, oldest stream first. */
static void start_kernels(struct process *process)
{
    uint32_t used = 0;
    for (uint32_t i = 0; i < STREAMS; i++) {
        struct kernel *kernel = &process->queues[i][process->head[i]];
        if (process->length[i] > 0 && kernel->running) used += kernel->blocks < sms ? kernel->blocks : sms;
    }
    for (uint32_t i = 0; i < STREAMS; i++) {
        struct kernel *kernel = &process->queues[i][process->head[i]];
        uint32_t wanted = kernel->blocks < sms ? kernel->blocks : sms;
        if (process->length[i] == 0 || kernel->running || used + wanted > sms) continue;
        used += wanted;
        kernel->running = true;
        if (kernel->sample != NULL) kernel->sample->start = now;
    }
}

static void harvest(struct process *process, const struct core_terms *terms)
{
    uint32_t kept = 0;
    uint32_t unfinished = 0;
    for (uint32_t i = 0; i < process->running_count; i++) {
        struct sample *sample = process->running[i];
        if (sample->end != NEVER && unfinished < LOOKED_AT) {
            core_ended(&process->core, &sample->core, now, (int64_t)sample->start, (int64_t)sample->end, terms);
            sample->launched = 0;
            continue;
        }
        if (unfinished++ == 0) {
            if (sample->start != NEVER) core_runs(&process->core, &sample->core, now, terms);
            core_pends(&process->core, &sample->core, now);
        }
        process->running[kept++] = sample;
    }
    process->running_count = kept;
}

/* The process waits: it looks who else is there, as compute.c does. Returns when to look again. */
static uint64_t probe(struct process *process, const struct core_terms *terms)
{
    struct presence *presence = &process->core.presence;
    if (presence_wants_verdict(presence, now)) {
        core_verdict(&process->core, now, terms, process->probe_answered);
        process->probe_pending = false;
    }
    bool works = process->running_count > 0 && process->running[process->running_count - 1]->end == NEVER;
    if (presence->posted_ns == 0 && (!works || !core_may_probe(&process->core, terms))) return NEVER;
    if (presence_wants_probe(presence, now)) {
        if (process->probe_away_ns > 0) core_away(&process->core, now, terms, process->probe_away_ns);
        process->probe_away_ns = 0;
        presence_posted(presence, now);
        process->probe_answered = probes && current >= 0 && processes[current] == process;
        if (answered < ANSWERED_TRULY) process->probe_answered = random_number() % 1000 < answered;
        process->probe_pending = !process->probe_answered;
        if (process->probe_pending && !process->probe_waits) {
            process->probe_waits = true;
            process->probe_ns = now;
        }
    }
    return now + presence_rest(presence, now);
}

static struct sample *begin_sample(struct process *process, struct estimate *estimate, uint64_t cost, bool unknown,
                                   const void *stream)
{
    struct core_terms terms = terms_of(process);
    harvest(process, &terms);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        struct sample *sample = &process->samples[i];
        if (sample->launched != 0) continue;
        sample->launched = now;
        sample->start = NEVER;
        sample->end = NEVER;
        core_sampled(&process->core, &sample->core, estimate, cost, unknown, stream, now);
        process->running[process->running_count++] = sample;
        return sample;
    }
    core_missed(&process->core);
    return NULL;
}

static void enqueue(struct process *process, struct thread *thread, const struct work *work, struct sample *sample)
{
    uint32_t stream = work->stream;
    uint32_t place = (process->head[stream] + process->length[stream]) % QUEUE;
    process->queues[stream][place] =
        (struct kernel){.left = duration_of(work), .blocks = work->blocks, .sample = sample};
    process->length[stream]++;
    process->launches++;
    start_kernels(process);
    if (++thread->done >= work->count) {
        thread->done = 0;
        thread->next = (thread->next + 1) % thread->work_count;
    }
    thread->since_sync++;
    thread->state = READY;
    thread->wake = now + thread->launch_ns;
    if (thread->sync > 0 && thread->since_sync >= thread->sync) {
        thread->since_sync = 0;
        thread->state = SYNCS;
        thread->wake = NEVER;
    }
}

/* The names of functions and streams are addresses of their descriptions. */
static const void *stream_name(const struct process *process, uint32_t stream)
{
    return &process->head[stream];
}

static void pass_turn(struct process *process)
{
    uint32_t had = (uint32_t)process->turn;
    process->turn = -1;
    for (uint32_t step = 1; step <= process->thread_count; step++) {
        uint32_t next = (had + step) % process->thread_count;
        if (process->threads[next].state == WANTS_TURN) {
            process->turn = (int)next;
            process->threads[next].wake = now;
            return;
        }
    }
}

/* The thread sleeps until `due`, or until it looks again. */
static void wait_until(struct process *process, struct thread *thread, const struct core_terms *terms, uint64_t due,
                       bool asking)
{
    if (asking && terms->budget.pct == tenants[process->tenant].pct && due > thread->due + LATE_NS) process->late++;
    uint64_t longest = 500 * MS;
    if (thread->admission.unknown) {
        longest = thread->step;
        thread->step = thread->step < 20 * MS ? 2 * thread->step : thread->step;
    }
    if (!asking) thread->due = due;
    thread->state = WAITS;
    thread->wake = due - now < longest ? due : now + longest;
    uint64_t look = probe(process, terms);
    if (look < thread->wake) thread->wake = look;
    thread->meant = thread->wake;
    thread->wake += lateness();
}

/* Draw for the launch of a thread that has no credit for it. False: it waits for its turn or for device time. */
static bool admit(struct process *process, uint32_t index, struct estimate *estimate)
{
    struct thread *thread = &process->threads[index];
    struct core_device *core = &process->core;
    if (process->turn >= 0 && process->turn != (int)index) {
        thread->state = WANTS_TURN;
        thread->wake = NEVER;
        return false;
    }
    process->turn = (int)index;
    struct core_terms terms = terms_of(process);
    harvest(process, &terms);
    bool asking = thread->state == WAITS;
    if (asking) core_woke(core, now - thread->meant);
    if (asking && thread->admission.unknown && estimate->samples > 0) {
        core_withdraw(core, now, &terms, &thread->admission, estimate);
        asking = false;
    }
    if (thread->state != WAITS) {
        thread->step = MS / 2;
        thread->began = now;
    }
    if (!asking) memset(&thread->admission, 0xa5, sizeof thread->admission);
    uint64_t due = asking ? core_ask(core, now, &terms, &thread->admission)
                          : core_begin(core, now, &terms, estimate, &thread->admission);
    if (due != 0) {
        wait_until(process, thread, &terms, due, asking);
        return false;
    }
    process->waited += now - thread->began;
    if (now - thread->began > process->longest_wait) process->longest_wait = now - thread->began;
    return true;
}

static void launch(struct process *process, uint32_t index)
{
    struct thread *thread = &process->threads[index];
    const struct work *work = &thread->works[thread->next];
    if (thread->state == READY && process->length[work->stream] >= QUEUE) {
        thread->state = QUEUE_FULL;
        thread->wake = NEVER;
        return;
    }
    if (!tenants[process->tenant].limited) {
        enqueue(process, thread, work, NULL);
        return;
    }
    struct core_device *core = &process->core;
    const void *stream = stream_name(process, work->stream);
    core_note_stream(core, stream);
    uint64_t shape = estimate_shape(work->blocks, 256, work->graph);
    struct estimate *estimate = estimate_add(&core->estimates, work, shape);
    uint64_t cost = core_cost(core, estimate->charge_ns);
    bool unknown = false;
    bool opens_phase = false;
    bool marks = false;
    if (thread->state != READY || estimate->samples == 0 || !core_spend(core, cost)) {
        if (!admit(process, index, estimate)) return;
        cost = (uint64_t)thread->admission.cost_ns;
        unknown = thread->admission.unknown;
        marks = thread->admission.marks;
        opens_phase = thread->admission.waits && core_begin_phase(core, now, stream, &thread->admission);
        pass_turn(process);
    }
    bool sampled = estimate_is_sampled(&core->estimates, estimate);
    if (marks && !sampled && !unknown) {
        estimate_sample_now(&core->estimates, estimate);
        sampled = true;
    }
    struct sample *sample = NULL;
    if (unknown || sampled || opens_phase) sample = begin_sample(process, estimate, cost, unknown, stream);
    enqueue(process, thread, work, sample);
}

static void run_thread(struct process *process, uint32_t index)
{
    struct thread *thread = &process->threads[index];
    if (process->dead) {
        thread->wake = NEVER;
        return;
    }
    launch(process, index);
}

static void end_kernel(struct process *process, uint32_t stream)
{
    struct kernel *kernel = &process->queues[stream][process->head[stream]];
    if (kernel->sample != NULL) kernel->sample->end = now;
    process->head[stream] = (process->head[stream] + 1) % QUEUE;
    process->length[stream]--;
    for (uint32_t i = 0; i < process->thread_count; i++) {
        struct thread *thread = &process->threads[i];
        if (thread->state == QUEUE_FULL && thread->works[thread->next].stream == stream) {
            thread->state = READY;
            thread->wake = now;
        }
        if (thread->state == SYNCS && thread->wake == NEVER && !has_work(process)) {
            thread->state = READY;
            thread->wake = now + thread->pause_us * 1000;
            struct core_terms terms = terms_of(process);
            if (tenants[process->tenant].limited) harvest(process, &terms);
        }
    }
}

/* Choose the process that runs: the present one until its slice ends or it has no work. */
static void schedule(void)
{
    bool others = false;
    for (uint32_t i = 0; i < process_count; i++)
        if ((int)i != current && has_work(processes[i])) others = true;
    bool idle = current < 0 || !has_work(processes[current]);
    if (!idle && (now < slice_end || !others)) {
        if (now >= slice_end) slice_end = now + slice_ns;
        return;
    }
    for (uint32_t step = 1; step <= process_count; step++) {
        uint32_t next = (uint32_t)(current + (int)step) % process_count;
        if (has_work(processes[next])) {
            current = (int)next;
            slice_end = now + slice_ns;
            if (processes[next]->probe_pending) processes[next]->probe_answered = probes;
            processes[next]->probe_pending = false;
            if (processes[next]->probe_waits && probes && now > processes[next]->probe_ns + PRESENCE_VERDICT_NS)
                processes[next]->probe_away_ns = now - processes[next]->probe_ns;
            processes[next]->probe_waits = false;
            return;
        }
    }
    current = -1;
}

static uint64_t next_time(void)
{
    uint64_t next = NEVER;
    for (uint32_t i = 0; i < process_count; i++)
        for (uint32_t j = 0; j < processes[i]->thread_count; j++)
            if (processes[i]->threads[j].wake < next) next = processes[i]->threads[j].wake;
    if (current < 0) return next;
    struct process *process = processes[current];
    bool others = false;
    for (uint32_t i = 0; i < process_count; i++)
        others = others || ((int)i != current && has_work(processes[i]));
    if (others && slice_end < next) next = slice_end;
    for (uint32_t i = 0; i < STREAMS; i++) {
        struct kernel *kernel = &process->queues[i][process->head[i]];
        if (process->length[i] > 0 && kernel->running && now + kernel->left < next) next = now + kernel->left;
    }
    return next;
}

static void count_served(struct process *process, uint64_t from, uint64_t to)
{
    process->served += to - from;
    while (from < to) {
        uint64_t step = (from - START) / (STEP_MS * MS);
        uint64_t end = START + (step + 1) * STEP_MS * MS;
        end = end < to ? end : to;
        if (step < STEPS) tenants[process->tenant].series[step] += end - from;
        from = end;
    }
}

static void advance(uint64_t to)
{
    if (current >= 0) {
        struct process *process = processes[current];
        count_served(process, now, to);
        uint64_t passed = to - now;
        now = to;
        for (uint32_t i = 0; i < STREAMS; i++) {
            struct kernel *kernel = &process->queues[i][process->head[i]];
            if (process->length[i] == 0 || !kernel->running) continue;
            kernel->left -= passed;
            if (kernel->left == 0) end_kernel(process, i);
        }
        start_kernels(process);
    }
    now = to;
    for (uint32_t i = 0; i < process_count; i++) {
        if (now >= START + processes[i]->end_ms * MS && !processes[i]->dead) {
            processes[i]->dead = true;
            memset(processes[i]->length, 0, sizeof processes[i]->length);
        }
        for (uint32_t j = 0; j < processes[i]->thread_count; j++)
            while (processes[i]->threads[j].wake <= now)
                run_thread(processes[i], j);
    }
    schedule();
}

static struct work *last_work(void)
{
    if (process_count == 0 || processes[process_count - 1]->thread_count == 0) return NULL;
    struct thread *thread = &processes[process_count - 1]->threads[processes[process_count - 1]->thread_count - 1];
    return thread->work_count > 0 ? &thread->works[thread->work_count - 1] : NULL;
}

static bool open_block(const char *word)
{
    struct process *process = process_count > 0 ? processes[process_count - 1] : NULL;
    if (strcmp(word, "tenant") == 0) {
        tenants[tenant_count++] = (struct tenant){.pct = 100, .limited = true};
        return tenant_count < TENANTS;
    }
    if (strcmp(word, "process") == 0 && tenant_count > 0 && process_count < PROCESSES_IN_ALL) {
        process = calloc(1, sizeof *process);
        if (process == NULL) return false;
        processes[process_count++] = process;
        process->tenant = tenant_count - 1;
        process->turn = -1;
        process->end_ms = NEVER / MS / 2;
        core_init(&process->core, &tenants[process->tenant].word);
        process->core.estimates.random = (uint32_t)random_number();
        return true;
    }
    if (strcmp(word, "thread") == 0 && process != NULL && process->thread_count < THREADS) {
        process->threads[process->thread_count++] = (struct thread){.launch_ns = 5000};
        return true;
    }
    if (strcmp(word, "work") == 0 && process != NULL && process->thread_count > 0) {
        struct thread *thread = &process->threads[process->thread_count - 1];
        if (thread->work_count == WORKS) return false;
        thread->works[thread->work_count++] = (struct work){.us = 100, .blocks = 1000, .count = 1};
        return true;
    }
    return false;
}

static bool set_value(const char *word)
{
    const char *equals = strchr(word, '=');
    if (equals == NULL) return open_block(word);
    size_t length = (size_t)(equals - word);
    double value = strtod(equals + 1, NULL);
    uint64_t whole = (uint64_t)value;
    uint32_t small = (uint32_t)value;
    struct tenant *tenant = tenant_count > 0 ? &tenants[tenant_count - 1] : NULL;
    struct process *process = process_count > 0 ? processes[process_count - 1] : NULL;
    struct thread *thread =
        process != NULL && process->thread_count > 0 ? &process->threads[process->thread_count - 1] : NULL;
    struct work *work = last_work();
#define KEY(owner, name, target, from)                                                                                 \
    if ((owner) != NULL && strlen(name) == length && strncmp(word, name, length) == 0) {                               \
        (target) = (from);                                                                                             \
        return true;                                                                                                   \
    }
    KEY(word, "sms", sms, small)
    KEY(word, "seconds", seconds, whole)
    KEY(word, "late_us", late_ns, whole * 1000)
    KEY(word, "probes", probes, whole != 0)
    KEY(word, "answered", answered, small)
    KEY(word, "slice_us", slice_ns, whole * 1000)
    KEY(word, "seed", random_state, random_state + whole * UINT64_C(0x9e3779b97f4a7c15))
    KEY(tenant, "pct", tenant->pct, small)
    KEY(tenant, "pct2", tenant->pct2, small)
    KEY(tenant, "at_ms", tenant->at_ms, whole)
    KEY(tenant, "page", tenant->page, small)
    KEY(tenant, "page2", tenant->page2, small)
    KEY(tenant, "page2_ms", tenant->page2_ms, whole)
    KEY(tenant, "limited", tenant->limited, whole != 0)
    KEY(tenant, "force", tenant->force, whole != 0)
    KEY(tenant, "paced", tenant->paced, whole != 0)
    KEY(tenant, "rival", tenant->rival, whole != 0)
    KEY(process, "start_ms", process->start_ms, whole)
    KEY(process, "end_ms", process->end_ms, whole)
    KEY(thread, "launch_ns", thread->launch_ns, whole)
    KEY(thread, "sync", thread->sync, whole)
    KEY(thread, "pause_us", thread->pause_us, whole)
    KEY(work, "us", work->us, value)
    KEY(work, "us2", work->us2, value)
    KEY(work, "us3", work->us3, value)
    KEY(work, "chance2", work->chance2, small)
    KEY(work, "jitter", work->jitter, small)
    KEY(work, "blocks", work->blocks, small)
    KEY(work, "stream", work->stream, small)
    KEY(work, "count", work->count, small)
    KEY(work, "from_ms", work->from_ms, whole)
    KEY(work, "graph", work->graph, whole != 0)
    KEY(work, "wave", work->wave, whole != 0)
#undef KEY
    return false;
}

static void report(void)
{
    double span = (double)seconds * 1e9;
    printf("{\"processes\": [");
    for (uint32_t i = 0; i < process_count; i++) {
        const struct process *process = processes[i];
        printf("%s{\"tenant\": %" PRIu32 ", \"pct\": %.3f, \"launches\": %" PRIu64 ", \"longest_wait_ms\": %.3f, "
               "\"late\": %" PRIu64 ", \"overlap\": %" PRIu32
               ", \"implausible\": %s, \"slice_us\": %.1f, \"charges_us\": [",
               i > 0 ? ", " : "", process->tenant, 100.0 * (double)process->served / span, process->launches,
               (double)process->longest_wait / 1e6, process->late, process->core.overlap,
               process->core.presence.implausible ? "true" : "false",
               (double)presence_slice(&process->core.presence) / 1e3);
        const char *comma = "";
        for (uint32_t j = 0; j < process->thread_count; j++)
            for (uint32_t k = 0; k < process->threads[j].work_count; k++) {
                const struct work *work = &process->threads[j].works[k];
                uint64_t shape = estimate_shape(work->blocks, 256, work->graph);
                const struct estimate *estimate = estimate_find(&process->core.estimates, work, shape);
                printf("%s%.1f", comma, estimate != NULL ? (double)estimate->charge_ns / 1e3 : 0.0);
                comma = ", ";
            }
        printf("]}");
    }
    printf("], \"tenants\": [");
    for (uint32_t i = 0; i < tenant_count; i++) {
        uint64_t sum = 0;
        for (uint32_t j = 0; j < seconds * 1000 / STEP_MS; j++)
            sum += tenants[i].series[j];
        printf("%s{\"pct\": %.3f, \"series\": [", i > 0 ? ", " : "", 100.0 * (double)sum / span);
        for (uint32_t j = 0; j < seconds * 1000 / STEP_MS; j++)
            printf("%s%.1f", j > 0 ? ", " : "", 100.0 * (double)tenants[i].series[j] / (STEP_MS * 1e6));
        printf("]}");
    }
    printf("]}\n");
}

int main(int count, char **words)
{
    for (int i = 1; i < count; i++)
        if (!set_value(words[i])) {
            fprintf(stderr, "%s: not understood here\n", words[i]);
            return 2;
        }
    if (process_count == 0 || seconds * 1000 / STEP_MS > STEPS) return 2;
    for (uint32_t i = 0; i < process_count; i++)
        for (uint32_t j = 0; j < processes[i]->thread_count; j++)
            processes[i]->threads[j].wake = START + processes[i]->start_ms * MS + j;
    uint64_t end = START + seconds * 1000 * MS;
    for (uint64_t next = next_time(); next < end; next = next_time())
        advance(next > now ? next : now);
    if (current >= 0) count_served(processes[current], now, end);
    report();
    return 0;
}
