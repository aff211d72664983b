# SPDX-License-Identifier: Apache-2.0
"""Measures the scheduler's answers, next to the same answers from plain loops.

Run as ``./dev bench scheduler --nodes 100,1000,5000 --json -``. One document with ``rows``; each
has ``nodes``, ``devices``, ``shares``, ``mix``, ``verb`` (filter, prioritize, bind), ``layer``,
``plans``, ``least_ms``, ``p10_ms``, ``p50_ms``, ``p99_ms``, ``cpu_p50_ms``, ``per_s``, ``rss_mib``.

``layer`` is ``core`` (from the text of the node names to the text of the answer, in one process),
``service`` (the service's own handler from the body of the request to the body of the answer, log
lines, tracing, quotas and records included, in a process of its own that also holds a pod and a
ledger record for each share), ``http`` (the same calls, timed by the client that makes them),
``echo`` (the same request to a handler on that server that decodes it and answers with its names;
asked in turn with ``http``) or ``plain-loop`` (the same verdicts over plain objects).

``plans`` is ``new`` where every call is about a pod of a new shape, so that no cached answer helps,
and ``kept`` where pods of one template arrive and, in ``core``, one is booked between two calls.
``filter`` is about pods without node preferences, so it names the best (``nodes_to_score``);
``prioritize`` is about pods with some, so it scores all that fit. ``cpu_p50_ms`` is the median
processor time of one call: on a shared machine it and ``least_ms`` are more reliable than the
median of the wall clock. Nodes are named in another order in each call. ``bind`` is the choice of
devices on one node.
"""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from resource import getpagesize

from hami_common.model.request import ContainerRequest, PodRequest
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.pick import pick
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from hami_scheduler.settings import Settings
from hami_scheduler.shell import extender_wire as wire
from tests.bench.scheduler_cluster import (
    MEMORY_MIB,
    OTHER,
    SIZES_MIB,
    booking,
    inventory,
    name_of,
)
from tests.bench.scheduler_server import asked_server
from tests.support import builders
from tests.support.oracle import Oracle

NODES_TO_SCORE = Settings(signing_key_file="unused").nodes_to_score


def one(seed: int) -> PodRequest:
    """One container, one device."""
    return builders.pod(builders.ask(mib=8_000 + seed, core=10))


def two_by_two(seed: int) -> PodRequest:
    """Two containers with two devices each."""
    return builders.pod(
        builders.container(builders.ask(2, mib=8_000 + seed, core=10), name="a"),
        builders.container(builders.ask(2, mib=16_000), name="b"),
    )


def init_sidecar_app(seed: int) -> PodRequest:
    """An init container, a sidecar and an application."""

    def part(name: str, mib: int) -> ContainerRequest:
        kind = {"i": "init", "s": "sidecar"}.get(name, "app")
        return ContainerRequest(
            name=name,
            kind=kind,  # type: ignore[arg-type] # one of the three kinds
            requests=(builders.ask(mib=mib),),
        )

    return builders.pod(part("i", 8_000 + seed), part("s", 2_000), part("a", 16_000))


def two_vendors(seed: int) -> PodRequest:
    """Two vendors in one container."""
    return builders.pod(
        builders.container(builders.ask(mib=8_000 + seed), builders.ask(mib=8_000, vendor=OTHER))
    )


def topology(seed: int) -> PodRequest:
    """Four well-connected devices."""
    return builders.pod(builders.ask(4, mib=8_000 + seed), device=("topology-aware", "binpack"))


def too_large(seed: int) -> PodRequest:
    """A pod that no node takes: every node is refused with a reason."""
    return builders.pod(builders.ask(mib=MEMORY_MIB + 1 + seed))


MIXES: dict[str, Callable[[int], PodRequest]] = {
    maker.__name__: maker
    for maker in (one, two_by_two, init_sidecar_app, two_vendors, topology, too_large)
}


@dataclass
class Cluster:
    """One cluster twice: as columns and as plain objects."""

    nodes: int
    table: DeviceTable
    oracle: Oracle
    names: list[str]
    uuids: list[tuple[str, str, str]]
    """(node, vendor, UUID)."""
    shares: int


def build(nodes: int, seed: int) -> Cluster:
    """``nodes`` nodes with one share on every device."""
    chance = random.Random(seed)
    cluster = Cluster(nodes, DeviceTable(), Oracle(), [], [], 0)
    for number in range(nodes):
        cluster.names.append(name_of(number))
        for message in inventory(number):
            cluster.table.upsert_node(message)
            cluster.oracle.upsert_node(message)
            cluster.uuids += [(message.node, message.vendor, d.uuid) for d in message.devices]
    for node, vendor, uuid in cluster.uuids:
        shares = booking(vendor, uuid, chance.choice(SIZES_MIB))
        cluster.table.book(node, shares)
        cluster.oracle.book(node, shares)
        cluster.shares += 1
    return cluster


