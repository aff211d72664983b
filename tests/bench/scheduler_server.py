# SPDX-License-Identifier: Apache-2.0
"""The scheduler's HTTP server with a full cluster in it, as a process that a benchmark asks.

Everything is the service's own: handlers, state, ledger, queues, log lines. In the place of NATS
and Kubernetes stand empty ones in memory, because filter and prioritize talk to neither; the
cluster is put in as the feeds would. ``/echo`` is the measure: it decodes the request and answers
with its names.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from resource import getpagesize
from typing import Any, NamedTuple

import anyio
import msgspec
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from hami_common.bus import subjects
from hami_common.errors import HamiError
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.model.placement import Placement
from hami_common.pods import annotations
from hami_common.pods.podview import PodView
from hami_common.pods.signing import SignedPlacement, Signer, Verifier
from hami_common.ports import Outgoing
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.httpd import (
    Handler,
    HttpApp,
    Request,
    Response,
    StreamedResponse,
    serve,
)
from hami_common.runtime.telemetry import Tracing, configure_logging
from hami_common.vendors.catalog import Catalog
from hami_core.ledger.podfacts import PodReader
from hami_core.ledger.stimuli import FeedSynced, RecordSeen, Repaired, StateSeen
from hami_scheduler.app import Keys, Scheduler, World
from hami_scheduler.settings import Settings
from hami_scheduler.shell.extender_wire import ExtenderArgs
from hami_scheduler.shell.state import PARTS
from tests.bench.scheduler_cluster import OTHER, SIZES_MIB, booking, inventory
from tests.support.memorybus import MemoryBucket, MemoryBus, MemoryPublisher, Published
from tests.unit.scheduler.shell.fakekube import FakeKube

Obj = dict[str, Any]

START_S = 180.0
SPENT = "x-handler-ms"
"""Header of an answer: time that the handler took."""
_CHUNK_BYTES = 1 << 20


# --- the server process ---------------------------------------------------------------------------


class _Forgetful(MemoryPublisher):
    """Takes every message and keeps none, so that memory is the scheduler's."""

    async def publish_stored(self, *_: object, **__: object) -> int:
        return 0

    async def publish_all_stored(self, messages: Sequence[Outgoing]) -> list[int | HamiError]:
        return [0] * len(messages)


def make(nodes: int) -> Scheduler:
    """A scheduler in sync with a cluster of ``nodes`` nodes, a running pod on every device."""
    bus, signer = MemoryBus(clock=SystemClock()), Signer.generate()
    verifier = Verifier.from_pems([signer.public_pem()])
    ids = count()
    scheduler = Scheduler(
        settings=Settings(signing_key_file="unused"),
        world=World(
            devices=MemoryBucket(bus, subjects.DEVICES_BUCKET),
            records=MemoryBucket(bus, subjects.ALLOC_BUCKET),
            states=MemoryBucket(bus, subjects.STATE_BUCKET),
            policies=MemoryBucket(bus, subjects.POLICIES_BUCKET),
            publisher=_Forgetful(bus),
            subscribe=_no_news,
            kube=FakeKube(),
            clock=SystemClock(),
        ),
        keys=Keys(signer=signer, verifier=verifier),
        registry=CollectorRegistry(),
        tracing=Tracing(service="scheduler"),
        writer="bench",
        ids=lambda: f"id-{next(ids)}",
    )
    state, chance, seq = scheduler.state, random.Random(nodes), 0
    reader = PodReader(catalog=Catalog.from_settings(), verifier=verifier)
    now_s = state.clock.now_s()
    for number in range(nodes):
        for message in inventory(number):
            state.table.upsert_node(message)
            for device in message.devices:
                seq += 1
                shares = booking(message.vendor, device.uuid, chance.choice(SIZES_MIB))
                record = AllocationRecord(
                    op="reserve",
                    allocation_id=f"{seq:032x}",
                    node=message.node,
                    pod_uid=f"{seq:08x}-0000-4000-8000-000000000000",
                    namespace=f"team-{seq % 50}",
                    pod=f"worker-{seq}",
                    containers=shares,
                    time_s=now_s,
                    lease_s=30.0,
                    writer="bench",
                )
                running = StateRecord(
                    state="running",
                    allocation_id=record.allocation_id,
                    node=record.node,
                    pod_uid=record.pod_uid,
                    namespace=record.namespace,
                    pod=record.pod,
                    ledger_seq=seq,
                )
                state.tell(RecordSeen(seq=seq, record=record, now_s=now_s))
                state.tell(StateSeen(seq=seq, state=running, now_s=now_s))
                state.pods.put(reader.facts_of(_running_pod(record, seq, signer)))
    state.tell(FeedSynced(now_s=now_s))
    state.tell(Repaired(now_s=now_s))
    for part in PARTS:
        state.delivered(part)
    state.require_complete()
    return scheduler


