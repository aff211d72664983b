# SPDX-License-Identifier: Apache-2.0
"""Decides what admission does with a new pod: allow it unchanged, change it, or deny it.

The pod arrives as the JSON document the API server sent (``pod``) and as the narrow view of it
(``view``). The result for a pod that passed through here before is empty: admission may be invoked
again after other webhooks. Rules: HAMi v2.10's pod interface, section "Webhook behaviour", with the
differences that design D7 and D8 ask for. This module must not know about HTTP, time or randomness.
"""

import copy
import hashlib
import re
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hami_common import annotations as keys
from hami_common import limits
from hami_common.errors import RequestInvalid
from hami_common.model.request import PodRequest
from hami_common.podview import ContainerView, PodView
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import ContainerChanges
from hami_webhook.core.patch import Operation, diff
from hami_webhook.core.visibility import HIDING, HIDING_ALWAYS

DEFAULT_SCHEDULER = "default-scheduler"
OUR_PATHS = (limits.DIRECTORY, limits.REGION_DIRECTORY)
PRELOAD_FILE = "/etc/ld.so.preload"
_VOLUME_NAME_LIMIT = 63
_FILE_MODE = 0o644
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C Trace Context level 1; a version that is not known reads like the known one."""

Document = dict[str, Any]


class AdmissionPolicy(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the operator may choose."""

    scheduler_name: str = "hami-scheduler"
    """Scheduler that pods asking for our resources are given to."""
    overwrite_default_scheduler: bool = True
    """Whether a pod that names ``default-scheduler`` explicitly is ours too."""
    region_size_mib: int = 16
    """``sizeLimit`` of the in-memory volume for the usage region of one container."""
    hide_devices_from_others: bool = False
    """Give the containers of such a pod that ask for nothing the variables that hide devices.

    ``NVIDIA_VISIBLE_DEVICES=none``, and those of the vendors that the pod asks for
    (``visibility.HIDING``).
    """
    trusted_users: tuple[str, ...] = ("system:serviceaccount:hami-system:hami-scheduler",)
    """Users that may write reserved annotations on existing pods."""


class Verdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to one admission request."""

    allowed: bool = True
    message: str = ""
    """Why it was denied; empty when allowed."""
    invalid: bool = False
    """Denied because the request makes no sense as written (400), not for lack of leave (403)."""
    operations: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()
    concerns_us: bool = False
    """Whether the pod names our resources: only such admissions are published as events."""
    scheduler_is_ours: bool = False

    def without_patch(self) -> "Verdict":
        """The same answer from a webhook that may not change anything."""
        return replace(self, operations=()) if self.operations else self


def volume_name(prefix: str, container: str) -> str:
    """Name of our volume for a container, at most 63 characters (DNS label)."""
    name = f"{prefix}-{container}"
    if len(name) <= _VOLUME_NAME_LIMIT:
        return name
    digest = hashlib.sha256(container.encode()).hexdigest()[:10]
    return f"{name[: _VOLUME_NAME_LIMIT - 11].rstrip('-')}-{digest}"


def _volumes_of(container: str, policy: AdmissionPolicy) -> list[Document]:
    annotation = keys.limits(container)
    return [
        {
            "name": volume_name("hami-limits", container),
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
            "name": volume_name("hami-region", container),
            "emptyDir": {"medium": "Memory", "sizeLimit": f"{policy.region_size_mib}Mi"},
        },
    ]


def mounts_of(container: str) -> list[Document]:
    """Our volume mounts in ``container``: the limits read-only, the region writable."""
    return [
        {
            "name": volume_name("hami-limits", container),
            "mountPath": limits.DIRECTORY,
            "readOnly": True,
        },
        {"name": volume_name("hami-region", container), "mountPath": limits.REGION_DIRECTORY},
    ]


def strip_reserved(document: Document) -> tuple[str, ...]:
    """Remove annotations that only our scheduler may write; returns one warning per key."""
    annotations = document.get("metadata", {}).get("annotations") or {}
    forged = sorted(key for key in annotations if keys.is_reserved(key))
    for key in forged:
        del annotations[key]
    if forged and not annotations:
        del document["metadata"]["annotations"]
    return tuple(
        f"annotation {key} is written by the scheduler only and was removed" for key in forged
    )


def conflicting_mount(view: PodView) -> RequestInvalid | None:
    """A user's mount that would hide our limits or preload file, as the error to deny it with."""
    for container in all_containers(view):
        allowed = {mount["name"] for mount in mounts_of(container.name)}
        if container.target_container_name:
            allowed |= {m["name"] for m in mounts_of(container.target_container_name)}
        for mount in container.volume_mounts or []:
            path = "/" + mount.mount_path.strip("/")
            # A mount above ours (/etc, /run) is harmless: deeper paths are mounted later.
            hides = path == PRELOAD_FILE or any(
                path == own or path.startswith(f"{own}/") for own in OUR_PATHS
            )
            if hides and mount.name not in allowed:
                return RequestInvalid(
                    field=f"container {container.name}: volumeMounts[{mount.mount_path}]",
                    problem="would hide the limits of the container's device share",
                    fix=f"mount it elsewhere; {', '.join((*OUR_PATHS, PRELOAD_FILE))} are reserved",
                )
    return None


def all_containers(view: PodView) -> list[ContainerView]:
    """Containers of every kind."""
    return [
        *(view.spec.init_containers or []),
        *view.spec.containers,
        *(view.spec.ephemeral_containers or []),
    ]


def privileged_containers(view: PodView) -> list[str]:
    """Names of containers that run privileged, and so see every device of the node."""
    return [
        container.name
        for container in all_containers(view)
        if container.security_context and container.security_context.privileged
    ]


