# SPDX-License-Identifier: Apache-2.0
"""Kueue v0.15 on a real control plane: Workloads are admitted once their devices are held.

The shipped manifests with the component kueue, and Kueue's own program. Memory in MiB.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from hami_common.events.allocation import AllocationRecord, is_of_owner, owner_of
from hami_common.model.placement import booked_by_device
from tests.cluster.needs import control_plane_or_skip
from tests.e2e.conftest import small_pod
from tests.support.checker import lasting_problems, ledger_of
from tests.support.installed import OVERLAYS, SPEC, Installed, run_installed
from tests.support.kueue import (
    CHECK,
    NAMESPACE,
    OTHER_CHECK,
    QUEUE,
    RACK_LABEL,
    RACKS_QUEUE,
    REQUESTS_CHECK,
    REQUESTS_QUEUE,
    WAITING_QUEUE,
    Kueue,
    check_of,
    container,
    has,
    kueue_or_skip,
)
from tests.support.kustomize import overlay
from tests.support.provisioning import Requests, reason_of

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(600),
]

COMPONENTS = [
    OVERLAYS.parent / "components" / name
    for name in ("kueue", "provisioning-requests", "advertise-amounts")
]
EXAMPLES = Path(__file__).parents[2] / "examples" / "kueue"
LIMIT_S = 120.0
LEASE_S = 6
CARD_MIB = 24_576
"""Memory of each of the four cards, two on each node."""
QUOTA = {
    "nvidia.com/gpu": "40",
    "nvidia.com/gpumem": "400000",
    "nvidia.com/gpumem-percentage": "4000",
    "nvidia.com/gpucores": "4000",
}
TWO_SHARES = {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "9000"}
"""Two such pods fill a node: each takes shares of both of its cards."""
Obj = dict[str, Any]


class Site:
    """The installation with Kueue."""

    def __init__(self, installed: Installed, kueue: Kueue) -> None:
        self.installed = installed
        self.kueue = kueue
        self._replicas = 0

    async def until(self, what: str, condition: Callable[[Obj | None], bool], job: str) -> Obj:
        """Wait for a state of a Job's Workload; returns the Workload."""
        found: Obj | None = None

        async def holds() -> bool:
            nonlocal found
            found = await self.kueue.workload_of(job)
            return condition(found)

        await self.installed.until(what, holds, limit_s=LIMIT_S)
        return found or {}

    async def held(self, workload: Obj) -> list[AllocationRecord]:
        """Shares held for a Workload."""
        uid = workload["metadata"]["uid"]
        return [
            record
            for record in (await ledger_of(self.installed)).values()
            if is_of_owner(record) and owner_of(record) == uid
        ]

    async def until_held(self, workload: Obj, count: int) -> None:
        """Wait until shares for so many pods are held."""

        async def are_held() -> bool:
            return len(await self.held(workload)) == count

        await self.installed.until(f"{count} pods have held shares", are_held, limit_s=LIMIT_S)

    async def pods_of(self, job: str) -> list[Obj]:
        """Pods of a Job that run."""
        pods = (await self.installed.client.list("pods", NAMESPACE))["items"]
        return [
            pod
            for pod in pods
            if (pod["metadata"].get("labels") or {}).get("job-name") == job
            and pod["status"].get("phase") == "Running"
        ]

    async def until_ready(self, job: str) -> Obj:
        """Wait until our check of a Job's Workload is ready."""
        return await self.until(
            f"{job} is ready", lambda workload: check_of(workload).get("state") == "Ready", job
        )

    async def until_running(self, job: str, count: int) -> None:
        """Wait until so many pods of a Job run."""

        async def run() -> bool:
            return len(await self.pods_of(job)) == count

        await self.installed.until(f"{count} pods of {job} run", run, limit_s=LIMIT_S)

    async def take_leadership(self) -> None:
        """Take the Lease of the election in the name of yet another replica."""
        self._replicas += 1
        path = "/apis/coordination.k8s.io/v1/namespaces/hami-system/leases/hami-placement"
        await self.installed.client.call(
            "PATCH",
            path,
            body={"spec": {"holderIdentity": f"another-{self._replicas}"}},
            headers={"Content-Type": "application/merge-patch+json"},
        )

    async def block(self, name: str, memory_mib: int, *, cpu: str = "0") -> None:
        """Run a pod that takes memory of one card, and CPU, on the first node."""
        node = SPEC.nodes[0].name
        pod = small_pod(name, memory_mib=memory_mib)
        pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": cpu}
        pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
        await self.installed.client.create("pods", pod, NAMESPACE)

        async def runs() -> bool:
            return await self.installed.pod_is(name, "Running")

        await self.installed.until(f"{name} runs", runs, limit_s=LIMIT_S)

    async def clear(self) -> None:
        """Delete all Jobs and pods, and wait until the ledger holds nothing."""
        client = self.installed.client
        jobs = await client.call("GET", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs")
        for job in jobs["items"]:
            await self.kueue.delete_job(job["metadata"]["name"])
        for pod in (await client.list("pods", NAMESPACE))["items"]:
            if not pod["metadata"].get("ownerReferences"):
                await client.delete("pods", pod["metadata"]["name"], NAMESPACE)

        async def is_empty() -> bool:
            records = (await ledger_of(self.installed)).values()
            pods = (await client.list("pods", NAMESPACE))["items"]
            return not pods and all(record.op == "release" for record in records)

        await self.installed.until("nothing is allocated or held", is_empty, limit_s=LIMIT_S)

    async def problems(self) -> list[str]:
        verifier = self.installed.verifier()
        return await lasting_problems(self.installed, verifier, namespace=NAMESPACE)


def devices_of(record: AllocationRecord) -> tuple[str, ...]:
    """Node and devices of a record."""
    shares = [share.uuid for container in record.containers for share in container.shares]
    return (record.node, *shares)


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    control_plane_or_skip()
    program = kueue_or_skip()
    folder = tmp_path_factory.mktemp("k")  # sockets of a node: 107 bytes at most
    shortened = {
        "kueue.requeue_s": "2",
        "kueue.lease_s": str(LEASE_S),
        "kueue.reject_after_s": "3",
        "kueue.discovery_s": "1",
        "kueue.leader_lease_s": "15",
        "kueue.unready_s": "4",
        "provisioning_requests.lease_s": str(LEASE_S),
        "provisioning_requests.discovery_s": "1",
        "fence_delay_s": "0.5",
    }
    scheduler = {**SPEC.settings["scheduler"], **shortened}
    spec = msgspec.structs.replace(SPEC, settings={**SPEC.settings, "scheduler": scheduler})
    mine = overlay(folder / "mine", OVERLAYS / "dev", COMPONENTS)
    async with run_installed(folder / "site", spec, overlay=mine) as up:
        kueue = Kueue(up, program)
        # Kueue looks for the kind at its start alone.
        await Requests(up).install()
        await kueue.install()
        site = Site(up, kueue)
        await kueue.make_checks()
        await kueue.make_requests_check()
        await kueue.make_queue(QUEUE, QUOTA)
        await kueue.make_queue(REQUESTS_QUEUE, QUOTA, checks=(REQUESTS_CHECK,))
        await kueue.make_racks()
        await kueue.make_queue(
            RACKS_QUEUE, {**QUOTA, "cpu": "100"}, checks=(CHECK, OTHER_CHECK), flavor="racks"
        )
        await kueue.make_queue(WAITING_QUEUE, QUOTA, checks=(CHECK, OTHER_CHECK))
        yield site
        await kueue.stop()


@pytest.fixture(autouse=True)
async def cleared(site: Site) -> AsyncIterator[None]:
    yield
    await site.clear()


async def test_fragmented_devices_keep_a_workload_waiting_and_room_admits_it(site: Site) -> None:
    """The quota and the sums of free memory suffice throughout."""
    await site.block("blocker", 20_000)
    assert 4 * CARD_MIB - 20_000 >= 4 * 2 * 9_000
    await site.kueue.submit("four", TWO_SHARES, pods=4)
    refused = "no room for 4 pods at once: pod set main: 2 of 4 would fit now"

    def is_refused(workload: Obj | None) -> bool:
        check = check_of(workload)
        return refused in check.get("message", "") and check["state"] in ("Pending", "Retry")

    await site.until("the Workload shows why it waits", is_refused, "four")
    await anyio.sleep(5)  # over some attempts it stays unadmitted, and nothing is held
    workload = await site.kueue.workload_of("four")
    assert workload is not None
    assert not has(workload, "Admitted")
    assert await site.pods_of("four") == []

    async def is_told() -> bool:
        events = await site.installed.client.list("events", NAMESPACE)
        return any(one["reason"] == "PlacementRetry" for one in events["items"])

    await site.installed.until("the retry has an Event", is_told, limit_s=LIMIT_S)
    assert await site.held(workload) == []
    await site.installed.client.delete("pods", "blocker", NAMESPACE)
    ready = await site.until_ready("four")
    held = Counter(devices_of(record) for record in await site.held(ready))
    await site.until("it is admitted", lambda one: has(one, "Admitted"), "four")
    await site.until_running("four", 4)
    uids = {pod["metadata"]["uid"] for pod in await site.pods_of("four")}
    bound = Counter(
        devices_of(record)
        for record in (await ledger_of(site.installed)).values()
        if record.op != "release" and record.pod_uid in uids
    )
    assert sum(bound.values()) == 4
    # Between Ready and this test's reading, pods may have taken over the first of the holds.
    assert not held - bound
    await site.until_held(ready, 0)
    assert await site.problems() == []


async def test_kueues_own_check_gets_devices_by_provisioning_requests(site: Site) -> None:
    """A request without a placement fails, and Kueue tries again; then pods take its devices."""
    await site.block("blocker", 20_000)
    await site.kueue.submit("by-requests", TWO_SHARES, pods=4, queue=REQUESTS_QUEUE)

    def is_refused(workload: Obj | None) -> bool:
        message = check_of(workload, REQUESTS_CHECK).get("message", "")
        return "no room for 4 pods at once" in message and "2 of 4 would fit now" in message

    await site.until("the Workload shows why it waits", is_refused, "by-requests")
    assert await site.pods_of("by-requests") == []
    await site.installed.client.delete("pods", "blocker", NAMESPACE)
    requests, provisioned = Requests(site.installed), ""

    async def is_provisioned() -> bool:
        nonlocal provisioned
        found = [one for one in await requests.all() if reason_of(one, "Provisioned")]
        provisioned = found[0]["metadata"]["name"] if found else ""
        return bool(found)

    await site.installed.until("a request is provisioned", is_provisioned, limit_s=LIMIT_S)
    records = (await ledger_of(site.installed)).values()
    held = Counter(devices_of(one) for one in records if is_of_owner(one))
    await site.until("it is admitted", lambda one: has(one, "Admitted"), "by-requests")
    await site.until_running("by-requests", 4)
    pods = await site.pods_of("by-requests")
    consume = "autoscaling.x-k8s.io/consume-provisioning-request"
    assert {pod["metadata"]["annotations"][consume] for pod in pods} == {provisioned}
    uids = {pod["metadata"]["uid"] for pod in pods}
    records = (await ledger_of(site.installed)).values()
    bound = Counter(devices_of(one) for one in records if one.pod_uid in uids)
    assert sum(bound.values()) == 4
    # Between Provisioned and this test's reading, pods may have taken over the first of the holds.
    assert not held - bound

    async def are_taken() -> bool:
        return not any(is_of_owner(one) for one in (await ledger_of(site.installed)).values())

    await site.installed.until("pods have taken all holds", are_taken, limit_s=LIMIT_S)
    assert await site.problems() == []


async def test_gang_runs_on_the_one_rack_that_kueue_chose_and_on_its_held_devices(
    site: Site,
) -> None:
    """The first rack has no CPU left, which Kueue counts and a search for devices does not.

    That search alone would choose it, because its devices are in use.
    """
    await site.block("blocker", 8_000, cpu="99")
    one = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "12000", "cpu": "2"}
    required = {"kueue.x-k8s.io/podset-required-topology": RACK_LABEL}
    await site.kueue.submit("gang", one, pods=2, queue=RACKS_QUEUE, annotations=required)
    ready = await site.until_ready("gang")
    held = Counter(devices_of(record) for record in await site.held(ready))
    second = SPEC.nodes[1].name
    assert [node for node, *_ in held.elements()] == [second] * 2
    await site.kueue.pass_other_check(ready)
    await site.until_running("gang", 2)
    pods = await site.pods_of("gang")
    assert {pod["spec"]["nodeName"] for pod in pods} == {second}
    assert {pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] for pod in pods} == {second}
    uids = {pod["metadata"]["uid"] for pod in pods}
    records = (await ledger_of(site.installed)).values()
    assert Counter(devices_of(record) for record in records if record.pod_uid in uids) == held
    await site.until_held(ready, 0)
    assert await site.problems() == []


