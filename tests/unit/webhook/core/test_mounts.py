# SPDX-License-Identifier: Apache-2.0
"""Mounts of a pod with a share: what hides the limiter is denied in words, the rest passes."""

from typing import Any

import msgspec
import pytest

from hami_common.podview import ContainerView
from hami_webhook.core.mounts import forbidden_mount, mounts_of, normalized, volume_name


def denial(path: str, *, asking: tuple[str, ...] = ("main",), **more: Any) -> str:
    mount = {"name": "v", "mountPath": path, **more}
    container = msgspec.convert({"name": "main", "volumeMounts": [mount]}, ContainerView)
    return str(forbidden_mount(container, asking) or "")


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("/etc//hami", "/etc/hami"),
        ("//etc/hami", "/etc/hami"),
        ("///etc/hami//", "/etc/hami"),
        ("etc/hami", "/etc/hami"),
        ("/etc/./hami/.", "/etc/hami"),
        ("/a/../../etc/hami", "/etc/hami"),
        ("/", "/"),
        ("", "/"),
    ],
)
def test_path_is_normalized_as_the_container_sees_it(written: str, path: str) -> None:
    assert normalized(written) == path


def test_denial_names_field_problem_and_fix() -> None:
    assert denial("/etc/hami") == (
        "container main: volumeMounts[/etc/hami]: would hide the limits of the container's device "
        "share; mount it elsewhere; /etc/hami, /run/hami, /run/hami-priority, /usr/local/vgpu, "
        "/etc/ld.so.preload are reserved"
    )
    assert denial("/data//x") == (
        "container main: volumeMounts[/data//x]: is not in normal form; write /data/x in its place"
    )


@pytest.mark.parametrize("path", ["/etc", "/usr", "/usr/local/", "/var/run"])
def test_directory_above_the_limiter_is_free_where_there_is_no_share(path: str) -> None:
    assert denial(path)
    assert denial(path, asking=("other",)) == ""


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


def test_names_are_cut_to_what_a_volume_can_have() -> None:
    assert volume_name("hami-limits-", "main") == "hami-limits-main"
    assert len(volume_name("hami-limits-", "c" * 63)) <= 63
