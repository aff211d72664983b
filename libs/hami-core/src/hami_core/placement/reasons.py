# SPDX-License-Identifier: Apache-2.0
"""Reasons why a pod does not fit: a closed set of refusal codes, and their texts for people.

Codes are HAMi's where HAMi has one. A node's reason is its binding constraint: how far its best
device got, and if some devices fit but too few, the constraint that stops the best of the others.
All nodes with one reason form a class and get the same text, because kube-scheduler groups nodes by
text: the requested value, and the best free value of the class with its node. If an annotation of
the pod causes the refusal, or another one would lift it, the text ends with its key. One answer has
at most ``CLASSES_SHOWN`` texts of at most ``TEXT_BYTES``, so a pod's condition stays under 1 KiB.

Everything is derived from the constraints of ``fit``, evaluated one by one, on the nodes that
failed. Memory in MiB, compute in percent of one device.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from hami_common.events.decision import NODES_LISTED, RefusalClass
from hami_common.model.request import PARTITION_MODES, PodRequest
from hami_common.pods.annotations import DEVICE_POLICY, MIN_ISOLATION
from hami_common.vendors.partitions import NO_START, Division
from hami_common.vendors.remedies import one_of, remedies_of
from hami_core.placement.fit import (
    Counts,
    Plan,
    Scene,
    Stage,
    Stages,
    Step,
    View,
    beside_counts,
    compile_request,
    count_of,
    divisions_of,
    foreign_nodes,
    granted,
    has_enough,
    known_devices,
    lifting_modes,
    passes,
    reached,
    wanted_core,
    wanted_mib,
)
from hami_core.placement.levels import offered_mib
from hami_core.placement.placing import Outcome, Walk, attempts, lacking_key, lacking_step, place
from hami_core.table.block import NO_MIB, Columns, Ints, Shorts
from hami_core.table.table import DeviceTable

RefusalCode = Literal[
    "NodeUnregistered",
    "NodeInsufficientDevice",
    "NodeAgentSilent",
    "NodeWithheld",
    "CardNotHealth",
    "CardCordoned",
    "CardTypeMismatch",
    "ModeNotFit",
    "CardUuidMismatch",
    "CardTimeSlicingExhausted",
    "ExclusiveDeviceAllocateConflict",
    "CardInsufficientMemory",
    "CardForeignUse",
    "CardBurstUse",
    "CardInsufficientCore",
    "CardComputeUnitsExhausted",
    "NumaNotFit",
    "CardPartitionMismatch",
    "CardShareTooLarge",
    "CardOvercommitted",
    "CardPartitionInfeasible",
    "CardQosPolicyMismatch",
    "CardTopologyInfeasible",
    "AllocatedCardsInsufficientRequest",
    "ReservationInDoubt",
    "VictimsLeaving",
    "GangIncomplete",
    "GangWaiting",
    "HeldElsewhere",
    "ShareLost",
    "PodNotAdmitted",
    "PodQuarantined",
    "ResourceQuotaNotFit",
    "QueueOverLimit",
    "QueueCannotBorrow",
    "QueueWaitsItsTurn",
    "QueueUnknown",
    "TaskPriorityTooHigh",
    "OtherReasons",
]

CODE_BY_STAGE: Final[dict[Stage, RefusalCode]] = {
    Stage.AGENT: "NodeAgentSilent",
    Stage.WITHHELD: "NodeWithheld",
    Stage.HEALTH: "CardNotHealth",
    Stage.CORDON: "CardCordoned",
    Stage.FOREIGN: "CardForeignUse",
    Stage.TYPE: "CardTypeMismatch",
    Stage.MODE: "ModeNotFit",
    Stage.UUID: "CardUuidMismatch",
    Stage.SLOT: "CardTimeSlicingExhausted",
    Stage.HELD: "ExclusiveDeviceAllocateConflict",
    Stage.MEMORY: "CardInsufficientMemory",
    Stage.FOREIGN_MIB: "CardForeignUse",
    Stage.BURST_MIB: "CardBurstUse",
    Stage.CORE: "CardInsufficientCore",
    Stage.UNITS: "CardComputeUnitsExhausted",
    Stage.IDLE: "ExclusiveDeviceAllocateConflict",
    Stage.NUMA: "NumaNotFit",
    Stage.SIZE: "CardPartitionMismatch",
    Stage.LARGEST: "CardShareTooLarge",
    Stage.OVERCOMMIT: "CardOvercommitted",
    Stage.PARTITION: "CardPartitionInfeasible",
    Stage.KIND: "CardQosPolicyMismatch",
    Stage.SHAPE: "CardTopologyInfeasible",
}

RESOLVABLE: Final[frozenset[RefusalCode]] = frozenset(
    {
        "CardTimeSlicingExhausted",
        "ExclusiveDeviceAllocateConflict",
        "CardInsufficientMemory",
        "CardForeignUse",
        "CardBurstUse",
        "CardInsufficientCore",
        "CardComputeUnitsExhausted",
        "NumaNotFit",
        "CardPartitionInfeasible",
        "CardQosPolicyMismatch",
        "CardTopologyInfeasible",
        "AllocatedCardsInsufficientRequest",
    }
)
"""Refusals that may end when other pods end."""

CLASSES_SHOWN: Final = 6
TEXT_BYTES: Final = 140
_OUTSIDE: Final = "used by processes outside HAMi"
_BEYOND: Final = "used by pods beyond their requests"
_NAME_SHOWN: Final = 45
_WORDS_SHOWN: Final = 40


class NodeRefusal(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reason why one node refuses the pod."""

    code: RefusalCode
    text: str


