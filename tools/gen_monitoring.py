# SPDX-License-Identifier: Apache-2.0
"""Writes the Grafana dashboards and the PrometheusRule of deploy/; ``--check`` only compares.

Dashboards are defined below as data: title, unit and expressions of each panel. Scheduler replicas
all show the same devices, so each expression on those takes the maximum over replicas first.
Expressions are for Prometheus 2.42 and newer; each is evaluated by a test on a running cluster
(tests/integration/monitoring).
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from tools.generated import ROOT, write

COMPONENTS: Final = ROOT / "deploy" / "kustomize" / "components"
RULES: Final = COMPONENTS / "prometheus" / "rules" / "hami.yaml"
OPERATOR: Final = COMPONENTS / "prometheus-operator" / "prometheus-rule.yaml"
DASHBOARDS: Final = COMPONENTS / "grafana" / "dashboards"

NODES: Final = 'node=~"$node"'
SPACES: Final = 'namespace=~"$namespace"'
RATE: Final = "[$__rate_interval]"
_WIDTH: Final = 24
_COLUMNS: Final = 3
_HEIGHT: Final = 8

Panel = tuple[str, str, str, tuple[tuple[str, str], ...]]
"""Title, kind, unit, and expressions with their legends."""


def once(metric: str, *by: str) -> str:
    """Return a metric of devices or shares, deduplicated over replicas."""
    return f"max by ({', '.join(by)}) ({metric})"


def devices(metric: str, labels: str = "") -> str:
    """A metric of devices, once per device."""
    return once(f"{metric}{{{labels}}}" if labels else metric, "node", "device_uuid", "device_type")


def shares(metric: str, labels: str) -> str:
    """A metric of shares, once per container and device."""
    by = ("namespace", "node", "pod", "container_index", "device_uuid")
    return once(f"{metric}{{{labels}}}", *by)


def quantile(part: float, metric: str, by: str, labels: str = "") -> str:
    """A quantile of a histogram."""
    chosen = f"{{{labels}}}" if labels else ""
    return (
        f"histogram_quantile({part}, sum by (le, {by}) (rate({metric}_bucket{chosen}{RATE})))"
        if by
        else f"histogram_quantile({part}, sum by (le) (rate({metric}_bucket{chosen}{RATE})))"
    )


CLUSTER: Final[tuple[Panel, ...]] = (
    ("Devices", "stat", "none", ((f"count({devices('hami_gpu_memory_limit_bytes')})", ""),)),
    (
        "Memory given out",
        "stat",
        "percentunit",
        (
            (
                (
                    f"sum({devices('hami_gpu_memory_allocated_bytes')})"
                    f" / sum({devices('hami_gpu_memory_limit_bytes')})"
                ),
                "",
            ),
        ),
    ),
    (
        "Compute given out",
        "stat",
        "percentunit",
        (
            (
                (
                    f"sum({devices('hami_gpu_core_allocated_ratio')})"
                    f" / sum({devices('hami_gpu_core_limit_ratio')})"
                ),
                "",
            ),
        ),
    ),
    (
        "Devices out of order",
        "stat",
        "none",
        (("count(hami_nodeagent_device_healthy == 0) or vector(0)", ""),),
    ),
    ("Nodes not heard", "stat", "none", (("max(hami_scheduler_silent_nodes)", ""),)),
    ("Pods that wait", "stat", "none", (("max(hami_scheduler_waiting_pods)", ""),)),
    (
        "Memory given out, by node",
        "timeseries",
        "bytes",
        ((f"sum by (node) ({devices('hami_gpu_memory_allocated_bytes')})", "{{node}}"),),
    ),
    (
        "Memory in use, by node",
        "timeseries",
        "bytes",
        (("sum by (node) (hami_host_gpu_memory_used_bytes)", "{{node}}"),),
    ),
    (
        "Busy, by node",
        "timeseries",
        "percent",
        (("avg by (node) (hami_host_gpu_utilization_ratio)", "{{node}}"),),
    ),
    (
        "Devices given out, by type",
        "timeseries",
        "none",
        (
            (
                f"sum by (device_type) (rate(hami_metering_slice_seconds_total{RATE}))",
                "{{device_type}} held",
            ),
            (
                f"sum by (device_type) (rate(hami_metering_device_seconds_total{RATE}))",
                "{{device_type}} there",
            ),
        ),
    ),
    (
        "Held and idle, of what is held",
        "timeseries",
        "percentunit",
        (
            (
                (
                    f"sum(rate(hami_metering_idle_seconds_total{RATE}))"
                    f" / sum(rate(hami_metering_slice_seconds_total{RATE}))"
                ),
                "idle",
            ),
        ),
    ),
    (
        "Devices of idle allocations",
        "timeseries",
        "none",
        (("max(hami_registry_idle_devices)", "whole devices"),),
    ),
    (
        "Actions on idle allocations",
        "timeseries",
        "none",
        (
            (
                f"sum by (policy, outcome) (increase(hami_scheduler_idle_actions_total{RATE}))",
                "{{policy}} {{outcome}}",
            ),
        ),
    ),
    (
        "Containers per device",
        "timeseries",
        "none",
        ((f"avg by (device_type) ({devices('hami_gpu_shared_count')})", "{{device_type}}"),),
    ),
)

NODE: Final[tuple[Panel, ...]] = (
    (
        "Overcommitted memory in the host, by device",
        "timeseries",
        "bytes",
        (
            (
                "hami_overcommit_spilled_bytes and on (device_uuid) "
                + devices("hami_gpu_memory_limit_bytes", NODES),
                "{{device_uuid}}",
            ),
            (f"hami_overcommit_host_headroom_bytes{{{NODES}}}", "headroom of {{node}}"),
        ),
    ),
    (
        "Memory given out, by device",
        "timeseries",
        "percentunit",
        ((devices("hami_node_gpu_memory_allocated_ratio", NODES), "{{node}} {{device_uuid}}"),),
    ),
    (
        "Compute given out, by device",
        "timeseries",
        "percent",
        ((devices("hami_gpu_core_allocated_ratio", NODES), "{{node}} {{device_uuid}}"),),
    ),
    (
        "Containers, by device",
        "timeseries",
        "none",
        ((devices("hami_gpu_shared_count", NODES), "{{node}} {{device_uuid}}"),),
    ),
    (
        "Memory in use, by device",
        "timeseries",
        "bytes",
        ((f"hami_host_gpu_memory_used_bytes{{{NODES}}}", "{{node}} {{device_index}}"),),
    ),
    (
        "Busy, by device",
        "timeseries",
        "percent",
        ((f"hami_host_gpu_utilization_ratio{{{NODES}}}", "{{node}} {{device_index}}"),),
    ),
    (
        "Memory used, by container",
        "timeseries",
        "bytes",
        (
            (
                (
                    "hami_vgpu_memory_used_bytes and on (device_uuid)"
                    f" {devices('hami_gpu_memory_limit_bytes', NODES)}"
                ),
                "{{namespace}}/{{pod}} {{container}}",
            ),
        ),
    ),
    (
        "Memory given out, in words",
        "table",
        "bytes",
        ((shares("hami_vgpu_memory_allocated_bytes", NODES), ""),),
    ),
    (
        "Devices in order",
        "stat",
        "none",
        (("sum by (instance, vendor) (hami_nodeagent_device_healthy)", "{{instance}} {{vendor}}"),),
    ),
    (
        "Allocate, 99th percentile",
        "timeseries",
        "s",
        ((quantile(0.99, "hami_nodeagent_allocate_seconds", "resource"), "{{resource}}"),),
    ),
    (
        "ResourceClaims prepared or refused, by outcome",
        "timeseries",
        "none",
        (
            (
                f"sum by (outcome) (increase(hami_nodeagent_claim_prepares_total{RATE}))",
                "{{outcome}}",
            ),
        ),
    ),
    (
        "Writes of ResourceSlices, by node",
        "timeseries",
        "wps",
        ((f"sum by (instance) (rate(hami_nodeagent_slice_writes_total{RATE}))", "{{instance}}"),),
    ),
)

NAMESPACE: Final[tuple[Panel, ...]] = (
    (
        "Memory given",
        "timeseries",
        "bytes",
        (
            (
                f"sum by (namespace) ({shares('hami_vgpu_memory_allocated_bytes', SPACES)})",
                "{{namespace}}",
            ),
        ),
    ),
    (
        "Memory used, of what was given",
        "timeseries",
        "percentunit",
        (
            (
                (
                    f"sum by (namespace) (hami_vgpu_memory_used_bytes{{{SPACES}}})"
                    f" / sum by (namespace) (hami_vgpu_memory_limit_bytes{{{SPACES}}})"
                ),
                "{{namespace}}",
            ),
        ),
    ),
    (
        "Busy, by container",
        "timeseries",
        "percent",
        (
            (
                f"hami_container_device_utilization_ratio{{{SPACES}}}",
                "{{namespace}}/{{pod}} {{container}}",
            ),
        ),
    ),
    (
        "Device hours in the range shown",
        "stat",
        "h",
        (
            (
                (
                    "sum by (namespace)"
                    f" (increase(hami_metering_slice_seconds_total{{{SPACES}}}[$__range])) / 3600"
                ),
                "{{namespace}}",
            ),
        ),
    ),
    (
        "Held and idle",
        "timeseries",
        "percentunit",
        (
            (
                (
                    f"sum by (namespace) (rate(hami_metering_idle_seconds_total{{{SPACES}}}{RATE}))"
                    " / sum by (namespace)"
                    f" (rate(hami_metering_slice_seconds_total{{{SPACES}}}{RATE}))"
                ),
                "{{namespace}}",
            ),
        ),
    ),
    (
        "Waiting for the compute limit",
        "timeseries",
        "s",
        (
            (
                f"sum by (namespace, pod) (rate(hami_vgpu_wait_seconds_total{{{SPACES}}}{RATE}))",
                "{{namespace}}/{{pod}}",
            ),
        ),
    ),
    (
        "Allocations refused by the memory limit",
        "timeseries",
        "none",
        (
            (
                (
                    "sum by (namespace, pod)"
                    f" (increase(hami_vgpu_refused_allocations_total{{{SPACES}}}{RATE}))"
                ),
                "{{namespace}}/{{pod}}",
            ),
        ),
    ),
    (
        "Quota used",
        "timeseries",
        "percentunit",
        (
            (
                once(
                    f"hami_resource_quota_used{{{SPACES}}}",
                    "namespace",
                    "quota_name",
                )
                + " / "
                + once(
                    f"hami_resource_quota_limit{{{SPACES}}}",
                    "namespace",
                    "quota_name",
                ),
                "{{namespace}} {{quota_name}}",
            ),
        ),
    ),
)

SCHEDULER: Final[tuple[Panel, ...]] = (
    (
        "Calls of kube-scheduler",
        "timeseries",
        "reqps",
        ((f"sum by (verb) (rate(hami_scheduler_verb_seconds_count{RATE}))", "{{verb}}"),),
    ),
    (
        "Time to answer",
        "timeseries",
        "s",
        (
            (quantile(0.5, "hami_scheduler_verb_seconds", "verb"), "{{verb}} half"),
            (quantile(0.99, "hami_scheduler_verb_seconds", "verb"), "{{verb}} 99 %"),
        ),
    ),
    (
        "Nodes refused, by reason",
        "timeseries",
        "none",
        ((f"sum by (code) (increase(hami_scheduler_node_refusals_total{RATE}))", "{{code}}"),),
    ),
    (
        "Binds, by outcome",
        "timeseries",
        "none",
        ((f"sum by (outcome) (increase(hami_scheduler_binds_total{RATE}))", "{{outcome}}"),),
    ),
    (
        "Append to the ledger",
        "timeseries",
        "s",
        ((quantile(0.99, "hami_scheduler_ledger_append_seconds", ""), "99 %"),),
    ),
    (
        "Lost races for a node, of all binds",
        "timeseries",
        "percentunit",
        (
            (
                (
                    f"sum(rate(hami_scheduler_fence_conflicts_total{RATE}))"
                    f" / sum(rate(hami_scheduler_binds_total{RATE}))"
                ),
                "",
            ),
        ),
    ),
    (
        "Admission, 99th percentile",
        "timeseries",
        "s",
        ((quantile(0.99, "hami_webhook_admission_seconds", ""), "99 %"),),
    ),
    (
        "Admissions, by outcome",
        "timeseries",
        "none",
        (
            (
                f"sum by (operation, outcome) (increase(hami_webhook_admissions_total{RATE}))",
                "{{operation}} {{outcome}}",
            ),
        ),
    ),
    (
        "Shares given back, by cause",
        "timeseries",
        "none",
        ((f"sum by (cause) (increase(hami_scheduler_releases_total{RATE}))", "{{cause}}"),),
    ),
    (
        "Verdicts about ResourceClaims",
        "timeseries",
        "none",
        ((f"sum by (outcome) (increase(hami_scheduler_claims_total{RATE}))", "{{outcome}}"),),
    ),
)

ALL: Final[dict[str, tuple[str, tuple[Panel, ...], dict[str, str]]]] = {
    "hami-cluster": ("HAMi: cluster", CLUSTER, {}),
    "hami-node": (
        "HAMi: nodes",
        NODE,
        {"node": "label_values(hami_gpu_memory_limit_bytes, node)"},
    ),
    "hami-namespace": (
        "HAMi: namespaces",
        NAMESPACE,
        {"namespace": "label_values(hami_metering_slice_seconds_total, namespace)"},
    ),
    "hami-scheduler": ("HAMi: scheduler", SCHEDULER, {}),
}
"""Title, panels and variables, by file and uid."""


CONSOLE: Final = "https://localhost:9443/console"
"""Default of the variable ``console``: a forwarded port of the registry, as in docs/console.md."""
VIEWS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "hami-cluster": (("Fleet", "fleet"), ("Capacity", "capacity"), ("Usage", "usage")),
    "hami-node": (("Fleet", "fleet"), ("Device problems", "devices")),
    "hami-namespace": (("Workloads", "workloads"), ("Pressure", "pressure"), ("Usage", "usage")),
    "hami-scheduler": (
        ("Waiting pods", "pending"),
        ("Queues", "queues"),
        ("Control plane", "system"),
    ),
}
"""Title and path of the console's views to which a dashboard links."""


