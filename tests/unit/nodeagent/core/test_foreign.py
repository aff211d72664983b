# SPDX-License-Identifier: Apache-2.0
"""Memory of a device that no allocation covers, and the amount of it that is reported."""

import pytest

from hami_nodeagent.core.breach import BreachRules, Process
from hami_nodeagent.core.foreign import ForeignBook, ForeignRules, foreign_mib
from tests.unit.nodeagent.core.test_breach import GPU, holder, process

BREACH = BreachRules(memory_margin_mib=10, memory_margin_pct=0)
RULES = ForeignRules(margin_mib=100, step_mib=50, looks=2, lower_looks=3)


@pytest.mark.parametrize(
    ("processes", "mib"),
    [
        ((), 0),
        ((process(used_mib=100),), 0),
        ((process("", used_mib=300), process("", pid=8, used_mib=5)), 305),
        ((process("", used_mib=300, command="nv-hostengine"),), 300),
        ((process("other", used_mib=300),), 300),
        ((process(container="sidecar", used_mib=300),), 300),
        ((process(container="", used_mib=100),), 0),
        ((process(used_mib=111),), 1),
        ((process(used_mib=60), process(pid=8, used_mib=60)), 10),
    ],
)
def test_memory_counts_that_no_share_covers(processes: tuple[Process, ...], mib: int) -> None:
    assert foreign_mib([holder(), holder("b")], processes, BREACH) == mib


def test_process_whose_container_is_not_known_yet_is_not_foreign() -> None:
    two = [holder(container="one"), holder(container="two")]
    assert foreign_mib(two, [process(container="", used_mib=300)], BREACH) == 0
    assert foreign_mib([], [process(container="", used_mib=300)], BREACH) == 300


def test_use_up_to_the_memory_limit_above_the_request_is_not_foreign() -> None:
    share = holder(memory_limit_mib=300)
    assert foreign_mib([share], [process(used_mib=310)], BREACH) == 0
    assert foreign_mib([share], [process(used_mib=312)], BREACH) == 2


def test_holder_of_the_whole_device_has_no_limit() -> None:
    assert foreign_mib([holder(is_whole=True)], [process(used_mib=900)], BREACH) == 0


def reported(*samples: int, rules: ForeignRules = RULES) -> list[int]:
    book = ForeignBook(rules)
    found = []
    for mib in samples:
        book.look({GPU: mib}, [GPU])
        found.append(book.reported.get(GPU, 0))
    return found


@pytest.mark.parametrize(
    ("samples", "want"),
    [
        ((100, 101, 101), [0, 0, 150]),
        ((0, 400, 0, 400, 0), [0, 0, 0, 0, 0]),  # shorter than the window
        ((0, 400, 400, 430), [0, 0, 400, 400]),
        ((0, 400, 220, 400), [0, 0, 250, 250]),  # what both samples show
        ((120, 0, 0, 0), [150, 150, 150, 0]),
        ((400, 390, 410, 360, 440), [400, 400, 400, 400, 400]),  # at the border of a step
        ((400, 0, 0, 400, 0, 0, 0), [400, 400, 400, 400, 400, 400, 0]),
    ],
)
def test_amount_follows_once_all_recent_samples_agree(
    samples: tuple[int, ...], want: list[int]
) -> None:
    assert reported(*samples) == want


def test_nothing_is_reported_when_it_is_switched_off() -> None:
    assert reported(400, 400, 400, rules=ForeignRules(enabled=False)) == [0, 0, 0]


def test_device_that_the_driver_does_not_describe_keeps_its_amount_until_it_is_gone() -> None:
    book = ForeignBook(RULES)
    assert book.look({GPU: 400, "GPU-1": 0}, [GPU, "GPU-1"])
    assert not book.look({}, [GPU, "GPU-1"])
    assert book.reported == {GPU: 400, "GPU-1": 0}
    assert book.look({"GPU-1": 0}, ["GPU-1"])
    assert book.reported == {"GPU-1": 0}
    assert not book.look({GPU: 400}, ["GPU-1"]), "the registry does not know it yet"
