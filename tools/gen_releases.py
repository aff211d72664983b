# SPDX-License-Identifier: Apache-2.0
"""Writes the table of tested releases in docs/install.md from ``tests.cluster``.

The table stands between the markers ``generated: tested releases`` and ``end of generated part``.
``--check`` only compares.
"""

import sys
from pathlib import Path

from tests.cluster import build
from tests.cluster.releases import RELEASES, Role

PAGE = Path(__file__).resolve().parent.parent / "docs" / "install.md"
BEGIN, END = "<!-- generated: tested releases -->", "<!-- end of generated part -->"
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


def page(text: str) -> str:
    """The page with a fresh table."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        message = f"docs/install.md lacks the markers {BEGIN} and {END}"
        raise ValueError(message)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    wanted = page(text)
    if "--check" in sys.argv[1:]:
        return 0 if wanted == text else 1
    if wanted != text:
        PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
