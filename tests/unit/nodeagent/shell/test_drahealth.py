# SPDX-License-Identifier: Apache-2.0
"""The stream of the devices' health that kubelet watches."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from hami_common.kubeletapi import drahealth as api
from hami_common.kubeletapi import drahealth_v1alpha1 as older
from hami_nodeagent.shell import drahealth
from tests.unit.nodeagent.core.builders import NODE
from tests.unit.nodeagent.shell.support import make_site

pytestmark = pytest.mark.anyio


async def following(stream: Any) -> Any:
    with anyio.fail_after(2):
        return await anext(stream)


async def test_list_is_complete_follows_faults_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path)
    health = drahealth.Health(site)
    stream = health.NodeWatchResources(api.NodeWatchResourcesRequest(), cast("Any", None))
    first = await following(stream)
    assert {one.device.pool_name for one in first.devices} == {f"{NODE}/hami"}
    assert [one.device.device_name for one in first.devices] == [f"nvidia-{n}" for n in range(4)]
    assert {one.health for one in first.devices} == {api.HEALTHY}
    site.picture.set_health("nvidia", faulty=frozenset({"nvidia-2"}), sound=frozenset())
    second = await following(stream)
    assert [one.device.device_name for one in second.devices if one.health == api.UNHEALTHY] == [
        "nvidia-2"
    ]
    assert len(second.devices) == 4
    site.picture.set_health("nvidia", faulty=frozenset(), sound=frozenset())
    assert {one.health for one in (await following(stream)).devices} == {api.HEALTHY}
    await cast("AsyncGenerator[Any]", stream).aclose()
    monkeypatch.setattr(drahealth, "REPEAT_S", 0.05)
    again = drahealth.HealthV1alpha1(health).NodeWatchResources(
        older.NodeWatchResourcesRequest(), cast("Any", None)
    )
    for _ in range(3):
        found = await following(again)
        assert isinstance(found, older.NodeWatchResourcesResponse)
        assert len(found.devices) == 4
    await cast("AsyncGenerator[Any]", again).aclose()


async def test_nothing_is_reported_before_devices_are_known(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    devices, site.picture.view.devices_by_uuid = site.picture.view.devices_by_uuid, {}
    stream = drahealth.Health(site).NodeWatchResources(
        api.NodeWatchResourcesRequest(), cast("Any", None)
    )

    async def know() -> None:
        await anyio.sleep(0.05)
        site.picture.view.devices_by_uuid = devices
        site.picture.note_change()

    async with anyio.create_task_group() as group:
        group.start_soon(know)
        assert len((await following(stream)).devices) == 4
    await cast("AsyncGenerator[Any]", stream).aclose()
