# SPDX-License-Identifier: Apache-2.0
"""Tells the whole story of one pod, from admission to the start of its containers, with causes.

Three sources, each of which may be away: the registry (decisions and allocations), the integration
stream on NATS (every record, in full) and the Kubernetes API (the pod, its conditions and events).
The same fact from two sources is told once, with the more exact time. Needs no collector of traces.
Times in Unix seconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

from hami_common.events.decision import DecisionRecord
from hami_common.pods import annotations
from hamictl.bus import Event, summary
from hamictl.client import Explanation

Document = dict[str, Any]
_SAME_S = 0.001
_SECOND_S = 0.9995


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened."""

    time_s: float
    who: str
    what: str
    cause: str = ""
    details: tuple[str, ...] = ()
    to_the_second: bool = False
    """Kubernetes tells whole seconds only: it happened within the second after ``time_s``."""

    def order(self) -> float:
        """Where the line stands: what is only known to the second comes at its end."""
        return self.time_s + (_SECOND_S if self.to_the_second else 0.0)


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one pod, oldest first."""

    namespace: str
    pod: str
    uid: str
    trace_id: str
    lines: tuple[Line, ...]
    missing: tuple[str, ...] = ()
    """Sources that could not be asked, and why."""


def story_of(
    namespace: str,
    name: str,
    *,
    explanation: Explanation | None,
    events: Sequence[Event],
    pod: Document | None,
    kube_events: Sequence[Document],
    missing: Sequence[str],
) -> Story:
    """Put together what the sources say."""
    lines: list[Line] = []
    if pod is not None:
        lines += _pod_lines(pod)
    lines += [line for event in kube_events if (line := _kube_line(event)) is not None]
    told = [_event_line(event) for event in events]
    lines += told
    if explanation is not None:
        has_stream = {event.kind for event in events}
        if "decision" not in has_stream:
            for decision in explanation.decisions:
                lines += _decision_lines(decision)
        if not has_stream & {"allocation", "state"}:
            lines += _allocation_lines(explanation)
    metadata: Document = {} if pod is None else pod["metadata"]
    parent = str((metadata.get("annotations") or {}).get(annotations.TRACEPARENT, "")).split("-")
    return Story(
        namespace=namespace,
        pod=name,
        uid=str(metadata.get("uid", "")),
        trace_id=parent[1] if len(parent) == 4 else "",  # noqa: PLR2004 - W3C trace context
        lines=tuple(sorted(_once(lines), key=Line.order)),
        missing=tuple(missing),
    )


def _once(lines: Iterable[Line]) -> Iterator[Line]:
    seen: set[tuple[int, str, str]] = set()
    for line in lines:
        key = (round(line.time_s / _SAME_S), line.who, line.what)
        if key not in seen:
            seen.add(key)
            yield line


def _event_line(event: Event) -> Line:
    record = event.record
    who = str(record.get("writer") or record.get("node") or "webhook")
    who = {"admission": "webhook", "breach": f"agent {event.node}"}.get(event.kind, who)
    details: list[str] = []
    if event.kind == "decision":
        before = [f"{one.get('verb')}: {one.get('verdict')}" for one in record.get("before") or []]
        details += before
        details += [
            f"{one.get('count')} nodes: {one.get('text')}" for one in record.get("refusals") or []
        ]
        if record.get("node"):
            details.append(f"node {record['node']}")
    if event.kind == "allocation":
        details += [
            f"{container.get('name')}: {share.get('memory_mib')} MiB of {share.get('uuid')}"
            for container in record.get("containers") or []
            for share in container.get("shares") or []
        ]
    details += [str(one) for one in record.get("warnings") or []]
    cause = str(record.get("reason") or record.get("error") or record.get("message") or "")
    return Line(
        time_s=event.time_s,
        who=who,
        what=f"{event.kind} {summary(event).split(' (', maxsplit=1)[0]}".strip(),
        cause=cause,
        details=tuple(details),
    )


def _decision_lines(decision: DecisionRecord) -> Iterator[Line]:
    for one in (*decision.before, decision):
        yield Line(
            time_s=one.time_s,
            who=one.writer or "scheduler",
            what=f"decision {one.verb}: {one.verdict}",
            cause=one.error,
            details=tuple(f"{refusal.count} nodes: {refusal.text}" for refusal in one.refusals)
            + ((f"node {one.node}",) if one.node else ()),
        )


def _allocation_lines(explanation: Explanation) -> Iterator[Line]:
    for one in explanation.allocations:
        yield Line(
            time_s=one.reserved_s,
            who="scheduler",
            what=f"allocation {one.allocation_id[:8]} on {one.node}",
            details=tuple(
                f"{container.name}: {share.memory_mib} MiB of {share.uuid}"
                for container in one.containers
                for share in container.shares
            ),
        )
        if one.state_s:
            yield Line(
                time_s=one.state_s, who=one.node, what=f"state {one.state}", cause=one.reason
            )


def _pod_lines(pod: Document) -> Iterator[Line]:
    metadata, status = pod["metadata"], pod.get("status") or {}
    yield Line(time_s=_time(metadata.get("creationTimestamp")), who="API server", what="created")
    for condition in status.get("conditions") or []:
        is_true = condition.get("status") == "True"
        yield Line(
            time_s=_time(condition.get("lastTransitionTime")),
            who="kube-scheduler" if condition.get("type") == "PodScheduled" else "kubelet",
            what=f"{condition.get('type')} is {'true' if is_true else 'false'}",
            cause=str(condition.get("message") or ""),
            to_the_second=True,
        )
    for group in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(group) or []:
            for state in (container.get("lastState") or {}, container.get("state") or {}):
                yield from _container_lines(str(container.get("name")), state)
    if metadata.get("deletionTimestamp"):
        yield Line(
            time_s=_time(metadata["deletionTimestamp"]),
            who="API server",
            what="to be deleted",
            to_the_second=True,
        )


def _container_lines(name: str, state: Document) -> Iterator[Line]:
    for word, detail in state.items():
        if word in ("running", "terminated"):
            yield Line(
                time_s=_time(detail.get("startedAt")),
                who="kubelet",
                what=f"container {name} runs",
                to_the_second=True,
            )
        if word == "terminated":
            yield Line(
                time_s=_time(detail.get("finishedAt")),
                who="kubelet",
                what=f"container {name} ended with {detail.get('exitCode')}",
                cause=str(detail.get("reason") or ""),
                to_the_second=True,
            )


def _kube_line(event: Document) -> Line | None:
    when = event.get("eventTime") or event.get("firstTimestamp") or event.get("lastTimestamp")
    if not when:
        return None
    source = event.get("source") or {}
    who = event.get("reportingComponent") or source.get("component") or "Kubernetes"
    return Line(
        time_s=_time(when),
        who=str(who),
        what=str(event.get("reason", "")),
        cause=str(event.get("message", "")),
        to_the_second="." not in str(when),
    )


def _time(text: object) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0
