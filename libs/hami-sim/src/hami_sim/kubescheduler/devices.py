# SPDX-License-Identifier: Apache-2.0
"""Chooses devices of ResourceSlices for the claims of a pod on one node: first fit, backtracking.

As the allocator of ``k8s.io/dynamic-resource-allocation/structured`` (Kubernetes 1.37) with the
features that are on by default: devices shared by capacity, partitions with counters, taints,
prioritized alternatives, constraints and administrative access. Pools in the order of driver and
name, slices by name, devices in the order of their slice. Pure; amounts are Decimals.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec

from hami_sim.apiserver.cel import CelError, Program, quantity, semver
from hami_sim.apiserver.errors import Obj
from hami_sim.apiserver.quantity import Quantity, parse_quantity
from hami_sim.kubescheduler.fit import covers, matches_any

DeviceId: TypeAlias = tuple[str, str, str]
"""Driver, pool and device."""
Amounts: TypeAlias = dict[str, Quantity]

_ZERO: Final = Decimal(0)
_DEVICE: Final = frozenset({"device"})
_BLOCKS: Final = ("NoSchedule", "NoExecute")


class AllocationFailed(Exception):
    """The claims cannot be judged; another node or device is not tried."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device that a node offers."""

    id: DeviceId
    spec: Obj
    is_local: bool
    """True if only this node can use it."""

    @property
    def is_shared(self) -> bool:
        """Return true if several claims may have it."""
        return bool(self.spec.get("allowMultipleAllocations"))

    def counters(self) -> Iterator[tuple[str, str, Decimal]]:
        """Yield the set, name and amount of each counter that it consumes."""
        for consumed in self.spec.get("consumesCounters") or ():
            for name, counter in consumed["counters"].items():
                yield consumed["counterSet"], name, parse_quantity(counter["value"]).amount


class Usage:
    """Use of devices by the allocations of claims."""

    def __init__(self, allocations: Iterable[Obj] = ()) -> None:
        self.taken: dict[DeviceId, int] = defaultdict(int)
        self.consumed: dict[DeviceId, dict[str, Decimal]] = defaultdict(
            lambda: defaultdict(lambda: _ZERO)
        )
        for allocation in allocations:
            for result in (allocation.get("devices") or {}).get("results") or ():
                if result.get("adminAccess"):
                    continue
                device = (result["driver"], result["pool"], result["device"])
                amounts = result.get("consumedCapacity") or {}
                self.add(device, {n: parse_quantity(text).amount for n, text in amounts.items()})

    def add(self, device: DeviceId, amounts: Mapping[str, Decimal], *, sign: int = 1) -> None:
        """Count one more user of a device, or one less."""
        self.taken[device] += sign
        for name, amount in amounts.items():
            self.consumed[device][name] += sign * amount


class Pools:
    """The devices that a node offers, and the counters they share."""

    def __init__(self, slices: Iterable[Obj], node: Obj) -> None:
        name = node["metadata"]["name"]
        self.devices: list[Device] = []
        self._counters: dict[tuple[str, str, str, str], Decimal] = {}
        for (driver, pool), members in sorted(_complete(slices).items()):
            for item in members:
                spec = item["spec"]
                for counters in spec.get("sharedCounters") or ():
                    for counter, value in counters["counters"].items():
                        at = (driver, pool, counters["name"], counter)
                        self._counters[at] = parse_quantity(value["value"]).amount
                each = bool(spec.get("perDeviceNodeSelection"))
                for device in spec.get("devices") or ():
                    place = device if each else spec
                    if _is_offered(place, node):
                        self.devices.append(
                            Device(
                                id=(driver, pool, device["name"]),
                                spec=device,
                                is_local=place.get("nodeName") == name,
                            )
                        )

    def left(self, usage: Usage) -> dict[tuple[str, str, str, str], Decimal]:
        """Return what is left of each counter; a device is charged once, however often shared."""
        left = dict(self._counters)
        for device in self.devices:
            if usage.taken[device.id] > 0:
                for counters, name, amount in device.counters():
                    left[*device.id[:2], counters, name] -= amount
        return left


