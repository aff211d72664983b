# SPDX-License-Identifier: Apache-2.0
"""The table of resource types that the simulated API server serves.

One row makes a resource: discovery, storage, verbs, selectors and subresources follow from it.
Behaviour beyond storing (defaults, validation, special subresources) is looked up elsewhere by the
row's `key`. Shapes follow discovery of Kubernetes 1.34.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

READ: Final = ("get", "list", "watch")
ALL: Final = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
REVIEW: Final = ("create",)
STATUS_VERBS: Final = ("get", "patch", "update")


class Subresource(msgspec.Struct, frozen=True, kw_only=True):
    """A path below an object, e.g. `pods/binding`; `kind` is what its body holds."""

    name: str
    kind: str
    group: str = ""
    version: str = "v1"
    verbs: tuple[str, ...] = STATUS_VERBS


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    group: str = ""
    version: str = "v1"
    kind: str
    plural: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ALL
    subresources: tuple[Subresource, ...] = ()
    selectable_fields: tuple[str, ...] = ()
    """Field selector paths besides metadata.name and metadata.namespace."""
    index_field: str = ""
    """A selectable field by which watches are indexed, so that a change wakes few of them."""
    tracks_generation: bool = False
    """True if metadata.generation counts changes outside metadata and status."""
    creates_on_update: bool = False
    """True if PUT to an absent name creates the object."""
    unconditional_update: bool = True
    """True if PUT without resourceVersion is accepted."""
    stored_as: str = ""
    """Key of the row that stores these objects, when this row is another view of them."""
    renames: Mapping[str, str] = {}
    """For a view: stored field → field shown here."""

    @property
    def key(self) -> str:
        """Name the resource as `plural` or `plural.group`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def storage_key(self) -> str:
        """Name the table that holds the objects."""
        return self.stored_as or self.key

    @property
    def api_version(self) -> str:
        """Name group and version as objects do."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def singular(self) -> str:
        """Name one object, as discovery does."""
        return self.kind.lower()

    def subresource(self, name: str) -> Subresource | None:
        """Find a subresource by name."""
        return next((sub for sub in self.subresources if sub.name == name), None)

    @property
    def all_selectable_fields(self) -> frozenset[str]:
        """List every field path usable in a field selector."""
        common = {"metadata.name"} | ({"metadata.namespace"} if self.namespaced else set())
        return frozenset(common | set(self.selectable_fields))


def _status(kind: str, group: str = "", version: str = "v1") -> Subresource:
    return Subresource(name="status", kind=kind, group=group, version=version)


_EVENT_VIEW: Final = {
    "involvedObject": "regarding",
    "message": "note",
    "reportingComponent": "reportingController",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
}
_INVOLVED: Final = (
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "involvedObject.resourceVersion",
    "involvedObject.fieldPath",
    "reason",
    "reportingComponent",
    "source",
    "type",
)

RESOURCES: Final = (
    Resource(
        kind="Pod",
        plural="pods",
        short_names=("po",),
        categories=("all",),
        tracks_generation=True,
        selectable_fields=(
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork",
            "status.phase",
            "status.podIP",
            "status.nominatedNodeName",
        ),
        index_field="spec.nodeName",
        subresources=(
            _status("Pod"),
            Subresource(name="binding", kind="Binding", verbs=REVIEW),
            Subresource(name="eviction", kind="Eviction", group="policy", verbs=REVIEW),
            Subresource(name="ephemeralcontainers", kind="Pod"),
            Subresource(name="resize", kind="Pod"),
        ),
    ),
    Resource(kind="Binding", plural="bindings", verbs=REVIEW),
    Resource(
        kind="Node",
        plural="nodes",
        namespaced=False,
        short_names=("no",),
        selectable_fields=("spec.unschedulable",),
        index_field="metadata.name",
        subresources=(_status("Node"),),
    ),
    Resource(
        kind="Namespace",
        plural="namespaces",
        namespaced=False,
        short_names=("ns",),
        verbs=tuple(verb for verb in ALL if verb != "deletecollection"),
        selectable_fields=("status.phase",),
        subresources=(
            _status("Namespace"),
            Subresource(name="finalize", kind="Namespace", verbs=("update",)),
        ),
    ),
    Resource(
        kind="ConfigMap", plural="configmaps", short_names=("cm",), index_field="metadata.name"
    ),
    Resource(
        kind="Secret",
        plural="secrets",
        selectable_fields=("type",),
        index_field="metadata.name",
    ),
    Resource(
        kind="ServiceAccount",
        plural="serviceaccounts",
        short_names=("sa",),
        subresources=(
            Subresource(
                name="token", kind="TokenRequest", group="authentication.k8s.io", verbs=REVIEW
            ),
        ),
    ),
    Resource(
        kind="Service",
        plural="services",
        short_names=("svc",),
        categories=("all",),
        creates_on_update=True,
        subresources=(_status("Service"),),
    ),
    Resource(kind="Endpoints", plural="endpoints", short_names=("ep",), creates_on_update=True),
    Resource(
        kind="Event",
        plural="events",
        short_names=("ev",),
        creates_on_update=True,
        selectable_fields=_INVOLVED,
    ),
    Resource(
        kind="ResourceQuota",
        plural="resourcequotas",
        short_names=("quota",),
        subresources=(_status("ResourceQuota"),),
    ),
    Resource(
        kind="LimitRange",
        plural="limitranges",
        short_names=("limits",),
    ),
    Resource(
        kind="PersistentVolumeClaim",
        plural="persistentvolumeclaims",
        short_names=("pvc",),
        subresources=(_status("PersistentVolumeClaim"),),
    ),
    Resource(
        group="storage.k8s.io",
        kind="StorageClass",
        plural="storageclasses",
        namespaced=False,
        short_names=("sc",),
    ),
    Resource(
        group="coordination.k8s.io",
        kind="Lease",
        plural="leases",
        creates_on_update=True,
        unconditional_update=False,
        index_field="metadata.name",
    ),
    Resource(
        group="events.k8s.io",
        kind="Event",
        plural="events",
        short_names=("ev",),
        creates_on_update=True,
        stored_as="events",
        renames=_EVENT_VIEW,
        selectable_fields=(
            *(path.replace("involvedObject", "regarding") for path in _INVOLVED[:7]),
            "reason",
            "reportingController",
            "type",
        ),
    ),
    Resource(
        group="policy",
        kind="PodDisruptionBudget",
        plural="poddisruptionbudgets",
        short_names=("pdb",),
        tracks_generation=True,
        unconditional_update=False,
        subresources=(_status("PodDisruptionBudget", "policy"),),
    ),
    Resource(
        group="scheduling.k8s.io",
        kind="PriorityClass",
        plural="priorityclasses",
        namespaced=False,
        short_names=("pc",),
        tracks_generation=True,
    ),
    Resource(
        group="node.k8s.io",
        kind="RuntimeClass",
        plural="runtimeclasses",
        namespaced=False,
        unconditional_update=False,
        index_field="metadata.name",
    ),
    Resource(
        group="resource.k8s.io",
        kind="ResourceSlice",
        plural="resourceslices",
        namespaced=False,
        tracks_generation=True,
        selectable_fields=("spec.nodeName", "spec.driver", "spec.pool.name"),
    ),
    Resource(
        group="resource.k8s.io",
        kind="ResourceClaim",
        plural="resourceclaims",
        subresources=(_status("ResourceClaim", "resource.k8s.io"),),
    ),
    Resource(
        group="resource.k8s.io", kind="ResourceClaimTemplate", plural="resourceclaimtemplates"
    ),
    Resource(
        group="resource.k8s.io",
        kind="DeviceClass",
        plural="deviceclasses",
        namespaced=False,
        tracks_generation=True,
    ),
    *(
        Resource(
            group="apps",
            kind=kind,
            plural=plural,
            short_names=(short,),
            categories=("all",),
            tracks_generation=True,
            subresources=(_status(kind, "apps"),),
        )
        for kind, plural, short in (
            ("Deployment", "deployments", "deploy"),
            ("DaemonSet", "daemonsets", "ds"),
            ("ReplicaSet", "replicasets", "rs"),
            ("StatefulSet", "statefulsets", "sts"),
        )
    ),
    Resource(
        group="batch",
        kind="Job",
        plural="jobs",
        categories=("all",),
        tracks_generation=True,
        subresources=(_status("Job", "batch"),),
    ),
    *(
        Resource(
            group="rbac.authorization.k8s.io",
            kind=kind,
            plural=plural,
            namespaced=namespaced,
        )
        for kind, plural, namespaced in (
            ("Role", "roles", True),
            ("RoleBinding", "rolebindings", True),
            ("ClusterRole", "clusterroles", False),
            ("ClusterRoleBinding", "clusterrolebindings", False),
        )
    ),
    *(
        Resource(
            group="admissionregistration.k8s.io",
            kind=kind,
            plural=plural,
            namespaced=False,
            categories=("api-extensions",),
            tracks_generation=True,
            unconditional_update=False,
        )
        for kind, plural in (
            ("MutatingWebhookConfiguration", "mutatingwebhookconfigurations"),
            ("ValidatingWebhookConfiguration", "validatingwebhookconfigurations"),
            ("ValidatingAdmissionPolicy", "validatingadmissionpolicies"),
            ("ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings"),
        )
    ),
    Resource(
        group="authentication.k8s.io",
        kind="TokenReview",
        plural="tokenreviews",
        namespaced=False,
        verbs=REVIEW,
    ),
    Resource(
        group="authentication.k8s.io",
        kind="SelfSubjectReview",
        plural="selfsubjectreviews",
        namespaced=False,
        verbs=REVIEW,
    ),
    Resource(
        group="authorization.k8s.io",
        kind="SubjectAccessReview",
        plural="subjectaccessreviews",
        namespaced=False,
        verbs=REVIEW,
    ),
    Resource(
        group="authorization.k8s.io",
        kind="SelfSubjectAccessReview",
        plural="selfsubjectaccessreviews",
        namespaced=False,
        verbs=REVIEW,
    ),
)


class ResourceTable:
    """Look-ups over rows: by path, by storage key, by group."""

    def __init__(self, rows: tuple[Resource, ...] = RESOURCES) -> None:
        """Index the rows."""
        self.rows = rows
        self._by_path = {(row.group, row.version, row.plural): row for row in rows}
        self._by_key = {row.key: row for row in rows}
        self._by_kind = {(row.group, row.version, row.kind): row for row in rows}

    def at_path(self, group: str, version: str, plural: str) -> Resource | None:
        """Find the row served at a path."""
        return self._by_path.get((group, version, plural))

    def by_key(self, key: str) -> Resource:
        """Find a row by `plural` or `plural.group`."""
        return self._by_key[key]

    def by_kind(self, group: str, version: str, kind: str) -> Resource | None:
        """Find the row of a kind."""
        return self._by_kind.get((group, version, kind))

    def groups(self) -> dict[str, list[str]]:
        """List the versions of each named group, in table order."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if row.group and row.version not in found.setdefault(row.group, []):
                found[row.group].append(row.version)
        return found

    def in_group(self, group: str, version: str) -> list[Resource]:
        """List the rows of one group and version."""
        return [row for row in self.rows if (row.group, row.version) == (group, version)]
