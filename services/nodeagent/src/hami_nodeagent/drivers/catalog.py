# SPDX-License-Identifier: Apache-2.0
"""Node halves of the vendors, and the one list of them.

A driver is chosen by name in the agent's settings and built from its own settings table; no driver
registers itself. Vendors that are read through their tools need only a reader and an entry here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from hami_common.errors import SettingsInvalid
from hami_nodeagent.drivers.amd import reader as amd
from hami_nodeagent.drivers.ascend import reader as ascend
from hami_nodeagent.drivers.awsneuron import reader as awsneuron
from hami_nodeagent.drivers.biren import reader as biren
from hami_nodeagent.drivers.cambricon import reader as cambricon
from hami_nodeagent.drivers.enflame import reader as enflame
from hami_nodeagent.drivers.hygon import reader as hygon
from hami_nodeagent.drivers.iluvatar import reader as iluvatar
from hami_nodeagent.drivers.kunlunxin import reader as kunlunxin
from hami_nodeagent.drivers.metax import reader as metax
from hami_nodeagent.drivers.mthreads import reader as mthreads
from hami_nodeagent.drivers.nvidia.driver import NvidiaDriver, NvidiaDriverSettings
from hami_nodeagent.drivers.protocol import Driver
from hami_nodeagent.drivers.reader import Reader, Signs, ToolSettings, is_here
from hami_nodeagent.drivers.simulated.driver import SimulatedDriver, SimulatedDriverSettings
from hami_nodeagent.drivers.tool_driver import ToolDriver
from hami_nodeagent.drivers.vastai import reader as vastai


class DriverKind(Struct, frozen=True, kw_only=True):
    """One driver that can be chosen."""

    name: str
    settings: type[Struct]
    build: Callable[..., Driver]
    signs: Signs | None = None
    """Signs by which the hardware is detected; ``None``: served only if the settings name it."""


def _through_tool(
    name: str,
    reader: Callable[[ToolSettings], Reader],
    signs: Signs,
    *,
    settings: type[ToolSettings] = ToolSettings,
) -> DriverKind:
    def build(settings: ToolSettings) -> Driver:
        return ToolDriver(reader(settings), settings)

    return DriverKind(name=name, settings=settings, build=build, signs=signs)


DRIVERS = (
    DriverKind(name="nvidia", settings=NvidiaDriverSettings, build=NvidiaDriver),
    _through_tool("ascend", ascend.AscendReader, ascend.SIGNS, settings=ascend.AscendToolSettings),
    _through_tool("cambricon", cambricon.CambriconReader, cambricon.SIGNS),
    _through_tool("hygon", hygon.HygonReader, hygon.SIGNS),
    _through_tool("iluvatar", iluvatar.IluvatarReader, iluvatar.SIGNS),
    _through_tool("mthreads", mthreads.MthreadsReader, mthreads.SIGNS),
    _through_tool("metax", metax.MetaxReader, metax.SIGNS),
    _through_tool("enflame", enflame.EnflameReader, enflame.SIGNS),
    _through_tool("kunlunxin", kunlunxin.KunlunxinReader, kunlunxin.SIGNS),
    _through_tool("awsneuron", awsneuron.AwsNeuronReader, awsneuron.SIGNS),
    _through_tool("amd", amd.AmdReader, amd.SIGNS),
    _through_tool("biren", biren.BirenReader, biren.SIGNS),
    _through_tool("vastai", vastai.VastaiReader, vastai.SIGNS),
    DriverKind(name="simulated", settings=SimulatedDriverSettings, build=SimulatedDriver),
)


def build_driver(name: str, settings: Mapping[str, Any]) -> Driver:
    """Build the driver ``name`` from its settings table; ``SettingsInvalid`` names the error."""
    kind = _kind(name)
    return kind.build(_table(kind, settings))


def is_detected(name: str, settings: Mapping[str, Any]) -> bool:
    """Return true if this machine shows the driver's hardware; reads sysfs and ``PATH``."""
    kind = _kind(name)
    if kind.signs is None:
        return False
    table = _table(kind, settings)
    return isinstance(table, ToolSettings) and is_here(kind.signs, table)


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


def _table(kind: DriverKind, settings: Mapping[str, Any]) -> Struct:
    try:
        return msgspec.convert(settings, kind.settings)
    except msgspec.ValidationError as error:
        raise SettingsInvalid(
            field=f"drivers.{kind.name}", problem=str(error), fix="correct or remove the entry"
        ) from error


__all__ = ["DRIVERS", "Driver", "DriverKind", "build_driver", "detectable", "is_detected"]
