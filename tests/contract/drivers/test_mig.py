# SPDX-License-Identifier: Apache-2.0
"""MIG through the driver and the fake NVML library: tables, own and foreign instances, rollback."""

import ctypes
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pynvml  # noqa: TID251 - a stranger beside the driver
import pytest
from msgspec.structs import replace

from hami_common.vendors.partitions import NO_START, Division
from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.core.health import FaultSeen, ProbePassed, Stimulus
from hami_nodeagent.drivers.errors import (
    DeviceGone,
    DriverDenied,
    DriverError,
    NotSupported,
    PartitionBusy,
    PartitionRefused,
)
from hami_nodeagent.drivers.nvidia import mig, nvml
from hami_nodeagent.drivers.protocol import InstanceUsage, ModeSwitch
from hami_sim.hardware.fake_nvml import (
    EVENT_XID,
    FakeNvml,
    MadeInstance,
    Process,
    write_capabilities,
)
from hami_sim.hardware.mig_tables import TABLES, MigProfile
from tests.contract.drivers.benches import FakeNvmlBench
from tests.support.mig import facts_of

CHIP_BY_MACHINE = {
    "2xA30": "A30",
    "8xA100-40": "A100-40",
    "8xA100-80": "A100-80",
    "8xH100": "H100-80",
    "8xH200": "H200-141",
    "8xB200": "B200-180",
    "1xRTX-PRO-6000": "RTX-PRO-6000",
}
UNKNOWN, TIMEOUT = 999, 10
LEAST_FAILURES = 1000
"""Minimum number of calls that fail, one at a time, over all machines."""
NVML_CALLS = sorted(set(re.findall(r"pynvml\.(nvml\w+)", Path(mig.__file__).read_text("utf-8"))))


class Card:
    """The first card of a machine, in MIG mode, used without a driver around it."""

    def __init__(self, name: str, bench: FakeNvmlBench, library: Path, proc: Path) -> None:
        self.bench = bench
        self.name = name
        self.nvml: FakeNvml = bench.nvml
        self.uuid = bench.uuids[0]
        write_capabilities(proc, bench.profile)
        self.nvml.set_mig_mode(0, is_on=True)
        nvml.open_library(str(library))
        self.raw = pynvml.nvmlDeviceGetHandleByIndex(0)
        minor = bench.profile.devices[0].minor
        self.at = mig.Place(raw=self.raw, uuid=self.uuid, minor=minor, proc_root=str(proc))

    def wanted(self, profile: str, start: int) -> Wanted:
        return Wanted(uuid=self.uuid, profile=profile, start=start, memory_mib=1, core_pct=0)

    def make(self, profile: str, start: int) -> Instance:
        return mig.create(self.at, self.wanted(profile, start))

    def made(self) -> tuple[MadeInstance, ...]:
        return self.nvml.made_instances(0)

    @property
    def sizes(self) -> tuple[MigProfile, ...]:
        return TABLES[CHIP_BY_MACHINE[self.name]]

    def remove(self, start: int) -> None:
        """Remove a foreign instance at a place."""
        (number,) = (made.number for made in self.made() if made.start == start)
        pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(self.raw, number))

    def half(self, size: MigProfile, start: int) -> None:
        """Make a foreign GPU instance without a compute instance."""
        place = pynvml.c_nvmlGpuInstancePlacement_t(start=start, size=size.size)
        pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(
            self.raw, size.native_id, ctypes.byref(place)
        )


@pytest.fixture
def card_of(
    nvidia_bench: Callable[[str], FakeNvmlBench], nvml_library: Path, tmp_path: Path
) -> Iterator[Callable[[str], Card]]:
    yield lambda name: Card(name, nvidia_bench(name), nvml_library, tmp_path / "proc")
    nvml.close_library(nvml.Events())


