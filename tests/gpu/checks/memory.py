# SPDX-License-Identifier: Apache-2.0
"""Checks 5, 7 to 9, 33, 34, 36: what is charged, what is refused, what becomes free again."""

import signal
import time
from collections.abc import Iterator

from tests.gpu.bench import Bench
from tests.gpu.registry import NO_LIMITER, Fault, Measure, check

OUT_OF_MEMORY = 2
WAYS = ("alloc", "pitch", "array", "vmm", "async", "pool", "graph")
_LIMIT_MIB = 6000
_BLOCK_MIB = 64
_ROUNDING = 1.05
_POLL_S = 0.005


@check("5", "rounding of small and odd sizes", deadline_s=30, fault=NO_LIMITER)
def rounding(bench: Bench) -> Iterator[Measure]:
    """The driver's growth does not exceed the charge for sizes that it may round."""
    for name, size, count in (
        ("1 MiB + 1 B", (1 << 20) + 1, 4000),
        ("1 KiB", 1024, 4000),
        ("2 MiB", 2 << 20, 4000),
    ):
        tenant = bench.tenant()
        guest = tenant.start("memory:sizes", bytes_each=size, count=count)
        guest.answer()
        before = bench.used_mib(guest.pid), tenant.charged_mib(guest.pid)
        granted = guest.ask()["granted"]
        used = bench.used_mib(guest.pid) - before[0]
        charged = tenant.charged_mib(guest.pid) - before[1]
        guest.close()
        yield Measure(name=f"{name}: granted", value=granted, least=count)
        yield Measure(name=f"{name}: growth", value=used, unit="MiB")
        ratio = used / charged if charged > 0 else float("inf")
        yield Measure(name=f"{name}: growth per charge", value=ratio, most=_ROUNDING)


@check("7", "filling a limit in every way of allocation", deadline_s=60, fault=NO_LIMITER)
def fill(bench: Bench) -> Iterator[Measure]:
    """The last block that fits is granted, the next one refused, and the driver has no more."""
    for way in WAYS:
        tenant = bench.tenant(memory_mib=_LIMIT_MIB)
        guest = tenant.start("memory:fill", way=way, block_mib=_BLOCK_MIB, most=2000)
        seen = guest.answer()
        used = bench.used_mib(seen["pid"])
        guest.close()
        yield Measure(
            name=f"{way}: code", value=seen["code"], least=OUT_OF_MEMORY, most=OUT_OF_MEMORY
        )
        yield Measure(
            name=f"{way}: left", value=seen["free_mib"], unit="MiB", most=_BLOCK_MIB * 1.5
        )
        most = _LIMIT_MIB + bench.on(fake=0, real=bench.context_mib())
        yield Measure(name=f"{way}: used", value=used, unit="MiB", least=_LIMIT_MIB / 2, most=most)


@check(
    "8", "pool slack before a refusal", deadline_s=15, fault=Fault(driver=("cuMemPoolTrimTo", 1, 0))
)
def pool_slack(bench: Bench) -> Iterator[Measure]:
    """Memory that a pool keeps unused is released before a plain allocation is refused."""
    tenant = bench.tenant(memory_mib=_LIMIT_MIB)
    seen = tenant.run("memory:pool_slack", mib=_LIMIT_MIB * 0.6)
    yield Measure(name="code of the pool's allocation", value=seen["first"], most=0)
    yield Measure(name="code of the plain allocation", value=seen["second"], most=0)


@check(
    "9",
    "local memory and heap of kernels",
    deadline_s=20,
    fault="the fake driver has neither local memory nor a device heap",
)
def local_memory(bench: Bench) -> Iterator[Measure]:
    """Memory that the driver reserves for stacks and heaps beyond the charge."""
    tenant = bench.tenant()
    guest = tenant.start("memory:local_memory")
    guest.answer()
    for name in ("first kernel", "16 KiB of stack", "heap of 512 MiB"):
        guest.ask()
        hidden = bench.used_mib(guest.pid) - tenant.charged_mib(guest.pid)
        yield Measure(name=f"uncharged after {name}", value=hidden, unit="MiB", most=64)


@check("33", "memory of a killed process", deadline_s=20, fault=Fault(is_killed=False))
def killed(bench: Bench) -> Iterator[Measure]:
    """The share of a process that was killed is free within a second of the driver's release."""
    tenant = bench.tenant(memory_mib=8000)
    guests = [tenant.start("memory:hold", mib=1000) for _ in range(4)]
    codes = [guest.answer()["code"] for guest in guests]
    yield Measure(name="processes with their memory", value=codes.count(0), least=4)
    free = guests[1].ask()["free_mib"]
    needed = free + 500
    guests[0].kill(signal.SIGKILL if bench.fault.is_killed else signal.SIGSTOP)
    began, code = time.monotonic(), OUT_OF_MEMORY
    while code and time.monotonic() - began < 1.5:
        code = guests[1].ask(alloc=needed)["code"]
        time.sleep(_POLL_S)
    yield Measure(name="until it is granted", value=time.monotonic() - began, unit="s", most=1)
    yield Measure(
        name="used by the killed process", value=bench.used_mib(guests[0].pid), unit="MiB", most=0
    )


@check("34", "memory shared between processes", deadline_s=20, fault=NO_LIMITER)
def ipc(bench: Bench) -> Iterator[Measure]:
    """Memory that one process exports and another opens is charged once, to the exporter."""
    tenant = bench.tenant()
    exporter = tenant.start("memory:ipc_export", mib=64)
    first = exporter.answer()
    before = tenant.charged_mib(exporter.pid)
    importer = tenant.start("memory:ipc_open", handle=first["handle"])
    second = importer.answer()
    yield Measure(name="code of the import", value=second["code"], most=0)
    yield Measure(name="charge of the exporter", value=before, unit="MiB", least=64)
    alone = bench.used_mib(importer.pid)
    charged = tenant.charged_mib(importer.pid)
    yield Measure(name="charge of the importer", value=charged, unit="MiB", least=1, most=alone + 2)


@check("36", "managed memory", deadline_s=15, fault=NO_LIMITER)
def managed(bench: Bench) -> Iterator[Measure]:
    """Managed memory is charged in full wherever its pages are, also from a managed pool."""
    total, used = bench.device_memory()
    size = int(min(2048, (total - used) / (1 << 20) / 4))
    tenant = bench.tenant()
    guest = tenant.start("memory:managed", mib=size)
    guest.answer()
    before = tenant.charged_mib(guest.pid)
    seen = guest.ask()
    charged = tenant.charged_mib(guest.pid) - before
    yield Measure(name="code", value=seen["code"], most=0)
    yield Measure(name="charged", value=charged, unit="MiB", least=size, most=size + 2)
    yield Measure(
        name="code of advice and prefetch", value=seen["advice"] or seen["prefetch"], most=0
    )
    seen = guest.ask()
    if seen["made"]:
        yield Measure(name="managed pools not supported: code", value=seen["made"])
        return
    charged = tenant.charged_mib(guest.pid) - before
    yield Measure(name="code from a managed pool", value=seen["code"], most=0)
    yield Measure(name="charged from a managed pool", value=charged, unit="MiB", least=size)
