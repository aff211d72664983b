# SPDX-License-Identifier: Apache-2.0
"""Checks 10 to 12 and 14 to 19: frameworks under a memory limit.

On the fake driver a program of the same behavior takes the place of each framework: the same
checks, the same figures.
"""

from collections.abc import Iterator
from typing import Any

from tests.gpu import region
from tests.gpu.bench import Bench, Tenant
from tests.gpu.process import Guest
from tests.gpu.registry import NO_LIMITER, Fault, Measure, check

_LIMIT_MIB = 8000
_SLOW_NVML = Fault(driver=("nvmlDeviceGetComputeRunningProcesses_v3", 0, 150))


def _fill(bench: Bench, *, backend: str, way: str, block_mib: float) -> Iterator[Measure]:
    """Run out of memory, recover, and go on."""
    tenant = bench.tenant(memory_mib=_LIMIT_MIB)
    guest: Guest
    if bench.is_fake:
        guest = tenant.start("memory:fill", way=way, block_mib=block_mib, most=5000)
    else:
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second: before 2.9
        env = dict.fromkeys(names, backend) if backend else {}
        guest = tenant.start("frameworks:torch_fill", env=env, block_mib=block_mib)
    seen = guest.answer()
    used, charged = bench.used_mib(guest.pid), tenant.charged_mib(guest.pid)
    yield Measure(
        name="total", value=seen["total_mib"], unit="MiB", least=_LIMIT_MIB, most=_LIMIT_MIB
    )
    yield Measure(name="blocks", value=seen["count"], least=1)
    most = _LIMIT_MIB + bench.on(fake=0, real=bench.context_mib())
    yield Measure(name="used", value=used, unit="MiB", most=most)
    yield Measure(name="charged", value=charged, unit="MiB", least=used - 64, most=_LIMIT_MIB)
    if "reserved_mib" in seen:
        yield Measure(name="reserved", value=seen["reserved_mib"], unit="MiB", most=charged)
    again = guest.ask()
    yield Measure(name="code after the release", value=again["again"], most=0)
    yield Measure(name="free after it", value=again["free_mib"], unit="MiB", least=_LIMIT_MIB / 2)


@check("10", "PyTorch's allocator at its limit", deadline_s=45, fault=NO_LIMITER)
def torch_default(bench: Bench) -> Iterator[Measure]:
    """The default allocator: cuMemAlloc in blocks."""
    yield from _fill(bench, backend="", way="alloc", block_mib=20)


@check("11", "PyTorch's expandable segments at their limit", deadline_s=45, fault=NO_LIMITER)
def torch_expandable(bench: Bench) -> Iterator[Measure]:
    """cuMemCreate and cuMemMap in pieces of 20 MiB."""
    yield from _fill(bench, backend="expandable_segments:True", way="vmm", block_mib=20)


@check("12", "PyTorch on the driver's pool at its limit", deadline_s=45, fault=NO_LIMITER)
def torch_async(bench: Bench) -> Iterator[Measure]:
    """cudaMallocAsync."""
    yield from _fill(bench, backend="backend:cudaMallocAsync", way="async", block_mib=20)


def _without(bench: Bench, guest: str, **arguments: Any) -> dict[str, Any]:
    """The answer of a guest without the limiter, in its second run: files are cached then."""
    answers = [bench.tenant().run(guest, is_preloaded=False, **arguments) for _ in range(2)]
    return answers[1]


@check("14", "loading many modules", deadline_s=100, fault=_SLOW_NVML)
def modules(bench: Bench) -> Iterator[Measure]:
    """torch.compile loads hundreds of modules; each is measured by NVML. Added time."""
    if bench.is_fake:
        plain = _without(bench, "views:start_cost", loads=8)
        limited = bench.tenant().run("views:start_cost", loads=8)
        added_ms = 1e3 * (limited["load_s"] - plain["load_s"])
        yield Measure(name="added per load", value=added_ms, unit="ms", most=30)
        return
    seconds = []
    for preloaded in (False, True):
        tenant = bench.tenant()
        fresh = {"TORCHINDUCTOR_CACHE_DIR": str(tenant.root), "TRITON_CACHE_DIR": str(tenant.root)}
        seen = tenant.run("frameworks:torch_compile", is_preloaded=preloaded, env=fresh)
        seconds.append(seen["load_s"])
    yield Measure(name="compilation without the limiter", value=seconds[0], unit="s")
    yield Measure(name="added", value=100 * (seconds[1] / seconds[0] - 1), unit="%", most=5)


