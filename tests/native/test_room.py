# SPDX-License-Identifier: Apache-2.0
"""Memory beyond the request: the bound that the agent grants in its page, and all that ends it.

The first part runs the accounts alone; the second the whole library on the fake driver, whose own
count is the reference. Takes about 15 s.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hami_common.pods.limits import DeviceLimit, Limits, encode
from hami_nodeagent.core.region import Region
from hami_nodeagent.shell.bursts import BoundPage
from hami_nodeagent.shell.regions import read_region
from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.native.conftest import StartDrive
from tests.support.accounting import PARTS, RELATIVE, Container, Probe, build, until
from tests.support.drive import OUT_OF_MEMORY, Drive
from tests.support.room import FILE_NAME, LEASE_S, RoomPage, set_limits_above

MIB = 1 << 20
UUID = "GPU-0"
REQUEST_MIB, LIMIT_MIB = 100, 300
PERIOD_S = 0.25
"""Of the limiter's own thread."""
SLACK_S = 1.0
"""Delay that a busy machine may add."""


def limits(*, memory_mib: int = REQUEST_MIB, limit_mib: int = LIMIT_MIB) -> Limits:
    device = DeviceLimit(
        vendor="nvidia", uuid=UUID, memory_mib=memory_mib, memory_limit_mib=limit_mib
    )
    other = DeviceLimit(vendor="nvidia", uuid="GPU-1", memory_mib=50)
    return Limits(container="main", allocation_id="a", devices=(device, other))


@pytest.fixture
def container(tmp_path: Path) -> Container:
    """A container that requests 100 MiB of its first device and may be granted 300."""
    made = Container(tmp_path)
    made.bells.mkdir(parents=True)
    made.write_limits(encode(limits()))
    return made


@pytest.fixture
def probe(container: Container) -> Iterator[Probe]:
    """One process in it."""
    with container.probe() as made:
        yield made


@pytest.fixture
def other(container: Container) -> Iterator[Probe]:
    """Another process in it."""
    with container.probe() as made:
        yield made


@pytest.fixture
def new_page(container: Container) -> Iterator[Callable[..., RoomPage]]:
    """Makes pages of the container; each replaces the one before."""
    made: list[RoomPage] = []

    def make() -> RoomPage:
        made.append(RoomPage(container.bells / FILE_NAME))
        return made[-1]

    yield make
    for one in made:
        one.close()


MakePage = Callable[[], RoomPage]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("memory_limit_mib=300", "memory_limit_mib=99"),
        ("memory_limit_mib=300", "memory_limit_mib=-300"),
        ("memory_limit_mib=300", f"memory_limit_mib={2**28}"),
        ("memory_limit_mib=300", "memory_limit_mib=300\ndevice.0.memory_limit_mib=300"),
        ("core_limit_pct=60", "core_limit_pct=29"),
        ("core_limit_pct=60", "core_limit_pct=101"),
        ("core_limit_pct=60", "core_limit_pct="),
        ("core_limit_pct=60", "core_limit_pct=60\ndevice.0.core_limit_pct=60"),
        ("core_pct=30", "core_pct=0"),
    ],
)
def test_limits_that_are_wrong_or_below_the_request_make_the_file_invalid(
    container: Container, before: str, after: str
) -> None:
    first, second = limits().devices
    cores = replace(first, core_pct=30, core_limit_pct=60)
    text = encode(replace(limits(), devices=(cores, second)))
    container.write_limits(text)
    with container.probe() as probe:
        assert [probe.ask(f"{word} 0") for word in ("limit", "bound", "core", "alone")] == [
            *(LIMIT_MIB * MIB, REQUEST_MIB * MIB),
            *(30, 60),
        ]
        assert [probe.ask(f"{word} 1") for word in ("limit", "bound", "core", "alone")] == [
            *(50 * MIB, 50 * MIB),
            *(100, 100),
        ]
        assert before in text
        container.write_limits(text.replace(before, after, 1))
        assert probe.text("read etc/hami/limits").startswith("broken ")


