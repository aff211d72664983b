# SPDX-License-Identifier: Apache-2.0
"""Limits: from the file that the tenant cannot write, else from the environment; strict, live."""

import os
import time
from pathlib import Path

import pytest

from hami_common.pods.limits import DeviceLimit, Limits, encode
from tests.support.accounting import Container, limits_text, until

MIB = 1 << 20
GOOD = limits_text(("GPU-0", 100), ("GPU-1", 20), core_pct=30, priority=3)
UNLIMITED = -1
TWO_LOOKS_S = 0.6
"""The library looks at the file four times a second."""


@pytest.fixture
def container(tmp_path: Path) -> Container:
    """A container without limits."""
    return Container(tmp_path)


def test_file_of_the_agent_is_parsed(container: Container) -> None:
    limits = Limits(
        container="main",
        allocation_id="01J",
        priority=0,
        devices=(
            DeviceLimit(vendor="nvidia", uuid="GPU-a", memory_mib=15360, core_pct=30),
            DeviceLimit(vendor="nvidia", uuid="MIG-b", memory_mib=1, exclusive=True),
        ),
    )
    container.write_limits(encode(limits))
    with container.probe() as probe:
        assert (
            probe.text("read etc/hami/limits")
            == f"priority=0 policy=0 GPU-a:{15360 * MIB}:30 MIG-b:{MIB}:100"
        )
        assert (probe.ask("count"), probe.ask("by_ordinal"), probe.ask("find MIG-b")) == (2, 0, 1)
        assert (probe.ask("limit 1"), probe.ask("core 0"), probe.text("uuid 0")) == (
            MIB,
            30,
            "GPU-a",
        )
        assert probe.ask("ordinal 0") == -1


def test_file_with_keys_of_later_versions_is_parsed(container: Container) -> None:
    container.write_limits(
        GOOD + "color=blue\ndevice.0.colour=red\ndevice.9x=1\ncore_policy=force\n"
    )
    with container.probe() as probe:
        assert probe.text("read etc/hami/limits").startswith("priority=3 policy=1 GPU-0")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hami-limits/2\n" + GOOD.partition("\n")[2],
        GOOD.replace("=100\n", "=100 \n"),
        GOOD.replace("memory_mib=100", "memory_mib=-1"),
        GOOD.replace("memory_mib=100", "memory_mib=0x10"),
        GOOD.replace("memory_mib=100", f"memory_mib={2**64}"),
        GOOD.replace("memory_mib=100", f"memory_mib={2**28}"),
        GOOD.replace("core_pct=30", "core_pct=101"),
        GOOD.replace("priority=3", "priority=8"),
        GOOD.replace("devices=2", "devices=3"),
        GOOD.replace("devices=2", "devices=65"),
        GOOD.replace("GPU-1", "GPU-0"),
        GOOD.replace("GPU-1", "G" * 64),
        GOOD.replace("\n", "\r\n"),
        GOOD + "device.0.memory_mib=200\n",
        GOOD + "no key\n",
        GOOD + "long=" + "x" * 600 + "\n",
        GOOD + "\0",
        GOOD[: GOOD.index("device.1.memory_mib") + 20],
        "x" * 70000,
    ],
)
def test_malformed_file_grants_nothing(container: Container, text: str) -> None:
    container.write_limits(text)
    with container.probe(env={"CUDA_DEVICE_MEMORY_LIMIT": "10g"}) as probe:
        assert probe.text("read etc/hami/limits").startswith("broken ")
        assert (probe.ask("find GPU-0"), probe.ask("limit 0")) == (0, 0)
        assert probe.ask("charge 0 1") == 0
        assert "nothing can be allocated" in probe.end()


@pytest.mark.parametrize("kind", ["directory", "dangling", "pipe"])
def test_unreadable_limits_grant_nothing(container: Container, kind: str) -> None:
    container.limits.parent.mkdir(parents=True)
    if kind == "directory":
        container.limits.mkdir()
    elif kind == "dangling":
        container.limits.symlink_to("..data/limits")
    else:
        os.mkfifo(container.limits)
    with container.probe() as probe:
        assert (probe.ask("charge 0 1"), probe.ask("limit 0")) == (0, 0)


def test_broken_file_made_good_takes_effect(container: Container) -> None:
    container.write_limits("nonsense")
    with container.probe() as probe:
        assert probe.ask("charge 0 1") == 0
        container.write_limits(GOOD)
        until(lambda: probe.ask("limit 0") == 100 * MIB, "the good file is read")
        assert (probe.ask("charge 0 1"), probe.ask("find GPU-1")) == (1, 1)
        assert container.region.exists()


