# SPDX-License-Identifier: Apache-2.0
"""Expands pods that ask for a SKU or for neutral resources into alternatives (ADR 45).

The result is the pod with neutral resources in its limits, and the annotation with the limits for
each vendor. An expanded pod expands to itself, so admission stays idempotent. Memory in MiB and
compute in percent, both per device.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.model.isolation import parse_least
from hami_common.pods import annotations as keys
from hami_common.pods.podview import ContainerView, PodView, ResourcesView
from hami_common.skus.catalog import DEVICES_MOST, FULL_PCT, Demand, Sku, SkuCatalog
from hami_common.skus.expansion import (
    ACCELERATORS,
    COMPUTE,
    MEMORY,
    NAMES,
    SKU_PREFIX,
    Alternative,
    Expansion,
    class_of,
    encode,
    is_neutral,
)
from hami_common.units import parse_count, parse_percent, shown
from hami_common.vendors.catalog import Catalog
from hami_webhook.core.draft import Document, Draft

_GROUPS: Final = ("limits", "requests")


class _Asked(Struct, frozen=True, kw_only=True):
    """Containers of a pod that ask without a vendor."""

    containers: list[ContainerView]
    """All containers, in kubelet's order."""
    skus: dict[int, str]
    """SKU that a container names by resource, by its place."""
    neutral: list[int]
    """Places of containers with neutral resources."""
    annotation: str
    """SKU that the pod names by annotation; empty: none."""

    @property
    def is_any(self) -> bool:
        return bool(self.skus or self.neutral or self.annotation)


def expanded(view: PodView, draft: Draft, *, skus: SkuCatalog, catalog: Catalog) -> PodView:
    """Expand the pod in the draft; return the pod like that, any other pod as it is.

    ``RequestInvalid``: the pod asks for what the catalog does not have, or for a vendor as well.
    """
    asked = _asked(view)
    if not asked.is_any:
        if skus.file.required and catalog.mentions(view):
            raise _sku_required(skus)
        return _without_expansion(view, draft)
    for container in asked.containers:
        if vendors := catalog.asked(container):
            raise RequestInvalid(
                field=f"container {container.name}: resources.limits",
                problem=f"asks for {vendors[0].name} in a pod that asks without a vendor",
                fix="remove the vendor's resources, or those of the SKU",
            )
    if asked.skus or asked.annotation:
        sku, place = _sku_of(asked, skus)
        demands = {place: sku.demand}
        _require_same_amounts(asked.containers[place], sku)
        _require_same_class(view, sku)
        _require_no_limits(view, sku)
        expansion = _of_sku(sku, skus, asked.containers[place].name)
    else:
        if skus.file.required:
            raise _sku_required(skus)
        sku = None
        demands = {place: _demand(asked.containers[place]) for place in asked.neutral}
        by_name = {asked.containers[place].name: demand for place, demand in demands.items()}
        expansion = Expansion(alternatives=skus.expand_neutral(by_name))
    _require_free_choice(view, expansion.alternatives, catalog)
    _annotate(draft, expansion, sku)
    return _written(view, draft, demands, expansion, sku)


def _asked(view: PodView) -> _Asked:
    containers = [container for _, container in view.containers_in_order()]
    skus: dict[int, str] = {}
    for place, container in enumerate(containers):
        named = sorted(
            name
            for name in container.limits().keys() | container.requests().keys()
            if name.startswith(SKU_PREFIX)
        )
        if len(named) > 1:
            raise RequestInvalid(
                field=f"container {container.name}: resources.limits[{named[1]}]",
                problem=f"stands beside {named[0]}",
                fix="ask for one SKU",
            )
        if named:
            if container.quantity(named[0]) != "1":
                raise RequestInvalid(
                    field=f"container {container.name}: resources.limits[{named[0]}]",
                    problem=f"{shown(container.quantity(named[0]) or '')} is not 1",
                    fix="write 1, and choose a SKU with as many devices as you need",
                )
            skus[place] = named[0].removeprefix(SKU_PREFIX)
    return _Asked(
        containers=containers,
        skus=skus,
        neutral=[place for place, container in enumerate(containers) if is_neutral(container)],
        annotation=view.annotations().get(keys.SKU, "").strip(),
    )


def _sku_required(skus: SkuCatalog) -> RequestInvalid:
    active = sorted(sku.name for sku in skus.skus if sku.state == "active")
    more = ", …" if len(active) > 5 else ""  # noqa: PLR2004 - one line
    return RequestInvalid(
        field="resources.limits",
        problem="this cluster gives devices by SKU only",
        fix=f"write {SKU_PREFIX}NAME: 1 with one of {', '.join(active[:5]) or 'no SKUs'}{more}",
    )


