# SPDX-License-Identifier: Apache-2.0
"""Volcano's scheduler 1.14.1 on a real control plane, with shares of the one ledger.

The shipped manifests and the configuration of docs/volcano.md. Two nodes have agents and run
containers; the others are on paper. One installation serves all tests. Memory in MiB.
"""

import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
import yaml
from nats.js.errors import NotFoundError

from hami_common.bus import subjects
from hami_common.compat import volcano as form
from hami_common.events.allocation import AllocationRecord
from hami_common.events.codec import decode
from hami_common.model.device import DeviceFacts
from hami_common.pods import annotations as keys
from hami_common.pods import limits
from tests.e2e.test_other_schedulers import COMPONENT
from tests.support.checker import inventory_of, ledger_of, over_capacity, problems_of
from tests.support.installed import OVERLAYS, SLEEPER, SPEC, Installed, run_installed
from tests.support.kustomize import overlay
from tests.support.paper_nodes import PaperAgents, PaperNode, add_nodes, each
from tests.support.volcano import (
    GROUP_NAME,
    NAME,
    NUMBER,
    USER,
    Volcano,
    describe_nodes,
    volcano_or_skip,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.volcano,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(600),
]

NAMESPACE: Final = "default"
NODES: Final = tuple(node.name for node in SPEC.nodes)
PAPER: Final = tuple(f"paper-{number:02}" for number in range(18))
CARDS: Final = 2
CARD_MIB: Final = 24_576
SHARES: Final = 200
SHARE_MIB: Final = 4_000
LEASE_S: Final = 3
LIMIT_S: Final = 90.0
MEMORY: Final = "volcano.sh/vgpu-memory"
PERCENT, CORES = "volcano.sh/vgpu-memory-percentage", "volcano.sh/vgpu-cores"
Obj = dict[str, Any]
Resources = Mapping[str, int | str]


def pod(
    name: str,
    *containers: Resources,
    group: str = "",
    scheduler: str = NAME,
    node: str = "",
) -> Obj:
    """A pod with these limits of its containers."""
    spec: Obj = {
        "schedulerName": scheduler,
        "terminationGracePeriodSeconds": 1,
        "containers": [
            {
                "name": f"c{number}",
                "image": "app",
                "command": [*SLEEPER[:2], f"cat /etc/hami/limits; {SLEEPER[2]}"],
                "resources": {"limits": {key: str(value) for key, value in wanted.items()}},
            }
            for number, wanted in enumerate(containers)
        ],
    }
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    notes = {GROUP_NAME: group} if group else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": notes},
        "spec": spec,
    }


def share(memory_mib: int) -> Obj:
    return {NUMBER: 1, MEMORY: memory_mib, CORES: 10}


def facts(node: str) -> tuple[DeviceFacts, ...]:
    return tuple(
        DeviceFacts(
            uuid=f"GPU-{node}-{index}",
            vendor="nvidia",
            index=index,
            type="NVIDIA A30",
            memory_mib=CARD_MIB,
        )
        for index in range(CARDS)
    )


