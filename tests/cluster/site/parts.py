# SPDX-License-Identifier: Apache-2.0
"""Finds the programs of a site and says what this machine lacks for one.

Programs come from Go modules (``tests.cluster.build``), tools from Debian packages.
"""

import shutil
from pathlib import Path

import pytest
from msgspec import Struct

from tests.cluster import build
from tests.cluster.needs import is_required
from tests.cluster.node.needs import lacking

TOOLS = ("nft", "iptables", "buildah", "mmdebstrap")
INSTALL = "apt-get install nftables iptables buildah mmdebstrap"


class Parts(Struct, frozen=True, kw_only=True):
    """Directories of programs."""

    kubernetes: Path
    coredns: Path


def built(release: str | None = None) -> Parts:
    """The programs, with the newest Kubernetes or ``release``, after building what is missing.

    The node's containerd is built too.
    """
    build.containerd()
    return Parts(kubernetes=build.build(release), coredns=build.coredns())


def found() -> Parts | None:
    """The programs, if they need no building."""
    kubernetes, coredns = build.find(), build.find_coredns()
    if kubernetes is None or coredns is None or build.find_containerd() is None:
        return None
    return Parts(kubernetes=kubernetes, coredns=coredns)


def parts_or_skip() -> Parts:
    """Programs of a site, on a machine that can run one; skips with the reason otherwise.

    Where a control plane is required, so is a site: programs are built, and a missing tool fails.
    """
    missing = [name for name in TOOLS if shutil.which(name) is None]
    parts = None
    if missing:
        reason = f"a site needs {', '.join(missing)} ({INSTALL})"
    else:
        parts = built() if is_required() else found()
        reason = "" if parts else "programs of a site are not built; ./dev cluster build makes them"
    reason = reason or lacking()
    if reason and is_required():
        pytest.fail(reason, pytrace=False)
    if reason or parts is None:
        pytest.skip(reason)
    return parts
