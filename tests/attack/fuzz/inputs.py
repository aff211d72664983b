# SPDX-License-Identifier: Apache-2.0
"""Makes hostile values, and damages documents and bytes, without knowledge of their meaning.

Documents are plain data that ``msgspec.json.encode`` takes; ``msgspec.Raw`` stands for JSON that no
Python value can express, such as a number of 5,000 digits or a lone surrogate.
"""

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

DIGITS = "9" * 5000
"""More than ``int()`` reads."""
LONG = "a" * 70_000
STRINGS: Sequence[str] = (
    "", " ", "0", "-1", "1", "2147483648", "9223372036854775808", "1e400", "nan", "inf", "-0", "+1",
    "0x10", "1_000", "٣", "²", "½", "1" * 19, "9" * 400, DIGITS, "1e999999999", "0.1", "1.5Gi",
    "3Gi", "1k", "1m", "999Ei", "true", "null", "[]", "{}", '"', "\\", "\x00", "\n", "\r\n", "\t",
    "\x7f", "\u202e", "\ufeff", "\U0001f4a9", "é", "ß" * 300, "a" * 64, "a" * 254, LONG, "a.b.c",
    "..", "../../../../etc/shadow", "../" * 40, "//etc//hami", "/", "a/b", "a,b,c", "a=b", "=",
    ",", "*", ">", "$KV.hami_alloc.x", "a b", "%s%n", "%2e%2e%2f", "{0.__class__}", "${x}", "~~~~",
    "x?limit=500&y=", "#", ":", "-", "--", "-a", "a-", "_", "A" * 300, "GPU-", "hami.io/webhook",
    "slot=" + "9" * 400, "core=-1", "GPU-x,GPU-x", ",".join(["GPU-0"] * 5000),
)  # fmt: skip
NUMBERS: Sequence[Any] = (
    0, 1, -1, 2, 10, 100, 101, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, -(2**31) - 1,
    2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**20, 10**30, 0.5, -0.0,
    1e308, 5e-324, 1e-7, 99.999, msgspec.Raw(b"1e400"), msgspec.Raw(b"-1e400"),
    msgspec.Raw(DIGITS.encode()), msgspec.Raw(b"0." + b"1" * 5000), msgspec.Raw(b"1" + b"0" * 4000),
)  # fmt: skip
DEEP = (100, 900, 1_100, 20_000)


def pick(chance: random.Random, values: Sequence[T]) -> T:
    """Choose one value; faster than ``Random.choice``."""
    return values[int(chance.random() * len(values))]


def value(chance: random.Random) -> Any:
    """Return any JSON value, most often of the wrong type, rarely deep or invalid."""
    kind = int(chance.random() * 16)
    if kind < 6:
        return pick(chance, STRINGS)
    if kind < 10:
        return pick(chance, NUMBERS)
    match kind:
        case 10:
            return None
        case 11:
            return chance.random() < 0.5
        case 12:
            return [pick(chance, STRINGS) for _ in range(chance.randrange(4))]
        case 13:
            return {
                pick(chance, STRINGS): pick(chance, NUMBERS) for _ in range(chance.randrange(4))
            }
        case 14:
            return msgspec.Raw(b'"\\ud800"')
        case _:
            depth = pick(chance, DEEP)
            opening, closing = pick(chance, ((b"[", b"]"), (b'{"a":', b"}")))
            return msgspec.Raw(opening * depth + b"0" + closing * depth)


def mutated(document: Any, chance: random.Random, *, times: int = 1) -> Any:
    """Change ``document`` in place at random depths and return it."""
    for _ in range(times):
        place, key = _place(document, chance)
        if place is None:
            return value(chance)
        match int(chance.random() * 8):
            case 0:
                del place[key]
            case 1 if isinstance(place, list):
                place.extend([place[key]] * pick(chance, (1, 2, 300)))
            case 2 if isinstance(place, dict):
                place[pick(chance, STRINGS)] = place[key]
            case 3:
                place[key] = [place[key]]
            case 4:
                place[key] = {"a": place[key]}
            case _:
                place[key] = value(chance)
    return document


def _place(document: Any, chance: random.Random) -> tuple[Any, Any]:
    """Choose a container inside ``document`` and one of its keys."""
    place: Any = None
    key: Any = None
    while isinstance(document, dict | list) and document:
        place = document
        if isinstance(document, dict):
            key = pick(chance, list(document))
        else:
            key = chance.randrange(len(document))
        document = place[key]
        if chance.random() < 0.15:
            break
    return place, key


SCRAPS: Sequence[bytes] = (
    b"", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b'"', b"\\", b"\\u0000", b"\\ud800", b"{", b"}",
    b"[", b"]", b",", b":", b"null", b"true", b"-", b"1e9999", b"0", b" ", b"\n", b"NaN",
    b"Infinity",     b"[" * 2000, b'{"a":' * 2000, DIGITS.encode(), b'"a":1,"a":2,',
)  # fmt: skip


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return ``data`` after one to four accidents: cut, inserted, overwritten, doubled bytes."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match int(chance.random() * 6):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + data[at + chance.randint(1, 9) :]
            case 2:
                data = data[:at] + pick(chance, SCRAPS) + data[at:]
            case 3:
                data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
            case 4:
                end = min(len(data), at + chance.randint(1, 200))
                data = data[:end] + data[at:end] + data[end:]
            case _:
                data = data[:at] + chance.randbytes(chance.randint(1, 8)) + data[at:]
    return data


def encoded(document: Any) -> bytes:
    """Return the JSON of a document; a key that is not text becomes one."""
    return msgspec.json.encode(document)
