/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules of budget, estimates and priority page, one by one, in virtual time.
 *
 *     rules            the names of all rules
 *     rules NAME PATH  checks one; PATH is a file that it may write; exit code 1 and a line per broken claim on stderr
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bell.h"
#include "compute_core.h"
#include "priority.h"

#define MS BUDGET_NS_PER_MS
#define NOW (UINT64_C(1000000) * MS)

static int broken;

#define CLAIM(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                                    \
            broken = 1;                                                                                                \
        }                                                                                                              \
    } while (0)

static struct budget_terms at(uint32_t pct)
{
    return (struct budget_terms){
        .pct = pct, .siblings = 1, .burst_ns = BUDGET_BURST_NS, .period_ns = BUDGET_PERIOD_NS, .enforced = true};
}

static bool is_near(uint64_t value, uint64_t wanted)
{
    return value + 1000 > wanted && value < wanted + 1000;
}

static uint64_t due_of(struct budget *budget, uint64_t now, uint32_t pct, uint64_t device_ns)
{
    struct budget_terms terms = at(pct);
    struct budget_draw draw;
    budget_draw(budget, now, &terms, device_ns, &draw);
    return budget_due(&draw, now, &terms);
}

static void share_is_kept(void)
{
    uint64_t word = 0;
    struct budget budget = {.word = &word};
    uint64_t now = NOW;
    uint64_t used = 0;
    while (now < NOW + 10000 * MS) {
        uint64_t due = due_of(&budget, now, 25, 3 * MS);
        now = due > now ? due : now;
        used += 3 * MS;
    }
    CLAIM(used > 2500 * MS && used < 2530 * MS);
}

static void burst_is_fixed(void)
{
    uint64_t word = 0;
    struct budget budget = {.word = &word};
    due_of(&budget, NOW, 50, MS);
    uint64_t later = NOW + 3600000 * MS;
    uint64_t used = 0;
    while (due_of(&budget, later, 50, MS) <= later)
        used += MS;
    CLAIM(used >= BUDGET_BURST_NS / 2 && used <= BUDGET_BURST_NS / 2 + 2 * MS);
}

static void later_draws_start_later(void)
{
    uint64_t word = 0;
    struct budget one = {.word = &word};
    struct budget two = {.word = &word};
    due_of(&one, NOW, 50, 100 * MS);
    uint64_t first = due_of(&two, NOW, 50, 10 * MS);
    uint64_t second = due_of(&one, NOW, 50, 10 * MS);
    uint64_t third = due_of(&two, NOW, 50, 10 * MS);
    CLAIM(first > NOW);
    CLAIM(is_near(second, first + 20 * MS) || second > first + 20 * MS);
    CLAIM(third > second);
}

static void new_limit_rescales_the_debt(void)
{
    uint64_t word = 0;
    struct budget budget = {.word = &word};
    struct budget_terms small = at(10);
    struct budget_terms large = at(50);
    struct budget_draw draw;
    due_of(&budget, NOW, 10, 100 * MS);
    budget_draw(&budget, NOW, &small, MS, &draw);
    uint64_t before = budget_due(&draw, NOW, &small) - NOW;
    uint64_t after = budget_due(&draw, NOW, &large) - NOW;
    CLAIM(is_near(after, before / 5));
    struct budget other = {.word = &word};
    uint64_t others = due_of(&other, NOW, 50, MS) - NOW;
    CLAIM(is_near(others, after + 2 * MS));
}

static void hostile_words_neither_block_nor_free(void)
{
    uint64_t words[] = {0, 1, UINT64_MAX, UINT64_MAX - 127, NOW * 1000, UINT64_C(1) << 63, 127};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        uint64_t word = words[i];
        struct budget budget = {.word = &word};
        uint64_t due = due_of(&budget, NOW, 10, MS);
        CLAIM(due <= NOW + BUDGET_DEBT_MAX_NS);
    }
    /* A tenant that keeps setting the word back still has no more than its share. */
    uint64_t word = 0;
    struct budget budget = {.word = &word};
    uint64_t now = NOW;
    uint64_t used = 0;
    while (now < NOW + 10000 * MS) {
        word = 0;
        uint64_t due = due_of(&budget, now, 20, 2 * MS);
        now = due > now ? due : now;
        used += 2 * MS;
    }
    CLAIM(used < 2030 * MS);
}

