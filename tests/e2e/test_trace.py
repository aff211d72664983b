# SPDX-License-Identifier: Apache-2.0
"""One trace per pod, from admission to the running container, and the events that go with it."""

import json
from collections.abc import AsyncIterator
from collections.abc import Set as AbstractSet
from typing import Any

import anyio
import nats.js.errors
import pytest
from jsonschema import Draft202012Validator, FormatChecker

from hami_common.bus import subjects
from hami_common.events.catalog import FAMILIES, family_of
from hami_common.pods import annotations
from hami_common.pods.podview import PodView
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hami_sim.ports import free_port
from tests.e2e.conftest import small_pod
from tests.support.otlp import Collector, Span, run_collector
from tools import gen_events

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.shares_cluster]

NODES = ("gpu-a", "gpu-b")
"""Two: kube-scheduler asks for no scores where only one node is left."""


PORT = free_port()


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two nodes; every service is configured with a collector that may or may not run."""
    endpoint = {"otlp_endpoint": f"http://127.0.0.1:{PORT}"}
    spec = ClusterSpec(
        nodes=tuple(NodeSpec(name=name, profile="2xA30") for name in NODES),
        backoff_s=0.2,
        dra=True,
        settings={
            "webhook": endpoint,
            "scheduler": endpoint,
            "registry": endpoint,
            "nodeagent": {**endpoint, "usage.event_s": "0.5", "usage.look_s": "0.3"},
        },
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("trace")) as running:
        yield running


async def ran(cluster: Cluster, name: str, mode: str = "device-plugin") -> tuple[PodView, str]:
    """Run a pod until it is reported as running; return the pod and its trace."""
    document = small_pod(name)
    document["metadata"]["annotations"] = {annotations.ALLOCATION_MODE: mode}
    await cluster.create_pod(document)

    async def runs() -> bool:
        if not await cluster.pod_is(name, "Running"):
            return False
        pod = await cluster.pod(name)
        states = await cluster.states_of(pod.spec.node_name, pod.metadata.uid)
        return "running" in [state.state for state in states]

    await cluster.until(f"{name} runs", runs)
    pod = await cluster.pod(name)
    return pod, pod.annotations()[annotations.TRACEPARENT].split("-")[1]


SPANS = {
    "admission",
    "filter",
    "prioritize",
    "bind",
    "reserve",
    "commit",
    "bound",
    "allocate",
    "prepared",
    "running",
}


async def spans_of(
    collector: Collector, trace: str, wanted: AbstractSet[str] = SPANS, *, limit_s: float = 30
) -> dict[str, Span]:
    """Return the spans of a pod's trace by name, once all expected ones are there."""

    missing = wanted
    with anyio.move_on_after(limit_s):
        while missing:
            await anyio.sleep(0.05)
            missing = wanted - {span.name for span in collector.of_trace(trace)}
    assert not missing
    spans = collector.of_trace(trace)
    assert len({span.id for span in spans}) == len(spans)
    # The API server may ask twice about a pod: the first answer began the trace.
    return {span.name: span for span in sorted(spans, key=lambda span: -span.begin_ns)}


async def test_a_pods_trace_is_one_tree_across_all_services(cluster: Cluster) -> None:
    async with run_collector(PORT) as collector:
        pod, trace = await ran(cluster, "traced")
        spans = await spans_of(collector, trace)
    parents = {
        name: next((other.name for other in spans.values() if other.id == span.parent), "")
        for name, span in spans.items()
        if name in SPANS
    }
    # Scheduler and agent both write that a pod is bound; the first one counts.
    assert (spans["bound"].service, parents.pop("bound")) in (
        ("hami-scheduler", "admission"),
        ("hami-nodeagent", "reserve"),
    )
    assert parents == {
        "admission": "",
        "filter": "admission",
        "prioritize": "admission",
        "bind": "admission",
        "reserve": "bind",
        "commit": "bind",
        "allocate": "reserve",
        "prepared": "reserve",
        "running": "reserve",
    }
    assert {name: (spans[name].service, spans[name].kind) for name in parents} == {
        "admission": ("hami-webhook", "server"),
        "filter": ("hami-scheduler", "server"),
        "prioritize": ("hami-scheduler", "server"),
        "bind": ("hami-scheduler", "server"),
        "reserve": ("hami-scheduler", "producer"),
        "commit": ("hami-scheduler", "client"),
        "allocate": ("hami-nodeagent", "server"),
        "prepared": ("hami-nodeagent", "producer"),
        "running": ("hami-nodeagent", "producer"),
    }
    assert [span for span in spans.values() if span.problem] == []
    for child, parent in ((spans[name], spans[above]) for name, above in parents.items() if above):
        assert child.begin_ns >= parent.begin_ns
        assert child.end_ns >= child.begin_ns
    node = pod.spec.node_name
    record = (await cluster.ledger_of(node, pod.metadata.uid))[0][1]
    (share,) = record.containers[0].shares
    filtered, bound, given = (spans[name].attributes for name in ("filter", "bind", "allocate"))
    assert (filtered["hami.verdict"], filtered["hami.nodes.feasible"]) == ("feasible", 2)
    assert spans["prioritize"].attributes["hami.nodes.best"][0].startswith(f"{node}=")
    assert (bound["hami.outcome"], bound["k8s.node.name"]) == ("bound", node)
    assert bound["hami.allocation.id"] == given["hami.allocation.id"] == record.allocation_id
    assert bound["hami.shares"] == [f"main: {share.uuid} 1000 MiB 0 %"]
    assert given["hami.shares"] == f"{share.uuid} 1000 MiB 0 %"
    assert given["k8s.container.name"] == "main"
    assert {spans[name].attributes.get("k8s.pod.name") for name in ("filter", "allocate")} == {
        "traced"
    }


