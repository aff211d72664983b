# SPDX-License-Identifier: Apache-2.0
"""One object whose handling raises stops neither its service nor the handling of any other object.

Services run in this process with a real bus; the fault is a ``RuntimeError`` in the code that each
loop calls for the one object, as a bug would raise it.
"""

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest
from prometheus_client import CollectorRegistry

import hami_nodeagent.shell.feed
import hami_nodeagent.shell.pods
import hami_nodeagent.shell.states
import hami_nodeagent.shell.usage
import hami_registry.shell.cordons
import hami_webhook.shell.events
from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.asking import UsageAnswer
from hami_common.events.decision import AdmissionRecord, DecisionRecord
from hami_common.events.inventory import Heartbeat
from hami_common.model.placement import ContainerShares, Share
from hami_common.pods import annotations as keys
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio import (
    Bus,
    NatsBucket,
    NatsPublisher,
    connect,
    ensure_bus,
    pull_events,
)
from hami_common.runtime.quarantine import Quarantine
from hami_nodeagent.core.health import HealthBook
from hami_nodeagent.drivers.simulated.driver import SimulatedDriver
from hami_nodeagent.settings import UsageSettings
from hami_nodeagent.shell.check import SelfCheck
from hami_nodeagent.shell.inventory import Reporter, VendorDevices
from hami_nodeagent.shell.kubelet import PluginKeeper
from hami_nodeagent.shell.relimit import Relimiter
from hami_registry.core.inventory import Inventory
from hami_registry.core.projection import Projection
from hami_registry.shell.canonical import CanonicalWriter
from hami_sim.apiserver import ApiServer
from hami_sim.apiserver import Settings as KubeSettings
from hami_sim.natsd import NatsServer
from hami_webhook.shell.metrics import Metrics as WebhookMetrics
from tests.integration.nodeagent.plane import NODE, RESOURCE, Ask, Plane, run_plane, until
from tests.support.kubelet import grpc_poller, short_path
from tests.support.memorybus import MemoryBus, MemoryPublisher
from tests.support.registry import RunningRegistry, report, run_registry, send, stored

__all__ = ["grpc_poller", "short_path"]

pytestmark = pytest.mark.anyio

WITHIN_S = 40.0
BAD, GOOD = "rotten", "good"


def break_for(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, concerns: Callable[..., bool]
) -> list[str]:
    """Let a function raise for the calls that concern one object; the list grows with each."""
    whole, broken = getattr(owner, name), []

    def raise_for(*args: Any, **more: Any) -> None:
        if concerns(*args, **more):
            broken.append(name)
            raise RuntimeError("injected")

    if inspect.iscoroutinefunction(whole):

        @functools.wraps(whole)
        async def awaited(*args: Any, **more: Any) -> Any:
            raise_for(*args, **more)
            return await whole(*args, **more)

        monkeypatch.setattr(owner, name, awaited)
    else:

        @functools.wraps(whole)
        def called(*args: Any, **more: Any) -> Any:
            raise_for(*args, **more)
            return whole(*args, **more)

        monkeypatch.setattr(owner, name, called)
    return broken


def mentions(word: str) -> Callable[..., bool]:
    """Match calls with an argument that mentions the object."""
    return lambda *args, **more: any(word in repr(one) for one in (*args, *more.values()))


def settled(broken: list[str]) -> Callable[[], Awaitable[bool]]:
    """A condition that holds once the fault has occurred."""

    async def is_broken() -> bool:
        return bool(broken)

    return is_broken


# --- registry -------------------------------------------------------------------------------------


class Registry:
    """A running registry and its bus."""

    def __init__(self, registry: RunningRegistry, bus: Bus) -> None:
        self.registry = registry
        self.bus = bus
        self.publisher = NatsPublisher(bus)

    def bucket(self, name: str) -> NatsBucket:
        return NatsBucket(self.bus, name)

    async def get(self, path: str) -> Any:
        async with aiohttp.ClientSession() as http, http.get(f"{self.registry.url}{path}") as got:
            return await got.json()


@asynccontextmanager
async def running_registry(nats: NatsServer, **settings: Any) -> AsyncIterator[Registry]:
    async with connect([nats.url], name="test") as bus:
        await ensure_bus(bus)
        async with run_registry(nats.url, **settings) as registry:
            yield Registry(registry, bus)


