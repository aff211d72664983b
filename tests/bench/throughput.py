# SPDX-License-Identifier: Apache-2.0
"""Pods per second of a real scheduler with ours, against the same one without.

    ./dev bench throughput [--nodes 1000] [--pods 500,1000,2000] [--runs 3] [--json FILE|-]
    ./dev bench throughput --scheduler volcano [--nodes 100] [--pods 200]

etcd, kube-apiserver and kube-scheduler are real, and so are webhook, registry, scheduler and NATS.
Nodes are on paper (``tests.support.paper_nodes``): binding is measured, nothing runs afterwards.
The sides take turns in one cluster. ``hami``: pods that ask for one device and some memory pass the
webhook and are placed through the extender. ``plain``: pods of the same template that only count
``nvidia.com/gpu`` are placed by a kube-scheduler whose configuration has no extender and is the
same otherwise, ``percentageOfNodesToScore`` included. All pods of a run exist before kube-scheduler
is started; the clock runs from the first to the last Binding, by the API server's audit log.

With ``--scheduler volcano`` Volcano's scheduler takes the place of kube-scheduler, on an
installation of the shipped manifests (``tests.e2e.test_volcano``), and both sides have the same
pods, which request shares by Volcano's names. ``plain``: its plugin deviceshare chooses the devices
from annotations of the nodes, and no webhook or policy of HAMi exists. ``hami``: the webhook
completes the pods, and bind admission chooses the devices.

A turn is one run of each side, one right after the other; which goes first changes from turn to
turn, so that what else the machine does falls on both.

Document: ``runs``, one per number of pods, turn and side: ``side``, ``pods_per_s``, ``seconds``,
``writes_per_pod`` by who wrote what (events apart), ``cpu_ms_per_pod`` by process, ``busy`` (part
of the machine's processor time that all processes of the cluster took), ``others`` (part of it that
was taken by anything else), ``scheduling_ms`` (mean of kube-scheduler's serial part, 0 for
Volcano), ``verb_ms`` (mean time our service took for each verb that was called; ``admit``: the
review of a Binding). ``sizes``, one per number of
pods: ``ratios`` (hami's pods/s divided by plain's, turn by turn), ``ratio`` (their median), their
``least`` and ``most``.
``idle_ms_per_s`` is what each process takes before any pod comes: heartbeats, leases, looks at the
clock. ``cpu_ms_per_pod`` contains it, the more of it the slower pods are bound.
The exit code is 1 when ``targets`` says that one was missed, or when ``problems`` lists a share
that is lost or given twice.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

import anyio
import msgspec
import nats
import psutil
from msgspec import Struct, structs
from nats.aio.client import Client as Bus
from prometheus_client.parser import text_string_to_metric_families

from hami_common.compat.volcano import POD_IDS
from hami_common.errors import NotFound, Unavailable
from hami_common.pods.annotations import MANAGED_LABEL
from hami_sim.cluster import Cluster, ClusterSpec, run_cluster
from hami_sim.kubernetes import Programs
from hami_sim.kubernetes.programs import APISERVER
from hami_sim.planes import RealPlane
from hami_sim.process import Process
from tests.bench.scheduler import machine
from tests.cluster import build
from tests.e2e.test_volcano import write_overlay
from tests.support.checker import inventory_of, ledger_of, over_capacity
from tests.support.installed import SPEC as INSTALLED
from tests.support.installed import Installed, run_installed
from tests.support.paper_nodes import PaperAgents, PaperNode, add_nodes, devices_of, each
from tests.support.volcano import API as VOLCANO_API
from tests.support.volcano import GROUP_NAME, NAME, Volcano, describe_nodes

Side = Literal["plain", "hami"]
SIDES: tuple[Side, ...] = ("plain", "hami")
EXEMPT: Mapping[Side, str | None] = {"plain": "ignore", "hami": None}
"""Label ``hami.io/webhook`` of the namespace."""
DEVICES = 8
WANTED_RATIO = 0.5
"""With kube-scheduler; Volcano's figures have no target."""
LIMIT_S = 240.0
NAMESPACE = "default"
SCHEDULER = "kube-scheduler"
CONTROLLERS = "kube-controller-manager"
SIZES: Mapping[str, tuple[int, str]] = {SCHEDULER: (1000, "2000"), NAME: (100, "200")}
"""By scheduler: nodes and pods of a run without options."""
MOST_WRITES_BY_SCHEDULER: Mapping[str, float] = {SCHEDULER: 2.0, NAME: 2.5}
"""Volcano 1.14 writes its choice of devices before the Binding, one write per pod."""
ADMISSION = ("mutatingwebhookconfigurations", "validatingadmissionpolicybindings")
SPEC = ClusterSpec(nodes=(), plane="real", settings={"scheduler": {"log_level": "WARNING"}})
EVENTS = "events"
WRITES = frozenset({"create", "update", "patch", "delete"})
_FAILED = 400
_POLL_S = 0.25
_IDLE_S = 10.0
_IN_FORCE_S = 2.0
"""Until the API server has every change of the admission configuration."""
_HEADINGS = (
    "pods  turn  side   pods/s  writes/pod  events/pod  busy  others  serial ms  "
    "processor ms per pod"
)