def other_reasons(count: int) -> NodeRefusal:
    """Return the refusal of nodes whose ``count`` reasons are not listed one by one."""
    return NodeRefusal(code="OtherReasons", text=f"OtherReasons: {count} more, see hamictl explain")


class DeviceVerdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Verdict of one device on one step."""

    uuid: str
    code: RefusalCode | None = None
    """The first constraint that stops it; ``None`` when it fits."""
    wanted: int = 0
    free: int = 0
    """Free amount of the resource that the code implies, or of ``resource``.

    Memory in MiB, compute in percent, slots, or devices of one NUMA node.
    """
    resource: str = ""
    """For a hardware partition: the resource that is too small; ``place``: no place in the grid."""
    foreign_mib: int = 0
    """Memory of the device that processes outside HAMi use; it is not part of ``free``."""
    burst_mib: int = 0
    """Memory of the device that pods use beyond their requests; it is not part of ``free``."""
    taken: bool = False
    """Chosen for the step."""


class StepExplanation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One container's request to one vendor: the verdicts of the node's devices."""

    container: str
    vendor: str
    count: int
    devices: tuple[DeviceVerdict, ...] = ()

    def fitting(self) -> int:
        """Return the devices that fit."""
        return sum(device.code is None for device in self.devices)


class NodeExplanation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reasons why a node accepts or refuses a pod. ``steps`` ends with the step that failed."""

    node: str
    fits: bool
    refusal: NodeRefusal | None = None
    steps: tuple[StepExplanation, ...] = ()


class Reason(NamedTuple):
    """Attributes that define a class of refused nodes."""

    step: int
    stage: int
    """Stage of the best device that does not fit; -1 where the stage does not matter."""
    kind: int
    """One of the constants below."""


class Measure(NamedTuple):
    """Best value of a class, and its node."""

    wanted: int
    free: int
    node: str
    lack: "Lack | None" = None
    """For a hardware partition: the requested one, and the amount that is too small."""
    remedy: int = 0
    """Place in the vendor's modes, from 1, of one whose naming would lift the refusal; 0: none."""
    cause_mib: int = 0
    """Memory of the best device that processes outside HAMi use, or that pods use beyond their
    requests, where that is the cause."""


class ClosestNode(NamedTuple):
    """A refused node that is close to taking the pod."""

    node: str
    code: RefusalCode
    reason: Reason

    @property
    def step(self) -> int:
        """Step of the plan that fails there."""
        return self.reason.step


class Lack(NamedTuple):
    """Amount of which a device has too little for one more partition."""

    division: int
    """Place in the table's divisions; never 0."""
    profile: int
    amount: int
    """Place in ``Division.names``; -1: the grid has no place."""
    left: int
    """Free part of that amount, or free positions of the grid."""

    def number(self) -> int:
        """Encode as one number; 0 stands for ``None``."""
        return int(_lack_numbers(*self))

    @classmethod
    def of(cls, number: int) -> "Lack | None":
        """Decode ``number``."""
        if not number:
            return None
        rest, left = divmod(number, _LEFT)
        rest, amount = divmod(rest, _AMOUNTS)
        division, profile = divmod(rest, _PROFILES)
        return cls(division, profile, amount - 1, left)


_PROFILES: Final = 256
_AMOUNTS: Final = 32
_LEFT: Final = 1 << 16


def _lack_numbers(division: int, profile: int, amount: Ints | int, left: Ints | int) -> Ints | int:
    return ((division * _PROFILES + profile) * _AMOUNTS + amount + 1) * _LEFT + left


_NOTHING: Final = Measure(0, 0, "")
_STAGES_WITH_AMOUNT: Final = (
    Stage.LARGEST,
    Stage.FOREIGN,
    Stage.MEMORY,
    Stage.FOREIGN_MIB,
    Stage.BURST_MIB,
    Stage.CORE,
    Stage.PARTITION,
    Stage.NUMA,
    Stage.SHAPE,
)
"""Stages whose refusal text includes an amount."""
_STAGES_OF_AMOUNT: Final = (
    Stage.FOREIGN,
    Stage.MEMORY,
    Stage.FOREIGN_MIB,
    Stage.BURST_MIB,
    Stage.CORE,
    Stage.UNITS,
)
"""Stages that compare an amount of a device, or refuse any use of it."""
NO_DEVICES, TOO_FEW, NONE_FIT, SOME_FIT = range(4)
_KINDS: Final = 4
_STAGES: Final = 32


def _word(step: int, stage: int, kind: int) -> int:
    """Encode a reason as one number."""
    return (step * _STAGES + stage + 1) * _KINDS + kind


def _reason(word: int) -> Reason:
    """Decode a reason from its number."""
    rest, kind = divmod(word, _KINDS)
    step, stage = divmod(rest, _STAGES)
    return Reason(step, stage - 1, kind)


