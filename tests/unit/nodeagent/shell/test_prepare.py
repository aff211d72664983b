# SPDX-License-Identifier: Apache-2.0
"""Preparing and unpreparing ResourceClaims, with the host's files and without kubelet."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from msgspec.structs import replace

from hami_common.dra import names
from hami_common.dra.claims import ResourceClaim
from hami_common.errors import NotFound, Unavailable
from hami_common.events.allocation import CLAIM, AllocationRecord, StateRecord
from hami_common.events.inventory import NodeDevices
from hami_common.kubeletapi import podresources
from hami_common.model.device import Profile
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.pods import limits
from hami_common.pods.signing import SignedPlacement
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from hami_nodeagent.core.board import PartitionsRead, VendorsDivided
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.holders import holders_of
from hami_nodeagent.core.partitions import Owner
from hami_nodeagent.core.podfacts import ClaimUse, PodFacts
from hami_nodeagent.core.reporting import Step, next_step
from hami_nodeagent.core.resourceclaims import Code, Prepared, Refuse
from hami_nodeagent.core.thrash import ThrashRules
from hami_nodeagent.settings import DraSettings
from hami_nodeagent.shell.allocate import GrantKeeper
from hami_nodeagent.shell.checkpoint import Checkpoint
from hami_nodeagent.shell.limiter import Limiter
from hami_nodeagent.shell.prepare import Preparer
from hami_nodeagent.shell.regions import region_of
from hami_nodeagent.shell.relimit import Relimiter
from hami_nodeagent.shell.render import Renderer
from hami_nodeagent.shell.site import Site
from tests.unit.nodeagent.core.builders import GPU, NODE, Given, device
from tests.unit.nodeagent.shell.support import enforcing, know, make_site

pytestmark = pytest.mark.anyio

UID = "0d2f5a52-1111-4222-8333-444455556666"
OTHER = "0d2f5a52-1111-4222-8333-777788889999"


class FakeKube:
    """Claims by name."""

    def __init__(self) -> None:
        self.claims: dict[str, Any] = {}
        self.is_available = True

    async def get(self, path: str) -> bytes:
        if not self.is_available:
            raise Unavailable(peer="API", detail="the test says so")
        name = path.rpartition("/")[2]
        if name not in self.claims:
            raise NotFound(what=path)
        return msgspec.json.encode(self.claims[name])


class FakeHardware:
    """Creates MIG instances at once: each time others, of these numbers."""

    def __init__(self, site: Site) -> None:
        self.board = site.picture.partitions
        self.board.apply(VendorsDivided(vendors=frozenset({"nvidia"})))
        self.problem = ""
        self.number = 1
        self.asked: list[Owner] = []

    async def ensure_shares(self, owners: Mapping[Owner, str]) -> str:
        self.asked += owners
        if not self.problem:
            for uuid in set(owners.values()):
                carried = {
                    owner: Instance(
                        uuid=uuid,
                        instance_id=f"MIG-{self.number}-{owner.number}",
                        profile="1g",
                        start=owner.number,
                        handles={
                            "mig_uuid": f"MIG-{self.number}-{owner.number}",
                            "gi_cap": f"/dev/nvidia-caps/nvidia-cap{self.number}",
                            "ci_cap": f"/dev/nvidia-caps/nvidia-cap{self.number + 1}",
                        },
                    )
                    for owner, of in owners.items()
                    if of == uuid
                }
                self.board.apply(PartitionsRead(uuid=uuid, carried=carried, waiting={}, foreign=()))
        return self.problem


class Node:
    """An agent's preparer and what it works on."""

    def __init__(self, directory: Path, *, monitor: bool = False, **settings: Any) -> None:
        self.directory = directory
        dra = DraSettings(
            enabled=True,
            monitor=monitor,
            cdi_dir=str(directory / "cdi"),
            region_dir=str(directory / "regions"),
            prepare_wait_s=0.2,
        )
        self.settings = {**enforcing(directory), "dra": dra, "injection": "cdi", **settings}
        self.kube = FakeKube()
        self.restart()

    def restart(self) -> None:
        """Begin again with what is on disk."""
        self.site: Site = make_site(self.directory / "state", **self.settings)
        self.site.checkpoint.begin_claims()
        self.limiter = Limiter(self.site)
        self.hardware = FakeHardware(self.site)
        self.preparer = Preparer(
            site=self.site,
            renderer=Renderer(
                Catalog.from_settings(self.site.settings.vendors), self.site.settings
            ),
            limiter=self.limiter,
            partitions=self.hardware,
            kube=lambda: self.kube,  # type: ignore[arg-type,return-value] # only reads
        )
        self.site.picture.ledger_known = True

    def partition_claim(self, name: str, uid: str, *starts: int) -> AllocationRecord:
        """Allocate partitions 1g of one card to request ``main``; return the record."""
        sizes = (Profile(name="1g", memory_mib=100, core_pct=10, size=1, starts=tuple(range(7))),)
        card = device(0, uuid="nvidia-m", mode="mig", minor=4, partitions=sizes)
        self.site.picture.set_canonical(
            NodeDevices(
                node=NODE,
                vendor="nvidia",
                boot_id="",
                seq=2,
                time_s=0,
                config_generation=1,
                devices=(*self.site.picture.view.devices_by_uuid.values(), card),
            )
        )
        record = self.claim(name, uid, *(("main", 0, 1, 1) for _ in starts))
        results = self.kube.claims[name]["status"]["allocation"]["devices"]["results"]
        for one, start in zip(results, starts, strict=True):
            one["device"] = names.partition_name("nvidia-m", "1g", start)
            del one["shareID"], one["consumedCapacity"]
        found = msgspec.convert(self.kube.claims[name], ResourceClaim)
        share = Share(vendor="nvidia", uuid="nvidia-m", memory_mib=100, core_pct=10, profile="1g")
        shares = tuple(replace(share, start=start) for start in starts)
        return replace(
            record,
            allocation_id=found.allocation_id(),
            containers=(replace(record.containers[0], shares=shares),),
        )

    def claim(self, name: str, uid: str, *given: tuple[str, int, int, int]) -> AllocationRecord:
        """Allocate (request, device, MiB, percent) and let a pod use it; return its record."""
        self.kube.claims[name] = {
            "metadata": {"name": name, "namespace": "default", "uid": uid},
            "status": {
                "allocation": {
                    "devices": {
                        "results": [
                            {
                                "request": request,
                                "driver": names.DRIVER,
                                "pool": names.pool_name(NODE),
                                "device": names.device_name(f"nvidia-{device}"),
                                "shareID": f"share-{device}",
                                "consumedCapacity": {"memory": f"{mib}Mi", "cores": str(cores)},
                            }
                            for request, device, mib, cores in given
                        ]
                    }
                }
            },
        }
        pod = PodFacts(
            uid=f"pod-of-{name}",
            namespace="default",
            name=f"pod-of-{name}",
            claims_by_container={
                f"app-{request}": (ClaimUse(claim=name, request=request),) for request, *_ in given
            },
        )
        self.site.picture.pods.put(pod, revision=1, now_s=0)
        found = msgspec.convert(self.kube.claims[name], ResourceClaim)
        return AllocationRecord(
            op="reserve",
            allocation_id=found.allocation_id(),
            node=NODE,
            pod_uid=uid,
            namespace="default",
            pod=name,
            containers=tuple(
                ContainerShares(
                    name=request,
                    kind="app",
                    shares=tuple(
                        Share(
                            vendor="nvidia", uuid=f"nvidia-{device}", memory_mib=mib, core_pct=cores
                        )
                        for one, device, mib, cores in given
                        if one == request
                    ),
                )
                for request in dict.fromkeys(one[0] for one in given)
            ),
            origin=CLAIM,
        )

    def owned(
        self, pod: str, *given: tuple[str, int, int, int], init: str = ""
    ) -> AllocationRecord:
        """Let a pod own claim ``c``, with a container for each of ``given``; return its record.

        ``init``: container whose request an init container uses.
        """
        results = [(f"{name}-nvidia", *share) for name, *share in given]
        record = self.claim("c", UID, *results)  # type: ignore[arg-type] # as given
        uid = f"uid-{pod}"
        self.kube.claims["c"]["metadata"] |= {
            "labels": {"hami.io/managed": "true"},
            "ownerReferences": [{"kind": "Pod", "name": pod, "uid": uid, "controller": True}],
        }
        self.kube.claims["c"]["status"]["reservedFor"] = [{"name": pod, "uid": uid}]
        containers = tuple(
            replace(one, name=one.name.removesuffix("-nvidia")) for one in record.containers
        )
        record = replace(
            record,
            allocation_id="a-1",
            pod_uid=uid,
            pod=pod,
            containers=containers,
            origin="",
            claim="c",
        )
        uses = {
            name: (ClaimUse(claim="c", request=f"{name}-nvidia"),)
            for name in dict.fromkeys(one.name for one in containers)
        }
        if init:
            uses["load"] = uses[init]
        self.site.picture.pods.end("pod-of-c", now_s=0)
        self.site.picture.pods.forget(gone_before_s=1)
        self.show(record, claims_by_container=uses)
        return record

    def show(self, record: AllocationRecord, revision: int = 1, **facts: Any) -> None:
        """Let the agent see the pod of a record with its signed placement."""
        placement = Placement(node=NODE, containers=record.containers)
        signed = SignedPlacement(
            pod_uid=record.pod_uid,
            namespace="default",
            pod=record.pod,
            allocation_id=record.allocation_id,
            ledger_seq=revision,
            placement=placement,
            claim=record.claim,
        )
        known = self.site.picture.pods.find(record.pod_uid) or PodFacts(
            uid=record.pod_uid, namespace="default", name=record.pod
        )
        fresh = replace(known, signed=signed, **facts)
        self.site.picture.pods.put(fresh, revision=revision, now_s=0)

    def book(self, record: AllocationRecord) -> None:
        """Let the agent know a record."""
        entry = Entry(record=record, sequence=1)
        self.site.picture.entries_by_uid[record.pod_uid] = entry
        self.site.picture.note_change()

    async def prepare(self, name: str = "c", uid: str = UID) -> Prepared | Refuse:
        return await self.preparer.prepare(namespace="default", name=name, uid=uid)

    def spec(self, uid: str = UID) -> bytes:
        return (self.directory / "cdi" / f"hami-{uid}.json").read_bytes()

    def files(self, uid: str = UID) -> list[str]:
        """List what the host has of a claim."""
        return sorted(
            str(path.relative_to(self.directory))
            for path in self.directory.rglob("*")
            if uid in str(path) and not path.is_dir() and "priority" not in str(path)
        )

    def state(self, uid: str, state: Any = "bound") -> Step | None:
        """Return what the agent would write after this state."""
        picture, entry = self.site.picture, self.site.picture.entries_by_uid[uid]
        known = StateRecord(
            state=state,
            allocation_id=entry.record.allocation_id,
            node=NODE,
            pod_uid=uid,
            namespace="default",
            pod=entry.record.pod,
            ledger_seq=1,
        )
        return next_step(entry, known, picture.pods.find(uid), picture.grants)

    def limits(self, uid: str, container: str) -> str:
        """Read a limits file."""
        return self.site.checkpoint.limits_file(uid, container).read_text()


