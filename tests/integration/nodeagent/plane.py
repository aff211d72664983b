# SPDX-License-Identifier: Apache-2.0
"""One node with everything around its agent: real bus, simulated API server, kubelet and devices.

Scheduler and registry are played by the test: ``place`` writes a ledger record and binds the pod
with a signed annotation, in the order and with the delays that the test wants.
"""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import grpc.aio
import msgspec
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.codec import decode, encode
from hami_common.events.inventory import NodeDevices, NodeReport
from hami_common.kubeletapi import (
    deviceplugin,
    deviceplugin_grpc,
    podresources,
    podresources_grpc,
)
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.model.request import ContainerKind
from hami_common.pods import annotations, limits
from hami_common.pods.signing import SignedPlacement, Signer
from hami_common.ports import Expect
from hami_common.runtime.natsio import Bus, NatsBucket, connect, ensure_bus
from hami_common.runtime.service import ServiceContext
from hami_common.runtime.tasks import background
from hami_nodeagent.app import serve_agent
from hami_nodeagent.core.health import HealthRules
from hami_nodeagent.drivers.simulated.driver import SimulatedDriver, SimulatedDriverSettings
from hami_nodeagent.settings import DriversSettings, NvidiaSettings, Settings
from hami_nodeagent.shell.regions import region_path
from hami_sim.apiserver import ApiServer
from hami_sim.apiserver import Settings as ApiSettings
from hami_sim.hardware import profile as hardware
from hami_sim.kube import Access
from hami_sim.kubelet import KubeletSettings, SimKubelet, run_kubelet
from hami_sim.natsd import NatsServer
from tests.support.kubeclient import KubeClient

NODE = "gpu-a"
RESOURCE = "nvidia.com/gpu"
SHOW = "env | grep -E '^(NVIDIA|CUDA)' ; cat /etc/hami/limits 2>/dev/null; exec sleep 1000"
WAIT_S = 40.0
POLL_S = 0.02

Obj = dict[str, Any]


class Ask(Struct, frozen=True, kw_only=True):
    """One container of a pod to be made; ``shares`` are (device index, MiB)."""

    name: str = "main"
    kind: ContainerKind = "app"
    shares: tuple[tuple[int, int], ...] = ()
    memory_limit_mib: int = 0
    """Of each share, above its memory."""
    has_region: bool = False
    """Has a volume for the usage region."""
    command: str = SHOW


async def until(condition: Callable[[], Awaitable[bool]], *, within_s: float = WAIT_S) -> None:
    """Wait for a condition that another process fulfills."""
    with anyio.fail_after(within_s):
        while not await condition():
            await anyio.sleep(POLL_S)


