# SPDX-License-Identifier: Apache-2.0
"""Masks of the devices that may serve a step: one per constraint, over all nodes of a block.

One step is one container's request to one vendor: ``count`` different devices out of those that
pass every constraint, in addition to the devices of the pod's own running containers. A request for
several hardware partitions is as many steps of one, because they may be parts of one device; with
``numa_bind`` it is one step, on different devices.

Constraints in order: see ``Stage``.

- A device that is overcommitted by recall serves no share above its own memory.
- An exclusive share requires an idle device that no process outside the ledger uses, and blocks
  the device for all other pods.
- Memory that such processes use is not free; a device that lacks memory for this reason alone has a
  stage of its own.
- A pod with ``mutex`` takes idle devices of physical cards that no other pod uses.
- A share without compute books none, and is refused where other pods use all compute.
- With ``numa_bind`` the devices of one step come from one NUMA node; devices of unknown affinity
  count as one node.
- On a device with a table of partitions a step takes the size that the table gives it, and needs
  capacity for one; with a ``shape`` its devices are one of the shape's sets.

Percentages are of physical memory. Memory in MiB, compute in percent of one device.

Feasibility is the conjunction of the masks, a reason is the first mask that is false: filter, bind
and explain use the same masks and cannot disagree (design D14).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from hami_common.model.placement import JOINS
from hami_common.model.request import (
    MPS_MODE,
    ContainerKind,
    DeviceRequest,
    DeviceSelector,
    PlacementPolicy,
    PodRequest,
    serves_mode,
    wants_parts,
)
from hami_common.vendors.partitions import AMOUNTS_LIMIT, NO_START, Division, Grant
from hami_common.vendors.shapes import INDEX_LIMIT, LegalSet, legal_sets
from hami_core.table.block import DEVICES, Amounts, Block, Bools, Columns, Floats, Ints, Shorts
from hami_core.table.table import DeviceTable

Counts = NDArray[np.signedinteger]
Stages = NDArray[np.int8]
"""Numbers of ``Stage``; -1 for devices that are not evaluated."""

T = TypeVar("T", bound=np.generic)

NOBODY: Final = -2
"""Number of a vendor that no device ever had."""
NO_CONSTRAINT: Final = DeviceSelector()
_FULL_PCT: Final = 100
_PCT_FRACTION: Final = 1 << 20
"""More than the compute of all devices that one pod can get, in percent."""


class Stage(IntEnum):
    """Constraints on one device, in the order of evaluation.

    Constraints on the device itself come first: to a pod that names one device, the state of the
    others is no reason.
    """

    TYPE = 0
    MODE = 1
    SIZE = 2
    LARGEST = 3
    OVERCOMMIT = 4
    UUID = 5
    AGENT = 6
    WITHHELD = 7
    HEALTH = 8
    CORDON = 9
    FOREIGN = 10
    SLOT = 11
    HELD = 12
    KIND = 13
    MEMORY = 14
    FOREIGN_MIB = 15
    BURST_MIB = 16
    CORE = 17
    UNITS = 18
    PARTITION = 19
    IDLE = 20
    NUMA = 21
    SHAPE = 22
    FITS = 23


class Step(Struct, frozen=True, kw_only=True):
    """A container's request to one vendor."""

    container: int
    """Position among the containers of the pod that request devices."""
    kind: ContainerKind
    request: DeviceRequest
    selector: DeviceSelector
    is_part: bool = False
    """One of several hardware partitions that the container requests; no larger share will do."""


class Plan(Struct, frozen=True, kw_only=True, cache_hash=True):
    """A pod's request without the names: pods of one template have equal plans."""

    steps: tuple[Step, ...]
    policy: PlacementPolicy

    @property
    def has_one_choice(self) -> bool:
        """True when its steps are all alike, which makes their order irrelevant."""
        return len({(step.container, step.request.vendor) for step in self.steps}) <= 1

    @property
    def mutex(self) -> bool:
        """True when the pod requires idle devices."""
        return "mutex" in self.policy.device

    @property
    def topology(self) -> bool:
        """True when the pod prefers the best-connected devices."""
        return "topology-aware" in self.policy.device


NO_PLAN: Final = Plan(steps=(), policy=PlacementPolicy())


def compile_request(request: PodRequest) -> Plan:
    """Compile the plan of a pod."""
    return Plan(
        steps=tuple(
            step
            for number, container in enumerate(request.containers)
            for wanted in container.requests
            for step in _each(
                Step(
                    container=number,
                    kind=container.kind,
                    request=wanted,
                    selector=request.selectors.get(wanted.vendor, NO_CONSTRAINT),
                )
            )
        ),
        policy=request.policy,
    )


