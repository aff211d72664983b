# SPDX-License-Identifier: Apache-2.0
"""Answers whether the control plane keeps up, from what the registry can observe.

The registry observes messages, not processes: a replica that has written nothing for
``REPLICA_S`` is not listed, and one that is listed may have ended since. ``concerns_of`` names what
an operator should look at; each concern is a stable code with its amounts, so that clients can
translate it. Times in Unix seconds, sizes in bytes.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Final, Literal

from msgspec import Struct

from hami_common.events.decision import DecisionRecord
from hami_common.events.inventory import Heartbeat

REPLICA_S: Final = 900.0
"""Age of the last message up to which a replica is listed."""
REPLICAS_MOST: Final = 1_000
"""Replicas that are remembered; agents are not among them."""
RECENT_S: Final = 300.0
"""Age up to which a decision counts for the rate and the duration."""
RECENT_MOST: Final = 2_000
"""Decisions of one replica that are remembered for it."""
NAMES_SHOWN: Final = 100
BEHIND: Final = 1_000
"""Messages from which a reader counts as behind."""
FULL: Final = 0.8
"""Fraction of a bucket's capacity from which it is a concern: a full one refuses writes."""

ConcernCode = Literal[
    "agents-silent",
    "agents-of-another-version",
    "vendors-unserved",
    "objects-in-quarantine",
    "messages-dead-lettered",
    "stream-unknown",
    "stream-without-leader",
    "stream-copy-behind",
    "stream-almost-full",
    "registry-behind",
    "consumer-behind",
    "configuration-not-in-use",
]


class ReplicaRow(Struct, frozen=True, kw_only=True):
    """One replica of a service, as its messages show it."""

    service: str
    replica: str
    last_s: float
    """Time of its last message."""
    last: str
    """Kind of that message: ``decision``, ``record``, ``admission``, ``devices`` or
    ``quarantine``.
    """
    decisions: int = 0
    """Decisions of the last five minutes, at most ``RECENT_MOST``; of schedulers."""
    decision_median_ms: float = 0.0
    decision_longest_ms: float = 0.0


class VersionRow(Struct, frozen=True, kw_only=True):
    """Number of agents of one version."""

    version: str
    """Empty: the agent does not state its version in heartbeats."""
    agents: int


class UnservedRow(Struct, frozen=True, kw_only=True):
    """A node whose agent cannot serve vendors that it is responsible for."""

    node: str
    vendors: tuple[str, ...]


class AgentsRow(Struct, frozen=True, kw_only=True):
    """The agents of all nodes that ever reported a device."""

    nodes: int
    silent: int
    silent_nodes: tuple[str, ...]
    """At most ``NAMES_SHOWN``."""
    versions: tuple[VersionRow, ...]
    """Of agents that are not silent."""
    unserved: tuple[UnservedRow, ...]
    """At most ``NAMES_SHOWN``."""


class CopyRow(Struct, frozen=True, kw_only=True):
    """One copy of a stream beside the leader's."""

    server: str
    is_current: bool
    lag: int
    """Operations that it has still to apply."""


class StreamRow(Struct, frozen=True, kw_only=True):
    """One stream of the bus."""

    name: str
    messages: int
    size_bytes: int
    limit_bytes: int
    """-1: no limit."""
    last_seq: int
    read_seq: int | None
    """Sequence up to which this replica of the registry has read a bucket; ``None`` for a log."""
    consumers: int
    leader: str
    """Empty where the server is not in a cluster."""
    has_leader: bool
    copies: tuple[CopyRow, ...]
    problem: str = ""
    """Reason why nothing is known about the stream."""


class ConsumerRow(Struct, frozen=True, kw_only=True):
    """One consumer of a stream."""

    stream: str
    name: str
    is_durable: bool
    pending: int
    """Messages not delivered yet."""
    unacknowledged: int
    """Messages delivered and not acknowledged yet."""
    redelivered: int
    """Of them, those that were delivered more than once."""


class LeaseRow(Struct, frozen=True, kw_only=True):
    """A Lease by which replicas elect the one that does a background task."""

    name: str
    holder: str
    """Replica that does the task; empty: none."""
    since_s: float | None
    """Time at which the holder took the Lease; ``None``: it is not stated."""
    renewed_s: float | None
    """Time of the last renewal, by the holder's clock; ``None``: never."""
    lease_s: float
    """Time after the last renewal at which another replica takes the Lease."""
    transitions: int
    """Number of times that another replica took it."""
    is_expired: bool
    """Not renewed for ``lease_s``: no replica does the task, or the component was removed."""


class CountRow(Struct, frozen=True, kw_only=True):
    """Number of objects of one service."""

    service: str
    count: int


class Concern(Struct, frozen=True, kw_only=True):
    """Something an operator should look at."""

    code: ConcernCode
    name: str = ""
    """Stream, consumer or example concerned."""
    count: int = 0


class SystemView(Struct, frozen=True, kw_only=True):
    """State of the control plane, as this replica of the registry observes it."""

    time_s: float
    replica: str
    """Replica of the registry that answers."""
    version: str
    bus_version: str
    """Of the NATS server."""
    config_generation: int
    config_problem: str
    replicas: tuple[ReplicaRow, ...]
    agents: AgentsRow
    streams: tuple[StreamRow, ...]
    consumers: tuple[ConsumerRow, ...]
    consumers_problem: str
    """Reason why consumers are not listed."""
    leases: tuple[LeaseRow, ...]
    leases_problem: str
    """Reason why Leases are not listed."""
    quarantined: tuple[CountRow, ...]
    dead_letters: int
    waiting: int
    """Pods that wait, see ``/v1/waiting``."""
    concerns: tuple[Concern, ...]
    """Empty: nothing observable is behind."""


