# SPDX-License-Identifier: Apache-2.0
"""What the programs of all libraries share: finding and opening one, calling it, and the answer.

A program is run as ``python -I -m hami_nodeagent.libraries.WORD FILE COMMAND …``, where ``FILE`` is
the library (empty: looked for where its vendor installs it). It prints JSON, or nothing where a
command only changes something. On failure one line ``WORD: function: NAME (error n)`` goes to
standard error and the exit status is the ``Kind`` of the trouble, which the agent turns into its
own error in one place. What the library itself prints goes to standard error, and its destructors
are not run: neither can spoil an answer. Standard library only.
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
    """What a trouble means. The number is the exit status of a command that failed of it."""

    UNUSABLE = 10
    """There is no library, it cannot be loaded, or it lacks a call that is needed."""
    NONSENSE = 11
    """The library said what cannot be: its structures are not those that we know."""
    MISSING = 12
    """The kernel's driver is not there."""
    MISMATCH = 13
    """Library, driver or firmware do not fit each other."""
    DENIED = 14
    ABSENT = 15
    """The driver works and has no device."""
    GONE = 16
    """One device fell off the bus, or there is none of that name."""
    BUSY = 17
    """Somebody else holds the device."""
    UNSUPPORTED = 18
    """This device, driver or library cannot do it."""
    REFUSED = 19
    """There is no room for a partition, or nobody knows its size."""
    IN_USE = 20
    """Processes use the partition."""
    TRANSIENT = 21
    """It may pass; also every number without a meaning of its own."""


class Trouble(Exception):
    """Why a command failed, or why one device cannot be asked."""

    def __init__(self, kind: Kind, words: str, code: int = 0) -> None:
        """``code``: the library's own number, 0 where it has none."""
        super().__init__(words)
        self.kind = kind
        self.words = words
        self.code = code

    def plain(self) -> dict[str, object]:
        """The trouble of one device, as it stands in an answer."""
        return {"kind": self.kind.name.lower(), "words": self.words, "code": self.code}


class Failed(Trouble):
    """A call was refused."""

    def __init__(self, kind: Kind, call: str, name: str, code: int) -> None:
        """``name``: the library's word for ``code``; 0: it has no such call."""
        number = f"error {code}" if code else "the library has no such call"
        super().__init__(kind, f"{call}: {name} ({number})", code)
        self.call = call


class Errors(NamedTuple):
    """A library's numbers."""

    names: Mapping[int, str]
    kinds: Mapping[int, Kind]
    """Others are ``TRANSIENT``."""
    of_call: Mapping[tuple[str, int], Kind] = {}
    """Where a number of one call means something else."""

    def kind(self, call: str, code: int) -> Kind:
        """What the number means when this call answers it."""
        return self.of_call.get((call, code), self.kinds.get(code, Kind.TRANSIENT))

    def failed(self, call: str, code: int) -> Failed:
        """The error to raise."""
        name = self.names.get(code, "UNKNOWN")
        return Failed(self.kind(call, code), call, name, code)


class Program(NamedTuple):
    """One library and the commands on it."""

    word: str
    """Name of the program's module."""
    files: tuple[str, ...]
    """Names of the library's file; a version may follow them (``libacme.so.3``)."""
    folders: tuple[str, ...]
    """Where its vendor puts it, after ``LD_LIBRARY_PATH`` and before the system's folders; a first
    part such as ``$ACME_HOME`` is a variable."""
    errors: Errors
    open: Callable[["Library"], Any]
    """Prepares the library, and makes what the commands are called on."""
    commands: Mapping[str, Callable[..., object]]
    """By name; called with what ``open`` made and the arguments. What they return is printed, but
    for ``None``."""
    needed: tuple[str, ...] = ()
    """Calls without which the library is too old."""
    needed_folders: tuple[str, ...] = ()
    """Where the libraries lie that this one needs: on the loader's path of the process."""


class Library:
    """An opened library whose calls answer 0 where all is well."""

    def __init__(self, program: Program, path: str = "") -> None:
        """Raises ``Trouble`` of kind ``UNUSABLE``."""
        self.errors = program.errors
        self.path, self._loaded = _opened(program, path)
        missing = [name for name in program.needed if not self.has(name)]
        if missing:
            words = f"{self.path} is too old, it has no {missing[0]}"
            raise Trouble(Kind.UNUSABLE, words)

    def has(self, name: str) -> bool:
        """Whether there is such a call."""
        return getattr(self._loaded, name, None) is not None

    def function(self, name: str) -> Any:  # noqa: ANN401 - ctypes has no public name for its type
        """The call itself, for one whose result is no error number."""
        found = getattr(self._loaded, name, None)
        if found is None:
            raise Failed(Kind.UNSUPPORTED, name, "FUNCTION_NOT_FOUND", 0)
        return found

    def code(self, name: str, *arguments: object) -> int:
        """What the call answers. A whole number is passed as C's ``int``; pass others typed."""
        return int(self.function(name)(*arguments))

    def call(self, name: str, *arguments: object) -> None:
        """The same; raises ``Failed`` where that is not 0."""
        if code := self.code(name, *arguments):
            raise self.errors.failed(name, code)

    def told(self, name: str, *arguments: object) -> bool:
        """Call for what not every driver and device tells: whether it did."""
        return self.has(name) and not self.code(name, *arguments)

    def number(
        self, name: str, kind: type["ctypes._SimpleCData[int]"], *arguments: object
    ) -> int | None:
        """The number that the call writes behind its last argument; ``None``: it is not told."""
        found = kind(0)
        return found.value if self.told(name, *arguments, ctypes.byref(found)) else None


def beside(library: Library, program: Program) -> Library | None:
    """Another library of the same vendor: in the folder of the first, else where it is found."""
    there = Path(library.path).parent / program.files[0] if "/" in library.path else None
    try:
        return Library(program, str(there) if there is not None and there.exists() else "")
    except Trouble:
        return None


def mib(size: int) -> int:
    """Bytes as MiB, rounded down."""
    return size >> 20


def roomy(kind: type[Structure], **fields: int) -> Structure:
    """An empty structure with room behind it: later libraries may know longer ones."""
    made = kind.from_buffer(bytearray(ctypes.sizeof(kind) + _SPARE))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def text(raw: bytes) -> str:
    """What stands in a buffer of the library."""
    return raw.partition(b"\0")[0].decode("utf-8", "replace").strip()


def nonsense(words: str) -> Trouble:
    """The error for what cannot be."""
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
    """The first file that can be loaded; the loader's own path is asked last."""
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
    """Run one command: what it prints, what it complains of, and the exit status.

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
