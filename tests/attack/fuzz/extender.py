# SPDX-License-Identifier: Apache-2.0
"""Attacks the scheduler: calls about hostile pods, and calls that are damaged.

A whole scheduler runs over a bus and an API server in memory. Each pod lives through a creation,
filter, prioritize, bind, an update by its tenant, preempt and a call of Volcano's, so that the
feeds and the background tasks see it too. Besides the laws of all targets, no device may be given
out twice.
"""

import json
import random
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
from prometheus_client import CollectorRegistry

from hami_common.errors import HamiError
from hami_common.pods import annotations as keys
from hami_common.runtime.httpd import HttpApp
from hami_scheduler.shell.volcano import PREFIX
from hami_scheduler.shell.volcano_wire import ALLOCATED, PENDING
from tests.attack.fuzz import pods
from tests.attack.fuzz.inputs import NUMBERS, STRINGS, damaged, encoded, mutated, pick
from tests.attack.fuzz.laws import DETAIL, Case, Told, chance_of, resident_mib
from tests.attack.fuzz.requests import ERROR, OK, post
from tests.support import ledgercheck, volcano_bodies
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import Running, World, quiet

Document = dict[str, Any]

NODES = tuple(f"n{place}" for place in range(6))
CAPACITY = tuple(builders.devices(node, count=4, memory_mib=16_000, slots=4) for node in NODES)
NAMES = (*NODES, "none", "n-.x", "", "../x", "a" * 300)
STEPS = 10
"""Cases about one pod."""
POD, OBJECT = "pod", "object"
"""Kinds of cases other than calls: the tenant updates its pod, or creates another object."""
BUDGETS = "/apis/policy/v1/namespaces/{}/poddisruptionbudgets/b{}"
POD_GROUPS = (
    "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/{}/podgroups/{}",
    "/apis/scheduling.volcano.sh/v1beta1/namespaces/{}/podgroups/{}",
)
QUOTAS = "/api/v1/namespaces/{}/resourcequotas/q{}"
INT32 = (0, 1, -1, 2**31 - 1, -(2**31))
PHASES = ("Pending", "Running", "Running", "Succeeded", "Failed", "Unknown", "x", "")
TIMES = ("2026-01-01T00:00:00Z", "1970-01-01T00:00:10Z", "9999-12-31T23:59:59Z", "", "x", "0")
CHECK_EVERY = 64
LET_PASS_EVERY = 256
PODS_MOST = 48
OBJECTS_MOST = 12
ANSWER_S = 30.0
PAUSE_S = 0.002


class _Scheduler:
    def __init__(self, world: World, running: Running) -> None:
        self._world = world
        self._running = running
        self._app = HttpApp(
            {**running.scheduler.extender.routes(), **running.scheduler.volcano.routes()},
            registry=CollectorRegistry(),
            ready=lambda: True,
        )
        self._cases = 0
        self._paths: deque[str] = deque()
        self._objects: deque[str] = deque()

    async def take(self, case: Case) -> Told:
        self._cases += 1
        if case.before:
            self._put(case.before, again=False)
            await quiet()
        status, body = OK, b""
        if case.kind == POD:
            self._put(case.body, again=True)
        elif case.kind == OBJECT:
            found = json.loads(case.body)
            self._world.kube.put(found["path"], found["object"])
            self._objects.append(found["path"])
        else:
            status, body = await self._call(case)
        await quiet()
        if self._cases % LET_PASS_EVERY == 0:
            await self._world.advance(1.0, *NODES)
        self._forget()
        if status >= ERROR:
            return Told(problem=f"HTTP {status}: {body.decode()}", outcome=f"{case.kind} {status}")
        return Told(problem=self._overbooked(), outcome=f"{case.kind} {_outcome(status, body)}")

    async def _call(self, case: Case) -> tuple[int, bytes]:
        """Make the call; calls that wait for other tasks get real time."""
        answers: list[tuple[int, bytes]] = []

        async def ask() -> None:
            answers.append(await post(self._app, f"/{case.kind}", case.body))

        with anyio.fail_after(ANSWER_S):
            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await quiet()
                while not answers:
                    await anyio.sleep(PAUSE_S)
        return answers[0]

    def _put(self, raw: bytes, *, again: bool) -> None:
        pod = json.loads(raw)
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        known = self._world.kube.objects.get(path)
        if known is not None:
            if not again:
                return
            # The fields that the API server keeps of an assigned pod.
            pod["spec"] = known["spec"]
            own = known["metadata"].get("annotations") or {}
            kept = {key: value for key, value in own.items() if keys.is_reserved(key)}
            notes = pod["metadata"].get("annotations") or {}
            pod["metadata"]["annotations"] = notes | kept
        else:
            self._paths.append(path)
        pod.setdefault("status", {"phase": "Pending"})
        self._world.kube.put(path, pod)

    def _forget(self) -> None:
        """Let old pods end, and drop what only tests read."""
        self._remove(PODS_MOST, OBJECTS_MOST)
        for seen in (
            self._world.bus.published,
            self._running.seen.calls,
            self._world.kube.events,
            self._world.kube.evictions,
            self._world.kube.node_touches,
        ):
            seen.clear()

    def _remove(self, pods_most: int, objects_most: int) -> None:
        for paths, most in ((self._paths, pods_most), (self._objects, objects_most)):
            while len(paths) > most:
                path = paths.popleft()
                if path in self._world.kube.objects:
                    self._world.kube.remove(path)

    def _overbooked(self) -> str:
        if self._cases % CHECK_EVERY:
            return ""
        world = self._world
        try:
            ledgercheck.check(
                [pod for pod in world.kube.pods() if self._is_signed(pod)],
                world.live(),
                verifier=world.verifier,
                capacity=CAPACITY,
            )
        except AssertionError as error:
            return f"a device is given out twice{DETAIL}{error}"
        return ""

    def _is_signed(self, pod: Document) -> bool:
        """Report if the pod carries an allocation that an agent would believe."""
        metadata, node = pod["metadata"], pod["spec"].get("nodeName", "")
        text = (metadata.get("annotations") or {}).get(keys.ALLOCATION, "")
        try:
            self._world.verifier.verify(text, pod_uid=metadata["uid"], node=node)
        except HamiError:
            return False
        return True

    async def finish(self) -> str:
        """Place a good pod once all others are gone."""
        self._cases = 0
        self._remove(0, 0)
        await quiet()
        for _ in range(12):
            await self._world.advance(10.0, *NODES)
        problem = self._overbooked()
        pod = self._world.add_pod(builders.pod("good", mem_mib=1000))
        await quiet()
        answer = await self._running.filter(pod, list(NODES))
        if not answer["NodeNames"]:
            return f"a good pod fits nowhere afterwards{DETAIL}{answer}"
        error = await self._running.bind(pod, answer["NodeNames"][0])
        return problem or (f"a good pod is not bound afterwards{DETAIL}{error}" if error else "")

    def processor_s(self) -> float:
        return time.process_time()

    def resident_mib(self) -> float:
        return resident_mib()


