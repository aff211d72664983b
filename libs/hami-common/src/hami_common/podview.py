# SPDX-License-Identifier: Apache-2.0
"""The few fields of a Kubernetes Pod (core/v1) that we read, decoded straight from JSON.

Everything else in the document is skipped.

Field names are the API's own (camelCase renamed to snake_case by msgspec).
"""

from msgspec import Struct, field

from hami_common.model.request import ContainerKind


class ResourcesView(Struct, frozen=True, kw_only=True):
    """``resources`` of a container; quantities as the JSON strings (or numbers) the user wrote."""

    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None


class SecurityContextView(Struct, frozen=True, kw_only=True):
    """``securityContext`` of a container."""

    privileged: bool | None = None


class EnvVarView(Struct, frozen=True, kw_only=True):
    """One environment variable by name; ``value`` is ``None`` for valueFrom."""

    name: str
    value: str | None = None


class VolumeMountView(Struct, frozen=True, kw_only=True, rename="camel"):
    """One volume mount."""

    name: str
    mount_path: str
    read_only: bool | None = None
    sub_path: str | None = None


class ContainerView(Struct, frozen=True, kw_only=True, rename="camel"):
    """One container of any kind."""

    name: str
    resources: ResourcesView | None = None
    restart_policy: str | None = None
    security_context: SecurityContextView | None = None
    env: list[EnvVarView] | None = None
    volume_mounts: list[VolumeMountView] | None = None
    target_container_name: str | None = None

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


class OwnerView(Struct, frozen=True, kw_only=True):
    """One owner reference."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class MetadataView(Struct, frozen=True, kw_only=True, rename="camel"):
    """``metadata``."""

    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[OwnerView] | None = None


class VolumeView(Struct, frozen=True, kw_only=True):
    """One volume, by name."""

    name: str


class SchedulingGateView(Struct, frozen=True, kw_only=True):
    """Something that must be taken away before the pod is scheduled."""

    name: str = ""


class TermView(Struct, frozen=True, kw_only=True):
    """One preferred term; that it is there is all we look at."""


class PreferencesView(Struct, frozen=True, kw_only=True):
    """What one kind of affinity would rather have."""

    preferred: list[TermView] | None = field(
        default=None, name="preferredDuringSchedulingIgnoredDuringExecution"
    )


class AffinityView(Struct, frozen=True, kw_only=True, rename="camel"):
    """``affinity``, as far as it is a wish."""

    node_affinity: PreferencesView | None = None
    pod_affinity: PreferencesView | None = None
    pod_anti_affinity: PreferencesView | None = None


class SpreadView(Struct, frozen=True, kw_only=True, rename="camel"):
    """One of ``topologySpreadConstraints``."""

    when_unsatisfiable: str = ""


class PodSpecView(Struct, frozen=True, kw_only=True, rename="camel"):
    """``spec``."""

    node_name: str = ""
    scheduler_name: str = ""
    runtime_class_name: str | None = None
    priority: int | None = None
    priority_class_name: str | None = None
    active_deadline_seconds: int | None = None
    preemption_policy: str | None = None
    termination_grace_period_seconds: int | None = None
    scheduling_gates: list[SchedulingGateView] | None = None
    affinity: AffinityView | None = None
    topology_spread_constraints: list[SpreadView] | None = None
    host_pid: bool = field(default=False, name="hostPID")
    containers: list[ContainerView] = []
    init_containers: list[ContainerView] | None = None
    ephemeral_containers: list[ContainerView] | None = None
    volumes: list[VolumeView] | None = None


class ContainerStateView(Struct, frozen=True, kw_only=True):
    """Which of the three states a container is in."""

    waiting: dict[str, object] | None = None
    running: dict[str, object] | None = None
    terminated: dict[str, object] | None = None


class ContainerStatusView(Struct, frozen=True, kw_only=True, rename="camel"):
    """Status of one container."""

    name: str
    started: bool | None = None
    ready: bool = False
    restart_count: int = 0
    container_id: str = field(default="", name="containerID")
    """``<runtime>://<id>``; empty before the first start."""
    state: ContainerStateView | None = None


class ConditionView(Struct, frozen=True, kw_only=True):
    """One condition."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class PodStatusView(Struct, frozen=True, kw_only=True, rename="camel"):
    """``status``."""

    phase: str = ""
    reason: str = ""
    message: str = ""
    qos_class: str = field(default="", name="qosClass")
    nominated_node_name: str = ""
    start_time: str | None = None
    conditions: list[ConditionView] | None = None
    container_statuses: list[ContainerStatusView] | None = None
    init_container_statuses: list[ContainerStatusView] | None = None
    ephemeral_container_statuses: list[ContainerStatusView] | None = None


class PodView(Struct, frozen=True, kw_only=True):
    """A pod as far as we look at it."""

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

    def is_finished(self) -> bool:
        """Whether no container of the pod will run again."""
        return self.status.phase in ("Succeeded", "Failed")


class ListMetadataView(Struct, frozen=True, kw_only=True, rename="camel"):
    """``metadata`` of a list."""

    resource_version: str = ""


class PodListView(Struct, frozen=True, kw_only=True):
    """A page of pods."""

    metadata: ListMetadataView = ListMetadataView()
    items: list[PodView] = []
