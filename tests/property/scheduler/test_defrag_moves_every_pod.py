# SPDX-License-Identifier: Apache-2.0
"""A plan executed step by step through the ledger loses no pod and starts the waiting one.

A small cluster runs over the real ledger: pods end after their eviction, their controllers
re-create them, and pods without a node are scheduled in any order, also one that wants what becomes
free. The steps may be cut off anywhere.
"""

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_common.events.allocation import hold_uid, purpose_of
from hami_common.model.request import PodRequest
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Hold, Ledger
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.stimuli import Accepted, Append
from hami_core.placement.pick import satisfies
from hami_core.planning.defrag import places_of, plan_moves, progress
from tests.property.scheduler.test_defrag_is_the_best import Site, divided_sites, soft_sites
from tests.support.builders import ask, pod

PURPOSE = purpose_of("defrag", "default", "wanted")


class Cluster:
    """The ledger of a site, and the pods of the API server."""

    def __init__(self, site: Site, wanted: PodRequest) -> None:
        self.ledger = Ledger(site.table, writer="me")
        self.pods: dict[str, PodFacts] = {}
        self._numbers = count(1)
        for node, containers in [*((t.node, t.containers) for t in site.tenants), *site.fixed]:
            site.table.unbook(node, containers)
        fixed = [(pod(ask(), uid=f"f{n}"), *one) for n, one in enumerate(site.fixed)]
        moving = [(t.request, t.node, t.containers) for t in site.tenants]
        for request, node, containers in [*moving, *fixed]:
            self._append(
                self.ledger._reserve(  # noqa: SLF001 - a record as of an earlier bind
                    request, node, containers, allocation_id=self._id(), now_s=0.0
                )
            )
            self._put(request, node)
        self._put(wanted)
        self.wanted = wanted.uid

    def _id(self) -> str:
        return f"a{next(self._numbers)}"

    def _put(self, request: PodRequest, node: str = "") -> None:
        self.pods[request.uid] = PodFacts(
            uid=request.uid,
            namespace=request.namespace,
            name=request.name,
            resource_version="",
            node=node,
            request=request,
            controller=f"rs-{request.name}",
        )

    def _append(self, planned: object) -> bool:
        if isinstance(planned, Append):
            self.ledger.handle(Accepted(append=planned, seq=next(self._numbers), now_s=0.0))
            self.ledger.check()
        return isinstance(planned, Append)

    def hold(self, request: PodRequest, node: str, awaits: tuple[str, ...]) -> bool:
        hold = Hold(held_for=PURPOSE, lease_s=60.0, awaits=awaits)
        return self._append(
            self.ledger.plan_hold(request, node, allocation_id=self._id(), now_s=0.0, hold=hold)
        )

    def release(self, holding: Holding) -> None:
        self._append(self.ledger.plan_release(holding, now_s=0.0, reason="test"))

    def evict(self, uid: str) -> None:
        """The pod ends, and its controller creates another one."""
        gone = self.pods.pop(uid)
        (holding,) = self.ledger.holdings_of_pod(uid)
        self.release(holding)
        assert gone.request is not None
        self._put(replace(gone.request, uid=f"{uid}-new"))

    def schedule(self, uid: str) -> bool:
        """Bind the pod as filter and bind do: to its held place, else to a node where it fits."""
        facts = self.pods[uid]
        assert facts.request is not None
        table, ledger = self.ledger.table, self.ledger
        held = [
            one
            for owner in facts.owners()
            for one in ledger.holdings_of_owner(owner)
            if not ledger.awaited(one)
            and satisfies(table, facts.request, one.record.node, one.record.containers)
        ]
        for one in held[:1]:
            node = one.record.node
            assert self._append(
                ledger.plan_take(
                    facts.request,
                    node,
                    held_uid=one.record.pod_uid,
                    allocation_id=self._id(),
                    now_s=0.0,
                )
            )
            self.release(one)
            self._put(facts.request, node)
            return True
        for node in table.nodes():
            planned = ledger.plan_bind(facts.request, node, allocation_id=self._id(), now_s=0.0)
            if self._append(planned):
                self._put(facts.request, node)
                return True
        return False

    def waiting(self) -> list[str]:
        return sorted(uid for uid, facts in self.pods.items() if not facts.node)


def steps(cluster: Cluster, moves: int, stops_after: int, data: st.DataObject) -> list[str]:
    """Execute steps until all are done or ``stops_after`` evictions; return the evicted pods."""
    evicted: list[str] = []
    for _ in range(40):
        for uid in data.draw(st.permutations(cluster.waiting())):
            cluster.schedule(uid)
        now = progress(cluster.ledger, PURPOSE, cluster.wanted, cluster.pods.get)
        assert len(now.staying) + len(evicted) == moves
        if len(evicted) == stops_after and now.wanted is not None:
            for one in [now.wanted, *now.pending]:
                cluster.release(one)
            break
        if now.following is not None:
            evicted.append(now.following.uid)
            cluster.evict(now.following.uid)
        elif not now.staying and not now.outstanding:
            break
    return evicted


def run(site: Site, wanted: PodRequest, data: st.DataObject) -> None:
    cluster = Cluster(site, wanted)
    table = cluster.ledger.table
    plan = plan_moves(table, wanted, site.tenants, most_moves=3)
    places = places_of(plan, wanted, site.tenants) if plan.moves else ()
    if not places:
        return
    before = {uid: facts.name for uid, facts in cluster.pods.items()}
    owners = [f"rs-{move.pod}" for move in plan.moves] + [wanted.uid]
    for number, (owner, place) in enumerate(zip(owners, places, strict=True)):
        uid = hold_uid(owner, 0, number)
        assert cluster.hold(replace(place.request, uid=uid), place.node, place.awaits)
    thief = pod(ask(mib=data.draw(st.integers(1, 4))), uid="thief", name="thief")
    cluster._put(thief)  # noqa: SLF001 - another pod is created
    stops_after = data.draw(st.integers(0, 4))
    evicted = steps(cluster, len(plan.moves), stops_after, data)
    for _ in range(2):
        for uid in cluster.waiting():
            cluster.schedule(uid)
    assert cluster.ledger.holdings_of_owner(PURPOSE) == []
    assert len(set(evicted)) == len(evicted)
    left = set(cluster.waiting()) - {"thief"}
    if len(evicted) == len(plan.moves) and stops_after > len(evicted):
        assert not left, "a moved pod or the waiting one has no node"
    assert left <= {wanted.uid}, "a moved pod was lost"
    names = {facts.name for facts in cluster.pods.values()} - {"thief"}
    assert names == set(before.values())
    cluster.ledger.check()
    for node, uuid, usage in table.usages():
        capacity = next(d for d in site.devices[node] if d.uuid == uuid).memory_mib
        assert usage.memory_mib <= capacity, "a device is over-booked"


@settings(max_examples=40, deadline=None)
@given(case=soft_sites(), data=st.data())
def test_steps_lose_no_pod_and_start_the_waiting_one(
    case: tuple[Site, PodRequest], data: st.DataObject
) -> None:
    run(*case, data)


@settings(max_examples=20, deadline=None)
@given(case=divided_sites(), data=st.data())
def test_steps_lose_no_pod_with_partitions(
    case: tuple[Site, PodRequest], data: st.DataObject
) -> None:
    run(*case, data)
