# SPDX-License-Identifier: Apache-2.0
"""Resizes of pods, beyond those that a running cluster shows (tests/e2e/test_resize.py)."""

import pytest

from hami_common.events.allocation import StateRecord
from hami_common.pods import annotations
from hami_common.skus.expansion import Alternative, Expansion, encode
from hami_core.planning.resizing import ResizeRequest
from hami_scheduler.shell.resize import ResizeRefused
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import World, quiet

pytestmark = pytest.mark.anyio


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
        wish = ResizeRequest(namespace="default", pod="a", container="main", memory_mib=4000)
        with pytest.raises(ResizeRefused, match="SKU s-2g@1") as refused:
            await s.scheduler.resizer.resize(wish)
        assert refused.value.code == "sku"
    (record,) = world.live()
    assert record.containers[0].shares[0].memory_mib == 2000
