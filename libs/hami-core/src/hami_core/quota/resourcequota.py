# SPDX-License-Identifier: Apache-2.0
"""Amounts that a pod counts under quotas, and the limits of a namespace's ResourceQuota objects.

Amounts are those that the ledger books: for each device the peak of
``hami_common.model.placement``, added over the devices. So a request of two devices counts twice,
and memory requested by percentage counts as the MiB that were booked. Before devices are chosen
only the minimum of a request is known: ``least_amounts``.

Keys of ResourceQuota that we enforce: ``limits.<name>`` where the name is a vendor's memory,
compute or count resource, as HAMi's users write them. kube-apiserver stores such keys and enforces
none of them; all other keys are its own. A value that is no whole number blocks the resource: a
limit is never dropped silently. Memory in MiB, compute in percent of one device, devices as shares.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.bounds import MapKey, Quantity, SignedInt64
from hami_common.errors import RequestInvalid
from hami_common.events.allocation import Account
from hami_common.model.placement import ContainerShares, booked_by_device
from hami_common.model.request import ContainerRequest, PodRequest
from hami_common.pods.podview import MetadataView
from hami_common.units import parse_count
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import ResourceNames, Vendor

Kind = Literal["memory_mib", "core_pct", "devices"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
EVERY_VENDOR: Final = ""
LIMITS_PREFIX: Final = "limits."
MOST: Final = (1 << 53) - 1
"""Largest limit: exact in every reader of JSON."""
NO_ACCOUNT: Final = Account()


class Resource(NamedTuple):
    """A counted resource: of one vendor, of one of its count resources, or of all."""

    vendor: str
    """Vendor word; the name of a count resource, of a vendor that has several; empty: of all."""
    kind: Kind

    def __str__(self) -> str:
        return f"{self.vendor}/{self.kind}" if self.vendor else self.kind


Amounts = Mapping[Resource, int]
"""Amount of each resource; an absent one is 0."""


class Asker(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The attributes of a pod that quotas use besides its namespace and its request."""

    account: Account | None = None
    wish: str = ""
    """Queue that its label ``hami.io/queue`` names."""
    own: tuple[str, ...] = ()
    """Nodes on which it already has a share, which it would release."""


NOBODY_SPECIAL: Final = Asker()


def add_to(total: dict[Resource, int], amounts: Amounts, sign: int = 1) -> None:
    """Add ``amounts`` to ``total`` (or, with -1, subtract them).

    Entries that become 0 are dropped.
    """
    for resource, amount in amounts.items():
        after = total.get(resource, 0) + sign * amount
        if after:
            total[resource] = after
        else:
            total.pop(resource, None)


def amounts_of(
    containers: Iterable[ContainerShares], account: Account | None = None
) -> dict[Resource, int]:
    """Return the amounts that the containers of ONE pod count, as the ledger books them."""
    containers = tuple(containers)
    vendors = {share.uuid: share.vendor for one in containers for share in one.shares}
    total: dict[Resource, int] = {}
    for uuid, booked in booked_by_device(containers).items():
        for vendor in (vendors[uuid], EVERY_VENDOR):
            add_to(total, _amounts(vendor, booked.memory_mib, booked.core_pct, booked.slots))
    for name, mine in _by_count_resource(account).items():
        for booked in booked_by_device(_those(containers, mine)).values():
            add_to(total, _amounts(name, booked.memory_mib, booked.core_pct, booked.slots))
    return total


def _by_count_resource(account: Account | None) -> dict[str, set[tuple[str, str]]]:
    """Return the (container, vendor) pairs by count resource, of vendors that have several."""
    found: dict[str, set[tuple[str, str]]] = {}
    for container, vendor, name in account.resources if account else ():
        found.setdefault(name, set()).add((container, vendor))
    return found


def _those(
    containers: Iterable[ContainerShares], wanted: set[tuple[str, str]]
) -> list[ContainerShares]:
    """Return the containers with only the shares of the given vendors."""
    return [
        replace(
            one, shares=tuple(share for share in one.shares if (one.name, share.vendor) in wanted)
        )
        for one in containers
    ]


