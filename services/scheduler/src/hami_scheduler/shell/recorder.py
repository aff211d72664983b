# SPDX-License-Identifier: Apache-2.0
"""Writes every input of the core, with its answer, to a bounded log on disk (design D15).

Off unless a directory is set; then ``RecordedCore`` replaces ``Core``. The format of the log:
``hami_core.replay.stimuluslog``.

Recording never waits: an input costs one place in a queue; a thread encodes, compresses and writes.
If the queue is full or the disk fails, inputs are dropped and counted, the segment ends with a gap,
and the next begins with a snapshot, so that a replay detects it. The snapshot is taken in the event
loop between two inputs: it refers to the core's objects and copies only lists, some milliseconds
for 40,000 allocations, once per segment.

At most ``segments`` files of about ``segment_bytes`` are kept; names sort by age. Seconds, bytes.
"""

import logging
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import anyio
import anyio.to_thread
from msgspec import Struct

from hami_common.model.request import PlacementPolicy
from hami_common.ports import Clock
from hami_common.runtime.quarantine import Quarantine
from hami_core.core import Core
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import Input
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.verdicts import Filtered
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.verdicts import Allowed
from hami_core.replay.snapshot import Snapshot, take_exact
from hami_core.replay.stimuluslog import FORMAT, Head, Writer
from hami_core.table.inventory import Inventory
from hami_scheduler.shell.isolation import STIMULUS
from hami_scheduler.shell.metrics import Metrics

Answer = TypeVar("Answer")

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
    """Directory and size of the log."""

    directory: Path
    segment_bytes: int
    segments: int
    queue_size: int
    retry_s: float
    """Pause of writing after a disk error."""


class _Noted(NamedTuple):
    """One stimulus that is being written."""

    number: int
    stimulus: Struct
    names: NodeNames | None
    answer: object


class _Begin(NamedTuple):
    """Begin of a segment."""

    head: Head
    snapshot: Snapshot


class _Gap(NamedTuple):
    """Stimuli were dropped."""

    dropped: int


class _Written(NamedTuple):
    """Result of a batch."""

    lost: int
    """Stimuli that were not written."""
    failed: Sequence[tuple[str, Exception]] = ()
    """Kinds of stimuli that cannot be encoded, and the errors."""


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
        policy: PlacementPolicy,
    ) -> None:
        """Write the log of ``run``, a unique name; snapshots contain ``policy``."""
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._quarantine = quarantine
        self._run = run
        self._program = program
        self._policy = policy
        self._queue: deque[_Noted | _Begin | _Gap] = deque()
        self._queued_bytes = 0
        self._wake = anyio.Event()
        self._writing = anyio.Lock()
        self._next_number = 1
        self._segment = 0
        self._dropped = 0
        self._wants_segment = True
        self._rests_until_s = 0.0
        self._file = _Segment(settings)

    def prefer(self, policy: PlacementPolicy) -> None:
        """Write this policy into snapshots from now on."""
        self._policy = policy

    def begin_if_due(self, core: Core) -> None:
        """Begin a segment before an input, if the last is full or inputs were dropped."""
        if not self._wants_segment or not self._has_room():
            return
        if self._clock.monotonic_s() < self._rests_until_s:
            return
        if self._dropped:
            self._queue.append(_Gap(self._dropped))
            self._dropped = 0
        self._wants_segment = False
        self._segment += 1
        head = Head(
            format=FORMAT,
            run=self._run,
            segment=self._segment,
            next_number=self._next_number,
            program=self._program,
        )
        snapshot = take_exact(core, policy=self._policy, now_s=self._clock.now_s())
        self._queue.append(_Begin(head, snapshot))

    def _has_room(self) -> bool:
        return len(self._queue) < self._settings.queue_size and self._queued_bytes < QUEUE_BYTES

    def note(self, stimulus: Struct, names: NodeNames | None, answer: object) -> None:
        """Queue one input with its answer; drop it and end the segment if the queue is full."""
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
        """Write queued inputs, indefinitely."""
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
        """Write all queued inputs."""
        while self._queue:
            await self._write_some()

    async def drain(self) -> None:
        """Write all queued inputs, and end the segment."""
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
            # Without it a replay would differ: a new segment begins with a snapshot.
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
    """The file being written, by one thread at a time."""

    def __init__(self, settings: LogSettings) -> None:
        self._settings = settings
        self._file: Any = None
        self._squeeze: Any = None
        self._writer = Writer()
        self._size = 0

    @property
    def is_full(self) -> bool:
        """Return whether the next segment is due."""
        return self._size >= self._settings.segment_bytes

    def write(self, batch: Sequence[_Noted | _Begin | _Gap]) -> _Written:
        """Write and flush; returns what was not written: no segment, or it cannot be encoded.

        ``OSError``: the segment ended, and the outcome of the batch is unknown.
        """
        lost = 0
        failed: list[tuple[str, Exception]] = []
        try:
            for item in batch:
                try:
                    lost += self._write_one(item)
                except OSError:
                    raise
                except Exception as error:  # noqa: BLE001 - of one stimulus, quarantined
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
        """Write one item; returns whether it is a stimulus that no segment could take."""
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


# --- the recorded core ----------------------------------------------------------------------------


class RecordedCore(Core):
    """A core whose every input is recorded with its answer."""

    def __init__(
        self, recorder: Recorder, *, ledger: Ledger, inventory: Inventory, quota: QuotaLedger
    ) -> None:
        """Record with ``recorder``."""
        super().__init__(ledger=ledger, inventory=inventory, quota=quota)
        self.recorder = recorder

    def answer(self, asked: Input[Answer], names: NodeNames | None = None) -> Answer:
        """Answer, and record the answer before later changes of the table can change it."""
        self.recorder.begin_if_due(self)
        try:
            answer = super().answer(asked, names)
        except Exception as error:
            self.recorder.note(asked, names, error)
            raise
        if isinstance(answer, Filtered | Allowed):
            answer.classes()
            answer.groups()
        self.recorder.note(asked, names, answer)
        return answer
