# SPDX-License-Identifier: Apache-2.0
"""The builder of Kubernetes: what it finds, what triggers a rebuild, leftovers of a dead one."""

import os
from pathlib import Path

import pytest

from tests.cluster import build
from tests.cluster.__main__ import Held


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(build.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hami" / "kubernetes"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in (*build.INPUTS, "go.txt"):
        (folder / name).write_bytes((build.HERE / name).read_bytes())
    monkeypatch.setattr(build, "HERE", folder)
    return folder


def go(folder: Path, script: str) -> str:
    """A directory with a compiler that does what ``script`` says."""
    folder.mkdir()
    program = folder / "go"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in env) printf "go1.26.1\\namd64\\n";; build) {script};; esac\n'
    )
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


WRITES = 'while [ "$1" != -o ]; do shift; done; echo program > "$2"'


def test_named_directory_is_used_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.VARIABLE, "/somewhere")
    assert build.find() == Path("/somewhere")


@pytest.mark.usefixtures("sources")
def test_result_is_found_again_and_holds_all_programs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", go(tmp_path / "bin", WRITES))
    assert build.find() is None
    made = build.build()
    assert made.parent == cache
    assert build.find() == made
    assert {path.name for path in made.iterdir()} == {*build.NAMES, build.PROGRAM}
    assert all((made / name).read_text() == "program\n" for name in build.NAMES)


def test_other_sources_are_another_build(
    cache: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", go(tmp_path / "bin", WRITES))
    first = build.build()
    (sources / "main.go").write_text("package other\n")
    assert build.find() is None
    second = build.build()
    assert {first.name, second.name} <= {path.name for path in cache.iterdir()}
    assert first != second


@pytest.mark.usefixtures("sources")
def test_failed_build_leaves_nothing_that_looks_finished(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", go(tmp_path / "bin", f"{WRITES}; exit 1"))
    with pytest.raises(build.BuildFailed):
        build.build()
    assert build.find() is None
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_state_of_another_process_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(f'{{"pid": {os.getpid()}, "started_s": 1.0}}')
    assert Held(tmp_path).state() is None
