# SPDX-License-Identifier: Apache-2.0
"""Hardware partitions through a whole agent: immediate answers, specs, reboots, and crashes."""

import base64
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import grpc.aio
import msgspec
import pytest
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.events.allocation import AllocationRecord
from hami_common.events.codec import decode
from hami_common.events.partition import PartitionRecord
from hami_common.kubeletapi import deviceplugin
from hami_common.model.device import Profile
from hami_nodeagent.core.partitions import JournalFile
from hami_nodeagent.drivers.simulated.partitioner import POINTS, Part, Parts, Turn
from hami_nodeagent.settings import DriversSettings, NvidiaSettings, PartitionSettings
from hami_sim.hardware import profile as hardware
from hami_sim.natsd import NatsServer
from hami_sim.process import Process
from tests.integration.nodeagent.plane import NODE, Ask, Plane, run_plane, until
from tests.support import dying_agent

pytestmark = pytest.mark.anyio

GRID = (
    Profile(name="1g.5gb", memory_mib=4864, core_pct=14, size=1, starts=tuple(range(7))),
    Profile(name="3g.20gb", memory_mib=19968, core_pct=42, size=4, starts=(0, 4)),
)


START_S = 50.0


class Machine:
    """A node whose cards are divided, with everything but its agent."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.parts_file = plane.directory / "parts.json"
        self.cdi = plane.directory / "cdi"
        self.profile = plane.directory / "divided.toml"
        text = hardware.path_of("8xA100-40").read_text()
        sizes = "".join(
            f'\n[[partitions]]\nname = "{one.name}"\nmemory_mib = {one.memory_mib}\n'
            f"core_pct = {one.core_pct}\nsize = {one.size}\nstarts = {list(one.starts)}\n"
            for one in GRID
        )
        self.profile.write_text(text.replace("[model]\n", '[model]\nmode = "mig"\n', 1) + sizes)
        plane.devices = tuple(replace(one, mode="mig", partitions=GRID) for one in plane.devices)

    def settings(self, mig_mode: dict[str, Literal["on", "off"]] | None = None) -> dict[str, Any]:
        """Settings of the agent."""
        host = self.plane.directory / "host"
        (host / "etc/cdi").mkdir(parents=True, exist_ok=True)
        return {
            "injection": "cdi",
            "host_root": str(host),
            "partitions": PartitionSettings(
                cdi_dir=str(self.cdi), retry_s=0.05, mode_look_s=0.05, mode_settle_s=0.05
            ),
            "drivers": DriversSettings(
                serve=(),
                nvidia=NvidiaSettings(
                    simulated_profile=str(self.profile),
                    simulated_partitions=str(self.parts_file),
                    mig_mode=mig_mode or {},
                ),
            ),
        }

    def parts(self) -> tuple[Part, ...]:
        """Partitions of the hardware."""
        return self.stored().parts

    def stored(self) -> Parts:
        if not self.parts_file.exists():
            return Parts()
        return msgspec.json.decode(self.parts_file.read_bytes(), type=Parts)

    def store(self, parts: Parts) -> None:
        fresh = self.parts_file.with_suffix(".fresh")
        fresh.write_bytes(msgspec.json.encode(parts))
        fresh.replace(self.parts_file)

    def journal(self) -> JournalFile:
        """The agent's journal file."""
        file = self.plane.directory / "state" / "partitions.json"
        data = file.read_bytes() if file.exists() else b'{"version":1}'
        return decode(data, JournalFile, what="journal")

    async def reserve(self, name: str, profile: str, *starts: int) -> tuple[AllocationRecord, int]:
        """A pod and its reservation of one partition, or several, of one card."""
        size = next(one for one in GRID if one.name == profile)
        pod = await self.plane.create(name, Ask(shares=((0, size.memory_mib),) * len(starts)))
        record = self.plane.record(pod)
        (container,) = record.containers
        shares = tuple(
            replace(one, profile=profile, start=start, core_pct=size.core_pct)
            for one, start in zip(container.shares, starts, strict=True)
        )
        record = replace(record, containers=(replace(container, shares=shares),))
        return record, await self.plane.reserve(record)

    async def release(self, record: AllocationRecord) -> None:
        """The pod is gone, and so is its share."""
        await self.plane.kube.delete("pods", record.pod, "default")

        await self.plane.reserve(replace(record, op="release", containers=()))

    def agree(self, *records: AllocationRecord) -> bool:
        """Report if hardware, journal and ledger agree."""
        wanted = {
            (share.uuid, share.profile, share.start, record.pod_uid)
            for record in records
            for container in record.containers
            for share in container.shares
        }
        notes = self.journal().notes
        noted = {
            (note.wanted.uuid, note.wanted.profile, note.wanted.start, note.owner.pod_uid)
            for note in notes
        }
        there = {(part.uuid, str(part.number)) for part in self.parts() if part.whole}
        made = {(one.wanted.uuid, one.instance_id) for one in notes if one.phase == "made"}
        return noted == wanted and there == made and len(notes) == len(self.parts())


