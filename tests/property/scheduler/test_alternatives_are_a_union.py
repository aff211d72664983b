# SPDX-License-Identifier: Apache-2.0
"""A pod with alternatives fits the nodes of all of them, ranks earlier ones first, and gets one."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_common.model.placement import Placement
from hami_common.model.request import Choice, PodRequest, options
from hami_core.placement.pick import pick, satisfies
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, devices, held, pod, share

VENDORS = ("nvidia", "ascend", "hygon")
_sizes = st.sampled_from([1000, 20_000, 39_000, 41_000])


@st.composite
def clusters(draw: st.DrawFn) -> DeviceTable:
    table = DeviceTable()
    for number in range(draw(st.integers(1, 6))):
        node = f"n{number}"
        for vendor in draw(st.lists(st.sampled_from(VENDORS), min_size=1, max_size=2, unique=True)):
            count = draw(st.integers(1, 3))
            table.upsert_node(devices(node, count, vendor=vendor))
            mib = draw(st.sampled_from([0, 5000, 38_500]))
            if mib:
                uuids = [f"{node}-{vendor}-{index}" for index in range(count)]
                table.book(node, [held(share(uuid, mib, vendor=vendor)) for uuid in uuids])
    return table


@st.composite
def requests(draw: st.DrawFn) -> PodRequest:
    choices = [
        pod(ask(draw(st.integers(1, 2)), mib=draw(_sizes), vendor=draw(st.sampled_from(VENDORS))))
        for _ in range(draw(st.integers(2, 4)))
    ]
    others = tuple(Choice(containers=one.containers) for one in choices[1:])
    return replace(choices[0], others=others)


@given(clusters(), requests())
def test_verdicts_are_those_of_the_first_alternative_that_fits(
    table: DeviceTable, request: PodRequest
) -> None:
    names = [*table.nodes(), "unknown"]
    alone = [Verdicts(table).filter(one, names).feasible for one in options(request)]
    first = {
        node: next((rank for rank, nodes in enumerate(alone) if node in nodes), -1)
        for node in names
    }
    verdicts = Verdicts(table)
    filtered = verdicts.filter(request, names)
    assert filtered.feasible == [node for node in names if first[node] >= 0]
    assert set(filtered.refused()) == {node for node in names if first[node] < 0}
    scores = dict(zip(names, verdicts.prioritize(request, names).scores.tolist(), strict=True))
    for one in names:
        assert (scores[one] > 0) == (first[one] >= 0) or scores[one] == 0
        for other in names:
            if 0 <= first[one] < first[other]:
                assert scores[one] >= scores[other]
    for node in table.nodes():
        found = pick(table, request, node)
        assert isinstance(found, Placement) == (first[node] >= 0)
        if isinstance(found, Placement):
            assert satisfies(table, options(request)[first[node]], node, found.containers)
            assert satisfies(table, request, node, found.containers)
