# SPDX-License-Identifier: Apache-2.0
"""Answers to kubelet: what is read, awaited, kept and rolled back."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from hami_common.kubeletapi import deviceplugin as api
from hami_common.model.device import DeviceFacts
from hami_common.pods.limits import decode as decode_limits
from hami_common.runtime.tasks import background
from hami_common.vendors.catalog import Catalog
from hami_nodeagent.core.claims import Claim, ListedPod, Refuse
from hami_nodeagent.core.reporting import Failure
from hami_nodeagent.core.thrash import ThrashRules
from hami_nodeagent.drivers.protocol import Inventory
from hami_nodeagent.settings import VnpuCoreSettings
from hami_nodeagent.shell.allocate import Allocator, GrantKeeper
from hami_nodeagent.shell.limiter import Limiter
from hami_nodeagent.shell.picture import UnreadablePod
from hami_nodeagent.shell.render import Renderer
from hami_nodeagent.shell.site import Site
from hami_nodeagent.shell.vnpucore import VnpuCore
from tests.unit.nodeagent.core.builders import GPU, NPU, Given, device, request
from tests.unit.nodeagent.shell.support import (
    FakeKubelet,
    FakePods,
    enforcing,
    know,
    make_site,
    until,
)

pytestmark = pytest.mark.anyio

Answered = tuple[tuple[Claim, ...], list[api.ContainerAllocateResponse]]


class FakeStates:
    def __init__(self, site: Site) -> None:
        self._site = site
        self.read: list[str] = []
        self.failed: Given | None = None

    async def read_one(self, uid: str, *, timeout_s: float) -> None:
        self.read.append(uid)
        if self.failed is not None:
            self._site.picture.states_by_uid[uid] = self.failed.state("failed", code="share-lost")


class FakeRecords:
    """Finds the record of a pod at one of the reads."""

    def __init__(self, site: Site, pod: Given, *, at_read: int) -> None:
        self._site = site
        self._pod = pod
        self._at_read = at_read
        self.read: list[str] = []

    async def read_one(self, uid: str, *, timeout_s: float) -> None:
        self.read.append(uid)
        if len(self.read) == self._at_read:
            self._site.picture.entries_by_uid[self._pod.uid] = self._pod.entry
            self._site.picture.note_change()


class Desk:
    """An allocator with its peers."""

    def __init__(self, directory: Path, *listed: Given, **settings: object) -> None:
        self.site = make_site(directory, **settings)
        self.kubelet = FakeKubelet(*(pod.listed() for pod in listed))
        self.pods = FakePods()
        self.states = FakeStates(self.site)
        self.allocator = Allocator(
            site=self.site,
            kubelet=self.kubelet,  # type: ignore[arg-type]  # a stand-in with the one method used
            renderer=Renderer(Catalog.from_settings(), self.site.settings),
            keeper=GrantKeeper(self.site),
            limiter=Limiter(self.site),
            vnpu_core=VnpuCore(self.site.settings),
        )
        self.allocator.pods = self.pods
        self.allocator.states = self.states

    async def ask(self, *ids: str) -> Answered | Refuse:
        return await self.allocator.allocate([request(*ids)])


def refused(outcome: Answered | Refuse) -> str:
    assert isinstance(outcome, Refuse), outcome
    return outcome.code


async def test_answer_is_kept_on_disk_before_it_is_given(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    outcome = await desk.ask("nvidia-0::0")
    assert not isinstance(outcome, Refuse)
    claims, responses = outcome
    assert claims[0].container == "main"
    assert responses[0].cdi_devices[0].name == "nvidia.com/gpu=nvidia-0"
    assert desk.pods.confirmed == ["pod"]
    assert desk.states.read == [pod.uid]
    again = desk.site.checkpoint.load_grants()
    assert [grant.ids for grant in again] == [("nvidia-0::0",)]


async def test_grant_is_rolled_back_when_the_disk_refuses_it(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    (tmp_path / "grants.new").mkdir()
    assert refused(await desk.ask("nvidia-0::0")) == "host-failed"
    assert len(desk.site.picture.grants) == 0
    (tmp_path / "grants.new").rmdir()
    assert not isinstance(await desk.ask("nvidia-0::0"), Refuse)


async def test_answer_that_never_arrived_is_given_again(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    first = await desk.ask("nvidia-0::0")
    assert not isinstance(first, Refuse)
    again = await desk.allocator.allocate([request("nvidia-0::0")], repeated_after_s=60.0)
    assert not isinstance(again, Refuse)
    assert again[1] == first[1]
    assert len(desk.site.picture.grants) == 1


async def test_repeated_call_leaves_older_grants_of_the_same_ids_alone(tmp_path: Path) -> None:
    """Kubelet gives the ids of a finished init container to the next one."""
    pod = Given("pod", ("init", "init", {GPU: 1}), ("main", "app", {GPU: 1}))
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    first = await desk.ask("nvidia-0::0")
    assert not isinstance(first, Refuse)
    assert first[0][0].container == "init"
    again = await desk.allocator.allocate([request("nvidia-0::0")], repeated_after_s=0.0)
    assert not isinstance(again, Refuse)
    assert again[0][0].container == "main"
    assert len(desk.site.picture.grants) == 2


async def test_update_ends_the_wait_at_once(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod, allocate_wait_s=30.0)
    outcomes: list[Answered | Refuse] = []

    async def ask() -> None:
        outcomes.append(await desk.ask("nvidia-0::0"))

    async with background() as group:
        group.start_soon(ask)
        await until(lambda: desk.kubelet.list_count > 0)
        know(desk.site, pod)
        await until(lambda: bool(outcomes))
    assert not isinstance(outcomes[0], Refuse)


async def test_record_that_was_not_received_is_read(tmp_path: Path) -> None:
    """The feed lost it, or waits for a new subscription to deliver all records again."""
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    desk.site.picture.pods.put(pod.facts, revision=1, now_s=0)
    records = desk.allocator.records = FakeRecords(desk.site, pod, at_read=1)
    assert not isinstance(await desk.ask("nvidia-0::0"), Refuse)
    assert records.read == [pod.uid]


async def test_pod_affected_by_an_outage_is_refused_later_than_others(tmp_path: Path) -> None:
    """Kubelet never asks again for a pod that was refused."""
    pod = Given("pod")
    desk = Desk(tmp_path, pod, allocate_wait_s=0.01, outage_wait_s=30.0)
    desk.site.picture.pods.put(pod.facts, revision=1, now_s=0)
    records = desk.allocator.records = FakeRecords(desk.site, pod, at_read=2)
    desk.pods.failures = 3
    assert not isinstance(await desk.ask("nvidia-0::0"), Refuse)
    assert len(records.read) == 2


async def test_outage_that_lasts_is_the_reason(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    desk.site.picture.pods.put(pod.facts, revision=1, now_s=0)
    assert refused(await desk.ask("nvidia-0::0")) == "ledger-unknown"


async def test_pod_whose_record_did_not_arrive_before_the_outage_is_served(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    desk.site.picture.pods.put(pod.facts, revision=1, now_s=0)
    desk.site.picture.view.bus_connected = False
    assert not isinstance(await desk.ask("nvidia-0::0"), Refuse)


async def test_wait_ends_with_the_reason(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    assert refused(await desk.ask("nvidia-0::0")) == "pod-unknown"
    desk.kubelet.pods = None
    assert refused(await desk.ask("nvidia-0::0")) == "list-unavailable"
    assert desk.kubelet.list_count >= 3


async def test_pod_recreated_under_the_same_name_is_not_served(tmp_path: Path) -> None:
    old, new = Given("db-0", uid="old"), Given("db-0", uid="new", sequence=2)
    desk = Desk(tmp_path, new)
    know(desk.site, old)

    def show_new() -> None:
        desk.site.picture.pods.put(replace(old.facts, finished=True), revision=1, now_s=0)
        know(desk.site, new)

    desk.pods.on_confirm = show_new
    outcome = await desk.ask("nvidia-0::0")
    assert not isinstance(outcome, Refuse)
    assert outcome[0][0].pod.uid == "new"
    assert desk.pods.confirmed == ["db-0"]


async def test_without_the_api_server_the_call_is_refused(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    desk.pods.is_available = False
    assert refused(await desk.ask("nvidia-0::0")) == "api-unavailable"
    desk.allocator.pods = None
    assert refused(await desk.ask("nvidia-0::0")) == "api-unavailable"


async def test_old_kubelet_needs_one_read_of_all_pods(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    desk.site.picture.view.lists_active_only = False
    assert not isinstance(await desk.ask("nvidia-0::0"), Refuse)
    assert desk.pods.confirmed == ["*"]


async def test_pod_without_a_mirror_keeps_no_share_away_right_after_a_restart_of_kubelet(
    tmp_path: Path,
) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    assert desk.kubelet.pods is not None
    desk.kubelet.pods = [ListedPod(namespace="nowhere", name="static"), *desk.kubelet.pods]
    view = desk.site.picture.view
    view.lists_active_only = False
    assert refused(await desk.ask("nvidia-0::0")) == "pod-unknown"
    desk.pods.on_learn = lambda: setattr(view, "lists_active_only", True)
    assert not isinstance(await desk.ask("nvidia-0::0"), Refuse)
    assert set(desk.pods.kind_reads) == {1}


async def test_state_that_failed_a_moment_ago_is_heeded(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    desk.states.failed = pod
    assert refused(await desk.ask("nvidia-0::0")) == "state-failed"
    assert len(desk.site.picture.grants) == 0


async def test_known_records_are_served_without_a_connection_to_the_bus(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    desk.allocator.states = None
    assert not isinstance(await desk.ask("nvidia-0::0"), Refuse)


async def test_limits_file_is_written_for_pods_without_the_limits_volume(tmp_path: Path) -> None:
    pod = Given("pod", limits_mounted=frozenset())
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    outcome = await desk.ask("nvidia-0::0")
    assert not isinstance(outcome, Refuse)
    mount = outcome[1][0].mounts[0]
    assert (mount.container_path, mount.read_only) == ("/etc/hami", True)
    found = decode_limits((Path(mount.host_path) / "limits").read_text())
    assert found.allocation_id == pod.record.allocation_id
    assert Path(mount.host_path).stat().st_mode & 0o755 == 0o755


async def test_preference_is_for_the_devices_of_the_waiting_container(tmp_path: Path) -> None:
    pod = Given("pod", ("main", "app", {GPU: 2}))
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    available = [split.id for split in desk.site.picture.splits("nvidia", GPU).all]
    chosen = await desk.allocator.prefer(request("x", "y"), available=available, must=())
    assert chosen == ("nvidia-0::0", "nvidia-1::0")
    assert desk.pods.confirmed == []
    desk.kubelet.pods = ()
    nobody = await desk.allocator.prefer(request("x"), available=available, must=())
    assert len(nobody) == 1


async def test_container_may_start_with_granted_ids_only(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    await desk.ask("nvidia-0::0")
    check = desk.allocator.check_start
    assert check(GPU, ["nvidia-0::0"]) is None
    for ids in ([], ["nvidia-0::1"], ["nvidia-0::0", "nvidia-0::1"]):
        assert refused_start(check(GPU, ids)) == "not-granted"
    desk.site.picture.states_by_uid[pod.uid] = pod.state("failed", allocation_id="older")
    assert check(GPU, ["nvidia-0::0"]) is None
    desk.site.picture.states_by_uid[pod.uid] = pod.state("failed")
    assert refused_start(check(GPU, ["nvidia-0::0"])) == "state-failed"
    desk.site.picture.states_by_uid.clear()
    desk.site.picture.failures_by_uid[pod.uid] = Failure(code="device-mismatch", reason="")
    assert refused_start(check(GPU, ["nvidia-0::0"])) == "state-failed"


def refused_start(outcome: Refuse | None) -> str:
    assert outcome is not None
    return outcome.code


@pytest.mark.parametrize(
    ("mode", "nodes", "cdi", "visible"),
    [
        ("cdi", [], ["nvidia.com/gpu=nvidia-0"], "void"),
        ("devices", ["nvidia0", "nvidiactl", "nvidia-uvm"], [], "nvidia-0"),
        ("env", [], [], "nvidia-0"),
    ],
)
async def test_each_injection_mode_reaches_the_runtime(
    tmp_path: Path, mode: str, nodes: list[str], cdi: list[str], visible: str
) -> None:
    pod = Given("pod", region_volumes={"main": "hami-region-main"})
    desk = Desk(tmp_path, pod, injection=mode, library_log_level="1")
    canonical = desk.site.picture.canonical_by_vendor["nvidia"]
    with_minor = tuple(replace(one, minor=one.index) for one in canonical.devices)
    desk.site.picture.set_canonical(replace(canonical, devices=with_minor))
    know(desk.site, pod)
    outcome = await desk.ask("nvidia-0::0")
    assert not isinstance(outcome, Refuse)
    response = outcome[1][0]
    given = [Path(one.host_path) for one in response.devices]
    assert [path.name for path in given if path.name in nodes] == nodes
    assert all(path.name in nodes or path.exists() for path in given), "the runtime would fail"
    assert [one.name for one in response.cdi_devices] == cdi
    assert response.envs["NVIDIA_VISIBLE_DEVICES"] == visible
    assert response.envs["CUDA_DEVICE_MEMORY_SHARED_CACHE"] == "/run/hami/region"
    assert list(response.mounts) == []


async def test_share_is_mounted_with_the_library_that_enforces_it(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod, **enforcing(tmp_path))
    know(desk.site, pod)
    outcome = await desk.ask("nvidia-0::0")
    assert not isinstance(outcome, Refuse)
    mounts = {mount.container_path: mount for mount in outcome[1][0].mounts}
    assert set(mounts) == {
        "/usr/local/vgpu/libvgpu.so",
        "/etc/ld.so.preload",
        "/run/hami-priority",
        "/run/hami-priority/bells",
    }
    assert all(Path(mount.host_path).exists() for mount in mounts.values())
    assert all(mount.read_only for mount in mounts.values())
    preload = Path(mounts["/etc/ld.so.preload"].host_path).read_text()
    assert preload == "/usr/local/vgpu/libvgpu.so\n"
    library = Path(mounts["/usr/local/vgpu/libvgpu.so"].host_path)
    assert library.read_bytes() == Path(desk.site.settings.library).read_bytes()
    (grant,) = desk.site.checkpoint.load_grants()
    assert grant.library == library.name


@pytest.mark.parametrize(
    ("overcommit", "volumes", "quanta", "gate"),
    [
        ("recall", {"main": "region"}, True, "residency-1"),
        ("recall", {}, True, ""),
        ("managed", {"main": "region"}, True, "quantum-1"),
        ("managed", {}, True, ""),
        ("managed", {"main": "region"}, False, ""),
    ],
)
async def test_container_gets_a_gate_where_it_can_be_recalled_or_thrash(
    tmp_path: Path, overcommit: str, volumes: dict[str, str], gate: str, *, quanta: bool
) -> None:
    pod = Given("pod", region_volumes=volumes)
    desk = Desk(tmp_path, pod, **enforcing(tmp_path, thrash=ThrashRules(quanta=quanta)))
    know(desk.site, pod)
    view = desk.site.picture.view
    first = replace(view.devices_by_uuid["nvidia-0"], overcommit=overcommit, capacity_mib=2000)
    view.devices_by_uuid = {**view.devices_by_uuid, "nvidia-0": first}
    outcome = await desk.ask("nvidia-0::0")
    assert not isinstance(outcome, Refuse)
    (answer,) = outcome[1]
    mounts = {mount.container_path: mount for mount in answer.mounts}
    bell = Path(mounts["/run/hami-priority/bells"].host_path)
    assert [one.name for one in bell.iterdir()] == ([gate] if gate else [])
    assert ("CUDA_OVERSUBSCRIBE" in answer.envs) == (overcommit == "managed")


async def test_share_is_refused_where_the_library_is_missing(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod, **enforcing(tmp_path, library=str(tmp_path / "nowhere.so")))
    know(desk.site, pod)
    outcome = await desk.ask("nvidia-0::0")
    assert isinstance(outcome, Refuse)
    assert outcome.code == "limiter-missing"
    assert "nowhere.so cannot be read" in outcome.text
    assert "set library" in outcome.text
    assert len(desk.site.picture.grants) == 0


@pytest.mark.parametrize(
    ("enforcement", "is_whole", "is_refused"),
    [("libvgpu", False, True), ("libvgpu", True, False), ("none", False, False)],
)
async def test_mounts_are_checked_where_the_library_enforces_the_share(
    tmp_path: Path, enforcement: str, *, is_whole: bool, is_refused: bool
) -> None:
    pod = Given("pod", hidden_limits={"main": "container main: volumeMounts[/run]: x; y"})
    shares = pod.record.containers[0]
    if is_whole:
        share = replace(shares.shares[0], memory_mib=1000, exclusive=True)
        whole = (replace(shares, shares=(share,)),)
        pod.entry = replace(pod.entry, record=replace(pod.record, containers=whole))
        assert pod.facts.signed is not None
        placement = replace(pod.facts.signed.placement, containers=whole)
        pod.facts = replace(pod.facts, signed=replace(pod.facts.signed, placement=placement))
    desk = Desk(tmp_path, pod, **enforcing(tmp_path, enforcement=enforcement))
    know(desk.site, pod)
    outcome = await desk.ask("nvidia-0::0")
    assert isinstance(outcome, Refuse) is is_refused
    if isinstance(outcome, Refuse):
        assert outcome.code == "limits-hidden"
        assert outcome.text == "pod default/pod: container main: volumeMounts[/run]: x; y"


async def test_library_that_vanished_from_the_host_is_installed_again(tmp_path: Path) -> None:
    pods = Given("a"), Given("b")
    desk = Desk(tmp_path, pods[0], **enforcing(tmp_path))
    know(desk.site, *pods)
    assert not isinstance(await desk.ask("nvidia-0::0"), Refuse)
    (installed,) = (tmp_path / "host").glob("libvgpu-*")
    installed.unlink()
    desk.kubelet.pods = [pods[1].listed()]
    assert not isinstance(await desk.ask("nvidia-0::1"), Refuse)
    assert installed.is_file()


async def test_whole_devices_are_not_intercepted(tmp_path: Path) -> None:
    pod = Given("pod")
    shares = pod.record.containers[0]
    whole = replace(
        shares, shares=(replace(shares.shares[0], exclusive=True, memory_mib=1000, core_pct=100),)
    )
    pod.entry = replace(pod.entry, record=replace(pod.record, op="resize", containers=(whole,)))
    desk = Desk(tmp_path, pod, **enforcing(tmp_path))
    know(desk.site, pod)
    outcome = await desk.ask("nvidia-0::0")
    assert not isinstance(outcome, Refuse)
    response = outcome[1][0]
    assert list(response.mounts) == []
    assert [name for name in response.envs if name.startswith(("CUDA_", "GPU_"))] == []
    (grant,) = desk.site.picture.grants
    assert grant.library == ""


async def test_two_calls_at_once_cannot_take_the_same_container(tmp_path: Path) -> None:
    pod = Given("pod")
    desk = Desk(tmp_path, pod)
    know(desk.site, pod)
    outcomes: list[Answered | Refuse] = []

    async def ask(kubelet_id: str) -> None:
        outcomes.append(await desk.ask(kubelet_id))

    async with anyio.create_task_group() as group:
        group.start_soon(ask, "nvidia-0::0")
        group.start_soon(ask, "nvidia-0::1")
    assert sorted(isinstance(outcome, Refuse) for outcome in outcomes) == [False, True]


async def test_pod_with_an_unreadable_newest_record_is_refused(tmp_path: Path) -> None:
    pod, other = Given("pod"), Given("other")
    desk = Desk(tmp_path, pod)
    know(desk.site, pod, other)
    desk.site.picture.note_unreadable(pod.uid, "record", "WireInvalid: odd")
    assert refused(await desk.ask("nvidia-0::0")) == "ledger-unreadable"
    assert len(desk.site.picture.grants) == 0
    desk.kubelet.pods = (other.listed(),)
    assert not isinstance(await desk.ask("nvidia-0::0"), Refuse)
    desk.site.picture.note_unreadable(pod.uid, "record", "")
    desk.kubelet.pods = (pod.listed(),)
    assert not isinstance(await desk.ask("nvidia-0::1"), Refuse)


async def test_no_share_is_allocated_while_a_candidate_pod_is_unreadable(
    tmp_path: Path,
) -> None:
    pod, hidden = Given("pod"), Given("hidden")
    desk = Desk(tmp_path, pod, hidden)
    know(desk.site, pod)
    picture = desk.site.picture
    picture.unreadable_pods[hidden.uid] = UnreadablePod(
        namespace=hidden.facts.namespace, name=hidden.facts.name, resources=frozenset({GPU})
    )
    assert refused(await desk.ask("nvidia-0::0")) == "pod-unreadable"
    picture.unreadable_pods.clear()
    assert not isinstance(await desk.ask("nvidia-0::0"), Refuse)


def npu_pod(count: int = 1) -> Given:
    return Given("npu", ("main", "app", {NPU: count}))


def install_vnpu_core(directory: Path) -> VnpuCoreSettings:
    library, region = directory / "vnpu-core", directory / "region"
    library.mkdir()
    region.mkdir()
    (library / "libvnpu.so").write_bytes(b"\x7fELF")
    (library / "ld.so.preload").write_text("/hami-vnpu-core/libvnpu.so\n", encoding="utf-8")
    return VnpuCoreSettings(library_dir=str(library), region_dir=str(region))


def npu_desk(tmp_path: Path, pod: Given, where: VnpuCoreSettings, **more: object) -> Desk:
    desk = Desk(tmp_path, pod, **enforcing(tmp_path, vnpu_core=where, **more))
    chips = tuple(device(number, vendor="ascend") for number in range(2))
    known = desk.site.picture.canonical_by_vendor["nvidia"]
    desk.site.picture.set_canonical(replace(known, vendor="ascend", devices=chips))
    know(desk.site, pod)
    return desk


async def test_soft_share_of_a_chip_is_given_with_its_library(tmp_path: Path) -> None:
    pod = npu_pod()
    where = install_vnpu_core(tmp_path)
    desk = npu_desk(tmp_path, pod, where)
    outcome = await desk.allocator.allocate([request("ascend-0-0", resource=NPU)])
    assert not isinstance(outcome, Refuse), outcome
    (answer,) = outcome[1]
    own = f"{where.library_dir}/containers/{pod.uid}_main"
    given = [(one.container_path, one.host_path, one.read_only) for one in answer.mounts]
    assert given[:4] == [
        ("/hami-vnpu-core", where.library_dir, True),
        ("/etc/ld.so.preload", f"{where.library_dir}/ld.so.preload", True),
        ("/hami-shared-region", where.region_dir, False),
        ("/hami-vnpu-shmem", own, False),
    ]
    assert answer.envs["NPU_MEM_QUOTA"] == "10"
    assert answer.envs["NPU_GLOBAL_SHM_PATH"] == "/hami-shared-region/0_global_registry"
    assert Path(own).stat().st_mode & 0o777 == 0o777
    (grant,) = desk.site.picture.grants
    assert grant.library == "hami-vnpu-core"

    core = VnpuCore(desk.site.settings)
    core.tidy(lambda uid: uid == pod.uid)
    assert Path(own).is_dir()
    core.tidy(lambda _uid: False)
    assert not Path(own).exists()


async def test_second_soft_share_of_a_container_counts_as_not_enforced(tmp_path: Path) -> None:
    pod = npu_pod(2)
    desk = npu_desk(tmp_path, pod, install_vnpu_core(tmp_path))
    outcome = await desk.allocator.allocate([request("ascend-0-0", "ascend-1-0", resource=NPU)])
    assert not isinstance(outcome, Refuse), outcome
    assert "NPU_MEM_QUOTA" in outcome[1][0].envs
    (grant,) = desk.site.picture.grants
    assert grant.library == ""


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda where: (where / "ld.so.preload").unlink(), "ld.so.preload: No such file"),
        (lambda where: (where / "libvnpu.so").unlink(), "libvnpu.so, which"),
        (lambda where: (where / "ld.so.preload").write_text(""), "names no library"),
        (lambda where: (where / "ld.so.preload").write_text("/lib/x.so"), "names /lib/x.so"),
        (
            lambda where: (where / "ld.so.preload").write_text("/hami-vnpu-core/../x.so"),
            "not a file below",
        ),
        (lambda where: (where.parent / "region").rmdir(), "region is not a directory"),
    ],
)
async def test_soft_share_without_its_library_is_neither_offered_nor_given(
    tmp_path: Path, spoil: Callable[[Path], object], problem: str
) -> None:
    pod = npu_pod()
    where = install_vnpu_core(tmp_path)
    desk = npu_desk(tmp_path, pod, where)
    core = VnpuCore(desk.site.settings)
    chip = DeviceFacts(uuid="ascend-0", vendor="ascend", index=0, type="T", memory_mib=1000)
    inventory = Inventory(devices=(chip, replace(chip, uuid="ascend-1", mode="vnpu")))
    assert chip.mode == "soft"
    assert await core.review(inventory) == inventory

    spoil(Path(where.library_dir))
    outcome = await desk.allocator.allocate([request("ascend-0-0", resource=NPU)])
    assert refused(outcome) == "limiter-missing"
    assert isinstance(outcome, Refuse)
    assert problem in outcome.text
    assert "vnpu_core.library_dir" in outcome.text
    reviewed = await core.review(inventory)
    assert [one.mode for one in reviewed.devices] == ["whole", "vnpu"]
    (problem,) = reviewed.problems
    assert problem == f"soft shares are not offered: {outcome.text}"


async def test_node_that_enforces_nothing_gives_soft_shares_without_library(
    tmp_path: Path,
) -> None:
    pod = npu_pod()
    nowhere = VnpuCoreSettings(library_dir=str(tmp_path / "none"))
    desk = npu_desk(tmp_path, pod, nowhere, enforcement="none")
    outcome = await desk.allocator.allocate([request("ascend-0-0", resource=NPU)])
    assert not isinstance(outcome, Refuse), outcome
    assert not any(name.startswith("NPU_") for name in outcome[1][0].envs)
    (grant,) = desk.site.picture.grants
    assert grant.library == ""
