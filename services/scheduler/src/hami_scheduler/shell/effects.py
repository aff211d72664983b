# SPDX-License-Identifier: Apache-2.0
"""Carries out what was decided: appends to the ledger, states, fences, releases, restores, touches.

Rules that make releases safe (design D3, D4):

* Whoever posts a Binding does so under a ledger record it wrote itself (reserve or renewal) after
  it had read the resourceVersion which that Binding expects.
* A release names the record it ends by the sequence of its own key. It is written only when no
  Binding under that record, or an older one, can take effect any more: the pod is gone, finished or
  assigned, or its resourceVersion was moved after the record was seen.

So a renewal and a release exclude each other in the ledger, and a late Binding and a release
exclude each other in the API server. Sequences are JetStream's; seconds throughout.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial

import anyio
import anyio.lowlevel
import msgspec
from msgspec import Struct
from opentelemetry.trace import Span, SpanKind

from hami_common.apipath import api_path
from hami_common.bus import subjects
from hami_common.errors import Conflict, Denied, HamiError, NotFound, Unavailable, WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.codec import UNDECODABLE
from hami_common.pods import annotations
from hami_common.pods.podview import PodView
from hami_common.pods.signing import SignedPlacement
from hami_common.ports import Bucket, Expect, KubeApi, Write
from hami_common.runtime.tasks import Backoff
from hami_common.runtime.telemetry import Tracing, current_traceparent
from hami_core.ledger import binding, repair
from hami_core.ledger.ledger import RENEWED
from hami_core.ledger.podfacts import PodFacts, PodReader, pod_path
from hami_core.ledger.repair import Holding
from hami_core.ledger.stimuli import (
    Accepted,
    Append,
    CapacityReturned,
    Effect,
    Examine,
    NodeRead,
    Over,
    StateSeen,
    WriteState,
)
from hami_core.placement.reasons import NodeRefusal
from hami_scheduler.settings import Settings
from hami_scheduler.shell.backlog import Backlog
from hami_scheduler.shell.isolation import POD, RECORD, RESTORE, WAKE, record_key
from hami_scheduler.shell.keylocks import KeyLocks
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.state import State

_log = logging.getLogger(__name__)

Chore = Effect | repair.Step
"""Work that nobody waits for. What a full queue drops is found again by the next comparison."""

CHORE_TRIES = 4
"""Attempts at one chore while bus or API server are away, before the next comparison has it."""

READ_TRIES = 3
"""How often a node's records are read anew because our feed knew more when the answer came."""
LIST_TIMEOUTS = 6
"""A list of all pods may take this many times as long as any other answer."""

PODS = "/api/v1/pods"
UNPROCESSABLE = 422
"""Status of a write that is invalid as such, whatever the object's version."""
MANAGED = f"{annotations.MANAGED_LABEL}=true"
"""Selects the pods that the webhook prepared."""
UNMANAGED = f"{annotations.MANAGED_LABEL}!=true"

_pod_decoder = msgspec.json.Decoder(PodView)


class _BareSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    node_name: str = ""


class _BareMetadata(Struct, frozen=True, kw_only=True):
    uid: str = ""
    namespace: str = ""
    name: str = ""


class _BareStatus(Struct, frozen=True, kw_only=True):
    phase: str = ""


class BarePod(Struct, frozen=True, kw_only=True):
    """What must be known of a pod that cannot be read."""

    metadata: _BareMetadata = _BareMetadata()
    spec: _BareSpec = _BareSpec()
    status: _BareStatus = _BareStatus()

    def names(self) -> tuple[str, str]:
        """Return (namespace, name)."""
        return self.metadata.namespace or "default", self.metadata.name

    def is_finished(self) -> bool:
        """Whether no container of the pod will run again."""
        return self.status.phase in ("Succeeded", "Failed")


class _RawList(Struct, frozen=True, kw_only=True):
    items: list[msgspec.Raw] | None = None


