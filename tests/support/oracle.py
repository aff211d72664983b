# SPDX-License-Identifier: Apache-2.0
"""The scheduler's decisions, implemented again in plain loops over plain objects.

Written for clarity, not for speed: the columns of ``hami_core`` must agree with it on every table,
request and policy. It shares with them only the nouns of ``hami_common.model`` and their
computations (booking rule, percentages, selectors). Memory in MiB, compute in percent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import comb, prod

from msgspec.structs import replace

from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.model.placement import (
    NOTHING,
    Booked,
    ContainerShares,
    Placement,
    Share,
    booked_by_device,
    stays,
)
from hami_common.model.request import (
    NAMED_MODES,
    DeviceRequest,
    DeviceSelector,
    PodRequest,
    serves_mode,
    wants_parts,
)
from hami_common.vendors.partitions import (
    NO_START,
    Division,
    Grant,
    assign_starts,
    choose_start,
)
from hami_common.vendors.shapes import LegalSet, legal_sets


@dataclass
class OracleDevice:
    """One device and its bookings."""

    uuid: str
    vendor: str
    device: Device | None = None
    """``None`` while it is not registered."""
    healthy: bool = False
    index: int = 2**31 - 1
    board: str = ""
    """Physical card of which it is a part."""
    used: list[Booked] = field(default_factory=list)
    """One entry per pod that holds a share."""

    def used_mib(self) -> int:
        return sum(b.memory_mib for b in self.used)

    def used_core(self) -> int:
        return sum(b.core_pct for b in self.used)

    def used_slots(self) -> int:
        return sum(b.slots for b in self.used)

    def is_held(self) -> bool:
        return any(b.exclusive for b in self.used)

    def kinds(self) -> set[str]:
        return {b.kind for b in self.used if b.kind}

    def parts(self) -> dict[str, int]:
        total = NOTHING
        for booked in self.used:
            total = total.plus(booked)
        return total.parts

    def division(self) -> Division | None:
        """The device's table of partitions, ``None`` where its shares have any size."""
        if self.device is None or not self.device.partitions:
            return None
        return Division(self.device.partitions, self.device.resources)

    def grant(self, request: DeviceRequest) -> Grant | None:
        """The request's size here, ``None`` where no profile fits."""
        division = self.division()
        if division is not None:
            return division.grant(request)
        if self.device is None or request.profile or request.exact:
            return None
        mib = request.memory_mib_on(self.device.memory_mib)
        return Grant(-1, mib, request.core_pct, request.exclusive, request.kind)

    def limits(self, request: DeviceRequest, grant: Grant, profile: str) -> tuple[int, int]:
        """Limits of memory and compute above a share's request; 0: none."""
        device = self.device
        assert device is not None
        if profile or grant.exclusive or device.mode in NAMED_MODES:
            return 0, 0
        core_limit_pct = request.core_limit_pct if grant.core_pct else 0
        if device.largest_mib or device.capacity_mib > device.memory_mib:
            return 0, core_limit_pct
        most = min(request.memory_limit_mib, device.memory_mib)
        return (most if most > grant.memory_mib else 0), core_limit_pct


@dataclass
class OracleNode:
    """One node."""

    devices: dict[str, OracleDevice] = field(default_factory=dict)
    alive: dict[str, bool] = field(default_factory=dict)
    links: dict[str, dict[frozenset[str], int]] = field(default_factory=dict)

    def registered(self, vendor: str) -> list[OracleDevice]:
        """The vendor's registered devices, in order."""
        mine = [d for d in self.devices.values() if d.vendor == vendor and d.device is not None]
        return sorted(mine, key=lambda d: (d.index, d.uuid))


