# SPDX-License-Identifier: Apache-2.0
"""Common part of all library programs: finding and loading the library, its calls, the output.

A program runs as ``python -I -m hami_nodeagent.drivers.VENDOR.binding FILE COMMAND …``. ``FILE`` is
the library (empty: search the vendor's folders). The program prints JSON, or nothing if a command
only changes state. On failure it prints one line ``WORD: function: NAME (error n)`` to standard
error, and the exit status is the ``Kind`` of the trouble, which the agent translates to its own
error in one place. Output of the library goes to standard error, and its destructors do not run, so
neither can corrupt the output. Standard library only.
"""

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

USAGE = 2
_SPARE = 4096
Structure = TypeVar("Structure", bound=ctypes.Structure)
SYSTEM_FOLDERS = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib",
    "/usr/local/lib",
)


class Kind(IntEnum):
    """Category of an error. The number is the exit status of a command that failed with it."""

    UNUSABLE = 10
    """The library is not installed, cannot be loaded, or lacks a required call."""
    NONSENSE = 11
    """The library returned impossible values: its structures are not the known ones."""
    MISSING = 12
    """The kernel's driver is not there."""
    MISMATCH = 13
    """Library, driver or firmware do not fit each other."""
    DENIED = 14
    ABSENT = 15
    """The driver works and has no device."""
    GONE = 16
    """One device fell off the bus, or no device has that name."""
    BUSY = 17
    """Another process uses the device."""
    UNSUPPORTED = 18
    """This device, driver or library cannot do it."""
    REFUSED = 19
    """There is no capacity for the partition, or its size is unknown."""
    IN_USE = 20
    """Processes use the partition."""
    TRANSIENT = 21
    """It may pass; also every number without a meaning of its own."""


class Trouble(Exception):
    """Reason why a command failed, or why one device is unreadable."""

    def __init__(self, kind: Kind, words: str, code: int = 0) -> None:
        """``code``: the library's own number, 0 if it has none."""
        super().__init__(words)
        self.kind = kind
        self.words = words
        self.code = code

    def plain(self) -> dict[str, object]:
        """Return the trouble of one device in the format of the output."""
        return {"kind": self.kind.name.lower(), "words": self.words, "code": self.code}


class Failed(Trouble):
    """A call was refused."""

    def __init__(self, kind: Kind, call: str, name: str, code: int) -> None:
        """``name``: the library's name of ``code``; 0: it has no such call."""
        number = f"error {code}" if code else "the library has no such call"
        super().__init__(kind, f"{call}: {name} ({number})", code)
        self.call = call


class Errors(NamedTuple):
    """A library's numbers."""

    names: Mapping[int, str]
    kinds: Mapping[int, Kind]
    """Others are ``TRANSIENT``."""
    of_call: Mapping[tuple[str, int], Kind] = {}
    """Kinds of numbers with another meaning for one call."""

    def kind(self, call: str, code: int) -> Kind:
        """Return the meaning of an error number of this call."""
        return self.of_call.get((call, code), self.kinds.get(code, Kind.TRANSIENT))

    def failed(self, call: str, code: int) -> Failed:
        """The error to raise."""
        name = self.names.get(code, "UNKNOWN")
        return Failed(self.kind(call, code), call, name, code)


class Program(NamedTuple):
    """One library and the commands on it."""

    vendor: str
    """Vendor word: the program is ``hami_nodeagent.drivers.<vendor>.binding``."""
    word: str
    """Name of the library, in error messages and in the name of a replacement program."""
    files: tuple[str, ...]
    """Names of the library's file; a version may follow them (``libacme.so.3``)."""
    folders: tuple[str, ...]
    """Vendor's folders of the library, searched after ``LD_LIBRARY_PATH`` and before the system's.

    A first part such as ``$ACME_HOME`` is a variable.
    """
    errors: Errors
    open: Callable[["Library"], Any]
    """Prepares the library, and returns the object on which commands are called."""
    commands: Mapping[str, Callable[..., object]]
    """Commands by name; called with the result of ``open`` and the arguments.

    The program prints the return value unless it is ``None``.
    """
    needed: tuple[str, ...] = ()
    """Calls without which the library is too old."""
    needed_folders: tuple[str, ...] = ()
    """Folders of the libraries that this one needs, added to the process's loader path."""