class Causes(NamedTuple):
    """Reasons of nodes that do not fit, as lines: a reason's number, and its best value."""

    word: Ints
    wanted: Ints
    free: Ints
    """The best value: the one nearest to the requested value."""
    lack: Ints
    """``Lack`` as a number, where a partition does not fit."""
    remedy: Ints
    """Place in the vendor's modes, see ``Measure.remedy``."""
    cause_mib: Ints
    """As in ``Measure``."""

    @classmethod
    def none(cls, count: int) -> "Causes":
        """Allocate lines to be filled."""
        return cls(*(np.zeros(count, np.int64) for _ in cls._fields))

    @classmethod
    def unregistered(cls, count: int) -> "Causes":
        """Return lines of nodes without known devices."""
        found = cls.none(count)
        found.word[:] = _word(0, -1, NO_DEVICES)
        return found

    def part(self, places: Columns) -> "Causes":
        """Return the lines of the nodes at ``places``."""
        return Causes(*(line.take(places) for line in self))

    def copy(self) -> "Causes":
        """Return a copy that may be written to."""
        return Causes(*(line.copy() for line in self))

    def put(self, found: "Causes", places: Columns) -> None:
        """Copy the causes of the nodes at ``places``."""
        for line, new in zip(self, found, strict=True):
            line[places] = new

    def resized(self, count: int) -> "Causes":
        """Return lines for ``count`` nodes."""
        if len(self.word) >= count:
            return Causes(*(line[:count] for line in self))
        longer = Causes.none(count)
        longer.put(self, np.arange(len(self.word)))
        return longer


def causes(view: View, plan: Plan, failed: Shorts) -> Causes:
    """Return the causes why nodes of ``view`` do not fit; ``failed`` is each node's failing step.

    For nodes where it is -1, which fit, the lines have no meaning. Lines may be shared: callers
    must not write to them.
    """
    found = _lacking_causes(view, plan)
    placed = np.flatnonzero((failed >= 0) & (lacking_step(view, plan) < 0))
    if not len(placed):
        return found
    steps = failed.take(placed)
    numbers = _distinct(steps)
    if len(numbers) == 1 and len(placed) == view.count:
        return _causes_placed(view, plan, numbers[0])
    found = found.copy()
    for number in numbers:
        places = placed if len(numbers) == 1 else placed[steps == number]
        found.put(_causes_placed(view.part(places), plan, number), places)
    return found


def _lacking_causes(view: View, plan: Plan) -> Causes:
    """Return the causes of nodes that have too few devices for some step.

    The result is shared: callers must not write to it.
    """
    block, wanted = view.block, lacking_key(plan)

    def make() -> Causes:
        whole = View(view.table, block)
        found, failed = Causes.none(block.count), lacking_step(whole, plan)
        for number, (vendor, count) in enumerate(wanted):
            places = np.flatnonzero(failed == number)
            if not len(places):
                continue
            known = known_devices(whole, vendor).take(places)
            none, few = _word(number, -1, NO_DEVICES), _word(number, -1, TOO_FEW)
            words = np.where(known == 0, none, few)
            lacking = _counted(count, known, words)
            remedy = _remedies(whole, plan.steps[number], instead_of_devices=True)
            found.put(lacking._replace(remedy=remedy.max(axis=0).take(places)), places)
        return found

    asked = plan.steps if any(divisions_of(view, vendor) for vendor, _ in wanted) else ()
    found = block.derived(("lacking causes", wanted, asked), make)
    return found if view.columns is None else found.part(view.columns)


def _causes_placed(view: View, plan: Plan, number: int) -> Causes:
    """Return the causes of nodes with enough devices for the step, but not enough that fit."""
    offered, wanted = offered_mib(view, plan, number), plan.steps[number].request.memory_mib
    if offered is not None and wanted:
        is_short = (offered < wanted) & (offered != NO_MIB)
        foreign = foreign_nodes(view)
        if foreign is not None:  # their devices may have enough memory without that use
            is_short &= ~foreign
        short = np.flatnonzero(is_short)
        if len(short) == view.count:
            return _short_of_memory(number, wanted, offered)
        if len(short):
            found, others = Causes.none(view.count), np.flatnonzero(~is_short)
            found.put(_short_of_memory(number, wanted, offered[short]), short)
            found.put(_causes_looked_at(view.part(others), plan, number), others)
            return found
    return _causes_looked_at(view, plan, number)


def _short_of_memory(number: int, wanted: int, offered: Ints) -> Causes:
    """Return the causes of nodes where all devices offered to the step have too little memory."""
    words = np.full(len(offered), _word(number, Stage.MEMORY, NONE_FIT), np.int64)
    each = np.full(len(offered), wanted, np.int64)
    none = np.zeros(len(offered), np.int64)
    return Causes(words, each, offered.copy(), none, none.copy(), none.copy())


def _causes_looked_at(view: View, plan: Plan, number: int) -> Causes:
    """Return the same causes, evaluated device by device."""
    step, scene = plan.steps[number], scene_before(view, plan, number)
    stages = reached(scene, step)
    fitting = count_of(stages == Stage.FITS)
    stage = np.where(stages == Stage.FITS, np.int8(-1), stages).max(axis=0)
    each = _distinct(stage)
    if len(each) == 1 and not fitting.any():
        return _measured(scene, step, stages, Stage(each[0]), _word(number, each[0], NONE_FIT))
    found = _counted(step.request.count, fitting, np.zeros(view.count, np.int64))
    if Stage.MODE in each:
        stopped = np.where(stages == Stage.MODE, _remedies(view, step), 0)
        found.remedy[:] = stopped.max(axis=0)
    for one in each:
        found.word[stage == one] = _word(number, one, SOME_FIT)
        mine = np.flatnonzero((stage == one) & (fitting == 0))
        if len(mine):
            word = _word(number, one, NONE_FIT)
            best = _measured(_part(scene, mine), step, stages[:, mine], Stage(one), word)
            found.put(best, mine)
    return found


def _counted(count: int, have: Ints | Counts, words: Ints) -> Causes:
    """Return the causes of nodes where the number of devices is too small."""
    wanted = np.full(len(have), count, np.int64)
    none = np.zeros(len(have), np.int64)
    return Causes(words, wanted, have.astype(np.int64), none, none.copy(), none.copy())