def least_amounts(
    request: PodRequest, least_mib: Mapping[str, int], account: Account | None = None
) -> dict[Resource, int]:
    """Return the minimum that the request counts wherever it is placed.

    ``least_mib``: memory of the smallest device, by vendor, of which a percentage is taken; an
    absent vendor counts 0 then. Exact for a pod with one container on equal devices.
    """
    names = {(one, vendor): name for one, vendor, name in (account.resources if account else ())}
    running: dict[Resource, int] = {}
    peak: dict[Resource, int] = {}
    for container in request.containers:
        together = dict(running)
        add_to(together, _of_container(container, least_mib, names))
        for resource, amount in together.items():
            peak[resource] = max(peak.get(resource, 0), amount)
        if container.kind != "init":
            running = together
    return {resource: amount for resource, amount in peak.items() if amount}


def vendors_by_percentage(request: PodRequest) -> tuple[str, ...]:
    """Return the vendors of whose devices the pod requests a percentage of the memory."""
    return tuple(
        sorted(
            {
                asked.vendor
                for container in request.containers
                for asked in container.requests
                if not asked.memory_mib
            }
        )
    )


def _of_container(
    container: ContainerRequest,
    least_mib: Mapping[str, int],
    names: Mapping[tuple[str, str], str],
) -> dict[Resource, int]:
    total: dict[Resource, int] = {}
    for asked in container.requests:
        each_mib = asked.memory_mib_on(least_mib.get(asked.vendor, 0))
        count = asked.count
        name = names.get((container.name, asked.vendor))
        for vendor in (asked.vendor, EVERY_VENDOR, *([name] if name else [])):
            add_to(total, _amounts(vendor, count * each_mib, count * asked.core_pct, count))
    return total


def _amounts(vendor: str, memory_mib: int, core_pct: int, devices: int) -> dict[Resource, int]:
    return {
        Resource(vendor, "memory_mib"): memory_mib,
        Resource(vendor, "core_pct"): core_pct,
        Resource(vendor, "devices"): devices,
    }


# --- ResourceQuota --------------------------------------------------------------------------------


class _Requirement(Struct, frozen=True, kw_only=True, rename="camel"):
    scope_name: str = ""
    operator: str = ""
    values: list[str] | None = None


class _ScopeSelector(Struct, frozen=True, kw_only=True, rename="camel"):
    match_expressions: list[_Requirement] | None = None


class _Spec(Struct, frozen=True, kw_only=True, rename="camel"):
    hard: dict[MapKey, Quantity | SignedInt64 | float] | None = None
    scopes: list[str] | None = None
    scope_selector: _ScopeSelector | None = None


class ResourceQuotaView(Struct, frozen=True, kw_only=True):
    """The fields of a ResourceQuota (core/v1) that we read."""

    metadata: MetadataView = MetadataView()
    spec: _Spec = _Spec()


class Scope(Struct, frozen=True, kw_only=True):
    """One condition on the pods to which a quota applies."""

    name: str
    operator: str = "Exists"
    values: tuple[str, ...] = ()

    def holds(self, account: Account) -> bool:
        """Return whether the pod of ``account`` is within the scope."""
        match self.name:
            case "Terminating":
                return account.is_terminating
            case "NotTerminating":
                return not account.is_terminating
            case "BestEffort":
                return account.is_best_effort
            case "NotBestEffort":
                return not account.is_best_effort
            case "PriorityClass":
                return self._holds_for(account.priority_class)
            case _:
                # CrossNamespacePodAffinity, VolumeAttributesClass: properties that no share has.
                return False

    def _holds_for(self, value: str) -> bool:
        match self.operator:
            case "In":
                return bool(value) and value in self.values
            case "NotIn":
                return value not in self.values
            case "DoesNotExist":
                return not value
            case _:
                return bool(value)


class Limit(Struct, frozen=True, kw_only=True):
    """A quota's limit of one resource."""

    key: str
    """Key in ``spec.hard``."""
    most: int = 0
    problem: str = ""
    """Reason why the value cannot be read; the limit is 0 then."""


class Quota(Struct, frozen=True, kw_only=True):
    """One ResourceQuota, as far as it limits our resources."""

    namespace: str
    name: str
    limits: dict[Resource, Limit]
    scopes: tuple[Scope, ...] = ()

    def counts(self, account: Account | None) -> bool:
        """Return whether a pod of ``account`` in the namespace counts under this quota."""
        return all(scope.holds(account or NO_ACCOUNT) for scope in self.scopes)


