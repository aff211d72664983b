# SPDX-License-Identifier: Apache-2.0
"""Defaulting, field resets and validation that the server applies to objects of each kind.

One :class:`Rules` row per kind that needs more than storing; all others use the plain row. The
functions work on private copies without kind and apiVersion, and read neither store nor clock.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import msgspec

from hami_sim.apiserver import admission, dra, pods
from hami_sim.apiserver.errors import (
    Cause,
    Obj,
    bad_request,
    bad_value,
    clone,
    forbidden_field,
    required,
)
from hami_sim.apiserver.names import qualified_complaints
from hami_sim.apiserver.quantity import parse_quantity

Change: TypeAlias = Callable[[Obj], None]
Compare: TypeAlias = Callable[[Obj, Obj], None]
Check: TypeAlias = Callable[[Obj], list[Cause]]
CheckUpdate: TypeAlias = Callable[[Obj, Obj], list[Cause]]


def _nothing(obj: Obj) -> None:
    del obj


def _keep_all(obj: Obj, old: Obj) -> None:
    del obj, old


def _fine(obj: Obj) -> list[Cause]:
    del obj
    return []


def _fine_update(obj: Obj, old: Obj) -> list[Cause]:
    del obj, old
    return []


def _drop_status(obj: Obj) -> None:
    obj.pop("status", None)


def _keep_status(obj: Obj, old: Obj) -> None:
    if "status" in old:
        obj["status"] = clone(old["status"])
    else:
        obj.pop("status", None)


def _only_status(obj: Obj, old: Obj) -> None:
    status = obj.get("status")
    metadata = obj["metadata"]
    obj.clear()
    obj.update(clone(old))
    obj["metadata"] = {
        **clone(old["metadata"]),
        **{
            field: metadata[field]
            for field in ("labels", "annotations", "resourceVersion", "managedFields")
            if field in metadata
        },
    }
    if status is not None:
        obj["status"] = status


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The behaviour of one kind."""

    default: Change = _nothing
    prepare_create: Change = _nothing
    prepare_update: Compare = _keep_all
    prepare_status: Compare = _only_status
    check_create: Check = _fine
    check_update: CheckUpdate = _fine_update
    check_status: CheckUpdate = _fine_update
    name_is_label: bool = False
    checks_name: bool = True


# ------------------------------------------------------------------------------------- nodes


def _default_node(node: Obj) -> None:
    node.setdefault("spec", {})
    status = node.setdefault("status", {})
    if "capacity" in status and "allocatable" not in status:
        status["allocatable"] = dict(status["capacity"])
    for field in ("capacity", "allocatable"):
        pods.canonical_amounts(status.get(field), "Node")


def _check_node(node: Obj) -> list[Cause]:
    found: list[Cause] = []
    for position, taint in enumerate(node["spec"].get("taints") or ()):
        path = f"spec.taints[{position}]"
        found += [
            bad_value(f"{path}.key", taint.get("key", ""), text)
            for text in qualified_complaints(taint.get("key", ""))
        ]
        if taint.get("effect") not in ("NoSchedule", "PreferNoSchedule", "NoExecute"):
            found.append(required(f"{path}.effect"))
    for field in ("capacity", "allocatable"):
        for name, text in (node["status"].get(field) or {}).items():
            amount = parse_quantity(text)
            path = f"status.{field}.{name}"
            if amount.amount < 0:
                found.append(bad_value(path, text, "must be greater than or equal to 0"))
            if pods.is_extended_resource(name) and not amount.is_integer:
                found.append(bad_value(path, text, "must be an integer"))
    return found


def _check_node_update(node: Obj, old: Obj) -> list[Cause]:
    found = _check_node(node)
    for field in ("podCIDR", "providerID"):
        before = old["spec"].get(field)
        if before and node["spec"].get(field) != before:
            found.append(
                forbidden_field(
                    f"spec.{field}",
                    'node updates may not change podCIDR except from "" to valid'
                    if field == "podCIDR"
                    else 'node updates may not change providerID except from "" to valid',
                )
            )
    return found


