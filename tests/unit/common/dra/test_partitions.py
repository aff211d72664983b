# SPDX-License-Identifier: Apache-2.0
"""Partitions as devices of claims: one name for each place, and the share that it stands for."""

import re

import pytest
from msgspec.structs import replace

from hami_common.dra.claims import containers_of
from hami_common.dra.names import device_name, partition_name
from hami_common.dra.partitions import is_divided, places_of, share_of
from hami_common.errors import RequestInvalid
from hami_common.model.device import Profile
from tests.support import builders
from tests.support.mig import CHIPS, card
from tests.unit.common.dra.test_claims import read

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@pytest.mark.parametrize("chip", CHIPS)
def test_each_place_has_a_name_of_its_own_that_stands_for_it(chip: str) -> None:
    cards = [card(chip), card(chip, 1)]
    places = places_of(cards)
    assert len(places) == 2 * sum(len(one.starts) for one in cards[0].partitions)
    names = [place.name for place in places]
    assert len(set(names)) == len(names)
    for place in places:
        assert LABEL.fullmatch(place.name)
        share = share_of(place.name, cards)
        assert share is not None
        assert (share.uuid, share.profile, share.start) == (
            place.device.uuid,
            place.profile.name,
            place.start,
        )
        assert (share.memory_mib, share.core_pct, share.exclusive) == (
            place.profile.memory_mib,
            place.profile.core_pct,
            False,
        )


def test_small_sizes_come_first_and_those_with_names_only_last() -> None:
    found = [(one.profile.name, one.device.index, one.start) for one in places_of([card("A30")])]
    assert found[:4] == [("1g.6gb", 0, start) for start in (3, 2, 1, 0)]
    sizes = list(dict.fromkeys(name for name, _, _ in found))
    assert sizes.index("4g.24gb") < sizes.index("1g.6gb+me")


def test_sizes_with_and_without_engines_have_different_names() -> None:
    names = {partition_name("GPU-0", f"1g.24gb{end}", 0) for end in ("", "+me", "-me", "+me.all")}
    assert len(names) == 4


def test_only_cards_in_mig_mode_have_partitions_of_claims() -> None:
    divided = card("A30")
    assert is_divided(divided)
    (place, *_) = places_of([divided])
    sizes_without_places = (Profile(name="vir01", memory_mib=1),)
    for other in (
        replace(divided, mode="soft"),
        replace(divided, mode="vnpu", vendor="ascend"),
        replace(divided, partitions=()),
        replace(divided, partitions=sizes_without_places),
    ):
        assert not is_divided(other)
        assert places_of([other]) == []
        assert share_of(place.name, [other]) is None


def test_place_that_a_fault_took_still_stands_for_its_share() -> None:
    divided = card("A30")
    rest = tuple(replace(one, starts=(0,)) for one in divided.partitions)
    name = partition_name("GPU-0", "1g.6gb", 3)
    share = share_of(name, [replace(divided, partitions=rest)])
    assert share is not None
    assert share.start == 3


def test_claim_of_partitions_and_shares_has_both() -> None:
    divided, soft = card("A30"), builders.device("GPU-9", memory_mib=1000)
    part = {
        "request": "part",
        "driver": "gpu.hami.io",
        "pool": "n1/hami",
        "device": partition_name("GPU-0", "2g.12gb", 2),
    }
    share = {
        **part,
        "request": "share",
        "device": device_name("GPU-9"),
        "consumedCapacity": {"memory": "100Mi", "cores": "5"},
    }
    first, second = containers_of(read(part, share), [divided, soft])
    assert [(one.uuid, one.part) for one in first.shares] == [("GPU-0", "2g.12gb@2")]
    assert [(one.uuid, one.part, one.memory_mib) for one in second.shares] == [("GPU-9", "", 100)]
    with pytest.raises(RequestInvalid, match="is not in the pool n1/hami"):
        containers_of(read({**part, "device": "mig-0000000000-2g-12gb-2"}), [divided])
