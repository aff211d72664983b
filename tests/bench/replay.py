# SPDX-License-Identifier: Apache-2.0
"""Records a long life of the scheduler's core and replays it, comparing bit by bit.

Run as ``./dev bench replay --decisions 100000 --json -``. The document has ``decisions``,
``stimuli``, ``segments``, ``log_bytes``, ``identical``, ``record_s`` (the life, with recording),
``replay_s`` and ``decisions_per_s`` of the replay. Exit code 1 when an answer differs. Some minutes
for 100,000 decisions on 12 nodes: most of them are about pods for which no cached answer exists.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import anyio

from hamictl.commands.replay import run as replay
from tests.support.stimuli_drive import Drive


async def record(directory: Path, seed: int, decisions: int, nodes: int) -> Drive:
    """Live until so many decisions were made."""
    drive = Drive(directory, seed, nodes=nodes, segment_bytes=4 << 20)
    while drive.decisions < decisions:
        for _ in range(100):
            drive.step()
        await drive.recorder.flush()
    await drive.recorder.drain()
    return drive


def main(argv: Sequence[str]) -> int:
    """Run the measurement."""
    parser = argparse.ArgumentParser(prog="./dev bench replay", description=__doc__)
    parser.add_argument("--decisions", type=int, default=100_000)
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="-", help="file, or - for standard output")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        begin = time.perf_counter()
        drive = anyio.run(record, directory, flags.seed, flags.decisions, flags.nodes)
        recorded = time.perf_counter()
        report = replay([directory], skip_gaps=False)
        end = time.perf_counter()
        size = sum(file.stat().st_size for file in directory.iterdir())
    is_identical = (
        report.is_identical and not report.missing and report.decisions == drive.decisions
    )
    document = {
        "decisions": report.decisions,
        "stimuli": report.stimuli,
        "segments": report.segments,
        "log_bytes": size,
        "identical": is_identical,
        "record_s": round(recorded - begin, 1),
        "replay_s": round(end - recorded, 1),
        "decisions_per_s": round(report.decisions / (end - recorded)),
    }
    text = json.dumps(document, indent=2) + "\n"
    if flags.json == "-":
        sys.stdout.write(text)
    else:
        Path(flags.json).write_text(text)
    if report.difference is not None:
        sys.stderr.write(f"{report.difference}\n")
    return 0 if is_identical else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
