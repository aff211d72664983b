# SPDX-License-Identifier: Apache-2.0
"""Plays the vendor's container toolkit: gives containers the driver of the (fake) machine.

A container whose environment names devices (``NVIDIA_VISIBLE_DEVICES``) gets the driver's libraries
and programs where NVIDIA's images look for them, and a view of the machine with just those devices:
a state file of its own beside the machine's, which shares its memory and time (the format is that
of native/libvgpu/tests/fakedrv/state.h). Others get nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import Unavailable
from hami_sim.hardware.fake_nvml import STATE_VARIABLE
from hami_sim.kubelet.plan import Mount, Plan

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
LIBRARIES = "/usr/local/nvidia/lib64"
PROGRAMS = "/usr/local/nvidia/bin"
_NOTHING = frozenset({"", "void", "none"})
_OF_THE_MACHINE = ("pair", "fault", "event")
"""Keys that name devices by position, which is another one in a container."""
_OPEN = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).cuInit(0))"


class DriverFiles(Struct, frozen=True, kw_only=True):
    """Paths of the fake driver on the host."""

    libraries: str
    """Directory with ``libcuda.so.1`` and ``libnvidia-ml.so.1``."""
    state: str
    """State file of the machine, in a directory of its own; ``{node}`` stands for the node."""
    programs: str = ""
    """Directory of programs that come with the driver; empty: none."""


class Toolkit:
    """The toolkit of one node."""

    def __init__(self, node: str, files: DriverFiles) -> None:
        self._libraries = Path(files.libraries)
        self._programs = Path(files.programs) if files.programs else None
        self._state = Path(files.state.replace("{node}", node))
        self._is_open = False

    def equip(self, plan: Plan, *, mounts: bool) -> Plan:
        """The plan with what its devices need; without ``mounts`` the host's paths are named."""
        asked = plan.env.get(VISIBLE, "")
        if asked in _NOTHING:
            return plan
        self._open()
        own = self._state.with_name(f"{plan.uid}.{plan.name}")
        visible = None if asked == "all" else frozenset(asked.split(","))
        instances = instances_of(self._instances_text(), visible)
        cards = visible and visible | {line.split()[1] for line in instances.splitlines()}
        own.write_text(view_of(self._state.read_text(encoding="ascii"), cards), encoding="ascii")
        own.with_name(f"{own.name}.mig").write_text(instances, encoding="ascii")
        for suffix in (".card", ".live"):
            link = own.with_name(f"{own.name}{suffix}")
            if not link.is_symlink():
                link.symlink_to(f"{self._state.name}{suffix}")
        shown = [(self._libraries, LIBRARIES)]
        if self._programs is not None:
            shown.append((self._programs, PROGRAMS))
        libraries, programs = (LIBRARIES, PROGRAMS) if mounts else map(str, self._host_paths())
        env = {
            **plan.env,
            STATE_VARIABLE: str(own),
            "LD_LIBRARY_PATH": f"{libraries}:{plan.env.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
            "PATH": f"{plan.env.get('PATH', os.defpath)}:{programs}",
        }
        if not mounts:
            return replace(plan, env=env)
        given = [Mount(source=source, target=target, is_readonly=True) for source, target in shown]
        machine = Mount(source=self._state.parent, target=str(self._state.parent))
        return replace(plan, env=env, mounts=[*plan.mounts, machine, *given])

    def forget(self, uid: str) -> None:
        """Remove what was made for a pod."""
        for path in self._state.parent.glob(f"{uid}.*"):
            path.unlink(missing_ok=True)

    def _instances_text(self) -> str:
        try:
            return self._state.with_name(f"{self._state.name}.mig").read_text(encoding="ascii")
        except FileNotFoundError:
            return ""

    def _host_paths(self) -> tuple[Path, Path]:
        return self._libraries, self._programs or self._libraries

    def _open(self) -> None:
        """Make the memory that all processes of the machine share, from the host's side."""
        if self._is_open:
            return
        opened = subprocess.run(
            [sys.executable, "-c", _OPEN, str(self._libraries / "libcuda.so.1")],
            env={**os.environ, STATE_VARIABLE: str(self._state)},
            capture_output=True,
            text=True,
            check=False,
        )
        if opened.returncode != 0:
            raise Unavailable(
                peer="fake driver", detail=f"code {opened.returncode} {opened.stderr.strip()}"
            )
        self._is_open = True


def instances_of(text: str, uuids: Collection[str] | None) -> str:
    """The MIG instances among ``uuids`` (``None``: all), in the form of native fakedrv/state.h."""
    if uuids is None:
        return text
    lines = [line.split() for line in text.splitlines()]
    named = [words for words in lines if words[0] == "ci" and words[5] in uuids]
    places = {(words[1], words[2]) for words in named}
    homes = [words for words in lines if words[0] == "gi" and (words[1], words[2]) in places]
    return "".join(f"{' '.join(words)}\n" for words in (*homes, *named))


def view_of(state: str, uuids: Collection[str] | None) -> str:
    """Return the state of a machine with only these devices (``None``: all), renumbered from 0."""
    head, *blocks = state.split("\n[gpu ")
    if uuids is None:
        return state
    kept = [
        block.partition("]")[2]
        for block in blocks
        if any(f"uuid = {uuid}" in block.splitlines() for uuid in uuids)
    ]
    lines = [
        line for line in head.splitlines() if line.partition("=")[0].strip() not in _OF_THE_MACHINE
    ]
    return "\n".join(
        [*lines, *(f"[gpu {number}]{block.rstrip()}" for number, block in enumerate(kept)), ""]
    )
