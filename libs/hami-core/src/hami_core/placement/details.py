# SPDX-License-Identifier: Apache-2.0
"""Details of a decision, device by device, for its record (design D57).

Of the refused nodes that are closest to taking the pod: what it requests of each device, what is
free there, who holds the rest, and which constraint stops it. ``Refusals.closest`` defines the
order of nodes. ``look`` copies the columns of these nodes and refers to the ledger's records at the
time of the decision, which takes a fraction of filter's time; ``Details.nodes`` evaluates and
formats them later, when the record is sent. Memory in MiB, compute in percent of one device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from hami_common.events.allocation import AllocationRecord, is_of_claim, is_of_owner
from hami_common.events.decision import (
    DETAIL_BYTES_MOST,
    DEVICES_DETAILED,
    HOLDERS_LISTED,
    Amounts,
    DeviceHolder,
    RefusedDevice,
    RefusedNode,
)
from hami_common.model.placement import Booked, booked_by_device
from hami_common.model.request import PodRequest
from hami_core.placement.fit import Plan, Scene, Stage, View, reached, wanted_core, wanted_mib
from hami_core.placement.reasons import (
    CODE_BY_STAGE,
    ClosestNode,
    is_placed,
    scene_before,
)
from hami_core.table.block import Columns
from hami_core.table.table import DeviceTable

RecordsOf = Callable[[str], Sequence[AllocationRecord]]
"""Returns the live records of the ledger for one node."""
_encoder: Final = msgspec.json.Encoder()


class _Device(NamedTuple):
    """One device at the time of the decision."""

    uuid: str
    stage: int
    wanted: tuple[int, int]
    """Memory and compute."""
    free: tuple[int, int, int]
    """Memory, compute and slots."""
    foreign_mib: int
    burst_mib: int


class _Node(NamedTuple):
    """One node at the time of the decision."""

    closest: ClosestNode
    records: Sequence[AllocationRecord]
    devices: Sequence[_Device]


class _Copied(NamedTuple):
    """Copied columns of nodes on which the same step failed."""

    view: View
    step: int
    is_placed: bool
    """The steps before it could be placed."""

    def devices(self, plan: Plan) -> Iterator[tuple[str, list[_Device]]]:
        """Yield each node with its devices, evaluated for the step."""
        scene = Scene(self.view, plan)
        if self.is_placed:
            scene = scene_before(self.view, plan, self.step)
        yield from zip(self.view.names(), _devices(scene, self.step), strict=True)


class Details:
    """State of the closest nodes at the time of a decision."""

    def __init__(
        self,
        request: PodRequest,
        plan: Plan,
        closest: Sequence[ClosestNode],
        records: Mapping[str, Sequence[AllocationRecord]],
        copied: Sequence[_Copied],
    ) -> None:
        """``closest``: the closest node first; ``records`` by node."""
        self._request = request
        self._plan = plan
        self._closest = closest
        self._records = records
        self._copied = copied
        # The table drops matrices of links that no node has any more.
        self._devices = self._evaluated() if plan.topology else None

    def nodes(self) -> tuple[RefusedNode, ...]:
        """Format the nodes, the closest first, in at most ``DETAIL_BYTES_MOST`` bytes of JSON.

        Beyond that, devices of the last node and then the farthest nodes are left out.
        """
        kept: list[RefusedNode] = []
        left = DETAIL_BYTES_MOST - len("[]")
        for node in map(self._node, self._nodes()):
            cut, size = _cut(node, left)
            if size > left:
                break
            kept.append(cut)
            left -= size
            if cut is not node:
                break
        return tuple(kept)

    def every_node(self) -> Iterator[RefusedNode]:
        """Format all nodes, the closest first, without a bound on the size of all together."""
        yield from map(self._node, self._nodes())

    def _evaluated(self) -> dict[str, list[_Device]]:
        """Return the devices by node."""
        return {name: some for one in self._copied for name, some in one.devices(self._plan)}

    def _nodes(self) -> Iterator[_Node]:
        devices = self._evaluated() if self._devices is None else self._devices
        for one in self._closest:
            yield _Node(one, self._records.get(one.node, ()), devices.get(one.node, ()))

    def _node(self, node: _Node) -> RefusedNode:
        step = self._plan.steps[node.closest.step]
        container = self._request.containers[step.container]
        in_order = sorted(node.devices, key=lambda device: -device.stage)
        shown = in_order[:DEVICES_DETAILED]
        holders = _holders(node.records, {device.uuid for device in shown})
        return RefusedNode(
            node=node.closest.node,
            code=node.closest.code,
            container=container.name,
            vendor=step.request.vendor,
            count=sum(
                asked.count for asked in container.requests if asked.vendor == step.request.vendor
            ),
            devices=tuple(_detail(device, holders.get(device.uuid, ())) for device in shown),
            devices_left_out=len(in_order) - len(shown),
        )


def look(
    table: DeviceTable,
    request: PodRequest,
    plan: Plan,
    closest: Sequence[ClosestNode],
    records_of: RecordsOf,
) -> Details:
    """Copy the present state of the ``closest`` refused nodes."""
    copied = [
        _Copied(View(table, table.blocks[block].copy_of(columns)), step, is_placed)
        for (block, step, is_placed), columns in _alike(table, closest).items()
    ]
    records = {one.node: records_of(one.node) for one in closest}
    return Details(request, plan, closest, records, copied)


def _alike(
    table: DeviceTable, closest: Iterable[ClosestNode]
) -> dict[tuple[int, int, bool], Columns]:
    """Return the columns of registered nodes by block and by the step that failed."""
    found: dict[tuple[int, int, bool], list[int]] = {}
    for node in closest:
        place = table.place(node.node)
        if place is not None:
            key = (table.blocks.index(place.block), node.step, is_placed(node.reason))
            found.setdefault(key, []).append(place.column)
    return {key: np.array(columns, np.intp) for key, columns in found.items()}


def _devices(scene: Scene, number: int) -> Iterator[list[_Device]]:
    """Yield the devices of each node of the scene, evaluated for one step."""
    view, plan, running = scene
    block, step = view.block, plan.steps[number]
    shape = (block.width, view.count)
    mib = np.broadcast_to(wanted_mib(view, step.request), shape)
    core = np.broadcast_to(wanted_core(view, step.request), shape)
    free_mib = view.ints(block.free_mib)
    free_core = view.shorts(block.free_core)
    free_slots = view.shorts(block.slots) - view.shorts(block.used_slots)
    if running is not None:
        free_mib = free_mib - running.mib
        free_core = free_core - running.core
        free_slots = free_slots - running.slots
    stages = reached(scene, step)
    burst_mib = view.ints(block.burst_mib)
    foreign_mib = view.ints(block.foreign_mib) - burst_mib
    each = (stages, mib, core, foreign_mib, burst_mib, free_mib, free_core, free_slots)
    lines = [line.T.tolist() for line in each]
    for place, of_node in enumerate(zip(*lines, strict=True)):
        uuids = block.uuids[view.column(place)]
        yield [
            _Device(uuid, stage, (wants_mib, wants_core), tuple(free), foreign, burst)
            for uuid, (stage, wants_mib, wants_core, foreign, burst, *free) in zip(
                uuids, zip(*of_node, strict=True), strict=False
            )
            if stage >= 0
        ]


def _detail(device: _Device, holders: Sequence[DeviceHolder]) -> RefusedDevice:
    memory_mib, core_pct = device.wanted
    free_mib, free_core, free_slots = device.free
    return RefusedDevice(
        uuid=device.uuid,
        code="" if device.stage == Stage.FITS else CODE_BY_STAGE[Stage(device.stage)],
        wanted=Amounts(memory_mib=memory_mib, core_pct=core_pct, slots=1),
        free=Amounts(memory_mib=free_mib, core_pct=free_core, slots=free_slots),
        holders=tuple(holders[:HOLDERS_LISTED]),
        holders_left_out=max(0, len(holders) - HOLDERS_LISTED),
        foreign_mib=device.foreign_mib,
        burst_mib=device.burst_mib,
    )


def _holders(records: Iterable[AllocationRecord], uuids: set[str]) -> dict[str, list[DeviceHolder]]:
    """Return the holders of each device: most memory first, then most compute, then by name."""
    found: dict[str, list[DeviceHolder]] = {}
    for record in records:
        for uuid, booked in booked_by_device(record.containers).items():
            if uuid in uuids:
                found.setdefault(uuid, []).append(_holder(record, booked))
    for holders in found.values():
        holders.sort(key=lambda one: (-one.memory_mib, -one.core_pct, one.namespace, one.name))
    return found


def _holder(record: AllocationRecord, booked: Booked) -> DeviceHolder:
    return DeviceHolder(
        kind=holder_kind(record),
        namespace=record.namespace,
        name=record.pod,
        memory_mib=booked.memory_mib,
        core_pct=booked.core_pct,
        slots=booked.slots,
        exclusive=booked.exclusive,
    )


def holder_kind(record: AllocationRecord) -> str:
    """Return the kind of object that holds the record's shares, see ``DeviceHolder.kind``."""
    if is_of_owner(record):
        return record.held_for.partition(" ")[0]
    return "claim" if is_of_claim(record) else "pod"


def _cut(node: RefusedNode, left: int) -> tuple[RefusedNode, int]:
    """Leave out devices until the node, with a comma, fits ``left`` bytes; return it and its size.

    A node with devices keeps at least one.
    """
    size = len(_encoder.encode(node)) + 1
    while size > left and len(node.devices) > 1:
        kept = len(node.devices) // 2
        more = len(node.devices) - kept
        node = replace(
            node, devices=node.devices[:kept], devices_left_out=node.devices_left_out + more
        )
        size = len(_encoder.encode(node)) + 1
    return node, size
