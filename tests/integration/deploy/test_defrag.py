# SPDX-License-Identifier: Apache-2.0
"""The component ``defrag``: its setting and the Lease of its election."""

import pytest

from tests.integration.deploy.test_hami_components import render
from tests.integration.deploy.test_kueue import Rendered, settings_of

ROLE = "hami-scheduler-defrag"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("overlay"), ("nvidia", "defrag"))


def test_loop_runs_with_the_component_and_not_without(
    rendered: Rendered, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain = render(tmp_path_factory.mktemp("plain"), ("nvidia",))
    assert settings_of(rendered).defrag.enabled
    assert not settings_of(plain).defrag.enabled
    assert ("Role", ROLE) not in plain


def test_lease_of_the_election_is_the_one_of_the_settings(rendered: Rendered) -> None:
    options, role = settings_of(rendered).defrag, rendered["Role", ROLE]
    assert role["metadata"]["namespace"] == options.namespace
    names = {name for rule in role["rules"] for name in rule.get("resourceNames", ())}
    assert names == {options.lease_name}
    (subject,) = rendered["RoleBinding", ROLE]["subjects"]
    assert (subject["namespace"], subject["name"]) == ("hami-system", "hami-scheduler")
