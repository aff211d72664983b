# SPDX-License-Identifier: Apache-2.0
"""Read access to the registry and the bus of an installation, judged by its API server.

Tenants, agents and integrations present real tokens; the tests are run by ``test_deploy``.
"""

import json
import os

import nats.errors
from nats.aio.client import Client

from hami_common.bus import grants, subjects
from hami_common.pods.annotations import DEVICE_CORDON
from hami_sim.cluster import AGENTS_NAMESPACE
from hami_sim.kubernetes.pki import HOST
from tests.e2e.work import NAMESPACE, Worked, bind, events_of
from tests.support.busaccess import intruder_at
from tests.support.installed import BUS, CONSOLE_INDEX, REGISTRY, Installed

AGENT = "hami-nodeagent"


async def status(site: Installed, path: str, token: str = "") -> int:
    """Return the status of the registry's answer."""
    return (await site.registry(path, token))[0]


async def is_admitted(site: Installed, token: str) -> bool:
    """Return True when the bus admits the bearer of a token."""
    client = Client()
    try:
        await client.connect(
            site.bus_url.replace(BUS, HOST),
            token=token,
            tls=site.tls_context(),
            tls_hostname=BUS,
            allow_reconnect=False,
            max_reconnect_attempts=1,
        )
    except (nats.errors.Error, OSError):
        return False
    else:
        return True
    finally:
        await client.close()


async def agents_token(site: Installed, *, audience: str = "", of: str = "") -> str:
    """A token of the agents' account."""
    return await site.token(AGENT, namespace=AGENTS_NAMESPACE, audience=audience, of=of)