async def test_example_is_admitted_and_runs(site: Site) -> None:
    for name in ("queue.yaml", "job.yaml"):
        await site.installed.kubectl("apply", "-f", str(EXAMPLES / name))
    await site.until_running("two-shares", 2)
    assert await site.problems() == []


async def test_of_two_workloads_that_fit_alone_exactly_one_is_ready(site: Site) -> None:
    """The quota would admit both; each needs three of the four places."""
    for name in ("a", "b"):
        await site.kueue.submit(name, TWO_SHARES, pods=3, queue=WAITING_QUEUE)
    states: dict[str, str] = {}

    async def is_decided() -> bool:
        for name in ("a", "b"):
            check = check_of(await site.kueue.workload_of(name))
            states[name] = check.get("state", "")
            if "no room for 3 pods at once" in check.get("message", ""):
                states[name] = "refused"
        return sorted(states.values()) == ["Ready", "refused"]

    await site.installed.until("one is ready, one refused", is_decided, limit_s=LIMIT_S)
    winner = min(states, key=lambda name: states[name] != "Ready")
    (loser,) = states.keys() - {winner}
    await anyio.sleep(5)  # over some attempts of the other, and renewals of the hold
    workload = await site.kueue.workload_of(winner)
    assert workload is not None
    assert check_of(workload)["state"] == "Ready"
    assert len(await site.held(workload)) == 3
    assert check_of(await site.kueue.workload_of(loser))["state"] != "Ready"
    await site.kueue.delete_job(winner)
    assert len(await site.held(await site.until_ready(loser))) == 3


