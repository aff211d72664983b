# SPDX-License-Identifier: Apache-2.0
"""The reconciler over real partitioners, in processes of its own that SIGKILL ends at any step.

``Lives`` is a ledger with pods, beside a ``Machine`` that enforces its own tables. Each ``life`` is
a forked process with the agent's reconciler, its journal on disk and the vendor's partitioner. It
ends by itself when journal and ledger agree, or is killed before its n-th step: a step is any
change of a file (journal, descriptions, the state of the fake tools) or a call that changes the
fake NVML. The parent reads the machine's partitions, and never uses state of the child.

Memory in MiB, compute in percent of one device.
"""

import multiprocessing
import os
import random
import signal
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import anyio
import pynvml  # noqa: TID251 - the calls that change a card are steps
import pytest

from hami_common.model.device import Device, DeviceFacts
from hami_common.model.placement import Share
from hami_common.vendors.handles import needs_instance
from hami_common.vendors.partitions import NO_START, Division, choose_start
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.partitions import Owner, owner_of
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.drivers.protocol import Driver
from hami_nodeagent.shell.checkpoint import Checkpoint
from hami_nodeagent.shell.partitions import Partitions
from tests.support.partitions_world import World, device_of
from tests.support.vendor_parts import PartBench

LIFE_S = 60.0
"""Longest life, on a machine with other load."""
STEP = "hami.step"
_CHANGES = frozenset({STEP, "os.rename", "os.remove", "os.mkdir", "os.rmdir"})
_WRITES = os.O_WRONLY | os.O_RDWR
_NVML_CHANGES = (
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
)


class Machine(ABC):
    """Divided devices with the vendor's own partitioner."""

    vendor: str
    most: int
    """Most partitions of one device, where it has no table of sizes."""

    @abstractmethod
    def driver(self) -> Driver:
        """A driver without state."""

    @abstractmethod
    def wishes(self, device: Device) -> tuple[Share, ...]:
        """Shares that pods can request of a device, without a place."""

    @abstractmethod
    def count(self, device: Device) -> int:
        """Number of partitions on a device by the machine itself."""

    @abstractmethod
    def trouble(self, dice: random.Random) -> None:
        """Make the next creation of a partition fail."""

    @abstractmethod
    def forgive(self) -> None:
        """Cancel the failure of ``trouble``."""

    @abstractmethod
    def overbooked(self, device: Device) -> str:
        """Violation of the machine's own tables by a device's partitions; empty: none."""

    @abstractmethod
    def litter(self, device: Device) -> str:
        """Leftovers on an empty device."""

    keeps_words = True
    """The handles of a partition never change."""

    def facts(self) -> tuple[DeviceFacts, ...]:
        """The devices as the driver lists them, those that can be divided."""

        async def ask() -> tuple[DeviceFacts, ...]:
            driver = self.driver()
            inventory = await driver.discover()
            await driver.aclose()
            return tuple(
                one for one in inventory.devices if one.mode != "soft" or not self.has_modes
            )

        return anyio.run(ask)

    has_modes = True
    """A device in mode ``soft`` is not divided."""

    def instances(self) -> tuple[Instance, ...]:
        """Instances that the driver reads now."""

        async def ask() -> tuple[Instance, ...]:
            driver = self.driver()
            assert driver.partitioner is not None
            found = await driver.partitioner.instances()
            await driver.aclose()
            return found

        return anyio.run(ask)


