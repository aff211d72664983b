# SPDX-License-Identifier: Apache-2.0
"""Files of the agent survive restarts, and a broken one is survived."""

from pathlib import Path

import pytest

from hami_common.events.inventory import NodeDevices
from hami_nodeagent.core.grants import GrantBook
from hami_nodeagent.shell.checkpoint import Checkpoint
from tests.unit.nodeagent.core.builders import Given, device


def test_grants_and_devices_survive_a_restart(tmp_path: Path) -> None:
    pod = Given("pod")
    grant = pod.grant("main", "a", "b", uuids=("u",))
    devices = NodeDevices(
        node="n",
        vendor="nvidia",
        boot_id="b",
        seq=1,
        time_s=1.0,
        config_generation=2,
        devices=(device(0),),
    )
    first = Checkpoint(tmp_path / "state")
    assert list(first.load_grants()) == []
    assert first.load_devices() == ()
    first.save_grants(GrantBook([grant]).to_file())
    first.save_devices((devices,))
    second = Checkpoint(tmp_path / "state")
    assert list(second.load_grants()) == [grant]
    assert second.load_devices() == (devices,)
    assert (tmp_path / "state" / "grants.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"version":1,"grants":[{"pod":1}]}'])
def test_unreadable_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "grants.json").write_bytes(content)
    assert list(Checkpoint(tmp_path).load_grants()) == []
    assert (tmp_path / "grants.unreadable").read_bytes() == content
    assert not (tmp_path / "grants.json").exists()


def test_file_of_another_version_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "grants.json").write_bytes(b'{"version":2}')
    assert list(Checkpoint(tmp_path).load_grants()) == []
    (tmp_path / "devices.json").write_bytes(b'{"version":2}')
    assert Checkpoint(tmp_path).load_devices() == ()


def test_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    grant = Given("pod").grant("main", "a")
    checkpoint.save_grants(GrantBook([grant]).to_file())
    (tmp_path / "grants.new").write_bytes(b'{"vers')  # a write that never was renamed
    assert list(Checkpoint(tmp_path).load_grants()) == [grant]


def test_limits_of_pods_that_are_over_are_removed(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.remove_limits(lambda _: False) == 0
    kept, over = Given("kept"), Given("over")
    for pod in (kept, over):
        directory = checkpoint.write_limits(pod.grant("main", "a"), "text\n")
        assert (directory / "limits").read_text() == "text\n"
        assert (directory / "limits").stat().st_mode & 0o777 == 0o644
    assert checkpoint.remove_limits(lambda uid: uid == kept.uid) == 1
    assert [path.name for path in (tmp_path / "limits").iterdir()] == [kept.uid]
