/* SPDX-License-Identifier: Apache-2.0 */
#include "account_lease.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

/* A line that changes under every look is in use; then any recent value is as good. */
#define READS_AT_MOST 100
#define VERSION_MASK UINT64_C(0x7fffffff) /* of a share word */

static uint64_t version_of(union region_share_word word)
{
    return (uint64_t)word.version_low | (uint64_t)word.version_high << 15;
}

/* A value that a vandal wrote must not make it wrap. */
static uint64_t used_of(union region_share_word word)
{
    return word.leased >= word.slack ? word.leased - word.slack : 0;
}

uint64_t lease_used_by(const struct region_share *share)
{
    union region_share_word seen = {.low = atomic_load8(&share->share.low)};
    for (int attempt = 0;; attempt++) {
        seen.high = atomic_load8(&share->share.high);
        uint64_t again = atomic_load8(&share->share.low);
        if (again == seen.low || attempt == READS_AT_MOST) return used_of(seen);
        seen.low = again;
    }
}

uint64_t lease_refund_slowly(struct region_share *share, uint64_t bytes)
{
    for (;;) {
        union region_share_word seen = {.word = atomic_guess16(&share->share)};
        uint64_t used = used_of(seen);
        uint64_t back = bytes <= used ? bytes : used;
        union region_share_word next = seen;
        if (seen.tight)
            next.leased = (used - back) & LEASE_BYTES_MAX;
        else
            next.slack = (seen.leased - (used - back)) & LEASE_BYTES_MAX;
        if (atomic_swap16(&share->share, seen.word, next.word)) return back;
    }
}

static union region_share_word with_version(union region_share_word word, uint64_t version)
{
    word.version_low = version & 0x7fff;
    word.version_high = (version >> 15) & 0xffff;
    return word;
}

/*
 * Complete the raise that `total` names. Done exactly once, because the share word must have the version before `tag`
 * and then has `tag`. An intent of another version means that its owner has gone on, thus that this one is done.
 */
static void complete(const struct region *region, uint32_t device, union region_total_word total)
{
    if (total.slot >= region->slot_count) return;
    struct region_share *share = lease_share(region, device, (uint32_t)total.slot);
    if (atomic_load8(&share->intent_version) != total.version || total.version == 0) return;
    /* Every load acquires and every store releases, so what is read between two equal versions belongs together. */
    uint64_t lease = atomic_load8(&share->intent_lease);
    uint64_t use = atomic_load8(&share->intent_use);
    uint64_t tag = atomic_load8(&share->intent_tag);
    if (atomic_load8(&share->intent_version) != total.version) return;
    for (;;) {
        union region_share_word seen = {.word = atomic_guess16(&share->share)};
        if (version_of(seen) != ((tag - 1) & VERSION_MASK)) return;
        union region_share_word next = with_version(seen, tag);
        next.slack = (seen.slack + (lease - use)) & LEASE_BYTES_MAX;
        next.leased = (seen.leased + lease) & LEASE_BYTES_MAX;
        if (lease > use) next.tight = 0;
        if (atomic_swap16(&share->share, seen.word, next.word)) return;
    }
}

void lease_complete(const struct region *region, uint32_t device)
{
    union region_total_word total = {.word = atomic_guess16(&region->devices[device].total)};
    complete(region, device, total);
}

static bool swap_total(const struct region *region, uint32_t device, union region_total_word seen, uint64_t sum,
                       uint64_t slot)
{
    union region_total_word next = {.total = sum};
    next.version = seen.version + 1;
    next.slot = slot & REGION_NO_SLOT;
    return atomic_swap16(&region->devices[device].total, seen.word, next.word);
}

/*
 * Announce and do a raise on top of `seen`, whose operation is complete: the new total is `sum`. false: another
 * process was faster, nothing has happened.
 */
