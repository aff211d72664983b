# SPDX-License-Identifier: Apache-2.0
"""The limiter against a tenant's own resource limits, forks and debuggers, on the fake driver.

Memory that processes hold is read from the driver, never from the region that tenants can write.
"""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hami_nodeagent.core import region as layout
from hami_nodeagent.core.breach import BreachBook, BreachRules, Process
from hami_nodeagent.core.holders import Holder
from hami_sim.hardware.fake_cuda import FakeCard
from tests.fakes.gpucontainers import GpuContainer, GpuNode, gpu_node, why_not
from tools import build_native, build_native_fakes

MIB = 1 << 20
LIMIT_MIB = 1000
WANTED_MIB = 800
CONTEXT_MIB = 64
PROCESSES = 3
PATIENCE_S = 30.0
OUT_OF_MEMORY = 2
NO_MEMORY = "no device memory for this process"

TENANT = """
import ctypes, json, os, resource, signal, sys
cuda = ctypes.CDLL("libcuda.so.1")
held = 0
def begin():
    context = ctypes.c_void_p()
    return (cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
            or cuda.cuCtxSetCurrent(context))
def take(mib):
    global held
    pointer = ctypes.c_uint64()
    for _ in range(mib):
        if cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)):
            break
        held += 1
    return held
def address_space():
    pages = int(open("/proc/self/statm").read().split()[0])
    return pages * resource.getpagesize()
for line in sys.stdin:
    try:
        told = eval(line)
    except Exception as error:
        told = repr(error)
    print(json.dumps(told), flush=True)
"""
"""A tenant's program: evaluates lines, and answers each with a line of JSON."""


