# SPDX-License-Identifier: Apache-2.0
"""One object never ends the scheduler: an object that fails is isolated, all others are served."""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import anyio
import pytest
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.inventory import DeviceFault, NodeDevices
from hami_common.model.device import Link
from hami_common.pods import annotations
from hami_common.runtime.httpd import Request
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.podfacts import PodReader
from hami_core.ledger.stimuli import Accepted, NodeRead, RecordSeen, StateSeen, Tick
from hami_core.placement.verdicts import Verdicts
from hami_core.quota.resourcequota import QuotaReader
from hami_core.replay.stimuluslog import Writer
from hami_core.table.inventory import Inventory
from hami_core.table.table import DeviceTable
from hami_scheduler.shell import gangs
from hami_scheduler.shell.background import BackgroundTasks
from hami_scheduler.shell.clustermetrics import ClusterMetrics
from hami_scheduler.shell.decisions import Decisions
from hami_scheduler.shell.ledgerwriter import LedgerWriter
from hami_scheduler.shell.mirror import HamiMirrors
from hami_scheduler.shell.preemption import Preemption
from hami_scheduler.shell.recorder import RecordedCore
from hami_scheduler.shell.takeover import TakeOver
from tests.support.memorybus import MemoryBucket
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import Running, World, pod_path, quiet

pytestmark = pytest.mark.anyio

NODES = ["n1", "n2"]
DEVICES = {node: builders.devices(node, count=2) for node in NODES}
BAD = "uid-bad"
RECONCILE_S = 300.0


async def world_with_nodes() -> World:
    world = World()
    for devices in DEVICES.values():
        await world.add_devices(devices)
    return world


async def ask(world: World, s: Running, pod: builders.Obj) -> builders.Obj:
    """filter's answer, after the work that it caused was done."""
    path = pod_path(pod)
    if path not in world.kube.objects:
        world.add_pod(pod)
        await quiet()
    answer: builders.Obj = await s.filter(pod, NODES)
    await quiet()
    return answer


async def require_served(world: World, s: Running, *, name: str = "good", node: str = "n1") -> None:
    """Another pod is filtered, prioritized and bound."""
    pod = builders.pod(name)
    answer = await ask(world, s, pod)
    assert node in (answer["NodeNames"] or []), answer
    assert await s.prioritize(pod, NODES)
    assert await s.bind(pod, node) == ""
    await quiet()
    assert world.bound()[name] == node


def events_of(world: World, uid: str) -> list[builders.Obj]:
    return [
        event
        for event in world.kube.events
        if event["reason"] == "ObjectQuarantined" and event["involvedObject"].get("uid") == uid
    ]


def failures(s: Running, kind: str) -> float:
    return s.value("hami_quarantine_failures_total", kind=kind)


# --- known cases: weights, reports ----------------------------------------------------------------