class Failure:
    """Fails one NVML call, the ``at``-th, or all from it on; before or after its work is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.at = 0
        self.is_done = False
        self.lasts = False
        self.code = UNKNOWN
        for name in NVML_CALLS:
            monkeypatch.setattr(pynvml, name, self._wrapped(getattr(pynvml, name)))

    def arm(self, at: int, *, is_done: bool, code: int = UNKNOWN, lasts: bool = False) -> None:
        self.calls, self.at, self.is_done, self.code, self.lasts = 0, at, is_done, code, lasts

    def disarm(self) -> None:
        self.arm(0, is_done=False)

    def _wrapped(self, fn: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self.calls += 1
            hit = self.at > 0 and (self.calls == self.at or (self.lasts and self.calls >= self.at))
            if not hit:
                return fn(*arguments)
            if self.is_done:
                with suppress(pynvml.NVMLError):
                    fn(*arguments)
            raise pynvml.NVMLError(self.code)

        return call


@pytest.fixture
def failure(monkeypatch: pytest.MonkeyPatch) -> Failure:
    return Failure(monkeypatch)


# ---- capabilities of the card ------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("machine", CHIP_BY_MACHINE)
async def test_sizes_are_those_that_the_card_reports(
    machine: str, nvidia_bench: Callable[[str], FakeNvmlBench]
) -> None:
    bench = nvidia_bench(machine)
    bench.nvml.set_mig_mode(0, is_on=True)
    driver = bench.driver()
    inventory = await driver.discover()
    await driver.aclose()
    first, *others = inventory.devices
    assert first.mode == "mig"
    assert all(device.mode == "soft" and not device.partitions for device in others)
    table = TABLES[CHIP_BY_MACHINE[machine]]
    told = {p.name: (p.native_id, p.memory_mib, p.size, p.starts) for p in first.partitions}
    assert told == {p.name: (p.native_id, p.memory_mib, p.size, p.starts) for p in table}
    assert {p.name for p in first.partitions if p.by_name_only} == {
        p.name for p in table if "+" in p.name or "-" in p.name
    }
    assert not Division.check(first.partitions, first.resources)
    largest = max(p.sm_count for p in table)
    assert {p.name: p.core_pct for p in first.partitions} == {
        p.name: 100 * p.sm_count // largest for p in table
    }


@pytest.mark.anyio
async def test_card_in_mig_mode_without_profiles_is_not_usable(
    nvidia_bench: Callable[[str], FakeNvmlBench],
) -> None:
    bench = nvidia_bench("8xH200")
    bench.nvml.set_mig_mode(0, is_on=True)
    bench.nvml.fault("nvmlDeviceGetGpuInstanceProfileInfoV", 0, pynvml.NVML_ERROR_NOT_SUPPORTED)
    driver = bench.driver()
    inventory = await driver.discover()
    await driver.aclose()
    assert [device.index for device in inventory.devices] == list(range(1, 8))
    assert any("lists no profile" in problem for problem in inventory.problems)


# ---- making, telling, removing -----------------------------------------------------------------


@pytest.mark.parametrize("machine", CHIP_BY_MACHINE)
def test_every_profile_can_be_made_at_each_of_its_places(
    machine: str, card_of: Callable[[str], Card]
) -> None:
    card = card_of(machine)
    for size in TABLES[CHIP_BY_MACHINE[machine]]:
        for start in size.starts:
            made = card.make(size.name, start)
            assert (made.profile, made.start, made.is_busy) == (size.name, start, False)
            assert [(m.profile, m.start) for m in card.made()] == [(size.name, start)]
            assert card.made()[0].uuids == (made.instance_id,)
            assert mig.read_instances(card.at) == (made,)
            mig.destroy(card.at, made)
            assert card.made() == ()


def test_instance_has_its_uuid_and_device_nodes(card_of: Callable[[str], Card]) -> None:
    card = card_of("8xH200")
    made = card.make("1g.18gb", 6)
    assert made.instance_id.startswith("MIG-")
    card_minor = card.bench.profile.devices[0].minor
    number = 3 + card_minor * 135 + 13 * 9
    assert made.handles == {
        "mig_uuid": made.instance_id,
        "gpu_instance": "13",
        "compute_instance": "0",
        "gi_cap": f"/dev/nvidia-caps/nvidia-cap{number}",
        "ci_cap": f"/dev/nvidia-caps/nvidia-cap{number + 1}",
    }


def test_file_of_the_instance_is_preferred_to_the_table(
    card_of: Callable[[str], Card], tmp_path: Path
) -> None:
    card = card_of("8xH200")
    minor = card.bench.profile.devices[0].minor
    for part, number in (("gi13", 700), ("gi13/ci0", 701)):
        folder = tmp_path / f"proc/driver/nvidia/capabilities/gpu{minor}/mig/{part}"
        folder.mkdir(parents=True)
        text = f"DeviceFileMinor: {number}\nDeviceFileMode: 256\nDeviceFileModify: 1\n"
        (folder / "access").write_text(text, "ascii")
    made = card.make("1g.18gb", 6)
    assert made.handles["gi_cap"] == "/dev/nvidia-caps/nvidia-cap700"
    assert made.handles["ci_cap"] == "/dev/nvidia-caps/nvidia-cap701"


def test_refusal_lists_the_available_sizes_and_places(card_of: Callable[[str], Card]) -> None:
    card = card_of("8xA100-40")
    card.make("3g.20gb", 4)
    before = card.made()
    refusals = {
        ("9g.90gb", 0): r"has the sizes 1g\.5gb, 1g\.5gb\+me, 1g\.10gb, 2g\.10gb",
        ("3g.20gb", 2): r"it may be at 0, 4",
        ("2g.10gb", 4): r"position 4 is taken",
        ("7g.40gb", 0): r"position 4 is taken",
    }
    for (profile, start), text in refusals.items():
        with pytest.raises(PartitionRefused, match=text):
            card.make(profile, start)
    with pytest.raises(PartitionRefused, match="it may be at"):
        mig.create(card.at, Wanted(uuid=card.uuid, profile="1g.5gb", memory_mib=1, core_pct=0))
    card.nvml.set_mig_mode(0, is_on=False)
    with pytest.raises(PartitionRefused, match="not in MIG mode"):
        card.make("1g.5gb", 0)
    assert mig.read_instances(card.at) == ()
    card.nvml.set_mig_mode(0, is_on=True)
    assert card.made() == before


def test_media_engines_run_out_before_places_do(card_of: Callable[[str], Card]) -> None:
    card = card_of("1xRTX-PRO-6000")
    card.make("1g.24gb+me.all", 0)
    with pytest.raises(PartitionRefused) as refused:
        card.make("1g.24gb", 3)
    assert refused.value.code == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
    card.make("1g.24gb-me", 3)
    assert [m.profile for m in card.made()] == ["1g.24gb+me.all", "1g.24gb-me"]


def test_instance_that_another_made_meanwhile_is_left_alone(
    card_of: Callable[[str], Card], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_of("8xH200")
    ours = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement

    def after_another(*arguments: object) -> object:
        monkeypatch.setattr(pynvml, "nvmlDeviceCreateGpuInstanceWithPlacement", ours)
        card.make("1g.18gb", 3)
        return ours(*arguments)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(pynvml, "nvmlDeviceCreateGpuInstanceWithPlacement", after_another)
    with pytest.raises(PartitionRefused):
        card.make("1g.18gb", 3)
    assert [(m.profile, m.start) for m in card.made()] == [("1g.18gb", 3)]


def test_instance_in_use_stays(card_of: Callable[[str], Card]) -> None:
    card = card_of("8xH100")
    made = card.make("2g.20gb", 2)
    number = int(made.handles["gpu_instance"])
    worker = Process(pid=41, used_mib=100, gpu_instance=number, compute_instance=0)
    card.nvml.set_processes(0, [worker])
    assert [i.is_busy for i in mig.read_instances(card.at)] == [True]
    with pytest.raises(PartitionBusy):
        mig.destroy(card.at, made)
    assert len(card.made()) == 1
    card.nvml.set_processes(0, [])
    mig.destroy(card.at, made)
    mig.destroy(card.at, made)  # gone already
    assert card.made() == ()


def test_in_use_error_of_the_driver_is_trusted(card_of: Callable[[str], Card]) -> None:
    card = card_of("8xH100")
    made = card.make("2g.20gb", 2)
    card.nvml.fault("nvmlComputeInstanceDestroy", 0, pynvml.NVML_ERROR_IN_USE)
    with pytest.raises(PartitionBusy):
        mig.destroy(card.at, made)
    assert mig.read_instances(card.at) == (made,)


def test_foreign_instances_are_distinguished(card_of: Callable[[str], Card]) -> None:
    card = card_of("8xA100-80")
    by_name = {size.name: size for size in TABLES["A100-80"]}
    card.half(by_name["2g.20gb"], 0)  # nothing in it
    card.half(by_name["3g.40gb"], 4)  # split in two by its maker
    split = pynvml.nvmlDeviceGetHandleByIndex(0)
    handles = (pynvml.c_nvmlGpuInstance_t * 2)()
    count = ctypes.c_uint()
    pynvml.nvmlDeviceGetGpuInstances(split, 9, handles, ctypes.byref(count))
    for kind in (0, 1):
        pynvml.nvmlGpuInstanceCreateComputeInstance(handles[0], kind)
    whole = card.make("1g.10gb+me", 2)
    told = mig.read_instances(card.at)
    assert [(i.start, i.profile) for i in told] == [(0, ""), (2, "1g.10gb+me"), (4, "")]
    assert told[1] == whole
    assert len({i.instance_id for i in told}) == 3
    assert all(not i.handles for i in told if not i.profile)
    for instance in told:
        mig.destroy(card.at, instance)
    assert card.made() == ()


@pytest.mark.anyio
async def test_partitioner_sees_all_cards_in_mig_mode_and_only_those(
    nvidia_bench: Callable[[str], FakeNvmlBench], tmp_path: Path
) -> None:
    bench = nvidia_bench("8xH200")
    write_capabilities(tmp_path / "proc", bench.profile)
    for index in (1, 4):
        bench.nvml.set_mig_mode(index, is_on=True)
    driver = bench.driver(proc_root=str(tmp_path / "proc"))
    partitioner = driver.partitioner
    assert partitioner is not None
    assert partitioner.vendor == "nvidia"
    made = [
        await partitioner.create(
            Wanted(
                uuid=bench.uuids[index],
                profile="3g.71gb",
                start=start,
                memory_mib=71168,
                core_pct=45,
            )
        )
        for index, start in ((4, 0), (1, 4), (4, 4))
    ]
    assert sorted(i.instance_id for i in await partitioner.instances()) == sorted(
        i.instance_id for i in made
    )
    with pytest.raises(PartitionRefused, match="not in MIG mode"):
        await partitioner.create(
            Wanted(uuid=bench.uuids[0], profile="1g.18gb", start=0, memory_mib=1, core_pct=0)
        )
    bench.lose(1)
    assert [i.uuid for i in await partitioner.instances()] == [bench.uuids[4]] * 2
    with pytest.raises(DeviceGone):
        await partitioner.destroy(made[1])
    bench.restore(1)
    for instance in made:
        await partitioner.destroy(instance)
    assert await partitioner.instances() == ()
    bench.nvml.fault("nvmlDeviceGetGpuInstances", 4, UNKNOWN)
    with pytest.raises(DriverError):
        await partitioner.instances()
    with pytest.raises(DeviceGone):
        await partitioner.destroy(Instance(uuid="GPU-other", instance_id="MIG-x"))
    await driver.aclose()


@pytest.mark.parametrize("machine", CHIP_BY_MACHINE)
def test_hardware_has_capacity_exactly_where_the_scheduler_sees_it(
    machine: str, card_of: Callable[[str], Card]
) -> None:
    card = card_of(machine)
    facts = facts_of(CHIP_BY_MACHINE[machine])
    assert facts.partitions == mig.with_sizes(card.raw, facts).partitions
    division = Division(facts.partitions, facts.resources)
    dice = random.Random(20261122)
    owned: list[tuple[str, int]] = []
    refused = 0
    for _ in range(60):
        if owned and dice.random() < 0.45:
            _, start = owned.pop(dice.randrange(len(owned)))
            card.remove(start)
            continue
        at = dice.randrange(len(division.profiles))
        profile = division.profiles[at]
        taken, spent = division.spent(Counter(f"{name}@{start}" for name, start in owned))
        start = int(division.starts(at)[taken])
        has_units = bool((spent + division.needs[at] <= division.capacity).all())
        size = next(size for size in card.sizes if size.name == profile.name)
        if start != NO_START and has_units:
            card.half(size, start)
            owned.append((profile.name, start))
        else:
            refused += 1
            assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(card.raw, size.native_id) == 0
        assert sorted((made.profile, made.start) for made in card.made()) == sorted(owned)
    assert refused > 0
    assert owned


@pytest.mark.anyio
async def test_card_in_mig_mode_reports_processes_and_faults_of_its_instances(
    nvidia_bench: Callable[[str], FakeNvmlBench],
) -> None:
    bench = nvidia_bench("8xH200")
    bench.nvml.set_mig_mode(0, is_on=True)
    driver = bench.driver()
    await driver.discover()
    assert driver.partitioner is not None
    made = await driver.partitioner.create(
        Wanted(uuid=bench.uuids[0], profile="2g.35gb", start=2, memory_mib=33024, core_pct=24)
    )
    number = int(made.handles["gpu_instance"])
    worker = Process(pid=77, used_mib=2048, sm_pct=60, gpu_instance=number, compute_instance=0)
    bench.nvml.set_processes(0, [worker])
    usage = (await driver.usage())[0]
    assert usage.core_pct is None  # NVML reports none for a card in MIG mode
    assert usage.processes is not None
    assert [(process.pid, process.used_mib) for process in usage.processes] == [(77, 2048)]
    first = InstanceUsage(instance_id=made.instance_id, used_mib=2048)
    assert usage.instances == (first,)  # a load is measured between two readings
    told, *others = await driver.usage()
    assert told.instances == (replace(first, core_pct=60),)
    assert not any(other.instances for other in others)
    await driver.wait_faults(0.05)  # events from now on
    for code, part in ((94, number), (79, None), (13, number)):
        bench.nvml.event(0, EVENT_XID, code, gpu_instance=number)
        faults: tuple[Stimulus, ...] = ()
        with anyio.fail_after(20):
            while not faults:
                faults = await driver.wait_faults(0.5)
        text = f"Xid {code} in GPU instance {number}"
        uuid, fatal = bench.uuids[0], code != 13
        assert faults == (FaultSeen(uuid=uuid, code=code, fatal=fatal, text=text, part=part),)
    await driver.aclose()


@pytest.mark.anyio
async def test_card_without_samples_reports_memory_of_its_instances_only(
    nvidia_bench: Callable[[str], FakeNvmlBench],
) -> None:
    bench = nvidia_bench("2xA30")
    bench.nvml.set_mig_mode(1, is_on=True)
    driver = bench.driver()
    await driver.discover()
    assert driver.partitioner is not None
    made = await driver.partitioner.create(
        Wanted(uuid=bench.uuids[1], profile="1g.6gb", start=0, memory_mib=5952, core_pct=25)
    )
    for _ in range(2):
        (_, usage) = await driver.usage()
        assert usage.instances == (InstanceUsage(instance_id=made.instance_id, used_mib=0),)
    bench.nvml.fault("nvmlDeviceGetMigDeviceHandleByIndex", 1, UNKNOWN)
    (_, usage) = await driver.usage()
    assert (usage.instances, usage.used_mib) == ((), 0)
    await driver.aclose()


@pytest.mark.anyio
async def test_driver_that_refuses_samples_reports_no_load(
    nvidia_bench: Callable[[str], FakeNvmlBench],
) -> None:
    bench = nvidia_bench("8xH200")
    bench.nvml.set_mig_mode(0, is_on=True)
    driver = bench.driver()
    await driver.discover()
    assert driver.partitioner is not None
    await driver.partitioner.create(
        Wanted(uuid=bench.uuids[0], profile="2g.35gb", start=2, memory_mib=33024, core_pct=24)
    )
    loads = []
    for code in (0, pynvml.NVML_ERROR_NO_PERMISSION, 0, 0):
        bench.nvml.clear_faults()
        bench.nvml.fault("nvmlGpmMigSampleGet", 0, code)
        loads += [one.core_pct for one in (await driver.usage())[0].instances]
    assert loads == [None, None, None, 0]
    await driver.aclose()


# ---- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", CHIP_BY_MACHINE)
def test_create_that_fails_at_any_call_leaves_nothing(
    machine: str, card_of: Callable[[str], Card], failure: Failure
) -> None:
    card = card_of(machine)
    table = TABLES[CHIP_BY_MACHINE[machine]]
    plain = sorted(
        (s for s in table if "+" not in s.name and "-" not in s.name), key=lambda s: s.size
    )
    neighbour, size = plain[0], plain[1]
    owned = card.make(neighbour.name, neighbour.starts[-1])
    standing = card.made()
    failure.arm(0, is_done=False)
    mig.destroy(card.at, card.make(size.name, size.starts[0]))
    failure.calls = 0
    probe = card.make(size.name, size.starts[0])
    calls = failure.calls
    mig.destroy(card.at, probe)
    for at in range(1, calls + 1):
        for is_done, code in ((False, UNKNOWN), (True, TIMEOUT)):
            failure.arm(at, is_done=is_done, code=code)
            with pytest.raises(DriverError):
                card.make(size.name, size.starts[0])
            assert card.made() == standing, f"call {at} of {calls}"
    failure.disarm()
    assert mig.read_instances(card.at) == (owned,)
    assert 2 * calls * len(CHIP_BY_MACHINE) >= LEAST_FAILURES


def test_success_without_an_instance_is_an_error_and_leaves_nothing(
    card_of: Callable[[str], Card], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_of("8xH100")
    owned = card.make("1g.10gb", 6)
    standing = card.made()
    said = pynvml.c_nvmlComputeInstance_t()
    monkeypatch.setattr(pynvml, "nvmlGpuInstanceCreateComputeInstance", lambda *_: said)
    with pytest.raises(DriverError, match="reported success, but the instance is not there"):
        card.make("2g.20gb", 2)
    assert card.made() == standing
    assert mig.read_instances(card.at) == (owned,)


def test_failed_rollback_is_reported_and_can_be_removed_later(
    card_of: Callable[[str], Card], failure: Failure
) -> None:
    card = card_of("8xA100-40")
    owned = card.make("3g.20gb", 4)
    standing = card.made()
    failure.calls = 0
    mig.destroy(card.at, card.make("2g.10gb", 0))
    calls, left = failure.calls, 0
    for at in range(1, calls + 1, 2):
        failure.arm(at, is_done=False, lasts=True)
        with pytest.raises(DriverError):
            mig.destroy(card.at, card.make("2g.10gb", 0))
        failure.disarm()
        for instance in mig.read_instances(card.at):
            if instance != owned:
                left += 1
                assert instance.start == 0
                assert instance.profile in {"", "2g.10gb"}
                mig.destroy(card.at, instance)
        assert card.made() == standing
    assert left > 0  # the driver was broken so that undoing failed too


# ---- switching the mode ------------------------------------------------------------------------

AMPERE, HOPPER = "8xA100-40", "8xH200"


def mode_of(card: Card) -> tuple[bool, bool]:
    """(now, after the next reset) as a stranger reads it."""
    current, pending = pynvml.nvmlDeviceGetMigMode(nvml.find(card.uuid))
    return bool(current), bool(pending)


@pytest.fixture
def soft_card_of(card_of: Callable[[str], Card]) -> Callable[[str], Card]:
    def make(machine: str) -> Card:
        card = card_of(machine)
        card.nvml.set_mig_mode(0, is_on=False)
        return card

    return make


@pytest.mark.anyio
@pytest.mark.parametrize("machine", [AMPERE, HOPPER])
async def test_driver_switches_a_watched_card_and_keeps_watching_it(
    machine: str, nvidia_bench: Callable[[str], FakeNvmlBench]
) -> None:
    bench = nvidia_bench(machine)
    driver = bench.driver()
    uuid, other = bench.uuids[:2]
    await driver.discover()
    await driver.wait_faults(0.01)  # our own event set must not keep the card busy
    assert isinstance(driver, ModeSwitch)
    for is_on in (True, False):
        await driver.switch_mode(uuid, is_divided=is_on)
        modes = {
            mode.uuid: (mode.is_divided, mode.is_divided_next) for mode in await driver.modes()
        }
        assert modes[uuid] == (is_on, is_on)
        assert modes[other] == (False, False)
        first, second, *_ = (await driver.discover()).devices
        assert (first.mode, bool(first.partitions)) == ("mig" if is_on else "soft", is_on)
        assert second.mode == "soft"
        assert {type(one) for one in await driver.probe()} == {ProbePassed}
        bench.nvml.xid(0, 79)
        faults: tuple[Stimulus, ...] = ()
        with anyio.fail_after(20):
            while not faults:
                faults = await driver.wait_faults(0.2)
                if not faults:  # what came before the set was made is not in it
                    bench.nvml.xid(0, 79)
        assert isinstance(faults[0], FaultSeen)
        assert faults[0].uuid == uuid
    await driver.aclose()


def client(card: Card) -> None:
    card.nvml.set_key(0, "mig_clients", "1")


def process(card: Card) -> None:
    card.nvml.set_processes(0, [Process(pid=7, used_mib=100)])


def virtual(card: Card) -> None:
    card.nvml.set_key(0, "mig_vm", "1")


def unprivileged(card: Card) -> None:
    card.nvml.fault("nvmlDeviceSetMigMode", 0, pynvml.NVML_ERROR_NO_PERMISSION)


@pytest.mark.parametrize("machine", [AMPERE, HOPPER])
@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (client, PartitionBusy),
        (process, PartitionBusy),
        (virtual, NotSupported),
        (unprivileged, DriverDenied),
    ],
)
def test_refused_switch_leaves_nothing_for_the_next_reset(
    machine: str,
    trouble: Callable[[Card], None],
    error: type[DriverError],
    soft_card_of: Callable[[str], Card],
) -> None:
    card = soft_card_of(machine)
    trouble(card)
    with pytest.raises(error):
        mig.switch_mode(card.raw, card.uuid, is_divided=True)
    assert mode_of(card) == (False, False)


def test_card_with_instances_stays_divided(card_of: Callable[[str], Card]) -> None:
    card = card_of(HOPPER)
    card.make("1g.18gb", 6)
    with pytest.raises(PartitionBusy):
        mig.switch_mode(card.raw, card.uuid, is_divided=False)
    assert mode_of(card) == (True, True)
    assert len(card.made()) == 1


@pytest.mark.parametrize("machine", [AMPERE, HOPPER])
@pytest.mark.parametrize("is_done", [False, True])
def test_any_call_of_a_switch_may_fail(
    machine: str, *, is_done: bool, soft_card_of: Callable[[str], Card], failure: Failure
) -> None:
    card = soft_card_of(machine)
    client(card)
    at, is_over = 0, False
    while not is_over:
        at += 1
        failure.arm(at, is_done=is_done)
        with pytest.raises(DriverError):
            mig.switch_mode(card.raw, card.uuid, is_divided=True)
        is_over = failure.calls < at
        failure.disarm()
        if mode_of(card)[1]:  # the rollback failed as well, so it is requested again
            mig.switch_mode(nvml.find(card.uuid), card.uuid, is_divided=False)
        assert mode_of(card) == (False, False)
    assert at > (4 if machine == AMPERE else 2)
    card.nvml.set_key(0, "mig_clients", "0")
    mig.switch_mode(nvml.find(card.uuid), card.uuid, is_divided=True)
    assert mode_of(card) == (True, True)
