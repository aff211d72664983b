# SPDX-License-Identifier: Apache-2.0
"""Ways to start a refused pod: which are offered, at which cost, and none that does not help."""

from typing import Any

from hami_common.events.allocation import AllocationRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.placement import Placement
from hami_common.model.request import PodRequest
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import FeedSynced, RecordSeen, Repaired
from hami_core.placement.pick import pick
from hami_core.planning.defrag import Tenant
from hami_core.planning.ways import (
    MOVE_COST,
    NODE_COST,
    WAIT_COST,
    Surroundings,
    Way,
    standing,
)
from hami_core.planning.whatif import Governed
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.queues import QueueTree
from hami_core.quota.resourcequota import Limit, Quota, Resource
from hami_core.table.table import DeviceTable
from tests.support import builders

NOW_S = 10_000.0


class Site:
    """Nodes with devices of 1,000 MiB, and the pods that run there."""

    def __init__(self, **devices: int) -> None:
        self.inventory = [
            builders.node_devices(
                node,
                [builders.device(f"{node}-{n}", index=n, memory_mib=1000) for n in range(count)],
            )
            for node, count in devices.items()
        ]
        table = DeviceTable()
        for some in self.inventory:
            table.upsert_node(some)
        self.ledger = Ledger(table, writer="test")
        self.ledger.handle(FeedSynced(now_s=NOW_S))
        self.ledger.handle(Repaired(now_s=NOW_S))
        self.tenants: list[Tenant] = []

    def start(self, name: str, node: str, mib: int, *, age_s: float = 60, **record: Any) -> None:
        request = pod(name, mib)
        placed = pick(self.ledger.table, request, node)
        assert isinstance(placed, Placement)
        self.tenants.append(Tenant(request=request, node=node, containers=placed.containers))
        seen = AllocationRecord(
            op="reserve",
            allocation_id=name,
            node=node,
            pod_uid=name,
            namespace="team",
            pod=name,
            containers=placed.containers,
            time_s=NOW_S - age_s,
            **record,
        )
        self.ledger.handle(RecordSeen(seq=len(self.tenants), record=seen, now_s=NOW_S))

    def around(self, **more: Any) -> Surroundings:
        return Surroundings(now_s=NOW_S, tenants=self.tenants, inventory=self.inventory, **more)

    def ways(self, request: PodRequest, **more: Any) -> dict[str, Way]:
        """Return the ways by kind, the cheapest of each; the ledger must be as before."""
        before = list(self.ledger.table.usages())
        found = standing(self.ledger, request, self.around(**more)).closest
        assert list(self.ledger.table.usages()) == before
        self.ledger.check()
        costs = [way.cost for way in found]
        assert costs == sorted(costs)
        return {way.kind: way for way in reversed(found)}


def pod(name: str, mib: int) -> PodRequest:
    return builders.pod(builders.ask(mib=mib), uid=name, name=name)


def test_every_way_is_found_and_the_cheapest_is_first() -> None:
    site = Site(a=1, b=1)
    site.start("half", "a", 400)
    site.start("most", "b", 550, age_s=7200)
    found = site.ways(pod("wanted", 700))
    assert found["less"].change is not None
    assert (found["less"].change.fits, found["less"].node) == ("600", "a")
    assert [(m.pod, m.source, m.target) for m in found["move"].moves] == [("half", "a", "b")]
    assert (found["move"].cost, found["move"].node) == (MOVE_COST, "a")
    (ends,) = found["wait"].ends
    assert (ends.namespace, ends.name, ends.memory_mib, ends.age_s) == ("team", "half", 400, 60)
    assert (found["wait"].cost, found["wait"].node) == (WAIT_COST, "a")
    assert (found["node"].cost, found["node"].like) == (NODE_COST, "a")
    assert list(found) == ["node", "wait", "move", "less"]


def test_pod_that_no_node_could_ever_take_can_only_ask_for_less() -> None:
    site = Site(a=1)
    site.start("half", "a", 400)
    assert set(site.ways(pod("wanted", 1001))) == {"less"}


def test_no_move_is_offered_where_no_other_node_has_capacity() -> None:
    site = Site(a=1, b=1)
    site.start("large", "a", 700)
    site.start("other", "b", 700)
    assert set(site.ways(pod("wanted", 700))) == {"less", "wait", "node"}


