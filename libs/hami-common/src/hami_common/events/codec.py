# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes messages; builds the CloudEvents headers of a record.

Encoders and decoders are built once per type. Consumers tolerate unknown fields and refuse anything
else that does not fit the type with ``WireInvalid``. Headers follow CloudEvents 1.0, NATS protocol
binding, binary mode (``ce-…``); ``traceparent`` follows W3C Trace Context.
"""

from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from hami_common import subjects
from hami_common.errors import WireInvalid

T = TypeVar("T")

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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireInvalid(what=what, problem=str(error)) from error


def decode_on(subject: str, data: bytes, message_type: type[T]) -> T:
    """Decode a message that a node's subject or key carries.

    ``WireInvalid`` when it does not decode, or names another node, vendor or pod than the subject:
    a login may speak on the subjects of its own node only, but writes any payload.
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
