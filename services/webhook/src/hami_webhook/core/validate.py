# SPDX-License-Identifier: Apache-2.0
"""Decides whether a change of an existing pod is allowed: only our services move an allocation.

Covers UPDATE of pods (and of any subresource routed here) and ephemeral containers. The old and new
pod arrive as narrow views; ``pod`` is the new JSON document, which ephemeral containers may change.
"""

import re
from collections.abc import Iterable

from msgspec.structs import replace

from hami_common.admission import bounds
from hami_common.admission.mounts import forbidden_mount, mounts_of
from hami_common.admission.review import Operation
from hami_common.compat import volcano
from hami_common.dra.podclaims import claim_of, is_claimed, restored
from hami_common.errors import RequestInvalid
from hami_common.pods import annotations as keys
from hami_common.pods.podview import ContainerView, PodView, ResourcesView
from hami_common.pods.visibility import DEVICE_VARIABLES, from_elsewhere
from hami_common.units import parse_quantity
from hami_common.vendors.catalog import Catalog
from hami_webhook.core.draft import Document
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, Verdict, env_from_denied
from hami_webhook.core.patch import diff

_GUARDED_PATHS = ("/spec/schedulerName", "/metadata/labels")
_GUARDED_OF_CLAIMS = re.compile(
    r"/spec/(resourceClaims|volumes|(containers|initContainers)/\d+/(resources|volumeMounts))"
)
"""Paths by which a pod in mode ``dra`` uses its claim, and by which volumes hide the agent's."""
_SETTLED_AT_CREATION = (
    keys.CLAIMED_RESOURCES,
    keys.ALLOCATION_MODE,
    keys.ALTERNATIVES,
    keys.SKU,
    keys.CLASS,
    keys.MEMORY_LIMIT,
    keys.CORES_LIMIT,
)


def settled(view: PodView, at: Circumstances) -> Circumstances:
    """Return the circumstances under which mutation made the pod what it is now."""
    return replace(
        at,
        claim=claim_of(view) or at.claim,
        namespace_mode="dra" if is_claimed(view) else "device-plugin",
    )


def validate_create(verdict: Verdict, view: PodView) -> Verdict:
    """Return the verdict of a validating webhook on a new pod, from mutation's ``verdict`` on it.

    Mutation comes first, so changes that it would still make to a pod of ours were reverted after
    it: scheduler, label, limits and claims decide whether the share is tracked and enforced.
    """
    by_claim = is_claimed(view)
    undone = sorted(
        path
        for operation in verdict.operations
        if (path := operation["path"]).startswith(_GUARDED_PATHS)
        or (by_claim and _GUARDED_OF_CLAIMS.match(path))
    )
    if not verdict.allowed or not verdict.is_ours or not undone:
        return verdict
    return Verdict(
        allowed=False,
        concerns_us=True,
        is_ours=True,
        message=(
            f"{undone[0]}: the pod asks for a device share but lacks what the HAMi webhook adds; "
            "another webhook removed it after us: let it leave pods with label "
            f"{keys.MANAGED_LABEL} alone"
        ),
    )


def changed_reserved_keys(old: PodView, new: PodView) -> list[str]:
    """Return the reserved annotations that differ between the two, sorted."""
    return _changed(old, new, filter(keys.is_reserved, {**old.annotations(), **new.annotations()}))


def _changed(old: PodView, new: PodView, of: Iterable[str]) -> list[str]:
    before, after = old.annotations(), new.annotations()
    return sorted(key for key in of if before.get(key) != after.get(key))


def validate_update(
    old: PodView, new: PodView, *, user: str, policy: AdmissionPolicy, catalog: Catalog
) -> Verdict:
    """Return the verdict on an update by ``user``."""
    try:
        moved = _moved_again(old, new, catalog.resource_names()) if is_claimed(old) else []
    except RequestInvalid as error:
        return Verdict(allowed=False, invalid=True, concerns_us=True, message=str(error))
    if user in policy.trusted_users:
        return Verdict(operations=tuple(moved))
    if changed := changed_reserved_keys(old, new):
        return Verdict(
            allowed=False,
            concerns_us=True,
            message=(
                f"metadata.annotations[{changed[0]}]: only the HAMi scheduler may write it; "
                "leave it as it is (to move a pod, delete it and create it again)"
            ),
        )
    label = keys.MANAGED_LABEL
    is_ours = old.labels().get(label) == "true" or is_claimed(old) or is_claimed(new)
    if is_ours and (changed := _changed(old, new, _SETTLED_AT_CREATION)):
        return Verdict(
            allowed=False,
            concerns_us=True,
            message=(
                f"metadata.annotations[{changed[0]}]: the creation of the pod settles how it gets "
                "its devices; leave it as it is (to change it, delete the pod and create it again)"
            ),
        )
    if old.labels().get(label) == "true" and new.labels().get(label) != "true":
        return Verdict(
            allowed=False,
            concerns_us=True,
            message=(
                f"metadata.labels[{label}]: the pod holds a device share that is tracked by "
                "this label; leave it as it is"
            ),
        )
    kept = _kept(old, new) if "volcano" in catalog.dialects else ()
    return Verdict(operations=(*moved, *kept))