def test_container_grows_into_a_bound_that_is_granted_later(
    probe: Probe, new_page: MakePage
) -> None:
    assert probe.ask(f"charge 0 {101 * MIB}") == 0
    new_page().grant(UUID, 250 * MIB)
    assert probe.ask(f"charge 0 {250 * MIB}") == 1, "a refused request looks for the page"
    assert (probe.ask("charge 0 1"), probe.ask("limit 0")) == (0, LIMIT_MIB * MIB)
    assert probe.ask(f"charge 1 {51 * MIB}") == 0, "the other device has no limit above its request"


@pytest.mark.parametrize(
    ("granted_mib", "bound_mib"), [(0, 100), (50, 100), (299, 299), (2**40, 300)]
)
def test_bound_is_at_least_the_request_and_at_most_the_limit(
    probe: Probe, new_page: MakePage, granted_mib: int, bound_mib: int
) -> None:
    new_page().grant(UUID, granted_mib * MIB)
    assert probe.ask("bound 0") == bound_mib * MIB
    assert probe.ask(f"charge 0 {bound_mib * MIB}") == 1
    assert probe.ask("charge 0 1") == 0


def test_memory_above_a_lowered_bound_stays_and_further_requests_are_refused(
    probe: Probe, other: Probe, new_page: MakePage
) -> None:
    page = new_page()
    page.grant(UUID, 250 * MIB)
    assert probe.ask(f"charge 0 {150 * MIB}") == other.ask(f"charge 0 {50 * MIB}") == 1
    page.grant(UUID, 120 * MIB)
    until(lambda: other.ask("charge 0 1") == 0, "slack beyond the bound is revoked")
    assert probe.ask("charge 0 1") == 0
    assert probe.ask("used 0") >= 200 * MIB
    until(lambda: other.ask("since 0") > 0, "the region shows that the use is above the bound")
    assert probe.ask(f"refund 0 {100 * MIB}") == 1
    assert other.ask(f"charge 0 {MIB}") == 1
    page.grant(UUID, 300 * MIB)
    assert other.ask(f"charge 0 {150 * MIB}") == 1


def test_slack_beyond_a_lowered_bound_is_refused_within_a_period(
    probe: Probe, new_page: MakePage
) -> None:
    """Within its lease a process charges without a look at the bound."""
    page = new_page()
    page.grant(UUID, 300 * MIB)
    assert probe.ask(f"charge 0 {150 * MIB}") == 1
    page.grant(UUID, 100 * MIB)
    began = time.monotonic()
    until(lambda: probe.ask("charge 0 1") == 0, "the slack is revoked")
    assert time.monotonic() - began < PERIOD_S + SLACK_S


def test_bound_is_the_request_again_when_the_lease_has_ended(
    probe: Probe, other: Probe, new_page: MakePage
) -> None:
    new_page().grant(UUID, 200 * MIB, lease_s=1.0)
    assert probe.ask(f"charge 0 {90 * MIB}") == other.ask(f"charge 0 {90 * MIB}") == 1
    until(lambda: probe.ask("bound 0") == REQUEST_MIB * MIB, "the lease has ended")
    until(lambda: probe.ask("charge 0 1") == 0, "slack is revoked")
    assert other.ask("charge 0 1") == 0
    assert probe.ask(f"refund 0 {90 * MIB}") == 1
    assert other.ask(f"charge 0 {9 * MIB}") == 1


def test_processes_of_a_container_share_the_bound_to_the_byte(
    probe: Probe, other: Probe, new_page: MakePage
) -> None:
    new_page().grant(UUID, 250 * MIB)
    assert probe.ask(f"charge 0 {180 * MIB}") == 1
    assert other.ask(f"charge 0 {70 * MIB + 1}") == 0
    assert other.ask(f"charge 0 {70 * MIB}") == 1
    assert (probe.ask("charge 0 1"), other.ask("charge 0 1")) == (0, 0)
    probe.kill()
    assert other.ask(f"charge 0 {180 * MIB}") == 1, "memory of the killed process is reclaimed"
    assert other.ask("charge 0 1") == 0


