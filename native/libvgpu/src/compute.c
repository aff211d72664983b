/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The compute limit on the driver, the clock and the region; what is decided, compute_core.c decides.
 *
 * A launch costs a look-up and a subtraction in memory of its thread as long as there is device time in hand. When
 * it has not, it draws a quantum and sleeps until that may be spent; one thread of the process does so at a time.
 * Sampled launches stand between two events, which later launches ask about; nothing ever waits for the device.
 * Locks taken here, per device, private to the process, in this order: `turn` (held while sleeping), `events` (held while the
 * driver is asked about samples and probes; a launch that finds it held does not ask), `lock` (short, never over a call of
 * the driver). They are words that a forked child does not inherit: it starts with fresh ones.
 * Called with hooks active: yes; the driver is called through struct compute_driver only.
 */
#include "compute.h"

#include <stdlib.h>
#include <string.h>

#include "account.h"
#include "account_fast.h"
#include "bell.h"
#include "compute_core.h"
#include "platform.h"
#include "priority.h"

enum {
    SAMPLES_MAX = 256,
    LOOKED_AT_MAX = 8,      /* unfinished samples asked about in one go, */
    ASKED_AT_ONCE = 16,     /* and samples taken from the list */
    CAPTURE_CHECKED = 4096, /* launches that are checked for capture after one was seen */
    INSTANT_PART = 8,
    PAGE_LOOKED_FOR = 256, /* launches */
    RECENT = 8,            /* a power of two */
    HAND_LAUNCHES = 32,
    CAPTURE_MODE_RELAXED = 2, /* CU_STREAM_CAPTURE_MODE_RELAXED */
    NON_BLOCKING = 1          /* CU_STREAM_NON_BLOCKING */
};

#define RECHECK_NS (500 * BUDGET_NS_PER_MS)            /* a waiter looks at its limit at least so often */
#define RECHECK_UNKNOWN_NS (BUDGET_NS_PER_MS / 2)      /* and, doubling, for the duration of an unknown function, */
#define RECHECK_UNKNOWN_MAX_NS (20 * BUDGET_NS_PER_MS) /* at least so often */
#define HAND_NS (BUDGET_NS_PER_MS / 25)                /* at most so much in a thread's hand, or one launch */
#define RECHECK_PRIORITY_NS (50 * BUDGET_NS_PER_MS)    /* and for the page */
/* Under a higher priority's eye a process queues no more than this ahead of the device. */
#define PACED_NS (20 * BUDGET_NS_PER_MS)
/* The guard against starvation: a process that a higher priority has blocked for so long passes parts of so much device
   time, as seldom as the page's min_share_ppm says. */
#define STARVED_AFTER_NS (1000 * BUDGET_NS_PER_MS)
#define STARVED_PART_NS (2 * BUDGET_NS_PER_MS)
#define PPM UINT64_C(1000000)

struct sample {
    struct core_sample core;
    struct sample *next;
    CUcontext context; /* whose events these are; NULL: none made */
    CUevent start;
    CUevent end;
    uint64_t idle_since_ns; /* 0, or the stream had nothing to do when `start` was recorded */
    uint64_t gap_ns;        /* then: how long it took until the launch was made */
    bool instant;           /* and the work had ended before the host could record `end` behind it */
    bool failed;
};

/* One device of this process image; never freed, abandoned in a forked child. */
struct state {
    struct core_device core;
    struct region_device *line;
    struct region_slot *slot;
    const struct priority_device *page;
    uint32_t level;
    int device;
    int32_t capture_checks;
    uint32_t turn;
    uint32_t events;
    uint32_t lock;
    /* Under turn. */
    uint64_t blocked_since_ns; /* by a higher priority; 0: not blocked */
    uint64_t granted_ns;       /* device time that the guard against starvation still grants */
    /* Changed under events, too: only the holder takes samples from `running` or changes what is about probes. */
    CUcontext probe_context; /* whose stream and events these are; NULL: none made */
    CUstream probe_stream;
    CUevent probe;
    CUevent answered;     /* a probe that was answered at once: the zero of the device's clock, */
    uint64_t answered_ns; /* and when it was posted; 0: none yet */
    CUevent away;         /* one that was not, */
    uint64_t away_ns;     /* and when it was posted; 0: none is awaited */
    bool no_probes;       /* they could not be made */
    /* Under lock. */
    struct sample *running; /* oldest first */
    struct sample *running_last;
    struct sample *free;
    struct sample *base; /* its start is the zero of the present phase */
    bool base_ended;
    uint64_t told_ns; /* of core.charged_ns, to the region */
    uint32_t roster_round;
    struct sample samples[SAMPLES_MAX];
};

/* Device time and estimates of the last functions that a thread keeps for the device it launched on last, so that a launch
   writes no memory that other threads read. Lost with the thread. */