def refusal_of(view: PodView) -> str:
    """Why a pod that asks for our resources cannot be admitted at all; empty when it can."""
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
    if error := conflicting_mount(view):
        return str(error)
    return ""


def mutate(
    pod: Document,
    view: PodView,
    *,
    catalog: Catalog,
    policy: AdmissionPolicy,
    traceparent: str,
) -> Verdict:
    """Verdict on a pod that is being created."""
    changed = copy.deepcopy(pod)
    warnings = list(strip_reserved(changed))
    scheduler = view.spec.scheduler_name or DEFAULT_SCHEDULER
    ours = scheduler == policy.scheduler_name or (
        scheduler == DEFAULT_SCHEDULER
        and (policy.overwrite_default_scheduler or not view.spec.scheduler_name)
    )
    mentions = catalog.mentions(view)
    if not mentions or not ours:
        return Verdict(
            operations=tuple(diff(pod, changed)),
            warnings=tuple(warnings),
            concerns_us=mentions,
        )
    try:
        changes_by_index = _vendor_changes(view, catalog)
        request = catalog.parse_pod(view)
    except RequestInvalid as error:
        return Verdict(
            allowed=False,
            invalid=True,
            message=str(error),
            concerns_us=True,
            scheduler_is_ours=True,
        )
    for (_, container), changes in zip(view.containers_in_order(), changes_by_index, strict=True):
        warnings.extend(warning for change in changes for warning in change.warnings)
        for change in changes:
            _apply(_container_document(changed, container.name), change)
    spec = changed["spec"]
    spec["schedulerName"] = policy.scheduler_name
    if request is None:
        return Verdict(
            operations=tuple(diff(pod, changed)),
            warnings=tuple(warnings),
            concerns_us=True,
            scheduler_is_ours=True,
        )
    if problem := refusal_of(view):
        return Verdict(allowed=False, message=problem, concerns_us=True, scheduler_is_ours=True)
    metadata = changed["metadata"]
    metadata.setdefault("labels", {})
    metadata["labels"][keys.MANAGED_LABEL] = "true"
    _continue_trace(metadata.setdefault("annotations", {}), traceparent)
    asking = {container.name for container in request.containers}
    runtime_class = next((c.runtime_class for cs in changes_by_index for c in cs), "")
    if runtime_class and view.spec.runtime_class_name is None:
        spec["runtimeClassName"] = runtime_class
    for asker in request.containers:
        _add_volumes(spec, _container_document(changed, asker.name), asker.name, policy)
    if policy.hide_devices_from_others:
        hiding = _hiding(request)
        for _, container in view.containers_in_order():
            if container.name not in asking:
                _set_env(_container_document(changed, container.name), hiding)
    return Verdict(
        operations=tuple(diff(pod, changed)),
        warnings=tuple(warnings),
        concerns_us=True,
        scheduler_is_ours=True,
    )


def _hiding(request: PodRequest) -> dict[str, str]:
    """Variables that hide devices from containers that ask for none."""
    vendors = {one.vendor for asker in request.containers for one in asker.requests}
    return dict(HIDING_ALWAYS) | {
        name: value for vendor in sorted(vendors) for name, value in HIDING.get(vendor, {}).items()
    }


def _continue_trace(annotations: dict[str, str], traceparent: str) -> None:
    """Keep the caller's trace where there is one that can be continued."""
    if _TRACEPARENT.fullmatch(annotations.get(keys.TRACEPARENT, "")) is None:
        annotations[keys.TRACEPARENT] = traceparent


def _vendor_changes(view: PodView, catalog: Catalog) -> list[list[ContainerChanges]]:
    """Per container in kubelet's order: what each vendor that is asked wants to change."""
    return [
        [
            changes
            for vendor in catalog.asked(container)
            if (changes := vendor.admit(container, view.annotations())) is not None
        ]
        for _, container in view.containers_in_order()
    ]


def _container_document(pod: Document, name: str) -> Document:
    spec = pod["spec"]
    for group in ("initContainers", "containers"):
        for container in spec.get(group) or []:
            if container.get("name") == name:
                found: Document = container
                return found
    raise KeyError(name)


def _apply(container: Document, changes: ContainerChanges) -> None:
    if changes.set_limits or changes.remove_resources:
        resources = container.setdefault("resources", {})
        for group in ("limits", "requests"):
            for name in changes.remove_resources:
                (resources.get(group) or {}).pop(name, None)
        resources.setdefault("limits", {})
        resources["limits"].update(changes.set_limits)
        requests = resources.get("requests")
        if requests:
            # Kubernetes wants requests of extended resources equal to their limits; the API server
            # fills in absent ones.
            requests.update({k: v for k, v in changes.set_limits.items() if k in requests})
    if changes.remove_env:
        container["env"] = [e for e in container["env"] if e["name"] not in changes.remove_env]
    _set_env(container, changes.set_env)


def _set_env(container: Document, env: dict[str, str]) -> None:
    if not env:
        return
    present = {variable["name"] for variable in container.get("env") or []}
    added = [{"name": name, "value": value} for name, value in env.items() if name not in present]
    if added:
        container["env"] = [*(container.get("env") or []), *added]


def _add_volumes(spec: Document, container: Document, name: str, policy: AdmissionPolicy) -> None:
    volumes = spec.get("volumes") or []
    for volume in _volumes_of(name, policy):
        volumes = [v for v in volumes if v.get("name") != volume["name"] or v == volume]
        if volume not in volumes:
            volumes = [*volumes, volume]
    spec["volumes"] = volumes
    mounts = container.get("volumeMounts") or []
    for mount in mounts_of(name):
        mounts = [m for m in mounts if m.get("mountPath") != mount["mountPath"] or m == mount]
        if mount not in mounts:
            mounts = [*mounts, mount]
    container["volumeMounts"] = mounts
