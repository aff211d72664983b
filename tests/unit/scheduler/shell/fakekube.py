# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes API in memory, as far as the scheduler uses it: pods, bindings, claims, watch.

Bindings obey the rules of the real server (registry/core/pod/storage, v1.34): uid and
resourceVersion are preconditions, an assigned or a deleting pod is never assigned again, and
annotations are merged in the transaction that assigns. Leases and ResourceClaims have versions; an
allocation is never changed, and cleared only together with its consumers (``resource.k8s.io/v1``,
1.37). Knows nothing of the scheduler.
"""

import copy
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from hami_common.errors import Conflict, Denied, NotFound, Unavailable
from hami_common.ports import WatchEvent

Obj = dict[str, Any]
STORED = ("leases", "resourceclaims")
"""Kinds that the scheduler creates."""


class FakeKube:
    """Pods and nodes by path."""

    def __init__(self) -> None:
        self.objects: dict[str, Obj] = {}
        self.revision = 100
        self._watches: list[
            tuple[str, tuple[str, ...] | None, MemoryObjectSendStream[WatchEvent]]
        ] = []
        self.is_blind = False
        """True while watches are down: changes in that time are never delivered."""
        self.node_touches: list[str] = []
        self.evictions: list[str] = []
        """Names of evicted pods, in order."""
        self.deletions: list[str] = []
        """Names of pods deleted by the scheduler, in order."""
        self.kept: set[str] = set()
        """Names of pods whose eviction a disruption budget blocks."""
        self.events: list[Obj] = []

    # --- changes by the cluster ------------------------------------------------------------------

    def put(self, path: str, obj: Obj) -> Obj:
        """Create or overwrite an object, as another client would."""
        known = self.objects.get(path)
        return self._store(path, obj, "MODIFIED" if known else "ADDED")

    def pod(self, name: str, namespace: str = "default") -> Obj:
        return self.objects[f"/api/v1/namespaces/{namespace}/pods/{name}"]

    def pods(self) -> list[Obj]:
        return [obj for path, obj in self.objects.items() if "/pods/" in path]

    def change(self, path: str, **changes: Any) -> Obj:
        """Deep-merge ``changes`` into an object."""
        obj = copy.deepcopy(self.objects[path])
        _merge(obj, changes)
        return self._store(path, obj, "MODIFIED")

    def remove(self, path: str) -> None:
        obj = self.objects.pop(path)
        self.revision += 1
        self._tell(path, "DELETED", obj, obj)

    # --- hami_common.ports.KubeApi ---------------------------------------------------------------

    async def get(self, path: str) -> bytes:
        await anyio.lowlevel.checkpoint()
        return json.dumps(self._known(path)).encode()

    async def list_pages(
        self, path: str, *, label_selector: str = "", field_selector: str = "", page_size: int = 500
    ) -> Sequence[bytes]:
        await anyio.lowlevel.checkpoint()
        field, _, node = field_selector.partition("=")
        assert field in {"", "spec.nodeName"}
        found = [
            obj
            for _, obj in self._matching(path, label_selector)
            if not field or obj["spec"].get("nodeName", "") == node
        ]
        return [
            json.dumps(
                {
                    "metadata": {"resourceVersion": str(self.revision)},
                    "items": found[at : at + page_size],
                }
            ).encode()
            for at in range(0, max(1, len(found)), page_size)
        ]

    async def metadata_pages(
        self, path: str, *, label_selector: str = "", page_size: int = 500
    ) -> AsyncIterator[bytes]:
        key, separator, value = label_selector.partition("!=")
        assert separator
        await anyio.lowlevel.checkpoint()
        found = [
            {"metadata": obj["metadata"]}
            for _, obj in self._matching(path, "")
            if (obj["metadata"].get("labels") or {}).get(key) != value
        ]
        for at in range(0, len(found), page_size):
            yield json.dumps({"items": found[at : at + page_size]}).encode()

    async def create(self, path: str, body: bytes) -> bytes:
        await anyio.lowlevel.checkpoint()
        if path.endswith("/events"):
            self.events.append(json.loads(body))
            return b"{}"
        if path.endswith("/eviction"):
            return self.evict(path.removesuffix("/eviction"), json.loads(body))
        if path.rsplit("/", 1)[1] in STORED:
            document = json.loads(body)
            whole = f"{path}/{document['metadata']['name']}"
            if whole in self.objects:
                raise Conflict(what=whole, detail="already exists")
            document["metadata"].setdefault("uid", f"uid-{self.revision}")
            return json.dumps(self.put(whole, document)).encode()
        assert path.endswith("/binding"), path
        return self.bind(path.removesuffix("/binding"), json.loads(body))

    def evict(self, path: str, eviction: Obj) -> bytes:
        """The eviction subresource: the pod then ends until a test removes it."""
        pod = self._known(path)
        name = pod["metadata"]["name"]
        if eviction["deleteOptions"]["preconditions"]["uid"] != pod["metadata"]["uid"]:
            raise Conflict(what=path, detail="Precondition failed: UID in precondition")
        if name in self.kept:
            raise Unavailable(peer="fake API", detail="status 429 TooManyRequests")
        self.evictions.append(name)
        self.change(path, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
        return b'{"kind":"Status","status":"Success"}'

    def bind(self, path: str, binding: Obj) -> bytes:
        """The binding subresource."""
        pod = self._known(path)
        meta = binding["metadata"]
        what = f"pods/binding {path}"
        if meta.get("uid") and meta["uid"] != pod["metadata"]["uid"]:
            raise Conflict(what=what, detail="Precondition failed: UID in precondition")
        expected = meta.get("resourceVersion")
        if expected and expected != pod["metadata"]["resourceVersion"]:
            raise Conflict(what=what, detail="Precondition failed: ResourceVersion")
        if pod["metadata"].get("deletionTimestamp"):
            raise Conflict(what=what, detail="is being deleted, cannot be assigned to a host")
        if pod["spec"].get("nodeName"):
            raise Conflict(what=what, detail=f"is already assigned to {pod['spec']['nodeName']}")
        pod = copy.deepcopy(pod)
        pod["spec"]["nodeName"] = binding["target"]["name"]
        pod["metadata"].setdefault("annotations", {}).update(meta.get("annotations") or {})
        self._store(path, pod, "MODIFIED")
        return b'{"kind":"Status","status":"Success"}'

    async def patch(
        self, path: str, body: bytes, *, content_type: str = "application/merge-patch+json"
    ) -> bytes:
        await anyio.lowlevel.checkpoint()
        assert content_type == "application/merge-patch+json"
        is_status = path.endswith("/status")
        path, changes = path.removesuffix("/status"), json.loads(body)
        if path.startswith("/api/v1/nodes/"):
            self.node_touches.append(path.rsplit("/", 1)[1])
            if path in self.objects:
                self.change(path, **changes)
            return b"{}"
        old = self._known(path)
        uid = changes.get("metadata", {}).get("uid")
        if uid and uid != old["metadata"]["uid"]:
            detail = f'metadata.uid: Invalid value: "{uid}": field is immutable'
            raise Denied(peer="fake API", detail=detail, status=422)
        version = changes.get("metadata", {}).get("resourceVersion")
        if version and version != old["metadata"]["resourceVersion"]:
            raise Conflict(what=path, detail="the object has been modified")
        new = copy.deepcopy(old)
        _merge(new, changes)
        if is_status and "/resourceclaims/" in path:
            _require_claim_status(old.get("status") or {}, new.get("status") or {})
        if new != old:
            self._store(path, new, "MODIFIED")
        return json.dumps(self._known(path)).encode()

    async def replace(self, path: str, body: bytes) -> bytes:
        if "/leases/" not in path:
            raise Denied(peer="fake API", detail=f"no service may replace {path}", status=405)
        await anyio.lowlevel.checkpoint()
        document = json.loads(body)
        version = self._known(path)["metadata"]["resourceVersion"]
        if document["metadata"].get("resourceVersion") != version:
            raise Conflict(what=path, detail="modified")
        return json.dumps(self.put(path, document)).encode()

    async def delete(self, path: str, *, body: bytes = b"") -> None:
        await anyio.lowlevel.checkpoint()
        if "/pods/" in path:
            pod = self._known(path)
            if json.loads(body)["preconditions"]["uid"] != pod["metadata"]["uid"]:
                raise Conflict(what=path, detail="Precondition failed: UID in precondition")
            self.deletions.append(pod["metadata"]["name"])
            self.change(path, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
            return
        self._known(path)
        self.remove(path)

    @asynccontextmanager
    async def list_watch(
        self, path: str, *, label_selector: str = "", field_selector: str = ""
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        assert not field_selector
        send, receive = anyio.create_memory_object_stream[WatchEvent](math.inf)
        for _, obj in self._matching(path, label_selector):
            send.send_nowait(self._event("ADDED", obj))
        send.send_nowait(WatchEvent(type="SYNCED", resource_version=str(self.revision)))
        watch = (path.rsplit("/", 1)[1], _selector(label_selector), send)
        self._watches.append(watch)
        try:
            with send, receive:
                yield aiter(receive)
        finally:
            self._watches.remove(watch)

    def list_again(self) -> None:
        """Send every watch the whole collection again, after ``is_blind``."""
        self.is_blind = False
        for _, _, send in self._watches:
            send.send_nowait(WatchEvent(type="SYNCED", resource_version=str(self.revision)))

    # --- inside ----------------------------------------------------------------------------------

    def _known(self, path: str) -> Obj:
        if path not in self.objects:
            raise NotFound(what=path)
        return self.objects[path]

    def _matching(self, path: str, label_selector: str) -> list[tuple[str, Obj]]:
        plural = path.rsplit("/", 1)[1]
        wanted = _selector(label_selector)
        return [
            (key, obj)
            for key, obj in self.objects.items()
            if key.rsplit("/", 2)[1] == plural and _has_label(obj, wanted)
        ]

    def _store(self, path: str, obj: Obj, event: str) -> Obj:
        old = self.objects.get(path)
        self.revision += 1
        obj = copy.deepcopy(obj)
        obj.setdefault("metadata", {})["resourceVersion"] = str(self.revision)
        self.objects[path] = obj
        self._tell(path, event, obj, old)
        return obj

    def _tell(self, path: str, event: str, obj: Obj, old: Obj | None) -> None:
        plural = path.rsplit("/", 2)[1]
        for watched, wanted, send in [] if self.is_blind else self._watches:
            seen = old is not None and _has_label(old, wanted)
            sees = event != "DELETED" and _has_label(obj, wanted)
            if watched == plural and (seen or sees):
                told = "DELETED" if not sees else "MODIFIED" if seen else "ADDED"
                send.send_nowait(self._event(told, obj))

    def _event(self, told: str, obj: Obj) -> WatchEvent:
        return WatchEvent(
            type=told, raw=json.dumps(obj).encode(), resource_version=str(self.revision)
        )


def _require_claim_status(old: Obj, new: Obj) -> None:
    """Refuse what the API server refuses of a claim's status."""
    before, after = old.get("allocation"), new.get("allocation")
    problem = ""
    if before and after and before != after:
        problem = "status.allocation: Invalid value: field is immutable"
    elif new.get("reservedFor") and not after:
        problem = "status.reservedFor: Forbidden: may not be specified when not allocated"
    if problem:
        raise Denied(peer="fake API", detail=problem, status=422)


def _selector(text: str) -> tuple[str, ...] | None:
    return tuple(text.split(",")) if text else None


def _merge(target: Obj, changes: Obj) -> None:
    for key, value in changes.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            inner = target.setdefault(key, {})
            _merge(inner, value)
        else:
            target[key] = value


def _has_label(obj: Obj, wanted: tuple[str, ...] | None) -> bool:
    if wanted is None:
        return True
    labels = obj["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, _, value in (w.partition("=") for w in wanted))
