# SPDX-License-Identifier: Apache-2.0
"""The simulated kubelet's claims: checks, calls of drivers, checkpoint, health."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import pytest

from hami_common.kubeletapi import dra, drahealth
from hami_sim.kubelet.claims import CHECKPOINT, ClaimError, ClaimManager
from hami_sim.kubelet.objects import Obj

pytestmark = pytest.mark.anyio


class FakeDriver:
    """Gives each claim one device with one CDI id."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prepared: list[list[str]] = []
        self.unprepared: list[list[str]] = []
        self.error = ""
        self.may_unprepare = anyio.Event()
        self.may_unprepare.set()

    async def prepare(
        self, claims: Sequence[dra.Claim]
    ) -> Mapping[str, dra.NodePrepareResourceResponse]:
        self.prepared.append([claim.name for claim in claims])
        return {
            claim.uid: dra.NodePrepareResourceResponse(
                devices=[
                    dra.Device(
                        pool_name="pool",
                        device_name="gpu",
                        cdi_device_ids=[f"{self.name}/gpu={claim.uid}"],
                    )
                ],
                error=self.error,
            )
            for claim in claims
        }

    async def unprepare(
        self, claims: Sequence[dra.Claim]
    ) -> Mapping[str, dra.NodeUnprepareResourceResponse]:
        self.unprepared.append([claim.name for claim in claims])
        await self.may_unprepare.wait()
        return {claim.uid: dra.NodeUnprepareResourceResponse(error=self.error) for claim in claims}


