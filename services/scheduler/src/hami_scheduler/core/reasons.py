# SPDX-License-Identifier: Apache-2.0
"""Why a pod does not fit: a closed set of refusal codes, and the texts that people read.

Codes are the words HAMi's users know where HAMi has one. A node's reason is its binding constraint:
how far its best device got, and if some devices fit but too few, what stops the best of the others.
All nodes with one reason form a class and get the same text, because kube-scheduler groups nodes by
text: what is wanted, and the best free value of the class with the node that has it. One answer has
at most ``CLASSES_SHOWN`` texts of at most ``TEXT_BYTES``, so a pod's condition stays under 1 KiB.

Everything is read from the constraints of ``fit``, looked at one by one, on the nodes that failed.
Memory in MiB, compute in percent of one device.
"""

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from hami_common.events.decision import NODES_LISTED, RefusalClass
from hami_common.model.request import PodRequest
from hami_scheduler.core.block import Ints, Shorts
from hami_scheduler.core.fit import (
    Counts,
    Plan,
    Scene,
    Stage,
    Step,
    View,
    beside_counts,
    compile_request,
    count_of,
    has_enough,
    known_devices,
    passes,
    reached,
    wanted_mib,
)
from hami_scheduler.core.placing import (
    Attempt,
    Outcome,
    Walk,
    attempts,
    lacking_step,
    place,
)
from hami_scheduler.core.table import DeviceTable

RefusalCode = Literal[
    "NodeUnregistered",
    "NodeInsufficientDevice",
    "NodeAgentSilent",
    "CardNotHealth",
    "CardCordoned",
    "CardTypeMismatch",
    "ModeNotFit",
    "CardUuidMismatch",
    "CardTimeSlicingExhausted",
    "ExclusiveDeviceAllocateConflict",
    "CardInsufficientMemory",
    "CardInsufficientCore",
    "CardComputeUnitsExhausted",
    "NumaNotFit",
    "AllocatedCardsInsufficientRequest",
    "ReservationInDoubt",
    "ShareLost",
    "OtherReasons",
]

CODE_BY_STAGE: Final[dict[Stage, RefusalCode]] = {
    Stage.AGENT: "NodeAgentSilent",
    Stage.HEALTH: "CardNotHealth",
    Stage.CORDON: "CardCordoned",
    Stage.TYPE: "CardTypeMismatch",
    Stage.MODE: "ModeNotFit",
    Stage.UUID: "CardUuidMismatch",
    Stage.SLOT: "CardTimeSlicingExhausted",
    Stage.HELD: "ExclusiveDeviceAllocateConflict",
    Stage.MEMORY: "CardInsufficientMemory",
    Stage.CORE: "CardInsufficientCore",
    Stage.UNITS: "CardComputeUnitsExhausted",
    Stage.IDLE: "ExclusiveDeviceAllocateConflict",
    Stage.NUMA: "NumaNotFit",
}

RESOLVABLE: Final[frozenset[RefusalCode]] = frozenset(
    {
        "CardTimeSlicingExhausted",
        "ExclusiveDeviceAllocateConflict",
        "CardInsufficientMemory",
        "CardInsufficientCore",
        "CardComputeUnitsExhausted",
        "NumaNotFit",
        "AllocatedCardsInsufficientRequest",
    }
)
"""Refusals that may go away when other pods end."""

CLASSES_SHOWN: Final = 6
TEXT_BYTES: Final = 140
_NAME_SHOWN: Final = 45
_WORDS_SHOWN: Final = 40
_LAST: Final = np.iinfo(np.intp).max