class _Marked(Struct, frozen=True, kw_only=True):
    uid: str = ""
    namespace: str = ""
    name: str = ""
    annotations: dict[str, str] | None = None


class _MarkedPod(Struct, frozen=True, kw_only=True):
    metadata: _Marked = _Marked()


_marked_decoder = msgspec.json.Decoder(_MarkedPod)
_bare_decoder = msgspec.json.Decoder(BarePod)
_raw_list_decoder = msgspec.json.Decoder(_RawList)
UNREADABLE = BarePod(metadata=_BareMetadata(uid="unreadable"))


def bare_pod(raw: bytes | msgspec.Raw) -> BarePod:
    """Return who a pod is, ``UNREADABLE`` where not even that can be read."""
    try:
        return _bare_decoder.decode(raw)
    except UNDECODABLE:
        return UNREADABLE


def _note_unlabelled(raw: msgspec.Raw, paths: dict[str, str]) -> None:
    """Note the path of a pod that carries an allocation, by uid; read in full afterwards."""
    try:
        metadata = _marked_decoder.decode(raw).metadata
    except UNDECODABLE:
        pod = bare_pod(raw)
        paths[pod.metadata.uid] = pod_path(*pod.names())
        return
    if annotations.ALLOCATION in (metadata.annotations or {}):
        paths[metadata.uid] = pod_path(metadata.namespace or "default", metadata.name)


def _items_of(page: bytes) -> list[msgspec.Raw]:
    try:
        return _raw_list_decoder.decode(page).items or []
    except UNDECODABLE as error:
        raise WireInvalid(what="list of pods", problem=str(error)) from error


class Queues(Struct, frozen=True, kw_only=True):
    """Where a bind leaves what nobody waits for."""

    chores: Backlog[Chore]
    confirmations: Backlog[Holding]
    """What was bound and is to be reported."""


class Ports(Struct, frozen=True, kw_only=True):
    """The outside world as the effects see it."""

    records: Bucket
    """Bucket ``hami_alloc``."""
    states: Bucket
    """Bucket ``hami_state``."""
    kube: KubeApi
    tracing: Tracing = Tracing(service="scheduler")


@contextmanager
def answer_within(limit_s: float, *, peer: str) -> Iterator[None]:
    """Bound one call to a peer; silence is ``Unavailable``."""
    try:
        with anyio.fail_after(limit_s):
            yield
    except TimeoutError as error:
        raise Unavailable(peer=peer, detail=f"no answer in {limit_s:g} s") from error


