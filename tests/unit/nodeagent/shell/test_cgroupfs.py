# SPDX-License-Identifier: Apache-2.0
"""Cgroups of containers in each layout of kubelet and runtime."""

import os
from pathlib import Path

import pytest

from hami_nodeagent.shell.cgroupfs import groups_of, own_group
from tests.unit.nodeagent.core.test_cgroups import CONTAINER, OTHER, PATHS

LAYOUTS = [form for form in PATHS if not form.startswith(("seen", "a group"))]


def make(root: Path, path: str, *pids: int) -> Path:
    group = root / path.lstrip("/")
    group.mkdir(parents=True, exist_ok=True)
    (group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return group


@pytest.mark.parametrize("form", LAYOUTS)
def test_group_is_found_by_the_containers_id(tmp_path: Path, form: str) -> None:
    make(tmp_path, "/system.slice/kubelet.service")
    group = make(tmp_path, PATHS[form])
    assert groups_of(tmp_path, {CONTAINER, OTHER}) == {CONTAINER: group}
    assert groups_of(tmp_path, {OTHER}) == {}


def test_processes_of_crun_are_in_the_group_below(tmp_path: Path) -> None:
    outer = make(tmp_path, PATHS["systemd, guaranteed, cri-o"])
    inner = make(outer, "container")
    assert groups_of(tmp_path, {CONTAINER}) == {CONTAINER: inner}


def test_groups_that_a_tenant_made_do_not_count(tmp_path: Path) -> None:
    make(tmp_path, PATHS["a group made inside the container"])
    assert groups_of(tmp_path, {OTHER}) == {}


def test_own_group_is_found_by_path_or_by_pid(tmp_path: Path) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    assert own_group(root, proc) is None
    group = make(root, PATHS["systemd, containerd"], 1, os.getpid())
    make(root, PATHS["systemd, docker"].replace(CONTAINER, OTHER), 2)
    (proc / "self/cgroup").write_text("0::/\n")
    assert own_group(root, proc) == group, "the agent has a cgroup namespace of its own"
    service = make(root, "/system.slice/agent.service", os.getpid())
    (proc / "self/cgroup").write_text("1:name=x:/y\n0::/system.slice/agent.service\n")
    assert own_group(root, proc) == service
