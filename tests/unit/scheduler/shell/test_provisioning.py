# SPDX-License-Identifier: Apache-2.0
"""ProvisioningRequests: devices are held for the pods that they announce, for the booked time."""

from typing import Any

import pytest

from hami_common.events.allocation import AllocationRecord, is_of_owner
from hami_core.planning.conditions import kube_time
from hami_scheduler.settings import ProvisioningSettings
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.fakegroup import FakeGroup
from tests.unit.scheduler.shell.world import World, quiet

pytestmark = pytest.mark.anyio

NODES = ["n1", "n2"]
DEVICES = [builders.devices(node, count=2, memory_mib=10_000) for node in NODES]
GROUP = "/apis/autoscaling.x-k8s.io"
CLASS = "placement.hami.io"
SETTINGS = ProvisioningSettings(enabled=True, booking_s=600.0, retry_s=14.0, lease_s=60.0)
LIMITS = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "9000"}
Obj = dict[str, Any]


class Site:
    """A world with ProvisioningRequests."""

    def __init__(self, version: str = "v1") -> None:
        self.world = World()
        self.kube = self.world.kube = FakeGroup(f"{GROUP}/{version}", ["provisioningrequests"])

    async def prepare(self) -> None:
        for devices in DEVICES:
            await self.world.add_devices(devices)
        for node in NODES:
            metadata = {"name": node, "labels": {"zone": node}}
            self.kube.put(f"/api/v1/nodes/{node}", {"metadata": metadata, "spec": {}})

    def held(self) -> dict[str, AllocationRecord]:
        return {one.pod_uid: one for one in self.world.live() if is_of_owner(one)}

    async def later(self, delay_s: float = 7.0) -> None:
        await self.world.advance(delay_s, *NODES)

    def template(self, name: str, limits: Obj = LIMITS, **spec: Any) -> str:
        container = {"name": "main", "image": "x", "resources": {"limits": limits}}
        metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
        path = f"/api/v1/namespaces/default/podtemplates/{name}"
        document = {"metadata": {}, "spec": {"containers": [container], **spec}}
        self.kube.put(path, {"metadata": metadata, "template": document})
        return path

    async def request(
        self, name: str, *pod_sets: tuple[str, int], cls: str = CLASS, **parameters: str
    ) -> str:
        """Create a request, and wait for the work that it causes; returns its path."""
        path = f"{self.kube.api}/namespaces/default/provisioningrequests/{name}"
        listed = [{"podTemplateRef": {"name": one}, "count": count} for one, count in pod_sets]
        spec = {"provisioningClassName": cls, "podSets": listed, "parameters": parameters}
        created = kube_time(self.world.clock.now_s())
        metadata = {"name": name, "namespace": "default", "uid": f"pr-{name}"}
        self.kube.put(path, {"metadata": {**metadata, "creationTimestamp": created}, "spec": spec})
        await quiet()
        return path

    def conditions(self, path: str) -> dict[str, tuple[str, str]]:
        """(status, reason) by type."""
        listed = (self.kube.objects[path].get("status") or {}).get("conditions") or []
        return {one["type"]: (one["status"], one["reason"]) for one in listed}

    def text(self, path: str, kind: str) -> str:
        listed = self.kube.objects[path]["status"]["conditions"]
        return str(next(one["message"] for one in listed if one["type"] == kind))

    def member(self, number: int, request: str, *, mem_mib: int = 9000, **more: Any) -> Obj:
        """A pod that names the request."""
        annotated = {
            "autoscaling.x-k8s.io/consume-provisioning-request": request,
            "autoscaling.x-k8s.io/provisioning-class-name": CLASS,
        }
        made = builders.pod(
            f"{request}-{number}", mem_mib=mem_mib, cores=0, annotated=annotated, **more
        )
        del made["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpucores"]
        return self.world.add_pod(made)

    async def fill(self, name: str, node: str) -> str:
        """Bind a pod that takes one device; returns its path."""
        pod = self.world.add_pod(builders.pod(name, mem_mib=9000))
        await quiet()
        async with self.world.scheduler(f"for-{name}") as s:
            assert await s.bind(pod, node) == ""
        return f"/api/v1/namespaces/default/pods/{name}"


PROVISIONED = {"Accepted": ("True", "Accepted"), "Provisioned": ("True", "CapacityIsFound")}
WAITS = {"Accepted": ("True", "Accepted"), "Provisioned": ("False", "CapacityIsNotFound")}