class ToolMachine(Machine):
    """A machine whose vendor's tool, or files, divide it."""

    def __init__(self, bench: PartBench) -> None:
        self._bench = bench
        self.vendor = bench.kind.vendor
        self.most = bench.kind.room
        self.has_modes = False
        self.keeps_words = self.vendor != "kunlunxin"

    def driver(self) -> Driver:
        settings = {**self._bench.tools.settings, "answer_age_s": 0.0, "confirm_s": 0.001}
        return build_driver(self.vendor, settings)

    def wishes(self, device: Device) -> tuple[Share, ...]:
        return tuple(
            Share(
                vendor=self.vendor,
                uuid=device.uuid,
                profile=profile,
                kind=kind,
                memory_mib=memory_mib,
                core_pct=core_pct,
            )
            for profile, kind, memory_mib, core_pct in self._bench.kind.sizes
        )

    def count(self, device: Device) -> int:
        return self._bench.in_hardware(self._index(device))

    def trouble(self, dice: random.Random) -> None:
        if self._bench.kind.create:
            word = self._bench.kind.create.partition("=")[0]
            self._bench.tools.trip(word, dice.choice(("fail", "late", "stall", "garbage")))

    def forgive(self) -> None:
        self._bench.tools.forgive()

    def overbooked(self, device: Device) -> str:
        return self._bench.overbooked(self._index(device))

    def litter(self, device: Device) -> str:
        return self._bench.litter(self._index(device))

    def _index(self, device: Device) -> int:
        return self._bench.uuids.index(device.uuid)


