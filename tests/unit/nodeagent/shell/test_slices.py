# SPDX-License-Identifier: Apache-2.0
"""Writing ResourceSlices: when, how often, and after whose interference."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from hami_common.dra import names
from hami_common.errors import Conflict, Denied, NotFound, Unavailable
from hami_common.ports import WatchEvent
from hami_nodeagent.settings import DraSettings
from hami_nodeagent.shell.slices import PATH, SliceKeeper, pcie_root, withdraw
from tests.unit.nodeagent.core.builders import NODE, Given
from tests.unit.nodeagent.shell.support import know, make_site

pytestmark = pytest.mark.anyio

NAME = names.slice_name(NODE, 0)
Obj = dict[str, Any]


class FakeKube:
    """Stores slices, and reports every change to the watch."""

    def __init__(self) -> None:
        self.slices: dict[str, Obj] = {}
        self.writes: list[tuple[str, float]] = []
        self.problem: Exception | None = None
        self.is_lost = False
        """Writes are applied, and the answer is a conflict."""
        self._revision = 0
        self._send, self._receive = anyio.create_memory_object_stream[WatchEvent](100)

    def close(self) -> None:
        self._send.close()
        self._receive.close()

    async def get(self, path: str) -> bytes:
        if path.endswith(f"/nodes/{NODE}"):
            return msgspec.json.encode({"metadata": {"uid": "node-uid"}})
        name = path.rpartition("/")[2]
        if name not in self.slices:
            raise NotFound(what=path)
        return msgspec.json.encode(self.slices[name])

    async def create(self, path: str, body: bytes) -> bytes:
        assert path == PATH
        return self._store("create", msgspec.json.decode(body))

    async def replace(self, path: str, body: bytes) -> bytes:
        found = msgspec.json.decode(body)
        known = self.slices[path.rpartition("/")[2]]
        if found["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            raise Conflict(what=path)
        return self._store("replace", found)

    async def delete(self, path: str, *, body: bytes = b"") -> None:
        del body
        if self.problem is not None:
            raise self.problem
        self.wipe(path.rpartition("/")[2])

    async def list_pages(self, path: str, **selectors: str) -> list[bytes]:
        assert path == PATH
        assert selectors["field_selector"] == f"spec.nodeName={NODE},spec.driver={names.DRIVER}"
        return [msgspec.json.encode({"items": list(self.slices.values())})]

    def _store(self, verb: str, found: Obj) -> bytes:
        self.writes.append((verb, anyio.current_time()))
        if self.problem is not None:
            raise self.problem
        self._revision += 1
        name = found["metadata"]["name"]
        found["metadata"] |= {"resourceVersion": str(self._revision), "uid": f"uid-{verb}"}
        self.slices[name] = found
        raw = msgspec.json.encode(found)
        self._send.send_nowait(WatchEvent(type="MODIFIED", raw=raw))
        if self.is_lost:
            self.is_lost = False
            raise Conflict(what=name)
        return raw

    def wipe(self, name: str) -> None:
        """Delete a slice as kubelet does."""
        raw = msgspec.json.encode(self.slices.pop(name))
        self._send.send_nowait(WatchEvent(type="DELETED", raw=raw))

    def sync(self) -> None:
        self._send.send_nowait(WatchEvent(type="SYNCED"))

    @asynccontextmanager
    async def list_watch(
        self, path: str, **selectors: str
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        assert path == PATH
        assert selectors["field_selector"] == f"spec.nodeName={NODE},spec.driver={names.DRIVER}"
        yield self._receive


class Bench:
    """A keeper with a stand-in of the API server."""

    def __init__(self, directory: Path, *, write_s: float = 0.01) -> None:
        self.site = make_site(directory, dra=DraSettings(enabled=True, write_s=write_s))
        self.kube = FakeKube()
        self.keeper = SliceKeeper(site=self.site, kube=self.kube)  # type: ignore[arg-type] # fake

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(self.keeper.run)
            yield
            group.cancel_scope.cancel()
        self.kube.close()

    def know_ledger(self) -> None:
        self.site.picture.ledger_known = True
        self.site.picture.note_change()

    async def until(self, count: int) -> None:
        """Wait for a number of writes."""
        with anyio.fail_after(5):
            while len(self.kube.writes) < count:
                await anyio.sleep(0.005)


async def test_nothing_is_published_before_list_and_ledger_are_known(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.running():
        bench.know_ledger()
        await anyio.sleep(0.05)
        assert bench.kube.writes == []
        bench.site.picture.ledger_known = False
        bench.kube.sync()
        await anyio.sleep(0.05)
        assert bench.kube.writes == []
        bench.know_ledger()
        await bench.until(1)
        (only,) = bench.kube.slices.values()
        assert len(only["spec"]["devices"]) == 4
        (owner,) = only["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("Node", "node-uid")
        await anyio.sleep(0.05)
        assert len(bench.kube.writes) == 1


async def test_changes_are_written_at_most_once_in_the_interval(tmp_path: Path) -> None:
    bench = Bench(tmp_path, write_s=0.2)
    async with bench.running():
        bench.kube.sync()
        bench.know_ledger()
        for number in range(40):
            know(bench.site, Given(f"pod-{number}"))
            await anyio.sleep(0.01)
        await bench.until(2)
        await anyio.sleep(0.3)
        times = [at for _, at in bench.kube.writes]
        assert all(b - a >= 0.19 for a, b in itertools.pairwise(times))
        assert len(times) <= 5
        (only,) = bench.kube.slices.values()
        assert only["spec"]["devices"][0]["capacity"]["memory"]["value"] == "600Mi"


async def test_slices_that_kubelet_deleted_come_back_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.running():
        bench.kube.sync()
        bench.know_ledger()
        await bench.until(1)
        bench.kube.wipe(NAME)
        await bench.until(2)
        assert [verb for verb, _ in bench.kube.writes] == ["create", "create"]
        assert NAME in bench.kube.slices


async def test_conflict_is_read_and_refusal_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hami_nodeagent.shell.slices._RETRY_S", 0.01)
    bench = Bench(tmp_path)
    bench.kube.problem = Denied(peer="API", detail="forbidden", status=403)
    async with bench.running():
        bench.kube.sync()
        bench.know_ledger()
        await bench.until(2)
        bench.kube.problem = None
        bench.kube.is_lost = True
        with anyio.fail_after(5):
            while NAME not in bench.kube.slices:
                await anyio.sleep(0.005)
        know(bench.site, Given("pod"))
        with anyio.fail_after(5):
            while bench.kube.slices[NAME]["spec"]["devices"][0]["capacity"]["memory"]["value"] != (
                "990Mi"
            ):
                await anyio.sleep(0.005)


async def test_slices_are_withdrawn_after_dra_was_switched_off(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.kube.slices[NAME] = {"metadata": {"name": NAME}}
    await withdraw(bench.site, bench.kube)  # type: ignore[arg-type] # fake
    assert NAME in bench.kube.slices  # claims were never served here: not ours to look at
    bench.site.checkpoint.begin_claims()
    await withdraw(bench.site, bench.kube)  # type: ignore[arg-type] # fake
    assert bench.kube.slices == {}
    assert not bench.site.checkpoint.has_claims
    bench.kube.close()


async def test_withdrawal_without_the_right_ends_and_without_an_answer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hami_nodeagent.shell.slices._RETRY_S", 0.01)
    bench = Bench(tmp_path)
    bench.site.checkpoint.begin_claims()
    bench.kube.slices[NAME] = {"metadata": {"name": NAME}}
    bench.kube.problem = Unavailable(peer="API", detail="the test says so")
    with anyio.move_on_after(0.1) as scope:
        await withdraw(bench.site, bench.kube)  # type: ignore[arg-type] # fake
    assert scope.cancelled_caught
    bench.kube.problem = Denied(peer="API", detail="forbidden", status=403)
    await withdraw(bench.site, bench.kube)  # type: ignore[arg-type] # fake
    assert NAME in bench.kube.slices
    bench.kube.close()


def test_pcie_root_is_that_of_the_kernel(tmp_path: Path) -> None:
    device = tmp_path / "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0"
    device.mkdir(parents=True)
    links = tmp_path / "bus/pci/devices"
    links.mkdir(parents=True)
    (links / "0000:3b:00.0").symlink_to(device)
    assert pcie_root(tmp_path, "0000:3b:00.0") == "pci0000:3a"
    assert pcie_root(tmp_path, "0000:3c:00.0") == ""
    assert pcie_root(tmp_path, "") == ""
