# SPDX-License-Identifier: Apache-2.0
"""Writes the catalog in docs/metrics.md from the services' metrics; ``--check`` only compares.

Everything between the markers ``generated: catalogue`` and ``end of generated part`` belongs to
this program. A name that occurs twice, or has no help text, is an error.
"""

import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from hami_common.metrics.families import Group
from hami_common.runtime import reload, skufile
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.supervise import Supervisor
from hami_common.runtime.watchedfile import FileMetrics
from hami_core.quota.accounts import QuotaLedger
from hami_nodeagent.shell import metrics as agent
from hami_nodeagent.shell import usagemetrics
from hami_registry.shell import metrics as registry
from hami_registry.shell.canonical import DEVICE_CONFIG
from hami_scheduler.shell import clustermetrics, policies, quota
from hami_scheduler.shell import metrics as scheduler
from hami_scheduler.shell.quota import QuotaKeeper, QuotaMetrics
from hami_webhook.shell import metrics as webhook
from tools.generated import DOCS, write_parts

_UNITS = (
    ("_timestamp_seconds", "Unix seconds"),
    ("_seconds", "seconds"),
    ("_bytes", "bytes"),
    ("_allocated_memory", "MiB"),
    ("_memory_limit", "MiB"),
    ("_memory_allocation_for_a_certain_pod", "MiB"),
    ("_cores", "percent"),
    ("_core_allocation_for_a_certain_pod", "percent"),
    ("hami_node_gpu_memory_allocated_ratio", "0 to 1"),
    ("_ratio", "percent"),
    ("hami_node_gpu_overview", "bytes"),
    ("_resource_quota_used", "MiB, percent or shares"),
    ("_resource_quota_limit", "MiB, percent or shares"),
    ("_queue_waiting_pods", "pods"),
    ("_queue_used", "MiB, percent or shares"),
    ("_queue_guaranteed", "MiB, percent or shares"),
    ("_queue_borrowed", "MiB, percent or shares"),
    ("_queue_limit", "MiB, percent or shares"),
)


EVERY = "every service"
SKUS = "registry and webhook"


