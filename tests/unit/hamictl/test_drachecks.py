# SPDX-License-Identifier: Apache-2.0
"""Clusters that cannot serve ResourceClaims, each with one fault."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hami_common.dra.names import CLAIMS_CDI
from hami_common.events.asking import CheckAnswer, Finding, Verdict
from hamictl import drachecks

COMPONENT = Path(__file__).parents[3] / "deploy/kustomize/components/dra"
Obj = dict[str, Any]


@pytest.mark.parametrize(
    ("server", "tag", "told"),
    [
        ("v1.36.2", "v1.36.2", []),
        ("v1.37.2+k3s1", "", []),
        ("v1.36.1", "v1.36.2", ["API server is v1.36.1"]),
        ("v1.34.4", "v1.34.4", ["API server is v1.34.4", "the image kube-scheduler is v1.34.4"]),
        ("v1.37.2", "v1.36.0", ["the image kube-scheduler is v1.36.0"]),
    ],
)
def test_release_before_the_floor_is_named(server: str, tag: str, told: list[str]) -> None:
    found = list(drachecks.releases(server, [tag]))
    assert [one.text.partition(":")[0] for one in found] == told
    assert all(one.verdict == "FAIL" and "1.36.2" in one.fix for one in found)


@pytest.mark.parametrize(
    ("dropped", "gate"),
    [
        (("allowMultipleAllocations",), "DRAConsumableCapacity"),
        (("capacity", "memory", "requestPolicy"), "DRAConsumableCapacity"),
        (("taints",), "DRADeviceTaints"),
    ],
)
def test_gate_whose_field_the_server_drops_is_named(dropped: tuple[str, ...], gate: str) -> None:
    assert list(drachecks.gates(drachecks.probe())) == []
    stored = drachecks.probe()
    holder = stored["spec"]["devices"][0]
    for key in dropped[:-1]:
        holder = holder[key]
    del holder[dropped[-1]]
    (finding,) = drachecks.gates(stored)
    assert f"the API server's feature gate {gate} is off" in finding.text
    assert f"--feature-gates={gate}=true" in finding.fix


def node(**info: str) -> Obj:
    sound = {"kubeletVersion": "v1.37.2", "containerRuntimeVersion": "containerd://2.1.4"}
    return {"metadata": {"name": "n1"}, "status": {"nodeInfo": {**sound, **info}}}


@pytest.mark.parametrize(
    ("info", "verdict", "word"),
    [
        ({"kubeletVersion": "v1.35.4"}, "FAIL", "kubelet is v1.35.4"),
        ({"containerRuntimeVersion": "containerd://1.6.20"}, "FAIL", "1.6.20 has no CDI"),
        ({"containerRuntimeVersion": "containerd://1.7.35"}, "WARN", "enable_cdi"),
        ({"containerRuntimeVersion": "cri-o://1.22.1"}, "FAIL", "cri-o 1.22.1 has no CDI"),
        ({"containerRuntimeVersion": "docker://24.0.1"}, "WARN", "docker 24.0.1 is not known"),
    ],
)
def test_node_that_cannot_run_claims_is_named(
    info: dict[str, str], verdict: Verdict, word: str
) -> None:
    assert list(drachecks.of_node(node(), None)) == []
    assert list(drachecks.of_node({"metadata": {"name": "new"}}, None)) == []
    (finding,) = drachecks.of_node(node(**info), None)
    assert (finding.verdict, finding.node) == (verdict, "n1")
    assert word in finding.text
    assert finding.fix


def test_setting_that_the_agent_found_on_its_host_decides() -> None:
    on = Finding(check=CLAIMS_CDI, verdict="PASS", text="enable_cdi = true")
    answer = CheckAnswer(node="n1", time_s=0, version="1", findings=(on,))
    old = node(containerRuntimeVersion="containerd://1.7.35")
    assert list(drachecks.of_node(old, answer)) == []


def slice_of(name: str) -> Obj:
    return {"spec": {"nodeName": name}}


def test_nodes_without_slices_and_slices_without_agent_are_named() -> None:
    both = [slice_of("n1"), slice_of("n2")]
    assert list(drachecks.slices(["n1", "n2"], [], both)) == []
    (missing,) = drachecks.slices(["n1", "n2", "n3"], ["n3"], [slice_of("n1")])
    assert (missing.node, missing.verdict) == ("n2", "FAIL")
    (left,) = drachecks.slices(["n1"], [], both)
    assert (left.node, left.verdict) == ("n2", "FAIL")
    assert left.fix.endswith("spec.driver=gpu.hami.io,spec.nodeName=n2")


@pytest.mark.parametrize(
    ("env", "settings", "expected"),
    [
        ([], {}, False),
        ([{"name": "X", "value": "true"}], {}, True),
        ([{"name": "X", "value": "false"}], {"dra": {"enabled": True}}, False),
        ([], {"dra": {"enabled": True}}, True),
    ],
)
def test_setting_is_read_from_the_variable_before_the_file(
    env: list[Obj], settings: Obj, *, expected: bool
) -> None:
    assert drachecks.is_on({"containers": [{"env": env}]}, "X", settings) is expected


@pytest.mark.parametrize(
    ("file", "rights"),
    [
        ("scheduler-rbac.yaml", drachecks.SCHEDULER_RIGHTS),
        ("agent-rbac.yaml", drachecks.AGENT_RIGHTS),
    ],
)
def test_checked_rights_are_those_of_the_component(
    file: str, rights: tuple[drachecks.Right, ...]
) -> None:
    granted = {
        (verb, resource, name)
        for document in yaml.safe_load_all((COMPONENT / file).read_text())
        if document["kind"] == "ClusterRole"
        for rule in document["rules"]
        if rule["apiGroups"] == ["resource.k8s.io"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }
    assert {(one.verb, one.resource, one.name) for one in rights} == granted