def test_smaller_limit_refuses_until_use_is_below_and_says_over(container: Container) -> None:
    container.write_limits(GOOD)
    with container.probe() as probe, container.probe() as other:
        assert probe.ask(f"charge 0 {70 * MIB}") == 1
        assert other.ask(f"charge 0 {10 * MIB}") == 1
        container.write_limits(GOOD.replace("memory_mib=100", "memory_mib=50"))
        until(lambda: probe.ask("limit 0") == other.ask("limit 0") == 50 * MIB, "both have read it")
        assert (probe.ask("charge 0 1"), other.ask("charge 0 1")) == (0, 0)
        until(lambda: other.ask("since 0") > 0, "the region says over")
        assert (probe.ask("over 0"), other.ask("over 0")) == (1, 1)
        assert probe.ask(f"refund 0 {30 * MIB}") == 1
        assert (other.ask("over 0"), other.ask("charge 0 1")) == (0, 0)
        assert probe.ask(f"refund 0 {MIB}") == 1
        assert (other.ask(f"charge 0 {MIB}"), other.ask("charge 0 1")) == (1, 0)
        until(lambda: other.ask("since 0") == 0, "the region says over no more")


def test_larger_limit_takes_effect_in_a_running_process(container: Container) -> None:
    container.write_limits(GOOD)
    with container.probe() as probe:
        assert probe.ask(f"charge 0 {101 * MIB}") == 0
        container.write_limits(GOOD.replace("memory_mib=100", "memory_mib=200"))
        until(lambda: probe.ask(f"charge 0 {101 * MIB}"), "the new limit is read")
        assert probe.ask(f"charge 0 {100 * MIB}") == 0


def test_last_good_limits_hold_while_the_file_is_broken(container: Container) -> None:
    container.write_limits(GOOD)
    with container.probe() as probe:
        assert probe.ask("charge 0 1") == 1
        container.write_limits("nonsense")
        container.write_limits(GOOD.replace("GPU-0", "GPU-7"))
        container.write_limits("nonsense again")
        container.write_limits(GOOD.replace("memory_mib=20", "memory_mib=30"))
        until(lambda: probe.ask("limit 1") == 30 * MIB, "the next good file is read")
        assert (probe.ask("limit 0"), probe.ask("find GPU-0")) == (100 * MIB, 0)


def test_environment_is_ignored_where_there_is_a_file(container: Container) -> None:
    container.write_limits(GOOD)
    env = {
        "CUDA_DEVICE_MEMORY_LIMIT": "10g",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "10g",
        "CUDA_DEVICE_SM_LIMIT": "90",
        "CUDA_TASK_PRIORITY": "0",
        "GPU_CORE_UTILIZATION_POLICY": "disable",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(container.root / "mine"),
    }
    with container.probe() as first, container.probe(env=env) as second:
        assert first.ask(f"charge 0 {60 * MIB}") == 1
        assert second.ask(f"charge 0 {60 * MIB}") == 0
        assert [second.ask(f"{word} 0") for word in ("core", "priority", "policy")] == [30, 3, 0]
        assert not list(container.root.glob("mine*"))


def test_no_limit_applies_without_file_and_environment(container: Container) -> None:
    with container.probe() as probe:
        assert (probe.ask("count"), probe.ask(f"charge 0 {2**50}")) == (0, 1)
        assert (probe.ask("limit 0"), probe.ask("core 0")) == (UNLIMITED, 100)
        assert len(list(Path(f"/proc/{probe.process.pid}/task").iterdir())) == 1


def test_missing_file_grants_nothing_where_the_agent_gave_the_library(container: Container) -> None:
    (container.root / "run/hami-priority").mkdir()
    env = {"CUDA_DEVICE_MEMORY_LIMIT": "10g"}
    with container.probe(env=env) as probe:
        assert (probe.ask("charge 0 1"), probe.ask("limit 0")) == (0, 0)
        container.write_limits(GOOD)
        until(lambda: probe.ask("limit 0") == 100 * MIB, "the file is read")
        container.limits.unlink()
        time.sleep(TWO_LOOKS_S)
        assert (probe.ask("limit 0"), probe.ask(f"charge 0 {101 * MIB}")) == (100 * MIB, 0)
        assert "limits is missing; nothing can be allocated" in probe.end()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("15360MB", 15360 * MIB),
        ("15360MiB", 15360 * MIB),
        ("15360m", 15360 * MIB),
        ("2g", 2 << 30),
        ("2GB", 2 << 30),
        ("1T", 1 << 40),
        ("7", 7),
        ("7B", 7),
        ("4k", 4096),
        ("1.5g", -1),
        ("0x10", -1),
        ("-1", -1),
        ("10 m", -1),
        ("10mb/s", -1),
        ("10iB", -1),
        ("m", -1),
        ("99999999999999999999", -1),
        ("18446744073709551615k", -1),
    ],
)
def test_sizes_are_read_strictly(container: Container, text: str, size: int) -> None:
    with container.probe() as probe:
        assert probe.ask(f"bytes {text}") == size


