# SPDX-License-Identifier: Apache-2.0
"""The list of checks: numbers, names, deadlines, faults; and how measurements become a verdict.

A check is a generator over a ``Bench``: it yields one ``Measure`` per figure. It passes if at least
one figure has a bound and every bounded figure is within its bounds. It raises ``Skipped`` where
the machine cannot run it. A fault breaks the environment of a check, never its verdict: the check
has to detect it by its own figures.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.gpu.bench import Bench


class Skipped(Exception):
    """The check cannot run here; the text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One figure of a check and its expected range; without bounds it is only reported."""

    name: str
    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def is_bounded(self) -> bool:
        """True if the figure decides about the verdict."""
        return self.least is not None or self.most is not None

    @property
    def is_within(self) -> bool:
        """True if the figure is in its range; NaN never is."""
        if not self.is_bounded:
            return True
        low = self.least is None or self.value >= self.least
        return low and (self.most is None or self.value <= self.most)

    @property
    def text(self) -> str:
        """The figure with its range."""
        value = f"{self.name} {self.value:.6g} {self.unit}".rstrip()
        if not self.is_bounded:
            return value
        low = "" if self.least is None else f"{self.least:.6g}"
        high = "" if self.most is None else f"{self.most:.6g}"
        return f"{value} (expected {low}..{high})"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A defect of the environment that a check must detect on the fake driver."""

    is_preloaded: bool = True
    """False: tenants run without the limiter."""
    core_policy: str = ""
    """``disable``: the limiter ignores compute limits."""
    memory_pct: int = 100
    """Tenants get this part of the memory limit that the check requests."""
    is_resized: bool = True
    """False: changes of a limits file are lost."""
    is_killed: bool = True
    """False: a process to be killed is only stopped."""
    has_neighbor: bool = True
    """False: the neighbor of a tenant stays idle."""
    is_bypassed: bool = True
    """False: a program that is to avoid the limiter does not."""
    has_agent: bool = True
    """False: nothing publishes active priorities."""
    is_slow: bool = False
    """Each launch through the limiter takes a millisecond longer."""
    driver: tuple[str, int, int] | None = None
    """A function of the fake driver, the code it returns, the milliseconds it takes."""


NO_LIMITER = Fault(is_preloaded=False)
NO_COMPUTE_LIMIT = Fault(core_policy="disable")

Run = Callable[["Bench"], Iterator[Measure]]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check."""

    id: str
    name: str
    run: Run
    deadline_s: float
    fault: Fault | str
    """Fault that it detects on the fake driver; a text: why it does not run there."""
    is_last: bool
    """Runs after all others, because it may leave the driver in another state."""


CHECKS: dict[str, Check] = {}
"""All checks by id, in order of definition; ``tests.gpu.checks`` modules fill it."""


def check(
    id_: str, name: str, *, deadline_s: float, fault: Fault | str, is_last: bool = False
) -> Callable[[Run], Run]:
    """Register the decorated generator as a check."""

    def register(run: Run) -> Run:
        if id_ in CHECKS:
            msg = f"check {id_} is registered twice"
            raise ValueError(msg)
        CHECKS[id_] = Check(
            id=id_, name=name, run=run, deadline_s=deadline_s, fault=fault, is_last=is_last
        )
        return run

    return register


def order(check_: Check) -> tuple[bool, bool, int, str]:
    """Sort key: by number, then checks with names, and last those that must come last."""
    number = int(check_.id) if check_.id.isdecimal() else 0
    return (check_.is_last, not number, number, check_.id)
