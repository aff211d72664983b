# SPDX-License-Identifier: Apache-2.0
"""Filters and scores nodes for a pod, like the in-tree plugins that this system meets.

Filters run in the order of the real default profile and the first that fails rejects the
node: unschedulable, node name, taints, node affinity and selector, host ports, resources. Reason
texts are those of ``pkg/scheduler/framework/plugins`` (Kubernetes 1.37), because they are counted
into the pod's condition. Pure; amounts are Decimals in base units (cores, bytes, pieces).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Final, TypeAlias

import msgspec

from hami_sim.apiserver.errors import Obj
from hami_sim.apiserver.quantity import parse_quantity
from hami_sim.apiserver.selectors import Requirement

Amounts: TypeAlias = dict[str, Decimal]

MAX_NODE_SCORE: Final = 100
_ZERO: Final = Decimal(0)
_NON_ZERO: Final = {"cpu": Decimal("0.1"), "memory": Decimal(200 * 1024 * 1024)}
"""Amounts that scores assume for a container without requests."""
_NOT_READY: Final = "node.kubernetes.io/not-ready"
_UNSCHEDULABLE: Final = "node.kubernetes.io/unschedulable"
_OPERATORS: Final = {
    "In": "in",
    "NotIn": "notin",
    "Exists": "exists",
    "DoesNotExist": "!",
    "Gt": "gt",
    "Lt": "lt",
}


class NodeRefusal(msgspec.Struct, frozen=True):
    """Rejection of a pod by a node; `resolvable` is true if evicting pods could help."""

    reasons: tuple[str, ...]
    resolvable: bool = True


def _sum(into: Amounts, amounts: Mapping[str, object] | None) -> None:
    for name, text in (amounts or {}).items():
        into[name] = into.get(name, _ZERO) + parse_quantity(text).amount


def requests_of(pod: Obj) -> Amounts:
    """Compute what a pod asks of a node: containers and sidecars, or a larger init container."""
    spec = pod["spec"]
    total: Amounts = {}
    for container in spec.get("containers") or ():
        _sum(total, (container.get("resources") or {}).get("requests"))
    sidecars: Amounts = {}
    peak: Amounts = {}
    for container in spec.get("initContainers") or ():
        own: Amounts = {}
        _sum(own, (container.get("resources") or {}).get("requests"))
        if container.get("restartPolicy") == "Always":
            for name, amount in own.items():
                sidecars[name] = sidecars.get(name, _ZERO) + amount
            own = dict(sidecars)
        else:
            for name, amount in sidecars.items():
                own[name] = own.get(name, _ZERO) + amount
        for name, amount in own.items():
            peak[name] = max(peak.get(name, _ZERO), amount)
    for name, amount in sidecars.items():
        total[name] = total.get(name, _ZERO) + amount
    for name, amount in peak.items():
        total[name] = max(total.get(name, _ZERO), amount)
    _sum(total, spec.get("overhead"))
    return total


class NodeState:
    """One node with the pods on it, assumed ones included."""

    def __init__(self, node: Obj) -> None:
        self.used: Amounts = {}
        self.weighed: Amounts = {}
        """Use of cpu and memory as scores count it: a pod without requests weighs something."""
        self.pods: dict[str, Obj] = {}
        self.update(node)

    def update(self, node: Obj) -> None:
        """Take a new version of the node."""
        self.node = node
        status = node.get("status") or {}
        amounts = status.get("allocatable") or status.get("capacity") or {}
        self.allocatable = {name: parse_quantity(text).amount for name, text in amounts.items()}

    @property
    def name(self) -> str:
        """Return the node's name."""
        return str(self.node["metadata"]["name"])

    def add(self, pod: Obj) -> None:
        """Count a pod; counting it again replaces it."""
        self.remove(pod)
        self.pods[pod["metadata"]["uid"]] = pod
        self._count(pod, 1)

    def remove(self, pod: Obj) -> None:
        """Stop counting a pod."""
        before = self.pods.pop(pod["metadata"]["uid"], None)
        if before is not None:
            self._count(before, -1)

    def _count(self, pod: Obj, sign: int) -> None:
        requests = requests_of(pod)
        for name, amount in requests.items():
            self.used[name] = self.used.get(name, _ZERO) + sign * amount
        for name, least in _NON_ZERO.items():
            amount = requests.get(name, _ZERO) or least
            self.weighed[name] = self.weighed.get(name, _ZERO) + sign * amount


