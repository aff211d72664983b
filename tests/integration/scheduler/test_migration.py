# SPDX-License-Identifier: Apache-2.0
"""Fifty pods of HAMi are taken over, fifty new ones placed around them, and all rolled back.

The cluster is a committed one, written in HAMi's own formats (``tests.support.hami_cluster``). The
test judges amounts without either scheduler: it sums them from the file, from the ledger and, at
the end, from annotations as HAMi reads them (``tests.support.hami_reader``).
"""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import pytest
from click.testing import CliRunner

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.inventory import Heartbeat, NodeDevices
from hami_common.model.device import Device
from hami_common.model.placement import booked_by_device
from hami_common.pods import annotations
from hami_common.runtime import kubeio, natsio
from hami_common.runtime.tasks import background
from hami_sim.natsd import NatsServer
from hamictl.cli import main
from hamictl.errors import Refused
from hamictl.nodemigration import Mover, Sides
from tests.integration.scheduler.site import SchedulerProcess, Site, open_site
from tests.support import hami_cluster, hami_reader
from tests.support.builders import as_admitted

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

Obj = dict[str, Any]
Amounts = dict[tuple[str, str], tuple[int, int, int]]
"""(memory, compute, containers) by (node, HAMi's name of the device)."""

VENDORS = {
    hami_cluster.NVIDIA: ("nvidia", "NVIDIA A100-SXM4-40GB"),
    hami_cluster.DCU: ("hygon", "DCU"),
    hami_cluster.ILUVATAR: ("iluvatar", "MR-V100"),
    hami_cluster.MLU: ("cambricon", "MLU370"),
    hami_cluster.XPU: ("kunlunxin", "P800"),
}
NEW = {
    hami_cluster.NVIDIA: 28,
    hami_cluster.DCU: 6,
    hami_cluster.ILUVATAR: 10,
    hami_cluster.MLU: 6,
}
LOOK_S = 0.1
PLUGIN = {"app.kubernetes.io/component": "hami-device-plugin"}


def our_uuid(node: str, number: int) -> str:
    """UUID of a device in this project: NVIDIA's own; for other vendors different from HAMi's."""
    is_nvidia = hami_cluster.NODES[node] == hami_cluster.NVIDIA
    return hami_cluster.device_ids(node)[number] if is_nvidia else f"OURS-{node}-{number}"


def our_devices(node: str) -> NodeDevices:
    word = hami_cluster.NODES[node]
    vendor, type_ = VENDORS[word]
    return NodeDevices(
        node=node,
        vendor=vendor,
        boot_id="boot-1",
        seq=1,
        time_s=0.0,
        config_generation=1,
        devices=tuple(
            Device(
                uuid=our_uuid(node, number),
                vendor=vendor,
                index=number,
                type=type_,
                memory_mib=hami_cluster.MEMORY[word],
                capacity_mib=hami_cluster.MEMORY[word],
                slots=hami_cluster.SLOTS[word],
                mode="smlu" if word == hami_cluster.MLU else "soft",
            )
            for number in range(hami_cluster.DEVICES[word])
        ),
    )


