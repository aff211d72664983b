# SPDX-License-Identifier: Apache-2.0
"""Objects that a cluster has before HAMi is installed: DNS, storage, the RuntimeClass of NVIDIA.

Volumes exist beforehand as directories of the node (plugin ``local``, which lets kubelet set the
group of a pod), as many as installations need. CoreDNS is a Deployment from ``DNS_IMAGE``.
"""

from pathlib import Path
from typing import Any, Final

from tests.cluster.site.hardware import HANDLER

DNS_ADDRESS: Final = "10.96.0.10"
DOMAIN: Final = "cluster.local"
RESOLVER: Final = f"nameserver {DNS_ADDRESS}\nsearch svc.{DOMAIN} {DOMAIN}\noptions ndots:5\n"
"""resolv.conf of the node, so that an administrator can use names of Services there."""
DNS_IMAGE: Final = "localhost/coredns:1"
STORAGE_CLASS: Final = "standard"
VOLUMES: Final = Path("/var/lib/volumes")
"""On the node: one directory per volume."""
VOLUME_COUNT: Final = 24
VOLUME_GIB: Final = 20
_COREFILE = f"""
.:1053 {{
    errors
    health :8080
    ready :8181
    kubernetes {DOMAIN} in-addr.arpa {{
        pods insecure
        ttl 5
    }}
    cache 5
}}
"""
_DNS = "coredns"
_LABELS = {"k8s-app": "kube-dns"}

Document = dict[str, Any]


def all_objects(node: str) -> list[Document]:
    """Every object, in the order in which they are applied."""
    return [*_dns(), *_storage(node), _runtime_class(), *_administrator()]


def _administrator() -> list[Document]:
    """Rights of administrators; the account is for tokens, which a client certificate lacks."""
    account = {"name": "admin", "namespace": "kube-system"}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "admin"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "cluster-admin",
            },
            "subjects": [
                {"kind": "ServiceAccount", **account},
                # The API server's login to kubelet, as kubeadm binds it.
                {
                    "kind": "Group",
                    "apiGroup": "rbac.authorization.k8s.io",
                    "name": "kubeadm:cluster-admins",
                },
            ],
        },
    ]


def _runtime_class() -> Document:
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": HANDLER},
        "handler": HANDLER,
    }


def _storage(node: str) -> list[Document]:
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    return [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": STORAGE_CLASS, "annotations": default},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        },
        *(_volume(node, f"local-{number}") for number in range(VOLUME_COUNT)),
    ]


def _volume(node: str, name: str) -> Document:
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": STORAGE_CLASS,
            "capacity": {"storage": f"{VOLUME_GIB}Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(VOLUMES / name)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }


def _dns() -> list[Document]:
    where = {"name": _DNS, "namespace": "kube-system"}
    rules = [
        {
            "apiGroups": [""],
            "resources": ["endpoints", "services", "pods", "namespaces"],
            "verbs": ["list", "watch"],
        },
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        },
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": where},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": f"system:{_DNS}"},
            "rules": rules,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"system:{_DNS}"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": f"system:{_DNS}",
            },
            "subjects": [{"kind": "ServiceAccount", **where}],
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": where,
            "data": {"Corefile": _COREFILE},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system"},
            "spec": {
                "clusterIP": DNS_ADDRESS,
                "selector": _LABELS,
                "ports": [
                    {"name": "dns", "port": 53, "targetPort": 1053, "protocol": "UDP"},
                    {"name": "dns-tcp", "port": 53, "targetPort": 1053, "protocol": "TCP"},
                ],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": where,
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": _LABELS},
                "template": {"metadata": {"labels": _LABELS}, "spec": _dns_pod()},
            },
        },
    ]


def _dns_pod() -> Document:
    return {
        "serviceAccountName": _DNS,
        "dnsPolicy": "Default",
        "priorityClassName": "system-cluster-critical",
        "containers": [
            {
                "name": _DNS,
                "image": DNS_IMAGE,
                "args": ["-conf", "/etc/coredns/Corefile"],
                "readinessProbe": {
                    "httpGet": {"path": "/ready", "port": 8181},
                    "periodSeconds": 1,
                },
                "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
            }
        ],
        "volumes": [{"name": "config", "configMap": {"name": _DNS}}],
    }
