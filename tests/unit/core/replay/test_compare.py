# SPDX-License-Identifier: Apache-2.0
"""Policies are compared by the figures that one computes by hand, and agree with the record."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.events.allocation import AllocationOp, AllocationRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.placement import ContainerShares, Placement
from hami_common.model.request import NodePolicy, PlacementPolicy, PodRequest
from hami_core.placement.pick import pick
from hami_core.placement.verdicts import Verdicts
from hami_core.replay.arrivals import History, Put, Run, history_of
from hami_core.replay.compare import SAMPLES, PolicyComparison, compare, place
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, device, devices, held, node_devices, pod, share, whole

PACK = PlacementPolicy(node="binpack", device=("binpack",))
SPREAD = PlacementPolicy(node="spread", device=("spread",))
UNTIL_S = 100.0


def record(
    uid: str,
    time_s: float,
    *shares: ContainerShares,
    op: AllocationOp = "reserve",
    node: str = "a",
    origin: str = "",
) -> AllocationRecord:
    return AllocationRecord(
        op=op,
        allocation_id=f"id-{uid}",
        node=node,
        pod_uid=uid,
        namespace="team",
        pod=uid,
        containers=shares,
        time_s=time_s,
        origin=origin,
    )


def release(uid: str, time_s: float, *, node: str = "a") -> AllocationRecord:
    return record(uid, time_s, op="release", node=node)


def of(
    *records: AllocationRecord,
    present: Sequence[NodeDevices],
    puts: Sequence[Put] = (),
    live: Sequence[AllocationRecord] = (),
    from_s: float = 0.0,
    most: int = 1000,
) -> History:
    return history_of(
        records,
        puts,
        present=present,
        live=live,
        from_s=from_s,
        until_s=UNTIL_S,
        arrivals_most=most,
    )


def compared(history: History, *policies: PlacementPolicy) -> PolicyComparison:
    return compare(history, policies or (PACK, SPREAD), check=lambda: None)


def small(uuid: str = "a-nvidia-0") -> ContainerShares:
    return held(share(uuid, 400))


def test_binpack_shares_a_device_and_spread_uses_two() -> None:
    history = of(
        record("p", 0, small()),
        record("q", 10, small()),
        present=[devices("a", 2, memory_mib=1000), devices("b", 2, memory_mib=1000)],
    )
    found = compared(history)
    packed, spread = found.results
    # Binpack: 10 s at 400 of 1000 MiB, then 90 s at 800 of 1000 MiB on one of four devices.
    assert packed.used_devices_full_mean == pytest.approx(0.76)
    assert packed.used_devices_full_peak == 0.8
    assert (packed.devices_used_peak, packed.devices_free_mean) == (1, 3.0)
    # Spread: 10 s on one device, then 90 s on two, always at 400 of 1000 MiB.
    assert spread.used_devices_full_mean == pytest.approx(0.4)
    assert spread.devices_used_peak == 2
    assert spread.devices_free_mean == pytest.approx(2.1)
    # One more of 400 MiB fits beside 400 and not beside 800: 200 of 3200 MiB are stranded.
    assert packed.series.stranded[-1] == pytest.approx(200 / 3200)
    assert spread.series.stranded[-1] == 0.0
    assert found.recorded.used_devices_full_mean == packed.used_devices_full_mean
    assert (found.devices, found.arrivals, packed.placed_at_once) == (4, 2, 2)
    assert packed.makespan_s is None  # no pod was released


def test_the_series_has_the_state_at_equally_spaced_times() -> None:
    history = of(
        record("p", 50, small()), release("p", 60), present=[devices("a", 1, memory_mib=1000)]
    )
    found = compared(history, PACK)
    step_s = UNTIL_S / (SAMPLES - 1)
    assert found.series_s == pytest.approx([n * step_s for n in range(SAMPLES)])
    expected = [int(50 <= time_s < 60) for time_s in found.series_s]
    assert list(found.results[0].series.devices_used) == expected
    assert found.results[0].makespan_s == 10.0


def test_a_pod_waits_for_a_release_where_spread_fragmented_the_node() -> None:
    history = of(
        record("p", 0, small()),
        record("q", 0, small()),
        record("whole", 20, held(share("a-nvidia-1", 1000, 100, exclusive=True))),
        release("p", 50),
        release("whole", 50),
        release("q", 90),
        present=[devices("a", 2, memory_mib=1000)],
    )
    packed, spread = compared(history).results
    assert (packed.placed_at_once, packed.waited, packed.wait_total_s) == (3, 0, 0.0)
    assert packed.makespan_s == 90.0
    assert (spread.placed_at_once, spread.waited, spread.never_placed) == (2, 1, 0)
    assert (spread.wait_total_s, spread.wait_p95_s) == (30.0, 30.0)
    # It keeps its 30 s from the release at 50 on, so the last pod is still q at 90.
    assert spread.makespan_s == 90.0
    at_40 = int(40 / UNTIL_S * (SAMPLES - 1))
    assert (packed.series.waiting[at_40], spread.series.waiting[at_40]) == (0, 1)


def test_a_pod_that_never_fits_waits_to_the_end_of_the_period() -> None:
    history = of(
        record("p", 0, small()),
        record("q", 0, small()),
        record("whole", 20, held(share("a-nvidia-1", 1000, 100, exclusive=True))),
        release("whole", 30),
        present=[devices("a", 2, memory_mib=1000)],
    )
    spread = compared(history, SPREAD).results[0]
    assert (spread.waited, spread.never_placed, spread.wait_total_s) == (1, 1, 80.0)
    assert spread.makespan_s is None


def test_a_smaller_pod_passes_one_that_waits_and_the_oldest_is_served_first() -> None:
    big = held(share("a-nvidia-0", 900))
    history = of(
        record("first", 0, big),
        record("big-1", 10, big),
        record("big-2", 11, big),
        record("tiny", 12, held(share("a-nvidia-0", 100))),
        release("first", 20),
        release("big-1", 40),
        release("big-2", 41),
        release("tiny", 13),
        present=[devices("a", 1, memory_mib=1000)],
    )
    result = compared(history, PACK).results[0]
    # big-1 starts at 20 and runs for 30 s, big-2 at 50 and runs for 30 s.
    assert (result.placed_at_once, result.waited) == (2, 2)
    assert result.wait_total_s == (20 - 10) + (50 - 11)
    assert (result.wait_p95_s, result.makespan_s) == (39.0, 80.0)


def test_pods_that_ran_at_the_start_keep_their_devices() -> None:
    history = of(
        record("old", -50, held(share("a-nvidia-1", 900))),
        record("p", 10, small()),
        release("old", 60),
        present=[devices("a", 2, memory_mib=1000)],
    )
    found = compared(history, PACK)
    assert (found.arrivals, found.running) == (1, 1)
    # p does not fit beside 900 MiB. 10 s: 0.9; 50 s: (900 + 400) / 2000; 40 s: 0.4.
    expected = (10 * 0.9 + 50 * 0.65 + 40 * 0.4) / 100
    assert found.results[0].used_devices_full_mean == pytest.approx(expected)


def test_devices_change_when_they_changed() -> None:
    one = devices("a", 1, memory_mib=1000)
    cordoned = node_devices("a", [device("a-nvidia-0", memory_mib=1000, cordoned=True)])
    history = of(
        record("p", 50, small(), node="b"),
        present=[one],
        puts=[Put(time_s=-10, devices=cordoned), Put(time_s=70, devices=one)],
    )
    result = compared(history, PACK).results[0]
    assert (result.waited, result.wait_total_s) == (1, 20.0)


def test_a_pod_is_placed_on_devices_of_the_model_that_it_had() -> None:
    a = node_devices("a", [device("a-nvidia-0", type="T4", memory_mib=1000)])
    b = node_devices("b", [device("b-0", type="A100", memory_mib=1000)])
    history = of(
        record("p", 0, held(share("a-nvidia-0", 900))),
        record("q", 1, held(share("a-nvidia-0", 900))),
        present=[a, b],
    )
    assert history.arrivals[0].request.containers[0].requests[0].types == ("T4",)
    result = compared(history, PACK).results[0]
    assert (result.placed_at_once, result.never_placed) == (1, 1)


def test_a_claim_stays_on_the_devices_that_kube_scheduler_chose() -> None:
    history = of(
        record("claim", 0, held(share("b-nvidia-1", 400)), node="b", origin="claim"),
        record("claim-2", 1, held(share("b-nvidia-1", 400)), node="b", origin="claim"),
        present=[devices("a", 2, memory_mib=1000), devices("b", 2, memory_mib=1000)],
    )
    assert [run.is_pinned for run in history.arrivals] == [True, True]
    spread = compared(history, SPREAD).results[0]
    assert (spread.devices_used_peak, spread.used_devices_full_peak) == (1, 0.8)


def test_beyond_the_limit_the_period_begins_later_and_nothing_is_lost() -> None:
    records = [record(f"p{n}", 10.0 * n, held(share("a-nvidia-0", 10))) for n in range(8)]
    history = of(*records, release("p0", 15), present=[devices("a", 1)], most=3)
    assert (history.from_s, history.left_out) == (50.0, 5)
    assert [run.request.name for run in history.arrivals] == ["p5", "p6", "p7"]
    assert [run.request.name for run in history.running] == ["p1", "p2", "p3", "p4"]


def test_a_retried_or_resized_pod_counts_once() -> None:
    history = of(
        record("p", 10, small(), node="b"),
        release("p", 11, node="b"),
        record("p", 12, small()),
        record("p", 13, held(share("a-nvidia-0", 700)), op="resize"),
        release("p", 40),
        release("gone", 50),
        release("gone", 51),
        present=[devices("a", 1)],
        live=[record("older", -900, small())],
    )
    (run,) = history.arrivals
    assert (run.start_s, run.end_s) == (12, 40)
    assert run.request.containers[0].requests[0].memory_mib == 700
    assert [one.request.name for one in history.running] == ["older"]
    assert history.without_begin == 1


# --- agrees with the record -----------------------------------------------------------------------


@st.composite
def worlds(
    draw: st.DrawFn,
) -> tuple[PlacementPolicy, list[NodeDevices], list[tuple[float, float, PodRequest]]]:
    """A policy, devices, and pods with begin and end."""
    policy = PlacementPolicy(
        node=draw(st.sampled_from(NodePolicy.__args__)),  # type: ignore[attr-defined]  # a Literal
        device=(draw(st.sampled_from(("binpack", "spread", "numa", "mutex"))),),
    )
    nodes = [devices(f"n{n}", draw(st.integers(1, 3)), memory_mib=1000) for n in range(3)]
    asks = st.one_of(
        st.builds(
            ask, st.integers(1, 2), mib=st.integers(1, 600), core=st.sampled_from((0, 20, 50))
        ),
        st.just(whole()),
    )
    pods = []
    for number in range(draw(st.integers(0, 12))):
        start_s = float(draw(st.integers(0, 90)))
        pods.append(
            (
                start_s,
                start_s + draw(st.integers(1, 200)),
                pod(draw(asks), uid=f"u{number:02}", name=f"p{number}"),
            )
        )
    return policy, nodes, sorted(pods, key=lambda one: (one[0], one[2].uid))


def recorded(
    policy: PlacementPolicy,
    nodes: Sequence[NodeDevices],
    pods: Sequence[tuple[float, float, PodRequest]],
) -> list[AllocationRecord]:
    """The ledger of a scheduler that places the pods; those that do not fit are never admitted."""
    table, records = DeviceTable(), []
    verdicts = Verdicts(table)
    for one in nodes:
        table.upsert_node(one)
    running: list[tuple[float, str, Placement]] = []

    def end_until(time_s: float) -> None:
        for end in sorted(running, key=lambda one: one[0]):
            if end[0] <= time_s:
                running.remove(end)
                table.unbook(end[2].node, end[2].containers)
                records.append(release(end[1], end[0], node=end[2].node))

    for start_s, end_s, wanted in pods:
        end_until(start_s)
        request = PodRequest(
            uid=wanted.uid,
            namespace="team",
            name=wanted.name,
            containers=wanted.containers,
            policy=policy,
        )
        fitting = verdicts.filter(request, table.nodes()).left
        if len(fitting):
            node = verdicts.prioritize(request, fitting).best(1)[0][0]
            placed = pick(table, request, node)
            assert isinstance(placed, Placement)
            table.book(node, placed.containers)
            running.append((end_s, wanted.uid, placed))
            records.append(record(wanted.uid, start_s, *placed.containers, node=node))
    end_until(UNTIL_S)
    return records


@pytest.mark.timeout(60)
@settings(deadline=None, max_examples=40)
@given(worlds())
def test_the_recorded_policy_gives_the_recorded_packing(
    world: tuple[PlacementPolicy, list[NodeDevices], list[tuple[float, float, PodRequest]]],
) -> None:
    policy, nodes, pods = world
    history = of(*recorded(policy, nodes, pods), present=nodes)
    found = compared(history, policy)
    (result,) = found.results
    assert result.waited == 0
    assert result.series == found.recorded.series
    assert result.used_devices_full_mean == found.recorded.used_devices_full_mean
    assert result.devices_free_mean == found.recorded.devices_free_mean
    assert result.makespan_s == found.recorded.makespan_s
    assert compared(history, policy) == found


def test_the_work_ends_when_the_check_raises() -> None:
    history = of(record("p", 0, small()), present=[devices("a", 1)])

    def check() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        compare(history, [PACK], check=check)


def test_running_pods_are_moved_for_one_that_fits_nowhere() -> None:
    """Cards of 10: after u1 and u2 ended, u3 (4) and u4 (4) lie on one card each, and u5 asks 9."""

    def run(uid: str, mib: int, start_s: float, end_s: float) -> Run:
        request = pod(ask(mib=mib), uid=uid)
        return Run(request=request, node="", containers=(), start_s=start_s, end_s=end_s)

    history = History(
        from_s=0.0,
        until_s=UNTIL_S,
        devices=tuple(
            node_devices(node, [device(f"{node}-0", memory_mib=10)]) for node in ("a", "b")
        ),
        puts=(),
        running=(),
        arrivals=(
            run("u1", 6, 0.0, 10.0),
            run("u2", 6, 1.0, 10.0),
            run("u3", 4, 2.0, 60.0),
            run("u4", 4, 3.0, 60.0),
            run("u5", 9, 20.0, 30.0),
        ),
    )
    still, moved = (place(history, PACK, moves_most=n, check=lambda: None) for n in (0, 1))
    assert (still.moves, still.result.placed_at_once, still.lives["u5"].start_s) == (0, 4, 60.0)
    assert (moved.moves, moved.result.placed_at_once) == (1, 5)
    assert moved.lives["u5"] == (20.0, 30.0)
    assert moved.lives["u3"] == (2.0, 60.0), "a moved pod ends when it would have ended"
    assert moved.booked_peak == 1.0
    # Booked MiB of 20 by seconds: 6, 12, 16, 20 until 10, 8 until 20, 17 until 30, 8 until 60.
    by_hand = 1 * 6 + 1 * 12 + 1 * 16 + 7 * 20 + 10 * 8 + 10 * 17 + 30 * 8
    assert moved.booked_mean == pytest.approx(by_hand / (20 * UNTIL_S), abs=1e-4)