async def test_eviction_and_deletion_free_the_hold(site: Site) -> None:
    await site.kueue.submit("a", TWO_SHARES, pods=4, queue=WAITING_QUEUE)
    workload = await site.until_ready("a")
    assert len(await site.held(workload)) == 4
    await site.kueue.deactivate(workload)
    await site.until_held(workload, 0)
    await site.kueue.submit("b", TWO_SHARES, pods=4, queue=WAITING_QUEUE)
    other = await site.until_ready("b")
    await site.kueue.delete_job("b")
    await site.until_held(other, 0)


async def test_lease_frees_the_hold_of_a_replica_that_stopped(site: Site) -> None:
    """Another replica would have the election's Lease; it answers nothing here."""
    await site.kueue.submit("a", TWO_SHARES, pods=2, queue=WAITING_QUEUE)
    workload = await site.until_ready("a")

    async def are_gone() -> bool:
        await site.take_leadership()
        return await site.held(workload) == []

    await site.installed.until("the lease freed the hold", are_gone, limit_s=LIMIT_S)
    # The Workload has not started: it gets its devices again, or would go back to its queue.
    await site.until_held(workload, 2)
    assert check_of(await site.kueue.workload_of("a"))["state"] == "Ready"


async def test_outage_of_the_scheduler_leaves_workloads_pending(site: Site) -> None:
    """A killed scheduler keeps its holds for the lease; then, or at the next start, they go."""
    await site.kueue.submit("a", TWO_SHARES, pods=2, queue=WAITING_QUEUE)
    held = await site.until_ready("a")
    scheduler = site.installed.processes["scheduler"]
    await scheduler.kill()
    try:
        await site.kueue.submit("b", TWO_SHARES, pods=2, queue=WAITING_QUEUE)
        await site.until("quota is reserved", lambda one: has(one, "QuotaReserved"), "b")
        await anyio.sleep(3)
        assert check_of(await site.kueue.workload_of("b"))["state"] == "Pending"
        check = await site.kueue.call("GET", "admissionchecks", CHECK)
        assert check["status"]["conditions"][0]["status"] == "True"
        assert len(await site.held(held)) == 2
        await site.kueue.delete_job("a")
    finally:
        scheduler.start()
        await site.installed.ready("scheduler")
    await site.until_held(held, 0)
    assert len(await site.held(await site.until_ready("b"))) == 2
    check = await site.kueue.call("GET", "admissionchecks", CHECK)
    assert check["status"]["conditions"][0]["status"] == "True"


