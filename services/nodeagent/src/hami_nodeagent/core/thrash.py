# SPDX-License-Identifier: Apache-2.0
"""Detects containers that move each other's managed pages, and gives them exclusive quanta.

With class ``managed`` of overcommit the driver moves pages between device and host when a process
needs them. Where containers that work at the same time together use more than the device has, each
launch may find its pages evicted by the launch of another container, and PCIe carries pages all the
time. Such a device thrashes while

- its containers use more memory than it has,
- at least two of them work,
- its PCIe traffic is at least ``traffic_mib_s``, for ``after_s``,
- and exclusive quanta would at least halve that traffic: a change of the holder moves at most twice
  the excess, out and in.

With ``quanta`` one container at a time then enters the driver, for a quantum; the others wait at
their gates (``shell.gates``). A quantum takes at least ten times as long as the pages need to move,
within limits. The holder gives up the rest of its quantum when it makes no calls while another
container waits. A waiting container of a higher level goes first; those of one level take turns.
Each closure has a lease, so containers go on by themselves if the agent stops. Devices that share a
container have one holder together. Quanta end when containers need no more than the device has or
no longer compete, and for ``retry_s`` when they do not reduce the traffic.

Memory in MiB, traffic in MiB per second, times in seconds of CLOCK_MONOTONIC.
"""

from collections.abc import Mapping

from msgspec import Struct

from hami_nodeagent.core.pressure import ConditionKey, Signal
from hami_nodeagent.core.priorities import ContainerKey

LEASE_S = 3.0
"""Validity of a closure; renewed with each look."""
WAITS_S = 0.5
"""Age after which a report of a waiting thread, repeated ten times meanwhile, no longer counts."""
IDLE_S = 1.0
"""Time without a call into the driver after which the holder makes way for one that waits."""
ACTIVE_S = 5.0
"""Time after the last call for which a container counts as working."""
STALE_S = 60.0
"""Age of the last sample of a device after which its containers are not held back."""
QUANTUM_MOVES = 10
"""Least length of a quantum, in times that a change of the holder takes."""
QUANTUM_MOST = 4
"""Longest quantum, in multiples of ``quantum_s``."""
USELESS = 0.8
"""Part of the earlier traffic from which on quanta have no effect."""
_BOTH_WAYS = 2


class ThrashRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Detection of thrashing on devices with class ``managed``, and the remedy."""

    quanta: bool = False
    """Give a thrashing device to one container at a time. Containers that start while this is true
    get a gate for it; others are never held back."""
    quantum_s: float = 30.0
    """Least time for which a container has the device alone while others wait; up to four times as
    long where moving its memory takes long."""
    traffic_mib_s: float = 4096.0
    """PCIe traffic of the device in both directions from which it may be thrashing."""
    after_s: float = 10.0
    """Time for which the traffic must be so high."""
    calm_s: float = 60.0
    """Time after which thrashing is over: without such traffic or, with quanta, without containers
    that compete."""
    retry_s: float = 600.0
    """Time for which a device gets no quanta after they did not reduce its traffic."""


class Tenant(Struct, frozen=True, kw_only=True):
    """One container with shares of overcommitted devices."""

    key: ContainerKey
    level: int
    """Priority level, 0 is the highest."""
    uuids: frozenset[str]
    """Devices of class ``managed`` that it has a share of."""
    has_gate: bool = True
    is_held: bool = False
    """Its gate is closed."""
    used_s: float | None = None
    """Time of the last call into the driver; ``None``: unknown."""
    waits_s: float | None = None
    """Time of the last report of a thread that waits at the gate."""


class DeviceUse(Struct, frozen=True, kw_only=True):
    """Last sample of a device of class ``managed``."""

    uuid: str
    memory_mib: int
    used_mib: int
    """Memory that its containers were given, on the device and in the host."""
    traffic_mib_s: float | None
    """PCIe traffic since the sample before; ``None``: not reported."""
    sampled_s: float


class Facts(Struct, frozen=True, kw_only=True):
    """Everything that was observed."""

    now_s: float
    tenants: tuple[Tenant, ...]
    devices: tuple[DeviceUse, ...]


class SetGate(Struct, frozen=True, kw_only=True):
    """Open a container's gate, or close it until the lease ends."""

    key: ContainerKey
    closed_until_s: float | None = None
    """``None``: open."""


class _Device(Struct, kw_only=True):
    use: DeviceUse
    high_since_s: float | None = None
    low_since_s: float | None = None
    traffic_mib_s: float = 0.0
    """Mean of the samples since ``high_since_s``."""
    samples: int = 0
    is_thrashing: bool = False
    began_mib_s: float = 0.0
    """Traffic when the thrashing began."""
    no_quanta_until_s: float = 0.0

    @property
    def excess_mib(self) -> int:
        return max(0, self.use.used_mib - self.use.memory_mib)


