# SPDX-License-Identifier: Apache-2.0
"""Contract of every partitioner, on a machine that enforces its own tables.

Existing partitions are read from the machine itself, not from the driver under test.
"""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DeviceGone,
    DeviceHung,
    DriverError,
    DriverMissing,
    PartitionBusy,
    PartitionRefused,
)
from tests.support.vendor_parts import KIND_BY_VENDOR, KINDS, PartBench, fill

pytestmark = pytest.mark.anyio

MakeBench = Callable[[], PartBench]
BY_COMMAND = sorted(kind.name for kind in KINDS if kind.create)


@pytest.fixture(params=sorted(KIND_BY_VENDOR))
def bench(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PartBench:
    """A divided machine, once per vendor."""
    bench = PartBench(KIND_BY_VENDOR[request.param], tmp_path)
    bench.answer_in_process(monkeypatch)
    return bench


@pytest.fixture(params=BY_COMMAND)
def tool_bench(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PartBench:
    """A divided machine, once per vendor whose tool makes partitions."""
    bench = PartBench(KIND_BY_VENDOR[request.param], tmp_path)
    bench.answer_in_process(monkeypatch)
    return bench


@pytest.fixture(params=sorted(KIND_BY_VENDOR))
def real_bench(request: pytest.FixtureRequest, tmp_path: Path) -> PartBench:
    """A divided machine whose tools are run as processes, once per vendor."""
    return PartBench(KIND_BY_VENDOR[request.param], tmp_path)


@pytest.fixture(params=sorted(kind.name for kind in KINDS if kind.refuses_busy))
def busy_bench(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PartBench:
    """A divided machine, once per vendor whose tool does not remove partitions in use."""
    bench = PartBench(KIND_BY_VENDOR[request.param], tmp_path)
    bench.answer_in_process(monkeypatch)
    return bench


def without_busy(instances: tuple[Instance, ...]) -> list[tuple[str, str, str, dict[str, str]]]:
    return sorted((one.uuid, one.instance_id, one.profile, one.handles) for one in instances)


async def test_an_undivided_machine_has_no_instances(bench: PartBench) -> None:
    assert await bench.partitioner().instances() == ()
    assert bench.partitioner().vendor == bench.kind.vendor


async def test_created_partition_is_listed_with_its_handles_until_removed(
    bench: PartBench,
) -> None:
    partitioner = bench.partitioner()
    for index, size in ((0, 0), (0, 0), (1, 1)):
        wanted = bench.wanted(index, size)
        made = await partitioner.create(wanted)
        assert (made.uuid, made.profile) == (wanted.uuid, wanted.profile)
        assert made.handles.keys() == set(bench.kind.words)
        assert all(made.handles.values())
        assert made in await bench.partitioner().instances()
    there = await partitioner.instances()
    assert (bench.in_hardware(0), bench.in_hardware(1)) == (2, 1)
    assert len({(one.uuid, one.instance_id) for one in there}) == len(there) == 3
    for one in there:
        await partitioner.destroy(one)
        assert one not in await partitioner.instances()
    assert await partitioner.instances() == ()
    assert not bench.litter(0)
    assert not bench.litter(1)


async def test_the_tools_themselves_make_and_remove_it(real_bench: PartBench) -> None:
    partitioner = real_bench.partitioner()
    made = await partitioner.create(real_bench.wanted())
    assert real_bench.in_hardware() == 1
    await partitioner.destroy(made)
    assert not real_bench.litter()


async def test_removing_twice_is_no_error_and_touches_nothing_else(bench: PartBench) -> None:
    partitioner = bench.partitioner()
    first, second = [await partitioner.create(bench.wanted()) for _ in range(2)]
    await partitioner.destroy(first)
    await partitioner.destroy(first)
    assert without_busy(await partitioner.instances()) == without_busy((second,))


async def test_a_number_that_carries_another_partition_by_now_is_left_alone(
    tool_bench: PartBench,
) -> None:
    partitioner = tool_bench.partitioner()
    old = await partitioner.create(tool_bench.wanted())
    await partitioner.destroy(old)
    new = await partitioner.create(tool_bench.wanted(0, 1))
    stale = Instance(
        uuid=new.uuid,
        instance_id=new.instance_id,
        profile=old.profile or "another",
        handles={key: f"{word}-old" for key, word in old.handles.items()},
    )
    await partitioner.destroy(stale)
    assert without_busy(await partitioner.instances()) == without_busy((new,))


async def test_a_full_device_refuses_with_a_message_and_keeps_its_partitions(
    bench: PartBench,
) -> None:
    partitioner = bench.partitioner()
    made = await fill(bench, partitioner)
    assert len(made) == bench.kind.room
    assert not bench.overbooked()
    with pytest.raises(PartitionRefused, match=r"\d") as refusal:
        await partitioner.create(bench.wanted())
    assert bench.uuids[0] in str(refusal.value)
    assert without_busy(await partitioner.instances()) == without_busy(tuple(made))
    await partitioner.destroy(made[1])
    await partitioner.create(bench.wanted())
    assert not bench.overbooked()
    assert bench.in_hardware() == bench.kind.room


async def test_an_unknown_device_or_size_is_refused_before_the_hardware_is_touched(
    bench: PartBench,
) -> None:
    partitioner = bench.partitioner()
    wanted = bench.wanted()
    stranger = type(wanted)(uuid="GPU-none", profile="1g", memory_mib=1, core_pct=1)
    with pytest.raises(DeviceGone):
        await partitioner.create(stranger)
    if wanted.profile:
        huge = type(wanted)(uuid=wanted.uuid, profile="vir99", memory_mib=1, core_pct=1)
        with pytest.raises(PartitionRefused, match="there are"):
            await partitioner.create(huge)
    assert not bench.litter()


@pytest.mark.parametrize("how", ["fail", "late", "garbage"])
async def test_failed_command_leaves_no_partial_partition(tool_bench: PartBench, how: str) -> None:
    kept = await tool_bench.partitioner().create(tool_bench.wanted(1))
    tool_bench.tools.trip(tool_bench.kind.create, how)
    partitioner = tool_bench.partitioner()
    try:
        made = await partitioner.create(tool_bench.wanted())
    except DriverError:
        assert not tool_bench.in_hardware()
        assert not tool_bench.tools.cuts(0)
    else:  # it was done and only the answer was noise: what is there counts
        assert how == "garbage"
        assert made in await partitioner.instances()
        await partitioner.destroy(made)
    assert without_busy(await partitioner.instances()) == without_busy((kept,))
    made = await partitioner.create(tool_bench.wanted())
    assert made.handles


@pytest.mark.parametrize("how", ["hang", "stall"])
async def test_command_killed_midway_leaves_no_partial_partition(
    tool_bench: PartBench, how: str
) -> None:
    partitioner = tool_bench.partitioner()
    tool_bench.tools.trip(tool_bench.kind.create, how)
    with pytest.raises(DeviceHung):
        await partitioner.create(tool_bench.wanted())
    assert await partitioner.instances() == ()
    assert not tool_bench.litter()


async def test_a_process_killed_after_its_work_was_done_leaves_nothing(tmp_path: Path) -> None:
    bench = PartBench(KIND_BY_VENDOR["metax"], tmp_path)
    bench.tools.trip(bench.kind.create, "stall")
    partitioner = bench.partitioner(query_limit_s=3.0)
    with pytest.raises(DeviceHung):
        await partitioner.create(bench.wanted())
    assert not bench.litter()


async def test_canceled_caller_leaves_no_partial_partition(
    tool_bench: PartBench,
) -> None:
    partitioner = tool_bench.partitioner()
    tool_bench.gives_up = False
    tool_bench.tools.trip(tool_bench.kind.create, "stall")
    done = tool_bench.in_hardware if tool_bench.kind.vendor != "kunlunxin" else _is_cut(tool_bench)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partitioner.create, tool_bench.wanted())
            while not done():
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
    assert await partitioner.instances() == ()
    assert not tool_bench.litter()


def _is_cut(bench: PartBench) -> Callable[[], int]:
    return lambda: bench.tools.cuts(0)


async def test_failed_rollback_is_listed_and_removed_by_the_next(
    tool_bench: PartBench,
) -> None:
    tool_bench.tools.trip(tool_bench.kind.create, "late")
    tool_bench.tools.trip(tool_bench.kind.destroy, "fail")
    partitioner = tool_bench.partitioner()
    with pytest.raises(DriverError):
        await partitioner.create(tool_bench.wanted())
    for one in await partitioner.instances():
        await partitioner.destroy(one)
    made = await partitioner.create(tool_bench.wanted())
    await partitioner.destroy(made)
    assert not tool_bench.litter()


async def test_a_partition_in_use_is_not_removed(busy_bench: PartBench) -> None:
    partitioner = busy_bench.partitioner()
    made = await partitioner.create(busy_bench.wanted())
    busy_bench.tools.occupy(0, made.instance_id)
    if busy_bench.kind.tells_busy:
        assert [one.is_busy for one in await partitioner.instances()] == [True]
    with pytest.raises(PartitionBusy):
        await partitioner.destroy(made)
    assert busy_bench.in_hardware() == 1
    busy_bench.tools.occupy(0, made.instance_id, busy=False)
    await partitioner.destroy(made)
    assert not busy_bench.litter()


async def test_missing_driver_is_an_error_and_loses_no_partition(bench: PartBench) -> None:
    partitioner = bench.partitioner()
    made = await partitioner.create(bench.wanted())
    bench.tools.answer("", complaint="the driver is not loaded")
    for call in (
        partitioner.instances,
        lambda: partitioner.create(bench.wanted()),
        lambda: partitioner.destroy(made),
    ):
        with pytest.raises(DriverMissing):
            await call()
    bench.tools.heal()
    assert without_busy(await partitioner.instances()) == without_busy((made,))


@pytest.mark.parametrize("how", ["garbage", "truncated"])
async def test_unparsable_answer_changes_nothing(bench: PartBench, how: str) -> None:
    partitioner = bench.partitioner()
    made = await partitioner.create(bench.wanted())
    bench.tools.garble(how)
    with pytest.raises(AnswerUnknown):
        await partitioner.instances()
    with pytest.raises(AnswerUnknown):
        await partitioner.create(bench.wanted())
    with pytest.raises(AnswerUnknown):
        await partitioner.destroy(made)
    bench.tools.heal()
    assert bench.in_hardware() == 1
    assert without_busy(await partitioner.instances()) == without_busy((made,))


async def test_calls_at_the_same_time_get_different_partitions(bench: PartBench) -> None:
    partitioner = bench.partitioner()
    made: list[Instance] = []

    async def make() -> None:
        made.append(await partitioner.create(bench.wanted()))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(make)
    assert len({one.instance_id for one in made}) == 3
    words = [tuple(one.handles.values()) for one in made]
    assert len(set(words)) == 3
    assert not bench.overbooked()


async def test_another_agent_process_sees_and_removes_what_the_first_made(
    bench: PartBench,
) -> None:
    made = await bench.partitioner().create(bench.wanted())
    later = bench.partitioner()
    assert without_busy(await later.instances()) == without_busy((made,))
    await later.destroy(made)
    assert not bench.litter()
