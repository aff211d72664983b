# SPDX-License-Identifier: Apache-2.0
"""AdmissionReview documents: requests refused as malformed, and the form of warnings."""

import msgspec
import pytest

from hami_common.errors import WireInvalid
from hami_webhook.core.mutate import Verdict
from hami_webhook.shell.review import (
    decode_review,
    encode_answer,
    pod_document,
    pod_view,
    polite_warnings,
)
from tests.support.admission import asking_pod, review

V1 = b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":%s}'


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "does not decode"),
        (b"not json", "does not decode"),
        (b"\xff\xfe", "does not decode"),
        (b"[]", "does not decode"),
        (b"{}", "of no kind in no apiVersion"),
        (b'{"apiVersion":"admission.k8s.io/v1","kind":"Pod"}', "is Pod in"),
        (
            b'{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview"}',
            "in admission.k8s.io/v1beta1; this webhook answers AdmissionReview in",
        ),
        (b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}', "has no request"),
        (V1 % b'{"uid":"","operation":"CREATE"}', "uid is empty"),
        (
            b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u"}}',
            "operation",
        ),
    ],
)
def test_malformed_review_is_refused_with_the_reason(body: bytes, problem: str) -> None:
    with pytest.raises(WireInvalid) as caught:
        decode_review(body)
    assert problem in str(caught.value)


def test_unknown_fields_are_ignored() -> None:
    document = review(asking_pod(), future={"a": [1]}, requestKind=None)
    assert decode_review(msgspec.json.encode(document)).user_info.username == "jane"


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


def test_long_warning_is_cut_after_a_word() -> None:
    (short,) = polite_warnings([" ".join(["word"] * 100)])
    assert len(short) <= 256
    assert short.endswith("word…")


def test_warning_without_spaces_is_cut_hard() -> None:
    (short,) = polite_warnings(["x" * 1000])
    assert short == "x" * 255 + "…"


def test_warning_with_control_characters_becomes_one_line() -> None:
    assert polite_warnings(["a\nb\tc\x00d"]) == ["a b c d"]


def test_warnings_beyond_the_total_are_counted_in_the_last() -> None:
    kept = polite_warnings([f"{i:03} " + "x" * 250 for i in range(40)])
    assert sum(len(warning) for warning in kept) <= 4096
    assert kept[-1] == f"{40 - len(kept) + 1} more warnings"
    assert kept[0].startswith("000")


def test_all_warnings_are_kept_when_they_just_fit() -> None:
    exact = ["x" * 256] * 16
    assert polite_warnings(exact) == exact
    assert polite_warnings([*exact, "y"])[-1] == "2 more warnings"


@pytest.mark.parametrize(
    ("invalid", "code", "reason"), [(True, 400, "BadRequest"), (False, 403, "Forbidden")]
)
def test_denial_carries_code_and_message(*, invalid: bool, code: int, reason: str) -> None:
    verdict = Verdict(allowed=False, invalid=invalid, message="why", operations=({"op": "x"},))
    response = msgspec.json.decode(encode_answer("u", verdict))["response"]
    assert response == {
        "uid": "u",
        "allowed": False,
        "status": {"code": code, "message": "why", "reason": reason},
    }
