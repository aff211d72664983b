# SPDX-License-Identifier: Apache-2.0
"""Cards in MIG mode as the driver describes them, without a driver: by the simulation's tables."""

from hami_common.model.device import Device, DeviceFacts
from hami_nodeagent.drivers.nvidia.mig import Size, by_size, divided
from hami_sim.hardware.mig_tables import TABLES, MigProfile
from tests.support.builders import device

CHIPS = tuple(TABLES)


def facts_of(chip: str, *, uuid: str = "GPU-0", index: int = 0) -> DeviceFacts:
    """Return the agent's report of a card of ``chip``."""
    sizes = tuple(sorted((_size(row) for row in TABLES[chip]), key=by_size))
    largest = max(size.memory_mib for size in sizes)
    facts = DeviceFacts(
        uuid=uuid,
        vendor="nvidia",
        index=index,
        type=f"NVIDIA {chip}",
        memory_mib=largest + 640,
        mode="mig",
    )
    return divided(facts, sizes)


def card(chip: str, index: int = 0) -> Device:
    """Return a registered card ``GPU-<index>`` of ``chip``."""
    facts = facts_of(chip, uuid=f"GPU-{index}", index=index)
    return device(
        facts.uuid,
        index=index,
        type=facts.type,
        memory_mib=facts.memory_mib,
        mode=facts.mode,
        partitions=facts.partitions,
        resources=dict(facts.resources),
    )


def _size(row: MigProfile) -> Size:
    return Size(
        name=row.name,
        native_id=row.native_id,
        slices=row.slices,
        count=row.count,
        memory_mib=row.memory_mib,
        processors=row.sm_count,
        engines=(row.decoders, row.encoders, row.jpeg, row.ofa),
        length=row.size,
        starts=row.starts,
    )
