# SPDX-License-Identifier: Apache-2.0
"""Mounts of a container with a share: admission's own are recognized, others may not hide them."""

from typing import Any

import msgspec
import pytest

from hami_common.pods.mounts import (
    PARENTS,
    RESERVED,
    conflict_of,
    fault_of,
    limits_volume,
    normal_form,
    normalize,
    region_volume,
)
from hami_common.pods.podview import ContainerView, VolumeView

FIELD = "metadata.annotations['main.limits.hami.io/v1']"
ITEM: dict[str, Any] = {"path": "limits", "fieldRef": {"apiVersion": "v1", "fieldPath": FIELD}}
LIMITS: dict[str, Any] = {"name": "l", "downwardAPI": {"items": [ITEM]}}
REGION: dict[str, Any] = {"name": "r", "emptyDir": {"medium": "Memory"}}
OTHER: dict[str, Any] = {"name": "v", "configMap": {"name": "v"}}
OURS: list[dict[str, Any]] = [
    {"name": "l", "mountPath": "/etc/hami", "readOnly": True},
    {"name": "r", "mountPath": "/run/hami"},
]


def volumes(*documents: dict[str, Any]) -> dict[str, VolumeView]:
    """Volumes of a pod by name."""
    return {one.name: one for one in msgspec.convert(documents, list[VolumeView])}


def container(*mounts: dict[str, Any], **more: Any) -> ContainerView:
    """A container with these mounts."""
    return msgspec.convert({"name": "main", "volumeMounts": mounts, **more}, ContainerView)


ALL = volumes(LIMITS, REGION, OTHER)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/etc//ld.so.preload", "/etc/ld.so.preload"),
        ("/etc/./hami/", "/etc/hami"),
        ("//etc//hami", "/etc/hami"),
        ("///etc/hami", "/etc/hami"),
        ("etc/hami", "/etc/hami"),
        ("/var/run/hami/x", "/run/hami/x"),
        ("/var/./run", "/run"),
        ("/a/../../etc/hami", "/etc/hami"),
        ("/var/runner", "/var/runner"),
        ("", "/"),
    ],
)
def test_a_path_is_judged_as_the_container_sees_it(path: str, expected: str) -> None:
    assert normalize(path) == expected


@pytest.mark.parametrize(
    ("path", "expected"), [("//var/run/./x//", "/var/run/x"), ("a/../b", "/b"), ("", "/")]
)
def test_normal_form_keeps_the_alias_as_it_was_written(path: str, expected: str) -> None:
    assert normal_form(path) == expected


def test_error_names_field_problem_and_fix() -> None:
    def text(path: str) -> str:
        return str(conflict_of(container({"name": "v", "mountPath": path}), ALL))

    assert text("/etc/hami") == (
        "container main: volumeMounts[/etc/hami]: would hide the limits of the container's share; "
        "mount it elsewhere; /etc/hami, /run/hami, /usr/local/vgpu, /etc/ld.so.preload, "
        "/run/hami-priority, /run/hami-mps, /etc/vdev, /hami-vnpu-shmem, /hami-shared-region, "
        "/hami-vnpu-core are reserved"
    )
    assert text("/usr/local/") == (
        "container main: volumeMounts[/usr/local/]: would let the limiter library "
        "(/usr/local/vgpu) be removed through the volume; mount a directory below /usr/local"
    )
    assert text("/data/../x") == (
        "container main: volumeMounts[/data/../x]: '..' can lead to any directory, so the mount "
        "could hide the limits of a share; write /x in its place"
    )
    assert text("/proc/self/root/x").endswith("mount it elsewhere, outside /proc and /dev/fd")
    assert text("/run/nvidia-container-devices/all").endswith(
        "NVIDIA's runtime would give the container the devices that are mounted there; "
        "remove it and ask for a share in resources.limits"
    )


def test_parents_follow_from_the_reserved_paths() -> None:
    assert set(PARENTS) == {"/", "/etc", "/run", "/usr", "/usr/local", "/var/run"}
    for path in PARENTS:
        fault = fault_of(path)
        assert fault is not None
        assert fault.is_parent
    for path in RESERVED:
        fault = fault_of(path)
        assert fault is not None
        assert not fault.is_parent


