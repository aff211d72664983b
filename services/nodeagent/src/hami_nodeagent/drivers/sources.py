# SPDX-License-Identifier: Apache-2.0
"""Protocols of the readers that partitioners use.

A reader builds its vendor's partitioner, so the partitioner's module must not import the reader's.
A partitioner with further requirements declares a protocol of its own, derived from these.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar, TypeVarTuple, Unpack

from hami_nodeagent.drivers.library import LibraryProgram
from hami_nodeagent.drivers.reader import ToolSettings

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class FileSource(Protocol):
    """Settings, and small files of the host."""

    @property
    def settings(self) -> ToolSettings:
        """Settings of the vendor."""
        ...

    async def read_files(self, read: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T:
        """Run ``read`` in a worker thread."""
        ...


class ToolSource(Protocol):
    """The vendor's tool."""

    async def ask(self, parse: Callable[[str], T], *arguments: str) -> T:
        """Run the tool and parse its output."""
        ...

    async def change(self, *arguments: str) -> None:
        """Run a command whose exit status is its only result."""
        ...


class LibrarySource(ToolSource, Protocol):
    """The vendor's tool and library."""

    @property
    def library(self) -> LibraryProgram:
        """The program that calls the library."""
        ...

    async def either(
        self, library: Callable[[], Awaitable[T]], tool: Callable[[], Awaitable[T]]
    ) -> T:
        """Call ``library`` or ``tool``, whichever the reader uses."""
        ...
