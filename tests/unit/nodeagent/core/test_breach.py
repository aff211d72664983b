# SPDX-License-Identifier: Apache-2.0
"""Conditions of a breach, and the time at which it is reported."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from hami_nodeagent.core.breach import BreachBook, BreachRules, Outcome, Process, pause_s
from hami_nodeagent.core.holders import Holder

GPU = "GPU-0"
RULES = BreachRules(memory_margin_mib=10, looks=2, core_looks=3, core_margin_pct=10, repeat_s=60)


def holder(pod: str = "a", **more: Any) -> Holder:
    given: dict[str, Any] = {
        "namespace": "default",
        "pod": pod,
        "container": "main",
        "vendor": "nvidia",
        "uuid": GPU,
        "number": 0,
        "limit_mib": 100,
        **more,
    }
    return Holder(pod_uid=f"uid-{pod}", **given)


def process(pod: str = "a", *, pid: int = 7, container: str = "main", **more: Any) -> Process:
    uid = f"uid-{pod}" if pod else ""
    command = more.pop("command", "train")
    return Process(
        pid=pid, pod_uid=uid, container=container if pod else "", command=command, **more
    )


class Watch:
    """A book that receives readings one second apart."""

    def __init__(self, **more: Any) -> None:
        self.book = BreachBook(RULES, **more)
        self.now_s = 0.0

    def look(self, holders: Sequence[Holder], *processes: Process, after_s: float = 1.0) -> Outcome:
        self.now_s += after_s
        return self.book.look(holders, {GPU: processes}, now_s=self.now_s)


def test_use_above_the_share_is_reported_at_the_second_check_and_names_the_process() -> None:
    watch = Watch()
    over = process(used_mib=111)
    assert watch.look([holder()], over) == Outcome()
    (found,) = watch.look([holder()], over).tell
    assert (found.kind, found.used_mib, found.pod_uid) == ("memory", 111, "uid-a")
    assert found.text == (
        f"container main uses 111 MiB of 100 MiB on device {GPU}: process 7 (train) 111 MiB"
    )


def test_processes_of_a_container_are_added_up() -> None:
    watch = Watch()
    two = [process(pid=7, used_mib=60), process(pid=8, used_mib=60)]
    watch.look([holder()], *two)
    (found,) = watch.look([holder()], *two).tell
    assert [one.pid for one in found.processes] == [7, 8]


@pytest.mark.parametrize("used_mib", [0, 100, 110])
def test_use_within_share_and_margin_is_no_breach(used_mib: int) -> None:
    watch = Watch()
    for _ in range(4):
        assert watch.look([holder()], process(used_mib=used_mib)) == Outcome()


@pytest.mark.parametrize(
    ("limit_mib", "margin_mib"), [(1000, 512), (10_240, 512), (20_480, 1024), (81_920, 4096)]
)
def test_local_memory_and_lazily_loaded_code_are_within_the_default_margin(
    limit_mib: int, margin_mib: int
) -> None:
    book = BreachBook(BreachRules())
    own = holder(limit_mib=limit_mib)

    def reported(used_mib: int, after_s: float) -> int:
        use = {GPU: [process(used_mib=used_mib)]}
        return sum(len(book.look([own], use, now_s=after_s + n).tell) for n in range(4))

    assert reported(limit_mib + margin_mib, 0) == 0
    assert reported(limit_mib + margin_mib + 1, 10) == 1


def test_breach_is_reported_once_then_repeated_after_long_and_its_end_is_seen() -> None:
    watch = Watch()
    over = process(used_mib=200)
    watch.look([holder()], over)
    first = watch.look([holder()], over)
    assert first.new == first.tell == first.going
    again = watch.look([holder()], over)
    assert (again.tell, len(again.going)) == ((), 1)
    late = watch.look([holder()], over, after_s=60)
    assert (len(late.tell), late.new) == (1, ())
    ended = watch.look([holder()], process(used_mib=1))
    assert (len(ended.ended), ended.going) == (1, ())
    returned = watch.look([holder()], over)
    assert (returned.tell, len(returned.going)) == ((), 1)


def test_device_that_did_not_answer_keeps_its_state() -> None:
    watch = Watch()
    over = process(used_mib=200)
    watch.look([holder()], over)
    watch.look([holder()], over)
    assert len(watch.book.look([holder()], {}, now_s=9).going) == 1


def test_whole_devices_are_not_compared() -> None:
    watch = Watch()
    for _ in range(3):
        outcome = watch.look([holder(is_whole=True)], process(used_mib=999, core_pct=100))
        assert outcome == Outcome()


def test_use_is_compared_with_the_memory_limit_above_the_request() -> None:
    watch, share = Watch(), [holder(memory_limit_mib=300)]
    for _ in range(4):
        assert watch.look(share, process(used_mib=315)) == Outcome()
    watch.look(share, process(used_mib=316))
    (found,) = watch.look(share, process(used_mib=316)).tell
    assert "uses 316 MiB of 300 MiB" in found.text


def test_lowered_share_is_no_breach_until_use_grows() -> None:
    watch = Watch()
    watch.look([holder(limit_mib=100)], process(used_mib=95))
    lowered = [holder(limit_mib=50)]
    for used_mib in (95, 95, 80, 80):
        assert watch.look(lowered, process(used_mib=used_mib)) == Outcome()
    watch.look(lowered, process(used_mib=95))
    assert len(watch.look(lowered, process(used_mib=95)).tell) == 1


def test_process_without_an_allocation_is_foreign() -> None:
    watch = Watch()
    strangers = [
        process("b", pid=8, used_mib=1),
        process("a", pid=9, container="sidecar"),
        process("", pid=10, command="miner", used_mib=3),
    ]
    watch.look([holder()], *strangers)
    found = watch.look([holder()], *strangers).tell
    assert [(one.kind, one.pod_uid, one.container) for one in found] == [
        ("foreign", "uid-b", "main"),
        ("foreign", "uid-a", "sidecar"),
        ("foreign", "", ""),
    ]
    assert found[2].text == (f"uses device {GPU} without an allocation: process 10 (miner) 3 MiB")


def test_daemons_of_the_host_are_tolerated_but_not_their_names_in_pods() -> None:
    watch = Watch()
    daemon = RULES.host_commands[0]
    watch.look([], process("", command=daemon), process("b", command=daemon))
    found = watch.look([], process("", command=daemon), process("b", command=daemon)).tell
    assert [one.pod_uid for one in found] == ["uid-b"]


def test_process_of_an_unknown_container_counts_for_the_only_candidate() -> None:
    watch = Watch()
    unknown = process(container="", used_mib=200)
    watch.look([holder()], unknown)
    assert len(watch.look([holder()], unknown).tell) == 1
    several = [holder(), holder(container="other")]
    watch = Watch()
    for _ in range(3):
        assert watch.look(several, unknown) == Outcome()


def test_compute_is_compared_only_while_another_pod_waits_for_it() -> None:
    capped = [holder(core_pct=30), holder("b", core_pct=0)]
    busy, other = process(core_pct=90), process("b", pid=8, core_pct=10)
    lone, shared, forced = Watch(), Watch(), Watch(is_core_forced=True)
    last = always = Outcome()
    for _ in range(4):
        assert lone.look(capped, busy) == Outcome()
        last = shared.look(capped, busy, other)
        always = forced.look(capped, busy)
    assert [(one.kind, one.core_pct) for one in last.going] == [("compute", 90)]
    assert [one.kind for one in always.going] == ["compute"]
    assert "90 % of 30 % compute" in last.going[0].text


def test_short_peaks_of_compute_are_averaged() -> None:
    watch = Watch(is_core_forced=True)
    for core_pct in (100, 0, 0, 100, 0, 0, 100):
        assert watch.look([holder(core_pct=30)], process(core_pct=core_pct)).tell == ()


def test_memory_of_an_ended_container_is_not_remembered() -> None:
    watch = Watch()
    watch.look([holder(limit_mib=100)], process(used_mib=95))
    watch.look([])
    fresh = [replace(holder(), limit_mib=50)]
    watch.look(fresh, process(used_mib=95))
    assert len(watch.look(fresh, process(used_mib=95)).tell) == 1


def test_bursts_are_one_breach_until_none_was_seen_for_the_whole_window() -> None:
    watch = Watch()
    over, under = process(used_mib=200), process(used_mib=100)
    watch.look([holder()], over)
    for _ in range(RULES.window_looks - 2):
        assert watch.look([holder()], under) == Outcome()
    assert len(watch.look([holder()], over).new) == 1
    for _ in range(RULES.window_looks):
        watch.look([holder()], under)
    assert watch.look([holder()], over) == Outcome()


def test_single_readings_further_apart_than_the_window_are_no_breach() -> None:
    watch = Watch()
    for number in range(5 * RULES.window_looks):
        used_mib = 200 if number % RULES.window_looks == 0 else 100
        assert watch.look([holder()], process(used_mib=used_mib)) == Outcome()


def test_breach_of_a_released_share_is_dropped() -> None:
    watch = Watch()
    watch.look([holder()], process(used_mib=200))
    watch.look([])
    assert watch.look([holder()], process(used_mib=200)) == Outcome()


def test_window_is_never_shorter_than_the_required_readings() -> None:
    book = BreachBook(replace(RULES, looks=3, window_looks=1))
    over = {GPU: [process(used_mib=200)]}
    told = [len(book.look([holder()], over, now_s=now_s).new) for now_s in range(4)]
    assert told == [0, 0, 1, 0]


@pytest.mark.parametrize(("chance", "pause"), [(0.0, 1.5), (0.5, 2.25), (1.0, 3.0)])
def test_readings_come_at_random_times_within_the_set_interval(chance: float, pause: float) -> None:
    assert pause_s(3.0, chance) == pause
