# SPDX-License-Identifier: Apache-2.0
"""Applies the policies file: a policy by namespace, and the rollback of a canary (ADR 48).

This replica's decisions are noted while a canary is in force, and evaluated every ``canary_s``. A
missed objective is written to ``hami_policies`` once for the canary's definition, with
compare-and-set; all replicas follow that bucket, and none applies a canary before it has read it.
Policies of pods' own annotations are not changed here. Seconds throughout.
"""

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

import anyio.lowlevel
from msgspec import Struct
from prometheus_client import CollectorRegistry

from hami_common.bus import subjects
from hami_common.errors import Conflict, WireInvalid
from hami_common.events import codec
from hami_common.events.decision import DecisionRecord
from hami_common.events.policy import RollbackRecord
from hami_common.model.request import DevicePolicy, NodePolicy, PlacementPolicy
from hami_common.model.waiting import class_of
from hami_common.ports import Bucket, Entry, Expect, Reset, Synced
from hami_common.runtime.httpd import Handler, Request, Response, json_response
from hami_common.runtime.openapi import Operation
from hami_common.runtime.watchedfile import FileKind, WatchedFile
from hami_core.replay.canary import CanaryVerdict, Group, Window, memory_of
from hami_core.replay.policies import Canary, PoliciesFile, decode
from hami_scheduler.settings import Settings
from hami_scheduler.shell.metrics import PolicyMetrics
from hami_scheduler.shell.state import State

FILE: Final = FileKind(name="policies", title="policies file", field="policies_file")
NODES_AT_ONCE: Final = 64
"""Nodes whose packing is read between two points where other tasks may run."""

_log = logging.getLogger(__name__)


class PolicyRow(Struct, frozen=True, kw_only=True):
    """One policy."""

    name: str
    """As in the file; empty: the scheduler's setting ``policy``."""
    node: NodePolicy
    device: tuple[DevicePolicy, ...]
    weights: dict[str, int]
    """Of ``slot``, ``core`` and ``memory``."""


class CanaryView(Struct, frozen=True, kw_only=True):
    """State of the canary."""

    definition: Canary
    digest: str
    state: Literal["running", "rolled-back", "starting"]
    """``starting``: this replica has not yet read whether it was rolled back, and does not apply
    it.
    """
    rollback: RollbackRecord | None
    verdict: CanaryVerdict | None
    """Of this replica's own decisions; ``None``: not evaluated yet."""


class PoliciesView(Struct, frozen=True, kw_only=True):
    """Answer of ``GET /v1/policies``."""

    file: str
    """Path of the file; empty: none."""
    problem: str
    """Reason why the file's present content is not in effect; empty when it is."""
    default: PolicyRow
    """Policy of pods outside the canary that name none."""
    items: tuple[PolicyRow, ...]
    canary: CanaryView | None


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/v1/policies",
        name="policies",
        text="The policies of the policies file, and the state of its canary.",
        answer=PoliciesView,
    ),
)


