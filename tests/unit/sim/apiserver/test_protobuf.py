# SPDX-License-Identifier: Apache-2.0
"""Protobuf bodies."""

import pytest

from hami_sim.apiserver.protobuf import WireError, decode


def field(number: int, value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        return bytes([number << 3]) + varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return bytes([number << 3 | 2]) + varint(len(raw)) + raw


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def envelope(api_version: str, kind: str, raw: bytes) -> bytes:
    named = field(1, api_version) + field(2, kind)
    return b"k8s\x00" + field(1, named) + field(2, raw)


def test_config_map_with_maps_and_labels() -> None:
    entry = field(1, "k") + field(2, "v")
    raw = field(1, field(1, "name") + field(11, entry)) + field(2, entry) + field(4, 1)
    assert decode(envelope("v1", "ConfigMap", raw)) == {
        "kind": "ConfigMap",
        "apiVersion": "v1",
        "metadata": {"name": "name", "labels": {"k": "v"}},
        "data": {"k": "v"},
        "immutable": True,
    }


def test_quota_amounts_are_text() -> None:
    entry = field(1, "pods") + field(2, field(1, "10"))
    found = decode(envelope("v1", "ResourceQuota", field(2, field(1, entry))))
    assert found is not None
    assert found["spec"]["hard"] == {"pods": "10"}


def test_int_or_string_and_negative_numbers() -> None:
    percent = field(1, 1) + field(3, "50%")
    number = field(1, 0) + field(2, 3)
    spec = field(1, percent) + field(3, number)
    found = decode(envelope("policy/v1", "PodDisruptionBudget", field(2, spec)))
    assert found is not None
    assert found["spec"] == {"minAvailable": "50%", "maxUnavailable": 3}
    low = decode(envelope("scheduling.k8s.io/v1", "PriorityClass", field(2, 2**64 - 5)))
    assert low is not None
    assert low["value"] == -5


def test_times_are_rfc_3339() -> None:
    spec = field(4, field(1, 1767225600) + field(2, 5000))
    found = decode(envelope("coordination.k8s.io/v1", "Lease", field(2, spec)))
    assert found is not None
    assert found["spec"] == {"renewTime": "2026-01-01T00:00:00.000005Z"}


def test_kinds_without_a_table_are_not_read() -> None:
    assert decode(envelope("v1", "Pod", b"")) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"k8s\x00\x0a\xff",
        envelope("v1", "ConfigMap", b"\x0a\x7f"),
        envelope("v1", "ConfigMap", b"\x0b"),
        envelope("v1", "ConfigMap", b"\x80"),
    ],
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        decode(body)