def _outcome(status: int, body: bytes) -> str:
    if status != OK:
        return str(status)
    try:
        answer = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        return "malformed"  # names of nodes are sent back as they came
    if isinstance(answer, list) or "NodeNameToMetaVictims" in answer:
        return "answered"
    if answer.get("Error"):
        return "error"
    return "refused" if answer.get("NodeNames") == [] else "answered"


class Extender:
    """Calls of kube-scheduler and Volcano."""

    name = "extender"
    full = 100_000
    few = 1_600
    is_shrunk = True

    def _pod(self, seed: str, group: int) -> Document:
        chance = chance_of(seed, self.name, "pod", group)
        pod = pods.Tenant(chance).pod(
            f"p{group}", uid=f"uid-{group}", namespace=f"team-{group % 3}"
        )
        if group % 60 == 5:
            pod = pods.large(chance, pod)
        metadata, spec = pod["metadata"], pod["spec"]
        spec.pop("nodeName", None)
        spec.setdefault("priority", pick(chance, (0, 0, 1, 5, 9)))
        spec.setdefault("schedulerName", "hami-scheduler")
        if chance.random() < 0.9:
            metadata["labels"] = {**metadata.get("labels", {}), keys.MANAGED_LABEL: "true"}
        return pods.stored(pod)

    def make(self, seed: str, number: int) -> Case:
        """Make one step in the life of a pod, or a damaged call about it."""
        chance = chance_of(seed, self.name, number)
        group, step = divmod(number, STEPS)
        pod = self._pod(seed, group)
        before = encoded(pod)
        names = [pick(chance, NAMES) for _ in range(chance.randrange(1, 5))]
        if chance.random() < 0.7:
            names = list(NODES)
        asking = {"Pod": pod, "Nodes": None, "NodeNames": names}
        match step:
            case 0 | 1:
                return Case(
                    kind=("filter", "prioritize")[step], body=encoded(asking), before=before
                )
            case 2:
                call = _binding(pod, pick(chance, NODES))
                return Case(kind="bind", body=encoded(call), before=before)
            case 3:
                other = pods.stored(pods.Tenant(chance).pod(pod["metadata"]["name"]))
                pod["metadata"]["annotations"] = other["metadata"]["annotations"]
                pod["metadata"]["labels"] |= other["metadata"]["labels"]
                if chance.random() < 0.2:
                    pod["metadata"]["deletionTimestamp"] = pick(chance, TIMES)
                pod["status"] = {"phase": pick(chance, PHASES), "startTime": pick(chance, TIMES)}
                return Case(kind=POD, body=encoded(pod), before=before)
            case 4:
                return Case(
                    kind="preempt", body=encoded(_victims(chance, pod, group)), before=before
                )
            case 5:
                verb = pick(chance, ("filter", "prioritize"))
                body = encoded(mutated(asking, chance, times=chance.randint(1, 3)))
                return Case(kind=verb, body=body)
            case 6:
                call = pick(
                    chance, (_binding(pod, pick(chance, NAMES)), _victims(chance, pod, group))
                )
                verb = "bind" if "PodUID" in call else "preempt"
                body = encoded(mutated(call, chance, times=chance.randint(1, 2)))
                return Case(kind=verb, body=body, before=before)
            case 7:
                body = encoded(_object(chance, pod, number))
                return Case(kind=OBJECT, body=body)
            case 8:
                path, call = _volcano(chance, pod)
                if chance.random() < 0.3:
                    call = mutated(call, chance, times=chance.randint(1, 2))
                return Case(kind=path, body=encoded(call), before=before)
            case _:
                verb = pick(chance, ("filter", "prioritize", "bind", "preempt"))
                call = {"bind": _binding(pod, "n0"), "preempt": _victims(chance, pod, group)}.get(
                    verb, asking
                )
                return Case(kind=verb, body=damaged(encoded(call), chance))

    @asynccontextmanager
    async def service(self) -> AsyncIterator[_Scheduler]:
        """Run a scheduler over a world in memory."""
        world = World()
        for devices in CAPACITY:
            await world.add_devices(devices)
        async with world.scheduler(gang_wait_s=0.01, preempt_retry_s=0.5) as running:
            await world.heartbeat(*NODES)
            yield _Scheduler(world, running)