async def test_request_beyond_every_device_is_rejected(site: Site) -> None:
    large = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(CARD_MIB + 1)}
    await site.kueue.submit("large", large)
    workload = await site.until(
        "it is deactivated",
        lambda one: one is not None and one["spec"].get("active") is False,
        "large",
    )
    texts: list[str] = []

    async def is_told() -> bool:
        events = (await site.installed.client.list("events", NAMESPACE))["items"]
        texts[:] = [
            one["message"]
            for one in events
            if one["involvedObject"]["uid"] == workload["metadata"]["uid"]
            and one["reason"] == "PlacementRejected"
        ]
        return bool(texts)

    await site.installed.until("the rejection has an Event", is_told, limit_s=LIMIT_S)
    assert len(texts) == 1
    assert "1 pod would not fit on the devices of all 2 nodes if nothing else used them" in texts[0]


def gpu(count: int = 0, memory_mib: int = 0, *, percent: int = 0, cores: int = 0) -> Obj:
    """Limits of a container."""
    amounts = {"gpu": count, "gpumem": memory_mib, "gpumem-percentage": percent, "gpucores": cores}
    return {f"nvidia.com/{name}": str(amount) for name, amount in amounts.items() if amount}


class Form(msgspec.Struct, frozen=True):
    """A form of request, what Kueue counts for it, and what the ledger holds."""

    containers: tuple[Obj, ...]
    kueue: Obj
    shares: int
    memory_mib: int
    cores: int = 0
    pods: int = 1
    init: tuple[Obj, ...] = ()


