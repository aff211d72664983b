# SPDX-License-Identifier: Apache-2.0
"""Lists the Kubernetes releases that the tests run on; everything else derives from this list.

A release is a folder of ``programs/kubernetes`` with the requirements of its build, which also name
its exact version. To add one, add that folder and a line here, and run ``./dev gen``. Printed by
``python -m tests.cluster.releases``; needs only the standard library.
"""

import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

PROGRAMS: Final = Path(__file__).resolve().parent / "programs"


class Role(StrEnum):
    """Tests that continuous integration runs on a release."""

    EVERYTHING = "everything"
    """All tests that use a real control plane."""
    DEVICE_PLUGIN = "device-plugin mode"
    """``DEVICE_PLUGIN_TESTS``."""
    CLAIMS = "claims, on request"
    """None: a developer runs the tests of docs/dra.md on it before a release."""


DEVICE_PLUGIN_TESTS: Final = (
    "tests/contract/kubeapi/test_real.py",
    "tests/contract/kubelet/test_real.py",
    "tests/contract/kubescheduler/test_real.py",
    "tests/e2e/test_deploy.py",
    "tests/e2e/test_life.py",
    "tests/e2e/test_pending_causes.py",
    "tests/e2e/test_real_node.py",
)
"""Parts that a release can break: the contracts with API server, kube-scheduler and kubelet,
admission of the manifests, one pod's life, reasons of pending pods, identity on a real node."""


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
    Release(name="1.36", role=Role.CLAIMS),
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


def main() -> int:
    """Print the releases, one per line; the exit code."""
    for release in RELEASES:
        print(f"{release.version} (etcd {release.etcd_version}): {release.role}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
