# SPDX-License-Identifier: Apache-2.0
"""Decides which container an ``Allocate`` call is for and what it may have (design D9).

Kubelet names device ids, not the pod. The pod is identified from kubelet's behavior (device manager
and pod admission, Kubernetes 1.30 to 1.37):

1. A pod enters kubelet's list before it is admitted, and pods are admitted one at a time; so inside
   ``Allocate`` exactly one listed, active pod has a container that still lacks its devices.
2. In a pod, init containers (restartable ones among them) come first, in specification order, then
   application containers. So each pod has one *next* container.
3. Device ids of an ordinary init container are handed out again to later containers of the same
   pod. Hence identity is by pod and container, never by id.
4. ``List`` shows sidecars and application containers with their ids; ordinary init containers are
   absent. For those, and for containers that an old kubelet leaves out, the own grants apply.
5. An error from ``Allocate`` rejects the pod for good. Kubelet may repeat a call after a restart,
   when it died before its checkpoint was written, and after the checkpoint was lost, then for pods
   whose containers already ran.
6. Kubelet may hand out an id that a running pod holds: if ``List`` is called inside ``Allocate``
   while another pod ends, the device manager forgets that the id is taken until the next pod ends.
   Both pods then show the id; each has the devices of its own record.

A pod that appears to wait, but for which kubelet will never call, must not block other pods. Such
pods are recognized by evidence only: a finished phase (rejected pods become ``Failed``; ``List``
leaves them out at once since 1.34), status that only an admitted pod has, the agent's own grants.
Candidates are ranked by this evidence, and only the best rank counts::

    0 waiting        listed without devices, or an init container without a grant before any sign
                     of admission
    1 perhaps        two pods had this name, and the other one, fully served, may be the listed one;
                     or an init container was granted in an earlier run of kubelet, and there is no
                     sign of admission yet. As good as rank 0 where the list is not only of active
                     pods, because there rank 0 leaves doubt
    2 repeated       an init container of a pod that was admitted, without a grant of this run of
                     kubelet, which lost its checkpoint then; or the very ids of an earlier answer

If kubelet does not show a grant of its current run, the pod was refused since and no longer waits.
A candidate whose container asks for another number of ids than the call names is no candidate,
because kubelet asks for exactly that number. If two pods of the best rank remain, the call waits
for an update and is refused at the deadline, even when both would get equal shares: a grant names
the pod whose limits, states and metrics follow, so a grant to the wrong pod always has an effect.
Only within one pod can two containers be equal in effect: same shares, same priority, limits that
travel with the pod. In that case the later container is chosen, because kubelet repeats a call only
in the short time between our answer and its checkpoint. On a kubelet that lost its checkpoint while
pods with grants run, calls are refused as ambiguous until those pods are gone: the checkpoint
contradicts the containers.

The agent's picture of the pods may be older than kubelet's: a known pod may have been deleted and
re-created under its name. So the chosen pod must be confirmed: a read of its name at the API
server, begun after kubelet's list was taken, shows this pod; the call cannot be for a younger pod
then. If rank 0 is empty or ambiguous, the call may be for a pod that the agent does not see yet, so
all pods of the node are read.

A listed pod that a read of its name does not show is a static pod (its mirror pod may be missing or
refused), or was deleted before the agent received an event for it. The call may then be for that
pod, unless exactly one pod of rank 0 has no sign of admission yet: by rule 1 that pod is being
admitted. This needs a list without refused pods (``shell.listkind``, ADR 22).

``Wait`` means that an update (watch, ledger feed, keys) may allow a decision; the caller waits a
bounded time and then refuses with the same code. A record is accepted only if the pod's signed
annotation verifies and names the record's allocation. While the bus is unavailable, the last known
records are used, and the annotation alone for a pod whose record has not arrived (ADR 28).

Uses no sockets and no clock. The order of ids is irrelevant throughout.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from hami_common.compat.origins import title_of
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import ContainerKind
from hami_common.pods import annotations
from hami_common.pods.signing import SignedPlacement
from hami_common.vendors.handles import suits_mode
from hami_nodeagent.core.grants import Grant, GrantBook
from hami_nodeagent.core.podfacts import Ask, PodFacts


class Code(StrEnum):
    """Reason for a refusal: a word in the pod's status whose meaning never changes."""

    NO_PENDING_CONTAINER = "no-pending-container"
    """No listed pod has a container that waits for this resource."""
    POD_UNKNOWN = "pod-unknown"
    """Kubelet lists a pod that the API server has not shown yet."""
    AMBIGUOUS = "ambiguous"
    """The call may be for more than one container."""
    POD_GONE = "pod-gone"
    """The pod was deleted or has finished."""
    NO_ALLOCATION = "no-allocation"
    """The pod was not placed by this project's scheduler."""
    ANNOTATION_INVALID = "annotation-invalid"
    """The allocation annotation does not verify."""
    LEDGER_UNKNOWN = "ledger-unknown"
    """The ledger has no record for the pod."""
    LEDGER_MISMATCH = "ledger-mismatch"
    """Ledger and annotation name different allocations."""
    ALLOCATION_RELEASED = "allocation-released"
    """The share has been released."""
    STATE_FAILED = "state-failed"
    """The allocation was marked as failed."""
    NOT_IN_ALLOCATION = "not-in-allocation"
    """The allocation has no share for this container."""
    COUNT_MISMATCH = "count-mismatch"
    """The number of devices in the call differs from that of the allocation or the pod."""
    POD_UNREADABLE = "pod-unreadable"
    """A pod that the call may be for cannot be read."""
    LEDGER_UNREADABLE = "ledger-unreadable"
    """The newest record or state of the allocation cannot be read."""
    DEVICE_UNKNOWN = "device-unknown"
    """The allocation names a device that this node does not have."""
    DEVICE_UNHEALTHY = "device-unhealthy"
    """The allocated device is unhealthy."""
    API_UNAVAILABLE = "api-unavailable"
    """The API server did not confirm that the pod still exists."""
    LIST_UNAVAILABLE = "list-unavailable"
    """Kubelet did not list its pods."""
    NOT_GRANTED = "not-granted"
    """A container starts with ids that no Allocate call granted."""
    REQUEST_INVALID = "request-invalid"
    """The call itself is malformed."""
    LIMITER_MISSING = "limiter-missing"
    """The library that enforces the container's share cannot be installed on this node."""
    LIMITS_HIDDEN = "limits-hidden"
    """A mount of the pod would hide or unhook the enforcement of the container's share."""
    DEVICES_OVERRIDDEN = "devices-overridden"
    """A variable of the container selects devices that the node did not allocate."""
    HOST_FAILED = "host-failed"
    """The agent could not write its state on this host."""
    PARTITION_NOT_READY = "partition-not-ready"
    """The container's hardware partition does not exist yet, or cannot be created."""
    MODE_CHANGED = "mode-changed"
    """The device's partitioning mode changed after the share was granted."""
    PARTITION_CHANGED = "partition-changed"
    """The name of the hardware partition differs from the one passed to the container."""
    INTERNAL = "internal"
    """A bug of the agent."""


