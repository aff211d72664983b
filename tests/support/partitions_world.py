# SPDX-License-Identifier: Apache-2.0
"""One node whose devices are divided: hardware and journal that outlive the agent, and a ledger.

Devices: ``nvidia-0`` and ``nvidia-1`` with a grid of seven places, ``ascend-0`` with sizes that
have no place, ``cambricon-0`` without a table of sizes. ``Watched`` records the instances that the
reconciler removed. Memory in MiB.
"""

import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
from msgspec.structs import replace

from hami_common.errors import Unavailable
from hami_common.events.allocation import AllocationRecord
from hami_common.events.codec import decode, encode
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device, DeviceFacts, Profile
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.pods.signing import SignedPlacement
from hami_common.runtime.tasks import background
from hami_nodeagent.core.claims import Entry, ListedPod
from hami_nodeagent.core.grants import Grant
from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.core.partitions import JournalFile, owner_of
from hami_nodeagent.core.podfacts import PodFacts
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.simulated.partitioner import (
    Act,
    Part,
    SimulatedPartitioner,
    nothing_happens,
)
from hami_nodeagent.settings import PartitionSettings
from hami_nodeagent.shell.checkpoint import Checkpoint
from hami_nodeagent.shell.partition_news import PartitionTeller
from hami_nodeagent.shell.partitions import Partitions
from hami_nodeagent.shell.site import Site
from tests.unit.nodeagent.core.builders import NODE
from tests.unit.nodeagent.shell.support import make_site

GRID = (
    Profile(name="1g", memory_mib=1000, core_pct=14, size=1, starts=(0, 1, 2, 3, 4, 5, 6)),
    Profile(name="2g", memory_mib=2000, core_pct=28, size=2, starts=(0, 2, 4)),
    Profile(name="3g", memory_mib=4000, core_pct=42, size=4, starts=(0, 4)),
)
"""``3g`` at 4 reaches one place past the seven slices, as on the real grid of eight."""
TEMPLATES = (
    Profile(name="vir05", memory_mib=2000, core_pct=25, resources={"aicore": 5}),
    Profile(name="vir10", memory_mib=4000, core_pct=50, resources={"aicore": 10}),
    Profile(memory_mib=8000, core_pct=100, resources={"aicore": 20}),
)
TABLES: dict[str, dict[str, Any]] = {
    "nvidia": {"mode": "mig", "partitions": GRID},
    "ascend": {"mode": "vnpu", "partitions": TEMPLATES, "resources": {"aicore": 20}},
    "cambricon": {"mode": "smlu"},
}
DEVICES = ("nvidia-0", "nvidia-1", "ascend-0", "cambricon-0")


def facts(uuid: str) -> DeviceFacts:
    """One device as its driver reports it."""
    vendor, _, index = uuid.partition("-")
    return DeviceFacts(
        uuid=uuid, vendor=vendor, index=int(index), type="TEST", memory_mib=8000, **TABLES[vendor]
    )


def facts_of(vendor: str) -> dict[str, DeviceFacts]:
    """All devices of a vendor."""
    return {uuid: facts(uuid) for uuid in DEVICES if uuid.startswith(vendor)}


def device_of(told: DeviceFacts) -> Device:
    """One device as the registry publishes it, of which all memory may be handed out."""
    given = msgspec.to_builtins(told)
    return msgspec.convert({**given, "capacity_mib": told.memory_mib}, Device)


def device(uuid: str) -> Device:
    """One of ``DEVICES`` as the registry publishes it."""
    return device_of(facts(uuid))


def share(uuid: str, profile: str = "", start: int | None = None, **more: Any) -> Share:
    """A share that a partition carries."""
    table = TABLES[uuid.partition("-")[0]].get("partitions", ())
    size = next((one for one in table if one.name == profile), None)
    given = {
        "memory_mib": size.memory_mib if size else 1000,
        "core_pct": size.core_pct if size else 10,
        **more,
    }
    return Share(vendor=uuid.partition("-")[0], uuid=uuid, profile=profile, start=start, **given)


class MemoryJournal(Checkpoint):
    """The journal's storage, as bytes, so that reads decode the bytes written."""

    def __init__(self, directory: Path, hook: Callable[[str], Act]) -> None:
        super().__init__(directory)
        self.data: bytes | None = None
        self._hook = hook

    def load_partitions(self) -> JournalFile | None:
        return None if self.data is None else decode(self.data, JournalFile, what="journal")

    def save_partitions(self, file: JournalFile) -> None:
        if self._hook("journal.begin"):
            raise OSError(28, "No space left on device")
        self.data = encode(file)
        if self._hook("journal.stored"):
            raise OSError(5, "Input/output error")


def let_be(instance: Instance) -> None:
    """Do nothing on a removal."""
    del instance


