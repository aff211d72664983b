# SPDX-License-Identifier: Apache-2.0
"""The agents of all vendors render beside each other, each with its tool and on its own nodes."""

import os
import re
import subprocess
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from hami_common.runtime.settings import load
from hami_common.vendors import catalog
from hami_common.vendors.catalog import Catalog
from hami_nodeagent.drivers.reader import ToolSettings
from hami_nodeagent.settings import Settings
from hami_nodeagent.shell import agentdevices
from hami_sim.kubernetes.programs import KUBECTL
from hami_webhook.settings import Settings as WebhookSettings
from tests.cluster.needs import control_plane_or_skip

KUSTOMIZE = Path(__file__).parents[3] / "deploy/kustomize"
VENDORS = sorted(vendor.name for vendor in Catalog.from_settings().vendors)
TOOL_VENDORS = [name for name in VENDORS if name != "nvidia"]
DIVIDED_BY_CALLS = ("ascend", "cambricon", "enflame", "kunlunxin", "metax")
"""Vendors whose devices the agent divides through calls of their driver."""
NAMED_DEVICES = [name for name in TOOL_VENDORS if name not in DIVIDED_BY_CALLS]
VENDOR_MODULES = Path(catalog.__file__).parent
WITH_FILES = ("amd", "hygon", "kunlunxin")
"""Vendors whose shares are described by files on the host."""