def _keep_spec(obj: Obj, old: Obj) -> None:
    obj["spec"] = clone(old.get("spec", {}))


# -------------------------------------------------------------------------------- namespaces


def _default_namespace(namespace: Obj) -> None:
    metadata = namespace["metadata"]
    if metadata.get("name"):
        labels = metadata.setdefault("labels", {})
        labels["kubernetes.io/metadata.name"] = metadata["name"]


def _create_namespace(namespace: Obj) -> None:
    spec = namespace.setdefault("spec", {})
    finalizers = spec.setdefault("finalizers", [])
    if "kubernetes" not in finalizers:
        finalizers.append("kubernetes")
    namespace["status"] = {"phase": "Active"}


def _update_namespace(namespace: Obj, old: Obj) -> None:
    _keep_spec(namespace, old)
    _keep_status(namespace, old)


# ------------------------------------------------------------------------------------ others


def _check_data(obj: Obj) -> list[Cause]:
    found: list[Cause] = []
    total = 0
    for field in ("data", "binaryData"):
        for key, value in (obj.get(field) or {}).items():
            if not isinstance(value, str):
                msg = (
                    f'ConfigMap in version "v1" cannot be handled as a ConfigMap: json: cannot '
                    f"unmarshal value into Go struct field ConfigMap.{field} of type string"
                )
                raise bad_request(msg)
            total += len(value.encode())
            if not key or "/" in key:
                found.append(
                    bad_value(
                        f"{field}[{key}]",
                        key,
                        "a valid config key must consist of alphanumeric characters, '-', '_' or "
                        "'.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for "
                        "validation is '[-._a-zA-Z0-9]+')",
                    )
                )
    if total > 1024 * 1024:
        found.append(
            Cause(
                reason="FieldValueTooLong",
                message="Too long: may not be more than 1048576 bytes",
            )
        )
    return found


def _check_data_update(obj: Obj, old: Obj) -> list[Cause]:
    found = _check_data(obj)
    if old.get("immutable"):
        found += [
            forbidden_field(field, "field is immutable when `immutable` is set")
            for field in ("data", "binaryData")
            if obj.get(field) != old.get(field)
        ]
    return found


def _default_secret(secret: Obj) -> None:
    text = secret.pop("stringData", None) or {}
    if text:
        data = secret.setdefault("data", {})
        for key, value in text.items():
            data[key] = base64.b64encode(str(value).encode()).decode()
    secret.setdefault("type", "Opaque")


def _check_lease(lease: Obj) -> list[Cause]:
    found = []
    spec = lease.get("spec") or {}
    duration_s = spec.get("leaseDurationSeconds")
    if duration_s is not None and duration_s <= 0:
        found.append(bad_value("spec.leaseDurationSeconds", duration_s, "must be greater than 0"))
    if spec.get("leaseTransitions") is not None and spec["leaseTransitions"] < 0:
        found.append(
            bad_value(
                "spec.leaseTransitions",
                spec["leaseTransitions"],
                "must be greater than or equal to 0",
            )
        )
    return found


def _check_lease_update(lease: Obj, old: Obj) -> list[Cause]:
    del old
    return _check_lease(lease)


QUOTA_NAMES: Final = frozenset(
    {
        "cpu",
        "memory",
        "ephemeral-storage",
        "requests.cpu",
        "requests.memory",
        "requests.storage",
        "requests.ephemeral-storage",
        "limits.cpu",
        "limits.memory",
        "limits.ephemeral-storage",
        "pods",
        "resourcequotas",
        "services",
        "replicationcontrollers",
        "secrets",
        "persistentvolumeclaims",
        "configmaps",
        "services.nodeports",
        "services.loadbalancers",
    }
)


def _default_quota(quota: Obj) -> None:
    pods.canonical_amounts((quota.get("spec") or {}).get("hard"), "ResourceQuota")
    for field in ("hard", "used"):
        pods.canonical_amounts((quota.get("status") or {}).get(field), "ResourceQuota")