def _moved_again(old: PodView, new: PodView, resource_names: frozenset[str]) -> list[Operation]:
    """Return the changes that take resources which a claim gives out of limits and requests.

    An unchanged manifest is applied again with its limits, which the live pod no longer has, and
    the API server would deny them. ``RequestInvalid``: the amounts are others.
    """
    operations: list[Operation] = []
    for group, containers in (
        ("initContainers", new.spec.init_containers or []),
        ("containers", new.spec.containers),
    ):
        for index, container in enumerate(containers):
            resources = container.resources or ResourcesView()
            for part, amounts in (("limits", resources.limits), ("requests", resources.requests)):
                own = (amounts or {}).keys() & resource_names
                if not own:
                    continue
                _require_same(old, container, own)
                path = f"/spec/{group}/{index}/resources/{part}"
                names = [f"/{name.replace('/', '~1')}" for name in sorted(own)]
                if len(own) == len(amounts or {}):
                    names = [""]
                operations += [{"op": "remove", "path": f"{path}{name}"} for name in names]
    return operations


def _require_same(old: PodView, container: ContainerView, own: Iterable[str]) -> None:
    whole = {one.name: one for _, one in restored(old).containers_in_order()}
    given = whole[container.name].limits() if container.name in whole else {}
    for name in sorted(own):
        amount = container.quantity(name) or ""
        if parse_quantity(amount) != parse_quantity(given.get(name, "")):
            raise RequestInvalid(
                field=f"container {container.name}: resources.limits[{name}]",
                problem="the pod gets its devices by a claim, whose amounts do not change",
                fix="delete the pod and create it again",
            )


def _kept(old: PodView, new: PodView) -> tuple[Operation, ...]:
    """Return the changes that keep the devices from which Volcano counts a pod.

    Those of a pod are written with its Binding. Volcano up to 1.15 writes its own choice before; it
    would count a choice that came to no Binding beside the next one.
    """
    key = volcano.POD_IDS
    shown = new.annotations().get(key)
    wanted = old.annotations().get(key) if new.spec.node_name else None
    if shown == wanted:
        return ()
    path = f"/metadata/annotations/{key.replace('/', '~1')}"
    if wanted is None:
        return ({"op": "remove", "path": path},)
    if new.metadata.annotations is None:
        return ({"op": "add", "path": "/metadata/annotations", "value": {key: wanted}},)
    return ({"op": "add", "path": path, "value": wanted},)


def validate_ephemeral(pod: Document, old: PodView, new: PodView, *, catalog: Catalog) -> Verdict:
    """Return the verdict on ephemeral containers: their limits are those of the pod's containers.

    A container that targets one with a share gets that container's limits and region mounted.
    Where the node agent mounted those, with a claim, Kubernetes gives an ephemeral container
    neither them nor a device, which a warning reports.
    """
    by_claim, new = is_claimed(new), restored(new)
    if not catalog.mentions(new):
        return Verdict()
    if error := bounds.excess(new, catalog.resource_names()):
        return Verdict(allowed=False, invalid=True, concerns_us=True, message=str(error))
    known = {container.name for container in old.spec.ephemeral_containers or []}
    added = [c for c in new.spec.ephemeral_containers or [] if c.name not in known]
    request = catalog.parse_pod(new)
    asking = {container.name for container in request.containers} if request else set()
    if problem := _ephemeral_problem(added, asking):
        return Verdict(allowed=False, concerns_us=True, message=problem)
    if by_claim:
        warnings = [_without_device(one) for one in added if one.target_container_name in asking]
        return Verdict(warnings=tuple(warnings), concerns_us=bool(added))
    documents = list(pod["spec"].get("ephemeralContainers") or [])
    for position, document in enumerate(documents):
        target = document.get("targetContainerName")
        if document["name"] in known or target not in asking:
            continue
        mounts = document.get("volumeMounts") or []
        ours = mounts_of(target)
        documents[position] = {
            **document,
            "volumeMounts": [*[m for m in mounts if m not in ours], *ours],
        }
    changed = {**pod, "spec": {**pod["spec"], "ephemeralContainers": documents}}
    if not documents:
        changed = pod
    return Verdict(operations=tuple(diff(pod, changed)), concerns_us=bool(added))


def _without_device(container: ContainerView) -> str:
    return (
        f"ephemeral container {container.name}: it sees no device, because "
        f"{container.target_container_name} has its share by a claim, which ephemeral containers "
        "cannot use"
    )


def _ephemeral_problem(added: list[ContainerView], asking: set[str]) -> str:
    for container in added:
        if container.security_context and container.security_context.privileged:
            return (
                f"ephemeral container {container.name}: securityContext.privileged: it would see "
                "every device of the node; drop privileged"
            )
    for container in added:
        given = next((v.name for v in container.env or [] if v.name in DEVICE_VARIABLES), "")
        if given:
            return (
                f"ephemeral container {container.name}: env {given}: devices are given by "
                "the scheduler only; remove it"
            )
        if from_elsewhere(container):
            return f"ephemeral {env_from_denied(container, 'it could give the container')}"
        if error := forbidden_mount(container, asking):
            return f"ephemeral {error}"
    return ""
