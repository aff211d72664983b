# SPDX-License-Identifier: Apache-2.0
"""Use of a pod's containers over time."""

from typing import Any

from hami_common.events.usage import ContainerUsage, ShareUsage, UsageRecord
from hami_common.model.placement import Share
from hami_registry.core.rightsize import RightSize
from hami_registry.core.workload import (
    POINTS_MOST,
    DeviceWorkload,
    WorkloadFold,
    downsampled,
    right_sizes,
)

SHARE = Share(vendor="nvidia", uuid="A", memory_mib=1000, core_pct=50)


def record(
    time_s: float, *used: tuple[str, int, int], pod_uid: str = "u", every_s: float = 60
) -> UsageRecord:
    names: dict[str, Any] = {"namespace": "ns", "pod": "p", "pod_uid": pod_uid, "container": "main"}
    return UsageRecord(
        node="n",
        boot_id="1",
        seq=1,
        time_s=time_s,
        every_s=every_s,
        shares=tuple(
            ShareUsage(vendor="nvidia", uuid=uuid, used_mib=mib, core_pct=core, **names)
            for uuid, mib, core in used
        ),
        containers=(ContainerUsage(processes=3, **names),),
    )


def test_peak_mean_and_newest_values() -> None:
    fold = WorkloadFold("u")
    fold.seen(record(60, ("A", 100, 10), ("B", 1, 1)))
    fold.seen(record(120, ("A", 900, 90)))
    fold.seen(record(180, ("A", 5, 5), pod_uid="other"))
    fold.seen(record(240, ("A", 300, 20)))
    found = fold.device("main", SHARE, model="H200")
    assert (found.used_mib, found.core_pct, found.peak_mib, found.peak_s) == (300, 20, 900, 120)
    assert (found.mean_core_pct, found.p95_core_pct) == (40.0, 90)
    assert (found.limit_mib, found.limit_core_pct, found.model) == (1000, 50, "H200")
    assert found.series.memory_mib == (100, 900, 300)
    assert (fold.processes("main"), fold.seen_s("main")) == (3, 240)
    assert (fold.processes("none"), fold.seen_s("none")) == (0, 0)
    assert fold.sampled_s == 240  # the first one counts its interval
    use = fold.use([found], is_throttled=True)
    assert (use.peak_mib, use.p95_core_pct, use.sampled_s) == (900, 90, 240)


def test_pauses_do_not_count_as_sampled() -> None:
    fold = WorkloadFold("u")
    for time_s in (60, 120, 10_000, 10_060):
        fold.seen(record(time_s, ("A", 1, 1)))
    assert fold.sampled_s == 240


def test_parts_of_one_device_add_up() -> None:
    fold = WorkloadFold("u")
    fold.seen(record(60, ("A", 100, 10), ("A", 50, 5)))
    found = fold.device("main", SHARE, model="")
    assert (found.used_mib, found.core_pct) == (150, 15)


def test_without_records_everything_is_zero() -> None:
    found = WorkloadFold("u").device("main", SHARE, model="")
    assert (found.used_mib, found.peak_mib, found.peak_s, found.series.time_s) == (0, 0, 0.0, ())


def test_long_series_keep_their_peaks_and_their_ends() -> None:
    times = [float(at) for at in range(10_080)]
    memory = [1] * len(times)
    memory[5000] = 77
    found = downsampled(times, memory, [at % 2 * 100 for at in range(len(times))])
    assert len(found.time_s) == len(found.memory_mib) == len(found.core_pct) == POINTS_MOST
    assert max(found.memory_mib) == 77
    assert found.time_s[-1] == times[-1]
    assert all(45 < one < 55 for one in found.core_pct)


def test_sizes_are_asked_for_by_vendor() -> None:
    fold = WorkloadFold("u")
    devices = [
        fold.device("main", Share(vendor=vendor, uuid=uuid, memory_mib=1), model="")
        for vendor, uuid in (("nvidia", "A"), ("nvidia", "B"), ("amd", "C"))
    ]

    def ask(vendor: str, some: object) -> RightSize | None:
        assert isinstance(some, list)
        uuids = "".join(one.uuid for one in some)
        return (
            None
            if vendor == "amd"
            else RightSize(memory_mib=1, core_pct=1, profile=uuids, margin_pct=15, hours=1.0)
        )

    assert [one.profile for one in right_sizes(devices, ask)] == ["AB"]
    assert all(isinstance(one, DeviceWorkload) for one in devices)
