# SPDX-License-Identifier: Apache-2.0
"""The limit on PodResources requests."""

from hami_sim.kubelet.podresources import TokenBucket


def test_burst_then_rate() -> None:
    time_s = 0.0
    bucket = TokenBucket(100.0, 10, now_s=lambda: time_s)
    assert [bucket.allow() for _ in range(12)] == [True] * 10 + [False] * 2
    time_s = 0.05
    assert [bucket.allow() for _ in range(6)] == [True] * 5 + [False]
    time_s = 100.0
    assert sum(bucket.allow() for _ in range(50)) == 10


def test_no_rate_is_no_limit() -> None:
    bucket = TokenBucket(0.0, 0, now_s=lambda: 0.0)
    assert all(bucket.allow() for _ in range(1000))
