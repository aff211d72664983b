# SPDX-License-Identifier: Apache-2.0
"""Declaring the streams of the bus on a real nats-server."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from hami_common.bus import grants, subjects
from hami_common.errors import SettingsInvalid, Unavailable
from hami_common.runtime import natsio
from hami_common.runtime.natsio.jetstream import ApiRefusal, api
from hami_common.runtime.natsio.layout import stream_configs
from hami_sim.natsd import NatsServer, run_nats_server

pytestmark = pytest.mark.anyio

STREAMS = set(grants.STREAMS)


async def streams_of(bus: natsio.Bus) -> dict[str, dict[str, Any]]:
    answer = await api(bus, "STREAM.LIST")
    return {stream["config"]["name"]: stream for stream in answer["streams"]}


async def test_six_services_may_declare_the_bus_at_once(nats_server: NatsServer) -> None:
    async with anyio.create_task_group() as group:

        async def service(number: int) -> None:
            async with natsio.connect([nats_server.url], name=f"service-{number}") as bus:
                await natsio.ensure_bus(bus)

        for number in range(6):
            group.start_soon(service, number)
    async with natsio.connect([nats_server.url], name="t") as bus:
        assert (await streams_of(bus)).keys() == STREAMS


async def test_declaring_again_keeps_stored_messages(nats_server: NatsServer) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        bucket = natsio.NatsBucket(bus, subjects.ALLOC_BUCKET)
        await bucket.append("node.pod", b"1")
        created = (await streams_of(bus))["KV_hami_alloc"]["created"]
        await natsio.ensure_bus(bus)
        assert (await streams_of(bus))["KV_hami_alloc"]["created"] == created
        assert await bucket.get("node.pod") is not None


async def test_a_changed_limit_is_applied_to_an_existing_stream(nats_server: NatsServer) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        await natsio.ensure_bus(bus, limits=natsio.BusLimits(events_max_age_s=3600))
        config = (await streams_of(bus))["HAMI_EVENTS"]["config"]
        assert config["max_age"] == 3600 * 10**9


async def test_streams_of_a_release_without_limits_get_them_and_keep_their_messages(
    nats_server: NatsServer,
) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        for config in stream_configs(natsio.BusLimits(events_max_bytes=4 << 30)):
            older = {k: v for k, v in config.items() if k not in ("max_msg_size", "max_bytes")}
            if config["name"] == "HAMI_EVENTS":
                older = {k: v for k, v in config.items() if k != "max_msgs_per_subject"}
            if config["name"] == "HAMI_REPORTS":
                older["discard"] = "old"
            await api(bus, f"STREAM.CREATE.{config['name']}", older)
        subject = subjects.report("n", "nvidia")
        await natsio.NatsPublisher(bus).publish_stored(subject, b"report")
        await natsio.ensure_bus(bus)
        found = await streams_of(bus)
        for config in stream_configs(natsio.BusLimits()):
            now = found[config["name"]]["config"]
            assert {key: now.get(key) for key in config} == config
        assert found["HAMI_REPORTS"]["state"]["messages"] == 1


async def test_a_stream_of_another_kind_is_refused_with_the_fields_that_differ(
    nats_server: NatsServer,
) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        config = {
            "name": "HAMI_REPORTS",
            "subjects": ["hami.v1.report.>"],
            "storage": "memory",
            "num_replicas": 1,
        }
        await api(bus, "STREAM.CREATE.HAMI_REPORTS", config)
        with pytest.raises(SettingsInvalid, match=r"stream HAMI_REPORTS.*storage"):
            await natsio.ensure_bus(bus, timeout_s=20)


async def test_more_replicas_than_servers_is_an_error_that_names_replicas(
    nats_server: NatsServer,
) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        with pytest.raises(Unavailable, match=r"not declared in 2 s.*(?i:replicas)"):
            await natsio.ensure_bus(bus, limits=natsio.BusLimits(replicas=3), timeout_s=2)


async def test_a_server_without_jetstream_is_unavailable(tmp_path: Path) -> None:
    config = "accounts { A { users = [{user: a, password: a}] } }"  # an account without JetStream
    async with run_nats_server(tmp_path / "n", config_text=config) as server:
        url = server.url.replace("nats://", "nats://a:a@")
        async with natsio.connect([url], name="t") as bus:
            with pytest.raises(Unavailable, match="not declared in"):
                await natsio.ensure_bus(bus, timeout_s=0.3)


async def test_keep_bus_declares_again_after_the_store_was_lost(nats_server: NatsServer) -> None:
    async with (
        natsio.connect([nats_server.url], name="t") as bus,
        anyio.create_task_group() as group,
    ):
        await group.start(natsio.keep_bus, bus)
        await nats_server.stop()
        await nats_server.wipe()
        await nats_server.start()
        with anyio.fail_after(30):
            await bus.wait_connected(after=1)
            while (await streams_of(bus)).keys() != STREAMS:
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()


async def test_single_messages_of_a_bucket_cannot_be_deleted(nats_server: NatsServer) -> None:
    """The ledger is append-only: only ``forget`` removes, and only whole keys."""
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        await natsio.NatsBucket(bus, subjects.ALLOC_BUCKET).append("node.pod", b"1")
        with pytest.raises(ApiRefusal, match="not permitted"):
            await api(bus, "STREAM.MSG.DELETE.KV_hami_alloc", {"seq": 1})


def test_the_events_stream_is_made_before_the_buckets_it_copies() -> None:
    names = [config["name"] for config in stream_configs(natsio.BusLimits())]
    assert names[0] == "HAMI_EVENTS"
    assert set(names) == STREAMS