def _measured(scene: Scene, step: Step, stages: Stages, stage: Stage, word: int) -> Causes:
    """Return the best value of each node for the resource that ``stage`` is about."""
    words, none = np.full(stages.shape[1], word, np.int64), np.zeros(stages.shape[1], np.int64)
    if stage == Stage.MODE:
        # A node that another mode would open is the closest.
        remedy = np.where(stages == stage, _remedies(scene.view, step), 0).max(axis=0)
        opens = (remedy > 0).astype(np.int64)
        return Causes(words, none, opens, none.copy(), remedy, none.copy())
    wanted, free = _amounts(scene, step, stages, stage)
    has_cause = stage in (Stage.FOREIGN, Stage.FOREIGN_MIB, Stage.BURST_MIB)
    if isinstance(wanted, int) and stage != Stage.PARTITION and not has_cause:
        # Where all devices want the same amount, least is missing where most is free.
        most = np.where(stages == stage, free, np.iinfo(np.int64).min).max(axis=0)
        each = np.full(len(words), wanted, np.int64)
        return Causes(words, each, most, none, none.copy(), none.copy())
    missing = np.where(stages == stage, wanted - free, np.iinfo(np.int64).max)
    best = missing.argmin(axis=0), np.arange(missing.shape[1])
    lack = _lacks(scene, step)[best] if stage == Stage.PARTITION else none
    view = scene.view
    cause_mib = _cause_mib(view, stage)[best] if has_cause else none.copy()
    each = np.broadcast_to(np.asarray(wanted, np.int64), stages.shape)
    return Causes(words, each[best], free[best], lack, none.copy(), cause_mib)


def _cause_mib(view: View, stage: Stage) -> Ints:
    """Return the memory of each device that is in use without a share, of the stage's kind."""
    burst_mib = view.ints(view.block.burst_mib)
    if stage == Stage.BURST_MIB:
        return burst_mib
    return view.ints(view.block.foreign_mib) - burst_mib


def _remedies(view: View, step: Step, *, instead_of_devices: bool = False) -> Ints:
    """Return ``Measure.remedy`` of each device.

    With ``instead_of_devices`` only of modes in which one device may serve the step several times.
    """
    modes = [mode for mode, _ in remedies_of(step.request.vendor).modes]
    if instead_of_devices and (
        step.request.count == 1 or step.request.shape or step.selector.numa_bind
    ):
        modes = []
    found = lifting_modes(view, step, modes).astype(np.int64)
    if instead_of_devices:
        dividing = [n for n, mode in enumerate(modes, start=1) if mode in PARTITION_MODES]
        found[~np.isin(found, dividing)] = 0
    return found


def _lacks(scene: Scene, step: Step) -> Ints:
    """Return ``Lack`` as a number for each device that has a table of sizes; 0 for others."""
    view, _, running = scene
    block = view.block
    columns: slice | Columns = slice(view.count) if view.columns is None else view.columns
    spent, taken = block.spent[:, :, columns], view.shorts(block.taken)
    if running is not None:
        spent, taken = spent + running.spent, taken | running.taken
    found = np.zeros(taken.shape, np.int64)
    for one in granted(view, step.request):
        if one.grant is None:
            continue
        number = view.table.divisions.index(one.division)
        left = one.division.capacity[:, None, None] - spent
        is_short = left < one.division.needs[one.grant.profile][:, None, None]
        amount = np.where(is_short.any(axis=0), is_short.argmax(axis=0), -1)
        if one.division.profiles[one.grant.profile].starts:
            states = np.where(one.devices, taken, 0)
            amount[one.division.starts(one.grant.profile)[states] == NO_START] = -1
        places = sum(1 - (taken >> at & 1) for at in range(one.division.positions))
        of_amount = np.take_along_axis(left, np.maximum(amount, 0)[None], axis=0)[0]
        rest = np.maximum(np.where(amount < 0, places, of_amount), 0).astype(np.int64)
        lacks = _lack_numbers(number, one.grant.profile, amount.astype(np.int64), rest)
        found = np.where(one.devices, lacks, found)
    return found


class Named(Protocol):
    """Nodes of a request, by their place in it."""

    def name(self, place: int) -> str:
        """Return the name at a place."""
        ...

    def several(self, places: Columns) -> list[str]:
        """Return the names at some places."""
        ...

    def first(self, places: Columns, count: int) -> Columns:
        """Return the first ``count`` of ``places`` in the order of names."""
        ...


