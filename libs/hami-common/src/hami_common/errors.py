# SPDX-License-Identifier: Apache-2.0
"""The error tree that every part of the system shares.

::

    HamiError
    ├── RequestInvalid    a pod asks for something impossible: show the user the field and the fix
    ├── WireInvalid       a payload from a peer does not decode: count it, dead-letter it, continue
    ├── SettingsInvalid   a file, variable or flag of the operator is wrong: exit with code 2
    ├── Conflict          a compare-and-set failed: re-read and decide again
    ├── Unauthenticated   a caller has no valid credentials: log in again
    ├── TooManyRequests   a caller exceeds its limit: retry later
    ├── Unavailable       a peer did not answer; the outcome is unknown: retry may help
    ├── NotFound          the named object does not exist
    ├── Denied            a peer refuses the call permanently: do not retry
    └── InvariantBroken   a bug of this project: log the history of the object, fall back safely

Refusals (a device does not fit) are values, never exceptions: see ``hami_core.placement.reasons``.
Library exceptions are translated in the adapter that talks to the library, with ``raise … from``.
Facts are attributes; ``__str__`` makes the sentence.
"""

from collections.abc import Sequence


class HamiError(Exception):
    """Base of all errors raised on purpose by this project."""


class RequestInvalid(HamiError):
    """A pod's request cannot be fulfilled as written. The catcher shows the text to the user."""

    def __init__(self, *, field: str, problem: str, fix: str) -> None:
        """Name the ``field`` as the user wrote it, the ``problem`` and the ``fix``."""
        super().__init__(field, problem, fix)
        self.field = field
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.fix}"


class WireInvalid(HamiError):
    """A payload from a peer does not decode.

    The catcher counts it and keeps the raw bytes for inspection.
    """

    def __init__(self, *, what: str, problem: str) -> None:
        """Name the decoded object, ``what`` (subject, key or document), and the ``problem``."""
        super().__init__(what, problem)
        self.what = what
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}"


class SettingsInvalid(HamiError):
    """A setting is wrong. The catcher prints it and exits with code 2."""

    def __init__(self, *, field: str, problem: str, fix: str) -> None:
        """Name the ``field`` by its full path in the file, the ``problem`` and the ``fix``."""
        super().__init__(field, problem, fix)
        self.field = field
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"setting {self.field}: {self.problem}; {self.fix}"


class Conflict(HamiError):
    """A compare-and-set failed because the stored revision has changed.

    The catcher re-reads the current value and decides again, a bounded number of times.
    """

    def __init__(self, *, what: str, detail: str = "") -> None:
        """Name the changed object, ``what``, and the change when known."""
        super().__init__(what, detail)
        self.what = what
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.what} was changed concurrently" + (f": {self.detail}" if self.detail else "")


class Unauthenticated(HamiError):
    """A caller has no credentials or an invalid token. The catcher logs in again."""

    def __init__(self, *, problem: str, fix: str) -> None:
        """State the ``problem`` and the ``fix``; never the token."""
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}"


class TooManyRequests(HamiError):
    """A caller exceeds its limit on a service. Retrying later may help."""

    def __init__(self, *, problem: str, fix: str) -> None:
        """Name the current use, the limit and the ``fix``."""
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}"


class Unavailable(HamiError):
    """A peer did not answer in time; the outcome of the call is unknown. Retrying may help."""

    def __init__(self, *, peer: str, detail: str) -> None:
        """Name the ``peer`` and the symptom."""
        super().__init__(peer, detail)
        self.peer = peer
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.peer} is unavailable: {self.detail}"


class NotFound(HamiError):
    """The named object does not exist."""

    def __init__(self, *, what: str) -> None:
        """Name the missing object, ``what``."""
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} was not found"


class Denied(HamiError):
    """The peer refused the call and would refuse it again."""

    def __init__(self, *, peer: str, detail: str, status: int = 0) -> None:
        """Name the ``peer``, its ``detail`` text and ``status`` (0 for none)."""
        super().__init__(peer, detail, status)
        self.peer = peer
        self.detail = detail
        self.status = status

    def __str__(self) -> str:
        return f"{self.peer} refused the request: {self.detail}"


class InvariantBroken(HamiError):
    """A bug of this project. The catcher logs the history and falls back to a safe state."""

    def __init__(self, *, what: str, history: Sequence[str] = ()) -> None:
        """Name the impossible fact (``what``) and the object's recent ``history``, oldest first."""
        super().__init__(what, tuple(history))
        self.what = what
        self.history = tuple(history)

    def __str__(self) -> str:
        return "\n  ".join([self.what, *self.history])
