# SPDX-License-Identifier: Apache-2.0
"""Gives the real node a machine of its own inside this one: mounts, process namespace, cgroups.

Everything of the node (kubelet, containerd, shims, containers) lives in one process namespace. Its
end is the node's power switch: the kernel kills all, and all mounts vanish with the mount
namespace. In it the node's own directories stand at kubelet's usual places, because kubelet's
device plugin directory is fixed. The network is this machine's, or a namespace that the caller
made. A contained node also has its own /etc, /var/lib, /tmp and /run and cannot write anywhere else
on this machine's root file system. Needs root.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import anyio

from hami_sim.process import dying_with_parent

CGROUPS = Path("/sys/fs/cgroup")
DEVICE_MAJOR = 240
"""Of the pretended device nodes: set aside for local use, so no driver answers."""
KUBELET_DIRECTORY = Path("/var/lib/kubelet")
_START_S = 20.0
_END_S = 20.0
_HOLD = """
trap '' CHLD
set -e
if [ "$4" = contained ]; then
    mkdir -p "$1/etc" "$1/etc.work" "$1/lib/kubelet"
    mount --bind "$1" "$1"
    mount -t overlay -o "lowerdir=/etc,upperdir=$1/etc,workdir=$1/etc.work" etc /etc
    mount --bind "$1/lib" /var/lib
    mount -t tmpfs -o mode=1777 tmp /tmp
    mount -o remount,bind,ro /
fi
mkdir -p /var/lib/kubelet
mount --bind "$1/kubelet" /var/lib/kubelet
mount --make-rshared /var/lib/kubelet
mount --bind "$1/log" /var/log
mount -t tmpfs -o mode=755 run /run
# A /dev of its own, with the device nodes of the hardware that the node pretends to have.
dev="$1/dev"
mkdir -p "$dev"
mount -t tmpfs -o mode=755,nosuid dev "$dev"
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/kmsg "$dev"
mkdir "$dev/pts" "$dev/shm"
mount --bind /dev/pts "$dev/pts"
mount --bind /dev/shm "$dev/shm"
ln -s pts/ptmx "$dev/ptmx"
ln -s /proc/self/fd "$dev/fd"
minor=0
for name in $2; do
    mknod -m 666 "$dev/$name" c "$3" "$minor"
    minor=$((minor + 1))
done
mount --rbind "$dev" /dev
mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id
# Kubelet sets these for the whole machine; here it writes to files instead.
for name in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
    kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
    copy="$1/sysctl/$name"
    mkdir -p "${copy%/*}"
    cat "/proc/sys/$name" > "$copy"
    mount --bind "$copy" "/proc/sys/$name"