class Refusals:
    """Refused nodes of one decision, by class."""

    def __init__(
        self, request: PodRequest, plan: Plan, named: Named, divisions: Sequence[Division]
    ) -> None:
        """Start without refusals; ``divisions`` are the table's."""
        self._request = request
        self._divisions = divisions
        self._plan = plan
        self._named = named
        self._found: dict[Reason, list[_Found]] = {}
        self._refusal_by_reason: dict[Reason, NodeRefusal] = {}

    def add(self, places: Columns, found: Causes, columns: Columns) -> None:
        """Add the nodes at ``places`` of the request; ``found`` has their causes at ``columns``."""
        words = found.word.take(columns)
        self._refusal_by_reason.clear()
        for word in _distinct(words):
            mine = np.flatnonzero(words == word)
            some = _Found(places, found, columns)
            if len(mine) < len(places):
                some = _Found(places[mine], found, columns[mine])
            self._found.setdefault(_reason(word), []).append(some)

    @property
    def count(self) -> int:
        """Number of refused nodes."""
        return sum(len(part.places) for parts in self._found.values() for part in parts)

    def _by_size(self) -> list[tuple[Reason, Columns]]:
        """Return each class with its nodes, the largest first."""
        classes = [
            (reason, _joined([part.places for part in parts]))
            for reason, parts in self._found.items()
        ]
        return sorted(classes, key=lambda some: (-len(some[1]), some[0]))

    def groups(self) -> list[tuple[NodeRefusal, Columns]]:
        """Return the refused nodes by text; the smallest classes share one when there are many."""
        classes = self._by_size()
        several = len(classes) > CLASSES_SHOWN
        shown = classes[: CLASSES_SHOWN - 1] if several else classes
        groups = [(self._refusal(reason), places) for reason, places in shown]
        if several:
            rest = other_reasons(len(classes) - len(shown))
            groups.append((rest, np.concatenate([places for _, places in classes[len(shown) :]])))
        return groups

    def classes(self) -> tuple[RefusalClass, ...]:
        """Return the classes, largest first; small ones are not merged here."""
        found: list[RefusalClass] = []
        for reason, places in self._by_size():
            refusal = self._refusal(reason)
            some = self._named.first(places, NODES_LISTED)
            found.append(
                RefusalClass(
                    code=refusal.code,
                    text=refusal.text,
                    count=len(places),
                    nodes=tuple(self._named.several(some)),
                )
            )
        return tuple(found)

    def closest(self, count: int) -> list[ClosestNode]:
        """Return up to ``count`` nodes that are closest to taking the pod, the closest first.

        First nodes whose refusal may end when pods end, then those where later steps of the pod
        fail, those where some devices fit, those whose best device meets more constraints, those
        that lack the least amount, and then by name. Nodes with too few devices come last.
        """
        found: list[ClosestNode] = []
        for reason in sorted(self._found, key=_distance):
            parts, left = self._found[reason], count - len(found)
            if left <= 0:
                break
            places = _joined([part.places for part in parts])
            missing = np.concatenate([part.missing() for part in parts])
            if len(places) > left:
                most = np.partition(missing, left - 1)[left - 1]
                less, equal = places[missing < most], places[missing == most]
                equal = self._named.first(equal, left - len(less))
                places = np.concatenate([less, equal])
                missing = np.concatenate([missing[missing < most], np.full(len(equal), most)])
            named = zip(missing.tolist(), self._named.several(places), strict=True)
            code = _code(reason)
            found += [ClosestNode(name, code, reason) for _, name in sorted(named)]
        return found

    def _refusal(self, reason: Reason) -> NodeRefusal:
        """Return the text of a class."""
        cached = self._refusal_by_reason.get(reason)
        if cached is None:
            best = self._best(reason) if _has_best(reason) else _NOTHING
            cached = _refusal(self._request, self._plan, reason, best, self._divisions)
            self._refusal_by_reason[reason] = cached
        return cached

    def _best(self, reason: Reason) -> Measure:
        """Return the measure of the closest nodes: the first by name."""
        parts = self._found[reason]
        missing = [part.missing() for part in parts]
        least = min(int(line.min()) for line in missing)
        closest = [part.places[line == least] for part, line in zip(parts, missing, strict=True)]
        at = int(self._named.first(_joined(closest), 1)[0])
        found, column = next(
            (part.found, int(part.columns[part.places == at][0]))
            for part in parts
            if (part.places == at).any()
        )
        return _measure(found, column, self._named.name(at))


def _distance(reason: Reason) -> tuple[bool, bool, bool, int, bool, int]:
    """Return a key that orders classes as ``Refusals.closest`` does."""
    return (
        reason.kind == NO_DEVICES,
        reason.kind == TOO_FEW,
        _code(reason) not in RESOLVABLE,
        -reason.step,
        reason.kind != SOME_FIT,
        -reason.stage,
    )


def is_placed(reason: Reason) -> bool:
    """Return whether the node has enough devices, so that the steps before could be placed."""
    return reason.kind in (NONE_FIT, SOME_FIT)


class _Found(NamedTuple):
    """Nodes with the same reason."""

    places: Columns
    """Places in the request."""
    found: Causes
    columns: Columns
    """Columns of these nodes in ``found``."""

    def missing(self) -> Ints:
        """Return the distance of each best value from the requested value."""
        return self.found.wanted.take(self.columns) - self.found.free.take(self.columns)


def _joined(lines: list[Columns]) -> Columns:
    return lines[0] if len(lines) == 1 else np.concatenate(lines)


def _measure(found: Causes, column: int, name: str) -> Measure:
    """Return the best value at a column."""
    lack = Lack.of(int(found.lack[column]))
    wanted, free = int(found.wanted[column]), int(found.free[column])
    remedy, cause_mib = int(found.remedy[column]), int(found.cause_mib[column])
    return Measure(wanted, free, name, lack, remedy, cause_mib)


def _refusal(
    request: PodRequest,
    plan: Plan,
    reason: Reason,
    best: Measure,
    divisions: Sequence[Division] = (),
) -> NodeRefusal:
    """Return the refusal of nodes with one reason."""
    code = _code(reason)
    fact = _fact(plan, reason, best, divisions)
    prefix = _prefix(request, plan, reason.step)
    hint = _hint(plan, reason, best)
    text = _clip(f"{code}: {prefix}{fact}", TEXT_BYTES - len(hint)) + hint
    return NodeRefusal(code=code, text=text)