class Plane:
    """The node and its surroundings."""

    def __init__(
        self,
        *,
        directory: Path,
        nats: NatsServer,
        api: ApiServer,
        kube: KubeClient,
        kubelet: SimKubelet,
        bus: Bus,
        devices: Sequence[Device],
    ) -> None:
        self.directory = directory
        self.nats = nats
        self.api = api
        self.kube = kube
        self.kubelet = kubelet
        self.bus = bus
        self.devices = tuple(devices)
        self.signer = Signer.generate()
        self.ledger = NatsBucket(bus, subjects.ALLOC_BUCKET)
        self.states = NatsBucket(bus, subjects.STATE_BUCKET)
        self.canonical = NatsBucket(bus, subjects.DEVICES_BUCKET)
        self._numbers = count(1)
        self.asks_by_pod: dict[str, tuple[Ask, ...]] = {}
        self.keys = directory / "trusted"
        self.keys.mkdir()
        (self.keys / "current.pub").write_bytes(self.signer.public_pem())
        api.kubeconfig(directory / "kubeconfig")

    # -- the agent

    def settings(self, **more: Any) -> Settings:
        """Settings of the agent under test."""
        given: dict[str, Any] = {
            "node_name": NODE,
            "nats_urls": [self.nats.url],
            "kubeconfig": str(self.directory / "kubeconfig"),
            "http_port": 0,
            "device_plugin_dir": str(self.kubelet.plugin_directory),
            "pod_resources_socket": str(self.kubelet.pod_resources_socket),
            "state_dir": str(self.directory / "state"),
            "trusted_keys_dir": str(self.keys),
            "injection": "env",
            "enforcement": "none",
            "start_timeout_s": 10.0,
            "check_s": 0.5,
            "outage_wait_s": 1.0,
            "devices_poll_s": 0.25,
            "bus_timeout_s": 1.0,
            "probe_s": 0.2,
            "drivers": DriversSettings(
                nvidia=NvidiaSettings(
                    simulated_profile=str(hardware.path_of("8xA100-40")),
                    simulated_control=str(self.directory / "control.json"),
                )
            ),
            **more,
        }
        return Settings(**given)

    @asynccontextmanager
    async def agent(
        self, *, offer: int | None = None, **more: Any
    ) -> AsyncIterator[ServiceContext[Settings]]:
        """An agent in this process, ready, and its ids known to kubelet (or ``offer`` of them)."""
        context = ServiceContext(service="nodeagent", settings=self.settings(**more))
        async with background() as group:
            await group.start(serve_agent, context)
            await self.offered(
                sum(device.slots for device in self.devices) if offer is None else offer
            )
            yield context
            context.stop()

    async def offered(self, amount: int) -> None:
        """Wait until the node offers so many ids."""

        async def is_offered() -> bool:
            status = (await self.kube.get("nodes", NODE)).get("status", {})
            return bool(status.get("allocatable", {}).get(RESOURCE, "0") == str(amount))

        await until(is_offered)

    @staticmethod
    def health(**rules: Any) -> HealthRules:
        """Rules of health for ``agent``."""
        return HealthRules(**rules)

    @asynccontextmanager
    async def plugin(self) -> AsyncIterator["deviceplugin_grpc.DevicePluginAsyncStub"]:
        """The agent's own service, called as kubelet would."""
        socket = self.kubelet.plugin_directory / "hami-nvidia.sock"
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            yield deviceplugin_grpc.DevicePluginStub(channel)

    async def may_start(self, ids: Sequence[str]) -> bool:
        """Report if the agent lets a container with these ids start."""
        async with self.plugin() as plugin:
            try:
                await plugin.PreStartContainer(
                    deviceplugin.PreStartContainerRequest(devices_ids=ids)
                )
            except grpc.aio.AioRpcError as error:
                if "not-granted" not in str(error.details()):
                    raise
                return False
            return True

    def control(self, text: Mapping[str, object]) -> None:
        """Steer the simulated devices."""
        (self.directory / "control.json").write_text(json.dumps(text))

    # -- the registry and the scheduler

    async def publish_devices(self) -> None:
        """Publish the record that the registry would make of the agent's report."""
        canonical = NodeDevices(
            node=NODE,
            vendor="nvidia",
            boot_id="",
            seq=0,
            time_s=0.0,
            config_generation=1,
            devices=self.devices,
        )
        await self.canonical.append(subjects.devices_key(NODE, "nvidia"), encode(canonical))

    async def create(
        self, name: str, *asks: Ask, through_webhook: bool = True, **metadata: Any
    ) -> Obj:
        """A pod as it is after admission, not bound yet."""
        self.asks_by_pod[name] = asks
        spec: Obj = {
            "restartPolicy": metadata.pop("restart", "Always"),
            "terminationGracePeriodSeconds": 0,
            "schedulerName": metadata.pop("scheduler", "hami-scheduler"),
            "containers": [_container(ask, through_webhook) for ask in asks if ask.kind == "app"],
            "initContainers": [
                _container(ask, through_webhook) for ask in asks if ask.kind != "app"
            ],
        }
        if through_webhook:
            spec["volumes"] = [_limits_volume(ask.name) for ask in asks if ask.shares]
            spec["volumes"] += [_region_volume(ask.name) for ask in asks if ask.has_region]
        return await self.kube.create(
            "pods", {"metadata": {"name": name, **metadata}, "spec": spec}, "default"
        )

    def record(self, pod: Obj) -> AllocationRecord:
        """The ledger record for a pod made by ``create``."""
        metadata = pod["metadata"]
        asks = sorted(self.asks_by_pod[metadata["name"]], key=lambda ask: ask.kind == "app")
        return AllocationRecord(
            op="reserve",
            allocation_id=f"allocation-{next(self._numbers)}",
            node=NODE,
            pod_uid=metadata["uid"],
            namespace="default",
            pod=metadata["name"],
            containers=tuple(
                ContainerShares(
                    name=ask.name,
                    kind=ask.kind,
                    shares=tuple(
                        Share(
                            vendor="nvidia",
                            uuid=self.devices[index].uuid,
                            memory_mib=mib,
                            memory_limit_mib=ask.memory_limit_mib,
                        )
                        for index, mib in ask.shares
                    ),
                )
                for ask in asks
                if ask.shares
            ),
            time_s=1.0,
            lease_s=30.0,
            writer="test",
        )

    async def reserve(self, record: AllocationRecord, *, sequence: int | None = None) -> int:
        """Append the record to the ledger."""
        fence = subjects.node_fence(NODE)
        if sequence is None:
            sequence = await self.ledger.last_revision(fence)
        return await self.ledger.append(
            subjects.allocation_key(NODE, record.pod_uid),
            encode(record),
            expect=Expect(subject=fence, sequence=sequence),
        )

    async def bind(
        self, record: AllocationRecord, ledger_seq: int, *, signer: Signer | None = None
    ) -> None:
        """Bind the pod with its signed annotation and its limits."""
        signed = (signer or self.signer).sign(
            SignedPlacement(
                pod_uid=record.pod_uid,
                namespace=record.namespace,
                pod=record.pod,
                allocation_id=record.allocation_id,
                ledger_seq=ledger_seq,
                placement=Placement(node=NODE, containers=record.containers),
                claim=record.claim,
            )
        )
        given = {annotations.ALLOCATION: signed}
        for shares in record.containers:
            given[annotations.limits(shares.name)] = limits.encode(
                limits.limits_of(shares, allocation_id=record.allocation_id)
            )
        await self.bind_plainly(record.pod, given)

    async def bind_plainly(self, name: str, given: Mapping[str, str]) -> None:
        """Bind a pod with these annotations."""
        await self.kube.bind(name, NODE, annotations=given)

    async def place(self, name: str, *asks: Ask, **options: Any) -> AllocationRecord:
        """Create, reserve and bind."""
        record = self.record(await self.create(name, *asks, **options))
        await self.bind(record, await self.reserve(record))
        return record

    async def fail(self, record: AllocationRecord, ledger_seq: int, *, code: str) -> None:
        """Mark an allocation as failed, as the scheduler does when its share is lost."""
        state = StateRecord(
            state="failed",
            allocation_id=record.allocation_id,
            node=NODE,
            pod_uid=record.pod_uid,
            namespace=record.namespace,
            pod=record.pod,
            ledger_seq=ledger_seq,
            code=code,
        )
        await self.states.append(subjects.allocation_key(NODE, record.pod_uid), encode(state))

    # -- looking

    async def report(self) -> NodeReport:
        """The agent's newest report."""
        found: list[NodeReport] = []

        async def is_there() -> bool:
            answer = await self.bus.request(
                f"$JS.API.STREAM.MSG.GET.{subjects.REPORTS_STREAM}",
                msgspec.json.encode({"last_by_subj": subjects.report(NODE, "nvidia")}),
            )
            message = msgspec.json.decode(answer.data).get("message")
            if message is not None:
                data = base64.b64decode(message["data"])
                found[:] = [decode(data, NodeReport, what="report")]
            return bool(found)

        await until(is_there)
        return found[0]

    async def uids_of_running(self) -> set[str]:
        """Running pods."""
        pods = (await self.kube.list("pods", "default"))["items"]
        return {p["metadata"]["uid"] for p in pods if p["status"].get("phase") == "Running"}

    def region(self, pod: str, container: str = "main") -> Path:
        """Return the path of a container's usage region on the node; ``pod`` is a uid."""
        return region_path(self.kubelet.directory / "pods", pod, f"hami-region-{container}")

    def uuid_of(self, kubelet_id: str) -> str:
        """Device of an id."""
        return next(
            device.uuid for device in self.devices if kubelet_id.startswith(f"{device.uuid}::")
        )

    async def listed_ids(self) -> dict[str, set[str]]:
        """Pod → ids of this project's resource that its containers hold according to kubelet."""
        async with grpc.aio.insecure_channel(
            f"unix:{self.kubelet.pod_resources_socket}"
        ) as channel:
            stub = podresources_grpc.PodResourcesListerStub(channel)
            answer = await stub.List(podresources.ListPodResourcesRequest())
        return {
            pod.name: {
                one
                for container in pod.containers
                for devices in container.devices
                if devices.resource_name == RESOURCE
                for one in devices.device_ids
            }
            for pod in answer.pod_resources
        }

    async def pod(self, name: str) -> Obj:
        """The pod's object."""
        return await self.kube.get("pods", name, "default")

    async def until_phase(self, name: str, phase: str, *, within_s: float = WAIT_S) -> Obj:
        """Wait for a pod's phase; returns the pod."""

        async def is_there() -> bool:
            return bool((await self.pod(name))["status"].get("phase") == phase)

        await until(is_there, within_s=within_s)
        return await self.pod(name)

    async def refusal_of(self, name: str) -> str:
        """The text with which kubelet rejected a pod."""
        return str((await self.until_phase(name, "Failed"))["status"].get("message", ""))

    async def environment(self, name: str, container: str = "main") -> dict[str, str]:
        """Output of the container: environment and limits."""
        expected = ".exclusive="

        async def has_printed() -> bool:
            return expected in self.kubelet.logs(name, container)

        await until(has_printed)
        lines = self.kubelet.logs(name, container).splitlines()
        return dict(line.partition("=")[::2] for line in lines if "=" in line)

    async def story(self, uid: str) -> list[StateRecord]:
        """All states of an allocation, oldest first."""
        entry = await self.states.get(subjects.allocation_key(NODE, uid))
        if entry is None:
            return []
        found = []
        for sequence in range(1, entry.revision + 1):
            stored = await self._state_at(sequence)
            if stored is not None and stored.pod_uid == uid:
                found.append(stored)
        return found

    async def _state_at(self, sequence: int) -> StateRecord | None:
        stream = subjects.stream_of(subjects.STATE_BUCKET)
        answer = await self.bus.request(
            f"$JS.API.STREAM.MSG.GET.{stream}", msgspec.json.encode({"seq": sequence})
        )
        message = msgspec.json.decode(answer.data).get("message")
        if message is None:
            return None
        return decode(base64.b64decode(message["data"]), StateRecord, what="state")

    async def until_state(self, uid: str, state: str) -> StateRecord:
        """Wait for a state; returns the record."""
        found: list[StateRecord] = []

        async def is_there() -> bool:
            found[:] = await self.story(uid)
            return bool(found) and found[-1].state == state

        await until(is_there)
        return found[-1]


