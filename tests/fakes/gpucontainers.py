# SPDX-License-Identifier: Apache-2.0
"""Programs in containers on a fake GPU machine: what the limiter sees in production, in namespaces.

A container has mount namespace, ``/etc/hami`` (read-only, refreshed as kubelet does), ``/run/hami``
and ``/etc/ld.so.preload`` of its own; its files, users and processes are otherwise the machine's.
It lives as long as its keeper, a process that ends with its parent. Programs enter through
``command`` and ``environment``, or ``run`` and ``start``; several containers share one machine, so
its memory and its time (native/libvgpu/tests/fakedrv).

Needs the right to make mount namespaces: ``why_not`` says what is missing. Memory in MiB.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from hami_common.pods.limits import FILE_NAME, DeviceLimit, Limits, encode
from hami_sim.hardware.fake_cuda import FakeCard
from hami_sim.hardware.fake_nvml import STATE_VARIABLE, FakeNvml
from hami_sim.hardware.profile import Profile, load

IN_MEMORY = Path("/dev/shm")
PRIORITY_DIRECTORY = "/run/hami-priority"

_KEEPER = r"""
set -eu
mount --make-rprivate /
scratch=$1
mount -t tmpfs -o mode=0755 tmpfs "$scratch"
mkdir "$scratch/upper" "$scratch/work"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$scratch/upper,workdir=$scratch/work" /etc
mkdir -p /etc/hami
mount --bind "$2" /etc/hami
mount -o remount,bind,ro /etc/hami
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir /run/hami /run/hami-priority
mount --bind "$3" /run/hami
mount --bind "$4" /run/hami-priority
mount -o remount,bind,ro /run/hami-priority
mount --bind "$6" /run/hami-priority/bells
mount -o remount,bind,ro /run/hami-priority/bells
cat "$5" > /etc/ld.so.preload
echo ready
exec cat > /dev/null
"""


def why_not() -> str | None:
    """Return the reason why containers cannot be created here, or ``None``."""
    for tool in ("unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for part in _DIRECTORIES:
            (root / part).mkdir()
        (root / "preload").touch()
        tried = subprocess.run(
            _keeper_command(root), input="", capture_output=True, text=True, check=False, env=_PLAIN
        )
    if tried.returncode == 0 and tried.stdout.startswith("ready"):
        return None
    return f"mount namespaces are not permitted: {tried.stderr.strip()[:200]}"


_DIRECTORIES = ("scratch", "etc", "run", "priority", "priority/bells", "bell")
_PLAIN = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}


def _keeper_command(root: Path) -> list[str]:
    names = ("scratch", "etc", "run", "priority", "preload", "bell")
    parts = [str(root / part) for part in names]
    return ["unshare", "--mount", "sh", "-c", _KEEPER, "keeper", *parts]


class GpuContainer:
    """One container; made by ``GpuNode.container``."""

    def __init__(
        self, node: "GpuNode", root: Path, *, limits: Limits | None, library: Path | None
    ) -> None:
        """Make it; ``limits`` ``None``: no limits file; ``library`` ``None``: nothing preloaded."""
        self._node = node
        self._root = root
        for part in _DIRECTORIES:
            (root / part).mkdir(parents=True)
        (root / "run").chmod(0o777)
        self.region_directory = root / "run"
        self.priority_directory = root / "priority"
        self.bell_directory = root / "bell"
        (root / "preload").write_text(f"{library}\n" if library else "", encoding="utf-8")
        self.limits = limits
        self._generation = 0
        if limits is not None:
            self.set_limits(limits)
        self._keeper = subprocess.Popen(
            _keeper_command(root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_PLAIN,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "ready\n":
            self.close()
            msg = "the container could not be made"
            raise RuntimeError(msg)

    @property
    def keeper_pid(self) -> int:
        """A process of the container; ``/proc/PID/root`` shows what the container sees."""
        return self._keeper.pid

    def set_limits(self, limits: Limits) -> None:
        """Replace the limits file as kubelet does: a new directory, and one symbolic link moved."""
        self.limits = limits
        etc = self._root / "etc"
        self._generation += 1
        data = etc / f"..{self._generation}"
        data.mkdir()
        (data / FILE_NAME).write_text(encode(limits), encoding="utf-8")
        fresh = etc / "..fresh"
        fresh.symlink_to(data.name)
        fresh.replace(etc / "..data")
        if not (etc / FILE_NAME).is_symlink():
            (etc / FILE_NAME).symlink_to(f"..data/{FILE_NAME}")
        shutil.rmtree(etc / f"..{self._generation - 1}", ignore_errors=True)

    def set_memory_mib(self, memory_mib: int) -> None:
        """Give every device of the container this limit."""
        assert self.limits is not None
        devices = tuple(replace(device, memory_mib=memory_mib) for device in self.limits.devices)
        self.set_limits(replace(self.limits, devices=devices))

    def command(self, argv: Sequence[str | Path]) -> list[str]:
        """The command line that runs ``argv`` in the container."""
        return [
            *("nsenter", f"--mount=/proc/{self._keeper.pid}/ns/mnt", "--"),
            *(str(word) for word in argv),
        ]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment of its programs; ``extra`` wins."""
        visible = "" if self.limits is None else ",".join(d.uuid for d in self.limits.devices)
        inside = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
        return {**_PLAIN, **self._node.environment, **inside, **(extra or {})}

    def start(
        self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a program with its standard input and output in pipes."""
        return subprocess.Popen(
            self.command(argv),
            env=self.environment(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        argv: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        *,
        input_text: str = "",
        limit_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        return subprocess.run(
            self.command(argv),
            env=self.environment(env),
            input=input_text,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )

    def close(self) -> None:
        """End the container. The caller that started programs in it must end them."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(5)
        except subprocess.TimeoutExpired:
            self._keeper.send_signal(signal.SIGKILL)
            self._keeper.wait()
        self._keeper.stdout.close()


class GpuNode:
    """One machine with fake GPUs, and the containers on it."""

    def __init__(
        self,
        root: Path,
        profile: Profile | str,
        drivers: Path,
        *,
        name: str = "node-a",
        library: Path | None = None,
    ) -> None:
        """``drivers`` holds the fake libraries, ``library`` is the limiter that is preloaded."""
        self.profile = load(profile) if isinstance(profile, str) else profile
        self.drivers = drivers
        self.library = library
        self._root = root
        self.nvml = FakeNvml(root / "state", self.profile, name)
        self._containers: list[GpuContainer] = []
        self._card: FakeCard | None = None

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of the devices, in order."""
        return self.nvml.uuids

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a program finds the fake drivers of this machine."""
        return {STATE_VARIABLE: str(self.nvml.path), "LD_LIBRARY_PATH": str(self.drivers)}

    @property
    def card(self) -> FakeCard:
        """The driver's own figures; FileNotFoundError until a process has used the driver."""
        if self._card is None:
            self._card = FakeCard(self.nvml.path)
        return self._card

    def container(
        self,
        *devices: int,
        memory_mib: int = 0,
        core_pct: int = 0,
        priority: int | None = None,
        is_limited: bool = True,
        is_preloaded: bool = True,
    ) -> GpuContainer:
        """A container with the same share of each of these devices (indexes, in its order)."""
        number = len(self._containers)
        limits = Limits(
            container=f"c{number}",
            allocation_id=f"allocation-{number}",
            priority=priority,
            devices=tuple(
                DeviceLimit(
                    vendor=self.profile.vendor,
                    uuid=self.uuids[index],
                    memory_mib=memory_mib,
                    core_pct=core_pct,
                )
                for index in devices
            ),
        )
        made = GpuContainer(
            self,
            self._root / f"c{number}",
            limits=limits if is_limited else None,
            library=self.library if is_preloaded else None,
        )
        self._containers.append(made)
        return made

    def close(self) -> None:
        """End all containers."""
        for container in self._containers:
            container.close()
        if self._card is not None:
            self._card.close()
            self._card = None


@contextlib.contextmanager
def gpu_node(
    profile: Profile | str, drivers: Path, *, library: Path | None = None
) -> Iterator[GpuNode]:
    """A machine in a directory of its own, in memory where there is room for that."""
    base = IN_MEMORY if IN_MEMORY.is_dir() and sys.platform == "linux" else None
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=base, ignore_cleanup_errors=True) as name:
        node = GpuNode(Path(name), profile, drivers, library=library)
        try:
            yield node
        finally:
            node.close()