def _distinct(line: Shorts | Ints) -> list[int]:
    """Return the different values in order; they are small numbers, mostly a single one."""
    least, most = int(line.min()), int(line.max())
    if least == most:
        return [least]
    return (np.flatnonzero(np.bincount(line - least)) + least).tolist()


def scene_before(view: View, plan: Plan, number: int) -> Scene:
    """Return the scene before step ``number``; earlier containers are placed as first tried."""
    walk = Walk(view, plan, attempts(plan)[0].keys)
    everywhere = np.ones(view.count, np.bool_)
    for step in plan.steps[:number]:
        walk.take(step, passing=passes(walk.scene, step), fits=everywhere)
    return walk.scene


def _part(scene: Scene, places: Columns) -> Scene:
    """Return the scene on some of its nodes."""
    running = scene.running
    return Scene(
        scene.view.part(places), scene.plan, None if running is None else running.part(places)
    )


def _code(reason: Reason) -> RefusalCode:
    if reason.kind == NO_DEVICES:
        return "NodeUnregistered"
    if reason.kind == TOO_FEW:
        return "NodeInsufficientDevice"
    if reason.kind == SOME_FIT:
        return "AllocatedCardsInsufficientRequest"
    return CODE_BY_STAGE[Stage(reason.stage)]


def _amounts(scene: Scene, step: Step, stages: Stages, stage: Stage) -> tuple[Ints | int, Ints]:
    """Return (requested, free) of the stage's resource for each device.

    A single number where all devices have the same requested amount.
    """
    view, _, running = scene
    block, request = view.block, step.request
    wanted: Ints | int = 0
    free: Ints | Shorts | Counts
    if stage == Stage.FOREIGN:
        wanted = view.ints(block.memory_mib)
        free = wanted - _cause_mib(view, stage)
    elif stage in (Stage.MEMORY, Stage.FOREIGN_MIB, Stage.BURST_MIB):
        wanted = wanted_mib(view, request)
        free = view.ints(block.free_mib) - (0 if running is None else running.mib)
    elif stage == Stage.LARGEST:
        wanted = wanted_mib(view, request)
        free = view.ints(block.largest_mib) - view.ints(block.foreign_mib)
    elif stage == Stage.CORE:
        core = wanted_core(view, request)
        wanted = core if isinstance(core, int) else core.astype(np.int64)
        free = view.shorts(block.free_core) - (0 if running is None else running.core)
    elif stage == Stage.UNITS:
        wanted = 1
        free = view.shorts(block.free_core)
    elif stage == Stage.SLOT:
        wanted = 1
        free = view.shorts(block.slots) - view.shorts(block.used_slots)
        free = free - (0 if running is None else running.slots)
    elif stage == Stage.NUMA:
        wanted = request.count
        free = beside_counts(view, stages >= Stage.NUMA)
    elif stage == Stage.SHAPE:
        wanted = request.count
        free = np.broadcast_to(count_of(stages >= Stage.SHAPE), stages.shape)
    elif stage == Stage.PARTITION:
        wanted = wanted_mib(view, request)
        free = view.ints(block.free_mib) - (0 if running is None else running.mib)
    else:
        free = np.zeros(stages.shape, np.int64)
    return wanted, free.astype(np.int64, copy=False)


def _has_best(reason: Reason) -> bool:
    """Return whether the text of a class includes its best value."""
    if reason.kind == NONE_FIT:
        return reason.stage in _STAGES_WITH_AMOUNT or reason.stage == Stage.MODE
    return reason.kind != NO_DEVICES


def _fact(plan: Plan, reason: Reason, best: Measure, divisions: Sequence[Division]) -> str:
    """Return the text with the requested and the present value."""
    if reason.kind == NO_DEVICES:
        return "no device of this kind is registered on the node"
    step, where = plan.steps[reason.step], f"({_clip(best.node, _NAME_SHOWN)})"
    if reason.kind == TOO_FEW:
        return f"{best.wanted} devices wanted, at most {best.free} on a node {where}"
    stage = Stage(reason.stage)
    if reason.kind == SOME_FIT:
        return (
            f"{best.wanted} devices wanted, at most {best.free} fit on a node {where}"
            f"; others {CODE_BY_STAGE[stage]}"
        )
    if stage == Stage.LARGEST:
        return f"{best.wanted} MiB wanted, a recalled share has at most {best.free} MiB {where}"
    if stage <= Stage.CORDON:
        return _fact_of_kind(step, stage)
    if stage == Stage.PARTITION and best.lack is not None:
        lack = best.lack
        return f"{_fact_of_partition(divisions[lack.division], lack, best)} {where}"
    if stage in _STAGES_OF_AMOUNT:
        return _fact_of_amount(step, stage, best, where)
    match stage:
        case Stage.SLOT:
            return "every slot of the devices is taken"
        case Stage.HELD | Stage.IDLE:
            wants_idle = plan.mutex or step.request.exclusive
            return "no device is idle" if wants_idle else "every device is held exclusively"
        case Stage.KIND:
            kind = f" than {step.request.kind}" if step.request.kind else ""
            return f"every device with room serves shares of another kind{kind}"
        case Stage.SHAPE:
            shape = step.request.shape
            return f"{best.wanted} devices in {shape} wanted, {best.free} fit but not so {where}"
        case _:
            return f"{best.wanted} devices of one NUMA node wanted, at most {best.free} fit {where}"


