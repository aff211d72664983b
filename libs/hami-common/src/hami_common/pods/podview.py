# SPDX-License-Identifier: Apache-2.0
"""The few fields of a Kubernetes Pod (core/v1) that we read, decoded straight from JSON.

Everything else in the document is skipped. Ranges are Kubernetes' own or wider, so that a pod that
the API server accepts decodes; ``vendors.catalog`` validates a pod's requests.

Field names are the API's own (camelCase renamed to snake_case by msgspec).
"""

from typing import Annotated

from msgspec import Meta, Struct, field

from hami_common.bounds import (
    OBJECT_LIST_MOST,
    AnnotationValue,
    Label,
    MapKey,
    Name,
    ObjectText,
    Quantity,
    SignedInt32,
    SignedInt64,
    Uid,
    Word,
)
from hami_common.model.request import ContainerKind

Quantities = Annotated[
    dict[MapKey, Quantity | SignedInt64 | float], Meta(max_length=OBJECT_LIST_MOST)
]


class ClaimUseView(Struct, frozen=True, kw_only=True):
    """One of the pod's claims that a container uses: one request of it, or all without a name."""

    name: ObjectText
    request: ObjectText = ""


class ResourcesView(Struct, frozen=True, kw_only=True):
    """``resources`` of a container; quantities as the JSON strings (or numbers) the user wrote."""

    limits: Quantities | None = None
    requests: Quantities | None = None
    claims: Annotated[list[ClaimUseView], Meta(max_length=OBJECT_LIST_MOST)] | None = None


class SecurityContextView(Struct, frozen=True, kw_only=True):
    """``securityContext`` of a container."""

    privileged: bool | None = None


class ValueFromView(Struct, frozen=True, kw_only=True):
    """``valueFrom`` of a variable; only its presence is read."""


class EnvVarView(Struct, frozen=True, kw_only=True, rename="camel"):
    """One environment variable by name; ``value`` is ``None`` for an empty one and valueFrom."""

    name: ObjectText
    value: ObjectText | None = None
    value_from: ValueFromView | None = None


class VolumeMountView(Struct, frozen=True, kw_only=True, rename="camel"):
    """One volume mount."""

    name: Name
    mount_path: ObjectText
    read_only: bool | None = None
    sub_path: ObjectText | None = None
    sub_path_expr: ObjectText | None = None


class VolumeDeviceView(Struct, frozen=True, kw_only=True, rename="camel"):
    """One block device of a volume inside a container."""

    device_path: ObjectText


class EnvFromView(Struct, frozen=True, kw_only=True):
    """One source of many variables; their names begin with ``prefix``."""

    prefix: ObjectText | None = None


VolumeDevices = Annotated[list[VolumeDeviceView], Meta(max_length=OBJECT_LIST_MOST)]


class ContainerView(Struct, frozen=True, kw_only=True, rename="camel"):
    """One container of any kind."""

    name: Label
    resources: ResourcesView | None = None
    restart_policy: Word | None = None
    security_context: SecurityContextView | None = None
    env: Annotated[list[EnvVarView], Meta(max_length=OBJECT_LIST_MOST)] | None = None
    env_from: Annotated[list[EnvFromView], Meta(max_length=OBJECT_LIST_MOST)] | None = None
    volume_mounts: Annotated[list[VolumeMountView], Meta(max_length=OBJECT_LIST_MOST)] | None = None
    volume_devices: VolumeDevices | None = None
    target_container_name: Label | None = None

    def limits(self) -> dict[str, str]:
        """Limits as text; empty when there are none."""
        return _texts(self.resources.limits if self.resources else None)

    def requests(self) -> dict[str, str]:
        """Requests as text; empty when there are none."""
        return _texts(self.resources.requests if self.resources else None)

    def quantity(self, name: str) -> str | None:
        """One resource as text: its limit, else its request; ``None`` when it has neither."""
        if self.resources is None:
            return None
        for quantities in (self.resources.limits, self.resources.requests):
            if quantities and name in quantities:
                return str(quantities[name])
        return None


