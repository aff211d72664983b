# SPDX-License-Identifier: Apache-2.0
"""Turns the resource limits of a pod into uses of a claim, and back (allocation mode ``dra``).

The annotation ``hami.io/claimed-resources`` is another spelling of limits: admission moves it into
the limits, decides as for any other pod, and in mode ``dra`` moves the limits into it again. So a
pod that another webhook sends back here, and one made from the YAML of a live pod, are decided like
new ones. Every admission names a new claim: the API server does not say that an invocation repeats
an earlier one, and a copied name would give two pods one claim. Nothing has the earlier name, as
the claim is created only after the pod.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final, get_args

from hami_common.admission.mounts import PATH_BY_PREFIX, volume_name
from hami_common.dra.podclaims import (
    POD_CLAIM,
    AllocationMode,
    ShareRequest,
    encode_resources,
    restored,
    uses_of,
)
from hami_common.errors import RequestInvalid
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodClaimView, PodView
from hami_common.units import shown
from hami_webhook.core.draft import Document, Draft

_CLAIM_NAME: Final = re.compile(rf"{POD_CLAIM}-[0-9a-f]{{16}}")
_GROUPS: Final = ("limits", "requests")
_FIELD: Final = f"annotation {keys.CLAIMED_RESOURCES}"


def mode_of(
    annotations: Mapping[str, str], *, namespace_mode: str, default: AllocationMode
) -> AllocationMode:
    """Return the mode of a pod: its annotation's, its namespace's, or the installation's.

    ``RequestInvalid``: the annotation has another word.
    """
    word = annotations.get(keys.ALLOCATION_MODE, "") or namespace_mode or default
    for mode in get_args(AllocationMode):
        if word == mode:
            found: AllocationMode = mode
            return found
    raise RequestInvalid(
        field=f"annotation {keys.ALLOCATION_MODE}",
        problem=f"{shown(word)} is not an allocation mode",
        fix=f"write one of {', '.join(get_args(AllocationMode))}",
    )


def with_limits(view: PodView, draft: Draft, resource_names: Collection[str]) -> PodView:
    """Move the annotation's resources into the limits of the draft; returns the pod like that.

    A pod without the annotation is returned as it is. ``RequestInvalid``: the annotation cannot be
    read, names other resources, or stands beside limits; or the pod's ``hami`` claim is not ours.
    """
    whole = restored(view)
    if whole is view:
        return view
    require_own_claim(view)
    for index, ((_, before), (_, after)) in enumerate(
        zip(view.containers_in_order(), whole.containers_in_order(), strict=True)
    ):
        moved = {} if after is before else after.limits()
        own = before.limits().keys() | before.requests().keys()
        if written := sorted(own & set(resource_names)):
            raise RequestInvalid(
                field=_FIELD,
                problem=f"is beside resource {written[0]} of container {before.name}",
                fix="remove the annotation and write all resources as limits of the containers",
            )
        moved = {name: value for name, value in moved.items() if name not in before.limits()}
        if unknown := sorted(moved.keys() - set(resource_names)):
            raise RequestInvalid(
                field=_FIELD,
                problem=f"names {shown(unknown[0])}, which is not a resource of HAMi",
                fix="write it as a limit of the container",
            )
        if moved or _uses(draft.seen(index)):
            container = draft.container(index)
            resources = dict(container.get("resources") or {})
            if moved:
                resources["limits"] = {**(resources.get("limits") or {}), **moved}
            _put(resources, "claims", _without(resources.get("claims"), POD_CLAIM))
            _put(container, "resources", resources)
    _put(draft.spec, "resourceClaims", _without(draft.spec.get("resourceClaims"), POD_CLAIM))
    annotations = dict(draft.metadata["annotations"])
    del annotations[keys.CLAIMED_RESOURCES]
    _put(draft.metadata, "annotations", annotations)
    return whole


def require_own_claim(view: PodView) -> None:
    """Raise ``RequestInvalid`` if the user calls another claim by the name of ours."""
    has_ours = keys.CLAIMED_RESOURCES in view.annotations()
    named = [
        one.name for one in view.spec.resource_claims or [] if not (has_ours and _is_ours(one))
    ]
    if not has_ours:
        used = (one.resources for _, one in view.containers_in_order() if one.resources)
        named += [use.name for resources in used for use in resources.claims or []]
    if POD_CLAIM in named:
        raise RequestInvalid(
            field=f"spec.resourceClaims[{POD_CLAIM}]",
            problem="HAMi calls the claim for the pod's resource limits by this name",
            fix="give the claim another name, here and in resources.claims of the containers",
        )


def _is_ours(one: PodClaimView) -> bool:
    return _CLAIM_NAME.fullmatch(one.resource_claim_name or "") is not None


def claim(
    draft: Draft,
    names: Iterable[str],
    requests: Iterable[ShareRequest],
    *,
    claim_name: str,
    resource_names: Collection[str],
) -> None:
    """Move our resources of the draft into the annotation, and let containers use the claim.

    ``names``: of the containers, in kubelet's order.
    """
    requests = tuple(requests)
    moved: dict[str, dict[str, str]] = {}
    volumes = set()
    for index, name in enumerate(names):
        own = _own_resources(draft.seen(index), resource_names)
        if not own:
            continue
        moved[name] = own
        container = draft.container(index)
        resources = dict(container["resources"])
        for group in _GROUPS:
            left = {
                key: value
                for key, value in (resources.get(group) or {}).items()
                if key not in resource_names
            }
            _put(resources, group, left)
        uses = [
            {"name": use.name, "request": use.request} for use in uses_of(requests, container=name)
        ]
        _put(resources, "claims", [*(resources.get("claims") or []), *uses])
        _put(container, "resources", resources)
        ours = {volume_name(prefix, name) for prefix in PATH_BY_PREFIX}
        _put(container, "volumeMounts", _without(container.get("volumeMounts"), *ours))
        volumes |= ours
    _put(draft.spec, "volumes", _without(draft.spec.get("volumes"), *volumes))
    entry = {"name": POD_CLAIM, "resourceClaimName": claim_name}
    draft.spec["resourceClaims"] = [*(draft.spec.get("resourceClaims") or []), entry]
    annotations = draft.metadata.get("annotations") or {}
    draft.metadata["annotations"] = {
        **annotations,
        keys.CLAIMED_RESOURCES: encode_resources(moved),
    }


def _own_resources(container: Document, resource_names: Collection[str]) -> dict[str, str]:
    """Return the amounts of our resources in a container: of each its limit, else its request."""
    resources = container.get("resources") or {}
    return {
        name: str(value)
        for group in reversed(_GROUPS)
        for name, value in (resources.get(group) or {}).items()
        if name in resource_names
    }


def _uses(container: Document) -> bool:
    claims = (container.get("resources") or {}).get("claims") or []
    return any(one.get("name") == POD_CLAIM for one in claims)


def _without(found: list[Document] | None, *names: str) -> list[Document]:
    return [one for one in found or [] if one.get("name") not in names]


def _put(where: Document, key: str, value: Document | list[Document]) -> None:
    """Set ``key``; an empty value is left out, as the API server does."""
    if value:
        where[key] = value
    elif key in where:
        del where[key]
