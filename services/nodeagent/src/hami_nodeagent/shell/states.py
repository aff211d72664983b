# SPDX-License-Identifier: Apache-2.0
"""Reconciles the state record of each allocation of this node with the facts (design D5).

``core.reporting`` decides the next state; this module writes it with compare-and-set on its key.
After a conflict the stored record is read and the state is decided again. While the bus is
unavailable nothing is queued: the next pass derives the state from the facts. States that others
write (the scheduler's ``bound`` and ``failed``) are read at start, after each reconnect, every
``READ_AGAIN_S`` seconds, after each conflict, and for one pod when its Allocate is decided.
"""

import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import Final

import anyio
from anyio.abc import TaskStatus
from opentelemetry.trace import SpanKind

from hami_common.bus import subjects
from hami_common.dra import names
from hami_common.errors import Conflict, HamiError, Unavailable, WireInvalid
from hami_common.events.allocation import AllocationRecord, StateRecord, is_of_claim
from hami_common.events.codec import decode_on, encode, event_headers
from hami_common.ports import Bucket, Expect
from hami_common.ports import Entry as Stored
from hami_common.runtime.kubeio import EventRecorder, ObjectRef
from hami_common.runtime.tasks import Backoff
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.holders import (
    LIMITED_VENDORS,
    Enforcement,
    enforcement_of,
    unheld_vendors,
    unseen_containers,
)
from hami_nodeagent.core.reporting import Step, next_step
from hami_nodeagent.shell.site import Site

KIND: Final = "allocation"
READ_AGAIN_S = 60.0
"""Interval of a complete read of all states without a known change, in seconds."""

_log = logging.getLogger(__name__)


def _uid_of(key: str) -> str:
    """Return the pod uid in a state's key; empty for a key of another format."""
    try:
        return subjects.parse_allocation_key(key)[1]
    except WireInvalid:
        return ""


def _noun(record: AllocationRecord) -> str:
    return "claim" if is_of_claim(record) else "pod"


def _regarding(record: AllocationRecord) -> ObjectRef:
    """Return the object that the record is of."""
    is_claim = is_of_claim(record)
    return ObjectRef(
        kind="ResourceClaim" if is_claim else "Pod",
        api_version=f"{names.GROUP}/{names.VERSION}" if is_claim else "v1",
        name=record.pod,
        namespace=record.namespace,
        uid=record.pod_uid,
    )


def nothing_holds(vendor: str) -> str:
    """Return the enforcement of ``vendor`` as empty: nothing limits its containers."""
    del vendor
    return ""