class Tenant:
    """One process of the tenant."""

    def __init__(self, container: GpuContainer, *prefix: str) -> None:
        self.process = container.start([*prefix, sys.executable, "-c", TENANT])

    def ask(self, line: str) -> object:
        """Evaluate the line in the tenant's process; returns its value."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.end()
        return json.loads(answer)

    def end(self) -> str:
        """End it; returns its output on stderr."""
        _, said = self.process.communicate(timeout=PATIENCE_S)
        return said


StartTenant = Callable[..., Tenant]


@pytest.fixture(scope="module")
def node() -> Iterator[GpuNode]:
    """A machine whose containers are limited."""
    reason = why_not()
    if reason and os.environ.get("CI"):
        pytest.fail(f"CI must be able to make containers: {reason}")
    if reason:
        pytest.skip(reason)
    drivers = build_native_fakes.build(build_native_fakes.DEFAULT_OUT)
    with gpu_node("8xH100", drivers, library=build_native.build("release")) as made:
        yield made


MakeContainer = Callable[[], GpuContainer]


@pytest.fixture
def make_container(node: GpuNode) -> Iterator[MakeContainer]:
    """Makes containers with a share of one device, and ends them after the test."""
    with ExitStack() as stack:

        def make() -> GpuContainer:
            made = node.container(0, memory_mib=LIMIT_MIB)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def container(make_container: MakeContainer) -> GpuContainer:
    """The container of the test."""
    return make_container()


@pytest.fixture
def start(container: GpuContainer) -> Iterator[StartTenant]:
    """Starts processes in the container and ends them after the test."""
    tenants: list[Tenant] = []

    def begin(*prefix: str) -> Tenant:
        tenants.append(Tenant(container, *prefix))
        return tenants[-1]

    yield begin
    for tenant in tenants:
        if tenant.process.poll() is None:
            tenant.end()
        for stream in (tenant.process.stdin, tenant.process.stdout, tenant.process.stderr):
            if stream is not None:
                stream.close()


def used_mib(node: GpuNode, *tenants: Tenant) -> int:
    """Memory that the driver gave to these processes."""
    pids = {tenant.process.pid for tenant in tenants}
    with FakeCard(node.nvml.path) as card:
        uses = card.uses(node.uuids[0])
    return sum(use.used_bytes for use in uses if use.pid in pids) // MIB


def occupy(region: Path, pid: int) -> None:
    """Write a living process of the machine into every free slot of a region."""
    content = region.read_bytes()
    header = dict(
        zip(
            (name for name, _ in layout.HEADER if name),
            struct.unpack_from("<" + "".join(code for _, code in layout.HEADER), content),
            strict=True,
        )
    )
    start_ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    namespace = Path(f"/proc/{pid}/ns/pid").stat().st_ino & 0xFFFFFFFF
    owner = struct.pack("<IIQ", pid, namespace, start_ticks)
    with region.open("r+b") as file:
        for slot in range(header["slot_count"]):
            at = header["slots_offset"] + slot * layout.LINE
            if content[at : at + 16] == bytes(16):
                file.seek(at)
                file.write(owner)
        file.seek(dict(layout.offsets_of(layout.HEADER))["slots_seen"])
        file.write(struct.pack("<I", header["slot_count"]))


def vacate(region: Path, pid: int) -> None:
    """Take that process out of every slot again."""
    content = region.read_bytes()
    with region.open("r+b") as file:
        for at in range(0, len(content), layout.LINE):
            if content[at : at + 4] == struct.pack("<I", pid):
                file.seek(at)
                file.write(bytes(16))


def test_processes_beyond_the_slots_never_multiply_the_share(
    node: GpuNode, container: GpuContainer, start: StartTenant
) -> None:
    first = start()
    assert first.ask("begin()") == 0
    assert first.ask("take(100)") == 100
    region = container.region_directory / layout.FILE_NAME
    occupy(region, container.keeper_pid)
    late = [start() for _ in range(PROCESSES)]
    for tenant in late:
        tenant.ask("begin()")
        tenant.ask(f"take({WANTED_MIB})")
    assert used_mib(node, first, *late) <= LIMIT_MIB + CONTEXT_MIB
    vacate(region, container.keeper_pid)
    deadline_s = time.monotonic() + PATIENCE_S
    while late[0].ask("begin()") or not late[0].ask(f"take({WANTED_MIB})"):
        assert time.monotonic() < deadline_s, "it looks for a slot once a second"
    assert used_mib(node, first, *late) <= LIMIT_MIB + CONTEXT_MIB
    assert f"{NO_MEMORY}: 2048 processes of its container use the GPU already" in late[1].end()


SET = "resource.setrlimit(resource.RLIMIT_{0}, ({1}, {1}))"
IGNORE = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN) and None"


@pytest.mark.parametrize(
    "steps",
    [
        (SET.format("FSIZE", 0),),
        (IGNORE, SET.format("FSIZE", 0)),
        (SET.format("NOFILE", 0),),
        (SET.format("NOFILE", 4),),
        (SET.format("AS", "address_space() + (1 << 20)"),),
        (SET.format("AS", "address_space()"),),
        (SET.format("MEMLOCK", 0),),
        (SET.format("NPROC", 0),),
        (SET.format("DATA", 0),),
        (SET.format("STACK", 4096),),
    ],
    ids=lambda steps: (
        steps[-1].removeprefix("resource.setrlimit(resource.RLIMIT_").partition(",")[0]
    ),
)
def test_resource_limits_of_the_tenant_never_lift_its_share(
    node: GpuNode, container: GpuContainer, start: StartTenant, steps: tuple[str, ...]
) -> None:
    first = start()
    assert first.ask("begin()") == 0
    (container.region_directory / layout.FILE_NAME).unlink()
    starved = [start() for _ in range(PROCESSES)]
    for tenant in starved:
        for step in steps:
            tenant.ask(step)
        tenant.ask("begin()")
        tenant.ask(f"take({WANTED_MIB})")
    held_mib = used_mib(node, *starved)
    assert held_mib <= LIMIT_MIB + PROCESSES * CONTEXT_MIB


def test_process_that_cannot_read_its_limits_gets_no_context(
    node: GpuNode, start: StartTenant
) -> None:
    """The contexts of many processes would exceed any share."""
    first = start()
    assert first.ask("begin()") == 0
    blind = start()
    blind.ask(SET.format("NOFILE", 4))
    assert blind.ask("begin()") == OUT_OF_MEMORY
    assert used_mib(node, blind) == 0
    assert "Too many open files; nothing can be allocated" in blind.end()


def test_directory_that_the_tenant_made_full_never_lifts_its_share(
    node: GpuNode, container: GpuContainer, start: StartTenant
) -> None:
    fill = 'mount -t tmpfs -o size=64k none /run/hami && exec "$@"'
    tenants = [start("unshare", "--mount", "sh", "-c", fill, "sh") for _ in range(PROCESSES)]
    for tenant in tenants:
        tenant.ask("begin()")
        tenant.ask(f"take({WANTED_MIB})")
    assert used_mib(node, *tenants) <= LIMIT_MIB + PROCESSES * CONTEXT_MIB
    assert NO_MEMORY in tenants[0].end()


ATTACKER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long
ATTACH, POKEDATA, DETACH = 16, 5, 17
pid, address, value = (int(word, 0) for word in sys.argv[1:])
if libc.ptrace(ATTACH, pid, None, None):
    sys.exit(100 + ctypes.get_errno())
import os
os.waitpid(pid, 0x40000000)
done = libc.ptrace(POKEDATA, pid, address, value)
libc.ptrace(DETACH, pid, None, None)
sys.exit(50 if done else 0)
"""
"""Writes one word into another process: exit code 0, or 100 and the error of PTRACE_ATTACH."""
NO_SUCH_PROCESS = 100 + 3
MEMORY_BYTES_AT = 24
"""Of the field ``memory_bytes`` in ``struct limits`` (native/libvgpu/src/limits.h)."""


