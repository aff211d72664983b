# SPDX-License-Identifier: Apache-2.0
"""The component ``idle-policies``: its setting, and the one right that the base does not give."""

import pytest

from tests.integration.deploy.test_hami_components import render
from tests.integration.deploy.test_kueue import Rendered, settings_of

ROLE = "hami-scheduler-idle"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("overlay"), ("nvidia", "idle-policies"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("plain"), ("nvidia",))


def test_policies_are_applied_with_the_component_and_not_without(
    rendered: Rendered, plain: Rendered
) -> None:
    assert settings_of(rendered).idle.enabled
    assert not settings_of(plain).idle.enabled
    assert set(rendered) - set(plain) == {("Role", ROLE), ("RoleBinding", ROLE)}


def test_lease_of_the_election_is_the_one_of_the_settings(rendered: Rendered) -> None:
    role = rendered["Role", ROLE]
    options = settings_of(rendered).idle
    assert role["metadata"]["namespace"] == options.namespace
    names = {name for rule in role["rules"] for name in rule.get("resourceNames", ())}
    assert names == {options.lease_name}
    (subject,) = rendered["RoleBinding", ROLE]["subjects"]
    assert (subject["namespace"], subject["name"]) == ("hami-system", "hami-scheduler")


def test_base_lets_the_scheduler_evict_and_resize(plain: Rendered) -> None:
    rules = plain["ClusterRole", "hami-scheduler"]["rules"]
    granted = {
        (resource, verb)
        for rule in rules
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {("pods/eviction", "create"), ("pods", "patch"), ("events", "create")} <= granted
