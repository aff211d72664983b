# SPDX-License-Identifier: Apache-2.0
"""Reads recorded sequences of driver calls and replays them; tests/native/sequences has them.

A file has sections, ``[name] limit SIZE``, and in them one call per line:

    [PROCESS[/THREAD]:] FUNCTION ARGUMENT… [-> ERROR] [= CHARGE]
    check NAME VALUE

An argument is a number (``20M``, ``max``), the name of a value, also with an offset (``base+20M``),
``>NAME`` for a value that the call returns (``>NAME:64`` of so many bytes, ``>NAME:fd`` a
descriptor), ``&NUMBER`` for a pointer to 64 bits, ``&STRUCTURE`` of ``STRUCTURES``, or a text in
quotation marks. Values belong to all processes of the sequence, so that one can open what another
exports. ``CHARGE`` is the charge of the container after the call, contexts included. ``#`` begins a
comment.
"""

import json
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from hami_sim.hardware.fake_cuda import FakeCard
from tests.support.closing import Closing
from tests.support.cuda_child import ROOT

SERVER = "tests.support.cuda_server"
PATIENCE_S = 50
MESSAGE_BYTES = 1 << 16
CONTEXT_BYTES = 8 << 20
"""Size of a context on the devices of the tests."""

ERRORS = {"ok": 0, "OUT_OF_MEMORY": 2, "INVALID_DEVICE": 101, "INVALID_CONTEXT": 201}
STRUCTURES = {
    # CUmemAllocationProp: pinned; handles; location; no flags, or GPUDirect RDMA.
    "device": struct.pack("<iiiiQQ", 1, 0, 1, 0, 0, 0),
    "device,fd": struct.pack("<iiiiQQ", 1, 1, 1, 0, 0, 0),
    "device,fd,rdma": struct.pack("<iiiiQQ", 1, 1, 1, 0, 0, 1 << 8),
    "host,fd": struct.pack("<iiiiQQ", 1, 1, 2, 0, 0, 0),
    "numa,fd": struct.pack("<iiiiQQ", 1, 1, 3, 0, 0, 0),
    "unknown": struct.pack("<iiiiQQ", 1, 0, 1, 0x7F123456, 0, 0),
    # CUmemAccessDesc: device 0, read and write.
    "access": struct.pack("<iii", 1, 0, 3),
    # CUmemPoolProps: pinned, no handles, device 0.
    "pool": struct.pack("<iiii72x", 1, 0, 1, 0),
}

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_NUMBER = re.compile(r"(\d+)([KMG]?)$")
_SECTION = re.compile(r"\[([\w-]+)\] limit (\w+)$")
_LINE = re.compile(
    r"(?:(?P<process>\w+)(?:/(?P<thread>\w+))?: +)?(?P<call>cu\w+|check)"
    r"(?P<words>(?: +(?!->|=)(?:\"[^\"]*\"|\S+))*)"
    r"(?: +-> (?P<error>\w+))?(?: += (?P<charge>\w+))?$"
)
_WORD = re.compile(r"\"[^\"]*\"|\S+")


class Step(NamedTuple):
    """One line of a sequence."""

    place: str
    """File and line."""
    process: str
    thread: str
    call: str
    words: tuple[str, ...]
    code: int
    """The CUresult that it returns."""
    charge_bytes: int | None
    """Charge of the container afterwards; ``None`` where the line does not give it."""


class Sequence(NamedTuple):
    """One section of a file."""

    name: str
    limit_bytes: int
    steps: tuple[Step, ...]


class Descriptor(NamedTuple):
    """A file descriptor that a process exported, kept open here."""

    number: int


def number(text: str) -> int | None:
    """Return the number that ``text`` stands for; ``None`` for other words."""
    if text == "max":
        return (1 << 64) - 1
    found = _NUMBER.match(text)
    return int(found[1]) * _UNITS.get(found[2], 1) if found else None


def _size(text: str, place: str) -> int:
    size = number(text)
    if size is None:
        raise ValueError(f"{place}: not a size: {text}")
    return size


def read(path: Path) -> list[Sequence]:
    """Return the sequences of a file; ValueError names the line that is none."""
    sections: list[tuple[str, int, list[Step]]] = []
    for count, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = raw.partition("#")[0].strip()
        place = f"{path.name}:{count}"
        if not line:
            continue
        if section := _SECTION.match(line):
            sections.append((section[1], _size(section[2], place), []))
        elif (found := _LINE.match(line)) and sections:
            sections[-1][2].append(_step(found, place))
        else:
            raise ValueError(f"{place}: not a call: {line}")
    return [Sequence(name, limit, tuple(steps)) for name, limit, steps in sections]


def _step(found: re.Match[str], place: str) -> Step:
    error = found["error"] or "ok"
    if error not in ERRORS:
        raise ValueError(f"{place}: not a name in ERRORS: {error}")
    return Step(
        place=place,
        process=found["process"] or "main",
        thread=found["thread"] or "main",
        call=found["call"],
        words=tuple(_WORD.findall(found["words"])),
        code=ERRORS[error],
        charge_bytes=None if found["charge"] is None else _size(found["charge"], place),
    )


