/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Visits every reachable state of small scenarios of the lease protocol, with the compiled code of account_lease.c and
 * slot.c itself, one shared access at a time, with kills at every one of them.
 *
 * Two or three actors run as coroutines on stacks of their own; a step is one access to shared memory. A state is the
 * region, the stacks and what the actors believe. From each new state every actor is let do one step, and every living
 * one may be killed instead while kills are left. States already seen are not gone into again, so the search ends.
 * Scenarios of three bound how often an actor that could go on has to wait for another.
 * Checked in each state: the invariants of docs/adr/0008-limiter.md; at each refusal: that at some instant of the call
 * the memory did not suffice; at the end of each schedule: that nothing is charged but what the living hold, and that
 * exactly the rest can be had. In a sample of the states: each actor, left alone, comes to its end.
 *
 *     explore_lease [scenario]    one line per scenario: states, schedules' ends, kills
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "account_lease.h"
#include "atomic.h"
#include "process.h"
#include "slot.h"

#if !defined(__x86_64__)
#error "switches stacks by hand: x86-64 only"
#endif

#define ACTORS 3
#define SLOTS 3u
#define STACK_BYTES 16384
#define SOLO_STEPS_MAX 5000
#define STATES_MAX (1u << 24)
#define PATH_MAX_STEPS 20000

/* --- the world that is saved, restored and compared --------------------------------------------------------------- */

struct actor {
    void *stack_pointer;
    bool started;
    bool finished;
    bool dead;
    bool in_call;
    bool refused; /* the last call */
    uint32_t slot;
    int64_t call_bytes; /* > 0 charge, < 0 refund */
    uint64_t held;
    uint64_t most_used; /* by the living, at any instant of the call */
};

static struct world {
    struct region_control control;
    struct region_device device;
    struct region_slot slots[SLOTS];
    struct region_share shares[SLOTS];
    uint32_t slots_seen;
    uint32_t kills_left;
    uint32_t switches_left; /* from an actor that could go on; UINT32_MAX: any number */
    int last;
    uint64_t limit;
    struct actor actors[ACTORS];
} world __attribute__((aligned(64)));

static unsigned char stacks[ACTORS][STACK_BYTES] __attribute__((aligned(64)));
static struct region region = {
    .device_count = 1,
    .slot_count = SLOTS,
    .control = &world.control,
    .devices = &world.device,
    .slots = world.slots,
    .shares = world.shares,
    .slots_seen = &world.slots_seen,
};

static int running = -1; /* index of the actor that runs, -1: none, steps do nothing */
static void *explorer_pointer;
static const char *scenario_name;
static uint64_t fresh_states;
static uint64_t ends;
static uint64_t kills;

