# SPDX-License-Identifier: Apache-2.0
"""The component ``kueue``: its setting and its rights.

``tests/e2e/test_kueue.py`` shows that they suffice.
"""

from typing import Any

import pytest

from hami_common.runtime.settings import load
from hami_scheduler.settings import Settings
from tests.integration.deploy.test_hami_components import render

ROLE = "hami-scheduler-kueue"
Rendered = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("overlay"), ("nvidia", "kueue"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("plain"), ("nvidia",))


def settings_of(objects: Rendered) -> Settings:
    containers = objects["Deployment", "hami-scheduler"]["spec"]["template"]["spec"]["containers"]
    (found,) = (one for one in containers if one["name"] == "scheduler")
    environment = {one["name"]: one["value"] for one in found.get("env", ()) if "value" in one}
    argv = ["--set", "signing_key_file=/key"]
    return load(Settings, service="scheduler", argv=argv, environ=environment).settings


def test_scheduler_answers_kueue_with_the_component_and_not_without(
    rendered: Rendered, plain: Rendered
) -> None:
    assert settings_of(rendered).kueue.enabled
    assert not settings_of(plain).kueue.enabled


def test_rights_about_kueue_are_of_the_component_alone(rendered: Rendered, plain: Rendered) -> None:
    assert ("ClusterRole", ROLE) not in plain
    verbs = {
        resource: set(rule["verbs"])
        for rule in rendered["ClusterRole", ROLE]["rules"]
        for resource in rule["resources"]
    }
    read = {"get", "list", "watch"}
    assert verbs == {
        "workloads": read,
        "admissionchecks": read,
        "resourceflavors": read,
        "workloads/status": {"patch"},
        "admissionchecks/status": {"patch"},
    }
    for binding in (("ClusterRoleBinding", ROLE), ("RoleBinding", ROLE)):
        (subject,) = rendered[binding]["subjects"]
        assert (subject["namespace"], subject["name"]) == ("hami-system", "hami-scheduler")


def test_lease_of_the_election_is_the_one_of_the_settings(rendered: Rendered) -> None:
    role = rendered["Role", ROLE]
    options = settings_of(rendered).kueue
    assert role["metadata"]["namespace"] == options.namespace
    names = {name for rule in role["rules"] for name in rule.get("resourceNames", ())}
    assert names == {options.lease_name}