def _binding(pod: Document, node: str) -> Document:
    metadata = pod["metadata"]
    return {
        "PodName": metadata["name"],
        "PodNamespace": metadata["namespace"],
        "PodUID": metadata["uid"],
        "Node": node,
    }


def _volcano(chance: random.Random, pod: Document) -> tuple[str, Document]:
    """Make a call of Volcano's extender plugin: path and arguments."""
    verb = pick(chance, ("predicate", "prioritize", "jobEnqueueable", "allocate", "deallocate"))
    status = pick(chance, (PENDING, ALLOCATED, ALLOCATED, volcano_bodies.PIPELINED, *INT32))
    task = volcano_bodies.task(pod, node=pick(chance, NAMES), status=status)
    call: Document = {"task": task}
    if verb == "predicate":
        call["node"] = volcano_bodies.node_info(pick(chance, NAMES))
    elif verb == "prioritize":
        call["nodes"] = [volcano_bodies.node_info(node) for node in NODES]
    elif verb == "jobEnqueueable":
        metadata = pod["metadata"]
        call = {
            "job": {
                "Name": "j",
                "Namespace": metadata["namespace"],
                "MinAvailable": pick(chance, (0, 1, 2, *INT32)),
                "Tasks": {metadata["uid"]: {**task, "Status": PENDING}},
            }
        }
    return f"{PREFIX}/{verb}".removeprefix("/"), call


def _object(chance: random.Random, pod: Document, number: int) -> Document:
    """Make another object that the scheduler reads in a tenant's namespace."""
    metadata = pod["metadata"]
    namespace, kind = metadata["namespace"], chance.randrange(3)
    amount = pick(chance, (0, 1, 2, *NUMBERS)) if chance.random() < 0.5 else pick(chance, STRINGS)
    if isinstance(amount, msgspec.Raw):
        amount = 1
    if kind == 0:
        amount = pick(chance, INT32)  # the API server's type
        path = BUDGETS.format(namespace, number % 5)
        selector = pick(chance, ({}, {"matchLabels": metadata["labels"]}, None))
        more: Document = {"spec": {"selector": selector}, "status": {"disruptionsAllowed": amount}}
    elif kind == 1:
        name = pick(chance, ("gang-a", "gang-b", "team"))
        path = pick(chance, POD_GROUPS).format(namespace, name)
        more = {"spec": {"minMember": amount}}
    else:
        path = QUOTAS.format(namespace, number % 2)
        more = {"spec": {"hard": {"limits.nvidia.com/gpumem": amount}}}
    name = path.rpartition("/")[2]
    return {"path": path, "object": {"metadata": {"name": name, "namespace": namespace}, **more}}


def _victims(chance: random.Random, pod: Document, group: int) -> Document:
    def several() -> list[Document]:
        return [
            {"UID": pick(chance, (f"uid-{max(0, group - chance.randrange(40))}", *STRINGS[:6]))}
            for _ in range(chance.randrange(4))
        ]

    victims = {
        pick(chance, NAMES): {
            "Pods": pick(chance, (several(), None)),
            "NumPDBViolations": pick(chance, (0, 1, -1, 2**40)),
        }
        for _ in range(chance.randrange(4))
    }
    return {"Pod": pod, "NodeNameToVictims": None, "NodeNameToMetaVictims": victims}