static __attribute__((noinline, naked)) void switch_stack(void **save, void *load)
{
    (void)save;
    (void)load;
    __asm__("push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
            "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
            "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
}

void atomic_step(bool writes)
{
    (void)writes;
    if (running < 0) return;
    switch_stack(&world.actors[running].stack_pointer, explorer_pointer);
}

/* --- who lives: an oracle in place of /proc ------------------------------------------------------------------------ */

enum process_life process_life(const union region_owner *self, const union region_owner *owner)
{
    atomic_step(false);
    if (owner->word == self->word) return PROCESS_ALIVE;
    uint32_t index = owner->pid - 1;
    if (index >= ACTORS) return PROCESS_DEAD;
    return world.actors[index].dead ? PROCESS_DEAD : PROCESS_ALIVE;
}

void process_life_foreign(const union region_owner *self, const union region_owner *owners, bool *alive, size_t count)
{
    (void)self;
    (void)owners;
    for (size_t i = 0; i < count; i++)
        alive[i] = true;
}

static union region_owner owner_of_actor(int actor)
{
    union region_owner owner = {.word = 0};
    owner.pid = (uint32_t)actor + 1;
    owner.pid_namespace = 9;
    owner.start_ticks = 100 & ((UINT64_C(1) << 48) - 1);
    return owner;
}

/* --- checks -------------------------------------------------------------------------------------------------------- */

static _Noreturn void fail(const char *what)
{
    printf("FAILED %s: %s\n", scenario_name, what);
    printf("W total %llu version %llu slot %u, limit %llu\n", (unsigned long long)world.device.total.total,
           (unsigned long long)world.device.total.version, (unsigned)world.device.total.slot,
           (unsigned long long)world.limit);
    for (uint32_t i = 0; i < SLOTS; i++)
        printf("slot %u owner %u leased %llu slack %llu tight %d version %u/%u intent v%llu +%llu use %llu tag %llu\n",
               i, world.slots[i].owner.pid, (unsigned long long)world.shares[i].share.leased,
               (unsigned long long)world.shares[i].share.slack, (int)world.shares[i].share.tight,
               (unsigned)world.shares[i].share.version_low, (unsigned)world.shares[i].share.version_high,
               (unsigned long long)world.shares[i].intent_version, (unsigned long long)world.shares[i].intent_lease,
               (unsigned long long)world.shares[i].intent_use, (unsigned long long)world.shares[i].intent_tag);
    for (int i = 0; i < ACTORS; i++)
        printf("actor %d slot %u held %llu call %lld%s%s most used %llu\n", i, world.actors[i].slot,
               (unsigned long long)world.actors[i].held, (long long)world.actors[i].call_bytes,
               world.actors[i].dead ? " dead" : "", world.actors[i].finished ? " finished" : "",
               (unsigned long long)world.actors[i].most_used);
    exit(1);
}

static uint64_t used_in(uint32_t slot)
{
    return world.shares[slot].share.leased - world.shares[slot].share.slack;
}

static bool slot_is_of_living(uint32_t slot)
{
    uint32_t pid = world.slots[slot].owner.pid;
    return pid && pid <= ACTORS && !world.actors[pid - 1].dead;
}

static void check_state(void)
{
    uint64_t leased = 0;
    uint64_t used_by_living = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
        union region_share_word word = world.shares[i].share;
        if (word.slack > word.leased) fail("more slack than lease");
        if (word.tight && word.slack) fail("slack in a tight share");
        if (!world.slots[i].owner.pid && word.leased) fail("a lease without an owner");
        if (i >= world.slots_seen && (world.slots[i].owner.pid || word.leased)) fail("a slot beyond those seen");
        leased += word.leased;
        if (slot_is_of_living(i)) used_by_living += used_in(i);
    }
    if (leased > world.device.total.total) fail("leases exceed the total");
    if (world.device.total.total > world.limit) fail("total exceeds the limit");
    for (int i = 0; i < ACTORS; i++) {
        struct actor *actor = &world.actors[i];
        if (actor->dead || actor->slot == REGION_NO_SLOT) continue;
        if (actor->in_call && used_by_living > actor->most_used) actor->most_used = used_by_living;
        uint64_t used = used_in(actor->slot);
        uint64_t after = actor->held + (uint64_t)actor->call_bytes;
        if (used != actor->held && !(actor->in_call && used == after)) fail("the share is not what its owner holds");
    }
}

/* --- what actors do ------------------------------------------------------------------------------------------------ */

static struct actor *me(void)
{
    return &world.actors[running];
}

static void begin(int64_t bytes)
{
    struct actor *actor = me();
    actor->call_bytes = bytes;
    actor->most_used = 0;
    actor->refused = false;
    actor->in_call = true;
    check_state(); /* the first instant of the call */
}

static void end(bool done)
{
    struct actor *actor = me();
    if (done)
        actor->held += (uint64_t)actor->call_bytes;
    else if (actor->call_bytes > 0 && actor->most_used + (uint64_t)actor->call_bytes <= world.limit)
        fail("refused what fitted at every instant");
    actor->refused = !done;
    actor->in_call = false;
    actor->call_bytes = 0;
}

/* As account.c does it. */
static bool charge_at(uint64_t bytes, uint64_t limit, uint64_t chunk)
{
    union region_owner self = owner_of_actor(running);
    struct actor *actor = me();
    begin((int64_t)bytes);
    bool granted = lease_charge(&world.shares[actor->slot], bytes);
    while (!granted) {
        union region_total_word seen;
        granted = lease_request(&region, 0, actor->slot, bytes, limit, chunk, &seen) == LEASE_GRANTED;
        if (!granted && slot_reclaim(&region, &self, actor->slot).reclaimed == 0 &&
            lease_still_refused(&region, 0, bytes, limit, &seen))
            break;
    }
    end(granted);
    return granted;
}

static bool charge(uint64_t bytes, uint64_t chunk)
{
    return charge_at(bytes, world.limit, chunk);
}

