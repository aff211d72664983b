# SPDX-License-Identifier: Apache-2.0
"""The queue tree: valid files, and the amounts that its queues may hold."""

import tomllib
from typing import Any

import pytest

from hami_common.errors import SettingsInvalid
from hami_core.quota.queues import Claim, Objection, QueueConfig, QueueTree, QueueUse, parse
from hami_core.quota.resourcequota import Resource

MEMORY = Resource("", "memory_mib")

FILE = """
[[queue]]
name = "research"
guaranteed = { memory_mib = 100 }
limit = { memory_mib = 150 }

[[queue]]
name = "vision"
parent = "research"
guaranteed = { memory_mib = 60 }
namespaces = ["vision-a", "vision-b"]

[[queue]]
name = "speech"
parent = "research"
guaranteed = { memory_mib = 30 }
borrow_weight = 3
namespaces = ["speech"]
allowed_namespaces = ["vision-a"]

[[queue]]
name = "serving"
guaranteed = { memory_mib = 100 }
namespaces = ["*"]
"""


def tree(text: str = FILE) -> QueueTree:
    return parse(tomllib.loads(text), vendors=["nvidia", "hygon"])


def queue(name: str, **fields: Any) -> QueueConfig:
    for field in ("guaranteed", "limit"):
        if isinstance(fields.get(field), int):
            fields[field] = {"memory_mib": fields[field]}
    return QueueConfig(name=name, **fields)


def use(*queues: QueueConfig, **held: int) -> QueueUse:
    found = QueueUse(QueueTree(queues))
    for name, amount in held.items():
        found.add(name, {MEMORY: amount})
    return found


def rule(found: QueueUse, name: str, amount: int, *claims: Claim) -> str:
    objection = found.object_to(name, {MEMORY: amount}, claims)
    return "" if objection is None else objection.rule


def claim(name: str, amount: int) -> Claim:
    return Claim(queue=name, wanted={MEMORY: amount})


# --- the file ------------------------------------------------------------------------------------


def test_pods_belong_by_label_or_namespace() -> None:
    found = tree()
    assert found.path("vision") == ("vision", "research")
    assert found.queue_of("vision-b") == "vision"
    assert found.queue_of("vision-a", "speech") == "speech"
    assert found.queue_of("vision-b", "speech") == "vision", "the namespace may not use it"
    assert found.queue_of("speech", "team-kueue") == "speech", "not one of ours"
    assert found.queue_of("elsewhere") == "serving"
    assert found.queue_of("elsewhere", "research") == "serving", "pods belong to leaves"
    assert found.admits("elsewhere", "serving")


@pytest.mark.parametrize(
    ("old", "new", "field", "fix"),
    [
        ("borrow_weight", "borow_weight", "queue speech: borow_weight", "borrow_weight?"),
        ("[[queue]]", "[[queues]]", "queues", "did you mean queue?"),
        ("{ memory_mib = 30 }", "{ memory = 30 }", "guaranteed.memory", "memory_mib?"),
        ("{ memory_mib = 30 }", '{ "nvida/devices" = 1 }', "nvida/devices", "nvidia/devices?"),
        ("{ memory_mib = 30 }", "{ memory_mib = -1 }", "memory_mib", "whole number"),
        ("{ memory_mib = 30 }", "{ memory_mib = 41 }", "queue research", "raise it or lower"),
        ("limit = { memory_mib = 150 }", "limit = { memory_mib = 99 }", "research: limit", "raise"),
        ('parent = "research"', 'parent = "reserch"', "queue vision: parent", "research?"),
        ('name = "speech"', 'name = "vision"', "queue vision: name", "rename"),
        ('name = "speech"', 'name = "Speech"', "queue 'Speech': name", "lower case"),
        ('["speech"]', '["vision-a"]', "speech: namespaces", "allowed_namespaces"),
        ("borrow_weight = 3", "borrow_weight = 1001", "borrow_weight", "1 is usual"),
        ("borrow_weight = 3", "borrow_weight = true", "queue[2].borrow_weight", "docs/quota.md"),
        ("borrow_weight = 3", "task_priority_floor = 8", "task_priority_floor", "0 allows every"),
        ("borrow_weight = 3", "limit = { memory_mib = 151 }", "speech: limit", "lower it"),
        ("limit = { memory_mib = 150 }", 'namespaces = ["x"]', "research: namespaces", "without"),
        ("limit = { memory_mib = 150 }", 'parent = "vision"', "parent", "end at the top"),
    ],
)
def test_wrong_file_is_refused_with_the_field_and_the_fix(
    old: str, new: str, field: str, fix: str
) -> None:
    assert old in FILE
    with pytest.raises(SettingsInvalid) as caught:
        tree(FILE.replace(old, new, 1))
    assert field in caught.value.field
    assert fix in caught.value.fix