WEIGHTS = {
    "too many digits for int": f"slot={'9' * 5000},core=1,memory=1",
    "too many digits for float": f"slot={'9' * 400},core=1,memory=1",
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
async def test_one_annotation_of_a_pod_never_ends_the_scheduler(weights: str) -> None:
    world = await world_with_nodes()
    async with world.scheduler(preemption=True) as s:
        pod = builders.pod("bad", mem_mib=900_000)
        await ask(world, s, pod)
        world.kube.change(
            pod_path(pod), metadata={"annotations": {annotations.SCORING_WEIGHTS: weights}}
        )
        await quiet()
        bad = world.kube.pod("bad")
        answer = await s.filter(bad, NODES)
        assert not answer["NodeNames"]
        assert answer["Error"] or answer["FailedNodes"] or answer["FailedAndUnresolvableNodes"]
        await s.prioritize(bad, NODES)
        assert await s.bind(bad, "n1")
        await require_served(world, s)
    async with world.scheduler("restarted") as s:
        await require_served(world, s, name="after")


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
async def test_a_gang_with_endless_weights_never_ends_the_scheduler(weights: str) -> None:
    world = await world_with_nodes()
    told = {"hami.io/gang": "g", "hami.io/gang-size": "2", annotations.SCORING_WEIGHTS: weights}
    async with world.scheduler(gang_wait_s=60.0) as s:
        for number in range(2):
            answer = await ask(world, s, builders.pod(f"g-{number}", annotated=told))
            assert not answer["NodeNames"], answer
        await require_served(world, s)
        sound = {"hami.io/gang": "h", "hami.io/gang-size": "2"}
        await ask(world, s, builders.pod("h-0", annotated=sound))
        answer = await ask(world, s, builders.pod("h-1", annotated=sound))
        assert answer["NodeNames"], "another gang is placed"
    assert [record for record in world.live() if record.pod.startswith("g-")] == []


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
async def test_a_preemptor_with_endless_weights_never_ends_the_scheduler(weights: str) -> None:
    world = await world_with_nodes()
    async with world.scheduler(preemption=True) as s:
        for number, node in enumerate(NODES):
            for device in range(2):
                low = builders.pod(f"low-{number}-{device}", mem_mib=15_000)
                low["spec"]["priority"] = 0
                world.add_pod(low)
                await quiet()
                assert await s.bind(low, node) == ""
        high = builders.pod("high", mem_mib=9000, annotated={annotations.SCORING_WEIGHTS: weights})
        high["spec"]["priority"] = 100
        answer = await ask(world, s, high)
        assert not answer["NodeNames"]
        await world.advance(30, *NODES)
        small = builders.pod("small", mem_mib=500)
        assert (await ask(world, s, small))["NodeNames"] == NODES
        assert await s.bind(small, "n1") == ""


def broken(devices: NodeDevices, **changes: Any) -> NodeDevices:
    first, *others = devices.devices
    return replace(devices, seq=devices.seq + 1, devices=(replace(first, **changes), *others))


REPORTS: dict[str, Callable[[NodeDevices], NodeDevices]] = {
    "index 2^31": lambda it: broken(it, index=2**31),
    "index 10^20": lambda it: broken(it, index=10**20),
    "numa": lambda it: broken(it, numa=2**40),
    "memory": lambda it: broken(it, memory_mib=2**63),
    "capacity": lambda it: broken(it, capacity_mib=2**62),
    "compute": lambda it: broken(it, capacity_core_pct=2**31),
    "slots": lambda it: broken(it, slots=10**30),
    "link": lambda it: replace(
        it,
        links=(Link(a=it.devices[0].uuid, b=it.devices[1].uuid, score=2**70),),
    ),
}


@pytest.mark.parametrize("change", REPORTS.values(), ids=REPORTS)
async def test_one_report_never_ends_the_scheduler(
    change: Callable[[NodeDevices], NodeDevices],
) -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        held = builders.pod("held")
        world.add_pod(held)
        await quiet()
        assert await s.bind(held, "n2") == ""
        await world.add_devices(change(DEVICES["n2"]))
        await quiet()
        answer = await ask(world, s, builders.pod("probe"))
        assert answer["NodeNames"] == ["n1"]
        assert "NodeWithheld" in answer["FailedNodes"].get("n2", "NodeWithheld")
        assert "NodeWithheld" in await s.bind(world.kube.pod("probe"), "n2")
        await require_served(world, s)
        s.state.ledger.check()
    async with world.scheduler("restarted") as s:
        await require_served(world, s, name="after-restart")
        await world.add_devices(replace(DEVICES["n2"], seq=9))
        await quiet()
        await require_served(world, s, name="repaired", node="n2")
        s.state.ledger.check()
    world.check(*DEVICES.values())


async def test_undecodable_devices_are_not_served_until_replaced() -> None:
    world = await world_with_nodes()
    bucket = MemoryBucket(world.bus, subjects.DEVICES_BUCKET)
    async with world.scheduler() as s:
        await bucket.append("n2.nvidia", b'{"node": 7}')
        await quiet()
        probe = builders.pod("probe")
        assert (await ask(world, s, probe))["NodeNames"] == ["n1"]
    async with world.scheduler("restarted") as s:
        assert (await ask(world, s, probe))["NodeNames"] == ["n1"]
        await require_served(world, s)
        await world.add_devices(replace(DEVICES["n2"], seq=9))
        await quiet()
        assert (await ask(world, s, probe))["NodeNames"] == NODES


async def test_an_unreadable_vendor_does_not_hide_the_others_of_its_node() -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        other = replace(
            DEVICES["n1"],
            vendor="hygon",
            devices=(replace(DEVICES["n1"].devices[0], uuid="DCU-1", vendor="hygon", index=2**31),),
        )
        await world.add_devices(other)
        await quiet()
        await require_served(world, s)


# --- any exception, anywhere ----------------------------------------------------------------------


class Injected(RuntimeError):
    pass


class Case(NamedTuple):
    """One handler that fails for one object."""

    kind: str
    """Kind in the quarantine."""
    owner: Any
    method: str
    concerns: Callable[..., bool]
    """Match calls about the object; receives all arguments but ``self``."""
    provoke: Callable[[World, Running], Awaitable[None]]
    settings: Mapping[str, Any] = MappingProxyType({})


def inject(monkeypatch: pytest.MonkeyPatch, case: Case) -> Callable[[], None]:
    """Let the handler fail for the object; the returned function ends that."""
    original = getattr(case.owner, case.method)
    is_on = True

    def failing(*args: Any, **kwargs: Any) -> Any:
        own = args[1:] if isinstance(case.owner, type) else args
        if is_on and case.concerns(*own, **kwargs):
            raise Injected(case.method)
        return original(*args, **kwargs)

    monkeypatch.setattr(case.owner, case.method, failing)

    def stop() -> None:
        nonlocal is_on
        is_on = False

    return stop


def about_bad(*args: Any, **kwargs: Any) -> bool:
    return "bad" in repr((args, kwargs))


async def add_bad_pod(world: World, s: Running, **more: Any) -> None:
    world.add_pod(builders.pod("bad", **more))
    await quiet()


async def bind_bad_pod(world: World, s: Running) -> None:
    await add_bad_pod(world, s)
    await s.bind(world.kube.pod("bad"), "n2")
    await quiet()


async def filter_bad_pod(world: World, s: Running) -> None:
    await add_bad_pod(world, s)
    answer = await s.filter(world.kube.pod("bad"), NODES)
    assert "PodQuarantined" in answer["Error"]


async def prioritize_bad_pod(world: World, s: Running) -> None:
    await add_bad_pod(world, s)
    await s.prioritize(world.kube.pod("bad"), NODES)


async def refuse_bind_of_bad_pod(world: World, s: Running) -> None:
    await add_bad_pod(world, s)
    assert "PodQuarantined" in await s.bind(world.kube.pod("bad"), "n2")


async def preempt_for_bad_pod(world: World, s: Running) -> None:
    await add_bad_pod(world, s)
    body = {"Pod": world.kube.pod("bad"), "NodeNameToMetaVictims": {"n2": {"Pods": []}}}
    answer = await s.call("preempt", json.dumps(body).encode())
    assert not answer["NodeNameToMetaVictims"]


async def write_record(world: World, s: Running) -> None:
    await world.record(
        AllocationRecord(
            op="reserve",
            allocation_id="bad",
            node="n2",
            pod_uid=BAD,
            namespace="default",
            pod="bad",
        )
    )
    await quiet()


async def write_state(world: World, s: Running) -> None:
    await world.report_state(
        StateRecord(
            state="running",
            allocation_id="bad",
            node="n2",
            pod_uid=BAD,
            namespace="default",
            pod="bad",
            ledger_seq=1,
        )
    )
    await quiet()


async def report_devices(world: World, s: Running) -> None:
    await world.add_devices(builders.devices("bad"))
    await quiet()


async def beat(world: World, s: Running) -> None:
    await world.heartbeat("bad", "n1", "n2")


async def report_fault(world: World, s: Running) -> None:
    await world.fault(
        DeviceFault(
            node="bad",
            vendor="nvidia",
            uuid="GPU-bad",
            boot_id="b",
            seq=2,
            healthy=False,
            reason="x",
            time_s=0.0,
        )
    )


async def add_node(world: World, s: Running) -> None:
    world.kube.put("/api/v1/nodes/bad", {"metadata": {"name": "bad", "labels": {"zone": "a"}}})
    await quiet()


async def add_quota(world: World, s: Running) -> None:
    world.kube.put(
        "/api/v1/namespaces/bad/resourcequotas/bad",
        {"metadata": {"name": "bad", "namespace": "bad"}, "spec": {"hard": {}}},
    )
    await quiet()


async def pass_time(world: World, s: Running) -> None:
    await world.advance(RECONCILE_S, *NODES)


async def place_gang(world: World, s: Running) -> None:
    told = {"hami.io/gang": "bad", "hami.io/gang-size": "2"}
    for number in range(2):
        await ask(world, s, builders.pod(f"bad-{number}", annotated=told))


async def preempt(world: World, s: Running) -> None:
    low = world.add_pod(builders.pod("low", mem_mib=100))
    await quiet()
    assert await s.bind(low, "n2") == ""
    bad = builders.pod("bad", mem_mib=900_000)
    bad["spec"]["priority"] = 100
    await ask(world, s, bad)
    await world.advance(14, *NODES)


async def scrape(world: World, s: Running) -> None:
    handler = s.scheduler.cluster_metrics.routes()["GET", "/metrics"]
    request = Request(method="GET", path="/metrics", query={}, headers={}, body=b"", params={})
    answer = await handler(request)
    assert b"GPU-n1-0" in answer.body  # type: ignore[union-attr]  # no stream


async def decide_and_send(world: World, s: Running) -> None:
    await bind_bad_pod(world, s)
    await world.advance(14, *NODES)


CASES = {
    "ledger record": Case(
        "record",
        Ledger,
        "handle",
        lambda it: isinstance(it, RecordSeen | NodeRead) and about_bad(it),
        write_record,
    ),
    "own append": Case(
        "call",
        Ledger,
        "handle",
        lambda it: isinstance(it, RecordSeen | Accepted) and about_bad(it),
        bind_bad_pod,
    ),
    "state record": Case(
        "state",
        Ledger,
        "handle",
        lambda it: isinstance(it, StateSeen) and about_bad(it),
        write_state,
    ),
    "lease": Case("tick", Ledger, "handle", lambda it: isinstance(it, Tick), pass_time),
    "devices": Case("devices", Inventory, "put", about_bad, report_devices),
    "devices in the table": Case("devices", DeviceTable, "upsert_node", about_bad, report_devices),
    "heartbeat": Case("heartbeat", Inventory, "hear", about_bad, beat),
    "silence": Case("tick", Inventory, "tick", lambda **_: True, pass_time),
    "fault": Case("fault", Inventory, "take_fault", about_bad, report_fault),
    "pod": Case(
        "pod",
        PodReader,
        "facts_of",
        lambda pod, **_: pod.metadata.uid == BAD,
        add_bad_pod,
    ),
    "node": Case(
        "node",
        DeviceTable,
        "set_domain",
        about_bad,
        add_node,
        {"topology_labels": ("zone",)},
    ),
    "quota": Case("quota", QuotaReader, "read", about_bad, add_quota),
    "chore": Case(
        "chore",
        BackgroundTasks,
        "_attempt",
        lambda it: "CapacityReturned" in repr(it),
        report_devices,
    ),
    "confirmation": Case("confirmation", LedgerWriter, "_confirmation", about_bad, bind_bad_pod),
    "decision": Case("decision", Decisions, "_message", about_bad, decide_and_send),
    "gang": Case(
        "gang", gangs, "place_together", lambda *_, **__: True, place_gang, {"gang_wait_s": 60.0}
    ),
    "preemption": Case(
        "preemption", Preemption, "_choose", about_bad, preempt, {"preemption": True}
    ),
    "take-over": Case(
        "takeover", TakeOver, "_pods", lambda node: node == "n2", pass_time, {"take_over": True}
    ),
    "mirror": Case(
        "mirror",
        HamiMirrors,
        "_mirror_node",
        lambda node: node == "n2",
        pass_time,
        {"mirror_nodes": True},
    ),
    "metrics": Case("metrics", ClusterMetrics, "_add_node", lambda node, _: node == "n2", scrape),
    "filter": Case(
        "call", Verdicts, "filter", lambda request, _: request.uid == BAD, filter_bad_pod
    ),
    "prioritize": Case(
        "call",
        Verdicts,
        "prioritize",
        lambda request, *_, **__: request.uid == BAD,
        prioritize_bad_pod,
    ),
    "bind": Case(
        "call",
        Ledger,
        "plan_bind",
        lambda request, *_, **__: request.uid == BAD,
        refuse_bind_of_bad_pod,
    ),
    "preempt": Case(
        "call", Preemption, "complete", lambda pod, *_: pod.metadata.uid == BAD, preempt_for_bad_pod
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_an_error_of_one_object_leaves_all_others_served(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = await world_with_nodes()
    async with world.scheduler(**case.settings) as s:
        stop = inject(monkeypatch, case)
        with caplog.at_level(logging.ERROR):
            await case.provoke(world, s)
        assert failures(s, case.kind) >= 1
        quarantined = [r for r in caplog.records if r.message == "object quarantined"]
        assert quarantined, "a log line names it"
        if case.kind != "tick":
            await require_served(world, s)
        stop()
        await require_served(world, s, name="later")
        await world.advance(2 * RECONCILE_S, *NODES)
        s.state.ledger.check()


async def test_a_pod_that_cannot_be_handled_gets_an_event_and_is_handled_once_it_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        stop = inject(monkeypatch, CASES["pod"])
        await add_bad_pod(world, s)
        await world.advance(7, *NODES)
        (event,) = events_of(world, BAD)
        assert event["type"] == "Warning"
        assert "Injected" in event["message"]
        assert s.value("hami_quarantined_objects", kind="pod") == 1
        stop()
        await world.advance(70, *NODES)
        assert s.value("hami_quarantined_objects", kind="pod") == 0
        assert s.state.pods.get(BAD) is not None
        assert len(events_of(world, BAD)) == 1, "writes are bounded"


async def test_a_deleted_pod_leaves_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        inject(monkeypatch, CASES["pod"])
        await add_bad_pod(world, s)
        assert s.value("hami_quarantined_objects", kind="pod") == 1
        world.kube.remove(pod_path(builders.pod("bad")))
        await quiet()
        assert s.value("hami_quarantined_objects", kind="pod") == 0


# --- fail closed ----------------------------------------------------------------------------------


async def test_a_node_with_an_undecodable_record_takes_no_pods_until_it_is_repaired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        stop = inject(monkeypatch, CASES["ledger record"])
        await write_record(world, s)
        answer = await ask(world, s, builders.pod("probe"))
        assert answer["NodeNames"] == ["n1"]
        probe = world.kube.pod("probe")
        assert "NodeWithheld" in await s.bind(probe, "n2")
        await world.advance(7, *NODES)
        assert s.value("hami_scheduler_withheld_nodes") == 1
        stop()
        await world.advance(70, *NODES)
        assert (await ask(world, s, probe))["NodeNames"] == NODES
        assert await s.bind(probe, "n2") == ""


async def test_a_record_that_an_operator_removed_withholds_its_node_no_longer() -> None:
    world = await world_with_nodes()
    bucket = MemoryBucket(world.bus, subjects.ALLOC_BUCKET)
    await bucket.append("n2.gone", b"{")
    await bucket.append("n2.newer", b"{")
    async with world.scheduler() as s:
        probe = builders.pod("probe")
        assert (await ask(world, s, probe))["NodeNames"] == ["n1"]
        for key in ("n2.gone", "n2.newer"):
            world.bus.stream(subjects.ALLOC_BUCKET).drop(key)
        await world.advance(70, *NODES)
        assert (await ask(world, s, probe))["NodeNames"] == NODES


async def test_half_a_change_of_the_ledger_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        pod = world.add_pod(builders.pod("bad"))
        await quiet()
        assert await s.bind(pod, "n2") == ""
        (record,) = world.live()
        case = Case("record", DeviceTable, "book", about_changed, write_record)
        stop = inject(monkeypatch, case)
        changed = tuple(
            replace(c, shares=tuple(replace(share, memory_mib=4321) for share in c.shares))
            for c in record.containers
        )
        await world.record(replace(record, op="resize", containers=changed))
        await quiet()
        s.state.ledger.check()
        assert [held.record.op for held in s.state.ledger.holdings()] == ["reserve"]
        stop()
        await world.advance(70, *NODES)
        s.state.ledger.check()
        assert [held.record.op for held in s.state.ledger.holdings()] == ["resize"]


def about_changed(node: str, containers: Any) -> bool:
    return "4321" in repr(tuple(containers))


async def test_a_pod_that_cannot_be_read_keeps_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        pod = world.add_pod(builders.pod("bad"))
        await quiet()
        assert await s.bind(pod, "n2") == ""
        inject(monkeypatch, CASES["pod"])
        world.kube.change(pod_path(pod), metadata={"annotations": {"x": "y"}})
        await quiet()
        world.kube.list_again()
        await quiet()
        await world.advance(2 * RECONCILE_S, *NODES)
        assert [record.pod for record in world.live()] == ["bad"]
        await require_served(world, s)
    async with world.scheduler("restarted") as s:
        await world.advance(2 * RECONCILE_S, *NODES)
        assert "bad" in {record.pod for record in world.live()}


async def test_a_share_that_cannot_be_restored_withholds_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = await world_with_nodes()
    async with world.scheduler("before") as s:
        for name, node in (("bad", "n2"), ("other", "n1")):
            pod = world.add_pod(builders.pod(name, mem_mib=15_000))
            await quiet()
            assert await s.bind(pod, node) == ""
        await s.scheduler.drain(limit_s=1)
    world.bus.wipe()
    for devices in DEVICES.values():
        await world.add_devices(devices)
    stop = inject(monkeypatch, CASES["pod"])
    async with world.scheduler("rebuilds") as s:
        assert {record.pod for record in world.live()} == {"other"}
        probe = builders.pod("probe", mem_mib=15_000)
        assert (await ask(world, s, probe))["NodeNames"] == ["n1"]
        stop()
        await world.advance(2 * RECONCILE_S, *NODES)
        assert {record.pod for record in world.live()} == {"bad", "other"}
        assert set((await ask(world, s, probe))["NodeNames"]) == set(NODES)
    world.check(*DEVICES.values())


# --- loops ----------------------------------------------------------------------------------------


async def test_a_source_that_breaks_with_any_error_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = await world_with_nodes()
    opened: list[str] = []
    original = MemoryBucket.watch

    @asynccontextmanager
    async def breaking(bucket: MemoryBucket, key_filter: str = ">") -> AsyncIterator[Any]:
        opened.append(bucket.name)
        async with original(bucket, key_filter) as items:
            if opened.count(bucket.name) > 1:
                yield items
                return

            async def some() -> AsyncIterator[Any]:
                async for item in items:
                    yield item
                    raise Injected("source")

            yield some()

    monkeypatch.setattr(MemoryBucket, "watch", breaking)
    async with world.scheduler(wait=False) as s:
        with anyio.fail_after(30):
            while not s.state.is_complete:
                await world.advance(7, *NODES)
        assert opened.count(subjects.DEVICES_BUCKET) == 2
        await world.agents_beat()
        await require_served(world, s)


async def test_a_stimulus_that_cannot_be_written_does_not_end_the_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = await world_with_nodes()
    async with world.scheduler(stimulus_log_dir=str(tmp_path / "log")) as s:
        case = Case("stimulus", Writer, "stimulus", lambda _, it, *__: about_bad(it), beat)
        inject(monkeypatch, case)
        await world.heartbeat("bad", "n1")
        assert isinstance(s.scheduler.state.core, RecordedCore)
        await s.scheduler.state.core.recorder.flush()
        assert failures(s, "stimulus") >= 1
        await require_served(world, s)


# --- pods past admission --------------------------------------------------------------------------


def without_label(pod: builders.Obj) -> None:
    del pod["metadata"]["labels"][annotations.MANAGED_LABEL]


def without_volume(pod: builders.Obj) -> None:
    pod["spec"]["volumes"] = []


def without_mount(pod: builders.Obj) -> None:
    pod["spec"]["containers"][0]["volumeMounts"] = []


@pytest.mark.parametrize("change", [without_label, without_volume, without_mount])
async def test_a_pod_that_admission_never_saw_is_refused(
    change: Callable[[builders.Obj], None],
) -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        pod = builders.pod("past")
        change(pod)
        world.add_pod(pod)
        await quiet()
        answer = await s.filter(pod, NODES)
        assert answer["NodeNames"] == []
        (text,) = set(answer["FailedAndUnresolvableNodes"].values())
        assert text.startswith("PodNotAdmitted: ")
        assert "create the pod again" in text
        assert "PodNotAdmitted" in await s.bind(pod, "n1")
        await require_served(world, s)
    assert "past" not in world.bound()


async def test_a_share_whose_pod_lost_its_label_is_not_reassigned_after_a_wipe() -> None:
    world = await world_with_nodes()
    async with world.scheduler("before") as s:
        pod = world.add_pod(builders.pod("bad", mem_mib=15_000))
        await quiet()
        assert await s.bind(pod, "n1") == ""
        await s.scheduler.drain(limit_s=1)
    bound = world.kube.pod("bad")
    del bound["metadata"]["labels"][annotations.MANAGED_LABEL]
    world.kube.put(pod_path(bound), bound)
    world.bus.wipe()
    for devices in DEVICES.values():
        await world.add_devices(replace(devices, devices=devices.devices[:1]))
    async with world.scheduler("rebuilds") as s:
        probe = builders.pod("probe", mem_mib=15_000)
        assert (await ask(world, s, probe))["NodeNames"] == ["n2"], "n1 is given twice"
        assert [record.pod for record in world.live()] == ["bad"]
        await world.advance(7, *NODES)
        labels = world.kube.pod("bad")["metadata"]["labels"]
        assert labels[annotations.MANAGED_LABEL] == "true", "our watch shows when it ends"