def _texts(quantities: dict[str, str | int | float] | None) -> dict[str, str]:
    return {name: str(value) for name, value in (quantities or {}).items()}


Containers = Annotated[list[ContainerView], Meta(max_length=OBJECT_LIST_MOST)]
Labels = Annotated[dict[MapKey, Label], Meta(max_length=OBJECT_LIST_MOST)]
Annotations = Annotated[dict[MapKey, AnnotationValue], Meta(max_length=OBJECT_LIST_MOST)]


class OwnerView(Struct, frozen=True, kw_only=True):
    """One owner reference."""

    kind: ObjectText = ""
    name: ObjectText = ""
    uid: ObjectText = ""
    controller: bool | None = None


class MetadataView(Struct, frozen=True, kw_only=True, rename="camel"):
    """``metadata``."""

    name: Name = ""
    generate_name: Name = ""
    namespace: Label = ""
    uid: Uid = ""
    resource_version: Word = ""
    creation_timestamp: Word | None = None
    deletion_timestamp: Word | None = None
    labels: Labels | None = None
    annotations: Annotations | None = None
    owner_references: Annotated[list[OwnerView], Meta(max_length=OBJECT_LIST_MOST)] | None = None


class FieldRefView(Struct, frozen=True, kw_only=True, rename="camel"):
    """A field of the pod."""

    field_path: ObjectText


class DownwardItemView(Struct, frozen=True, kw_only=True, rename="camel"):
    """One file of a downwardAPI volume; ``field_ref`` is ``None`` for a resource's amount."""

    path: ObjectText
    field_ref: FieldRefView | None = None


class DownwardApiView(Struct, frozen=True, kw_only=True):
    """A downwardAPI volume."""

    items: Annotated[list[DownwardItemView], Meta(max_length=OBJECT_LIST_MOST)] | None = None


class EmptyDirView(Struct, frozen=True, kw_only=True):
    """An emptyDir volume; only its presence is read."""


class VolumeView(Struct, frozen=True, kw_only=True, rename="camel"):
    """One volume: its name, and its source where it is of a kind that we add."""

    name: Name
    downward_api: DownwardApiView | None = field(default=None, name="downwardAPI")
    empty_dir: EmptyDirView | None = None


class SchedulingGateView(Struct, frozen=True, kw_only=True):
    """A gate that must be removed before the pod is scheduled."""

    name: MapKey = ""


class TermView(Struct, frozen=True, kw_only=True):
    """One preferred term; only its presence is read."""


class PreferencesView(Struct, frozen=True, kw_only=True):
    """Preferences of one kind of affinity."""

    preferred: Annotated[list[TermView], Meta(max_length=OBJECT_LIST_MOST)] | None = field(
        default=None, name="preferredDuringSchedulingIgnoredDuringExecution"
    )


class AffinityView(Struct, frozen=True, kw_only=True, rename="camel"):
    """``affinity``, only its preferences."""

    node_affinity: PreferencesView | None = None
    pod_affinity: PreferencesView | None = None
    pod_anti_affinity: PreferencesView | None = None


class SpreadView(Struct, frozen=True, kw_only=True, rename="camel"):
    """One of ``topologySpreadConstraints``."""

    when_unsatisfiable: Word = ""


SchedulingGates = Annotated[list[SchedulingGateView], Meta(max_length=OBJECT_LIST_MOST)]
Spreads = Annotated[list[SpreadView], Meta(max_length=OBJECT_LIST_MOST)]


class PodClaimView(Struct, frozen=True, kw_only=True, rename="camel"):
    """One ResourceClaim of the pod: in the spec by name or template, in the status as generated."""

    name: ObjectText
    resource_claim_name: ObjectText | None = None


PodClaims = Annotated[list[PodClaimView], Meta(max_length=OBJECT_LIST_MOST)]


