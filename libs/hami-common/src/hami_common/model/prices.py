# SPDX-License-Identifier: Apache-2.0
"""Prices of device time, as the settings give them."""

import math
import re
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from hami_common.errors import SettingsInvalid

MICRO: Final = 1_000_000
PRICE_MOST: Final = 1_000_000.0
ANY_MODEL: Final = "*"
_CURRENCY: Final = re.compile(r"[A-Z]{3}")


class Prices(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of device time."""

    currency: str = ""
    """ISO 4217 code, such as ``USD`` or ``CNY``; empty: no prices."""
    device_hour: dict[str, float] = {}
    """Price of one hour of a whole device, by model as ``hamictl get devices`` shows it; ``*``: of
    all other models. Case does not matter. A share costs its part of the device.
    """

    def check(self) -> None:
        """Raise ``SettingsInvalid`` for prices that cannot be used."""
        if not self.currency and not self.device_hour:
            return
        if not _CURRENCY.fullmatch(self.currency):
            raise SettingsInvalid(
                field="prices.currency",
                problem=f"{self.currency[:40]!r} is no code of a currency",
                fix="give three capital letters, such as USD (ISO 4217)",
            )
        if not self.device_hour:
            raise SettingsInvalid(
                field="prices.device_hour",
                problem="has no price",
                fix='give one per model, or "*" = PRICE for all',
            )
        seen: set[str] = set()
        for model, price in self.device_hour.items():
            field = f"prices.device_hour.{model}"
            if not math.isfinite(price) or not 0 <= price <= PRICE_MOST:
                raise SettingsInvalid(
                    field=field,
                    problem=f"{price} is no price",
                    fix=f"give 0 to {PRICE_MOST:.0f} per hour of a device",
                )
            if model.casefold() in seen:
                raise SettingsInvalid(
                    field=field, problem="is given twice", fix="keep one spelling of the model"
                )
            seen.add(model.casefold())

    def micros(self) -> Callable[[str], int | None]:
        """Return a function that gives the price of a model in millionths; ``None``: it has none.

        A price is rounded to millionths.
        """
        known = {model.casefold(): round(one * MICRO) for model, one in self.device_hour.items()}
        return lambda model: known.get(model.casefold(), known.get(ANY_MODEL))
