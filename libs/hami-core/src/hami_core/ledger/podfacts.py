# SPDX-License-Identifier: Apache-2.0
"""Reduces a pod document to the facts that binding, releasing and repairing depend on.

A pod's facts are small enough to keep for every managed pod of a cluster. Has no access to the
ledger, reads no clock, and believes an allocation annotation only if its signature holds (design
D4, D6).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from hashlib import blake2b
from typing import Final

from msgspec import Struct

from hami_common.apipath import api_path, is_subdomain
from hami_common.bounds import RUNTIME_MOST_S, UID_MOST
from hami_common.dra.podclaims import (
    ShareRequest,
    as_claimed,
    claim_of,
    is_claimed,
    is_claimed_at_bind,
    requests_of,
    restored,
)
from hami_common.errors import RequestInvalid, WireInvalid
from hami_common.events.allocation import Account, purpose_of
from hami_common.model.request import PlacementPolicy, PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.pods.signing import SignedPlacement, Verifier
from hami_common.skus.expansion import SPOT, terms_of, views_of
from hami_common.units import real
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.admitted import require_admitted
from hami_core.quota.resourcequota import count_resources

GROUP_KEYS: Final = (
    "scheduling.x-k8s.io/pod-group",
    "scheduling.k8s.io/group-name",
    "kueue.x-k8s.io/pod-group-name",
    keys.GANG,
)
"""Label or annotation with the name of a pod's gang: scheduler-plugins, Volcano, Kueue, ours."""
SPOT_OFFSET: Final = 2**32
"""More than the difference of any two priorities."""
DEFAULT_GRACE_S: Final = 30.0
"""Kubernetes' default, of pods that set no grace period."""
VOUCHED_MOST: Final = 1024
"""Own annotations expected from the watch; beyond this number the oldest are dropped."""


_NO_ACCOUNT: Final = Account()


class PodFacts(Struct, frozen=True, kw_only=True):
    """One version of one pod."""

    uid: str
    namespace: str
    name: str
    resource_version: str
    node: str = ""
    """Node the pod is assigned to, empty while it is unassigned."""
    is_deleting: bool = False
    is_finished: bool = False
    """No container of the pod will run again."""
    request: PodRequest | None = None
    """The devices the pod requests; only for pods that still have to be placed."""
    problem: str = ""
    """Reason why the request cannot be honored as written: the field and the fix."""
    signed: SignedPlacement | None = None
    """The allocation committed with the binding, if its signature holds for this pod and node."""
    mistrust: str = ""
    """Reason why the allocation annotation on the pod is ignored."""
    traceparent: str = ""
    is_started: bool = False
    """Containers of the pod exist or existed: it wins in a dispute about a share (design D6)."""
    fence: str = ""
    """Allocation id in the annotation ``hami.io/fence``.

    Its Binding must not be posted any more.
    """
    is_labelled: bool = True
    """Our label is on the pod, so that our watch delivers it."""
    annotation: bytes = b""
    """Digest of the present allocation annotation, empty without one."""
    group: str = ""
    """The gang the pod is a member of, see ``group_of``."""
    priority: int = 0
    start_s: float = 0.0
    """Time at which kubelet accepted the pod, Unix seconds; 0 before."""
    min_runtime_s: float = 0.0
    """Minimum run time before the pod is evicted for another one, as the pod requests it."""
    grace_s: float = DEFAULT_GRACE_S
    """Grace period of the pod after it was asked to end."""
    is_gated: bool = False
    """True while kube-scheduler skips the pod because of a scheduling gate."""
    account: Account | None = None
    """The identity under which quotas count the pod, see ``account_of``."""
    sku: str = ""
    """SKU that the pod was admitted with, ``<name>@<version>``; empty without one."""
    service_class: str = ""
    """Class of the SKU, or that the pod names; empty without either."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels of the pod that usage is summed up by, sorted by key."""
    hold: str = ""
    """Name of the held shares that the pod takes over, see ``hold_of``; only in its namespace."""
    controller: str = ""
    """UID of the object that re-creates the pod, see ``controller_of``."""
    claim: str = ""
    """ResourceClaim through which the pod gets its devices, see ``claim_of``."""
    claim_requests: tuple[ShareRequest, ...] = ()
    """Requests of that claim."""
    claim_at_bind: bool = False
    """The claim is created when the pod is bound, see ``is_claimed_at_bind``."""
    queue_wish: str = ""
    """The queue that the label ``hami.io/queue`` names; only of pods that wait for a node."""
    created_s: float = 0.0
    """Creation time, Unix seconds; 0: not known."""

    def is_waiting(self) -> bool:
        """Return whether the pod requests devices and waits for a node."""
        return (
            not self.node
            and not self.is_deleting
            and not self.is_finished
            and self.request is not None
        )

    def owners(self) -> tuple[str, ...]:
        """Return the owners of held shares that the pod takes over, see ``owners_of``."""
        return tuple(owner for owner in (self.hold, self.uid, self.controller) if owner)

    def eviction_priority(self) -> int:
        """Return the priority by which evictions are compared: any spot pod is below all others."""
        return self.priority - SPOT_OFFSET if self.service_class == SPOT else self.priority

    def path(self) -> str:
        """Return the path of the pod in the Kubernetes API."""
        return pod_path(self.namespace, self.name)


