# SPDX-License-Identifier: Apache-2.0
"""A search for many names returns the same as single lookups; the written list is JSON."""

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest

from hami_common.errors import WireInvalid
from hami_core.placement.nodenames import ABSENT, NameIndex, NodeNames, joined

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def text_of(names: Sequence[str]) -> bytes:
    """The array as Go writes it, without the opening bracket."""
    return json.dumps(names, separators=(",", ":"), ensure_ascii=False).encode()[1:]


def agree(codes: dict[str, int], names: Sequence[str]) -> NodeNames:
    """Text and strings are found and written alike; returns what was read from text."""
    index = NameIndex(codes)
    want = [codes.get(name, ABSENT) for name in names]
    read, listed = NodeNames(text_of(names)), NodeNames.of(names)
    assert index.find(read).numbers.tolist() == index.find(listed).numbers.tolist() == want
    chance = random.Random(len(names))
    mask = np.array([chance.random() < 0.6 for _ in names], np.bool_)
    some = [name for name, chosen in zip(names, mask.tolist(), strict=True) if chosen]
    for nodes in (read, listed):
        assert len(nodes) == len(names)
        assert [nodes.string(i) for i in range(len(names))] == list(names)
        assert json.loads(nodes.json()) == list(names)
        assert nodes.several(np.flatnonzero(mask)) == some
        part = nodes.part(mask)
        assert json.loads(part.json()) == list(part.strings()) == some
        lines = "".join(f"<{json.dumps(name, ensure_ascii=False)}>;" for name in some)
        for _ in range(3):  # a repeated list of names may be cached
            wrapped = nodes.wrapped(np.flatnonzero(mask), b"<", b">;")
            assert bytes(wrapped).decode() == lines
            assert len(wrapped) == len(lines.encode())
        of_part = part.wrapped(part.places(), b"<", b">;")
        assert (
            joined([b"[", of_part, part.wrapped(part.places()[:0], b"", b","), b"]"])
            == (f"[{lines[:-1]}]" if lines else "[]").encode()
        )
        numbers = np.array([i % 3 for i in range(len(names))], np.int64)
        labelled = nodes.labelled(nodes.places(), b"<", numbers, [b"0", b"1", b"2"])
        assert bytes(labelled).decode() == "".join(
            f"<{json.dumps(name, ensure_ascii=False)}{i % 3}" for i, name in enumerate(names)
        )
        places = np.flatnonzero(mask)
        labelled = nodes.labelled(places, b"<", numbers[places], [b"0", b"1", b"2"])
        assert bytes(labelled).decode() == "".join(
            f"<{json.dumps(name, ensure_ascii=False)}{numbers[place]}"
            for place, name in zip(places.tolist(), some, strict=True)
        )
    return read


@pytest.mark.parametrize("count", [0, 1, 63, 64, 500, 3000])
@pytest.mark.parametrize("length", [1, 5, 6, 7, 8, 9, 45])
def test_names_of_one_length_in_any_order(count: int, length: int) -> None:
    chance = random.Random(count * 100 + length)
    codes = {"".join(chance.choices(LETTERS, k=length)): number for number in range(max(1, count))}
    names = list(codes) + ["".join(chance.choices(LETTERS, k=length)) for _ in range(count // 50)]
    chance.shuffle(names)
    agree(codes, names)


def test_numbered_names_are_found_without_making_strings() -> None:
    codes = {f"gpu-node-{i:05d}.zone-a": i for i in range(5000)}
    names = [*codes, "gpu-node-99999.zone-a", "gpu-node-00000.zone-b"]
    random.Random(1).shuffle(names)
    assert agree(codes, names).rows is not None


@pytest.mark.parametrize(
    "other", ["n-100000", "n", "", "é-000", "n-00€", 'n-0"0', "n-0\\0", "n],[n"]
)
def test_names_of_other_lengths_and_letters(other: str) -> None:
    codes = {f"n-{i:05d}": i for i in range(200)} | {other: 7, "ö": 8}
    for names in (list(codes), [name for name in codes if len(name) == 7], [other] * 200):
        agree(codes, names)


@pytest.mark.parametrize("odd", ['n-0"000', "n-0\\000", "é-0000", "n-\x00000"])
def test_unusual_names_of_equal_length_are_not_confused(odd: str) -> None:
    codes = {f"n-{i:05d}": i for i in range(200)}
    names = [*codes, odd]
    agree(codes, names)
    agree(codes | {odd: 999}, names)


def test_lengths_that_only_add_up_alike_are_not_confused() -> None:
    codes = {f"{i:08d}": i for i in range(100)}
    agree(codes, [f"{i:07d}" if i % 2 else f"{i:09d}" for i in range(100)])
    agree(codes, ["0000000", "100000002", *list(codes)[2:]])


def test_text_that_only_looks_like_a_matrix_is_refused() -> None:
    names = [f"n-{i:05d}" for i in range(100)]
    index = NameIndex({name: i for i, name in enumerate(names)})
    good = text_of(names)
    for bad in (
        good.replace(b'"n-00050",', b'"n-00050"x'),
        good.replace(b'"n-00050",', b'["n-0005"]'),
        good.replace(b'"n-00050",', b"1234567890"),
        good.replace(b'"n-00050",', b'"n-\xff0050",'),
        good[:-1] + b",",
    ):
        assert len(bad) == len(good)
        with pytest.raises(WireInvalid, match=r"ExtenderArgs"):
            index.find(NodeNames(bad))


def test_empty_index_finds_nothing_and_a_non_ascii_index_finds_its_names() -> None:
    agree({}, ["a"] * 100)
    agree({"é": 3}, ["é"] * 100)
    agree({"": 4}, [""] * 100)


@pytest.mark.parametrize("count", [1, 3, 200])
def test_one_name_is_separated_from_all_others(count: int) -> None:
    names = [f"node-{number:03}" for number in range(count)]
    for nodes in (NodeNames(text_of(names)), NodeNames.of(names)):
        one, others = nodes.divided(names[-1])
        assert list(one.strings()) == names[-1:]
        assert others.tolist() == list(range(count - 1))
        none, all_ = nodes.divided("unknown")
        assert (len(none), all_.tolist()) == (0, list(range(count)))
