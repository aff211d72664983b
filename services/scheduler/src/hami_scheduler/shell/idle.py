# SPDX-License-Identifier: Apache-2.0
"""Applies the policies for idle allocations, on one elected replica.

The registry publishes which allocations are idle; the present state is the newest message of each
(``IdleEvents``). For every idle period the policy is applied once, and its outcome published; both
are read again after a restart. A refused action is tried again after ``retry_s``, while the
allocation stays idle. Actions are limited in number per minute. Each is harmless when it is
repeated: an eviction names the pod by uid, a resize is an append to the ledger's record.

A pod is evicted within its PodDisruptionBudgets, after its minimum run time, members of a gang only
while all members are idle, and only if the agent reports no work at that moment. Seconds
throughout.
"""

import logging
import math
from contextlib import aclosing
from functools import partial
from typing import Final, NamedTuple

from msgspec import Struct

from hami_common.bus import subjects
from hami_common.errors import HamiError, RequestInvalid, SettingsInvalid, Unavailable, WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, is_of_claim
from hami_common.events.asking import RecallAnswer, RecallQuestion, ShareNow, UsageAnswer
from hami_common.events.idle import IdleActionRecord, IdleOutcome, IdleRecord
from hami_common.ports import KubeApi, Publisher
from hami_common.runtime.kubeio.recorder import EventRecorder, ObjectRef
from hami_core.planning.idlepolicy import IdleRule, rule_for, shrunk_mib
from hami_core.planning.preempt import is_protected
from hami_core.planning.resizing import ResizeRequest
from hami_scheduler.settings import Settings
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.idleevents import IdleEvents, IdleMessage
from hami_scheduler.shell.isolation import IDLE
from hami_scheduler.shell.leader import Leader
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.quota import QuotaKeeper
from hami_scheduler.shell.resize import Ask, Resizer, ResizeRefused
from hami_scheduler.shell.state import State

MINUTE_S: Final = 60.0
LOOK_S: Final = 5.0
"""Longest time between two looks while messages keep coming."""
EVENT_REASONS: Final = {
    "report": "AllocationIdle",
    "shrink": "IdleShareShrunk",
    "recall": "IdleShareRecalled",
    "evict": "IdlePodEvicted",
}
REFUSED: Final = "IdleActionRefused"

_log = logging.getLogger(__name__)
_Key = tuple[str, str]


class _Result(NamedTuple):
    """Outcome of one action; ``code`` names the reason of a refusal."""

    text: str
    code: str = ""


class IdlePorts(Struct, frozen=True, kw_only=True):
    """Ports of the policies."""

    events: IdleEvents
    publisher: Publisher
    kube: KubeApi
    ask: Ask
    """Sends a request to the agent of a node."""