class Effects:
    """Writes to bus and API server, each bounded in time, and folds what was accepted."""

    def __init__(
        self,
        *,
        ports: Ports,
        state: State,
        chores: Backlog[Chore],
        reader: PodReader,
        settings: Settings,
        metrics: Metrics,
        writer: str,
        ids: Callable[[], str],
    ) -> None:
        """Write as ``writer``; ``ids`` makes identifiers that nobody else makes."""
        self._ports = ports
        self._state = state
        self._chores = chores
        self._reader = reader
        self._settings = settings
        self._metrics = metrics
        self._quarantine = state.quarantine
        self._writer = writer
        self._ids = ids
        self.align: Callable[[Holding], Awaitable[str]] | None = None
        """Brings a pod's annotations in line with its record; set by the composition root."""
        self._nodes = KeyLocks("node")
        self._in_flight: set[str] = set()
        self._touch_node = ""
        self._touch = anyio.Event()

    # --- primitives: one call each ---------------------------------------------------------------

    @asynccontextmanager
    async def planning(self, node: str) -> AsyncIterator[None]:
        """Alone in this process from picking devices on ``node`` until the append is answered."""
        async with self._nodes.hold(node, wait_s=self._settings.bind_wait_s):
            yield

    @contextmanager
    def while_binding(self, pod_uid: str) -> Iterator[None]:
        """Mark the pod as being bound here, so that its lease is not examined meanwhile."""
        self._in_flight.add(pod_uid)
        try:
            yield
        finally:
            self._in_flight.discard(pod_uid)

    async def append(self, append: Append, *, traceparent: str = "") -> int:
        """Store a ledger record and fold it; returns its sequence.

        ``Conflict``: its condition does not hold. ``Unavailable``: it may be stored or not.
        """
        record = append.record
        epoch = self._state.storage_epoch
        with (
            self._span(record.op, record, SpanKind.PRODUCER, traceparent),
            self._bus(),
            self._metrics.append_seconds.time(),
        ):
            try:
                seq = await self._ports.records.append(
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
        """Fold what the ledger really holds for ``node``."""
        epoch = self._state.storage_epoch
        for _ in range(READ_TRIES):
            known = self._state.ledger.fence(node)
            with self._bus():
                entries = await self._ports.records.latest(subjects.node_keys(node))
            self._state.require_storage(epoch)
            newest = max((entry.revision for entry in entries), default=0)
            if newest < known:
                # Sequences went back: the bus lost its storage, and the feed is about to say so.
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
            if key not in failed:  # folded now, or an operator removed it
                self._state.withheld.lift(RECORD, key)

    def _fold_node(self, node: str, found: Sequence[tuple[int, AllocationRecord]]) -> set[str]:
        """Fold the records of one node; the keys of those that could not be folded."""
        try:
            self._state.fold(NodeRead(node=node, entries=tuple(found), now_s=self._now_s()))
        except Exception as error:  # noqa: BLE001 - one by one below, to tell which it is
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
                seq = await self._ports.states.append(
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
        """``write_state`` of several at once, each with its trace; what could not be done."""
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
            answers = await self._ports.states.append_all(items)
        self._state.require_storage(epoch)
        for (write, _), answer in zip(writes, answers, strict=True):
            if isinstance(answer, int):
                self._state.tell(StateSeen(seq=answer, state=write.state, now_s=self._now_s()))
        return [
            answer
            for answer in answers
            if isinstance(answer, HamiError) and not isinstance(answer, Conflict)
        ]

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        """The pod as the API server has it now, ``None`` when there is none."""
        with self._api():
            try:
                raw = await self._ports.kube.get(pod_path(namespace, name))
            except NotFound:
                return None
        return self._facts(raw)

    async def post_binding(self, pod: PodFacts, document: bytes) -> None:
        """Commit. ``Unavailable``: nobody knows whether it took effect."""
        path = binding.binding_path(pod.namespace, pod.name)
        with (
            self._ports.tracing.start_span("commit", begins=False, kind=SpanKind.CLIENT),
            self._api(),
        ):
            await self._ports.kube.create(path, document)

    async def move_pod(self, holding: Holding) -> PodFacts | None:
        """Make every Binding prepared so far impossible; returns the pod after that."""
        record = holding.record
        document = binding.fence_document(
            uid=record.pod_uid, allocation_id=record.allocation_id, ledger_seq=holding.revision
        )
        return await self._patch_pod(record.namespace, record.pod, record.pod_uid, document)

    async def fence_waiting(self, pod: PodFacts, *, stamp: str) -> PodFacts | None:
        """Make every Binding of an unassigned pod prepared so far impossible (after a wipe)."""
        document = binding.fence_document(uid=pod.uid, allocation_id=stamp, ledger_seq=0)
        return await self._patch_pod(pod.namespace, pod.name, pod.uid, document)

    async def _patch_pod(
        self, namespace: str, name: str, uid: str, document: bytes
    ) -> PodFacts | None:
        """Patch the pod with this uid; returns who has the name after that.

        ``document`` names the uid. A pod that came later under the name is left alone: to the API
        server the patch then tries to change a uid, which it calls invalid.
        """
        try:
            with self._api():
                raw = await self._ports.kube.patch(pod_path(namespace, name), document)
        except NotFound:
            return None
        except Conflict as error:
            problem = error.detail
        except Denied as error:
            if error.status != UNPROCESSABLE:
                raise
            problem = error.detail
        else:
            return self._facts(raw)
        pod = await self.get_pod(namespace, name)
        if pod is not None and pod.uid == uid:
            raise Unavailable(peer="API server", detail=f"pod {name} cannot be patched: {problem}")
        return pod

    def vouch(self, annotation: str, signed: SignedPlacement, *, key_id: str) -> None:
        """We are about to post this annotation of our own: it comes back with the pod."""
        self._reader.vouch(annotation, signed, key_id=key_id)

    async def list_pods(self) -> list[PodFacts]:
        """All managed pods, as the API server has them now."""
        with answer_within(LIST_TIMEOUTS * self._settings.api_timeout_s, peer="API server"):
            pages = await self._ports.kube.list_pages(
                PODS, label_selector=MANAGED, page_size=self._settings.list_page_size
            )
        found: list[PodFacts] = []
        for page in pages:
            for item in _items_of(page):
                facts = self._listed(item)
                if facts is not None:
                    found.append(facts)
            # A large cluster's list is long: let calls be answered between its pages.
            await anyio.lowlevel.checkpoint()
        return found

    async def unlabelled_pods(self) -> list[PodFacts]:
        """Assigned pods that carry an allocation but not our label, so that no watch shows them.

        Reads the metadata of every pod of the cluster without our label, page by page.
        """
        paths: dict[str, str] = {}
        pages = self._ports.kube.metadata_pages(
            PODS, label_selector=UNMANAGED, page_size=self._settings.list_page_size
        )
        async for page in pages:
            if annotations.ALLOCATION.encode() in page:
                for item in _items_of(page):
                    _note_unlabelled(item, paths)
            await anyio.lowlevel.checkpoint()
        found: list[PodFacts] = []
        for path in paths.values():
            try:
                with self._api():
                    raw = await self._ports.kube.get(path)
            except NotFound:
                continue
            facts = self._listed(raw)
            if facts is not None and facts.node:
                found.append(facts)
        return found

    def _listed(self, raw: bytes | msgspec.Raw) -> PodFacts | None:
        """Facts of one pod of a list; one that cannot be read is isolated, its share stays."""
        withheld = self._state.withheld
        try:
            view = _pod_decoder.decode(raw)
            known = self._state.pods.get(view.metadata.uid)
            facts = self._reader.facts_of(view, known=known)
        except Exception as error:  # noqa: BLE001 - of one pod; the list goes on
            pod = bare_pod(raw)
            uid, node = pod.metadata.uid, pod.spec.node_name
            self._quarantine.failed(POD, uid, error, name=pod.names())
            if node and not pod.is_finished() and self._state.ledger.holding(node, uid) is None:
                # It may hold a share that only its own document records.
                withheld.add(POD, uid, error, node=node)
            return self._state.pods.get(uid)
        if len(withheld):
            withheld.lift(POD, facts.uid)
        return facts

    async def forget(self, node: str, pod_uid: str) -> bool:
        """Remove the tombstone of a pod that is gone; false when it still has to stay."""
        key = subjects.allocation_key(node, pod_uid)
        with self._bus():
            entry = await self._ports.records.get(key)
            if entry is not None:
                subject = subjects.kv_subject(subjects.ALLOC_BUCKET, key)
                record = codec.decode_on(subject, entry.value, AllocationRecord)
                if record.op != "release":
                    return False
                try:
                    await self._ports.records.forget(key)
                except Conflict:
                    return False
        self._state.ledger.forget(node, pod_uid)
        with self._bus():
            try:
                await self._ports.states.forget(key)
            except Conflict:
                return True  # the node's newest state stays, it costs nothing
        return True

    def _facts(self, raw: bytes) -> PodFacts:
        try:
            view = _pod_decoder.decode(raw)
        except UNDECODABLE as error:
            raise WireInvalid(what="pod from the API server", problem=str(error)) from error
        return self._reader.facts_of(view, known=self._state.pods.get(view.metadata.uid))

    # --- compounds -------------------------------------------------------------------------------

    async def release(self, holding: Holding, reason: str, *, traceparent: str = "") -> bool:
        """Give a share back unless its record has moved on; see the rules at the top."""
        record = holding.record
        now = self._state.ledger.holding(record.node, record.pod_uid)
        if now is None or now.revision != holding.revision:
            return False
        append = self._state.ledger.plan_release(now, now_s=self._now_s(), reason=reason)
        try:
            await self.append(append, traceparent=traceparent)
        except Conflict:
            await self.read_node(record.node)
            return False
        self._metrics.releases.labels(cause=reason).inc()
        _log.info("allocation released", extra=_fields(record, reason=reason))
        return True

    async def renew(self, holding: Holding, *, traceparent: str = "") -> Holding | None:
        """Write the reservation once more, so that nobody can release it for what came before.

        ``None`` when somebody else wrote it meanwhile.
        """
        record = holding.record
        append = Append(
            record=msgspec.structs.replace(
                record,
                op="reserve",
                time_s=self._now_s(),
                lease_s=self._settings.lease_s,
                writer=self._writer,
                reason=RENEWED,
            ),
            key=subjects.allocation_key(record.node, record.pod_uid),
            expect=Expect(
                subject=subjects.kv_subject(
                    subjects.ALLOC_BUCKET, subjects.allocation_key(record.node, record.pod_uid)
                ),
                sequence=holding.revision,
            ),
            fenced=False,
        )
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
        """``confirm`` several at once; those that the bus does not take now become chores."""
        writes = [write for write in map(self._confirmation, holdings) if write is not None]
        problems: Sequence[HamiError] = ()
        if writes:
            try:
                problems = await self.write_states([(write, "") for write in writes])
            except Unavailable as error:
                problems = [error]
        if problems:
            # Of those that were taken, nothing is left to do.
            for holding in holdings:
                self._chores.add(repair.Confirm(holding=holding))
        return ()

    def _confirmation(self, holding: Holding) -> WriteState | None:
        """The state ``bound``, unless the allocation has come further or is gone."""
        record = holding.record
        now = self._state.ledger.holding(record.node, record.pod_uid)
        if now is None or now.record.allocation_id != record.allocation_id:
            return None
        return self._state.ledger.plan_state(now, "bound", now_s=self._now_s())

    async def restore(self, step: repair.Restore) -> str:
        """Put a committed allocation back into the ledger; returns what was done, in one word.

        While that fails because of the pod, nothing new is given on its node.
        """
        node, uid = step.signed.placement.node, step.signed.pod_uid
        try:
            outcome = await self._restore(step)
        except Unavailable:
            raise
        except Exception as error:
            self._state.withheld.add(RESTORE, uid, error, node=node)
            raise
        self._state.withheld.lift(RESTORE, uid)
        return outcome

    async def _restore(self, step: repair.Restore) -> str:
        signed = step.signed
        node, uid = signed.placement.node, signed.pod_uid
        is_view_fresh = is_started = False
        async with self.planning(node):
            for _ in range(self._settings.fence_tries):
                pod = self._state.pods.get(uid)
                if not _runs(pod, uid, node):
                    # Our watch may lag behind the list that showed the pod; a rebuild that takes
                    # its word would hand the share out again.
                    pod = await self.get_pod(signed.namespace, signed.pod)
                if pod is None or not _runs(pod, uid, node):
                    return "obsolete"
                plan = self._state.ledger.plan_restore(signed, now_s=self._now_s(), must=is_started)
                if plan is None:
                    return "present"
                if isinstance(plan, NodeRefusal):
                    if is_view_fresh:
                        await self._share_lost(step, plan)
                        return "share-lost"
                    # No fence guards a refusal, nor a pod that wins over arithmetic: our feed may
                    # lag behind the pod that we saw, and the pod may have ended since.
                    fresh = await self.get_pod(signed.namespace, signed.pod)
                    if fresh is None or not _runs(fresh, uid, node):
                        return "obsolete"
                    is_started = fresh.is_started
                    await self.read_node(node)
                    is_view_fresh = True
                    continue
                try:
                    await self.append(plan.under(pod.account), traceparent=pod.traceparent)
                except Conflict:
                    await self.read_node(node)
                    continue
                break
            else:
                raise Unavailable(peer="NATS", detail=f"node {node} kept changing")
        holding = self._state.ledger.holding(node, uid)
        if holding is not None:
            _log.warning("allocation restored from its pod", extra=_fields(holding.record))
            await self.confirm(holding)
        return "restored"

    async def _share_lost(self, step: repair.Restore, refusal: NodeRefusal) -> None:
        signed = step.signed
        write = self._state.ledger.plan_failed(signed, refusal, now_s=self._now_s())
        if write is None:
            return
        _log.error(
            "share of a bound pod is lost",
            extra={
                "namespace": signed.namespace,
                "pod": signed.pod,
                "node": signed.placement.node,
                "allocation_id": signed.allocation_id,
                "reason": refusal.text,
            },
        )
        await self.write_state(write)

    async def examine(self, holding: Holding) -> str:
        """Settle a reservation whose lease ran out; returns what was found, in one word."""
        record = holding.record
        if record.pod_uid in self._in_flight:
            return "in-flight"
        if record.origin:  # nobody binds it: it is there, or it is not
            found = await self.doubt(holding)
            await self.confirm(holding)
            return found
        return await self.settle(holding)

    async def settle(self, holding: Holding) -> binding.Fate:
        """Find out whether a Binding took effect, make any other impossible, act accordingly."""
        record = holding.record
        pod = await self.get_pod(record.namespace, record.pod)
        finding = self._fate(pod, holding)
        if finding in ("free", "deleting"):
            pod = await self.move_pod(holding)
            finding = self._fate(pod, holding)
        if finding == "ours":
            await self.confirm(holding)
        elif finding == "same-node" and pod is not None and pod.signed is not None:
            self._chores.add(
                repair.Restore(signed=pod.signed, must=pod.is_started, replaces=holding)
            )
        elif finding == "unreadable":
            _log.error("bound pod carries an allocation we cannot verify", extra=_fields(record))
        else:
            reason = {"free": "lease-expired", "elsewhere": "bound-elsewhere"}.get(
                finding, f"pod-{finding}"
            )
            await self.release(holding, reason)
        return finding

    def _fate(self, pod: PodFacts | None, holding: Holding) -> binding.Fate:
        record = holding.record
        return binding.fate_of(
            pod, uid=record.pod_uid, node=record.node, allocation_id=record.allocation_id
        )

    async def doubt(self, holding: Holding) -> str:
        """Find out whether the pod of a record is really gone; returns what was found."""
        record = holding.record
        pod = await self.get_pod(record.namespace, record.pod)
        if pod is None or pod.uid != record.pod_uid:
            await self.release(holding, "pod-gone")
            return "gone"
        judgement, reason = repair.judge(holding, pod)
        if judgement == "release":
            await self.release(holding, reason)
            return reason
        if pod.is_labelled:
            return "present"
        # The pod is there and our label is not: its share stays taken, and we want to see it end.
        _log.warning("label of a pod with a share was removed", extra=_fields(record))
        document = binding.label_document(uid=record.pod_uid)
        pod = await self._patch_pod(record.namespace, record.pod, record.pod_uid, document)
        if pod is None or pod.uid != record.pod_uid:
            await self.release(holding, "pod-gone")
            return "gone"
        return "relabelled"

    # --- chores ----------------------------------------------------------------------------------

    async def carry_out(self, chore: Chore) -> None:
        """Do one chore, and again for a while when a peer is away."""
        backoff = Backoff(first_s=self._settings.retry_s, most_s=10 * self._settings.retry_s)
        for attempt in range(1, CHORE_TRIES + 1):
            try:
                await self._carry_out(chore)
            except (Unavailable, Conflict) as error:
                if attempt == CHORE_TRIES:
                    raise
                _log.debug("work put off", extra={"problem": str(error)})
                await self._state.clock.sleep(backoff.next_s())
            else:
                return

    async def _carry_out(self, chore: Chore) -> None:
        match chore:
            case Examine(holding=holding):
                finding = await self.examine(holding)
                self._metrics.examined.labels(finding=finding).inc()
            case CapacityReturned(node=node):
                self._touch_node = node
                self._touch.set()
            case Over(node=node, uuids=uuids):
                self._metrics.over_booked.inc()
                _log.warning("devices are over-booked", extra={"node": node, "devices": uuids})
            case repair.Release(holding=holding, reason=reason):
                await self.release(holding, reason)
            case repair.Doubt(holding=holding):
                await self.doubt(holding)
            case repair.Confirm(holding=holding):
                await self.confirm(holding)
            case repair.Align(holding=holding):
                if self.align is not None:
                    outcome = await self.align(holding)
                    self._metrics.repairs.labels(action=outcome).inc()
            case repair.Restore():
                outcome = await self.restore(chore)
                self._metrics.repairs.labels(action=outcome).inc()

    async def wake_waiting_pods(self) -> None:
        """Touch a node when capacity returned while pods wait, not too often, for ever (D16)."""
        while True:
            await self._touch.wait()
            self._touch = anyio.Event()
            if not self._state.pods.has_waiting():
                continue
            await self._quarantine.run(
                WAKE, self._touch_node, partial(self._touch_once, self._touch_node)
            )
            await self._state.clock.sleep(self._settings.capacity_touch_s)

    async def _touch_once(self, node: str) -> None:
        try:
            with self._api():
                await self._ports.kube.patch(
                    api_path("api", "v1", "nodes", node),
                    binding.touch_document(stamp=f"{self._now_s():.3f}"),
                )
        except (Unavailable, NotFound, Conflict, Denied) as error:
            _log.warning("node not touched", extra={"problem": str(error)})

    # --- small things ----------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._state.clock.now_s()

    @contextmanager
    def _bus(self) -> Iterator[None]:
        with answer_within(self._settings.bus_timeout_s, peer="NATS"):
            yield

    @contextmanager
    def _api(self) -> Iterator[None]:
        with answer_within(self._settings.api_timeout_s, peer="API server"):
            yield

    def _span(
        self, name: str, record: AllocationRecord | StateRecord, kind: SpanKind, traceparent: str
    ) -> AbstractContextManager[Span]:
        """A span of the trace of the record's pod; nothing where that has none."""
        tracing = self._ports.tracing
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
        return tracing.start_span(
            name, traceparent=traceparent, begins=False, kind=kind, attributes=attributes
        )

    def _headers(self, what: str, time_s: float) -> dict[str, str]:
        return codec.event_headers(
            event_id=self._ids(),
            event_type=f"io.hami.{what}.v1",
            source=f"/scheduler/{self._writer}",
            time_s=time_s,
            traceparent=current_traceparent(),
        )


def _runs(pod: PodFacts | None, uid: str, node: str) -> bool:
    """Whether this is the pod, assigned to the node and not finished."""
    return pod is not None and pod.uid == uid and pod.node == node and not pod.is_finished


def _fields(record: AllocationRecord, **more: object) -> dict[str, object]:
    return {
        "namespace": record.namespace,
        "pod": record.pod,
        "node": record.node,
        "allocation_id": record.allocation_id,
        **more,
    }
