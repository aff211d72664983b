# SPDX-License-Identifier: Apache-2.0
"""A fleet outside a service, and a recorded history of one for the unit tests of the console.

``python -m tests.support.fleet_history`` writes ``tests/golden/console/fleet.json``: a snapshot,
the events after it, a later snapshot, and the content that ``FleetClient`` then shows.
"""

import json
import random
from pathlib import Path
from typing import Any

import msgspec

from hami_common.events.allocation import Account, AllocationOp, AllocationRecord, StateRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Burst, Device
from hami_common.model.placement import ContainerShares, Share
from hami_registry.core.fleet import SOURCES, Fleet, document
from hami_registry.core.projection import Projection
from tests.support.fleet import Document, FleetClient

RECORDED = Path(__file__).parents[1] / "golden/console/fleet.json"
_NODES = 12
_GPUS = (("NVIDIA H200", 143_771), ("NVIDIA A30", 24_576))


class Replica:
    """One registry's fleet, reading each source in its order."""

    def __init__(self) -> None:
        self.projection = Projection(liveness_s=15)
        self.fleet = Fleet(self.projection)

    def start(self) -> None:
        for source in SOURCES:
            self.fleet.complete(source)

    def read(self, source: str, revision: int, message: Any) -> None:
        key = f"{message.node}.{getattr(message, 'pod_uid', '')}"
        if source == "devices":
            self.projection.devices_seen(message)
        elif source == "ledger":
            self.projection.record_seen(key, revision, message)
        else:
            self.projection.state_seen(key, revision, message)
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


def _bursts(chance: random.Random) -> tuple[Burst, ...]:
    mib = chance.choice((0, 0, 0, 256, 2048))
    return (Burst(pod_uid="u0", memory_mib=mib),) if mib else ()


def _devices(chance: random.Random, node: str) -> NodeDevices:
    model, memory_mib = chance.choice(_GPUS)
    return NodeDevices(
        node=node,
        vendor="nvidia",
        boot_id="1",
        seq=1,
        time_s=0.0,
        config_generation=1,
        problem=chance.choice(("", "", "driver missing")),
        devices=tuple(
            Device(
                uuid=f"g{index}",
                vendor="nvidia",
                index=index,
                type=model,
                memory_mib=memory_mib,
                capacity_mib=memory_mib,
                healthy=chance.random() < 0.9,
                health_reason="XID 79",
                cordoned=chance.random() < 0.1,
                foreign_mib=chance.choice((0, 0, 0, 3000, 9000)),
                bursts=_bursts(chance),
            )
            for index in range(chance.randrange(5))
        ),
    )


def _record(chance: random.Random, node: str) -> AllocationRecord:
    uid = f"u{chance.randrange(6)}"
    op: AllocationOp = "release" if chance.random() < 0.3 else "reserve"
    profile, start = chance.choice((("", None), ("", None), ("1g.18gb", 2), ("3g.71gb", 4)))
    shares = tuple(
        Share(
            vendor="nvidia",
            uuid=f"g{index}",
            memory_mib=chance.randrange(1, 9000),
            core_pct=chance.choice((0, 10, 50)),
            profile=profile,
            start=start,
        )
        for index in chance.sample(range(5), chance.choice((1, 1, 2)))
    )
    return AllocationRecord(
        op=op,
        allocation_id="x",
        node=node,
        pod_uid=uid,
        namespace=f"team-{chance.randrange(3)}",
        pod=f"pod-{uid}",
        time_s=1_763_683_200.0,
        account=Account(queue=chance.choice(("", "research")), priority_class="batch"),
        containers=(ContainerShares(name="main", kind="app", shares=shares),)
        if op == "reserve"
        else (),
    )


def _message(chance: random.Random, source: str) -> Any:
    node = f"gpu-{chance.randrange(_NODES):02d}"
    if source == "devices":
        return _devices(chance, node)
    if source == "ledger":
        return _record(chance, node)
    uid = f"u{chance.randrange(6)}"
    return StateRecord(
        state="running",
        allocation_id="x",
        node=node,
        pod_uid=uid,
        namespace="team-0",
        pod=f"pod-{uid}",
        ledger_seq=1,
    )


def history(seed: int = 1, events: int = 40) -> Document:
    """Return ``snapshot``, ``events``, ``later`` (a snapshot) and ``shown`` (its content)."""
    chance = random.Random(seed)
    replica = Replica()
    revision = 0

    def read(amount: int) -> None:
        nonlocal revision
        for source in chance.choices(SOURCES, weights=(3, 6, 2), k=amount):
            revision += 1
            replica.read(source, revision, _message(chance, source))

    for number in range(0, _NODES, 2):
        revision += 1
        replica.read("devices", revision, _devices(chance, f"gpu-{number:02d}"))
    read(60)
    replica.start()
    replica.flush(0.0)
    snapshot = replica.snapshot("")
    client = FleetClient(snapshot)
    deltas = []
    for number in range(events):
        read(chance.randrange(1, 5))
        replica.beat([f"gpu-{chance.randrange(_NODES):02d}"], number * 5.0)
        blocks, silent = replica.flush(number * 5.0)
        deltas.append(replica.packed(blocks, silent, ""))
        client.apply(deltas[-1])
    later = FleetClient(replica.snapshot(""))
    assert client.shown() == later.shown()
    return {
        "snapshot": snapshot,
        "events": deltas,
        "later": replica.snapshot(""),
        "shown": later.shown(),
    }


def recorded() -> str:
    """Return the recorded history as text."""
    return json.dumps(history(), separators=(",", ":")) + "\n"


if __name__ == "__main__":
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(recorded())
