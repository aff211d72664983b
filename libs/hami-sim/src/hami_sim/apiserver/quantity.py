# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities: parsing to exact numbers and the canonical text the server stores.

`3000` is stored as `3k`, `1024Mi` as `1Gi`, `0.5` as `500m`; whoever reads a pod back must cope
with that, so the simulated server rewrites quantities exactly as the real one does.
Rules: ``k8s.io/apimachinery/pkg/api/resource`` (Kubernetes 1.34). Precision is one nano-unit,
rounded away from zero; magnitudes are capped at 2^63-1.
"""

from __future__ import annotations

import re
from decimal import ROUND_UP, Decimal
from functools import lru_cache
from typing import Final

import msgspec

_BINARY: Final = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL: Final = {
    "n": -9,
    "u": -6,
    "m": -3,
    "": 0,
    "k": 3,
    "M": 6,
    "G": 9,
    "T": 12,
    "P": 15,
    "E": 18,
}
_DECIMAL_SUFFIX: Final = {power: suffix for suffix, power in _DECIMAL.items()}
_BINARY_SUFFIX: Final = {power: suffix for suffix, power in _BINARY.items()}
_PATTERN: Final = re.compile(
    r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([KMGTPE]i)|([eE][+-]?[0-9]+)|([numkMGTPE]))?"
)
_NANO: Final = Decimal(1).scaleb(-9)
_MAX: Final = Decimal(2**63 - 1)

DECIMAL_SI: Final = "DecimalSI"
DECIMAL_EXPONENT: Final = "DecimalExponent"
BINARY_SI: Final = "BinarySI"


class Quantity(msgspec.Struct, frozen=True):
    """An exact amount and the notation it was written in."""

    amount: Decimal
    notation: str = DECIMAL_SI

    @property
    def is_integer(self) -> bool:
        """Whether the amount is a whole number."""
        return self.amount == self.amount.to_integral_value()

    def __str__(self) -> str:
        """Render canonically: largest suffix without a fraction."""
        if not self.amount:
            return "0"
        notation = self.notation
        if notation == BINARY_SI and (abs(self.amount) < 1024 or not self.is_integer):  # noqa: PLR2004 - kibi
            notation = DECIMAL_SI
        if notation == BINARY_SI:
            number, power = int(self.amount), 0
            while number % 1024 == 0 and power < max(_BINARY.values()):
                number //= 1024
                power += 1
            return f"{number}{_BINARY_SUFFIX.get(power, '')}"
        number, power = int(self.amount.scaleb(9)), -9
        while number % 1000 == 0 and power < max(_DECIMAL.values()):
            number //= 1000
            power += 3
        if notation == DECIMAL_EXPONENT:
            return f"{number}e{power}" if power else str(number)
        return f"{number}{_DECIMAL_SUFFIX[power]}"


def parse_quantity(text: object) -> Quantity:
    """Read a quantity from JSON (string or number); ValueError when it is malformed."""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        msg = f"not a quantity: {text!r}"
        raise ValueError(msg)  # noqa: TRY004 - callers handle one error for malformed input
    return _parse(text)


@lru_cache(maxsize=65_536, typed=True)
def _parse(text: str | float) -> Quantity:
    match = _PATTERN.fullmatch(text.strip() if isinstance(text, str) else repr(text))
    if match is None:
        msg = (
            "quantities must match the regular expression "
            "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        )
        raise ValueError(msg)
    sign, digits, binary, exponent, suffix = match.groups()
    amount = Decimal(digits)
    notation = DECIMAL_SI
    if binary:
        amount *= 1024 ** _BINARY[binary]
        notation = BINARY_SI
    elif exponent:
        amount = amount.scaleb(int(exponent[1:]))
        notation = DECIMAL_EXPONENT
    elif suffix:
        amount = amount.scaleb(_DECIMAL[suffix])
    amount = min(amount.quantize(_NANO, rounding=ROUND_UP) if amount < _MAX else _MAX, _MAX)
    return Quantity(-amount if sign == "-" else amount, notation)


def canonical(text: object) -> str:
    """Return the text under which the server stores a quantity."""
    return str(parse_quantity(text))


def add(left: object, right: object) -> str:
    """Sum two quantities, in the notation of the first that is not zero."""
    one, two = parse_quantity(left), parse_quantity(right)
    notation = one.notation if one.amount else two.notation
    return str(Quantity(one.amount + two.amount, notation))
