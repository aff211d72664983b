# SPDX-License-Identifier: Apache-2.0
"""Events of the kernel and of simulated hardware wake discovery; without them devices are polled.

Sockets, inotify and uevents are the kernel's own.
"""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from hami_common.runtime.tasks import background
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.settings import DriversSettings, NvidiaSettings, Settings
from hami_nodeagent.shell import devicewatch
from hami_nodeagent.shell.devicewatch import (
    DeviceWatch,
    concerns_devices,
    watched_directories,
)
from hami_nodeagent.shell.inventory import VendorDevices
from hami_nodeagent.shell.site import Site
from hami_sim.hardware import profile
from hami_sim.hardware.control import SimulatedControl
from tests.unit.nodeagent.core.builders import NODE
from tests.unit.nodeagent.shell.support import make_site, until

pytestmark = pytest.mark.anyio

REGISTERED_WITHIN_S = 2.0
TRIGGER = Path("/sys/devices/virtual/mem/null/uevent")
"""Writing an action here makes the kernel send that uevent of /dev/null."""


def up(site: Site, source: str) -> float | None:
    return site.metrics.registry.get_sample_value(
        "hami_nodeagent_device_events_up", {"source": source}
    )


class Bench:
    """A watch on one directory, and the number of times it woke discovery."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.nodes = directory / "dev"
        self.nodes.mkdir()
        self.site = make_site(directory, **{"device_dirs": (str(self.nodes),), **settings})
        self.wakes = 0
        self.watch = DeviceWatch(site=self.site, wake=[self._count])

    def _count(self) -> None:
        self.wakes += 1

    def up(self, source: str) -> float | None:
        return up(self.site, source)

    async def until_up(self, source: str) -> None:
        await until(lambda: self.up(source) is not None)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    async with background() as group:
        group.start_soon(bench.watch.run)
        await bench.until_up("directories")
        await bench.until_up("uevents")
        yield bench


def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receive no uevent of the machine that runs the tests."""
    monkeypatch.setattr(devicewatch, "concerns_devices", lambda _message: False)


async def test_new_device_node_wakes_discovery_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf(monkeypatch)
    async with running(Bench(tmp_path)) as bench:
        assert bench.up("directories") == 1
        (bench.nodes / "nvidia0").touch()
        with anyio.fail_after(REGISTERED_WITHIN_S):
            await until(lambda: bench.wakes > 0)
        await until(lambda: bench.wakes == 2)


async def test_storm_of_events_is_coalesced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf(monkeypatch)
    async with running(Bench(tmp_path)) as bench:
        for number in range(100):
            (bench.nodes / f"davinci{number}").touch()
            await anyio.sleep(0.001)
        await until(lambda: bench.wakes >= 2)
        await anyio.sleep(devicewatch.SETTLE_S)
        assert bench.wakes <= 4


async def test_volumes_and_terminals_do_not_wake_discovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf(monkeypatch)
    async with running(Bench(tmp_path)) as bench:
        for name in ("dm-7", "loop3", "tty9", ".hidden"):
            (bench.nodes / name).touch()
        await anyio.sleep(2 * devicewatch.SETTLE_S)
        assert bench.wakes == 0


@pytest.mark.skipif(os.geteuid() != 0 or not TRIGGER.exists(), reason="root triggers uevents")
async def test_uevent_of_the_kernel_wakes_discovery(tmp_path: Path) -> None:
    async with running(Bench(tmp_path)) as bench:
        assert bench.up("uevents") == 1
        TRIGGER.write_text("add", encoding="ascii")
        with anyio.fail_after(REGISTERED_WITHIN_S):
            await until(lambda: bench.wakes > 0)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"add@/devices/pci0/0000:01\0ACTION=add\0SUBSYSTEM=pci\0SEQNUM=1\0", True),
        (b"bind@/devices/pci0/0000:01\0SUBSYSTEM=pci\0", True),
        (b"remove@/module/nvidia\0SUBSYSTEM=module\0", True),
        (b"add@/devices/virtual/x\0SUBSYSTEM=some_npu_class\0", True),
        (b"change@/devices/pci0/0000:01/drm/card0\0SUBSYSTEM=drm\0", False),
        (b"add@/devices/virtual/net/veth0\0SUBSYSTEM=net\0", False),
        (b"add@/devices/virtual/block/dm-3\0SUBSYSTEM=block\0", False),
        (b"libudev\0\xfe\xed\xca\xfe", False),
        (b"", False),
    ],
)
def test_uevents_of_other_hardware_are_ignored(message: bytes, *, expected: bool) -> None:
    assert concerns_devices(message) is expected


