# SPDX-License-Identifier: Apache-2.0
"""Token buckets by source."""

from hami_webhook.core.rates import MOST_SOURCES, SourceRates


def spent(rates: SourceRates, source: str, *, now_s: float, most: int = 1000) -> int:
    """Count the tokens that the source can spend one by one."""
    for number in range(most):
        if not rates.may_spend(source, now_s=now_s):
            return number
        rates.spend(source, 1.0, now_s=now_s)
    return most


def test_burst_is_spent_and_flows_back() -> None:
    rates = SourceRates(per_s=2.0, burst=10.0)
    assert spent(rates, "a", now_s=0.0) == 10
    assert spent(rates, "a", now_s=3.0) == 6
    assert spent(rates, "a", now_s=1e6) == 10


def test_sources_have_each_their_own() -> None:
    rates = SourceRates(per_s=0.0, burst=3.0)
    assert spent(rates, "a", now_s=0.0) == 3
    assert spent(rates, "b", now_s=0.0) == 3


def test_debt_of_one_large_request_is_paid_back_first() -> None:
    rates = SourceRates(per_s=1.0, burst=1.0)
    rates.spend("a", 5.0, now_s=0.0)
    assert not rates.may_spend("a", now_s=3.9)
    assert rates.may_spend("a", now_s=4.1)


def test_clock_that_moves_backward_adds_no_tokens() -> None:
    rates = SourceRates(per_s=1.0, burst=1.0)
    assert spent(rates, "a", now_s=100.0) == 1
    assert spent(rates, "a", now_s=0.0) == 0


def test_sources_beyond_the_most_push_out_the_oldest() -> None:
    rates = SourceRates(per_s=0.0, burst=1.0)
    for number in range(MOST_SOURCES):
        assert spent(rates, str(number), now_s=0.0) == 1
    assert spent(rates, "0", now_s=0.0) == 0
    assert spent(rates, "new", now_s=0.0) == 1
    assert spent(rates, "0", now_s=0.0) == 0
    assert spent(rates, "1", now_s=0.0) == 1
