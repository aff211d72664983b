# SPDX-License-Identifier: Apache-2.0
"""Workloads of Kueue: reads them and the pods that they start.

Outside documents: Kueue's API ``kueue.x-k8s.io`` v1beta1 and v1beta2 (v0.15), of which only fields
with the same meaning in both are read. Seconds throughout.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from hami_common.bounds import OBJECT_LIST_MOST, Count, Name, ObjectText, Word
from hami_common.pods import annotations as keys
from hami_common.pods.podview import MetadataView
from hami_core.planning import demands
from hami_core.planning.conditions import Condition

CONTROLLER: Final = "hami.io/placement"
"""``spec.controllerName`` of the AdmissionChecks that are ours."""
Document = dict[str, Any]


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


class Individual(Struct, frozen=True, kw_only=True):
    """Values of domains: each root between ``prefix`` and ``suffix``."""

    prefix: Word = ""
    suffix: Word = ""
    roots: list[Word] = []


class Values(Struct, frozen=True, kw_only=True):
    """Values of one level: one for all domains, or one each."""

    universal: Word | None = None
    individual: Individual | None = None

    def of(self, number: int) -> str:
        """Return the value of a domain by its number; ``IndexError`` if there is none."""
        if self.individual is None:
            return self.universal or ""
        return f"{self.individual.prefix}{self.individual.roots[number]}{self.individual.suffix}"


class Counts(Struct, frozen=True, kw_only=True):
    """Pods of domains: equally many, or a number each."""

    universal: Count | None = None
    individual: list[Count] = []

    def of(self, number: int) -> int:
        """Return the pods of a domain by its number; ``IndexError`` if there is none."""
        return self.individual[number] if self.universal is None else self.universal


class Slice(Struct, frozen=True, kw_only=True, rename="camel"):
    """Several domains, as v1beta2 writes them."""

    domain_count: Count = 0
    pod_counts: Counts = Counts()
    values_per_level: list[Values] = []


class Domain(Struct, frozen=True, kw_only=True):
    """One domain, as v1beta1 writes it."""

    values: list[Word] = []
    count: Count = 0


class TopologyAssignment(Struct, frozen=True, kw_only=True):
    """Domains of nodes in which Kueue places the pods of a pod set."""

    levels: list[Word] = []
    """Labels of nodes."""
    slices: list[Slice] | None = None
    domains: list[Domain] | None = None

    def by_domain(self) -> Iterator[tuple[dict[str, str], int]]:
        """Yield the labels of the nodes of each domain, and the number of its pods."""
        for one in self.domains or ():
            yield dict(zip(self.levels, one.values, strict=True)), one.count
        for part in self.slices or ():
            for number in range(part.domain_count):
                values = (level.of(number) for level in part.values_per_level)
                yield dict(zip(self.levels, values, strict=True)), part.pod_counts.of(number)


class Assigned(Struct, frozen=True, kw_only=True, rename="camel"):
    """Quota that Kueue reserved for a pod set."""

    name: Name = "main"
    flavors: Annotated[dict[str, Name], Meta(max_length=OBJECT_LIST_MOST)] | None = None
    """Name of the ResourceFlavor by resource."""
    count: Count | None = None
    """Pods, fewer than the pod set's in a partial admission."""
    topology_assignment: TopologyAssignment | None = None


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


def pod_sets_of(workload: Workload, flavors: Mapping[str, Flavor]) -> list[demands.PodSet]:
    """Return the pods that a Workload starts with the quota that Kueue reserved for it.

    With topology-aware scheduling, the pods of each domain are a set of their own.
    """
    admission = workload.status.admission or Admission()
    assigned = {one.name: one for one in admission.pod_set_assignments}
    found: list[demands.PodSet] = []
    for pod_set in workload.spec.pod_sets:
        mine = assigned.get(pod_set.name, Assigned())
        pod = _with_flavors(msgspec.json.decode(pod_set.template), mine, flavors)
        if mine.topology_assignment is None:
            count = pod_set.count if mine.count is None else mine.count
            found.append(demands.PodSet(name=pod_set.name, count=count, pod=pod))
            continue
        for labels, count in mine.topology_assignment.by_domain():
            spec = pod["spec"]
            selector = spec["nodeSelector"] | labels
            found.append(
                demands.PodSet(
                    name=pod_set.name,
                    domain="/".join(labels.values()),
                    count=count,
                    pod=pod | {"spec": spec | {"nodeSelector": selector}},
                )
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


def pod_set_updates(wanted: Sequence[demands.Demand], workload_uid: str) -> list[Document]:
    """Return what Kueue adds to the pods, so that they find the shares held for them."""
    annotations = {keys.HOLD: workload_uid}
    names = dict.fromkeys(demand.pod_set for demand in wanted)  # one entry for all domains
    return [{"name": name, "annotations": annotations} for name in names]


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
