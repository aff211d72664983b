# SPDX-License-Identifier: Apache-2.0
"""The registry as a service on a real nats-server: reports, losses, replicas, API."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import jsonschema
import msgspec
import pytest

from hami_common.bus import subjects
from hami_common.errors import HamiError
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.decision import (
    Amounts,
    DecisionRecord,
    DeviceHolder,
    RefusedDevice,
    RefusedNode,
)
from hami_common.events.inventory import Heartbeat
from hami_common.model.placement import ContainerShares, Share
from hami_common.pods import annotations as keys
from hami_common.runtime import kubeio
from hami_common.runtime.natsio import (
    Bus,
    NatsBucket,
    NatsPublisher,
    connect,
    ensure_bus,
    pull_events,
)
from hami_registry.shell import openapi
from hami_sim.apiserver import ApiServer
from hami_sim.apiserver import Settings as KubeSettings
from hami_sim.natsd import NatsServer
from tests.support.registry import (
    RunningRegistry,
    report,
    run_registry,
    send,
    stored,
    until_stored,
)

pytestmark = pytest.mark.anyio
DEVICES_SUBJECTS = subjects.kv_subject(subjects.DEVICES_BUCKET, ">")


class Site:
    """The parts of the bus that a test uses."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.publisher = NatsPublisher(bus)
        self.devices = NatsBucket(bus, subjects.DEVICES_BUCKET)
        self.ledger = NatsBucket(bus, subjects.ALLOC_BUCKET)
        self.states = NatsBucket(bus, subjects.STATE_BUCKET)

    async def append_count(self) -> int:
        """Count the canonical records that were ever stored."""
        return await self.devices.last_revision(DEVICES_SUBJECTS)


@asynccontextmanager
async def site_on(server: NatsServer) -> AsyncIterator[Site]:
    async with connect([server.url], name="test") as bus:
        await ensure_bus(bus)
        yield Site(bus)


async def get(registry: RunningRegistry, path: str, status: int = 200) -> Any:
    """Decoded answer."""
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{registry.url}{path}") as response,
    ):
        assert response.status == status, await response.text()
        return await response.json()


async def test_report_is_canonical_within_a_second(nats_server: NatsServer) -> None:
    """The fastest of five reports counts: other tests may occupy the machine for a second."""
    async with site_on(nats_server) as site, run_registry(nats_server.url):
        took_s = []
        for seq in range(1, 6):
            began_s = anyio.current_time()
            await send(site.publisher, report("a", "b", seq=seq))
            found = await until_stored(site.devices, lambda found: found.seq == seq)  # noqa: B023 - awaited here
            took_s.append(anyio.current_time() - began_s)
            assert [device.uuid for device in found.devices] == ["a", "b"]
        assert min(took_s) < 1.0


