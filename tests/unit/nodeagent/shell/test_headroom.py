# SPDX-License-Identifier: Apache-2.0
"""Memory that a container may still use, by the files of both versions of cgroups."""

from pathlib import Path

import pytest

from hami_nodeagent.shell.headroom import Headroom, HostMemory

MIB = 1 << 20
POD, SCOPE = "kubepods.slice/kubepods-pod1.slice", "cri-containerd-1.scope"
OWN = f"{POD}/{SCOPE}"


class Host:
    """Files below a directory that stand for those of a host."""

    def __init__(self, directory: Path) -> None:
        self.proc, self.root = directory / "proc", directory / "root"
        self.headroom = Headroom(self.proc, self.root)

    def process(self, pid: int, text: str) -> None:
        (self.proc / str(pid)).mkdir(parents=True)
        (self.proc / str(pid) / "cgroup").write_text(text)

    def group(self, path: str, **files: str) -> None:
        directory = self.root / "sys/fs/cgroup" / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name.replace("__", ".")).write_text(text)

    def group_v2(self, path: str, limit: str, used_mib: int, inactive_mib: int = 0) -> None:
        self.group(
            path,
            memory__max=f"{limit}\n",
            memory__current=f"{used_mib * MIB}\n",
            memory__stat=f"anon 1\ninactive_file {inactive_mib * MIB}\n",
        )


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path)
    made.group("")
    return made


def test_tightest_limit_above_the_process_counts(host: Host) -> None:
    host.process(7, f"0::/{OWN}\n")
    host.group_v2("kubepods.slice", "max", 9000)
    host.group_v2(POD, str(1000 * MIB), 700)
    host.group_v2(OWN, str(900 * MIB), 500, inactive_mib=100)
    assert host.headroom.of(7) == HostMemory(headroom_mib=300)


def test_container_without_a_limit_has_none(host: Host) -> None:
    host.process(7, f"0::/{OWN}\n")
    for path in ("kubepods.slice", POD, OWN):
        host.group_v2(path, "max", 100)
    assert host.headroom.of(7) == HostMemory(headroom_mib=None)


def test_container_beyond_its_limit_has_nothing_left(host: Host) -> None:
    host.process(7, f"0::/{OWN}\n")
    host.group_v2(OWN, str(100 * MIB), 120)
    assert host.headroom.of(7).headroom_mib == 0


def test_group_is_found_by_name_from_another_cgroup_namespace(host: Host) -> None:
    host.process(7, f"0::/../../kubepods-pod1.slice/{SCOPE}\n")
    host.group_v2(OWN, str(200 * MIB), 50)
    host.group_v2("kubepods.slice/other.slice/cri-containerd-2.scope", str(20 * MIB), 5)
    assert host.headroom.of(7).headroom_mib == 150


def test_version_one_has_its_own_names(host: Host) -> None:
    host.process(7, "12:cpu:/x\n4:memory:/kubepods/pod1/1\n0::/\n")
    host.group(
        "memory/kubepods/pod1",
        memory__limit_in_bytes="9223372036854771712\n",
        memory__usage_in_bytes="5\n",
        memory__stat="total_inactive_file 0\n",
    )
    host.group(
        "memory/kubepods/pod1/1",
        memory__limit_in_bytes=f"{100 * MIB}\n",
        memory__usage_in_bytes=f"{80 * MIB}\n",
        memory__stat=f"inactive_file {MIB}\ntotal_inactive_file {30 * MIB}\n",
    )
    assert host.headroom.of(7).headroom_mib == 50


def test_frozen_container_is_seen(host: Host) -> None:
    host.process(7, f"0::/{OWN}\n")
    host.group(OWN, cgroup__events="populated 1\nfrozen 1\n")
    assert host.headroom.of(7).is_frozen
    host.group(OWN, cgroup__events="populated 1\nfrozen 0\n")
    assert not host.headroom.of(7).is_frozen


@pytest.mark.parametrize("text", ["", "0::/../gone.scope\n", "0::/gone.scope\n", "nonsense\n"])
def test_limit_that_cannot_be_read_is_not_taken_for_none(host: Host, text: str) -> None:
    host.process(7, text)
    assert host.headroom.of(7) == HostMemory(headroom_mib=-1)
    assert host.headroom.of(8) == HostMemory(headroom_mib=-1)
