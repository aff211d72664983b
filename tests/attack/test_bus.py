# SPDX-License-Identifier: Apache-2.0
"""A stolen login of one node's agent, on a real server with the accounts of an installation.

The scheduler runs in this process on the real bus; its Kubernetes API is in memory. After the
intruder's messages, a test sends an update of the intruder's own node that the scheduler accepts.
Order is kept, so that update shows when the rest was judged.
"""

import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import anyio
import msgspec
import nats.errors
import pytest
from nats.aio.client import Client
from prometheus_client import CollectorRegistry

from hami_common.bus import grants, subjects
from hami_common.errors import HamiError
from hami_common.events import codec
from hami_common.events.allocation import StateRecord
from hami_common.events.inventory import DeviceFault, Heartbeat
from hami_common.ports import Expect
from hami_common.runtime import natsio
from hami_common.runtime.natsio import Bus
from hami_common.runtime.telemetry import Tracing
from hami_scheduler.app import Keys, Scheduler
from hami_scheduler.app import World as Outside
from hami_scheduler.settings import Settings
from tests.support.busaccess import Intruder, Site, intruder, run_site
from tests.support.registry import report, run_registry, send, until_stored
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import Interposer, Running, World

pytestmark = pytest.mark.anyio

NODE, OTHER = "gpu-a.example", "gpu-b"
HERE, THERE = subjects.escape(NODE), subjects.escape(OTHER)
BOOT = "1750000000000-aabbccdd"
SETTLED_S = 45.0
MIB = 1 << 20


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with run_site(tmp_path) as made:
        yield made


async def until(is_so: Callable[[], bool], what: str) -> None:
    with anyio.move_on_after(SETTLED_S):
        while not is_so():
            await anyio.sleep(0.01)
        return
    pytest.fail(f"not so within {SETTLED_S:g} s: {what}")


@asynccontextmanager
async def scheduler_on(bus: Bus) -> AsyncIterator[Running]:
    """The scheduler on the bus, with a Kubernetes API and a clock of the test's own."""
    world, ids = World(), count(1)
    registry = CollectorRegistry()
    scheduler = Scheduler(
        settings=Settings(signing_key_file="unused", gather_s=0.0),
        world=Outside(
            devices=natsio.NatsBucket(bus, subjects.DEVICES_BUCKET),
            records=natsio.NatsBucket(bus, subjects.ALLOC_BUCKET),
            states=natsio.NatsBucket(bus, subjects.STATE_BUCKET),
            policies=natsio.NatsBucket(bus, subjects.POLICIES_BUCKET),
            publisher=natsio.NatsPublisher(bus),
            subscribe=partial(Bus.subscribe, bus),
            kube=world.kube,
            clock=world.clock,
        ),
        keys=Keys(signer=world.signer, verifier=world.verifier),
        registry=registry,
        tracing=Tracing(service="scheduler"),
        writer="s1",
        ids=lambda: f"s1-{next(ids)}",
    )
    running = Running(scheduler, Interposer(), registry)
    async with anyio.create_task_group() as group:
        group.start_soon(scheduler.run)
        await until(lambda: scheduler.state.is_complete, "the scheduler knows everything")
        yield running
        group.cancel_scope.cancel()


async def put_devices(bus: Bus, node: str, *, seq: int = 1, boot_id: str = BOOT) -> None:
    """Write canonical devices as the registry does."""
    devices = builders.devices(node, boot_id=boot_id, seq=seq)
    bucket = natsio.NatsBucket(bus, subjects.DEVICES_BUCKET)
    await bucket.append(subjects.devices_key(node, "nvidia"), codec.encode(devices))


async def fits(s: Running, node: str) -> bool:
    return bool((await s.filter(builders.pod("probe"), [node]))["NodeNames"])


async def until_fits(s: Running, node: str, *, wanted: bool) -> None:
    with anyio.move_on_after(SETTLED_S):
        while await fits(s, node) != wanted:
            await anyio.sleep(0.01)
        return
    pytest.fail(f"pods {'do not fit' if wanted else 'still fit'} on {node}")


