# SPDX-License-Identifier: Apache-2.0
"""Every vendor's partitioner under the reconciler, whose process is killed at any step.

Pods come and go at random and the hardware fails, from a fixed seed. After each life that was not
killed, hardware equals journal equals ledger; after each, what carried a share of the ledger still
does, under the same words. ``HAMI_PARTITION_LIVES`` makes traces longer.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hami_common.model.device import Device
from hami_common.model.placement import Share
from hami_nodeagent.drivers.protocol import Driver
from hami_sim.hardware.fake_nvml import write_capabilities
from tests.contract.drivers.benches import FakeNvmlBench
from tests.support.partition_lives import Lives, Machine, ToolMachine
from tests.support.vendor_parts import KIND_BY_VENDOR, PartBench

LIVES = int(os.environ.get("HAMI_PARTITION_LIVES", "5"))
SEED = 20_261_122
LAST_STEP = 14
"""A life is killed before one of this number of steps, if it has as many."""


class MigMachine(Machine):
    """Cards in MIG mode, through the fake NVML library."""

    vendor = "nvidia"
    most = 0

    def __init__(self, bench: FakeNvmlBench, proc: Path) -> None:
        self._bench = bench
        self._proc = proc
        write_capabilities(proc, bench.profile)
        for index in range(len(bench.uuids)):
            bench.nvml.set_mig_mode(index, is_on=True)

    def driver(self) -> Driver:
        return self._bench.driver(proc_root=str(self._proc))

    def wishes(self, device: Device) -> tuple[Share, ...]:
        return tuple(
            Share(
                vendor="nvidia",
                uuid=device.uuid,
                profile=one.name,
                memory_mib=one.memory_mib,
                core_pct=one.core_pct,
            )
            for one in device.partitions
        )

    def count(self, device: Device) -> int:
        made = self._bench.nvml.made_instances(self._bench.uuids.index(device.uuid))
        assert all(len(one.uuids) == 1 for one in made)
        return len(made)

    def trouble(self, dice: random.Random) -> None:
        function = dice.choice(
            ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"]
        )
        self._bench.nvml.fault(function, dice.randrange(len(self._bench.uuids)), 999)

    def forgive(self) -> None:
        self._bench.nvml.clear_faults()

    def overbooked(self, device: Device) -> str:
        del device
        return ""  # the library refuses what its tables do not allow

    def litter(self, device: Device) -> str:
        made = self._bench.nvml.made_instances(self._bench.uuids.index(device.uuid))
        return ", ".join(one.profile for one in made)


@pytest.fixture(params=["nvidia", *sorted(KIND_BY_VENDOR)])
def machine(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    nvidia_bench: Callable[[str], FakeNvmlBench],
    monkeypatch: pytest.MonkeyPatch,
) -> Machine:
    """Divided devices, once per vendor that supports them."""
    if request.param == "nvidia":
        return MigMachine(nvidia_bench("2xA30"), tmp_path / "proc")
    bench = PartBench(KIND_BY_VENDOR[request.param], tmp_path)
    bench.answer_in_process(monkeypatch)
    return ToolMachine(bench)


@pytest.mark.timeout(240)  # some fifteen short processes, which a busy machine lets wait
def test_deaths_at_any_step_leave_hardware_journal_and_ledger_equal(
    machine: Machine, tmp_path: Path
) -> None:
    dice = random.Random(f"{machine.vendor}/{SEED}")
    lives = Lives(machine, tmp_path / "agent", dice)
    deaths = 0
    for number in range(LIVES):
        lives.churn()
        owned = lives.held()
        before = lives.words()
        if number % 3 == 2:
            machine.trouble(dice)
        settled = lives.life(dies_at=dice.randint(1, LAST_STEP))
        deaths += not settled
        after = lives.words()
        assert {key: after.get(key) for key in owned} == {key: before[key] for key in owned}
        machine.forgive()
        assert lives.life(dies_at=0)
        lives.check_settled()
    assert deaths
    for uid in list(lives.live_shares):
        lives.end(uid)
    assert lives.life(dies_at=0)
    # The next removal also removes what a crash left beside partitions.
    for device in lives.devices:
        assert lives.come(device)
    assert lives.life(dies_at=0)
    for uid in list(lives.live_shares):
        lives.end(uid)
    assert lives.life(dies_at=0)
    assert not list(lives.litter())
