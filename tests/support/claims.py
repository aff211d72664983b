# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims with allocations of our driver, as kube-scheduler stores them."""

from collections.abc import Sequence
from typing import Any

from hami_common.dra.names import DRIVER, device_name, pool_name

Obj = dict[str, Any]
API = "/apis/resource.k8s.io/v1"


def path(name: str, namespace: str = "default") -> str:
    return f"{API}/namespaces/{namespace}/resourceclaims/{name}"


def result(
    uuid: str, node: str = "n1", *, memory: str = "1000Mi", cores: str = "10", **more: Any
) -> Obj:
    """One allocated device."""
    return {
        "request": "gpu",
        "driver": DRIVER,
        "pool": pool_name(node),
        "device": device_name(uuid),
        "shareID": f"share-of-{uuid}",
        "consumedCapacity": {"memory": memory, "cores": cores, "slots": "1"},
        **more,
    }


def allocation(*results: Obj, at: str = "2026-01-01T00:00:00Z") -> Obj:
    return {"devices": {"results": list(results)}, "allocationTimestamp": at}


def consumer(pod: str) -> Obj:
    return {"resource": "pods", "name": pod, "uid": f"uid-{pod}"}


def claim(
    name: str,
    *results: Obj,
    namespace: str = "default",
    reserved_for: Sequence[str] = (),
    at: str = "2026-01-01T00:00:00Z",
    **metadata: Any,
) -> Obj:
    """A claim; without results it is not allocated."""
    status: Obj = {}
    if results:
        status["allocation"] = allocation(*results, at=at)
    if reserved_for:
        status["reservedFor"] = [consumer(pod) for pod in reserved_for]
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}", **metadata},
        "spec": {"devices": {"requests": [{"name": "gpu"}]}},
        "status": status,
    }
