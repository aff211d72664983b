# SPDX-License-Identifier: Apache-2.0
"""Answers what-if questions about a snapshot: where pods would be placed, and with how many nodes.

The documents are those of ``POST /v1/whatif/simulate``, ``/scale`` and ``/drain``. Nothing is
reserved. Gangs and preemption are not simulated: each pod is placed alone, in the given order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from hami_common.bounds import Name
from hami_common.errors import RequestInvalid
from hami_common.events.allocation import AllocationRecord, is_of_claim, is_of_owner
from hami_common.events.codec import UNDECODABLE
from hami_common.events.inventory import NodeDevices
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog
from hami_core.planning import manifests
from hami_core.planning.eligible import Document, excluded_by_pod
from hami_core.planning.manifests import Rejected, Requested
from hami_core.planning.scaling import (
    NODES_MOST,
    AddNodes,
    NodeTemplate,
    Pods,
    Unhelped,
    add_nodes,
    least_nodes,
    template_of,
)
from hami_core.planning.whatif import Governed, Outcome, simulate
from hami_core.replay.snapshot import Snapshot, load, load_quotas

PODS_MOST: Final = 5000
"""Pods of one question."""
Manifests = Annotated[tuple[dict[str, Any], ...], Meta(min_length=1, max_length=PODS_MOST)]
FITTING_MOST: Final = 1_000_000
"""Names of fitting nodes in one answer: pods times nodes."""

MIRROR: Final = "kubernetes.io/config.mirror"
"""Annotation of the API object of a static pod."""

Check = Callable[[], None]


class SimulateQuestion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pods to place one after the other, each booked before the next."""

    pods: Manifests | None = None
    """Manifests of kind Pod; null: the pods that wait for a node now."""
    add: AddNodes | None = None
    """Nodes that exist in addition."""
    fitting: bool = True
    """List all nodes that take each pod, not only the chosen one."""
    explain: bool = False
    """Search the closest fit of each refused pod, which takes many times longer."""


class ScaleQuestion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Search for the least number of nodes with which no pod waits for devices."""

    template: NodeTemplate | Name
    """A template, or the name of a present node, whose copies are empty and healthy."""
    pods: Manifests | None = None
    """Manifests of kind Pod; null: the pods that wait for a node now."""
    nodes_most: Annotated[int, Meta(ge=0, le=NODES_MOST)] = 100
    """Largest number to try."""


class DrainQuestion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evict the pods of a node and place them elsewhere, one after the other."""

    node: Name
    explain: bool = True
    """Search the closest fit of each refused pod, which takes many times longer."""


class Staying(Struct, frozen=True, kw_only=True):
    """An owner of devices that a drain does not move."""

    namespace: str
    pod: str
    why: str


class Drained(Struct, frozen=True, kw_only=True):
    """Outcome of draining a node; each pod with devices is in one of the three lists."""

    snapshot_id: str
    """State of the ledger that the answer is computed from."""
    node: str
    placed: int
    refused: int
    pods: tuple[Outcome, ...]
    """Placements elsewhere, in order of priority; the pods without a node would wait."""
    staying: tuple[Staying, ...]
    rejected: tuple[Rejected, ...]
    """Pods that admission would deny if they were created again."""


class Simulated(Struct, frozen=True, kw_only=True):
    """Placements of the pods."""

    snapshot_id: str
    """State of the ledger that the answer is computed from."""
    added: tuple[str, ...]
    """Names of the added nodes."""
    placed: int
    refused: int
    without_devices: int
    """Pods that request no device."""
    pods: tuple[Outcome, ...]
    rejected: tuple[Rejected, ...]


class Scaled(Struct, frozen=True, kw_only=True):
    """The least number of nodes, and the placements with them."""

    snapshot_id: str
    """State of the ledger that the answer is computed from."""
    template: str
    nodes: int | None
    """Least number of added nodes with which no pod waits for devices; null: more than
    ``searched``.
    """
    searched: int
    """Largest number that was tried."""
    placed: int
    refused: int
    without_devices: int
    """Pods that request no device."""
    pods: tuple[Outcome, ...]
    """Placements with ``nodes``, or with ``searched``, added nodes."""
    unhelped: tuple[Unhelped, ...]
    """Pods that no number of these nodes would place."""
    rejected: tuple[Rejected, ...]


class Cluster(Struct, frozen=True, kw_only=True):
    """Objects of the Kubernetes API at the time of a snapshot."""

    nodes: Sequence[Document]
    waiting: Mapping[str, Document] = {}
    """Pods without a node, by uid."""
    draining: Mapping[str, Document] = {}
    """Pods of the node that is drained, by uid."""


