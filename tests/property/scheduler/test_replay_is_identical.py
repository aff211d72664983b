# SPDX-License-Identifier: Apache-2.0
"""Any recorded life replays to identical bytes, as a whole and from each of its snapshots.

``./dev bench replay`` does the same with 100,000 decisions.
"""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from hami_core.replay.rerun import rerun
from hami_core.replay.stimuluslog import Item, Reader
from tests.support.stimuli_drive import Drive

pytestmark = pytest.mark.anyio


def items(*files: Path) -> Iterator[Item]:
    for file in files:
        with gzip.open(file) as lines:
            yield from Reader(file.name).items(lines)


@pytest.mark.parametrize("seed", [24, 29])
async def test_a_life_and_each_part_of_it_is_decided_identically(tmp_path: Path, seed: int) -> None:
    drive = Drive(tmp_path, seed, segment_bytes=10_000)
    for number in range(120):
        drive.step()
        if number % 50 == 49:
            drive.wipe()
        if number % 20 == 0:
            await drive.recorder.flush()
    await drive.recorder.drain()
    files = sorted(tmp_path.iterdir())
    report = rerun(items(*files))
    assert report.difference is None
    assert report.missing == ()
    assert report.decisions == drive.decisions
    assert report.segments == len(files) > 1
    for file in files[1:]:
        assert rerun(items(file)).difference is None
