# SPDX-License-Identifier: Apache-2.0
"""Writes to the ledger and its states on the bus, each call bounded in time, and folds the result.

Rules that make releases safe (design D3, D4):

* A replica posts a Binding only under a ledger record that it wrote itself (reservation or
  renewal), after it had read the resourceVersion which that Binding expects.
* A release names the record that it ends by the sequence of the record's key. It is written only
  when no Binding under that record, or an older one, can take effect any more: the pod is gone,
  finished or assigned, or its resourceVersion was moved after the record was seen.

So a renewal and a release exclude each other in the ledger, and a late Binding and a release
exclude each other in the API server. Sequences are JetStream's; seconds throughout.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from typing import Final

from msgspec import Struct
from opentelemetry.trace import Span, SpanKind

from hami_common.bus import subjects
from hami_common.errors import Conflict, HamiError, NotFound, Unavailable, WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord, is_of_claim
from hami_common.ports import Bucket, Write
from hami_common.runtime.telemetry import Tracing, current_traceparent
from hami_core.ledger import repair
from hami_core.ledger.holding import Holding
from hami_core.ledger.stimuli import (
    Accepted,
    Append,
    Forgotten,
    NodeRead,
    ReleasePlanned,
    RenewPlanned,
    StatePlanned,
    StateSeen,
    WriteState,
)
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.isolation import RECORD, record_key
from hami_scheduler.shell.keylocks import KeyLocks
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.state import State

READ_TRIES: Final = 3
"""Reads of a node's records before the caller retries, if the feed is ahead of each answer."""

_log = logging.getLogger(__name__)


class LedgerPorts(Struct, frozen=True, kw_only=True):
    """Buckets in which the ledger is stored."""

    records: Bucket
    """Bucket ``hami_alloc``."""
    states: Bucket
    """Bucket ``hami_state``."""
    tracing: Tracing = Tracing(service="scheduler")