def test_forked_child_has_the_same_bound(probe: Probe, new_page: MakePage) -> None:
    new_page().grant(UUID, 250 * MIB)
    assert probe.ask(f"charge 0 {200 * MIB}") == 1
    probe.tell(f"child bound 0; charge 0 {51 * MIB}; charge 0 {50 * MIB}; detach")
    assert [int(probe.line()) for _ in range(5)] == [250 * MIB, 0, 1, 0, 0]


def test_page_of_a_new_agent_is_followed_within_a_period(probe: Probe, new_page: MakePage) -> None:
    """The lease of the old page still runs; only the file of that name now counts."""
    new_page().grant(UUID, 250 * MIB)
    assert probe.ask(f"charge 0 {150 * MIB}") == 1
    new_page().grant(UUID, 160 * MIB)
    began = time.monotonic()
    until(lambda: probe.ask("bound 0") == 160 * MIB, "the new page is mapped")
    assert time.monotonic() - began < PERIOD_S + SLACK_S
    new_page().grant(UUID, 280 * MIB)
    assert probe.ask(f"charge 0 {130 * MIB}") == 1, "a refused request looks for a new page"
    assert probe.ask("charge 0 1") == 0


def test_bounds_that_the_agent_writes_are_obeyed(container: Container, probe: Probe) -> None:
    """By the agent's own writer, and its reader of the region."""
    until_ns = time.monotonic_ns() + int(LEASE_S * 1e9)
    page = BoundPage(container.bells / FILE_NAME)
    page.write({UUID: 250}, lease_until_ns=until_ns)
    assert probe.ask(f"charge 0 {250 * MIB}") == 1
    assert probe.ask("charge 0 1") == 0
    region = read_region(container.region)
    assert isinstance(region, Region)
    assert region.devices[UUID].used_bytes == region.devices[UUID].leased_bytes == 250 * MIB
    page.write({}, lease_until_ns=until_ns)
    page.close()
    assert probe.ask("bound 0") == REQUEST_MIB * MIB
    page = BoundPage(container.bells / FILE_NAME)
    page.write({UUID: 270}, lease_until_ns=until_ns)
    page.close()
    assert probe.ask(f"charge 0 {20 * MIB}") == 1


def test_missing_page_ends_the_grant(
    container: Container, probe: Probe, new_page: MakePage
) -> None:
    new_page().grant(UUID, 250 * MIB)
    assert probe.ask(f"charge 0 {90 * MIB}") == 1
    (container.bells / FILE_NAME).unlink()
    until(lambda: probe.ask("bound 0") == REQUEST_MIB * MIB, "the page is gone")
    assert probe.ask(f"charge 0 {11 * MIB}") == 0


def test_device_that_is_being_written_has_its_request(probe: Probe, new_page: MakePage) -> None:
    page = new_page()
    page.grant(UUID, 250 * MIB)
    assert probe.ask("bound 0") == 250 * MIB
    page.tear(UUID)
    assert probe.ask("bound 0") == REQUEST_MIB * MIB
    assert probe.ask(f"charge 0 {101 * MIB}") == 0
    page.grant(UUID, 250 * MIB)
    assert probe.ask(f"charge 0 {101 * MIB}") == 1


@pytest.mark.parametrize(
    "wrong",
    [{"magic": b"VHAMIRM2"}, {"layout": 2}, {"device_bytes": 64}, {"devices": 65}],
    ids=["magic", "layout", "device_bytes", "devices"],
)
def test_page_of_another_layout_grants_nothing(
    container: Container, probe: Probe, wrong: dict[str, Any]
) -> None:
    page = RoomPage(container.bells / FILE_NAME, **wrong)
    page.grant(UUID, 250 * MIB)
    page.close()
    assert probe.ask("bound 0") == REQUEST_MIB * MIB
    assert probe.ask(f"charge 0 {101 * MIB}") == 0


