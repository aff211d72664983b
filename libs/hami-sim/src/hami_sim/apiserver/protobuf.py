# SPDX-License-Identifier: Apache-2.0
r"""Reads request bodies in Kubernetes' protobuf envelope, for the kinds that kubectl sends so.

kubectl's typed `create` commands (namespace, configmap, quota, token …) send protobuf and do not
fall back when it is refused. Answers are always JSON, which every client accepts. A kind that is
not in `_KINDS` is refused with 415, as a server without protobuf would.

Wire format: ``k8s\0`` + runtime.Unknown; field numbers from the generated.proto files of
``k8s.io/api`` v0.34. Fields that are not listed are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias

import msgspec

from hami_sim.apiserver.errors import Obj

_MAGIC: Final = b"k8s\x00"
_TYPE: Final = 1
_RAW: Final = 2
"""Fields of runtime.Unknown."""
_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5

Scalar: TypeAlias = Literal["string", "bytes", "int", "bool", "time", "quantity", "int-or-string"]


class WireError(ValueError):
    """The bytes are not a protobuf message of the expected shape."""


class _Field(msgspec.Struct, frozen=True):
    name: str
    kind: Scalar | _Message = "string"
    form: Literal["one", "many", "map"] = "one"


_Message: TypeAlias = dict[int, _Field]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise WireError("truncated varint")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - continuation bit
            return value, at
        shift += 7


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            msg = f"unknown wire type {wire}"
            raise WireError(msg)
        if at + length > len(data):
            raise WireError("truncated field")
        yield number, data[at : at + length]
        at += length


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _scalar(kind: Scalar, raw: int | bytes) -> object:
    if isinstance(raw, int):
        if kind == "bool":
            return bool(raw)
        return _signed(raw)
    match kind:
        case "string":
            return raw.decode()
        case "bytes":
            return msgspec.to_builtins(raw)
        case "time":
            return _time(raw)
        case "quantity":
            return dict(_message({1: _Field("string")}, raw)).get("string", "0")
        case "int-or-string":
            parts = _message(
                {1: _Field("type", "int"), 2: _Field("int", "int"), 3: _Field("text")}, raw
            )
            return parts.get("text", "") if parts.get("type") == 1 else parts.get("int", 0)
        case _:
            msg = f"expected {kind}, found bytes"
            raise WireError(msg)


def _time(raw: bytes) -> str | None:
    parts = _message({1: _Field("seconds", "int"), 2: _Field("nanos", "int")}, raw)
    if not parts:
        return None
    moment = datetime.fromtimestamp(parts.get("seconds", 0), UTC)
    moment = moment.replace(microsecond=parts.get("nanos", 0) // 1000)
    text = moment.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{moment.microsecond:06d}Z" if moment.microsecond else f"{text}Z"


def _value(field: _Field, raw: int | bytes) -> object:
    if isinstance(field.kind, dict):
        if isinstance(raw, int):
            msg = f"{field.name}: expected a message"
            raise WireError(msg)
        return _message(field.kind, raw)
    return _scalar(field.kind, raw)


def _message(shape: _Message, data: bytes) -> Obj:
    found: Obj = {}
    for number, raw in _fields(data):
        field = shape.get(number)
        if field is None:
            continue
        if field.form == "map":
            if isinstance(raw, int):
                msg = f"{field.name}: expected a map entry"
                raise WireError(msg)
            entry = _message({1: _Field("key"), 2: _Field("value", field.kind)}, raw)
            found.setdefault(field.name, {})[entry.get("key", "")] = entry.get("value", "")
        elif field.form == "many":
            found.setdefault(field.name, []).append(_value(field, raw))
        else:
            value = _value(field, raw)
            if value not in (None, ""):
                found[field.name] = value
    return found


_META: Final[_Message] = {
    1: _Field("name"),
    2: _Field("generateName"),
    3: _Field("namespace"),
    5: _Field("uid"),
    6: _Field("resourceVersion"),
    11: _Field("labels", form="map"),
    12: _Field("annotations", form="map"),
    13: _Field(
        "ownerReferences",
        {
            1: _Field("kind"),
            3: _Field("name"),
            4: _Field("uid"),
            5: _Field("apiVersion"),
            6: _Field("controller", "bool"),
            7: _Field("blockOwnerDeletion", "bool"),
        },
        "many",
    ),
    14: _Field("finalizers", form="many"),
}
_SELECTOR: Final[_Message] = {
    1: _Field("matchLabels", form="map"),
    2: _Field(
        "matchExpressions",
        {1: _Field("key"), 2: _Field("operator"), 3: _Field("values", form="many")},
        "many",
    ),
}
_ACCESS: Final[_Message] = {
    1: _Field(
        "resourceAttributes",
        {
            1: _Field("namespace"),
            2: _Field("verb"),
            3: _Field("group"),
            4: _Field("version"),
            5: _Field("resource"),
            6: _Field("subresource"),
            7: _Field("name"),
        },
    ),
    2: _Field("nonResourceAttributes", {1: _Field("path"), 2: _Field("verb")}),
    3: _Field("user"),
    4: _Field("groups", form="many"),
}
_DELETE_OPTIONS: Final[_Message] = {
    1: _Field("gracePeriodSeconds", "int"),
    2: _Field("preconditions", {1: _Field("uid"), 2: _Field("resourceVersion")}),
    3: _Field("orphanDependents", "bool"),
    4: _Field("propagationPolicy"),
    5: _Field("dryRun", form="many"),
}


_KINDS: Final[dict[tuple[str, str], _Message]] = {
    ("v1", "Namespace"): {1: _Field("metadata", _META)},
    ("v1", "ServiceAccount"): {1: _Field("metadata", _META)},
    ("v1", "ConfigMap"): {
        1: _Field("metadata", _META),
        2: _Field("data", form="map"),
        3: _Field("binaryData", "bytes", "map"),
        4: _Field("immutable", "bool"),
    },
    ("v1", "Secret"): {
        1: _Field("metadata", _META),
        2: _Field("data", "bytes", "map"),
        3: _Field("type"),
        4: _Field("stringData", form="map"),
        5: _Field("immutable", "bool"),
    },
    ("v1", "ResourceQuota"): {
        1: _Field("metadata", _META),
        2: _Field("spec", {1: _Field("hard", "quantity", "map"), 2: _Field("scopes", form="many")}),
    },
    ("scheduling.k8s.io/v1", "PriorityClass"): {
        1: _Field("metadata", _META),
        2: _Field("value", "int"),
        3: _Field("globalDefault", "bool"),
        4: _Field("description"),
        5: _Field("preemptionPolicy"),
    },
    ("policy/v1", "PodDisruptionBudget"): {
        1: _Field("metadata", _META),
        2: _Field(
            "spec",
            {
                1: _Field("minAvailable", "int-or-string"),
                2: _Field("selector", _SELECTOR),
                3: _Field("maxUnavailable", "int-or-string"),
                4: _Field("unhealthyPodEvictionPolicy"),
            },
        ),
    },
    ("policy/v1", "Eviction"): {
        1: _Field("metadata", _META),
        2: _Field("deleteOptions", _DELETE_OPTIONS),
    },
    ("coordination.k8s.io/v1", "Lease"): {
        1: _Field("metadata", _META),
        2: _Field(
            "spec",
            {
                1: _Field("holderIdentity"),
                2: _Field("leaseDurationSeconds", "int"),
                3: _Field("acquireTime", "time"),
                4: _Field("renewTime", "time"),
                5: _Field("leaseTransitions", "int"),
            },
        ),
    },
    ("authentication.k8s.io/v1", "TokenRequest"): {
        1: _Field("metadata", _META),
        2: _Field(
            "spec", {1: _Field("audiences", form="many"), 4: _Field("expirationSeconds", "int")}
        ),
    },
    ("authentication.k8s.io/v1", "SelfSubjectReview"): {1: _Field("metadata", _META)},
    ("authorization.k8s.io/v1", "SelfSubjectAccessReview"): {2: _Field("spec", _ACCESS)},
    ("authorization.k8s.io/v1", "SubjectAccessReview"): {2: _Field("spec", _ACCESS)},
}


def decode(body: bytes) -> Obj | None:
    """Read an object; None when its kind is not one that is read here."""
    if not body.startswith(_MAGIC):
        raise WireError("the body does not start with the k8s magic")
    api_version = kind = ""
    raw = b""
    for number, value in _fields(body[len(_MAGIC) :]):
        if number == _TYPE and isinstance(value, bytes):
            named = _message({1: _Field("apiVersion"), 2: _Field("kind")}, value)
            api_version, kind = named.get("apiVersion", ""), named.get("kind", "")
        elif number == _RAW and isinstance(value, bytes):
            raw = value
    shape = _KINDS.get((api_version, kind))
    if shape is None:
        return None
    return {"kind": kind, "apiVersion": api_version, **_message(shape, raw)}
