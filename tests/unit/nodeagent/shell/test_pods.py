# SPDX-License-Identifier: Apache-2.0
"""Pods of the node, as the watch and direct reads report them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from hami_common.errors import NotFound, Unavailable, WireInvalid
from hami_common.model.placement import Placement
from hami_common.pods import annotations
from hami_common.pods.signing import SignedPlacement, Signer
from hami_common.ports import WatchEvent
from hami_common.runtime.tasks import background
from hami_common.runtime.trustedkeys import TrustedKeys
from hami_nodeagent.core.podfacts import PodFacts
from hami_nodeagent.shell.pods import PodSource
from tests.unit.nodeagent.core.builders import GPU, NODE
from tests.unit.nodeagent.shell.support import FakeKubelet, make_site, until

pytestmark = pytest.mark.anyio

Obj = dict[str, Any]


def pod(name: str, uid: str, revision: int, **more: Any) -> Obj:
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": uid,
        "resourceVersion": str(revision),
        **more.pop("metadata", {}),
    }
    spec = {
        "nodeName": more.pop("node", NODE),
        "containers": [{"name": "main", "resources": {"limits": {GPU: "1"}}}],
    }
    return {"metadata": metadata, "spec": spec, "status": more.pop("status", {})}


class FakeKube:
    """One collection of pods, with a watch that the test feeds."""

    def __init__(self) -> None:
        self.pods: dict[str, Obj] = {}
        self.version = "v1.34.1"
        self.selectors: list[str] = []
        self.is_available = True
        self.list_revision = "100"
        self.send, self._receive = anyio.create_memory_object_stream[WatchEvent](100)

    async def get(self, path: str) -> bytes:
        if not self.is_available:
            raise Unavailable(peer="API", detail="the test says so")
        if path == f"/api/v1/nodes/{NODE}":
            return msgspec.json.encode({"status": {"nodeInfo": {"kubeletVersion": self.version}}})
        name = path.rpartition("/")[2]
        if name not in self.pods:
            raise NotFound(what=name)
        return msgspec.json.encode(self.pods[name])

    async def list_pages(self, path: str, *, field_selector: str = "", **_: Any) -> Sequence[bytes]:
        self.selectors.append(field_selector)
        metadata = {"resourceVersion": self.list_revision}
        return [
            msgspec.json.encode({"metadata": metadata, "items": [one]})
            for one in self.pods.values()
        ] or [msgspec.json.encode({"metadata": metadata, "items": []})]

    @asynccontextmanager
    async def list_watch(
        self, path: str, *, field_selector: str = "", **_: Any
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        self.selectors.append(field_selector)
        yield self._receive

    def tell(self, kind: str, one: Obj) -> None:
        self.send.send_nowait(WatchEvent(type=kind, raw=msgspec.json.encode(one)))


class Bench:
    def __init__(self, directory: Path) -> None:
        self.site = make_site(directory)
        self.kube = FakeKube()
        self.keys = TrustedKeys(directory / "keys")
        self.source = PodSource(
            site=self.site,
            kube=self.kube,  # type: ignore[arg-type]  # the three methods used
            keys=self.keys,
            resources={GPU},
            kubelet=FakeKubelet(),
        )

    def found(self, uid: str) -> PodFacts:
        facts = self.site.picture.pods.find(uid)
        assert facts is not None
        return facts


@asynccontextmanager
async def following(bench: Bench) -> AsyncIterator[None]:
    bench.kube.send.send_nowait(WatchEvent(type="SYNCED"))
    async with background() as group:
        await group.start(bench.source.follow)
        yield
    bench.kube.send.close()
    bench.kube._receive.close()  # noqa: SLF001


async def test_all_pods_of_this_node_and_no_others_are_followed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with following(bench):
        bench.kube.tell("ADDED", pod("web", "u1", 1))
        await until(lambda: bench.site.picture.pods.is_alive("u1"))
        bench.kube.tell("MODIFIED", pod("web", "u1", 2, status={"phase": "Running"}))
        await until(lambda: bench.found("u1").admitted)
        bench.kube.tell("DELETED", pod("web", "u1", 3, status={"phase": "Failed"}))
        await until(lambda: bench.found("u1").gone)
        assert bench.found("u1").finished
    assert bench.kube.selectors == [f"spec.nodeName={NODE}"]


async def test_undecodable_pod_does_not_stop_the_watch(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with following(bench):
        bench.kube.send.send_nowait(WatchEvent(type="ADDED", raw=b'{"metadata": 7}'))
        bench.kube.tell("ADDED", pod("web", "u1", 1))
        await until(lambda: bench.site.picture.pods.is_alive("u1"))


async def test_read_of_one_pod_overtakes_the_watch(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with following(bench):
        bench.kube.tell("ADDED", pod("db-0", "old", 1))
        await until(lambda: bench.site.picture.pods.is_alive("old"))
        bench.kube.pods["db-0"] = pod("db-0", "new", 9)
        await bench.source.confirm(bench.found("old"))
        assert bench.found("old").gone
        assert bench.site.picture.pods.is_alive("new")
        bench.kube.pods["db-0"] = pod("db-0", "third", 12, node="elsewhere")
        await bench.source.confirm(bench.found("new"))
        assert bench.found("new").gone
        assert bench.site.picture.pods.find("third") is None


async def test_missing_pod_is_ended(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with following(bench):
        bench.kube.tell("ADDED", pod("web", "u1", 1))
        await until(lambda: bench.site.picture.pods.is_alive("u1"))
        await bench.source.confirm(bench.found("u1"))
        assert bench.found("u1").gone
        bench.kube.is_available = False
        with pytest.raises(Unavailable):
            await bench.source.confirm(bench.found("u1"))


async def test_read_of_all_pods_is_the_whole_truth(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with following(bench):
        bench.kube.tell("ADDED", pod("gone", "u1", 1))
        bench.kube.tell("ADDED", pod("newer", "u2", 200))
        await until(lambda: len(bench.site.picture.pods) == 2)
        bench.kube.pods = {"a": pod("a", "u3", 5), "b": pod("b", "u4", 6)}
        await bench.source.confirm_all()
        alive = {one.uid for one in bench.site.picture.pods if not one.gone}
        assert alive == {"u2", "u3", "u4"}
        bench.source.forget(gone_before_s=bench.site.clock.monotonic_s() + 1)
        assert {one.uid for one in bench.site.picture.pods} == alive


async def test_changed_keys_verify_known_pods_again(tmp_path: Path) -> None:
    bench, signer = Bench(tmp_path), Signer.generate()
    text = signer.sign(
        SignedPlacement(
            pod_uid="u1",
            namespace="default",
            pod="web",
            allocation_id="a",
            ledger_seq=1,
            placement=Placement(node=NODE, containers=()),
        )
    )
    signed = pod("web", "u1", 5, metadata={"annotations": {annotations.ALLOCATION: text}})
    async with following(bench):
        bench.kube.tell("ADDED", signed)
        await until(lambda: bench.site.picture.pods.is_alive("u1"))
        assert "not trusted" in bench.found("u1").annotation_problem
        (tmp_path / "keys").mkdir()
        (tmp_path / "keys" / "a.pub").write_bytes(signer.public_pem())
        bench.keys.reload_if_changed()
        bench.source.judge_again()
        assert bench.found("u1").signed is not None
        # The order of updates is still that of the API server.
        bench.kube.tell("MODIFIED", pod("web", "u1", 4))
        bench.kube.tell("MODIFIED", pod("other", "u2", 6))
        await until(lambda: bench.site.picture.pods.is_alive("u2"))
        assert bench.found("u1").signed is not None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("v1.34.0", (1, 34)),
        ("v1.35.2-eks-1", (1, 35)),
        ("v1.34+", (1, 34)),
        ("v2.0.0", (2, 0)),
        ("v1.9.0+k3s1", (1, 9)),
        ("", (0, 0)),
        ("nonsense", (0, 0)),
    ],
)
async def test_kubelet_version_is_that_of_the_nodes_status(
    tmp_path: Path, text: str, version: tuple[int, int]
) -> None:
    bench = Bench(tmp_path)
    bench.kube.version = text
    assert await bench.source.kubelet_version() == version
    bench.kube.send.close()
    bench.kube._receive.close()  # noqa: SLF001


def unreadable(name: str, uid: str, revision: int, *, asks: bool = True) -> Obj:
    one = pod(name, uid, revision)
    return {**one, "spec": {**one["spec"], "containers": GPU if asks else "none"}}


async def test_unreadable_pod_is_noted_until_it_is_readable_or_deleted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    picture = bench.site.picture
    async with following(bench):
        bench.kube.tell("ADDED", unreadable("odd", "u1", 1))
        bench.kube.tell("ADDED", unreadable("harmless", "u2", 2, asks=False))
        bench.kube.tell("ADDED", pod("web", "u3", 3))
        await until(lambda: picture.pods.is_alive("u3"))
        assert set(picture.unreadable_pods) == {"u1"}
        assert picture.is_unreadable([("default", "odd")], GPU)
        assert not picture.is_unreadable([("default", "odd")], "example.com/other")
        assert not picture.is_unreadable([("default", "web")], GPU)
        entries = {one.key: one for one in bench.site.quarantine.entries()}
        assert (entries["u1"].kind, entries["u1"].name) == ("pod", "odd")
        bench.kube.tell("MODIFIED", pod("odd", "u1", 4))
        await until(lambda: picture.pods.is_alive("u1"))
        assert picture.unreadable_pods == {}
        assert bench.site.quarantine.get("pod", "u2") is not None
        bench.kube.tell("DELETED", unreadable("harmless", "u2", 5, asks=False))
        await until(lambda: bench.site.quarantine.entries() == [])


async def test_known_pod_that_becomes_unreadable_keeps_its_facts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with following(bench):
        bench.kube.tell("ADDED", pod("web", "u1", 1))
        await until(lambda: bench.site.picture.pods.is_alive("u1"))
        bench.kube.pods = {
            "web": unreadable("web", "u1", 2),
            "odd": unreadable("odd", "u2", 3),
            "db": pod("db", "u3", 4),
        }
        await bench.source.confirm_all()
        assert {one.uid for one in bench.site.picture.pods if not one.gone} == {"u1", "u3"}
        assert set(bench.site.picture.unreadable_pods) == {"u2"}
        with pytest.raises(WireInvalid):
            await bench.source.confirm(bench.found("u1"))
        bench.kube.tell("DELETED", unreadable("web", "u1", 5))
        await until(lambda: bench.found("u1").gone)


async def test_watch_that_begins_again_ends_pods_that_went_unseen(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with following(bench):
        bench.kube.tell("ADDED", pod("web", "u1", 1))
        await until(lambda: bench.site.picture.pods.is_alive("u1"))
    bench.kube = FakeKube()
    bench.source._kube = bench.kube  # type: ignore[assignment]  # noqa: SLF001 - as in Bench
    bench.kube.tell("ADDED", pod("db", "u2", 2))
    async with following(bench):
        await until(lambda: bench.found("u1").gone)
        assert bench.site.picture.pods.is_alive("u2")
