# SPDX-License-Identifier: Apache-2.0
"""Describes a node to autoscalers, and compares their template of a pool with a real node.

Formats are those of cluster-autoscaler 1.36 for AWS (tags of an Auto Scaling group) and for Cluster
API (annotations of a MachineDeployment), of ``karpenter.sh/v1alpha1`` (NodeOverlay) and of
``kubescheduler.config.k8s.io/v1``. Amounts are those of the node's ``status.allocatable``, which
agents with ``advertise_amounts`` keep.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from hami_common.units import parse_quantity
from hami_common.vendors.protocol import ResourceNames
from hami_core.planning.eligible import Document
from hami_core.planning.scaling import OWN_TAINTS
from hamictl.errors import Absent, InputRefused

ASG_PREFIX: Final = "k8s.io/cluster-autoscaler/node-template/"
CAPI_PREFIX: Final = "capacity.cluster-autoscaler.kubernetes.io/"
INSTANCE_TYPE: Final = "node.kubernetes.io/instance-type"
ADVERTISE: Final = "list the component advertise-amounts, see docs/autoscalers.md"
ASG_TAGS_MOST: Final = 50
"""Tags of one Auto Scaling group."""


class PoolNode(Struct, frozen=True, kw_only=True):
    """Facts of a node that a pool's template states."""

    name: str
    capacity: Mapping[str, str]
    """CPU, memory and other resources of Kubernetes itself."""
    counts: Mapping[str, str]
    """Resources of device plugins that are shares: the number of slots."""
    amounts: Mapping[str, str]
    """Totals of memory and compute."""
    missing: tuple[str, ...]
    """Resources that pods may request and that the node does not offer."""
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, str]]

    @property
    def resources(self) -> dict[str, str]:
        """Return all extended resources of ours."""
        return {**self.counts, **self.amounts}


class Difference(Struct, frozen=True, kw_only=True):
    """A resource that a template lacks, or has with another amount."""

    resource: str
    wanted: str
    found: str
    """Empty: the template lacks it."""
    tag: str
    """Tag of an Auto Scaling group that states it."""


def pool_node(document: Document, families: Iterable[ResourceNames]) -> PoolNode:
    """Read a node of the Kubernetes API; ``Absent`` if it has no devices of the families."""
    metadata, status = document["metadata"], document.get("status") or {}
    offered: Mapping[str, str] = status.get("allocatable") or {}
    counts: dict[str, str] = {}
    amounts: dict[str, str] = {}
    missing: list[str] = []
    for names in families:
        if not _amount(offered, names.count):
            continue
        counts[names.count] = str(_amount(offered, names.count))
        for name in (names.memory, names.memory_percentage, names.cores, names.priority):
            if name and _amount(offered, name):
                amounts[name] = str(_amount(offered, name))
            elif name:
                missing.append(name)
    if not counts:
        message = f"node {metadata['name']} offers no shares of devices; name one with an agent"
        raise Absent(message)
    capacity: Mapping[str, str] = status.get("capacity") or {}
    return PoolNode(
        name=metadata["name"],
        capacity={name: capacity[name] for name in ("cpu", "memory") if name in capacity},
        counts=counts,
        amounts=amounts,
        missing=tuple(dict.fromkeys(name for name in missing if name not in amounts)),
        labels=metadata.get("labels") or {},
        taints=[
            taint
            for taint in (document.get("spec") or {}).get("taints") or ()
            if not taint["key"].startswith(OWN_TAINTS)
        ],
    )


def chosen_labels(node: PoolNode, keys: Iterable[str]) -> dict[str, str]:
    """Return the node's labels with these keys."""
    found: dict[str, str] = {}
    for key in keys:
        if key not in node.labels:
            message = f"--label {key}: node {node.name} has no such label"
            raise InputRefused(message)
        found[key] = node.labels[key]
    return found