OUTAGES = frozenset({Code.LEDGER_UNKNOWN, Code.API_UNAVAILABLE})
"""The pod shows no fault so far; the bus or the API server settles the decision after it recovers.
These codes get a longer wait than others, because kubelet never retries a refused pod."""


class ListedPod(Struct, frozen=True, kw_only=True):
    """A pod in kubelet's own list."""

    namespace: str
    name: str
    ids_by_container: Mapping[str, Mapping[str, frozenset[str]]] = {}
    """Listed container → resource → device ids. A container that is not listed is absent."""
    uid: str = ""
    """Empty where kubelet does not report it (PodResources)."""
    settled: bool = False
    """Kubelet has listed it for much longer than an admission takes."""


class Entry(Struct, frozen=True, kw_only=True):
    """A record of the ledger with its sequence."""

    record: AllocationRecord
    sequence: int
    traceparent: str = ""
    """Trace context of the span that wrote the record; empty where the pod has no trace."""


class Request(Struct, frozen=True, kw_only=True):
    """One container request of an ``Allocate`` call."""

    vendor: str
    """Empty for the neutral resource: the ledger record decides."""
    resource: str
    ids: tuple[str, ...]


class View(Struct, kw_only=True):
    """Input of a decision. Its owner keeps it up to date; a decision only reads it."""

    pods_by_name: Mapping[tuple[str, str], Sequence[PodFacts]]
    """(namespace, name) → pods of that name, deleted ones included while kubelet may list them."""
    entries_by_uid: Mapping[str, Entry]
    """Newest ledger record of each pod of this node."""
    states_by_uid: Mapping[str, StateRecord]
    grants: GrantBook
    devices_by_uuid: Mapping[str, Device]
    """Canonical devices of this node."""
    faulty: Collection[str] = ()
    """Devices that this node found unhealthy."""
    sound: Collection[str] = ()
    """Devices that this node found healthy, whatever state the registry received last."""
    kubelet: str = ""
    """Identifier of kubelet's current run; grants of an earlier run are uncertain for init
    containers."""
    bus_connected: bool = True
    lists_active_only: bool = True
    """Kubelet leaves refused pods out of its list (1.34 and later)."""


