# SPDX-License-Identifier: Apache-2.0
"""Decides which nodes kube-scheduler offers a pod at all, from the documents of pod and nodes.

Covers ``nodeName``, ``nodeSelector``, required node affinity, taints and unschedulable nodes, by
Kubernetes' rules (core/v1). Other pods, topology spread, ports, CPU and memory are not considered.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from hami_common.units import whole

Document = dict[str, Any]
_UNSCHEDULABLE: Final = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
_MOST: Final = (1 << 63) - 1
_READ: Final = ("nodeName", "nodeSelector", "affinity", "tolerations")
"""Fields of a pod's spec that decide."""
_KEEPING_OUT: Final = ("NoSchedule", "NoExecute")


def excluded_nodes(
    pod: Document, nodes: Iterable[Document], known: Iterable[str]
) -> dict[str, str]:
    """Return the constraint that excludes each of the ``known`` nodes that may not take the pod."""
    document_by_name = {str(node["metadata"]["name"]): node for node in nodes}
    found: dict[str, str] = {}
    for name in known:
        node = document_by_name.get(name)
        why = "no such node in the Kubernetes API" if node is None else exclusion(pod, node)
        if why:
            found[name] = why
    return found


def excluded_by_pod(
    pods: Mapping[str, Document], nodes: Iterable[Document], known: Iterable[str]
) -> dict[str, dict[str, str]]:
    """Return ``excluded_nodes`` by uid for pods by uid; pods without such a node are absent."""
    nodes, known = tuple(nodes), tuple(known)
    by_constraint: dict[str, dict[str, str]] = {}
    found: dict[str, dict[str, str]] = {}
    for uid, pod in pods.items():
        spec = pod.get("spec") or {}
        constraint = repr([spec.get(name) for name in _READ])
        if constraint not in by_constraint:
            by_constraint[constraint] = excluded_nodes(pod, nodes, known)
        if by_constraint[constraint]:
            found[uid] = by_constraint[constraint]
    return found


def exclusion(pod: Document, node: Document) -> str:
    """Return the constraint by which kube-scheduler excludes the node; empty: none."""
    spec, name = pod.get("spec") or {}, str(node["metadata"]["name"])
    labels: Mapping[str, str] = node["metadata"].get("labels") or {}
    tolerations = spec.get("tolerations") or []
    node_spec = node.get("spec") or {}
    if spec.get("nodeName") not in (None, "", name):
        return "the pod's nodeName"
    if node_spec.get("unschedulable") and not _tolerates(tolerations, _UNSCHEDULABLE):
        return "cordon of the node (spec.unschedulable)"
    for taint in node_spec.get("taints") or []:
        if taint.get("effect") in _KEEPING_OUT and not _tolerates(tolerations, taint):
            return f"taint {taint.get('key')} without a toleration of the pod"
    wanted: Mapping[str, str] = spec.get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return "the pod's nodeSelector"
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is not None:
        terms = required.get("nodeSelectorTerms") or []
        if not any(_matches(term, labels, name) for term in terms):
            return "the pod's required node affinity"
    return ""


def _tolerates(tolerations: Iterable[Document], taint: Mapping[str, Any]) -> bool:
    return any(_covers(one, taint) for one in tolerations)


def _covers(toleration: Document, taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key") or ""
    if key and key != taint.get("key"):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(key) and (toleration.get("value") or "") == (taint.get("value") or "")


def _matches(term: Document, labels: Mapping[str, str], name: str) -> bool:
    """Return whether a term matches; an empty one matches no node."""
    expressions, fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    return bool(expressions or fields) and (
        all(_holds(one, labels) for one in expressions)
        and all(_holds(one, {"metadata.name": name}) for one in fields)
    )


def _number(text: str) -> int | None:
    return whole(text, least=-_MOST - 1, most=_MOST)


def _compared(above: Callable[[int, int], bool]) -> Callable[[str | None, list[str]], bool]:
    def holds(value: str | None, values: list[str]) -> bool:
        mine = _number(value or "")
        limit = _number(values[0]) if len(values) == 1 else None
        return mine is not None and limit is not None and above(mine, limit)

    return holds


_OPERATORS: Final[dict[str, Callable[[str | None, list[str]], bool]]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
    "Gt": _compared(lambda mine, limit: mine > limit),
    "Lt": _compared(lambda mine, limit: mine < limit),
}


def _holds(expression: Document, values: Mapping[str, str]) -> bool:
    check = _OPERATORS.get(expression.get("operator") or "")
    value = values.get(expression.get("key") or "")
    return check is not None and check(value, expression.get("values") or [])
