# SPDX-License-Identifier: Apache-2.0
"""Workloads of Kueue: their devices are held before they are admitted, and let go in time."""

from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from hami_common.events.allocation import AllocationRecord, is_of_owner
from hami_scheduler.settings import KueueSettings
from hami_scheduler.shell.extender_wire import BindArgs
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.fakekueue import API, CHECK, FakeKueue
from tests.unit.scheduler.shell.world import Running, World, quiet

pytestmark = pytest.mark.anyio

NODES = ["n1", "n2"]
DEVICES = [builders.devices(node, count=2, memory_mib=10_000) for node in NODES]
KUEUE = KueueSettings(enabled=True, lease_s=60.0, hold_s=300.0, reject_after_s=60.0)
Obj = dict[str, Any]


class Site:
    """A world with Kueue's kinds."""

    def __init__(self) -> None:
        self.world = World()
        self.kube = self.world.kube = FakeKueue()

    async def prepare(self) -> None:
        for devices in DEVICES:
            await self.world.add_devices(devices)
        for node in NODES:
            metadata = {"name": node, "labels": {"zone": node}}
            self.kube.put(f"/api/v1/nodes/{node}", {"metadata": metadata, "spec": {}})
        self.kube.put(f"{API}/resourceflavors/any", {"metadata": {"name": "any"}, "spec": {}})
        self.kube.add_check()

    def held(self) -> dict[str, AllocationRecord]:
        return {one.pod_uid: one for one in self.world.live() if is_of_owner(one)}

    async def later(self, delay_s: float = 7.0) -> None:
        await self.world.advance(delay_s, *NODES)

    async def submit(self, name: str, *pod_sets: Obj, **more: Any) -> str:
        """A Workload with reserved quota, after the work that it causes."""
        path = self.kube.submit(name, *pod_sets)
        self.kube.reserve(path, **more)
        await quiet()
        return path


@pytest.fixture
async def site() -> Site:
    made = Site()
    await made.prepare()
    return made


def pod_set(count: int, mem_mib: int = 9000, *, name: str = "main", **spec: Any) -> Obj:
    """Pods as a Job's template has them: the webhook has not seen it."""
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(mem_mib)}
    container = {"name": "main", "image": "x", "resources": {"limits": limits}}
    return {
        "name": name,
        "count": count,
        "template": {"metadata": {}, "spec": {"containers": [container], **spec}},
    }


def member(number: int, workload: str, *, mem_mib: int = 9000, **more: Any) -> Obj:
    """A pod of an admitted Workload, with the annotation that Kueue copied to it."""
    annotated = {"hami.io/hold": f"wl-{workload}"}
    made = builders.pod(
        f"{workload}-{number}", mem_mib=mem_mib, cores=0, annotated=annotated, **more
    )
    del made["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpucores"]
    return made


async def test_workload_is_ready_once_devices_for_all_pods_are_held(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE):
        path = await site.submit("a", pod_set(4))
        check = site.kube.check(path)
        assert (check["state"], check["message"]) == ("Ready", "devices of 4 pods are held")
        assert check["podSetUpdates"] == [{"name": "main", "annotations": {"hami.io/hold": "wl-a"}}]
        held = site.held()
        assert sorted(held) == [f"wl-a-0-{number}" for number in range(4)]
        assert {(one.pod, one.held_for) for one in held.values()} == {("a", "workload default/a")}
        assert sorted(one.node for one in held.values()) == ["n1", "n1", "n2", "n2"]
        assert site.kube.active()["status"] == "True"
    site.world.check(*DEVICES)


async def bind_all(s: Running, pods: list[Obj]) -> None:
    for pod in pods:
        answer = await s.filter(pod, NODES)
        (node,) = answer["NodeNames"]
        assert await s.bind(pod, node) == ""


