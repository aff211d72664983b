# SPDX-License-Identifier: Apache-2.0
"""Selection of events: families that belong to no namespace are not read for one."""

import pytest

from hami_common.errors import RequestInvalid
from hami_registry.shell.eventtail import Wanted


@pytest.mark.parametrize("kind", ["device", "usage", "policy"])
def test_kind_without_a_namespace_is_refused_for_one(kind: str) -> None:
    assert Wanted.of({"kind": kind}).filters
    with pytest.raises(RequestInvalid, match="belong to no namespace"):
        Wanted.of({"kind": kind, "namespace": "team-a"})


def test_all_kinds_of_a_namespace_leave_out_those_without_one() -> None:
    left_out = {*Wanted.of({}).filters} - {*Wanted.of({"namespace": "team-a"}).filters}
    words = {one.split(".")[3] for one in left_out}
    assert {"device", "usage", "policy"} <= words
    assert "idle" not in words
