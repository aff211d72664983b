# SPDX-License-Identifier: Apache-2.0
"""Decides from labels whether a DaemonSet may run on a node.

Reads ``nodeSelector`` and the required node affinity of a pod template (Kubernetes API v1
``NodeSelectorTerm``). Terms with ``matchFields``, ``Gt`` or ``Lt`` select no node: no manifest of
this project uses them.
"""

from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]


def selects(pod: Document, labels: Mapping[str, str]) -> bool:
    """Return whether the pod specification accepts a node with these labels."""
    if any(labels.get(key) != value for key, value in (pod.get("nodeSelector") or {}).items()):
        return False
    affinity = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(_term_holds(term, labels) for term in required.get("nodeSelectorTerms") or [])


def _term_holds(term: Document, labels: Mapping[str, str]) -> bool:
    expressions = term.get("matchExpressions") or []
    if not expressions or term.get("matchFields"):
        return False
    return all(_holds(expression, labels) for expression in expressions)


def _holds(expression: Document, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    values = expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return False