class Site:
    """The installation with Volcano."""

    def __init__(self, installed: Installed, volcano: Volcano) -> None:
        self.installed = installed
        self.admin = installed.client
        self.volcano = volcano

    async def until(
        self, what: str, condition: Callable[[], Any], *, limit_s: float = LIMIT_S
    ) -> None:
        await self.installed.until(what, condition, limit_s=limit_s)

    async def create(self, document: Obj) -> Obj:
        made: Obj = await self.admin.create("pods", document, NAMESPACE)
        assert made["metadata"]["labels"][keys.MANAGED_LABEL] == "true"
        return made

    async def documents(self) -> dict[str, Obj]:
        found = (await self.admin.list("pods", NAMESPACE))["items"]
        return {one["metadata"]["name"]: one for one in found}

    async def bound(self) -> dict[str, str]:
        """Node by name of the pods that are bound."""
        found = await self.documents()
        return {name: node for name, one in found.items() if (node := one["spec"].get("nodeName"))}

    async def until_bound(self, *names: str) -> None:
        async def are_bound() -> bool:
            return set(names) <= (await self.bound()).keys()

        await self.until(f"{', '.join(names)} are bound", are_bound)

    async def until_running(self, *names: str) -> None:
        for name in names:
            await self.until(f"{name} runs", partial(self.installed.pod_is, name, "Running"))

    async def message(self, name: str) -> str:
        """Conditions and events of a pod."""
        one = (await self.documents())[name]
        texts = [c.get("message", "") for c in one["status"].get("conditions", ())]
        events = (await self.admin.list("events", NAMESPACE))["items"]
        texts += [e["message"] for e in events if e["involvedObject"].get("name") == name]
        return "\n".join(texts)

    async def until_told(self, name: str, text: str) -> None:
        async def is_told() -> bool:
            return text in await self.message(name)

        await self.until(f"{name} shows {text!r}", is_told)

    async def records(self) -> dict[str, AllocationRecord]:
        """Newest record by uid of the pods that hold something."""
        records = (await ledger_of(self.installed)).values()
        return {record.pod_uid: record for record in records if record.op != "release"}

    async def delete(self, *names: str) -> None:
        async def remove(name: str) -> None:
            await self.admin.delete("pods", name, NAMESPACE, gracePeriodSeconds="0")

        await each(names, remove)

    async def clear(self) -> None:
        await self.delete(*await self.documents())
        path = f"/apis/scheduling.volcano.sh/v1beta1/namespaces/{NAMESPACE}/podgroups"
        await self.admin.call("DELETE", path)

        async def is_empty() -> bool:
            return not await self.records() and not await self.documents()

        await self.until("nothing is allocated", is_empty)

    async def problems(self) -> list[str]:
        return await problems_of(self.installed, self.installed.verifier(), namespace=NAMESPACE)

    async def until_agreed(self) -> None:
        async def is_settled() -> bool:
            return not await self.problems()

        await self.until("ledger and pods agree", is_settled)


def write_overlay(directory: Path, *more: str) -> Path:
    """Write the overlay of docs/volcano.md, with further components."""
    example = yaml.safe_load((COMPONENT / "example.yaml").read_text())
    example["data"] = {"schedulers": NAME, "binders": USER}
    names = directory / "other-schedulers.yaml"
    names.write_text(yaml.safe_dump(example))
    components = [COMPONENT.parent / name for name in ("advertise-amounts", "volcano", *more)]
    return overlay(directory / "mine", OVERLAYS / "dev", [COMPONENT, *components], files=[names])


async def add_paper_nodes(site: Installed, agents: PaperAgents) -> None:
    """Nodes without kubelet and agent, with what both would write."""
    nodes = [PaperNode(name=name, devices=facts(name)) for name in PAPER]
    await add_nodes(site, nodes)
    for node in nodes:
        await agents.report(node)
    await describe_nodes(site, PAPER)


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    programs = volcano_or_skip()
    folder = tmp_path_factory.mktemp("v")  # sockets of a node: 107 bytes at most
    shortened = {"lease_s": str(LEASE_S), "fence_delay_s": "0.5"}
    scheduler = {**SPEC.settings["scheduler"], **shortened}
    agent = {**SPEC.settings["nodeagent"], "volcano_refresh_s": "2"}
    settings = {**SPEC.settings, "scheduler": scheduler, "nodeagent": agent}
    spec = msgspec.structs.replace(SPEC, settings=settings)
    mine = write_overlay(folder)
    async with (
        run_installed(folder / "site", spec, overlay=mine) as installed,
        anyio.create_task_group() as group,
    ):
        # No kubelet renews the leases of nodes on paper.
        await installed.processes["kube-controller-manager"].stop()
        agents = PaperAgents(installed.bus)
        await add_paper_nodes(installed, agents)
        group.start_soon(agents.live)
        volcano = Volcano(installed, programs)
        await volcano.start()
        yield Site(installed, volcano)
        await volcano.process.stop()
        group.cancel_scope.cancel()


@pytest.fixture(autouse=True)
async def cleared(site: Site) -> AsyncIterator[None]:
    yield
    await site.clear()