@pytest.fixture
async def machine(short_path: Path, nats_server: NatsServer) -> AsyncIterator[Machine]:
    cdi = (str(short_path / "cdi"),)
    async with run_plane(short_path, nats_server, cdi_directories=cdi) as plane:
        built = Machine(plane)
        await plane.publish_devices()
        yield built


async def test_container_sees_the_partitions_that_were_made_for_it(machine: Machine) -> None:
    plane = machine.plane
    async with plane.agent(**machine.settings({f"{NODE}/0": "off", f"{NODE}/1": "off"})):
        record, sequence = await machine.reserve("web", "3g.20gb", 0, 4)
        await plane.bind(record, sequence)
        state = await plane.until_state(record.pod_uid, "running")
        parts = sorted(machine.parts(), key=lambda part: part.start or 0)
        assert [(part.profile, part.start) for part in parts] == [("3g.20gb", 0), ("3g.20gb", 4)]
        assert machine.agree(record)
        seen = await plane.environment("web")
        names = [f"MIG-{part.uuid}-{part.number}" for part in parts]
        assert seen["NVIDIA_VISIBLE_DEVICES"] == ",".join(names)
        assert [one.names["mig_uuid"] for one in state.carried] == names
        ids = sorted((await plane.listed_ids())["web"])
        message = await told(plane)
        assert (message.change, message.pod_uid) == ("created", record.pod_uid)
        assert message.duration_ms > 0
        await mode_is_switched_off(machine, card=1, busy=0)
        assert machine.agree(record)
    # The machine reboots: no partition, no spec, and kubelet does not repeat its Allocate call.
    machine.store(Parts())
    (spec,) = machine.cdi.glob("*.json")
    spec.unlink()
    async with plane.agent(**machine.settings()):
        assert await plane.may_start(ids)
        assert {(one.profile, one.start) for one in machine.parts()} == {
            ("3g.20gb", 0),
            ("3g.20gb", 4),
        }
        document = json.loads(spec.read_bytes())
        assert document["kind"] == "hami.io/partition"
        await machine.release(record)

        async def is_free() -> bool:
            return not machine.parts() and not spec.exists()

        await until(is_free)


async def mode_is_switched_off(machine: Machine, *, card: int, busy: int) -> None:
    """The setting names both cards: the one without pods is switched, the other one waits."""
    plane = machine.plane

    async def waits() -> bool:
        # The first report was made before the pod was known.
        return "switching MIG mode off waits for pod default/web" in (await plane.report()).problem

    await until(waits)
    report = await plane.report()
    assert [one.index for one in report.devices if one.cordoned] == sorted({card, busy})
    plane.devices = tuple(replace(one, cordoned=one.index in {card, busy}) for one in plane.devices)
    await plane.publish_devices()

    uuid = plane.devices[card].uuid

    async def is_unnamed() -> bool:
        report = await plane.report()
        return f"device {uuid}: MIG mode is off, but no CDI spec" in report.problem

    await until(is_unnamed)
    assert (await plane.report()).devices[card].cordoned
    spec = plane.directory / "host/etc/cdi/nvidia.yaml"
    spec.write_text(f"cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: {uuid}\n")

    async def is_switched() -> bool:
        one = (await plane.report()).devices[card]
        return (one.mode, one.partitions, one.cordoned) == ("soft", (), False)

    await until(is_switched)
    other = (await plane.report()).devices[busy]
    assert (other.mode, other.cordoned) == ("mig", True)
    plane.devices = tuple(replace(one, cordoned=False) for one in plane.devices)
    await plane.publish_devices()


async def told(plane: Plane) -> PartitionRecord:
    """The newest message about a partition."""
    found: list[bytes] = []

    async def is_there() -> bool:
        answer = await plane.bus.request(
            f"$JS.API.STREAM.MSG.GET.{subjects.EVENTS_STREAM}",
            msgspec.json.encode({"last_by_subj": subjects.partition_event(NODE, "nvidia")}),
        )
        message = msgspec.json.decode(answer.data).get("message")
        found[:] = [base64.b64decode(message["data"])] if message else []
        return bool(found)

    await until(is_there)
    return decode(found[0], PartitionRecord, what="partition")