@asynccontextmanager
async def _no_news(subject: str) -> AsyncIterator[AsyncIterator[Published]]:
    """A subscription that never delivers."""
    del subject
    send, receive = anyio.create_memory_object_stream[Published](1)
    with send, receive:
        yield aiter(receive)


def _running_pod(record: AllocationRecord, seq: int, signer: Signer) -> PodView:
    """The pod of a record, as the watch delivers it."""
    signed = SignedPlacement(
        pod_uid=record.pod_uid,
        namespace=record.namespace,
        pod=record.pod,
        allocation_id=record.allocation_id,
        ledger_seq=seq,
        placement=Placement(node=record.node, containers=record.containers),
    )
    return msgspec.convert(
        {
            "metadata": {
                "name": record.pod,
                "namespace": record.namespace,
                "uid": record.pod_uid,
                "resourceVersion": str(seq),
                "labels": {annotations.MANAGED_LABEL: "true"},
                "annotations": {annotations.ALLOCATION: signer.sign(signed)},
            },
            "spec": {"nodeName": record.node, "containers": [{"name": "main"}]},
            "status": {"phase": "Running"},
        },
        PodView,
    )


async def _echo(request: Request) -> Response:
    """Decodes the request and answers with its names."""
    args = _args_decoder.decode(request.body)
    return Response(body=_encoder.encode({"NodeNames": args.node_names}))


_args_decoder = msgspec.json.Decoder(ExtenderArgs)
_encoder = msgspec.json.Encoder()


def _timed(handler: Handler) -> Handler:
    """The same, with its duration in a header."""

    async def timed(request: Request) -> Response | StreamedResponse:
        begin = time.perf_counter()
        answer = await handler(request)
        spent_ms = (time.perf_counter() - begin) * 1e3
        return replace(answer, headers={SPENT: f"{spent_ms:.4f}"})

    return timed


async def _run(nodes: int) -> None:
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        configure_logging(service="scheduler", stream=nowhere)
        scheduler = make(nodes)
        routes = {at: _timed(handler) for at, handler in scheduler.extender.routes().items()}
        app = HttpApp(
            {**routes, ("POST", "/echo"): _echo},
            registry=CollectorRegistry(),
            ready=lambda: True,
        )
        async with anyio.create_task_group() as group:
            send = scheduler._publishing.send  # noqa: SLF001 - the rest of its tasks is not wanted
            group.start_soon(scheduler.decisions.work_together, send, 0.1, 256)
            port = await group.start(serve, app, "127.0.0.1", 0)
            print(port, flush=True)
            await anyio.to_thread.run_sync(sys.stdin.read)  # until the client has ended
            group.cancel_scope.cancel()


# --- the client -----------------------------------------------------------------------------------


_NO_LIMITS: Mapping[str, str] = {}
_OTHER_LIMITS = {
    f"{OTHER}.com/dcunum": "1",
    f"{OTHER}.com/dcumem": "8000",
    f"{OTHER}.com/dcucores": "10",
}


def _container(
    name: str, gpus: int, mib: int, *, others: Mapping[str, str] = _NO_LIMITS, **more: object
) -> Obj:
    own = {"cpu": "4", "nvidia.com/gpu": str(gpus), "nvidia.com/gpumem": str(mib)}
    limits = {**own, **others}
    return {
        "name": name,
        "image": "registry.example/team/worker:1",
        "command": ["python", "-m", "train"],
        "env": [{"name": f"SETTING_{i}", "value": f"value-{i}"} for i in range(10)],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": f"hami-limits-{name}", "mountPath": "/etc/hami", "readOnly": True},
        ],
        **more,
    }