@pytest.fixture
async def site() -> Site:
    made = Site()
    await made.prepare()
    return made


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_request_is_provisioned_once_devices_for_all_pods_are_held(version: str) -> None:
    site = Site(version)
    await site.prepare()
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS) as s:
        path = await site.request("a", ("t", 4))
        assert site.conditions(path) == PROVISIONED
        assert site.text(path, "Provisioned") == "devices of 4 pods are held"
        held = site.held()
        assert sorted(held) == [f"pr-a-0-{number}" for number in range(4)]
        purposes = {(one.pod, one.held_for) for one in held.values()}
        assert purposes == {("a", "provisioningrequest default/a")}
        name = "hami_scheduler_provisioning_requests_total"
        assert s.value(name, outcome="provisioned") == 1
        (written,) = site.kube.applied
        assert written[1]["apiVersion"] == f"autoscaling.x-k8s.io/{version}"
    site.world.check(*DEVICES)


async def test_pods_that_name_the_request_bind_on_the_held_devices(site: Site) -> None:
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS) as s:
        path = await site.request("a", ("t", 4))
        expected = sorted((o.node, o.containers[0].shares[0].uuid) for o in site.held().values())
        pods = [site.member(number, "a") for number in range(4)]
        await quiet()
        other = site.world.add_pod(builders.pod("other", mem_mib=9000))
        assert (await s.filter(other, NODES))["NodeNames"] == []
        for pod in pods:
            (node,) = (await s.filter(pod, NODES))["NodeNames"]
            assert await s.bind(pod, node) == ""
        live = site.world.live()
        assert sorted((o.node, o.containers[0].shares[0].uuid) for o in live) == expected
        await site.later()
        assert site.held() == {}
        expired = {"BookingExpired": ("True", "CapacityBookingConsumed")}
        assert site.conditions(path) == PROVISIONED | expired
        site.world.check_settled(*DEVICES)


async def test_pods_of_another_namespace_or_size_do_not_get_the_held_devices(site: Site) -> None:
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS) as s:
        await site.request("a", ("t", 4))
        strangers = [
            site.member(7, "a", namespace="other"),
            site.member(8, "a", mem_mib=9500),
            site.member(9, "b"),
        ]
        await quiet()
        for pod in strangers:
            assert (await s.filter(pod, NODES))["NodeNames"] == []
            assert "CardInsufficientMemory" in await s.bind(pod, "n1")
        assert len(site.held()) == 4


async def test_booking_ends_after_its_time_and_releases_the_devices(site: Site) -> None:
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS) as s:
        path = await site.request("a", ("t", 4))
        pod = site.member(0, "a")
        await quiet()
        (node,) = (await s.filter(pod, NODES))["NodeNames"]
        assert await s.bind(pod, node) == ""
        await site.later(SETTINGS.booking_s - 14)
        assert len(site.held()) == 3
        assert site.conditions(path) == PROVISIONED
        await site.later(21)
        assert site.held() == {}
        expired = {"BookingExpired": ("True", "CapacityReservationTimeExpired")}
        assert site.conditions(path) == PROVISIONED | expired
        assert site.world.bound().keys() == {"a-0"}


async def test_request_without_capacity_waits_and_gets_it_when_it_returns(site: Site) -> None:
    blocker = await site.fill("blocker", "n1")
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS) as s:
        path = await site.request("a", ("t", 4))
        assert site.conditions(path) == WAITS
        assert site.text(path, "Provisioned") == (
            "no room for 4 pods at once: pod set t: 3 of 4 would fit now"
        )
        assert site.held() == {}
        await site.later(5 * SETTINGS.retry_s)
        assert len(site.kube.applied) == 1, "an answer that stays is written once"
        site.kube.remove(blocker)
        await site.later(2 * SETTINGS.retry_s)
        assert site.conditions(path) == PROVISIONED
        assert len(site.held()) == 4
        assert s.value("hami_scheduler_provisioning_requests_total", outcome="waiting") == 1


async def test_request_with_no_retry_fails_at_once_with_the_refusal(site: Site) -> None:
    blocker = await site.fill("blocker", "n1")
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        path = await site.request("a", ("t", 4), noRetry="true")
        failed = {"Accepted": ("True", "Accepted"), "Failed": ("True", "CapacityIsNotFound")}
        assert site.conditions(path) == failed
        assert "3 of 4 would fit now" in site.text(path, "Failed")
        site.kube.remove(blocker)
        await site.later(2 * SETTINGS.retry_s)
        assert site.conditions(path) == failed
        assert site.held() == {}


