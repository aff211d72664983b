# SPDX-License-Identifier: Apache-2.0
"""Owners of processes, read from a host's /proc."""

import os
from pathlib import Path

from hami_nodeagent.shell.owners import Owner, find_owners
from tests.unit.nodeagent.core.test_cgroups import CONTAINER, OTHER, UID

IDS = {f"containerd://{CONTAINER}": (UID, "main"), "containerd://aa": ("other-uid", "x")}


def process(proc: Path, pid: int, cgroup: str, comm: str = "train", namespace: str = "1") -> None:
    directory = proc / str(pid)
    (directory / "ns").mkdir(parents=True)
    (directory / "cgroup").write_text(cgroup)
    (directory / "comm").write_text(f"{comm}\n")
    (directory / "ns" / "pid").symlink_to(f"pid:[{namespace}]")


def test_container_is_found_by_its_id_within_its_pod(tmp_path: Path) -> None:
    process(tmp_path, 1, f"0::/kubepods/pod{UID}/{CONTAINER}")
    process(tmp_path, 2, f"0::/kubepods/pod{UID}/{OTHER}")
    process(tmp_path, 3, "0::/system.slice/x.service", comm="mi\x1bner")
    found = find_owners(tmp_path, [1, 2, 3, 4], IDS, by="cgroup")
    assert found == {
        1: Owner(command="train", pod_uid=UID, container="main"),
        2: Owner(command="train", pod_uid=UID),
        3: Owner(command="mi?ner"),
    }


def test_id_of_another_pod_is_rejected(tmp_path: Path) -> None:
    process(tmp_path, 1, f"0::/kubepods/pod{UID}/{CONTAINER}")
    ids = {f"containerd://{CONTAINER}": ("other-uid", "main")}
    found = find_owners(tmp_path, [1], ids, by="cgroup")
    assert found == {1: Owner(command="train", pod_uid=UID)}


def test_namespace_identifies_the_container_where_the_id_is_a_pid(tmp_path: Path) -> None:
    process(tmp_path, 10, "0::/", namespace="77")
    process(tmp_path, 11, "0::/", namespace="77", comm="child")
    process(tmp_path, 12, "0::/", namespace="1")
    ids = {"sim://10": ("uid", "main"), "sim://99": ("gone", "main"), "sim://": ("bad", "id")}
    found = find_owners(tmp_path, [10, 11, 12], ids, by="namespace")
    assert [(one.pod_uid, one.container) for one in found.values()] == [
        ("uid", "main"),
        ("uid", "main"),
        ("", ""),
    ]


def test_this_process_is_one_of_the_host() -> None:
    (owner,) = find_owners(Path("/proc"), [os.getpid()], {}, by="cgroup").values()
    assert owner.container == ""
    assert owner.command
