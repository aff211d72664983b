# SPDX-License-Identifier: Apache-2.0
"""Details of a refusal: order of nodes, holders, and the bound on their size."""

from collections.abc import Sequence

import msgspec

from hami_common.bounds import LABEL_MOST, NAME_MOST
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.decision import (
    DETAIL_BYTES_MOST,
    DEVICES_DETAILED,
    HOLDERS_LISTED,
    NODES_DETAILED,
    Amounts,
    DecisionRecord,
    RefusedNode,
)
from hami_common.model.placement import ContainerShares
from hami_common.model.request import PodRequest
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from tests.support import builders


class Site:
    """A table with records of its bookings."""

    def __init__(self) -> None:
        self.table = DeviceTable()
        self.records: dict[str, list[AllocationRecord]] = {}

    def node(self, name: str, count: int = 1, *, mib: int = 1000, uuid: str = "") -> None:
        devices = [
            builders.device(f"{uuid or name}-{n}", index=n, memory_mib=mib, slots=40)
            for n in range(count)
        ]
        self.table.upsert_node(builders.node_devices(name, devices))

    def hold(self, node: str, uuid: str, mib: int, name: str, **more: str) -> None:
        share = builders.share(uuid, mib, 1)
        containers = (ContainerShares(name="main", kind="app", shares=(share,)),)
        self.table.book(node, containers)
        record = AllocationRecord(
            op="reserve",
            allocation_id=name,
            node=node,
            pod_uid=name,
            namespace=more.pop("namespace", "team"),
            pod=name,
            containers=containers,
            **more,  # type: ignore[arg-type]  # fields of text
        )
        self.records.setdefault(node, []).append(record)

    def details(self, request: PodRequest, names: Sequence[str]) -> tuple[RefusedNode, ...]:
        verdicts = Verdicts(self.table)
        filtered = verdicts.filter(request, names)
        found = verdicts.details(request, filtered, lambda node: self.records.get(node, ()))
        return found.nodes()


def test_device_shows_wanted_free_holders_and_the_constraint() -> None:
    site = Site()
    site.node("a", 2)
    site.hold("a", "a-0", 300, "small")
    site.hold("a", "a-0", 500, "large", namespace="other")
    site.hold("a", "a-1", 900, "claimed", origin="claim")
    site.hold("a", "a-1", 10, "job", held_for="workload team/job")
    (node,) = site.details(builders.pod(builders.ask(mib=400, core=5)), ["a"])
    assert (node.node, node.code, node.container, node.vendor, node.count) == (
        "a",
        "CardInsufficientMemory",
        "main",
        "nvidia",
        1,
    )
    first, second = node.devices
    assert (first.uuid, first.code) == ("a-0", "CardInsufficientMemory")
    assert first.wanted == Amounts(memory_mib=400, core_pct=5, slots=1)
    assert first.free == Amounts(memory_mib=200, core_pct=98, slots=38)
    assert [(one.kind, one.namespace, one.name, one.memory_mib) for one in first.holders] == [
        ("pod", "other", "large", 500),
        ("pod", "team", "small", 300),
    ]
    assert [(one.kind, one.name) for one in second.holders] == [
        ("claim", "claimed"),
        ("workload", "job"),
    ]


def test_closest_nodes_come_first_and_at_most_a_few_are_named() -> None:
    site = Site()
    for number in range(30):
        site.node(f"n{number:02}")
        site.hold(f"n{number:02}", f"n{number:02}-0", 500 + number, "held")
    site.node("idle-but-small", mib=100)
    names = ["absent", *site.table.nodes()]
    request = builders.pod(builders.ask(mib=600))
    found = site.details(request, names)
    assert [one.node for one in found] == [f"n{number:02}" for number in range(NODES_DETAILED)]
    cordoned = builders.device("c-0", memory_mib=1000, cordoned=True)
    site.table.upsert_node(builders.node_devices("cordoned", [cordoned]))
    found = site.details(request, ["absent", "cordoned", "n07", "n03"])
    assert [(one.node, one.code) for one in found] == [
        ("n03", "CardInsufficientMemory"),
        ("n07", "CardInsufficientMemory"),
        ("cordoned", "CardCordoned"),
        ("absent", "NodeUnregistered"),
    ]
    assert found[-1].devices == ()


def test_node_where_a_later_container_fails_is_closer() -> None:
    site = Site()
    site.node("one", 1)
    site.node("two", 2)
    site.hold("two", "two-1", 500, "held")
    parts = [builders.container(builders.ask(mib=600), name=name) for name in ("first", "second")]
    found = site.details(builders.pod(*parts), ["one", "two"])
    assert [(one.node, one.container) for one in found] == [("two", "second"), ("one", "second")]
    (device,) = found[1].devices
    assert device.free.memory_mib == 400  # the first container's share is taken
    site.hold("one", "one-0", 500, "held")
    found = site.details(builders.pod(*parts), ["one", "two"])
    assert [(one.node, one.container) for one in found] == [("two", "second"), ("one", "first")]


def test_details_and_the_record_stay_within_the_limit_of_a_message() -> None:
    site = Site()
    tail, namespace = "x" * (NAME_MOST - 9), "n" * LABEL_MOST
    names = [f"node-{number:03}{tail}" for number in range(20)]
    for node in names:
        site.node(node, 40, uuid="u" * 60 + node)
        for device in range(40):
            for holder in range(6):
                uuid = f"{'u' * 60}{node}-{device}"
                name = f"{holder}-{device:02}{'p' * (NAME_MOST - 4)}"
                site.hold(node, uuid, 100, name, namespace=namespace)
    found = site.details(builders.pod(builders.ask(mib=900)), names)
    size = len(msgspec.json.encode(found))
    assert DETAIL_BYTES_MOST // 2 < size <= DETAIL_BYTES_MOST
    assert 0 < len(found[0].devices) < DEVICES_DETAILED
    assert len(found[0].devices) + found[0].devices_left_out == 40
    assert {len(one.holders) for one in found[0].devices} == {HOLDERS_LISTED}
    assert found[0].devices[0].holders_left_out == 2
    record = DecisionRecord(
        verb="filter",
        namespace=namespace,
        pod="p" * NAME_MOST,
        pod_uid="u",
        time_s=0.0,
        verdict="refused",
        snapshot_id="1.1",
        closest=found,
    )
    assert codec.out_of_range(record) == ""


def test_small_cluster_of_usual_names_is_recorded_in_full() -> None:
    site = Site()
    names = [f"gpu-node-{number:02}.example.internal" for number in range(NODES_DETAILED)]
    for node in names:
        site.node(node, 8, uuid=f"GPU-5f0c2b1e-4d3a-4b5c-9d8e-{node}")
        for device in range(8):
            uuid = f"GPU-5f0c2b1e-4d3a-4b5c-9d8e-{node}-{device}"
            site.hold(node, uuid, 800, f"train-{device}-7d4b9c6f5-x2x4z")
    found = site.details(builders.pod(builders.ask(mib=900)), names)
    assert [len(one.devices) for one in found] == [8] * NODES_DETAILED
