# SPDX-License-Identifier: Apache-2.0
"""ProvisioningRequests: their processor, their pods, and the conditions that an answer leaves."""

import json
from typing import Any

import msgspec
import pytest

from hami_common.errors import RequestInvalid
from hami_common.pods.podview import PodView
from hami_core.ledger.podfacts import hold_of
from hami_core.planning.conditions import kube_time, unix_s
from hami_core.planning.demands import Verdict
from hami_core.planning.provisioning import (
    CHECK_CAPACITY,
    ProvisioningRequest,
    expired,
    failed,
    judged,
    merged,
    missing_templates,
    pod_sets_of,
    waiting,
)

Obj = dict[str, Any]
OURS = "placement.hami.io"
READY = Verdict(state="Ready", message="held")
RETRY = Verdict(state="Retry", message="full")


def request(
    *templates: str, cls: str = OURS, conditions: Obj | None = None, **parameters: str
) -> ProvisioningRequest:
    listed = [
        {"type": key, "status": status, "reason": "R", "message": "m", "lastTransitionTime": when}
        for key, (status, when) in (conditions or {}).items()
    ]
    document = {
        "metadata": {"name": "r", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "provisioningClassName": cls,
            "parameters": parameters,
            "podSets": [{"podTemplateRef": {"name": name}, "count": 2} for name in templates],
        },
        "status": {"conditions": listed},
    }
    return msgspec.json.decode(json.dumps(document), type=ProvisioningRequest)


@pytest.mark.parametrize(
    ("cls", "instance", "configured", "is_ours"),
    [
        (OURS, "", "", True),
        (OURS, "other", "", True),
        ("other", "", "", False),
        (CHECK_CAPACITY, "", "", False),
        (CHECK_CAPACITY, "", "hami", False),
        (CHECK_CAPACITY, "hami", "", False),
        (CHECK_CAPACITY, "hami", "hami", True),
        (CHECK_CAPACITY, "other", "hami", False),
        ("best-effort-atomic-scale-up.autoscaling.x-k8s.io", "hami", "hami", False),
    ],
)
def test_request_belongs_to_its_class_or_named_processor(
    cls: str, instance: str, configured: str, *, is_ours: bool
) -> None:
    made = request(cls=cls, processorInstance=instance) if instance else request(cls=cls)
    assert made.is_for(OURS, configured) == is_ours


def test_class_of_the_autoscaler_may_be_configured_as_a_whole() -> None:
    assert request(cls=CHECK_CAPACITY).is_for(CHECK_CAPACITY, "")


def test_retry_is_the_choice_of_the_request() -> None:
    assert request().is_retried()
    assert request(noRetry="false").is_retried()
    assert not request(noRetry="true").is_retried()
    with pytest.raises(RequestInvalid, match="noRetry"):
        request(noRetry="1").is_retried()


def test_pod_sets_have_names_of_their_own() -> None:
    made = request("a", "b", "a")
    templates: dict[str, Obj] = {"a": {"x": 1}, "b": {"y": 2}}
    assert missing_templates(made, templates) == []
    assert missing_templates(made, {"b": {}}) == ["a"]
    found = pod_sets_of(made, templates)
    assert [(one.name, one.count) for one in found] == [("a (0)", 2), ("b", 2), ("a (2)", 2)]
    assert [one.pod for one in found] == [templates["a"], templates["b"], templates["a"]]


def reasons(made: ProvisioningRequest, verdict: Verdict) -> Obj:
    return {one.type: (one.status, one.reason) for one in judged(made, verdict).conditions}


def test_verdict_becomes_conditions() -> None:
    accepted = {"Accepted": ("True", "Accepted")}
    found = {"Provisioned": ("True", "CapacityIsFound")}
    assert reasons(request(), READY) == accepted | found
    waits = {"Provisioned": ("False", "CapacityIsNotFound")}
    assert reasons(request(), RETRY) == accepted | waits
    fails = {"Failed": ("True", "CapacityIsNotFound")}
    assert reasons(request(noRetry="true"), RETRY) == accepted | fails
    undecided = Verdict(state="Pending", message="bus")
    waits = {"Provisioned": ("False", "NotDecided")}
    assert reasons(request(noRetry="true"), undecided) == accepted | waits
    assert judged(request(noRetry="true"), undecided).outcome == "undecided"
    rejected = Verdict(state="Rejected", message="field")
    assert reasons(request(), rejected) == {"Failed": ("True", "RequestInvalid")}


def test_time_of_a_condition_is_that_of_its_change_of_status() -> None:
    before = "2026-01-01T00:00:05Z"
    made = request(conditions={"Provisioned": ("False", before), "Other": ("True", before)})
    new = merged(made, waiting("Why", "text"), now_s=unix_s("2026-01-01T00:01:00Z"))
    assert new is not None
    by_type = {one.type: one for one in new}
    assert by_type.keys() == {"Accepted", "Provisioned"}, "conditions of others are not ours"
    assert by_type["Provisioned"].last_transition_time == before
    assert by_type["Provisioned"].message == "text"
    assert by_type["Accepted"].last_transition_time == "2026-01-01T00:01:00Z"
    now = msgspec.structs.replace(made, status=msgspec.structs.replace(made.status, conditions=new))
    assert merged(now, waiting("Why", "text"), now_s=unix_s("2026-01-01T00:02:00Z")) is None
    found = merged(now, judged(made, READY), now_s=unix_s("2026-01-01T00:02:00Z"))
    assert found is not None
    assert {one.last_transition_time for one in found if one.type == "Provisioned"} == {
        "2026-01-01T00:02:00Z"
    }


def test_long_text_is_cut_to_what_a_condition_holds() -> None:
    (only,) = merged(request(), failed("Why", "x" * 40_000), now_s=0.0) or ()
    assert len(only.message) == 32_000


def test_times_of_booking_and_expiry() -> None:
    made = request(conditions={"Provisioned": ("True", "2026-01-01T01:00:00Z")})
    assert kube_time(made.booked_until_s(600.0)) == "2026-01-01T01:10:00Z"
    assert kube_time(made.expires_s(60.0)) == "2026-01-01T00:01:00Z"
    assert ProvisioningRequest().expires_s(60.0) > 1e12, "nothing ends without a time"
    assert not made.is_over()
    assert request(conditions={"Failed": ("True", "")}).is_over()
    assert request(conditions={"BookingExpired": ("True", "")}).is_over()
    assert [one.type for one in expired("Why", "").conditions] == ["BookingExpired"]


@pytest.mark.parametrize(
    ("annotations", "hold"),
    [
        ({}, ""),
        ({"autoscaling.x-k8s.io/consume-provisioning-request": "r"}, "provisioningrequest ns/r"),
        ({"autoscaling.x-k8s.io/consume-provisioning-request": "no/name"}, ""),
        ({"hami.io/hold": "u"}, "u"),
        ({"hami.io/hold": "u", "autoscaling.x-k8s.io/consume-provisioning-request": "r"}, "u"),
    ],
)
def test_pod_names_its_held_devices(annotations: Obj, hold: str) -> None:
    document = {"metadata": {"name": "p", "namespace": "ns", "annotations": annotations}}
    assert hold_of(msgspec.convert(document, PodView)) == hold
