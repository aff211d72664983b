# SPDX-License-Identifier: Apache-2.0
"""The object store: one revision counter, bounded history, and watches fed from it.

Every change takes the next revision; an object's `metadata.resourceVersion` is the revision that
wrote it, and a deletion has a revision of its own. Objects are JSON dicts without `kind` and
`apiVersion` (a list omits them, a single object gets them put in front); a stored dict is never
changed in place. Each change is encoded once and its bytes are shared by all watches.

Everything here runs without awaiting, so a read followed by a write is one transaction. This module
knows nothing about HTTP, validation or what an object means, except which field a watch is
indexed by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import anyio
import msgspec

from hami_sim.apiserver.errors import Obj, too_large_revision, too_old
from hami_sim.apiserver.selectors import FieldSelector, LabelSelector, field_text

if TYPE_CHECKING:
    from hami_sim.apiserver.resources import Resource, ResourceTable

Name: TypeAlias = tuple[str, str]
"""(namespace, name); the namespace of a cluster-wide object is empty."""
ChangeType: TypeAlias = Literal["ADDED", "MODIFIED", "DELETED"]

_ENCODER: Final = msgspec.json.Encoder()


def encode(value: object) -> bytes:
    """Encode JSON, compactly."""
    return _ENCODER.encode(value)


def with_revision(obj: Obj, revision: int) -> Obj:
    """Copy an object with its resourceVersion replaced."""
    return {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(revision)}}


class Stored:
    """One version of an object, with its encoding (made when first asked for)."""

    __slots__ = ("_body", "obj", "revision")

    def __init__(self, obj: Obj, revision: int) -> None:
        """Keep the object; it must already carry the revision."""
        self.obj = obj
        self.revision = revision
        self._body: bytes | None = None

    @property
    def body(self) -> bytes:
        """Return the JSON without kind and apiVersion."""
        if self._body is None:
            self._body = encode(self.obj)
        return self._body


class Change:
    """One revision of one object."""

    __slots__ = ("key", "lines", "new", "old", "revision", "type")

    def __init__(
        self,
        revision: int,
        key: Name,
        type_: ChangeType,
        new: Stored,
        old: Stored | None,
    ) -> None:
        """Keep both versions; for a deletion `new` is the last state at the deleting revision."""
        self.revision = revision
        self.key = key
        self.type: ChangeType = type_
        self.new = new
        self.old = old
        self.lines: dict[tuple[str, str], bytes] = {}
        """Encodings shared by watches, keyed by view and event type."""


class Delivery(msgspec.Struct, frozen=True):
    """Change as one watch receives it: the event type may differ by the watch's selectors."""

    type: ChangeType
    stored: Stored
    change: Change | None = None

    @property
    def revision(self) -> int:
        """Return the revision the client may resume after."""
        return self.change.revision if self.change else self.stored.revision


class Filter(msgspec.Struct, frozen=True):
    """Selector of the objects of a list or watch."""

    namespace: str = ""
    labels: LabelSelector = LabelSelector()
    fields: FieldSelector = FieldSelector()

    def matches(self, obj: Obj) -> bool:
        """Say whether an object is selected."""
        metadata = obj["metadata"]
        if self.namespace and metadata.get("namespace") != self.namespace:
            return False
        if self.labels.terms and not self.labels.matches(metadata.get("labels")):
            return False
        return not self.fields.terms or self.fields.matches(obj)


class Subscription:
    """One watch: a bounded queue of deliveries that its reader drains."""

    def __init__(self, wanted: Filter, *, index_value: str | None, limit: int) -> None:
        """Start empty; the table feeds it."""
        self.wanted = wanted
        self.index_value = index_value
        self.closed = False
        self._limit = limit
        self._pending: deque[Delivery] = deque()
        self._wake = anyio.Event()

    def offer(self, change: Change) -> None:
        """Take a change if the selectors see it; a reader too far behind is cut off."""
        is_now = change.type != "DELETED" and self.wanted.matches(change.new.obj)
        was = change.old is not None and self.wanted.matches(change.old.obj)
        if is_now:
            self._push(Delivery("MODIFIED" if was else "ADDED", change.new, change))
        elif was and change.old is not None:
            last = change.new
            if change.type != "DELETED":
                last = Stored(with_revision(change.old.obj, change.revision), change.revision)
            self._push(Delivery("DELETED", last, change if change.type == "DELETED" else None))

    def _push(self, delivery: Delivery) -> None:
        if len(self._pending) >= self._limit:
            self.close()
            return
        self._pending.append(delivery)
        self._wake.set()

    def close(self) -> None:
        """End the watch; its reader sees what is pending and then the end."""
        self.closed = True
        self._wake.set()

    def pending(self) -> list[Delivery]:
        """Take what is there now, without waiting."""
        taken = list(self._pending)
        self._pending.clear()
        return taken

    async def drain(self) -> list[Delivery]:
        """Wait for deliveries and take them all; empty means the watch ended."""
        while not self._pending and not self.closed:
            self._wake = anyio.Event()
            await self._wake.wait()
        return self.pending()


