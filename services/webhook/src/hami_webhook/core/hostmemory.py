# SPDX-License-Identifier: Apache-2.0
"""Raises memory limits of containers whose device memory may be moved to the host by recall.

Parked device memory is memory of the container's processes, so kubelet and the kernel count it
against ``limits.memory``; the agent does not park a container that it would not fit. Requests stay
as they are: of all shares of a device only those beyond its memory are parked at a time, and
``host_memory_ratio`` of the device configuration bounds their sum. A pod of QoS class Guaranteed is
not changed, because with a limit above its request it would be Burstable. Memory in MiB.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from msgspec import Struct

from hami_common.model.request import ContainerRequest, PodRequest
from hami_common.pods import annotations as keys
from hami_common.units import MIB_BYTES, parse_quantity

MARGIN_MIB: Final = 64
"""Memory beyond the device memory that the agent requires before it parks a container."""
FULL_PCT: Final = 100
_MEMORY: Final = "memory"
_GUARANTEED: Final = ("cpu", _MEMORY)

Document = dict[str, Any]


class Raised(Struct, frozen=True, kw_only=True):
    """Changed resources of a pod."""

    resources: Mapping[int, Document] = {}
    """``resources`` of changed containers, by position in kubelet's order."""
    pod_resources: Document | None = None
    """``spec.resources``; ``None``: unchanged."""
    annotation: str = ""
    """New value of ``keys.RECALL_MEMORY``; empty: unchanged."""
    warnings: tuple[str, ...] = ()


def raise_limits(
    spec: Document,
    containers: list[Document],
    annotations: Mapping[str, str],
    request: PodRequest,
    *,
    vendors: Collection[str],
) -> Raised:
    """Return the resources with the memory of shares of ``vendors`` added to ``limits.memory``.

    ``containers`` are in kubelet's order. Containers whose limit is the one that an earlier
    admission wrote are not raised again.
    """
    is_guaranteed = _is_guaranteed(spec, containers)
    pod_limit = _limit(spec)
    done = dict(
        part.split("=", 1)
        for part in annotations.get(keys.RECALL_MEMORY, "").split(",")
        if "=" in part
    )
    resources: dict[int, Document] = {}
    written: dict[str, str] = {}
    warnings: list[str] = []
    added_mib = 0
    askers = {asker.name: asker for asker in request.containers}
    for index, container in enumerate(containers):
        name, own = container["name"], _limit(container)
        recalled = name in askers and _has_share(askers[name], vendors)
        if not recalled or (own is None and pod_limit is None):
            continue
        if own is not None and done.get(name) == own:
            written[name] = own
            continue
        if own is None and name in done:
            written[name] = done[name]
            continue
        share_mib = _share_mib(askers[name], vendors)
        if share_mib is None or is_guaranteed:
            warnings.append(_warning(name, share_mib))
            continue
        extra_mib = share_mib + MARGIN_MIB
        if own is not None:
            raised = _with_limit(container, extra_mib)
            if raised is None:
                continue  # the API server denies the quantity
            resources[index] = raised
            written[name] = raised["limits"][_MEMORY]
        else:
            written[name] = f"+{extra_mib}Mi"
        added_mib += extra_mib
    return Raised(
        resources=resources,
        pod_resources=_with_limit(spec, added_mib) if pod_limit is not None and added_mib else None,
        annotation=",".join(f"{name}={limit}" for name, limit in written.items()),
        warnings=tuple(warnings),
    )


def _warning(name: str, share_mib: int | None) -> str:
    if share_mib is None:
        return (
            f"container {name}: resources.limits.memory: the size of a share given in percent is "
            "known after placement only; recall leaves the container on its device unless the "
            f"limit exceeds the container's own use by its device memory and {MARGIN_MIB} MiB"
        )
    return (
        f"container {name}: resources.limits.memory: not raised, because the pod's QoS class is "
        "Guaranteed; recall leaves the container on its device unless requests and limits exceed "
        f"its own use by {share_mib + MARGIN_MIB} MiB"
    )


def _has_share(asker: ContainerRequest, vendors: Collection[str]) -> bool:
    """Return whether the container has a share of a device, and not only whole ones and parts."""
    return any(
        one.vendor in vendors
        and not one.profile
        and not (one.exclusive and one.memory_pct == FULL_PCT)
        for one in asker.requests
    )


def _share_mib(asker: ContainerRequest, vendors: Collection[str]) -> int | None:
    """Return the device memory of the container; ``None`` if a size depends on the device."""
    own = [one for one in asker.requests if one.vendor in vendors]
    if any(not one.memory_mib for one in own):
        return None
    return sum(one.memory_mib * one.count for one in own)


def _limit(of: Document) -> str | None:
    """Return ``limits.memory`` of a container or a pod as text."""
    value = ((of.get("resources") or {}).get("limits") or {}).get(_MEMORY)
    return None if value is None else str(value)


def _with_limit(of: Document, extra_mib: int) -> Document | None:
    """Return the raised resources; ``None`` if the limit is no quantity.

    An absent request is the limit by default, so it is written out.
    """
    resources = dict(of["resources"])
    limits, requests = dict(resources["limits"]), dict(resources.get("requests") or {})
    text = str(limits[_MEMORY])
    value = parse_quantity(text)
    if value is None:
        return None
    limits[_MEMORY] = f"{-(-value // MIB_BYTES) + extra_mib}Mi"
    requests.setdefault(_MEMORY, text)
    return {**resources, "limits": limits, "requests": requests}


def _is_guaranteed(spec: Document, containers: list[Document]) -> bool:
    """Return whether kubelet gives the pod the QoS class Guaranteed."""
    if (spec.get("resources") or {}).get("limits") or (spec.get("resources") or {}).get("requests"):
        return _has_equal(spec)
    return all(_has_equal(container) for container in containers)


def _has_equal(of: Document) -> bool:
    resources = of.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name in _GUARANTEED:
        limit = parse_quantity(str(limits.get(name, "")))
        request = parse_quantity(str(requests.get(name, limits.get(name, ""))))
        if not limit or limit != request:
            return False
    return True
