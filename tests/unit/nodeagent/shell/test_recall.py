# SPDX-License-Identifier: Apache-2.0
"""Recall with real sockets, gates and a helper program; the driver is a directory of states."""

import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
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
from hami_common.runtime.tasks import background
from hami_nodeagent.drivers.protocol import DeviceUsage, ProcessUsage
from hami_nodeagent.settings import RecallSettings
from hami_nodeagent.shell.doorbell import SOCKET_NAME, Doorbells
from hami_nodeagent.shell.gates import Gates
from hami_nodeagent.shell.owners import Owner
from hami_nodeagent.shell.recall import RecallWatch
from hami_nodeagent.shell.regions import region_path
from tests.support.regions import Built, Process, Used
from tests.unit.nodeagent.core.builders import NODE, Given, device
from tests.unit.nodeagent.shell.support import know, make_site

MIB = 1 << 20
GPU = "GPU-0"
CARD_MIB, LIMIT_MIB = 1000, 600
OWN = os.getpid()
"""The process of the low container, which reports: its pid is the kernel's."""
NAMESPACE = 4026532000
LOW, HIGH = ("uid-low", "main"), ("uid-high", "main")
# Keeps the driver's state of each process in a file, and fails where a file `fail-VERB` exists.
PROGRAM = f"""#!{sys.executable}
import pathlib, socket
directory = pathlib.Path(__file__).parent / "driver"
after = {{"lock": "locked", "checkpoint": "checkpointed", "restore": "locked", "unlock": "running"}}
with socket.socket(fileno=3) as end:
    while packet := end.recv(4096):
        number, verb, pid, *_ = packet.decode().split()
        state = directory / pid
        with open(directory / "calls", "a") as calls:
            print(verb, pid, file=calls)
        if verb == "state":
            answer = "ok " + (state.read_text() if state.exists() else "running")
        elif (directory / f"fail-{{verb}}").exists():
            answer = "error 2 CUDA_ERROR_OUT_OF_MEMORY"
        else:
            state.write_text(after[verb])
            answer = "ok"
        end.send(f"{{number}} {{answer}}".encode())
"""


class FakeKube:
    """The API server."""

    def __init__(self) -> None:
        self.created: list[tuple[str, Any]] = []
        self.refuses = False

    async def create(self, path: str, body: bytes) -> bytes:
        if self.refuses and path.endswith("/eviction"):
            raise Unavailable(peer="the API server", detail="disruption budget")
        self.created.append((path, msgspec.json.decode(body)))
        return b"{}"

    def events(self) -> list[str]:
        return [body["reason"] for _, body in self.created if body["kind"] == "Event"]

    def evictions(self) -> list[str]:
        return [body["metadata"]["name"] for _, body in self.created if body["kind"] == "Eviction"]


