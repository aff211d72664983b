# SPDX-License-Identifier: Apache-2.0
"""Reads pods as plain JSON objects: containers by kind, identity, phase, resource requests.

Quantities are exact (`Decimal`); CPU in cores, memory in bytes, extended resources in units. A
pod's request counts sidecars and overhead as ``k8s.io/component-helpers/resource`` (1.34) does.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Final

from hami_sim.apiserver.quantity import parse_quantity

Obj = dict[str, Any]
Amounts = dict[str, Decimal]

TERMINAL: Final = ("Succeeded", "Failed")
_ZERO: Final = Decimal(0)


def uid_of(pod: Obj) -> str:
    """Return metadata.uid."""
    return str(pod["metadata"]["uid"])


def key_of(pod: Obj) -> tuple[str, str]:
    """Return (namespace, name)."""
    return str(pod["metadata"]["namespace"]), str(pod["metadata"]["name"])


def is_deleting(pod: Obj) -> bool:
    """Return true if deletion was requested."""
    return "deletionTimestamp" in pod["metadata"]


def phase_of(pod: Obj) -> str:
    """Return status.phase as the API last showed it."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def init_containers(pod: Obj) -> list[Obj]:
    """List init containers and sidecars, in order."""
    return list(pod["spec"].get("initContainers") or ())


def app_containers(pod: Obj) -> list[Obj]:
    """List application containers."""
    return list(pod["spec"].get("containers") or ())


def all_containers(pod: Obj) -> list[Obj]:
    """List all containers in the order in which kubelet admits them."""
    return init_containers(pod) + app_containers(pod)


def is_sidecar(container: Obj) -> bool:
    """Return true if an init container is restartable."""
    return container.get("restartPolicy") == "Always"


def restart_policy(pod: Obj) -> str:
    """Return the pod's restart policy."""
    return str(pod["spec"].get("restartPolicy") or "Always")


def is_extended(resource: str) -> bool:
    """Return true if a resource name is outside Kubernetes' own names."""
    return (
        "/" in resource
        and "kubernetes.io/" not in resource
        and not resource.startswith("requests.")
    )


def limits_of(container: Obj) -> Amounts:
    """Read a container's limits."""
    return _amounts((container.get("resources") or {}).get("limits"))


def requests_of(container: Obj) -> Amounts:
    """Read a container's requests; a limit without request counts as one."""
    return {**limits_of(container), **_amounts((container.get("resources") or {}).get("requests"))}


def _amounts(quantities: Obj | None) -> Amounts:
    return {name: parse_quantity(text).amount for name, text in (quantities or {}).items()}


def pod_requests(pod: Obj) -> Amounts:
    """Sum what the whole pod asks of its node."""
    total: Amounts = {}
    for container in app_containers(pod):
        _add(total, requests_of(container))
    sidecars: Amounts = {}
    peak: Amounts = {}
    for container in init_containers(pod):
        wanted = requests_of(container)
        if is_sidecar(container):
            _add(total, wanted)
            _add(sidecars, wanted)
            _raise(peak, sidecars)
        else:
            _add(wanted, sidecars)
            _raise(peak, wanted)
    _raise(total, peak)
    _add(total, _amounts(pod["spec"].get("overhead")))
    return total


def _add(total: Amounts, more: Amounts) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, _ZERO) + amount


def _raise(total: Amounts, least: Amounts) -> None:
    for name, amount in least.items():
        total[name] = max(total.get(name, _ZERO), amount)


def qos_class(pod: Obj) -> str:
    """Return the QoS class: Guaranteed, Burstable or BestEffort."""
    asked = [(requests_of(container), limits_of(container)) for container in all_containers(pod)]
    names = ("cpu", "memory")
    if not any(amounts.get(name) for pair in asked for amounts in pair for name in names):
        return "BestEffort"
    same = all(
        limits.get(name) and limits.get(name) == requests.get(name)
        for requests, limits in asked
        for name in names
    )
    return "Guaranteed" if same else "Burstable"


def find_container(pod: Obj, name: str) -> Obj | None:
    """Find a container of any kind by name."""
    return next((c for c in all_containers(pod) if c["name"] == name), None)
