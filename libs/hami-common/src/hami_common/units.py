# SPDX-License-Identifier: Apache-2.0
"""Parses Kubernetes quantities and converts between units, once, at the edge.

Everything behind this module counts memory in MiB (2**20 bytes) and compute in percent of one
device, both as ``int``. Grammar of quantities: Kubernetes API conventions,
``k8s.io/apimachinery/pkg/api/resource`` (v1.34): a decimal number with an optional binary suffix
(Ki … Ei), decimal suffix (n, u, m, k … E) or exponent.
"""

import re
from decimal import Decimal
from fractions import Fraction

from hami_common.bounds import INT32_MAX as INT32_MAX  # noqa: PLC0414 - others import it here
from hami_common.errors import RequestInvalid

MIB_BYTES = 1 << 20

_QUANTITY = re.compile(
    r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]+|n|u|m|k|M|G|T|P|E)?"
)
_SUFFIX: dict[str, Fraction] = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(1 << 10),
    "Mi": Fraction(1 << 20),
    "Gi": Fraction(1 << 30),
    "Ti": Fraction(1 << 40),
    "Pi": Fraction(1 << 50),
    "Ei": Fraction(1 << 60),
}
_BYTE_SUFFIXES = ("Mi", "Gi", "Ti", "Pi", "Ei")
_EXPONENT_LIMIT = 30
_LENGTH_LIMIT = 64
_PLAIN_DIGITS = 9
"""Numbers with this many digits are always below ``INT32_MAX``: too few for bytes."""
_DIGITS_LIMIT = 20
"""No number of 64 bits has more."""


def whole(text: str, *, least: int = 0, most: int = INT32_MAX) -> int | None:
    """Return the whole number that all of ``text`` is, within ``least`` to ``most``, else ``None``.

    ``text`` may have blanks around it and a sign where ``least`` is negative. Use this for every
    whole number from outside: ``int()`` raises for thousands of digits and for odd digits such as
    ``²``, and accepts underscores.
    """
    stripped = text.strip()
    digits = stripped.removeprefix("-") if least < 0 else stripped
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > _DIGITS_LIMIT:
        return None
    number = int(stripped)
    return number if least <= number <= most else None


def real(text: str, *, least: float, most: float) -> float | None:
    """Return the number that ``text`` is, within ``least`` to ``most``, else ``None``.

    Never an infinity and never NaN.
    """
    if len(text) > _LENGTH_LIMIT:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if least <= number <= most else None


def shown(text: str) -> str:
    """Quote ``text`` for an error, shortened to 60 characters."""
    most = 60
    return repr(text if len(text) <= most else f"{text[:most]}…")


def parse_quantity(text: str) -> Fraction | None:
    """Exact value of a Kubernetes quantity, or ``None`` when ``text`` is not one."""
    if len(text) > _LENGTH_LIMIT:
        return None
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        return None
    sign, number, suffix = match[1], match[2], match[3] or ""
    value = Fraction(Decimal(number))
    if suffix in _SUFFIX:
        value *= _SUFFIX[suffix]
    else:
        exponent = int(suffix[1:])
        if abs(exponent) > _EXPONENT_LIMIT:
            return None
        value *= Fraction(10) ** exponent
    return -value if sign == "-" else value


def parse_count(
    text: str | int, *, field: str, unit: str, at_most: int = INT32_MAX, unit_mib: int = 0
) -> int:
    """Whole, non-negative number of ``unit`` asked for in ``field``.

    Any other value raises ``RequestInvalid`` with the fix. ``unit_mib`` is the size of one unit of
    memory (0: not memory). A value of memory that looks like bytes (``3Gi``, ``512Mi``) is rejected
    with the number the user most likely meant: read as a count it would request a million times too
    much, and read as bytes the same manifest would change its meaning.
    """
    raw = str(text)
    if len(raw) <= _PLAIN_DIGITS and raw.isascii() and raw.isdigit() and int(raw) <= at_most:
        return int(raw)  # the most common form, at a tenth of the cost
    value = parse_quantity(raw)
    if value is None:
        raise RequestInvalid(
            field=field,
            problem=f"{shown(raw)} is not a Kubernetes quantity",
            fix=f"write a whole number of {unit}",
        )
    if value < 0:
        raise RequestInvalid(
            field=field,
            problem=f"{shown(raw)} is negative",
            fix=f"write a whole number of {unit}, 0 or more",
        )
    if value.denominator != 1:
        raise RequestInvalid(
            field=field,
            problem=f"{shown(raw)} is not a whole number",
            fix=f"write a whole number of {unit}",
        )
    if unit_mib and (
        raw.strip().endswith(_BYTE_SUFFIXES) or INT32_MAX < value <= INT32_MAX * MIB_BYTES
    ):
        meant = -(-value // (MIB_BYTES * unit_mib))
        raise RequestInvalid(
            field=field,
            problem=f"{shown(raw)} looks like bytes",
            fix=f"the unit is {unit}, not bytes: write {meant}",
        )
    if value > at_most:
        raise RequestInvalid(
            field=field,
            problem=f"{shown(raw)} is too large",
            fix=f"write at most {at_most} (unit: {unit})",
        )
    return int(value)


def parse_percent(text: str | int, *, field: str) -> int:
    """Percent 0..100; a fraction is rounded up, as users of the existing system rely on."""
    raw = str(text)
    value = parse_quantity(raw)
    if value is None:
        raise RequestInvalid(
            field=field,
            problem=f"{shown(raw)} is not a Kubernetes quantity",
            fix="write a percentage from 0 to 100",
        )
    percent = -((-value).__floor__())
    if not 0 <= percent <= 100:  # noqa: PLR2004 - percent
        raise RequestInvalid(
            field=field,
            problem=f"{shown(raw)} is outside 0..100",
            fix="write a percentage from 0 to 100",
        )
    return int(percent)
