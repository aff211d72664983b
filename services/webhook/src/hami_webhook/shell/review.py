# SPDX-License-Identifier: Apache-2.0
"""Reads the pods of AdmissionReviews and writes verdicts about them.

The pod stays raw JSON until it is needed as a view (to decide) or as a document (to patch). The
envelope is that of ``hami_common.admission.review``.
"""

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import msgspec

from hami_common.admission import review
from hami_common.admission.mounts import PATH_BY_PREFIX
from hami_common.admission.review import NOTHING, decoded
from hami_common.errors import WireInvalid
from hami_common.pods.podview import PodView
from hami_webhook.core.mutate import Verdict

_Object: TypeAlias = dict[str, Any]
_pod_decoder = msgspec.json.Decoder(PodView)
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_object_decoder: msgspec.json.Decoder[_Object] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder: msgspec.json.Decoder[list[_Object] | None] = msgspec.json.Decoder(
    list[dict[str, msgspec.Raw]] | None
)
_READ: Final = {"metadata": ("labels", "annotations"), "spec": ("schedulerName", "resourceClaims")}
_READ_OF_CONTAINER: Final = ("name", "resources", "env", "volumeMounts", "targetContainerName")
_CONTAINERS: Final = ("initContainers", "containers", "ephemeralContainers")


def pod_view(raw: bytes, *, field: str) -> PodView:
    """Decode the pod in ``raw`` as far as decisions need it."""
    if bytes(raw) == NOTHING:
        raise WireInvalid(what=field, problem="is missing")
    view: PodView = decoded(raw, _pod_decoder, what=field, problem="is not a valid pod")
    return view


def pod_document(raw: bytes, *, field: str) -> dict[str, Any]:
    """Decode the pod in ``raw`` as a JSON document, with metadata and spec.

    Fields that admission neither reads nor changes stay undecoded, so the time does not grow with
    them.
    """

    def objects(value: bytes, what: str) -> list[dict[str, Any]] | None:
        return decoded(value, _list_decoder, what=what, problem="is not a list of objects")

    def reads(value: dict[str, Any], keys: Iterable[str], what: str) -> None:
        for key in keys:
            if key in value:
                where = f"{what}.{key}"
                value[key] = decoded(
                    value[key], _any_decoder, what=where, problem="does not decode"
                )

    document: dict[str, Any] = decoded(raw, _object_decoder, what=field, problem="is not an object")
    for part, keys in _READ.items():
        where = f"{field}.{part}"
        raw_part = document.get(part, msgspec.Raw(NOTHING))
        value: dict[str, Any] = decoded(
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


def encode_verdict(uid: str, verdict: Verdict) -> bytes:
    """Encode the AdmissionReview that answers request ``uid``."""
    if verdict.allowed:
        return review.encode_answer(uid, operations=verdict.operations, warnings=verdict.warnings)
    return review.encode_denial(
        uid,
        code=500 if verdict.failed else 400 if verdict.invalid else 403,
        message=verdict.message,
        warnings=verdict.warnings,
    )