STAGES = (
    "CardTypeMismatch",
    "ModeNotFit",
    "CardPartitionMismatch",
    "CardShareTooLarge",
    "CardOvercommitted",
    "CardUuidMismatch",
    "NodeAgentSilent",
    "CardNotHealth",
    "CardCordoned",
    "CardForeignUse",  # requested exclusively
    "CardTimeSlicingExhausted",
    "ExclusiveDeviceAllocateConflict",  # a pod holds it, or it is not idle under mutex
    "CardQosPolicyMismatch",
    "CardInsufficientMemory",
    "CardForeignUse",  # the memory would suffice without it
    "CardBurstUse",  # the memory would suffice without it, beside foreign use
    "CardInsufficientCore",
    "CardComputeUnitsExhausted",
    "CardPartitionInfeasible",
    "ExclusiveDeviceAllocateConflict",  # it is not idle, and requested exclusively
    "NumaNotFit",
    "CardTopologyInfeasible",
)
"""Constraints in the order in which they are checked."""
LARGEST = 3
FOREIGN, SLOT, HELD, KIND, MEMORY, FOREIGN_MIB, BURST_MIB = range(9, 16)
CORE, UNITS, PARTITION, IDLE, NUMA, SHAPE = range(16, 22)

MOST_CHOICES = 2048
"""All choices of devices are tried where there are at most this many before the last step's."""


@dataclass(frozen=True)
class Verdict:
    """Answer of one device to one step: the first constraint that refuses it, if any."""

    uuid: str
    stage: int | None
    wanted: int = 0
    free: int = 0

    @property
    def code(self) -> str | None:
        return None if self.stage is None else STAGES[self.stage]


@dataclass
class Step:
    """One container's request to one vendor."""

    container: int
    kind: str
    request: DeviceRequest
    selector: DeviceSelector
    is_part: bool = False
    """One of several partitions for one container, which may be parts of one device."""


@dataclass
class Tried:
    """One attempt to place a pod on a node."""

    shares: dict[int, list[ContainerShares]] = field(default_factory=dict)
    failed: int | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    """Of the step that failed."""