def _hint(plan: Plan, reason: Reason, best: Measure) -> str:
    """Return the end of the text: the annotation that causes the refusal or would lift it."""
    if reason.kind == NO_DEVICES:
        return ""
    step = plan.steps[reason.step]
    keys, selector = remedies_of(step.request.vendor), step.selector
    if best.remedy:
        _, word = keys.modes[best.remedy - 1]
        return f"; write {keys.mode}: {word}" if word else f"; remove {keys.mode}"
    if reason.kind == TOO_FEW:
        return ""
    key = ""
    match Stage(reason.stage):
        case Stage.TYPE:
            listed = keys.allow_types if selector.allow_types else keys.deny_types
            key = one_of(listed, step.request) if _names_types(step) else ""
        case Stage.UUID:
            listed = keys.allow_uuids if selector.allow_uuids else keys.deny_uuids
            key = one_of(listed, step.request)
        case Stage.MODE:
            key = keys.mode if selector.modes else ""
        case Stage.NUMA:
            key = keys.numa_bind
        case Stage.HELD if plan.mutex and not step.request.exclusive:
            key = f"{DEVICE_POLICY}: mutex"
        case Stage.KIND:
            key = keys.key_of_kind(step.request.kind)
        case _:
            pass
    return f" (annotation {key})" if key else ""


def _names_types(step: Step) -> bool:
    return bool(step.selector.allow_types or step.selector.deny_types)


def _fact_of_amount(step: Step, stage: Stage, best: Measure, where: str) -> str:
    """Return the text with the amount requested of a device and the free amount."""
    request = step.request
    match stage:
        case Stage.MEMORY:
            note = f" ({request.memory_pct}%)" if request.memory_pct else ""
            if request.memory_mib:
                asked = request.memory_mib
                note = f" (for {asked})" if asked != best.wanted else ""
            free = max(0, best.free)
            return f"{best.wanted} MiB{note} wanted, at most {free} MiB free on a device {where}"
        case Stage.FOREIGN:
            return f"no device is unused, {best.cause_mib} MiB {_OUTSIDE} {where}"
        case Stage.FOREIGN_MIB | Stage.BURST_MIB:
            free, use = max(0, best.free), _OUTSIDE if stage == Stage.FOREIGN_MIB else _BEYOND
            return f"{best.wanted} MiB wanted, {free} free, {best.cause_mib} {use} {where}"
        case Stage.CORE:
            return f"{best.wanted}% compute wanted, at most {best.free}% free on a device {where}"
        case _:
            return "all compute of the devices is handed out"


def _fact_of_partition(division: Division, lack: Lack, best: Measure) -> str:
    """Return the text with the requested partition, the free amount, and why it does not fit."""
    profile = division.profiles[lack.profile]
    wanted = f"{profile.name or 'a whole device'} ({best.wanted} MiB) wanted"
    if lack.amount < 0:
        rest = f"{lack.left} of {division.positions} positions"
        return f"{wanted}: no place, {rest} and {best.free} MiB free"
    name = division.names[lack.amount]
    total, needed = int(division.capacity[lack.amount]), profile.need().get(name, 0)
    if name == f"limit {profile.name}":
        return f"{wanted}: {total} at most at a time, {best.free} MiB free"
    if not total:
        return f"{wanted}: {name}"
    return f"{wanted}: {needed} {name} needed, {lack.left} of {total} and {best.free} MiB free"


_FACTS: Final = {
    Stage.AGENT: "the node's agent is silent or not registered with kubelet",
    Stage.WITHHELD: "a record of the node cannot be read; see GET /v1/quarantine",
    Stage.HEALTH: "no device is healthy",
    Stage.CORDON: "every healthy device is cordoned",
    Stage.OVERCOMMIT: "every device is overcommitted, and the pod's class is guaranteed",
}


def _fact_of_kind(step: Step, stage: Stage) -> str:
    """Return the text of a property that no device of the node has."""
    selector = step.selector
    match stage:
        case _ if stage in _FACTS:
            return _FACTS[stage]
        case Stage.TYPE:
            lists = _lists(selector.allow_types or step.request.types, selector.deny_types)
            return f"no device is of a type wanted: {lists}"
        case Stage.MODE:
            modes = selector.modes or step.request.modes
            if selector.min_isolation:
                least = ",".join(f"{name}={grade}" for name, grade in selector.min_isolation)
                return f"no device that suits isolates a share by {least} ({MIN_ISOLATION})"
            if not modes and step.request.exclusive:
                return "every device is divided in hardware, and the pod does not ask for a part"
            if not modes and step.request.count > 1:
                return (
                    f"{step.request.count} devices wanted; neither hardware parts nor devices given"
                    " whole only count"
                )
            if not modes:
                return "every device is given whole only, or divided in ways that do not suit"
            return f"no device is in mode {_clip(' or '.join(modes), _WORDS_SHOWN)}"
        case Stage.SIZE:
            return f"no device has a partition of the size wanted: {_size_wanted(step)}"
        case _:
            lists = _lists(selector.allow_uuids, selector.deny_uuids)
            return f"no device has a UUID wanted: {lists}"


def _size_wanted(step: Step) -> str:
    request = step.request
    words = [request.profile] if request.profile else [f"{n} {name}" for name, n in request.exact]
    if not words:
        words = [f"{request.memory_mib} MiB" if request.memory_mib else f"{request.memory_pct}%"]
        words += [f"{request.core_pct}% compute"] if request.core_pct else []
    return _clip(", ".join(words), _WORDS_SHOWN)


def _lists(allow: tuple[str, ...], deny: tuple[str, ...]) -> str:
    words = [*allow, *(f"not {word}" for word in deny)]
    return _clip(", ".join(words), _WORDS_SHOWN)


