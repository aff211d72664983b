# SPDX-License-Identifier: Apache-2.0
"""Builds the test programs for the accounting of libvgpu, and drives the probe process.

Built once per content into ``build/native-tests``. Sizes in bytes.
"""

import hashlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native/libvgpu"
OUT = ROOT / "build/native-tests"
PARTS = (
    *("platform", "process", "region", "account_lease", "slot"),
    *("limits", "fork", "watch", "room", "account"),
)
FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-g", "-fno-strict-aliasing", "-pthread"),
    *("-Wall", "-Wextra", "-Werror", "-Wstrict-prototypes", "-Wconversion"),
)
PLAIN = ("-O2",)
ADDRESS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
THREAD = ("-O1", "-fsanitize=thread")
STEPS = ("-O2", "-DVGPU_STEPS", "-DLIMITS_ORDINALS=2u")
RELATIVE = ("-O1", '-DVGPU_ROOT="."', "-DLIMITS_ORDINALS=2u")
EXPLORED = ("-O2", "-DVGPU_STEPS", "-DFOREIGN_AT_ONCE=1u", "-fno-stack-protector")
ANSWER_S = 20
RUN_S = 55


def build(program: str, flags: Sequence[str] = PLAIN, parts: Sequence[str] = PARTS) -> Path:
    """The program of this source (below tests/, without suffix), linked with these parts."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    sources = [NATIVE / f"tests/{program}.c", *(NATIVE / f"src/{part}.c" for part in parts)]
    command = [*compiler, *FLAGS, *flags, "-I", str(NATIVE / "src"), *map(str, sources)]
    digest = hashlib.sha256(shlex.join(command).encode())
    headers = [NATIVE / f"src/{part}.h" for part in {*PARTS, *parts, "atomic", "account_fast"}]
    for path in (*sources, *sorted(headers), NATIVE / "tests/unit/check.h"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    target = OUT / f"{Path(program).name}-{digest.hexdigest()[:16]}"
    if not target.exists():
        OUT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=OUT) as scratch:
            fresh = Path(scratch) / "program"
            subprocess.run([*command, "-o", str(fresh)], check=True)
            fresh.replace(target)
    return target


def run(program: Path, *words: str, env: Mapping[str, str] | None = None) -> str:
    """Return the standard output of a program that must succeed; the error shows all its output."""
    done = subprocess.run(
        [program, *words],
        env={"PATH": os.environ["PATH"], "TSAN_OPTIONS": "halt_on_error=1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def until(holds: Callable[[], object], what: str) -> None:
    """Wait for a condition that another process brings about."""
    deadline = time.monotonic() + ANSWER_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {ANSWER_S} s: {what}"
        time.sleep(0.02)


def limits_text(*devices: tuple[str, int], core_pct: int = 0, priority: int | None = None) -> str:
    """A limits file for devices given as (UUID, MiB)."""
    lines = ["hami-limits/1", "container=main", "allocation=a"]
    if priority is not None:
        lines.append(f"priority={priority}")
    lines.append(f"devices={len(devices)}")
    for number, (uuid, memory_mib) in enumerate(devices):
        lines += [
            f"device.{number}.vendor=nvidia",
            f"device.{number}.uuid={uuid}",
            f"device.{number}.memory_mib={memory_mib}",
            f"device.{number}.core_pct={core_pct}",
            f"device.{number}.exclusive=0",
        ]
    return "\n".join([*lines, ""])


class Container:
    """A directory in which probes find limits and region as a container's processes would."""

    def __init__(self, root: Path) -> None:
        """With a region directory and, so far, no limits."""
        self.root = root
        self.limits = root / "etc/hami/limits"
        self.region = root / "run/hami/region-1"
        self.region.parent.mkdir(parents=True)
        self.bells = root / "run/hami-priority/bells"

    def write_limits(self, text: str) -> None:
        """Swap the file as kubelet does: a new directory behind a link."""
        directory = self.limits.parent
        directory.mkdir(parents=True, exist_ok=True)
        version = Path(tempfile.mkdtemp(prefix="..", dir=directory))
        (version / "limits").write_text(text)
        fresh = directory / "..fresh"
        fresh.symlink_to(version.name)
        fresh.replace(directory / "..data")
        if not self.limits.is_symlink():
            self.limits.symlink_to("..data/limits")

    def probe(self, *, env: Mapping[str, str] | None = None, before: Sequence[str] = ()) -> "Probe":
        """A process of the container, started by the words ``before`` (for example ``unshare``)."""
        return Probe(self.root, env or {}, before)


class Probe:
    """A process that accounts; tests/unit/probe.c lists its commands."""

    def __init__(self, cwd: Path, env: Mapping[str, str], before: Sequence[str]) -> None:
        """Start it; it has done nothing yet."""
        self.process = subprocess.Popen(
            [*before, str(build("unit/probe", RELATIVE))],
            cwd=cwd,
            env={"PATH": os.environ["PATH"], **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        """Usable as a context, killed at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it if it still runs."""
        self.kill()

    def tell(self, line: str) -> None:
        """Send a line without waiting for an answer."""
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def text(self, line: str) -> str:
        """Answer to one line."""
        self.tell(line)
        return self.line()

    def line(self) -> str:
        """Return the next line of its output."""
        assert self.process.stdout
        return self.process.stdout.readline().rstrip("\n")

    def ask(self, line: str) -> int:
        """Answer to one line, a number."""
        return int(self.text(line))

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()
        self.process.wait(ANSWER_S)
        if self.process.stderr:
            self.process.stderr.close()

    def end(self) -> str:
        """Let it end by itself; return its standard error."""
        _, said = self.process.communicate(timeout=ANSWER_S)
        return said
