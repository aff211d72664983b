# SPDX-License-Identifier: Apache-2.0
"""Pod and container of a process, from every form in which hosts write its cgroup."""

import random

import pytest

from hami_nodeagent.core.cgroups import CgroupOwner, owner_of

UID = "0f3b9c1a-6d2e-4a57-9a55-0c1d2e3f4a5b"
SYSTEMD_UID = UID.replace("-", "_")
CONTAINER = "3f" * 32
OTHER = "7a" * 32

PATHS = {
    "systemd, containerd": (
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_UID}.slice"
        f"/cri-containerd-{CONTAINER}.scope"
    ),
    "systemd, guaranteed, cri-o": (
        f"/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/crio-{CONTAINER}.scope"
    ),
    "systemd, docker": (
        f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD_UID}.slice"
        f"/docker-{CONTAINER}.scope"
    ),
    "cgroupfs": f"/kubepods/burstable/pod{UID}/{CONTAINER}",
    "kubelet with a root of its own": (
        f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SYSTEMD_UID}.slice"
        f"/cri-containerd-{CONTAINER}.scope"
    ),
    "seen from a cgroup namespace": (
        f"/../../kubepods-burstable-pod{SYSTEMD_UID}.slice/cri-containerd-{CONTAINER}.scope"
    ),
    "a group made inside the container": (
        f"/kubepods/pod{UID}/{CONTAINER}/kubepods/pod{UID.replace('0f', 'ff')}/{OTHER}"
    ),
}


@pytest.mark.parametrize("form", PATHS)
def test_owner_is_read_from_version_2(form: str) -> None:
    expected = CgroupOwner(pod_uid=UID, container_id=CONTAINER)
    assert owner_of(f"0::{PATHS[form]}\n") == expected


@pytest.mark.parametrize("form", PATHS)
def test_owner_is_read_from_version_1(form: str) -> None:
    text = f"12:devices:{PATHS[form]}\n11:cpu,cpuacct:{PATHS[form]}\n1:name=systemd:/\n0::/\n"
    assert owner_of(text) == CgroupOwner(pod_uid=UID, container_id=CONTAINER)


def test_static_pods_have_a_hash_for_a_uid() -> None:
    uid = "ab" * 16
    found = owner_of(f"0::/kubepods/besteffort/pod{uid}/{CONTAINER}")
    assert found == CgroupOwner(pod_uid=uid, container_id=CONTAINER)


def test_process_in_the_pods_own_group_has_no_container() -> None:
    assert owner_of(f"0::/kubepods/pod{UID}") == CgroupOwner(pod_uid=UID)
    assert owner_of(f"0::/kubepods/pod{UID}/pause") == CgroupOwner(pod_uid=UID)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0::/",
        "0::/system.slice/nvidia-persistenced.service",
        "0::/user.slice/user-0.slice/session-1.scope",
        f"0::/system.slice/docker-{CONTAINER}.scope",
        "0::/kubepods/burstable",
        f"0::/kubepods/podcast/{CONTAINER}",
        f"no colons /kubepods/pod{UID}",
    ],
)
def test_processes_of_the_host_have_no_pod(text: str) -> None:
    assert owner_of(text) is None


def test_no_text_raises() -> None:
    chance = random.Random(7)
    alphabet = ["0:", ":", "/", "pod", UID, SYSTEMD_UID, ".slice", CONTAINER, "\0", "é", "..", "\n"]
    for _ in range(5_000):
        owner_of("".join(chance.choices(alphabet, k=chance.randint(0, 12))))