Document = dict[str, Any]


class _Reference(Struct, rename="camel"):
    resource: str = ""
    subresource: str = ""


class _Status(Struct):
    code: int = 0


class Audited(Struct, rename="camel"):
    """The fields of one entry of the audit log that are read."""

    verb: str
    stage_timestamp: datetime
    user_agent: str = ""
    object_ref: _Reference | None = None
    response_status: _Status | None = None

    @property
    def what(self) -> str:
        """Resource and subresource."""
        reference = self.object_ref or _Reference()
        return "/".join(filter(None, (reference.resource, reference.subresource)))

    def is_write(self) -> bool:
        """True for a write."""
        code = self.response_status.code if self.response_status else 0
        return self.verb in WRITES and code < _FAILED


class AuditLog:
    """Reads new entries of the audit log, also while it is rotated."""

    def __init__(self, path: Path) -> None:
        """Begin with the entries written from now on."""
        self._path = path
        self._file: BinaryIO = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._rest = b""
        self._decoder = msgspec.json.Decoder(Audited)

    def new_entries(self) -> Iterator[Audited]:
        """Return the entries since the last call."""
        while True:
            *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
            yield from map(self._decoder.decode, lines)
            try:
                is_same = self._path.stat().st_ino == os.fstat(self._file.fileno()).st_ino
            except FileNotFoundError:
                return
            if is_same:
                return
            self._file.close()
            self._file = self._path.open("rb")


class Row(Struct, kw_only=True):
    """One run of one side."""

    side: Side
    turn: int
    nodes: int
    pods: int
    seconds: float
    pods_per_s: float
    writes_per_pod: float
    """Without events."""
    events_per_pod: float
    writes: dict[str, float]
    """Per pod, by program, verb and resource."""
    cpu_ms_per_pod: dict[str, float]
    busy: float
    others: float
    scheduling_ms: float
    verb_ms: dict[str, float]


def node_name(number: int) -> str:
    """A node name of 45 characters, as clouds make them."""
    return f"gke-accelerator-pool-{number:06d}.zone-a.internal.x"


def paper_nodes(count: int) -> list[PaperNode]:
    """Nodes with eight devices each."""
    return [
        PaperNode(name=node_name(number), devices=devices_of(f"{number}", DEVICES))
        for number in range(count)
    ]


def pod(side: Side, number: int, mine: Document | None = None) -> Document:
    """One pod of a side; ``mine``: the devices that it requests."""
    if mine is None:
        mine = {"nvidia.com/gpu": "1"}
        if side == "hami":
            mine["nvidia.com/gpumem"] = "8000"
    ours = {"cpu": "500m", "memory": "2Gi"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{side}-{number}", "labels": {"app": "train"}},
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "image": "registry.example/team/worker:1",
                    "command": ["python", "-m", "train"],
                    "env": [{"name": f"SETTING_{i}", "value": f"value-{i}"} for i in range(10)],
                    "resources": {"limits": {**ours, **mine}, "requests": {**ours, **mine}},
                }
            ],
        },
    }


