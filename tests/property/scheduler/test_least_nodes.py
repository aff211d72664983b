# SPDX-License-Identifier: Apache-2.0
"""The least number of added nodes equals that of a plain loop over the oracle.

The loop knows no lower bound, stops at no pod early, and decides by the oracle's own placement.
"""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_common.events.inventory import NodeDevices
from hami_common.model.request import PodRequest
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.stimuli import FeedSynced, Repaired
from hami_core.planning.scaling import NodeTemplate, Pods, least_nodes, template_of
from hami_core.planning.whatif import Governed
from hami_core.quota.accounts import QuotaLedger
from hami_core.table.table import DeviceTable
from tests.property.scheduler import clusters
from tests.support.oracle import Oracle

MOST = 5
FIRST = ("n0", "n1")
"""Present nodes; n0 is the template."""


def fresh(present: Sequence[NodeDevices]) -> tuple[Ledger, Governed]:
    table = DeviceTable()
    for devices in present:
        table.upsert_node(devices)
    ledger = Ledger(table, writer="test")
    ledger.handle(FeedSynced(now_s=0))
    ledger.handle(Repaired(now_s=0))
    return ledger, Governed(QuotaLedger())


def oracle_of(present: Sequence[NodeDevices], template: NodeTemplate, count: int) -> Oracle:
    oracle = Oracle()
    for devices in present:
        oracle.upsert_node(devices)
    for name in template.names(count):
        for devices in template.inventories(name):
            oracle.upsert_node(devices)
    return oracle


def places(oracle: Oracle, names: Sequence[str], request: PodRequest) -> bool:
    """Place one pod on the best node, if any takes it."""
    fitting = [name for name in names if oracle.code(request, name) is None]
    if not fitting:
        return False
    scores = dict(zip(fitting, oracle.scores(request, fitting), strict=True))
    best = min(fitting, key=lambda name: (-scores[name], name))
    placed = oracle.pick(request, best)
    assert placed is not None
    oracle.book(best, placed.containers)
    return True


def by_trying(
    present: Sequence[NodeDevices], requests: Sequence[PodRequest], template: NodeTemplate
) -> tuple[int | None, set[str]]:
    """The least number, and the pods that no number helps."""
    (lone,) = template.names(1)

    def is_helped(request: PodRequest) -> bool:
        return oracle_of((), template, 1).code(request, lone) is None

    left: list[PodRequest] = []
    for count in range(MOST + 1):
        oracle = oracle_of(present, template, count)
        names = [*dict.fromkeys(one.node for one in present if one.devices), *template.names(count)]
        left = [request for request in requests if not places(oracle, names, request)]
        if not any(map(is_helped, left)):
            return count, {request.name for request in left}
    return None, {request.name for request in left if not is_helped(request)}


def check(
    present: Sequence[NodeDevices], requests: Sequence[PodRequest], template: NodeTemplate
) -> int | None:
    found = least_nodes(
        lambda: fresh(present), Pods(requests=requests), template, most=MOST, now_s=0.0
    )
    assert (found.nodes, {one.pod for one in found.unhelped}) == by_trying(
        present, requests, template
    )
    assert len(found.pods) == len(requests)
    return found.nodes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_pods_on_any_nodes(data: st.DataObject) -> None:
    present = [
        data.draw(clusters.inventories(node, vendor))
        for node in FIRST
        for vendor in clusters.VENDORS[: data.draw(st.integers(1, 2))]
    ]
    if not any(one.devices for one in present if one.node == FIRST[0]):
        return
    template = template_of(FIRST[0], present)
    drawn = data.draw(st.lists(clusters.pods(), min_size=1, max_size=6))
    requests = [replace(one, uid=f"u{n}", name=f"p{n}") for n, one in enumerate(drawn)]
    check(present, requests, template)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equal_pods_that_need_several_nodes(data: st.DataObject) -> None:
    """As a Deployment has them: sums give a lower bound above 0."""
    present = [data.draw(clusters.inventories(FIRST[0], "nvidia", divided=False))]
    if not present[0].devices:
        return
    template = template_of(FIRST[0], present)
    drawn = data.draw(clusters.pods())

    def shape(number: int) -> PodRequest:
        return replace(drawn, uid=f"u{number}", name=f"p{number}")

    check(present, [shape(number) for number in range(data.draw(st.integers(3, 12)))], template)
