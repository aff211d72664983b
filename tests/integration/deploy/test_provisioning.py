# SPDX-License-Identifier: Apache-2.0
"""The component ``provisioning-requests``: its setting and its rights.

``tests/e2e/test_provisioning.py`` shows that they suffice.
"""

import pytest

from tests.integration.deploy.test_hami_components import render
from tests.integration.deploy.test_kueue import Rendered, settings_of

ROLE = "hami-scheduler-provisioning"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    components = ("nvidia", "kueue", "provisioning-requests")
    return render(tmp_path_factory.mktemp("overlay"), components)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("plain"), ("nvidia",))


def test_scheduler_answers_requests_with_the_component_and_not_without(
    rendered: Rendered, plain: Rendered
) -> None:
    assert settings_of(rendered).provisioning_requests.enabled
    assert settings_of(rendered).kueue.enabled, "both components fit together"
    assert not settings_of(plain).provisioning_requests.enabled


def test_rights_about_requests_are_of_the_component_alone(
    rendered: Rendered, plain: Rendered
) -> None:
    assert ("ClusterRole", ROLE) not in plain
    verbs = {
        resource: set(rule["verbs"])
        for rule in rendered["ClusterRole", ROLE]["rules"]
        for resource in rule["resources"]
    }
    read = {"get", "list", "watch"}
    assert verbs == {
        "provisioningrequests": read,
        "provisioningrequests/status": {"patch"},
        "podtemplates": read,
    }
    for binding in (("ClusterRoleBinding", ROLE), ("RoleBinding", ROLE)):
        (subject,) = rendered[binding]["subjects"]
        assert (subject["namespace"], subject["name"]) == ("hami-system", "hami-scheduler")


def test_lease_of_the_election_is_the_one_of_the_settings(rendered: Rendered) -> None:
    role = rendered["Role", ROLE]
    options = settings_of(rendered).provisioning_requests
    assert role["metadata"]["namespace"] == options.namespace
    names = {name for rule in role["rules"] for name in rule.get("resourceNames", ())}
    assert names == {options.lease_name}