static void lent_time_is_not_owed(void)
{
    uint64_t word = 0;
    struct budget budget = {.word = &word};
    struct budget_terms lent = at(100);
    lent.enforced = false;
    struct budget_draw draw;
    for (int i = 0; i < 1000; i++) {
        budget_draw(&budget, NOW, &lent, 100 * MS, &draw);
        CLAIM(budget_due(&draw, NOW, &lent) <= NOW);
    }
    CLAIM(due_of(&budget, NOW, 10, MS) <= NOW);
}

static void debt_is_no_more_than_the_device_can_do(void)
{
    uint64_t word = 0;
    struct budget_terms terms = at(25);
    for (int i = 0; i < 50; i++) {
        struct budget budget = {.word = &word};
        budget_owe(&budget, NOW, &terms, 1000 * MS, NOW - 200 * MS);
    }
    uint64_t ahead = (word & ~UINT64_C(127)) - NOW;
    CLAIM(ahead >= 600 * MS && ahead <= 1000 * MS);
    word = 0;
    struct budget lone = {.word = &word};
    CLAIM(is_near(budget_owe(&lone, NOW, &terms, 5000 * MS, NOW - 20000 * MS), 5000 * MS));
}

static void refund_undoes_a_draw(void)
{
    uint64_t word = 0;
    struct budget budget = {.word = &word};
    struct budget_terms terms = at(30);
    due_of(&budget, NOW, 30, 100 * MS);
    uint64_t before = word & ~UINT64_C(127);
    due_of(&budget, NOW, 30, 10 * MS);
    budget_refund(&budget, NOW, &terms, 10 * MS);
    CLAIM(is_near(word & ~UINT64_C(127), before));
}

static struct estimates all;

static struct estimate *fresh(const void *function)
{
    return estimate_add(&all, function, estimate_shape(1000, 256, false));
}

static void slices_do_not_count(void)
{
    struct estimate *estimate = fresh(&broken);
    for (int i = 0; i < 2000; i++)
        estimate_sample(estimate, i % 200 == 7 ? 2020000 : 20000, 2, 0, ESTIMATE_CROWD_ONE, PRESENCE_SLICE_NS);
    CLAIM(estimate->charge_ns >= 20000 && estimate->charge_ns < 24000);
}

static void varying_work_counts_in_full_when_alone(void)
{
    struct estimate *estimate = fresh(&broken);
    for (int i = 0; i < 2000; i++)
        estimate_sample(estimate, i % 2 ? 1000000 : 9000000, 1, 0, ESTIMATE_CROWD_ONE, PRESENCE_SLICE_NS);
    CLAIM(estimate->charge_ns > 4000000 && estimate->charge_ns < 6000000);
}

static void varying_work_cannot_hide_behind_its_shortest(void)
{
    struct estimate *estimate = fresh(&broken);
    for (int i = 0; i < 2000; i++)
        estimate_sample(estimate, i % 10 ? 9000000 : 100000, 2, 0, ESTIMATE_CROWD_ONE, PRESENCE_SLICE_NS);
    CLAIM(estimate->charge_ns > 3500000);
}

static void rare_clean_runs_are_remembered(void)
{
    struct estimate *estimate = fresh(&broken);
    for (int i = 0; i < 400; i++)
        estimate_sample(estimate, i % 60 == 59 ? 20000000 : 38000000, 2, 0, ESTIMATE_CROWD_ONE, PRESENCE_SLICE_NS);
    CLAIM(estimate->charge_ns >= 19000000 && estimate->charge_ns < 26000000);
}

static void change_is_followed(void)
{
    struct estimate *estimate = fresh(&broken);
    for (int i = 0; i < 1000; i++)
        estimate_sample(estimate, 10000, 2, 0, ESTIMATE_CROWD_ONE, PRESENCE_SLICE_NS);
    for (int i = 0; i < 40; i++)
        estimate_sample(estimate, 1000000, 2, 0, ESTIMATE_CROWD_ONE, PRESENCE_SLICE_NS);
    CLAIM(estimate->charge_ns > 900000 && estimate->charge_ns < 1100000);
    for (int i = 0; i < 40; i++)
        estimate_sample(estimate, 10000, 2, 0, ESTIMATE_CROWD_ONE, PRESENCE_SLICE_NS);
    CLAIM(estimate->charge_ns < 20000);
}

