# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims, allocated by a kube-scheduler that does not know the ledger, beside our pods.

The slices are the test's own and never say what pods hold, as those of a stopped agent: so
kube-scheduler allocates more than is free, and only the ledger keeps devices within capacity. No
agent runs here; the test writes its states where they matter.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from hami_common.bus import subjects
from hami_common.dra.names import BOOKED, DRIVER, device_name, pool_name
from hami_common.errors import Unavailable
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.inventory import NodeDevices
from hami_common.runtime import natsio
from hami_sim.kube import Access
from hami_sim.kubescheduler import SchedulerSettings, SimScheduler
from hami_sim.natsd import NatsServer
from tests.contract.dra.support import CLAIMS, CLASSES, SLICES, claim, exactly, selector
from tests.integration.scheduler.site import SchedulerProcess, Site, open_site
from tests.support import ledgercheck
from tests.unit.scheduler.shell import builders

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

Obj = dict[str, Any]
CLASS = "hami"
NODE = "n1"
DRA = {"dra.enabled": True, "tick_s": 0.1, "dra.discovery_s": 0.2}
DEVICES = builders.devices(NODE, count=2, slots=16, memory_mib=16_000)


def slice_of(devices: NodeDevices) -> Obj:
    """The slice that an agent publishes for idle devices."""
    return {
        "metadata": {"name": f"{devices.node}-hami"},
        "spec": {
            "driver": DRIVER,
            "nodeName": devices.node,
            "pool": {"name": pool_name(devices.node), "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {
                    "name": device_name(device.uuid),
                    "allowMultipleAllocations": True,
                    "capacity": {
                        "memory": _capacity(f"{device.capacity_mib}Mi", least="1Mi", step="1Mi"),
                        "cores": _capacity("100", default="0", least="0"),
                        "slots": _capacity(str(device.slots), default="1", least="1"),
                    },
                }
                for device in devices.devices
            ],
        },
    }


def _capacity(value: str, *, least: str, default: str = "", **more: str) -> Obj:
    policy = {"default": default or value, "validRange": {"min": least, **more}}
    return {"value": value, "requestPolicy": policy}