class Claim(Struct, frozen=True, kw_only=True):
    """The container that the call is for, and the shares that it may have."""

    pod: PodFacts
    container: str
    kind: ContainerKind
    shares: ContainerShares
    """Shares of all vendors of this container, as recorded."""
    own: tuple[Share, ...]
    """Shares of the vendor that was asked, at least one."""
    devices: tuple[Device, ...]
    """Devices of ``own``, in the same order."""
    entry: Entry

    @property
    def vendor(self) -> str:
        """Return the vendor of the shares."""
        return self.own[0].vendor


class Wait(Struct, frozen=True, kw_only=True):
    """No decision is possible yet. Refuse with this code if no update arrives in time."""

    code: Code
    text: str
    confirm: PodFacts | None = None
    """Read this pod at the API server, then decide again on the same list."""
    confirm_all: bool = False
    """Read all pods of this node at the API server, then decide again on the same list."""
    record_of: str = ""
    """Read the ledger's newest record of the pod with this uid, then decide again."""


_CONFIRM_ALL = Wait(
    code=Code.API_UNAVAILABLE,
    text="the API server does not list the pods of this node",
    confirm_all=True,
)


class Confirmed(Struct, frozen=True, kw_only=True):
    """Result of API server reads that began after kubelet's list was taken."""

    names: frozenset[tuple[str, str]] = frozenset()
    """(namespace, name) of the pods that were read; their current state is known."""
    everything: bool = False

    def covers(self, pod: PodFacts) -> bool:
        """Return whether the facts under the pod's name come from such a read."""
        return self.everything or (pod.namespace, pod.name) in self.names


TRUST_ALL = Confirmed(everything=True)
"""For advice whose errors have no effect."""


class Refuse(Struct, frozen=True, kw_only=True):
    """A refusal, with one line for the pod's status."""

    code: Code
    text: str


Decision = Claim | Wait | Refuse

_WAITING, _PERHAPS, _AGAIN = range(3)
_MOST_READS = 3
"""Above this number of pods, one list replaces single reads."""


class _Candidate(Struct, frozen=True, kw_only=True):
    pod: PodFacts
    asks: tuple[Ask, ...]
    """Candidate containers of this pod, in order; one unless a grant is uncertain."""
    rank: int


def decide(
    view: View,
    listing: Sequence[ListedPod] | None,
    request: Request,
    confirmed: Confirmed = TRUST_ALL,
) -> Decision:
    """Find the container that ``request`` is for, and check that it may have its shares.

    ``listing`` is kubelet's answer from inside this call.
    """
    if not request.ids or len(set(request.ids)) != len(request.ids):
        return Refuse(
            code=Code.REQUEST_INVALID, text="the call names no device ids, or one of them twice"
        )
    if listing is None:
        return Wait(
            code=Code.LIST_UNAVAILABLE, text="kubelet's PodResources socket does not answer"
        )
    if any(listed.uid for listed in listing):
        view = replace(view, lists_active_only=False)  # kubelet's /pods lists every pod that it has
    if not view.lists_active_only and not confirmed.everything:
        return _CONFIRM_ALL
    candidate = _identify(view, listing, request, confirmed)
    if not isinstance(candidate, _Candidate):
        return candidate
    return _unconfirmed(candidate, confirmed) or _judge(view, candidate, request)


