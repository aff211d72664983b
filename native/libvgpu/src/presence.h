/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much of the time in which this process has work on a device the device works for it.
 *
 * Elapsed times do not distinguish a neighbor's slices from work that varies. Probes do: while work is queued, an event is now and
 * then recorded on a stream of our own that has nothing else to do (a probe). It happens at once while our context is on
 * the device, and only with the context's next slice while another one is. The part of probes that were answered at once is
 * the part of an elapsed time that was ours. Probes come at irregular times, so that they keep no step with the slices.
 * Were the stream to share a queue with the work, no probe would be answered before the work ends: then nothing is known.
 * Where it is known from elsewhere who works on the device, the answers are judged: alone nearly all must come at once, beside
 * a neighbor that is seen to take the device not nearly all. A driver whose answers fail that is not probed again.
 * Pure: no clock, no driver. Nanoseconds; parts in 1/1024. Belongs to one caller at a time. Locks taken here: none.
 */
#ifndef VGPU_PRESENCE_H
#define VGPU_PRESENCE_H

#include <stdbool.h>
#include <stdint.h>

#define PRESENCE_ONE 1024u
/* From this part on the device counts as used by this process alone. */
#define PRESENCE_ALONE 992u
/* The answer of a probe is read so long after it was posted; */
#define PRESENCE_VERDICT_NS UINT64_C(50000)
/* if the host was later than this, it is discarded. */
#define PRESENCE_LATE_NS UINT64_C(400000)
#define PRESENCE_PERIOD_NS UINT64_C(100000000)
/* Answers older than this are forgotten. */
#define PRESENCE_STALE_NS UINT64_C(2000000000)
/* A time slice of a driver of which nothing is known, and the bounds of what is learned. */
#define PRESENCE_SLICE_NS UINT64_C(2000000)
#define PRESENCE_SLICE_LEAST_NS UINT64_C(250000)
#define PRESENCE_SLICE_MOST_NS UINT64_C(4000000)

enum {
    PRESENCE_SPACING_MIN_NS = 800000, /* between probes on average, as long as there is work: */
    PRESENCE_SPACING_MAX_NS = 4000000,
    PRESENCE_PER_PERIOD = 20, /* about so many are wanted */
    PRESENCE_MIN = 24,        /* probes from which on the part is known, */
    PRESENCE_SEEN = 4,        /* of which so many were answered at once; */
    PRESENCE_MOST = 96,       /* older ones fade */
    PRESENCE_LATES = 16,      /* answers that were not given at once, from which the slice is learned, */
    PRESENCE_LATES_LEAST = 8, /* and how many must be known */
    PRESENCE_JUDGED = 96,     /* answers after which they are judged */
    PRESENCE_ALONE_LEAST_PCT = 95,
    PRESENCE_BESIDE_MOST_PCT = 90,
};

/* Other users of the device, as reported by others than the probes. */
enum presence_company { PRESENCE_UNKNOWN, PRESENCE_NO_OTHER, PRESENCE_BUSY_OTHER, PRESENCE_COMPANIES };

struct presence {
    uint32_t probes;
    uint32_t seen; /* of them: answered at once */
    uint64_t last_ns;
    uint64_t posted_ns; /* 0: none is under way */
    uint64_t next_ns;
    uint64_t spacing_ns;
    uint64_t period_ns; /* when the present one began, */
    uint32_t in_period; /* and the probes of it */
    /* The answers to be judged, by company. */
    uint32_t judged[PRESENCE_COMPANIES];
    uint32_t judged_seen[PRESENCE_COMPANIES];
    /* How long other contexts kept the device before the last probes that were not answered at once, per context. */
    uint64_t away_ns[PRESENCE_LATES];
    uint32_t late_count; /* ever */
    bool alone_judged;
    bool implausible; /* for good */
};

/* 1..PRESENCE_ONE; 0: not known. */
static inline uint32_t presence_part(const struct presence *presence, uint64_t now_ns)
{
    if (presence->implausible || presence->probes < PRESENCE_MIN || presence->seen < PRESENCE_SEEN ||
        now_ns > presence->last_ns + PRESENCE_STALE_NS)
        return 0;
    return presence->seen * PRESENCE_ONE / presence->probes;
}

/* A probe that was not answered at once was answered after this time: what was left of the slices of `others` contexts.
   Where probes share a queue with the work, none is answered at once, and that time shows nothing. */
