# SPDX-License-Identifier: Apache-2.0
"""Files that the control plane reads: audit policy and KubeSchedulerConfiguration.

The latter is the shipped one with addresses and waits of this machine put in. Outside documents:
``audit.k8s.io/v1`` and ``kubescheduler.config.k8s.io/v1`` (1.34).
"""

import math
from pathlib import Path
from typing import Any, Final

import yaml

Document = dict[str, Any]
SHIPPED: Final = Path("deploy") / "kustomize" / "base"
DRA: Final = Path("..") / "components" / "dra"
"""The component of Dynamic Resource Allocation, from ``SHIPPED``."""
_POLICY: Final = "ValidatingAdmissionPolicy"

AUDIT_POLICY: Final[Document] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # Heartbeats and reads of the control plane itself would drown what people and services do.
        {
            "level": "None",
            "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}],
            "namespaces": ["kube-node-lease", "kube-system"],
        },
        {"level": "None", "nonResourceURLs": ["/healthz*", "/livez*", "/readyz*", "/version"]},
        {"level": "None", "verbs": ["watch", "list", "get"], "userGroups": ["system:masters"]},
        {
            "level": "Metadata",
            "resources": [{"group": "", "resources": ["secrets", "serviceaccounts/token"]}],
        },
        {
            "level": "RequestResponse",
            "verbs": ["create", "update", "patch", "delete"],
            "resources": [{"group": "", "resources": ["pods", "pods/binding", "pods/eviction"]}],
        },
        {"level": "Metadata"},
    ],
}


def shipped_directory() -> Path:
    """The shipped manifests of the repository this runs from, else of the current directory."""
    for base in (*Path(__file__).resolve().parents, Path.cwd()):
        if (base / SHIPPED / "rbac.yaml").is_file():
            return base / SHIPPED
    message = f"no {SHIPPED} found; run this from the repository"
    raise FileNotFoundError(message)


def shipped(name: str) -> list[Document]:
    """All documents of one shipped file."""
    text = (shipped_directory() / name).read_text(encoding="utf-8")
    return [document for document in yaml.safe_load_all(text) if document]


def dra_objects() -> list[Document]:
    """Roles and classes of the component of Dynamic Resource Allocation.

    Without its policies: they bind an agent to the node of its pod, and agents of a test have none.
    """
    (component,) = shipped(str(DRA / "kustomization.yaml"))
    return [
        document
        for file in component["resources"]
        for document in shipped(str(DRA / file))
        if not document["kind"].startswith(_POLICY)
    ]


def scheduler_configuration(
    kubeconfig: Path, *, extender_url: str = "", backoff_s: float = 1.0, dra: bool = False
) -> Document:
    """Return the shipped configuration, adapted to a single kube-scheduler.

    ``dra``: that of the component of Dynamic Resource Allocation, which sends every pod to the
    extender.

    It schedules pods of other scheduler names too, because it is the only kube-scheduler. Without
    ``extender_url`` it has no extender. Kubernetes takes whole seconds from 1 for ``backoff_s``.
    """
    (document,) = shipped(str(DRA / "kube-scheduler.yaml") if dra else "kube-scheduler.yaml")
    document["profiles"].append({"schedulerName": "default-scheduler"})
    initial_s = max(1, math.ceil(backoff_s))
    document["leaderElection"] = {"leaderElect": False}
    document["clientConnection"] = {"kubeconfig": str(kubeconfig), "qps": 1000, "burst": 1000}
    document["podInitialBackoffSeconds"] = initial_s
    document["podMaxBackoffSeconds"] = max(initial_s, document["podMaxBackoffSeconds"])
    if extender_url:
        for extender in document["extenders"]:
            extender["urlPrefix"] = extender_url
    else:
        del document["extenders"]
    return document
