# SPDX-License-Identifier: Apache-2.0
"""Checks 6, 32 and 35: priorities, changed limits, unusual forms of launches."""

import bisect
import statistics
import time
from collections.abc import Iterator, Sequence

from tests.gpu.bench import Bench
from tests.gpu.checks.compute import WARM_S, measure_share, share, spin, together, units
from tests.gpu.registry import NO_COMPUTE_LIMIT, Fault, Measure, check

_BLOCK_MS, _RESUME_MS = 80.0, 500.0
"""The agent reads regions every 25 ms and holds a priority for 300 ms; 40 ms may be queued."""
_POLL_S = 0.02
_NOT_SUPPORTED = 801
_LIMIT_MIB = 4000


def _edges(
    bursts: Sequence[Sequence[int]], low_ns: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Milliseconds that the lower level worked into each burst, and until it worked again."""
    blocked, resumed = [], []
    for began, ended in bursts:
        inside = low_ns[bisect.bisect(low_ns, began) : bisect.bisect(low_ns, ended)]
        blocked.append((inside[-1] - began) / 1e6 if inside else 0.0)
        after = bisect.bisect(low_ns, ended)
        if after < len(low_ns):
            resumed.append((low_ns[after] - ended) / 1e6)
    return blocked, resumed


@check("6", "hand-over between priorities", deadline_s=60, fault=Fault(has_agent=False))
def handover(bench: Bench) -> Iterator[Measure]:
    """A lower level stops when a higher one begins, and goes on when it ends."""
    for kernel_us in (100, 5000):
        edges = int(bench.on(fake=2, real=12))
        high, low = bench.tenant(priority=0), bench.tenant(priority=5)
        burst_s, pause_s = 0.3, 0.6
        publisher = None
        if bench.fault.has_agent:  # before the tenants: they look for its page at their start
            publisher = bench.outside(
                "priorities:publish",
                directory=str(bench.priority_directory),
                uuid=bench.machine.uuid,
                tenants=[[str(high.region), 0], [str(low.region), 5]],
            )
            publisher.answer()
            publisher.send(go=True)
        bursting = high.start(
            "compute:bursts",
            units=units(bench, kernel_us),
            burst_s=burst_s,
            pause_s=pause_s,
            edges=edges,
        )
        working = spin(bench, low, kernel_us, ahead=4)
        bursting.answer()
        working.send(seconds=edges * (burst_s + pause_s) + 1)
        bursting.send(go=True)
        bursts = bursting.answer()["bursts_ns"]
        blocked, resumed = _edges(bursts, working.answer()["done_ns"])
        if publisher:
            publisher.kill()
        bench.end_guests()
        most = _BLOCK_MS + 4 * kernel_us / 1e3
        name = f"{kernel_us} us kernels"
        yield Measure(name=f"{name}: edges", value=len(resumed), least=edges)
        for kind, found, limit_ms in (("block", blocked, most), ("resume", resumed, _RESUME_MS)):
            median, longest = statistics.median(found), max(found)
            yield Measure(name=f"{name}: {kind}, median", value=median, unit="ms", most=limit_ms)
            bound = None if bench.is_fake else limit_ms  # other work delays the fake's agent
            yield Measure(name=f"{name}: {kind}, longest", value=longest, unit="ms", most=bound)


@check("32", "changed limits of running processes", deadline_s=30, fault=Fault(is_resized=False))
def resize(bench: Bench) -> Iterator[Measure]:
    """Larger and smaller limits of memory and compute apply within a second."""
    tenant = bench.tenant(memory_mib=_LIMIT_MIB)
    guest = tenant.start("memory:hold", mib=1000)
    guest.answer()
    for name, limit in (("larger", 2 * _LIMIT_MIB), ("smaller", 2000)):
        tenant.resize(memory_mib=limit)
        began = time.monotonic()
        while guest.ask()["total_mib"] != limit and time.monotonic() - began < 1.5:
            time.sleep(_POLL_S)
        yield Measure(name=f"{name} memory", value=time.monotonic() - began, unit="s", most=1)
    beyond = guest.ask(alloc=1500)["code"]
    yield Measure(name="code beyond the smaller limit", value=beyond, least=2, most=2)
    working = bench.tenant(core_pct=20)
    spinning = spin(bench, working, 500)
    seconds = WARM_S + bench.on(fake=1.2, real=2)
    for pct in (60,) if bench.is_fake else (20, 60):
        if pct != working.core_pct:
            working.resize(core_pct=pct)
            time.sleep(1)
        done = together(bench, [spinning], seconds=seconds)[0]["done_ns"]
        yield measure_share(f"share at {pct} %", share(done, 500), pct, bench)


@check("35", "forms of launches under a compute limit", deadline_s=30, fault=NO_COMPUTE_LIMIT)
def forms(bench: Bench) -> Iterator[Measure]:
    """Cooperative, extended, graph, cluster and green-context launches run, within the limit."""
    kernel_us = 2000
    seen = bench.tenant(core_pct=40).run(
        "compute:forms", units=units(bench, kernel_us), with_cluster=not bench.is_fake
    )
    failed = {name: code for name, code in seen["codes"].items() if code not in {0, _NOT_SUPPORTED}}
    yield Measure(name="forms", value=seen["forms"], least=4)
    yield Measure(name=f"refused {' '.join(failed)}".strip(), value=len(failed), most=0)
    rounds = int(bench.on(fake=250, real=600))
    repeating = bench.tenant(core_pct=40).start(
        "compute:forms_timed", units=units(bench, kernel_us), rounds=rounds
    )
    repeating.answer()
    timed = together(bench, [repeating], again=True)[0]
    part = 100 * timed["launches"] * kernel_us / 1e6 / timed["seconds"]
    yield measure_share("share of cooperative and extended launches", part, 40, bench)
