# SPDX-License-Identifier: Apache-2.0
"""A snapshot and the deltas after it equal a later snapshot, wherever they are cut.

Two replicas read the same entries, each at its own pace; a client moves between them with its
position, as a browser does behind a load balancer.
"""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hami_common.events.allocation import Account, AllocationRecord, StateRecord
from hami_common.events.inventory import NodeDevices
from hami_common.events.usage import DeviceUse, UsageRecord
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_registry.core.fleet import Fleet, Position, document
from hami_registry.core.projection import Projection
from tests.support.fleet import Document, FleetClient

NODES = [f"n{number}" for number in range(20)]
NAMESPACES = ("team-a", "team-b")

Item = tuple[str, int, Any]


class Replica:
    """One registry's fleet, reading each source in its order."""

    def __init__(self) -> None:
        self.projection = Projection(liveness_s=15)
        self.fleet = Fleet(self.projection, foreign_margin_mib=0)
        self.is_started = False

    def start(self) -> None:
        for source in ("devices", "ledger", "states", "usage"):
            self.fleet.complete(source)
        self.is_started = True

    def read(self, source: str, revision: int, message: Any) -> None:
        key = f"{message.node}.{getattr(message, 'pod_uid', '')}"
        if source == "devices":
            self.projection.devices_seen(message)
        elif source == "ledger":
            self.projection.record_seen(key, revision, message)
        elif source == "states":
            self.projection.state_seen(key, revision, message)
        else:
            self.fleet.usage_seen(revision, message)
            return
        self.fleet.seen(source, revision, message.node)

    def beat(self, nodes: list[str], now_s: float) -> None:
        for node in nodes:
            self.projection.heartbeat_seen(node, ("nvidia",), now_s=now_s)

    def flush(self, now_s: float) -> tuple[Any, Any]:
        while self.fleet.rebuild(1):
            pass
        self.fleet.beat(now_s=now_s)
        return self.fleet.changes()

    def packed(self, blocks: Any, silent: Any, namespace: str) -> Document:
        found = document(
            blocks, position=self.fleet.position, time_s=1.0, namespace=namespace, silent=silent
        )
        decoded: Document = msgspec.json.decode(msgspec.json.encode(found))
        return decoded

    def snapshot(self, namespace: str) -> Document:
        return self.packed(self.fleet.blocks(), self.fleet.silent, namespace)


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
            )
            for index in range(draw(st.integers(0, 3)))
        ),
    )


@st.composite
def records(draw: st.DrawFn) -> AllocationRecord:
    op = draw(st.sampled_from(["reserve", "reserve", "release"]))
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


@st.composite
def usage(draw: st.DrawFn) -> UsageRecord:
    return UsageRecord(
        node=draw(st.sampled_from(NODES)),
        boot_id="1",
        seq=1,
        time_s=0.0,
        devices=(DeviceUse(vendor="nvidia", uuid="g0", used_mib=draw(st.integers(0, 3)) * 30),),
    )


entries = st.one_of(
    st.tuples(st.just("devices"), devices()),
    st.tuples(st.just("ledger"), records()),
    st.tuples(st.just("states"), states()),
    st.tuples(st.just("usage"), usage()),
)


@given(st.data())
def test_deltas_from_any_cut_equal_a_later_snapshot(data: st.DataObject) -> None:
    namespace = data.draw(st.sampled_from(["", "team-a"]))
    written: dict[str, list[Item]] = {name: [] for name in ("devices", "ledger", "states", "usage")}
    for revision, (source, message) in enumerate(data.draw(st.lists(entries, max_size=40)), 1):
        written[source].append((source, revision, message))
    replicas = [Replica(), Replica()]
    read = [dict.fromkeys(written, 0) for _ in replicas]
    # Both replicas started before: what is stored then is known to neither as a change.
    stored = {source: data.draw(st.integers(0, len(items))) for source, items in written.items()}
    for number, replica in enumerate(replicas):
        for source, items in written.items():
            for item in items[: stored[source]]:
                replica.read(*item)
            read[number][source] = stored[source]
        replica.start()
        replica.flush(0.0)
    at = data.draw(st.integers(0, 1))
    client = FleetClient(replicas[at].snapshot(namespace))
    now_s = 100.0
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(["read", "read", "flush", "beat", "move"]))
        number = data.draw(st.integers(0, 1))
        replica = replicas[number]
        if step == "read":
            source = data.draw(st.sampled_from(list(written)))
            most = len(written[source]) - read[number][source]
            for _ in range(data.draw(st.integers(0, most))):
                replica.read(*written[source][read[number][source]])
                read[number][source] += 1
        elif step == "beat":
            replica.beat(data.draw(st.lists(st.sampled_from(NODES), max_size=4)), now_s)
            now_s += data.draw(st.sampled_from([1.0, 20.0]))
        elif step == "flush":
            blocks, silent = replica.flush(now_s)
            if number == at and (blocks or silent is not None):
                client.apply(replica.packed(blocks, silent, namespace))
        else:
            at = number
            client = resumed(client, replica, now_s, namespace)
    for number, replica in enumerate(replicas):
        for source, items in written.items():
            for item in items[read[number][source] :]:
                replica.read(*item)
    blocks, silent = replicas[at].flush(now_s)
    client.apply(replicas[at].packed(blocks, silent, namespace))
    later = FleetClient(replicas[at].snapshot(namespace))
    assert client.shown() == later.shown()
    assert client.id == later.id
    if namespace:
        text = str(client.shown())
        assert "team-b" not in text


def resumed(client: FleetClient, replica: Replica, now_s: float, namespace: str) -> FleetClient:
    """The client at another replica: with the changes since its position, or a new snapshot."""
    replica.flush(now_s)
    blocks = replica.fleet.since(Position.parse(client.id))
    if blocks is None:
        return FleetClient(replica.snapshot(namespace))
    client.apply(replica.packed(blocks, replica.fleet.silent, namespace))
    return client


def test_a_position_before_the_start_or_ahead_of_the_bus_is_not_known() -> None:
    replica = Replica()
    one = NodeDevices(node="n", vendor="nvidia", boot_id="1", seq=1, time_s=0, config_generation=1)
    replica.read("devices", 5, one)
    assert replica.fleet.since(Position(5)) is None
    replica.start()
    replica.flush(0.0)
    assert replica.fleet.since(Position(5)) == []
    assert replica.fleet.since(Position(4)) is None
    assert replica.fleet.since(Position(6)) is None
    replica.fleet.reset("devices")
    assert replica.fleet.since(Position(5)) is None