def _sku_of(asked: _Asked, skus: SkuCatalog) -> tuple[Sku, int]:
    """Return the pod's SKU and the place of the container that gets it."""
    names = set(asked.skus.values()) | ({asked.annotation} if asked.annotation else set())
    if len(names) > 1:
        first, second = sorted(names)[:2]
        raise RequestInvalid(
            field=f"annotation {keys.SKU}",
            problem=f"the pod asks for the SKUs {first} and {second}",
            fix="ask for one SKU per pod",
        )
    name = next(iter(names))
    where = f"annotation {keys.SKU}"
    if asked.skus:
        place = min(asked.skus)
        where = f"container {asked.containers[place].name}: resources.limits[{SKU_PREFIX}{name}]"
    sku = skus.active(name, where=where)
    places = sorted({*asked.skus, *asked.neutral})
    if len(places) > 1:
        one, other = (asked.containers[place].name for place in places[:2])
        raise RequestInvalid(
            field=f"container {other}: resources.limits",
            problem=f"asks for devices beside container {one}, which has the SKU",
            fix="let one container of the pod ask for the SKU",
        )
    if places:
        return sku, places[0]
    return sku, _only_container(asked, name)


def _only_container(asked: _Asked, name: str) -> int:
    """Return the place of the pod's only container."""
    if len(asked.containers) == 1:
        return 0
    raise RequestInvalid(
        field=f"annotation {keys.SKU}",
        problem="the pod has several containers",
        fix=f"write {SKU_PREFIX}{name}: 1 in the limits of the one that gets the devices",
    )


def _require_same_amounts(container: ContainerView, sku: Sku) -> None:
    """Raise if the container names other neutral amounts than those of its SKU."""
    expected = _limits(sku.demand)
    for name in sorted(NAMES):
        written = container.quantity(name)
        if written is not None and written != expected.get(name):
            raise RequestInvalid(
                field=f"container {container.name}: resources.limits[{name}]",
                problem=f"{shown(written)} is not what SKU {sku.title} has",
                fix=f"remove it; the SKU gives {expected.get(name, 'the whole device')}",
            )


def _require_same_class(view: PodView, sku: Sku) -> None:
    """Raise if the pod names another class than its SKU has."""
    named = class_of(view.annotations())
    if named and named != sku.service_class:
        raise RequestInvalid(
            field=f"annotation {keys.CLASS}",
            problem=f"{named} is not the class of SKU {sku.title}",
            fix=f"remove it; the SKU gives {sku.service_class}",
        )


def _require_no_limits(view: PodView, sku: Sku) -> None:
    """Raise if the pod names a limit above its request beside its SKU."""
    for key in (keys.MEMORY_LIMIT, keys.CORES_LIMIT):
        if view.annotations().get(key, "").strip():
            raise RequestInvalid(
                field=f"annotation {key}",
                problem=f"SKU {sku.title} settles the limits of the pod",
                fix="remove it, or ask for a SKU with a higher limit",
            )


def _of_sku(sku: Sku, skus: SkuCatalog, container: str) -> Expansion:
    return Expansion(
        sku=sku.title,
        service_class=sku.service_class,
        link=sku.link,
        min_isolation=parse_least(sku.min_isolation, field="min_isolation"),
        alternatives=skus.expand(sku, container),
    )


def _demand(container: ContainerView) -> Demand:
    """Return the neutral demand that a container writes."""
    found = {name: container.quantity(name) for name in NAMES}

    def where(name: str) -> str:
        return f"container {container.name}: resources.limits[{name}]"

    devices = parse_count(
        found[ACCELERATORS] or "1", field=where(ACCELERATORS), unit="devices", at_most=DEVICES_MOST
    )
    if not devices:
        raise RequestInvalid(
            field=where(ACCELERATORS), problem="0 is no request", fix="write 1 or more"
        )
    memory_mib = parse_count(found[MEMORY] or "0", field=where(MEMORY), unit="MiB", unit_mib=1)
    compute_pct = 0
    if found[COMPUTE]:
        compute_pct = parse_percent(found[COMPUTE] or "", field=where(COMPUTE))
    return Demand(devices=devices, memory_mib=memory_mib, compute_pct=min(compute_pct, FULL_PCT))


