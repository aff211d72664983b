# SPDX-License-Identifier: Apache-2.0
"""ReplicaSets: creates missing pods, and deletes surplus ones, the newest first.

A pod counts by its controlling owner reference while it neither terminates nor has finished, as in
``pkg/controller/replicaset`` (Kubernetes 1.34). Adoption by labels is not simulated.
"""

from __future__ import annotations

from typing import Final

from hami_sim.apiserver.auth import User
from hami_sim.apiserver.calls import Call, DeleteOptions
from hami_sim.apiserver.errors import ApiError, Obj, clone
from hami_sim.apiserver.operations import Operations

KEY: Final = "replicasets.apps"
_OVER: Final = ("Succeeded", "Failed")


class ReplicaController:
    """Keeps the number of pods of each ReplicaSet."""

    def __init__(self, operations: Operations, user: User) -> None:
        """Create and delete pods as ``user``."""
        self._operations = operations
        self._store = operations.store
        self._user = user

    @property
    def is_idle(self) -> bool:
        """True while there is no ReplicaSet."""
        return not self._store.tables[KEY].rows

    async def work(self) -> None:
        """Bring every ReplicaSet to its number of pods."""
        for stored in list(self._store.tables[KEY].rows.values()):
            if not stored.obj["metadata"].get("deletionTimestamp"):
                await self._replicate(stored.obj)

    async def _replicate(self, owner: Obj) -> None:
        uid, namespace = owner["metadata"]["uid"], owner["metadata"]["namespace"]
        pods = [
            row.obj
            for row in self._store.tables["pods"].rows.values()
            if _controller(row.obj) == uid
            and not row.obj["metadata"].get("deletionTimestamp")
            and row.obj["status"].get("phase") not in _OVER
        ]
        wanted = owner["spec"].get("replicas", 1)
        for _ in range(wanted - len(pods)):
            await self._operations.create(self._call(namespace), _pod(owner))
        pods.sort(key=lambda pod: int(pod["metadata"]["resourceVersion"]))
        for pod in pods[wanted:]:
            call = self._call(namespace, pod["metadata"]["name"])
            try:
                await self._operations.delete(call, DeleteOptions(uid=pod["metadata"]["uid"]))
            except ApiError as error:
                if error.reason not in ("NotFound", "Conflict"):
                    raise

    def _call(self, namespace: str, name: str = "") -> Call:
        resource = self._operations.table.by_key("pods")
        return Call(resource=resource, namespace=namespace, name=name, user=self._user)


def _controller(pod: Obj) -> str:
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((owner["uid"] for owner in owners if owner.get("controller")), "")


def _pod(owner: Obj) -> Obj:
    template = clone(owner["spec"]["template"])
    metadata = owner["metadata"]
    reference = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    own = {"generateName": f"{metadata['name']}-", "ownerReferences": [reference]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template.get("metadata", {}), **own},
        "spec": template["spec"],
    }
