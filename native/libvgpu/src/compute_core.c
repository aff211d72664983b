/* SPDX-License-Identifier: Apache-2.0 */
/* The compute limit of one process on one device; see compute_core.h. Locks taken here: none. Hooks active: no. */
#include "compute_core.h"

#include <string.h>

enum {
    CREDIT_QUANTA_MAX = 2,
    PHASE_COST_MIN_NS = 100000,
    OVERLAP_MIN = 16,
    ROSTER_BITS = 16,
    BLIND_LAUNCHES = 2,
    SIBLINGS_MOST = 4,
    HELD_MOST = 12,
    LATE_WEIGHT = 32,
    MEAN_WEIGHT = 32,
    ALONE_WEIGHT = 16,
    LATE_RATIO = 3
};

#define STRETCH_LEAST_NS (20 * BUDGET_NS_PER_MS)
#define STRETCH_MOST_NS (200 * BUDGET_NS_PER_MS)

#define LATE_MOST_NS (10 * BUDGET_NS_PER_MS)

#define ROSTER_COUNT UINT64_C(0xffff)

void core_init(struct core_device *device, uint64_t *word)
{
    memset(device, 0, sizeof *device);
    device->budget.word = word;
    device->budget.own_pct = 100;
    device->overlap = CORE_OVERLAP_ONE;
    device->owed_since_ns = UINT64_MAX;
    device->stream = device;
}