class Cluster:
    """One node with two devices, the cluster's kube-scheduler, and schedulers of ours."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.kube = site.kube

    async def open(self) -> None:
        await self.site.add_node(DEVICES)
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
        status = {"capacity": {"cpu": "64", "memory": "64Gi", "pods": "110"}, "conditions": [ready]}
        await self.kube.patch("nodes", NODE, {"status": status}, subresource="status")
        await self.kube.create(SLICES, slice_of(DEVICES))
        spec = {"selectors": [selector(f'device.driver == "{DRIVER}"')]}
        await self.kube.create(CLASSES, {"metadata": {"name": CLASS}, "spec": spec})

    async def claim(self, name: str, memory: str, cores: str = "0") -> None:
        """Create a claim, and a pod of the same name that uses it."""
        request = exactly(CLASS)
        request["capacity"] = {"requests": {"memory": memory, "cores": cores}}
        await self.kube.create(CLAIMS, claim(name, request), "default")
        pod = {
            "metadata": {"name": name},
            "spec": {
                "schedulerName": "default-scheduler",
                "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}],
                "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
                "containers": [
                    {"name": "c", "image": "i:1", "resources": {"claims": [{"name": "gpu"}]}}
                ],
            },
        }
        await self.kube.create("pods", pod, "default")

    async def end_pod(self, name: str) -> None:
        await self.kube.delete("pods", name, "default", gracePeriodSeconds="0")

    async def allocated(self) -> set[str]:
        found = (await self.kube.list(CLAIMS, "default"))["items"]
        return {
            one["metadata"]["name"] for one in found if (one.get("status") or {}).get("allocation")
        }

    async def booked(self) -> dict[str, AllocationRecord]:
        """Live record by name, while the ledger can be read; capacity is judged each time."""
        records = await self.site.log()
        pods = await self.site.pods()
        ledgercheck.check(pods, records, verifier=self.site.verifier, capacity=[DEVICES])
        return {one.pod: one for one in records if one.op != "release"}

    async def until_booked(self, *names: str) -> dict[str, AllocationRecord]:
        """Wait until exactly these have records."""
        found: dict[str, AllocationRecord] = {}
        with anyio.move_on_after(60):
            while set(found := await self._booked()) != set(names):
                await anyio.sleep(0.05)
        assert sorted(found) == sorted(names)
        return found

    async def _booked(self) -> dict[str, AllocationRecord]:
        try:
            return await self.booked()
        except Unavailable:
            return {}

    async def until_allocated(self, *names: str) -> None:
        with anyio.fail_after(60):
            while await self.allocated() != set(names):
                await anyio.sleep(0.05)

    async def events(self, name: str) -> list[tuple[str, str]]:
        """(reason, message) of the Events on a claim."""
        found = (await self.kube.list("events", "default"))["items"]
        return [
            (one["reason"], one["message"])
            for one in found
            if one["involvedObject"]["kind"] == "ResourceClaim"
            and one["involvedObject"]["name"] == name
        ]

    async def conditions(self, name: str) -> list[tuple[str, str, str]]:
        """(status, reason, message) of the conditions ``BOOKED`` of the claim's devices."""
        status = (await self.kube.get(CLAIMS, name, "default"))["status"]
        return [
            (one["status"], one["reason"], one["message"])
            for device in status.get("devices", ())
            for one in device["conditions"]
            if one["type"] == BOOKED
        ]

    async def until_event(self, name: str) -> tuple[str, str]:
        with anyio.fail_after(60):
            while not (found := await self.events(name)):
                await anyio.sleep(0.05)
        return found[0]

    @asynccontextmanager
    async def scheduler(
        self, http: aiohttp.ClientSession, name: str = "s1"
    ) -> AsyncIterator[SchedulerProcess]:
        scheduler = self.site.scheduler(name, http, **DRA)
        await scheduler.start()
        await scheduler.until_ready()
        yield scheduler


