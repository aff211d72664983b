# SPDX-License-Identifier: Apache-2.0
"""Checks 40 and 41: checkpoints and MPS. Last, because both change what the driver runs."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.bench import Bench
from tests.gpu.machine import MIB
from tests.gpu.registry import Measure, Skipped, check

_CHECKPOINT_DRIVER = 570
_GIB = 4
_RESTORE_MARGIN_MIB = 512
"""A restore that runs out of memory cannot be repeated."""
_STOP_S = 10.0


@check(
    "40",
    "checkpoint and restore of a process",
    deadline_s=60,
    fault="the fake driver does not implement cuCheckpointProcess*",
    is_last=True,
)
def checkpoint(bench: Bench) -> Iterator[Measure]:
    """A training process goes to host memory and back; its losses are as without that."""
    if int(bench.machine.driver.partition(".")[0]) < _CHECKPOINT_DRIVER:
        raise Skipped(f"driver {bench.machine.driver} has no checkpoint interface")
    undisturbed = bench.tenant().start("frameworks:torch_train", gib=0.1)
    undisturbed.answer()
    expected = [undisturbed.ask()["losses"] for _ in range(2)]
    undisturbed.close()
    guest = bench.tenant().start("frameworks:torch_train", gib=_GIB)
    guest.answer()
    losses = [guest.ask()["losses"]]
    needed = bench.used_mib(guest.pid) + _RESTORE_MARGIN_MIB
    helper = bench.outside("checkpoint:control", pid=guest.pid)
    helper.answer()
    out = helper.ask(do="out")
    yield Measure(name="code of lock and checkpoint", value=out["code"], most=0)
    yield Measure(name="out", value=out["seconds"], unit="s", most=4)
    yield Measure(name="left on the device", value=bench.used_mib(guest.pid), unit="MiB", most=100)
    total, used = bench.device_memory()
    if (total - used) / MIB < needed:
        raise Skipped("the device has no memory left to restore the process")
    back = helper.ask(do="back")
    yield Measure(name="code of restore and unlock", value=back["code"], most=0)
    yield Measure(name="back", value=back["seconds"], unit="s", most=3)
    losses.append(guest.ask()["losses"])
    yield Measure(name="identical losses", value=losses == expected, least=1)


@check(
    "41",
    "MPS clients",
    deadline_s=60,
    fault="the fake driver has no MPS",
    is_last=True,
)
def mps(bench: Bench) -> Iterator[Measure]:
    """A client of 50 % sees half of the multiprocessors; the daemon ends without a process left."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise Skipped("nvidia-cuda-mps-control is not installed")
    root = bench.tenant().root
    pipes = {"CUDA_MPS_PIPE_DIRECTORY": str(root), "CUDA_MPS_LOG_DIRECTORY": str(root)}
    environment = {**bench.machine.environment, **pipes}
    subprocess.run([control, "-d"], env=environment, check=True, timeout=_STOP_S)
    try:
        counts = []
        for pct in (100, 50):
            env = {**pipes, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(pct)}
            counts.append(bench.tenant().run("compute:processors", env=env)["count"])
        half = counts[0] // 2
        yield Measure(
            name="multiprocessors at 50 %", value=counts[1], least=half - 2, most=half + 2
        )
    finally:
        subprocess.run(
            [control], env=environment, input="quit\n", text=True, check=False, timeout=_STOP_S
        )
    began = time.monotonic()
    while _daemons() and time.monotonic() - began < _STOP_S:
        time.sleep(0.1)
    yield Measure(name="processes of MPS left", value=_daemons(), most=0)


def _daemons() -> int:
    found = 0
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            found += comm.read_text(encoding="utf-8").startswith("nvidia-cuda-mps")
    return found