def group_of(pod: PodView) -> str:
    """Return ``namespace/name`` of the pod's gang; empty when it names no gang.

    A name that no object can have counts as no name; ``gangs.gang_of`` refuses such a pod.
    """
    labels, annotations = pod.labels(), pod.annotations()
    for key in GROUP_KEYS:
        name = labels.get(key) or annotations.get(key)
        if name:
            group = f"{pod.metadata.namespace or 'default'}/{name}"
            return group if is_subdomain(name) else ""
    return ""


def hold_of(pod: PodView) -> str:
    """Return the name of the held shares that the pod takes over, see ``holdings_of_owner``.

    It is the uid of a Workload or ``held_for`` of a ProvisioningRequest, which pods name without
    its uid; empty when the pod names neither.
    """
    annotations = pod.annotations()
    if uid := annotations.get(keys.HOLD):
        return uid[:UID_MOST]
    name = annotations.get(keys.PROVISIONING_REQUEST, "")
    if not is_subdomain(name):
        return ""
    return purpose_of("provisioningrequest", pod.metadata.namespace or "default", name)


def controller_of(pod: PodView) -> str:
    """Return the UID of the object that re-creates the pod when it ends; empty without one."""
    owners = pod.metadata.owner_references or ()
    return next((owner.uid[:UID_MOST] for owner in owners if owner.controller), "")


def owners_of(pod: PodView) -> tuple[str, ...]:
    """Return the owners of held shares that the pod takes over, see ``holdings_of_owner``.

    Besides ``hold_of`` these are the pod itself and its controller, for both of which a
    defragmentation holds shares.
    """
    found = (hold_of(pod), pod.metadata.uid, controller_of(pod))
    return tuple(owner for owner in found if owner)


def account_of(pod: PodView, names: Mapping[str, tuple[str, str]]) -> Account | None:
    """Return the identity under which quotas count the pod besides its namespace, or ``None``.

    ``names``: see ``count_resources``.
    """
    labels = pod.labels()
    account = Account(
        queue=labels.get(keys.QUEUE_LABEL) or labels.get(keys.KUEUE_QUEUE_LABEL) or "",
        priority_class=pod.spec.priority_class_name or "",
        is_terminating=pod.spec.active_deadline_seconds is not None,
        is_best_effort=pod.status.qos_class == "BestEffort",
        is_spot=terms_of(pod)[1] == SPOT,
        resources=tuple(_count_resources(pod, names)) if names else (),
    )
    return None if account == _NO_ACCOUNT else account


def _count_resources(
    pod: PodView, names: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, str, str]]:
    for view in views_of(pod):
        for _, container in view.containers_in_order():
            written = (*container.limits(), *container.requests())
            yield from sorted({(container.name, *names[name]) for name in written if name in names})


