# SPDX-License-Identifier: Apache-2.0
"""Puts a document of ``tests.bench.scheduler`` into docs/performance.md: a table and a chart.

Run as ``python -m tests.bench.scheduler_report FILE``. The table replaces what stands between two
marks in the page; the chart is drawn beside it as an SVG file, cost against nodes, both axes
logarithmic. Milliseconds, MiB.
"""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

DOCS = Path(__file__).parents[2] / "docs"
PAGE, CHART = DOCS / "performance.md", DOCS / "performance-scheduler.svg"
BEGIN, END = "<!-- scheduler: begin -->\n", "<!-- scheduler: end -->\n"

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 64, 190, 28, 48
LINES = (
    ("core", "kept", "one", "#1f6f8b", "filter, shape seen before"),
    ("core", "new", "one", "#2a9d5c", "filter, new shape"),
    ("core", "new", "two_vendors", "#8a5fb0", "filter, two vendors"),
    ("http", "new", "one", "#d9822b", "filter over HTTP, new shape"),
    ("echo", "new", "one", "#9a9a9a", "HTTP echo of the same names"),
    ("plain-loop", "new", "one", "#c0392b", "plain loops"),
)


def table(rows: Sequence[Row]) -> str:
    """Every mix at the largest number of nodes, with the spread of its calls."""
    nodes = max(row["nodes"] for row in rows)
    here = [row for row in rows if row["nodes"] == nodes]
    found = {(r["mix"], r["verb"], r["layer"], r["plans"]): r for r in here}
    lines = [
        (
            f"{nodes} nodes, {here[0]['devices']} devices, {here[0]['shares']} shares; "
            "least / 10th percentile / median / 99th percentile in ms. `x echo` is the median "
            "over HTTP divided by that of the handler that only decodes and echoes."
        ),
        "",
        (
            "| mix | verb | core, new shape | core, kept shape | core, processor time (new) "
            "| service, new shape | service, kept shape "
            "| HTTP, new shape | x echo | HTTP, kept shape | x echo | plain loops |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for mix in dict.fromkeys(row["mix"] for row in here):
        for verb in ("filter", "prioritize", "bind"):
            new = found[mix, verb, "core", "new"]
            cells = [
                _spread(new),
                _spread(found[mix, verb, "core", "kept"]),
                f"{new['cpu_p50_ms']:.2f}",
            ]
            for plans in ("new", "kept"):
                served = found.get((mix, verb, "service", plans))
                cells.append(_spread(served) if served else "")
            for plans in ("new", "kept"):
                over, echo = (found.get((mix, verb, layer, plans)) for layer in ("http", "echo"))
                cells += (
                    [_spread(over), f"{over['p50_ms'] / echo['p50_ms']:.2f}"]
                    if over and echo
                    else ["", ""]
                )
            loop = found.get((mix, verb, "plain-loop", "new"))
            cells.append(f"{loop['p50_ms']:.0f}" if loop else "")
            lines.append(f"| {mix} | {verb} | {' | '.join(cells)} |")
    resident = [row["rss_mib"] for row in here if row["layer"] == "http"]
    if resident:
        lines += [
            "",
            f"Resident memory of the serving process, all pods in it: {max(resident)} MiB.",
        ]
    return "\n".join(lines) + "\n"


def _spread(row: Row) -> str:
    return (
        f"{row['least_ms']:.2f} / {row['p10_ms']:.2f} / {row['p50_ms']:.2f} / {row['p99_ms']:.2f}"
    )


def growth(rows: Sequence[Row]) -> str:
    """Growth of the cost of one mix with the number of nodes."""
    counts = sorted({row["nodes"] for row in rows})
    lines = [
        "| filter, one container x one device, median ms | "
        + " | ".join(f"{count} nodes" for count in counts)
        + " |",
        "| --- |" + " --- |" * len(counts),
    ]
    for layer, plans, mix, _, label in LINES:
        values = _values(rows, layer, plans, mix)
        if len(values) == len(counts):
            lines.append(f"| {label} | " + " | ".join(f"{ms:.2f}" for _, ms in values) + " |")
    return "\n".join(lines) + "\n"


def _values(rows: Iterable[Row], layer: str, plans: str, mix: str) -> list[tuple[int, float]]:
    return sorted(
        (row["nodes"], row["p50_ms"])
        for row in rows
        if (row["layer"], row["plans"], row["mix"], row["verb"]) == (layer, plans, mix, "filter")
    )


def chart(rows: Sequence[Row]) -> str:
    """Median of filter against nodes, as SVG."""
    drawn = [(line, _values(rows, *line[:3])) for line in LINES]
    drawn = [(line, values) for line, values in drawn if len(values) > 1]
    if not drawn:
        raise SystemExit("a chart needs measurements at several numbers of nodes")
    counts = sorted({count for _, values in drawn for count, _ in values})
    costs = [cost for _, values in drawn for _, cost in values]
    low, high = math.floor(math.log10(min(costs))), math.ceil(math.log10(max(costs)))
    first, last = math.log10(counts[0]), math.log10(counts[-1])

    def x(count: float) -> float:
        return LEFT + (math.log10(count) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(cost: float) -> float:
        return TOP + (high - math.log10(cost)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="16">median of one filter call, ms (8 devices a node)</text>',
    ]
    for power in range(low, high + 1):
        parts += _rule(LEFT, y(10**power), WIDTH - RIGHT, y(10**power))
        parts.append(_text(LEFT - 6, y(10**power) + 4, f"{10**power:g}", anchor="end"))
    for count in counts:
        parts += _rule(x(count), TOP, x(count), HEIGHT - BOTTOM)
        parts.append(_text(x(count), HEIGHT - BOTTOM + 18, f"{count:,}", anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "nodes", anchor="middle"))
    ends = sorted((y(values[-1][1]), line, values) for line, values in drawn)
    below = 0.0
    for height, (*_, colour, label), values in ends:
        points = " ".join(f"{x(count):.1f},{y(cost):.1f}" for count, cost in values)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{x(count):.1f}" cy="{y(cost):.1f}" r="3" fill="{colour}"/>'
            for count, cost in values
        ]
        below = max(height + 4, below + 15)
        parts.append(_text(WIDTH - RIGHT + 8, below, label, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _rule(x1: float, y1: float, x2: float, y2: float) -> list[str]:
    return [f'<path d="M{x1:.1f} {y1:.1f} L{x2:.1f} {y2:.1f}" stroke="#e3e3e3"/>']


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#333333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def main() -> None:
    """Write the page and the chart."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("file", type=Path, help="document of tests.bench.scheduler")
    document = json.loads(parser.parse_args().file.read_text(encoding="utf-8"))
    rows: list[Row] = document["rows"]
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    load = ", ".join(map(str, document["load_average"]))
    about = f"Machine: {document['machine']}, shared; load average {load} at the end of the run."
    inside = f"\n{about}\n\n{table(rows)}\n{growth(rows)}\n"
    PAGE.write_text(before + BEGIN + inside + END + after, encoding="utf-8")
    CHART.write_text(chart(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
