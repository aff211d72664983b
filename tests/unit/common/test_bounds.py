# SPDX-License-Identifier: Apache-2.0
"""Every range of every message: a value at the bound decodes, one beyond is refused by name.

The table is the messages' own types, so that a new field is tested as soon as it exists; a field
that holds outside text or numbers without a range fails here.
"""

import math
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from hami_common.errors import WireInvalid
from hami_common.events import codec
from hami_common.model import placement
from hami_common.pods import podview
from tests.support.builders import device
from tools.gen_wire import MODULES

Document = dict[str, Any]
Case = tuple[type[msgspec.Struct], str, object, object]
SHORT = 4096
"""Longer texts and lists are not built at their bound here, but for one of each."""


def structs() -> Iterator[type[msgspec.Struct]]:
    for module in (*MODULES, podview):
        for struct in vars(module).values():
            is_struct = isinstance(struct, type) and issubclass(struct, msgspec.Struct)
            if is_struct and struct.__module__ == module.__name__ and struct.__name__[0] != "_":
                yield struct


def bare(annotation: Any) -> tuple[Any, dict[str, Any]]:
    """A type without its constraints, and the constraints; those of the value if optional."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        values = [one for one in typing.get_args(annotation) if one is not type(None)]
        return bare(values[0])
    if typing.get_origin(annotation) is not typing.Annotated:
        return annotation, {}
    inner, *metas = typing.get_args(annotation)
    found: dict[str, Any] = {}
    for meta in metas:
        for name in ("ge", "le", "max_length"):
            if getattr(meta, name) is not None:
                found[name] = getattr(meta, name)
    return inner, found


def sample(annotation: Any) -> Any:
    """A small value of a type, as JSON has it."""
    inner, limits = bare(annotation)
    origin, arguments = typing.get_origin(inner), typing.get_args(inner)
    if origin is typing.Literal:
        return arguments[0]
    if origin is dict or inner is dict:
        return {}
    if origin in (tuple, list):
        is_fixed = origin is tuple and Ellipsis not in arguments
        return [sample(one) for one in arguments] if is_fixed else []
    if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
        return whole(inner)
    if inner in (int, float):
        return max(0, limits.get("ge", 0))
    return {str: "", bool: False}[inner]


def whole(struct: type[msgspec.Struct], **given: object) -> Any:
    """The smallest document of a Struct, with the fields given."""
    hints = typing.get_type_hints(struct, include_extras=True)
    fields = msgspec.structs.fields(struct)
    if struct.__struct_config__.array_like:
        return [given.get(f.encode_name, sample(hints[f.name])) for f in fields]
    return {f.encode_name: sample(hints[f.name]) for f in fields if f.required} | given


def item(annotation: Any, number: int) -> Any:
    inner, _ = bare(annotation)
    return f"{number}" if inner is str else sample(annotation)


def of_length(inner: Any, length: int) -> Any:
    if inner is str:
        return "x" * length
    arguments = typing.get_args(inner)
    if typing.get_origin(inner) is dict:
        return {f"{number}": sample(arguments[1]) for number in range(length)}
    return [item(arguments[0], number) for number in range(length)]


def cases() -> Iterator[Case]:
    """(type, field, value at the bound, value beyond)."""
    for struct in structs():
        hints = typing.get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            inner, limits = bare(hints[field.name])
            if "ge" in limits:
                step = 1 if inner is int else max(1.0, math.ulp(limits["le"]) * 2)
                yield struct, field.encode_name, limits["le"], limits["le"] + step
                yield struct, field.encode_name, limits["ge"], limits["ge"] - step
            length = limits.get("max_length")
            if length is not None and length <= SHORT:
                at, beyond = of_length(inner, length), of_length(inner, length + 1)
                yield struct, field.encode_name, at, beyond


def name_of(case: Case) -> str:
    struct, field, at, _ = case
    return f"{struct.__name__}.{field} {at if isinstance(at, int | float) else len(at)}"  # type: ignore[arg-type]  # texts, lists and maps


CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_bound_is_the_last_value_that_decodes(case: Case) -> None:
    struct, field, at, beyond = case
    codec.decode(msgspec.json.encode(whole(struct, **{field: at})), struct, what="x")
    names = [f.encode_name for f in msgspec.structs.fields(struct)]
    place = names.index(field) if struct.__struct_config__.array_like else None
    where = rf"\$\[{place}\]" if place is not None else rf"\$\.{field}"
    with pytest.raises(WireInvalid, match=rf"{where}.*(<=|>=|length|out of range)"):
        codec.decode(msgspec.json.encode(whole(struct, **{field: beyond})), struct, what="x")


def test_table_covers_the_messages() -> None:
    covered = {(struct.__name__, field) for struct, field, _, _ in CASES}
    assert len(CASES) > 350
    assert {("DeviceFacts", "index"), ("Heartbeat", "boot_id"), ("StateRecord", "seq")} <= covered


def unbounded(annotation: Any) -> Iterator[Any]:
    """Texts, numbers, lists and maps without a range, nested ones too."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for one in typing.get_args(annotation):
            yield from unbounded(one)
        return
    inner, limits = bare(annotation)
    origin, arguments = typing.get_origin(inner), typing.get_args(inner)
    is_list = origin in (list, dict) or (origin is tuple and Ellipsis in arguments)
    if (inner in (int, str) or is_list) and not limits:
        yield inner
    if origin in (list, tuple, dict):
        for one in arguments:
            yield from unbounded(one)


@pytest.mark.parametrize("struct", list(structs()), ids=lambda struct: struct.__name__)
def test_every_field_states_its_range(struct: type[msgspec.Struct]) -> None:
    hints = typing.get_type_hints(struct, include_extras=True)
    missing = {name: found for name, hint in hints.items() if (found := list(unbounded(hint)))}
    # Sums that the project computes itself, and the states of a container, which no code reads.
    assert missing == {} or struct in (placement.Booked, podview.ContainerStateView)


def test_longest_texts_and_lists_have_their_bound_too() -> None:
    record = {"node": "n", "vendor": "v", "boot_id": "b", "seq": 1, "time_s": 1.0}
    for field, at, beyond in (
        ("problem", "x" * 65_536, "x" * 65_537),
        ("links", [["a", "b", 1]] * 65_536, [["a", "b", 1]] * 65_537),
    ):
        codec.decode(msgspec.json.encode({**record, field: at}), _report(), what="x")
        with pytest.raises(WireInvalid, match=rf"\$\.{field}: .*length"):
            codec.decode(msgspec.json.encode({**record, field: beyond}), _report(), what="x")


def _report() -> type[msgspec.Struct]:
    return next(struct for struct in structs() if struct.__name__ == "NodeReport")


def test_error_names_field_bound_and_fix() -> None:
    device = {"uuid": "u", "vendor": "v", "index": 4096, "type": "t", "memory_mib": 1}
    data = msgspec.json.encode(whole(_report(), devices=[device]))
    with pytest.raises(WireInvalid) as caught:
        codec.decode(data, _report(), what="hami.v1.report.n.v")
    assert str(caught.value) == (
        "hami.v1.report.n.v: $.devices[0].index: Expected `int` <= 4095; "
        "write a value within it (docs/wire.md, ranges)"
    )


def test_value_that_was_built_and_not_decoded_can_be_checked() -> None:
    assert codec.out_of_range(device("GPU-1")) == ""
    broken = msgspec.structs.replace(device("GPU-1"), index=2**31)
    assert "$.index" in codec.out_of_range(broken)
