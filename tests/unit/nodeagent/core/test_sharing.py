# SPDX-License-Identifier: Apache-2.0
"""A card changes its mode of sharing while unused, and takes no pods that it cannot serve."""

from typing import Any

import pytest

from hami_nodeagent.core.sharing import MODES, SharingLook, SharingVerdict, decide_sharing, mode_of


def look(**more: Any) -> SharingVerdict:
    given: dict[str, Any] = {
        "mode": "soft",
        "wanted": "mps",
        "is_known": True,
        "cordoned_for_s": 10.0,
        "settle_s": 10.0,
        **more,
    }
    return decide_sharing(SharingLook(**given))


def test_card_in_the_mode_of_the_setting_is_left_alone() -> None:
    assert look(mode="mps") == SharingVerdict()
    assert look(mode="soft", wanted="soft", users=("pod a/b",)) == SharingVerdict()


def test_idle_card_changes_at_once_when_it_has_been_cordoned_long_enough() -> None:
    verdict = look()
    assert (verdict.step, verdict.is_withheld) == ("mps", True)
    assert verdict.text == "changing the mode of sharing from soft to mps is under way"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"users": ("pod a/b", "pod a/c")}, "waits for pod a/b, pod a/c"),
        ({"is_known": False}, "waits until this agent knows who uses the card"),
        ({"cordoned_for_s": -1.0}, "waits until no scheduler gives the card away"),
        ({"cordoned_for_s": 9.0}, "waits until no scheduler gives the card away"),
    ],
)
def test_card_in_use_is_cordoned_and_keeps_its_mode(more: dict[str, object], text: str) -> None:
    verdict = look(**more)
    assert (verdict.step, verdict.is_withheld) == ("", True)
    assert verdict.text.endswith(text)


def test_card_whose_service_does_not_serve_takes_no_new_pods() -> None:
    verdict = look(mode="mps", problem="it ended with status 1")
    assert (verdict.step, verdict.is_withheld) == ("", True)
    assert "it ended with status 1" in verdict.text


def test_setting_without_a_line_is_the_library() -> None:
    assert (mode_of(None), mode_of("hook"), mode_of("timeslice")) == ("soft", "soft", "timeslice")
    assert MODES == ("soft", "timeslice", "mps")
