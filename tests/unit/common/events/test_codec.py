# SPDX-License-Identifier: Apache-2.0
"""Messages: deterministic out, tolerant in, errors that name the message; CloudEvents headers."""

import pytest

from hami_common.errors import WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord, joined_state
from hami_common.events.inventory import Heartbeat, NodeReport
from hami_common.model.device import DeviceFacts, Link
from hami_common.model.placement import ContainerShares, Share

RECORD = AllocationRecord(
    op="reserve",
    allocation_id="a1",
    node="node.a",
    pod_uid="u1",
    namespace="default",
    pod="web-0",
    containers=(
        ContainerShares(
            name="main", kind="app", shares=(Share(vendor="nvidia", uuid="G", memory_mib=1),)
        ),
    ),
    time_s=1.5,
    lease_s=30.0,
)


def test_a_message_is_unchanged_by_a_round_trip() -> None:
    data = codec.encode(RECORD)
    assert codec.decode(data, AllocationRecord, what="x") == RECORD


def test_equal_messages_have_equal_bytes_and_defaults_are_left_out() -> None:
    one = DeviceFacts(
        uuid="u", vendor="v", index=0, type="t", memory_mib=1, attributes={"b": "2", "a": "1"}
    )
    two = DeviceFacts(
        uuid="u", vendor="v", index=0, type="t", memory_mib=1, attributes={"a": "1", "b": "2"}
    )
    assert codec.encode(one) == codec.encode(two)
    assert b"healthy" not in codec.encode(one)


def test_links_are_arrays_on_the_wire() -> None:
    report = NodeReport(
        node="n", vendor="v", boot_id="b", seq=1, time_s=0.0, links=(Link(a="1", b="2", score=9),)
    )
    assert b'"links":[["1","2",9]]' in codec.encode(report)


def test_unknown_fields_are_skipped_so_that_fields_can_be_added() -> None:
    data = b'{"node":"n","boot_id":"b","seq":1,"time_s":2,"future":{"deep":[1,{"x":null}]}}'
    assert codec.decode(data, Heartbeat, what="x") == Heartbeat(
        node="n", boot_id="b", seq=1, time_s=2.0
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"node":"n"}',
        b'{"node":1,"boot_id":"b","seq":1,"time_s":2}',
        b'{"node":"n","boot_id":"b","seq":"1","time_s":2}',
        b'{"node":"\xff","boot_id":"b","seq":1,"time_s":2}',
        b'{"future":' + b"[" * 100_000,
    ],
)
def test_mismatched_payload_is_wire_invalid_and_names_the_message(data: bytes) -> None:
    with pytest.raises(WireInvalid, match=r"^hami\.v1\.heartbeat\.n: "):
        codec.decode(data, Heartbeat, what="hami.v1.heartbeat.n")


def test_an_unknown_operation_is_wire_invalid() -> None:
    data = codec.encode(RECORD).replace(b'"reserve"', b'"steal"')
    with pytest.raises(WireInvalid, match="steal"):
        codec.decode(data, AllocationRecord, what="x")


def test_headers_are_cloudevents_in_binary_mode() -> None:
    headers = codec.event_headers(
        event_id="e1",
        event_type="io.hami.allocation.reserved.v1",
        source="/scheduler/s-0",
        time_s=1_750_000_000.25,
        traceparent="00-a-b-01",
    )
    assert headers == {
        "ce-specversion": "1.0",
        "ce-id": "e1",
        "ce-type": "io.hami.allocation.reserved.v1",
        "ce-source": "/scheduler/s-0",
        "ce-time": "2025-06-15T15:06:40.250000Z",
        "content-type": "application/json",
        "traceparent": "00-a-b-01",
    }
    without = codec.event_headers(event_id="e", event_type="t", source="s", time_s=0)
    assert "traceparent" not in without
    assert without["ce-time"] == "1970-01-01T00:00:00Z"


def state(name: str, *, allocation_id: str = "a1") -> StateRecord:
    data = (
        f'{{"state":"{name}","allocation_id":"{allocation_id}","node":"n","pod_uid":"u",'
        '"namespace":"d","pod":"p","ledger_seq":1}'
    )
    return codec.decode(data.encode(), StateRecord, what="x")


@pytest.mark.parametrize("name", ["bound", "prepared", "running", "failed"])
def test_the_state_of_an_allocation_is_the_last_reported_one(name: str) -> None:
    assert joined_state(RECORD, state(name)) == name


def test_a_reservation_without_a_state_of_its_own_is_reserved() -> None:
    assert joined_state(RECORD, None) == "reserved"
    assert joined_state(RECORD, state("running", allocation_id="earlier")) == "reserved"


def test_a_released_record_is_released_whatever_was_reported() -> None:
    released = AllocationRecord(
        op="release", allocation_id="a1", node="n", pod_uid="u", namespace="d", pod="p"
    )
    assert joined_state(released, state("running")) == "released"
