# SPDX-License-Identifier: Apache-2.0
"""Demand for devices of pods that do not exist yet: where it fits, and the verdict about it.

The pods come in sets: ``count`` equal pods of one template, of a Workload or a ProvisioningRequest.
Their demand is that of pods that HAMi's webhook has completed, because the request parser applies
the same defaults to a template.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.events.allocation import Account, hold_uid
from hami_common.events.inventory import NodeDevices
from hami_common.model.request import PodRequest
from hami_common.pods.podview import MetadataView, PodStatusView, PodView
from hami_core.ledger.podfacts import PodReader
from hami_core.planning.eligible import exclusion
from hami_core.planning.gangs import SIZE_MOST, Assignment, Member, place_together
from hami_core.table.table import DeviceTable

State = Literal["Pending", "Ready", "Retry", "Rejected"]
"""``Pending``: not decided; ``Ready``: the devices are held; ``Retry``: no placement at this time;
``Rejected``: none at any time.
"""
_BEST_EFFORT = PodStatusView(qos_class="BestEffort")
Document = dict[str, Any]


class PodSet(Struct, frozen=True, kw_only=True):
    """Equal pods that may come."""

    name: str
    domain: str = ""
    """Values of the labels of the nodes that its queue chose for these pods; empty: any nodes."""
    count: int
    pod: Document
    """The template with all that decides about nodes."""


class Demand(Struct, frozen=True, kw_only=True):
    """Pods of one pod set that request devices."""

    pod_set: str
    domain: str = ""
    index: int
    count: int
    request: PodRequest
    account: Account | None
    pod: Document
    """The template, for the rules of nodes."""

    @property
    def label(self) -> str:
        """Return the name of the pod set and its domain; unique within an object."""
        return f"{self.pod_set} in {self.domain}" if self.domain else self.pod_set

    def members(self, owner_uid: str, nodes: frozenset[str]) -> Iterable[Member]:
        """Yield the pods to be placed on ``nodes``, under the uids of their holds."""
        for number in range(self.count):
            uid = hold_uid(owner_uid, self.index, number)
            yield Member(request=replace(self.request, uid=uid), nodes=nodes)


class Verdict(Struct, frozen=True, kw_only=True):
    """Answer to the demand of one object."""

    state: State
    message: str


def demands_of(
    metadata: MetadataView, pod_sets: Iterable[PodSet], *, reader: PodReader
) -> list[Demand]:
    """Return the demand of the pod sets that request devices; ``metadata``: of their object.

    ``RequestInvalid`` names the pod set and the field.
    """
    found: list[Demand] = []
    for index, pod_set in enumerate(pod_sets):
        view = msgspec.convert(pod_set.pod, PodView)
        try:
            request = reader.template_request(view)
        except RequestInvalid as error:
            raise RequestInvalid(
                field=f"pod set {pod_set.name}: {error.field}",
                problem=error.problem,
                fix=error.fix,
            ) from error
        if request is None or not pod_set.count:
            continue
        request = replace(request, namespace=metadata.namespace, name=metadata.name)
        found.append(
            Demand(
                pod_set=pod_set.name,
                domain=pod_set.domain,
                index=index,
                count=pod_set.count,
                request=request,
                account=reader.account_of(_with_class(view)),
                pod=pod_set.pod,
            )
        )
    total = sum(demand.count for demand in found)
    if total > SIZE_MOST:
        raise RequestInvalid(
            field="spec.podSets",
            problem=f"{total} pods request devices",
            fix=f"write objects of at most {SIZE_MOST} such pods",
        )
    return found


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
    owner_uid: str,
    demands: Sequence[Demand],
    nodes: Mapping[str, frozenset[str]],
) -> Generator[None, None, Assignment | None]:
    """Return the node and devices of each pod by the uid of its hold; see ``place_together``.

    ``nodes``: candidates by ``Demand.label``.
    """
    members = [
        member for demand in demands for member in demand.members(owner_uid, nodes[demand.label])
    ]
    return place_together(table, members)


def empty_table(devices: Iterable[NodeDevices]) -> DeviceTable:
    """Return a table of all these devices, healthy, in service and unused."""
    table = DeviceTable()
    for some in devices:
        usable = tuple(
            replace(one, healthy=True, cordoned=False, foreign_mib=0, bursts=())
            for one in some.devices
        )
        table.upsert_node(replace(some, devices=usable))
    return table


def never_fits(
    table: DeviceTable, owner_uid: str, demands: Sequence[Demand]
) -> Generator[None, None, str]:
    """Return the pod set that ``table``, of empty devices, cannot hold; empty: none.

    Each pod set is tried alone, with all nodes: for equal pods the search is exact. Without any
    device nothing is certain.
    """
    everywhere = frozenset(table.nodes())
    for demand in demands:
        members = list(demand.members(owner_uid, everywhere))
        found = yield from place_together(table, members)
        if found is None and everywhere:
            return demand.label
    return ""


def count_now(
    table: DeviceTable, owner_uid: str, demand: Demand, nodes: frozenset[str]
) -> Generator[None, None, int]:
    """Return how many of the pods of one pod set fit at the same time, by bisection."""
    members = list(demand.members(owner_uid, nodes))
    fits, too_many = 0, len(members) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        found = yield from place_together(table, members[:middle])
        fits, too_many = (fits, middle) if found is None else (middle, too_many)
    return fits


def held(demands: Sequence[Demand]) -> Verdict:
    """Return the answer for pods whose shares are all held."""
    total = sum(demand.count for demand in demands)
    if not total:
        return Verdict(state="Ready", message="no pod set requests devices of HAMi")
    return Verdict(state="Ready", message=f"devices of {total} {_pods(total)} are held")


def refused(
    demands: Sequence[Demand], reasons: Mapping[str, str], fitting: Mapping[str, int]
) -> Verdict:
    """Return the answer for pods that have no placement now.

    ``reasons``: by ``label`` of pod sets of which not even one pod fits. ``fitting``: pods of the
    others that would fit alone.
    """
    total = sum(demand.count for demand in demands)
    texts = [f"pod set {name}: {text}" for name, text in reasons.items()]
    texts += [
        f"pod set {demand.label}: {fitting[demand.label]} of {demand.count} would fit now"
        for demand in demands
        if demand.label not in reasons
    ]
    why = "; ".join(texts)
    return Verdict(state="Retry", message=f"no room for {total} {_pods(total)} at once: {why}")


def impossible(demands: Sequence[Demand], pod_set: str, nodes: int) -> Verdict:
    """Return the answer for pods that would not fit if all devices were unused."""
    count = next(demand.count for demand in demands if demand.label == pod_set)
    return Verdict(
        state="Rejected",
        message=f"pod set {pod_set}: {count} {_pods(count)} would not fit on the devices of all"
        f" {nodes} nodes if nothing else used them; request less or add devices",
    )


def _pods(count: int) -> str:
    return "pod" if count == 1 else "pods"