def beat(node: str, *, serves: bool) -> bytes:
    vendors = ("nvidia",)
    return codec.encode(
        Heartbeat(
            node=node,
            boot_id=BOOT,
            seq=2,
            time_s=0.0,
            vendors=vendors if serves else (),
            unserved=() if serves else vendors,
        )
    )


def fault(node: str, *, seq: int = 2, boot_id: str = BOOT, healthy: bool = False) -> bytes:
    return codec.encode(
        DeviceFault(
            node=node,
            vendor="nvidia",
            uuid=f"GPU-{node}-0",
            boot_id=boot_id,
            seq=seq,
            time_s=0.0,
            healthy=healthy,
            reason="forged",
        )
    )


@asynccontextmanager
async def world(site: Site) -> AsyncIterator[tuple[Running, Bus, Intruder]]:
    """Two nodes with devices, a scheduler that uses both, and an agent's login in wrong hands."""
    async with site.registry() as registry:
        for node in (NODE, OTHER):
            await put_devices(registry, node)
        async with (
            site.service("scheduler") as bus,
            scheduler_on(bus) as s,
            intruder(site, site.agent_token(NODE), prefix=grants.inbox("agent", NODE)) as bad,
        ):
            for node in (NODE, OTHER):
                async with site.agent(node, site.file(site.agent_token(node))) as agent:
                    heartbeat = beat(node, serves=True)
                    await natsio.NatsPublisher(agent).publish(subjects.heartbeat(node), heartbeat)
                await until_fits(s, node, wanted=True)
            yield s, registry, bad


async def test_stolen_agent_login_silences_no_other_node(site: Site) -> None:
    async with world(site) as (s, _, bad):
        await bad.client.publish(subjects.heartbeat(NODE), beat(OTHER, serves=False))
        await bad.client.publish(subjects.heartbeat(NODE), beat(NODE, serves=False))
        await until_fits(s, NODE, wanted=False)
        assert await fits(s, OTHER)
        assert s.value("hami_scheduler_undecodable_messages_total", source="heartbeats") == 1


async def test_stolen_agent_login_condemns_no_device_of_another_node(site: Site) -> None:
    async with world(site) as (s, _, bad):
        forged = fault(OTHER, boot_id="~~~~", seq=10**12)
        await bad.client.publish(subjects.fault(NODE), forged)
        await bad.client.publish(subjects.fault(NODE), fault(NODE))
        await until_fits(s, NODE, wanted=False)
        assert await fits(s, OTHER)
        assert s.value("hami_scheduler_undecodable_messages_total", source="faults") == 1


async def test_stolen_agent_login_fails_no_allocation_of_another_node(site: Site) -> None:
    async with world(site) as (s, _, bad):

        def state(node: str, uid: str, allocation_id: str) -> bytes:
            return codec.encode(
                StateRecord(
                    state="failed",
                    allocation_id=allocation_id,
                    node=node,
                    pod_uid=uid,
                    namespace="default",
                    pod="p",
                    ledger_seq=1,
                )
            )

        ledger = s.state.ledger
        own = subjects.kv_subject(subjects.STATE_BUCKET, f"{HERE}.own")
        for payload, key in (
            (state(OTHER, "victim", "a1"), f"{HERE}.victim"),
            (state(NODE, "victim", "a1"), f"{HERE}.other-pod"),
        ):
            await bad.client.publish(subjects.kv_subject(subjects.STATE_BUCKET, key), payload)
        await bad.client.publish(own, state(NODE, "own", "a2"))
        await until(lambda: bool(ledger.story(NODE, "own")), "the state of the own node is seen")
        assert ledger.story(OTHER, "victim") == []
        assert ledger.story(NODE, "victim") == []
        assert s.value("hami_scheduler_undecodable_messages_total", source="states") == 2


async def test_forged_fault_does_not_outlast_the_agents_next_report(site: Site) -> None:
    async with world(site) as (s, registry, bad):
        forged = fault(NODE, boot_id="~~~~", seq=10**12)
        await bad.client.publish(subjects.fault(NODE), forged)
        await until_fits(s, NODE, wanted=False)
        await put_devices(registry, NODE, seq=2)
        await until_fits(s, NODE, wanted=True)


