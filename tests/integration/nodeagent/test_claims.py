# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims on one node: slices, prepare, containers, unprepare, across restarts.

The test plays kube-scheduler and our scheduler: it allocates and reserves claims, and writes the
ledger's records of them.
"""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest
from msgspec.structs import replace

from hami_common.dra import names
from hami_common.dra.claims import ResourceClaim
from hami_common.events.allocation import CLAIM, AllocationRecord
from hami_common.kubeletapi import dra, dra_grpc
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.pods import annotations
from hami_common.pods.signing import SignedPlacement
from hami_sim.apiserver.dra import check_slice
from hami_sim.natsd import NatsServer
from hami_sim.process import Process
from tests.integration.nodeagent.plane import NODE, SHOW, Ask, Obj, Plane, run_plane, until
from tests.integration.nodeagent.test_agent_process import write_config

pytestmark = pytest.mark.anyio

SLICES = f"resourceslices.{names.GROUP}"
CLAIMS = f"resourceclaims.{names.GROUP}"
CDI_ENV = "CUDA_DEVICE_MEMORY_LIMIT_0"


LIMITS = "cat /etc/hami/limits"


def _user(name: str, share: str, *, command: str = SHOW) -> Obj:
    """Return a container that uses the share of a container."""
    return {
        "name": name,
        "image": "simulated",
        "command": ["sh", "-c", command],
        "resources": {"claims": [{"name": "hami", "request": f"{share}-nvidia"}]},
    }


class Claims:
    """A plane with an agent that serves claims."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.kube = plane.kube
        self.cdi = plane.directory / "cdi"
        self.regions = plane.directory / "regions"
        self.state = plane.directory / "state"
        self.process: Process | None = None

    def start(self) -> None:
        """Start the agent."""
        config = self.plane.directory / "agent.toml"
        write_config(self.plane, config)
        kubelet = self.plane.kubelet
        config.write_text(
            f"{config.read_text()}\n"
            f'simulated_control = "{self.plane.directory / "control.json"}"\n'
            "[health]\nprobes_to_recover = 2\nrecover_s = 0.3\n"
            "[dra]\nenabled = true\n"
            f'registry_dir = "{kubelet.plugins_registry}"\n'
            f'plugin_dir = "{self.plane.directory / "dra"}"\n'
            f'cdi_dir = "{self.cdi}"\n'
            f'region_dir = "{self.regions}"\n'
            "prepare_wait_s = 0.3\nwrite_s = 0.1\n"
        )
        self.process = Process(
            "agent",
            [sys.executable, "-m", "hami_nodeagent", "--config", str(config)],
            log=self.plane.directory / "agent.log",
        )
        self.process.start()

    async def kill(self) -> None:
        """End the agent without a chance to clean up."""
        assert self.process is not None
        await self.process.kill()

    async def slices(self) -> list[Obj]:
        """List the slices in the API server."""
        return list((await self.kube.list(SLICES))["items"])

    async def device(self, index: int) -> Obj:
        """Return a device as it is published; waits for the slices."""
        found: list[Obj] = []

        async def is_published() -> bool:
            found[:] = [
                one
                for item in await self.slices()
                for one in item["spec"].get("devices") or ()
                if one["attributes"]["index"] == {"int": index}
            ]
            return bool(found)

        await until(is_published)
        return found[0]

    async def create(self, name: str, *requests: str) -> Obj:
        """Create a claim."""
        asked = [{"name": one, "exactly": {"deviceClassName": "hami-share"}} for one in requests]
        return await self.kube.create(
            CLAIMS,
            {"metadata": {"name": name}, "spec": {"devices": {"requests": asked}}},
            "default",
        )

    async def pod(self, name: str, claim: str, *requests: str, **metadata: Any) -> Obj:
        """Create a pod with a container for each request, on the node."""
        return await self.kube.create(
            "pods",
            {
                "metadata": {"name": name, **metadata},
                "spec": {
                    "nodeName": NODE,
                    "terminationGracePeriodSeconds": 0,
                    "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
                    "containers": [
                        {
                            "name": request,
                            "image": "simulated",
                            "command": ["sh", "-c", SHOW],
                            "resources": {"claims": [{"name": "gpu", "request": request}]},
                        }
                        for request in requests
                    ],
                },
            },
            "default",
        )

    async def allocate(
        self, claim: Obj, pod: Obj, *given: tuple[str, int, int, int]
    ) -> AllocationRecord:
        """Write the claim's allocation (request, device, MiB, percent); return the record of it."""
        results = [
            {
                "request": request,
                "driver": names.DRIVER,
                "pool": names.pool_name(NODE),
                "device": names.device_name(self.plane.devices[index].uuid),
                "shareID": f"00000000-0000-4000-8000-{number:012}",
                "consumedCapacity": {"memory": f"{mib}Mi", "cores": str(cores), "slots": "1"},
            }
            for number, (request, index, mib, cores) in enumerate(given)
        ]
        metadata = claim["metadata"]
        changed = await self.kube.patch(
            CLAIMS,
            metadata["name"],
            {
                "status": {
                    "allocation": {"devices": {"results": results}},
                    "reservedFor": [
                        {
                            "resource": "pods",
                            "name": pod["metadata"]["name"],
                            "uid": pod["metadata"]["uid"],
                        }
                    ],
                }
            },
            namespace="default",
            subresource="status",
        )
        return AllocationRecord(
            op="reserve",
            allocation_id=msgspec.convert(changed, ResourceClaim).allocation_id(),
            node=NODE,
            pod_uid=metadata["uid"],
            namespace="default",
            pod=metadata["name"],
            containers=tuple(
                ContainerShares(
                    name=request,
                    kind="app",
                    shares=tuple(
                        Share(
                            vendor="nvidia",
                            uuid=self.plane.devices[index].uuid,
                            memory_mib=mib,
                            core_pct=cores,
                        )
                        for name, index, mib, cores in given
                        if name == request
                    ),
                )
                for request in dict.fromkeys(one[0] for one in given)
            ),
            time_s=1.0,
            origin=CLAIM,
        )

    async def own(
        self, pod: str, claim: str, *given: tuple[str, int, int, int]
    ) -> tuple[Obj, AllocationRecord]:
        """Create a pod as after admission, its claim and its allocation; return it and its record.

        ``given`` as for ``allocate``, by container. An init container uses the request of the
        first. The pod is not bound yet.
        """
        names_of = list(dict.fromkeys(one[0] for one in given))
        containers = [_user(name, name) for name in names_of]
        created = await self.kube.create(
            "pods",
            {
                "metadata": {
                    "name": pod,
                    "labels": {annotations.MANAGED_LABEL: "true"},
                    "annotations": {annotations.CLAIMED_RESOURCES: "{}"},
                },
                "spec": {
                    "terminationGracePeriodSeconds": 0,
                    "schedulerName": "hami-scheduler",
                    "resourceClaims": [{"name": "hami", "resourceClaimName": claim}],
                    "initContainers": [_user("load", names_of[0], command=LIMITS)],
                    "containers": containers,
                },
            },
            "default",
        )
        uid = created["metadata"]["uid"]
        asked = [
            {"name": f"{one}-nvidia", "exactly": {"deviceClassName": "hami-share"}}
            for one in names_of
        ]
        owner = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid, "controller": True}
        made = await self.kube.create(
            CLAIMS,
            {
                "metadata": {
                    "name": claim,
                    "labels": {annotations.MANAGED_LABEL: "true"},
                    "ownerReferences": [owner],
                },
                "spec": {"devices": {"requests": asked}},
            },
            "default",
        )
        requests = [(f"{name}-nvidia", *share) for name, *share in given]
        record = await self.allocate(made, created, *requests)  # type: ignore[arg-type] # as given
        containers_of = tuple(
            replace(one, name=one.name.removesuffix("-nvidia")) for one in record.containers
        )
        return made, replace(
            record,
            allocation_id=f"allocation-of-{pod}",
            pod_uid=uid,
            pod=pod,
            containers=containers_of,
            origin="",
            claim=claim,
        )

    def files_of(self, uid: str, owner: str = "") -> list[Path]:
        """List what is on the host for a claim; ``owner``: uid of the pod that owns it."""
        places = [
            self.cdi / f"hami-{uid}.json",
            self.regions / (owner or uid),
            self.state / "limits" / (owner or uid),
            self.state / "claims" / f"{uid}.json",
        ]
        return [one for one in places if one.exists()]

    async def annotate(self, record: AllocationRecord, sequence: int) -> None:
        """Give a bound pod the signed placement of a record, as a resize does."""
        signed = self.plane.signer.sign(
            SignedPlacement(
                pod_uid=record.pod_uid,
                namespace=record.namespace,
                pod=record.pod,
                allocation_id=record.allocation_id,
                ledger_seq=sequence,
                placement=Placement(node=NODE, containers=record.containers),
                claim=record.claim,
            )
        )
        change = {"metadata": {"annotations": {annotations.ALLOCATION: signed}}}
        await self.kube.patch("pods", record.pod, change, namespace="default")

    async def says(self, pod: str, *words: str) -> str:
        """Wait for an Event of the pod with these words; return its message."""
        found: list[str] = []

        async def is_there() -> bool:
            events = (await self.kube.list("events", "default"))["items"]
            found[:] = [
                str(one["message"])
                for one in events
                if one["involvedObject"]["name"] == pod
                and all(word in one["message"] for word in words)
            ]
            return bool(found)

        await until(is_there)
        return found[0]


