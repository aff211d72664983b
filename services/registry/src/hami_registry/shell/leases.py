# SPDX-License-Identifier: Apache-2.0
"""Reads the Leases by which replicas elect the one that does a background task.

Outside document: ``coordination.k8s.io/v1``, Lease, as the schedulers and kube-scheduler write it.
Times in seconds.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Final

import anyio
import msgspec
from msgspec import Meta, Struct

from hami_common.apipath import api_path
from hami_common.bounds import OBJECT_LIST_MOST, ObjectText, SignedInt32, Word
from hami_common.errors import Unavailable, WireInvalid
from hami_common.events.codec import decode
from hami_common.ports import Clock, KubeApi
from hami_registry.core.system import LeaseRow, lease_row

OURS: Final = "hami-"
"""Begin of the names of our Leases, kube-scheduler's included."""
READ_S: Final = 2.0
"""Longest wait for the API server."""
_PEER: Final = "the API server"


class _Metadata(Struct, frozen=True):
    name: ObjectText = ""


class _Named(Struct, frozen=True):
    metadata: _Metadata = _Metadata()


class _Spec(Struct, frozen=True, kw_only=True, rename="camel"):
    holder_identity: Word | None = None
    acquire_time: Word | None = None
    renew_time: Word | None = None
    lease_duration_seconds: SignedInt32 | None = None
    lease_transitions: SignedInt32 | None = None


class _Lease(Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    spec: _Spec = _Spec()


class _Leases(Struct, frozen=True):
    items: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=OBJECT_LIST_MOST)] | None = None


class Leases:
    """The Leases of one namespace."""

    def __init__(self, kube: Callable[[], KubeApi | None], *, namespace: str, clock: Clock) -> None:
        """``kube`` returns the API server once it was reached."""
        self._kube = kube
        self._namespace = namespace
        self._clock = clock

    async def rows(self) -> tuple[LeaseRow, ...]:
        """Return our Leases by name.

        ``Unavailable``: no answer; ``Denied``: no right to list them; ``WireInvalid``: unreadable.
        """
        kube = self._kube()
        if kube is None:
            raise Unavailable(peer=_PEER, detail="not reached yet")
        path = api_path(
            "apis", "coordination.k8s.io", "v1", "namespaces", self._namespace, "leases"
        )
        try:
            with anyio.fail_after(READ_S):
                pages = await kube.list_pages(path)
        except TimeoutError as error:
            raise Unavailable(peer=_PEER, detail=f"no answer in {READ_S:g} s") from error
        found = [
            decode(bytes(one), _Lease, what="lease")
            for page in pages
            for one in decode(page, _Leases, what="leases").items or ()
            if decode(bytes(one), _Named, what="lease").metadata.name.startswith(OURS)
        ]
        now_s = self._clock.now_s()
        return tuple(
            lease_row(
                name=one.metadata.name,
                holder=one.spec.holder_identity or "",
                since_s=_unix_s(one.spec.acquire_time),
                renewed_s=_unix_s(one.spec.renew_time),
                lease_s=float(one.spec.lease_duration_seconds or 0),
                transitions=one.spec.lease_transitions or 0,
                now_s=now_s,
            )
            for one in sorted(found, key=lambda one: one.metadata.name)
        )


def _unix_s(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except (ValueError, OverflowError) as error:
        raise WireInvalid(what="leases", problem=f"{text!r} is no time") from error
