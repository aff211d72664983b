# SPDX-License-Identifier: Apache-2.0
"""Reports what this machine lacks for a real node, and skips, or fails where one is required."""

import os
import shutil

import pytest

from hami_sim.kubernetes import Programs
from hami_sim.kubernetes.programs import ALL
from tests.cluster import build
from tests.cluster.needs import control_plane_or_skip, is_required
from tests.cluster.node.containerd import find_network_plugins
from tests.cluster.node.image import find_busybox
from tests.cluster.node.space import CGROUPS

PROGRAMS = ("runc", "unshare", "nsenter", "ip")
INSTALL = "apt-get install runc containernetworking-plugins busybox-static iproute2 util-linux"


def lacking() -> str:
    """The reason why no real node can run here; empty when it can."""
    if os.geteuid() != 0:
        return "a real node needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if find_network_plugins() is None:
        missing.append("CNI plugins")
    if find_busybox() is None:
        missing.append("static busybox")
    if missing:
        return f"a real node needs {', '.join(missing)} ({INSTALL})"
    if not os.access(CGROUPS, os.W_OK):
        return "a real node needs writable cgroups"
    if build.find_containerd() is None:
        return "a real node needs containerd; ./dev cluster build makes it"
    return ""


def programs_or_skip() -> Programs:
    """Kubernetes' programs, on a machine that can run a node; skips with the reason otherwise.

    Where a control plane is required, so is a node: then it fails instead.
    """
    programs = control_plane_or_skip()
    reason = lacking()
    if not reason and (missing := programs.missing(ALL)):
        reason = f"{programs.directory} lacks {', '.join(missing)}"
    if reason and is_required():
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)
    return programs