def _each(step: Step) -> tuple[Step, ...]:
    """Return the step, or one step for each hardware partition that it requests."""
    request = step.request
    if request.count == 1 or request.shape or step.selector.numa_bind:
        return (step,)
    if not wants_parts(request, step.selector):
        return (step,)
    one = replace(step, request=replace(request, count=1), is_part=True)
    return (one,) * request.count


class View:
    """Some columns of a block, or all of them."""

    def __init__(self, table: DeviceTable, block: Block, columns: Columns | None = None) -> None:
        """Create a view of ``columns`` of ``block``, ``None`` for all."""
        self.table = table
        self.block = block
        self.columns = columns
        self.count = block.count if columns is None else len(columns)

    def part(self, places: Columns) -> "View":
        """Return a view of some of these columns."""
        return View(
            self.table, self.block, places if self.columns is None else self.columns[places]
        )

    def column(self, place: int) -> int:
        """Return the block's column at ``place`` of the view."""
        return place if self.columns is None else int(self.columns[place])

    def names(self) -> list[str]:
        """Return the node names of the columns."""
        names = self.block.names
        return names if self.columns is None else [names[column] for column in self.columns]

    def name(self, place: int) -> str:
        """Return the node name of the column at ``place``."""
        return self.block.names[self.column(place)]

    def bools(self, matrix: Bools) -> Bools:
        """Return the columns' part of a matrix."""
        if self.columns is None:
            return matrix[:, : self.count]
        return matrix.take(self.columns, axis=1)

    def ints(self, matrix: Ints) -> Ints:
        """Return the columns' part of a matrix."""
        if self.columns is None:
            return matrix[:, : self.count]
        return matrix.take(self.columns, axis=1)

    def shorts(self, matrix: Shorts) -> Shorts:
        """Return the columns' part of a matrix."""
        if self.columns is None:
            return matrix[:, : self.count]
        return matrix.take(self.columns, axis=1)

    def floats(self, matrix: Floats) -> Floats:
        """Return the columns' part of a matrix."""
        if self.columns is None:
            return matrix[:, : self.count]
        return matrix.take(self.columns, axis=1)

    def cells(self, matrix: NDArray[T]) -> NDArray[T]:
        """Return the columns' part of a matrix."""
        if self.columns is None:
            return matrix[:, : self.count]
        return matrix.take(self.columns, axis=1)

    def ids(self, line: Columns) -> Columns:
        """Return the columns' part of a line."""
        return line[: self.count] if self.columns is None else line[self.columns]

    def line(self, line: NDArray[T]) -> NDArray[T]:
        """Return the columns' part of a line."""
        return line[: self.count] if self.columns is None else line.take(self.columns)


class Held:
    """Resources used by the running containers of the pod that is being placed."""

    def __init__(self, width: int, count: int) -> None:
        """Start without any resources."""
        self.mib: Ints = np.zeros((width, count), np.int64)
        self.core: Shorts = np.zeros((width, count), np.int32)
        self.slots: Shorts = np.zeros((width, count), np.int32)
        self.exclusive: Bools = np.zeros((width, count), np.bool_)
        self.fullness: Floats = np.zeros((width, count))
        """Used positions of the devices' grids, as bits."""
        self.taken: Shorts = np.zeros((width, count), np.int32)
        """Positions of the devices' grids, as bits."""
        self.spent: Amounts = np.zeros((AMOUNTS_LIMIT, width, count), np.int16)
        self.kind: Shorts = np.zeros((width, count), np.int32)

    def part(self, places: Columns) -> "Held":
        """Return the same on some of the nodes."""
        other = Held(0, 0)
        other.mib, other.core = self.mib[:, places], self.core[:, places]
        other.slots, other.exclusive = self.slots[:, places], self.exclusive[:, places]
        other.fullness = self.fullness[:, places]
        other.taken, other.kind = self.taken[:, places], self.kind[:, places]
        other.spent = self.spent[:, :, places]
        return other

    def add(self, view: View, chosen: Bools, step: Step, fuller: Floats) -> None:
        """Add one share on each chosen device, which raises its fullness by ``fuller``."""
        at = np.nonzero(chosen)
        mib, core = wanted_mib(view, step.request), wanted_core(view, step.request)
        self.mib[at] += mib if isinstance(mib, int) else mib[at]
        self.slots[at] += 1
        self.fullness[at] += fuller[at]
        self.core[at] += core if isinstance(core, int) else core[at]
        if step.request.exclusive:
            self.exclusive[at] = True
        self.add_parts(view, chosen, step.request)

    def add_parts(self, view: View, chosen: Bools, request: DeviceRequest) -> None:
        """Add the partitions and kinds of the shares on the chosen devices."""
        if request.kind:
            self.kind[chosen] = view.table.kinds.number(request.kind)
        for one in granted(view, request):
            if one.grant is None:
                continue
            here = chosen & one.devices
            if one.grant.exclusive:
                self.exclusive[here] = True  # the whole device, though only a part was requested
            self.spent += one.division.needs[one.grant.profile][:, None, None] * here
            if one.grant.kind:
                self.kind[here] = view.table.kinds.number(one.grant.kind)
            profile = one.division.profiles[one.grant.profile]
            if profile.starts and here.any():
                taken = view.shorts(view.block.taken)[here] | self.taken[here]
                start = one.division.starts(one.grant.profile)[taken].astype(np.int32)
                mask = np.where(start == NO_START, 0, ((1 << profile.size) - 1) << start)
                self.taken[here] |= mask


