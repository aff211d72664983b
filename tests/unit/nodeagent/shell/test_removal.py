# SPDX-License-Identifier: Apache-2.0
"""Files of the agent on a host, with and without running containers that map them."""

import json
import mmap
from pathlib import Path

import pytest

from hami_nodeagent.settings import Settings
from hami_nodeagent.shell.removal import Removal, main


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with all files that an agent writes, and others beside them."""
    root = tmp_path / "host"
    (root / "run").mkdir(parents=True)
    (root / "var").mkdir()
    # As on every distribution: an absolute link, which means the host's /run.
    (root / "var/run").symlink_to("/run")
    for path in (
        "var/lib/hami/agent/grants.json",
        "var/lib/hami/agent/limits/u-1/main/limits",
        "var/lib/hami/libvgpu/libvgpu-0123456789abcdef.so",
        "var/lib/hami/libvgpu/ld.so.preload-0123456789abcdef",
        "run/hami-priority/page-1",
        "run/cdi/hami-u-1.main.nvidia.json",
        *(f"run/cdi/hami-{CLAIM}.{suffix}" for suffix in ("json", "new")),
        "run/cdi/nvidia.yaml",
        "var/lib/kubelet/device-plugins/hami-nvidia.sock",
        "var/lib/kubelet/device-plugins/kubelet.sock",
        "usr/local/hami-vnpu-core/containers/u-1/x",
        "usr/local/hami-vnpu-core/libvnpu.so",
        "usr/local/hami-shared-region/chip-0",
    ):
        write(root / path)
    return root


CLAIM = "2a5f1c6e-0d3b-4c52-9d8e-6f1a7b3c4d5e"


def left(host: Path) -> set[str]:
    return {str(path.relative_to(host)) for path in host.rglob("*") if path.is_file()}


OTHERS = {
    "run/cdi/nvidia.yaml",
    "var/lib/kubelet/device-plugins/kubelet.sock",
    "usr/local/hami-vnpu-core/libvnpu.so",
}


def test_only_files_of_others_are_left(host: Path) -> None:
    removal = Removal(Settings(node_name="n"), host)
    assert removal.run()
    assert left(host) == OTHERS
    assert not (host / "var/lib/hami").exists()
    assert not (host / "run/hami-priority").exists()
    assert (host / "run/cdi").is_dir()
    assert "/var/lib/hami" in removal.removed


def test_second_run_finds_nothing(host: Path) -> None:
    Removal(Settings(node_name="n"), host).run()
    again = Removal(Settings(node_name="n"), host)
    assert again.run()
    assert again.removed == []


@pytest.mark.parametrize(
    "mapped", ["var/lib/hami/libvgpu/libvgpu-0123456789abcdef.so", "run/hami-priority/page-1"]
)
def test_files_that_a_running_container_maps_stay_and_so_does_what_limits_it(
    host: Path, mapped: str
) -> None:
    (host / mapped).write_bytes(bytes(4096))
    with (
        (host / mapped).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ),
    ):
        removal = Removal(Settings(node_name="n"), host)
        assert not removal.run()
        assert mapped in left(host)
        assert "var/lib/hami/agent/limits/u-1/main/limits" in left(host)
        assert "/var/lib/hami/libvgpu" in removal.kept
        # New containers cannot be given shares any more.
        assert "var/lib/kubelet/device-plugins/hami-nvidia.sock" not in left(host)
    assert Removal(Settings(node_name="n"), host).run()
    assert left(host) == OTHERS


def test_processes_that_cannot_be_seen_count_as_running_containers(
    host: Path, tmp_path: Path
) -> None:
    removal = Removal(Settings(node_name="n", host_proc=str(tmp_path / "none")), host)
    assert not removal.run()
    assert "var/lib/hami/libvgpu/libvgpu-0123456789abcdef.so" in left(host)


def test_program_reads_the_agents_settings_and_prints_what_it_did(
    host: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path / "agent.toml", 'node_name = "n"\nstate_dir = "/srv/hami/state"\n')
    write(host / "srv/hami/state/grants.json")
    assert main(["--host", str(host), "--config", str(config)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "/srv/hami" in report["removed"]
    assert report["kept"] == report["problems"] == []
    assert main(["--host", str(host), "--set", "no_such=1"]) == 2
