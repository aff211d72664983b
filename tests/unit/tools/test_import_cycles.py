# SPDX-License-Identifier: Apache-2.0
"""No modules of a package under services/ and libs/ import each other in a circle.

Imports below ``TYPE_CHECKING`` and inside functions count: such a cycle is a dependency as well.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted(
    path.parent
    for folder in ("libs", "services")
    for path in ROOT.glob(f"{folder}/*/src/*/__init__.py")
)

Graph = dict[str, set[str]]


def name_of(path: Path, package: Path) -> str:
    """The dotted name of a module's file."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def targets(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """The modules of ``modules`` that a file imports: of ``from a import b``, ``a.b`` or ``a``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules:
                    yield whole
                elif node.module in modules:
                    yield node.module


def graph_of(package: Path) -> Graph:
    """Return the imports between the modules of one package."""
    files = {name_of(path, package): path for path in package.rglob("*.py")}
    return {
        name: set(targets(ast.parse(path.read_text(encoding="utf-8")), set(files))) - {name}
        for name, path in files.items()
    }


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Every module that ``start`` imports, directly or through others."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = graph[waiting.pop()] - found
        found |= fresh
        waiting.extend(fresh)
    return found


def cycles_of(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules in which each imports each, directly or through others."""
    reach = {name: reachable(graph, name) for name in graph}
    return {
        frozenset(other for other in reached if name in reach[other])
        for name, reached in reach.items()
        if name in reached
    }


@pytest.mark.timeout(30)  # parses whole packages
@pytest.mark.parametrize("package", SOURCES, ids=lambda path: path.name)
def test_package_has_no_import_cycle(package: Path) -> None:
    found = [" <-> ".join(sorted(cycle)) for cycle in cycles_of(graph_of(package))]
    assert not found, f"modules import each other: {'; '.join(sorted(found))}"


def test_imports_for_type_checking_and_inside_functions_count(tmp_path: Path) -> None:
    package = tmp_path / "acme"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "alone.py").write_text("import acme\nfrom acme import a\n")
    (package / "a.py").write_text("def f():\n    from acme import b\n")
    (package / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from acme.c import C\n"
    )
    (package / "c.py").write_text("import acme.a\n")
    assert cycles_of(graph_of(package)) == {frozenset({"acme.a", "acme.b", "acme.c"})}
