# SPDX-License-Identifier: Apache-2.0
"""Starts, finds, signals and ends containers: real processes under the launcher native/simrun.c.

Layout below a node's directory: ``pods/UID/containers/NAME/ATTEMPT/{spec,state,exit,work}`` and
``logs/NAMESPACE_POD_UID/NAME/ATTEMPT.log``. Containers live on when this process ends; a new
Runtime on the same directory finds them by pid and start time. Times in Unix seconds.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio

from hami_sim.kubelet.launcher import encode, launcher, maps_user, root_entry
from hami_sim.kubelet.plan import Mount, Plan
from hami_sim.kubelet.podstatus import Ended, Running
from hami_sim.kubelet.toolkit import Toolkit

_LOG = logging.getLogger(__name__)
_ETC = (
    *("passwd", "group", "nsswitch.conf", "hosts", "resolv.conf", "localtime", "mime.types"),
    *("ssl", "ca-certificates", "pki", "alternatives", "protocols", "services"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d"),
)
_DEV = ("null", "zero", "full", "random", "urandom", "tty")
_DEV_LINKS = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
)
_TOP = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt")
_MASKED = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
_SCRATCH = (("/dev/shm", "64m"), ("/tmp", "256m"), ("/var/tmp", "64m"))  # noqa: S108 - inside
_PRELOAD = "/etc/ld.so.preload"
_START_S = 20.0
_POLL_S = 0.02
_LOST = 137
_NEVER = 128


class StartFailed(Exception):
    """A container did not come to run; `reason` is what kubelet shows as Waiting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Container:
    """One run of a container, from its start on."""

    def __init__(self, uid: str, name: str, attempt: int, directory: Path, log: Path) -> None:
        self.uid = uid
        self.name = name
        self.attempt = attempt
        self.directory = directory
        self.log = log
        self.pid = 0
        self.shim_pid = 0
        self.started_s = 0.0
        self.ended: Ended | None = None

    @property
    def container_id(self) -> str:
        """Return the id shown in statuses."""
        return f"sim://{self.pid}"

    @property
    def running(self) -> Running | None:
        """Return the facts while it runs."""
        if self.ended is not None:
            return None
        return Running(container_id=self.container_id, started_s=self.started_s)