def _check_quota(quota: Obj) -> list[Cause]:
    found: list[Cause] = []
    for name, text in ((quota.get("spec") or {}).get("hard") or {}).items():
        path = f"spec.hard[{name}]"
        found += [bad_value(path, name, complaint) for complaint in qualified_complaints(name)]
        if "/" not in name and name not in QUOTA_NAMES:
            found.append(bad_value(path, name, "must be a standard resource for quota"))
        amount = parse_quantity(text)
        if amount.amount < 0:
            found.append(bad_value(path, text, "must be greater than or equal to 0"))
        counted = name in ("pods", "services", "secrets", "configmaps") or name.startswith("count/")
        if counted and not amount.is_integer:
            found.append(bad_value(path, text, "must be an integer"))
    return found


def _check_quota_update(quota: Obj, old: Obj) -> list[Cause]:
    found = _check_quota(quota)
    if (quota.get("spec") or {}).get("scopes") != (old.get("spec") or {}).get("scopes"):
        found.append(bad_value("spec.scopes", "", "field is immutable"))
    return found


def _check_budget(budget: Obj) -> list[Cause]:
    spec = budget.get("spec") or {}
    if spec.get("minAvailable") is not None and spec.get("maxUnavailable") is not None:
        return [bad_value("spec", "", "minAvailable and maxUnavailable cannot be both set")]
    return []


def _check_budget_update(budget: Obj, old: Obj) -> list[Cause]:
    del old
    return _check_budget(budget)


_HIGHEST_USER_PRIORITY: Final = 1_000_000_000


def _default_priority_class(priority: Obj) -> None:
    priority.setdefault("preemptionPolicy", "PreemptLowerPriority")


def _check_priority_class(priority: Obj) -> list[Cause]:
    name, value = priority["metadata"].get("name", ""), priority.get("value", 0)
    if name.startswith("system-") and name not in SYSTEM_PRIORITIES:
        return [
            forbidden_field(
                "metadata.name",
                "priority class names with 'system-' prefix are reserved for system use only",
            )
        ]
    if value > _HIGHEST_USER_PRIORITY and name not in SYSTEM_PRIORITIES:
        return [
            forbidden_field(
                "value",
                f"maximum allowed value of a user defined priority is {_HIGHEST_USER_PRIORITY}",
            )
        ]
    return []


SYSTEM_PRIORITIES: Final = {
    "system-cluster-critical": 2_000_000_000,
    "system-node-critical": 2_000_001_000,
}


def _check_priority_update(priority: Obj, old: Obj) -> list[Cause]:
    if priority.get("value", 0) != old.get("value", 0):
        return [forbidden_field("value", "may not be changed in an update.")]
    return []


def _check_runtime_class(runtime: Obj) -> list[Cause]:
    return [] if runtime.get("handler") else [required("handler")]


def _check_runtime_update(runtime: Obj, old: Obj) -> list[Cause]:
    if runtime.get("handler") != old.get("handler"):
        return [bad_value("handler", runtime.get("handler"), "field is immutable")]
    return []


def _check_event(event: Obj) -> list[Cause]:
    involved = (event.get("involvedObject") or {}).get("namespace") or "default"
    namespace = event["metadata"].get("namespace", "")
    if namespace != involved:
        return [bad_value("involvedObject.namespace", involved, "does not match event.namespace")]
    return []


def _default_workload(workload: Obj) -> None:
    template = (workload.get("spec") or {}).get("template")
    if isinstance(template, dict) and isinstance(template.get("spec"), dict):
        pods.default_pod(template)


def _default_mutating(config: Obj) -> None:
    admission.default_configuration(config, mutating=True)


def _default_validating(config: Obj) -> None:
    admission.default_configuration(config, mutating=False)


def _check_config_update(config: Obj, old: Obj) -> list[Cause]:
    del old
    return admission.check_configuration(config)


