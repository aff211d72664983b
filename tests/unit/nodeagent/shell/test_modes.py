# SPDX-License-Identifier: Apache-2.0
"""A card's mode is switched only while idle, whatever fails and wherever the agent dies."""

import dataclasses
from pathlib import Path

import anyio.lowlevel
import pytest
from msgspec.structs import replace

from hami_common.events.allocation import AllocationRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device, DeviceFacts
from hami_common.model.placement import ContainerShares, Share
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.hardware import CardMode
from hami_nodeagent.core.modes import ModesFile
from hami_nodeagent.drivers.errors import DriverDenied, DriverError, DriverTransient, PartitionBusy
from hami_nodeagent.settings import DriversSettings, NvidiaSettings, PartitionSettings
from hami_nodeagent.shell.checkpoint import Checkpoint
from hami_nodeagent.shell.modes import ModeKeeper
from hami_nodeagent.shell.site import Site
from tests.unit.nodeagent.core.builders import NODE
from tests.unit.nodeagent.shell.support import make_site

pytestmark = pytest.mark.anyio

CARD, OTHER = "GPU-0", "GPU-1"
POINTS = ("read", "journal.begin", "journal.stored", "switch.begin", "switch.half", "switch.done")


class Killed(BaseException):
    """The agent has died."""


class Machine:
    """Two cards that outlive the agent; every point can fail, or be the agent's last."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.modes = {
            uuid: CardMode(uuid=uuid, is_divided=False, is_divided_next=False)
            for uuid in (CARD, OTHER)
        }
        self.kill_at = ""
        self.fail_with: DriverError | None = None
        self.switched: list[tuple[str, bool]] = []

    def pass_by(self, point: str) -> None:
        if point == self.kill_at:
            self.kill_at = ""
            raise Killed

    @property
    def vendor(self) -> str:
        return "nvidia"

    async def listed(self) -> tuple[DeviceFacts, ...]:
        await anyio.lowlevel.checkpoint()
        return tuple(
            DeviceFacts(uuid=uuid, vendor="nvidia", index=index, type="A100", memory_mib=1)
            for index, uuid in enumerate(self.modes)
        )

    async def modes_(self) -> tuple[CardMode, ...]:
        await anyio.lowlevel.checkpoint()
        self.pass_by("read")
        return tuple(self.modes.values())

    async def switch_mode(self, uuid: str, *, is_divided: bool) -> None:
        await anyio.lowlevel.checkpoint()
        self.pass_by("switch.begin")
        if self.fail_with is not None:
            raise self.fail_with
        card = self.modes[uuid]
        self.modes[uuid] = replace(card, is_divided_next=is_divided)
        self.pass_by("switch.half")
        self.modes[uuid] = replace(card, is_divided=is_divided, is_divided_next=is_divided)
        self.switched.append((uuid, is_divided))
        self.pass_by("switch.done")


class Switch:
    """The machine as the driver shows it."""

    def __init__(self, machine: Machine) -> None:
        self.vendor = machine.vendor
        self.listed = machine.listed
        self.modes = machine.modes_
        self.switch_mode = machine.switch_mode


class Journal(Checkpoint):
    """The journal on disk, with points before and after it is stored."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.directory)
        self._machine = machine

    def save_modes(self, file: ModesFile) -> None:
        self._machine.pass_by("journal.begin")
        super().save_modes(file)
        self._machine.pass_by("journal.stored")