class Watched:
    """A partitioner that records removals."""

    def __init__(self, inner: SimulatedPartitioner) -> None:
        self.inner = inner
        self.removed: list[Instance] = []
        self.on_destroy = let_be

    @property
    def vendor(self) -> str:
        return self.inner.vendor

    async def instances(self) -> tuple[Instance, ...]:
        await anyio.lowlevel.checkpoint()
        return await self.inner.instances()

    async def create(self, wanted: Wanted) -> Instance:
        await anyio.lowlevel.checkpoint()
        return await self.inner.create(wanted)

    async def destroy(self, instance: Instance) -> None:
        await anyio.lowlevel.checkpoint()
        self.on_destroy(instance)
        self.removed.append(instance)
        await self.inner.destroy(instance)


class Kubelet:
    """Pods that kubelet lists."""

    def __init__(self) -> None:
        self.pods: list[ListedPod] | None = []

    async def list(self, *, timeout_s: float | None = None) -> tuple[ListedPod, ...]:
        if self.pods is None:
            raise Unavailable(peer="kubelet", detail="the test says so")
        return tuple(self.pods)


class World:
    """Hardware, journal, ledger and pods; ``agent`` runs a reconciler on them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hook: Callable[[str], Act] = nothing_happens
        self.journal = MemoryJournal(directory, self._ask)
        self.hardware = {
            vendor: Watched(
                SimulatedPartitioner(
                    vendor=vendor,
                    devices=partial(facts_of, vendor),
                    hook=self._ask,
                )
            )
            for vendor in TABLES
        }
        self.devices = tuple(device(uuid) for uuid in DEVICES)
        self.partitioners: Sequence[Partitioner] = tuple(self.hardware.values())
        self.checkpoint: Checkpoint = self.journal
        self.kubelet = Kubelet()
        self.entries: dict[str, Entry] = {}
        self.pods: dict[str, PodFacts] = {}
        self.grants: list[Grant] = []
        self.settings: dict[str, Any] = {}
        self._sequence = 0
        self.site: Site
        self.partitions: Partitions

    def _ask(self, point: str) -> Act:
        return self.hook(point)

    # -- actions of other actors

    def place(
        self, uid: str, *shares: Share, bound: bool = True, granted: bool = False, **record: Any
    ) -> Entry:
        """Add a reservation, and its pod if it is bound."""
        self._sequence += 1
        containers = (ContainerShares(name="main", kind="app", shares=shares),)
        placed = AllocationRecord(
            **{
                "op": "reserve",
                "allocation_id": f"allocation-{uid}-{self._sequence}",
                "node": NODE,
                "pod_uid": uid,
                "namespace": "default",
                "pod": uid,
                "containers": containers,
                **record,
            }
        )
        entry = self.entries[uid] = Entry(record=placed, sequence=self._sequence)
        if bound:
            self.pods[uid] = PodFacts(
                uid=uid,
                namespace="default",
                name=uid,
                signed=SignedPlacement(
                    pod_uid=uid,
                    namespace="default",
                    pod=uid,
                    allocation_id=placed.allocation_id,
                    ledger_seq=self._sequence,
                    placement=Placement(node=NODE, containers=containers),
                ),
            )
        if granted:
            self.grant(uid)
        self.tell()
        return entry

    def grant(self, uid: str) -> Grant:
        """Grant the pod's devices to kubelet, which lists it."""
        record = self.entries[uid].record
        (container,) = record.containers
        vendor = container.shares[0].vendor
        grant = Grant(
            pod_uid=uid,
            namespace="default",
            pod=record.pod,
            container="main",
            kind="app",
            vendor=vendor,
            resource=f"{vendor}/count",
            allocation_id=record.allocation_id,
            ids=(f"id-{uid}",),
            uuids=tuple(one.uuid for one in container.shares),
            time_s=float(self._sequence),
        )
        self.grants.append(grant)
        assert self.kubelet.pods is not None
        self.kubelet.pods.append(
            ListedPod(
                namespace="default",
                name=record.pod,
                ids_by_container={"main": {grant.resource: frozenset(grant.ids)}},
            )
        )
        return grant

    def release(self, uid: str) -> None:
        """Remove the pod from the API server, and release its share."""
        self._sequence += 1
        known = self.entries[uid].record
        self.entries[uid] = Entry(
            record=replace(known, op="release", containers=()), sequence=self._sequence
        )
        if uid in self.pods:
            self.pods[uid] = replace(self.pods[uid], gone=True)
        self.tell()

    def leave(self, uid: str) -> None:
        """Remove the pod from kubelet."""
        assert self.kubelet.pods is not None
        self.kubelet.pods = [one for one in self.kubelet.pods if one.name != uid]
        self.tell()

    def plant(self, uuid: str, profile: str = "", start: int | None = None, **more: Any) -> Part:
        """Create a partition by hand."""
        inner = self.hardware[uuid.partition("-")[0]].inner
        known = inner.stored()
        used = {part.number for part in known.parts if part.uuid == uuid}
        part = Part(
            uuid=uuid,
            number=next(n for n in range(len(used) + 1) if n not in used),
            profile=profile,
            start=start,
            **more,
        )
        inner.store(replace(known, parts=(*known.parts, part)))
        return part

    def change(self, part: Part, **changes: Any) -> None:
        """Change a partition, or (``gone=True``) remove it, by hand."""
        inner = self.hardware[part.uuid.partition("-")[0]].inner
        known = inner.stored()
        rest = tuple(one for one in known.parts if one != part)
        if not changes.pop("gone", False):
            rest = (*rest, replace(part, **changes))
        inner.store(replace(known, parts=rest))

    def reboot(self) -> None:
        """Remove all partitions, as a reboot does."""
        for one in self.hardware.values():
            one.inner.store(replace(one.inner.stored(), parts=()))

    # -- the agent

    def tell(self) -> None:
        """Pass the current state to the running agent."""
        site = getattr(self, "site", None)
        if site is None:
            return
        picture = site.picture
        if picture.ledger_known:
            picture.entries_by_uid.clear()
            picture.entries_by_uid.update(self.entries)
        if picture.pods_known:
            for pod in self.pods.values():
                picture.pods.put(replace(pod, gone=False), revision=0, now_s=0)
                if pod.gone:
                    picture.pods.end(pod.uid, now_s=0)
        for grant in self.grants:
            picture.grants.add(grant)
        picture.note_change()

    @asynccontextmanager
    async def agent(
        self, *, knows_ledger: bool = True, knows_pods: bool = True
    ) -> AsyncIterator[Partitions]:
        """A reconciler that starts on the current state."""
        made = make_site(
            self.directory,
            partitions=PartitionSettings(
                **{"retry_s": 0.001, "retry_most_s": 0.004, "tries": 6, **self.settings}
            ),
        )
        site = self.site = dataclasses.replace(made, checkpoint=self.checkpoint)
        for vendor in dict.fromkeys(one.vendor for one in self.devices):
            site.picture.set_canonical(
                NodeDevices(
                    node=NODE,
                    vendor=vendor,
                    boot_id="",
                    seq=1,
                    time_s=0,
                    config_generation=1,
                    devices=tuple(one for one in self.devices if one.vendor == vendor),
                )
            )
        site.picture.ledger_known, site.picture.pods_known = knows_ledger, knows_pods
        self.partitions = Partitions(
            site=site,
            partitioners=self.partitioners,
            kubelet=self.kubelet,
            teller=PartitionTeller(site=site, publisher=lambda: None),
        )
        self.tell()
        async with background() as group:
            group.start_soon(self.partitions.run)
            yield self.partitions

    async def settle(self, condition: Callable[[], bool], *, within_s: float = 10.0) -> None:
        """Wait for a condition of the agent."""
        with anyio.fail_after(within_s):
            while not condition():
                await anyio.sleep(0.001)

    async def live(self, uids: Iterable[str]) -> None:
        """Wait until the partitions of all these pods are there, as read back."""
        await self.settle(
            lambda: all(self.site.picture.partitions.are_all_there(self.entries[u]) for u in uids)
        )

    # -- actual state

    def parts(self) -> list[Part]:
        """All partitions of the hardware."""
        return [part for one in self.hardware.values() for part in one.inner.stored().parts]

    def noted(self) -> set[tuple[str, str]]:
        """(device, instance) by the journal, all of them created."""
        file = self.journal.load_partitions()
        assert file is not None
        assert {note.phase for note in file.notes} <= {"made"}, file.notes
        return {(note.wanted.uuid, note.instance_id) for note in file.notes}

    def check(self, *, foreign: Iterable[Part] = ()) -> None:
        """Verify that hardware equals journal equals ledger."""
        hardware = {(part.uuid, str(part.number)) for part in self.parts()}
        hands = {(part.uuid, str(part.number)) for part in foreign}
        assert all(part.whole for part in self.parts())
        assert hardware == self.noted() | hands
        file = self.journal.load_partitions()
        assert file is not None
        owned = {
            owner_of(entry, "main", number): one
            for entry in self.entries.values()
            if entry.record.op != "release"
            for container in entry.record.containers
            for number, one in enumerate(container.shares)
            if one.profile or one.vendor == "cambricon"
        }
        assert {note.owner for note in file.notes} == set(owned)
        by_id = {(part.uuid, str(part.number)): part for part in self.parts()}
        for note in file.notes:
            part, wanted = by_id[note.wanted.uuid, note.instance_id], owned[note.owner]
            assert (part.uuid, part.profile, part.start, part.memory_mib) == (
                wanted.uuid,
                wanted.profile,
                wanted.start,
                wanted.memory_mib,
            )
