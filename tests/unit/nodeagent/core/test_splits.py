# SPDX-License-Identifier: Apache-2.0
"""Devices map to kubelet ids and back."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hami_nodeagent.core.splits import MAX_ID_LENGTH, Split, Splits, exact_ids, split_id
from tests.unit.nodeagent.core.builders import device


def two(**more: Any) -> Splits:
    return Splits.of_devices([device(0, slots=2), device(1, slots=2, **more)])


def test_each_device_is_announced_once_per_slot() -> None:
    assert [split.id for split in two().all] == [
        "nvidia-0::0",
        "nvidia-0::1",
        "nvidia-1::0",
        "nvidia-1::1",
    ]
    assert two().uuid_of("nvidia-1::1") == "nvidia-1"
    assert two().uuid_of("nvidia-1::2") == ""
    assert "nvidia-0::1" in two()
    assert "nvidia-0::2" not in two()


def test_health_comes_from_the_registry_and_from_this_node() -> None:
    by_registry = two(healthy=False)
    assert [split.healthy for split in by_registry.all] == [True, True, False, False]
    by_node = Splits.of_devices([device(0, slots=1)], faulty={"nvidia-0"})
    assert [split.healthy for split in by_node.all] == [False]
    assert by_registry != two()
    assert two() == two()
    assert two() != "splits"


def test_held_ids_stay_announced_when_slots_or_devices_vanish() -> None:
    splits = Splits.of_devices(
        [device(0, slots=1, numa=1)], held={"nvidia-0::0", "nvidia-0::7", "nvidia-9::3"}
    )
    assert splits.all == (
        Split(id="nvidia-0::0", uuid="nvidia-0", healthy=True, numa=1),
        Split(id="nvidia-0::7", uuid="nvidia-0", healthy=True, numa=1),
        Split(id="nvidia-9::3", uuid="", healthy=False),
    )


def test_held_id_of_the_older_form_replaces_the_one_of_its_number() -> None:
    splits = Splits.of_devices([device(0, slots=2, numa=1)], held={"nvidia-0-1"})
    assert splits.all == (
        Split(id="nvidia-0::0", uuid="nvidia-0", healthy=True, numa=1),
        Split(id="nvidia-0-1", uuid="nvidia-0", healthy=True, numa=1),
    )
    both = Splits.of_devices([device(0, slots=2)], held={"nvidia-0-1", "nvidia-0::1", "x-9"})
    assert [(split.id, split.uuid) for split in both.all] == [
        ("nvidia-0::0", "nvidia-0"),
        ("nvidia-0::1", "nvidia-0"),
        ("nvidia-0-1", "nvidia-0"),
        ("x-9", ""),
    ]


def test_preference_takes_ids_of_the_older_form_last() -> None:
    splits = Splits.of_devices([device(0, slots=3)], held={"nvidia-0-0"})
    available = [split.id for split in splits.all]
    assert splits.prefer(available, must=(), wanted=["nvidia-0"], size=1) == ("nvidia-0::1",)
    assert splits.prefer(available, must=(), wanted=(), size=3) == (
        "nvidia-0::1",
        "nvidia-0::2",
        "nvidia-0-0",
    )


def test_ids_of_other_plugins_are_rejected() -> None:
    splits = two()
    assert splits.owns("nvidia-0::0")
    assert splits.owns("nvidia-0::9")  # announced by an earlier run with more slots
    assert splits.owns("nvidia-0-1")  # announced by an earlier version
    assert not splits.owns("nvidia-0")
    assert not splits.owns("nvidia-0::x")
    assert not splits.owns("nvidia-0-x")
    assert not splits.owns("nvidia-2::0")
    assert not splits.owns("GPU-1::0")


@given(st.text(alphabet="MIG-GPU/0123456789abcdef", min_size=1, max_size=120), st.integers(0, 999))
def test_id_fits_kubelet_and_leads_back_to_its_device(uuid: str, number: int) -> None:
    kubelet_id = split_id(uuid, number)
    assert len(kubelet_id) <= MAX_ID_LENGTH
    splits = Splits.of_devices([device(0, uuid=uuid, slots=number + 1)])
    assert splits.uuid_of(kubelet_id) == uuid


def test_long_uuids_that_begin_alike_get_different_ids() -> None:
    stem = "MIG-" + "a" * 80
    assert split_id(f"{stem}-1", 0) != split_id(f"{stem}-2", 0)


def test_preference_takes_the_wanted_devices() -> None:
    available = [split.id for split in two().all]
    assert two().prefer(available, must=(), wanted=["nvidia-1"], size=1) == ("nvidia-1::0",)
    assert two().prefer(available, must=(), wanted=["nvidia-1", "nvidia-0"], size=2) == (
        "nvidia-1::0",
        "nvidia-0::0",
    )


def test_preference_keeps_and_counts_the_ids_that_kubelet_must_use() -> None:
    available = [split.id for split in two().all]
    chosen = two().prefer(available, must=["nvidia-1::1"], wanted=["nvidia-1", "nvidia-0"], size=2)
    assert chosen == ("nvidia-1::1", "nvidia-0::0")
    assert two().prefer(available, must=["nvidia-0::0"], wanted=["nvidia-1"], size=1) == (
        "nvidia-0::0",
    )


def test_allocation_without_a_preference_takes_the_emptiest_device() -> None:
    assert two().prefer(
        ["nvidia-0::1", "nvidia-1::0", "nvidia-1::1"], must=(), wanted=(), size=1
    ) == ("nvidia-1::0",)
    assert two().prefer(["nvidia-0::1"], must=(), wanted=["nvidia-1"], size=1) == ("nvidia-0::1",)
    assert two().prefer(["odd-id"], must=(), wanted=(), size=1) == ("odd-id",)


def test_preference_that_cannot_be_met_is_left_to_kubelet() -> None:
    assert two().prefer(["nvidia-0::1"], must=(), wanted=(), size=2) == ()
    assert two().prefer(["nvidia-0::1"], must=["a", "b"], wanted=(), size=1) == ()


@given(st.data())
def test_preference_is_a_subset_of_the_offered_ids(data: st.DataObject) -> None:
    available = data.draw(st.lists(st.sampled_from([s.id for s in two().all]), unique=True))
    size = data.draw(st.integers(0, 5))
    must = data.draw(st.lists(st.sampled_from(available), unique=True)) if available else []
    wanted = data.draw(st.lists(st.sampled_from(["nvidia-0", "nvidia-1", "gone"])))
    chosen = two().prefer(available, must=must, wanted=wanted, size=size)
    assert set(chosen) <= set(available)
    assert len(chosen) in (0, size)
    assert not chosen or set(must) <= set(chosen)


def test_exact_ids_name_the_granted_devices_with_kubelets_numbers() -> None:
    assert exact_ids(["nvidia-0::3"], ["nvidia-0"]) == ("nvidia-0::3",)
    assert exact_ids(["nvidia-0-3"], ["nvidia-0"]) == ("nvidia-0::3",)
    assert exact_ids(["nvidia-0::3"], ["nvidia-1"]) == ("nvidia-1::3",)
    assert exact_ids(["nvidia-0::3", "nvidia-1::4"], ["nvidia-2", "nvidia-0"]) == (
        "nvidia-2::4",
        "nvidia-0::3",
    )
    assert exact_ids(["odd"], ["nvidia-0", "nvidia-1"]) == ("nvidia-0::0", "nvidia-1::0")
