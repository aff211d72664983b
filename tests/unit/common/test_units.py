# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities, and the errors that show the user what to write."""

from fractions import Fraction

import pytest

from hami_common.errors import RequestInvalid
from hami_common.units import (
    INT32_MAX,
    parse_count,
    parse_percent,
    parse_quantity,
    real,
    shown,
    whole,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("3000", 3000),
        ("+5", 5),
        ("-5", -5),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("100m", Fraction(1, 10)),
        ("1u", Fraction(1, 10**6)),
        ("1n", Fraction(1, 10**9)),
        ("3k", 3000),
        ("3M", 3 * 10**6),
        ("3G", 3 * 10**9),
        ("3T", 3 * 10**12),
        ("3P", 3 * 10**15),
        ("3E", 3 * 10**18),
        ("3Ki", 3 << 10),
        ("3Mi", 3 << 20),
        ("3Gi", 3 << 30),
        ("3Ti", 3 << 40),
        ("3Pi", 3 << 50),
        ("3Ei", 3 << 60),
        ("1.5Gi", 3 << 29),
        ("3e3", 3000),
        ("3E3", 3000),
        ("3e-3", Fraction(3, 1000)),
        ("3E+3", 3000),
        (" 7 ", 7),
    ],
)
def test_quantities_have_their_exact_value(text: str, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "-", "abc", "3 Gi", "3gi", "3ki", "3K", "1e", "1e999", "0x10", "1_000", "٣"),
        *("9" * 65, "3GiB", "--1", "1.2.3", "NaN", "inf"),
    ],
)
def test_invalid_quantity_is_none(text: str) -> None:
    assert parse_quantity(text) is None


@pytest.mark.parametrize(
    ("text", "count"), [("0", 0), ("3000", 3000), (7, 7), ("3k", 3000), ("2000m", 2), ("1e3", 1000)]
)
def test_counts_are_whole_numbers_however_written(text: str | int, count: int) -> None:
    assert parse_count(text, field="f", unit="MiB", unit_mib=1) == count


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ("many", "'many' is not a Kubernetes quantity", "write a whole number of MiB"),
        ("-1", "'-1' is negative", "write a whole number of MiB, 0 or more"),
        ("0.5", "'0.5' is not a whole number", "write a whole number of MiB"),
        ("100m", "'100m' is not a whole number", "write a whole number of MiB"),
        ("3Gi", "'3Gi' looks like bytes", "the unit is MiB, not bytes: write 3072"),
        ("1Gi", "'1Gi' looks like bytes", "the unit is MiB, not bytes: write 1024"),
        ("512Mi", "'512Mi' looks like bytes", "the unit is MiB, not bytes: write 512"),
        ("1.5Gi", "'1.5Gi' looks like bytes", "the unit is MiB, not bytes: write 1536"),
        ("3221225472", "'3221225472' looks like bytes", "not bytes: write 3072"),
        ("3000000000", "'3000000000' looks like bytes", "not bytes: write 2862"),
        ("1E", "'1E' is too large", f"write at most {INT32_MAX} (unit: MiB)"),
    ],
)
def test_refused_amount_of_memory_names_the_fix(text: str, problem: str, fix: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        parse_count(text, field="limits[m]", unit="MiB", unit_mib=1)
    assert caught.value.field == "limits[m]"
    assert caught.value.problem == problem
    assert fix in caught.value.fix
    assert str(caught.value) == f"limits[m]: {problem}; {caught.value.fix}"


def test_suggested_number_is_in_the_unit_of_the_resource_rounded_up() -> None:
    with pytest.raises(RequestInvalid, match=r"not bytes: write 13$"):
        parse_count("3300Mi", field="f", unit="units of 256 MiB", unit_mib=256)


def test_counts_that_are_no_memory_may_have_binary_suffixes_within_their_limit() -> None:
    assert parse_count("1Ki", field="f", unit="devices") == 1024
    with pytest.raises(RequestInvalid, match=r"write at most 64 \(unit: devices\)"):
        parse_count("65", field="f", unit="devices", at_most=64)
    assert parse_count("64", field="f", unit="devices", at_most=64) == 64


@pytest.mark.parametrize(
    ("text", "percent"),
    [("0", 0), ("50", 50), ("100", 100), ("12.1", 13), ("99.9", 100), ("-0.5", 0), (30, 30)],
)
def test_percentages_round_up(text: str | int, percent: int) -> None:
    assert parse_percent(text, field="f") == percent


@pytest.mark.parametrize("text", ["101", "100.1", "-1", "x", "1Gi"])
def test_percentages_outside_their_range_are_refused(text: str) -> None:
    with pytest.raises(RequestInvalid, match="write a percentage from 0 to 100"):
        parse_percent(text, field="f")


# --- numbers in text ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        (" 7 ", 7),
        ("0007", 7),
        (str(INT32_MAX), INT32_MAX),
        (str(INT32_MAX + 1), None),
        ("-1", None),
        ("+1", None),
        ("1_0", None),
        ("1.0", None),
        ("", None),
        ("²", None),
        ("\u0661", None),
        ("0" * 20 + "1", None),
        ("9" * 5000, None),
    ],
)
def test_whole_number_in_text_is_read_within_its_range(text: str, value: int | None) -> None:
    assert whole(text) == value


def test_range_of_a_whole_number_is_the_callers() -> None:
    assert [whole(text, least=-1, most=3) for text in ("-2", "-1", "3", "4")] == [None, -1, 3, None]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", 0.5),
        ("10", 10.0),
        ("1e1", 10.0),
        ("10.1", None),
        ("-0.1", None),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
        ("9" * 5000, None),
        ("x", None),
        ("", None),
    ],
)
def test_real_number_in_text_is_read_within_its_range(text: str, value: float | None) -> None:
    assert real(text, least=0.0, most=10.0) == value


def test_text_in_an_error_is_short() -> None:
    assert shown("3Gi") == "'3Gi'"
    assert shown("x" * 61) == repr("x" * 60 + "…")
