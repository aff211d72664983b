# SPDX-License-Identifier: Apache-2.0
"""Read model of objects in quarantine, folded from the reports of all services.

One row per service, replica, kind and key. A row ends when the replica reports the end, or when the
replica has not repeated it for ``STALE_S``: a replica that ended reports nothing. Rows are bounded
per replica, so that one replica that reports without end hides no other. Times are seconds of the
caller's monotonic clock, except for those inside the records.
"""

from collections import OrderedDict
from typing import Final

from msgspec import Struct

from hami_common.events.quarantine import STALE_S, QuarantineRecord
from hami_common.model.quarantine import QuarantinedObject

AGENT_ROWS_MOST: Final = 1_000
"""Maximum rows of one node agent."""
REPLICA_ROWS_MOST: Final = 10_000
"""Maximum rows of one replica of the scheduler, the registry or the webhook."""
REPLICAS_MOST: Final = 20_000
"""Maximum replicas, agents included, of which rows are kept."""


class _Row(Struct):
    view: QuarantinedObject
    seen_s: float


_Key = tuple[str, str]
"""(kind, key) of an object."""


class Quarantined:
    """Objects in quarantine, of all services."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[str, str], OrderedDict[_Key, _Row]] = OrderedDict()
        """By (service, replica); the latest reported comes last."""

    def seen(self, record: QuarantineRecord, *, now_s: float) -> None:
        """Fold a report.

        The oldest rows are dropped where a replica, or the cluster, has too many.
        """
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

    def rows(self, *, namespace: str | None = None, now_s: float) -> list[QuarantinedObject]:
        """Return the rows of one namespace or all, sorted, and drop stale ones."""
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


def _view(record: QuarantineRecord) -> QuarantinedObject:
    return QuarantinedObject(
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