static void unknown_work_grows_dear_and_is_settled(void)
{
    struct estimate *estimate = fresh(&broken);
    uint64_t sum = 0;
    uint64_t last = 0;
    for (int i = 0; i < 5; i++) {
        uint64_t charge = estimate_unknown(estimate);
        CLAIM(charge > last);
        sum += charge;
        last = charge;
    }
    estimate_sample(estimate, 1000000, 1, 0, ESTIMATE_CROWD_ONE, PRESENCE_SLICE_NS);
    CLAIM(estimate_unknown_owed(estimate, CORE_OVERLAP_ONE) == 5000000 - (int64_t)sum);
    CLAIM(estimate_unknown_owed(estimate, CORE_OVERLAP_ONE) == 0);
}

static void forgotten_functions_start_anew(void)
{
    struct estimate *estimate = fresh(&broken);
    uint32_t generation = estimate->generation;
    estimate_sample(estimate, 1000000, 1, 0, ESTIMATE_CROWD_ONE, PRESENCE_SLICE_NS);
    estimate_forget(&all, &broken);
    CLAIM(estimate_find(&all, &broken, estimate_shape(1000, 256, false)) == NULL);
    struct estimate *again = fresh(&broken);
    CLAIM(again == estimate && again->samples == 0 && again->generation != generation);
}

static void endless_functions_take_bounded_memory(void)
{
    static char names[2 * ESTIMATE_ENTRIES_MAX];
    for (size_t i = 0; i < sizeof names; i++)
        CLAIM(estimate_add(&all, names + i, 1) != NULL);
    CLAIM(all.entries == ESTIMATE_ENTRIES_MAX);
    CLAIM(estimate_add(&all, names + sizeof names - 1, 1) == &all.crowd);
}

static void shapes_are_told_apart(void)
{
    CLAIM(estimate_shape(1, 256, false) != estimate_shape(2, 256, false));
    CLAIM(estimate_shape(1000, 256, false) != estimate_shape(1300, 256, false));
    CLAIM(estimate_shape(1000, 256, false) != estimate_shape(1000, 512, false));
    CLAIM(estimate_shape(1000, 256, false) == estimate_shape(1010, 256, false));
    CLAIM(estimate_shape(UINT64_MAX, 1024, false) != estimate_shape(1, 1, true));
}

static void samples_are_irregular_and_as_many_as_planned(void)
{
    struct estimate *estimate = fresh(&broken);
    for (int i = 0; i < 1000; i++)
        estimate_sample(estimate, 10000, 1, 0, ESTIMATE_CROWD_ONE, PRESENCE_SLICE_NS);
    int sampled = 0;
    int steps[2] = {0, 0};
    int last = 0;
    for (int i = 0; i < 100000; i++)
        if (estimate_is_sampled(&all, estimate)) {
            steps[(i - last) % 2]++;
            last = i;
            sampled++;
        }
    CLAIM(sampled > 800 && sampled < 1250); /* 10 us each, 1 ms between samples */
    CLAIM(steps[0] > 200 && steps[1] > 200);
}

static void processes_are_counted_by_round(void)
{
    uint64_t roster = 0;
    uint32_t own[3] = {0, 0, 0};
    for (int i = 0; i < 3; i++)
        core_siblings(&roster, &own[i], NOW);
    CLAIM(core_siblings(&roster, &own[0], NOW) == 3);
    CLAIM(core_siblings(&roster, &own[0], NOW + CORE_ROSTER_ROUND_NS) == 3);
    CLAIM(core_siblings(&roster, &own[0], NOW + 3 * CORE_ROSTER_ROUND_NS) == 1);
    roster = UINT64_MAX;
    CLAIM(core_siblings(&roster, &own[0], NOW + 9 * CORE_ROSTER_ROUND_NS) >= 1);
}

