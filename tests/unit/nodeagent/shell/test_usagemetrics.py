# SPDX-License-Identifier: Apache-2.0
"""The catalogue of metrics in the documentation is that of the code."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from hami_nodeagent.settings import PrioritySettings, Settings, UsageSettings
from hami_nodeagent.shell.metrics import Metrics
from hami_nodeagent.shell.usagemetrics import UsageMetrics

PAGE = Path(__file__).parents[4] / "docs" / "limiter-agent.md"
SHARED_PREFIX = "hami_vgpu_memory_"


def documented() -> set[str]:
    """Every metric named in the catalogue's first column, shortened names written out."""
    found: set[str] = set()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = line.split("|")
        if len(cells) < 4 or "`hami_" not in cells[1]:
            continue
        for name in re.findall(r"`([a-z_]+)`", cells[1]):
            found.add(name if name.startswith("hami_") else f"{SHARED_PREFIX}{name.lstrip('_')}")
    return found


def exposed() -> set[str]:
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in UsageMetrics("node-a").collect()
    }


def test_every_metric_of_containers_and_devices_is_documented() -> None:
    ours = {name for name in documented() if not name.startswith("hami_nodeagent_")}
    assert ours == exposed()


def test_documented_counters_of_the_agent_exist() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    existing = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in registry.collect()
    }
    assert {name for name in documented() if name.startswith("hami_nodeagent_")} <= existing


def test_documented_defaults_are_those_of_the_settings() -> None:
    text = PAGE.read_text(encoding="utf-8")
    settings = Settings(node_name="n", nats_urls=["nats://localhost"])
    for name in ("enforcement", "library", "library_dir", "pods_dir", "host_proc"):
        assert f"| `{name}` | `{getattr(settings, name)}` |" in text
    usage, priority = UsageSettings(), PrioritySettings()
    assert f"| `usage.look_s` | {usage.look_s:g} |" in text
    assert f"| `usage.breach.memory_margin_mib` | {usage.breach.memory_margin_mib} |" in text
    periods = (priority.rivals_s, priority.neighbours_s, priority.idle_s)
    assert ", ".join(f"{period:g}" for period in periods) in text
    assert f"{priority.hold_s:g}, {priority.lease_s:g} |" in text
