# SPDX-License-Identifier: Apache-2.0
"""Checks 37 to 39 and nvidia-smi: programs that bypass the limiter, debuggers, device counters."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.bench import Bench
from tests.gpu.registry import NO_LIMITER, Measure, Skipped, check
from tools import build_native, build_native_fakes

_HOG = Path(__file__).resolve().parents[2] / "native/hog.c"
_LIMIT_MIB, _WANTED_MIB = 1000, 3000
_DETECTION_S = 10.0
_ENFORCED = ("plain", "deepbind")
_BYPASSES = ("dlmopen", "tables")
_SMI_S = 20.0


def build_hog(bench: Bench) -> tuple[Path, Path | None]:
    """The program that takes what it can, and its static form where the driver can be linked."""
    plain, static = bench.scratch / "hog", bench.scratch / "hog-static"
    common = [*build_native.compiler(), "-std=c11", "-D_GNU_SOURCE", "-O1"]
    if not plain.exists():
        subprocess.run([*common, "-o", str(plain), str(_HOG), "-ldl"], check=True)
    if not bench.is_fake:
        return plain, None
    if not static.exists():
        sources = build_native_fakes.FILES_BY_LIBRARY[build_native_fakes.CUDA]
        driver = [str(build_native_fakes.SOURCES / name) for name in sources]
        flags = ["-pthread", "-static", "-DHOG_STATIC", "-o", str(static)]
        subprocess.run([*common, *flags, str(_HOG), *driver], check=True)
    return plain, static


@check("37", "programs that avoid the limiter", deadline_s=60, fault=NO_LIMITER)
def escapes(bench: Bench) -> Iterator[Measure]:
    """Ordinary ways are enforced; a bypass is reported by the agent's comparison within 10 s."""
    plain, static = build_hog(bench)
    limit = _LIMIT_MIB + bench.context_mib()
    bypasses: dict[str, tuple[list[int], int]] = {}
    ways = [*_ENFORCED, *_BYPASSES, *(["static"] if static else [])]
    for way in ways:
        tenant = bench.tenant(memory_mib=limit)
        program = static if way == "static" else plain
        hog = tenant.start("memory:background", argv=[str(program), way, str(_WANTED_MIB)])
        seen = hog.answer()
        if not seen["lines"][0]:
            yield Measure(name=f"{way}: does not exist here", value=1)
            continue
        pid = seen["pid"]
        used = bench.used_mib(pid)
        if way in _ENFORCED:
            yield Measure(name=f"{way}: used", value=used, unit="MiB", least=1, most=limit)
        else:
            yield Measure(name=f"{way}: used", value=used, unit="MiB", least=_WANTED_MIB)
            bypasses[way] = ([pid], limit)
    shares = list(bypasses.values())
    told = bench.breaches(shares, expected=len(shares), limit_s=_DETECTION_S)
    for way, one in zip(bypasses, told, strict=True):
        yield Measure(name=f"{way}: reports", value=one["kind"] == "memory", least=1)
        yield Measure(name=f"{way}: until then", value=one["seconds"], unit="s", most=_DETECTION_S)


@check(
    "38",
    "sanitizer, profiler and debugger",
    deadline_s=60,
    fault="the tools of CUDA need a real driver",
)
def cuda_tools(bench: Bench) -> Iterator[Measure]:
    """compute-sanitizer, ncu and cuda-gdb work on a program in a tenant as they do without."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        raise Skipped("nvcc is not installed")
    tenant = bench.tenant()
    program = str(tenant.root / "program")
    source = Path(__file__).resolve().parent.parent / "probes/cudart.cu"
    subprocess.run([nvcc, "-o", program, str(source)], check=True)
    commands = {
        "compute-sanitizer": ["--tool", "memcheck", "--error-exitcode", "9", program],
        "ncu": ["--launch-count", "1", program],
        "cuda-gdb": ["-batch", "-ex", "run", "-ex", "quit", program],
    }
    found = {name: path for name in commands if (path := shutil.which(name))}
    if not found:
        raise Skipped("no tool of CUDA is installed")
    for name, path in found.items():
        argv = [path, *commands[name]]
        codes = [
            tenant.run("memory:program", is_preloaded=one, argv=argv, limit_s=25)["code"]
            for one in (False, True)
        ]
        yield Measure(name=f"{name}: code without the limiter", value=codes[0])
        yield Measure(name=f"{name}: code", value=codes[1], least=codes[0], most=codes[0])


@check(
    "39",
    "counters of the device's memory bandwidth",
    deadline_s=20,
    fault="the fake NVML has no GPM samples",
)
def counters(bench: Bench) -> Iterator[Measure]:
    """GPM samples can be read, and show a device that copies all the time."""
    copying = bench.tenant().start("compute:copies", mib=1024)
    copying.answer()
    copying.send(seconds=2)
    time.sleep(0.5)
    seen = bench.machine.observer("bandwidth_pct")
    rate = copying.answer()["gb_per_s"]
    yield Measure(name="copied", value=rate, unit="GB/s")
    yield Measure(name="memory bandwidth in use", value=seen, unit="%", least=80)


@check(
    "nvidia-smi", "nvidia-smi in a tenant", deadline_s=30, fault="the fake driver has no nvidia-smi"
)
def nvidia_smi(bench: Bench) -> Iterator[Measure]:
    """nvidia-smi shows the limit as total and the tenant's processes alone."""
    path = shutil.which("nvidia-smi", path=bench.machine.environment.get("PATH"))
    if path is None:
        raise Skipped("nvidia-smi is not installed")
    tenant, stranger = bench.tenant(memory_mib=6000), bench.tenant()
    guests = [one.start("memory:hold", mib=200) for one in (tenant, stranger)]
    for guest in guests:
        guest.answer()

    def ask(query: str) -> list[str]:
        argv = [path, f"--{query}", "--format=csv,noheader,nounits"]
        seen = tenant.run("memory:program", argv=argv, limit_s=_SMI_S)
        return [line.strip() for line in seen["out"].splitlines() if line.strip()]

    total = ask("query-gpu=memory.total")
    yield Measure(name="total", value=float(total[0]), unit="MiB", least=6000, most=6000)
    pids = {int(line) for line in ask("query-compute-apps=pid")}
    yield Measure(name="own process listed", value=guests[0].pid in pids, least=1)
    yield Measure(name="other processes listed", value=len(pids - {guests[0].pid}), most=0)