class Scene(NamedTuple):
    """Placement context of a step: nodes, pod, and the pod's running containers."""

    view: View
    plan: Plan
    running: Held | None = None
    """``None`` while the pod runs nothing."""


def _static(view: View, step: Step) -> Iterator[tuple[Stage, Bools]]:
    """Yield the constraints that usage does not affect, over the whole block."""
    block, table, selector = view.block, view.table, step.selector
    request = step.request
    if selector.allow_types or selector.deny_types or request.types:
        accepted = np.array(
            [
                selector.accepts_type(word) and (not request.types or word in request.types)
                for word in table.types.words
            ]
        )
        yield Stage.TYPE, accepted[block.type[:, : block.count]]
    modes = _accepted_modes(view, step)
    yield Stage.MODE, modes & _given_in_parts(view, request) if step.is_part else modes
    if request.profile or request.exact or divisions_of(view, request.vendor):
        suits = np.full((block.width, block.count), not (request.profile or request.exact))
        for one in granted(view, request):
            suits[one.devices] = one.grant is not None
        yield Stage.SIZE, suits
    if bound_key(view, request):
        largest = block.largest_mib[:, : block.count]
        left = largest - block.foreign_mib[:, : block.count]
        yield Stage.LARGEST, (largest == 0) | (left >= wanted_mib(view, request))
    if selector.no_overcommit:
        memory_mib = block.memory_mib[:, : block.count]
        is_backed = block.capacity_mib[:, : block.count] <= memory_mib
        yield Stage.OVERCOMMIT, is_backed & (block.capacity_core[:, : block.count] <= _FULL_PCT)
    if selector.allow_uuids or selector.deny_uuids:
        yield Stage.UUID, _accepted_uuids(view, selector)
    yield Stage.AGENT, block.alive[:, : block.count]
    yield Stage.WITHHELD, ~block.withheld[:, : block.count]
    yield Stage.HEALTH, block.healthy[:, : block.count]
    yield Stage.CORDON, ~block.cordoned[:, : block.count]
    if request.exclusive and foreign_nodes(view) is not None:
        # A device with a burst is not idle, and is offered again as soon as the pod has ended.
        here = slice(None), slice(None, block.count)
        yield Stage.FOREIGN, block.foreign_mib[here] == block.burst_mib[here]


def foreign_nodes(view: View) -> Bools | None:
    """Return the nodes with memory in use that no share books; ``None``: no node."""
    block = view.block

    def make() -> Bools | None:
        found = np.logical_or.reduce(block.foreign_mib[:, : block.count] > 0, axis=0)
        return found if found.any() else None

    found = block.derived("foreign nodes", make)
    return None if found is None else view.line(found)


def lifting_modes(view: View, step: Step, modes: Sequence[str]) -> Shorts:
    """Return for each device the place in ``modes``, from 1, of its mode if naming it would help.

    0: the pod could not get a share of the device by naming a mode.
    """
    request, found = step.request, np.zeros((view.block.width, view.count), np.int32)
    if request.profile or not modes:
        return found
    has_size = np.ones(found.shape, np.bool_)
    for one in granted(view, request):
        if one.grant is None:
            has_size &= ~one.devices
    whole = View(view.table, view.block)
    for number, mode in enumerate(modes, start=1):
        named = replace(
            step,
            request=replace(request, modes=()),
            selector=replace(step.selector, modes=(mode,)),
        )
        found[view.bools(_accepted_modes(whole, named)) & has_size & (found == 0)] = number
    return found


