# SPDX-License-Identifier: Apache-2.0
"""The component ``dra``: the scheduler's setting and its rights."""

import pytest

from tests.integration.deploy.test_hami_components import render
from tests.integration.deploy.test_kueue import settings_of

ROLE = "hami-scheduler-dra"


def test_scheduler_books_claims_with_the_component_and_not_without(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with_it = render(tmp_path_factory.mktemp("overlay"), ("nvidia", "dra"))
    plain = render(tmp_path_factory.mktemp("plain"), ("nvidia",))
    assert settings_of(with_it).dra.enabled
    assert not settings_of(plain).dra.enabled
    assert ("ClusterRole", ROLE) not in plain
    (rule,) = with_it["ClusterRole", ROLE]["rules"]
    assert rule["apiGroups"] == ["resource.k8s.io"]
    assert rule["resources"] == ["resourceclaims"]
    assert set(rule["verbs"]) == {"get", "list", "watch"}
    (subject,) = with_it["ClusterRoleBinding", ROLE]["subjects"]
    assert (subject["namespace"], subject["name"]) == ("hami-system", "hami-scheduler")
