# SPDX-License-Identifier: Apache-2.0
"""Permissions of each login on the bus, tried against a real server (ADR 0013)."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from hami_common.bus import grants, subjects
from hami_common.errors import Conflict, SettingsInvalid, Unavailable
from hami_common.ports import Entry, Expect, Synced
from hami_common.runtime import natsio
from hami_sim.natsd import run_nats_server
from tests.support.busaccess import AGENT, Intruder, Site, intruder, run_site, token

pytestmark = pytest.mark.anyio

NODE, OTHER = "node-1.example", "node-2"
HERE, THERE = subjects.escape(NODE), subjects.escape(OTHER)
TENANT = ("team-a", "reader")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with run_site(tmp_path) as made:
        yield made


def agent_file(site: Site, node: str = NODE, *, valid_s: float = 600.0) -> str:
    return site.file(site.agent_token(node, valid_s=valid_s))


async def test_agent_does_its_work(site: Site) -> None:
    key = subjects.allocation_key(NODE, "p1")
    async with (
        site.registry() as registry,
        site.service("scheduler") as scheduler,
        scheduler.subscribe(f"{subjects.HEARTBEAT_PREFIX}.*") as beats,
        site.agent(NODE, agent_file(site)) as bus,
    ):
        ledger = natsio.NatsBucket(scheduler, subjects.ALLOC_BUCKET)
        await ledger.append(key, b"first")
        await ledger.append(subjects.allocation_key(OTHER, "p9"), b"not ours")
        own = natsio.OwnBucket(bus, subjects.ALLOC_BUCKET, NODE)
        assert await own.identity() == await ledger.identity()
        async with natsio.RepublishedFeed(bus, NODE, bucket=own).watch() as items:
            with anyio.fail_after(10):
                first = await anext(items)
            assert isinstance(first, Entry)
            assert first.value == b"first"
            assert isinstance(await anext(items), Synced)
            await ledger.append(key, b"second")
            with anyio.fail_after(10):
                second = await anext(items)
            assert isinstance(second, Entry)
            assert second.value == b"second"
        states = natsio.OwnBucket(bus, subjects.STATE_BUCKET, NODE)
        none = Expect(subject=subjects.kv_subject(subjects.STATE_BUCKET, key), sequence=0)
        assert await states.append(key, b"prepared", expect=none) == 1
        with pytest.raises(Conflict):
            await states.append(key, b"prepared", expect=none)
        stored = await states.get(key)
        assert stored is not None
        assert stored.value == b"prepared"
        assert await states.get(subjects.allocation_key(NODE, "nobody")) is None
        assert [entry.key for entry in await states.latest(subjects.node_keys(NODE))] == [key]
        devices = natsio.NatsBucket(registry, subjects.DEVICES_BUCKET)
        await devices.append(subjects.devices_key(NODE, "nvidia"), b"canonical")
        seen = await natsio.OwnBucket(bus, subjects.DEVICES_BUCKET, NODE).get(
            subjects.devices_key(NODE, "nvidia")
        )
        assert seen is not None
        assert seen.value == b"canonical"
        publisher = natsio.NatsPublisher(bus)
        await publisher.publish(subjects.heartbeat(NODE), b"beat")
        assert (await beats.receive(timeout_s=10))[0].data == b"beat"
        assert await publisher.publish_stored(subjects.report(NODE, "nvidia"), b"report") == 1
        assert await publisher.publish_stored(subjects.breach_event(NODE, "p1"), b"breach") > 0


FORBIDDEN = (
    subjects.report(OTHER, "nvidia"),
    subjects.heartbeat(OTHER),
    subjects.fault(OTHER),
    subjects.breach_event(OTHER, "p1"),
    subjects.kv_subject(subjects.STATE_BUCKET, f"{THERE}.p1"),
    subjects.kv_subject(subjects.ALLOC_BUCKET, f"{THERE}.p1"),
    subjects.kv_subject(subjects.ALLOC_BUCKET, f"{HERE}.p1"),
    subjects.kv_subject(subjects.DEVICES_BUCKET, f"{HERE}.nvidia"),
    f"{subjects.ALLOC_FEED_PREFIX}.{HERE}.p1",
    f"{subjects.ALLOC_FEED_PREFIX}.{THERE}.p1",
    subjects.decision_event("default", "pod"),
    subjects.records(OTHER, subjects.ALLOC_BUCKET),
    f"$JS.API.DIRECT.GET.KV_hami_alloc.$KV.hami_alloc.{THERE}.p1",
    "$JS.API.DIRECT.GET.KV_hami_alloc",
    "$JS.API.STREAM.MSG.GET.KV_hami_alloc",
    "$JS.API.STREAM.CREATE.MINE",
    "$JS.API.STREAM.UPDATE.KV_hami_alloc",
    "$JS.API.STREAM.DELETE.KV_hami_alloc",
    "$JS.API.STREAM.PURGE.KV_hami_alloc",
    "$JS.API.STREAM.MSG.DELETE.KV_hami_alloc",
    "$JS.API.CONSUMER.CREATE.KV_hami_alloc.mine",
    "$JS.API.CONSUMER.DELETE.HAMI_EVENTS.mine",
    "$SYS.REQ.USER.AUTH",
    "_INBOX.scheduler.x",
)
UNHEARD = (
    ">",
    f"{subjects.ALLOC_FEED_PREFIX}.*.*",
    subjects.alloc_feed(OTHER),
    f"{subjects.HEARTBEAT_PREFIX}.*",
    "$KV.>",
    "$SYS.REQ.USER.AUTH",
    "_INBOX.>",
    f"{grants.inbox('agent', OTHER)}.>",
    f"{grants.inbox('scheduler')}.>",
)


async def test_agent_publishes_and_subscribes_for_its_own_node_only(site: Site) -> None:
    prefix = grants.inbox("agent", NODE)
    async with (
        site.registry(),
        intruder(site, site.agent_token(NODE), prefix=prefix) as bad,
    ):
        for subject in FORBIDDEN:
            await bad.client.publish(subject, b"{}")
        for subject in UNHEARD:
            await bad.client.subscribe(subject)
        for subject in (*FORBIDDEN, *UNHEARD):
            assert await bad.is_forbidden(subject), subject


async def test_tenant_may_subscribe_to_events_and_publish_nothing(site: Site) -> None:
    site.reviews.allowed.add("system:serviceaccount:team-a:reader")
    text = site.reviews.know(token("reader", ends_s=site.clock.now_s() + 600), TENANT)
    mine = grants.consumer_of(*TENANT)
    prefix = f"_INBOX.integration.{mine}"
    async with (
        site.registry() as registry,
        site.service("scheduler") as scheduler,
        intruder(site, text, prefix=prefix) as reader,
    ):
        publisher = natsio.NatsPublisher(scheduler)
        await publisher.publish_stored(subjects.decision_event("default", "pod"), b"decided")
        told = await next_event(reader, mine)
        assert (told.subject, told.data) == (subjects.decision_event("default", "pod"), b"decided")
        await reader.client.publish(told.reply, b"+ACK")
        await reader.settle()
        await natsio.ensure_consumer(
            registry, subjects.EVENTS_STREAM, durable="other", filter_subject="hami.v1.event.>"
        )
        forbidden = [
            *FORBIDDEN,
            subjects.heartbeat(NODE),
            subjects.report(NODE, "nvidia"),
            subjects.kv_subject(subjects.STATE_BUCKET, f"{HERE}.p1"),
            "hami.v1.event.admission.default.pod",
            "hami.v1.anything",
            "$JS.API.CONSUMER.MSG.NEXT.HAMI_EVENTS.other",
            "$JS.ACK.HAMI_EVENTS.other.1.1.1.1.0",
        ]
        for subject in forbidden:
            await reader.client.publish(subject, b"{}")
        for subject in forbidden:
            assert await reader.is_forbidden(subject), subject


async def next_event(reader: Intruder, consumer: str) -> Msg:
    """As an integration with the plain client does."""
    inbox = reader.client.new_inbox()
    subscription = await reader.client.subscribe(inbox)
    await reader.client.publish(
        f"$JS.API.CONSUMER.MSG.NEXT.{subjects.EVENTS_STREAM}.{consumer}",
        b'{"batch": 1, "expires": 5000000000}',
        reply=inbox,
    )
    return await subscription.next_msg(timeout=10)


REPLIES = (
    subjects.kv_subject(subjects.ALLOC_BUCKET, f"{THERE}.victim"),
    subjects.kv_subject(subjects.ALLOC_BUCKET, f"{HERE}.p1"),
    subjects.kv_subject(subjects.STATE_BUCKET, f"{THERE}.victim"),
    subjects.kv_subject(subjects.DEVICES_BUCKET, f"{THERE}.nvidia"),
    subjects.heartbeat(OTHER),
    subjects.report(OTHER, "nvidia"),
)


async def test_answers_to_an_agent_reach_that_agent_only(site: Site) -> None:
    """JetStream answers on any reply subject; the accounts keep the answers on their side."""
    own = subjects.kv_subject(subjects.STATE_BUCKET, f"{HERE}.p1")
    async with (
        site.registry() as registry,
        site.service("scheduler") as scheduler,
        scheduler.subscribe(f"{subjects.HEARTBEAT_PREFIX}.*") as beats,
        intruder(site, site.agent_token(NODE), prefix=grants.inbox("agent", NODE)) as bad,
    ):
        await natsio.NatsBucket(scheduler, subjects.ALLOC_BUCKET).append(f"{HERE}.p0", b"true")
        for reply in REPLIES:
            await bad.client.publish(own, b"forged", reply=reply)
            for question in (
                f"$JS.API.DIRECT.GET.KV_hami_state.{own}",
                subjects.records(NODE, subjects.STATE_BUCKET),
                subjects.records(NODE, subjects.ALLOC_BUCKET),
            ):
                await bad.client.publish(question, b"", reply=reply)
        # All of it was worked on: these come behind them.
        stored = await bad.client.request(own, b"last", timeout=10)
        assert f'"seq":{len(REPLIES) + 1}'.encode() in stored.data
        last = await bad.client.request(subjects.records(NODE, subjects.STATE_BUCKET), timeout=10)
        assert b'"is_last":true' in last.data
        await bad.client.publish(subjects.heartbeat(NODE), b"the end")
        with anyio.fail_after(10):
            async for beat in beats:
                assert beat.subject == subjects.heartbeat(NODE)
                if beat.data == b"the end":
                    break
        ledger = natsio.NatsBucket(registry, subjects.ALLOC_BUCKET)
        assert [entry.value for entry in await ledger.latest()] == [b"true"]
        states = natsio.NatsBucket(registry, subjects.STATE_BUCKET)
        assert {entry.key for entry in await states.latest()} == {f"{HERE}.p1"}
        assert await natsio.NatsBucket(registry, subjects.DEVICES_BUCKET).latest() == []
        info = await registry.request("$JS.API.STREAM.INFO.HAMI_REPORTS")
        assert b'"messages":0' in info.data


async def test_in_one_account_permissions_would_not_be_enough(tmp_path: Path) -> None:
    """Several accounts are needed: in one, the same permissions let an answer into the ledger."""
    own = subjects.kv_subject(subjects.STATE_BUCKET, f"{HERE}.p1")
    victim = subjects.kv_subject(subjects.ALLOC_BUCKET, f"{THERE}.victim")
    config = (
        "jetstream: enabled\nauthorization { users = [ {user: all, password: x}, "
        f'{{user: agent, password: x, permissions: {{ publish: "{own}" }} }} ] }}\n'
    )
    async with run_nats_server(tmp_path / "n", config_text=config) as server:
        everybody = server.url.replace("nats://", "nats://all:x@")
        async with natsio.connect([everybody], name="all") as bus:
            await natsio.ensure_bus(bus)
            agent = Client()
            await agent.connect(server.url, user="agent", password="x", allow_reconnect=False)
            await agent.publish(own, b"forged", reply=victim)
            await agent.flush(timeout=10)
            await agent.close()
            ledger = natsio.NatsBucket(bus, subjects.ALLOC_BUCKET)
            with anyio.fail_after(10):
                while await ledger.get(f"{THERE}.victim") is None:
                    await anyio.sleep(0.01)


async def refused(site: Site, text: str) -> bool:
    client = Client()
    try:
        await client.connect(
            site.server.url, token=text, allow_reconnect=False, max_reconnect_attempts=1
        )
    except (nats.errors.Error, OSError) as error:
        return "authorization" in str(error).lower()
    finally:
        await client.close()
    return False


async def test_only_a_good_token_for_the_bus_and_bound_to_a_node_is_admitted(site: Site) -> None:
    soon = site.clock.now_s() + 600
    know = site.reviews.know
    async with site.registry():
        assert not await refused(site, site.agent_token(NODE))
        assert await refused(site, token("forged", ends_s=soon))
        assert await refused(site, know(token("unbound", ends_s=soon), AGENT))
        other = know(token("api", ends_s=soon), AGENT, node=NODE, audience="api")
        assert await refused(site, other)
        assert await refused(site, site.agent_token(NODE, valid_s=1))
        assert await refused(site, know(token("strange node", ends_s=soon), AGENT, node="a b>"))
        assert await refused(site, know(token("reader", ends_s=soon), TENANT))
        assert await refused(site, "")
        person = token("person", ends_s=soon)
        site.reviews.users[person] = {
            "authenticated": True,
            "user": {"username": "jane"},
            "audiences": ["hami-bus"],
        }
        assert await refused(site, person)
        site.reviews.is_down = True
        assert await refused(site, site.agent_token(NODE))


async def test_existing_agents_continue_without_the_authenticator_and_new_ones_wait(
    site: Site,
) -> None:
    async with site.service("scheduler") as scheduler:
        await natsio.ensure_bus(scheduler)
        async with anyio.create_task_group() as group:
            stop = anyio.Event()
            stopped = anyio.Event()
            group.start_soon(registry_until, site, stop, stopped)
            async with site.agent(NODE, agent_file(site)) as bus:
                states = natsio.OwnBucket(bus, subjects.STATE_BUCKET, NODE)
                assert await states.append(subjects.allocation_key(NODE, "p1"), b"1") == 1
                stop.set()
                await stopped.wait()
                assert await states.append(subjects.allocation_key(NODE, "p1"), b"2") == 2
                late = agent_file(site, OTHER)
                with pytest.raises(Unavailable):
                    async with site.agent(OTHER, late, start_timeout_s=1):
                        pytest.fail("nobody could admit it")
                async with site.registry(), site.agent(OTHER, late, start_timeout_s=20):
                    assert await states.append(subjects.allocation_key(NODE, "p1"), b"3") == 3
                assert bus.generation == 1


async def registry_until(site: Site, stop: anyio.Event, stopped: anyio.Event) -> None:
    async with site.registry():
        await stop.wait()
    stopped.set()


async def test_login_expires_and_is_renewed_with_the_rotated_token(site: Site) -> None:
    site.login_s = 4.0
    path = Path(agent_file(site))
    async with site.registry(), site.agent(NODE, str(path)) as bus:
        first = path.read_text(encoding="ascii")
        path.write_text(site.agent_token(NODE), encoding="ascii")
        del site.reviews.users[first]
        with anyio.fail_after(20):
            await bus.wait_connected(after=1)
        states = natsio.OwnBucket(bus, subjects.STATE_BUCKET, NODE)
        assert await states.append(subjects.allocation_key(NODE, "p1"), b"1") == 1


async def test_login_is_renewed_before_it_expires_without_loss(site: Site) -> None:
    async with (
        site.registry(),
        site.service("scheduler") as scheduler,
        site.agent(NODE, agent_file(site), renew_s=0.3) as bus,
    ):
        states = natsio.OwnBucket(bus, subjects.STATE_BUCKET, NODE)
        ledger = natsio.NatsBucket(scheduler, subjects.ALLOC_BUCKET)
        key = subjects.allocation_key(NODE, "p1")
        own = natsio.OwnBucket(bus, subjects.ALLOC_BUCKET, NODE)
        written = 0
        async with natsio.RepublishedFeed(bus, NODE, bucket=own).watch() as items:
            with anyio.fail_after(25):
                assert isinstance(await anext(items), Synced)
                while bus.generation < 4:
                    written += 1
                    # No answer may be lost between one connection and the next.
                    assert await states.append(key, b"x") == written
                    revision = await ledger.append(key, b"y")
                    entry = await anext(items)
                    assert isinstance(entry, Entry)
                    assert entry.revision == revision


async def test_no_token_and_no_seed_reaches_a_log(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    good, forged = site.agent_token(NODE), token("forged", ends_s=site.clock.now_s() + 600)
    seeds = [Path(site.seed_file(name)).read_text("ascii") for name in grants.STATIC_USERS]
    # Not the last character: not all of its bits count.
    middle = len(seeds[0]) // 2
    another = "A" if seeds[0][middle] != "A" else "B"
    damaged = site.file(seeds[0][:middle] + another + seeds[0][middle + 1 :])
    async with site.registry(), site.agent(NODE, site.file(good), renew_s=0.2) as bus:
        with anyio.fail_after(20):
            await bus.wait_connected(after=2)
        with pytest.raises(Unavailable) as told:
            async with site.agent(NODE, site.file(forged), start_timeout_s=3):
                pytest.fail("it is forged")
        with pytest.raises(SettingsInvalid) as said:
            natsio.NatsLogin(seed_file=damaged).options()
        site.reviews.is_down = True
        with pytest.raises(Unavailable):
            async with site.agent(NODE, site.file(site.agent_token(NODE)), start_timeout_s=3):
                pytest.fail("nobody could judge it")
    texts = [str(told.value), str(said.value), site.server.log.read_text("utf-8")]
    texts += [str(vars(record)) + record.getMessage() for record in caplog.records]
    assert any("refused at the bus" in text for text in texts)
    for secret in (good, forged, *site.reviews.users, *seeds, seeds[0][: middle + 1]):
        assert not any(secret in text for text in texts)


async def test_password_in_an_address_is_not_logged() -> None:
    with pytest.raises(Unavailable, match="127") as told:
        async with natsio.connect(["nats://me:hunter2@127.0.0.1:1"], name="t", start_timeout_s=0.3):
            pytest.fail("nobody is there")
    assert "hunter2" not in str(told.value)
