# SPDX-License-Identifier: Apache-2.0
"""The machine's clock. Seconds throughout.

Only this module reads the machine's time; all other code gets a ``Clock``.
"""

import time

import anyio


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        """Return Unix seconds."""
        return time.time()  # noqa: TID251 - the Clock of all other code

    def monotonic_s(self) -> float:
        """Return seconds that never decrease."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Sleep."""
        await anyio.sleep(delay_s)
