# SPDX-License-Identifier: Apache-2.0
"""The plugin DynamicResources: claims of pods in the cycle of the scheduler.

A pod waits until its claims exist. Filter chooses devices per node, Reserve keeps the choice for
the chosen node, PreBind stores it in the claims, and a failed bind takes the pod out of
``reservedFor`` while the allocation stays. As ``plugins/dynamicresources`` (Kubernetes 1.37).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Final

from hami_common.runtime.clock import SystemClock
from hami_sim.apiserver.calls import rfc3339
from hami_sim.apiserver.claims import FINALIZER
from hami_sim.apiserver.dra import CLAIMS, CLASSES, RESERVED_MOST, SLICES
from hami_sim.apiserver.errors import Obj, clone
from hami_sim.kube import Objects
from hami_sim.kubescheduler import devices
from hami_sim.kubescheduler.fit import NodeRefusal, NodeState, matches_any

RESOURCES: Final = (CLAIMS, SLICES, CLASSES)


class Claims:
    """Claims, slices and classes of the cluster, and allocations that are not stored yet."""

    def __init__(
        self, client: Objects, *, moved: Callable[[], None], ignored_by: Collection[str]
    ) -> None:
        """``moved`` is called after changes that may let a pod fit.

        ``ignored_by``: profiles in which the plugin is disabled.
        """
        self._client = client
        self._ignored_by = ignored_by
        self._moved = moved
        self._clock = SystemClock()
        self._objects: dict[str, dict[tuple[str, str], Obj]] = {key: {} for key in RESOURCES}
        self._chosen: dict[tuple[str, str], dict[str, Obj]] = {}
        """Allocation by claim uid, of a pod (by uid) on a node."""
        self._in_flight: dict[str, Obj] = {}
        """Allocation by claim uid, from Reserve until it is stored."""

    def seen(self, resource: str) -> Callable[[Obj | None, Obj | None], None]:
        """Return the function that takes changes of this resource."""
        return partial(self._seen, resource)

    def _seen(self, resource: str, old: Obj | None, new: Obj | None) -> None:
        obj = new or old
        if obj is None:
            return
        metadata = obj["metadata"]
        at = (metadata.get("namespace", ""), metadata["name"])
        if new is None:
            self._objects[resource].pop(at, None)
        else:
            self._objects[resource][at] = new
        self._moved()

    # -- the cycle

    def are_there(self, pod: Obj) -> bool:
        """Return whether all claims of the pod exist (PreEnqueue)."""
        return all(claim is not None for claim in self._of(pod))

    def has_any(self, pod: Obj) -> bool:
        """Return whether the plugin has claims of the pod to allocate or to reserve."""
        return any(True for _ in self._of(pod))

    def begin(self, pod: Obj) -> str:
        """Forget choices of an earlier cycle; returns why no node can serve the pod, or nothing."""
        uid = pod["metadata"]["uid"]
        for at in [at for at in self._chosen if at[0] == uid]:
            del self._chosen[at]
        for claim in self._of(pod):
            if claim is None:
                return "waiting for a resource claim"
            metadata, status = claim["metadata"], claim.get("status") or {}
            reserved = {consumer["uid"] for consumer in status.get("reservedFor") or ()}
            if metadata.get("deletionTimestamp"):
                return f'resourceclaim "{metadata["name"]}" is being deleted'
            if uid not in reserved and len(reserved) >= RESERVED_MOST:
                return "resourceclaim in use"
            if metadata["uid"] in self._in_flight:
                name = f"{metadata['namespace']}/{metadata['name']}"
                return f"resource claim {name} is in the process of being allocated"
        return ""

    def refusal(self, pod: Obj, state: NodeState) -> NodeRefusal | None:
        """Return why a node cannot serve the pod's claims, or None if it can (Filter)."""
        claims = [claim for claim in self._of(pod) if claim is not None]
        if not claims:
            return None
        open_claims = []
        for claim in claims:
            allocation = (claim.get("status") or {}).get("allocation")
            if allocation is None:
                open_claims.append(claim)
            elif (selector := allocation.get("nodeSelector")) and not matches_any(
                selector["nodeSelectorTerms"], state.node
            ):
                return _no("resourceclaim not available on the node")
        try:
            found = devices.allocate(
                state.node,
                open_claims,
                slices=self._objects[SLICES].values(),
                classes={name: obj for (_, name), obj in self._objects[CLASSES].items()},
                allocations=self._allocations(),
            )
        except LookupError as error:
            return _no(str(error.args[0]))
        if found is None:
            return _no("cannot allocate all claims")
        chosen = {
            claim["metadata"]["uid"]: allocation
            for claim, allocation in zip(open_claims, found, strict=True)
        }
        self._chosen[pod["metadata"]["uid"], state.name] = chosen
        return None

    def reserve(self, pod: Obj, node: str) -> None:
        """Keep the devices chosen for this node from other pods."""
        self._in_flight |= self._chosen.get((pod["metadata"]["uid"], node), {})

    async def store(self, pod: Obj, node: str) -> None:
        """Write allocation and consumer into the claims (PreBind)."""
        chosen = self._chosen.get((pod["metadata"]["uid"], node), {})
        for claim in list(self._of(pod)):
            if claim is not None:
                await self._write(pod, claim, chosen.get(claim["metadata"]["uid"]))

    async def take_back(self, pod: Obj) -> None:
        """Undo Reserve; stored allocations stay, without the pod as a consumer (Unreserve)."""
        uid = pod["metadata"]["uid"]
        for claim in list(self._of(pod)):
            if claim is None:
                continue
            self._in_flight.pop(claim["metadata"]["uid"], None)
            reserved = (claim.get("status") or {}).get("reservedFor") or []
            left = [consumer for consumer in reserved if consumer["uid"] != uid]
            if len(left) < len(reserved):
                document = {
                    "metadata": {"uid": claim["metadata"]["uid"]},
                    "status": {"reservedFor": left or None},
                }
                await self._patch(claim, document)

    async def _patch(self, claim: Obj, document: Obj, *, subresource: str = "status") -> Obj:
        metadata = claim["metadata"]
        stored = await self._client.patch(
            CLAIMS,
            metadata["name"],
            document,
            namespace=metadata["namespace"],
            subresource=subresource,
        )
        self._seen(CLAIMS, None, stored)
        return stored

    async def _write(self, pod: Obj, claim: Obj, allocation: Obj | None) -> None:
        metadata = claim["metadata"]
        if allocation is not None and FINALIZER not in (metadata.get("finalizers") or ()):
            finalizers = [*(metadata.get("finalizers") or ()), FINALIZER]
            change = {
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
                "finalizers": finalizers,
            }
            claim = await self._patch(claim, {"metadata": change}, subresource="")
            metadata = claim["metadata"]
        consumer = {
            "resource": "pods",
            "name": pod["metadata"]["name"],
            "uid": pod["metadata"]["uid"],
        }
        reserved = list((claim.get("status") or {}).get("reservedFor") or ())
        if consumer["uid"] not in {known["uid"] for known in reserved}:
            reserved.append(consumer)
        status: Obj = {"reservedFor": reserved}
        if allocation is not None:
            stamp = rfc3339(self._clock.now_s())
            status["allocation"] = {**clone(allocation), "allocationTimestamp": stamp}
        # Written elsewhere meanwhile: the next cycle uses what is there.
        version = metadata["resourceVersion"] if allocation is not None else None
        change = {"uid": metadata["uid"], **({"resourceVersion": version} if version else {})}
        await self._patch(claim, {"metadata": change, "status": status})
        self._in_flight.pop(metadata["uid"], None)

    # -- reading

    def _of(self, pod: Obj) -> Iterator[Obj | None]:
        """Yield the claims of the pod; None for one that does not exist yet.

        Of a pod in a profile without the plugin, none.
        """
        if pod["spec"].get("schedulerName") in self._ignored_by:
            return
        statuses = {
            item["name"]: item.get("resourceClaimName")
            for item in (pod.get("status") or {}).get("resourceClaimStatuses") or ()
        }
        namespace = pod["metadata"]["namespace"]
        for reference in pod["spec"].get("resourceClaims") or ():
            name = reference.get("resourceClaimName")
            if name is None:
                if reference["name"] not in statuses:
                    yield None
                    continue
                name = statuses[reference["name"]]
                if name is None:
                    continue  # none was needed
            yield self._objects[CLAIMS].get((namespace, name))

    def _allocations(self) -> Iterator[Obj]:
        for claim in self._objects[CLAIMS].values():
            allocation = (claim.get("status") or {}).get("allocation")
            if allocation is not None:
                yield allocation
            elif claim["metadata"]["uid"] in self._in_flight:
                yield self._in_flight[claim["metadata"]["uid"]]


def _no(reason: str) -> NodeRefusal:
    return NodeRefusal((reason,), resolvable=False)