_WITH_STATUS: Final = Rules(prepare_create=_drop_status, prepare_update=_keep_status)
_WORKLOAD: Final = Rules(
    default=_default_workload, prepare_create=_drop_status, prepare_update=_keep_status
)
PLAIN: Final = Rules()

RULES: Final[Mapping[str, Rules]] = {
    "pods": Rules(
        default=pods.default_pod,
        prepare_create=pods.prepare_pod_create,
        prepare_update=pods.prepare_pod_update,
        prepare_status=pods.prepare_pod_status,
        check_create=pods.validate_pod_create,
        check_update=pods.validate_pod_update,
        check_status=pods.validate_pod_status,
    ),
    "nodes": Rules(
        default=_default_node,
        prepare_update=_keep_status,
        prepare_status=_keep_spec,
        check_create=_check_node,
        check_update=_check_node_update,
        check_status=_check_node_update,
    ),
    "namespaces": Rules(
        default=_default_namespace,
        prepare_create=_create_namespace,
        prepare_update=_update_namespace,
        prepare_status=_keep_spec,
        name_is_label=True,
    ),
    "configmaps": Rules(check_create=_check_data, check_update=_check_data_update),
    "secrets": Rules(
        default=_default_secret, check_create=_check_data, check_update=_check_data_update
    ),
    "services": Rules(prepare_create=_drop_status, prepare_update=_keep_status, name_is_label=True),
    "persistentvolumeclaims": _WITH_STATUS,
    "events": Rules(check_create=_check_event),
    "resourcequotas": Rules(
        default=_default_quota,
        prepare_create=_drop_status,
        prepare_update=_keep_status,
        check_create=_check_quota,
        check_update=_check_quota_update,
    ),
    "leases.coordination.k8s.io": Rules(
        check_create=_check_lease, check_update=_check_lease_update
    ),
    "poddisruptionbudgets.policy": Rules(
        prepare_create=_drop_status,
        prepare_update=_keep_status,
        check_create=_check_budget,
        check_update=_check_budget_update,
    ),
    "priorityclasses.scheduling.k8s.io": Rules(
        default=_default_priority_class,
        check_create=_check_priority_class,
        check_update=_check_priority_update,
    ),
    dra.SLICES: Rules(
        default=dra.default_slice,
        check_create=dra.check_slice,
        check_update=dra.check_slice_update,
    ),
    dra.CLAIMS: Rules(
        default=dra.default_claim,
        prepare_create=dra.prepare_claim_create,
        prepare_update=_keep_status,
        prepare_status=dra.prepare_claim_status,
        check_create=dra.check_claim,
        check_update=dra.check_claim_update,
        check_status=dra.check_claim_status,
    ),
    dra.TEMPLATES: Rules(
        default=dra.default_template,
        check_create=dra.check_template,
        check_update=dra.check_template_update,
    ),
    dra.CLASSES: Rules(
        default=dra.default_class,
        check_create=dra.check_class,
        check_update=dra.check_class_update,
    ),
    "runtimeclasses.node.k8s.io": Rules(
        check_create=_check_runtime_class, check_update=_check_runtime_update
    ),
    **{
        f"{plural}.apps": _WORKLOAD
        for plural in ("deployments", "daemonsets", "replicasets", "statefulsets")
    },
    "jobs.batch": _WORKLOAD,
    # Role names may hold colons; only path segments are refused there.
    **{
        f"{plural}.rbac.authorization.k8s.io": Rules(checks_name=False)
        for plural in ("roles", "rolebindings", "clusterroles", "clusterrolebindings")
    },
    admission.MUTATING: Rules(
        default=_default_mutating,
        check_create=admission.check_configuration,
        check_update=_check_config_update,
    ),
    admission.VALIDATING: Rules(
        default=_default_validating,
        check_create=admission.check_configuration,
        check_update=_check_config_update,
    ),
}


def rules_for(storage_key: str) -> Rules:
    """Find the behaviour of the objects in one table."""
    return RULES.get(storage_key, PLAIN)