@pytest.fixture
async def http(anyio_backend: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


@pytest.fixture
async def cluster(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Cluster]:
    async with open_site(tmp_path, nats_server) as site:
        opened = Cluster(site)
        await opened.open()
        access = Access(url=site.api.url, token=site.api.token)
        settings = SchedulerSettings(
            profiles=("default-scheduler",), initial_backoff_s=0.1, max_backoff_s=0.2
        )
        async with SimScheduler(access, settings):
            yield opened


async def test_claims_and_pods_share_devices_within_their_capacity(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    async with cluster.scheduler(http) as one, cluster.scheduler(http, "s2") as two:
        pods = [
            await cluster.site.add_pod(f"p{number}", mem_mib=3000, cores=5) for number in range(8)
        ]
        refused: list[str] = []
        async with anyio.create_task_group() as group:

            async def bind(number: int, pod: Obj) -> None:
                error = await (one, two)[number % 2].bind(pod, NODE)
                if error:
                    refused.append(error)

            for number, pod in enumerate(pods):
                group.start_soon(cluster.claim, f"c{number}", "3000Mi", "5")
                group.start_soon(bind, number, pod)
        # kube-scheduler counts claims alone, of which all fit; 10 shares of 3,000 MiB fit in fact.
        await cluster.until_allocated(*(f"c{number}" for number in range(8)))
        with anyio.fail_after(60):
            while len(booked := await cluster.booked()) < 10:
                await anyio.sleep(0.05)
        await anyio.sleep(0.5)
        booked = await cluster.booked()
        assert len(booked) == 10
        claims = [record for record in booked.values() if record.origin]
        assert {record.origin for record in claims} == {"claim"}
        assert 8 - len(refused) + len(claims) == 10
        for name in {f"c{number}" for number in range(8)} - booked.keys():
            assert (await cluster.until_event(name))[0] == "CardInsufficientMemory"


async def test_claim_that_does_not_fit_has_an_event_and_is_booked_after_a_pod_ended(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    async with cluster.scheduler(http) as scheduler:
        pods = [await cluster.site.add_pod(name, mem_mib=12_000) for name in ("p1", "p2")]
        for pod in pods:
            assert await scheduler.bind(pod, NODE) == ""
        await cluster.claim("c", "8000Mi")
        reason, message = await cluster.until_event("c")
        assert reason == "CardInsufficientMemory"
        assert message.startswith(f"CardInsufficientMemory: device GPU-{NODE}-0: ")
        refused = [("False", "CardInsufficientMemory", message)]
        with anyio.fail_after(60):
            while await cluster.conditions("c") != refused:
                await anyio.sleep(0.05)
        await cluster.until_booked("p1", "p2")
        # First fit chose the first device, so only the pod there matters.
        on_first = next(
            name
            for name, record in (await cluster.booked()).items()
            if record.containers[0].shares[0].uuid == f"GPU-{NODE}-0"
        )
        await cluster.end_pod(on_first)
        left = {"p1", "p2"} - {on_first}
        await cluster.until_booked("c", *left)
        assert len(await cluster.events("c")) == 1
        with anyio.fail_after(60):
            while (await cluster.conditions("c"))[0][:2] != ("True", "Booked"):
                await anyio.sleep(0.05)


async def test_claim_is_released_after_its_pod_ended(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    async with cluster.scheduler(http):
        await cluster.claim("c", "8000Mi", "30")
        found = await cluster.until_booked("c")
        (container,) = found["c"].containers
        assert [(s.memory_mib, s.core_pct) for s in container.shares] == [(8000, 30)]
        await cluster.end_pod("c")  # kube-controller-manager then drops the allocation
        await cluster.until_booked()
        await cluster.until_allocated()


async def test_scheduler_killed_at_any_point_is_followed_by_another(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    names = [f"c{number}" for number in range(12)]
    async with cluster.scheduler(http) as first:
        async with anyio.create_task_group() as group:
            for name in names[:6]:
                group.start_soon(cluster.claim, name, "2000Mi", "5")
            with anyio.fail_after(60):
                while not await cluster.booked():
                    await anyio.sleep(0.001)
            await first.process.kill()
        await cluster.end_pod("c0")
        for name in names[6:]:
            await cluster.claim(name, "2000Mi", "5")
        await cluster.until_allocated(*names[1:])
    async with cluster.scheduler(http):
        await cluster.until_booked(*names[1:])
        states = natsio.NatsBucket(cluster.site.bus, subjects.STATE_BUCKET)
        records = {one.allocation_id for one in (await cluster.booked()).values()}
        confirmed: set[str] = set()
        with anyio.move_on_after(60):
            while not records <= confirmed:
                await anyio.sleep(0.05)
                confirmed = {
                    codec.decode(one.value, StateRecord, what=one.key).allocation_id
                    for one in await states.latest()
                }
        assert records <= confirmed


async def test_lost_ledger_is_rebuilt_identically_from_claims_in_use(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    async with cluster.scheduler(http) as scheduler:
        pod = await cluster.site.add_pod("p", mem_mib=5000)
        assert await scheduler.bind(pod, NODE) == ""
        for name in ("c1", "c2", "c3"):
            await cluster.claim(name, "3000Mi")
        before = await cluster.until_booked("p", "c1", "c2", "c3")
        for name in ("p", "c1", "c2", "c3"):
            change = {"status": {"phase": "Running"}}
            await cluster.kube.patch(
                "pods", name, change, namespace="default", subresource="status"
            )
        await cluster.site.nats.stop()
        await cluster.site.nats.wipe()
        await cluster.claim("late", "1000Mi")
        await cluster.site.nats.start()
        with anyio.fail_after(60):
            while True:  # until the bus has its streams again
                try:
                    await cluster.site.put_devices(DEVICES)
                except Unavailable:
                    await anyio.sleep(0.1)
                else:
                    break
        after = await cluster.until_booked("p", "c1", "c2", "c3", "late")
        for name, record in before.items():
            assert _contents(after[name]) == _contents(record)


def _contents(record: AllocationRecord) -> tuple[object, ...]:
    return record.allocation_id, record.node, record.pod_uid, record.containers, record.origin
