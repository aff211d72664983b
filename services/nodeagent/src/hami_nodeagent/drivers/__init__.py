# SPDX-License-Identifier: Apache-2.0
"""Node halves of the vendors, and the one list of them.

A driver is chosen by name in the agent's settings and built from its own settings table; nothing
registers itself.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from hami_common.errors import SettingsInvalid
from hami_nodeagent.drivers.nvidia_driver import NvidiaDriver, NvidiaDriverSettings
from hami_nodeagent.drivers.protocol import Driver
from hami_nodeagent.drivers.simulated import SimulatedDriver, SimulatedDriverSettings


class DriverKind(Struct, frozen=True, kw_only=True):
    """One driver that can be chosen."""

    name: str
    settings: type[Struct]
    build: Callable[..., Driver]


DRIVERS = (
    DriverKind(name="nvidia", settings=NvidiaDriverSettings, build=NvidiaDriver),
    DriverKind(name="simulated", settings=SimulatedDriverSettings, build=SimulatedDriver),
)


def build_driver(name: str, settings: Mapping[str, Any]) -> Driver:
    """The driver ``name`` with its settings table; ``SettingsInvalid`` names what is wrong."""
    kind = next((kind for kind in DRIVERS if kind.name == name), None)
    if kind is None:
        raise SettingsInvalid(
            field="drivers",
            problem=f"there is no driver {name!r}",
            fix=f"use one of {', '.join(kind.name for kind in DRIVERS)}",
        )
    try:
        return kind.build(msgspec.convert(settings, kind.settings))
    except msgspec.ValidationError as error:
        raise SettingsInvalid(
            field=f"drivers.{name}", problem=str(error), fix="correct or remove the entry"
        ) from error


__all__ = ["DRIVERS", "Driver", "DriverKind", "build_driver"]