static bool raise_to(const struct region *region, uint32_t device, uint32_t slot, union region_total_word seen,
                     uint64_t sum, uint64_t use, uint64_t lease)
{
    struct region_share *share = lease_share(region, device, slot);
    union region_total_word next = {.total = sum};
    next.version = seen.version + 1;
    next.slot = slot & REGION_NO_SLOT;
    union region_share_word own = {.word = atomic_guess16(&share->share)};
    atomic_store8(&share->intent_version, 0);
    atomic_store8(&share->intent_lease, lease);
    atomic_store8(&share->intent_use, use);
    atomic_store8(&share->intent_tag, (version_of(own) + 1) & VERSION_MASK);
    atomic_store8(&share->intent_version, next.version);
    if (!atomic_swap16(&region->devices[device].total, seen.word, next.word)) return false;
    complete(region, device, next);
    return true;
}

static uint64_t sum_of_leases(const struct region *region, uint32_t device)
{
    uint64_t sum = 0;
    uint32_t slots = lease_slots(region);
    for (uint32_t i = 0; i < slots; i++) {
        union region_share_word seen = {.high = atomic_load8(&lease_share(region, device, i)->share.high)};
        sum += seen.leased;
    }
    return sum;
}

void lease_revoke(const struct region *region, uint32_t device, uint32_t slot)
{
    struct region_share *share = lease_share(region, device, slot);
    for (;;) {
        union region_share_word seen = {.word = atomic_guess16(&share->share)};
        union region_share_word next = seen;
        next.leased = used_of(seen) & LEASE_BYTES_MAX;
        next.slack = 0;
        next.tight = 1;
        if (seen.leased == 0) return; /* only a raise can make it more */
        if (next.word == seen.word || atomic_swap16(&share->share, seen.word, next.word)) return;
    }
}

void lease_trim(const struct region *region, uint32_t device, uint32_t slot, uint64_t keep)
{
    struct region_share *share = lease_share(region, device, slot);
    union region_share_word seen = {.word = atomic_guess16(&share->share)};
    union region_share_word next = seen;
    if (seen.slack <= keep) return;
    next.leased = (used_of(seen) + keep) & LEASE_BYTES_MAX;
    next.slack = keep & LEASE_BYTES_MAX;
    (void)atomic_swap16(&share->share, seen.word, next.word); /* in vain: in use, so not to be trimmed */
}

static bool fits(uint64_t sum, uint64_t bytes, uint64_t limit)
{
    return limit == UINT64_MAX || (bytes <= limit && sum <= limit - bytes);
}

/*
 * Three attempts, each dearer than the one before: with the total as it stands; with the total counted again (leases
 * were released); with the slack of all processes revoked.
 *
 * Why the last one refuses rightly: its window begins when W is read and its operation completed. As long as W stays the
 * same no lease grows, and a share once tight can only shrink. When all are tight (one instant, t) the use of all is at
 * least any later sum of leases in the window. The dead among them remain: lease_still_refused.
 */
enum lease_answer lease_request(const struct region *region, uint32_t device, uint32_t slot, uint64_t bytes,
                                uint64_t limit, uint64_t chunk, union region_total_word *seen_by_refusal)
{
    if (!fits(0, bytes, limit) || bytes > LEASE_BYTES_MAX / 2) return LEASE_IMPOSSIBLE;
    if (chunk > LEASE_BYTES_MAX / 4) chunk = LEASE_BYTES_MAX / 4;
    struct region_device *line = &region->devices[device];
    struct region_share *share = lease_share(region, device, slot);
    bool counted = false;
    for (;;) {
        if (lease_charge(share, bytes)) return LEASE_GRANTED;
        union region_share_word own = {.high = atomic_load8(&share->share.high)};
        if (own.leased > LEASE_BYTES_MAX - bytes - chunk) return LEASE_IMPOSSIBLE;
        union region_total_word seen = {.word = atomic_guess16(&line->total)};
        complete(region, device, seen);
        if (fits(seen.total, bytes, limit)) {
            uint64_t lease = fits(seen.total, bytes + chunk, limit) ? bytes + chunk : bytes;
            if (raise_to(region, device, slot, seen, seen.total + lease, bytes, lease)) return LEASE_GRANTED;
            continue;
        }
        if (!counted) {
            uint64_t sum = sum_of_leases(region, device);
            if (sum == seen.total || swap_total(region, device, seen, sum, REGION_NO_SLOT)) counted = true;
            continue;
        }
        uint32_t slots = lease_slots(region);
        for (uint32_t i = 0; i < slots; i++)
            lease_revoke(region, device, i);
        uint64_t sum = sum_of_leases(region, device);
        if (fits(sum, bytes, limit)) {
            if (raise_to(region, device, slot, seen, sum + bytes, bytes, bytes)) return LEASE_GRANTED;
            continue;
        }
        if (atomic_load8(&line->total.high) == seen.high) { /* no two words have the same version */
            *seen_by_refusal = seen;
            return LEASE_REFUSED;
        }
    }
}

