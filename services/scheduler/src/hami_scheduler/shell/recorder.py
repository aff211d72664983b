# SPDX-License-Identifier: Apache-2.0
"""Writes every input of the core, with what it answered, to a bounded log on disk (design D15).

Off unless a directory is set; then the core's parts are the ``Recorded…`` ones below, which hand
each call to the recorder. What the log looks like: ``hami_core.replay.stimuluslog``.

Nothing here waits. A call that is recorded costs one place in a queue; encoding, compression and
writing are a thread's work. When the queue is full, or the disk refuses, stimuli are dropped and
counted, the segment ends with a gap, and the next begins with a snapshot, so that a replay knows.
The snapshot that begins a segment is taken in the loop, between two stimuli: it refers to what the
core holds and copies only lists, some milliseconds for 40,000 allocations, once per segment.

At most ``segments`` files of about ``segment_bytes`` are kept; names sort by age. Seconds, bytes.
"""

import logging
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import anyio
import anyio.to_thread
from msgspec import Struct

from hami_common.events.allocation import Account, AllocationRecord
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices
from hami_common.model.request import PlacementPolicy, PodRequest
from hami_common.pods.signing import SignedPlacement
from hami_common.ports import Clock
from hami_common.runtime.quarantine import Quarantine
from hami_core.ledger import stimuli
from hami_core.ledger.ledger import Hold, Ledger
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.reasons import NodeRefusal
from hami_core.placement.verdicts import Filtered, Scored, Verdicts
from hami_core.quota import documents as quota_memory
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.queues import QueueTree
from hami_core.quota.resourcequota import Amounts, Asker, Quota
from hami_core.quota.verdicts import Allowed, QuotaVerdicts
from hami_core.replay.snapshot import Parts, Snapshot, take_exact
from hami_core.replay.stimuluslog import FORMAT, Head, Writer
from hami_core.table.inventory import Inventory
from hami_core.table.table import DeviceTable
from hami_scheduler.shell.isolation import STIMULUS
from hami_scheduler.shell.metrics import Metrics

T = TypeVar("T")

SUFFIX: Final = ".jsonl.gz"
BATCH: Final = 512
"""Stimuli that are encoded and written at a time."""
QUEUE_BYTES: Final = 128 << 20
"""Node names that may wait; a call of 5,000 nodes names 0.25 MiB of them."""
_GZIP: Final = 31
"""zlib's word for gzip's frame."""
_LEVEL: Final = 1

_log = logging.getLogger(__name__)


class LogSettings(Struct, frozen=True, kw_only=True):
    """Where the log is, and how large."""

    directory: Path
    segment_bytes: int
    segments: int
    queue_size: int
    retry_s: float
    """How long writing rests after the disk refused."""


class _Noted(NamedTuple):
    """One stimulus on its way to the disk."""

    number: int
    stimulus: Struct
    names: NodeNames | None
    answer: object


class _Begin(NamedTuple):
    """A segment begins."""

    head: Head
    snapshot: Snapshot


class _Gap(NamedTuple):
    """Stimuli were dropped."""

    dropped: int


class _Written(NamedTuple):
    """What came of a batch."""

    lost: int
    """Stimuli that were not written."""
    failed: Sequence[tuple[str, Exception]] = ()
    """Kinds of stimuli that cannot be encoded, and why."""


class _Parts(NamedTuple):
    parts: Parts
    policy: PlacementPolicy