def _accepted_modes(view: View, step: Step) -> Bools:
    block, modes = view.block, view.table.modes.words
    mode = block.mode[:, : block.count]
    plain, divided = (
        np.array(
            [
                serves_mode(step.request, step.selector, word, divided=way, memory_cap=cap)
                for word, cap in modes
            ]
        )
        for way in (False, True)
    )
    accepted: Bools = plain[mode]
    in_parts: Bools = divided[mode]
    if (plain != divided).any():
        has_parts = block.division[:, : block.count] > 0
        accepted = np.logical_or(has_parts & in_parts, ~has_parts & accepted)
    return accepted


def _given_in_parts(view: View, request: DeviceRequest) -> Bools:
    """Return the devices that would not be assigned as a whole."""
    found = np.zeros((view.block.width, view.count), np.bool_)
    for one in granted(view, request):
        if one.grant is None or one.division.profiles[one.grant.profile].name:
            found |= one.devices
    return found


def _accepted_uuids(view: View, selector: DeviceSelector) -> Bools:
    block = view.block
    accepted = np.full((block.width, block.count), not selector.allow_uuids)
    for uuids, accepts in ((selector.allow_uuids, True), (selector.deny_uuids, False)):
        for uuid in uuids:
            for at in _cells_of(view, uuid):
                accepted[at] = accepts
    return accepted


def _cells_of(view: View, uuid: str) -> Iterator[tuple[int, int]]:
    """Yield the (row, column) of devices with this UUID in the block."""
    block = view.block
    if block.is_copy:
        for column, uuids in enumerate(block.uuids):
            if uuid in uuids:
                yield uuids.index(uuid), column
        return
    for node in view.table.nodes_with(uuid):
        place = view.table.place(node)
        if place is not None and place.block is block:
            yield place.rows[uuid], place.column


def devices_of(view: View, vendor: str) -> Bools:
    """Return the vendor's registered devices."""
    block = view.block
    number = view.table.vendors.find(vendor)

    def make() -> Bools:
        mine: Bools = block.vendor[:, : block.count] == (NOBODY if number is None else number)
        return mine & block.known[:, : block.count]

    return view.bools(block.derived(("vendor", number), make))


def known_devices(view: View, vendor: str) -> Ints:
    """Return the number of registered devices of the vendor on each node."""
    number = view.table.vendors.find(vendor)
    totals = None if number is None else view.block.totals.get(number)
    return np.zeros(view.count, np.int64) if totals is None else view.ids(totals[DEVICES])


def totals_of(view: View, vendor: str) -> Ints | None:
    """Return the vendor's totals per node (rows as in ``block``); ``None`` without any device."""
    number = view.table.vendors.find(vendor)
    totals = None if number is None else view.block.totals.get(number)
    return None if totals is None else view.ints(totals)


def selected(view: View, step: Step) -> Bools:
    """Return the devices that pass every static constraint."""
    block = view.block

    def make() -> Bools:
        whole = View(view.table, block)
        passing = devices_of(whole, step.request.vendor).copy()
        for _, mask in _static(whole, step):
            passing &= mask
        return passing

    return view.bools(block.derived(("selected", *_static_key(view, step)), make))


def _static_key(view: View, step: Step) -> tuple[object, ...]:
    """Return everything that static constraints depend on."""
    request = step.request
    wishes: object = request.types, request.modes, request.profile, request.exact
    if divisions_of(view, request.vendor):  # then the assigned size depends on the table
        wishes = request
    return (
        request.vendor,
        request.exclusive,
        step.selector,
        wishes,
        step.is_part,
        is_refused_by_mps(step),
        bound_key(view, request),
    )


def is_refused_by_mps(step: Step) -> bool:
    """Return whether the step may have devices in mode ``mps`` and asks for too many of them."""
    return step.request.count > 1 and MPS_MODE in step.selector.modes


def bound_key(view: View, request: DeviceRequest) -> tuple[int, ...]:
    """Return the requested memory if some device has a largest share; empty if none has."""
    block = view.block

    def make() -> bool:
        return bool(block.largest_mib[:, : block.count].any())

    if not block.derived("bounded shares", make):
        return ()
    return request.memory_mib, request.memory_pct


def _judged(view: View, step: Step) -> Stages:
    """Return the static constraint that stops each device, otherwise as in ``reached``."""
    block = view.block

    def make() -> Stages:
        whole = View(view.table, block)
        return _first_stop(devices_of(whole, step.request.vendor), _static(whole, step))

    return view.cells(block.derived(("judged", *_static_key(view, step)), make))


