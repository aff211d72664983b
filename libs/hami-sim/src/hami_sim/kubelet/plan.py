# SPDX-License-Identifier: Apache-2.0
"""Parameters with which a container starts. Paths of the host are Paths, paths inside are text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct


class Mount(Struct, frozen=True, kw_only=True):
    """One path of the host shown in a container."""

    source: Path
    target: str
    is_readonly: bool = False


class Plan(Struct, frozen=True, kw_only=True):
    """Everything needed to start one container."""

    uid: str
    namespace: str
    pod: str
    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    mounts: Sequence[Mount] = ()
    devices: Sequence[tuple[str, str, str]] = ()
    """(container path, host path, permissions)."""
    cwd: str = "/"
    hostname: str = ""
    user: int = 0
    group: int = 0
    groups: Sequence[int] = ()
    is_privileged: bool = False
    shares_pids: bool = False
