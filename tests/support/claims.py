# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims with allocations of our driver, as kube-scheduler stores them, and their pods."""

import copy
import json
from collections.abc import Sequence
from typing import Any

from hami_common.dra.names import DRIVER, device_name, pool_name
from hami_common.dra.podclaims import (
    POD_CLAIM,
    claims_profile,
    encode_resources,
    requests_of,
    uses_of,
)
from hami_common.events.codec import decode
from hami_common.model.request import PodRequest
from hami_common.pods import annotations, limits
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog
from hami_sim.cluster import Cluster

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


def pod_of(document: Obj) -> str:
    """Return the uid of the pod that controls a claim of the scheduler; empty for others."""
    owners = document["metadata"].get("ownerReferences") or []
    return next((str(one["uid"]) for one in owners if one.get("controller")), "")


def asks(pod: Obj) -> bool:
    """Return whether the pod requests devices of ours."""
    return _request(pod) is not None


def _request(pod: Obj) -> PodRequest | None:
    view = decode(json.dumps(pod).encode(), PodView, what="pod")
    return Catalog.from_settings().parse_pod(view)


def by_claim(pod: Obj, name: str = "", *, at_bind: bool = False) -> Obj:
    """Return the document of an admitted pod as the webhook leaves it in allocation mode ``dra``.

    ``name``: of the claim. ``at_bind``: the pod is in the profile that leaves claims to HAMi.
    """
    request = Catalog.from_settings().parse_pod(
        decode(json.dumps(pod).encode(), PodView, what="pod")
    )
    assert request is not None
    pod = copy.deepcopy(pod)
    requests, moved = requests_of(request), {}
    for container in (*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]):
        uses = uses_of(requests, container["name"])
        mounts = container.get("volumeMounts") or []
        container["volumeMounts"] = [m for m in mounts if m["mountPath"] != limits.DIRECTORY]
        if not uses:
            continue
        resources = container["resources"]
        ours = {key for key in resources["limits"] if "/" in key}
        moved[container["name"]] = {key: resources["limits"][key] for key in ours}
        resources["limits"] = {k: v for k, v in resources["limits"].items() if k not in ours}
        resources["requests"] = {
            k: v for k, v in resources.get("requests", {}).items() if k not in ours
        }
        resources["claims"] = [{"name": one.name, "request": one.request} for one in uses]
    pod["metadata"].setdefault("annotations", {})[annotations.CLAIMED_RESOURCES] = encode_resources(
        moved
    )
    entry = {"name": POD_CLAIM, "resourceClaimName": name or f"hami-{pod['metadata']['name']}"}
    pod["spec"]["resourceClaims"] = [entry]
    if at_bind:
        pod["spec"]["schedulerName"] = claims_profile("hami-scheduler")
    return pod


async def use_claim(cluster: Cluster, name: str, exactly: Obj, *, script: str = "") -> str:
    """Create a claim and a pod that uses it; return the claim's uid.

    ``script``: for the shell of the container; empty: the image's own command.
    """
    spec = {"devices": {"requests": [{"name": "main", "exactly": exactly}]}}
    made = await cluster.create(
        f"{API}/namespaces/default/resourceclaims", {"metadata": {"name": name}, "spec": spec}
    )
    container: Obj = {
        "name": "main",
        "image": "simulated",
        "resources": {"claims": [{"name": "gpu", "request": "main"}]},
    }
    if script:
        container["command"] = ["sh", "-c", script]
    await cluster.create_pod(
        {
            "metadata": {"name": name},
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
                "containers": [container],
            },
        }
    )
    return str(made["metadata"]["uid"])