class LedgerWriter:
    """Appends to the ledger and to its states."""

    def __init__(
        self,
        ports: LedgerPorts,
        *,
        state: State,
        settings: Settings,
        metrics: Metrics,
        writer: str,
        ids: Callable[[], str],
    ) -> None:
        """Write as ``writer``; ``ids`` makes unique identifiers."""
        self._records = ports.records
        self._states = ports.states
        self._tracing = ports.tracing
        self._state = state
        self._settings = settings
        self._metrics = metrics
        self._writer = writer
        self._ids = ids
        self._nodes = KeyLocks("node")

    @asynccontextmanager
    async def planning(self, node: str) -> AsyncIterator[None]:
        """Hold the node's lock from picking devices on ``node`` until the append is answered."""
        async with self._nodes.hold(node, wait_s=self._settings.bind_wait_s):
            yield

    async def append(self, append: Append, *, traceparent: str = "") -> int:
        """Store a ledger record and fold it; returns its sequence.

        ``Conflict``: its condition does not hold. ``Unavailable``: it may or may not be stored.
        """
        record = append.record
        epoch = self._state.storage_epoch
        with (
            self._span(record.op, record, SpanKind.PRODUCER, traceparent),
            self._bus(),
            self._metrics.append_seconds.time(),
        ):
            try:
                seq = await self._records.append(
                    append.key,
                    codec.encode(record),
                    headers=self._headers(f"allocation.{record.op}", record.time_s),
                    expect=append.expect,
                )
            except NotFound as error:
                raise Unavailable(peer="NATS", detail=str(error)) from error
        self._state.require_storage(epoch)
        self._state.tell(Accepted(append=append, seq=seq, now_s=self._now_s()))
        return seq

    async def read_node(self, node: str) -> None:
        """Read and fold the stored records of ``node``."""
        epoch = self._state.storage_epoch
        for _ in range(READ_TRIES):
            known = self._state.ledger.fence(node)
            with self._bus():
                entries = await self._records.latest(subjects.node_keys(node))
            self._state.require_storage(epoch)
            newest = max((entry.revision for entry in entries), default=0)
            if newest < known:
                # Sequences decreased: the bus lost its storage, and the feed will report it.
                self._state.records_gone()
                raise Unavailable(peer="NATS", detail=f"records of node {node} are gone")
            if newest >= self._state.ledger.fence(node):
                break  # else our feed was faster than this read
        else:
            raise Unavailable(peer="NATS", detail=f"node {node} kept changing")
        decoded: list[tuple[int, AllocationRecord]] = []
        failed: set[str] = set()
        for entry in entries:
            try:
                subject = subjects.kv_subject(subjects.ALLOC_BUCKET, entry.key)
                record = codec.decode_on(subject, entry.value, AllocationRecord)
            except WireInvalid as error:
                self._metrics.undecodable.labels(source="records").inc()
                self._state.withheld.add(RECORD, entry.key, error, node=node)
                failed.add(entry.key)
                continue
            decoded.append((entry.revision, record))
        failed |= self._fold_node(node, decoded)
        for key in self._state.withheld.keys(RECORD, node=node):
            if key not in failed:  # folded now, or removed by an operator
                self._state.withheld.lift(RECORD, key)

    async def refresh_node(self, node: str) -> None:
        """``read_node``, while no other call plans on the node."""
        async with self.planning(node):
            await self.read_node(node)

    def _fold_node(self, node: str, found: Sequence[tuple[int, AllocationRecord]]) -> set[str]:
        """Fold the records of one node; returns the keys of those that could not be folded."""
        try:
            self._state.fold(NodeRead(node=node, entries=tuple(found), now_s=self._now_s()))
        except Exception as error:  # noqa: BLE001 - one by one below, to find the one
            _log.debug("records of a node not folded together", extra={"problem": str(error)})
        else:
            return set()
        failed: set[str] = set()
        for entry in sorted(found, key=lambda entry: entry[0]):
            key = record_key(node, entry[1].pod_uid)
            with (
                suppress(Exception),
                self._state.withheld.unless_handled(RECORD, key, node=node),
            ):
                self._state.fold(NodeRead(node=node, entries=(entry,), now_s=self._now_s()))
            if self._state.withheld.problem(RECORD, key) is not None:
                failed.add(key)
        return failed

    async def write_state(self, write: WriteState, *, traceparent: str = "") -> bool:
        """Store a state record and fold it; false when a later state is already there."""
        state = write.state
        epoch = self._state.storage_epoch
        with self._span(state.state, state, SpanKind.PRODUCER, traceparent), self._bus():
            try:
                seq = await self._states.append(
                    write.key,
                    codec.encode(state),
                    headers=self._headers(f"state.{state.state}", state.time_s),
                    expect=write.expect,
                )
            except Conflict:
                return False
            except NotFound as error:
                raise Unavailable(peer="NATS", detail=str(error)) from error
        self._state.require_storage(epoch)
        self._state.tell(StateSeen(seq=seq, state=state, now_s=self._now_s()))
        return True

    async def write_states(self, writes: Sequence[tuple[WriteState, str]]) -> list[HamiError]:
        """Store several states in one batch, each with its trace; returns the failures."""
        epoch = self._state.storage_epoch
        items: list[Write] = []
        for write, traceparent in writes:
            state = write.state
            with self._span(state.state, state, SpanKind.PRODUCER, traceparent):
                headers = self._headers(f"state.{state.state}", state.time_s)
            items.append(
                Write(
                    key=write.key, value=codec.encode(state), headers=headers, expect=write.expect
                )
            )
        with self._bus():
            answers = await self._states.append_all(items)
        self._state.require_storage(epoch)
        for (write, _), answer in zip(writes, answers, strict=True):
            if isinstance(answer, int):
                self._state.tell(StateSeen(seq=answer, state=write.state, now_s=self._now_s()))
        return [
            answer
            for answer in answers
            if isinstance(answer, HamiError) and not isinstance(answer, Conflict)
        ]

    async def forget(self, node: str, pod_uid: str) -> bool:
        """Remove the tombstone of a pod that is gone; false when it must still stay."""
        key = subjects.allocation_key(node, pod_uid)
        with self._bus():
            entry = await self._records.get(key)
            if entry is not None:
                subject = subjects.kv_subject(subjects.ALLOC_BUCKET, key)
                record = codec.decode_on(subject, entry.value, AllocationRecord)
                if record.op != "release":
                    return False
                try:
                    await self._records.forget(key)
                except Conflict:
                    return False
        self._state.core.answer(Forgotten(node=node, pod_uid=pod_uid))
        with self._bus():
            try:
                await self._states.forget(key)
            except Conflict:
                return True  # the node's newest state stays; it costs nothing
        return True

    async def release(self, holding: Holding, reason: str, *, traceparent: str = "") -> bool:
        """Release a share unless its record has moved on; see the rules of the module."""
        record = holding.record
        now = self._state.ledger.holding(record.node, record.pod_uid)
        if now is None or now.revision != holding.revision:
            return False
        append = self._state.core.answer(
            ReleasePlanned(holding=now, now_s=self._now_s(), reason=reason)
        )
        try:
            await self.append(append, traceparent=traceparent)
        except Conflict:
            await self.read_node(record.node)
            return False
        self._metrics.releases.labels(cause=reason).inc()
        _log.info("allocation released", extra=fields_of(record, reason=reason))
        return True

    async def renew(self, holding: Holding, *, traceparent: str = "") -> Holding | None:
        """Write the reservation again, which makes a release based on the older record fail.

        ``None`` when another replica wrote it meanwhile.
        """
        record = holding.record
        append = self._state.core.answer(RenewPlanned(holding=holding, now_s=self._now_s()))
        try:
            await self.append(append, traceparent=traceparent)
        except Conflict:
            await self.read_node(record.node)
            return None
        return self._state.ledger.holding(record.node, record.pod_uid)

    async def confirm(self, holding: Holding, *, traceparent: str = "") -> None:
        """Report ``bound`` unless the allocation has come further or is gone."""
        write = self._confirmation(holding)
        if write is not None:
            await self.write_state(write, traceparent=traceparent)

    async def confirm_all(self, holdings: Sequence[Holding]) -> Sequence[HamiError]:
        """``confirm`` several at once; retry those that the bus rejects as background tasks."""
        writes = [write for write in map(self._confirmation, holdings) if write is not None]
        problems: Sequence[HamiError] = ()
        if writes:
            try:
                problems = await self.write_states([(write, "") for write in writes])
            except Unavailable as error:
                problems = [error]
        if problems:
            # The states that were stored need no further work.
            for holding in holdings:
                self._state.later(repair.Confirm(holding=holding))
        return ()

    def _confirmation(self, holding: Holding) -> WriteState | None:
        """Return the state ``bound``, unless the allocation has come further or is gone."""
        record = holding.record
        now = self._state.ledger.holding(record.node, record.pod_uid)
        if now is None or now.record.allocation_id != record.allocation_id:
            return None
        return self._state.core.answer(
            StatePlanned(holding=now, state="bound", now_s=self._now_s())
        )

    def _now_s(self) -> float:
        return self._state.clock.now_s()

    @contextmanager
    def _bus(self) -> Iterator[None]:
        with answer_within(self._settings.bus_timeout_s, peer="NATS"):
            yield

    def _span(
        self, name: str, record: AllocationRecord | StateRecord, kind: SpanKind, traceparent: str
    ) -> AbstractContextManager[Span]:
        """Open a span of the trace of the record's pod; a no-op without a trace.

        A claim that a user wrote has no pod: its trace begins with its record.
        """
        tracing = self._tracing
        if not traceparent and (pod := self._state.pods.get(record.pod_uid)) is not None:
            traceparent = pod.traceparent
        attributes = None
        if tracing.is_recording:
            attributes = {
                "messaging.system": "nats",
                "k8s.node.name": record.node,
                "k8s.pod.uid": record.pod_uid,
                "hami.allocation.id": record.allocation_id,
            }
        begins = isinstance(record, AllocationRecord) and is_of_claim(record) and name == "reserve"
        return tracing.start_span(
            name, traceparent=traceparent, begins=begins, kind=kind, attributes=attributes
        )

    def _headers(self, what: str, time_s: float) -> dict[str, str]:
        return codec.event_headers(
            event_id=self._ids(),
            event_type=f"io.hami.{what}.v1",
            source=f"/scheduler/{self._writer}",
            time_s=time_s,
            traceparent=current_traceparent(),
        )


def fields_of(record: AllocationRecord, **more: object) -> dict[str, object]:
    """Return the fields of a log message about an allocation."""
    return {
        "namespace": record.namespace,
        "pod": record.pod,
        "node": record.node,
        "allocation_id": record.allocation_id,
        **more,
    }