async def test_changed_configuration_is_published_and_a_bad_one_is_not(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    path = tmp_path / "devices.toml"
    path.write_text("[defaults]\nslots = 4\n")
    async with (
        site_on(nats_server) as site,
        run_registry(nats_server.url, device_config_file=str(path)) as registry,
    ):
        await send(site.publisher, report("a"))
        await until_stored(site.devices, lambda found: found.devices[0].slots == 4)
        path.write_text("[defaults]\nslots = 8\n")
        found = await until_stored(site.devices, lambda found: found.devices[0].slots == 8)
        assert found.config_generation == 2
        path.write_text("[defaults]\nslots = -8\n")
        with anyio.fail_after(20):
            while registry.sample("hami_device_config_file_valid") == 1:
                await anyio.sleep(0.01)
        shown = await get(registry, "/v1/config")
        assert "defaults.slots" in shown["problem"]
        assert (shown["generation"], shown["file"]) == (2, str(path))
        assert shown["config"]["defaults"]["slots"] == 8
        await send(site.publisher, report("a", seq=2))
        found = await until_stored(site.devices, lambda found: found.seq == 2)
        assert found.devices[0].slots == 8


async def test_poison_message_is_dead_lettered_and_later_ones_are_handled(
    nats_server: NatsServer,
) -> None:
    async with site_on(nats_server) as site, run_registry(nats_server.url) as registry:
        subject = subjects.report("gpu-9", "nvidia")
        await site.publisher.publish_stored(subject, b'{"node":')
        await send(site.publisher, report("a"))
        await until_stored(site.devices, lambda _: True)
        with anyio.fail_after(20):
            async with pull_events(site.bus, subjects.DEAD_LETTERS_STREAM) as letters:
                letter = await anext(letters)
        assert letter.subject == subjects.dead_letter("registry", subject)
        assert letter.data == b'{"node":'
        assert "truncated" in letter.headers["hami-problem"]
        assert letter.headers["hami-reason"] == "undecodable"
        assert letter.headers["hami-subject"] == subject
        assert registry.sample("hami_registry_dead_letters_total", reason="undecodable") == 1
        assert registry.sample("hami_registry_reports_total", outcome="poison") == 1
        assert await stored(site.devices, "gpu-9") is None


async def test_two_replicas_store_each_change_once(nats_server: NatsServer) -> None:
    async with (
        site_on(nats_server) as site,
        run_registry(nats_server.url) as first,
        run_registry(nats_server.url, replica="registry-1") as second,
    ):
        seq = 0
        with anyio.fail_after(20):
            # One replica may pull everything that is sent before the other one pulls.
            while seq < 30 or min(handled(first), handled(second)) < 1:
                seq += 1
                await send(site.publisher, report("a", seq=seq))
        await until_stored(site.devices, lambda found: found.seq == seq)
        assert await site.append_count() <= seq
        await send(site.publisher, report("a", "b", seq=seq + 1))
        found = await until_stored(site.devices, lambda found: found.seq == seq + 1)
        assert len(found.devices) == 2


def handled(registry: RunningRegistry) -> float:
    return registry.sample("hami_registry_reports_total", outcome="accepted")


async def test_wiped_storage_is_filled_again_from_memory(nats_server: NatsServer) -> None:
    async with site_on(nats_server) as site, run_registry(nats_server.url):
        for node in ("n1", "n2"):
            await send(site.publisher, report("a", node=node))
            await until_stored(site.devices, lambda _: True, node=node)
        await nats_server.stop()
        await nats_server.wipe()
        await nats_server.start()
        for node in ("n1", "n2"):
            await until_refilled(site, node)


async def test_registry_and_storage_lost_together_recover_from_the_agents(
    nats_server: NatsServer,
) -> None:
    """Only the agents know the devices then: their next reports rebuild everything."""
    async with site_on(nats_server) as site:
        async with run_registry(nats_server.url):
            await send(site.publisher, report("a"))
            await until_stored(site.devices, lambda _: True)
        generation = site.bus.generation
        await nats_server.stop()
        await nats_server.wipe()
        await nats_server.start()
        async with run_registry(nats_server.url):
            with anyio.fail_after(20):
                await site.bus.wait_connected(after=generation)
            assert await stored(site.devices) is None
            await send(site.publisher, report("a", seq=2))
            await until_stored(site.devices, lambda found: found.seq == 2)


async def until_refilled(site: Site, node: str) -> None:
    """Wait for canonical devices over a bus that is just recovering."""
    with anyio.fail_after(15):
        while True:
            try:
                if await stored(site.devices, node) is not None:
                    return
            except HamiError:
                pass
            await anyio.sleep(0.05)


@contextmanager
def registry_process(url: str, log: Path, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """The registry as its own process, killed at the end if it still runs."""
    pairs = [f"nats_urls={url}", "watch_nodes=false", "retry_s=0.05", *settings]
    flags = [part for pair in pairs for part in ("--set", pair)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "hami_registry", *flags], stderr=output, stdout=output
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(90)
async def test_killed_registry_loses_nothing(nats_server: NatsServer, tmp_path: Path) -> None:
    log = tmp_path / "registry.log"
    async with site_on(nats_server) as site:
        with registry_process(nats_server.url, log) as process:
            await send(site.publisher, report("a", node="n1"))
            await until_stored(site.devices, lambda _: True, node="n1", within_s=25)
            process.kill()
            process.wait()
        await send(site.publisher, report("a", "b", node="n1", seq=2))
        await send(site.publisher, report("c", node="n2"))
        with registry_process(nats_server.url, log):
            found = await until_stored(
                site.devices, lambda found: found.seq == 2, node="n1", within_s=25
            )
            assert len(found.devices) == 2
            await until_stored(site.devices, lambda _: True, node="n2")
            assert await site.append_count() == 3


@pytest.mark.timeout(90)
async def test_process_shuts_down_gracefully(nats_server: NatsServer, tmp_path: Path) -> None:
    log = tmp_path / "registry.log"
    async with site_on(nats_server) as site:
        with registry_process(nats_server.url, log) as process:
            await send(site.publisher, report("a"))
            await until_stored(site.devices, lambda _: True, within_s=25)
            process.send_signal(signal.SIGTERM)
            with anyio.fail_after(10):
                while process.poll() is None:
                    await anyio.sleep(0.02)
            assert process.returncode == 0, log.read_text(encoding="utf-8")


SHARES = (
    ContainerShares(
        name="main",
        kind="app",
        shares=(Share(vendor="nvidia", uuid="a", memory_mib=300, core_pct=30),),
    ),
)


def allocation(op: str = "reserve") -> AllocationRecord:
    return AllocationRecord(
        op=op,  # type: ignore[arg-type]  # test data
        allocation_id="x",
        node="gpu-1",
        pod_uid="uid-1",
        namespace="team-a",
        pod="train-0",
        containers=SHARES if op == "reserve" else (),
    )


async def told(site: Site) -> int:
    """A node with an allocation, its state, a decision and a heartbeat; the ledger sequence."""
    await send(site.publisher, report("a", "b"))
    key = subjects.allocation_key("gpu-1", "uid-1")
    sequence = await site.ledger.append(key, codec.encode(allocation()))
    state = StateRecord(
        state="running",
        allocation_id="x",
        node="gpu-1",
        pod_uid="uid-1",
        namespace="team-a",
        pod="train-0",
        ledger_seq=sequence,
        enforcement="libvgpu",
    )
    await site.states.append(key, codec.encode(state))
    decision = DecisionRecord(
        verb="bind",
        namespace="team-a",
        pod="train-0",
        pod_uid="uid-1",
        time_s=1.0,
        verdict="placed",
        snapshot_id="1.1",
        node="gpu-1",
    )
    subject = subjects.decision_event("team-a", "train-0")
    await site.publisher.publish_stored(subject, codec.encode(decision))
    return sequence


async def heard(site: Site, registry: RunningRegistry) -> None:
    """Send heartbeats until the registry reports the node alive."""
    beat = Heartbeat(node="gpu-1", boot_id="1", seq=1, time_s=0.0, vendors=("nvidia",))
    with anyio.fail_after(20):
        while True:
            await site.publisher.publish(subjects.heartbeat("gpu-1"), codec.encode(beat))
            nodes = (await get(registry, "/v1/nodes"))["items"]
            if nodes and nodes[0]["alive"]:
                return
            await anyio.sleep(0.02)


async def until_shown(registry: RunningRegistry) -> None:
    """Wait until the registry has read devices, allocation, state and decision of ``told``."""
    async with aiohttp.ClientSession() as http:

        async def items(path: str, name: str) -> Any:
            async with http.get(f"{registry.url}{path}") as response:
                return (await response.json()).get(name, ())

        with anyio.fail_after(20):
            while not (
                await items("/v1/explain/team-a/train-0", "decisions")
                and len(await items("/v1/nodes/gpu-1", "devices")) == 2
                and any(
                    one["state"] == "running" for one in await items("/v1/allocations", "items")
                )
            ):
                await anyio.sleep(0.01)


async def until_ledger(registry: RunningRegistry, sequence: int) -> None:
    """Wait until the registry's answers include the ledger record ``sequence``."""
    async with aiohttp.ClientSession() as http:
        with anyio.fail_after(20):
            while True:
                async with http.get(f"{registry.url}/v1/allocations") as response:
                    if int(response.headers["x-hami-ledger-seq"]) >= sequence:
                        return
                await anyio.sleep(0.01)


async def test_api_reports_place_and_reason_of_allocations(nats_server: NatsServer) -> None:
    async with site_on(nats_server) as site:
        sequence = await told(site)  # before the registry starts: it reads what is stored
        async with run_registry(nats_server.url) as registry:
            await until_stored(site.devices, lambda _: True)
            await heard(site, registry)
            await until_shown(registry)
            explained = await get(registry, "/v1/explain/team-a/train-0")
            assert explained["decisions"][0]["node"] == "gpu-1"
            assert explained["allocations"][0]["state"] == "running"

            node = await get(registry, "/v1/nodes/gpu-1")
            assert (node["node"]["booked_mib"], len(node["devices"])) == (300, 2)
            assert node["allocations"][0]["ledger_seq"] == sequence
            devices = (await get(registry, "/v1/devices?node=gpu-1&vendor=nvidia"))["items"]
            assert [d["booked_mib"] for d in devices] == [300, 0]
            assert (await get(registry, "/v1/devices?vendor=amd"))["items"] == []
            assert len((await get(registry, "/v1/allocations?namespace=team-a"))["items"]) == 1
            assert (await get(registry, "/v1/allocations?namespace=team-b"))["items"] == []

            key = subjects.allocation_key("gpu-1", "uid-1")
            released = await site.ledger.append(key, codec.encode(allocation("release")))
            await until_ledger(registry, released)
            assert (await get(registry, "/v1/allocations"))["items"] == []
            kept = (await get(registry, "/v1/allocations?released=true"))["items"]
            assert [view["state"] for view in kept] == ["released"]
            assert len((await get(registry, "/v1/allocations/team-a/train-0"))["items"]) == 1


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v1/devices?nod=gpu-1", 400, "query parameter nod: is not known here; known ones: node"),
        ("/v1/nodes?node=a", 400, "known ones: none"),
        ("/v1/allocations?released=yes", 400, "give true or false"),
        ("/v1/watch?kind=pods", 400, "'pods' is not a kind"),
        ("/v1/nodes/nowhere", 404, "node nowhere was not found"),
        ("/v1/explain/team-a/nobody", 404, "pod team-a/nobody was not found"),
        ("/v1/allocations/team-a/nobody", 404, "team-a/nobody"),
        ("/v2/nodes", 404, "there is nothing at /v2/nodes"),
    ],
)
async def test_api_refuses_with_a_message(
    nats_server: NatsServer, path: str, status: int, text: str
) -> None:
    async with run_registry(nats_server.url) as registry:
        body = await get(registry, path, status)
        assert text in body["error"]["message"]
        assert body["error"]["code"]


