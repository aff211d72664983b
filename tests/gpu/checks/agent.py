# SPDX-License-Identifier: Apache-2.0
"""The node agent's NVIDIA driver on this machine: discovery, usage, health, breaches."""

from collections.abc import Iterator

from tests.gpu.bench import Bench
from tests.gpu.registry import Fault, Measure, check

_NVML_UNKNOWN, _NVML_LOST = 999, 15
_WAIT_S = 0.3


@check(
    "discovery",
    "the agent's discovery",
    deadline_s=30,
    fault=Fault(driver=("nvmlDeviceGetUUID", _NVML_UNKNOWN, 0)),
)
def discovery(bench: Bench) -> Iterator[Measure]:
    """Two reads list the same devices, with the memory that NVML reports."""
    seen = bench.agent_driver(_WAIT_S)
    own = [one for one in seen["devices"] if one["uuid"] == bench.machine.uuid]
    yield Measure(name="devices", value=len(seen["devices"]), least=1)
    yield Measure(name="second read alike", value=seen["is_stable"], least=1)
    same_driver = seen["driver_version"] == bench.machine.driver
    yield Measure(name="driver version as NVML has it", value=same_driver, least=1)
    yield Measure(name="this device listed", value=len(own), least=1, most=1)
    memory = own[0]["memory_mib"] if own else 0
    expected = bench.machine.memory_mib
    yield Measure(name="memory", value=memory, unit="MiB", least=expected * 0.97, most=expected)


@check(
    "usage",
    "the agent's usage of processes",
    deadline_s=30,
    fault=Fault(driver=("nvmlDeviceGetComputeRunningProcesses_v3", _NVML_UNKNOWN, 0)),
)
def usage(bench: Bench) -> Iterator[Measure]:
    """The agent reads the memory of each process as NVML has it."""
    guest = bench.tenant().start("memory:hold", mib=500)
    guest.answer()
    seen = bench.agent_driver(_WAIT_S)
    own = [one for one in seen["usage"] if one["uuid"] == bench.machine.uuid]
    processes = {one["pid"]: one["used_mib"] for one in (own[0]["processes"] or ())} if own else {}
    yield Measure(name="process listed", value=guest.pid in processes, least=1)
    yield Measure(name="its memory", value=processes.get(guest.pid, 0), unit="MiB", least=500)


@check(
    "health",
    "the agent's health probes",
    deadline_s=30,
    fault=Fault(driver=("nvmlDeviceGetUUID", _NVML_LOST, 0)),
)
def health(bench: Bench) -> Iterator[Measure]:
    """Every device passes its probe, and no fault is waiting."""
    seen = bench.agent_driver(_WAIT_S)
    yield Measure(name="probes passed", value=seen["passed"], least=max(1, len(seen["devices"])))
    yield Measure(name="faults", value=len(seen["faults"]), most=0)


@check("breach", "the agent's breach detection", deadline_s=40, fault=Fault(is_bypassed=False))
def breach(bench: Bench) -> Iterator[Measure]:
    """A process without the limiter that exceeds its share is reported; one within is not."""
    limit = 1000 + bench.context_mib()
    within, beyond = (bench.tenant(memory_mib=limit) for _ in range(2))
    first = within.start("memory:hold", mib=500)
    second = beyond.start("memory:hold", mib=3000, is_preloaded=not bench.fault.is_bypassed)
    for guest in (first, second):
        guest.answer()
    shares = [([first.pid], limit), ([second.pid], limit)]
    limit_s = bench.on(fake=4, real=8)
    quiet, told = bench.breaches(shares, expected=1, limit_s=limit_s)
    yield Measure(name="reports of a process within its share", value=bool(quiet["kind"]), most=0)
    yield Measure(name="reports of one beyond it", value=told["kind"] == "memory", least=1)
    yield Measure(name="reported usage", value=told["used_mib"], unit="MiB", least=3000)
    yield Measure(name="until the report", value=told["seconds"], unit="s", most=limit_s)