async def test_request_beyond_every_device_waits_for_nodes_that_may_come(site: Site) -> None:
    site.template("t", {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "11000"})
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        path = await site.request("a", ("t", 1))
        assert site.conditions(path) == WAITS
        assert "CardInsufficientMemory" in site.text(path, "Provisioned")
        await site.world.add_devices(builders.devices("n3", memory_mib=12_000))
        site.kube.put("/api/v1/nodes/n3", {"metadata": {"name": "n3"}, "spec": {}})
        await site.world.heartbeat("n3")
        await site.world.advance(2 * SETTINGS.retry_s, *NODES, "n3")
        assert site.conditions(path) == PROVISIONED


async def test_request_without_capacity_fails_some_days_after_its_creation(site: Site) -> None:
    await site.fill("blocker", "n1")
    site.template("t")
    options = ProvisioningSettings(enabled=True, retry_s=14.0, expire_s=60.0)
    async with site.world.scheduler(provisioning_requests=options):
        path = await site.request("a", ("t", 4))
        await site.later(42)
        assert site.conditions(path) == WAITS
        await site.later(42)
        assert site.conditions(path) == WAITS | {"Failed": ("True", "Expired")}
        assert "3 of 4 would fit now" in site.text(path, "Failed")


async def test_of_two_that_fit_alone_exactly_one_is_provisioned(site: Site) -> None:
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        first = await site.request("a", ("t", 3))
        second = await site.request("b", ("t", 3))
        assert site.conditions(first) == PROVISIONED
        assert site.conditions(second) == WAITS
        site.kube.remove(first)
        await site.later(2 * SETTINGS.retry_s)
        assert site.conditions(second) == PROVISIONED
        assert {one.pod for one in site.held().values()} == {"b"}


async def test_deleting_a_request_releases_its_devices(site: Site) -> None:
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        path = await site.request("a", ("t", 4))
        assert len(site.held()) == 4
        site.kube.remove(path)
        await quiet()
        assert site.held() == {}


async def test_template_may_come_after_the_request(site: Site) -> None:
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        path = await site.request("a", ("t", 1), ("u", 1), noRetry="true")
        assert site.conditions(path)["Provisioned"] == ("False", "PodTemplateNotFound")
        assert site.text(path, "Provisioned") == (
            "PodTemplates that do not exist in namespace default: t, u; create them"
        )
        site.template("u")
        site.template("t")
        await quiet()
        assert site.conditions(path) == PROVISIONED