async def test_pods_bind_on_the_held_devices_although_all_else_is_full(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE) as s:
        path = await site.submit("a", pod_set(4))
        held = site.held().values()
        expected = sorted((one.node, one.containers[0].shares[0].uuid) for one in held)
        site.kube.admit(path)
        pods = [site.world.add_pod(member(number, "a")) for number in range(4)]
        await quiet()
        other = site.world.add_pod(builders.pod("other", mem_mib=9000))
        assert (await s.filter(other, NODES))["NodeNames"] == []
        await bind_all(s, pods)
        await quiet()
        live = site.world.live()
        assert sorted((one.node, one.containers[0].shares[0].uuid) for one in live) == expected
        assert site.held() == {}
        await site.later(14)
        site.world.check_settled(*DEVICES)


async def test_takeover_that_a_crash_interrupted_is_completed_by_the_next_bind(site: Site) -> None:
    """The pod's reservation was written, its hold not yet released."""
    async with site.world.scheduler(kueue=KUEUE) as s:
        path = await site.submit("a", pod_set(4))
        site.kube.admit(path)
        pod = site.world.add_pod(member(0, "a"))
        await quiet()
        hold = site.held()["wl-a-0-0"]
        uid = pod["metadata"]["uid"]
        left = replace(
            hold, pod_uid=uid, pod="a-0", allocation_id="left", held_for="", awaits=(hold.pod_uid,)
        )
        await site.world.record(left)
        await quiet()
        assert await s.bind(pod, hold.node) == ""
        await quiet()
        assert "wl-a-0-0" not in site.held()
        assert len(site.held()) == 3
        (mine,) = (one for one in site.world.live() if one.pod_uid == uid)
        assert mine.allocation_id == "left"
        site.world.check(*DEVICES)


async def test_binding_of_another_scheduler_takes_the_hold_over(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE) as s:
        path = await site.submit("a", pod_set(4))
        site.kube.admit(path)
        pod = site.world.add_pod(member(0, "a"))
        await quiet()
        uid = pod["metadata"]["uid"]
        args = BindArgs(pod_name="a-0", pod_namespace="default", pod_uid=uid, node="n1")
        binder = s.scheduler.binder
        rehearsed = await binder.admit(args, resource_version="", is_dry_run=True)
        assert rehearsed.outcome == "dry-run"
        assert len(site.held()) == 4
        admitted = await binder.admit(args, resource_version="", is_dry_run=False)
        assert admitted.outcome == "admitted"
        assert len(site.held()) == 3
        site.world.check(*DEVICES)


async def test_hold_serves_only_equal_pods_of_its_namespace(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE) as s:
        path = await site.submit("a", pod_set(4))
        site.kube.admit(path)
        thief = site.world.add_pod(member(7, "a", namespace="other"))
        larger = site.world.add_pod(member(8, "a", mem_mib=9500))
        await quiet()
        for pod in (thief, larger):
            assert (await s.filter(pod, NODES))["NodeNames"] == []
            assert "CardInsufficientMemory" in await s.bind(pod, "n1")
        assert len(site.held()) == 4


async def test_workload_without_a_placement_is_sent_back_with_the_reason(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE):
        blocker = site.world.add_pod(builders.pod("blocker", mem_mib=9000))
        await quiet()
        async with site.world.scheduler("s2") as s2:
            assert await s2.bind(blocker, "n1") == ""
        path = await site.submit("a", pod_set(4))
        check = site.kube.check(path)
        text = "no room for 4 pods at once: pod set main: 3 of 4 would fit now"
        assert (check["state"], check["message"]) == ("Retry", text)
        assert check["requeueAfterSeconds"] == KUEUE.requeue_s
        assert site.held() == {}
        assert [one["reason"] for one in site.kube.events] == ["PlacementRetry"]
        site.kube.take_quota(path)
        await quiet()
        # Kueue has overwritten the text; it is shown again while the Workload waits.
        shown = site.kube.check(path)
        assert (shown["state"], shown["message"]) == ("Pending", f"{text}; next attempt in 15 s")
        site.kube.remove("/api/v1/namespaces/default/pods/blocker")
        await quiet()
        site.kube.reserve(path)
        await quiet()
        assert site.kube.check(path)["state"] == "Ready"
        assert len(site.held()) == 4


