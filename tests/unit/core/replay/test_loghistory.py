# SPDX-License-Identifier: Apache-2.0
"""A stimulus log gives policies the requests, offers and waits that the event stream lacks."""

from collections.abc import Iterator
from typing import Any

import pytest

from hami_common.errors import RequestInvalid
from hami_common.model.prices import Prices
from hami_common.model.request import DeviceRequest, PlacementPolicy, PodRequest
from hami_core.core import Core
from hami_core.ledger import stimuli
from hami_core.ledger.ledger import Ledger
from hami_core.placement.nodenames import NodeNames
from hami_core.quota.accounts import QuotaLedger
from hami_core.replay.compare import compare_pods
from hami_core.replay.loghistory import LogHistory, history_of_log
from hami_core.replay.rerun import answered
from hami_core.replay.snapshot import take_exact
from hami_core.replay.stimuluslog import Head, Item, Stimulated, answer_text
from hami_core.table.inventory import Inventory
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, devices, pod, whole

PACK = PlacementPolicy(node="binpack", device=("binpack",))
SPREAD = PlacementPolicy(node="spread", device=("spread",))
BEGIN_S = 1000.0


def named(name: str, request: DeviceRequest) -> PodRequest:
    return pod(request, uid=f"uid-{name}", name=name)


class Life:
    """A core whose inputs and answers are kept as the items of a log."""

    def __init__(self) -> None:
        table = DeviceTable()
        self.core = Core(
            ledger=Ledger(table, writer="s", lease_s=30.0, fence_delay_s=3.0),
            inventory=Inventory(table, heartbeat_timeout_s=15.0),
            quota=QuotaLedger(),
        )
        snapshot = take_exact(self.core, policy=SPREAD, now_s=BEGIN_S)
        self.items: list[Item] = [Head(format=1, run="r", segment=1, next_number=1), snapshot]
        self.seq = 0
        for one in (
            stimuli.DevicesPut(devices=devices("a", 2, memory_mib=1000), revision=1, now_s=BEGIN_S),
            stimuli.DevicesPut(devices=devices("b", 2, memory_mib=1000), revision=2, now_s=BEGIN_S),
            stimuli.FeedSynced(now_s=BEGIN_S),
            stimuli.Repaired(now_s=BEGIN_S),
        ):
            self.take(one)

    def take(self, stimulus: stimuli.Input[Any], names: NodeNames | None = None) -> object:
        item = Stimulated(len(self.items) - 1, stimulus, names, b"")
        answer = answered(self.core, item)
        assert not isinstance(answer, Exception), answer
        self.items.append(item._replace(answer=answer_text(answer)))
        return answer

    def ask(self, request: PodRequest, *nodes: str) -> None:
        self.take(stimuli.FilterAsked(request=request), NodeNames.of(nodes))

    def bind(self, request: PodRequest, node: str, now_s: float) -> stimuli.Append:
        plan = self.take(
            stimuli.BindPlanned(
                request=request, node=node, allocation_id=f"id-{request.uid}", now_s=now_s
            )
        )
        assert isinstance(plan, stimuli.Append), plan
        self.accept(plan, now_s)
        return plan

    def release(self, request: PodRequest, now_s: float) -> None:
        (holding,) = self.core.ledger.holdings_of_pod(request.uid)
        plan = self.take(stimuli.ReleasePlanned(holding=holding, now_s=now_s, reason="ended"))
        assert isinstance(plan, stimuli.Append)
        self.accept(plan, now_s)

    def accept(self, plan: stimuli.Append, now_s: float) -> None:
        self.seq += 1
        self.take(stimuli.Accepted(append=plan, seq=self.seq, now_s=now_s))
        # The feed repeats the record a moment later.
        self.take(stimuli.RecordSeen(seq=self.seq, record=plan.record, now_s=now_s + 0.1))

    def history(self) -> LogHistory:
        return history_of_log(self.items)


def times(life: Life, *moments: float) -> Iterator[float]:
    for moment in moments:
        life.take(stimuli.Tick(now_s=BEGIN_S + moment))
        yield BEGIN_S + moment


def crowded() -> Life:
    """Two small pods spread over node a; a pod that needs a whole device of it waits 50 s."""
    life = Life()
    small = [named("p", ask(mib=400)), named("q", ask(mib=400))]
    big = named("big", whole())
    for request, now_s in zip(small, times(life, 10, 20), strict=True):
        life.ask(request, "a")
        life.bind(request, "a", now_s)
    for _ in times(life, 30, 60):
        life.ask(big, "a")
    for now_s in times(life, 80):
        life.release(small[0], now_s)
        life.ask(big, "a")
        life.bind(big, "a", now_s)
    for _ in times(life, 100):
        pass
    return life


def test_the_wait_of_a_refused_pod_is_counted_and_another_policy_avoids_it() -> None:
    life = crowded()
    # The core spreads the two small pods over both devices of a.
    history, policy, gaps = life.history()
    assert (policy, gaps) == (SPREAD, 0)
    assert (history.from_s, history.until_s) == (BEGIN_S, BEGIN_S + 100)
    found = compare_pods(history, [PACK, SPREAD], check=lambda: None)
    recorded = found.comparison.recorded
    assert (recorded.placed_at_once, recorded.waited, recorded.wait_p95_s) == (2, 1, 50.0)
    packed, spread = found.comparison.results
    assert (packed.waited, spread.waited, spread.wait_p95_s) == (0, 1, 50.0)
    assert [one.pod for one in found.pods[0]] == ["p", "q", "big"]
    assert {one.node for one in found.pods[0]} == {"a"}, "only a was offered"


def test_a_pod_that_never_got_devices_is_an_arrival() -> None:
    life = Life()
    for _ in times(life, 10):
        life.ask(named("huge", ask(mib=5000)), "a", "b")
    for _ in times(life, 40):
        pass
    found = compare_pods(life.history().history, [PACK], check=lambda: None)
    assert (found.comparison.arrivals, found.comparison.recorded.never_placed) == (1, 1)
    assert found.comparison.results[0].never_placed == 1
    assert found.recorded[0].wait_s == 30.0


def test_a_pod_that_fits_and_is_never_bound_is_no_arrival() -> None:
    life = Life()
    for _ in times(life, 10):
        life.ask(named("other", ask(mib=500)), "a", "b")
    assert life.history().history.arrivals == ()


def test_costs_are_those_of_the_devices_in_use() -> None:
    history = crowded().history().history
    (model,) = {device.type for one in history.puts for device in one.devices.devices} or {
        device.type for one in history.devices for device in one.devices
    }
    prices = Prices(currency="EUR", device_hour={model: 36.0})
    found = compare_pods(history, [PACK], check=lambda: None, prices=prices).comparison
    # Recorded: one device from 10 s, two from 20 s to 100 s: 170 s at 0.01 EUR.
    assert found.recorded.cost == pytest.approx(1.7)
    # Packed: one device from 10 s, a second one for the big pod from 30 s: 160 s.
    assert found.results[0].cost == pytest.approx(1.6)
    assert found.results[0].device_hours == pytest.approx(160 / 3600, abs=1e-4)
    other = Prices(currency="EUR", device_hour={"other": 1.0})
    unpriced = compare_pods(history, [PACK], check=lambda: None, prices=other).comparison
    assert (unpriced.results[0].cost, unpriced.unpriced) == (0.0, (model,))


def test_a_log_without_snapshot_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="no segment begins with a snapshot"):
        history_of_log([Head(format=1, run="r", segment=1, next_number=1)])