class Runtime:
    """The containers of one node."""

    def __init__(
        self,
        directory: Path,
        *,
        uses_namespaces: bool,
        owner_pid: int,
        host_paths: Sequence[str],
        now_s: Callable[[], float],
        toolkit: Toolkit | None = None,
    ) -> None:
        self._toolkit = toolkit
        self._directory = directory
        self._uses_namespaces = uses_namespaces
        self._owner_pid = owner_pid
        self._now_s = now_s
        # Each container mounts its root here, in its own view; removing a mount point is slow.
        self._mount_point = directory / "root"
        self._base = _base_words(host_paths) if uses_namespaces else []

    @property
    def uses_namespaces(self) -> bool:
        """True if containers have namespaces of their own."""
        return self._uses_namespaces

    def pod_directory(self, uid: str) -> Path:
        """Return a pod's directory."""
        return self._directory / "pods" / uid

    def log_directory(self, namespace: str, pod: str, uid: str) -> Path:
        """Return the directory of a pod's logs."""
        return self._directory / "logs" / f"{namespace}_{pod}_{uid}"

    def log_paths(self, namespace: str, pod: str, uid: str, container: str) -> list[Path]:
        """List the logs of a container's kept runs, oldest first."""
        directory = self.log_directory(namespace, pod, uid) / container
        logs = [path for path in directory.glob("*.log") if path.stem.isdigit()]
        return sorted(logs, key=lambda path: int(path.stem))

    # -- starting

    async def start(self, plan: Plan, attempt: int) -> Container:
        """Start a container; returns once its command runs, else StartFailed."""
        if self._toolkit is not None:
            plan = self._toolkit.equip(plan, mounts=self._uses_namespaces)
        directory = self.pod_directory(plan.uid) / "containers" / plan.name / str(attempt)
        logs = self.log_directory(plan.namespace, plan.pod, plan.uid) / plan.name
        container = Container(plan.uid, plan.name, attempt, directory, logs / f"{attempt}.log")
        (directory / "work").mkdir(parents=True, exist_ok=True)
        self._mount_point.mkdir(exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        words = self._words(plan, container)
        spec = directory / "spec"
        spec.write_bytes(encode(words))
        spec.chmod(0o600)
        told = await _spawn(spec, container)
        if told.startswith("ok "):
            self._read_state(container)
            return container
        _reap(container.shim_pid)
        container.shim_pid = 0
        message = told.removeprefix("error ")
        if message.startswith("exec:"):
            container.started_s = self._now_s()
            self._end(container, _NEVER, "StartError", message)
            return container
        shutil.rmtree(directory, ignore_errors=True)
        raise StartFailed("CreateContainerError", message)

    def _words(self, plan: Plan, container: Container) -> list[str]:
        words = ["simrun/1", "log", str(container.log)]
        words += ["exit", str(container.directory / "exit")]
        words += ["state", str(container.directory / "state"), "owner", str(self._owner_pid)]
        env = dict(plan.env)
        if self._uses_namespaces:
            words += ["root", str(self._mount_point), "hostname", plan.hostname]
            words += ["map-user"] if maps_user() else []
            words += ["user", str(plan.user), str(plan.group)]
            for group in plan.groups:
                words += ["group", str(group)]
            words += ["all-caps"] if plan.is_privileged else []
            words += ["share-pids"] if plan.shares_pids else []
            words += self._base
            words += self._device_words(plan)
            for mount in plan.mounts:
                flags = "rR" if mount.is_readonly else "R"
                words += ["bind", str(mount.source), mount.target, flags]
            words += ["cwd", plan.cwd]
        else:
            env |= {"PATH": f"{os.environ.get('PATH', '')}:{env['PATH']}"}
            env |= _named_in_env(plan.mounts)
            words += ["cwd", str(container.directory / "work")]
        for key, value in env.items():
            words += ["env", f"{key}={value}"]
        for word in plan.argv:
            words += ["arg", word]
        if any("\0" in word for word in words):
            raise StartFailed("CreateContainerError", "a word of the specification holds a NUL")
        return words

    def _device_words(self, plan: Plan) -> list[str]:
        words: list[str] = []
        for target, source, _ in plan.devices:
            path = Path(source)
            if not path.exists():
                path = self._placeholder(source)
            words += ["bind", str(path), target, ""]
        return words

    def pretended(self, source: str) -> Path:
        """Make an empty directory that stands for a path that this machine lacks."""
        path = self._directory / "host" / source.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _placeholder(self, source: str) -> Path:
        """Make a stand-in for a device node that this machine lacks: it behaves like /dev/null."""
        path = self._directory / "host" / source.lstrip("/")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
                path.chmod(0o666)
            except PermissionError:
                path.touch()
        return path

    # -- finding and watching

    async def recover(self) -> list[Container]:
        """Find the runs that an earlier kubelet started, by pod, container and attempt.

        A launcher that was just being started when that kubelet died is given time to report.
        """
        found = []
        starting = {_spec_of(pid) for pid in shims_below(self._directory)}
        for directory in sorted(
            (self._directory / "pods").glob("*/containers/*/*"),
            key=lambda path: (path.parts[:-1], int(path.name)),
        ):
            uid, name = directory.parts[-4], directory.parts[-2]
            with anyio.move_on_after(_START_S):
                while directory / "spec" in starting and not (directory / "state").exists():
                    await anyio.sleep(_POLL_S)
                    starting = {_spec_of(pid) for pid in shims_below(self._directory)}
            if not (directory / "state").exists():
                continue
            logs = next((self._directory / "logs").glob(f"*_{uid}"), self._directory / "logs")
            log = logs / name / f"{directory.name}.log"
            container = Container(uid, name, int(directory.name), directory, log)
            start = self._read_state(container)
            if _start_of(container.shim_pid) != start:
                container.shim_pid = 0
                self.read_exit(container)
            found.append(container)
        return found

    def _read_state(self, container: Container) -> int:
        shim, start, pid, moment = (container.directory / "state").read_text().split()
        container.shim_pid, container.pid = int(shim), int(pid)
        container.started_s = int(moment) / 1e9
        return int(start)

    async def wait(self, container: Container) -> None:
        """Return when a running container has ended; its `ended` is filled then."""
        try:
            handle = os.pidfd_open(container.shim_pid)
        except ProcessLookupError:
            self.read_exit(container)
            return
        try:
            await anyio.wait_readable(handle)
        finally:
            os.close(handle)
        _reap(container.shim_pid)
        self.read_exit(container)

    def read_exit(self, container: Container) -> None:
        """Fill in how a container ended."""
        try:
            words = (container.directory / "exit").read_text().split()
        except FileNotFoundError:
            words = []
        if len(words) == 2:  # noqa: PLR2004 - code and time
            code = int(words[0])
            reason = "Completed" if code == 0 else "Error"
            self._end(container, code, reason, "", finished_s=int(words[1]) / 1e9)
        else:
            self._end(
                container,
                _LOST,
                "ContainerStatusUnknown",
                "The container could not be located when the pod was terminated",
            )

    def _end(
        self,
        container: Container,
        code: int,
        reason: str,
        message: str,
        *,
        finished_s: float | None = None,
    ) -> None:
        container.ended = Ended(
            exit_code=code,
            container_id=container.container_id,
            started_s=container.started_s,
            finished_s=finished_s if finished_s is not None else self._now_s(),
            reason=reason,
            message=message,
        )

    # -- ending

    def terminate(self, container: Container) -> None:
        """Ask a container to end."""
        _signal(container, signal.SIGTERM)

    def kill(self, container: Container) -> None:
        """End a container at once."""
        _signal(container, signal.SIGUSR2)

    def forget_attempts(self, container: Container, *, keep: int) -> None:
        """Remove what is left of runs older than the newest `keep`."""
        parent = container.directory.parent
        for directory in parent.iterdir():
            if directory.name.isdigit() and int(directory.name) <= container.attempt - keep:
                shutil.rmtree(directory, ignore_errors=True)
                (container.log.parent / f"{directory.name}.log").unlink(missing_ok=True)

    def remove_pod(self, uid: str) -> None:
        """Remove a pod's directory and logs."""
        if self._toolkit is not None:
            self._toolkit.forget(uid)
        shutil.rmtree(self.pod_directory(uid), ignore_errors=True)
        for logs in (self._directory / "logs").glob(f"*_{uid}"):
            shutil.rmtree(logs, ignore_errors=True)


def _named_in_env(mounts: Sequence[Mount]) -> dict[str, str]:
    """Return variables that name the mounts to a container without a mount namespace."""
    sources = {mount.target: str(mount.source) for mount in mounts}
    env = {}
    if "/etc/hami" in sources:
        env["HAMI_LIMITS_DIR"] = sources["/etc/hami"]
    if "/run/hami" in sources:
        env["HAMI_REGION_DIR"] = sources["/run/hami"]
        env["CUDA_DEVICE_MEMORY_SHARED_CACHE"] = f"{sources['/run/hami']}/region"
    if _PRELOAD in sources:
        preloaded = Path(sources[_PRELOAD]).read_text(encoding="utf-8").split()
        env["LD_PRELOAD"] = ":".join(sources.get(path, path) for path in preloaded)
    return env


async def _spawn(spec: Path, container: Container) -> str:
    reading, writing = os.pipe()
    try:
        try:
            container.shim_pid = os.posix_spawn(
                launcher(),
                ["simrun", str(spec), "3"],
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, writing, 3)],
            )
        finally:
            os.close(writing)
        told = b""
        with anyio.move_on_after(_START_S, shield=True):
            while True:
                await anyio.wait_readable(reading)
                piece = os.read(reading, 4096)
                if not piece:
                    return told.decode(errors="replace").rstrip("\n")
                told += piece
    finally:
        os.close(reading)
    os.kill(container.shim_pid, signal.SIGKILL)
    return f"error the launcher gave no answer in {_START_S:g} s"