def _container(ask: Ask, through_webhook: bool) -> Obj:  # noqa: FBT001 - local
    container: Obj = {
        "name": ask.name,
        "image": "simulated",
        "command": ["sh", "-c", ask.command],
    }
    if ask.kind == "sidecar":
        container["restartPolicy"] = "Always"
    if ask.shares:
        container["resources"] = {"limits": {RESOURCE: str(len(ask.shares))}}
        if through_webhook:
            container["volumeMounts"] = [
                {
                    "name": f"hami-limits-{ask.name}",
                    "mountPath": limits.DIRECTORY,
                    "readOnly": True,
                }
            ]
    if ask.has_region:
        mount = {"name": f"hami-region-{ask.name}", "mountPath": limits.REGION_DIRECTORY}
        container.setdefault("volumeMounts", []).append(mount)
    return container


def _region_volume(container: str) -> Obj:
    return {"name": f"hami-region-{container}", "emptyDir": {"medium": "Memory"}}


def _limits_volume(container: str) -> Obj:
    field = f"metadata.annotations['{annotations.limits(container)}']"
    return {
        "name": f"hami-limits-{container}",
        "downwardAPI": {"items": [{"path": limits.FILE_NAME, "fieldRef": {"fieldPath": field}}]},
    }


@asynccontextmanager
async def run_plane(
    directory: Path, nats: NatsServer, *, slots: int = 16, **kubelet: Any
) -> AsyncIterator[Plane]:
    """Everything but the agent."""
    driver = SimulatedDriver(
        SimulatedDriverSettings(profile=str(hardware.path_of("8xA100-40")), node=NODE)
    )
    facts = (await driver.discover()).devices
    devices = [
        Device(
            uuid=one.uuid,
            vendor=one.vendor,
            index=one.index,
            type=one.type,
            memory_mib=one.memory_mib,
            capacity_mib=one.memory_mib,
            slots=slots,
            minor=one.minor,
            numa=one.numa,
        )
        for one in facts
    ]
    async with ApiServer(ApiSettings()) as api:
        access = Access(url=api.url, token=api.token)
        settings = KubeletSettings(**{"cpu": "200", "node_status_s": 1.0, **kubelet})
        async with (
            KubeClient(access) as kube,
            run_kubelet(NODE, directory / "k", access, settings) as sim,
            connect([nats.url], name="test") as bus,
        ):
            await ensure_bus(bus)
            plane = Plane(
                directory=directory,
                nats=nats,
                api=api,
                kube=kube,
                kubelet=sim,
                bus=bus,
                devices=devices,
            )
            await plane.publish_devices()
            yield plane
