# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities with their notation, and the canonical text the server stores.

`3000` is stored as `3k`, `1024Mi` as `1Gi`, `0.5` as `500m`; a client that reads a pod
back must accept that, so the simulated server rewrites quantities exactly as the real one does.
Rules: ``k8s.io/apimachinery/pkg/api/resource`` (Kubernetes 1.34). Precision is one nano-unit,
rounded away from zero; magnitudes are capped at 2^63-1.
"""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache
from math import ceil
from typing import Final

import msgspec

from hami_common import units

_BINARY_SUFFIXES: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL_SUFFIXES: Final = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E")
"""Of 10^-9, 10^-6, and so on."""
_MOST_POWER: Final = 18
_NANOS: Final = 10**9
_MOST_NANOS: Final = (2**63 - 1) * _NANOS

DECIMAL_SI: Final = "DecimalSI"
DECIMAL_EXPONENT: Final = "DecimalExponent"
BINARY_SI: Final = "BinarySI"


class Quantity(msgspec.Struct, frozen=True):
    """An exact amount and the notation it was written in."""

    amount: Decimal
    notation: str = DECIMAL_SI

    @property
    def is_integer(self) -> bool:
        """Return true if the amount is a whole number."""
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
            while number % 1024 == 0 and power < len(_BINARY_SUFFIXES) - 1:
                number //= 1024
                power += 1
            return f"{number}{_BINARY_SUFFIXES[power]}"
        number, power = int(self.amount.scaleb(9)), -9
        while number % 1000 == 0 and power < _MOST_POWER:
            number //= 1000
            power += 3
        if notation == DECIMAL_EXPONENT:
            return f"{number}e{power}" if power else str(number)
        return f"{number}{_DECIMAL_SUFFIXES[power // 3 + 3]}"


def parse_quantity(text: object) -> Quantity:
    """Read a quantity from JSON (string or number); ValueError when it is malformed."""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        msg = f"not a quantity: {text!r}"
        raise ValueError(msg)  # noqa: TRY004 - callers handle one error for malformed input
    return _parse(text)


@lru_cache(maxsize=65_536, typed=True)
def _parse(text: str | float) -> Quantity:
    written = text.strip() if isinstance(text, str) else repr(text)
    value = units.parse_quantity(written)
    if value is None:
        msg = (
            "quantities must match the regular expression "
            "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        )
        raise ValueError(msg)
    nanos = min(ceil(abs(value) * _NANOS), _MOST_NANOS)
    amount = Decimal(nanos if value >= 0 else -nanos).scaleb(-9)
    if written.endswith("i"):
        return Quantity(amount, BINARY_SI)
    has_exponent = "e" in written or "E" in written[:-1]
    return Quantity(amount, DECIMAL_EXPONENT if has_exponent else DECIMAL_SI)


def canonical(text: object) -> str:
    """Return the text under which the server stores a quantity."""
    return str(parse_quantity(text))


def add(left: object, right: object) -> str:
    """Sum two quantities, in the notation of the first that is not zero."""
    one, two = parse_quantity(left), parse_quantity(right)
    notation = one.notation if one.amount else two.notation
    return str(Quantity(one.amount + two.amount, notation))
