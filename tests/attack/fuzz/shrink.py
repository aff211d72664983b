# SPDX-License-Identifier: Apache-2.0
"""Makes a failing input small: first as a JSON document, then as bytes.

``still`` says whether an input fails in the same way. At most ``tries`` inputs are tried, for at
most ``SECONDS``.
"""

import copy
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

SECONDS = 20.0
Still = Callable[[bytes], Awaitable[bool]]


async def smaller(body: bytes, still: Still, *, tries: int = 300) -> bytes:
    """Return the smallest input found that still fails."""
    search = _Search(still, tries)
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return await search.as_bytes(body)
    best = await search.as_document(document, body)
    return await search.as_bytes(best) if len(best) < len(body) else best


class _Search:
    def __init__(self, still: Still, tries: int) -> None:
        self._still = still
        self._left = tries
        self._end_s = time.monotonic() + SECONDS

    async def _fails(self, body: bytes) -> bool:
        self._left -= 1
        if time.monotonic() > self._end_s:
            self._left = 0
        return self._left >= 0 and await self._still(body)

    async def as_document(self, document: Any, body: bytes) -> bytes:
        """Remove parts as long as it fails without them."""
        best = body
        progress = True
        while progress and self._left > 0:
            progress = False
            for path in sorted(_paths(document), key=len):
                for candidate in _without(document, path):
                    smaller_body = msgspec.json.encode(candidate)
                    if len(smaller_body) < len(best) and await self._fails(smaller_body):
                        document, best, progress = candidate, smaller_body, True
                        break
                if progress or self._left <= 0:
                    break
        return best

    async def as_bytes(self, body: bytes) -> bytes:
        """Remove ever smaller pieces as long as it fails without them."""
        piece = len(body) // 2
        while piece and self._left > 0:
            at = 0
            while at < len(body) and self._left > 0:
                candidate = body[:at] + body[at + piece :]
                if await self._fails(candidate):
                    body = candidate
                else:
                    at += piece
            piece //= 2
        return body


def _paths(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every part; of long lists only the first and the last items."""
    if path:
        yield path
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _paths(value, (*path, key))
    elif isinstance(document, list):
        for place in {*range(min(3, len(document))), len(document) - 1} - {-1}:
            yield from _paths(document[place], (*path, place))


def _without(document: Any, path: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the document without the part, then with less of it."""
    reduced = copy.deepcopy(document)
    place = _at(reduced, path[:-1])
    part = place[path[-1]]
    del place[path[-1]]
    yield reduced
    if isinstance(part, list | str) and len(part) > 1:
        for half in (part[: len(part) // 2], part[len(part) // 2 :]):
            reduced = copy.deepcopy(document)
            _at(reduced, path[:-1])[path[-1]] = half
            yield reduced


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document