done
: > "$1/up"
exec sleep infinity
"""

# Runs as the child of nsenter, then executes the program: it ends with nsenter, and so with tests.
_DIE_WITH_NSENTER = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)


class Space:
    """The namespaces of one node; ``start`` again after ``kill`` is a reboot."""

    def __init__(
        self,
        directory: Path,
        *,
        devices: Sequence[str] = (),
        network: Path | None = None,
    ) -> None:
        """Keep all below ``directory``; ``devices`` are names in /dev, without a driver behind.

        ``network``: file of a network namespace. With it the node is contained; ``directory`` must
        then be outside of /tmp, and of the file system of /etc.
        """
        self.directory = directory
        self._devices = tuple(devices)
        self._network = network
        self.cgroup = f"hami-{uuid4().hex[:8]}"
        self._holder: subprocess.Popen[bytes] | None = None
        self.init_pid = 0
        for name in ("kubelet", "log", "logs"):
            (directory / name).mkdir(parents=True, exist_ok=True)

    @property
    def kubelet_directory(self) -> Path:
        """Kubelet's root directory as it is seen from outside."""
        return self.directory / "kubelet"

    @property
    def is_contained(self) -> bool:
        """True if the node has a network, /etc and /var/lib of its own."""
        return self._network is not None

    def seen(self, path: Path) -> Path:
        """Path of a running node's file, as this machine sees it."""
        return Path(f"/proc/{self.init_pid}/root") / path.relative_to("/")

    async def start(self) -> None:
        """Make the namespaces, with another boot id, and the node's cgroups."""
        (self.directory / "boot_id").write_text(f"{uuid4()}\n")
        mark = self.directory / "up"
        mark.unlink(missing_ok=True)
        shell = shutil.which("sh") or "/bin/sh"
        argv = [
            *self._enter_network(),
            *(_unshare(), "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"),
            *("--mount-proc", shell, "-c", _HOLD, "node", str(self.directory)),
            " ".join(self._devices),
            str(DEVICE_MAJOR),
            "contained" if self._network else "",
        ]
        with (self.directory / "logs" / "space.log").open("ab") as log:
            self._holder = subprocess.Popen(
                dying_with_parent(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with anyio.fail_after(_START_S):
            while not mark.exists():
                if self._holder.poll() is not None:
                    text = (self.directory / "logs" / "space.log").read_text(errors="replace")
                    msg = f"the node's namespaces cannot be made: {text[-500:]}"
                    raise RuntimeError(msg)
                await anyio.sleep(0.01)
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self.init_pid = int(children.split()[0])
        for directory in _cgroups(self.cgroup):
            directory.mkdir(exist_ok=True)

    def command(self, argv: Sequence[str | Path]) -> list[str]:
        """Command line that runs ``argv`` as a process of the node, killed with its runner."""
        return [
            *(_nsenter(), "-t", str(self.init_pid), "-m", "-n", "-p", "--"),
            *(sys.executable, "-I", "-S", "-c", _DIE_WITH_NSENTER, *_located(argv)),
        ]

    def look_command(self, argv: Sequence[str | Path]) -> list[str]:
        """Command line that runs ``argv`` with the node's mounts as a process of this machine.

        Its /proc shows the processes of this machine, itself and those of the node included.
        """
        enter = [_nsenter(), "-t", str(self.init_pid), "-m", "-n", "--"]
        return [*enter, *(_unshare(), "--mount", "--mount-proc", "--"), *_located(argv)]

    def _enter_network(self) -> list[str]:
        return [_nsenter(), f"--net={self._network}", "--"] if self._network else []

    async def kill(self) -> None:
        """Cut the power: every process of the node ends, its mounts and cgroups are gone."""
        if self._holder is None:
            return
        if self._holder.poll() is None:
            self._holder.send_signal(signal.SIGKILL)
        with anyio.move_on_after(_END_S, shield=True):
            while self._holder.poll() is None or _lives(self.init_pid):
                await anyio.sleep(0.01)
        self._holder = None
        remove_cgroups(self.cgroup)


def _located(argv: Sequence[str | Path]) -> list[str]:
    """``argv`` with the path of its program."""
    return [*(shutil.which(str(word)) or str(word) for word in argv[:1]), *map(str, argv[1:])]


def _nsenter() -> str:
    return shutil.which("nsenter") or "nsenter"


def _unshare() -> str:
    return shutil.which("unshare") or "unshare"


def remove_cgroups(name: str) -> None:
    """Remove a node's cgroups; its processes must have been killed."""
    for directory in _cgroups(name):
        _remove_cgroup(directory)


def _cgroups(name: str) -> list[Path]:
    """A node's cgroup in every hierarchy: one for version 2, one per controller before."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS / name]
    roots = {root.resolve() for root in CGROUPS.iterdir() if (root / "cgroup.procs").exists()}
    return [root / name for root in sorted(roots)]


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _remove_cgroup(root: Path) -> None:
    """Remove a cgroup with all below it; killed members leave it a moment after their end."""
    deadline_s = time.monotonic() + _END_S
    while root.exists():
        for directory, _, _ in os.walk(root, topdown=False):
            try:
                Path(directory).rmdir()
            except OSError:
                continue
        if time.monotonic() > deadline_s:
            break
        if root.exists():
            time.sleep(0.05)
