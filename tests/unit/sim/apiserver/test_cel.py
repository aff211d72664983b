# SPDX-License-Identifier: Apache-2.0
"""The CEL subset: what it computes, and that it refuses what it does not know."""

from typing import Any

import pytest

from hami_sim.apiserver.cel import CelError, Program

POD = {
    "metadata": {"labels": {"app": "x"}, "annotations": {}},
    "spec": {
        "containers": [
            {"name": "a", "resources": {}},
            {"name": "b", "resources": {"limits": {"nvidia.com/gpu": "1", "cpu": "2"}}},
        ],
        "initContainers": [],
    },
}
ENV = {"object": POD, "oldObject": None, "request": {"operation": "CREATE"}}
EXISTS = "object.spec.containers.exists(c, %s)"
NAMES = frozenset({"object", "oldObject", "request"})


def run(text: str) -> Any:
    return Program(text, NAMES)(ENV)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1 + 2 * 3 == 7", True),
        ("(1 + 2) * 3", 9),
        ("7 / 2", 3),
        ("-7 / 2", -3),
        ("-7 % 2", -1),
        ("7.0 / 2.0", 3.5),
        ("'a' + \"b\"", "ab"),
        ("r'\\d' == '\\\\d'", True),
        ("'it\\'s' == \"it's\"", True),
        ("[1, 2] + [3]", [1, 2, 3]),
        ("{'k': 1}['k']", 1),
        ("[10, 20][1]", 20),
        ("1 in [1, 2]", True),
        ("'k' in {'k': null}", True),
        ("true ? 'y' : 'n'", "y"),
        ("!true || !false", True),
        ("1 == 1.0", True),
        ("true == 1", False),
        ("null == object.metadata", False),
        ("oldObject == null", True),
        ("size('abc') + size([1]) + size({})", 4),
        ("object.spec.containers.size() == 2", True),
        ("has(object.metadata.labels)", True),
        ("has(object.metadata.labels.nope)", False),
        ("object.spec.containers.map(c, c.name)", ["a", "b"]),
        ("object.spec.containers.filter(c, c.name == 'a').size()", 1),
        ("object.spec.containers.exists_one(c, c.name == 'a')", True),
        ("object.spec.containers.all(c, c.name.startsWith('x'))", False),
        ("[1, 2, 3].map(i, i > 1, i * 10)", [20, 30]),
        ("'nvidia.com/gpu'.endsWith('gpu') && 'abc'.contains('b')", True),
        ("'a-1'.matches('^[a-z]-[0-9]$')", True),
        ("'a,b'.split(',')", ["a", "b"]),
        ("'hami-limits-main'.substring(12)", "main"),
        ("[1, 2, 3].sum()", 6),
        ("[].sum()", 0),
        ("[[1], [2, 3]].map(x, size(x)).sum()", 3),
        ("string(3) + string(true)", "3true"),
        ("int('42') + int(1.9)", 43),
        ("object.?spec.?nope.orValue('none')", "none"),
        ("object.?spec.?containers.hasValue()", True),
        ("{'a': 1}[?'b'].orValue(2)", 2),
        ("request.operation == 'CREATE' // trailing comment", True),
        (
            EXISTS % "has(c.resources.limits) && 'nvidia.com/gpu' in c.resources.limits",
            True,
        ),
        (
            EXISTS % "c.?resources.?limits.orValue({}).exists(k, k.startsWith('nvidia.com/'))",
            True,
        ),
        ("object.spec.initContainers.exists(c, true)", False),
    ],
)
def test_expressions(text: str, want: Any) -> None:
    assert run(text) == want


@pytest.mark.parametrize(
    "text",
    [
        "object.nope",
        "object.spec.containers[9]",
        "1 / 0",
        "'a' < 1",
        "1 + 'a'",
        "object.spec.containers.startsWith('x')",
        "1 ? 2 : 3",
        "has(oldObject.metadata)",
        "1 in 2",
    ],
)
def test_evaluation_errors_are_errors(text: str) -> None:
    with pytest.raises(CelError):
        run(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "nobody",
        "object.spec.containers.exists(c)",
        "foo(1)",
        "'abc'.reverse()",
        "has(object)",
        "has(object.spec.containers[0])",
        "'unterminated",
        "1 2",
        "object.spec.containers.exists(c, d)",
        "a b",
        "#",
        "for",
        "authorizer.group('x')",
    ],
)
def test_what_is_not_supported_does_not_compile(text: str) -> None:
    with pytest.raises(CelError):
        Program(text, NAMES)


def test_and_or_absorb_errors_of_the_other_side() -> None:
    assert run("object.nope || true") is True
    assert run("true || object.nope") is True
    assert run("object.nope && false") is False
    with pytest.raises(CelError, match="no such key: nope"):
        run("object.nope && true")


def test_exists_and_all_absorb_errors_once_decided() -> None:
    assert run("object.spec.containers.exists(c, c.resources.limits.cpu == '2')") is True
    with pytest.raises(CelError, match="no such key: limits"):
        run("object.spec.containers.exists(c, c.resources.limits.cpu == '3')")


def test_decide_wants_a_truth_value() -> None:
    with pytest.raises(CelError, match="want bool"):
        Program("1", NAMES).decide(ENV)
