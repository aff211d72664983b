# SPDX-License-Identifier: Apache-2.0
"""Serves the snapshot, and answers what-if questions about it.

An answer is computed on a copy of the state, in a thread of its own and one at a time, so that
decisions continue meanwhile; it ends after ``whatif_s``, a comparison of policies after
``whatif_policy_s``. Node selectors, affinity, taints and cordons are read from the API server for
each question about the present; a comparison of policies reads the event stream. Seconds
throughout.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TypeVar

import anyio.to_thread
import msgspec
from msgspec import Struct

from hami_common.errors import RequestInvalid, SettingsInvalid, TooManyRequests, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.ports import KubeApi
from hami_common.runtime.httpd import Handler, Request, Response, json_response
from hami_common.runtime.openapi import Operation
from hami_common.vendors.catalog import Catalog
from hami_core.core import Core
from hami_core.planning.eligible import Document
from hami_core.replay import snapshot
from hami_core.replay.arrivals import history_of
from hami_core.replay.compare import (
    PLACEMENTS_MOST,
    PolicyComparison,
    PolicyQuestion,
    compare,
)
from hami_core.replay.questions import (
    Cluster,
    Drained,
    DrainQuestion,
    Scaled,
    ScaleQuestion,
    Simulated,
    SimulateQuestion,
    drained,
    scaled,
    simulated,
)
from hami_core.replay.snapshot import Snapshot
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.pastevents import PastEvents, decoded
from hami_scheduler.shell.podapi import LIST_TIMEOUTS, MANAGED, PODS
from hami_scheduler.shell.quota import QuotaKeeper
from hami_scheduler.shell.state import State

HOUR_S = 3600.0
NODES = "/api/v1/nodes"
WITHOUT_NODE = "spec.nodeName="
"""Field selector of pods that wait for a node."""

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/v1/snapshot",
        name="snapshot",
        text="Devices and allocations, for simulation and replay.",
        answer=Snapshot,
    ),
    Operation(
        path="/v1/whatif/simulate",
        name="simulate",
        method="post",
        text="Place pods one after the other on a copy of the present state, each booked before "
        "the next. Nothing is reserved.",
        body=SimulateQuestion,
        answer=Simulated,
        errors={429: "The replica computes another answer."},
    ),
    Operation(
        path="/v1/whatif/scale",
        name="scale",
        method="post",
        text="Find the least number of nodes like a template with which no pod waits for devices.",
        body=ScaleQuestion,
        answer=Scaled,
        errors={429: "The replica computes another answer."},
    ),
    Operation(
        path="/v1/whatif/drain",
        name="drain",
        method="post",
        text="Place the pods of a node on the other nodes, on a copy of the present state: which "
        "would start elsewhere and where, which would not and why. Nothing is evicted.",
        body=DrainQuestion,
        answer=Drained,
        errors={429: "The replica computes another answer."},
    ),
    Operation(
        path="/v1/whatif/policy",
        name="policy",
        method="post",
        text="Place the pods that arrived in the last hours again under other policies, and "
        "compare waits and packing with the record. Nothing is moved.",
        body=PolicyQuestion,
        answer=PolicyComparison,
        errors={429: "The replica computes another answer."},
    ),
)

Question = TypeVar("Question", bound=Struct)

_log = logging.getLogger(__name__)


class WhatIf:
    """Handlers of the operations."""

    def __init__(
        self,
        *,
        state: State,
        quota: QuotaKeeper,
        kube: KubeApi,
        catalog: Catalog,
        past: PastEvents,
        settings: Settings,
        writer: str,
    ) -> None:
        """Snapshots name ``writer``."""
        self._state = state
        self._core: Core = state.core
        self._quota = quota
        self._kube = kube
        self._catalog = catalog
        self._past = past
        self._settings = settings
        self._writer = writer
        self._is_busy = False

    def use(self, settings: Settings) -> None:
        """Apply changed settings."""
        self._settings = settings

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        return {
            (operation.method.upper(), operation.path): getattr(self, operation.name)
            for operation in OPERATIONS
        }

    async def snapshot(self, request: Request) -> Response:
        """See ``OPERATIONS``, as for all methods that follow."""
        del request
        return json_response(await self.take())

    async def simulate(self, request: Request) -> Response:
        return await self._answer(request, SimulateQuestion, simulated)

    async def scale(self, request: Request) -> Response:
        return await self._answer(request, ScaleQuestion, scaled)

    async def drain(self, request: Request) -> Response:
        return await self._answer(request, DrainQuestion, drained)

    async def policy(self, request: Request) -> Response:
        with self._alone(request):
            question = await anyio.to_thread.run_sync(_decoded, request.body, PolicyQuestion)
            _check_prices(question)
            limit_s = self._settings.whatif_policy_s
            check = _deadline(limit_s, "hours", "ask for fewer hours")
            await self._state.wait_complete(wait_s=self._settings.sync_wait_s)
            until_s = self._state.clock.now_s()
            from_s = until_s - question.hours * HOUR_S
            events = await self._past(from_s, limit_s)
            present = tuple(self._core.inventory.devices())
            live = tuple(holding.record for holding in self._state.ledger.holdings())

            def computed() -> bytes:
                records, puts = decoded(events)
                check()
                history = history_of(
                    records,
                    puts,
                    present=present,
                    live=live,
                    from_s=from_s,
                    until_s=until_s,
                    arrivals_most=PLACEMENTS_MOST // len(question.policies),
                )
                policies = [one.over(self._settings.policy) for one in question.policies]
                compared = compare(history, policies, check=check, prices=question.prices)
                return msgspec.json.encode(compared)

            return Response(body=await anyio.to_thread.run_sync(computed))

    async def _answer(
        self,
        request: Request,
        kind: type[SimulateQuestion | ScaleQuestion | DrainQuestion],
        answer: Callable[..., Struct],
    ) -> Response:
        with self._alone(request):
            question = await anyio.to_thread.run_sync(_decoded, request.body, kind)
            nodes, pods = await self._pages(_selectors(question))
            taken = await self.take()
            body = await anyio.to_thread.run_sync(
                partial(self._computed, answer, taken, question, nodes=nodes, pods=pods)
            )
        return Response(body=body)

    @contextmanager
    def _alone(self, request: Request) -> Iterator[None]:
        """Refuse a second question while one is answered."""
        if self._is_busy:
            raise TooManyRequests(
                problem="this replica computes another answer", fix="try again in a moment"
            )
        self._is_busy = True
        begin = perf_counter()
        try:
            yield
        finally:
            self._is_busy = False
        _log.info(
            "what-if question answered",
            extra={"path": request.path, "duration_ms": round(1000 * (perf_counter() - begin), 3)},
        )

    def _computed(
        self,
        answer: Callable[..., Struct],
        taken: Snapshot,
        question: Struct,
        *,
        nodes: Sequence[bytes],
        pods: Sequence[bytes],
    ) -> bytes:
        """Compute an answer; runs in a thread and reads nothing of the live state."""
        listed = {str(pod["metadata"]["uid"]): pod for pod in _items(pods)}
        is_drain = isinstance(question, DrainQuestion)
        cluster = Cluster(
            nodes=list(_items(nodes)),
            waiting={} if is_drain else listed,
            draining=listed if is_drain else {},
        )
        check = _deadline(
            self._settings.whatif_s,
            "pods",
            "send fewer pods, lower nodes_most, or raise the setting whatif_s",
        )
        return msgspec.json.encode(
            answer(taken, question, cluster, catalog=self._catalog, check=check)
        )

    async def _pages(
        self, of_pods: tuple[str, str] | None
    ) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Read all nodes and the pods that the selectors select."""
        pods: Sequence[bytes] = ()
        with answer_within(LIST_TIMEOUTS * self._settings.api_timeout_s, peer="API server"):
            size = self._settings.list_page_size
            nodes = await self._kube.list_pages(NODES, page_size=size)
            if of_pods is not None:
                labels, fields = of_pods
                pods = await self._kube.list_pages(
                    PODS, label_selector=labels, field_selector=fields, page_size=size
                )
        return nodes, pods

    async def take(self) -> Snapshot:
        """Return the present devices, live allocations, quotas and waiting pods (design D15)."""
        await self._state.wait_complete(wait_s=self._settings.sync_wait_s)
        return snapshot.take(
            self._state.ledger,
            devices=self._core.inventory.devices(),
            silent=self._core.inventory.silent(),
            faults=self._core.inventory.faults(),
            policy=self._settings.policy,
            writer=self._writer,
            now_s=self._state.clock.now_s(),
            waiting=[
                pod.request
                for pod in self._state.pods
                if pod.request is not None and pod.is_waiting()
            ],
            quotas=self._quota.written(),
        )