class States:
    """Reads and writes the states of one node's allocations."""

    def __init__(
        self,
        *,
        site: Site,
        bucket: Bucket,
        generation: Callable[[], int],
        events: Callable[[], EventRecorder | None],
        holding: Callable[[str], str] = nothing_holds,
    ) -> None:
        """``generation`` grows with each connection to the bus.

        ``holding`` returns what enforces the memory limit of a vendor's containers; empty if
        nothing does.
        """
        self._holding = holding
        self._bucket = bucket
        self._generation = generation
        self._picture = site.picture
        self._sequence = site.sequence
        self._events = events
        self._clock = site.clock
        self._tracing = site.tracing
        self._metrics = site.metrics
        self._quarantine = site.quarantine
        self._retry_s = site.settings.report_retry_s
        self._site_enforces_nothing = site.settings.enforcement == "none"
        self._revision_by_uid: dict[str, int] = {}

    async def keep(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Reconcile the states until cancelled; started once the stored ones are read."""
        backoff = Backoff(first_s=self._retry_s, most_s=10 * self._retry_s)
        read_at_s = 0.0
        read_generation = -1
        while True:
            changed = self._picture.changed
            generation = self._generation()
            try:
                if read_generation != generation or self._clock.monotonic_s() >= read_at_s:
                    await self._read_all()
                    read_generation = generation
                    read_at_s = self._clock.monotonic_s() + READ_AGAIN_S
                    task_status.started()
                    task_status = anyio.TASK_STATUS_IGNORED
                for uid in list(self._picture.entries_by_uid):
                    await self._isolated(uid)
            except HamiError as error:
                level = logging.DEBUG if isinstance(error, Unavailable) else logging.ERROR
                _log.log(level, "states not written", extra={"problem": str(error)})
                read_generation = -1
                await backoff.wait()
                continue
            backoff.reset()
            left_s = max(0.0, read_at_s - self._clock.monotonic_s())
            await self._picture.wait_change(changed, left_s)

    async def _isolated(self, uid: str) -> None:
        """Update the state of one allocation; an allocation that fails has its own backoff."""
        entry = self._picture.entries_by_uid.get(uid)
        if entry is None or not self._quarantine.is_due(KIND, uid):
            return
        await self._quarantine.run(
            KIND,
            uid,
            partial(self._bring_up_to_date, uid),
            passes=(Unavailable,),
            name=(entry.record.namespace, entry.record.pod),
        )

    async def read_one(self, uid: str, *, timeout_s: float) -> None:
        """Read the newest state of one pod; the known state stays if the bus does not answer."""
        with anyio.move_on_after(timeout_s):
            try:
                stored = await self._bucket.get(subjects.allocation_key(self._picture.node, uid))
            except HamiError as error:
                _log.debug("state not read", extra={"problem": str(error)})
                return
            if stored is not None:
                await self._isolated_take(stored)

    async def _read_all(self) -> None:
        entries = await self._bucket.latest(subjects.node_keys(self._picture.node))
        self._picture.states_by_uid.clear()
        self._revision_by_uid.clear()
        for stored in entries:
            await self._isolated_take(stored)

    async def _isolated_take(self, stored: Stored) -> None:
        """Store a state; while it is unreadable, kubelet's calls for its pod are refused."""
        if await self._quarantine.run("state", stored.key, partial(self._take, stored)):
            return
        known = self._quarantine.get("state", stored.key)
        problem = known.problem if known is not None else "see the agent's log"
        self._picture.note_unreadable(_uid_of(stored.key), "state", problem)

    def _take(self, stored: Stored) -> None:
        try:
            subject = subjects.kv_subject(subjects.STATE_BUCKET, stored.key)
            state = decode_on(subject, stored.value, StateRecord)
        except WireInvalid:
            self._metrics.undecodable.labels(what="state").inc()
            raise
        uid = state.pod_uid
        self._picture.note_unreadable(uid, "state", "")
        if stored.revision >= self._revision_by_uid.get(uid, 0):
            self._picture.states_by_uid[uid] = state
            self._revision_by_uid[uid] = stored.revision

    async def _bring_up_to_date(self, uid: str) -> None:
        """Write one state after the other until the allocation's state matches the facts."""
        while True:
            entry = self._picture.entries_by_uid.get(uid)
            if entry is None:
                return
            step = next_step(
                entry,
                self._picture.states_by_uid.get(uid),
                self._picture.pods.find(uid),
                self._picture.grants,
                failure=self._picture.failures_by_uid.get(uid),
                is_divided=self._picture.partitions.are_all_there(entry),
                is_unlimited=uid in self._picture.unlimited_by_uid,
            )
            if step is None:
                return
            await self._write(entry, step)

    async def _write(self, entry: Entry, step: Step) -> None:
        record = entry.record
        key = subjects.allocation_key(self._picture.node, record.pod_uid)
        is_used = step.state in {"prepared", "running"} and not step.code
        state = StateRecord(
            state=step.state,
            allocation_id=record.allocation_id,
            node=self._picture.node,
            pod_uid=record.pod_uid,
            namespace=record.namespace,
            pod=record.pod,
            ledger_seq=entry.sequence,
            time_s=self._clock.now_s(),
            writer=f"nodeagent/{self._picture.node}",
            boot_id=self._sequence.boot_id,
            seq=self._sequence.next(),
            code=step.code,
            reason=step.reason,
            containers=step.containers,
            carried=(self._picture.partitions.told(entry) if is_used else ()),
            enforcement=self._enforcement(record) if is_used else "",
        )
        pod = self._picture.pods.find(record.pod_uid)
        traceparent = entry.traceparent or (pod.traceparent if pod is not None else "")
        headers = event_headers(
            event_id=secrets.token_hex(16),
            event_type=f"io.hami.state.{step.state}.v1",
            source=f"/nodeagent/{self._picture.node}",
            time_s=state.time_s,
            traceparent=traceparent,
        )
        expect = Expect(
            subject=subjects.kv_subject(subjects.STATE_BUCKET, key),
            sequence=self._revision_by_uid.get(record.pod_uid, 0),
        )
        try:
            revision = await self._bucket.append(key, encode(state), headers=headers, expect=expect)
        except Conflict:
            self._metrics.state_conflicts.inc()
            stored = await self._bucket.get(key)
            if stored is None:
                # The bucket was re-created: the cached revision and state are invalid.
                self._revision_by_uid.pop(record.pod_uid, None)
                self._picture.states_by_uid.pop(record.pod_uid, None)
            else:
                self._revision_by_uid[record.pod_uid] = 0
                # An unreadable state raises here, which keeps it from being overwritten.
                self._take(stored)
            return
        before = self._picture.states_by_uid.get(record.pod_uid)
        self._trace(state, before, traceparent)
        self._revision_by_uid[record.pod_uid] = revision
        self._picture.states_by_uid[record.pod_uid] = state
        self._metrics.states.labels(state=step.state).inc()
        _log.info(
            "state written",
            extra={
                "state": step.state,
                "pod": f"{record.namespace}/{record.pod}",
                "allocation_id": record.allocation_id,
                "code": step.code,
            },
        )
        if step.state == "prepared" and not step.code:
            await self._warn_of_unheld(record)
        recorder = self._events()
        if step.state == "failed" and recorder is not None:
            await recorder.record(
                _regarding(record),
                reason="AllocationFailed",
                message=f"{step.code}: {step.reason}",
                kind="Warning",
            )

    def _enforcement(self, record: AllocationRecord) -> Enforcement:
        if record.pod_uid in self._picture.unlimited_by_uid:
            return "none"
        pod = self._picture.pods.find(record.pod_uid)
        return enforcement_of(record, self._picture.grants, pod)

    def _trace(self, state: StateRecord, before: StateRecord | None, traceparent: str) -> None:
        """Record a span from the previous state, if this agent wrote it, to this one."""
        if not self._tracing.is_recording:
            return
        begin_s = state.time_s
        if before is not None and before.writer == state.writer:
            begin_s = before.time_s
        self._tracing.record(
            state.state,
            traceparent=traceparent,
            begin_s=begin_s,
            end_s=self._clock.now_s(),
            kind=SpanKind.PRODUCER,
            attributes={
                "k8s.node.name": state.node,
                "k8s.namespace.name": state.namespace,
                "k8s.pod.name": state.pod,
                "k8s.pod.uid": state.pod_uid,
                "hami.allocation.id": state.allocation_id,
                "hami.containers": ",".join(state.containers),
                "hami.enforcement": state.enforcement,
            },
            problem=f"{state.code}: {state.reason}" if state.code else "",
        )

    async def _warn_of_unheld(self, record: AllocationRecord) -> None:
        """Report shares that are allocated but not enforced, in a metric and as Events on the pod.

        If the operator disabled the in-container library (``enforcement`` is ``none``), its
        vendors' shares are reported in the metric and the state record only: an Event per pod would
        repeat the setting at one API server write each.
        """
        vendors = unheld_vendors(
            record, self._picture.grants, self._picture.view.devices_by_uuid, self._holding
        )
        for vendor in vendors:
            self._metrics.unheld.labels(vendor=vendor).inc()
        if self._site_enforces_nothing:
            vendors = tuple(vendor for vendor in vendors if vendor not in LIMITED_VENDORS)
        recorder = self._events()
        if recorder is None:
            return
        messages = []
        if vendors:
            messages.append(
                f"nothing keeps this {_noun(record)} from using more than its share of "
                f"{', '.join(vendors)} devices: the share is booked, not enforced"
            )
        unseen = unseen_containers(
            self._picture.grants, record.pod_uid, self._picture.pods.find(record.pod_uid)
        )
        if unseen:
            messages.append(
                f"container {', '.join(unseen)}: envFrom may name variables that give it other "
                "devices, which the node cannot see; list the variables in env, or set a prefix"
            )
        for message in messages:
            await recorder.record(
                _regarding(record),
                reason="ShareNotHeld",
                message=message,
                kind="Warning",
            )
