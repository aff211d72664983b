# SPDX-License-Identifier: Apache-2.0
"""One reading: regions, driver and processes become metrics, events and evictions."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest

from hami_common.errors import Denied, NotFound, Unavailable
from hami_common.events.breach import BreachAction, BreachRecord
from hami_common.events.codec import decode, encode
from hami_common.model.placement import Share
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.kubeio import EventRecorder
from hami_nodeagent.core.breach import BreachRules
from hami_nodeagent.drivers.errors import DriverMissing
from hami_nodeagent.drivers.protocol import DeviceUsage, ProcessUsage
from hami_nodeagent.settings import UsageSettings
from hami_nodeagent.shell.breaches import REASON_TRAFFIC, BreachTeller
from hami_nodeagent.shell.doorbell import Doorbells
from hami_nodeagent.shell.ended import EndedLists
from hami_nodeagent.shell.living import Living
from hami_nodeagent.shell.regions import region_path
from hami_nodeagent.shell.site import Site
from hami_nodeagent.shell.usage import UsageWatch
from tests.support.manualclock import ManualClock
from tests.support.regions import Built, Process, Used
from tests.unit.nodeagent.core.builders import Given
from tests.unit.nodeagent.core.test_cgroups import UID
from tests.unit.nodeagent.shell.support import know, make_site
from tests.unit.nodeagent.shell.test_owners import process

pytestmark = pytest.mark.anyio

GOLDEN = Path(__file__).parents[3] / "golden" / "breach"
MIB = 1 << 20
PID = 4242
CONTAINER_ID = "ab" * 32
OTHER_UID = UID.replace("0f", "1f")


class FakeDriver:
    vendor = "nvidia"
    is_stuck = False

    def __init__(self) -> None:
        self.answer: Sequence[DeviceUsage] | None = ()

    def shows(self, used_mib: int, *pids: int, uuid: str = "nvidia-0") -> None:
        processes = tuple(ProcessUsage(pid=pid, used_mib=used_mib, core_pct=1) for pid in pids)
        self.answer = (DeviceUsage(uuid=uuid, used_mib=used_mib, processes=processes),)

    async def usage(self) -> tuple[DeviceUsage, ...]:
        if self.answer is None:
            raise DriverMissing(doing="read usage", detail="the test says so")
        return tuple(self.answer)


class FakePeers:
    """The API server and the bus."""

    def __init__(self) -> None:
        self.created: list[tuple[str, Any]] = []
        self.published: list[tuple[str, bytes, Mapping[str, str]]] = []
        self.eviction_error: Exception | None = None
        self.is_bus_away = False

    async def create(self, path: str, body: bytes) -> bytes:
        if path.endswith("/eviction") and self.eviction_error is not None:
            raise self.eviction_error
        self.created.append((path, msgspec.json.decode(body)))
        return b"{}"

    async def publish_stored(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        message_id: str = "",
    ) -> int:
        if self.is_bus_away:
            raise Unavailable(peer="bus", detail="the test says so")
        assert message_id
        self.published.append((subject, data, headers or {}))
        return len(self.published)

    def of_kind(self, kind: str) -> list[Any]:
        return [body for _, body in self.created if body["kind"] == kind]


class Desk:
    def __init__(self, directory: Path, **usage: Any) -> None:
        self.directory = directory
        self.site: Site = make_site(
            directory / "state",
            pods_dir=str(directory / "pods"),
            host_proc=str(directory / "proc"),
            usage=UsageSettings(breach=BreachRules(memory_margin_mib=0), **usage),
        )
        self.driver = FakeDriver()
        self.peers = FakePeers()
        kube: Any = self.peers
        recorder = EventRecorder(kube, component="test", clock=SystemClock())
        self.watch = UsageWatch(
            site=self.site,
            drivers=[self.driver],  # type: ignore[list-item]  # the one method used
            teller=BreachTeller(
                site=self.site,
                events=lambda: recorder,
                publisher=lambda: kube,
                kube=lambda: kube,
            ),
        )

    def run_pod(self, name: str = "train", uid: str = UID, pid: int = PID, **share: Any) -> Given:
        """A pod with one container that holds 10 MiB of nvidia-0 and runs one process."""
        pod = Given(
            name,
            uid=uid,
            region_volumes={"main": "region"},
            container_by_id={f"containerd://{CONTAINER_ID}": "main"},
        )
        if share:
            given = Share(vendor="nvidia", uuid="nvidia-0", **share)
            record = replace(
                pod.record, containers=(replace(pod.record.containers[0], shares=(given,)),)
            )
            pod.entry = replace(pod.entry, record=record)
        know(self.site, pod)
        self.site.picture.grants.add(pod.grant("main", f"{name}-id"))
        process(self.directory / "proc", pid, f"0::/kubepods/pod{uid}/{CONTAINER_ID}")
        return pod

    def write_region(self, built: Built | bytes, uid: str = UID) -> Path:
        path = region_path(self.directory / "pods", uid, "region")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(built if isinstance(built, bytes) else built.data())
        return path

    async def look(self, times: int = 2) -> None:
        for _ in range(times):
            await self.watch.look()

    def metrics(self) -> dict[str, float]:
        lines = generate_latest(self.site.metrics.registry).decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}


def series(name: str, **labels: str) -> str:
    given = {"namespace": "default", "pod": "train", "container": "main", **labels}
    pairs = ",".join(f'{key}="{value}"' for key, value in sorted(given.items()))
    return f"{name}{{{pairs}}}"


def of_device(name: str) -> str:
    return series(name, vdevice_index="0", device_uuid="nvidia-0", zone="vGPU")


async def test_traffic_is_estimated_per_container_and_a_heavy_one_gets_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hami_nodeagent.core.traffic.HIGH_S", 0.0)
    desk = Desk(tmp_path)
    desk.run_pod(memory_mib=1000)
    desk.run_pod("web", uid=OTHER_UID, pid=PID + 1, memory_mib=1000)
    clock = desk.site.clock = ManualClock()
    used_ns = {UID: 0, OTHER_UID: 0}
    desk.driver.answer = (DeviceUsage(uuid="nvidia-0", dram_pct=90.0, pcie_mib_s=12.0),)
    for _ in range(3):
        for uid, more_ns in ((UID, 1_500_000_000), (OTHER_UID, 500_000_000)):
            used_ns[uid] += more_ns
            process = Process(pid=1, shares=[Used(0)], device_time_ns=used_ns[uid])
            desk.write_region(Built(uuids=("nvidia-0",), processes=[process]), uid=uid)
        await desk.look(1)
        await clock.advance(2.5)
    metrics = desk.metrics()
    estimate = "hami_vgpu_memory_bandwidth_estimate_ratio"
    assert metrics[of_device(estimate)] == pytest.approx(67.5, rel=0.05)
    assert metrics[of_device("hami_vgpu_pcie_estimate_bytes_per_second")] == pytest.approx(
        9 * MIB, rel=0.05
    )
    device = 'device_index="0",device_type="TEST",device_uuid="nvidia-0",node="node-a",zone="vGPU"'
    assert metrics[f"hami_host_gpu_memory_bandwidth_ratio{{{device}}}"] == 90.0
    events = [one for one in desk.peers.of_kind("Event") if one["reason"] == REASON_TRAFFIC]
    assert [one["involvedObject"]["name"] for one in events] == ["train"]


async def test_traffic_that_the_driver_does_not_report_is_absent(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run_pod(memory_mib=1000)
    desk.driver.answer = (DeviceUsage(uuid="nvidia-0"),)
    await desk.look(3)
    assert not [name for name in desk.metrics() if "bandwidth" in name or "pcie" in name]


async def test_device_time_is_metered_by_namespace_from_the_first_reading(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run_pod(memory_mib=1000)
    sums = 'device_type="TEST",namespace="default",node="node-a",vendor="nvidia"'

    def metered(what: str) -> float:
        return desk.metrics()[f"hami_metering_{what}_seconds_total{{{sums}}}"]

    await desk.look(1)
    assert metered("slice") == metered("idle") == 0
    for _ in range(50):
        await desk.look(1)
    kind = 'device_type="TEST",node="node-a",vendor="nvidia"'
    whole = desk.metrics()[f"hami_metering_device_seconds_total{{{kind}}}"]
    assert 0 < metered("slice") < whole
    assert metered("core") == 0
    assert metered("idle") == 0, "the driver shows no processes, and no region was written"
    desk.driver.answer = (DeviceUsage(uuid="nvidia-0", processes=()),)
    await desk.look(2)
    assert 0 < metered("idle") < metered("slice")


async def test_container_that_never_used_its_device_shows_zeros(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run_pod()
    await desk.look(1)
    shown = desk.metrics()
    assert shown[of_device("hami_vgpu_memory_limit_bytes")] == 10 * MIB
    assert shown[of_device("hami_vgpu_core_limit_ratio")] == 100
    for name in ("used", "context", "module", "buffer", "driver"):
        assert shown[of_device(f"hami_vgpu_memory_{name}_bytes")] == 0
    assert shown[series("hami_vgpu_launches_total")] == 0
    assert shown[series("hami_vgpu_wait_seconds_total")] == 0
    assert shown[series("hami_vgpu_processes")] == 0
    assert of_device("hami_container_last_kernel_elapsed_seconds") not in shown


async def test_region_is_shown_to_the_byte(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run_pod()
    worker = Process(2, (Used(7 * MIB + 1, context=MIB, module=5),), launches=3, waited_ns=10**9)
    desk.write_region(Built(uuids=("nvidia-0",), processes=(replace_time(worker),)))
    await desk.look(1)
    shown = desk.metrics()
    assert shown[of_device("hami_vgpu_memory_used_bytes")] == 7 * MIB + 1
    assert shown[of_device("hami_vgpu_memory_context_bytes")] == MIB
    assert shown[of_device("hami_vgpu_memory_buffer_bytes")] == 6 * MIB - 4
    assert shown[series("hami_vgpu_launches_total")] == 3
    assert shown[series("hami_vgpu_wait_seconds_total")] == 1
    assert shown[series("hami_vgpu_processes")] == 1
    assert shown[of_device("hami_container_last_kernel_elapsed_seconds")] >= 0


def replace_time(worker: Process) -> Process:
    worker.last_launch_ns = int(SystemClock().monotonic_s() * 1e9)
    return worker


async def test_ended_owners_are_listed_for_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    monkeypatch.setattr(desk.watch, "_ended", EndedLists(tmp_path))
    desk.run_pod()
    ended = Process(2, (Used(5),), namespace=9, start=3)
    desk.write_region(Built(uuids=("nvidia-0",), processes=(ended, Process(4, namespace=8))))
    directory = Doorbells(tmp_path).directory_of((UID, "main"))
    monkeypatch.setattr(
        Living, "dead_of", lambda _, owners: {one for one in owners if one.namespace == 9}
    )
    await desk.look(1)
    assert (directory / "ended-1").read_text() == "2 9 3\n"


async def test_whole_device_is_shown_with_the_drivers_figures(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run_pod(memory_mib=1000, core_pct=100, exclusive=True)
    desk.driver.shows(700, PID)
    await desk.look()
    shown = desk.metrics()
    assert shown[of_device("hami_vgpu_memory_used_bytes")] == 700 * MIB
    assert shown[of_device("hami_container_device_utilization_ratio")] == 1
    assert desk.peers.created == []


async def test_hostile_region_hides_no_other_container(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run_pod()
    other_uid = UID.replace("0f", "1f")
    desk.run_pod("other", other_uid, PID + 1)
    desk.write_region(os.urandom(4096))
    desk.write_region(Built(uuids=("nvidia-0",), processes=(Process(2, (Used(5),)),)), other_uid)
    await desk.look(1)
    shown = desk.metrics()
    other = series(
        "hami_vgpu_memory_used_bytes",
        pod="other",
        vdevice_index="0",
        device_uuid="nvidia-0",
        zone="vGPU",
    )
    assert shown[other] == 5
    assert shown[of_device("hami_vgpu_memory_used_bytes")] == 0
    assert shown['hami_nodeagent_regions_refused_total{reason="magic"}'] == 1


async def test_series_vanish_with_the_pod(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    pod = desk.run_pod()
    desk.driver.shows(99, PID)
    await desk.look()
    assert any('pod="train"' in name for name in desk.metrics())
    desk.site.picture.pods.end(pod.uid, now_s=0)
    desk.driver.shows(0)
    await desk.look(1)
    assert not any('pod="train"' in name for name in desk.metrics())


@pytest.mark.parametrize(("mode", "mib"), [("soft", 768), ("whole", 768), ("mps", 0), ("mig", 0)])
async def test_memory_without_an_allocation_is_foreign_use_of_undivided_devices(
    tmp_path: Path, mode: str, mib: int
) -> None:
    desk = Desk(tmp_path)
    picture = desk.site.picture
    canonical = picture.canonical_by_vendor["nvidia"]
    devices = tuple(replace(one, mode=mode) for one in canonical.devices)
    picture.set_canonical(replace(canonical, devices=devices))
    desk.run_pod()
    process(desk.directory / "proc", PID + 1, "0::/system.slice/other.service")
    own, other = ProcessUsage(pid=PID, used_mib=5), ProcessUsage(pid=PID + 1, used_mib=700)
    desk.driver.answer = (DeviceUsage(uuid="nvidia-0", used_mib=705, processes=(own, other)),)
    await desk.look(1)
    assert [picture.foreign_mib(f"nvidia-{number}") for number in range(2)] == [mib, 0]
    desk.driver.answer = (DeviceUsage(uuid="nvidia-0", used_mib=705),)
    await desk.look(20)
    assert picture.foreign_mib("nvidia-0") == mib, "the driver names no processes any more"


async def test_foreign_use_ends_when_a_device_gets_a_mode_in_which_it_is_not_measured(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    picture = desk.site.picture
    process(desk.directory / "proc", PID, "0::/system.slice/other.service")
    desk.driver.shows(700, PID)
    await desk.look(1)
    assert picture.foreign_mib("nvidia-0") > 0
    canonical = picture.canonical_by_vendor["nvidia"]
    divided = tuple(replace(one, mode="mig") for one in canonical.devices)
    picture.set_canonical(replace(canonical, devices=divided))
    await desk.look(1)
    assert picture.foreign_mib("nvidia-0") == 0


async def test_breach_is_an_event_a_message_and_a_series(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    pod = desk.run_pod()
    desk.driver.shows(11, PID)
    await desk.look(1)
    assert desk.peers.created == []
    await desk.look(1)
    (event,) = desk.peers.of_kind("Event")
    assert event["involvedObject"]["uid"] == pod.uid
    assert (event["reason"], event["type"]) == ("LimitBreached", "Warning")
    assert f"process {PID} (train) 11 MiB" in event["message"]
    ((subject, data, headers),) = desk.peers.published
    assert subject == f"hami.v1.event.breach.node-a.{UID}"
    assert headers["ce-type"] == "io.hami.breach.memory.v1"
    record = decode(data, BreachRecord, what="breach")
    assert (record.used_mib, record.limit_mib, record.action) == (11, 10, "event")
    assert [(one.pid, one.command) for one in record.processes] == [(PID, "train")]
    breach = series("hami_vgpu_breach", device_uuid="nvidia-0", kind="memory")
    assert desk.metrics()[breach] == 1
    assert desk.metrics()['hami_nodeagent_breaches_total{kind="memory"}'] == 1
    desk.driver.shows(10, PID)
    await desk.look(1)
    assert breach not in desk.metrics()
    assert len(desk.peers.published) == 1


async def test_process_of_the_host_is_reported_on_the_node(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    process(tmp_path / "proc", 9, "0::/user.slice", comm="miner")
    desk.driver.shows(5, 9)
    await desk.look()
    (event,) = desk.peers.of_kind("Event")
    assert event["involvedObject"]["kind"] == "Node"
    assert "process 9 (miner)" in event["message"]
    assert desk.peers.published[0][0] == "hami.v1.event.breach.node-a.host"


async def test_messages_wait_for_the_bus(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run_pod()
    desk.driver.shows(11, PID)
    desk.peers.is_bus_away = True
    await desk.look(3)
    assert desk.peers.published == []
    desk.peers.is_bus_away = False
    await desk.look(1)
    assert len(desk.peers.published) == 1


async def test_pod_is_evicted_only_with_the_operators_setting(tmp_path: Path) -> None:
    telling, evicting = Desk(tmp_path / "a"), Desk(tmp_path / "b", action="evict")
    for desk in (telling, evicting):
        desk.run_pod()
        desk.driver.shows(11, PID)
        await desk.look(3)
    assert telling.peers.of_kind("Eviction") == []
    (eviction,) = evicting.peers.of_kind("Eviction")
    assert eviction["deleteOptions"]["preconditions"]["uid"] == UID
    record = decode(evicting.peers.published[0][1], BreachRecord, what="breach")
    assert record.action == "evict"


@pytest.mark.parametrize(
    ("action", "actions", "evictions"),
    [("event", {"default": "evict"}, 1), ("evict", {"default": "event", "other": "evict"}, 0)],
)
async def test_action_on_a_breach_is_set_by_namespace(
    tmp_path: Path, action: BreachAction, actions: dict[str, BreachAction], evictions: int
) -> None:
    desk = Desk(tmp_path, action=action, actions=actions)
    desk.run_pod()
    desk.driver.shows(11, PID)
    await desk.look(3)
    assert len(desk.peers.of_kind("Eviction")) == evictions


async def test_bursts_lead_to_eviction_though_the_first_request_failed(tmp_path: Path) -> None:
    desk = Desk(tmp_path, action="evict")
    desk.run_pod()
    desk.peers.eviction_error = Unavailable(peer="API", detail="away")
    for used_mib in (11, 1, 11, 1):
        desk.driver.shows(used_mib, PID)
        await desk.look(1)
    desk.peers.eviction_error = None
    await desk.look(1)
    assert desk.peers.of_kind("Eviction") == []
    desk.driver.shows(11, PID)
    await desk.look(2)
    assert len(desk.peers.of_kind("Eviction")) == 1


async def test_pod_of_hami_is_reported_and_never_evicted(tmp_path: Path) -> None:
    desk = Desk(tmp_path, action="evict")
    desk.run_pod()
    entries = desk.site.picture.entries_by_uid
    entries[UID] = replace(entries[UID], record=replace(entries[UID].record, origin="hami"))
    desk.driver.shows(11, PID)
    await desk.look(3)
    assert desk.peers.of_kind("Eviction") == []
    (told,) = desk.peers.published
    assert decode(told[1], BreachRecord, what="breach").action != "evict"


async def test_eviction_refused_by_a_budget_is_retried(tmp_path: Path) -> None:
    desk = Desk(tmp_path, action="evict")
    desk.run_pod()
    desk.driver.shows(11, PID)
    desk.peers.eviction_error = Denied(peer="API", detail="budget", status=429)
    await desk.look(3)
    assert desk.peers.of_kind("Eviction") == []
    desk.peers.eviction_error = None
    await desk.look(1)
    assert len(desk.peers.of_kind("Eviction")) == 1


@pytest.mark.parametrize("ends", ["gone", "in time"])
async def test_eviction_that_has_no_reason_any_more_is_dropped(tmp_path: Path, ends: str) -> None:
    desk = Desk(tmp_path, action="evict")
    desk.run_pod()
    desk.driver.shows(11, PID)
    if ends == "gone":
        desk.peers.eviction_error = NotFound(what="pod")
    else:
        desk.peers.eviction_error = Unavailable(peer="API", detail="away")
    await desk.look()
    if ends == "in time":
        desk.driver.shows(1, PID)
        await desk.look(1)
    desk.peers.eviction_error = None
    await desk.look(1)
    assert desk.peers.of_kind("Eviction") == []


async def test_unavailable_driver_leaves_regions_shown(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run_pod()
    desk.write_region(Built(uuids=("nvidia-0",), processes=(Process(2, (Used(5),)),)))
    desk.driver.answer = None
    await desk.look(1)
    assert desk.metrics()[of_device("hami_vgpu_memory_used_bytes")] == 5


async def test_process_that_proc_does_not_show_is_counted_not_accused(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run_pod()
    desk.driver.shows(99, 777)
    await desk.look(3)
    assert desk.peers.created == []
    assert desk.metrics()["hami_nodeagent_unknown_processes"] == 1


async def test_devices_without_shares_are_not_judged(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    process(tmp_path / "proc", 9, "0::/user.slice", comm="miner")
    canonical = desk.site.picture.canonical_by_vendor["nvidia"]
    divided = replace(canonical.devices[0], mode="mig")
    desk.site.picture.set_canonical(replace(canonical, devices=(divided,)))
    for uuid in ("nvidia-0", "nvidia-hidden"):
        desk.driver.shows(5, 9, uuid=uuid)
        await desk.look(3)
    assert desk.peers.created == []


async def test_host_figures_name_the_device(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.driver.answer = (DeviceUsage(uuid="nvidia-1", used_mib=3, core_pct=40),)
    await desk.look(1)
    labels = 'device_index="1",device_type="TEST",device_uuid="nvidia-1",node="node-a",zone="vGPU"'
    shown = desk.metrics()
    assert shown[f"hami_host_gpu_memory_used_bytes{{{labels}}}"] == 3 * MIB
    assert shown[f"hami_host_gpu_utilization_ratio{{{labels}}}"] == 40


def test_message_is_the_published_one() -> None:
    golden = (GOLDEN / "memory.json").read_bytes()
    record = decode(golden, BreachRecord, what="golden breach")
    assert encode(record) == golden.rstrip(b"\n")
    assert record.processes[0].pid == 4242


async def test_samples_without_a_change_are_taken_less_often(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run_pod(memory_mib=1000)
    desk.driver.shows(8, PID)
    usage = desk.site.settings.usage

    async def intervals(count: int) -> list[float]:
        found = []
        for _ in range(count):
            await desk.look(1)
            found.append(desk.watch.interval_s())
        return found

    assert await intervals(5) == [usage.look_s] * 3 + [usage.idle_look_s] * 2
    desk.driver.shows(9, PID)
    assert await intervals(4) == [usage.look_s] * 3 + [usage.idle_look_s]
    desk.driver.answer = None
    assert await intervals(1) == [usage.look_s], "a driver that does not answer is a change"
    assert usage.look_s + usage.idle_look_s < 10, "a breach is reported within 10 s"
