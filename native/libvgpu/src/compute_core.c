/* SPDX-License-Identifier: Apache-2.0 */
/* The compute limit of one process on one device; see compute_core.h. Locks taken here: none. Hooks active: no. */
#include "compute_core.h"

#include <string.h>

enum { OVERLAP_ONE = 1024, CREDIT_QUANTA_MAX = 2, ROSTER_BITS = 16 };

#define ROSTER_COUNT UINT64_C(0xffff)

void core_init(struct core_device *device, uint64_t *word)
{
    memset(device, 0, sizeof *device);
    device->budget.word = word;
    device->budget.own_pct = 100;
    device->overlap = OVERLAP_ONE;
}

uint32_t core_siblings(uint64_t *roster, uint32_t *own_round, uint64_t now_ns)
{
    uint32_t round = (uint32_t)(now_ns / CORE_ROSTER_ROUND_NS);
    uint64_t seen = __atomic_load_n(roster, __ATOMIC_RELAXED);
    while (*own_round != round || (uint32_t)(seen >> 2 * ROSTER_BITS) != round) {
        uint32_t seen_round = (uint32_t)(seen >> 2 * ROSTER_BITS);
        uint64_t before = 0;
        uint64_t count = 0;
        if (seen_round == round) {
            before = (seen >> ROSTER_BITS) & ROSTER_COUNT;
            count = seen & ROSTER_COUNT;
        } else if (seen_round + 1 == round)
            before = seen & ROSTER_COUNT;
        count += count < ROSTER_COUNT ? 1 : 0;
        uint64_t next = (uint64_t)round << 2 * ROSTER_BITS | before << ROSTER_BITS | count;
        if (__atomic_compare_exchange_n(roster, &seen, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
            *own_round = round;
            seen = next;
        }
    }
    uint32_t before = (uint32_t)((seen >> ROSTER_BITS) & ROSTER_COUNT);
    uint32_t count = (uint32_t)(seen & ROSTER_COUNT);
    uint32_t found = before > count ? before : count;
    return found > 0 ? found : 1;
}

static int64_t settle(struct core_device *device)
{
    int64_t owed = device->owed_ns;
    device->owed_ns = 0;
    if (owed != 0) __atomic_fetch_sub(&device->credit_ns, owed, __ATOMIC_RELAXED);
    return __atomic_load_n(&device->credit_ns, __ATOMIC_RELAXED);
}

/* What was charged by far too much goes back to the container. */
static int64_t give_excess_back(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                                int64_t credit)
{
    int64_t quantum = (int64_t)budget_quantum(&terms->budget);
    if (credit <= CREDIT_QUANTA_MAX * quantum) return credit;
    int64_t excess = credit - quantum;
    __atomic_fetch_sub(&device->credit_ns, excess, __ATOMIC_RELAXED);
    budget_refund(&device->budget, now_ns, &terms->budget, (uint64_t)excess);
    device->charged_ns -= (uint64_t)excess < device->charged_ns ? (uint64_t)excess : device->charged_ns;
    return quantum;
}

uint64_t core_begin(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                    struct estimate *estimate, struct core_admission *admission)
{
    int64_t credit = give_excess_back(device, now_ns, terms, settle(device));
    admission->unknown = estimate->samples == 0;
    uint64_t cost = admission->unknown ? estimate_unknown(estimate) : estimate->charge_ns;
    admission->cost_ns = (int64_t)cost;
    if (credit >= (int64_t)cost && core_spend(device, cost)) return 0;
    int64_t needed = (int64_t)cost - credit;
    int64_t quantum = (int64_t)budget_quantum(&terms->budget);
    bool wanders = terms->tenants != 1 && cost >= CORE_LONG_NS;
    if (wanders) quantum = quantum / 2 + (int64_t)(estimate_random(&device->estimates) % (uint64_t)quantum);
    int64_t amount = needed > quantum ? needed : quantum;
    admission->waits = false;
    admission->shift_ns = wanders ? estimate_random(&device->estimates) % CORE_SHIFT_NS : 0;
    budget_draw(&device->budget, now_ns, &terms->budget, (uint64_t)amount, &admission->draw);
    device->charged_ns += (uint64_t)amount;
    return core_ask(device, now_ns, terms, admission);
}

uint64_t core_ask(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                  struct core_admission *admission)
{
    uint64_t due = budget_due(&admission->draw, now_ns, &terms->budget);
    if (due > now_ns && terms->budget.enforced) admission->waits = true;
    if (admission->waits) due += admission->shift_ns;
    if (due > now_ns) return due;
    int64_t left = (int64_t)admission->draw.device_ns - admission->cost_ns;
    __atomic_fetch_add(&device->credit_ns, left, __ATOMIC_RELAXED);
    return 0;
}

void core_withdraw(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                   struct core_admission *admission, struct estimate *estimate)
{
    budget_refund(&device->budget, now_ns, &terms->budget, admission->draw.device_ns);
    device->charged_ns -=
        admission->draw.device_ns < device->charged_ns ? admission->draw.device_ns : device->charged_ns;
    /* The launches before this one were settled with it, as if it had been made. */
    device->owed_ns -= (int64_t)estimate->charge_ns - admission->cost_ns;
}

bool core_wants_overlap(struct core_device *device, uint64_t now_ns, const void *stream)
{
    bool several = __atomic_load_n(&device->several_streams, __ATOMIC_RELAXED) != 0;
    bool under_way = device->overlap_running > 0 || __atomic_load_n(&device->overlap_left, __ATOMIC_RELAXED) > 0;
    if (now_ns - device->overlap_since_ns < CORE_OVERLAP_EVERY_NS || (several && under_way)) return false;
    device->overlap_since_ns = now_ns;
    __atomic_store_n(&device->several_streams, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&device->stream, stream, __ATOMIC_RELAXED);
    if (!several) {
        device->overlap = OVERLAP_ONE;
        return false;
    }
    device->overlap_count = 0;
    __atomic_store_n(&device->overlap_left, ESTIMATE_OVERLAP_SAMPLES, __ATOMIC_RELAXED);
    return true;
}

void core_sampled(struct core_device *device, struct core_sample *sample, struct estimate *estimate,
                  uint64_t charged_ns, bool first, const void *stream)
{
    sample->estimate = estimate;
    sample->generation = estimate->generation;
    sample->charged_ns = charged_ns;
    sample->first = first;
    sample->running_since_ns = 0;
    sample->stream = stream;
    int32_t left = __atomic_load_n(&device->overlap_left, __ATOMIC_RELAXED);
    sample->overlap = left > 0;
    if (sample->overlap) {
        __atomic_store_n(&device->overlap_left, left - 1, __ATOMIC_RELAXED);
        device->overlap_running++;
    }
}

void core_runs(struct core_device *device, struct core_sample *sample, uint64_t now_ns, const struct core_terms *terms)
{
    if (sample->running_since_ns == 0) sample->running_since_ns = now_ns;
    uint64_t elapsed = (now_ns - sample->running_since_ns) * device->overlap / OVERLAP_ONE;
    uint64_t least = elapsed / (terms->tenants > 0 ? terms->tenants : 2);
    if (sample->first || least <= sample->charged_ns) return;
    device->owed_ns += (int64_t)(least - sample->charged_ns);
    sample->charged_ns = least;
}

static void leave_series(struct core_device *device, const struct core_sample *sample)
{
    if (!sample->overlap) return;
    device->overlap_running--;
    if (device->overlap_running > 0 || __atomic_load_n(&device->overlap_left, __ATOMIC_RELAXED) > 0) return;
    if (device->overlap_count > 1) {
        uint32_t fresh = estimate_overlap(device->intervals, device->overlap_count);
        device->overlap = device->overlap == OVERLAP_ONE ? fresh : (device->overlap + fresh) / 2;
    }
    device->overlap_count = 0;
}

void core_lost(struct core_device *device, struct core_sample *sample)
{
    leave_series(device, sample);
}

void core_ended(struct core_device *device, struct core_sample *sample, int64_t start_ns, int64_t end_ns,
                const struct core_terms *terms)
{
    struct estimate *estimate = sample->estimate;
    if (sample->overlap && device->overlap_count < ESTIMATE_OVERLAP_SAMPLES) {
        struct estimate_interval *interval = &device->intervals[device->overlap_count++];
        interval->start_ns = start_ns;
        interval->end_ns = end_ns;
        interval->stream = sample->stream;
    }
    leave_series(device, sample);
    if (sample->generation != estimate->generation) return;
    bool known = estimate->samples > 0;
    uint64_t elapsed = end_ns > start_ns ? (uint64_t)(end_ns - start_ns) : 0;
    uint64_t worth = estimate_sample(estimate, elapsed, terms->tenants, device->overlap);
    if (!known) device->owed_ns += estimate_unknown_owed(estimate);
    if (!sample->first) device->owed_ns += (int64_t)worth - (int64_t)sample->charged_ns;
}
