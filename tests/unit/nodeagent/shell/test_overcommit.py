# SPDX-License-Identifier: Apache-2.0
"""The watch over overcommitted devices: facts, gates, Events, metrics."""

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest

from hami_common.errors import Unavailable
from hami_common.events.inventory import NodeDevices
from hami_common.model.placement import Share
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.kubeio import EventRecorder
from hami_nodeagent.core.holders import holders_of
from hami_nodeagent.core.pressure import BEGINS_S, ENDS_S
from hami_nodeagent.core.priorities import ContainerKey
from hami_nodeagent.core.thrash import ThrashRules
from hami_nodeagent.core.usage import Row
from hami_nodeagent.drivers.protocol import DeviceUsage
from hami_nodeagent.shell.doorbell import Doorbells
from hami_nodeagent.shell.gates import QUANTUM_NAME, Gates
from hami_nodeagent.shell.overcommit import QUANTA_S, OvercommitWatch
from hami_nodeagent.shell.regions import region_path
from hami_nodeagent.shell.usagemetrics import Look
from tests.support.manualclock import ManualClock
from tests.support.regions import Built, Process
from tests.unit.nodeagent.core.builders import NODE, Given, device
from tests.unit.nodeagent.shell.support import know, make_site

pytestmark = pytest.mark.anyio

GPU = "nvidia-0"
MEMORY_MIB, LIMIT_MIB = 1000, 800
MIB = 1 << 20
NS = 10**9
TRAFFIC_MIB_S = 10_000.0
RULES = ThrashRules(quanta=True, after_s=2.0, quantum_s=5.0)


class FakeApi:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.is_away = False

    async def create(self, path: str, body: bytes) -> bytes:
        if self.is_away:
            raise Unavailable(peer="API server", detail="the test says so")
        self.events.append(msgspec.json.decode(body))
        return b"{}"

    def of(self, kind: str) -> list[tuple[str, str]]:
        """Reasons and types of the Events on objects of a kind."""
        return [
            (one["reason"], one["type"])
            for one in self.events
            if one.get("regarding", one.get("involvedObject"))["kind"] == kind
        ]