def _identify(
    view: View, listing: Sequence[ListedPod], request: Request, confirmed: Confirmed
) -> _Candidate | Wait:
    """Return the one candidate that ``request`` can be for."""
    candidates, unknown = _candidates(view, listing, request)
    unread = [] if confirmed.everything else [one for one in unknown if one not in confirmed.names]
    stranger = _stranger(unknown, unread)
    if unread:
        return stranger
    fitting = [fit for one in candidates if (fit := _of_count(one, len(request.ids))) is not None]
    if not fitting:
        return stranger if unknown else _nobody(candidates, request)
    best = min(candidate.rank for candidate in fitting)
    chosen = [candidate for candidate in fitting if candidate.rank == best]
    if len({candidate.pod.uid for candidate in chosen}) > 1:
        return Wait(
            code=Code.AMBIGUOUS,
            text="more than one pod waits for "
            f"{request.resource}: {_names([one.pod.title for one in chosen])}",
        )
    if unknown and not _is_next(view, chosen[0]):
        return stranger
    return chosen[0]


def _is_next(view: View, candidate: _Candidate) -> bool:
    """Return whether kubelet is admitting this candidate's pod, which excludes an unknown pod."""
    return view.lists_active_only and candidate.rank == _WAITING and not candidate.pod.admitted


def _unconfirmed(candidate: _Candidate, confirmed: Confirmed) -> Wait | None:
    """Return the missing API server read; ``None`` if the pod is confirmed."""
    if candidate.rank != _WAITING and not confirmed.everything:
        return _CONFIRM_ALL
    if not confirmed.covers(candidate.pod):
        return Wait(
            code=Code.API_UNAVAILABLE,
            text=f"the API server does not confirm that pod {candidate.pod.title} exists",
            confirm=candidate.pod,
        )
    return None


def decide_all(
    view: View,
    listing: Sequence[ListedPod] | None,
    requests: Sequence[Request],
    confirmed: Confirmed = TRUST_ALL,
) -> tuple[Claim, ...] | Wait | Refuse:
    """Decide the requests of one call, each as if the requests before it were granted."""
    claims: list[Claim] = []
    for request in requests:
        decision = decide(view, listing, request, confirmed)
        if not isinstance(decision, Claim):
            return decision
        if claims and decision.pod.uid != claims[0].pod.uid:
            return Refuse(
                code=Code.AMBIGUOUS,
                text=f"one call seems to be for {claims[0].pod.title} and {decision.pod.title}",
            )
        claims.append(decision)
        if len(requests) > 1 and listing is not None:
            view = replace(view, grants=view.grants.with_grant(grant_of(decision, request, view)))
            listing = [_with_ids(listed, decision, request) for listed in listing]
    return tuple(claims)


def grant_of(
    claim: Claim, request: Request, view: View, *, time_s: float = 0.0, library: str = ""
) -> Grant:
    """Return the grant of an answered claim."""
    return Grant(
        pod_uid=claim.pod.uid,
        namespace=claim.pod.namespace,
        pod=claim.pod.name,
        container=claim.container,
        kind=claim.kind,
        vendor=claim.vendor,
        resource=request.resource,
        allocation_id=claim.entry.record.allocation_id,
        ids=tuple(sorted(request.ids)),
        uuids=tuple(share.uuid for share in claim.own),
        kubelet=view.kubelet,
        time_s=time_s,
        library=library,
    )


# --- candidates ---


def _candidates(
    view: View, listing: Sequence[ListedPod], request: Request
) -> tuple[list[_Candidate], list[tuple[str, str]]]:
    """Return pods with a container that lacks devices, and listed pods without known facts."""
    candidates: list[_Candidate] = []
    unknown: list[tuple[str, str]] = []
    for listed in listing:
        pods = view.pods_by_name.get((listed.namespace, listed.name), ())
        if listed.uid:
            pods = [pod for pod in pods if pod.uid == listed.uid]
        if not pods and not listed.settled:
            unknown.append((listed.namespace, listed.name))
        if len(pods) > 1:
            pods = _bearers(view, listed, pods)
        found = [one for pod in pods if (one := _candidate(view, listed, pod, request)) is not None]
        if len(found) < len(pods):
            found = [replace(one, rank=max(one.rank, _PERHAPS)) for one in found]
        candidates.extend(found)
    if not view.lists_active_only:
        candidates = [
            replace(one, rank=_WAITING) if one.rank == _PERHAPS else one for one in candidates
        ]
    return candidates, unknown


