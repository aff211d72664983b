# SPDX-License-Identifier: Apache-2.0
"""Each alert fires when it should and not otherwise, by promtool; its texts are well formed."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import yaml

from hami_common.metrics.families import head
from hami_nodeagent.shell import usagemetrics
from hami_scheduler.shell import clustermetrics
from tests.support.prometheus import program_or_skip

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "kustomize" / "components" / "prometheus" / "rules" / "hami.yaml"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}
NEVER = "0x240"
"""A counter that stays constant for two hours, one sample a minute."""
RISES = "0x30 1+1x210"
STEADY = "0+60x240"


class Case(NamedTuple):
    """Series that make an alert fire, and series that must not."""

    bad: dict[str, str]
    good: dict[str, str]
    labels: Mapping[str, str] = MappingProxyType({})
    """Labels of the firing alert, in addition to its severity."""


def histogram(name: str, slow: str, labels: str = "") -> dict[str, str]:
    """All calls up to 0.1 s or, ``slow``, up to 5 s."""
    fast = "0+0x240" if slow == STEADY else STEADY
    return {
        f'{name}_bucket{{{labels}le="0.1"}}': fast,
        f'{name}_bucket{{{labels}le="5"}}': STEADY,
        f'{name}_bucket{{{labels}le="+Inf"}}': STEADY,
    }


VERB = 'verb="filter",'
BINDS = 'hami_scheduler_binds_total{outcome="bound"}'
FAILED = 'hami_scheduler_verb_errors_total{verb="bind",cause="unavailable"}'
REFUSED = 'hami_nodeagent_refusals_total{instance="a",resource="nvidia.com/gpu",code="%s"}'
OF_TEAM = '{namespace="team",node="n"}'
BREACH = {
    "namespace": "team",
    "pod": "p",
    "container": "c",
    "device_uuid": "GPU-1",
    "kind": "memory",
}
BREACH_SERIES = "hami_vgpu_breach{" + ",".join(f'{k}="{v}"' for k, v in BREACH.items()) + "}"


def counter(name: str) -> Case:
    return Case(bad={name: RISES}, good={name: NEVER})


def gauge(name: str, bad: int, good: int, **labels: str) -> Case:
    return Case(bad={name: f"{bad}x240"}, good={name: f"{good}x240"}, labels=labels)


CASES: dict[str, Case] = {
    "HamiSchedulerAbsent": gauge("hami_scheduler_ready", 0, 1),
    "HamiSchedulerSlow": Case(
        bad=histogram("hami_scheduler_verb_seconds", STEADY, VERB),
        good=histogram("hami_scheduler_verb_seconds", NEVER, VERB),
        labels={"verb": "filter"},
    ),
    "HamiBindsFail": Case(
        bad={BINDS: STEADY, FAILED: STEADY}, good={BINDS: STEADY, FAILED: "0+1x240"}
    ),
    "HamiFenceConflicts": Case(
        bad={BINDS: STEADY, "hami_scheduler_fence_conflicts_total": "0+6x240"},
        good={BINDS: STEADY, "hami_scheduler_fence_conflicts_total": "0+1x240"},
    ),
    "HamiLedgerBroken": counter("hami_scheduler_broken_invariants_total"),
    "HamiOverBooked": counter("hami_scheduler_over_bookings_total"),
    "HamiAgentSilent": gauge("hami_scheduler_silent_nodes", 2, 0),
    "HamiPodsWait": gauge("hami_scheduler_waiting_pods", 3, 0),
    "HamiQueuesFileInvalid": gauge("hami_queues_file_valid", 0, 1),
    "HamiPoliciesFileInvalid": gauge("hami_policies_file_valid", 0, 1),
    "HamiCanaryRolledBack": counter("hami_scheduler_canary_rollbacks_total"),
    "HamiSkusFileInvalid": gauge("hami_skus_file_valid", 0, 1),
    "HamiWorkDropped": Case(
        bad={'hami_scheduler_queue_drops_total{queue="chores"}': RISES},
        good={'hami_scheduler_queue_drops_total{queue="chores"}': NEVER},
        labels={"queue": "chores"},
    ),
    "HamiDeviceUnhealthy": gauge(
        'hami_nodeagent_device_healthy{instance="a",vendor="nvidia",device="GPU-1"}',
        0,
        1,
        instance="a",
        vendor="nvidia",
        device="GPU-1",
    ),
    "HamiDriverDown": gauge(
        'hami_nodeagent_driver_up{instance="a",vendor="nvidia"}',
        0,
        1,
        instance="a",
        vendor="nvidia",
    ),
    "HamiAgentOffBus": gauge('hami_nodeagent_bus_connected{instance="a"}', 0, 1, instance="a"),
    "HamiLimiterMissing": Case(
        bad={REFUSED % "limiter-missing": RISES},
        good={REFUSED % "limiter-missing": NEVER, REFUSED % "pod-gone": "0x190 1x50"},
        labels={"code": "limiter-missing"},
    ),
    "HamiProcessesUnknown": gauge(
        'hami_nodeagent_unknown_processes{instance="a"}', 4, 0, instance="a"
    ),
    "HamiBreach": Case(
        bad={BREACH_SERIES: "1x240"}, good={BREACH_SERIES: "1 _x240"}, labels=BREACH
    ),
    "HamiDeviceThrashing": Case(
        bad={'hami_overcommit_pressure{kind="thrashing",device_uuid="GPU-1"}': "1x240"},
        good={'hami_overcommit_pressure{kind="spilled",device_uuid="GPU-1"}': "1x240"},
        labels={"device_uuid": "GPU-1"},
    ),
    "HamiHostMemoryShort": gauge('hami_overcommit_host_headroom_bytes{node="n"}', -1, 1, node="n"),
    "HamiWrongDevices": Case(
        bad={'hami_nodeagent_mismatches_total{instance="a"}': RISES},
        good={'hami_nodeagent_mismatches_total{instance="a"}': NEVER},
        labels={"instance": "a"},
    ),
    "HamiAllocateRefused": Case(
        bad={REFUSED % "ambiguous": RISES},
        good={REFUSED % "ambiguous": "0x60 1x180"},
        labels={"code": "ambiguous"},
    ),
    "HamiStateNotKept": Case(
        bad={'hami_nodeagent_checkpoint_failures_total{instance="a"}': RISES},
        good={'hami_nodeagent_checkpoint_failures_total{instance="a"}': NEVER},
        labels={"instance": "a"},
    ),
    "HamiRegistryAbsent": Case(bad={}, good={"hami_registry_config_generation": "1x240"}),
    "HamiDeviceConfigInvalid": gauge("hami_device_config_file_valid", 0, 1),
    "HamiReportsMalformed": Case(
        bad={'hami_registry_reports_total{outcome="poison"}': RISES},
        good={'hami_registry_reports_total{outcome="accepted"}': RISES},
    ),
    "HamiObjectsQuarantined": gauge(
        'hami_quarantined_objects{instance="a",kind="pod"}', 1, 0, instance="a", kind="pod"
    ),
    "HamiLoopRestarts": Case(
        bad={'hami_loop_restarts_total{instance="a",loop="pods"}': RISES},
        good={'hami_loop_restarts_total{instance="a",loop="pods"}': NEVER},
        labels={"instance": "a", "loop": "pods"},
    ),
    "HamiWebhookAbsent": Case(bad={}, good={"hami_webhook_bus_connected": "0x240"}),
    "HamiAdmissionErrors": Case(
        bad={'hami_webhook_admissions_total{operation="create",outcome="error"}': RISES},
        good={'hami_webhook_admissions_total{operation="create",outcome="denied"}': RISES},
    ),
    "HamiAdmissionSlow": Case(
        bad=histogram("hami_webhook_admission_seconds", STEADY),
        good=histogram("hami_webhook_admission_seconds", NEVER),
    ),
    "HamiCertificateExpires": gauge(
        "hami_webhook_certificate_not_after_timestamp_seconds", 604800, 2592000
    ),
    "HamiSettingsInvalid": gauge(
        'hami_settings_file_valid{job="hami",instance="a"}', 0, 1, job="hami", instance="a"
    ),
    "HamiIdleActionsRefused": Case(
        bad={'hami_scheduler_idle_actions_total{policy="evict",outcome="refused"}': "0+1x240"},
        good={'hami_scheduler_idle_actions_total{policy="evict",outcome="done"}': "0+1x240"},
        labels={"policy": "evict"},
    ),
    "HamiSharesIdle": Case(
        bad={
            f"hami_metering_slice_seconds_total{OF_TEAM}": "0+120x240",
            f"hami_metering_idle_seconds_total{OF_TEAM}": "0+118x240",
        },
        good={
            f"hami_metering_slice_seconds_total{OF_TEAM}": "0+120x240",
            f"hami_metering_idle_seconds_total{OF_TEAM}": "0+60x240",
        },
        labels={"namespace": "team"},
    ),
}


def firing(alert: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """promtool's expectation: this alert fires after more than three hours, with these labels."""
    told = {
        "alertname": alert,
        "alertstate": "firing",
        "severity": ALERTS[alert]["labels"]["severity"],
        **labels,
    }
    inner = ",".join(f'{key}="{value}"' for key, value in told.items())
    series = f"ALERTS{{{inner}}}"
    return {
        "expr": series,
        "eval_time": "200m",
        "exp_samples": [{"labels": series, "value": 1}],
    }