def _asking_pod(mix: str, seed: int) -> Obj:
    """A pod of a mix, as kube-scheduler sends it: the whole document."""
    parts: dict[str, tuple[list[Obj], list[Obj]]] = {
        "one": ([], [_container("main", 1, 8_000 + seed)]),
        "two_by_two": ([], [_container("a", 2, 8_000 + seed), _container("b", 2, 16_000)]),
        "init_sidecar_app": (
            [
                _container("i", 1, 8_000 + seed),
                _container("s", 1, 2_000, restartPolicy="Always"),
            ],
            [_container("a", 1, 16_000)],
        ),
        "two_vendors": ([], [_container("main", 1, 8_000 + seed, others=_OTHER_LIMITS)]),
        "topology": ([], [_container("main", 4, 8_000 + seed)]),
        "too_large": ([], [_container("main", 1, 81_560 + seed)]),
    }
    policy = {annotations.DEVICE_POLICY: "topology-aware"} if mix == "topology" else {}
    init, containers = parts[mix]
    managed: Obj = {f"f:field-{i}": {"f:value": {}, "f:other": {}} for i in range(40)}
    return {
        "metadata": {
            "name": f"pod-{seed}",
            "namespace": "team-1",
            "uid": f"{seed:08x}-1111-4000-8000-000000000000",
            "labels": {annotations.MANAGED_LABEL: "true", "app": "train"},
            "annotations": policy,
            "managedFields": [{"manager": "kubectl", "fieldsV1": managed}],
        },
        "spec": {
            "schedulerName": "hami-scheduler",
            "initContainers": init,
            "containers": containers,
            "volumes": [
                {"name": "data", "emptyDir": {}},
                *({"name": f"hami-limits-{c['name']}"} for c in (*init, *containers)),
            ],
            "tolerations": [{"key": f"pool-{i}", "operator": "Exists"} for i in range(5)],
        },
        "status": {"phase": "Pending"},
    }


class Asked(NamedTuple):
    """One call."""

    spent_ms: float
    """Time until the whole answer arrived."""
    handler_ms: float
    """Time in the service's handler; 0 where the header is missing."""
    content: bytes


class AskedServer:
    """The process, and one connection to it."""

    mixes = ("one", "two_by_two", "init_sidecar_app", "two_vendors", "topology", "too_large")

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid = pid
        self._connection = connection

    def pod(self, mix: str, seed: int, *, prefers: bool = False) -> bytes:
        """A pod's document; with ``prefers`` it prefers some nodes."""
        document = _asking_pod(mix, seed)
        if prefers:
            term = {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}
            wish = [{"weight": 1, "preference": term}]
            document["spec"]["affinity"] = {
                "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": wish}
            }
        return json.dumps(document, separators=(",", ":")).encode()

    def ask(self, path: str, body: bytes) -> Asked:
        """Call and wait for the answer."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        begin = time.perf_counter()
        self._connection.sendall(head + body)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self._connection.recv(_CHUNK_BYTES)
        top, _, content = answer.partition(b"\r\n\r\n")
        lines = top.decode().lower().split("\r\n")
        if " 200 " not in lines[0] + " ":
            raise SystemExit(f"{path}: {lines[0]}")
        length = next(int(line[15:]) for line in lines if line.startswith("content-length:"))
        pieces = [content]
        left = length - len(content)
        while left:
            pieces.append(self._connection.recv(_CHUNK_BYTES))
            left -= len(pieces[-1])
        told = next((line for line in lines if line.startswith(SPENT)), "")
        spent_ms = (time.perf_counter() - begin) * 1e3
        return Asked(spent_ms, float(told.partition(":")[2] or 0), b"".join(pieces))

    def rss_mib(self) -> int:
        """Resident memory of the process."""
        text = Path(f"/proc/{self._pid}/statm").read_text(encoding="ascii")
        return int(text.split()[1]) * getpagesize() >> 20


@contextmanager
def asked_server(nodes: int) -> Iterator[AskedServer]:
    """Start the process; it ends with the block."""
    command = [sys.executable, "-m", "tests.bench.scheduler_server", str(nodes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start")
        with socket.create_connection(("127.0.0.1", int(line)), timeout=START_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield AskedServer(process.pid, connection)
    finally:
        process.communicate()


if __name__ == "__main__":
    anyio.run(_run, int(sys.argv[1]))
