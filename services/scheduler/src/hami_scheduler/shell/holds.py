# SPDX-License-Identifier: Apache-2.0
"""Finds shares that were reserved for a pod before its bind, such as those held for its Workload.

Shares that await pods which still use them are not ready and are not found.

Filter claims one held share for a pod and returns only its node; bind takes the share over. Claims
live in memory and only keep two pods from the same share: after a restart pods claim again, and a
bind without a claim takes any share of its object on the node. A pod whose candidates hold no
share for it is placed like any other.
"""

from collections import OrderedDict
from collections.abc import Iterable

from hami_common.model.request import PodRequest
from hami_core.ledger.holding import Holding
from hami_core.ledger.podfacts import PodFacts
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.pick import satisfies
from hami_scheduler.shell.answer import Answer
from hami_scheduler.shell.state import State

CLAIMS_MOST = 65_536
"""Claims kept; beyond this number the oldest are dropped."""

_Key = tuple[str, str]
"""(node, uid of the hold)."""


class Holds:
    """Claims of pods on shares that are held for them."""

    def __init__(self, state: State) -> None:
        """Read the ledger of ``state``."""
        self._state = state
        self._claims: OrderedDict[str, _Key] = OrderedDict()
        """Claimed share by uid of the pod."""

    def room(self, request: PodRequest, owners: Iterable[str], names: NodeNames) -> Answer | None:
        """Return the node with the share held for the pod; ``None`` when there is none.

        ``owners``: see ``owners_of``.
        """
        suiting = self._suiting(request, owners)
        if not suiting:
            return None
        candidates = set(names.strings())
        found = [holding for holding in suiting if holding.record.node in candidates]
        if not found:
            return None
        claimed = self._claims.get(request.uid)
        others = self._claimed_by_others(request.uid)
        free = [holding for holding in found if _key(holding) not in others]
        mine = next((one for one in free if _key(one) == claimed), free[0] if free else found[0])
        self._claims[request.uid] = _key(mine)
        self._claims.move_to_end(request.uid)
        while len(self._claims) > CLAIMS_MOST:
            self._claims.popitem(last=False)
        node = mine.record.node
        return Answer(
            node=node,
            code="HeldElsewhere",
            text=f"HeldElsewhere: devices for the pod are held on node {node}",
        )

    def claimed(self, pod: PodFacts, node: str) -> Holding | None:
        """Return the held share on ``node`` that the pod takes over; ``None`` without one."""
        if pod.request is None:
            return None
        found = [
            holding
            for holding in self._suiting(pod.request, pod.owners())
            if holding.record.node == node
        ]
        claimed = self._claims.get(pod.uid)
        others = self._claimed_by_others(pod.uid)
        free = [holding for holding in found if _key(holding) not in others]
        return next((one for one in found if _key(one) == claimed), free[0] if free else None)

    def has_share(self, pod: PodFacts, node: str) -> bool:
        """Return whether a bind of the pod to ``node`` would take over a share reserved there.

        It may be the pod's own, of an earlier attempt, or one that is held for its Workload.
        """
        if pod.request is None:
            return False
        ledger = self._state.ledger
        own = ledger.holding(node, pod.uid)
        if own is not None and own.record.allocation_id != pod.fence:
            return (
                ledger.state_of(node, pod.uid) == "reserved"
                and not ledger.awaited(own)
                and satisfies(self._state.table, pod.request, node, own.record.containers)
            )
        return self.claimed(pod, node) is not None

    def taken(self, pod_uid: str) -> None:
        """Drop the claim of a pod that has its shares."""
        self._claims.pop(pod_uid, None)

    def _claimed_by_others(self, pod_uid: str) -> set[_Key]:
        """Return the shares that other pods claim which still wait for their bind."""
        claims = self._claims.items()
        return {key for uid, key in claims if uid != pod_uid and self._is_waiting(uid)}

    def _is_waiting(self, pod_uid: str) -> bool:
        pod = self._state.pods.get(pod_uid)
        return pod is not None and pod.is_waiting()

    def _suiting(self, request: PodRequest, owners: Iterable[str]) -> list[Holding]:
        ledger = self._state.ledger
        return [
            holding
            for owner in owners
            for holding in ledger.holdings_of_owner(owner)
            if holding.record.namespace == request.namespace
            and not ledger.awaited(holding)
            and satisfies(
                self._state.table, request, holding.record.node, holding.record.containers
            )
        ]


def _key(holding: Holding) -> _Key:
    return holding.record.node, holding.record.pod_uid