class Recorder:
    """The queue of stimuli, and the log that it is written to."""

    def __init__(
        self,
        settings: LogSettings,
        *,
        clock: Clock,
        metrics: Metrics,
        quarantine: Quarantine,
        run: str,
        program: str,
    ) -> None:
        """Write the log of ``run``, whose name no other run has."""
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._quarantine = quarantine
        self._run = run
        self._program = program
        self._parts: _Parts | None = None
        self._queue: deque[_Noted | _Begin | _Gap] = deque()
        self._queued_bytes = 0
        self._wake = anyio.Event()
        self._writing = anyio.Lock()
        self._next_number = 1
        self._segment = 0
        self._dropped = 0
        self._wants_segment = True
        self._is_inside = False
        self._rests_until_s = 0.0
        self._file = _Segment(settings)

    def watch(self, parts: Parts, *, policy: PlacementPolicy) -> None:
        """Snapshots are of these parts."""
        self._parts = _Parts(parts, policy)

    def prefer(self, policy: PlacementPolicy) -> None:
        """Snapshots tell this policy from now on."""
        if self._parts is not None:
            self._parts = self._parts._replace(policy=policy)

    def call(self, stimulus: Struct, call: Callable[[], T], names: NodeNames | None = None) -> T:
        """Make a call of the core and note it, with its answer; not what it calls in turn."""
        if self._is_inside:
            return call()
        self._begin_if_due()
        self._is_inside = True
        try:
            answer = call()
        except Exception as error:
            self._note(stimulus, names, error)
            raise
        finally:
            self._is_inside = False
        self._note(stimulus, names, answer)
        return answer

    def _begin_if_due(self) -> None:
        """Begin a segment before a call, where the last is full or something is missing."""
        if not self._wants_segment or self._parts is None or not self._has_room():
            return
        if self._clock.monotonic_s() < self._rests_until_s:
            return
        if self._dropped:
            self._queue.append(_Gap(self._dropped))
            self._dropped = 0
        self._wants_segment = False
        self._segment += 1
        parts, policy = self._parts
        head = Head(
            format=FORMAT,
            run=self._run,
            segment=self._segment,
            next_number=self._next_number,
            program=self._program,
        )
        snapshot = take_exact(parts, policy=policy, now_s=self._clock.now_s())
        self._queue.append(_Begin(head, snapshot))

    def _has_room(self) -> bool:
        return len(self._queue) < self._settings.queue_size and self._queued_bytes < QUEUE_BYTES

    def _note(self, stimulus: Struct, names: NodeNames | None, answer: object) -> None:
        number = self._next_number
        self._next_number += 1
        if self._wants_segment or not self._has_room():
            self._dropped += 1
            self._wants_segment = True
            self._metrics.stimuli_dropped.inc()
            return
        self._queued_bytes += _size(names)
        self._queue.append(_Noted(number, stimulus, names, answer))
        self._wake.set()

    # --- the disk --------------------------------------------------------------------------------

    async def work(self) -> None:
        """Write what is queued, for ever."""
        try:
            while True:
                while not self._queue:
                    if self._wake.is_set():
                        self._wake = anyio.Event()
                    await self._wake.wait()
                await self._write_some()
        finally:
            with suppress(OSError):
                self._file.close()

    async def flush(self) -> None:
        """Write everything that is queued."""
        while self._queue:
            await self._write_some()

    async def drain(self) -> None:
        """Write everything that is queued, and end the segment."""
        await self.flush()
        async with self._writing:
            self._wants_segment = True
            await anyio.to_thread.run_sync(self._file.close)

    async def _write_some(self) -> None:
        async with self._writing:
            await self._write_batch()

    async def _write_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
        self._queued_bytes -= sum(_size(i.names) for i in batch if isinstance(i, _Noted))
        noted = sum(isinstance(item, _Noted) for item in batch)
        try:
            written = await anyio.to_thread.run_sync(self._file.write, batch)
        except OSError as error:
            written = _Written(lost=noted)
            self._rests_until_s = self._clock.monotonic_s() + self._settings.retry_s
            self._wants_segment = True
            _log.warning("stimulus log is not written", extra={"problem": str(error)})
        for what, problem in written.failed:
            # Without it a replay would go wrong: a new segment begins with a snapshot.
            self._quarantine.failed(STIMULUS, what, problem)
            self._wants_segment = True
            self._rests_until_s = self._clock.monotonic_s() + self._settings.retry_s
        self._dropped += written.lost
        self._metrics.stimuli_dropped.inc(written.lost)
        self._metrics.stimuli_recorded.inc(noted - written.lost)
        if self._file.is_full:
            self._wants_segment = True


def _kind_of(item: _Noted | _Begin | _Gap) -> str:
    return type(item.stimulus).__name__ if isinstance(item, _Noted) else type(item).__name__


def _size(names: NodeNames | None) -> int:
    return 0 if names is None else len(names.text)


