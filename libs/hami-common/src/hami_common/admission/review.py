# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the envelope of an AdmissionReview, for every webhook of this project.

The objects inside stay raw JSON: each webhook decodes what it decides on. Obeys
``admission.k8s.io/v1`` as of Kubernetes 1.34,
https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/.
"""

import base64
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from hami_common.bounds import Label, Name, ObjectText, Uid, Word
from hami_common.errors import WireInvalid

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
# Longer warnings are cut by the API server without regard to words, in characters.
WARNING_LIMIT = 256
WARNINGS_LIMIT = 4096
MESSAGE_LIMIT = 2048
"""Maximum characters of a denial; a user's text in it may be as long as a pod."""
Code = Literal[400, 403, 404, 500, 503]
_REASON_BY_CODE: Final[dict[Code, str]] = {
    400: "BadRequest",
    403: "Forbidden",
    404: "NotFound",
    500: "InternalError",
    503: "ServiceUnavailable",
}
NOTHING: Final = b"null"
"""The document of an object that the request does not have."""

Operation = dict[str, Any]
"""One operation of a JSON patch, RFC 6902."""


class UserInfo(Struct, frozen=True, kw_only=True):
    """User who sends the request."""

    username: ObjectText = ""


class GroupVersionResource(Struct, frozen=True, kw_only=True):
    """Kind of object that is changed."""

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
    object: msgspec.Raw = msgspec.Raw(NOTHING)
    old_object: msgspec.Raw = msgspec.Raw(NOTHING)
    dry_run: bool | None = None

    def is_pod(self) -> bool:
        """Return whether the object is a pod of the core group."""
        return self.resource.group == "" and self.resource.resource == "pods"


class _Review(Struct, frozen=True, kw_only=True, rename="camel"):
    api_version: Word = ""
    kind: Word = ""
    request: ReviewRequest | None = None


T = TypeVar("T")
_decoder = msgspec.json.Decoder(_Review)
_encoder = msgspec.json.Encoder()


def decoded(raw: bytes, decoder: msgspec.json.Decoder[T], *, what: str, problem: str) -> T:
    """Decode JSON; ``WireInvalid`` about ``what`` for any other input."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireInvalid(what=what, problem=f"{problem}: {error}") from error
    except RecursionError as error:
        raise WireInvalid(what=what, problem=f"{problem}: nested too deeply") from error


def decode_review(body: bytes) -> ReviewRequest:
    """Decode the request inside ``body``; ``WireInvalid`` names the error."""
    what = "AdmissionReview"
    review: _Review = decoded(body, _decoder, what=what, problem="does not decode")
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


def polite_warnings(warnings: Iterable[str]) -> list[str]:
    """Return ``warnings`` within the API server's limits.

    Each is one line; a long one is cut after a word. When not all fit, the last one contains the
    number of omitted ones.
    """
    texts = list(warnings)
    kept: list[str] = []
    room = WARNINGS_LIMIT
    for position, text in enumerate(texts):
        line = _one_line(text)
        rest = f"{len(texts) - position} more warnings"
        last = position == len(texts) - 1
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


def short_message(text: str) -> str:
    """Cut a denial in the middle where it is too long: field and problem first, the fix last."""
    if len(text) <= MESSAGE_LIMIT:
        return text
    half = MESSAGE_LIMIT // 2
    return f"{text[: half - 1]}…{text[-half:]}"


def encode_answer(
    uid: str, *, operations: Sequence[Operation] = (), warnings: Iterable[str] = ()
) -> bytes:
    """Encode the AdmissionReview that allows request ``uid``, changed by ``operations``."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if operations:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(_encoder.encode(operations)).decode()
    return _review(response, warnings)


def encode_denial(uid: str, *, code: Code, message: str, warnings: Iterable[str] = ()) -> bytes:
    """Encode the AdmissionReview that denies request ``uid`` with this HTTP status."""
    status = {"code": code, "message": short_message(message), "reason": _REASON_BY_CODE[code]}
    return _review({"uid": uid, "allowed": False, "status": status}, warnings)


def _review(response: dict[str, Any], warnings: Iterable[str]) -> bytes:
    if lines := polite_warnings(warnings):
        response["warnings"] = lines
    return _encoder.encode({"apiVersion": API_VERSION, "kind": KIND, "response": response})