def _require_free_choice(
    view: PodView, alternatives: Iterable[Alternative], catalog: Catalog
) -> None:
    """Raise if the pod selects device types where its SKU does."""
    for one in alternatives:
        selector = catalog.vendor(one.vendor).parse_selector(view.annotations())
        if one.types and selector.allow_types:
            raise RequestInvalid(
                field=f"annotation for types of {one.vendor}",
                problem=f"selects {', '.join(selector.allow_types)}, and so does the SKU",
                fix="remove the annotation, or ask for another SKU",
            )


def _limits(demand: Demand) -> dict[str, str]:
    """Return the neutral limits that the container has after admission."""
    limits = {ACCELERATORS: str(demand.devices)}
    if demand.memory_mib:
        limits[MEMORY] = str(demand.memory_mib)
    if demand.compute_pct:
        limits[COMPUTE] = str(demand.compute_pct)
    return limits


def _annotate(draft: Draft, expansion: Expansion, sku: Sku | None) -> None:
    before = draft.metadata.get("annotations") or {}
    draft.metadata["annotations"] = {**before, **_marks(expansion, sku)}


def _marks(expansion: Expansion, sku: Sku | None) -> dict[str, str]:
    """Return the annotations of an expanded pod."""
    named = {} if sku is None else {keys.SKU: sku.name}
    return {keys.ALTERNATIVES: encode(expansion), **named}


def _written(
    view: PodView,
    draft: Draft,
    demands: Mapping[int, Demand],
    expansion: Expansion,
    sku: Sku | None,
) -> PodView:
    """Write the neutral limits into the draft; return the pod with its expansion."""
    containers = [container for _, container in view.containers_in_order()]
    annotations = {**view.annotations(), **_marks(expansion, sku)}
    changed: dict[str, ContainerView] = {}
    for place, demand in demands.items():
        limits = _limits(demand)
        seen = draft.seen(place).get("resources") or {}
        if any(_has_sku(seen.get(group)) for group in _GROUPS) or not _holds(seen, limits):
            resources = _replaced(seen, limits)
            draft.container(place)["resources"] = resources
        container = containers[place]
        resources_view = container.resources or ResourcesView()
        changed[container.name] = replace(
            container,
            resources=replace(
                resources_view,
                limits={**_kept(resources_view.limits), **limits},
                requests=_kept(resources_view.requests),
            ),
        )
    spec = view.spec
    init = spec.init_containers
    return replace(
        view,
        metadata=replace(view.metadata, annotations=annotations),
        spec=replace(
            spec,
            containers=[changed.get(one.name, one) for one in spec.containers],
            init_containers=None if init is None else [changed.get(one.name, one) for one in init],
        ),
    )


def _has_sku(group: Mapping[str, object] | None) -> bool:
    return any(name.startswith(SKU_PREFIX) for name in group or {})


def _holds(resources: Document, limits: Mapping[str, str]) -> bool:
    """Return whether the limits stand in the resources already."""
    written = resources.get("limits") or {}
    return all(str(written.get(name)) == value for name, value in limits.items())


def _kept(
    quantities: Mapping[str, str | int | float] | None,
) -> dict[str, str | int | float]:
    """Return the quantities without SKUs."""
    return {
        name: value for name, value in (quantities or {}).items() if not name.startswith(SKU_PREFIX)
    }


def _replaced(resources: Document, limits: Mapping[str, str]) -> Document:
    """Return the resources with neutral limits in place of SKUs.

    Kubernetes requires requests of extended resources to equal their limits; the API server fills
    in absent ones before admission.
    """
    changed = dict(resources)
    for group in _GROUPS:
        if resources.get(group) or group == "limits":
            changed[group] = _kept(resources.get(group))
    changed["limits"] = {**changed["limits"], **limits}
    requests = resources.get("requests") or {}
    if _has_sku(requests) or not NAMES.isdisjoint(requests):
        changed["requests"] = {**changed["requests"], **limits}
    return changed


def _without_expansion(view: PodView, draft: Draft) -> PodView:
    """Remove an expansion from a pod that asks for nothing neutral."""
    if keys.ALTERNATIVES not in view.annotations():
        return view
    kept = {k: v for k, v in view.annotations().items() if k != keys.ALTERNATIVES}
    own = {k: v for k, v in draft.metadata["annotations"].items() if k != keys.ALTERNATIVES}
    if own:
        draft.metadata["annotations"] = own
    else:
        del draft.metadata["annotations"]
    return replace(view, metadata=replace(view.metadata, annotations=kept))
