# SPDX-License-Identifier: Apache-2.0
"""The expansion of a vendor-neutral pod: its alternatives, as the webhook writes them.

The annotation ``hami.io/alternatives`` has the pod's SKU, its class, and for each alternative the
limits that a user would have written for this vendor. Scheduler and webhook read the pod once per
alternative, so each vendor's own rules apply. The annotation is immutable after admission. Memory
in MiB and compute in percent, both per device (ADR 45).
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from hami_common.bounds import (
    ATTRIBUTES_MOST,
    CONTAINERS_MOST,
    LIST_MOST,
    WORDS_MOST,
    Label,
    MapKey,
    Quantity,
    Reference,
    Text,
    Vendor,
    Word,
)
from hami_common.errors import RequestInvalid
from hami_common.model.request import DeviceSelector, PlacementPolicy
from hami_common.pods import annotations as keys
from hami_common.pods.podview import ContainerView, PodView, ResourcesView
from hami_common.units import shown

ACCELERATORS: Final = "hami.io/accelerators"
MEMORY: Final = "hami.io/memory"
COMPUTE: Final = "hami.io/compute"
NAMES: Final = frozenset({ACCELERATORS, MEMORY, COMPUTE})
"""The neutral resources: devices, MiB and percent of compute, the last two of each device."""
SKU_PREFIX: Final = "sku.hami.io/"
"""Prefix of the resource that asks for one SKU; the webhook replaces it."""

ServiceClass = Literal["guaranteed", "burstable", "spot"]
SERVICE_CLASSES: Final[tuple[ServiceClass, ...]] = get_args(ServiceClass)
GUARANTEED: Final = "guaranteed"
SPOT: Final = "spot"
Link = Literal["", "numa", "fastest"]
"""Connection of several devices: none demanded, one NUMA node (required), or the best-connected
set of a node (preferred).
"""

Limits = Annotated[dict[MapKey, Quantity], Meta(max_length=ATTRIBUTES_MOST)]


class Alternative(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One vendor by which the pod can be served."""

    vendor: Vendor
    limits: Annotated[dict[Label, Limits], Meta(max_length=CONTAINERS_MOST)]
    """Resources of the vendor, by container."""
    types: Annotated[tuple[Word, ...], Meta(max_length=WORDS_MOST)] = ()
    """Accepted device types, as in ``DeviceSelector.allow_types``."""
    annotations: Annotated[dict[MapKey, Text], Meta(max_length=ATTRIBUTES_MOST)] = {}
    """Annotations with which the pod is read: the vendor's, and limits above the request."""


class Expansion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Value of the annotation ``hami.io/alternatives``."""

    sku: Reference = ""
    """``<name>@<version>``; empty: the pod names neutral resources only."""
    service_class: Word = msgspec.field(default="", name="class")
    link: Word = ""
    min_isolation: Annotated[tuple[tuple[Word, Word], ...], Meta(max_length=WORDS_MOST)] = ()
    """Least grades that the SKU demands, see ``hami_common.model.isolation``."""
    alternatives: Annotated[tuple[Alternative, ...], Meta(max_length=LIST_MOST)]
    """In order of preference; at least one."""


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Expansion)
_FIELD: Final = f"annotation {keys.ALTERNATIVES}"
_FIX: Final = "create the pod again with HAMi's webhook installed, and leave the annotation out"


def encode(expansion: Expansion) -> str:
    """Return the annotation's text."""
    return _encoder.encode(expansion).decode()


def is_neutral(container: ContainerView) -> bool:
    """Return whether the container names a neutral resource."""
    resources = container.resources
    return resources is not None and any(
        group and not NAMES.isdisjoint(group) for group in (resources.limits, resources.requests)
    )