class Table:
    """All objects of one resource, their recent history and the watches on them."""

    def __init__(self, resource: Resource, window: int) -> None:
        """Start empty."""
        self.resource = resource
        self.rows: dict[Name, Stored] = {}
        self.history: deque[Change] = deque()
        self.compacted = 0
        """History at or before this revision is gone."""
        self._window = window
        self._sorted: list[Name] | None = None
        self._by_index: dict[str | None, set[Subscription]] = {None: set()}

    def names(self) -> list[Name]:
        """List the keys in list order."""
        if self._sorted is None:
            self._sorted = sorted(self.rows)
        return self._sorted

    def record(self, change: Change) -> None:
        """Apply a change and feed it to the watches."""
        if change.type == "DELETED":
            del self.rows[change.key]
            self._sorted = None
        else:
            self.rows[change.key] = change.new
            if change.type == "ADDED":
                self._sorted = None
        self.history.append(change)
        if len(self.history) > self._window:
            self.compacted = self.history.popleft().revision
        for subscription in self._interested(change):
            subscription.offer(change)

    def _interested(self, change: Change) -> list[Subscription]:
        found = list(self._by_index[None])
        if self.resource.index_field and len(self._by_index) > 1:
            values = {field_text(change.new.obj, self.resource.index_field)}
            if change.old is not None:
                values.add(field_text(change.old.obj, self.resource.index_field))
            for value in values:
                found.extend(self._by_index.get(value, ()))
        return found

    def attach(self, subscription: Subscription) -> None:
        """Start feeding a watch."""
        self._by_index.setdefault(subscription.index_value, set()).add(subscription)

    def detach(self, subscription: Subscription) -> None:
        """Stop feeding a watch."""
        bucket = self._by_index.get(subscription.index_value)
        if bucket is not None:
            bucket.discard(subscription)
            if not bucket and subscription.index_value is not None:
                del self._by_index[subscription.index_value]

    def at(self, revision: int) -> dict[Name, Stored] | None:
        """Rebuild the rows as of a revision; None when the history does not reach back."""
        if revision < self.compacted:
            return None
        rows = dict(self.rows)
        for change in reversed(self.history):
            if change.revision <= revision:
                break
            if change.old is None:
                rows.pop(change.key, None)
            else:
                rows[change.key] = change.old
        return rows


class Store:
    """All tables under one revision counter."""

    def __init__(
        self,
        resources: ResourceTable,
        *,
        window: int = 20_000,
        watch_limit: int = 50_000,
        first_revision: int = 1,
    ) -> None:
        """Make an empty table for each stored resource."""
        self.revision = first_revision
        self.tables = {
            row.key: Table(row, window)
            for row in resources.rows
            if not row.stored_as and "get" in row.verbs
        }
        self.on_change: list[Callable[[str, Change], None]] = []
        """Called after each change with the storage key; must not raise or block."""
        self._watch_limit = watch_limit

    def get(self, key: str, namespace: str, name: str) -> Stored | None:
        """Read one object."""
        return self.tables[key].rows.get((namespace, name))

    def put(self, key: str, obj: Obj) -> Stored:
        """Write an object under its own namespace and name, at the next revision."""
        table = self.tables[key]
        metadata = obj["metadata"]
        name = (metadata.get("namespace", ""), metadata["name"])
        old = table.rows.get(name)
        self.revision += 1
        stored = Stored(with_revision(obj, self.revision), self.revision)
        self._commit(key, Change(self.revision, name, "MODIFIED" if old else "ADDED", stored, old))
        return stored

    def remove(self, key: str, namespace: str, name: str) -> Stored:
        """Delete an object; returns its last state at the deleting revision."""
        table = self.tables[key]
        old = table.rows[namespace, name]
        self.revision += 1
        last = Stored(with_revision(old.obj, self.revision), self.revision)
        self._commit(key, Change(self.revision, (namespace, name), "DELETED", last, old))
        return last

    def _commit(self, key: str, change: Change) -> None:
        self.tables[key].record(change)
        for call in self.on_change:
            call(key, change)

    def load(self, key: str, obj: Obj) -> None:
        """Put back an object read from a journal, without history or watches."""
        table = self.tables[key]
        metadata = obj["metadata"]
        revision = int(metadata["resourceVersion"])
        table.rows[metadata.get("namespace", ""), metadata["name"]] = Stored(obj, revision)
        table._sorted = None  # noqa: SLF001 - same module
        self.forget_history(revision)

    def forget_history(self, revision: int | None = None) -> None:
        """Drop all history, so that older watches get 410 Gone; may move the revision up."""
        self.revision = max(self.revision, revision or 0)
        for table in self.tables.values():
            table.history.clear()
            table.compacted = self.revision

    def subscribe(self, key: str, wanted: Filter, since: int | None) -> Subscription:
        """Open a watch; `since` None starts with the current state as ADDED."""
        table = self.tables[key]
        if since is not None:
            if since < table.compacted:
                raise too_old(since, table.compacted)
            if since > self.revision:
                raise too_large_revision(since, self.revision)
        index = table.resource.index_field
        subscription = Subscription(
            wanted,
            index_value=wanted.fields.exact(index) if index else None,
            limit=self._watch_limit,
        )
        if since is None:
            for name in table.names():
                stored = table.rows[name]
                if wanted.matches(stored.obj):
                    subscription._push(Delivery("ADDED", stored))  # noqa: SLF001 - same module
        else:
            for change in table.history:
                if change.revision > since:
                    subscription.offer(change)
        table.attach(subscription)
        return subscription

    def unsubscribe(self, key: str, subscription: Subscription) -> None:
        """Close a watch."""
        subscription.close()
        self.tables[key].detach(subscription)
