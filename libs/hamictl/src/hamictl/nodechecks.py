# SPDX-License-Identifier: Apache-2.0
"""Checks versions, storage and neighbors of a cluster by its objects, for ``hamictl doctor``.

Pure functions over Kubernetes objects: nodes (``status.nodeInfo``), PersistentVolumeClaims,
StorageClasses and DaemonSets. They know no agent; what only a node's files show is checked by its
agent. Labels and images of NVIDIA's GPU operator are those of its documentation.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from hami_common.events.asking import Finding
from hamictl.nodeselection import selects

Document = dict[str, Any]
Version = tuple[int, int]

OLDEST_KERNEL: Final = (3, 10)
OLDEST_KUBERNETES: Final = (1, 30)
"""The first release with ValidatingAdmissionPolicy v1 and matchConditions."""
TESTED_KUBERNETES: Final[tuple[Version, ...]] = ((1, 34), (1, 37))
"""Releases on which the end-to-end tests run (``tests/cluster/releases.py``)."""
CDI_SINCE: Final[Mapping[str, Version]] = {"containerd": (1, 7), "cri-o": (1, 23)}
"""First release of each container runtime that injects devices by CDI name."""
DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
PLUGIN_IMAGES: Final = ("k8s-device-plugin", "gpu-device-plugin")
"""Parts of the image names of device plugins; NVIDIA's, AMD's and Google's among them."""
MIG_MANAGER_IMAGE: Final = "k8s-mig-manager"
DEPLOY_PLUGIN: Final = "nvidia.com/gpu.deploy.device-plugin"
"""Node label by which the GPU operator runs its device plugin on a node, unless it is ``false``."""
DEPLOY_MIG_MANAGER: Final = "nvidia.com/gpu.deploy.mig-manager"
MIG_CONFIG: Final = "nvidia.com/mig.config"
"""Node label with the MIG instances that NVIDIA's MIG manager makes on the node."""
_VERSION = re.compile(r"v?(\d+)\.(\d+)")


def version_of(text: str) -> Version | None:
    """Return major and minor number at the beginning of a version; ``None``: there are none."""
    found = _VERSION.match(text)
    return None if found is None else (int(found[1]), int(found[2]))


def platform(nodes: Sequence[Document], *, injection: str) -> Iterator[Finding]:
    """Check kernel, kubelet and container runtime of nodes with an agent.

    ``injection`` is the agents' setting. Old kubelets and runtimes are named per node.
    """
    faults = [fault for node in nodes for fault in _of_node(node, injection)]
    yield from faults
    yield from _untested(nodes)
    if nodes and not faults:
        yield Finding(
            check="node-versions",
            verdict="PASS",
            text=f"kernel, kubelet and container runtime of {len(nodes)} nodes are recent enough",
        )


def _of_node(node: Document, injection: str) -> Iterator[Finding]:
    name = node["metadata"]["name"]
    info: Mapping[str, str] = (node.get("status") or {}).get("nodeInfo") or {}
    kernel = info.get("kernelVersion", "")
    if (version_of(kernel) or OLDEST_KERNEL) < OLDEST_KERNEL:
        yield Finding(
            check="kernel",
            verdict="FAIL",
            text=f"the kernel is {kernel}, older than {_shown(OLDEST_KERNEL)}",
            fix="upgrade the node's operating system",
            node=name,
        )
    kubelet = info.get("kubeletVersion", "")
    if (version_of(kubelet) or OLDEST_KUBERNETES) < OLDEST_KUBERNETES:
        yield Finding(
            check="kubernetes",
            verdict="FAIL",
            text=f"kubelet is {kubelet}, older than {_shown(OLDEST_KUBERNETES)}",
            fix=f"upgrade the cluster to Kubernetes {_shown(OLDEST_KUBERNETES)} or newer",
            node=name,
        )
    if injection == "cdi":
        yield from _cdi(info.get("containerRuntimeVersion", ""), name)


def _cdi(runtime: str, node: str) -> Iterator[Finding]:
    word, _, text = runtime.partition("://")
    found = version_of(text)
    if not runtime or found is None:
        return
    devices = 'set injection = "devices" in config/nodeagent.toml and policy.injection in'
    devices += " config/webhook.toml"
    oldest = CDI_SINCE.get(word)
    if oldest is None:
        yield Finding(
            check="container-runtime",
            verdict="WARN",
            text=f"{word} {text} is not known to inject devices by CDI name",
            fix=devices,
            node=node,
        )
    elif found < oldest:
        yield Finding(
            check="container-runtime",
            verdict="FAIL",
            text=f"{word} {text} cannot inject devices by CDI name",
            fix=f"upgrade {word} to {_shown(oldest)} or newer, or {devices}",
            node=node,
        )


