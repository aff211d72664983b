# SPDX-License-Identifier: Apache-2.0
"""A card's mode is switched only where the setting names it, and while no pod uses the card."""

import pytest
from msgspec.structs import replace

from hami_common.errors import SettingsInvalid
from hami_common.model.device import DeviceFacts
from hami_nodeagent.core.hardware import CardMode
from hami_nodeagent.core.modes import Look, ModeNote, Verdict, check_setting, decide, wanted_of

OFF = CardMode(uuid="GPU-0", is_divided=False, is_divided_next=False)
ON = CardMode(uuid="GPU-0", is_divided=True, is_divided_next=True)
PENDING = replace(OFF, is_divided_next=True)
NOTE = ModeNote(uuid="GPU-0", is_divided=True)
READY = Look(mode=OFF, wanted=True, is_known=True, cordoned_for_s=9.0, settle_s=5.0)


@pytest.mark.parametrize("mode", [OFF, ON, PENDING])
def test_card_that_the_setting_does_not_name_is_left_alone(mode: CardMode) -> None:
    assert decide(replace(READY, mode=mode, wanted=None)) == Verdict()


def test_card_in_the_desired_mode_serves_pods_and_the_journal_is_closed() -> None:
    assert decide(replace(READY, mode=ON, note=NOTE)) == Verdict()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"is_known": False}, "until this agent knows"),
        ({"users": ("pod a/b",)}, "waits for pod a/b"),
        ({"users": tuple("abcde")}, "waits for a, b, c and 2 more"),
        ({"cordoned_for_s": -1.0}, "no scheduler"),
        ({"cordoned_for_s": 4.0}, "no scheduler"),
        ({"pause": "soon", "problem": "why"}, "tried again: why"),
    ],
)
def test_card_is_kept_from_new_pods_until_it_can_be_switched(
    change: dict[str, object], text: str
) -> None:
    verdict = decide(replace(READY, **change))
    assert verdict.is_withheld
    assert verdict.step is None
    assert text in verdict.text


def test_step_is_in_the_journal_before_it_is_taken() -> None:
    for wanted, mode in ((True, OFF), (False, ON), (True, PENDING)):
        verdict = decide(replace(READY, mode=mode, wanted=wanted))
        assert verdict.step == wanted
        assert verdict.note == ModeNote(uuid="GPU-0", is_divided=wanted)
        assert verdict.is_withheld


def test_own_change_that_waits_for_a_reset_is_rolled_back() -> None:
    for wanted in (None, False):
        ours = decide(replace(READY, mode=PENDING, wanted=wanted, note=NOTE))
        assert (ours.step, ours.note, ours.is_withheld) == (False, NOTE, False)
    theirs = decide(replace(READY, mode=PENDING, wanted=False))
    assert (theirs.step, theirs.is_withheld) == (None, False)
    assert "did not ask" in theirs.text


def test_card_that_cannot_be_switched_keeps_serving_pods() -> None:
    failed = replace(READY, pause="later", problem="no permission")
    assert decide(failed) == Verdict(text="switching MIG mode on failed: no permission")
    left = decide(replace(failed, mode=PENDING, note=NOTE))
    assert (left.step, left.note, left.is_withheld) == (False, NOTE, False)


def test_whole_card_waits_for_its_cdi_name() -> None:
    off = replace(READY, mode=OFF, wanted=False, is_named=False)
    verdict = decide(off)
    assert (verdict.is_withheld, verdict.step) == (True, None)
    assert "nvidia-ctk cdi generate" in verdict.text
    assert decide(replace(off, is_named=True)) == Verdict()
    assert decide(replace(off, wanted=None)) == Verdict()
    assert decide(replace(off, mode=ON, wanted=True)) == Verdict()


def test_setting_names_cards_by_uuid_or_place_and_the_last_line_counts() -> None:
    card = DeviceFacts(uuid="GPU-0", vendor="nvidia", index=3, type="A", memory_mib=1)
    assert wanted_of({}, "n1", card) is None
    assert wanted_of({"n2/3": "on", "n1/2": "on", "GPU-1": "on"}, "n1", card) is None
    assert wanted_of({"n*/*": "on"}, "n1", card) == "on"
    assert wanted_of({"n*/*": "on", "GPU-0": "off"}, "n1", card) == "off"
    assert wanted_of({"GPU-0": "off", "n1/3": "on"}, "n1", card) == "on"


@pytest.mark.parametrize("key", ["", "0", "/0", "n1/", "n1/first", "n1"])
def test_setting_with_an_invalid_card_is_refused(key: str) -> None:
    with pytest.raises(SettingsInvalid, match="mig_mode"):
        check_setting({key: "on"}, field="drivers.nvidia.mig_mode")
