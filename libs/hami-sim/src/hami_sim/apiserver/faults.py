# SPDX-License-Identifier: Apache-2.0
"""Faults that tests put between a client and the server.

A :class:`Fault` states which requests it matches and what happens to them. `times` is decremented
per match; 0 means indefinitely. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from hami_sim.apiserver.auth import RequestInfo

Action: TypeAlias = Literal["delay", "deny", "cut", "lose-response"]


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """Selector of requests; an empty field matches any, and `subresource` "-" matches none."""

    verb: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    user: str = ""

    def __call__(self, request: RequestInfo) -> bool:
        """Say whether a request is meant."""
        if self.subresource == "-" and request.subresource:
            return False
        wanted_sub = "" if self.subresource == "-" else self.subresource
        return all(
            not wanted or wanted == found
            for wanted, found in (
                (self.verb, request.verb),
                (self.resource, request.resource),
                (wanted_sub, request.subresource),
                (self.namespace, request.namespace),
                (self.name, request.name),
                (self.user, request.user),
            )
        )


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: `cut` drops the connection before anything happens, `lose-response` after it."""

    match: Match = Match()
    action: Action
    delay_s: float = 0.0
    code: int = 503
    message: str = "injected fault"
    retry_after_s: int | None = None
    times: int = 1
    where: Callable[[RequestInfo], bool] | None = None
    """A further condition, for tests in the same process."""

    def meets(self, request: RequestInfo) -> bool:
        """Say whether this fault applies to a request."""
        return self.match(request) and (self.where is None or self.where(request))


class Faults:
    """The faults in force, oldest first; the first that meets a request is applied."""

    def __init__(self) -> None:
        self._armed: list[tuple[Fault, int]] = []
        self.met: list[tuple[Fault, RequestInfo]] = []
        """Faults that were applied, with their requests, in order."""

    def add(self, fault: Fault) -> Fault:
        """Put a fault in force."""
        self._armed.append((fault, fault.times))
        return fault

    def clear(self) -> None:
        """Lift all faults."""
        self._armed.clear()

    def take(self, request: RequestInfo) -> Fault | None:
        """Return the fault for a request, counting it."""
        for position, (fault, left) in enumerate(self._armed):
            if fault.meets(request):
                if left == 1:
                    del self._armed[position]
                elif left > 1:
                    self._armed[position] = (fault, left - 1)
                self.met.append((fault, request))
                return fault
        return None