async def test_quota_counts_a_hold_once_also_while_its_pod_takes_it_over(site: Site) -> None:
    metadata = {"name": "gpu", "namespace": "default", "uid": "uid-gpu"}
    spec = {"hard": {"limits.nvidia.com/gpumem": "18000"}}
    site.kube.put(
        "/api/v1/namespaces/default/resourcequotas/gpu", {"metadata": metadata, "spec": spec}
    )
    async with site.world.scheduler(kueue=KUEUE) as s:
        path = await site.submit("a", pod_set(2))
        assert site.kube.check(path)["state"] == "Ready"
        other = await site.submit("b", pod_set(1, 1000))
        check = site.kube.check(other)
        assert check["state"] == "Retry"
        assert 'quota "gpu" limits.nvidia.com/gpumem: 1000 MiB wanted' in check["message"]
        site.kube.admit(path)
        pods = [site.world.add_pod(member(number, "a")) for number in range(2)]
        await quiet()
        await bind_all(s, pods)
        await quiet()
        assert site.held() == {}
        assert site.world.bound().keys() == {"a-0", "a-1"}


async def test_of_two_that_fit_alone_exactly_one_is_ready(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE):
        paths = [site.kube.submit(name, pod_set(3)) for name in ("a", "b")]
        for path in paths:
            site.kube.reserve(path)
        await quiet()
        states = [site.kube.check(path)["state"] for path in paths]
        assert sorted(states) == ["Ready", "Retry"]
        assert len(site.held()) == 3
        site.kube.remove(paths[states.index("Ready")])
        await quiet()
        loser = paths[states.index("Retry")]
        site.kube.take_quota(loser)
        site.kube.reserve(loser)
        await quiet()
        assert site.kube.check(loser)["state"] == "Ready"


@pytest.mark.parametrize("end", ["take_quota", "finish", "remove"])
async def test_workload_that_ends_frees_its_hold(site: Site, end: str) -> None:
    async with site.world.scheduler(kueue=KUEUE):
        path = await site.submit("a", pod_set(4))
        assert len(site.held()) == 4
        getattr(site.kube, end)(path)
        await quiet()
        assert site.held() == {}


async def test_holds_are_renewed_while_the_workload_waits_for_other_checks(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE):
        path = await site.submit("a", pod_set(4))
        await site.later(3 * KUEUE.lease_s)
        assert site.kube.check(path)["state"] == "Ready"
        assert len(site.held()) == 4


async def test_holds_end_some_time_after_admission(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE) as s:
        path = await site.submit("a", pod_set(4))
        site.kube.admit(path)
        pod = site.world.add_pod(member(0, "a"))
        await quiet()
        await bind_all(s, [pod])
        await site.later(KUEUE.hold_s - 60)
        assert len(site.held()) == 3
        await site.later(90)
        assert site.held() == {}
        assert site.world.bound().keys() == {"a-0"}


async def test_lease_ends_holds_of_a_scheduler_that_stopped(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE):
        await site.submit("a", pod_set(4))
    async with site.world.scheduler("s2"):
        await site.later(KUEUE.lease_s - 7)
        assert len(site.held()) == 4
        await site.later(28)
        assert site.held() == {}


async def test_another_replica_continues_with_the_holds(site: Site) -> None:
    async with site.world.scheduler("s2", kueue=KUEUE):
        async with site.world.scheduler(kueue=KUEUE):
            pass
        path = await site.submit("a", pod_set(4))
        first = site.held()
    async with site.world.scheduler("s3", kueue=KUEUE):
        await site.later(3 * KUEUE.lease_s)
        assert site.kube.check(path)["state"] == "Ready"
        assert {uid: one.allocation_id for uid, one in site.held().items()} == {
            uid: one.allocation_id for uid, one in first.items()
        }
        site.kube.remove(path)
        await quiet()
        assert site.held() == {}


async def test_hold_of_a_workload_deleted_meanwhile_is_released_at_start(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE):
        path = await site.submit("a", pod_set(4))
    site.kube.remove(path)
    async with site.world.scheduler(kueue=KUEUE):
        await site.later()
        assert site.held() == {}


async def test_comparison_of_ledger_and_pods_leaves_holds_alone(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE, reconcile_s=20.0):
        await site.submit("a", pod_set(4))
        await site.later(60)
        assert len(site.held()) == 4


