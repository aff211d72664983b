# SPDX-License-Identifier: Apache-2.0
"""Faults that tests inject into a kubelet's admissions."""

import anyio
import pytest

from hami_sim.kubelet.admission import Refusal
from hami_sim.kubelet.faults import FaultOrder, Faults
from hami_sim.kubelet.objects import Obj

REFUSAL = Refusal(reason="Evicted", message="test")
WAITING: list[tuple[str, Obj]] = [("ADD", {"n": i}) for i in range(8)]


def test_changes_come_in_order_unless_shuffled() -> None:
    faults = Faults()
    assert faults.choose(WAITING) == 0
    faults.shuffle_admissions(3)
    assert {faults.choose(WAITING) for _ in range(200)} == set(range(8))


def test_only_additions_change_places() -> None:
    faults = Faults()
    faults.shuffle_admissions(3)
    waiting = [("UPDATE", {}), *WAITING]
    assert {faults.choose(waiting) for _ in range(50)} == {0}
    mixed = [WAITING[0], ("REMOVE", {}), WAITING[1]]
    assert {faults.choose(mixed) for _ in range(50)} == {0, 2}


def test_rule_applies_at_its_moment() -> None:
    faults = Faults()
    faults.refuse(lambda pod: REFUSAL if pod["metadata"]["name"] == "x" else None, moment="before")
    bad, good = {"metadata": {"name": "x"}}, {"metadata": {"name": "y"}}
    assert faults.refusal(bad, "before") == REFUSAL
    assert faults.refusal(bad, "after") is None
    assert faults.refusal(good, "before") is None
    faults.clear()
    assert faults.refusal(bad, "before") is None


def test_order_sets_what_it_names_and_leaves_the_rest() -> None:
    faults = Faults()
    faults.obey(FaultOrder(delay_s=0.5, shuffle_seed=1, refuse_label="test=x"))
    faults.obey(FaultOrder(hold=True))
    assert faults.admission_delay_s == 0.5
    assert len({faults.choose(WAITING) for _ in range(50)}) > 1
    assert faults.refusal({"metadata": {"labels": {"test": "x"}}}, "after") is not None
    assert faults.refusal({"metadata": {"labels": {"test": "y"}}}, "after") is None
    faults.obey(FaultOrder(clear=True))
    assert faults.admission_delay_s == 0
    assert faults.refusal({"metadata": {"labels": {"test": "x"}}}, "after") is None


@pytest.mark.anyio
async def test_held_admissions_go_on_when_released() -> None:
    faults = Faults()
    faults.hold_admissions()
    passed = anyio.Event()

    async def admit() -> None:
        await faults.before_admission()
        passed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(admit)
        await anyio.wait_all_tasks_blocked()
        assert not passed.is_set()
        faults.release_admissions()
        with anyio.fail_after(1):
            await passed.wait()
