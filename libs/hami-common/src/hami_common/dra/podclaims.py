# SPDX-License-Identifier: Apache-2.0
"""The ResourceClaim through which a pod gets the devices that its resource limits ask for.

In allocation mode ``dra`` (ADR 39) the webhook moves our resources from the pod's limits into an
annotation and lets containers name requests of one claim; the scheduler creates that claim, owned
by the pod; the node agent gives each container its share by the claim. All three derive requests
and their names here. For placement, quotas and the ledger the pod asks for what it always did:
``restored`` returns the view of the pod that has its resources.

A pod without other claims goes to a profile of kube-scheduler that leaves claims alone, and the
scheduler creates its claim at the bind (ADR 43), see ``claims_profile``.

A claim is charged for the whole life of its pod. So an init container that asks for no more than an
application container or sidecar uses the request of that container, see ``as_claimed``.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from hami_common.bounds import OBJECT_LIST_MOST, Label
from hami_common.dra.names import SOFT_MODE, VENDORS_BY_ANNOTATION
from hami_common.errors import RequestInvalid
from hami_common.model.placement import ContainerShares
from hami_common.model.request import ContainerRequest, DeviceRequest, PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import (
    ClaimUseView,
    ContainerView,
    MetadataView,
    PodView,
    Quantities,
    ResourcesView,
)

AllocationMode = Literal["device-plugin", "dra"]
"""Way in which a pod gets the devices of its resource limits."""
POD_CLAIM: Final = "hami"
"""Name by which the pod's spec calls the claim."""
PROFILE_SUFFIX: Final = "-claims"
"""End of the name of every profile whose pods get their claim at the bind, see ``claims_profile``.
"""
RESULTS_MOST: Final = 32
"""Devices of one claim, and requests of one (``resource.k8s.io/v1``)."""
_LABEL_MOST: Final = 63
_HASH_DIGITS: Final = 8

_Resources = Annotated[dict[Label, Quantities], Meta(max_length=OBJECT_LIST_MOST)]
_decoder = msgspec.json.Decoder(_Resources)
_encoder = msgspec.json.Encoder(order="deterministic")


class ShareRequest(Struct, frozen=True, kw_only=True):
    """One request of the pod's claim: what one container asks of one vendor."""

    name: str
    container: str
    """The container whose share it is; its name is that of the share in the ledger."""
    users: tuple[str, ...]
    """All containers that use it: init containers first."""
    asked: DeviceRequest


def request_name(container: str, vendor: str) -> str:
    """Return the name of the request of a container for devices of a vendor: a DNS label."""
    name = f"{container}-{vendor}"
    if len(name) <= _LABEL_MOST:
        return name
    digest = sha256(name.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: _LABEL_MOST - _HASH_DIGITS - 1]}-{digest}".replace("--", "-")


def claim_name(token: str) -> str:
    """Return the name of a claim; ``token`` is unique for each admission of a pod."""
    return f"{POD_CLAIM}-{sha256(token.encode()).hexdigest()[:16]}"


def encode_resources(resources: dict[str, dict[str, str]]) -> str:
    """Return the annotation's text for the resources of each container, by its name."""
    return _encoder.encode(resources).decode()


def is_claimed(pod: PodView) -> bool:
    """Return whether the pod gets the devices of its resource limits through a claim."""
    return keys.CLAIMED_RESOURCES in pod.annotations()


def claim_of(pod: PodView) -> str:
    """Return the name of the pod's claim of ours; empty without one."""
    if not is_claimed(pod):
        return ""
    own = [one for one in pod.spec.resource_claims or () if one.name == POD_CLAIM]
    return next((one.resource_claim_name or "" for one in own), "")


def claims_profile(scheduler_name: str) -> str:
    """Return the profile of kube-scheduler, beside ours, that leaves the claims of pods to HAMi.

    Its plugin DynamicResources is disabled: kube-scheduler neither waits for claims nor allocates
    devices to them.
    """
    return f"{scheduler_name}{PROFILE_SUFFIX}"


def is_claimed_at_bind(pod: PodView) -> bool:
    """Return whether the scheduler creates the pod's claim when it binds the pod.

    For any other pod with a claim of ours, a scheduler waits until the claim exists.
    """
    return is_claimed(pod) and pod.spec.scheduler_name.endswith(PROFILE_SUFFIX)


def owner_pod(metadata: MetadataView) -> str:
    """Return the uid of the pod that owns a claim of ours; empty for any other claim."""
    if (metadata.labels or {}).get(keys.MANAGED_LABEL) != "true":
        return ""
    owners = metadata.owner_references or ()
    return next((one.uid for one in owners if one.controller and one.kind == "Pod"), "")


def restored(pod: PodView) -> PodView:
    """Return the pod with its resources as limits of its containers; any other pod as it is.

    ``RequestInvalid``: the annotation cannot be read, or names a container that the pod lacks.
    """
    text = pod.annotations().get(keys.CLAIMED_RESOURCES)
    if text is None:
        return pod
    field = f"annotation {keys.CLAIMED_RESOURCES}"
    try:
        by_container = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise RequestInvalid(
            field=field,
            problem=f"cannot be read: {error}",
            fix="remove it and write the resources as limits of the containers",
        ) from error
    known = {container.name for _, container in pod.containers_in_order()}
    if unknown := sorted(by_container.keys() - known):
        raise RequestInvalid(
            field=field,
            problem=f"names container {unknown[0]}, which the pod does not have",
            fix="remove it and write the resources as limits of the containers",
        )
    spec = pod.spec
    return replace(
        pod,
        spec=replace(
            spec,
            containers=[_with(one, by_container.get(one.name)) for one in spec.containers],
            init_containers=None
            if spec.init_containers is None
            else [_with(one, by_container.get(one.name)) for one in spec.init_containers],
        ),
    )


