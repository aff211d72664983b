# SPDX-License-Identifier: Apache-2.0
"""CDI names become variables, device nodes and mounts."""

from pathlib import Path

import msgspec
import pytest

from hami_sim.kubelet.cdi import CdiError, resolve

SPEC = {
    "cdiVersion": "0.8.0",
    "kind": "nvidia.com/gpu",
    "containerEdits": {"env": ["COMMON=1"], "deviceNodes": [{"path": "/dev/nvidiactl"}]},
    "devices": [
        {
            "name": "GPU-1",
            "containerEdits": {
                "env": ["ONE=1"],
                "deviceNodes": [
                    {"path": "/dev/nvidia0", "hostPath": "/dev/nvidia3", "permissions": "rw"}
                ],
                "mounts": [
                    {"hostPath": "/h", "containerPath": "/c", "options": ["ro", "bind"]},
                    {"hostPath": "/h2", "containerPath": "/c2"},
                ],
            },
        },
        {"name": "GPU-2", "containerEdits": {"env": ["TWO=2"]}},
    ],
}


def test_devices_of_one_file_share_its_common_edits(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(msgspec.json.encode(SPEC))
    edits = resolve(["nvidia.com/gpu=GPU-1", "nvidia.com/gpu=GPU-2"], [tmp_path])
    assert edits.envs == {"COMMON": "1", "ONE": "1", "TWO": "2"}
    assert edits.devices == (
        ("/dev/nvidiactl", "/dev/nvidiactl", "rwm"),
        ("/dev/nvidia0", "/dev/nvidia3", "rw"),
    )
    assert edits.mounts == (("/c", "/h", True), ("/c2", "/h2", False))


def test_later_directory_wins_and_yaml_is_read(tmp_path: Path) -> None:
    early, late = tmp_path / "etc", tmp_path / "run"
    early.mkdir()
    late.mkdir()
    (early / "a.json").write_bytes(msgspec.json.encode(SPEC))
    newer = {**SPEC, "containerEdits": {"env": ["COMMON=2"]}}
    (late / "a.yaml").write_bytes(msgspec.yaml.encode(newer))
    assert resolve(["nvidia.com/gpu=GPU-2"], [early, late]).envs["COMMON"] == "2"


@pytest.mark.parametrize("twice", [False, True])
def test_unknown_or_ambiguous_device_is_refused(tmp_path: Path, twice: bool) -> None:  # noqa: FBT001
    name = "nvidia.com/gpu=GPU-1"
    if twice:
        (tmp_path / "a.json").write_bytes(msgspec.json.encode(SPEC))
        (tmp_path / "b.json").write_bytes(msgspec.json.encode(SPEC))
    with pytest.raises(CdiError, match=f"unresolvable CDI devices {name}"):
        resolve([name], [tmp_path, tmp_path / "absent"])


def test_broken_file_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"{")
    (tmp_path / "b.json").write_bytes(msgspec.json.encode(SPEC))
    assert resolve(["nvidia.com/gpu=GPU-2"], [tmp_path]).envs["TWO"] == "2"


def test_no_names_need_no_directory(tmp_path: Path) -> None:
    assert resolve([], [tmp_path / "absent"]).envs == {}
