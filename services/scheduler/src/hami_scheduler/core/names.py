# SPDX-License-Identifier: Apache-2.0
"""Finds thousands of node names at once.

A filter call brings the names of all nodes as fresh strings in any order. Looking each up in a
mapping costs a hash of the text and several cache misses, which is most of a cheap decision. Names
of one cluster mostly have one length, so they are read as rows of one byte matrix: hashed, found in
a table and compared with the true name, all rows at once. What that does not find is looked up one
by one, so the answer is always that of the mapping. Knows nothing but names and numbers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hami_scheduler.core.block import Ints

_Words = NDArray[np.uint64]

ABSENT: Final = -1
_WORD_BYTES: Final = 8
_LEAST_WORTH_IT: Final = 64
"""Fewer names than this are looked up one by one."""
_SPARSE_BITS: Final = 4
"""The table has this many times (as a power of two) more places than names."""
_LINE_END: Final = ord("\n")
_ODD: Final = np.uint64(0x9E37_79B9_7F4A_7C15)


class NameIndex:
    """A snapshot of a mapping from names to numbers."""

    def __init__(self, codes: Mapping[str, int]) -> None:
        """Index ``codes``, which the caller does not change as long as it asks."""
        self._codes = codes
        lengths = Counter(map(len, codes))
        self._length = max(lengths, key=lambda length: (lengths[length], length), default=0)
        names = [name for name in codes if len(name) == self._length]
        words = self._words(names)
        if words is None:
            self._length, words = 0, np.zeros((0, 0), np.uint64)
            names = []
        self._columns = words
        self._values = np.fromiter(map(codes.__getitem__, names), np.int64, len(names))
        self._bits = max(1, len(names)).bit_length() + _SPARSE_BITS
        self._rows = np.zeros(1 << self._bits, np.int32)
        self._rows[self._places(words)] = np.arange(len(names), dtype=np.int32)

    def find(self, names: Sequence[str]) -> Ints:
        """The number of each name, ``ABSENT`` where it has none."""
        words = None
        if len(names) >= _LEAST_WORTH_IT and len(self._values):
            words = self._words(names)
        if words is None:
            return np.fromiter(map(self._codes.get, names, repeat(ABSENT)), np.int64, len(names))
        rows = self._rows[self._places(words)]
        found = self._values[rows]
        same = np.ones(len(names), np.bool_)
        for known, asked in zip(self._columns, words, strict=True):
            same &= known[rows] == asked
        for i in np.flatnonzero(~same).tolist():
            found[i] = self._codes.get(names[i], ABSENT)
        return found

    def _words(self, names: Sequence[str]) -> _Words | None:
        """The names as 64-bit words, one row per word; ``None`` where a length differs."""
        length, count = self._length, len(names)
        text = ("\n".join(names) + "\n").encode()
        if not length or len(text) != count * (length + 1):
            return None
        rows = np.frombuffer(text, np.uint8).reshape(count, length + 1)
        ends = rows == _LINE_END
        if not ends[:, length].all() or np.count_nonzero(ends) != count:
            return None
        width = -(-length // _WORD_BYTES)
        padded = np.zeros((count, width * _WORD_BYTES), np.uint8)
        padded[:, :length] = rows[:, :length]
        return np.ascontiguousarray(padded.view(np.uint64).T)

    def _places(self, words: _Words) -> NDArray[np.intp]:
        """Where in the table each name belongs."""
        mixed = np.zeros(words.shape[1], np.uint64)
        for word in words:
            mixed ^= word
            mixed *= _ODD
            mixed ^= mixed >> np.uint64(29)
        mixed *= _ODD
        return (mixed >> np.uint64(64 - self._bits)).astype(np.intp)
