# SPDX-License-Identifier: Apache-2.0
"""Every way to start work passes the limiter: it is seen, and under a compute limit held back.

Takes about 10 s.
"""

from pathlib import Path

import pytest

from hami_sim.hardware.fake_nvml import FakeNvml
from hami_sim.hardware.profile import load
from tests.support.cuda_child import CudaChild
from tools import gen_symbols

pytestmark = pytest.mark.alone

PRELUDE = """
import ctypes, time
from hami_nodeagent.core.region import Region, parse

class Config(ctypes.Structure):
    _fields_ = [(f"size{i}", c_uint) for i in range(7)] + [
        ("stream", c_void_p), ("attributes", c_void_p), ("count", c_uint)]

class Part(ctypes.Structure):
    _fields_ = [("function", c_void_p)] + [(f"size{i}", c_uint) for i in range(7)] + [
        ("stream", c_void_p), ("parameters", c_void_p)]

class KernelNode(ctypes.Structure):
    _fields_ = [("function", c_void_p)] + [(f"size{i}", c_uint) for i in range(7)] + [
        ("parameters", c_void_p), ("extra", c_void_p), ("kernel", c_void_p), ("context", c_void_p)]

begin()
module, function, stream, graph, node, run = (c_void_p() for _ in range(6))
ask("cuModuleLoadData", byref(module), b"fake-bytes: 4096")
ask("cuModuleGetFunction", byref(function), module, b"fixed_5ms")
ask("cuStreamCreate", byref(stream), 0)
ONE = [c_uint(1)] * 6 + [c_uint(0)]
kernel = KernelNode(function=function.value, **{f"size{i}": 1 for i in range(6)})
ask("cuGraphCreate", byref(graph), 0)
ask("cuGraphAddKernelNode_v2", byref(node), graph, None, c_size_t(0), byref(kernel))
ask("cuGraphInstantiateWithFlags", byref(run), graph, c_uint64(0))
config = Config(**{f"size{i}": 1 for i in range(6)}, stream=stream.value)
sizes = {f"size{i}": 1 for i in range(6)}
parts = (Part * 1)(Part(function=function.value, stream=stream.value, **sizes))

WAYS = {
    "cuLaunchKernel": [function, *ONE, stream, None, None],
    "cuLaunchKernel_ptsz": [function, *ONE, None, None, None],
    "cuLaunchKernelEx": [byref(config), function, None, None],
    "cuLaunchKernelEx_ptsz": [byref(config), function, None, None],
    "cuLaunchCooperativeKernel": [function, *ONE, stream, None],
    "cuLaunchCooperativeKernel_ptsz": [function, *ONE, None, None],
    "cuLaunchCooperativeKernelMultiDevice": [parts, c_uint(1), c_uint(0)],
    "cuGraphLaunch": [run, stream],
    "cuGraphLaunch_ptsz": [run, stream],
    "cuLaunch": [function],
    "cuLaunchGrid": [function, 1, 1],
    "cuLaunchGridAsync": [function, 1, 1, stream],
}

def own():
    region = parse(open(os.environ["CUDA_DEVICE_MEMORY_SHARED_CACHE"] + "-1", "rb").read())
    if not isinstance(region, Region):
        raise AssertionError(region)
    return next(p for p in region.processes if p.owner.pid == os.getpid())
"""


@pytest.fixture
def guest(limiter: Path, drivers: Path, tmp_path: Path) -> CudaChild:
    """Runs child processes on one machine."""
    state = FakeNvml(tmp_path / "nvml.state", load("2xL40S"), "node-a")
    return CudaChild(state.path, limiter, drivers, tmp_path / "region")


def test_ways_below_are_all_that_start_work(guest: CudaChild) -> None:
    listed = gen_symbols.read(gen_symbols.SOURCE.read_text()).hooks
    ways = guest(PRELUDE + "told = sorted(WAYS)")
    assert ways == [name for name, _, kind, _ in listed if kind == "THROTTLED"]


def test_each_launch_is_seen_without_a_limit(guest: CudaChild) -> None:
    told = guest(
        PRELUDE
        + """
told = {}
for name, arguments in WAYS.items():
    before = own().launches
    for _ in range(3):
        ask(name, *arguments)
    told[name] = own().launches - before
"""
    )
    assert told == dict.fromkeys(told, 3)


def test_each_launch_is_held_back_under_a_limit(guest: CudaChild) -> None:
    """Kernels of 5 ms on a tenth of the device: forty launches would take two seconds, not 0.2."""
    told = guest(
        PRELUDE
        + """
told = {}
for name, arguments in WAYS.items():
    ask("cuCtxSynchronize")
    before, since = own(), time.monotonic()
    count = 0
    while own().waited_ns - before.waited_ns < 50_000_000 and time.monotonic() - since < 20:
        ask(name, *arguments)
        count += 1
    told[name] = [count > 0, own().waited_ns - before.waited_ns >= 50_000_000]
""",
        CUDA_DEVICE_SM_LIMIT="10",
        GPU_CORE_UTILIZATION_POLICY="force",
    )
    assert {name for name, seen in told.items() if seen != [True, True]} == set()
    assert told