def _first_stop(passing: Bools, masks: Iterable[tuple[Stage, Bools]]) -> Stages:
    """Return the first constraint that stops each of the ``passing``, ``FITS`` or -1 otherwise.

    ``FITS``: passing, and no constraint stops it. -1: not passing.
    """
    stages: Stages = np.where(passing, np.int8(Stage.FITS), np.int8(-1))
    for stage, mask in masks:
        stopped = passing & ~mask
        if stopped.any():
            np.copyto(stages, np.int8(stage), where=stopped)
            passing = passing & mask
    return stages


class Granted(NamedTuple):
    """Grant of a request on the devices with one table of partitions."""

    division: Division
    devices: Bools
    """The vendor's devices with this table, in the view."""
    grant: Grant | None
    """``None`` where the table has no suitable partition."""


def divisions_of(view: View, vendor: str) -> tuple[int, ...]:
    """Return the tables of partitions that the vendor's devices in the block have."""
    block, number = view.block, view.table.vendors.find(vendor)
    if number is None or not view.table.has_divisions:
        return ()

    def make() -> tuple[int, ...]:
        mine = block.division[:, : block.count][block.vendor[:, : block.count] == number]
        return tuple(int(n) for n in np.unique(mine) if n)

    return block.derived(("divisions", number), make)


def granted(view: View, request: DeviceRequest) -> Iterator[Granted]:
    """Yield the grant of the request for each table of partitions of the vendor's devices."""
    block, table = view.block, view.table
    for number in divisions_of(view, request.vendor):
        division = table.divisions[number]

        def make(number: int = number) -> Bools:
            mine: Bools = block.division[:, : block.count] == number
            mine &= block.vendor[:, : block.count] == table.vendors.find(request.vendor)
            return mine

        devices = block.derived(("divided", request.vendor, number), make)
        yield Granted(division, view.bools(devices), division.grant(request))


def wanted_mib(view: View, request: DeviceRequest) -> Ints | int:
    """Return the memory that the request takes of each device; one number where all are equal."""
    if not divisions_of(view, request.vendor):
        return _asked_mib(view, request)
    block = view.block

    def make() -> Ints:
        whole = View(view.table, block)
        shape = block.width, block.count
        mib: Ints = np.array(np.broadcast_to(_asked_mib(whole, request), shape), np.int64)
        for one in granted(whole, request):
            if one.grant is not None:
                mib[one.devices] = one.grant.memory_mib
        return mib

    return view.ints(block.derived(("granted mib", request), make))


def wanted_core(view: View, request: DeviceRequest) -> Shorts | int:
    """Return the compute that the request takes of each device; one number where all are equal."""
    if not divisions_of(view, request.vendor):
        return request.core_pct
    block = view.block

    def make() -> Shorts:
        core: Shorts = np.full((block.width, block.count), request.core_pct, np.int32)
        for one in granted(View(view.table, block), request):
            if one.grant is not None:
                core[one.devices] = one.grant.core_pct
        return core

    return view.shorts(block.derived(("granted core", request), make))


def excess(view: View, request: DeviceRequest) -> Floats | None:
    """Return by how much the request's share exceeds it on each device; ``None``: nowhere.

    0 where shares have any size, so that these devices come first. A partition has 1 plus its
    memory beyond the request, in MiB, plus a fraction that grows with its compute beyond it.
    """
    if not divisions_of(view, request.vendor):
        return None
    block = view.block

    def make() -> Floats:
        beyond = np.zeros((block.width, block.count))
        for one in granted(View(view.table, block), request):
            if one.grant is not None:
                rest = one.grant.spare_pct / _PCT_FRACTION
                beyond[one.devices] = 1 + one.grant.spare_mib + rest
        return beyond

    return view.floats(block.derived(("excess", request), make))


def _asked_mib(view: View, request: DeviceRequest) -> Ints | int:
    if request.memory_mib or not request.memory_pct:
        return request.memory_mib
    block = view.block
    if request.memory_pct == 100:  # noqa: PLR2004 - the whole device
        return view.ints(block.memory_mib)

    def make() -> Ints:
        memory: Ints = block.memory_mib[:, : block.count]
        return memory * request.memory_pct // 100

    return view.ints(block.derived(("wanted", request.memory_pct), make))


def added_fullness(scene: Scene, step: Step) -> Floats:
    """Return the fullness that the step's share adds to each device."""
    view, weights, request = scene.view, scene.plan.policy.weights, step.request
    block, mib = view.block, wanted_mib(view, request)
    divided = bool(divisions_of(view, request.vendor))

    def make() -> Floats:
        here = slice(None), slice(None, block.count)
        slot: Floats = weights.slot * block.per_slot[here]
        core = wanted_core(View(view.table, block), request)
        return slot + (weights.core * core) * block.per_core[here]

    key = ("added", weights.slot, weights.core, request if divided else request.core_pct)
    added = view.floats(block.derived(key, make))
    return added + (weights.memory * mib) * view.floats(block.per_mib)