def _untested(nodes: Sequence[Document]) -> Iterator[Finding]:
    found = {
        version
        for node in nodes
        if (version := version_of(_kubelet(node))) is not None and version >= OLDEST_KUBERNETES
    }
    tested = ", ".join(map(_shown, TESTED_KUBERNETES))
    for version in sorted(found - set(TESTED_KUBERNETES)):
        yield Finding(
            check="kubernetes",
            verdict="WARN",
            text=f"Kubernetes {_shown(version)} is not among the tested releases: {tested}",
            fix="run hamictl verify --all-nodes, and report what fails",
        )
    if found and found <= set(TESTED_KUBERNETES):
        yield Finding(
            check="kubernetes",
            verdict="PASS",
            text=f"Kubernetes {', '.join(map(_shown, sorted(found)))} is a tested release",
        )


def _kubelet(node: Document) -> str:
    info = (node.get("status") or {}).get("nodeInfo") or {}
    return str(info.get("kubeletVersion", ""))


def kube_scheduler(tag: str, server: str) -> Iterator[Finding]:
    """Check that kube-scheduler may be used with the API server, by Kubernetes' skew policy.

    It may be one minor release older than the API server, and never newer. A ``tag`` without a
    version, such as a digest's, is not judged.
    """
    found, known = version_of(tag), version_of(server)
    if found is None or known is None:
        return
    if (known[0], known[1] - 1) <= found <= known:
        yield Finding(
            check="kube-scheduler",
            verdict="PASS",
            text=f"kube-scheduler {_shown(found)} fits API server {_shown(known)}",
        )
        return
    yield Finding(
        check="kube-scheduler",
        verdict="FAIL",
        text=f"the image kube-scheduler is {_shown(found)}, the API server {_shown(known)}",
        fix=f"set newTag of the image kube-scheduler to {server.partition('+')[0]}",
    )


def neighbors(
    name: str, pod: Document, nodes: Sequence[tuple[str, Mapping[str, str]]]
) -> Iterator[Finding]:
    """Check that a DaemonSet leaves the devices of our nodes alone.

    ``name`` and ``pod`` are the DaemonSet's and of its pods; ``nodes``: name and labels of nodes
    with an agent.
    """
    images = [str(one.get("image", "")) for one in pod.get("containers") or []]
    is_plugin = any(word in image for image in images for word in PLUGIN_IMAGES)
    is_mig_manager = any(MIG_MANAGER_IMAGE in image for image in images)
    for node, labels in nodes:
        if not selects(pod, labels):
            continue
        if is_plugin:
            is_operators = DEPLOY_PLUGIN in (pod.get("nodeSelector") or {})
            yield Finding(
                check="second-plugin",
                verdict="FAIL",
                text=f"DaemonSet {name} offers the same devices to kubelet",
                fix=f"kubectl label --overwrite node {node} {DEPLOY_PLUGIN}=false"
                if is_operators
                else "exclude the node by its node selector, or remove it; with the GPU operator"
                f" label the node {DEPLOY_PLUGIN}=false",
                node=node,
            )
        elif is_mig_manager and MIG_CONFIG in labels:
            yield Finding(
                check="second-plugin",
                verdict="FAIL",
                text=f"DaemonSet {name} makes the MIG instances of label"
                f" {MIG_CONFIG}={labels[MIG_CONFIG]} and removes those of the agent",
                fix=f"kubectl label --overwrite node {node} {DEPLOY_MIG_MANAGER}=false"
                f" {MIG_CONFIG}-",
                node=node,
            )


def storage(claims: Sequence[Document], classes: Sequence[Document]) -> Iterator[Finding]:
    """Check that the claims of the services have volumes, or can get one."""
    names = {one["metadata"]["name"] for one in classes}
    has_default = any(
        (one["metadata"].get("annotations") or {}).get(DEFAULT_CLASS) == "true" for one in classes
    )
    pending = [one for one in claims if (one.get("status") or {}).get("phase") != "Bound"]
    for claim in pending:
        name = claim["metadata"]["name"]
        wanted = (claim.get("spec") or {}).get("storageClassName")
        yield _pending(name, wanted, names=names, has_default=has_default)
    if claims and not pending:
        yield Finding(
            check="storage", verdict="PASS", text=f"{len(claims)} volume claims are bound"
        )


def _pending(
    name: str, wanted: str | None, *, names: Collection[str], has_default: bool
) -> Finding:
    fix = "name a class for hami-nats in your overlay (docs/install.md, Storage)"
    if wanted is None and not has_default:
        known = f"; classes: {', '.join(sorted(names))}" if names else "; there is no StorageClass"
        text = f"claim {name} is Pending: the cluster has no default StorageClass{known}"
        return Finding(check="storage", verdict="FAIL", text=text, fix=fix)
    if wanted and wanted not in names:
        text = f"claim {name} is Pending: there is no StorageClass {wanted}"
        return Finding(check="storage", verdict="FAIL", text=text, fix=fix)
    return Finding(
        check="storage",
        verdict="WARN",
        text=f"claim {name} is Pending",
        fix=f"kubectl describe persistentvolumeclaim {name} names the cause",
    )


def _shown(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
