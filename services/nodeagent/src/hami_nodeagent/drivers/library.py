# SPDX-License-Identifier: Apache-2.0
"""Runs a vendor's C library in a process of its own, and chooses between library and tool.

``LibraryProgram`` runs the vendors' programs (``drivers.<vendor>.binding``); ``parse.library``
parses their output. ``LibraryReader`` chooses: with ``interface = "auto"`` it uses the library if
its file exists, and the tool otherwise or if the library turns out to be unusable, until
``forget``. Other errors do not change the interface, because the tool depends on the same driver.
Both report the same facts under the same identities, so a node can change between them.
"""

import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from hami_nodeagent.drivers.errors import DriverMissing, LibraryUnusable
from hami_nodeagent.drivers.interfaces import uses_library
from hami_nodeagent.drivers.parse.library import failure
from hami_nodeagent.drivers.parse.seen import Sight
from hami_nodeagent.drivers.reader import ToolReader, ToolSettings
from hami_nodeagent.drivers.tool import Tool
from hami_nodeagent.libraries.loading import Program, candidates

_log = logging.getLogger(__name__)
T = TypeVar("T")


class LibraryProgram:
    """The commands of one library."""

    def __init__(self, program: Program, settings: ToolSettings) -> None:
        """Store the settings without running the program.

        An executable with the program's name beside the tool replaces the agent's program, unless
        ``library_path`` names the library.
        """
        self.program = program
        self.name = f"hami-{program.word}"
        beside = Path(settings.tool_path).with_name(self.name) if settings.tool_path else None
        self._path = settings.library_path
        known = os.environ.get("LD_LIBRARY_PATH", "").split(":")
        folders = [folder for folder in (*known, *program.needed_folders) if folder]
        if beside is not None and beside.exists() and not self._path:
            self._before: tuple[str, ...] = ()
            path = str(beside)
        else:
            module = f"hami_nodeagent.drivers.{program.vendor}.binding"
            self._before, path = ("-I", "-m", module, self._path), sys.executable
        self.tool = Tool(
            self.name,
            path=path,
            limit_s=settings.query_limit_s,
            environment={"LD_LIBRARY_PATH": ":".join(dict.fromkeys(folders))} if folders else {},
        )

    def find(self) -> Path | None:
        """Return the library's file, ``None`` if there is none."""
        return next(iter(candidates(self.program, self._path, os.environ)), None)

    async def run(self, *arguments: str) -> str:
        """Run a command and return its output; raise the error that its exit status means."""
        answer = await self.tool.run(*self._before, *arguments)
        if not answer.status:
            return answer.text
        doing = " ".join((self.name, *arguments))
        raise failure(doing, self.program.word, answer.complaint, answer.status)

    async def ask(self, parse: Callable[[str], T], *arguments: str) -> T:
        """A command's answer, read by ``parse``."""
        return parse(await self.run(*arguments))


class LibraryReader(ToolReader):
    """A reader that uses a library if there is one, else the vendor's tool."""

    program: ClassVar[Program]
    has_library = True

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        self.library = LibraryProgram(self.program, settings)
        self._by_library: bool | None = None
        self._complaint = ""

    @property
    def tools(self) -> Sequence[Tool]:
        """Both."""
        return (self.tool, self.library.tool)

    def forget(self) -> None:
        """Another driver may bring the library, or one that can be used."""
        self._by_library = None

    async def either(
        self, library: Callable[[], Awaitable[T]], tool: Callable[[], Awaitable[T]]
    ) -> T:
        """Call ``library`` or ``tool``; the first call chooses (``interfaces``)."""
        if self._by_library is None:
            self._by_library = self._prefers_library()
        if not self._by_library:
            return await tool()
        try:
            return await library()
        except LibraryUnusable as error:
            if self.settings.interface != "auto":
                raise
            self._leave(error)
            try:
                return await tool()
            except DriverMissing as missing:
                detail = f"{missing.detail}; {error.detail}"
                raise DriverMissing(
                    doing=missing.doing, detail=detail, code=missing.code
                ) from missing

    def _prefers_library(self) -> bool:
        """Return true if the settings name the library, or it is the default and installed."""
        interface = self.settings.interface
        if interface != "auto":
            return interface == "library"
        return uses_library(self.vendor) and self.library.find() is not None

    def _leave(self, error: LibraryUnusable) -> None:
        """Fall back to the CLI until ``forget``; log each reason once until it changes."""
        self._by_library = False
        if str(error) != self._complaint:
            self._complaint = str(error)
            extra = {"vendor": self.vendor, "tool": self.tool_name, "problem": str(error)}
            _log.warning("the vendor's library cannot be used, its tool is asked", extra=extra)


class TwoWayReader(LibraryReader, ABC):
    """The usual case: glance and survey, each through the library or the tool."""

    async def glance(self) -> Sight:
        """Use and condition."""
        return await self.either(self.glance_library, self.glance_tool)

    async def survey(self) -> Sight:
        """Everything."""
        return await self.either(self.survey_library, self.survey_tool)

    @abstractmethod
    async def glance_library(self) -> Sight:
        """``glance`` through the library."""

    @abstractmethod
    async def survey_library(self) -> Sight:
        """``survey`` through the library; reports at least the facts of ``survey_tool``."""

    @abstractmethod
    async def glance_tool(self) -> Sight:
        """``glance`` through the tool."""

    @abstractmethod
    async def survey_tool(self) -> Sight:
        """``survey`` through the tool."""