static void little_is_queued_until_the_device_is_seen_to_begin(void)
{
    static struct core_device device;
    uint64_t word = 0;
    core_init(&device, &word);
    core_note_stream(&device, &word);
    struct core_terms terms = {.budget = at(50), .tenants = 1};
    struct estimate *estimate = estimate_add(&device.estimates, &broken, 1);
    for (int i = 0; i < 20; i++)
        estimate_sample(estimate, 10000, 1, 0, ESTIMATE_CROWD_ONE, PRESENCE_SLICE_NS);
    struct core_admission admission;
    struct core_sample first;
    int launched = 0;
    uint64_t due = core_begin(&device, NOW, &terms, estimate, &admission);
    CLAIM(due == 0 && admission.marks);
    core_sampled(&device, &first, estimate, 10000, false, &word, NOW);
    for (; due == 0 && launched < 10000; launched++) {
        core_pends(&device, &first, NOW);
        due = core_begin(&device, NOW, &terms, estimate, &admission);
    }
    CLAIM(launched >= (int)(CORE_PART_NS / 10000) && launched <= (int)(2 * CORE_PART_NS / 10000));
    uint64_t now = NOW;
    while (due > now) {
        now = due;
        core_pends(&device, &first, now);
        due = core_ask(&device, now, &terms, &admission);
    }
    CLAIM(now > NOW + CORE_HELD_MAX_NS / 2 && now <= NOW + CORE_HELD_MAX_NS + MS);
    core_pends(&device, &first, now);
    CLAIM(core_begin(&device, now, &terms, estimate, &admission) > now); /* that one alone has gone */
    core_runs(&device, &first, now, &terms);
    core_ended(&device, &first, now, 0, 10000, &terms);
    CLAIM(core_ask(&device, now + MS, &terms, &admission) == 0);
}

/* Device time that goes at once, without a sign of life from the device. */
static uint64_t queued_beside_a_rival(uint64_t kernel_ns, int streams, bool rival)
{
    static struct core_device device;
    uint64_t word = 0;
    core_init(&device, &word);
    struct core_terms terms = {.budget = at(100), .tenants = 2, .rival = rival};
    terms.budget.lead_ns = terms.budget.period_ns;
    struct estimate *estimate = estimate_add(&device.estimates, &broken, 1);
    for (int i = 0; i < 20; i++)
        estimate_sample(estimate, kernel_ns, 1, 0, ESTIMATE_CROWD_ONE, PRESENCE_SLICE_NS);
    struct core_admission admission;
    uint64_t queued = 0;
    for (int i = 0; i < 10000; i++) {
        core_note_stream(&device, (char *)&device + 1 + i % streams);
        if (core_begin(&device, NOW, &terms, estimate, &admission) > 0) break;
        queued += kernel_ns;
    }
    return queued;
}

static void little_is_queued_beside_a_higher_priority(void)
{
    for (int streams = 1; streams <= 2; streams++) {
        CLAIM(queued_beside_a_rival(20000, streams, true) <= 2 * CORE_RIVAL_PART_NS);
        CLAIM(queued_beside_a_rival(100000, streams, true) <= 2 * CORE_RIVAL_PART_NS + 100000);
        CLAIM(queued_beside_a_rival(5 * MS, streams, true) <= 10 * MS);
        CLAIM(queued_beside_a_rival(100000, streams, false) >= CORE_AHEAD_MIN_NS / 2);
    }
}

static void hold_follows_the_gaps(void)
{
    struct bell_gaps gaps = {0};
    CLAIM(bell_hold(&gaps, NOW) == BELL_HOLD_LEAST_NS);
    for (int i = 0; i < 40; i++)
        bell_note_gap(&gaps, NOW, 2 * MS);
    bell_note_gap(&gaps, NOW, 8 * MS);
    bell_note_gap(&gaps, NOW, 7 * MS);
    CLAIM(bell_hold(&gaps, NOW) == 8 * MS); /* two of 32 are beyond the percentile */
    bell_note_gap(&gaps, NOW, 6 * MS);
    CLAIM(bell_hold(&gaps, NOW) == 24 * MS);
    bell_note_gap(&gaps, NOW, BELL_GAP_MOST_NS + 1);
    CLAIM(bell_hold(&gaps, NOW) == 24 * MS);
    CLAIM(bell_hold(&gaps, NOW + BELL_GAP_KEPT_NS + 1) == BELL_HOLD_LEAST_NS);
}

