# SPDX-License-Identifier: Apache-2.0
"""Compares what the parts of an installation report about one pod at the same time.

The ledger on the bus, the pod's signed annotation, kubelet's PodResources, and what the container
has: its limits file and the limiter. A sample judges pods that run before and after it was taken,
since the others are on their way; capacity is judged of all. Kubelet may give one id to two pods
(``hami_nodeagent.core.claims``, rule 6), so ids are judged by number. Memory in MiB.
"""

from collections.abc import Iterator, Sequence

import grpc.aio
import msgspec
from nats.aio.client import Client

from hami_common import namespaces
from hami_common.errors import WireInvalid
from hami_common.events.allocation import AllocationRecord
from hami_common.kubeletapi import podresources, podresources_grpc
from hami_common.pods import limits
from hami_common.pods.podview import PodView
from hami_common.pods.signing import SignedPlacement, Verifier
from tests.cluster.node.node import RealNode
from tests.cluster.node.space import KUBELET_DIRECTORY
from tests.support.checker import inventory_of, ledger_of, over_capacity, placement_of
from tests.support.kubeclient import KubeClient

LIMITER = ("libvgpu.so", "ld.so.preload")
"""Mounted into every container with a share."""
_LIMITS = "volumes/kubernetes.io~downward-api/hami-limits-main/limits"
_RESOURCE = "nvidia.com/gpu"


class Truth:
    """Reads all four sources of one installation."""

    def __init__(self, node: RealNode, client: KubeClient, bus: Client, *, namespace: str) -> None:
        """``bus``: a connection that may read every stream."""
        self.bus = bus
        self._node = node
        self._client = client
        self._namespace = namespace
        self.samples = 0
        """Pods that were judged, over all samples."""

    async def pods(self, *, namespace: str = "") -> list[PodView]:
        """Pods of the tenants."""
        listed = await self._client.list("pods", namespace or self._namespace)
        return [msgspec.convert(item, PodView) for item in listed["items"]]

    async def problems(self) -> list[str]:
        """Return every contradiction of one sample."""
        before = _running(await self.pods())
        keys = await self._client.get("configmaps", "hami-trusted-keys", namespaces.SYSTEM)
        verifier = Verifier.from_pems(text.encode() for text in keys["data"].values())
        ledger = [one for one in (await ledger_of(self)).values() if one.op != "release"]
        inventory = await inventory_of(self)
        ids = await self._resources()
        seen = {uid: self._seen(uid) for uid in before}
        limited = self._limited()
        after = _running(await self.pods())
        problems = over_capacity([record.containers for record in ledger], inventory)
        for uid in before.keys() & after.keys():
            pod = after[uid]
            records = [record for record in ledger if record.pod_uid == uid]
            self.samples += 1
            name = pod.metadata.name
            signed = placement_of(pod, verifier)
            problems += [
                f"{name}: {problem}"
                for problem in _contradictions(
                    signed, records, ids.get(name, ()), seen[uid], is_limited=uid in limited
                )
            ]
        return problems

    async def _resources(self) -> dict[str, list[str]]:
        """Device ids of each pod according to kubelet; of the tenants' namespace."""
        address = f"unix:{self._node.pod_resources_socket}"
        async with grpc.aio.insecure_channel(address) as channel:
            stub = podresources_grpc.PodResourcesListerStub(channel)
            listed = await stub.List(podresources.ListPodResourcesRequest())
        return {
            pod.name: [
                device_id
                for container in pod.containers
                for devices in container.devices
                if devices.resource_name == _RESOURCE
                for device_id in devices.device_ids
            ]
            for pod in listed.pod_resources
            if pod.namespace == self._namespace
        }

    def _seen(self, uid: str) -> str:
        """Content of the limits file in the pod's container; empty if there is none."""
        pods = self._node.space.seen(KUBELET_DIRECTORY) / "pods"
        try:
            return (pods / uid / _LIMITS).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _limited(self) -> set[str]:
        """Uids of the pods that have a container with the limiter."""
        return {
            uid
            for uid, mounts in self._node.container_mounts()
            if all(name in mounts for name in LIMITER)
        }


def _running(pods: Sequence[PodView]) -> dict[str, PodView]:
    return {
        pod.metadata.uid: pod
        for pod in pods
        if pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None
    }


def _contradictions(
    placed: SignedPlacement | None,
    records: Sequence[AllocationRecord],
    ids: Sequence[str],
    seen: str,
    *,
    is_limited: bool,
) -> Iterator[str]:
    if placed is None:
        yield "runs without an annotation"
        return
    [shares] = placed.placement.containers
    if len(records) != 1:
        yield f"has {len(records)} records in the ledger"
    elif records[0].containers != placed.placement.containers:
        yield "ledger and annotation differ"
    if len(ids) != len(shares.shares):
        yield f"kubelet has {len(ids)} ids for {len(shares.shares)} shares"
    try:
        in_container = limits.decode(seen)
    except WireInvalid as error:
        yield f"its limits file is unreadable: {error}"
        return
    if in_container != limits.limits_of(shares, allocation_id=placed.allocation_id):
        yield f"container and annotation differ: {in_container}"
    if not is_limited:
        yield "its container has no limiter"
