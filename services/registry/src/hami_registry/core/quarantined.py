# SPDX-License-Identifier: Apache-2.0
"""Read model of objects in quarantine, folded from what all services report.

One row per service, replica, kind and key. A row ends when the replica says that it is over, or
when the replica has not repeated it for ``STALE_S``: a replica that ended reports nothing. Rows are
bounded per replica, so that one replica that reports without end hides no other. Times are seconds
of the caller's monotonic clock, but for those inside the records.
"""

from collections import OrderedDict
from typing import Final

from msgspec import Struct

from hami_common.events.quarantine import STALE_S, QuarantineRecord

AGENT_ROWS_MOST: Final = 1_000
"""Rows of one node agent."""
REPLICA_ROWS_MOST: Final = 10_000
"""Rows of one replica of the scheduler, the registry or the webhook."""
REPLICAS_MOST: Final = 20_000
"""Replicas, agents included, of which rows are kept."""


class QuarantinedView(Struct, frozen=True, kw_only=True):
    """One object that a replica cannot handle and retries."""

    service: str
    replica: str
    """Name of the replica; of an agent, its node."""
    kind: str
    """Kind of the object, such as `pod` or `record`."""
    key: str
    """Identifies the object among its kind: a uid, a bucket key, a subject."""
    namespace: str
    """Namespace of the Kubernetes object concerned; empty where it has none or is not known."""
    name: str
    """Name of the Kubernetes object concerned; empty where there is none or it is not known."""
    problem: str
    """Type and text of the last error."""
    failures: int
    """Attempts that failed."""
    first_s: float
    """Unix time of the first failure."""
    last_s: float
    """Unix time of the last failure that was reported."""


class _Row(Struct):
    view: QuarantinedView
    seen_s: float


_Key = tuple[str, str]
"""(kind, key) of an object."""


class Quarantined:
    """Objects in quarantine, of all services."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[str, str], OrderedDict[_Key, _Row]] = OrderedDict()
        """By (service, replica); what was reported last comes last."""

    def seen(self, record: QuarantineRecord, *, now_s: float) -> None:
        """Take a report. The oldest rows give way where a replica, or the cluster, has too many."""
        replica = (record.service, record.replica)
        rows = self._rows.pop(replica, None)
        if rows is None:
            rows = OrderedDict()
        rows.pop((record.kind, record.key), None)
        if not record.is_over:
            rows[record.kind, record.key] = _Row(view=_view(record), seen_s=now_s)
        most = AGENT_ROWS_MOST if record.service == "nodeagent" else REPLICA_ROWS_MOST
        while len(rows) > most:
            rows.popitem(last=False)
        if rows:
            self._rows[replica] = rows
        while len(self._rows) > REPLICAS_MOST:
            self._rows.popitem(last=False)

    def rows(self, *, namespace: str | None = None, now_s: float) -> list[QuarantinedView]:
        """List what is in quarantine, of one namespace or all, sorted; drop what is stale."""
        self._drop_stale(now_s)
        found = [
            row.view
            for rows in self._rows.values()
            for row in rows.values()
            if namespace in (None, row.view.namespace)
        ]
        return sorted(found, key=lambda view: (view.service, view.replica, view.kind, view.key))

    def _drop_stale(self, now_s: float) -> None:
        for replica, rows in list(self._rows.items()):
            # Rows are in order of their reports.
            while rows and next(iter(rows.values())).seen_s < now_s - STALE_S:
                rows.popitem(last=False)
            if not rows:
                del self._rows[replica]


def _view(record: QuarantineRecord) -> QuarantinedView:
    return QuarantinedView(
        service=record.service,
        replica=record.replica,
        kind=record.kind,
        key=record.key,
        namespace=record.namespace,
        name=record.name,
        problem=record.problem,
        failures=record.failures,
        first_s=record.first_s,
        last_s=record.last_s,
    )