class Bench:
    """One cluster, and the runs on it."""

    scheduler: ClassVar[str] = SCHEDULER
    """Process of the measured scheduler."""

    def __init__(self, cluster: Cluster, plane: RealPlane, *, nodes: int) -> None:
        self._cluster = cluster
        self._plane = plane
        self._nodes = nodes
        self._pods = 0

    async def prepare(self, agents: PaperAgents) -> None:
        """Create the nodes and wait until our scheduler has their devices."""
        cluster = self._cluster
        for name in (SCHEDULER, CONTROLLERS):
            await cluster.processes[name].stop()
        nodes = paper_nodes(self._nodes)
        await add_nodes(cluster, nodes)
        await each(nodes, agents.report)

        async def known() -> bool:
            return (await self._metrics())["hami_scheduler_served_nodes"] >= self._nodes

        await cluster.until("the scheduler knows all devices", known, limit_s=120)

    async def idle(self) -> dict[str, float]:
        """Processor milliseconds that each process takes in a second while no pod comes."""
        await anyio.sleep(_IDLE_S / 2)  # start-up work of the nodes is done
        before, begun_s = self._spent_s(), anyio.current_time()
        await anyio.sleep(_IDLE_S)
        after, seconds = self._spent_s(), anyio.current_time() - begun_s
        found = {name: 1e3 * (after[name] - before.get(name, 0.0)) / seconds for name in after}
        return {name: round(ms, 1) for name, ms in sorted(found.items(), key=lambda p: -p[1])}

    async def run(self, side: Side, turn: int, pods: int) -> tuple[Row, list[str]]:
        """Create the pods, let them be bound, judge, and delete them."""
        cluster = self._cluster
        self._pods = pods
        await self._exempt(side)
        print(f"turn {turn + 1}, {side}: creating {self._pods} pods", file=sys.stderr)
        await each(range(self._pods), lambda i: cluster.create_pod(self._pod(side, i)))
        kube = await self._prepared(side)
        audit = AuditLog(self._plane.audit_log)
        verbs_before, spent_before = await self._verbs(), self._spent_s()
        await self._begin(kube)
        bound: list[datetime] = []
        writes: Counter[str] = Counter()
        begun_s = anyio.current_time()
        spent_first, first_s, machine_first = spent_before, begun_s, _machine_s()
        with anyio.move_on_after(LIMIT_S) as limit:
            while len(bound) < self._pods:
                await anyio.sleep(_POLL_S)
                for entry in audit.new_entries():
                    if entry.is_write():
                        writes[_who(entry)] += 1
                        if (entry.verb, entry.what) == ("create", "pods/binding"):
                            bound.append(entry.stage_timestamp)
                if not bound:
                    spent_first, first_s = self._spent_s(), anyio.current_time()
                    machine_first = _machine_s()
        spent, last_s = self._spent_s(), anyio.current_time()
        machine_used = _machine_s() - machine_first
        if limit.cancelled_caught:
            detail = f"{len(bound)} of {self._pods} pods bound in {LIMIT_S:g} s; {kube.tail()}"
            raise Unavailable(peer=self.scheduler, detail=detail)
        verbs = await self._verbs()
        scheduling_ms = await self._scheduling_ms()
        problems = await self._problems(self._pods if side == "hami" else 0)
        await anyio.sleep(1.0)  # events arrive late
        for entry in audit.new_entries():
            if entry.is_write():
                writes[_who(entry)] += 1
        await kube.stop()
        await self._clear(side)
        seconds = (max(bound) - min(bound)).total_seconds()
        used = {name: spent[name] - spent_first.get(name, 0.0) for name in spent}
        whole = (last_s - first_s) * (os.cpu_count() or 1)
        each_pod = {who: round(count / self._pods, 3) for who, count in writes.most_common()}
        row = Row(
            side=side,
            turn=turn,
            nodes=self._nodes,
            pods=self._pods,
            seconds=round(seconds, 2),
            pods_per_s=round((self._pods - 1) / seconds, 1),
            writes_per_pod=round(sum(n for w, n in each_pod.items() if EVENTS not in w), 2),
            events_per_pod=round(sum(n for w, n in each_pod.items() if EVENTS in w), 2),
            writes={who: count for who, count in each_pod.items() if count >= 0.005},
            cpu_ms_per_pod={
                name: round(1e3 * some / self._pods, 2)
                for name, some in sorted(used.items(), key=lambda pair: -pair[1])
                if 1e3 * some / self._pods >= 0.05
            },
            busy=round(sum(used.values()) / whole, 2),
            others=round(max(0.0, machine_used - sum(used.values())) / whole, 2),
            scheduling_ms=scheduling_ms,
            verb_ms=_means(verbs_before, verbs) if side == "hami" else {},
        )
        print(f"  {row.pods_per_s} pods/s", file=sys.stderr)
        return row, problems

    def _pod(self, side: Side, number: int) -> Document:
        return pod(side, number)

    async def _prepared(self, side: Side) -> Process:
        """Return the scheduler of a side, which has not been started."""
        url = self._cluster.url("scheduler") if side == "hami" else ""
        await self._plane.add_scheduler(url, backoff_s=1.0, dra=False)
        self._cluster.processes[SCHEDULER] = kube = self._plane.processes[SCHEDULER]
        return kube

    async def _begin(self, scheduler: Process) -> None:
        """Let the scheduler place the pods."""
        await anyio.lowlevel.checkpoint()
        scheduler.start()

    async def _exempt(self, side: Side) -> None:
        """Let the webhook exempt the namespace, or not; returns once that is in force."""
        namespace = f"/api/v1/namespaces/{NAMESPACE}"
        labels = {"metadata": {"labels": {"hami.io/webhook": EXEMPT[side]}}}
        merge = "application/merge-patch+json"
        await self._cluster.request("PATCH", namespace, labels, content_type=merge)
        await self._until_in_force(side)

    async def _until_in_force(self, side: Side) -> None:
        """Wait until the API server calls the webhook for new pods, or does not any more."""

        async def in_force() -> bool:
            path = f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All"
            made = await self._cluster.request("POST", path, self._pod(side, 0))
            return (MANAGED_LABEL in made["metadata"]["labels"]) == (side == "hami")

        await self._cluster.until("the webhook knows the namespace", in_force)

    async def _clear(self, side: Side) -> None:
        """Delete all pods and wait until no share is booked."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        before = (await self._metrics())["hami_scheduler_releases_total"]
        held = self._pods if side == "hami" else 0
        names = [f"{side}-{number}" for number in range(self._pods)]
        await each(
            names,
            lambda name: self._cluster.request("DELETE", f"{path}/{name}?gracePeriodSeconds=0"),
        )

        async def empty() -> bool:
            pods = await self._cluster.request("GET", f"{path}?limit=1")
            released = (await self._metrics())["hami_scheduler_releases_total"]
            return not pods["items"] and released >= before + held

        await self._cluster.until("every pod is gone and every share free", empty, limit_s=300)

    async def _problems(self, wanted: int) -> list[str]:
        """Shares that are lost or given twice."""
        records = [r for r in (await ledger_of(self._cluster)).values() if r.op != "release"]
        if len(records) != wanted:
            return [f"{wanted} pods are bound and {len(records)} shares are held"]
        return over_capacity((r.containers for r in records), await inventory_of(self._cluster))

    def _spent_s(self) -> dict[str, float]:
        """Processor seconds of each process so far."""
        pids = {name: process.pid for name, process in self._cluster.processes.items()}
        pids["nats"] = self._cluster.nats.pid
        found = {}
        for name, pid in pids.items():
            if pid is not None:
                times = psutil.Process(pid).cpu_times()
                found[name] = times.user + times.system
        times = psutil.Process().cpu_times()
        return {**found, "this bench": times.user + times.system}

    async def _metrics(self) -> dict[str, float]:
        """Samples of our scheduler, by name and verb."""
        async with self._cluster.session.get(
            f"{self._cluster.url('scheduler')}/metrics"
        ) as response:
            text = await response.text()
        found: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    found[f"{sample.name} {sample.labels.get('verb', '')}".rstrip()] += sample.value
        return found

    async def _verbs(self) -> dict[str, float]:
        name = "hami_scheduler_verb_seconds"
        return {k: v for k, v in (await self._metrics()).items() if k.startswith(name)}

    async def _scheduling_ms(self) -> float:
        """Mean of the serial part of kube-scheduler."""
        text = await self._plane.scheduler_metrics()
        name = "scheduler_scheduling_algorithm_duration_seconds"
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name in (f"{name}_sum", f"{name}_count")
        }
        return round(1e3 * found[f"{name}_sum"] / found[f"{name}_count"], 3)


class VolcanoBench(Bench):
    """An installation with Volcano's scheduler."""

    scheduler: ClassVar[str] = "vc-scheduler"

    def __init__(self, cluster: Installed, plane: RealPlane, *, nodes: int) -> None:
        super().__init__(cluster, plane, nodes=nodes)
        self._site = cluster
        self._names = [node_name(number) for number in range(nodes)]
        self._volcano = Volcano(cluster, build.volcano())
        self._admission: list[tuple[str, Document]] = []
        """Path and object of everything by which HAMi takes part in admission."""

    async def prepare(self, agents: PaperAgents) -> None:
        """Describe the nodes to Volcano too."""
        await super().prepare(agents)
        await describe_nodes(self._site, self._names)
        await self._volcano.start()
        await self._volcano.process.stop()
        for kind in ADMISSION:
            path = f"/apis/admissionregistration.k8s.io/v1/{kind}"
            for one in (await self._cluster.request("GET", path))["items"]:
                metadata = {"name": one["metadata"]["name"]}
                spec = {key: one[key] for key in ("spec", "webhooks") if key in one}
                self._admission.append((path, {"metadata": metadata, **spec}))

    def _pod(self, side: Side, number: int) -> Document:
        mine = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "8000"}
        document = pod(side, number, mine)
        document["metadata"]["annotations"] = {GROUP_NAME: NAME}
        document["spec"]["schedulerName"] = NAME
        return document

    async def _prepared(self, side: Side) -> Process:
        """Return Volcano, which runs; one configuration serves both sides.

        Its plugin knows the devices of a node that changed after the first session.
        """
        del side
        path = f"{VOLCANO_API}/namespaces/{NAMESPACE}/podgroups"
        await self._cluster.request("DELETE", path)
        self._volcano.process.start()
        await self._volcano.sessions(1)
        await describe_nodes(self._site, self._names)
        await self._volcano.sessions(1)
        return self._volcano.process

    async def _begin(self, scheduler: Process) -> None:
        """Create the PodGroup of the pods, before which Volcano ignores them."""
        del scheduler
        await self._volcano.group(NAME, members=1)

    async def _problems(self, wanted: int) -> list[str]:
        """Report pods whose devices Volcano has not chosen too."""
        found = (await self._cluster.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods"))[
            "items"
        ]
        lacking = [one for one in found if not one["metadata"].get("annotations", {}).get(POD_IDS)]
        problems = [f"{len(lacking)} pods have no devices of Volcano's"] if lacking else []
        return problems + await super()._problems(wanted)

    async def _exempt(self, side: Side) -> None:
        """Remove HAMi from admission, or add it."""
        for path, document in self._admission:
            own = f"{path}/{document['metadata']['name']}"
            is_there = await self._is_there(own)
            if side == "hami" and not is_there:
                await self._cluster.create(path, document)
            elif side == "plain" and is_there:
                await self._cluster.request("DELETE", own)
        await self._until_in_force(side)
        await anyio.sleep(_IN_FORCE_S)

    async def _is_there(self, path: str) -> bool:
        try:
            await self._cluster.request("GET", path)
        except NotFound:
            return False
        return True

    async def _scheduling_ms(self) -> float:
        await anyio.lowlevel.checkpoint()
        return 0.0


