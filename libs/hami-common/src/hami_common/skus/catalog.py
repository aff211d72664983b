# SPDX-License-Identifier: Apache-2.0
"""The catalog of SKUs: its file, and the vendors' limits that stand for a neutral demand.

An invalid catalog raises ``SettingsInvalid`` with the field and the fix, before any pod depends on
it: each alternative is read and admitted once as a container of its vendor. Memory in MiB and
compute in percent, both per device; prices per hour of one pod. Reads no files (ADR 45).
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from hami_common import documents
from hami_common.errors import RequestInvalid, SettingsInvalid
from hami_common.model.isolation import parse_least
from hami_common.pods import annotations as keys
from hami_common.pods.podview import ContainerView, ResourcesView
from hami_common.skus.expansion import GUARANTEED, SERVICE_CLASSES, Alternative, Link
from hami_common.units import shown
from hami_common.vendors.bursts import below, without_limit
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import NO_ANNOTATIONS, ResourceNames, Vendor

FULL_PCT: Final = 100
DEVICES_MOST: Final = 64
MEMORY_MOST_MIB: Final = 1 << 24
PRICE_MOST: Final = 1_000_000.0
SKUS_MOST: Final = 1000
ALTERNATIVES_MOST: Final = 32
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_CURRENCY: Final = re.compile(r"[A-Z]{3}")
_CONTAINER: Final = "main"
_LIMITS: Final = {"memory_limit_mib": keys.MEMORY_LIMIT, "compute_limit_pct": keys.CORES_LIMIT}
"""Fields of limits above the demand, with the annotations of pods that write the same."""
_AMOUNTS: Final = ("devices", "memory_mib", "compute_pct", *_LIMITS)


class Demand(Struct, frozen=True, kw_only=True):
    """Devices that one container asks for, without a vendor."""

    devices: int = 1
    memory_mib: int = 0
    """0: as the vendor reads a request without memory, for most the whole device."""
    compute_pct: int = 0
    """0: as the vendor reads a request without compute."""
    memory_limit_mib: int = 0
    compute_limit_pct: int = 0


class AlternativeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One vendor by which a demand can be served."""

    vendor: str
    """Vendor word, such as ``nvidia`` or ``ascend``."""
    resource: str = ""
    """Count resource, of a vendor that has several; empty: its first one."""
    types: tuple[str, ...] = ()
    """Accepted device types, as substrings without regard to case; empty: every type."""
    devices: int | None = None
    """Devices instead of those of the SKU."""
    memory_mib: int | None = None
    """MiB of each device instead of those of the SKU; 0: the whole device."""
    compute_pct: int | None = None
    """Percent of each device instead of those of the SKU; 0: the vendor's default."""
    memory_limit_mib: int | None = None
    """Limit of memory instead of that of the SKU; 0: the request."""
    compute_limit_pct: int | None = None
    """Limit of compute instead of that of the SKU; 0: as configured."""
    annotations: dict[str, str] = {}
    """Annotations of the vendor by which the pod is read, such as ``huawei.com/vnpu-mode``."""

    def demand(self, wanted: Demand) -> Demand:
        """Return the demand with the amounts of this alternative."""
        own = {name: getattr(self, name) for name in _AMOUNTS}
        return replace(wanted, **{name: value for name, value in own.items() if value is not None})


