# SPDX-License-Identifier: Apache-2.0
"""Decides what admission does with a new pod: allow it unchanged, change it, or deny it.

The pod arrives as the JSON document the API server sent (``pod``) and as the narrow view of it
(``view``). The result for an admitted pod is empty: admission is idempotent, as it may be invoked
again after other webhooks. Rules: HAMi v2.10's pod interface, section "Webhook behaviour", with the
differences that design D7 and D8 require. This module must not use HTTP, time or randomness.
"""

import re
from collections.abc import Collection, Iterable
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.admission import bounds
from hami_common.admission.bounds import all_containers
from hami_common.admission.mounts import (
    LIMITS_PREFIX,
    REGION_PREFIX,
    forbidden_mount,
    mounts_of,
    volume_name,
)
from hami_common.admission.review import Operation
from hami_common.apipath import is_label
from hami_common.dra.podclaims import (
    POD_CLAIM,
    PROFILE_SUFFIX,
    AllocationMode,
    as_claimed,
    claims_profile,
    is_claimed,
    requests_of,
)
from hami_common.errors import RequestInvalid
from hami_common.model.request import PodRequest, options
from hami_common.pods import annotations as keys
from hami_common.pods import limits
from hami_common.pods.podview import ContainerView, EnvVarView, PodView
from hami_common.pods.visibility import (
    DEVICE_VARIABLES,
    VARIABLE_BY_VENDOR,
    from_elsewhere,
    gives_devices,
)
from hami_common.skus.catalog import SkuCatalog, empty
from hami_common.skus.expansion import views_of
from hami_common.vendors import nvidia
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import ContainerChanges, InjectionMode
from hami_webhook.core import claimed, hostmemory, neutral
from hami_webhook.core.draft import Document, Draft
from hami_webhook.core.processes import warning_of
from hami_webhook.core.visibility import HIDING, HIDING_ALWAYS, PINNED

DEFAULT_SCHEDULER = "default-scheduler"
TASK_PRIORITY: Final = "CUDA_TASK_PRIORITY"
_FILE_MODE = 0o644
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C Trace Context level 1; an unknown version is parsed like the known one."""


class AdmissionPolicy(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of the operator for admission."""

    scheduler_name: str = "hami-scheduler"
    """Scheduler of pods that request our resources.

    Pods in mode ``dra`` without claims of their own go to the profile of this name followed by
    ``-claims``, which leaves their claims to HAMi.
    """
    other_schedulers: tuple[str, ...] = ()
    """Schedulers, by ``spec.schedulerName``, whose pods are prepared like ours and stay theirs.

    Their Bindings get the devices at bind admission, see docs/other-schedulers.md. With
    ``default-scheduler`` pods that name no scheduler stay with it.
    """
    overwrite_default_scheduler: bool = True
    """Treat pods that name ``default-scheduler`` explicitly as ours too."""
    region_size_mib: int = 16
    """``sizeLimit`` of the in-memory volume for the usage region of one container."""
    hide_devices_from_others: bool = False
    """Give containers without devices, in a pod with devices, the variables that hide devices.

    ``NVIDIA_VISIBLE_DEVICES=none``, and those of the vendors that the pod requests
    (``visibility.HIDING``).
    """
    injection: InjectionMode = "cdi"
    """Setting ``injection`` of the node agents: how devices enter containers.

    With ``cdi``, a container with a share of an NVIDIA device may have ``envFrom``: it gets
    ``NVIDIA_VISIBLE_DEVICES=void`` as a literal, which wins. With the others the node agent's own
    value would lose against that literal, so ``envFrom`` is denied beside a share.
    """
    allocation_mode: AllocationMode = "device-plugin"
    """Mode of pods that neither name one nor run in a namespace with the label.

    ``hami.io/allocation-mode`` is the annotation of a pod and the label of a namespace. In mode
    ``dra`` the scheduler creates a ResourceClaim for the resource limits of the pod. A pod that no
    claim can serve stays in mode ``device-plugin``.
    """
    dra_enabled: bool = False
    """Agents and scheduler serve claims (``dra.enabled``): pods may have mode ``dra``."""
    add_recall_memory: bool = False
    """Raise ``limits.memory`` of containers with a share of a device that recall can park.

    By the memory of the share and 64 MiB, see docs/recall.md; requests stay as they are.
    """
    trusted_users: tuple[str, ...] = ("system:serviceaccount:hami-system:hami-scheduler",)
    """Users that may write reserved annotations on existing pods."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a name that the scheduler would take for a profile of claims."""
        for name in (self.scheduler_name, *self.other_schedulers):
            if name.endswith(PROFILE_SUFFIX):
                text = (
                    f"{name}: names with {PROFILE_SUFFIX} at their end are those of profiles that "
                    "leave claims to HAMi; give the scheduler another name"
                )
                raise ValueError(text)


class Verdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to one admission request."""

    allowed: bool = True
    message: str = ""
    """Reason of a denial; empty when allowed."""
    invalid: bool = False
    """Denied because the request is invalid as written (400), not for lack of permission (403)."""
    failed: bool = False
    """Denied because of an unexpected error here (500)."""
    operations: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()
    concerns_us: bool = False
    """True when the pod names our resources: only such admissions are published as events."""
    is_ours: bool = False
    """HAMi gives the pod its devices, whichever scheduler places it."""

    def without_patch(self) -> "Verdict":
        """Return the same answer from a webhook that may not change anything."""
        return replace(self, operations=()) if self.operations else self


def _volumes_of(container: str, policy: AdmissionPolicy) -> list[Document]:
    annotation = keys.limits(container)
    return [
        {
            "name": volume_name(LIMITS_PREFIX, container),
            "downwardAPI": {
                # The API server's default, written out so that a second invocation finds no change.
                "defaultMode": _FILE_MODE,
                "items": [
                    {
                        "path": limits.FILE_NAME,
                        "fieldRef": {
                            "apiVersion": "v1",
                            "fieldPath": f"metadata.annotations['{annotation}']",
                        },
                    }
                ],
            },
        },
        {
            "name": volume_name(REGION_PREFIX, container),
            "emptyDir": {"medium": "Memory", "sizeLimit": f"{policy.region_size_mib}Mi"},
        },
    ]


def strip_reserved(metadata: Document) -> tuple[str, ...]:
    """Remove annotations that only our scheduler may write from a copy of the metadata.

    Returns one warning per key.
    """
    annotations = metadata.get("annotations") or {}
    forged = sorted(key for key in annotations if keys.is_reserved(key))
    if not forged:
        return ()
    kept = {key: value for key, value in annotations.items() if not keys.is_reserved(key)}
    metadata["annotations"] = kept
    if not metadata["annotations"]:
        del metadata["annotations"]
    return tuple(
        f"annotation {key} is written by the scheduler only and was removed" for key in forged
    )


def privileged_containers(view: PodView) -> list[str]:
    """Return the names of privileged containers, which have access to every device of the node."""
    return [
        container.name
        for container in all_containers(view)
        if container.security_context and container.security_context.privileged
    ]


def repeated_name(view: PodView) -> RequestInvalid | None:
    """Return the first duplicate container name, as the error to deny the pod with.

    The API server denies such a pod too, but only after admission has changed it.
    """
    seen: set[str] = set()
    for container in all_containers(view):
        if container.name in seen:
            return RequestInvalid(
                field=f"container {container.name}: name",
                problem="another container of the pod has the same name",
                fix="give each container a name of its own",
            )
        seen.add(container.name)
    return None


def refusal_of(view: PodView, request: PodRequest, policy: AdmissionPolicy) -> str:
    """Return why a pod that requests our resources cannot be admitted; empty when it can."""
    if privileged := privileged_containers(view):
        return (
            f"container {privileged[0]}: securityContext.privileged: a privileged container sees "
            "every device of the node, so its share could not be enforced; "
            "drop privileged, or do not ask for accelerator resources in this pod"
        )
    if view.spec.node_name:
        return (
            f"spec.nodeName: {view.spec.node_name!r} bypasses the scheduler, so no device can be "
            "reserved; remove it and use nodeSelector "
            f"kubernetes.io/hostname: {view.spec.node_name}"
        )
    asking = {asker.name for asker in request.containers}
    for container in all_containers(view):
        if error := forbidden_mount(container, asking):
            return str(error)
    vendors_by_container = _vendors_by_container(request)
    for _, container in view.containers_in_order():
        vendors = vendors_by_container.get(container.name, set())
        if error := _unpinnable(container, vendors, policy):
            return str(error)
    return ""


def _unpinnable(
    container: ContainerView, vendors: Collection[str], policy: AdmissionPolicy
) -> RequestInvalid | None:
    """Deny ``envFrom`` where no literal can win over it without hiding the share itself."""
    if not vendors or not from_elsewhere(container):
        return None
    for vendor, name in VARIABLE_BY_VENDOR.items():
        if vendor in vendors and not (vendor == nvidia.NAME and policy.injection == "cdi"):
            return env_from_denied(container, f"it could set {name}, by which the node gives it")
    return None


def env_from_denied(container: ContainerView, why: str) -> RequestInvalid:
    """Return the error for a container whose ``envFrom`` could bring device variables."""
    return RequestInvalid(
        field=f"container {container.name}: envFrom",
        problem=f"{why} devices",
        fix="name the variables under env with valueFrom, or give envFrom a prefix",
    )


class Circumstances(Struct, frozen=True, kw_only=True):
    """Facts of one admission that are not in the pod."""

    traceparent: str
    claim: str
    """Name for the claim that the pod gets in mode ``dra``."""
    namespace_mode: str = ""
    """Allocation mode by the label of the namespace; empty without one."""


def mutate(
    pod: Document,
    view: PodView,
    *,
    catalog: Catalog,
    policy: AdmissionPolicy,
    at: Circumstances,
    skus: SkuCatalog | None = None,
) -> Verdict:
    """Return the verdict on a pod that is being created; ``skus``: ``None`` without a catalog."""
    skus = empty(catalog) if skus is None else skus
    try:
        return _decide(pod, view, catalog=catalog, skus=skus, policy=policy, at=at)
    except RequestInvalid as error:
        return Verdict(allowed=False, invalid=True, message=str(error), concerns_us=True)


def _decide(
    sent: Document,
    sent_view: PodView,
    *,
    catalog: Catalog,
    skus: SkuCatalog,
    policy: AdmissionPolicy,
    at: Circumstances,
) -> Verdict:
    """Return the verdict as ``mutate`` does; ``RequestInvalid``: the pod is wrong as written."""
    draft = Draft(sent)
    warnings = list(strip_reserved(draft.metadata))
    scheduler = _scheduler_of(sent_view, policy)
    if is_claimed(sent_view) and not scheduler:
        raise _unclaimable(sent_view)
    view = claimed.with_limits(sent_view, draft, catalog.resource_names())
    view = neutral.expanded(view, draft, skus=skus, catalog=catalog) if scheduler else view
    if excess := bounds.excess(view, catalog.resource_names()):
        raise excess
    mentions = catalog.mentions(view)
    # The API server denies pods with wrong names of containers. Volumes of ours would add errors.
    is_named = all(is_label(container.name) for container in all_containers(view))
    if not mentions or not scheduler or not is_named:
        return Verdict(
            operations=draft.operations(),
            warnings=tuple(warnings),
            concerns_us=mentions,
            is_ours=mentions and bool(scheduler),
        )
    changes_by_index = _vendor_changes(view, catalog)
    request = catalog.parse_pod(view)
    if repeated := repeated_name(view):
        raise repeated
    by_claim = request is not None and _is_by_claim(view, request, policy, at, warnings)
    if by_claim:
        policy = replace(policy, injection="cdi")
    problem = refusal_of(view, request, policy) if request else ""
    if problem:
        return Verdict(allowed=False, message=problem, concerns_us=True, is_ours=True)
    for index, ((_, container), changes) in enumerate(
        zip(view.containers_in_order(), changes_by_index, strict=True)
    ):
        warnings.extend(warning for change in changes for warning in change.warnings)
        for change in changes:
            _apply(draft.container(index), change)
        warnings.extend(_strip_variables(draft, index, container))
    is_ours = scheduler == policy.scheduler_name
    profile = claims_profile(scheduler) if by_claim and is_ours and _is_sole(view, catalog) else ""
    draft.spec["schedulerName"] = profile or scheduler
    _pin_variables(draft, view, _vendors_by_container(request))
    if request is not None:
        metadata = draft.metadata
        metadata["labels"] = {**(metadata.get("labels") or {}), keys.MANAGED_LABEL: "true"}
        metadata["annotations"] = _continue_trace(metadata.get("annotations") or {}, at.traceparent)
        runtime_class = next((c.runtime_class for cs in changes_by_index for c in cs), "")
        if runtime_class and view.spec.runtime_class_name is None:
            draft.spec["runtimeClassName"] = runtime_class
        claim = at.claim if by_claim else ""
        _give_share(draft, view, request, catalog=catalog, policy=policy, claim=claim)
        if policy.add_recall_memory and not by_claim:
            warnings.extend(_raise_limits(draft, view, request, catalog))
        warnings.extend(_process_warnings(draft, view, request))
    return Verdict(
        operations=draft.operations(),
        warnings=tuple(warnings),
        concerns_us=True,
        is_ours=True,
    )


def _unclaimable(view: PodView) -> RequestInvalid:
    """Return the error for a pod of another scheduler with the annotation of mode ``dra``."""
    return RequestInvalid(
        field=f"annotation {keys.CLAIMED_RESOURCES}",
        problem=f"HAMi creates no claims for pods of scheduler {view.spec.scheduler_name}",
        fix="remove it, with the claim, and write the resources as limits of the containers",
    )


def _is_by_claim(
    view: PodView,
    request: PodRequest,
    policy: AdmissionPolicy,
    at: Circumstances,
    warnings: list[str],
) -> bool:
    """Return whether the pod gets its devices by a claim (mode ``dra``).

    Adds to ``warnings`` why not, where its namespace or the installation wants it.
    ``RequestInvalid``: the pod's own annotation demands what no claim can give, or is wrong.
    """
    mode = claimed.mode_of(
        view.annotations(), namespace_mode=at.namespace_mode, default=policy.allocation_mode
    )
    if mode != "dra":
        return False
    try:
        _require_claims(view, request, policy)
    except RequestInvalid as error:
        if view.annotations().get(keys.ALLOCATION_MODE):
            raise
        warnings.append(f"the pod stays in allocation mode device-plugin: {error}")
        return False
    if not is_claimed(view):
        claimed.require_own_claim(view)
    return True


def _require_claims(view: PodView, request: PodRequest, policy: AdmissionPolicy) -> None:
    """Raise ``RequestInvalid`` if no claim can serve the request here."""
    if keys.ALTERNATIVES in view.annotations():
        raise RequestInvalid(
            field="allocation mode dra",
            problem="a claim names devices of one vendor, and the pod asks without a vendor",
            fix=f"set annotation {keys.ALLOCATION_MODE}: device-plugin",
        )
    if not policy.dra_enabled:
        raise RequestInvalid(
            field="allocation mode dra",
            problem="this installation gives no devices by claims",
            fix=f"set annotation {keys.ALLOCATION_MODE}: device-plugin, or ask an operator to "
            "install component dra",
        )
    as_claimed(request, claim=POD_CLAIM)


def _give_share(
    draft: Draft,
    view: PodView,
    request: PodRequest,
    *,
    catalog: Catalog,
    policy: AdmissionPolicy,
    claim: str,
) -> None:
    """Let containers get their shares, by the claim if it has a name; hide devices from others."""
    if claim:
        claimed.claim(
            draft,
            [container.name for _, container in view.containers_in_order()],
            requests_of(request),
            claim_name=claim,
            resource_names=catalog.resource_names(),
        )
    else:
        _add_volumes(draft, view, request, policy)
    if policy.hide_devices_from_others:
        _hide_devices(draft, view, request)


def _scheduler_of(view: PodView, policy: AdmissionPolicy) -> str:
    """Return the scheduler that is to place the pod if it requests devices of ours; empty: none.

    Of a scheduler that neither is ours nor is named in the policy, nothing is expected. A pod made
    from the YAML of a live one may name the profile that leaves claims to HAMi.
    """
    scheduler = view.spec.scheduler_name or DEFAULT_SCHEDULER
    if scheduler in policy.other_schedulers:
        return scheduler
    own = (policy.scheduler_name, claims_profile(policy.scheduler_name))
    is_for_us = scheduler in own or (
        scheduler == DEFAULT_SCHEDULER
        and (policy.overwrite_default_scheduler or not view.spec.scheduler_name)
    )
    return policy.scheduler_name if is_for_us else ""


def _is_sole(view: PodView, catalog: Catalog) -> bool:
    """Return whether the claim for the pod's resource limits is the only one of the pod.

    Other extended resources may be served by a claim that kube-scheduler creates (KEP-5004).
    """
    has_claims = any(one.name != POD_CLAIM for one in view.spec.resource_claims or ())
    asked = {name for _, one in view.containers_in_order() for name in one.limits()}
    others = {name for name in asked - catalog.resource_names() if "/" in name}
    return not has_claims and not others


def _vendors_by_container(request: PodRequest | None) -> dict[str, set[str]]:
    """Return the vendors of the devices of each container that has a share."""
    found: dict[str, set[str]] = {}
    for choice in options(request) if request else ():
        for asker in choice.containers:
            found.setdefault(asker.name, set()).update(one.vendor for one in asker.requests)
    return found


def _process_warnings(draft: Draft, view: PodView, request: PodRequest) -> list[str]:
    """Return warnings for containers whose number of processes is an amount of ours."""
    devices = {one.name: sum(r.count for r in one.requests) for one in request.containers}
    found = [
        warning_of(container, draft.original(index), devices=devices[container.name])
        for index, (_, container) in enumerate(view.containers_in_order())
        if container.name in devices
    ]
    return [warning for warning in found if warning is not None]


def _raise_limits(
    draft: Draft, view: PodView, request: PodRequest, catalog: Catalog
) -> tuple[str, ...]:
    """Add the device memory that recall may move to the host to memory limits; returns warnings."""
    metadata = draft.metadata
    annotations: dict[str, str] = metadata.get("annotations") or {}
    vendors = {one.name for one in catalog.vendors if one.capability.memory_recalled}
    raised = hostmemory.raise_limits(
        draft.spec,
        [draft.seen(index) for index in range(len(view.containers_in_order()))],
        annotations,
        _by_vendor_of(request, vendors),
        vendors=vendors,
    )
    for index, resources in raised.resources.items():
        draft.container(index)["resources"] = resources
    if raised.pod_resources is not None:
        draft.spec["resources"] = raised.pod_resources
    if raised.annotation:
        metadata["annotations"] = {**annotations, keys.RECALL_MEMORY: raised.annotation}
    return raised.warnings


def _by_vendor_of(request: PodRequest, vendors: Collection[str]) -> PodRequest:
    """Return the first alternative with a device of one of the vendors, else the first of all."""
    choices = options(request)
    mine = (
        choice
        for choice in choices
        if any(one.vendor in vendors for asker in choice.containers for one in asker.requests)
    )
    return next(mine, choices[0])


def _hide_devices(draft: Draft, view: PodView, request: PodRequest) -> None:
    """Set the variables that hide devices in containers that request none."""
    vendors = set().union(*_vendors_by_container(request).values())
    hiding = dict(HIDING_ALWAYS) | {
        name: value for vendor in sorted(vendors) for name, value in HIDING.get(vendor, {}).items()
    }
    asking = {asker.name for asker in request.containers}
    for index, (_, container) in enumerate(view.containers_in_order()):
        if container.name not in asking:
            _set_env(draft.container(index), hiding)


def _continue_trace(annotations: dict[str, str], traceparent: str) -> dict[str, str]:
    """Keep the caller's trace context if it is valid, else set ours."""
    if _TRACEPARENT.fullmatch(annotations.get(keys.TRACEPARENT, "")) is not None:
        return annotations
    return {**annotations, keys.TRACEPARENT: traceparent}