class Desk:
    """One device with recall, and two containers that both want more than half of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.helper = directory / "hami-recall"
        self.helper.write_text(PROGRAM)
        self.helper.chmod(0o755)
        (directory / "driver").mkdir()
        self.site = make_site(
            directory / "state",
            pods_dir=str(directory / "pods"),
            host_proc=str(directory / "proc"),
            host_root=str(directory / "root"),
            recall=RecallSettings(idle_s=0.3, park_s=5, retry_s=60, helper=str(self.helper)),
        )
        recalled = device(
            0, uuid=GPU, capacity_mib=2 * CARD_MIB, largest_mib=CARD_MIB, overcommit="recall"
        )
        self.site.picture.set_canonical(
            NodeDevices(
                node=NODE, vendor="nvidia", boot_id="", seq=2, time_s=0, config_generation=1,
                devices=(recalled,),
            )
        )  # fmt: skip
        self.memory_mib = {OWN: 500}
        self.failures = 0
        self.before_read: Callable[[], None] = lambda: None
        self.bells = Doorbells(directory / "pages")
        self.gates = Gates(self.bells)
        self.kube = FakeKube()
        self._process(1, namespace=1)
        self._process(OWN, namespace=NAMESPACE)
        (directory / "proc" / "self").symlink_to(str(OWN))
        group = directory / "root/sys/fs/cgroup/pod"
        group.mkdir(parents=True)
        self.limit_host(group, "max")
        for name, level in (("low", 5), ("high", 0)):
            self._pod(name, level)
        self._watch()

    def limit_host(self, group: Path, limit: str) -> None:
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text("0")
        (group / "memory.stat").write_text("inactive_file 0\n")

    def _process(self, pid: int, namespace: int) -> None:
        own = self.directory / "proc" / str(pid)
        (own / "ns").mkdir(parents=True)
        (own / "comm").write_text("train\n")
        (own / "cgroup").write_text("0::/pod\n")
        (own / "stat").write_text(f"{pid} (train) S " + "1 " * 16 + "1 0 50 0\n")
        (own / "status").write_text(f"NSpid:\t{pid}\t{pid}\n")
        (own / "ns" / "pid").symlink_to(f"pid:[{namespace}]")

    def _pod(self, name: str, level: int) -> None:
        pod = Given(name, region_volumes={"main": "region"})
        shares = replace(
            pod.record.containers[0],
            shares=(Share(vendor="nvidia", uuid=GPU, memory_mib=LIMIT_MIB),),
            priority=level,
        )
        pod.entry = replace(pod.entry, record=replace(pod.record, containers=(shares,)))
        know(self.site, pod)
        self.site.picture.grants.add(pod.grant("main", f"id-{name}"))
        path = region_path(self.directory / "pods", pod.uid, "region")
        path.parent.mkdir(parents=True)
        used = [Process(OWN, [Used(500 * MIB)], NAMESPACE, 50)] if name == "low" else []
        path.write_bytes(Built(uuids=[GPU], processes=used).data())
        self.gates.create((pod.uid, "main"))

    def _watch(self) -> None:
        kube: Any = self.kube
        recorder = EventRecorder(kube, component="test", clock=SystemClock())
        self.watch = RecallWatch(
            site=self.site,
            bells=self.bells,
            gates=self.gates,
            usage=self.usage,
            events=lambda: recorder,
            kube=lambda: kube,
            owners=self.owners,
        )

    def restart_agent(self) -> None:
        self.gates = Gates(self.bells)
        self._watch()

    def state(self, pid: int = OWN) -> str:
        path = self.directory / "driver" / str(pid)
        return path.read_text() if path.exists() else "running"

    def calls(self) -> list[str]:
        path = self.directory / "driver" / "calls"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def on_device(self) -> dict[int, int]:
        return {
            pid: mib for pid, mib in self.memory_mib.items() if self.state(pid) != "checkpointed"
        }

    async def usage(self) -> Sequence[DeviceUsage]:
        if self.failures:
            self.failures -= 1
            raise RuntimeError
        self.before_read()
        listed = self.on_device()
        return (
            DeviceUsage(
                uuid=GPU,
                total_mib=CARD_MIB,
                used_mib=sum(listed.values()),
                processes=tuple(ProcessUsage(pid=pid, used_mib=mib) for pid, mib in listed.items()),
            ),
        )

    def owners(self, pids: Collection[int]) -> Mapping[int, Owner]:
        return {
            pid: Owner(command="train", pod_uid=LOW[0], container=LOW[1])
            for pid in pids
            if pid == OWN
        }

    def ring(self, key: tuple[str, str], byte: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            sender.sendto(byte, str(self.bells.path_of(key) / SOCKET_NAME))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.bells.listen([LOW, HIGH])

        async def answer_bells() -> None:
            while True:
                await self.bells.wait()
                self.bells.unmute(self.site.clock.monotonic_s())
                self.bells.rung(self.site.clock.monotonic_s())

        try:
            async with background() as group:
                group.start_soon(answer_bells)
                group.start_soon(self.site.supervisor.keep, "recall", self.watch.run)
                yield
        finally:
            self.bells.close()

    async def until(self, condition: Callable[[], bool], *waiting: tuple[str, str]) -> None:
        """Let containers behave as the library does until the condition holds."""
        with anyio.fail_after(10):
            while not condition():
                for key in waiting:
                    if not self.gates.is_open(key):
                        self.ring(key, b"w")
                if LOW not in waiting and not self.gates.is_open(LOW):
                    self.ring(LOW, b"p" + (self.gates.turn_of(LOW) or 0).to_bytes(8, "little"))
                await anyio.sleep(0.03)

    def metric(self, name: str) -> float:
        text = generate_latest(self.site.metrics.registry).decode()
        lines = [line for line in text.splitlines() if line.startswith(name + " ")]
        return float(lines[0].rsplit(" ", 1)[1]) if lines else -1.0


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.anyio
async def test_idle_container_is_parked_for_another_and_returns(desk: Desk) -> None:
    async with desk.running():
        await desk.until(lambda: desk.gates.is_open(LOW) is True, LOW)
        await desk.until(lambda: desk.gates.is_open(HIGH) is True, HIGH)
        assert desk.state() == "checkpointed"
        assert desk.gates.is_open(LOW) is False
        await desk.until(lambda: desk.kube.events() == ["RecallParked"])
        assert desk.metric("hami_recall_parked_bytes") == 500 * MIB
        (use,) = desk.watch.uses()
        assert ((use.pod_uid, use.container), (use.for_pod_uid, use.for_container)) == (LOW, HIGH)
        assert (use.moves, use.moved_mib) == (1, 500)
        assert desk.metric('hami_recall_containers{phase="parked"}') == 1
        desk.site.picture.grants.remove(next(iter(desk.site.picture.grants.of_pod(HIGH[0]))))
        desk.site.picture.note_change()
        await desk.until(lambda: desk.gates.is_open(LOW) is True, LOW)
        assert desk.state() == "running"
        await desk.until(lambda: desk.kube.events() == ["RecallParked", "RecallReturned"])
        assert desk.metric("hami_recall_parked_bytes") == 0
    assert desk.calls() == ["lock", "checkpoint", "restore", "unlock"]


@pytest.mark.anyio
async def test_move_counts_for_the_container_that_ended_before_it_was_done(desk: Desk) -> None:
    def end_waiting() -> None:
        if desk.state() == "locked":
            for grant in list(desk.site.picture.grants.of_pod(HIGH[0])):
                desk.site.picture.grants.remove(grant)
            desk.site.picture.note_change()

    async with desk.running():
        await desk.until(lambda: desk.gates.is_open(LOW) is True, LOW)
        desk.before_read = end_waiting
        await desk.until(lambda: desk.state() == "checkpointed", HIGH)
        await desk.until(lambda: bool(desk.watch.uses()))
        (use,) = desk.watch.uses()
    assert not list(desk.site.picture.grants.of_pod(HIGH[0]))
    assert (use.for_pod, use.for_pod_uid, use.moves) == ("high", HIGH[0], 1)


@pytest.mark.anyio
async def test_failure_of_the_loop_loses_no_decision(desk: Desk) -> None:
    async with desk.running():
        await desk.until(lambda: desk.gates.is_open(LOW) is True, LOW)
        desk.failures = 1
        await desk.until(lambda: desk.gates.is_open(HIGH) is True, HIGH)
        assert desk.failures == 0
        assert desk.state() == "checkpointed"
        assert desk.gates.is_open(LOW) is False


@pytest.mark.anyio
async def test_events_of_moves_are_recorded_once_a_minute(desk: Desk) -> None:
    async with desk.running():
        await desk.until(lambda: desk.gates.is_open(LOW) is True, LOW)
        for _ in range(2):
            await desk.until(lambda: desk.gates.is_open(HIGH) is True, HIGH)
            grant = next(iter(desk.site.picture.grants.of_pod(HIGH[0])))
            desk.site.picture.grants.remove(grant)
            desk.site.picture.note_change()
            await desk.until(lambda: desk.gates.is_open(LOW) is True, LOW)
            desk.gates.set(HIGH, is_open=False)
            desk.gates.new.add(HIGH)
            desk.site.picture.grants.add(grant)
            desk.site.picture.note_change()
        await desk.until(lambda: len(desk.calls()) >= 8)
    assert desk.kube.events() == ["RecallParked", "RecallReturned"]


@pytest.mark.anyio
async def test_refusal_is_recorded_with_its_reason(desk: Desk) -> None:
    desk.limit_host(desk.directory / "root/sys/fs/cgroup/pod", str(200 * MIB))
    async with desk.running():
        await desk.until(lambda: desk.gates.is_open(LOW) is True, LOW)
        await desk.until(lambda: desk.kube.events() == ["RecallRefused"], HIGH)
        assert desk.gates.is_open(LOW) is True
        assert desk.calls() == []
        ((_, event),) = desk.kube.created
        assert "raise limits.memory" in event["note" if "note" in event else "message"]
        assert desk.metric('hami_recall_failures_total{reason="host-memory"}') == 1


@pytest.mark.anyio
async def test_failed_restore_evicts_until_the_api_server_accepts(desk: Desk) -> None:
    desk.kube.refuses = True
    (desk.directory / "driver" / "fail-restore").touch()
    async with desk.running():
        await desk.until(lambda: desk.gates.is_open(LOW) is True, LOW)
        await desk.until(lambda: desk.gates.is_open(HIGH) is True, HIGH)
        desk.site.picture.grants.remove(next(iter(desk.site.picture.grants.of_pod(HIGH[0]))))
        desk.site.picture.note_change()
        await desk.until(lambda: "RecallFailed" in desk.kube.events(), LOW)
        assert desk.kube.evictions() == []
        desk.kube.refuses = False
        await desk.until(lambda: desk.kube.evictions() == ["low"], LOW)
        assert desk.gates.is_open(LOW) is False


@pytest.mark.anyio
@pytest.mark.parametrize("state", ["locked", "checkpointed"])
async def test_agent_that_restarts_goes_on_where_it_was(desk: Desk, state: str) -> None:
    (desk.directory / "driver" / str(OWN)).write_text(state)
    desk.restart_agent()
    async with desk.running():
        if state == "locked":
            await desk.until(lambda: desk.gates.is_open(LOW) is True)
        else:
            await desk.until(lambda: desk.metric('hami_recall_containers{phase="parked"}') == 2)
            assert desk.gates.is_open(LOW) is False
        await desk.until(lambda: desk.gates.is_open(LOW) is True, LOW)
        assert desk.state() == "running"


@pytest.mark.anyio
async def test_node_without_gates_runs_no_helper(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for key in (LOW, HIGH):
        (desk.bells.path_of(key) / "residency-1").unlink()
    desk.helper.write_text(f"#!{sys.executable}\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    async with desk.running():
        for _ in range(5):
            desk.site.picture.note_change()
            await anyio.sleep(0.02)
    assert not (tmp_path / "ran").exists()
