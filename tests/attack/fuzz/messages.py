# SPDX-License-Identifier: Apache-2.0
"""Makes bus messages as the holder of a stolen login would send them.

The agent's login of node ``OWN`` covers reports, heartbeats, faults, states and events of that
node; the payload may name any other node. Records, devices, decisions and questions take the login
of a central service. All go to subjects of ``OWN`` or of nodes that do not exist, because whatever
such a login writes there about another node would be believed.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from hami_common.bus import subjects
from hami_common.events.allocation import AllocationRecord, CarriedShare, StateRecord
from hami_common.events.breach import BreachProcess, BreachRecord
from hami_common.events.decision import (
    AdmissionRecord,
    Amounts,
    DecisionRecord,
    DeviceHolder,
    NodeScore,
    RefusalClass,
    RefusedDevice,
    RefusedNode,
)
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices, NodeReport
from hami_common.events.partition import PartitionRecord
from hami_common.model.device import Device, DeviceFacts, Link, Profile
from hami_common.model.placement import ContainerShares, Share
from tests.attack.fuzz.inputs import NUMBERS, STRINGS, damaged, encoded, mutated, pick
from tests.attack.fuzz.laws import Case

OWN = "gpu-b"
OTHER = "gpu-a.example"
"""The node that has to keep working."""
NODES = (OWN, OTHER, "gpu-z", "gpu-z.example")
VENDORS = ("nvidia", "ascend", "amd", "x")
BOOTS = ("1", "1700000000-a", "9999999999-a", "~~~~", "", "z" * 300, "0")
TOKENS = ("a", "uid-1", "host", "x" * 200, "-", "_", "A_b", "%20", "*x", "é")
PAYLOAD_MOST = 900_000
INTEGERS = tuple(number for number in NUMBERS if isinstance(number, int))


def _numbered(chance: random.Random) -> dict[str, Any]:
    return {"boot_id": pick(chance, BOOTS), "seq": chance.randrange(1 << 40), "time_s": 0.0}


def _facts(chance: random.Random, node: str) -> list[DeviceFacts]:
    return [
        DeviceFacts(
            uuid=f"GPU-{node}-{index}",
            vendor="nvidia",
            index=index,
            type=pick(chance, ("NVIDIA A100", "x", "a" * 500)),
            memory_mib=40_960,
            numa=pick(chance, (None, 0, 1)),
            partitions=(Profile(name="1g", memory_mib=5_000, size=1, starts=(0, 1)),)
            if chance.random() < 0.2
            else (),
            resources={"slices": 7} if chance.random() < 0.2 else {},
            attributes={"compute_capability": "8.0"},
        )
        for index in range(chance.randrange(4))
    ]


def _report(chance: random.Random, node: str) -> msgspec.Struct:
    return NodeReport(
        node=node,
        vendor=pick(chance, VENDORS[:2]),
        **_numbered(chance),
        devices=tuple(_facts(chance, node)),
        links=(Link(a=f"GPU-{node}-0", b=f"GPU-{node}-1", score=9),),
        driver_version="1",
    )


def _devices(chance: random.Random, node: str) -> msgspec.Struct:
    return NodeDevices(
        node=node,
        vendor="nvidia",
        **_numbered(chance),
        config_generation=1,
        devices=tuple(
            Device(
                uuid=facts.uuid,
                vendor="nvidia",
                index=facts.index,
                type=facts.type,
                memory_mib=facts.memory_mib,
                capacity_mib=facts.memory_mib,
                partitions=facts.partitions,
                resources=facts.resources,
            )
            for facts in _facts(chance, node)
        ),
        links=(Link(a=f"GPU-{node}-0", b=f"GPU-{node}-1", score=9),),
    )


def _heartbeat(chance: random.Random, node: str) -> msgspec.Struct:
    own, others = pick(chance, ((("nvidia",), ()), ((), ("nvidia",)), ((), ())))
    return Heartbeat(node=node, **_numbered(chance), vendors=own, unserved=others)


def _fault(chance: random.Random, node: str) -> msgspec.Struct:
    return DeviceFault(
        node=node,
        vendor="nvidia",
        uuid=f"GPU-{node}-0",
        **_numbered(chance),
        healthy=chance.random() < 0.3,
        reason="x",
    )


def _shares(chance: random.Random, node: str) -> tuple[ContainerShares, ...]:
    share = Share(
        vendor="nvidia",
        uuid=f"GPU-{node}-0",
        memory_mib=pick(chance, (1, 1000, 40_960)),
        core_pct=pick(chance, (0, 10, 100)),
        profile=pick(chance, ("", "1g")),
        start=pick(chance, (None, 0, 1)),
    )
    return (ContainerShares(name="main", kind="app", shares=(share,)),)


def _record(chance: random.Random, node: str) -> msgspec.Struct:
    return AllocationRecord(
        op=pick(chance, ("reserve", "resize", "release")),
        allocation_id="a-1",
        node=node,
        pod_uid=f"uid-{chance.randrange(20)}",
        namespace="team",
        pod="train",
        containers=_shares(chance, node),
        lease_s=pick(chance, (0.0, 30.0, 1e12, -1.0)),
        held_for=pick(chance, ("", "preemption", "gang team/g", "x")),
        awaits=pick(chance, ((), ("uid-1",))),
    )


def _state(chance: random.Random, node: str) -> msgspec.Struct:
    return StateRecord(
        state=pick(chance, ("bound", "prepared", "running", "failed")),
        allocation_id="a-1",
        node=node,
        pod_uid=f"uid-{chance.randrange(20)}",
        namespace="team",
        pod="train",
        ledger_seq=chance.randrange(100),
        boot_id=pick(chance, BOOTS),
        containers=("main",),
        carried=(CarriedShare(container="main", number=0, names={"mig_uuid": "MIG-x"}),),
    )


def _refused_device(chance: random.Random) -> RefusedDevice:
    return RefusedDevice(
        uuid="GPU-0",
        code="CardInsufficientMemory",
        wanted=Amounts(memory_mib=1000, slots=1),
        free=Amounts(memory_mib=pick(chance, (-1, 0, 999))),
        holders=(DeviceHolder(namespace=pick(chance, ("team", "other")), name="p", memory_mib=1),),
    )


def _decision(chance: random.Random, node: str) -> msgspec.Struct:
    return DecisionRecord(
        verb=pick(chance, ("filter", "bind", "preempt", "gang")),
        namespace="team",
        pod="train",
        pod_uid="uid-1",
        time_s=0.0,
        verdict=pick(chance, ("placed", "refused", "error")),
        snapshot_id="1.1",
        feasible=(NodeScore(node=node, score=1.0),),
        refusals=(RefusalClass(code="X", text="x", count=1, nodes=(node,)),),
        closest=(RefusedNode(node=node, code="X", devices=(_refused_device(chance),)),),
        node=node,
        containers=_shares(chance, node),
    )


def _admission(chance: random.Random, node: str) -> msgspec.Struct:
    del node
    return AdmissionRecord(
        namespace="team",
        pod="train",
        operation="CREATE",
        request_uid=f"u-{chance.randrange(1 << 30)}",
        time_s=pick(chance, (0.0, 1e18, -1.0)),
        allowed=True,
    )


def _breach(chance: random.Random, node: str) -> msgspec.Struct:
    return BreachRecord(
        kind=pick(chance, ("memory", "compute", "foreign")),
        node=node,
        vendor="nvidia",
        uuid="GPU-x",
        **_numbered(chance),
        pod_uid="uid-1",
        processes=(BreachProcess(pid=1, command="x"),),
    )


def _partition(chance: random.Random, node: str) -> msgspec.Struct:
    return PartitionRecord(
        change=pick(chance, ("created", "adopted", "removed", "failed")),
        node=node,
        vendor="nvidia",
        uuid="GPU-x",
        **_numbered(chance),
        instance_id="1",
    )


_MAKERS = {
    "report": _report,
    "heartbeat": _heartbeat,
    "fault": _fault,
    "state": _state,
    "record": _record,
    "devices": _devices,
    "decision": _decision,
    "admission": _admission,
    "breach": _breach,
    "partition": _partition,
}
_PREFIXES = {
    "report": f"{subjects.REPORT_PREFIX}.",
    "heartbeat": f"{subjects.HEARTBEAT_PREFIX}.",
    "fault": f"{subjects.FAULT_PREFIX}.",
    "state": f"$KV.{subjects.STATE_BUCKET}.",
    "record": f"$KV.{subjects.ALLOC_BUCKET}.",
    "devices": f"$KV.{subjects.DEVICES_BUCKET}.",
    "decision": f"{subjects.EVENT_PREFIX}.decision.",
    "admission": f"{subjects.EVENT_PREFIX}.admission.",
    "breach": f"{subjects.EVENT_PREFIX}.breach.",
    "partition": f"{subjects.EVENT_PREFIX}.partition.",
    "ask": f"{subjects.ASK_PREFIX}.",
    "records": f"{subjects.RECORDS_PREFIX}.",
    "alloc": f"{subjects.ALLOC_FEED_PREFIX}.",
    "letter": f"{subjects.DEAD_LETTER_PREFIX}.registry.",
}
KINDS = tuple(_PREFIXES)


def _subject(chance: random.Random, kind: str, payload: dict[str, Any]) -> str:
    """Return the subject that belongs to a payload, or one that nearly does."""
    node = OWN if chance.random() < 0.9 else pick(chance, TOKENS)
    last = {
        "report": payload.get("vendor", ""),
        "devices": "nvidia",
        "state": payload.get("pod_uid", ""),
        "record": payload.get("pod_uid", ""),
        "breach": "uid-1",
        "partition": "nvidia",
        "ask": pick(chance, ("usage", "check", "resize", "x")),
        "records": pick(chance, (*subjects.BUCKETS, "x")),
        "alloc": "uid-1",
        "letter": "x",
        "decision": "train",
        "admission": "train",
    }.get(kind, "")
    if last and chance.random() < 0.1:
        last = pick(chance, TOKENS)
    parts = [node, last] if last else [node]
    if chance.random() < 0.03:
        parts.append(pick(chance, TOKENS))
    return _PREFIXES[kind] + ".".join(part.replace(" ", "_") for part in parts)


def make(chance: random.Random, kinds: Sequence[str] = KINDS) -> Case:
    """Make one message; in half of them the payload's node differs from the subject's."""
    kind = pick(chance, kinds)
    maker = _MAKERS.get(kind)
    payload: dict[str, Any] = {"id": "1", "namespace": "team", "pod": "train", "memory_mib": 1}
    if maker is not None:
        node = OWN if chance.random() < 0.5 else pick(chance, NODES)
        payload = msgspec.json.decode(msgspec.json.encode(maker(chance, node)))
    subject = _subject(chance, kind, payload)
    draw = chance.random()
    if draw < 0.6:
        _spoiled(chance, payload)
    document = mutated(payload, chance, times=chance.randint(1, 3)) if draw > 0.75 else payload
    body = encoded(document)
    if chance.random() < 0.1:
        body = damaged(body, chance)
    if chance.random() < 0.02:
        body = b""
    return Case(kind=subject, body=body[:PAYLOAD_MOST])


def _spoiled(chance: random.Random, payload: Any) -> None:
    """Replace one number or text, at any depth, by a hostile one of the same type."""
    places = [*_leaves(payload)]
    if not places:
        return
    place, key = pick(chance, places)
    value = place[key]
    if isinstance(value, bool):
        place[key] = not value
    elif isinstance(value, int):
        place[key] = pick(chance, INTEGERS)
    elif isinstance(value, float):
        place[key] = pick(chance, NUMBERS)
    else:
        place[key] = pick(chance, STRINGS)


def _leaves(payload: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the place of every number and text."""
    for key, value in payload.items() if isinstance(payload, dict) else enumerate(payload):
        if isinstance(value, dict | list):
            yield from _leaves(value)
        elif isinstance(value, int | float | str):
            yield payload, key


def is_of(kind: str, subject: str) -> bool:
    """Return whether messages of the kind are sent on the subject."""
    return subject.startswith(_PREFIXES[kind])
