# SPDX-License-Identifier: Apache-2.0
"""Node halves of the vendors, and the one list of them.

A driver is chosen by name in the agent's settings and built from its own settings table; no driver
registers itself. Vendors that are read through their tools need only a package and an entry here.
A vendor's module ``kind`` has its signs of hardware; its reader is imported when it is built,
because a node has the hardware of one vendor or two, and all drivers would take 3 MiB of each
agent.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from hami_common.errors import SettingsInvalid
from hami_nodeagent.drivers.amd import kind as amd
from hami_nodeagent.drivers.ascend import kind as ascend
from hami_nodeagent.drivers.ascend.settings import AscendToolSettings
from hami_nodeagent.drivers.awsneuron import kind as awsneuron
from hami_nodeagent.drivers.biren import kind as biren
from hami_nodeagent.drivers.cambricon import kind as cambricon
from hami_nodeagent.drivers.enflame import kind as enflame
from hami_nodeagent.drivers.hygon import kind as hygon
from hami_nodeagent.drivers.iluvatar import kind as iluvatar
from hami_nodeagent.drivers.kunlunxin import kind as kunlunxin
from hami_nodeagent.drivers.metax import kind as metax
from hami_nodeagent.drivers.mthreads import kind as mthreads
from hami_nodeagent.drivers.protocol import Driver
from hami_nodeagent.drivers.reader import Reader, Signs, ToolSettings, is_here
from hami_nodeagent.drivers.vastai import kind as vastai

S = TypeVar("S", bound=Struct)


class DriverKind(Struct, frozen=True, kw_only=True):
    """One driver that can be chosen."""

    name: str
    build: Callable[[Mapping[str, Any]], Driver]
    """Build it from its settings table; ``SettingsInvalid`` names the error."""
    signs: Signs | None = None
    """Signs by which the hardware is detected; ``None``: served only if the settings name it."""
    settings: type[ToolSettings] = ToolSettings
    """Type of the settings table of a driver with signs."""


def _through_tool(
    name: str,
    make_reader: Callable[[ToolSettings], Reader],
    signs: Signs,
    *,
    settings: type[ToolSettings] = ToolSettings,
) -> DriverKind:
    def build(table: Mapping[str, Any]) -> Driver:
        from hami_nodeagent.drivers.tool_driver import ToolDriver

        own = _convert(name, table, settings)
        return ToolDriver(make_reader(own), own)

    return DriverKind(name=name, build=build, signs=signs, settings=settings)


def _nvidia(table: Mapping[str, Any]) -> Driver:
    from hami_nodeagent.drivers.nvidia.driver import NvidiaDriver, NvidiaDriverSettings

    return NvidiaDriver(_convert("nvidia", table, NvidiaDriverSettings))


def _simulated(table: Mapping[str, Any]) -> Driver:
    from hami_nodeagent.drivers.simulated.driver import SimulatedDriver, SimulatedDriverSettings

    return SimulatedDriver(_convert("simulated", table, SimulatedDriverSettings))


DRIVERS = (
    DriverKind(name="nvidia", build=_nvidia),
    _through_tool("ascend", ascend.make_reader, ascend.SIGNS, settings=AscendToolSettings),
    _through_tool("cambricon", cambricon.make_reader, cambricon.SIGNS),
    _through_tool("hygon", hygon.make_reader, hygon.SIGNS),
    _through_tool("iluvatar", iluvatar.make_reader, iluvatar.SIGNS),
    _through_tool("mthreads", mthreads.make_reader, mthreads.SIGNS),
    _through_tool("metax", metax.make_reader, metax.SIGNS),
    _through_tool("enflame", enflame.make_reader, enflame.SIGNS),
    _through_tool("kunlunxin", kunlunxin.make_reader, kunlunxin.SIGNS),
    _through_tool("awsneuron", awsneuron.make_reader, awsneuron.SIGNS),
    _through_tool("amd", amd.make_reader, amd.SIGNS),
    _through_tool("biren", biren.make_reader, biren.SIGNS),
    _through_tool("vastai", vastai.make_reader, vastai.SIGNS),
    DriverKind(name="simulated", build=_simulated),
)


def build_driver(name: str, settings: Mapping[str, Any]) -> Driver:
    """Build the driver ``name`` from its settings table; ``SettingsInvalid`` names the error."""
    return _kind(name).build(settings)


def is_detected(name: str, settings: Mapping[str, Any]) -> bool:
    """Return true if this machine shows the driver's hardware; reads sysfs and ``PATH``."""
    kind = _kind(name)
    if kind.signs is None:
        return False
    return is_here(kind.signs, _convert(name, settings, kind.settings))


def detectable() -> tuple[str, ...]:
    """Names of the drivers whose hardware can be recognised."""
    return tuple(kind.name for kind in DRIVERS if kind.signs is not None)


def _kind(name: str) -> DriverKind:
    kind = next((kind for kind in DRIVERS if kind.name == name), None)
    if kind is None:
        raise SettingsInvalid(
            field="drivers",
            problem=f"there is no driver {name!r}",
            fix=f"use one of {', '.join(kind.name for kind in DRIVERS)}",
        )
    return kind


def _convert(name: str, table: Mapping[str, Any], settings: type[S]) -> S:
    try:
        return msgspec.convert(table, settings)
    except msgspec.ValidationError as error:
        raise SettingsInvalid(
            field=f"drivers.{name}", problem=str(error), fix="correct or remove the entry"
        ) from error


__all__ = ["DRIVERS", "Driver", "DriverKind", "build_driver", "detectable", "is_detected"]
