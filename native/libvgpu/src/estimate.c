/* SPDX-License-Identifier: Apache-2.0 */
/* Estimates of device time; see estimate.h. Locks taken here: none. Called with hooks active: no. */
#include "estimate.h"

#include <stdlib.h>
#include <string.h>

#include "presence.h"

enum {
    UNKNOWN_GROWTH_BITS = 3,
    UNKNOWN_GROWTH_STEPS = 5,
    MEAN_WEIGHT = 256,
    LOW_WEIGHT = 192,
    STRANGE_IN_A_ROW = 8,
    STRANGE_MOST = 64,
    EARLY = 16,
    CALM_IN_A_ROW = 16,
    CALM_RATIO = 8,
    WATCHED_MAX = 256,
    HITS_MIN = 8,
    HITS_PER_2_SLICES = 5,
    STOLEN_RATIO = 2,
    STRETCH_ONE = 1024,
    CONTENDERS_POSSIBLE = 4,
    MEASURED_FROM = 8,
    PRESENT_LEAST = 170
};

/* Longer kernels are met by slices more often than not. */
#define LONG_NS UINT64_C(1000000)

static uint64_t quarter_log2(uint64_t value)
{
    if (value < 4) return value;
    uint64_t top = 63 - (uint64_t)__builtin_clzll(value);
    return top * 4 + ((value >> (top - 2)) & 3);
}

uint64_t estimate_shape(uint64_t blocks, uint32_t threads_per_block, bool graph)
{
    return graph ? 1 : quarter_log2(blocks) << 16 | quarter_log2(threads_per_block) << 1;
}

static size_t bucket_of(const void *function, uint64_t shape)
{
    uint64_t mixed = ((uint64_t)(uintptr_t)function >> 4) ^ (shape << 20);
    mixed *= UINT64_C(0x9e3779b97f4a7c15);
    return (size_t)(mixed >> 54);
}

_Static_assert(ESTIMATE_BUCKETS == 1 << (64 - 54), "bucket_of");

struct estimate *estimate_find(const struct estimates *all, const void *function, uint64_t shape)
{
    struct estimate *entry = __atomic_load_n(&all->buckets[bucket_of(function, shape)], __ATOMIC_ACQUIRE);
    while (entry != NULL && (__atomic_load_n(&entry->function, __ATOMIC_RELAXED) != function ||
                             __atomic_load_n(&entry->shape, __ATOMIC_RELAXED) != shape))
        entry = entry->next;
    return entry;
}

/* Entries stay in their chain for good, so that readers need no lock; a free one is taken again. */
static void reset(struct estimate *entry, const void *function, uint64_t shape)
{
    __atomic_store_n(&entry->charge_ns, ESTIMATE_UNKNOWN_NS, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->samples, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->until_sample, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->every, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->generation, entry->generation + 1, __ATOMIC_RELAXED);
    entry->unknown_launches = 0;
    entry->failures = 0;
    entry->unknown_charged_ns = 0;
    entry->mean_ns = 0;
    entry->near_ns = 0;
    entry->low_ns = 0;
    entry->worth_ns = 0;
    entry->longest_ns = 0;
    entry->alone_ns = 0;
    entry->watched = 0;
    entry->shared_ns = 0;
    entry->patience = STRANGE_IN_A_ROW;
    entry->strange = 0;
    entry->calm = 0;
    entry->taken = 0;
    entry->strange_owed_ns = 0;
    __atomic_store_n(&entry->steps, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->weight, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->shape, shape, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->function, function, __ATOMIC_RELAXED);
}

struct estimate *estimate_add(struct estimates *all, const void *function, uint64_t shape)
{
    struct estimate *entry = estimate_find(all, function, shape);
    if (entry != NULL) return entry;
    struct estimate **head = &all->buckets[bucket_of(function, shape)];
    for (entry = *head; entry != NULL && entry->function != NULL; entry = entry->next)
        continue;
    if (entry == NULL && all->entries < ESTIMATE_ENTRIES_MAX)
        entry = aligned_alloc(64, (sizeof *entry + 63) / 64 * 64);
    else if (entry != NULL) {
        reset(entry, function, shape);
        return entry;
    }
    if (entry == NULL) {
        if (all->crowd.every == 0) reset(&all->crowd, all, 0);
        return &all->crowd;
    }
    memset(entry, 0, sizeof *entry);
    reset(entry, function, shape);
    entry->next = *head;
    all->entries++;
    __atomic_store_n(head, entry, __ATOMIC_RELEASE);
    return entry;
}

