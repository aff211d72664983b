# SPDX-License-Identifier: Apache-2.0
"""What the shells need from the outside world, as Protocols.

A clock, key-value buckets, a publisher, the Kubernetes API.

Adapters live in ``hami_common.runtime``; tests use the in-memory ones there. The same contract
suite runs over both.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from hami_common.errors import HamiError


class Clock(Protocol):
    """Time as the shells see it."""

    def now_s(self) -> float:
        """Unix seconds."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never go back."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Wait."""
        ...


class Entry(Struct, frozen=True, kw_only=True):
    """One stored message of a bucket."""

    key: str
    value: bytes
    revision: int
    """Stream sequence."""
    headers: Mapping[str, str] = {}
    time_s: float = 0.0


class Expect(Struct, frozen=True, kw_only=True):
    """Condition of an append, checked atomically by the server.

    The append is accepted only if the last message on ``subject`` (which may be a filter with
    wildcards, such as a node's fence) has stream sequence ``sequence``; 0 means there is none.

    The leader of a replicated stream weighs a condition against what its followers have stored, and
    against writes under way that have the same ``subject`` in their conditions; it does not see
    other writes under way (nats-server 2.15). So writers that exclude each other name one subject.
    On a stream with three replicas an append under a condition does not see an append without a
    condition that is still on its way: every writer to ``hami_alloc`` gives one.
    """

    subject: str
    sequence: int


class Write(Struct, frozen=True, kw_only=True):
    """A value to be stored in a bucket."""

    key: str
    value: bytes
    headers: Mapping[str, str] = {}
    expect: Expect | None = None


class Outgoing(Struct, frozen=True, kw_only=True):
    """A message to be stored in a stream."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = {}
    message_id: str
    """The server drops a repeated one of the same subject for two minutes."""


class Bucket(Protocol):
    """One key-value bucket: the latest value per key, with history and revisions."""

    name: str

    async def get(self, key: str) -> Entry | None:
        """Latest value of ``key``, or ``None``. ``Unavailable`` when the bus does not answer."""
        ...

    async def latest(self, key_filter: str = ">") -> Sequence[Entry]:
        """Latest value of each key that matches the NATS filter, in order of revision."""
        ...

    async def append(
        self,
        key: str,
        value: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        expect: Expect | None = None,
    ) -> int:
        """Store a value and return its revision.

        ``Conflict`` when ``expect`` does not hold; ``Unavailable`` when the outcome is unknown.
        """
        ...

    async def append_all(self, writes: Sequence[Write]) -> list[int | HamiError]:
        """``append`` of values that have nothing to do with each other, sent together.

        The revision of each, or its error, in their order. After a ``Conflict`` reads may for a
        moment not yet show what the value lost against.
        """
        ...

    async def last_revision(self, subject_filter: str) -> int:
        """Sequence of the newest message whose subject matches the filter, 0 when there is none."""
        ...

    def watch(
        self, key_filter: str = ">"
    ) -> AbstractAsyncContextManager[AsyncIterator["Entry | Synced | Reset"]]:
        """The latest value of each matching key, then ``Synced``, then all that follows.

        Later values come in stream order, each once, without gap, across reconnects; a value that
        history dropped while the watcher was away is skipped, the latest of a key never is. When
        the server lost or replaced what was stored, ``Reset`` comes, then the latest values and
        ``Synced`` again.
        """
        ...

    async def forget(self, key: str) -> None:
        """Remove all stored values of ``key`` without leaving a marker; watchers are not told.

        ``Conflict`` when the key holds the newest value of its node (first token of the key):
        without it the node's fence would move back (design D3). For compaction long after the
        fact: a value that was only just stored may not have become an event yet.
        """
        ...


class Feed(Protocol):
    """The accepted ledger records of one node, as its agent sees them (design D23)."""

    def watch(self) -> AbstractAsyncContextManager[AsyncIterator["Entry | Synced | Reset"]]:
        """Like ``Bucket.watch`` over the node's records, with order kept per key only.

        A value may be skipped when a newer one of its key exists.
        """
        ...


class Synced(Struct, frozen=True, kw_only=True):
    """Marks the point in a watch where everything stored before it has been delivered."""

    revision: int
    """Newest revision that the watch has delivered or skipped."""


class Reset(Struct, frozen=True, kw_only=True):
    """What was stored is gone or was replaced by an older copy: drop all that this watch told.

    The latest values and a new ``Synced`` follow, once the bucket exists again.
    """


class Publisher(Protocol):
    """Publishes messages that are not bucket values."""

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Fire and forget: no acknowledgement, may be lost while the bus is away."""
        ...

    async def publish_stored(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        message_id: str = "",
    ) -> int:
        """Publish to the stream that stores ``subject``, wait for the acknowledgement.

        Return the sequence. ``Unavailable`` when unknown.
        """
        ...


class BatchPublisher(Publisher, Protocol):
    """A publisher that stores several messages at once."""

    async def publish_all_stored(self, messages: Sequence[Outgoing]) -> list[int | HamiError]:
        """``publish_stored`` of each, sent together: its sequence or its error, in their order."""
        ...


class WatchEvent(Struct, frozen=True, kw_only=True):
    """One change of a Kubernetes object, or the end of a list."""

    type: str
    """``ADDED``, ``MODIFIED``, ``DELETED`` or ``SYNCED`` (no object)."""
    raw: bytes = b""
    """The object as JSON. Of an object that vanished unseen (``DELETED`` found by listing again)
    only ``metadata`` with name, namespace, uid and the last resourceVersion seen."""
    resource_version: str = ""


class KubeApi(Protocol):
    """The Kubernetes API as raw JSON documents.

    Errors: ``NotFound``, ``Conflict``, ``Denied``, ``Unavailable``.
    """

    async def get(self, path: str) -> bytes:
        """One object, for example ``/api/v1/namespaces/default/pods/web-0``."""
        ...

    async def list_pages(
        self, path: str, *, label_selector: str = "", field_selector: str = "", page_size: int = 500
    ) -> Sequence[bytes]:
        """All pages of a list, as raw documents."""
        ...

    def metadata_pages(
        self, path: str, *, label_selector: str = "", page_size: int = 500
    ) -> AsyncIterator[bytes]:
        """Pages of a list, one at a time, whose items have ``metadata`` and may have nothing else.

        For lists too large to be held; ``Unavailable`` when the server has forgotten it half way.
        """
        ...

    async def create(self, path: str, body: bytes) -> bytes:
        """POST ``body``; returns the created object."""
        ...

    async def patch(
        self, path: str, body: bytes, *, content_type: str = "application/merge-patch+json"
    ) -> bytes:
        """PATCH; returns the object."""
        ...

    async def replace(self, path: str, body: bytes) -> bytes:
        """PUT; returns the object."""
        ...

    async def delete(self, path: str, *, body: bytes = b"") -> None:
        """DELETE, with optional DeleteOptions."""
        ...

    def list_watch(
        self, path: str, *, label_selector: str = "", field_selector: str = ""
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """List (as ADDED events), then SYNCED, then watch for ever.

        After a 410 or a lost connection it lists again and reports the difference, then SYNCED once
        more, so the consumer always converges to the true set (vanished objects arrive as DELETED;
        what came and went in between is never told).
        """
        ...
