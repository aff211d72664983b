# SPDX-License-Identifier: Apache-2.0
"""Label and field selectors: parsing of their text and object forms, and matching.

Grammar: ``k8s.io/apimachinery/pkg/labels`` and ``pkg/fields`` (Kubernetes 1.34). The
resource table states which fields a resource offers for selection; this module covers only syntax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec

from hami_sim.apiserver.errors import Obj, bad_request

Labels: TypeAlias = Mapping[str, str]

_SET_TERM: Final = re.compile(r"\s*([^\s,()!=]+)\s+(in|notin)\s*\(([^)]*)\)\s*")
_EQ_TERM: Final = re.compile(r"\s*([^\s,()!=<>]+)\s*(==|!=|=|>|<)\s*([^\s,()!=<>]*)\s*")
_EXISTS_TERM: Final = re.compile(r"\s*(!?)\s*([^\s,()!=<>]+)\s*")


class Requirement(msgspec.Struct, frozen=True):
    """One term: key, operator (`in`, `notin`, `exists`, `!`, `gt`, `lt`) and values."""

    key: str
    op: str
    values: tuple[str, ...] = ()

    def matches(self, labels: Labels) -> bool:
        """Say whether the labels satisfy this term."""
        value = labels.get(self.key)
        match self.op:
            case "in":
                return value is not None and value in self.values
            case "notin":
                return value is None or value not in self.values
            case "exists":
                return value is not None
            case "!":
                return value is None
            case "gt":
                return _compares(value, self.values[0], 1)
            case _:
                return _compares(value, self.values[0], -1)


def _compares(value: str | None, bound: str, sign: int) -> bool:
    try:
        return value is not None and (int(value) - int(bound)) * sign > 0
    except ValueError:
        return False


class LabelSelector(msgspec.Struct, frozen=True):
    """A conjunction of requirements; empty matches everything."""

    terms: tuple[Requirement, ...] = ()

    def matches(self, labels: Labels | None) -> bool:
        """Say whether an object with these labels is selected."""
        found = labels or {}
        return all(term.matches(found) for term in self.terms)


def parse_labels(text: str) -> LabelSelector:
    """Parse the `labelSelector` query parameter."""
    terms: list[Requirement] = []
    position = 0
    while text[position:].strip():
        match = _SET_TERM.match(text, position)
        if match:
            values = tuple(sorted({value.strip() for value in match[3].split(",")}))
            terms.append(Requirement(match[1], match[2], values))
        elif match := _EQ_TERM.match(text, position):
            op = {"!=": "notin", ">": "gt", "<": "lt"}.get(match[2], "in")
            terms.append(Requirement(match[1], op, (match[3],)))
        elif match := _EXISTS_TERM.match(text, position):
            terms.append(Requirement(match[2], "!" if match[1] else "exists"))
        else:
            msg = f"unable to parse requirement: found '{text[position:]}'"
            raise bad_request(msg)
        position = match.end()
        if position < len(text):
            if text[position] != ",":
                msg = f"unable to parse requirement: found '{text[position:]}', expected: ','"
                raise bad_request(msg)
            position += 1
    return LabelSelector(tuple(terms))


_OBJECT_OPS: Final = {"In": "in", "NotIn": "notin", "Exists": "exists", "DoesNotExist": "!"}


def selector_from_object(selector: Obj | None) -> LabelSelector | None:
    """Read a metav1.LabelSelector; None selects nothing and is returned as None."""
    if selector is None:
        return None
    terms = [
        Requirement(key, "in", (str(value),))
        for key, value in (selector.get("matchLabels") or {}).items()
    ]
    for expression in selector.get("matchExpressions") or ():
        op = _OBJECT_OPS.get(expression.get("operator", ""))
        if op is None:
            msg = f'"{expression.get("operator")}" is not a valid label selector operator'
            raise bad_request(msg)
        terms.append(
            Requirement(expression.get("key", ""), op, tuple(expression.get("values") or ()))
        )
    return LabelSelector(tuple(terms))


class FieldTerm(msgspec.Struct, frozen=True):
    """One field comparison."""

    path: str
    value: str
    negated: bool = False


class FieldSelector(msgspec.Struct, frozen=True):
    """A conjunction of field comparisons; empty matches everything."""

    terms: tuple[FieldTerm, ...] = ()

    def matches(self, obj: Obj) -> bool:
        """Say whether the object's fields satisfy every term."""
        return all(
            (field_text(obj, term.path) == term.value) != term.negated for term in self.terms
        )

    def exact(self, path: str) -> str | None:
        """Return the value that a term requires `path` to equal, if there is such a term."""
        for term in self.terms:
            if term.path == path and not term.negated:
                return term.value
        return None


def parse_fields(text: str) -> FieldSelector:
    """Parse the `fieldSelector` query parameter."""
    terms: list[FieldTerm] = []
    for raw in re.split(r"(?<!\\),", text):
        if not raw:
            continue
        match = re.fullmatch(r"(.+?)(!=|==|=)(.*)", raw, flags=re.DOTALL)
        if match is None:
            msg = f"invalid selector: '{text}'; can't understand '{raw}'"
            raise bad_request(msg)
        value = re.sub(r"\\([\\,=])", r"\1", match[3])
        terms.append(FieldTerm(match[1], value, match[2] == "!="))
    return FieldSelector(tuple(terms))


def field_text(obj: Obj, path: str) -> str:
    """Read a field as selector text: absent is empty, booleans are `true` and `false`."""
    value: object = obj
    for part in path.split("."):
        if not isinstance(value, dict):
            return ""
        value = value.get(part)
    if value is None:
        return "false" if path in _BOOLEAN_FIELDS else ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


_BOOLEAN_FIELDS: Final = frozenset({"spec.unschedulable", "spec.hostNetwork"})
