# SPDX-License-Identifier: Apache-2.0
"""Routing of reviews, fail-closed behavior, traces and events."""

from collections.abc import Iterator
from typing import Any

import anyio
import jsonpatch
import pytest

from hami_common.bus import subjects
from hami_common.dra.podclaims import claim_name
from hami_common.events import codec
from hami_common.events.decision import AdmissionRecord
from hami_common.pods import annotations as keys
from hami_webhook.core.mutate import AdmissionPolicy
from tests.support.admission import Wired, asking_pod, patch_of, review
from tests.support.memorybus import MemoryBus, MemoryPublisher

pytestmark = pytest.mark.anyio


@pytest.fixture
def wired() -> Iterator[Wired]:
    wired = Wired()
    yield wired
    wired.close()


async def events_of(wired: Wired) -> list[tuple[str, AdmissionRecord, dict[str, str]]]:
    """Everything the webhook would have published until now."""
    bus = MemoryBus()
    wired.events.end()
    with anyio.fail_after(2):
        await wired.events.run(MemoryPublisher(bus))
    return [
        (m.subject, codec.decode(m.data, AdmissionRecord, what=m.subject), m.headers)
        for m in bus.published
    ]


async def test_created_pod_is_patched_and_the_uid_echoed(wired: Wired) -> None:
    pod = asking_pod(gpu="1", gpumem="3000")
    answer = await wired.answer(review(pod))
    assert answer["response"]["uid"] == "11111111-2222-3333-4444-555555555555"
    after = jsonpatch.apply_patch(pod, patch_of(answer))
    assert after["spec"]["schedulerName"] == "hami-scheduler"
    assert after["metadata"]["labels"] == {keys.MANAGED_LABEL: "true"}
    assert wired.count("hami_webhook_admissions", operation="create", outcome="changed") == 1


async def test_trace_starts_at_admission_and_is_the_events_too(wired: Wired) -> None:
    pod = asking_pod()
    after = jsonpatch.apply_patch(pod, patch_of(await wired.answer(review(pod))))
    traceparent = after["metadata"]["annotations"][keys.TRACEPARENT]
    assert len(traceparent) == 55
    ((_, _, headers),) = await events_of(wired)
    assert headers["traceparent"] == traceparent


async def test_event_continues_the_callers_trace(wired: Wired) -> None:
    callers = "00-11111111111111111111111111111111-2222222222222222-01"
    pod = asking_pod()
    pod["metadata"]["annotations"] = {keys.TRACEPARENT: callers}
    answer = await wired.answer(review(pod))
    assert "annotations" not in str(patch_of(answer)[0])
    ((_, _, headers),) = await events_of(wired)
    assert headers["traceparent"] == callers


async def test_event_contains_the_decision(wired: Wired) -> None:
    await wired.answer(review(asking_pod(gpu="two")))
    ((subject, record, headers),) = await events_of(wired)
    assert subject == subjects.admission_event("team-a", "train-0")
    assert (record.allowed, record.operation) == (False, "CREATE")
    assert "two" in record.message
    assert headers["ce-type"] == "io.hami.admission.decided.v1"
    assert headers["ce-source"] == "/webhook/test"


async def test_pod_of_a_generated_name_is_recorded_under_its_prefix(wired: Wired) -> None:
    pod = asking_pod()
    pod["metadata"] = {"generateName": "web-", "namespace": "team-a"}
    await wired.answer(review(pod))
    ((subject, record, _),) = await events_of(wired)
    assert subject == subjects.admission_event("team-a", "web-")
    assert record.pod == "web-"


