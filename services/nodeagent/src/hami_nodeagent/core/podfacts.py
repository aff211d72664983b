# SPDX-License-Identifier: Apache-2.0
"""Reads from a pod's API object the facts on which claims and states are decided.

Containers keep kubelet's admission order: init containers (sidecars among them) in specification
order, then application containers. A container asks for a resource by its *limits*, because kubelet
reads nothing else for extended resources, and fractions are rounded up as kubelet does.
"""

import math
from collections.abc import Collection, Mapping
from datetime import datetime

from msgspec import Struct

from hami_common.errors import WireInvalid
from hami_common.model.request import ContainerKind
from hami_common.pods import annotations
from hami_common.pods.mounts import conflict_of, limits_volume, region_volume
from hami_common.pods.podview import ContainerStatusView, ContainerView, PodStatusView, PodView
from hami_common.pods.signing import SignedPlacement, Verifier
from hami_common.pods.visibility import from_elsewhere, giving
from hami_common.units import INT32_MAX, parse_quantity

_WRITTEN_AFTER_ADMISSION = frozenset(
    {"Initialized", "Ready", "ContainersReady", "PodReadyToStartContainers"}
)


class Ask(Struct, frozen=True, kw_only=True):
    """One container's request for one resource, as kubelet reads it from the pod spec."""

    container: str
    kind: ContainerKind
    count: int


class ClaimUse(Struct, frozen=True, kw_only=True):
    """One ResourceClaim that a container uses."""

    claim: str
    """Name of the claim, in the pod's namespace."""
    request: str = ""
    """The request that the container uses; empty: all of the claim."""

    def covers(self, claim: str, request: str) -> bool:
        """Return whether the container has the devices of this request."""
        return self.claim == claim and self.request in ("", request)


class PodFacts(Struct, frozen=True, kw_only=True):
    """Facts about a pod from the API server."""

    uid: str
    namespace: str
    name: str
    kind_by_container: Mapping[str, ContainerKind] = {}
    asks_by_resource: Mapping[str, tuple[Ask, ...]] = {}
    """Containers with requests, in the order in which kubelet admits them."""
    claims_by_container: Mapping[str, tuple[ClaimUse, ...]] = {}
    """Containers that use ResourceClaims, of any driver."""
    amounts_by_resource: Mapping[str, int] = {}
    """The whole pod's requests for resources that the agent advertises, as kubelet counts them."""
    gone: bool = False
    """The object was deleted; kubelet may still list the pod."""
    finished: bool = False
    """Phase Succeeded or Failed: no container of it will run again."""
    admitted: bool = False
    """Its status contains a field that kubelet writes only after admission."""
    started: frozenset[str] = frozenset()
    """Containers that run or ran."""
    is_prepared: bool = True
    """It has the label that the webhook puts on the pods that it prepared."""
    signed: SignedPlacement | None = None
    """The verified allocation annotation."""
    annotation_problem: str = ""
    """Reason why the annotation is invalid although it is present; empty when it is absent."""
    limits_mounted: frozenset[str] = frozenset()
    """Containers whose limits file travels with the pod, because the webhook prepared the pod."""
    limits_volumes: Mapping[str, str] = {}
    """The same containers → volume of the pod that holds the limits file."""
    region_volumes: Mapping[str, str] = {}
    """Container → volume of the pod that holds its usage region, where one travels with it."""
    hidden_limits: Mapping[str, str] = {}
    """Container → mounts that would hide or unhook the node's mounts, and the fix."""
    own_devices: Mapping[str, str] = {}
    """Container → variables that select devices which the node did not allocate, and the fix:
    kubelet gives the pod's variables precedence over those of the node."""
    unseen_env: Mapping[str, frozenset[str]] = {}
    """Container → such variables that ConfigMaps or Secrets may set; the agent cannot read
    these."""
    container_by_id: Mapping[str, str] = {}
    """Runtime's container id, as in the status → container. An ephemeral container that targets
    another one counts as its target."""
    killed_at_s: float | None = None
    """Unix time at which kubelet kills the containers, once the pod is being deleted."""
    traceparent: str = ""

    @property
    def title(self) -> str:
        """Return the pod's name for messages."""
        return f"{self.namespace}/{self.name}"


