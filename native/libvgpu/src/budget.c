/* SPDX-License-Identifier: Apache-2.0 */
/* The budget of device time; see budget.h. Locks taken here: none. Called with hooks active: no. */
#include "budget.h"

#define PCT_MASK UINT64_C(127)

static uint32_t valid_pct(uint64_t pct)
{
    return pct >= 1 && pct <= 100 ? (uint32_t)pct : 100;
}

/* `device_ns` of the device are worth this much time at `pct` percent; saturates at the longest debt. */
static uint64_t at_pct(uint64_t device_ns, uint32_t pct)
{
    uint64_t value = (device_ns < BUDGET_DEBT_MAX_NS ? device_ns : BUDGET_DEBT_MAX_NS) * 100 / pct;
    return value < BUDGET_DEBT_MAX_NS ? value : BUDGET_DEBT_MAX_NS;
}

/* A time up to which is paid at `old_pct`, seen at `pct`: what lies ahead of now is so much longer or shorter. */
static uint64_t rescale(uint64_t until_ns, uint64_t now_ns, uint32_t old_pct, uint32_t pct)
{
    if (until_ns <= now_ns) return until_ns;
    uint64_t ahead = until_ns - now_ns;
    if (ahead > BUDGET_DEBT_MAX_NS) ahead = BUDGET_DEBT_MAX_NS;
    if (old_pct != pct) ahead = ahead * old_pct / pct;
    return now_ns + ahead;
}

static uint64_t no_older(uint64_t until_ns, uint64_t now_ns, uint64_t burst_ns)
{
    uint64_t oldest = now_ns > burst_ns ? now_ns - burst_ns : 0;
    return until_ns > oldest ? until_ns : oldest;
}

static uint64_t packed(uint64_t until_ns, uint32_t pct)
{
    return ((until_ns + PCT_MASK / 2) & ~PCT_MASK) | pct;
}

uint64_t budget_quantum(const struct budget_terms *terms)
{
    uint64_t siblings = terms->siblings > 0 ? terms->siblings : 1;
    uint64_t quantum = terms->period_ns * terms->pct / 100 / siblings;
    return quantum > BUDGET_QUANTUM_MIN_NS ? quantum : BUDGET_QUANTUM_MIN_NS;
}

void budget_draw(struct budget *budget, uint64_t now_ns, const struct budget_terms *terms, uint64_t device_ns,
                 struct budget_draw *draw)
{
    uint64_t cost = at_pct(device_ns, terms->pct);
    uint64_t own = rescale(budget->own_until_ns, now_ns, valid_pct(budget->own_pct), terms->pct);
    own = no_older(own, now_ns, terms->burst_ns);
    uint64_t seen = __atomic_load_n(budget->word, __ATOMIC_RELAXED);
    uint64_t start;
    uint64_t wanted;
    do {
        start = rescale(seen & ~PCT_MASK, now_ns, valid_pct(seen & PCT_MASK), terms->pct);
        start = no_older(start, now_ns, terms->burst_ns);
        /* Unenforced time is not owed later. */
        wanted = terms->enforced ? start + cost : (start < now_ns ? start : now_ns);
    } while (!__atomic_compare_exchange_n(budget->word, &seen, packed(wanted, terms->pct), true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    draw->start_ns = start;
    draw->own_start_ns = own;
    draw->device_ns = device_ns;
    draw->pct = terms->pct;
    budget->own_until_ns = terms->enforced ? own + cost : (own < now_ns ? own : now_ns);
    budget->own_pct = terms->pct;
}

uint64_t budget_due(struct budget_draw *draw, uint64_t now_ns, const struct budget_terms *terms)
{
    if (!terms->enforced) return now_ns;
    draw->start_ns = rescale(draw->start_ns, now_ns, draw->pct, terms->pct);
    draw->own_start_ns = rescale(draw->own_start_ns, now_ns, draw->pct, terms->pct);
    draw->pct = terms->pct;
    uint64_t start = draw->start_ns > draw->own_start_ns ? draw->start_ns : draw->own_start_ns;
    return start > terms->lead_ns ? start - terms->lead_ns : 0;
}

uint64_t budget_owe(struct budget *budget, uint64_t now_ns, const struct budget_terms *terms, uint64_t device_ns,
                    uint64_t since_ns)
{
    if (!terms->enforced) return device_ns;
    uint64_t cost = at_pct(device_ns, terms->pct);
    uint64_t age = now_ns > since_ns ? now_ns - since_ns : 0;
    /* Time that was queued before may lie one period ahead. */
    uint64_t latest = now_ns - age + 2 * BUDGET_PERIOD_NS + at_pct(age, terms->pct);
    uint64_t own = rescale(budget->own_until_ns, now_ns, valid_pct(budget->own_pct), terms->pct);
    own = no_older(own, now_ns, terms->burst_ns);
    budget->own_until_ns = own + cost < latest ? own + cost : own > latest ? own : latest;
    budget->own_pct = terms->pct;
    uint64_t seen = __atomic_load_n(budget->word, __ATOMIC_RELAXED);
    uint64_t start;
    uint64_t until;
    do {
        start = rescale(seen & ~PCT_MASK, now_ns, valid_pct(seen & PCT_MASK), terms->pct);
        start = no_older(start, now_ns, terms->burst_ns);
        until = start + cost < latest ? start + cost : start > latest ? start : latest;
    } while (!__atomic_compare_exchange_n(budget->word, &seen, packed(until, terms->pct), true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return (until - start) * terms->pct / 100;
}

void budget_refund(struct budget *budget, uint64_t now_ns, const struct budget_terms *terms, uint64_t device_ns)
{
    uint64_t value = at_pct(device_ns, terms->pct);
    uint64_t own = rescale(budget->own_until_ns, now_ns, valid_pct(budget->own_pct), terms->pct);
    budget->own_until_ns = own > value ? own - value : 0;
    budget->own_pct = terms->pct;
    uint64_t seen = __atomic_load_n(budget->word, __ATOMIC_RELAXED);
    uint64_t until;
    do {
        until = rescale(seen & ~PCT_MASK, now_ns, valid_pct(seen & PCT_MASK), terms->pct);
        until = until > value ? until - value : 0;
    } while (!__atomic_compare_exchange_n(budget->word, &seen, packed(until, terms->pct), true, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
}
