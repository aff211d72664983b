# SPDX-License-Identifier: Apache-2.0
"""Names of pools and devices."""

import re

from hypothesis import given
from hypothesis import strategies as st

from hami_common.dra.names import device_name, node_of_pool, pool_name

UUIDS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=120)


@given(UUIDS, UUIDS)
def test_devices_have_different_names_that_are_labels(one: str, other: str) -> None:
    names = [device_name(one), device_name(other)]
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name) for name in names)
    assert (names[0] == names[1]) == (one == other)


def test_name_of_a_device_can_be_read_by_people() -> None:
    name = device_name("GPU-0b7ab1f6-6d54-41b9-9b0a-5a5f2b2b6d11")
    assert name.startswith("gpu-0b7ab1f6-6d54-41b9-9b0a-5a5f2b2b6d11-")
    assert device_name("mlu-3") == "mlu-3"


def test_pool_names_its_node() -> None:
    assert node_of_pool(pool_name("gpu-a.example")) == "gpu-a.example"
    assert node_of_pool("gpu-a.example") == ""
    assert node_of_pool("gpu-a.example/other") == ""
