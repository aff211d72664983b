# SPDX-License-Identifier: Apache-2.0
"""Every loop of a service over objects from outside isolates each object, or states a reason."""

from functools import cache
from pathlib import Path

import pytest

from tests.support.loops import Loop, loops_in, loops_of

SERVICES = Path(__file__).parents[3] / "services"

EXEMPT = {
    "hami_scheduler.shell.backlog.Backlog._do": "counts the failures of items handled before",
    "hami_scheduler.shell.clustermetrics.ClusterMetrics.answer": "pieces of our own text",
    "hami_scheduler.shell.podapi.PodApi.list_unlabelled": "pages of a list: notes paths only,"
    " each pod is read, and isolated, by _listed",
    "hami_scheduler.shell.gangs.Gangs._place": "members of one gang, which is isolated as a whole",
    "hami_scheduler.shell.follower.Follower._discover": "versions of one API, all of our own text",
    "hami_scheduler.shell.preemption.Preemption._choose": "nodes for one pod, which is isolated",
    "hami_scheduler.shell.preemption.Preemption._preempt": "retries for one pod",
    "hami_scheduler.shell.preemption.Preemption._evict_all": "victims of one pod: all or none",
    "hami_scheduler.shell.bursts.Bursts._end": "pods of one device, which is isolated",
    "hami_scheduler.shell.takeover.TakeOver._book": "retries of one append",
    "hami_scheduler.shell.defrag.Defrag._hold": "places of one pod: all or none",
    "hami_scheduler.shell.defrag.Defrag._release": "places of one pod; leases end the others",
    "hami_scheduler.shell.defrag.Defrag._renew": "places of one pod; the next call renews the rest",
    "hami_registry.shell.regions.Regions._follow": "skips what does not decode",
    "hami_registry.shell.regions.Regions._held": "events that were encoded before",
    "hami_registry.shell.regions.sweep": "keys of our own; the sweep is repeated",
    "hami_registry.shell.regions.released": "skips what does not decode",
    "hami_scheduler.shell.pastevents.stored_events": "collects; Event.record, as below",
    "hami_scheduler.shell.policies.PolicyKeeper._packings": "nodes of our own table",
    "hami_scheduler.shell.policies.PolicyKeeper.follow_rollbacks": "leaves out what does not"
    " decode",
    "hami_nodeagent.shell.amounts.Advertiser._watch": "one object, the node; an unreadable one is"
    " counted and the next is read",
    "hami_nodeagent.app._use_bus": "starts one task per vendor of the settings",
    "hami_nodeagent.shell.allocate.Allocator._decide": "rounds of one decision",
    "hami_nodeagent.shell.inventory.Reporter._tell_pods": "Events, whose errors are caught",
    "hami_nodeagent.shell.sharing.SharingKeeper._record": "Events, whose errors are caught",
    "hami_nodeagent.shell.states.States._warn_of_unheld": "Events of one pod, which is isolated",
    "hami_nodeagent.shell.drahealth.HealthV1alpha1.NodeWatchResources": "lists of our own",
    "hami_registry.shell.fleet.FleetFeed._flush": "one document, packed for each namespace",
    "hami_registry.shell.fleet.FleetFeed.events": "events that were encoded before",
    "hami_registry.shell.eventtail.tail": "Event.record leaves out what does not decode",
    "hami_registry.shell.gateway._bounded": "pieces of one body",
    "hami_registry.shell.historyapi.HistoryApi._held": "events that were encoded before",
    "hami_registry.shell.historyapi.HistoryApi.timeline": "Event.record, as above",
    "hami_registry.shell.historyapi.HistoryApi._fold_usage": "Event.record, as above",
    "hami_registry.shell.historyapi.HistoryApi.workload": "Event.record, as above",
    "hami_registry.shell.meteringapi.MeteringApi._complete_since_s": "reads one time",
    "hami_registry.shell.meteringapi.MeteringApi._usage": "Event.record, as above",
    "hami_registry.shell.meteringapi.MeteringApi._read": "Event.record, as above",
    "hami_registry.shell.pastfleet.fleet_at": "collects; Event.record, as above",
    "hami_registry.shell.system.follow_admissions": "reads one header",
    "hami_scheduler.shell.pastevents.past_events": "collects; Event.record, as above",
    "hami_scheduler.shell.idleevents.StoredIdleEvents.messages": "Event.record, as above",
    "hami_scheduler.shell.idleevents.StoredIdleEvents.peaks": "collects; Event.record, as above",
    "hami_scheduler.shell.verdictreports.VerdictReports.watch": "records of our own",
    "hami_nodeagent.shell.pluginproxy.find_endpoints": "starts one task per socket of our own",
    "hami_nodeagent.shell.pluginproxy.Endpoint.list_and_watch": "passes bytes on unread",
}
"""Loops that need not isolate their items, with the reason."""


@cache
def loops() -> list[Loop]:
    found: list[Loop] = []
    for source in sorted(SERVICES.glob("*/src")):
        for path in sorted(source.rglob("*.py")):
            module = path.relative_to(source).with_suffix("").parts
            if "core" not in module:
                found += loops_of(path, ".".join(module))
    return found


def test_loops_over_objects_isolate_each_object() -> None:
    open_ = [loop for loop in loops() if not loop.isolates]
    found = {loop.place: loop.line for loop in open_ if loop.place not in EXEMPT}
    assert found == {}, "hand each object to Quarantine.run or call, or exempt the loop"


def test_exempt_loops_exist_and_do_not_isolate_their_objects() -> None:
    assert EXEMPT.keys() - {loop.place for loop in loops() if not loop.isolates} == set()


def test_the_feeds_of_the_scheduler_are_seen_and_isolate() -> None:
    places = {loop.place for loop in loops() if loop.isolates}
    feed = "hami_scheduler.shell.feed.Feed."
    names = ("records", "states", "_watch_devices", "heartbeats", "faults", "pods", "nodes")
    for name in names:
        assert any(place.startswith(feed) and name in place for place in places), name


@pytest.mark.parametrize(
    ("body", "isolating"),
    [
        ("async for item in items:\n  take(item)", 0),
        ("async for item in items:\n  await self._quarantine.run('k', item, take)", 1),
        ("async for item in items:\n  state.quarantine.call('k', item, take)", 1),
        ("async for item in items:\n  await runner.run(item)", 0),
        ("while True:\n  for item in items:\n   take(item)", 0),
        ("while True:\n  await g()\nasync def g():\n  for i in x:\n   await take(i)", 0),
        ("while True:\n  for item in items:\n   await quarantine.run('k', item, take)", 1),
        ("found = [item async for item in items]", 0),
    ],
)
def test_a_loop_that_hands_objects_on_unguarded_is_found(body: str, isolating: int) -> None:
    source = "async def f():\n" + "\n".join(f" {line}" for line in body.splitlines())
    assert [loop.isolates for loop in loops_in(source, "m")] == [bool(isolating)]


@pytest.mark.parametrize(
    "body",
    ["for item in items:\n  take(item)", "while x < 3:\n  for item in items:\n   await take(item)"],
)
def test_loops_that_end_are_none_of_a_service(body: str) -> None:
    source = "async def f():\n" + "\n".join(f" {line}" for line in body.splitlines())
    assert loops_in(source, "m") == []
