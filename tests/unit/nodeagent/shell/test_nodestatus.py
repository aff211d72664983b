# SPDX-License-Identifier: Apache-2.0
"""A vendor is offered to schedulers once the status of the node shows its devices."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from hami_common.errors import NotFound, Unavailable, WireInvalid
from hami_common.runtime.tasks import background
from hami_nodeagent.shell import nodestatus
from hami_nodeagent.shell.nodestatus import StatusWatch, read_node_status
from hami_nodeagent.shell.site import Site
from tests.unit.nodeagent.core.builders import NODE
from tests.unit.nodeagent.shell.support import make_site, until

pytestmark = pytest.mark.anyio

RESOURCES = {
    "nvidia.com/gpu": "nvidia",
    "metax-tech.com/gpu": "metax",
    "metax-tech.com/sgpu": "metax",
}


class Kube:
    """Answers reads of the one node."""

    def __init__(self) -> None:
        self.allocatable: dict[str, str] = {}
        self.error: Exception | None = None
        self.reads = 0

    async def get(self, path: str) -> bytes:
        assert path == f"/api/v1/nodes/{NODE}"
        self.reads += 1
        if self.error is not None:
            raise self.error
        return json.dumps({"status": {"allocatable": self.allocatable}}).encode()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(nodestatus, "LOOK_S", 0.01)
    return make_site(tmp_path)


@asynccontextmanager
async def watching(site: Site, kube: Kube) -> AsyncIterator[None]:
    watch = StatusWatch(site=site, kube=kube, vendor_by_resource=RESOURCES)
    async with background() as group:
        group.start_soon(watch.run)
        yield


async def test_registered_vendor_is_offered_once_the_status_has_its_devices(site: Site) -> None:
    kube = Kube()
    kube.allocatable = {"cpu": "4", "nvidia.com/gpu": "0"}
    async with watching(site, kube):
        site.picture.note_served("nvidia", served=True)
        await until(lambda: kube.reads >= 3)
        assert site.picture.offered() == frozenset()
        kube.allocatable["nvidia.com/gpu"] = "1k"
        await until(lambda: site.picture.offered() == {"nvidia"})
        reads = kube.reads
        await anyio.sleep(0.05)
        assert kube.reads == reads, "nothing is looked for any more"


async def test_each_absence_of_a_plugin_needs_the_status_again(site: Site) -> None:
    kube = Kube()
    kube.allocatable = {"metax-tech.com/sgpu": "4"}
    async with watching(site, kube):
        site.picture.note_served("metax", served=True, resource="metax-tech.com/sgpu")
        await until(lambda: site.picture.offered() == {"metax"})
        kube.allocatable = {}
        site.picture.note_served("metax", served=False, resource="metax-tech.com/sgpu")
        site.picture.note_served("metax", served=True, resource="metax-tech.com/sgpu")
        assert site.picture.offered() == frozenset()
        await until(lambda: kube.reads >= 4)
        assert site.picture.offered() == frozenset()


@pytest.mark.parametrize("error", [Unavailable(peer="API", detail="away"), NotFound(what=NODE)])
async def test_unreadable_status_keeps_devices_back_for_a_limited_time(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(nodestatus, "WAIT_MOST_S", 0.2)
    kube = Kube()
    kube.error = error
    async with watching(site, kube):
        site.picture.note_served("nvidia", served=True)
        await until(lambda: kube.reads >= 3)
        assert site.picture.offered() == frozenset()
        await until(lambda: site.picture.offered() == {"nvidia"})


async def test_vendor_that_is_gone_again_is_not_offered(site: Site) -> None:
    site.picture.note_in_status("nvidia")
    assert site.picture.in_status == frozenset()


async def test_unreadable_node_is_an_error() -> None:
    class Garbage:
        async def get(self, path: str) -> bytes:
            return b'{"status": 3}'

    with pytest.raises(WireInvalid, match="node"):
        await read_node_status(Garbage(), NODE)
