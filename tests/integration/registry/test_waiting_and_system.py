# SPDX-License-Identifier: Apache-2.0
"""Waiting pods and the state of the control plane, as a registry on a real bus reports them."""

from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from hami_common.bus import grants, subjects
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.decision import DecisionRecord, RefusalClass
from hami_common.events.inventory import Heartbeat
from hami_common.ports import Publisher
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio import NatsBucket, NatsPublisher
from tests.support.busaccess import run_site
from tests.support.registry import RunningRegistry, report, run_registry, send

pytestmark = pytest.mark.anyio


async def get(registry: RunningRegistry, path: str) -> Any:
    async with aiohttp.ClientSession() as http, http.get(f"{registry.url}{path}") as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def until_waiting(registry: RunningRegistry, *pods: str, path: str = "/v1/waiting") -> Any:
    found: Any = None
    with anyio.move_on_after(20):
        while True:
            found = (await get(registry, path))["items"]
            if [one["pod"] for one in found] == list(pods):
                return found
            await anyio.sleep(0.02)
    pytest.fail(f"not {pods}: {found}")


def refused(pod: str, *, namespace: str = "team-a", **changes: Any) -> DecisionRecord:
    now_s = SystemClock().now_s()
    fields: dict[str, Any] = {
        "verb": "filter",
        "namespace": namespace,
        "pod": pod,
        "pod_uid": f"uid-{pod}",
        "time_s": now_s,
        "verdict": "refused",
        "snapshot_id": "1.1",
        "created_s": now_s - 60,
        "attempts": 4,
        "writer": "scheduler-0",
        "duration_ms": 3.0,
        "refusals": (RefusalClass(code="CardInsufficientMemory", text="too small", count=2),),
        **changes,
    }
    return DecisionRecord(**fields)


async def publish(publisher: Publisher, decision: DecisionRecord) -> None:
    subject = subjects.decision_event(decision.namespace, decision.pod)
    await publisher.publish_stored(subject, codec.encode(decision))


async def test_waiting_pods_survive_a_restart_and_leave_when_placed_or_deleted(
    tmp_path: Path,
) -> None:
    async with run_site(tmp_path) as site, site.registry(), site.service("scheduler") as scheduler:
        publisher = NatsPublisher(scheduler)
        ledger = NatsBucket(scheduler, subjects.ALLOC_BUCKET)
        login = {"nats_seed_file": site.seed_file("registry")}
        for pod in ("a", "b", "c"):
            await publish(publisher, refused(pod))
        await publish(publisher, refused("theirs", namespace="team-b"))
        async with run_registry(site.server.url, **login) as registry:
            (first, *_) = await until_waiting(
                registry, "a", "b", "c", path="/v1/waiting?namespace=team-a"
            )
            assert (first["reason"], first["code"]) == ("devices", "CardInsufficientMemory")
            assert (first["attempts"], first["writer"]) == (4, "scheduler-0")
            ended = refused("b", verdict="error", ended=True, refusals=())
            await publish(publisher, ended)
            record = AllocationRecord(
                op="reserve",
                allocation_id="x",
                node="gpu-1",
                pod_uid="uid-c",
                namespace="team-a",
                pod="c",
            )
            await ledger.append(subjects.allocation_key("gpu-1", "uid-c"), codec.encode(record))
            await until_waiting(registry, "a", "theirs")
        async with run_registry(site.server.url, **login) as registry:
            (first, _) = await until_waiting(registry, "a", "theirs")
            assert first["attempts"] == 4


def is_complete(found: Any) -> bool:
    """Return whether all replicas, the agent, its concern and the waiting pod are listed."""
    services = {row["service"] for row in found.get("replicas", ())}
    agents = [row["agents"] for row in found.get("agents", {}).get("versions", ())]
    concerns = [row["code"] for row in found.get("concerns", ())]
    return (
        services == {"registry", "scheduler", "webhook"}
        and agents == [1]
        and found["waiting"] == 1
        and concerns == ["agents-of-another-version"]
        and "not reached" in found["leases_problem"]
    )


async def test_system_shows_replicas_agents_streams_and_consumers(tmp_path: Path) -> None:
    async with (
        run_site(tmp_path) as site,
        site.registry(),
        site.service("scheduler") as scheduler,
        site.service("webhook") as webhook,
        run_registry(site.server.url, nats_seed_file=site.seed_file("registry")) as registry,
    ):
        await publish(NatsPublisher(scheduler), refused("a"))
        await NatsPublisher(webhook).publish_stored(
            subjects.admission_event("team-a", "a"),
            b"{}",
            headers=codec.event_headers(
                event_id="1", event_type="t", source="/webhook/webhook-0", time_s=1.0
            ),
        )
        beat = Heartbeat(
            node="gpu-1", boot_id="1", seq=1, time_s=0.0, vendors=("nvidia",), version="0.0.1"
        )
        found: Any = {}
        with anyio.move_on_after(20):
            async with site.agent("gpu-1", site.file(site.agent_token("gpu-1"))) as agent:
                await send(NatsPublisher(agent), report("a", node="gpu-1"))
                while not is_complete(found):
                    await NatsPublisher(agent).publish(
                        subjects.heartbeat("gpu-1"), codec.encode(beat)
                    )
                    found = await get(registry, "/v1/system")
                    await anyio.sleep(0.05)
        assert found["leases"] == []
        assert "not reached" in found["leases_problem"]
        assert {row["replica"] for row in found["replicas"]} == {
            "registry-0",
            "scheduler-0",
            "webhook-0",
        }
        assert found["agents"]["versions"] == [{"version": "0.0.1", "agents": 1}]
        assert [row["name"] for row in found["streams"]] == list(grants.STREAMS)
        assert not any(row["problem"] for row in found["streams"])
        assert found["consumers_problem"] == ""
        assert {row["stream"] for row in found["consumers"]} >= {subjects.EVENTS_STREAM}
        assert found["waiting"] == 1
        assert [row["code"] for row in found["concerns"]] == ["agents-of-another-version"]
