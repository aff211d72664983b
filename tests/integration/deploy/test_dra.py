# SPDX-License-Identifier: Apache-2.0
"""The component ``dra``: settings and rights of scheduler and agents, mounts, policy, class."""

from typing import Any

import pytest
import yaml

from hami_common.admission.configuration import Client, mutating_webhook_configuration
from hami_common.dra import names
from hami_common.dra.podclaims import claims_profile
from hami_common.runtime.settings import load
from hami_common.vendors.catalog import Catalog
from hami_nodeagent.settings import Settings
from hami_sim.apiserver.cel import Program
from hami_webhook.settings import Settings as WebhookSettings
from tests.integration.deploy.test_hami_components import render
from tests.integration.deploy.test_kueue import settings_of

ROLE = "hami-nodeagent-dra"
POLICY = "resource-slices.hami.io"
Rendered = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("overlay"), ("nvidia", "dra"))


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("monitored"), ("nvidia", "dra", "dra-monitor"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("plain"), ("nvidia",))


def test_scheduler_books_claims_with_the_component_and_not_without(
    rendered: Rendered, plain: Rendered
) -> None:
    name = "hami-scheduler-dra"
    assert settings_of(rendered).dra.enabled
    assert not settings_of(plain).dra.enabled
    assert ("ClusterRole", name) not in plain
    verbs = {
        (resource, *rule.get("resourceNames", ())): set(rule["verbs"])
        for rule in rendered["ClusterRole", name]["rules"]
        if rule["apiGroups"] == [names.GROUP]
        for resource in rule["resources"]
    }
    assert verbs == {
        ("resourceclaims",): {"get", "list", "watch", "create", "patch"},
        ("resourceclaims/status",): {"patch"},
        ("resourceclaims/binding",): {"patch"},
        ("resourceclaims/driver", names.DRIVER): {"arbitrary-node:patch"},
    }
    (subject,) = rendered["ClusterRoleBinding", name]["subjects"]
    assert (subject["namespace"], subject["name"]) == ("hami-system", "hami-scheduler")


def agent_of(objects: Rendered) -> tuple[dict[str, Any], Settings]:
    """Return the agent's container and its settings."""
    spec = objects["DaemonSet", "hami-nodeagent-nvidia"]["spec"]["template"]["spec"]
    (found,) = (one for one in spec["containers"] if one["name"] == "agent")
    environment = {one["name"]: one["value"] for one in found["env"] if "value" in one}
    argv = ["--set", "node_name=n"]
    return found, load(Settings, service="nodeagent", argv=argv, environ=environment).settings


def test_agent_serves_claims_with_the_component_alone(rendered: Rendered, plain: Rendered) -> None:
    agent, settings = agent_of(rendered)
    assert settings.dra.enabled
    assert not agent_of(plain)[1].dra.enabled
    mounted = {one["mountPath"]: one["name"] for one in agent["volumeMounts"]}
    spec = rendered["DaemonSet", "hami-nodeagent-nvidia"]["spec"]["template"]["spec"]
    host = {one["name"]: one["hostPath"]["path"] for one in spec["volumes"] if "hostPath" in one}
    dra = settings.dra
    for path in (dra.registry_dir, dra.plugin_dir, dra.cdi_dir, dra.region_dir):
        assert host[mounted[path]] == path


