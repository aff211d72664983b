# SPDX-License-Identifier: Apache-2.0
"""Keeps a local copy of one resource by list and watch, as a reflector does.

A dropped watch resumes from the last resourceVersion seen; 410 lists again and reports what
vanished meanwhile. Callbacks run in the informer's own task, in order, and must not raise. Retry
delays grow from 50 ms to 2 s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeAlias

import aiohttp
import anyio
from anyio.abc import TaskStatus

from hami_sim.apiserver.client import KubeClient, StatusError, Watch
from hami_sim.apiserver.errors import Obj

_LOG: Final = logging.getLogger(__name__)
_FIRST_S: Final = 0.05
_LAST_S: Final = 2.0
_GONE: Final = 410

Seen: TypeAlias = Callable[[Obj | None, Obj | None], None]
"""(old, new); old is None for a new object, new is None for one that is gone."""


class Informer:
    """One resource, everywhere or selected."""

    def __init__(
        self,
        client: KubeClient,
        resource: str,
        seen: Seen,
        *,
        namespace: str = "",
        field_selector: str = "",
        label_selector: str = "",
    ) -> None:
        self._client = client
        self._resource = resource
        self._namespace = namespace
        self._seen = seen
        self._query: dict[str, str] = {}
        if field_selector:
            self._query["fieldSelector"] = field_selector
        if label_selector:
            self._query["labelSelector"] = label_selector
        self.objects: dict[tuple[str, str], Obj] = {}
        """(namespace, name) → object as last seen."""

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Follow for ever; reports started once the first list is in."""
        version = ""
        delay_s = _FIRST_S
        started = False
        while True:
            try:
                if not version:
                    version = await self._list()
                    if not started:
                        started = True
                        task_status.started()
                version = await self._watch(version)
                delay_s = _FIRST_S
            except StatusError as error:
                _LOG.info("watch refused", extra={"resource": self._resource, "why": str(error)})
                if error.code == _GONE:
                    version = ""
                    continue
                await anyio.sleep(delay_s)
                delay_s = min(delay_s * 2, _LAST_S)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                _LOG.info("watch broke", extra={"resource": self._resource, "why": repr(error)})
                await anyio.sleep(delay_s)
                delay_s = min(delay_s * 2, _LAST_S)

    async def _list(self) -> str:
        listed = await self._client.list(self._resource, self._namespace, **self._query)
        found = {_key(obj): obj for obj in listed["items"]}
        for key in [key for key in self.objects if key not in found]:
            self._seen(self.objects.pop(key), None)
        for key, obj in found.items():
            old = self.objects.get(key)
            self.objects[key] = obj
            if old is None or _version(old) != _version(obj):
                self._seen(old, obj)
        return str(listed["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> str:
        query = {**self._query, "resourceVersion": version, "allowWatchBookmarks": "true"}
        async with self._client.watch(self._resource, self._namespace, query) as watch:
            return await self._follow(watch, version)

    async def _follow(self, watch: Watch, version: str) -> str:
        try:
            async for kind, obj in watch:
                if kind == "ERROR":
                    raise StatusError(int(obj.get("code", 500)), obj, {})
                version = _version(obj)
                if kind == "BOOKMARK":
                    continue
                key = _key(obj)
                old = self.objects.get(key)
                if kind == "DELETED":
                    self.objects.pop(key, None)
                    self._seen(old or obj, None)
                else:
                    self.objects[key] = obj
                    self._seen(old, obj)
        except (aiohttp.ClientError, OSError) as error:
            _LOG.info("watch broke", extra={"resource": self._resource, "why": repr(error)})
        return version


def _key(obj: Obj) -> tuple[str, str]:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _version(obj: Obj) -> str:
    return str(obj["metadata"]["resourceVersion"])
