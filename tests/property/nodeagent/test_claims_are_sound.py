# SPDX-License-Identifier: Apache-2.0
"""Laws of a decision on any view, however contradictory: it never raises, and its result equals the
ledger's record of that very container.
"""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_common.model.request import ContainerKind
from hami_nodeagent.core.claims import (
    Claim,
    Confirmed,
    Entry,
    ListedPod,
    Refuse,
    Request,
    View,
    Wait,
    decide,
    decide_all,
    grant_of,
)
from hami_nodeagent.core.grants import Grant
from tests.unit.nodeagent.core.builders import GPU, KUBELET, NPU, Container, Given, view

IDS = st.sampled_from(["a", "b", "c", "d"])
NAMES = ["db-0", "web"]
CONTAINERS = ["one", "two", "three"]
KINDS: tuple[tuple[ContainerKind, ...], ...] = (
    ("app",),
    ("init", "app"),
    ("init", "sidecar", "app"),
    ("sidecar", "app"),
    ("init", "init", "app"),
)


@st.composite
def containers(draw: st.DrawFn) -> tuple[Container, ...]:
    kinds = draw(st.sampled_from(KINDS))
    counts = st.dictionaries(st.sampled_from([GPU, NPU]), st.integers(1, 2), max_size=2)
    return tuple((CONTAINERS[position], kind, draw(counts)) for position, kind in enumerate(kinds))


@st.composite
def pods(draw: st.DrawFn) -> list[Given]:
    found = []
    for number in range(draw(st.integers(0, 4))):
        facts: dict[str, Any] = {
            flag: draw(st.booleans()) for flag in ("gone", "finished", "admitted")
        }
        if draw(st.booleans()):
            facts["limits_mounted"] = frozenset()
        if draw(st.integers(0, 9)) == 0:
            facts["signed"] = None
        name = draw(st.sampled_from(NAMES))
        found.append(Given(name, *draw(containers()), uid=f"u{number}", sequence=number, **facts))
    return found


@st.composite
def grants(draw: st.DrawFn, known: list[Given]) -> tuple[Grant, ...]:
    found = []
    for pod in known:
        for name, _, counts in pod.containers:
            for resource in counts:
                if draw(st.booleans()):
                    ids = draw(st.lists(IDS, min_size=1, max_size=2, unique=True))
                    run = draw(st.sampled_from([KUBELET, "run-0"]))
                    found.append(pod.grant(name, *ids, resource=resource, kubelet=run))
    return tuple(found)


@st.composite
def listings(draw: st.DrawFn, known: list[Given]) -> list[ListedPod]:
    listed = []
    for pod in known:
        if draw(st.booleans()):
            ids = {
                name: {GPU: set(draw(st.lists(IDS, max_size=2)))} for name, _, _ in pod.containers
            }
            uid = draw(st.sampled_from(["", "", pod.uid]))
            listed.append(pod.listed(ids, uid=uid, settled=draw(st.booleans())))
    if draw(st.booleans()):
        listed.append(ListedPod(namespace="default", name="stranger", settled=draw(st.booleans())))
    return listed


@st.composite
def scenes(draw: st.DrawFn) -> tuple[View, list[ListedPod] | None, list[Request], Confirmed]:
    known = draw(pods())
    entries = {}
    for pod in known:
        change = draw(st.sampled_from(["own", "none", "release", "other", "resize"]))
        record = pod.record
        if change == "none":
            continue
        if change == "other":
            record = replace(record, allocation_id="other")
        elif change in ("release", "resize"):
            record = replace(record, op=change, containers=record.containers[:1])
        entries[pod.uid] = Entry(record=record, sequence=draw(st.integers(0, 5)))
    seen = view(
        *known,
        grants=draw(grants(known)),
        entries_by_uid=entries,
        bus_connected=draw(st.booleans()),
        lists_active_only=draw(st.booleans()),
        faulty=draw(st.sets(st.sampled_from(["nvidia-0", "ascend-1"]))),
    )
    requests = [
        Request(
            vendor="nvidia" if resource == GPU else "ascend",
            resource=resource,
            ids=tuple(draw(st.lists(IDS, max_size=3))),
        )
        for resource in draw(st.lists(st.sampled_from([GPU, GPU, NPU]), min_size=1, max_size=2))
    ]
    confirmed = draw(
        st.sampled_from(
            [
                Confirmed(),
                Confirmed(everything=True),
                Confirmed(names=frozenset({("default", name) for name in NAMES})),
            ]
        )
    )
    listing = draw(st.one_of(st.none(), listings(known), listings(known)))
    return seen, listing, requests, confirmed


@settings(max_examples=600)
@given(scenes())
def test_decision_is_total_and_gives_only_what_the_ledger_records(
    scene: tuple[View, list[ListedPod] | None, list[Request], Confirmed],
) -> None:
    seen, listing, requests, confirmed = scene
    decision = decide(seen, listing, requests[0], confirmed)
    assert isinstance(decision, Claim | Wait | Refuse)
    if not isinstance(decision, Claim):
        assert decision.text
        assert "\n" not in decision.text
        return
    pod, request = decision.pod, requests[0]
    entry = seen.entries_by_uid[pod.uid]
    assert decision.entry == entry
    assert entry.record.op != "release"
    assert pod.signed is not None
    assert pod.signed.allocation_id == entry.record.allocation_id
    assert not pod.gone
    assert not pod.finished
    assert confirmed.covers(pod)
    assert any((one.namespace, one.name) == (pod.namespace, pod.name) for one in listing or ())
    recorded = {shares.name: shares for shares in entry.record.containers}
    assert decision.shares == recorded[decision.container]
    assert decision.own == tuple(
        share for share in decision.shares.shares if share.vendor == request.vendor
    )
    assert len(decision.own) == len(request.ids) == len(decision.devices)
    assert [device.uuid for device in decision.devices] == [s.uuid for s in decision.own]
    assert not set(seen.faulty) & {share.uuid for share in decision.own}


@settings(max_examples=300)
@given(scenes())
def test_decision_looks_at_nothing_but_its_arguments(
    scene: tuple[View, list[ListedPod] | None, list[Request], Confirmed],
) -> None:
    seen, listing, requests, confirmed = scene
    before = list(seen.grants)
    first = decide_all(seen, listing, requests, confirmed)
    assert decide_all(seen, listing, requests, confirmed) == first
    assert list(seen.grants) == before
    if isinstance(first, tuple):
        named = {
            (claim.pod.uid, claim.container, request.resource)
            for claim, request in zip(first, requests, strict=True)
        }
        assert len(named) == len(first) or len(set(requests)) < len(requests)
        for claim, request in zip(first, requests, strict=True):
            assert grant_of(claim, request, seen).ids == tuple(sorted(request.ids))