def _prefix(request: PodRequest, plan: Plan, number: int) -> str:
    """Return the container and vendor that a reason is about, where the pod has several."""
    if not plan.steps:
        return ""
    step = plan.steps[number]
    words = []
    if len(request.containers) > 1:
        words.append(_clip(request.containers[step.container].name, _WORDS_SHOWN))
    if len({other.request.vendor for other in plan.steps}) > 1:
        words.append(step.request.vendor)
    alike = [
        place
        for place, other in enumerate(plan.steps)
        if (other.container, other.request.vendor) == (step.container, step.request.vendor)
    ]
    if len(alike) > 1:
        words.append(f"part {alike.index(number) + 1} of {len(alike)}")
    return f"{' '.join(words)}: " if words else ""


def _clip(text: str, length: int) -> str:
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= length else text[: length - 2] + ".."


def unregistered(request: PodRequest, node: str) -> NodeRefusal:
    """Return the refusal of a node without known devices."""
    reason = Reason(0, -1, NO_DEVICES)
    return _refusal(request, compile_request(request), reason, Measure(0, 0, node))


def refusal_of(view: View, request: PodRequest, plan: Plan, outcome: Outcome) -> NodeRefusal:
    """Return the reason why the one node of ``view`` refuses the pod."""
    found = causes(view, plan, outcome.failed)
    best = _measure(found, 0, view.name(0))
    return _refusal(request, plan, _reason(int(found.word[0])), best, view.table.divisions)


def explain(table: DeviceTable, request: PodRequest, node: str) -> NodeExplanation:
    """Explain each step's verdict by each device of ``node``, as the decision evaluates them.

    Where the pod does not fit, its steps are placed by preference up to the one that fails. Where
    the node has too few devices for a step, only that step is explained.
    """
    found = table.place(node)
    if found is None:
        return NodeExplanation(node=node, fits=False, refusal=unregistered(request, node))
    plan = compile_request(request)
    view = View(table, found.block, np.array([found.column], np.intp))
    outcome = place(view, plan, choose=True)
    fits = bool(outcome.fits[0])
    lacking = int(lacking_step(view, plan)[0])
    numbers = range(len(plan.steps)) if lacking < 0 else (lacking,)
    return NodeExplanation(
        node=node,
        fits=fits,
        refusal=None if fits else refusal_of(view, request, plan, outcome),
        steps=_explain_steps(view, request, plan, numbers, outcome if fits else None),
    )


def _explain_steps(
    view: View, request: PodRequest, plan: Plan, numbers: Iterable[int], placed: Outcome | None
) -> tuple[StepExplanation, ...]:
    """Explain the steps in order with their devices: by preference if none were placed."""
    walk = Walk(view, plan, attempts(plan)[0].keys)
    everywhere = np.ones(1, np.bool_)
    uuids = view.block.uuids[view.column(0)]
    steps: list[StepExplanation] = []
    for number in numbers:
        step = plan.steps[number]
        passing = passes(walk.scene, step)
        enough = bool(has_enough(view, step, passing)[0])
        verdicts = _verdicts(walk.scene, step)
        if enough:
            offered = passing if placed is None else placed.chosen[number]
            taken = walk.take(step, passing=offered, fits=everywhere)
            mine = {uuids[row] for row in np.flatnonzero(taken[:, 0])}
            verdicts = [replace(v, taken=True) if v.uuid in mine else v for v in verdicts]
        steps.append(
            StepExplanation(
                container=request.containers[step.container].name,
                vendor=step.request.vendor,
                count=step.request.count,
                devices=tuple(verdicts),
            )
        )
        if not enough:
            break
    return tuple(steps)


def _verdicts(scene: Scene, step: Step) -> list[DeviceVerdict]:
    stages = reached(scene, step)
    verdicts: list[DeviceVerdict] = []
    for row, uuid in enumerate(scene.view.block.uuids[scene.view.column(0)]):
        stage = int(stages[row, 0])
        if stage < 0:
            continue
        fits = stage == Stage.FITS
        verdict = DeviceVerdict(uuid=uuid) if fits else _refused(scene, step, stages, row, uuid)
        foreign_mib = int(_cause_mib(scene.view, Stage.FOREIGN_MIB)[row, 0])
        burst_mib = int(_cause_mib(scene.view, Stage.BURST_MIB)[row, 0])
        verdicts.append(replace(verdict, foreign_mib=foreign_mib, burst_mib=burst_mib))
    return verdicts


def _refused(scene: Scene, step: Step, stages: Stages, row: int, uuid: str) -> DeviceVerdict:
    """Return the verdict of the device in ``row`` of a single node, which does not fit."""
    stage = Stage(int(stages[row, 0]))
    code = CODE_BY_STAGE[stage]
    if stage == Stage.PARTITION:
        lack = Lack.of(int(_lacks(scene, step)[row, 0]))
        if lack is not None and lack.amount < 0:
            return DeviceVerdict(uuid=uuid, code=code, wanted=1, resource="place")
        if lack is not None:
            division = scene.view.table.divisions[lack.division]
            return DeviceVerdict(
                uuid=uuid,
                code=code,
                wanted=int(division.needs[lack.profile][lack.amount]),
                free=lack.left,
                resource=division.names[lack.amount],
            )
    wanted, free = _amounts(scene, step, stages, stage)
    return DeviceVerdict(
        uuid=uuid,
        code=code,
        wanted=wanted if isinstance(wanted, int) else int(wanted[row, 0]),
        free=int(free[row, 0]),
    )