def count_resources(catalog: Catalog) -> dict[str, tuple[str, str]]:
    """Return (vendor, count resource) by resource name.

    Only of vendors that have several count resources.
    """
    return {
        name: (vendor.name, family.kind)
        for vendor in catalog.vendors
        if _has_several(vendor)
        for family in vendor.families
        for name in family.all()
    }


def _has_several(vendor: Vendor) -> bool:
    return len({family.kind for family in vendor.families}) > 1


class QuotaReader:
    """Creates quotas from documents, for one set of vendors."""

    def __init__(self, catalog: Catalog) -> None:
        """Read the resource names of ``catalog``."""
        self._resources: dict[str, tuple[Resource, ResourceNames]] = {}
        for vendor in catalog.vendors:
            for family in vendor.families:
                word = family.kind if _has_several(vendor) else vendor.name
                for name, kind in _kinds(family, vendor.resources.aliases).items():
                    self._resources[LIMITS_PREFIX + name] = (Resource(word, kind), family)

    def unreadable(self, namespace: str, name: str, *, problem: str) -> Quota:
        """Return a quota that allows nothing, for one whose document cannot be read."""
        return Quota(
            namespace=namespace,
            name=name,
            limits={
                resource: Limit(key=key, problem=problem)
                for key, (resource, _) in self._resources.items()
            },
        )

    def read(self, raw: bytes) -> Quota | None:
        """Read the quota of a document, ``None`` when it limits none of our resources.

        ``msgspec.DecodeError`` when it is no ResourceQuota.
        """
        view = _decoder.decode(raw)
        limits: dict[Resource, Limit] = {}
        for key, value in sorted((view.spec.hard or {}).items()):
            if key not in self._resources:
                continue
            resource, names = self._resources[key]
            limit = _limit(key, str(value), resource.kind, names)
            before = limits.get(resource)
            if before is None or before.most > limit.most:  # an alias names a resource twice
                limits[resource] = limit
        if not limits:
            return None
        selector = view.spec.scope_selector
        expressions = (selector.match_expressions if selector else None) or []
        return Quota(
            namespace=view.metadata.namespace or "default",
            name=view.metadata.name,
            limits=limits,
            scopes=(
                *(Scope(name=name) for name in view.spec.scopes or ()),
                *(
                    Scope(
                        name=one.scope_name, operator=one.operator, values=tuple(one.values or ())
                    )
                    for one in expressions
                ),
            ),
        )


_decoder = msgspec.json.Decoder(ResourceQuotaView)


def _kinds(names: ResourceNames, aliases: Mapping[str, str]) -> dict[str, Kind]:
    """Return the kind that each resource name of one count resource counts as."""
    kinds: dict[str, Kind] = {
        names.count: "devices",
        names.memory: "memory_mib",
        names.cores: "core_pct",
    }
    for alias, target in aliases.items():
        if target and target in kinds:
            kinds[alias] = kinds[target]
    return {name: kind for name, kind in kinds.items() if name}


def _limit(key: str, text: str, kind: Kind, names: ResourceNames) -> Limit:
    unit_mib = names.memory_unit_mib if kind == "memory_mib" else 1
    if not unit_mib:
        problem = "is a percentage of a device, which adds up to nothing; limit the count instead"
        return Limit(key=key, problem=problem)
    unit = {"devices": "devices", "core_pct": "units of compute", "memory_mib": "MiB"}[kind]
    if unit_mib > 1:
        unit = f"units of {unit_mib} MiB"
    try:
        if kind == "memory_mib" and text.strip().endswith(("Mi", "Gi", "Ti", "Pi", "Ei")):
            # kube-apiserver writes a large plain number as 24k, never with a binary suffix.
            parse_count(text, field=key, unit=unit, unit_mib=unit_mib)
        count = parse_count(text, field=key, unit=unit, at_most=MOST // (100 * unit_mib))
    except RequestInvalid as error:
        return Limit(key=key, problem=f"{error.problem}; {error.fix}")
    if kind == "core_pct":
        return Limit(key=key, most=-(-count * 100 // names.core_units))
    return Limit(key=key, most=count * unit_mib)