def _machine_s() -> float:
    """Processor seconds of all processes of this machine so far."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _who(entry: Audited) -> str:
    return f"{entry.user_agent.partition('/')[0]} {entry.verb} {entry.what}"


def _means(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Mean milliseconds of each verb between two readings."""
    found = {}
    for verb in ("filter", "prioritize", "bind", "admit"):
        total, count = (
            after.get(key, 0.0) - before.get(key, 0.0)
            for key in (
                f"hami_scheduler_verb_seconds_sum {verb}",
                f"hami_scheduler_verb_seconds_count {verb}",
            )
        )
        if count:
            found[verb] = round(1e3 * total / count, 2)
    return found


def summary(rows: list[Row], scheduler: str = SCHEDULER) -> Document:
    """Summarize the runs for each number of pods."""
    sizes = [_size(pods, rows) for pods in sorted({row.pods for row in rows})]
    writes = max(row.writes_per_pod for row in rows if row.side == "hami")
    targets = [
        {
            "what": f"pods/s of hami over plain, {size['pods']} pods",
            "least": WANTED_RATIO,
            "measured": size["ratio"],
        }
        for size in sizes
        if scheduler == SCHEDULER
    ]
    most_writes = MOST_WRITES_BY_SCHEDULER[scheduler]
    is_fast = all(one["measured"] >= one["least"] for one in targets)
    return {
        "sizes": sizes,
        "targets": [
            *targets,
            {"what": "API writes per pod without events", "most": most_writes, "measured": writes},
        ],
        "is_met": writes <= most_writes and is_fast,
    }


