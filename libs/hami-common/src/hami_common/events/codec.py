# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes messages; builds the CloudEvents headers of a record.

Encoders and decoders are built once per type. Consumers tolerate unknown fields; ``WireInvalid``
for any other content that does not fit the type. Headers follow CloudEvents 1.0, NATS protocol
binding, binary mode (``ce-…``); ``traceparent`` follows W3C Trace Context.
"""

from datetime import UTC, datetime
from typing import Final, TypeVar

import msgspec

from hami_common.bus import subjects
from hami_common.errors import WireInvalid

T = TypeVar("T")

UNDECODABLE: Final = (msgspec.DecodeError, UnicodeError, RecursionError)
"""Exceptions of msgspec decoders for bytes from outside; callers convert them to a ``HamiError``.
"""
_SHOWN: Final = 300
"""Characters of an error that are kept: it may quote the value."""
RANGES_PAGE: Final = "docs/wire.md, ranges"

_encoder = msgspec.json.Encoder(order="deterministic")
_decoders: dict[type, msgspec.json.Decoder[object]] = {}


def encode(message: msgspec.Struct) -> bytes:
    """Deterministic JSON of ``message``: equal Structs give equal bytes."""
    return _encoder.encode(message)


def decode(data: bytes, message_type: type[T], *, what: str) -> T:
    """``data`` as ``message_type``; ``what`` (subject, key, file) appears in the error."""
    decoder = _decoders.get(message_type)
    if decoder is None:
        decoder = _decoders[message_type] = msgspec.json.Decoder(message_type)
    try:
        return decoder.decode(data)  # type: ignore[return-value]  # the cache is keyed by the type it decodes
    except UNDECODABLE as error:
        raise WireInvalid(what=what, problem=problem_of(error)) from error


def problem_of(error: Exception) -> str:
    """Sentence about an error of ``UNDECODABLE``: the field, the bound and the fix.

    ``$.devices[0].index: Expected `int` <= 4095; write a value within it (docs/wire.md, ranges)``.
    """
    if isinstance(error, RecursionError):
        return f"is nested too deeply; write it flatter ({RANGES_PAGE})"
    text = str(error)
    problem, separator, where = text.rpartition(" - at ")
    if not separator or not isinstance(error, msgspec.ValidationError):
        return text[:_SHOWN]
    problem, field = problem[:_SHOWN], where.replace("`", "")
    is_range = " <= " in problem or " >= " in problem or problem.endswith("out of range")
    fix = f"; write a value within it ({RANGES_PAGE})" if is_range else ""
    return f"{field}: {problem}{fix}"


def out_of_range(message: msgspec.Struct) -> str:
    """Range that a message of ours violates, as ``problem_of`` states it; empty when it is valid.

    msgspec checks ranges when it decodes a Struct, not when code builds one.
    """
    try:
        decode(encode(message), type(message), what=type(message).__name__)
    except WireInvalid as error:
        return error.problem
    return ""


def decode_on(subject: str, data: bytes, message_type: type[T]) -> T:
    """Decode a message that a node's subject or key carries.

    ``WireInvalid`` when it does not decode, or names another node, vendor or pod than the subject:
    a login may publish on the subjects of its own node only, but writes any payload.
    """
    message = decode(data, message_type, what=subject)
    for field, expected in subjects.named(subject).items():
        if (said := getattr(message, field)) != expected:
            raise WireInvalid(
                what=subject, problem=f"{field} is {said!r}, the subject's is {expected!r}"
            )
    return message


def event_headers(
    *, event_id: str, event_type: str, source: str, time_s: float, traceparent: str = ""
) -> dict[str, str]:
    """CloudEvents headers of a record.

    ``event_type`` is ``io.hami.<noun>.<what>.v1``; ``source`` is ``/<service>/<replica or node>``.
    """
    headers = {
        "ce-specversion": "1.0",
        "ce-id": event_id,
        "ce-type": event_type,
        "ce-source": source,
        "ce-time": datetime.fromtimestamp(time_s, tz=UTC).isoformat().replace("+00:00", "Z"),
        "content-type": "application/json",
    }
    if traceparent:
        headers["traceparent"] = traceparent
    return headers