async def test_bad_template_fails_the_request_with_the_field_and_the_fix(site: Site) -> None:
    site.template("t", {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3Gi"})
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        path = await site.request("a", ("t", 1))
        assert site.conditions(path) == {"Failed": ("True", "RequestInvalid")}
        text = site.text(path, "Failed")
        assert text.startswith("pod set t: container main: resources.limits")
        assert "write 3072" in text


async def test_unclear_parameter_fails_the_request_with_the_field_and_the_fix(site: Site) -> None:
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        path = await site.request("a", ("t", 1), noRetry="yes")
        assert site.conditions(path) == {"Failed": ("True", "RequestInvalid")}
        assert "spec.parameters.noRetry" in site.text(path, "Failed")
        assert site.held() == {}


async def test_template_that_two_pod_sets_share_counts_twice(site: Site) -> None:
    site.template("t")
    site.template("plain", {"cpu": "1"})
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        path = await site.request("a", ("t", 2), ("plain", 9), ("t", 2))
        assert site.conditions(path) == PROVISIONED
        assert len(site.held()) == 4
        site.kube.remove(path)
        path = await site.request("b", ("t", 2), ("t", 3))
        assert site.text(path, "Provisioned") == (
            "no room for 5 pods at once: pod set t (0): 2 of 2 would fit now;"
            " pod set t (1): 3 of 3 would fit now"
        )


async def test_nodes_obey_the_template(site: Site) -> None:
    site.template("t", nodeSelector={"zone": "n2"})
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        await site.request("a", ("t", 2))
        assert {one.node for one in site.held().values()} == {"n2"}


async def test_only_requests_of_our_class_or_for_our_instance_are_answered(site: Site) -> None:
    site.template("t")
    ca = "check-capacity.autoscaling.x-k8s.io"
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        paths = [
            await site.request("a", ("t", 1), cls="other.example.com"),
            await site.request("b", ("t", 1), cls=ca),
            await site.request("c", ("t", 1), cls=ca, processorInstance="hami"),
        ]
        await site.later()
        assert [site.conditions(path) for path in paths] == [{}, {}, {}]
    options = ProvisioningSettings(enabled=True, processor_instance="hami")
    async with site.world.scheduler(provisioning_requests=options):
        await site.later()
        assert [site.conditions(path) for path in paths] == [{}, {}, PROVISIONED]


async def test_another_replica_continues_with_the_booking(site: Site) -> None:
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        path = await site.request("a", ("t", 4))
        first = site.held()
        await site.later(SETTINGS.booking_s / 2)
    written = len(site.kube.applied)
    async with site.world.scheduler("s2", provisioning_requests=SETTINGS):
        await site.later(SETTINGS.booking_s / 2 - 70)
        assert {uid: one.allocation_id for uid, one in site.held().items()} == {
            uid: one.allocation_id for uid, one in first.items()
        }
        assert len(site.kube.applied) == written
        await site.later(84)
        assert site.held() == {}
        assert site.conditions(path)["BookingExpired"][0] == "True"


@pytest.mark.parametrize("is_taken", [False, True])
async def test_devices_lost_while_no_scheduler_ran_are_held_again_or_the_booking_ends(
    site: Site, *, is_taken: bool
) -> None:
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        path = await site.request("a", ("t", 4))
    async with site.world.scheduler("s2") as s2:  # it does not answer requests
        await site.later(SETTINGS.lease_s + 42)
        assert site.held() == {}
        if is_taken:
            other = site.world.add_pod(builders.pod("other", mem_mib=9000))
            await quiet()
            assert await s2.bind(other, "n1") == ""
    async with site.world.scheduler("s3", provisioning_requests=SETTINGS):
        await site.later(28)
        if is_taken:
            assert site.held() == {}
            lost = {"BookingExpired": ("True", "CapacityLost")}
            assert site.conditions(path) == PROVISIONED | lost
            assert "3 of 4 would fit now" in site.text(path, "BookingExpired")
        else:
            assert len(site.held()) == 4
            assert site.conditions(path) == PROVISIONED


async def test_condition_that_was_not_written_is_written_later_for_the_same_holds(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request changes between hold and write: its version is a precondition."""
    site.template("t")
    patch, held = site.kube.patch, []

    async def change_first(path: str, body: bytes, *, content_type: str) -> bytes:
        held.append(site.held())
        if len(held) == 1:
            site.kube.change(path.partition("/status?")[0], metadata={"labels": {"x": "y"}})
        return await patch(path, body, content_type=content_type)

    monkeypatch.setattr(site.kube, "patch", change_first)
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        path = await site.request("a", ("t", 4))
        await site.later()
        assert site.conditions(path) == PROVISIONED
        assert len(held) == 2
        assert len(held[0]) == 4
        assert held == [site.held(), site.held()]


async def test_outage_of_the_bus_leaves_requests_undecided(site: Site) -> None:
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS) as s:
        s.state.lost("records")
        path = await site.request("a", ("t", 4), noRetry="true")
        assert site.conditions(path)["Provisioned"] == ("False", "NotDecided")
        assert "Failed" not in site.conditions(path)
        s.state.delivered("records")
        await site.later(2 * SETTINGS.retry_s)
        assert site.conditions(path) == PROVISIONED
        s.state.lost("records")
        await site.later()
        assert site.conditions(path) == PROVISIONED
        s.state.delivered("records")


async def test_quota_refuses_a_request(site: Site) -> None:
    metadata = {"name": "gpu", "namespace": "default", "uid": "uid-gpu"}
    spec = {"hard": {"limits.nvidia.com/gpumem": "18000"}}
    site.kube.put(
        "/api/v1/namespaces/default/resourcequotas/gpu", {"metadata": metadata, "spec": spec}
    )
    site.template("t")
    async with site.world.scheduler(provisioning_requests=SETTINGS):
        path = await site.request("a", ("t", 3))
        assert site.conditions(path) == WAITS
        assert 'quota "gpu" limits.nvidia.com/gpumem' in site.text(path, "Provisioned")
        assert site.held() == {}


async def test_setting_is_off_by_default(site: Site) -> None:
    site.template("t")
    async with site.world.scheduler():
        path = await site.request("a", ("t", 4))
        await site.later()
        assert site.conditions(path) == {}
        assert not any("/leases/" in one for one in site.kube.objects)