@pytest.mark.parametrize("pod", [asking_pod("other", cpu="1"), asking_pod()])
async def test_dry_run_and_foreign_pods_leave_no_event(wired: Wired, pod: dict[str, Any]) -> None:
    is_ours = pod["metadata"]["name"] == "train-0"
    if not is_ours:
        pod["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "1"}}
    answer = await wired.answer(review(pod, dryRun=True))
    assert answer["response"]["allowed"]
    assert bool(patch_of(answer)) == is_ours
    assert await events_of(wired) == []


@pytest.mark.parametrize(
    "request_fields",
    [
        {"operation": "DELETE", "object": None},
        {"operation": "CONNECT"},
        {"operation": "CREATE", "subResource": "binding"},
        {"operation": "CREATE", "subResource": "eviction"},
        {"resource": {"group": "apps", "version": "v1", "resource": "deployments"}},
        {"resource": {"group": "example.com", "version": "v1", "resource": "pods"}},
    ],
)
async def test_other_requests_are_allowed_unread(
    wired: Wired, request_fields: dict[str, Any]
) -> None:
    document = review(asking_pod(gpu="nonsense"))
    document["request"].update(request_fields)
    answer = await wired.answer(document)
    assert answer["response"] == {"uid": document["request"]["uid"], "allowed": True}


@pytest.mark.parametrize("subresource", ["", "status", "resize"])
async def test_forged_annotation_in_an_update_is_denied(wired: Wired, subresource: str) -> None:
    old = asking_pod()
    new = asking_pod()
    new["metadata"]["annotations"] = {keys.ALLOCATION: "mine"}
    document = review(new, operation="UPDATE", old=old, subResource=subresource)
    response = (await wired.answer(document))["response"]
    assert not response["allowed"]
    assert response["status"]["code"] == 403
    assert keys.ALLOCATION in response["status"]["message"]


async def test_trusted_user_may_write_reserved_annotations() -> None:
    wired = Wired(policy=AdmissionPolicy(trusted_users=("scheduler",)))
    new = asking_pod()
    new["metadata"]["annotations"] = {keys.FENCE: "x"}
    document = review(new, operation="UPDATE", old=asking_pod())
    document["request"]["userInfo"] = {"username": "scheduler"}
    assert (await wired.answer(document))["response"]["allowed"]
    wired.close()


async def test_update_without_the_old_pod_is_denied_as_invalid(wired: Wired) -> None:
    response = (await wired.answer(review(asking_pod(), operation="UPDATE")))["response"]
    assert (response["allowed"], response["status"]["code"]) == (False, 400)
    assert "request.oldObject: is missing" in response["status"]["message"]


async def test_ephemeral_container_is_validated_and_mounted(wired: Wired) -> None:
    old, new = asking_pod(), asking_pod()
    debug: dict[str, Any] = {"name": "debug", "image": "sh", "targetContainerName": "main"}
    new["spec"]["ephemeralContainers"] = [debug]
    fields: dict[str, Any] = {
        "operation": "UPDATE",
        "old": old,
        "subResource": "ephemeralcontainers",
    }
    answer = await wired.answer(review(new, **fields))
    after = jsonpatch.apply_patch(new, patch_of(answer))
    assert len(after["spec"]["ephemeralContainers"][0]["volumeMounts"]) == 2
    debug["securityContext"] = {"privileged": True}
    assert not (await wired.answer(review(new, **fields)))["response"]["allowed"]
    new["metadata"]["annotations"] = {keys.FENCE: "x"}
    del debug["securityContext"]
    assert not (await wired.answer(review(new, **fields)))["response"]["allowed"]


async def test_validating_never_patches(wired: Wired) -> None:
    pod = asking_pod(gpu="1", gpumem="3000")
    prepared = jsonpatch.apply_patch(pod, patch_of(await wired.answer(review(pod))))
    answer = await wired.answer(review(prepared), path="/validate")
    assert answer["response"]["allowed"]
    del prepared["spec"]["volumes"]
    assert patch_of(await wired.answer(review(prepared), path="/validate")) == []


async def test_path_names_the_mode_of_the_namespace() -> None:
    wired = Wired(policy=AdmissionPolicy(dra_enabled=True))
    try:
        pod = asking_pod(gpu="1", gpumem="3000")
        made = {
            path: jsonpatch.apply_patch(
                pod, patch_of(await wired.answer(review(pod, uid=path), path=path))
            )
            for path in ("/mutate", "/mutate/device-plugin", "/mutate/dra")
        }
        assert made["/mutate"]["spec"] == made["/mutate/device-plugin"]["spec"]
        claimed = made["/mutate/dra"]
        (entry,) = claimed["spec"]["resourceClaims"]
        assert entry == {"name": "hami", "resourceClaimName": claim_name("/mutate/dra")}
        # The validating call has another uid and knows no namespace.
        answer = await wired.answer(review(claimed, uid="later"), path="/validate")
        assert answer["response"]["allowed"], answer
        del claimed["spec"]["resourceClaims"]
        answer = await wired.answer(review(claimed, uid="later"), path="/validate")
        assert "another webhook removed it" in answer["response"]["status"]["message"]
    finally:
        wired.close()


@pytest.mark.parametrize("what", ["label", "scheduler"])
async def test_validation_denies_a_pod_that_lost_its_mutation(wired: Wired, what: str) -> None:
    pod = asking_pod()
    prepared = jsonpatch.apply_patch(pod, patch_of(await wired.answer(review(pod))))
    if what == "label":
        del prepared["metadata"]["labels"]
    else:
        prepared["spec"]["schedulerName"] = "default-scheduler"
    response = (await wired.answer(review(prepared), path="/validate"))["response"]
    assert not response["allowed"]
    assert "another webhook removed it" in response["status"]["message"]


async def test_unexpected_error_fails_closed_and_is_counted(
    wired: Wired, caplog: pytest.LogCaptureFixture
) -> None:
    wired.clock.now_s = None  # type: ignore[assignment,method-assign]  # a part that breaks
    response = (await wired.answer(review(asking_pod())))["response"]
    assert not response["allowed"]
    assert response["status"]["code"] == 500
    assert "failed unexpectedly (TypeError)" in response["status"]["message"]
    assert wired.count("hami_webhook_admissions", operation="create", outcome="error") == 1
    assert any(record.message == "admission failed" for record in caplog.records)


async def test_malformed_review_is_answered_with_400(wired: Wired) -> None:
    response = await wired.post(b'{"kind":"AdmissionReview"}')
    assert response.status == 400
    assert b"no apiVersion" in response.body
    assert wired.count("hami_webhook_reviews_malformed") == 1


async def test_object_that_is_no_pod_is_denied_under_its_uid(wired: Wired) -> None:
    document = review(None)
    document["request"]["object"] = {"metadata": {}, "spec": {"containers": "none"}}
    response = (await wired.answer(document))["response"]
    assert response["uid"] == document["request"]["uid"]
    assert response["status"]["code"] == 400
    assert "request.object" in response["status"]["message"]
