# SPDX-License-Identifier: Apache-2.0
"""The agent keeps totals in the status of its node when kubelet zeroes or removes them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from msgspec.structs import replace

from hami_common.compat import volcano
from hami_common.errors import Denied, HamiError, Unavailable
from hami_common.pods import annotations
from hami_common.ports import KubeApi, WatchEvent
from hami_common.runtime.kubeio import EventRecorder
from hami_common.runtime.tasks import background
from hami_common.vendors.catalog import VendorSettings
from hami_common.vendors.nvidia import Nvidia, NvidiaSettings
from hami_nodeagent.shell import amounts
from hami_nodeagent.shell.amounts import Advertiser
from hami_nodeagent.shell.picture import UnreadablePod
from hami_nodeagent.shell.site import Site
from tests.unit.nodeagent.core.builders import NODE, Given
from tests.unit.nodeagent.shell.support import know, make_site, until

pytestmark = pytest.mark.anyio

MEMORY = "nvidia.com/gpumem"
KEY = annotations.advertised_amounts("nvidia")


class Kube:
    """One node, with reads, status patches and a watch."""

    def __init__(self) -> None:
        self.node: dict[str, Any] = {
            "metadata": {"name": NODE, "resourceVersion": "1", "annotations": {"team": "x"}},
            "status": {
                "capacity": {"cpu": "8", "nvidia.com/gpu": "40"},
                "allocatable": {"cpu": "8", "nvidia.com/gpu": "40"},
            },
        }
        self.patches: list[dict[str, Any]] = []
        self.error: HamiError | None = None
        self._send, self._receive = anyio.create_memory_object_stream[WatchEvent](100)

    def amount(self, name: str = MEMORY) -> str | None:
        capacity, allocatable = (self.node["status"][part] for part in ("capacity", "allocatable"))
        assert capacity.get(name) == allocatable.get(name)
        return cast("str | None", capacity.get(name))

    def change(self, **amounts: str) -> None:
        """Change amounts as kubelet does."""
        for part in ("capacity", "allocatable"):
            self.node["status"][part].update(amounts)
        self._publish()

    def _publish(self) -> None:
        metadata = self.node["metadata"]
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
        raw = json.dumps(self.node).encode()
        self._send.send_nowait(WatchEvent(type="MODIFIED", raw=raw))

    async def get(self, path: str) -> bytes:
        assert path == f"/api/v1/nodes/{NODE}"
        return json.dumps(self.node).encode()

    async def patch(self, path: str, body: bytes, **_: str) -> bytes:
        assert path == f"/api/v1/nodes/{NODE}/status"
        if self.error is not None:
            raise self.error
        patch = json.loads(body)
        self.patches.append(patch)
        notes = patch.get("metadata", {}).get("annotations", {})
        targets = [(self.node["metadata"]["annotations"], notes)]
        targets += [
            (self.node["status"][part], patch.get("status", {}).get(part, {}))
            for part in ("capacity", "allocatable")
        ]
        for target, values in targets:
            target.update(values)
            for name in [name for name, value in target.items() if value is None]:
                del target[name]
        self._publish()
        return json.dumps(self.node).encode()

    @asynccontextmanager
    async def list_watch(self, path: str, *, field_selector: str = "") -> AsyncIterator[Any]:
        assert (path, field_selector) == ("/api/v1/nodes", f"metadata.name={NODE}")
        yield self._receive

    def close(self) -> None:
        self._send.close()
        self._receive.close()


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    async def record(self, regarding: Any, *, reason: str, message: str, kind: str) -> None:
        assert (regarding.kind, regarding.name, kind) == ("Node", NODE, "Warning")
        self.events.append((reason, message))


@pytest.fixture
def kube() -> Any:
    kube = Kube()
    yield kube
    kube.close()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amounts, "LOWER_AFTER_S", 0.1)
    monkeypatch.setattr(amounts, "RETRY_S", 0.01)


def advertiser(site: Site, kube: Kube, recorder: Recorder) -> Advertiser:
    return Advertiser(
        site=site,
        kube=cast("KubeApi", kube),
        vendors=[Nvidia()],
        events=lambda: cast("EventRecorder", recorder),
    )


@asynccontextmanager
async def advertising(tmp_path: Path, kube: Kube, recorder: Recorder) -> AsyncIterator[Site]:
    site = make_site(tmp_path, advertise_amounts=True)
    site.picture.pods_known = True
    async with background() as group:
        group.start_soon(advertiser(site, kube, recorder).run)
        yield site


def resize(site: Site, factor: int) -> None:
    known = site.picture.canonical_by_vendor["nvidia"]
    devices = tuple(replace(one, capacity_mib=1000 * factor) for one in known.devices)
    site.picture.set_canonical(replace(known, devices=devices))


async def test_totals_appear_once_and_are_named(
    tmp_path: Path, kube: Kube, recorder: Recorder
) -> None:
    async with advertising(tmp_path, kube, recorder) as site:
        await until(lambda: kube.amount() == "4000")
        site.picture.note_change()
        await anyio.sleep(0.05)
        assert len(kube.patches) == 1
        metric = site.metrics.advertised.labels(resource=MEMORY)
        assert metric._value.get() == 4000  # noqa: SLF001 - the client has no other read
    names = kube.node["metadata"]["annotations"][KEY].split(",")
    assert MEMORY in names
    assert "nvidia.com/gpu" not in names
    assert kube.amount("nvidia.com/gpu") == "40"


async def test_totals_that_kubelet_zeroed_or_removed_are_written_again(
    tmp_path: Path, kube: Kube, recorder: Recorder
) -> None:
    async with advertising(tmp_path, kube, recorder):
        await until(lambda: kube.amount() == "4000")
        kube.change(**{MEMORY: "0"})
        await until(lambda: kube.amount() == "4000")
        for part in ("capacity", "allocatable"):
            del kube.node["status"][part][MEMORY]
        kube.change()
        await until(lambda: kube.amount() == "4000")


async def test_total_follows_devices_upward_at_once_and_downward_later(
    tmp_path: Path, kube: Kube, recorder: Recorder
) -> None:
    async with advertising(tmp_path, kube, recorder) as site:
        await until(lambda: kube.amount() == "4000")
        resize(site, 2)
        await until(lambda: kube.amount() == "8000")
        begin_s = anyio.current_time()
        resize(site, 1)
        await until(lambda: kube.amount() == "4000")
        assert anyio.current_time() - begin_s >= 0.1
        site.picture.unreadable_pods["u"] = UnreadablePod(
            namespace="default", name="odd", resources=frozenset()
        )
        resize(site, 2)
        await until(lambda: kube.amount() == "8000")
        resize(site, 1)
        await anyio.sleep(0.3)
        assert kube.amount() == "8000", "the pod may request anything"


async def test_pod_of_another_scheduler_is_added(
    tmp_path: Path, kube: Kube, recorder: Recorder
) -> None:
    async with advertising(tmp_path, kube, recorder) as site:
        pod = Given("web", amounts_by_resource={MEMORY: 500})
        know(site, pod)
        await until(lambda: kube.amount() == "4490")  # 10 MiB of it are booked


async def test_nothing_is_written_before_pods_and_devices_are_known(
    tmp_path: Path, kube: Kube, recorder: Recorder
) -> None:
    site = make_site(tmp_path, advertise_amounts=True)
    known = dict(site.picture.canonical_by_vendor)
    site.picture.canonical_by_vendor.clear()
    async with background() as group:
        group.start_soon(advertiser(site, kube, recorder).run)
        await anyio.sleep(0.05)
        site.picture.pods_known = True
        site.picture.note_change()
        await anyio.sleep(0.05)
        assert kube.patches == []
        site.picture.canonical_by_vendor.update(known)
        site.picture.note_change()
        await until(lambda: kube.amount() == "4000")


async def test_failure_is_reported_on_the_node_and_retried(
    tmp_path: Path, kube: Kube, recorder: Recorder
) -> None:
    kube.error = Denied(peer="API", detail="forbidden", status=403)
    async with advertising(tmp_path, kube, recorder) as site:
        await until(lambda: bool(recorder.events))
        reason, message = recorder.events[0]
        assert reason == "AmountsNotAdvertised"
        assert "components/advertise-amounts" in message
        kube.error = None
        await until(lambda: kube.amount() == "4000")
        results = {
            sample.labels["result"]: sample.value
            for metric in site.metrics.advertisements.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }
    assert results["written"] == 1
    assert results["failed"] >= 1


async def test_setting_that_is_off_withdraws_what_an_earlier_run_wrote(
    tmp_path: Path, kube: Kube, recorder: Recorder
) -> None:
    async with advertising(tmp_path, kube, recorder):
        await until(lambda: kube.amount() == "4000")
    kube.change(**{"vendor.example/other": "5"})
    kube.error = Unavailable(peer="API", detail="away")
    site = make_site(tmp_path)
    async with background() as group:
        group.start_soon(advertiser(site, kube, recorder).run)
        await until(lambda: bool(recorder.events))
        kube.error = None
        await until(lambda: kube.amount() is None)
    assert kube.node["metadata"]["annotations"] == {"team": "x"}
    assert kube.node["status"]["capacity"] == {
        "cpu": "8",
        "nvidia.com/gpu": "40",
        "vendor.example/other": "5",
    }


async def test_setting_that_is_off_writes_nothing_on_a_clean_node(
    tmp_path: Path, kube: Kube, recorder: Recorder
) -> None:
    kube.change(**{MEMORY: "7"})
    site = make_site(tmp_path)
    one = advertiser(site, kube, recorder)
    with anyio.fail_after(2):
        await one.run()
    assert kube.patches == []
    assert kube.amount() == "7", "an amount of another writer stays"
    assert one.resources == frozenset()


VOLCANO = VendorSettings(nvidia=NvidiaSettings(dialects=("volcano",)))


async def test_devices_are_described_to_volcano_until_the_dialect_is_off(
    tmp_path: Path, kube: Kube, recorder: Recorder
) -> None:
    notes = kube.node["metadata"]["annotations"]
    async with background() as group:
        site = make_site(tmp_path, advertise_amounts=True, vendors=VOLCANO, volcano_refresh_s=0.2)
        site.picture.pods_known = True
        group.start_soon(advertiser(site, kube, recorder).run)
        await until(lambda: volcano.is_ours(notes))
        assert notes[volcano.REGISTER].count(",true,hami-core:") == 4
        notes[volcano.HANDSHAKE] = "Deleted_2026.11.27 12:00:00"
        kube.change()
        await until(lambda: volcano.is_ours(notes))
        first = notes[volcano.HANDSHAKE]
        await until(lambda: notes[volcano.HANDSHAKE] != first)
    async with advertising(tmp_path, kube, recorder):
        await until(lambda: volcano.HANDSHAKE not in notes)
    assert notes.keys() == {"team", KEY}


async def test_annotations_of_volcanos_own_plugin_are_left(
    tmp_path: Path, kube: Kube, recorder: Recorder
) -> None:
    theirs = {volcano.REGISTER: "GPU-1,10,100,NVIDIA-T4,true,hami-core:"}
    theirs[volcano.HANDSHAKE] = "Reported 2026-11-27"
    kube.node["metadata"]["annotations"].update(theirs)
    async with advertising(tmp_path, kube, recorder):
        await until(lambda: kube.amount() == "4000")
    assert theirs.items() <= kube.node["metadata"]["annotations"].items()


async def test_descriptions_stay_while_the_devices_are_unknown(
    tmp_path: Path, kube: Kube, recorder: Recorder
) -> None:
    kube.node["metadata"]["annotations"][volcano.HANDSHAKE] = volcano.handshake(0)
    async with background() as group:
        site = make_site(tmp_path, advertise_amounts=True, vendors=VOLCANO)
        del site.picture.canonical_by_vendor["nvidia"]
        site.picture.pods_known = True
        group.start_soon(advertiser(site, kube, recorder).run)
        await anyio.sleep(0.1)
        assert kube.patches == []


async def test_amount_that_kubelet_allocates_to_a_pod_of_volcano_is_not_advertised(
    tmp_path: Path, kube: Kube, recorder: Recorder
) -> None:
    async with advertising(tmp_path, kube, recorder) as site:
        pod = Given("v", amounts_by_resource={MEMORY: 10})
        await until(lambda: kube.amount() == "4000")
        know(site, pod)
        entries = site.picture.entries_by_uid
        (uid,) = entries
        entries[uid] = replace(entries[uid], record=replace(entries[uid].record, origin="volcano"))
        site.picture.note_change()
        await until(lambda: kube.amount() is None)
        assert kube.amount("nvidia.com/gpucores") is not None
        del entries[uid]
        site.picture.pods.end(uid, now_s=0)
        site.picture.note_change()
        await until(lambda: kube.amount() == "4000")