def _stranger(unknown: Sequence[tuple[str, str]], unread: Sequence[tuple[str, str]]) -> Wait:
    """Wait for listed pods without known facts; pods that were not read yet are read first."""
    first = PodFacts(uid="", namespace=unread[0][0], name=unread[0][1]) if unread else None
    is_many = len(unread) > _MOST_READS
    return Wait(
        code=Code.POD_UNKNOWN,
        text=f"kubelet lists {_names(['/'.join(one) for one in unknown])}, "
        "which the API server has not shown us yet",
        confirm=None if is_many else first,
        confirm_all=is_many,
    )


def _bearers(view: View, listed: ListedPod, pods: Sequence[PodFacts]) -> Sequence[PodFacts]:
    """Return which of several pods of one name the listed one may be."""
    proven = [
        pod
        for pod in pods
        if any(_is_shown(listed, grant) for grant in view.grants.of_pod(pod.uid))
        and not _contradicted(view, listed, pod)
    ]
    if len(proven) == 1:
        return proven
    return [pod for pod in pods if not pod.finished and _may_be(listed, pod)]


def _is_shown(listed: ListedPod, grant: Grant) -> bool:
    ids = listed.ids_by_container.get(grant.container, {}).get(grant.resource)
    return ids == frozenset(grant.ids)


def _may_be(listed: ListedPod, pod: PodFacts) -> bool:
    """Return whether the listed containers are the pod's; old kubelets leave sidecars out."""
    if not listed.ids_by_container:
        return True
    kinds = pod.kind_by_container.items()
    apps = {name for name, kind in kinds if kind == "app"}
    lasting = {name for name, kind in kinds if kind != "init"}
    return apps <= listed.ids_by_container.keys() <= lasting


def _candidate(view: View, listed: ListedPod, pod: PodFacts, request: Request) -> _Candidate | None:
    """Return the containers of ``pod`` that kubelet may ask for next, if it lists this pod."""
    asks = pod.asks_by_resource.get(request.resource, ())
    if not asks or pod.finished:
        return None
    shown = listed.ids_by_container.get(asks[-1].container)
    if shown is not None and shown.get(request.resource):
        return None  # the last container is served, so all are
    # Kubelet loses an answer of its present run only if it refused the pod since.
    if not _contradicted(view, listed, pod):
        lacking = _lacking(view, listed, pod, asks, request.resource)
        if lacking:
            return _Candidate(
                pod=pod, asks=lacking, rank=_rank(view, listed, pod, lacking[-1], request)
            )
    repeated = tuple(
        ask
        for ask in asks
        if not listed.ids_by_container.get(ask.container, {}).get(request.resource)
        and (grant := view.grants.find(pod.uid, ask.container, request.resource)) is not None
        and set(grant.ids) == set(request.ids)
    )
    return _Candidate(pod=pod, asks=repeated[-1:], rank=_AGAIN) if repeated else None


def _rank(view: View, listed: ListedPod, pod: PodFacts, last: Ask, request: Request) -> int:
    if last.container in listed.ids_by_container:
        return _WAITING
    if pod.admitted:
        return _AGAIN
    granted = view.grants.find(pod.uid, last.container, request.resource) is not None
    return _PERHAPS if granted else _WAITING


def _contradicted(view: View, listed: ListedPod, pod: PodFacts) -> bool:
    return any(
        grant.kubelet == view.kubelet
        and grant.container in listed.ids_by_container
        and not _is_shown(listed, grant)
        for grant in view.grants.of_pod(pod.uid)
    )


def _lacking(
    view: View, listed: ListedPod, pod: PodFacts, asks: Sequence[Ask], resource: str
) -> tuple[Ask, ...]:
    """Return the next container without devices, after earlier ones that may lack theirs."""
    last_shown = max(
        (
            position
            for position, ask in enumerate(asks)
            if listed.ids_by_container.get(ask.container, {}).get(resource)
        ),
        default=-1,
    )
    uncertain: list[Ask] = []
    for ask in asks[last_shown + 1 :]:
        if ask.container in listed.ids_by_container:
            return (*uncertain, ask)
        grant = view.grants.find(pod.uid, ask.container, resource)
        if grant is None and not pod.admitted:
            return (*uncertain, ask)
        if grant is None or grant.kubelet != view.kubelet:
            uncertain.append(ask)
    return tuple(uncertain)


def _of_count(candidate: _Candidate, count: int) -> _Candidate | None:
    asks = tuple(ask for ask in candidate.asks if ask.count == count)
    return replace(candidate, asks=asks) if asks else None