@pytest.fixture
async def claims(short_path: Path, nats_server: NatsServer) -> AsyncIterator[Claims]:
    """A node without its agent, whose kubelet retries at once."""
    async with served(short_path, nats_server) as found:
        yield found


@asynccontextmanager
async def served(directory: Path, nats: NatsServer) -> AsyncIterator[Claims]:
    cdi = directory / "cdi"
    cdi.mkdir()
    async with run_plane(
        directory, nats, cdi_directories=(str(cdi),), retry_s=0.1, claims_sync_s=0.5
    ) as plane:
        found = Claims(plane)
        try:
            yield found
        finally:
            if found.process is not None:
                await found.process.stop()


def is_gone(find: Callable[[], list[Path]]) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return not find()

    return look


async def test_pod_with_a_claim_runs_once_the_ledger_confirms_it_and_leaves_nothing(
    claims: Claims,
) -> None:
    plane = claims.plane
    claims.start()
    shown = await claims.device(1)
    assert not [cause for one in await claims.slices() for cause in check_slice(one)]
    assert shown["capacity"]["memory"]["value"] == f"{plane.devices[1].memory_mib // 1024}Gi"
    claim = await claims.create("c", "main", "side")
    uid = claim["metadata"]["uid"]
    pod = await claims.pod("web", "c", "main", "side")
    record = await claims.allocate(claim, pod, ("main", 1, 3000, 30), ("side", 2, 1000, 0))
    message = await claims.says("web", "hami: ledger-unknown: ")
    assert "the ledger has no record of claim default/c" in message
    assert (await plane.pod("web"))["status"]["phase"] == "Pending"
    assert not claims.files_of(uid)
    smaller = replace(record.containers[0].shares[0], memory_mib=2000)
    other = replace(record.containers[0], shares=(smaller,))
    await plane.reserve(replace(record, containers=(other, record.containers[1])))
    assert "2000 MiB" in await claims.says("web", "hami: ledger-mismatch: ")
    await plane.reserve(record)
    await plane.until_phase("web", "Running")
    environment = await plane.environment("web", "main")
    assert environment["device.0.uuid"] == plane.devices[1].uuid
    assert environment["device.0.memory_mib"] == "3000"
    assert environment["device.0.core_pct"] == "30"
    assert environment["container"] == "main"
    assert environment[CDI_ENV] == "3000m"
    assert environment["NVIDIA_VISIBLE_DEVICES"] == plane.devices[1].uuid
    side = await plane.environment("web", "side")
    assert side["device.0.uuid"] == plane.devices[2].uuid
    assert side["devices"] == "1"
    await plane.until_state(uid, "prepared")
    spec = (claims.cdi / f"hami-{uid}.json").read_bytes()
    assert len(claims.files_of(uid)) == 4

    await claims.kill()
    (claims.cdi / f"hami-{uid}.json").unlink()
    claims.start()
    second = await claims.pod("again", "c", "main")
    await claims.kube.patch(
        CLAIMS,
        "c",
        {
            "status": {
                "reservedFor": [
                    {
                        "resource": "pods",
                        "name": one["metadata"]["name"],
                        "uid": one["metadata"]["uid"],
                    }
                    for one in (pod, second)
                ]
            }
        },
        namespace="default",
        subresource="status",
    )
    await prepare_again(claims, claim)
    assert (claims.cdi / f"hami-{uid}.json").read_bytes() == spec
    await plane.until_phase("again", "Running")

    for name in ("web", "again"):
        await claims.kube.delete("pods", name, "default")
    await until(is_gone(lambda: claims.files_of(uid)))

    async def is_reported() -> bool:
        story = await plane.story(uid)
        return [(one.state, one.code) for one in story] == [
            ("bound", ""),
            ("prepared", ""),
            ("prepared", "unprepared"),
        ]

    await until(is_reported)


