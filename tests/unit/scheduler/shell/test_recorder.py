# SPDX-License-Identifier: Apache-2.0
"""A recorded run is replayed bit for bit; missing or changed decisions are reported."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from hami_common.errors import WireInvalid
from hami_core.replay.rerun import Report, rerun
from hami_core.replay.stimuluslog import Item, Reader
from hamictl.traces import read_lines
from tests.support.stimuli_drive import Drive
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import World

pytestmark = pytest.mark.anyio


def segments(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def items(*files: Path) -> Iterator[Item]:
    for file in files:
        with gzip.open(file) as lines:
            yield from Reader(file.name).items(lines)


def replayed(directory: Path, *, skip_gaps: bool = False) -> Report:
    return rerun(items(*segments(directory)), skip_gaps=skip_gaps)


def rewrite(file: Path, old: bytes, new: bytes, *, count: int = 1) -> None:
    """Change lines of a segment."""
    text = gzip.decompress(file.read_bytes())
    assert old in text
    file.write_bytes(gzip.compress(text.replace(old, new, count)))


async def lived(directory: Path, seed: int, steps: int, *, segment_bytes: int = 1 << 30) -> Drive:
    drive = Drive(directory, seed, segment_bytes=segment_bytes)
    for number in range(steps):
        drive.step()
        if number % 30 == 29:
            drive.wipe()
        if number % 10 == 0:
            await drive.recorder.flush()
    await drive.recorder.drain()
    return drive


async def test_a_life_is_decided_identically(tmp_path: Path) -> None:
    drive = await lived(tmp_path, 1, 150, segment_bytes=5_000)
    report = replayed(tmp_path)
    assert report.difference is None
    assert report.missing == ()
    assert report.decisions == drive.decisions > 60
    assert report.segments == len(segments(tmp_path)) > 1
    assert {"FilterAsked", "PrioritizeAsked", "BindPlanned", "HoldPlanned", "Wiped"} < set(
        report.by_kind
    )


async def test_each_segment_can_be_replayed_alone(tmp_path: Path) -> None:
    await lived(tmp_path, 2, 60, segment_bytes=5_000)
    assert len(segments(tmp_path)) > 1
    for file in segments(tmp_path):
        report = rerun(items(file))
        assert report.difference is None
        assert report.missing == ()


async def test_first_difference_is_reported_with_stimulus_expected_and_got(tmp_path: Path) -> None:
    await lived(tmp_path, 2, 20)
    rewrite(segments(tmp_path)[0], b'"feasible":', b'"feasible":9')
    found = replayed(tmp_path).difference
    assert found is not None
    assert found.kind == "FilterAsked"
    assert '"uid":"uid-1"' in found.what
    assert found.expected.replace(":9", ":", 1) == found.got


async def test_a_state_that_no_answer_shows_is_compared_at_the_next_segment(tmp_path: Path) -> None:
    await lived(tmp_path, 3, 60, segment_bytes=3_000)
    rewrite(segments(tmp_path)[1], b'"fence_delay_s":3.0', b'"fence_delay_s":4.0')
    found = replayed(tmp_path).difference
    assert found is not None
    assert (found.number, found.kind, found.segment) == (0, "snapshot", 2)
    assert (found.expected, found.got) == ("fence_delay_s: 4.0", "fence_delay_s: 3.0")


async def test_full_queue_drops_counts_and_leaves_a_gap_that_is_not_crossed(tmp_path: Path) -> None:
    drive = Drive(tmp_path, 5, queue_size=100)
    for _ in range(60):
        drive.step()
    dropped = drive.count("dropped")
    assert dropped > 0
    await drive.recorder.flush()
    for _ in range(20):
        drive.step()
    await drive.recorder.drain()
    report = replayed(tmp_path)
    assert [missing.problem for missing in report.missing] == [
        f"{dropped:.0f} stimuli or more were not written"
    ]
    assert report.segments == 1
    across = replayed(tmp_path, skip_gaps=True)
    assert across.difference is None
    assert across.segments == 2
    assert across.stimuli > report.stimuli


async def test_missing_segment_is_a_gap(tmp_path: Path) -> None:
    await lived(tmp_path, 6, 40, segment_bytes=2_000)
    segments(tmp_path)[1].unlink()
    report = replayed(tmp_path)
    assert report.segments == 2
    assert "segment 2 of run run6 is not there" in report.missing[0].problem
    assert replayed(tmp_path, skip_gaps=True).difference is None


async def test_segment_cut_short_by_a_crash_can_be_read_to_its_last_whole_line(
    tmp_path: Path,
) -> None:
    drive = Drive(tmp_path, 7)
    for _ in range(50):
        drive.step()
    await drive.recorder.flush()  # flushed, and not ended yet
    file = tmp_path / "left"
    file.write_bytes(segments(tmp_path)[0].read_bytes())
    await drive.recorder.drain()
    report = rerun(Reader(file.name).items(read_lines(file)))
    assert report.difference is None
    assert report.stimuli > 50
    file.write_bytes(file.read_bytes()[:-100])
    less = rerun(Reader(file.name).items(read_lines(file)))
    assert less.difference is None
    assert 0 < less.stimuli < report.stimuli


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b'"k":"FilterAsked"', b'"k":"QueueAsked"', "'QueueAsked', which this program does not"),
        (b'"k":"FilterAsked","v":1', b'"k":"FilterAsked","v":9', "FilterAsked of version 9"),
        (b'"format":1', b'"format":2', "format 2, and this program reads 1"),
    ],
)
async def test_unknown_stimulus_is_an_error(
    tmp_path: Path, old: bytes, new: bytes, problem: str
) -> None:
    await lived(tmp_path, 8, 20)
    text = gzip.decompress(segments(tmp_path)[0].read_bytes())
    plain = old if old in text else old.replace(b',"v":1', b"")
    rewrite(segments(tmp_path)[0], plain, new)
    with pytest.raises(WireInvalid, match=problem):
        replayed(tmp_path)


async def test_old_segments_are_removed_and_the_rest_can_be_replayed(tmp_path: Path) -> None:
    drive = Drive(tmp_path, 9, segment_bytes=1000, segments=3)
    for _ in range(60):
        drive.step()
        await drive.recorder.flush()
    await drive.recorder.drain()
    assert len(segments(tmp_path)) == 3
    report = replayed(tmp_path)
    assert report.difference is None
    assert report.missing == ()
    assert report.segments == 3


async def test_unwritable_directory_loses_stimuli_and_nothing_else(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    drive = Drive(blocked, 10)
    for _ in range(20):
        drive.step()
    await drive.recorder.drain()
    assert drive.count("recorded") == 0
    blocked.unlink()
    for _ in range(20):
        drive.step()
    await drive.recorder.drain()
    report = replayed(blocked)
    assert report.difference is None
    assert report.stimuli == drive.count("recorded") > 0


async def test_a_running_scheduler_writes_a_log_that_decides_identically(tmp_path: Path) -> None:
    world = World()
    await world.add_devices(builders.devices("small", memory_mib=8000))
    await world.add_devices(builders.devices("big", memory_mib=32000))
    async with world.scheduler(stimulus_log_dir=str(tmp_path / "log")) as s:
        await world.heartbeat("small", "big")
        for number in range(5):
            pod = world.add_pod(builders.pod(f"p{number}", mem_mib=7000))
            answer = await s.filter(pod, ["small", "big"])
            await s.prioritize(pod, answer["NodeNames"] or ["big"])
            await s.bind(pod, "big")
        await world.advance(30, "big")
        await s.scheduler.drain(limit_s=5)
    report = replayed(tmp_path / "log")
    assert report.difference is None
    assert report.by_kind["FilterAsked"] == report.by_kind["BindPlanned"] == 5
    assert report.by_kind["DevicesPut"] == 2
    assert report.by_kind["HeartbeatHeard"] > 2


QUEUES = """
[[queue]]
name = "vision"
limit = { memory_mib = 14000 }
namespaces = ["default"]
"""


async def test_a_decision_about_a_quota_is_decided_identically_too(tmp_path: Path) -> None:
    """Answers of filter and bind for quotas and queues are recorded and compared."""
    world = World()
    await world.add_devices(builders.devices("big", memory_mib=64000))
    queues = tmp_path / "queues.toml"
    queues.write_text(QUEUES)
    quota = {
        "metadata": {"name": "gpu", "namespace": "team", "uid": "uid-gpu"},
        "spec": {"hard": {"limits.nvidia.com/gpumem": "10000"}},
    }
    world.kube.put("/api/v1/namespaces/team/resourcequotas/gpu", quota)
    log = str(tmp_path / "log")
    async with world.scheduler(stimulus_log_dir=log, queues_file=str(queues)) as s:
        answers = []
        for namespace in ("team", "default"):
            for number in range(3):
                pod = builders.pod(f"{namespace}-{number}", namespace=namespace, mem_mib=7000)
                world.add_pod(pod)
                answer = await s.filter(pod, ["big"])
                answers.append(str(answer["FailedNodes"].get("big", "")).partition(":")[0])
                await s.bind(pod, "big")
        await s.scheduler.drain(limit_s=5)
    held = "ResourceQuotaNotFit"
    assert answers == ["", held, held, "", "", "QueueOverLimit"]
    report = replayed(tmp_path / "log")
    assert report.difference is None
    assert report.by_kind["QuotaAsked"] == report.by_kind["QuotaLooked"] == 6
    assert report.by_kind["QuotaJudged"] == report.by_kind["QuotaFolded"] == 3
    assert report.by_kind["QuotaPut"] == report.by_kind["QueuesSet"] == 1
    (file,) = segments(tmp_path / "log")
    rewrite(file, b'"most":10000', b'"most":20000')
    found = replayed(tmp_path / "log").difference
    assert found is not None
    assert (found.kind, held in found.expected, held in found.got) == ("QuotaAsked", True, False)