def done(outcome: Prepared | Refuse) -> Prepared:
    assert isinstance(outcome, Prepared), outcome.message
    return outcome


def refused(outcome: Prepared | Refuse) -> Refuse:
    assert isinstance(outcome, Refuse)
    return outcome


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_request_gets_one_cdi_device_with_what_allocate_gives(node: Node) -> None:
    node.book(node.claim("c", UID, ("main", 0, 300, 30), ("main", 1, 200, 0), ("side", 2, 100, 0)))
    prepared = done(await node.prepare())
    name = f"gpu.hami.io/share={UID}-main"
    first, second, third = prepared.devices
    assert first.cdi_ids == (name, "nvidia.com/gpu=nvidia-0", "nvidia.com/gpu=nvidia-1")
    assert second.cdi_ids == ()
    assert third.cdi_ids == (f"gpu.hami.io/share={UID}-side", "nvidia.com/gpu=nvidia-2")
    assert [one.share_id for one in prepared.devices] == ["share-0", "share-1", "share-2"]
    spec = json.loads(node.spec())
    assert spec["kind"] == "gpu.hami.io/share"
    main, side = spec["devices"]
    assert main["name"] == f"{UID}-main"
    env = dict(one.split("=", 1) for one in main["containerEdits"]["env"])
    assert env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "300m"
    assert env["CUDA_DEVICE_MEMORY_LIMIT_1"] == "200m"
    assert env["CUDA_DEVICE_MEMORY_SHARED_CACHE"] == "/run/hami/region"
    assert env["NVIDIA_VISIBLE_DEVICES"] == "void"
    mounts = {one["containerPath"]: one for one in main["containerEdits"]["mounts"]}
    assert {"/etc/hami", "/run/hami", "/etc/ld.so.preload", "/run/hami-priority"} <= set(mounts)
    assert "rw" in mounts["/run/hami"]["options"]
    assert "ro" in mounts["/etc/hami"]["options"]
    limits = (Path(mounts["/etc/hami"]["hostPath"]) / "limits").read_text()
    assert "container=main\n" in limits
    assert "device.0.memory_mib=300\ndevice.0.core_pct=30\n" in limits
    assert "device.1.uuid=nvidia-1\n" in limits
    region = Path(mounts["/run/hami"]["hostPath"])
    assert region.stat().st_mode & 0o777 == 0o777
    assert side["containerEdits"]["mounts"] != main["containerEdits"]["mounts"]