@pytest.mark.timeout(180)
async def test_pod_that_owns_its_claim_has_the_states_and_limits_of_a_pod(claims: Claims) -> None:
    plane = claims.plane
    claims.start()
    await claims.device(1)
    claim, record = await claims.own("web", "c", ("main", 1, 3000, 30), ("side", 2, 1000, 0))
    uid = claim["metadata"]["uid"]
    other = replace(record, claim="", containers=record.containers[:1])
    await plane.reserve(other)
    sequence = await plane.reserve(record)
    await plane.bind(record, sequence)
    await plane.until_phase("web", "Running")
    main, side = [await plane.environment("web", name) for name in ("main", "side")]
    assert main["device.0.uuid"] == plane.devices[1].uuid
    assert main["device.0.memory_mib"] == "3000"
    assert main[CDI_ENV] == "3000m"
    assert side["device.0.memory_mib"] == "1000"
    assert side["container"] == "side"
    first = plane.kubelet.logs("web", "load")
    assert "container=main\n" in first
    assert "device.0.memory_mib=3000\n" in first
    await plane.until_state(record.pod_uid, "running")
    spec = (claims.cdi / f"hami-{uid}.json").read_bytes()
    assert len(claims.files_of(uid, record.pod_uid)) == 4

    # The reboot loses the CDI file; a resize arrives while the agent is down.
    await claims.kill()
    (claims.cdi / f"hami-{uid}.json").unlink()
    claims.start()
    await prepare_again(claims, claim)
    assert (claims.cdi / f"hami-{uid}.json").read_bytes() == spec
    await claims.kill()
    shares = record.containers[0].shares
    grown = replace(record.containers[0], shares=(replace(shares[0], memory_mib=4000),))
    resized = replace(record, op="resize", containers=(grown, record.containers[1]))
    sequence = await plane.reserve(resized)
    await claims.annotate(resized, sequence)
    claims.start()
    file = claims.state / "limits" / record.pod_uid / "main" / "limits"

    async def is_rewritten() -> bool:
        return "memory_mib=4000\n" in file.read_text()

    await until(is_rewritten)

    async def is_taken_off() -> bool:
        """The slice has the difference: kube-scheduler subtracts what the claim consumes."""
        total = plane.devices[1].memory_mib - 1000
        return bool((await claims.device(1))["capacity"]["memory"]["value"] == f"{total}Mi")

    await until(is_taken_off)
    await prepare_again(claims, claim)
    await claims.kube.delete("pods", "web", "default")
    await until(is_gone(lambda: claims.files_of(uid, record.pod_uid)))
    assert [(one.state, one.code) for one in await plane.story(record.pod_uid)] == [
        ("bound", ""),
        ("prepared", ""),
        ("running", ""),
    ]


