# SPDX-License-Identifier: Apache-2.0
"""Finding many names at once gives what looking each up gives."""

import random

import pytest

from hami_scheduler.core.names import ABSENT, NameIndex


def looked_up(codes: dict[str, int], names: list[str]) -> list[int]:
    return [codes.get(name, ABSENT) for name in names]


@pytest.mark.parametrize("count", [0, 1, 63, 64, 500, 3000])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 45])
def test_names_of_one_length_in_any_order(count: int, length: int) -> None:
    chance = random.Random(count * 100 + length)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    codes = {"".join(chance.choices(letters, k=length)): number for number in range(max(1, count))}
    index = NameIndex(codes)
    names = list(codes) + ["".join(chance.choices(letters, k=length)) for _ in range(count)]
    chance.shuffle(names)
    assert index.find(names).tolist() == looked_up(codes, names)


def test_numbered_names_that_differ_in_one_letter() -> None:
    codes = {f"gpu-node-{i:05d}.zone-a": i for i in range(5000)}
    names = [*codes, "gpu-node-99999.zone-a", "gpu-node-00000.zone-b"]
    random.Random(1).shuffle(names)
    assert NameIndex(codes).find(names).tolist() == looked_up(codes, names)


@pytest.mark.parametrize("other", ["n-100000", "n", "", "é-000", "n-00€"])
def test_names_of_other_lengths_and_letters(other: str) -> None:
    codes = {f"n-{i:03d}": i for i in range(200)} | {other: 7, "ö": 8}
    index = NameIndex(codes)
    for names in (list(codes), [name for name in codes if len(name) == 5], [other] * 200):
        assert index.find(names).tolist() == looked_up(codes, names)


def test_lengths_that_only_add_up_alike_are_not_confused() -> None:
    codes = {f"{i:04d}": i for i in range(100)}
    names = [f"{i:03d}" if i % 2 else f"{i:05d}" for i in range(100)]
    assert NameIndex(codes).find(names).tolist() == [ABSENT] * 100
    swapped = ["000", "10002", *list(codes)[2:]]
    assert NameIndex(codes).find(swapped).tolist() == looked_up(codes, swapped)


def test_empty_index_finds_nothing_and_one_without_ascii_still_finds() -> None:
    assert NameIndex({}).find(["a"] * 100).tolist() == [ABSENT] * 100
    assert NameIndex({"é": 3}).find(["é"] * 100).tolist() == [3] * 100
    assert NameIndex({"": 4}).find([""] * 100).tolist() == [4] * 100