class Oracle:
    """A cluster, and the decisions about it."""

    def __init__(self) -> None:
        self.nodes: dict[str, OracleNode] = {}

    # --- events --------------------------------------------------------------------------------

    def upsert_node(self, message: NodeDevices) -> None:
        node = self.nodes.get(message.node)
        if node is None:
            if not message.devices:
                return
            node = self.nodes[message.node] = OracleNode()
        node.alive.setdefault(message.vendor, True)
        node.links[message.vendor] = {
            frozenset((link.a, link.b)): link.score for link in message.links
        }
        listed = {device.uuid for device in message.devices}
        for known in node.devices.values():
            if known.vendor == message.vendor and known.uuid not in listed:
                known.device = None
        for device in message.devices:
            here = node.devices.setdefault(
                device.uuid, OracleDevice(uuid=device.uuid, vendor=message.vendor)
            )
            here.vendor, here.device = message.vendor, device
            here.healthy, here.index = device.healthy, device.index
            here.board = device.attributes.get("board", "")
        self._tidy(message.node)

    def remove_node(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is None:
            return
        for device in node.devices.values():
            device.device = None
        node.alive.clear()
        node.links.clear()
        self._tidy(name)

    def set_health(self, name: str, uuid: str, *, healthy: bool) -> None:
        node = self.nodes.get(name)
        if node is not None and uuid in node.devices and node.devices[uuid].device is not None:
            node.devices[uuid].healthy = healthy

    def set_node_alive(self, name: str, vendor: str, *, alive: bool) -> None:
        node = self.nodes.get(name)
        if node is not None and vendor in node.alive:
            node.alive[vendor] = alive

    def book(self, name: str, containers: Iterable[ContainerShares]) -> None:
        containers = tuple(containers)
        node = self.nodes.setdefault(name, OracleNode())
        vendors = {s.uuid: s.vendor for c in containers for s in c.shares}
        for uuid, booked in booked_by_device(containers).items():
            here = node.devices.setdefault(uuid, OracleDevice(uuid=uuid, vendor=vendors[uuid]))
            here.used.append(booked)

    def unbook(self, name: str, containers: Iterable[ContainerShares]) -> None:
        for uuid, booked in booked_by_device(containers).items():
            self.nodes[name].devices[uuid].used.remove(booked)
        self._tidy(name)

    def _tidy(self, name: str) -> None:
        node = self.nodes[name]
        for uuid in [u for u, d in node.devices.items() if d.device is None and not d.used]:
            del node.devices[uuid]
        if not node.devices and not node.alive:
            del self.nodes[name]

    # --- one step ------------------------------------------------------------------------------

    def verdicts(
        self, request: PodRequest, name: str, step: Step, running: dict[str, Booked]
    ) -> list[Verdict]:
        """Answers of the vendor's registered devices to a step, beside the pod's other shares."""
        node = self.nodes[name]
        found = [
            self._verdict(request, node, device, step, running.get(device.uuid, NOTHING))
            for device in node.registered(step.request.vendor)
        ]
        legal = {n for some in self._open_sets(name, step, found) for n in some.indexes}
        first = self._first_by_index(name, found)
        if step.selector.numa_bind:
            fitting: dict[int | None, int] = {}
            for verdict in found:
                if verdict.code is None:
                    numa = _numa(node.devices[verdict.uuid])
                    fitting[numa] = fitting.get(numa, 0) + 1
            bound: list[Verdict] = []
            for verdict in found:
                beside = fitting.get(_numa(node.devices[verdict.uuid]), 0)
                if verdict.stage is None and beside < step.request.count:
                    bound.append(Verdict(verdict.uuid, NUMA, step.request.count, beside))
                else:
                    bound.append(verdict)
            found = bound
        if not step.request.shape:
            return found
        members = {first[n] for n in legal}
        many = sum(v.stage is None for v in found)
        return [
            Verdict(v.uuid, SHAPE, step.request.count, many)
            if v.stage is None and v.uuid not in members
            else v
            for v in found
        ]

    def _first_by_index(self, name: str, verdicts: list[Verdict]) -> dict[int, str]:
        """By the vendor's index: the first device that fits."""
        first: dict[int, str] = {}
        for verdict in verdicts:
            if verdict.stage is None:
                first.setdefault(self.nodes[name].devices[verdict.uuid].index, verdict.uuid)
        return first

    def _open_sets(self, name: str, step: Step, verdicts: list[Verdict]) -> list[LegalSet]:
        """The shape's sets whose devices all fit."""
        first = self._first_by_index(name, verdicts)
        devices = self.nodes[name].devices
        return [
            some
            for some in legal_sets(step.request.shape, step.request.count)
            if all(n in first for n in some.indexes)
            and (
                not step.selector.numa_bind
                or len({_numa(devices[first[n]]) for n in some.indexes}) == 1
            )
        ]

    def _verdict(
        self,
        request: PodRequest,
        node: OracleNode,
        here: OracleDevice,
        step: Step,
        mine: Booked,
    ) -> Verdict:
        device, wants = here.device, step.request
        assert device is not None
        mutex = "mutex" in request.policy.device
        is_beside_used = here.board and any(
            (other.vendor, other.board) == (here.vendor, here.board) and other.used_slots()
            for other in node.devices.values()
        )
        used_slots = here.used_slots() + mine.slots
        own_mib = device.capacity_mib - here.used_mib() - mine.memory_mib
        burst_mib = sum(burst.memory_mib for burst in device.bursts)
        unused_mib = own_mib - device.foreign_mib
        free_mib = unused_mib - burst_mib
        largest_mib = device.largest_mib - device.foreign_mib - burst_mib
        left_core = device.capacity_core_pct - here.used_core()
        free_core = left_core - mine.core_pct
        grant = here.grant(wants)
        divided = bool(device.partitions)
        for stage, passes in enumerate(
            (
                step.selector.accepts_type(device.type)
                and (not wants.types or device.type in wants.types),
                serves_mode(
                    wants,
                    step.selector,
                    device.mode,
                    divided=divided,
                    memory_cap=device.memory_cap,
                )
                and (not step.is_part or self._is_given_in_parts(here, grant)),
                grant is not None,
                grant is None or not device.largest_mib or grant.memory_mib <= largest_mib,
                not step.selector.no_overcommit
                or (device.capacity_mib <= device.memory_mib and device.capacity_core_pct <= 100),
                step.selector.accepts_uuid(here.uuid),
                node.alive.get(here.vendor, False),
                here.healthy,
                not device.cordoned,
                not (wants.exclusive and device.foreign_mib),
            )
        ):
            amounts = {
                LARGEST: (0 if grant is None else grant.memory_mib, largest_mib),
                FOREIGN: (device.memory_mib, device.memory_mib - device.foreign_mib),
            }
            if not passes:
                return Verdict(here.uuid, stage, *amounts.get(stage, ()))
        assert grant is not None
        if used_slots >= device.slots:
            return Verdict(here.uuid, SLOT, 1, device.slots - used_slots)
        if here.is_held() or mine.exclusive or (mutex and (used_slots or is_beside_used)):
            return Verdict(here.uuid, HELD)
        kinds = here.kinds() | ({mine.kind} if mine.kind else set())
        beside = {grant.kind, "offline"} if grant.kind == "online" else {grant.kind}
        if grant.kind and kinds - beside:
            return Verdict(here.uuid, KIND)
        if free_mib < grant.memory_mib:
            would = ((own_mib, MEMORY), (unused_mib, FOREIGN_MIB), (free_mib, BURST_MIB))
            short = next(stage for left, stage in would if left < grant.memory_mib)
            return Verdict(here.uuid, short, grant.memory_mib, free_mib)
        if grant.core_pct and free_core < grant.core_pct:
            return Verdict(here.uuid, CORE, grant.core_pct, free_core)
        if not grant.core_pct and device.capacity_core_pct and left_core <= 0:
            return Verdict(here.uuid, UNITS, 1, left_core)
        if grant.profile >= 0 and self._start(here, mine, grant)[0] is False:
            return Verdict(here.uuid, PARTITION, *self._lacking(here, mine, grant))
        if wants.exclusive and used_slots:
            return Verdict(here.uuid, IDLE)
        return Verdict(here.uuid, None)

    def _is_given_in_parts(self, here: OracleDevice, grant: Grant | None) -> bool:
        division = here.division()
        if division is None:
            return False
        return grant is None or bool(division.profiles[grant.profile].name)

    def _start(self, here: OracleDevice, mine: Booked, grant: Grant) -> tuple[bool, int | None]:
        """(True when a partition fits beside the existing ones and the pod's, its start)."""
        division = here.division()
        assert division is not None
        profile = division.profiles[grant.profile]
        taken, amounts = division.spent(here.parts())
        mine_taken, mine_amounts = division.spent(mine.parts)
        if (amounts + mine_amounts + division.needs[grant.profile] > division.capacity).any():
            return False, None
        if not profile.starts:
            return True, None
        start = choose_start(profile, taken | mine_taken, division.profiles)
        return start != NO_START, start

    def _lacking(self, here: OracleDevice, mine: Booked, grant: Grant) -> tuple[int, int]:
        """(wanted, free) of what a partition lacks: a place, else the first resource by name."""
        division = here.division()
        assert division is not None
        profile = division.profiles[grant.profile]
        taken, amounts = division.spent(here.parts())
        mine_taken, mine_amounts = division.spent(mine.parts)
        if (
            profile.starts
            and choose_start(profile, taken | mine_taken, division.profiles) == NO_START
        ):
            return 1, 0
        free = (division.capacity - amounts - mine_amounts).tolist()
        needs = division.needs[grant.profile].tolist()
        return next(
            (need, max(has, 0)) for need, has in zip(needs, free, strict=True) if need > has
        )

    def _fullness(
        self, request: PodRequest, here: OracleDevice, step: Step, running: list[Share]
    ) -> float:
        """Fullness of a device: other pods' shares, the pod's shares there, and this one."""
        device, weights = here.device, request.policy.weights
        assert device is not None

        def part(slots: int, core_pct: int, memory_mib: int) -> tuple[float, float, float]:
            per_slot = 1.0 / device.slots if device.slots else 0.0
            per_core = 1.0 / device.capacity_core_pct if device.capacity_core_pct else 0.0
            per_mib = 1.0 / device.capacity_mib if device.capacity_mib else 0.0
            return slots * per_slot, core_pct * per_core, memory_mib * per_mib

        slots, core, memory = part(here.used_slots(), here.used_core(), here.used_mib())
        full = (weights.slot * slots + weights.core * core) + weights.memory * memory

        def added(core_pct: int, memory_mib: int) -> float:
            slot, core, memory = part(1, weights.core * core_pct, weights.memory * memory_mib)
            return (weights.slot * slot + core) + memory

        beside = 0.0
        for share in running:
            beside += added(share.core_pct, share.memory_mib)
        if running:
            full += beside
        grant = here.grant(step.request)
        assert grant is not None
        return full + added(grant.core_pct, grant.memory_mib)

    def _broken(
        self,
        here: OracleDevice,
        step: Step,
        fitting: list[OracleDevice],
        running: list[Share],
    ) -> int:
        """Idle devices in the groups of 4, 8 and 16 around an idle device, and itself."""
        mine = {share.uuid for share in running}
        idle = [one for one in fitting if not one.used_slots() and one.uuid not in mine]
        if step.request.keeps != "aligned" or step.request.count > 1 or here not in idle:
            return 0
        return 1 + sum(
            one is not here and one.index // size == here.index // size
            for one in idle
            for size in (4, 8, 16)
        )

    def _choose(
        self,
        request: PodRequest,
        name: str,
        step: Step,
        keys: Sequence[str],
        fitting: list[OracleDevice],
        running: list[Share],
    ) -> list[OracleDevice]:
        """The step's devices out of those that fit, which are in the vendor's order."""
        node, count = self.nodes[name], step.request.count
        links = node.links.get(step.request.vendor, {})

        def link(a: OracleDevice, b: OracleDevice) -> int:
            return links.get(frozenset((a.uuid, b.uuid)), 0)

        def beside(here: OracleDevice) -> int:
            return sum(_numa(other) == _numa(here) for other in fitting)

        if step.request.shape:
            return self._choose_shaped(name, step, fitting)

        def key(here: OracleDevice) -> tuple[float, ...]:
            mine = [share for share in running if share.uuid == here.uuid]
            full = self._fullness(request, here, step, mine)
            kinds = here.kinds() | {share.kind for share in mine if share.kind}
            grant = here.grant(step.request)
            assert grant is not None
            words: list[float] = [
                *self._excess(here, step),
                self._broken(here, step, fitting, running),
                float(not grant.kind or grant.kind not in kinds),
            ]
            for word in keys:
                if word == "numa":
                    words += [float(beside(here) < count), _numa(here)]
                else:
                    words.append(full if word == "spread" else -full)
            return (*words, _numa(here))

        topology = "topology-aware" in request.policy.device
        order = sorted(fitting, key=key)
        if topology and count == 1:
            order.sort(
                key=lambda here: (
                    self._excess(here, step),
                    self._broken(here, step, fitting, running),
                    sum(link(here, o) for o in fitting if o is not here),
                )
            )
        if count == 1:
            return order[:1]
        groups = [order]
        if step.selector.numa_bind:
            numas = dict.fromkeys(_numa(here) for here in order)
            groups = [[h for h in order if _numa(h) == numa] for numa in numas]
        groups = [group for group in groups if len(group) >= count]
        if not topology:
            return groups[0][:count]
        rank = {here.uuid: place for place, here in enumerate(order)}

        def fitting_of(some: list[OracleDevice]) -> list[OracleDevice]:
            return next(group for group in groups if some[0] in group)

        return min(
            (list(some) for group in groups for some in combinations(group, count)),
            key=lambda some: (
                -sum(link(a, b) for a, b in combinations(some, 2)),
                sum(link(a, b) for a in some for b in fitting_of(some) if b not in some),
                sorted((rank[here.uuid] for here in some), reverse=True),
            ),
        )

    def _choose_shaped(
        self, name: str, step: Step, fitting: list[OracleDevice]
    ) -> list[OracleDevice]:
        """The best set of the step's shape."""
        first: dict[int, OracleDevice] = {}
        for here in fitting:
            first.setdefault(here.index, here)
        sets = self._open_sets(name, step, [Verdict(here.uuid, None) for here in fitting])
        best = min(sets, key=lambda some: (some.tier, sum(n in first for n in some.around)))
        return [first[n] for n in best.indexes]

    # --- one pod -------------------------------------------------------------------------------

    def steps(self, request: PodRequest) -> list[Step]:
        found: list[Step] = []
        for i, container in enumerate(request.containers):
            for asked in container.requests:
                selector = request.selectors.get(asked.vendor, DeviceSelector())
                if (
                    asked.count > 1
                    and not asked.shape
                    and not selector.numa_bind
                    and wants_parts(asked, selector)
                ):
                    one = replace(asked, count=1)
                    found += [
                        Step(i, container.kind, one, selector, is_part=True)
                        for _ in range(asked.count)
                    ]
                else:
                    found.append(Step(i, container.kind, asked, selector))
        return found

    def attempts(self, request: PodRequest) -> list[tuple[list[int], list[str]]]:
        """(steps in placing order, words that order devices) of each attempt."""
        steps = self.steps(request)
        chain = [str(w) for w in request.policy.device if w in ("binpack", "spread", "numa")]
        if "binpack" not in chain and "spread" not in chain:
            chain.append("spread")
        found = [(list(range(len(steps))), chain)]
        if len({(s.container, s.request.vendor) for s in steps}) > 1:
            before = [i for i, s in enumerate(steps) if s.kind != "app"]
            apps = [i for i, s in enumerate(steps) if s.kind == "app"]
            apps.sort(
                key=lambda i: (
                    not steps[i].request.exclusive,
                    -steps[i].request.memory_pct,
                    -steps[i].request.memory_mib,
                    -steps[i].request.core_pct,
                    -steps[i].request.count,
                )
            )
            found.append(([*before, *apps], ["binpack"]))
        return found

    def _try(self, request: PodRequest, name: str, order: list[int], keys: list[str]) -> Tried:
        steps = self.steps(request)
        tried = Tried()
        placed: list[ContainerShares] = []
        for number in order:
            step = steps[number]
            beside = _staying(placed)
            verdicts = self.verdicts(request, name, step, booked_by_device(beside))
            fitting = [self.nodes[name].devices[v.uuid] for v in verdicts if v.code is None]
            if len(fitting) < step.request.count or (
                step.request.shape and not self._open_sets(name, step, verdicts)
            ):
                tried.failed, tried.verdicts = number, verdicts
                return tried
            running = [share for c in beside for share in c.shares]
            chosen = self._choose(request, name, step, keys, fitting, running)
            chosen.sort(key=lambda here: (here.index, here.uuid))
            shares = self._shares(request, step, chosen, booked_by_device(beside))
            placed.append(shares)
            tried.shares.setdefault(number, []).append(shares)
        return tried

    def _excess(self, here: OracleDevice, step: Step) -> tuple[int, int, int]:
        """(1 on a device with partitions, MiB beyond the request, compute beyond it)."""
        grant, wants = here.grant(step.request), step.request
        assert grant is not None
        if grant.profile < 0:
            return 0, 0, 0
        if wants.profile or wants.exact:
            return 1, 0, 0
        division = here.division()
        assert division is not None
        whole_mib = max(profile.memory_mib for profile in division.profiles)
        return (
            1,
            grant.memory_mib - wants.memory_mib_on(whole_mib),
            grant.core_pct - wants.core_pct,
        )

    def excess(self, request: PodRequest, name: str) -> tuple[int, int]:
        """(partitions and MiB beyond the request, compute beyond it) of the devices that each step
        would take if it were alone.
        """
        mib = core_pct = 0
        for step in self.steps(request):
            fitting = [
                self._excess(self.nodes[name].devices[v.uuid], step)
                for v in self.verdicts(request, name, step, {})
                if v.stage in (None, NUMA, SHAPE)
            ]
            for is_part, spare_mib, spare_pct in sorted(fitting)[: step.request.count]:
                mib += is_part + spare_mib
                core_pct += spare_pct
        return mib, core_pct

    def _shares(
        self,
        request: PodRequest,
        step: Step,
        chosen: list[OracleDevice],
        running: dict[str, Booked],
    ) -> ContainerShares:
        shares: list[Share] = []
        for here in chosen:
            grant, division = here.grant(step.request), here.division()
            assert grant is not None
            profile, start = "", None
            if division is not None:
                profile = division.profiles[grant.profile].name
                if profile:
                    _, start = self._start(here, running.get(here.uuid, NOTHING), grant)
            memory_limit_mib, core_limit_pct = here.limits(step.request, grant, profile)
            shares.append(
                Share(
                    vendor=step.request.vendor,
                    uuid=here.uuid,
                    memory_mib=grant.memory_mib,
                    core_pct=grant.core_pct,
                    memory_limit_mib=memory_limit_mib,
                    core_limit_pct=core_limit_pct,
                    exclusive=grant.exclusive,
                    kind=grant.kind,
                    profile=profile,
                    start=start,
                    mode=here.device.mode
                    if here.device is not None and here.device.mode in NAMED_MODES
                    else "",
                )
            )
        return ContainerShares(
            name=request.containers[step.container].name,
            kind=request.containers[step.container].kind,
            shares=tuple(shares),
        )

    def tried(self, request: PodRequest, name: str) -> Tried:
        """The attempt that succeeded, else the first; no attempt where a step lacks devices."""
        for number, step in enumerate(self.steps(request)):
            verdicts = self.verdicts(request, name, step, {})
            if len(verdicts) < step.request.count:
                return Tried(failed=number, verdicts=verdicts)
        first: Tried | None = None
        for attempt in self.attempts(request):
            tried = self._try(request, name, *attempt)
            if tried.failed is None:
                return tried
            first = first or tried
        if self._is_searched(request, name):
            tried = self._search(request, name)
            if tried.failed is None:
                return tried
        assert first is not None
        return first

    def _is_searched(self, request: PodRequest, name: str) -> bool:
        """True when there are few enough choices to try them all."""
        width = 1
        while width < len(self.nodes[name].devices):
            width *= 2
        for vendor in {step.request.vendor for step in self.steps(request)}:
            steps = [step for step in self.steps(request) if step.request.vendor == vendor]
            sizes = [s.request.count for s in steps[:-1] if s.kind != "init"]
            if prod(comb(width, size) for size in sizes) > MOST_CHOICES:
                return False
        return True

    def _search(self, request: PodRequest, name: str) -> Tried:
        """The first of all choices that is a placement; two vendors never share a device."""
        tried = Tried()
        for vendor in dict.fromkeys(step.request.vendor for step in self.steps(request)):
            numbers = [i for i, s in enumerate(self.steps(request)) if s.request.vendor == vendor]
            shares = self._search_from(request, name, numbers, [])
            if shares is None:
                return Tried(failed=numbers[0])
            tried.shares.update(
                {number: [held] for number, held in zip(numbers, shares, strict=True)}
            )
        return tried

    def _search_from(
        self, request: PodRequest, name: str, numbers: list[int], placed: list[ContainerShares]
    ) -> list[ContainerShares] | None:
        if len(placed) == len(numbers):
            return placed
        number = numbers[len(placed)]
        step = self.steps(request)[number]
        beside = booked_by_device(_staying(placed))
        verdicts = self.verdicts(request, name, step, beside)
        fitting = [self.nodes[name].devices[v.uuid] for v in verdicts if v.code is None]
        for some in combinations(fitting, step.request.count):
            if step.selector.numa_bind and len({_numa(here) for here in some}) > 1:
                continue
            if step.request.shape and sorted(here.index for here in some) not in [
                list(legal.indexes) for legal in legal_sets(step.request.shape, step.request.count)
            ]:
                continue
            shares = self._shares(request, step, list(some), beside)
            found = self._search_from(request, name, numbers, [*placed, shares])
            if found is not None:
                return found
        return None

    def pick(self, request: PodRequest, name: str) -> Placement | None:
        """The pod's shares on the node."""
        if name not in self.nodes:
            return None
        tried = self.tried(request, name)
        if tried.failed is not None:
            return None
        containers: list[ContainerShares] = []
        for i, container in enumerate(request.containers):
            shares: list[Share] = []
            for number, step in enumerate(self.steps(request)):
                if step.container == i:
                    shares += [s for part in tried.shares[number] for s in part.shares]
            containers.append(
                ContainerShares(
                    name=container.name,
                    kind=container.kind,
                    shares=tuple(shares),
                    priority=container.priority,
                )
            )
        return Placement(node=name, containers=self._placed(name, containers))

    def _placed(self, name: str, containers: list[ContainerShares]) -> tuple[ContainerShares, ...]:
        """The same with the final starts of partitions, containers in order."""
        starts: dict[tuple[int, int], int | None] = {}
        devices = self.nodes[name].devices
        for here in devices.values():
            division = here.division()
            mine = [
                (i, place, share)
                for i, container in enumerate(containers)
                for place, share in enumerate(container.shares)
                if share.uuid == here.uuid and share.profile
            ]
            if division is None or not mine:
                continue
            wanted = [division.by_name[share.profile] for _, _, share in mine]
            found = assign_starts(division, division.spent(here.parts())[0], wanted)
            assert found is not None
            starts.update({(i, place): s for (i, place, _), s in zip(mine, found, strict=True)})

        def place_of(share: Share) -> tuple[int, str, int]:
            return devices[share.uuid].index, share.uuid, share.start or 0

        placed: list[ContainerShares] = []
        for i, container in enumerate(containers):
            shares = [
                replace(share, start=starts.get((i, place)))
                for place, share in enumerate(container.shares)
            ]
            vendors = list(dict.fromkeys(share.vendor for share in shares))
            shares.sort(key=lambda share: (vendors.index(share.vendor), place_of(share)))
            placed.append(replace(container, shares=tuple(shares)))
        return tuple(placed)

    def code(self, request: PodRequest, name: str) -> str | None:
        """The word of the node's reason; ``None`` where the pod fits."""
        if name not in self.nodes:
            return "NodeUnregistered"
        tried = self.tried(request, name)
        if tried.failed is None:
            return None
        wants = self.steps(request)[tried.failed].request
        if not tried.verdicts:
            return "NodeUnregistered"
        if len(tried.verdicts) < wants.count:
            return "NodeInsufficientDevice"
        if any(v.code is None for v in tried.verdicts):
            return "AllocatedCardsInsufficientRequest"
        return STAGES[max(v.stage for v in tried.verdicts if v.stage is not None)]

    def scores(self, request: PodRequest, names: Sequence[str]) -> list[float]:
        """0..100 by node: less excess first, then ``score``; 0 where the pod does not fit."""
        beyond = {n: self.excess(request, n) for n in names if self.code(request, n) is None}
        levels = sorted(set(beyond.values()), reverse=True)
        found: list[float] = []
        for name in names:
            score = self.score(request, name)
            if name in beyond and len(levels) > 1:
                above = levels.index(beyond[name])
                score = 100.0 * (above + score / 100.0) / len(levels)
            found.append(score)
        return found

    def score(self, request: PodRequest, name: str) -> float:
        """0..100 after placing the pod, by fullness alone; 0 where it does not fit."""
        placement = self.pick(request, name)
        if placement is None:
            return 0.0
        total, terms = 0.0, 0
        for vendor in dict.fromkeys(s.request.vendor for s in self.steps(request)):
            steps = [s for s in self.steps(request) if s.request.vendor == vendor]
            mine = [d for d in self.nodes[name].registered(vendor) if d.device is not None]
            least_mib = min(d.device.memory_mib for d in mine if d.device)

            def all_of(some: list[Step], least_mib: int = least_mib) -> tuple[int, int, int]:
                return (
                    sum(s.request.count for s in some),
                    sum(s.request.count * s.request.core_pct for s in some),
                    sum(s.request.count * s.request.memory_mib_on(least_mib) for s in some),
                )

            moments = [
                all_of([other for other in steps[:i] if other.kind != "init"] + [step])
                for i, step in enumerate(steps)
            ]
            slots, core_pct, mib = (max(amounts) for amounts in zip(*moments, strict=True))
            parts = [
                (
                    sum(d.used_slots() for d in mine) + slots,
                    sum(d.device.slots for d in mine if d.device),
                )
            ]
            if any(s.request.memory_mib or s.request.memory_pct for s in steps):
                parts.append(
                    (
                        sum(d.used_mib() for d in mine) + mib,
                        sum(d.device.capacity_mib for d in mine if d.device),
                    )
                )
            if any(s.request.core_pct for s in steps):
                parts.append(
                    (
                        sum(d.used_core() for d in mine) + core_pct,
                        sum(d.device.capacity_core_pct for d in mine if d.device),
                    )
                )
            for used, capacity in parts:
                total += min(used / max(capacity, 1), 1.0)
                terms += 1
        fill = 100.0 * (total / terms)
        return fill if request.policy.node == "binpack" else 100.0 - fill


def _staying(placed: list[ContainerShares]) -> list[ContainerShares]:
    """Shares that later containers find taken, of the containers placed so far."""
    return [
        replace(c, kind="sidecar", shares=tuple(s for s in c.shares if stays(c.kind, s)))
        for c in placed
    ]


def _numa(here: OracleDevice) -> int:
    numa = None if here.device is None else here.device.numa
    return -1 if numa is None else numa