async def test_trace_of_a_pod_runs_through_its_claim(cluster: Cluster) -> None:
    async with run_collector(PORT) as collector:
        pod, trace = await ran(cluster, "claimed", "dra")
        wanted = (SPANS - {"allocate"}) | {"claim", "prepare"}
        spans = await spans_of(collector, trace, wanted)
    ids = {span.id: span.name for span in collector.of_trace(trace)}
    parents = {name: ids.get(spans[name].parent, "") for name in ("claim", "commit", "prepare")}
    assert parents == {"claim": "bind", "commit": "bind", "prepare": "reserve"}
    assert (spans["prepare"].service, spans["prepare"].kind) == ("hami-nodeagent", "server")
    claim = pod.spec.resource_claims[0].resource_claim_name if pod.spec.resource_claims else ""
    for name in ("claim", "prepare"):
        assert spans[name].attributes["hami.claim"] == claim
    assert spans["prepare"].attributes["k8s.pod.name"] == "claimed"
    assert [span for span in spans.values() if span.problem] == []


async def test_trace_of_a_claim_that_a_user_wrote_begins_with_its_annotation(
    cluster: Cluster,
) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    claims = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
    capacity = {"requests": {"memory": "500Mi"}}
    exactly = {"deviceClassName": "hami-share", "capacity": capacity}
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": "written",
            "annotations": {annotations.TRACEPARENT: f"00-{trace}-00f067aa0ba902b7-01"},
        },
        "spec": {"devices": {"requests": [{"name": "main", "exactly": exactly}]}},
    }
    pod = small_pod("user")
    container = pod["spec"]["containers"][0]
    container["resources"] = {"claims": [{"name": "gpu", "request": "main"}]}
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "written"}]
    async with run_collector(PORT) as collector:
        await cluster.request("POST", claims, document)
        await cluster.create_pod(pod)
        spans = await spans_of(collector, trace, {"reserve", "prepare", "prepared"})
    assert spans["prepare"].parent == spans["prepared"].parent == spans["reserve"].id
    assert spans["prepare"].attributes["hami.claim"] == "written"


async def test_refusal_is_an_attribute_with_its_reason(cluster: Cluster) -> None:
    async with run_collector(PORT) as collector:
        await cluster.create_pod(small_pod("too-large", memory_mib=900_000))

        def refusals() -> list[str]:
            return [
                text
                for span in collector.spans
                if span.name == "filter" and span.attributes["k8s.pod.name"] == "too-large"
                for text in span.attributes["hami.refusals"]
            ]

        async def told() -> bool:
            return bool(refusals())

        await cluster.until("the refusal is told", told)
    await cluster.delete_pod("too-large")
    assert refusals()[0].startswith("CardInsufficientMemory=2: ")
    assert "900000 MiB" in refusals()[0]


async def test_nothing_is_lost_while_the_collector_is_unavailable(cluster: Cluster) -> None:
    async with anyio.create_task_group() as group:
        traces: list[str] = []

        async def run(name: str) -> None:
            traces.append((await ran(cluster, name))[1])

        for number in range(4):
            group.start_soon(run, f"unseen-{number}")
    async with run_collector(PORT) as collector:
        for trace in traces:
            await spans_of(collector, trace, limit_s=60)
    for service in ("webhook", "scheduler", "agent-gpu-a"):
        async with cluster.session.get(f"{cluster.url(service)}/metrics") as response:
            metrics = await response.text()
        lost = [line for line in metrics.splitlines() if line.startswith("hami_spans_lost_total")]
        assert lost
        assert {line.split()[-1] for line in lost} == {"0.0"}, service


async def events_of(cluster: Cluster) -> list[Any]:
    stream = cluster.bus.jetstream()
    found: list[Any] = []
    sequence = 1
    while True:
        try:
            message = await stream.get_msg(
                subjects.EVENTS_STREAM, seq=sequence, subject=">", next=True
            )
        except nats.js.errors.NotFoundError:
            return found
        found.append(message)
        sequence = (message.seq or 0) + 1


async def test_every_event_is_what_the_documents_say(cluster: Cluster) -> None:
    await ran(cluster, "deleted")
    await cluster.delete_pod("deleted")
    seen: set[str] = set()

    async def all_there() -> bool:
        events = await events_of(cluster)
        seen.update(event.headers["ce-type"] for event in events)
        return seen >= {
            "io.hami.admission.decided.v1",
            "io.hami.allocation.reserve.v1",
            "io.hami.allocation.release.v1",
            "io.hami.state.bound.v1",
            "io.hami.state.prepared.v1",
            "io.hami.state.running.v1",
            "io.hami.decision.bind.v1",
            "io.hami.device.changed.v1",
            "io.hami.usage.sampled.v1",
        }

    await cluster.until("events of all kinds", all_there)
    ids: set[tuple[str, str]] = set()
    with_trace: set[str] = set()
    events = await events_of(cluster)
    for event in events:
        family = family_of(event.subject)
        headers = dict(event.headers)
        schema = gen_events.headers_schema(family)
        Draft202012Validator(schema, format_checker=FormatChecker()).validate(headers)
        Draft202012Validator(gen_events.payload_schema(family)).validate(json.loads(event.data))
        assert headers["ce-source"].split("/")[1] in family.producer
        ids.add((headers["ce-source"], headers["ce-id"]))
        if "traceparent" in headers:
            with_trace.add(family.word)
    assert len(ids) == len(events)
    assert with_trace >= {"admission", "allocation", "state", "decision"}
    assert {family.word for family in FAMILIES} > with_trace
