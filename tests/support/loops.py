# SPDX-License-Identifier: Apache-2.0
"""Finds the loops of services over objects from outside, and checks that they isolate each object.

A loop over objects is an ``async for``, or a ``for`` that a ``while True`` reaches: inside it, or,
where the ``for`` awaits something, in a function of the module that it calls, at any depth. It
isolates its objects if its body hands them to a ``Quarantine``, itself or through a function of the
module that does.
"""

import ast
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ISOLATING: Final = frozenset({"run", "each", "call", "once", "failed"})
"""Methods of ``Quarantine``, and of its wrappers."""
OWNERS: Final = ("quarantine", "isolation")
"""Suffixes of the names of quarantines."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Loop(NamedTuple):
    """One loop over objects."""

    place: str
    """``<module>.<function>``, with the class where there is one."""
    line: int
    isolates: bool


def loops_of(path: Path, module: str) -> list[Loop]:
    """Return the loops over objects of one source file."""
    source = path.read_text()
    has_loops = "async for" in source or "while True" in source
    return loops_in(source, module) if has_loops else []


def loops_in(source: str, module: str) -> list[Loop]:
    """Return the loops over objects of a module's text."""
    functions = dict(_functions(ast.parse(source), module))
    reached = _reached(functions)
    isolating = {
        place.rpartition(".")[2] for place, function in functions.items() if _isolates(function)
    }
    found: list[Loop] = []
    for place, function in functions.items():
        own = list(_own(function))
        inside = {id(node) for loop in own if _is_endless(loop) for node in ast.walk(loop)}
        for node in own:
            if isinstance(node, ast.AsyncFor) or (
                isinstance(node, ast.For)
                and (id(node) in inside or (place in reached and _awaits(node)))
            ):
                is_through = not isolating.isdisjoint(_mentioned(node))
                found.append(Loop(place, node.lineno, isolates=_isolates(node) or is_through))
            elif isinstance(node, ast.comprehension) and node.is_async:
                found.append(Loop(place, function.lineno, isolates=False))
    return found


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, _Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function):
            yield f"{prefix}.{node.name}", node
            yield from _functions(node, f"{prefix}.{node.name}")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}.{node.name}")
        else:
            yield from _functions(node, prefix)


def _own(function: _Function) -> Iterator[ast.AST]:
    """All nodes of a function but those of functions inside it."""
    pending: deque[ast.AST] = deque(function.body)
    while pending:
        node = pending.popleft()
        yield node
        if not isinstance(node, _Function | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def _awaits(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Await) for part in ast.walk(node))


def _is_endless(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.While)
        and isinstance(node.test, ast.Constant)
        and bool(node.test.value)
    )


def _reached(functions: dict[str, _Function]) -> set[str]:
    """Places of functions that an endless loop of the module calls, at any depth."""
    by_name: dict[str, set[str]] = {}
    for place in functions:
        by_name.setdefault(place.rpartition(".")[2], set()).add(place)
    pending = [
        name
        for function in functions.values()
        for loop in _own(function)
        if _is_endless(loop)
        for name in _mentioned(loop)
    ]
    reached: set[str] = set()
    while pending:
        for place in by_name.get(pending.pop(), set()) - reached:
            reached.add(place)
            pending.extend(_mentioned(functions[place]))
    return reached


def _mentioned(node: ast.AST) -> Iterator[str]:
    """Names of functions and methods that a node calls, or hands to another call."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Name):
            yield part.id


def _isolates(loop: ast.AST) -> bool:
    for node in ast.walk(loop):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ISOLATING
            and ast.unparse(node.func.value).rpartition(".")[2].lstrip("_").endswith(OWNERS)
        ):
            return True
    return False