def facts_of(
    pod: PodView,
    *,
    node: str,
    resources: Collection[str],
    verifier: Verifier,
    gone: bool = False,
    amounts: Collection[str] = (),
) -> PodFacts:
    """Return facts of ``pod``: requests for ``resources``, and its placement on ``node``.

    ``amounts``: resources of memory and compute that kubelet counts.
    """
    signed, problem = _verified(pod, node, verifier)
    volumes = {volume.name: volume for volume in pod.spec.volumes or []}
    containers = [container for _, container in pod.containers_in_order()]
    limits_volumes = {
        one.name: name for one in containers if (name := limits_volume(one, volumes)) is not None
    }
    return PodFacts(
        uid=pod.metadata.uid,
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        kind_by_container={container.name: kind for kind, container in pod.containers_in_order()},
        asks_by_resource=_asks(pod, resources),
        claims_by_container=_claims(pod),
        amounts_by_resource=requests_of(pod, amounts),
        gone=gone,
        finished=pod.is_finished(),
        admitted=_admitted(pod.status),
        started=frozenset(
            status.name for status in _container_statuses(pod.status) if _has_started(status)
        ),
        is_prepared=pod.labels().get(annotations.MANAGED_LABEL) == "true",
        signed=signed,
        annotation_problem=problem,
        limits_mounted=frozenset(limits_volumes),
        limits_volumes=limits_volumes,
        region_volumes={
            one.name: name
            for one in containers
            if (name := region_volume(one, volumes)) is not None
        },
        hidden_limits={
            one.name: str(error)
            for one in containers
            if (error := conflict_of(one, volumes)) is not None
        },
        own_devices={
            one.name: f"container {one.name}: env[{name}]: would give it devices of its own choice "
            "beside its share; remove the variable"
            for one in containers
            if (name := giving(one.env or []))
        },
        unseen_env={one.name: names for one in containers if (names := _unseen_env(one))},
        container_by_id=_container_by_id(pod),
        killed_at_s=_unix_s(pod.metadata.deletion_timestamp),
        traceparent=pod.annotations().get(annotations.TRACEPARENT, ""),
    )


def _unix_s(text: str | None) -> float | None:
    """Return the time of a field of Kubernetes; ``None`` without one that can be read."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


def _verified(pod: PodView, node: str, verifier: Verifier) -> tuple[SignedPlacement | None, str]:
    text = pod.annotations().get(annotations.ALLOCATION, "")
    if not text:
        return None, ""
    try:
        return verifier.verify(text, pod_uid=pod.metadata.uid, node=node), ""
    except WireInvalid as error:
        return None, str(error)


def _asks(pod: PodView, resources: Collection[str]) -> dict[str, tuple[Ask, ...]]:
    asks: dict[str, list[Ask]] = {}
    for kind, container in pod.containers_in_order():
        for resource, text in container.limits().items():
            if resource not in resources:
                continue
            value = parse_quantity(text)
            if value is not None and 0 < value <= INT32_MAX:
                asks.setdefault(resource, []).append(
                    Ask(container=container.name, kind=kind, count=math.ceil(value))
                )
    return {resource: tuple(found) for resource, found in asks.items()}


def _claims(pod: PodView) -> dict[str, tuple[ClaimUse, ...]]:
    names = pod.claim_names()
    if not names:
        return {}
    return {
        container.name: tuple(
            ClaimUse(claim=names[use.name], request=use.request)
            for use in container.resources.claims
            if use.name in names
        )
        for _, container in pod.containers_in_order()
        if container.resources is not None and container.resources.claims
    }


def requests_of(pod: PodView, resources: Collection[str]) -> dict[str, int]:
    """Return the pod's requests for ``resources``, as kubelet counts them.

    Sums over application containers and sidecars, or what an init container needs beside the
    sidecars before it, if that is more (``PodRequests`` in ``k8s.io/component-helpers``, v1.34).
    """
    running: dict[str, int] = {}
    peak: dict[str, int] = {}
    for kind, container in pod.containers_in_order():
        for resource in resources:
            value = parse_quantity(container.quantity(resource) or "")
            if value is None or value <= 0:
                continue
            now = running.get(resource, 0) + math.ceil(value)
            if kind != "init":
                running[resource] = now
            peak[resource] = max(peak.get(resource, 0), now)
    return peak


def _container_by_id(pod: PodView) -> dict[str, str]:
    ephemeral = pod.spec.ephemeral_containers or []
    target_by_name = {one.name: one.target_container_name or one.name for one in ephemeral}
    statuses = [*_container_statuses(pod.status), *(pod.status.ephemeral_container_statuses or [])]
    return {
        status.container_id: target_by_name.get(status.name, status.name)
        for status in statuses
        if status.container_id
    }


def _container_statuses(status: PodStatusView) -> list[ContainerStatusView]:
    return [*(status.init_container_statuses or []), *(status.container_statuses or [])]


def _admitted(status: PodStatusView) -> bool:
    return (
        status.phase not in ("", "Pending")
        or bool(_container_statuses(status))
        or any(one.type in _WRITTEN_AFTER_ADMISSION for one in status.conditions or [])
    )


def _has_started(status: ContainerStatusView) -> bool:
    state = status.state
    ran = state is not None and (state.running is not None or state.terminated is not None)
    return ran or status.restart_count > 0


def _unseen_env(container: ContainerView) -> frozenset[str]:
    """Return device variables that ``envFrom`` may set; a variable in ``env`` has precedence."""
    return from_elsewhere(container) - {variable.name for variable in container.env or []}
