# SPDX-License-Identifier: Apache-2.0
"""A snapshot and the deltas after it equal a later snapshot, wherever they are cut.

Two replicas read the same entries, each at its own pace; a client moves between them with its
position, as a browser does behind a load balancer.
"""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hami_common.events.allocation import Account, AllocationOp, AllocationRecord, StateRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_registry.core.fleet import SOURCES, Position
from tests.support.fleet import FleetClient
from tests.support.fleet_history import Replica

NODES = [f"n{number}" for number in range(20)]
NAMESPACES = ("team-a", "team-b")


@st.composite
def devices(draw: st.DrawFn) -> NodeDevices:
    return NodeDevices(
        node=draw(st.sampled_from(NODES)),
        vendor="nvidia",
        boot_id="1",
        seq=1,
        time_s=0.0,
        config_generation=1,
        problem=draw(st.sampled_from(["", "driver missing"])),
        devices=tuple(
            Device(
                uuid=f"g{index}",
                vendor="nvidia",
                index=index,
                type=draw(st.sampled_from(["A100", "H200"])),
                memory_mib=100,
                capacity_mib=100,
                slots=2,
                healthy=draw(st.booleans()),
                cordoned=draw(st.booleans()),
                foreign_mib=draw(st.integers(0, 3)) * 30,
            )
            for index in range(draw(st.integers(0, 3)))
        ),
    )


@st.composite
def records(draw: st.DrawFn) -> AllocationRecord:
    op: AllocationOp = draw(st.sampled_from(("reserve", "reserve", "release")))
    uid = draw(st.sampled_from(["u1", "u2", "u3"]))
    share = Share(
        vendor="nvidia",
        uuid=draw(st.sampled_from(["g0", "g1", "g9"])),
        memory_mib=draw(st.integers(1, 60)),
        core_pct=draw(st.integers(0, 100)),
        exclusive=draw(st.booleans()),
    )
    return AllocationRecord(
        op=op,
        allocation_id=draw(st.sampled_from(["x", "y"])),
        node=draw(st.sampled_from(NODES)),
        pod_uid=uid,
        namespace=draw(st.sampled_from(NAMESPACES)),
        pod=f"pod-{uid}",
        containers=()
        if op == "release"
        else (ContainerShares(name="main", kind="app", shares=(share,)),),
        account=draw(st.sampled_from([None, Account(queue="q", priority_class="high")])),
    )


@st.composite
def states(draw: st.DrawFn) -> StateRecord:
    uid = draw(st.sampled_from(["u1", "u2", "u3"]))
    return StateRecord(
        state=draw(st.sampled_from(["bound", "running"])),
        allocation_id=draw(st.sampled_from(["x", "y"])),
        node=draw(st.sampled_from(NODES)),
        pod_uid=uid,
        namespace="team-a",
        pod=f"pod-{uid}",
        ledger_seq=1,
    )


entries = st.one_of(
    st.tuples(st.just("devices"), devices()),
    st.tuples(st.just("ledger"), records()),
    st.tuples(st.just("states"), states()),
)


class Site:
    """Two replicas that read the same sources, and a client that moves between them."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw
        self.namespace = self._draw(st.sampled_from(["", "team-a"]))
        self._written: dict[str, list[tuple[int, Any]]] = {source: [] for source in SOURCES}
        for revision, (source, message) in enumerate(self._draw(st.lists(entries, max_size=40)), 1):
            self._written[source].append((revision, message))
        self._replicas = [Replica(), Replica()]
        self._read = [dict.fromkeys(SOURCES, 0) for _ in self._replicas]
        # Both replicas start later than this: what is stored by then is a change for neither.
        stored = {s: self._draw(st.integers(0, len(self._written[s]))) for s in SOURCES}
        for number, replica in enumerate(self._replicas):
            for source in SOURCES:
                self._read_on(number, source, stored[source])
            replica.start()
            replica.flush(0.0)
        self._at = self._draw(st.integers(0, 1))
        self.now_s = 100.0
        self.client = self.fresh()

    def _read_on(self, number: int, source: str, amount: int) -> None:
        begin = self._read[number][source]
        for revision, message in self._written[source][begin : begin + amount]:
            self._replicas[number].read(source, revision, message)
        self._read[number][source] = begin + amount

    def _left(self, number: int, source: str) -> int:
        return len(self._written[source]) - self._read[number][source]

    def read(self, number: int) -> None:
        """A replica reads some entries of a source."""
        source = self._draw(st.sampled_from(SOURCES))
        self._read_on(number, source, self._draw(st.integers(0, self._left(number, source))))

    def read_all(self) -> None:
        """Both replicas read all there is."""
        for number in range(len(self._replicas)):
            for source in SOURCES:
                self._read_on(number, source, self._left(number, source))

    def beat(self, number: int) -> None:
        """A replica receives heartbeats of some nodes, and time passes."""
        nodes = self._draw(st.lists(st.sampled_from(NODES), max_size=4))
        self._replicas[number].beat(nodes, self.now_s)
        self.now_s += self._draw(st.sampled_from([1.0, 20.0]))

    def flush(self, number: int) -> None:
        """A replica sends its changes; the client is at one of them."""
        replica = self._replicas[number]
        blocks, silent = replica.flush(self.now_s)
        if number == self._at and (blocks or silent is not None):
            self.client.apply(replica.packed(blocks, silent, self.namespace))

    def move(self, number: int) -> None:
        """The client goes on at a replica: with the changes after its position, or a snapshot."""
        self._at, replica = number, self._replicas[number]
        replica.flush(self.now_s)
        blocks = replica.fleet.since(Position.parse(self.client.id))
        if blocks is None:
            self.client = self.fresh()
        else:
            self.client.apply(replica.packed(blocks, replica.fleet.silent, self.namespace))

    def finish(self) -> None:
        """Flush where the client is."""
        self.flush(self._at)

    def fresh(self) -> FleetClient:
        """A client that loads a snapshot now."""
        return FleetClient(self._replicas[self._at].snapshot(self.namespace))


@given(st.data())
def test_deltas_from_any_cut_equal_a_later_snapshot(data: st.DataObject) -> None:
    site = Site(data)
    steps = [site.read, site.read, site.beat, site.flush, site.move]
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(steps))
        step(data.draw(st.integers(0, 1)))
    site.read_all()
    site.finish()
    later = site.fresh()
    assert site.client.shown() == later.shown()
    assert not site.namespace or "team-b" not in str(site.client.shown())


def test_a_position_before_the_start_or_ahead_of_the_bus_is_not_known() -> None:
    replica = Replica()

    def at(devices: int) -> Position:
        return Position(devices, bus=replica.fleet.position.bus)

    one = NodeDevices(node="n", vendor="nvidia", boot_id="1", seq=1, time_s=0, config_generation=1)
    replica.read("devices", 5, one)
    assert replica.fleet.since(at(5)) is None
    replica.start()
    replica.flush(0.0)
    assert replica.fleet.since(at(5)) == []
    assert replica.fleet.since(at(4)) is None
    assert replica.fleet.since(at(6)) is None
    assert replica.fleet.since(Position(5)) is None, "of another bus"
    replica.fleet.reset("devices")
    assert replica.fleet.since(at(5)) is None
