# SPDX-License-Identifier: Apache-2.0
"""``hamictl replay``: replays a stimulus log and compares every decision with the recorded one.

With ``--policy`` it places the log's pods again under other policies instead.
"""

from collections.abc import Sequence
from pathlib import Path

import click

from hami_common.errors import WireInvalid
from hami_core.replay.rerun import Report, rerun
from hamictl import options, output, policies, traces
from hamictl.errors import EXIT_GAP, EXIT_NO, InputRefused


@click.command()
@click.argument("log", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--skip-gaps", is_flag=True, help="Resume after a gap, from the next snapshot.")
@click.option(
    "--policy",
    multiple=True,
    help="Place the pods of the log again under this policy, and compare waits, packing and cost "
    "with the record: node=binpack|spread;device=…;weights=…. Repeat to compare policies.",
)
@options.prices_option
@options.format_option
def replay(
    log: tuple[Path, ...],
    skip_gaps: bool,  # noqa: FBT001 - click passes flags so
    policy: tuple[str, ...],
    prices_file: Path | None,
    format_: str,
) -> None:
    """Replay a stimulus log and compare every decision.

    LOG is a directory of segments, or some of its files.
    """
    if policy:
        policies.compare_log(traces.read_log(log), policy, prices_file, format_)
        return
    if prices_file is not None:
        raise click.UsageError("--prices needs --policy")
    report = run(log, skip_gaps=skip_gaps)
    if not output.structured(report, format_):
        _show(report, skip_gaps=skip_gaps)
    if report.difference is not None:
        raise SystemExit(EXIT_NO)
    if report.missing and not skip_gaps:
        raise SystemExit(EXIT_GAP)


def _show(report: Report, *, skip_gaps: bool) -> None:
    click.echo(
        f"{report.stimuli} stimuli, {report.decisions} decisions"
        f" in {report.segments} segments of {report.runs} runs"
    )
    for missing in report.missing:
        then = "skipped" if skip_gaps else "stopped there; --skip-gaps resumes after it"
        click.echo(
            f"gap in segment {missing.segment} after stimulus {missing.after}:"
            f" {missing.problem}; {then}"
        )
    different = report.difference
    if different is None:
        click.echo("Every decision is identical.")
        return
    where = f"stimulus {different.number}" if different.number else "its start"
    click.echo(f"First difference: segment {different.segment}, {where}, {different.kind}")
    click.echo(f"  stimulus: {different.what}")
    click.echo(f"  expected: {different.expected}")
    click.echo(f"  got:      {different.got}")


def run(paths: Sequence[Path], *, skip_gaps: bool) -> Report:
    """Replay a log."""
    try:
        return rerun(traces.items(paths), skip_gaps=skip_gaps)
    except WireInvalid as error:
        raise InputRefused(str(error)) from error
