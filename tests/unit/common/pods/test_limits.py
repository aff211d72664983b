# SPDX-License-Identifier: Apache-2.0
"""The limits file of a container, byte for byte, and the refusal of damaged ones."""

import pytest

from hami_common.errors import WireInvalid
from hami_common.model.placement import ContainerShares, Share
from hami_common.pods import limits

TEXT = """\
hami-limits/1
container=main
allocation=a1
priority=1
devices=2
device.0.vendor=nvidia
device.0.uuid=GPU-1
device.0.memory_mib=3000
device.0.core_pct=30
device.0.exclusive=0
device.1.vendor=nvidia
device.1.uuid=GPU-2
device.1.memory_mib=81920
device.1.core_pct=100
device.1.exclusive=1
"""
SHARES = ContainerShares(
    name="main",
    kind="app",
    priority=1,
    shares=(
        Share(vendor="nvidia", uuid="GPU-1", memory_mib=3000, core_pct=30),
        Share(vendor="nvidia", uuid="GPU-2", memory_mib=81920, core_pct=100, exclusive=True),
    ),
)


def test_the_file_of_a_container_is_written_so() -> None:
    assert limits.encode(limits.limits_of(SHARES, allocation_id="a1")) == TEXT


def test_decode_returns_what_was_encoded() -> None:
    assert limits.decode(TEXT) == limits.limits_of(SHARES, allocation_id="a1")


def test_priority_is_omitted_without_a_user_value() -> None:
    shares = ContainerShares(name="main", kind="app", shares=())
    text = limits.encode(limits.limits_of(shares, allocation_id="a1"))
    assert text == "hami-limits/1\ncontainer=main\nallocation=a1\ndevices=0\n"
    assert limits.decode(text).priority is None


def test_unknown_keys_are_ignored_so_that_keys_can_be_added() -> None:
    assert limits.decode(TEXT + "device.0.colour=red\nfuture=1\n") == limits.decode(TEXT)


def test_values_may_contain_an_equals_sign() -> None:
    assert limits.decode(TEXT.replace("GPU-1", "GPU=1")).devices[0].uuid == "GPU=1"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (TEXT, "", "line 1 is not 'hami-limits/1'"),
        ("hami-limits/1", "hami-limits/2", "line 1 is not 'hami-limits/1'"),
        ("priority=1", "priority", "line 4 is not key=value"),
        ("container=main\n", "", "container is missing"),
        ("devices=2", "devices=3", "device.2.vendor is missing"),
        ("devices=2", "devices=two", "devices is 'two', not a whole number"),
        ("memory_mib=3000", "memory_mib=-1", "device.0.memory_mib is '-1', not a whole number"),
        ("memory_mib=3000", "memory_mib=٣", "not a whole number"),
        ("device.1.core_pct=100\n", "", "device.1.core_pct is '', not a whole number"),
    ],
)
def test_damaged_file_error_names_the_problem(old: str, new: str, problem: str) -> None:
    with pytest.raises(WireInvalid) as caught:
        limits.decode(TEXT.replace(old, new))
    assert problem in caught.value.problem


def test_core_policy_is_written_only_when_not_the_default() -> None:
    def text(core_policy: str) -> str:
        return limits.encode(limits.limits_of(SHARES, allocation_id="a1", core_policy=core_policy))

    assert text("default") == TEXT
    assert "core_policy=force\n" in text("force")
    assert limits.decode(text("force")).core_policy == "force"


def test_limits_above_the_request_are_in_the_file_where_the_share_has_them() -> None:
    burst = Share(
        vendor="nvidia",
        uuid="GPU-1",
        memory_mib=3000,
        core_pct=30,
        memory_limit_mib=6000,
        core_limit_pct=60,
    )
    shares = ContainerShares(name="main", kind="app", shares=(burst,))
    wanted = limits.limits_of(shares, allocation_id="a1")
    text = limits.encode(wanted)
    assert text.splitlines()[-4:] == [
        "device.0.core_pct=30",
        "device.0.memory_limit_mib=6000",
        "device.0.core_limit_pct=60",
        "device.0.exclusive=0",
    ]
    assert limits.decode(text) == wanted
    assert wanted.devices[0].memory_limit_mib == 6000
    with pytest.raises(WireInvalid, match="memory_limit_mib"):
        limits.decode(text.replace("memory_limit_mib=6000", "memory_limit_mib=-1"))
