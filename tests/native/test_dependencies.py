# SPDX-License-Identifier: Apache-2.0
"""The modules of the limiter depend on each other without a cycle.

A module is a source file with its header. It depends on the modules whose headers it includes, and
on those that define the symbols its object file leaves undefined. Takes about 5 s.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tools import build_native

Graph = Mapping[str, Mapping[str, str]]
"""For each module the modules it depends on, each with a symbol or header that it uses."""

TOP = {"init", "resolve_dlsym"}
"""Entry points, on which no module depends but the lists of all hooks."""
LISTS = {"resolve", "gate_hooks"}

_INCLUDE = re.compile(r'^#include "([a-z_0-9]+)\.(?:h|def)"', re.MULTILINE)


def _symbols(built: Path) -> Iterator[tuple[bool, str]]:
    """Each global symbol of an object file: whether it is defined there, and its name."""
    listing = subprocess.run(
        ["nm", "-g", "--format=posix", built], check=True, capture_output=True, text=True
    ).stdout
    for line in listing.splitlines():
        name, kind = line.split()[:2]
        yield kind != "U", name


def graph_of(sources: Path, scratch: Path) -> Graph:
    """The dependencies of the files in this folder, which are compiled into ``scratch``."""
    graph: dict[str, dict[str, str]] = {}
    for path in sorted(sources.iterdir()):
        edges = graph.setdefault(path.stem, {})
        for included in _INCLUDE.findall(path.read_text()):
            if included != path.stem:
                edges[included] = f'#include "{included}"'

    def compiled(source: Path) -> Path:
        built = scratch / f"{source.stem}.o"
        command = [*build_native.compiler(), *build_native.LANGUAGE, "-I", str(sources)]
        subprocess.run([*command, "-c", source, "-o", built], check=True)
        return built

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, sorted(sources.glob("*.c"))))
    symbols = {built.stem: list(_symbols(built)) for built in objects}
    owner = {name: module for module, pairs in symbols.items() for own, name in pairs if own}
    for module, pairs in symbols.items():
        for own, name in pairs:
            if not own and name in owner:
                graph[module][owner[name]] = name
    return graph


def cycle_in(graph: Graph) -> str:
    """A shortest cycle as ``a -(symbol)-> b -(symbol)-> a``; empty if there is none."""
    shortest: list[str] = []
    for start in graph:
        paths = [[start]]
        seen = {start}
        while paths and (not shortest or len(paths[0]) < len(shortest)):
            path = paths.pop(0)
            following = graph.get(path[-1], {})
            if start in following:
                shortest = path
                break
            paths += [[*path, module] for module in following if module not in seen]
            seen |= set(following)
    if not shortest:
        return ""
    steps = zip(shortest, [*shortest[1:], shortest[0]], strict=True)
    return shortest[0] + "".join(f" -({graph[a][b]})-> {b}" for a, b in steps)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return graph_of(build_native.SOURCES, tmp_path_factory.mktemp("objects"))


def test_modules_have_no_cycle(graph: Graph) -> None:
    assert cycle_in(graph) == ""


def test_modules_are_complete(graph: Graph) -> None:
    assert graph["memory"]["pointer"]
    assert graph["account"]["watch"] == "watch_start"
    assert graph["gate_hooks"]["memory"]
    assert not any(TOP & set(edges) for module, edges in graph.items() if module not in LISTS)


def test_a_cycle_is_named(tmp_path: Path) -> None:
    sources, scratch = tmp_path / "src", tmp_path / "objects"
    sources.mkdir()
    scratch.mkdir()
    (sources / "a.h").write_text("int a(void);\n")
    (sources / "a.c").write_text('#include "a.h"\nint c(void);\nint a(void) { return c(); }\n')
    (sources / "b.c").write_text('#include "a.h"\nint b(void);\nint b(void) { return a(); }\n')
    assert cycle_in(graph_of(sources, scratch)) == ""
    (sources / "c.c").write_text("int b(void);\nint c(void);\nint c(void) { return b(); }\n")
    assert cycle_in(graph_of(sources, scratch)) == "a -(c)-> c -(b)-> b -(a)-> a"
