# SPDX-License-Identifier: Apache-2.0
"""The queue rules, computed independently for random trees and random use."""

import random
from collections.abc import Iterator

from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_core.quota.queues import QueueConfig, QueueTree, QueueUse
from hami_core.quota.resourcequota import Resource

MEMORY = Resource("", "memory_mib")
Held = dict[str, int]


@st.composite
def trees(draw: st.DrawFn) -> QueueTree:
    """Two levels to three, guarantees that add up, limits above them."""
    queues: list[QueueConfig] = []

    def branch(name: str, parent: str, depth: int, at_most: int | None) -> int:
        """Add a queue and those below it; returns its guarantee."""
        has_children = depth < 3 and draw(st.booleans())
        limit = draw(st.none() | st.integers(20, 60))
        if at_most is not None and limit is not None:
            limit = min(limit, at_most)
        bound = at_most if limit is None else limit
        below = 0
        if has_children:
            for n in range(draw(st.integers(1, 3))):
                left = None if bound is None else bound - below
                if left is not None and left <= 0:
                    break
                below += branch(f"{name}.{n}", name, depth + 1, left)
        room = 20 if bound is None else max(0, bound - below)
        guaranteed = below + draw(st.integers(0, min(20, room)))
        queues.append(
            QueueConfig(
                name=name,
                parent=parent,
                guaranteed={"memory_mib": guaranteed},
                limit={} if limit is None else {"memory_mib": limit},
                borrow_weight=draw(st.sampled_from((0, 1, 1, 2, 5))),
                lend=draw(st.sampled_from((True, True, False))),
            )
        )
        return guaranteed

    for n in range(draw(st.integers(1, 3))):
        branch(f"q{n}", "", 1, None)
    return QueueTree(queues)


class Plain:
    """The rules as ``docs/quota.md`` states them, by recursion over the use of leaves."""

    def __init__(self, tree: QueueTree, held: Held) -> None:
        self.tree = tree
        self.held = held

    def guarantee(self, name: str) -> int:
        return self.tree.queues[name].guaranteed["memory_mib"]

    def used(self, name: str) -> int:
        children = self.tree.children[name]
        return sum(map(self.used, children)) if children else self.held.get(name, 0)

    def taken(self, name: str) -> int:
        children = self.tree.children[name]
        return sum(map(self.occupied, children)) if children else self.held.get(name, 0)

    def occupied(self, name: str) -> int:
        taken = self.taken(name)
        return taken if self.tree.queues[name].lend else max(taken, self.guarantee(name))

    def way_up(self, name: str) -> Iterator[str]:
        while name:
            yield name
            name = self.tree.queues[name].parent


def passes(tree: QueueTree, held: Held, leaf: str, amount: int) -> bool:
    before, after = Plain(tree, held), Plain(tree, {**held, leaf: held.get(leaf, 0) + amount})
    for name in after.way_up(leaf):
        limit = tree.queues[name].limit.get("memory_mib")
        if limit is not None and after.occupied(name) > max(limit, before.occupied(name)):
            return False
    for name in after.way_up(leaf):
        if after.taken(name) <= after.guarantee(name):
            return True
        if tree.queues[name].borrow_weight == 0:
            return False
    top = tree.children[""]
    return sum(map(after.occupied, top)) <= sum(map(after.guarantee, top))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rules_equal_a_plain_recomputation_and_keep_their_promises(data: st.DataObject) -> None:
    tree = data.draw(trees())
    use = QueueUse(tree)
    leaves = sorted(name for name in tree.queues if tree.is_leaf(name))
    held: Held = {}
    for _ in range(data.draw(st.integers(1, 12))):
        leaf = data.draw(st.sampled_from(leaves))
        amount = data.draw(st.integers(1, 25))
        if held.get(leaf) and data.draw(st.booleans()):
            back = min(amount, held[leaf])
            use.add(leaf, {MEMORY: back}, -1)
            held[leaf] -= back
            continue
        verdict = use.object_to(leaf, {MEMORY: amount}) is None
        assert verdict == passes(tree, held, leaf, amount)
        within = held.get(leaf, 0) + amount <= Plain(tree, held).guarantee(leaf)
        unlimited = all(not tree.queues[name].limit for name in tree.path(leaf))
        if within and (unlimited or not tree.queues[leaf].lend):
            assert verdict, "what is guaranteed passes"
        if not verdict:
            continue
        use.add(leaf, {MEMORY: amount})
        held[leaf] = held.get(leaf, 0) + amount
        plain = Plain(tree, held)
        for name, queue in tree.queues.items():
            assert use.used(name, MEMORY) == plain.used(name)
            assert use.taken(name, MEMORY) == plain.taken(name)
            assert use.occupied(name, MEMORY) == plain.occupied(name)
            if limit := queue.limit.get("memory_mib"):
                assert plain.occupied(name) <= limit


