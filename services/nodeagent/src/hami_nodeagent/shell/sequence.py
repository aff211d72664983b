# SPDX-License-Identifier: Apache-2.0
"""Numbers the messages of one run of the agent: (boot id, seq) orders them (events/inventory)."""

import secrets
from itertools import count

from hami_common.ports import Clock


class Sequence:
    """A boot id that sorts by start time, and a number that grows."""

    def __init__(self, clock: Clock) -> None:
        self.boot_id = f"{int(clock.now_s() * 1000):013d}-{secrets.token_hex(4)}"
        self._numbers = count(1)

    def next(self) -> int:
        """The next number of this run."""
        return next(self._numbers)