async def test_forged_report_does_not_block_the_agents_own_reports(site: Site) -> None:
    """The agent's numbers continue with each heartbeat, so those of its reports have gaps."""
    seed = site.seed_file("registry")
    async with (
        site.registry() as bus,
        run_registry(site.server.url, nats_seed_file=seed),
        site.agent(NODE, site.file(site.agent_token(NODE))) as agent,
    ):
        publisher = natsio.NatsPublisher(agent)
        devices = natsio.NatsBucket(bus, subjects.DEVICES_BUCKET)
        await send(publisher, report("good", node=NODE, boot_id=BOOT, seq=100))
        await until_stored(devices, lambda found: found.seq == 100, node=NODE)
        await send(publisher, report("forged", node=NODE, boot_id="~~~~", seq=10**12))
        await until_stored(devices, lambda found: found.boot_id == "~~~~", node=NODE)
        for seq in (120, 140):
            await send(publisher, report("good", node=NODE, boot_id=BOOT, seq=seq))
        found = await until_stored(devices, lambda found: found.seq == 140, node=NODE)
        assert [device.uuid for device in found.devices] == ["good"]


# --- capacity -------------------------------------------------------------------------------------

SMALL = {
    "events_max_bytes": 16 * MIB,
    "ledger_max_bytes": 8 * MIB,
    "states_max_bytes": 12 * MIB,
    "devices_max_bytes": 8 * MIB,
    "reports_max_bytes": 16 * MIB,
    "dead_letters_max_bytes": 4 * MIB,
}
"""The shipped limits in small, as far as the streams have limits."""
TRIES = 3
STORE = "jetstream { max_file_store: 80MB }\n"


def small() -> natsio.BusLimits:
    known = {
        name: size for name, size in SMALL.items() if name in natsio.BusLimits.__struct_fields__
    }
    return natsio.BusLimits(**known)


class Flood:
    """Sends any message, and logs in again whenever the server ends the connection."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._client: Client | None = None
        self.ended = 0
        """Number of times that the server ended the connection."""

    async def send(self, subject: str, size: int) -> None:
        while True:
            try:
                client = await self._connected()
                await client.publish(subject, b"x" * size)
                await client.flush(timeout=5)
            except (nats.errors.Error, OSError):
                self.ended += 1
            return

    async def _connected(self) -> Client:
        client = self._client
        if client is None or not client.is_connected:
            await self.aclose()
            client = self._client = Client()
            await client.connect(
                self._site.server.url,
                token=self._site.agent_token(NODE),
                inbox_prefix=grants.inbox("agent", NODE),
                error_cb=_ignore,
                allow_reconnect=False,
                connect_timeout=30,
            )
        return client

    async def aclose(self) -> None:
        """Close the connection; the server may have reset it, with messages still unsent."""
        if self._client is not None:
            with suppress(ConnectionError):
                await self._client.close()


async def _ignore(error: Exception) -> None:
    del error


async def append(bus: Bus, bucket: str, node: str, uid: str, size: int) -> int:
    """Append under a condition; the revision."""
    key = f"{subjects.escape(node)}.{uid}"
    expect = Expect(subject=subjects.kv_subject(bucket, key), sequence=0)
    return await natsio.NatsBucket(bus, bucket).append(key, b"y" * size, expect=expect)


async def test_no_flood_of_one_agent_takes_the_ledgers_capacity(tmp_path: Path) -> None:
    async with run_site(tmp_path, config_text=STORE) as site:
        site.limits = small()
        async with site.registry() as registry, site.service("scheduler") as scheduler:
            flood = Flood(site)
            try:
                # As large as any server takes them, for as long as this one does.
                for number in range(94):
                    await flood.send(f"{subjects.REPORT_PREFIX}.{HERE}.v{number}", 900_000)
                    if flood.ended >= TRIES:
                        break
                # As large as the login allows.
                for vendor in ("amd", "ascend", "nvidia"):
                    await flood.send(subjects.report(NODE, vendor), 350_000)
                for number in range(60):
                    await flood.send(subjects.breach_event(NODE, f"p{number}"), 350_000)
                for number in range(260):
                    key = subjects.kv_subject(subjects.STATE_BUCKET, f"{HERE}.p{number}")
                    await flood.send(key, 60_000)
            finally:
                await flood.aclose()
            for number in range(100):
                await append(scheduler, subjects.ALLOC_BUCKET, OTHER, f"u{number}", 20_000)
            await append(registry, subjects.DEVICES_BUCKET, OTHER, "nvidia", 20_000)
            async with site.agent(OTHER, site.file(site.agent_token(OTHER))) as agent:
                publisher = natsio.NatsPublisher(agent)
                await send(publisher, report("a", node=OTHER))
                await publisher.publish_stored(subjects.usage_event(OTHER), b"{}")


async def test_agent_reports_known_vendors_only(site: Site) -> None:
    async with (
        site.registry(),
        intruder(site, site.agent_token(NODE), prefix=grants.inbox("agent", NODE)) as bad,
    ):
        for subject in (
            f"{subjects.REPORT_PREFIX}.{HERE}.invented",
            f"{subjects.EVENT_PREFIX}.partition.{HERE}.invented",
        ):
            await bad.client.publish(subject, b"{}")
            assert await bad.is_forbidden(subject)


async def test_too_large_report_or_state_is_refused_and_ends_no_honest_connection(
    site: Site,
) -> None:
    async with (
        site.registry(),
        site.agent(NODE, site.file(site.agent_token(NODE))) as agent,
    ):
        publisher = natsio.NatsPublisher(agent)
        with pytest.raises(HamiError):
            await publisher.publish_stored(subjects.report(NODE, "nvidia"), b"x" * 500_000)
        with pytest.raises(HamiError):
            await append(agent, subjects.STATE_BUCKET, NODE, "p", 100_000)
        assert await publisher.publish_stored(subjects.report(NODE, "nvidia"), b"x" * 300_000) == 1
        assert await append(agent, subjects.STATE_BUCKET, NODE, "p", 60_000) == 1
        assert agent.generation == 1


# --- disk -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk; returns the file that fills it."""
    path = disk / "filler"
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            return path