class _Ring(Struct, kw_only=True):
    """Containers that have some devices in turn."""

    uuids: set[str]
    began_s: float
    quantum_s: float
    holder: ContainerKey | None = None
    since_s: float = 0.0
    """Begin of the holder's quantum."""
    served_s: dict[ContainerKey, float] = {}
    """Time at which each container last had the devices, or joined."""
    contended_s: float = 0.0
    """Last time at which two containers competed."""
    traffic_mib_s: float = 0.0
    """Mean of the devices' samples since the ring began."""
    samples: int = 0


class Thrash:
    """State of all devices of class ``managed`` of a node."""

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}
        self._rings: list[_Ring] = []
        self._changes: dict[str, int] = {}

    @property
    def has_quanta(self) -> bool:
        """Return whether containers are held back."""
        return bool(self._rings)

    @property
    def holders(self) -> dict[str, ContainerKey | None]:
        """Return the container that has each device with exclusive quanta; ``None``: none does."""
        return {uuid: ring.holder for ring in self._rings for uuid in ring.uuids}

    def take_changes(self) -> Mapping[str, int]:
        """Return how often each device was given to a container since the last call."""
        changes, self._changes = self._changes, {}
        return changes

    def signals(self) -> Mapping[ConditionKey, Signal]:
        """Return which devices thrash, for ``core.pressure``."""
        held = {uuid: ring for ring in self._rings for uuid in ring.uuids}
        return {
            ("thrashing", uuid): Signal(
                holds=one.is_thrashing,
                is_over=not one.is_thrashing,
                is_settled=True,
                text=_text(one, held.get(uuid)),
            )
            for uuid, one in self._devices.items()
        }

    def look(self, facts: Facts, rules: ThrashRules) -> tuple[SetGate, ...]:
        """Return the gates that have to be written now."""
        self._follow(facts, rules)
        self._rings = [ring for ring in self._rings if self._is_kept(ring, facts, rules)]
        if rules.quanta:
            self._begin(facts, rules)
        held: dict[ContainerKey, SetGate] = {}
        for ring in self._rings:
            self._advance(ring, facts)
            for tenant in _of(ring, facts):
                if tenant.key != ring.holder:
                    held[tenant.key] = SetGate(key=tenant.key, closed_until_s=facts.now_s + LEASE_S)
        opened = [
            SetGate(key=one.key)
            for one in facts.tenants
            if one.has_gate and one.is_held and one.key not in held
        ]
        return (*held.values(), *opened)

    # Detection

    def _follow(self, facts: Facts, rules: ThrashRules) -> None:
        present = {one.uuid for one in facts.devices}
        self._devices = {uuid: one for uuid, one in self._devices.items() if uuid in present}
        for use in facts.devices:
            device = self._devices.get(use.uuid)
            if device is None:
                device = self._devices[use.uuid] = _Device(use=use)
            elif use.sampled_s <= device.use.sampled_s:
                continue
            device.use = use
            self._judge(device, facts, rules)
            for ring in self._rings:
                if use.uuid in ring.uuids and use.traffic_mib_s is not None:
                    ring.samples += 1
                    ring.traffic_mib_s += (use.traffic_mib_s - ring.traffic_mib_s) / ring.samples

    def _judge(self, device: _Device, facts: Facts, rules: ThrashRules) -> None:
        """Take a new sample."""
        now_s, traffic_mib_s = device.use.sampled_s, device.use.traffic_mib_s or 0.0
        is_high = (
            device.excess_mib > 0
            and traffic_mib_s >= rules.traffic_mib_s
            and traffic_mib_s * QUANTUM_MOST * rules.quantum_s
            >= _BOTH_WAYS * _BOTH_WAYS * device.excess_mib
            and len(self._working(device.use.uuid, facts)) > 1
        )
        if is_high:
            device.low_since_s = None
            if device.high_since_s is None:
                device.high_since_s, device.samples, device.traffic_mib_s = now_s, 0, 0.0
            device.samples += 1
            device.traffic_mib_s += (traffic_mib_s - device.traffic_mib_s) / device.samples
            if not device.is_thrashing and now_s - device.high_since_s >= rules.after_s:
                device.is_thrashing, device.began_mib_s = True, device.traffic_mib_s
            return
        device.high_since_s = None
        if device.low_since_s is None:
            device.low_since_s = now_s
        is_calm = now_s - device.low_since_s >= rules.calm_s or not device.excess_mib
        if is_calm and not any(device.use.uuid in ring.uuids for ring in self._rings):
            device.is_thrashing = False

    @staticmethod
    def _working(uuid: str, facts: Facts) -> list[Tenant]:
        return [one for one in facts.tenants if uuid in one.uuids and _is_working(one, facts.now_s)]

    # Quanta

    def _begin(self, facts: Facts, rules: ThrashRules) -> None:
        """Give thrashing devices quanta where all containers that work on them have gates."""
        held = {uuid for ring in self._rings for uuid in ring.uuids}
        for uuid, device in self._devices.items():
            working = self._working(uuid, facts)
            is_due = (
                device.is_thrashing
                and uuid not in held
                and facts.now_s >= device.no_quanta_until_s
                and facts.now_s - device.use.sampled_s < STALE_S
                and len(working) > 1
                and all(one.has_gate for one in working)
            )
            if is_due:
                self._rings.append(
                    _Ring(
                        uuids={uuid},
                        began_s=facts.now_s,
                        quantum_s=_quantum_s(device, rules),
                        served_s={},
                        contended_s=facts.now_s,
                    )
                )
        self._merge(facts)

    def _merge(self, facts: Facts) -> None:
        """Join rings that share a container, which could wait for one while it has the other."""
        merged: list[_Ring] = []
        for ring in self._rings:
            keys = {one.key for one in _of(ring, facts)}
            near = [one for one in merged if not keys.isdisjoint(t.key for t in _of(one, facts))]
            for one in near:
                merged.remove(one)
            if not near:
                merged.append(ring)
                continue
            first, *others = [*near, ring]
            for other in others:
                first.uuids |= other.uuids
                first.quantum_s = max(first.quantum_s, other.quantum_s)
                first.served_s = other.served_s | first.served_s
                first.contended_s = max(first.contended_s, other.contended_s)
            merged.append(first)
        self._rings = merged

    def _is_kept(self, ring: _Ring, facts: Facts, rules: ThrashRules) -> bool:
        """Return whether the quanta go on; otherwise the devices are free again."""
        ring.uuids = {uuid for uuid in ring.uuids if uuid in self._devices}
        devices = [self._devices[uuid] for uuid in ring.uuids]
        tenants = _of(ring, facts)
        if sum(_is_working(one, facts.now_s) for one in tenants) > 1:
            ring.contended_s = facts.now_s
        newest_s = max((one.use.sampled_s for one in devices), default=0.0)
        is_competed = facts.now_s - ring.contended_s < rules.calm_s
        has_excess = any(one.excess_mib for one in devices)
        is_known = facts.now_s - newest_s < STALE_S
        before_mib_s = sum(one.began_mib_s for one in devices) / max(1, len(devices))
        is_useless = (
            facts.now_s - ring.began_s >= _BOTH_WAYS * max(1, len(tenants)) * ring.quantum_s
            and ring.traffic_mib_s >= USELESS * before_mib_s
            and ring.samples > 0
        )
        if rules.quanta and is_competed and has_excess and is_known and not is_useless:
            return True
        for one in devices:
            one.is_thrashing = is_useless and has_excess and is_competed
            one.high_since_s = one.low_since_s = None
            if is_useless:
                one.no_quanta_until_s = facts.now_s + rules.retry_s
        return False

    def _advance(self, ring: _Ring, facts: Facts) -> None:
        """Choose the holder."""
        now_s, tenants = facts.now_s, {one.key: one for one in _of(ring, facts)}
        ring.served_s = {key: ring.served_s.get(key, now_s) for key in tenants}
        waiting = [
            one for one in tenants.values() if one.key != ring.holder and _is_waiting(one, now_s)
        ]
        holder = tenants.get(ring.holder) if ring.holder is not None else None
        if holder is not None:
            ring.served_s[holder.key] = now_s
            if not waiting:
                return
            highest = min(one.level for one in waiting)
            is_over = now_s - ring.since_s >= ring.quantum_s and highest <= holder.level
            is_idle = now_s - max(ring.since_s, holder.used_s or 0.0) > IDLE_S
            if not (is_over or is_idle or highest < holder.level):
                return
        chosen = min(
            waiting, key=lambda one: (one.level, ring.served_s[one.key], one.key), default=None
        )
        ring.holder = None if chosen is None else chosen.key
        ring.since_s = now_s
        if chosen is not None:
            for uuid in ring.uuids:
                self._changes[uuid] = self._changes.get(uuid, 0) + 1