async def test_only_one_replica_answers(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE), site.world.scheduler("s2", kueue=KUEUE):
        await site.submit("a", pod_set(4))
        assert len(site.held()) == 4
        assert {one.writer for one in site.held().values()} == {"s1"}


async def test_request_beyond_every_unused_device_is_rejected_after_a_while(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE):
        path = await site.submit("a", pod_set(1), pod_set(1, 11_000, name="large"))
        assert site.kube.check(path)["state"] == "Retry"
        assert "pod set large: CardInsufficientMemory" in site.kube.check(path)["message"]
        for _ in range(5):
            site.kube.take_quota(path)
            await site.later(14)
            site.kube.reserve(path)
            await quiet()
        check = site.kube.check(path)
        assert check["state"] == "Rejected"
        assert check["message"] == (
            "pod set large: 1 pod would not fit on the devices of all 2 nodes if nothing else used"
            " them; request less or add devices"
        )
        assert site.held() == {}


async def test_node_that_joins_in_time_prevents_a_rejection(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE):
        path = await site.submit("a", pod_set(1, 11_000))
        await site.world.add_devices(builders.devices("n3", memory_mib=12_000))
        site.kube.put("/api/v1/nodes/n3", {"metadata": {"name": "n3"}, "spec": {}})
        site.kube.take_quota(path)
        await site.later(KUEUE.reject_after_s + 7)
        await site.world.heartbeat("n3")
        site.kube.reserve(path)
        await quiet()
        assert site.kube.check(path)["state"] == "Ready"