@check("15", "start of a process and uncharged growth", deadline_s=60, fault=_SLOW_NVML)
def start(bench: Bench) -> Iterator[Measure]:
    """Time of the first use of the device, and memory that NVML shows beyond the charge."""
    name = "views:start_cost" if bench.is_fake else "frameworks:torch_start"
    arguments: dict[str, Any] = {"loads": 1} if bench.is_fake else {}
    plain = _without(bench, name, **arguments)
    tenant = bench.tenant()
    guest = tenant.start(name, **arguments)
    limited = guest.answer()
    hidden = bench.used_mib(guest.pid) - tenant.charged_mib(guest.pid)
    added_ms = 1e3 * (limited["start_s"] - plain["start_s"])
    yield Measure(name="without the limiter", value=plain["start_s"], unit="s")
    yield Measure(name="added", value=added_ms, unit="ms", most=bench.on(fake=150, real=50))
    yield Measure(name="uncharged growth", value=hidden, unit="MiB", most=64)


def _seen(tenant: Tenant, guest: Guest) -> tuple[int, float]:
    """Launches and MiB that the region shows for a guest."""
    found = [one for one in region.read(tenant.region) if one.pid == guest.pid]
    return sum(one.launches for one in found), tenant.charged_mib(guest.pid)


@check("16", "libraries: cuBLAS, cuDNN, attention", deadline_s=40, fault=NO_LIMITER)
def libraries(bench: Bench) -> Iterator[Measure]:
    """Work of libraries is counted and their workspaces are charged."""
    tenant = bench.tenant()
    guest = tenant.start("views:by_dlsym" if bench.is_fake else "frameworks:torch_libraries")
    seen = guest.answer()
    launches, charged = _seen(tenant, guest)
    yield Measure(name="launches", value=launches, least=3)
    yield Measure(name="charged", value=charged, unit="MiB", least=seen.get("reserved_mib", 1))


@check("17", "JAX's preallocation", deadline_s=60, fault=NO_LIMITER)
def jax(bench: Bench) -> Iterator[Measure]:
    """JAX takes 75 % of the memory that it sees: of the limit, not of the device."""
    tenant = bench.tenant(memory_mib=_LIMIT_MIB)
    guest = tenant.start("memory:preallocate" if bench.is_fake else "frameworks:jax_preallocation")
    guest.answer()
    used, part = bench.used_mib(guest.pid), 0.75 * _LIMIT_MIB
    yield Measure(name="used", value=used, unit="MiB", least=part * 0.98, most=_LIMIT_MIB)
    charged = tenant.charged_mib(guest.pid)
    yield Measure(name="charged", value=charged, unit="MiB", least=part * 0.98, most=_LIMIT_MIB)


@check("18", "CuPy with its pool and the driver's", deadline_s=40, fault=NO_LIMITER)
def cupy(bench: Bench) -> Iterator[Measure]:
    """Both pools work and are charged."""
    tenant = bench.tenant(memory_mib=_LIMIT_MIB)
    guest = tenant.start("memory:pools" if bench.is_fake else "frameworks:cupy_pools")
    yield Measure(name="correct", value=guest.answer()["correct"], least=1)
    yield Measure(name="charged", value=tenant.charged_mib(guest.pid), unit="MiB", least=8)


@check("19", "results with and without the limiter", deadline_s=90, fault=Fault(memory_pct=0))
def results(bench: Bench) -> Iterator[Measure]:
    """A model's logits, on the fake a pattern copied through the device, are identical."""
    name = "memory:content" if bench.is_fake else "frameworks:llama_content"
    plain = bench.tenant().run(name, is_preloaded=False, mib=16)
    limited = bench.tenant().run(name, mib=16)
    same = plain["digest"] == limited["digest"]
    yield Measure(name="identical results", value=same, least=1)