static inline void presence_away(struct presence *presence, uint64_t now_ns, uint64_t away_ns, uint32_t others)
{
    if (presence_part(presence, now_ns) == 0) return;
    presence->away_ns[presence->late_count++ % PRESENCE_LATES] = away_ns / (others > 0 ? others : 1);
}

/* Length of a time slice: the longest that was left of one. */
static inline uint64_t presence_slice(const struct presence *presence)
{
    if (presence->implausible || presence->late_count < PRESENCE_LATES_LEAST) return PRESENCE_SLICE_NS;
    uint64_t longest = PRESENCE_SLICE_LEAST_NS;
    for (uint32_t i = 0; i < PRESENCE_LATES; i++)
        longest = presence->away_ns[i] > longest ? presence->away_ns[i] : longest;
    return longest < PRESENCE_SLICE_MOST_NS ? longest : PRESENCE_SLICE_MOST_NS;
}

static inline bool presence_wants_probe(const struct presence *presence, uint64_t now_ns)
{
    return presence->posted_ns == 0 && now_ns >= presence->next_ns;
}

static inline bool presence_wants_verdict(const struct presence *presence, uint64_t now_ns)
{
    return presence->posted_ns > 0 && now_ns >= presence->posted_ns + PRESENCE_VERDICT_NS;
}

/* How long until there is something to do. */
static inline uint64_t presence_rest(const struct presence *presence, uint64_t now_ns)
{
    uint64_t next = presence->posted_ns > 0 ? presence->posted_ns + PRESENCE_VERDICT_NS : presence->next_ns;
    return next > now_ns ? next - now_ns : 1;
}

static inline void presence_posted(struct presence *presence, uint64_t now_ns)
{
    if (now_ns >= presence->period_ns + PRESENCE_PERIOD_NS) {
        /* As many as are wanted spread over all the time in which there is work, for neighbours have periods too. */
        uint64_t spacing = presence->spacing_ns;
        if (presence->in_period > PRESENCE_PER_PERIOD) spacing += spacing / 4;
        if (presence->in_period < PRESENCE_PER_PERIOD) spacing -= spacing / 4;
        if (spacing < PRESENCE_SPACING_MIN_NS) spacing = PRESENCE_SPACING_MIN_NS;
        presence->spacing_ns = spacing < PRESENCE_SPACING_MAX_NS ? spacing : PRESENCE_SPACING_MAX_NS;
        presence->period_ns = now_ns;
        presence->in_period = 0;
    }
    presence->in_period++;
    presence->posted_ns = now_ns;
}

/* None could be posted. */
static inline void presence_failed(struct presence *presence, uint64_t now_ns)
{
    presence->posted_ns = 0;
    presence->next_ns = now_ns + PRESENCE_SPACING_MAX_NS;
}

static inline void presence_judge(struct presence *presence, bool seen, enum presence_company company)
{
    presence->judged_seen[company] += seen ? 1 : 0;
    if (++presence->judged[company] < PRESENCE_JUDGED) return;
    uint32_t pct = presence->judged_seen[company] * 100 / presence->judged[company];
    if (company == PRESENCE_NO_OTHER) {
        presence->alone_judged = true;
        if (pct < PRESENCE_ALONE_LEAST_PCT) presence->implausible = true;
    }
    if (company == PRESENCE_BUSY_OTHER && pct > PRESENCE_BESIDE_MOST_PCT) presence->implausible = true;
    presence->judged[company] = presence->judged_seen[company] = 0;
}

/* The probe under way was looked at. `random`: any number, plans the next one. */
static inline void presence_verdict(struct presence *presence, uint64_t now_ns, bool seen, uint32_t random,
                                    enum presence_company company)
{
    bool late = now_ns > presence->posted_ns + PRESENCE_LATE_NS;
    presence->posted_ns = 0;
    uint64_t spacing = presence->spacing_ns > 0 ? presence->spacing_ns : PRESENCE_SPACING_MIN_NS;
    presence->next_ns = now_ns + spacing / 2 + random % spacing;
    if (late) return;
    presence_judge(presence, seen, company);
    /* They would hide what a neighbor that begins now takes. */
    if (company == PRESENCE_NO_OTHER) return;
    if (now_ns > presence->last_ns + PRESENCE_STALE_NS) presence->probes = presence->seen = 0;
    if (presence->probes >= PRESENCE_MOST) {
        presence->probes /= 2;
        presence->seen /= 2;
    }
    presence->probes++;
    presence->seen += seen ? 1 : 0;
    presence->last_ns = now_ns;
}

#endif