async def test_unavailable_events_are_logged_once_and_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied() -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(devicewatch, "open_uevents", denied)
    bench = Bench(tmp_path, device_dirs=(str(tmp_path / "nowhere"),))
    with caplog.at_level(logging.WARNING):
        async with running(bench):
            assert (bench.up("uevents"), bench.up("directories")) == (0, 0)
            finding = bench.watch.finding()
    told = [one for one in caplog.records if one.message.startswith("device events unavailable")]
    assert sorted(getattr(one, "source", "") for one in told) == ["directories", "uevents"]
    assert finding.verdict == "WARN"
    assert "uevents: Operation not permitted" in finding.text
    assert f"{tmp_path / 'nowhere'}: No such file or directory" in finding.text
    assert "only every 30 s" in finding.text


async def test_available_events_pass_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devicewatch, "open_uevents", lambda: os.eventfd(0, os.EFD_NONBLOCK))
    async with running(Bench(tmp_path)) as bench:
        assert bench.watch.finding().verdict == "PASS"


async def test_agent_in_a_user_namespace_expects_no_uevents(tmp_path: Path) -> None:
    uid_map = tmp_path / "uid_map"
    uid_map.write_text("         0     100000      65536\n", encoding="ascii")
    with pytest.raises(OSError, match="user namespace"):
        devicewatch.open_uevents(uid_map)


def test_control_files_of_simulated_hardware_are_watched_by_name() -> None:
    settings = Settings(
        node_name=NODE,
        drivers=DriversSettings(
            nvidia=NvidiaSettings(simulated_control="/sim/a.json"),
            vendors={"ascend": {"simulated_control": "/sim/b.json"}, "amd": {}},
        ),
    )
    assert watched_directories(settings) == {
        "/dev": frozenset(),
        "/sim": frozenset({b"a.json", b"b.json"}),
    }


# --- from the event to the report, with the shipped settings ------------------------------------


def simulated(directory: Path) -> tuple[Site, SimulatedControl, VendorDevices]:
    control = SimulatedControl(directory / "control.json")
    nvidia = NvidiaSettings(simulated_control=str(control.path))
    site = make_site(directory, device_dirs=(), drivers=DriversSettings(nvidia=nvidia))
    driver = build_driver(
        "simulated",
        {"node": NODE, "profile": str(profile.path_of("4xT4")), "control": str(control.path)},
    )
    return site, control, VendorDevices(site=site, driver=driver, on_mismatch=lambda: None)


async def test_simulated_device_is_listed_within_two_seconds_of_its_appearance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf(monkeypatch)
    site, control, source = simulated(tmp_path)
    assert site.settings.discovery_s == 30.0
    control.unplug(3)
    watch = DeviceWatch(site=site, wake=[source.look_again])
    async with background() as group:
        await group.start(source.discover)
        group.start_soon(watch.run)
        assert len(source.devices) == 3, source.problem
        await until(lambda: up(site, "directories") == 1)
        control.plug(3)
        with anyio.fail_after(REGISTERED_WITHIN_S):
            await until(lambda: len(source.devices) == 4)
        control.path.write_text('{"driver_missing": "unloaded"}', encoding="utf-8")
        with anyio.fail_after(REGISTERED_WITHIN_S):
            await until(lambda: "unloaded" in source.problem)
