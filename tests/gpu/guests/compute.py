# SPDX-License-Identifier: Apache-2.0
"""Guests that launch kernels and report when they were complete.

A spin kernel's length is a number of loops; ``calibrate`` measures how many an undisturbed device
does per microsecond, so a kernel's device time is known without clocks of the device.
"""

import ctypes
import itertools
import os
import statistics
import time
from ctypes import byref, c_int, c_uint, c_uint64, c_void_p

from tests.gpu.guest import Steps, waited_ns
from tests.gpu.guests.device import Kernels, Probe, Work, multiprocessors, stream
from tests.support import cuda_guest as cu

_CALIBRATION_LOOPS = 1_000_000
_CALIBRATION_LAUNCHES = 300
"""The first two thirds bring an idle device to its clocks."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


def _work(kernel: str, *, units: int, ahead: int, grid: int = 0, streams: int = 1) -> Work:
    kernels = Kernels()
    return Work(
        function=kernels[kernel],
        stream=stream(),
        stream_b=stream() if streams > 1 else None,
        parameter=units,
        grid=grid or multiprocessors(),
        ahead=ahead,
    )


def calibrate() -> Steps:
    """Loops per microsecond: the median over launches one after the other."""
    cu.begin()
    work = _work("param", units=_CALIBRATION_LOOPS, ahead=2)
    probe = Probe()
    done = probe.steps(work, 60.0, _CALIBRATION_LAUNCHES)
    gaps = [later - earlier for earlier, later in itertools.pairwise(done[-100:])]
    yield {"units_per_us": _CALIBRATION_LOOPS / (statistics.median(gaps) / 1e3)}


def _capture(work: Work) -> c_void_p:
    """A graph of one launch."""
    graph, run = c_void_p(), c_void_p()
    parameter = c_uint64(work.parameter)
    parameters = (c_void_p * 1)(ctypes.addressof(parameter))
    where = c_void_p(work.stream)
    cu.ask("cuStreamBeginCapture_v2", where, _RELAXED)
    shape = [c_uint(one) for one in (work.grid, 1, 1, 128, 1, 1, 0)]
    cu.ask("cuLaunchKernel", c_void_p(work.function), *shape, where, parameters, None)
    cu.ask("cuStreamEndCapture", where, byref(graph))
    cu.ask("cuGraphInstantiateWithFlags", byref(run), graph, c_uint64(0))
    return run


def spin(*, units: int, ahead: int, streams: int = 1, is_graph: bool = False) -> Steps:
    """Keep the device busy for ``seconds`` of each request; when each launch was complete."""
    cu.begin()
    work = _work("param", units=units, ahead=ahead, streams=streams)
    if is_graph:
        work.graph = _capture(work)
    probe = Probe()
    probe.steps(work, 60.0, 2)  # the first launch loads code
    request = yield {"pid": os.getpid()}
    while True:
        before, began_ns = waited_ns(), time.monotonic_ns()
        done = probe.steps(work, request["seconds"])
        waited = (waited_ns() - before) / (time.monotonic_ns() - began_ns)
        request = yield {"done_ns": done, "waited": waited}


def bursts(*, units: int, burst_s: float, pause_s: float, edges: int) -> Steps:
    """Work in bursts with pauses; the first launch and the last completion of each."""
    cu.begin()
    work = _work("param", units=units, ahead=2)
    probe = Probe()
    probe.steps(work, 60.0, 2)
    yield {"pid": os.getpid()}
    found = []
    for _ in range(edges):
        time.sleep(pause_s)
        began_ns = time.monotonic_ns()
        done = probe.steps(work, burst_s)
        found.append([began_ns, done[-1]])
    yield {"bursts_ns": found}


def cost(*, launches: int, rounds: int, through_global: bool = False) -> Steps:
    """Processor time of launching an empty kernel; one round per request."""
    cu.begin()
    work = _work("nop", units=0, ahead=1, grid=1)
    find = _global_address if through_global else cu.address
    probe = Probe(find)
    probe.cost_ns(work, launches // 10)
    request = yield {"pid": os.getpid()}
    while request:
        request = yield {"ns": [probe.cost_ns(work, launches) for _ in range(rounds)]}


def _global_address(name: str) -> int:
    """The function that a linked program calls: the first one in the order of preloading."""
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    return int(ctypes.cast(getattr(ctypes.CDLL(None), name), c_void_p).value or 0)


def chain(*, units: int, launches: int) -> Steps:
    """Elapsed nanoseconds per kernel of a chain on one stream; one chain per request."""
    cu.begin()
    work = _work("param", units=units, ahead=256)
    probe = Probe(_global_address)
    probe.steps(work, 60.0, 8)
    request = yield {"pid": os.getpid()}
    while request:
        done = probe.steps(work, 60.0, launches)
        request = yield {"ns": (done[-1] - done[0]) / (len(done) - 1)}


def blocks(*, units: int) -> Steps:
    """A resident server: kernels for ``seconds`` of each request; kernels per second."""
    cu.begin()
    work = _work("param", units=units, ahead=8)
    probe = Probe(_global_address)
    probe.steps(work, 60.0, 8)
    request = yield {"pid": os.getpid()}
    while request:
        before, began = waited_ns(), time.monotonic()
        done = probe.steps(work, request["seconds"])
        seconds = time.monotonic() - began
        waited = (waited_ns() - before) / (seconds * 1e9)
        request = yield {"rate": len(done) / seconds, "waited": waited}


def presence(*, units: int, seconds: float, spacing_us: int) -> Steps:
    """Part of the probes that are answered at once; one measurement per request."""
    cu.begin()
    work = _work("param", units=units, ahead=8)
    probe, side = Probe(), stream()
    probe.steps(work, 60.0, 2)
    request = yield {"pid": os.getpid()}
    while request:
        posted, answered = probe.presence(work, side, seconds, spacing_us)
        request = yield {"posted": posted, "answered": answered}


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("shape", c_uint * 7),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", c_uint),
    )


_CLUSTER = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""


def forms(*, units: int, with_cluster: bool) -> Steps:
    """Launch by every form of the interface: the CUresult of each."""
    cu.begin()
    work = _work("param", units=units, ahead=1)
    parameter = c_uint64(units)
    parameters = (c_void_p * 1)(ctypes.addressof(parameter))
    function, where = c_void_p(work.function), c_void_p(work.stream)
    shape = [c_uint(one) for one in (work.grid, 1, 1, 128, 1, 1, 0)]
    config = _Config(shape=(c_uint * 7)(work.grid, 1, 1, 128, 1, 1, 0), stream=work.stream)
    found = {
        "plain": cu.code("cuLaunchKernel", function, *shape, where, parameters, None),
        "cooperative": cu.code("cuLaunchCooperativeKernel", function, *shape, where, parameters),
        "extended": cu.code("cuLaunchKernelEx", byref(config), function, parameters, None),
        "graph": cu.code("cuGraphLaunch", _capture(work), where),
    }
    if with_cluster:
        attribute = (_Attribute * 1)(_Attribute(id=_CLUSTER, value=(c_uint * 16)(2, 1, 1)))
        config.shape[0] = work.grid // 2 * 2
        config.attributes, config.count = attribute, 1
        found["cluster"] = cu.code("cuLaunchKernelEx", byref(config), function, parameters, None)
        cu.ask("cuStreamSynchronize", where)
        green = _green_stream()
        found["green context"] = green or cu.code(
            "cuLaunchKernel", function, *shape, _green_streams[-1], parameters, None
        )
    found["synchronize"] = cu.code("cuCtxSynchronize")
    yield {"codes": found, "forms": len(found) - 1}


_green_streams: list[c_void_p] = []


def _green_stream() -> int:
    """Add a stream of a green context with the whole device to ``_green_streams``."""
    resource = (ctypes.c_ubyte * 1024)()
    description, context, made = c_void_p(), c_void_p(), c_void_p()
    calls = (
        ("cuDeviceGetDevResource", 0, resource, c_int(1)),
        ("cuDevResourceGenerateDesc", byref(description), resource, c_uint(1)),
        ("cuGreenCtxCreate", byref(context), description, 0, c_uint(1)),
        ("cuGreenCtxStreamCreate", byref(made), context, c_uint(1), 0),
    )
    for name, *arguments in calls:
        if code := cu.code(name, *arguments):
            return code
    _green_streams.append(made)
    return 0


def forms_timed(*, units: int, rounds: int) -> Steps:
    """Alternate cooperative and extended launches; on request, seconds until the last end."""
    cu.begin()
    work = _work("param", units=units, ahead=1)
    parameter = c_uint64(units)
    parameters = (c_void_p * 1)(ctypes.addressof(parameter))
    function, where = c_void_p(work.function), c_void_p(work.stream)
    shape = [c_uint(one) for one in (work.grid, 1, 1, 128, 1, 1, 0)]
    config = _Config(shape=(c_uint * 7)(work.grid, 1, 1, 128, 1, 1, 0), stream=work.stream)

    def launch(count: int) -> None:
        for number in range(count):
            if number % 2:
                cu.ask("cuLaunchCooperativeKernel", function, *shape, where, parameters)
            else:
                cu.ask("cuLaunchKernelEx", byref(config), function, parameters, None)
        cu.ask("cuStreamSynchronize", where)

    launch(rounds // 4)
    request = yield {"pid": os.getpid()}
    while request:
        before, began = waited_ns(), time.monotonic()
        launch(rounds)
        seconds = time.monotonic() - began
        waited = (waited_ns() - before) / (seconds * 1e9)
        request = yield {"launches": rounds, "seconds": seconds, "waited": waited}


def copies(*, mib: int) -> Steps:
    """Copy within the device for ``seconds``; GB/s, read and written."""
    cu.begin()
    size = mib * cu.MIB
    source, target = cu.alloc(size), cu.alloc(size)
    request = yield {"pid": os.getpid()}
    began, count = time.monotonic(), 0
    while time.monotonic() - began < request["seconds"]:
        for _ in range(8):
            cu.ask("cuMemcpyDtoDAsync_v2", target, source, ctypes.c_size_t(size), None)
        cu.ask("cuCtxSynchronize")
        count += 8
    yield {"gb_per_s": 2 * count * size / 1e9 / (time.monotonic() - began)}


def processors() -> Steps:
    """Multiprocessors that this process may use."""
    cu.begin()
    yield {"count": multiprocessors()}


def gaps(*, units: int, launches: int) -> Steps:
    """Device time between the ends of consecutive launches; one series per request."""
    cu.begin()
    work = _work("param", units=units, ahead=8)
    probe = Probe()
    probe.steps(work, 60.0, 2)
    request = yield {"pid": os.getpid()}
    while request:
        request = yield {"ms": probe.gaps_ms(work, launches)}
