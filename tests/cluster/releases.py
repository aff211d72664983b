# SPDX-License-Identifier: Apache-2.0
"""Lists the Kubernetes releases that the tests run on; everything else derives from this list.

A release is a folder of ``programs/kubernetes`` with the requirements of its build, which also name
its exact version. To add one, add that folder and a line here.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

PROGRAMS: Final = Path(__file__).resolve().parent / "programs"


class Role(StrEnum):
    """Which of the end-to-end tests continuous integration runs on a release."""

    EVERYTHING = "everything"
    DEVICE_PLUGIN = "device-plugin mode"


@dataclass(frozen=True, kw_only=True)
class Release:
    """One minor release of Kubernetes."""

    name: str
    """Minor release, for example ``1.37``."""
    role: Role

    @property
    def requirements(self) -> Path:
        """The go.mod of its build."""
        return PROGRAMS / "kubernetes" / self.name / "go.mod"

    @property
    def version(self) -> str:
        """The exact version, for example ``1.37.2``."""
        return required_version(self.requirements, "k8s.io/kubernetes")

    @property
    def etcd_version(self) -> str:
        """The version of etcd that its control plane runs on."""
        return required_version(self.requirements, "go.etcd.io/etcd/server/v3")


RELEASES: Final = (
    Release(name="1.34", role=Role.DEVICE_PLUGIN),
    Release(name="1.37", role=Role.EVERYTHING),
)
"""Oldest first."""
OLDEST: Final = RELEASES[0]
NEWEST: Final = RELEASES[-1]
NAMES: Final = tuple(release.name for release in RELEASES)


def named(name: str) -> Release:
    """The release of this name; ``ValueError`` if the tests do not cover it."""
    for release in RELEASES:
        if release.name == name:
            return release
    msg = f"Kubernetes {name} is not among the tested releases: {', '.join(NAMES)}"
    raise ValueError(msg)


def required_version(requirements: Path, module: str) -> str:
    """The version of ``module`` that a go.mod requires, without the leading v."""
    text = requirements.read_text(encoding="utf-8")
    found = re.search(rf"^(?:require)?\s+{re.escape(module)} v([\w.+-]+)", text, re.MULTILINE)
    if found is None:
        msg = f"{requirements} requires no {module}"
        raise ValueError(msg)
    return found[1]
