# SPDX-License-Identifier: Apache-2.0
"""Decides which running pods can be moved to start another one.

A pod is movable if the snapshot shows its devices and its manifest is known, which states its
request. A pod stays if it is annotated ``hami.io/no-move``, belongs to a gang or a DaemonSet, is
terminating, or is younger than its ``hami.io/min-runtime-s``. Node selectors, affinity and spread
constraints are not evaluated: a pod that has them moves only within its node.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.bounds import RUNTIME_MOST_S
from hami_common.errors import RequestInvalid
from hami_common.events.allocation import is_of_claim
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.units import real
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Ledger
from hami_core.planning.defrag import Tenant
from hami_core.planning.eligible import Document, excluded_by_pod, excluded_nodes
from hami_core.planning.gangs import gang_of
from hami_core.planning.ways import Surroundings
from hami_core.replay.questions import inventory_of
from hami_core.replay.snapshot import Snapshot

_SETTLED: Final = frozenset({"bound", "prepared", "running"})


_TIES: Final = ("nodeSelector", "affinity", "topologySpreadConstraints")


class Running(NamedTuple):
    """A pod as the API server returns it."""

    view: PodView
    is_tied: bool
    """It has a node selector, an affinity or spread constraints."""


def is_tied(document: Document) -> bool:
    """Return whether the pod has a node selector, an affinity or spread constraints."""
    spec = document.get("spec") or {}
    return any(spec.get(name) for name in _TIES)


class Staying(Struct, frozen=True, kw_only=True):
    """A pod that cannot be moved."""

    namespace: str
    pod: str
    node: str
    why: str


def tenants_of(
    snapshot: Snapshot,
    ledger: Ledger,
    running: Iterable[Running],
    excluded: Mapping[str, frozenset[str]] = MappingProxyType({}),
    *,
    catalog: Catalog | None = None,
) -> tuple[tuple[Tenant, ...], tuple[Staying, ...]]:
    """Return the movable pods and the others, by uid.

    ``running``: the pods with known manifests. ``excluded``: by uid, nodes that kube-scheduler
    would not offer a pod. ``catalog``: the vendors of the cluster, by default with their own names
    of resources.
    """
    by_uid = {pod.view.metadata.uid: pod for pod in running}
    catalog = catalog or Catalog.from_settings()
    tenants: list[Tenant] = []
    staying: list[Staying] = []
    for holding in sorted(ledger.holdings(), key=lambda one: one.record.pod_uid):
        record = holding.record
        uid = record.pod_uid
        out = excluded.get(uid, frozenset[str]())
        tenant = _tenant(catalog, snapshot, holding, by_uid.get(uid), out)
        if isinstance(tenant, Tenant):
            tenants.append(tenant)
        else:
            staying.append(
                Staying(namespace=record.namespace, pod=record.pod, node=record.node, why=tenant)
            )
    return tuple(tenants), tuple(staying)


def surroundings(
    snapshot: Snapshot,
    ledger: Ledger,
    pod: Document,
    nodes: Iterable[Document],
    managed: Iterable[Document] | None,
    *,
    catalog: Catalog | None = None,
) -> Surroundings:
    """Return what ways to start ``pod`` can use: its constraints on nodes, and pods that can move.

    ``managed``: all pods with devices, ``None`` if they are not known. ``catalog`` as in
    ``tenants_of``. ``msgspec.ValidationError`` when one of them is no pod.
    """
    nodes, names = list(nodes), ledger.table.nodes()
    around = Surroundings(
        now_s=snapshot.time_s,
        inventory=inventory_of(snapshot),
        excluded=excluded_nodes(pod, nodes, names),
        documents={str(node["metadata"]["name"]): node for node in nodes},
        pod=pod,
    )
    if managed is None:
        return replace(around, unmoved="you may not list the pods of all namespaces")
    by_uid = {str(one["metadata"]["uid"]): one for one in managed}
    anywhere = {uid: _unassigned(one) for uid, one in by_uid.items()}
    excluded = {uid: frozenset(out) for uid, out in excluded_by_pod(anywhere, nodes, names).items()}
    running = (
        Running(msgspec.convert(one, PodView, strict=False), is_tied(one))
        for one in by_uid.values()
    )
    tenants, _ = tenants_of(snapshot, ledger, running, excluded, catalog=catalog)
    return replace(around, tenants=tenants)


def _unassigned(pod: Document) -> Document:
    """Return the pod as its replacement will be, before it is bound."""
    spec = {key: value for key, value in (pod.get("spec") or {}).items() if key != "nodeName"}
    return {**pod, "spec": spec}


def _tenant(
    catalog: Catalog,
    snapshot: Snapshot,
    holding: Holding,
    pod: Running | None,
    excluded: frozenset[str],
) -> Tenant | str:
    """Return the movable pod, or the reason that it stays."""
    record, state = holding.record, holding.state
    if is_of_claim(record):
        return "it is a ResourceClaim, whose devices kube-scheduler chooses"
    if state is None or state.allocation_id != record.allocation_id or state.state not in _SETTLED:
        return "not bound to its node yet"
    if pod is None:
        return "its manifest is not known, see --pods"
    view = pod.view
    if why := _pinned(view, age_s=snapshot.time_s - record.time_s):
        return why
    try:
        request = catalog.parse_pod(view, defaults=snapshot.policy)
    except RequestInvalid as error:
        return f"would be denied at admission: {error}"
    if request is None:
        return "no longer requests a device"
    return Tenant(
        request=request,
        node=record.node,
        containers=record.containers,
        stays_on_node=pod.is_tied,
        excluded=excluded,
    )


def _pinned(view: PodView, *, age_s: float) -> str:
    """Return the reason that the pod must not be moved; empty if there is none."""
    annotations = view.annotations()
    if annotations.get(keys.NO_MOVE, "").strip().lower() == "true":
        return f"annotation {keys.NO_MOVE}"
    if view.metadata.deletion_timestamp is not None or view.is_finished():
        return "is terminating"
    if any(owner.kind == "DaemonSet" for owner in view.metadata.owner_references or ()):
        return "belongs to a DaemonSet"
    if _is_in_gang(view):
        return "is a member of a gang"
    if text := annotations.get(keys.MIN_RUNTIME, "").strip():
        least_s = real(text, least=0.0, most=RUNTIME_MOST_S)
        if least_s is None:
            return f"annotation {keys.MIN_RUNTIME}: {text[:40]!r} is not a number of seconds"
        if not age_s >= least_s:
            return f"runs for {age_s:.0f} s, {keys.MIN_RUNTIME} asks for {least_s:.0f}"
    return ""


def _is_in_gang(view: PodView) -> bool:
    try:
        return gang_of(view) is not None
    except RequestInvalid:
        return True  # an invalid request to be in a gang