def simulated(
    snapshot: Snapshot,
    question: SimulateQuestion,
    cluster: Cluster,
    *,
    catalog: Catalog,
    check: Check,
) -> Simulated:
    """Place the pods; ``check`` is called between pods and may raise to end the work."""
    requested, documents = _asked(question, snapshot, cluster, catalog)
    ledger = load(snapshot)
    present = ledger.table.nodes()
    count = question.add.nodes if question.add else 0
    if question.fitting:
        _require_listable(len(requested.requests), nodes=len(present) + count)
    pods = Pods(
        requests=requested.requests,
        excluded=excluded_by_pod(documents, cluster.nodes, present),
        documents=documents,
    )
    added: list[str] = []
    excluded = pods.excluded
    if question.add is not None:
        template = template_for(question.add.template, snapshot, cluster)
        added, excluded = add_nodes(ledger, template, count, pods)
    outcomes: list[Outcome] = []
    for outcome in simulate(
        ledger,
        requested.requests,
        now_s=snapshot.time_s,
        explain=question.explain,
        fitting=question.fitting,
        governed=Governed(load_quotas(snapshot), requested.askers),
        excluded=excluded,
    ):
        outcomes.append(outcome)
        check()
    placed = sum(1 for one in outcomes if one.node)
    return Simulated(
        snapshot_id=snapshot.snapshot_id,
        added=tuple(added),
        placed=placed,
        refused=len(outcomes) - placed + len(requested.rejected),
        without_devices=requested.without_devices,
        pods=tuple(outcomes),
        rejected=requested.rejected,
    )


def scaled(
    snapshot: Snapshot,
    question: ScaleQuestion,
    cluster: Cluster,
    *,
    catalog: Catalog,
    check: Check,
) -> Scaled:
    """Search for the least number of nodes; ``check`` as in ``simulated``."""
    requested, documents = _asked(question, snapshot, cluster, catalog)
    template = template_for(question.template, snapshot, cluster)
    found = least_nodes(
        lambda: (load(snapshot), Governed(load_quotas(snapshot), requested.askers)),
        Pods(
            requests=requested.requests,
            excluded=excluded_by_pod(documents, cluster.nodes, _nodes_of(snapshot)),
            documents=documents,
        ),
        template,
        most=question.nodes_most,
        now_s=snapshot.time_s,
        check=check,
    )
    placed = sum(1 for one in found.pods if one.node)
    return Scaled(
        snapshot_id=snapshot.snapshot_id,
        template=template.name,
        nodes=found.nodes,
        searched=found.searched,
        placed=placed,
        refused=len(found.pods) - placed + len(requested.rejected),
        without_devices=requested.without_devices,
        pods=found.pods,
        unhelped=found.unhelped,
        rejected=requested.rejected,
    )


def drained(
    snapshot: Snapshot,
    question: DrainQuestion,
    cluster: Cluster,
    *,
    catalog: Catalog,
    check: Check,
) -> Drained:
    """Place the pods of a node on the others; ``check`` as in ``simulated``.

    Disruption budgets are not evaluated: the answer is about capacity, not about when pods may go.
    """
    node = question.node
    if node not in _nodes_of(snapshot):
        raise RequestInvalid(
            field="node",
            problem=f"{node} has reported no device",
            fix="give a node of hamictl get nodes",
        )
    here = [one for one in snapshot.holdings if one.record.node == node]
    why = {one.record.pod_uid: _stays(one.record, cluster.draining) for one in here}
    moving = sorted(
        (cluster.draining[one.record.pod_uid] for one in here if not why[one.record.pod_uid]),
        key=lambda pod: -int((pod.get("spec") or {}).get("priority") or 0),
    )
    documents = {manifests.uid_of(n): _without_node(pod) for n, pod in enumerate(moving)}
    views = [_view(number, document) for number, document in enumerate(documents.values())]
    requested = manifests.read(views, catalog, snapshot.policy)
    rest = replace(
        snapshot,
        holdings=tuple(
            one for one in snapshot.holdings if one.record.node != node or why[one.record.pod_uid]
        ),
    )
    ledger = load(rest)
    excluded = excluded_by_pod(documents, cluster.nodes, ledger.table.nodes())
    outcomes: list[Outcome] = []
    for outcome in simulate(
        ledger,
        requested.requests,
        now_s=snapshot.time_s,
        explain=question.explain,
        governed=Governed(load_quotas(rest), requested.askers),
        excluded={uid: {**excluded.get(uid, {}), node: "the drain"} for uid in documents},
    ):
        outcomes.append(outcome)
        check()
    placed = sum(1 for one in outcomes if one.node)
    return Drained(
        snapshot_id=snapshot.snapshot_id,
        node=node,
        placed=placed,
        refused=len(outcomes) - placed + len(requested.rejected),
        pods=tuple(outcomes),
        staying=tuple(
            Staying(namespace=r.namespace, pod=r.pod, why=why[r.pod_uid])
            for r in (one.record for one in here)
            if why[r.pod_uid]
        ),
        rejected=requested.rejected,
    )