async def test_registry_and_logins_continue_while_the_disk_of_the_bus_is_full(
    tmp_path: Path, small_disk: Path
) -> None:
    config = f"jetstream {{\n  store_dir: {small_disk / 'store'}\n  max_file_store: 6GB\n}}\n"
    async with run_site(tmp_path, config_text=config) as site:
        seed = site.seed_file("registry")
        async with (
            site.registry() as bus,
            run_registry(site.server.url, nats_seed_file=seed),
        ):
            filler = fill(small_disk)
            await site.server.kill()
            await site.server.start()
            async with site.agent(NODE, site.file(site.agent_token(NODE))) as agent:
                # The registry's readers come back to a server that makes no consumer.
                await until_consumers_are_refused(bus, small_disk, times=10)
                filler.unlink()
                await send_until_stored(agent, bus)


async def until_consumers_are_refused(bus: Bus, disk: Path, *, times: int) -> None:
    """Keep the disk full and check that the server makes no consumer; readers retry meanwhile."""
    refused = 0
    with anyio.fail_after(SETTLED_S):
        for number in count():
            fill(disk)
            name = f"probe-{number}"
            question = {
                "stream_name": subjects.EVENTS_STREAM,
                "config": {"durable_name": name, "ack_policy": "explicit"},
            }
            subject = f"$JS.API.CONSUMER.CREATE.{subjects.EVENTS_STREAM}.{name}"
            try:
                answer = (await bus.request(subject, msgspec.json.encode(question))).data
            except HamiError:
                answer = b""
            refused += b'"error"' in answer
            if refused >= times:
                return
            await anyio.sleep(0.2)


async def send_until_stored(agent: Bus, bus: Bus) -> None:
    """Report until the registry has stored canonical devices of it."""
    devices = natsio.NatsBucket(bus, subjects.DEVICES_BUCKET)
    publisher = natsio.NatsPublisher(agent)
    with anyio.fail_after(30):
        for seq in count(1):
            try:
                await send(publisher, report("a", node=NODE, boot_id=BOOT, seq=seq))
                if await devices.get(subjects.devices_key(NODE, "nvidia")) is not None:
                    return
            except HamiError:
                await anyio.sleep(0.1)
            await anyio.sleep(0.1)
