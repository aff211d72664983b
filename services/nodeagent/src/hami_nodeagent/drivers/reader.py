# SPDX-License-Identifier: Apache-2.0
"""Reads a vendor's devices through its tool: the common part of the readers of all vendors.

A reader queries the tool and returns the result; it caches only values that cannot change while the
driver is loaded. ``tool_driver`` matches devices and decides which are stale or lost.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread
from msgspec import Struct

from hami_common.bounds import NUMA_MOST
from hami_common.errors import SettingsInvalid
from hami_common.units import whole
from hami_nodeagent.drivers.errors import AnswerUnknown
from hami_nodeagent.drivers.parse.seen import Sight
from hami_nodeagent.drivers.parse.trouble import Rule, trouble, unexplained
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.tool import Tool

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ToolSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings to reach a vendor's devices and to judge their health."""

    tool_path: str = ""
    """The tool's file; empty looks for its usual name in ``PATH``."""
    interface: Literal["auto", "library", "tool"] = "auto"
    """``library``: the vendor's C library only; ``tool``: its tool only; ``auto``: the library
    where it can be used."""
    library_path: str = ""
    """The library's file; empty looks where the vendor installs it."""
    node: str = ""
    """Name of the node: part of the identity of devices whose tool reports none."""
    sysfs_root: str = "/sys"
    """Directory of sysfs, for PCI functions and NUMA nodes."""
    etc_root: str = "/etc"
    """Directory of the vendors' descriptions of shares."""
    shares_root: str = "/usr/local/vgpu"
    """Directory of the agent's descriptions of shares, which containers read."""
    query_limit_s: float = 10.0
    """Longest time one run of the tool may take; then it is killed."""
    answer_age_s: float = 2.0
    """Longest age, in seconds, of an answer that probes and usage share."""
    confirm_s: float = 0.5
    """Pause between the reads that confirm that a device is no longer listed, in seconds."""
    disable_health_checks: str = ""
    """``all``: devices are not probed."""


class Signs(Struct, frozen=True, kw_only=True):
    """Signs of a vendor's hardware that are visible without any driver."""

    pci_vendors: tuple[str, ...] = ()
    """PCI vendor ids, four hexadecimal digits."""
    pci_classes: tuple[str, ...] = ()
    """Beginnings of the PCI class (``12``: accelerators, ``03``: displays); empty: any class."""
    paths: tuple[str, ...] = ()
    """Directories of sysfs that only this vendor's driver makes."""
    tool: str = ""
    """The tool's usual name. Its presence is a sign where the PCI id was never confirmed."""


def is_here(signs: Signs, settings: ToolSettings) -> bool:
    """Return true if this machine has the vendor's hardware, or its tool if that is a sign."""
    root = Path(settings.sysfs_root)
    if any((root / path).exists() for path in signs.paths):
        return True
    if signs.tool and Tool(signs.tool, path=settings.tool_path).find() is not None:
        return True
    try:
        functions = list((root / "bus/pci/devices").iterdir())
    except OSError:
        return False
    return any(_matches(function, signs) for function in functions)


def _matches(function: Path, signs: Signs) -> bool:
    try:
        vendor = (function / "vendor").read_text("ascii").strip().removeprefix("0x")
        kind = (function / "class").read_text("ascii").strip().removeprefix("0x")
    except (OSError, UnicodeDecodeError):
        return False
    if vendor.lower() not in signs.pci_vendors or (function / "physfn").exists():
        return False
    return not signs.pci_classes or kind.startswith(signs.pci_classes)