async def over_capacity_ever(site: Site) -> list[str]:
    """Devices that the ledger booked beyond their capacity at any of its records."""
    inventory = await inventory_of(site.installed)
    stream = site.installed.bus.jetstream()
    name = subjects.stream_of(subjects.ALLOC_BUCKET)
    every = subjects.kv_subject(subjects.ALLOC_BUCKET, ">")
    held: dict[tuple[str, str], AllocationRecord] = {}
    problems: list[str] = []
    sequence = 1
    while True:
        try:
            message = await stream.get_msg(name, seq=sequence, subject=every, next=True)
        except NotFoundError:
            return problems
        sequence = (message.seq or 0) + 1
        record = decode(message.data or b"", AllocationRecord, what="record")
        held[record.node, record.pod_uid] = record
        booked = [one.containers for one in held.values() if one.op != "release"]
        problems += [f"record {message.seq}: {text}" for text in over_capacity(booked, inventory)]


async def test_agents_describe_their_devices_to_volcano(site: Site) -> None:
    wanted = {
        NUMBER: str(CARDS * 10),
        MEMORY: str(CARDS * CARD_MIB),
        CORES: str(CARDS * 100),
    }
    for name in NODES:
        node: Obj = {}

        async def is_described(name: str = name) -> bool:
            nonlocal node
            node = await site.admin.get("nodes", name)
            shown = node["status"]["allocatable"]
            return form.is_ours(node["metadata"].get("annotations", {})) and all(
                shown.get(key) == text for key, text in wanted.items()
            )

        await site.until(f"{name} is described", is_described)
        notes = node["metadata"]["annotations"]
        entries = notes[form.REGISTER].rstrip(":").split(":")
        assert [entry.split(",")[1:] for entry in entries] == [
            ["10", str(CARD_MIB), "NVIDIA-NVIDIA A30", "true", "hami-core"]
        ] * CARDS


async def test_two_hundred_shares_on_twenty_nodes(
    site: Site, record_property: Callable[[str, object], None]
) -> None:
    await site.volcano.group("batch", members=1)
    names = [f"share-{number:03}" for number in range(SHARES)]

    async def create(name: str) -> None:
        await site.create(pod(name, share(SHARE_MIB), group="batch"))

    begun_s = anyio.current_time()
    await each(names, create)

    async def all_are_bound() -> bool:
        return len(await site.bound()) == SHARES

    await site.until("all shares are bound", all_are_bound, limit_s=LIMIT_S)
    record_property("bound_s", f"{anyio.current_time() - begun_s:.1f}")
    documents = await site.documents()
    records = await site.records()
    assert len({one["spec"]["nodeName"] for one in documents.values()}) > 10
    for one in documents.values():
        check_agreement(one, records[one["metadata"]["uid"]])
    on_agents = [n for n, one in documents.items() if one["spec"]["nodeName"] in NODES]
    await site.until_running(*on_agents)
    for name in on_agents:
        await site.until(f"{name} shows its limit", partial(shows, site, name, str(SHARE_MIB)))
    await site.until_agreed()
    assert await over_capacity_ever(site) == []


async def shows(site: Site, name: str, text: str) -> bool:
    return text in await site.installed.container_log(name, "c0")


def check_agreement(document: Obj, record: AllocationRecord) -> None:
    """Ledger, Volcano's annotation and the container's limits have the same devices."""
    notes = document["metadata"]["annotations"]
    assert document["spec"]["nodeName"] == record.node == notes[form.POD_NODE]
    for_volcano = [
        [tuple(part.split(",")) for part in entry.rstrip(":").split(":")]
        for entry in notes[form.POD_IDS].split(";")
    ]
    in_ledger = [
        [(s.uuid, "NVIDIA", str(s.memory_mib), str(s.core_pct)) for s in one.shares]
        for one in record.containers
    ]
    assert for_volcano == in_ledger
    for one in record.containers:
        given = limits.decode(notes[keys.limits(one.name)]).devices
        assert [(d.uuid, d.memory_mib, d.core_pct) for d in given] == [
            (s.uuid, s.memory_mib, s.core_pct) for s in one.shares
        ]


