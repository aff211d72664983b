# SPDX-License-Identifier: Apache-2.0
"""Device time is divided, never more than elapsed; only pods measured as idle count as idle."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami_common.model.device import Device
from hami_common.model.placement import Booked
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.metering import (
    FORGET_S,
    Account,
    Kind,
    Meter,
    Part,
    idle_parts,
    part_of,
)
from hami_nodeagent.core.usage import ContainerRow, Counted, Row
from hami_nodeagent.core.usage import Part as Carrier
from tests.unit.nodeagent.core.test_breach import GPU, holder

HOUR_S = 3600.0
KIND = Kind("nvidia", "T4")


def device(uuid: str = GPU, **more: Any) -> Device:
    return Device(
        uuid=uuid,
        vendor="nvidia",
        index=0,
        type="T4",
        memory_mib=1000,
        capacity_mib=1000,
        **more,
    )


DEVICES = {GPU: device()}


def part(pod: str = "a", namespace: str = "team", *, uuid: str = GPU, **booked: Any) -> Part:
    return part_of(f"uid-{pod}", namespace, device(uuid), Booked(**booked))


def hours(meter: Meter, namespace: str, what: str = "slice_s") -> float:
    found: float = getattr(meter.sums[Account(namespace, *KIND)], what)
    return found / HOUR_S


def test_four_quarters_for_an_hour_are_one_device_hour() -> None:
    meter = Meter()
    parts = [part(str(n), memory_mib=250, core_pct=25) for n in range(4)]
    for second in range(0, 3601, 60):
        meter.look(DEVICES, parts, (), now_s=1000.0 + second)
    assert hours(meter, "team") == pytest.approx(1.0)
    assert meter.devices_s == {KIND: HOUR_S}


@pytest.mark.parametrize(
    ("booked", "slice_part", "memory_part", "core_part"),
    [
        ({"memory_mib": 250, "core_pct": 50}, 0.5, 0.25, 0.5),
        ({"memory_mib": 750}, 0.75, 0.75, 0.0),
        ({"memory_mib": 400, "core_pct": 10, "exclusive": True}, 1.0, 0.4, 0.1),
    ],
)
def test_slice_is_the_larger_part_and_a_device_of_ones_own_is_whole(
    booked: dict[str, Any], slice_part: float, memory_part: float, core_part: float
) -> None:
    meter = Meter()
    held = [part(**booked)]
    meter.look(DEVICES, held, (), now_s=0.0)
    meter.look(DEVICES, held, (), now_s=HOUR_S)
    shown = [hours(meter, "team", what) for what in ("slice_s", "memory_s", "core_s")]
    assert shown == pytest.approx([slice_part, memory_part, core_part])


def test_parts_beyond_the_whole_are_scaled_down_together() -> None:
    meter = Meter()
    held = [
        part("a", "x", memory_mib=900, core_pct=10),
        part("b", "y", memory_mib=100, core_pct=90),
    ]
    meter.look(DEVICES, held, (), now_s=0.0)
    meter.look(DEVICES, held, (), now_s=HOUR_S)
    assert (hours(meter, "x"), hours(meter, "y")) == (0.5, 0.5)
    assert hours(meter, "x", "memory_s") == 0.9


def test_pod_is_metered_from_its_first_to_its_last_reading() -> None:
    meter = Meter()
    one = part(memory_mib=500)
    meter.look(DEVICES, [], (), now_s=0.0)
    meter.look(DEVICES, [one], (), now_s=10.0)
    assert hours(meter, "team") == 0, "shown with 0 from its first look on"
    meter.look(DEVICES, [one], (), now_s=20.0)
    meter.look(DEVICES, [], (), now_s=30.0)
    meter.look(DEVICES, [], (), now_s=40.0)
    assert meter.sums[Account("team", *KIND)].slice_s == 10.0


def test_namespaces_without_shares_are_dropped_after_a_while() -> None:
    meter = Meter()
    for number in range(50):
        one = part(namespace=f"ci-{number}", memory_mib=500)
        meter.look(DEVICES, [one], (), now_s=number * FORGET_S)
    assert len(meter.sums) <= 2
    meter.look(DEVICES, [], (), now_s=100 * FORGET_S)
    assert meter.sums == {}
    assert meter.devices_s[KIND] == 100 * FORGET_S


@given(
    st.lists(
        st.tuples(
            st.lists(
                st.tuples(
                    st.integers(0, 4), st.integers(0, 2500), st.integers(0, 200), st.booleans()
                ),
                max_size=6,
            ),
            st.floats(0, 100),
        ),
        max_size=8,
    )
)
def test_no_sum_ever_exceeds_the_time_that_went_by(
    looks: list[tuple[list[tuple[int, int, int, bool]], float]],
) -> None:
    meter = Meter()
    now_s = 0.0
    for pods, passed_s in looks:
        now_s += passed_s
        parts = [
            part(str(n), f"ns-{ns}", memory_mib=mib, core_pct=pct, exclusive=whole)
            for n, (ns, mib, pct, whole) in enumerate(pods)
        ]
        idle = {(one.pod_uid, one.uuid) for one in parts[::2]}
        meter.look(DEVICES, parts, idle, now_s=now_s)
    whole_s = meter.devices_s.get(KIND, 0.0)
    for what in ("slice_s", "memory_s", "core_s"):
        assert sum(getattr(one, what) for one in meter.sums.values()) <= whole_s * (1 + 1e-9)
    assert all(0 <= one.idle_s <= one.slice_s * (1 + 1e-9) for one in meter.sums.values())


def test_stopped_clock_adds_nothing() -> None:
    meter = Meter()
    meter.look(DEVICES, [part(memory_mib=10)], (), now_s=5.0)
    meter.look(DEVICES, [part(memory_mib=10)], (), now_s=5.0)
    assert meter.sums[Account("team", *KIND)].slice_s == 0


def idle(
    row: Row, launches: int, *, before: int = 0, region: bool = True, seen: bool = True
) -> set[tuple[str, str]]:
    key = (row.holder.pod_uid, row.holder.container)
    container = ContainerRow(holder=row.holder, counted=Counted(launches=launches))
    return idle_parts(
        [row],
        [container],
        {key: before},
        with_region={key} if region else (),
        seen_uuids={GPU} if seen else (),
    )


def test_pod_without_started_or_measured_work_is_idle() -> None:
    still, at = Row(holder=holder()), {("uid-a", GPU)}
    assert idle(still, 5, before=5) == at
    assert idle(still, 0, region=False) == at
    assert idle(still, 6, before=5) == set()
    assert idle(Row(holder=holder(), core_pct=1), 5, before=5) == set()
    assert idle(still, 0, region=False, seen=False) == set(), "nobody knows"


def test_pod_without_a_measured_load_is_not_idle() -> None:
    mig = Instance(uuid=GPU, instance_id="MIG-a")
    silent = Row(holder=holder(), part=Carrier(instance=mig, is_told=True))
    assert idle(silent, 0, region=False) == set()
    seen = Row(holder=holder(), part=Carrier(instance=mig, is_told=True, core_pct=0))
    assert idle(seen, 0, region=False) == {("uid-a", GPU)}


def test_pod_with_one_busy_container_is_not_idle() -> None:
    rows = [Row(holder=holder()), Row(holder=holder(container="side"), core_pct=3)]
    found = idle_parts(rows, [], {}, with_region=(), seen_uuids={GPU})
    assert found == set()


def test_idle_time_is_part_of_the_slices_time() -> None:
    meter = Meter()
    held = [part("a", memory_mib=250), part("b", "other", memory_mib=500)]
    meter.look(DEVICES, held, (), now_s=0.0)
    meter.look(DEVICES, held, {("uid-a", GPU)}, now_s=HOUR_S)
    assert (hours(meter, "team", "idle_s"), hours(meter, "other", "idle_s")) == (0.25, 0)
