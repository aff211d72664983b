# SPDX-License-Identifier: Apache-2.0
"""ProvisioningRequests on a real control plane, with the shipped manifests and without Kueue.

``test_kueue.py`` has Kueue's own check for them. Memory in MiB.
"""

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hami_common.events.allocation import AllocationRecord, is_of_owner
from tests.cluster.needs import control_plane_or_skip
from tests.e2e.conftest import small_pod
from tests.support.checker import lasting_problems, ledger_of
from tests.support.installed import OVERLAYS, SPEC, Installed, run_installed
from tests.support.kustomize import overlay
from tests.support.provisioning import CLASS, NAMESPACE, Requests, reason_of, text_of

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(600),
]

COMPONENT = OVERLAYS.parent / "components" / "provisioning-requests"
EXAMPLES = Path(__file__).parents[2] / "examples" / "provisioning-requests"
LIMIT_S = 120.0
BOOKING_S = 40
LARGE_MIB = 20_000
"""One such share fits on each of the four cards."""
CONSUME = "autoscaling.x-k8s.io/consume-provisioning-request"
Obj = dict[str, Any]


class Site:
    """The installation with the kind ProvisioningRequest."""

    def __init__(self, installed: Installed) -> None:
        self.installed = installed
        self.requests = Requests(installed)

    async def make(self, name: str, count: int, **parameters: str) -> None:
        """Create a request for large shares."""
        pod = small_pod("template", memory_mib=LARGE_MIB)
        template = {"metadata": {}, "spec": {**pod["spec"], "restartPolicy": "Always"}}
        await self.requests.make(name, template, count, **parameters)

    async def until(self, name: str, condition: str, reason: str) -> Obj:
        """Wait until a condition of a request is True for a reason; returns the request."""
        found: Obj = {}

        async def is_so() -> bool:
            found.update(await self.requests.get(name))
            return reason_of(found, condition) == reason

        await self.installed.until(f"{name} is {condition}", is_so, limit_s=LIMIT_S)
        return found

    async def held(self, name: str) -> list[AllocationRecord]:
        """Shares held for a request."""
        records = (await ledger_of(self.installed)).values()
        return [one for one in records if is_of_owner(one) and one.pod == name]

    async def until_held(self, name: str, count: int) -> None:
        async def are_held() -> bool:
            return len(await self.held(name)) == count

        await self.installed.until(f"{count} pods have held shares", are_held, limit_s=LIMIT_S)

    async def run(self, name: str, request: str = "") -> None:
        """Create a pod with a large share, and wait until it runs."""
        pod = small_pod(name, memory_mib=LARGE_MIB)
        if request:
            class_name = "autoscaling.x-k8s.io/provisioning-class-name"
            pod["metadata"]["annotations"] = {CONSUME: request, class_name: CLASS}
        await self.installed.client.create("pods", pod, NAMESPACE)

        async def runs() -> bool:
            return await self.installed.pod_is(name, "Running")

        await self.installed.until(f"{name} runs", runs, limit_s=LIMIT_S)

    async def devices_of_pods(self) -> Counter[tuple[str, ...]]:
        records = (await ledger_of(self.installed)).values()
        return Counter(
            devices_of(one) for one in records if one.op != "release" and not is_of_owner(one)
        )


def devices_of(record: AllocationRecord) -> tuple[str, ...]:
    """Node and devices of a record."""
    shares = [share.uuid for container in record.containers for share in container.shares]
    return (record.node, *shares)


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    control_plane_or_skip()
    folder = tmp_path_factory.mktemp("p")  # sockets of a node: 107 bytes at most
    shortened = {
        "provisioning_requests.booking_s": str(BOOKING_S),
        "provisioning_requests.retry_s": "1",
        "provisioning_requests.lease_s": "6",
        "provisioning_requests.discovery_s": "1",
        "fence_delay_s": "0.5",
    }
    scheduler = {**SPEC.settings["scheduler"], **shortened}
    spec = msgspec.structs.replace(SPEC, settings={**SPEC.settings, "scheduler": scheduler})
    mine = overlay(folder / "mine", OVERLAYS / "dev", [COMPONENT])
    async with run_installed(folder / "site", spec, overlay=mine) as up:
        site = Site(up)
        await site.requests.install()
        yield site