# ------------------------------------------------------------------------------------ filters


def refusal(pod: Obj, state: NodeState, ignored: frozenset[str]) -> NodeRefusal | None:
    """Return why a node does not take a pod, or None if it does."""
    return (
        _unschedulable(pod, state)
        or _node_name(pod, state)
        or _taints(pod, state)
        or _affinity(pod, state)
        or _ports(pod, state)
        or _resources(pod, state, ignored)
    )


def tolerates(pod: Obj, taint: Obj) -> bool:
    """Say whether some toleration of the pod covers a taint."""
    return any(covers(toleration, taint) for toleration in pod["spec"].get("tolerations") or ())


def covers(toleration: Obj, taint: Obj) -> bool:
    """Say whether a toleration covers a taint, of a node or of a device."""
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("key") and toleration["key"] != taint.get("key"):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(toleration.get("key")) and (toleration.get("value") or "") == (
        taint.get("value") or ""
    )


def taints_of(node: Obj) -> Iterator[Obj]:
    """Iterate over taints, with the one that a not-ready node gets from its controller."""
    found = (node.get("spec") or {}).get("taints") or []
    yield from found
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = next((c.get("status") for c in conditions if c.get("type") == "Ready"), "True")
    if ready != "True" and all(taint.get("key") != _NOT_READY for taint in found):
        yield {"key": _NOT_READY, "effect": "NoSchedule"}


def _unschedulable(pod: Obj, state: NodeState) -> NodeRefusal | None:
    if not (state.node.get("spec") or {}).get("unschedulable"):
        return None
    if tolerates(pod, {"key": _UNSCHEDULABLE, "effect": "NoSchedule"}):
        return None
    return NodeRefusal(("node(s) were unschedulable",), resolvable=False)


def _node_name(pod: Obj, state: NodeState) -> NodeRefusal | None:
    wanted = pod["spec"].get("nodeName")
    if not wanted or wanted == state.name:
        return None
    return NodeRefusal(("node(s) didn't match the requested node name",), resolvable=False)


def _taints(pod: Obj, state: NodeState) -> NodeRefusal | None:
    for taint in taints_of(state.node):
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not tolerates(pod, taint):
            text = f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value') or ''}}}"
            return NodeRefusal((text,), resolvable=False)
    return None


def _affinity(pod: Obj, state: NodeState) -> NodeRefusal | None:
    spec = pod["spec"]
    labels = state.node["metadata"].get("labels") or {}
    fits = all(labels.get(key) == value for key, value in (spec.get("nodeSelector") or {}).items())
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if fits and required is not None:
        fits = matches_any(required.get("nodeSelectorTerms") or (), state.node)
    if fits:
        return None
    return NodeRefusal(("node(s) didn't match Pod's node affinity/selector",), resolvable=False)


def matches_any(terms: Iterable[Obj], node: Obj) -> bool:
    """Say whether the node matches a term of a node selector."""
    return any(_term_matches(term, node) for term in terms)


def _term_matches(term: Obj, node: Obj) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    labels = node["metadata"].get("labels") or {}
    names = {"metadata.name": node["metadata"]["name"]}
    return all(_holds(item, labels) for item in expressions) and all(
        _holds(item, names) for item in fields
    )


def _holds(expression: Obj, labels: Mapping[str, str]) -> bool:
    operator = _OPERATORS.get(expression.get("operator", ""))
    if operator is None:
        return False
    values = tuple(expression.get("values") or ())
    return Requirement(expression.get("key", ""), operator, values).matches(labels)


def _host_ports(pod: Obj) -> set[tuple[str, int]]:
    return {
        (port.get("protocol") or "TCP", port["hostPort"])
        for container in pod["spec"].get("containers") or ()
        for port in container.get("ports") or ()
        if port.get("hostPort")
    }


def _ports(pod: Obj, state: NodeState) -> NodeRefusal | None:
    wanted = _host_ports(pod)
    if wanted and any(wanted & _host_ports(other) for other in state.pods.values()):
        text = "node(s) didn't have free ports for the requested pod ports"
        return NodeRefusal((text,))
    return None