class Library:
    """A loaded library whose calls return 0 on success."""

    def __init__(self, program: Program, path: str = "") -> None:
        """Raises ``Trouble`` of kind ``UNUSABLE``."""
        self.errors = program.errors
        self.path, self._loaded = _opened(program, path)
        missing = [name for name in program.needed if not self.has(name)]
        if missing:
            words = f"{self.path} is too old, it has no {missing[0]}"
            raise Trouble(Kind.UNUSABLE, words)

    def has(self, name: str) -> bool:
        """Return true if the library has the call."""
        return getattr(self._loaded, name, None) is not None

    def function(self, name: str) -> Any:  # noqa: ANN401 - ctypes has no public name for its type
        """The call itself, for one whose result is no error number."""
        found = getattr(self._loaded, name, None)
        if found is None:
            raise Failed(Kind.UNSUPPORTED, name, "FUNCTION_NOT_FOUND", 0)
        return found

    def code(self, name: str, *arguments: object) -> int:
        """Return the call's result. Whole numbers are passed as C's ``int``; pass others typed."""
        return int(self.function(name)(*arguments))

    def call(self, name: str, *arguments: object) -> None:
        """Run the call; raise ``Failed`` if the result is not 0."""
        if code := self.code(name, *arguments):
            raise self.errors.failed(name, code)

    def told(self, name: str, *arguments: object) -> bool:
        """Run a call that not all drivers and devices support; return true on success."""
        return self.has(name) and not self.code(name, *arguments)

    def number(
        self, name: str, kind: type["ctypes._SimpleCData[int]"], *arguments: object
    ) -> int | None:
        """Return the number that the call writes to its last argument; ``None``: not reported."""
        found = kind(0)
        return found.value if self.told(name, *arguments, ctypes.byref(found)) else None


def beside(library: Library, program: Program) -> Library | None:
    """Load another library of the same vendor, from the folder of the first or the usual ones."""
    there = Path(library.path).parent / program.files[0] if "/" in library.path else None
    try:
        return Library(program, str(there) if there is not None and there.exists() else "")
    except Trouble:
        return None


def mib(size: int) -> int:
    """Bytes as MiB, rounded down."""
    return size >> 20


def roomy(kind: type[Structure], **fields: int) -> Structure:
    """Return an empty structure with spare bytes, since later libraries may have longer ones."""
    made = kind.from_buffer(bytearray(ctypes.sizeof(kind) + _SPARE))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def text(raw: bytes) -> str:
    """Decode a string in a buffer of the library."""
    return raw.partition(b"\0")[0].decode("utf-8", "replace").strip()


def nonsense(words: str) -> Trouble:
    """Return the error for impossible values."""
    return Trouble(Kind.NONSENSE, f"not in a form that is known: {words}")


# ---- finding -----------------------------------------------------------------------------------


def candidates(program: Program, path: str, environment: Mapping[str, str]) -> list[Path]:
    """Files that are there and may be the library, in order."""
    if path:
        return [Path(path)] if Path(path).exists() else []
    listed = [folder for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folders = [_placed(folder, environment) for folder in program.folders]
    found: list[Path] = []
    for folder in (*listed, *filter(None, folders), *SYSTEM_FOLDERS):
        for name in program.files:
            exact = Path(folder) / name
            found += [exact] if exact.exists() else _versions(Path(folder), name)
    return found


def _placed(folder: str, environment: Mapping[str, str]) -> str:
    first, separator, rest = folder.partition("/")
    if not first.startswith("$"):
        return folder
    home = environment.get(first[1:], "")
    return f"{home}{separator}{rest}" if home else ""


def _versions(folder: Path, name: str) -> list[Path]:
    """``libacme.so.3`` and the like, newest first."""
    form = re.compile(re.escape(name) + r"((?:\.\d{1,6}){1,4})")
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    found = [(tuple(map(int, m[1].split(".")[1:])), n) for n in names if (m := form.fullmatch(n))]
    return [folder / one for _, one in sorted(found, reverse=True)]


def _opened(program: Program, path: str) -> tuple[str, ctypes.CDLL]:
    """Load the first loadable file; the loader's own path is searched last."""
    trouble = ""
    known = [str(found) for found in candidates(program, path, os.environ)]
    for candidate in (*known, *(() if path else program.files)):
        try:
            return candidate, ctypes.CDLL(candidate)
        except OSError as error:
            trouble = trouble or str(error)
    if path and not known:
        trouble = f"{path} is not there"
    words = f"error while loading shared libraries: {trouble or program.files[0]}"
    raise Trouble(Kind.UNUSABLE, words)


# ---- the program -------------------------------------------------------------------------------


def run(program: Program, arguments: Sequence[str]) -> tuple[str, str, int]:
    """Run one command; return its output, its error message and the exit status.

    ``arguments``: the library's file, which may be empty, the command and its own arguments.
    """
    path, word, *rest = (*arguments, "", "")[: max(2, len(arguments))]
    command = program.commands.get(word)
    if command is None:
        return "", f"usage: {program.word} FILE {' | '.join(program.commands)}\n", USAGE
    try:
        found = command(program.open(Library(program, path)), *rest)
    except Trouble as trouble:
        line = " ".join(trouble.words.split())
        return "", f"{program.word}: {line}\n", trouble.kind
    return "" if found is None else json.dumps(found) + "\n", "", 0


def main(program: Program) -> NoReturn:
    """Run the command of this process and end it."""
    answer = os.dup(1)
    os.dup2(2, 1)
    said, complaint, status = run(program, sys.argv[1:])
    with os.fdopen(answer, "w", encoding="utf-8") as stream:
        stream.write(said)
    sys.stderr.write(complaint)
    sys.stderr.flush()
    os._exit(status)