/* Credit that changes otherwise than by launches is no part of the cost of the present phase. */
static void move_credit(struct core_device *device, int64_t ns)
{
    __atomic_fetch_add(&device->credit_ns, ns, __ATOMIC_RELAXED);
    device->phase.credit_ns += ns;
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

/* Time that cannot be owed yet (see budget_owe) is forgiven, as a neighbor may have caused it; but where many processes
   begin together, it is work that they launched before they knew of each other, and is owed later. */
static int64_t settle(struct core_device *device, uint64_t now_ns, const struct core_terms *terms)
{
    int64_t owed = device->owed_ns;
    device->owed_ns = 0;
    if (owed > 0) {
        uint64_t charged = budget_owe(&device->budget, now_ns, &terms->budget, (uint64_t)owed, device->owed_since_ns);
        device->charged_ns += charged;
        bool kept = terms->budget.siblings > SIBLINGS_MOST && now_ns < device->owed_since_ns + CORE_OWED_KEPT_NS;
        if (kept && (uint64_t)owed > charged) device->owed_ns = owed - (int64_t)charged;
    } else if (owed < 0)
        move_credit(device, -owed);
    if (device->owed_ns == 0) device->owed_since_ns = UINT64_MAX;
    return __atomic_load_n(&device->credit_ns, __ATOMIC_RELAXED);
}

/* Return an excessive charge to the container. */
static int64_t give_excess_back(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                                int64_t credit)
{
    int64_t quantum = (int64_t)budget_quantum(&terms->budget);
    if (credit <= CREDIT_QUANTA_MAX * quantum) return credit;
    int64_t excess = credit - quantum;
    move_credit(device, -excess);
    device->busy_until_ns -= (uint64_t)excess < device->busy_until_ns ? (uint64_t)excess : device->busy_until_ns;
    budget_refund(&device->budget, now_ns, &terms->budget, (uint64_t)excess);
    device->charged_ns -= (uint64_t)excess < device->charged_ns ? (uint64_t)excess : device->charged_ns;
    return quantum;
}

static bool is_told_alone(const struct core_terms *terms)
{
    return terms->tenants == 1 && terms->budget.siblings <= 1;
}

/* True: nothing else should be on the device, not even what a lower priority is granted. */
static bool is_surely_alone(const struct core_terms *terms)
{
    return is_told_alone(terms) && !terms->lower;
}

bool core_may_probe(const struct core_device *device, const struct core_terms *terms)
{
    return terms->budget.enforced && !device->presence.implausible &&
           (!is_told_alone(terms) || (is_surely_alone(terms) && !device->presence.alone_judged)) &&
           __atomic_load_n(&device->several_streams, __ATOMIC_RELAXED) == 0;
}

/* A neighbor is seen to take the device where work takes far longer beside others than it took alone. */
static enum presence_company company_of(const struct core_device *device, const struct core_terms *terms)
{
    if (is_surely_alone(terms)) return PRESENCE_NO_OTHER;
    bool stretched =
        device->alone_ns >= STRETCH_LEAST_NS && device->beside_ns >= device->alone_ns + device->alone_ns / 2;
    return terms->tenants > 1 && stretched ? PRESENCE_BUSY_OTHER : PRESENCE_UNKNOWN;
}

/* Note how long the sample took beside others or alone, by the page. */
static void compare_with_alone(struct core_device *device, struct estimate *estimate, uint64_t elapsed,
                               const struct core_terms *terms)
{
    if (is_told_alone(terms)) {
        estimate->alone_ns =
            estimate->alone_ns > 0 ? (estimate->alone_ns * (ALONE_WEIGHT - 1) + elapsed) / ALONE_WEIGHT : elapsed;
        device->beside_ns = device->alone_ns = 0;
    } else if (terms->tenants > 1 && estimate->alone_ns > 0) {
        device->beside_ns += elapsed;
        device->alone_ns += estimate->alone_ns;
        if (device->alone_ns < STRETCH_MOST_NS) return;
        device->beside_ns /= 2;
        device->alone_ns /= 2;
    }
}

bool core_verdict(struct core_device *device, uint64_t now_ns, const struct core_terms *terms, bool answered)
{
    struct presence *presence = &device->presence;
    presence_verdict(presence, now_ns, answered, estimate_random(&device->estimates), company_of(device, terms));
    return presence->implausible;
}

static uint32_t contenders(const struct core_terms *terms)
{
    uint32_t tenants = terms->tenants > 0 ? terms->tenants : 2;
    return tenants + (terms->budget.siblings > 0 ? terms->budget.siblings - 1 : 0);
}

void core_away(struct core_device *device, uint64_t now_ns, const struct core_terms *terms, uint64_t away_ns)
{
    presence_away(&device->presence, now_ns, away_ns, contenders(terms) - 1);
}

uint32_t core_present(const struct core_device *device, uint64_t now_ns)
{
    bool one_stream = __atomic_load_n(&device->several_streams, __ATOMIC_RELAXED) == 0;
    return one_stream ? presence_part(&device->presence, now_ns) : 0;
}

/* Of many siblings each is on the device so seldom that so few probes show little. */
static uint32_t present_part(const struct core_terms *terms)
{
    return terms->budget.siblings <= SIBLINGS_MOST ? terms->present : 0;
}

/* Overlap cannot be seen to be more than it is but by chance; neighbours and a slow host make it seem less. */
static void learn_overlap(struct core_device *device, const struct core_terms *terms, uint32_t fresh)
{
    device->overlaps[device->phases++ % CORE_PHASES] = fresh;
    uint32_t known = device->phases < CORE_PHASES ? device->phases : CORE_PHASES;
    uint32_t best = fresh;
    if (contenders(terms) > 1)
        for (uint32_t i = 0; i < known; i++)
            best = device->overlaps[i] < best ? device->overlaps[i] : best;
    uint32_t overlap = device->phases == 1 ? best : (device->overlap + best) / 2;
    __atomic_store_n(&device->overlap, overlap, __ATOMIC_RELAXED);
}

static void finish_phase(struct core_device *device, const struct core_terms *terms)
{
    struct core_phase *phase = &device->phase;
    if (phase->open || phase->running > 0 || phase->charged_ns == 0) return;
    uint64_t cost = phase->charged_ns * CORE_OVERLAP_ONE / device->overlap;
    phase->charged_ns = 0;
    if (phase->lost || cost < PHASE_COST_MIN_NS || phase->last_ns <= phase->first_ns) return;
    uint64_t busy = (uint64_t)(phase->last_ns - phase->first_ns);
    uint64_t overlap = busy >= cost ? CORE_OVERLAP_ONE : busy * CORE_OVERLAP_ONE / cost;
    learn_overlap(device, terms, overlap > OVERLAP_MIN ? (uint32_t)overlap : OVERLAP_MIN);
}

/* The process is about to wait: what was launched since the last wait is a phase. */
static void end_phase(struct core_device *device, const struct core_terms *terms, int64_t credit)
{
    struct core_phase *phase = &device->phase;
    if (!phase->open) return;
    phase->open = false;
    phase->charged_ns = phase->credit_ns > credit && phase->based ? (uint64_t)(phase->credit_ns - credit) : 0;
    finish_phase(device, terms);
}

static bool is_one_stream(const struct core_device *device)
{
    return __atomic_load_n(&device->several_streams, __ATOMIC_RELAXED) == 0;
}

/* Device time that was let go and has been launched. */
static uint64_t launched_ns(const struct core_device *device)
{
    int64_t credit = __atomic_load_n(&device->credit_ns, __ATOMIC_RELAXED);
    uint64_t unspent = credit > 0 ? (uint64_t)credit : 0;
    return device->let_go_ns > unspent ? device->let_go_ns - unspent : 0;
}

static uint64_t within(uint64_t value, uint64_t least, uint64_t most)
{
    return value < least ? least : value > most ? most : value;
}

/* Half of what may be queued where the device cannot be watched closely: no more launches, at the mean price of the last
   ones, than can do harm if all of them have become longer. */
static uint64_t wide_part(struct core_device *device, const struct core_terms *terms)
{
    uint64_t spent = launched_ns(device);
    uint64_t launches = terms->launches - device->launches;
    if (device->wide_ns == 0) device->wide_ns = CORE_AHEAD_NS / 2;
    if (launches < CORE_AHEAD_LAUNCHES / 2) return device->wide_ns;
    uint64_t fresh = spent > device->spent_ns ? (spent - device->spent_ns) / launches * CORE_AHEAD_LAUNCHES : 0;
    device->wide_ns = within(fresh, CORE_AHEAD_MIN_NS, CORE_AHEAD_NS) / 2;
    device->spent_ns = spent;
    device->launches = terms->launches;
    return device->wide_ns;
}

static bool is_alone(const struct core_terms *terms)
{
    return terms->budget.siblings <= 1 && (terms->tenants == 1 || terms->present >= PRESENCE_ALONE);
}

static void plan_part(struct core_device *device, const struct core_terms *terms)
{
    uint64_t wide = wide_part(device, terms);
    bool watched = is_alone(terms) || (terms->rival && terms->budget.siblings <= 1);
    device->close = is_one_stream(device) && watched;
    device->part_ns = device->close ? within(LATE_RATIO * device->late_ns, CORE_PART_NS, CORE_PART_MAX_NS) : wide;
    if (terms->rival && device->part_ns > CORE_RIVAL_PART_NS) device->part_ns = CORE_RIVAL_PART_NS;
}

/* From when on the device is so near its end of what was let go that the next part should follow. */
static uint64_t part_due(const struct core_device *device, int64_t cost)
{
    uint64_t least = device->part_ns > (uint64_t)cost ? device->part_ns : (uint64_t)cost;
    return device->busy_until_ns > least ? device->busy_until_ns - least : 0;
}

static uint64_t later_of(uint64_t one, uint64_t other)
{
    return one > other ? one : other;
}

/* When the queue is short enough for this launch, or it has waited long enough. */
static uint64_t queue_due(const struct core_device *device, const struct core_terms *terms,
                          const struct core_admission *admission)
{
    uint64_t latest = admission->part_due_ns + CORE_HELD_MAX_NS;
    uint64_t due = terms->budget.enforced ? part_due(device, admission->cost_ns) : 0;
    return due < latest ? due : latest;
}

/* Let go of a part of what was drawn. If the device is not where it should be and the launch goes only because it has waited
   long enough, it goes alone; next time twice as much, for what waits may be what lets the device go on. */
static void let_go(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                   struct core_admission *admission)
{
    int64_t cost = admission->cost_ns;
    plan_part(device, terms);
    int64_t part = (int64_t)device->part_ns;
    bool behind = is_one_stream(device) && part_due(device, cost) > now_ns;
    if (behind) part = cost << device->held;
    if (behind && device->held < HELD_MOST) device->held++;
    if (part < cost) part = cost;
    if (part > device->reserve_ns || !terms->budget.enforced) part = device->reserve_ns;
    uint64_t busy = device->busy_until_ns > now_ns ? device->busy_until_ns : now_ns;
    device->reserve_ns -= part;
    /* Borrowed time is not measured, and prices may be far too high when they begin to matter. */
    device->busy_until_ns = terms->budget.enforced ? busy + (uint64_t)part : now_ns;
    device->let_go_ns += (uint64_t)part;
    move_credit(device, part - cost);
    device->phase.credit_ns += cost;
    admission->marks = terms->budget.enforced && device->close;
}

void core_woke(struct core_device *device, uint64_t late_ns)
{
    if (late_ns > LATE_MOST_NS) late_ns = LATE_MOST_NS;
    device->late_ns = (device->late_ns * (LATE_WEIGHT - 1) + late_ns) / LATE_WEIGHT;
}

static void draw(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                 struct core_admission *admission)
{
    move_credit(device, device->reserve_ns);
    device->reserve_ns = 0;
    int64_t credit = __atomic_load_n(&device->credit_ns, __ATOMIC_RELAXED);
    int64_t needed = admission->cost_ns > credit ? admission->cost_ns - credit : 0;
    int64_t quantum = (int64_t)budget_quantum(&terms->budget);
    if (device->began_ns == 0) device->began_ns = now_ns;
    if (now_ns - device->began_ns < CORE_ROSTER_ROUND_NS && quantum > (int64_t)CORE_FIRST_NS)
        quantum = (int64_t)CORE_FIRST_NS;
    bool alone = terms->tenants == 1 || terms->present >= PRESENCE_ALONE;
    bool wanders = !alone && admission->cost_ns >= (int64_t)CORE_LONG_NS;
    if (wanders) quantum = quantum / 2 + (int64_t)(estimate_random(&device->estimates) % (uint64_t)quantum);
    int64_t amount = needed > quantum ? needed : quantum;
    admission->shift_ns = wanders ? estimate_random(&device->estimates) % CORE_SHIFT_NS : 0;
    budget_draw(&device->budget, now_ns, &terms->budget, (uint64_t)amount, &admission->draw);
    device->charged_ns += (uint64_t)amount;
}

uint64_t core_begin(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                    struct estimate *estimate, struct core_admission *admission)
{
    int64_t credit = give_excess_back(device, now_ns, terms, settle(device, now_ns, terms));
    admission->waits = false;
    admission->reserved = false;
    admission->blind = false;
    admission->marks = false;
    admission->shift_ns = 0;
    admission->part_due_ns = now_ns;
    admission->unknown = estimate->samples == 0;
    uint64_t cost = admission->unknown ? estimate_unknown(estimate) : core_cost(device, estimate->charge_ns);
    admission->cost_ns = (int64_t)cost;
    if (credit >= (int64_t)cost && core_spend(device, cost)) return 0;
    if (device->reserve_ns >= (int64_t)cost) {
        admission->reserved = true;
        admission->part_due_ns = part_due(device, admission->cost_ns);
        if (admission->part_due_ns < now_ns) admission->part_due_ns = now_ns;
        return core_ask(device, now_ns, terms, admission);
    }
    admission->blind = admission->unknown && estimate->unknown_launches > BLIND_LAUNCHES && terms->budget.enforced;
    if (!admission->blind) draw(device, now_ns, terms, admission);
    return core_ask(device, now_ns, terms, admission);
}

uint64_t core_ask(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                  struct core_admission *admission)
{
    uint64_t due = 0;
    if (admission->blind && now_ns >= admission->part_due_ns + CORE_HELD_MAX_NS) {
        admission->blind = false;
        draw(device, now_ns, terms, admission);
    }
    if (admission->blind) {
        due = admission->part_due_ns + CORE_HELD_MAX_NS;
    } else if (admission->reserved) {
        due = queue_due(device, terms, admission);
    } else {
        due = budget_due(&admission->draw, now_ns, &terms->budget);
        if (due > now_ns && terms->budget.enforced && !admission->waits) {
            admission->waits = true;
            end_phase(device, terms, __atomic_load_n(&device->credit_ns, __ATOMIC_RELAXED));
        }
        if (admission->waits) due += admission->shift_ns;
        if (terms->rival) due = later_of(due, queue_due(device, terms, admission));
    }
    if (due > now_ns) return due;
    if (!admission->reserved) device->reserve_ns += (int64_t)admission->draw.device_ns;
    let_go(device, now_ns, terms, admission);
    return 0;
}

void core_withdraw(struct core_device *device, uint64_t now_ns, const struct core_terms *terms,
                   struct core_admission *admission, struct estimate *estimate)
{
    if (!admission->reserved && !admission->blind) {
        uint64_t drawn = admission->draw.device_ns;
        budget_refund(&device->budget, now_ns, &terms->budget, drawn);
        device->charged_ns -= drawn < device->charged_ns ? drawn : device->charged_ns;
    }
    /* The launches before this one were settled with it, as if it had been made. */
    device->owed_ns -= (int64_t)core_cost(device, estimate->charge_ns) - admission->cost_ns;
}

bool core_begin_phase(struct core_device *device, uint64_t now_ns, const void *stream,
                      const struct core_admission *admission)
{
    struct core_phase *phase = &device->phase;
    if (phase->open || phase->running > 0 || now_ns - device->phase_since_ns < CORE_PHASE_EVERY_NS) return false;
    device->phase_since_ns = now_ns;
    bool several = __atomic_exchange_n(&device->several_streams, 0, __ATOMIC_RELAXED) != 0;
    __atomic_store_n(&device->stream, stream, __ATOMIC_RELAXED);
    if (!several) {
        __atomic_store_n(&device->overlap, CORE_OVERLAP_ONE, __ATOMIC_RELAXED);
        device->phases = 0;
        return false;
    }
    *phase = (struct core_phase){.open = true};
    phase->credit_ns = __atomic_load_n(&device->credit_ns, __ATOMIC_RELAXED) + admission->cost_ns;
    return true;
}

void core_sampled(struct core_device *device, struct core_sample *sample, struct estimate *estimate,
                  uint64_t charged_ns, bool first, const void *stream, uint64_t now_ns)
{
    sample->estimate = estimate;
    sample->generation = estimate->generation;
    sample->epoch = estimate->epoch;
    uint32_t weight = __atomic_load_n(&estimate->weight, __ATOMIC_RELAXED);
    sample->weight = weight > 0 && !first ? weight : 1;
    sample->charged_ns = charged_ns;
    sample->first = first;
    sample->launched_ns = now_ns;
    sample->running_since_ns = 0;
    sample->let_go_ns = launched_ns(device);
    sample->cost_ns = charged_ns;
    sample->stream = stream;
    struct core_phase *phase = &device->phase;
    sample->in_phase = phase->open;
    if (phase->open) {
        phase->based = true;
        phase->running++;
    }
}

void core_missed(struct core_device *device)
{
    if (device->phase.open) device->phase.lost = true;
}

static void owe(struct core_device *device, const struct core_sample *sample, int64_t owed)
{
    device->owed_ns += owed;
    if (sample->launched_ns < device->owed_since_ns) device->owed_since_ns = sample->launched_ns;
}

/* How much was launched after it. */
static uint64_t after(const struct core_device *device, const struct core_sample *sample)
{
    uint64_t launched = launched_ns(device);
    return launched > sample->let_go_ns ? launched - sample->let_go_ns : 0;
}

void core_pends(struct core_device *device, const struct core_sample *sample, uint64_t now_ns)
{
    /* On several streams it may wait for something else than the device. */
    if (!is_one_stream(device)) return;
    uint64_t least = after(device, sample);
    uint64_t late = 0;
    if (!device->close) /* neighbours make it be behind */
        late = device->part_ns / 2;
    else if (sample->running_since_ns == 0)
        least += sample->cost_ns + device->part_ns / 4;
    if (now_ns + least > device->busy_until_ns + late) device->busy_until_ns = now_ns + least - late;
}

/* The device has come to it, and so has no more before it than what was launched after it. */
static void reached(struct core_device *device, const struct core_sample *sample, uint64_t now_ns)
{
    device->held = 0;
    if (!device->close) return;
    uint64_t most = now_ns + after(device, sample);
    int64_t credit = __atomic_load_n(&device->credit_ns, __ATOMIC_RELAXED);
    if (credit > 0) most += (uint64_t)credit;
    if (most < device->busy_until_ns) device->busy_until_ns = most;
}

void core_runs(struct core_device *device, struct core_sample *sample, uint64_t now_ns, const struct core_terms *terms)
{
    if (sample->running_since_ns == 0) {
        sample->running_since_ns = now_ns;
        device->held = 0;
    }
    uint64_t running = now_ns - sample->running_since_ns;
    uint64_t least = running / contenders(terms);
    uint32_t present = present_part(terms);
    if (present > 0 && running * present / PRESENCE_ONE < least) least = running * present / PRESENCE_ONE;
    least = core_cost(device, least);
    if (sample->first || least <= sample->charged_ns) return;
    if (least > CORE_DOUBT_NS && least / CORE_DOUBT_RATIO > sample->charged_ns &&
        sample->generation == sample->estimate->generation && sample->epoch == sample->estimate->epoch)
        estimate_doubt(sample->estimate, running);
    owe(device, sample, (int64_t)(least - sample->charged_ns));
    sample->charged_ns = least;
}

static void leave_phase(struct core_device *device, const struct core_sample *sample, const struct core_terms *terms)
{
    if (!sample->in_phase) return;
    device->phase.running--;
    finish_phase(device, terms);
}

void core_lost(struct core_device *device, struct core_sample *sample, const struct core_terms *terms)
{
    if (sample->in_phase) device->phase.lost = true;
    leave_phase(device, sample, terms);
    struct estimate *estimate = sample->estimate;
    if (sample->generation == estimate->generation && estimate_failed(estimate, device->mean_ns))
        owe(device, sample, estimate_unknown_owed(estimate, device->overlap));
}

/* By how much the sample was charged too little; where the work has changed unnoticed, also the launches it stands for. */
static int64_t correction(struct estimate *estimate, const struct core_sample *sample, uint64_t elapsed, uint64_t worth)
{
    int64_t own = (int64_t)worth - (int64_t)sample->charged_ns;
    if (sample->epoch != estimate->epoch) {
        own = own * sample->weight + estimate->strange_owed_ns;
        estimate->strange_owed_ns = 0;
    } else if (estimate->strange > 0)
        estimate->strange_owed_ns += ((int64_t)elapsed - (int64_t)worth) * sample->weight;
    else
        estimate->strange_owed_ns = 0;
    return own;
}

/* How many siblings had work on the device at a time: a process has as long as its launches take. */
static uint32_t crowd(const struct core_device *device, const struct core_terms *terms, uint64_t now_ns)
{
    uint64_t span = (now_ns - device->began_ns) / ESTIMATE_CROWD_ONE + 1;
    uint64_t part = device->elapsed_ns / span; /* of the time, in 1/1024 */
    if (part > ESTIMATE_CROWD_ONE) part = ESTIMATE_CROWD_ONE;
    return (uint32_t)part * (terms->budget.siblings > 0 ? terms->budget.siblings : 1);
}

void core_ended(struct core_device *device, struct core_sample *sample, uint64_t now_ns, int64_t start_ns,
                int64_t end_ns, const struct core_terms *terms)
{
    struct estimate *estimate = sample->estimate;
    reached(device, sample, now_ns);
    if (sample->in_phase) {
        struct core_phase *phase = &device->phase;
        bool only = phase->first_ns == 0 && phase->last_ns == 0;
        phase->first_ns = only || start_ns < phase->first_ns ? start_ns : phase->first_ns;
        phase->last_ns = only || end_ns > phase->last_ns ? end_ns : phase->last_ns;
    }
    leave_phase(device, sample, terms);
    if (sample->generation != estimate->generation) return;
    bool known = estimate->samples > 0;
    uint64_t elapsed = end_ns > start_ns ? (uint64_t)(end_ns - start_ns) : 0;
    if (elapsed < ESTIMATE_MAX_NS) compare_with_alone(device, estimate, elapsed, terms);
    device->elapsed_ns += (elapsed < ESTIMATE_MAX_NS ? elapsed : ESTIMATE_MAX_NS) * sample->weight;
    uint64_t worth =
        core_cost(device, estimate_sample(estimate, elapsed, contenders(terms), present_part(terms),
                                          crowd(device, terms, now_ns), presence_slice(&device->presence)));
    uint64_t mean = device->mean_ns > 0 ? device->mean_ns : worth;
    device->mean_ns = (mean * (MEAN_WEIGHT - 1) + worth) / MEAN_WEIGHT;
    if (!known) owe(device, sample, estimate_unknown_owed(estimate, device->overlap));
    if (!sample->first) owe(device, sample, correction(estimate, sample, elapsed, worth));
}
