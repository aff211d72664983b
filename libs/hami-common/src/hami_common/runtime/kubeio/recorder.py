# SPDX-License-Identifier: Apache-2.0
"""Writes core/v1 Events about objects, so that ``kubectl describe`` shows our actions and reasons.

A repetition (same object, reason and message) within the window raises ``count`` of the Event that
exists instead of creating another. A lost Event is never an error of the caller: failures are
counted and logged. Outside document: Kubernetes API, core/v1 Event.
"""

import logging
import secrets
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Literal

import msgspec
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.errors import HamiError, NotFound
from hami_common.ports import Clock, KubeApi

WINDOW_S = 600.0
REMEMBERED = 1024
MESSAGE_LIMIT = 1024
"""Longest message the API server accepts."""

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class ObjectRef(Struct, frozen=True, kw_only=True):
    """The object an Event is about."""

    kind: str
    name: str
    namespace: str = ""
    """Empty for objects without one, such as nodes; their Events are in ``default``."""
    uid: str = ""
    api_version: str = "v1"
    field_path: str = ""
    resource_version: str = ""


class _Written(Struct):
    name: str
    count: int
    last_s: float


class EventRecorder:
    """Records Events in the name of one component."""

    def __init__(self, kube: KubeApi, *, component: str, clock: Clock, instance: str = "") -> None:
        self._kube = kube
        self._component = component
        self._instance = instance
        self._clock = clock
        self._written: OrderedDict[tuple[ObjectRef, str, str], _Written] = OrderedDict()
        self.failed_count = 0

    async def record(
        self,
        regarding: ObjectRef,
        *,
        reason: str,
        message: str,
        kind: Literal["Normal", "Warning"] = "Normal",
    ) -> None:
        """Write an Event, or raise the count of an equal one. Never raises ``HamiError``."""
        text = message if len(message) <= MESSAGE_LIMIT else f"{message[: MESSAGE_LIMIT - 1]}…"
        key = (regarding, reason, text)
        try:
            known = self._written.get(key)
            if known is None or self._clock.monotonic_s() - known.last_s > WINDOW_S:
                await self._create(key, kind)
            else:
                try:
                    await self._count_up(key, known)
                except NotFound:
                    await self._create(key, kind)  # expired on the server
        except HamiError as error:
            self.failed_count += 1
            _log.warning("event not recorded", extra={"reason": reason, "problem": str(error)})

    async def _create(self, key: tuple[ObjectRef, str, str], kind: str) -> None:
        regarding, reason, text = key
        namespace = regarding.namespace or "default"
        now = self._now()
        name = f"{regarding.name[:200].rstrip('.-')}.{secrets.token_hex(8)}"
        involved = {
            "kind": regarding.kind,
            "name": regarding.name,
            "namespace": regarding.namespace,
            "uid": regarding.uid,
            "apiVersion": regarding.api_version,
            "fieldPath": regarding.field_path,
            "resourceVersion": regarding.resource_version,
        }
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {name: value for name, value in involved.items() if value},
            "reason": reason,
            "message": text,
            "type": kind,
            "source": {"component": self._component, "host": self._instance},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
        }
        await self._kube.create(_path(namespace), _encoder.encode(event))
        self._written[key] = _Written(name=name, count=1, last_s=self._clock.monotonic_s())
        self._written.move_to_end(key)
        while len(self._written) > REMEMBERED:
            self._written.popitem(last=False)

    async def _count_up(self, key: tuple[ObjectRef, str, str], known: _Written) -> None:
        count = known.count + 1
        await self._kube.patch(
            f"{_path(key[0].namespace or 'default')}/{known.name}",
            _encoder.encode({"count": count, "lastTimestamp": self._now()}),
        )
        known.count, known.last_s = count, self._clock.monotonic_s()
        self._written.move_to_end(key)

    def _now(self) -> str:
        at = datetime.fromtimestamp(int(self._clock.now_s()), tz=UTC)
        return at.isoformat().replace("+00:00", "Z")


def _path(namespace: str) -> str:
    return api_path("api", "v1", "namespaces", namespace, "events")
