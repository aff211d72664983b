# SPDX-License-Identifier: Apache-2.0
"""Pods of AdmissionReviews, and the verdicts on them."""

import msgspec
import pytest

from hami_common.errors import WireInvalid
from hami_webhook.core.mutate import Verdict
from hami_webhook.shell.review import encode_verdict, pod_document, pod_view


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"null", "is missing"),
        (b'"pod"', "is not a valid pod"),
        (b'{"spec":{"containers":[{"image":"no name"}]}}', "name"),
        (b'{"spec":{"containers":{}}}', "containers"),
    ],
)
def test_object_that_is_no_pod_is_refused_by_field(raw: bytes, problem: str) -> None:
    with pytest.raises(WireInvalid) as caught:
        pod_view(raw, field="request.object")
    assert "request.object" in str(caught.value)
    assert problem in str(caught.value)


def test_pod_without_metadata_is_refused() -> None:
    with pytest.raises(WireInvalid, match=r"request\.object\.metadata"):
        pod_document(b'{"spec":{}}', field="request.object")


@pytest.mark.parametrize(
    ("invalid", "code", "reason"), [(True, 400, "BadRequest"), (False, 403, "Forbidden")]
)
def test_denial_carries_code_and_message(*, invalid: bool, code: int, reason: str) -> None:
    verdict = Verdict(allowed=False, invalid=invalid, message="why", operations=({"op": "x"},))
    response = msgspec.json.decode(encode_verdict("u", verdict))["response"]
    assert response == {
        "uid": "u",
        "allowed": False,
        "status": {"code": code, "message": "why", "reason": reason},
    }