def names_text(names: Sequence[str], chance: random.Random) -> bytes:
    """The names in any order, as a JSON array in kube-scheduler's request."""
    order = list(names)
    chance.shuffle(order)
    return json.dumps(order, separators=(",", ":")).encode()


def named(text: bytes) -> wire.Candidates:
    """The names as they are cut out of a request."""
    return wire.Candidates(names=NodeNames(bytes(bytearray(text[1:]))))


def measure(
    calls: int, prepare: Callable[[int], Callable[[], object]], *, warm_up: int = 3
) -> tuple[list[float], list[float]]:
    """(wall, processor) milliseconds of each call; ``prepare`` and the first are not counted."""
    wall: list[float] = []
    processor: list[float] = []
    for number in range(-warm_up, calls):
        call = prepare(number)
        start, cpu_start = time.perf_counter(), time.thread_time()
        call()
        cpu_end, end = time.thread_time(), time.perf_counter()
        if number >= 0:
            wall.append((end - start) * 1e3)
            processor.append((cpu_end - cpu_start) * 1e3)
    return wall, processor


def row(
    cluster: Cluster,
    *,
    mix: str,
    verb: str,
    layer: str,
    plans: str,
    times: tuple[list[float], list[float]],
    memory_mib: int | None = None,
) -> dict[str, object]:
    """One line of the result."""
    wall, processor = (sorted(some) for some in times)
    p50 = statistics.median(wall)
    return {
        "nodes": cluster.nodes,
        "devices": len(cluster.uuids),
        "shares": cluster.shares,
        "mix": mix,
        "verb": verb,
        "layer": layer,
        "plans": plans,
        "calls": len(wall),
        "least_ms": round(wall[0], 4),
        "p10_ms": round(wall[len(wall) // 10], 4),
        "p50_ms": round(p50, 4),
        "p99_ms": round(wall[min(len(wall) - 1, int(len(wall) * 0.99))], 4),
        "cpu_p50_ms": round(statistics.median(processor), 4) if processor else None,
        "per_s": round(1e3 / p50, 1),
        "rss_mib": rss_mib() if memory_mib is None else memory_mib,
    }


def rss_mib() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * getpagesize() >> 20


def core_rows(cluster: Cluster, calls: int) -> Iterator[dict[str, object]]:
    """The columns."""
    chance = random.Random(7)
    verdicts = Verdicts(cluster.table)
    for mix, make in MIXES.items():
        for plans in ("new", "kept"):
            calling = _Calling(cluster, verdicts, make, chance, is_new=plans == "new")
            for verb, prepare in (
                ("filter", calling.filter),
                ("prioritize", calling.prioritize),
                ("bind", calling.bind),
            ):
                yield row(
                    cluster,
                    mix=mix,
                    verb=verb,
                    layer="core",
                    plans=plans,
                    times=measure(calls, prepare),
                )


@dataclass
class _Calling:
    """Prepares calls of one mix."""

    cluster: Cluster
    verdicts: Verdicts
    make: Callable[[int], PodRequest]
    chance: random.Random
    is_new: bool

    def request(self, number: int) -> PodRequest:
        """Return a pod; a share was booked since the last one of its template."""
        if self.is_new:
            return self.make(number + 10)
        node, vendor, uuid = self.chance.choice(self.cluster.uuids)
        shares = booking(vendor, uuid, 1)
        self.cluster.table.book(node, shares)
        self.cluster.table.unbook(node, shares)
        return self.make(0)

    def filter(self, number: int) -> Callable[[], object]:
        """Filter: the nodes, and the reasons of the others."""
        wanted = self.request(number)
        candidates = named(names_text(self.cluster.names, self.chance))
        return lambda: self.filtered(wanted, candidates)

    def filtered(self, wanted: PodRequest, candidates: wire.Candidates) -> bytes | bytearray:
        """The answer of filter."""
        filtered = self.verdicts.filter(wanted, candidates.names)
        left = filtered.left
        if len(left) > NODES_TO_SCORE:
            left = self.verdicts.shortlist(wanted, left, NODES_TO_SCORE)
        if len(left):
            filtered.classes()
            return wire.encode_filter(candidates, left)
        failed = [(refusal.text, places) for refusal, places in filtered.groups()]
        return wire.encode_filter(candidates, left, failed)

    def prioritize(self, number: int) -> Callable[[], object]:
        """Score all fitting nodes, as for a pod that prefers some of them."""
        wanted = self.request(number)
        candidates = named(names_text(self.cluster.names, self.chance))
        self.filtered(wanted, candidates)
        names = named(self.verdicts.filter(wanted, candidates.names).left.json()).names
        return lambda: self.prioritized(wanted, names)

    def prioritized(self, wanted: PodRequest, names: NodeNames) -> bytes:
        """The answer of prioritize."""
        scored = self.verdicts.prioritize(wanted, names)
        return wire.encode_priorities(names, scored.priorities(highest=wire.MAX_PRIORITY))

    def bind(self, number: int) -> Callable[[], object]:
        """Choose devices of one node."""
        wanted, node = self.request(number), self.chance.choice(self.cluster.names)
        return lambda: pick(self.cluster.table, wanted, node)


def loop_rows(cluster: Cluster, calls: int) -> Iterator[dict[str, object]]:
    """Plain loops over plain objects, and a check that both give the same answer."""
    verdicts = Verdicts(cluster.table)
    oracle = cluster.oracle
    for mix, make in MIXES.items():

        def filter_(
            number: int, *, make: Callable[[int], PodRequest] = make
        ) -> Callable[[], object]:
            return lambda: {n: oracle.code(make(number + 10), n) for n in cluster.names}

        def prioritize(
            number: int, *, make: Callable[[int], PodRequest] = make
        ) -> Callable[[], object]:
            return lambda: [oracle.score(make(number + 10), n) for n in cluster.names]

        some = make(3)
        feasible = [n for n in cluster.names if oracle.code(some, n) is None]
        if verdicts.filter(some, cluster.names).feasible != feasible:
            raise SystemExit(f"columns and loops disagree about {mix}")
        for verb, prepare in (("filter", filter_), ("prioritize", prioritize)):
            yield row(
                cluster,
                mix=mix,
                verb=verb,
                layer="plain-loop",
                plans="new",
                times=measure(calls, prepare, warm_up=0),
            )


def http_rows(cluster: Cluster, calls: int) -> Iterator[dict[str, object]]:
    """The service over HTTP, and on the same server a handler that only decodes and answers."""
    chance = random.Random(9)
    with asked_server(cluster.nodes) as server:
        for mix in server.mixes:
            for plans in ("new", "kept"):
                times: dict[tuple[str, str], list[float]] = {}
                for number in range(-3, calls):
                    seed = number + 10 if plans == "new" else 0
                    text = names_text(cluster.names, chance)
                    for verb in ("filter", "prioritize"):
                        pod = server.pod(mix, seed, prefers=verb == "prioritize")
                        if verb == "prioritize":  # of all that fit, which its filter has named
                            body = b'{"Pod":%b,"Nodes":null,"NodeNames":%b}' % (pod, text)
                            found = json.loads(server.ask("/filter", body).content)["NodeNames"]
                            text = json.dumps(found, separators=(",", ":")).encode()
                        body = b'{"Pod":%b,"Nodes":null,"NodeNames":%b}' % (pod, text)
                        for layer in ("echo", "http"):
                            path = "/echo" if layer == "echo" else f"/{verb}"
                            asked = server.ask(path, body)
                            if number >= 0:
                                times.setdefault((verb, layer), []).append(asked.spent_ms)
                            if number >= 0 and layer == "http":
                                inside = times.setdefault((verb, "service"), [])
                                inside.append(asked.handler_ms)
                for (verb, layer), spent in times.items():
                    yield row(
                        cluster,
                        mix=mix,
                        verb=verb,
                        layer=layer,
                        plans=plans,
                        times=(spent, []),
                        memory_mib=server.rss_mib(),
                    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--nodes", default="100,1000,5000", help="numbers of nodes")
    parser.add_argument("--calls", type=int, default=100, help="calls per row")
    parser.add_argument("--loop-calls", type=int, default=1, help="calls per row of plain loops")
    parser.add_argument("--loop-nodes", type=int, default=1000, help="most nodes for plain loops")
    parser.add_argument("--http-calls", type=int, default=50, help="calls per row over HTTP")
    parser.add_argument("--json", default="-", help="where to write the document")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for nodes in (int(text) for text in options.nodes.split(",")):
        cluster = build(nodes, seed=nodes)
        gc.collect()
        gc.freeze()
        for result in chain(
            core_rows(cluster, options.calls),
            http_rows(cluster, options.http_calls) if options.http_calls else (),
            loop_rows(cluster, options.loop_calls)
            if options.loop_calls and nodes <= options.loop_nodes
            else (),
        ):
            rows.append(result)
            print(json.dumps(result), file=sys.stderr)
    load = [round(value, 1) for value in os.getloadavg()]
    document = json.dumps(
        {"bench": "scheduler", "machine": machine(), "load_average": load, "rows": rows}, indent=1
    )
    if options.json == "-":
        print(document)
    else:
        Path(options.json).write_text(document + "\n", encoding="utf-8")


def machine() -> str:
    """The processor, in words."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0] if models else platform.machine()}"


if __name__ == "__main__":
    main()
