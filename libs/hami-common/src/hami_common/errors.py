# SPDX-License-Identifier: Apache-2.0
"""The error tree that every part of the system shares.

::

    HamiError ├── RequestInvalid      the user's pod asks for something impossible: tell the user
    the field and the fix ├── WireInvalid         a peer's payload cannot be decoded: count it,
    dead-letter it, go on ├── SettingsInvalid     the operator's file, environment or flag is wrong:
    stop with exit code 2 ├── Conflict            a compare-and-set was lost: read again and decide
    again ├── Unavailable         a peer did not answer: the same call may work later ├── NotFound
    the object named does not exist (any more) ├── Denied              the peer refused us for good:
    no permission, or it judged the request invalid └── InvariantBroken     our own bug; carries the
    story of the object concerned

Refusals (a device does not fit) are values, never exceptions: see ``hami_core.placement.reasons``.
Library exceptions are translated in the adapter that talks to the library, with ``raise … from``.
Facts are attributes; the sentence is made in ``__str__``.
"""

from collections.abc import Sequence


class HamiError(Exception):
    """Base of all errors raised on purpose by this project."""


class RequestInvalid(HamiError):
    """A pod's request cannot be honoured as written. The catcher shows the text to the user."""

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
        """Name ``what`` was decoded (subject, key or document) and the ``problem``."""
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
    """A compare-and-set was lost.

    The catcher reads the current value and decides again, a bounded number of times.
    """

    def __init__(self, *, what: str, detail: str = "") -> None:
        """Name ``what`` moved and, when known, in which way."""
        super().__init__(what, detail)
        self.what = what
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.what} was changed by somebody else" + (
            f": {self.detail}" if self.detail else ""
        )


class Unauthenticated(HamiError):
    """A caller did not say who it is, or its token is not good. The catcher logs in again."""

    def __init__(self, *, problem: str, fix: str) -> None:
        """Say what is wrong and the ``fix``; never the token."""
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}"


class TooManyRequests(HamiError):
    """A caller holds or asks for more than its share of a service. Retrying later may help."""

    def __init__(self, *, problem: str, fix: str) -> None:
        """Name what the caller holds and the limit, and the ``fix``."""
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}"


class Unavailable(HamiError):
    """A peer did not answer in time or not at all; the outcome of the call is unknown.

    Retrying may help.
    """

    def __init__(self, *, peer: str, detail: str) -> None:
        """Name the ``peer`` and what was seen."""
        super().__init__(peer, detail)
        self.peer = peer
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.peer} is unavailable: {self.detail}"


class NotFound(HamiError):
    """The named object does not exist."""

    def __init__(self, *, what: str) -> None:
        """Name ``what`` was looked for."""
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} was not found"


class Denied(HamiError):
    """The peer refused the call and would refuse it again."""

    def __init__(self, *, peer: str, detail: str, status: int = 0) -> None:
        """Name the ``peer``, its ``detail`` text and its numeric ``status``.

        (0 when it has none).
        """
        super().__init__(peer, detail, status)
        self.peer = peer
        self.detail = detail
        self.status = status

    def __str__(self) -> str:
        return f"{self.peer} refused the request: {self.detail}"


class InvariantBroken(HamiError):
    """A bug of ours. The catcher logs the story and drops to a safe state; nobody retries."""

    def __init__(self, *, what: str, story: Sequence[str] = ()) -> None:
        """Say ``what`` cannot be, with the recent history.

        (``story``, oldest first) of the object concerned.
        """
        super().__init__(what, tuple(story))
        self.what = what
        self.story = tuple(story)

    def __str__(self) -> str:
        return "\n  ".join([self.what, *self.story])
