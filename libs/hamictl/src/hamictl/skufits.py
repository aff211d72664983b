# SPDX-License-Identifier: Apache-2.0
"""Computes where each alternative of a SKU fits now, with the scheduler's core on a snapshot.

Quotas and the constraints of a pod on nodes are left out: they belong to a pod.
"""

from msgspec import Struct

from hami_common.errors import HamiError
from hami_common.model.isolation import parse_least
from hami_common.pods import annotations as keys
from hami_common.pods.podview import (
    ContainerView,
    MetadataView,
    PodSpecView,
    PodView,
    ResourcesView,
)
from hami_common.skus.expansion import ACCELERATORS, Alternative, Expansion, encode
from hami_common.vendors.catalog import Catalog
from hami_core.placement.verdicts import Verdicts
from hami_core.replay.snapshot import Snapshot, load
from hamictl.client import Sku, SkuAlternative
from hamictl.errors import InputRefused

CONTAINER = "main"


class AlternativeFit(Struct, frozen=True, kw_only=True):
    """One alternative, and the nodes on which it fits now."""

    vendor: str
    types: tuple[str, ...]
    limits: dict[str, str]
    annotations: dict[str, str] = {}
    nodes: tuple[str, ...] = ()
    """Nodes that fit, sorted."""
    refusals: tuple[tuple[int, str], ...] = ()
    """Number of other nodes by reason, most first."""


class SkuExplanation(Struct, frozen=True, kw_only=True):
    """A SKU, what it expands to, and where it fits now."""

    sku: Sku
    currency: str
    snapshot_id: str
    alternatives: tuple[AlternativeFit, ...]
    """In order of preference: the scheduler takes the first one that fits anywhere."""
    problem: str = ""
    """Reason why nodes are unknown; the alternatives then have none."""


def expand(sku: Sku, *, currency: str, problem: str) -> SkuExplanation:
    """Return what the SKU expands to, without nodes, because of the problem."""
    found = [
        AlternativeFit(
            vendor=one.vendor, types=one.types, limits=one.limits, annotations=one.annotations
        )
        for one in sku.alternatives
    ]
    return SkuExplanation(
        sku=sku, currency=currency, snapshot_id="", alternatives=tuple(found), problem=problem
    )


def explain(sku: Sku, *, currency: str, snapshot: Snapshot) -> SkuExplanation:
    """Return the explanation; ``InputRefused`` if this release cannot read the SKU."""
    verdicts = Verdicts(table := load(snapshot).table)
    names = list(table.nodes())
    found: list[AlternativeFit] = []
    for one in sku.alternatives:
        try:
            request = Catalog.from_settings().parse_pod(_pod(sku, one))
        except HamiError as error:
            raise InputRefused(str(error)) from error
        if request is None:
            continue
        filtered = verdicts.filter(request, names)
        refusals = [(len(places), refusal.text) for refusal, places in filtered.groups()]
        found.append(
            AlternativeFit(
                vendor=one.vendor,
                types=one.types,
                limits=one.limits,
                annotations=one.annotations,
                nodes=tuple(sorted(filtered.feasible)),
                refusals=tuple(sorted(refusals, key=lambda group: (-group[0], group[1]))),
            )
        )
    return SkuExplanation(
        sku=sku,
        currency=currency,
        snapshot_id=snapshot.snapshot_id,
        alternatives=tuple(found),
    )


def _pod(sku: Sku, one: SkuAlternative) -> PodView:
    """Return a pod that asks for one alternative."""
    alternative = Alternative(
        vendor=one.vendor,
        limits={CONTAINER: one.limits},
        types=one.types,
        annotations=one.annotations,
    )
    expansion = Expansion(
        sku=f"{sku.name}@{sku.version}",
        service_class=sku.service_class,
        link=sku.link,
        min_isolation=parse_least(sku.min_isolation, field="min_isolation"),
        alternatives=(alternative,),
    )
    limits: dict[str, str | int | float] = {ACCELERATORS: str(sku.devices)}
    return PodView(
        metadata=MetadataView(
            name=sku.name, uid=sku.name, annotations={keys.ALTERNATIVES: encode(expansion)}
        ),
        spec=PodSpecView(
            containers=[ContainerView(name=CONTAINER, resources=ResourcesView(limits=limits))]
        ),
    )
