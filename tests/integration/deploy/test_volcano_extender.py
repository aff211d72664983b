# SPDX-License-Identifier: Apache-2.0
"""The component ``volcano-extender``, and the configuration of Volcano's scheduler."""

import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml

from hami_common.runtime.settings import load
from hami_common.vendors.catalog import Catalog
from hami_scheduler.settings import Settings, VolcanoExtenderSettings
from hami_scheduler.shell.volcano import PREFIX
from tests.integration.deploy.test_bind_admission import (
    COMPONENTS,
    by_name,
    container_of,
    env_of,
    mine,
)
from tests.support.kustomize import rendered

ROOT: Final = Path(__file__).parents[3]
CONF: Final = COMPONENTS / "volcano-extender" / "volcano-scheduler.conf"
SERVED: Final = {"predicate", "prioritize", "jobEnqueueable", "allocate", "deallocate"}
Obj = dict[str, Any]


def arguments() -> Obj:
    """Arguments of the plugin in the shipped configuration."""
    tiers = yaml.safe_load(CONF.read_text())["tiers"]
    found = [one for tier in tiers for one in tier["plugins"] if one["name"] == "extender"]
    (plugin,) = found
    given: Obj = plugin["arguments"]
    return given


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Obj]:
    folder = tmp_path_factory.mktemp("mine")
    listed = ("network-policies", "bind-admission", "volcano-extender")
    return by_name(rendered(mine(folder, *listed)))


def test_managed_resources_are_those_of_the_catalog() -> None:
    managed = arguments()["extender.managedResources"]
    assert set(managed) == set(Catalog.from_settings().resource_names())
    assert len(managed) == len(set(managed))


def test_failed_calls_refuse_the_node_and_take_longer_than_the_server() -> None:
    given = arguments()
    assert given["extender.ignorable"] is False
    seconds = re.fullmatch(r"(\d+)s", given["extender.httpTimeout"])
    assert seconds is not None
    assert VolcanoExtenderSettings().wait_s < int(seconds[1])


def test_verbs_are_served_ones() -> None:
    given = arguments()
    verbs = {value for key, value in given.items() if key.endswith("Verb")}
    assert verbs == SERVED
    assert urlsplit(given["extender.urlPrefix"]).path == PREFIX


def test_no_shipped_configuration_calls_when_a_session_opens() -> None:
    """A failure of that call would switch the predicates off."""
    word = "onSessionOpenVerb:"
    files = [*(ROOT / "deploy").rglob("*"), *(ROOT / "examples").rglob("*")]
    files += (ROOT / "docs").rglob("*.md")
    texts = [path for path in files if path.is_file()]
    assert CONF in texts
    assert [path for path in texts if word in path.read_text(errors="replace")] == []


@pytest.mark.real
def test_service_leads_to_the_port(objects: dict[tuple[str, str], Obj]) -> None:
    url = urlsplit(arguments()["extender.urlPrefix"])
    name, namespace, _ = str(url.hostname).split(".")
    service = objects["Service", name]
    assert service["metadata"]["namespace"] == namespace
    (port,) = service["spec"]["ports"]
    assert port["port"] == url.port
    container = container_of(objects, "scheduler")
    default = VolcanoExtenderSettings().port
    assert {"name": port["targetPort"], "containerPort": default} in container["ports"]
    argv = ["--set", "signing_key_file=k"]
    loaded = load(Settings, service="scheduler", argv=argv, environ=env_of(container)).settings
    assert loaded.volcano_extender == VolcanoExtenderSettings(enabled=True, host="0.0.0.0")  # noqa: S104 - as in the pod
    assert loaded.bind_admission.enabled


@pytest.mark.real
def test_only_volcano_may_reach_the_port(objects: dict[tuple[str, str], Obj]) -> None:
    port = VolcanoExtenderSettings().port
    open_to = [
        (name, rule.get("from"))
        for (kind, name), one in objects.items()
        if kind == "NetworkPolicy" and one["metadata"]["namespace"] == "hami-system"
        for rule in one["spec"].get("ingress", ())
        if any(item["port"] == port for item in rule.get("ports", ({"port": port},)))
    ]
    labels = {"kubernetes.io/metadata.name": "volcano-system"}
    assert open_to == [("hami-volcano-extender", [{"namespaceSelector": {"matchLabels": labels}}])]


def test_component_is_listed_on_the_page_in_this_order() -> None:
    page = (ROOT / "docs" / "volcano-extender.md").read_text()
    listed = ("bind-admission", "advertise-amounts", "volcano-extender")
    places = [page.index(f"components/{name}") for name in listed]
    assert places == sorted(places)