class IdlePolicies:
    """Acts on idle allocations while this replica leads."""

    def __init__(
        self,
        *,
        state: State,
        effects: Effects,
        quota: QuotaKeeper,
        resizer: Resizer,
        ports: IdlePorts,
        settings: Settings,
        metrics: Metrics,
        writer: str,
    ) -> None:
        """Act through ``ports``; ``SettingsInvalid`` for rules that cannot be used."""
        self._state = state
        self._effects = effects
        self._quota = quota
        self._resizer = resizer
        self._publisher = ports.publisher
        self._source = ports.events
        self._ask = ports.ask
        self._settings = settings
        self._options = options = settings.idle
        self._metrics = metrics
        self._writer = writer
        _require_usable(settings)
        self._leader = Leader(
            ports.kube,
            clock=state.clock,
            namespace=options.namespace,
            name=options.lease_name,
            identity=writer,
            lease_s=options.leader_lease_s,
        )
        self._recorder = EventRecorder(
            ports.kube, component="hami-scheduler", clock=state.clock, instance=writer
        )
        self._periods: dict[_Key, IdleRecord] = {}
        """Present idle periods by node and pod."""
        self._actions: dict[_Key, IdleActionRecord] = {}
        """Newest action by node and pod."""
        self._next_s = 0.0
        """Earliest time of the next action, by the monotonic clock."""

    async def work(self) -> None:
        """Act while this replica leads; indefinitely, or not at all if off."""
        if self._options.enabled:
            await self._leader.lead(self._serve)

    async def _serve(self) -> None:
        self._periods.clear()
        self._actions.clear()
        look_s = math.inf  # not before the stored messages are read
        async with aclosing(self._source.messages()) as messages:
            async for message in messages:
                now_s = self._state.clock.monotonic_s()
                if message is not None:
                    self._see(message)
                if message is not None and now_s < look_s:
                    continue
                look_s = now_s + LOOK_S
                if self._state.is_complete:
                    await self._look()
        await self._state.clock.sleep(self._settings.tick_s)

    def _see(self, message: IdleMessage) -> None:
        key = message.node, message.pod_uid
        if isinstance(message, IdleActionRecord):
            known = self._actions.get(key)
            if known is None or known.time_s <= message.time_s:
                self._actions[key] = message
        elif message.change == "idle":
            self._periods[key] = message
        else:
            self._periods.pop(key, None)

    # --- choosing --------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Apply what is due: what was never tried first, then what was tried longest ago.

        So an action that is refused again and again does not keep others from their turn.
        """
        for key in self._actions.keys() - self._periods.keys():
            del self._actions[key]
        for key, period in sorted(self._periods.items(), key=self._turn):
            record = self._record_of(period)
            if record is None:
                del self._periods[key]  # released, or another allocation
                continue
            rule = self._rule(record)
            if self._is_settled(key, period, rule):
                continue
            await self._state.quarantine.run(
                IDLE,
                "/".join(key),
                partial(self._apply, period, record, rule),
                name=(record.namespace, record.pod),
                is_retried=False,  # the next look does
            )

    def _turn(self, entry: tuple[_Key, IdleRecord]) -> tuple[float, float]:
        """Return the time of the last attempt in the period, and the begin of the period."""
        key, period = entry
        last = self._actions.get(key)
        if last is None or last.since_s != period.since_s:
            return 0.0, period.since_s
        return last.time_s, period.since_s

    def _record_of(self, period: IdleRecord) -> AllocationRecord | None:
        holding = self._state.ledger.holding(period.node, period.pod_uid)
        if holding is None or holding.record.allocation_id != period.allocation_id:
            return None
        return holding.record

    def _rule(self, record: AllocationRecord) -> IdleRule:
        queue = self._quota.ledger.queue_of(record.namespace, record.account)
        return rule_for(self._options.rules, record, queue)

    def _is_settled(self, key: _Key, period: IdleRecord, rule: IdleRule) -> bool:
        """Return whether nothing is to be done about the period now."""
        last, now_s = self._actions.get(key), self._state.clock.now_s()
        is_due = now_s >= period.since_s + rule.after_s
        if last is None or (last.allocation_id, last.since_s, last.policy) != (
            period.allocation_id,
            period.since_s,
            rule.policy,
        ):
            return is_due and self._must_rest(rule)
        if last.outcome == "done":
            return True
        if last.outcome == "refused" and now_s < last.time_s + self._options.retry_s:
            return True
        return not is_due or self._must_rest(rule)

    def _must_rest(self, rule: IdleRule) -> bool:
        return rule.policy != "report" and self._state.clock.monotonic_s() < self._next_s

    async def _apply(self, period: IdleRecord, record: AllocationRecord, rule: IdleRule) -> None:
        due_s = period.since_s + rule.after_s
        if self._state.clock.now_s() < due_s:
            await self._publish(period, rule, "waiting", _Result(""), due_s)
            return
        if rule.policy != "report":
            pause_s = MINUTE_S / self._options.actions_per_minute
            self._next_s = self._state.clock.monotonic_s() + pause_s
        try:
            result = await self._act(record, rule)
        except ResizeRefused as error:
            result = _Result(str(error), error.code)
        except RequestInvalid as error:
            result = _Result(str(error), code="not-resizable")
        except HamiError as error:
            result = _Result(str(error), code="unavailable")
        outcome: IdleOutcome = "refused" if result.code else "done"
        self._metrics.idle_actions.labels(policy=rule.policy, outcome=outcome).inc()
        log = _log.warning if rule.policy == "evict" and not result.code else _log.info
        log(
            "idle policy applied",
            extra={
                "namespace": record.namespace,
                "pod": record.pod,
                "policy": rule.policy,
                "outcome": outcome,
                "reason": result.text,
            },
        )
        await self._report(period, rule, result)
        await self._publish(period, rule, outcome, result, due_s)

    async def _publish(
        self,
        period: IdleRecord,
        rule: IdleRule,
        outcome: IdleOutcome,
        result: _Result,
        due_s: float,
    ) -> None:
        now_s = self._state.clock.now_s()
        action = IdleActionRecord(
            policy=rule.policy,
            outcome=outcome,
            node=period.node,
            pod_uid=period.pod_uid,
            allocation_id=period.allocation_id,
            namespace=period.namespace,
            pod=period.pod,
            since_s=period.since_s,
            time_s=now_s,
            due_s=due_s,
            code=result.code,
            reason=result.text,
            writer=self._writer,
        )
        self._actions[period.node, period.pod_uid] = action
        event_id = f"{period.allocation_id}.{round(now_s * 1000)}.{rule.policy}.{outcome}"
        await self._publisher.publish_stored(
            subjects.idle_action_event(action.node, action.pod_uid),
            codec.encode(action),
            headers=codec.event_headers(
                event_id=event_id,
                event_type=f"io.hami.idleaction.{outcome}.v1",
                source=f"/scheduler/{self._writer}",
                time_s=now_s,
            ),
            message_id=event_id,
        )

    async def _report(self, period: IdleRecord, rule: IdleRule, result: _Result) -> None:
        hours = period.lost_s / (60 * MINUTE_S)
        text = f"no work on its devices, {hours:.2f} device hours lost: {result.text}"
        await self._recorder.record(
            ObjectRef(kind="Pod", name=period.pod, namespace=period.namespace, uid=period.pod_uid),
            reason=REFUSED if result.code else EVENT_REASONS[rule.policy],
            message=f"policy {rule.policy} refused ({result.code}): {text}"
            if result.code
            else text,
            kind="Warning" if rule.policy == "evict" or result.code else "Normal",
        )

    # --- acting ----------------------------------------------------------------------------------

    async def _act(self, record: AllocationRecord, rule: IdleRule) -> _Result:
        if rule.policy == "report":
            return _Result("release the share, or request a smaller one")
        if is_of_claim(record) or record.held_for or record.origin:
            return _Result("only shares of pods that HAMi placed are changed", code="not-ours")
        if rule.policy == "shrink":
            return await self._shrink(record, rule)
        if rule.policy == "recall":
            return await self._recall(record)
        return await self._evict(record)

    async def _shrink(self, record: AllocationRecord, rule: IdleRule) -> _Result:
        """Lower the memory limit of each container to its peak times the rule's factor."""
        pod = self._state.pods.get(record.pod_uid)
        start_s = pod.start_s if pod is not None else 0.0
        peaks = await self._source.peaks(record.node, record.pod_uid, start_s)
        running = [one for one in record.containers if one.kind != "init"]
        if any((one.name, share.uuid) not in peaks for one in running for share in one.shares):
            return _Result("no sample of its use is stored", code="unmeasured")
        done: list[str] = []
        for container in running:
            wanted_mib = shrunk_mib(
                container, peaks, factor=rule.factor, least_mib=self._options.shrink_least_mib
            )
            if wanted_mib is None:
                continue
            wish = ResizeRequest(
                namespace=record.namespace,
                pod=record.pod,
                container=container.name,
                memory_mib=wanted_mib,
            )
            resized = await self._resizer.resize(wish)
            before_mib = max(share.memory_mib for share in resized.before.shares)
            done.append(f"container {container.name} from {before_mib} to {wanted_mib} MiB")
        return _Result(", ".join(done) or "its memory limits fit its peak use already")

    async def _recall(self, record: AllocationRecord) -> _Result:
        """Request the agent to move the pod's device memory to the host."""
        subject = subjects.ask(record.node, "recall")
        data = codec.encode(RecallQuestion(pod_uid=record.pod_uid))
        try:
            answer = codec.decode_on(subject, await self._ask(subject, data), RecallAnswer)
        except WireInvalid as error:
            raise Unavailable(peer=f"agent of node {record.node}", detail=str(error)) from error
        if answer.containers:
            return _Result(f"the agent moves the memory of {answer.containers} containers")
        if answer.parked:
            return _Result("its memory is in the host already")
        text = "its devices are not configured with overcommit = recall, or it is not idle there"
        return _Result(text, code="no-recall")

    async def _evict(self, record: AllocationRecord) -> _Result:
        pod = self._state.pods.get(record.pod_uid)
        if pod is None or not pod.node:
            return _Result("the pod is not known", code="pod-unknown")
        if pod.is_deleting or pod.is_finished:
            return _Result("the pod is ending")
        if is_protected(pod, self._effects.evictions.rules({})):
            return _Result("it has not run for its minimum run time", code="min-runtime")
        if pod.group:
            members = self._state.pods.members_of_group(pod.group)
            at_work = [
                one.name
                for one in members
                if one.node and not one.is_finished and (one.node, one.uid) not in self._periods
            ]
            if at_work:
                return _Result(f"member {at_work[0]} of its gang is not idle", code="gang-active")
        shares = await self._shares_now(record)
        if not shares:
            return _Result("its agent lists no share of it", code="unmeasured")
        if any(share.used_core_pct for share in shares):
            return _Result("it works again", code="active")
        problem = await self._effects.evictions.evict(pod)
        if problem:
            return _Result(problem, code="eviction-refused")
        return _Result("evicted")

    async def _shares_now(self, record: AllocationRecord) -> list[ShareNow]:
        """Return the present use of the allocation; ``Unavailable`` if the agent is silent."""
        subject = subjects.ask(record.node, "usage")
        try:
            usage = codec.decode_on(subject, await self._ask(subject), UsageAnswer)
        except WireInvalid as error:
            raise Unavailable(peer=f"agent of node {record.node}", detail=str(error)) from error
        return [share for share in usage.shares if share.pod_uid == record.pod_uid]


def _require_usable(settings: Settings) -> None:
    """Raise ``SettingsInvalid`` for numbers that make no sense."""
    options = settings.idle
    checks = [
        ("idle.actions_per_minute", options.actions_per_minute, options.actions_per_minute > 0),
        ("idle.shrink_least_mib", options.shrink_least_mib, options.shrink_least_mib >= 1),
        ("idle.retry_s", options.retry_s, options.retry_s > 0),
    ]
    for number, rule in enumerate(options.rules):
        checks.append((f"idle.rules[{number}].factor", rule.factor, rule.factor >= 1))
        checks.append((f"idle.rules[{number}].after_s", rule.after_s, rule.after_s >= 0))
    for field, value, is_usable in checks:
        if not is_usable:
            raise SettingsInvalid(
                field=field,
                problem=f"{value:g} cannot be used",
                fix="factor is at least 1, after_s at least 0, all others are above 0",
            )