class Bench:
    """A manager over two fake drivers and a dictionary of claims."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now_s = 100.0
        self.drivers = {name: FakeDriver(name) for name in ("one.example", "two.example")}
        self.claims: dict[str, Obj] = {}
        self.manager = self.restarted()

    def restarted(self) -> ClaimManager:
        self.manager = ClaimManager(
            self.directory,
            fetch=self._fetch,
            find_driver=self._find,
            now_s=lambda: self.now_s,
        )
        self.manager.read_checkpoint()
        return self.manager

    async def _fetch(self, namespace: str, name: str) -> Obj:
        if name not in self.claims:
            raise ClaimError(f"fetch ResourceClaim {name}: not found")
        return self.claims[name]

    def _find(self, driver: str) -> FakeDriver:
        if driver not in self.drivers:
            raise ClaimError(f"DRA driver {driver} is not registered")
        return self.drivers[driver]

    def claim(self, name: str, *users: Obj, drivers: Sequence[str] = ("one.example",)) -> Obj:
        results = [{"driver": driver, "request": "r"} for driver in drivers]
        claim: Obj = {
            "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}"},
            "status": {
                "allocation": {"devices": {"results": results}},
                "reservedFor": [{"uid": user["metadata"]["uid"]} for user in users],
            },
        }
        self.claims[name] = claim
        return claim


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def pod_with(*claims: str, name: str = "pod", status: Obj | None = None) -> Obj:
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}"},
        "spec": {
            "resourceClaims": [{"name": claim, "resourceClaimName": claim} for claim in claims],
            "containers": [
                {"name": "main", "resources": {"claims": [{"name": claim} for claim in claims]}}
            ],
        },
        "status": status or {},
    }


async def test_each_driver_gets_one_call_with_its_claims_of_the_pod(bench: Bench) -> None:
    pod = pod_with("a", "b", "c")
    bench.claim("a", pod)
    bench.claim("b", pod, drivers=["two.example"])
    bench.claim("c", pod, drivers=["one.example", "two.example"])
    await bench.manager.prepare(pod)
    one, two = bench.drivers.values()
    assert (one.prepared, two.prepared) == ([["a", "c"]], [["b", "c"]])
    await bench.manager.unprepare("uid-pod")
    assert (one.unprepared, two.unprepared) == ([["a", "c"]], [["b", "c"]])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"reservedFor": [{"uid": "other"}]},
            "pod pod (uid-pod) is not allowed to use ResourceClaim a (uid-a)",
        ),
        ({"allocation": None}, "ResourceClaim a: not allocated"),
        (
            {"allocation": {"devices": {"results": [{"driver": "three.example"}]}}},
            "DRA driver three.example is not registered",
        ),
    ],
)
async def test_claim_that_the_pod_cannot_use_is_refused_before_any_call(
    bench: Bench, change: Obj, text: str
) -> None:
    pod = pod_with("b", "a")
    bench.claim("b", pod)
    bench.claim("a", pod)["status"].update(change)
    with pytest.raises(ClaimError, match=r"^prepare dynamic resources: ") as caught:
        await bench.manager.prepare(pod)
    assert str(caught.value) == f"prepare dynamic resources: {text}"
    assert bench.drivers["one.example"].prepared == []
    assert not bench.manager.has_pod("uid-pod")


async def test_generated_claim_must_exist_and_belong_to_the_pod(bench: Bench) -> None:
    pod = pod_with()
    pod["spec"]["resourceClaims"] = [{"name": "a", "resourceClaimTemplateName": "t"}]
    with pytest.raises(ClaimError, match=r'pod "ns/pod": ResourceClaim not created yet$'):
        await bench.manager.prepare(pod)
    pod["status"] = {"resourceClaimStatuses": [{"name": "a", "resourceClaimName": "pod-a-x"}]}
    claim = bench.claim("pod-a-x", pod)
    with pytest.raises(ClaimError, match=r"was not created for Pod ns/pod \(Pod is not owner\)$"):
        await bench.manager.prepare(pod)
    claim["metadata"]["ownerReferences"] = [{"controller": True, "uid": "uid-pod"}]
    await bench.manager.prepare(pod)
    assert bench.drivers["one.example"].prepared == [["pod-a-x"]]


async def test_reference_for_which_no_claim_is_needed_is_passed_over(bench: Bench) -> None:
    pod = pod_with(status={"resourceClaimStatuses": [{"name": "a"}]})
    pod["spec"]["resourceClaims"] = [{"name": "a", "resourceClaimTemplateName": "t"}]
    await bench.manager.prepare(pod)
    assert bench.drivers["one.example"].prepared == []


async def test_claim_of_extended_resources_reaches_the_containers_it_maps(bench: Bench) -> None:
    mapping = {"containerName": "main", "resourceName": "example.com/gpu", "requestName": "r"}
    extended = {"resourceClaimName": "x", "requestMappings": [mapping]}
    pod = pod_with(status={"extendedResourceClaimStatus": extended})
    bench.claim("x", pod)
    await bench.manager.prepare(pod)
    [main] = pod["spec"]["containers"]
    assert bench.manager.cdi_devices(pod, main) == ("one.example/gpu=uid-x",)
    assert bench.manager.cdi_devices(pod, {"name": "other"}) == ()


async def test_new_claim_with_the_name_of_a_prepared_one_is_refused(bench: Bench) -> None:
    first, second = pod_with("a", name="first"), pod_with("a", name="second")
    bench.claim("a", first)
    await bench.manager.prepare(first)
    bench.claim("a", second)["metadata"]["uid"] = "uid-new"
    with pytest.raises(ClaimError, match="old ResourceClaim with same name a and different UID"):
        await bench.manager.prepare(second)


async def test_no_pod_joins_a_claim_that_is_being_unprepared(bench: Bench) -> None:
    driver = bench.drivers["one.example"]
    first, second = pod_with("a", name="first"), pod_with("a", name="second")
    bench.claim("a", first, second)
    await bench.manager.prepare(first)
    driver.may_unprepare = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.manager.unprepare, "uid-first")
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ClaimError, match=r"ResourceClaim a is being unprepared$"):
            await bench.manager.prepare(second)
        driver.may_unprepare.set()
    await bench.manager.prepare(second)
    assert driver.prepared == [["a"], ["a"]]


async def test_failed_unprepare_is_repeated_until_the_driver_succeeds(bench: Bench) -> None:
    driver = bench.drivers["one.example"]
    pod = pod_with("a")
    bench.claim("a", pod)
    await bench.manager.prepare(pod)
    driver.error = "busy"
    with pytest.raises(
        ClaimError, match=r"^NodeUnprepareResources failed for ResourceClaim a: busy$"
    ):
        await bench.manager.unprepare("uid-pod")
    assert bench.manager.has_pod("uid-pod")
    driver.error = ""
    await bench.manager.unprepare("uid-pod")
    await bench.manager.unprepare("uid-pod")
    assert not bench.manager.has_pod("uid-pod")
    assert driver.unprepared == [["a"], ["a"]]


async def test_checkpoint_keeps_devices_and_pods_but_not_that_they_are_prepared(
    bench: Bench,
) -> None:
    pod, other = pod_with("a"), pod_with("a", name="other")
    bench.claim("a", pod, other)
    await bench.manager.prepare(pod)
    manager = bench.restarted()
    [main] = pod["spec"]["containers"]
    assert manager.cdi_devices(pod, main) == ("one.example/gpu=uid-a",)
    assert manager.inactive_pods({"uid-other"}) == {"uid-pod"}
    await manager.prepare(other)
    assert bench.drivers["one.example"].prepared == [["a"], ["a"]]
    assert manager.inactive_pods({"uid-other", "uid-pod"}) == set()


async def test_damaged_checkpoint_is_an_error_that_names_the_file(bench: Bench) -> None:
    pod = pod_with("a")
    bench.claim("a", pod)
    await bench.manager.prepare(pod)
    path = bench.directory / CHECKPOINT
    path.write_text(path.read_text().replace("uid-a", "uid-b"))
    with pytest.raises(ValueError, match=f"{path}: checkpoint is corrupted"):
        bench.restarted()


def health(status: drahealth.HealthStatus.ValueType, **more: object) -> drahealth.DeviceHealth:
    device = drahealth.DeviceIdentifier(pool_name="pool", device_name="gpu")
    return drahealth.DeviceHealth(device=device, health=status, **more)  # type: ignore[arg-type]  # table cases


async def test_health_counts_until_its_timeout_or_the_end_of_the_stream(bench: Bench) -> None:
    pod = pod_with("a")
    bench.claim("a", pod)
    await bench.manager.prepare(pod)

    def shown() -> Obj:
        [status] = bench.manager.allocated_resources(pod)["main"]
        assert status["name"] == "claim:a"
        [resource] = status["resources"]
        assert resource["resourceID"] == "one.example/gpu=uid-a"
        return {key: value for key, value in resource.items() if key != "resourceID"}

    def report(entry: drahealth.DeviceHealth) -> set[str]:
        return bench.manager.take_health("one.example", [entry])

    assert shown() == {"health": "Unknown"}
    assert report(health(drahealth.HEALTHY)) == {"uid-pod"}
    assert report(health(drahealth.HEALTHY)) == set()
    bench.now_s += 30.0
    assert shown() == {"health": "Healthy"}
    bench.now_s += 0.1
    assert shown() == {"health": "Unknown"}
    long = "x" * 1025
    assert report(health(drahealth.UNHEALTHY, message=long, health_check_timeout_seconds=60)) == {
        "uid-pod"
    }
    bench.now_s += 60.0
    assert shown() == {"health": "Unhealthy", "message": f"{long[:1021]}..."}
    assert bench.manager.take_health("one.example", []) == set()
    bench.now_s += 0.1
    assert bench.manager.take_health("one.example", []) == {"uid-pod"}
    assert report(health(drahealth.HEALTHY, health_check_timeout_seconds=-1)) == {"uid-pod"}
    bench.manager.clear_health("one.example")
    assert shown() == {"health": "Unknown"}