def test_inner_queue_without_a_guarantee_has_that_of_its_children() -> None:
    found = QueueTree(
        [
            queue("org"),
            queue("a", parent="org", guaranteed=10),
            queue("b", parent="org", guaranteed=5),
        ]
    )
    assert found.guaranteed["org"] == {MEMORY: 15}
    assert found.total(MEMORY) == 15


def test_empty_file_has_no_queue() -> None:
    assert not parse({}, vendors=[])
    assert parse({}, vendors=[]).queue_of("anywhere") == ""


# --- the rules -----------------------------------------------------------------------------------


def test_queue_within_its_guarantee_always_passes() -> None:
    found = use(queue("a", guaranteed=50), queue("b", guaranteed=50), b=100)
    assert rule(found, "a", 50) == ""
    assert rule(found, "a", 51) == "borrow"


def test_unused_guarantees_of_siblings_are_borrowed_up_to_the_limit() -> None:
    found = use(queue("a", guaranteed=50, limit=80), queue("b", guaranteed=50), b=10)
    assert rule(found, "a", 80) == ""
    objection = found.object_to("a", {MEMORY: 81})
    assert objection == Objection(
        rule="limit", queue="a", resource=MEMORY, wanted=81, used=0, most=80
    )


def test_all_that_is_guaranteed_is_all_there_is_to_borrow() -> None:
    found = use(queue("a", guaranteed=50), queue("b", guaranteed=50), b=30)
    assert rule(found, "a", 70) == ""
    assert rule(found, "a", 71) == "borrow"


def test_guarantee_that_is_not_lent_stays_free() -> None:
    found = use(queue("a", guaranteed=50), queue("b", guaranteed=50, lend=False), b=30)
    assert rule(found, "a", 50) == ""
    assert rule(found, "a", 51) == "borrow"
    assert rule(found, "b", 20) == ""


def test_guarantee_that_is_not_lent_passes_the_limits_of_parents_too() -> None:
    queues = (
        queue("org", limit=100),
        queue("a", parent="org", guaranteed=50, lend=False),
        queue("b", parent="org", guaranteed=50),
    )
    found = use(*queues, b=50)
    assert rule(found, "b", 1) == "limit"
    assert rule(found, "a", 50) == ""


def test_limit_of_the_parent_applies_despite_guarantees() -> None:
    queues = (
        queue("org", limit=100),
        queue("a", parent="org", guaranteed=50),
        queue("b", parent="org", guaranteed=50),
    )
    objection = use(*queues, b=100).object_to("a", {MEMORY: 1})
    assert objection is not None
    assert (objection.rule, objection.queue, objection.used) == ("limit", "org", 100)


def test_department_within_its_guarantee_ends_the_search() -> None:
    queues = (
        queue("org", guaranteed=100),
        queue("a", parent="org", guaranteed=10),
        queue("b", parent="org", guaranteed=50),
        queue("other", guaranteed=100),
    )
    found = use(*queues, other=150)
    assert rule(found, "a", 100) == "", "borrowed inside the department"
    assert rule(found, "a", 101) == "borrow"