def _stays(record: AllocationRecord, pods: Mapping[str, Document]) -> str:
    """Return why a drain does not move the owner of the shares; empty: it does."""
    if is_of_claim(record):
        return "a ResourceClaim, whose devices kube-scheduler chooses"
    if is_of_owner(record):
        return f"devices held for {record.held_for}"
    pod = pods.get(record.pod_uid)
    if pod is None:
        return "the pod is not on the node"
    metadata = pod["metadata"]
    if any(one.get("kind") == "DaemonSet" for one in metadata.get("ownerReferences") or ()):
        return "belongs to a DaemonSet, which a drain ignores"
    if MIRROR in (metadata.get("annotations") or {}):
        return "a static pod of the kubelet"
    if metadata.get("deletionTimestamp"):
        return "is terminating"
    return ""


def _without_node(pod: Document) -> Document:
    """Return the pod as its controller would create it again."""
    spec = {key: value for key, value in (pod.get("spec") or {}).items() if key != "nodeName"}
    return {**pod, "spec": spec}


def template_for(wanted: NodeTemplate | str, snapshot: Snapshot, cluster: Cluster) -> NodeTemplate:
    """Return the template; for a name, a copy of that node."""
    if isinstance(wanted, NodeTemplate):
        wanted.require_usable()
        return wanted
    document = next((one for one in cluster.nodes if one["metadata"]["name"] == wanted), None)
    return template_of(wanted, inventory_of(snapshot), document)


def _nodes_of(snapshot: Snapshot) -> set[str]:
    return {known.node for known in inventory_of(snapshot)}


def inventory_of(snapshot: Snapshot) -> Sequence[NodeDevices]:
    """Return all canonical devices of a snapshot."""
    exact = snapshot.exact
    return snapshot.devices if exact is None else exact.inventory.devices


def waiting(snapshot: Snapshot) -> Requested:
    """Return the requests of the pods that wait for a node."""
    if len(snapshot.waiting) > PODS_MOST:
        raise RequestInvalid(
            field="pods",
            problem=f"{len(snapshot.waiting)} pods wait, one answer covers {PODS_MOST}",
            fix="send the manifests of the pods that matter",
        )
    return Requested(
        requests=snapshot.waiting,
        askers=snapshot.quotas.askers,
        rejected=(),
        without_devices=0,
    )


def _asked(
    question: SimulateQuestion | ScaleQuestion,
    snapshot: Snapshot,
    cluster: Cluster,
    catalog: Catalog,
) -> tuple[Requested, Mapping[str, Document]]:
    """Return the requests of the question's pods, and the pods by uid of their requests."""
    if question.pods is None:
        return waiting(snapshot), cluster.waiting
    views = [_view(number, document) for number, document in enumerate(question.pods)]
    return manifests.read(views, catalog, snapshot.policy), {
        manifests.uid_of(number): document for number, document in enumerate(question.pods)
    }


def _view(number: int, document: Document) -> PodView:
    if document.get("kind", "Pod") != "Pod":
        raise RequestInvalid(
            field=f"pods[{number}].kind",
            problem=f"is {document['kind']!r}",
            fix="send pods; hamictl simulate expands Deployments and Jobs",
        )
    try:
        return msgspec.convert(document, PodView, strict=False)
    except UNDECODABLE as error:
        raise RequestInvalid(
            field=f"pods[{number}]", problem=str(error), fix="send a pod of core/v1"
        ) from error


def _require_listable(pods: int, *, nodes: int) -> None:
    if pods * nodes > FITTING_MOST:
        raise RequestInvalid(
            field="fitting",
            problem=f"{pods} pods on {nodes} nodes could list more than {FITTING_MOST} names",
            fix=f"send at most {FITTING_MOST // nodes} pods, or set fitting to false",
        )
