# SPDX-License-Identifier: Apache-2.0
"""Selection of events, and the position from which they are followed."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from hami_common.errors import RequestInvalid
from hami_common.runtime.natsio.history import Event, History
from hami_registry.shell.eventtail import Wanted, tail


@pytest.mark.parametrize("kind", ["device", "usage", "policy"])
def test_kind_without_a_namespace_is_refused_for_one(kind: str) -> None:
    assert Wanted.of({"kind": kind}).filters
    with pytest.raises(RequestInvalid, match="belong to no namespace"):
        Wanted.of({"kind": kind, "namespace": "team-a"})


def test_all_kinds_of_a_namespace_leave_out_those_without_one() -> None:
    left_out = {*Wanted.of({}).filters} - {*Wanted.of({"namespace": "team-a"}).filters}
    words = {one.split(".")[3] for one in left_out}
    assert {"device", "usage", "policy"} <= words
    assert "idle" not in words


class Stored(History):
    """A stream of two events of the first kind, to which a third one is appended."""

    def __init__(self) -> None:
        self.last = 2

    async def extent(self) -> tuple[int, int]:
        return 1, self.last

    async def follow(
        self,
        filter_subjects: Sequence[str],
        *,
        after: int | None = None,
        since_s: float | None = None,
    ) -> AsyncGenerator[Event | None, None]:
        del filter_subjects, since_s
        begin = self.last if after is None else after
        for sequence in range(begin + 1, self.last + 1):
            subject = "hami.v1.event.usage.gpu-1"
            yield Event(sequence=sequence, stored_s=1.0, subject=subject, headers={}, data=b"{}")


@pytest.mark.anyio
async def test_events_that_are_stored_after_the_subscription_are_delivered() -> None:
    history = Stored()
    chunks = tail(history, Wanted.of({}), after=None, since_s=None, limit=0, follow=True)
    async with aclosing(chunks):
        assert (await anext(chunks)).startswith(b"event: subscription\n")
        history.last += 1
        assert (await anext(chunks)).startswith(b"event: event\nid: 3\n")
        assert (await anext(chunks)).startswith(b"event: end\n")
