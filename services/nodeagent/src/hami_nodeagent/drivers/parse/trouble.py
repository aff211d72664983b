# SPDX-License-Identifier: Apache-2.0
"""Maps the error messages of a tool to the agent's errors.

Rules are tried in order, those of the vendor before those that all tools share. The vendor's own
words are kept in the error, shortened to one line.
"""

import re
from collections.abc import Sequence

from msgspec import Struct

from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DeviceBusy,
    DeviceGone,
    DriverDenied,
    DriverError,
    DriverMissing,
    DriverTransient,
    HardwareAbsent,
    NotSupported,
    ToolMismatch,
)

_NOT_FOUND = 127
_LONGEST = 200


class Rule(Struct, frozen=True, kw_only=True):
    """Words that mean ``kind``."""

    words: str
    """Regular expression, looked for anywhere, without regard to case."""
    kind: type[DriverError]


SHARED = (
    Rule(words=r"version mismatch|not compatible with|driver.{0,40}mismatch", kind=ToolMismatch),
    Rule(words=r"command not found|: not found$", kind=DriverMissing),
    Rule(words=r"error while loading shared libraries", kind=DriverMissing),
    Rule(
        words=r"driver (is )?not (loaded|installed|initiali[sz]ed)|not found in modules"
        r"|driver.{0,40}not running",
        kind=DriverMissing,
    ),
    Rule(words=r"permission denied|insufficient permissions|must be root", kind=DriverDenied),
    Rule(
        words=r"no (\w+ )?devices? (were |was )?found|there is no device",
        kind=HardwareAbsent,
    ),
    Rule(words=r"(gpu|device|card) is lost|fell off the bus", kind=DeviceGone),
    Rule(words=r"device or resource busy|because the device is used", kind=DeviceBusy),
    Rule(
        words=r"does not support|not supported|unknown (option|argument|command)"
        r"|unrecognized argument|invalid choice|usage:",
        kind=NotSupported,
    ),
    Rule(words=r"timed? ?out|temporarily unavailable|not ready", kind=DriverTransient),
)


def trouble(doing: str, words: str, status: int, rules: Sequence[Rule] = ()) -> DriverError | None:
    """Return the error for ``words`` and the exit status; ``None`` if they mean success."""
    detail = one_line(words)
    for rule in (*rules, *SHARED):
        if re.search(rule.words, words, re.IGNORECASE | re.MULTILINE):
            return rule.kind(doing=doing, detail=detail, code=status)
    if status == _NOT_FOUND:
        return DriverMissing(doing=doing, detail=detail or "not installed", code=status)
    return None


def unexplained(doing: str, words: str, status: int) -> AnswerUnknown:
    """Return the error for words without a known meaning."""
    return AnswerUnknown(doing=doing, detail=one_line(words) or "it said nothing", code=status)


def one_line(words: str) -> str:
    """The first words of a text, on one line."""
    joined = " ".join(words.split())
    return joined if len(joined) <= _LONGEST else f"{joined[:_LONGEST]} …"