def _dynamic(scene: Scene, step: Step) -> Iterator[tuple[Stage, Bools]]:
    """Yield the constraints on free capacity, with the pod's own running containers counted."""
    view, plan, running = scene
    block, request = view.block, step.request
    free_mib, free_core = view.ints(block.free_mib), view.shorts(block.free_core)
    left_core = free_core
    idle = view.bools(block.idle) if request.exclusive or plan.mutex else None
    if running is None:
        yield Stage.SLOT, view.bools(block.has_slot)
        yield Stage.HELD, view.bools(block.unheld)
    else:
        free_mib, free_core = free_mib - running.mib, free_core - running.core
        yield (
            Stage.SLOT,
            view.shorts(block.used_slots) + running.slots < view.shorts(block.slots),
        )
        yield Stage.HELD, view.bools(block.unheld) & ~running.exclusive
        if idle is not None:
            idle = idle & (running.slots == 0)
    if idle is not None and plan.mutex:
        yield Stage.HELD, idle & ~_beside_used(view)
    kinds = _wanted_kinds(view, request)
    if kinds is not None:
        joined = JOINS.get(request.kind)
        other = kinds if joined is None else view.table.kinds.number(joined)
        yield Stage.KIND, _same_kind(scene, kinds, other)
    yield from _memory(view, free_mib, wanted_mib(view, request))
    core = wanted_core(view, request)
    if not isinstance(core, int):
        yield Stage.CORE, (free_core >= core) | (core == 0)
        left = (left_core > 0) | (view.shorts(block.capacity_core) == 0)
        yield Stage.UNITS, left | (core > 0)
    elif core:
        yield Stage.CORE, free_core >= core
    else:
        yield Stage.UNITS, (left_core > 0) | (view.shorts(block.capacity_core) == 0)
    if divisions_of(view, request.vendor):
        yield Stage.PARTITION, _has_place(scene, request)
    if idle is not None and request.exclusive:
        yield Stage.IDLE, idle


def _memory(view: View, free_mib: Ints, mib: Ints | int) -> Iterator[tuple[Stage, Bools]]:
    """Yield the constraints on free memory: the last one decides, the others name the cause."""
    if foreign_nodes(view) is None:
        yield Stage.MEMORY, free_mib >= mib
        return
    yield Stage.MEMORY, free_mib + view.ints(view.block.foreign_mib) >= mib
    if view.table.bursting:
        yield Stage.FOREIGN_MIB, free_mib + view.ints(view.block.burst_mib) >= mib
        yield Stage.BURST_MIB, free_mib >= mib
    else:
        yield Stage.FOREIGN_MIB, free_mib >= mib


def _beside_used(view: View) -> Bools:
    """Return the devices that are parts of a physical card of which another part is in use."""
    block = view.block
    boards = view.shorts(block.board)
    found: Bools = np.zeros(boards.shape, np.bool_)
    if not block.derived("boards", lambda: bool(block.board[:, : block.count].any())):
        return found
    used = ~view.bools(block.idle) & (boards > 0)
    for row in range(block.width):
        found |= used[row] & (boards[row] == boards)
    return found


def _wanted_kinds(view: View, request: DeviceRequest) -> Shorts | int | None:
    """Return the number of the share's kind on each device; ``None`` where kinds do not matter."""
    kinds = view.table.kinds
    if request.kind:
        return kinds.number(request.kind)
    if not any(one.grant is not None and one.grant.kind for one in granted(view, request)):
        return None
    wanted = np.zeros((view.block.width, view.count), np.int32)
    for one in granted(view, request):
        if one.grant is not None:
            wanted[one.devices] = kinds.number(one.grant.kind)
    return wanted


def _same_kind(scene: Scene, wanted: Shorts | int, joined: Shorts | int) -> Bools:
    """Return the devices without shares of another kind than ``wanted`` and ``joined``."""
    view, _, running = scene
    kind = view.shorts(view.block.kind)
    same: Bools = (kind == 0) | (kind == wanted) | (kind == joined)
    if running is not None:
        mine = running.kind
        same &= (mine == 0) | (mine == wanted) | (mine == joined)
    return same if isinstance(wanted, int) else same | (wanted == 0)


