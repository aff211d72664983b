# SPDX-License-Identifier: Apache-2.0
"""Writes the table of tested releases in docs/install.md from ``tests.cluster``."""

import sys

from tests.cluster import build
from tests.cluster.releases import RELEASES, Role
from tools.generated import DOCS, write_parts

TESTED = {
    Role.EVERYTHING: "all tests",
    Role.CLAIMS: "[claims](dra.md#acceptance), on request",
    Role.DEVICE_PLUGIN: "device plugin, admission, scheduling, life of a pod on a real node",
}


def table() -> str:
    """One row per release."""
    runtime = build.containerd_version()
    rows = ["| Kubernetes | etcd | containerd | tested |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {release.version} | {release.etcd_version} | {runtime} | {TESTED[release.role]} |"
        for release in reversed(RELEASES)
    ]
    return "\n".join(rows)


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    return write_parts(DOCS / "install.md", {"tested releases": table()})


if __name__ == "__main__":
    sys.exit(main())
