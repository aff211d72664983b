# SPDX-License-Identifier: Apache-2.0
"""Checks 1 to 4: how programs reach the hooks, and what they see."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.gpu import region
from tests.gpu.bench import Bench, Tenant
from tests.gpu.machine import MIB
from tests.gpu.registry import NO_LIMITER, Measure, Skipped, check
from tools import build_native, build_native_fakes

SYMBOLS = build_native.SOURCES / "symbols.def"
_ENTRY = re.compile(r"^CUDA_(HOOK|CALL|PASS)\((?:\w+, )?(cu\w+)", re.MULTILINE)
_CONTEXT_ERROR_MIB = 2.0
_CUDART = Path(__file__).resolve().parent.parent / "probes/cudart.cu"


_UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def _inner_namespace(bench: Bench) -> Iterator[Measure]:
    """The same in a PID namespace of its own, where that is permitted."""
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False)
    if tried.returncode:
        return
    guest = bench.tenant(memory_mib=6000).start("views:nvml", prefix=_UNSHARE, mib=64)
    guest.answer()
    seen = guest.ask()
    wrong = sum(
        pids != [seen["own"]] for name, pids in seen["pids"].items() if not seen["codes"][name]
    )
    yield Measure(name="wrong lists in a PID namespace", value=wrong, most=0)


@check("1", "hooks by dlsym and cuGetProcAddress", deadline_s=20, fault=NO_LIMITER)
def hooks(bench: Bench) -> Iterator[Measure]:
    """Every hooked name leads to the limiter, and no two exports share an address."""
    entries = _ENTRY.findall(SYMBOLS.read_text(encoding="utf-8"))
    names = {
        kind: [name for one, name in entries if one == kind] for kind in ("HOOK", "CALL", "PASS")
    }
    others = names["CALL"] + names["PASS"]
    seen = bench.tenant().run("views:addresses", hooks=names["HOOK"], others=others)
    plain = bench.tenant().run(
        "views:addresses", is_preloaded=False, hooks=names["HOOK"], others=others
    )
    yield Measure(name="hooks", value=seen["hooks"], least=80)
    yield Measure(name="hooks that the driver lacks", value=seen["absent"])
    yield Measure(
        name="dlsym results outside of the limiter", value=len(seen["not_hooked"]), most=0
    )
    yield Measure(name="cuGetProcAddress answers", value=seen["asked"], least=500)
    bypassed = " ".join(["cuGetProcAddress bypasses", *seen["bypassed"]])
    yield Measure(name=bypassed, value=seen["bypasses"], most=0)
    yield Measure(name="shared addresses in the driver", value=len(plain["aliases"]), most=0)


@check("2", "access to the driver by every route", deadline_s=30, fault=NO_LIMITER)
def routes(bench: Bench) -> Iterator[Measure]:
    """Programs that find the driver in different ways are charged, and their launches counted."""
    for name in ("dlsym", "proc_address"):
        tenant = bench.tenant()
        guest = tenant.start(f"views:by_{name}")
        guest.answer()
        yield from _counted(tenant, name)
    drive = build_native_fakes.build(build_native_fakes.DEFAULT_OUT) / "drive"
    for way in ("link", "proc"):
        tenant = bench.tenant(memory_mib=4096)
        commands = "init\\ndevice 0\\nalloc 3G\\nalloc 3G\\nquit\\n"
        script = f"printf '{commands}' | {drive} {way}"
        out = tenant.run("memory:program", is_preloaded=True, argv=["sh", "-c", script], limit_s=20)
        refused = out["out"].split("\n")[3:4] == ["error 2"]
        yield Measure(name=f"{way}: second half refused", value=refused, least=1)
    if not bench.is_fake:
        yield from _runtime(bench)


def _counted(tenant: Tenant, name: str) -> Iterator[Measure]:
    processes = region.read(tenant.region)
    launches = sum(one.launches for one in processes)
    context = sum(one.context_bytes for one in processes)
    used = sum(one.used_bytes for one in processes)
    yield Measure(name=f"{name}: launches", value=launches, least=3)
    yield Measure(name=f"{name}: context", value=context / MIB, unit="MiB", least=1)
    yield Measure(name=f"{name}: charged", value=used / MIB, unit="MiB", least=context / MIB)


def _runtime(bench: Bench) -> Iterator[Measure]:
    """The CUDA runtime, linked statically and dynamically."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        return
    for kind in ("static", "shared"):
        tenant = bench.tenant()
        program = str(tenant.root / kind)
        built = tenant.run(
            "memory:program",
            is_preloaded=False,
            argv=[nvcc, f"-cudart={kind}", "-o", program, str(_CUDART)],
            limit_s=25,
        )
        if built["code"]:
            raise Skipped(f"nvcc: {built['err'][-200:]}")
        tenant.run("memory:program", argv=[program], limit_s=10)
        yield from _counted(tenant, f"{kind} runtime")


@check("3", "charge of contexts", deadline_s=30, fault=NO_LIMITER)
def contexts(bench: Bench) -> Iterator[Measure]:
    """The charge of a process that only has a context equals what NVML shows for it."""
    tenant = bench.tenant()
    guests = [tenant.start("memory:hold") for _ in range(4)]
    for guest in guests:
        guest.answer()
    for number in (0, 3):
        pid = guests[number].pid
        contexts_ = [one for one in region.read(tenant.region) if one.pid == pid]
        charged = sum(one.context_bytes for one in contexts_) / MIB
        used = bench.used_mib(pid)
        yield Measure(name=f"context of process {number + 1}", value=used, unit="MiB")
        yield Measure(
            name=f"charge less NVML, process {number + 1}",
            value=charged - used,
            unit="MiB",
            least=-_CONTEXT_ERROR_MIB,
            most=_CONTEXT_ERROR_MIB,
        )


@check("4", "NVML inside a tenant", deadline_s=30, fault=NO_LIMITER)
def nvml_views(bench: Bench) -> Iterator[Measure]:
    """Every form of NVML's lists shows the tenant's processes alone, and its limit as total."""
    tenant = bench.tenant(memory_mib=6000)
    stranger = bench.tenant().start("views:nvml", mib=64)
    guests = [tenant.start("views:nvml", mib=64) for _ in range(2)]
    for guest in (stranger, *guests):
        guest.answer()
    seen = guests[0].ask()
    own = sorted(guest.pid for guest in guests)
    foreign = sum(
        sorted(pids) != own for name, pids in seen["pids"].items() if not seen["codes"][name]
    )
    answered = sum(not code for code in seen["codes"].values())
    yield from _inner_namespace(bench)
    yield Measure(name="queries answered", value=answered, least=4)
    yield Measure(name="lists with other processes than the tenant's", value=foreign, most=0)
    for name, total in zip(("v1", "v2", "cuMemGetInfo"), seen["totals_mib"], strict=True):
        yield Measure(name=f"total, {name}", value=total, unit="MiB", least=6000, most=6000)
