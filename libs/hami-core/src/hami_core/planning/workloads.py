# SPDX-License-Identifier: Apache-2.0
"""Workloads of Kueue: reads them, computes their demand for devices, and judges it.

Outside documents: Kueue's API ``kueue.x-k8s.io`` v1beta1 and v1beta2 (v0.15), of which only fields
with the same meaning in both are read. A Workload has pod sets: ``count`` equal pods each. Its
demand is that of pods that HAMi's webhook has completed, because the request parser applies the
same defaults to a template. Seconds throughout.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from hami_common.bounds import OBJECT_LIST_MOST, Count, Name, ObjectText, Word
from hami_common.errors import RequestInvalid
from hami_common.events.allocation import Account, hold_uid
from hami_common.events.inventory import NodeDevices
from hami_common.model.request import PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import MetadataView, PodStatusView, PodView
from hami_core.ledger.podfacts import PodReader
from hami_core.planning.eligible import exclusion
from hami_core.planning.gangs import SIZE_MOST, Assignment, Member, place_together
from hami_core.table.table import DeviceTable

CONTROLLER: Final = "hami.io/placement"
"""``spec.controllerName`` of the AdmissionChecks that are ours."""
CheckState = Literal["Pending", "Ready", "Retry", "Rejected"]
_BEST_EFFORT: Final = PodStatusView(qos_class="BestEffort")
Document = dict[str, Any]


class Condition(Struct, frozen=True, kw_only=True):
    """One condition."""

    type: Word
    status: Word = ""
    message: ObjectText = ""


class Check(Struct, frozen=True, kw_only=True, rename="camel"):
    """State of one AdmissionCheck of a Workload."""

    name: Name
    state: Word = "Pending"
    message: ObjectText = ""


class PodSet(Struct, frozen=True, kw_only=True):
    """Equal pods of a Workload."""

    name: Name = "main"
    count: Count = 1
    template: msgspec.Raw = msgspec.Raw(b"{}")


class Assigned(Struct, frozen=True, kw_only=True):
    """Quota that Kueue reserved for a pod set."""

    name: Name = "main"
    flavors: Annotated[dict[str, Name], Meta(max_length=OBJECT_LIST_MOST)] | None = None
    """Name of the ResourceFlavor by resource."""
    count: Count | None = None
    """Pods, fewer than the pod set's in a partial admission."""


class Admission(Struct, frozen=True, kw_only=True, rename="camel"):
    """``status.admission``."""

    pod_set_assignments: list[Assigned] = []


class WorkloadSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    """``spec``."""

    active: bool | None = None
    pod_sets: list[PodSet] = []


class WorkloadStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    """``status``."""

    conditions: list[Condition] = []
    admission: Admission | None = None
    admission_checks: list[Check] = []


class Workload(Struct, frozen=True, kw_only=True):
    """The fields of a Workload that we read."""

    metadata: MetadataView = MetadataView()
    spec: WorkloadSpec = WorkloadSpec()
    status: WorkloadStatus = WorkloadStatus()

    def has(self, condition: str) -> bool:
        """Return whether the condition is True."""
        found = (one for one in self.status.conditions if one.type == condition)
        return any(one.status == "True" for one in found)

    def is_reserved(self) -> bool:
        """Return whether Kueue has reserved quota and may start the Workload."""
        return (
            self.has("QuotaReserved")
            and not self.has("Evicted")
            and not self.has("Finished")
            and self.spec.active is not False
            and self.metadata.deletion_timestamp is None
        )

    def checks(self, names: Iterable[str]) -> list[Check]:
        """Return the states of the AdmissionChecks called ``names``."""
        ours = frozenset(names)
        return [check for check in self.status.admission_checks if check.name in ours]


class FlavorSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    """``spec`` of a ResourceFlavor."""

    node_labels: dict[str, str] | None = None
    tolerations: list[Document] | None = None


class Flavor(Struct, frozen=True, kw_only=True):
    """The fields of a ResourceFlavor that we read."""

    metadata: MetadataView = MetadataView()
    spec: FlavorSpec = FlavorSpec()