WANTED: Final[Mapping[str, tuple[Resources, ...]]] = {
    "number": ({NUMBER: 1},),
    "memory": ({NUMBER: 2, MEMORY: 3000},),
    "cores": ({NUMBER: 1, MEMORY: 3000, CORES: 50},),
    "percentage": ({NUMBER: 1, PERCENT: 25},),
    "two-containers": ({NUMBER: 1, MEMORY: 2000}, {NUMBER: 1, MEMORY: 3000, CORES: 20}),
    "first-without": ({"cpu": "100m"}, {NUMBER: 1, MEMORY: 2000}),
}
"""Limits by container, as manifests of Volcano's device plugin have them."""
GIVEN: Final[Mapping[str, list[tuple[str, int, int]]]] = {
    "number": [("c0", CARD_MIB, 100)],
    "memory": [("c0", 3000, 0), ("c0", 3000, 0)],
    "cores": [("c0", 3000, 50)],
    "percentage": [("c0", CARD_MIB // 4, 0)],
    "two-containers": [("c0", 2000, 0), ("c1", 3000, 20)],
    "first-without": [("c1", 2000, 0)],
}


@pytest.mark.parametrize("names", [("number", "memory", "cores"), tuple(GIVEN)[3:]])
async def test_manifests_of_volcanos_device_plugin_are_served_unchanged(
    site: Site, names: Sequence[str]
) -> None:
    """On nodes that run containers; limits file and request are the same."""
    await site.volcano.group("manifests", members=1)
    for number, name in enumerate(names):
        node = NODES[number == 0]
        await site.create(pod(name, *WANTED[name], group="manifests", node=node))
    await site.until_running(*names)
    records = await site.records()
    for name, one in (await site.documents()).items():
        assert set(one["spec"]["containers"][-1]["resources"]["limits"]) >= set(WANTED[name][-1])
        record = records[one["metadata"]["uid"]]
        check_agreement(one, record)
        given = [(c.name, s.memory_mib, s.core_pct) for c in record.containers for s in c.shares]
        assert given == GIVEN[name]
    await site.until_agreed()


async def test_two_schedulers_race_for_the_last_share(site: Site) -> None:
    """One pod is bound, the other waits and does not fail; it follows when the first one ends."""
    await site.volcano.group("race", members=1)
    node = NODES[0]
    await site.create(pod("first", share(20_000), group="race", node=node))
    await site.until_running("first")
    for turn in range(4):
        theirs, ours = f"theirs-{turn}", f"ours-{turn}"
        wanted = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 20_000, "nvidia.com/gpucores": 10}
        documents = [
            pod(theirs, share(20_000), group="race", node=node),
            pod(ours, wanted, scheduler="hami-scheduler", node=node),
        ]
        async with anyio.create_task_group() as group:
            for document in documents if turn % 2 else reversed(documents):
                group.start_soon(site.create, document)

        async def one_is_bound(*both: str) -> bool:
            return len((await site.bound()).keys() & set(both)) == 1

        await site.until("one of them is bound", partial(one_is_bound, theirs, ours))
        await site.volcano.sessions(3)
        assert await one_is_bound(theirs, ours)
        winner = theirs if theirs in await site.bound() else ours
        loser = ours if winner == theirs else theirs
        assert (await site.documents())[loser]["status"]["phase"] == "Pending"
        await site.until_running(winner)
        await site.delete(winner)
        await site.until_running(loser)
        await site.until_agreed()
        await site.delete(loser)


async def test_volcano_counts_pods_of_our_scheduler(site: Site) -> None:
    """Its own plugin refuses what the sum of the node would allow."""
    node = NODES[0]
    wanted = {"nvidia.com/gpu": 2, "nvidia.com/gpumem": 14_000, "nvidia.com/gpucores": 10}
    await site.create(pod("ours", wanted, scheduler="hami-scheduler", node=node))
    await site.until_running("ours")
    await site.volcano.sessions(2)
    await site.volcano.group("large", members=1)
    await site.create(pod("theirs", share(12_000), group="large", node=node))
    await site.until_told("theirs", "hami-vgpuDeviceSharing error")
    assert "theirs" not in await site.bound()
    assert "denied the request" not in await site.message("theirs")
    await site.delete("ours")
    await site.until_running("theirs")
    await site.until_agreed()


async def test_pod_that_fits_by_sums_only_is_refused_with_the_reason(site: Site) -> None:
    """Under HAMi's names Volcano compares sums."""
    node = NODES[0]
    await site.volcano.group("sums", members=1)
    await site.create(pod("both", {**share(14_000), NUMBER: 2}, group="sums", node=node))
    await site.until_running("both")
    wanted = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 15_000, "nvidia.com/gpucores": 10}
    made = await site.create(pod("large", wanted, group="sums", node=node))
    await site.until_told("large", "CardInsufficientMemory: 15000 MiB wanted")
    await site.volcano.sessions(3)
    assert "large" not in await site.bound()
    assert made["metadata"]["uid"] not in await site.records()
    await site.until_agreed()


