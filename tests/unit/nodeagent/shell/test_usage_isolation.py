# SPDX-License-Identifier: Apache-2.0
"""A region, process, series or driver that raises is the only one missing from a reading."""

from pathlib import Path
from typing import Any

import pytest

from hami_nodeagent.core.cgroups import owner_of
from hami_nodeagent.core.usage import rows_of
from hami_nodeagent.shell import owners, regions, usage, usagemetrics
from hami_nodeagent.shell.breaches import BreachTeller
from hami_nodeagent.shell.usage import UsageWatch
from tests.support.regions import Built, Process, Used
from tests.unit.nodeagent.core.test_cgroups import UID
from tests.unit.nodeagent.shell.test_usage import PID, Desk, of_device, series

pytestmark = pytest.mark.anyio

OTHER_UID = UID.replace("0f", "1f")


def two_pods(directory: Path) -> Desk:
    desk = Desk(directory)
    for name, uid, pid, used in (("train", UID, PID, 3), ("other", OTHER_UID, PID + 1, 5)):
        desk.run_pod(name, uid, pid)
        desk.write_region(Built(uuids=("nvidia-0",), processes=(Process(2, (Used(used),)),)), uid)
    return desk


def used_by_other(desk: Desk) -> float | None:
    name = "hami_vgpu_memory_used_bytes"
    labels = {"vdevice_index": "0", "device_uuid": "nvidia-0", "zone": "vGPU"}
    return desk.metrics().get(series(name, pod="other", **labels))


async def test_region_that_fails_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = regions.read_region

    def read(path: Path, *more: Any) -> Any:
        if UID in str(path):
            raise RuntimeError("injected")
        return whole(path, *more)

    monkeypatch.setattr(usage, "read_region", read)
    desk = two_pods(tmp_path)
    await desk.look(1)
    assert used_by_other(desk) == 5
    (entry,) = desk.site.quarantine.entries()
    assert (entry.kind, entry.key, entry.name) == ("region", f"{UID}/main", "train")
    monkeypatch.undo()
    await desk.look(1)
    assert desk.site.quarantine.entries() == []


async def test_container_that_fails_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(holders: Any, *more: Any) -> Any:
        if any(one.pod == "train" for one in holders):
            raise RuntimeError("injected")
        return rows_of(holders, *more)

    monkeypatch.setattr(usage, "rows_of", rows)
    desk = two_pods(tmp_path)
    await desk.look(1)
    assert used_by_other(desk) == 5
    assert [entry.kind for entry in desk.site.quarantine.entries()] == ["share"]


async def test_series_that_fails_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = usagemetrics._series  # noqa: SLF001 - where each series is made

    def one_series(group: Any, figure: Any, thing: Any) -> Any:
        if "train" in repr(thing):
            raise RuntimeError("injected")
        return whole(group, figure, thing)

    monkeypatch.setattr(usagemetrics, "_series", one_series)
    desk = two_pods(tmp_path)
    await desk.look(1)
    assert used_by_other(desk) == 5
    assert of_device("hami_vgpu_memory_used_bytes") not in desk.metrics()


async def test_process_that_fails_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(text: str) -> Any:
        if UID in text:
            raise RuntimeError("injected")
        return owner_of(text)

    monkeypatch.setattr(owners, "owner_of", find)
    desk = two_pods(tmp_path)
    desk.driver.shows(99, PID, PID + 1)
    await desk.look()
    breaching = [one for one in desk.metrics() if one.startswith("hami_vgpu_breach{")]
    assert any('pod="other"' in one for one in breaching)
    assert not any('pod="train"' in one for one in breaching)


async def test_driver_that_fails_stops_no_other_vendor(tmp_path: Path) -> None:
    desk = two_pods(tmp_path)

    class Broken:
        vendor = "amd"

        async def usage(self) -> None:
            raise RuntimeError("injected")

    nothing: Any = None
    drivers: Any = [Broken(), desk.driver]
    site = desk.site
    site.metrics.registry.unregister(desk.watch.metrics)
    watch = UsageWatch(
        site=site,
        drivers=drivers,
        teller=BreachTeller(
            site=site, events=lambda: nothing, publisher=lambda: nothing, kube=lambda: nothing
        ),
    )
    desk.driver.shows(99, PID)
    await watch.look()
    host = 'hami_host_gpu_memory_used_bytes{device_index="0"'
    assert any(name.startswith(host) for name in desk.metrics())
    assert [(entry.kind, entry.key) for entry in site.quarantine.entries()] == [("usage", "amd")]