def step_at_nvml_changes() -> None:
    """Count every call that changes a card as a step before and after it, in this process."""

    def stepping(fn: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            sys.audit(STEP)
            answer = fn(*arguments)
            sys.audit(STEP)
            return answer

        return call

    for name in _NVML_CHANGES:
        setattr(pynvml, name, stepping(getattr(pynvml, name)))


class Reaper:
    """Kills this process before its n-th step."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        """An audit hook."""
        if event in _CHANGES or (event == "open" and _is_write(arguments)):
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _is_write(arguments: tuple[object, ...]) -> bool:
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & _WRITES)


class Lives(World):
    """A ledger that changes at random, and lives of the agent that follow it."""

    def __init__(self, machine: Machine, directory: Path, dice: random.Random) -> None:
        super().__init__(directory)
        self._machine = machine
        self._dice = dice
        self._numbers = count()
        self.devices = tuple(map(device_of, machine.facts()))
        self.checkpoint = Checkpoint(directory / "state")
        self.settings = {"tries": 1_000_000}
        self.live_shares: dict[str, Share] = {}
        """Shares in the ledger, by pod."""

    # -- actions of other actors

    def churn(self) -> None:
        """End some pods, and add some that fit beside the rest."""
        for uid in list(self.live_shares):
            if self._dice.random() < 0.35:
                self.end(uid)
        for _ in range(self._dice.randint(1, 3)):
            self.come(self._dice.choice(self.devices))

    def come(self, device: Device) -> bool:
        """Add a pod with a share of the device, if one fits."""
        wishes = list(self._machine.wishes(device))
        self._dice.shuffle(wishes)
        for wish in wishes:
            share = self._placed(device, wish)
            if share is not None:
                assert needs_instance(share, device)
                uid = f"pod-{next(self._numbers)}"
                self.live_shares[uid] = share
                self.place(uid, share)
                return True
        return False

    def end(self, uid: str) -> None:
        """Remove a pod."""
        del self.live_shares[uid]
        self.release(uid)

    def _placed(self, device: Device, wish: Share) -> Share | None:
        """The share with a place, as a scheduler would book it."""
        others = [one for one in self.live_shares.values() if one.uuid == device.uuid]
        if not device.partitions:
            memory_mib = sum(one.memory_mib for one in others) + wish.memory_mib
            core_pct = sum(one.core_pct for one in others) + wish.core_pct
            fits = memory_mib <= device.memory_mib and core_pct <= 100
            return wish if fits and len(others) < self._machine.most else None
        division = Division(device.partitions, device.resources)
        profile = division.profiles[division.by_name[wish.profile]]
        parts = Counter(one.part for one in others)
        start = None
        if profile.starts:
            start = choose_start(profile, division.spent(parts)[0], division.profiles)
            if start == NO_START:
                return None
        share = Share(
            vendor=wish.vendor,
            uuid=wish.uuid,
            profile=wish.profile,
            start=start,
            kind=wish.kind,
            memory_mib=wish.memory_mib,
            core_pct=wish.core_pct,
        )
        is_mixed = any(one.kind != share.kind for one in others)
        return (
            None
            if is_mixed or division.is_over({**parts, share.part: parts[share.part] + 1})
            else share
        )

    # -- the agent

    def life(self, *, dies_at: int) -> bool:
        """Run an agent; return False if killed before its ``dies_at``-th step (0: never)."""
        process = multiprocessing.get_context("fork").Process(target=self._live, args=(dies_at,))
        process.start()
        process.join(LIFE_S + 10)
        if process.exitcode is None:
            process.kill()
            process.join()
            pytest.fail("the agent neither settled nor died")
        assert process.exitcode in {0, -signal.SIGKILL}
        return process.exitcode == 0

    def _live(self, dies_at: int) -> None:
        """Run in the child."""
        step_at_nvml_changes()
        driver = self._machine.driver()
        assert driver.partitioner is not None
        self.partitioners = (driver.partitioner,)
        if dies_at:
            sys.addaudithook(Reaper(dies_at))
        anyio.run(self._until_settled)

    async def _until_settled(self) -> None:
        async with self.agent() as partitions:
            await self.settle(lambda: self._is_settled(partitions), within_s=LIFE_S)

    def _is_settled(self, partitions: Partitions) -> bool:
        carried = self.site.picture.partitions.carried.keys()
        return partitions.is_idle and carried == self.owners() == self._noted_owners()

    def _noted_owners(self) -> set[Owner]:
        file = self.checkpoint.load_partitions()
        notes = file.notes if file is not None else ()
        return {note.owner if note.phase == "made" else Owner(pod_uid="?") for note in notes}

    # -- actual state

    def owners(self) -> set[Owner]:
        """Owners by the ledger."""
        return {owner_of(self.entries[uid], "main", 0) for uid in self.live_shares}

    def held(self) -> dict[tuple[str, str], Owner]:
        """(device, instance) of all partitions that carry a share of the ledger, by the journal."""
        file = self.checkpoint.load_partitions()
        owners = self.owners()
        return {
            (note.wanted.uuid, note.instance_id): note.owner
            for note in (file.notes if file is not None else ())
            if note.phase == "made" and note.owner in owners
        }

    def words(self) -> dict[tuple[str, str], dict[str, str]]:
        """Instances of the hardware, and their words for containers."""
        keeps = self._machine.keeps_words
        return {
            (one.uuid, one.instance_id): dict(one.handles) if keeps else {}
            for one in self._machine.instances()
        }

    def check_settled(self) -> None:
        """Verify that hardware equals journal equals ledger."""
        there = {(one.uuid, one.instance_id): one for one in self._machine.instances()}
        file = self.checkpoint.load_partitions()
        assert file is not None or not self.live_shares
        notes = file.notes if file is not None else ()
        assert {note.phase for note in notes} <= {"made"}
        noted = {(note.wanted.uuid, note.instance_id) for note in notes}
        assert noted == there.keys(), (notes, there)
        by_owner = {note.owner: note for note in notes}
        assert by_owner.keys() == self.owners()
        for uid, share in self.live_shares.items():
            note = by_owner[owner_of(self.entries[uid], "main", 0)]
            found = there[note.wanted.uuid, note.instance_id]
            assert (found.uuid, found.profile) == (share.uuid, share.profile)
            assert found.start in {None, share.start}
            assert found.handles
        for device in self.devices:
            assert not self._machine.overbooked(device)
            held = sum(share.uuid == device.uuid for share in self.live_shares.values())
            assert self._machine.count(device) == held

    def litter(self) -> Iterator[str]:
        """Leftovers on empty devices."""
        for device in self.devices:
            if text := self._machine.litter(device):
                yield f"{device.uuid}: {text}"
