# SPDX-License-Identifier: Apache-2.0
"""The law of memory under random use: 0 <= used <= limit, and used is what the driver has given.

Several containers on one machine, each with devices in an order of its own; in each several
processes allocate in every way there is, fork, end in every way, and are killed, while the limit
grows and shrinks (native/libvgpu/tests/property says what is checked); that of one container is
granted beyond its request, in its page. ``HAMI_NATIVE_OPS`` is the
number of operations to reach in all (20,000 unless it says otherwise), ``HAMI_NATIVE_SEED`` the
first seed; a failure names its own. ``STORM_SKIP`` names operations to leave out, to find which
one breaks the law; nothing is left out by itself.
"""

import os
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest
from msgspec import Struct

from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.support.room import FILE_NAME, RoomPage, set_limits_above

MIB = 1 << 20
OPERATIONS = int(os.environ.get("HAMI_NATIVE_OPS", "20000"))
SKIPPED = os.environ.get("STORM_SKIP", "nothing")
SEED = int(os.environ.get("HAMI_NATIVE_SEED", "1"))
RECLAIM_MOST_US = 1_000_000 if "HAMI_NATIVE_OPS" in os.environ else 4_000_000
"""The target is a second; where the machine is shared with everything else, four times that."""
REQUEST_MIB, MOST_MIB = 150, 4000
LINES_KEPT = 30
PHASES_LEAST = 3
"""However fast the machine is, the limits change twice."""
LIMIT_S = 120 + OPERATIONS / 5_000


class Storm:
    """One container under random use."""

    def __init__(
        self,
        container: GpuContainer,
        program: Path,
        words: list[str],
        env: dict[str, str] | None = None,
        room: RoomPage | None = None,
    ) -> None:
        self.container = container
        self.room = room
        self.memory_mib = 0
        self.figures = [0] * 6
        self._process = container.start([program, *words], env)
        self._said: deque[str] = deque(maxlen=LINES_KEPT)
        self._reader = Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        """Empty the pipe, into which a refused worker would otherwise wait to write."""
        assert self._process.stderr is not None
        self._said.extend(self._process.stderr)

    @property
    def pid(self) -> int:
        """Of the program that watches over the others."""
        return self._process.pid

    @property
    def total(self) -> int:
        """Bytes that the container shows as its device."""
        return (self.memory_mib if self.room is None else MOST_MIB) * MIB

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ok "):
            self._process.wait(timeout=20)
            self._reader.join(timeout=20)
            said = "".join(self._said)
            pytest.fail(f"{line.strip() or 'the storm ended'}\n{said}", pytrace=False)
        self.figures = [int(word) for word in line.split()[1:]]

    def run(self, milliseconds: int, kill_every_ms: int) -> None:
        self.send(f"run {milliseconds} {self.memory_mib * MIB} {self.total} {kill_every_ms}")

    def change_limit(self, memory_mib: int) -> None:
        self.memory_mib = memory_mib
        if self.room is None:
            self.container.set_memory_mib(memory_mib)
        else:
            self.grant()
        self.send(f"limit {memory_mib * MIB} {self.total}")

    def grant(self) -> None:
        assert self.room is not None
        assert self.container.limits is not None
        for device in self.container.limits.devices:
            self.room.grant(device.uuid, self.memory_mib * MIB, lease_s=LIMIT_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=20)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        if self.room is not None:
            self.room.close()


class Hardware(Struct, frozen=True, kw_only=True):
    """Memory that the driver takes in addition to requests."""

    context_bytes: int
    pool_granularity: int


EXACT = Hardware(context_bytes=1 * MIB, pool_granularity=1)
REAL = Hardware(context_bytes=8 * MIB, pool_granularity=2 * MIB)


HARDWARE = {"exact": EXACT, "real": REAL}
CHOSEN = os.environ.get("HAMI_NATIVE_HARDWARE", "exact,real").split(",")


def storms_on(
    node: GpuNode,
    program: Path,
    hardware: Hardware,
    randomness: random.Random,
    env: dict[str, str] | None = None,
) -> list[Storm]:
    """Three containers: all devices in a random order, some devices, and one alone.

    The second requests less than it is granted.
    """
    for index in range(len(node.uuids)):
        node.nvml.set_key(index, "context_bytes", str(hardware.context_bytes))
        node.nvml.set_key(index, "pool_granularity", str(hardware.pool_granularity))
    indexes = list(range(len(node.uuids)))
    storms: list[Storm] = []
    for count, workers in ((len(indexes), 4), (3, 3), (1, 3)):
        memory_mib = randomness.choice((200, 700, 3000))
        is_granted = len(storms) == 1
        container = node.container(
            *randomness.sample(indexes, count),
            memory_mib=REQUEST_MIB if is_granted else memory_mib,
        )
        room = None
        if is_granted:
            set_limits_above(container, memory_limit_mib=MOST_MIB)
            room = RoomPage(container.bell_directory / FILE_NAME)
        words = [str(randomness.randrange(1 << 30)), str(workers)]
        storm = Storm(container, program, words, env, room)
        storm.memory_mib = memory_mib
        if is_granted:
            storm.grant()
        storms.append(storm)
    return storms


def run_until(storms: list[Storm], operations: int, randomness: random.Random) -> None:
    """Phases of use, and changes of limits between them, until there were so many operations."""
    deadline = time.monotonic() + LIMIT_S
    phases = 0
    while phases < PHASES_LEAST or sum(storm.figures[0] for storm in storms) < operations:
        phases += 1
        assert time.monotonic() < deadline
        for storm in storms:
            storm.run(randomness.choice((300, 1000, 2000)), randomness.choice((5, 20, 100)))
        for storm in storms:
            storm.answer()
        changed = randomness.choice(storms)
        changed.change_limit(randomness.choice((REQUEST_MIB, 400, 1000, MOST_MIB)))
        changed.answer()


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("hardware", [HARDWARE[name] for name in CHOSEN], ids=CHOSEN)
def test_used_matches_the_driver_and_is_within_the_limit(
    node: GpuNode,
    drivers: Path,
    hardware: Hardware,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    randomness = random.Random(SEED)
    with ExitStack() as stack:
        storms = storms_on(
            node,
            drivers / "storm",
            hardware,
            randomness,
            {"STORM_SKIP": SKIPPED},
        )
        for storm in storms:
            stack.callback(storm.close)
        run_until(storms, OPERATIONS, randomness)
    names = ("operations", "kills", "forks", "samples", "reclaim_us", "lives")
    figures = zip(names, zip(*(storm.figures for storm in storms), strict=True), strict=False)
    told = {name: max(f) if name == "reclaim_us" else sum(f) for name, f in figures}
    record_property(f"storm {request.node.callspec.id}", told)
    assert all(storm.figures[1] > 0 and storm.figures[3] > 0 for storm in storms)
    assert max(storm.figures[4] for storm in storms) <= RECLAIM_MOST_US