TREES = 20
OPERATIONS = 100_000


@settings(max_examples=TREES, deadline=None, phases=[Phase.generate])
@given(trees().filter(lambda tree: len(tree.queues) >= 5), st.integers(0, 2**32))
def test_hundred_thousand_operations_keep_limits_and_guarantees(tree: QueueTree, seed: int) -> None:
    rng = random.Random(seed)
    use = QueueUse(tree)
    leaves = sorted(name for name in tree.queues if tree.is_leaf(name))
    held: Held = dict.fromkeys(leaves, 0)
    shares: list[tuple[str, int]] = []
    refused = 0
    for number in range(OPERATIONS // TREES):
        if shares and rng.random() < 0.5:
            leaf, amount = shares.pop(rng.randrange(len(shares)))
            use.add(leaf, {MEMORY: amount}, -1)
            held[leaf] -= amount
        else:
            leaf, amount = rng.choice(leaves), rng.randint(1, 25)
            verdict = use.object_to(leaf, {MEMORY: amount}) is None
            assert verdict == passes(tree, held, leaf, amount), (number, leaf, amount)
            if not verdict:
                refused += 1
                continue
            use.add(leaf, {MEMORY: amount})
            held[leaf] += amount
            shares.append((leaf, amount))
        plain = Plain(tree, held)
        for name in tree.path(leaf):
            assert use.used(name, MEMORY) == plain.used(name)
            assert use.occupied(name, MEMORY) == plain.occupied(name)
            if limit := tree.queues[name].limit.get("memory_mib"):
                assert plain.occupied(name) <= limit
    assert 0 < refused < OPERATIONS // TREES
    for leaf, amount in shares:
        use.add(leaf, {MEMORY: amount}, -1)
    assert not any(use.used(name, MEMORY) for name in tree.queues)


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(0, 2**32))
def test_every_guarantee_is_reclaimed_from_borrowers_alone(limited: QueueTree, seed: int) -> None:
    """All capacity is in use; each leaf below its guarantee gets the rest of it, 1 MiB at a time.

    Without limits: one of a queue above, which others reached, refuses before reclaim.
    """
    tree = QueueTree(replace(queue, limit={}) for queue in limited.queues.values())
    rng = random.Random(seed)
    use = QueueUse(tree)
    one = {MEMORY: 1}
    leaves = sorted(name for name in tree.queues if tree.is_leaf(name))
    tops, total = tree.children[""], tree.total(MEMORY)
    while sum(use.used(name, MEMORY) for name in tops) < total:
        allowed = [leaf for leaf in leaves if use.object_to(leaf, one) is None]
        if not allowed:
            return  # a queue does not lend, or may not borrow
        use.add(rng.choice(allowed[:2]), one)
    lending = [leaf for leaf in leaves if tree.queues[leaf].lend]
    for leaf in rng.sample(lending, len(lending)):
        while owner := use.guarantor(leaf, one):
            grows = Plain(tree, {name: use.used(name, MEMORY) for name in leaves})
            if grows.occupied(owner) > grows.taken(owner):
                break  # a queue above does not lend: the capacity is free
            victims = [
                other
                for other in leaves
                if (surplus := use.surplus(other, beside=owner)) is not None
                and use.used(other, MEMORY)
                and all(surplus.values())
            ]
            assert victims, (leaf, owner, "no queue borrows, but a guarantee is not met")
            victim = rng.choice(victims)
            before = {name: use.taken(name, MEMORY) for name in tree.path(victim)}
            event("reclaimed")
            use.add(victim, one, -1)
            assert use.object_to(leaf, one) is None
            use.add(leaf, one)
            for name, taken in before.items():
                guaranteed = tree.guaranteed[name].get(MEMORY, 0)
                assert use.taken(name, MEMORY) >= min(taken, guaranteed), (name, victim, leaf)
