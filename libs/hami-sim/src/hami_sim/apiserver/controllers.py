# SPDX-License-Identifier: Apache-2.0
"""The few controllers without which an API server alone looks broken.

Garbage collection by owner references (background, foreground, orphan), emptying and removing
terminating namespaces, ReplicaSets, claims of devices, status of disruption budgets and resource
quotas. All work is done from one set of hints that changes feed; a sweep looks at everything, so a
lost hint costs time, never correctness.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

import anyio
import anyio.lowlevel

from hami_sim.apiserver import disruption, quota, replicas
from hami_sim.apiserver.auth import User
from hami_sim.apiserver.calls import Call, DeleteOptions
from hami_sim.apiserver.claims import ClaimController
from hami_sim.apiserver.errors import ApiError, Obj, clone
from hami_sim.apiserver.operations import Operations
from hami_sim.apiserver.replicas import ReplicaController
from hami_sim.apiserver.store import Change, Stored

_LOG: Final = logging.getLogger(__name__)
_SWEEP_S: Final = 5.0
_CONTROLLER: Final = User(name="system:kube-controller-manager")
_FOREGROUND: Final = "foregroundDeletion"
_ORPHAN: Final = "orphan"
_PROPAGATING: Final = frozenset({_FOREGROUND, _ORPHAN})


class Controllers:
    """All loops of one server; `run` ends only by cancellation."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._store = operations.store
        self._wake = anyio.Event()
        self._store.on_change.append(self._noticed)
        self._claims = ClaimController(operations, _CONTROLLER)
        self._replicas = ReplicaController(operations, _CONTROLLER)
        self._due: set[str] = {"garbage", "namespaces", "budgets", "quotas", "claims", "replicas"}

    def _noticed(self, key: str, change: Change) -> None:
        if change.type == "DELETED" or change.new.obj["metadata"].get("deletionTimestamp"):
            self._due |= {"garbage", "namespaces"}
        elif change.type == "ADDED" and change.new.obj["metadata"].get("ownerReferences"):
            self._due.add("garbage")
        if key in ("pods", disruption.KEY):
            self._due.add("budgets")
        if self._store.tables["resourcequotas"].rows:
            self._due.add("quotas")
        if not self._claims.is_idle:
            self._due.add("claims")
        if key in ("pods", replicas.KEY) and not self._replicas.is_idle:
            self._due.add("replicas")
        if self._due:
            self._wake.set()

    async def run(self) -> None:
        """Work whenever something changed, and once in a while anyway."""
        while True:
            due, self._due = self._due, set()
            self._wake = anyio.Event()
            try:
                if "claims" in due:
                    await self._claims.work()
                if "replicas" in due:
                    await self._replicas.work()
                if "namespaces" in due:
                    await self._empty_namespaces()
                if "garbage" in due:
                    await self._collect()
                if "budgets" in due:
                    self._refresh_budgets()
                if "quotas" in due:
                    self._refresh_quotas()
            except ApiError as error:
                _LOG.warning("controller pass failed", extra={"reason": str(error)})
            if self._due:
                await anyio.lowlevel.checkpoint()
                continue
            with anyio.move_on_after(_SWEEP_S) as scope:
                await self._wake.wait()
            if scope.cancelled_caught:
                self._due |= {"garbage", "namespaces", "replicas"}

    def _call(self, key: str, stored: Stored) -> Call:
        metadata = stored.obj["metadata"]
        return Call(
            resource=self._operations.table.by_key(key),
            namespace=metadata.get("namespace", ""),
            name=metadata["name"],
            user=_CONTROLLER,
        )

    async def _delete(self, key: str, stored: Stored) -> None:
        options = DeleteOptions(uid=stored.obj["metadata"]["uid"])
        try:
            await self._operations.delete(self._call(key, stored), options)
        except ApiError as error:
            if error.reason not in ("NotFound", "Conflict"):
                raise

    # -- namespaces

    async def _empty_namespaces(self) -> None:
        for stored in list(self._store.tables["namespaces"].rows.values()):
            if not stored.obj["metadata"].get("deletionTimestamp"):
                continue
            name = stored.obj["metadata"]["name"]
            left = 0
            for key, table in self._store.tables.items():
                for (namespace, _), content in list(table.rows.items()):
                    if namespace != name:
                        continue
                    if not content.obj["metadata"].get("deletionTimestamp"):
                        await self._delete(key, content)
                left += sum(namespace == name for namespace, _ in table.rows)
            current = self._store.get("namespaces", "", name)
            if not left and current is not None:
                self._finish_namespace(current)

    def _finish_namespace(self, current: Stored) -> None:
        obj = clone(current.obj)
        finalizers = [f for f in obj.get("spec", {}).get("finalizers", []) if f != "kubernetes"]
        obj["spec"] = {"finalizers": finalizers} if finalizers else {}
        self._store.put("namespaces", obj)
        if not finalizers and not obj["metadata"].get("finalizers"):
            self._store.remove("namespaces", "", obj["metadata"]["name"])

    # -- garbage

    def _owned(self) -> Iterator[tuple[str, Stored]]:
        for key, table in self._store.tables.items():
            for stored in list(table.rows.values()):
                if stored.obj["metadata"].get("ownerReferences"):
                    yield key, stored

    def _live_uids(self) -> dict[str, Obj]:
        return {
            stored.obj["metadata"]["uid"]: stored.obj
            for table in self._store.tables.values()
            for stored in table.rows.values()
        }

    async def _collect(self) -> None:
        owned = list(self._owned())
        uids = self._live_uids() if owned else {}
        for key, stored in owned:
            metadata = stored.obj["metadata"]
            owners = metadata["ownerReferences"]
            alive = [uids[owner["uid"]] for owner in owners if owner["uid"] in uids]
            waiting = [
                owner
                for owner in alive
                if owner["metadata"].get("deletionTimestamp")
                and _FOREGROUND in (owner["metadata"].get("finalizers") or ())
            ]
            if not metadata.get("deletionTimestamp") and len(alive) == len(waiting):
                await self._delete(key, stored)
        await self._release_owners()

    async def _release_owners(self) -> None:
        """Let owners go whose dependents are gone (foreground) or set free (orphan)."""
        for key, table in self._store.tables.items():
            for stored in list(table.rows.values()):
                metadata = stored.obj["metadata"]
                finalizers = set(metadata.get("finalizers") or ())
                if not metadata.get("deletionTimestamp") or not finalizers & _PROPAGATING:
                    continue
                dependents = [
                    (other, row)
                    for other, row in self._owned()
                    if any(
                        o["uid"] == metadata["uid"] for o in row.obj["metadata"]["ownerReferences"]
                    )
                ]
                if _ORPHAN in finalizers:
                    for other, row in dependents:
                        self._set_free(other, row, metadata["uid"])
                    await self._drop_finalizer(key, stored, _ORPHAN)
                elif _FOREGROUND in finalizers and not dependents:
                    await self._drop_finalizer(key, stored, _FOREGROUND)

    def _set_free(self, key: str, stored: Stored, uid: str) -> None:
        obj = clone(stored.obj)
        owners = [owner for owner in obj["metadata"]["ownerReferences"] if owner["uid"] != uid]
        if owners:
            obj["metadata"]["ownerReferences"] = owners
        else:
            del obj["metadata"]["ownerReferences"]
        self._store.put(key, obj)

    async def _drop_finalizer(self, key: str, stored: Stored, name: str) -> None:
        def produce(current: Obj) -> Obj:
            kept = [f for f in current["metadata"].get("finalizers") or () if f != name]
            current["metadata"]["finalizers"] = kept
            return current

        await self._operations.update(self._call(key, stored), produce)

    # -- statuses

    def _refresh_budgets(self) -> None:
        for stored in list(self._store.tables[disruption.KEY].rows.values()):
            status = disruption.status_of(self._store, stored.obj)
            gone = {
                name: when
                for name, when in (status.pop("disruptedPods", None) or {}).items()
                if self._store.get("pods", stored.obj["metadata"]["namespace"], name) is not None
            }
            if gone:
                status["disruptedPods"] = gone
            if status != stored.obj.get("status"):
                self._store.put(disruption.KEY, {**stored.obj, "status": status})

    def _refresh_quotas(self) -> None:
        for stored in list(self._store.tables["resourcequotas"].rows.values()):
            status = quota.recompute(self._store, stored.obj)
            if status != stored.obj.get("status"):
                self._store.put("resourcequotas", {**stored.obj, "status": status})