/* Releases at most the held bytes: refused bytes are not released. */
static void refund(uint64_t bytes)
{
    if (bytes > me()->held) bytes = me()->held;
    if (bytes == 0) return;
    begin(-(int64_t)bytes);
    if (lease_refund(&world.shares[me()->slot], bytes) != bytes) fail("less refunded than held");
    end(true);
}

static void claim(void)
{
    union region_owner self = owner_of_actor(running);
    uint32_t slot = slot_claim(&region, &self);
    if (slot == REGION_NO_SLOT) fail("no slot although there is one");
    me()->slot = slot;
}

static void release(void)
{
    union region_owner self = owner_of_actor(running);
    uint32_t slot = me()->slot;
    me()->slot = REGION_NO_SLOT;
    me()->held = 0;
    slot_release(&region, slot, &self);
}

static void reclaim(void)
{
    union region_owner self = owner_of_actor(running);
    slot_reclaim(&region, &self, me()->slot);
}

/* --- scenarios ----------------------------------------------------------------------------------------------------- */

/* Two want more than half: one gets it, the other does not, and has it when the first gave it back. */
static void two_want_most(int actor)
{
    charge(actor ? 70 : 60, 0);
    refund(70);
}

/* Slack of one is what the other needs. */
static void slack_of_the_other(int actor)
{
    if (actor == 0) {
        charge(10, 60);
        refund(5);
        charge(7, 0);
    } else {
        charge(80, 10);
        charge(10, 0);
    }
}

/* Refunds while the other is at the limit: toggling use must not make a request fail that fits. */
static void toggling(int actor)
{
    if (actor < 2) {
        charge(50, 0);
        refund(50);
        if (actor == 0) charge(40, 10);
    } else {
        charge(30, 0);
    }
}

/* One process releases and takes again memory of which two others want a part. */
static void three(int actor)
{
    if (actor == 0) {
        refund(50);
        charge(50, 0);
    } else {
        charge(actor == 1 ? 40 : 30, 0);
    }
}

/* Use goes from one to another while a third asks: at no instant is more than half in use. */
static void use_moves(int actor)
{
    if (actor == 0)
        refund(50);
    else
        charge(actor == 1 ? 50 : 30, 0);
}

/* The first is killed anywhere; the second needs what it had. */
static void heir(int actor)
{
    if (actor == 0) {
        claim();
        charge(60, 20);
        charge(30, 0);
    } else {
        charge(90, 0);
    }
}

/* Two find the same dead, and the slot is taken again in the meantime. */
static void two_heirs(int actor)
{
    if (actor == 0) {
        charge(20, 0);
    } else if (actor == 1) {
        reclaim();
    } else {
        reclaim();
        claim();
        charge(90, 0);
    }
}

/* Starting, working, ending, all at once. */
static void come_and_go(int actor)
{
    claim();
    charge(40, actor ? 0 : 30);
    release();
}

/* The watcher of one takes slack while the other is charged. */
static void revoker(int actor)
{
    if (actor == 0) {
        charge(10, 40);
        charge(20, 0);
        refund(30);
    } else {
        lease_revoke(&region, 0, 0);
        lease_trim(&region, 0, 1, 0);
        charge(60, 5);
    }
}

/* The same process in three: charge, refund and revoke on one share, as threads of it and a stranger do. */
static void threads(int actor)
{
    if (actor == 0) {
        charge(10, 20);
        refund(10);
    } else {
        lease_revoke(&region, 0, 0);
        charge(80, 0);
        refund(80);
    }
}

struct scenario {
    const char *name;
    void (*program)(int actor);
    int actors;
    uint32_t claimed; /* actors that have a slot from the start */
    uint32_t kills;
    uint32_t switches; /* 0: any number */
    uint64_t held[ACTORS];
    uint64_t chunk;
    uint64_t slack; /* that actor 1 has */
};

