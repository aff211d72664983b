# SPDX-License-Identifier: Apache-2.0
"""ResourceQuota: what objects use, and refusing what would exceed a quota.

Follows ``pkg/quota/v1/evaluator/core`` and the ResourceQuota admission plugin (Kubernetes 1.34).
Extended resources count only as `requests.<name>`; a `limits.<name>` key is stored but never
enforced, as on the real server. Pods that finished use nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Final, TypeAlias

from hami_sim.apiserver.errors import Obj, clone, forbidden
from hami_sim.apiserver.pods import is_extended_resource
from hami_sim.apiserver.quantity import Quantity, parse_quantity
from hami_sim.apiserver.selectors import selector_from_object

if TYPE_CHECKING:
    from hami_sim.apiserver.store import Store

Amounts: TypeAlias = dict[str, Quantity]

_COMPUTE: Final = ("cpu", "memory", "ephemeral-storage")
_COUNTED: Final = frozenset(
    {"services", "secrets", "configmaps", "persistentvolumeclaims", "resourcequotas"}
)
_ONE: Final = Quantity(Decimal(1))
_ZERO: Final = Quantity(Decimal(0))


def _plus(left: Quantity, right: Quantity) -> Quantity:
    return Quantity(left.amount + right.amount, left.notation if left.amount else right.notation)


def _fold(spec: Obj, kind: str) -> Amounts:
    """Sum containers, and take the largest init container where that is more."""
    total: Amounts = {}
    for container in spec.get("containers") or ():
        for name, text in ((container.get("resources") or {}).get(kind) or {}).items():
            total[name] = _plus(total.get(name, _ZERO), parse_quantity(text))
    for container in spec.get("initContainers") or ():
        for name, text in ((container.get("resources") or {}).get(kind) or {}).items():
            amount = parse_quantity(text)
            if amount.amount > total.get(name, _ZERO).amount:
                total[name] = amount
    return total


def usage(key: str, obj: Obj) -> Amounts:
    """Say what an object uses of every quota name that could count it."""
    plural, _, group = key.partition(".")
    used: Amounts = {f"count/{plural}.{group}" if group else f"count/{plural}": _ONE}
    if key != "pods":
        if key in _COUNTED:
            used[plural] = _ONE
        return used
    if obj.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return {"count/pods": _ONE}
    used["pods"] = _ONE
    requests, limits = _fold(obj["spec"], "requests"), _fold(obj["spec"], "limits")
    for name, amount in requests.items():
        if name in _COMPUTE:
            used[name] = amount
        if name in _COMPUTE or is_extended_resource(name) or name.startswith("hugepages-"):
            used[f"requests.{name}"] = amount
    for name, amount in limits.items():
        if name in _COMPUTE:
            used[f"limits.{name}"] = amount
    return used


def _in_scope(quota: Obj, key: str, obj: Obj) -> bool:
    spec = quota.get("spec") or {}
    scopes = [{"scopeName": name, "operator": "Exists"} for name in spec.get("scopes") or ()]
    scopes += (spec.get("scopeSelector") or {}).get("matchExpressions") or []
    if not scopes:
        return True
    if key != "pods":
        return False
    return all(_scope_matches(scope, obj) for scope in scopes)


def _scope_matches(scope: Obj, pod: Obj) -> bool:
    spec = pod["spec"]
    effort = (pod.get("status") or {}).get("qosClass") == "BestEffort"
    match scope["scopeName"]:
        case "BestEffort":
            return effort
        case "NotBestEffort":
            return not effort
        case "Terminating":
            return spec.get("activeDeadlineSeconds") is not None
        case "NotTerminating":
            return spec.get("activeDeadlineSeconds") is None
        case "PriorityClass":
            labels = {"x": spec["priorityClassName"]} if spec.get("priorityClassName") else {}
            term = {"key": "x", "operator": scope["operator"], "values": scope.get("values")}
            selector = selector_from_object({"matchExpressions": [term]})
            return selector is not None and selector.matches(labels)
        case _:
            return False


def quotas(store: Store, namespace: str) -> Iterator[Obj]:
    """Iterate over the quotas of a namespace, in name order."""
    table = store.tables["resourcequotas"]
    for name in table.names():
        if name[0] == namespace:
            yield table.rows[name].obj


def recompute(store: Store, quota: Obj) -> Obj:
    """Return the quota's status as it should be now."""
    hard = dict((quota.get("spec") or {}).get("hard") or {})
    used: Amounts = {name: _ZERO for name in hard if _trackable(name)}
    namespace = quota["metadata"]["namespace"]
    for key, table in store.tables.items():
        if not any(_counts(name, key) for name in used):
            continue
        for (owner, _), stored in table.rows.items():
            if owner == namespace and _in_scope(quota, key, stored.obj):
                for name, amount in usage(key, stored.obj).items():
                    if name in used:
                        used[name] = _plus(used[name], amount)
    return {"hard": hard, "used": {name: str(amount) for name, amount in used.items()}}


