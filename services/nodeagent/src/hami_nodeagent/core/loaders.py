# SPDX-License-Identifier: Apache-2.0
"""Decides whether the in-container library limits the processes of a container.

A container gets the library by ``/etc/ld.so.preload``, which glibc's dynamic loader reads for every
program. musl's loader does not read it, a loader may fail to load the library, and programs that
are linked statically have no loader. ``/proc/<pid>/maps`` shows what a process has mapped,
whatever the container's files claim (proc_pid_maps(5)). A program that was just started has not
mapped the library yet: only the same process in a later look counts.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

LIBRARY = "libvgpu.so"
Loader = Literal["limiter", "musl", "glibc", "static"]
"""Mapped by a process: the library, or else the loader of a C library, or neither."""

_MUSL = re.compile(r"/(?:ld-musl-\w+\.so\.1|libc\.musl-\w+\.so\.1|libc\.so)$", re.MULTILINE)
"""musl's loader and library are one file; glibc's library is ``libc.so.6`` or ``libc-2.17.so``."""
_GLIBC = re.compile(r"/ld(?:-linux[\w-]*\.so\.\d|64\.so\.\d|-2\.\d+\.so)$", re.MULTILINE)
_LIMITER = re.compile(rf"/{re.escape(LIBRARY)}(?: \(deleted\))?$", re.MULTILINE)

REASON_BY_LOADER: Mapping[Loader, str] = {
    "musl": (
        "its C library is musl, which does not read /etc/ld.so.preload, so the limiter is not "
        "loaded; use an image with glibc 2.17 or newer"
    ),
    "glibc": (
        "its dynamic loader did not load the limiter; use an image with glibc 2.17 or newer, and "
        "look for 'ld.so' in the container's log"
    ),
}


def loader_of(maps: str) -> Loader:
    """Return what a process has mapped, by the text of its ``maps``."""
    if _LIMITER.search(maps):
        return "limiter"
    if _MUSL.search(maps):
        return "musl"
    return "glibc" if _GLIBC.search(maps) else "static"


class Judgment:
    """Judges one container, once."""

    def __init__(self) -> None:
        self.looks = 0
        self.verdict: Loader | None = None
        """``limiter`` if a process has the library; None while unknown."""
        self._before: Mapping[int, Loader] = {}

    def look(self, loaders: Mapping[int, Loader]) -> Loader | None:
        """Take the loaders by pid of one look; return the verdict, None while there is none."""
        self.looks += 1
        if "limiter" in loaders.values():
            self.verdict = "limiter"
        else:
            self.verdict = _first(
                loader
                for pid, loader in sorted(loaders.items())
                if loader in REASON_BY_LOADER and self._before.get(pid) == loader
            )
        self._before = loaders
        return self.verdict


def _first(loaders: Iterable[Loader]) -> Loader | None:
    return next(iter(loaders), None)
