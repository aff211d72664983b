# SPDX-License-Identifier: Apache-2.0
"""``hamictl scenario``: places the generated trace of a scenario file and checks its figures."""

from pathlib import Path
from typing import Final

import click
from msgspec import structs

from hamictl import options, output, scenarios
from hamictl.errors import EXIT_NO

_HEADINGS: Final = (
    "CASE",
    "CARDS",
    "PODS",
    "AT ONCE",
    "NEVER",
    "WAIT H",
    "MAKESPAN H",
    "BOOKED % MEAN",
    "PEAK",
    "MOVES",
)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--hours", type=click.FloatRange(min=0.1), help="Shorten the measured period.")
@options.format_option
def scenario(file: Path, hours: float | None, format_: str) -> None:
    """Place a scenario's pods over simulated time.

    The scheduler's core places the pods on cards of the file; no cluster is needed. Exits with 1 if
    a check fails.
    """
    known = scenarios.read(file)
    if hours is not None:
        known = structs.replace(known, hours=min(hours, known.hours))
    outcome = scenarios.play(known)
    if not output.structured(outcome, format_):
        rows = [
            [
                name,
                one.cards,
                one.arrivals,
                one.placed_at_once,
                one.never_placed,
                f"{one.wait_total_h:.1f}",
                f"{one.makespan_h:.2f}" if one.makespan_h else "-",
                f"{100 * one.booked_mean:.1f}",
                f"{100 * one.booked_peak:.1f}",
                one.moves,
            ]
            for name, one in outcome.figures.items()
        ]
        output.table(
            _HEADINGS,
            rows,
            empty="",
        )
        for one in outcome.checks:
            bounds = [f"at least {one.least:g}"] if one.least is not None else []
            bounds += [f"at most {one.most:g}"] if one.most is not None else []
            state = "ok" if one.ok else "FAILED"
            click.echo(f"{state}: {one.text}: {one.value:g} ({', '.join(bounds)})")
    if not outcome.ok:
        raise SystemExit(EXIT_NO)