async def prepare_again(claims: Claims, claim: Obj) -> None:
    """Call the agent as kubelet does after its own restart."""
    socket = claims.plane.directory / "dra" / "dra.sock"
    asked = dra.Claim(namespace="default", uid=claim["metadata"]["uid"], name="c")
    error = ["not called"]

    async def is_prepared() -> bool:
        if not socket.exists():
            return False
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            stub = dra_grpc.DRAPluginStub(channel)
            try:
                answer = await stub.NodePrepareResources(
                    dra.NodePrepareResourcesRequest(claims=[asked])
                )
            except grpc.aio.AioRpcError:
                return False
        error[:] = [answer.claims[asked.uid].error]
        return not error[0]

    await until(is_prepared)


@pytest.mark.timeout(180)
async def test_health_of_a_claims_device_is_in_the_status_of_the_pod(claims: Claims) -> None:
    plane = claims.plane
    claims.start()
    await claims.device(1)
    claim = await claims.create("c", "main")
    pod = await claims.pod("web", "c", "main")
    await plane.reserve(await claims.allocate(claim, pod, ("main", 1, 3000, 30)))
    await plane.until_phase("web", "Running")

    async def until_health(wanted: str) -> None:
        async def is_shown() -> bool:
            (status,) = (await plane.pod("web"))["status"]["containerStatuses"]
            shown = status.get("allocatedResourcesStatus") or []
            healths = [one["health"] for found in shown for one in found["resources"]]
            return [found["name"] for found in shown] == ["claim:gpu/main"] and healths == [wanted]

        await until(is_shown)

    await until_health("Healthy")
    plane.control({"devices": {"1": {"lost": "the device fell off the bus"}}})
    await until_health("Unhealthy")

    async def is_tainted() -> bool:
        taints = (await claims.device(1)).get("taints") or ()
        return [one["key"] for one in taints] == [names.UNHEALTHY]

    await until(is_tainted)
    plane.control({})
    await until_health("Healthy")


async def test_slices_follow_pods_and_come_back_when_they_are_deleted(claims: Claims) -> None:
    plane = claims.plane
    claims.start()
    await claims.device(0)
    await plane.offered(128)
    before = plane.devices[0].memory_mib
    await plane.place("web", Ask(shares=((0, 4096),)))

    async def is_less() -> bool:
        value = (await claims.device(0))["capacity"]["memory"]["value"]
        return bool(value == f"{(before - 4096) // 1024}Gi")

    await until(is_less)
    (old,) = await claims.slices()
    await claims.kube.delete(SLICES, old["metadata"]["name"])

    async def is_back() -> bool:
        found = await claims.slices()
        return bool(found) and found[0]["metadata"]["uid"] != old["metadata"]["uid"]

    await until(is_back)
    assert claims.process is not None
    await claims.process.stop()
    config = plane.directory / "agent.toml"
    config.write_text(config.read_text().replace("enabled = true", "enabled = false"))
    claims.process.start()

    async def are_gone() -> bool:
        return not await claims.slices()

    await until(are_gone)