@pytest.fixture(autouse=True)
async def cleared(site: Site) -> AsyncIterator[None]:
    """Delete all objects, and wait until the ledger holds nothing."""
    yield
    client = site.installed.client
    for request in await site.requests.all():
        await site.requests.delete(request["metadata"]["name"])
    for job in (await client.call("GET", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"))["items"]:
        path = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{job['metadata']['name']}"
        await client.call("DELETE", path, body={"propagationPolicy": "Background"})
    for pod in (await client.list("pods", NAMESPACE))["items"]:
        if not pod["metadata"].get("ownerReferences"):
            await client.delete("pods", pod["metadata"]["name"], NAMESPACE)

    async def is_empty() -> bool:
        records = (await ledger_of(site.installed)).values()
        pods = (await client.list("pods", NAMESPACE))["items"]
        return not pods and all(record.op == "release" for record in records)

    await site.installed.until("nothing is allocated or held", is_empty, limit_s=LIMIT_S)
    for template in (await client.call("GET", f"/api/v1/namespaces/{NAMESPACE}/podtemplates"))[
        "items"
    ]:
        name = template["metadata"]["name"]
        await client.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}/podtemplates/{name}")


async def test_pods_that_name_the_request_run_on_its_devices(site: Site) -> None:
    await site.make("three", 3)
    await site.until("three", "Provisioned", "CapacityIsFound")
    held = Counter(devices_of(record) for record in await site.held("three"))
    assert sum(held.values()) == 3
    await site.run("stranger")  # the fourth card
    assert not await site.devices_of_pods() & held
    for name in ("a", "b", "c"):
        await site.run(name, "three")
    assert not held - await site.devices_of_pods()
    await site.until("three", "BookingExpired", "CapacityBookingConsumed")
    await site.until_held("three", 0)
    verifier = site.installed.verifier()
    assert await lasting_problems(site.installed, verifier, namespace=NAMESPACE) == []


async def test_example_is_provisioned_and_its_pods_run(site: Site) -> None:
    await site.installed.kubectl("apply", "-f", str(EXAMPLES / "request.yaml"))
    await site.until("two-shares", "Provisioned", "CapacityIsFound")
    assert len(await site.held("two-shares")) == 2
    await site.installed.kubectl("apply", "-f", str(EXAMPLES / "job.yaml"))
    await site.until("two-shares", "BookingExpired", "CapacityBookingConsumed")


async def test_request_waits_for_devices_and_its_booking_ends(site: Site) -> None:
    await site.run("blocker")
    await site.make("four", 4)

    async def is_refused() -> bool:
        request = await site.requests.get("four")
        text = "no room for 4 pods at once: pod set four: 3 of 4 would fit now"
        return text_of(request, "Provisioned") == text

    await site.installed.until("the request says why it waits", is_refused, limit_s=LIMIT_S)
    await site.make("impatient", 4, noRetry="true")
    failed = await site.until("impatient", "Failed", "CapacityIsNotFound")
    assert "3 of 4 would fit now" in text_of(failed, "Failed")
    await site.installed.client.delete("pods", "blocker", NAMESPACE)
    await site.until("four", "Provisioned", "CapacityIsFound")
    assert len(await site.held("four")) == 4
    await site.until("four", "BookingExpired", "CapacityReservationTimeExpired")
    await site.until_held("four", 0)


async def test_restart_of_the_scheduler_keeps_the_devices_and_deletion_releases(
    site: Site,
) -> None:
    await site.make("two", 2)
    await site.until("two", "Provisioned", "CapacityIsFound")
    before = {(one.pod_uid, one.allocation_id) for one in await site.held("two")}
    scheduler = site.installed.processes["scheduler"]
    await scheduler.kill()
    scheduler.start()
    await site.installed.ready("scheduler")
    assert {(one.pod_uid, one.allocation_id) for one in await site.held("two")} == before
    await site.requests.delete("two")
    await site.until_held("two", 0)