def test_queue_of_weight_zero_never_borrows() -> None:
    found = use(queue("a", guaranteed=10, borrow_weight=0), queue("b", guaranteed=50))
    assert rule(found, "a", 10) == ""
    assert rule(found, "a", 11) == "weight"


def test_resource_without_a_guarantee_is_only_limited() -> None:
    found = use(queue("a", limit=10), queue("b"))
    assert rule(found, "a", 10) == ""
    assert rule(found, "a", 11) == "limit"
    assert rule(found, "b", 10_000) == ""


def test_other_resources_do_not_matter() -> None:
    found = use(queue("a", guaranteed=10))
    assert found.object_to("a", {Resource("nvidia", "memory_mib"): 99}) is None


def test_vendors_may_be_limited_each() -> None:
    found = QueueUse(QueueTree([queue("a", limit={"nvidia/devices": 2})], vendors=["nvidia"]))
    devices = Resource("nvidia", "devices")
    assert found.object_to("a", {devices: 2, Resource("", "devices"): 9}) is None
    objection = found.object_to("a", {devices: 3})
    assert objection is not None
    assert str(objection.resource) == "nvidia/devices"


# --- turns ---------------------------------------------------------------------------------------

THREE = (
    queue("a", guaranteed=10, borrow_weight=1),
    queue("b", guaranteed=10, borrow_weight=3),
    queue("idle", guaranteed=100),
)


def test_one_queue_borrows_everything_while_no_other_waits() -> None:
    assert rule(use(*THREE), "a", 120) == ""


def test_queue_that_borrows_less_for_its_weight_is_first() -> None:
    found = use(*THREE, a=40, b=10)
    assert rule(found, "a", 10, claim("b", 30)) == "turn"
    objection = found.object_to("a", {MEMORY: 10}, [claim("b", 30)])
    assert objection is not None
    assert objection.other == "b"
    assert rule(found, "b", 30, claim("a", 10)) == ""


def test_turn_is_by_weight() -> None:
    found = use(*THREE, a=20, b=30)
    assert rule(found, "a", 5, claim("b", 20)) == "turn", "15 for 1 against 40 for 3"
    assert rule(found, "a", 5, claim("b", 30)) == "", "15 for 1 against 50 for 3"


def test_claim_that_can_never_pass_blocks_no_other() -> None:
    queues = (
        queue("a", guaranteed=10),
        queue("b", guaranteed=10, limit=20),
        queue("c", guaranteed=80),
    )
    found = use(*queues, a=20)
    assert rule(found, "a", 30, claim("b", 5)) == ""  # within the guarantee of b
    assert rule(found, "a", 30, claim("b", 20)) == "turn"
    assert rule(found, "a", 30, claim("b", 21)) == ""


def test_turns_are_taken_inside_a_department_and_between_them() -> None:
    queues = (
        queue("org", guaranteed=10),
        queue("a", parent="org"),
        queue("other", guaranteed=10),
        queue("x", parent="other"),
        queue("idle", guaranteed=100),
    )
    found = use(*queues, a=40)
    assert rule(found, "a", 10, claim("x", 20)) == "turn", "other would borrow 10, org 40"
    assert rule(found, "x", 20, claim("a", 10)) == ""


def test_lent_capacity_follows_the_weights_while_others_wait() -> None:
    """One queue had borrowed everything before the others came; it releases step by step."""
    queues = [queue(f"q{n}", borrow_weight=n) for n in (1, 2, 5)] + [queue("idle", guaranteed=800)]
    found = use(*queues, q1=800)
    names = [f"q{n}" for n in (1, 2, 5)]
    for _ in range(300):
        found.add("q1", {MEMORY: 10}, -1)
        takers = [
            name
            for name in names
            if rule(found, name, 10, *(claim(other, 10) for other in names if other != name)) == ""
        ]
        assert takers, "what is given back is taken"
        found.add(takers[0], {MEMORY: 10})
    held = [found.used(name, MEMORY) for name in names]
    assert sum(held) == 800
    assert max(abs(have - want) for have, want in zip(held, [100, 200, 500], strict=True)) <= 10
