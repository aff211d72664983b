# SPDX-License-Identifier: Apache-2.0
"""Law: a change of the agent's version neither loses nor doubles a share of a running pod.

The earlier version writes ids as ``<uuid>-<i>``, this one as ``<uuid>::<i>``. Kubelet hands out any
free healthy id, pods start and end, and the node changes between both versions in any order. The
ledger admits as many shares as devices have slots.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hami_common.model.device import Device
from hami_nodeagent.core.splits import Splits

SLOTS = 3
DEVICES = [
    Device(
        uuid=f"GPU-{number}{'0' * 7}-0000-0000-0000-000000000000",
        vendor="nvidia",
        index=number,
        type="A100",
        memory_mib=40_960,
        capacity_mib=40_960,
        slots=SLOTS,
    )
    for number in range(2)
]


def earlier(held: set[str]) -> dict[str, bool]:
    """Return the ids that the earlier version advertises, with their health."""
    ids = {f"{device.uuid}-{number}": True for device in DEVICES for number in range(SLOTS)}
    uuids = {device.uuid for device in DEVICES}
    for one in held - ids.keys():
        ids[one] = one.rpartition("-")[0] in uuids
    return ids


def current(held: set[str]) -> dict[str, bool]:
    """Return the ids that this version advertises, with their health."""
    splits = Splits.of_devices(DEVICES, held=held)
    ids = {split.id: split.healthy for split in splits.all}
    assert len(ids) == len(splits.all), "an id is advertised twice"
    return ids


class Node(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.is_current = False
        self.holders: dict[str, str] = {}
        """Id → its pod, as in kubelet's checkpoint and in the agent's grants."""
        self.count = 0

    def advertised(self) -> dict[str, bool]:
        held = set(self.holders)
        return current(held) if self.is_current else earlier(held)

    @rule()
    def change_version(self) -> None:
        self.is_current = not self.is_current

    @precondition(lambda self: len(self.holders) < SLOTS * len(DEVICES))
    @rule(data=st.data())
    def start_pod(self, data: st.DataObject) -> None:
        healthy = {one for one, is_healthy in self.advertised().items() if is_healthy}
        free = sorted(healthy - self.holders.keys())
        assert free, "the ledger has a free slot, and kubelet has no free id"
        self.count += 1
        self.holders[data.draw(st.sampled_from(free))] = f"pod-{self.count}"

    @precondition(lambda self: bool(self.holders))
    @rule(data=st.data())
    def end_pod(self, data: st.DataObject) -> None:
        del self.holders[data.draw(st.sampled_from(sorted(self.holders)))]

    @invariant()
    def running_pods_keep_their_ids(self) -> None:
        assert self.holders.keys() <= self.advertised().keys()

    @invariant()
    def this_version_keeps_them_healthy(self) -> None:
        if self.is_current:
            advertised = self.advertised()
            assert all(advertised[one] for one in self.holders)

    @invariant()
    def this_version_advertises_one_id_per_slot(self) -> None:
        """Two ids of one number are advertised only while containers hold both."""
        if self.is_current:
            both = sum(
                f"{device.uuid}-{number}" in self.holders
                and f"{device.uuid}::{number}" in self.holders
                for device in DEVICES
                for number in range(SLOTS)
            )
            assert len(self.advertised()) == SLOTS * len(DEVICES) + both


TestNode = Node.TestCase
