# SPDX-License-Identifier: Apache-2.0
"""Path rules that admission adds (to those of tests/unit/common/pods/test_mounts.py)."""

from typing import Any

import msgspec
import pytest

from hami_common.admission.mounts import PATH_BY_PREFIX, forbidden_mount, mounts_of, volume_name
from hami_common.apipath import is_label
from hami_common.pods.mounts import PARENTS, RESERVED
from hami_common.pods.podview import ContainerView


def denial(path: str, *, asking: tuple[str, ...] = ("main",), **more: Any) -> str:
    mount = {"name": "v", "mountPath": path, **more}
    container = msgspec.convert({"name": "main", "volumeMounts": [mount]}, ContainerView)
    return str(forbidden_mount(container, asking) or "")


def test_path_that_is_not_in_normal_form_is_denied_with_the_fix() -> None:
    assert denial("/data//x") == (
        "container main: volumeMounts[/data//x]: is not in normal form; write /data/x in its place"
    )
    for path in ("data", "/data/./x", "/data//", "//data"):
        assert "is not in normal form; write /data" in denial(path)
    for path in ("/data", "/data/", "/var/run/x", "/var/run/x/", "/...x"):
        assert denial(path) == ""


@pytest.mark.parametrize("path", PARENTS)
def test_directory_above_the_limiter_is_allowed_without_a_share(path: str) -> None:
    assert denial(path)
    assert denial(path, asking=("other",)) == ""


@pytest.mark.parametrize("path", [*RESERVED, "/run/nvidia-container-devices", "/proc/self/root/x"])
def test_reserved_path_is_denied_beside_a_share_too(path: str) -> None:
    assert denial(path, asking=("other",)) == denial(path) != ""


def test_own_mounts_pass_exactly_as_they_are_made() -> None:
    for mount in mounts_of("main"):
        more = {key: value for key, value in mount.items() if key != "mountPath"}
        assert denial(mount["mountPath"], **more) == ""
        assert "webhook adds" in denial(mount["mountPath"], **more, subPath="x")
        assert "webhook adds" in denial(mount["mountPath"], asking=(), **more)


def test_ephemeral_container_is_under_the_limits_of_its_target() -> None:
    limits = mounts_of("main")[0]
    document = {"name": "debug", "targetContainerName": "main", "volumeMounts": [limits]}
    assert forbidden_mount(msgspec.convert(document, ContainerView), ("main",)) is None
    assert forbidden_mount(msgspec.convert(document, ContainerView), ()) is not None


def test_block_device_is_a_mount_as_well() -> None:
    document = {"name": "main", "volumeDevices": [{"name": "v", "devicePath": "/etc//hami"}]}
    error = forbidden_mount(msgspec.convert(document, ContainerView), ())
    assert "volumeDevices[/etc//hami]" in str(error)


LONG = "c" * 50
NAMES = [
    "main",
    LONG + "a",
    LONG + "ab",
    LONG + "abc",
    LONG + "abx",
    "c" * 63,
    "c" * 64,
    "MR-V100-poddemo",
    "mr-v100-poddemo",
    "mr-v100_poddemo",
    "npu_pod",
    "npu-pod",
    "-",
    "_",
    "",
    "größe",
]


def test_volume_names_are_dns_labels_and_differ_by_container() -> None:
    made = [volume_name(prefix, name) for prefix in PATH_BY_PREFIX for name in NAMES]
    assert all(is_label(name) for name in made)
    assert len(set(made)) == 2 * len(NAMES)
    assert volume_name("hami-limits-", "main") == "hami-limits-main"


def test_no_container_name_gives_the_volume_of_a_longer_one() -> None:
    taken = volume_name("hami-limits-", LONG + "abc")
    assert not is_label(taken.removeprefix("hami-limits-"))
