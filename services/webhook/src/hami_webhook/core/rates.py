# SPDX-License-Identifier: Apache-2.0
"""Bounds the use of each source by a token bucket.

A source that has spent its burst gets the amount that is refilled per second. Units are the
caller's: events, or seconds of processor time. Seconds of the caller's clock.
"""

from collections import OrderedDict
from typing import Final

from msgspec import Struct

MOST_SOURCES: Final = 1024
"""Maximum remembered sources; the least recently used is dropped first."""


class _Bucket(Struct, kw_only=True):
    left: float
    at_s: float


class SourceRates:
    """Token buckets by source."""

    def __init__(self, *, per_s: float, burst: float) -> None:
        """Let each source spend ``burst`` at once and ``per_s`` on average."""
        self._per_s = per_s
        self._burst = burst
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def may_spend(self, source: str, *, now_s: float) -> bool:
        """Return whether the source has any tokens left."""
        return self._bucket(source, now_s).left > 0

    def spend(self, source: str, amount: float, *, now_s: float) -> None:
        """Charge ``amount`` to the source, which may fall below 0 by one request."""
        self._bucket(source, now_s).left -= amount

    def _bucket(self, source: str, now_s: float) -> _Bucket:
        bucket = self._buckets.get(source)
        if bucket is None:
            if len(self._buckets) >= MOST_SOURCES:
                self._buckets.popitem(last=False)
            bucket = self._buckets[source] = _Bucket(left=self._burst, at_s=now_s)
        self._buckets.move_to_end(source)
        gained = max(0.0, now_s - bucket.at_s) * self._per_s
        bucket.left = min(self._burst, bucket.left + gained)
        bucket.at_s = now_s
        return bucket
