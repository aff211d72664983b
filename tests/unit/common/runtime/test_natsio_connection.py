# SPDX-License-Identifier: Apache-2.0
"""The keeper of a connection notices its loss at once, in every state."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from hami_common.runtime.natsio import connection
from hami_common.runtime.natsio.creds import NatsLogin
from hami_common.runtime.tasks import background

pytestmark = pytest.mark.anyio

ASKED_S = 60.0
"""Timeout of a request in these tests."""
SOON_S = 20.0
"""Limit that a blocked keeper exceeds; one that is not blocked takes milliseconds."""


class _Client:
    """A connection that breaks, or stops receiving, during the second request to the server."""

    is_reading = True
    breaks = True

    def __init__(self, *, rest_s: float, lost: Callable[[], object]) -> None:
        del rest_s
        self._lost = lost
        self._flushes = 0

    async def connect(self, **_: Any) -> None:
        """Every server accepts the login."""

    async def flush(self, *, timeout: int) -> None:  # noqa: ASYNC109 - the library's
        del timeout
        self._flushes += 1
        if self._flushes == 1:
            return  # the connection is made
        if self.breaks:
            self._lost()
            await anyio.sleep_forever()

    async def close(self) -> None:
        """No connection is open."""


class _Deaf(_Client):
    breaks = False
    is_reading = False


@pytest.mark.parametrize("client", [_Client, _Deaf])
async def test_connection_that_is_lost_under_a_question_is_renewed_at_once(
    client: type[_Client], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "DirectClient", client)
    monkeypatch.setattr(connection, "PING_S", ASKED_S)
    # The server is asked as soon as the login is to be renewed.
    login = NatsLogin(renew_s=0.001)
    bus = connection.Bus(["nats://nowhere"], name="t", login=login)
    await bus.open(1.0)
    async with background() as group:
        group.start_soon(bus.keep)
        with anyio.fail_after(SOON_S):
            await bus.wait_connected(after=1)
    assert caplog.messages[0] == "connection to NATS lost"