def _complete(slices: Iterable[Obj]) -> dict[tuple[str, str], list[Obj]]:
    """Return the newest slices of each pool, by name; incomplete pools are left out."""
    by_pool: dict[tuple[str, str], list[Obj]] = defaultdict(list)
    for item in slices:
        by_pool[item["spec"]["driver"], item["spec"]["pool"]["name"]].append(item)
    found = {}
    for at, members in by_pool.items():
        newest = max(item["spec"]["pool"].get("generation", 0) for item in members)
        current = [i for i in members if i["spec"]["pool"].get("generation", 0) == newest]
        if len(current) == current[0]["spec"]["pool"]["resourceSliceCount"]:
            found[at] = sorted(current, key=lambda item: str(item["metadata"]["name"]))
    return found


def _is_offered(place: Obj, node: Obj) -> bool:
    if place.get("allNodes"):
        return True
    if selector := place.get("nodeSelector"):
        return matches_any(selector.get("nodeSelectorTerms") or (), node)
    return bool(place.get("nodeName") == node["metadata"]["name"])


# ---------------------------------------------------------------------------------- selectors


@lru_cache(maxsize=1024)
def _program(expression: str) -> Program:
    return Program(expression, _DEVICE)


class _Domains(dict[str, Any]):
    """Attributes or capacities by domain: a domain that a device lacks is empty, not an error."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> dict[str, Any]:
        return {}

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - as of dict
        del default
        return self[key]


def _view(device: Device) -> dict[str, Any]:
    """Return the variable ``device`` of selectors."""
    driver = device.id[0]
    attributes, capacity = _Domains(), _Domains()
    for name, attribute in (device.spec.get("attributes") or {}).items():
        domain, _, identifier = name.rpartition("/")
        ((kind, value),) = attribute.items()
        known = attributes.setdefault(domain or driver, {})
        known[identifier] = semver(value) if kind == "version" else value
    for name, amount in (device.spec.get("capacity") or {}).items():
        domain, _, identifier = name.rpartition("/")
        capacity.setdefault(domain or driver, {})[identifier] = quantity(amount["value"])
    return {
        "driver": driver,
        "attributes": attributes,
        "capacity": capacity,
        "allowMultipleAllocations": device.is_shared,
    }


def _is_selected(device: Device, selectors: Iterable[Obj]) -> bool:
    env = {"device": _view(device)}
    for selector in selectors:
        expression = selector["cel"]["expression"]
        try:
            if not _program(expression).decide(env):
                return False
        except CelError as error:
            msg = f"CEL runtime error on device {'/'.join(device.id)}: {error}"
            raise AllocationFailed(msg) from error
    return True


# ----------------------------------------------------------------------------------- capacity


def consumption(wanted: Mapping[str, str], device: Device) -> Amounts | None:
    """Return what a request takes of each capacity of a shared device.

    ``None`` if the device lacks a capacity that is asked for, or cannot give such an amount.
    """
    capacities = device.spec.get("capacity") or {}
    if set(wanted) - set(capacities):
        return None
    amounts: Amounts = {}
    for name, capacity in capacities.items():
        amount = _rounded(wanted.get(name), capacity)
        if amount is None:
            return None
        amounts[name] = amount
    return amounts


def _rounded(wanted: str | None, capacity: Obj) -> Quantity | None:
    policy = capacity.get("requestPolicy") or {}
    if wanted is None:
        return parse_quantity(policy.get("default", capacity["value"]))
    amount = parse_quantity(wanted)
    if values := policy.get("validValues"):
        steps = [parse_quantity(value) for value in values]
        return next((step for step in steps if step.amount >= amount.amount), None)
    if limits := policy.get("validRange"):
        least = parse_quantity(limits["min"])
        if amount.amount < least.amount:
            amount = least
        elif "step" in limits:
            step = parse_quantity(limits["step"])
            above = -(-(amount.amount - least.amount) // step.amount)
            amount = Quantity(least.amount + above * step.amount, step.notation)
        if "max" in limits and amount.amount > parse_quantity(limits["max"]).amount:
            return None
    return amount


# ------------------------------------------------------------------------------------- search


class _Pick(msgspec.Struct, frozen=True, kw_only=True):
    """One device for one request."""

    device: Device
    request: str
    exact: Obj
    amounts: Amounts


class _Search:
    """One search for one node; ``picks`` is the path so far, by claim."""

    def __init__(
        self, pools: Pools, usage: Usage, classes: Mapping[str, Obj], claims: Sequence[Obj]
    ) -> None:
        self._pools = pools
        self._usage = usage
        self._classes = classes
        self._left = pools.left(usage)
        self._claims = claims
        self.picks: list[list[_Pick]] = [[] for _ in claims]
        self._steps = [
            (number, request)
            for number, claim in enumerate(claims)
            for request in claim["spec"].get("devices", {}).get("requests") or ()
        ]

    def run(self, step: int = 0) -> bool:
        """Serve the requests from ``step`` on."""
        if step == len(self._steps):
            return True
        claim, request = self._steps[step]
        if "exactly" in request:
            return self._serve(step, claim, request["name"], request["exactly"])
        return any(
            self._serve(step, claim, f"{request['name']}/{alternative['name']}", alternative)
            for alternative in request["firstAvailable"]
        )

    def _serve(self, step: int, claim: int, name: str, exact: Obj) -> bool:
        matching = self._matching(name, exact)
        if exact["allocationMode"] == "All":
            return bool(matching) and self._all(step, claim, name, exact, matching)
        return self._some(step, claim, name, exact, matching, exact["count"])

    def _all(self, step: int, claim: int, name: str, exact: Obj, devices: Sequence[Device]) -> bool:
        if not devices:
            return self.run(step + 1)
        pick = self._take(claim, devices[0], name, exact)
        if pick is None:
            return False
        if self._all(step, claim, name, exact, devices[1:]):
            return True
        self._put_back(claim, pick)
        return False

    def _some(  # noqa: PLR0917 - one frame of the search
        self,
        step: int,
        claim: int,
        name: str,
        exact: Obj,
        devices: Sequence[Device],
        wanted: int,
    ) -> bool:
        if not wanted:
            return self.run(step + 1)
        for number, device in enumerate(devices):
            pick = self._take(claim, device, name, exact)
            if pick is None:
                continue
            if self._some(step, claim, name, exact, devices[number + 1 :], wanted - 1):
                return True
            self._put_back(claim, pick)
        return False

    def _matching(self, request: str, exact: Obj) -> list[Device]:
        known = self._classes.get(exact["deviceClassName"])
        if known is None:
            msg = f"request {request}: device class {exact['deviceClassName']} does not exist"
            raise LookupError(msg)
        selectors = [*(known["spec"].get("selectors") or ()), *(exact.get("selectors") or ())]
        return [device for device in self._pools.devices if _is_selected(device, selectors)]

    def _take(self, claim: int, device: Device, name: str, exact: Obj) -> _Pick | None:
        is_admin = bool(exact.get("adminAccess"))
        if not is_admin and not device.is_shared and self._usage.taken[device.id]:
            return None
        if any(
            taint["effect"] in _BLOCKS
            and not any(covers(toleration, taint) for toleration in exact.get("tolerations") or ())
            for taint in device.spec.get("taints") or ()
        ):
            return None
        amounts = self._amounts(device, exact)
        if amounts is None or not self._has_counters(device):
            return None
        pick = _Pick(device=device, request=name, exact=exact, amounts=amounts)
        if not self._keeps_constraints(claim, pick):
            return None
        self._count(pick, 1)
        self.picks[claim].append(pick)
        return pick

    def _put_back(self, claim: int, pick: _Pick) -> None:
        self.picks[claim].remove(pick)
        self._count(pick, -1)

    def _count(self, pick: _Pick, sign: int) -> None:
        if pick.exact.get("adminAccess"):
            return
        device = pick.device
        before = self._usage.taken[device.id]
        amounts = {name: amount.amount for name, amount in pick.amounts.items()}
        self._usage.add(device.id, amounts, sign=sign)
        if bool(before) != bool(self._usage.taken[device.id]):
            for counters, name, amount in device.counters():
                self._left[*device.id[:2], counters, name] -= sign * amount

    def _amounts(self, device: Device, exact: Obj) -> Amounts | None:
        wanted = (exact.get("capacity") or {}).get("requests") or {}
        capacities = device.spec.get("capacity") or {}
        if not device.is_shared:
            has_all = all(
                name in capacities
                and parse_quantity(text).amount <= parse_quantity(capacities[name]["value"]).amount
                for name, text in wanted.items()
            )
            return {} if has_all else None
        amounts = consumption(wanted, device)
        if amounts is None:
            return None
        used = self._usage.consumed[device.id]
        fits = all(
            used[name] + amount.amount <= parse_quantity(capacities[name]["value"]).amount
            for name, amount in amounts.items()
        )
        return amounts if fits else None

    def _has_counters(self, device: Device) -> bool:
        if self._usage.taken[device.id]:
            return True  # charged when its first share was allocated
        driver, pool, _ = device.id
        return all(
            self._left.get((driver, pool, counters, name), _ZERO) >= amount
            for counters, name, amount in device.counters()
        )

    def _keeps_constraints(self, claim: int, pick: _Pick) -> bool:
        spec = self._claims[claim]["spec"]
        for constraint in spec["devices"].get("constraints") or ():
            chosen = constraint.get("requests") or ()
            if not _is_of(pick.request, chosen):
                continue
            attribute = constraint.get("matchAttribute") or constraint["distinctAttribute"]
            value = _attribute(pick.device, attribute)
            if value is None:
                return False
            others = [
                _attribute(other.device, attribute)
                for other in self.picks[claim]
                if _is_of(other.request, chosen)
            ]
            if "matchAttribute" in constraint and any(other != value for other in others):
                return False
            if "distinctAttribute" in constraint and value in others:
                return False
        return True


def _is_of(request: str, chosen: Sequence[str]) -> bool:
    """Return whether a constraint or configuration is about this request."""
    return not chosen or request in chosen or request.partition("/")[0] in chosen


def _attribute(device: Device, name: str) -> object:
    attributes = device.spec.get("attributes") or {}
    domain, _, identifier = name.rpartition("/")
    found = attributes.get(name)
    if found is None and domain == device.id[0]:
        found = attributes.get(identifier)
    return found


def allocate(
    node: Obj,
    claims: Sequence[Obj],
    *,
    slices: Iterable[Obj],
    classes: Mapping[str, Obj],
    allocations: Iterable[Obj],
) -> list[Obj] | None:
    """Return the allocation of each claim on the node, ``None`` if they do not all fit.

    ``allocations`` are those of all other claims. LookupError: a class does not exist.
    AllocationFailed: a selector fails on a device.
    """
    search = _Search(Pools(slices, node), Usage(allocations), classes, claims)
    if not search.run():
        return None
    return [
        _allocation(node, claim, picks, classes)
        for claim, picks in zip(claims, search.picks, strict=True)
    ]


def _allocation(node: Obj, claim: Obj, picks: Sequence[_Pick], classes: Mapping[str, Obj]) -> Obj:
    results, config = [], []
    named: set[str] = set()
    for pick in picks:
        driver, pool, device = pick.device.id
        result: Obj = {"request": pick.request, "driver": driver, "pool": pool, "device": device}
        for field in ("adminAccess", "tolerations"):
            if pick.exact.get(field):
                result[field] = pick.exact[field]
        if pick.device.is_shared:
            result["shareID"] = str(uuid.uuid4())
            result["consumedCapacity"] = {n: str(a) for n, a in pick.amounts.items()}
        results.append(result)
        if pick.request not in named:
            named.add(pick.request)
            config += [
                {"source": "FromClass", "requests": [pick.request], **item}
                for item in classes[pick.exact["deviceClassName"]]["spec"].get("config") or ()
            ]
    config += [
        {"source": "FromClaim", **item}
        for item in claim["spec"]["devices"].get("config") or ()
        if any(_is_of(pick.request, item.get("requests") or ()) for pick in picks)
    ]
    allocation: Obj = {"devices": {"results": results, **({"config": config} if config else {})}}
    if any(pick.device.is_local for pick in picks):
        term = {"key": "metadata.name", "operator": "In", "values": [node["metadata"]["name"]]}
        allocation["nodeSelector"] = {"nodeSelectorTerms": [{"matchFields": [term]}]}
    return allocation