def _size(pods: int, rows: list[Row]) -> Document:
    """The turns with one number of pods."""
    by_side = {
        side: sorted((r for r in rows if (r.side, r.pods) == (side, pods)), key=lambda r: r.turn)
        for side in SIDES
    }
    ratios = [
        round(hami.pods_per_s / plain.pods_per_s, 3)
        for plain, hami in zip(by_side["plain"], by_side["hami"], strict=True)
    ]
    return {
        "pods": pods,
        "pods_per_s": {
            side: {
                "median": statistics.median(row.pods_per_s for row in some),
                "least": min(row.pods_per_s for row in some),
                "most": max(row.pods_per_s for row in some),
            }
            for side, some in by_side.items()
        },
        "ratio": round(statistics.median(ratios), 3),
        "ratios": ratios,
        "least": min(ratios),
        "most": max(ratios),
    }


@asynccontextmanager
async def prepared(scheduler: str, nodes: int, folder: Path) -> AsyncIterator[tuple[Bench, Bus]]:
    """A cluster with this scheduler, and a connection to its bus."""
    if scheduler == NAME:
        spec = structs.replace(
            INSTALLED, nodes=INSTALLED.nodes[:1], settings={**INSTALLED.settings, **SPEC.settings}
        )
        mine = write_overlay(folder)
        async with run_installed(folder / "s", spec, overlay=mine, before=_nothing) as site:
            # Nodes with kubelets are none of the bench's.
            await site.processes["kubelet"].stop()
            yield VolcanoBench(site, site.plane, nodes=nodes), site.bus
        return
    async with (
        run_cluster(SPEC, folder) as cluster,
        await nats.connect(cluster.nats.url, name="paper agents") as client,
    ):
        plane = cluster.plane
        if not isinstance(plane, RealPlane):
            raise TypeError(plane)
        yield Bench(cluster, plane, nodes=nodes), client