def has_preferences(pod: PodView) -> bool:
    """Return whether the pod itself prefers some of the nodes on which it can be placed."""
    affinity = pod.spec.affinity
    if affinity is not None:
        kinds = (affinity.node_affinity, affinity.pod_affinity, affinity.pod_anti_affinity)
        if any(kind is not None and kind.preferred for kind in kinds):
            return True
    constraints = pod.spec.topology_spread_constraints or []
    return any(constraint.when_unsatisfiable == "ScheduleAnyway" for constraint in constraints)


def pod_path(namespace: str, name: str) -> str:
    """Return the path of a pod in the Kubernetes API (core/v1)."""
    return api_path("api", "v1", "namespaces", namespace, "pods", name)


class PodReader:
    """Makes facts from documents, for one set of vendors, keys and default policy."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        verifier: Verifier,
        policy: PlacementPolicy | None = None,
        usage_labels: Iterable[str] = (),
    ) -> None:
        """Parse requests with ``catalog`` and believe annotations that ``verifier`` accepts.

        ``usage_labels``: keys of the labels that are recorded.
        """
        self._usage_labels = tuple(sorted(set(usage_labels)))
        self._catalog = catalog
        self._count_resources = count_resources(catalog)
        self._verifier = verifier
        default = policy or PlacementPolicy()
        self._policy_for: Callable[[str], PlacementPolicy] = lambda _: default
        self._vouched: OrderedDict[str, SignedPlacement] = OrderedDict()

    def prefer(self, policy_for: Callable[[str], PlacementPolicy]) -> None:
        """Set the policy, by namespace, of pods read from now on that name no policy."""
        self._policy_for = policy_for

    def vouch(self, annotation: str, signed: SignedPlacement, *, key_id: str) -> None:
        """Trust this annotation unverified when the watch delivers it: we signed it ourselves."""
        if not self._verifier.trusts(key_id):
            return
        self._vouched[annotation] = signed
        if len(self._vouched) > VOUCHED_MOST:
            self._vouched.popitem(last=False)

    def _verified(self, annotation: str, *, pod_uid: str, node: str) -> SignedPlacement:
        """Parse the annotation; ``WireInvalid`` unless it is signed for this pod and node."""
        signed = self._vouched.pop(annotation, None)
        if signed is not None and (signed.pod_uid, signed.placement.node) == (pod_uid, node):
            return signed
        return self._verifier.verify(annotation, pod_uid=pod_uid, node=node)

    def request_of(self, pod: PodView) -> PodRequest | None:
        """Return the devices the pod requests, ``None`` when it requests none of ours.

        ``RequestInvalid``: the request cannot be met as written, or the pod bypassed admission.
        """
        return self._requests_of(pod)[0]

    def _requests_of(self, pod: PodView) -> tuple[PodRequest | None, tuple[ShareRequest, ...]]:
        """Return the pod's request, and the requests of its claim if it has one."""
        request = self._catalog.parse_pod(restored(pod), defaults=self._default_of(pod))
        if request is None:
            return None, ()
        require_admitted(pod, request)
        if not is_claimed(pod):
            return request, ()
        return as_claimed(request, claim=claim_of(pod)), requests_of(request)

    def template_request(self, pod: PodView) -> PodRequest | None:
        """Return the request of a pod that is not created yet; as ``request_of``."""
        return self._catalog.parse_pod(pod, defaults=self._default_of(pod))

    def _default_of(self, pod: PodView) -> PlacementPolicy:
        return self._policy_for(pod.metadata.namespace or "default")

    def account_of(self, pod: PodView) -> Account | None:
        """Return the identity under which quotas count the pod."""
        try:
            asking = restored(pod)
        except RequestInvalid:  # `request_of` refuses the pod
            asking = pod
        return account_of(asking, self._count_resources)

    def _claim_requests(self, pod: PodView, known: PodFacts | None) -> tuple[ShareRequest, ...]:
        """Return the requests of the claim of a bound pod; none if they cannot be read."""
        if known is not None and known.claim_requests and known.claim == claim_of(pod):
            return known.claim_requests
        try:
            return self._requests_of(pod)[1]
        except RequestInvalid:
            return ()

    def _labels_of(self, pod: PodView) -> tuple[tuple[str, str], ...]:
        labels = pod.labels()
        return tuple((key, labels[key]) for key in self._usage_labels if key in labels)

    def facts_of(self, pod: PodView, *, known: PodFacts | None = None) -> PodFacts:
        """Return the facts of this version.

        An earlier version ``known`` avoids a second verification.
        """
        metadata = pod.metadata
        node = pod.spec.node_name
        annotation = pod.annotations().get(keys.ALLOCATION, "")
        digest = blake2b(annotation.encode(), digest_size=16).digest() if annotation else b""
        request: PodRequest | None = None
        claim_requests: tuple[ShareRequest, ...] = ()
        problem = ""
        signed: SignedPlacement | None = None
        mistrust = ""
        if not node:
            try:
                request, claim_requests = self._requests_of(pod)
            except RequestInvalid as error:
                problem = str(error)
        elif (
            known is not None
            and known.annotation == digest
            and (known.uid, known.node) == (metadata.uid, node)
        ):
            signed, mistrust = known.signed, known.mistrust
        elif annotation:
            try:
                signed = self._verified(annotation, pod_uid=metadata.uid, node=node)
            except WireInvalid as error:
                mistrust = str(error)
        if node and is_claimed(pod):
            claim_requests = self._claim_requests(pod, known)
        sku, service_class = terms_of(pod)
        return PodFacts(
            uid=metadata.uid,
            namespace=metadata.namespace or "default",
            name=metadata.name,
            resource_version=metadata.resource_version,
            node=node,
            is_deleting=metadata.deletion_timestamp is not None,
            is_finished=pod.is_finished(),
            request=request,
            problem=problem,
            signed=signed,
            mistrust=mistrust,
            traceparent=pod.annotations().get(keys.TRACEPARENT, ""),
            is_started=_is_started(pod),
            fence=pod.annotations().get(keys.FENCE, "").partition("/")[0],
            is_labelled=pod.labels().get(keys.MANAGED_LABEL) == "true",
            annotation=digest,
            group=group_of(pod),
            priority=pod.spec.priority or 0,
            start_s=_unix_s(pod.status.start_time),
            min_runtime_s=_seconds(pod.annotations().get(keys.MIN_RUNTIME, "")),
            grace_s=_grace_s(pod),
            is_gated=bool(pod.spec.scheduling_gates),
            account=self.account_of(pod),
            sku=sku,
            service_class=service_class,
            labels=self._labels_of(pod),
            hold=hold_of(pod),
            controller=controller_of(pod),
            claim=claim_of(pod),
            claim_requests=claim_requests,
            claim_at_bind=is_claimed_at_bind(pod),
            queue_wish="" if node else pod.labels().get(keys.QUEUE_LABEL, ""),
            created_s=_unix_s(metadata.creation_timestamp),
        )


def _unix_s(text: str | None) -> float:
    """Return the Unix seconds of a Kubernetes time, 0 when there is none."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except ValueError:
        return 0.0


def _seconds(text: str) -> float:
    """Parse a duration that a user wrote; an invalid one protects nothing and is 0."""
    return real(text, least=0.0, most=RUNTIME_MOST_S) or 0.0


def _grace_s(pod: PodView) -> float:
    grace_s = pod.spec.termination_grace_period_seconds
    return DEFAULT_GRACE_S if grace_s is None else float(grace_s)


def _is_started(pod: PodView) -> bool:
    """Return whether kubelet has reported containers of the pod."""
    statuses = [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]
    return pod.status.phase == "Running" or any(
        status.state is not None
        and (status.state.running is not None or status.state.terminated is not None)
        for status in statuses
    )
