# SPDX-License-Identifier: Apache-2.0
"""Node halves of the vendors, and the one list of them.

A driver is chosen by name in the agent's settings and built from its own settings table; no driver
registers itself. Vendors that are read through their tools need only a reader and an entry here.
A driver's module is imported when the driver is built: a node has the hardware of one vendor or
two, and the drivers of all thirteen take 3 MiB of each agent.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, cast

import msgspec
from msgspec import Struct

from hami_common.errors import SettingsInvalid
from hami_nodeagent.drivers.ascend.settings import AscendToolSettings
from hami_nodeagent.drivers.protocol import Driver
from hami_nodeagent.drivers.reader import Reader, Signs, ToolSettings, is_here

_PACKAGE = "hami_nodeagent.drivers"


class DriverKind(Struct, frozen=True, kw_only=True):
    """One driver that can be chosen."""

    name: str
    settings: Callable[[], type[Struct]]
    """Returns the type of its settings."""
    build: Callable[..., Driver]
    signs: Signs | None = None
    """Signs by which the hardware is detected; ``None``: served only if the settings name it."""


def _named(module: str, name: str) -> Any:  # noqa: ANN401 - a class of that module
    return getattr(import_module(f"{_PACKAGE}.{module}"), name)


def _through_tool(
    name: str, reader: str, signs: Signs, *, settings: type[ToolSettings] = ToolSettings
) -> DriverKind:
    """A vendor whose devices the class ``reader`` of its module reads."""

    def build(settings: ToolSettings) -> Driver:
        make: Callable[[ToolSettings], Reader] = _named(f"{name}.reader", reader)
        return cast("Driver", _named("tool_driver", "ToolDriver")(make(settings), settings))

    return DriverKind(name=name, settings=lambda: settings, build=build, signs=signs)


def _own(name: str, module: str, word: str) -> DriverKind:
    """A driver of its own: the class ``word`` of its module, with settings ``<word>Settings``."""
    return DriverKind(
        name=name,
        settings=lambda: cast("type[Struct]", _named(module, f"{word}Settings")),
        build=lambda settings: cast("Driver", _named(module, word)(settings)),
    )


DRIVERS = (
    _own("nvidia", "nvidia.driver", "NvidiaDriver"),
    _through_tool(
        "ascend",
        "AscendReader",
        Signs(pci_vendors=("19e5",), pci_classes=("12",), paths=("class/davinci_manager",)),
        settings=AscendToolSettings,
    ),
    _through_tool(
        "cambricon",
        "CambriconReader",
        Signs(pci_vendors=("cabc",), pci_classes=("12",)),
    ),
    _through_tool(
        "hygon",
        "HygonReader",
        Signs(
            pci_vendors=("1d94",),
            pci_classes=("0380", "0302", "12"),
            paths=("module/hycu", "module/hydcu"),
        ),
    ),
    _through_tool(
        "iluvatar",
        "IluvatarReader",
        Signs(pci_vendors=("1e3e",)),
    ),
    _through_tool(
        "mthreads",
        "MthreadsReader",
        Signs(pci_vendors=("1ed5",)),
    ),
    _through_tool(
        "metax",
        "MetaxReader",
        Signs(pci_vendors=("9999",)),
    ),
    _through_tool(
        "enflame",
        "EnflameReader",
        Signs(pci_vendors=("1e36",)),
    ),
    _through_tool(
        "kunlunxin",
        "KunlunxinReader",
        Signs(pci_vendors=("1d22",), pci_classes=("12", "03")),
    ),
    _through_tool(
        "awsneuron",
        "AwsNeuronReader",
        Signs(paths=("devices/virtual/neuron_device", "class/neuron_device")),
    ),
    _through_tool(
        "amd",
        "AmdReader",
        Signs(pci_vendors=("1002",), pci_classes=("0380", "0302", "12")),
    ),
    _through_tool(
        "biren",
        "BirenReader",
        Signs(pci_vendors=("1ee0",), paths=("class/biren",), tool="brsmi"),
    ),
    _through_tool(
        "vastai",
        "VastaiReader",
        Signs(pci_vendors=("1ec6", "1edb"), pci_classes=("12", "03"), tool="vasmi"),
    ),
    _own("simulated", "simulated.driver", "SimulatedDriver"),
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
        return msgspec.convert(settings, kind.settings())
    except msgspec.ValidationError as error:
        raise SettingsInvalid(
            field=f"drivers.{kind.name}", problem=str(error), fix="correct or remove the entry"
        ) from error


__all__ = ["DRIVERS", "Driver", "DriverKind", "build_driver", "detectable", "is_detected"]