def address_of_limit(node: GpuNode, pid: int) -> int:
    """Address at which the library of a process keeps the limit of its first device."""
    assert node.library is not None
    symbols = subprocess.run(
        ["nm", node.library], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    (offset,) = (int(line.split()[0], 16) for line in symbols if line.endswith(" limits"))
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    base = min(int(line.partition("-")[0], 16) for line in maps if str(node.library) in line)
    return base + offset + MEMORY_BYTES_AT


def test_debugger_of_another_pid_namespace_reaches_no_process_of_the_container(
    node: GpuNode, make_container: MakeContainer, start: StartTenant
) -> None:
    victim = start()
    assert victim.ask("begin()") == 0
    pid = victim.process.pid
    words = [sys.executable, "-c", ATTACKER, str(pid), hex(address_of_limit(node, pid)), "0"]
    inner = ["unshare", "--pid", "--fork", "--mount-proc", *words]
    assert make_container().run(inner).returncode == NO_SUCH_PROCESS
    assert victim.ask(f"take({2 * LIMIT_MIB})") <= LIMIT_MIB  # type: ignore[operator]
    assert used_mib(node, victim) <= LIMIT_MIB + CONTEXT_MIB


def test_debugger_in_the_container_lifts_the_limit_and_is_reported(
    node: GpuNode, container: GpuContainer, start: StartTenant
) -> None:
    """A program that bypasses the library, which is documented and reported from outside."""
    victim = start()
    assert victim.ask("begin()") == 0
    pid = victim.process.pid
    unlimited = hex(100 * LIMIT_MIB * MIB)
    words = [sys.executable, "-c", ATTACKER, str(pid), hex(address_of_limit(node, pid)), unlimited]
    assert container.run(words).returncode == 0
    victim.ask(f"take({2 * LIMIT_MIB})")
    held_mib = used_mib(node, victim)
    assert held_mib >= 2 * LIMIT_MIB, "the way is closed by now: say so in docs/limiter-memory.md"
    holder = Holder(
        pod_uid="uid",
        namespace="default",
        pod="pod",
        container="main",
        vendor="nvidia",
        uuid=node.uuids[0],
        number=0,
        limit_mib=LIMIT_MIB,
    )
    seen = Process(pid=pid, pod_uid="uid", container="main", used_mib=held_mib)
    book = BreachBook(BreachRules())
    told = [book.look([holder], {node.uuids[0]: [seen]}, now_s=now_s).tell for now_s in (0, 3)]
    assert [len(one) for one in told] == [0, 1]
