# SPDX-License-Identifier: Apache-2.0
"""A canary is judged by the figures that one computes by hand, in its window alone."""

import pytest

from hami_common.errors import SettingsInvalid
from hami_core.replay.canary import Group, Window, memory_of
from hami_core.replay.policies import Canary, Objective, parse
from hami_core.table.table import DeviceTable
from tests.support.builders import devices, held, share


def canary(*objectives: Objective, pods_least: int = 2, window_s: float = 600.0) -> Canary:
    return Canary(
        policy="packed",
        percent=50,
        pods_least=pods_least,
        window_s=window_s,
        objectives=objectives or (Objective(measure="refused_pct", most=100),),
    )


def window(*notes: tuple[str, Group, bool, float]) -> Window:
    found = Window()
    for uid, group, is_refused, now_s in notes:
        found.asked(uid, group, is_refused=is_refused, now_s=now_s)
    return found


def test_figures_are_those_of_the_notes() -> None:
    seen = window(
        ("a", "canary", True, 1000),
        ("a", "canary", True, 1030),
        ("b", "canary", False, 1040),
        ("c", "canary", True, 1060),
        ("d", "canary", False, 1070),
        ("x", "control", False, 1000),
        ("y", "control", True, 1010),
    )
    seen.bound("a", now_s=1090)
    seen.bound("y", now_s=1020)
    seen.bound("unknown", now_s=1020)
    seen.packed("canary", 80.0, now_s=1000)
    seen.packed("canary", 60.0, now_s=1100)
    seen.packed("control", None, now_s=1100)
    found = seen.verdict(canary(), now_s=1120)
    one, other = found.canary, found.control
    assert (one.pods, one.refused_pct, one.refusals_per_min) == (4, 50.0, 1.5)
    # Pod a waited 90 s until its bind, pod c waits 60 s by now.
    assert (one.wait_p95_s, one.packing_pct) == (90.0, 70.0)
    assert (other.pods, other.refused_pct, other.wait_p95_s) == (2, 50.0, 10.0)
    assert other.packing_pct is None
    assert (found.is_decidable, found.missed) == (True, "")
    seen.ended("c")
    assert seen.verdict(canary(), now_s=1120).canary.pods == 3


@pytest.mark.parametrize(
    ("objective", "missed"),
    [
        (Objective(measure="refused_pct", most=40), "refused_pct is 50, at most 40"),
        (Objective(measure="refused_pct", most=50), ""),
        (Objective(measure="refused_pct", least=60), "refused_pct is 50, at least 60"),
        (
            Objective(measure="refused_pct", most_pct_of_control=150),
            "refused_pct is 50, at most 150 % of the control group's 25",
        ),
        (Objective(measure="refused_pct", most_pct_of_control=200), ""),
        (
            Objective(measure="packing_pct", least_pct_of_control=110),
            "packing_pct is 50, at least 110 % of the control group's 50",
        ),
        (Objective(measure="wait_p95_s", most=59), "wait_p95_s is 60, at most 59"),
    ],
)
def test_a_missed_bound_is_named(objective: Objective, missed: str) -> None:
    seen = window(
        ("a", "canary", True, 1000),
        ("b", "canary", False, 1000),
        ("x", "control", True, 1050),
        *((uid, "control", False, 1050) for uid in ("y", "z", "v")),
    )
    seen.packed("canary", 50, now_s=1000)
    seen.packed("control", 50, now_s=1000)
    assert seen.verdict(canary(objective), now_s=1060).missed == missed


def test_too_few_pods_and_notes_before_the_window_decide_nothing() -> None:
    bad = Objective(measure="refused_pct", most=0)
    seen = window(*((f"c{n}", "canary", True, 1000) for n in range(3)))
    seen.asked("x", "control", is_refused=False, now_s=1000)
    few = seen.verdict(canary(bad), now_s=1001)
    assert (few.is_decidable, few.missed) == (False, "")
    seen.asked("y", "control", is_refused=False, now_s=1001)
    assert seen.verdict(canary(bad), now_s=1002).missed
    old = seen.verdict(canary(bad), now_s=1602)
    assert (old.canary.pods, old.control.pods, old.missed) == (0, 0, "")


def test_packing_is_that_of_the_named_devices() -> None:
    table = DeviceTable()
    table.upsert_node(devices("a", 2, memory_mib=1000))
    table.book("a", (held(share("a-nvidia-0", 800)),))
    assert memory_of(table, "a", ["a-nvidia-0"]) == (800, 1000)
    assert memory_of(table, "a", ["a-nvidia-0", "a-nvidia-1"]) == (800, 2000)
    assert memory_of(table, "b", ["x"]) == memory_of(table, "a", ["x"]) == (0, 0)


@pytest.mark.parametrize(("less", "more"), [(1, 2), (10, 50), (49, 99)])
def test_a_larger_percentage_only_adds_namespaces(less: int, more: int) -> None:
    objectives = (Objective(measure="refused_pct", most=1),)
    one = Canary(policy="p", percent=less, objectives=objectives)
    other = Canary(policy="p", percent=more, objectives=objectives)
    names = [f"team-{number}" for number in range(500)]
    covered = {name for name in names if one.covers(name)}
    assert covered < {name for name in names if other.covers(name)}


def test_about_the_percentage_of_namespaces_is_covered() -> None:
    one = canary()
    assert 430 < sum(one.covers(f"team-{number}") for number in range(1000)) < 570


POLICIES = {"packed": {"node": "binpack"}, "even": {"node": "spread"}}
OBJECTIVE = {"measure": "refused_pct", "most": 10}


def test_definition_identifies_the_canary() -> None:
    one = {"policy": "packed", "percent": 20, "objectives": [OBJECTIVE]}
    digest = parse({"policies": POLICIES, "canary": one}).digest()
    assert parse({"policies": POLICIES, "canary": one, "default": "even"}).digest() == digest
    for other in ({**one, "percent": 21}, {**one, "revision": 2}):
        assert parse({"policies": POLICIES, "canary": other}).digest() != digest
    changed = {**POLICIES, "packed": {"node": "spread"}}
    assert parse({"policies": changed, "canary": one}).digest() != digest
    assert parse({"policies": POLICIES}).digest() == ""


@pytest.mark.parametrize(
    ("canary_", "problem"),
    [
        ({"policy": "x", "percent": 1}, "canary.policy: 'x' is not in the file"),
        ({"policy": "even", "percent": 1}, "canary.policy: is the default policy as well"),
        ({"policy": "packed"}, "canary: needs namespaces or percent, not both"),
        ({"policy": "packed", "percent": 100}, "canary.percent: leaves no control group"),
        ({"policy": "packed", "percnt": 1}, "canary.percnt: is not a known key; did you mean"),
        (
            {"policy": "packed", "percent": 1, "objectives": [{"measure": "refused_pct"}]},
            "canary.objectives[0]: has no bound",
        ),
        (
            {"policy": "packed", "percent": 1, "objectives": [{"measure": "refusd_pct"}]},
            "Invalid enum value 'refusd_pct'",
        ),
    ],
)
def test_mistakes_name_the_field(canary_: dict[str, object], problem: str) -> None:
    document = {
        "policies": POLICIES,
        "default": "even",
        "canary": {"objectives": [OBJECTIVE], **canary_},
    }
    with pytest.raises(SettingsInvalid) as caught:
        parse(document)
    assert problem in str(caught.value)