class PolicyKeeper:
    """The policies in force at one scheduler."""

    def __init__(
        self,
        *,
        state: State,
        bucket: Bucket,
        settings: Settings,
        registry: CollectorRegistry,
        writer: str,
        ids: Callable[[], str],
    ) -> None:
        """Read the file; ``SettingsInvalid`` when it is wrong. ``bucket``: ``hami_policies``."""
        self._state = state
        self._bucket = bucket
        self._settings = settings
        self._metrics = PolicyMetrics(registry)
        self._writer = writer
        self._ids = ids
        self._file: PoliciesFile | None = None
        self._digest = ""
        self._rollbacks: dict[str, RollbackRecord] = {}
        """By digest."""
        self._is_synced = False
        self._window = Window()
        self._verdict: CanaryVerdict | None = None
        self.changed: Callable[[], None] = _nothing
        """Called when the default policy may have changed."""
        self.file: WatchedFile[PoliciesFile | None] = WatchedFile.at_start(
            settings.policies_file, FILE, parse=self._parsed, default=None, registry=registry
        )
        self.file.use = self._use_file
        self._take(self.file.value)
        self._show()

    # --- policies --------------------------------------------------------------------------------

    def use(self, settings: Settings) -> None:
        """Apply changed settings."""
        self._settings = settings

    @property
    def default(self) -> PlacementPolicy:
        """Policy of pods outside the canary that name none."""
        return self._named(self._file.default if self._file is not None else "")

    def policy_for(self, namespace: str) -> PlacementPolicy:
        """Return the policy of pods of a namespace that name none."""
        if self._file is None:
            return self._settings.policy
        name = self._file.name_for(namespace, is_rolled_back=not self._is_running)
        return self._named(name)

    def _named(self, name: str) -> PlacementPolicy:
        if self._file is None or not name:
            return self._settings.policy
        return self._file.policies[name].policy()

    @property
    def _canary(self) -> Canary | None:
        return None if self._file is None else self._file.canary

    @property
    def _is_running(self) -> bool:
        return self._canary is not None and self._is_synced and self._digest not in self._rollbacks

    # --- the file --------------------------------------------------------------------------------

    def _use_file(self, file: PoliciesFile | None) -> None:
        self._take(file)
        self._show()
        self.changed()

    def _take(self, file: PoliciesFile | None) -> None:
        self._file = file
        if file is not None and file.digest() != self._digest:
            self._digest = file.digest()
            self._window, self._verdict = Window(), None

    def _parsed(self, content: bytes) -> PoliciesFile:
        return decode(content, path=Path(self._settings.policies_file), field="policies_file")

    # --- the canary ------------------------------------------------------------------------------

    def observe(self, record: DecisionRecord) -> None:
        """Note a decision of this replica while the canary is in force."""
        if not self._is_running:
            return
        if record.verb == "filter" and record.ended:
            self._window.ended(record.pod_uid)
        elif record.verb == "filter" and record.request is not None:
            group = self._group_of(record.namespace, record.request.policy)
            is_refused = record.verdict == "refused"
            if group is not None and not (is_refused and not _is_by_devices(record)):
                self._window.asked(
                    record.pod_uid, group, is_refused=is_refused, now_s=record.time_s
                )
        elif record.verb == "bind" and record.verdict == "placed":
            self._window.bound(record.pod_uid, now_s=record.time_s)

    def _group_of(self, namespace: str, policy: PlacementPolicy) -> Group | None:
        """Return the group of a pod with this policy; ``None``: an annotation gave it its own."""
        canary = self._canary
        if canary is None:
            return None
        group: Group = "canary" if canary.covers(namespace) else "control"
        wanted = self._named(canary.policy) if group == "canary" else self.default
        return group if policy == wanted else None

    async def evaluate(self) -> None:
        """Evaluate the canary at intervals, and roll it back, indefinitely."""
        while True:
            await self._state.clock.sleep(self._settings.canary_s)
            await self.judge()

    async def judge(self) -> None:
        """Evaluate the canary once; ``Unavailable`` if a rollback could not be stored."""
        canary = self._canary
        if canary is None or not self._is_running:
            return
        digest = self._digest
        packings = await self._packings(canary)
        if self._digest != digest or digest in self._rollbacks:
            return  # it changed meanwhile
        now_s = self._state.clock.now_s()
        self._settle_waiting(now_s)
        for group, packing_pct in packings.items():
            self._window.packed(group, packing_pct, now_s=now_s)
        self._verdict = verdict = self._window.verdict(canary, now_s=now_s)
        if not verdict.missed:
            return
        record = RollbackRecord(
            policy=canary.policy,
            digest=self._digest,
            time_s=now_s,
            reason=verdict.missed,
            window_s=canary.window_s,
            canary_pods=verdict.canary.pods,
            control_pods=verdict.control.pods,
            writer=self._writer,
        )
        if await self._store(record):
            self._metrics.rollbacks.inc()
            _log.warning(
                "canary policy rolled back",
                extra={"policy": canary.policy, "reason": verdict.missed, "digest": self._digest},
            )
        self._rolled_back(record)

    def _settle_waiting(self, now_s: float) -> None:
        """Note pods that another replica has bound, and drop those that are gone."""
        # The watch delivers new pods after their first question.
        for uid in self._window.waiting(noted_by_s=now_s - self._settings.canary_s):
            pod = self._state.pods.get(uid)
            if pod is None:
                self._window.ended(uid)
            elif pod.node:
                self._window.bound(uid, now_s=now_s)

    async def _packings(self, canary: Canary) -> dict[Group, float | None]:
        """Return the packing of the devices on which each group has shares."""
        covers = lru_cache(maxsize=None)(canary.covers)
        sums: dict[Group, tuple[int, int]] = {"canary": (0, 0), "control": (0, 0)}
        for number, node in enumerate(self._state.table.nodes()):
            if not number % NODES_AT_ONCE:
                await anyio.lowlevel.checkpoint()
            uuids: dict[Group, set[str]] = {"canary": set(), "control": set()}
            for holding in self._state.ledger.holdings_of_node(node):
                mine = uuids["canary" if covers(holding.record.namespace) else "control"]
                for container in holding.record.containers:
                    mine.update(share.uuid for share in container.shares)
            for group, some in uuids.items():
                booked, capacity = memory_of(self._state.table, node, some)
                sums[group] = sums[group][0] + booked, sums[group][1] + capacity
        return {
            group: 100 * booked / capacity if capacity else None
            for group, (booked, capacity) in sums.items()
        }

    async def _store(self, record: RollbackRecord) -> bool:
        """Write the rollback; return whether this replica was the first."""
        key = subjects.policy_key(record.policy, record.digest)
        expect = Expect(subject=subjects.kv_subject(subjects.POLICIES_BUCKET, key), sequence=0)
        try:
            await self._bucket.append(
                key,
                codec.encode(record),
                headers=codec.event_headers(
                    event_type="io.hami.policy.rolledback.v1",
                    source=f"/scheduler/{self._writer}",
                    event_id=self._ids(),
                    time_s=record.time_s,
                ),
                expect=expect,
            )
        except Conflict:
            return False
        return True

    def _rolled_back(self, record: RollbackRecord) -> None:
        is_new = record.digest not in self._rollbacks
        self._rollbacks.setdefault(record.digest, record)
        self._show()
        if is_new and record.digest == self._digest:
            self.changed()

    async def follow_rollbacks(self) -> None:
        """Follow the rollbacks of all replicas, indefinitely."""
        async with self._bucket.watch() as entries:
            async for entry in entries:
                if isinstance(entry, Synced):
                    self._is_synced = True
                    self._show()
                    self.changed()
                elif isinstance(entry, Reset):
                    # The bus lost its storage: what this replica knows stays in force.
                    await self._restore()
                else:
                    self._take_entry(entry)

    async def _restore(self) -> None:
        if (known := self._rollbacks.get(self._digest)) is not None:
            await self._store(known)

    def _take_entry(self, entry: Entry) -> None:
        if not entry.value:
            return
        try:
            record = codec.decode(entry.value, RollbackRecord, what=entry.key)
        except WireInvalid as error:
            _log.warning("rollback unreadable", extra={"key": entry.key, "problem": str(error)})
            return
        self._rolled_back(record)

    # --- showing ---------------------------------------------------------------------------------

    def _show(self) -> None:
        self._metrics.canary.set(self._is_running)

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Return the handler by method and path."""
        return {("GET", "/v1/policies"): self.policies}

    async def policies(self, request: Request) -> Response:
        """See ``OPERATIONS``."""
        del request
        file = self._file
        return json_response(
            PoliciesView(
                file=self._settings.policies_file,
                problem=self.file.problem,
                default=_row("" if file is None else file.default, self.default),
                items=tuple(
                    _row(name, one.policy())
                    for name, one in (() if file is None else file.policies.items())
                ),
                canary=self._canary_view(),
            )
        )

    def _canary_view(self) -> CanaryView | None:
        canary = self._canary
        if canary is None:
            return None
        rollback = self._rollbacks.get(self._digest)
        return CanaryView(
            definition=canary,
            digest=self._digest,
            state="rolled-back" if rollback else "running" if self._is_synced else "starting",
            rollback=rollback,
            verdict=self._verdict,
        )


def _row(name: str, policy: PlacementPolicy) -> PolicyRow:
    weights = policy.weights
    return PolicyRow(
        name=name,
        node=policy.node,
        device=policy.device,
        weights={"slot": weights.slot, "core": weights.core, "memory": weights.memory},
    )


def _is_by_devices(record: DecisionRecord) -> bool:
    """Return whether devices refuse the pod, and not only quotas, queues or its gang."""
    return any(class_of(one.code) == "devices" for one in record.refusals)


def _nothing() -> None:
    """Default of ``changed``."""
