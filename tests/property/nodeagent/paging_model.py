# SPDX-License-Identifier: Apache-2.0
"""Devices whose driver moves managed pages to where they are used, and containers that use them.

A container with all its memory on its devices makes progress; before, PCIe moves what is missing,
out and in. Containers that work at the same time and together exceed a device lose their pages to
each other in each step: they make little progress, and PCIe is busy all the time. Memory in MiB,
times in seconds.
"""

import random
from collections.abc import Iterable

from hami_nodeagent.core.priorities import ContainerKey
from hami_nodeagent.core.thrash import DeviceUse, Facts, Tenant, Thrash, ThrashRules

STEP_S = 0.25
SAMPLE_S = 2.0
LINK_MIB_S = 20_000.0
MEMORY_MIB = 80_000
THRASHING_PROGRESS = 0.02
"""Part of its time in which a container works while others move its pages."""


class Box:
    """One container."""

    def __init__(self, name: str, uuids: Iterable[str], used_mib: int, *, level: int = 1) -> None:
        """``used_mib``: of each of its devices."""
        self.key: ContainerKey = (name, "main")
        self.uuids = frozenset(uuids)
        self.used_mib = used_mib
        self.level = level
        self.works = True
        """It has work; otherwise it makes no calls."""
        self.has_gate = True
        self.closed_until_s: float | None = None
        self.resident_mib = dict.fromkeys(self.uuids, 0.0)
        self.called_s: float | None = None
        self.waits_s: float | None = None
        self.waited_s = 0.0
        """Time since it last entered the driver, while it has had work."""
        self.progress_s = 0.0

    def is_held(self, now_s: float) -> bool:
        return self.closed_until_s is not None and now_s < self.closed_until_s


class World:
    """One node."""

    def __init__(
        self, *boxes: Box, rules: ThrashRules | None = None, link_mib_s: float = LINK_MIB_S
    ) -> None:
        self.boxes = list(boxes)
        self.rules = rules or ThrashRules(quanta=True)
        self.thrash = Thrash()
        self.now_s = 100.0
        self.is_watched = True
        """The agent runs."""
        self.has_traffic = True
        """The driver reports the traffic."""
        self.other_mib_s = 0.0
        """Traffic that is not caused by pages."""
        self._link_mib_s = link_mib_s
        self._moved_mib: dict[str, float] = {}
        self._sampled_s = self.now_s
        self._traffic: dict[str, float] = {}

    @property
    def uuids(self) -> list[str]:
        return sorted({uuid for box in self.boxes for uuid in box.uuids})

    def run(self, for_s: float) -> None:
        ends_s = self.now_s + for_s
        while self.now_s < ends_s:
            self.step()

    def step(self) -> None:
        """Let time go by, and let the agent look."""
        self._work()
        self.now_s += STEP_S
        if self.now_s - self._sampled_s >= SAMPLE_S:
            elapsed_s = self.now_s - self._sampled_s
            self._traffic = {
                uuid: self._moved_mib.get(uuid, 0.0) / elapsed_s + self.other_mib_s
                for uuid in self.uuids
            }
            self._moved_mib, self._sampled_s = {}, self.now_s
        if self.is_watched:
            self.look()

    def look(self) -> None:
        for action in self.thrash.look(self.facts(), self.rules):
            (box,) = (one for one in self.boxes if one.key == action.key)
            assert box.has_gate
            box.closed_until_s = action.closed_until_s

    def facts(self) -> Facts:
        return Facts(
            now_s=self.now_s,
            tenants=tuple(
                Tenant(
                    key=box.key,
                    level=box.level,
                    uuids=box.uuids,
                    has_gate=box.has_gate,
                    is_held=box.closed_until_s is not None,
                    used_s=box.called_s,
                    waits_s=box.waits_s,
                )
                for box in self.boxes
            ),
            devices=tuple(
                DeviceUse(
                    uuid=uuid,
                    memory_mib=MEMORY_MIB,
                    used_mib=self.used_mib(uuid),
                    traffic_mib_s=self._traffic.get(uuid) if self.has_traffic else None,
                    sampled_s=self._sampled_s,
                )
                for uuid in self.uuids
            ),
        )

    def used_mib(self, uuid: str) -> int:
        return sum(box.used_mib for box in self.boxes if uuid in box.uuids)

    def held(self) -> list[Box]:
        return [box for box in self.boxes if box.is_held(self.now_s)]

    def _work(self) -> None:
        running = [box for box in self.boxes if box.works and not box.is_held(self.now_s)]
        for box in self.boxes:
            if box in running:
                box.called_s, box.waited_s = self.now_s, 0.0
            elif box.works:
                box.waits_s = self.now_s
                box.waited_s += STEP_S
        for box in running:
            box.progress_s += min(self._progress(box, uuid, running) for uuid in box.uuids)

    def _progress(self, box: Box, uuid: str, running: list[Box]) -> float:
        """Return the time that is left of a step after pages were moved."""
        beside = [one for one in running if uuid in one.uuids and one is not box]
        if beside and box.used_mib + sum(one.used_mib for one in beside) > MEMORY_MIB:
            self._move(uuid, self._link_mib_s * STEP_S / (1 + len(beside)))
            for one in (box, *beside):
                one.resident_mib[uuid] = 0.0
            return STEP_S * THRASHING_PROGRESS
        missing_mib = box.used_mib - box.resident_mib[uuid]
        moved_mib = min(missing_mib, self._link_mib_s * STEP_S / 2)
        box.resident_mib[uuid] += moved_mib
        self._move(uuid, 2 * moved_mib)
        others = [one for one in self.boxes if uuid in one.uuids and one is not box]
        excess_mib = sum(one.resident_mib[uuid] for one in (box, *others)) - MEMORY_MIB
        for one in others:
            taken_mib = min(one.resident_mib[uuid], max(0.0, excess_mib))
            one.resident_mib[uuid] -= taken_mib
            excess_mib -= taken_mib
        return STEP_S * (1 - 2 * moved_mib / (self._link_mib_s * STEP_S))

    def _move(self, uuid: str, mib: float) -> None:
        self._moved_mib[uuid] = self._moved_mib.get(uuid, 0.0) + mib


def random_world(chance: random.Random) -> World:
    """Return a node with one to three devices, whose containers may exceed them."""
    uuids = [f"gpu-{number}" for number in range(chance.randint(1, 3))]
    boxes = []
    for number in range(chance.randint(1, 5)):
        own = chance.sample(uuids, chance.randint(1, len(uuids)))
        box = Box(
            f"pod-{number}",
            own,
            chance.randint(1, MEMORY_MIB),
            level=chance.choice((0, 1, 1, 1, 5)),
        )
        box.works = chance.random() < 0.7
        boxes.append(box)
    rules = ThrashRules(quanta=True, quantum_s=chance.choice((2.0, 5.0, 30.0)))
    return World(*boxes, rules=rules)
