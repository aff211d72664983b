# SPDX-License-Identifier: Apache-2.0
"""Arithmetic and selection of requests."""

import pytest

from hami_common.model.request import DeviceRequest, DeviceSelector


@pytest.mark.parametrize(
    ("memory_mib", "memory_pct", "device_mib", "taken"),
    [
        (3000, 0, 81920, 3000),
        (3000, 50, 81920, 3000),
        (0, 50, 81920, 40960),
        (0, 100, 81559, 81559),
        (0, 33, 100, 33),
        (0, 1, 99, 0),
    ],
)
def test_memory_is_absolute_or_a_share_of_the_devices_rounded_down(
    memory_mib: int, memory_pct: int, device_mib: int, taken: int
) -> None:
    request = DeviceRequest(vendor="v", count=1, memory_mib=memory_mib, memory_pct=memory_pct)
    assert request.memory_mib_on(device_mib) == taken


@pytest.mark.parametrize(
    ("allow", "deny", "device_type", "accepted"),
    [
        ((), (), "NVIDIA A100-SXM4-80GB", True),
        (("a100",), (), "NVIDIA A100-SXM4-80GB", True),
        (("H100", "A100"), (), "NVIDIA A100-SXM4-80GB", True),
        (("H100",), (), "NVIDIA A100-SXM4-80GB", False),
        ((), ("A100",), "NVIDIA A100-SXM4-80GB", False),
        ((), ("H100",), "NVIDIA A100-SXM4-80GB", True),
        (("A100",), ("80gb",), "NVIDIA A100-SXM4-80GB", False),
        ((), ("K100_ai", "Z100"), "DCU-K100_AI", False),
        ((), ("Z100",), "DCU-Z100L", False),
        (("K100",), (), "DCU-K100_AI", True),
        ((), ("MI300",), "AMD Instinct MI300X VF", False),
        ((), ("MI300",), "", False),
        ((), (), "", True),
    ],
)
def test_types_are_substrings_whatever_their_case_and_denial_wins(
    allow: tuple[str, ...], deny: tuple[str, ...], device_type: str, *, accepted: bool
) -> None:
    selector = DeviceSelector(allow_types=allow, deny_types=deny)
    assert selector.accepts_type(device_type) is accepted


def test_uuids_match_exactly_and_denial_wins() -> None:
    selector = DeviceSelector(allow_uuids=("GPU-1", "GPU-2"), deny_uuids=("GPU-2",))
    assert selector.accepts_uuid("GPU-1")
    assert not selector.accepts_uuid("GPU-2")
    assert not selector.accepts_uuid("GPU-3")
    assert not selector.accepts_uuid("gpu-1")
    assert DeviceSelector().accepts_uuid("anything")
