# SPDX-License-Identifier: Apache-2.0
"""Reads and writes AdmissionReview documents.

The envelope is decoded into narrow Structs; the pod inside stays raw JSON until it is needed as a
view (to decide) or as a document (to patch). Obeys ``admission.k8s.io/v1`` as of Kubernetes 1.34,
https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/.
"""

import base64
from collections.abc import Iterable
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from hami_common.admission.mounts import PATH_BY_PREFIX
from hami_common.bounds import Label, Name, ObjectText, Uid, Word
from hami_common.errors import WireInvalid
from hami_common.pods.podview import PodView
from hami_webhook.core.mutate import Verdict

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
# Longer warnings are cut by the API server without regard to words, in characters.
WARNING_LIMIT = 256
WARNINGS_LIMIT = 4096
MESSAGE_LIMIT = 2048
"""Maximum characters of a denial; a user's text in it may be as long as a pod."""
_REASON_BY_CODE = {400: "BadRequest", 403: "Forbidden", 500: "InternalError"}
_NOTHING = b"null"


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
    object: msgspec.Raw = msgspec.Raw(_NOTHING)
    old_object: msgspec.Raw = msgspec.Raw(_NOTHING)
    dry_run: bool | None = None

    def is_pod(self) -> bool:
        """Return whether the object is a pod of the core group."""
        return self.resource.group == "" and self.resource.resource == "pods"


class _Review(Struct, frozen=True, kw_only=True, rename="camel"):
    api_version: Word = ""
    kind: Word = ""
    request: ReviewRequest | None = None


T = TypeVar("T")
_Object: TypeAlias = dict[str, Any]
_decoder = msgspec.json.Decoder(_Review)
_pod_decoder = msgspec.json.Decoder(PodView)
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_object_decoder: msgspec.json.Decoder[_Object] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder: msgspec.json.Decoder[list[_Object] | None] = msgspec.json.Decoder(
    list[dict[str, msgspec.Raw]] | None
)
_READ: Final = {"metadata": ("labels", "annotations"), "spec": ("schedulerName",)}
_READ_OF_CONTAINER: Final = ("name", "resources", "env", "volumeMounts", "targetContainerName")
_CONTAINERS: Final = ("initContainers", "containers", "ephemeralContainers")
_encoder = msgspec.json.Encoder()


def _decoded(raw: bytes, decoder: msgspec.json.Decoder[T], *, what: str, problem: str) -> T:
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
    review: _Review = _decoded(body, _decoder, what=what, problem="does not decode")
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
    """Decode the pod in ``raw`` as far as decisions need it."""
    if bytes(raw) == _NOTHING:
        raise WireInvalid(what=field, problem="is missing")
    view: PodView = _decoded(raw, _pod_decoder, what=field, problem="is not a valid pod")
    return view


def pod_document(raw: bytes, *, field: str) -> dict[str, Any]:
    """Decode the pod in ``raw`` as a JSON document, with metadata and spec.

    Fields that admission neither reads nor changes stay undecoded, so the time does not grow with
    them.
    """

    def objects(value: bytes, what: str) -> list[dict[str, Any]] | None:
        return _decoded(value, _list_decoder, what=what, problem="is not a list of objects")

    def reads(value: dict[str, Any], keys: Iterable[str], what: str) -> None:
        for key in keys:
            if key in value:
                where = f"{what}.{key}"
                value[key] = _decoded(
                    value[key], _any_decoder, what=where, problem="does not decode"
                )

    document: dict[str, Any] = _decoded(
        raw, _object_decoder, what=field, problem="is not an object"
    )
    for part, keys in _READ.items():
        where = f"{field}.{part}"
        raw_part = document.get(part, msgspec.Raw(_NOTHING))
        value: dict[str, Any] = _decoded(
            raw_part, _object_decoder, what=where, problem="is not an object"
        )
        reads(value, keys, where)
        document[part] = value
    spec = document["spec"]
    for group in _CONTAINERS:
        if group in spec:
            spec[group] = objects(spec[group], f"{field}.spec.{group}")
            for container in spec[group] or []:
                reads(container, _READ_OF_CONTAINER, f"{field}.spec.{group}")
    if "volumes" in spec:
        spec["volumes"] = objects(spec["volumes"], f"{field}.spec.volumes")
        for volume in spec["volumes"] or []:
            reads(volume, ("name",), f"{field}.spec.volumes")
            if str(volume.get("name")).startswith(tuple(PATH_BY_PREFIX)):
                reads(volume, volume.keys() - {"name"}, f"{field}.spec.volumes")
    return document


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


def encode_answer(uid: str, verdict: Verdict) -> bytes:
    """Encode the AdmissionReview that answers request ``uid``."""
    response: dict[str, Any] = {"uid": uid, "allowed": verdict.allowed}
    if verdict.warnings:
        response["warnings"] = polite_warnings(verdict.warnings)
    if not verdict.allowed:
        code = 500 if verdict.failed else 400 if verdict.invalid else 403
        response["status"] = {
            "code": code,
            "message": short_message(verdict.message),
            "reason": _REASON_BY_CODE[code],
        }
    elif verdict.operations:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(_encoder.encode(verdict.operations)).decode()
    return _encoder.encode({"apiVersion": API_VERSION, "kind": KIND, "response": response})