def render(directory: Path, *components: str) -> list[dict[str, Any]]:
    """The objects of an overlay with these components."""
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUSTOMIZE / "base", directory)],
        "components": [
            os.path.relpath(KUSTOMIZE / "components" / name, directory) for name in components
        ],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    kubectl = control_plane_or_skip().path(KUBECTL)
    done = subprocess.run(
        [kubectl, "kustomize", str(directory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def daemon_sets(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in documents if one["kind"] == "DaemonSet"}


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The rendered agents by name, all in one overlay."""
    return daemon_sets(render(tmp_path_factory.mktemp("overlay"), *VENDORS))


def test_agents_have_the_tag_of_the_release(agents: dict[str, dict[str, Any]]) -> None:
    images = {
        container["image"]
        for agent in agents.values()
        for container in agent["spec"]["template"]["spec"]["containers"]
    }
    assert images == {f"hami/nodeagent:{version('hami-nodeagent')}"}


def agent_of(agents: dict[str, dict[str, Any]], vendor: str) -> dict[str, Any]:
    found: dict[str, Any] = agents[f"hami-nodeagent-{vendor}"]["spec"]
    return found


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "node-a") for one in container["env"]}


def test_each_vendor_has_one_agent_on_its_own_nodes(agents: dict[str, dict[str, Any]]) -> None:
    named = {f"hami-agent-devices-{name}" for name in ("nvidia", *NAMED_DEVICES)}
    assert agents.keys() == named | {f"hami-nodeagent-{name}" for name in VENDORS}
    for vendor in VENDORS:
        spec = agent_of(agents, vendor)
        template = spec["template"]
        assert template["spec"]["nodeSelector"] == {f"hami.io/{vendor}": "true"}
        labels = {"app.kubernetes.io/name": "hami-nodeagent", "hami.io/vendor": vendor}
        assert spec["selector"]["matchLabels"] == labels
        assert template["metadata"]["labels"] == labels


@pytest.mark.parametrize("vendor", TOOL_VENDORS)
def test_agent_serves_its_vendor_alone(agents: dict[str, dict[str, Any]], vendor: str) -> None:
    agent = agent_of(agents, vendor)["template"]["spec"]["containers"][0]
    loaded = load(
        Settings,
        service="nodeagent",
        argv=["--config", str(KUSTOMIZE / "base/config/nodeagent.toml")],
        environ=environment(agent),
    )
    assert loaded.settings.drivers.serve == (vendor,)
    assert not loaded.settings.drivers.nvidia.enabled


@pytest.mark.parametrize("vendor", TOOL_VENDORS)
def test_every_mount_has_exactly_one_volume(agents: dict[str, dict[str, Any]], vendor: str) -> None:
    pod = agent_of(agents, vendor)["template"]["spec"]
    volumes = [volume["name"] for volume in pod["volumes"]]
    assert len(set(volumes)) == len(volumes)
    mounts = pod["containers"][0]["volumeMounts"]
    assert {mount["name"] for mount in mounts} | {"plugins"} == set(volumes)
    paths = [mount["mountPath"] for mount in mounts]
    assert len(set(paths)) == len(paths)
    tool = [mount for mount in mounts if mount["name"].startswith("vendor-")]
    assert tool, "the vendor's tool is on the host"
    writable = {mount["mountPath"] for mount in tool if not mount.get("readOnly")}
    assert (ToolSettings().shares_root in writable) is (vendor in WITH_FILES)


@pytest.mark.parametrize("vendor", TOOL_VENDORS)
def test_only_agents_that_divide_devices_by_their_driver_are_privileged(
    agents: dict[str, dict[str, Any]], vendor: str
) -> None:
    agent, proxy = agent_of(agents, vendor)["template"]["spec"]["containers"]
    is_privileged = agent["securityContext"].get("privileged", False)
    assert is_privileged is (vendor not in NAMED_DEVICES)
    assert is_privileged is (vendor in DIVIDED_BY_CALLS)
    if not is_privileged:
        assert agent["securityContext"]["allowPrivilegeEscalation"] is False
        assert agent["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert agent["resources"]["limits"][agentdevices.RESOURCE] == "1"
    assert agent["securityContext"]["readOnlyRootFilesystem"] is True
    assert "privileged" not in proxy["securityContext"]
    assert proxy["securityContext"]["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize("vendor", NAMED_DEVICES)
def test_agent_is_given_the_nodes_that_its_shares_have(
    agents: dict[str, dict[str, Any]], vendor: str
) -> None:
    """On the same nodes, by patterns that match every node which a container of the vendor gets."""
    template = agents[f"hami-agent-devices-{vendor}"]["spec"]["template"]
    spec = template["spec"]
    assert spec["nodeSelector"] == {f"hami.io/{vendor}": "true"}
    labels = {"app.kubernetes.io/name": "hami-agent-devices", "hami.io/vendor": vendor}
    assert template["metadata"]["labels"] == labels
    (container,) = spec["containers"]
    loaded = load(
        agentdevices.Settings,
        service=agentdevices.SERVICE,
        argv=[],
        environ=environment(container),
    )
    patterns = loaded.settings.devices
    text = (VENDOR_MODULES / f"{vendor}.py").read_text(encoding="utf-8")
    written = {re.sub(r"\{[^}]*\}", "0", one) for one in re.findall(r'"(/dev/[^"]+)"', text)}
    assert written
    for path in written | ({"/dev/dri/renderD128"} if "render_node" in text else set()):
        assert any(fnmatch(path, one) for one in patterns), path
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["dev"]["readOnly"] is True
    assert "securityContext" in container
    assert container["securityContext"].get("privileged") is None


def granted_to_nvidia(agents: dict[str, dict[str, Any]]) -> agentdevices.Settings:
    (container,) = agents["hami-agent-devices-nvidia"]["spec"]["template"]["spec"]["containers"]
    return load(
        agentdevices.Settings,
        service=agentdevices.SERVICE,
        argv=[],
        environ=environment(container),
    ).settings


def test_nvidias_agent_gets_its_devices_by_cdi(agents: dict[str, dict[str, Any]]) -> None:
    """Neither by a variable nor by a runtime class, which a hardened toolkit ignores."""
    pod = agent_of(agents, "nvidia")["template"]["spec"]
    agent = pod["containers"][0]
    assert granted_to_nvidia(agents).cdi_device == "nvidia.com/gpu=all"
    assert agent["resources"]["limits"][agentdevices.RESOURCE] == "1"
    assert not [name for name in environment(agent) if name.startswith("NVIDIA_")]
    assert "runtimeClassName" not in pod


@pytest.mark.parametrize("also", [(), ("hami-node-label",)])
def test_nvidias_agent_runs_without_cdi(tmp_path: Path, also: tuple[str, ...]) -> None:
    documents = render(tmp_path, "nvidia", *also, "nvidia-without-cdi")
    found = daemon_sets(documents)
    assert found.keys() == {"hami-nodeagent-nvidia"}
    pod = agent_of(found, "nvidia")["template"]["spec"]
    agent = pod["containers"][0]
    assert agentdevices.RESOURCE not in agent["resources"]["limits"]
    assert environment(agent)["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert pod["runtimeClassName"] == "nvidia"
    assert "SYS_ADMIN" in agent["securityContext"]["capabilities"]["add"]
    (namespace,) = (
        one
        for one in documents
        if one["kind"] == "Namespace" and one["metadata"]["name"] == "hami-agents"
    )
    assert namespace["metadata"]["labels"]["hami.io/device-environment"] == "allowed"


def test_nvidias_agent_may_limit_the_memory_of_cgroups(tmp_path: Path) -> None:
    pod = agent_of(daemon_sets(render(tmp_path, "nvidia", "nvidia-memory-cap")), "nvidia")
    agent = pod["template"]["spec"]["containers"][0]
    assert "SYS_ADMIN" in agent["securityContext"]["capabilities"]["add"]
    root = Settings(node_name="node-a").drivers.nvidia.cgroup_root
    (mount,) = (one for one in agent["volumeMounts"] if one["mountPath"] == root)
    (volume,) = (one for one in pod["template"]["spec"]["volumes"] if one["name"] == mount["name"])
    assert volume["hostPath"]["path"] == root


def test_nvidias_agent_may_run_multi_process_services(tmp_path: Path) -> None:
    pod = agent_of(daemon_sets(render(tmp_path, "nvidia", "nvidia-mps")), "nvidia")
    agent, spec = pod["template"]["spec"]["containers"][0], pod["template"]["spec"]
    place = Settings(node_name="node-a").drivers.nvidia.mps_dir
    paths = {one["name"]: one["hostPath"]["path"] for one in spec["volumes"] if "hostPath" in one}
    mounts = {one["mountPath"]: paths.get(one["name"]) for one in agent["volumeMounts"]}
    assert mounts[place] == place
    assert mounts["/dev/shm"] == f"{place}/shm"
    assert {"SETUID", "SETGID"} <= set(agent["securityContext"]["capabilities"]["add"])


def test_recall_changes_the_agent_of_nvidia_by_its_memory_only(tmp_path: Path) -> None:
    plain = agent_of(daemon_sets(render(tmp_path, "nvidia")), "nvidia")
    documents = render(tmp_path, "nvidia", "recall")
    changed = agent_of(daemon_sets(documents), "nvidia")
    agent = changed["template"]["spec"]["containers"][0]
    assert agent["resources"]["limits"]["memory"] == "1Gi"
    agent["resources"]["limits"]["memory"] = plain["template"]["spec"]["containers"][0][
        "resources"
    ]["limits"]["memory"]
    assert changed == plain
    (role,) = (
        one
        for one in documents
        if one["metadata"]["name"] == "hami-nodeagent-recall" and one["kind"] == "ClusterRole"
    )
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]}
    ]


def test_recall_has_the_webhook_raise_memory_limits(tmp_path: Path) -> None:
    (webhook,) = (
        one
        for one in render(tmp_path, "nvidia", "recall")
        if one["kind"] == "Deployment" and one["metadata"]["name"] == "hami-webhook"
    )
    env = webhook["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "HAMI_WEBHOOK_POLICY__ADD_RECALL_MEMORY", "value": "true"} in env
    assert not WebhookSettings().policy.add_recall_memory


def test_both_daemon_sets_of_nvidia_run_on_nodes_with_hamis_label(tmp_path: Path) -> None:
    for one in daemon_sets(render(tmp_path, "nvidia", "hami-node-label")).values():
        pod = one["spec"]["template"]["spec"]
        assert "nodeSelector" not in pod
        terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        keys = [term["matchExpressions"][0]["key"] for term in terms["nodeSelectorTerms"]]
        assert keys == ["hami.io/nvidia", "gpu"]