async def test_invalid_request_is_rejected_with_the_field_and_the_fix(site: Site) -> None:
    bad = pod_set(1)
    limits = bad["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits["nvidia.com/gpumem"] = "3Gi"
    async with site.world.scheduler(kueue=KUEUE):
        path = await site.submit("a", bad)
        check = site.kube.check(path)
        assert check["state"] == "Rejected"
        assert check["message"].startswith("pod set main: container main: resources.limits")
        assert "write 3072" in check["message"]


async def test_workload_without_devices_is_ready_at_once(site: Site) -> None:
    plain = pod_set(2)
    plain["template"]["spec"]["containers"][0]["resources"] = {}
    async with site.world.scheduler(kueue=KUEUE):
        path = await site.submit("a", plain)
        check = site.kube.check(path)
        assert check["state"] == "Ready"
        assert check["message"] == "no pod set requests devices of HAMi"
        assert "podSetUpdates" not in check


async def test_nodes_obey_the_flavor_and_the_template(site: Site) -> None:
    flavor = {"metadata": {"name": "second"}, "spec": {"nodeLabels": {"zone": "n2"}}}
    site.kube.put(f"{API}/resourceflavors/second", flavor)
    async with site.world.scheduler(kueue=KUEUE):
        path = await site.submit("a", pod_set(2), flavor="second")
        assert {one.node for one in site.held().values()} == {"n2"}
        site.kube.remove(path)
        await quiet()
        await site.submit("b", pod_set(2, nodeSelector={"zone": "n1"}))
        assert {one.node for one in site.held().values()} == {"n1"}
        other = await site.submit("c", pod_set(1, nodeSelector={"zone": "n3"}))
        check = site.kube.check(other)
        assert check["state"] == "Retry"
        assert "pod set main: no node with devices is eligible" in check["message"]


async def test_devices_are_held_on_the_hosts_that_kueue_chose(site: Site) -> None:
    for node in NODES:
        site.kube.change(
            f"/api/v1/nodes/{node}", metadata={"labels": {"kubernetes.io/hostname": node}}
        )
    async with site.world.scheduler(kueue=KUEUE) as s:
        path = await site.submit("a", pod_set(3, 4000), hosts={"n2": 2, "n1": 1})
        check = site.kube.check(path)
        assert check["podSetUpdates"] == [{"name": "main", "annotations": {"hami.io/hold": "wl-a"}}]
        assert sorted(one.node for one in site.held().values()) == ["n1", "n2", "n2"]
        site.kube.admit(path)
        pods = [site.world.add_pod(member(number, "a", mem_mib=4000)) for number in range(3)]
        await quiet()
        for pod, host in zip(pods, ["n2", "n1", "n2"], strict=True):  # by its node selector
            assert (await s.filter(pod, [host]))["NodeNames"] == [host]
            assert await s.bind(pod, host) == ""
        assert site.held() == {}
        other = await site.submit("b", pod_set(3), hosts={"n2": 3})
        text = "no room for 3 pods at once: pod set main in n2: "
        assert site.kube.check(other)["message"].startswith(text)
        site.kube.remove("/api/v1/nodes/n2")
        last = await site.submit("c", pod_set(1, 1000), hosts={"n2": 1})
        assert "no node with devices is eligible" in site.kube.check(last)["message"]


async def test_workload_waits_for_the_heartbeats_of_agents(site: Site) -> None:
    async with site.world.scheduler(kueue=KUEUE, wait=False):
        path = await site.submit("a", pod_set(4))
        check = site.kube.check(path)
        assert check["state"] == "Pending"
        assert check["message"] == (
            "not decided yet: the scheduler waits for the heartbeats of agents"
        )
        await site.later()
        assert site.kube.check(path)["state"] == "Ready"


async def test_check_is_inactive_only_after_a_long_loss_of_sync(site: Site) -> None:
    kueue = KueueSettings(enabled=True, unready_s=60.0)
    async with site.world.scheduler(kueue=kueue) as s:
        await site.later()
        s.state.lost("records")
        path = await site.submit("a", pod_set(1))
        await site.later(42)
        assert site.kube.active()["status"] == "True"
        check = site.kube.check(path)
        assert check["state"] == "Pending"
        assert check["message"].startswith("not decided yet: ")
        await site.later(42)
        condition = site.kube.active()
        assert (condition["status"], condition["reason"]) == ("False", "NotInSync")
        assert condition["message"] == "the scheduler waits for records"
        s.state.delivered("records")
        await site.later()
        assert site.kube.active()["status"] == "True"
        assert site.kube.check(path)["state"] == "Ready"
    states = [one["status"] for _, one in site.kube.applied if "conditions" in one["status"]]
    assert [one["conditions"][0]["status"] for one in states] == ["True", "False", "True"]


async def test_checks_of_other_controllers_are_left_alone(site: Site) -> None:
    site.kube.add_check(controller="example.com/other")
    async with site.world.scheduler(kueue=KUEUE):
        path = await site.submit("a", pod_set(4))
        await site.later()
        assert site.kube.check(path)["state"] == "Pending"
        assert site.kube.applied == []


async def test_parameters_of_a_check_are_refused_by_its_condition(site: Site) -> None:
    spec = {"controllerName": "hami.io/placement", "parameters": {"kind": "X", "name": "x"}}
    path = f"{API}/admissionchecks/{CHECK}"
    site.kube.put(path, {"metadata": {"name": CHECK}, "spec": spec})
    async with site.world.scheduler(kueue=KUEUE):
        await site.later()
        condition = site.kube.active()
        assert (condition["status"], condition["reason"]) == ("False", "ParametersInvalid")
        assert "remove the field" in condition["message"]


async def test_nothing_happens_without_kueue_until_it_is_installed(site: Site) -> None:
    site.kube.is_installed = False
    async with site.world.scheduler(kueue=KUEUE):
        path = await site.submit("a", pod_set(4))
        await site.later()
        assert site.kube.applied == []
        site.kube.is_installed = True
        await site.later(2 * KUEUE.discovery_s)
        assert site.kube.check(path)["state"] == "Ready"


async def test_nothing_is_decided_before_every_kind_is_listed(site: Site) -> None:
    site.kube.unlisted["nodes"] = anyio.Event()
    async with site.world.scheduler(kueue=KUEUE):
        path = await site.submit("a", pod_set(4))
        await site.later()
        assert site.kube.check(path)["state"] == "Pending"
        assert site.held() == {}
        site.kube.unlisted["nodes"].set()
        await site.later()
        assert site.kube.check(path)["state"] == "Ready"


async def test_setting_is_off_by_default(site: Site) -> None:
    async with site.world.scheduler():
        path = await site.submit("a", pod_set(4))
        await site.later()
        assert site.kube.check(path)["state"] == "Pending"
        assert not any("/leases/" in one for one in site.kube.objects)