def allocation(node: str) -> AllocationRecord:
    shares = (Share(vendor="nvidia", uuid=f"{node}-0", memory_mib=1000),)
    return AllocationRecord(
        op="reserve",
        allocation_id=f"allocation-{node}",
        node=node,
        pod_uid=f"uid-{node}",
        namespace="ns",
        pod=f"pod-{node}",
        containers=(ContainerShares(name="main", kind="app", shares=shares),),
        time_s=1.0,
        lease_s=30.0,
        writer="test",
    )


async def send_report(on: Registry, node: str) -> None:
    await send(on.publisher, report(f"{node}-0", node=node))


async def has_devices(on: Registry) -> bool:
    return await stored(on.bucket(subjects.DEVICES_BUCKET), GOOD) is not None


async def shows_device(on: Registry) -> bool:
    shown = await on.get("/v1/devices")
    return any(item["node"] == GOOD for item in shown["items"])


async def send_record(on: Registry, node: str) -> None:
    record = allocation(node)
    key = subjects.allocation_key(node, record.pod_uid)
    await on.bucket(subjects.ALLOC_BUCKET).append(key, codec.encode(record))


async def shows_allocation(on: Registry) -> bool:
    shown = await on.get("/v1/allocations")
    return any(item["node"] == GOOD for item in shown["items"])


async def send_state(on: Registry, node: str) -> None:
    record = allocation(node)
    if node == GOOD:
        await send_record(on, node)
    state = StateRecord(
        state="running",
        allocation_id=record.allocation_id,
        node=node,
        pod_uid=record.pod_uid,
        namespace="ns",
        pod=record.pod,
        ledger_seq=1,
    )
    key = subjects.allocation_key(node, record.pod_uid)
    await on.bucket(subjects.STATE_BUCKET).append(key, codec.encode(state))


async def shows_state(on: Registry) -> bool:
    shown = await on.get("/v1/allocations")
    return any(item["node"] == GOOD and item["state"] == "running" for item in shown["items"])


async def send_decision(on: Registry, node: str) -> None:
    decision = DecisionRecord(
        verb="filter",
        namespace="ns",
        pod=f"pod-{node}",
        pod_uid=f"uid-{node}",
        time_s=1.0,
        verdict="refused",
        snapshot_id="1.1",
    )
    await on.publisher.publish_stored(
        subjects.decision_event("ns", decision.pod), codec.encode(decision)
    )


async def shows_decision(on: Registry) -> bool:
    return "error" not in await on.get(f"/v1/explain/ns/pod-{GOOD}")


async def send_heartbeat(on: Registry, node: str) -> None:
    if node == GOOD:
        await send_report(on, node)
    beat = Heartbeat(node=node, boot_id="1", seq=1, time_s=1.0, vendors=("nvidia",))
    await on.publisher.publish(subjects.heartbeat(node), codec.encode(beat))


async def shows_heartbeat(on: Registry) -> bool:
    await send_heartbeat(on, GOOD)
    shown = await on.get("/v1/nodes")
    return any(item["node"] == GOOD and item["alive"] for item in shown["items"])


async def send_advisory(on: Registry, node: str) -> None:
    subject = subjects.decision_event("ns", f"pod-{node}")
    sequence = await on.publisher.publish_stored(subject, node.encode())
    advisory = {
        "type": "io.nats.jetstream.advisory.v1.max_deliver",
        "stream": subjects.EVENTS_STREAM,
        "consumer": node,
        "stream_seq": sequence,
        "deliveries": 3,
    }
    await on.publisher.publish_stored(
        f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{subjects.EVENTS_STREAM}.{node}",
        msgspec.json.encode(advisory),
    )


async def has_letter(on: Registry) -> bool:
    subject = subjects.dead_letter(GOOD, subjects.decision_event("ns", f"pod-{GOOD}"))
    async with pull_events(
        on.bus, subjects.DEAD_LETTERS_STREAM, filter_subjects=(subject,)
    ) as letters:
        with anyio.move_on_after(1.0):
            await anext(letters)
            return True
    return False


