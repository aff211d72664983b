# SPDX-License-Identifier: Apache-2.0
"""Repeats the scheduler's ``POST /v1/defrag`` for one waiting pod, within a budget.

Each call executes at most one step, and what the ledger holds is the only state: after a crash of
the scheduler the calls continue, and without calls the held places end with their leases. A stop
(SIGINT, SIGTERM, the time, the number of pods) releases what is held for pods that were not
evicted; evicted pods keep the place of their replacement. Seconds throughout.
"""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Final

import click
import msgspec

from hami_common.model.placement import ContainerShares
from hami_core.planning.defrag import Move
from hamictl import client, output
from hamictl.errors import EXIT_NO, Unreachable

PATH: Final = "/v1/defrag"
POLL_S: Final = 0.5
REFUSALS_MOST: Final = 3
"""Steps that may be refused before the command gives up."""
UNKNOWN: Final = "unknown"
"""Name of a pod whose eviction was not reported, because the scheduler ended before it answered."""
_FINAL: Final = ("placed", "fits", "none", "stopped")
_STATES: Final = ("held", "waiting", "evicted")
"""Outcomes with the number of pods that are still to be evicted."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Number and rate of evictions, and the time of a run."""

    pods: int
    evictions: int
    """Maximum evictions in ``interval_s``."""
    interval_s: float
    time_s: float


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the scheduler, see ``DefragStep`` in docs/openapi/scheduler.json."""

    outcome: str
    text: str
    moves: tuple[Move, ...] = ()
    node: str = ""
    evicted: str = ""
    staying: int = 0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run."""

    outcome: str
    text: str
    evicted: tuple[str, ...]
    node: str
    took_s: float


class Run:
    """The defragmentation for one pod."""

    def __init__(
        self,
        scheduler: str,
        namespace: str,
        pod: str,
        budget: Budget,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Call the scheduler at the URL ``scheduler``."""
        self._scheduler = scheduler
        self._pod = {"namespace": namespace, "pod": pod}
        self._budget = budget
        self._now_s = now_s
        self._sleep = sleep
        self._is_stopped = False
        self._is_away = False
        """The last call had no answer."""
        self._evicted: list[str] = []
        self._staying = 0
        """Pods that were still to be evicted after the last answer."""
        self._recent_s: deque[float] = deque()

    def plan(self, moves: int, format_: str) -> int:
        """Print the plan, or the state of a defragmentation that has begun; the exit code."""
        step = self._call(moves=moves)
        if not output.structured(step, format_):
            show_moves(step.moves)
            click.echo(f"{step.outcome}: {step.text}")
        return EXIT_NO if step.outcome == "none" else 0

    def execute(self, format_: str) -> int:
        """Execute steps until the pod runs or the run is stopped; the exit code."""
        is_main = threading.current_thread() is threading.main_thread()
        ends = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        before = {one: signal.signal(one, self._stop) for one in ends}
        try:
            summary = self._execute(is_shown=format_ in ("table", "wide"))
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
        if not output.structured(summary, format_):
            click.echo(
                f"{summary.outcome}: {summary.text}; {len(summary.evicted)} pods moved in"
                f" {summary.took_s:.0f} s"
            )
        return 0 if summary.outcome in ("placed", "fits") else EXIT_NO

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._is_stopped = True

    def _execute(self, *, is_shown: bool) -> Summary:
        begin_s, refused, shown = self._now_s(), 0, ""
        while True:
            why = self._exhausted(begin_s)
            step = self._stopped() if why else self._next()
            if step is None:  # the scheduler does not answer; its places outlive a restart
                self._sleep(POLL_S)
                continue
            self._count(step)
            line = f"{step.outcome}: {step.text}"
            if is_shown and line != shown and not why:
                show_moves(step.moves)
                click.echo(line)
                shown = line
            refused += step.outcome == "refused"
            is_over = step.outcome in _FINAL or refused > REFUSALS_MOST
            if why or is_over:
                return Summary(
                    outcome=step.outcome,
                    text=why or step.text,
                    evicted=tuple(self._evicted),
                    node=step.node,
                    took_s=self._now_s() - begin_s,
                )
            self._sleep(POLL_S)

    def _count(self, step: Step) -> None:
        """Count the pods that were evicted, also where the answer to that call was lost."""
        if step.outcome in _STATES:
            evicted = [step.evicted] if step.evicted else []
            if not step.moves:
                lost = self._staying - step.staying - len(evicted)
                evicted += [UNKNOWN] * max(0, lost)
            self._staying = step.staying
            self._evicted += evicted
            self._recent_s.extend(self._now_s() for _ in evicted)

    def _exhausted(self, begin_s: float) -> str:
        """Return why the run stops now; empty: it continues."""
        if self._is_stopped:
            return "stopped after the current step, as asked"
        if self._now_s() - begin_s > self._budget.time_s:
            return f"stopped after {self._budget.time_s:g} s (--max-time)"
        return ""

    def _next(self) -> Step | None:
        now_s, budget = self._now_s(), self._budget
        while self._recent_s and self._recent_s[0] <= now_s - budget.interval_s:
            self._recent_s.popleft()
        left = budget.pods - len(self._evicted)
        may_evict = left > 0 and len(self._recent_s) < budget.evictions
        try:
            step = self._call(moves=max(0, left), execute=True, evict=may_evict)
        except Unreachable as error:
            if not self._is_away:
                click.echo(f"{error.message}; trying again", err=True)
            self._is_away = True
            return None
        self._is_away = False
        return step

    def _stopped(self) -> Step:
        """Release what is held for pods that are not evicted; else their leases end that."""
        try:
            return self._call(stop=True)
        except click.ClickException as error:
            return Step(outcome="stopped", text=error.message)

    def _call(self, **more: bool | int) -> Step:
        return client.send(Step, self._scheduler, PATH, {**self._pod, **more})


def show_moves(moves: Iterable[Move]) -> None:
    """Print the moves of a plan in order; nothing if there are none."""
    rows = [
        [
            number,
            f"{move.namespace}/{move.pod}",
            f"{move.source}: {devices(move.gives)}",
            f"{move.target}: {devices(move.takes)}",
            move.memory_mib,
        ]
        for number, move in enumerate(moves, start=1)
    ]
    if rows:
        output.table(["STEP", "POD", "FROM", "TO", "MEMORY MIB"], rows, empty="")


def devices(containers: tuple[ContainerShares, ...]) -> str:
    """Format the devices of the shares, with their partitions."""
    shares = [share for container in containers for share in container.shares]
    words = [f"{share.uuid} {share.part}".strip() for share in shares]
    return ", ".join(dict.fromkeys(words))
