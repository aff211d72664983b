# SPDX-License-Identifier: Apache-2.0
"""The cluster on which the scheduler is measured: nodes, devices, links, and their running pods.

Memory in MiB, compute in percent of one device.
"""

from collections.abc import Iterator

from hami_common.events.inventory import NodeDevices
from hami_common.model.placement import ContainerShares
from tests.support import builders

DEVICES = 8
MEMORY_MIB = 81_559
PAIR_STRENGTH, FAR_STRENGTH = 300, 10
OTHER = "hygon"
"""The vendor that few nodes have."""
SIZES_MIB = (8_192, 16_384, 40_960)
"""Memory of the shares that run."""


def inventory(number: int) -> Iterator[NodeDevices]:
    """One node: eight linked devices of one vendor, on every tenth node half of them another's."""
    node = name_of(number)
    vendors = {"nvidia": DEVICES} if number % 10 else {"nvidia": 4, OTHER: 4}
    for vendor, count in vendors.items():
        devices = [
            builders.device(
                f"{vendor}-{number}-{i}",
                vendor=vendor,
                index=i,
                memory_mib=MEMORY_MIB,
                numa=i * 2 // DEVICES,
            )
            for i in range(count)
        ]
        links = [
            (a.uuid, b.uuid, PAIR_STRENGTH if i // 2 == j // 2 else FAR_STRENGTH)
            for i, a in enumerate(devices)
            for j, b in enumerate(devices[:i])
        ]
        yield builders.node_devices(node, devices, vendor=vendor, links=links)


def name_of(number: int) -> str:
    """A node name of 45 characters, as clouds make them."""
    return f"gke-accelerator-pool-{number:06d}.zone-a.internal.x"


def booking(vendor: str, uuid: str, memory_mib: int) -> tuple[ContainerShares, ...]:
    """Holdings of a running pod."""
    return (builders.held(builders.share(uuid, memory_mib, 10, vendor=vendor)),)