void estimate_forget(struct estimates *all, const void *function)
{
    for (size_t i = 0; i < ESTIMATE_BUCKETS; i++)
        for (struct estimate *entry = all->buckets[i]; entry != NULL; entry = entry->next)
            if (entry->function == function) {
                __atomic_store_n(&entry->function, NULL, __ATOMIC_RELAXED);
                __atomic_store_n(&entry->generation, entry->generation + 1, __ATOMIC_RELAXED);
            }
}

uint64_t estimate_unknown(struct estimate *estimate)
{
    uint32_t steps = estimate->unknown_launches;
    uint64_t charge = ESTIMATE_UNKNOWN_NS
                      << UNKNOWN_GROWTH_BITS * (steps < UNKNOWN_GROWTH_STEPS ? steps : UNKNOWN_GROWTH_STEPS);
    estimate->unknown_launches++;
    estimate->unknown_charged_ns += charge;
    return charge;
}

/* Everything known of the durations is forgotten. */
static void start_anew(struct estimate *estimate)
{
    estimate->strange = 0;
    estimate->low_ns = 0;
    estimate->worth_ns = 0;
    estimate->taken = 0;
    estimate->watched = 0;
    estimate->shared_ns = 0;
    estimate->alone_ns = 0;
    estimate->epoch++;
}

void estimate_doubt(struct estimate *estimate, uint64_t running_ns)
{
    if (estimate->samples == 0 || running_ns / 2 <= estimate->longest_ns) return;
    estimate->unknown_launches = 0;
    estimate->unknown_charged_ns = 0;
    start_anew(estimate);
    __atomic_store_n(&estimate->samples, 0, __ATOMIC_RELAXED);
}

void estimate_unknown_cancel(struct estimate *estimate, uint64_t charged_ns)
{
    if (estimate->samples > 0 || estimate->unknown_launches == 0 || estimate->unknown_charged_ns < charged_ns) return;
    estimate->unknown_launches--;
    estimate->unknown_charged_ns -= charged_ns;
}

int64_t estimate_unknown_owed(struct estimate *estimate, uint32_t overlap)
{
    uint64_t worth = estimate->charge_ns * estimate->unknown_launches * overlap / 1024;
    int64_t owed = (int64_t)worth - (int64_t)estimate->unknown_charged_ns;
    estimate->unknown_launches = 0;
    estimate->unknown_charged_ns = 0;
    return owed;
}

/* Elapsed times up to here count as undisturbed. */
static uint64_t trim_limit(uint64_t low, uint64_t slice_ns)
{
    uint64_t quarter = low / 4;
    uint64_t trim = slice_ns / ESTIMATE_TRIM_PART;
    return low + (quarter > trim ? quarter : trim);
}

/* The shortest of the last samples, but what was shorter before is forgotten slowly: beside a busy neighbour a long kernel
   is undisturbed only now and then. */
static void remember_shortest(struct estimate *estimate, size_t count, uint64_t slice_ns)
{
    uint64_t low = estimate->elapsed_ns[0];
    for (size_t i = 1; i < count; i++)
        low = estimate->elapsed_ns[i] < low ? estimate->elapsed_ns[i] : low;
    if (trim_limit(low, slice_ns) < estimate->low_ns) {
        /* The assumption about the others was wrong; if that happens again, short and long runs take turns. */
        estimate->worth_ns = 0;
        estimate->watched = 0;
        if (estimate->epoch > 0 && estimate->patience < STRANGE_MOST) estimate->patience *= 2;
    }
    if (estimate->low_ns == 0 || low <= estimate->low_ns)
        estimate->low_ns = low;
    else
        estimate->low_ns += (low - estimate->low_ns + LOW_WEIGHT - 1) / LOW_WEIGHT;
}

/* Elapsed times up to here may be due to neighbours: a slice of each for each slice of ours, and another before the
   first. */
static uint64_t explained(uint64_t low, uint32_t contenders, uint64_t slice_ns)
{
    return low * contenders + 2 * slice_ns * (contenders - 1);
}

