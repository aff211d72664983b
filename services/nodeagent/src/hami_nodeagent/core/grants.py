# SPDX-License-Identifier: Apache-2.0
"""Records the devices granted to each container, and compares them with kubelet's list.

A grant is one answered ``Allocate`` request: this container of this pod holds these kubelet ids of
one resource, and was given these devices; or one prepared request of a ResourceClaim. The book is
written to disk before the answer is sent (``shell.checkpoint``), so that a restarted agent still
has its answers. Grants of a pod end when the pod is gone from the API server and from kubelet's
list.

``compare`` is the agent's self-check (design D9): kubelet's list shows which container holds which
ids. If ids that were granted to one container are in another one, one of the two runs with shares
of the other. The order of ids is irrelevant; devices are in the order of the shares.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import ContainerKind

FILE_VERSION = 1


class Grant(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answered request of an ``Allocate`` call."""

    pod_uid: str
    namespace: str
    pod: str
    container: str
    kind: ContainerKind
    vendor: str
    resource: str
    allocation_id: str
    ids: tuple[str, ...]
    """Kubelet ids, sorted."""
    uuids: tuple[str, ...]
    """Devices given, in the order of the shares."""
    kubelet: str = ""
    """Kubelet's run in which the call was answered."""
    time_s: float = 0.0
    library: str = ""
    """File name of the limiter that was mounted; empty when none was mounted. Kubelet repeats the
    answer at each start of the container, so the file must stay as long as the grant."""
    adopted: bool = False
    """Learned from kubelet's list after this agent lost its grant file."""
    is_claim: bool = False
    """Given to a ResourceClaim: ``pod_uid`` and ``pod`` are the claim's, ``container`` is a request
    of it."""
    claim: str = ""
    """ResourceClaim through which the pod got it, by name; empty: the device plugin gave it."""
    requests: tuple[str, ...] = ()
    """All requests of a claim that a container has together, ``container`` first: they have one
    limits file and one usage region. Empty: ``container`` alone."""

    @property
    def is_by_claim(self) -> bool:
        """Return whether kubelet's DRA manager asked for it.

        Such a grant has no kubelet ids, and ends when kubelet unprepares the claim.
        """
        return self.is_claim or bool(self.claim)


def shares_of(grant: Grant, containers: Iterable[ContainerShares]) -> ContainerShares | None:
    """Return the shares that the grant's limits file has; ``None`` if the record has none."""
    names = grant.requests or (grant.container,)
    own = {one.name: one for one in containers if one.name in names}
    found = [own[name] for name in names if name in own]
    return together(found) if found else None


def together(containers: Sequence[ContainerShares]) -> ContainerShares:
    """Return the shares of several requests as those of one container, under the first's name.

    Shares of one device become their sum; the sum with a share without a compute limit has none.
    """
    by_uuid: dict[str, Share] = {}
    for share in (share for one in containers for share in one.shares):
        known = by_uuid.get(share.uuid)
        if known is not None:
            is_limited = known.core_pct and share.core_pct
            share = replace(  # noqa: PLW2901 - the sum takes its place
                known,
                memory_mib=known.memory_mib + share.memory_mib,
                core_pct=known.core_pct + share.core_pct if is_limited else 0,
            )
        by_uuid[share.uuid] = share
    first = containers[0]
    return first if len(containers) == 1 else replace(first, shares=tuple(by_uuid.values()))


class GrantFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The book on disk."""

    version: int
    grants: tuple[Grant, ...] = ()


class GrantBook:
    """All grants of this node."""

    def __init__(self, grants: Iterable[Grant] = ()) -> None:
        self._by_pod: dict[str, dict[tuple[str, str], Grant]] = {}
        for grant in grants:
            self.add(grant)

    def __iter__(self) -> Iterator[Grant]:
        for of_pod in self._by_pod.values():
            yield from of_pod.values()

    def __len__(self) -> int:
        return sum(len(of_pod) for of_pod in self._by_pod.values())

    def add(self, grant: Grant) -> None:
        """Enter ``grant``, replacing an earlier one of the same container and resource."""
        self._by_pod.setdefault(grant.pod_uid, {})[grant.container, grant.resource] = grant

    def remove(self, grant: Grant) -> None:
        """Remove exactly this grant; a grant that replaced it stays."""
        of_pod = self._by_pod.get(grant.pod_uid, {})
        if of_pod.get((grant.container, grant.resource)) == grant:
            del of_pod[grant.container, grant.resource]
            if not of_pod:
                del self._by_pod[grant.pod_uid]

    def drop_pod(self, pod_uid: str) -> int:
        """Remove all grants of a pod; return their number."""
        return len(self._by_pod.pop(pod_uid, {}))

    def pod_uids(self) -> frozenset[str]:
        """Pods that hold a grant."""
        return frozenset(self._by_pod)

    def is_by_claim(self, uid: str) -> bool:
        """Return whether the pod or claim with this uid has grants that a claim brought."""
        return any(grant.is_by_claim for grant in self.of_pod(uid))

    def find(self, pod_uid: str, container: str, resource: str) -> Grant | None:
        """Return the grant of one container and resource."""
        return self._by_pod.get(pod_uid, {}).get((container, resource))

    def of_pod(self, pod_uid: str) -> tuple[Grant, ...]:
        """Return all grants of a pod."""
        return tuple(self._by_pod.get(pod_uid, {}).values())

    def of_ids(self, resource: str, ids: Collection[str]) -> tuple[Grant, ...]:
        """Return grants with exactly these ids; several if a pod reuses an init container's ids."""
        wanted = tuple(sorted(ids))
        return tuple(grant for grant in self if grant.resource == resource and grant.ids == wanted)

    def with_grant(self, grant: Grant) -> "GrantBook":
        """Return a copy of the book that includes ``grant``."""
        copy = GrantBook(self)
        copy.add(grant)
        return copy

    def held_ids(self, resource: str) -> frozenset[str]:
        """Return the kubelet ids that containers hold."""
        return frozenset(
            kubelet_id for grant in self if grant.resource == resource for kubelet_id in grant.ids
        )

    def to_file(self) -> GrantFile:
        """Return the book as it is stored; grants of claims are kept with the claims."""
        grants = tuple(grant for grant in self if not grant.is_by_claim)
        return GrantFile(version=FILE_VERSION, grants=grants)


class Shown(Struct, frozen=True, kw_only=True):
    """One container as kubelet lists it, with its pod's uid resolved."""

    pod_uid: str
    container: str
    resource: str
    ids: frozenset[str]


class Mismatch(Struct, frozen=True, kw_only=True):
    """A container that holds, in kubelet's list, ids which were granted to another one."""

    pod_uid: str
    container: str
    resource: str
    text: str


class Comparison(Struct, frozen=True, kw_only=True):
    """Outcome of a check."""

    mismatches: tuple[Mismatch, ...] = ()
    unknown: tuple[Shown, ...] = ()
    """Containers with ids in kubelet's list, without a grant and without a conflict: to be
    adopted."""
    unconfirmed: tuple[Grant, ...] = ()
    """Grants whose containers kubelet lists without ids: kubelet lost the ids."""


def compare(book: GrantBook, shown: Sequence[Shown], resources: Collection[str]) -> Comparison:
    """Compare the book with the containers that kubelet lists, with or without ids."""
    listed = {(one.pod_uid, one.container, one.resource): one for one in shown}
    owners: dict[tuple[str, frozenset[str]], list[Grant]] = {}
    for known in book:
        owners.setdefault((known.resource, frozenset(known.ids)), []).append(known)
    mismatches: list[Mismatch] = []
    unknown: list[Shown] = []
    unconfirmed: list[Grant] = []

    def mismatch(uid: str, container: str, resource: str, text: str) -> None:
        mismatches.append(Mismatch(pod_uid=uid, container=container, resource=resource, text=text))

    for one in shown:
        if one.resource not in resources:
            continue
        grant = book.find(one.pod_uid, one.container, one.resource)
        if not one.ids:
            if grant is not None:
                unconfirmed.append(grant)
            continue
        if grant is not None and frozenset(grant.ids) == one.ids:
            continue
        others = [
            other
            for other in owners.get((one.resource, one.ids), ())
            if other.pod_uid != one.pod_uid and _contests(other, listed)
        ]
        if others:
            mismatch(
                one.pod_uid,
                one.container,
                one.resource,
                f"kubelet gave it {_text(one.ids)}, which was granted to container "
                f"{others[0].container} of pod {others[0].namespace}/{others[0].pod}",
            )
            for other in others:
                mismatch(
                    other.pod_uid,
                    other.container,
                    other.resource,
                    f"its ids {_text(other.ids)} are with container {one.container} of another pod",
                )
        elif grant is not None:
            mismatch(
                one.pod_uid,
                one.container,
                one.resource,
                f"kubelet gave it {_text(one.ids)}, granted were {_text(grant.ids)}",
            )
        else:
            unknown.append(one)
    return Comparison(
        mismatches=tuple(dict.fromkeys(mismatches)),
        unknown=tuple(unknown),
        unconfirmed=tuple(unconfirmed),
    )


def _contests(grant: Grant, listed: Mapping[tuple[str, str, str], Shown]) -> bool:
    """Return whether kubelet lists the grant's container without ids, so that the ids are lost."""
    own = listed.get((grant.pod_uid, grant.container, grant.resource))
    return own is not None and own.ids != frozenset(grant.ids)


def _text(ids: Collection[str]) -> str:
    return ",".join(sorted(ids))