def _signal(container: Container, number: signal.Signals) -> None:
    if container.shim_pid and container.ended is None:
        try:
            os.kill(container.shim_pid, number)
        except ProcessLookupError:
            _LOG.debug("container had ended", extra={"pid": container.shim_pid})


def _reap(pid: int) -> None:
    """Collect a child; a shim that an earlier kubelet started is not ours to collect."""
    if pid:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            return


def _start_of(pid: int) -> int | None:
    """Start time of a living process in ticks; None when there is none, or only its remains."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _spec_of(pid: int) -> Path | None:
    """The specification a launcher runs; None when the process is none, or is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Path(os.fsdecode(words[1])) if len(words) > 1 and words[0] == b"simrun" else None


def shims_below(directory: Path) -> list[int]:
    """Find every living launcher process whose specification lies below a directory."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (spec := _spec_of(pid)) and spec.is_relative_to(directory)]


def _base_words(host_paths: Sequence[str]) -> list[str]:
    """Word the small root that every container has."""
    words: list[str] = []
    for name in _TOP:
        words += root_entry(Path("/") / name)
    for name in _ETC:
        path = Path("/etc") / name
        if path.exists():
            words += ["bind", str(path), str(path), "r"]
    words += ["proc", "/proc"]
    for path_text in _MASKED:
        words += ["mask", path_text]
    if Path("/sys").exists():
        words += ["bind", "/sys", "/sys", "rR"]
    words += ["tmpfs", "/dev", "mode=755,size=64k"]
    for name in _DEV:
        if Path("/dev", name).exists():
            words += ["bind", f"/dev/{name}", f"/dev/{name}", ""]
    for name, target in _DEV_LINKS:
        words += ["link", target, f"/dev/{name}"]
    for name, size in _SCRATCH:
        words += ["tmpfs", name, f"mode=1777,size={size}"]
    for name, mode in (("/run", "755"), ("/root", "700")):
        words += ["mkdir", name, mode]
    words += ["link", "/run", "/var/run"]
    for path_text in host_paths:
        words += ["bind", path_text, path_text, "rR"]
    return words
