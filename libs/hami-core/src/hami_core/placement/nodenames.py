# SPDX-License-Identifier: Apache-2.0
"""Finds the node names of a request by the thousand and writes them back without decoding them.

kube-scheduler names every node in every call, in any order, as a JSON array. Decoding the strings
and looking each up costs more than a cheap decision. Names of one cluster mostly have one length;
then the array's text is a matrix of bytes with one name per row, and is read as such: hashed where
names differ, found in a table and compared with the true names, byte for byte, all rows at once.
Names that are not found this way are decoded and looked up one by one, so the answer is always that
of the mapping. Handles only names and numbers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hami_common.bounds import OBJECT_LIST_MOST, Name
from hami_common.errors import WireInvalid
from hami_common.events.codec import UNDECODABLE, problem_of
from hami_core.table.block import Bools, Columns, Ints

Bytes = NDArray[np.uint8]
_Words = NDArray[np.uint64]

ABSENT: Final = -1
_WORD_BYTES: Final = 8
_LEAST_WORTH_IT: Final = 64
"""Fewer names than this are looked up one by one."""
_ROWS_AT_ONCE: Final = 64
"""Rows of names that are compared as one row of words."""
_SPARSE_BITS: Final = 3
"""The table has this many times (as a power of two) more places than names."""
_WRAPPED_KEPT: Final = 4
"""Texts around names with which all of them are kept."""
_MARKS: Final = 3
"""Bytes around each name: two quotes and a comma."""
_ODD: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_FOLD: Final = np.uint64(29)

_decoder = msgspec.json.Decoder(Annotated[list[Name], msgspec.Meta(max_length=OBJECT_LIST_MOST)])
_encoder = msgspec.json.Encoder()


class NodeNames:
    """Names in the order of the request: as JSON text, as a matrix of it, or as strings."""

    __slots__ = ("_names", "rows", "source", "text")

    def __init__(self, text: bytes, names: Sequence[str] | None = None) -> None:
        """``text`` is the JSON array without its opening bracket; ``names`` the same, decoded."""
        self.text = text
        self.rows: Bytes | None = None
        """One name with its quotes and separator per row; ``None`` until known to be so."""
        self.source: tuple[NameIndex, Ints] | None = None
        """An index that contains all of the names, and their rows in it."""
        self._names = names

    @classmethod
    def of(cls, names: Iterable[str]) -> "NodeNames":
        """Return the names of a list."""
        return cls(b"", list(names))

    def __len__(self) -> int:
        return len(self.strings()) if self.rows is None else len(self.rows)

    def strings(self) -> Sequence[str]:
        """Return all names; ``WireInvalid`` when the text is no array of strings."""
        if self._names is None:
            try:
                self._names = _decoder.decode(b"[" + self.text)
            except UNDECODABLE as error:
                problem = problem_of(error).replace("$", "$.NodeNames", 1)
                raise WireInvalid(what="ExtenderArgs", problem=problem) from error
        return self._names

    def places(self) -> Columns:
        """Return the place of every name."""
        return np.arange(len(self))

    def nothing(self) -> Ints:
        """Return the number 0 for every name."""
        return np.zeros(len(self), np.int64)

    def string(self, place: int) -> str:
        """Return one name."""
        if self._names is None and self.rows is not None:
            return bytes(self.rows[place, 1 : 1 - _MARKS]).decode()
        return self.strings()[place]

    def several(self, places: Columns) -> list[str]:
        """Return the names at ``places``."""
        if self._names is None and self.rows is not None:
            text, stride = self.rows.take(places, axis=0).tobytes().decode(), self.rows.shape[1]
            return [text[i + 1 : i - _MARKS + 1 + stride] for i in range(0, len(text), stride)]
        names = self.strings()
        return [names[place] for place in places.tolist()]

    def part(self, mask: Bools) -> "NodeNames":
        """Return the names where ``mask`` is set; itself where that is everywhere."""
        return self if mask.all() else self.at(np.flatnonzero(mask))

    def at(self, places: Columns) -> "NodeNames":
        """Return the same as ``several``, without making strings where that can be avoided."""
        if self.rows is None:
            return NodeNames.of(self.several(places))
        rows = self.rows.take(places, axis=0)
        if not len(rows):
            return NodeNames.of(())
        rows[:, -1] = ord(",")
        rows[-1, -1] = ord("]")
        part = NodeNames(rows.tobytes())
        part.rows = rows
        if self.source is not None:
            index, at = self.source
            part.source = index, at.take(places)
        return part

    def divided(self, name: str) -> tuple["NodeNames", Columns]:
        """Return (just this name if it is among them, the places of all others)."""
        is_it = np.array([other == name for other in self.strings()], np.bool_)
        return self.part(is_it), np.flatnonzero(~is_it)

    def json(self) -> bytes:
        """Return the names as a JSON array."""
        return b"".join(self.pieces())

    def pieces(self) -> tuple[bytes, ...]:
        """Return the parts of ``json``, to be joined with the surrounding text."""
        return (b"[", self.text) if self.text else (_encoder.encode(self._names),)

    def wrapped(self, places: Columns, before: bytes, after: bytes) -> "Lines":
        """Return the names at ``places`` as JSON strings, each between ``before`` and ``after``."""
        return Lines(self, places, before, after)

    def labelled(
        self, places: Columns, before: bytes, numbers: Ints, labels: Sequence[bytes]
    ) -> memoryview:
        """Return the names at ``places`` as JSON strings, between ``before`` and a number's label.

        ``numbers`` has one for each place; labels are equally long.
        """
        if self.rows is None:
            quoted = map(_encoder.encode, self.several(places))
            tails = map(labels.__getitem__, numbers.tolist())
            lines = [before + name + tail for name, tail in zip(quoted, tails, strict=True)]
            return memoryview(b"".join(lines))
        start, end = len(before), len(before) + self.rows.shape[1] - 1
        tails_of = np.frombuffer(b"".join(labels), np.uint8).reshape(len(labels), -1)
        text = np.empty((len(places), end + tails_of.shape[1]), np.uint8)
        text[:, :start] = np.frombuffer(before, np.uint8)
        text[:, start:end] = self.rows.take(places, axis=0)[:, :-1]
        text[:, end:] = tails_of.take(numbers, axis=0)
        return text.reshape(-1).data


class Lines:
    """Some of the names as JSON strings between two texts, to be written where they are wanted."""

    def __init__(self, names: NodeNames, places: Columns, before: bytes, after: bytes) -> None:
        """Prepare the names at ``places``, each between ``before`` and ``after``."""
        self._names, self._places, self._before, self._after = names, places, before, after
        self._text = b""
        if names.rows is None:
            strings = names.several(places)
            self._text = b"".join([before + _encoder.encode(name) + after for name in strings])
            self._size = len(self._text)
        else:
            width = len(before) + names.rows.shape[1] - 1 + len(after)
            self._size = len(places) * width

    def __len__(self) -> int:
        """Return the size in bytes."""
        return self._size

    def write(self, into: Bytes) -> None:
        """Write the lines into ``into``, which has exactly their size."""
        rows, places = self._names.rows, self._places
        if rows is None or not self._size:
            into[:] = np.frombuffer(self._text, np.uint8)
            return
        lines = into.reshape(len(places), -1)
        if self._names.source is not None:
            index, at = self._names.source
            known = index.wrapped(self._before, self._after)
            if known is not None:
                known.take(at.take(places), axis=0, out=lines, mode="clip")
                return
        start, end = len(self._before), lines.shape[1] - len(self._after)
        lines[:] = np.frombuffer(self._before + bytes(end - start) + self._after, np.uint8)
        lines[:, start:end] = rows.take(places, axis=0)[:, :-1]

    def __bytes__(self) -> bytes:
        """Return the lines."""
        text = np.empty(self._size, np.uint8)
        self.write(text)
        return text.tobytes()


def joined(parts: Sequence[bytes | Lines]) -> bytes | bytearray:
    """Join all parts; of lines before another part the last comma is left out.

    Lines can be as long as all the rest together, so they are written once, at their final place.
    """
    parts = [part for part in parts if len(part)]
    if not any(isinstance(part, Lines) for part in parts):
        return b"".join(part for part in parts if isinstance(part, bytes))
    whole = bytearray(sum(map(len, parts)))
    written, at = np.frombuffer(whole, np.uint8), 0
    for part, following in zip(parts, (*parts[1:], b""), strict=True):
        end = at + len(part)
        if isinstance(part, bytes):
            whole[at:end] = part
        else:
            part.write(written[at:end])
            end -= isinstance(following, bytes)
        at = end
    del written  # else the size cannot be changed
    del whole[at:]
    return whole


class Found(NamedTuple):
    """The numbers of some names, in their order."""

    numbers: Ints
    """``ABSENT`` where a name has none."""
    least: int
    """No number is smaller."""
    most: int
    """No number is larger."""

    @classmethod
    def of(cls, numbers: Ints) -> "Found":
        """Return these numbers with their bounds."""
        if not len(numbers):
            return cls(numbers, ABSENT, ABSENT)
        return cls(numbers, int(numbers.min()), int(numbers.max()))


class NameIndex:
    """A snapshot of a mapping from names to numbers."""

    def __init__(self, codes: Mapping[str, int]) -> None:
        """Index ``codes``, which the caller does not change while it uses the index."""
        self._codes = codes
        self._wrapped: dict[tuple[bytes, bytes], Bytes | None] = {}
        """The least recently used first; ``None`` after the first request."""
        plain = [name for name in codes if _is_plain(name)]
        lengths = Counter(map(len, plain))
        length = max(lengths, key=lambda length: (lengths[length], length), default=0)
        self._stride = length + _MARKS
        self._is_even = self._stride > _WORD_BYTES
        if not self._is_even:
            return
        names = sorted((n for n in plain if len(n) == length), key=codes.__getitem__)
        text = "".join(f'"{name}",' for name in names).encode()
        known = np.frombuffer(text, np.uint8).reshape(len(names), self._stride)
        self._known = known
        self._windows = _windows(known)
        self._words = [self._read(text, len(names), offset) for offset in self._windows]
        self._frame = _Frame(known[0], self._windows)
        self._values = np.fromiter(map(codes.__getitem__, names), np.int64, len(names))
        self._least, self._most = int(self._values[0]), int(self._values[-1])
        self._has_no_gap = self._most - self._least == len(names) - 1
        self._shift = np.uint64(64 - max(1, len(names)).bit_length() - _SPARSE_BITS)
        self._keys = _mixed(self._words, len(names))
        spots = self._spots(self._keys)
        kind = np.min_scalar_type(len(names))  # small, so that the caches hold it
        self._rows = np.zeros(1 << (64 - int(self._shift)), kind)
        self._rows[spots] = np.arange(len(names), dtype=kind)
        beside = np.flatnonzero(self._rows[spots] != np.arange(len(names)))
        self._beside = beside[np.argsort(self._keys[beside])]
        self._keys_beside = self._keys[self._beside]

    def find(self, names: NodeNames) -> Found:
        """Return the number of each name."""
        found = self._find_rows(names) if names.text and self._is_even else None
        if found is None:
            strings = names.strings()
            numbers = map(self._codes.get, strings, repeat(ABSENT))
            return Found.of(np.fromiter(numbers, np.int64, len(strings)))
        return found

    def _find_rows(self, names: NodeNames) -> Found | None:
        """Find all names at once; ``None`` when the text is no matrix of names."""
        text = names.text
        count, rest = divmod(len(text), self._stride)
        if rest or count < _LEAST_WORTH_IT:
            return None
        words = [self._read(text, count, offset) for offset in self._windows]
        keys = _mixed(words, count)
        rows = self._rows.take(self._spots(keys)).astype(np.int64)
        strange = np.flatnonzero(self._keys.take(rows) != keys)
        if len(strange) and len(self._beside):
            at = np.searchsorted(self._keys_beside, keys[strange])
            rows[strange] = self._beside[np.minimum(at, len(self._beside) - 1)]
            strange = strange[self._keys[rows[strange]] != keys[strange]]
        if len(words) > 1:  # only a single word is its own key
            pairs = zip(self._words, words, strict=True)
            differ = [known.take(rows) != word for known, word in pairs]
            strange = np.flatnonzero(np.logical_or.reduce(differ))
        asked = np.frombuffer(text, np.uint8).reshape(count, self._stride)
        if not self._frame.holds(text, count):
            strange = np.union1d(strange, self._frame.broken(asked))
        at = rows
        rows = at + self._least if self._has_no_gap else self._values.take(at)
        for i in strange.tolist():
            name = _name_of(asked[i], mark="]" if i == count - 1 else ",")
            if name is None:
                return None
            rows[i] = self._codes.get(name, ABSENT)
        names.rows = asked
        if len(strange):
            return Found.of(rows)
        names.source = self, at
        return Found(rows, self._least, self._most)

    def wrapped(self, before: bytes, after: bytes) -> Bytes | None:
        """Return all names of the common length between ``before`` and ``after``, one per row.

        ``None`` at the first request: most texts are not requested twice.
        """
        key = before, after
        is_told = key in self._wrapped
        found = self._wrapped.pop(key, None)
        if is_told and found is None:
            start, end = len(before), len(before) + self._stride - 1
            found = np.empty((len(self._known), end + len(after)), np.uint8)
            found[:] = np.frombuffer(before + bytes(end - start) + after, np.uint8)
            found[:, start:end] = self._known[:, :-1]
        elif len(self._wrapped) >= _WRAPPED_KEPT:
            del self._wrapped[next(iter(self._wrapped))]
        self._wrapped[key] = found
        return found

    def _read(self, text: bytes, count: int, offset: int) -> _Words:
        """Return eight bytes of each row of a text, from ``offset`` on."""
        return np.ndarray((count,), np.uint64, text, offset, (self._stride,)).copy()

    def _spots(self, keys: _Words) -> NDArray[np.intp]:
        """Return the position of each name in the table."""
        spots: _Words = keys * _ODD
        spots >>= self._shift
        return spots.view(np.intp)


class _Frame:
    """The bytes that all known names have in common, with the marks around them."""

    def __init__(self, row: Bytes, windows: Sequence[int]) -> None:
        """``row`` is any of the names; the bytes that ``windows`` read are not compared."""
        self._mask = np.full(len(row), 0xFF, np.uint8)
        for offset in windows:
            self._mask[offset : offset + _WORD_BYTES] = 0
        self._row = row & self._mask
        self._masks = np.tile(self._mask, _ROWS_AT_ONCE).view(np.uint64)
        rows = np.tile(self._row, _ROWS_AT_ONCE)
        self._rows = rows.tobytes()
        rows[-1] = ord("]")
        self._last_rows = rows.tobytes()

    def holds(self, text: bytes, count: int) -> bool:
        """Return whether all rows of a text have the common bytes.

        There are at least ``_ROWS_AT_ONCE`` rows.
        """
        words, size = len(self._masks), len(self._rows)
        last = np.frombuffer(text, np.uint64, words, len(text) - size)
        if (last & self._masks).tobytes() != self._last_rows:
            return False
        whole = (count - 1) // _ROWS_AT_ONCE
        if not whole:
            return True
        have = np.frombuffer(text, np.uint64, whole * words).reshape(whole, words)
        # Bytes are the same in all rows where their or and their and are the same.
        for reduce in (np.bitwise_or.reduce, np.bitwise_and.reduce):
            if (reduce(have, axis=0) & self._masks).tobytes() != self._rows:
                return False
        return True

    def broken(self, asked: Bytes) -> Columns:
        """Return the rows of the end of a text without the common bytes."""
        differ = (asked ^ self._row) & self._mask
        differ[-1, -1] = asked[-1, -1] != ord("]")
        return np.flatnonzero(differ.any(axis=1))


def _mixed(words: Sequence[_Words], count: int) -> _Words:
    """Return a number for each name, of all bytes in which known names differ."""
    if not words:
        return np.zeros(count, np.uint64)
    keys = words[0]
    for word in words[1:]:
        keys = keys * _ODD
        keys ^= keys >> _FOLD
        keys ^= word
    return keys


def _windows(rows: Bytes) -> list[int]:
    """Return offsets of eight-byte reads that together cover every column in which rows differ.

    The byte after the closing quote is never read: it differs in the last row of a text.
    """
    last = rows.shape[1] - 1 - _WORD_BYTES
    windows: list[int] = []
    for column in np.flatnonzero((rows != rows[0]).any(axis=0)).tolist():
        if not windows or column >= windows[-1] + _WORD_BYTES:
            windows.append(min(column, last))
    return windows


def _is_plain(name: str) -> bool:
    """Return whether JSON writes the name unescaped, with one byte for each letter."""
    return name.isascii() and _encoder.encode(name) == f'"{name}"'.encode()


def _name_of(row: Bytes, *, mark: str) -> str | None:
    """Return the name in a row of the matrix; ``None`` when the row is no plain name."""
    text = bytes(row)
    inside = text[1 : 1 - _MARKS]
    if text != b'"%b"%b' % (inside, mark.encode()) or not inside.isascii():
        return None
    name = inside.decode()
    return name if _is_plain(name) else None