def test_rights_are_those_of_a_driver_and_of_the_component_alone(
    rendered: Rendered, plain: Rendered
) -> None:
    rules = {
        (resource, verb)
        for rule in rendered["ClusterRole", ROLE]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    slices = ("get", "list", "watch", "create", "update", "delete")
    assert rules == {("resourceclaims", "get"), *(("resourceslices", verb) for verb in slices)}
    (subject,) = rendered["ClusterRoleBinding", ROLE]["subjects"]
    assert (subject["namespace"], subject["name"]) == ("hami-agents", "hami-nodeagent")
    assert ("ClusterRole", ROLE) not in plain


@pytest.mark.parametrize(
    ("node", "driver", "is_allowed"),
    [
        ("node-a", names.DRIVER, True),
        ("node-b", names.DRIVER, False),
        ("node-a", "gpu.example.com", False),
    ],
)
def test_agent_may_write_slices_of_its_node_and_driver_only(
    rendered: Rendered, node: str, driver: str, *, is_allowed: bool
) -> None:
    spec = rendered["ValidatingAdmissionPolicy", POLICY]["spec"]
    key = "authentication.kubernetes.io/node-name"
    given: dict[str, Any] = {
        "request": {"operation": "CREATE", "userInfo": {"extra": {key: ["node-a"]}}},
        "object": {"spec": {"nodeName": node, "driver": driver}},
        "oldObject": None,
        "variables": {},
    }
    for variable in spec["variables"]:
        known = frozenset(given)
        value = Program(variable["expression"], known)(given)
        given["variables"][variable["name"]] = value
    verdicts = [
        Program(one["expression"], frozenset(given)).decide(given) for one in spec["validations"]
    ]
    assert all(verdicts) is is_allowed


@pytest.mark.parametrize(
    ("name", "shares", "partitions", "monitor"),
    [
        ("hami-share", True, False, False),
        ("hami-whole", True, False, False),
        ("hami-mig", False, True, False),
        ("hami-monitor", False, False, True),
    ],
)
def test_class_selects_its_kind_of_devices_of_our_driver(
    monitored: Rendered, name: str, *, shares: bool, partitions: bool, monitor: bool
) -> None:
    (selector,) = monitored["DeviceClass", name]["spec"]["selectors"]
    program = Program(selector["cel"]["expression"], frozenset({"device"}))

    def selects(driver: str, *attributes: str) -> bool:
        own = {driver: dict.fromkeys(attributes, "x")}
        return program({"device": {"driver": driver, "attributes": own}}) is True

    assert selects(names.DRIVER, "uuid", "type") is shares
    assert selects(names.DRIVER, "uuid", "profile") is partitions
    assert selects(names.DRIVER, names.MONITOR) is monitor
    assert not selects("gpu.example.com", "uuid")
    assert not selects("gpu.example.com", "uuid", "profile")
    assert not selects("gpu.example.com", names.MONITOR)


def test_monitor_is_published_with_its_component_alone(
    rendered: Rendered, monitored: Rendered
) -> None:
    assert agent_of(monitored)[1].dra.monitor
    assert not agent_of(rendered)[1].dra.monitor
    assert ("DeviceClass", "hami-monitor") not in rendered


def webhook_of(objects: Rendered) -> WebhookSettings:
    """Settings of the webhook."""
    spec = objects["Deployment", "hami-webhook"]["spec"]["template"]["spec"]
    (found,) = (one for one in spec["containers"] if one["name"] == "webhook")
    environment = {one["name"]: one["value"] for one in found.get("env", ()) if "value" in one}
    return load(WebhookSettings, service="webhook", argv=[], environ=environment).settings


def test_pods_may_ask_for_claims_with_the_component_alone(
    rendered: Rendered, plain: Rendered
) -> None:
    assert not webhook_of(plain).policy.dra_enabled
    policy = webhook_of(rendered).policy
    assert policy.dra_enabled
    assert policy.allocation_mode == "device-plugin"


def test_label_of_a_namespace_chooses_the_webhook(rendered: Rendered, plain: Rendered) -> None:
    hook = ("MutatingWebhookConfiguration", "hami-webhook")
    client = Client(namespace="hami-system", service="hami-webhook")
    names = Catalog.from_settings().resource_names()
    expected = mutating_webhook_configuration(names, client, with_modes=True)["webhooks"]
    found = {one["name"]: one for one in rendered[hook]["webhooks"]}
    assert found.keys() == {one["name"] for one in expected}
    for one in expected:
        assert found[one["name"]]["namespaceSelector"] == one["namespaceSelector"]
        assert found[one["name"]]["clientConfig"] == one["clientConfig"]
        assert found[one["name"]]["failurePolicy"] == "Fail"
    unchanged = {one["name"]: one for one in plain[hook]["webhooks"]}["update.pods.hami.io"]
    assert found["update.pods.hami.io"] == unchanged


def kube_scheduler_of(objects: Rendered) -> dict[str, Any]:
    """Configuration of kube-scheduler."""
    key = next(key for key in objects if key[1].startswith("hami-kube-scheduler-config"))
    loaded: dict[str, Any] = yaml.safe_load(objects[key]["data"]["kube-scheduler.yaml"])
    return loaded


def test_kube_scheduler_sends_every_pod_of_its_profile_to_the_extender(
    rendered: Rendered, plain: Rendered
) -> None:
    after, before = kube_scheduler_of(rendered), kube_scheduler_of(plain)
    claims = after["profiles"].pop()
    assert claims["schedulerName"] == claims_profile(after["profiles"][0]["schedulerName"])
    assert claims["plugins"] == {"multiPoint": {"disabled": [{"name": "DynamicResources"}]}}
    assert claims["pluginConfig"] == after["profiles"][0]["pluginConfig"]
    (plugin,) = after["profiles"][0].pop("pluginConfig")
    assert plugin["name"] == "NodeResourcesFit"
    managed = before["extenders"][0].pop("managedResources")
    assert {one["name"] for one in managed} <= set(plugin["args"]["ignoredResources"])
    assert after == before


def test_webhooks_of_the_modes_know_the_dialect_of_volcano(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    parts = ("nvidia", "volcano", "dra")
    objects = render(tmp_path_factory.mktemp("both"), parts)
    webhooks = objects["MutatingWebhookConfiguration", "hami-webhook"]["webhooks"]
    created = [one for one in webhooks if one["name"].endswith("create.pods.hami.io")]
    assert len(created) == 3
    for one in created:
        assert "volcano.sh/vgpu-number" in str(one["matchConditions"][0])
    after = kube_scheduler_of(objects)
    assert "managedResources" not in after["extenders"][0]
    (plugin,) = after["profiles"][0]["pluginConfig"]
    assert "volcano.sh/vgpu-number" in plugin["args"]["ignoredResources"]
