# SPDX-License-Identifier: Apache-2.0
"""Attacks the node agent through the usage regions, which containers write.

Each region passes all that the agent does with it at one look: the file is read, owners are looked
for among the processes, rows and counters are made and shown as metrics.
"""

import random
import struct
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from hami_common.metrics.families import NameSet
from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.region import FILE_NAME, LINE, SIZE_MAX, Region
from hami_nodeagent.core.usage import Counters, containers_of, rows_of
from hami_nodeagent.shell.living import Living
from hami_nodeagent.shell.regions import read_activity, read_region
from hami_nodeagent.shell.usagemetrics import Look, UsageMetrics
from tests.attack.fuzz.inputs import pick
from tests.attack.fuzz.laws import Case, Told, chance_of, resident_mib
from tests.support.regions import Built, Process, Used, seal

UUIDS = ("GPU-a", "GPU-b")
HOLDERS = tuple(
    Holder(
        pod_uid="uid",
        namespace="team",
        pod="train",
        container="main",
        vendor="nvidia",
        uuid=uuid,
        number=number,
        limit_mib=1000,
        volume="hami-region-main",
    )
    for number, uuid in enumerate(UUIDS)
)
WORDS = (0, 1, 2, 63, 64, 65, 2047, 2048, 2049, 1 << 31, (1 << 32) - 1, 1 << 48, (1 << 64) - 1)
HEADER_BYTES = 128
SHOW_EVERY = 16
SECOND_NS = 10**9
NAMES: tuple[NameSet, ...] = ("hami", "legacy")


class _Agent:
    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._living = Living(Path("/proc"))
        self._counters = Counters()
        self._registry = CollectorRegistry()
        self._metrics = UsageMetrics("node", sets=NAMES)
        self._registry.register(self._metrics)
        self._cases = 0

    async def take(self, case: Case) -> Told:
        self._cases += 1
        self._path.write_bytes(case.body)
        read_activity(self._path)
        found = read_region(self._path, self._living.dead_of)
        if not isinstance(found, Region):
            return Told(outcome=found.reason)
        self._living.keep_only([one.owner for one in (*found.processes, *found.ended)])
        self._show(found)
        return Told(outcome="understood")

    def _show(self, found: Region) -> None:
        regions = {("uid", "main"): found}
        rows = rows_of(HOLDERS, regions, {})
        containers = containers_of(HOLDERS, regions, self._counters, now_ns=self._cases * SECOND_NS)
        if self._cases % SHOW_EVERY == 0:
            self._metrics.look = Look(rows=rows, containers=containers)
            generate_latest(self._registry)

    async def finish(self) -> str:
        """Read a good region."""
        told = await self.take(Case(kind="region", body=_good().data()))
        return "" if told.outcome == "understood" else "a good region is refused afterwards"

    def processor_s(self) -> float:
        return time.process_time()

    def resident_mib(self) -> float:
        return resident_mib()


def _good() -> Built:
    processes = [
        Process(pid, (Used(pid << 20), Used(7)), launches=pid, last_launch_ns=pid)
        for pid in range(1, 5)
    ]
    return Built(uuids=UUIDS, processes=processes)


class Regions:
    """Usage regions."""

    name = "regions"
    full = 100_000
    few = 3_000
    is_shrunk = True

    def make(self, seed: str, number: int) -> Case:
        """Make a region: damaged bytes, words at the edges of their range, wrong sizes."""
        chance = chance_of(seed, self.name, number)
        data = bytearray(_GOOD)
        if number % 500 == 3:
            data = bytearray(_large(chance))
        for _ in range(chance.randint(1, 5)):
            at = chance.randrange(HEADER_BYTES if chance.random() < 0.5 else len(data))
            if chance.random() < 0.5:
                data[at] = chance.randrange(256)
            else:
                word = struct.pack("<Q", pick(chance, WORDS))
                at -= at % len(word)
                data[at : at + len(word)] = word
        if chance.random() < 0.1:
            del data[chance.randrange(len(data)) :]
        if chance.random() < 0.03:
            data += bytes(chance.randrange(5000))
        if chance.random() < 0.6 and len(data) >= LINE:
            seal(data)
        return Case(kind="region", body=bytes(data))

    @asynccontextmanager
    async def service(self) -> AsyncIterator[_Agent]:
        """Assemble the objects with which an agent reads regions."""
        with tempfile.TemporaryDirectory(prefix="hami-fuzz-") as folder:
            yield _Agent(Path(folder))


_GOOD = _good().data()


def _large(chance: random.Random) -> bytes:
    """Return a region with the most slots, all owned by processes that may not exist."""
    everybody = [
        Process(chance.randrange(1, 1 << 22), (Used(1), Used(1)), namespace=slot)
        for slot in range(2048)
    ]
    data = Built(uuids=UUIDS, processes=everybody, slots=2048).data()
    assert len(data) <= SIZE_MAX
    return data