QUERIES = {"/v1/timeline": "?node=gpu-1"}
"""Required parameters of routes."""


async def test_answers_fit_the_openapi_document(nats_server: NatsServer) -> None:
    async with site_on(nats_server) as site:
        await told(site)
        async with run_registry(nats_server.url) as registry:
            await until_stored(site.devices, lambda _: True)
            await until_shown(registry)
            document = await get(registry, "/openapi.json")
            assert document == msgspec.json.decode(openapi.encoded())
            checked = 0
            for path, item in document["paths"].items():
                if "get" not in item:  # forwarded, or changes something
                    continue
                content = item["get"]["responses"]["200"]["content"]
                if "application/json" not in content:
                    continue
                real = path.format(node="gpu-1", namespace="team-a", pod="train-0")
                real += QUERIES.get(path, "")
                schema = {
                    **content["application/json"]["schema"],
                    "components": document["components"],
                }
                jsonschema.validate(await get(registry, real), schema)
                checked += 1
            assert checked >= 25


async def test_watch_delivers_changes_and_ends_with_the_service(nats_server: NatsServer) -> None:
    async with (
        site_on(nats_server) as site,
        run_registry(nats_server.url) as registry,
        aiohttp.ClientSession() as http,
        http.get(f"{registry.url}/v1/watch?kind=device&node=gpu-1") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        assert await response.content.readuntil(b"\n\n") == b": listening\n\n"
        await send(site.publisher, report("z", node="gpu-2"))
        await until_stored(site.devices, lambda _: True, node="gpu-2")
        await send(site.publisher, report("a"))
        with anyio.fail_after(20):
            event = (await response.content.readuntil(b"\n\n")).decode()
        assert event.startswith("event: device\nid: device-2\ndata: {")
        assert '"node":"gpu-1"' in event
        assert registry.sample("hami_registry_listeners") == 1
        registry.context.stop()
        with anyio.fail_after(15):
            assert b"event: end" in await response.content.read()


async def test_details_of_a_refusal_reach_operators_whole_and_tenants_narrowed(
    nats_server: NatsServer,
) -> None:
    other = DeviceHolder(namespace="team-b", name="secret", memory_mib=300)
    device = RefusedDevice(
        uuid="GPU-0",
        code="CardInsufficientMemory",
        wanted=Amounts(memory_mib=900, slots=1),
        free=Amounts(memory_mib=700, slots=3),
        holders=(other,),
    )
    decision = DecisionRecord(
        verb="filter",
        namespace="team-a",
        pod="train-0",
        pod_uid="uid-1",
        time_s=1.0,
        verdict="refused",
        snapshot_id="1.1",
        nodes_considered=1,
        closest=(RefusedNode(node="gpu-1", code="CardInsufficientMemory", devices=(device,)),),
    )
    subject = subjects.decision_event("team-a", "train-0")
    async with (
        site_on(nats_server) as site,
        run_registry(nats_server.url) as registry,
        aiohttp.ClientSession() as http,
        http.get(f"{registry.url}/v1/watch?kind=decision") as all_namespaces,
        http.get(f"{registry.url}/v1/watch?kind=decision&namespace=team-a") as one_namespace,
    ):
        for response in (all_namespaces, one_namespace):
            assert await response.content.readuntil(b"\n\n") == b": listening\n\n"
        await site.publisher.publish_stored(subject, codec.encode(decision))
        with anyio.fail_after(20):
            whole = await all_namespaces.content.readuntil(b"\n\n")
            narrowed = await one_namespace.content.readuntil(b"\n\n")
            explained: Any = await get(registry, "/v1/explain/team-a/train-0")
    assert b'"name":"secret"' in whole
    assert b"secret" not in narrowed
    assert b"team-b" not in narrowed
    assert b'"memory_mib":300' in narrowed
    (known,) = explained["decisions"]
    assert msgspec.convert(known, DecisionRecord) == decision


async def test_listener_that_does_not_read_is_let_go(nats_server: NatsServer) -> None:
    async with (
        site_on(nats_server) as site,
        run_registry(nats_server.url, listener_queue_size=1) as registry,
        aiohttp.ClientSession(read_bufsize=1024) as http,
        http.get(f"{registry.url}/v1/watch") as response,
    ):
        assert await response.content.readuntil(b"\n\n") == b": listening\n\n"
        uuids = [f"GPU-{i:036}" for i in range(200)]
        with anyio.fail_after(20):
            seq = 0
            while registry.sample("hami_registry_listeners_lagged_total") == 0:
                seq += 1
                await send(site.publisher, report(*uuids, seq=seq))
        await until_stored(site.devices, lambda found: found.seq == seq)


async def test_cordon_follows_the_annotation_of_the_node(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with (
        ApiServer(KubeSettings(controllers=False)) as server,
        kubeio.connect(str(server.kubeconfig(tmp_path / "kubeconfig"))) as api,
        site_on(nats_server) as site,
    ):
        node = {"metadata": {"name": "gpu-1", "annotations": {keys.DEVICE_CORDON: "b, x"}}}
        await api.create("/api/v1/nodes", msgspec.json.encode(node))
        settings = {"watch_nodes": True, "kubeconfig": str(tmp_path / "kubeconfig")}
        async with run_registry(nats_server.url, **settings):
            await send(site.publisher, report("a", "b"))
            found = await until_stored(site.devices, lambda found: found.devices[1].cordoned)
            assert not found.devices[0].cordoned
            await annotate(api, "a")
            found = await until_stored(site.devices, lambda found: found.devices[0].cordoned)
            assert not found.devices[1].cordoned
            await annotate(api, None)
            await until_stored(site.devices, lambda found: not found.devices[0].cordoned)


async def annotate(api: kubeio.KubeClient, cordon: str | None) -> None:
    """Set or remove the operator's cordon on the node."""
    patch = {"metadata": {"annotations": {keys.DEVICE_CORDON: cordon}}}
    await api.patch("/api/v1/nodes/gpu-1", msgspec.json.encode(patch))