class Row(NamedTuple):
    """One metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    service: str
    names: str = ""
    """The set of names it belongs to; empty: always shown."""
    replaces: str = ""

    @property
    def unit(self) -> str:
        """Return the unit from the suffix of the name."""
        base = self.name.removesuffix("_total")
        for end, unit in _UNITS:
            if base.endswith(end):
                return unit
        return "0 or 1" if self.text.startswith("1 ") else "count"


def rows() -> list[Row]:
    """Every metric of every service."""
    found = [
        *_own(EVERY, FileMetrics(reload.FILE, CollectorRegistry())),
        *_own(EVERY, reload.Metrics(CollectorRegistry())),
        *_own(EVERY, Quarantine(kinds=(), clock=SystemClock(), registry=CollectorRegistry())),
        *_own(EVERY, Supervisor(clock=SystemClock(), registry=CollectorRegistry())),
        *_own("scheduler", scheduler.Metrics(CollectorRegistry())),
        *_own("scheduler", scheduler.CertificateMetrics(CollectorRegistry())),
        *_own("scheduler", scheduler.PolicyMetrics(CollectorRegistry())),
        *_own("scheduler", FileMetrics(policies.FILE, CollectorRegistry())),
        *_own("scheduler", FileMetrics(quota.FILE, CollectorRegistry())),
        *_collected("scheduler", _quota_metrics()),
        *_grouped("scheduler", clustermetrics.DEVICE_GROUPS),
        *_grouped("scheduler", clustermetrics.SHARE_GROUPS),
        *_grouped("scheduler", clustermetrics.POD_GROUPS),
        *_grouped("scheduler", clustermetrics.QUOTA_GROUPS),
        *_own("nodeagent", agent.Metrics(CollectorRegistry())),
        *_own("nodeagent", agent.RecallMetrics(CollectorRegistry())),
        *_own("nodeagent", agent.OvercommitMetrics(CollectorRegistry())),
        *_own("nodeagent", agent.ClaimMetrics(CollectorRegistry())),
        *_grouped("nodeagent", usagemetrics.DEVICE_GROUPS),
        *_grouped("nodeagent", usagemetrics.CLAIM_GROUPS),
        *_grouped("nodeagent", usagemetrics.MIG_GROUPS),
        *_grouped("nodeagent", usagemetrics.INSTANCE_GROUPS),
        *_grouped("nodeagent", usagemetrics.CONTAINER_GROUPS),
        *_grouped("nodeagent", usagemetrics.HOST_GROUPS),
        *_grouped("nodeagent", usagemetrics.BREACH_GROUPS),
        *_grouped("nodeagent", usagemetrics.METER_GROUPS),
        *_grouped("nodeagent", usagemetrics.CAPACITY_GROUPS),
        *_own("registry", registry.Metrics(CollectorRegistry())),
        *_own("registry", FileMetrics(DEVICE_CONFIG, CollectorRegistry())),
        *_own(SKUS, FileMetrics(skufile.FILE, CollectorRegistry())),
        *_own("webhook", webhook.Metrics(CollectorRegistry())),
    ]
    names = [row.name for row in found]
    doubled = sorted({name for name in names if names.count(name) > 1})
    silent = sorted(row.name for row in found if not row.text)
    if doubled or silent:
        raise ValueError(f"told twice: {doubled}, without text: {silent}")
    return found


def _own(service: str, metrics: object) -> list[Row]:
    """Return the metrics of a service; the client library has no public way to read them back."""
    found = []
    for one in vars(metrics).values():
        if isinstance(one, MetricWrapperBase):
            kind = str(one._type)  # noqa: SLF001
            name = one._name + {"counter": "_total", "info": "_info"}.get(kind, "")  # noqa: SLF001
            labels = ("digest",) if kind == "info" else tuple(one._labelnames)  # noqa: SLF001
            found.append(Row(name, kind, labels, one._documentation, service))  # noqa: SLF001
    return found


def _collected(service: str, families: Iterable[Any]) -> list[Row]:
    return [
        Row(
            one.name,
            one.type,
            tuple(one._labelnames),  # noqa: SLF001 - as above
            one.documentation,
            service,
            "hami" if one.name.startswith("hami_resource") else "",
            "QuotaUsed" if one.name == "hami_resource_quota_used" else "",
        )
        for one in families
    ]


def _quota_metrics() -> Iterable[Any]:
    quarantine = Quarantine(kinds=(), clock=SystemClock(), registry=CollectorRegistry())
    nothing = SimpleNamespace(ledger=QuotaLedger(), quarantine=quarantine)
    return QuotaMetrics(cast("QuotaKeeper", nothing)).collect()


def _grouped(service: str, groups: Sequence[Group[Any]]) -> list[Row]:
    return [
        Row(
            family.name,
            family.kind,
            group.labels,
            family.text,
            service,
            group.names or "",
            family.replaces,
        )
        for group in groups
        for family, _ in group.families
    ]


def catalogue(found: Sequence[Row]) -> str:
    """All tables."""
    parts = []
    for service in (EVERY, "scheduler", "nodeagent", "registry", "webhook", SKUS):
        mine = [row for row in found if row.service == service]
        parts.append(f"### {service}")
        parts.append(_table([row for row in mine if row.names in ("", "hami")]))
    parts.append("### HAMi's older names (`legacy`)")
    parts.append(_table([row for row in found if row.names == "legacy"]))
    parts.append("### Volcano's names (`volcano`)")
    parts.append(_table([row for row in found if row.names == "volcano"]))
    return "\n\n".join(parts)


def _table(mine: Sequence[Row]) -> str:
    units = {row.replaces: row.unit for row in rows() if row.replaces}
    lines = [
        "| name | type | unit | labels | meaning | HAMi's older name |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in mine:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        older = f"`{row.replaces}`" if row.replaces else ""
        unit = units.get(row.name, row.unit)
        lines.append(f"| `{row.name}` | {row.kind} | {unit} | {labels} | {row.text} | {older} |")
    return "\n".join(lines)


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    return write_parts(DOCS / "metrics.md", {"catalogue": catalogue(rows())})


if __name__ == "__main__":
    sys.exit(main())