def test_the_fewest_pods_of_one_node_have_to_end() -> None:
    site = Site(a=1, b=1)
    for number in range(3):
        site.start(f"a{number}", "a", 300)
        site.start(f"b{number}", "b", 450 if number < 2 else 50)
    found = site.ways(pod("wanted", 500))
    assert [end.name for end in found["wait"].ends] == ["b0"]
    found = site.ways(pod("wanted", 600))
    assert [(found["wait"].node, len(found["wait"].ends)), found["wait"].cost] == [
        ("a", 2),
        2 * WAIT_COST,
    ]


def test_holders_that_are_no_pods_are_named_by_their_kind() -> None:
    site = Site(a=1)
    site.start("claimed", "a", 900, origin="claim")
    (ends,) = site.ways(pod("wanted", 500))["wait"].ends
    assert (ends.kind, ends.name) == ("claim", "claimed")


def test_excluded_nodes_offer_no_way() -> None:
    site = Site(a=1, b=1)
    site.start("half", "a", 900)
    found = site.ways(pod("wanted", 700), excluded={"b": "taint x", "a": "taint x"})
    assert set(found) == {"node"}  # without the pod's manifest, an added node has no taints
    document = {
        "metadata": {"name": "a"},
        "spec": {"taints": [{"key": "x", "effect": "NoSchedule"}]},
    }
    nodes = {name: {**document, "metadata": {"name": name}} for name in "ab"}
    excluded = dict.fromkeys("ab", "taint x")
    wanted = {"metadata": {"name": "wanted"}, "spec": {}}
    assert site.ways(pod("wanted", 700), excluded=excluded, documents=nodes, pod=wanted) == {}


def test_quota_is_not_lifted_by_pods_that_end_or_by_nodes() -> None:
    site = Site(a=1)
    site.start("half", "a", 900)
    limit = Limit(key="limits.nvidia.com/gpumem", most=500)
    quota = QuotaLedger()
    limits = {Resource("nvidia", "memory_mib"): limit}
    quota.put_quota(Quota(namespace="default", name="q", limits=limits))
    quota.set_tree(QueueTree())
    wanted, governed = pod("wanted", 700), Governed(quota)
    now = standing(site.ledger, wanted, site.around(), governed=governed)
    assert {way.kind for way in now.closest} == {"less"}
    site = Site(a=1)
    now = standing(site.ledger, wanted, site.around(), governed=governed)
    assert (now.nodes, now.feasible, now.best) == (1, 0, "")
    assert now.refusals[0].text.startswith("ResourceQuotaNotFit")
    assert [way.change.fits for way in now.closest if way.change] == ["500"]
    assert quota.quota_rows()[0].used == 0
    assert quota.claims() == {}


def test_nodes_that_kube_scheduler_excludes_do_not_count() -> None:
    site = Site(a=1, b=1, c=1)
    around = site.around(excluded={"a": "the pod's nodeSelector", "gone": "taint x"})
    now = standing(site.ledger, pod("p", 100), around)
    assert (now.nodes, now.feasible, now.best, now.closest) == (3, 2, "b", ())
    assert [(r.text, r.nodes) for r in now.refusals] == [("excluded by the pod's nodeSelector", 1)]
    around = Surroundings(now_s=NOW_S, excluded=dict.fromkeys("ab", "taint x"))
    large = standing(site.ledger, pod("large", 1500), around)
    assert {way.node for way in large.closest} == {"c"}
    around = Surroundings(now_s=NOW_S, excluded=dict.fromkeys("abc", "taint x"), unmoved="why")
    none = standing(site.ledger, pod("p", 100), around)
    assert (none.nodes, none.feasible, none.best, none.closest) == (3, 0, "", ())
    assert none.unmoved == "why"


def test_kinds_of_nodes_are_tried_until_one_takes_the_pod() -> None:
    site = Site(a=1, b=1)
    large = builders.node_devices("large", [builders.device("large-0", memory_mib=2000)])
    site.ledger.table.upsert_node(large)
    inventory: list[NodeDevices] = [*site.inventory, large]
    site.start("filler", "large", 1800)
    around = Surroundings(now_s=NOW_S, inventory=inventory)
    ways = standing(site.ledger, pod("wanted", 1500), around).closest
    assert [(way.kind, way.like) for way in ways if way.kind == "node"] == [("node", "large")]
