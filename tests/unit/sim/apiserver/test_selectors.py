# SPDX-License-Identifier: Apache-2.0
"""Label and field selectors."""

import pytest

from hami_sim.apiserver.errors import ApiError
from hami_sim.apiserver.selectors import (
    field_text,
    parse_fields,
    parse_labels,
    selector_from_object,
)


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("", True),
        ("a=1", True),
        ("a==1,b", True),
        ("a!=1", False),
        ("c!=1", True),
        ("a in (1,2)", True),
        ("a in (2, 3)", False),
        ("c notin (1)", True),
        ("!c", True),
        ("!a", False),
        ("example.com/x", True),
        ("n>3", True),
        ("n<3", False),
        ("e=", True),
    ],
)
def test_label_selector_text(text: str, *, selected: bool) -> None:
    labels = {"a": "1", "b": "", "example.com/x": "y", "n": "5", "e": ""}
    assert parse_labels(text).matches(labels) is selected


@pytest.mark.parametrize("text", ["a in (", "=1", "a=1 b=2", "a b", ",a"])
def test_malformed_label_selector_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse_labels(text)
    assert raised.value.code == 400


def test_absent_selector_object_is_none_and_empty_selects_all() -> None:
    assert selector_from_object(None) is None
    everything = selector_from_object({})
    assert everything is not None
    assert everything.matches({})


def test_selector_object_joins_labels_and_expressions() -> None:
    selector = selector_from_object(
        {
            "matchLabels": {"a": "1"},
            "matchExpressions": [{"key": "b", "operator": "NotIn", "values": ["x"]}],
        }
    )
    assert selector is not None
    assert selector.matches({"a": "1"})
    assert not selector.matches({"a": "1", "b": "x"})
    assert not selector.matches({"b": "y"})


def test_field_selector_compares_text_and_knows_exact_terms() -> None:
    selector = parse_fields("spec.nodeName=n1,status.phase!=Failed")
    assert selector.matches({"spec": {"nodeName": "n1"}, "status": {}})
    assert not selector.matches({"spec": {"nodeName": "n1"}, "status": {"phase": "Failed"}})
    assert selector.exact("spec.nodeName") == "n1"
    assert selector.exact("status.phase") is None


def test_field_text_of_absent_fields() -> None:
    assert field_text({}, "spec.nodeName") == ""
    assert field_text({"spec": {}}, "spec.unschedulable") == "false"
    assert field_text({"spec": {"unschedulable": True}}, "spec.unschedulable") == "true"


def test_field_selector_values_may_hold_escaped_commas() -> None:
    assert parse_fields(r"reason=a\,b").matches({"reason": "a,b"})