def _vendor_changes(view: PodView, catalog: Catalog) -> list[list[ContainerChanges]]:
    """Return the changes of each requested vendor, per container in kubelet's order.

    Alternatives change no resources: the pod keeps its neutral ones.
    """
    found: list[list[ContainerChanges]] = [[] for _ in view.containers_in_order()]
    for written in views_of(view):
        for own, (_, container) in zip(found, written.containers_in_order(), strict=True):
            for vendor in catalog.asked(container):
                changes = vendor.admit(_without_pins(container), written.annotations())
                if changes is not None and written is not view:
                    changes = replace(changes, set_limits={}, remove_resources=())
                if changes is not None:
                    own.append(changes)
    return found


def _without_pins(container: ContainerView) -> ContainerView:
    """Return the container without our literals beside ``envFrom``: vendors would remove them."""
    if not container.env or not from_elsewhere(container):
        return container
    env = [v for v in container.env if PINNED.get(v.name) != (v.value or "")]
    return replace(container, env=env)


def _apply(container: Document, changes: ContainerChanges) -> None:
    if changes.set_limits or changes.remove_resources:
        resources = dict(container.get("resources") or {})
        removed = set(changes.remove_resources)
        for group in ("limits", "requests"):
            if resources.get(group):
                kept = {k: v for k, v in resources[group].items() if k not in removed}
                resources[group] = kept
        resources["limits"] = {**(resources.get("limits") or {}), **changes.set_limits}
        requests = resources.get("requests")
        if requests:
            # Kubernetes requires requests of extended resources to equal their limits; the API
            # server fills in absent ones.
            same = {k: v for k, v in changes.set_limits.items() if k in requests}
            resources["requests"] = {**requests, **same}
        container["resources"] = resources
    if changes.remove_env:
        removed = set(changes.remove_env)
        container["env"] = [e for e in container.get("env") or [] if e["name"] not in removed]
    _set_env(container, changes.set_env)


