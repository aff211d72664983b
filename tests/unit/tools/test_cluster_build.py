# SPDX-License-Identifier: Apache-2.0
"""The builder of a cluster's programs: what it finds, what it builds again, what it leaves."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import build, releases
from tests.cluster.__main__ import Held


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(build.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hami" / "programs"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sources"
    shutil.copytree(releases.PROGRAMS, folder)
    monkeypatch.setattr(releases, "PROGRAMS", folder)
    monkeypatch.setattr(build, "PROGRAMS", folder)
    return folder


def go(folder: Path, script: str, version: str = "1.26.5", *, listed: Path = Path()) -> str:
    """A directory with a compiler that does what ``script`` says.

    ``listed``: directory of every module.
    """
    folder.mkdir()
    program = folder / "go"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in env) printf "go{version}\\namd64\\n";; build) {script};;'
        f" list) echo {listed};; esac\n"
    )
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


WRITES = 'while [ "$1" != -o ]; do shift; done; echo program > "$2"'
WRITES_THREE = (
    'while [ "$1" != -o ]; do shift; done;'
    ' for name in containerd containerd-shim-runc-v2 ctr; do echo program > "$2/$name"; done'
)


def test_named_directory_is_used_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.VARIABLE, "/somewhere")
    assert build.find() == Path("/somewhere")
    assert build.build() == Path("/somewhere")


@pytest.mark.usefixtures("cache")
def test_named_directory_does_not_stand_for_a_requested_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(build.VARIABLE, "/somewhere")
    assert build.find(releases.OLDEST.name) is None


@pytest.mark.usefixtures("sources")
def test_result_is_found_again_and_holds_all_programs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", go(tmp_path / "bin", WRITES))
    assert build.find() is None
    made = build.build()
    assert made.parent == cache
    assert build.find() == made
    assert {path.name for path in made.iterdir()} == {*build.COMPONENTS, "kubernetes"}
    assert all((made / name).read_text() == "program\n" for name in build.COMPONENTS)


@pytest.mark.usefixtures("sources", "cache")
def test_each_release_has_its_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", go(tmp_path / "bin", WRITES))
    made = [build.build(release) for release in releases.NAMES]
    assert len({path.name for path in made}) == len(releases.NAMES)
    assert build.build() == build.build(releases.NEWEST.name)
    assert build.find(releases.OLDEST.name) == made[0]


def test_release_outside_the_matrix_is_refused_with_the_matrix() -> None:
    with pytest.raises(build.BuildFailed, match=releases.NEWEST.name):
        build.build("1.12")


@pytest.mark.usefixtures("sources", "cache")
@pytest.mark.parametrize(
    ("make", "find", "script", "names"),
    [
        (
            build.containerd,
            build.find_containerd,
            WRITES_THREE,
            {"containerd", "containerd-shim-runc-v2", "ctr"},
        ),
        (build.coredns, build.find_coredns, WRITES, {"coredns"}),
    ],
)
def test_other_programs_are_built_and_found_alike(
    make: Callable[[], Path],
    find: Callable[[], Path | None],
    script: str,
    names: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", go(tmp_path / "bin", script))
    assert find() is None
    assert {path.name for path in make().iterdir()} == names
    assert find() == make()


@pytest.mark.usefixtures("sources", "cache")
@pytest.mark.parametrize(
    ("make", "find", "program", "place"),
    [
        (build.kueue, build.find_kueue, "kueue", "config/components/crd/bases"),
        (build.volcano, build.find_volcano, "vc-scheduler", "config/crd/volcano/bases"),
    ],
)
def test_files_of_a_module_are_copied_beside_the_program(
    make: Callable[[], Path],
    find: Callable[[], Path | None],
    program: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = tmp_path / "module"
    bases = module / place
    bases.mkdir(parents=True)
    (bases / "queues.yaml").write_text("kind: x\n")
    (bases / "queues.yaml").chmod(0o444)
    monkeypatch.setenv("PATH", go(tmp_path / "bin", WRITES, listed=module))
    assert find() is None
    made = make()
    assert {path.name for path in made.iterdir()} == {program, "bases"}
    assert (made / "bases" / "queues.yaml").read_text() == "kind: x\n"
    assert find() == made


@pytest.mark.usefixtures("sources")
def test_build_that_lacks_a_program_fails(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = f"{WRITES}/ctr".replace('"$2"/ctr', '"$2/ctr"')
    monkeypatch.setenv("PATH", go(tmp_path / "bin", one))
    with pytest.raises(build.BuildFailed, match="containerd-shim-runc-v2"):
        build.containerd()
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_other_sources_are_another_build(
    cache: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", go(tmp_path / "bin", WRITES))
    first = build.build()
    (sources / "kubernetes" / "main.go").write_text("package other\n")
    assert build.find() is None
    second = build.build()
    assert {first.name, second.name} <= {path.name for path in cache.iterdir()}
    assert first != second


@pytest.mark.usefixtures("sources", "cache")
def test_go_in_path_must_be_as_new_as_the_program_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old"
    monkeypatch.setenv("PATH", go(old, "touch $0.used; exit 1", version="1.25.9"))
    monkeypatch.setattr(sys, "executable", "/bin/false")  # the wheel cannot be fetched
    with pytest.raises(build.BuildFailed, match=r"install Go 1\.26\.3 or newer"):
        build.containerd()
    assert not (old / "go.used").exists()


@pytest.mark.usefixtures("sources")
def test_failed_build_leaves_nothing_that_looks_finished(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", go(tmp_path / "bin", f"{WRITES}; exit 1"))
    with pytest.raises(build.BuildFailed):
        build.build()
    assert build.find() is None
    assert [path.name for path in cache.iterdir()] == ["lock"]


@pytest.mark.parametrize("release", releases.RELEASES, ids=lambda release: release.name)
def test_release_builds_the_version_that_its_folder_is_named_for(
    release: releases.Release,
) -> None:
    assert release.version.startswith(f"{release.name}.")
    minor = release.name.split(".")[1]
    text = release.requirements.read_text(encoding="utf-8")
    published = f"v0.{minor}.{release.version.split('.')[2]}"
    replaced = [line.split()[-1] for line in text.splitlines() if " => k8s.io/" in line]
    assert replaced
    assert set(replaced) == {published}


def test_state_of_another_process_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(f'{{"pid": {os.getpid()}, "started_s": 1.0}}')
    assert Held(tmp_path).state() is None
