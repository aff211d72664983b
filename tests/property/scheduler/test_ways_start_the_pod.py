# SPDX-License-Identifier: Apache-2.0
"""Each way to start a refused pod, applied to a table, makes the pod fit on the named node."""

from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_common.events.allocation import AllocationRecord
from hami_common.model.device import Device
from hami_common.model.placement import Placement
from hami_common.model.request import DeviceRequest, PodRequest
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import FeedSynced, RecordSeen, Repaired
from hami_core.placement.pick import pick
from hami_core.placement.verdicts import Verdicts
from hami_core.planning.defrag import Tenant
from hami_core.planning.ways import Surroundings, Way, standing
from hami_core.planning.whatif import Change
from hami_core.table.table import DeviceTable
from tests.support import builders

NODES = ("a", "b", "c")
devices = st.builds(
    builders.device,
    st.just(""),
    memory_mib=st.sampled_from((1000, 2000)),
    slots=st.integers(1, 3),
    healthy=st.sampled_from((True, True, True, False)),
)


def asks(least_mib: int, most_mib: int) -> st.SearchStrategy[DeviceRequest]:
    """Requests of some hundred MiB on one or two devices."""
    return st.builds(
        builders.ask,
        st.sampled_from((1, 1, 2)),
        mib=st.integers(least_mib // 100, most_mib // 100).map(lambda n: n * 100),
        core=st.sampled_from((0, 0, 30, 60)),
    )


def numbered(node: str, some: list[Device]) -> list[Device]:
    return [replace(one, uuid=f"{node}-{n}", index=n) for n, one in enumerate(some)]


def asked_less(request: PodRequest, change: Change) -> PodRequest:
    """The pod with the change of an amount; every pod here has one request."""
    (container,) = request.containers
    (ask,) = container.requests
    names, values = change.what.split(" and "), map(int, change.fits.split(" and "))
    smaller = replace(ask, **dict(zip(names, values, strict=True)))
    return replace(request, containers=(replace(container, requests=(smaller,)),))


class Site:
    """A ledger that can be built again as it was."""

    def __init__(self, inventory: dict[str, list[Device]]) -> None:
        self.inventory = [builders.node_devices(node, some) for node, some in inventory.items()]
        self.records: list[AllocationRecord] = []
        self.tenants: list[Tenant] = []
        self.ledger = self.again()

    def again(self) -> Ledger:
        table = DeviceTable()
        for some in self.inventory:
            table.upsert_node(some)
        ledger = Ledger(table, writer="test")
        for number, record in enumerate(self.records, start=1):
            ledger.handle(RecordSeen(seq=number, record=record, now_s=0.0))
        ledger.handle(FeedSynced(now_s=0.0))
        ledger.handle(Repaired(now_s=0.0))
        return ledger

    def start(self, request: PodRequest, node: str) -> None:
        placed = pick(self.ledger.table, request, node)
        if not isinstance(placed, Placement):
            return
        self.tenants.append(Tenant(request=request, node=node, containers=placed.containers))
        self.records.append(
            AllocationRecord(
                op="reserve",
                allocation_id=request.uid,
                node=node,
                pod_uid=request.uid,
                namespace="team",
                pod=request.uid,
                containers=placed.containers,
            )
        )
        self.ledger = self.again()

    def applied(self, way: Way, request: PodRequest) -> tuple[DeviceTable, PodRequest]:
        """Return a table and the request after the way."""
        table = self.again().table
        match way.kind:
            case "less":
                assert way.change is not None
                return table, asked_less(request, way.change)
            case "wait":
                names = {end.name for end in way.ends}
                gone = [one for one in self.records if one.pod in names]
                assert {one.node for one in gone} == {way.node}
                for record in gone:
                    table.unbook(record.node, record.containers)
            case "move":
                requests = {one.request.uid: one.request for one in self.tenants}
                for move in way.moves:
                    table.unbook(move.source, move.gives)
                    assert move.target in Verdicts(table).filter(requests[move.uid], NODES).feasible
                    table.book(move.target, move.takes)
            case "node":
                like = next(some for some in self.inventory if some.node == way.like)
                fresh = [replace(one, uuid=f"new-{one.uuid}", healthy=True) for one in like.devices]
                table.upsert_node(replace(like, node=way.node, devices=tuple(fresh)))
        return table, request


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_way_that_is_applied_makes_the_pod_fit(data: st.DataObject) -> None:
    site = Site(
        {
            node: numbered(node, data.draw(st.lists(devices, min_size=1, max_size=2)))
            for node in NODES
        }
    )
    for number in range(data.draw(st.integers(3, 9))):
        site.start(
            builders.pod(data.draw(asks(200, 900)), uid=f"p{number}", name=f"p{number}"),
            data.draw(st.sampled_from(NODES)),
        )
    request = builders.pod(data.draw(asks(600, 2100)), uid="wanted", name="wanted")
    excluded = {"a": "taint x"} if data.draw(st.booleans()) else {}
    offered = [node for node in NODES if node not in excluded]
    if Verdicts(site.ledger.table).filter(request, offered).feasible:
        return
    around = Surroundings(
        now_s=0.0, tenants=site.tenants, inventory=site.inventory, excluded=excluded
    )
    before = list(site.ledger.table.usages())
    ways = standing(site.ledger, request, around).closest
    assert list(site.ledger.table.usages()) == before
    assert [way.cost for way in ways] == sorted(way.cost for way in ways)
    for way in ways:
        event(way.kind)
        table, changed = site.applied(way, request)
        fitting = Verdicts(table).filter(changed, [*offered, way.node]).feasible
        assert way.node in fitting, way
        assert way.node not in excluded
        if way.kind == "wait":
            least_waits(site, request, offered, len(way.ends))


def least_waits(site: Site, request: PodRequest, offered: list[str], count: int) -> None:
    """Verify that no pod alone would be enough where several have to end."""
    if count == 1:
        return
    for record in site.records:
        table = site.again().table
        table.unbook(record.node, record.containers)
        assert not Verdicts(table).filter(request, offered).feasible
