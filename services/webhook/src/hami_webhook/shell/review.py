# SPDX-License-Identifier: Apache-2.0
"""Reads and writes AdmissionReview documents.

The envelope is decoded into narrow Structs; the pod inside stays raw JSON until somebody needs it
as a view (to decide) or as a document (to patch). Obeys ``admission.k8s.io/v1`` as of Kubernetes
1.34, https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/.
"""

import base64
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from hami_common.bounds import Label, Name, ObjectText, Uid, Word
from hami_common.errors import WireInvalid
from hami_common.podview import PodView
from hami_webhook.core.mutate import Verdict

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
# Longer warnings are cut by the API server without regard to words, in characters.
WARNING_LIMIT = 256
WARNINGS_LIMIT = 4096
_REASON_BY_CODE = {400: "BadRequest", 403: "Forbidden"}
_NOTHING = b"null"


class UserInfo(Struct, frozen=True, kw_only=True):
    """Who asks."""

    username: ObjectText = ""


class GroupVersionResource(Struct, frozen=True, kw_only=True):
    """What kind of object is changed."""

    group: Name = ""
    version: Word = ""
    resource: Word = ""


class ReviewRequest(Struct, frozen=True, kw_only=True, rename="camel"):
    """The fields of ``request`` that we read."""

    uid: Uid
    operation: Word
    resource: GroupVersionResource = GroupVersionResource()
    sub_resource: Word = ""
    name: Name = ""
    namespace: Label = ""
    user_info: UserInfo = UserInfo()
    object: msgspec.Raw = msgspec.Raw(_NOTHING)
    old_object: msgspec.Raw = msgspec.Raw(_NOTHING)
    dry_run: bool | None = None

    def is_pod(self) -> bool:
        """Whether the object is a pod of the core group."""
        return self.resource.group == "" and self.resource.resource == "pods"


class _Review(Struct, frozen=True, kw_only=True, rename="camel"):
    api_version: Word = ""
    kind: Word = ""
    request: ReviewRequest | None = None


_decoder = msgspec.json.Decoder(_Review)
_pod_decoder = msgspec.json.Decoder(PodView)
_encoder = msgspec.json.Encoder()


def decode_review(body: bytes) -> ReviewRequest:
    """The request inside ``body``; ``WireInvalid`` says what is wrong with it."""
    what = "AdmissionReview"
    try:
        review = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireInvalid(what=what, problem=f"does not decode: {error}") from error
    if review.api_version != API_VERSION or review.kind != KIND:
        raise WireInvalid(
            what=what,
            problem=(
                f"is {review.kind or 'of no kind'} in {review.api_version or 'no apiVersion'}; "
                f"this webhook answers {KIND} in {API_VERSION} only"
            ),
        )
    if review.request is None:
        raise WireInvalid(what=what, problem="has no request")
    if not review.request.uid:
        raise WireInvalid(what=what, problem="request.uid is empty")
    return review.request


def pod_view(raw: bytes, *, field: str) -> PodView:
    """The pod in ``raw`` as far as decisions need it."""
    if bytes(raw) == _NOTHING:
        raise WireInvalid(what=field, problem="is missing")
    try:
        return _pod_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireInvalid(what=field, problem=f"is not a pod: {error}") from error


def pod_document(raw: bytes, *, field: str) -> dict[str, Any]:
    """The whole pod in ``raw`` as a JSON document, with metadata and spec."""
    document: dict[str, Any] = msgspec.json.decode(raw)
    for part in ("metadata", "spec"):
        if not isinstance(document.get(part), dict):
            raise WireInvalid(what=f"{field}.{part}", problem="is not an object")
    return document


def polite_warnings(warnings: Iterable[str]) -> list[str]:
    """``warnings`` within the API server's limits.

    Each is one line; a long one is cut after a word. When not all fit, the last one says how many
    are missing.
    """
    lines = [_one_line(warning) for warning in warnings]
    kept: list[str] = []
    room = WARNINGS_LIMIT
    for position, line in enumerate(lines):
        rest = f"{len(lines) - position} more warnings"
        last = position == len(lines) - 1
        if len(line) + (0 if last else len(rest)) > room:
            kept.append(rest)
            break
        kept.append(line)
        room -= len(line)
    return kept


def _one_line(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(line) <= WARNING_LIMIT:
        return line
    cut = line[: WARNING_LIMIT - 1]
    head, _, _ = cut.rpartition(" ")
    return f"{head or cut}…"


def encode_answer(uid: str, verdict: Verdict) -> bytes:
    """The AdmissionReview that answers request ``uid``."""
    response: dict[str, Any] = {"uid": uid, "allowed": verdict.allowed}
    if verdict.warnings:
        response["warnings"] = polite_warnings(verdict.warnings)
    if not verdict.allowed:
        code = 400 if verdict.invalid else 403
        response["status"] = {
            "code": code,
            "message": verdict.message,
            "reason": _REASON_BY_CODE[code],
        }
    elif verdict.operations:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(_encoder.encode(verdict.operations)).decode()
    return _encoder.encode({"apiVersion": API_VERSION, "kind": KIND, "response": response})