async def _nothing(site: Installed) -> None:
    """Agents are on paper."""
    del site
    await anyio.lowlevel.checkpoint()


async def measure(scheduler: str, nodes: int, sizes: list[int], turns: int) -> Document:
    """The whole document."""
    rows: list[Row] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tp-", ignore_cleanup_errors=True) as folder:
        async with (
            prepared(scheduler, nodes, Path(folder)) as (bench, client),
            anyio.create_task_group() as group,
        ):
            agents = PaperAgents(client)
            group.start_soon(agents.live)
            await bench.prepare(agents)
            idle_ms_per_s = await bench.idle()
            for pods in sizes:
                for turn in range(turns):
                    for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                        row, found = await bench.run(side, turn, pods)
                        rows.append(row)
                        problems += found
            group.cancel_scope.cancel()
    return {
        "bench": "throughput",
        "scheduler": scheduler,
        "machine": machine(),
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "kubernetes": Programs.from_environment().version(APISERVER),
        "nodes": nodes,
        "devices": nodes * DEVICES,
        "idle_ms_per_s": idle_ms_per_s,
        **summary(rows, scheduler),
        "problems": problems,
        "runs": msgspec.to_builtins(rows),
    }


def table(document: Document) -> str:
    """The same for people."""
    size = f"{document['nodes']} nodes x {DEVICES} devices"
    idle = ", ".join(f"{name} {ms:g}" for name, ms in document["idle_ms_per_s"].items())
    lines = [
        f"{size}, {document['kubernetes']}, {document['machine']}",
        f"load average at the end {document['load_average']}",
        f"processor ms a second without pods: {idle}",
        "",
        _HEADINGS,
    ]
    for row in document["runs"]:
        cpu = ", ".join(f"{name} {ms:g}" for name, ms in row["cpu_ms_per_pod"].items())
        lines.append(
            f"{row['pods']:<5} {row['turn'] + 1:<5} {row['side']:<6} {row['pods_per_s']:>6} "
            f"{row['writes_per_pod']:>11} {row['events_per_pod']:>11} {row['busy']:>5}"
            f" {row['others']:>7} {row['scheduling_ms']:>10}  {cpu}"
        )
    verbs = [row["verb_ms"] for row in document["runs"] if row["verb_ms"]]
    lines.append(f"mean ms in our service: {verbs}")
    for one in document["sizes"]:
        for side in SIDES:
            some = one["pods_per_s"][side]
            spread = f"{some['least']}..{some['most']}"
            lines.append(f"{one['pods']} pods, {side}: median {some['median']}, {spread} pods/s")
        lines.append(
            f"{one['pods']} pods: ratio {one['ratio']}, {one['least']}..{one['most']} in"
            f" {len(one['ratios'])} turns ({', '.join(map(str, one['ratios']))})"
        )
    lines += document["problems"]
    return "\n".join(lines)


def main() -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(prog="throughput", description=__doc__.split("\n\n")[0])
    parser.add_argument("--scheduler", choices=(SCHEDULER, NAME), default=SCHEDULER)
    parser.add_argument("--nodes", type=int, help="1000; for volcano 100")
    parser.add_argument(
        "--pods", default="", help="numbers of pods, each with its turns: 2000; 200"
    )
    parser.add_argument("--runs", type=int, default=3, help="turns of each side")
    parser.add_argument("--json", default="", metavar="FILE", help="- for standard output")
    options = parser.parse_args()
    os.environ[build.VARIABLE] = str(build.build())
    if options.scheduler == NAME:
        build.volcano()
    nodes, pods = SIZES[options.scheduler]
    sizes = [int(text) for text in (options.pods or pods).split(",")]
    document = anyio.run(measure, options.scheduler, options.nodes or nodes, sizes, options.runs)
    text = json.dumps(document, indent=1)
    if options.json == "-":
        print(text)
    else:
        if options.json:
            Path(options.json).write_text(f"{text}\n", encoding="utf-8")
        print(table(document))
    return 0 if document["is_met"] and not document["problems"] else 1


if __name__ == "__main__":
    sys.exit(main())
