# SPDX-License-Identifier: Apache-2.0
"""The admission plugins that are compiled into the server and on by default, for pods.

ServiceAccount, Priority, RuntimeClass and DefaultTolerationSeconds, in the order in which the real
server runs them before any webhook (``pkg/kubeapiserver/options/plugins.go``, Kubernetes 1.34).
"""

from __future__ import annotations

import random
from typing import Final

from hami_sim.apiserver.calls import Call
from hami_sim.apiserver.errors import Obj, clone, forbidden
from hami_sim.apiserver.settings import Settings
from hami_sim.apiserver.store import Store

_SECONDS: Final = 300
_TOKEN_PATH: Final = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 - a path
_SUFFIX: Final = "bcdfghjklmnpqrstvwxz2456789"


def admit(store: Store, settings: Settings, call: Call, pod: Obj) -> None:
    """Run all of them on a new pod, in place."""
    _service_account(store, settings, call, pod)
    _priority(store, pod)
    _runtime_class(store, pod)
    if settings.default_tolerations:
        _tolerations(pod)


def _name(pod: Obj) -> str:
    metadata = pod["metadata"]
    return str(metadata.get("name") or metadata.get("generateName") or "")


def _service_account(store: Store, settings: Settings, call: Call, pod: Obj) -> None:
    spec = pod["spec"]
    name = spec.setdefault("serviceAccountName", "default")
    spec["serviceAccount"] = name
    account = store.get("serviceaccounts", call.namespace, name)
    if account is None:
        why = (
            f"error looking up service account {call.namespace}/{name}: serviceaccount "
            f'"{name}" not found'
        )
        raise forbidden("pods", _name(pod), why)
    automount = spec.get(
        "automountServiceAccountToken", account.obj.get("automountServiceAccountToken", True)
    )
    if settings.service_account_volume and automount:
        _mount_token(pod)


def _mount_token(pod: Obj) -> None:
    spec = pod["spec"]
    volume = f"kube-api-access-{''.join(random.choice(_SUFFIX) for _ in range(5))}"
    used = False
    for kind in ("initContainers", "containers"):
        for container in spec.get(kind) or ():
            mounts = container.setdefault("volumeMounts", [])
            if all(mount.get("mountPath") != _TOKEN_PATH for mount in mounts):
                mounts.append({"name": volume, "readOnly": True, "mountPath": _TOKEN_PATH})
                used = True
    if used:
        field = {"apiVersion": "v1", "fieldPath": "metadata.namespace"}
        spec.setdefault("volumes", []).append(
            {
                "name": volume,
                "projected": {
                    "sources": [
                        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
                        {
                            "configMap": {
                                "name": "kube-root-ca.crt",
                                "items": [{"key": "ca.crt", "path": "ca.crt"}],
                            }
                        },
                        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": field}]}},
                    ],
                    "defaultMode": 420,
                },
            }
        )


def _priority(store: Store, pod: Obj) -> None:
    spec = pod["spec"]
    rows = store.tables["priorityclasses.scheduling.k8s.io"].rows
    name = spec.get("priorityClassName")
    chosen: Obj | None = None
    if name:
        stored = rows.get(("", name))
        if stored is None:
            raise forbidden("pods", _name(pod), f"no PriorityClass with name {name} was found")
        chosen = stored.obj
    else:
        defaults = [row.obj for row in rows.values() if row.obj.get("globalDefault")]
        if defaults:
            chosen = max(defaults, key=lambda row: int(row.get("value", 0)))
            spec["priorityClassName"] = chosen["metadata"]["name"]
    value = chosen.get("value", 0) if chosen else 0
    policy = (chosen or {}).get("preemptionPolicy") or "PreemptLowerPriority"
    if spec.get("priority") not in (None, value):
        why = (
            f"the integer value of priority ({spec['priority']}) must not be provided in pod spec; "
            "priority admission controller computed "
            f"{value} from the given PriorityClass name"
        )
        raise forbidden("pods", _name(pod), why)
    spec["priority"] = value
    spec.setdefault("preemptionPolicy", policy)


def _runtime_class(store: Store, pod: Obj) -> None:
    spec = pod["spec"]
    name = spec.get("runtimeClassName")
    if not name:
        return
    stored = store.get("runtimeclasses.node.k8s.io", "", name)
    if stored is None:
        why = f'pod rejected: RuntimeClass "{name}" not found'
        raise forbidden("pods", _name(pod), why)
    overhead = (stored.obj.get("overhead") or {}).get("podFixed")
    if overhead:
        spec["overhead"] = clone(overhead)
    scheduling = stored.obj.get("scheduling") or {}
    for key, value in (scheduling.get("nodeSelector") or {}).items():
        if spec.setdefault("nodeSelector", {}).setdefault(key, value) != value:
            why = (
                "pod rejected: conflict: runtimeClass.scheduling.nodeSelector"
                f"[{key}] = {value}; pod.spec.nodeSelector[{key}] = {spec['nodeSelector'][key]}"
            )
            raise forbidden("pods", _name(pod), why)
    for toleration in scheduling.get("tolerations") or ():
        if toleration not in spec.setdefault("tolerations", []):
            spec["tolerations"].append(clone(toleration))


def _tolerations(pod: Obj) -> None:
    tolerations = pod["spec"].setdefault("tolerations", [])
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        covered = any(
            (not toleration.get("key") or toleration["key"] == key)
            and toleration.get("effect") in (None, "", "NoExecute")
            for toleration in tolerations
        )
        if not covered:
            tolerations.append(
                {
                    "key": key,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": _SECONDS,
                }
            )