async def test_group_is_placed_when_there_is_room_for_all(site: Site) -> None:
    await site.volcano.group("one", members=1)
    await site.create(pod("one", share(20_000), group="one", node=NODES[0]))
    await site.until_running("one")
    await site.volcano.group("gang", members=4)
    names = [f"gang-{number}" for number in range(4)]
    for number, name in enumerate(names):
        await site.create(pod(name, share(20_000), group="gang", node=NODES[number % 2]))
    await site.volcano.sessions(6)
    assert not set(names) & (await site.bound()).keys()
    assert len(await site.records()) == 1
    await site.delete("one")
    await site.until_running(*names)
    await site.until_agreed()


async def test_killed_between_session_and_bind_leaves_nothing_beyond_the_lease(
    site: Site,
) -> None:
    """Bindings wait for the stopped scheduler when Volcano dies."""
    await site.volcano.group("killed", members=1)
    names = [f"killed-{number}" for number in range(6)]
    scheduler = site.installed.processes["scheduler"]
    scheduler.freeze()
    try:
        for name in names:
            await site.admin.create(
                "pods", pod(name, share(4_000), group="killed", node=NODES[0]), NAMESPACE
            )

        async def are_chosen() -> bool:
            found = await site.documents()
            notes = [one["metadata"]["annotations"] for one in found.values()]
            return all("volcano.sh/vgpu-time" in one for one in notes)

        await site.until("Volcano has chosen devices", are_chosen)
        await site.volcano.process.kill()
    finally:
        scheduler.signal(signal.SIGCONT)

    async def is_returned() -> bool:
        uids = {(await site.documents())[n]["metadata"]["uid"] for n in await site.bound()}
        return (await site.records()).keys() == uids

    await site.until("only bound pods hold devices", is_returned)
    site.volcano.process.start()
    await site.until_running(*names)
    records = await site.records()
    for one in (await site.documents()).values():
        check_agreement(one, records[one["metadata"]["uid"]])
    await site.until_agreed()


async def test_killed_scheduler_of_ours_neither_loses_nor_doubles_a_share(site: Site) -> None:
    """Volcano retries the Bindings that failed meanwhile."""
    await site.volcano.group("burst", members=1)
    names = [f"burst-{number:02}" for number in range(60)]

    async def create(name: str) -> None:
        await site.create(pod(name, share(6_000), group="burst"))

    process = site.installed.processes["scheduler"]

    async def some_are_bound() -> bool:
        return len(await site.bound()) >= 5

    async with anyio.create_task_group() as group:
        group.start_soon(each, names, create)
        await site.until("some shares are bound", some_are_bound)
        await process.kill()
    process.start()
    await site.installed.ready("scheduler")
    await site.until_bound(*names)
    await site.until_agreed()
    records = await site.records()
    for one in (await site.documents()).values():
        check_agreement(one, records[one["metadata"]["uid"]])
    assert await over_capacity_ever(site) == []