class NodeRefusal(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why one node does not take the pod."""

    code: RefusalCode
    text: str


class DeviceVerdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one device says to one step."""

    uuid: str
    code: RefusalCode | None = None
    """The first constraint that stops it; ``None`` when it fits."""
    wanted: int = 0
    free: int = 0
    """Of memory in MiB, compute in percent, slots, or devices of one NUMA node.

    As the code implies.
    """
    taken: bool = False
    """Chosen for the step."""


class StepExplanation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One container's request to one vendor: how the node's devices answered, in placing order."""

    container: str
    vendor: str
    count: int
    devices: tuple[DeviceVerdict, ...] = ()

    def fitting(self) -> int:
        """Devices that fit."""
        return sum(device.code is None for device in self.devices)


class NodeExplanation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a node takes a pod or does not. ``steps`` ends with the one that failed."""

    node: str
    fits: bool
    refusal: NodeRefusal | None = None
    steps: tuple[StepExplanation, ...] = ()


class Reason(NamedTuple):
    """What makes a class of refused nodes."""

    step: int
    stage: int
    """Of the best device that does not fit; -1 where that does not matter."""
    kind: int
    """One of the constants below."""


NO_DEVICES, TOO_FEW, NONE_FIT, SOME_FIT = range(4)


class Measure(NamedTuple):
    """Best value of a class, how far it is from what is wanted, and where it is."""

    missing: int
    wanted: int
    free: int
    node: str


class Refusals:
    """The refused nodes of one decision, by class."""

    def __init__(self, request: PodRequest, plan: Plan) -> None:
        """None yet."""
        self._request = request
        self._plan = plan
        self._nodes: dict[Reason, list[str]] = {}
        self._measures: dict[Reason, Measure] = {}
        self._texts: dict[Reason, NodeRefusal] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._nodes.values()))

    def add_unregistered(self, names: Iterable[str]) -> None:
        """Nodes of which no device is known."""
        self._nodes.setdefault(Reason(0, -1, NO_DEVICES), []).extend(names)

    def add(self, view: View, failed: Shorts) -> None:
        """Nodes of ``view``, none of which fits; ``failed`` is the step that stops each."""
        for number in _distinct(failed):
            places = np.flatnonzero(failed == number)
            whole = len(places) == view.count
            self._add_step(view if whole else view.part(places), number)

    def _add_step(self, view: View, number: int) -> None:
        """Nodes that all fail at one step, most often for lack of devices or all alike."""
        step = self._plan.steps[number]
        known = known_devices(view, step.request.vendor)
        kind = np.where(known == 0, NO_DEVICES, TOO_FEW)
        stage = np.full(view.count, -1, np.int32)
        placed = np.flatnonzero(known >= step.request.count)
        if len(placed):
            part = view if len(placed) == view.count else view.part(placed)
            scene = _scene_before(part, self._plan, number)
            stages = reached(scene, step)
            fits = stages == Stage.FITS
            kind[placed] = np.where(fits.any(axis=0), SOME_FIT, NONE_FIT)
            stage[placed] = np.where(fits, -1, stages).max(axis=0)
            for word in _distinct((stage * 4 + kind)[placed]):
                reason = Reason(number, word // 4, word % 4)
                mine = np.flatnonzero((stage * 4 + kind)[placed] == word)
                self._note(part, reason, mine)
                at = scene if len(mine) == part.count else _part(scene, mine)
                self._measure(reason, _measure(at, step, stages[:, mine], reason))
        for lack in (NO_DEVICES, TOO_FEW):
            mine = np.flatnonzero(kind == lack)
            if len(mine):
                reason = Reason(number, -1, lack)
                self._note(view, reason, mine)
                if lack == TOO_FEW:
                    self._measure(reason, _measure_known(view.part(mine), step, known[mine]))

    def _note(self, view: View, reason: Reason, places: NDArray[np.intp]) -> None:
        names = view.names()
        mine = names if len(places) == len(names) else [names[i] for i in places]
        self._nodes.setdefault(reason, []).extend(mine)

    def _measure(self, reason: Reason, measure: Measure) -> None:
        before = self._measures.get(reason)
        self._measures[reason] = measure if before is None else min(before, measure)

    def shown(self) -> dict[Reason, NodeRefusal]:
        """The text of each class; the smallest classes share one when there are many."""
        if self._texts is None:
            by_size = sorted(self._nodes, key=lambda reason: (-len(self._nodes[reason]), reason))
            several = len(by_size) > CLASSES_SHOWN
            shown = by_size[: CLASSES_SHOWN - 1] if several else by_size
            self._texts = {reason: self._refusal(reason) for reason in shown}
            if several:
                rest = NodeRefusal(
                    code="OtherReasons",
                    text=f"OtherReasons: {len(by_size) - len(shown)} more, see hamictl explain",
                )
                self._texts.update((reason, rest) for reason in by_size[len(shown) :])
        return self._texts

    def by_node(self) -> dict[str, str]:
        """The text of each refused node."""
        texts: dict[str, str] = {}
        for reason, refusal in self.shown().items():
            texts.update(dict.fromkeys(self._nodes[reason], refusal.text))
        return texts

    def classes(self) -> tuple[RefusalClass, ...]:
        """The classes, largest first, each exactly as it is: nothing is merged here."""
        return tuple(
            RefusalClass(
                code=(refusal := self._refusal(reason)).code,
                text=refusal.text,
                count=len(nodes),
                nodes=tuple(sorted(nodes)[:NODES_LISTED]),
            )
            for reason, nodes in sorted(
                self._nodes.items(), key=lambda item: (-len(item[1]), item[0])
            )
        )

    def _refusal(self, reason: Reason) -> NodeRefusal:
        code = _code(reason)
        prefix = _prefix(self._request, self._plan, reason.step)
        fact = _fact(self._plan, reason, self._measures.get(reason))
        return NodeRefusal(code=code, text=_clip(f"{code}: {prefix}{fact}", TEXT_BYTES))


def _distinct(line: Shorts) -> list[int]:
    """The different values, in order; most often there is one."""
    first = int(line[0])
    return [first] if (line == first).all() else np.unique(line).tolist()


def _scene_before(view: View, plan: Plan, number: int) -> Scene:
    """What the pod's containers before step ``number`` hold, as the first attempt places them."""
    walk = Walk(view, plan, attempts(plan)[0].keys)
    everywhere = np.ones(view.count, np.bool_)
    for step in plan.steps[:number]:
        walk.take(step, passing=passes(walk.scene, step), fits=everywhere)
    return walk.scene


def _part(scene: Scene, places: NDArray[np.intp]) -> Scene:
    """The scene on some of its nodes."""
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


def _amounts(scene: Scene, step: Step, stages: Shorts, stage: Stage) -> tuple[Ints, Ints]:
    """(wanted, free) of what the stage is about, for each device."""
    view, _, running = scene
    block, request = view.block, step.request
    wanted: Ints | int = 0
    free: Ints | Shorts = np.zeros(stages.shape, np.int64)
    if stage == Stage.MEMORY:
        wanted = wanted_mib(view, request)
        free = view.ints(block.free_mib) - (0 if running is None else running.mib)
    elif stage in (Stage.CORE, Stage.UNITS):
        wanted = max(1, request.core_pct)
        free = view.shorts(block.free_core) - (0 if running is None else running.core)
    elif stage == Stage.SLOT:
        wanted = 1
        free = view.shorts(block.slots) - view.shorts(block.used_slots)
        free = free - (0 if running is None else running.slots)
    elif stage == Stage.NUMA:
        wanted = request.count
        free = beside_counts(view, stages >= Stage.NUMA)
    return np.broadcast_to(np.asarray(wanted, np.int64), stages.shape), free.astype(np.int64)


def _measure(scene: Scene, step: Step, stages: Shorts, reason: Reason) -> Measure:
    """The best value among the nodes of ``scene``, all of one class; by name among equals."""
    view, ranks = scene.view, scene.view.name_ranks()
    if reason.kind == SOME_FIT:
        return _measure_known(view, step, count_of(stages == Stage.FITS))
    wanted_by, free_by = _amounts(scene, step, stages, Stage(reason.stage))
    missing = np.where(stages == reason.stage, wanted_by - free_by, np.iinfo(np.int64).max)
    per_node = missing.min(axis=0)
    least = int(per_node.min())
    at = int(np.where(per_node == least, ranks, _LAST).argmin())
    row = int(missing[:, at].argmin())
    return Measure(least, int(wanted_by[row, at]), int(free_by[row, at]), view.name(at))


def _measure_known(view: View, step: Step, have: Counts | Ints) -> Measure:
    """The most devices that a node of ``view`` has, or has fitting; by name among equals."""
    wanted, best = step.request.count, int(have.max())
    at = int(np.where(have == best, view.name_ranks(), _LAST).argmin())
    return Measure(wanted - best, wanted, best, view.name(at))


def _fact(plan: Plan, reason: Reason, best: Measure | None) -> str:
    """What is wanted and what is there."""
    if reason.kind == NO_DEVICES or best is None:
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
    if stage <= Stage.CORDON:
        return _fact_of_kind(step, stage)
    match stage:
        case Stage.SLOT:
            return "every slot of the devices is taken"
        case Stage.HELD | Stage.IDLE:
            wants_idle = plan.mutex or step.request.exclusive
            return "no device is idle" if wants_idle else "every device is held exclusively"
        case Stage.MEMORY:
            percent = "" if step.request.memory_mib else f" ({step.request.memory_pct}%)"
            return (
                f"{best.wanted} MiB{percent} wanted, at most {best.free} MiB free"
                f" on a device {where}"
            )
        case Stage.CORE:
            return f"{best.wanted}% compute wanted, at most {best.free}% free on a device {where}"
        case Stage.UNITS:
            return "all compute of the devices is handed out"
        case _:
            return f"{best.wanted} devices of one NUMA node wanted, at most {best.free} fit {where}"


def _fact_of_kind(step: Step, stage: Stage) -> str:
    """What no device of the node is."""
    selector = step.selector
    match stage:
        case Stage.AGENT:
            return "the node's agent is silent or not registered with kubelet"
        case Stage.HEALTH:
            return "no device is healthy"
        case Stage.CORDON:
            return "every healthy device is cordoned"
        case Stage.TYPE:
            lists = _lists(selector.allow_types, selector.deny_types)
            return f"no device is of a type wanted: {lists}"
        case Stage.MODE:
            return f"no device is in mode {_clip(' or '.join(selector.modes), _WORDS_SHOWN)}"
        case _:
            lists = _lists(selector.allow_uuids, selector.deny_uuids)
            return f"no device has a UUID wanted: {lists}"


def _lists(allow: tuple[str, ...], deny: tuple[str, ...]) -> str:
    words = [*allow, *(f"not {word}" for word in deny)]
    return _clip(", ".join(words), _WORDS_SHOWN)


def _prefix(request: PodRequest, plan: Plan, number: int) -> str:
    """Which container and vendor a reason is about, where the pod has several."""
    if not plan.steps:
        return ""
    step = plan.steps[number]
    words = []
    if len(request.containers) > 1:
        words.append(_clip(request.containers[step.container].name, _WORDS_SHOWN))
    if len({other.request.vendor for other in plan.steps}) > 1:
        words.append(step.request.vendor)
    return f"{' '.join(words)}: " if words else ""


def _clip(text: str, length: int) -> str:
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= length else text[: length - 2] + ".."


def unregistered(request: PodRequest) -> NodeRefusal:
    """The refusal of a node of which no device is known."""
    refusals = Refusals(request, compile_request(request))
    refusals.add_unregistered([""])
    return next(iter(refusals.shown().values()))


def refusal_of(view: View, request: PodRequest, plan: Plan, outcome: Outcome) -> NodeRefusal:
    """Why the one node of ``view`` does not take the pod."""
    refusals = Refusals(request, plan)
    refusals.add(view, outcome.failed)
    return next(iter(refusals.shown().values()))


def explain(table: DeviceTable, request: PodRequest, node: str) -> NodeExplanation:
    """How each device of ``node`` answers each step, as the decision itself looks at them.

    Where the pod fits, the steps are those of the attempt that succeeded; else those of the first.
    Where the node has too few devices for a step, it is that step alone.
    """
    found = table.place(node)
    if found is None:
        return NodeExplanation(node=node, fits=False, refusal=unregistered(request))
    plan = compile_request(request)
    view = View(table, found.block, np.array([found.column], np.intp))
    lacking = int(lacking_step(view, plan)[0])
    if lacking >= 0:
        ways: tuple[Attempt, ...] = (Attempt(order=(lacking,), keys=()),)
    else:
        ways = attempts(plan)
    told = [_tell(view, request, plan, way) for way in ways]
    for fits, steps in told:
        if fits:
            return NodeExplanation(node=node, fits=True, steps=steps)
    return NodeExplanation(
        node=node,
        fits=False,
        refusal=refusal_of(view, request, plan, place(view, plan, choose=False)),
        steps=told[0][1],
    )


def _tell(
    view: View, request: PodRequest, plan: Plan, way: Attempt
) -> tuple[bool, tuple[StepExplanation, ...]]:
    walk = Walk(view, plan, way.keys)
    everywhere = np.ones(1, np.bool_)
    steps: list[StepExplanation] = []
    for number in way.order:
        step = plan.steps[number]
        scene, passing = walk.scene, passes(walk.scene, step)
        enough = bool(has_enough(view, step, passing)[0])
        verdicts = _verdicts(scene, step)
        if enough:
            taken = walk.take(step, passing=passing, fits=everywhere)
            uuids = view.block.uuids[view.column(0)]
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
            return False, tuple(steps)
    return True, tuple(steps)


def _verdicts(scene: Scene, step: Step) -> list[DeviceVerdict]:
    stages = reached(scene, step)
    verdicts: list[DeviceVerdict] = []
    for row, uuid in enumerate(scene.view.block.uuids[scene.view.column(0)]):
        stage = int(stages[row, 0])
        if stage == Stage.FITS:
            verdicts.append(DeviceVerdict(uuid=uuid))
        elif stage >= 0:
            wanted, free = _amounts(scene, step, stages, Stage(stage))
            verdicts.append(
                DeviceVerdict(
                    uuid=uuid,
                    code=CODE_BY_STAGE[Stage(stage)],
                    wanted=int(wanted[row, 0]),
                    free=int(free[row, 0]),
                )
            )
    return verdicts