async def test_container_with_two_requests_has_one_share_of_both(node: Node) -> None:
    record = node.claim("c", UID, ("main", 0, 300, 30), ("side", 2, 100, 0))
    pod = PodFacts(
        uid="pod-of-c",
        namespace="default",
        name="pod-of-c",
        claims_by_container={"app": (ClaimUse(claim="c"),)},
    )
    node.site.picture.pods.put(pod, revision=2, now_s=0)
    node.book(record)
    prepared = done(await node.prepare())
    names_of_devices = [one.cdi_ids[0] for one in prepared.devices]
    assert names_of_devices == [f"gpu.hami.io/share={UID}-{one}" for one in ("main", "side")]
    main, side = json.loads(node.spec())["devices"]
    assert main["containerEdits"] == side["containerEdits"]
    env = dict(one.split("=", 1) for one in main["containerEdits"]["env"])
    assert env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "300m"
    assert env["CUDA_DEVICE_MEMORY_LIMIT_1"] == "100m"
    text = node.limits(UID, "main")
    assert "devices=2\ndevice.0.vendor=nvidia\ndevice.0.uuid=nvidia-0\n" in text
    assert "device.1.uuid=nvidia-2\ndevice.1.memory_mib=100\n" in text
    assert len(list((node.directory / "regions" / UID).iterdir())) == 1
    before = node.spec()
    rows = holders_of(
        node.site.picture.entries_by_uid,
        node.site.picture.pods,
        node.site.picture.grants,
        node.site.picture.view.devices_by_uuid,
    )
    assert [(one.container, one.uuid, one.number, one.owner) for one in rows] == [
        ("app", "nvidia-0", 0, (UID, "main")),
        ("app", "nvidia-2", 1, (UID, "main")),
    ]
    # A resize of the second request reaches the common file.
    share = replace(record.containers[1].shares[0], memory_mib=500)
    grown = (record.containers[0], replace(record.containers[1], shares=(share,)))
    node.book(replace(record, op="resize", containers=grown))
    await Relimiter(site=node.site, keeper=GrantKeeper(node.site)).look()
    assert "device.1.memory_mib=500\n" in node.limits(UID, "main")
    node.book(record)
    node.restart()
    node.site.picture.pods.put(pod, revision=2, now_s=0)
    node.book(record)
    assert done(await node.prepare()).devices == prepared.devices
    assert node.spec() == before
    assert await node.preparer.unprepare(uid=UID) is None
    assert node.files() == []


