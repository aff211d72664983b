# SPDX-License-Identifier: Apache-2.0
"""JetStream errors that are transient, and those that are permanent."""

from typing import Any, cast

import msgspec
import pytest

from hami_common.errors import Conflict, HamiError, NotFound, Unavailable
from hami_common.runtime.natsio.client import Message
from hami_common.runtime.natsio.connection import Bus
from hami_common.runtime.natsio.jetstream import ApiRefusal, api, store

pytestmark = pytest.mark.anyio


class _Bus:
    """Refuses everything with the same error."""

    def __init__(self, **error: Any) -> None:
        self._answer = msgspec.json.encode({"error": error})

    async def request(self, subject: str, data: bytes = b"", **_: Any) -> Message:
        del data
        return Message(subject=subject, data=self._answer)


def bus(code: int, err_code: int, description: str = "no") -> Bus:
    return cast("Bus", _Bus(code=code, err_code=err_code, description=description))


@pytest.mark.parametrize(
    ("request_name", "code", "err_code", "expected"),
    [
        ("CONSUMER.CREATE.HAMI_EVENTS.x", 500, 10012, Unavailable),  # no space left on device
        ("CONSUMER.CREATE.HAMI_EVENTS.x", 400, 10026, Unavailable),  # too many consumers
        ("CONSUMER.CREATE.HAMI_EVENTS.x", 404, 10059, NotFound),
        ("STREAM.INFO.HAMI_EVENTS", 500, 10000, Unavailable),
        ("STREAM.MSG.GET.HAMI_EVENTS", 500, 10051, Unavailable),
        ("STREAM.PURGE.KV_hami_alloc", 500, 10110, Unavailable),
        ("STREAM.CREATE.HAMI_EVENTS", 500, 10047, Unavailable),  # storage used up
        ("STREAM.UPDATE.HAMI_EVENTS", 500, 10023, Unavailable),
        ("STREAM.CREATE.HAMI_EVENTS", 503, 10008, Unavailable),
        ("STREAM.UPDATE.HAMI_EVENTS", 500, 10052, ApiRefusal),  # another kind of storage
        ("STREAM.MSG.DELETE.KV_hami_alloc", 500, 10057, ApiRefusal),  # not permitted
        ("STREAM.MSG.GET.HAMI_EVENTS", 404, 10037, ApiRefusal),
    ],
)
async def test_refusal_of_the_api(
    request_name: str, code: int, err_code: int, expected: type[HamiError]
) -> None:
    with pytest.raises(HamiError) as caught:
        await api(bus(code, err_code), request_name)
    assert type(caught.value) is expected


@pytest.mark.parametrize(
    ("code", "err_code", "expected"),
    [
        (503, 10077, Unavailable),  # maximum bytes exceeded
        (503, 10023, Unavailable),
        (400, 10054, ApiRefusal),  # message too large
        (400, 10071, Conflict),
    ],
)
async def test_refusal_of_a_message(code: int, err_code: int, expected: type[HamiError]) -> None:
    with pytest.raises(HamiError) as caught:
        await store(bus(code, err_code), "$KV.hami_alloc.n.u", b"")
    assert type(caught.value) is expected