class Agent:
    """One run of the agent; the registry applies its reports at once."""

    def __init__(
        self,
        machine: Machine,
        setting: dict[str, str],
        *,
        injection: str = "env",
        **settings: float,
    ) -> None:
        self.machine = machine
        given = {"mode_settle_s": 0.0, "retry_s": 0.0, "retry_most_s": 0.0, **settings}
        site = make_site(
            machine.directory,
            injection=injection,
            host_root=str(machine.directory / "host"),
            partitions=PartitionSettings(**given),  # type: ignore[arg-type]  # each is a number
            drivers=DriversSettings(nvidia=NvidiaSettings(mig_mode=setting)),  # type: ignore[arg-type]  # on or off
        )
        self.site: Site = dataclasses.replace(site, checkpoint=Journal(machine))
        self.site.picture.ledger_known = self.site.picture.pods_known = True
        self.looks_wanted = 0
        self.keeper = ModeKeeper(
            site=self.site, switch=Switch(machine), look_again=self._note_wanted
        )

    def _note_wanted(self) -> None:
        self.looks_wanted += 1

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            await self.keeper.look()
            self.publish()

    def publish(self, *, knows_cordon: bool = True) -> None:
        """The registry publishes what the agent reports."""
        devices = tuple(
            Device(
                uuid=uuid,
                vendor="nvidia",
                index=index,
                type="A100",
                memory_mib=1,
                capacity_mib=1,
                cordoned=knows_cordon and uuid in self.withheld(),
                mode="mig" if mode.is_divided else "soft",
            )
            for index, (uuid, mode) in enumerate(self.machine.modes.items())
        )
        self.site.picture.set_canonical(
            NodeDevices(
                node=NODE,
                vendor="nvidia",
                boot_id="",
                seq=1,
                time_s=0,
                config_generation=1,
                devices=devices,
            )
        )

    def withheld(self) -> set[str]:
        board = self.site.picture.partitions
        return {uuid for uuid, told in board.switching.items() if told.is_withheld}

    def text(self) -> str:
        return self.site.picture.partitions.mode_text(CARD)

    def place(self, uid: str, uuid: str) -> None:
        share = Share(vendor="nvidia", uuid=uuid, memory_mib=1)
        record = AllocationRecord(
            op="reserve",
            allocation_id=uid,
            node=NODE,
            pod_uid=uid,
            namespace="default",
            pod=uid,
            containers=(ContainerShares(name="main", kind="app", shares=(share,)),),
        )
        self.site.picture.entries_by_uid[uid] = Entry(record=record, sequence=1)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def journal(machine: Machine) -> tuple[object, ...]:
    file = Checkpoint(machine.directory).load_modes()
    return () if file is None else file.notes


async def test_card_is_cordoned_alone_drained_switched_and_uncordoned(machine: Machine) -> None:
    agent = Agent(machine, {f"{NODE}/0": "on"})
    agent.place("a", CARD)
    agent.place("b", OTHER)
    agent.publish()
    await agent.look(3)
    assert agent.withheld() == {CARD}
    assert agent.text() == "switching MIG mode on waits for pod default/a"
    assert machine.switched == []
    assert journal(machine) == ()
    del agent.site.picture.entries_by_uid["a"]
    await agent.look(3)
    assert machine.switched == [(CARD, True)]
    assert (agent.withheld(), agent.text(), journal(machine)) == (set(), "", ())
    assert agent.looks_wanted > 1


async def test_card_is_not_switched_before_the_registry_holds_it_back(machine: Machine) -> None:
    agent = Agent(machine, {CARD: "on"})
    for _ in range(4):
        await agent.keeper.look()
        agent.publish(knows_cordon=False)
    assert machine.switched == []
    await agent.look(3)
    assert machine.switched == [(CARD, True)]


async def test_card_without_a_setting_is_never_touched(machine: Machine) -> None:
    agent = Agent(machine, {})
    machine.modes[CARD] = replace(machine.modes[CARD], is_divided_next=True)
    agent.publish()
    await agent.look(3)
    assert (machine.switched, agent.withheld(), agent.text()) == ([], set(), "")
    await agent.keeper.run()  # ends at once: there is nothing to do, ever


async def test_busy_card_is_retried_and_uncordoned_meanwhile(
    machine: Machine,
) -> None:
    machine.fail_with = PartitionBusy(doing="switch", detail="somebody holds the card open")
    agent = Agent(machine, {CARD: "on"}, tries=3, mode_again_s=3600.0)
    agent.publish()
    await agent.look(8)
    assert agent.withheld() == set()
    assert "failed: " in agent.text()
    assert "holds the card open" in agent.text()
    machine.fail_with = None
    again = Agent(machine, {CARD: "on"})  # a restart tries afresh
    again.publish()
    await again.look(3)
    assert machine.switched == [(CARD, True)]


async def test_permission_error_is_tried_once(machine: Machine) -> None:
    machine.fail_with = DriverDenied(doing="switch", detail="no permission")
    agent = Agent(machine, {CARD: "on"}, mode_again_s=3600.0)
    agent.publish()
    await agent.look(3)
    assert (agent.withheld(), journal(machine)) == (set(), ())
    assert agent.text() == "switching MIG mode on failed: switch: no permission"


