# SPDX-License-Identifier: Apache-2.0
"""Quantities: exact amounts, canonical text."""

from decimal import Decimal

import pytest

from hami_sim.apiserver.quantity import add, canonical, parse_quantity


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1", "1"),
        ("500m", "0.5"),
        ("1k", "1000"),
        ("1Ki", "1024"),
        ("1.5Gi", str(3 * 2**29)),
        ("-3", "-3"),
        ("1e3", "1000"),
        ("1E", "1000000000000000000"),
        (".5", "0.5"),
        (3000, "3000"),
        (0.25, "0.25"),
        ("1n", "0.000000001"),
        ("0.1n", "0.000000001"),
    ],
)
def test_parse_reads_the_exact_amount(text: object, amount: str) -> None:
    assert parse_quantity(text).amount == Decimal(amount)


@pytest.mark.parametrize("text", ["", "x", "1 2", "1KB", "--1", None, True, [], "1e", "Gi"])
def test_parse_refuses_what_is_not_a_quantity(text: object) -> None:
    with pytest.raises(ValueError, match="quantit"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("3000", "3k"),
        ("3001", "3001"),
        ("1024Mi", "1Gi"),
        ("1536Mi", "1536Mi"),
        ("1023", "1023"),
        ("0.5", "500m"),
        ("0.5Gi", "512Mi"),
        ("0.5Ki", "512"),
        ("1000m", "1"),
        ("1e3", "1e3"),
        ("1e4", "10e3"),
        ("0", "0"),
        ("0Gi", "0"),
        ("-2000", "-2k"),
        ("1500m", "1500m"),
        ("10000000000000000000", "9223372036854775807"),
    ],
)
def test_canonical_text_has_the_largest_suffix_without_a_fraction(
    written: str, stored: str
) -> None:
    assert canonical(written) == stored
    assert canonical(stored) == stored


def test_sums_keep_the_notation_of_the_first_amount() -> None:
    assert add("1Gi", "1Gi") == "2Gi"
    assert add("0", "1Gi") == "1Gi"
    assert add("500m", "1500m") == "2"