def dashboard(uid: str) -> dict[str, Any]:
    """One dashboard as Grafana imports it."""
    title, panels, variables = ALL[uid]
    return {
        "uid": uid,
        "title": title,
        "tags": ["hami"],
        "schemaVersion": 39,
        "editable": True,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "1m",
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                *(_variable(name, query) for name, query in variables.items()),
                {
                    "name": "console",
                    "label": "Address of the console",
                    "type": "textbox",
                    "query": CONSOLE,
                    "current": {"text": CONSOLE, "value": CONSOLE},
                },
            ]
        },
        "links": [
            {"title": title, "type": "link", "url": f"${{console}}/{path}", "targetBlank": True}
            for title, path in VIEWS[uid]
        ],
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    title, kind, unit, targets = panel
    width = _WIDTH // _COLUMNS
    row, column = divmod(number, _COLUMNS)
    source = {"type": "prometheus", "uid": "${source}"}
    made: dict[str, Any] = {
        "id": number + 1,
        "title": title,
        "type": kind,
        "datasource": source,
        "gridPos": {"x": column * width, "y": row * _HEIGHT, "w": width, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": source,
                "expr": expr,
                "legendFormat": legend,
                **({"instant": True, "format": "table"} if kind == "table" else {}),
            }
            for place, (expr, legend) in enumerate(targets)
        ],
    }
    return made


def rule() -> str:
    """The rules as the Prometheus operator reads them."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "hami", "namespace": "hami-system"},
        "spec": {"groups": groups},
    }
    text = yaml.safe_dump(document, sort_keys=False, width=110)
    return (
        "# SPDX-License-Identifier: Apache-2.0\n"
        "# Generated by tools/gen_monitoring.py from ../prometheus/rules/hami.yaml; do not edit.\n"
        + text
    )


def fresh() -> dict[Path, str]:
    """Every generated file and its text."""
    files = {OPERATOR: rule()}
    for uid in ALL:
        text = json.dumps(dashboard(uid), indent=1, ensure_ascii=False)
        files[DASHBOARDS / f"{uid}.json"] = f"{text}\n"
    return files


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    return write(fresh())


if __name__ == "__main__":
    sys.exit(main())