async def ask_records(on: Registry, node: str) -> None:
    subject = subjects.records(node, subjects.ALLOC_BUCKET)
    await on.bus.publish(subject, b"", reply=on.bus.new_inbox())


async def has_records(on: Registry) -> bool:
    answer = await on.bus.request(subjects.records(GOOD, subjects.ALLOC_BUCKET), b"")
    return b"identity" in answer.data


REGISTRY = {
    "report": (Inventory, "accept", send_report, has_devices),
    "devices to store": (Inventory, "canonical", send_report, has_devices),
    "stored devices": (Projection, "devices_seen", send_report, shows_device),
    "ledger record": (Projection, "record_seen", send_record, shows_allocation),
    "state": (Projection, "state_seen", send_state, shows_state),
    "decision": (Projection, "decision_seen", send_decision, shows_decision),
    "heartbeat": (Projection, "heartbeat_seen", send_heartbeat, shows_heartbeat),
    "advisory": (
        hami_registry.shell.deadletters.DeadLetters,
        "_put_away",
        send_advisory,
        has_letter,
    ),
    "question of an agent": (subjects, "parse_records", ask_records, has_records),
}
UNSTORED = ("heartbeat", "question of an agent")
"""Inputs on subjects that no stream stores."""


@pytest.mark.parametrize("loop", REGISTRY)
async def test_one_object_never_ends_the_registry(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    owner, name, tell, is_served = REGISTRY[loop]
    async with running_registry(nats_server) as on:
        broken = break_for(monkeypatch, owner, name, mentions(BAD))
        await tell(on, BAD)

        async def is_broken() -> bool:
            if loop in UNSTORED:
                await tell(on, BAD)  # lost if the registry did not subscribe yet
            return bool(broken)

        await until(is_broken, within_s=WITHIN_S)
        await tell(on, GOOD)
        await until(functools.partial(is_served, on), within_s=WITHIN_S)


async def test_one_node_object_never_ends_the_registry(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with ApiServer(KubeSettings(controllers=False)) as server:
        server.kubeconfig(tmp_path / "kubeconfig")
        settings = {"watch_nodes": True, "kubeconfig": str(tmp_path / "kubeconfig")}
        async with running_registry(nats_server, **settings) as on:
            broken = break_for(
                monkeypatch, hami_registry.shell.cordons, "parse_cordon", mentions(BAD)
            )
            await send_report(on, GOOD)
            for node in (BAD, GOOD):
                annotations = {keys.DEVICE_CORDON: f"{node}-0"}
                metadata = {"name": node, "annotations": annotations}
                async with aiohttp.ClientSession() as http:
                    await http.post(
                        f"{server.url}/api/v1/nodes",
                        json={"apiVersion": "v1", "kind": "Node", "metadata": metadata},
                        headers={"Authorization": f"Bearer {server.token}"},
                    )
            await until(settled(broken), within_s=WITHIN_S)

            async def is_cordoned() -> bool:
                found = await stored(on.bucket(subjects.DEVICES_BUCKET), GOOD)
                return found is not None and found.devices[0].cordoned

            await until(is_cordoned, within_s=WITHIN_S)


async def test_configuration_file_that_fails_never_ends_the_registry(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "devices.toml"
    path.write_text("[defaults]\nslots = 4\n")
    async with running_registry(nats_server, device_config_file=str(path)) as on:
        broken = break_for(
            monkeypatch, CanonicalWriter, "use_config", lambda *_: "99" in path.read_text()
        )
        path.write_text("[defaults]\nslots = 99\n")
        await until(settled(broken), within_s=WITHIN_S)
        path.write_text("[defaults]\nslots = 5\n")

        async def is_used() -> bool:
            shown = await on.get("/v1/config")
            return bool(shown["config"]["defaults"]["slots"] == 5)

        await until(is_used, within_s=WITHIN_S)


async def test_answer_of_one_agent_hides_no_other(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_registry(nats_server) as on:
        for node in (BAD, GOOD):
            await send_report(on, node)
        broken = break_for(
            monkeypatch,
            codec,
            "decode_on",
            lambda subject, *_: subject == subjects.ask(BAD, "usage"),
        )

        async def answer() -> None:
            async with on.bus.subscribe(f"{subjects.ASK_PREFIX}.*.usage") as questions:
                async for question in questions:
                    node = question.subject.split(".")[-2]
                    told = UsageAnswer(node=node, time_s=1.0, shares=())
                    await on.bus.publish(question.reply, codec.encode(told))

        async def has_both() -> bool:
            shown = await on.get("/v1/nodes")
            return {item["node"] for item in shown["items"]} == {BAD, GOOD}

        shown: dict[str, Any] = {}

        async def has_answered() -> bool:
            shown.update(await on.get("/v1/usage"))
            return [item["node"] for item in shown["items"]] == [GOOD]

        async with anyio.create_task_group() as group:
            group.start_soon(answer)
            await until(has_both, within_s=WITHIN_S)
            await until(has_answered, within_s=WITHIN_S)
            group.cancel_scope.cancel()
        assert broken
        assert shown["silent"] == [BAD]


# --- agent ----------------------------------------------------------------------------------------


@pytest.fixture
async def plane(short_path: Path, nats_server: NatsServer) -> AsyncIterator[Plane]:
    async with run_plane(short_path, nats_server) as built:
        yield built


AGENT: dict[str, tuple[Any, str]] = {
    "pod": (hami_nodeagent.shell.pods, "facts_of"),
    "ledger record": (hami_nodeagent.shell.feed, "_record"),
    "state": (hami_nodeagent.shell.states, "next_step"),
    "usage of a container": (hami_nodeagent.shell.usage, "rows_of"),
    "metering": (hami_nodeagent.shell.usage, "part_of"),
    "limits file": (Relimiter, "_wanted"),
}
LOOKS = UsageSettings(look_s=0.2)


@pytest.mark.parametrize("loop", AGENT)
async def test_one_pod_never_ends_the_agent(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    owner, name = AGENT[loop]
    words = [BAD]

    def concerns(*args: Any, **more: Any) -> bool:
        return any(mentions(word)(*args, **more) for word in words)

    async with plane.agent(usage=LOOKS):
        broken = break_for(monkeypatch, owner, name, concerns)
        record = plane.record(await plane.create(BAD, Ask(shares=((1, 1000),))))
        words.append(record.pod_uid)
        await plane.bind(record, await plane.reserve(record))
        await until(settled(broken), within_s=WITHIN_S)
        good = await plane.place(GOOD, Ask(shares=((0, 1000),)))
        await plane.until_state(good.pod_uid, "running")


DEVICE_LOOPS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "discovery": (VendorDevices, "_take", lambda *_: True),
    "usage of a vendor": (SimulatedDriver, "usage", lambda *_: True),
    "health of a device": (HealthBook, "handle", lambda *_: True),
    "report": (Reporter, "_report", lambda *_: True),
    "canonical devices": (Reporter, "_read_canonical", lambda *_: True),
    "check of grants": (SelfCheck, "_compare", lambda *_: True),
}


@pytest.mark.parametrize("loop", DEVICE_LOOPS)
async def test_one_driver_or_device_never_ends_the_agent(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    owner, name, concerns = DEVICE_LOOPS[loop]
    async with plane.agent(usage=LOOKS, discovery_s=0.2, check_s=0.2):
        broken = break_for(monkeypatch, owner, name, concerns)
        await until(settled(broken), within_s=WITHIN_S)
        good = await plane.place(GOOD, Ask(shares=((0, 1000),)))
        await plane.until_state(good.pod_uid, "running")


async def test_question_that_fails_never_ends_the_agent(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with plane.agent():
        broken = break_for(
            monkeypatch, hami_nodeagent.shell.usage.UsageWatch, "rows", lambda *_: True
        )
        with pytest.raises(Exception, match="unavailable"):
            await plane.bus.request(subjects.ask(NODE, "usage"), timeout_s=0.5)
        assert broken
        answer = await plane.bus.request(subjects.ask(NODE, "check"))
        assert b"findings" in answer.data


async def test_plugin_that_fails_is_registered_again(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with plane.agent() as context:
        once = iter([True])

        def is_of_vendor(keeper: PluginKeeper, *_: object) -> bool:
            return keeper._plugin.resource == RESOURCE and next(once, False)  # noqa: SLF001

        broken = break_for(monkeypatch, PluginKeeper, "_watch", is_of_vendor)
        (plane.kubelet.plugin_directory / "hami-nvidia.sock").unlink()
        await until(settled(broken), within_s=WITHIN_S)
        labels = {"resource": RESOURCE, "outcome": "registered"}

        async def is_registered() -> bool:
            name = "hami_nodeagent_kubelet_registrations_total"
            return (context.registry.get_sample_value(name, labels) or 0) >= 3

        await until(is_registered, within_s=WITHIN_S)
        good = await plane.place(GOOD, Ask(shares=((0, 1000),)))
        await plane.until_state(good.pod_uid, "running")


async def test_unreadable_pod_gets_no_device_and_others_do(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with plane.agent(allocate_wait_s=0.5, outage_wait_s=0.5):
        break_for(monkeypatch, hami_nodeagent.shell.pods, "facts_of", mentions(BAD))
        await plane.place(BAD, Ask(shares=((1, 1000),)))
        refusal = await plane.refusal_of(BAD)
        assert "hami:" in refusal
        good = await plane.place(GOOD, Ask(shares=((0, 1000),)))
        await plane.until_state(good.pod_uid, "running")


async def test_object_in_quarantine_is_listed_until_it_is_handled(
    plane: Plane, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the agent that fails, over the bus, to the clients of the registry."""
    asked: list[Registry] = []
    async with plane.agent(), running_registry(nats_server) as on:
        asked.append(on)
        is_broken = [True]

        def concerns(*args: Any, **more: Any) -> bool:
            return is_broken[0] and mentions(BAD)(*args, **more)

        break_for(monkeypatch, hami_nodeagent.shell.states, "next_step", concerns)
        record = await plane.place(BAD, Ask(shares=((1, 1000),)))
        rows: list[Any] = []

        async def is_listed() -> bool:
            rows[:] = (await asked[-1].get("/v1/quarantine?namespace=default"))["items"]
            return bool(rows)

        await until(is_listed, within_s=WITHIN_S)
        (row,) = rows
        assert (row["service"], row["replica"]) == ("nodeagent", NODE)
        assert (row["kind"], row["key"]) == ("allocation", record.pod_uid)
        assert (row["namespace"], row["name"]) == ("default", BAD)
        assert row["problem"] == "RuntimeError: injected"
        assert (await on.get("/v1/quarantine?namespace=other"))["items"] == []
        checks = await on.get("/v1/checks")
        (found,) = [one for one in checks["findings"] if one["check"] == "quarantine"]
        assert found["verdict"] == "WARN"
        # A registry that starts later learns it from the stream.
        async with running_registry(nats_server, replica="registry-1") as later:
            asked.append(later)
            await until(is_listed, within_s=WITHIN_S)
            is_broken[0] = False
            await plane.until_state(record.pod_uid, "running")


# --- webhook --------------------------------------------------------------------------------------


def made(kind: Callable[..., Any], **known: Any) -> Any:
    """Make an object from those of the arguments that it takes."""
    takes = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in known.items() if name in takes})


async def test_one_event_never_ends_the_webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    metrics = WebhookMetrics(registry)
    events = made(
        hami_webhook.shell.events.AdmissionEvents,
        source="/webhook/test",
        limit=8,
        metrics=metrics,
        quarantine=quarantine_of(registry),
    )
    broken = break_for(monkeypatch, codec, "encode", lambda one: one.pod == BAD)
    for number, pod in enumerate((BAD, GOOD)):
        record = AdmissionRecord(
            namespace="ns",
            pod=pod,
            operation="CREATE",
            request_uid=f"uid-{number}",
            time_s=0.0,
            allowed=True,
        )
        events.offer(record, traceparent="")
    events.end()
    await events.run(MemoryPublisher(MemoryBus()))
    events.close()
    assert broken
    assert registry.get_sample_value("hami_webhook_events_published_total") == 1


def quarantine_of(registry: CollectorRegistry) -> Quarantine:
    """The quarantine for events of the webhook whose handling fails."""
    return Quarantine(kinds=("event",), clock=SystemClock(), registry=registry)