def monitor(node: Node, *extra: dict[str, Any], pool: str = names.monitor_pool(NODE)) -> None:
    """Let a pod use claim ``c`` with admin access."""
    node.claim("c", UID, ("main", 0, 100, 0))
    result = {
        "request": "all",
        "driver": names.DRIVER,
        "pool": pool,
        "device": names.MONITOR,
        "adminAccess": True,
    }
    allocation = node.kube.claims["c"]["status"]["allocation"]
    allocation["devices"]["results"] = [result, *extra]


async def test_admin_access_gives_all_devices_without_limits_and_record(tmp_path: Path) -> None:
    node = Node(tmp_path, monitor=True, injection="devices")
    monitor(node)
    prepared = done(await node.prepare())
    (device,) = prepared.devices
    assert (device.request, device.pool, device.device) == (
        "all",
        f"{NODE}/hami-monitor",
        "monitor",
    )
    assert device.cdi_ids == (f"gpu.hami.io/share={UID}-all",)
    edits = json.loads(node.spec())["devices"][0]["containerEdits"]
    variables = dict(one.split("=", 1) for one in edits["env"])
    assert variables["NVIDIA_VISIBLE_DEVICES"] == ",".join(f"nvidia-{n}" for n in range(4))
    assert not [name for name in variables if "LIMIT" in name]
    assert edits.get("mounts", []) == []
    assert not node.site.picture.grants.of_pod(UID)
    first = node.spec()
    node.restart()
    assert done(await node.prepare()).devices == prepared.devices
    assert node.spec() == first
    assert await node.preparer.unprepare(uid=UID) is None
    assert node.files() == []


async def test_admin_access_is_refused_beside_shares_elsewhere_and_when_off(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, monitor=True)
    share = {
        "request": "main",
        "driver": names.DRIVER,
        "pool": names.pool_name(NODE),
        "device": names.device_name("nvidia-0"),
    }
    monitor(node, share)
    assert refused(await node.prepare()).code == Code.ALLOCATION_INVALID
    monitor(node, pool=names.monitor_pool("elsewhere"))
    assert refused(await node.prepare()).code == Code.NOT_ALLOCATED
    off = Node(tmp_path)
    monitor(off)
    assert refused(await off.prepare()).code == Code.DEVICE_UNKNOWN
    assert off.files() == []


