# SPDX-License-Identifier: Apache-2.0
"""A node belongs to one side at a time, and each step of its migration can be interrupted."""

import json
from typing import Any

import pytest

from hami_common.compat import adoption, volcano
from hami_common.compat.origins import VOLCANO
from hami_common.pods import annotations
from hamictl.commands.migrate import parse_sides
from hamictl.errors import InputRefused, Refused, Unreachable
from hamictl.nodemigration import MOVING, Mover, NodeState, Sides, survey
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.fakekube import FakeKube

pytestmark = pytest.mark.anyio

Obj = dict[str, Any]
NODE = "/api/v1/nodes/n1"
KEY = "hami.io/vgpu-devices-allocated"
REGISTER = json.dumps(
    [{"id": "GPU-n1-0", "index": 4, "count": 10, "devmem": 16000, "devcore": 100, "health": True}]
)


SELECTING = {("gpu", "on"), ("volcano.sh/vgpu-plugin", "on")}
"""Labels of nodes that the DaemonSets of the plugins select."""


class Cluster(FakeKube):
    """One node of HAMi's with its plugin; plugins and agents follow the node's labels."""

    def __init__(self, *, follows: bool = True) -> None:
        super().__init__()
        self.follows = follows
        notes = {
            "hami.io/node-nvidia-register": REGISTER,
            "hami.io/node-handshake": "Requesting_2026-08-01 10:00:00",
            "hami.io/mutex.lock": "2026-08-01T10:00:00Z,default,p",
            "example.com/kept": "yes",
        }
        node = {"metadata": {"name": "n1", "labels": {"gpu": "on"}, "annotations": notes}}
        self.put(NODE, {**node, "spec": {}})
        self.add("plugin", labels={"app.kubernetes.io/component": "hami-device-plugin"}, gpu=None)

    def add(
        self,
        name: str,
        *,
        labels: dict[str, str] | None = None,
        annotated: dict[str, str] | None = None,
        gpu: int | None = 1,
        phase: str = "Running",
    ) -> Obj:
        pod = builders.pod(name, gpu=gpu, managed=False, annotated=annotated)
        pod["metadata"]["labels"] = labels or {}
        pod["spec"]["nodeName"], pod["status"]["phase"] = "n1", phase
        return self.put(f"/api/v1/namespaces/default/pods/{name}", pod)

    def hami(self, name: str, text: str = "GPU-n1-0,NVIDIA,1000,10:;", **more: Any) -> Obj:
        return self.add(name, annotated={KEY: text, "hami.io/vgpu-node": "n1"}, **more)

    def ours(self, name: str, origin: str = "", **mirror: str) -> Obj:
        note = json.dumps({"payload": {"origin": origin}})
        return self.add(name, annotated={annotations.ALLOCATION: note, **mirror})

    async def patch(
        self, path: str, body: bytes, *, content_type: str = "application/merge-patch+json"
    ) -> bytes:
        answer = await super().patch(path, body, content_type=content_type)
        plugin = "/api/v1/namespaces/default/pods/plugin"
        if self.follows and not SELECTING & self.labels.items() and plugin in self.objects:
            self.remove(plugin)
        return answer

    @property
    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.objects[NODE]["metadata"]["labels"]
        return found

    @property
    def notes(self) -> dict[str, str]:
        found: dict[str, str] = self.objects[NODE]["metadata"]["annotations"]
        return found

    @property
    def is_open(self) -> bool:
        return not self.objects[NODE]["spec"].get("unschedulable")

    def mark(self) -> adoption.TakenOver:
        return adoption.decode_mark(self.notes[annotations.TAKEN_OVER])

    async def migrate(
        self, *, accept: bool = False, vendor: str = "", wait_s: float = 20.0
    ) -> NodeState:
        return await self.mover(wait_s).migrate(vendor=vendor, accept=accept)

    async def roll_back(self, *, accept: bool = False) -> NodeState:
        return await self.mover(20.0).roll_back(accept=accept)

    def mover(self, wait_s: float) -> Mover:
        return Mover(self, "n1", Sides(wait_s=wait_s), report=lambda _: None)


async def test_node_with_another_label_is_hamis_while_it_has_a_registration() -> None:
    cluster = Cluster()
    del cluster.labels["gpu"]
    assert [one.side for one in (await survey(cluster, Sides())).items] == ["hami"]
    cluster.labels["hami.io/nvidia"] = "true"
    assert [one.side for one in (await survey(cluster, Sides())).items] == ["ours"]
    cluster.labels.clear()
    del cluster.notes["hami.io/node-nvidia-register"]
    assert (await survey(cluster, Sides())).items == ()