/*
 * Still in the window of the refusal. A lease that counts here was not given up since t, so its slot had the same owner
 * when the caller looked, who found it alive: it was alive at t. So the living used at t at least what is added up here.
 */
bool lease_still_refused(const struct region *region, uint32_t device, uint64_t bytes, uint64_t limit,
                         const union region_total_word *seen)
{
    uint64_t sum = sum_of_leases(region, device);
    return !fits(sum, bytes, limit) && atomic_load8(&region->devices[device].total.high) == seen->high;
}

void lease_empty(const struct region *region, uint32_t device, uint32_t slot, const union region_owner *owner)
{
    struct region_share *share = lease_share(region, device, slot);
    /* A raise that the owner has announced is done first; after that no process can begin another one for it. */
    lease_complete(region, device);
    for (;;) {
        union region_share_word seen = {.word = atomic_load16(&share->share)};
        if (seen.slack == 0 && seen.leased == 0) return;
        /* Read before this look at the owner, so it is the owner's; a later owner has changed the version. */
        if (atomic_load16(&region->slots[slot].owner) != owner->word) return;
        union region_share_word next = with_version((union region_share_word){.word = 0}, version_of(seen) + 1);
        if (atomic_swap16(&share->share, seen.word, next.word)) return;
    }
}

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
/* The same with one load per line: every processor with AVX reads 16 aligned bytes in one piece. On an older one a line
   that changes right now may count with its lease of a moment before, which is a figure of that moment. */
static inline __m128i load_word(const struct region_share *share)
{
    __m128i word;
    __asm__ __volatile__("movdqa %1, %0" : "=x"(word) : "m"(share->share));
    return word;
}

static uint64_t sum_of_used(const struct region_share *share, uint32_t slots)
{
    const __m128i mask = _mm_set1_epi64x((long long)LEASE_BYTES_MAX);
    __m128i sums = _mm_setzero_si128();
    __m128i more = _mm_setzero_si128();
    uint32_t i = 0;
    for (; i + 4 <= slots; i += 4) {
        __m128i a = load_word(&share[i]);
        __m128i b = load_word(&share[i + 1]);
        __m128i c = load_word(&share[i + 2]);
        __m128i d = load_word(&share[i + 3]);
        sums = _mm_add_epi64(sums, _mm_add_epi64(_mm_and_si128(a, mask), _mm_and_si128(b, mask)));
        more = _mm_add_epi64(more, _mm_add_epi64(_mm_and_si128(c, mask), _mm_and_si128(d, mask)));
    }
    for (; i < slots; i++)
        sums = _mm_add_epi64(sums, _mm_and_si128(load_word(&share[i]), mask));
    sums = _mm_add_epi64(sums, more);
    uint64_t slack = (uint64_t)_mm_cvtsi128_si64(sums);
    uint64_t leased = (uint64_t)_mm_cvtsi128_si64(_mm_unpackhi_epi64(sums, sums));
    return leased >= slack ? leased - slack : 0;
}
#else
static uint64_t sum_of_used(const struct region_share *share, uint32_t slots)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < slots; i++)
        sum += lease_used_by(&share[i]);
    return sum;
}
#endif

uint64_t lease_used(const struct region *region, uint32_t device)
{
    return sum_of_used(lease_share(region, device, 0), lease_slots(region));
}