static const struct scenario scenarios[] = {
    {"two want most", two_want_most, 2, 2, 1, 0, {0}, 0, 0},
    {"slack of the other", slack_of_the_other, 2, 2, 1, 0, {0}, 0, 0},
    {"toggling", toggling, 2, 2, 1, 0, {0, 50, 0}, 0, 0},
    {"three at the limit", three, 3, 7, 1, 1, {50, 0, 20}, 10, 0},
    {"three undisturbed by death", three, 3, 7, 0, 2, {50, 0, 20}, 10, 0},
    {"use moves", use_moves, 3, 7, 0, 2, {50, 0, 0}, 0, 50},
    {"heir", heir, 2, 0x2, 1, 0, {0}, 0, 0},
    {"two heirs", two_heirs, 3, 2, 1, 2, {30, 10, 0}, 10, 0},
    {"come and go", come_and_go, 2, 0, 2, 4, {0}, 0, 0},
    {"revoker", revoker, 2, 2, 1, 0, {0}, 0, 0},
    {"threads", threads, 2, 2, 1, 0, {20, 0, 0}, 10, 0},
};

static const struct scenario *current;

static void entry(void)
{
    current->program(running);
    world.actors[running].finished = true;
    atomic_step(false);
    abort();
}

static void let_step(int actor)
{
    running = actor;
    switch_stack(&explorer_pointer, world.actors[actor].stack_pointer);
    running = -1;
}

static void set_up(const struct scenario *scenario)
{
    current = scenario;
    scenario_name = scenario->name;
    memset(&world, 0, sizeof world);
    memset(stacks, 0, sizeof stacks);
    world.device.total.slot = REGION_NO_SLOT;
    world.limit = 100;
    world.kills_left = scenario->kills;
    world.switches_left = scenario->switches ? scenario->switches : UINT32_MAX;
    world.last = -1;
    for (int i = 0; i < ACTORS; i++) {
        struct actor *actor = &world.actors[i];
        actor->slot = REGION_NO_SLOT;
        if (i >= scenario->actors) {
            actor->finished = true;
            continue;
        }
        void **top = (void **)(void *)(stacks[i] + STACK_BYTES - 8); /* as after a call */
        void (*start)(void) = entry;
        memcpy(--top, &start, sizeof start); /* where the first switch returns to */
        top -= 6;                            /* the registers that it pops */
        actor->stack_pointer = top;
    }
    for (int i = 0; i < scenario->actors; i++) {
        bool claims = scenario->program == heir ? i == 1 : (uint32_t)i < scenario->claimed;
        if (!claims) continue;
        union region_owner owner = owner_of_actor(i);
        world.actors[i].slot = slot_claim(&region, &owner);
        union region_total_word seen;
        if (scenario->held[i] && lease_request(&region, 0, world.actors[i].slot, scenario->held[i], 100,
                                               scenario->chunk, &seen) != LEASE_GRANTED)
            fail("set-up does not fit");
        world.actors[i].held = scenario->held[i];
        if (i == 1 && scenario->slack)
            (void)lease_request(&region, 0, world.actors[1].slot, scenario->slack, 100, 0, &seen);
        if (i == 1 && scenario->slack) (void)lease_refund(&world.shares[world.actors[1].slot], scenario->slack);
    }
}

/* --- states -------------------------------------------------------------------------------------------------------- */

struct saved {
    struct world world;
    unsigned char stacks[ACTORS][2304];
    int next; /* choice to try next in this state */
};

static size_t stack_used(int actor)
{
    unsigned char *pointer = world.actors[actor].stack_pointer;
    return pointer ? (size_t)(stacks[actor] + STACK_BYTES - pointer) : 0;
}

static void save(struct saved *saved)
{
    saved->world = world;
    for (int i = 0; i < ACTORS; i++) {
        size_t bytes = stack_used(i);
        if (bytes > sizeof saved->stacks[i]) fail("an actor needs more stack than is saved");
        memcpy(saved->stacks[i], stacks[i] + STACK_BYTES - bytes, bytes);
    }
}

static void restore(const struct saved *saved)
{
    world = saved->world;
    for (int i = 0; i < ACTORS; i++) {
        size_t bytes = stack_used(i);
        memcpy(stacks[i] + STACK_BYTES - bytes, saved->stacks[i], bytes);
    }
}

static uint64_t mix(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    while (bytes >= 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
        at += 8;
        bytes -= 8;
    }
    return hash;
}

static uint64_t hash_state(void)
{
    uint64_t hash = mix(UINT64_C(0x243f6a8885a308d3), &world, sizeof world);
    for (int i = 0; i < ACTORS; i++)
        if (!world.actors[i].dead && !world.actors[i].finished)
            hash = mix(hash, world.actors[i].stack_pointer, stack_used(i));
    hash ^= hash >> 32;
    return hash ? hash : 1;
}