async def test_node_that_comes_over_lists_its_pods_and_registers_with_hami_no_more() -> None:
    cluster = Cluster()
    cluster.hami("h1")
    cluster.add("bare")
    cluster.hami("over", phase="Succeeded")
    cluster.add("web", gpu=None)
    cluster.ours("new")
    before = (await survey(cluster, Sides())).items
    assert [(one.node, one.side, one.former_pods) for one in before] == [("n1", "hami", 2)]
    # Nothing says what the bare one holds.
    state = await cluster.migrate(accept=True)
    assert (state.side, state.taken_over, state.our_pods) == ("ours", 2, 1)
    assert cluster.labels == {"hami.io/nvidia": "true"}
    assert sorted(cluster.notes) == ["example.com/kept", annotations.TAKEN_OVER]
    assert cluster.mark() == adoption.TakenOver(
        pods=("uid-bare", "uid-h1"), devices={"nvidia": {"GPU-n1-0": 4}}
    )
    assert cluster.is_open


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("GPU-else,NVIDIA,1000,10:;", "no device GPU-else"),
        ("GPU-n1-0,NVIDIA,1,10:;", "asks for 1000 MiB"),
        ("GPU-n1-0,NVIDIA,1000,10", "cut off"),
    ],
)
async def test_doubts_keep_a_node_where_it_is_and_name_the_pod(text: str, problem: str) -> None:
    cluster = Cluster()
    cluster.hami("h1", text)
    before = json.dumps(cluster.objects)
    with pytest.raises(Refused, match=f"default/h1: .*{problem}"):
        await cluster.migrate()
    assert json.dumps(cluster.objects) == before
    assert (await cluster.migrate(accept=True)).side == "ours"


async def test_partitions_that_hami_made_keep_a_node_where_it_is() -> None:
    cluster = Cluster()
    pod = cluster.hami("h1")
    pod["metadata"]["annotations"]["hami.io/vgpu-mig-allocations"] = '[{"profile": "1g.5gb"}]'
    cluster.put("/api/v1/namespaces/default/pods/h1", pod)
    with pytest.raises(Refused, match="MIG instances"):
        await cluster.migrate()


async def test_move_that_was_cut_off_goes_on_and_gives_nothing_meanwhile() -> None:
    cluster = Cluster(follows=False)
    cluster.hami("h1")
    for _ in range(2):
        with pytest.raises(Unreachable, match="HAMi's device plugin"):
            await cluster.migrate(wait_s=0.1)
        # Neither side's label: neither plugin comes up, and no pod is placed.
        assert cluster.labels == {}
        assert not cluster.is_open
        assert [one.side for one in (await survey(cluster, Sides())).items] == ["moving"]
    cluster.follows = True
    assert (await cluster.migrate()).side == "ours"
    assert cluster.is_open


async def test_node_waits_for_pods_that_hami_is_giving_devices_to() -> None:
    cluster = Cluster()
    pod = cluster.hami("h1", phase="Pending")
    pod["metadata"]["annotations"]["hami.io/bind-phase"] = "allocating"
    cluster.put("/api/v1/namespaces/default/pods/h1", pod)
    with pytest.raises(Unreachable, match="allocating devices"):
        await cluster.migrate(wait_s=1.0)
    assert annotations.TAKEN_OVER not in cluster.notes


async def test_cordon_of_an_operator_outlives_the_move() -> None:
    cluster = Cluster()
    cluster.hami("h1")
    cluster.change(NODE, spec={"unschedulable": True})
    await cluster.migrate()
    assert not cluster.is_open
    await cluster.roll_back()
    assert not cluster.is_open
    assert MOVING not in cluster.notes


async def test_node_goes_back_only_when_hami_would_count_our_pods() -> None:
    cluster = Cluster()
    cluster.hami("h1")
    await cluster.migrate()
    cluster.ours("adopted", origin="hami")
    cluster.ours("new")
    with pytest.raises(Refused, match="default/new; set mirror_pods"):
        await cluster.roll_back()
    assert cluster.labels == {"hami.io/nvidia": "true"}
    cluster.ours("new", **{KEY: "GPU-n1-0,NVIDIA,1,0:;", "hami.io/vgpu-node": "n1"})
    state = await cluster.roll_back()
    assert (state.side, state.our_pods, state.former_pods) == ("hami", 1, 2)
    assert cluster.labels == {"gpu": "on"}
    assert list(cluster.notes) == ["example.com/kept"]
    with pytest.raises(Refused, match="already belongs to HAMi"):
        await cluster.roll_back()