/* Short kernels are seldom met by a slice, long ones grow with the number of contenders: what is longer again and again
   is no neighbour but other work under the same name, the sooner the longer it is. */
static void notice_change(struct estimate *estimate, uint64_t elapsed, uint32_t contenders, uint64_t slice_ns)
{
    uint64_t limit = trim_limit(estimate->low_ns, slice_ns);
    if (estimate->low_ns > slice_ns / ESTIMATE_TRIM_PART) limit *= contenders;
    uint64_t times = elapsed / (limit > 0 ? limit : 1);
    if (times > STRANGE_IN_A_ROW) times = STRANGE_IN_A_ROW;
    estimate->strange = elapsed <= limit ? 0 : estimate->strange + (times > 0 ? (uint32_t)times : 1);
    if (estimate->strange >= estimate->patience) start_anew(estimate);
}

static void add_to_mean(uint64_t *mean, uint64_t value, uint32_t weight)
{
    *mean = (uint64_t)((int64_t)*mean + ((int64_t)value - (int64_t)*mean) / (int64_t)weight);
}

uint32_t estimate_random(struct estimates *all)
{
    uint32_t x = __atomic_load_n(&all->random, __ATOMIC_RELAXED);
    x = x != 0 ? x : 2463534242u;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    __atomic_store_n(&all->random, x, __ATOMIC_RELAXED);
    return x;
}