@pytest.mark.parametrize("kind", ["empty", "short", "directory", "link", "pipe", "other device"])
def test_file_that_is_no_page_grants_nothing(
    container: Container, probe: Probe, new_page: MakePage, kind: str
) -> None:
    path = container.bells / FILE_NAME
    page = new_page()
    page.grant("GPU-7" if kind == "other device" else UUID, 250 * MIB)
    content = path.read_bytes()
    if kind != "other device":
        path.unlink()
    if kind in {"empty", "short"}:
        path.write_bytes(content[: {"empty": 0, "short": len(content) - 1}[kind]])
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.with_name("elsewhere").write_bytes(content)
        path.symlink_to("elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    assert probe.ask(f"charge 0 {101 * MIB}") == 0
    assert probe.ask("bound 0") == REQUEST_MIB * MIB


def test_process_without_a_shared_region_has_its_request(
    container: Container, new_page: MakePage
) -> None:
    """Each process on a private region would have the whole bound, unseen by the agent."""
    new_page().grant(UUID, 250 * MIB)
    container.region.parent.rmdir()
    with container.probe() as probe:
        assert probe.ask("bound 0") == REQUEST_MIB * MIB
        assert probe.ask(f"charge 0 {101 * MIB}") == 0


def test_limits_from_the_environment_have_no_bound_above(
    container: Container, new_page: MakePage
) -> None:
    new_page().grant("", 250 * MIB)
    container.limits.unlink()
    container.bells.parent.rename(container.root / "elsewhere")
    env = {
        "CUDA_DEVICE_MEMORY_LIMIT": "100m",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(container.root / "cache"),
    }
    with container.probe(env=env) as probe:
        assert (probe.ask("bound 0"), probe.ask("limit 0")) == (100 * MIB, 100 * MIB)
        assert probe.ask(f"charge 0 {101 * MIB}") == 0


def test_raise_is_reverted_when_the_bound_falls_meanwhile(container: Container) -> None:
    parts = [part for part in PARTS if part != "room"]
    program = build("unit/fallen_bound", RELATIVE, parts)
    done = subprocess.run(
        [program], cwd=container.root, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("reverted\n", "")


def test_process_without_the_watching_thread_has_its_request(container: Container) -> None:
    parts = [part for part in PARTS if part not in {"room", "watch"}]
    program = build("unit/unwatched_bound", RELATIVE, parts)
    done = subprocess.run(
        [program], cwd=container.root, capture_output=True, text=True, check=False
    )
    assert done.stdout == "requested\n", done.stderr


def test_limits_that_change_bound_the_grant(
    container: Container, probe: Probe, new_page: MakePage
) -> None:
    new_page().grant(UUID, 280 * MIB)
    assert probe.ask(f"charge 0 {150 * MIB}") == 1
    container.write_limits(encode(limits(limit_mib=200)))
    until(lambda: probe.ask("bound 0") == 200 * MIB, "the limit is lowered")
    assert probe.ask(f"charge 0 {51 * MIB}") == 0
    container.write_limits(encode(limits(memory_mib=260, limit_mib=0)))
    until(lambda: probe.ask("bound 0") == 260 * MIB, "the request has grown, the limit is gone")
    assert probe.ask("limit 0") == 260 * MIB


# --- the whole library ---

WHOLE_MIB, WHOLE_LIMIT_MIB = 1000, 3000
CONTEXT_MIB = 8


@pytest.fixture
def box(node: GpuNode) -> GpuContainer:
    """A container that requests 1,000 MiB and may be granted 3,000."""
    node.nvml.set_key(0, "context_bytes", str(CONTEXT_MIB * MIB))
    made = node.container(0, memory_mib=WHOLE_MIB)
    set_limits_above(made, memory_limit_mib=WHOLE_LIMIT_MIB)
    return made


@pytest.fixture
def page(box: GpuContainer) -> Iterator[RoomPage]:
    made = RoomPage(box.bell_directory / FILE_NAME)
    yield made
    made.close()


def given_mib(node: GpuNode) -> int:
    """Memory of the first device that the driver has given."""
    return sum(use.used_bytes for use in node.card.uses(node.uuids[0])) // MIB


def test_driver_gives_what_is_granted_and_total_stays_the_limit(
    node: GpuNode, box: GpuContainer, page: RoomPage, start_drive: StartDrive
) -> None:
    uuid, total = node.uuids[0], WHOLE_LIMIT_MIB * MIB
    first, second = (start_drive(box).begin() for _ in range(2))
    used = 2 * CONTEXT_MIB * MIB
    assert first.ask("info") == [WHOLE_MIB * MIB - used, total]
    assert first.ask("total 0") == [total]
    assert first.code("alloc 1200M") == OUT_OF_MEMORY
    page.grant(uuid, 2500 * MIB)
    first.ask("alloc 1200M")
    second.ask("alloc 1000M")
    used += 2200 * MIB
    free = 2500 * MIB - used
    assert second.ask("info") == [free, total]
    assert second.ask("nvml") == [total, total - free, free, total, used, free]
    assert second.code(f"alloc {free + 1}") == OUT_OF_MEMORY
    page.grant(uuid, 1500 * MIB)
    assert second.code(f"alloc {MIB}") == OUT_OF_MEMORY
    assert second.ask("info") == [0, total]
    assert given_mib(node) == used // MIB, "memory above a lowered bound stays"
    first.kill()
    rest = [(1500 - 1000 - CONTEXT_MIB) * MIB, total]
    until(lambda: second.ask("info") == rest, "the memory of the killed process is free")
    second.ask("alloc 400M")


def test_refusal_names_request_bound_and_limit_once(
    node: GpuNode, box: GpuContainer, page: RoomPage, start_drive: StartDrive
) -> None:
    page.grant(node.uuids[0], 3000 * MIB)
    drive = start_drive(box).begin()
    assert drive.code("alloc 3500M") == OUT_OF_MEMORY, "by the limit: not logged"
    page.grant(node.uuids[0], 2000 * MIB)
    assert drive.code("alloc 3000M") == OUT_OF_MEMORY, "with the context more than the limit"
    for way in ("alloc", "async", "alloc"):
        assert drive.code(f"{way} 2500M") == OUT_OF_MEMORY
    assert _said(drive) == (
        f"hami: device {node.uuids[0]}: {2500 * MIB} bytes refused, {CONTEXT_MIB} MiB in use; "
        "request 1000 MiB, present bound 2000 MiB, limit 3000 MiB\n"
    )


def _said(drive: Drive) -> str:
    assert drive.process.stdin is not None
    assert drive.process.stderr is not None
    drive.process.stdin.close()
    return drive.process.stderr.read()


def test_free_memory_beyond_the_request_is_at_most_what_the_card_has(
    node: GpuNode, box: GpuContainer, page: RoomPage, start_drive: StartDrive
) -> None:
    """Processes outside the limiter took it since the agent last looked."""
    page.grant(node.uuids[0], 3000 * MIB)
    drive = start_drive(box).begin()
    outside = start_drive(node.container(0, is_limited=False, is_preloaded=False)).begin()
    outside.ask(f"alloc {outside.ask('info')[0] - 1500 * MIB}")
    free, total = drive.ask("info")
    assert (free, total) == (outside.ask("info")[0], WHOLE_LIMIT_MIB * MIB)
    assert free <= 1500 * MIB
    drive.ask(f"alloc {free}")
    assert drive.ask("info")[0] == 0