class Demand(Struct, frozen=True, kw_only=True):
    """Pods of one pod set that request devices."""

    pod_set: Name
    index: int
    count: int
    request: PodRequest
    account: Account | None
    pod: Document
    """The template with what Kueue adds for the flavor; for the rules of nodes."""

    def members(self, workload_uid: str, nodes: frozenset[str]) -> Iterable[Member]:
        """Yield the pods to be placed on ``nodes``, under the uids of their holds."""
        for number in range(self.count):
            uid = hold_uid(workload_uid, self.index, number)
            yield Member(request=replace(self.request, uid=uid), nodes=nodes)


class Verdict(Struct, frozen=True, kw_only=True):
    """Answer to the AdmissionCheck of one Workload."""

    state: CheckState
    message: str


def demands_of(
    workload: Workload, *, reader: PodReader, flavors: Mapping[str, Flavor]
) -> list[Demand]:
    """Return the pod sets that request devices.

    ``RequestInvalid`` names the pod set and the field.
    """
    admission = workload.status.admission or Admission()
    assigned = {one.name: one for one in admission.pod_set_assignments}
    found: list[Demand] = []
    for index, pod_set in enumerate(workload.spec.pod_sets):
        mine = assigned.get(pod_set.name, Assigned())
        pod = _with_flavors(msgspec.json.decode(pod_set.template), mine, flavors)
        view = msgspec.convert(pod, PodView)
        try:
            request = reader.template_request(view)
        except RequestInvalid as error:
            raise RequestInvalid(
                field=f"pod set {pod_set.name}: {error.field}",
                problem=error.problem,
                fix=error.fix,
            ) from error
        count = pod_set.count if mine.count is None else mine.count
        if request is None or not count:
            continue
        metadata = workload.metadata
        request = replace(request, namespace=metadata.namespace, name=metadata.name)
        found.append(
            Demand(
                pod_set=pod_set.name,
                index=index,
                count=count,
                request=request,
                account=reader.account_of(_with_class(view)),
                pod=pod,
            )
        )
    total = sum(demand.count for demand in found)
    if total > SIZE_MOST:
        raise RequestInvalid(
            field="spec.podSets",
            problem=f"{total} pods request devices",
            fix=f"write Workloads of at most {SIZE_MOST} such pods",
        )
    return found


def _with_flavors(
    template: Document, assigned: Assigned, flavors: Mapping[str, Flavor]
) -> Document:
    """Return the template with the node labels and tolerations that Kueue adds for the flavors."""
    spec = dict(template.get("spec") or {})
    selector = dict(spec.get("nodeSelector") or {})
    tolerations = list(spec.get("tolerations") or [])
    for name in sorted(set((assigned.flavors or {}).values())):
        flavor = flavors.get(name, Flavor()).spec
        selector |= flavor.node_labels or {}
        tolerations += flavor.tolerations or []
    spec |= {"nodeSelector": selector, "tolerations": tolerations}
    return {"metadata": template.get("metadata") or {}, "spec": spec}


def _with_class(view: PodView) -> PodView:
    """Return the template with the class that Kubernetes gives pods without CPU and memory."""
    named = {
        name
        for _, container in view.containers_in_order()
        for name in (*container.limits(), *container.requests())
    }
    return view if named & {"cpu", "memory"} else replace(view, status=_BEST_EFFORT)


def nodes_for(demand: Demand, table: DeviceTable, nodes: Mapping[str, Document]) -> frozenset[str]:
    """Return the nodes with devices on which kube-scheduler may place the pods.

    ``nodes``: documents by name. CPU, memory and other pods are not considered.
    """
    return frozenset(
        name for name, node in nodes.items() if name in table and not exclusion(demand.pod, node)
    )


def place(
    table: DeviceTable,
    workload_uid: str,
    demands: Sequence[Demand],
    nodes: Mapping[str, frozenset[str]],
) -> Generator[None, None, Assignment | None]:
    """Return the node and devices of each pod by the uid of its hold; see ``place_together``.

    ``nodes``: candidates by pod set.
    """
    members = [
        member
        for demand in demands
        for member in demand.members(workload_uid, nodes[demand.pod_set])
    ]
    return place_together(table, members)