class PodSpecView(Struct, frozen=True, kw_only=True, rename="camel"):
    """``spec``."""

    node_name: Name = ""
    scheduler_name: ObjectText = ""
    runtime_class_name: Name | None = None
    priority: SignedInt32 | None = None
    priority_class_name: Name | None = None
    active_deadline_seconds: SignedInt64 | None = None
    preemption_policy: Word | None = None
    termination_grace_period_seconds: SignedInt64 | None = None
    scheduling_gates: SchedulingGates | None = None
    affinity: AffinityView | None = None
    topology_spread_constraints: Spreads | None = None
    host_pid: bool = field(default=False, name="hostPID")
    containers: Containers = []
    init_containers: Containers | None = None
    ephemeral_containers: Containers | None = None
    volumes: Annotated[list[VolumeView], Meta(max_length=OBJECT_LIST_MOST)] | None = None
    resource_claims: PodClaims | None = None


class ContainerStateView(Struct, frozen=True, kw_only=True):
    """The three states of a container, one of which is set."""

    waiting: dict[str, object] | None = None
    running: dict[str, object] | None = None
    terminated: dict[str, object] | None = None


class ContainerStatusView(Struct, frozen=True, kw_only=True, rename="camel"):
    """Status of one container."""

    name: ObjectText
    started: bool | None = None
    ready: bool = False
    restart_count: SignedInt32 = 0
    container_id: ObjectText = field(default="", name="containerID")
    """``<runtime>://<id>``; empty before the first start."""
    state: ContainerStateView | None = None


Statuses = Annotated[list[ContainerStatusView], Meta(max_length=OBJECT_LIST_MOST)]


class ConditionView(Struct, frozen=True, kw_only=True):
    """One condition."""

    type: ObjectText
    status: ObjectText
    reason: ObjectText = ""
    message: ObjectText = ""


class PodStatusView(Struct, frozen=True, kw_only=True, rename="camel"):
    """``status``."""

    phase: Word = ""
    reason: ObjectText = ""
    message: ObjectText = ""
    qos_class: Word = field(default="", name="qosClass")
    start_time: Word | None = None
    conditions: Annotated[list[ConditionView], Meta(max_length=OBJECT_LIST_MOST)] | None = None
    container_statuses: Statuses | None = None
    init_container_statuses: Statuses | None = None
    ephemeral_container_statuses: Statuses | None = None
    resource_claim_statuses: PodClaims | None = None


class PodView(Struct, frozen=True, kw_only=True):
    """The fields of a pod that we read."""

    metadata: MetadataView = MetadataView()
    spec: PodSpecView = PodSpecView()
    status: PodStatusView = PodStatusView()

    def annotations(self) -> dict[str, str]:
        """Annotations; empty when there are none."""
        return self.metadata.annotations or {}

    def labels(self) -> dict[str, str]:
        """Labels; empty when there are none."""
        return self.metadata.labels or {}

    def containers_in_order(self) -> list[tuple[ContainerKind, ContainerView]]:
        """Init containers and sidecars in specification order, then application containers.

        Kubelet's admission order.
        """
        ordered: list[tuple[ContainerKind, ContainerView]] = [
            ("sidecar" if container.restart_policy == "Always" else "init", container)
            for container in self.spec.init_containers or []
        ]
        ordered.extend(("app", container) for container in self.spec.containers)
        return ordered

    def claim_names(self) -> dict[str, str]:
        """Names of the ResourceClaims that exist, by the names by which the pod's spec calls them.

        A claim made from a template is named in the status.
        """
        named = [*(self.spec.resource_claims or []), *(self.status.resource_claim_statuses or [])]
        return {one.name: one.resource_claim_name for one in named if one.resource_claim_name}

    def is_finished(self) -> bool:
        """True when no container of the pod will run again."""
        return self.status.phase in ("Succeeded", "Failed")


class ListMetadataView(Struct, frozen=True, kw_only=True, rename="camel"):
    """``metadata`` of a list."""

    resource_version: Word = ""


class PodListView(Struct, frozen=True, kw_only=True):
    """A page of pods."""

    metadata: ListMetadataView = ListMetadataView()
    items: Annotated[list[PodView], Meta(max_length=OBJECT_LIST_MOST)] = []
