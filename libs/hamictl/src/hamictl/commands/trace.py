# SPDX-License-Identifier: Apache-2.0
"""``hamictl trace``: prints the timeline of one pod, from admission to the end of its containers.

Three sources, each optional: the registry (decisions and allocations), the integration stream on
NATS (every record, in full) and the Kubernetes API (the pod, its conditions and events). Duplicate
facts are removed; records of the stream replace those of the registry. No trace collector is
needed. Times in Unix seconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import click
import msgspec

from hami_common.apipath import api_path
from hami_common.events.decision import DecisionRecord
from hami_common.pods import annotations
from hami_common.ports import KubeApi
from hamictl import client, eventstream, kube, options, output
from hamictl.client import Explanation
from hamictl.errors import Absent, InputRefused, Refused, Unreachable
from hamictl.eventstream import Event, summary

Document = dict[str, Any]
_SAME_S = 0.001
_SECOND_S = 0.9995
_KINDS = frozenset({"admission", "decision", "allocation", "state", "breach"})


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a pod."""

    time_s: float
    who: str
    what: str
    cause: str = ""
    details: tuple[str, ...] = ()
    to_the_second: bool = False
    """Kubernetes reports whole seconds: it happened within the second after ``time_s``."""

    def order(self) -> float:
        """Return the sort key: a time in whole seconds sorts at the end of its second."""
        return self.time_s + (_SECOND_S if self.to_the_second else 0.0)


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """All events of one pod, oldest first."""

    namespace: str
    pod: str
    uid: str
    trace_id: str
    lines: tuple[Line, ...]
    missing: tuple[str, ...] = ()
    """Sources that were unavailable, and why."""


@click.command()
@click.argument("name")
@options.pod_namespace_option
@options.bus_options
@options.registry_option
@options.kubeconfig_option
@options.format_option
def trace(
    name: str,
    namespace: str,
    registry: str,
    kubeconfig: str,
    format_: str,
    **login: str,
) -> None:
    """Print a pod's timeline, from admission to its end.

    Merges the integration stream, the registry's decisions and the Kubernetes API, with times and
    causes. A source that is unavailable is reported and left out.
    """
    missing: list[str] = []
    pod: Document | None = None
    kube_events: list[Document] = []
    explanation: Explanation | None = None
    events: list[Event] = []
    output.progress("reading the pod from the Kubernetes API")
    try:
        pod, kube_events = kube.with_kube(
            kubeconfig, lambda api: _pod_and_events(api, namespace, name)
        )
    except (Absent, Refused, Unreachable, InputRefused) as error:
        missing.append(f"Kubernetes: {error.message}")
    output.progress("reading decisions from the registry")
    try:
        explanation = client.read(Explanation, registry, f"/v1/explain/{namespace}/{name}")
    except (Absent, Refused, Unreachable) as error:
        missing.append(f"registry: {error.message}")
    output.progress("reading the integration stream")

    async def read() -> None:
        wanted = eventstream.Filter(kinds=_KINDS, namespace=namespace, pod=name)
        async with eventstream.open_bus(**login) as bus:
            async for event in eventstream.read_events(bus, wanted, start=0, follow=False):
                events.append(event)  # noqa: PERF401 - asynchronous

    try:
        eventstream.run(read)
    except (Unreachable, InputRefused) as error:
        missing.append(f"integration stream: {error.message}")
    timeline = timeline_of(
        namespace,
        name,
        explanation=explanation,
        events=events,
        pod=pod,
        kube_events=kube_events,
        missing=missing,
    )
    if not timeline.lines:
        text = f"no record of pod {namespace}/{name}; " + "; ".join(missing)
        raise Absent(text) if explanation is None and pod is None else Unreachable(text)
    if not output.structured(timeline, format_):
        _show(timeline)


async def _pod_and_events(
    api: KubeApi, namespace: str, name: str
) -> tuple[Document, list[Document]]:
    base = api_path("api", "v1", "namespaces", namespace)
    pod = msgspec.json.decode(await api.get(base + api_path("pods", name)), type=Document)
    pages = await api.list_pages(f"{base}/events", field_selector=f"involvedObject.name={name}")
    uid = pod["metadata"].get("uid")
    found = [item for page in pages for item in msgspec.json.decode(page).get("items") or []]
    return pod, [one for one in found if one.get("involvedObject", {}).get("uid") in (None, uid)]


def _show(timeline: Timeline) -> None:
    uid = f", uid {timeline.uid}" if timeline.uid else ""
    click.echo(f"Pod {timeline.namespace}/{timeline.pod}{uid}")
    if timeline.trace_id:
        click.echo(f"Trace {timeline.trace_id}")
    first_s = timeline.lines[0].time_s
    for line in timeline.lines:
        cause = f": {line.cause}" if line.cause else ""
        when, after = output.clock_time(line.time_s), f"+{line.time_s - first_s:.3f}s"
        if line.to_the_second:
            when, after = when.partition(".")[0] + "    ", ""
        click.echo(f"{when} {after:>10}  {line.who}: {line.what}{cause}")
        for detail in line.details:
            click.echo(f"{'':24}{detail}")
    for text in timeline.missing:
        click.echo(f"Unavailable: {text}", err=True)


def timeline_of(
    namespace: str,
    name: str,
    *,
    explanation: Explanation | None,
    events: Sequence[Event],
    pod: Document | None,
    kube_events: Sequence[Document],
    missing: Sequence[str],
) -> Timeline:
    """Merge the sources."""
    lines: list[Line] = []
    if pod is not None:
        lines += _pod_lines(pod)
    lines += [line for event in kube_events if (line := _kube_line(event)) is not None]
    lines += [_event_line(event) for event in events]
    if explanation is not None:
        has_stream = {event.kind for event in events}
        if "decision" not in has_stream:
            for decision in explanation.decisions:
                lines += _decision_lines(decision)
        if not has_stream & {"allocation", "state"}:
            lines += _allocation_lines(explanation)
    metadata: Document = {} if pod is None else pod["metadata"]
    parent = str((metadata.get("annotations") or {}).get(annotations.TRACEPARENT, "")).split("-")
    return Timeline(
        namespace=namespace,
        pod=name,
        uid=str(metadata.get("uid", "")),
        trace_id=parent[1] if len(parent) == 4 else "",  # noqa: PLR2004 - W3C trace context
        lines=tuple(sorted(_deduplicated(lines), key=Line.order)),
        missing=tuple(missing),
    )


def _deduplicated(lines: Iterable[Line]) -> Iterator[Line]:
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
