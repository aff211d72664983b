# SPDX-License-Identifier: Apache-2.0
"""Ranks of devices, kept through any events, give the same answers as single evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.model.placement import ContainerShares
from hami_common.model.request import ContainerRequest, DeviceRequest, DeviceSelector, PodRequest
from hami_core.placement import levels
from hami_core.placement.verdicts import Verdicts
from hami_core.table import block
from hami_core.table.table import DeviceTable
from tests.property.scheduler import clusters
from tests.support import builders

ASKED = ("unknown", *clusters.NODES)


@contextmanager
def ranked_from(nodes: int) -> Iterator[None]:
    """Devices are ranked for so many nodes, and only changed ones are ranked again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "NODES_WORTH_IT", nodes)
        patch.setattr(block, "PART_WORTH_IT", 1)
        yield


@st.composite
def plain_requests(draw: st.DrawFn, vendor: str) -> DeviceRequest:
    """Requests for some devices, with few further constraints."""
    return DeviceRequest(
        vendor=vendor,
        count=draw(st.sampled_from((1, 1, 2, 3, 9))),
        memory_mib=draw(st.sampled_from((0, 1, 2, 4, 8, 12, 1 << 40))),
        memory_pct=draw(st.sampled_from((0, 10, 50, 100))),
        core_pct=draw(st.sampled_from((0, 0, 10, 50, 100, 40_000))),
        exclusive=draw(st.integers(0, 3)) == 0,
        types=draw(st.sampled_from(((), (), (), ("T4",)))),
        modes=draw(st.sampled_from(((), (), (), ("soft", "whole")))),
    )


@st.composite
def plain_pods(draw: st.DrawFn) -> PodRequest:
    """A pod whose devices are not combined in any special way."""
    kinds = sorted(draw(st.lists(st.sampled_from(clusters.KINDS), min_size=1, max_size=3)))
    vendors = st.sampled_from((("nvidia",), ("nvidia",), ("ascend",), clusters.VENDORS))
    selectors = st.sampled_from((DeviceSelector(), DeviceSelector(deny_types=("t4",))))
    return builders.pod(
        *(
            ContainerRequest(
                name=f"c{number}",
                kind=kind,
                requests=tuple(draw(plain_requests(vendor)) for vendor in draw(vendors)),
            )
            for number, kind in enumerate(sorted(kinds, key=lambda kind: kind == "app"))
        ),
        device=draw(st.sampled_from((("binpack",), ("topology-aware",), ("spread", "numa")))),
        selectors={"nvidia": draw(selectors)},
    )


class Events:
    """Any change of a table whose devices are not divided."""

    def __init__(self, data: st.DataObject) -> None:
        self.table = DeviceTable()
        self._data = data
        self._held: list[tuple[str, tuple[ContainerShares, ...]]] = []
        for node in clusters.NODES:
            for vendor in clusters.VENDORS[: data.draw(st.integers(1, 2))]:
                self._hear(node, vendor)

    def _hear(self, node: str, vendor: str) -> None:
        self.table.upsert_node(self._data.draw(clusters.inventories(node, vendor, divided=False)))

    def happen(self) -> None:
        """One event."""
        draw = self._data.draw
        node, vendor = (
            draw(st.sampled_from(clusters.NODES)),
            draw(st.sampled_from(clusters.VENDORS)),
        )
        match draw(st.sampled_from(("hear", "book", "book", "book", "unbook", "alive", "health"))):
            case "hear":
                self._hear(node, vendor)
            case "book":
                containers = draw(clusters.holdings(node))
                self.table.book(node, containers)
                self._held.append((node, containers))
            case "unbook" if self._held:
                self.table.unbook(*self._held.pop(draw(st.integers(0, len(self._held) - 1))))
            case "alive":
                self.table.set_node_alive(node, vendor, alive=draw(st.booleans()))
            case _:
                uuid = draw(st.sampled_from(clusters.uuids(node, vendor)))
                self.table.set_health(node, uuid, healthy=draw(st.booleans()))


def answers(verdicts: Verdicts, request: PodRequest) -> tuple[object, ...]:
    """All answers about a pod."""
    filtered = verdicts.filter(request, ASKED)
    scores = verdicts.prioritize(request, ASKED).scores.tolist()
    return filtered.feasible, filtered.refused(), filtered.classes(), scores


@settings(max_examples=25)
@given(st.data())
def test_kept_ranks_answer_as_devices_do(data: st.DataObject) -> None:
    events = Events(data)
    kept = Verdicts(events.table)
    for _ in range(4):
        for _ in range(data.draw(st.integers(1, 4))):
            events.happen()
        request = data.draw(plain_pods())
        with ranked_from(1):
            found = answers(kept, request)
        with ranked_from(len(ASKED)):
            assert found == answers(Verdicts(events.table), request)