def is_cut(scene: Scene, request: DeviceRequest) -> Bools | None:
    """Return the devices whose shares are of the request's kind; ``None``: kinds do not matter."""
    view, _, running = scene
    wanted = _wanted_kinds(view, request)
    if wanted is None:
        return None
    kind = view.shorts(view.block.kind)
    cut: Bools = (kind == wanted) & (kind > 0)
    return cut if running is None else cut | ((running.kind == wanted) & (running.kind > 0))


def _has_place(scene: Scene, request: DeviceRequest) -> Bools:
    """Return the devices with a free place for the request's partition.

    Memory and compute are separate constraints.
    """
    view, _, running = scene
    block = view.block
    spent = block.spent[:, :, : view.count] if view.columns is None else None
    if spent is None:
        spent = block.spent[:, :, view.columns]
    taken = view.shorts(block.taken)
    if running is not None:
        spent, taken = spent + running.spent, taken | running.taken
    has: Bools = np.ones((block.width, view.count), np.bool_)
    for one in granted(view, request):
        if one.grant is None:
            continue
        need = one.division.needs[one.grant.profile][:, None, None]
        room = (spent + need <= one.division.capacity[:, None, None]).all(axis=0)
        if one.division.profiles[one.grant.profile].starts:
            states = np.where(one.devices, taken, 0)
            room &= one.division.starts(one.grant.profile)[states] != NO_START
        has &= room | ~one.devices
    return has


def passes(scene: Scene, step: Step) -> Bools:
    """Return the devices that pass every constraint on one device; NUMA binding needs several."""
    passing = selected(scene.view, step)
    if scene.view.columns is None:
        passing = passing.copy()
    for _, mask in _dynamic(scene, step):
        passing &= mask
    return passing


def kept_devices(view: View, step: Step, chosen: Bools) -> Bools | None:
    """Return the step's devices that later steps find taken; ``None`` for no device.

    An init container releases its shares when it ends, except hardware partitions.
    """
    if step.kind != "init":
        return chosen
    kept: Bools | None = None
    for one in granted(view, step.request):
        if one.grant is not None and one.division.profiles[one.grant.profile].name:
            mine = chosen & one.devices
            kept = mine if kept is None else kept | mine
    return kept


def is_plain(view: View, step: Step) -> bool:
    """Return whether usage affects a step by amounts only, with no constraint on combinations."""
    return not step.request.exclusive and is_single(view, step)


def is_single(view: View, step: Step) -> bool:
    """Return whether a step can be evaluated on each device alone, by free capacity or idleness."""
    request = step.request
    return not (
        step.is_part
        or request.kind
        or request.shape
        or step.selector.numa_bind
        or divisions_of(view, request.vendor)
    )


class Free(NamedTuple):
    """Free capacity of each device."""

    slots: Shorts
    """Below 0 where a pod uses the device exclusively."""
    mib: Ints
    core: Shorts


def free_of(view: View) -> Free:
    """Return the free capacity of each device of the view."""
    block = view.block
    slots: Shorts = view.shorts(block.slots) - view.shorts(block.used_slots)
    np.copyto(slots, np.int32(-1), where=~view.bools(block.unheld))
    return Free(slots, view.ints(block.free_mib), view.shorts(block.free_core))


def together(
    steps: Sequence[Step], mib_of: Callable[[DeviceRequest], Ints | int]
) -> tuple[int, int, Ints | int]:
    """Return (slots, compute, memory) that a device needs to take all ``steps``, all plain.

    ``mib_of`` returns the memory that one of them takes of the device.
    """
    running_mib: Ints | int = 0
    mib: Ints | int = 0
    running_core = core = running_slots = slots = 0
    for step in steps:
        request = step.request
        with_mib = running_mib + mib_of(request)
        if isinstance(mib, int) and isinstance(with_mib, int):
            mib = max(mib, with_mib)
        else:
            mib = np.maximum(mib, with_mib)
        # a share without compute books none, but requires some to be left
        core = max(core, running_core + max(1, request.core_pct))
        slots = max(slots, running_slots + 1)
        if step.kind != "init":
            running_mib, running_slots = with_mib, running_slots + 1
            running_core += request.core_pct
    return slots, core, mib


def has_room(view: View, steps: Sequence[Step], free: Free) -> Bools:
    """Return the devices of one vendor with capacity for all of a pod's ``steps``, all plain."""
    slots, core, mib = together(steps, lambda request: wanted_mib(view, request))
    passing = selected(view, steps[0]) & (free.slots >= slots)
    for step in steps[1:]:
        if not _is_answered_alike(view, step.request, steps[0].request):
            passing &= selected(view, step)
    passing &= free.mib >= mib
    passing &= free.core >= core
    return passing


