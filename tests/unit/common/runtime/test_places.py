# SPDX-License-Identifier: Apache-2.0
"""Concurrent requests are bounded in total and per caller, with a reserve for operators."""

import pytest

from hami_common.errors import SettingsInvalid, TooManyRequests, Unavailable
from hami_common.runtime.places import Places


def places(total: int = 4, per_caller: int = 2, reserve: int = 1) -> Places:
    return Places(
        what="streams", setting="limit", total=total, per_caller=per_caller, reserve=reserve
    )


def test_a_caller_gets_its_part_and_no_more() -> None:
    found = places()
    with found.hold("a", is_operator=False), found.hold("a", is_operator=False):
        with pytest.raises(TooManyRequests, match=r"a holds 2 streams, of 2 per caller.*limit"):
            found.check("a", is_operator=False)
        found.check("b", is_operator=False)
    found.check("a", is_operator=False)


def test_the_last_places_are_kept_for_operators() -> None:
    found = places()
    with (
        found.hold("a", is_operator=False),
        found.hold("b", is_operator=False),
        found.hold("c", is_operator=False),
    ):
        with pytest.raises(Unavailable, match="reserved"):
            found.check("d", is_operator=False)
        with (
            found.hold("operator", is_operator=True),
            pytest.raises(Unavailable, match="4 streams already"),
        ):
            found.check("another", is_operator=True)


def test_a_place_is_free_again_after_an_error() -> None:
    found = places(per_caller=1)
    with pytest.raises(RuntimeError), found.hold("a", is_operator=False):
        raise RuntimeError
    found.check("a", is_operator=False)


@pytest.mark.parametrize(("total", "per_caller", "reserve"), [(4, 0, 1), (4, 1, 4), (4, 1, -1)])
def test_numbers_that_leave_no_place_are_refused(total: int, per_caller: int, reserve: int) -> None:
    with pytest.raises(SettingsInvalid, match="limit"):
        places(total, per_caller, reserve)