class _Replica(Struct):
    decisions: deque[tuple[float, float]]
    """(time in Unix seconds, duration in ms), the newest last."""
    last_s: float = 0.0
    last: str = ""


class Observed:
    """Replicas and agents, as their messages show them."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[tuple[str, str], _Replica] = OrderedDict()
        """By service and name, the latest message last."""
        self._agents: dict[str, Heartbeat] = {}
        """Last heartbeat, by node."""

    def message_seen(self, service: str, replica: str, kind: str, *, time_s: float) -> None:
        """Note a message of a replica; older than the known one: no change."""
        if not replica:
            return
        key = (service, replica)
        known = self._replicas.pop(key, None) or _Replica(decisions=deque(maxlen=RECENT_MOST))
        if time_s >= known.last_s:
            known.last_s, known.last = time_s, kind
        self._replicas[key] = known
        while len(self._replicas) > REPLICAS_MOST:
            self._replicas.popitem(last=False)

    def decision_seen(self, decision: DecisionRecord) -> None:
        """Note the decisions of one message."""
        self.message_seen("scheduler", decision.writer, "decision", time_s=decision.time_s)
        known = self._replicas.get(("scheduler", decision.writer))
        if known is not None:
            known.decisions.extend((one.time_s, one.duration_ms) for one in decision.unfolded())

    def heartbeat_seen(self, beat: Heartbeat) -> None:
        """Note the heartbeat of an agent."""
        self._agents[beat.node] = beat

    def replicas(self, *, now_s: float) -> tuple[ReplicaRow, ...]:
        """Return the replicas that wrote lately, by service and name."""
        return tuple(
            _replica_row(service, name, one, now_s)
            for (service, name), one in sorted(self._replicas.items())
            if one.last_s >= now_s - REPLICA_S
        )

    def agents(self, nodes: Iterable[str], silent: Iterable[str]) -> AgentsRow:
        """Return the agents of ``nodes``, of which ``silent`` have sent no heartbeat lately."""
        nodes, silent = list(nodes), sorted(silent)
        heard = [node for node in nodes if node not in set(silent)]
        beats = [self._agents[node] for node in heard if node in self._agents]
        versions = Counter(beat.version for beat in beats)
        return AgentsRow(
            nodes=len(nodes),
            silent=len(silent),
            silent_nodes=tuple(silent[:NAMES_SHOWN]),
            versions=tuple(
                VersionRow(version=version, agents=count)
                for version, count in sorted(versions.items())
            ),
            unserved=tuple(
                UnservedRow(node=beat.node, vendors=beat.unserved)
                for beat in beats
                if beat.unserved
            )[:NAMES_SHOWN],
        )


def lease_row(
    *,
    name: str,
    holder: str,
    since_s: float | None,
    renewed_s: float | None,
    lease_s: float,
    transitions: int,
    now_s: float,
) -> LeaseRow:
    """Return a Lease as of ``now_s``."""
    return LeaseRow(
        name=name,
        holder=holder,
        since_s=since_s,
        renewed_s=renewed_s,
        lease_s=lease_s,
        transitions=transitions,
        is_expired=not holder or renewed_s is None or now_s - renewed_s > lease_s,
    )


def _replica_row(service: str, name: str, one: _Replica, now_s: float) -> ReplicaRow:
    durations = [ms for time_s, ms in one.decisions if time_s >= now_s - RECENT_S]
    return ReplicaRow(
        service=service,
        replica=name,
        last_s=one.last_s,
        last=one.last,
        decisions=len(durations),
        decision_median_ms=round(median(durations), 3) if durations else 0.0,
        decision_longest_ms=max(durations, default=0.0),
    )


def concerns_of(
    *,
    agents: AgentsRow,
    version: str,
    streams: Iterable[StreamRow],
    consumers: Iterable[ConsumerRow],
    quarantined: Mapping[str, int],
    dead_letters: int,
    config_problem: str,
) -> tuple[Concern, ...]:
    """Return what an operator should look at."""
    found: list[Concern] = []

    def add(code: ConcernCode, count: int, name: str = "") -> None:
        if count:
            found.append(Concern(code=code, name=name, count=count))

    if config_problem:
        found.append(Concern(code="configuration-not-in-use", name=config_problem))
    for stream in streams:
        if stream.problem:
            found.append(Concern(code="stream-unknown", name=stream.name))
            continue
        if not stream.has_leader:
            found.append(Concern(code="stream-without-leader", name=stream.name))
        behind = sum(not copy.is_current for copy in stream.copies)
        add("stream-copy-behind", behind, stream.name)
        if stream.read_seq is not None:
            if stream.limit_bytes > 0 and stream.size_bytes >= FULL * stream.limit_bytes:
                percent = 100 * stream.size_bytes // stream.limit_bytes
                add("stream-almost-full", percent, stream.name)
            unread = stream.last_seq - stream.read_seq
            add("registry-behind", unread if unread >= BEHIND else 0, stream.name)
    for consumer in consumers:
        if consumer.pending >= BEHIND:
            add("consumer-behind", consumer.pending, f"{consumer.stream}/{consumer.name}")
    add("agents-silent", agents.silent, next(iter(agents.silent_nodes), ""))
    others = [row for row in agents.versions if row.version not in ("", version)]
    add(
        "agents-of-another-version",
        sum(row.agents for row in others),
        ", ".join(row.version for row in others[:3]),
    )
    add("vendors-unserved", len(agents.unserved), next((r.node for r in agents.unserved), ""))
    add("objects-in-quarantine", sum(quarantined.values()), ", ".join(sorted(quarantined)))
    add("messages-dead-lettered", dead_letters)
    return tuple(found)