class TestTenancy:
    """All clients except the services."""

    async def test_tenant_reads_allocations_of_its_namespace_alone(
        self, site: Installed, worked: Worked
    ) -> None:
        reader = await site.token("reader", namespace=NAMESPACE)
        own = f"/v1/allocations?namespace={NAMESPACE}"
        assert await status(site, own, reader) == 200
        assert await status(site, f"/v1/explain/{NAMESPACE}/second", reader) == 200
        for path in (
            "/v1/allocations?namespace=hami-system",
            "/v1/allocations/hami-system/web",
            "/v1/explain/hami-system/web",
            "/v1/allocations",
            "/v1/watch",
            "/v1/watch?namespace=hami-system",
            "/v1/nodes",
            "/v1/devices",
            "/v1/usage",
            "/v1/checks",
        ):
            assert await status(site, path, reader) == 403, path
        assert await status(site, f"/v1/explain/{NAMESPACE}/nobody", reader) == 404
        admin = await site.token("admin", namespace=NAMESPACE)
        for path in ("/v1/allocations", "/v1/nodes", "/v1/devices"):
            assert await status(site, path, admin) == 200
        bus = await site.token("admin", namespace=NAMESPACE, audience="hami-bus")
        for bad in ("", "forged", bus):
            assert await status(site, "/v1/allocations", bad) == 401

    async def test_scheduler_answers_through_the_registry_as_it_authorizes(
        self, site: Installed, worked: Worked
    ) -> None:
        admin = await site.token("admin", namespace=NAMESPACE)
        reader = await site.token("reader", namespace=NAMESPACE)
        for path in ("/v1/queues", "/v1/quotas"):
            assert await status(site, path, admin) == 200, path
            assert await status(site, path, reader) == 403, path
            assert await status(site, path) == 401, path
        code, text = await site.registry("/v1/session", reader)
        session = json.loads(text)
        assert code == 200
        assert (session["login"], session["sees_everything"]) == ("token", False)
        assert session["user"].endswith(":reader")
        assert await site.registry("/console/fleet") == (200, CONSOLE_INDEX.encode())

    async def test_cordon_is_written_with_the_rights_of_the_caller(
        self, site: Installed, worked: Worked
    ) -> None:
        node = site.spec.nodes[0].name
        admin = await site.token("admin", namespace=NAMESPACE)
        code, text = await site.registry(f"/v1/devices?node={node}", admin)
        assert code == 200
        device = json.loads(text)["items"][0]["uuid"]
        body = {"node": node, "device": device, "cordoned": True, "reason": "fan replaced"}
        reader = await site.token("reader", namespace=NAMESPACE)
        for token, status_ in ((reader, 403), ("", 401)):
            assert (await site.registry("/v1/cordon", token, body=body))[0] == status_
        for is_cordoned in (True, False):
            wanted = {**body, "cordoned": is_cordoned}
            code, text = await site.registry("/v1/cordon", admin, body=wanted)
            assert code == 200, text
            written = await site.client.get("nodes", node)
            annotations = written["metadata"].get("annotations", {})
            assert (device in annotations.get(DEVICE_CORDON, "")) == is_cordoned

    async def test_agents_are_asked_and_each_answers_for_its_node(
        self, site: Installed, worked: Worked
    ) -> None:
        admin = await site.token("admin", namespace=NAMESPACE)
        for path in ("/v1/usage", "/v1/checks"):
            code, text = await site.registry(path, admin)
            told = json.loads(text)
            assert code == 200
            assert {item["node"] for item in told["items"]} == {n.name for n in site.spec.nodes}
            assert not told.get("silent")

    async def test_agents_token_speaks_for_the_node_of_its_pod(self, site: Installed) -> None:
        here, there = (node.name for node in site.spec.nodes)
        await site.run_agent_pod("stolen", site.spec.nodes[0])
        bound = await agents_token(site, audience="hami-bus", of="stolen")
        async with intruder_at(
            site.bus_url.replace(BUS, HOST),
            bound,
            prefix=grants.inbox("agent", here),
            tls=site.tls_context(),
            tls_hostname=BUS,
        ) as bad:
            states = f"$KV.{subjects.STATE_BUCKET}"
            token = {node: subjects.escape(node) for node in (here, there)}
            stored = await bad.client.request(f"{states}.{token[here]}.p", b"{}", timeout=10)
            assert b'"seq"' in stored.data
            unsaid = (
                subjects.heartbeat(there),
                subjects.report(there, "nvidia"),
                f"{states}.{token[there]}.p",
                f"$KV.{subjects.ALLOC_BUCKET}.{token[here]}.p",
                subjects.ask(here, "check"),
                subjects.ask(there, "check"),
            )
            unheard = (
                f"{subjects.ASK_PREFIX}.>",
                f"{subjects.ASK_PREFIX}.{token[there]}.*",
                subjects.ask(there, "usage"),
                f"{grants.inbox('registry')}.>",
            )
            for subject in unsaid:
                await bad.client.publish(subject, b"{}")
            for subject in unheard:
                await bad.client.subscribe(subject)
            for subject in (*unsaid, *unheard):
                assert await bad.is_forbidden(subject), subject
        assert not await is_admitted(site, await agents_token(site, of="stolen"))
        assert not await is_admitted(site, await agents_token(site, audience="hami-bus"))
        await site.client.delete("pods", "stolen", AGENTS_NAMESPACE, gracePeriodSeconds="0")

        async def is_refused() -> bool:
            return not await is_admitted(site, bound)

        await site.until("the token of a pod that is gone is refused", is_refused)

    async def test_watcher_of_events_reads_them_from_the_bus_and_publishes_nothing(
        self, site: Installed, worked: Worked
    ) -> None:
        editor = await site.token("reader", namespace=NAMESPACE, audience="hami-bus")
        assert not await is_admitted(site, editor)
        stranger = await site.token("stranger", namespace=NAMESPACE, audience="hami-bus")
        assert not await is_admitted(site, stranger)
        assert not await is_admitted(site, "")
        await bind(site, "ClusterRoleBinding", "hami-integration", "stranger")

        async def let_in() -> bool:
            return await is_admitted(site, stranger)

        await site.until("the account may watch events", let_in)
        here = site.spec.nodes[0].name
        async with intruder_at(
            site.bus_url.replace(BUS, HOST),
            stranger,
            prefix=f"{grants.INBOX}.integration.{grants.consumer_of(NAMESPACE, 'stranger')}",
            tls=site.tls_context(),
            tls_hostname=BUS,
        ) as bad:
            unsaid = (
                subjects.ask(here, "check"),
                subjects.ask(here, "usage"),
                subjects.heartbeat(here),
                subjects.decision_event(NAMESPACE, "second"),
            )
            unheard = (f"{subjects.ASK_PREFIX}.>", subjects.ask(here, "check"), "hami.v1.>")
            for subject in unsaid:
                await bad.client.publish(subject, b"{}")
            for subject in unheard:
                await bad.client.subscribe(subject)
            for subject in (*unsaid, *unheard):
                assert await bad.is_forbidden(subject), subject

    async def test_operator_reads_events_and_the_pods_story(
        self, site: Installed, worked: Worked
    ) -> None:
        operator = {
            **os.environ,
            "HAMICTL_NATS": site.bus_url,
            "HAMICTL_NATS_CA": str(site.ca_file),
            "HAMICTL_NATS_SEED": str(site.operator_seed),
        }
        kinds = {event["kind"] for event in await events_of(site, operator)}
        assert kinds >= {"admission", "decision", "allocation", "state"}
        told = await site.hamictl(
            *("trace", "second", "-n", NAMESPACE, "-o", "json"),
            env={
                **operator,
                "HAMICTL_REGISTRY": f"https://{REGISTRY}:{site.ports['registry-tls']}",
                "HAMICTL_CA_FILE": str(site.ca_file),
                "HAMICTL_TOKEN": await site.token("admin", namespace=NAMESPACE),
                "KUBECONFIG": str(site.kubeconfig),
            },
        )
        story = json.loads(told.stdout)
        assert story["missing"] == []
        steps = [line["what"] for line in story["lines"]]
        assert "decision bind: placed" in steps
        assert "state running" in steps
