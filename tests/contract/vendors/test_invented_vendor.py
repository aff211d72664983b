# SPDX-License-Identifier: Apache-2.0
"""The tutorial docs/adding-a-vendor.md: its vendor passes the contracts of both halves.

Its blocks are written into a copy of the sources as the files that it names, and the lines that it
says to add are added; no other file changes. The contract suites run over the copy.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import Struct

ROOT = Path(__file__).parents[3]
TUTORIAL = ROOT / "docs/adding-a-vendor.md"
SOURCES = {
    "hami_common": "libs/hami-common/src",
    "hami_sim": "libs/hami-sim/src",
    "hami_nodeagent": "services/nodeagent/src",
}
COPIED = (*SOURCES.values(), "tests", "examples")
BESIDE = ("tools",)
"""For the fake NVML, which the drivers' suite builds for every test."""
REGISTRATIONS = {
    "libs/hami-common/src/hami_common/vendors/catalog.py",
    "services/nodeagent/src/hami_nodeagent/drivers/catalog.py",
}
SUITES = (
    "tests/contract/vendors/test_pure_half.py",
    "tests/contract/vendors/test_examples.py",
    "tests/contract/drivers/test_driver_contract.py",
    "tests/contract/drivers/test_tool_contract.py",
)
SELECTED = "acme or pure_half or every_vendor"
LIMIT_S = 280
_STEP = re.compile(
    r"<!-- (?P<how>file|in): (?P<path>\S+)(?: (?P<where>before|after): (?P<line>[^\n]*?))? -->\n"
    r"(?:`[^\n]*\n\n)?```\w+\n(?P<code>.*?)```",
    re.DOTALL,
)


class Step(Struct, frozen=True, kw_only=True):
    """One block of the tutorial."""

    how: str
    path: str
    code: str
    where: str | None = None
    line: str | None = None


def steps() -> list[Step]:
    """All blocks, in order."""
    text = TUTORIAL.read_text(encoding="utf-8")
    found = [Step(**match.groupdict()) for match in _STEP.finditer(text)]
    assert len(found) == text.count("```") // 2
    return found


def take(step: Step, tree: Path) -> None:
    """Apply a block of the tutorial."""
    path = tree / step.path
    if step.how == "file":
        assert not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(step.code, encoding="utf-8")
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    (at,) = [n for n, line in enumerate(lines) if line.strip().startswith(step.line or "\0")]
    lines.insert(at + (step.where == "after"), step.code)
    path.write_text("".join(lines), encoding="utf-8")


def test_only_the_two_registrations_are_changed() -> None:
    assert {step.path for step in steps() if step.how == "in"} == REGISTRATIONS
    assert all(not (ROOT / step.path).exists() for step in steps() if step.how == "file")


@pytest.mark.timeout(LIMIT_S + 10)
def test_the_tutorials_vendor_passes_the_contract_suites(tmp_path: Path) -> None:
    for folder in COPIED:
        ignored = shutil.ignore_patterns(
            "__pycache__", "golden", "native", "e2e", "integration", "attack"
        )
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in BESIDE:
        (tmp_path / folder).symlink_to(ROOT / folder)
    for step in steps():
        take(step, tmp_path)
    paths = [str(tmp_path), *(str(tmp_path / folder) for folder in SOURCES.values())]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *SUITES, "-k", SELECTED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None
    assert int(passed[1]) > 50, said[-2000:]
