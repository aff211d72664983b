# SPDX-License-Identifier: Apache-2.0
"""Every file that a service reloads: changes, symlink swaps, mistakes, refusals by its owner."""

import hashlib
import logging
from pathlib import Path

import anyio
import pytest
from prometheus_client import CollectorRegistry

from hami_common.errors import SettingsInvalid
from hami_common.runtime.watchedfile import FileKind, WatchedFile
from tests.support.manualclock import ManualClock

pytestmark = pytest.mark.anyio

NUMBERS = FileKind(name="numbers", title="numbers file", field="numbers_file")


def number(content: bytes) -> int:
    if not content.strip().isdigit():
        raise SettingsInvalid(field="numbers", problem="is no number", fix="write digits")
    return int(content)


class Numbers:
    """A watched file with a number, and what its owner was offered."""

    def __init__(self, path: Path | str) -> None:
        self.registry = CollectorRegistry()
        self.offered: list[int] = []
        self.error: Exception | None = None
        self.file = WatchedFile.at_start(
            str(path), NUMBERS, parse=number, default=0, registry=self.registry
        )
        self.file.use = self._use

    def _use(self, value: int) -> None:
        self.offered.append(value)
        if self.error is not None:
            raise self.error

    async def settle(self) -> None:
        """Poll twice: a file counts once two reads return the same."""
        await self.file.look()
        await self.file.look()

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"hami_numbers_{name}", labels)

    def reloads(self) -> tuple[float | None, float | None]:
        """Return how many succeeded and failed."""
        return (
            self.metric("reloads_total", outcome="ok"),
            self.metric("reloads_total", outcome="failed"),
        )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "numbers"
    path.write_text("1")
    return path


async def test_without_a_file_the_default_is_in_force() -> None:
    numbers = Numbers("")
    await numbers.settle()
    await numbers.file.watch(ManualClock(now_s=0.0), lambda: 1.0)
    assert (numbers.file.value, numbers.file.digest) == (0, "")
    assert (numbers.metric("file_valid"), numbers.metric("info", digest="")) == (1, 1)


@pytest.mark.parametrize("text", ["one", None])
def test_invalid_or_missing_file_stops_the_start(path: Path, text: str | None) -> None:
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(SettingsInvalid, match="numbers"):
        Numbers(path)


async def test_changed_content_is_applied_once(path: Path) -> None:
    numbers = Numbers(path)
    path.write_text("2")
    for _ in range(3):
        await numbers.settle()
    assert (numbers.file.value, numbers.offered, numbers.reloads()) == (2, [2], (1, 0))
    assert numbers.metric("info", digest=hashlib.sha256(b"2").hexdigest()) == 1


async def test_file_that_is_still_being_written_is_not_applied(path: Path) -> None:
    numbers = Numbers(path)
    path.write_text("")
    await numbers.file.look()
    path.write_text("3")
    await numbers.file.look()
    assert (numbers.file.value, numbers.file.problem) == (1, "")
    await numbers.file.look()
    assert (numbers.file.value, numbers.reloads()) == (3, (1, 0))


async def test_symlink_swap_of_a_mounted_configmap_is_detected(tmp_path: Path) -> None:
    """Kubelet changes a ConfigMap by moving the symlink ``..data`` to another folder."""
    for version in (1, 2):
        (tmp_path / f"..{version}").mkdir()
        (tmp_path / f"..{version}" / "numbers").write_text(str(version))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "numbers").symlink_to("..data/numbers")
    numbers = Numbers(tmp_path / "numbers")
    fresh = tmp_path / "..data_tmp"
    fresh.symlink_to("..2")
    fresh.replace(tmp_path / "..data")
    await numbers.settle()
    assert numbers.file.value == 2


@pytest.mark.parametrize(
    ("text", "problem"), [("one", "is no number"), (None, "give the path of a readable file")]
)
async def test_problem_is_logged_and_counted_once_until_it_is_fixed(
    path: Path, text: str | None, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = Numbers(path)
    path.unlink() if text is None else path.write_text(text)
    for _ in range(3):
        await numbers.settle()
    assert (numbers.file.value, numbers.offered) == (1, [])
    assert problem in numbers.file.problem
    assert (numbers.metric("file_valid"), numbers.reloads()) == (0, (0, 1))
    (logged,) = (one for one in caplog.records if one.levelno == logging.ERROR)
    assert logged.message == "configuration file invalid, last valid one kept"
    path.write_text("1")
    await numbers.settle()
    assert (numbers.file.problem, numbers.metric("file_valid")) == ("", 1)


async def test_refused_content_is_offered_until_it_is_accepted(path: Path) -> None:
    numbers = Numbers(path)
    numbers.error = SettingsInvalid(field="numbers", problem="in use", fix="wait")
    path.write_text("2")
    for _ in range(3):
        await numbers.settle()
    assert len(numbers.offered) > 2
    assert (numbers.file.value, numbers.reloads()) == (1, (0, 1))
    assert "in use" in numbers.file.problem
    numbers.error = None
    await numbers.file.look()
    assert (numbers.file.value, numbers.file.problem, numbers.reloads()) == (2, "", (1, 1))


async def test_refused_content_that_changed_is_not_offered_again(path: Path) -> None:
    numbers = Numbers(path)
    numbers.error = SettingsInvalid(field="numbers", problem="in use", fix="wait")
    path.write_text("2")
    await numbers.settle()
    numbers.error = None
    path.write_text("3")
    await numbers.file.look()
    assert numbers.file.value == 1
    await numbers.file.look()
    assert (numbers.offered, numbers.file.value) == ([2, 3], 3)


async def test_error_of_the_owner_is_reported_and_the_loop_continues(path: Path) -> None:
    numbers = Numbers(path)
    numbers.error = ZeroDivisionError()
    path.write_text("2")
    for _ in range(3):
        await numbers.settle()
    assert (numbers.offered, numbers.file.value, numbers.reloads()) == ([2], 1, (0, 1))
    assert "see its log" in numbers.file.problem
    path.write_text("3")
    await numbers.settle()
    assert numbers.reloads() == (0, 2), "each content is logged, its traceback may differ"
    numbers.error = None
    path.write_text("4")
    await numbers.settle()
    assert (numbers.file.value, numbers.file.problem) == (4, "")


async def test_watch_polls_by_the_clock(path: Path) -> None:
    numbers, clock = Numbers(path), ManualClock(now_s=0.0)
    path.write_text("2")
    async with anyio.create_task_group() as group:
        group.start_soon(numbers.file.watch, clock, lambda: 1.0)
        with anyio.fail_after(4):
            while numbers.file.value == 1:
                await clock.advance(1.0)
                await anyio.sleep(0.001)
        group.cancel_scope.cancel()
    assert clock.monotonic_s() >= 2.0, "it had to read the same twice"
