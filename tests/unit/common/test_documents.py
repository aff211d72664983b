# SPDX-License-Identifier: Apache-2.0
"""TOML and YAML written by people: usual documents are read, each limit is an error with a fix."""

from collections.abc import Callable

import pytest

from hami_common import documents
from hami_common.errors import SettingsInvalid


def yaml_nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def toml_nested(levels: int) -> str:
    return "x = " + "[" * (levels - 1) + "]" * (levels - 1)


def toml_tables(levels: int) -> str:
    return "[" + ".".join(["a"] * (levels - 1)) + "]\nx = 1"


@pytest.mark.parametrize(
    ("read", "nested"),
    [
        (documents.yaml_one, yaml_nested),
        (documents.toml, toml_nested),
        (documents.toml, toml_tables),
    ],
    ids=["yaml", "toml lists", "toml tables"],
)
def test_nesting_has_a_depth(read: Callable[..., object], nested: Callable[[int], str]) -> None:
    assert read(nested(documents.DEPTH_MOST), field="f")
    with pytest.raises(SettingsInvalid, match="f: is nested more than 64 levels deep; write valid"):
        read(nested(documents.DEPTH_MOST + 2), field="f")


def test_size_is_bounded() -> None:
    at = "# " + "x" * (documents.TOML_SIZE_MOST - 2)
    assert documents.toml(at, field="f") == {}
    with pytest.raises(SettingsInvalid, match=r"has \d+ bytes, at most 1048576 are read"):
        documents.toml(at + "x", field="f")
    with pytest.raises(SettingsInvalid, match="at most 10 are read"):
        documents.yaml_all("a: 12345678", field="f", size_most=10)


@pytest.mark.parametrize("digits", ["9" * 100, "0x" + "f" * 98])
def test_number_of_as_many_digits_as_allowed_is_read(digits: str) -> None:
    assert documents.toml(f"x = {digits}", field="f") == {"x": int(digits, 0)}


@pytest.mark.parametrize("digits", ["9" * 102, "0x" + "f" * 101, "9_" * 60 + "9"])
def test_longer_number_is_refused(digits: str) -> None:
    with pytest.raises(SettingsInvalid, match="a number of more than 100 digits"):
        documents.toml(f"x = {digits}", field="f")
    with pytest.raises(SettingsInvalid, match="a number of more than 100 digits"):
        documents.yaml_one(f"x: {digits}", field="f")


def test_digits_in_a_text_or_a_key_are_no_number() -> None:
    digits = "9" * 200
    assert documents.toml(f'x = "{digits}"', field="f") == {"x": digits}
    assert documents.toml(f"{digits} = 1", field="f") == {digits: 1}
    assert documents.yaml_one(f'x: "{digits}"', field="f") == {"x": digits}


def test_aliases_are_read_up_to_a_total_size() -> None:
    assert documents.yaml_one("a: &a [1, 2]\nb: *a", field="f") == {"a": [1, 2], "b": [1, 2]}
    text = "a: &a [" + "x," * 999 + "x]\nb: [" + "*a," * 101 + "]"
    with pytest.raises(SettingsInvalid, match="aliases stand for more than 100000 values"):
        documents.yaml_one(text, field="f")
    with pytest.raises(SettingsInvalid, match="alias 'a' stands for itself"):
        documents.yaml_one("&a [*a]", field="f")


@pytest.mark.parametrize(
    "text",
    ["x: !!int y", "x: !!bool y", "x: !!timestamp y", "x: !!float ''", "x: 2001-13-45",
     "? [a]\n: b", "!!python/object:os.system x", "\0", "a: [", "<<: 5"],
)  # fmt: skip
def test_invalid_yaml_is_reported_in_one_line(text: str) -> None:
    with pytest.raises(SettingsInvalid, match="f: is not YAML: ") as caught:
        documents.yaml_one(text, field="f")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff", "x = ", "x = 1\nx = 2", "[a"])
def test_invalid_toml_is_reported(content: bytes | str) -> None:
    with pytest.raises(SettingsInvalid, match=r"f: is not TOML: .*; do so"):
        documents.toml(content, field="f", fix="do so")


def test_several_documents_are_a_stream_and_not_one() -> None:
    assert documents.yaml_all("a: 1\n---\nb: 2", field="f") == [{"a": 1}, {"b": 2}]
    assert documents.yaml_one("", field="f") is None
    with pytest.raises(SettingsInvalid, match="several documents"):
        documents.yaml_one("a: 1\n---\nb: 2", field="f")
