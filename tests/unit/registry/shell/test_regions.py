# SPDX-License-Identifier: Apache-2.0
"""Removal of old records from the copies of a region, without a server."""

from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.errors import SettingsInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.model.placement import ContainerShares, Share
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.tasks import background
from hami_registry.core.projection import Projection
from hami_registry.settings import Settings
from hami_registry.shell import regions
from tests.support.memorybus import MemoryBucket, MemoryBus

pytestmark = pytest.mark.anyio
DAY_S = 86_400.0


def record(pod: str, *, op: str, age_s: float) -> AllocationRecord:
    share = Share(vendor="nvidia", uuid="GPU-1", memory_mib=100)
    return AllocationRecord(
        op=op,  # type: ignore[arg-type]  # test data
        allocation_id=f"id-{pod}",
        node="n",
        pod_uid=pod,
        namespace="team-a",
        pod=pod,
        time_s=SystemClock().now_s() - age_s,
        containers=()
        if op == "release"
        else (ContainerShares(name="main", kind="app", shares=(share,)),),
    )


async def test_sweep_removes_what_the_copy_has_and_the_reader_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, projection = MemoryBus(), Projection(liveness_s=0.0)
    ledger = MemoryBucket(memory, subjects.ALLOC_BUCKET)
    purged: list[tuple[str, str, int]] = []

    async def purge(bus: Any, bucket: str, key: str, *, revision: int = 0) -> None:
        del bus
        purged.append((bucket, key, revision))

    monkeypatch.setattr(regions, "NatsBucket", MemoryBucket)
    monkeypatch.setattr("hami_common.runtime.natsio.regions.purge", purge)
    await ledger.append("n.bad", b"bad")
    revisions = {}
    for one in (
        record("old", op="release", age_s=2 * DAY_S),
        record("young", op="release", age_s=DAY_S / 2),
        record("running", op="reserve", age_s=2 * DAY_S),
        record("again", op="release", age_s=2 * DAY_S),
        record("again", op="reserve", age_s=1.0),
    ):
        key = subjects.allocation_key(one.node, one.pod_uid)
        revisions[key] = await ledger.append(key, codec.encode(one))
        projection.record_seen(key, revisions[key], one)
    async with background() as group:
        group.start_soon(_sweep, memory, projection)
        with anyio.fail_after(5):
            while len(purged) < 2:
                await anyio.sleep(0.01)
    assert purged == [
        (subjects.STATE_BUCKET, "n.old", 0),
        (subjects.ALLOC_BUCKET, "n.old", revisions["n.old"]),
    ]
    shown = projection.allocations(released=True)
    assert [one.pod for one in shown] == ["again", "running", "young"]


async def _sweep(memory: Any, projection: Projection) -> None:
    await regions.sweep(
        memory,
        SystemClock(),
        ledger=subjects.ALLOC_BUCKET,
        states=subjects.STATE_BUCKET,
        forget=projection.forget,
    )


def test_only_released_allocations_are_forgotten() -> None:
    projection = Projection(liveness_s=0.0)
    projection.record_seen("n.a", 1, record("a", op="reserve", age_s=0.0))
    projection.forget("n.a")
    projection.forget("n.unknown")
    assert [one.pod for one in projection.allocations()] == ["a"]
    projection.record_seen("n.a", 2, record("a", op="release", age_s=0.0))
    projection.forget("n.a")
    assert projection.allocations(released=True) == []


@pytest.mark.parametrize("name", ["", "missing"])
def test_region_without_its_seed_names_the_setting(tmp_path: Path, name: str) -> None:
    settings = Settings(region="west", regions_seed_file=str(tmp_path / name) if name else "")
    nothing = cast("Any", None)
    with pytest.raises(SettingsInvalid) as caught:
        regions.copy_region(
            nothing, settings, clock=SystemClock(), group=nothing, supervisor=nothing
        )
    assert caught.value.field.startswith("regions_seed_file")
