# SPDX-License-Identifier: Apache-2.0
"""A million random shares come and go: the table has their exact sums, and zero at the end."""

import random

import pytest

from hami_core.table.table import DeviceTable, Usage
from tests.support.builders import devices, held, share

OPERATIONS = 1_000_000
MEMORY_MIB = 81_559
pytestmark = pytest.mark.timeout(300)


def test_random_amounts_return_to_zero() -> None:
    rng = random.Random(7)
    table = DeviceTable()
    table.upsert_node(devices("n", 4, memory_mib=MEMORY_MIB))
    uuids = [f"n-nvidia-{index}" for index in range(4)]
    sums = {uuid: [0, 0, 0] for uuid in uuids}
    booked: list[tuple[str, int, int]] = []
    for _ in range(OPERATIONS):
        if booked and rng.random() < 0.5:
            uuid, mib, core = booked.pop(rng.randrange(len(booked)))
            sign = -1
        else:
            uuid, mib, core = rng.choice(uuids), rng.randint(1, MEMORY_MIB), rng.randint(0, 100)
            booked.append((uuid, mib, core))
            sign = 1
        change = table.book if sign > 0 else table.unbook
        change("n", [held(share(uuid, mib, core))])
        sums[uuid] = [a + sign * b for a, b in zip(sums[uuid], (mib, core, 1), strict=True)]
        used = table.usage("n", uuid)
        assert used is not None
        assert [used.memory_mib, used.core_pct, used.slots] == sums[uuid]
    table.check()
    for uuid, mib, core in booked:
        table.unbook("n", [held(share(uuid, mib, core))])
    table.check()
    assert all(
        usage == Usage(memory_mib=0, core_pct=0, slots=0, exclusive_holders=0)
        for _, _, usage in table.usages()
    )
