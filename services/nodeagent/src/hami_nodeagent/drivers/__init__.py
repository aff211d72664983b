# SPDX-License-Identifier: Apache-2.0
"""Node halves of the vendors, and the one list of them.

A driver is chosen by name in the agent's settings and built from its own settings table; nothing
registers itself. Vendors that are asked through their tools need no more than a reader and an
entry here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from hami_common.errors import SettingsInvalid
from hami_nodeagent.drivers import (
    amd,
    ascend,
    awsneuron,
    biren,
    cambricon,
    enflame,
    hygon,
    iluvatar,
    kunlunxin,
    metax,
    mthreads,
    vastai,
)
from hami_nodeagent.drivers.nvidia_driver import NvidiaDriver, NvidiaDriverSettings
from hami_nodeagent.drivers.protocol import Driver
from hami_nodeagent.drivers.reader import Reader, Signs, ToolSettings, is_here
from hami_nodeagent.drivers.simulated import SimulatedDriver, SimulatedDriverSettings
from hami_nodeagent.drivers.tool_driver import ToolDriver


class DriverKind(Struct, frozen=True, kw_only=True):
    """One driver that can be chosen."""

    name: str
    settings: type[Struct]
    build: Callable[..., Driver]
    signs: Signs | None = None
    """By what its hardware is recognised; ``None``: it is served only where the settings say so."""


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
    """The driver ``name`` with its settings table; ``SettingsInvalid`` names what is wrong."""
    kind = _kind(name)
    return kind.build(_table(kind, settings))


def is_detected(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether this machine shows the signs of the driver's hardware; reads sysfs and ``PATH``."""
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
