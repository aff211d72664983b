# SPDX-License-Identifier: Apache-2.0
"""Devices are found, judged and reported; a failing driver is only reported."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.events.codec import decode, encode
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices, NodeReport
from hami_common.model.device import Burst, DeviceFacts, Link, Profile
from hami_common.runtime.tasks import background
from hami_nodeagent.core.board import ModeNotice, ModeReported, PartitionsRead
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.health import (
    FaultSeen,
    HealthBook,
    HealthRules,
    ProbeFailed,
    ProbePassed,
    Stimulus,
)
from hami_nodeagent.core.partitions import Owner
from hami_nodeagent.drivers.errors import DriverMismatch, DriverMissing
from hami_nodeagent.drivers.protocol import DeviceUsage, Inventory
from hami_nodeagent.settings import DriversSettings, NvidiaSettings, VnpuCoreSettings
from hami_nodeagent.shell.inventory import Reporter, VendorDevices, beat, host_memory_mib
from hami_nodeagent.shell.vnpucore import VnpuCore
from tests.support.memorybus import MemoryBucket, MemoryBus, MemoryPublisher
from tests.unit.nodeagent.core.builders import NODE, device
from tests.unit.nodeagent.shell.support import make_site, soon, until

pytestmark = pytest.mark.anyio


def facts(number: int) -> DeviceFacts:
    return DeviceFacts(
        uuid=f"nvidia-{number}", vendor="nvidia", index=number, type="T", memory_mib=1000
    )


class FakeDriver:
    vendor = "nvidia"
    partitioner = None
    is_stuck = False

    def __init__(self) -> None:
        self.answer: Inventory | Exception = Inventory(devices=(facts(0), facts(1)))
        self.probes: tuple[Stimulus, ...] | Exception = ()
        self.faults: list[Stimulus] = []
        self.closed = False

    async def discover(self) -> Inventory:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def probe(self) -> tuple[Stimulus, ...]:
        if isinstance(self.probes, Exception):
            raise self.probes
        return self.probes

    async def wait_faults(self, limit_s: float) -> tuple[Stimulus, ...]:
        await anyio.sleep(min(limit_s, 0.02))
        found, self.faults = tuple(self.faults), []
        return found

    async def usage(self) -> tuple[DeviceUsage, ...]:
        return ()

    async def aclose(self) -> None:
        self.closed = True


class Bench:
    def __init__(
        self,
        directory: Path,
        *,
        heartbeat_s: float = 0.02,
        discovery_s: float = 0.02,
        **settings: object,
    ) -> None:
        self.driver = FakeDriver()
        self.mismatches = 0
        rules = HealthRules(failures_to_condemn=1, probes_to_recover=1, recover_s=0.0)
        self.site = make_site(
            directory,
            discovery_s=discovery_s,
            discovery_retry_s=0.02,
            probe_s=0.02,
            devices_poll_s=0.05,
            heartbeat_s=heartbeat_s,
            health=rules,
            **settings,
        )
        self.source = VendorDevices(
            site=self.site, driver=self.driver, on_mismatch=self._count_mismatch
        )
        self.bus = MemoryBus()
        self.generation = 1
        self.devices = MemoryBucket(self.bus, subjects.DEVICES_BUCKET)
        self.reporter = Reporter(
            site=self.site,
            source=self.source,
            publisher=MemoryPublisher(self.bus),
            devices=self.devices,
            generation=lambda: self.generation,
            events=lambda: None,
        )

    def _count_mismatch(self) -> None:
        self.mismatches += 1

    def reports(self) -> list[NodeReport]:
        subject = subjects.report(NODE, "nvidia")
        return [
            decode(one.data, NodeReport, what="report")
            for one in self.bus.published
            if one.subject == subject
        ]

    def faults(self) -> list[DeviceFault]:
        return [
            decode(one.data, DeviceFault, what="fault")
            for one in self.bus.published
            if one.subject == subjects.fault(NODE)
        ]


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[None]:
    async with background() as group:
        await group.start(bench.source.discover)
        group.start_soon(bench.source.probe)
        group.start_soon(bench.source.wait_faults)
        group.start_soon(bench.reporter.follow_canonical)
        await group.start(bench.reporter.tell)
        yield


async def test_report_has_the_allowed_profiles_and_names_a_list_without_any(
    tmp_path: Path,
) -> None:
    sizes = (
        Profile(name="1g.10gb", memory_mib=300, size=2, starts=(0,)),
        Profile(name="2g.10gb", memory_mib=300, core_pct=28, size=2, starts=(0,)),
    )
    allowed: dict[str, tuple[str, ...]] = {"T": ("2g.*",), "U": ("3g.*",)}
    drivers = DriversSettings(nvidia=NvidiaSettings(mig_allowed_profiles=allowed))
    bench = Bench(tmp_path, drivers=drivers)
    cards = [replace(facts(n), mode="mig", partitions=sizes) for n in range(2)]
    bench.driver.answer = Inventory(devices=(cards[0], replace(cards[1], type="U")))
    async with running(bench):
        await until(lambda: len(bench.reports()) == 1)
    (report,) = bench.reports()
    chosen = [[p.name for p in d.partitions if not p.by_name_only] for d in report.devices]
    assert chosen == [["2g.10gb"], []]
    assert "device 1: drivers.nvidia.mig_allowed_profiles[U]" in report.problem


async def test_soft_chips_are_reported_as_whole_while_their_library_is_missing(
    tmp_path: Path,
) -> None:
    bench = Bench(
        tmp_path, enforcement="libvgpu", vnpu_core=VnpuCoreSettings(library_dir=str(tmp_path))
    )
    bench.source = VendorDevices(
        site=bench.site,
        driver=bench.driver,
        on_mismatch=lambda: None,
        review=VnpuCore(bench.site.settings).review,
    )
    async with background() as group:
        await group.start(bench.source.discover)
        assert [one.mode for one in bench.source.facts()] == ["whole", "whole"]
        assert f"{tmp_path}/ld.so.preload: No such file" in bench.source.problem


async def test_equal_facts_are_reported_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with running(bench):
        await anyio.sleep(0.1)
        assert [len(one.devices) for one in bench.reports()] == [2]
        bench.driver.answer = Inventory(devices=(facts(0), facts(1), facts(2)))
        await until(lambda: len(bench.reports()) == 2)
    first, second = bench.reports()
    assert len(second.devices) == 3
    assert first.boot_id == second.boot_id
    assert first.seq < second.seq
    assert second.agent_version


async def test_foreign_use_is_reported_and_survives_a_restart_of_the_agent(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    used = NodeDevices(
        node=NODE,
        vendor="nvidia",
        boot_id="before",
        seq=1,
        time_s=0,
        config_generation=1,
        devices=(device(0, foreign_mib=512), device(1)),
    )
    bench.site.picture.set_canonical(used)
    async with running(bench):
        await until(lambda: len(bench.reports()) == 1)
        bench.site.picture.set_foreign({"nvidia-1": 256})
        await until(lambda: len(bench.reports()) == 2)
    amounts = [[one.foreign_mib for one in report.devices] for report in bench.reports()]
    assert amounts == [[512, 0], [0, 256]]


async def test_bursts_are_reported_when_the_keeper_asks_for_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    used = (Burst(pod_uid="uid-a", memory_mib=256),)
    async with running(bench):
        await until(lambda: len(bench.reports()) == 1)
        assert bench.site.picture.set_bursts({"nvidia-1": used})
        bench.source.note_change()
        await until(lambda: len(bench.reports()) == 2, within_s=0.5)
        assert not bench.site.picture.set_bursts({"nvidia-1": used})
    assert [one.bursts for one in bench.reports()[-1].devices] == [(), used]


async def test_card_with_a_pending_mode_switch_is_cordoned_and_then_reported_again(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, discovery_s=3600.0)
    board = bench.site.picture.partitions
    async with running(bench):
        board.apply(
            ModeReported(
                uuid="nvidia-0", notice=ModeNotice(text="waits for pod a/b", is_withheld=True)
            )
        )
        bench.source.look_again()
        await until(lambda: len(bench.reports()) == 2)
        bench.driver.answer = Inventory(devices=(replace(facts(0), mode="mig"), facts(1)))
        board.apply(
            ModeReported(uuid="nvidia-0", notice=ModeNotice(text="failed", is_withheld=False))
        )
        bench.source.look_again()
        await until(lambda: bench.reports()[-1].devices[0].mode == "mig")
    _, waiting, *_, last = bench.reports()
    assert [one.cordoned for one in waiting.devices] == [True, False]
    assert waiting.problem == "device nvidia-0: waits for pod a/b"
    assert [one.cordoned for one in last.devices] == [False, False]
    assert last.problem == "device nvidia-0: failed"


async def test_report_is_repeated_on_a_new_connection_and_after_a_failure(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with running(bench):
        bench.generation += 1
        await until(lambda: len(bench.reports()) == 2)
        bench.bus.set_available(available=False)
        bench.driver.answer = Inventory(devices=())
        await until(lambda: bench.source.devices == ())
        await anyio.wait_all_tasks_blocked()
        assert len(bench.reports()) == 2
        bench.bus.set_available(available=True)
        await until(lambda: len(bench.reports()) == 3)
    assert bench.reports()[-1].devices == ()


async def test_report_is_repeated_while_the_record_is_of_another_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    key = subjects.devices_key(NODE, "nvidia")
    ours = NodeDevices(
        node=NODE,
        vendor="nvidia",
        boot_id=bench.site.sequence.boot_id,
        seq=1,
        time_s=0,
        config_generation=1,
    )
    async with running(bench):
        await bench.devices.append(key, encode(replace(ours, boot_id="~~~~")))
        await until(lambda: len(bench.reports()) >= 2)
        await bench.devices.append(key, encode(ours))
        await until(lambda: not bench.reporter.is_overruled)
        told = len(bench.reports())
        await anyio.sleep(0.1)
        assert len(bench.reports()) <= told + 1
    first, second, *_ = bench.reports()
    assert first.seq < second.seq
    assert replace(second, seq=first.seq, time_s=first.time_s) == first


async def test_oversized_report_is_sent_without_its_links(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    many = tuple(replace(facts(n), uuid=f"GPU-{n:036d}") for n in range(96))
    links = tuple(
        Link(a=a.uuid, b=b.uuid, score=1) for a in many for b in many if a.index < b.index
    )
    bench.driver.answer = Inventory(devices=many, links=links)
    async with running(bench):
        (report,) = bench.reports()
    assert len(report.devices) == 96
    assert report.links == ()
    assert "too large for a report: links left out" in report.problem


async def test_missing_driver_is_a_report_and_its_return_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.driver.answer = DriverMissing(doing="open", detail="no module")
    async with running(bench):
        assert bench.reports()[0].problem == "open: no module"
        assert bench.reports()[0].devices == ()
        bench.driver.answer = Inventory(devices=(facts(0),), problems=("device 1: odd",))
        await until(lambda: len(bench.reports()) == 2)
        assert bench.reports()[1].problem == "device 1: odd"
        bench.driver.answer = DriverMissing(doing="open", detail="unloaded")
        await until(lambda: bench.reports()[-1].problem == "open: unloaded")
        await until(lambda: not bench.reports()[-1].devices[0].healthy)
    assert bench.mismatches == 0
    assert bench.site.picture.view.faulty == {"nvidia-0"}


async def test_driver_replaced_at_run_time_requires_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.driver.answer = DriverMismatch(doing="open", detail="versions differ")
    async with running(bench):
        await anyio.sleep(0.1)
        assert bench.mismatches == 0  # never worked: a restart would not help
        bench.driver.answer = Inventory(devices=(facts(0),))
        await until(lambda: len(bench.source.devices) == 1)
        bench.driver.answer = DriverMismatch(doing="open", detail="versions differ")
        await until(lambda: bench.mismatches > 0)


async def test_bug_in_a_driver_does_not_end_the_agent(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.driver.answer = ZeroDivisionError("oops")
    async with running(bench):
        assert bench.reports()[0].problem == "oops"
        bench.driver.answer = Inventory(devices=(facts(0),))
        bench.driver.probes = ZeroDivisionError("again")
        await until(lambda: bench.reports()[-1].problem == "")


async def test_faults_and_recovery_are_reported_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with running(bench):
        bench.driver.faults = [FaultSeen(uuid="nvidia-1", code=79, fatal=True, text="Xid 79")]
        await until(lambda: len(bench.faults()) == 1)
        assert bench.site.picture.view.faulty == {"nvidia-1"}
        await until(lambda: not bench.reports()[-1].devices[1].healthy)
        bench.driver.probes = (ProbePassed(uuid="nvidia-1"),)
        await until(lambda: len(bench.faults()) == 2)
        await until(lambda: bench.site.picture.view.faulty == frozenset())
        assert "nvidia-1" in bench.site.picture.view.sound
    assert [(one.uuid, one.healthy) for one in bench.faults()] == [
        ("nvidia-1", False),
        ("nvidia-1", True),
    ]
    assert bench.faults()[0].reason == "Xid 79"


GRID = (Profile(name="1g", memory_mib=100, size=1, starts=(0, 1, 2)),)


async def test_fault_of_a_partition_withholds_its_place_only_and_is_reported_to_its_pod(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    divided = replace(facts(0), mode="mig", partitions=GRID)
    bench.driver.answer = Inventory(devices=(divided, facts(1)))
    board = bench.site.picture.partitions
    instance = Instance(
        uuid="nvidia-0",
        instance_id="MIG-a",
        profile="1g",
        start=1,
        handles={"gpu_instance": "9"},
    )
    owner = Owner(pod_uid="a", allocation_id="x", container="main")
    board.apply(PartitionsRead(uuid="nvidia-0", carried={owner: instance}, waiting={}, foreign=()))
    fault = FaultSeen(uuid="nvidia-0", code=94, fatal=True, text="Xid 94", part=9)
    async with running(bench):
        bench.driver.faults = [fault]
        await until(lambda: "at fault: MIG-a (1g at 1)" in bench.reports()[-1].problem)
        (card, _) = bench.reports()[-1].devices
        assert card.healthy
        assert [one.starts for one in card.partitions] == [(0, 2)]
        assert bench.site.picture.view.faulty == frozenset()
        bench.driver.faults = [replace(fault, part=8)]  # of which nothing is known
        await until(lambda: bench.site.picture.view.faulty == {"nvidia-0"})
        bench.driver.probes = (ProbePassed(uuid="nvidia-0"),)
        await until(lambda: bench.reports()[-1].devices == (divided, facts(1)))
    assert [one.healthy for one in bench.faults()] == [False, True]


async def test_failing_probe_condemns(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with running(bench):
        bench.driver.probes = (ProbeFailed(uuid="nvidia-0", reason="no answer"),)
        await until(lambda: bench.site.picture.view.faulty == {"nvidia-0"})


async def test_canonical_devices_reach_the_picture_and_the_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    key = subjects.devices_key(NODE, "nvidia")
    canonical = NodeDevices(
        node=NODE,
        vendor="nvidia",
        boot_id=bench.site.sequence.boot_id,
        seq=1 << 40,
        time_s=0,
        config_generation=3,
        devices=(device(7),),
    )
    async with running(bench):
        await bench.devices.append(key, b"{")
        metric = bench.site.metrics.undecodable.labels(what="canonical devices")
        await until(lambda: metric._value.get() > 0)  # noqa: SLF001
        await bench.devices.append(key, encode(canonical))
        await until(lambda: set(bench.site.picture.view.devices_by_uuid) == {"nvidia-7"})

        async def is_kept() -> bool:
            return bench.site.checkpoint.load_devices() == (canonical,)

        await soon(is_kept)


async def test_record_with_a_device_of_another_vendor_is_refused_until_replaced(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    key = subjects.devices_key(NODE, "nvidia")
    good = NodeDevices(
        node=NODE,
        vendor="nvidia",
        boot_id=bench.site.sequence.boot_id,
        seq=1,
        time_s=0,
        config_generation=3,
        devices=(device(7),),
    )
    bad = replace(good, devices=(replace(device(7), vendor="of-nobody"),))
    before = bench.site.picture.canonical_by_vendor["nvidia"]
    async with running(bench):
        await bench.devices.append(key, encode(bad))
        metric = bench.site.metrics.undecodable.labels(what="canonical devices")
        await until(lambda: metric._value.get() > 0)  # noqa: SLF001
        assert bench.site.picture.canonical_by_vendor["nvidia"] == before
        await bench.devices.append(key, encode(good))
        await until(lambda: set(bench.site.picture.view.devices_by_uuid) == {"nvidia-7"})


async def test_vendors_that_change_at_the_same_time_are_all_kept_on_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    vendors = [f"vendor-{number}" for number in range(12)]
    reporters = [
        Reporter(
            site=bench.site,
            source=SimpleNamespace(vendor=vendor),  # type: ignore[arg-type]  # all that is asked
            publisher=MemoryPublisher(bench.bus),
            devices=bench.devices,
            generation=lambda: bench.generation,
            events=lambda: None,
        )
        for vendor in vendors
    ]
    async with background() as group:
        for reporter in reporters:
            group.start_soon(reporter.follow_canonical)
        for vendor in vendors:
            canonical = NodeDevices(
                node=NODE, vendor=vendor, boot_id="", seq=1, time_s=0, config_generation=1
            )
            await bench.devices.append(subjects.devices_key(NODE, vendor), encode(canonical))

        async def kept() -> bool:
            return {one.vendor for one in bench.site.checkpoint.load_devices()} >= set(vendors)

        await soon(kept)
    metrics = bench.site.metrics
    assert metrics.checkpoint_failures._value.get() == 0  # noqa: SLF001


async def test_heartbeats_continue_after_an_outage_of_the_bus(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.site.picture.note_served("nvidia", served=True)
    bench.site.picture.note_in_status("nvidia")
    async with background() as group:
        group.start_soon(
            lambda: beat(site=bench.site, publisher=MemoryPublisher(bench.bus), vendors=("nvidia",))
        )
        await until(lambda: len(bench.bus.published) >= 2)
        bench.bus.set_available(available=False)
        count = len(bench.bus.published)
        await anyio.sleep(0.05)
        assert len(bench.bus.published) == count
        bench.bus.set_available(available=True)
        await until(lambda: len(bench.bus.published) > count)
    beats = [decode(one.data, Heartbeat, what="beat") for one in bench.bus.published]
    assert [one.seq for one in beats] == sorted(one.seq for one in beats)
    assert {one.vendors for one in beats} == {("nvidia",)}


async def test_heartbeat_reports_at_once_that_kubelet_lost_the_plugin(tmp_path: Path) -> None:
    bench = Bench(tmp_path, heartbeat_s=3600)
    bench.site.picture.note_served("nvidia", served=True)
    bench.site.picture.note_in_status("nvidia")
    async with background() as group:
        group.start_soon(
            lambda: beat(site=bench.site, publisher=MemoryPublisher(bench.bus), vendors=("nvidia",))
        )
        await until(lambda: len(bench.bus.published) == 1)
        bench.site.picture.note_change()
        bench.site.picture.note_served("nvidia", served=False)
        await until(lambda: len(bench.bus.published) == 2)
    beats = [decode(one.data, Heartbeat, what="beat") for one in bench.bus.published]
    assert [(one.vendors, one.unserved) for one in beats] == [
        (("nvidia",), ()),
        ((), ("nvidia",)),
    ]


async def test_driver_is_let_go(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.source.aclose()
    assert bench.driver.closed


async def test_device_that_cannot_be_judged_is_unhealthy_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = HealthBook.judge

    def judge(self: HealthBook, device: DeviceFacts) -> DeviceFacts:
        if device.uuid == "nvidia-0":
            raise RuntimeError("injected")
        return whole(self, device)

    monkeypatch.setattr(HealthBook, "judge", judge)
    site = make_site(tmp_path, discovery_s=0.01)
    source = VendorDevices(site=site, driver=FakeDriver(), on_mismatch=lambda: None)
    async with background() as group:
        await group.start(source.discover)
    assert [(one.uuid, one.healthy) for one in source.facts()] == [
        ("nvidia-0", False),
        ("nvidia-1", True),
    ]
    assert [entry.key for entry in site.quarantine.entries()] == ["nvidia nvidia-0"]


@pytest.mark.parametrize(
    ("text", "setting", "found_mib"),
    [
        ("MemFree: 5 kB\nMemTotal:       24689508 kB\n", 0, 24110),
        ("MemTotal:       24689508 kB\n", 7, 7),
        ("nonsense", 0, 0),
        (None, 0, 0),
    ],
)
def test_memory_of_the_node_is_the_kernels(
    tmp_path: Path, text: str | None, setting: int, found_mib: int
) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    settings = make_site(tmp_path, host_proc=str(tmp_path), host_memory_mib=setting).settings
    assert host_memory_mib(settings) == found_mib
