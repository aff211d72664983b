# SPDX-License-Identifier: Apache-2.0
"""Versions of nodes and volume claims, each with one fault."""

from typing import Any

import pytest

from hamictl import nodechecks
from tests.cluster.releases import RELEASES, Role

SOUND = {
    "kernelVersion": "6.1.0-28-amd64",
    "kubeletVersion": "v1.34.4",
    "containerRuntimeVersion": "containerd://1.7.24",
}


def node(**info: str) -> dict[str, Any]:
    return {"metadata": {"name": "gpu-1"}, "status": {"nodeInfo": {**SOUND, **info}}}


def of(found: dict[str, Any], injection: str = "cdi") -> list[tuple[str, str, str]]:
    findings = list(nodechecks.platform([found], injection=injection))
    return [(one.check, one.verdict, one.text) for one in findings if one.verdict != "PASS"]


def test_recent_node_has_no_finding() -> None:
    assert of(node()) == []
    passed = list(nodechecks.platform([node()], injection="cdi"))
    assert [one.check for one in passed] == ["kubernetes", "node-versions"]


@pytest.mark.parametrize(
    ("info", "check", "verdict", "text"),
    [
        ({"kernelVersion": "3.2.0-4"}, "kernel", "FAIL", "3.2.0-4, older than 3.10"),
        ({"kubeletVersion": "v1.28.3"}, "kubernetes", "FAIL", "v1.28.3, older than 1.30"),
        ({"kubeletVersion": "v1.31.2+k3s1"}, "kubernetes", "WARN", "1.31 is not among"),
        ({"kubeletVersion": "v1.33.1-eks-1"}, "kubernetes", "WARN", "releases: 1.34"),
        (
            {"containerRuntimeVersion": "containerd://1.6.20~ds1"},
            "container-runtime",
            "FAIL",
            "containerd 1.6.20~ds1 cannot",
        ),
        ({"containerRuntimeVersion": "cri-o://1.22.1"}, "container-runtime", "FAIL", "cri-o"),
        ({"containerRuntimeVersion": "docker://24.0.1"}, "container-runtime", "WARN", "docker"),
    ],
)
def test_old_or_untested_version_is_named(
    info: dict[str, str], check: str, verdict: str, text: str
) -> None:
    ((found_check, found_verdict, found_text),) = of(node(**info))
    assert (found_check, found_verdict) == (check, verdict)
    assert text in found_text


def test_container_runtime_does_not_matter_where_devices_are_injected_by_nodes() -> None:
    assert of(node(containerRuntimeVersion="containerd://1.6.20"), injection="devices") == []


def test_node_without_versions_is_not_judged() -> None:
    assert of({"metadata": {"name": "new"}}) == []


# --- storage --------------------------------------------------------------------------------------


def claim(phase: str, wanted: str | None = None) -> dict[str, Any]:
    spec = {} if wanted is None else {"storageClassName": wanted}
    return {"metadata": {"name": "data-hami-nats-0"}, "spec": spec, "status": {"phase": phase}}


def storage_class(name: str, *, default: bool = False) -> dict[str, Any]:
    notes = {nodechecks.DEFAULT_CLASS: "true"} if default else {}
    return {"metadata": {"name": name, "annotations": notes}}


@pytest.mark.parametrize(
    ("wanted", "classes", "verdict", "text"),
    [
        (None, [], "FAIL", "no default StorageClass; there is no StorageClass"),
        (None, [storage_class("slow")], "FAIL", "no default StorageClass; classes: slow"),
        ("fast", [storage_class("slow", default=True)], "FAIL", "there is no StorageClass fast"),
        (None, [storage_class("slow", default=True)], "WARN", "data-hami-nats-0 is Pending"),
        ("", [], "WARN", "data-hami-nats-0 is Pending"),
    ],
)
def test_pending_claim_is_named_with_its_cause(
    wanted: str | None, classes: list[dict[str, Any]], verdict: str, text: str
) -> None:
    (found,) = nodechecks.storage([claim("Pending", wanted)], classes)
    assert (found.check, found.verdict) == ("storage", verdict)
    assert text in found.text
    assert found.fix


def test_bound_claims_pass_without_a_default_class() -> None:
    assert [one.verdict for one in nodechecks.storage([claim("Bound")], [])] == ["PASS"]
    assert list(nodechecks.storage([], [])) == []


def test_tested_releases_are_those_of_the_tests() -> None:
    assert [f"{major}.{minor}" for major, minor in nodechecks.TESTED_KUBERNETES] == [
        release.name for release in RELEASES if release.role is not Role.CLAIMS
    ]


@pytest.mark.parametrize(
    ("tag", "verdicts"),
    [
        ("v1.34.4", ["PASS"]),
        ("v1.33.1", ["PASS"]),
        ("v1.32.0", ["FAIL"]),
        ("v1.35.0", ["FAIL"]),
        ("latest", []),
        ("", []),
    ],
)
def test_kube_scheduler_is_judged_by_the_skew_policy(tag: str, verdicts: list[str]) -> None:
    found = list(nodechecks.kube_scheduler(tag, "v1.34.2+k3s1"))
    assert [one.verdict for one in found] == verdicts
    assert all("v1.34.2" in one.fix for one in found if one.verdict == "FAIL")
