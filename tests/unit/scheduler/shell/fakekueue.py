# SPDX-License-Identifier: Apache-2.0
"""The API server with Kueue's kinds, in memory, and Kueue's part in the life of a Workload.

Server-side apply as far as the scheduler uses it: forced, on lists whose entries have a name or a
type, with the object's version as a precondition. Kueue's transitions are those that v0.15 writes
(pkg/workload: quota reserved, evicted, admitted); its queues and quotas are not here.
``tests/e2e/test_kueue.py`` runs Kueue itself.
"""

import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel

from hami_common.errors import Conflict, NotFound
from hami_common.ports import WatchEvent
from tests.unit.scheduler.shell.fakekube import FakeKube

Obj = dict[str, Any]
API = "/apis/kueue.x-k8s.io/v1beta2"
KINDS = ("workloads", "admissionchecks", "resourceflavors")
CHECK = "placement"
TIME = "2026-01-01T00:00:00Z"


class FakeKueue(FakeKube):
    """Pods, nodes, leases and Kueue's objects by path."""

    def __init__(self) -> None:
        super().__init__()
        self.is_installed = True
        self.unlisted: dict[str, anyio.Event] = {}
        """Kinds whose list is answered only once the event is set."""
        self.applied: list[tuple[str, Obj]] = []
        """Path and document of each server-side apply."""

    # --- hami_common.ports.KubeApi ---------------------------------------------------------------

    async def get(self, path: str) -> bytes:
        if path.startswith("/apis/kueue.x-k8s.io/") and path.count("/") == 3:
            await anyio.lowlevel.checkpoint()
            if not self.is_installed or path != API:
                raise NotFound(what=path)
            return json.dumps({"resources": [{"name": kind} for kind in KINDS]}).encode()
        return await super().get(path)

    async def create(self, path: str, body: bytes) -> bytes:
        if path.endswith("/leases"):
            await anyio.lowlevel.checkpoint()
            document = json.loads(body)
            whole = f"{path}/{document['metadata']['name']}"
            if whole in self.objects:
                raise Conflict(what=whole, detail="exists")
            return json.dumps(self.put(whole, document)).encode()
        return await super().create(path, body)

    async def replace(self, path: str, body: bytes) -> bytes:
        if "/leases/" in path:
            await anyio.lowlevel.checkpoint()
            document = json.loads(body)
            version = self._known(path)["metadata"]["resourceVersion"]
            if document["metadata"].get("resourceVersion") != version:
                raise Conflict(what=path, detail="modified")
            return json.dumps(self.put(path, document)).encode()
        return await super().replace(path, body)

    async def patch(
        self, path: str, body: bytes, *, content_type: str = "application/merge-patch+json"
    ) -> bytes:
        if content_type != "application/apply-patch+yaml":
            return await super().patch(path, body, content_type=content_type)
        await anyio.lowlevel.checkpoint()
        target, _, query = path.partition("/status?")
        assert query == "fieldManager=hami-placement&force=true"
        document = json.loads(body)
        known = self._known(target)
        version = document["metadata"].get("resourceVersion")
        if version and version != known["metadata"]["resourceVersion"]:
            raise Conflict(what=target, detail="the object has been modified")
        self.applied.append((target, document))
        changed = copy.deepcopy(known)
        for field, entries in document["status"].items():
            key = "type" if field == "conditions" else "name"
            mine = {entry[key]: entry for entry in entries}
            old = changed.setdefault("status", {}).get(field) or []
            kept = [one for one in old if one[key] not in mine]
            changed["status"][field] = [*kept, *mine.values()]
        self.put(target, changed)
        return json.dumps(changed).encode()

    @asynccontextmanager
    async def list_watch(
        self, path: str, *, label_selector: str = "", field_selector: str = ""
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        if (kind := path.rsplit("/", 1)[1]) in self.unlisted:
            await self.unlisted[kind].wait()
        async with super().list_watch(
            path, label_selector=label_selector, field_selector=field_selector
        ) as events:
            yield events

    # --- Kueue -----------------------------------------------------------------------------------

    def add_check(self, name: str = CHECK, *, controller: str = "hami.io/placement") -> None:
        spec = {"controllerName": controller}
        self.put(f"{API}/admissionchecks/{name}", {"metadata": {"name": name}, "spec": spec})

    def submit(self, name: str, *pod_sets: Obj, namespace: str = "default") -> str:
        """A Workload in its queue; returns its path."""
        path = f"{API}/namespaces/{namespace}/workloads/{name}"
        metadata = {"name": name, "namespace": namespace, "uid": f"wl-{name}"}
        self.put(path, {"metadata": metadata, "spec": {"podSets": list(pod_sets)}, "status": {}})
        return path

    def reserve(self, path: str, *, flavor: str = "any") -> None:
        """Kueue reserves quota, and asks the check."""
        names = [one["name"] for one in self.objects[path]["spec"]["podSets"]]
        flavors = {"nvidia.com/gpu": flavor}
        assigned = [{"name": name, "flavors": flavors} for name in names]
        check = {"name": CHECK, "state": "Pending", "message": "", "lastTransitionTime": TIME}
        self._conditions(path, QuotaReserved="True", Evicted="False")
        self.change(
            path,
            status={"admission": {"podSetAssignments": assigned}, "admissionChecks": [check]},
        )

    def admit(self, path: str) -> None:
        """Kueue admits a Workload whose checks are all ready."""
        assert self.check(path)["state"] == "Ready"
        self._conditions(path, Admitted="True")

    def take_quota(self, path: str) -> None:
        """Kueue takes the quota back, and resets the check."""
        reset = {
            "name": CHECK,
            "state": "Pending",
            "message": f"Reset to Pending after eviction. Previously: {self.check(path)['state']}",
            "lastTransitionTime": TIME,
        }
        self.change(path, status={"admissionChecks": [reset]})
        self._conditions(path, QuotaReserved="False", Evicted="True", Admitted="False")

    def finish(self, path: str) -> None:
        self._conditions(path, Finished="True")

    def check(self, path: str) -> Obj:
        """State of our check."""
        entry: Obj = next(
            one for one in self.objects[path]["status"]["admissionChecks"] if one["name"] == CHECK
        )
        return entry

    def active(self) -> Obj:
        """Condition of our AdmissionCheck; empty without one."""
        status = self.objects[f"{API}/admissionchecks/{CHECK}"].get("status") or {}
        return next(iter(status.get("conditions") or ()), {})

    def _conditions(self, path: str, **by_type: str) -> None:
        old = self.objects[path]["status"].get("conditions") or []
        kept = [one for one in old if one["type"] not in by_type]
        new = [{"type": key, "status": value} for key, value in by_type.items()]
        self.change(path, status={"conditions": [*kept, *new]})