def _of(ring: _Ring, facts: Facts) -> list[Tenant]:
    """Return the containers that a ring holds back."""
    return [one for one in facts.tenants if one.has_gate and not one.uuids.isdisjoint(ring.uuids)]


def _is_waiting(tenant: Tenant, now_s: float) -> bool:
    return tenant.waits_s is not None and now_s - tenant.waits_s <= WAITS_S


def _is_working(tenant: Tenant, now_s: float) -> bool:
    is_used = tenant.used_s is not None and now_s - tenant.used_s <= ACTIVE_S
    return is_used or _is_waiting(tenant, now_s)


def _quantum_s(device: _Device, rules: ThrashRules) -> float:
    """Return the length of a quantum, in which moving memory is a small part."""
    move_s = _BOTH_WAYS * device.excess_mib / max(1.0, device.began_mib_s)
    return min(max(rules.quantum_s, QUANTUM_MOVES * move_s), QUANTUM_MOST * rules.quantum_s)


def _text(device: _Device, ring: _Ring | None) -> str:
    use = device.use
    remedy = "they slow each other down"
    if ring is not None:
        remedy = f"they now have it one at a time, for {ring.quantum_s:.0f} s each"
    return (
        f"device {use.uuid}: its containers use {use.used_mib} MiB of its {use.memory_mib} MiB and "
        f"move each other's pages, {device.began_mib_s:.0f} MiB/s over PCIe: {remedy}"
    )