class Desk:
    """Two containers of one device with 1000 MiB that offers 2000."""

    def __init__(self, directory: Path, *, overcommit: str = "managed", **settings: Any) -> None:
        self.clock = ManualClock()
        proc = directory / "proc"
        proc.mkdir()
        self.meminfo = proc / "meminfo"
        self.host(available_mib=4000)
        self.site = make_site(
            directory / "state",
            pods_dir=str(directory / "pods"),
            host_proc=str(proc),
            thrash=RULES,
            **settings,
        )
        self.site.clock = self.clock
        self.site.picture.set_canonical(
            NodeDevices(
                node=NODE,
                vendor="nvidia",
                boot_id="",
                seq=2,
                time_s=0,
                config_generation=1,
                devices=(
                    device(0, capacity_mib=2 * MEMORY_MIB, overcommit=overcommit),
                    device(1),
                ),
            )
        )
        self.bells = Doorbells(directory / "bells")
        self.gates = Gates(self.bells, QUANTUM_NAME)
        self.keys: list[ContainerKey] = []
        self._directory = directory
        self.launches = 0
        self.is_working = True
        self.is_timed = True
        """The library notes the time of calls: it does with a gate or a limit of compute."""
        for name in ("one", "two"):
            self._run_pod(name)
        self.sample = Look()
        self.api = FakeApi()
        kube: Any = self.api
        recorder = EventRecorder(kube, component="test", clock=SystemClock())
        self.watch = OvercommitWatch(
            site=self.site,
            bells=self.bells,
            gates=self.gates,
            look=lambda: self.sample,
            events=lambda: recorder,
        )

    def _run_pod(self, name: str) -> None:
        pod = Given(name, region_volumes={"main": "region"})
        share = Share(vendor="nvidia", uuid=GPU, memory_mib=LIMIT_MIB)
        containers = (replace(pod.record.containers[0], shares=(share,)),)
        pod.entry = replace(pod.entry, record=replace(pod.record, containers=containers))
        know(self.site, pod)
        self.site.picture.grants.add(pod.grant("main", f"{name}-id"))
        self.keys.append((pod.uid, "main"))
        self.gates.create(self.keys[-1])

    def host(self, *, available_mib: int) -> None:
        self.meminfo.write_text(
            f"MemTotal:       {8000 * 1024} kB\nMemFree: 1 kB\n"
            f"MemAvailable:   {available_mib * 1024} kB\n"
        )

    def works(self, key: ContainerKey) -> None:
        """Let the container launch now, if it works."""
        now_ns = int(self.clock.monotonic_s() * NS) + 1 if self.is_timed else 0
        self.launches += self.is_working
        path = region_path(self._directory / "pods", key[0], "region")
        path.parent.mkdir(parents=True, exist_ok=True)
        process = Process(pid=1, last_launch_ns=now_ns, launches=self.launches)
        path.write_bytes(Built(uuids=(GPU,), processes=[process], touched_ns=now_ns).data())

    def uses(self, used_mib: int, traffic_mib_s: float | None = 0.0) -> None:
        """Take a usage sample: each container was given so much."""
        picture = self.site.picture
        holders = holders_of(
            picture.entries_by_uid, picture.pods, picture.grants, picture.view.devices_by_uuid
        )
        self.sample = Look(
            rows=[Row(holder=one, used_bytes=used_mib * MIB) for one in holders],
            devices=[
                (
                    self.site.picture.view.devices_by_uuid[GPU],
                    DeviceUsage(uuid=GPU, used_mib=900, pcie_mib_s=traffic_mib_s),
                )
            ],
            asked_s=self.clock.monotonic_s(),
        )

    async def run(self, for_s: float, used_mib: int, traffic_mib_s: float | None = 0.0) -> None:
        """Let time go by, with a sample every second; containers that are not held back work."""
        for _ in range(int(for_s)):
            for key in self.keys:
                if self.gates.is_open(key):
                    self.works(key)
                else:
                    for listener in self.bells.listeners:
                        listener(key, 1, "waits", None)
            self.uses(used_mib, traffic_mib_s)
            await self.clock.advance(QUANTA_S)
            await self.watch.look()
            await self.clock.advance(1 - QUANTA_S)

    def metrics(self) -> dict[str, float]:
        text = generate_latest(self.site.metrics.registry).decode()
        lines = [line for line in text.splitlines() if line.startswith("hami_overcommit")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_memory_of_overcommitted_devices_is_shown(desk: Desk) -> None:
    desk.uses(700)
    await desk.watch.look()
    shown = desk.metrics()
    of_device = f'{{device_uuid="{GPU}"}}'
    assert shown[f"hami_overcommit_promised_bytes{of_device}"] == 1600 * MIB
    assert shown[f"hami_overcommit_used_bytes{of_device}"] == 1400 * MIB
    assert shown[f"hami_overcommit_spilled_bytes{of_device}"] == 400 * MIB
    assert shown[f'hami_overcommit_host_headroom_bytes{{node="{NODE}"}}'] == 3800 * MIB
    assert shown["hami_overcommit_held_containers"] == 0
    assert not [name for name in shown if "nvidia-1" in name], "it is not overcommitted"


async def test_watch_rests_while_no_device_is_overcommitted(desk: Desk) -> None:
    picture = desk.site.picture
    picture.view.devices_by_uuid = {"nvidia-1": picture.view.devices_by_uuid["nvidia-1"]}
    async with anyio.create_task_group() as group:
        group.start_soon(desk.watch.run)
        await anyio.wait_all_tasks_blocked()
        sleepers = desk.clock.sleeper_count
        assert sleepers == 0
        assert not [name for name in desk.metrics() if "promised" in name]
        picture.view.devices_by_uuid = {GPU: device(0, capacity_mib=2 * MEMORY_MIB)}
        picture.note_change()
        while not desk.clock.sleeper_count:
            await anyio.sleep(0.001)
        assert [name for name in desk.metrics() if "promised" in name]
        group.cancel_scope.cancel()


async def test_usage_that_a_tenant_writes_counts_at_most_as_its_limit(desk: Desk) -> None:
    desk.uses(1 << 30)
    await desk.watch.look()
    assert desk.metrics()[f'hami_overcommit_used_bytes{{device_uuid="{GPU}"}}'] == 1600 * MIB


async def test_begin_and_end_of_pressure_are_events_on_node_and_pods(desk: Desk) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(desk.watch.events.run)
        await desk.run(BEGINS_S + 5, 700)
        begins = ("DeviceMemorySpilled", "Warning")
        assert desk.api.of("Node") == [begins]
        assert desk.api.of("Pod") == [begins, begins]
        assert desk.metrics()[f'hami_overcommit_pressure{{device_uuid="{GPU}",kind="spilled"}}']
        await desk.run(ENDS_S + 5, 400)
        ends = ("DeviceMemoryFits", "Normal")
        assert desk.api.of("Node") == [begins, ends]
        assert desk.api.of("Pod") == [begins, begins, ends, ends]
        assert not [name for name in desk.metrics() if "pressure" in name]
        group.cancel_scope.cancel()


async def test_host_memory_that_is_short_is_an_event_on_the_node(desk: Desk) -> None:
    desk.host(available_mib=100)
    async with anyio.create_task_group() as group:
        group.start_soon(desk.watch.events.run)
        await desk.run(BEGINS_S + 5, 500)
        assert desk.api.of("Node") == [("HostMemoryShort", "Warning")]
        assert desk.api.of("Pod") == []
        desk.host(available_mib=4000)
        await desk.run(ENDS_S + 5, 500)
        assert desk.api.of("Node")[1:] == [("HostMemorySufficient", "Normal")]
        group.cancel_scope.cancel()


@pytest.mark.parametrize("text", [None, "", "MemTotal: 5 kB\n", "nothing"])
async def test_host_without_figures_has_no_headroom(desk: Desk, text: str | None) -> None:
    desk.meminfo.unlink() if text is None else desk.meminfo.write_text(text)
    desk.uses(700)
    await desk.watch.look()
    assert not [name for name in desk.metrics() if "headroom" in name]


async def test_thrashing_device_is_given_to_one_container_after_the_other(desk: Desk) -> None:
    held: set[int] = set()
    async with anyio.create_task_group() as group:
        group.start_soon(desk.watch.events.run)
        for _ in range(40):
            await desk.run(1.0, 700, TRAFFIC_MIB_S if not held else 100.0)
            shut = [number for number, key in enumerate(desk.keys) if not desk.gates.is_open(key)]
            assert len(shut) < 2 or not held
            held.update(shut)
        assert held == {0, 1}
        assert ("DeviceMemoryThrashing", "Warning") in desk.api.of("Node")
        assert desk.api.of("Pod").count(("DeviceMemoryThrashing", "Warning")) == 2
        shown = desk.metrics()
        assert shown["hami_overcommit_held_containers"] == 1
        changes = shown[f'hami_overcommit_quantum_changes_total{{device_uuid="{GPU}"}}']
        assert 4 <= changes <= 10
        assert not all(map(desk.gates.is_open, desk.keys))
        group.start_soon(desk.watch.run)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert all(map(desk.gates.is_open, desk.keys)), "the end of the watch opens the gates"


async def test_slow_api_server_does_not_delay_leases(desk: Desk) -> None:
    hanging = anyio.Event()

    async def hang(path: str, body: bytes) -> bytes:
        hanging.set()
        await anyio.sleep_forever()
        raise AssertionError

    desk.api.create = hang  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        group.start_soon(desk.watch.events.run)
        await desk.run(12, 700, TRAFFIC_MIB_S)
        assert hanging.is_set()
        assert desk.metrics()["hami_overcommit_held_containers"] == 1
        group.cancel_scope.cancel()


@pytest.mark.parametrize("works", [True, False])
async def test_launches_show_work_where_their_time_is_not_noted(desk: Desk, *, works: bool) -> None:
    desk.is_timed, desk.is_working = False, works
    await desk.run(8, 700, TRAFFIC_MIB_S)
    assert bool([name for name in desk.metrics() if "thrashing" in name]) == works


@pytest.mark.parametrize("case", ["off", "recall", "unknown traffic"])
async def test_containers_are_not_held_back(tmp_path: Path, case: str) -> None:
    desk = Desk(tmp_path, overcommit="recall" if case == "recall" else "managed")
    if case == "off":
        desk.site.use(replace(desk.site.settings, thrash=ThrashRules(after_s=2.0)))
    async with anyio.create_task_group() as group:
        group.start_soon(desk.watch.events.run)
        await desk.run(12, 700, None if case == "unknown traffic" else TRAFFIC_MIB_S)
        assert all(map(desk.gates.is_open, desk.keys))
        reasons = {reason for reason, _ in desk.api.of("Node")}
        assert ("DeviceMemoryThrashing" in reasons) == (case == "off")
        group.cancel_scope.cancel()