def empty_table(devices: Iterable[NodeDevices]) -> DeviceTable:
    """Return a table of all these devices, healthy, in service and unused."""
    table = DeviceTable()
    for some in devices:
        usable = tuple(replace(one, healthy=True, cordoned=False) for one in some.devices)
        table.upsert_node(replace(some, devices=usable))
    return table


def never_fits(
    table: DeviceTable, workload_uid: str, demands: Sequence[Demand]
) -> Generator[None, None, str]:
    """Return the pod set that ``table``, of empty devices, cannot hold; empty: none.

    Each pod set is tried alone, with all nodes: for equal pods the search is exact. Without any
    device nothing is certain.
    """
    everywhere = frozenset(table.nodes())
    for demand in demands:
        members = list(demand.members(workload_uid, everywhere))
        found = yield from place_together(table, members)
        if found is None and everywhere:
            return demand.pod_set
    return ""


def count_now(
    table: DeviceTable, workload_uid: str, demand: Demand, nodes: frozenset[str]
) -> Generator[None, None, int]:
    """Return how many of the pods of one pod set fit at the same time, by bisection."""
    members = list(demand.members(workload_uid, nodes))
    fits, too_many = 0, len(members) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        found = yield from place_together(table, members[:middle])
        fits, too_many = (fits, middle) if found is None else (middle, too_many)
    return fits


def held(demands: Sequence[Demand]) -> Verdict:
    """Return the answer for a Workload whose shares are all held."""
    total = sum(demand.count for demand in demands)
    if not total:
        return Verdict(state="Ready", message="no pod set requests devices of HAMi")
    return Verdict(state="Ready", message=f"devices of {total} {_pods(total)} are held")


def refused(
    demands: Sequence[Demand], reasons: Mapping[str, str], fitting: Mapping[str, int]
) -> Verdict:
    """Return the answer for a Workload that has no placement now.

    ``reasons``: by pod set of which not even one pod fits. ``fitting``: pods of each pod set that
    would fit without the others.
    """
    total = sum(demand.count for demand in demands)
    texts = [f"pod set {name}: {text}" for name, text in reasons.items()]
    texts += [
        f"pod set {demand.pod_set}: {fitting[demand.pod_set]} of {demand.count} would fit now"
        for demand in demands
        if demand.pod_set not in reasons
    ]
    why = "; ".join(texts)
    return Verdict(state="Retry", message=f"no room for {total} {_pods(total)} at once: {why}")


def impossible(demands: Sequence[Demand], pod_set: str, nodes: int) -> Verdict:
    """Return the answer for a Workload that would not fit if all devices were unused."""
    count = next(demand.count for demand in demands if demand.pod_set == pod_set)
    return Verdict(
        state="Rejected",
        message=f"pod set {pod_set}: {count} {_pods(count)} would not fit on the devices of all"
        f" {nodes} nodes if nothing else used them; request less or add devices",
    )


def _pods(count: int) -> str:
    return "pod" if count == 1 else "pods"


def pod_set_updates(demands: Sequence[Demand], workload_uid: str) -> list[Document]:
    """Return what Kueue adds to the pods, so that they find the shares held for them."""
    annotations = {keys.HOLD: workload_uid}
    return [{"name": demand.pod_set, "annotations": annotations} for demand in demands]


class Readiness:
    """Decides whether AdmissionChecks are Active: at once when ready, inactive only after a time.

    An inactive check stops its ClusterQueues, so short interruptions leave it active.
    """

    def __init__(self, *, patience_s: float) -> None:
        """Report unready after ``patience_s`` without interruption."""
        self._patience_s = patience_s
        self._is_active: bool | None = None
        self._unready_since_s: float | None = None

    def judge(self, *, is_ready: bool, now_s: float) -> bool | None:
        """Return whether the checks are active; ``None`` before the first certain answer."""
        if is_ready:
            self._unready_since_s = None
            self._is_active = True
        elif self._unready_since_s is None:
            self._unready_since_s = now_s
        elif now_s - self._unready_since_s >= self._patience_s:
            self._is_active = False
        return self._is_active