def _selectors(
    question: SimulateQuestion | ScaleQuestion | DrainQuestion,
) -> tuple[str, str] | None:
    """Return selectors (labels, fields) of the pods that the question needs; ``None``: none."""
    if isinstance(question, DrainQuestion):
        return "", f"spec.nodeName={question.node}"
    return (MANAGED, WITHOUT_NODE) if question.pods is None else None


def _decoded(body: bytes, kind: type[Question]) -> Question:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        raise RequestInvalid(
            field="body", problem=str(error), fix="see docs/openapi/scheduler.json"
        ) from error


def _check_prices(question: PolicyQuestion) -> None:
    try:
        question.prices.check()
    except SettingsInvalid as error:
        raise RequestInvalid(field=error.field, problem=error.problem, fix=error.fix) from error


def _items(pages: Sequence[bytes]) -> Iterator[Document]:
    for page in pages:
        try:
            items = msgspec.json.decode(page).get("items") or []
        except UNDECODABLE as error:
            raise WireInvalid(what="list of the API server", problem=str(error)) from error
        yield from items


def _deadline(limit_s: float, field: str, fix: str) -> Callable[[], None]:
    """Return a check that raises ``RequestInvalid`` after ``limit_s``, and lets others run."""
    end = time.monotonic() + limit_s

    def check() -> None:
        time.sleep(0)  # the loop's thread, which waits for the interpreter, goes first
        if time.monotonic() > end:
            raise RequestInvalid(
                field=field, problem=f"the answer takes longer than {limit_s:g} s", fix=fix
            )

    return check
