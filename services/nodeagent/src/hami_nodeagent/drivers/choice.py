# SPDX-License-Identifier: Apache-2.0
"""Decides which vendors besides NVIDIA this node serves, from its settings and its hardware.

A vendor is served if the settings name it, if they simulate its devices, or if its hardware was
detected at start and they contain ``detect``. A named vendor that is unknown is rejected. A
detected vendor that this installation does not configure is reported and not served.
"""

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from hami_common.errors import SettingsInvalid
from hami_common.vendors.catalog import Catalog
from hami_nodeagent.drivers.catalog import build_driver, detectable, is_detected
from hami_nodeagent.drivers.protocol import Driver
from hami_nodeagent.drivers.simulated.driver import SimulatedDriver
from hami_nodeagent.settings import DriversSettings

DETECT = "detect"
_PROFILE, _CONTROL = "simulated_profile", "simulated_control"

_log = logging.getLogger(__name__)


def chosen_drivers(
    settings: DriversSettings, node: str, *, known: AbstractSet[str]
) -> tuple[Driver, ...]:
    """Return drivers of the vendors to serve; ``known``: vendors with requestable resources."""
    words = detectable()
    for word in (*settings.serve, *settings.vendors):
        if word != DETECT and word not in words:
            raise SettingsInvalid(
                field="drivers.serve" if word in settings.serve else f"drivers.vendors.{word}",
                problem=f"{word!r} is no vendor with a driver of this kind",
                fix=f"use {DETECT} or some of {', '.join(words)}",
            )
    found = []
    for word in words:
        table = dict(settings.vendors.get(word, {}))
        if not _is_wanted(word, settings, node):
            continue
        if word not in known:
            _log.warning("vendor without resources is not served", extra={"vendor": word})
            continue
        if _PROFILE in table:
            simulated = {
                "node": node,
                "profile": table.pop(_PROFILE),
                "control": table.pop(_CONTROL, ""),
                **table,
            }
            driver = build_driver("simulated", simulated)
            if driver.vendor != word:
                raise SettingsInvalid(
                    field=f"drivers.vendors.{word}.{_PROFILE}",
                    problem=f"it is a profile of {driver.vendor}",
                    fix=f"name a profile of {word}",
                )
            found.append(driver)
        else:
            found.append(build_driver(word, {"node": node, **table}))
    return tuple(found)


def report_untested(drivers: Sequence[Driver], catalog: Catalog) -> None:
    """Log a warning for each driver of a vendor that was never run on hardware.

    A driver of simulated devices needs none.
    """
    for driver in drivers:
        can = catalog.vendor(driver.vendor).capability
        if not can.hardware_tested and not isinstance(driver, SimulatedDriver):
            _log.warning(
                "vendor driver not tested on hardware",
                extra={"vendor": driver.vendor, "source": can.hardware_status},
            )


def _is_wanted(word: str, settings: DriversSettings, node: str) -> bool:
    table = settings.vendors.get(word, {})
    if word in settings.serve or _PROFILE in table:
        return True
    return DETECT in settings.serve and is_detected(word, {"node": node, **table})