def _is_answered_alike(view: View, a: DeviceRequest, b: DeviceRequest) -> bool:
    """Return whether two plain requests of a pod to one vendor accept the same devices."""
    alike = (a.types, a.modes, a.profile, a.exact) == (b.types, b.modes, b.profile, b.exact)
    has_one_bound = bound_key(view, a) == bound_key(view, b)
    return alike and (a.count > 1) == (b.count > 1) and has_one_bound


def reached(scene: Scene, step: Step) -> Stages:
    """Return the constraint that stops each device.

    ``FITS`` where none does; -1 for other vendors.
    """
    view = scene.view
    stages = _judged(view, step)
    passing = stages == Stage.FITS
    stages = np.where(passing, _first_stop(passing, _dynamic(scene, step)), stages)
    passing = stages == Stage.FITS
    if step.selector.numa_bind:
        stages[passing & (beside_counts(view, passing) < step.request.count)] = Stage.NUMA
    if step.request.shape:
        stages[(stages == Stage.FITS) & ~shaped(view, step, passing)] = Stage.SHAPE
    return stages


def count_of(mask: Bools) -> Counts:
    """Return the number of set devices of each node."""
    small = len(mask) <= np.iinfo(np.int8).max
    counts: Counts = np.add.reduce(mask.view(np.int8), axis=0, dtype=np.int8 if small else np.int32)
    return counts


def has_count(mask: Bools, wanted: int) -> Bools:
    """Return the nodes with at least ``wanted`` devices set."""
    if wanted > 1:
        return count_of(mask) >= wanted
    some: Bools = np.logical_or.reduce(mask, axis=0)
    return some


def has_enough(view: View, step: Step, passing: Bools) -> Bools:
    """Return the nodes with enough passing devices, on one NUMA node if the step requires it."""
    wanted = step.request.count
    if step.request.shape:
        return has_count(shaped(view, step, passing), 1)
    if wanted > 1 and step.selector.numa_bind:
        return has_count(passing & (beside_counts(view, passing) >= wanted), 1)
    return has_count(passing, wanted)


def by_index(view: View, passing: Bools) -> dict[int, Bools]:
    """Return by the vendor's index the nodes on which that device is among the passing ones."""
    index = view.shorts(view.block.index)
    return {n: (passing & (index == n)).any(axis=0) for n in range(INDEX_LIMIT)}


def one_per_index(view: View, passing: Bools) -> Bools:
    """Return the passing devices, without those that repeat the index of an earlier one."""
    index = view.shorts(view.block.index)
    kept = passing.copy()
    for row in range(1, len(kept)):
        kept[row] &= ~(kept[:row] & (index[:row] == index[row])).any(axis=0)
    return kept


def open_sets(view: View, step: Step, passing: Bools) -> Iterator[tuple[LegalSet, Bools]]:
    """Yield the sets of the step's shape, each with the nodes on which all its devices pass.

    With NUMA binding only nodes count on which the set is of one NUMA node.
    """
    there = by_index(view, passing)
    index, numa = view.shorts(view.block.index), view.shorts(view.block.numa)
    for some in legal_sets(step.request.shape, step.request.count):
        nodes = np.logical_and.reduce([there[n] for n in some.indexes])
        if step.selector.numa_bind and nodes.any():
            inside = passing & np.isin(index, some.indexes)
            least = np.where(inside, numa, np.iinfo(np.int32).max).min(axis=0)
            nodes = nodes & (np.where(inside, numa, -1).max(axis=0) == least)
        if nodes.any():
            yield some, nodes


def shaped(view: View, step: Step, passing: Bools) -> Bools:
    """Return the passing devices that are in a set of the step's shape which passes as a whole."""
    index, passing = view.shorts(view.block.index), one_per_index(view, passing)
    found = np.zeros(passing.shape, np.bool_)
    for some, nodes in open_sets(view, step, passing):
        found |= np.isin(index, some.indexes) & nodes
    return found & passing


def _numa_nodes(view: View) -> list[int]:
    block = view.block
    return block.derived("numa", lambda: np.unique(block.numa[:, : block.count]).tolist())


def beside_counts(view: View, passing: Bools) -> Shorts:
    """Return for each passing device the number of passing ones on its NUMA node; else 0.

    The device itself is included.
    """
    numa = view.shorts(view.block.numa)
    beside = np.zeros(passing.shape, np.int32)
    for number in _numa_nodes(view):
        here = passing & (numa == number)
        beside += here * count_of(here).astype(np.int32)
    return beside