void estimate_plan_next(struct estimates *all, struct estimate *estimate)
{
    /* Irregular steps, so that no pattern of launches can step over the sampled ones. */
    uint32_t every = __atomic_load_n(&estimate->every, __ATOMIC_RELAXED);
    int32_t left = every <= 1 ? 1 : (int32_t)(1 + estimate_random(all) % (2 * every - 1));
    __atomic_store_n(&estimate->until_sample, left, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->weight, __atomic_load_n(&estimate->steps, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->steps, (uint32_t)left, __ATOMIC_RELAXED);
}

/* The first samples of a function follow each other, later ones lie ESTIMATE_SPACING_NS apart. */
static void plan(struct estimate *estimate)
{
    uint64_t every = ESTIMATE_SPACING_NS / (estimate->charge_ns > 0 ? estimate->charge_ns : 1);
    every = every < 1 ? 1 : every > ESTIMATE_SAMPLED_EVERY_MAX ? ESTIMATE_SAMPLED_EVERY_MAX : every;
    if (every > estimate->taken / 2 + 1) every = estimate->taken / 2 + 1;
    if (estimate->strange > 0) every = 1;
    __atomic_store_n(&estimate->every, (uint32_t)every, __ATOMIC_RELAXED);
}

/* Keep count of what neighbours may have done to samples that they can explain. */
static void watch(struct estimate *estimate, uint64_t elapsed, bool hit)
{
    if (estimate->watched == 0) {
        estimate->watched_ns = 0;
        estimate->stolen_ns = 0;
        estimate->hits = 0;
    } else if (estimate->watched >= WATCHED_MAX) {
        estimate->watched /= 2;
        estimate->watched_ns /= 2;
        estimate->stolen_ns /= 2;
        estimate->hits /= 2;
    }
    estimate->watched++;
    estimate->watched_ns += estimate->near_ns;
    if (!hit) return;
    estimate->hits++;
    estimate->stolen_ns += elapsed - estimate->near_ns;
}

/* Prolonged more often than slices come, or by more than all neighbours can take: it is the work that varies. */
static bool varies(const struct estimate *estimate, uint32_t contenders, uint64_t slice_ns)
{
    uint64_t others = contenders - 1;
    uint64_t slices = estimate->watched_ns / slice_ns;
    return estimate->hits >= HITS_MIN &&
           (estimate->hits > HITS_MIN + HITS_PER_2_SLICES * others * slices / 2 ||
            estimate->stolen_ns > HITS_MIN * slice_ns + STOLEN_RATIO * others * estimate->watched_ns);
}

/* How much longer than alone everything takes at present, in 1/1024. */
static uint64_t stretch(const struct estimate *estimate, uint32_t contenders, uint64_t slice_ns)
{
    if (estimate->watched_ns < slice_ns) return (uint64_t)STRETCH_ONE * contenders;
    uint64_t seen = STRETCH_ONE + estimate->stolen_ns * STRETCH_ONE / estimate->watched_ns;
    return seen < (uint64_t)STRETCH_ONE * contenders ? seen : (uint64_t)STRETCH_ONE * contenders;
}

/* Worth of the mean elapsed time, by the part of the time in which the device was ours. */
static uint64_t measured_mean(const struct estimate *estimate, uint32_t present)
{
    return estimate->mean_ns * present / PRESENCE_ONE;
}

/* The shortest samples are not what the work takes: they all hold slices, or the work varies. */
static bool is_measured(const struct estimate *estimate, uint32_t contenders, uint32_t present, uint64_t slice_ns)
{
    if (contenders == 1 || present < PRESENT_LEAST || estimate->taken < MEASURED_FROM) return false;
    if (estimate->low_ns < LONG_NS) {
        uint64_t slices = estimate->watched_ns * (PRESENCE_ONE - present) / present;
        return estimate->hits >= HITS_MIN && estimate->stolen_ns > slices + slices / 2 + HITS_MIN * slice_ns / 2;
    }
    uint64_t mean = measured_mean(estimate, present);
    uint64_t tenth = estimate->near_ns / 10;
    return mean + tenth < estimate->near_ns || mean > estimate->near_ns + tenth;
}

/* How much of an elapsed time was ours. */
static uint64_t worth_of(struct estimate *estimate, uint64_t elapsed, uint32_t contenders, uint32_t present,
                         uint64_t slice_ns)
{
    if (contenders == 1) return elapsed;
    bool clean = elapsed <= trim_limit(estimate->low_ns, slice_ns);
    /* A tenant may have several processes, and not all tenants may be known. */
    uint32_t most = contenders < CONTENDERS_POSSIBLE ? CONTENDERS_POSSIBLE : contenders;
    bool possible = elapsed <= explained(estimate->low_ns, most, slice_ns);
    if (clean || possible) watch(estimate, elapsed, !clean);
    if (clean || (present == 0 && varies(estimate, contenders, slice_ns))) return elapsed;
    if (!possible && present >= PRESENT_LEAST) return elapsed * present / PRESENCE_ONE;
    return possible ? estimate->near_ns : elapsed * STRETCH_ONE / stretch(estimate, contenders, slice_ns);
}

/* Enter the elapsed time among the last samples. */
static void enter_elapsed(struct estimate *estimate, uint64_t elapsed, uint64_t slice_ns)
{
    estimate->elapsed_ns[estimate->taken % ESTIMATE_SAMPLES] = elapsed;
    estimate->taken++;
    if (estimate->taken == UINT32_MAX) estimate->taken = UINT32_MAX / ESTIMATE_SAMPLES * ESTIMATE_SAMPLES;
    remember_shortest(estimate, estimate->taken < ESTIMATE_SAMPLES ? estimate->taken : ESTIMATE_SAMPLES, slice_ns);
}

/* Add the elapsed time to the means; returns the weight that it has there. */
static uint32_t update_means(struct estimate *estimate, uint64_t elapsed, uint32_t contenders, uint64_t slice_ns)
{
    uint32_t longest = estimate->low_ns > ESTIMATE_SPACING_NS ? ESTIMATE_SAMPLES : MEAN_WEIGHT;
    uint32_t weight = estimate->taken < longest ? estimate->taken : longest;
    add_to_mean(&estimate->mean_ns, elapsed, weight);
    uint64_t limit = contenders == 1 ? UINT64_MAX : trim_limit(estimate->low_ns, slice_ns);
    if (estimate->near_ns == 0 || estimate->near_ns > limit) estimate->near_ns = estimate->low_ns;
    if (elapsed <= limit) add_to_mean(&estimate->near_ns, elapsed, weight);
    /* Work that was long and is short now, several times in a row, owes nothing for its past. */
    estimate->calm = elapsed <= limit ? estimate->calm + 1 : 0;
    if (estimate->calm >= CALM_IN_A_ROW && estimate->mean_ns / contenders > CALM_RATIO * estimate->near_ns) {
        estimate->mean_ns = estimate->near_ns;
        estimate->worth_ns = estimate->near_ns;
    }
    return weight;
}

/* The least that an early sample is charged: processes of a container that begin together see only each other at first. */
static uint64_t early_least(struct estimate *estimate, uint64_t elapsed, uint32_t contenders, uint32_t crowd,
                            uint64_t slice_ns)
{
    uint64_t shared = 1 + elapsed / slice_ns;
    uint64_t share = elapsed / (shared < contenders ? shared : contenders);
    if (share > estimate->shared_ns) estimate->shared_ns = share;
    uint64_t least = crowd > ESTIMATE_CROWD_ONE ? estimate->mean_ns * ESTIMATE_CROWD_ONE / crowd : estimate->mean_ns;
    if (least < estimate->shared_ns) least = estimate->shared_ns;
    return least > estimate->low_ns ? estimate->low_ns : least;
}

static uint64_t least_of(const struct estimate *estimate, uint32_t contenders, uint32_t present)
{
    uint64_t least = estimate->mean_ns / contenders;
    uint64_t measured = measured_mean(estimate, present);
    return present > 0 && measured < least ? measured : least;
}

/* Add what the sample was worth where the presence of others does not measure it. */
static void update_worth(struct estimate *estimate, uint64_t worth, uint32_t weight, uint32_t contenders,
                         uint32_t present, uint64_t slice_ns)
{
    if (estimate->worth_ns == 0) estimate->worth_ns = worth;
    add_to_mean(&estimate->worth_ns, worth, weight);
    if ((present > 0 || !varies(estimate, contenders, slice_ns)) && estimate->worth_ns < estimate->near_ns)
        estimate->worth_ns = estimate->near_ns;
}

static void publish(struct estimate *estimate, uint64_t charge)
{
    __atomic_store_n(&estimate->charge_ns, charge > 0 ? charge : 1, __ATOMIC_RELAXED);
    if (estimate->samples < UINT32_MAX) __atomic_store_n(&estimate->samples, estimate->samples + 1, __ATOMIC_RELAXED);
    plan(estimate);
}

bool estimate_failed(struct estimate *estimate, uint64_t mean_ns)
{
    if (estimate->samples > 0 || ++estimate->failures < ESTIMATE_FAILURES_MAX) return false;
    publish(estimate, mean_ns > 0 ? mean_ns : ESTIMATE_UNKNOWN_NS);
    __atomic_store_n(&estimate->every, ESTIMATE_SAMPLED_EVERY_MAX, __ATOMIC_RELAXED);
    return true;
}

uint64_t estimate_sample(struct estimate *estimate, uint64_t elapsed_ns, uint32_t contenders, uint32_t present,
                         uint32_t crowd, uint64_t slice_ns)
{
    uint64_t elapsed = elapsed_ns < ESTIMATE_MAX_NS ? elapsed_ns : ESTIMATE_MAX_NS;
    bool varied = is_measured(estimate, contenders, present, slice_ns);
    if (estimate->taken > 0 && contenders > 1 && !varied) notice_change(estimate, elapsed, contenders, slice_ns);
    enter_elapsed(estimate, elapsed, slice_ns);
    uint32_t weight = update_means(estimate, elapsed, contenders, slice_ns);
    bool early = estimate->taken < EARLY && contenders > 2;
    uint64_t least =
        early ? early_least(estimate, elapsed, contenders, crowd, slice_ns) : least_of(estimate, contenders, present);
    estimate->longest_ns = elapsed > estimate->longest_ns ? elapsed : estimate->longest_ns;
    uint64_t worth = worth_of(estimate, elapsed, contenders, present, slice_ns);
    if (is_measured(estimate, contenders, present, slice_ns)) {
        worth = elapsed * present / PRESENCE_ONE;
        uint64_t mean = measured_mean(estimate, present);
        estimate->worth_ns = mean > 0 ? mean : worth;
        publish(estimate, estimate->worth_ns > mean ? estimate->worth_ns : mean);
        return worth;
    }
    update_worth(estimate, worth, weight, contenders, present, slice_ns);
    uint64_t charge = estimate->worth_ns > least && !early ? estimate->worth_ns : least;
    publish(estimate, charge);
    if (early) return charge;
    return charge == least && elapsed / contenders > worth ? elapsed / contenders : worth;
}
