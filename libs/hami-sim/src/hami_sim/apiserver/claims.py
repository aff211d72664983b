# SPDX-License-Identifier: Apache-2.0
"""The controller of ResourceClaims: makes them from templates, takes unused allocations back.

As ``pkg/controller/resourceclaim`` (Kubernetes 1.37): a claim loses consumers that ended; with the
last of them it loses its allocation too. An allocation that was never reserved stays.
"""

from __future__ import annotations

from typing import Final

from hami_sim.apiserver.auth import User
from hami_sim.apiserver.calls import Call, DeleteOptions
from hami_sim.apiserver.dra import CLAIMS, TEMPLATES
from hami_sim.apiserver.errors import ApiError, Obj, clone
from hami_sim.apiserver.operations import Operations
from hami_sim.apiserver.store import Stored

FINALIZER: Final = "resource.kubernetes.io/delete-protection"
POD_CLAIM: Final = "resource.kubernetes.io/pod-claim-name"
"""Annotation of a claim that was made from a template: its name in the pod."""
_FINISHED: Final = frozenset({"Succeeded", "Failed"})


class ClaimController:
    """Brings claims and pods together; writes without admission."""

    def __init__(self, operations: Operations, user: User) -> None:
        """Make and delete claims as ``user``."""
        self._operations = operations
        self._store = operations.store
        self._user = user

    @property
    def is_idle(self) -> bool:
        """Return true if no claim exists and none can be made."""
        tables = self._store.tables
        return not tables[CLAIMS].rows and not tables[TEMPLATES].rows

    async def work(self) -> None:
        """Look at all pods and claims once."""
        for stored in list(self._store.tables["pods"].rows.values()):
            if stored.obj["spec"].get("resourceClaims"):
                await self._make_claims(stored.obj)
        for stored in list(self._store.tables[CLAIMS].rows.values()):
            await self._settle(stored)

    # -- claims from templates

    async def _make_claims(self, pod: Obj) -> None:
        known = {
            item["name"] for item in (pod.get("status") or {}).get("resourceClaimStatuses") or ()
        }
        if _is_done(pod) or pod["metadata"].get("deletionTimestamp"):
            return
        made: list[Obj] = []
        for reference in pod["spec"]["resourceClaims"]:
            template = reference.get("resourceClaimTemplateName")
            if not template or reference["name"] in known:
                continue
            claim = self._made_before(pod, reference["name"])
            claim = claim or await self._make(pod, reference["name"], template)
            if claim:
                made.append({"name": reference["name"], "resourceClaimName": claim})
        metadata = pod["metadata"]
        current = self._store.get("pods", metadata["namespace"], metadata["name"])
        if not made or current is None or current.obj["metadata"]["uid"] != metadata["uid"]:
            return
        pod = clone(current.obj)
        pod["status"].setdefault("resourceClaimStatuses", []).extend(made)
        self._store.put("pods", pod)

    def _made_before(self, pod: Obj, name: str) -> str:
        for stored in self._store.tables[CLAIMS].rows.values():
            metadata = stored.obj["metadata"]
            if (metadata.get("annotations") or {}).get(POD_CLAIM) == name and _is_owned(
                metadata, pod["metadata"]["uid"]
            ):
                return str(metadata["name"])
        return ""

    async def _make(self, pod: Obj, name: str, template: str) -> str:
        namespace = pod["metadata"]["namespace"]
        found = self._store.get(TEMPLATES, namespace, template)
        if found is None:
            return ""  # tried again when anything changes
        metadata = clone(found.obj["spec"].get("metadata") or {})
        metadata["generateName"] = f"{pod['metadata']['name']}-{name}-"
        metadata.setdefault("annotations", {})[POD_CLAIM] = name
        metadata["ownerReferences"] = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": pod["metadata"]["name"],
                "uid": pod["metadata"]["uid"],
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
        body = {"metadata": metadata, "spec": clone(found.obj["spec"]["spec"])}
        stored = await self._operations.create(self._call(namespace, ""), body)
        return str(stored.obj["metadata"]["name"])

    # -- consumers

    async def _settle(self, stored: Stored) -> None:
        claim = stored.obj
        metadata, status = claim["metadata"], claim.get("status") or {}
        reserved = status.get("reservedFor") or []
        left = [consumer for consumer in reserved if self._is_kept(consumer, metadata["namespace"])]
        is_unused = bool(metadata.get("deletionTimestamp")) and not left
        if FINALIZER in (metadata.get("finalizers") or ()) and (
            (reserved and not left) or is_unused
        ):
            self._deallocate(claim)
        elif len(left) < len(reserved):
            claim = clone(claim)
            claim["status"]["reservedFor"] = left
            self._store.put(CLAIMS, claim)
        if not left and self._belongs_to_done_pod(metadata):
            await self._delete(metadata)

    def _deallocate(self, claim: Obj) -> None:
        claim = clone(claim)
        claim["status"] = {}
        metadata = claim["metadata"]
        metadata["finalizers"] = [f for f in metadata["finalizers"] if f != FINALIZER]
        if not metadata["finalizers"]:
            del metadata["finalizers"]
        self._store.put(CLAIMS, claim)
        if metadata.get("deletionTimestamp") and "finalizers" not in metadata:
            self._store.remove(CLAIMS, metadata["namespace"], metadata["name"])

    def _is_kept(self, consumer: Obj, namespace: str) -> bool:
        if consumer.get("apiGroup") or consumer["resource"] != "pods":
            return True
        pod = self._store.get("pods", namespace, consumer["name"])
        return (
            pod is not None
            and pod.obj["metadata"]["uid"] == consumer["uid"]
            and not _is_done(pod.obj)
        )

    def _belongs_to_done_pod(self, metadata: Obj) -> bool:
        if POD_CLAIM not in (metadata.get("annotations") or {}):
            return False
        for owner in metadata.get("ownerReferences") or ():
            pod = self._store.get("pods", metadata["namespace"], owner["name"])
            if pod is not None and pod.obj["metadata"]["uid"] == owner["uid"]:
                return _is_done(pod.obj)
        return False  # garbage collection deletes it

    async def _delete(self, metadata: Obj) -> None:
        if metadata.get("deletionTimestamp"):
            return
        options = DeleteOptions(uid=metadata["uid"])
        try:
            await self._operations.delete(
                self._call(metadata["namespace"], metadata["name"]), options
            )
        except ApiError as error:
            if error.reason not in ("NotFound", "Conflict"):
                raise

    def _call(self, namespace: str, name: str) -> Call:
        return Call(
            resource=self._operations.table.by_key(CLAIMS),
            namespace=namespace,
            name=name,
            user=self._user,
        )


def _is_done(pod: Obj) -> bool:
    """Return true if no container of the pod runs any more, or ever will."""
    if (pod.get("status") or {}).get("phase") in _FINISHED:
        return True
    return bool(pod["metadata"].get("deletionTimestamp")) and not pod["spec"].get("nodeName")


def _is_owned(metadata: Obj, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in metadata.get("ownerReferences") or ())
