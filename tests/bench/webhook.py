# SPDX-License-Identifier: Apache-2.0
"""Admission under a steady load beside an HTTPS server that does nothing, in one run.

Run as ``./dev bench webhook [--rate 200] [--seconds 5] [--turns 3] [--json -]``. Both servers are
processes of their own with certificates of one authority. They are asked in turns, each turn at
``rate`` reviews per second, whatever the answers take (open loop): a latency counts from the moment
at which its request was due. The empty server reads the review and answers with a fixed one.

One row per side and turn: ``side`` (``webhook``, ``empty``), ``turn``, ``p50_ms``, ``p99_ms``,
``max_ms``, ``late_ms`` (p99 of the client's own delay: above a few milliseconds the machine was too
busy for a result) and ``failed``. ``ratio_p99`` is the median over turns of webhook over empty;
``is_met`` is true when it is at most ``RATIO_MOST``.
"""

import argparse
import json
import ssl
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import msgspec
from aiohttp import web
from msgspec import Struct

from hami_sim.certs import CertificateAuthority
from hami_sim.ports import free_port
from hami_sim.process import Process
from tests.support.admission import asking_pod, review

HOST = "127.0.0.1"
RATIO_MOST = 3.0
SIDES = ("webhook", "empty")
START_S = 30.0
_EMPTY = msgspec.json.encode(
    {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": "11111111-2222-3333-4444-555555555555", "allowed": True},
    }
)


class Row(Struct, frozen=True, kw_only=True):
    """One turn of one side."""

    side: str
    turn: int
    requests: int
    failed: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    late_ms: float


def serve_nothing(directory: Path, port: int) -> None:
    """Run the empty server; for a process of its own."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=_EMPTY, content_type="application/json")

    app = web.Application()
    app.router.add_post("/mutate", answer)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    web.run_app(app, host=HOST, port=port, ssl_context=context, print=None, access_log=None)


@asynccontextmanager
async def servers(directory: Path) -> AsyncIterator[tuple[dict[str, str], ssl.SSLContext]]:
    """URLs by side, while both processes run."""
    authority = CertificateAuthority()
    certificate, key, _ = authority.issue_files(directory, [HOST])
    ports = {side: free_port() for side in SIDES}
    python = sys.executable
    settings = {
        "nats_urls": "[]",
        "tls_port": str(ports["webhook"]),
        "tls_cert_file": str(certificate),
        "tls_key_file": str(key),
    }
    flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    processes = (
        Process("webhook", [python, "-m", "hami_webhook", *flags], log=directory / "webhook.log"),
        Process(
            "empty",
            [python, "-m", "tests.bench.webhook", "--serve", str(directory), str(ports["empty"])],
            log=directory / "empty.log",
        ),
    )
    try:
        for process in processes:
            process.start()
        for port in ports.values():
            with anyio.fail_after(START_S):
                while not await _listens(port):
                    await anyio.sleep(0.1)
        trusted = ssl.create_default_context(cadata=authority.pem.decode())
        yield {side: f"https://{HOST}:{port}/mutate" for side, port in ports.items()}, trusted
    finally:
        for process in processes:
            await process.stop()


async def _listens(port: int) -> bool:
    try:
        stream = await anyio.connect_tcp(HOST, port)
    except OSError:
        return False
    await stream.aclose()
    return True


async def turn_of(
    side: str, url: str, http: aiohttp.ClientSession, *, rate: float, seconds: float, turn: int
) -> Row:
    """One turn of steady load."""
    body = msgspec.json.encode(review(asking_pod("train", gpu="1", gpumem="3000", gpucores="30")))
    headers = {"Content-Type": "application/json"}
    took_s: list[float] = []
    late_s: list[float] = []
    failed = 0

    async def ask(due_s: float) -> None:
        nonlocal failed
        async with http.post(url, data=body, headers=headers) as answer:
            text = await answer.read()
        took_s.append(anyio.current_time() - due_s)
        if answer.status != 200 or b'"allowed":true' not in text:
            failed += 1

    count = int(rate * seconds)
    async with anyio.create_task_group() as group:
        began_s = anyio.current_time()
        for number in range(count):
            due_s = began_s + number / rate
            await anyio.sleep_until(due_s)
            late_s.append(anyio.current_time() - due_s)
            group.start_soon(ask, due_s)
    took_s.sort()
    late_s.sort()
    return Row(
        side=side,
        turn=turn,
        requests=count,
        failed=failed,
        p50_ms=round(1000 * took_s[count // 2], 2),
        p99_ms=round(1000 * took_s[int(count * 0.99)], 2),
        max_ms=round(1000 * took_s[-1], 2),
        late_ms=round(1000 * late_s[int(count * 0.99)], 2),
    )


async def measure(*, rate: float, seconds: float, turns: int) -> list[Row]:
    """All turns, the sides one after the other, after a second that does not count."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        async with servers(Path(name)) as (urls, trusted):
            connector = aiohttp.TCPConnector(ssl=trusted, limit=0)
            async with aiohttp.ClientSession(connector=connector) as http:
                for side, url in urls.items():
                    await turn_of(side, url, http, rate=rate, seconds=1.0, turn=0)
                for turn in range(1, turns + 1):
                    order = SIDES if turn % 2 else SIDES[::-1]
                    for side in order:
                        row = await turn_of(
                            side, urls[side], http, rate=rate, seconds=seconds, turn=turn
                        )
                        rows.append(row)
    return rows


def main(arguments: Sequence[str]) -> int:
    """Print the table or the document; 1 when a review failed."""
    if arguments[:1] == ["--serve"]:
        serve_nothing(Path(arguments[1]), int(arguments[2]))
        return 0
    parser = argparse.ArgumentParser(prog="./dev bench webhook")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    chosen = parser.parse_args(arguments)
    rows = anyio.run(lambda: measure(rate=chosen.rate, seconds=chosen.seconds, turns=chosen.turns))
    p99_ms = {side: [row.p99_ms for row in rows if row.side == side] for side in SIDES}
    ratios = [ours / empty for ours, empty in zip(*p99_ms.values(), strict=True)]
    ratio = round(statistics.median(ratios), 2)
    document = {
        "rate_per_s": chosen.rate,
        "rows": msgspec.to_builtins(rows),
        "ratios_p99": [round(one, 2) for one in ratios],
        "ratio_p99": ratio,
        "is_met": ratio <= RATIO_MOST,
    }
    text = json.dumps(document, indent=2)
    if chosen.json and chosen.json != "-":
        Path(chosen.json).write_text(f"{text}\n", encoding="utf-8")
    elif chosen.json:
        print(text)
    if chosen.json != "-":
        print(f"{'side':<8} {'turn':>4} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} {'late ms':>8}")
        for row in rows:
            print(
                f"{row.side:<8} {row.turn:>4} {row.p50_ms:>8} {row.p99_ms:>8} {row.max_ms:>8}"
                f" {row.late_ms:>8}"
            )
        print(f"p99 of webhook over empty: {ratio} (at most {RATIO_MOST:g}: {document['is_met']})")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