async def test_journal_that_cannot_be_stored_leaves_the_card_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(machine, {CARD: "on"})
    agent.publish()

    def refuse(file: ModesFile) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(agent.site.checkpoint, "save_modes", refuse)
    await agent.look(4)
    assert machine.switched == []


async def test_card_allocated_while_the_journal_is_stored_is_not_switched(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(machine, {CARD: "on"})
    agent.publish()
    store = agent.site.checkpoint.save_modes

    def store_late(file: ModesFile) -> None:
        store(file)
        agent.place("late", CARD)

    with monkeypatch.context() as patched:
        patched.setattr(agent.site.checkpoint, "save_modes", store_late)
        await agent.look(4)
    assert machine.switched == []
    assert agent.text() == "switching MIG mode on waits for pod default/late"
    assert journal(machine) == ()


async def test_card_that_is_whole_again_waits_for_its_cdi_name(machine: Machine) -> None:
    machine.modes[CARD] = CardMode(uuid=CARD, is_divided=True, is_divided_next=True)
    agent = Agent(machine, {CARD: "off"}, injection="cdi")
    agent.publish()
    await agent.look(3)
    assert (machine.switched, agent.withheld()) == ([(CARD, False)], set())  # nothing is seen there
    folder = machine.directory / "host/etc/cdi"
    folder.mkdir(parents=True)
    await agent.look(2)
    assert agent.withheld() == {CARD}
    assert "no CDI specification names the card" in agent.text()
    for kind, name, is_named in (
        ("nvidia.com/gpu", OTHER, False),
        ("acme.com/gpu", CARD, False),
        ("nvidia.com/gpu", f"{CARD}1", False),
        ("nvidia.com/gpu", CARD, True),
    ):
        (folder / "nvidia.yaml").write_text(f"kind: {kind}\ndevices:\n- name: {name}\n")
        await agent.look(2)
        assert agent.withheld() == (set() if is_named else {CARD})
    (folder / "nvidia.yaml").unlink()
    text = f'{{"kind": "nvidia.com/gpu", "devices": [{{"name": "{CARD}"}}]}}'
    (folder / "nvidia.json").write_text(text)
    await agent.look(2)
    assert agent.withheld() == set()


async def test_pending_change_is_rolled_back_without_the_setting(
    machine: Machine,
) -> None:
    agent = Agent(machine, {CARD: "on"})
    machine.kill_at = "switch.half"
    agent.publish()
    with pytest.raises(Killed):
        await agent.look(4)
    assert machine.modes[CARD].is_divided_next
    after = Agent(machine, {})
    after.publish()
    await after.look(2)
    assert machine.modes[CARD] == CardMode(uuid=CARD, is_divided=False, is_divided_next=False)
    assert journal(machine) == ()


@pytest.mark.parametrize("point", POINTS)
async def test_agent_killed_at_any_point_resumes(machine: Machine, point: str) -> None:
    for is_on in (True, False):
        setting = {CARD: "on" if is_on else "off"}
        machine.kill_at = point
        agent = Agent(machine, setting)
        agent.publish()
        with pytest.raises(Killed):
            await agent.look(5)
        agent = Agent(machine, setting)
        agent.publish()
        await agent.look(5)
        assert machine.modes[CARD] == CardMode(uuid=CARD, is_divided=is_on, is_divided_next=is_on)
        assert (agent.withheld(), journal(machine)) == (set(), ())
    assert machine.modes[OTHER].is_divided is False


async def test_driver_that_does_not_answer_changes_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(machine, {CARD: "on"})
    agent.publish()
    await agent.look()
    assert agent.withheld() == {CARD}

    async def fail() -> tuple[CardMode, ...]:
        await anyio.lowlevel.checkpoint()
        raise DriverTransient(doing="read", detail="no answer")

    with monkeypatch.context() as patched:
        patched.setattr(machine, "modes_", fail)
        patched.setattr(agent.keeper, "_switch", Switch(machine))
        await agent.look(2)
    assert agent.withheld() == {CARD}
    assert machine.switched == []
