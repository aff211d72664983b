# SPDX-License-Identifier: Apache-2.0
"""Resizes of pods, beyond those that a running cluster shows (tests/e2e/test_resize.py)."""

import pytest

from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.asking import ShareNow, UsageAnswer
from hami_common.pods import annotations
from hami_common.skus.expansion import Alternative, Expansion, encode
from hami_core.planning.resizing import ResizeRequest
from hami_scheduler.shell.resize import ResizeRefused
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import Running, World, quiet

pytestmark = pytest.mark.anyio


async def runs(world: World) -> AllocationRecord:
    """Report that the only pod runs."""
    await quiet()
    (record,) = world.live()
    await world.report_state(
        StateRecord(
            state="running",
            allocation_id=record.allocation_id,
            node="n1",
            pod_uid=record.pod_uid,
            namespace="default",
            pod="a",
            ledger_seq=1,
        )
    )
    await quiet()
    return record


async def test_pod_grows_to_no_more_than_its_sku_has() -> None:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "2000", "nvidia.com/gpucores": "10"}
    expansion = Expansion(
        sku="s-2g@1",
        service_class="burstable",
        alternatives=(Alternative(vendor="nvidia", limits={"main": limits}),),
    )
    pod = builders.pod("a", gpu=None, annotated={annotations.ALTERNATIVES: encode(expansion)})
    pod["spec"]["containers"][0]["resources"]["limits"]["hami.io/accelerators"] = "1"
    world = World()
    await world.add_devices(builders.devices("n1", memory_mib=10_000))
    async with world.scheduler() as s:
        assert await s.bind(world.add_pod(pod), "n1") == ""
        await runs(world)
        wish = ResizeRequest(namespace="default", pod="a", container="main", memory_mib=4000)
        with pytest.raises(ResizeRefused, match="SKU s-2g@1") as refused:
            await s.scheduler.resizer.resize(wish)
        assert refused.value.code == "sku"
    (record,) = world.live()
    assert record.containers[0].shares[0].memory_mib == 2000


@pytest.mark.parametrize(("used_mib", "refused"), [(6000, False), (6001, True)])
async def test_request_shrinks_below_the_use_that_the_limit_allows(
    used_mib: int, *, refused: bool
) -> None:
    limits = {annotations.MEMORY_LIMIT: "6000"}
    pod = builders.pod("a", mem_mib=3000, annotated=limits)
    world = World()
    await world.add_devices(builders.devices("n1", memory_mib=10_000))

    async def ask(subject: str, data: bytes = b"") -> bytes:
        (record,) = world.live()
        share = ShareNow(
            namespace="default",
            pod="a",
            pod_uid=record.pod_uid,
            container="main",
            vendor="nvidia",
            uuid=record.containers[0].shares[0].uuid,
            memory_mib=3000,
            used_mib=used_mib,
            file_mib=1000,
            file_core_pct=10,
        )
        return codec.encode(UsageAnswer(node="n1", time_s=0.0, shares=(share,)))

    world.ask = ask
    async with world.scheduler() as s:
        assert await s.bind(world.add_pod(pod), "n1") == ""
        await runs(world)
        wish = ResizeRequest(namespace="default", pod="a", container="main", memory_mib=1000)
        await _shrink(s, wish, refused=refused)
    (share,) = world.live()[0].containers[0].shares
    assert (share.memory_mib, share.memory_limit_mib) == (3000 if refused else 1000, 6000)


async def _shrink(s: Running, wish: ResizeRequest, *, refused: bool) -> None:
    if refused:
        with pytest.raises(ResizeRefused, match="more than 6000"):
            await s.scheduler.resizer.resize(wish)
    else:
        await s.scheduler.resizer.resize(wish)