def new_pod(name: str, word: str) -> Obj:
    """A pod as the webhook leaves it."""
    count, memory, unit, cores = hami_cluster.LIMITS[word]
    limits = {count: "1", memory: str(2048 // unit), cores: "5"}
    return as_admitted(
        {
            "metadata": {"name": name, "labels": {annotations.MANAGED_LABEL: "true"}},
            "spec": {
                "schedulerName": "hami-scheduler",
                "initContainers": [{"name": "setup", "image": "x"}],
                "containers": [
                    {"name": "plain", "image": "x"},
                    {"name": "main", "image": "x", "resources": {"limits": limits}},
                ],
            },
        }
    )


def plus(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def written(pods: Iterable[Obj]) -> Amounts:
    """Amounts in the file, entry by entry: none of its init containers has a device."""
    total: dict[tuple[str, str], tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
    for pod in pods:
        for key in set(hami_cluster.ALLOCATED.values()) & pod["metadata"]["annotations"].keys():
            text = pod["metadata"]["annotations"][key].replace(";", "")
            for entry in filter(None, text.split(":")):
                device, _, mem, cores = entry.split(",")
                at = pod["spec"]["nodeName"], device
                total[at] = plus(total[at], (int(mem), int(cores), 1))
    return dict(total)


def booked(records: Iterable[AllocationRecord]) -> Amounts:
    """Amounts in the ledger, by HAMi's names."""
    total: dict[tuple[str, str], tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
    for record in records:
        ids = hami_cluster.device_ids(record.node)
        name_by_uuid = {our_uuid(record.node, n): name for n, name in enumerate(ids)}
        for uuid, held in booked_by_device(record.containers).items():
            at = record.node, name_by_uuid[uuid]
            total[at] = plus(total[at], (held.memory_mib, held.core_pct, held.slots))
    return dict(total)


class Town:
    """The cluster of the file on a simulated API server, and the owner of each node."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.file: Obj = json.loads(hami_cluster.FILE.read_text(encoding="utf-8"))
        self.nodes = [node["metadata"]["name"] for node in self.file["nodes"]]
        self.plugins = set(self.nodes)
        self.ours: set[str] = set()
        self._publisher = natsio.NatsPublisher(site.bus)

    async def build(self) -> None:
        for node in self.file["nodes"]:
            await self.site.kube.create("nodes", node)
            plugin: Obj = {
                "metadata": {"name": f"plugin-{node['metadata']['name']}", "labels": PLUGIN},
                "spec": {
                    "nodeName": node["metadata"]["name"],
                    "containers": [{"name": "plugin", "image": "x"}],
                },
            }
            await self.site.kube.create("pods", plugin, "default")
        for pod in self.file["pods"]:
            await self.site.kube.create("pods", pod, "default")
            await self.site.kube.patch(
                "pods",
                pod["metadata"]["name"],
                {"status": pod["status"]},
                namespace="default",
                subresource="status",
            )

    async def live(self) -> None:
        """Device plugins follow the labels of nodes, and agents send heartbeats."""
        while True:
            for node in (await self.site.kube.list("nodes"))["items"]:
                name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
                vendor = VENDORS[hami_cluster.NODES[name]][0]
                if labels.get("gpu") != "on" and name in self.plugins:
                    self.plugins.remove(name)
                    await self.site.kube.delete(
                        "pods", f"plugin-{name}", "default", gracePeriodSeconds="0"
                    )
                if labels.get(f"hami.io/{vendor}") != "true":
                    self.ours.discard(name)
                elif name not in self.ours:
                    self.ours.add(name)
                    await self.site.put_devices(our_devices(name))
            for name in self.ours:
                beat = Heartbeat(
                    node=name,
                    boot_id="boot-1",
                    seq=1,
                    time_s=0.0,
                    vendors=(VENDORS[hami_cluster.NODES[name]][0],),
                )
                await self._publisher.publish(subjects.heartbeat(name), codec.encode(beat))
            await anyio.sleep(0.2)

    async def records(self) -> list[AllocationRecord]:
        return [record for record in await self.site.log() if record.op != "release"]

    async def move(self, *names: str, back: bool = False, accept: bool = False) -> set[str]:
        """Move nodes at the same time, as ``hamictl migrate`` does; returns their final sides."""
        done: set[str] = set()
        sides = Sides(wait_s=60)
        kubeconfig = str(self.site.directory / "kubeconfig")
        async with kubeio.connect(kubeconfig, user_agent="test") as kube:

            async def move(name: str) -> None:
                mover = Mover(kube, name, sides, report=lambda _: None)
                if back:
                    done.add((await mover.roll_back(accept=accept)).side)
                else:
                    done.add((await mover.migrate(accept=accept)).side)

            async with anyio.create_task_group() as group:
                for name in names:
                    group.start_soon(move, name)
        return done

    async def hamictl(self, *words: str) -> str:
        """Run a command, which must succeed; returns its output."""
        kubeconfig = str(self.site.directory / "kubeconfig")
        arguments = [*words, "--kubeconfig", kubeconfig]
        result = await anyio.to_thread.run_sync(CliRunner().invoke, main, arguments)
        assert result.exit_code == 0, result.output
        return result.output


async def settle(town: Town, count: int) -> list[AllocationRecord]:
    """The ledger, once it has so many records."""
    with anyio.fail_after(60):
        while len(records := await town.records()) < count:
            await anyio.sleep(LOOK_S)
    return records


@pytest.fixture
async def town(
    tmp_path: Path, nats_server: NatsServer, anyio_backend: str
) -> AsyncIterator[tuple[Town, SchedulerProcess]]:
    del anyio_backend
    async with (
        open_site(tmp_path, nats_server) as site,
        aiohttp.ClientSession() as http,
        background() as group,
    ):
        town = Town(site)
        scheduler = site.scheduler(
            "s1", http, take_over=True, take_over_s=0.1, mirror_pods=True, mirror_s=0.1
        )
        async with anyio.create_task_group() as both:
            both.start_soon(scheduler.start)
            both.start_soon(town.build)
        group.start_soon(town.live)
        await scheduler.until_ready()
        yield town, scheduler


async def test_cluster_of_hami_is_taken_over_filled_and_rolled_back(
    town: tuple[Town, SchedulerProcess],
) -> None:
    place, scheduler = town
    theirs = place.file["pods"]
    assert len(theirs) == 50
    assert hami_reader.over_capacity(place.file["nodes"], theirs) == []

    plan = await place.hamictl("migrate", "plan")
    assert {row.split()[0] for row in plan.splitlines() if " hami " in row} == set(place.nodes)
    # Hardware that HAMi partitioned stays with HAMi unless the operator accepts the move.
    with pytest.RaisesGroup(pytest.RaisesExc(Refused, match="hardware partition")):
        await place.move("dcu-a")
    assert await place.move(*place.nodes, accept=True) == {"ours"}
    records = await settle(place, 50)
    assert {record.origin for record in records} == {"hami"}
    assert not [record.reason for record in records if record.reason]
    assert booked(records) == written(theirs)

    new = [
        await place.site.kube.create("pods", new_pod(f"new-{word.lower()}-{n}", word), "default")
        for word, count in NEW.items()
        for n in range(count)
    ]
    assert len(new) == 50
    with anyio.fail_after(60):
        waiting = new
        while waiting:
            left = []
            for pod in waiting:
                fitting = (await scheduler.filter(pod, place.nodes))["NodeNames"]
                if not fitting or await scheduler.bind(pod, fitting[0]):
                    left.append(pod)
            waiting = left
    records = await settle(place, 100)
    place.site.capacity = [our_devices(name) for name in place.nodes]
    await place.site.check()
    assert booked(record for record in records if record.origin) == written(theirs)

    with anyio.fail_after(60):
        while len(hami_reader.placed(await place.site.pods())) < 100:
            await anyio.sleep(LOOK_S)
    status = json.loads(await place.hamictl("migrate", "status", "-o", "json"))["items"]
    assert sum(one["taken_over"] for one in status) == 50
    assert sum(one["our_pods"] for one in status) == 50
    assert await place.move(*place.nodes, back=True) == {"hami"}
    nodes = [
        {**node, "metadata": {**node["metadata"], "annotations": old["metadata"]["annotations"]}}
        for node, old in zip(
            sorted((await place.site.kube.list("nodes"))["items"], key=_name),
            sorted(place.file["nodes"], key=_name),
            strict=True,
        )
    ]
    pods = [pod for pod in await place.site.pods() if "plugin" not in pod["metadata"]["name"]]
    assert len(pods) == 100
    assert hami_reader.over_capacity(nodes, pods) == []
    ours = [pod for pod in pods if pod["metadata"]["name"].startswith("new-")]
    counted = hami_reader.used(ours)
    assert {at: tuple(own) for at, own in counted.items()} == booked(
        record for record in records if not record.origin
    )


def _name(node: Obj) -> str:
    name: str = node["metadata"]["name"]
    return name
