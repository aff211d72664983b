# SPDX-License-Identifier: Apache-2.0
"""``hamictl replay`` reports identical and different decisions in its output and exit code."""

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hamictl.cli import main
from tests.support.stimuli_drive import Drive

pytestmark = pytest.mark.anyio


@pytest.fixture
async def log(tmp_path: Path) -> Path:
    """A log of three segments."""
    drive = Drive(tmp_path / "log", 4)
    for _ in range(3):
        for _ in range(8):
            drive.step()
        await drive.recorder.drain()
    return tmp_path / "log"


def replay(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, words)])


def segments(log: Path) -> list[Path]:
    return sorted(log.iterdir())


async def test_identical_log_is_exit_code_0(log: Path) -> None:
    result = replay(log)
    assert result.exit_code == 0, result.output
    assert "in 3 segments of 1 runs" in result.output
    assert "Every decision is identical." in result.output
    answer = json.loads(replay(log, "-o", "json").output)
    assert answer["segments"] == 3
    assert answer["by_kind"]["FilterAsked"] > 0
    assert replay(*segments(log)[1:]).exit_code == 0


async def test_difference_is_exit_code_1_and_shown(log: Path) -> None:
    file = segments(log)[1]
    text = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(text.replace(b'"feasible":', b'"feasible":7', 1)))
    result = replay(log)
    assert result.exit_code == 1
    assert "First difference: segment 2, stimulus" in result.output
    assert '  expected: {"feasible":7' in result.output
    assert '  got:      {"feasible":' in result.output


async def test_gap_is_exit_code_4_unless_it_is_to_be_skipped(log: Path) -> None:
    segments(log)[1].unlink()
    result = replay(log)
    assert result.exit_code == 4
    assert "stopped there" in result.output
    result = replay(log, "--skip-gaps")
    assert result.exit_code == 0
    assert "skipped" in result.output


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl.gz", b"no gzip", "not a segment of a stimulus log"),
        ("a.jsonl.gz", gzip.compress(b"{}\n", mtime=0), "a.jsonl.gz, line 1"),
        ("a.txt", b"", "no file *.jsonl.gz in it"),
    ],
)
async def test_what_is_no_log_is_exit_code_2(
    tmp_path: Path, name: str, content: bytes, text: str
) -> None:
    (tmp_path / name).write_bytes(content)
    result = replay(tmp_path)
    assert result.exit_code == 2
    assert text in result.output


async def test_no_such_file_is_exit_code_2(tmp_path: Path) -> None:
    result = replay(tmp_path / "none")
    assert result.exit_code == 2
    assert "No such file" in result.output