def _trackable(name: str) -> bool:
    """Say whether any evaluator counts this name."""
    if name.startswith("count/"):
        return True
    if "/" in name:
        return name.startswith("requests.") and is_extended_resource(name[len("requests.") :])
    return True


def _counts(name: str, key: str) -> bool:
    plural, _, group = key.partition(".")
    if name.startswith("count/"):
        return name == f"count/{plural}.{group}" if group else name == f"count/{plural}"
    return name == plural if key in _COUNTED else key == "pods" and name not in _COUNTED


def charge(store: Store, key: str, obj: Obj, *, dry_run: bool) -> list[Obj]:
    """Refuse an object that exceeds a quota; else return the quotas with their new status."""
    namespace = obj["metadata"].get("namespace", "")
    if not namespace:
        return []
    updates: list[Obj] = []
    for quota in quotas(store, namespace):
        if not _in_scope(quota, key, obj):
            continue
        update = _charge_one(store, quota, key, obj)
        if update is not None and not dry_run:
            updates.append(update)
    return updates


def _charge_one(store: Store, quota: Obj, key: str, obj: Obj) -> Obj | None:
    status = recompute(store, quota)
    hard, used = status["hard"], status["used"]
    if key == "pods":
        _require_amounts(quota, obj, hard)
    delta = {name: amount for name, amount in usage(key, obj).items() if name in used}
    if not delta:
        return None
    over = [
        name
        for name, amount in delta.items()
        if parse_quantity(used[name]).amount + amount.amount > parse_quantity(hard[name]).amount
    ]
    plural, _, group = key.partition(".")
    if over:

        def shown(amounts: Obj) -> str:
            return ",".join(f"{name}={amounts[name]}" for name in sorted(over))

        why = (
            f"exceeded quota: {quota['metadata']['name']}, requested: "
            f"{shown({name: str(amount) for name, amount in delta.items()})}, "
            f"used: {shown(used)}, limited: {shown(hard)}"
        )
        raise forbidden(plural, obj["metadata"].get("name", ""), why, group=group)
    for name, amount in delta.items():
        used[name] = str(_plus(parse_quantity(used[name]), amount))
    return {**clone(quota), "status": status}


def _require_amounts(quota: Obj, pod: Obj, hard: Obj) -> None:
    """Refuse containers that do not state an amount of cpu or memory that is limited."""
    missing: dict[str, list[str]] = {}
    for name in sorted(hard):
        kind, _, plain = name.rpartition(".")
        plain = plain or name
        if plain not in ("cpu", "memory") or kind not in ("", "requests", "limits"):
            continue
        for container in pod["spec"].get("containers") or ():
            stated = (container.get("resources") or {}).get(kind or "requests") or {}
            if plain not in stated:
                missing.setdefault(name, []).append(container.get("name", ""))
    if missing:
        by_names: dict[str, list[str]] = {}
        for name, containers in missing.items():
            by_names.setdefault(",".join(containers), []).append(name)
        text = "; ".join(
            f"{','.join(names)} for: {containers}" for containers, names in by_names.items()
        )
        why = f"failed quota: {quota['metadata']['name']}: must specify {text}"
        raise forbidden("pods", pod["metadata"].get("name", ""), why)