struct hand {
    struct state *state;
    uint64_t credit_ns;
    struct recent {
        const void *function;
        uint64_t blocks;
        uint32_t threads;
        uint32_t generation;
        struct estimate *estimate;
    } recent[RECENT];
};

static _Thread_local struct hand the_hand;

static struct compute_driver the_driver;
static bool has_driver;
static struct state *states[REGION_DEVICES_MAX];
static uint32_t states_incarnation;
static uint32_t states_lock; /* incarnation << 2 | lock state, so that a child is not held up by its parent's threads */

static void acquire(uint32_t *word, uint32_t free_value)
{
    uint32_t seen = free_value;
    if (__atomic_compare_exchange_n(word, &seen, free_value | 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return;
    while ((seen = __atomic_exchange_n(word, free_value | 2, __ATOMIC_ACQUIRE)) != free_value)
        platform_futex_wait(word, free_value | 2, RECHECK_NS);
}

static bool try_acquire(uint32_t *word)
{
    uint32_t seen = 0;
    return __atomic_compare_exchange_n(word, &seen, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static void release(uint32_t *word, uint32_t free_value)
{
    if (__atomic_exchange_n(word, free_value, __ATOMIC_RELEASE) == (free_value | 2)) platform_futex_wake(word);
}

void compute_use_driver(const struct compute_driver *driver)
{
    bool complete = driver->context_current != NULL && driver->event_create != NULL && driver->event_destroy != NULL &&
                    driver->event_record != NULL && driver->event_query != NULL && driver->event_elapsed != NULL &&
                    driver->stream_is_capturing != NULL;
    if (!complete) platform_say(PLATFORM_ERROR, "the driver lacks event functions: the compute limit cannot be kept");
    the_driver = *driver;
    __atomic_store_n(&has_driver, complete, __ATOMIC_RELEASE);
}

static struct state *make_state(int device)
{
    struct state *state = aligned_alloc(64, (sizeof *state + 63) / 64 * 64);
    struct region_device *line = account_region_device(device);
    if (state == NULL || line == NULL) {
        free(state);
        return NULL;
    }
    memset(state, 0, sizeof *state);
    core_init(&state->core, &line->paid_until_ns);
    state->line = line;
    state->slot = account_own_slot();
    state->device = device;
    state->level = account_priority();
    state->page = priority_device(priority_page(), account_uuid(device));
    for (size_t i = 0; i < SAMPLES_MAX; i++) {
        state->samples[i].next = state->free;
        state->free = &state->samples[i];
    }
    return state;
}

static struct state *first_state(int device)
{
    if (device < 0 || device >= (int)REGION_DEVICES_MAX || !__atomic_load_n(&has_driver, __ATOMIC_ACQUIRE)) return NULL;
    account_attach();
    uint32_t incarnation = account_incarnation();
    uint32_t held = __atomic_load_n(&states_lock, __ATOMIC_RELAXED);
    if (held >> 2 != incarnation) /* the parent's: only the one thread that forked is here */
        __atomic_compare_exchange_n(&states_lock, &held, incarnation << 2, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    acquire(&states_lock, incarnation << 2);
    if (states_incarnation != incarnation) {
        memset((void *)states, 0, sizeof states);
        __atomic_store_n(&states_incarnation, incarnation, __ATOMIC_RELEASE);
    }
    struct state *state = states[device];
    if (state == NULL) {
        state = make_state(device);
        __atomic_store_n(&states[device], state, __ATOMIC_RELEASE);
    }
    release(&states_lock, incarnation << 2);
    return state;
}

static inline struct state *state_of(int device)
{
    if ((unsigned int)device < REGION_DEVICES_MAX) {
        struct state *state = __atomic_load_n(&states[device], __ATOMIC_ACQUIRE);
        if (state != NULL && __atomic_load_n(&states_incarnation, __ATOMIC_RELAXED) == fork_incarnation()) return state;
    }
    return first_state(device);
}

/* Under lock. */
static struct core_terms terms_of(struct state *state, uint64_t now)
{
    struct priority_view view;
    bool told = state->page != NULL && priority_read(state->page, now, &view);
    /* The page counts the containers of the highest active level; where that is higher, this one comes on top. */
    uint32_t own = told && view.highest_active < state->level ? 1 : 0;
    enum limits_core_policy policy = account_core_policy();
    struct core_terms terms = {.tenants = told ? view.active_tenants + own : 0,
                               .launches = __atomic_load_n(&state->slot->launches, __ATOMIC_RELAXED),
                               .present = core_present(&state->core, now)};
    uint32_t pct = policy == LIMITS_CORE_DISABLE ? 100 : account_core_pct(state->device);
    if (policy == LIMITS_CORE_DEFAULT && terms.tenants == 1) pct = account_core_limit_pct(state->device);
    bool paced = state->page != NULL && state->level > 0;
    bool whole = pct >= 100;
    terms.budget.pct = pct >= 1 && pct <= 100 ? pct : 100;
    terms.budget.siblings = core_siblings(&state->line->roster, &state->roster_round, now);
    terms.budget.enforced = !whole || paced;
    terms.budget.period_ns = paced ? PACED_NS : BUDGET_PERIOD_NS;
    terms.budget.burst_ns = paced ? PACED_NS : BUDGET_BURST_NS;
    terms.budget.lead_ns = whole ? PACED_NS : 0;
    /* Not from the page of a dead agent. */
    terms.lower = told && __atomic_load_n(&state->page->lowest_present, __ATOMIC_RELAXED) > state->level;
    terms.rival = paced && told && __atomic_load_n(&state->page->highest_present, __ATOMIC_RELAXED) < state->level;
    return terms;
}

/* Nothing may be recorded into or waited for on a captured stream; one that cannot be asked counts as captured. */
static bool is_captured(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return the_driver.stream_is_capturing(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* A capture elsewhere in the process may forbid asking about events, except to threads that say they know. */
static int relax_capture(void)
{
    int mode = CAPTURE_MODE_RELAXED;
    if (the_driver.exchange_capture_mode == NULL || the_driver.exchange_capture_mode(&mode) != CUDA_SUCCESS) return -1;
    return mode;
}

static void restore_capture(int mode)
{
    if (mode >= 0) the_driver.exchange_capture_mode(&mode);
}

static void put_sample(struct state *state, struct sample *sample)
{
    if (sample == state->base) {
        state->base_ended = true;
        return;
    }
    sample->next = state->free;
    state->free = sample;
}

/* The first sample of a phase stays until the last one has been measured from its start. */
static void let_base_go(struct state *state)
{
    if (state->base == NULL || !state->base_ended || state->core.phase.open || state->core.phase.running > 0) return;
    struct sample *base = state->base;
    state->base = NULL;
    put_sample(state, base);
}

static int64_t nanoseconds(float ms)
{
    return ms > -1e9f && ms < 1e9f ? (int64_t)((double)ms * 1e6) : 0;
}

/* The driver's answers about one sample. */
struct answer {
    struct sample *sample;
    CUresult ended;
    bool started;
    bool good;
    int64_t start_ns;
    int64_t end_ns;
};

static void read_times(struct answer *answer, const struct sample *base)
{
    const struct sample *sample = answer->sample;
    float length = 0;
    float offset = 0;
    bool good = the_driver.event_elapsed(&length, sample->start, sample->end) == CUDA_SUCCESS;
    if (good && sample->core.in_phase && sample != base)
        good = base != NULL && base->context == sample->context &&
               the_driver.event_elapsed(&offset, base->start, sample->start) == CUDA_SUCCESS;
    int64_t start = nanoseconds(offset);
    int64_t end = start + nanoseconds(length);
    int64_t gap = (int64_t)sample->gap_ns;
    start = gap < end - start ? start + gap : end;
    /* Ended at some time between launch and event, which mostly is the time that recording takes. */
    if (sample->instant) start = end - (end - start) / INSTANT_PART;
    answer->good = good;
    answer->start_ns = start;
    answer->end_ns = end;
}

/* Ask until enough have not ended; returns how many were asked about. */
static int ask(struct answer *answers, int count, const struct sample *base, int *unfinished)
{
    int asked = 0;
    int mode = relax_capture();
    for (; asked < count && *unfinished < LOOKED_AT_MAX; asked++) {
        struct answer *answer = &answers[asked];
        const struct sample *sample = answer->sample;
        *answer = (struct answer){.sample = answer->sample};
        answer->ended = sample->failed ? CUDA_ERROR_UNKNOWN : the_driver.event_query(sample->end);
        if (answer->ended == CUDA_SUCCESS) read_times(answer, base);
        if (answer->ended == CUDA_ERROR_NOT_READY && (*unfinished)++ == 0)
            answer->started = the_driver.event_query(sample->start) == CUDA_SUCCESS;
    }
    restore_capture(mode);
    return asked;
}

/* Under lock. The sample behind `kept` in the list has ended. */
static void take_in(struct state *state, const struct answer *answer, struct sample *kept, uint64_t now,
                    const struct core_terms *terms)
{
    struct sample *sample = answer->sample;
    if (kept != NULL)
        kept->next = sample->next;
    else
        __atomic_store_n(&state->running, sample->next, __ATOMIC_RELAXED);
    if (state->running_last == sample) state->running_last = kept;
    if (answer->good)
        core_ended(&state->core, &sample->core, now, answer->start_ns, answer->end_ns, terms);
    else
        core_lost(&state->core, &sample->core, terms);
    put_sample(state, sample);
}

/* Under events. Take in the samples that have ended. */
static void harvest_all(struct state *state, uint64_t now)
{
    struct answer answers[ASKED_AT_ONCE];
    struct sample *kept = NULL; /* the last one that stays in the list */
    int unfinished = 0;
    bool is_first = true;
    while (unfinished < LOOKED_AT_MAX) {
        int count = 0;
        acquire(&state->lock, 0);
        struct sample *sample = kept != NULL ? kept->next : state->running;
        const struct sample *base = state->base;
        for (; sample != NULL && count < ASKED_AT_ONCE; sample = sample->next)
            answers[count++].sample = sample;
        release(&state->lock, 0);
        if (count == 0) return;
        int asked = ask(answers, count, base, &unfinished);
        acquire(&state->lock, 0);
        struct core_terms terms = terms_of(state, now);
        for (int i = 0; i < asked; i++) {
            struct sample *one = answers[i].sample;
            if (answers[i].ended != CUDA_ERROR_NOT_READY) {
                take_in(state, &answers[i], kept, now, &terms);
                continue;
            }
            if (answers[i].started) core_runs(&state->core, &one->core, now, &terms);
            if (is_first) core_pends(&state->core, &one->core, now);
            is_first = false;
            kept = one;
        }
        let_base_go(state);
        release(&state->lock, 0);
    }
}

static void harvest(struct state *state, uint64_t now)
{
    if (__atomic_load_n(&state->running, __ATOMIC_RELAXED) == NULL || !try_acquire(&state->events)) return;
    harvest_all(state, now);
    release(&state->events, 0);
}

static void tell_region(struct state *state, uint64_t now)
{
    uint64_t fresh = state->core.charged_ns - state->told_ns;
    if (fresh == 0) return;
    state->told_ns = state->core.charged_ns;
    __atomic_fetch_add(&state->line->drawn_ns, fresh, __ATOMIC_RELAXED);
    __atomic_fetch_add(&state->slot->device_time_ns, fresh, __ATOMIC_RELAXED);
    __atomic_store_n(&state->slot->last_launch_ns, now, __ATOMIC_RELAXED);
}

/* Under events. The stream and the event of probes, in the context that is current; only one context has them. */
static bool have_probe(struct state *state)
{
    CUcontext context = NULL;
    if (state->no_probes || the_driver.stream_create == NULL) return false;
    if (the_driver.context_current(&context) != CUDA_SUCCESS || context == NULL) return false;
    if (state->probe_context != NULL) return state->probe_context == context;
    state->no_probes = the_driver.stream_create(&state->probe_stream, NON_BLOCKING) != CUDA_SUCCESS ||
                       the_driver.event_create(&state->probe, 0) != CUDA_SUCCESS ||
                       the_driver.event_create(&state->answered, 0) != CUDA_SUCCESS ||
                       the_driver.event_create(&state->away, 0) != CUDA_SUCCESS;
    state->answered_ns = state->away_ns = 0;
    if (!state->no_probes) state->probe_context = context;
    return !state->no_probes;
}

/* Under events. How long others kept the device from a probe, by the device's clock. */
static void measure_away(struct state *state, const struct core_terms *terms)
{
    float ms = 0;
    if (state->away_ns == 0 || state->answered_ns == 0) return;
    CUresult ended = the_driver.event_query(state->away);
    if (ended == CUDA_ERROR_NOT_READY) return;
    int64_t posted = (int64_t)(state->away_ns - state->answered_ns);
    state->away_ns = 0;
    if (ended != CUDA_SUCCESS || the_driver.event_elapsed(&ms, state->answered, state->away) != CUDA_SUCCESS) return;
    int64_t kept = nanoseconds(ms) - posted;
    if (kept <= 0) return;
    acquire(&state->lock, 0);
    core_away(&state->core, platform_now_ns(), terms, (uint64_t)kept);
    release(&state->lock, 0);
}

static void swap(CUevent *one, CUevent *other)
{
    CUevent kept = *one;
    *one = *other;
    *other = kept;
}

/* Under events. */
static void note_answer(struct state *state, bool answered, uint64_t posted_ns)
{
    if (answered) {
        swap(&state->probe, &state->answered);
        state->answered_ns = posted_ns;
    } else if (state->away_ns == 0) {
        swap(&state->probe, &state->away);
        state->away_ns = posted_ns;
    }
}

/* Under events. */
static void post_probe(struct state *state, const struct core_terms *terms)
{
    measure_away(state, terms);
    uint64_t began = platform_now_ns();
    bool good = the_driver.event_record(state->probe, state->probe_stream) == CUDA_SUCCESS;
    uint64_t posted = platform_now_ns();
    acquire(&state->lock, 0);
    presence_posted(&state->core.presence, posted);
    /* A host that was held up between is not the device's doing. */
    if (!good || posted - began > PRESENCE_VERDICT_NS) presence_failed(&state->core.presence, posted);
    release(&state->lock, 0);
}

/* Under events. */
static void read_probe(struct state *state, uint64_t now, const struct core_terms *terms)
{
    bool answered = the_driver.event_query(state->probe) == CUDA_SUCCESS;
    uint64_t posted_ns = state->core.presence.posted_ns;
    if (now <= posted_ns + PRESENCE_LATE_NS) note_answer(state, answered, posted_ns);
    acquire(&state->lock, 0);
    bool implausible = core_verdict(&state->core, now, terms, answered);
    release(&state->lock, 0);
    if (implausible) platform_say(PLATFORM_ERROR, "presence of neighbors not measurable, time slices are assumed");
}

/* Under turn. A thread that waits while the device works probes at times for other processes. Returns the time until then. */
static uint64_t probe(struct state *state, const struct core_terms *terms)
{
    const struct presence *presence = &state->core.presence;
    uint64_t rest = UINT64_MAX;
    if (!try_acquire(&state->events)) return PRESENCE_SPACING_MIN_NS;
    int mode = relax_capture();
    uint64_t now = platform_now_ns();
    if (presence_wants_verdict(presence, now)) read_probe(state, now, terms);
    acquire(&state->lock, 0);
    const struct sample *last = state->running != NULL ? state->running_last : NULL;
    release(&state->lock, 0);
    if (presence->posted_ns > 0) {
        rest = presence_rest(presence, now);
    } else if (last != NULL && !last->failed && the_driver.event_query(last->end) == CUDA_ERROR_NOT_READY &&
               core_may_probe(&state->core, terms) && have_probe(state)) {
        if (presence_wants_probe(presence, now)) post_probe(state, terms);
        rest = presence_rest(presence, now);
    }
    restore_capture(mode);
    release(&state->events, 0);
    return rest;
}

/* Under turn. Take the part that the guard against starvation grants now, if it grants one; the container's processes share
   it. Otherwise returns the time at which to ask again. */
static uint64_t take_part(struct state *state, uint64_t now, uint64_t cost)
{
    uint64_t share = __atomic_load_n(&priority_known_page()->min_share_ppm, __ATOMIC_RELAXED);
    uint64_t due = state->blocked_since_ns + STARVED_AFTER_NS;
    if (share == 0) return UINT64_MAX;
    if (share > PPM) share = PPM;
    if (now < due) return due;
    uint64_t part = cost > STARVED_PART_NS ? cost : STARVED_PART_NS;
    uint64_t spacing = part * PPM / share;
    uint64_t *after = &state->line->pass_after_ns;
    uint64_t seen = __atomic_load_n(after, __ATOMIC_RELAXED);
    /* A later time than any part can have written is a tenant's. */
    if (seen > now && seen - now <= spacing + STARVED_AFTER_NS) return seen;
    /* A process that was late keeps the schedule. */
    uint64_t begins = seen <= now && now - seen < spacing ? seen : now;
    if (!__atomic_compare_exchange_n(after, &seen, begins + spacing, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return now;
    state->granted_ns += part;
    return now;
}

/* Under turn. */
static void not_blocked(struct state *state)
{
    state->blocked_since_ns = 0;
    state->granted_ns = 0;
}

/* Under turn. Sleep while a higher priority is active and the guard against starvation grants nothing. True: it has granted
   this launch, although a higher priority is active. */
static bool give_way(struct state *state, uint64_t cost)
{
    uint64_t before = 0;
    for (;;) {
        struct priority_view view;
        uint64_t now = platform_now_ns();
        uint64_t starved_since = state->blocked_since_ns + STARVED_AFTER_NS;
        if (before > 0 && now > starved_since) {
            uint64_t since = before > starved_since ? before : starved_since;
            __atomic_fetch_add(&state->line->starved_ns, now - since, __ATOMIC_RELAXED);
        }
        before = now;
        if (!priority_read(state->page, now, &view) || view.highest_active >= state->level) {
            not_blocked(state);
            return false;
        }
        if (state->blocked_since_ns == 0) state->blocked_since_ns = now;
        uint64_t ask = state->granted_ns >= cost ? now : take_part(state, now, cost);
        if (state->granted_ns >= cost) {
            state->granted_ns -= cost;
            return true;
        }
        uint64_t rest = view.lease_until_ns - now;
        if (rest > RECHECK_PRIORITY_NS) rest = RECHECK_PRIORITY_NS;
        if (ask - now < rest) rest = ask - now;
        if (rest > 0) platform_futex_wait((uint32_t *)(uintptr_t)&state->page->sequence, view.sequence, rest);
    }
}

/* About the charge of a launch of this work. */
static uint64_t price(const struct state *state, const struct estimate *estimate)
{
    if (__atomic_load_n(&estimate->samples, __ATOMIC_RELAXED) == 0) return ESTIMATE_UNKNOWN_NS;
    return core_cost(&state->core, __atomic_load_n(&estimate->charge_ns, __ATOMIC_RELAXED));
}

/* Under turn. Draw until the launch may go; it also gives way to a higher priority that begins while it waits. */
static void admit(struct state *state, struct estimate *estimate, struct core_admission *admission)
{
    bool granted = false;
    bool asking = false;
    uint64_t step = RECHECK_UNKNOWN_NS;
    uint64_t meant = UINT64_MAX;
    for (;;) {
        if (!granted && priority_may_block(state->page, state->level)) {
            granted = give_way(state, price(state, estimate));
            meant = UINT64_MAX;
        } else if (!granted)
            not_blocked(state);
        uint32_t wakes = __atomic_load_n(&state->line->budget_futex, __ATOMIC_ACQUIRE);
        uint64_t now = platform_now_ns();
        bool slept = now >= meant;
        uint64_t late = now - meant;
        harvest(state, now);
        acquire(&state->lock, 0);
        now = platform_now_ns();
        struct core_terms terms = terms_of(state, now);
        if (slept) core_woke(&state->core, late);
        if (asking && admission->unknown && estimate->samples > 0) {
            core_withdraw(&state->core, now, &terms, admission, estimate);
            asking = false;
        }
        uint64_t due = asking ? core_ask(&state->core, now, &terms, admission)
                              : core_begin(&state->core, now, &terms, estimate, admission);
        tell_region(state, now);
        release(&state->lock, 0);
        if (due == 0) return;
        uint64_t look = due > now ? probe(state, &terms) : UINT64_MAX;
        asking = true;
        uint64_t longest = RECHECK_NS;
        if (admission->unknown) {
            longest = step;
            step = step < RECHECK_UNKNOWN_MAX_NS ? 2 * step : step;
        }
        if (look < longest) longest = look;
        if (due - now < longest) longest = due - now;
        meant = now + longest;
        platform_futex_wait(&state->line->budget_futex, wakes, longest);
    }
}

static bool begin_phase(struct state *state, const struct core_admission *admission, const void *stream)
{
    if (!admission->waits) return false;
    acquire(&state->lock, 0);
    bool begins = core_begin_phase(&state->core, platform_now_ns(), stream, admission);
    release(&state->lock, 0);
    return begins;
}

static struct sample *take_sample(struct state *state, CUcontext context)
{
    struct sample **link = &state->free;
    while (*link != NULL && (*link)->context != context && (*link)->context != NULL)
        link = &(*link)->next;
    if (*link == NULL) link = &state->free;
    struct sample *sample = *link;
    if (sample != NULL) *link = sample->next;
    return sample;
}

static bool make_events(struct sample *sample, CUcontext context)
{
    if (sample->context == context) return true;
    if (sample->context != NULL) {
        the_driver.event_destroy(sample->start);
        the_driver.event_destroy(sample->end);
        sample->context = NULL;
    }
    if (the_driver.event_create(&sample->start, 0) != CUDA_SUCCESS) return false;
    if (the_driver.event_create(&sample->end, 0) != CUDA_SUCCESS) {
        the_driver.event_destroy(sample->start);
        return false;
    }
    sample->context = context;
    return true;
}

static bool has_ended(CUevent event)
{
    int mode = relax_capture();
    bool ended = the_driver.event_query(event) == CUDA_SUCCESS;
    restore_capture(mode);
    return ended;
}

/* On an idle stream the first event happens at once and the kernel only when the host has launched it; that gap, in which the
   host may even have lost its processor, is no device time. */
static void note_idle(struct sample *sample)
{
    uint64_t now = platform_now_ns();
    bool idle = !sample->failed && has_ended(sample->start);
    sample->idle_since_ns = idle ? now : 0;
    sample->gap_ns = 0;
}

/* Put the first event before the launch. Without one the launch goes unmeasured. */
static void begin_sample(struct state *state, CUstream stream, struct estimate *estimate, bool unknown,
                         struct compute_ticket *ticket)
{
    CUcontext context = NULL;
    if (the_driver.context_current(&context) != CUDA_SUCCESS || context == NULL) return;
    harvest(state, platform_now_ns());
    acquire(&state->lock, 0);
    struct sample *sample = take_sample(state, context);
    release(&state->lock, 0);
    int mode = relax_capture();
    bool good = sample != NULL && make_events(sample, context);
    restore_capture(mode);
    if (!good) {
        acquire(&state->lock, 0);
        if (sample != NULL) put_sample(state, sample);
        core_missed(&state->core);
        release(&state->lock, 0);
        return;
    }
    sample->failed = the_driver.event_record(sample->start, stream) != CUDA_SUCCESS;
    note_idle(sample);
    sample->core.estimate = estimate;
    sample->core.first = unknown;
    ticket->sampled = true;
    ticket->sample = sample;
}

/* The agent enters a device into the page when it first has a record for it. */
static __attribute__((noinline)) void look_for_page(struct state *state)
{
    if (state->page == NULL)
        __atomic_store_n(&state->page, priority_device(priority_known_page(), account_uuid(state->device)),
                         __ATOMIC_RELEASE);
}

/* Threads that race may lose a count; that it changes is what matters. */
static inline void count_launch(struct state *state)
{
    uint64_t launches = __atomic_load_n(&state->slot->launches, __ATOMIC_RELAXED) + 1;
    __atomic_store_n(&state->slot->launches, launches, __ATOMIC_RELAXED);
    bell_launched();
    if (launches % PAGE_LOOKED_FOR == 0) look_for_page(state);
}

static bool is_known_captured(struct state *state, CUstream stream)
{
    int32_t checks = __atomic_load_n(&state->capture_checks, __ATOMIC_RELAXED);
    if (checks <= 0) return false;
    bool captured = is_captured(stream);
    __atomic_store_n(&state->capture_checks, captured ? CAPTURE_CHECKED : checks - 1, __ATOMIC_RELAXED);
    return captured;
}

/* The launch has no time in hand, is unknown, or is to be sampled. */
static __attribute__((noinline)) void slow_path(struct state *state, CUstream stream, const struct compute_work *work,
                                                struct compute_ticket *ticket, bool paid, bool sampled)
{
    if (is_captured(stream)) {
        if (paid) core_cancel(&state->core, ticket->estimate_ns);
        __atomic_store_n(&state->capture_checks, CAPTURE_CHECKED, __ATOMIC_RELAXED);
        ticket->limited = false;
        return;
    }
    uint64_t shape = estimate_shape(work->blocks, work->threads_per_block, work->graph);
    bool unknown = false;
    struct estimate *estimate;
    if (!paid) {
        struct core_admission admission;
        uint64_t began = platform_now_ns();
        acquire(&state->turn, 0);
        acquire(&state->lock, 0);
        estimate = estimate_add(&state->core.estimates, work->function, shape);
        release(&state->lock, 0);
        admit(state, estimate, &admission);
        release(&state->turn, 0);
        __atomic_fetch_add(&state->slot->waited_ns, platform_now_ns() - began, __ATOMIC_RELAXED);
        ticket->estimate_ns = (uint64_t)admission.cost_ns;
        unknown = admission.unknown;
        sampled =
            estimate_is_sampled(&state->core.estimates, estimate) || unknown || begin_phase(state, &admission, stream);
        if (!sampled && admission.marks) {
            estimate_sample_now(&state->core.estimates, estimate);
            sampled = true;
        }
    } else
        estimate = estimate_find(&state->core.estimates, work->function, shape);
    if (estimate != NULL && sampled) begin_sample(state, stream, estimate, unknown, ticket);
}

/* The estimate of this work, from the thread's own memory if it is there. NULL: unknown. */
static inline struct estimate *known_estimate(struct hand *hand, struct state *state, const struct compute_work *work)
{
    struct recent *recent = &hand->recent[((uintptr_t)work->function >> 4) % RECENT];
    struct estimate *estimate = recent->estimate;
    if (hand->state == state && recent->function == work->function && recent->blocks == work->blocks &&
        recent->threads == work->threads_per_block &&
        __atomic_load_n(&estimate->generation, __ATOMIC_RELAXED) == recent->generation)
        return estimate;
    uint64_t shape = estimate_shape(work->blocks, work->threads_per_block, work->graph);
    estimate = estimate_find(&state->core.estimates, work->function, shape);
    if (estimate == NULL || __atomic_load_n(&estimate->samples, __ATOMIC_RELAXED) == 0) return NULL;
    if (hand->state != state) *hand = (struct hand){.state = state};
    *recent = (struct recent){.function = work->function,
                              .blocks = work->blocks,
                              .threads = work->threads_per_block,
                              .generation = __atomic_load_n(&estimate->generation, __ATOMIC_RELAXED),
                              .estimate = estimate};
    return estimate;
}

/* Pay from the hand, which is filled from what the process has drawn. */
static inline bool pay(struct hand *hand, struct state *state, uint64_t cost)
{
    if (hand->credit_ns >= cost) {
        hand->credit_ns -= cost;
        return true;
    }
    uint64_t several = cost * HAND_LAUNCHES < HAND_NS ? cost * HAND_LAUNCHES : HAND_NS;
    if (several > cost && core_spend(&state->core, several)) {
        hand->credit_ns += several - cost;
        return true;
    }
    return core_spend(&state->core, cost);
}

void compute_before(int device, CUstream stream, const struct compute_work *work, struct compute_ticket *ticket)
{
    ticket->device = device;
    ticket->limited = false;
    ticket->sampled = false;
    struct state *state = state_of(device);
    if (state == NULL) return;
    count_launch(state);
    bool paced = state->page != NULL && state->level > 0;
    if (account_core_pct_fast(device) >= 100 && !paced) return;
    if (is_known_captured(state, stream)) return;
    ticket->limited = true;
    core_note_stream(&state->core, stream);
    struct hand *hand = &the_hand;
    struct estimate *estimate = known_estimate(hand, state, work);
    bool paid = false;
    bool sampled = false;
    if (estimate != NULL && !priority_may_block(state->page, state->level)) {
        ticket->estimate_ns = core_cost(&state->core, __atomic_load_n(&estimate->charge_ns, __ATOMIC_RELAXED));
        paid = pay(hand, state, ticket->estimate_ns);
        if (paid) {
            sampled = estimate_is_sampled(&state->core.estimates, estimate);
            if (!sampled) return;
        }
    }
    slow_path(state, stream, work, ticket, paid, sampled);
}

/* The second event, and the sample is under way; or the launch failed and nothing was. */
static __attribute__((noinline)) void end_sample(struct state *state, CUstream stream, struct compute_ticket *ticket,
                                                 bool launched)
{
    struct sample *sample = ticket->sample;
    uint64_t now = platform_now_ns();
    if (sample->idle_since_ns > 0) sample->gap_ns = now - sample->idle_since_ns;
    if (launched && the_driver.event_record(sample->end, stream) != CUDA_SUCCESS) sample->failed = true;
    sample->instant = sample->idle_since_ns > 0 && launched && !sample->failed && has_ended(sample->end);
    acquire(&state->lock, 0);
    struct estimate *estimate = sample->core.estimate;
    if (launched) {
        core_sampled(&state->core, &sample->core, estimate, ticket->estimate_ns, sample->core.first, stream, now);
        if (sample->core.in_phase && state->base == NULL) {
            state->base = sample;
            state->base_ended = false;
        }
        sample->next = NULL;
        if (state->running == NULL)
            __atomic_store_n(&state->running, sample, __ATOMIC_RELAXED);
        else
            state->running_last->next = sample;
        state->running_last = sample;
    } else {
        if (sample->core.first) estimate_unknown_cancel(estimate, ticket->estimate_ns);
        put_sample(state, sample);
    }
    release(&state->lock, 0);
}

void compute_finish(CUstream stream, struct compute_ticket *ticket, bool launched)
{
    struct state *state = state_of(ticket->device);
    if (state == NULL) return;
    if (ticket->sampled) end_sample(state, stream, ticket, launched);
    if (!launched) core_cancel(&state->core, ticket->estimate_ns);
}

/* Every device that this process image has used. */
static struct state *existing(int device)
{
    if (device < 0 || device >= (int)REGION_DEVICES_MAX) return NULL;
    struct state *state = __atomic_load_n(&states[device], __ATOMIC_ACQUIRE);
    return state != NULL && __atomic_load_n(&states_incarnation, __ATOMIC_RELAXED) == account_incarnation() ? state
                                                                                                            : NULL;
}

void compute_forget(const void *function)
{
    for (int device = 0; device < (int)REGION_DEVICES_MAX; device++) {
        struct state *state = existing(device);
        if (state == NULL) continue;
        acquire(&state->lock, 0);
        estimate_forget(&state->core.estimates, function);
        release(&state->lock, 0);
    }
}

/* Events must not be touched once their context is gone; destroying them before is left to the driver. */
void compute_context_end(CUcontext context)
{
    for (int device = 0; device < (int)REGION_DEVICES_MAX; device++) {
        struct state *state = existing(device);
        if (state == NULL) continue;
        acquire(&state->events, 0);
        acquire(&state->lock, 0);
        for (struct sample *sample = state->running; sample != NULL; sample = sample->next)
            if (context == NULL || sample->context == context) {
                sample->failed = true;
                sample->context = NULL;
            }
        for (struct sample *sample = state->free; sample != NULL; sample = sample->next)
            if (context == NULL || sample->context == context) sample->context = NULL;
        if (state->base != NULL && (context == NULL || state->base->context == context)) state->base->context = NULL;
        if (context == NULL || state->probe_context == context) {
            state->probe_context = NULL;
            state->core.presence.posted_ns = 0;
        }
        release(&state->lock, 0);
        release(&state->events, 0);
    }
}

void compute_settle(int device)
{
    struct state *state = existing(device);
    if (state != NULL) harvest(state, platform_now_ns());
}

void compute_limits_changed(void)
{
    for (int device = 0; device < (int)REGION_DEVICES_MAX; device++) {
        struct state *state = existing(device);
        if (state == NULL) continue;
        __atomic_fetch_add(&state->line->budget_futex, 1, __ATOMIC_RELEASE);
        platform_futex_wake(&state->line->budget_futex);
    }
}
