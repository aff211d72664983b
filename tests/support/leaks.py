# SPDX-License-Identifier: Apache-2.0
"""Reports resources that a test leaks in its own process: file descriptors, threads, child
processes.

Compares two snapshots of names. Names, not numbers, because a failure must name the resource to
close: the peer of a socket, the path of a file, the command of a process. Resources that end by
themselves within the grace time are no leak.
"""

import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil

GRACE_S = 15.0
_POLL_S = 0.02
KIND = {"descriptors": "descriptor", "threads": "thread", "children": "child"}


class Held(NamedTuple):
    """Open resources of the process, as names; a name open twice counts twice."""

    descriptors: Counter[str]
    threads: Counter[str]
    children: Counter[str]


def snapshot() -> Held:
    """Return the open resources of this process."""
    return Held(
        descriptors=Counter(_descriptors()),
        threads=Counter(thread.name for thread in threading.enumerate()),
        children=Counter(_children()),
    )


def leaks_since(before: Held) -> list[str]:
    """Return one line per resource that is open now but was not before, after the grace time."""
    deadline = time.monotonic() + GRACE_S
    while True:
        gc.collect()
        left = _more(before, snapshot())
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_S)


def _more(before: Held, after: Held) -> list[str]:
    return [
        f"{KIND[kind]}: {name}" + (f" ({count} times)" if count > 1 else "")
        for kind, old, new in zip(Held._fields, before, after, strict=True)
        for name, count in sorted((new - old).items())
    ]


def _descriptors() -> list[str]:
    sockets = _socket_names()
    names = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = str(Path(entry.path).readlink())
        except FileNotFoundError:
            continue  # the descriptor of this very scan
        if target != f"/proc/{os.getpid()}/fd":
            names.append(f"{sockets.get(target, target)} (fd {entry.name})")
    return names


def _socket_names() -> dict[str, str]:
    """``socket:[inode]`` → local and remote address, or path."""
    names = {}
    for table in ("tcp", "tcp6", "udp"):
        for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            local, remote = (_port(fields[index]) for index in (1, 2))
            names[f"socket:[{fields[9]}]"] = f"{table} socket, port {local} to port {remote}"
    for line in Path("/proc/self/net/unix").read_text(encoding="utf-8").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        path = fields[7] if len(fields) > 7 else "no path"
        names[f"socket:[{fields[6]}]"] = f"unix socket, {path}"
    return names


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _children() -> list[str]:
    names = []
    for child in psutil.Process().children(recursive=True):
        try:
            state = " (zombie)" if child.status() == psutil.STATUS_ZOMBIE else ""
            names.append(f"{' '.join(child.cmdline()) or child.name()}, pid {child.pid}{state}")
        except psutil.NoSuchProcess:
            continue
    return names