def test_devices_of_the_environment_are_ordinals(container: Container) -> None:
    env = {
        "CUDA_DEVICE_MEMORY_LIMIT": "10m",
        "CUDA_DEVICE_MEMORY_LIMIT_3": "20m",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "0",
        "CUDA_DEVICE_SM_LIMIT": "40",
        "CUDA_DEVICE_SM_LIMIT_3": "250",
        "CUDA_TASK_PRIORITY": "5",
        "GPU_CORE_UTILIZATION_POLICY": "Force",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(container.root / "region"),
    }
    with container.probe(env=env) as probe:
        assert (probe.ask("count"), probe.ask("by_ordinal"), probe.ask("ordinal 3")) == (4, 1, 3)
        assert [probe.ask(f"limit {n}") for n in range(4)] == [10 * MIB] * 3 + [20 * MIB]
        assert [probe.ask(f"core {n}") for n in range(4)] == [40, 40, 40, 100]
        assert (probe.ask("priority"), probe.ask("policy"), probe.ask("ordinal 4")) == (5, 1, -1)
        assert (container.root / "region-1").exists()
        assert probe.end() == ""


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("CUDA_DEVICE_MEMORY_LIMIT", "1.5g", [0, 1]),
        ("CUDA_DEVICE_MEMORY_LIMIT_1", "lots", [1]),
        ("CUDA_DEVICE_SM_LIMIT_0", "half", [0]),
    ],
)
def test_unreadable_environment_is_reported_and_grants_nothing(
    container: Container, name: str, value: str, refused: list[int]
) -> None:
    env = {
        name: value,
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(container.root / "region"),
    }
    with container.probe(env=env) as probe:
        assert [n for n in (0, 1) if not probe.ask(f"charge {n} 1")] == refused
        assert f"{name}={value}: not understood" in probe.end()


KOORDINATOR = {
    "NVIDIA_VISIBLE_DEVICES": "1",
    "CUDA_DEVICE_MEMORY_LIMIT": str(16 << 30),
    "CUDA_DEVICE_SM_LIMIT": "50",
}
"""The share of a pod with the label ``koordinator.sh/gpu-isolation-provider: HAMi-core``, as
koordlet writes it (``pkg/koordlet/runtimehooks/hooks/gpu``): memory in bytes, of one device."""
KAI = {"CUDA_DEVICE_MEMORY_LIMIT": "20480m", "CUDA_DEVICE_SM_LIMIT": "25"}
"""The share of a fraction, as KAI's binder writes it (``pkg/binder/plugins/hamicore``): MiB."""
VOLCANO = {
    "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
    "CUDA_DEVICE_MEMORY_LIMIT_1": "3000m",
    "CUDA_DEVICE_SM_LIMIT": "0",
}
"""Two shares without a compute limit, as volcano-vgpu-device-plugin writes them."""


@pytest.mark.parametrize(
    ("env", "memory_bytes", "core_pct"),
    [
        (KOORDINATOR, [16 << 30] * 2, [50] * 2),
        (KOORDINATOR | {"CUDA_DEVICE_SM_LIMIT": "100"}, [16 << 30] * 2, [100] * 2),
        (KAI, [20480 * MIB] * 2, [25] * 2),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "20480m"}, [20480 * MIB] * 2, [100] * 2),
        (VOLCANO, [3000 * MIB] * 2, [100] * 2),
    ],
    ids=["koordinator", "koordinator-full-compute", "kai", "kai-memory-only", "volcano"],
)
def test_environment_of_other_schedulers_limits_the_process(
    container: Container, env: dict[str, str], memory_bytes: list[int], core_pct: list[int]
) -> None:
    cache = {"CUDA_DEVICE_MEMORY_SHARED_CACHE": str(container.root / "uid_main.cache")}
    with container.probe(env=env | cache) as probe, container.probe(env=env | cache) as other:
        assert [probe.ask(f"limit {n}") for n in range(2)] == memory_bytes
        assert [probe.ask(f"core {n}") for n in range(2)] == core_pct
        assert probe.ask(f"charge 0 {memory_bytes[0] - MIB}") == 1
        assert (other.ask(f"charge 0 {2 * MIB}"), other.ask(f"charge 1 {2 * MIB}")) == (0, 1)
    assert (container.root / "uid_main.cache-1").exists()


@pytest.mark.parametrize("cache", ["missing/uid_main.cache", "file/uid_main.cache"])
def test_processes_meet_at_the_default_region_where_the_named_one_cannot_be_made(
    container: Container, cache: str
) -> None:
    """Koordinator names a path in a directory that it mounts only with its GPU monitor."""
    (container.root / "file").touch()
    (container.root / "tmp").mkdir()
    env = KOORDINATOR | {"CUDA_DEVICE_MEMORY_SHARED_CACHE": str(container.root / cache)}
    with container.probe(env=env) as probe, container.probe(env=env) as other:
        assert probe.ask(f"charge 0 {10 << 30}") == 1
        assert other.ask(f"charge 0 {10 << 30}") == 0
        assert (container.root / "tmp/cudevshr.cache-1").exists()
