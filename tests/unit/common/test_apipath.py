# SPDX-License-Identifier: Apache-2.0
"""Paths of the Kubernetes API: a name stays one part of the path, whatever is in it."""

import pytest
from yarl import URL

from hami_common.apipath import api_path, checked_name, is_subdomain
from hami_common.errors import RequestInvalid

EVIL = ["../x", "a/b", "..", ".", "", "a?b=c", "a#b", "a%2Fb", "a b", "é", "a\nb", "\0"]


def test_usual_names_are_written_as_they_are() -> None:
    path = api_path("api", "v1", "namespaces", "a-b", "pods", "web-0.x")
    assert path == "/api/v1/namespaces/a-b/pods/web-0.x"


@pytest.mark.parametrize("name", EVIL)
def test_name_stays_one_part_also_for_the_client(name: str) -> None:
    url = URL(f"https://host{api_path('api', 'v1', 'nodes', name)}")
    assert url.raw_path.count("/") == len(["api", "v1", "nodes", "name"])
    assert url.raw_path.startswith("/api/v1/nodes/")
    assert not url.raw_path.endswith("/")
    assert (url.query_string, url.fragment) == ("", "")


@pytest.mark.parametrize("name", ["a", "web-0", "a.b-c.d", "x" * 253, "0"])
def test_subdomain_is_a_name(name: str) -> None:
    assert is_subdomain(name)
    assert checked_name(name, field="f") == name


@pytest.mark.parametrize("name", [*EVIL, "A", "a_b", "-a", "a-", "a..b", ".a", "x" * 254])
def test_anything_else_is_refused_with_field_and_fix(name: str) -> None:
    assert not is_subdomain(name)
    with pytest.raises(RequestInvalid, match=r"^f: .* is not a DNS subdomain; write at most 253"):
        checked_name(name, field="f")
