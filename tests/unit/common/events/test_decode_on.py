# SPDX-License-Identifier: Apache-2.0
"""A payload counts only on the subject of the node, vendor and pod that it names."""

import pytest
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.errors import WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.asking import CheckAnswer, UsageAnswer
from hami_common.events.breach import BreachRecord
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices, NodeReport
from hami_common.events.partition import PartitionRecord
from hami_common.events.usage import UsageRecord
from tests.support.registry import report

NODE, OTHER, UID = "gpu-a.example", "gpu-b", "6f0c2b1e-0000-4d00-8000-000000000000"
BEAT = Heartbeat(node=NODE, boot_id="b", seq=1, time_s=0.0)
FAULT = DeviceFault(
    node=NODE, vendor="nvidia", uuid="g", boot_id="b", seq=1, time_s=0.0, healthy=False
)
DEVICES = NodeDevices(
    node=NODE, vendor="nvidia", boot_id="b", seq=1, time_s=0.0, config_generation=1
)
RECORD = AllocationRecord(
    op="release", allocation_id="a", node=NODE, pod_uid=UID, namespace="n", pod="p"
)
STATE = StateRecord(
    state="bound", allocation_id="a", node=NODE, pod_uid=UID, namespace="n", pod="p", ledger_seq=1
)
KEY = subjects.allocation_key(NODE, UID)
ALLOC, STATES = subjects.ALLOC_BUCKET, subjects.STATE_BUCKET
DEVICES_KEY = subjects.devices_key(NODE, "nvidia")

SAID: list[tuple[str, Struct]] = [
    (subjects.report(NODE, "nvidia"), report("a", node=NODE)),
    (subjects.heartbeat(NODE), BEAT),
    (subjects.fault(NODE), FAULT),
    (subjects.ask(NODE, "usage"), UsageAnswer(node=NODE, time_s=0.0)),
    (subjects.ask(NODE, "check"), CheckAnswer(node=NODE, time_s=0.0, version="1")),
    (subjects.usage_event(NODE), UsageRecord(node=NODE, boot_id="b", seq=1, time_s=0.0)),
    (subjects.kv_subject(ALLOC, KEY), RECORD),
    (f"{subjects.ALLOC_FEED_PREFIX}.{KEY}", RECORD),
    (subjects.kv_subject(STATES, KEY), STATE),
    (subjects.kv_subject(subjects.DEVICES_BUCKET, DEVICES_KEY), DEVICES),
    (f"{subjects.EVENT_PREFIX}.state.{KEY}", STATE),
    (f"{subjects.EVENT_PREFIX}.allocation.{KEY}", RECORD),
    (f"{subjects.EVENT_PREFIX}.device.{DEVICES_KEY}", DEVICES),
]


@pytest.mark.parametrize(("subject", "message"), SAID)
def test_message_on_its_own_subject_is_taken(subject: str, message: Struct) -> None:
    assert codec.decode_on(subject, codec.encode(message), type(message)) == message


@pytest.mark.parametrize(("subject", "message"), SAID)
def test_message_on_another_nodes_subject_is_refused(subject: str, message: Struct) -> None:
    foreign = subject.replace(subjects.escape(NODE), OTHER)
    with pytest.raises(WireInvalid, match=f"node is '{NODE}', the subject's is '{OTHER}'"):
        codec.decode_on(foreign, codec.encode(message), type(message))


@pytest.mark.parametrize(
    ("subject", "message", "problem"),
    [
        (subjects.kv_subject(ALLOC, f"{KEY}0"), RECORD, "pod_uid is"),
        (subjects.kv_subject(STATES, f"{KEY}0"), STATE, "pod_uid is"),
        (subjects.report(NODE, "amd"), report("a", node=NODE), "vendor is 'nvidia'"),
        (subjects.report(NODE, "nvidia"), report("a", node="gpu.*"), "node is 'gpu"),
    ],
)
def test_message_of_another_vendor_or_pod_is_refused(
    subject: str, message: Struct, problem: str
) -> None:
    with pytest.raises(WireInvalid, match=problem):
        codec.decode_on(subject, codec.encode(message), type(message))


@pytest.mark.parametrize(("data", "problem"), [(b"", "truncated"), (b'{"node":"n"}', "vendor")])
def test_undecodable_payload_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(WireInvalid, match=problem):
        codec.decode_on(subjects.report("n", "nvidia"), data, NodeReport)


def test_breach_by_the_host_names_no_pod() -> None:
    assert subjects.named(subjects.breach_event(NODE, "")) == {"node": NODE, "pod_uid": ""}
    assert subjects.named(subjects.breach_event(NODE, UID)) == {"node": NODE, "pod_uid": UID}


def test_subjects_of_agents_name_fields_that_their_payloads_have() -> None:
    for subject, kind in (
        (subjects.breach_event(NODE, UID), BreachRecord),
        (subjects.partition_event(NODE, "nvidia"), PartitionRecord),
    ):
        assert set(subjects.named(subject)) <= set(kind.__struct_fields__)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "hami",
        subjects.HEARTBEAT_PREFIX,
        f"{subjects.REPORT_PREFIX}.node",
        f"{subjects.REPORT_PREFIX}.node.nvidia.more",
        subjects.decision_event("ns", "pod"),
        "$KV.hami_alloc.node",
        "$KV.other.node.uid",
        "_INBOX.scheduler.x",
    ],
)
def test_subject_of_no_node_is_refused(subject: str) -> None:
    with pytest.raises(WireInvalid, match="is not the subject of a node"):
        subjects.named(subject)
