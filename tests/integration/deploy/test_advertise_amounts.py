# SPDX-License-Identifier: Apache-2.0
"""The component ``advertise-amounts``: its setting and its rights.

``tests/e2e/test_advertised_amounts.py`` shows what its policy denies.
"""

from typing import Any

import pytest

from hami_common.runtime.settings import load
from hami_nodeagent.settings import Settings
from tests.integration.deploy.test_hami_components import render

ROLE = "hami-nodeagent-amounts"
Rendered = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("overlay"), ("nvidia", "ascend", "advertise-amounts"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("plain"), ("nvidia",))


def advertises(agent: dict[str, Any]) -> bool:
    containers = agent["spec"]["template"]["spec"]["containers"]
    (found,) = (one for one in containers if one["name"] == "agent")
    environment = {one["name"]: one["value"] for one in found["env"] if "value" in one}
    argv = ["--set", "node_name=n"]
    loaded = load(Settings, service="nodeagent", argv=argv, environ=environment)
    return loaded.settings.advertise_amounts


def test_all_agents_advertise_with_the_component_and_none_without(
    rendered: Rendered, plain: Rendered
) -> None:
    agents = [
        one
        for (kind, name), one in rendered.items()
        if kind == "DaemonSet" and name.startswith("hami-nodeagent-")
    ]
    assert len(agents) == 2
    assert all(map(advertises, agents))
    assert not advertises(plain["DaemonSet", "hami-nodeagent-nvidia"])


def test_right_to_patch_node_status_is_of_the_component_alone(
    rendered: Rendered, plain: Rendered
) -> None:
    def may_patch(objects: Rendered) -> set[str]:
        return {
            name
            for (kind, name), one in objects.items()
            if kind == "ClusterRole"
            for rule in one.get("rules") or ()
            if "nodes/status" in rule.get("resources", ()) and "patch" in rule["verbs"]
        }

    assert may_patch(rendered) - may_patch(plain) == {ROLE}
    (subject,) = rendered["ClusterRoleBinding", ROLE]["subjects"]
    assert (subject["namespace"], subject["name"]) == ("hami-agents", "hami-nodeagent")