async def test_repeated_call_gives_the_same_bytes_after_restart_and_reboot(node: Node) -> None:
    record = node.claim("c", UID, ("main", 0, 300, 30))
    node.book(record)
    first = done(await node.prepare())
    spec = node.spec()
    assert done(await node.prepare()) == first
    (node.directory / "cdi" / f"hami-{UID}.json").unlink()
    (node.directory / "regions" / UID / "main").rmdir()
    forced = VendorSettings(nvidia=NvidiaSettings(core_policy="force"))
    node.settings["vendors"] = forced  # another setting changes no prepared claim
    node.restart()
    assert [one.pod_uid for one in node.site.picture.grants] == [UID]
    node.claim("c", UID, ("main", 0, 300, 30))
    node.book(record)
    assert done(await node.prepare()) == first
    assert node.spec() == spec
    assert (node.directory / "regions" / UID / "main").is_dir()


async def test_prepared_claim_needs_no_bus_after_a_reboot_and_a_new_one_does(node: Node) -> None:
    node.book(node.claim("c", UID, ("main", 0, 300, 30)))
    first = done(await node.prepare())
    node.restart()
    node.site.picture.ledger_known = False
    node.claim("c", UID, ("main", 0, 300, 30))
    assert done(await node.prepare()) == first
    node.claim("d", OTHER, ("main", 1, 300, 30))
    assert refused(await node.prepare("d", OTHER)).code == Code.LEDGER_UNKNOWN
    node.claim("c", UID, ("main", 0, 301, 30))
    assert refused(await node.prepare()).code == Code.LEDGER_MISMATCH


async def test_unprepare_leaves_nothing_and_takes_unknown_claims(node: Node) -> None:
    node.book(node.claim("c", UID, ("main", 0, 300, 30)))
    done(await node.prepare())
    assert len(node.files()) == 3
    for _ in range(2):
        for name in (f"cdi/hami-{UID}.new", f"state/claims/{UID}.new"):
            (node.directory / name).write_text("{")  # left by an agent that was killed
        assert await node.preparer.unprepare(uid=UID) is None
        assert node.files() == []
        assert len(node.site.picture.grants) == 0
    assert await node.preparer.unprepare(uid="../state") is None
    assert (node.directory / "state").is_dir()
    assert not (node.directory / "regions" / UID).exists()
    node.restart()
    assert len(node.site.picture.grants) == 0


async def test_record_that_arrives_in_time_ends_the_wait(node: Node) -> None:
    record = node.claim("c", UID, ("main", 0, 300, 30))

    async def arrive() -> None:
        await anyio.sleep(0.05)
        node.book(record)

    async with anyio.create_task_group() as group:
        group.start_soon(arrive)
        done(await node.prepare())


async def test_calls_for_the_pods_of_one_claim_follow_each_other(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.book(node.claim("c", UID, ("main", 0, 300, 30)))
    save, inside, most = Checkpoint.save_claim, 0, 0

    def slowly(self: Checkpoint, claim: Prepared) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.05)
        save(self, claim)
        inside -= 1

    monkeypatch.setattr(Checkpoint, "save_claim", slowly)
    outcomes: list[Prepared | Refuse] = []

    async def call() -> None:
        outcomes.append(await node.prepare())

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(call)
    assert most == 1
    assert len({done(one).spec for one in outcomes}) == 1


async def test_refusals_have_stable_codes_and_write_nothing(node: Node) -> None:
    assert refused(await node.prepare()).code == Code.CLAIM_UNKNOWN
    record = node.claim("c", UID, ("main", 0, 300, 30))
    message = refused(await node.prepare()).message
    assert message.startswith("hami: ledger-unknown: the ledger has no record of claim default/c")
    assert refused(await node.prepare(uid=OTHER)).code == Code.CLAIM_UNKNOWN
    node.book(replace(record, allocation_id="a", containers=()))
    assert refused(await node.prepare()).code == Code.LEDGER_MISMATCH
    node.kube.is_available = False
    assert refused(await node.prepare()).code == Code.API_UNAVAILABLE
    assert node.files() == []


async def test_container_whose_memory_may_thrash_has_a_gate(tmp_path: Path) -> None:
    node = Node(tmp_path, thrash=ThrashRules(quanta=True))
    node.site.picture.set_canonical(
        NodeDevices(
            node=NODE,
            vendor="nvidia",
            boot_id="",
            seq=1,
            time_s=0,
            config_generation=1,
            devices=(device(0), device(1, capacity_mib=2000)),
        )
    )
    for name, uid, index in (("c", UID, 0), ("d", OTHER, 1)):
        node.book(node.claim(name, uid, ("main", index, 300, 30)))
        done(await node.prepare(name, uid))
    quanta = node.limiter.quanta
    assert [quanta.is_open((uid, "main")) for uid in (UID, OTHER)] == [None, True]