/* After so many probes, of which `seen` in ten were answered at once. */
static struct presence after_probes(int probes, int seen, enum presence_company company)
{
    struct presence presence = {0};
    uint64_t now = NOW;
    for (int i = 0; i < probes; i++) {
        presence_posted(&presence, now);
        now += MS;
        presence_verdict(&presence, presence.posted_ns + PRESENCE_VERDICT_NS, i % 10 < seen, 0, company);
    }
    return presence;
}

static void implausible_answers_are_not_used(void)
{
    CLAIM(after_probes(PRESENCE_JUDGED, 9, PRESENCE_NO_OTHER).implausible);
    CLAIM(!after_probes(PRESENCE_JUDGED - 1, 9, PRESENCE_NO_OTHER).implausible);
    CLAIM(!after_probes(4 * PRESENCE_JUDGED, 10, PRESENCE_NO_OTHER).implausible);
    CLAIM(after_probes(PRESENCE_JUDGED, 10, PRESENCE_BUSY_OTHER).implausible);
    CLAIM(!after_probes(4 * PRESENCE_JUDGED, 8, PRESENCE_BUSY_OTHER).implausible);
    CLAIM(!after_probes(4 * PRESENCE_JUDGED, 3, PRESENCE_UNKNOWN).implausible);
    CLAIM(!after_probes(4 * PRESENCE_JUDGED, 10, PRESENCE_UNKNOWN).implausible);
    struct presence presence = after_probes(4 * PRESENCE_JUDGED, 10, PRESENCE_BUSY_OTHER);
    CLAIM(presence_part(&presence, presence.last_ns) == 0);
    presence.implausible = false;
    CLAIM(presence_part(&presence, presence.last_ns) == PRESENCE_ONE);
    presence = after_probes(4 * PRESENCE_JUDGED, 10, PRESENCE_NO_OTHER); /* shows nothing of the next neighbor */
    CLAIM(presence_part(&presence, NOW + MS) == 0);
}

static void slice_is_learned_from_late_answers(void)
{
    struct presence presence = {.probes = PRESENCE_MIN, .seen = PRESENCE_MIN / 2, .last_ns = NOW};
    for (uint64_t i = 1; i < PRESENCE_LATES_LEAST; i++)
        presence_away(&presence, NOW, i * 100000, 1);
    CLAIM(presence_slice(&presence) == PRESENCE_SLICE_NS);
    presence_away(&presence, NOW, 1000000, 1);
    CLAIM(presence_slice(&presence) == 1000000);
    presence_away(&presence, NOW, 2400000, 2); /* of two contexts */
    CLAIM(presence_slice(&presence) == 1200000);
    presence_away(&presence, NOW, MS * 100, 1);
    CLAIM(presence_slice(&presence) == PRESENCE_SLICE_MOST_NS);
    for (int i = 0; i < PRESENCE_LATES; i++)
        presence_away(&presence, NOW, 1, 1);
    CLAIM(presence_slice(&presence) == PRESENCE_SLICE_LEAST_NS);
    presence.seen = 0; /* probes wait for the work, which the tenant controls */
    presence_away(&presence, NOW, 3000000, 1);
    CLAIM(presence_slice(&presence) == PRESENCE_SLICE_LEAST_NS);
    presence.implausible = true;
    CLAIM(presence_slice(&presence) == PRESENCE_SLICE_NS);
}

static void work_whose_events_fail_costs_the_mean(void)
{
    static struct core_device device;
    uint64_t word = 0;
    core_init(&device, &word);
    struct core_terms terms = {.budget = at(50), .tenants = 1};
    struct estimate *other = estimate_add(&device.estimates, &broken, 1);
    struct estimate *failing = estimate_add(&device.estimates, &device, 1);
    struct core_sample sample;
    for (int i = 0; i < 200; i++) {
        core_sampled(&device, &sample, other, 300000, false, &word, NOW);
        core_ended(&device, &sample, NOW, 0, 300000, &terms);
    }
    for (int i = 0; i < ESTIMATE_FAILURES_MAX; i++) {
        CLAIM(failing->samples == 0);
        uint64_t charged = estimate_unknown(failing);
        core_sampled(&device, &sample, failing, charged, true, &word, NOW);
        core_lost(&device, &sample, &terms);
    }
    CLAIM(failing->samples > 0);
    CLAIM(is_near(failing->charge_ns, 300000));
    CLAIM(failing->unknown_launches == 0);
}

