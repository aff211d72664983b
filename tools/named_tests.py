# SPDX-License-Identifier: Apache-2.0
"""Finds tests that a page or a catalog names, and the level at which each proves its statement.

A name is that of a file below ``tests/``, alone or with ``::function``, ``::Class`` or
``::Class::method``, as pytest takes it. Nothing is imported or run: the level follows from the
tier (``tests/<tier>/``), the marker ``real``, the imports of a real node, and the tests that
``tests/e2e/conftest.py`` keeps off the real control plane. A test that is skipped without a
condition, expected to fail, or marked ``gpu`` proves nothing here: results on a GPU are read from
``docs/gpu/`` by ``tools.gen_proof``.
"""

import ast
from enum import IntEnum
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NODE = "tests.cluster.node"
"""Package that starts kubelet with containerd."""
CLUSTERS = ("hami_sim.cluster", "hami_sim.demo")
"""Modules that start the services on the control plane that ``--plane`` selects."""
SELECTION = "tests/e2e/conftest.py"
NEVER_RUN = frozenset({"skip", "xfail", "gpu"})

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Level(IntEnum):
    """Closeness of a test to production, lowest first."""

    SIMULATED = 1
    """The code alone, or on simulated devices, driver libraries and Kubernetes API."""
    CONTROL_PLANE = 2
    """With kube-apiserver, kube-scheduler and etcd."""
    NODE = 3
    """With kubelet, containerd and runc as well."""
    POD = 4
    """From images that run as pods."""
    GPU = 5
    """On a device, with its vendor's driver."""


class UnknownTest(ValueError):
    """A name that no test bears, or a test that never runs; the text gives the reason."""


def level_of(name: str, *, root: Path = ROOT) -> Level:
    """Return the level of the named test; of a file or class, that of its lowest test.

    Raises ``UnknownTest``.
    """
    path, *parts = name.split("::")
    if not path.startswith("tests/") or not (root / path).is_file():
        raise UnknownTest(f"{name}: there is no file {path}")
    body = _tree(root, path).body
    found = _named(root, body, parts)
    if not found:
        raise UnknownTest(f"{name}: {path} has no test {'::'.join(parts)}".rstrip())
    marks = _marks(body)
    for _, own in found:
        _check_it_runs(name, marks | own)
    return min(_level(root, path, marks | own, function) for function, own in found)


def _check_it_runs(name: str, marks: frozenset[str]) -> None:
    never = sorted(marks & NEVER_RUN)
    if never:
        raise UnknownTest(f"{name}: marked {', '.join(never)}, so that no run proves it")


def _level(root: Path, path: str, marks: frozenset[str], function: str) -> Level:
    tier = path.split("/")[1]
    if tier == "install":
        return Level.POD
    if "real" in marks:
        on_node = any(module.startswith(NODE) for module in _imported(root, path))
        return Level.NODE if on_node else Level.CONTROL_PLANE
    if tier != "e2e":
        return Level.SIMULATED
    on_both = any(module.startswith(CLUSTERS) for module in _imported(root, path))
    if on_both and function not in _simulated_only(root):
        return Level.CONTROL_PLANE
    return Level.SIMULATED


def _named(root: Path, body: list[ast.stmt], parts: list[str]) -> list[tuple[str, frozenset[str]]]:
    """Return the named tests of a module or class, with the markers of their own."""
    found: list[tuple[str, frozenset[str]]] = []
    for node in body:
        wanted = not parts or getattr(node, "name", "") == parts[0]
        if isinstance(node, _Function) and node.name.startswith("test_") and wanted:
            found += [(node.name, _decorators(node))] if len(parts) <= 1 else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            # pytest collects the classes that a module imports.
            for one in node.names:
                if one.name.startswith("Test") and (not parts or one.name == parts[0]):
                    there = _tree(root, f"{str(node.module).replace('.', '/')}.py")
                    found += _named(root, there.body, [one.name, *parts[1:]])
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test") and wanted:
            marks = _decorators(node) | _marks(node.body)
            own = _named(root, node.body, parts[1:])
            if not own and node.bases and len(parts) <= 1:
                own = [(node.name, frozenset())]  # its tests are those of an imported class
            found += [(name, marks | more) for name, more in own]
    return found


def _decorators(node: _Function | ast.ClassDef) -> frozenset[str]:
    return frozenset().union(*(_markers(one) for one in node.decorator_list))


def _marks(body: list[ast.stmt]) -> frozenset[str]:
    """Return the markers that ``pytestmark`` gives to a module or class."""
    return frozenset().union(
        *(
            _markers(node.value)
            for node in body
            if isinstance(node, ast.Assign)
            and any(isinstance(one, ast.Name) and one.id == "pytestmark" for one in node.targets)
        )
    )


def _markers(expression: ast.expr) -> frozenset[str]:
    return frozenset(
        node.attr
        for node in ast.walk(expression)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "mark"
    )


@cache
def _tree(root: Path, path: str) -> ast.Module:
    return ast.parse((root / path).read_text(encoding="utf-8"), filename=path)


@cache
def _imported(root: Path, path: str) -> frozenset[str]:
    """Return the modules that a file imports, also through other files of ``tests/``."""
    seen, waiting = {path}, [path]
    found: set[str] = set()
    while waiting:
        names = _direct(root, waiting.pop())
        found |= names
        files = {f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")}
        new = {file for file in files - seen if (root / file).is_file()}
        seen |= new
        waiting += new
    return frozenset(found)


@cache
def _direct(root: Path, path: str) -> frozenset[str]:
    """Return the modules that a file imports itself, with the names from them."""
    found: set[str] = set()
    for node in _tree(root, path).body:
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return frozenset(found)


@cache
def _simulated_only(root: Path) -> frozenset[str]:
    """Return the end-to-end tests of which no case runs on the real control plane."""
    for node in _tree(root, SELECTION).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(one, ast.Name) and one.id == "ON_REAL_PLANE" for one in node.targets
        ):
            return frozenset(
                key.value
                for table in ast.walk(node.value)
                if isinstance(table, ast.Dict)
                for key, cases in zip(table.keys, table.values, strict=True)
                if isinstance(key, ast.Constant)
                and isinstance(key.value, str)
                and isinstance(cases, ast.Call)  # ``set()``, which is no literal
            )
    raise ValueError(f"{SELECTION} has no table ON_REAL_PLANE")
