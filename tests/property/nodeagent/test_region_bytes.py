# SPDX-License-Identifier: Apache-2.0
"""The reader answers for any content that a tenant writes into its region: 10^5 random damages.

Half of them have a valid checksum, so that they reach every part. Costs about 5 s.
"""

import random

from hami_nodeagent.core import region
from hami_nodeagent.core.region import Region, parse
from tests.support.regions import Built, Process, Used, seal

DAMAGES = 100_000
_VALUES = bytes((0, 1, 0x7F, 0x80, 0xFF))


def test_no_bytes_raise() -> None:
    chance = random.Random(20261121)
    good = Built(
        uuids=("GPU-a", "GPU-b"),
        processes=[Process(n + 1, (Used(n), Used(n))) for n in range(4)],
        slots=4,
    ).data()
    understood = 0
    for number in range(DAMAGES):
        data = bytearray(good)
        bits = chance.getrandbits(96)
        for _ in range(1 + (bits & 3)):
            bits >>= 20
            at = (bits & 0x3FF) % (128 if bits & 0x400 else len(data))
            data[at] = _VALUES[bits % 5] if bits & 0x800 else bits & 0xFF
        if number % 10 == 0:
            del data[chance.getrandbits(11) % len(data) :]
        if number % 2 and len(data) >= region.LINE:
            seal(data)
        understood += isinstance(parse(bytes(data)), Region)
    assert DAMAGES / 100 < understood < DAMAGES * 0.99
