# SPDX-License-Identifier: Apache-2.0
"""The component ``volcano``: its names reach all objects and services that depend on them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hami_common.runtime.settings import load
from hami_nodeagent.settings import Settings as AgentSettings
from hami_scheduler.settings import Settings as SchedulerSettings
from hami_webhook.settings import Settings as WebhookSettings
from tests.integration.deploy.test_bind_admission import by_name, mine
from tests.support.kustomize import rendered

pytestmark = [pytest.mark.real]
Obj = dict[str, Any]
Rendered = dict[tuple[str, str], Obj]
NUMBER = "volcano.sh/vgpu-number"
NAMED = (
    ("MutatingWebhookConfiguration", "hami-webhook"),
    ("ValidatingAdmissionPolicy", "device-environment.hami.io"),
    ("ValidatingAdmissionPolicy", "webhook-opt-out.hami.io"),
    ("ValidatingAdmissionPolicy", "pod-bounds.hami.io"),
    ("ValidatingAdmissionPolicy", "limiter.hami.io"),
)
BEFORE = ("self-signed", "nats", "nvidia", "ascend", "bind-admission", "advertise-amounts")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return by_name(rendered(mine(tmp_path_factory.mktemp("with"), *BEFORE, "volcano")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return by_name(rendered(mine(tmp_path_factory.mktemp("plain"), *BEFORE)))


def test_admission_names_the_resources(objects: Rendered, plain: Rendered) -> None:
    for key in NAMED:
        assert NUMBER in yaml.safe_dump(objects[key]), key
    assert not any(NUMBER in yaml.safe_dump(one) for one in plain.values())


def test_nothing_else_changes_in_admission(objects: Rendered, plain: Rendered) -> None:
    """Not the order of rules, and nothing of other components."""
    assert objects.keys() - plain.keys() == {config(objects, "kube-scheduler")}
    for key in NAMED:
        before, after = shape(plain[key]), shape(objects[key])
        assert before == after, key


def shape(one: object) -> object:
    """The names and the structure, without the texts of expressions."""
    if isinstance(one, dict):
        return {
            key: value if key in ("name", "path", "service") else shape(value)
            for key, value in one.items()
        }
    if isinstance(one, list):
        is_words = all(isinstance(item, str) for item in one)
        return one if is_words else [shape(item) for item in one]
    return "" if isinstance(one, str) else one


def config(objects: Rendered, part: str) -> tuple[str, str]:
    (key,) = (key for key in objects if key[0] == "ConfigMap" and f"hami-{part}-config" in key[1])
    return key


def test_kube_scheduler_leaves_the_amounts_to_the_extender(
    objects: Rendered, plain: Rendered
) -> None:
    after, before = (
        yaml.safe_load(one[config(one, "kube-scheduler")]["data"]["kube-scheduler.yaml"])
        for one in (objects, plain)
    )
    (extender,) = after["extenders"]
    managed = {one["name"]: one["ignoredByScheduler"] for one in extender["managedResources"]}
    assert managed[NUMBER] is True
    del extender["managedResources"], before["extenders"][0]["managedResources"]
    assert after == before


@pytest.mark.parametrize(
    ("kind", "name", "container", "settings"),
    [
        ("Deployment", "hami-webhook", "webhook", WebhookSettings),
        ("Deployment", "hami-scheduler", "scheduler", SchedulerSettings),
        ("DaemonSet", "hami-nodeagent-nvidia", "agent", AgentSettings),
        ("DaemonSet", "hami-nodeagent-ascend", "agent", AgentSettings),
    ],
)
def test_services_know_the_dialect(
    objects: Rendered, kind: str, name: str, container: str, settings: type[Any]
) -> None:
    containers = objects[kind, name]["spec"]["template"]["spec"]["containers"]
    (found,) = (one for one in containers if one["name"] == container)
    environment = {one["name"]: one["value"] for one in found["env"] if "value" in one}
    service = name.removeprefix("hami-").partition("-")[0]
    missing = {"nodeagent": "node_name=n", "scheduler": "signing_key_file=k"}.get(service)
    argv = ["--set", missing] if missing else []
    loaded = load(settings, service=service, argv=argv, environ=environment)
    assert loaded.settings.vendors.nvidia.dialects == ("volcano",)


def test_component_is_listed_on_the_page_in_this_order() -> None:
    page = (Path(__file__).parents[3] / "docs" / "volcano.md").read_text()
    places = [page.index(f"components/{name}") for name in (*BEFORE[-2:], "volcano")]
    assert places == sorted(places)
