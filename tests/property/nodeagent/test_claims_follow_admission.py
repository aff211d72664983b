# SPDX-License-Identifier: Apache-2.0
"""Law (design D9): in whatever order kubelet admits pods, each container gets its own shares.

64 pods are bound at once. Kubelet admits them in a shuffled order, refuses a fifth of them for
other reasons, and the agent receives pods, records and statuses in an independent order. Each share
is unique (its memory figure), so any wrong answer is detected.
"""

from __future__ import annotations

import random
from typing import Literal

import pytest
from msgspec.structs import replace

from hami_common.events.allocation import AllocationRecord
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.model.request import ContainerKind
from hami_common.pods.signing import SignedPlacement
from hami_nodeagent.core.claims import (
    Claim,
    Confirmed,
    Entry,
    Request,
    View,
    Wait,
    decide,
    grant_of,
)
from hami_nodeagent.core.grants import GrantBook
from hami_nodeagent.core.podbook import PodBook
from hami_nodeagent.core.podfacts import Ask, PodFacts
from hami_nodeagent.core.splits import Splits
from tests.property.nodeagent.kubelet_model import (
    AllocateRefused,
    Fate,
    KubeletDied,
    ModelContainer,
    ModelKubelet,
    ModelPod,
)

NODE = "node-a"
VENDOR_BY_RESOURCE = {"nvidia.com/gpu": "nvidia", "huawei.com/Ascend910B": "ascend"}
RESOURCES = tuple(VENDOR_BY_RESOURCE)
DEVICES = {
    f"{vendor}-{number}": Device(
        uuid=f"{vendor}-{number}",
        vendor=vendor,
        index=number,
        type=vendor.upper(),
        memory_mib=1 << 20,
        capacity_mib=1 << 20,
        slots=16,
    )
    for vendor in VENDOR_BY_RESOURCE.values()
    for number in range(8)
}
IDS_BY_RESOURCE = {
    resource: frozenset(
        split.id
        for split in Splits.of_devices(d for d in DEVICES.values() if d.vendor == vendor).all
    )
    for resource, vendor in VENDOR_BY_RESOURCE.items()
}
PODS = 64
OWN = tuple(
    ModelPod(f"own-{i}", "kube-system", f"own-{i}", (ModelContainer("main", "app", {}),))
    for i in range(PODS // 8)
)
"""Pods of kubelet's own, whose mirrors the API server refuses."""
FORGED = tuple(
    ModelPod(
        f"forged-{i}", "nowhere", f"forged-{i}", (ModelContainer("c0", "app", {RESOURCES[0]: 1}),)
    )
    for i in range(PODS // 8)
)
"""The same, but they request a device, which no scheduler placed."""
KINDS: tuple[tuple[ContainerKind, ...], ...] = (
    ("app",),
    ("app",),
    ("app",),
    ("init", "app"),
    ("init", "app"),
    ("init", "init", "app"),
    ("sidecar", "app"),
    ("init", "sidecar", "init", "app"),
    ("app", "app"),
)


class World:
    """Pods with unique shares, made once; only the order of things differs between rounds."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.pods: list[ModelPod] = []
        self.facts: dict[str, PodFacts] = {}
        self.entries: dict[str, Entry] = {}
        self.predecessors: dict[str, ModelPod] = {}
        self._figures = iter(range(1, 1_000_000))
        for number in range(PODS):
            pod = self._make(rng, f"uid-{number}", f"pod-{number}", number)
            self.pods.append(pod)
            if number % 8 == 0:
                old = self._make(rng, f"uid-{number}-old", f"pod-{number}", number)
                self.predecessors[pod.uid] = old

    def _make(self, rng: random.Random, uid: str, name: str, number: int) -> ModelPod:
        kinds = rng.choice(KINDS)
        asking = [rng.random() < 0.7 for _ in kinds]
        if number % 6 == 0 and "init" in kinds:
            asking = [kind == "init" for kind in kinds]  # devices only in init containers
        if not any(asking):
            asking[-1] = True
        containers = []
        for position, (kind, asks) in enumerate(zip(kinds, asking, strict=True)):
            counts = {}
            if asks:
                counts[RESOURCES[0]] = 2 if rng.random() < 0.1 else 1
                if rng.random() < 0.25:
                    counts[RESOURCES[1]] = 1
            containers.append(ModelContainer(f"c{position}", kind, counts))
        fates: tuple[Fate, ...] = ("admitted", "refused-early", "refused-late")
        fate = rng.choices(fates, weights=(80, 10, 10))[0]
        pod = ModelPod(uid, "default", name, tuple(containers), fate)
        self._bind(rng, pod, number)
        return pod

    def _bind(self, rng: random.Random, pod: ModelPod, number: int) -> None:
        shares = tuple(
            ContainerShares(
                name=container.name,
                kind=container.kind,
                shares=tuple(
                    Share(vendor=VENDOR_BY_RESOURCE[resource], uuid=uuid, memory_mib=figure)
                    for resource, count in container.counts.items()
                    for uuid, figure in zip(
                        rng.sample(
                            [
                                u
                                for u, d in DEVICES.items()
                                if d.vendor == VENDOR_BY_RESOURCE[resource]
                            ],
                            count,
                        ),
                        self._figures,
                        strict=False,
                    )
                ),
            )
            for container in pod.containers
            if container.counts
        )
        record = AllocationRecord(
            op="reserve",
            allocation_id=f"allocation-{pod.uid}",
            node=NODE,
            pod_uid=pod.uid,
            namespace=pod.namespace,
            pod=pod.name,
            containers=shares,
        )
        self.entries[pod.uid] = Entry(record=record, sequence=number + 1)
        self.facts[pod.uid] = PodFacts(
            uid=pod.uid,
            namespace=pod.namespace,
            name=pod.name,
            kind_by_container={c.name: c.kind for c in pod.containers},
            asks_by_resource={
                resource: tuple(
                    Ask(container=c.name, kind=c.kind, count=c.counts[resource])
                    for c in pod.containers
                    if resource in c.counts
                )
                for resource in RESOURCES
                if any(resource in c.counts for c in pod.containers)
            },
            signed=SignedPlacement(
                pod_uid=pod.uid,
                namespace=pod.namespace,
                pod=pod.name,
                allocation_id=record.allocation_id,
                ledger_seq=number + 1,
                placement=Placement(node=NODE, containers=shares),
            ),
            limits_mounted=frozenset(c.name for c in pod.containers),
        )


class Cluster:
    """The API server's truth, and its updates that have not arrived yet."""

    def __init__(self) -> None:
        self.revision = 0
        self.live: dict[tuple[str, str], tuple[PodFacts, int]] = {}
        self.watch: list[tuple[PodFacts, int]] = []
        self.kubelet_writes: list[tuple[str, bool]] = []
        """(uid, True when refused): kubelet's updates for the API server."""

    def create(self, facts: PodFacts) -> None:
        assert (facts.namespace, facts.name) not in self.live
        self._store(facts)

    def delete(self, facts: PodFacts) -> None:
        current, _ = self.live.pop((facts.namespace, facts.name))
        assert current.uid == facts.uid
        self.revision += 1
        self.watch.append((replace(current, gone=True), self.revision))

    def sync_statuses(self) -> None:
        while self.kubelet_writes:
            self.sync_status()

    def sync_status(self) -> None:
        uid, refused = self.kubelet_writes.pop(0)
        for facts, _ in list(self.live.values()):
            if facts.uid == uid:
                self._store(replace(facts, finished=refused, admitted=not refused))

    def _store(self, facts: PodFacts) -> None:
        self.revision += 1
        self.live[facts.namespace, facts.name] = (facts, self.revision)
        self.watch.append((facts, self.revision))


class Agent:
    """The agent's view, fed with updates in a random order, and its answers, checked."""

    def __init__(self, world: World, kubelet: ModelKubelet, rng: random.Random) -> None:
        self.world = world
        self.kubelet = kubelet
        self.rng = rng
        self.cluster = Cluster()
        self.feed: list[str] = []
        self.book = PodBook()
        self.entries: dict[str, Entry] = {}
        self.view = View(
            pods_by_name=self.book.by_name,
            entries_by_uid=self.entries,
            states_by_uid={},
            grants=GrantBook(),
            devices_by_uuid=DEVICES,
            lists_active_only=kubelet.active_only,
        )
        self.wrong: list[str] = []
        self.refused: dict[str, str] = {}
        self.answered = 0

    def bind(self, pod: ModelPod) -> None:
        self.feed.append(pod.uid)
        self.cluster.create(self.world.facts[pod.uid])

    def hear(self, count: int = 1) -> bool:
        """Deliver the next update of one source; each source keeps its own order."""
        for _ in range(count):
            sources = [
                source
                for source, waiting in (
                    (self._hear_feed, self.feed),
                    (self._hear_watch, self.cluster.watch),
                    (self.cluster.sync_status, self.cluster.kubelet_writes),
                )
                if waiting
            ]
            if not sources:
                return False
            self.rng.choice(sources)()
        return True

    def _hear_feed(self) -> None:
        uid = self.feed.pop(0)
        self.entries[uid] = self.world.entries[uid]

    def _hear_watch(self) -> None:
        facts, revision = self.cluster.watch.pop(0)
        if facts.gone:
            self.book.end(facts.uid, now_s=0)
        else:
            self.book.put(facts, revision=revision, now_s=0)

    def _read(self, pod: PodFacts) -> set[tuple[str, str]]:
        name = (pod.namespace, pod.name)
        found = self.cluster.live.get(name)
        if found is None:
            self.book.end_name(*name, now_s=0)
        else:
            self.book.put(found[0], revision=found[1], now_s=0)
        return {name}

    def answer(
        self, pod: ModelPod, container: ModelContainer, resource: str, ids: frozenset[str]
    ) -> None:
        self.view.kubelet = str(self.kubelet.run)
        request = Request(
            vendor=VENDOR_BY_RESOURCE[resource], resource=resource, ids=tuple(sorted(ids))
        )
        listing, confirmed = self.kubelet.listing(), Confirmed()
        while True:
            decision = decide(self.view, listing, request, confirmed)
            if not isinstance(decision, Wait):
                break
            if decision.confirm is not None:
                confirmed = replace(confirmed, names=confirmed.names | self._read(decision.confirm))
            elif decision.confirm_all:
                self.book.put_all(
                    list(self.cluster.live.values()), revision=self.cluster.revision, now_s=0
                )
                confirmed = Confirmed(everything=True)
            elif self.hear():
                self.hear(self.rng.randrange(12))
                listing, confirmed = self.kubelet.listing(), Confirmed()
            else:
                break
        if not isinstance(decision, Claim):
            self.refused[pod.uid] = f"{decision.code}: {decision.text}"
            raise AllocateRefused
        if pod.uid not in self.world.entries:
            self.wrong.append(f"{pod.uid} got {decision.pod.uid}/{decision.container}")
            return
        recorded = {s.name: s for s in self.world.entries[pod.uid].record.containers}
        own = tuple(s for s in recorded[container.name].shares if s.vendor == request.vendor)
        if (decision.pod.uid, decision.container, decision.own) != (pod.uid, container.name, own):
            self.wrong.append(
                f"{pod.uid}/{container.name} got {decision.pod.uid}/{decision.container}"
            )
        self.view.grants.add(grant_of(decision, request, self.view))
        self.answered += 1


def play(
    world: World,
    seed: int,
    *,
    active_only: bool = True,
    restart_at: int | None = None,
    die_after_calls: int | None = None,
    forced: Literal["no", "lasting", "any"] = "lasting",
    unseen: Literal["no", "own", "forged", "vanished"] = "no",
) -> Agent:
    """Run one round: admit all pods in a shuffled order.

    Returns the agent for inspection.

    ``forced``: predecessors that are deleted without waiting for kubelet: it lists them until it
    receives the deletion, just before the pod that took the name. ``unseen``: among the pods are
    some that the API server never shows (kubelet's own, from files, some of which request a
    device), or that were deleted by force before kubelet admitted them.
    """
    rng = random.Random(seed)
    kubelet = ModelKubelet(ids_by_resource=IDS_BY_RESOURCE, rng=rng, active_only=active_only)
    agent = Agent(world, kubelet, rng)
    for first in world.predecessors.values():
        agent.bind(first)
        admitted = kubelet.admit(first, agent.answer)
        agent.cluster.kubelet_writes.append((first.uid, not admitted))
        if not admitted:  # its controller replaces it because it failed
            agent.cluster.sync_statuses()
    assert agent.refused == {}
    agent.hear(rng.randrange(4 * len(world.predecessors)))
    bind_all(world, agent, rng, forced=forced)
    order = list(world.pods)
    rng.shuffle(order)
    if unseen == "vanished":
        for pod in order[::4]:
            agent.cluster.delete(world.facts[pod.uid])
    for position, pod in enumerate(order):
        if position == restart_at:
            kubelet.restart(agent.answer)
        if die_after_calls is not None and position == len(order) // 2:
            kubelet.die_after_calls = kubelet.calls + die_after_calls
        if (old := world.predecessors.get(pod.uid)) is not None:
            kubelet.remove(old)
        if unseen in ("own", "forged") and position % 8 == 0:
            kubelet.admit(OWN[position // 8], agent.answer)
        if unseen == "forged" and position % 8 == 4:
            assert not kubelet.admit(FORGED[position // 8], agent.answer)
        try:
            admitted = kubelet.admit(pod, agent.answer)
        except KubeletDied:
            kubelet.restart(agent.answer)
            admitted = pod.uid not in kubelet.refused
        agent.cluster.kubelet_writes.append((pod.uid, not admitted))
    return agent


def bind_all(world: World, agent: Agent, rng: random.Random, *, forced: str) -> None:
    """Bind all pods in a shuffled order, each after its predecessor was deleted."""
    bound = list(world.pods)
    rng.shuffle(bound)
    for pod in bound:
        if (old := world.predecessors.get(pod.uid)) is not None:
            if not is_forced(old, forced):
                agent.kubelet.remove(old)
                agent.cluster.kubelet_writes.append((old.uid, True))
                agent.cluster.sync_statuses()
            agent.cluster.delete(world.facts[old.uid])
        agent.bind(pod)


def is_forced(old: ModelPod, forced: str) -> bool:
    lasting = any(c.counts for c in old.containers if c.kind != "init")
    return forced == "any" or (forced == "lasting" and lasting and old.fate == "admitted")


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return [World(seed) for seed in range(10)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", range(4))
def test_each_container_gets_its_own_shares_in_1000_admission_orders(
    worlds: list[World], part: int
) -> None:
    answered = 0
    for seed in range(250 * part, 250 * (part + 1)):
        agent = play(worlds[seed % len(worlds)], seed)
        assert agent.wrong == []
        assert agent.refused == {}
        answered += agent.answered
    assert answered > 250 * PODS


@pytest.mark.timeout(120)
def test_refused_pods_that_an_old_kubelet_still_lists_block_no_other_pod(
    worlds: list[World],
) -> None:
    for seed in range(100):
        agent = play(worlds[seed % len(worlds)], seed, active_only=False)
        assert agent.wrong == []
        assert agent.refused == {}


@pytest.mark.timeout(120)
def test_kubelet_restart_between_admissions_changes_no_answer(worlds: list[World]) -> None:
    for seed in range(100):
        agent = play(worlds[seed % len(worlds)], seed, restart_at=seed % PODS, forced="no")
        assert agent.wrong == []
        assert agent.refused == {}


@pytest.mark.timeout(120)
def test_pods_deleted_by_force_may_be_refused_but_get_nothing_wrong(worlds: list[World]) -> None:
    refused = 0
    for seed in range(100):
        restart_at = seed % PODS if seed % 2 else None
        agent = play(
            worlds[seed % len(worlds)],
            seed,
            active_only=seed % 4 < 2,
            forced="any",
            restart_at=restart_at,
        )
        assert agent.wrong == []
        refused += len(agent.refused)
    assert refused < 0.3 * 100 * PODS


@pytest.mark.timeout(120)
def test_pods_of_kubelets_own_block_no_other_pod(worlds: list[World]) -> None:
    for seed in range(50):
        agent = play(worlds[seed % len(worlds)], seed, unseen="own", forced="no")
        assert agent.wrong == []
        assert agent.refused == {}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("restarts", [False, True])
def test_pods_of_kubelets_own_that_request_a_device_get_none_and_block_no_other_pod(
    worlds: list[World], *, restarts: bool
) -> None:
    for seed in range(50):
        agent = play(
            worlds[seed % len(worlds)],
            seed,
            unseen="forged",
            forced="no",
            restart_at=seed % PODS if restarts else None,
        )
        assert agent.wrong == []
        assert set(agent.refused) == {pod.uid for pod in FORGED}


@pytest.mark.timeout(120)
def test_pods_that_vanished_before_admission_may_be_refused_but_get_nothing_wrong(
    worlds: list[World],
) -> None:
    refused = 0
    for seed in range(50):
        agent = play(worlds[seed % len(worlds)], seed, unseen="vanished", forced="no")
        assert agent.wrong == []
        refused += len(agent.refused)
    assert 0.1 * 50 * PODS < refused < 0.3 * 50 * PODS


@pytest.mark.timeout(120)
def test_kubelet_death_inside_an_admission_refuses_rather_than_guesses(
    worlds: list[World],
) -> None:
    refused = 0
    for seed in range(100):
        agent = play(worlds[seed % len(worlds)], seed, die_after_calls=1 + seed % 3, forced="no")
        assert agent.wrong == []
        assert all(text.startswith("ambiguous") for text in agent.refused.values())
        refused += len(agent.refused)
    assert refused < 60  # at most the one pod that was being admitted


def test_worlds_hold_the_hard_cases(worlds: list[World]) -> None:
    pods = [pod for world in worlds for pod in world.pods]
    kinds_that_ask = [{c.kind for c in pod.containers if c.counts} for pod in pods]
    assert sum(kinds == {"init"} for kinds in kinds_that_ask) > 10
    assert sum({"init", "app"} <= kinds for kinds in kinds_that_ask) > 50
    assert sum("sidecar" in kinds for kinds in kinds_that_ask) > 50
    assert sum(any(len(c.counts) == 2 for c in pod.containers) for pod in pods) > 50
    refused = sum(pod.fate != "admitted" for pod in pods) / len(pods)
    assert 0.15 < refused < 0.25