class _Guest:
    """One process that makes calls."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(PATIENCE_S)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", SERVER, str(other.fileno()), str(MESSAGE_BYTES)],
                cwd=ROOT,
                env=dict(environment),
                pass_fds=(other.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def ask(
        self, thread: str, call: str, arguments: list[Any], descriptors: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """Make one call in the process; the reply and the descriptors that came with it."""
        message = {"thread": thread, "call": call, "arguments": arguments}
        socket.send_fds(self._link, [json.dumps(message).encode()], descriptors)
        data, received, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES, 1)
        if not data:
            raise AssertionError(f"the process ended with {self.process.wait(PATIENCE_S)}")
        return json.loads(data), received

    def close(self) -> int:
        """Let the process end; its exit code."""
        self._link.close()
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()


class Replay(Closing):
    """Replays one sequence in processes of one container; use it in ``with``."""

    def __init__(self, sequence: Sequence, environment: Mapping[str, str], state: Path) -> None:
        """``environment`` has the limiter, ``state`` is the machine of the fake driver."""
        self._sequence = sequence
        self._environment = {
            **environment,
            "CUDA_DEVICE_MEMORY_LIMIT": str(sequence.limit_bytes),
        }
        self._state = state
        self._guests: dict[str, _Guest] = {}
        self._values: dict[str, int | bytes | Descriptor] = {}
        self._stack = ExitStack()

    def close(self) -> None:
        self._stack.close()

    def run(self, uuid: str) -> None:
        """Replay all steps on the device ``uuid``, then end.

        At the end only contexts are left; without these the charge is 0. AssertionError names the
        line that differs.
        """
        for step in self._sequence.steps:
            self._take(step)
            if step.charge_bytes is not None:
                self._compare(step.place, uuid, step.charge_bytes)
        self._compare("end", uuid, CONTEXT_BYTES * len(self._guests))
        for guest in self._guests.values():
            mapped = Path(f"/proc/{guest.process.pid}/maps").read_text()
            assert all(name in mapped for name in self._environment["LD_PRELOAD"].split())
            answer, _ = guest.ask("main", "cuDevicePrimaryCtxRelease_v2", [["int", 0]], [])
            assert answer["code"] == 0
        self._compare("release of the contexts", uuid, 0, has_context=False)
        for name, guest in self._guests.items():
            assert guest.close() == 0, name

    def _take(self, step: Step) -> None:
        if step.call == "check":
            name, expected = step.words
            assert self._values[name] == number(expected), f"{step.place}: {self._values[name]!r}"
            return
        if step.process not in self._guests:
            guest = self._guests[step.process] = _Guest(self._environment)
            self._stack.callback(guest.close)
        arguments = [self._argument(word, step.place) for word in step.words]
        sent = [value for kind, value in arguments if kind == "fd"]
        reply, received = self._guests[step.process].ask(step.thread, step.call, arguments, sent)
        for descriptor in received:
            self._stack.callback(os.close, descriptor)
        assert reply["code"] == step.code, f"{step.place}: {step.call} returned {reply['code']}"
        if reply["code"] == 0:
            self._keep(step.words, reply["outs"], iter(received))

    def _argument(self, word: str, place: str) -> tuple[str, Any]:
        if word.startswith(">"):
            size = word.partition(":")[2] or "8"
            return "out", "fd" if size == "fd" else int(size)
        if word.startswith('"'):
            return "in", word.strip('"').encode().hex()
        if word.startswith("&"):
            value = number(word[1:])
            raw = STRUCTURES[word[1:]] if value is None else value.to_bytes(8, sys.byteorder)
            return "in", raw.hex()
        if (plain := number(word)) is not None:
            return "int", plain
        name, _, offset = word.partition("+")
        value_ = self._values[name]
        if isinstance(value_, Descriptor):
            return "fd", value_.number
        if isinstance(value_, bytes):
            return "value", value_.hex()
        return "int", value_ + (_size(offset, place) if offset else 0)

    def _keep(self, words: tuple[str, ...], outs: list[str], received: Iterator[int]) -> None:
        names = (word[1:].partition(":") for word in words if word.startswith(">"))
        for (name, _, size), out in zip(names, outs, strict=True):
            raw = bytes.fromhex(out)
            if size == "fd":
                self._values[name] = Descriptor(next(received))
            else:
                self._values[name] = raw if size else int.from_bytes(raw, sys.byteorder)

    def _compare(self, place: str, uuid: str, bytes_: int, *, has_context: bool = True) -> None:
        """Compare a charge with all figures that a process sees, and with the driver's own."""
        limit = self._sequence.limit_bytes
        free = max(0, limit - bytes_)
        for name, guest in self._guests.items():
            figures, _ = guest.ask("main", "figures", [], [])
            where = f"{place}, process {name}: {figures}"
            assert figures["nvml"] == [limit, free, bytes_], where
            assert (figures["code"] == 0) == has_context, where
            if has_context:
                assert figures["driver"] == [limit, free], where
                pids = {one.process.pid for one in self._guests.values()}
                assert {pid for pid, _ in figures["processes"]} == pids, where
                assert sum(use for _, use in figures["processes"]) == bytes_, where
        with FakeCard(self._state) as card:
            assert card.used_bytes(uuid) == bytes_, f"{place}: the driver gave"