async def test_missing_library_refuses_the_share(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.book(node.claim("c", UID, ("main", 0, 300, 30)))
    (tmp_path / "libvgpu.so").unlink()
    assert refused(await node.prepare()).code == Code.LIMITER_MISSING
    assert len(node.site.picture.grants) == 0


async def test_shares_of_pods_and_claims_that_were_given_bound_further_ones(node: Node) -> None:
    pod = Given("web", ("main", "app", {GPU: 1}))
    know(node.site, pod)
    node.site.picture.grants.add(pod.grant("main", "id"))  # 10 MiB of nvidia-0
    first = node.claim("c", UID, ("main", 0, 600, 0))
    node.book(first)
    done(await node.prepare())
    # The ledger released the claim too early: the containers' shares count all the same.
    node.book(replace(first, op="release", containers=()))
    node.book(node.claim("d", OTHER, ("main", 0, 391, 0)))
    assert refused(await node.prepare("d", OTHER)).code == Code.DEVICE_FULL
    node.book(node.claim("d", OTHER, ("main", 0, 390, 0)))
    done(await node.prepare("d", OTHER))


async def test_claim_of_a_pod_gives_each_container_its_share_under_the_pod(node: Node) -> None:
    record = node.owned("web", ("main", 0, 300, 30), ("side", 1, 200, 0), init="main")
    assert refused(await node.prepare()).code == Code.LEDGER_UNKNOWN
    node.book(replace(record, claim=""))
    assert refused(await node.prepare()).code == Code.LEDGER_UNKNOWN
    node.book(record)
    assert node.state("uid-web") is None
    prepared = done(await node.prepare())
    assert [(one.request, one.cdi_ids) for one in prepared.devices] == [
        ("main-nvidia", (f"gpu.hami.io/share={UID}-main-nvidia", "nvidia.com/gpu=nvidia-0")),
        ("side-nvidia", (f"gpu.hami.io/share={UID}-side-nvidia", "nvidia.com/gpu=nvidia-1")),
    ]
    grants = node.site.picture.grants.of_pod("uid-web")
    assert [(one.container, one.claim, one.is_claim) for one in grants] == [
        ("main", "c", False),
        ("side", "c", False),
    ]
    expected = limits.limits_of(record.containers[0], allocation_id="a-1")
    assert node.limits("uid-web", "main") == limits.encode(expected)
    edits = json.loads(node.spec())["devices"][0]["containerEdits"]
    mounts = {one["containerPath"]: one["hostPath"] for one in edits["mounts"]}
    assert mounts["/run/hami"] == str(node.directory / "regions" / "uid-web" / "main")
    assert "CUDA_DEVICE_MEMORY_LIMIT_0=300m" in edits["env"]
    assert node.state("uid-web") == Step(state="prepared", containers=("main", "side"))
    picture = node.site.picture
    holders = holders_of(
        picture.entries_by_uid, picture.pods, picture.grants, picture.view.devices_by_uuid
    )
    assert {(one.container, one.owner) for one in holders} == {
        ("main", ("uid-web", "main")),
        ("load", ("uid-web", "main")),
        ("side", ("uid-web", "side")),
    }
    assert {region_of(node.site.settings, one).parent.is_dir() for one in holders} == {True}


async def test_container_with_devices_of_two_vendors_has_one_limits_file(node: Node) -> None:
    other = device(0, vendor="hygon")
    node.site.picture.set_canonical(
        NodeDevices(
            node=NODE,
            vendor="hygon",
            boot_id="",
            seq=1,
            time_s=0,
            config_generation=1,
            devices=(other,),
        )
    )
    record = node.owned("web", ("main", 0, 300, 30))
    results = node.kube.claims["c"]["status"]["allocation"]["devices"]["results"]
    results.insert(
        0, {**results[0], "request": "main-hygon", "device": names.device_name("hygon-0")}
    )
    (main,) = record.containers
    second = replace(main.shares[0], vendor="hygon", uuid="hygon-0")
    record = replace(record, containers=(replace(main, shares=(*main.shares, second)),))
    uses = tuple(ClaimUse(claim="c", request=f"main-{one}") for one in ("nvidia", "hygon"))
    node.show(record, revision=2, claims_by_container={"main": uses})
    node.book(record)
    prepared = done(await node.prepare())
    assert [one.request for one in prepared.devices] == ["main-hygon", "main-nvidia"]
    assert all(one.cdi_ids for one in prepared.devices)
    edits = {
        one["name"].removeprefix(f"{UID}-"): one["containerEdits"]
        for one in json.loads(node.spec())["devices"]
    }
    mounts = {
        name: {one["containerPath"]: one["hostPath"] for one in found["mounts"]}
        for name, found in edits.items()
    }
    assert mounts["main-nvidia"]["/etc/hami"] == mounts["main-hygon"]["/etc/hami"]
    assert "/run/hami" in mounts["main-nvidia"]
    assert "devices=2\n" in node.limits("uid-web", "main")
    variables = [
        {one.partition("=")[0] for one in found.get("env", ())} for found in edits.values()
    ]
    assert not variables[0] & variables[1]
    assert node.state("uid-web") == Step(state="prepared", containers=("main",))
    node.site.picture.grants.remove(node.site.picture.grants.of_pod("uid-web")[1])
    assert node.state("uid-web") is None


async def test_claim_of_a_pod_survives_restarts_and_goes_with_the_pod(node: Node) -> None:
    record = node.owned("web", ("main", 0, 300, 30))
    node.book(record)
    first, spec = done(await node.prepare()), node.spec()
    (node.directory / "cdi" / f"hami-{UID}.json").unlink()
    (node.directory / "regions" / "uid-web" / "main").rmdir()
    node.restart()
    node.site.picture.ledger_known = False
    node.owned("web", ("main", 0, 300, 30))
    assert done(await node.prepare()) == first
    assert node.spec() == spec
    assert (node.directory / "regions" / "uid-web" / "main").is_dir()
    assert len(node.site.picture.grants) == 1
    # The scheduler releases the share when the pod has ended; its containers may still run.
    node.book(replace(record, op="release", containers=(), claim=""))
    node.book(node.claim("d", OTHER, ("main", 0, 701, 0)))
    assert refused(await node.prepare("d", OTHER)).code == Code.DEVICE_FULL
    for _ in range(2):
        assert await node.preparer.unprepare(uid=UID) is None
        assert node.files() == node.files("uid-web") == []
        assert not (node.directory / "regions" / "uid-web").exists()
        assert len(node.site.picture.grants) == 0
    done(await node.prepare("d", OTHER))


@pytest.mark.parametrize("is_of_pod", [True, False])
async def test_resized_share_is_rewritten_and_prepared_with_its_amounts(
    node: Node, *, is_of_pod: bool
) -> None:
    uid = "uid-web" if is_of_pod else UID
    relimiter = Relimiter(site=node.site, keeper=GrantKeeper(node.site))

    def claimed() -> AllocationRecord:
        given = ("main", 0, 300, 30)
        return node.owned("web", given) if is_of_pod else node.claim("c", UID, given)

    record = claimed()
    node.book(record)
    done(await node.prepare())
    before = node.limits(uid, "main")
    await relimiter.look()
    assert node.limits(uid, "main") == before
    share = replace(record.containers[0].shares[0], memory_mib=500)
    resized = replace(
        record, op="resize", containers=(replace(record.containers[0], shares=(share,)),)
    )
    node.book(resized)
    if is_of_pod:
        node.show(resized, revision=2)
    await relimiter.look()
    assert node.limits(uid, "main") == before.replace("memory_mib=300", "memory_mib=500")
    node.restart()
    claimed()
    node.book(resized)
    assert done(await node.prepare()).containers == resized.containers
    assert b"CUDA_DEVICE_MEMORY_LIMIT_0=500m" in node.spec()
    assert "memory_mib=500" in node.limits(uid, "main")
    node.book(node.claim("d", OTHER, ("main", 0, 501, 0)))
    assert refused(await node.prepare("d", OTHER)).code == Code.DEVICE_FULL


async def test_prepared_claim_keeps_its_grants_when_a_resized_one_cannot_be_written(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = node.owned("web", ("main", 0, 300, 30))
    node.book(record)
    done(await node.prepare())
    before = node.site.picture.grants.of_pod("uid-web")
    share = replace(record.containers[0].shares[0], memory_mib=500)
    container = replace(record.containers[0], shares=(share,))
    node.book(replace(record, op="resize", containers=(container,)))

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node.site.checkpoint, "write_spec", fail)
    assert refused(await node.prepare()).code == Code.HOST_FAILED
    assert node.site.picture.grants.of_pod("uid-web") == before


async def test_owner_with_a_uid_that_is_none_is_refused(node: Node) -> None:
    node.owned("web", ("main", 0, 300, 30))
    node.kube.claims["c"]["metadata"]["ownerReferences"][0]["uid"] = "../../etc"
    outcome = refused(await node.prepare())
    assert outcome.code == Code.ALLOCATION_INVALID
    assert "metadata.ownerReferences" in outcome.text


class FakeList:
    """Lists claims as kubelet does."""

    def __init__(self, *claims: str) -> None:
        self.claims = claims

    async def answer(self, *, timeout_s: float) -> podresources.ListPodResourcesResponse:
        del timeout_s
        found = [
            podresources.DynamicResource(claim_namespace="default", claim_name=name)
            for name in self.claims
        ]
        container = podresources.ContainerResources(name="app", dynamic_resources=found)
        return podresources.ListPodResourcesResponse(
            pod_resources=[podresources.PodResources(name="p", containers=[container])]
        )


async def tidied(node: Node, *listed: str) -> bool:
    """Tidy with this list of kubelet; return whether the claim is gone."""
    await node.preparer.tidy(FakeList(*listed))  # type: ignore[arg-type] # only lists
    return not node.files()


async def test_claim_that_kubelet_lost_is_removed_when_no_trace_of_it_is_left(node: Node) -> None:
    node.book(node.claim("c", UID, ("main", 0, 300, 30)))
    done(await node.prepare())
    stray = node.directory / "regions" / OTHER
    stray.mkdir()
    node.site.picture.pods_known = True
    claim = node.kube.claims.pop("c")
    assert not await tidied(node)  # its pod is known
    assert not stray.exists()
    node.site.picture.pods.end("pod-of-c", now_s=0)
    assert not await tidied(node)  # its pod is remembered
    node.site.picture.pods.forget(gone_before_s=1)
    assert not await tidied(node, "c")
    node.kube.claims["c"] = claim
    assert not await tidied(node)
    node.kube.is_available = False
    assert not await tidied(node)
    node.kube.is_available = True
    node.kube.claims["c"] = {**claim, "metadata": {**claim["metadata"], "uid": OTHER}}
    assert await tidied(node)
    assert len(node.site.picture.grants) == 0


@asynccontextmanager
async def racing(node: Node, *claims: tuple[str, str]) -> AsyncIterator[list[Prepared | Refuse]]:
    found: list[Prepared | Refuse] = []

    async def one(name: str, uid: str) -> None:
        found.append(await node.prepare(name, uid))

    async with anyio.create_task_group() as group:
        for name, uid in claims:
            group.start_soon(one, name, uid)
    yield found


async def test_calls_at_the_same_time_never_get_the_same_memory(node: Node) -> None:
    for name, uid in (("c", UID), ("d", OTHER)):
        node.book(node.claim(name, uid, ("main", 0, 600, 0)))
    async with racing(node, ("c", UID), ("d", OTHER)) as found:
        assert sorted(isinstance(one, Prepared) for one in found) == [False, True]
        (loser,) = (one for one in found if isinstance(one, Refuse))
        assert loser.code == Code.DEVICE_FULL


async def test_host_that_cannot_be_written_is_named_and_nothing_is_granted(node: Node) -> None:
    node.book(node.claim("c", UID, ("main", 0, 300, 30)))
    (node.directory / "cdi").write_text("not a directory")
    outcome = refused(await node.prepare())
    assert outcome.code == Code.HOST_FAILED
    assert len(node.site.picture.grants) == 0


async def test_partitions_of_a_claim_are_given_by_their_own_names(node: Node) -> None:
    node.book(node.partition_claim("c", UID, 0, 1))
    prepared = done(await node.prepare())
    assert prepared.devices[0].cdi_ids == (f"gpu.hami.io/share={UID}-main",)
    ((main,),) = (json.loads(node.spec())["devices"],)
    env = dict(one.split("=", 1) for one in main["containerEdits"]["env"])
    assert env["NVIDIA_VISIBLE_DEVICES"] == "MIG-1-0,MIG-1-1"
    assert "CUDA_DEVICE_MEMORY_LIMIT_0" not in env
    nodes = {one["path"] for one in main["containerEdits"]["deviceNodes"]}
    assert {"/dev/nvidia4", "/dev/nvidia-caps/nvidia-cap1"} <= nodes
    mounts = {one["containerPath"] for one in main["containerEdits"]["mounts"]}
    assert mounts == {"/etc/hami"}


async def test_partition_that_was_created_again_has_the_same_cdi_name(
    node: Node,
) -> None:
    record = node.partition_claim("c", UID, 0)
    node.book(record)
    first = done(await node.prepare())
    assert done(await node.prepare()) == first
    node.restart()
    node.book(node.partition_claim("c", UID, 0))
    node.hardware.number = 7
    again = done(await node.prepare())
    assert (again.devices, again.containers) == (first.devices, first.containers)
    assert b"MIG-7-0" in node.spec()
    assert len(node.site.picture.grants) == 1


async def test_partition_that_does_not_come_is_refused_and_nothing_is_given(node: Node) -> None:
    node.book(node.partition_claim("c", UID, 0))
    node.hardware.problem = "position 0 is used by a foreign instance"
    refusal = refused(await node.prepare())
    assert refusal.code == Code.PARTITION_NOT_READY
    assert refusal.text.endswith("is not there: position 0 is used by a foreign instance")
    assert node.files() == []
    assert len(node.site.picture.grants) == 0
    node.hardware.problem = ""
    done(await node.prepare())
    assert [(one.pod_uid, one.number) for one in node.hardware.asked] == [(UID, 0)] * 2