@pytest.mark.parametrize("name", ["v", "l", "r"])
@pytest.mark.parametrize(
    "path",
    [
        *RESERVED,
        *(f"{own}/x" for own in RESERVED),
        "/etc//ld.so.preload",
        "/etc/./ld.so.preload",
        "/etc/../etc/ld.so.preload",
        "/var/run/../etc/ld.so.preload",
        "//etc//hami",
        "etc/hami/limits",
        "/run//hami",
        "/var/run/hami",
        "/var/run/hami-priority",
        "/var/run/nvidia-container-devices/all",
        "/run/nvidia-container-devices",
        "/usr/local/vgpu/libvgpu.so",
        "/proc/self/root/etc/ld.so.preload",
        "/proc/1/root/etc/hami",
        "/dev/fd/3/etc/hami",
        *("/", "/etc", "/usr", "/usr/local/", "/run", "/var/run"),
    ],
)
def test_no_volume_is_mounted_over_or_above_the_limiter(name: str, path: str) -> None:
    if (name, path) == ("r", "/run/hami"):
        return
    error = conflict_of(container({"name": name, "mountPath": path, "subPath": "a"}), ALL)
    assert error is not None
    assert error.field == f"container main: volumeMounts[{path}]"
    assert error.problem
    assert error.fix
    assert conflict_of(container({"name": name, "mountPath": path}), ALL) is not None


@pytest.mark.parametrize(
    "path",
    ["/etc/hamid", "/etc/nginx", "/run/app", "/usr/local/vgpus", "/var/run/secrets/x", "/data..x"],
)
def test_mounts_beside_the_limiters_are_left_alone(path: str) -> None:
    assert conflict_of(container(*OURS, {"name": "v", "mountPath": path}), ALL) is None


def test_limiter_mounts_are_recognized() -> None:
    own = container(*OURS)
    assert conflict_of(own, ALL) is None
    assert limits_volume(own, ALL) == "l"
    assert region_volume(own, ALL) == "r"


@pytest.mark.parametrize("more", [{"subPath": "x"}, {"subPathExpr": "$(A)"}, {"readOnly": False}])
def test_limiter_volume_counts_only_as_a_whole_and_read_only(more: dict[str, Any]) -> None:
    odd = container({**OURS[0], **more})
    assert limits_volume(odd, ALL) is None
    assert conflict_of(odd, ALL) is not None


@pytest.mark.parametrize(
    "volume",
    [
        {"name": "l", "configMap": {"name": "x"}},
        {"name": "l", "downwardAPI": {}},
        {"name": "l", "downwardAPI": {"items": [ITEM, {**ITEM, "path": "more"}]}},
        {"name": "l", "downwardAPI": {"items": [{**ITEM, "path": "a"}]}},
        {"name": "l", "downwardAPI": {"items": [{**ITEM, "path": "../limits"}]}},
        {
            "name": "l",
            "downwardAPI": {
                "items": [
                    {"path": "limits", "fieldRef": {"fieldPath": "metadata.annotations['mine']"}}
                ]
            },
        },
        {
            "name": "l",
            "downwardAPI": {
                "items": [{"path": "limits", "resourceFieldRef": {"resource": "limits.memory"}}]
            },
        },
        {
            "name": "l",
            "downwardAPI": {
                "items": [
                    {
                        "path": "limits",
                        "fieldRef": {"fieldPath": FIELD.replace("main", "other")},
                    }
                ]
            },
        },
    ],
)
def test_volume_with_other_content_is_foreign(volume: dict[str, Any]) -> None:
    own = container(OURS[0])
    assert limits_volume(own, volumes(volume)) is None
    assert conflict_of(own, volumes(volume)) is not None


def test_missing_volume_is_foreign() -> None:
    assert limits_volume(container(OURS[0]), {}) is None


def test_an_ephemeral_container_may_mount_its_targets_volumes() -> None:
    debug = container(*OURS, name="debug", targetContainerName="main")
    assert conflict_of(debug, ALL) is None


def test_region_on_a_persistent_volume_is_foreign() -> None:
    other = volumes({"name": "r", "persistentVolumeClaim": {"claimName": "x"}})
    assert region_volume(container(OURS[1]), other) is None


def test_block_devices_are_judged_like_mounts() -> None:
    device = {"name": "v", "devicePath": "/etc/ld.so.preload"}
    error = conflict_of(container(volumeDevices=[device]), ALL)
    assert error is not None
    assert error.field == "container main: volumeDevices[/etc/ld.so.preload]"
