# SPDX-License-Identifier: Apache-2.0
"""The runbook covers every alert and every error code."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from hami_common.runtime import httpd
from hami_core.ledger.binding import Fate
from hami_core.placement.reasons import RefusalCode
from hami_nodeagent.core.claims import Code
from tools import gen_metrics

ROOT = Path(__file__).resolve().parents[3]
RUNBOOK = ROOT / "docs" / "runbook"
RULES = ROOT / "deploy" / "kustomize" / "components" / "prometheus" / "rules" / "hami.yaml"
ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}
SOURCES = sorted((ROOT / "services").glob("*/src/**/*.py"))
WORD = r'"([A-Za-z]+(?:-[a-z]+)*)"'
BINDING = ("no-fit", "unknown", "taken-back", "bound")


def sections(page: str) -> dict[str, str]:
    """Text of each section by its title."""
    parts = re.split(r"(?m)^## (.+)\n", (RUNBOOK / page).read_text(encoding="utf-8"))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def explained() -> set[str]:
    """Every word in the first column of a table of the runbook."""
    words: set[str] = set()
    for page in ("refusals.md", "errors.md"):
        for line in (RUNBOOK / page).read_text(encoding="utf-8").splitlines():
            if line.startswith("| `"):
                words.update(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return words


def told_codes() -> set[str]:
    """Every code that the services' sources report, as a code or as a bind's outcome."""
    found: set[str] = set()
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        found.update(re.findall(rf"\bcode={WORD}", text))
        if path.name == "binder.py":
            found.update(re.findall(rf"\boutcome={WORD}", text))
    text = Path(httpd.__file__).read_text(encoding="utf-8")
    return found | set(re.findall(rf"\bcode={WORD}", text))


def test_every_alert_has_its_section_and_no_section_is_left_over() -> None:
    assert sections("alerts.md").keys() == ALERTS.keys()


@pytest.mark.parametrize("alert", ALERTS)
def test_section_of_an_alert_has_a_check_and_a_fix(alert: str) -> None:
    lines = sections("alerts.md")[alert].strip().splitlines()
    assert any(line.startswith("- **Check:** ") for line in lines)
    assert any(line.startswith("- **Fix:** ") for line in lines)
    assert not lines[0].startswith("- "), "what it means comes first"


def test_every_code_is_explained() -> None:
    codes = told_codes()
    assert set(BINDING) <= codes, "the search finds what it looks for"
    codes |= {str(code.value) for code in Code} | set(get_args(RefusalCode))
    codes |= {code for _, _, code in httpd.CODES}
    codes |= {f"pod-{fate}" for fate in get_args(Fate)} - {
        "pod-free",
        "pod-ours",
        "pod-same-node",
    }
    assert codes - explained() == set()


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_is_about_metrics_of_the_catalogue(alert: str) -> None:
    known = {row.name for row in gen_metrics.rows()}
    used = set(re.findall(r"\bhami_[a-z_]+", ALERTS[alert]))
    assert used
    for name in used:
        assert name in known or name.removesuffix("_bucket") in known, name


OF_WORDS = {"kind", "vendor", "queue", "resource", "phase", "operation", "reason"}
"""Labels whose values are constants of the project, or of the configuration."""
OF_HARDWARE = {"device", "node", "device_uuid", "device_index", "device_type", "zone"}
OF_HARDWARE |= {"mig_uuid", "gpu_instance_id", "compute_instance_id", "profile"}
OF_HARDWARE |= {"placement_start", "placement_size"}
OF_PODS = {"namespace", "pod", "container", "vdevice_index", "container_index", "claim", "request"}
OF_QUOTAS = {"namespace", "quota_name", "limit", "zone"}
OF_ANYBODY = {"uid", "pod_uid", "uuid", "name", "user", "allocation_id", "path", "message", "error"}
"""Labels with as many values as there ever were pods or users."""


def test_labels_are_closed_sets_except_for_hardware_and_live_pods() -> None:
    for row in gen_metrics.rows():
        labels = set(row.labels)
        if row.names in ("legacy", "volcano"):
            continue  # whose labels are others' decision
        if row.name.startswith("hami_nodeagent_"):
            assert labels.isdisjoint(OF_PODS | OF_ANYBODY | OF_HARDWARE - {"device"}), row
        elif row.service == "nodeagent":
            assert labels <= OF_HARDWARE | OF_PODS | OF_WORDS, row
        elif row.name.startswith(("hami_gpu_", "hami_node_gpu_")):
            assert labels <= OF_HARDWARE | {"device_cores", "device_memory_limit"}, row
        elif row.name.startswith("hami_vgpu_"):
            assert labels <= OF_HARDWARE | OF_PODS, row
        elif row.name.startswith("hami_resource_quota_"):
            assert labels <= OF_QUOTAS, row
        else:
            assert labels.isdisjoint(OF_PODS | OF_ANYBODY | OF_HARDWARE), row