def _with(container: ContainerView, limits: Quantities | None) -> ContainerView:
    if not limits:
        return container
    resources = container.resources or ResourcesView()
    merged = {**limits, **(resources.limits or {})}
    return replace(container, resources=replace(resources, limits=merged))


def as_claimed(request: PodRequest, *, claim: str) -> PodRequest:
    """Return the request as a claim can meet it: devices shared by limits, for the pod's life.

    ``claim``: its name. Init containers that ask for no more than another container are left out:
    they use the request of that container. ``RequestInvalid``: what no claim of ours can give.
    """
    for container in request.containers:
        for asked in container.requests:
            _require_claimable(container, asked, request)
    kept = tuple(one for own in request.containers if (one := _own(request, own)).requests)
    count = sum(asked.count for one in kept for asked in one.requests)
    if count > RESULTS_MOST:
        raise RequestInvalid(
            field="spec.containers",
            problem=f"{count} devices are requested, and a ResourceClaim has {RESULTS_MOST}",
            fix=f"request fewer, or set annotation {keys.ALLOCATION_MODE}: device-plugin",
        )
    selectors = {
        vendor: replace(selector, modes=(SOFT_MODE,))
        for vendor, selector in request.selectors.items()
    }
    return replace(request, containers=kept, selectors=selectors, claim=claim)


def _own(request: PodRequest, container: ContainerRequest) -> ContainerRequest:
    """Return the container with the requests of its own, which are held for the pod's life."""
    if container.kind != "init":
        return container
    asked = () if _host(request, container) else container.requests
    return replace(container, kind="app", requests=asked)


def _require_claimable(
    container: ContainerRequest, asked: DeviceRequest, request: PodRequest
) -> None:
    """Raise ``RequestInvalid`` unless the node agents publish devices that serve the request."""
    field, problem = f"container {container.name}", ""
    selector = request.selectors.get(asked.vendor)
    if asked.vendor in VENDORS_BY_ANNOTATION:
        problem = f"devices of {asked.vendor} are given by annotations of pods, not by claims"
    elif asked.profile or asked.exact:
        problem = "it asks for a hardware partition, and the claim of a pod has shares only"
    elif selector is not None and selector.modes and SOFT_MODE not in selector.modes:
        problem = f"it asks for a device in mode {', '.join(selector.modes)}, not for a share"
    elif asked.modes and SOFT_MODE not in asked.modes:
        problem = f"its resource is served in mode {', '.join(asked.modes)} only"
    if problem:
        raise RequestInvalid(
            field=field,
            problem=problem,
            fix=f"set annotation {keys.ALLOCATION_MODE}: device-plugin",
        )


def requests_of(request: PodRequest) -> tuple[ShareRequest, ...]:
    """Return the requests of the pod's claim, of the pod's own request before ``as_claimed``."""
    users: dict[tuple[str, str], list[str]] = {}
    asked_by: dict[tuple[str, str], DeviceRequest] = {}
    for container in request.containers:
        host = _host(request, container) if container.kind == "init" else ""
        for asked in container.requests:
            key = (host or container.name, asked.vendor)
            users.setdefault(key, []).append(container.name)
            if not host:
                asked_by[key] = asked
    return tuple(
        ShareRequest(
            name=request_name(*key), container=key[0], users=tuple(users[key]), asked=asked
        )
        for key, asked in asked_by.items()
    )


def by_request(containers: Iterable[ContainerShares]) -> tuple[ContainerShares, ...]:
    """Return a pod's shares as those of its claim's requests, as ``claims.containers_of`` does.

    In the order of their names, which no allocation is bound to keep.
    """
    found = [
        ContainerShares(
            name=request_name(container.name, vendor),
            kind="app",
            shares=tuple(share for share in container.shares if share.vendor == vendor),
        )
        for container in containers
        for vendor in dict.fromkeys(share.vendor for share in container.shares)
    ]
    return tuple(sorted(found, key=lambda one: one.name))


def uses_of(requests: Iterable[ShareRequest], container: str) -> tuple[ClaimUseView, ...]:
    """Return the entries of ``resources.claims`` of a container."""
    return tuple(
        ClaimUseView(name=POD_CLAIM, request=one.name) for one in requests if container in one.users
    )


def _host(request: PodRequest, container: ContainerRequest) -> str:
    """Return the container whose requests an init container can use; empty: it needs its own.

    All from one container: they have one limits file and one usage region.
    """
    for other in request.containers:
        given = {one.vendor: one for one in other.requests}
        if other.kind != "init" and all(
            asked.vendor in given and _covers(given[asked.vendor], asked)
            for asked in container.requests
        ):
            return other.name
    return ""


def _covers(given: DeviceRequest, asked: DeviceRequest) -> bool:
    """Return whether a share as ``given`` is enough for ``asked``."""
    is_same_kind = (given.kind, given.types, given.shape) == (asked.kind, asked.types, asked.shape)
    if not is_same_kind or given.count != asked.count or (asked.exclusive and not given.exclusive):
        return False
    if asked.memory_mib:
        has_memory = given.memory_mib >= asked.memory_mib
    else:
        has_memory = not given.memory_mib and given.memory_pct >= asked.memory_pct
    # 0 has no limit: an init container with a limit may have more, one without must not have less.
    has_compute = given.core_pct == 0 or 0 < asked.core_pct <= given.core_pct
    return has_memory and has_compute