static struct priority_page *new_page(const char *path)
{
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (file < 0 || ftruncate(file, sizeof(struct priority_page)) != 0) abort();
    struct priority_page *page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    page->magic = PRIORITY_MAGIC;
    page->layout = PRIORITY_LAYOUT;
    page->device_bytes = sizeof(struct priority_device);
    page->device_count = 1;
    strcpy(page->devices[0].uuid, "GPU-a");
    page->devices[0].highest_active = 0;
    page->devices[0].active_tenants = 2;
    page->devices[0].lease_until_ns = NOW + MS;
    return page;
}

static void page_holds_while_its_lease_runs(const char *path)
{
    struct priority_page *page = new_page(path);
    const struct priority_page *seen = priority_open(path);
    CLAIM(seen != NULL);
    const struct priority_device *device = priority_device(seen, "GPU-a");
    CLAIM(device != NULL && priority_device(seen, "GPU-b") == NULL && priority_device(seen, "") == NULL);
    struct priority_view view;
    CLAIM(priority_read(device, NOW, &view) && view.highest_active == 0 && view.active_tenants == 2);
    CLAIM(!priority_read(device, NOW + MS, &view));
    CLAIM(priority_may_block(device, 1) && !priority_may_block(device, 0) && !priority_may_block(NULL, 7));
    page->devices[0].sequence = 7; /* a writer that died while writing */
    CLAIM(!priority_read(device, NOW, &view));
    priority_close(seen);
}

static void foreign_pages_are_not_read(const char *path)
{
    struct priority_page *page = new_page(path);
    page->layout = PRIORITY_LAYOUT + 1;
    CLAIM(priority_open(path) == NULL);
    page->layout = PRIORITY_LAYOUT;
    page->magic++;
    CLAIM(priority_open(path) == NULL);
    page->magic--;
    page->device_count = PRIORITY_DEVICES + 1;
    CLAIM(priority_open(path) == NULL);
    page->device_count = 1;
    CLAIM(truncate(path, 100) == 0 && priority_open(path) == NULL);
    CLAIM(priority_open("/nonexistent") == NULL && priority_open("/") == NULL);
}

static const struct {
    const char *name;
    void (*check)(void);
    void (*check_file)(const char *path);
} rules[] = {
#define RULE(name) {#name, name, NULL}
#define RULE_FILE(name) {#name, NULL, name}
    RULE(share_is_kept),
    RULE(burst_is_fixed),
    RULE(later_draws_start_later),
    RULE(new_limit_rescales_the_debt),
    RULE(hostile_words_neither_block_nor_free),
    RULE(lent_time_is_not_owed),
    RULE(debt_is_no_more_than_the_device_can_do),
    RULE(refund_undoes_a_draw),
    RULE(slices_do_not_count),
    RULE(varying_work_counts_in_full_when_alone),
    RULE(varying_work_cannot_hide_behind_its_shortest),
    RULE(rare_clean_runs_are_remembered),
    RULE(change_is_followed),
    RULE(unknown_work_grows_dear_and_is_settled),
    RULE(forgotten_functions_start_anew),
    RULE(endless_functions_take_bounded_memory),
    RULE(shapes_are_told_apart),
    RULE(samples_are_irregular_and_as_many_as_planned),
    RULE(processes_are_counted_by_round),
    RULE(little_is_queued_until_the_device_is_seen_to_begin),
    RULE(little_is_queued_beside_a_higher_priority),
    RULE(implausible_answers_are_not_used),
    RULE(slice_is_learned_from_late_answers),
    RULE(work_whose_events_fail_costs_the_mean),
    RULE(hold_follows_the_gaps),
    RULE_FILE(page_holds_while_its_lease_runs),
    RULE_FILE(foreign_pages_are_not_read),
};

int main(int count, char **words)
{
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        if (count < 3) {
            puts(rules[i].name);
            continue;
        }
        if (strcmp(words[1], rules[i].name) != 0) continue;
        if (rules[i].check != NULL)
            rules[i].check();
        else
            rules[i].check_file(words[2]);
        return broken;
    }
    return count < 3 ? 0 : 2;
}