def asg_tags(node: PoolNode, *, group: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the tags of an Auto Scaling group, as ``create-or-update-tags`` reads them."""
    values = {f"resources/{name}": amount for name, amount in node.resources.items()}
    values |= {f"label/{key}": value for key, value in labels.items()}
    values |= {f"taint/{t['key']}": f"{t.get('value', '')}:{t['effect']}" for t in node.taints}
    if len(values) > ASG_TAGS_MOST:
        message = f"{len(values)} tags, a group has at most {ASG_TAGS_MOST}: name fewer labels"
        raise InputRefused(message)
    return [
        {
            "ResourceId": group,
            "ResourceType": "auto-scaling-group",
            "Key": ASG_PREFIX + key,
            "Value": value,
            "PropagateAtLaunch": False,
        }
        for key, value in values.items()
    ]


def capi_patch(node: PoolNode, *, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return a merge patch with the annotations of a MachineDeployment.

    They state one kind of device with its count, and none of the other resources.
    """
    count, amount = next(iter(node.counts.items()))
    values = {**node.capacity, "gpu-type": count, "gpu-count": amount}
    if labels:
        values["labels"] = ",".join(f"{key}={value}" for key, value in labels.items())
    if node.taints:
        values["taints"] = ",".join(
            f"{t['key']}={t.get('value', '')}:{t['effect']}" for t in node.taints
        )
    return {"metadata": {"annotations": {CAPI_PREFIX + k: v for k, v in values.items()}}}


def node_overlay(node: PoolNode, *, name: str) -> dict[str, Any]:
    """Return the NodeOverlay for the node's instance type."""
    kind = node.labels.get(INSTANCE_TYPE, "")
    if not kind:
        message = f"node {node.name} has no label {INSTANCE_TYPE}; name a node of the cloud"
        raise InputRefused(message)
    selects = {"key": INSTANCE_TYPE, "operator": "In", "values": [kind]}
    return {
        "apiVersion": "karpenter.sh/v1alpha1",
        "kind": "NodeOverlay",
        "metadata": {"name": name},
        "spec": {"requirements": [selects], "capacity": node.resources},
    }


def scheduler_config(node: PoolNode, *, counts_only: bool) -> dict[str, Any]:
    """Return a configuration for cluster-autoscaler's ``--scheduler-config-file``.

    It ignores what the node does not offer and, with ``counts_only``, all but the count resources.
    """
    ignored = sorted({*node.missing, *(node.amounts if counts_only else ())})
    arguments = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "NodeResourcesFitArgs",
        "ignoredResources": ignored,
    }
    profile = {
        "schedulerName": "default-scheduler",
        "pluginConfig": [{"name": "NodeResourcesFit", "args": arguments}],
    }
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "profiles": [profile],
    }


def differences(node: PoolNode, template: Document) -> list[Difference]:
    """Return what a template lacks: a Node, or the tags of an Auto Scaling group.

    Tags are read as ``describe-tags`` prints them, or as ``asg_tags`` does.
    """
    if template.get("kind") == "Node":
        status = template.get("status") or {}
        offered: Mapping[str, Any] = status.get("allocatable") or status.get("capacity") or {}
    elif isinstance(template.get("Tags"), list):
        start = f"{ASG_PREFIX}resources/"
        offered = {
            str(tag.get("Key", "")).removeprefix(start): tag.get("Value", "")
            for tag in template["Tags"]
            if str(tag.get("Key", "")).startswith(start)
        }
    else:
        message = "the template is neither a Node nor has it Tags; write one of them"
        raise InputRefused(message)
    return [
        Difference(
            resource=name,
            wanted=wanted,
            found=str(offered.get(name, "")),
            tag=f"{ASG_PREFIX}resources/{name}={wanted}",
        )
        for name, wanted in node.resources.items()
        if parse_quantity(str(offered.get(name, ""))) != parse_quantity(wanted)
    ]


def _amount(offered: Mapping[str, str], name: str) -> int:
    """Return an amount, which the API server may write as ``320k``."""
    return int(parse_quantity(offered.get(name, "0")) or 0)
