# SPDX-License-Identifier: Apache-2.0
"""Output of the demo's containers, as it is read back."""

from hami_common.pods import limits
from hami_common.pods.limits import DeviceLimit, Limits
from hami_sim.demo import reported, without_messages

LIMITS = Limits(
    container="main",
    allocation_id="a1",
    devices=(DeviceLimit(vendor="nvidia", uuid="GPU-1", memory_mib=3000, core_pct=30),),
)


def test_messages_of_the_limiter_are_no_part_of_the_limits() -> None:
    stdout = (
        limits.encode(LIMITS)
        + "gpu.intercepted=1\ngpu.devices=1\ngpu.0.uuid=GPU-1\n"
        + "hami: presence is no longer measured\n"
        + "gpu.0.total_mib=3000\n"
    )
    assert limits.decode(without_messages(stdout)).devices == LIMITS.devices
    assert reported(stdout)["devices"][0]["total_mib"] == 3000
