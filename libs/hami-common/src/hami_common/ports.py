# SPDX-License-Identifier: Apache-2.0
"""Protocols of the shells' dependencies: a clock, key-value buckets, a publisher, Kubernetes.

The adapters are in ``hami_common.runtime``, doubles in memory in ``tests.support``. One contract
suite tests both.
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
        """Seconds of a monotonic clock."""
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

    The leader of a replicated stream checks a condition against the messages that its followers
    have stored, and against writes in flight whose conditions have the same ``subject``; it does
    not see other writes in flight (nats-server 2.15). Writers that exclude each other therefore
    name one subject. On a stream with three replicas an append under a condition does not see an
    append without a condition that is still in flight, so every writer to ``hami_alloc`` sets one.
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
    """Deduplication id: the server drops a repeated one of the same subject for two minutes."""


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
        """``append`` of values that are independent of each other, sent together.

        Returns the revision of each, or its error, in their order. After a ``Conflict``, reads may
        briefly not yet return the conflicting value.
        """
        ...

    async def last_revision(self, subject_filter: str) -> int:
        """Sequence of the newest message whose subject matches the filter, 0 when there is none."""
        ...

    def watch(
        self, key_filter: str = ">"
    ) -> AbstractAsyncContextManager[AsyncIterator["Entry | Synced | Reset"]]:
        """Yield the latest value of each matching key, then ``Synced``, then all later values.

        Later values come in stream order, each once, without gap, across reconnects; a value that
        history dropped while the watcher was disconnected is skipped, except the latest of a key.
        If the server lost or replaced its store, ``Reset`` is yielded, then the latest values
        and ``Synced`` again.
        """
        ...

    async def forget(self, key: str) -> None:
        """Remove all stored values of ``key`` without a tombstone; watchers get no event.

        ``Conflict`` when the key holds the newest value of its node (first token of the key):
        without it the node's fence would move back (design D3). For compaction long after the
        fact: an event of a value that was just stored may be pending.
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
    """The store was lost or replaced by an older copy: drop all values of this watch.

    The latest values and a new ``Synced`` follow, once the bucket exists again.
    """


class Publisher(Protocol):
    """Publishes messages that are not bucket values."""

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Fire and forget: no acknowledgement, may be lost while the bus is unavailable."""
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

        Returns the sequence. ``Unavailable`` when the outcome is unknown.
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
    """The object as JSON.

    When a list shows that an object was deleted meanwhile (``DELETED``), only ``metadata`` with
    name, namespace, uid and the last resourceVersion seen.
    """
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

        For lists too large for memory; ``Unavailable`` when the server's continue token expires.
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
        """List (as ADDED events), then SYNCED, then watch until cancelled.

        After a 410 or a lost connection it lists again and reports the difference, then SYNCED, so
        the consumer always converges to the true set. Vanished objects arrive as DELETED; objects
        that were created and deleted in between have no event.
        """
        ...
