# SPDX-License-Identifier: Apache-2.0
"""A value that one reader rejects hides neither other values nor other readers."""

import anyio
import pytest
from prometheus_client import CollectorRegistry

from hami_common.bus import subjects
from hami_common.errors import WireInvalid
from hami_common.ports import Entry
from hami_common.runtime.tasks import background
from hami_registry.shell.follow import follow
from hami_registry.shell.metrics import Metrics
from tests.support.memorybus import MemoryBucket, MemoryBus
from tests.support.registry import quarantine

pytestmark = pytest.mark.anyio


class Reading:
    """A reader that rejects some values."""

    def __init__(self, kind: str, error: Exception | None = None) -> None:
        self.kind = kind
        self.error = error
        self.taken: list[bytes] = []
        self.resets = 0

    def entry(self, entry: Entry) -> None:
        if entry.value == b"bad" and self.error is not None:
            raise self.error
        self.taken.append(entry.value)

    def reset(self) -> None:
        self.resets += 1

    def synced(self) -> None:
        pass


@pytest.mark.parametrize("error", [RuntimeError("odd"), WireInvalid(what="v", problem="odd")])
async def test_value_that_fails_is_kept_apart_until_a_newer_one_is_taken(error: Exception) -> None:
    bucket = MemoryBucket(MemoryBus(), subjects.DEVICES_BUCKET)
    metrics, isolated = Metrics(CollectorRegistry()), quarantine()
    failing, sound = Reading("first", error), Reading("second")
    await bucket.append("n.bad", b"bad")
    await bucket.append("n.good", b"good")
    async with background() as group:
        await group.start(follow, bucket, (failing, sound), metrics, isolated)
        assert failing.taken == [b"good"]
        assert sound.taken == [b"bad", b"good"]
        assert [(one.kind, one.key) for one in isolated.entries()] == [("first", "n.bad")]
        await bucket.append("n.bad", b"better")
        with anyio.fail_after(3):
            while isolated.entries():
                await anyio.sleep(0.001)
    assert failing.taken == [b"good", b"better"]
    malformed = metrics.registry.get_sample_value(
        "hami_registry_values_malformed_total", {"origin": bucket.name}
    )
    assert (malformed or 0) == (1 if isinstance(error, WireInvalid) else 0)


async def test_restarted_watch_begins_empty() -> None:
    bucket = MemoryBucket(MemoryBus(), subjects.DEVICES_BUCKET)
    metrics, isolated = Metrics(CollectorRegistry()), quarantine()
    reading = Reading("first", RuntimeError("odd"))
    await bucket.append("n.bad", b"bad")
    for _ in range(2):
        async with background() as group:
            await group.start(follow, bucket, (reading,), metrics, isolated)
    assert reading.resets == 2
    assert len(isolated.entries()) == 1