def _nobody(candidates: Sequence[_Candidate], request: Request) -> Wait:
    if not candidates:
        return Wait(
            code=Code.NO_PENDING_CONTAINER,
            text=f"no pod on this node has a container that waits for {request.resource}",
        )
    counts = ", ".join(
        f"{one.pod.title} container {ask.container} asks for {ask.count}"
        for one in candidates[:3]
        for ask in one.asks
    )
    return Wait(
        code=Code.COUNT_MISMATCH,
        text=f"kubelet names {len(request.ids)} devices of {request.resource}, but {counts}",
    )


# --- permission for the shares ---


def _judge(view: View, candidate: _Candidate, request: Request) -> Decision:
    pod = candidate.pod
    if pod.gone:
        return Refuse(code=Code.POD_GONE, text=f"pod {pod.title} was deleted")
    entry = _entry_of(view, pod)
    if not isinstance(entry, Entry):
        return entry
    return _one_of(view, candidate, entry, request)


def _not_placed(pod: PodFacts) -> str:
    """Return why a pod without an allocation has none, and the fix."""
    if pod.is_prepared:
        return (
            "was not placed by hami-scheduler, although HAMi's webhook prepared it; create it "
            "again and leave the Binding to hami-scheduler"
        )
    return (
        "was not placed by hami-scheduler, because HAMi's webhook did not prepare it; create it "
        "again in a namespace without the label "
        f"{annotations.WEBHOOK_LABEL}={annotations.WEBHOOK_IGNORE}, without schedulerName and "
        "nodeName, and with HAMi's webhook installed"
    )


def is_before(entry: Entry, signed: SignedPlacement) -> bool:
    """Return whether the record is of an allocation before that of the pod's annotation."""
    is_other = entry.record.allocation_id != signed.allocation_id
    return is_other and entry.sequence < signed.ledger_seq


def _entry_of(view: View, pod: PodFacts) -> Entry | Wait | Refuse:
    """Return the live ledger record that the pod's annotation proves."""
    signed = pod.signed
    if signed is None:
        if pod.annotation_problem:
            return Refuse(
                code=Code.ANNOTATION_INVALID,
                text=f"pod {pod.title}: {pod.annotation_problem}",
            )
        return Refuse(code=Code.NO_ALLOCATION, text=f"pod {pod.title} {_not_placed(pod)}")
    entry = view.entries_by_uid.get(pod.uid)
    if entry is None or is_before(entry, signed):
        if view.bus_connected:
            return Wait(
                code=Code.LEDGER_UNKNOWN,
                text=f"the ledger has no record {signed.ledger_seq} for pod {pod.title}",
                record_of=pod.uid,
            )
        entry = _proved(signed)
    record = entry.record
    if record.origin:
        return Refuse(
            code=Code.NO_ALLOCATION,
            text=f"pod {pod.title} was placed by {title_of(record.origin)}, whose device plugin no "
            "longer serves this node; create it again",
        )
    if record.claim:
        return Refuse(
            code=Code.NO_ALLOCATION,
            text=f"pod {pod.title} gets its devices by claim {record.claim}, and by no resource of "
            "its containers; remove the resource",
        )
    if record.op == "release":
        return Refuse(
            code=Code.ALLOCATION_RELEASED,
            text=f"the share of pod {pod.title} was released: {record.reason or 'no reason given'}",
        )
    if record.allocation_id != signed.allocation_id or (
        record.op == "reserve" and record.containers != signed.placement.containers
    ):
        return Refuse(
            code=Code.LEDGER_MISMATCH,
            text=f"ledger record {entry.sequence} of pod {pod.title} and its annotation differ",
        )
    state = view.states_by_uid.get(pod.uid)
    if (
        state is not None
        and state.state == "failed"
        and state.allocation_id == record.allocation_id
    ):
        return Refuse(
            code=Code.STATE_FAILED,
            text=f"the allocation of pod {pod.title} failed: "
            f"{state.code or 'no code'} {state.reason}".rstrip(),
        )
    return entry


def _proved(signed: SignedPlacement) -> Entry:
    """Return the record that the scheduler had written when it signed the annotation."""
    record = AllocationRecord(
        op="reserve",
        allocation_id=signed.allocation_id,
        node=signed.placement.node,
        pod_uid=signed.pod_uid,
        namespace=signed.namespace,
        pod=signed.pod,
        containers=signed.placement.containers,
        origin=signed.origin,
        claim=signed.claim,
    )
    return Entry(record=record, sequence=signed.ledger_seq)


