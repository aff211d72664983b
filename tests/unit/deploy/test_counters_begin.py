# SPDX-License-Identifier: Apache-2.0
"""Every counter whose increase an alert reads exists, at 0, before its first event.

``increase()`` over a series that begins with its first event is 0: the alert would miss it.
"""

import re
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from hami_common.runtime.clock import SystemClock
from hami_common.runtime.supervise import Supervisor
from hami_nodeagent.shell import metrics as agent
from hami_registry.shell import metrics as registry
from hami_scheduler.shell import metrics as scheduler
from hami_webhook.shell import metrics as webhook

RULES = Path(__file__).parents[3] / "deploy/kustomize/components/prometheus/rules/hami.yaml"
COUNTED = {
    (rule["alert"], selector)
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    for selector in re.findall(r"(hami_\w+_total(?:\{[^}]*\})?)\[", rule["expr"])
    if not selector.startswith("hami_metering_")
}
"""Alerts with the counters they read. Metering counts seconds of live containers: there is
nothing to count before one lives."""


@pytest.fixture(scope="module")
def begun() -> list[Metric]:
    """Series that services export before any event."""
    shown = CollectorRegistry()
    scheduler.Metrics(shown)
    scheduler.PolicyMetrics(shown)
    registry.Metrics(shown)
    webhook.Metrics(shown)
    agent.Metrics(shown).begin("nvidia.com/gpu")
    supervisor = Supervisor(clock=SystemClock(), registry=shown)
    anyio.run(supervisor.keep, "reports", anyio.lowlevel.checkpoint)
    return list(shown.collect())


def selected(families: list[Metric], selector: str) -> list[float]:
    """Values of the series that a selector of labels that equal, or match, names."""
    name, _, inside = selector.rstrip("}").partition("{")
    wanted = re.findall(r'(\w+)(=~?)"([^"]*)"', inside)
    return [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
        and all(
            re.fullmatch(value if how == "=~" else re.escape(value), sample.labels[label])
            for label, how, value in wanted
        )
    ]


def test_alerts_on_counters_are_found() -> None:
    assert {alert for alert, _ in COUNTED} >= {
        "HamiWorkDropped",
        "HamiLimiterMissing",
        "HamiReportsMalformed",
        "HamiAdmissionErrors",
    }


@pytest.mark.parametrize(("alert", "selector"), sorted(COUNTED))
def test_counter_of_an_alert_begins_at_0(begun: list[Metric], alert: str, selector: str) -> None:
    values = selected(begun, selector)
    assert values, f"{alert} would miss the first event of {selector}"
    assert set(values) == {0.0}
    alternatives = re.findall(r'=~"([^"]*)"', selector)
    assert len(values) >= max((text.count("|") + 1 for text in alternatives), default=1)