def _set_env(container: Document, env: dict[str, str]) -> None:
    if not env:
        return
    present = {variable["name"] for variable in container.get("env") or []}
    added = [{"name": name, "value": value} for name, value in env.items() if name not in present]
    if added:
        container["env"] = [*(container.get("env") or []), *added]


def _strip_variables(draft: Draft, index: int, view: ContainerView) -> list[str]:
    """Remove variables by which a runtime would inject devices; returns one warning for each."""
    if not any(variable.name in DEVICE_VARIABLES for variable in view.env or []):
        return []
    container = draft.container(index)
    env = msgspec.convert(container["env"], list[EnvVarView])
    if not any(map(gives_devices, env)):
        return []
    container["env"] = [
        document
        for document, variable in zip(container["env"], env, strict=True)
        if not gives_devices(variable)
    ]
    return [
        f"container {view.name}: env {variable.name} gives devices past the scheduler and was "
        "removed"
        for variable in env
        if gives_devices(variable)
    ]


def _pin_variables(draft: Draft, view: PodView, vendors_by_container: dict[str, set[str]]) -> None:
    """Set the device variables as literals wherever ``envFrom`` could bring them."""
    for index, (_, container) in enumerate(view.containers_in_order()):
        if from_elsewhere(container):
            pins = dict(PINNED)
            if nvidia.NAME in vendors_by_container.get(container.name, ()):
                pins[TASK_PRIORITY] = str(nvidia.DEFAULT_PRIORITY)
            _set_env(draft.container(index), pins)


def _of_ours(found: Iterable[Document], ours: dict[str, Document], key: str) -> list[Document]:
    """Return ``found`` with ``ours``, by ``key``: entries that imitate ours are replaced."""
    kept: list[Document] = []
    missing = dict(ours)
    for one in found:
        name = one.get(key)
        if name not in ours:
            kept.append(one)
        elif one == missing.get(name):
            kept.append(one)
            del missing[name]
    return [*kept, *missing.values()]


def _add_volumes(draft: Draft, view: PodView, request: PodRequest, policy: AdmissionPolicy) -> None:
    """Add limits and region to containers with a share."""
    asking = {asker.name for asker in request.containers}
    by_index = {
        index: container.name
        for index, (_, container) in enumerate(view.containers_in_order())
        if container.name in asking
    }
    ours = {
        volume["name"]: volume for name in by_index.values() for volume in _volumes_of(name, policy)
    }
    draft.spec["volumes"] = _of_ours(draft.spec.get("volumes") or [], ours, "name")
    for index, name in by_index.items():
        container = draft.container(index)
        mounts = {mount["mountPath"]: mount for mount in mounts_of(name)}
        container["volumeMounts"] = _of_ours(
            container.get("volumeMounts") or [], mounts, "mountPath"
        )