def _resources(pod: Obj, state: NodeState, ignored: frozenset[str]) -> NodeRefusal | None:
    reasons: list[str] = []
    resolvable = True
    if "pods" in state.allocatable and len(state.pods) + 1 > state.allocatable["pods"]:
        reasons.append("Too many pods")
    for name, amount in sorted(requests_of(pod).items()):
        if name in ignored or not amount:
            continue
        room = state.allocatable.get(name, _ZERO)
        if amount > room - state.used.get(name, _ZERO):
            reasons.append(f"Insufficient {name}")
            resolvable = resolvable and amount <= room
    return NodeRefusal(tuple(reasons), resolvable) if reasons else None


# ------------------------------------------------------------------------------------- scores


def scores(pod: Obj, nodes: Iterable[NodeState]) -> dict[str, int]:
    """Score nodes: least allocated, balanced, preferred affinity (x2), preferred taints (x3)."""
    states = list(nodes)
    preferred = _scaled({state.name: _preference(pod, state) for state in states})
    taints = _scaled({state.name: _soft_taints(pod, state) for state in states}, reverse=True)
    return {
        state.name: _least_allocated(pod, state)
        + _balanced(pod, state)
        + 2 * preferred[state.name]
        + 3 * taints[state.name]
        for state in states
    }


def _fractions(pod: Obj, state: NodeState) -> list[Decimal]:
    found = []
    requests = requests_of(pod)
    for name, least in _NON_ZERO.items():
        room = state.allocatable.get(name, _ZERO)
        if room > 0:
            used = state.weighed.get(name, _ZERO) + (requests.get(name, _ZERO) or least)
            found.append(min(used / room, Decimal(1)))
    return found


def _least_allocated(pod: Obj, state: NodeState) -> int:
    fractions = _fractions(pod, state)
    if not fractions:
        return 0
    return int(sum((1 - f) * MAX_NODE_SCORE for f in fractions) / len(fractions))


def _balanced(pod: Obj, state: NodeState) -> int:
    fractions = _fractions(pod, state)
    if len(fractions) < 2:  # noqa: PLR2004 - cpu and memory
        return MAX_NODE_SCORE
    return int((1 - abs(fractions[0] - fractions[1]) / 2) * MAX_NODE_SCORE)


def _preference(pod: Obj, state: NodeState) -> int:
    preferred = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "preferredDuringSchedulingIgnoredDuringExecution"
    )
    return sum(
        int(item.get("weight", 0))
        for item in preferred or ()
        if _term_matches(item.get("preference") or {}, state.node)
    )


def _soft_taints(pod: Obj, state: NodeState) -> int:
    return sum(
        taint.get("effect") == "PreferNoSchedule" and not tolerates(pod, taint)
        for taint in taints_of(state.node)
    )


def _scaled(raw: Mapping[str, int], *, reverse: bool = False) -> dict[str, int]:
    most = max(raw.values(), default=0)
    if most == 0:
        return dict.fromkeys(raw, MAX_NODE_SCORE if reverse else 0)
    found = {name: value * MAX_NODE_SCORE // most for name, value in raw.items()}
    return {name: MAX_NODE_SCORE - value if reverse else value for name, value in found.items()}


# ------------------------------------------------------------------------------------- report


def explain(refusals: Mapping[str, NodeRefusal], total: int, *, preempts: bool) -> str:
    """Write the sentence that lands in the pod's condition and event."""
    counts: dict[str, int] = {}
    for item in refusals.values():
        for reason in item.reasons:
            counts[reason] = counts.get(reason, 0) + 1
    text = f"0/{total} nodes are available:"
    if counts:
        text += f" {', '.join(sorted(f'{n} {reason}' for reason, n in counts.items()))}."
    if not preempts:
        return f"{text} preemption: not eligible due to preemptionPolicy=Never."
    helpless = sum(not item.resolvable for item in refusals.values())
    outcomes = {
        "Preemption is not helpful for scheduling": helpless,
        "No preemption victims found for incoming pod": len(refusals) - helpless,
    }
    parts = ", ".join(sorted(f"{n} {outcome}" for outcome, n in outcomes.items() if n))
    if not parts:
        return text
    return f"{text} preemption: 0/{total} nodes are available: {parts}."
