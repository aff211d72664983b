# SPDX-License-Identifier: Apache-2.0
"""The API server with kinds of another API group, in memory.

Discovery of the group, Leases with their versions, and server-side apply as far as the scheduler
uses it: forced, on lists whose entries have a name or a type, with the object's version as a
precondition.
"""

import copy
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from hami_common.errors import Conflict, NotFound
from hami_common.ports import WatchEvent
from tests.unit.scheduler.shell.fakekube import FakeKube, Obj


class FakeGroup(FakeKube):
    """Pods, nodes, leases and the objects of one version of one group, by path."""

    def __init__(self, api: str, kinds: Sequence[str]) -> None:
        """Serve ``kinds`` below ``api``, such as ``/apis/kueue.x-k8s.io/v1beta2``."""
        super().__init__()
        self.api = api
        self._kinds = kinds
        self.is_installed = True
        self.unlisted: dict[str, anyio.Event] = {}
        """Kinds whose list is answered only once the event is set."""
        self.applied: list[tuple[str, Obj]] = []
        """Path and document of each server-side apply."""

    # --- hami_common.ports.KubeApi ---------------------------------------------------------------

    async def get(self, path: str) -> bytes:
        if path.startswith(self.api.rpartition("/")[0]) and path.count("/") == 3:
            await anyio.lowlevel.checkpoint()
            if not self.is_installed or path != self.api:
                raise NotFound(what=path)
            return json.dumps({"resources": [{"name": kind} for kind in self._kinds]}).encode()
        return await super().get(path)

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