class Sku(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One SKU, as the file gives it."""

    name: str
    """As pods write it: a DNS label or several with dots."""
    version: int = 1
    """Raise it with every change of what pods get or pay: allocations record it."""
    state: str = "active"
    """``active``, or ``retired``: new pods are refused."""
    successor: str = ""
    """SKU that the refusal of a retired one recommends."""
    service_class: str = field(default="burstable", name="class")
    """``guaranteed``, ``burstable`` or ``spot``, see docs/classes.md."""
    devices: int = 1
    memory_mib: int = 0
    """MiB of each device; 0: the whole device."""
    compute_pct: int = 0
    """Percent of the compute of each device; 0: the vendor's default."""
    memory_limit_mib: int = 0
    """MiB of each device up to which a pod may exceed ``memory_mib``, see docs/classes.md; 0: none.
    Vendors that cannot limit this give ``memory_mib``."""
    compute_limit_pct: int = 0
    """Percent of each device that a pod may use while it computes alone there; 0: as configured."""
    link: Link = ""
    """``numa``: all devices on one NUMA node. ``fastest``: prefer the best-connected devices."""
    min_isolation: str = ""
    """Least grades of isolation, as pods write them in ``hami.io/min-isolation``."""
    price_hour: float = 0.0
    """Price per hour of one pod, in the currency of the catalog."""
    alternative: tuple[AlternativeConfig, ...]
    """Vendors in order of preference."""

    @property
    def title(self) -> str:
        """Return ``<name>@<version>``, as allocations record it."""
        return f"{self.name}@{self.version}"

    @property
    def demand(self) -> Demand:
        """Return the neutral demand."""
        return Demand(**{name: getattr(self, name) for name in _AMOUNTS})


class SkuFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file."""

    currency: str = ""
    """ISO 4217 code of all prices; required if a SKU has a price."""
    required: bool = False
    """Refuse pods that ask for devices without a SKU."""
    sku: tuple[Sku, ...] = ()
    neutral: tuple[AlternativeConfig, ...] = ()
    """Alternatives of pods that name neutral resources without a SKU, in order of preference;
    without any, such pods are refused.
    """


class _Expanded(NamedTuple):
    """Expansion of one alternative of a SKU."""

    resources: dict[str, str]
    """Limits of the container, in resources of the vendor."""
    limits: dict[str, int]
    """Limits above these, by the annotation of pods for each."""


class SkuCatalog:
    """A valid catalog, with the vendors' limits of each SKU."""

    def __init__(self, file: SkuFile, *, vendors: Catalog, digest: str = "") -> None:
        """Check ``file``; ``digest``: SHA-256 of its text, by which services name it."""
        self.file = file
        self.digest = digest
        self._vendors = vendors
        self._by_name: dict[str, Sku] = {}
        for sku in file.sku:
            if sku.name in self._by_name:
                raise _wrong(f"sku {sku.name}: name", "is there twice", "rename one")
            self._by_name[sku.name] = sku
        self._expanded = {sku.name: self._checked(sku) for sku in file.sku}
        if len(file.sku) > SKUS_MOST:
            raise _wrong("sku", f"more than {SKUS_MOST} SKUs", "remove retired ones")
        priced = next((sku for sku in file.sku if sku.price_hour), None)
        if (priced or file.currency) and not _CURRENCY.fullmatch(file.currency):
            raise _wrong(
                "currency",
                f"{shown(file.currency)} is no code of a currency",
                "write three capital letters, such as USD (ISO 4217)",
            )
        runtimes: dict[str, str] = {}
        for number, alternative in enumerate(file.neutral, start=1):
            where = f"neutral {number} ({alternative.vendor})"
            self._known(alternative, where)
            _, runtime = self._tried(alternative, Demand(), where)
            _require_one_runtime(runtimes, runtime, where)
            if any(getattr(alternative, name) is not None for name in _AMOUNTS):
                raise _wrong(where, "sets amounts, which the pod itself gives", "remove them")
        self._require_one_resource(file.neutral, "neutral")

    @property
    def skus(self) -> tuple[Sku, ...]:
        """All SKUs, in the order of the file."""
        return self.file.sku

    def find(self, name: str) -> Sku | None:
        """Return the SKU called ``name``; ``None`` if there is none."""
        return self._by_name.get(name)

    def active(self, name: str, *, where: str) -> Sku:
        """Return the SKU that new pods may have; ``RequestInvalid`` about ``where`` if none."""
        sku = self._by_name.get(name)
        if sku is not None and sku.state == "active":
            return sku
        if sku is None:
            active = [one.name for one in self.skus if one.state == "active"]
            raise RequestInvalid(
                field=where,
                problem=f"{shown(name)} is not a SKU of this cluster",
                fix=_near(name, active, "ask an operator for the catalog of SKUs"),
            )
        fix = f"ask for {sku.successor}" if sku.successor else "ask for another SKU"
        raise RequestInvalid(field=where, problem=f"SKU {sku.title} is retired", fix=fix)

    def expand(self, sku: Sku, container: str) -> tuple[Alternative, ...]:
        """Return the alternatives of a SKU for the container that asks for it."""
        return tuple(
            _alternative(
                one,
                {container: found.resources},
                {key: f"{container}={amount}" for key, amount in found.limits.items()},
            )
            for one, found in zip(sku.alternative, self._expanded[sku.name], strict=True)
        )

    def expand_neutral(self, demands: Mapping[str, Demand]) -> tuple[Alternative, ...]:
        """Return the alternatives for neutral demands by container, those that can serve them.

        ``RequestInvalid``: none can.
        """
        found: list[Alternative] = []
        problem: RequestInvalid | None = None
        for one in self.file.neutral:
            vendor = self._vendors.vendor(one.vendor)
            try:
                limits = {name: limits_of(vendor, one, demand) for name, demand in demands.items()}
                for name, own in limits.items():
                    vendor.admit(_container(name, own), one.annotations)
            except RequestInvalid as error:
                problem = problem or error
                continue
            found.append(_alternative(one, limits))
        if found:
            return tuple(found)
        raise problem or RequestInvalid(
            field="neutral resources",
            problem="the catalog of SKUs names no vendor for them",
            fix="ask for a SKU, or ask an operator to add [[neutral]] to the catalog",
        )

    def require_successor_of(self, earlier: "SkuCatalog") -> None:
        """Raise ``SettingsInvalid`` if a SKU changed since ``earlier`` and has its old version.

        State and successor may change: they do not change what admitted pods have.
        """
        for sku in self.skus:
            before = earlier.find(sku.name)
            if before is None:
                continue
            if sku.version < before.version:
                raise _wrong(
                    f"sku {sku.name}: version",
                    f"{sku.version} is below {before.version}, which pods were admitted with",
                    f"write {before.version + 1}",
                )
            same = replace(before, state=sku.state, successor=sku.successor)
            is_same = self.written_out(sku) == earlier.written_out(same)
            if sku.version == before.version and not is_same:
                raise _wrong(
                    f"sku {sku.name}: version",
                    f"is still {sku.version}, although the SKU changed",
                    f"write {sku.version + 1}",
                )

    def written_out(self, sku: Sku) -> Sku:
        """Return the SKU with the count resource in each alternative."""
        alternatives = (replace(one, resource=self._resource(one)) for one in sku.alternative)
        return replace(sku, alternative=tuple(alternatives))

    def _resource(self, one: AlternativeConfig) -> str:
        return _names_of(self._vendors.vendor(one.vendor), one.resource).count

    # --- checks ----------------------------------------------------------------------------------

    def _checked(self, sku: Sku) -> tuple["_Expanded", ...]:
        """Check a SKU; return the expansion of each alternative."""
        where = f"sku {sku.name}"
        _check_words(sku, where)
        _check_amounts(sku.demand, where)
        if not math.isfinite(sku.price_hour) or not 0 <= sku.price_hour <= PRICE_MOST:
            raise _wrong(
                f"{where}: price_hour",
                f"{sku.price_hour} is no price",
                f"write 0 to {PRICE_MOST:.0f}",
            )
        if sku.successor and sku.successor not in {one.name for one in self.file.sku} - {sku.name}:
            raise _wrong(
                f"{where}: successor",
                f"{shown(sku.successor)} is not another SKU",
                _near(sku.successor, [one.name for one in self.file.sku], "remove it"),
            )
        try:
            parse_least(sku.min_isolation, field=f"{where}: min_isolation")
        except RequestInvalid as error:
            raise _wrong(error.field, error.problem, error.fix) from error
        if not sku.alternative:
            raise _wrong(f"{where}: alternative", "names no vendor", "add [[sku.alternative]]")
        if len(sku.alternative) > ALTERNATIVES_MOST:
            raise _wrong(
                f"{where}: alternative", f"more than {ALTERNATIVES_MOST}", "remove the last ones"
            )
        found = []
        runtimes: dict[str, str] = {}
        problems: dict[str, str] = {}
        for number, one in enumerate(sku.alternative, start=1):
            place = f"{where}: alternative {number} ({one.vendor})"
            self._known(one, place)
            demand = one.demand(sku.demand)
            _check_amounts(demand, place)
            resources, runtime = self._tried(one, demand, place)
            _require_one_runtime(runtimes, runtime, place)
            limits = self._limits_above(one, demand, resources, place, problems)
            found.append(_Expanded(resources, limits))
        self._require_one_resource(sku.alternative, where)
        for name, key in _LIMITS.items():
            if sku.service_class == GUARANTEED and any(key in one.limits for one in found):
                raise _wrong(
                    f"{where}: {name}",
                    f"class {GUARANTEED} has no limit above its request",
                    "remove it, or write class burstable or spot",
                )
            if getattr(sku, name) and not any(key in one.limits for one in found):
                raise _wrong(
                    f"{where}: {name}",
                    f"holds for no alternative: the first {problems.get(name, 'sets 0')}",
                    "remove it, or add an alternative with shares of nvidia",
                )
        return tuple(found)

    def _limits_above(
        self,
        one: AlternativeConfig,
        demand: Demand,
        resources: dict[str, str],
        where: str,
        problems: dict[str, str],
    ) -> dict[str, int]:
        """Return an alternative's limits above its demand, by the annotation of pods for each.

        ``problems`` gets by field why the first alternative without this limit has none.
        """
        found: dict[str, int] = {}
        vendor = self._vendors.vendor(one.vendor)
        asked = vendor.parse_request(_container(_CONTAINER, resources), one.annotations)
        for name, key in _LIMITS.items():
            limit = getattr(demand, name)
            if not limit or asked is None:
                continue
            problem = without_limit(asked, vendor.parse_selector(one.annotations), key)
            if problem and getattr(one, name) is None:
                problems.setdefault(name, problem)
                continue
            fix = "remove it"
            if not problem:
                problem, fix = below(asked, key, limit)
            if problem:
                raise _wrong(f"{where}: {name}", problem, fix)
            found[key] = limit
        return found

    def _tried(
        self, one: AlternativeConfig, demand: Demand, where: str
    ) -> tuple[dict[str, str], str]:
        """Return the limits of an alternative and its runtime class, after a trial admission."""
        vendor = self._vendors.vendor(one.vendor)
        try:
            limits = limits_of(vendor, one, demand)
            container = _container(_CONTAINER, limits)
            changes = vendor.admit(container, one.annotations)
        except RequestInvalid as error:
            field_ = error.field.removeprefix(f"container {_CONTAINER}: ")
            raise _wrong(f"{where}: {field_}", error.problem, error.fix) from error
        if vendor not in self._vendors.asked(container):
            raise _wrong(f"{where}: vendor", "is in vendors.ignored", "remove the alternative")
        return limits, changes.runtime_class if changes else ""

    def _known(self, one: AlternativeConfig, where: str) -> None:
        names = [vendor.name for vendor in self._vendors.vendors]
        if one.vendor not in names:
            raise _wrong(
                f"{where}: vendor",
                f"{shown(one.vendor)} is not a vendor",
                _near(one.vendor, names, ""),
            )
        if ours := sorted(key for key in one.annotations if "hami.io/" in key):
            raise _wrong(
                f"{where}: annotations", f"{shown(ours[0])} is not the vendor's", "remove it"
            )
        counts = [family.count for family in self._vendors.vendor(one.vendor).families]
        if one.resource and one.resource not in counts:
            raise _wrong(
                f"{where}: resource",
                f"{shown(one.resource)} is not a count resource of {one.vendor}",
                _near(one.resource, counts, ""),
            )

    def _require_one_resource(self, some: Sequence[AlternativeConfig], where: str) -> None:
        """Raise unless all alternatives of a vendor have one resource, under which quotas count."""
        seen: dict[str, str] = {}
        for number, one in enumerate(some, start=1):
            resource = self._resource(one)
            if seen.setdefault(one.vendor, resource) != resource:
                raise _wrong(
                    f"{where}: alternative {number} ({one.vendor}): resource",
                    f"differs from {seen[one.vendor]} of an earlier alternative",
                    "make a SKU for each resource of a vendor",
                )


def parse(content: bytes | str, *, vendors: Catalog, digest: str = "") -> SkuCatalog:
    """Parse the file's text; ``SettingsInvalid`` names the field and the fix."""
    document = documents.toml(content, field="catalog of SKUs", fix="see docs/skus.md")
    _known_keys(document, SkuFile, where="catalog of SKUs")
    for number, sku in enumerate(_tables(document.get("sku")), start=1):
        where = f"sku {sku.get('name', f'number {number}')}"
        _known_keys(sku, Sku, where=where)
        for place, one in enumerate(_tables(sku.get("alternative")), start=1):
            _known_keys(one, AlternativeConfig, where=f"{where}: alternative {place}")
    try:
        file = msgspec.convert(document, SkuFile, strict=True)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at ")
        raise _wrong(
            where.strip("`$.") or "catalog of SKUs", problem, "see docs/skus.md"
        ) from error
    return SkuCatalog(file, vendors=vendors, digest=digest)


def empty(vendors: Catalog) -> SkuCatalog:
    """Return the catalog of a cluster without the file."""
    return SkuCatalog(SkuFile(), vendors=vendors)


def limits_of(vendor: Vendor, one: AlternativeConfig, demand: Demand) -> dict[str, str]:
    """Return the vendor's limits that ask for a demand.

    ``RequestInvalid``: the vendor has no resource for one of the amounts.
    """
    names = _names_of(vendor, one.resource)
    limits = {names.count: str(demand.devices)}
    if demand.memory_mib:
        if not names.memory or not names.memory_unit_mib:
            raise RequestInvalid(
                field="memory_mib",
                problem=f"{names.count} of {vendor.name} has no memory in MiB",
                fix="write memory_mib = 0 in the alternative, which takes whole devices",
            )
        limits[names.memory] = str(-(-demand.memory_mib // names.memory_unit_mib))
    if demand.compute_pct:
        if not names.cores:
            raise RequestInvalid(
                field="compute_pct",
                problem=f"{names.count} of {vendor.name} has no compute",
                fix="write compute_pct = 0 in the alternative, which books none",
            )
        limits[names.cores] = str(-(-demand.compute_pct * names.core_units // FULL_PCT))
    return limits


def _alternative(
    one: AlternativeConfig,
    limits: dict[str, dict[str, str]],
    annotations: Mapping[str, str] = NO_ANNOTATIONS,
) -> Alternative:
    return Alternative(
        vendor=one.vendor,
        limits=limits,
        types=one.types,
        annotations={**one.annotations, **annotations},
    )


def _names_of(vendor: Vendor, resource: str) -> ResourceNames:
    return next(
        (family for family in vendor.families if family.count == resource), vendor.families[0]
    )


def _container(name: str, limits: Mapping[str, str]) -> ContainerView:
    return ContainerView(name=name, resources=ResourcesView(limits=dict(limits)))


def _require_one_runtime(runtimes: dict[str, str], runtime: str, where: str) -> None:
    """Raise if an earlier alternative has another runtime class: a pod has one."""
    runtimes[runtime] = where
    if len(runtimes) > 1:
        raise _wrong(
            where,
            f"needs runtime class {runtime or 'none'}, and another alternative does not",
            "let the agents inject devices by CDI, or make a SKU for each vendor",
        )


def _check_words(sku: Sku, where: str) -> None:
    if not _NAME.fullmatch(sku.name):
        raise _wrong(
            f"sku {shown(sku.name)}: name",
            "is not a name that a resource can have",
            "use at most 63 lower case letters, digits, '-' and '.'",
        )
    for name, value, known in (
        ("state", sku.state, ("active", "retired")),
        ("class", sku.service_class, SERVICE_CLASSES),
    ):
        if value not in known:
            raise _wrong(
                f"{where}: {name}", f"{shown(value)} is unknown", f"write one of {', '.join(known)}"
            )
    if sku.version < 1:
        raise _wrong(f"{where}: version", f"{sku.version} is below 1", "write 1 or more")


def _check_amounts(demand: Demand, where: str) -> None:
    for name, value, least, most in (
        ("devices", demand.devices, 1, DEVICES_MOST),
        ("memory_mib", demand.memory_mib, 0, MEMORY_MOST_MIB),
        ("compute_pct", demand.compute_pct, 0, FULL_PCT),
        ("memory_limit_mib", demand.memory_limit_mib, 0, MEMORY_MOST_MIB),
        ("compute_limit_pct", demand.compute_limit_pct, 0, FULL_PCT),
    ):
        if not least <= value <= most:
            raise _wrong(
                f"{where}: {name}", f"{value} is outside {least}..{most}", "write a number within"
            )


def _tables(found: object) -> list[Mapping[str, Any]]:
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _known_keys(table: Mapping[str, Any], struct: type[Struct], *, where: str) -> None:
    names = [one.encode_name for one in msgspec.structs.fields(struct)]
    for key in table:
        if key not in names:
            raise _wrong(f"{where}: {key}", "is not a known key", _near(str(key), names, ""))


def _near(word: str, words: Iterable[str], otherwise: str) -> str:
    known = sorted(words)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else otherwise or f"known: {', '.join(known)}"


def _wrong(where: str, problem: str, fix: str) -> SettingsInvalid:
    return SettingsInvalid(field=where, problem=problem, fix=fix)