def expansion_of(pod: PodView) -> Expansion | None:
    """Return the pod's expansion; ``None`` for a pod that names resources of vendors.

    ``RequestInvalid``: the pod was created past the webhook, or the annotation cannot be read.
    """
    text = pod.annotations().get(keys.ALTERNATIVES)
    neutral = [one.name for _, one in pod.containers_in_order() if is_neutral(one)]
    if text is None:
        if neutral:
            raise RequestInvalid(
                field=_FIELD, problem=f"is missing for container {neutral[0]}", fix=_FIX
            )
        return None
    try:
        expansion = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise RequestInvalid(field=_FIELD, problem=f"cannot be read: {error}", fix=_FIX) from error
    if not expansion.alternatives or any(
        set(one.limits) != set(neutral) for one in expansion.alternatives
    ):
        raise RequestInvalid(
            field=_FIELD,
            problem="does not list the containers that ask for neutral resources",
            fix=_FIX,
        )
    return expansion


def class_of(annotations: Mapping[str, str]) -> str:
    """Return the class that a pod names itself; empty: none. ``RequestInvalid``: it is unknown."""
    word = annotations.get(keys.CLASS, "").strip()
    if word and word not in SERVICE_CLASSES:
        raise RequestInvalid(
            field=f"annotation {keys.CLASS}",
            problem=f"{shown(word)} is unknown",
            fix=f"write one of {', '.join(SERVICE_CLASSES)}, or leave it out",
        )
    return word


def terms_of(pod: PodView) -> tuple[str, str]:
    """Return the SKU (``<name>@<version>``) and the class that the pod was admitted with.

    Empty without one. The class is that of the SKU, or the one that the pod names.
    """
    try:
        named = class_of(pod.annotations())
        expansion = expansion_of(pod) if keys.ALTERNATIVES in pod.annotations() else None
    except RequestInvalid:  # parsing the request refuses the pod
        return "", ""
    if expansion is None:
        return "", named
    return expansion.sku, expansion.service_class or named


def views_of(pod: PodView) -> tuple[PodView, ...]:
    """Return the pod as it is written for each alternative; any other pod as it is."""
    if keys.ALTERNATIVES not in pod.annotations():
        return (pod,)
    try:
        expansion = expansion_of(pod)
    except RequestInvalid:  # parsing the request refuses the pod
        return (pod,)
    alternatives = () if expansion is None else expansion.alternatives
    return tuple(as_alternative(pod, one) for one in alternatives)


def as_alternative(pod: PodView, alternative: Alternative) -> PodView:
    """Return the pod as a user would write it for the vendor of one alternative."""
    spec = pod.spec
    limits = alternative.limits
    containers = [_with(one, limits.get(one.name)) for one in spec.containers]
    init = spec.init_containers
    init = None if init is None else [_with(one, limits.get(one.name)) for one in init]
    metadata = pod.metadata
    if alternative.annotations:
        annotations = {**pod.annotations(), **alternative.annotations}
        metadata = replace(metadata, annotations=annotations)
    spec = replace(spec, containers=containers, init_containers=init)
    return replace(pod, metadata=metadata, spec=spec)


def _with(container: ContainerView, limits: Mapping[str, str] | None) -> ContainerView:
    if not is_neutral(container):
        return container
    resources = container.resources or ResourcesView()
    kept = _without(resources.limits)
    return replace(
        container,
        resources=replace(
            resources, limits={**kept, **(limits or {})}, requests=_without(resources.requests)
        ),
    )


def _without(
    quantities: Mapping[str, str | int | float] | None,
) -> dict[str, str | int | float]:
    return {name: value for name, value in (quantities or {}).items() if name not in NAMES}


def selector_of(
    selector: DeviceSelector, expansion: Expansion, alternative: Alternative
) -> DeviceSelector:
    """Return the pod's own constraints with those of its SKU."""
    return replace(
        selector,
        allow_types=alternative.types or selector.allow_types,
        numa_bind=selector.numa_bind or expansion.link == "numa",
        min_isolation=(*selector.min_isolation, *expansion.min_isolation),
        no_overcommit=selector.no_overcommit or expansion.service_class == GUARANTEED,
    )


def policy_of(policy: PlacementPolicy, expansion: Expansion) -> PlacementPolicy:
    """Return the pod's policy with the link that its SKU prefers."""
    if expansion.link != "fastest" or "topology-aware" in policy.device:
        return policy
    return replace(policy, device=("topology-aware", *policy.device))