async def test_node_whose_partitions_we_made_does_not_go_back() -> None:
    cluster = Cluster()
    cluster.hami("h1")
    await cluster.migrate()
    shares = [{"vendor": "nvidia", "uuid": "GPU-n1-0", "memory_mib": 1, "profile": "1g.5gb"}]
    containers = [{"name": "main", "kind": "app", "shares": shares}]
    note = json.dumps({"payload": {"placement": {"node": "n1", "containers": containers}}})
    mirror = {KEY: "GPU-n1-0,NVIDIA,1,0:;", "hami.io/vgpu-node": "n1"}
    cluster.add("cut", annotated={annotations.ALLOCATION: note, **mirror})
    with pytest.raises(Refused, match="default/cut; wait until they end"):
        await cluster.roll_back()
    assert (await cluster.roll_back(accept=True)).side == "hami"


async def test_second_migration_of_a_node_lists_its_pods_again() -> None:
    cluster = Cluster()
    cluster.hami("h1")
    await cluster.migrate()
    await cluster.roll_back()
    cluster.remove("/api/v1/namespaces/default/pods/h1")
    cluster.hami("h2", "GPU-n1-0,NVIDIA,1000,10:;")
    cluster.change(NODE, metadata={"annotations": {"hami.io/node-nvidia-register": REGISTER}})
    await cluster.migrate()
    assert cluster.mark().pods == ("uid-h2",)
    with pytest.raises(Refused, match="already migrated"):
        await cluster.migrate()


async def test_unlisted_pod_of_hami_is_reported_and_listed_if_accepted() -> None:
    cluster = Cluster()
    cluster.hami("h1")
    await cluster.migrate()
    cluster.hami("late")
    (state,) = (await survey(cluster, Sides())).items
    (problem,) = state.problems
    assert problem.startswith("default/late: was placed by HAMi and is not taken over")
    with pytest.raises(Refused, match="does not list"):
        await cluster.migrate()
    assert (await cluster.migrate(accept=True)).problems == ()
    assert cluster.mark() == adoption.TakenOver(
        pods=("uid-h1", "uid-late"), devices={"nvidia": {"GPU-n1-0": 4}}
    )


async def test_node_without_a_sign_of_its_vendor_wants_it_named() -> None:
    cluster = Cluster()
    cluster.change(NODE, metadata={"annotations": {"hami.io/node-nvidia-register": None}})
    with pytest.raises(Refused, match="give --vendor"):
        await cluster.migrate()
    await cluster.migrate(vendor="cambricon")
    assert cluster.labels == {"hami.io/cambricon": "true"}


async def test_node_gets_one_agent() -> None:
    cluster = Cluster()
    register = "DCU-1,4,65536,100,DCU,0,true,0,hami-core:"
    cluster.change(NODE, metadata={"annotations": {"hami.io/node-dcu-register": register}})
    with pytest.raises(Refused, match="devices of hygon, nvidia, and a node has one agent"):
        await cluster.migrate()
    await cluster.migrate(vendor="nvidia")
    assert cluster.labels == {"hami.io/nvidia": "true"}
    assert cluster.mark().devices == {"hygon": {"DCU-1": 0}, "nvidia": {"GPU-n1-0": 4}}


async def test_labels_are_key_and_value() -> None:
    assert parse_sides("gpu=on", "a=b", 1.0) == Sides(
        label=("gpu", "on"), plugin=("a", "b"), wait_s=1
    )
    for text in ("gpu", "=on", "gpu="):
        with pytest.raises(InputRefused, match="KEY=VALUE"):
            parse_sides(text, "a=b", 1.0)


FROM_VOLCANO = parse_sides("", "", 20.0, origin="volcano")
OLD = {
    "volcano.sh/vgpu-number": "1",
    "volcano.sh/vgpu-memory": "1000",
    "volcano.sh/vgpu-cores": "10",
}


class VolcanoCluster(Cluster):
    """One node of Volcano's, with its device plugin."""

    def __init__(self) -> None:
        super().__init__()
        notes = {
            volcano.REGISTER: "GPU-n1-0,10,16000,NVIDIA-A,true,hami-core:",
            volcano.HANDSHAKE: "Reported 2026-08-01 10:00:00",
            volcano.NODE_LOCK: "2026-08-01T10:00:00Z",
            "example.com/kept": "yes",
        }
        labels = {"volcano.sh/vgpu-plugin": "on"}
        self.put(NODE, {"metadata": {"name": "n1", "labels": labels, "annotations": notes}})
        self.objects[NODE]["spec"] = {}
        self.add("plugin", labels={"name": "volcano-device-plugin"}, gpu=None)

    def theirs(self, name: str, text: str = "GPU-n1-0,NVIDIA,1000,10:", **more: str) -> Obj:
        pod = self.add(name, gpu=None, annotated={volcano.POD_IDS: text, **more})
        pod["spec"]["containers"][0]["resources"] = {"limits": OLD, "requests": OLD}
        return self.put(f"/api/v1/namespaces/default/pods/{name}", pod)

    def mover(self, wait_s: float) -> Mover:
        return Mover(self, "n1", FROM_VOLCANO, report=lambda _: None)


