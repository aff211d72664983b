# SPDX-License-Identifier: Apache-2.0
"""Devices divided in hardware: the columns decide as the plain loops do, however full they are.

Few small devices and many small pods that come and go, so that places and units run out before
memory does.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.model.placement import ContainerShares, Placement
from hami_common.model.request import (
    ContainerRequest,
    DeviceRequest,
    DeviceSelector,
    PodRequest,
)
from hami_core.placement.pick import pick, satisfies
from hami_core.placement.reasons import explain
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from tests.property.scheduler import clusters
from tests.support import builders
from tests.support.oracle import Oracle

NODES = ("n0", "n1")


@st.composite
def requests(draw: st.DrawFn) -> DeviceRequest:
    """A part of a device, rarely a whole one."""
    if draw(st.integers(0, 9)) == 0:
        return builders.whole()
    return DeviceRequest(
        vendor="nvidia",
        count=draw(st.sampled_from((1, 1, 1, 2, 3))),
        memory_mib=draw(st.sampled_from((1, 2, 3, 4))),
        core_pct=draw(st.sampled_from((0, 0, 0, 20))),
        kind=draw(st.sampled_from(("", "", "", "", "q"))),
    )


@st.composite
def pods(draw: st.DrawFn, uid: str) -> PodRequest:
    """One to three containers."""
    kinds = sorted(draw(st.lists(st.sampled_from(clusters.KINDS), min_size=1, max_size=3)))
    return builders.pod(
        *(
            ContainerRequest(name=f"c{i}", kind=kind, requests=(draw(requests()),))
            for i, kind in enumerate(sorted(kinds, key=lambda kind: kind == "app"))
        ),
        uid=uid,
        device=draw(st.sampled_from((("spread",), ("binpack",)))),
        selector=draw(st.sampled_from((None, DeviceSelector(modes=("mig",))))),
    )


@settings(max_examples=40)
@given(st.data())
def test_core_and_oracle_agree_while_pods_come_and_go(data: st.DataObject) -> None:
    table, oracle = DeviceTable(), Oracle()
    verdicts = Verdicts(table)
    for node in NODES:
        partitions, resources = data.draw(st.sampled_from(clusters.TABLES))
        message = builders.node_devices(
            node,
            [
                builders.device(
                    f"{node}-{i}",
                    index=i,
                    memory_mib=8,
                    mode=data.draw(st.sampled_from(("mig", "template"))),
                    partitions=partitions,
                    resources=resources,
                )
                for i in range(data.draw(st.integers(1, 3)))
            ],
        )
        table.upsert_node(message)
        oracle.upsert_node(message)
    held: list[tuple[str, tuple[ContainerShares, ...]]] = []
    for i in range(12):
        if held and data.draw(st.integers(0, 3)) == 0:
            node, containers = held.pop(data.draw(st.integers(0, len(held) - 1)))
            table.unbook(node, containers)
            oracle.unbook(node, containers)
        request = data.draw(pods(f"uid-{i}"))
        wanted = {node: oracle.code(request, node) for node in NODES}
        assert verdicts.filter(request, NODES).feasible == [n for n in NODES if wanted[n] is None]
        for node in NODES:
            picked = pick(table, request, node)
            assert explain(table, request, node).fits == (wanted[node] is None)
            if not isinstance(picked, Placement):
                assert picked.code == wanted[node]
                continue
            assert picked == oracle.pick(request, node)
            assert satisfies(table, request, node, picked.containers)
            assert table.shortfall(node, picked.containers) == ()
            assert table.book(node, picked.containers) == ()
            oracle.book(node, picked.containers)
            held.append((node, picked.containers))
            table.check()
            break