async def test_answer_without_cdi_waits_for_the_partition(machine: Machine) -> None:
    plane = machine.plane
    settings = {**machine.settings(), "injection": "devices", "allocate_wait_s": 10.0}
    machine.store(Parts(script=(Turn(at="create.begin", do="fail"),)))
    async with plane.agent(**settings):
        record, sequence = await machine.reserve("web", "1g.5gb", 6)
        await plane.bind(record, sequence)
        await plane.until_state(record.pod_uid, "running")
        (part,) = machine.parts()
        seen = await plane.environment("web")
        assert seen["NVIDIA_VISIBLE_DEVICES"] == f"MIG-{part.uuid}-{part.number}"
        assert not machine.cdi.exists()
        ids = sorted((await plane.listed_ids())["web"])
    # The re-created partition has another name, so the container's environment is stale.
    machine.store(Parts(parts=(replace(part, start=0),)))
    async with plane.agent(**settings), plane.plugin() as plugin:
        with pytest.raises(grpc.aio.AioRpcError, match="partition-changed"):
            await plugin.PreStartContainer(deviceplugin.PreStartContainerRequest(devices_ids=ids))
        assert (await plane.until_state(record.pod_uid, "failed")).code == "partition-changed"


async def test_pod_whose_partition_cannot_be_made_fails_with_the_reason(machine: Machine) -> None:
    plane = machine.plane
    hand = Part(uuid=plane.devices[0].uuid, number=0, profile="1g.5gb", start=5, memory_mib=4864)
    machine.store(Parts(parts=(hand,)))
    async with plane.agent(**machine.settings()):
        record, sequence = await machine.reserve("web", "3g.20gb", 4)
        failed = await plane.until_state(record.pod_uid, "failed")
        assert failed.code == "partition-refused"
        assert "positions [5] are taken" in failed.reason
        await plane.bind(record, sequence)
        assert "state-failed" in await plane.refusal_of("web")
        assert machine.parts() == (hand,)

        async def is_reported() -> bool:
            return "not made by this agent" in (await plane.report()).problem

        await until(is_reported)
        (facts, *_) = (await plane.report()).devices
        starts = {one.name: one.starts for one in facts.partitions}
        assert starts == {"1g.5gb": (0, 1, 2, 3, 4, 6), "3g.20gb": (0,)}


class Agent:
    """The agent as a process that is killed, and runs again."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        directory = machine.plane.directory
        config = directory / "agent.toml"
        self._armed = directory / dying_agent.ARMED
        self._deaths = directory / dying_agent.DEATHS
        settings = machine.plane.settings(**machine.settings())
        lines = {
            "node_name": NODE,
            "nats_urls": list(settings.nats_urls),
            "kubeconfig": settings.kubeconfig,
            "http_port": 0,
            "device_plugin_dir": settings.device_plugin_dir,
            "pod_resources_socket": settings.pod_resources_socket,
            "state_dir": settings.state_dir,
            "trusted_keys_dir": settings.trusted_keys_dir,
            "injection": "cdi",
            "enforcement": "none",
            "start_timeout_s": 20,
            "partitions.cdi_dir": str(machine.cdi),
            "partitions.retry_s": 0.05,
            "drivers.serve": [],
            "drivers.nvidia.simulated_profile": str(machine.profile),
            "drivers.nvidia.simulated_partitions": str(machine.parts_file),
        }
        config.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in lines.items()))
        program = [sys.executable, dying_agent.__file__, str(directory)]
        self._process = Process(
            "agent", [*program, "--config", str(config)], log=directory / "agent.log"
        )

    def start(self) -> None:
        """Start it."""
        self._process.start()

    def dies_next_at(self, point: str) -> None:
        """Kill it at a point of its journal, or of the hardware."""
        if point in dying_agent.POINTS:
            self._armed.write_text(point)
        else:
            stored = self._machine.stored()
            self._machine.store(replace(stored, script=(Turn(at=point, do="kill"),)))

    async def has_died(self, times: int) -> None:
        """Wait until it was killed this number of times."""

        async def is_dead() -> bool:
            return self._deaths.exists() and len(self._deaths.read_text().split()) == times

        await until(is_dead, within_s=START_S)
        assert not self._armed.exists()
        assert self._machine.stored().script == ()

    async def stop(self) -> None:
        """End it, if it runs."""
        await self._process.stop()


@pytest.mark.timeout(240)  # a start of a process for each point, on a machine that may be busy
async def test_agent_killed_at_any_step_leaves_a_consistent_state(machine: Machine) -> None:
    """One node is used continuously, while its agent is killed once at each point."""
    agent = Agent(machine)
    records: list[AllocationRecord] = []

    async def agree() -> None:
        async def is_so() -> bool:
            return machine.agree(*records)

        await until(is_so, within_s=START_S)

    try:
        agent.start()
        await agree()
        for number, point in enumerate((*POINTS, *dying_agent.POINTS)):
            agent.dies_next_at(point)
            if point.startswith("destroy."):
                await machine.release(records.pop(0))
            else:
                record, _ = await machine.reserve(f"web-{number}", "1g.5gb", number % 7)
                records.append(record)
            await agent.has_died(number + 1)
            await agree()
    finally:
        await agent.stop()