async def test_node_of_volcano_comes_over_with_its_pods_and_goes_back() -> None:
    cluster = VolcanoCluster()
    cluster.theirs("v1")
    (before,) = (await survey(cluster, FROM_VOLCANO)).items
    assert (before.side, before.vendors, before.former_pods) == ("volcano", ("nvidia",), 1)
    assert before.problems == ()
    state = await cluster.migrate()
    assert (state.side, state.taken_over, state.our_pods) == ("ours", 1, 0)
    assert cluster.labels == {"hami.io/nvidia": "true"}
    assert sorted(cluster.notes) == ["example.com/kept", annotations.TAKEN_OVER]
    assert cluster.mark() == adoption.TakenOver(
        origin="volcano", pods=("uid-v1",), devices={"nvidia": {"GPU-n1-0": 0}}
    )
    cluster.change(NODE, metadata={"annotations": {volcano.HANDSHAKE: volcano.handshake(0)}})
    cluster.change(NODE, metadata={"annotations": {volcano.REGISTER: "GPU-n1-0,10,1,N,true,mig:"}})
    cluster.theirs("adopted", **{annotations.ALLOCATION: '{"payload": {"origin": "volcano"}}'})
    cluster.ours("new")
    with pytest.raises(Refused, match=r"not be counted by Volcano: default/new; add volcano to"):
        await cluster.roll_back()
    cluster.ours("new", **{volcano.POD_IDS: "GPU-n1-0,NVIDIA,1,0:", volcano.POD_NODE: "n1"})
    state = await cluster.roll_back()
    assert (state.side, state.our_pods, state.former_pods) == ("volcano", 1, 2)
    assert cluster.labels == {"volcano.sh/vgpu-plugin": "on"}
    assert list(cluster.notes) == ["example.com/kept"]


async def test_amounts_of_the_agent_leave_the_status_with_a_rollback() -> None:
    cluster = VolcanoCluster()
    await cluster.migrate()
    amounts = {"nvidia.com/gpumem": "1", "volcano.sh/vgpu-memory": "1", "cpu": "8"}
    key = annotations.advertised_amounts("nvidia")
    cluster.change(
        NODE,
        metadata={"annotations": {key: "nvidia.com/gpumem,volcano.sh/vgpu-memory"}},
        status={"capacity": amounts, "allocatable": amounts},
    )
    await cluster.roll_back()
    assert key not in cluster.notes
    status = cluster.objects[NODE]["status"]
    assert status == {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}}


async def test_plugin_on_a_node_without_its_label_is_named() -> None:
    """The manifest of Volcano's device plugin selects all nodes."""
    cluster = VolcanoCluster()
    cluster.labels.clear()
    (state,) = (await survey(cluster, FROM_VOLCANO)).items
    (problem,) = state.problems
    assert state.side == "volcano"
    assert problem.startswith("default/plugin: is Volcano's device plugin, but the node does not")
    assert "volcano.sh/vgpu-plugin=on" in problem
    with pytest.raises(Refused, match="--node-label"):
        await cluster.migrate()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("GPU-n1-0,NVIDIA,1000,10", "cut off"),
        ("GPU-n1-0[g-0],NVIDIA,1000,10:", "MIG instances of Volcano"),
    ],
)
async def test_doubts_keep_a_node_with_volcano(text: str, problem: str) -> None:
    cluster = VolcanoCluster()
    cluster.theirs("v1", text)
    with pytest.raises(Refused, match=f"default/v1: .*{problem}"):
        await cluster.migrate()
    assert "volcano.sh/vgpu-plugin" in cluster.labels


async def test_node_waits_for_pods_that_volcanos_plugin_is_giving_devices_to() -> None:
    cluster = VolcanoCluster()
    cluster.theirs("v1", **{volcano.BIND_PHASE: "allocating"})
    sides = parse_sides("", "", 0.2, origin="volcano")
    with pytest.raises(Unreachable, match="pods to which Volcano is allocating devices"):
        await Mover(cluster, "n1", sides, report=lambda _: None).migrate()
    assert annotations.TAKEN_OVER not in cluster.notes


async def test_node_returns_only_to_the_system_that_it_came_from() -> None:
    cluster = VolcanoCluster()
    await cluster.migrate()
    mover = Mover(cluster, "n1", Sides(), report=lambda _: None)
    for act in (mover.roll_back(accept=True), mover.migrate(accept=True)):
        with pytest.raises(Refused, match="came over from Volcano; give --from volcano"):
            await act


async def test_labels_have_a_default_for_each_system() -> None:
    sides = FROM_VOLCANO
    assert (sides.origin, sides.label) == (VOLCANO, ("volcano.sh/vgpu-plugin", "on"))
    assert sides.plugin == ("name", "volcano-device-plugin")
    assert parse_sides("", "", 120.0) == Sides()
