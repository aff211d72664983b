# SPDX-License-Identifier: Apache-2.0
"""Random creations and removals on divided devices: the chip's tables hold, others' parts stay.

Seeds are fixed: a run is the same each time. The test reads the hardware's state from the machine,
not from the driver. ``HAMI_PARTITION_STEPS`` makes traces longer.
"""

import os
import random
from pathlib import Path

import pytest
from msgspec import structs

from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.drivers.errors import DriverError, PartitionBusy, PartitionRefused
from hami_nodeagent.drivers.partitioner import Partitioner
from tests.support.vendor_parts import (
    ASCEND_MODELS,
    KIND_BY_VENDOR,
    Kind,
    PartBench,
    ascend_kind,
)

pytestmark = pytest.mark.anyio

STEPS = int(os.environ.get("HAMI_PARTITION_STEPS", "25"))
SEEDS = (11, 4711)
TRACES = {
    **{f"ascend-{model}": ascend_kind(model) for model in ASCEND_MODELS},
    **{vendor: kind for vendor, kind in KIND_BY_VENDOR.items() if vendor != "ascend"},
}
_TROUBLES = ("fail", "late", "stall", "garbage")


class Trace:
    """One run of random steps, and the expected partitions after each."""

    def __init__(self, kind: Kind, bench: PartBench, seed: int) -> None:
        self.kind = kind
        self.bench = bench
        self.dice = random.Random(f"{kind.vendor}/{kind.model}/{seed}")
        self.live: dict[tuple[str, str], Instance] = {}
        self.made = self.refused = self.troubled = 0

    def wanted(self) -> Wanted:
        """Any size of the table; where there is none, any size at all."""
        one = self.bench.wanted(self.dice.randrange(2), self.dice.randrange(len(self.kind.sizes)))
        if one.profile:
            return one
        step = self.kind.step_mib
        most = self.bench.tools.make.memory_mib // step
        return structs.replace(
            one,
            memory_mib=self.dice.randint(1, most // 2) * step,
            core_pct=self.dice.randint(5, 90),
        )

    async def step(self, partitioner: Partitioner) -> None:
        if self.live and self.dice.random() < 0.4:
            await self.release(partitioner, self.dice.choice(sorted(self.live)))
        else:
            await self.create(partitioner)

    async def create(self, partitioner: Partitioner) -> None:
        if self.kind.create and self.dice.random() < 0.25:
            self.bench.tools.trip(self.kind.create.partition("=")[0], self.dice.choice(_TROUBLES))
        try:
            made = await partitioner.create(self.wanted())
        except PartitionRefused:
            self.refused += 1
        except DriverError:
            self.troubled += 1
        else:
            self.made += 1
            assert (made.uuid, made.instance_id) not in self.live
            self.live[made.uuid, made.instance_id] = made
        self.bench.tools.forgive()

    async def release(self, partitioner: Partitioner, key: tuple[str, str]) -> None:
        instance = self.live[key]
        index = self.bench.uuids.index(instance.uuid)
        if self.kind.refuses_busy and self.dice.random() < 0.2:
            self.bench.tools.occupy(index, instance.instance_id)
            with pytest.raises(PartitionBusy):
                await partitioner.destroy(instance)
            self.bench.tools.occupy(index, instance.instance_id, busy=False)
        else:
            await partitioner.destroy(self.live.pop(key))

    async def check(self, partitioner: Partitioner) -> None:
        for index in range(2):
            assert not self.bench.overbooked(index)
        there = {(one.uuid, one.instance_id): one for one in await partitioner.instances()}
        assert there.keys() == self.live.keys()
        for key, one in self.live.items():
            assert there[key].handles == one.handles


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", sorted(TRACES))
async def test_no_trace_violates_the_tables_or_touches_what_is_owned(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = TRACES[name]
    bench = PartBench(kind, tmp_path)
    bench.answer_in_process(monkeypatch)
    trace = Trace(kind, bench, seed)
    partitioner = bench.partitioner()
    for _ in range(STEPS):
        await trace.step(partitioner)
        await trace.check(partitioner)
    assert trace.made > STEPS // 8
    assert trace.refused + trace.troubled
    for key in sorted(trace.live):
        await partitioner.destroy(trace.live[key])
    assert not bench.litter(0)
    assert not bench.litter(1)
