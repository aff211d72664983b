# SPDX-License-Identifier: Apache-2.0
"""The envelope of AdmissionReviews: malformed requests, the form of warnings, of denials."""

import base64

import msgspec
import pytest

from hami_common.admission.review import (
    MESSAGE_LIMIT,
    Code,
    decode_review,
    encode_answer,
    encode_denial,
    polite_warnings,
)
from hami_common.errors import WireInvalid
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
    ("code", "reason"),
    [(400, "BadRequest"), (403, "Forbidden"), (404, "NotFound"), (503, "ServiceUnavailable")],
)
def test_denial_carries_code_and_reason(code: Code, reason: str) -> None:
    response = msgspec.json.decode(encode_denial("u", code=code, message="why"))["response"]
    assert response == {
        "uid": "u",
        "allowed": False,
        "status": {"code": code, "message": "why", "reason": reason},
    }


def test_long_denial_keeps_its_beginning_and_its_end() -> None:
    answer = encode_denial("u", code=403, message="field" + "x" * 5000 + "fix", warnings=["w"])
    response = msgspec.json.decode(answer)["response"]
    message = response["status"]["message"]
    assert len(message) == MESSAGE_LIMIT
    assert message.startswith("field")
    assert message.endswith("fix")
    assert response["warnings"] == ["w"]


def test_answer_carries_the_patch_only_if_there_is_one() -> None:
    operations = [{"op": "add", "path": "/metadata/uid", "value": "u1"}]
    response = msgspec.json.decode(encode_answer("u", operations=operations))["response"]
    assert response["patchType"] == "JSONPatch"
    assert msgspec.json.decode(base64.b64decode(response["patch"])) == operations
    assert msgspec.json.decode(encode_answer("u"))["response"] == {"uid": "u", "allowed": True}