class Reader(Protocol):
    """One vendor's way of looking."""

    @property
    def vendor(self) -> str:
        """Vendor word, as in ``DeviceFacts.vendor``."""
        ...

    @property
    def tools(self) -> Sequence[Tool]:
        """Every tool it runs."""
        ...

    @property
    def partitioner(self) -> Partitioner | None:
        """Partitioner of the devices; ``None`` if they cannot be divided in hardware."""
        ...

    async def survey(self) -> Sight:
        """Read everything; raises the errors of ``errors``."""
        ...

    async def glance(self) -> Sight:
        """Read the values that change: use and condition, by place or identity."""
        ...

    async def wait_news(self, limit_s: float) -> bool:
        """Wait at most ``limit_s`` for a fault event; return true if there was one; no errors."""
        ...

    def forget(self) -> None:
        """Drop the cached state: the driver may have been replaced."""
        ...


class ToolReader:
    """Base of readers: a tool, and a way to run it. Readers define ``survey`` and ``glance``."""

    vendor = ""
    tool_name = ""
    rules: Sequence[Rule] = ()
    has_library = False

    def __init__(self, settings: ToolSettings) -> None:
        """Store the settings without running the tool."""
        if settings.interface == "library" and not self.has_library:
            raise SettingsInvalid(
                field="interface",
                problem=f"devices of {self.vendor} are asked through their tool only",
                fix='write "auto" or "tool", or remove the entry',
            )
        self.settings = settings
        self.tool = Tool(self.tool_name, path=settings.tool_path, limit_s=settings.query_limit_s)

    @property
    def tools(self) -> Sequence[Tool]:
        """The one tool."""
        return (self.tool,)

    @property
    def partitioner(self) -> Partitioner | None:
        """``None``: devices of most vendors cannot be divided."""
        return None

    async def wait_news(self, limit_s: float) -> bool:
        """Wait and return false: devices of most vendors send no events."""
        await anyio.sleep(limit_s)
        return False

    def forget(self) -> None:
        """No effect: this reader has no cache."""

    async def ask(
        self,
        parse: Callable[[str], T],
        *arguments: str,
        tool: Tool | None = None,
        one_line: bool = False,
    ) -> T:
        """Run the tool and parse its output.

        An error in the output is raised if the tool failed or if its output is unparsable. Parsable
        output without an error is accepted even if the exit status is not 0.
        """
        tool = tool or self.tool
        answer = await tool.run(*arguments, one_line=one_line)
        doing = " ".join((tool.name, *arguments))
        if answer.status:
            error = trouble(doing, answer.words, answer.status, self.rules)
            if error is not None:
                raise error
        try:
            return parse(answer.text)
        except AnswerUnknown as error:
            raise (
                trouble(doing, answer.words, answer.status, self.rules)
                or (unexplained(doing, answer.words, answer.status) if answer.status else error)
            ) from error

    async def change(self, *arguments: str) -> None:
        """Run a command whose only result is its exit status."""
        answer = await self.tool.run(*arguments)
        if answer.status:
            doing = " ".join((self.tool.name, *arguments))
            words, status = answer.words, answer.status
            raise trouble(doing, words, status, self.rules) or unexplained(doing, words, status)

    async def read_files(self, read: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T:
        """Read small files of sysfs or ``/etc`` outside of the loop."""
        return await anyio.to_thread.run_sync(read, *arguments)


def read_text(path: Path) -> str:
    """Return a small file's text; empty if it is unreadable."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def numa_of(sysfs_root: str, address: str) -> int | None:
    """Return the NUMA node of a PCI function; ``None`` where sysfs has none."""
    text = read_text(Path(sysfs_root) / "bus/pci/devices" / address / "numa_node").strip()
    return whole(text, most=NUMA_MOST) if address else None


def drm_of(sysfs_root: str, address: str) -> tuple[int | None, int | None]:
    """Numbers of the card node and of the render node below ``/dev/dri`` of a PCI function."""
    card = render = None
    try:
        entries = (Path(sysfs_root) / "bus/pci/devices" / address / "drm").iterdir()
        names = [entry.name for entry in entries]
    except OSError:
        names = []
    for name in names:
        if match := re.fullmatch(r"card([0-9]{1,6})", name):
            card = int(match[1])
        elif match := re.fullmatch(r"render[D]([0-9]{1,6})", name):
            render = int(match[1])
    return card, render