def _one_of(view: View, candidate: _Candidate, entry: Entry, request: Request) -> Decision:
    """Return the claim for the container, unless the pod's candidates differ in effect."""
    pod = candidate.pod
    shares_by_name = {shares.name: shares for shares in entry.record.containers}
    meant = candidate.asks[-1]
    shares = shares_by_name.get(meant.container)
    for other in candidate.asks[:-1]:
        if not _equal_in_effect(pod, meant.container, other.container, shares_by_name):
            return Wait(
                code=Code.AMBIGUOUS,
                text=f"kubelet may ask for container {other.container} or {meant.container} of pod "
                f"{pod.title}: it was restarted in the middle of admission",
            )
    own = tuple(s for s in shares.shares if request.vendor in ("", s.vendor)) if shares else ()
    if shares is None or not own:
        kind = f"{request.vendor} " if request.vendor else ""
        return Refuse(
            code=Code.NOT_IN_ALLOCATION,
            text=f"the allocation of pod {pod.title} holds no {kind}share for "
            f"container {meant.container}",
        )
    devices: list[Device] = []
    for share in own:
        device = view.devices_by_uuid.get(share.uuid)
        if device is None:
            return Wait(
                code=Code.DEVICE_UNKNOWN,
                text=f"pod {pod.title} was given device {share.uuid}, which this node has not",
            )
        if share.uuid in view.faulty or not (device.healthy or share.uuid in view.sound):
            text = (
                f"device {share.uuid} of pod {pod.title} is out of order: "
                f"{device.health_reason or 'fault seen on this node'}"
            )
            if share.uuid in view.faulty:
                return Refuse(code=Code.DEVICE_UNHEALTHY, text=text)
            return Wait(code=Code.DEVICE_UNHEALTHY, text=text)
        if not suits_mode(share, device):
            return Wait(
                code=Code.MODE_CHANGED,
                text=f"device {share.uuid} of pod {pod.title} is in mode {device.mode} now, which "
                "its share is not for; delete the pod",
            )
        devices.append(device)
    # An alternative may have another number of devices than the neutral demand.
    if request.vendor and len(request.ids) not in {len(own), *_units(own, devices)}:
        return Refuse(
            code=Code.COUNT_MISMATCH,
            text=f"kubelet names {len(request.ids)} devices for container {meant.container} of pod "
            f"{pod.title}, its allocation holds {len(own)}",
        )
    return Claim(
        pod=pod,
        container=meant.container,
        kind=meant.kind,
        shares=shares,
        own=own,
        devices=tuple(devices),
        entry=entry,
    )


def _units(own: Sequence[Share], devices: Sequence[Device]) -> set[int]:
    """Return the number of units of each kind by which the devices of the shares are divided.

    Some resources count such units (cores, slices) instead of devices, and kubelet counts the same.
    """
    totals: dict[str, int] = {}
    for share, device in zip(own, devices, strict=True):
        profile = next((one for one in device.partitions if one.name == share.profile), None)
        if profile is None:
            return set()
        for name, amount in profile.resources.items():
            totals[name] = totals.get(name, 0) + amount
    return set(totals.values())


def _equal_in_effect(
    pod: PodFacts, a: str, b: str, shares_by_name: Mapping[str, ContainerShares]
) -> bool:
    if not {a, b} <= pod.limits_mounted:
        return False  # the agent mounts a separate limits file for each
    first, second = shares_by_name.get(a), shares_by_name.get(b)
    return (
        first is not None
        and second is not None
        and (first.shares, first.priority) == (second.shares, second.priority)
    )


def _with_ids(listed: ListedPod, claim: Claim, request: Request) -> ListedPod:
    """Return ``listed`` as kubelet would show it after this claim."""
    named = (listed.namespace, listed.name) == (claim.pod.namespace, claim.pod.name)
    if not named or claim.container not in listed.ids_by_container:
        return listed
    ids = {
        **listed.ids_by_container[claim.container],
        request.resource: frozenset(request.ids),
    }
    return replace(listed, ids_by_container={**listed.ids_by_container, claim.container: ids})


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"  # noqa: PLR2004 - one line