FORMS = {
    "share": Form((gpu(1, 3000),), gpu(1, 3000), 1, 3000),
    "two-devices": Form((gpu(2, 3000),), gpu(2, 3000), 2, 6000),
    "percent": Form((gpu(1, percent=25),), gpu(1, percent=25), 1, CARD_MIB // 4),
    "two-percent": Form((gpu(2, percent=25),), gpu(2, percent=25), 2, CARD_MIB // 2),
    "whole-card": Form((gpu(1),), gpu(1), 1, CARD_MIB, 100),
    "no-count": Form((gpu(memory_mib=3000),), gpu(memory_mib=3000), 1, 3000),
    "compute": Form((gpu(1, 3000, cores=30),), gpu(1, 3000, cores=30), 1, 3000, 30),
    "two-compute": Form((gpu(2, 3000, cores=30),), gpu(2, 3000, cores=30), 2, 6000, 60),
    "containers": Form((gpu(1, 1000), gpu(1, 2000)), gpu(2, 3000), 2, 3000),
    "beside-none": Form((gpu(1, 1000), {}), gpu(1, 1000), 1, 1000),
    "pods": Form((gpu(1, 2000),), gpu(3, 6000), 3, 6000, pods=3),
    "init": Form((gpu(1, 1000),), gpu(1, 4000), 1, 4000, init=(gpu(1, 4000),)),
}
"""Kueue sums the requests of containers as written in the template; one device's amount is not
multiplied by the number of devices, and defaults that admission adds are missing."""


async def test_counts_of_kueue_and_of_the_ledger(site: Site) -> None:
    """Equal, or different in the documented way (docs/kueue.md)."""
    for name, form in FORMS.items():
        init = [container(f"i{number}", one) for number, one in enumerate(form.init)]
        more: Obj = {"initContainers": init} if init else {}
        await site.kueue.submit(name, *form.containers, pods=form.pods, queue=WAITING_QUEUE, **more)
        workload = await site.until_ready(name)
        (assigned,) = workload["status"]["admission"]["podSetAssignments"]
        counted = {
            key: value
            for key, value in assigned["resourceUsage"].items()
            if key.startswith("nvidia.com/") and value != "0"
        }
        assert {key: mib(value) for key, value in counted.items()} == {
            key: int(value) for key, value in form.kueue.items()
        }, name
        booked = [
            amounts
            for record in await site.held(workload)
            for amounts in booked_by_device(record.containers).values()
        ]
        found = (
            sum(amounts.slots for amounts in booked),
            sum(amounts.memory_mib for amounts in booked),
            sum(amounts.core_pct for amounts in booked),
        )
        assert found == (form.shares, form.memory_mib, form.cores), name
        await site.kueue.delete_job(name)
        await site.until_held(workload, 0)


def mib(text: str) -> int:
    """A quantity of a device resource: Kueue may write 3000 as 3k."""
    return int(text[:-1]) * 1000 if text.endswith("k") else int(text)
