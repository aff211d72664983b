# SPDX-License-Identifier: Apache-2.0
"""Finds the programs of Kubernetes and etcd in one directory and reads their versions.

The directory is named by ``KUBEBUILDER_ASSETS``, as for other tools that test on a control plane.
This module does not create it.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Final, Self

from hami_common.errors import Unavailable

VARIABLE: Final = "KUBEBUILDER_ASSETS"
ETCD: Final = "etcd"
APISERVER: Final = "kube-apiserver"
CONTROLLERS: Final = "kube-controller-manager"
SCHEDULER: Final = "kube-scheduler"
KUBECTL: Final = "kubectl"
KUBELET: Final = "kubelet"
PROXY: Final = "kube-proxy"
CONTROL_PLANE: Final = (ETCD, APISERVER, CONTROLLERS, SCHEDULER, KUBECTL)
ALL: Final = (*CONTROL_PLANE, KUBELET, PROXY)
VERSION_S: Final = 60.0
_NUMBER = re.compile(r"v?\d+\.\d+\.\d+[\w.+-]*")


class ProgramsMissing(Unavailable):
    """No directory is named, or programs are missing from it."""


class Programs:
    """One directory of programs."""

    def __init__(self, directory: Path) -> None:
        """Look into ``directory`` when asked."""
        self.directory = directory

    @classmethod
    def from_environment(cls) -> Self:
        """The directory named by ``KUBEBUILDER_ASSETS``, with all of the control plane in it."""
        named = os.environ.get(VARIABLE, "")
        if not named:
            raise ProgramsMissing(
                peer="Kubernetes",
                detail=f"{VARIABLE} names no directory of programs; ./dev cluster build makes one",
            )
        programs = cls(Path(named))
        missing = programs.missing(CONTROL_PLANE)
        if missing:
            raise ProgramsMissing(
                peer="Kubernetes", detail=f"{named} ({VARIABLE}) lacks {', '.join(missing)}"
            )
        return programs

    def missing(self, names: tuple[str, ...] = ALL) -> list[str]:
        """Return the names of the missing programs."""
        return [name for name in names if not os.access(self.directory / name, os.X_OK)]

    def path(self, name: str) -> str:
        """Path of a program; ``ProgramsMissing`` when it is not there."""
        if self.missing((name,)):
            raise ProgramsMissing(peer="Kubernetes", detail=f"{self.directory} lacks {name}")
        return str(self.directory / name)

    def version(self, name: str) -> str:
        """Return the version that a program reports; empty if it reports none."""
        arguments = ["version", "--client"] if name == KUBECTL else ["--version"]
        told = subprocess.run(
            [self.path(name), *arguments],
            capture_output=True,
            text=True,
            timeout=VERSION_S,
            check=False,
        )
        found = _NUMBER.search(told.stdout + told.stderr)
        return found[0] if found else ""

    def versions(self) -> dict[str, str]:
        """Versions of all programs that are there."""
        return {name: self.version(name) for name in ALL if not self.missing((name,))}