static uint64_t *visited;
static uint64_t visited_size;

static bool is_new(uint64_t hash)
{
    for (uint64_t at = hash & (visited_size - 1);; at = (at + 1) & (visited_size - 1)) {
        if (visited[at] == hash) return false;
        if (visited[at] == 0) {
            visited[at] = hash;
            if (++fresh_states > visited_size / 2) fail("more states than there is room for");
            return true;
        }
    }
}

static bool can_run(int actor)
{
    return !world.actors[actor].finished && !world.actors[actor].dead;
}

/* Live actors release nothing: the charge must equal what they hold, and one of them must get the rest. */
static void check_end(void)
{
    uint64_t held = 0;
    for (int i = 0; i < ACTORS; i++)
        if (!world.actors[i].dead) held += world.actors[i].held;
    ends++;
    union region_owner last = owner_of_actor(200);
    union region_total_word seen;
    uint32_t slot = slot_claim(&region, &last);
    if (slot == REGION_NO_SLOT && slot_reclaim(&region, &last, REGION_NO_SLOT).reclaimed)
        slot = slot_claim(&region, &last);
    if (slot == REGION_NO_SLOT) return; /* three live */
    slot_reclaim(&region, &last, slot);
    if (lease_used(&region, 0) != held) fail("at the end more or less is used than held");
    if (lease_request(&region, 0, slot, world.limit - held, world.limit, 0, &seen) != LEASE_GRANTED &&
        held != world.limit)
        fail("at the end the rest cannot be had");
    if (lease_request(&region, 0, slot, 1, world.limit, 0, &seen) == LEASE_GRANTED)
        fail("at the end more can be had than there is");
    for (uint32_t i = 0; i < SLOTS; i++)
        if (i != slot && world.slots[i].owner.pid && !slot_is_of_living(i)) fail("at the end a dead one has a slot");
}

static struct saved *path;

static void check_alone(const struct saved *here)
{
    for (int actor = 0; actor < current->actors; actor++) {
        restore(here);
        int steps = 0;
        while (can_run(actor)) {
            let_step(actor);
            check_state();
            if (++steps > SOLO_STEPS_MAX) fail("an actor left alone does not come to its end");
        }
    }
    restore(here);
}

static void explore(const struct scenario *scenario)
{
    fresh_states = ends = kills = 0;
    memset(visited, 0, visited_size * sizeof *visited);
    set_up(scenario);
    check_state();
    int depth = 0;
    save(&path[0]);
    path[0].next = 0;
    is_new(hash_state());
    while (depth >= 0) {
        struct saved *here = &path[depth];
        int choice = here->next++;
        if (choice >= 2 * ACTORS) {
            depth--;
            continue;
        }
        int actor = choice % ACTORS;
        restore(here);
        if (!can_run(actor)) continue;
        if (choice >= ACTORS) {
            if (world.kills_left == 0) continue;
            world.kills_left--;
            world.actors[actor].dead = true;
            kills++;
        } else {
            if (world.last >= 0 && world.last != actor && can_run(world.last) && world.switches_left != UINT32_MAX) {
                if (world.switches_left == 0) continue;
                world.switches_left--;
            }
            world.last = current->switches ? actor : -1;
            let_step(actor);
        }
        check_state();
        uint64_t hash = hash_state();
        if (!is_new(hash)) continue;
        bool over = true;
        for (int i = 0; i < ACTORS; i++)
            over = over && !can_run(i);
        if (over) {
            check_end();
            continue;
        }
        if (++depth >= PATH_MAX_STEPS) fail("a schedule does not end");
        save(&path[depth]);
        path[depth].next = 0;
        if ((hash & 63) == 0) check_alone(&path[depth]);
    }
    printf("%s: %llu states, %llu ends, %llu kills\n", scenario->name, (unsigned long long)fresh_states,
           (unsigned long long)ends, (unsigned long long)kills);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    visited_size = STATES_MAX;
    visited = calloc(visited_size, sizeof *visited);
    path = calloc(PATH_MAX_STEPS, sizeof *path);
    if (!visited || !path) return 1;
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
        if (argc < 2 || strcmp(argv[1], scenarios[i].name) == 0) explore(&scenarios[i]);
    return 0;
}
