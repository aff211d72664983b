# SPDX-License-Identifier: Apache-2.0
"""Every name on the bus, spelled out once here as clients see it (docs/wire.md)."""

import pytest

from hami_common.bus import subjects
from hami_common.errors import WireInvalid

NODE = "ip-10-0-0-1.ec2.internal"


def test_subjects_are_spelled_so() -> None:
    assert subjects.allocation_key(NODE, "u-1") == "ip-10-0-0-1_ec2_internal.u-1"
    assert subjects.node_fence(NODE) == "$KV.hami_alloc.ip-10-0-0-1_ec2_internal.>"
    assert subjects.node_keys(NODE) == "ip-10-0-0-1_ec2_internal.>"
    assert subjects.devices_key(NODE, "nvidia") == "ip-10-0-0-1_ec2_internal.nvidia"
    assert subjects.report(NODE, "nvidia") == "hami.v1.report.ip-10-0-0-1_ec2_internal.nvidia"
    assert subjects.heartbeat(NODE) == "hami.v1.heartbeat.ip-10-0-0-1_ec2_internal"
    assert subjects.fault(NODE) == "hami.v1.fault.ip-10-0-0-1_ec2_internal"
    assert subjects.alloc_feed(NODE) == "hami.v1.alloc.ip-10-0-0-1_ec2_internal.*"
    assert subjects.decision_event("ns", "web-0.a") == "hami.v1.event.decision.ns.web-0_a"
    assert subjects.admission_event("ns", "web-") == "hami.v1.event.admission.ns.web"
    assert subjects.admission_event("ns", "") == "hami.v1.event.admission.ns.unnamed"
    assert subjects.stream_of("hami_alloc") == "KV_hami_alloc"
    assert subjects.dead_letter("scheduler", "$KV.hami_alloc.n.u") == (
        "hami.v1.deadletter.scheduler.KV.hami_alloc.n.u"
    )


def test_keys_parse_back() -> None:
    key = subjects.allocation_key(NODE, "u-1")
    assert subjects.parse_allocation_key(key) == (NODE, "u-1")
    assert subjects.parse_devices_key(subjects.devices_key(NODE, "nvidia")) == (NODE, "nvidia")
    assert subjects.key_of("hami_alloc", subjects.kv_subject("hami_alloc", key)) == key


@pytest.mark.parametrize("name", ["", ".", "-a", "a-", "a_b", "a b", "a*", ">", "ä", "a/b", "a\n"])
def test_invalid_kubernetes_name_is_refused(name: str) -> None:
    with pytest.raises(WireInvalid, match="not a Kubernetes name"):
        subjects.escape(name)


@pytest.mark.parametrize("token", ["", "a.b", "a b", "*", "ä", "%41"])
def test_invalid_escape_is_not_unescaped(token: str) -> None:
    with pytest.raises(WireInvalid, match="was not made by escape"):
        subjects.unescape(token)


@pytest.mark.parametrize("key", ["", "node", "node.", ".uid", "a.b.c", "a.>"])
def test_keys_of_another_shape_are_refused(key: str) -> None:
    with pytest.raises(WireInvalid):
        subjects.parse_allocation_key(key)
    with pytest.raises(WireInvalid):
        subjects.parse_devices_key(key)


def test_subjects_of_another_bucket_are_refused() -> None:
    with pytest.raises(WireInvalid, match="does not belong to bucket hami_alloc"):
        subjects.key_of("hami_alloc", "$KV.hami_allocation.n.u")


def test_region_may_not_have_the_name_of_the_hub() -> None:
    assert subjects.region("hub-east") == "hub-east"
    with pytest.raises(WireInvalid, match="choose another, such as hub-east"):
        subjects.region(subjects.HUB)