SILENT = {"expr": 'ALERTS{alertstate="firing"}', "eval_time": "200m", "exp_samples": []}


def world(series: Mapping[str, str], *expected: dict[str, Any]) -> dict[str, Any]:
    """promtool's test of all rules on these series."""
    return {
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": list(expected),
    }


def promtool(directory: Path, *tests: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    program = program_or_skip("promtool")
    file = directory / "tests.yaml"
    document = {"rule_files": [str(RULES)], "evaluation_interval": "5m", "tests": list(tests)}
    file.write_text(yaml.safe_dump(document))
    return subprocess.run(
        [program, "test", "rules", str(file)], capture_output=True, text=True, check=False
    )


def test_every_alert_fires_when_it_should_and_not_otherwise(tmp_path: Path) -> None:
    """All alerts fire where every fault is present, and none where none is."""
    assert CASES.keys() == ALERTS.keys()
    bad: dict[str, str] = {}
    good: dict[str, str] = {}
    for case in CASES.values():
        bad |= case.bad
        good |= case.good
    wanted = [firing(alert, case.labels) for alert, case in CASES.items()]
    done = promtool(tmp_path, world(bad, *wanted), world(good, SILENT))
    assert done.returncode == 0, done.stdout + done.stderr


def test_alert_that_should_not_fire_is_noticed(tmp_path: Path) -> None:
    """The test above can fail."""
    assert promtool(tmp_path, world(CASES["HamiLedgerBroken"].bad, SILENT)).returncode != 0
    wanted = firing("HamiLedgerBroken", {})
    assert promtool(tmp_path, world(CASES["HamiLedgerBroken"].good, wanted)).returncode != 0


LINT_EXCEPTIONS = ("hami_gpu_shared_count",)
"""HAMi's name ends in a suffix that is reserved for histograms."""


def test_new_names_please_promtools_lint() -> None:
    program = program_or_skip("promtool")
    groups: tuple[Any, ...] = (
        *clustermetrics.DEVICE_GROUPS,
        *clustermetrics.SHARE_GROUPS,
        *usagemetrics.DEVICE_GROUPS,
        *usagemetrics.CLAIM_GROUPS,
        *usagemetrics.CONTAINER_GROUPS,
        *usagemetrics.HOST_GROUPS,
        *usagemetrics.METER_GROUPS,
        *usagemetrics.CAPACITY_GROUPS,
    )
    text = "".join(
        f'{head(family)}{family.name}{{a="b"}} 1\n'
        for group in groups
        if group.names in (None, "hami")
        for family, _ in group.families
        if family.name not in LINT_EXCEPTIONS
    )
    done = subprocess.run(
        [program, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_severity_and_a_summary(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"].endswith(".")
