# SPDX-License-Identifier: Apache-2.0
"""The shares of a ResourceClaim are those of its allocation, or the result at fault is named."""

import json
from typing import Any

import pytest

from hami_common.dra.claims import ResourceClaim, containers_of, node_of
from hami_common.dra.names import DRIVER, monitor_pool
from hami_common.errors import RequestInvalid, WireInvalid
from hami_common.events import codec
from hami_common.model.device import Device
from tests.support import claims
from tests.support.claims import result

DEVICES = [
    Device(
        uuid=f"GPU-{number}",
        vendor="nvidia",
        index=number,
        type="NVIDIA A100",
        memory_mib=16_000,
        capacity_mib=32_000,
        slots=10,
    )
    for number in range(2)
]


def read(*results: dict[str, Any], **more: Any) -> ResourceClaim:
    text = json.dumps(claims.claim("c", *results, **more)).encode()
    return codec.decode(text, ResourceClaim, what="claim")


def test_each_request_is_a_container_and_each_device_a_share() -> None:
    found = read(
        result("GPU-0", memory="1048577", cores="30"),
        result("GPU-1", memory="2Gi", cores="0"),
        result("GPU-1", request="other/small", memory="3000Mi"),
        result("X", driver="gpu.example"),
    )
    shares = {
        one.name: [(s.uuid, s.memory_mib, s.core_pct, s.exclusive) for s in one.shares]
        for one in containers_of(found, DEVICES)
    }
    assert node_of(found) == "n1"
    assert shares == {
        "gpu": [("GPU-0", 2, 30, False), ("GPU-1", 2048, 0, False)],
        "other": [("GPU-1", 3000, 10, False)],
    }


@pytest.mark.parametrize(
    ("memory", "cores", "is_whole"),
    [("32000Mi", "0", True), ("1Gi", "100", True), ("31999Mi", "99", False)],
)
def test_all_memory_or_all_compute_is_the_whole_device(
    memory: str, cores: str, *, is_whole: bool
) -> None:
    (container,) = containers_of(read(result("GPU-0", memory=memory, cores=cores)), DEVICES)
    assert container.shares[0].exclusive is is_whole


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ([result("GPU-9")], "results[0].device: 'gpu-9"),
        ([result("GPU-0", pool="n1")], "results[0].pool: 'n1' is no pool of driver gpu.hami.io"),
        ([result("GPU-0"), result("GPU-0", "n2")], "results[1].pool: one claim has devices of the"),
        ([result("GPU-0", consumedCapacity=None)], "consumedCapacity[memory]: it is missing"),
        ([result("GPU-0", consumedCapacity={"memory": "1Gi"})], "[cores]: it is missing"),
        ([result("GPU-0", memory="lots")], "'lots' is not an amount"),
        ([result("GPU-0", memory="-1")], "'-1' is not an amount"),
        ([result("GPU-0", memory="0")], "a share needs memory"),
        ([result("GPU-0", cores="101")], "'101' is not an amount from 0 to 100"),
        ([result("GPU-0", adminAccess=True)], "not given with admin access"),
    ],
)
def test_allocation_that_is_no_share_names_its_field(
    results: list[dict[str, Any]], text: str
) -> None:
    with pytest.raises(RequestInvalid) as refused:
        containers_of(read(*results), DEVICES)
    assert text in str(refused.value)
    assert str(refused.value).startswith("status.allocation.devices.results[")


def test_capacity_may_have_the_name_of_the_driver() -> None:
    amounts = {"gpu.hami.io/memory": "5Mi", "gpu.hami.io/cores": "7"}
    (container,) = containers_of(read(result("GPU-0", consumedCapacity=amounts)), DEVICES)
    assert (container.shares[0].memory_mib, container.shares[0].core_pct) == (5, 7)


def test_every_other_allocation_has_another_id() -> None:
    ids = {
        read(one, at=at).allocation_id()
        for one in (
            result("GPU-0"),
            result("GPU-1"),
            result("GPU-0", "n2"),
            result("GPU-0", memory="1Gi"),
            result("GPU-0", request="x"),
            result("GPU-0", shareID="another"),
        )
        for at in ("2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z")
    }
    assert len(ids) == 12
    assert read(result("GPU-0")).allocation_id() == read(result("GPU-0")).allocation_id()
    assert read(result("GPU-0"), result("X", driver="a.b")).allocation_id() in ids


def test_claim_without_an_allocation_of_ours_has_neither_id_nor_node() -> None:
    for found in (read(), read(result("GPU-0", driver="gpu.example"))):
        assert (found.allocation_id(), node_of(found), containers_of(found, DEVICES)) == (
            "",
            "",
            (),
        )


def test_claim_out_of_bounds_does_not_decode() -> None:
    with pytest.raises(WireInvalid, match="results"):
        read(result("GPU-0", device=7))


MONITOR = {"driver": DRIVER, "pool": monitor_pool("n1"), "device": "monitor", "request": "all"}


def test_monitor_is_no_share_and_needs_no_record() -> None:
    found = read({**MONITOR, "adminAccess": True})
    assert [one.request for one in found.monitors()] == ["all"]
    assert found.results() == ()
    assert found.allocation_id() == ""


def test_monitor_without_admin_access_is_refused() -> None:
    found = read(MONITOR)
    assert found.monitors() == ()
    with pytest.raises(RequestInvalid, match="is no pool of driver"):
        containers_of(found, DEVICES)