class _Segment:
    """The file that is written to, by one thread at a time."""

    def __init__(self, settings: LogSettings) -> None:
        self._settings = settings
        self._file: Any = None
        self._squeeze: Any = None
        self._writer = Writer()
        self._size = 0

    @property
    def is_full(self) -> bool:
        """Whether the next segment is due."""
        return self._size >= self._settings.segment_bytes

    def write(self, batch: Sequence[_Noted | _Begin | _Gap]) -> _Written:
        """Write and flush; returns what was not written: no segment, or it cannot be encoded.

        ``OSError``: the segment ended, and nothing can be said of the batch.
        """
        lost = 0
        failed: list[tuple[str, Exception]] = []
        try:
            for item in batch:
                try:
                    lost += self._write_one(item)
                except OSError:
                    raise
                except Exception as error:  # noqa: BLE001 - of one stimulus, given to the quarantine
                    failed.append((_kind_of(item), error))
                    lost += isinstance(item, _Noted)
                    if isinstance(item, _Begin):
                        self._abandon()
            if self._file is not None:
                self._size += self._file.write(self._squeeze.flush(zlib.Z_SYNC_FLUSH))
                self._file.flush()
        except OSError:
            self._abandon()
            raise
        return _Written(lost=lost, failed=failed)

    def _write_one(self, item: _Noted | _Begin | _Gap) -> bool:
        """Write one item; whether it is a stimulus that no segment could take."""
        if isinstance(item, _Begin):
            self._open(item)
        elif self._file is not None:
            self._put(self._lines(item))
        else:
            return isinstance(item, _Noted)
        return False

    def _lines(self, item: _Noted | _Gap) -> Iterable[bytes]:
        if isinstance(item, _Gap):
            return [self._writer.gap(item.dropped)]
        return self._writer.stimulus(item.number, item.stimulus, item.names, item.answer)

    def _put(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._size += self._file.write(self._squeeze.compress(line))

    def _open(self, begin: _Begin) -> None:
        self.close()
        directory = self._settings.directory
        directory.mkdir(parents=True, exist_ok=True)
        kept = sorted(directory.glob(f"*{SUFFIX}"))
        newest = int(kept[-1].name.partition("-")[0]) if kept else 0
        for old in kept[: max(0, len(kept) + 1 - self._settings.segments)]:
            old.unlink()
        self._file = (directory / f"{newest + 1:08d}-{begin.head.run}{SUFFIX}").open("xb")
        self._squeeze = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        self._writer = Writer()
        self._size = 0
        self._put(self._writer.begin(begin.head, begin.snapshot))

    def close(self) -> None:
        """End the segment."""
        if self._file is not None:
            self._file.write(self._squeeze.flush())
            self._abandon()

    def _abandon(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


# --- the core's parts, recorded -------------------------------------------------------------------


class RecordedTable(DeviceTable):
    """A table that records what feeds tell it; what else changes it is recorded where it begins."""

    def __init__(self, recorder: Recorder) -> None:
        """Tell ``recorder``."""
        super().__init__()
        self._recorder = recorder

    def set_domain(self, node: str, path: Iterable[str]) -> None:
        """Recorded."""
        path = tuple(path)
        stimulus = stimuli.NodeStands(node=node, path=path)
        known = super().set_domain
        self._recorder.call(stimulus, lambda: known(node, path))

    def set_withheld(self, node: str, vendor: str = "", *, withheld: bool) -> bool:
        """Recorded."""
        stimulus = stimuli.NodeWithheld(node=node, vendor=vendor, withheld=withheld)
        known = super().set_withheld
        return self._recorder.call(stimulus, lambda: known(node, vendor, withheld=withheld))


class RecordedInventory(Inventory):
    """An inventory that is recorded."""

    def __init__(
        self, table: DeviceTable, recorder: Recorder, *, heartbeat_timeout_s: float
    ) -> None:
        """Tell ``recorder``."""
        super().__init__(table, heartbeat_timeout_s=heartbeat_timeout_s)
        self._recorder = recorder

    def put(self, devices: NodeDevices, *, revision: int, now_s: float) -> bool:
        """Recorded."""
        stimulus = stimuli.DevicesPut(devices=devices, revision=revision, now_s=now_s)
        put = super().put
        return self._recorder.call(stimulus, lambda: put(devices, revision=revision, now_s=now_s))

    def remove(self, node: str, vendor: str) -> None:
        """Recorded."""
        stimulus = stimuli.DevicesRemoved(node=node, vendor=vendor)
        remove = super().remove
        self._recorder.call(stimulus, lambda: remove(node, vendor))

    def begin_again(self) -> None:
        """Recorded."""
        self._recorder.call(stimuli.DevicesBegin(), super().begin_again)

    def end_again(self) -> None:
        """Recorded."""
        self._recorder.call(stimuli.DevicesEnd(), super().end_again)

    def hear(self, heartbeat: Heartbeat, *, now_s: float) -> bool:
        """Recorded."""
        stimulus = stimuli.HeartbeatHeard(heartbeat=heartbeat, now_s=now_s)
        hear = super().hear
        return self._recorder.call(stimulus, lambda: hear(heartbeat, now_s=now_s))

    def deaf(self, *, now_s: float) -> None:
        """Recorded."""
        deaf = super().deaf
        self._recorder.call(stimuli.BusUnheard(now_s=now_s), lambda: deaf(now_s=now_s))

    def tick(self, *, now_s: float) -> list[tuple[str, str]]:
        """Recorded."""
        tick = super().tick
        return self._recorder.call(stimuli.SilenceJudged(now_s=now_s), lambda: tick(now_s=now_s))

    def take_fault(self, fault: DeviceFault) -> bool:
        """Recorded."""
        take_fault = super().take_fault
        return self._recorder.call(stimuli.FaultHeard(fault=fault), lambda: take_fault(fault))


class RecordedLedger(Ledger):
    """A ledger that is recorded."""

    def __init__(
        self,
        table: DeviceTable,
        recorder: Recorder,
        *,
        writer: str,
        lease_s: float,
        fence_delay_s: float,
    ) -> None:
        """Tell ``recorder``."""
        super().__init__(table, writer=writer, lease_s=lease_s, fence_delay_s=fence_delay_s)
        self._recorder = recorder

    def handle(self, stimulus: stimuli.Stimulus) -> list[stimuli.Effect]:
        """Recorded."""
        handle = super().handle
        return self._recorder.call(stimulus, lambda: handle(stimulus))

    def forget(self, node: str, pod_uid: str) -> None:
        """Recorded."""
        forget = super().forget
        self._recorder.call(
            stimuli.Forgotten(node=node, pod_uid=pod_uid), lambda: forget(node, pod_uid)
        )

    def plan_bind(
        self, request: PodRequest, node: str, *, allocation_id: str, now_s: float, fenced: str = ""
    ) -> stimuli.Append | stimuli.Reuse | NodeRefusal:
        """Recorded."""
        stimulus = stimuli.BindPlanned(
            request=request, node=node, allocation_id=allocation_id, now_s=now_s, fenced=fenced
        )
        plan_bind = super().plan_bind
        return self._recorder.call(
            stimulus,
            lambda: plan_bind(
                request, node, allocation_id=allocation_id, now_s=now_s, fenced=fenced
            ),
        )

    def plan_hold(
        self,
        request: PodRequest,
        node: str,
        *,
        allocation_id: str,
        now_s: float,
        hold: Hold,
        fenced: str = "",
    ) -> stimuli.Append | stimuli.Reuse | NodeRefusal:
        """Recorded."""
        stimulus = stimuli.HoldPlanned(
            request=request,
            node=node,
            allocation_id=allocation_id,
            now_s=now_s,
            held_for=hold.held_for,
            lease_s=hold.lease_s,
            awaits=hold.awaits,
            fenced=fenced,
        )
        plan_hold = super().plan_hold
        return self._recorder.call(
            stimulus,
            lambda: plan_hold(
                request,
                node,
                allocation_id=allocation_id,
                now_s=now_s,
                hold=hold,
                fenced=fenced,
            ),
        )

    def plan_restore(
        self, signed: SignedPlacement, *, now_s: float, must: bool
    ) -> stimuli.Append | NodeRefusal | None:
        """Recorded."""
        stimulus = stimuli.RestorePlanned(signed=signed, now_s=now_s, must=must)
        plan_restore = super().plan_restore
        return self._recorder.call(stimulus, lambda: plan_restore(signed, now_s=now_s, must=must))


class RecordedVerdicts(Verdicts):
    """Filter and prioritize, recorded."""

    def __init__(self, table: DeviceTable, recorder: Recorder) -> None:
        """Tell ``recorder``."""
        super().__init__(table)
        self._recorder = recorder

    def filter(self, request: PodRequest, names: NodeNames | Sequence[str]) -> Filtered:
        """Recorded, with what later changes of the table must not change in the answer."""
        known = names if isinstance(names, NodeNames) else NodeNames.of(names)
        ask = super().filter

        def answer() -> Filtered:
            filtered = ask(request, known)
            filtered.classes()
            filtered.groups()
            return filtered

        return self._recorder.call(stimuli.FilterAsked(request=request), answer, known)

    def prioritize(
        self, request: PodRequest, names: NodeNames | Sequence[str], *, near: Sequence[str] = ()
    ) -> Scored:
        """Recorded."""
        known = names if isinstance(names, NodeNames) else NodeNames.of(names)
        stimulus = stimuli.PrioritizeAsked(request=request, near=tuple(near))
        ask = super().prioritize
        return self._recorder.call(stimulus, lambda: ask(request, known, near=near), known)


class RecordedQuotaLedger(QuotaLedger):
    """A ledger of quotas that is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        """Tell ``recorder``."""
        super().__init__()
        self._recorder = recorder

    def put_quota(self, quota: Quota) -> None:
        """Recorded."""
        put_quota = super().put_quota
        stimulus = stimuli.QuotaPut(quota=quota_memory.written(quota))
        self._recorder.call(stimulus, lambda: put_quota(quota))

    def drop_quota(self, namespace: str, name: str) -> bool:
        """Recorded."""
        drop_quota = super().drop_quota
        stimulus = stimuli.QuotaDropped(namespace=namespace, name=name)
        return self._recorder.call(stimulus, lambda: drop_quota(namespace, name))

    def set_tree(self, tree: QueueTree) -> None:
        """Recorded."""
        set_tree = super().set_tree
        stimulus = stimuli.QueuesSet(queues=tuple(tree.queues.values()))
        self._recorder.call(stimulus, lambda: set_tree(tree))

    def fold(self, seq: int, record: AllocationRecord) -> None:
        """Recorded."""
        fold = super().fold
        stimulus = stimuli.QuotaFolded(seq=seq, record=record)
        self._recorder.call(stimulus, lambda: fold(seq, record))

    def synced(self) -> None:
        """Recorded."""
        self._recorder.call(stimuli.QuotaSynced(), super().synced)

    def reset(self) -> None:
        """Recorded."""
        self._recorder.call(stimuli.QuotaReset(), super().reset)

    def expect(self, record: AllocationRecord) -> None:
        """Recorded."""
        expect = super().expect
        self._recorder.call(stimuli.QuotaExpected(record=record), lambda: expect(record))

    def stop_expecting(self, allocation_id: str) -> None:
        """Recorded, where it changes anything: every bind says it, under a quota or not."""
        if not self.expects(allocation_id):
            return
        stop = super().stop_expecting
        stimulus = stimuli.QuotaUnexpected(allocation_id=allocation_id)
        self._recorder.call(stimulus, lambda: stop(allocation_id))

    def first_look(
        self,
        namespace: str,
        account: Account | None,
        wanted: Amounts,
        *,
        own: Iterable[tuple[str, str]] = (),
        waits: Callable[[str], bool] | None = None,
    ) -> NodeRefusal | None:
        """Recorded; with ``waits`` it is part of what ``RecordedQuotaVerdicts`` records."""
        own = tuple(own)
        stimulus = stimuli.QuotaLooked(
            namespace=namespace,
            account=account,
            wanted=quota_memory.written_amounts(wanted),
            own=own,
        )
        first_look = super().first_look
        return self._recorder.call(
            stimulus, lambda: first_look(namespace, account, wanted, own=own, waits=waits)
        )

    def verdict(self, seq: int) -> NodeRefusal | None:
        """Recorded."""
        verdict = super().verdict
        return self._recorder.call(stimuli.QuotaJudged(seq=seq), lambda: verdict(seq))


class RecordedQuotaVerdicts(QuotaVerdicts):
    """Filter's answers after quotas were asked, recorded."""

    def __init__(self, table: DeviceTable, ledger: QuotaLedger, recorder: Recorder) -> None:
        """Tell ``recorder``."""
        super().__init__(table, ledger)
        self._recorder = recorder

    def allowed(
        self,
        request: PodRequest,
        filtered: Filtered,
        asker: Asker,
        *,
        waiting: Collection[str],
    ) -> Filtered | Allowed:
        """Recorded, with what later changes of the table must not change in the answer."""
        stimulus = stimuli.QuotaAsked(request=request, asker=asker, waiting=tuple(waiting))
        ask = super().allowed

        def answer() -> Filtered | Allowed:
            found = ask(request, filtered, asker, waiting=waiting)
            found.classes()
            found.groups()
            return found

        return self._recorder.call(stimulus, answer)
