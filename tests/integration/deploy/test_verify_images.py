# SPDX-License-Identifier: Apache-2.0
"""The policies of the component verify-images name every image of the overlay, each once.

The validity of a signature is the business of Sigstore's policy-controller, which does not run
here. Fields and globs are judged by what it publishes: ``policy.sigstore.dev/v1beta1`` (v0.13) and
its package ``pkg/apis/glob``: ``**`` stands for any text, ``*`` for text without a slash, and the
whole reference must fit.
"""

import re
from typing import Any

import jsonschema
import pytest

from tests.support.kustomize import containers_of, overlay, pinned_copy, pods_of, rendered

GLOB = r"^[a-zA-Z0-9_:/*.-]+$"
SECRET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "namespace": {"type": "string"}},
}
AUTHORITY = {
    "type": "object",
    "additionalProperties": False,
    "oneOf": [{"required": ["key"]}, {"required": ["static"]}],
    "properties": {
        "name": {"type": "string"},
        "key": {
            "type": "object",
            "additionalProperties": False,
            "required": ["secretRef"],
            "properties": {"secretRef": SECRET},
        },
        "static": {
            "type": "object",
            "additionalProperties": False,
            "required": ["action"],
            "properties": {"action": {"enum": ["pass", "fail"]}},
        },
    },
}
SPEC = {
    "type": "object",
    "additionalProperties": False,
    "required": ["images", "authorities"],
    "properties": {
        "mode": {"enum": ["enforce", "warn"]},
        "images": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["glob"],
                "properties": {"glob": {"type": "string", "pattern": GLOB}},
            },
        },
        "authorities": {"type": "array", "minItems": 1, "items": AUTHORITY},
    },
}
"""The fields of the kind that are in use; the API server would drop any other silently."""

Obj = dict[str, Any]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Obj]:
    directory = tmp_path_factory.mktemp("verified")
    copy = pinned_copy(directory)
    added = [
        *(copy / "components" / name for name in ("otel", "verify-images")),
        copy / "overlays" / "prod" / "images",
    ]
    return rendered(overlay(directory / "mine", copy / "overlays" / "prod", added))


def policies(objects: list[Obj]) -> dict[str, Obj]:
    found = {one["metadata"]["name"]: one for one in objects if one["kind"] == "ClusterImagePolicy"}
    assert {one["apiVersion"] for one in found.values()} == {"policy.sigstore.dev/v1beta1"}
    return {name: one["spec"] for name, one in found.items()}


def fits(glob: str, image: str) -> bool:
    text = re.escape(glob).replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    return re.fullmatch(text, image) is not None


def test_policies_have_the_fields_of_their_kind(objects: list[Obj]) -> None:
    found = policies(objects)
    assert len(found) == 2
    for spec in found.values():
        jsonschema.validate(spec, SPEC)


def test_images_of_the_project_need_a_signature_and_every_image_has_one_policy(
    objects: list[Obj],
) -> None:
    found = policies(objects)
    images = {one["image"] for _, _, pod in pods_of(objects) for one in containers_of(pod)}
    assert len(images) >= 8
    for image in images:
        # The controller judges name and digest, without the tag between them.
        name = re.sub(r":[^:@/]+@", "@", image)
        assert "@sha256:" in name, "otel is pinned where images comes last"
        judging = [
            policy
            for policy, spec in found.items()
            if any(fits(one["glob"], name) for one in spec["images"])
        ]
        is_ours = "/hami-" in image
        assert judging == ["hami-images" if is_ours else "hami-images-of-others"], image
    (authority,) = found["hami-images"]["authorities"]
    assert authority["key"] == {"secretRef": {"name": "hami-cosign"}}


def test_both_namespaces_are_held_to_the_policies(objects: list[Obj]) -> None:
    labels = {
        one["metadata"]["name"]: one["metadata"]["labels"].get("policy.sigstore.dev/include")
        for one in objects
        if one["kind"] == "Namespace"
    }
    assert labels == {"hami-system": "true", "hami-agents": "true"}


def test_unsigned_image_passes_only_under_the_name_of_another_project(objects: list[Obj]) -> None:
    globs = [one["glob"] for one in policies(objects)["hami-images-of-others"]["images"]]
    for image in ("registry.example/hami-webhook", "registry.example/x/miner"):
        assert not any(fits(glob, f"{image}@sha256:{'a' * 64}") for glob in globs)
